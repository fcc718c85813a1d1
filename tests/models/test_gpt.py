"""Tests of GPT: initialisation, causality, segments, and streaming as a whole.

`tests/tools/test_convert_language.py` compares logits with those of GPT-2, `tests/test_recipes.py` the sizes.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from lion.layers.mixers import MIXERS, SOFTMAX, AttentionConfig, make_mixer
from lion.layers.mixers.softmax import reserve
from lion.layers.norms import NORMS
from lion.models.gpt import GPT, CausalAttentionConfig, GPTConfig
from tests.layers.helpers import close, invalid, saved

TOKENS, SIZES, SNAKES = 11, ("lion_s", 12, 1, 3), ("row_snake", "column_snake")
# every mixer, and two mixers after MD-TPE
STREAMS = pytest.mark.parametrize(("mixer", "tpe"), [*((m, None) for m in MIXERS), (SOFTMAX, 3), ("lion_s", 3)])


def gpt(mixer=SOFTMAX, *, length=24, **settings):
    torch.manual_seed(0)
    return GPT(GPTConfig(mixer, 12, 2, 3, **settings), vocabulary=TOKENS, length=length).double().eval()


def ids(*shape, seed=0):
    return torch.randint(TOKENS, shape, generator=torch.Generator().manual_seed(seed))


def test_gates_keep_their_biases():
    for mixer in ("lion_s", "gla"):
        left = [name for name, _ in gpt(mixer, bias=False).named_parameters() if name.endswith("bias")]
        assert len(left) == 2 and all(".decays." in name for name in left)


def test_what_writes_into_the_residual_stream_starts_smaller():
    model = GPT(GPTConfig("lion_s", 256, 3, 4), vocabulary=500, length=100)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            small = name.endswith((".attention.proj.weight", ".mlp.fc2.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(6) if small else 0.02, rel=0.1), name
        elif name.endswith("bias"):
            assert not parameter.any(), name


def test_positions_are_for_mixers_without_order():
    with_positions = {mixer for mixer in MIXERS if gpt(mixer).positions is not None}
    assert with_positions == {"softmax", "none", "lion_lit", "linear_transformer", "performer"}
    assert gpt(SOFTMAX).longest == 24 and gpt("lion_s").longest is None
    for rotation in ("rope", "lrpe", "lrpe_learned"):
        assert gpt(SOFTMAX, attention=CausalAttentionConfig(rotation=rotation)).positions is None
    assert gpt(SOFTMAX, tpe=2).positions is None and gpt(SOFTMAX, tpe=0).positions is not None


def changed_from(place, tokens):
    return torch.where(torch.arange(tokens.shape[1]) < place, tokens, (tokens + 1) % TOKENS)


@STREAMS
@torch.inference_mode()
def test_no_token_sees_a_later_one(mixer, tpe):
    model, tokens = gpt(mixer, tpe=tpe), ids(2, 12)
    a, b = model(tokens), model(changed_from(7, tokens))
    close(a[:, :7], b[:, :7], 1e-12)
    assert (a[:, 7] - b[:, 7]).abs().min() > 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("place", ["norm", "out_norm"])
def test_no_norm_shows_later_tokens_in_training(norm, place):
    """Check that every entry of `NORMS` is causal or invalid, as norm of the blocks and of the heads."""

    def settings(name):
        return {"norm": name} if place == "norm" else {"attention": CausalAttentionConfig(out_norm=name)}

    if getattr(NORMS[norm], "over_tokens", False):
        invalid(f"{place}: '{norm}' .* later tokens; use 'layernorm' or 'rmsnorm'", gpt, "lion_s", **settings(norm))
        return
    model, tokens = gpt("lion_s", **settings(norm)).train(), ids(2, 12)
    close(model(tokens)[:, :7], model(changed_from(7, tokens))[:, :7], 1e-12)


def test_a_layer_with_a_norm_over_tokens_does_not_stream():
    layer = make_mixer("lion_s", 12, 2, AttentionConfig(direction="forward", out_norm="batchnorm"))
    assert not layer.causal and make_mixer("lion_s", 12, 2, AttentionConfig(direction="forward")).causal
    invalid("out_norm: 'batchnorm'", layer.prefill, torch.randn(1, 3, 12))


@STREAMS
@torch.inference_mode()
def test_ragged_prompts_go_on_as_if_alone(mixer, tpe):
    """Check prompts that are read at once and in pieces, then one token and three at once."""
    model, tokens, lengths = gpt(mixer, tpe=tpe), ids(3, 10), [10, 4, 7]
    assert model.streams
    valid = torch.arange(10) < torch.tensor(lengths)[:, None]
    at_once, prefilled = model.prefill(tokens, valid)
    state = reserve(model.initial_state(3), 9)  # later the cache grows
    pieces = []
    for piece, real in zip(tokens.split(4, 1), valid.split(4, 1)):
        logits, state = model.step(piece, state, real)
        pieces.append(logits)
    for logits, after in ((at_once, prefilled), (torch.cat(pieces, 1), state)):
        assert after.position.tolist() == lengths
        new = ids(3, 4, seed=1)
        one, after = model.step(new[:, :1], saved(after))
        three, _ = model.step(new[:, 1:], after)
        for row, length in enumerate(lengths):
            alone = model(torch.cat([tokens[row, :length], new[row]])[None])[0]
            found = torch.cat([logits[row, :length], one[row], three[row]])
            close(found, alone, 1e-10)


@torch.inference_mode()
def test_a_cache_with_room_is_written_in_place():
    model, tokens = gpt(), ids(2, 8)
    _, start = model.prefill(tokens[:, :5])
    roomy = reserve(start, 2)
    first, state = model.step(tokens[:, 5:7], roomy)
    assert state.blocks[0].k.data_ptr() == roomy.blocks[0].k.data_ptr()
    second, state = model.step(tokens[:, 7:], state)  # the cache is full
    assert state.blocks[0].k.data_ptr() != roomy.blocks[0].k.data_ptr()
    close(torch.cat([first, second], 1), model(tokens)[:, 5:], 1e-10)
    again, _ = model.step(tokens[:, 5:7], start)  # without room a step copies the state
    close(again, first, 0)


@pytest.mark.parametrize(("mixer", "tpe"), [(SOFTMAX, None), ("lion_s", 3), ("lightnet", None), ("deltanet", None)])
@torch.inference_mode()
def test_segments_are_read_as_if_alone(mixer, tpe):
    model, tokens = gpt(mixer, tpe=tpe), ids(1, 12)
    segments = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3])
    packed = model(tokens, segments)
    for part in (slice(0, 5), slice(5, 9)):
        close(packed[:, part], model(tokens[:, part]), 1e-10)


def test_the_head_is_the_embedding():
    model = gpt(pad_vocabulary=8)
    logits = model(ids(1, 4))
    assert model.tokens.weight.shape == (16, 12) and logits.shape == (1, 4, TOKENS)
    x = model.encoder(model.tokens(ids(1, 4)) + model.positions.weight[:4])
    close(logits, F.linear(x, model.tokens.weight)[..., :TOKENS])
    F.cross_entropy(logits.flatten(0, 1), ids(4)).backward()
    assert model.tokens.weight.grad[:TOKENS].abs().sum(1).all() and not model.tokens.weight.grad[TOKENS:].any()


def test_a_shorter_model_takes_the_first_positions():
    long, short = gpt(), gpt(length=8)
    short.load_state_dict(short.adapt(long.state_dict(), long))
    close(short(ids(1, 8)), long(ids(1, 8)))


def test_what_is_wrong_is_named():
    invalid("tokens: 25 in one row, this model has only 24 position embeddings", gpt(), ids(1, 25))
    invalid("tokens: expected integers", gpt().prefill, torch.arange(5))
    invalid("tokens: 25 in one row", gpt().prefill, ids(1, 25))
    invalid(r"attention.*'both' is not a choice", gpt, attention=CausalAttentionConfig(direction="both"))
    invalid(r"attention.scans: text has one order", gpt, "lion_s", attention=CausalAttentionConfig(scans=SNAKES))
    invalid("^vocabulary: expected at least 1, got 0$", GPT, GPTConfig(*SIZES), vocabulary=0, length=4)
    invalid("^length: expected at least 1, got 0$", GPT, GPTConfig(*SIZES), vocabulary=3, length=0)
    invalid("count: expected at least 0, got -1", reserve, gpt().initial_state(2), -1)
    assert gpt("lion_s")(ids(1, 25)).shape == (1, 25, TOKENS)


def test_another_mixer_is_causal_too_and_a_label_says_what_is_unusual():
    config = GPTConfig(SOFTMAX, 12, 1, 3).with_mixer("lion_s")
    assert config.attention.direction == "forward" and config.label() == "lion_s"
    assert config.resolved().attention.decay_convention == "target"
    assert GPTConfig("lion_s", 12, 1, 3, position_embedding=True).label() == "lion_s with positions"
