"""Time the operators of `bench gpu` on this GPU, beside their estimates.

    ./run.sh bench clock [MIXER ...] [--form full chunk] [--length 197 1024]

A call is a forward and a backward pass of the compiled operator, with its feature map; softmax is PyTorch's SDPA. `us`
is the time of a call in a CUDA graph, and `no graphs` its time when Python launches every kernel and many calls follow
one another. `peak / q` is the memory of a call beyond its inputs, in units of q. Rounds are interleaved, and a ratio is
the median of the ratios of all rounds. Other benchmarks on this GPU wait meanwhile, but may compile. Of `autotuned`
rows, Inductor took the fastest of its own and the libraries' kernels for every matrix product (`--autotune`, and
`trainer.autotune` in training). Rows `triton` are the kernels of `lion.ops.kernels` (`--kernels triton`).

Estimates are those of [gpu.md](gpu.md), for the rates of this GPU, with bytes and products in proportion to the batch.
They may count other code than was timed, that of another version of torch or of a later commit.

Results are added to `clock.md` and `clock.json` in runs/bench, or in the folder `--out`; estimates are taken from
`gpu.json` there.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.evaluation.timing import seconds
from lion.trainer.compilation import time_products
from lion.trainer.diagnostics import process_peak
from tools import options
from tools.bench import gpu as estimates
from tools.bench.gpu import CASE, DEFAULT, case, order
from tools.bench.operators import OPERATORS, check_operators, softmax
from tools.cli import say, table
from tools.gpu.targets import TARGETS
from tools.probe import check_compiler, device_name, pick_device, repeat, stamp, time_rounds
from tools.processes import Send, in_a_process
from tools.store import Row, Store, digits, pipes

SETTING = ("device", "dtype", "heads", "dim")
CALL = ("name", "form", "length", "batch")
LATER = ("autotune", "kernels")  # keys that rows of earlier versions lack
KEY = (*SETTING, *CALL, *LATER)
TOKENS = 25_000  # of a batch, approximately: its tensors exceed every cache
SPAN = 0.01  # seconds of a measurement, at least
HEADER = [*CASE, "us", "estimate", "x estimate", "x softmax", "estimated", "no graphs", "peak / q"]
GRAPH, LAUNCHED = "graph", "launched"


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings of one measuring process."""

    name: str
    form: str
    length: int
    batch: int
    heads: int
    dim: int
    dtype: str
    rounds: int
    autotune: bool
    kernels: str
    command: str


class Report(Store):
    """Rows of timed operators in `folder/clock.json`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "clock.json", later=LATER, rows=KEY)

    def markdown(self, counted: dict[tuple, Row]) -> str:
        parts = ["# Estimates against the clock", "Written by `./run.sh bench clock`.", *__doc__.split("\n\n")[2:-1]]
        for rows in self.groups(SETTING):
            parts += [f"## {title(rows[0])}", pipes(HEADER, [cells(r, counted) for r in sorted(rows, key=order)])]
            parts.append(self.commands(rows))
        return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    args = options.bench_clock(argv)
    check_operators(args.names)
    if not torch.cuda.is_available():
        raise ConfigError("bench clock: no GPU found; ./run.sh bench gpu estimates without one")
    check_compiler(eager=False)
    report, command = Report(args.out).load(args.fresh), shlex.join(["./run.sh", "bench", "clock", *argv])
    counted = estimates.Report(args.out).load().rows
    jobs = [
        Job(
            name=name,
            form=form,
            length=length,
            batch=args.batch or max(1, round(TOKENS / length)),
            heads=args.heads,
            dim=args.dim,
            dtype=args.dtype,
            rounds=args.rounds,
            autotune=args.autotune,
            kernels=args.kernels,
            command=command,
        )
        for name in args.names or DEFAULT
        for length in sorted(set(args.length))
        for form in dict.fromkeys(args.form)
    ]
    failed = False

    def receive(message: dict[str, Any]) -> None:
        message.pop("kind")
        report.add(message)
        with report.alone():
            report.save(report.markdown(counted))

    for place, job in enumerate(jobs, 1):
        say(f"[{place}/{len(jobs)}] {job.name}, {job.form}, {job.length:,} tokens")
        if problem := in_a_process(measure, job, receive):
            say(f"  {problem}")
            failed = True
    if report.new:
        rows = sorted((report.rows[key] for key in report.new), key=order)
        print(f"{title(rows[0])}\n{table(HEADER, [cells(row, counted) for row in rows])}\n{report.files()}")
    return 1 if failed or not report.new else 0


def measure(job: Job, send: Send) -> None:
    """Compile one operator, and time it beside softmax."""
    device, operator = pick_device(), OPERATORS[job.name]
    shape = (job.heads, job.dim, job.batch, job.length, device, getattr(torch, job.dtype))
    tensors, fixed = operator.inputs(*shape, featurized=False)

    def run(given: dict[str, Tensor]) -> Tensor:
        return operator.run(given, fixed, job.form, 64, job.kernels)

    if job.autotune:
        time_products()
    own = call(torch.compile(run, fullgraph=True, dynamic=False), tensors)
    calls = {"own": own, "softmax": call(softmax, {n: tensors[n] for n in "qkv"})}
    own()
    torch.cuda.empty_cache()
    times, peak = clocked(calls, job.rounds, device), process_peak(own, device)
    row = {name: getattr(job, name) for name in ("heads", "dim", "dtype", *CALL)}
    if job.autotune:  # else as in rows of earlier versions
        row["autotune"] = True
    if job.kernels == "triton":
        row["kernels"] = job.kernels
    for how in (GRAPH, LAUNCHED):
        mine, other = times["own", how], times["softmax", how]
        row[how] = {
            "seconds": median(mine),
            "softmax": median(other),
            "ratio": median(a / b for a, b in zip(mine, other)),
        }
    send({"kind": "row", "device": device_name(), **row, "peak_bytes": peak, **stamp(job.command)})


def call(run: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor]) -> Callable[[], object]:
    """Return a function that runs a forward and a backward pass."""
    leaves, kept = [t for t in tensors.values() if t.requires_grad], []

    def both() -> object:
        y = run(tensors)
        if not kept:
            kept.append(torch.randn_like(y))
        return torch.autograd.grad(y, leaves, kept[0])

    return both


def clocked(
    calls: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of one call in every round, by the name of the call, in CUDA graphs and without."""
    runs, repeats = {}, {}
    for name, once in calls.items():
        for how, fn in ((LAUNCHED, once), (GRAPH, captured(once))):
            fn()
            count = repeats[name, how] = math.ceil(SPAN / seconds(fn, device))
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


def title(row: Row) -> str:
    return f"{row['device']}, {row['dtype']}, {row['heads']} heads of {row['dim']}"


def cells(row: Row, counted: dict[tuple, Row]) -> list[str]:
    us = 1e6 * row[GRAPH]["seconds"]
    found = estimate(row, counted)
    near = ["-", "-"] if found is None else [f"{1e6 * found[0]:,.0f}", f"{us / (1e6 * found[0]):.2f}"]
    ratio = "-" if found is None else f"{found[0] / found[1]:.2f}"
    alone = f"{1e6 * row[LAUNCHED]['seconds']:,.0f}"
    q = math.prod(row[name] for name in ("batch", "heads", "length", "dim")) * getattr(torch, row["dtype"]).itemsize
    times = [f"{us:,.0f}", *near, f"{row[GRAPH]['ratio']:.2f}", ratio, alone]
    form = row["form"]
    if row.get("autotune"):
        form += ", autotuned"
    if row.get("kernels"):
        form += ", triton"
    return [*case(row | {"form": form}), *times, digits(row["peak_bytes"] / q)]


def estimate(row: Row, counted: dict[tuple, Row]) -> tuple[float, float] | None:
    """Return the estimated seconds of a row and of softmax on its GPU; None without an estimate of the operator."""
    device = row["device"].replace(" ", "").lower()
    target = next((name for name in TARGETS if name in device), None)
    same = [name for name in (*SETTING, *CALL) if name not in ("device", "batch")]
    for other in counted.values():
        if target and alike(other["target"], target) and all(other[name] == row[name] for name in same):
            scaled = {**estimates.for_batch(other, row["batch"]), "target": target}
            return estimates.seconds(scaled, "parts", True), estimates.seconds(scaled, "softmax", True)
    return None


def alike(target: str, other: str) -> bool:
    """Return whether Inductor generates the same code for two targets."""
    return TARGETS[target].architecture == TARGETS[other].architecture
