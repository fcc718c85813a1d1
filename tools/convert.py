"""Make a run of ours from a checkpoint of the authors' vision code (LIONS-EPFL/LION), of DeiT, or of a timm ViT.

    python -m tools convert CHECKPOINT RECIPE OUT [key=value ...] [--ema]

CHECKPOINT is a file of torch.save: the weights, or a training state that holds them. RECIPE and the overrides say what
the model is. OUT, a new folder, is then a run that eval, predict, `lion.load` and `init_from` take.

The checkpoint gives the weights, the number of classes and whether positions are embedded, and all that its shapes
show is checked, and what the arguments of the training say, which the authors' code and DeiT's keep beside the weights.
What neither shows, the recipe must have right, and is named at the end: softmax or Lion-lit and how many heads,
model.readout (`cls` where the authors' code ran with --cls_tok), data.mean and data.std. `model.preset` is `released`
unless overridden: the feature map of Lion-lit is that of the authors' code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.layers.mixers import SOFTMAX
from lion.layers.scans import AS_THEY_STAND
from lion.recipe import Recipe, dump_recipe
from lion.runs import ENVIRONMENT, RECIPE, build_on_meta, check_weights
from lion.tasks.data import numbered
from lion.trainer.checkpoint import STATE, digest, load_state, save_json, save_text, scratch_folder, seal, sync
from lion.trainer.runtime import environment
from tools.cli import Parser, run_command
from tools.compose import describe_data, make_task, resolve

NAMES = (  # theirs, ours, and the sign: their selective decay is 1 - sigmoid(W x + b), ours sigmoid(W x + b)
    (r"patch_embed\.proj\.(\w+)", r"patch.\1", 1),
    (r"cls_token", r"cls", 1),
    (r"pos_embed", r"position", 1),
    (r"blocks\.(\d+)\.((norm1|norm2|mlp\.fc1|mlp\.fc2)\.\w+)", r"encoder.blocks.\1.\2", 1),
    (r"blocks\.(\d+)\.attn\.((qkv|proj)\.\w+)", r"encoder.blocks.\1.attention.\2", 1),
    (r"blocks\.(\d+)\.attn\.a_i", r"encoder.blocks.\1.attention.decays.0.a", 1),
    (r"blocks\.(\d+)\.attn\.a2_i", r"encoder.blocks.\1.attention.decays.1.a", 1),
    (r"blocks\.(\d+)\.attn\.a_i\.(\w+)", r"encoder.blocks.\1.attention.decays.0.gate.\2", -1),
    (r"blocks\.(\d+)\.attn\.a2_i\.(\w+)", r"encoder.blocks.\1.attention.decays.1.gate.\2", -1),
    (r"norm\.(\w+)", r"encoder.norm.\1", 1),
    (r"head\.(\w+)", r"head.\1", 1),
)
NEEDED = {"patch_embed.proj.weight": 4, "cls_token": 3, "blocks.0.norm1.weight": 1, "head.weight": 2}  # axes
ORDER_S = ("row_snake", "column_snake")  # what a_i and a2_i go along
MASKS = {"Lit": "lion_lit", "Decay": "lion_d", "Selective": "lion_s"}  # the authors' --mask_type
HEADS = {"tiny": 3, "small": 6, "base": 12}  # of the sizes in the names of their models and DeiT's


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
    theirs, said = read_weights(args.checkpoint, args.ema)
    ours = rename(theirs, args.checkpoint)
    info = describe_data(recipe, look=False)[0]
    shown = compare(theirs, said, recipe, info, args)
    classes = len(ours["head.weight"])
    if classes != len(info.classes):
        info = dataclasses.replace(info, classes=numbered(classes))
    recipe.model.position_embedding = "position" in ours
    check_weights(build_on_meta(make_task(recipe, info), recipe.model), ours, str(args.checkpoint))
    source = {"file": str(args.checkpoint), "sha256": digest(args.checkpoint), "ema": args.ema}
    write_run(args.out, recipe, {"info": info.to_dict(), "model": ours, "ema": None}, source)
    c = recipe.model.resolved()
    print(
        f"{args.out}: {c.mixer}, {sum(w.numel() for w in ours.values()):,} parameters, {classes} classes, "
        f"{'with' if c.position_embedding else 'without'} position embedding, {c.num_heads} heads, readout {c.readout}"
    )
    trusted = [f"model.{n}={getattr(c, n)}" for n in ("mixer", "num_heads", "readout") if f"model.{n}" not in shown]
    print(f"the file does not show, and the recipe was trusted with: {', '.join([*trusted, 'data.mean', 'data.std'])}")
    return 0


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


def rename(theirs: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """The same weights under our names, with our signs, in float32.

    Raises:
        ConfigError: A weight that every such model has is missing, we have no place for one, or one is not finite.
    """
    for name, axes in NEEDED.items():
        if not torch.is_tensor(theirs.get(name)) or theirs[name].dim() != axes:
            raise ConfigError(f"{path}: no {name} of {axes} axes in it: not a classifier of LION, DeiT or timm's ViT")
    ours = {}
    for name, value in theirs.items():
        matches = ((re.fullmatch(pattern, name), our, sign) for pattern, our, sign in NAMES)
        match, our, sign = next((m for m in matches if m[0]), (None, "", 1))
        if match is None or not torch.is_tensor(value) or not value.dim() or not value.is_floating_point():
            raise ConfigError(f"{path}: our ViT has no place for {name}: distilled, or of another architecture?")
        ours[match.expand(our)] = sign * value.float()
        if not ours[match.expand(our)].isfinite().all():
            raise ConfigError(f"{path}: {name} holds NaN or infinity: no trained model")
    return ours


def compare(
    theirs: dict[str, Tensor], said: dict[str, Any], recipe: Recipe, info: Any, args: argparse.Namespace
) -> set[str]:
    """Refuse a recipe of another model than the checkpoint's, naming the setting to change; returns what it shows."""
    shown = set()
    for key, found, mine, seen in chain(settings(theirs, recipe, info), arguments(said, recipe)):
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


def settings(theirs: dict[str, Tensor], recipe: Recipe, info: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """What shapes show: (recipe key, its value by them, by the recipe, the tensor); each holds if those before fit."""
    c, patch = recipe.model.resolved(), theirs["patch_embed.proj.weight"]
    a, a2 = ([n for n in theirs if n.startswith(f"blocks.0.attn.{name}")] for name in ("a_i", "a2_i"))
    if a:
        yield "model.mixer", "lion_d" if a == ["blocks.0.attn.a_i"] else "lion_s", c.mixer, a[0]
    elif c.mixer not in (SOFTMAX, "lion_lit"):  # they look the same
        yield "model.mixer", f"{SOFTMAX} or lion_lit", c.mixer, "there is no blocks.0.attn.a_i"
    seen = a2[0] if a2 else "there is no blocks.0.attn.a2_i"
    yield "model.attention.scans", ORDER_S if a2 else AS_THEY_STAND, c.attention.scans, seen
    yield "model.dim", len(patch), c.dim, "patch_embed.proj.weight"
    if a:
        yield "model.num_heads", len(theirs[a[0]]), c.num_heads, a[0]
    yield "model.patch_size", tuple(patch.shape[2:]), c.patch_size, "patch_embed.proj.weight"
    yield "data.channels", patch.shape[1], info.channels, "patch_embed.proj.weight"
    blocks = {n: int(n.split(".")[1]) for n in theirs if n.startswith("blocks.")}
    last = max(blocks, key=blocks.get)
    yield "model.depth", blocks[last] + 1, c.depth, last
    if "pos_embed" in theirs:
        places, grid = theirs["pos_embed"].numel() // c.dim - 1, [s // p for s, p in zip(info.size, c.patch_size)]
        side = math.isqrt(max(places, 0))
        if side * side == places != math.prod(grid):
            yield "data.image_size", tuple(side * p for p in c.patch_size), info.size, "pos_embed"


def arguments(said: dict[str, Any], recipe: Recipe) -> Iterator[tuple[str, Any, Any, str]]:
    """The same of what the arguments of the authors' training, or of DeiT's, say of the model."""
    c, name, mask = recipe.model.resolved(), str(said.get("model")), str(said.get("mask_type"))
    if mask in MASKS:
        yield "model.mixer", MASKS[mask], c.mixer, f"its args have mask_type {mask}"
        cls = bool(said.get("cls_tok"))
        yield "model.readout", "cls" if cls else "mean", c.readout, f"its args have cls_tok {cls}"
    elif name.startswith("deit_"):
        yield "model.mixer", SOFTMAX, c.mixer, f"its args have model {name}"
        yield "model.readout", "cls", c.readout, f"its args have model {name}"
    if size := re.match(rf"(?:deit|lion)_({'|'.join(HEADS)})_", name):
        yield "model.num_heads", HEADS[size[1]], c.num_heads, f"its args have model {name}"


def write_run(out: Path, recipe: Recipe, state: dict[str, Any], source: dict[str, Any]) -> None:
    """A run folder with a `best` checkpoint, put in place in one step."""
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        best = scratch_folder(scratch, "best", 0)
        with open(best / STATE, "wb") as file:
            torch.save({"step": 0, "best": {"value": float("-inf"), "step": 0}, **state}, file)
        seal(best)
        save_text(scratch / RECIPE, dump_recipe(recipe))
        save_json(scratch / ENVIRONMENT, {**environment(), "converted": source})
        os.rename(scratch, out)
        sync(out.parent)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    run_command(main)
