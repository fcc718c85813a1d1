"""Measure the parts of a recipe's start-up time, up to the first training step, with different compile caches.

    ./run.sh bench startup [RECIPE ...] [--batch N]

Each start runs in a separate process. `cold` begins with an empty Inductor cache, and `warm` repeats the start with the
filled cache. `carried` begins with an empty cache and loads the artifacts that the cold process saved
(`torch.compiler.load_cache_artifacts`), as on another machine. `eager` compiles nothing. The columns are seconds of one
process: importing, building model and optimizer, the first step (forward, backward, update), and the second step. The
parts of a compiled first step are Dynamo (tracing Python), AOTAutograd (the joint graph and its partition), Inductor
(lowering and code generation) and the wait for the C++ compiler (g++, `torch._inductor.config.compile_threads` at a
time).

Equal blocks are compiled once, each call as a graph of its own. They are not nested regions of one graph, which PyTorch
may reuse where their guards differ (pytorch#192905). AOTAutograd's cache skips graphs with an `autograd.Function`
(`bypass`). TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD=1 includes them, at the risk that a change of the
function's Python code goes unnoticed. Inductor's cache holds the compiled kernels in any case.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch._dynamo.utils import compilation_time_metrics, counters

from lion.trainer.compilation import compile_blocks, prepare_compiler
from lion.trainer.optim import make_optimizer
from tools.bench import OUT
from tools.cli import Parser, count, run_command, say, table
from tools.compose import describe_data, make_task, resolve
from tools.probe import device_name, stamp
from tools.store import Row, Store, digits, pipes

DEFAULT = ("quickstart", "deit_tiny_lion_s", "deit_tiny_softmax")
STATES = ("cold", "warm", "carried", "eager")
HEADER = ["recipe", "start", "import", "build", "first step", "Dynamo", "AOTAutograd", "Inductor", "C++", "second step"]
HEADER += ["graphs", "C++ files", "AOT cache"]
KEY = ("recipe", "state", "batch", "torch", "cpu")


class Report(Store):
    """Rows of starts, by recipe, in `folder/startup.json`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "startup.json", rows=KEY)

    def markdown(self) -> str:
        parts = ["# Start-up", "Written by `./run.sh bench startup`.", *__doc__.strip().split("\n\n")[2:]]
        for rows in self.groups(("torch", "cpu", "threads")):
            parts += [f"## {rows[0]['cpu']}, {rows[0]['threads']} threads, torch {rows[0]['torch']}"]
            parts += [pipes(HEADER, [cells(row) for row in rows], ("recipe", "start")), self.commands(rows)]
        return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh bench startup", description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--batch", type=count, default=16, help="samples per step")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the results (default: {OUT})")
    parser.add_argument("--fresh", action="store_true", help="discard earlier measurements")
    args = parser.parse_intermixed_args(argv)
    report, command = Report(args.out).load(args.fresh), shlex.join(["./run.sh", "bench", "startup", *argv])
    names = args.recipes or list(DEFAULT)
    for name in names:
        resolve(name)  # refuses bad recipes before minutes are spent
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            artifacts = Path(folder, "artifacts")
            for state in STATES:
                cache = Path(folder, "carried" if state == "carried" else "cache")
                row = in_a_process(name, state, args.batch, cache, artifacts)
                report.add(
                    {"recipe": name, "state": state, "batch": args.batch, "cpu": device_name(), **row, **stamp(command)}
                )
                say(f"{name}, {state}: first step {digits(row['first'])} s, then {digits(row['second'])} s")
    with report.alone():
        report.save(report.markdown())
    print(table(HEADER, [cells(report.rows[key]) for key in report.new]))
    print(report.files())
    return 0


def in_a_process(name: str, state: str, batch: int, cache: Path, artifacts: Path) -> Row:
    """Measure one start in a new process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    environment["TMPDIR"] = str(cache.parent)  # holds precompiled headers, which are outside the cache
    line = [sys.executable, "-m", "tools.bench.startup", name, state, str(batch), str(artifacts)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, state: str, batch: int, artifacts: Path) -> Row:
    """Take two training steps of a recipe in this process.

    Returns:
        Seconds of importing, building, both steps and the parts of the first step; numbers of graphs and C++ files.
    """
    imported, begun = time.process_time(), time.perf_counter()
    if state == "carried":
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())
    if state != "eager":
        prepare_compiler()
    recipe = resolve(name)
    task = make_task(recipe, describe_data(recipe, look=False)[0])
    model = task.build_model(recipe.model).train()
    optimizer, _ = make_optimizer(model, recipe.optim)
    if state != "eager":
        compile_blocks(model)
    samples = task.example(batch, "cpu")
    times = [time.perf_counter()]
    for _ in range(2):
        task.loss(model, samples).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    if state == "cold":
        artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
    row = {"import": imported, "build": times[0] - begun, "first": times[1] - times[0], "second": times[2] - times[1]}
    return {**row, **parts_of_compilation(), "threads": torch.get_num_threads()}


def parts_of_compilation() -> Row:
    """Return the seconds of each part of compilation in this process, and the numbers of graphs and C++ files."""
    spent = {name: sum(times) for name, times in compilation_time_metrics.items()}
    whole = spent.get("_compile.compile_inner", 0.0)
    joint = spent.get("create_aot_dispatcher_function", 0.0)
    backward = spent.get("compile_fx.<locals>.bw_compiler", 0.0)
    inner, waited = spent.get("compile_fx_inner", 0.0), spent.get("async_compile.wait", 0.0)
    forward = spent.get("compile_fx.<locals>.fw_compiler_base", 0.0)
    cache = {k.removeprefix("autograd_cache_"): v for k, v in counters["aot_autograd"].items() if "cache" in k}
    return {
        "dynamo": whole - joint,
        "aot": joint - forward,
        "inductor": max(forward + backward, inner) - waited,
        "compiler": waited,
        "graphs": counters["stats"]["unique_graphs"],
        "files": len(compilation_time_metrics.get("compile_file", ())),
        "cache": ", ".join(sorted(cache)) or "-",
    }


def cells(row: Row) -> list[str]:
    seconds = [max(row[k], 0) for k in ("import", "build", "first", "dynamo", "aot", "inductor", "compiler", "second")]
    counts = [str(row["graphs"]), str(row["files"]), row["cache"]]
    return [row["recipe"], row["state"], *(f"{s:.2f}" for s in seconds), *counts]


def child(argv: list[str]) -> int:
    name, state, batch, artifacts = argv
    print(json.dumps(measure(name, state, int(batch), Path(artifacts))))
    return 0


if __name__ == "__main__":
    run_command(child)
