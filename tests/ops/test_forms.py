"""Forms: full, chunk and rnn match the definition in values and gradients."""

import pytest
import torch

from lion.ops import chunk, reference_attention, resolve_form

from .checks import attend, check_gradients, check_outputs, every_form, long_bfloat16, narrow_and_exact
from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    FORMS,
    NORMALIZE,
    SMALL_FORMS,
    Inputs,
    assert_close,
    case,
    grid,
    make,
    pairwise,
    signed_for,
)

SHAPES = {  # length: batch, heads, D, E
    1: (2, 3, 4, 6),
    2: (1, 1, 4, 6),
    7: (2, 2, 6, 4),
    63: (2, 1, 4, 6),
    64: (1, 1, 8, 5),
    65: (2, 2, 4, 6),
    197: (1, 2, 8, 5),
}
every_decay = pytest.mark.parametrize("decay", DECAYS)


def sized(decay: str, length: int) -> Inputs:
    batch, heads, dim, value_dim = SHAPES[length]
    return make(decay, length, batch=batch, heads=heads, dim=dim, value_dim=value_dim, seed=length)


MASK = dict(direction=DIRECTIONS, decay_convention=DECAY_CONVENTIONS)


@pytest.mark.parametrize("length, decay, how", grid(tuple(SHAPES), DECAYS, **MASK, normalize=ALL_NORMALIZE))
def test_lengths(length, decay, how):
    """Check all pairs of mask settings; `chunk5` puts borders inside sequences shorter than a chunk."""
    check = check_gradients if length < 197 else check_outputs
    check(signed_for(sized(decay, length), how["normalize"]), FORMS, **how)


@pytest.mark.parametrize(
    "decay, direction, decay_convention",
    [("D", "both", "source"), ("S", "both", "symmetric"), ("extreme", "backward", "target")],
)
@pytest.mark.slow
def test_long(decay, direction, decay_convention):
    """Check long sums over the sequence; rnn with one token at a time is checked on shorter sequences."""
    forms = {form: FORMS[form] for form in ("full", "chunk64", "chunk5", "rnn64")}
    inputs = make(decay, 1000, batch=1, heads=1)
    check_gradients(inputs, forms, direction=direction, decay_convention=decay_convention)


@pytest.mark.parametrize("decay, decay_convention", list(zip(("vector", "extreme vector") * 2, DECAY_CONVENTIONS)))
@pytest.mark.slow
def test_every_length_of_vectors(decay, decay_convention):
    """Check every length, because repeated halving of blocks cuts and pads each length differently."""
    for length in range(1, 36):
        inputs = make(decay, length, batch=1, heads=1, dim=2, value_dim=1)
        check_gradients(inputs, {"full": dict(form="full")}, decay_convention=decay_convention)


@pytest.mark.parametrize("form, lengths", [("full", (1,)), ("rnn1", (1, 3))])
def test_one_vector_that_reads_itself_apart(form, lengths):
    """Check a single token whose own key is added separately: by a bonus, or before the decay."""
    forms = {"full": FORMS["full"]} if form == "full" else {"chunk1": dict(form="chunk", chunk_size=1)}
    for length in lengths:
        check_gradients(make("vector", length), forms, decay_convention="between")
        check_gradients(case(make("vector", length), "bonus HD"), forms)


@pytest.mark.parametrize(
    "length, decay, what, how", grid((1, 2, 11, 65), DECAYS, ("bonus H", "bonus HD"), **MASK, normalize=ALL_NORMALIZE)
)
def test_bonus(length, decay, what, how):
    """Check the weight of a token's own key for every decay convention, in numerator and row sum."""
    inputs = signed_for(make(decay, length, batch=1, heads=2), how["normalize"])
    check_gradients(case(inputs, what), SMALL_FORMS, **how)


@every_form
def test_layout_does_not_matter(form):
    """Check inputs that are transposed from (B, L, H, D), and values of stride 0, which must not be written to."""
    inputs = make("S", 11)
    turned = inputs.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    assert_close(attend(turned, form), attend(inputs, form), 1e-14)

    shared = inputs._replace(v=inputs.v[:1, :1, :1].expand_as(inputs.v))
    before = shared.v.clone()
    assert_close(attend(shared, form), shared.on(reference_attention), 1e-12)
    assert torch.equal(shared.v, before)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@every_form
def test_inference_is_the_same(form, mode):
    """Check that inference, which may reuse memory, does not reuse the memory of the arguments."""
    for decay, dtype, normalize in pairwise(DECAYS, (torch.float64, torch.bfloat16), NORMALIZE):
        inputs = make(decay, 11, dtype=dtype)
        kept = inputs.leaves()
        how = form | dict(normalize=normalize)
        expected = attend(inputs, how)
        with mode():
            got = attend(inputs, how)
        assert got.dtype == dtype
        assert torch.equal(got, expected)
        for name, x in inputs.given().items():
            assert torch.equal(x, getattr(kept, name)), name


@every_form
def test_dtype_of_the_decay_is_free(form):
    inputs = make("S", 11, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        mixed = inputs._replace(log_decay=inputs.log_decay.to(dtype))
        same = inputs._replace(log_decay=mixed.log_decay.float())
        got = attend(mixed, form)
        assert got.dtype == torch.float32
        assert torch.equal(got, attend(same, form))


@pytest.mark.parametrize("decay", ["lit", "S", "vector"])
def test_states_in_bfloat16_cost_little_accuracy(decay):
    """Check the error of 64 chunks that pass on bfloat16 states against the error of one product over all tokens."""
    inputs = long_bfloat16(decay, 1024, 0.002)
    how = dict(chunk_size=16, feature_map="silu_shifted")
    chunks, _ = narrow_and_exact(inputs, how, dict(form="chunk"))
    full, exact = narrow_and_exact(inputs, how, dict(form="full"))
    for n, expected in enumerate(exact):
        error = (chunks[n].double() - expected).norm() / expected.norm()
        assert error < 0.012
        assert error < 2 * (full[n].double() - expected).norm() / expected.norm()


# Borders of the chunk form


@every_decay
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_chunk_size(direction, decay):
    forms = {}
    for size in (1, 2, 8, 99):
        forms[f"chunk {size}"] = dict(form="chunk", chunk_size=size)
        forms[f"rnn {size}"] = dict(form="rnn", chunk_size=size)
    check_gradients(make(decay, 23, batch=1, heads=2), forms, direction=direction)


@pytest.mark.parametrize("length", (64, 65, 66, 127, 128, 130))
def test_chunk_counts_around_the_limit_of_one_level(length):
    """Check chunk counts around 2 * GROUP, the limit of one mixing matrix; one chunk is one token."""
    form = {"chunk 1": dict(form="chunk", chunk_size=1)}
    check_outputs(make("S", length, batch=1, heads=1), form)
    if length == 130:
        for decay in ("S", "vector"):
            check_gradients(make(decay, length, batch=1, heads=1), form)


@pytest.mark.parametrize("decay, how", grid(DECAYS, **MASK))
def test_more_levels_of_chunks(decay, how, monkeypatch):
    """Check groups of two chunks, with which 67 tokens need four levels, each with separate padding."""
    monkeypatch.setattr(chunk, "GROUP", 2)
    levels = []
    carry = chunk.carry

    def counted(states, *rest):
        levels.append(states.shape[2])
        return carry(states, *rest)

    monkeypatch.setattr(chunk, "carry", counted)
    forms = {f"chunk {size}": dict(form="chunk", chunk_size=size) for size in (3, 4)}
    check_gradients(make(decay, 67, batch=1, heads=1), forms, **how)
    assert levels[:3] == [24, 12, 6]  # 23 chunks of three, rounded up to whole groups


def test_chunk_grid():
    for length in range(1, 400):
        for size in (1, 3, 8, 64):
            tokens, count = chunk.chunk_grid(length, size)
            assert tokens <= size and tokens * count >= length
            needed = -(-length // tokens)
            assert 0 <= count - needed < -(-needed // chunk.GROUP)  # padding of less than one chunk per group
    assert chunk.chunk_grid(4097, 64) == (64, 66)  # an image of 64 x 64 patches and its cls token


# The choice of form


def test_auto():
    assert resolve_form("auto", 64) == "full"
    assert resolve_form("auto", 256) == "full"
    assert resolve_form("auto", 257) == "chunk"
    assert resolve_form("auto", 5000, decays=False) == "full"  # a product, linear in L
    assert resolve_form("auto", 5000, dropout_p=0.1) == "full"  # the only form that has dropout
    assert resolve_form("rnn", 5000) == "rnn"
    for decay, length in (("lit", 300), ("S", 300), ("S", 20)):
        inputs = make(decay, length, batch=1, heads=1)
        form = resolve_form("auto", length, decay != "lit")
        assert torch.equal(attend(inputs, dict(form="auto")), attend(inputs, dict(form=form)))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", ["lit", "S"])
def test_scores_with_dropout_on_a_padded_length(decay, direction):
    """Check the scores that dropout needs, with a probability that drops none: 75 tokens have 80 keys."""
    inputs = make(decay, 75)
    segments = (torch.arange(75) // 30).expand(2, -1)
    for masks in ({}, dict(segments=segments), dict(valid=torch.arange(75).expand_as(segments) < 50)):
        how = dict(direction=direction) | masks
        got = attend(inputs, how, dict(form="full", dropout_p=1e-12))
        assert_close(got, attend(inputs, how, dict(form="chunk", chunk_size=16)), 1e-10)


@pytest.mark.parametrize("what", ["", "bonus H"])
def test_dropout_drops_a_tokens_own_score_too(what):
    torch.manual_seed(0)
    inputs = case(make("S", 9, batch=1, heads=1), what)
    how = dict(decay_convention="between", normalize="none")
    assert not attend(inputs, how, dict(dropout_p=1.0)).any()
    many = inputs.map(lambda x: x.repeat_interleave(4000, 0) if x.dim() > 2 else x)
    mean = attend(many, how, dict(dropout_p=0.5)).mean(0, keepdim=True)
    assert_close(mean, attend(inputs, how), 0.1)
