"""Plan of the fine-tuning: the cells of Table 8 as recipes, with the start and the seeds of each task."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data.text.glue import TASKS
from data.text.tokenizers import FILES, Tokenizer, open_tokenizer
from lion.config import ConfigError, build, merge, nearest, setting, to_dict
from lion.files import save_text
from lion.recipe import Recipe, differences, load_recipe
from lion.recipe_files import RECIPE, find_run, read_layers
from lion.runs import read_run, stored_recipe
from lion.samples.text import TextInfo
from lion.tasks.masked_lm import MaskedLM
from tools.compose import check_tokenizer, open_data, resolve, resolve_run
from tools.jobs import Job as Run

TABLE_8 = Path(__file__).parent / "tables"
log = logging.getLogger("lion")
FROM_MNLI = ("rte", "mrpc", "stsb")  # tasks that start from the run of mnli, by the caption of Table 8
SEEDS = (19, 8364, 717, 10536, 90166)  # as in the YAML files of LION
OWN = (
    "seed",
    "init_from",
    "trainer.time",
    "data.name",
    "data.task",
    "data.tokenizer",
    "model.name",
    "model.mixer",
    "task.name",
)
PUBLISHED_SEEDS = {"mnli": 1, "qnli": 1, "qqp": 1, "rte": 5, "sst2": 3, "mrpc": 5, "cola": 4, "stsb": 5}


@dataclass
class Cell:
    """Settings of a task: a cell of Table 8.

    Composer's `decoupled_adamw` shrinks weights by `weight_decay` lr / peak in each step, `adamw` by `weight_decay` lr.

    Args:
        lr, weight_decay, epochs, optimizer: The values of the table.
        metrics: Metrics that replace those of the task.
        cited: Other values in the file that the table cites.
    """

    lr: float = setting(above=0)
    weight_decay: float = setting(min=0)
    epochs: int = setting(min=1)
    optimizer: str = setting("decoupled_adamw", choices=("decoupled_adamw", "adamw"))
    metrics: tuple[str, ...] = ()
    cited: dict = field(default_factory=dict)

    def torch_decay(self, peak: float) -> float:
        """Return the equivalent weight decay for PyTorch's AdamW with this peak learning rate."""
        if self.optimizer == "adamw":
            return self.weight_decay
        return self.weight_decay / peak


@dataclass
class Table:
    """A recipe for GLUE: a row of Table 8, or other settings for fine-tuning.

    Args:
        length: Length of the samples, in tokens.
        from_mnli: Whether rte, mrpc and stsb start from the run of mnli.
        rates: Learning rates with which each task is trained, instead of the rate of its cell; the best one counts.
        average: The average is over `tasks`, each counted once, or over `numbers`, of which mnli has two.
        settings: Overrides of the recipes `glue_*` for all tasks, by key.
        tasks: The cells by task.
    """

    length: int = setting(min=8)
    from_mnli: bool = True
    rates: tuple[float, ...] = ()
    average: str = setting("tasks", choices=("tasks", "numbers"))
    settings: dict = field(default_factory=dict)
    tasks: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rates and self.from_mnli:
            raise ValueError("rates: a recipe with rates has no single run of mnli to start from; set from_mnli: false")
        if any(rate <= 0 for rate in self.rates) or len(set(self.rates)) < len(self.rates):
            raise ValueError(f"rates: expected different learning rates above 0, got {list(self.rates)}")

    def own(self, task: str) -> list[str]:
        """Return the settings for a task, as overrides on the command line."""
        found = self.settings | {"data.length": self.length, "trainer.epochs": self.tasks[task].epochs}
        if self.tasks[task].metrics:
            found["task.metrics"] = self.tasks[task].metrics
        return as_overrides(found)


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings by key as overrides on the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def table_names() -> list[str]:
    """Return the names of the recipes for GLUE in `tools/glue/tables`."""
    return sorted(path.stem for path in TABLE_8.glob("*.yaml"))


def read_table(name: str, cited: bool = False) -> Table:
    """Read a recipe for GLUE, given by its name in `tools/glue/tables` or by a file of the same format.

    Args:
        name: The name or the file.
        cited: Whether to use the values of the files that Table 8 cites.

    Raises:
        ConfigError: There is no such recipe, or the file is invalid.
    """
    names = table_names()
    path = Path(name)
    if name in names:
        path = TABLE_8 / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"--recipe: unknown GLUE recipe {name!r}, {nearest(name, names)}")

    def source(key: str) -> str:
        return str(path)

    layers = [layer for _, layer in read_layers(path)]
    table = build(Table, functools.reduce(merge, layers), source=source)
    check_known(table.tasks, TASKS, f"{path}: tasks: unknown GLUE task")
    for task, cell in table.tasks.items():
        made = build(Cell, cell, source=source, key=f"tasks.{task}")
        other = build(Cell, cell | made.cited | {"cited": {}}, source=source, key=f"tasks.{task}.cited")
        table.tasks[task] = other if cited else made
    return table


def check_known(names: Iterable[str], known: Collection[str], text: str) -> None:
    """Check that all names are known.

    Raises:
        ConfigError: A name is not; the message begins with `text`.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"{text} {name!r}, {nearest(name, known)}")


@dataclass(frozen=True)
class Job(Run):
    """A run of the trainer: one task with one seed and one learning rate.

    `after` is the run of MNLI from which this run starts; None: it starts from the pre-training run.
    """

    task: str
    seed: int
    cell: Cell


class Pretrained(NamedTuple):
    """A run of masked language modelling, with the metadata of its text, and the folder of its tokenizer."""

    folder: Path
    recipe: Recipe
    info: TextInfo
    tokenizer: Path


def read_pretrained(run: str, tokenizer: str | None = None) -> Pretrained:
    """Read the run to start from, and store its tokenizer in its folder `glue/tokenizer`.

    Args:
        run: The run.
        tokenizer: Name or path of its tokenizer; by default the tokenizer of its data.

    Raises:
        ConfigError: The run is not one of a masked language model, or its tokenizer is missing or another one.
    """
    folder = find_run(run)
    recipe = load_recipe(folder / RECIPE)
    task, _ = read_run(folder, recipe, "best")
    if not isinstance(task, MaskedLM):
        raise ConfigError(f"{folder}: task {recipe.task.name!r}, GLUE needs a run of masked_lm")
    place = folder / "glue" / "tokenizer"
    there = min(place.glob(f"*/{FILES[0]}"), default=None)
    if there and tokenizer is None:
        kept = there.parent
        check_tokenizer(open_tokenizer(str(kept)), task.info, folder)
    else:
        opened = open_tokenizer(tokenizer) if tokenizer else own_tokenizer(folder)
        check_tokenizer(opened, task.info, folder)
        kept = place / opened.name.replace("/", "_")
        kept.mkdir(parents=True, exist_ok=True)
        save_text(kept / FILES[0], opened.inner.to_str())
    return Pretrained(folder, recipe, task.info, kept)


def own_tokenizer(folder: Path) -> Tokenizer:
    try:
        return open_data(resolve_run(folder), folder).tokenizer
    except ConfigError as error:
        raise ConfigError(f"{folder}: its tokenizer is missing, set it with --tokenizer ({error})") from None


def make_jobs(
    pretrained: Pretrained,
    table: Table,
    *,
    name: str,
    tasks: Sequence[str],
    seeds: int | None,
    overrides: Sequence[str] = (),
) -> list[Job]:
    """List all runs, those of MNLI first: each task with each seed and each learning rate of the table.

    Args:
        pretrained: The run to start from.
        table: The recipe for GLUE.
        name: Name of the folder of the runs.
        tasks: The tasks.
        seeds: Number of seeds of each task, or None for the published number.
        overrides: Settings for all tasks.

    Raises:
        ConfigError: A task is unknown, settings do not fit, or a run of MNLI is needed but neither there nor planned.
    """
    check_chosen(table, tasks, overrides)
    planner = Planner(pretrained, table, name, overrides)
    jobs: list[Job] = []
    for task in sorted(tasks, key=list(TASKS).index):
        for seed in SEEDS[: seeds or PUBLISHED_SEEDS[task]]:
            after = None
            if task in FROM_MNLI and table.from_mnli:
                after = planner.start(task, seed, jobs)
            for rate in table.rates or [None]:
                jobs.append(planner.job(task, seed, after, rate))
    for job in jobs:
        changed = changed_settings(job)
        if changed:
            said = "; ".join(changed)
            raise ConfigError(
                f"{job.folder} holds a run with other settings, {said}: --name NAME keeps these runs apart"
            )
    warn_of_changed_starts(jobs)
    return jobs


def check_chosen(table: Table, tasks: Sequence[str], overrides: Sequence[str]) -> None:
    """Check the tasks and overrides of a command.

    Raises:
        ConfigError: A task is unknown, or an override is set for each run.
    """
    for item in overrides:
        key = item.partition("=")[0]
        if key in OWN or key.startswith("run."):
            raise ConfigError(f"{key}: is set separately for each run; use --seeds, --no-mnli and --name")
        if key == "optim.lr" and table.rates:
            raise ConfigError(f"optim.lr: this recipe has {len(table.rates)} learning rates for each task")
    for task in tasks:
        if task not in table.tasks:
            raise ConfigError(f"--tasks: unknown task {task!r} of GLUE in this recipe, {nearest(task, table.tasks)}")


@dataclass(frozen=True)
class Planner:
    """Makes the runs of a recipe for GLUE, in the folder `glue/NAME` of the run to start from."""

    pretrained: Pretrained
    table: Table
    name: str
    overrides: Sequence[str]

    def start(self, task: str, seed: int, planned: Sequence[Job]) -> Job:
        """Return the run of MNLI from which a task starts, with its seed or the first one.

        Raises:
            ConfigError: There is no such run, and none is planned.
        """
        names = [job.name for job in planned]
        if "mnli" in self.table.tasks:
            for own in dict.fromkeys((seed, SEEDS[0])):
                job = self.job("mnli", own, None)
                if job.name in names or job.finished:
                    return job
        raise ConfigError(
            f"--tasks: {task} starts from the run of mnli (Table 8), which is missing: add mnli, or --no-mnli starts "
            f"it from {self.pretrained.folder}"
        )

    def job(self, task: str, seed: int, after: Job | None, rate: float | None = None) -> Job:
        """Return the run of a task that starts from the run `after`, or from the pre-training run."""
        recipe = f"glue_{task}"
        cell = self.table.tasks[task]
        shared = settings(self.pretrained, task) + self.table.own(task)
        shared.append(f"optim.lr={rate or cell.lr!r}")
        optim = resolve(recipe, [*shared, *self.overrides]).optim  # the decay per step does not depend on the rate
        shared.append(f"optim.weight_decay={cell.torch_decay(optim.lr)!r}")
        shared += self.overrides
        called = f"{task}_seed{seed}" if rate is None else f"{task}_lr{rate:g}_seed{seed}"
        start = self.pretrained.folder
        if after is not None:
            start = after.folder
        shared += [f"seed={seed}", f"run.name={called}"]
        shared += as_overrides({"run.root": str(self.pretrained.folder / "glue" / self.name), "init_from": str(start)})
        return Job((recipe, *shared), resolve(recipe, shared), after, task, seed, cell)


def warn_of_changed_starts(jobs: Sequence[Job]) -> None:
    """Warn of runs of MNLI from earlier calls that have other settings than this one."""
    folders = [job.folder for job in jobs]
    for start in {job.after.folder: job.after for job in jobs if job.after}.values():
        if start.folder in folders:
            continue
        changed = changed_settings(start)
        if changed:
            log.warning("%s, from which tasks start, has other settings: %s", start.folder, "; ".join(changed))


def settings(pretrained: Pretrained, task: str) -> list[str]:
    """Return the overrides that a task takes from the pre-training: the model, and how it is run.

    Attention dropout is switched off; precision stays float32 if the recipe of the task asks for float32.
    """
    model = to_dict(pretrained.recipe.model)
    model["name"] = "bert_classifier"
    model["attention"]["score_dropout"] = 0.0
    trainer = pretrained.recipe.trainer
    precision = resolve(f"glue_{task}").trainer.precision
    if precision != "fp32":
        precision = trainer.precision
    given = {
        "model": model,
        "data.tokenizer": str(pretrained.tokenizer),
        "trainer.precision": precision,
        "trainer.matmul": trainer.matmul,
        "trainer.compile": trainer.compile,
        "trainer.device": trainer.device,
    }
    return as_overrides(given)


def changed_settings(job: Job) -> list[str]:
    """Return the settings in which a job differs from the run in its folder; none if there is no run."""
    if not (job.folder / RECIPE).is_file():
        return []
    return differences(stored_recipe(job.folder), job.recipe)
