"""The delta rule without decays, and the formulas that the paper prints instead; see `test_gated_delta.py`."""

import pytest
import torch

from lion.ops import initial_state, linear_attention_parts, prefill, step

from .checks import attend, values_and_gradients
from .helpers import DIRECTIONS, Inputs, assert_close, backward, case, make, oracle_attention, unit_keys

FORMS = {
    "full": dict(form="full"),
    "chunk1": dict(form="chunk", chunk_size=1),
    "chunk5": dict(form="chunk", chunk_size=5),
    "chunk64": dict(form="chunk", chunk_size=64),
    "rnn1": dict(form="rnn", chunk_size=1),
    "rnn5": dict(form="rnn", chunk_size=5),
    "rnn64": dict(form="rnn", chunk_size=64),
}
RULE = dict(normalize="none")
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def delta(length: int, what: str = "beta", **shape) -> Inputs:
    return case(unit_keys(make("lit", length, **shape)), what)


@every_form
def test_beta_of_zero_and_one(form):
    """Check beta = 0, which writes nothing, and beta = 1, which replaces the value of a key, so a query returns it."""
    inputs = delta(11, dim=8)
    nothing = inputs._replace(beta=torch.zeros_like(inputs.beta))
    one = inputs._replace(q=inputs.k, beta=torch.ones_like(inputs.beta))
    for direction in DIRECTIONS:
        how = dict(normalize="none", scale=1.0, direction=direction)
        assert not attend(nothing, form, how).any()
        got = attend(one, form, how)
        assert_close(got, oracle_attention(one, **how), 1e-12, direction)
        if direction != "both":
            assert_close(got, one.v, 1e-12, direction)


@every_form
def test_dtypes(form):
    """Check bf16 tokens with a wide state; autocast and inference mode must not change the result."""
    how = form | RULE
    for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.float32, 2e-5)):
        inputs = delta(40, dtype=dtype)
        for beta in (inputs.beta, inputs.beta.float()):
            some = inputs._replace(beta=beta)
            got = attend(some, how)
            assert got.dtype == dtype
            assert_close(got, oracle_attention(some.to(torch.float64), normalize="none"), tolerance)
            with torch.inference_mode():
                assert torch.equal(attend(some, how), got)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(attend(some, how), got)
        _, grads = values_and_gradients(inputs, how)
        leaves = inputs.leaves()
        with torch.autocast("cpu", torch.bfloat16):
            y = attend(leaves, how)
            _, inside = values_and_gradients(inputs, how)  # autocast rounds products of a backward pass inside of it
        outside = backward(y, leaves)
        for name, grad in grads.items():
            assert grad.isfinite().all() and grad.dtype == inside[name].dtype == dtype, name
            assert torch.equal(outside[name], grad), name
            assert_close(inside[name], grad, 0.02, name)


@every_form
def test_float16_is_computed_in_float32(form):
    """Check values whose sums exceed float16, in both directions, where the diagonal is counted once."""
    inputs = delta(9, dtype=torch.float16)
    large = inputs._replace(q=torch.full_like(inputs.q, 4000.0), v=torch.full_like(inputs.v, 400.0))
    how = form | dict(normalize="none", scale=1e-4)
    assert_close(attend(large, how).float(), attend(large.to(torch.float32), how), 2e-3)


@every_form
def test_parts_and_scale(form):
    inputs = delta(11)
    how = form | RULE
    numerator, rowsum = attend(inputs, how, function=linear_attention_parts)
    assert rowsum is None
    assert torch.equal(attend(inputs, how, dict(scale=0.3)), numerator * 0.3)
    assert torch.equal(attend(inputs, how), numerator * 0.5)  # 1 / sqrt(D)


def with_beta(value: float) -> Inputs:
    inputs = delta(11)
    beta = inputs.beta.clone()
    beta[1, 0, 4] = value
    return inputs._replace(beta=beta)


@pytest.mark.parametrize("value", (-0.01, 2.5))
def test_beta_out_of_range(value):
    """Check the line of the error in every call, and that the beta of padding may have any value."""
    bad = with_beta(value)
    line = rf"^beta: expected values from 0 to 2, got {value}$"
    for how in FORMS.values():
        with pytest.raises(ValueError, match=line):
            attend(bad, how, RULE)
    with pytest.raises(ValueError, match=line):
        attend(bad, RULE, function=prefill)
    with pytest.raises(ValueError, match=line):
        step(bad.q, bad.k, bad.v, initial_state(bad.k, bad.v), beta=bad.beta, normalize="none")
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[1, 4] = False
    how = dict(normalize="none", valid=valid)
    assert torch.equal(attend(bad, how), attend(delta(11), how))


def test_nan_in_beta_is_nan_in_the_outputs():
    inputs = with_beta(torch.nan)
    for how in FORMS.values():
        y = attend(inputs, how, RULE)
        assert y[1, 0].isnan().any() and y[0].isfinite().all() and y[:, 1:].isfinite().all()


def test_gate_is_nothing_to_the_delta_rule():
    inputs = delta(11)
    for decay_convention in ("target", "symmetric", "between"):
        assert torch.equal(attend(inputs, RULE, dict(decay_convention=decay_convention)), attend(inputs, RULE))


# The printed formulas (appendix B.7, Table 1) against the recurrence


def transform(part, beta):
    """Compute `T = (I + part)^-1 B`."""
    return torch.linalg.inv(torch.eye(16, dtype=part.dtype) + part) * beta.mT


def test_printed_formulas():
    """Check the exact full form and the errors of three printed formulas."""
    inputs = delta(16, batch=1, heads=1, dim=8, value_dim=8)
    q, k, v = inputs[:3]
    beta = inputs.beta[..., None]
    exact = oracle_attention(inputs, normalize="none", scale=1.0)
    scores = q @ k.mT
    gram = beta * (k @ k.mT)
    own = (q * k).sum(-1, keepdim=True) * v
    forward = transform(gram.tril(-1), beta)
    backward = transform(gram.triu(1), beta)

    def off(read, diagonal) -> float:
        return ((read @ v - diagonal - exact).abs().max() / exact.abs().max()).item()

    read = scores.tril() @ forward + scores.triu() @ backward
    assert off(read, beta * own) < 1e-14
    # appendix B.7 subtracts a token's contribution to itself without beta: its weight becomes 2 beta - 1
    assert off(read, own) == pytest.approx(0.442, abs=1e-3)
    # `(Q K^T) T`, masked afterwards, uses corrections of tokens that must not be visible
    masked = (scores @ forward).tril() + (scores @ backward).triu()
    assert off(masked, beta * own) == pytest.approx(0.433, abs=1e-3)
    # `I + triu(B K K^T, -1)`, instead of +1, includes the token itself and the token before
    shifted = scores.tril() @ forward + scores.triu() @ transform(gram.triu(-1), beta)
    assert off(shifted, beta * own) == pytest.approx(0.401, abs=1e-3)
