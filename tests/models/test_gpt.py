"""Tests of GPT: published shapes and initialisation, causality, segments, and streaming as a whole."""

import io
import math

import pytest
import torch
import torch.nn.functional as F

from lion.layers.mixers import MIXERS, SOFTMAX, AttentionConfig, make_mixer
from lion.layers.mixers.softmax import reserve
from lion.layers.norms import NORMS
from lion.models.gpt import GPT, CausalAttentionConfig, GPTConfig
from lion.runs import count_parameters

TOKENS = 11
# every mixer, and two mixers after MD-TPE
STREAMS = pytest.mark.parametrize(("mixer", "tpe"), [*((m, None) for m in MIXERS), (SOFTMAX, 3), ("lion_s", 3)])


def gpt(mixer=SOFTMAX, *, length=24, **settings):
    torch.manual_seed(0)
    return GPT(GPTConfig(mixer, 12, 2, 3, **settings), vocabulary=TOKENS, length=length).double().eval()


def ids(*shape, seed=0):
    return torch.randint(TOKENS, shape, generator=torch.Generator().manual_seed(seed))


def test_the_published_shape():
    """Compare with nanoGPT: 124 M parameters, 123.59 M without position embeddings."""
    with torch.device("meta"):
        config = GPTConfig(SOFTMAX, 768, 12, 12, bias=False, pad_vocabulary=64)
        model = GPT(config, vocabulary=50_257, length=1024)
    assert model.tokens.weight.shape == (50_304, 768)
    assert count_parameters(model) - model.positions.weight.numel() == 123_587_328
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_gates_keep_their_biases():
    for mixer in ("lion_s", "gla"):
        left = [name for name, _ in gpt(mixer, bias=False).named_parameters() if name.endswith("bias")]
        assert len(left) == 2 and all(".decays." in name for name in left)


def test_what_writes_into_the_residual_stream_starts_smaller():
    torch.manual_seed(0)
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


@torch.inference_mode()
def test_it_is_gpt2_written_out():
    model, tokens = gpt(), ids(2, 9)
    for parameter in model.parameters():  # initial biases and norms would have no effect
        parameter.normal_(std=0.3)
    w = model.state_dict()

    def norm(x, name):
        return F.layer_norm(x, (12,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["tokens.weight"][tokens] + w["positions.weight"][:9]
    for i in (0, 1):
        block = f"encoder.blocks.{i}"
        q, k, v = linear(norm(x, f"{block}.norm1"), f"{block}.attention.qkv").chunk(3, -1)
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (q, k, v))  # (B, 3 heads, L, 4)
        later = torch.ones(9, 9, dtype=torch.bool).triu(1)
        y = (q @ k.mT / 2).masked_fill(later, -math.inf).softmax(-1) @ v
        x = x + linear(y.transpose(1, 2).flatten(2), f"{block}.attention.proj")
        hidden = F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1"))
        x = x + linear(hidden, f"{block}.mlp.fc2")
    expected = norm(x, "encoder.norm") @ w["tokens.weight"].T
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-9)


@STREAMS
@torch.inference_mode()
def test_no_token_sees_a_later_one(mixer, tpe):
    model, tokens = gpt(mixer, tpe=tpe), ids(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % TOKENS
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=0, atol=1e-12)
    assert (a[:, 7] - b[:, 7]).abs().min() > 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("place", ["norm", "out_norm"])
def test_no_norm_shows_later_tokens_in_training(norm, place):
    """Check that every entry of `NORMS` is causal or refused, as norm of the blocks and of the heads."""

    def settings(name):
        return {"norm": name} if place == "norm" else {"attention": CausalAttentionConfig(out_norm=name)}

    if getattr(NORMS[norm], "over_tokens", False):
        with pytest.raises(ValueError, match=f"{place}: '{norm}' .* later tokens; use 'layernorm' or 'rmsnorm'"):
            gpt("lion_s", **settings(norm))
        return
    model, tokens = gpt("lion_s", **settings(norm)).train(), ids(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % TOKENS
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7], rtol=0, atol=1e-12)


def test_a_layer_with_a_norm_over_tokens_does_not_stream():
    layer = make_mixer("lion_s", 12, 2, AttentionConfig(direction="forward", out_norm="batchnorm"))
    assert not layer.causal and make_mixer("lion_s", 12, 2, AttentionConfig(direction="forward")).causal
    with pytest.raises(ValueError, match="out_norm: 'batchnorm'"):
        layer.prefill(torch.randn(1, 3, 12))


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@STREAMS
@torch.inference_mode()
def test_it_streams_as_a_whole_from_ragged_prompts(mixer, tpe):
    model, tokens, lengths = gpt(mixer, tpe=tpe), ids(3, 10), torch.tensor([10, 4, 7])
    assert model.streams
    valid = torch.arange(10) < lengths[:, None]
    logits, state = model.prefill(tokens, valid)
    assert state.position.tolist() == lengths.tolist()
    rows = [tokens[i : i + 1, :n] for i, n in enumerate(lengths)]
    for i, n in enumerate(lengths):
        torch.testing.assert_close(logits[i : i + 1, :n], model(rows[i]), rtol=0, atol=1e-10)
    for count in (1, 3):  # one token, then three at once
        new = ids(3, count, seed=count)
        rows = [torch.cat([row, new[i : i + 1]], 1) for i, row in enumerate(rows)]
        logits, state = model.step(new, saved(state))
        for i, row in enumerate(rows):
            torch.testing.assert_close(logits[i : i + 1], model(row)[:, -count:], rtol=0, atol=1e-10)


@STREAMS
@torch.inference_mode()
def test_ragged_prompts_are_read_in_pieces(mixer, tpe):
    model, tokens, lengths = gpt(mixer, tpe=tpe), ids(3, 12), torch.tensor([12, 4, 7])
    valid = torch.arange(12) < lengths[:, None]
    state = reserve(model.initial_state(3), 9)  # later the cache grows
    pieces = []
    for piece, real in zip(tokens.split(5, 1), valid.split(5, 1)):
        logits, state = model.step(piece, state, real)
        pieces.append(logits)
    assert state.position.tolist() == lengths.tolist()
    logits = torch.cat(pieces, 1)
    last, _ = model.step(tokens[:, :1], state)
    for i, n in enumerate(lengths):
        row = torch.cat([tokens[i : i + 1, :n], tokens[i : i + 1, :1]], 1)
        both = torch.cat([logits[i : i + 1, :n], last[i : i + 1]], 1)
        torch.testing.assert_close(both, model(row), rtol=0, atol=1e-10)


@torch.inference_mode()
def test_a_cache_with_room_is_written_in_place():
    model, tokens = gpt(), ids(2, 8)
    _, start = model.prefill(tokens[:, :5])
    with pytest.raises(ValueError, match="count: expected at least 0, got -1"):
        reserve(start, -1)
    roomy = reserve(start, 2)
    first, state = model.step(tokens[:, 5:7], roomy)
    assert state.blocks[0].k.data_ptr() == roomy.blocks[0].k.data_ptr()
    second, state = model.step(tokens[:, 7:], state)  # the cache is full
    assert state.blocks[0].k.data_ptr() != roomy.blocks[0].k.data_ptr()
    torch.testing.assert_close(torch.cat([first, second], 1), model(tokens)[:, 5:], rtol=0, atol=1e-10)
    again, _ = model.step(tokens[:, 5:7], start)  # without room a step copies the state
    torch.testing.assert_close(again, first, rtol=0, atol=0)


@torch.inference_mode()
def test_a_stream_without_a_prompt():
    for mixer in (SOFTMAX, "lion_s"):
        model, tokens = gpt(mixer), ids(2, 3)
        logits, _ = model.step(tokens, model.initial_state(2))
        torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-10)


@STREAMS
@torch.inference_mode()
def test_segments_are_read_as_if_alone(mixer, tpe):
    model, tokens = gpt(mixer, tpe=tpe), ids(1, 12)
    segments = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3])
    packed = model(tokens, segments)
    for part in (slice(0, 5), slice(5, 9)):
        torch.testing.assert_close(packed[:, part], model(tokens[:, part]), rtol=0, atol=1e-10)


def test_the_head_is_the_embedding():
    model = gpt(pad_vocabulary=8)
    logits = model(ids(1, 4))
    assert model.tokens.weight.shape == (16, 12) and logits.shape == (1, 4, TOKENS)
    x = model.encoder(model.tokens(ids(1, 4)) + model.positions.weight[:4])
    torch.testing.assert_close(logits, F.linear(x, model.tokens.weight)[..., :TOKENS])
    F.cross_entropy(logits.flatten(0, 1), ids(4)).backward()
    assert model.tokens.weight.grad[:TOKENS].abs().sum(1).all() and not model.tokens.weight.grad[TOKENS:].any()


def test_a_sequence_beyond_the_positions():
    with pytest.raises(ValueError, match="tokens: 25 in one row, this model has only 24 position embeddings"):
        gpt()(ids(1, 25))
    with pytest.raises(ValueError, match="tokens: 25 in one row"):
        gpt().prefill(ids(1, 25))
    assert gpt("lion_s")(ids(1, 25)).shape == (1, 25, TOKENS)


def test_a_shorter_model_takes_the_first_positions():
    long, short = gpt(), gpt(length=8)
    short.load_state_dict(short.adapt(long.state_dict(), long))
    torch.testing.assert_close(short(ids(1, 8)), long(ids(1, 8)))


def test_settings_that_are_none():
    with pytest.raises(ValueError, match=r"attention.*'both' is not a choice"):
        GPTConfig(SOFTMAX, 12, 1, 3, attention=CausalAttentionConfig(direction="both"))
    with pytest.raises(ValueError, match=r"attention.scans: text has one order"):
        GPTConfig("lion_s", 12, 1, 3, attention=CausalAttentionConfig(scans=("row_snake", "column_snake")))
    for wrong in (dict(vocabulary=0), dict(length=0)):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected at least 1, got 0$"):
            GPT(GPTConfig("lion_s", 12, 1, 3), **dict(vocabulary=3, length=4) | wrong)


def test_another_mixer_is_causal_too_and_a_label_says_what_is_unusual():
    config = GPTConfig(SOFTMAX, 12, 1, 3).with_mixer("lion_s")
    assert config.attention.direction == "forward" and config.label() == "lion_s"
    assert config.resolved().attention.decay_convention == "target"
    assert GPTConfig("lion_s", 12, 1, 3, position_embedding=True).label() == "lion_s with positions"
