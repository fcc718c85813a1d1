"""Kill a training run repeatedly, and compare the result with that of an uninterrupted run.

    ./run.sh soak [--recipe FILE] [key=value ...] [--kills 100] [--seed 0] [--report FILE.md]

Every kill is a SIGKILL at a random moment: half of the kills come between the start and a few steps, half while a
checkpoint is being written. Every restart has a random number of loader workers. In the end, all tensors, counters,
random states and logged losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError
from lion.files import save_text
from lion.progress import progress
from lion.trainer.checkpoint_files import FOLDER, load_state, newest
from tools.cli import Parser, count, run_command
from tools.compose import resolve
from tools.processes import kill_tree, start_command

EVERY = ("trainer.save_every=3", "trainer.eval_every=50", "trainer.log_every=1", "trainer.compile=false")
TRAINING = 2.0  # seconds of training before the latest kill
STEPS_A_KILL = 40


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh soak", description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of the recipe; trainer.steps sets the length"
    )
    parser.add_argument("--kills", type=count, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=count, default=1)
    parser.add_argument("--report", help="Markdown file to which the result is also written")
    args = parser.parse_intermixed_args(argv)
    if "trainer.parallel=fsdp" in args.overrides:
        raise ConfigError("trainer.parallel: soak compares checkpoints that are not sharded, use ddp")
    overrides = [*EVERY, f"trainer.steps={STEPS_A_KILL * args.kills}", *args.overrides]
    overrides = list({item.partition("=")[0]: item for item in overrides}.values())  # the last one of a key counts
    whole, killed = (
        [args.recipe, *overrides, f"run.name=soak-{name}", "--no-eval", "--processes", str(args.processes)]
        for name in ("whole", "killed")
    )
    folders = [resolve(call[0], [x for x in call[1:] if "=" in x]).folder for call in (whole, killed)]
    for folder in folders:
        if folder.exists():
            raise ConfigError(f"{folder}: soak needs a new folder; delete this one, or choose another run.root")

    started = time.perf_counter()
    first = Life(whole, folders[0])
    startup = first.wait_for_step()
    first.finish()
    dice, kills = random.Random(args.seed), []
    for _ in progress(range(args.kills), desc="kills", unit="kill"):
        life = Life([*killed, f"data.workers={dice.choice((0, 2, 3))}"], folders[1])
        kills.append(life.kill_in_save(dice) if dice.random() < 0.5 else life.kill_within(startup + TRAINING, dice))
    Life(killed, folders[1]).finish()
    problems = compare(*folders)
    text = report(args, overrides, kills, problems, time.perf_counter() - started)
    print(text)
    if args.report:
        save_text(Path(args.report), text + "\n")
    return 1 if problems else 0


class Life:
    """A process (group) that trains until it is killed or has finished."""

    def __init__(self, call: list[str], folder: Path) -> None:
        self.process, self.folder, self.started = start_command("train", *call), folder, time.perf_counter()

    def finish(self) -> None:
        out, _ = self.process.communicate()
        if self.process.returncode:
            raise ConfigError(f"{self.folder}: training failed with code {self.process.returncode}: {out[-2000:]}")

    def wait_for_step(self) -> float:
        """Wait for the first line of metrics, and return the seconds since the start."""
        metrics = self.folder / "metrics.jsonl"
        while self.process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        return time.perf_counter() - self.started

    def kill_within(self, seconds: float, dice: random.Random) -> dict[str, Any]:
        time.sleep(dice.uniform(0, seconds))
        return self.kill("at any time")

    def kill_in_save(self, dice: random.Random) -> dict[str, Any]:
        """Kill the process while the hidden folder of a checkpoint exists, after a random number of checkpoints."""
        skip, seen = dice.randrange(8), set()
        while self.process.poll() is None:
            names = [n for n in names_in(self.folder / FOLDER) if n.startswith(".")]
            seen.update(names)
            if names and len(seen) > skip:
                time.sleep(dice.uniform(0, 0.004))
                return self.kill("in a save")
        return self.kill("in a save")

    def kill(self, when: str) -> dict[str, Any]:
        ended = self.process.poll() is not None
        if not ended:
            kill_tree(self.process)
        left = names_in(self.folder / FOLDER)
        steps = [int(n.partition("-")[2]) for n in left if n.startswith("last-")]
        scratch = any(n.startswith(".") for n in left)
        return {"when": "after the end" if ended else when, "step": max(steps, default=0), "scratch": scratch}


def names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def compare(whole: Path, killed: Path) -> list[str]:
    """Return the differences between an uninterrupted and a killed run at their ends; there should be none."""
    problems = []
    for kind in ("last", "best"):
        a, b = (newest(folder, kind) for folder in (whole, killed))
        if a is None or b is None or a.step != b.step:
            problems.append(f"{kind}: step {a and a.step} and {b and b.step}")
            continue
        problems += [f"{kind}: {name}" for name in differing(load_state(a.state), load_state(b.state))]
    a, b = (losses(folder) for folder in (whole, killed))
    problems += [] if a == b else [f"metrics.jsonl: {len(a)} and {len(b)} lines, or other losses"]
    return problems


def differing(a: Any, b: Any, name: str = "") -> list[str]:
    """Return the names of all leaves that are not equal, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [x for k in a for x in differing(a[k], b[k], f"{name}.{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [x for i in range(len(a)) for x in differing(a[i], b[i], f"{name}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [name]
    return [] if a == b else [name]


def losses(folder: Path) -> list[tuple]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(x["step"], x["kind"], x["loss"]) for x in lines]


def report(args: argparse.Namespace, overrides: list[str], kills: list[dict], problems: list[str], spent: float) -> str:
    moments = Counter(k["when"] for k in kills)
    steps = [k["step"] for k in kills]
    moved = sum(b > a for a, b in zip([0, *steps], steps))
    lines = [
        f"# {len(kills)} kills in one run",
        "",
        f"`./run.sh soak --recipe {args.recipe} {' '.join(args.overrides)} --kills {args.kills} --seed {args.seed}"
        f" --processes {args.processes}`: {spent / 60:.0f} min, torch {torch.__version__}, {' '.join(overrides)}",
        "",
        "| | |",
        "|---|---|",
        *(f"| killed {when} | {n} |" for when, n in sorted(moments.items())),
        f"| kills that left a half-written checkpoint (hidden, never read) | {sum(k['scratch'] for k in kills)} |",
        f"| lives that brought a new checkpoint | {moved} |",
        f"| step of the newest checkpoint after each kill | {', '.join(map(str, steps))} |",
        f"| result | {'equal, bit for bit' if not problems else 'DIFFERENT: ' + '; '.join(problems[:5])} |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
