"""Fine-tune a masked language model on the tasks of GLUE, with the settings of the paper's Table 8 or other settings.

    ./run.sh glue RUN --recipe bert24|m2_base|m2_large|hydra|modified|cramming|lightnet [data.path=FOLDER]
        [key=value ...] [--tasks rte,mrpc] [--seeds N] [--no-mnli] [--cited] [--jobs N] [--name NAME] [--dry-run]

Every task, seed and learning rate is a separate run in RUN/glue/NAME/TASK_seedN. Finished runs are not repeated;
stopped runs are resumed. The table of results is written next to them, as results.json and results.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.text.glue import TASKS
from data.text.sequences import Sequences
from lion.config import ConfigError
from lion.tasks import Task
from lion.trainer.optim import OptimConfig
from tools import options
from tools.checks import check_settings
from tools.cli import say
from tools.compose import build_data, runtime_of
from tools.cost import EagerStep
from tools.glue.plan import SEEDS, Cell, Job, Pretrained, make_jobs, read_pretrained, read_table
from tools.glue.results import read as read_result
from tools.glue.results import summarise
from tools.jobs import at_once, work
from tools.tables import digits
from tools.tables import table as as_text

MEASURED = 8  # samples of a step that a dry run times


def main(argv: list[str]) -> int:
    args = options.read("glue", argv)
    if args.seeds and args.seeds > len(SEEDS):
        raise ConfigError(f"--seeds: {args.seeds}, only {len(SEEDS)} are published: {', '.join(map(str, SEEDS))}")
    table = read_table(args.recipe, args.cited)
    table.from_mnli &= not args.no_mnli
    pretrained = read_pretrained(args.run, args.tokenizer)
    name = args.name or Path(args.recipe).stem
    if args.cited and not args.name:
        name += "_cited"
    jobs = make_jobs(pretrained, table, name=name, tasks=args.tasks, seeds=args.seeds, overrides=args.overrides)
    last = {job.task: job for job in jobs}
    held = {task: read(job, pretrained) for task, job in last.items()}
    print(plan(jobs, held))
    if args.dry_run:
        print(cost(jobs, held))
        return 0
    steps = {job.name: held[job.task].steps for job in jobs}
    code = work(jobs, steps, args.jobs or at_once(), title="glue", result=score_text)
    if code != 130:
        print(summarise(pretrained.folder / "glue" / name, pretrained.recipe, name, table))
    return code


def score_text(job: Job) -> str:
    return f"{read_result(job.folder)['score']:.2f}"


class TaskData(NamedTuple):
    """Data of a task and their size.

    Attributes:
        steps: Number of steps.
        tokens: Mean number of tokens of a batch, including padding.
        train: The training data.
        made: The task, which builds models.
    """

    steps: int
    tokens: float
    train: Sequences
    made: Task


def read(job: Job, pretrained: Pretrained) -> TaskData:
    """Read all data of a task, so that errors are reported before hours of training.

    Raises:
        ConfigError: The data cannot be used, or settings contradict each other or the data.
    """
    say(f"reading {job.task}")
    recipe = job.recipe
    splits = build_data(recipe)
    splits.info.check_transfer(f"init_from: {pretrained.folder}", pretrained.info.to_dict())
    plan, task = check_settings(recipe, splits.info, len(splits.train), 1, room=True)
    lengths = np.random.default_rng(0).permutation(np.diff(splits.train.ends, prepend=0))
    longest = lengths[: plan.steps_per_epoch * recipe.trainer.batch_size].reshape(-1, plan.micro).max(1)
    padded = [splits.train.padding.to(int(length)) for length in longest]
    tokens = plan.micro * plan.accumulation * statistics.mean(padded)
    return TaskData(plan.total, tokens, splits.train, task)


def plan(jobs: Sequence[Job], held: Mapping[str, TaskData]) -> str:
    """Return a table of the runs to train: settings, start, and seeds of each task."""
    rows = []
    notes = []
    for task, data in held.items():
        own = [job for job in jobs if job.task == task]
        rows.append(planned(own, data))
        cited = own[0].cell.cited
        if cited:
            said = ", ".join(f"{key} {value}" for key, value in cited.items())
            notes.append(f"{task}: values of Table 8; the file that it cites has {said} (--cited)")
    return "\n".join([as_text(PLAN, rows), *notes])


PLAN = [
    "task",
    "start",
    "lr",
    "weight decay, Table 8",
    "of AdamW",
    "epochs",
    "batch",
    "length",
    "steps",
    "samples",
    "published",
    "seeds",
]


def planned(jobs: Sequence[Job], data: TaskData) -> list[str]:
    """Return the cells of a task in the plan, in the order of `PLAN`, from its runs and its data."""
    task, recipe = jobs[0].task, jobs[0].recipe
    batch = recipe.trainer.batch_size
    samples = len(data.train)
    starts = dict.fromkeys(Path(job.recipe.init_from).name for job in jobs)
    rates = dict.fromkeys(f"{job.recipe.optim.lr:g}" for job in jobs)
    return [
        task,
        ", ".join(starts),
        ", ".join(rates),
        decay(recipe.optim, jobs[0].cell),
        f"{recipe.optim.weight_decay:g}",
        f"{data.steps * batch / samples:.1f}",
        str(batch),
        str(recipe.data.length),
        f"{data.steps:,}",
        f"{samples:,}",
        f"{TASKS[task].samples:,}",
        seeds(jobs),
    ]


def seeds(jobs: Sequence[Job]) -> str:
    """Return the seeds of the runs of a task, each with the number of runs that are done."""
    finished: dict[int, list[bool]] = {}
    for job in jobs:
        finished.setdefault(job.seed, []).append(job.finished)
    words = []
    for seed, done in finished.items():
        word = str(seed)
        if all(done):
            word += " (done)"
        elif any(done):
            word += f" ({sum(done)} of {len(done)} done)"
        words.append(word)
    return ", ".join(words)


def decay(optim: OptimConfig, cell: Cell) -> str:
    """Return the weight decay in the convention of Table 8."""
    if cell.optimizer == "adamw":
        return f"{optim.weight_decay:g} (AdamW)"
    return f"{optim.weight_decay * optim.lr:g}"


def cost(jobs: Sequence[Job], held: Mapping[str, TaskData]) -> str:
    """Describe the cost of all unfinished runs: tokens, and hours estimated from steps that are timed now."""
    left = [job for job in jobs if not job.finished]
    if not left:
        return "all runs are finished"
    token, update = measure(left[0], held[left[0].task])
    steps = tokens = full = 0.0
    for job in left:
        data = held[job.task]
        steps += data.steps
        tokens += data.steps * data.tokens
        full += data.steps * job.recipe.trainer.batch_size * job.recipe.data.length
    hours = (tokens * token + steps * update) / 3600
    return (
        f"{len(left)} runs, {tokens / 1e6:,.1f} M tokens in batches padded to their longest row "
        f"({full / 1e6:,.1f} M at full length); about {digits(hours)} h one after the other, without "
        f"evaluation: {digits(1e6 * token)} us per token and {digits(1e3 * update)} ms per update, measured here, eager"
    )


def measure(job: Job, held: TaskData) -> tuple[float, float]:
    """Return the seconds of the forward and backward pass per token, and of an update of the weights."""
    recipe = job.recipe
    runtime = runtime_of(recipe)
    batch = held.train.batch(list(range(min(MEASURED, len(held.train)))), "cpu")
    step = EagerStep(held.made, recipe, runtime, recipe.trainer.precision)
    return step.passes(batch) / batch["tokens"].numel(), step.update()
