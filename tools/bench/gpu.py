"""Estimate the time of operators and training steps on an NVIDIA GPU from the code that Inductor generates for it.

    ./run.sh bench gpu [MIXER|RECIPE ...] [--form full chunk] [--length 197 1024] [--target h100] [--compile]
                       [--against RECIPE]

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
step runs eagerly, with one launch per operator.

Results are added to `gpu.md` and `gpu.json` in runs/bench, or in the folder `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import shlex
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError, nearest
from lion.runs import build_on_meta
from tools import options
from tools.bench.beside import softmax_beside
from tools.bench.operators import OPERATORS
from tools.bench.report import rank
from tools.cli import say, table
from tools.compose import describe_data, make_task, resolve
from tools.gpu.cost import Cost, fused_seconds, fused_softmax, total
from tools.gpu.targets import TARGETS, check_toolchain
from tools.probe import stamp
from tools.store import Row, Store, digits, pipes

DEFAULT = ("lion_lit", "lion_d", "lion_s", "lion_s_vector")

COMPILED_FOR = ("a100", "h100")
TOKENS = 50_000  # of a training step, approximately
KEY = ("kind", "name", "form", "length", "batch", "heads", "dim", "dtype", "target")
STAGES = ("forward", "backward")
TEXT = ("mixer", "form", "recipe")  # columns of text
TIMES = ["no graphs", "x softmax", "sm_80 / sm_90"]
CASE = ["mixer", "form", "tokens", "batch"]  # columns of `case`
OPERATOR_HEADER = [*CASE, "kernels", "launches", "products", "bytes / q", "both", "us", *TIMES]
STEP_HEADER = ["recipe", "tokens", "launches", "products", "fallbacks", "GB", "TFLOP", "tokens/s", "ms", *TIMES]


class Report(Store):
    """Rows of operators and steps in `folder/gpu.json`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "gpu.json", rows=KEY)

    def markdown(self) -> str:
        parts = ["# Estimates for GPUs", "Written by `./run.sh bench gpu`.", *__doc__.strip().split("\n\n")[2:-1]]
        for rows in self.groups(("target", "dtype", "heads", "dim")):
            for kind, heading, header, cells in SECTIONS:
                some = sorted((r for r in rows if r["kind"] == kind), key=order)
                if some:
                    parts += [
                        f"## {heading}: {title_of(some[0])}",
                        pipes(header, [cells(r) for r in some], TEXT),
                    ]
            parts.append(self.commands(rows))
        return "\n\n".join(parts) + "\n"

    def terminal(self) -> str:
        new = sorted((self.rows[key] for key in self.new), key=order)
        parts = []
        for kind, heading, header, cells in SECTIONS:
            if some := [r for r in new if r["kind"] == kind]:
                parts.append(f"{heading}: {title_of(some[0])}\n{table(header, [cells(r) for r in some])}")
        return "\n\n".join(parts)


def main(argv: list[str]) -> int:
    args = options.bench_gpu(argv)
    check_toolchain()
    from tools.gpu.graphs import UNTRACEABLE

    warnings.filterwarnings("ignore", module="torch")
    report = Report(args.out).load(args.fresh)
    jobs = [job for name in args.names or DEFAULT for job in jobs_of(name, args)]
    command, failed = shlex.join(["./run.sh", "bench", "gpu", *argv]), False
    try:
        for place, (text, job) in enumerate(jobs, 1):
            say(f"[{place}/{len(jobs)}] {text}")
            begin = time.perf_counter()
            try:
                row = {**job(), "target": args.target, **stamp(command)}
            except ConfigError as error:
                raise ConfigError(f"{text}: {error}") from None
            except UNTRACEABLE as error:
                raise ConfigError(f"{text}: cannot be traced, {first_line(error)}") from None
            except Exception as error:  # a compiler can raise any exception
                failed = True
                say(f"  {first_line(error)}")
                continue
            report.add(row)
            say(f"  {line_of(row)} ({time.perf_counter() - begin:.0f} s)")
    finally:
        if report.new:
            with report.alone():
                report.save(report.markdown())
            print(report.terminal())
            print(report.files())
    return 1 if failed or not report.new else 0


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def jobs_of(name: str, args: argparse.Namespace) -> list[tuple[str, Callable[[], Row]]]:
    """Return the estimates for a name, each as a progress line and a function that returns its row.

    Raises:
        ConfigError: The name is neither a mixer nor a recipe.
    """
    if name in OPERATORS:
        cases = [(form, length) for length in sorted(set(args.length)) for form in dict.fromkeys(args.form)]
        return [
            (f"{name}, {form}, {length:,} tokens", functools.partial(operator_row, name, form, length, args))
            for form, length in cases
        ]
    try:
        resolve(name, [])
    except ConfigError as error:
        if Path(name).suffix:
            raise
        hint = nearest(name, list(OPERATORS))
        raise ConfigError(f"{name!r} is neither a mixer ({hint}) nor a recipe: {error}") from None
    return [(name, functools.partial(step_row, name, args))]


def operator_row(name: str, form: str, length: int, args: argparse.Namespace) -> Row:
    """Return the row of a mixer's operator, with the costs of the forward and backward pass."""
    from tools.gpu.lower import lower
    from tools.gpu.operator import operator_graphs

    batch, dtype = args.batch or 4, getattr(torch, args.dtype)
    shape = (batch, args.heads, length, args.dim)
    graphs = operator_graphs(name, form, shape, dtype)
    row = {"kind": "operator", "name": name, "form": form, "length": length, "batch": batch, "dtype": args.dtype}
    row |= {"heads": args.heads, "dim": args.dim}
    row["parts"] = {g.stage: dataclasses.asdict(lower(g, TARGETS[args.target]).cost) for g in graphs}
    row["softmax"] = {stage: dataclasses.asdict(cost) for stage, cost in fused_softmax(shape, dtype).items()}
    return row | ({"compiled": compiled(graphs)} if args.compile else {})


def step_row(name: str, args: argparse.Namespace) -> Row:
    """Return the row of a whole training step of a recipe, with the cost of the same step with softmax."""
    from tools.gpu.step import trace_step

    recipe = resolve(name, [])
    task = make_task(recipe, describe_data(recipe, look=False)[0])
    length = build_on_meta(task, recipe.model).length
    batch, target = args.batch or max(1, round(TOKENS / length)), TARGETS[args.target]
    models = recipe.model, softmax_beside(recipe.model, args.against, task)
    step, softmax = (trace_step(dataclasses.replace(recipe, model=model), task, batch) for model in models)
    row = {"kind": "step", "name": Path(name).stem, "form": "", "length": length, "batch": batch, "heads": 0, "dim": 0}
    row |= {"dtype": {"bf16": "bfloat16"}.get(recipe.trainer.precision, "float32")}
    row["parts"] = {stage: dataclasses.asdict(cost) for stage, cost in step.costs(target).items()}
    row["softmax"] = {"step": dataclasses.asdict(total(softmax.costs(target).values()))}
    row |= {"against": Path(args.against).stem} if args.against else {}
    return row | ({"compiled": compiled(step.graphs)} if args.compile else {})


def compiled(graphs: list[Any]) -> dict[str, int]:
    """Compile the kernels of graphs for each architecture of `COMPILED_FOR`, and count them.

    Raises:
        Exception: Any error of the compiler.
    """
    from tools.gpu.cubins import compile_kernels
    from tools.gpu.lower import lower

    found = {}
    for target in (TARGETS[name] for name in COMPILED_FOR):
        kernels = [lower(graph, target).kernels for graph in graphs]
        for made in kernels:
            compile_kernels(made, target)
        found[f"sm_{target.architecture}"] = sum(map(len, kernels))
    return found


def seconds(row: Row, part: str, graphs: bool) -> float:
    """Return the estimated seconds of a row's `parts` or of its `softmax`."""
    target, dtype = TARGETS[row["target"]], getattr(torch, row["dtype"])
    fused = part == "softmax" and row["kind"] == "operator"
    estimate = fused_seconds if fused else Cost.seconds
    return sum(estimate(Cost(**cost), target, dtype, graphs) for cost in row[part].values())


def for_batch(row: Row, batch: int) -> Row:
    """Return the row of an operator for another batch, with bytes and products in proportion."""

    def scaled(cost: Row) -> Row:
        return {**cost, **{name: cost[name] * batch // row["batch"] for name in ("moved", "flops")}}

    parts = {part: {stage: scaled(cost) for stage, cost in row[part].items()} for part in ("parts", "softmax")}
    return {**row, **parts, "batch": batch}


def ratio(row: Row) -> str:
    other = f" ({row['against']})" if "against" in row else ""
    return f"{seconds(row, 'parts', True) / seconds(row, 'softmax', True):.2f}{other}"


def built(row: Row) -> str:
    """Return the numbers of compiled kernels by architecture, or "-" if none were compiled."""
    return " / ".join(map(str, row.get("compiled", {}).values())) or "-"


def by_stage(row: Row, value: Callable[[Row], str]) -> str:
    return " / ".join(value(row["parts"][stage]) for stage in STAGES if stage in row["parts"])


def case(row: Row) -> list[str]:
    """Return the cells that name the case of an operator."""
    return [row["name"], row["form"], f"{row['length']:,}", f"{row['batch']:,}"]


def operator_cells(row: Row) -> list[str]:
    q = math.prod(row[name] for name in ("batch", "heads", "length", "dim")) * getattr(torch, row["dtype"]).itemsize
    moved = sum(cost["moved"] for cost in row["parts"].values())
    counts = (by_stage(row, lambda cost, name=name: str(cost[name])) for name in ("kernels", "launches"))
    products = by_stage(row, lambda cost: str(cost["library"]) + ("*" if cost["fallbacks"] else ""))
    times = (f"{1e6 * seconds(row, 'parts', graphs):,.0f}" for graphs in (True, False))
    sizes = (by_stage(row, lambda cost: f"{cost['moved'] / q:.1f}"), f"{moved / q:.1f}")
    ends = [ratio(row), built(row)]
    return [*case(row), *counts, products, *sizes, *times, *ends]


def step_cells(row: Row) -> list[str]:
    sums = {name: sum(cost[name] for cost in row["parts"].values()) for name in row["parts"]["around"]}
    counts = [f"{sums[name]:,}" for name in ("launches", "library", "fallbacks")]
    work = [digits(sums["moved"] / 1e9), digits(sums["flops"] / 1e12)]
    ms, alone = (1e3 * seconds(row, "parts", graphs) for graphs in (True, False))
    tokens = row["batch"] * row["length"]
    speed = f"{tokens / ms * 1e3:,.0f}"
    return [row["name"], f"{tokens:,}", *counts, *work, speed, digits(ms), digits(alone), ratio(row), built(row)]


SECTIONS = (
    ("operator", "Operators", OPERATOR_HEADER, operator_cells),
    ("step", "Training steps", STEP_HEADER, step_cells),
)


def order(row: Row) -> tuple:
    return row["length"], rank(OPERATORS, row["name"]), row["name"], row["form"], row["batch"]


def title_of(row: Row) -> str:
    target = TARGETS[row["target"]]
    text = f"{target.name}, {row['dtype']}"
    if row["kind"] == "operator":
        text += f", {row['heads']} heads of {row['dim']}; forward / backward"
    return f"{text}, estimates"


def line_of(row: Row) -> str:
    header, made = next((header, cells) for kind, _, header, cells in SECTIONS if kind == row["kind"])
    cells = dict(zip(header, made(row)))
    text = f"{cells['launches']} launches, {cells['products']} products, {cells['x softmax']} x softmax"
    return text + "".join(f", {n} kernels to cubins for {name}" for name, n in row.get("compiled", {}).items())
