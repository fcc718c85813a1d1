"""Where data meets `lion`: recipes resolved against data sets, and how commands fail."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from torch import nn

import data
from data.common import DataSplits
from lion.config import ConfigError, nearest
from lion.layers.attention import set_form
from lion.recipe import Recipe, load_recipe
from lion.runs import RECIPE
from lion.tasks import TASKS, Task
from lion.trainer.config import Plan
from lion.trainer.faults import RunError, full_disk, refusal

PATIENCE = 10  # seconds in which a launcher ends the other processes of one that has failed
RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def resolve(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe with its `data` section checked by the data set that it names; a bare name is one of ours."""
    if (shipped := RECIPES / f"{Path(path).stem}.yaml").is_file() and str(path) in (shipped.stem, shipped.name):
        path = path if Path(path).exists() else shipped
    elif Path(path).name == str(path) and not os.path.lexists(path):
        names = [*shipped_recipes(), *(p.name for p in Path().glob("*.yaml"))]
        raise ConfigError(f"{path}: no such file, {nearest(str(path), names, './run.sh list prints the recipes')}")
    if Path(os.path.realpath(path)).parent == RECIPES / "base":
        name = Path(path).name
        raise ConfigError(f"{path}: what recipes share, not a recipe; run one that says 'extends: base/{name}'")
    return load_recipe(path, overrides, data_config=lambda name: data.module(name).Config)


def shipped_recipes() -> list[str]:
    """The bare names of our recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def resolve_run(folder: Path, overrides: Iterable[str] = ()) -> Recipe:
    """A run's recipe; what may be overridden is where its data are.

    Raises:
        ConfigError: An override of something else.
    """
    for item in overrides:
        if not item.startswith(("data.root=", "data.path=", "data.workers=")):
            raise ConfigError(
                f"{item!r}: a run keeps its recipe, only data.root, data.path and data.workers may be given"
            )
    return resolve(folder / RECIPE, overrides)


def build_data(recipe: Recipe, *, cached: bool = False) -> DataSplits:
    """The recipe's data; `data.cache` is for those who read it again and again."""
    config = recipe.data
    if not cached and getattr(config, "cache", None):
        config = replace(config, cache=None)
    return data.module(config.name).build(config)


def make_task(recipe: Recipe, info: Any) -> Task:
    return TASKS[recipe.task.name](recipe.task, info)


def describe_data(recipe: Recipe, *, look: bool = True) -> tuple[Any, int, str | None]:
    """(info, training samples, note) of a recipe's data; published figures where the files are absent.

    With `look=False` the published figures are enough, and no folder is walked.
    """
    published = getattr(data.module(recipe.data.name), "published", None)
    note = None
    if look or published is None:
        try:
            splits = build_data(recipe)
            return splits.info, len(splits.train), None
        except ConfigError as error:
            if published is None:
                raise
            note = str(error)
    return *published(recipe.data), note


def process_count(recipe: Recipe) -> int:
    """One process a visible GPU, as many as divide the batch; one where there is none."""
    if recipe.trainer.device not in ("auto", "cuda"):
        return 1
    visible = max(1, torch.cuda.device_count())
    return max(n for n in range(1, visible + 1) if recipe.trainer.batch_size % n == 0)


def describe_warmup(plan: Plan) -> str:
    more = ", and the run ends before: the peak is not reached" if plan.warmup >= plan.total else ""
    return f"{plan.warmup:,} steps of warm-up{more}"


def choose_form(model: nn.Module, form: str, chunk_size: int | None = None) -> None:
    """`set_form` for what a person typed."""
    try:
        set_form(model, form, chunk_size)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None


def loader_workers(recipe: Recipe) -> int:
    """`data.workers`, or what suits: none for data in memory, else a few; no more than there are cores."""
    asked = recipe.data.workers
    if asked is None:
        asked = getattr(data.module(recipe.data.name), "WORKERS", 4)
    return min(asked, os.cpu_count() or 1)


class Parser(argparse.ArgumentParser):
    """Refuses a command line as everything else is refused: in one line, with the nearest option."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        if settings.get("nargs") == "*":
            settings.setdefault("default", [])  # without one, argparse calls it required
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2]
        if unknown.startswith("-"):
            shown = [a for a in self._actions if a.help != argparse.SUPPRESS]
            hint = nearest(unknown.split()[0].partition("=")[0], [o for a in shown for o in a.option_strings])
            message = f"unknown option {unknown}: {hint}"
        raise ConfigError(f"{self.prog}: {message.removeprefix('argument ')}")


def count(text: str) -> int:
    """An option's number, at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


class News:
    """Standard error: what cannot be written there (the disk is full, the reader gone) is dropped and stops nothing."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def stand_streams() -> None:
    """Standard streams that take whatever is printed, also where they were closed or know only ASCII."""
    for number in range(3):  # a closed one's number would go to the next file that is opened, and prints into it
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        setattr(sys, name, stream)
    if not isinstance(sys.stderr, News):
        sys.stderr = News(sys.stderr)


def run_command(main: Callable[[list[str]], int], argv: list[str] | None = None) -> None:
    """Run a command's `main` and exit: 2 with one line for bad input, 1 with one for a run that cannot go on or a
    system that refuses, 130 when interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug, launched = "--debug" in argv, "TORCHELASTIC_RUN_ID" in os.environ
    if debug:
        argv.remove("--debug")
    stand_streams()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lion").setLevel(logging.INFO)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns of nvcc without a GPU
    try:
        try:
            code = main(argv)
        except SystemExit as ended:  # by argparse's --help, or by a process that has said why
            code = ended.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        code = 141
    except Exception as error:  # printed here: a traceback kept for the interpreter's end keeps loader workers alive
        line, rank = one_line(error), os.environ.get("RANK")
        if launched and rank != "0":  # what all processes meet, the first says: the launcher ends the others here
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(PATIENCE)
        if line is None and rank is not None and any(word in str(error) for word in ("gloo", "NCCL", "TCPStore")):
            line = f"process {rank} has lost the others"
        if line is None or debug:
            traceback.print_exc()
        if line is not None:
            print(line, file=sys.stderr)
        wrong = isinstance(error, ConfigError) or getattr(error, "errno", None) == errno.ENAMETOOLONG
        code = 2 if wrong else 1
    try:
        sys.stdout.flush()
    except OSError:  # what could not be printed would fail again at the interpreter's end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # PyTorch may abort a launched process as it is taken down, its work done: it leaves without that
    if launched:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


def one_line(error: Exception) -> str | None:
    """What to say of an error that is no fault of the program; None where it is one."""
    if isinstance(error, (ConfigError, RunError)):
        return f"error: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"error: {refusal(error)}"
    return f"error: {str(error).splitlines()[0]}" if full_disk(error) else None


def table(header: list[str], rows: list[list[str]]) -> str:
    """A plain text table: first column left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])
