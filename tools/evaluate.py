"""Evaluate a run as full attention, in chunks and as an RNN: metric, speed, memory, deviation.

    ./run.sh eval RUN [data.root=PATH] [--form full|chunk|rnn|all] [--chunk-size N,N] [--lengths 256,512,..]
        [--choices FILE.jsonl] [--processes N]

Blocks are compiled as in training, if the recipe asks for it and there is a compiler; compilation is not timed. Memory
is the peak of all tensors of one batch, without the weights. --lengths evaluates text in windows of these lengths, see
`tools.lengths`; --choices evaluates multiple-choice questions, see `tools.choices`. With --processes the tokens of each
row are split over processes, and the memory is the largest of a process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lion.evaluation.forms import form_label
from lion.evaluation.run import evaluate_run
from lion.progress import rate
from lion.runs import LoadedRun, open_run
from lion.samples.base import Splits
from lion.tasks.metrics import Metric
from lion.trainer.plan import check_rows
from lion.trainer.runtime import Runtime
from tools import options
from tools.choices import evaluate_choices
from tools.cli import choose_form, run_command
from tools.compose import build_data, check_data, loader_workers, metric_of, open_with_data, resolve_run, runtime_of
from tools.launch import Machines, launch
from tools.lengths import evaluate_lengths
from tools.tables import table


def main(argv: list[str]) -> int:
    args = options.read("eval", argv)
    if args.choices:
        return evaluate_choices(args)
    if args.processes > 1 and "RANK" not in os.environ:
        check_rows(open_run(args.run, checkpoint=args.checkpoint).model, args.processes)
        return launch(Machines(args.processes), argv, "tools.evaluate", again="starts anew")
    run = open_with_data(args.run, args.overrides, checkpoint=args.checkpoint, ema=args.ema)
    if args.lengths:
        return evaluate_lengths(run, args, argv)
    runtime = None
    if args.processes > 1:
        runtime = runtime_of(run.recipe, args.processes)
    choose_form(run.model, args.form)
    splits, workers = own_data(run)
    results = evaluate_run(
        run,
        splits,
        args.form,
        args.chunk_size,
        split=args.split,
        workers=workers,
        eager=args.eager,
        runtime=runtime,
    )
    if runtime is not None:
        dist.destroy_process_group()
    if runtime is None or runtime.main:
        print(as_table(results, metric_of(run.recipe)))
    return 0


def measure_forms(
    run: LoadedRun | str | Path,
    form: str = "all",
    chunk_size: int | Sequence[int] | None = None,
    *,
    splits: Splits | None = None,
    checkpoint: str = "best",
    split: str | None = None,
    ema: bool = False,
    eager: bool = False,
    runtime: Runtime | None = None,
) -> list[dict[str, Any]]:
    """Evaluate a run on `splits`, or on the data of its recipe (`lion.evaluation.run`).

    All forms use one checkpoint and one model, because a run that is still training may replace its checkpoints
    meanwhile.
    """
    if not isinstance(run, LoadedRun):
        opened = open_with_data
        if splits is not None:
            opened = open_run
        run = opened(run, checkpoint=checkpoint, ema=ema)
    elif splits is None:
        run = run._replace(recipe=resolve_run(run.folder))
    choose_form(run.model, form)
    workers = 0
    if splits is None:
        splits, workers = own_data(run)
    return evaluate_run(run, splits, form, chunk_size, split=split, workers=workers, eager=eager, runtime=runtime)


def own_data(run: LoadedRun) -> tuple[Splits, int]:
    """Return the data of a run (`open_with_data`), and the number of workers that load them."""
    splits = build_data(run.recipe, run.folder)
    check_data(splits.info, run.task.info, run.folder)
    return splits, loader_workers(run.recipe)


def as_table(rows: list[dict[str, Any]], metric: Metric) -> str:
    """Format the results as a table with a note."""
    header = ["form", metric.heading, "samples/s", "peak memory", "deviation"]
    body = [
        [
            form_label(r["form"], r["chunk_size"]),
            metric.number(r["value"]),
            rate(r["samples_per_second"], 1),
            "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**20:.1f} MiB",
            f"{r['deviation']:.1e}",
        ]
        for r in rows
    ]
    first = rows[0]
    weights = f"{first['weight_bytes'] / 2**20:.1f} MiB"
    how = "eager"
    if first.get("compiled"):
        how = "compiled"
    note = f"batch {first['batch']}, {first['precision']}, {how}; the peak does not include the weights ({weights})"
    return "\n".join([table(header, body), note, *([first["remark"]] if first.get("remark") else [])])


if __name__ == "__main__":
    run_command(main)
