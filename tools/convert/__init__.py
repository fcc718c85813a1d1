"""Convert a checkpoint to a run: exported runs, BERT, GPT-2, nanoGPT, Hydra's BERT; DeiT, timm, Vim, LION's code.

    python -m tools convert CHECKPOINT RECIPE OUT [key=value ...] [--ema]

CHECKPOINT is a folder of transformers, a safetensors file, or a torch.save file with the weights or a training state.
RECIPE and the overrides determine the model and its data. OUT, a new folder, becomes a run for eval, predict, generate,
export, `lion.load` and `init_from`.

The recipe is checked against the shapes of the weights, and against metadata stored with the weights: the arguments of
the training, or a `config.json`. For language models, the recipe is adjusted to these metadata, and the run keeps the
tokenizer of the folder. Settings that the checkpoint does not show are taken from the recipe, and printed at the end.
`CONVERTERS` lists the converters by mixer or model; each one documents the details of its checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError, flatten, to_dict
from lion.files import save_json, save_text
from lion.recipe import Recipe, dump_recipe
from lion.recipe_files import RECIPE
from lion.runs import ENVIRONMENT, build_on_meta, check_weights
from lion.trainer.runtime import environment
from tools import options
from tools.compose import make_task, metric_of, resolve
from tools.convert.base import Converter, Setting
from tools.convert.bert import BertConverter
from tools.convert.files import CheckpointContents, read_checkpoint
from tools.convert.gpt import GPTConverter
from tools.convert.hub import KIND, HubConverter
from tools.convert.hydra import HydraConverter
from tools.convert.vim import VimConverter
from tools.convert.vit import ViTConverter
from tools.place import save_best, written

CONVERTERS: dict[str, type[Converter]] = {
    "bert": BertConverter,
    "gpt": GPTConverter,
    "hydra": HydraConverter,
    "vim": VimConverter,
    "vit": ViTConverter,
}  # by `model.mixer`, if the mixer has models of its own, and by `model.name`


def main(argv: list[str]) -> int:
    args = options.read("convert", argv)
    if os.path.lexists(args.out):
        raise ConfigError(f"{args.out}: exists already, choose a new folder")
    place = [f"run.root={json.dumps(str(args.out.parent))}", f"run.name={json.dumps(args.out.name)}"]
    recipe = resolve(args.recipe, args.overrides)
    held = read_checkpoint(args.checkpoint, args.ema)
    converter = HubConverter() if held.said.get("model_type") == KIND else converter_of(recipe)
    converter.check(recipe)
    ours = converter.rename(held)
    adopted = [f"{key}={json.dumps(value)}" for key, value in converter.adopted(held, ours, recipe).items()]
    recipe = resolve(args.recipe, adopted + args.overrides + place)
    info = converter.info(held, recipe)
    shown = compare(converter.settings(held, ours, recipe, info), held, recipe, args.recipe)
    info = converter.fit(held, ours, recipe, info)
    check_weights(build_on_meta(make_task(recipe, info), recipe.model), ours, str(args.checkpoint), str(args.recipe))
    source = {"from": str(args.checkpoint), "sha256": held.sums, "ema": args.ema}
    write_run(
        args.out, recipe, {"info": info.to_dict(), "model": ours, "ema": None}, source, converter.keep(held, recipe)
    )
    parameters = f"{sum(w.numel() for w in ours.values()):,} parameters"
    print(f"{args.out}: {recipe.model.mixer}, {parameters}, {converter.describe(held, recipe, info)}")
    values = flatten(to_dict(dataclasses.replace(recipe, model=recipe.model.resolved())))
    trusted = []
    for key in converter.trusted:
        if key in values and key not in shown:
            trusted.append(key if values[key] is None else f"{key}={values[key]}")
    if trusted:
        print(f"not shown by the checkpoint, taken from the recipe: {', '.join(trusted)}")
    return 0


def converter_of(recipe: Recipe) -> Converter:
    """Return the converter for the model of a recipe.

    Raises:
        ConfigError: There is no converter for this model.
    """
    name = recipe.model.mixer if recipe.model.mixer in CONVERTERS else recipe.model.name
    if name not in CONVERTERS:
        raise ConfigError(f"model.name: checkpoints can be converted for {', '.join(CONVERTERS)}, not for {name!r}")
    return CONVERTERS[name]()


def compare(settings: Iterable[Setting], held: CheckpointContents, recipe: Recipe, path: Path) -> set[str]:
    """Check a recipe against the settings that a checkpoint shows.

    Returns:
        The keys of these settings.

    Raises:
        ConfigError: A setting differs; the message names the setting to change.
    """
    shown = set()
    for key, found, mine, seen in settings:
        shown.add(key)
        if found == mine:
            continue
        if seen in held.weights:
            seen = f"{seen} is {tuple(held.weights[seen].shape)}"
        there, here = typed(found), typed(mine)
        hints = []
        for value in there.split(" or "):
            sibling = path.with_name(path.name.replace(f"{here}.", f"{value}."))
            hints.append(str(sibling) if sibling != path and sibling.exists() else f"{key}={value}")
        if key == "model.dim":  # keep the width of heads: for some mixers, no shape shows a wrong number of heads
            hints[0] += f" model.num_heads={found * recipe.model.num_heads // mine}"
        raise ConfigError(f"{held.path}: {seen}: {key} is {there}, not {here}; try {' or '.join(hints)}")
    return shown


def typed(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def write_run(out: Path, recipe: Recipe, state: dict[str, Any], source: dict[str, Any], files: dict[str, str]) -> None:
    """Write a run folder with a `best` checkpoint and text `files` by name; the folder appears in one step."""
    with written(out) as folder:
        save_best(folder, {"step": 0, "best": {"value": metric_of(recipe).worst, "step": 0}} | state)
        for name, text in (files | {RECIPE: dump_recipe(recipe)}).items():
            save_text(folder / name, text)
        save_json(folder / ENVIRONMENT, environment(torch.device("cpu")) | {"converted": source})
