"""Generate text from prompts with a causal language model, token by token.

    ./run.sh generate RUN --prompt TEXT [--prompt TEXT ..] [--mode attention|kv|rnn] [--tokens N]
        [--temperature T] [--top-k K] [--top-p P] [--seed S] [--state FILE] [--processes N] [--eager]

Text is printed to stdout as it is generated. Several prompts are continued in one batch: the first one is printed as it
is generated, the others afterwards. --state stores the state at the end; the same command without --prompt resumes from
it, and prints the text that one longer call would have printed. Prompts are read in pieces, so that memory does not
grow with their length. With --processes, several processes read the prompts, in turn; the first one then generates. If
the recipe compiles, the computation of each token is compiled with the first token.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from lion.config import ConfigError
from lion.files import write_atomic
from lion.inference.split import read_in_turn
from lion.inference.text import Continuation, Sampling, read, streaming_mode
from lion.layers.mixers.softmax import reserve
from lion.models.gpt import GPT
from lion.runs import LoadedRun, open_run
from lion.trainer.compilation import compile_blocks, compile_steps
from lion.trainer.runtime import catch_signals
from tools import options
from tools.cli import check_folder, run_command, say
from tools.compose import check_finite, digest, open_tokenizer_of, runtime_of
from tools.cost import duration_text
from tools.launch import Machines, launch
from tools.processes import first_line
from tools.tables import digits

UNFINISHED, LONGEST = "\ufffd", 4  # decoded text of an incomplete character; most tokens of one character


def main(argv: list[str]) -> int:
    args = options.read("generate", argv)
    check_request(args)
    loaded = open_run(args.run, checkpoint=args.checkpoint)
    if not isinstance(loaded.model, GPT):
        raise ConfigError(
            f"{loaded.folder}: task {loaded.recipe.task.name!r} generates no text, expected a run of causal_lm"
        )
    if args.processes > 1:
        check_reading(args, loaded)
        if "RANK" not in os.environ:
            return launch(Machines(args.processes), argv, "tools.generate", again="starts anew")
    tokenizer = open_tokenizer_of(loaded, args.overrides)
    runtime = runtime_of(loaded.recipe)
    model = loaded.model.to(runtime.device)
    try:
        text = begin(args, model, tokenizer) if args.prompt else read_state(args, loaded)
        if not runtime.main:
            return 0
        begun = len(text.rows[0])
        if loaded.recipe.trainer.compile and not args.eager:
            compile_mode(model, text.mode)
        shown = args.prompt or [""] * len(text.rows)
        complete = write(text, shown, args, tokenizer.decode, loaded.folder)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    except OSError:  # the reader of standard output is gone: the generated text is stored all the same
        if args.state and len(text.rows[0]) > begun:
            write_state(args.state, text)
        raise
    if args.state:
        write_state(args.state, text)
    if complete:
        return 0
    return 130


def compile_mode(model: GPT, mode: str) -> None:
    """Compile the computation that a mode repeats for each token, in one graph for all tokens."""
    if mode == "attention":
        compile_blocks(model, dynamic=True)
    else:
        compile_steps(model)


def check_request(args: Any) -> None:
    """Check the options --prompt and --state.

    Raises:
        ConfigError: There is neither a prompt nor a stored state, there are both, or the state cannot be stored.
    """
    there = args.state is not None and args.state.exists()
    if not args.prompt and not there:
        missing = "--prompt is missing"
        if args.state:
            missing = f"no such state {args.state}, and no --prompt to begin one"
        raise ConfigError(f"run.sh generate: {missing}")
    if args.state is not None:  # otherwise the state would be lost at the end
        check_folder("--state", args.state.parent)
    if there and not args.state.is_file():
        raise ConfigError(f"--state: {args.state} is not a file")
    if args.prompt and there:
        raise ConfigError(
            f"--state: {args.state} exists already; resume from it without --prompt, or name another file"
        )


def check_reading(args: Any, loaded: LoadedRun) -> None:
    """Check that several processes can read the prompts.

    Raises:
        ConfigError: There is nothing to read, or the mode keeps no state of a fixed size.
    """
    if not args.prompt:
        raise ConfigError("--processes: several processes read prompts, and a stored state continues without any")
    mode = args.mode or streaming_mode(loaded.model)
    if mode != "rnn":
        raise ConfigError(f"--processes: mode {mode} has no state of a fixed size to pass on, use one process")


def begin(args: Any, model: GPT, tokenizer: Any) -> Continuation:
    """Start the continuation of the prompts of the command line; several processes read them together."""
    before, _ = tokenizer.frame
    prompts = [before + tokenizer.encode(prompt) for prompt in args.prompt]
    mode = args.mode or streaming_mode(model)
    if args.processes == 1:
        return Continuation.of(model, mode, prompts)
    text = Continuation.of(model, mode, prompts, partial(read_in_turn, group=dist.group.WORLD))
    dist.destroy_process_group()
    return text


def write(
    text: Continuation, prompts: Sequence[str], args: Any, decode: Callable[[list[int]], str], folder: Path
) -> bool:
    """Generate, and print each sequence after its prompt.

    Returns:
        Whether all tokens were generated; False if a signal stopped the generation.

    Raises:
        ConfigError: The model of the run in `folder` has diverged.
    """
    check_finite(text.logits, folder)
    several = len(prompts) > 1
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    begun = [len(row) for row in text.rows]
    first, *others = [Decoder(decode, row, resumed=not args.prompt) for row in text.rows]
    made = text.generate(args.tokens, sampling, args.seed)
    show(f"[1] {prompts[0]}" if several else prompts[0])
    clock = [time.perf_counter()]
    stop = Stop()
    with catch_signals(stop, "stopping after this token"):
        try:
            for tokens in made:
                show(first.add(tokens[0]))
                check_finite(text.logits, folder)
                clock.append(time.perf_counter())
                if stop.stopping:
                    break
        except RuntimeError:
            if not stop.stopping:  # the same signal has stopped the C++ compiler
                raise
    written = len(clock) - 1
    stored = args.state is not None
    show(first.end(stored) + "\n")
    for i, (prompt, own) in enumerate(zip(prompts[1:], others), 1):
        continued = own.add(*text.rows[i][begun[i] :])
        show(f"[{i + 1}] {prompt}{continued}{own.end(stored)}\n")
    kept = sum(x.nbytes for x in tree_leaves(reserve(text.state, 0)) if torch.is_tensor(x))
    each = [after - before for before, after in itertools.pairwise(clock)]
    spent = ""
    if each:
        spent += f", the first in {duration_text(each[0])}"
    if len(each) > 1:
        spent += f", then {1000 * statistics.median(each[1:]):.2f} ms per token"
    say(f"mode {text.mode}: {written} tokens{spent}; state {digits(kept / 2**20)} MiB")
    return written == args.tokens


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Decoder:
    """An incremental decoder of tokens to text. Tokens of an incomplete character wait for the missing bytes.

    Tokens are decoded after those `before` them, because some decoders drop the blank before the first token. If the
    text is `resumed`, a character that is incomplete at the end of `before` has not been shown, and waits.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], before: Sequence[int] = (), *, resumed: bool = False
    ) -> None:
        self.decode = decode
        self.before = list(before[-2 * LONGEST :])
        self.waiting: list[int] = []
        while resumed and decode(self.before).endswith(UNFINISHED) and len(self.waiting) < LONGEST - 1:
            self.waiting.insert(0, self.before.pop())

    def add(self, *tokens: int) -> str:
        self.waiting += tokens
        if self.text().endswith(UNFINISHED) and len(self.waiting) < LONGEST:
            return ""
        return self.rest()

    def text(self) -> str:
        shown = self.decode(self.before)
        return self.decode(self.before + self.waiting)[len(shown) :]

    def end(self, stored: bool) -> str:
        """Return the incomplete character at the end, unless the text is `stored` and a later call completes it."""
        if stored and self.text().endswith(UNFINISHED):
            return ""
        return self.rest()

    def rest(self) -> str:
        text = self.text()
        self.before = (self.before + self.waiting)[-LONGEST:]
        self.waiting = []
        return text


class Stop:
    """A flag that is set by a signal to stop."""

    stopping = False


def write_state(path: Path, text: Continuation) -> None:
    """Store the state of a continuation: a SHA-256 digest, followed by the data for `read_state` from torch.save."""
    held = {
        "mode": text.mode,
        "rows": text.rows,
        "logits": text.logits,
        "state": text.state,
        "weights": digest(text.model),
    }
    file = io.BytesIO()
    torch.save(tree_map_only(torch.Tensor, Tensor.cpu, held), file)
    content = file.getvalue()
    write_atomic(path, lambda file: file.write(hashlib.sha256(content).digest() + content))


def read_state(args: Any, loaded: LoadedRun) -> Continuation:
    """Read the state that `write_state` has stored.

    Raises:
        ConfigError: The file is damaged, no state, or a state of another model or mode.
    """
    path = args.state
    model = loaded.model
    raw = path.read_bytes()
    if hashlib.sha256(raw[32:]).digest() != raw[:32]:
        raise ConfigError(f"--state: {path} is damaged, or not a state of ./run.sh generate")
    try:
        held = torch.load(io.BytesIO(raw[32:]), map_location=model.tokens.weight.device, weights_only=True)
    except Exception as error:  # the errors of torch.load share no type
        raise ConfigError(f"--state: {path} cannot be read ({first_line(error)})") from None
    if not isinstance(held, dict) or held.keys() != {"mode", "rows", "logits", "state", "weights"}:
        raise ConfigError(f"--state: {path} was written by another version of ./run.sh generate")
    if held["weights"] != digest(model):
        raise ConfigError(
            f"--state: {path} belongs to other weights than the {args.checkpoint!r} checkpoint of {loaded.folder}"
        )
    if held["mode"] not in ("attention", streaming_mode(model)):
        raise ConfigError(f"--state: {path} is of mode {held['mode']!r}, which {loaded.folder} does not have")
    if args.mode not in (None, held["mode"]):
        raise ConfigError(f"--mode: {path} is of mode {held['mode']}, got {args.mode}")
    text = Continuation(model, held["mode"], held["rows"], held["logits"], held["state"])
    try:
        check_continuation(text)
    except ValueError as error:
        raise ConfigError(f"--state: {path} {error} of {loaded.folder}") from None
    return text


def check_continuation(text: Continuation) -> None:
    """Check that rows, logits and state are those of the model.

    Raises:
        ValueError: They are not; the message says what there is instead.
    """
    model, rows, logits = text.model, text.rows, text.logits
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise ValueError("holds no rows of tokens")
    if any(type(token) is not int or not 0 <= token < model.vocabulary for row in rows for token in row):
        raise ValueError("holds token ids outside of the vocabulary")
    if not torch.is_tensor(logits) or logits.shape != (len(rows), model.vocabulary) or not logits.is_floating_point():
        raise ValueError(f"holds no logits of {len(rows)} rows for the vocabulary")
    if text.mode == "attention":
        same = text.state is None
    else:
        lengths = [len(row) for row in rows]
        try:
            same = described(text.state) == usual_state(model, len(rows), max(lengths))
            same = same and text.state.position.tolist() == lengths
        except (AttributeError, TypeError, ValueError, LookupError, RuntimeError):  # no tensors, or no cache
            same = False
    if not same:
        raise ValueError(f"holds no state of {len(rows)} rows in mode {text.mode}")


def usual_state(model: GPT, rows: int, length: int) -> tuple[Any, ...]:
    """Describe the state after `length` tokens in every row: caches grow by the same sizes with each token."""
    _, state = read(model, [[0]] * rows)
    _, later = read(model, [[0, 0]] * rows)
    structure, dtypes, shapes = described(state)
    _, _, longer = described(later)
    grown = []
    for before, after in zip(shapes, longer):
        grown.append([a + (length - 1) * (b - a) for a, b in zip(before, after)])
    return structure, dtypes, grown


def described(state: Any) -> tuple[Any, ...]:
    """Return the structure of a state, and the types and the shapes of its tensors, without room in caches."""
    leaves, structure = tree_flatten(reserve(state, 0))
    return structure, [x.dtype for x in leaves], [list(x.shape) for x in leaves]


if __name__ == "__main__":
    run_command(main)
