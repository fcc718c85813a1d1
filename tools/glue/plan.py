"""What is to be trained: the cells of Table 8 as recipes, each task with its start and its seeds."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data.text.glue import TASKS
from data.text.tokenizers import FILES, Tokenizer, open_tokenizer
from lion.config import ConfigError, build, merge, nearest, setting, to_dict
from lion.files import save_text
from lion.recipe import Recipe, differences, read_layers
from lion.runs import RECIPE, SUMMARY, find_run, read_run, stored_recipe
from lion.tasks.masked_lm import MaskedLM
from lion.tasks.text import TextInfo
from tools.compose import check_tokenizer, open_data, resolve, resolve_run
from tools.listing import recipe_path

TABLE_8 = Path(__file__).parent / "tables"
FROM_MNLI = ("rte", "mrpc", "stsb")  # by Table 8's caption
SEEDS = (19, 8364, 717, 10536, 90166)  # of LION's YAMLs
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
    """A cell of Table 8. Composer's `decoupled_adamw` shrinks weights by `weight_decay` lr / peak, `adamw` by
    `weight_decay` lr. `metrics`: in place of the task's. `cited`: what the file that the table is taken from has in
    place of some."""

    lr: float = setting(above=0)
    weight_decay: float = setting(min=0)
    epochs: int = setting(min=1)
    optimizer: str = setting("decoupled_adamw", choices=("decoupled_adamw", "adamw"))
    metrics: tuple[str, ...] = ()
    cited: dict = field(default_factory=dict)

    def torch_decay(self, peak: float) -> float:
        """The same for PyTorch's AdamW at a peak learning rate."""
        return self.weight_decay if self.optimizer == "adamw" else self.weight_decay / peak


@dataclass
class Table:
    """A row of Table 8, or another way to fine-tune: its cells by task.

    Args:
        length: Of the samples, in tokens.
        from_mnli: Whether rte, mrpc and stsb start from the run of mnli.
        rates: Learning rates that each task is trained with, in place of that of its cell; the best one counts.
        average: Of `tasks`, each once, or of `numbers`, of which mnli has two.
        settings: What all tasks have otherwise than the recipes `glue_*`, by key.
    """

    length: int = setting(min=8)
    from_mnli: bool = True
    rates: tuple[float, ...] = ()
    average: str = setting("tasks", choices=("tasks", "numbers"))
    settings: dict = field(default_factory=dict)
    tasks: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rates and self.from_mnli:
            raise ValueError("rates: of which of its runs of mnli should a task start? from_mnli: false")
        if any(rate <= 0 for rate in self.rates) or len(set(self.rates)) < len(self.rates):
            raise ValueError(f"rates: expected different learning rates above 0, got {list(self.rates)}")

    def own(self, task: str) -> list[str]:
        """Its settings for a task, as they would be typed."""
        found = {**self.settings, "data.length": self.length, "trainer.epochs": self.tasks[task].epochs}
        if self.tasks[task].metrics:
            found["task.metrics"] = self.tasks[task].metrics
        return [f"{key}={json.dumps(value)}" for key, value in found.items()]


def read_table(name: str, cited: bool = False) -> Table:
    """A row of Table 8 by its name, or of a file like those of `tools/glue/tables`.

    Raises:
        ConfigError: There is none, or it is no such file.
    """
    names = sorted(path.stem for path in TABLE_8.glob("*.yaml"))
    path = TABLE_8 / f"{name}.yaml" if name in names else Path(name)
    if not path.is_file():
        raise ConfigError(f"--recipe: {name!r} is no recipe for GLUE, {nearest(name, names, ', '.join(names))}")
    values, source = functools.reduce(merge, (layer for _, layer in read_layers(path))), lambda _: str(path)
    table = build(Table, values, source=source)
    for task, cell in table.tasks.items():
        if task not in TASKS:
            raise ConfigError(f"{path}: tasks: {task!r} is no task of GLUE, {nearest(task, TASKS)}")
        made = build(Cell, cell, source=source, key=f"tasks.{task}")
        other = build(Cell, {**cell, **made.cited, "cited": {}}, source=source, key=f"tasks.{task}.cited")
        table.tasks[task] = other if cited else made
    return table


class Job(NamedTuple):
    """A run of the trainer: one task with one seed, and one learning rate."""

    task: str
    seed: int
    cell: Cell
    argv: tuple[str, ...]  # what is trained, as it would be typed
    recipe: Recipe
    after: Job | None  # the run of MNLI that it starts from; None: that of the pre-training

    @property
    def name(self) -> str:
        return self.recipe.run.name

    @property
    def folder(self) -> Path:
        return self.recipe.folder

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).is_file()


class Pretrained(NamedTuple):
    """A run of masked language modelling, with what its checkpoint says of its text, and its tokenizer's files."""

    folder: Path
    recipe: Recipe
    info: TextInfo
    tokenizer: Path


def read_pretrained(run: str, tokenizer: str | None = None) -> Pretrained:
    """The run to start from. Its tokenizer is kept in its folder, `glue/tokenizer`; it is that of its data, or one that
    is named.

    Raises:
        ConfigError: It is no such run, or its tokenizer is not there.
    """
    folder = find_run(run)
    recipe, task, _ = read_run(folder, "best")
    if not isinstance(task, MaskedLM):
        raise ConfigError(f"{folder}: task {recipe.task.name!r}, GLUE starts from a run of masked_lm")
    place = folder / "glue" / "tokenizer"
    kept = next((path for path in sorted(place.glob("*")) if (path / FILES[0]).is_file()), None)
    if tokenizer is not None or kept is None:
        opened = open_tokenizer(tokenizer) if tokenizer else own_tokenizer(folder)
        check_tokenizer(opened, task.info, folder)
        kept = place / opened.name.replace("/", "_")
        kept.mkdir(parents=True, exist_ok=True)
        save_text(kept / FILES[0], opened.inner.to_str())
    else:
        check_tokenizer(open_tokenizer(str(kept)), task.info, folder)
    return Pretrained(folder, recipe, task.info, kept)


def own_tokenizer(folder: Path) -> Tokenizer:
    try:
        return open_data(resolve_run(folder), folder).tokenizer
    except ConfigError as error:
        raise ConfigError(f"{folder}: its tokenizer is not there, --tokenizer names it ({error})") from None


def make_jobs(
    pretrained: Pretrained,
    table: Table,
    *,
    name: str,
    tasks: Sequence[str],
    seeds: int | None,
    overrides: Sequence[str] = (),
) -> list[Job]:
    """All runs, MNLI's first; `seeds` of each task, or as many as published, with each rate of the table.

    Raises:
        ConfigError: A task that is none, settings that do not fit, or no run of MNLI, there or asked for.
    """
    for key in (item.partition("=")[0] for item in overrides):
        if key in OWN or key.startswith("run."):
            raise ConfigError(f"{key}: is set for each task; --seeds, --no-mnli and --name choose among them")
        if key == "optim.lr" and table.rates:
            raise ConfigError(f"optim.lr: this recipe has {len(table.rates)} learning rates for each task")
    for task in tasks:
        if task not in table.tasks:
            raise ConfigError(f"--tasks: {task!r} is no task of GLUE in this recipe, {nearest(task, table.tasks)}")
    jobs: list[Job] = []

    @functools.cache
    def mnli(seed: int) -> Job:
        return job("mnli", seed, None)

    def job(task: str, seed: int, after: Job | None, rate: float | None = None) -> Job:
        path, cell = recipe_path(f"glue_{task}"), table.tasks[task]
        shared = [*settings(pretrained, task), *table.own(task), f"optim.lr={rate or cell.lr!r}"]
        optim = resolve(path, [*shared, *overrides]).optim  # another rate is no other decay
        shared += [f"optim.weight_decay={cell.torch_decay(optim.lr)!r}", *overrides]
        shared += [f"seed={seed}", f"run.name={task}{f'_lr{rate:g}' if rate else ''}_seed{seed}"]
        shared += [f"run.root={json.dumps(str(pretrained.folder / 'glue' / name))}"]
        shared += [f"init_from={json.dumps(str(after.folder if after else pretrained.folder))}"]
        return Job(task, seed, cell, (f"glue_{task}", *shared), resolve(path, shared), after)

    for task in sorted(tasks, key=[*TASKS].index):
        for seed in SEEDS[: seeds or PUBLISHED_SEEDS[task]]:
            after = None
            if task in FROM_MNLI and table.from_mnli:
                starts = [mnli(s) for s in dict.fromkeys((seed, SEEDS[0]))] if "mnli" in table.tasks else []
                planned = [other.name for other in jobs]
                after = next((other for other in starts if other.name in planned or other.finished), None)
                if after is None:
                    raise ConfigError(
                        f"--tasks: {task} starts from the run of mnli (Table 8), and there is none yet: add mnli, or "
                        f"--no-mnli starts it from {pretrained.folder}"
                    )
            rates = table.rates or (None,)
            jobs += [mnli(seed)] if rates == (None,) and task == "mnli" else [job(task, seed, after, r) for r in rates]
    for each in jobs:
        check_earlier(each)
    return jobs


def settings(pretrained: Pretrained, task: str) -> list[str]:
    """What a task takes of the pre-training: what the model is and how it runs. Attention dropout is off, and precision
    stays float32 where the task wants it."""
    model, trainer = to_dict(pretrained.recipe.model), pretrained.recipe.trainer
    own = {"name": "bert_classifier", "attention": {**model["attention"], "score_dropout": 0.0}}
    given: dict[str, Any] = {
        "model": {**model, **own},
        "data.tokenizer": str(pretrained.tokenizer),
        "trainer.precision": "fp32" if in_float32(task) else trainer.precision,
        "trainer.matmul": trainer.matmul,
        "trainer.compile": trainer.compile,
        "trainer.device": trainer.device,
    }
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


@functools.cache
def in_float32(task: str) -> bool:
    """Whether its recipe says so."""
    return resolve(f"glue_{task}").trainer.precision == "fp32"


def check_earlier(job: Job) -> None:
    """Raises ConfigError: Its folder holds a run of other settings."""
    if (job.folder / RECIPE).is_file() and (changed := differences(stored_recipe(job.folder), job.recipe)):
        raise ConfigError(
            f"{job.folder} holds a run of other settings, {'; '.join(changed)}: --name NAME keeps these runs apart"
        )
