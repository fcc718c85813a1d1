"""Time whole training steps relative to softmax attention (the paper's Table 2) and to a model without mixing.

./run.sh bench train RECIPE [RECIPE ...] [--size 224 512] [--batch N] [--plain] [--against RECIPE]
    [--set key=value ...]
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import yaml
from torch import nn

from lion.config import ConfigError, flatten, to_dict
from lion.layers.mixers import NONE, SOFTMAX
from lion.recipe import Recipe
from lion.runs import build_on_meta, count_parameters
from lion.samples.base import Batch, Splits
from lion.tasks import Task
from lion.trainer.compilation import compile_blocks
from lion.trainer.diagnostics import process_peak
from lion.trainer.loop import Trainer
from lion.trainer.plan import make_plan
from lion.trainer.runtime import Runtime
from tools import options
from tools.bench.engine import Report, collect, job_of, preparation, typed
from tools.bench.plain import PLAIN, PlainGPT, check_plain, plain_step
from tools.compose import describe_data, make_task, resolve
from tools.probe import check_compiler, device_name, pick_device, ratios, stamp, time_rounds, use_threads, warm_up
from tools.processes import Send
from tools.store import Row
from tools.tables import Table, digits, fill

FLOOR = "without a mixer"
TOKENS = {"cuda": 50_000, "cpu": 1_600}  # of a batch, approximately
LATER = ("overrides",)  # fields that rows of earlier versions lack
SETTING = ("device", "threads", "precision", "matmul", "compiled", "model", "shape", "size", "batch", *LATER)
LEGEND = """\
A step is the trainer's step on a batch of noise: MixUp or masking, forward, backward, gradient clipping and optimizer.
It is compiled, in the recipe's precision on a GPU and in float32 on a CPU, unless `--precision` or `--matmul` are set.
All recipes must have the same shape (dim, depth, heads, dropout, ..). The same model is also timed with softmax, whose
ratio is 1, and without a mixer (every layer passes v on), which is the lower bound. `--plain` adds softmax in plain
eager PyTorch (`tools/bench/plain.py`). `--against` adds a model of any shape, which is compared but has no row, as the
paper compares Hydra and Vim with DeiT. Rounds are interleaved. A ratio is the median over rounds of a step's time
divided by the softmax (or plain) step's time in the same round. Each command timed softmax again, so `x softmax` is
comparable between commands and `ms` is not. The paper's ratios were measured on GPUs, of LION in plain PyTorch and of
Hydra and Vim with the kernels of their authors."""


class TrainReport(Report):
    """Rows of training steps, with softmax's and the paper's ratios beside them."""

    name = "train"
    heading = "Training steps against softmax"
    command = "bench train"
    legend = LEGEND
    setting = SETTING
    key = (*SETTING, "mixer")
    later = LATER

    def line(self, row: Row) -> str:
        return f"{row['mixer']}: {digits(row['ms'])} ms a step, {row['ratio']:.2f} x softmax"

    def title(self, row: Row) -> str:
        tokens = f"{row['tokens']:,} tokens"
        size = f"{row['size']} {row['unit']} ({tokens})"
        if row["unit"] == "tokens":
            size = tokens
        text = f"{size}, batch {row['batch']}, {row['model']}, {row['shape']}: {row['device']}, "
        text += f"{row['threads']} threads, {row['precision']}"
        if row["matmul"] != "highest":
            text += f" with products of {row['matmul']} precision"
        text += ", compiled" if row["compiled"] else ", eager"
        if row.get("overrides"):
            text += f"; {row['overrides']}"
        return text

    def tabled(self, rows: list[Row]) -> Table:
        return fill(COLUMNS, rows)


def main(argv: list[str]) -> int:
    args = options.read("bench train", argv)
    check_compiler(args.eager)
    report = TrainReport(args.out).load(args.fresh)
    args.recipes = list(dict.fromkeys(args.recipes))
    args.threads = use_threads(args.threads)
    args.command = typed("bench train", argv)
    jobs = {}
    for size in sorted(set(args.size or [size_of(args.recipes[0], args.set)])):
        jobs[f"size {size}"] = job_of(args, size=size)
    for one in jobs.values():  # refuses bad recipes before anything is timed
        models(one)
    return collect(report, jobs, measure)


def size_of(path: str, overrides: list[str]) -> int:
    """Return the size of a recipe's samples.

    Raises:
        ConfigError: The samples have no fixed size.
    """
    info = describe_data(resolve(path, overrides), look=False)[0]
    try:
        return info.sample_size
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}, give --size") from None


def models(job: Namespace) -> dict[str, tuple[Recipe, Task]]:
    """Return the job's recipes by name at its size, after softmax, the lower bound and the `--against` recipe.

    Raises:
        ConfigError: A recipe is wrong, or the models differ in shape.
    """
    found: dict[str, tuple[Recipe, Task]] = {}
    for path in job.recipes:
        recipe, task = at_size(path, job)
        if found and recipe.model.shape() != next(iter(found.values()))[0].model.shape():
            raise ConfigError(f"{path}: its model is {recipe.model.shape()}, {job.recipes[0]} has another shape")
        if name_of(recipe) in found:
            raise ConfigError(f"{path}: a second {name_of(recipe)} with the same timed settings; omit one")
        found[name_of(recipe)] = (recipe, task)
    recipe, task = next(iter(found.values()))
    if job.plain:
        check_plain(recipe.model.with_mixer(SOFTMAX))
    softmax = dataclasses.replace(recipe, model=recipe.model.with_mixer(SOFTMAX))
    floor = dataclasses.replace(recipe, model=recipe.model.with_mixer(NONE))
    timed = {SOFTMAX: (softmax, task), FLOOR: (floor, task)}
    if job.against:
        timed[job.against] = at_size(job.against, job)
    found.pop(name_of(softmax), None)
    return timed | found


def at_size(path: str, job: Namespace) -> tuple[Recipe, Task]:
    """Return a recipe and its task for samples of the job's size.

    Raises:
        ConfigError: The recipe is wrong, or its model cannot be built at this size.
    """
    recipe = resolve(path, job.set)
    task = make_task(recipe, describe_data(recipe, look=False)[0].resized(job.size))
    build_on_meta(task, recipe.model)
    return recipe, task


def name_of(recipe: Recipe) -> str:
    """Return the label of a recipe's model, and its form unless that is "auto"."""
    form = flatten(to_dict(recipe.model)).get("attention.form", "auto")
    if form == "auto":
        return recipe.model.label()
    return f"{recipe.model.label()} {form}"


def measure(job: Namespace, send: Send) -> None:
    """Build every model, warm up its step, and time all steps in rounds."""
    torch.set_num_threads(job.threads)
    torch.set_float32_matmul_precision(job.matmul)
    torch._dynamo.config.recompile_limit = 64  # the models share the code of their blocks
    device = pick_device()
    runs: dict[str, Callable[[], object]] = {}
    rows: dict[str, Row] = {}
    batch = job.batch
    for name, (recipe, task) in models(job).items():
        send({"kind": "note", "text": f"{name}: {preparation(job.eager)}"})
        precision = job.precision or "fp32"
        if job.precision is None and device.type == "cuda":
            precision = recipe.trainer.precision
        torch.manual_seed(0)
        model = task.build_model(recipe.model)
        if batch is None:  # that of the first model, for all
            batch = max(1, round(TOKENS[device.type] / model.length))
        example = task.example(batch, device)
        steps = {name: training_step(model, task, recipe, example, precision, device, compiled=not job.eager)}
        if job.plain and name == SOFTMAX:
            steps[PLAIN] = plain_step(PlainGPT.of(model), recipe, example["tokens"])
        for kind, step in steps.items():
            runs[kind] = step
            warm_up(step, device)
            if kind == job.against:
                continue
            rows[kind] = {
                "mixer": kind,
                "device": device_name(),
                "threads": job.threads,
                "precision": precision,
                "matmul": job.matmul,
                "compiled": not job.eager,
                "model": recipe.model.name,
                "shape": recipe.model.shape(),
                "size": job.size,
                "unit": task.info.size_unit,
                "batch": batch,
                "overrides": shlex.join(job.set) or None,
                "tokens": model.length,
                "parameters": count_parameters(model),
                "peak_bytes": process_peak(step, device),
                **stamp(job.command),
            }
    send({"kind": "note", "text": f"timing {', '.join(runs)}"})
    times = time_rounds(runs, job.rounds, job.seconds, device)
    for name, row in rows.items():
        row["ratios"] = sorted(ratios(times[name], times[SOFTMAX]))
        row["ratio"] = median(row["ratios"])
        row["ms"] = 1e3 * median(times[name])
        if job.plain:
            row["plain_ratio"] = median(ratios(times[name], times[PLAIN]))
        if job.against:
            ratio = median(ratios(times[name], times[job.against]))
            row["against"] = {"recipe": Path(job.against).stem, "ratio": ratio}
        send({"kind": "row", "row": row})


def training_step(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    example: Batch,
    precision: str,
    device: torch.device,
    *,
    compiled: bool = False,
) -> Callable[[], object]:
    """Return a function that runs the trainer's step on one batch; a growing batch has its final size."""
    plan = make_plan(recipe, samples=recipe.trainer.batch_size, world=1)
    how = dataclasses.replace(plan.trainer, precision=precision, parallel="ddp")
    plan = dataclasses.replace(plan, trainer=how, ramp=None, accumulation=1)
    trainer = Trainer(plan, task, model, Splits([], [], None, task.info), Path(), Runtime(device))
    if compiled:
        compile_blocks(model)
    trainer.state.step = 1  # at step 0, the trainer logs the first batch
    batches, monitor = itertools.repeat(example), SimpleNamespace(waited=0.0)

    def step() -> None:
        trainer.train_step(batches, monitor)
        trainer.optimizer.zero_grad()  # as at the next step, so that every step allocates its gradients

    return step


def plain_cell(row: Row) -> str | None:
    if "plain_ratio" not in row:
        return None
    return f"{row['plain_ratio']:.2f}"


def against_cell(row: Row) -> str | None:
    other = row.get("against")
    if not other:
        return None
    text = f"{other['ratio']:.2f} x {other['recipe']}"
    theirs = published(row, other["recipe"])
    if theirs:
        text += f" (paper: {theirs})"
    return text


def peak_cell(row: Row) -> str | None:
    if row["peak_bytes"] is None:
        return None
    return f"{row['peak_bytes'] / 2**30:.2f}"


def published(row: Row, against: str | None = None) -> str | None:
    """Return the paper's ratio of a row to softmax, or to the recipe `against`; None if its tables have none."""
    for held in published_times():
        alike = held["model"] == row["model"] and row["shape"].startswith(held["shape"]) and held["size"] == row["size"]
        if alike and held.get("against") == against and row["mixer"] in held["times"]:
            return f"{held['times'][row['mixer']]:.2f}"
    return None


@functools.cache
def published_times() -> list[Row]:
    return yaml.safe_load((Path(__file__).parent / "times.yaml").read_text(encoding="utf-8"))


COLUMNS = {
    "mixer": lambda row: row["mixer"],
    "x softmax": lambda row: f"{row['ratio']:.2f}",
    "paper: x softmax": published,
    "x plain": plain_cell,
    "against": against_cell,
    "ms a step": lambda row: digits(row["ms"]),
    "tokens/s": lambda row: digits(row["batch"] * row["tokens"] / row["ms"] * 1e3),
    "peak GiB": peak_cell,
}
