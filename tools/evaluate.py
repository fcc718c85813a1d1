"""Evaluate a run as full attention, chunks and an RNN: metric, speed, memory, deviation.

    python -m tools.evaluate RUN [data.root=PATH] [--form full|chunk|rnn|all] [--chunk-size N]

Every form is measured in a process of its own, eager, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lion.config import ConfigError
from lion.layers.attention import forms_of
from lion.ops import FORMS
from lion.runs import count_parameters, find_run, open_run
from lion.tasks.base import check_same_data, to_device
from lion.trainer.batches import eval_batches
from lion.trainer.evaluate import evaluate
from lion.trainer.runtime import peak_memory, start_runtime
from tools.common import Parser, build_data, choose_form, count, loader_workers, resolve_run, run_command, table

DEFAULT_SIZE = {"full": None, "chunk": 64, "rnn": 1}


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh eval", description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*", metavar="data.root=PATH", help="where its data are now")
    parser.add_argument("--form", choices=(*FORMS, "all"), default="all")
    parser.add_argument("--chunk-size", type=count, help="tokens a chunk (chunk) or a step (rnn)")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    parser.add_argument("--split", choices=("test", "val"), help="default: test, or val where there is no test")
    parser.add_argument("--ema", action="store_true", help="the averaged weights")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    if args.measure:
        measure(json.loads(args.measure))
        return 0
    if args.chunk_size and args.form == "full":
        raise ConfigError("--chunk-size: the full form has no chunks, use --form chunk or rnn")
    wanted = {"checkpoint": args.checkpoint, "split": args.split, "ema": args.ema}
    results = measure_forms(args.run, args.form, args.chunk_size, overrides=args.overrides, **wanted)
    print(as_table(results, results[0]))
    return 0


def forms_to_measure(form: str, chunk_size: int | None, available: tuple[str, ...]) -> list[tuple[str, int | None]]:
    """(form, tokens a chunk or step) that a request stands for."""
    if form != "all":
        return [(form, None if form == "full" else chunk_size or DEFAULT_SIZE[form])]
    size = chunk_size or 64
    every = [("full", None), ("chunk", size), ("rnn", 1), ("rnn", size)]
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
) -> list[dict[str, Any]]:
    """Measure a run in one form, or in all that its mixer has, with the deviation from the full one."""
    resolve_run(find_run(run), overrides)
    loaded = open_run(run, checkpoint=checkpoint, ema=ema)
    if form != "all":
        choose_form(loaded.model, form)
    forms = forms_to_measure(form, chunk_size, forms_of(loaded.model))
    wanted = [*forms] if ("full", None) in forms else [("full", None), *forms]  # the deviation needs it
    common = {"run": str(loaded.folder), "checkpoint": checkpoint, "split": split, "ema": ema}
    common["overrides"] = list(overrides)
    results, logits = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for form, size in tqdm(wanted, desc="evaluating", unit="form", leave=False, disable=None):
            out = Path(scratch) / f"{form}{size}"
            request = json.dumps({**common, "form": form, "chunk_size": size, "out": str(out)})
            environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
            child = subprocess.run(
                [sys.executable, "-m", "tools.evaluate", "-", "--measure", request], env=environment, check=False
            )
            if child.returncode == 130 or child.returncode < 0:
                raise KeyboardInterrupt
            if child.returncode:
                sys.exit(child.returncode)  # it has said why
            saved = torch.load(out, weights_only=True)
            results[form, size], logits[form, size] = saved["result"], saved["outputs"]
    full = logits["full", None]
    for key in forms:
        results[key]["deviation"] = (logits[key] - full).abs().max().item()
    return [results[key] for key in forms]


def measure(request: dict[str, Any]) -> None:
    """Evaluate one form in this process; the result and the logits go to the file `out`."""
    loaded = open_run(request["run"], checkpoint=request["checkpoint"], ema=request["ema"])
    recipe = resolve_run(find_run(request["run"]), request["overrides"])
    splits = build_data(recipe)
    check_same_data(f"{loaded.folder}: its checkpoint", loaded.checkpoint["info"], splits.info.to_dict())
    split = request["split"] or ("val" if splits.test is None else "test")
    dataset = getattr(splits, split)
    if dataset is None:
        raise ConfigError(f"--split {split}: data set {recipe.data.name!r} has none, use val")
    runtime = start_runtime(recipe.trainer.device)
    choose_form(loaded.model, request["form"], request["chunk_size"])
    model, task = loaded.model.to(runtime.device), loaded.task
    batch = min(recipe.trainer.micro_batch or recipe.trainer.batch_size, 256, len(dataset))
    precision = recipe.trainer.precision
    how = {"workers": loader_workers(recipe), "faults": recipe.trainer.faults, "device": runtime.device}
    loader = eval_batches(dataset, batch=batch, rank=0, world=1, pin=False, **how)
    first = next(iter(loader))
    size = sum(x.nbytes for x in first.values()) * -(-len(dataset) // batch)
    batches = list(loader) if size < 2**28 else loader  # small data is loaded ahead, and not timed

    with torch.inference_mode(), runtime.autocast(precision):  # one sample first: kernels load, and are not counted
        sample = to_device({k: v[:1] for k, v in first.items()}, runtime.device)
        width = task.evaluate(model, sample)[1].shape[1:]
    outputs = torch.zeros(len(dataset), *width)
    place = 0

    def collect(out: torch.Tensor) -> None:
        nonlocal place
        outputs[place : place + len(out)] = out
        place += len(out)

    before = reset_peak(runtime.device)
    started = time.perf_counter()
    metrics = evaluate(model, batches, task, runtime, precision=precision, collect=collect)
    seconds = time.perf_counter() - started
    result = {
        "form": request["form"],
        "chunk_size": request["chunk_size"],
        "metric": task.metric,
        "split": split,
        "value": metrics[task.metric],
        "best_step": loaded.checkpoint["step"],
        "samples_per_second": place / seconds,
        "peak_bytes": max(0, peak_now(runtime.device) - before),
        "weight_bytes": 4 * count_parameters(model),
        "batch": batch,
        "precision": precision,
    }
    torch.save({"result": result, "outputs": outputs[:place]}, request["out"])  # less what could not be read


def reset_peak(device: torch.device) -> int:
    """Forget the high-water mark of memory; returns the bytes held now (weights and libraries)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):  # where a sandbox forbids it the mark stays, in a process of its own
            Path("/proc/self/clear_refs").write_text("5")
    return peak_now(device)


def peak_now(device: torch.device) -> int:
    """Most bytes held since `reset_peak`."""
    if device.type == "cpu" and sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return peak_memory(device)


def as_table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Results as text; `about` names the metric."""
    header = ["form", f"{about['metric']} %", "samples/s", "peak memory", "deviation"]
    body = [
        [
            r["form"] if r["chunk_size"] is None else f"{r['form']} ({r['chunk_size']})",
            f"{100 * r['value']:.2f}",
            f"{r['samples_per_second']:.0f}",
            f"{r['peak_bytes'] / 2**20:.1f} MiB",
            f"{r['deviation']:.1e}",
        ]
        for r in rows
    ]
    first = rows[0]
    weights = f"{first['weight_bytes'] / 2**20:.1f} MiB"
    note = f"batch {first['batch']}, {first['precision']}, eager; weights ({weights}) are not in the peak"
    return f"{table(header, body)}\n{note}"


if __name__ == "__main__":
    run_command(main)
