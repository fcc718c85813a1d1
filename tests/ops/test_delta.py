"""The delta rule against its recurrence, and the formulas that the paper prints instead."""

import pytest
import torch

from lion.ops import initial_state, linear_attention, linear_attention_parts, prefill, step

from .checks import BATCH, LENGTH, check_gradients, check_masks, gradcheck
from .helpers import DIRECTIONS, Case, assert_close, backward, case, make, oracle_attention, unit_keys

FORMS = {
    "full": dict(form="full"),
    "chunk1": dict(form="chunk", chunk_size=1),
    "chunk5": dict(form="chunk", chunk_size=5),
    "chunk64": dict(form="chunk", chunk_size=64),
    "rnn1": dict(form="rnn", chunk_size=1),
    "rnn5": dict(form="rnn", chunk_size=5),
    "rnn64": dict(form="rnn", chunk_size=64),
}


def delta(length: int, **shape) -> Case:
    return case(unit_keys(make("lit", length, **shape)), "beta")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("length", (1, 2, 7, 65, 197))
def test_outputs(length, direction):
    for dim, value_dim in ((4, 6), (8, 3)):
        inputs = delta(length, dim=dim, value_dim=value_dim)
        expected = oracle_attention(inputs, direction=direction, normalize="none")
        for form, how in FORMS.items():
            for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
                got = inputs.to(dtype).on(linear_attention, **how, direction=direction, normalize="none")
                assert got.dtype == dtype
                assert_close(got, expected, tolerance, f"{form} {dtype}")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("length", (1, 2, 7, 65))
def test_gradients(length, direction):
    check_gradients(delta(length, heads=2), FORMS, direction=direction, normalize="none")


@pytest.mark.parametrize("form", ("full", "chunk5", "rnn1", "rnn5"))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_masks(direction, form):
    """Check padding, and segments that start in the middle of one chunk and end in another."""
    inputs, how = unit_keys(make("lit", LENGTH, batch=BATCH, heads=2)), dict(direction=direction, normalize="none")
    check_masks(case(inputs, "beta"), FORMS[form] | how)
    check_masks(case(inputs, "beta, angles BHL"), FORMS[form] | how)


@pytest.mark.parametrize("what", ("angles L", "angles HL", "angles B1L", "angles BHL"))
def test_rotated_keys(what):
    inputs = case(unit_keys(make("lit", 11)), f"beta, {what}")
    for direction in DIRECTIONS:
        arguments = dict(direction=direction, normalize="none")
        expected = oracle_attention(inputs, **arguments)
        for form, how in FORMS.items():
            assert_close(inputs.on(linear_attention, **how, **arguments, feature_map=None), expected, 1e-12, form)
    check_gradients(inputs, FORMS, **arguments)


@pytest.mark.parametrize("form", ("full", "chunk1", "rnn5"))
def test_gradcheck(form):
    for direction in DIRECTIONS:
        leaves = delta(4, batch=1, heads=1, dim=2, value_dim=2).leaves()
        gradcheck(leaves, **FORMS[form], direction=direction, normalize="none")


@pytest.mark.parametrize("form", FORMS)
def test_beta_of_zero_and_one(form):
    """Check beta = 0, which writes nothing, and beta = 1, which replaces the value of a key, so a query returns it."""
    inputs, how = delta(11, dim=8), FORMS[form] | dict(normalize="none", scale=1.0)
    nothing = inputs._replace(beta=torch.zeros_like(inputs.beta))
    one = inputs._replace(q=inputs.k, beta=torch.ones_like(inputs.beta))
    for direction in DIRECTIONS:
        assert not nothing.on(linear_attention, **how, direction=direction, feature_map=None).any()
        expected = oracle_attention(one, direction=direction, normalize="none", scale=1.0)
        assert_close(one.on(linear_attention, **how, direction=direction, feature_map=None), expected, 1e-12, direction)
    for direction in ("forward", "backward"):
        assert_close(one.on(linear_attention, **how, direction=direction, feature_map=None), one.v, 1e-12, direction)


@pytest.mark.parametrize("form", FORMS)
def test_dtypes(form):
    """Check bf16 tokens with a wide state; autocast and inference mode must not change the result."""
    how = FORMS[form] | dict(normalize="none")
    for dtype in (torch.bfloat16, torch.float32):
        inputs = delta(40, dtype=dtype)
        for beta in (inputs.beta, inputs.beta.float()):
            some = inputs._replace(beta=beta)
            got = some.on(linear_attention, **how, feature_map=None)
            assert got.dtype == dtype
            tolerance = 0.01 if dtype == torch.bfloat16 else 2e-5
            assert_close(got, oracle_attention(some.to(torch.float64), normalize="none"), tolerance)
            with torch.inference_mode():
                assert torch.equal(some.on(linear_attention, **how, feature_map=None), got)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(some.on(linear_attention, **how, feature_map=None), got)
        leaves = inputs.leaves()
        grads = backward(leaves.on(linear_attention, **how, feature_map=None), leaves)
        assert all(grad.isfinite().all() and grad.dtype == dtype for grad in grads.values())
        with torch.autocast("cpu", torch.bfloat16):  # the backward pass, too
            inside = backward(leaves.on(linear_attention, **how, feature_map=None), leaves)
        assert all(torch.equal(inside[name], grad) for name, grad in grads.items())


@pytest.mark.parametrize("form", FORMS)
def test_float16_is_computed_in_float32(form):
    """Check values whose sums exceed float16, in both directions, where the diagonal is counted once."""
    inputs = delta(9, dtype=torch.float16)
    large = inputs._replace(q=torch.full_like(inputs.q, 4000.0), v=torch.full_like(inputs.v, 400.0))
    how = FORMS[form] | dict(normalize="none", scale=1e-4, feature_map=None)
    want = large.to(torch.float32).on(linear_attention, **how)
    assert_close(large.on(linear_attention, **how).float(), want, 2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_parts_and_scale(form):
    inputs, how = delta(11), FORMS[form] | dict(normalize="none")
    numerator, rowsum = inputs.on(linear_attention_parts, **how, feature_map=None)
    assert rowsum is None
    assert torch.equal(inputs.on(linear_attention, **how, scale=0.3, feature_map=None), numerator * 0.3)
    assert torch.equal(inputs.on(linear_attention, **how, feature_map=None), numerator * 0.5)  # 1 / sqrt(D)


@pytest.mark.parametrize("value", (-0.01, 2.5))
def test_beta_out_of_range(value):
    """Check the line of the error in every call, and that the beta of padding may have any value."""
    inputs = delta(11)
    beta = inputs.beta.clone()
    beta[1, 0, 4] = value
    bad, line = inputs._replace(beta=beta), rf"^beta: expected values from 0 to 2, got {value}$"
    for how in FORMS.values():
        with pytest.raises(ValueError, match=line):
            bad.on(linear_attention, **how, normalize="none")
    with pytest.raises(ValueError, match=line):
        bad.on(prefill, normalize="none")
    with pytest.raises(ValueError, match=line):
        step(bad.q, bad.k, bad.v, initial_state(bad.k, bad.v), beta=bad.beta, normalize="none")
    valid = torch.ones(inputs.q.shape[0], 11, dtype=torch.bool)
    valid[1, 4] = False
    good = inputs.on(linear_attention, normalize="none", valid=valid)
    assert torch.equal(bad.on(linear_attention, normalize="none", valid=valid), good)


def test_nan_in_beta_is_nan_in_the_outputs():
    inputs = delta(11)
    beta = inputs.beta.clone()
    beta[1, 0, 4] = torch.nan
    for how in FORMS.values():
        y = inputs._replace(beta=beta).on(linear_attention, **how, normalize="none")
        assert y[1, 0].isnan().any() and y[0].isfinite().all() and y[:, 1:].isfinite().all()


def test_gate_is_nothing_to_the_delta_rule():
    inputs = delta(11)
    expected = inputs.on(linear_attention, normalize="none")
    for decay_convention in ("target", "symmetric", "between"):
        assert torch.equal(inputs.on(linear_attention, normalize="none", decay_convention=decay_convention), expected)


# The printed formulas (appendix B.7, Table 1) against the recurrence


@pytest.fixture(scope="module")
def sequence():
    """Return a sequence of 16 tokens with terms that all versions share: scores, `B K K^T`, `beta q k` and outputs."""
    q, k, v, _, beta, *_ = case(unit_keys(make("lit", 16, batch=1, heads=1, dim=8, value_dim=8)), "beta")
    beta = beta[..., None]
    exact = oracle_attention(Case(q, k, v, beta=beta[..., 0]), normalize="none", scale=1.0)
    return q @ k.mT, beta * (k @ k.mT), beta, (q * k).sum(-1, keepdim=True), v, exact


def transform(part, beta):
    """Compute `T = (I + part)^-1 B`."""
    return torch.linalg.inv(torch.eye(16, dtype=part.dtype) + part) * beta.mT


def off(got, exact) -> float:
    return ((got - exact).abs().max() / exact.abs().max()).item()


def test_the_exact_full_form(sequence):
    scores, gram, beta, own, v, exact = sequence
    forward, backward = transform(gram.tril(-1), beta), transform(gram.triu(1), beta)
    read = scores.tril() @ forward + scores.triu() @ backward
    assert off(read @ v - beta * own * v, exact) < 1e-14
    # appendix B.7 subtracts a token's contribution to itself without beta: its weight becomes 2 beta - 1
    assert off(read @ v - own * v, exact) == pytest.approx(0.442, abs=1e-3)


def test_table_1_multiplies_before_it_masks(sequence):
    """Check that `(Q K^T) T`, masked afterwards, uses corrections of tokens that must not be visible."""
    scores, gram, beta, own, v, exact = sequence
    forward, backward = transform(gram.tril(-1), beta), transform(gram.triu(1), beta)
    masked = (scores @ forward).tril() + (scores @ backward).triu()
    assert off(masked @ v - beta * own * v, exact) == pytest.approx(0.433, abs=1e-3)


def test_table_1_has_an_offset_that_solves_no_recurrence(sequence):
    """Check that `I + triu(B K K^T, -1)`, instead of +1, includes the token itself and the token before."""
    scores, gram, beta, own, v, exact = sequence
    read = scores.tril() @ transform(gram.tril(-1), beta) + scores.triu() @ transform(gram.triu(-1), beta)
    assert off(read @ v - beta * own * v, exact) == pytest.approx(0.401, abs=1e-3)
