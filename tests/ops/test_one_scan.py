"""LightNet attention: keys normalised over the sequence, in every form, against the definition and a softmax."""

import pytest
import torch
from torch import Tensor

from lion.ops import SegmentIndex, one_scan_attention, reference_one_scan_attention, segment_index
from tests.ops.checks import BATCH, LENGTH, SEGMENTS, VALID, by_segments, by_valid, poisoned
from tests.ops.helpers import (
    FORMS,
    SMALL_FORMS,
    Allocations,
    Case,
    assert_close,
    backward,
    case,
    make,
    oracle_rotate,
)

ANGLES = ("", "angles L", "angles HL", "angles BHL")
every_form = pytest.mark.parametrize("form", SMALL_FORMS)


def one_scan(q, k, v, log_decay=None, **how) -> Tensor:
    """Call the operator with the arguments of `linear_attention`."""
    return one_scan_attention(q, k, v, **how)


def definition(q, k, v, log_decay=None, **how) -> Tensor:
    return reference_one_scan_attention(q, k, v, **how)


def inputs(length: int = LENGTH, what: str = "", spread: float = 3.0, **shape) -> Case:
    """Make signed queries and key logits."""
    given = case(make("lit", length, **shape), what)
    return given._replace(q=given.q - 0.7, k=spread * (given.k - 0.7))


@pytest.mark.parametrize("what", ANGLES)
def test_the_definition_is_a_softmax_over_tokens(what):
    given = inputs(9, what)
    k = given.k.softmax(2)
    q, k = (given.q, k) if given.angles is None else (oracle_rotate(x, given.angles) for x in (given.q, k))
    assert_close(given.on(definition), (q @ k.mT) @ given.v, 1e-13)


@pytest.mark.parametrize("what", ANGLES)
@pytest.mark.parametrize("length", [1, 2, 64, 65, 197])
def test_every_form_is_the_definition(length, what):
    """Check values and gradients of every form against the definition."""
    given = inputs(length, what, batch=2, heads=2)
    leaves = given.leaves()
    want = leaves.on(definition)
    grads = backward(want, leaves)
    for form, how in FORMS.items():
        for dtype, tolerance, of_gradients in ((torch.float64, 1e-12, 1e-10), (torch.float32, 2e-5, 5e-5)):
            leaves = given.to(dtype).leaves()
            got = leaves.on(one_scan, **how)
            assert got.dtype == dtype
            assert_close(got, want, tolerance, f"{form} {dtype}")
            for name, grad in backward(got, leaves).items():
                assert_close(grad, grads[name], of_gradients, f"d{name} {form} {dtype}", floor=0.1)
            with torch.inference_mode():
                assert_close(given.to(dtype).on(one_scan, **how), want, tolerance, f"inference {form} {dtype}")


@pytest.mark.parametrize("size", [1, 3, 7, 99])
def test_any_chunk_size(size):
    """Check chunk sizes, also without gradients, when long sequences are scanned: 120 tokens in pieces of 6 chunks."""
    given = inputs(120, "angles L")
    want = given.on(definition)
    for form in ("chunk", "rnn"):
        with torch.inference_mode():
            assert_close(given.on(one_scan, form=form, chunk_size=size), want, 1e-12)


@pytest.mark.parametrize("what", ["", "angles BHL"])
@pytest.mark.parametrize("masks", ["valid", "segments"])
@pytest.mark.parametrize("grad", [True, False])
@every_form
def test_padding_and_segments_are_sequences_by_themselves(form, masks, what, grad):
    """Check a masked batch with poisoned padding against separate clean sequences: values, gradients, exact zeros."""
    present = VALID if masks == "valid" else VALID & (SEGMENTS >= 0)
    given, how = inputs(LENGTH, what, batch=BATCH), SMALL_FORMS[form]
    pieces = by_valid(VALID) if masks == "valid" else by_segments(SEGMENTS, VALID)
    leaves = given.leaves()
    rows = []
    for row, places in enumerate(pieces):
        y = torch.zeros_like(leaves.v[:1])
        for index in places:
            y = y.index_add(2, index, leaves.tokens(row, index).on(definition))
        rows.append(y)
    want = torch.cat(rows)
    grads = backward(want, leaves)
    leaves = poisoned(given, present).leaves()
    with torch.set_grad_enabled(grad):
        got = leaves.on(one_scan, **how, valid=VALID, segments=SEGMENTS if masks == "segments" else None)
    assert_close(got, want, 1e-12)
    absent = (~present)[:, None].expand(got.shape[:3])
    assert (got[absent] == 0).all()
    for name, found in backward(got, leaves).items() if grad else ():
        assert found.isfinite().all(), name
        assert_close(found, grads[name], 1e-10, name, floor=0.1)
        assert (found[absent] == 0).all()


@every_form
def test_prepared_segments_and_holes(form):
    given = inputs(LENGTH, batch=BATCH)
    want = given.on(one_scan, **SMALL_FORMS[form], valid=VALID, segments=SEGMENTS)
    got = given.on(one_scan, **SMALL_FORMS[form], segments=segment_index(VALID, SEGMENTS))
    assert torch.equal(got, want)
    sequences = by_segments(SEGMENTS, VALID)
    assert_close(got, torch.cat([one_row(given, row, places) for row, places in enumerate(sequences)]), 1e-12)
    whole = given.on(one_scan, **SMALL_FORMS[form], segments=SegmentIndex(None, None))
    assert torch.equal(whole, given.on(one_scan, **SMALL_FORMS[form]))


def one_row(given: Case, row: int, places: list[Tensor]) -> Tensor:
    y = torch.zeros_like(given.v[:1])
    for index in places:
        y = y.index_add(2, index, given.tokens(row, index).on(definition))
    return y


@every_form
def test_tokens_in_another_order_are_the_same_tokens(form):
    """Check that the order of tokens does not matter, in every form."""
    given, order = inputs(LENGTH), torch.randperm(LENGTH, generator=torch.Generator().manual_seed(3))
    moved = given._replace(**{name: getattr(given, name)[:, :, order] for name in "qkv"})
    how = SMALL_FORMS[form]
    assert_close(moved.on(one_scan, **how), given.on(one_scan, **how)[:, :, order], 1e-13)
    turned = inputs(LENGTH, "angles L")
    moved = turned._replace(**{name: getattr(turned, name)[:, :, order] for name in "qkv"})
    assert (moved.on(one_scan, **how) - turned.on(one_scan, **how)[:, :, order]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masks", ["none", "valid", "segments"])
@every_form
def test_extreme_keys(form, masks, dtype):
    """Check keys of +-10,000: the maximum has all weight; values and gradients are finite, also without tokens."""
    given = inputs(LENGTH, batch=BATCH).to(dtype)
    signs = torch.where(torch.rand(given.k.shape, generator=torch.Generator().manual_seed(5)) < 0.5, -1.0, 1.0)
    for k in (1e4 * signs, 1e4 * given.k, torch.full_like(given.k, -1e4), torch.full_like(given.k, 1e4)):
        leaves = given._replace(k=k.to(dtype)).leaves()
        masked = dict(valid=VALID) if masks != "none" else {}
        masked |= dict(segments=SEGMENTS) if masks == "segments" else {}
        y = leaves.on(one_scan, **SMALL_FORMS[form], **masked)
        assert y.isfinite().all()
        assert all(grad.isfinite().all() for grad in backward(y, leaves).values())
        want = given._replace(k=k.to(dtype)).to(torch.float64).on(definition, **masked)
        assert_close(y.detach(), want, 2e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.slow
def test_the_softmax_is_float32_beside_bf16():
    """Check 4,096 equal keys; sums in bf16 would stop at 256."""
    q, k, v = torch.ones(1, 1, 4096, 4), torch.zeros(1, 1, 4096, 4), torch.ones(1, 1, 4096, 4)
    segments = torch.zeros(1, 4096, dtype=torch.long)
    for form, how in FORMS.items():
        for dtype in (torch.bfloat16, torch.float16):
            for given in ({}, {"segments": segments}) if form != "rnn1" else ({},):
                with torch.inference_mode():
                    y = one_scan_attention(q.to(dtype), k.to(dtype), v.to(dtype), **how, **given)
                assert y.dtype == dtype
                assert_close(y, torch.full_like(y, 4.0), 0.02, form)
        with torch.autocast("cpu", torch.bfloat16):
            assert one_scan_attention(q, k, v, **how).dtype == torch.float32


@every_form
def test_a_feature_map_is_of_the_queries(form):
    given, how = inputs(LENGTH, batch=BATCH), SMALL_FORMS[form]
    want = given._replace(q=torch.nn.functional.elu(given.q) + 1).on(one_scan, **how, valid=VALID)
    assert_close(given.on(one_scan, **how, valid=VALID, feature_map="elu1"), want, 1e-14)


@pytest.mark.parametrize("what", ["", "angles L"])
@pytest.mark.parametrize("chunk", [1, 16])
def test_memory_of_a_scan_does_not_grow(chunk, what):
    """Check that only the outputs are as long as the sequence."""

    def allocated(form: str, length: int):
        given = inputs(length, what, dtype=torch.float32)
        with torch.inference_mode(), Allocations() as allocations:
            given.on(one_scan, form=form, chunk_size=chunk)
        long = [shape for shape in allocations.shapes if length in shape]
        return long, max(map(torch.Size.numel, map(torch.Size, set(allocations.shapes) - set(long))))

    for form, lengths in (("rnn", (61, 149)), ("chunk", (100 * chunk + 1, 200 * chunk + 1))):
        (short, at_short), (long, at_long) = (allocated(form, length) for length in lengths)
        assert at_short == at_long
        assert {shape[-1] for shape in (*short, *long)} <= {6, 0}  # the outputs, and the empty tensor of absent angles
        assert len(short) == len(long) <= 3


def test_no_square(length=512):
    leaves = inputs(length, dtype=torch.float32, batch=1, heads=1).leaves()
    segments = (torch.arange(length) // 100)[None]
    for given in ({}, {"segments": segments}):
        with Allocations() as allocations:
            backward(leaves.on(one_scan, form="full", **given), leaves)
        assert allocations.largest() <= length * 64


def test_bad_arguments():
    given = inputs(5)
    with pytest.raises(ValueError, match="form: expected one of full, chunk, rnn, auto, got 'chunks'"):
        given.on(one_scan, form="chunks")
    with pytest.raises(ValueError, match="chunk_size: expected at least 1, got 0"):
        given.on(one_scan, form="rnn", chunk_size=0)
    with pytest.raises(ValueError, match=r"angles: expected floating point \(5, 2\)"):
        given.on(one_scan, angles=torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"valid: expected bool \(2, 5\)"):
        given.on(one_scan, valid=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"k: expected torch\.float64"):
        one_scan_attention(given.q, given.k[:, :, :4], given.v)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("how", "grad", "masks"),
    [
        (dict(form="full"), True, {}),
        (dict(form="full"), True, dict(segments=segment_index(VALID, SEGMENTS))),
        (dict(form="chunk", chunk_size=1), False, dict(valid=VALID)),  # runs as a loop
        (dict(form="rnn", chunk_size=8), True, dict(segments=segment_index(VALID, SEGMENTS))),  # runs as a product
        (dict(form="rnn", chunk_size=12), False, dict(segments=segment_index(VALID, SEGMENTS))),
    ],
)
def test_one_graph(how, grad, masks):
    torch._dynamo.reset()
    given = inputs(LENGTH, "angles L", batch=BATCH, dtype=torch.float32)
    compiled = torch.compile(one_scan, fullgraph=True, dynamic=False, backend="aot_eager")
    leaves, same = given.leaves(), given.leaves()
    want = same.on(one_scan, **how, **masks)
    with torch.set_grad_enabled(grad):
        got = leaves.on(compiled, **how, **masks)
    assert_close(got, want, 1e-5)
    grads = backward(want, same)
    for name, found in backward(got, leaves).items() if grad else ():
        assert_close(found, grads[name], 1e-5, name)
    torch._dynamo.reset()
