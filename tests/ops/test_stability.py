"""Numerical stability: extreme gates, long sequences and narrow dtypes give finite and accurate results."""

import itertools

import pytest
import torch

from lion.ops import SCAN_MERGES, linear_attention_parts, multi_scan_attention, prefill, reference_attention
from lion.ops.decay import ONE_TERM_UP_TO, decay_mask, make_directions

from .checks import assert_finite, assert_gradients, attend, check_gradients, definition, values_and_gradients
from .helpers import (
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    FORMS,
    NORMALIZE,
    SMALL_FORMS,
    Denormals,
    Inputs,
    assert_close,
    backward,
    error,
    grid,
    make,
    oracle_attention,
    pairwise,
)
from .test_streaming import stream

BF16 = 2.0**-8  # unit roundoff
FP16 = 2.0**-11
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.mark.parametrize("form, how", grid(tuple(FORMS), direction=DIRECTIONS, decay_convention=DECAY_CONVENTIONS))
def test_extreme_gates_have_finite_gradients(form, how):
    inputs = make("extreme", 400, batch=1, heads=1, dtype=torch.float32)
    assert_finite(*values_and_gradients(inputs, FORMS[form], how))


def closed(decay: str, gate: float, share: float) -> Inputs:
    """Make inputs of which a share of the gates is closed."""
    inputs = make(decay, 67, batch=1, heads=2)
    drawn = torch.rand(inputs.log_decay.shape, generator=torch.Generator().manual_seed(4))
    return inputs._replace(log_decay=inputs.log_decay.masked_fill(drawn < share, gate))


@pytest.mark.parametrize("form, gate, share", pairwise(tuple(FORMS), (-1e4, -1e9, -1e30, -torch.inf), (0.3, 1.0)))
def test_gates_below_every_float(form, gate, share):
    """Check lambda = 0 in every dtype, for any logarithm: cumulative sums must keep the precision of other gates."""
    check_gradients(closed("S", gate, share), {form: FORMS[form]})


@pytest.mark.parametrize("form, decay, direction", pairwise(tuple(FORMS), ("S", "vector"), DIRECTIONS))
def test_gates_of_zero_between_others(form, decay, direction):
    """Check that a closed gate separates the tokens on both sides, but not its own token, read before the decay."""
    inputs = closed(decay, -torch.inf, 0.3)
    check_gradients(inputs, {form: FORMS[form]}, decay_convention="between", direction=direction)


@every_form
@pytest.mark.parametrize("steep, flat", [(-1.0, 0.0), (0.0, 0.0), (-1e4, -1e-12)])
def test_gates_that_keep_everything_still_learn(steep, flat, form):
    """Check the gradient of a gate at lambda = 1, exact or up to rounding of the sums: it must not be cut off."""
    inputs = make("extreme", 97, batch=1, heads=2)
    gates = torch.where(inputs.log_decay < -1, steep, flat)
    check_gradients(inputs._replace(log_decay=gates.float().double()), {"form": form})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lanes", (1, 8), ids=("scalar", "vector"))
@pytest.mark.slow
def test_no_denormal_numbers(lanes, form):
    """Check that no denormal numbers are written, because they slow down products on some processors.

    Products of decays of 0.3 to 0.7 reach every magnitude within a few hundred tokens, their fourth powers within 50.
    """
    length = {"full": 512, "chunk64": 512, "rnn1": 50}.get(form, 197)
    rng = torch.Generator().manual_seed(0)
    q, k, v, gates = (torch.rand(1, 1, length, size, generator=rng) for size in (8, 8, 8, lanes))
    log_decay = (0.3 + 0.4 * gates).log().squeeze(-1)
    if form == "rnn1":
        log_decay = 4 * log_decay
    for decay_convention, normalize in zip(DECAY_CONVENTIONS, ("none", "sum", "sum", "none")):
        shift = 0.5 if normalize == "none" else 0.0
        leaves = Inputs(q - shift, k - shift, v - 0.5, log_decay).leaves()
        how = FORMS[form] | dict(decay_convention=decay_convention, normalize=normalize)
        with Denormals() as denormals:
            backward(attend(leaves, how), leaves)
            with torch.no_grad():
                attend(leaves, how)
        assert not denormals.counts, f"{decay_convention} {normalize}"


@pytest.mark.parametrize(
    "decay, decay_convention, direction",
    pairwise(("D", "S", "fixed vector", "vector"), DECAY_CONVENTIONS, DIRECTIONS),
)
def test_gates_above_zero_count_as_zero(decay, decay_convention, direction, monkeypatch):
    """Check that gates above 0 count as 0, without a gradient, in every form, in streams and in the definition.

    On a CPU outside of graphs they are refused.
    """
    monkeypatch.setattr("lion.ops.arguments.may_wait", lambda device: False)
    inputs = make(decay, 23, heads=2)
    above = inputs.log_decay > inputs.log_decay.median()
    log_decay = inputs.log_decay.where(~above, -inputs.log_decay)
    log_decay.view(-1)[0] = torch.inf
    above.view(-1)[0] = True
    cut = inputs._replace(log_decay=inputs.log_decay.masked_fill(above, 0))
    inputs = inputs._replace(log_decay=log_decay)
    how = dict(decay_convention=decay_convention)
    expected = oracle_attention(cut, direction=direction, **how)
    assert_close(inputs.on(reference_attention, direction=direction, **how), expected, 1e-12, "reference")
    grads = dict(definition(cut, direction=direction, **how)[1])
    grads["log_decay"] = grads["log_decay"].masked_fill(above, 0)
    for form, more in SMALL_FORMS.items():
        got, got_grads = values_and_gradients(inputs, how, more, dict(direction=direction))
        assert_close(got, expected, 1e-12, form)
        assert_gradients(got_grads, grads, 1e-10, form)
    expected = oracle_attention(cut, direction="forward", **how)
    for pieces in ([1] * 23, [3, 1, 19]):
        assert_close(stream(inputs, pieces, **how)[0], expected, 1e-12, f"step {pieces}")
    y, state = attend(inputs, how, function=prefill)
    _, same = attend(cut, how, function=prefill)
    assert_close(y, expected, 1e-12, "prefill")
    assert torch.equal(state.S, same.S) and torch.equal(state.z, same.z)


@pytest.mark.slow
def test_long_sums_lose_nothing():
    """Check prefix sums near -5e5, where float32 spacing is 0.03, with gates that matter at 1e-2."""
    inputs = make("extreme", 32_768, batch=1, heads=1)
    assert inputs.log_decay.sum() < -2.5e5
    expected = attend(inputs, dict(form="rnn", chunk_size=64))  # only sums of 64 gates
    assert_close(attend(inputs.to(torch.float32), dict(form="chunk")), expected, 2e-5)
    assert_close(attend(inputs, dict(form="chunk", chunk_size=16)), expected, 1e-12, "float64")


@pytest.mark.parametrize("decay", DECAYS)
def test_long_bf16_is_finite(decay):
    """Check bf16 states that are carried in groups of chunks."""
    inputs = make(decay, 1_024, batch=1, heads=1, dim=8, value_dim=8, dtype=torch.bfloat16)
    how = dict(form="chunk", chunk_size=8)
    assert_finite(*values_and_gradients(inputs, how))
    with torch.inference_mode():
        assert attend(inputs, how).isfinite().all()


@pytest.mark.parametrize("decay, how", grid(DECAYS, direction=DIRECTIONS, normalize=NORMALIZE))
def test_bf16_accuracy(decay, how):
    """Check the error against the best possible bf16 result: computed in float32 and rounded once.

    A form also rounds intermediate values (scores or states, weights, the reciprocal of the row sum). These roundings
    are relative to each term. Under positive features the weights of the terms do not cancel, so each rounding changes
    the output by at most about one rounding of the largest value. The roundings are independent and partly average
    out: the tolerance is twice (error of the best result + one rounding).
    """
    length = {"S": 197, "vector": 197}.get(decay, 65)
    inputs = make(decay, length, batch=1, heads=2, dim=16, value_dim=16, dtype=torch.bfloat16)
    exact = inputs.to(torch.float64).on(reference_attention, **how)
    best = inputs.to(torch.float32).on(reference_attention, **how).bfloat16()
    budget = 2 * (error(best, exact) + BF16)
    for form, more in FORMS.items():
        got = attend(inputs, how, more)
        assert got.dtype == torch.bfloat16
        assert_close(got, exact, budget, form)


@pytest.mark.slow
def test_decays_of_bfloat16_are_exact_up_to_a_rounding():
    """Check sums of one term where they are longest: nearly all tokens forget everything."""

    def mask(log_decay: torch.Tensor) -> torch.Tensor:
        how = dict(decay_convention="source", direction="both", dtype=torch.bfloat16)
        return decay_mask(make_directions(log_decay, **how))

    torch.manual_seed(0)
    for forget, keep in itertools.product((0.05, 0.5, 0.99), (-0.001, -0.3)):
        drawn = torch.rand(2, 1, 8, ONE_TERM_UP_TO + 1, 1)
        log_decay = torch.where(drawn[0] < forget, -200.0, keep * drawn[1])
        for length, limit in ((ONE_TERM_UP_TO, BF16), (ONE_TERM_UP_TO + 1, 1e-6)):
            some = log_decay[:, :, :length]
            assert (mask(some) - mask(some.double())).abs().max() < limit, (forget, keep, length)


def long_float16(decay: str, length: int) -> Inputs:
    """Make inputs without cancellation: large features, values away from 0, and gates that forget little."""
    inputs = make(decay, length, batch=1, heads=1, value_dim=2, dtype=torch.float16)
    if decay != "lit":
        inputs = inputs._replace(log_decay=inputs.log_decay.float() / 1000)
    return inputs._replace(q=8 * inputs.q, k=8 * inputs.k, v=inputs.v.abs() + 2)


@pytest.mark.parametrize(
    "decay, normalize, direction", pairwise(("lit", "D", "S", "vector"), ("sum", "max", "pre"), DIRECTIONS)
)
def test_float16_sums_beyond_its_range(decay, normalize, direction):
    """Check that numerators above 100,000 are divided before rounding.

    An output is rounded once. Gradients are computed from weights that are rounded as well, and may partly cancel.
    """
    inputs = long_float16(decay, 512)
    how = dict(direction=direction, normalize=normalize)
    exact = inputs.to(torch.float64)
    numerator, _ = attend(exact, how, function=linear_attention_parts)
    assert numerator.abs().max() > 1e5
    expected, grads = values_and_gradients(exact, how)
    for form in ("full", "chunk64", "rnn64"):
        got, got_grads = values_and_gradients(inputs, how, FORMS[form])
        assert got.dtype == torch.float16
        assert_close(got, expected, 2 * FP16, f"{form} {how}")
        for name, grad in got_grads.items():
            if normalize != "pre" or form != "rnn64":  # rnn rounds two canceling gradients separately
                assert_close(grad, grads[name], 8 * FP16, f"d{name} {form} {how}")
            assert grad.isfinite().all()
        with torch.inference_mode():
            assert_close(attend(inputs, how, FORMS[form]), expected, 2 * FP16, form)
    how = dict(normalize=normalize)
    with torch.inference_mode():
        expected = attend(inputs.to(torch.float64), how, dict(direction="forward"))
        assert_close(attend(inputs, how, function=prefill)[0], expected, 2 * FP16, "prefill")
        assert_close(stream(inputs, [256, 255, 1], **how)[0], expected, 2 * FP16, "step")


@pytest.mark.parametrize(
    "how",
    [
        dict(form="full"),
        dict(form="chunk"),
        dict(form="chunk", direction="forward"),
        dict(form="rnn", chunk_size=1024),
    ],
)
@pytest.mark.slow
def test_float16_sums_of_many_tokens(how):
    """Check a state of 16,384 keys, which exceeds the float16 range."""
    inputs = long_float16("lit", 16_384)
    assert inputs.to(torch.float64).k.sum(2).max() > torch.finfo(torch.float16).max
    with torch.inference_mode():
        assert_close(attend(inputs, how), attend(inputs.to(torch.float64), how, dict(form="chunk")), 2 * FP16)


@pytest.mark.parametrize("merge", SCAN_MERGES)
def test_float16_sums_of_several_scans(merge):
    inputs = long_float16("S", 512)
    decays = [inputs.log_decay, inputs.log_decay.flip(2)]
    orders = torch.stack([torch.arange(512), torch.randperm(512)])
    how = dict(scan_merge=merge, feature_map=None)
    q, k, v = inputs[:3]
    expected = multi_scan_attention(q.double(), k.double(), v.double(), decays, orders, **how)
    for form in ("full", "chunk4", "rnn4"):
        got = multi_scan_attention(q, k, v, decays, orders, **SMALL_FORMS[form], **how)
        assert got.dtype == torch.float16
        assert_close(got, expected, 2 * FP16)


@every_form
@pytest.mark.parametrize("decay", DECAYS)
def test_autocast_changes_nothing(decay, form):
    """Check that the operator disables autocast: gates, states and row sums keep the precision of the inputs."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make(decay, 70, batch=1, heads=1, dtype=dtype)
        leaves = inputs.leaves()
        expected = attend(leaves, form)
        expected_grads = backward(expected, leaves)
        leaves = inputs.leaves()
        with torch.autocast("cpu", torch.bfloat16):
            got = attend(leaves, form)
        assert got.dtype == dtype
        assert torch.equal(got, expected)
        for name, grad in backward(got, leaves).items():
            assert torch.equal(grad, expected_grads[name]), f"d{name}"


@every_form
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_row_sums_are_exact_beside_bf16_tokens(direction, form):
    """Check row sums for scores of one, which are sums of the mask: gates, mask or sum in bf16 would be off by 1e-3."""
    ones = torch.ones(1, 1, 1000, 1, dtype=torch.bfloat16)
    log_decay = torch.tensor([-(2.0**-10) * (1 + 2.0**-8)])  # halfway between two bf16 numbers
    inputs = Inputs(ones, ones, ones, log_decay)
    _, rowsum = attend(inputs, form, dict(direction=direction), function=linear_attention_parts)
    distance = (torch.arange(1000)[:, None] - torch.arange(1000)).double()
    mask = (distance.abs() * log_decay.double()).exp()
    mask = {"both": mask, "forward": mask.tril(), "backward": mask.triu()}[direction]
    assert rowsum.dtype == torch.float32
    assert_close(rowsum[0, 0], mask.sum(-1), 1e-5)
