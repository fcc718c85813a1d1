"""Measure latency and memory of a model by form and input size (the paper's Figures 1, 3, 4 and 10).

./run.sh bench inference RUN|RECIPE [--sizes 224,384,512] [--form full chunk rnn blockwise] [--chunk-size 16 64]
                         [--evaluate N] [--against RECIPE]
"""

from __future__ import annotations

import dataclasses
import statistics
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError
from lion.layers.mixers import LINEAR, MIXERS, SOFTMAX, LionAttention, forms_of
from lion.layers.mixers.base import set_form
from lion.layers.mixers.lion import FixedDecay
from lion.models.base import Model
from lion.runs import LoadedRun, build_on_meta, open_run
from lion.samples.base import Batch
from lion.tasks.base import Task
from lion.trainer.compilation import compile_blocks
from lion.trainer.diagnostics import tensor_peak
from lion.trainer.runtime import seed_everything
from tools import options
from tools.bench.beside import mixer_peak, softmax_beside
from tools.bench.blockwise import use_blockwise
from tools.bench.engine import ReportOfRuns, collect, column, form_of, job_of, preparation, typed, variants_of
from tools.bench.floors import published_flops
from tools.bench.metric import held_out, value_of
from tools.compose import describe_data, digest, make_task, recipe_unless_run
from tools.plots import open_sides
from tools.probe import (
    Variant,
    check_compiler,
    device_name,
    fits,
    matrix_bytes,
    pick_device,
    ratios,
    square_bytes,
    stamp,
    time_rounds,
    use_threads,
    warm_up,
)
from tools.processes import Send, first_line
from tools.store import Row, grouped
from tools.tables import Table, digits, fill, hundredths, mebibytes

BLOCKWISE = "blockwise"  # the paper's Lion-chunk, which is a function and not a form of the layers
QUADRATIC = "quadratic"
LATER = ("against", "weights")  # fields that rows of earlier versions lack
SETTING = ("device", "threads", "run", "batch", "compiled", *LATER)
LEGEND = """\
The model is that of a run, or of a recipe with random weights, whose data are read only if their sizes are not
published. It is adapted to every input size: pixels of a square image, or tokens (positions are interpolated). It runs
without gradients and padding, and compiled except for `blockwise`; `--eager` compiles nothing. Each size has a separate
process with interleaved rounds. `x softmax` is the median over rounds of the time divided by the time of softmax, which
is the same model with softmax attention (PyTorch's SDPA) and random weights, or with `--against` the model of that
recipe, as the paper compares Hydra and Vim with DeiT. For Lion-lit and linear_transformer, `quadratic` is their full
form with decays of 1 and all L x L scores, as in the paper's plots of Lion-lit. `mixer` is the peak memory that one
attention layer's mixing takes beyond q, k and v, including its output. `x SDPA` and `of a matrix` divide it by the
memory of SDPA and by the size of softmax's attention matrices in one layer, which SDPA does not build. `peak` is the
peak memory of the whole model beyond weights and inputs. `mixer` and `peak` count the bytes of tensors. `MFLOP, C.12`
is the count for one attention layer with one head of the model's width by the paper's formulas. The plot of a run shows
its latest measurement. `--evaluate N` also measures the task's metric on N random held-out samples of every size, in
the first variant that has the run's weights."""
DECAYED, LAMBDA_1 = "lion_d", 100.0  # a mixer with decay sigmoid(a) per head, and the `a` whose decay is 1
FARTHEST = 65  # range of the search for the nearest valid size


class InferenceReport(ReportOfRuns):
    """Rows of models by form and size."""

    name = "inference"
    heading = "Inference by form and size"
    command = "bench inference"
    legend = LEGEND
    setting = SETTING
    key = (*SETTING, "size", "form", "chunk_size")
    later = LATER
    inches = (16, 4.8)

    def line(self, row: Row) -> str:
        text = f"{form_of(row)}, {row['tokens']:,} tokens: {digits(row['ms'])} ms"
        if row["ratio"] is not None:
            text += f", {row['ratio']:.2f} x softmax"
        if row["mixer_bytes"] is not None:
            text += f", mixer {digits(row['mixer_bytes'] / 2**20)} MiB"
        return text

    def title(self, row: Row) -> str:
        text = f"{row['run']}, batch {row['batch']}: {row['device']}, {row['threads']} threads, float32, "
        text += "compiled" if row["compiled"] else "eager"
        if row.get("against"):
            text += f"; softmax is {row['against']}"
        return text

    def tabled(self, rows: list[Row]) -> Table:
        """Return the table of the rows, ordered by size; forms stay in the order in which they were measured."""
        softmax = {row["size"]: row["mixer_bytes"] for row in rows if row["form"] == SOFTMAX}
        unit = rows[0]["unit"]
        columns = {"size" if unit in COLUMNS else unit: lambda row: str(row["size"]), **COLUMNS}
        columns["x SDPA"] = lambda row: share(row["mixer_bytes"], softmax.get(row["size"]))
        columns["of a matrix"] = lambda row: share(row["mixer_bytes"], row["matrix_bytes"])
        if any("dim" in row for row in rows):
            columns["MFLOP, C.12"] = mega_flops
        for row in rows:
            if "metric" in row:
                columns[row["metric"]] = lambda row: row.get("shown", "")
        return fill(columns, sorted(rows, key=by_size))

    def plot(self, figure: Any, rows: list[Row]) -> None:
        curves(figure, rows, f"{self.title(rows[0])}, torch {rows[0]['torch']}")


def main(argv: list[str]) -> int:
    args = options.read("bench inference", argv)
    check_compiler(args.eager)
    loaded = open_model(args.run)
    if args.against and loaded.recipe.model.mixer == SOFTMAX:
        raise ConfigError(f"--against: {args.run} is softmax itself, measure {args.against} in a call of its own")
    args.sizes = args.sizes or (loaded.task.info.sample_size,)
    for size in args.sizes:  # refuses bad sizes and recipes before anything is measured
        check_size(loaded, size)
        softmax_beside(loaded.recipe.model, args.against, resized(loaded, size))
    if args.samples:
        if not loaded.checkpoint:
            raise ConfigError(f"--evaluate: {args.run} is a recipe, whose weights are random; give a run")
        held_out(loaded, args.sizes[0])
    report = InferenceReport(args.out).load(args.fresh)
    args.threads = use_threads(args.threads)
    args.command = typed("bench inference", argv)
    args.variants = variants(loaded, args.form, args.chunk_size)
    jobs = {}
    for size in args.sizes:
        jobs[f"{size} {loaded.task.info.size_unit}"] = job_of(args, size=size)
    return collect(report, jobs, measure)


def open_model(name: str) -> LoadedRun:
    """Load a run, or build the model of a recipe with random weights, under the name RECIPE_random_weights.

    Raises:
        ConfigError: There is neither such a run nor such a recipe.
    """
    recipe = recipe_unless_run(name)
    if recipe is None:
        return open_run(name)
    task = make_task(recipe, describe_data(recipe, look=False)[0])
    seed_everything(recipe.seed)  # every process has the same weights
    model = task.build_model(recipe.model).eval()
    return LoadedRun(Path(f"{Path(name).stem}_random_weights"), recipe, task, model, {})


def variants(loaded: LoadedRun, forms: list[str], chunk_sizes: list[int]) -> list[Variant]:
    """Return the variants to measure: softmax first, then those of `forms` that exist for the run's mixer."""
    found = [Variant(SOFTMAX)]
    if loaded.recipe.model.mixer == SOFTMAX:
        return found
    offered = forms_of(loaded.model)
    if "full" in offered:
        offered = (*offered, BLOCKWISE)
    asked = [form for form in options.INFERENCE_FORMS if form in forms and form in offered]
    found += variants_of(asked, chunk_sizes)
    plain = MIXERS[loaded.recipe.model.mixer].layer is LionAttention  # no features that Lion-D lacks
    if plain and no_decay(loaded):
        found.append(Variant(QUADRATIC))
    return found


def no_decay(loaded: LoadedRun) -> bool:
    mixer = loaded.recipe.model.mixer
    return mixer in LINEAR and LINEAR[mixer].decay is None


def resized(loaded: LoadedRun, size: int) -> Task:
    """Return the run's task for samples of another size."""
    return type(loaded.task)(loaded.task.config, loaded.task.info.resized(size))


def check_size(loaded: LoadedRun, size: int) -> None:
    """Check that the run's model accepts samples of this size.

    Raises:
        ConfigError: The model does not accept this size. The message names the nearest size that it accepts.
    """

    weights = {name: part.to("meta") for name, part in loaded.model.state_dict().items()}

    def suits(size: int) -> bool:
        try:
            model = build_on_meta(resized(loaded, size), loaded.recipe.model)
        except ConfigError:
            return False
        adapted, own = model.adapt(weights, loaded.model), model.state_dict()
        return all(adapted[name].shape == own[name].shape for name in own if name in adapted)

    if suits(size):
        return
    text = f"--sizes: {size} {loaded.task.info.size_unit} does not suit the run's model"
    for distance in range(1, FARTHEST):
        for near in (size - distance, size + distance):
            if near > 0 and suits(near):
                raise ConfigError(f"{text}, nearest: {near}")
    raise ConfigError(text)


def build(loaded: LoadedRun, size: int, variant: Variant, against: str | None = None) -> tuple[Task, Model]:
    """Return the run's task and model for samples of this size, in the variant's form; softmax has random weights."""
    task, config = resized(loaded, size), loaded.recipe.model
    if variant.form == SOFTMAX and (against or config.mixer != SOFTMAX):
        config = softmax_beside(config, against, task)
        most = getattr(config, "max_positions", None)
        if most is not None:  # random weights, for samples of any length
            config = dataclasses.replace(config, max_positions=max(most, size))
        return task, task.build_model(config).eval()
    if variant.form == QUADRATIC:  # decays of 1 change no value, but prevent the product Q (K^T V)
        config = dataclasses.replace(config.resolved(), mixer=DECAYED)
    model = task.build_model(config).eval()
    weights = model.adapt(loaded.model.state_dict(), loaded.model)
    if variant.form == QUADRATIC:
        for name, part in model.named_modules():
            if isinstance(part, FixedDecay):
                weights[f"{name}.a"] = torch.full_like(part.a, LAMBDA_1)
    model.load_state_dict(weights)
    form = variant.form
    if form in (QUADRATIC, SOFTMAX, BLOCKWISE):
        form = "full"
    set_form(model, form, variant.chunk_size)
    if variant.form == BLOCKWISE:
        use_blockwise(model)
    return task, model


def measure(job: Namespace, send: Send) -> None:
    """Measure memory (and the metric) of every variant, then time all variants in rounds."""
    torch.set_num_threads(job.threads)
    device = pick_device()
    loaded = open_model(job.run)
    weights = None
    if loaded.checkpoint:
        weights = digest(loaded.model)
    trained = job.variants[0]
    if len(job.variants) > 1:  # the first is softmax, whose weights are random
        trained = job.variants[1]
    matrix = 0
    failed = None
    runs: dict[Variant, Callable[[], torch.Tensor]] = {}
    rows: dict[Variant, Row] = {}
    for variant in job.variants:
        task, model = build(loaded, job.size, variant, job.against)
        tokens, heads = model.length, model.config.num_heads
        matrix = matrix or matrix_bytes(job.batch, heads, tokens)  # of the first variant, softmax
        linear = variant.form == "full" and no_decay(loaded)  # Q (K^T V)
        square = not linear and variant.form in ("full", QUADRATIC)
        if square and not fits(square_bytes(job.batch, heads, tokens), device):
            send({"kind": "note", "text": f"{variant}: left out, its L x L matrices do not fit in memory"})
            continue
        batch = task.example(job.batch, device)
        batch.pop("segments", None)  # no padding, for which softmax would build a matrix of its mask
        model.to(device)
        once = partial(outputs, task, model, batch)
        compiled = not job.eager and variant.form != BLOCKWISE
        send({"kind": "note", "text": f"{variant}: {preparation(not compiled)}"})
        try:
            row = {"mixer_bytes": mixer_peak(model, once, device, compiled)}
            if compiled:
                compile_blocks(model)
            warm_up(once, device)
            row["peak_bytes"] = tensor_peak(once, device)
        except (RuntimeError, ValueError, ConfigError) as error:
            send({"kind": "note", "text": f"{variant}: {first_line(error)}"})
            continue
        if job.samples and variant == trained:
            try:
                value = value_of(loaded, job.size, task, model, job.samples)
                row |= {"value": value, "shown": task.metric.number(value), "metric": task.metric.heading}
            except Exception as error:
                failed = error
        runs[variant] = once
        rows[variant] = {
            "run": loaded.folder.name,
            "mixer": SOFTMAX if variant.form == SOFTMAX else loaded.recipe.model.mixer,
            "form": variant.form,
            "chunk_size": variant.chunk_size,
            "size": job.size,
            "unit": task.info.size_unit,
            "tokens": tokens,
            "dim": model.config.dim,
            "batch": job.batch,
            "device": device_name(),
            "threads": job.threads,
            "compiled": not job.eager,
            "against": job.against and Path(job.against).stem,
            "weights": weights,
            **row,
            "matrix_bytes": matrix,
            **stamp(job.command),
        }
    times = time_rounds(runs, job.rounds, job.seconds, device)
    softmax = times.get(Variant(SOFTMAX))
    for variant, row in rows.items():
        row["ms"] = 1e3 * statistics.median(times[variant])
        row["ratio"] = None
        if softmax:
            row["ratio"] = statistics.median(ratios(times[variant], softmax))
        send({"kind": "row", "row": row})
    if failed:  # raised now, so that no time is lost
        raise failed


@torch.inference_mode()
def outputs(task: Task, model: Model, batch: Batch) -> torch.Tensor:
    return task.outputs(model, batch)


by_size = itemgetter("size")


def share(size: int | None, base: int | None) -> str:
    """Return a size divided by a base, "-" if one of them is not known or 0."""
    if not size or not base:
        return "-"
    return digits(size / base)


COLUMNS = {
    "tokens": lambda row: f"{row['tokens']:,}",
    "form": form_of,
    "ms": lambda row: digits(row["ms"]),
    "x softmax": lambda row: hundredths(row["ratio"]),
    "peak MiB": lambda row: mebibytes(row["peak_bytes"]),
    "mixer MiB": lambda row: mebibytes(row["mixer_bytes"]),
}


def mega_flops(row: Row) -> str:
    """Return the MFLOPs of one layer and sample by the paper's formulas, which cover only softmax and LION's RNN."""
    if "dim" not in row or row["form"] not in (SOFTMAX, "rnn") or row["mixer"] not in (SOFTMAX, *LINEAR):
        return "-"
    softmax, rnn = published_flops(row["tokens"], row["dim"])
    if row["form"] == SOFTMAX:
        return digits(softmax / 1e6)
    return digits(rnn / 1e6)


def curves(fig: Any, rows: list[Row], title: str) -> None:
    """Plot latency, peak memory and the memory of one layer's mixing over the input size."""
    panels = [("ms", 1, "latency, ms"), ("peak_bytes", 2**20, "peak memory, MiB")]
    panels.append(("mixer_bytes", 2**20, "memory of one layer's mixing, MiB"))
    rows = sorted(rows, key=by_size)
    ticks = sorted(set(column(rows, "size")))
    for ax, (value, scale, text) in zip(fig.subplots(1, 3), panels):
        for line in grouped(rows, ("form", "chunk_size")):
            own = [row for row in line if row[value]]
            style = {"label": form_of(line[0]), "markersize": 4, "linewidth": 1.6}
            if line[0]["form"] == SOFTMAX:
                style |= {"color": "black", "linewidth": 2.2}
            ax.plot(column(own, "size"), [row[value] / scale for row in own], "o-", **style)
        if value == "mixer_bytes":
            matrices = {row["size"]: row["matrix_bytes"] / scale for row in rows}
            ax.plot(matrices.keys(), matrices.values(), ":", color="0.4", label="attention matrix")
        ax.set(yscale="log", title=text, xlabel=f"size, {rows[0]['unit']}")
        ax.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
        ax.grid(True, which="both", color="0.9", linewidth=0.7)
        open_sides(ax)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False)
    fig.suptitle(title, fontsize=10)
