"""Training command: train a recipe, evaluate its best checkpoint in every form, and print the summary.

./run.sh recipes/NAME.yaml [key=value ...] [--fresh] [--no-eval] [--processes N] [--nodes N --head HOST]
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from data.base import DataSet
from lion.config import ConfigError, flatten, to_dict
from lion.evaluation.run import evaluate_run
from lion.files import keep_aside, read_json, save_json, save_text
from lion.models.base import Model
from lion.recipe import Recipe, differences, dump_recipe, free_keys, load_recipe
from lion.recipe_files import RECIPE, SUMMARY
from lion.runs import (
    ENVIRONMENT,
    LoadedRun,
    check_unlocked,
    count_parameters,
    init_from,
    lock_run,
    open_run,
    read_run,
    stored_recipe,
)
from lion.samples.base import Splits
from lion.samples.seeds import derive
from lion.tasks import Task
from lion.tasks.base import to_device
from lion.trainer.checkpoint_files import FOLDER, steps_of
from lion.trainer.compilation import prepare_compiler
from lion.trainer.evaluate import evaluating
from lion.trainer.loader import Loading, eval_batches
from lion.trainer.log import write_results
from lion.trainer.loop import Trainer
from lion.trainer.plan import Plan
from lion.trainer.runtime import (
    Runtime,
    check_device,
    environment,
    from_launcher,
    gathered,
    join_processes,
    random_state,
    restore_random_state,
    seed_everything,
    slow_precision,
    start_runtime,
    together,
)
from lion.trainer.state import RunState
from tools import evaluate, options
from tools.agreement import check_agreement, check_data_agreement
from tools.checks import check_checkpoint, check_form, check_settings
from tools.cli import run_command, say
from tools.commands import as_called
from tools.compose import (
    build_data,
    describe_length,
    describe_warmup,
    doubts,
    hint_of_tokenizer,
    loader_workers,
    metric_of,
    needs_preparing,
    open_data,
    process_count,
    resolve,
)
from tools.launch import Machines, launch
from tools.listing import recipe_path
from tools.processes import first_line

SHOWN = 8  # names of classes in the first lines of a run
SHARED = ("metric", "split", "best_step", "remark")  # keys that all forms of a run share


def main(argv: list[str]) -> int:
    args = options.read("train", argv)
    if args.eager:
        args.overrides.append("trainer.compile=false")
    launched = "RANK" in os.environ
    first = from_launcher("RANK", 0) == 0
    if args.fresh and (args.restarts or from_launcher("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise ConfigError("--fresh: every restart would start anew, give the run another name with run.name=NAME")
    if launched:
        join_processes()

    def begin() -> tuple[Recipe, int]:
        """Return the recipe and the number of processes."""
        recipe = resolve(args.recipe, args.overrides)
        check_place(args.recipe, args.overrides, recipe)
        if first and (launched or args.nodes == 1):  # a machine may come back while others train
            check_unlocked(recipe.folder)
        if first and not args.fresh:
            check_same_recipe(recipe)
        world = from_launcher("WORLD_SIZE", 0)
        world = world or args.nodes * (args.processes or process_count(recipe, machines=args.nodes))
        if launched or recipe.trainer.device != "auto":
            check_device(recipe.trainer.device, world)
        return recipe, world

    recipe, world = together(begin)
    if launched:
        together(partial(check_agreement, recipe))
    if not args.fresh and gathered(is_complete(recipe.folder))[0]:
        if first:
            show_complete(recipe)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0
    if (world > 1 or args.restarts) and not launched:  # the launched processes check everything else
        return launch(Machines(world // args.nodes, args.nodes, args.head, args.restarts), argv)
    form = None if args.no_eval else args.form
    begun = recipe.folder
    if args.fresh:
        begun = None
    made_by = command_of(args.recipe, args.overrides, recipe, begun)
    return train(recipe, world, fresh=args.fresh, form=form, first=first, made_by=made_by)


def seed_of(rank: int, seed: int) -> int:
    """Return the seed of a process; the first has that of the run, and no process that of another run."""
    if rank == 0:
        return seed
    return derive(seed, "training", rank)


def command_of(path: str, overrides: list[str], recipe: Recipe, begun: Path | None) -> str:
    """Return the command that makes this run on any machine, without the folders of this machine.

    Args:
        path, overrides, recipe: The recipe of the run, as typed and resolved.
        begun: Folder in which the run may have been started; the command stored there comes first.
    """
    if begun is not None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return str(read_json(begun / ENVIRONMENT)["command"])
    file = Path(path)
    name = file.stem
    if file.name == RECIPE:
        name = f"{file.parent.name}/{RECIPE}"
    words = ["./run.sh", name]
    for item in overrides:
        words.append(without_folders(item, recipe))
    return shlex.join(words)


def without_folders(item: str, recipe: Recipe) -> str:
    """Remove folders of this machine from an override: `data.path=FOLDER/book.txt` becomes `data.path=book.txt`."""
    key, _, value = item.partition("=")
    if key not in free_keys(recipe) or "/" not in value:
        return item
    return f"{key}={Path(value).name}"


def train_here(
    recipe: Recipe | str | Path,
    *,
    splits: Splits | None,
    model: Model | None,
    form: str | None,
    fresh: bool,
    overrides: dict[str, Any],
) -> LoadedRun:
    """Train a recipe for `lion.train`, which describes the arguments."""
    if splits is not None and not isinstance(splits, Splits):
        raise ConfigError(f"splits: expected a lion.samples.base.Splits, got {type(splits).__name__}")
    if model is not None and not isinstance(model, Model):
        raise ConfigError(f"model: expected a lion.models.base.Model, got {type(model).__name__}")
    recipe = recipe_of(recipe, overrides, own_data=splits is not None)
    if recipe.trainer.device != "auto":
        check_device(recipe.trainer.device, 1)
    check_unlocked(recipe.folder)
    if not fresh:
        check_same_recipe(recipe)
    if splits is not None:
        splits = with_fingerprint(splits)
    with messages_shown():
        code = train(recipe, 1, fresh=fresh, form=form, first=True, made_by="lion.train", splits=splits, model=model)
    if code:
        raise KeyboardInterrupt(f"training stopped, its state is saved in {recipe.folder}; the same call resumes")
    return trained_run(recipe.folder, model)


def with_fingerprint(splits: Splits) -> Splits:
    """Return data with a fingerprint, by default the numbers of samples: a run refuses to resume on other data."""
    if splits.fingerprint is not None:
        return splits
    counts = [f"{len(splits.train)} training samples", f"{len(splits.val)} for validation"]
    return splits._replace(fingerprint=", ".join(counts))


@contextlib.contextmanager
def messages_shown() -> Iterator[None]:
    """Show the messages of training, as the command does, unless the program has set the level of this package."""
    log = logging.getLogger("lion")
    if log.level != logging.NOTSET or log.isEnabledFor(logging.INFO):
        yield
        return
    handler = logging.StreamHandler()
    added = not log.hasHandlers()
    log.setLevel(logging.INFO)
    if added:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def check_own(task: Task, name: str, model: Model, splits: Splits) -> None:
    """Check that a task can read the first samples of a caller's data with a model.

    Raises:
        ConfigError: A split has no samples, or the loss of its first samples cannot be computed.
    """
    device = next(model.parameters()).device
    for split, data in (("train", splits.train), ("val", splits.val)):
        if not len(data):
            raise ConfigError(f"splits.{split}: no samples")
        first = range(min(2, len(data)))
        kept = random_state()
        try:
            for batch in eval_batches(data, Loading(splits.collate), seed=0, split=split, batch=2, chosen=first):
                with evaluating(model):
                    task.loss(model, to_device(batch, device))
        except Exception as error:  # a data set can raise any exception
            about = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(
                f"splits.{split}: the loss of its first samples cannot be computed ({about}); task {name!r} "
                f"reads batches of {', '.join(task.example(1, 'cpu'))}"
            ) from error
        finally:
            restore_random_state(kept)


def recipe_of(recipe: Recipe | str | Path, overrides: dict[str, Any], *, own_data: bool) -> Recipe:
    """Return a recipe with settings overridden section by section.

    With data of the caller, the section `data` stays a plain mapping.

    Raises:
        ConfigError: There is no such recipe, or a setting is invalid.
    """
    if not isinstance(recipe, (Recipe, str, Path)):
        raise ConfigError(f"recipe: expected a name, a file or a Recipe, got {type(recipe).__name__}")
    items = [f"{key}={json.dumps(value)}" for key, value in flatten(overrides).items()]
    if isinstance(recipe, Recipe):
        if not items:
            return recipe
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / RECIPE
            path.write_text(dump_recipe(recipe))
            return recipe_of(path, overrides, own_data=own_data)
    if own_data:
        return load_recipe(recipe_path(recipe), items)
    return resolve(recipe, items)


def trained_run(folder: Path, model: Model | None) -> LoadedRun:
    """Return a trained run; a model of the caller gets the best weights."""
    if model is None:
        return open_run(folder)
    recipe = load_recipe(folder / RECIPE)
    task, state = read_run(folder, recipe, "best")
    model.load_state_dict(state["model"])
    return LoadedRun(folder, recipe, task, model.cpu().eval(), {"step": state["step"]})


class OwnData(DataSet):
    """Data of the caller of `lion.train`."""

    def __init__(self, splits: Splits) -> None:
        self.splits = splits

    def build(self) -> Splits:
        return self.splits


def train(
    recipe: Recipe,
    world: int,
    *,
    fresh: bool,
    form: str | None,
    first: bool,
    made_by: str = "",
    splits: Splits | None = None,
    model: Model | None = None,
) -> int:
    """Train in this process, one of `world` processes; the first one also writes the run folder and evaluates.

    Args:
        recipe: The resolved recipe.
        world: Number of processes.
        fresh: Whether to rename the folder of an earlier run, and start anew.
        form: Form of the final evaluation, "all", or None for no evaluation.
        first: Whether this is the process of rank 0.
        made_by: The command, stored in `environment.json` of the run.
        splits, model: Data and model of the caller, in place of those of the recipe.

    Returns:
        The exit code: 0, or 130 if training was stopped before its end.
    """
    if recipe.trainer.compile and not torch.cuda.is_available():
        prepare_compiler()
    own_splits, own_model = splits, model
    source, splits, plan, task, model = together(
        partial(prepare, recipe, world, fresh=fresh, first=first, splits=own_splits, model=own_model)
    )
    together(partial(check_data_agreement, splits))
    together(partial(check_form, model, form))
    runtime = start_runtime(
        recipe.trainer.device,
        deterministic=recipe.trainer.deterministic,
        matmul=recipe.trainer.matmul,
        sequence=recipe.trainer.sharing(world),
    )
    teacher = getattr(task, "teacher", None)
    if isinstance(teacher, nn.Module):
        teacher.to(runtime.device)

    def claim() -> IO[str] | None:
        """Lock the folder of the run; by now every process has passed all checks."""
        if not runtime.main:
            return None
        if fresh and recipe.folder.exists():
            with contextlib.closing(lock_run(recipe.folder)):  # another process may have begun to train there
                set_aside(recipe.folder)
        start_folder(recipe.folder)
        return lock_run(recipe.folder)

    lock = together(claim)
    if runtime.main:
        print(
            f"{recipe.run.name}: {recipe.model.mixer}, {count_parameters(model):,} parameters, {runtime.device}"
            f"{processes_text(recipe, world)}\n"
            f"{len(splits.train):,} training {task.unit}, {describe_length(plan)}, batches of "
            f"{recipe.trainer.batches()} = {runtime.batch_world} x {plan.accumulation} x {plan.micro}, "
            f"{plan.steps_per_epoch} steps an epoch, {describe_warmup(plan)}"
        )
        chosen = source.chosen()
        if chosen:
            print(chosen)
        classes = getattr(splits.info, "classes", ())
        if classes:
            print(describe_classes(classes))
        hint = slow_precision(recipe.trainer.precision, runtime.device)
        if hint:
            say(hint)
    seed_everything(seed_of(runtime.batch_rank, recipe.seed))
    workers = 0
    if own_splits is None:
        workers = loader_workers(recipe)
    trainer = Trainer(plan, task, model, splits, recipe.folder, runtime, workers=workers)

    def describe(state: RunState) -> None:
        """Store recipe and environment, now that all checks have passed, and warn of doubts about a new run.

        A complete run has them already.
        """
        if runtime.main and not state.finished:
            describe_folder(recipe, made_by, runtime.device)
            source.keep(recipe.folder)
        if runtime.main and not state.step:
            for doubt in doubts(recipe, plan):
                say(f"warning: {doubt}")

    complete = trainer.fit(describe)
    place = trainer.state.progress_text()
    if not complete and runtime.main:
        print(f"stopped at {place}; the same command resumes from there")
    del trainer, model
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    evaluates = complete and form is not None
    if evaluates and runtime.part is not None:  # one process may have no memory for whole rows
        dist.barrier()  # the best checkpoint is written
        summarise(recipe.folder, form, runtime)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if evaluates and runtime.main:
        if own_splits is not None:
            run = trained_run(recipe.folder, own_model)
            write_summary(recipe.folder, evaluate_run(run, own_splits, form, runtime=Runtime(runtime.device)))
        elif runtime.part is None:
            summarise(recipe.folder, form, Runtime(runtime.device))
        print_summary(recipe)
    if lock is not None:
        lock.close()
    if complete:
        return 0
    return 130


def prepare(
    recipe: Recipe,
    world: int,
    *,
    fresh: bool,
    first: bool,
    splits: Splits | None = None,
    model: Model | None = None,
) -> tuple[DataSet, Splits, Plan, Task, Model]:
    """Return data set, splits, plan, task and model of a run, after all checks that one process can make alone.

    `splits` and `model` of the caller take the place of those of the recipe.

    Raises:
        ConfigError: The recipe does not fit the data, the processes, the disk or the folder of the run.
    """
    begun = None
    if not fresh and steps_of(recipe.folder, "last"):
        begun = recipe.folder
    own = splits is not None or model is not None
    source = open_data(recipe, begun) if splits is None else OwnData(splits)
    if needs_preparing(source):
        known = source.published()
        if known is not None:
            info, samples = known  # may be an estimate: whether a batch can be filled is checked after preparation
            samples = max(samples, recipe.trainer.batch_size)
            check_settings(recipe, info, samples, world, room=first)  # before hours of preparation
    if splits is None:
        splits = build_data(recipe, begun, cached=True)
    plan, task = check_settings(recipe, splits.info, len(splits.train), world, room=first, model=model)
    seed_everything(recipe.seed)
    if model is None:
        model = task.build_model(recipe.model)
    if own:
        check_own(task, recipe.task.name, model, splits)
    if recipe.init_from is not None and begun is None:  # otherwise, a checkpoint has the weights
        with hint_of_tokenizer(recipe.init_from):
            init_from(model, recipe.init_from, splits.info)
    if first and not fresh:
        check_checkpoint(recipe.folder, model, splits.info)
    return source, splits, plan, task, model


def describe_classes(classes: Sequence[str] | int) -> str:
    """Return the number of classes and the first names, as text for the beginning of a run."""
    if isinstance(classes, int):
        return f"{classes:,} classes"
    text = f"{len(classes):,} classes: {', '.join(classes[:SHOWN])}"
    if len(classes) > SHOWN:
        text += ", .."
    return text


def processes_text(recipe: Recipe, world: int) -> str:
    """Return how `world` processes share the work, as text for the first line of a run."""
    if world == 1:
        return ""
    count = recipe.trainer.sharing(world)
    if count == 1:
        return f" x {world} ({recipe.trainer.parallel})"
    return f" x {world} ({recipe.trainer.parallel}, {count} for each row)"


def set_aside(folder: Path) -> None:
    """Rename the folder of an earlier run to NAME.oldN; nothing is deleted."""
    print(f"the earlier run is kept as {keep_aside(folder)}")


def check_place(path: str, overrides: list[str], recipe: Recipe) -> None:
    """Check that the recipe in the folder of a run is that of this folder, unless `overrides` name another.

    Raises:
        ConfigError: The folder was renamed or moved: the run would be trained again in its old place.
    """
    folder = Path(path).parent
    moved = Path(path).name == RECIPE and (folder / FOLDER).is_dir() and folder.resolve() != recipe.folder.resolve()
    if moved and not any(item.startswith(("run.name=", "run.root=")) for item in overrides):
        now = f"run.root={folder.parent} run.name={folder.name}"
        raise ConfigError(f"{path}: the run was renamed or moved, it was {recipe.folder}; add {now}")


def check_same_recipe(recipe: Recipe) -> None:
    """Check that the folder of a run, if it exists, holds a run of this recipe.

    Raises:
        ConfigError: The folder holds a run of another recipe, or checkpoints without a recipe.
    """
    folder = recipe.folder
    if not (folder / RECIPE).exists():
        if steps_of(folder, "last"):
            raise ConfigError(
                f"{folder} holds checkpoints but no {RECIPE}: restore the file, or start anew with --fresh"
            )
        return
    other = differences(stored_recipe(folder), recipe)
    if other:
        why = ""
        if any(line.startswith(("trainer.steps:", "trainer.epochs:", "trainer.time:")) for line in other):
            why = " (the learning rate of every step depends on the length, so the steps taken so far cannot be reused)"
        raise ConfigError(
            f"{folder} holds a run of another recipe, differing in {'; '.join(other)}{why}. Give this run another name "
            "with run.name=NAME, or start anew with --fresh"
        )


def is_complete(folder: Path) -> bool:
    return (folder / RECIPE).exists() and (folder / SUMMARY).exists()


def show_complete(recipe: Recipe) -> None:
    """Print the summary of a complete run.

    Raises:
        ConfigError: The summary cannot be read.
    """
    folder = recipe.folder
    print(f"{folder} is complete, nothing to train; --fresh starts anew")
    try:
        print_summary(recipe)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder / SUMMARY}: not a summary ({type(error).__name__}); without it the same command evaluates again"
        ) from None


def start_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.root: cannot create {folder}: {error.strerror}") from None


def describe_folder(recipe: Recipe, made_by: str, device: torch.device) -> None:
    save_text(recipe.folder / RECIPE, dump_recipe(recipe))
    save_json(recipe.folder / ENVIRONMENT, environment(device) | {"command": made_by})


def summarise(folder: Path, form: str, runtime: Runtime) -> None:
    """Evaluate the best checkpoint in one form or in all forms; the first process writes `summary.json`."""
    results = evaluate.measure_forms(folder, form, runtime=runtime)
    if runtime.main:
        write_summary(folder, results)


def write_summary(folder: Path, results: list[dict[str, Any]]) -> None:
    """Write the results of a run in all forms as `summary.json`, and for TensorBoard."""
    first = results[0]
    forms: dict[str, dict[str, Any]] = {}
    for result in results:
        name = result["form"]
        if name in forms:
            name = f"{name}_{result['chunk_size']}"
        forms[name] = {key: value for key, value in result.items() if key not in ("form", *SHARED)}
    summary = {key: first[key] for key in ("value", *SHARED)}
    save_json(folder / SUMMARY, summary | {"forms": forms})
    settings = {}
    for key, value in flatten(to_dict(load_recipe(folder / RECIPE))).items():
        if not key.startswith(("about.", "run.")):
            settings[key] = value
    write_results(folder, first["best_step"], (first["split"], first["metric"], first["value"]), settings)


def print_summary(recipe: Recipe) -> None:
    folder = recipe.folder
    metric = metric_of(recipe)
    summary = read_json(folder / SUMMARY)
    rows = [row | {"form": name.split("_")[0]} for name, row in summary["forms"].items()]
    print(f"\n{evaluate.as_table(rows, metric)}\n")
    value = f"{summary['split']} {metric.title} {metric.text(summary['value'])}"
    print(f"{value} (best on val at step {summary['best_step']})")
    if summary.get("remark"):
        print(summary["remark"])
    print(f"run folder   {folder}")
    print(as_called(f"curves       ./run.sh logs    (tensorboard --logdir {folder.parent})"))


if __name__ == "__main__":
    run_command(main)
