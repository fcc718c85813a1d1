"""Fine-tune a masked language model on the tasks of GLUE, with the settings of the paper's Table 8 or other settings.

    ./run.sh glue RUN --recipe bert24|m2_base|m2_large|hydra|modified|cramming|lightnet [data.path=FOLDER]
        [key=value ...] [--tasks rte,mrpc] [--seeds N] [--no-mnli] [--cited] [--jobs N] [--name NAME] [--dry-run]

Every task, seed and learning rate is a separate run in RUN/glue/NAME/TASK_seedN. Finished runs are not repeated;
stopped runs are resumed. The table of results is written next to them, as results.json and results.md.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.text.glue import TASKS
from data.text.sequences import Sequences
from lion.config import ConfigError
from lion.tasks import Task
from lion.trainer.optim import OptimConfig
from lion.trainer.runtime import start_runtime
from tools import options
from tools.checks import check_settings
from tools.cli import say
from tools.compose import build_data
from tools.cost import EagerStep
from tools.glue.plan import SEEDS, Cell, Job, Pretrained, make_jobs, read_pretrained, read_table
from tools.glue.results import read as read_result
from tools.glue.results import summarise
from tools.jobs import at_once, work
from tools.tables import digits
from tools.tables import table as columns

MEASURED = 8  # samples of a step that a dry run times


def main(argv: list[str]) -> int:
    args = options.glue(argv)
    if args.seeds and args.seeds > len(SEEDS):
        raise ConfigError(f"--seeds: {args.seeds}, only {len(SEEDS)} are published: {', '.join(map(str, SEEDS))}")
    table = read_table(args.recipe, args.cited)
    table.from_mnli &= not args.no_mnli
    pretrained = read_pretrained(args.run, args.tokenizer)
    name = args.name or Path(args.recipe).stem + ("_cited" if args.cited else "")
    chosen = {"tasks": args.tasks, "seeds": args.seeds, "overrides": args.overrides}
    jobs = make_jobs(pretrained, table, name=name, **chosen)
    held = {task: read(job, pretrained) for task, job in {job.task: job for job in jobs}.items()}
    print(plan(jobs, table.tasks, held))
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
        samples: Number of training samples.
        steps: Number of steps.
        tokens: Mean number of tokens of a batch, including padding.
        train: The training data.
        made: The task, which builds models.
    """

    samples: int
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
    splits, recipe = build_data(job.recipe), job.recipe
    splits.info.check_transfer(f"init_from: {pretrained.folder}", pretrained.info.to_dict())
    plan, task = check_settings(recipe, splits.info, len(splits.train), 1, room=True)
    lengths = np.random.default_rng(0).permutation(np.diff(splits.train.ends, prepend=0))
    rows = lengths[: plan.steps_per_epoch * recipe.trainer.batch_size].reshape(-1, plan.micro).max(1)
    tokens = plan.micro * plan.accumulation * statistics.mean(splits.train.padding.to(int(n)) for n in rows)
    return TaskData(len(splits.train), plan.total, tokens, splits.train, task)


def plan(jobs: Sequence[Job], cells: Mapping[str, Cell], held: Mapping[str, TaskData]) -> str:
    """Return a table of the runs to train: settings, start, and seeds of each task."""
    header = [
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
    rows = []
    for task, each in held.items():
        own = [job for job in jobs if job.task == task]
        recipe, cell = own[0].recipe, cells[task]
        starts = dict.fromkeys(Path(job.recipe.init_from).name for job in own)
        rows.append(
            [
                task,
                ", ".join(starts),
                ", ".join(dict.fromkeys(f"{job.recipe.optim.lr:g}" for job in own)),
                decay(recipe.optim, cell),
                f"{recipe.optim.weight_decay:g}",
                f"{each.steps * recipe.trainer.batch_size / each.samples:.1f}",
                str(recipe.trainer.batch_size),
                str(recipe.data.length),
                f"{each.steps:,}",
                f"{each.samples:,}",
                f"{TASKS[task].samples:,}",
                ", ".join(seeds(own)),
            ]
        )
    text = [columns(header, rows)]
    for task in held:
        if cells[task].cited:
            said = ", ".join(f"{key} {value}" for key, value in cells[task].cited.items())
            text.append(f"{task}: values of Table 8; the file that it cites has {said} (--cited)")
    return "\n".join(text)


def seeds(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield the seeds of the runs of a task, each with the number of runs that are done."""
    for seed, own in itertools.groupby(jobs, lambda job: job.seed):
        done = [job.finished for job in own]
        yield f"{seed}{' (done)' if all(done) else f' ({sum(done)} of {len(done)} done)' if any(done) else ''}"


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
    tokens = {job.name: held[job.task].steps * held[job.task].tokens for job in left}
    full = {job.name: held[job.task].steps * job.recipe.trainer.batch_size * job.recipe.data.length for job in left}
    hours = sum(tokens[job.name] * token + held[job.task].steps * update for job in left) / 3600
    return (
        f"{len(left)} runs, {sum(tokens.values()) / 1e6:,.1f} M tokens in batches padded to their longest row "
        f"({sum(full.values()) / 1e6:,.1f} M at full length); about {digits(hours)} h one after the other, without "
        f"evaluation: {digits(1e6 * token)} us per token and {digits(1e3 * update)} ms per update, measured here, eager"
    )


def measure(job: Job, held: TaskData) -> tuple[float, float]:
    """Return the seconds of the forward and backward pass per token, and of an update of the weights."""
    recipe = job.recipe
    runtime = start_runtime(recipe.trainer.device, matmul=recipe.trainer.matmul)
    batch = held.train.batch(list(range(min(MEASURED, held.samples))), "cpu")
    step = EagerStep(held.made, recipe, runtime, recipe.trainer.precision)
    return step.passes(batch) / batch["tokens"].numel(), step.update()
