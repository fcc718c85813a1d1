"""Rows that are split over 2, 3 and 4 real processes against the definition on whole rows: values and gradients."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lion.ops import (
    linear_attention,
    linear_attention_parts,
    reference_attention,
    reference_one_scan_attention,
    segment_index,
)
from lion.ops.exchange import Part
from lion.ops.split import split_attention
from lion.ops.split_one_scan import split_one_scan_attention
from tests.processes import in_processes

from .helpers import Case, assert_close, case, error, make, pairwise, signed, unit_keys

pytestmark = pytest.mark.process
LENGTH = 13
STARTS = {2: (0, 4), 3: (0, 5, 6), 4: (0, 3, 4, 11)}  # parts of 1 to 9 tokens
VALID = torch.tensor([[t not in {0, 1, 5, 12} for t in range(LENGTH)], [t < 6 for t in range(LENGTH)]])
SEGMENTS = torch.tensor([[4] * 2 + [7] * 9 + [1] * 2, [0, 0, 0, 3, -1, 3, 5, 5, -1, 5, 5, -1, -1]])


class Trial(NamedTuple):
    """A call of an operator on whole rows."""

    inputs: Case
    how: dict[str, Any]
    valid: Tensor | None = None
    segments: Tensor | None = None
    functions: tuple[Callable, Callable] = (split_attention, reference_attention)


def own(x: Tensor | None, name: str, here: slice) -> Tensor | None:
    """Return the tokens of a process, or a new leaf of what all tokens share."""
    if x is None or name == "bonus" or (name == "log_decay" and x.dim() < 3):
        return x if x is None else x.clone()
    return x[..., here, :].clone() if name == "angles" else x[:, :, here].clone()


def work(group, trials: list[Trial], starts: tuple[int, ...]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return the outputs of this process, and the gradients of a projection of the outputs of all processes."""
    part, results = Part.of(group), []
    for inputs, how, valid, segments, (function, _) in trials:
        scale = inputs.q.shape[2] // LENGTH
        bounds = [scale * start for start in (*starts, LENGTH)]
        here = slice(*bounds[part.rank : part.rank + 2])
        leaves = Case(*(own(x, name, here) for name, x in zip(Case._fields, inputs))).leaves()
        masks, placed = segment_index(valid, segments), part
        if segments is not None:
            placed = part.with_segments(masks.index, bounds[:-1])
        masks = masks.part(here.start, here.stop - here.start)
        y = leaves.on(function, part=placed, segments=masks, feature_map=None, **how)
        (y * projection(inputs)[:, :, here]).sum().backward()
        results.append((y.detach(), leaves.grads()))
    return results


def projection(inputs: Case) -> Tensor:
    return torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def check(trials: list[Trial], tolerance: float = 1e-11) -> None:
    expected = []
    for inputs, how, valid, segments, (_, definition) in trials:
        leaves = inputs.leaves()
        plain = {name: value for name, value in how.items() if name not in ("form", "chunk_size")}
        y = leaves.on(definition, valid=valid, segments=segments, **plain)
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


def one_scan(q, k, v, log_decay, **arguments):
    return split_one_scan_attention(q, k, v, **arguments)


def one_scan_definition(q, k, v, log_decay, **arguments):
    return reference_one_scan_attention(q, k, v, **arguments)


def one_scan_trials() -> list[Trial]:
    made, functions = [], (one_scan, one_scan_definition)
    for masks, more in itertools.product(MASKS.values(), ("", "angles HL", "angles BHL")):
        inputs = case(signed(make("lit", LENGTH, heads=2)), more)
        inputs = inputs._replace(k=20 * inputs.k)  # the largest key of a part is far above that of another
        made.append(Trial(inputs, {"chunk_size": 3}, **masks, functions=functions))
    return made


def long_trials() -> list[Trial]:
    """Return calls on parts of several groups of chunks."""
    inputs, how = make("vector", 10 * LENGTH, batch=1, heads=1), {"form": "chunk", "chunk_size": 1}
    how |= {"normalize": "none", "decay_convention": "target"}
    return [Trial(case(inputs), how), Trial(case(unit_keys(inputs), "beta"), how)]


def test_split_rows_equal_whole_rows():
    check([*trials(), *delta_trials(), *one_scan_trials(), *long_trials()])


class Exchanges(TorchDispatchMode):
    """A recorder of the collectives of this process, each with the number of its inputs' elements."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.made.append((func.__name__.split(".")[0], args[0].numel()))
        return func(*args, **(kwargs or {}))


def count_exchanges(group, kinds: dict[str, Case], how: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
    found, part = {}, Part.of(group)
    for name, inputs in kinds.items():
        with Exchanges() as exchanges:
            leaves = inputs.leaves()
            leaves.on(split_attention, part=part, feature_map=None, **how[name]).sum().backward()
        found[name] = exchanges.made
    return found


def test_one_exchange_forward_and_one_backward_whatever_the_length():
    """Check the numbers of a row and head in both directions: S, z and a decay, or the map of a delta rule."""
    B, H, D, E = 2, 3, 4, 6
    none = {"normalize": "none", "decay_convention": "target"}
    how = {"scalar": {}, "vector": {}, "no sums": none, "delta": none}
    sizes = {
        "scalar": 2 * (D * E + D) + 1,
        "vector": 2 * (D * E + D) + D,
        "no sums": 2 * D * E + 1,
        "delta": 2 * D * (D + E),
    }
    for length in (5, 40):
        inputs = make("S", length)
        kinds = {"scalar": case(inputs), "vector": case(make("vector", length)), "no sums": case(inputs)}
        kinds["delta"] = case(unit_keys(inputs), "beta")
        for found in in_processes(2, count_exchanges, kinds, how):
            for name, size in sizes.items():
                sent = B * H * size
                assert found[name] == [("all_gather_into_tensor", sent), ("reduce_scatter_tensor", 2 * sent)], name


def compile_all(group, trials: list[Trial], starts: tuple[int, ...]) -> list[float]:
    """Return the errors of all values and gradients of graphs without a break, relative to eager code."""

    def graph(function, backend: str):
        return torch.compile(function, backend=backend, fullgraph=True)

    eager, backends = work(group, trials, starts), ("aot_eager", "eager", "eager")  # the first one costs most
    graphs = [one._replace(functions=(graph(one.functions[0], how), None)) for one, how in zip(trials, backends)]
    errors = []
    for (y, grads), (other, of_other) in zip(eager, work(group, graphs, starts)):
        errors += [error(other, y), *(error(of_other[name], grad, 0.1) for name, grad in grads.items())]
    return errors


@pytest.mark.compiled
def test_the_exchange_is_part_of_one_graph():
    how = {"direction": "both", "form": "chunk", "chunk_size": 3}
    none = {**how, "normalize": "none", "decay_convention": "target"}
    delta = case(unit_keys(make("vector", LENGTH, heads=2)), "beta")
    one = next(trial for trial in one_scan_trials() if trial.segments is not None)
    chosen = [Trial(case(make("S", LENGTH)), how, segments=SEGMENTS), Trial(delta, none, valid=VALID), one]
    for errors in in_processes(2, compile_all, chosen, STARTS[2]):
        assert len(errors) > 10 and max(errors) < 1e-11


def test_what_cannot_be_split_is_refused():
    part, inputs = Part("", 0, 2), make("S", 5)
    with pytest.raises(ValueError, match="segments: expected those of whole rows"):
        inputs.on(split_attention, part=part, segments=torch.zeros(2, 5, dtype=torch.long), feature_map=None)
    with pytest.raises(ValueError, match="segments: expected those of whole rows"):
        masks = segment_index(None, torch.zeros(2, 5, dtype=torch.long))
        inputs.on(split_attention, part=part, segments=masks, feature_map=None)
    with pytest.raises(ValueError, match="dropout_p: scores between parts"):
        inputs.on(split_attention, part=part, dropout_p=0.1, feature_map=None)


def halves(group, inputs: Case) -> Tensor:
    part, size = Part.of(group), LENGTH * 20
    here = slice(part.rank * size, (part.rank + 1) * size)
    own_tokens = (x[:, :, here] for x in inputs[:3])
    return split_attention(*own_tokens, inputs.log_decay[:, :, here], part=part, feature_map=None)


def test_float16_sums_beyond_its_range():
    """Check that sums above 65,504 are divided before rounding."""
    inputs = make("S", 2 * LENGTH * 20, batch=1, heads=1, value_dim=2, dtype=torch.float16)
    inputs = inputs._replace(q=8 * inputs.q, k=8 * inputs.k, v=inputs.v.abs() + 2)
    inputs = inputs._replace(log_decay=inputs.log_decay.float() / 1000)
    exact = inputs.to(torch.float64)
    assert linear_attention_parts(*exact, feature_map=None)[0].max() > 1e5
    got = torch.cat(in_processes(2, halves, inputs), 2)
    assert got.dtype == torch.float16
    assert_close(got, linear_attention(*exact, feature_map=None), 2e-3, "float16")
