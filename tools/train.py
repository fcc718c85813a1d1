"""Train a recipe, evaluate its best checkpoint in every form, and print the summary.

python -m tools.train recipes/NAME.yaml [key=value ...] [--fresh]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lion.config import ConfigError
from lion.recipe import Recipe, differences, dump_recipe, make_plan
from lion.runs import ENVIRONMENT, RECIPE, SUMMARY, count_parameters, init_from, stored_recipe
from lion.trainer.checkpoint import save_json, save_text
from lion.trainer.loop import Splits, Trainer
from lion.trainer.runtime import environment, seed_everything, start_runtime
from tools import evaluate
from tools.common import build_data, loader_workers, make_task, process_count, resolve, run_command


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run.sh", description="Train a recipe and evaluate it in every form.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--fresh", action="store_true", help="set an earlier run of this name aside and start anew")
    args = parser.parse_intermixed_args(argv)

    recipe = resolve(args.recipe, args.overrides)
    launched = "RANK" in os.environ  # by torchrun, below
    if not launched and not args.fresh and finished(recipe):
        return 0
    world = int(os.environ.get("WORLD_SIZE", 0)) or process_count(recipe)
    splits = build_data(recipe)
    plan = make_plan(recipe, samples=len(splits.train), world=world)
    task = make_task(recipe, splits.info)
    seed_everything(recipe.seed)
    model = task.build_model(recipe.model)
    if recipe.init_from is not None:
        init_from(model, recipe.init_from, splits.info)
    runtime = start_runtime(recipe.trainer.device) if launched or world == 1 else None
    if args.fresh:  # all that can be refused has been
        set_aside(recipe.folder)
    if runtime is None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", "tools.train"]
        os.execv(sys.executable, [sys.executable, *torchrun, args.recipe, *args.overrides])
    if runtime.main:
        start_folder(recipe)
        print(
            f"{recipe.run.name}: {recipe.model.mixer}, {count_parameters(model):,} parameters, {runtime.device}"
            f"{f' x {world}' if world > 1 else ''}\n"
            f"{len(splits.train):,} training {task.unit}, {plan.total:,} steps of {recipe.trainer.batch_size}"
            f" = {world} x {plan.accumulation} x {plan.micro}, {plan.steps_per_epoch} steps an epoch"
        )
    seed_everything(recipe.seed + runtime.rank)
    if world > 1:
        dist.barrier()
    repeats = getattr(recipe.data, "repeats", 1)
    loaded = Splits(splits.train, splits.val, loader_workers(recipe), repeats)
    trainer = Trainer(plan, task, model, loaded, recipe.folder, runtime)
    complete, step = trainer.fit(), trainer.step
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if not runtime.main:
        return 0
    if not complete:
        print(f"stopped at step {step} of {plan.total}; the same command goes on from there")
        return 130
    del trainer, model  # the forms are measured by processes of their own, on the same device
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    summarise(recipe.folder)
    print_summary(recipe.folder)
    return 0


def set_aside(folder: Path) -> None:
    """Rename an earlier run's folder; nothing is deleted."""
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    folder.rename(aside)
    print(f"the earlier run is kept as {aside}")


def finished(recipe: Recipe) -> bool:
    """Whether the run is complete (prints its summary); refuses a folder that belongs to another recipe."""
    folder = recipe.folder
    if not (folder / RECIPE).exists():
        return False
    changed = differences(stored_recipe(folder), recipe)
    if changed:
        raise ConfigError(
            f"{folder} holds a run of another recipe, differing in {'; '.join(changed)}. "
            f"Give this one a name with run.name=NAME, or start anew with --fresh"
        )
    if not (folder / SUMMARY).exists():
        return False
    print_summary(folder)
    return True


def start_folder(recipe: Recipe) -> None:
    try:
        recipe.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.root: cannot make {recipe.folder}: {error.strerror}") from None
    save_text(recipe.folder / RECIPE, dump_recipe(recipe))
    save_json(recipe.folder / ENVIRONMENT, environment())


def summarise(folder: Path) -> None:
    """Evaluate the best checkpoint in every form into `summary.json`."""
    results = evaluate.measure_forms(folder)
    first = results[0]
    forms = {}
    for result in results:
        name = result["form"] if result["form"] not in forms else f"{result['form']}_{result['chunk_size']}"
        forms[name] = {k: v for k, v in result.items() if k not in ("form", "metric", "split", "best_step")}
    summary = {k: first[k] for k in ("metric", "split", "value", "best_step")}
    save_json(folder / SUMMARY, {**summary, "forms": forms})


def print_summary(folder: Path) -> None:
    summary = json.loads((folder / SUMMARY).read_text())
    rows = [{**r, "form": name.split("_")[0]} for name, r in summary["forms"].items()]
    print(f"\n{evaluate.as_table(rows, summary)}\n")
    result = f"{summary['split']} {summary['metric']} {100 * summary['value']:.2f}%"
    print(f"{result} (best on val at step {summary['best_step']})")
    print(f"run folder   {folder}")
    print(f"curves       ./run.sh logs    (tensorboard --logdir {folder.parent})")


if __name__ == "__main__":
    run_command(main)
