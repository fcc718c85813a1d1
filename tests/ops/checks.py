"""Checks of forms against the definition, and of masked batches against separate sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops import linear_attention, reference_attention

from .helpers import Case, Inputs, assert_close, backward

LENGTH = 23
HOLES = {0, 3, 4, 9, 15, 16, 17, 18, 19, 22}  # also at both ends, and one hole as long as a chunk
VALID = torch.tensor(
    [
        [t < 13 for t in range(LENGTH)],  # padding right
        [t >= 9 for t in range(LENGTH)],  # padding left
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


_known: dict[tuple, tuple[Tensor, dict[str, Tensor]]] = {}


def definition(inputs: Inputs | Case, **arguments) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute output and gradients of the definition, cached for equal inputs because the definition is slow."""
    given = (None if x is None else (x.shape, x.dtype, x.numpy().tobytes()) for x in inputs)
    key = (type(inputs), *given, *sorted(arguments.items()))
    if key not in _known:
        leaves = inputs.leaves()
        y = leaves.on(reference_attention, **arguments)
        _known[key] = y.detach(), backward(y, leaves)
    return _known[key]


def check_outputs(inputs: Inputs | Case, forms, function=linear_attention, **arguments) -> None:
    expected = inputs.on(reference_attention, **arguments)
    for form, how in forms.items():
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            got = inputs.to(dtype).on(function, **how, **arguments, feature_map=None)
            assert got.dtype == dtype
            assert_close(got, expected, tolerance, f"{form} {dtype} {arguments}")


def check_gradients(inputs: Inputs | Case, forms, function=linear_attention, **arguments) -> None:
    """Check outputs and gradients of `forms` against the definition."""
    expected, expected_grads = definition(inputs, **arguments)
    for form, how in forms.items():
        for dtype, tolerance, of_gradients in ((torch.float64, 1e-12, 1e-10), (torch.float32, 2e-5, 5e-5)):
            leaves, what = inputs.to(dtype).leaves(), f"{form} {dtype} {arguments}"
            got = leaves.on(function, **how, **arguments, feature_map=None)
            assert got.dtype == dtype
            assert_close(got, expected, tolerance, what)
            for name, grad in backward(got, leaves).items():  # gradients of a single token are 0: hence the floor
                assert_close(grad, expected_grads[name], of_gradients, f"d{name} {what}", floor=0.1)


def gradcheck(leaves: Inputs | Case, function=linear_attention, **arguments) -> None:
    """Check the gradients against finite differences of the outputs."""

    def attention(*given: Tensor) -> Tensor:
        some = iter(given)
        return type(leaves)(*(None if x is None else next(some) for x in leaves)).on(
            function, **arguments, feature_map=None
        )

    assert torch.autograd.gradcheck(attention, [x for x in leaves if x is not None])


def poisoned(inputs: Inputs | Case, valid: Tensor) -> Inputs | Case:
    """Return the inputs with NaN and infinities at all padding."""
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=inputs.q.dtype)
    out = []
    for x in inputs:
        if x is not None and x.dim() >= 3 and len(x) == BATCH:  # tokens of this batch, not tensors that rows share
            mask = (~valid[:, None]).reshape(BATCH, 1, LENGTH, *[1] * (x.dim() - 3)).expand_as(x)
            x = torch.where(mask, bad[torch.arange(x.numel()) % len(bad)].reshape(x.shape), x)
        out.append(x)
    return type(inputs)(*out)


def alone(inputs: Inputs | Case, sequences: list[list[Tensor]], function=linear_attention, **arguments) -> Tensor:
    """Run every sequence (token indices, listed for each batch row) separately; all other outputs are 0."""
    rows = []
    for row, places in enumerate(sequences):
        y = torch.zeros_like(inputs.v[:1])
        for index in places:
            y = y.index_add(2, index, inputs.tokens(row, index).on(function, **arguments, feature_map=None))
        rows.append(y)
    return torch.cat(rows)


def by_valid(valid: Tensor) -> list[list[Tensor]]:
    return [[row.nonzero()[:, 0]] if row.any() else [] for row in valid]


def by_segments(segments: Tensor, valid: Tensor) -> list[list[Tensor]]:
    return [[((row == i) & ok).nonzero()[:, 0] for i in row[ok].unique() if i >= 0] for row, ok in zip(segments, valid)]


def check_masked(
    inputs: Inputs | Case, sequences, present: Tensor, how: dict, function=linear_attention, **masks
) -> None:
    """Check a masked batch with poisoned padding against separate clean sequences: values, gradients, exact zeros."""
    leaves = inputs.leaves()
    expected = alone(leaves, sequences, function, **how)
    expected_grads = backward(expected, leaves) if expected.requires_grad else leaves.grads()

    leaves = poisoned(inputs, present).leaves()
    got = leaves.on(function, **how, **masks, feature_map=None)
    absent = (~present)[:, None]
    assert_close(got, expected, 1e-12, f"{how}")
    assert (got[absent.expand(got.shape[:3])] == 0).all()

    for name, grad in backward(got, leaves).items():
        assert grad.isfinite().all(), f"d{name} {how}"
        assert_close(grad, expected_grads[name], 1e-10, f"d{name} {how}", floor=0.1)
        if grad.dim() >= 3 and len(grad) == BATCH:
            assert (grad[absent.expand(grad.shape[:3])] == 0).all(), f"d{name} {how}"


def check_masks(inputs: Inputs | Case, how: dict, function=linear_attention) -> None:
    """Check padding, and padding with segments."""
    check_masked(inputs, by_valid(VALID), VALID, how, function, valid=VALID)
    present = VALID & (SEGMENTS >= 0)
    check_masked(inputs, by_segments(SEGMENTS, VALID), present, how, function, segments=SEGMENTS, valid=VALID)
