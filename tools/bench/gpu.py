"""Estimate the time of operators and training steps on an NVIDIA GPU from the code that Inductor generates for it.

    ./run.sh bench gpu [MIXER|RECIPE ...] [--form full chunk] [--length 197 1024] [--target h100] [--compile]
                       [--against RECIPE]
    ./run.sh bench gpu --clock [MIXER ...] [--form full chunk] [--length 197 1024]

With `--clock`, the operators are timed on this GPU (`tools.bench.clock`).
"""

from __future__ import annotations

import dataclasses
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError, nearest
from lion.runs import build_on_meta
from tools import options
from tools.bench.beside import softmax_beside
from tools.bench.engine import Report, collect, job_of, typed
from tools.bench.operators import OPERATORS, rank
from tools.compose import describe_data, make_task, resolve
from tools.gpu.cost import Cost, fused_seconds, fused_softmax, total
from tools.gpu.targets import TARGETS, check_toolchain
from tools.probe import stamp
from tools.processes import Send, first_line
from tools.store import Row
from tools.tables import Table, digits, fill

DEFAULT = ("lion_lit", "lion_d", "lion_s", "lion_s_vector")
COMPILED_FOR = ("a100", "h100")
TOKENS = 50_000  # of a training step, approximately
LEGEND = """\
No GPU is needed. The forward and backward passes are traced with fake tensors and lowered for the target. The report
counts Triton kernels, kernel launches, matrix products of libraries, calls of other eager operators, the bytes that all
of these read and write, and the FLOPs of products. A kernel that reads a part of a buffer has the bytes of that part;
rows measured before 2026-11-25 have those of the whole buffer. `--compile` compiles every Triton kernel with ptxas to a
cubin for sm_80 and sm_90.

Nothing is timed; all times are estimates. An estimate is the larger of two times, bytes over memory bandwidth and FLOPs
over the tensor cores' rate, plus 1 us per call for the gap between kernels. Without CUDA graphs, the estimate is at
least 6 us of CPU time per call. Softmax is FlashAttention, estimated in the same way, for a mixer with its products at
half of the tensor cores' rate. For a recipe, softmax is the same model with softmax, or with `--against` the model of
that recipe. [clock.md](clock.md) compares estimates with the times of GPUs, which are 1.2 to 3.8 times as long.

The row of a mixer is its operator alone, with its feature map. In the column `products`, `*` marks operators that also
call other eager operators. The row of a recipe is a whole training step: its blocks are compiled, and the rest of the
step runs eagerly, with one launch per operator."""


class GpuReport(Report):
    """Estimates of operators and of training steps."""

    name = "gpu"
    heading = "Estimates for GPUs"
    command = "bench gpu"
    legend = LEGEND
    setting = ("target", "dtype", "heads", "dim")
    key = ("kind", "name", "form", "length", "batch", "heads", "dim", "dtype", "target")

    def line(self, row: Row) -> str:
        columns = COLUMNS[row["kind"]]
        text = f"{columns['launches'](row)} launches, {columns['products'](row)} products, {ratio(row)} x softmax"
        for name, count in row.get("compiled", {}).items():
            text += f", {count} kernels to cubins for {name}"
        return text

    def title(self, row: Row) -> str:
        text = f"{TARGETS[row['target']].name}, {row['dtype']}"
        if row["kind"] == "operator":
            return f"Operators: {text}, {row['heads']} heads of {row['dim']}; forward / backward, estimates"
        return f"Training steps: {text}, estimates"

    def tabled(self, rows: list[Row]) -> Table:
        return fill(COLUMNS[rows[0]["kind"]], sorted(rows, key=order))


def main(argv: list[str]) -> int:
    args = options.read("bench gpu", argv)
    args.command = typed("bench gpu", argv)
    if args.clock:
        from tools.bench.clock import time_operators

        return time_operators(args)
    check_toolchain()
    warnings.filterwarnings("ignore", module="torch")
    report = GpuReport(args.out).load(args.fresh)
    jobs = {}
    for name in args.names or DEFAULT:
        jobs |= jobs_of(name, args)
    return collect(report, jobs, estimate, apart=False)


def estimate(job: Namespace, send: Send) -> None:
    """Send the row of a job.

    Raises:
        ConfigError: The model cannot be built or traced.
    """
    from tools.gpu.graphs import UNTRACEABLE

    row_of = step_row
    if job.name in OPERATORS:
        row_of = operator_row
    try:
        row, graphs = row_of(job)
        if job.compile:
            row["compiled"] = compiled(graphs)
    except UNTRACEABLE as error:
        raise ConfigError(f"cannot be traced, {type(error).__name__}: {first_line(error)}") from None
    row["target"] = job.target
    send({"kind": "row", "row": row | stamp(job.command)})


def jobs_of(name: str, args: Namespace) -> dict[str, Namespace]:
    """Return the estimates for a name, by their progress lines.

    Raises:
        ConfigError: The name is neither a mixer nor a recipe.
    """
    if name in OPERATORS:
        return operator_jobs(name, args)
    try:
        resolve(name, [])
    except ConfigError as error:
        if Path(name).suffix:
            raise
        hint = nearest(name, list(OPERATORS))
        raise ConfigError(f"{name!r} is neither a mixer ({hint}) nor a recipe: {error}") from None
    return {name: job_of(args, name=name)}


def operator_jobs(name: str, args: Namespace) -> dict[str, Namespace]:
    """Return a mixer's operator in all forms and lengths, by the progress lines."""
    jobs = {}
    for length in sorted(set(args.length)):
        for form in dict.fromkeys(args.form):
            jobs[f"{name}, {form}, {length:,} tokens"] = job_of(args, name=name, form=form, length=length)
    return jobs


def operator_row(job: Namespace) -> tuple[Row, list[Any]]:
    """Return the row of a mixer's operator, with the costs of the forward and backward pass, and its graphs."""
    from tools.gpu.lower import lower
    from tools.gpu.operator import operator_graphs

    batch = job.batch or 4
    dtype = getattr(torch, job.dtype)
    shape = (batch, job.heads, job.length, job.dim)
    graphs = operator_graphs(job.name, job.form, shape, dtype)
    costs = {graph.stage: lower(graph, TARGETS[job.target]).cost for graph in graphs}
    row = {
        "kind": "operator",
        "name": job.name,
        "form": job.form,
        "length": job.length,
        "batch": batch,
        "dtype": job.dtype,
        "heads": job.heads,
        "dim": job.dim,
        "parts": counts(costs),
        "softmax": counts(fused_softmax(shape, dtype)),
    }
    return row, graphs


def step_row(job: Namespace) -> tuple[Row, list[Any]]:
    """Return the row of a training step of a recipe, with the cost of the step with softmax, and its graphs."""
    from tools.gpu.step import trace_step

    recipe = resolve(job.name, [])
    task = make_task(recipe, describe_data(recipe, look=False)[0])
    length = build_on_meta(task, recipe.model).length
    batch = job.batch or max(1, round(TOKENS / length))
    target = TARGETS[job.target]
    beside = dataclasses.replace(recipe, model=softmax_beside(recipe.model, job.against, task))
    step = trace_step(recipe, task, batch)
    softmax = trace_step(beside, task, batch)
    row = {
        "kind": "step",
        "name": Path(job.name).stem,
        "form": "",
        "length": length,
        "batch": batch,
        "heads": 0,
        "dim": 0,
        "dtype": "bfloat16" if recipe.trainer.precision == "bf16" else "float32",
        "parts": counts(step.costs(target)),
        "softmax": counts({"step": total(softmax.costs(target).values())}),
    }
    if job.against:
        row["against"] = Path(job.against).stem
    return row, step.graphs


def counts(costs: dict[str, Cost]) -> dict[str, Row]:
    """Return the fields of costs."""
    return {name: dataclasses.asdict(cost) for name, cost in costs.items()}


def compiled(graphs: list[Any]) -> dict[str, int]:
    """Compile the kernels of graphs for each architecture of `COMPILED_FOR`, and count them.

    Raises:
        Exception: Any error of the compiler.
    """
    from tools.gpu.cubins import compile_kernels
    from tools.gpu.lower import lower

    found = {}
    for name in COMPILED_FOR:
        target = TARGETS[name]
        count = 0
        for graph in graphs:
            kernels = lower(graph, target).kernels
            compile_kernels(kernels, target)
            count += len(kernels)
        found[f"sm_{target.architecture}"] = count
    return found


def seconds(row: Row, part: str, graphs: bool) -> float:
    """Return the estimated seconds of a row's `parts` or of its `softmax`."""
    target = TARGETS[row["target"]]
    dtype = getattr(torch, row["dtype"])
    fused = part == "softmax" and row["kind"] == "operator"
    estimate = Cost.seconds
    if fused:
        estimate = fused_seconds
    return sum(estimate(Cost(**cost), target, dtype, graphs) for cost in row[part].values())


def for_batch(row: Row, batch: int) -> Row:
    """Return the row of an operator for another batch, with bytes and products in proportion."""
    found = row | {"batch": batch}
    for part in ("parts", "softmax"):
        found[part] = {}
        for stage, cost in row[part].items():
            scaled = {name: cost[name] * batch // row["batch"] for name in ("moved", "flops")}
            found[part][stage] = cost | scaled
    return found


def ratio(row: Row) -> str:
    text = f"{seconds(row, 'parts', True) / seconds(row, 'softmax', True):.2f}"
    if "against" in row:
        text += f" ({row['against']})"
    return text


def built(row: Row) -> str:
    """Return the numbers of compiled kernels by architecture, or "-" if none were compiled."""
    return " / ".join(map(str, row.get("compiled", {}).values())) or "-"


def by_stage(row: Row, value: Callable[[Row], str]) -> str:
    """Return a value of the forward and of the backward pass."""
    return " / ".join(value(row["parts"][stage]) for stage in ("forward", "backward") if stage in row["parts"])


def all_of(row: Row, name: str) -> int:
    """Return the sum of a cost over the parts of a row."""
    return sum(cost[name] for cost in row["parts"].values())


def q_bytes(row: Row) -> int:
    """Return the bytes of the queries of an operator."""
    return row["batch"] * row["heads"] * row["length"] * row["dim"] * getattr(torch, row["dtype"]).itemsize


def products(cost: Row) -> str:
    if cost["fallbacks"]:
        return f"{cost['library']}*"
    return str(cost["library"])


CASE = {  # columns that name the case of an operator
    "mixer": lambda row: row["name"],
    "form": lambda row: row["form"],
    "tokens": lambda row: f"{row['length']:,}",
    "batch": lambda row: f"{row['batch']:,}",
}
OPERATOR_COLUMNS = CASE | {
    "kernels": lambda row: by_stage(row, lambda cost: str(cost["kernels"])),
    "launches": lambda row: by_stage(row, lambda cost: str(cost["launches"])),
    "products": lambda row: by_stage(row, products),
    "bytes / q": lambda row: by_stage(row, lambda cost: f"{cost['moved'] / q_bytes(row):.1f}"),
    "both": lambda row: f"{all_of(row, 'moved') / q_bytes(row):.1f}",
    "us": lambda row: f"{1e6 * seconds(row, 'parts', True):,.0f}",
    "no graphs": lambda row: f"{1e6 * seconds(row, 'parts', False):,.0f}",
    "x softmax": ratio,
    "sm_80 / sm_90": built,
}
STEP_COLUMNS = {
    "recipe": lambda row: row["name"],
    "tokens": lambda row: f"{row['batch'] * row['length']:,}",
    "launches": lambda row: f"{all_of(row, 'launches'):,}",
    "products": lambda row: f"{all_of(row, 'library'):,}",
    "fallbacks": lambda row: f"{all_of(row, 'fallbacks'):,}",
    "GB": lambda row: digits(all_of(row, "moved") / 1e9),
    "TFLOP": lambda row: digits(all_of(row, "flops") / 1e12),
    "tokens/s": lambda row: f"{row['batch'] * row['length'] / seconds(row, 'parts', True):,.0f}",
    "ms": lambda row: digits(1e3 * seconds(row, "parts", True)),
    "no graphs": lambda row: digits(1e3 * seconds(row, "parts", False)),
    "x softmax": ratio,
    "sm_80 / sm_90": built,
}

COLUMNS = {"operator": OPERATOR_COLUMNS, "step": STEP_COLUMNS}


def order(row: Row) -> tuple:
    return row["length"], rank(OPERATORS, row["name"]), row["name"], row["form"], row["batch"]
