"""Rows that are split over 2, 3 and 4 real processes against the definition on whole rows: values and gradients."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lion.ops import reference_attention, segment_index
from lion.ops.exchange import Part
from lion.ops.split import split_attention
from tests.processes import in_processes

from .helpers import Case, assert_close, case, make, pairwise, unit_keys

pytestmark = pytest.mark.process
LENGTH = 13
STARTS = {2: (0, 4), 3: (0, 5, 6), 4: (0, 3, 4, 11)}  # parts of 1 to 9 tokens
VALID = torch.tensor([[t not in {0, 1, 5, 12} for t in range(LENGTH)], [t < 6 for t in range(LENGTH)]])
SEGMENTS = torch.tensor([[4] * 2 + [7] * 9 + [1] * 2, [0, 0, 0, 3, -1, 3, 5, 5, -1, 5, 5, -1, -1]])


class Trial(NamedTuple):
    """A call of the operator on whole rows."""

    inputs: Case
    how: dict[str, Any]
    valid: Tensor | None = None
    segments: Tensor | None = None


def own(x: Tensor | None, name: str, here: slice) -> Tensor | None:
    """Return the tokens of a process, or a new leaf of what all tokens share."""
    if x is None or name == "bonus" or (name == "log_decay" and x.dim() < 3):
        return x if x is None else x.clone()
    return x[..., here, :].clone() if name == "angles" else x[:, :, here].clone()


def work(group, trials: list[Trial], starts: tuple[int, ...]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return the outputs of this process, and the gradients of a projection of the outputs of all processes."""
    part, results = Part.of(group), []
    bounds = [*starts, LENGTH]
    here = slice(*bounds[part.rank : part.rank + 2])
    for inputs, how, valid, segments in trials:
        leaves = Case(*(own(x, name, here) for name, x in zip(Case._fields, inputs))).leaves()
        masks, placed = segment_index(valid, segments), part
        if segments is not None:
            placed = part.with_segments(masks.index, starts)
        masks = masks.part(here.start, here.stop - here.start)
        y = leaves.on(split_attention, part=placed, segments=masks, feature_map=None, **how)
        (y * projection(inputs)[:, :, here]).sum().backward()
        results.append((y.detach(), leaves.grads()))
    return results


def projection(inputs: Case) -> Tensor:
    return torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def check(trials: list[Trial], tolerance: float = 1e-11) -> None:
    expected = []
    for inputs, how, valid, segments in trials:
        leaves = inputs.leaves()
        plain = {name: value for name, value in how.items() if name not in ("form", "chunk_size")}
        y = leaves.on(reference_attention, valid=valid, segments=segments, **plain)
        (y * projection(inputs)).sum().backward()
        expected.append((y.detach(), leaves.grads()))
    for count, starts in STARTS.items():
        results = in_processes(count, work, trials, starts)
        for n, (trial, (y, grads)) in enumerate(zip(trials, expected)):
            what = f"{count} processes: {trial.how}"
            parts = [of_rank[n] for of_rank in results]
            assert_close(torch.cat([part[0] for part in parts], 2), y, tolerance, what)
            for name, grad in grads.items():
                pieces = [part[1][name] for part in parts]
                if own(trial.inputs._asdict()[name], name, slice(0, 1)).shape == grad.shape:
                    got = sum(pieces)  # what all tokens share has a gradient from every process
                else:
                    got = torch.cat(pieces, -2 if name == "angles" else 2)
                assert_close(got, grad, tolerance, f"d{name} {what}", floor=0.1)


FORMS = {"full": {"form": "full"}, "chunk": {"form": "chunk", "chunk_size": 3}}
MASKS = {"none": {}, "valid": {"valid": VALID}, "segments": {"segments": SEGMENTS}}


def trials() -> list[Trial]:
    factors = {
        "decay": ("lit", "D", "S", "extreme", "vector", "fixed vector", "extreme vector"),
        "form": tuple(FORMS),
        "masks": tuple(MASKS),
        "direction": ("forward", "backward", "both"),
        "decay_convention": ("source", "target", "symmetric", "between"),
        "normalize": ("sum", "none", "max", "pre"),
        "more": ("", "bonus HD", "angles HL", "angles BHL"),
    }
    made = []
    for decay, form, masks, *values, more in pairwise(*factors.values()):
        how = dict(zip(("direction", "decay_convention", "normalize"), values))
        made.append(Trial(case(make(decay, LENGTH, heads=2), more), {**FORMS[form], **how}, **MASKS[masks]))
    return made


def delta_trials() -> list[Trial]:
    factors = {
        "decay": ("lit", "D", "S", "extreme", "vector", "fixed vector"),
        "form": tuple(FORMS),
        "masks": tuple(MASKS),
        "direction": ("forward", "backward", "both"),
        "more": ("beta", "beta, angles HL", "beta, erase, read"),
        "undecayed_erase": (False, True),
    }
    made = []
    for decay, form, masks, direction, more, undecayed in pairwise(*factors.values()):
        how = {"direction": direction, "undecayed_erase": undecayed, "normalize": "none", "decay_convention": "target"}
        inputs = case(unit_keys(make(decay, LENGTH, heads=2)), more)
        made.append(Trial(inputs, {**FORMS[form], **how}, **MASKS[masks]))
    return made


def test_split_rows_equal_whole_rows():
    check([*trials(), *delta_trials()])
