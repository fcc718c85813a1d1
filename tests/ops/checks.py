"""Checks of forms against the definition, and of masked batches against separate sequences."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from lion.ops import linear_attention, reference_attention

from .helpers import SMALL_FORMS, Inputs, assert_close, backward

every_form = pytest.mark.parametrize("form", SMALL_FORMS.values(), ids=SMALL_FORMS)

LENGTH = 23
HOLES = {0, 3, 4, 9, 15, 16, 17, 18, 19, 22}  # also at both ends, and one hole as long as a chunk
VALID = torch.tensor(
    [
        [True] * 13 + [False] * 10,  # padding right
        [False] * 9 + [True] * 14,  # padding left
        [t not in HOLES for t in range(LENGTH)],
        [False] * LENGTH,  # an empty sequence
        [True] * LENGTH,
    ]
)
SEGMENTS = torch.tensor(
    [
        [4] * 7 + [2] + [9] * 15,  # ids in any order, and a segment of one token
        [-1] * 3 + [0] * 6 + [-1] * 2 + [1] * 8 + [-1] * 4,  # padding at both ends and between segments
        [7, 7, -1, 7, -1, -1, -1, -1, -1, 7, 7] + [3, -1, 3, 3, -1, 3] + [5] * 6,  # holes inside segments
        [-1] * LENGTH,
        list(range(LENGTH)),  # every token is a segment
    ]
)
BATCH = len(VALID)
PRECISION = (  # of values and of gradients
    (torch.float64, 1e-12, 1e-10),
    (torch.float32, 2e-5, 5e-5),
)
_known: dict[tuple, tuple[Tensor, dict[str, Tensor]]] = {}


def attend(inputs: Inputs, *settings: dict, function=linear_attention) -> Tensor:
    """Call an operator with mapped queries and keys; later settings override earlier ones."""
    arguments = {"feature_map": None}
    for some in settings:
        arguments |= some
    return inputs.on(function, **arguments)


def values_and_gradients(inputs: Inputs, *settings: dict, call=attend) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs of `call`, and the gradients of a random projection of them."""
    leaves = inputs.leaves()
    y = call(leaves, *settings)
    return y.detach(), backward(y, leaves)


def assert_finite(y: Tensor, grads: dict[str, Tensor]) -> None:
    assert y.isfinite().all()
    for name, grad in grads.items():
        assert grad.isfinite().all(), f"d{name}"


def definition(inputs: Inputs, function=reference_attention, **arguments) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute output and gradients of the definition, cached for equal inputs because the definition is slow."""
    values = [(name, x.dtype, x.shape, x.numpy().tobytes()) for name, x in inputs.given().items()]
    key = (function, tuple(values), tuple(sorted(arguments.items())))
    if key not in _known:
        leaves = inputs.leaves()
        y = leaves.on(function, **arguments)
        _known[key] = y.detach(), backward(y, leaves)
    return _known[key]


def check_outputs(
    inputs: Inputs, forms: dict[str, dict], function=linear_attention, reference=reference_attention, **arguments
) -> None:
    expected = inputs.on(reference, **arguments)
    for form, how in forms.items():
        for dtype, tolerance, _ in PRECISION:
            got = attend(inputs.to(dtype), how, arguments, function=function)
            assert got.dtype == dtype
            assert_close(got, expected, tolerance, f"{form} {dtype} {arguments}")


def check_gradients(
    inputs: Inputs, forms: dict[str, dict], function=linear_attention, reference=reference_attention, **arguments
) -> None:
    """Check outputs and gradients of `forms` against the definition."""
    expected, expected_grads = definition(inputs, reference, **arguments)
    call = partial(attend, function=function)
    for form, how in forms.items():
        for dtype, tolerance, of_gradients in PRECISION:
            got, grads = values_and_gradients(inputs.to(dtype), how, arguments, call=call)
            assert got.dtype == dtype
            what = f"{form} {dtype} {arguments}"
            assert_close(got, expected, tolerance, what)
            assert_gradients(grads, expected_grads, of_gradients, what)


def assert_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, what: str = "") -> None:
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert grad.isfinite().all(), f"d{name} {what}"
        assert_close(grad, expected[name], tolerance, f"d{name} {what}", floor=0.1)  # those of a single token are 0


def long_bfloat16(decay: str, length: int, rate: float) -> Inputs:
    """Make normal tokens in bfloat16, and float32 decays that forget little."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 16, generator=rng)
    drawn = torch.rand(q.shape, generator=rng)
    log_decay = {"lit": None, "S": -rate * drawn[..., 0], "vector": -rate * drawn}[decay]
    return Inputs(q, k, v).to(torch.bfloat16)._replace(log_decay=log_decay)


def narrow_and_exact(inputs: Inputs, *settings: dict) -> list[list[Tensor]]:
    """Return the outputs and the gradients of q, k and v, as they are and in float64."""
    results = []
    for given in (inputs, inputs.to(torch.float64)):
        y, grads = values_and_gradients(given, *settings)
        results.append([y, grads["q"], grads["k"], grads["v"]])
    return results


@contextmanager
def saved_sizes():
    """Yield a list of the sizes of all tensors that are saved for the backward pass meanwhile."""
    sizes = []

    def note(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        yield sizes


def poisoned(inputs: Inputs, valid: Tensor) -> Inputs:
    """Return the inputs with NaN and infinities at all padding."""
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=inputs.q.dtype)

    def poison(x: Tensor) -> Tensor:
        if x.dim() < 3 or len(x) != BATCH:  # shared by all rows
            return x
        mask = ~valid[:, None] if x.dim() == 3 else ~valid[:, None, :, None]
        junk = bad[torch.arange(x.numel()) % len(bad)]
        return torch.where(mask, junk.reshape(x.shape), x)

    return inputs.map(poison)


def alone(inputs: Inputs, sequences: list[list[Tensor]], function=linear_attention, **arguments) -> Tensor:
    """Run every sequence (token indices, listed for each batch row) separately; all other outputs are 0."""
    rows = []
    for row, places in enumerate(sequences):
        y = torch.zeros_like(inputs.v[:1])
        for index in places:
            y = y.index_add(2, index, attend(inputs.tokens(row, index), arguments, function=function))
        rows.append(y)
    return torch.cat(rows)


def by_valid(valid: Tensor) -> list[list[Tensor]]:
    return by_segments(torch.zeros_like(valid, dtype=torch.long), valid)


def by_segments(segments: Tensor, valid: Tensor) -> list[list[Tensor]]:
    """Return the tokens of each segment of each row."""
    rows = []
    for ids in segments.where(valid, -1):
        present = ids.unique()
        rows.append([(ids == i).nonzero()[:, 0] for i in present[present >= 0]])
    return rows


def check_masked(
    inputs: Inputs, sequences: list[list[Tensor]], present: Tensor, how: dict, function=linear_attention, **masks
) -> None:
    """Check a masked batch with poisoned padding against separate clean sequences: values, gradients, exact zeros."""
    leaves = inputs.leaves()
    expected = alone(leaves, sequences, function, **how)
    expected_grads = backward(expected, leaves)

    leaves = poisoned(inputs, present).leaves()
    got = attend(leaves, how, masks, function=function)
    absent = (~present)[:, None].expand(got.shape[:3])
    assert_close(got, expected, 1e-12, f"{how}")
    assert not got[absent].any()
    grads = backward(got, leaves)
    assert_gradients(grads, expected_grads, 1e-10, f"{how}")
    for name, grad in grads.items():
        if grad.dim() >= 3 and len(grad) == BATCH:
            assert not grad[absent[:, : grad.shape[1]]].any(), f"d{name} {how}"


def check_masks(inputs: Inputs, how: dict, function=linear_attention) -> None:
    """Check padding, and padding with segments."""
    check_masked(inputs, by_valid(VALID), VALID, how, function, valid=VALID)
    present = VALID & (SEGMENTS >= 0)
    check_masked(inputs, by_segments(SEGMENTS, VALID), present, how, function, segments=SEGMENTS, valid=VALID)
