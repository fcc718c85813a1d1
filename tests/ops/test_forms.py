"""Forms: full, chunk and rnn match the definition in values and gradients."""

import pytest
import torch

import lion.ops.chunk
from lion.ops import linear_attention, reference_attention, resolve_form

from .checks import check_gradients, check_outputs, definition, gradcheck
from .helpers import (
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    FORMS,
    NORMALIZE,
    SMALL_FORMS,
    Inputs,
    assert_close,
    case,
    make,
    pairwise,
)

SHAPES = {  # length: batch, heads, D, E
    1: (2, 3, 4, 6),
    2: (1, 1, 4, 6),
    7: (2, 3, 6, 4),
    63: (2, 1, 4, 6),
    64: (1, 1, 8, 5),
    65: (2, 3, 4, 6),
    197: (1, 2, 8, 5),
    1000: (1, 2, 4, 6),
}
LONG = [  # a few cases at L = 1000, with long sums over the sequence
    ("lit", "both", "source"),
    ("D", "both", "source"),
    ("S", "both", "symmetric"),
    ("extreme", "both", "source"),
    ("extreme", "backward", "target"),
    ("S", "forward", "target"),
]


def sized(decay: str, length: int) -> Inputs:
    batch, heads, dim, value_dim = SHAPES[length]
    return make(decay, length, batch=batch, heads=heads, dim=dim, value_dim=value_dim, seed=length)


@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_every_mask(decay, direction, decay_convention):
    """Check all combinations of mask settings; lengths and divisors are combined pairwise in the tests below."""
    for length, normalize in ((1, "sum"), (7, "none")):
        how = dict(direction=direction, decay_convention=decay_convention, normalize=normalize)
        check_gradients(sized(decay, length), FORMS, **how)


@pytest.mark.parametrize(
    "length, decay, direction, decay_convention, normalize",
    pairwise((2, 63, 64, 65, 197), DECAYS, DIRECTIONS, DECAY_CONVENTIONS, NORMALIZE),
)
def test_lengths(length, decay, direction, decay_convention, normalize):
    """Check lengths around one chunk and above; `chunk5` puts borders inside shorter sequences."""
    how = dict(direction=direction, decay_convention=decay_convention, normalize=normalize)
    check = check_gradients if length < 197 else check_outputs
    check(sized(decay, length), FORMS, **how)


@pytest.mark.parametrize("decay, direction, decay_convention", LONG)
@pytest.mark.slow
def test_long(decay, direction, decay_convention):
    how = dict(direction=direction, decay_convention=decay_convention)
    forms = {form: how for form, how in FORMS.items() if form != "rnn1"}  # checked on shorter sequences
    check_gradients(sized(decay, 1000), forms, **how)
    assert_close(
        linear_attention(*sized(decay, 1000), **FORMS["rnn1"], **how, feature_map=None),
        definition(sized(decay, 1000), **how)[0],
        1e-12,
    )


@pytest.mark.parametrize("decay, decay_convention", list(zip(("vector", "extreme vector") * 2, DECAY_CONVENTIONS)))
def test_every_length_of_vectors(decay, decay_convention):
    """Check every length, because repeated halving of blocks cuts and pads each length differently."""
    for length in range(1, 36):
        inputs = make(decay, length, batch=1, heads=1, dim=2, value_dim=1)
        check_gradients(inputs, {"full": dict(form="full")}, decay_convention=decay_convention)


@pytest.mark.parametrize("form", ("full", "chunk1"))
def test_one_vector_that_reads_itself_apart(form):
    """Check a single token whose own key is added separately: by a bonus, or before the decay."""
    how = {"full": dict(form="full"), "chunk1": dict(form="chunk", chunk_size=1)}[form]
    for length in (1,) if form == "full" else (1, 3):
        check_gradients(make("vector", length), {form: how}, decay_convention="between")
        check_gradients(case(make("vector", length), "bonus HD"), {form: how})


@pytest.mark.parametrize("decay", DECAYS)
def test_signed_features(decay):
    """Check signed features, which are allowed without normalisation."""
    inputs = make(decay, 29)
    inputs = inputs._replace(q=inputs.q - 0.7, k=inputs.k - 0.7)
    for direction in DIRECTIONS:
        check_gradients(inputs, SMALL_FORMS, direction=direction, normalize="none")


@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_bonus(decay, direction, decay_convention):
    """Check the weight of a token's own key for every decay convention, in numerator and row sum."""
    arguments = dict(direction=direction, decay_convention=decay_convention)
    between = decay_convention == "between"
    for what, normalize, check in (
        ("bonus H", "sum", check_gradients if between else check_outputs),
        ("bonus HD", "sum", check_gradients if between else check_outputs),
        ("bonus HD", "none", check_gradients if decay_convention == "source" else check_outputs),
    ):
        check(case(make(decay, 11, batch=1, heads=2), what), SMALL_FORMS, **arguments, normalize=normalize)


@pytest.mark.parametrize("decay", ("S", "vector"))
@pytest.mark.parametrize("length", (1, 2, 65, 197))
def test_bonus_at_other_lengths(length, decay):
    for direction in DIRECTIONS:
        check_outputs(case(sized(decay, length), "bonus HD"), FORMS, direction=direction, decay_convention="between")


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_bonus_of_one_is_no_bonus(form):
    for decay in DECAYS:
        for decay_convention in DECAY_CONVENTIONS:
            inputs, how = make(decay, 11), SMALL_FORMS[form] | dict(decay_convention=decay_convention)
            for bonus in (torch.ones(3), torch.ones(3, 4, dtype=torch.float64)):
                got = linear_attention(*inputs, bonus=bonus, **how, feature_map=None)
                assert_close(
                    got, linear_attention(*inputs, **how, feature_map=None), 1e-12, f"{decay} {decay_convention}"
                )


@pytest.mark.parametrize(
    "form, direction, decay, normalize", pairwise(tuple(SMALL_FORMS), DIRECTIONS, ("lit", "D", "S"), NORMALIZE)
)
def test_gradcheck(form, direction, decay, normalize):
    """Check a few gradients against finite differences; other tests compare all with the definition."""
    leaves = make(decay, 4, batch=1, heads=2, dim=2, value_dim=1).leaves()
    gradcheck(leaves, **SMALL_FORMS[form], direction=direction, normalize=normalize)


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_layout_does_not_matter(form):
    """Check inputs that are transposed from (B, L, H, D), and values of stride 0, which must not be written to."""
    inputs = make("S", 11)
    how = SMALL_FORMS[form]
    turned = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    assert_close(
        linear_attention(*turned, **how, feature_map=None), linear_attention(*inputs, **how, feature_map=None), 1e-14
    )

    shared = inputs._replace(v=inputs.v[:1, :1, :1].expand_as(inputs.v))
    before = shared.v.clone()
    assert_close(linear_attention(*shared, **how, feature_map=None), reference_attention(*shared), 1e-12)
    assert torch.equal(shared.v, before)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("form", SMALL_FORMS)
def test_inference_is_the_same(form, mode):
    """Check that inference, which may reuse memory, does not reuse the memory of the arguments."""
    for decay in DECAYS:
        for dtype in (torch.float64, torch.bfloat16):
            for normalize in NORMALIZE:
                inputs = make(decay, 11, dtype=dtype)
                kept = inputs.leaves()
                expected = linear_attention(*inputs, **SMALL_FORMS[form], normalize=normalize, feature_map=None)
                with mode():
                    got = linear_attention(*inputs, **SMALL_FORMS[form], normalize=normalize, feature_map=None)
                assert got.dtype == dtype
                assert torch.equal(got, expected)
                assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, kept))


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_dtype_of_the_decay_is_free(form):
    inputs = make("S", 11, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        mixed = inputs._replace(log_decay=inputs.log_decay.to(dtype))
        same = inputs._replace(log_decay=mixed.log_decay.float())
        got = linear_attention(*mixed, **SMALL_FORMS[form], feature_map=None)
        assert got.dtype == torch.float32
        assert torch.equal(got, linear_attention(*same, **SMALL_FORMS[form], feature_map=None))


@pytest.mark.parametrize("decay", ["none", "S", "vector"])
def test_states_in_bfloat16_cost_little_accuracy(decay):
    """Check the error of 64 chunks that pass on bfloat16 states against the error of one product over all tokens."""
    torch.manual_seed(0)
    length, dim = 1024, 16
    shape = {"none": None, "S": (1, 2, length), "vector": (1, 2, length, dim)}[decay]
    log_decay = None if shape is None else -0.002 * torch.rand(shape)
    tokens = [torch.randn(1, 2, length, dim).bfloat16() for _ in range(3)]
    weight = torch.randn(1, 2, length, dim)

    def results(form: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in tokens]
        given = log_decay if log_decay is None or dtype != torch.float64 else log_decay.double()
        out = linear_attention(*leaves, given, form=form, chunk_size=16, feature_map="silu_shifted")
        return [out, *torch.autograd.grad((out * weight.to(dtype)).sum(), leaves)]

    exact, full, chunk = (
        results("full", torch.float64),
        results("full", torch.bfloat16),
        results("chunk", torch.bfloat16),
    )
    for x, y, expected in zip(full, chunk, exact):
        error = [(z.double() - expected).norm() / expected.norm() for z in (x, y)]
        assert error[1] < 0.012
        assert error[1] < 2 * error[0]


# Borders of the chunk form


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_chunk_size(direction, decay):
    inputs = make(decay, 23, heads=2)
    forms = {f"{form} {size}": dict(form=form, chunk_size=size) for form in ("chunk", "rnn") for size in (1, 2, 8, 99)}
    check_gradients(inputs, forms, direction=direction)


@pytest.mark.parametrize("length", (64, 65, 66, 127, 128, 130))
def test_chunk_counts_around_the_limit_of_one_level(length):
    """Check chunk counts around 2 * GROUP, the limit of one mixing matrix; one chunk is one token."""
    inputs = make("S", length, batch=1, heads=1)
    check_outputs(inputs, {"chunk 1": dict(form="chunk", chunk_size=1)})


@pytest.mark.parametrize("decay, direction", list(zip(DECAYS, ("forward", "backward") * 3)))
def test_two_levels_of_chunks(decay, direction):
    size, count = lion.ops.chunk.chunk_grid(1000, 4)
    assert size == 4 and 2 * lion.ops.chunk.GROUP < count <= 2 * lion.ops.chunk.GROUP**2
    forms = {"chunk 4": dict(form="chunk", chunk_size=4)}
    check_gradients(sized(decay, 1000), forms, direction=direction)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.slow
def test_more_levels_of_chunks(direction, decay, monkeypatch):
    """Check groups of two chunks, with which 67 tokens need four levels, each with separate padding."""
    monkeypatch.setattr(lion.ops.chunk, "GROUP", 2)
    levels, carry = [], lion.ops.chunk.carry

    def counted(states, *rest):
        levels.append(states.shape[2])
        return carry(states, *rest)

    monkeypatch.setattr(lion.ops.chunk, "carry", counted)
    forms = {f"chunk {size}": dict(form="chunk", chunk_size=size) for size in (3, 4)}
    for decay_convention in DECAY_CONVENTIONS:
        check_outputs(make(decay, 67, heads=2), forms, direction=direction, decay_convention=decay_convention)
    assert levels[:3] == [24, 12, 6]  # 23 chunks of three, rounded up to whole groups
    check_gradients(make(decay, 67, heads=2), forms, direction=direction)


def test_chunk_grid():
    for length in range(1, 400):
        for size in (1, 3, 8, 64):
            tokens, count = lion.ops.chunk.chunk_grid(length, size)
            assert tokens <= size and tokens * count >= length
            needed = -(-length // tokens)
            assert 0 <= count - needed < -(-needed // lion.ops.chunk.GROUP)  # padding of less than one chunk per group
    assert lion.ops.chunk.chunk_grid(4097, 64) == (64, 66)  # an image of 64 x 64 patches and its cls token


# The choice of form


def test_auto():
    assert resolve_form("auto", 64) == "full"
    assert resolve_form("auto", 5000) == "chunk"
    assert resolve_form("auto", 5000, decays=False) == "full"  # a product, linear in L
    assert resolve_form("auto", 5000, dropout_p=0.1) == "full"  # the only form that has dropout
    assert resolve_form("rnn", 5000) == "rnn"
    for decay, length in (("lit", 300), ("S", 300), ("S", 20)):
        inputs = make(decay, length, batch=1, heads=1)
        form = resolve_form("auto", length, decay != "lit")
        assert torch.equal(
            linear_attention(*inputs, form="auto", feature_map=None),
            linear_attention(*inputs, form=form, feature_map=None),
        )


@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
@pytest.mark.parametrize("decay", ["lit", "S"])
def test_scores_with_dropout_on_a_padded_length(decay, direction):
    """Check the scores that dropout needs, with a probability that drops none: 75 tokens have 80 keys."""
    given, how = make(decay, 75, dtype=torch.float64), dict(direction=direction, feature_map=None)
    segments = (torch.arange(75) // 30).expand(given.q.shape[0], -1)
    valid = torch.arange(75).expand_as(segments) < 50
    for masks in ({}, {"segments": segments}, {"valid": valid}):
        got = given.on(linear_attention, form="full", dropout_p=1e-12, **how, **masks)
        assert_close(got, given.on(linear_attention, form="chunk", chunk_size=16, **how, **masks), 1e-10)


@pytest.mark.parametrize("what", ["", "bonus H"])
def test_dropout_drops_a_tokens_own_score_too(what):
    torch.manual_seed(0)
    given, how = case(make("S", 9), what), dict(decay_convention="between", feature_map=None, normalize="none")
    assert not given.on(linear_attention, form="full", dropout_p=1.0, **how).any()
    outputs = [given.on(linear_attention, form="full", dropout_p=0.5, **how) for _ in range(4000)]
    assert_close(torch.stack(outputs).mean(0), given.on(linear_attention, **how), 0.1)
