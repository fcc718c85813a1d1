"""Helpers that train in this process, without the command."""

import json

import torch

from lion.trainer.loop import Trainer
from lion.trainer.plan import make_plan
from lion.trainer.runtime import seed_everything, start_runtime
from tools.compose import build_data, make_task, resolve


def trainer(recipe, folder, workers=0):
    splits = build_data(recipe)
    task = make_task(recipe, splits.info)
    seed_everything(recipe.seed)
    model = task.build_model(recipe.model)
    folder.mkdir(exist_ok=True)
    plan = make_plan(recipe, samples=len(splits.train), world=1)
    return Trainer(plan, task, model, splits, folder, start_runtime("cpu"), workers=workers)


def train(path, folder, *overrides, stop_at=None, workers=0):
    """Train in this process; `stop_at` asks the run to stop after that step, as a signal does."""
    t = trainer(resolve(path, overrides), folder, workers)
    if stop_at is not None:
        step = t.train_step

        def train_step(*args):
            t.stopping = t.state.step + 1 >= stop_at
            return step(*args)

        t.train_step = train_step
    t.fit()
    return t


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
