"""Tests of text generation: the modes agree, and draws depend only on seed, row and place."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lion
from lion.inference import text as generation
from lion.inference.text import Continuation, Sampling, streaming_mode
from lion.layers.mixers import MIXERS, SOFTMAX
from lion.models.gpt import GPT, GPTConfig
from lion.models.vit import ViT, ViTConfig
from lion.trainer.compilation import compile_blocks, compile_steps
from tests.helpers import Largest
from tests.layers.helpers import close, invalid

PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 1]]
GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    """Split prompts into several pieces, and let the cache grow several times."""
    monkeypatch.setattr(generation, "PIECE", 4)
    monkeypatch.setattr(generation, "ROOM", 3)


def gpt(mixer=SOFTMAX, length=40):
    torch.manual_seed(0)
    config = GPTConfig(mixer, 24, 2, 3, init_std=0.3)  # far from uniform predictions
    return GPT(config, vocabulary=11, length=length).eval()


def generated(model, mode, count=20, sampling=GREEDY, seed=0, prompts=PROMPTS):
    return lion.generate(model, prompts, count, mode=mode, sampling=sampling, seed=seed)


def continued(model, mode, prompts, count):
    """Return a continuation after `count` greedy tokens."""
    text = Continuation.of(model, mode, prompts)
    for _ in text.generate(count, GREEDY, 0):
        pass
    return text


@pytest.mark.parametrize("mixer", MIXERS)
def test_modes_agree_on_logits_of_given_tokens_and_on_greedy_tokens(mixer):
    model = gpt(mixer)
    mode = streaming_mode(model)
    slow = Continuation.of(model, "attention", PROMPTS)
    fast = Continuation.of(model, mode, PROMPTS)
    for tokens in torch.randint(11, (7, 3)):
        close(fast.logits, slow.logits, 1e-4)
        assert slow.logits.std() > 0.1
        slow.append(tokens)
        fast.append(tokens)
    close(fast.logits, slow.logits, 1e-4)

    model.double()
    rows = generated(model, "attention", 7)
    assert rows == generated(model, mode, 7)
    alone = [generated(model, mode, 7, prompts=[prompt])[0] for prompt in PROMPTS]
    assert rows == alone
    assert [len(row) for row in rows] == [13, 8, 10]


def test_rows_of_padding_in_the_embeddings_are_no_ids():
    model = GPT(GPTConfig(SOFTMAX, 24, 2, 3, pad_vocabulary=64), vocabulary=11, length=40).eval()
    assert len(model.tokens.weight) == 64
    invalid("prompts: expected token ids from 0 to 10, got 11", generated, model, "attention", prompts=[[11]])


def test_draws_depend_on_seed_row_and_place():
    model = gpt("lion_s").double()

    def drawn(mode, prompts, seed=0):
        return generated(model, mode, sampling=Sampling(), seed=seed, prompts=prompts)

    rows = drawn("rnn", [[1], [1]])
    assert rows[0] != rows[1]
    assert rows == drawn("attention", [[1], [1]])
    assert rows[:1] == drawn("rnn", [[1]])
    assert rows != drawn("rnn", [[1], [1]], seed=1)


@pytest.mark.parametrize(("mixer", "mode"), [("lion_s", "attention"), (SOFTMAX, "kv"), ("lion_s", "rnn")])
def test_what_is_generated_in_parts_and_after_errors_is_what_it_would_have_been(mixer, mode, monkeypatch):
    model, failing = gpt(mixer), False
    text = Continuation.of(model, mode, PROMPTS)
    name = "encode" if mode == "attention" else "step"
    compute = getattr(model, name)

    def fails(*given, **named):
        if failing:
            raise RuntimeError("out of memory")
        return compute(*given, **named)

    monkeypatch.setattr(model, name, fails)
    for count in (2, 3, 7):
        for _ in text.generate(count, Sampling(0.7), 5):
            pass
        failing = True
        with pytest.raises(RuntimeError, match="out of memory"):  # changes nothing
            next(text.generate(count, Sampling(0.7), 5))
        failing = False
    assert text.rows == generated(model, mode, 12, sampling=Sampling(0.7), seed=5)


def test_the_state_of_rnn_mode_does_not_grow():
    def bytes_of(mixer, count):
        model = gpt(mixer)
        text = continued(model, streaming_mode(model), [[1, 2]], count)
        return sum(part.nbytes for block in text.state.blocks for part in block if torch.is_tensor(part))

    assert bytes_of("lion_s", 5) == bytes_of("lion_s", 25)
    assert bytes_of(SOFTMAX, 5) < bytes_of(SOFTMAX, 25)


def test_what_remains_to_draw_from():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[[2, 0, 3, 1]][None]  # ids, most likely first: 1, 3, 0, 2

    def counts(**settings):
        chance = (torch.arange(1000) + 0.5) / 1000
        drawn = Sampling(**settings).choose(logits.expand(1000, -1), chance)
        return [round(n / 1000, 2) for n in drawn.bincount(minlength=4).tolist()]

    assert counts() == [0.15, 0.5, 0.05, 0.3]
    assert counts(top_k=2) == [0, 0.62, 0, 0.38]
    assert counts(top_p=0.8) == [0, 0.62, 0, 0.38]  # 0.5 + 0.3 reach 0.8
    assert counts(top_p=0.81) == [0.16, 0.53, 0, 0.32]
    assert counts(top_p=0) == counts(top_p=1e-9) == counts(top_k=1) == counts(temperature=0) == [0, 1, 0, 0]
    assert counts(temperature=1e-320) == counts(temperature=1e-320, top_k=3) == [0, 1, 0, 0]
    assert counts(top_k=9) == counts()
    squared = [p * p / 0.365 for p in (0.15, 0.5, 0.05, 0.3)]
    assert counts(temperature=0.5) == pytest.approx(squared, abs=0.006)
    edge = torch.tensor([0.0, 1 - 2**-24])
    assert Sampling(top_k=3).choose(logits.expand(2, -1), edge).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -1.0, "at least 0"),
        ("top_p", 1.5, "0 to 1"),
        ("top_k", 0, "at least 1"),
        ("top_k", 2.5, "a whole number"),
        ("count", -1, "at least 0"),
    ],
)
def test_invalid_settings_are_refused(name, value, expected):
    with pytest.raises(ValueError, match=f"{name}: expected {expected}, got {value}"):
        generated(gpt("lion_s"), "rnn", value) if name == "count" else Sampling(**{name: value})


def test_the_likeliest_are_found_without_a_sort_of_all(monkeypatch):
    logits, chance = torch.randn(50, 200), torch.rand(50)
    whole, few = (Sampling(top_k=k, top_p=0.8).choose(logits, chance) for k in (200, 5))
    assert torch.equal(whole, Sampling(top_p=0.8).choose(logits, chance))
    assert not torch.equal(whole, few)
    monkeypatch.setattr(torch.Tensor, "sort", None, raising=False)
    assert torch.equal(few, Sampling(top_k=5, top_p=0.8).choose(logits, chance))


def test_beyond_the_positions_only_attention_goes_on_over_the_last_of_them():
    model = gpt(length=8)
    (row,) = generated(model, "attention", count=12, prompts=[[1, 2]])
    assert len(row) == 14
    with torch.inference_mode():
        assert row[13] == model(torch.tensor([row[5:13]]))[0, -1].argmax()
    with pytest.raises(ValueError, match="2 and 12 more are beyond the model's 8 positions; take 6 at most"):
        generated(model, "kv", count=12, prompts=[[1, 2]])
    assert len(generated(model, "kv", count=6, prompts=[[1, 2]])[0]) == 8
    invalid("9 and 0 more are beyond", Continuation.of, model, "kv", [[1] * 9])


def test_wrong_modes_and_prompts():
    invalid("mixer 'lion_s' supports attention and rnn, got 'kv'", Continuation.of, gpt("lion_s"), "kv", PROMPTS)
    model = gpt()
    invalid("supports attention and kv, got 'rnn'", Continuation.of, model, "rnn", PROMPTS)
    invalid("at least one token", Continuation.of, model, "kv", [[1], []])
    for prompts, found in (([1, 2], "1"), ([[1], [11]], "11"), ([[-1]], "-1"), ([[True]], "True"), ([[1.5]], "1.5")):
        invalid(rf"prompts: expected .* got {found}", Continuation.of, model, "kv", prompts)
    vit = ViT(ViTConfig("lion_s", 12, 1, 3), image_size=(16, 16), channels=1, num_classes=2)
    invalid(r"model: expected a causal language model \(gpt\), got ViT", generated, vit, None)


def test_prompts_are_lists_or_tensors():
    model, rows = gpt("lion_s"), [[1, 2, 3], [4, 5, 6]]
    want = generated(model, "rnn", 3, prompts=rows)
    for prompts in (torch.tensor(rows), [torch.tensor(row) for row in rows], torch.tensor(rows).numpy()):
        assert generated(model, "rnn", 3, prompts=prompts) == want


@pytest.mark.parametrize("mixer", ["lion_s", "gla", "deltanet"])
def test_a_long_prompt_is_read_in_constant_memory(mixer):
    found = []
    for length in (20, 100):
        with Largest(torch.is_floating_point) as largest:
            Continuation.of(gpt(mixer, length=100), "rnn", [[1] * length])
        found.append(largest.elements)
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("mode", ["attention", "kv"])
def test_only_the_last_token_of_a_prompt_has_logits(mode):
    seen, model = [], gpt()
    model.logits = lambda x, logits=model.logits: seen.append(tuple(x.shape)) or logits(x)
    Continuation.of(model, mode, [[1] * 30, [2] * 7])
    assert seen == [(2, 24)]


def test_a_cache_has_room_for_what_is_to_come_alone(monkeypatch):
    monkeypatch.setattr(generation, "ROOM", 100)
    text = continued(gpt(), "kv", [[1, 2]], 5)
    assert text.state.blocks[0].k.shape[2] == 2 + 5 + 1
    assert text.room == 0


def graphs_of(model, compiled=compile_steps, mode=None, **how):
    """Check that a compiled model generates the same; return the number of its graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    mode = mode or streaming_mode(model)
    expected = generated(model, mode, **how)
    assert compiled(model, counter)
    assert generated(model, mode, **how) == expected
    return counter.frame_count


@pytest.mark.compiled
@pytest.mark.parametrize("mixer", [SOFTMAX, "fox", "lion_s", "gla"])
def test_one_graph_serves_all_blocks_and_tokens(mixer):
    assert graphs_of(gpt(mixer).double()) == 1


@pytest.mark.compiled
@pytest.mark.parametrize("mixer", [SOFTMAX, "fox", "lion_s"])
def test_few_graphs_go_on_after_a_prompt_of_one_token(mixer):
    assert graphs_of(gpt(mixer).double(), count=36, prompts=[[7]]) <= 3  # more tokens than graphs allowed


@pytest.mark.compiled
def test_one_graph_reads_sequences_that_grow():
    grow = partial(compile_blocks, dynamic=True)
    assert graphs_of(gpt().double(), grow, mode="attention", count=10) == 1
