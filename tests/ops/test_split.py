"""Rows that are split over two and four real processes against the definition on whole rows: values and gradients."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lion.ops import (
    linear_attention_parts,
    reference_attention,
    reference_one_scan_attention,
    segment_index,
)
from lion.ops.exchange import Part
from lion.ops.split import split_attention
from lion.ops.split_one_scan import split_one_scan_attention
from tests.processes import in_processes

from .checks import attend
from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DIRECTIONS,
    Inputs,
    assert_close,
    case,
    error,
    grid,
    make,
    signed,
    unit_keys,
)

pytestmark = pytest.mark.process
LENGTH = 13
STARTS = {2: (0, 4), 4: (0, 3, 4, 11)}  # parts of 1 to 9 tokens
VALID = torch.tensor([[t not in {0, 1, 5, 12} for t in range(LENGTH)], [t < 6 for t in range(LENGTH)]])
SEGMENTS = torch.tensor([[4] * 2 + [7] * 9 + [1] * 2, [0, 0, 0, 3, -1, 3, 5, 5, -1, 5, 5, -1, -1]])
FORMS = {"full": dict(form="full"), "chunk": dict(form="chunk", chunk_size=3)}
MASKS = {"none": {}, "valid": dict(valid=VALID), "segments": dict(segments=SEGMENTS)}
DELTA = dict(normalize="none", decay_convention="target")


class Trial(NamedTuple):
    """A call of an operator on whole rows."""

    inputs: Inputs
    how: dict[str, Any]
    valid: Tensor | None = None
    segments: Tensor | None = None
    function: Callable = split_attention
    definition: Callable = reference_attention


def work(group, trials: list[Trial], starts: tuple[int, ...]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return the outputs of this process, and the gradients of a projection of the outputs of all processes."""
    part = Part.of(group)
    results = []
    for trial in trials:
        scale = trial.inputs.q.shape[2] // LENGTH
        bounds = [scale * start for start in (*starts, LENGTH)]
        here = slice(bounds[part.rank], bounds[part.rank + 1])
        leaves = trial.inputs.at(here).leaves()
        masks = segment_index(trial.valid, trial.segments)
        placed = part if trial.segments is None else part.with_segments(masks.index, bounds[:-1])
        masks = masks.part(here.start, here.stop - here.start)
        y = attend(leaves, trial.how, dict(part=placed, segments=masks), function=trial.function)
        (y * projection(trial.inputs)[:, :, here]).sum().backward()
        results.append((y.detach(), leaves.grads()))
    return results


def projection(inputs: Inputs) -> Tensor:
    return torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def whole(trial: Trial) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs and gradients of the definition."""
    leaves = trial.inputs.leaves()
    plain = {name: value for name, value in trial.how.items() if name not in ("form", "chunk_size")}
    y = leaves.on(trial.definition, valid=trial.valid, segments=trial.segments, **plain)
    (y * projection(trial.inputs)).sum().backward()
    return y.detach(), leaves.grads()


def joined(name: str, pieces: list[Tensor], shape: torch.Size) -> Tensor:
    """Join the gradients of all processes; what all tokens share has a gradient from every process."""
    if name == "angles":
        return torch.cat(pieces, -2)
    return sum(pieces) if pieces[0].shape == shape else torch.cat(pieces, 2)


def check(trials: list[Trial], tolerance: float = 1e-11) -> None:
    expected = [whole(trial) for trial in trials]
    for count, starts in STARTS.items():
        results = in_processes(count, work, trials, starts)
        for n, (y, grads) in enumerate(expected):
            what = f"{count} processes: {trials[n].how}"
            parts = [of_rank[n] for of_rank in results]
            assert_close(torch.cat([part[0] for part in parts], 2), y, tolerance, what)
            for name, grad in grads.items():
                got = joined(name, [part[1][name] for part in parts], grad.shape)
                assert_close(got, grad, tolerance, f"d{name} {what}", floor=0.1)


def trials() -> list[Trial]:
    made = []
    for decay, form, masks, what, how in grid(
        ("lit", "D", "S", "extreme", "vector", "fixed vector", "extreme vector"),
        tuple(FORMS),
        tuple(MASKS),
        ("", "bonus HD", "angles HL", "angles BHL"),
        direction=DIRECTIONS,
        decay_convention=DECAY_CONVENTIONS,
        normalize=ALL_NORMALIZE,
    ):
        made.append(Trial(case(make(decay, LENGTH, heads=2), what), FORMS[form] | how, **MASKS[masks]))
    return made


def delta_trials() -> list[Trial]:
    made = []
    for decay, form, masks, what, how in grid(
        ("lit", "D", "S", "extreme", "vector", "fixed vector"),
        tuple(FORMS),
        tuple(MASKS),
        ("beta", "beta, angles HL", "beta, erase, read"),
        direction=DIRECTIONS,
        undecayed_erase=(False, True),
    ):
        inputs = case(unit_keys(make(decay, LENGTH, heads=2)), what)
        made.append(Trial(inputs, FORMS[form] | DELTA | how, **MASKS[masks]))
    return made


def one_scan(q, k, v, feature_map=None, **arguments):
    return split_one_scan_attention(q, k, v, **arguments)


def one_scan_trials() -> list[Trial]:
    made = []
    for masks, what in itertools.product(MASKS.values(), ("", "angles HL", "angles BHL")):
        inputs = case(signed(make("lit", LENGTH, heads=2)), what)
        inputs = inputs._replace(k=20 * inputs.k)  # the largest key of a part is far above that of another
        functions = dict(function=one_scan, definition=reference_one_scan_attention)
        made.append(Trial(inputs, dict(chunk_size=3), **masks, **functions))
    return made


def long_trials() -> list[Trial]:
    """Return calls on parts of several groups of chunks."""
    inputs = make("vector", 10 * LENGTH, batch=1, heads=1)
    how = DELTA | dict(form="chunk", chunk_size=1)
    return [Trial(inputs, how), Trial(case(unit_keys(inputs), "beta"), how)]


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


def count_exchanges(group, calls: list[tuple[Inputs, dict]]) -> list[list[tuple[str, int]]]:
    found = []
    for inputs, how in calls:
        with Exchanges() as exchanges:
            attend(inputs.leaves(), how, dict(part=Part.of(group)), function=split_attention).sum().backward()
        found.append(exchanges.made)
    return found


def test_one_exchange_forward_and_one_backward_whatever_the_length():
    """Check the numbers of a row and head in both directions: S, z and a decay, or the map of a delta rule."""
    B, H, D, E = 2, 3, 4, 6
    sizes = [2 * (D * E + D) + 1, 2 * (D * E + D) + D, 2 * D * E + 1, 2 * D * (D + E)] * 2
    calls = []
    for length in (5, 40):
        inputs = make("S", length)
        calls += [(inputs, {}), (make("vector", length), {}), (inputs, DELTA), (case(unit_keys(inputs), "beta"), DELTA)]
    for found in in_processes(2, count_exchanges, calls):
        for made, size in zip(found, sizes, strict=True):
            sent = B * H * size
            assert made == [("all_gather_into_tensor", sent), ("reduce_scatter_tensor", 2 * sent)]


def compile_all(group, trials: list[Trial], starts: tuple[int, ...]) -> list[float]:
    """Return the errors of all values and gradients, relative to eager code, if the first process runs graphs."""
    graphs = trials
    if dist.get_rank(group) == 0:
        graphs = []
        for trial, backend in zip(trials, ("aot_eager", "eager", "eager")):  # the first one costs most
            graph = torch.compile(trial.function, backend=backend, fullgraph=True)
            graphs.append(trial._replace(function=graph))
    errors = []
    for (y, grads), (other, others) in zip(work(group, trials, starts), work(group, graphs, starts), strict=True):
        errors.append(error(other, y))
        errors += [error(others[name], grad, 0.1) for name, grad in grads.items()]
    return errors


@pytest.mark.every  # tests/trainer/test_sequence.py compiles layers that exchange states
@pytest.mark.compiled
def test_the_exchange_is_part_of_one_graph():
    how = FORMS["chunk"] | dict(direction="both")
    delta = case(unit_keys(make("vector", LENGTH, heads=2)), "beta")
    chosen = [
        Trial(make("S", LENGTH), how, segments=SEGMENTS),
        Trial(delta, how | DELTA, valid=VALID),
        one_scan_trials()[-1],  # with segments
    ]
    for errors in in_processes(2, compile_all, chosen, STARTS[2]):
        assert len(errors) > 10 and max(errors) < 1e-11


RAW = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(segments=RAW), "segments: expected those of whole rows"),
        (dict(segments=segment_index(None, RAW)), "segments: expected those of whole rows"),
        (dict(dropout_p=0.1), "dropout_p: scores between parts"),
    ],
)
def test_what_cannot_be_split_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        attend(make("S", 5), given, dict(part=Part("", 0, 2)), function=split_attention)


def halves(group, inputs: Inputs) -> Tensor:
    part = Part.of(group)
    size = inputs.q.shape[2] // 2
    own_tokens = inputs.at(slice(part.rank * size, (part.rank + 1) * size))
    return attend(own_tokens, dict(part=part), function=split_attention)


def test_float16_sums_beyond_its_range():
    """Check that sums above 65,504 are divided before rounding."""
    inputs = make("S", 520, batch=1, heads=1, value_dim=2, dtype=torch.float16)
    inputs = inputs._replace(q=8 * inputs.q, k=8 * inputs.k, v=inputs.v.abs() + 2)
    inputs = inputs._replace(log_decay=inputs.log_decay.float() / 1000)
    exact = inputs.to(torch.float64)
    assert attend(exact, function=linear_attention_parts)[0].max() > 1e5
    got = torch.cat(in_processes(2, halves, inputs), 2)
    assert got.dtype == torch.float16
    assert_close(got, attend(exact), 2e-3, "float16")
