"""Time the operators of `bench gpu` on this GPU, beside their estimates: `./run.sh bench gpu --clock`."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Collection
from functools import partial
from statistics import median

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.evaluation import timing
from lion.trainer.compilation import time_products
from lion.trainer.diagnostics import process_peak
from tools.bench.engine import Report, collect
from tools.bench.gpu import CASE, DEFAULT, GpuReport, for_batch, operator_jobs, order, q_bytes, seconds
from tools.bench.operators import OPERATORS, check_operators, softmax
from tools.gpu.targets import TARGETS
from tools.probe import check_compiler, device_name, pick_device, ratios, repeat, stamp, step, time_rounds
from tools.processes import Send
from tools.store import Row
from tools.tables import Table, digits, fill

SETTING = ("device", "dtype", "heads", "dim")
LATER = ("autotune", "kernels")  # keys that rows of earlier versions lack
SAME = ("dtype", "heads", "dim", "name", "form", "length")  # fields that a row and its estimate share
TOKENS = 25_000  # of a batch, approximately: its tensors exceed every cache
SPAN = 0.01  # seconds of a measurement, at least
GRAPH, LAUNCHED = "graph", "launched"
LEGEND = """\
A call is a forward and a backward pass of the compiled operator, with its feature map; softmax is PyTorch's SDPA. `us`
is the time of a call in a CUDA graph, and `no graphs` its time when Python launches every kernel and many calls follow
one another. `peak / q` is the memory of a call beyond its inputs, in units of q. Rounds are interleaved, and a ratio is
the median of the ratios of all rounds. Other benchmarks on this GPU wait meanwhile, but may compile. Of `autotuned`
rows, Inductor took the fastest of its own and the libraries' kernels for every matrix product (`--autotune`, and
`trainer.autotune` in training). Rows `triton` are the kernels of `lion.ops.kernels` (`--kernels triton`).

Estimates are those of [gpu.md](gpu.md), for the rates of this GPU, with bytes and products in proportion to the batch.
They may count other code than was timed, that of another version of torch or of a later commit."""


class ClockReport(Report):
    """Rows of timed operators, beside the estimates in the same folder."""

    name = "clock"
    heading = "Estimates against the clock"
    command = "bench gpu --clock"
    legend = LEGEND
    setting = SETTING
    key = (*SETTING, "name", "form", "length", "batch", *LATER)
    later = LATER
    counted: Collection[Row] = ()  # estimates

    def line(self, row: Row) -> str:
        return f"{1e6 * row[GRAPH]['seconds']:,.0f} us, {row[GRAPH]['ratio']:.2f} x softmax"

    def title(self, row: Row) -> str:
        return f"{row['device']}, {row['dtype']}, {row['heads']} heads of {row['dim']}"

    def load(self, fresh: bool = False) -> ClockReport:
        self.counted = GpuReport(self.path.parent).load().rows.values()
        return super().load(fresh)

    def tabled(self, rows: list[Row]) -> Table:
        found = []
        for row in sorted(rows, key=order):
            found.append(row | {"estimate": estimate(row, self.counted)})
        return fill(COLUMNS, found)


def time_operators(args: Namespace) -> int:
    """Time the operators that the options of `bench gpu` name; return the exit status."""
    check_operators(args.names)
    if not torch.cuda.is_available():
        raise ConfigError("--clock: no GPU found; ./run.sh bench gpu estimates without one")
    check_compiler(eager=False)
    report = ClockReport(args.out).load(args.fresh)
    jobs = {}
    for name in args.names or DEFAULT:
        jobs |= operator_jobs(name, args)
    return collect(report, jobs, measure)


def measure(job: Namespace, send: Send) -> None:
    """Compile one operator, and time it beside softmax."""
    device, operator = pick_device(), OPERATORS[job.name]
    batch = job.batch or max(1, round(TOKENS / job.length))
    shape = (job.heads, job.dim, batch, job.length, device, getattr(torch, job.dtype))
    tensors, fixed = operator.inputs(*shape)

    def run(given: dict[str, Tensor]) -> Tensor:
        return operator.run(given, fixed, job.form, 64, job.kernels)

    if job.autotune:
        time_products()
    own, _ = step(torch.compile(run, fullgraph=True, dynamic=False), tensors, "both")
    other, _ = step(softmax, {n: tensors[n] for n in "qkv"}, "both")
    own()
    torch.cuda.empty_cache()
    times = clocked({"own": own, "softmax": other}, job.rounds, device)
    peak = process_peak(own, device)
    row = {"device": device_name()}
    for name in ("heads", "dim", "dtype", "name", "form", "length"):
        row[name] = getattr(job, name)
    row |= {"batch": batch, "peak_bytes": peak}
    if job.autotune:  # else as in rows of earlier versions
        row["autotune"] = True
    if job.kernels == "triton":
        row["kernels"] = job.kernels
    for how in (GRAPH, LAUNCHED):
        mine = times["own", how]
        other = times["softmax", how]
        row[how] = {"seconds": median(mine), "softmax": median(other), "ratio": median(ratios(mine, other))}
    send({"kind": "row", "row": row | stamp(job.command)})


def clocked(
    calls: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of one call in every round, by the name of the call, in CUDA graphs and without."""
    runs, repeats = {}, {}
    for name, once in calls.items():
        for how, fn in ((LAUNCHED, once), (GRAPH, captured(once))):
            fn()
            count = repeats[name, how] = math.ceil(SPAN / timing.seconds(fn, device))
            runs[name, how] = partial(repeat, fn, count)
    times = time_rounds(runs, rounds, 60.0, device)
    return {key: [t / repeats[key] for t in values] for key, values in times.items()}


def captured(once: Callable[[], object]) -> Callable[[], None]:
    """Return a function that replays the kernels of a call, recorded in a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries allocate their buffers outside of the graph
        for _ in range(2):
            once()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph.replay


def estimate(row: Row, counted: Collection[Row]) -> Row:
    """Return the estimated seconds of a row and of softmax on its GPU, without an estimate of the operator none."""
    device = row["device"].replace(" ", "").lower()
    target = next((name for name in TARGETS if name in device), None)
    if target is None:
        return {}
    architecture = TARGETS[target].architecture  # for which Inductor generates the same code
    for other in counted:
        same = all(other[name] == row[name] for name in SAME)
        if same and TARGETS[other["target"]].architecture == architecture:
            scaled = for_batch(other, row["batch"]) | {"target": target}
            return {"seconds": seconds(scaled, "parts", True), "softmax": seconds(scaled, "softmax", True)}
    return {}


def form_cell(row: Row) -> str:
    text = row["form"]
    if row.get("autotune"):
        text += ", autotuned"
    if row.get("kernels"):
        text += ", triton"
    return text


def estimate_cell(row: Row) -> str:
    if not row["estimate"]:
        return "-"
    return f"{1e6 * row['estimate']['seconds']:,.0f}"


def error_cell(row: Row) -> str:
    if not row["estimate"]:
        return "-"
    return f"{row[GRAPH]['seconds'] / row['estimate']['seconds']:.2f}"


def ratio_cell(row: Row) -> str:
    if not row["estimate"]:
        return "-"
    return f"{row['estimate']['seconds'] / row['estimate']['softmax']:.2f}"


COLUMNS = CASE | {
    "form": form_cell,
    "us": lambda row: f"{1e6 * row[GRAPH]['seconds']:,.0f}",
    "estimate": estimate_cell,
    "x estimate": error_cell,
    "x softmax": lambda row: f"{row[GRAPH]['ratio']:.2f}",
    "estimated": ratio_cell,
    "no graphs": lambda row: f"{1e6 * row[LAUNCHED]['seconds']:,.0f}",
    "peak / q": lambda row: digits(row["peak_bytes"] / q_bytes(row)),
}
