"""Time the operators in every form against PyTorch's SDPA and against lower bounds of their times.

    ./run.sh bench ops [--mixer lion_s lightnet | all] [--form full chunk] [--length 197 1024] [--pass forward both]

There are also rows for Lion-S over two orders of an image (`lion_s_multiscan`), and for GLA and LightNet in one
direction (`gla_forward`, `lightnet_forward`). `--mixer lightnet lion_s lion_s_multiscan` compares one, two and four
scans.

Before its timing, each form is verified against the definition in the same way as it is timed: compiled, except for
the loop over the sequence (`rnn`). The operator gets the arguments that the mixer's layer passes; on a CPU, q and k are
mapped before. On a GPU, the feature map is timed with the operator, whose kernels compute it. Rounds are
interleaved: each round times every form of a mixer and SDPA once. A ratio is the median of the ratios of all rounds.
Compilation and warm-up are excluded. `rnn` is timed in inference only. A form with an L x L matrix is left out if the
matrix does not fit in memory.

Results are added to `ops.json`, `ops.md` and `ops.png` in runs/bench, or in the folder `--out`. `--fresh` starts over.
A long measurement can be split into several commands, and Ctrl-C keeps the rows measured so far.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.trainer.diagnostics import process_peak
from tools import options
from tools.bench.engine import collect, job_of, preparation, typed, variants_of
from tools.bench.floors import Size, floor, flops, measure_rates, traffic
from tools.bench.operators import OPERATORS, Operator, check_operators, softmax
from tools.bench.ops_report import PASSES, OpsReport, note, setting_of
from tools.cli import say
from tools.probe import (
    Variant,
    check_compiler,
    fits,
    pick_device,
    ratios,
    square_bytes,
    stamp,
    step,
    time_rounds,
    use_threads,
    warm_up,
)
from tools.processes import Send, first_line

DEFAULT = ("lion_lit", "lion_d", "lion_s", "gla")  # no decay; a number per head; a number per token; a vector per token
CHECKED = 130  # tokens in the check against the definition: a few chunks, the last one partial
TOLERANCE = 2e-5  # largest error over the largest value, float32


SDPA = Variant("sdpa")


def main(argv: list[str]) -> int:
    args = options.read("bench ops", argv)
    asked = args.mixer or DEFAULT
    check_operators([name for name in asked if name != "all"])
    if set(args.form) == {"rnn"} and "forward" not in args.passes:
        raise ConfigError("--pass: 'rnn' is timed in inference only, add forward")
    check_compiler(args.eager)
    report = OpsReport(args.out).load(args.fresh)
    args.form = list(dict.fromkeys(args.form))
    args.length = sorted(set(args.length))
    args.passes = [name for name in PASSES if name in args.passes]
    args.chunk_size = list(dict.fromkeys(args.chunk_size))
    args.threads = use_threads(args.threads)
    args.rates = measure_rates(pick_device(), getattr(torch, args.dtype), args.heads, args.dim)
    args.command = typed("bench ops", argv)
    report.add(setting_of(args) | args.rates, "rates")
    say(report.rates_line(setting_of(args)))
    jobs = {}  # a process for each mixer: many mixers exceed the compile cache
    for name in OPERATORS:
        if name in asked or "all" in asked:
            jobs[name] = job_of(args, mixer=name)
    return collect(report, jobs, measure)


def measure(job: Namespace, send: Send) -> None:
    """Verify every form of a mixer, then time the forms that passed; send rows and notes."""
    torch.set_num_threads(job.threads)
    torch._dynamo.config.recompile_limit = 64  # variants are closures of one function
    device = pick_device()
    errors = verify_all(job, device, send)
    if not errors:
        return
    for length in job.length:
        for which in job.passes:
            torch._dynamo.reset()  # the compile cache holds the variants of one length, not of all lengths
            for row in time_length(job, length, which, errors, device, send):
                send({"kind": "row", "row": row})
            send({"kind": "write"})


def verify_all(job: Namespace, device: torch.device, send: Send) -> dict[Variant, float]:
    """Return the error of each correct form against the definition; send notes about wrong and missing forms."""
    send({"kind": "note", "text": f"verifying {', '.join(job.form)}"})
    operator = OPERATORS[job.mixer]
    tensors, fixed = operator.inputs(job.heads, job.dim, 1, CHECKED, device, torch.float32)
    exact = {name: t.detach().cpu().double() for name, t in tensors.items()}
    expected = operator.definition(exact, fixed)
    found = {}
    for variant in variants_of(job.form, job.chunk_size):
        try:
            with torch.inference_mode():
                got = build(job, variant, fixed)(tensors).cpu().double()
        except Exception as error:
            send(note(job, f"not verified: {first_line(error)}", failed=True, variant=variant))
            continue
        error = ((got - expected).abs().max() / expected.abs().max()).item()
        if error <= TOLERANCE:  # also false for NaN
            found[variant] = error
        else:
            send(note(job, f"off by {error:.1e} from the definition, not timed", failed=True, variant=variant))
    return found


def build(job: Namespace, variant: Variant, fixed: dict[str, Any]) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return the operator as a layer's `mix` calls it, compiled unless it loops over the sequence."""

    def run(tensors: dict[str, Tensor]) -> Tensor:
        return OPERATORS[job.mixer].run(tensors, fixed, variant.form, variant.chunk_size or 64)

    if job.eager or variant.form == "rnn":  # torch.compile would unroll the loop over the sequence
        return run
    return torch.compile(run, fullgraph=True, dynamic=False)


def time_length(
    job: Namespace, length: int, which: str, errors: dict[Variant, float], device: torch.device, send: Send
) -> list[dict[str, Any]]:
    """Time one length and pass; return the rows, the row of SDPA first."""
    batch = max(1, job.tokens // length)
    operator = OPERATORS[job.mixer]
    dtype = getattr(torch, job.dtype)
    tensors, fixed = operator.inputs(job.heads, job.dim, batch, length, device, dtype)
    where = {"length": length, "pass": which}
    runs, rows = {}, {}
    send({"kind": "note", "text": f"{length:,} tokens, {which}: {preparation(job.eager)}"})
    for variant in (SDPA, *errors):
        if variant.form == "rnn" and which == "both":
            continue
        square = square_of(variant, operator, tensors, which)
        if not fits(square, device):
            short = f"its L x L matrices take about {square / 2**30:.0f} GiB, more than is free"
            send(note(job, short, failed=False, variant=variant, **where))
            continue
        run, used = build(job, variant, fixed), tensors
        if variant is SDPA:
            run, used = softmax, {name: tensors[name] for name in "qkv"}
        try:
            once, out = step(run, used, which)
            warm_up(once, device)
            peak = process_peak(once, device)
        except Exception as error:
            send(note(job, f"not timed ({which}): {first_line(error)}", failed=True, variant=variant, **where))
            continue
        runs[variant] = once
        directions = 1
        if operator.direction == "both":
            directions = 2
        size = Size(*tensors["q"].shape, variant.chunk_size or 1, directions, len(operator.scans))
        work = flops(variant.form, operator.kind(tensors), which, size)
        moved = traffic(used.values(), out, which)
        rows[variant] = {
            "mixer": "sdpa" if variant is SDPA else job.mixer,
            "form": variant.form,
            "chunk_size": variant.chunk_size,
            **where,
            **setting_of(job),
            "batch": batch,
            "compiled": not job.eager and variant.form not in ("rnn", "sdpa"),
            "error": errors.get(variant),
            "peak_bytes": peak,
            "flops": work,
            "bytes": moved,
            **floor(work, moved, job.rates),
            **stamp(job.command),
        }
    if SDPA not in runs or len(runs) == 1:
        return []
    times = time_rounds(runs, job.rounds, job.seconds, device)
    for variant, row in rows.items():
        found = ratios(times[variant], times[SDPA])
        row["ms"] = 1e3 * statistics.median(times[variant])
        row["sdpa_ms"] = 1e3 * statistics.median(times[SDPA])
        row["ratio"] = statistics.median(found)
        row["rounds"] = [round(ratio, 5) for ratio in found]
    return list(rows.values())


def square_of(variant: Variant, operator: Operator, tensors: dict[str, Tensor], which: str) -> int:
    """Estimate the bytes of the L x L matrices of a variant."""
    if variant.form != "full" or operator.kind(tensors) in ("plain", "one_scan"):
        return 0
    batch, heads, length, dim = tensors["q"].shape
    vectors = 0
    if operator.vectors(tensors):
        vectors = dim
    return len(operator.scans) * square_bytes(batch, heads, length, backward=which == "both", vectors=vectors)
