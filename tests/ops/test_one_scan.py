"""LightNet attention: keys normalised over the sequence, in every form, against the definition and a softmax."""

import pytest
import torch
from torch import Tensor

from lion.ops import SegmentIndex, one_scan_attention, piecewise, reference_one_scan_attention, segment_index

from .checks import (
    BATCH,
    LENGTH,
    SEGMENTS,
    VALID,
    alone,
    assert_finite,
    attend,
    by_segments,
    by_valid,
    check_gradients,
    check_masks,
    check_outputs,
    every_form,
    poisoned,
    values_and_gradients,
)
from .helpers import (
    FORMS,
    SMALL_FORMS,
    Allocations,
    Inputs,
    assert_close,
    backward,
    case,
    make,
    oracle_rotate,
    pairwise,
)

ANGLES = ("", "angles L", "angles HL", "angles BHL")
MASKS = {
    "none": {},
    "valid": dict(valid=VALID),
    "segments": dict(valid=VALID, segments=SEGMENTS),
    "prepared": dict(segments=segment_index(VALID, SEGMENTS)),
}


def inputs(length: int = LENGTH, what: str = "", spread: float = 3.0, **shape) -> Inputs:
    """Make signed queries and key logits."""
    given = case(make("lit", length, **shape), what)
    return given._replace(q=given.q - 0.7, k=spread * (given.k - 0.7))


def one_scan(given: Inputs, *settings: dict) -> Tensor:
    return attend(given, *settings, function=one_scan_attention)


@pytest.mark.parametrize("what", ANGLES)
def test_the_definition_is_a_softmax_over_tokens(what):
    given = inputs(9, what)
    q = oracle_rotate(given.q, given.angles)
    k = oracle_rotate(given.k.softmax(2), given.angles)
    assert_close(given.on(reference_one_scan_attention), (q @ k.mT) @ given.v, 1e-13)


@pytest.mark.parametrize("length, what", pairwise((1, 2, 64, 65, 197), ANGLES))
@pytest.mark.slow
def test_every_form_is_the_definition(length, what):
    """Check values and gradients of every form against the definition."""
    given = inputs(length, what, batch=2, heads=2)
    check_gradients(given, FORMS, one_scan_attention, reference_one_scan_attention)
    with torch.inference_mode():
        check_outputs(given, FORMS, one_scan_attention, reference_one_scan_attention)


@pytest.mark.parametrize("size", [1, 3, 7, 99])
def test_any_chunk_size(size):
    """Check chunk sizes, also without gradients, when long sequences are scanned: 120 tokens in pieces of 6 chunks."""
    given = inputs(120, "angles L")
    want = given.on(reference_one_scan_attention)
    for form in ("chunk", "rnn"):
        with torch.inference_mode():
            assert_close(one_scan(given, dict(form=form, chunk_size=size)), want, 1e-12)


@pytest.mark.parametrize("what", ["", "angles BHL"])
@every_form
def test_padding_and_segments_are_sequences_by_themselves(form, what):
    check_masks(inputs(LENGTH, what, batch=BATCH, heads=2), form, one_scan_attention)


def separate(given: Inputs, sequences: list[list[Tensor]]) -> Tensor:
    def unmapped(q, k, v, feature_map, **gates):
        return reference_one_scan_attention(q, k, v, **gates)

    return alone(given, sequences, unmapped)


@every_form
def test_masks_without_gradients(form):
    """Check poisoned padding, and prepared segments with holes, against the definition of every sequence alone."""
    given = inputs(LENGTH, "angles BHL", batch=BATCH)
    for masks, present in (("valid", VALID), ("prepared", VALID & (SEGMENTS >= 0))):
        sequences = by_valid(VALID) if masks == "valid" else by_segments(SEGMENTS, VALID)
        got = one_scan(poisoned(given, present), form, MASKS[masks])
        assert_close(got, separate(given, sequences), 1e-12, masks)
        assert not got[(~present)[:, None].expand(got.shape[:3])].any(), masks
    assert torch.equal(got, one_scan(given, form, MASKS["segments"]))
    whole = one_scan(given, form, dict(segments=SegmentIndex(None, None)))
    assert torch.equal(whole, one_scan(given, form))


@pytest.mark.parametrize(
    "form, masks, dtype", pairwise(tuple(SMALL_FORMS), ("none", "valid", "segments"), (torch.float32, torch.bfloat16))
)
def test_extreme_keys(form, masks, dtype):
    """Check keys of +-10,000: the maximum has all weight; values and gradients are finite, also without tokens."""
    given = inputs(LENGTH, batch=BATCH).to(dtype)
    drawn = torch.rand(given.k.shape, generator=torch.Generator().manual_seed(5))
    signs = torch.where(drawn < 0.5, -1.0, 1.0)
    ones = torch.ones_like(signs)
    for k in (1e4 * signs, 1e4 * given.k, -1e4 * ones, 1e4 * ones):
        some = given._replace(k=k.to(dtype))
        y, grads = values_and_gradients(some, SMALL_FORMS[form], MASKS[masks], call=one_scan)
        assert_finite(y, grads)
        want = some.to(torch.float64).on(reference_one_scan_attention, **MASKS[masks])
        assert_close(y, want, 2e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_softmax_is_float32_beside_bf16(form):
    """Check 1,024 equal keys; sums in bf16 would stop at 256."""
    ones = torch.ones(1, 1, 1024, 4)
    equal = Inputs(ones, torch.zeros_like(ones), ones)
    for dtype in (torch.bfloat16, torch.float16):
        for masks in ({}, dict(segments=torch.zeros(1, 1024, dtype=torch.long))):
            with torch.inference_mode():
                y = one_scan(equal.to(dtype), FORMS[form], masks)
            assert y.dtype == dtype
            assert_close(y, torch.full_like(y, 4.0), 0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert one_scan(equal, FORMS[form]).dtype == torch.float32


@every_form
def test_a_feature_map_is_of_the_queries(form):
    given = inputs(LENGTH, batch=BATCH)
    mapped = given._replace(q=torch.nn.functional.elu(given.q) + 1)
    how = form | MASKS["valid"]
    assert_close(one_scan(given, how, dict(feature_map="elu1")), one_scan(mapped, how), 1e-14)


@pytest.mark.parametrize("what", ["", "angles L"])
@pytest.mark.parametrize(
    "form, chunk, lengths",
    [("rnn", 16, (61, 149)), ("rnn", 1, (61, 149)), ("chunk", 1, (101, 201)), ("chunk", 16, (1601, 3201))],
)
def test_memory_of_a_scan_does_not_grow(form, chunk, lengths, what):
    """Check that only the outputs are as long as the sequence."""
    found = []
    for length in lengths:
        given = inputs(length, what, dtype=torch.float32)
        with torch.inference_mode(), Allocations() as allocations:
            one_scan(given, dict(form=form, chunk_size=chunk))
        long = [shape for shape in allocations.shapes if length in shape]
        assert {shape[-1] for shape in long} <= {6, 0}  # the outputs, and the empty tensor of absent angles
        allocations.shapes = [shape for shape in allocations.shapes if length not in shape]
        found.append((len(long), allocations.largest()))
    assert found[0] == found[1] and found[0][0] <= 3


def test_no_square(length=512):
    leaves = inputs(length, dtype=torch.float32, batch=1, heads=1).leaves()
    for masks in ({}, dict(segments=(torch.arange(length) // 100)[None])):
        with Allocations() as allocations:
            backward(one_scan(leaves, dict(form="full"), masks), leaves)
        assert allocations.largest() <= length * 64


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(form="chunks"), "form: expected one of full, chunk, rnn, auto, got 'chunks'"),
        (dict(form="rnn", chunk_size=0), "chunk_size: expected at least 1, got 0"),
        (dict(angles=torch.zeros(4, 2)), r"angles: expected floating point \(5, 2\)"),
        (dict(valid=torch.ones(2, 4, dtype=torch.bool)), r"valid: expected bool \(2, 5\)"),
        (dict(k=torch.zeros(2, 3, 4, 4)), r"k: expected torch\.float64"),
    ],
)
def test_bad_arguments(change, message):
    q, k, v = inputs(5)[:3]
    with pytest.raises(ValueError, match=message):
        one_scan_attention(**dict(q=q, k=k, v=v) | change)


@pytest.mark.compiled
def test_one_graph(monkeypatch):
    monkeypatch.setattr(piecewise, "BACKEND", "eager")
    piecewise.compiled.cache_clear()
    torch._dynamo.reset()
    given = inputs(LENGTH, "angles L", batch=BATCH, heads=2, dtype=torch.float32)

    def with_gradients(given: Inputs) -> Tensor:
        full = one_scan(given, dict(form="full"))
        cut = one_scan(given, dict(form="full"), MASKS["prepared"])
        product = one_scan(given, dict(form="rnn", chunk_size=8), MASKS["prepared"])  # of scores, without a loop
        return torch.cat([full, cut, product])

    def without(given: Inputs) -> Tensor:
        loop = one_scan(given, dict(form="chunk", chunk_size=1), MASKS["valid"])
        return torch.cat([loop, one_scan(given, dict(form="rnn", chunk_size=12), MASKS["prepared"])])

    compiled = torch.compile(with_gradients, fullgraph=True, dynamic=False, backend="aot_eager")
    got, found = values_and_gradients(given, call=compiled)
    want, grads = values_and_gradients(given, call=with_gradients)
    assert_close(got, want, 1e-5)
    for name, grad in found.items():
        assert_close(grad, grads[name], 1e-5, name)
    with torch.no_grad():
        got = torch.compile(without, fullgraph=True, dynamic=False, backend="eager")(given)
        assert_close(got, without(given), 1e-5)
    piecewise.compiled.cache_clear()
    torch._dynamo.reset()
