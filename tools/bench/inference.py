"""Latency and memory of a trained model by form and image size, beside softmax (the paper's Figures 1, 3, 4 and 10).

    ./run.sh bench inference RUN [--sizes 224,384,512] [--form full chunk rnn blockwise] [--chunk-size 16 64] [--top1 N]

The model of the run is taken to every size (positions are interpolated) and run without gradients, compiled (but for
`blockwise`; `--eager` compiles nothing); each size in a process of its own, where rounds are interleaved: `x softmax`
is the median over rounds of the time over that of softmax, the same model with softmax attention (PyTorch's SDPA) and
random weights. Where the mixer has no decay, `quadratic` is its full form under decays of 1, with all L x L scores,
as the paper draws Lion-lit. `mixer` is the peak memory of one attention layer's mixing beyond q, k and v, its output
among it, also over that of SDPA, and over an attention matrix, which SDPA does not build; `peak` is that of the whole
model beyond weights and images; both count the bytes of tensors. `--top1 N` also classifies N pictures at every size,
in the first variant of the run's own weights.
Results are added to `reports/inference.md`, `inference.json` and `inference_RUN.png`.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lion.config import ConfigError
from lion.layers import MIXERS, SOFTMAX, Attention
from lion.layers.mixer import set_form
from lion.recipe import Recipe
from lion.runs import LoadedRun, open_run
from lion.tasks.image_classification import TOP1
from lion.trainer.evaluate import evaluate
from lion.trainer.loader import eval_batches
from lion.trainer.memory import free_bytes, tensor_peak
from lion.trainer.runtime import compile_blocks, start_runtime
from tools.bench.probe import check_compiler, device_name, pick_device, stamp, time_rounds, warm_up
from tools.cli import Parser, count, say, table
from tools.compose import build_data, resolve_run
from tools.processes import Send, first_line, in_a_process
from tools.store import Row, Store, digits, pipes

FORMS = ("full", "blockwise", "chunk", "rnn")
QUADRATIC = "quadratic"
SETTING = ("device", "threads", "run", "batch", "compiled")
HEADER = ["px", "tokens", "form", "ms", "x softmax", "peak MiB", "mixer MiB", "x SDPA", "of a matrix", TOP1.heading]
SQUARES = {"full": 5, QUADRATIC: 5, SOFTMAX: 0}  # L x L matrices alive at once, eager; SDPA keeps none


class Variant(NamedTuple):
    """A form, and its tokens a chunk or step where it has them."""

    form: str
    chunk_size: int | None = None

    def __str__(self) -> str:
        return self.form if self.chunk_size is None else f"{self.form} {self.chunk_size}"


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures: all variants at one size."""

    run: str
    variants: tuple[Variant, ...]
    size: int
    batch: int
    rounds: int
    seconds: float
    threads: int
    eager: bool
    top1: int | None
    command: str


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh bench inference", description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument(
        "--sizes", type=sizes, default=(224, 384, 512), help="pixels, as 224,384 (multiples of a patch)"
    )
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["full", "chunk", "rnn"])
    parser.add_argument("--chunk-size", type=count, nargs="+", default=[64], help="of blockwise, chunk and rnn")
    parser.add_argument("--batch", type=count, default=1)
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--seconds", type=count, default=300, help="end the rounds of a size after these")
    parser.add_argument("--threads", type=count)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--top1", type=count, metavar="N", help="classify N pictures of the run's data")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of the report")
    parser.add_argument("--fresh", action="store_true", help="forget earlier measurements")
    args = parser.parse_args(argv)
    check_compiler(args.eager)
    loaded = open_run(args.run)
    for size in args.sizes:  # what cannot be is refused before anything is measured
        resized(loaded, size)
    if args.top1:
        pictures(loaded, args.sizes[0])
    report = Store(args.out / "inference.json", rows=(*SETTING, "size", "form", "chunk_size")).load(args.fresh)
    if args.threads:
        torch.set_num_threads(args.threads)
    failed = False

    def receive(message: Row) -> None:
        kind = message.pop("kind")
        say(f"  {message['text'] if kind == 'note' else line(message)}")
        if kind == "row":
            report.add(message)

    try:
        for size in args.sizes:
            say(f"{size} px")
            job = Job(
                run=str(loaded.folder),
                variants=tuple(variants(loaded, args.form, args.chunk_size)),
                size=size,
                batch=args.batch,
                rounds=args.rounds,
                seconds=args.seconds,
                threads=torch.get_num_threads(),
                eager=args.eager,
                top1=args.top1,
                command=shlex.join(["./run.sh", "bench", "inference", *argv]),
            )
            problem = in_a_process(measure, job, receive)
            if problem:
                say(f"  {problem}")
                failed = True
    finally:  # also what was measured before Ctrl-C
        if report.new:
            report.save(markdown(report))
            rows = [row for key, row in report.rows.items() if key in report.new]
            print(f"{title(rows[0])}\n{table(HEADER, cells(rows))}\n\n{report.files_and(draw(report))}")
    return 1 if failed or not report.new else 0


def sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({count(part) for part in text.split(",")}))


def variants(loaded: LoadedRun, forms: list[str], chunk_sizes: list[int]) -> list[Variant]:
    """Softmax first, then what was asked for and exists."""
    if loaded.recipe.model.mixer == SOFTMAX:
        return [Variant(SOFTMAX)]
    found = [Variant(SOFTMAX)]
    for form in FORMS:
        if form in forms:
            found += [Variant(form)] if form == "full" else [Variant(form, size) for size in chunk_sizes]
    if MIXERS[loaded.recipe.model.mixer].decay is None:
        found.append(Variant(QUADRATIC))
    return found


def resized(loaded: LoadedRun, size: int, mixer: str | None = None) -> tuple[Any, nn.Module]:
    """The run's task and model for square images of `size` pixels; with another mixer, with random weights.

    Raises:
        ConfigError: The patches do not divide the size.
    """
    config = loaded.recipe.model
    for patch in config.resolved().patch_size:
        if size % patch:
            near = max(patch, round(size / patch) * patch)
            raise ConfigError(f"--sizes: {size} is no multiple of the run's patches of {patch}, nearest: {near}")
    if mixer is not None and mixer != config.mixer:
        config = config.with_mixer(mixer)
    task = type(loaded.task)(loaded.task.config, dataclasses.replace(loaded.task.info, size=(size, size)))
    model = task.build_model(config).eval()
    if config is loaded.recipe.model:
        model.load_state_dict(model.adapt(loaded.model.state_dict(), loaded.model))
    return task, model


def measure(job: Job, send: Send) -> None:
    """Warm every variant up, time them in rounds, and then ask for memory and accuracy."""
    torch.set_num_threads(job.threads)
    device, loaded = pick_device(), open_run(job.run)
    runs: dict[Variant, Callable[[], torch.Tensor]] = {}
    rows: dict[Variant, Row] = {}
    trained = next(
        (v for v in job.variants if v.form != SOFTMAX), job.variants[0]
    )  # the first of the run's own weights
    for variant in job.variants:
        softmax = variant.form == SOFTMAX
        task, model = resized(loaded, job.size, SOFTMAX if softmax else None)
        tokens, heads = model.length, loaded.recipe.model.num_heads
        matrix = 4 * job.batch * heads * tokens**2
        linear = variant.form == "full" and MIXERS[loaded.recipe.model.mixer].decay is None  # Q (K^T V)
        if not linear and SQUARES.get(variant.form, 0) * matrix > 0.8 * free_bytes(device):
            send({"kind": "note", "text": f"{variant}: left out, its L x L matrices do not fit in memory"})
            continue
        if not softmax:
            use(model, variant)
        compiled = not job.eager and variant.form != "blockwise" and compile_blocks(model.to(device))
        images = torch.randn(job.batch, task.info.channels, job.size, job.size, device=device)

        def once(model: nn.Module = model, images: torch.Tensor = images) -> torch.Tensor:
            with torch.inference_mode():
                return model(images)

        send({"kind": "note", "text": f"{variant}: {'compiling' if compiled else 'warming up'}"})
        try:
            warm_up(once, device)
            row = {"peak_bytes": tensor_peak(once, device)}
            row["mixer_bytes"] = mixer_peak(model, images, device, compiled)
            row["top1"] = top1(loaded, job.size, task, model, job.top1) if job.top1 and variant == trained else None
        except (RuntimeError, ConfigError) as error:
            send({"kind": "note", "text": f"{variant}: {first_line(error)}"})
            continue
        runs[variant] = once
        rows[variant] = {
            "run": loaded.folder.name,
            "mixer": SOFTMAX if softmax else loaded.recipe.model.mixer,
            "form": variant.form,
            "chunk_size": variant.chunk_size,
            "size": job.size,
            "tokens": tokens,
            "batch": job.batch,
            "device": device_name(),
            "threads": job.threads,
            "compiled": not job.eager,
            **row,
            "matrix_bytes": matrix,
            **stamp(job.command),
        }
    times = time_rounds(runs, job.rounds, job.seconds, device)
    base = times.get(Variant(SOFTMAX))
    for variant, row in rows.items():
        row["ms"] = 1e3 * statistics.median(times[variant])
        row["ratio"] = statistics.median(t / s for t, s in zip(times[variant], base)) if base else None
        send({"kind": "row", **row})


def use(model: nn.Module, variant: Variant) -> None:
    """Run every layer as the variant says."""
    set_form(model, "full" if variant.form == QUADRATIC else variant.form, variant.chunk_size)
    if variant.form == QUADRATIC:
        for layer in layers(model):
            layer.arguments = decayed(layer.arguments)


def decayed(arguments: Any) -> Any:
    """A layer's `arguments` with decays of 1, which keep the operator from multiplying right to left."""

    def wrapped(x: torch.Tensor, q: torch.Tensor, *rest: Any) -> dict[str, Any]:
        return {**arguments(x, q, *rest), "log_decay": q.new_zeros(q.shape[1])}

    return wrapped


def layers(model: nn.Module) -> list[Attention]:
    return [m for m in model.modules() if isinstance(m, Attention)]


def mixer_peak(model: nn.Module, images: torch.Tensor, device: torch.device, compiled: bool) -> int | None:
    """Of the first layer's mixing, beyond its q, k and v."""
    layer, layout = layers(model)[0], model.layout
    mix = torch.compile(layer.mix, fullgraph=True, dynamic=False) if compiled else layer.mix
    with torch.inference_mode():
        x = torch.randn(len(images), model.length, layer.proj.in_features, device=device)
        q, k, v = (t.contiguous() for t in layer.heads(x))

        def once() -> torch.Tensor:
            with torch.inference_mode():
                return mix(x, q, k, v, layout)

        once()
        return tensor_peak(once, device)


def pictures(loaded: LoadedRun, size: int) -> torch.utils.data.Dataset:
    """The run's test split (or val) at this size."""
    splits = build_data(with_size(resolve_run(loaded.folder), size))
    then = {**loaded.checkpoint["info"], "size": [size, size]}
    splits.info.check_same(f"{loaded.folder}: its checkpoint", then)
    return splits.val if splits.test is None else splits.test


def top1(loaded: LoadedRun, size: int, task: Any, model: nn.Module, limit: int) -> float:
    """Of the first pictures, `limit` at most."""
    data = pictures(loaded, size)
    some = torch.utils.data.Subset(data, range(min(limit, len(data))))
    batches = eval_batches(
        some, seed=loaded.recipe.seed, split="test", batch=min(16, len(some)), rank=0, world=1, workers=0, pin=False
    )
    return evaluate(model, batches, task, start_runtime(str(pick_device())), precision="fp32")[TOP1.name]


def with_size(recipe: Recipe, size: int) -> Recipe:
    """The recipe with pictures of `size` pixels.

    Raises:
        ConfigError: Its data has one size only.
    """
    if not hasattr(recipe.data, "image_size"):
        raise ConfigError(f"--top1: data set {recipe.data.name!r} has pictures of one size only")
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, image_size=(size, size)))


def line(row: Row) -> str:
    mixer = "" if row["mixer_bytes"] is None else f", mixer {digits(row['mixer_bytes'] / 2**20)} MiB"
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f} x softmax"
    return f"{form_of(row)}, {row['tokens']:,} tokens: {digits(row['ms'])} ms{ratio}{mixer}"


def title(row: Row) -> str:
    how = "compiled" if row["compiled"] else "eager"
    return f"{row['run']}, batch {row['batch']}: {row['device']}, {row['threads']} threads, float32, {how}"


def form_of(row: Row) -> str:
    return str(Variant(row["form"], row["chunk_size"]))


def cells(rows: list[Row]) -> list[list[str]]:
    """A table by size, softmax first."""
    softmax = {row["size"]: row["mixer_bytes"] for row in rows if row["form"] == SOFTMAX}
    out = []
    for row in sorted(rows, key=lambda r: r["size"]):  # forms stay in the order in which they were measured
        mib = ["-" if row[n] is None else digits(row[n] / 2**20) for n in ("peak_bytes", "mixer_bytes")]
        bases = (softmax.get(row["size"]), row["matrix_bytes"])
        shares = [digits(row["mixer_bytes"] / base) if row["mixer_bytes"] and base else "-" for base in bases]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        best = "" if row["top1"] is None else TOP1.number(row["top1"])
        px = [str(row["size"]), f"{row['tokens']:,}", form_of(row)]
        out.append([*px, digits(row["ms"]), ratio, *mib, *shares, best])
    return out


def markdown(report: Store) -> str:
    parts = ["# Inference by form and image size", "Written by `./run.sh bench inference`.", __doc__.split("\n\n")[2]]
    for rows in report.groups(SETTING):
        picture = picture_of(report, rows).name
        parts += [f"## {title(rows[0])}", f"![curves]({picture})", pipes(HEADER, cells(rows)), report.commands(rows)]
    return "\n\n".join(parts) + "\n"


def picture_of(report: Store, rows: list[Row]) -> Path:
    return report.path.with_name(f"inference_{rows[0]['run']}.png")


def draw(report: Store) -> Path | None:
    """A picture of what was measured last."""
    rows = report.groups(SETTING)[0]
    return report.draw(picture_of(report, rows), (16, 4.8), lambda fig: curves(fig, rows))


def curves(fig: Any, rows: list[Row]) -> None:
    """Latency, peak memory and that of one layer, over size."""
    panels = [("ms", 1, "latency, ms"), ("peak_bytes", 2**20, "peak memory, MiB")]
    panels.append(("mixer_bytes", 2**20, "memory of one layer's mixing, MiB"))
    forms = list(dict.fromkeys(form_of(row) for row in rows))
    for ax, (value, scale, text) in zip(fig.subplots(1, 3), panels):
        for form in forms:
            own = sorted((r for r in rows if form_of(r) == form and r[value]), key=lambda r: r["size"])
            style = {"color": "black", "linewidth": 2.2} if form == SOFTMAX else {"linewidth": 1.6}
            ax.plot([r["size"] for r in own], [r[value] / scale for r in own], "o-", label=form, markersize=4, **style)
        if value == "mixer_bytes":
            own = {r["size"]: r["matrix_bytes"] / scale for r in sorted(rows, key=lambda r: r["size"])}
            ax.plot(list(own), list(own.values()), ":", color="0.4", label="attention matrix")
        ticks = sorted({row["size"] for row in rows})
        ax.set(yscale="log", title=text, xlabel="image side, px")
        ax.set_xticks(ticks, [str(t) for t in ticks], rotation=45)
        ax.grid(True, which="both", color="0.9", linewidth=0.7)
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside right center", frameon=False)
    fig.suptitle(f"{title(rows[0])}, torch {rows[0]['torch']}", fontsize=10)
