"""Text generation with a causal model: three modes continue sequences token by token and agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lion.layers.mixers import mixers_of
from lion.layers.mixers.softmax import CachedAttention, reserve
from lion.models.gpt import GPT
from lion.ops.settings import number
from lion.samples.seeds import derive, uniform

MODES = {
    "attention": "recompute the whole sequence for each token",
    "kv": "keep the keys and values of all tokens (softmax, fox)",
    "rnn": "keep a state of constant size (linear mixers)",
}


PIECE = 256  # tokens of a prompt that are processed at once
ROOM = 256  # tokens by which a KV cache grows at once, at most


def streaming_mode(model: GPT) -> str:
    """Return the mode in which a model continues from a state."""
    if isinstance(mixers_of(model)[0], CachedAttention):
        return "kv"
    return "rnn"


@dataclass(frozen=True)
class Sampling:
    """Settings that control how the next token is sampled.

    Logits are divided by `temperature` (0: take the most likely token, without sampling). Then only the `top_k` most
    likely tokens remain, and of these the smallest set that holds `top_p` of the probability.

    Raises:
        ValueError: A temperature below 0, `top_k` below 1, or `top_p` outside 0 to 1.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        number("temperature", self.temperature, Real, 0)
        number("top_p", self.top_p, Real, 0, 1)
        if self.top_k is not None:
            number("top_k", self.top_k, Integral, 1)

    def choose(self, logits: Tensor, chance: Tensor) -> Tensor:
        """Choose a token (B,) for each row of logits (B, vocabulary), from uniform draws `chance` (B,) in [0, 1)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = (logits.double() - logits.amax(-1, keepdim=True)) / self.temperature  # at most 0, however cold
        if self.top_k is None:
            ranked, ids = scaled.sort(dim=-1, descending=True, stable=True)
        else:
            ranked, ids = scaled.topk(min(self.top_k, scaled.shape[-1]))
        shares = ranked.softmax(-1)
        held = shares.cumsum(-1) - shares < self.top_p
        held[:, 0] = True  # always keep the most likely token; with `top_p` 0 only this one
        shares = shares * held
        up_to = shares.cumsum(-1)
        drawn = chance[:, None].double() * up_to[:, -1:]
        place = torch.searchsorted(up_to, drawn, right=True)
        return ids.gather(1, place.clamp(max=ids.shape[1] - 1))[:, 0]


@dataclass
class Continuation:
    """Sequences that are being continued, one per prompt and of any lengths, and the logits of their next tokens.

    Args:
        model: Model in evaluation mode.
        mode: One of `MODES`.
        rows: Token ids of each sequence.
        logits: Logits (B, vocabulary) after the last token of each row.
        state: State of the model after the last token; None in mode attention.
    """

    model: GPT
    mode: str
    rows: list[list[int]]
    logits: Tensor
    state: Any = None
    room: int = 0  # tokens that still fit into the state

    @classmethod
    def of(
        cls,
        model: GPT,
        mode: str,
        prompts: Sequence[Sequence[int]],
        reader: Callable[..., tuple[Tensor, Any]] | None = None,
    ) -> Self:
        """Start from prompts alone, which `reader` reads in place of `read`.

        Raises:
            ValueError: The model does not have this mode, or a prompt is empty, longer than the position embeddings, or
                holds other values than ids of the vocabulary.
        """
        streaming = streaming_mode(model)
        if mode not in ("attention", streaming):
            raise ValueError(f"mode: mixer {model.config.mixer!r} supports attention and {streaming}, got {mode!r}")
        rows = rows_of(model, prompts)
        if mode == "attention":
            return cls(model, mode, rows, recomputed(model, rows))
        check_room(model, rows, 0)
        reader = reader or read
        logits, state = reader(model, rows)
        return cls(model, mode, rows, logits, state)

    def generate(self, count: int, sampling: Sampling, seed: int) -> Iterator[list[int]]:
        """Sample the next token of every row `count` times, append it to `rows`, and yield the tokens.

        A draw depends only on (seed, row, place). So a continuation from a stored state gives the same tokens as one
        that was never interrupted.

        Raises:
            ValueError: There are not enough position embeddings.
        """
        if self.mode != "attention":
            check_room(self.model, self.rows, count)  # before the first token is asked for
        return self._tokens(count, sampling, seed)

    def _tokens(self, count: int, sampling: Sampling, seed: int) -> Iterator[list[int]]:
        for left in range(count, 0, -1):
            if not self.room:
                self.room = min(ROOM, left)
                self.state = reserve(self.state, self.room + 1)  # + 1: a full cache would need another compiled graph
            keys = [derive(seed, i, len(row)) for i, row in enumerate(self.rows)]
            chance = uniform(torch.tensor(keys, device=self.logits.device), 1)[:, 0]
            chosen = sampling.choose(self.logits, chance)
            self.append(chosen)
            yield chosen.tolist()

    @torch.inference_mode()
    def append(self, tokens: Tensor) -> None:
        """Append the next token (B,) to every row and update logits and state."""
        chosen = tokens.tolist()
        if self.mode == "attention":
            rows = [[*row, token] for row, token in zip(self.rows, chosen)]
            self.logits = recomputed(self.model, rows)
        else:
            logits, self.state = self.model.step(tokens[:, None], self.state)
            self.logits = logits[:, -1]
            self.room = max(0, self.room - 1)
        for row, token in zip(self.rows, chosen):  # after the model has run: a failed step changes nothing
            row.append(token)


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    mode: str | None = None,
    sampling: Sampling = Sampling(),
    seed: int = 0,
) -> list[list[int]]:
    """Continue prompts of token ids by `count` tokens each; return the prompts with their continuations.

    Args:
        model: Causal model in evaluation mode (`lion.load`).
        prompts: Token ids of each prompt, of any lengths; lists, or integer tensors.
        count: Number of new tokens.
        mode: "attention", "kv" or "rnn"; by default the mode that streams, "rnn" or, for softmax, "kv".
        sampling: A `lion.inference.text.Sampling`, with `temperature`, `top_k` and `top_p`.
        seed: Seed of the draws.

    Raises:
        ValueError: Another model than a GPT, a prompt that is empty or not of token ids, a mode that the model does not
            have, a negative `count`, or too few position embeddings.

    Example:
        >>> from lion.models.gpt import GPT, GPTConfig
        >>> model = GPT(GPTConfig(mixer="lion_s", dim=16, depth=1, num_heads=2), vocabulary=50, length=8).eval()
        >>> [row[:3] for row in lion.generate(model, [[1, 2, 3], [4, 5, 6]], 2)]
        [[1, 2, 3], [4, 5, 6]]
    """
    if not isinstance(model, GPT):
        raise ValueError(f"model: expected a causal language model (gpt), got {type(model).__name__}")
    number("count", count, Integral, 0)
    continuation = Continuation.of(model, mode or streaming_mode(model), prompts)
    for _ in continuation.generate(count, sampling, seed):
        pass
    return continuation.rows


def rows_of(model: GPT, prompts: Any) -> list[list[int]]:
    """Return prompts, which may be tensors, as lists of token ids.

    Raises:
        ValueError: No prompts, an empty prompt, or values that are not ids of the model's vocabulary.
    """
    vocabulary = model.vocabulary
    rows = []
    for prompt in prompts:
        if hasattr(prompt, "tolist"):  # of PyTorch or NumPy
            prompt = prompt.tolist()
        rows.append(prompt)
    for row in rows:
        if not isinstance(row, (list, tuple)):
            raise ValueError(f"prompts: expected the token ids of each prompt, such as [[1, 2, 3]], got {row!r} in it")
        for token in row:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocabulary:
                raise ValueError(f"prompts: expected token ids from 0 to {vocabulary - 1}, got {token!r}")
    if not rows or not all(rows):
        raise ValueError("prompt: expected at least one token")
    return [list(row) for row in rows]


def check_room(model: GPT, rows: list[list[int]], count: int) -> None:
    """Check that the position embeddings suffice for `count` more tokens.

    Raises:
        ValueError: They do not suffice.
    """
    longest = max(map(len, rows))
    if model.longest is not None and longest + count > model.longest:
        raise ValueError(
            f"tokens: {longest} and {count} more are beyond the model's {model.longest} positions; take "
            f"{max(0, model.longest - longest)} at most, or use mode attention, which reads the last {model.longest}"
        )


@torch.inference_mode()
def read(model: GPT, rows: list[list[int]]) -> tuple[Tensor, Any]:
    """Compute the logits (B, vocabulary) after rows, and the state after them.

    Rows are processed in pieces: memory beyond the state does not grow with their length.
    """
    tokens, valid = padded(rows, model.tokens.weight.device)
    state = reserve(model.initial_state(len(rows)), tokens.shape[1])
    last = torch.zeros(len(rows), model.config.dim, dtype=model.tokens.weight.dtype, device=tokens.device)
    with torch.compiler.set_stance("force_eager"):  # only the step of one token is compiled
        for piece, real in zip(tokens.split(PIECE, 1), valid.split(PIECE, 1)):
            x, state = model.encode_next(piece, state, None if real.all() else real)
            last = torch.where(real.any(1, keepdim=True), last_valid(x, real), last)
    return model.logits(last), state


@torch.inference_mode()
def recomputed(model: GPT, rows: list[list[int]]) -> Tensor:
    """Compute the logits (B, vocabulary) after rows, of which only the end is read if position embeddings are fewer."""
    longest = model.longest or max(map(len, rows))
    tokens, valid = padded([row[-longest:] for row in rows], model.tokens.weight.device)
    x = model.encode(tokens)
    last = last_valid(x, valid)  # padding comes after the last token, which does not see it
    return model.logits(last)


def padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows and return tokens (B, L) and their mask (B, L), False for padding."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    tokens = pad_sequence(ids, batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(tokens.shape[1], device=device) < lengths[:, None]


def last_valid(x: Tensor, valid: Tensor) -> Tensor:
    """Return x (B, L, dim) at the last valid token of each row, (B, dim); rows without one give meaningless values."""
    return x[torch.arange(len(x), device=x.device), valid.sum(1) - 1]
