"""Evaluate a run as full attention, chunks and an RNN: metric, speed, memory, deviation.

    python -m tools.evaluate RUN [data.root=PATH] [--form full|chunk|rnn|all] [--chunk-size N] [--lengths 256,512,..]

Blocks are compiled, as in training, where the recipe says so and there is a compiler; that is not timed. Memory is what
tensors held at most in one batch, beside the weights. --lengths: text in windows of these, see `tools.lengths`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lion.config import ConfigError
from lion.layers.mixer import forms_of
from lion.ops import FORMS
from lion.runs import LoadedRun, count_parameters, find_run, open_run
from lion.tasks.base import Outcome, Task, to_device
from lion.tasks.data import Batch
from lion.tasks.metrics import Metric, OwnPass
from lion.tasks.seeds import derive
from lion.trainer.evaluate import Totals, own_value
from lion.trainer.loader import Batches, eval_batches
from lion.trainer.memory import tensor_peak
from lion.trainer.runtime import Runtime, compile_blocks, start_runtime
from tools.bench.probe import seconds
from tools.cli import Parser, choose_form, count, counts, run_command, table
from tools.compose import build_data, check_data, loader_workers, metric_of, resolve_run

LONG = 1024  # tokens; above it neither an L x L matrix nor single steps are measured unless asked for
DEFAULT_SIZE = {"full": None, "chunk": 64, "rnn": 1}
Form = tuple[str, int | None]  # and its tokens a chunk or step


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh eval", description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*", metavar="data.root=PATH", help="where its data are now")
    parser.add_argument("--form", choices=(*FORMS, "all"), default="all")
    parser.add_argument("--chunk-size", type=count, help="tokens a chunk (chunk) or a step (rnn)")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    parser.add_argument("--split", choices=("test", "val"), help="default: test, or val where there is no test")
    parser.add_argument("--ema", action="store_true", help="the averaged weights")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--lengths", type=counts, help="of text, in windows of so many tokens, as 256,512")
    parser.add_argument("--tokens", type=count, default=2**18, help="with --lengths, of held-out text, at most")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="with --lengths, where to add JSON and a picture")
    args = parser.parse_intermixed_args(argv)
    if args.chunk_size and args.form == "full":
        raise ConfigError("--chunk-size: the full form has no chunks, use --form chunk or rnn")
    wanted = {"checkpoint": args.checkpoint, "split": args.split, "ema": args.ema, "eager": args.eager}
    if args.lengths:
        from tools.lengths import evaluate_lengths  # which measures with what is here

        return evaluate_lengths(args, argv)
    results = measure_forms(args.run, args.form, args.chunk_size, overrides=args.overrides, **wanted)
    print(as_table(results, metric_of(resolve_run(find_run(args.run)))))
    return 0


def forms_to_measure(form: str, chunk_size: int | None, available: tuple[str, ...], length: int = 0) -> list[Form]:
    """What a request stands for, of a model with these forms and samples of `length` tokens."""
    if form != "all":
        return [(form, None if form == "full" else chunk_size or DEFAULT_SIZE[form])]
    size = chunk_size or 64
    every = [("full", None), ("chunk", size), ("rnn", 1), ("rnn", size)]
    if length > LONG and "chunk" in available:
        every = [("chunk", size), ("rnn", size)]
    return list(dict.fromkeys(f for f in every if f[0] in available))


def measure_forms(
    run: str | Path,
    form: str = "all",
    chunk_size: int | None = None,
    *,
    overrides: Sequence[str] = (),
    checkpoint: str = "best",
    split: str | None = None,
    ema: bool = False,
    eager: bool = False,
    runtime: Runtime | None = None,
) -> list[dict[str, Any]]:
    """Measure a run in one form, or in all that its mixer has, with the deviation from the full one (from chunks where
    samples are longer than `LONG`).

    One checkpoint and one model serve all: a run that still trains may replace its checkpoints meanwhile.
    """
    recipe = resolve_run(find_run(run), overrides)
    loaded = open_run(run, checkpoint=checkpoint, ema=ema)
    if form != "all":
        choose_form(loaded.model, form)
    available, length = forms_of(loaded.model), loaded.model.length
    forms = forms_to_measure(form, chunk_size, available, length)
    reference = forms_to_measure("all", chunk_size, available, length)[0]
    wanted = [*forms] if reference in forms else [reference, *forms]  # the deviation needs it
    splits = build_data(recipe)
    check_data(splits.info, loaded.task.info, loaded.folder)
    split = split or ("val" if splits.test is None else "test")
    dataset = getattr(splits, split)
    if dataset is None:
        raise ConfigError(f"--split {split}: data set {recipe.data.name!r} has none, use val")
    runtime = runtime or start_runtime(recipe.trainer.device, matmul=recipe.trainer.matmul)
    batch = min(recipe.trainer.micro_batch or recipe.trainer.batch_size, 256, len(dataset))
    how = {"workers": loader_workers(recipe), "faults": recipe.trainer.faults, "device": runtime.device}
    how |= {"collate": splits.collate, "seed": recipe.seed, "split": split}
    batches = eval_batches(dataset, batch=batch, rank=0, world=1, pin=False, **how)
    compiled = recipe.trainer.compile and not eager and compile_blocks(loaded.model)
    about = {
        "metric": loaded.task.metric.name,
        "split": split,
        "best_step": loaded.checkpoint["step"],
        "weight_bytes": 4 * count_parameters(loaded.model),
        "batch": batch,
        "precision": recipe.trainer.precision,
        "compiled": compiled,
    }
    loaded.model.to(runtime.device)
    rounds = -(-len(dataset) // batch)
    seed = derive(recipe.seed, split)
    results = measure(loaded, batches, rounds, wanted, runtime, recipe.trainer.precision, seed)
    return [{"form": form, "chunk_size": size, **about, **results[form, size]} for form, size in forms]


class Measured:
    """What a form has shown so far."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.totals = Totals(task.metrics)
        self.seconds, self.peak = 0.0, None
        self.deviation = torch.zeros((), device=device)

    def add(self, outcome: Outcome, reference: torch.Tensor, mask: torch.Tensor) -> None:
        """A batch's outcome, the full form's outputs (B, ..), and which samples are real (B,)."""
        self.totals.add(outcome, mask)
        for own, other, real in zip(outcome.outputs, reference, mask.tolist()):  # batches of text fill the memory
            if real:
                self.deviation = torch.maximum(self.deviation, (own - other).abs_().max())


def measure(
    loaded: LoadedRun,
    batches: Batches,
    rounds: int,
    forms: list[Form],
    runtime: Runtime,
    precision: str,
    seed: int = 0,
) -> dict[Form, dict[str, Any]]:
    """Value, speed, peak memory, and deviation from the first of the forms; each of the `rounds` batches is read
    once, run in every form, and forgotten."""
    model, task = loaded.model, loaded.task
    found = {form: Measured(task, runtime.device) for form in forms}
    samples, seen = 0, set()

    def forward(batch: Batch) -> Outcome:
        with torch.inference_mode(), runtime.autocast(precision):
            return task.evaluate(model, batch)

    shown = tqdm(batches, total=rounds, desc="evaluating", unit="batch", leave=False, disable=None)
    for batch in shown:
        batch = to_device(batch, runtime.device)
        once, outcomes = partial(forward, batch), []
        shapes = tuple(x.shape for x in batch.values())  # padded text has several
        new = shapes not in seen
        seen.add(shapes)
        for form, measured in found.items():
            choose_form(model, *form)
            if new:
                once()  # compiles, and is not timed
                peak = tensor_peak(once, runtime.device)
                measured.peak = peak if measured.peak is None else max(measured.peak, peak)
            measured.seconds += seconds(lambda run=once, to=outcomes: to.append(run()), runtime.device)
            measured.add(outcomes[-1], outcomes[0].outputs, batch["mask"])
            del outcomes[1:]
        samples += int(batch["mask"].sum())
    results = {}
    for form, measured in found.items():
        choose_form(model, *form)
        values = measured.totals.values(runtime)
        if isinstance(task.metric, OwnPass):
            values[task.metric.name] = own_value(task.metric, model, batches, task, runtime, precision, seed)
        results[form] = {
            "value": values[task.metric.name],
            "remark": task.remark(values),
            "samples_per_second": samples / measured.seconds,
            "peak_bytes": measured.peak,
            "deviation": measured.deviation.item(),
        }
    return results


def as_table(rows: list[dict[str, Any]], metric: Metric) -> str:
    """Results as text."""
    header = ["form", metric.heading, "samples/s", "peak memory", "deviation"]
    body = [
        [
            r["form"] if r["chunk_size"] is None else f"{r['form']} ({r['chunk_size']})",
            metric.number(r["value"]),
            f"{r['samples_per_second']:.0f}",
            "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**20:.1f} MiB",
            f"{r['deviation']:.1e}",
        ]
        for r in rows
    ]
    first = rows[0]
    weights = f"{first['weight_bytes'] / 2**20:.1f} MiB"
    how = "compiled" if first.get("compiled") else "eager"
    note = f"batch {first['batch']}, {first['precision']}, {how}; weights ({weights}) are not in the peak"
    return "\n".join([table(header, body), note, *([first["remark"]] if first.get("remark") else [])])


if __name__ == "__main__":
    run_command(main)
