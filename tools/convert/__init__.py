"""Make a run of a checkpoint of others: of the authors' vision code (LIONS-EPFL/LION), of DeiT, of timm.

    python -m tools convert CHECKPOINT RECIPE OUT [key=value ...] [--ema]

CHECKPOINT is a file of torch.save: the weights, or a training state that holds them. RECIPE and the overrides say what
the model is. OUT, a new folder, is then a run that eval, predict, `lion.load` and `init_from` take.

All that its shapes show is checked, and what the arguments of the training say, which some keep beside the weights.
What neither shows, the recipe must have right, and is named at the end. `model.preset` is `released` unless overridden:
what the authors' code does otherwise than their paper, its weights were trained with. `CONVERTERS` knows how the
checkpoints for a model of ours are written; what is special about each stands there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lion.config import ConfigError, flatten, to_dict
from lion.files import digest, save_json, save_text, sync
from lion.recipe import Recipe, dump_recipe
from lion.runs import ENVIRONMENT, RECIPE, build_on_meta, check_weights
from lion.trainer.checkpoint import STATE, load_state, scratch_folder, seal
from lion.trainer.runtime import environment
from tools.cli import Parser
from tools.compose import describe_data, make_task, metric_of, resolve
from tools.convert.base import Converter, Setting
from tools.convert.vit import ViTConverter

CONVERTERS: dict[str, type[Converter]] = {"vit": ViTConverter}  # by `model.name`


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh convert", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--ema", action="store_true", help="the averaged weights")
    args = parser.parse_intermixed_args(argv)
    if os.path.lexists(args.out):
        raise ConfigError(f"{args.out}: is there already, name a new folder")
    place = [f"run.root={json.dumps(str(args.out.parent))}", f"run.name={json.dumps(args.out.name)}"]
    recipe = resolve(args.recipe, ["model.preset=released", *args.overrides, *place])
    converter = converter_of(recipe)
    theirs, said = read_weights(args.checkpoint, args.ema)
    ours = converter.rename(theirs, args.checkpoint)
    info = describe_data(recipe, look=False)[0]
    settings = chain(converter.settings(theirs, recipe, info), converter.arguments(said, recipe))
    shown = compare(settings, theirs, recipe, args)
    info = converter.decide(ours, recipe, info)
    check_weights(build_on_meta(make_task(recipe, info), recipe.model), ours, str(args.checkpoint))
    source = {"file": str(args.checkpoint), "sha256": digest(args.checkpoint), "ema": args.ema}
    write_run(args.out, recipe, {"info": info.to_dict(), "model": ours, "ema": None}, source)
    parameters = f"{sum(w.numel() for w in ours.values()):,} parameters"
    print(f"{args.out}: {recipe.model.mixer}, {parameters}, {converter.describe(recipe, info)}")
    values = flatten(to_dict(dataclasses.replace(recipe, model=recipe.model.resolved())))
    trusted = [k if k.startswith("data.") else f"{k}={values[k]}" for k in converter.trusted if k not in shown]
    print(f"the file does not show, and the recipe was trusted with: {', '.join(trusted)}")
    return 0


def converter_of(recipe: Recipe) -> Converter:
    """Raises ConfigError: There is none for the recipe's model."""
    name = recipe.model.name
    if name not in CONVERTERS:
        raise ConfigError(f"model.name: checkpoints of others are known for {', '.join(CONVERTERS)}, not for {name!r}")
    return CONVERTERS[name]()


def read_weights(path: Path, ema: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Their tensors by name, of a file that holds just them or a training state, and the training's arguments.

    Raises:
        ConfigError: Not such a file, or a damaged one.
    """
    check_sums(path)
    with torch.serialization.safe_globals([argparse.Namespace]):  # DeiT saves its arguments beside the weights
        held = load_state(path)
    keys = ("model_ema", "state_dict_ema") if ema else ("model", "state_dict")
    weights = next((held[key] for key in keys if isinstance(held.get(key), dict)), None if ema else held)
    if weights is None:
        raise ConfigError(f"{path}: it holds no {keys[0]!r}, leave out --ema")
    said = held.get("args")
    plain = (re.sub(r"^(module\.)+", "", str(name).replace("_orig_mod.", "")) for name in weights)  # DDP, torch.compile
    return dict(zip(plain, weights.values())), vars(said) if isinstance(said, argparse.Namespace) else {}


def check_sums(path: Path) -> None:
    """Refuse a file of torch.save that is not what was written; before torch 1.6 there were no checksums to tell."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as file:
            written = any(entry.CRC for entry in file.infolist())  # torch can be told to write none
            bad = file.testzip() if written else None
    except Exception as error:  # whatever a damaged list of contents leads to
        bad = type(error).__name__
    if bad:
        raise ConfigError(f"{path}: damaged, its checksums do not fit ({bad}); get it anew")


def compare(
    settings: Iterable[Setting], theirs: dict[str, Tensor], recipe: Recipe, args: argparse.Namespace
) -> set[str]:
    """Refuse a recipe of another model than the checkpoint's, naming the setting to change; returns what it shows."""
    shown = set()
    for key, found, mine, seen in settings:
        shown.add(key)
        if found == mine:
            continue
        seen = f"{seen} is {tuple(theirs[seen].shape)}" if seen in theirs else seen
        there, here = (f"[{','.join(map(str, v))}]" if isinstance(v, tuple) else str(v) for v in (found, mine))
        hints = []
        for value in there.split(" or "):
            sibling = args.recipe.with_name(args.recipe.name.replace(f"{here}.", f"{value}."))
            hints.append(str(sibling) if sibling != args.recipe and sibling.exists() else f"{key}={value}")
        if key == "model.dim":  # heads of the same width: for some mixers no shape would show that they are others
            hints[0] += f" model.num_heads={found * recipe.model.num_heads // mine}"
        raise ConfigError(f"{args.checkpoint}: {seen}: {key} is {there}, not {here}; try {' or '.join(hints)}")
    return shown


def write_run(out: Path, recipe: Recipe, state: dict[str, Any], source: dict[str, Any]) -> None:
    """A run folder with a `best` checkpoint, put in place in one step."""
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        best = scratch_folder(scratch, "best", 0)
        with open(best / STATE, "wb") as file:
            torch.save({"step": 0, "best": {"value": metric_of(recipe).worst, "step": 0}, **state}, file)
        seal(best)
        save_text(scratch / RECIPE, dump_recipe(recipe))
        save_json(scratch / ENVIRONMENT, {**environment(), "converted": source})
        os.rename(scratch, out)
        sync(out.parent)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
