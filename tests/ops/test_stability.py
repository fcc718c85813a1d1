"""Numerical stability: extreme gates, long sequences and narrow dtypes give finite and accurate results."""

import itertools

import pytest
import torch

from lion.ops import (
    SCAN_MERGES,
    linear_attention,
    linear_attention_parts,
    multi_scan_attention,
    prefill,
    reference_attention,
)
from lion.ops.decay import ONE_TERM_UP_TO, decay_mask, make_directions

from .checks import definition
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
    make,
    oracle_attention,
)
from .test_streaming import stream

BF16, FP16 = 2.0**-8, 2.0**-11  # unit roundoff


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_extreme_gates_have_finite_gradients(direction, form):
    gates = DECAY_CONVENTIONS if form != "rnn1" else ("source",)  # rnn1 is slow
    for decay_convention in gates:
        leaves = make("extreme", 1000, batch=1, heads=1, dtype=torch.float32).leaves()
        y = linear_attention(
            *leaves, **FORMS[form], direction=direction, decay_convention=decay_convention, feature_map=None
        )
        assert y.isfinite().all()
        for name, grad in backward(y, leaves).items():
            assert grad.isfinite().all(), f"d{name} {decay_convention}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("closed_gate", (-1e4, -1e9, -1e30, -float("inf")))
def test_gates_below_every_float(closed_gate, form):
    """Check lambda = 0 in every dtype, for any logarithm: cumulative sums must keep the precision of other gates."""
    for share in (0.3, 1.0):
        check_closed("S", closed_gate, share, FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ("S", "vector"))
def test_gates_of_zero_between_others(decay, form):
    """Check that a closed gate separates the tokens on both sides, but not its own token, read before the decay."""
    for direction in DIRECTIONS:
        check_closed(decay, -float("inf"), 0.3, FORMS[form] | dict(decay_convention="between", direction=direction))


def check_closed(decay: str, closed_gate: float, share: float, how: dict) -> None:
    inputs = make(decay, 67, batch=1)
    closed = torch.rand(inputs.log_decay.shape, generator=torch.Generator().manual_seed(4)) < share
    inputs = inputs._replace(log_decay=inputs.log_decay.masked_fill(closed, closed_gate))
    arguments = {name: x for name, x in how.items() if name in ("decay_convention", "direction")}
    expected, expected_grads = definition(inputs, **arguments)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 5e-5)):
        leaves = inputs.to(dtype).leaves()
        got = linear_attention(*leaves, **how, feature_map=None)
        assert_close(got, expected, tolerance, f"{dtype}")
        for name, grad in backward(got, leaves).items():
            assert_close(grad, expected_grads[name], tolerance, f"d{name} {dtype}", floor=0.1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lanes", (1, 8), ids=("scalar", "vector"))
@pytest.mark.slow
def test_no_denormal_numbers(lanes, form):
    """Check that no denormal numbers are written, because they slow down products on some processors.

    Products of decays of 0.3 to 0.7 reach every magnitude within a few hundred tokens, their fourth powers within 50.
    """
    length = {"full": 512, "chunk64": 512, "rnn1": 50}.get(form, 197)
    rng = torch.Generator().manual_seed(0)
    q, k, v, gates = (torch.rand(1, 2, length, size, generator=rng) for size in (8, 8, 8, lanes))
    log_decay = (0.3 + 0.4 * gates).log().squeeze(-1) * (4 if form == "rnn1" else 1)
    for decay_convention, normalize in zip(DECAY_CONVENTIONS, ("none", "sum", "sum", "none")):
        signs = 0.5 if normalize == "none" else 0.0
        leaves = Inputs(q - signs, k - signs, v - 0.5, log_decay).leaves()
        how = FORMS[form] | dict(decay_convention=decay_convention, normalize=normalize)
        with Denormals() as denormals:
            backward(linear_attention(*leaves, **how, feature_map=None), leaves)
            with torch.no_grad():
                linear_attention(*leaves, **how, feature_map=None)
        assert not denormals.counts, f"{decay_convention} {normalize}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steep, flat", [(-1.0, 0.0), (0.0, 0.0), (-1e4, -1e-12)])
def test_gates_that_keep_everything_still_learn(steep, flat, form):
    """Check the gradient of a gate at lambda = 1, exact or up to rounding of the sums: it must not be cut off."""
    inputs = make("extreme", 197, batch=1, heads=2)
    log_decay = torch.where(inputs.log_decay < -1, steep, flat).float().double()
    inputs = inputs._replace(log_decay=log_decay)
    expected = definition(inputs)[1]["log_decay"]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 5e-5)):
        leaves = inputs.to(dtype).leaves()
        got = backward(linear_attention(*leaves, **FORMS[form], feature_map=None), leaves)["log_decay"]
        assert_close(got, expected, tolerance, f"{dtype}")


@pytest.mark.parametrize("decay", ("D", "S", "fixed vector", "vector"))
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_gates_above_zero_count_as_zero(decay_convention, decay, monkeypatch):
    """Check that gates above 0 count as 0, without a gradient, in every form, in streams and in the definition.

    On a CPU outside of graphs they are refused.
    """
    monkeypatch.setattr("lion.ops.arguments.may_wait", lambda device: False)
    inputs = make(decay, 23)
    above = inputs.log_decay > inputs.log_decay.median()
    cut = inputs._replace(log_decay=inputs.log_decay.masked_fill(above, 0))
    inputs = inputs._replace(log_decay=inputs.log_decay.where(~above, -inputs.log_decay))
    inputs.log_decay.view(-1)[0] = torch.inf
    above.view(-1)[0], cut.log_decay.view(-1)[0] = True, 0
    how = dict(decay_convention=decay_convention)
    for direction in DIRECTIONS:
        expected = oracle_attention(cut, direction=direction, **how)
        assert_close(reference_attention(*inputs, direction=direction, **how), expected, 1e-12, "reference")
        grads = definition(cut, direction=direction, **how)[1]
        for form, more in SMALL_FORMS.items():
            leaves = inputs.leaves()
            got = linear_attention(*leaves, direction=direction, **how, **more, feature_map=None)
            assert_close(got, expected, 1e-12, f"{form} {direction}")
            for name, grad in backward(got, leaves).items():
                want = grads[name].masked_fill(above, 0) if name == "log_decay" else grads[name]
                assert_close(grad, want, 1e-10, f"d{name} {form} {direction}", floor=0.1)
    expected = oracle_attention(cut, direction="forward", **how)
    for pieces in ([1] * 23, [3, 1, 19]):
        assert_close(stream(inputs, pieces, **how)[0], expected, 1e-12, f"step {pieces}")
    (y, state), (_, same) = prefill(*inputs, **how, feature_map=None), prefill(*cut, **how, feature_map=None)
    assert_close(y, expected, 1e-12, "prefill")
    assert torch.equal(state.S, same.S) and torch.equal(state.z, same.z)


@pytest.mark.parametrize("merge", SCAN_MERGES)
def test_gates_above_zero_in_several_scans(merge, monkeypatch):
    monkeypatch.setattr("lion.ops.arguments.may_wait", lambda device: False)
    inputs, orders = make("S", 9), torch.stack([torch.arange(9), torch.arange(9).flip(0)])
    decays = [1 + make("S", 9, seed=s).log_decay for s in range(2)]
    assert all((a > 0).any() for a in decays)
    expected = multi_scan_attention(
        *inputs[:3], [a.clamp(max=0) for a in decays], orders, scan_merge=merge, feature_map=None
    )
    for form, how in SMALL_FORMS.items():
        got = multi_scan_attention(*inputs[:3], decays, orders, scan_merge=merge, **how, feature_map=None)
        assert_close(got, expected, 1e-12, form)


@pytest.mark.slow
def test_long_sums_lose_nothing():
    """Check prefix sums near -1e6, where float32 spacing is 0.06, with gates that matter at 1e-2."""
    inputs = make("extreme", 65_536, batch=1, heads=1)
    assert inputs.log_decay.sum() < -5e5
    expected = linear_attention(*inputs, form="rnn", chunk_size=64, feature_map=None)  # only sums of 64 gates
    got = linear_attention(*inputs.to(torch.float32), form="chunk", feature_map=None)
    assert_close(got, expected, 2e-5)
    assert_close(linear_attention(*inputs, form="chunk", chunk_size=16, feature_map=None), expected, 1e-12, "float64")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.slow
def test_long_bf16_is_finite(decay):
    inputs = make(decay, 65_536, batch=1, heads=1, dim=8, value_dim=8, dtype=torch.bfloat16)
    forms = {"chunk": dict(form="chunk"), "rnn": dict(form="rnn", chunk_size=1024)}
    if decay == "lit":
        forms["full"] = dict(form="full")
    for form, how in forms.items():
        with torch.inference_mode():
            assert linear_attention(*inputs, **how, feature_map=None).isfinite().all(), form
    leaves = inputs.leaves()
    for name, grad in backward(linear_attention(*leaves, form="chunk", feature_map=None), leaves).items():
        assert grad.isfinite().all(), f"d{name}"


@pytest.mark.parametrize("decay, length", list(zip(DECAYS, (65, 65, 197, 65, 197, 65))))
def test_bf16_accuracy(decay, length):
    """Check the error against the best possible bf16 result: computed in float32 and rounded once.

    A form also rounds intermediate values (scores or states, weights, the reciprocal of the row sum). These roundings
    are relative to each term. Under positive features the weights of the terms do not cancel, so each rounding changes
    the output by at most about one rounding of the largest value. The roundings are independent and partly average
    out: the tolerance is twice (error of the best result + one rounding).
    """
    inputs = make(decay, length, batch=1, heads=2, dim=16, value_dim=16, dtype=torch.bfloat16)
    for direction in DIRECTIONS:
        for normalize in NORMALIZE:
            arguments = dict(direction=direction, normalize=normalize)
            exact = reference_attention(*inputs.to(torch.float64), **arguments)
            best = reference_attention(*inputs.to(torch.float32), **arguments).bfloat16()
            budget = 2 * (error(best, exact) + BF16)
            for form, how in FORMS.items():
                got = linear_attention(*inputs, **how, **arguments, feature_map=None)
                assert got.dtype == torch.bfloat16
                assert_close(got, exact, budget, f"{form} {arguments}")


def test_decays_of_bfloat16_are_exact_up_to_a_rounding():
    """Check sums of one term where they are longest: nearly all tokens forget everything."""
    torch.manual_seed(0)
    for forget, keep in itertools.product((0.05, 0.5, 0.99), (-0.001, -0.3)):
        drawn = torch.rand(2, 1, 8, ONE_TERM_UP_TO + 1, 1)
        log_decay = torch.where(drawn[0] < forget, -200.0, keep * drawn[1])
        for length, limit in ((ONE_TERM_UP_TO, BF16), (ONE_TERM_UP_TO + 1, 1e-6)):
            masks = [
                decay_mask(make_directions(x, None, decay_convention="source", direction="both", dtype=torch.bfloat16))
                for x in (log_decay[:, :, :length], log_decay[:, :, :length].double())
            ]
            assert (masks[0] - masks[1]).abs().max() < limit, (forget, keep, length)


@pytest.mark.parametrize("normalize", ("sum", "max", "pre"))
@pytest.mark.parametrize("decay", ("lit", "D", "S", "vector"))
def test_float16_sums_beyond_its_range(decay, normalize):
    """Check that numerators above 100,000 are divided before rounding.

    An output is rounded once. Gradients are computed from weights that are rounded as well, and may partly cancel.
    """
    inputs = long_float16(decay, 512)
    for direction in DIRECTIONS:
        how = dict(direction=direction, normalize=normalize)
        exact = inputs.to(torch.float64).leaves()
        numerator, _ = linear_attention_parts(*exact, **how, feature_map=None)
        assert numerator.abs().max() > 1e5
        expected = linear_attention(*exact, **how, feature_map=None)
        grads = backward(expected, exact)
        for form in ("full", "chunk64", "rnn64"):
            leaves = inputs.leaves()
            got = linear_attention(*leaves, **FORMS[form], **how, feature_map=None)
            assert got.dtype == torch.float16
            assert_close(got, expected, 2 * FP16, f"{form} {how}")
            for name, grad in backward(got, leaves).items():
                if normalize != "pre" or "rnn" not in form:  # rnn rounds two canceling gradients separately
                    assert_close(grad, grads[name], 8 * FP16, f"d{name} {form} {how}")
                assert grad.isfinite().all()
            with torch.inference_mode():
                got = linear_attention(*inputs, **FORMS[form], **how, feature_map=None)
                assert_close(got, expected, 2 * FP16, form)
    with torch.inference_mode():
        expected = linear_attention(
            *inputs.to(torch.float64), direction="forward", normalize=normalize, feature_map=None
        )
        got, _ = prefill(*inputs, normalize=normalize, feature_map=None)
        assert_close(got, expected, 2 * FP16, "prefill")
        assert_close(stream(inputs, [256, 255, 1], normalize=normalize)[0], expected, 2 * FP16, "step")


def test_float16_sums_of_many_tokens():
    """Check a state of 16,384 keys, which exceeds the float16 range."""
    inputs = long_float16("lit", 16_384)
    assert inputs.to(torch.float64).k.sum(2).max() > torch.finfo(torch.float16).max
    for form, how in (
        ("full", {}),
        ("chunk", {}),
        ("chunk", dict(direction="forward")),
        ("rnn", dict(chunk_size=1024)),
    ):
        expected = linear_attention(*inputs.to(torch.float64), **how, feature_map=None)
        with torch.inference_mode():
            assert_close(
                linear_attention(*inputs, form=form, **how, feature_map=None), expected, 2 * FP16, f"{form} {how}"
            )


@pytest.mark.parametrize("merge", SCAN_MERGES)
def test_float16_sums_of_several_scans(merge):
    inputs = long_float16("S", 512)
    decays, orders = [inputs.log_decay, inputs.log_decay.flip(2)], torch.stack([torch.arange(512), torch.randperm(512)])
    expected = multi_scan_attention(*inputs.to(torch.float64)[:3], decays, orders, scan_merge=merge, feature_map=None)
    for form in SMALL_FORMS.values():
        if form.get("chunk_size") != 1:
            got = multi_scan_attention(*inputs[:3], decays, orders, scan_merge=merge, **form, feature_map=None)
            assert got.dtype == torch.float16
            assert_close(got, expected, 2 * FP16)


def long_float16(decay: str, length: int):
    """Make inputs without cancellation: large features, values away from 0, and gates that forget little."""
    inputs = make(decay, length, batch=1, heads=1, value_dim=2, dtype=torch.float16)
    gates = None if inputs.log_decay is None else inputs.log_decay.float() / 1000
    return inputs._replace(q=8 * inputs.q, k=8 * inputs.k, v=inputs.v.abs() + 2, log_decay=gates)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_autocast_changes_nothing(decay, form):
    """Check that the operator disables autocast: gates, states and row sums keep the precision of the inputs."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make(decay, 70, batch=1, heads=1, dtype=dtype)
        leaves = inputs.leaves()
        expected = linear_attention(*leaves, **FORMS[form], feature_map=None)
        expected_grads = backward(expected, leaves)
        leaves = inputs.leaves()
        with torch.autocast("cpu", torch.bfloat16):
            got = linear_attention(*leaves, **FORMS[form], feature_map=None)
        assert got.dtype == dtype
        assert torch.equal(got, expected)
        for name, grad in backward(got, leaves).items():
            assert torch.equal(grad, expected_grads[name]), f"d{name}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_row_sums_are_exact_beside_bf16_tokens(direction, form):
    """Check row sums for scores of one, which are sums of the mask: gates, mask or sum in bf16 would be off by 1e-3."""
    ones = torch.ones(1, 1, 1000, 1, dtype=torch.bfloat16)
    log_decay = torch.tensor([-(2.0**-10) * (1 + 2.0**-8)])  # halfway between two bf16 numbers
    _, rowsum = linear_attention_parts(
        ones, ones, ones, log_decay, **FORMS[form], direction=direction, feature_map=None
    )
    distance = (torch.arange(1000)[:, None] - torch.arange(1000)).double()
    mask = (distance.abs() * log_decay.double()).exp()
    mask = {"both": mask, "forward": mask.tril(), "backward": mask.triu()}[direction]
    assert rowsum.dtype == torch.float32
    assert_close(rowsum[0, 0], mask.sum(-1), 1e-5)
