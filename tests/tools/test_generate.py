"""Tests of `./run.sh generate`: streaming, several prompts, all modes, and resuming from a file."""

import argparse
import hashlib
import io
import os
import re
import shutil
import signal

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map

from data.text.tokenizers import make_tokenizer
from lion.config import ConfigError
from lion.inference.text import Continuation
from lion.runs import open_run
from lion.trainer.checkpoint_files import STATE, load_state, write_manifest
from lion.trainer.compilation import missing_compiler
from tests.helpers import here, printed, refuse, trained
from tests.processes import in_ranks
from tools import generate
from tools.generate import Decoder

TEXT = "the cat sat on the mat. the dog sat on the log. a hat, a bat; what of that?\n" * 30


def small_run(folder, mixer):
    file = folder / "text.txt"
    file.write_text(TEXT)
    path = folder / f"{mixer}.yaml"
    path.write_text(f"""
task: {{name: causal_lm}}
data: {{name: text, path: {file}, tokenizer: characters, pack: windows, length: 33, split: tail, val_split: 0.1}}
model: {{mixer: {mixer}, dim: 16, depth: 2, num_heads: 2, init_std: 0.3}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 8, steps: 4, eval_every: 4, save_every: 4, compile: false, device: cpu}}
run: {{root: {folder / "runs"}}}
""")
    return trained(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LION_DATA", f"{folder}/data")
        yield {mixer: small_run(folder, mixer) for mixer in ("softmax", "lion_s")}


def text_of(capsys, *args):
    return printed(capsys, "generate", *args)


@pytest.mark.parametrize("mixer, mode", [("softmax", "kv"), ("lion_s", "rnn")])
@pytest.mark.slow
def test_modes_write_the_same_text(runs, capsys, mixer, mode):
    call = ["generate", runs[mixer], "--prompt", "the ", "--tokens", 20]
    greedy = [*call, "--temperature", 0]
    assert here(*greedy) == 0
    text, said = capsys.readouterr()
    assert text.startswith("the ") and len(text) == 4 + 20 + 1 and set(text) <= set(TEXT)
    assert f"mode {mode}: 20 tokens" in said
    assert printed(capsys, *greedy, "--mode", "attention") == text
    drawn = [*call, "--seed", 3, "--top-k", 9, "--top-p", 0.9]
    assert printed(capsys, *drawn) == printed(capsys, *drawn, "--mode", "attention") != text


def test_the_reported_state_is_the_state_used(runs, capsys):
    assert here("generate", runs["softmax"], *["--prompt", "the "] * 100, "--tokens", 12) == 0
    said = capsys.readouterr().err
    # float32 keys and values of 16 channels, and a flag, for 16 tokens in 2 blocks
    kept = 100 * 16 * 2 * (2 * 16 * 4 + 1)
    assert f"state {kept / 2**20:.2f} MiB" in said


@pytest.mark.parametrize("mixer", ["softmax", "lion_s"])
def test_a_diverged_run_writes_nothing(runs, capsys, tmp_path, mixer):
    run = shutil.copytree(runs[mixer], tmp_path / "diverged")
    (file,) = run.glob(f"checkpoints/best-*/{STATE}")
    state = load_state(file)
    state["model"]["tokens.weight"][:, 0] = torch.nan
    torch.save(state, file)
    write_manifest(file.parent, [file], sharded=False)
    said = refuse(capsys, "generate", run, "--prompt", "the ", "--state", tmp_path / "state.pt")
    assert "the outputs of its model are not finite, the run has diverged" in said
    assert not (tmp_path / "state.pt").exists()


def test_several_prompts_are_each_continued_as_if_alone(runs, capsys):
    prompts = ["the cat sat", "a", "what of"]
    options = ["--tokens", 15, "--temperature", 0]
    for run in runs.values():
        asked = []
        wanted = ""
        for number, prompt in enumerate(prompts, 1):
            asked += ["--prompt", prompt]
            wanted += f"[{number}] " + text_of(capsys, run, "--prompt", prompt, *options)
        assert text_of(capsys, run, *asked, *options) == wanted


@pytest.mark.process
def test_processes_read_the_prompt_together(runs, capsys, tmp_path):
    prompt = [runs["lion_s"], "--prompt", TEXT[:600], "--tokens", 9, "--temperature", 0]
    alone = text_of(capsys, *prompt, "--state", tmp_path / "alone")
    together = in_ranks(2, "generate", *prompt, "--processes", 2, "--state", tmp_path / "together")
    assert together.returncode == 0, together.stderr
    assert together.stdout == alone
    first, second = (
        text_of(capsys, runs["lion_s"], "--state", tmp_path / name, "--tokens", 5) for name in ("alone", "together")
    )
    assert first == second
    for run, more, message in (
        ("softmax", ["--prompt", "a"], "--processes: mode kv has no state"),
        ("lion_s", ["--state", tmp_path / "alone"], "--processes: several processes read prompts"),
    ):
        assert message in refuse(capsys, "generate", runs[run], *more, "--processes", 2)


@pytest.mark.parametrize(  # "e": as if each one waited for the next byte
    "mode, unfinished", [("attention", "e"), ("kv", "\ufffd"), ("rnn", "e")]
)
def test_a_state_goes_on_as_one_longer_call_would_have(runs, capsys, tmp_path, mode, unfinished, monkeypatch):
    monkeypatch.setattr(generate, "UNFINISHED", unfinished)
    run, state = runs["softmax" if mode == "kv" else "lion_s"], tmp_path / "state.pt"
    asked = [run, "--mode", mode, "--seed", 1]
    whole = text_of(capsys, *asked, "--prompt", "the cat", "--tokens", 20)
    first = text_of(capsys, *asked, "--prompt", "the cat", "--tokens", 8, "--state", state)
    second = text_of(capsys, run, "--seed", 1, "--tokens", 5, "--state", state)
    third = text_of(capsys, *asked, "--tokens", 7, "--state", state)
    assert first[:-1] + second[:-1] + third == whole


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler() is not None, reason="no compiler")
def test_compiled_where_the_recipe_says_so(runs, capsys, tmp_path):
    run = shutil.copytree(runs["softmax"], tmp_path / "compiled")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("compile: false", "compile: true"))
    torch._dynamo.reset()
    counters.clear()
    asked = [run, "--prompt", "the ", "--prompt", "a", "--tokens", 8, "--temperature", 0]
    eager = text_of(capsys, *asked, "--eager")
    assert not counters["frames"]
    assert text_of(capsys, *asked) == eager
    assert counters["stats"]["unique_graphs"] == 1


def test_text_comes_as_it_is_written(runs, monkeypatch):
    shown = []
    monkeypatch.setattr(generate, "show", shown.append)
    assert here("generate", runs["lion_s"], "--prompt", "a", "--tokens", 6) == 0
    assert len(shown) == 8 and shown[0] == "a" and all(len(text) == 1 for text in shown)


def text_of_bytes(ids):
    return bytes(ids).decode(errors="replace")


def test_a_character_waits_for_its_bytes():
    decoder = Decoder(text_of_bytes)
    assert [decoder.add(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert [decoder.add(0x80) for _ in range(4)] == ["", "", "", "\ufffd" * 4]  # never a valid character
    assert decoder.add(0xC3) == "" and decoder.rest() == "\ufffd" and decoder.rest() == ""


def test_a_character_waits_for_its_bytes_in_a_later_call():
    text = "aé€😀b"
    raw = text.encode()
    for cut in range(1, len(raw) + 1):
        first = Decoder(text_of_bytes)
        later = Decoder(text_of_bytes, raw[:cut], resumed=True)
        shown = "".join(map(first.add, raw[:cut])) + first.end(stored=True)
        assert shown + "".join(map(later.add, raw[cut:])) + later.end(stored=False) == text, cut


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_words_are_written_as_in_the_whole_text(kind):
    text = "the cat sat on the mat , and the mat sat"
    tokenizer = make_tokenizer(kind, [text] * 3, 300)
    ids = tokenizer.encode(text)
    for seen in range(len(ids)):
        decoder = Decoder(tokenizer.decode, ids[:seen])
        assert tokenizer.decode(ids[:seen]) + "".join(map(decoder.add, ids[seen:])) == tokenizer.decode(ids)


def test_predict_says_what_writes_text(runs, capsys):
    assert "./run.sh generate RUN --prompt TEXT" in refuse(capsys, "predict", runs["lion_s"], "the cat")


def test_bad_requests(runs, capsys, tmp_path):
    state, none, ask = tmp_path / "state.pt", tmp_path / "none", ["--prompt", "a"]

    def check(run, message, *args):
        assert message in refuse(capsys, "generate", runs[run], *args)

    check("lion_s", "--prompt is missing")
    check("lion_s", "no --prompt to begin one", "--state", state)
    check("lion_s", "'lion_s' supports attention and rnn, got 'kv'", *ask, "--mode", "kv")
    check("lion_s", "at least one token", "--prompt", "")
    check("lion_s", "cannot encode 'an Ä'", "--prompt", "an Ä")
    check("lion_s", f"--state: no folder {none}", *ask, "--state", none / "state.pt")
    long = "--tokens: 3 and 30 more are beyond the model's 32 positions; take 29 at most"
    check("softmax", long, "--prompt", "the", "--tokens", 30)
    for option, value in (("--temperature", -1), ("--top-k", 0), ("--top-p", 2), ("--top-p", "much")):
        check("lion_s", option, *ask, option, value)
    check("lion_s", "is not a file", "--state", tmp_path)
    assert here("generate", runs["lion_s"], *ask, "--tokens", 2, "--state", state) == 0
    check("lion_s", "resume from it without --prompt", *ask, "--state", state)
    check("softmax", "belongs to other weights", "--state", state)
    check("lion_s", "is of mode rnn", "--state", state, "--mode", "attention")
    for text in ("", "text", "text" * 100):
        state.write_text(text)
        check("lion_s", "is damaged, or not a state of ./run.sh generate", "--state", state)


def packed(content):
    """Return the bytes of `torch.save`."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def signed(content):
    return hashlib.sha256(content).digest() + content


@pytest.fixture
def stored(runs, tmp_path, mixer):
    """Write a state, and return the run, the file, and its bytes without the digest."""
    state = tmp_path / "state.pt"
    assert here("generate", runs[mixer], "--prompt", "the cat", "--tokens", 3, "--state", state) == 0
    return runs[mixer], state, state.read_bytes()[32:]


@pytest.mark.parametrize("mixer", ["lion_s"])
def test_a_state_that_is_not_what_was_written_is_refused(stored, capsys):
    """Change a bit or a field, with the old digest and with a new one.

    Without a check, the result would be wrong text, invalid token ids, or a state of another mode.
    """
    run, state, content = stored
    digest = hashlib.sha256(content).digest()
    held = torch.load(io.BytesIO(content), weights_only=True)
    kv = packed(held | {"mode": "kv"})
    ids = packed(held | {"rows": [[10**9]]})
    for raw, message in (
        (digest + content[:-7] + bytes([content[-7] ^ 1]) + content[-6:], "is damaged"),
        (digest[:7] + bytes([digest[7] ^ 1]) + digest[8:] + content, "is damaged"),
        (digest + kv, "is damaged"),
        (digest + ids, "is damaged"),
        (signed(kv), "is of mode 'kv', which"),
        (signed(ids), "holds token ids outside of the vocabulary"),
    ):
        state.write_bytes(raw)
        assert message in refuse(capsys, "generate", run, "--state", state)


def altered(held):
    """Return changes of what a state holds, each with the expected message."""
    rows, logits, state = held["rows"], held["logits"], held["state"]
    others = {
        "no rows of tokens": [{"rows": value} for value in ([], None, 5, [[]], [5], ["the"])],
        "token ids outside of": [{"rows": [[value]]} for value in ("a", 1.0, True)],
        "no logits of": [
            {"rows": rows * 2},
            {"logits": None},
            {"logits": logits[:, 1:]},
            {"logits": logits[0]},
            {"logits": logits.long()},
        ],
        "no state of": [
            {"rows": [rows[0][1:]]},
            {"rows": rows * 2, "logits": logits.expand(2, -1)},
            {"state": None},
            {"state": [1, 2]},
            {"state": state.blocks},
            {"state": state._replace(blocks=state.blocks[1:])},
            {"state": tree_map(lambda x: x.double(), state)},
            {"state": tree_map(lambda x: x[..., :1], state)},
            {"state": tree_map(lambda x: x + 1 if x.dtype == torch.long else x, state)},
            {"mode": "attention"},
        ],
        "is of mode None": [{"mode": None}],
        "is of mode ['rnn']": [{"mode": ["rnn"]}],
        "belongs to other weights": [{"weights": None}],
        "was written by another version": [{"more": 1}],
    }
    return [(held | change, message) for message, changes in others.items() for change in changes]


@pytest.mark.parametrize("mixer", ["softmax", "lion_s"])
def test_a_state_that_was_altered_and_signed_is_refused(stored, tmp_path):
    run, _, content = stored
    held = torch.load(io.BytesIO(content), weights_only=True)
    args = argparse.Namespace(state=tmp_path / "altered.pt", mode=None, checkpoint="best")
    loaded = open_run(run)
    args.state.write_bytes(signed(packed(held)))
    assert len(generate.read_state(args, loaded).rows) == 1
    files = [(packed(values), message) for values, message in altered(held)]
    files += [(packed([held]), "was written by another version"), (b"no pickle", "cannot be read")]
    for written, message in files:
        args.state.write_bytes(signed(written))
        with pytest.raises(ConfigError) as error:
            generate.read_state(args, loaded)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_what_was_generated_is_kept_where_nobody_reads_it(runs, capsys, tmp_path, monkeypatch):
    """End the reader of a pipe first, as when Ctrl-C stops the whole pipe."""
    run, state = runs["lion_s"], tmp_path / "state.pt"
    asked = ["--seed", 1, "--state", state]
    shown, show = [], generate.show
    whole = text_of(capsys, run, "--seed", 1, "--prompt", "the cat", "--tokens", 12)

    def closed(text):
        shown.append(text)
        if len(shown) == 6:  # the prompt and four tokens have been read
            raise BrokenPipeError
        show(text)

    monkeypatch.setattr(generate, "show", closed)
    with pytest.raises(BrokenPipeError):
        here("generate", run, *asked, "--prompt", "the cat", "--tokens", 12)
    monkeypatch.undo()
    first = capsys.readouterr().out + shown[5]
    assert first + text_of(capsys, run, *asked, "--tokens", 7) == whole


@pytest.mark.parametrize("number, compiling", [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_what_was_generated_before_a_signal_is_kept(runs, capsys, tmp_path, monkeypatch, number, compiling):
    """Send a signal after the fourth token or during the fifth, whose compilation then fails."""
    run, asked = runs["lion_s"], ["--seed", 1, "--state", tmp_path / "state.pt"]
    whole = text_of(capsys, run, "--seed", 1, "--prompt", "the cat", "--tokens", 12)
    place, name = (Continuation, "append") if compiling else (generate, "show")
    work, calls = getattr(place, name), []

    def stopping(*given):
        calls.append(given)
        last = len(calls) == 5  # for `show`, which has the prompt first, the fourth token
        if last and compiling:
            os.kill(os.getpid(), number)
            raise RuntimeError("the C++ compiler was stopped")
        work(*given)
        if last:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(place, name, stopping)
    assert here("generate", run, *asked, "--prompt", "the cat", "--tokens", 12) == 130
    monkeypatch.undo()
    first = capsys.readouterr()
    assert "mode rnn: 4 tokens" in first.err
    assert first.out[:-1] + text_of(capsys, run, *asked, "--tokens", 8) == whole


def test_another_vocabulary_is_refused(runs, capsys, tmp_path):
    run, other = runs["lion_s"], tmp_path / "other.txt"
    said = refuse(capsys, "generate", run, "data.tokenizer=bytes", "--prompt", "a")
    pattern = r"another vocabulary: .* now; (data.tokenizer=.*/tokenizer.json) uses the tokenizer of the run"
    kept = re.search(pattern, said)
    assert said == refuse(capsys, "eval", run, "data.tokenizer=bytes")
    other.write_text(TEXT.replace("cat", "CAT"))
    assert here("prepare", run / "recipe.yaml", f"data.path={other}") == 0  # with another vocabulary of characters
    for own in ((), (kept[1],)):  # other text is read with the tokenizer of the run
        assert "no token for 'C'" in refuse(capsys, "eval", run, f"data.path={other}", *own)
    other.write_text(TEXT.replace("cat", "dog"))
    assert here("eval", run, f"data.path={other}", "--form", "full") == 0


def test_the_digest_is_of_all_weights(runs):
    model = open_run(runs["lion_s"]).model
    before = generate.digest(model)
    assert before == generate.digest(open_run(runs["lion_s"]).model)
    with torch.no_grad():
        model.encoder.norm.bias[0] += 1
    assert generate.digest(model) != before


def test_options_of_sampling_reach_the_draws(runs, capsys):
    call = [runs["lion_s"], "--prompt", "the ", "--tokens", 20]
    greedy = text_of(capsys, *call, "--temperature", 0)
    assert text_of(capsys, *call) != greedy
    assert text_of(capsys, *call, "--top-p", 0) == text_of(capsys, *call, "--top-k", 1) == greedy
