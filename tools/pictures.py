"""Pictures from wherever they are, for `./run.sh distance`: made by a run, of a data set, in a folder, in an array."""

from __future__ import annotations

import json
import random
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2.functional import pil_to_tensor

from data.base import walk
from data.vision.pictures import open_or_explain
from data.vision.sources import Images
from lion.config import ConfigError
from lion.files import save_json, write_atomic
from lion.recipe import Recipe
from lion.runs import LoadedRun, open_run
from lion.tasks.causal_lm import CausalLM
from lion.tasks.data import Splits
from lion.tasks.diffusion import Diffusion
from lion.tasks.images import ImageInfo
from lion.tasks.seeds import place_keys
from lion.trainer.loader import eval_batches
from lion.trainer.runtime import Runtime
from tools.compose import digest, loader_workers, resolve_run

SPLITS = ("train", "val", "test")
MANIFEST = "samples.json"
CHANNELS = (1, 3)


@dataclass
class Pictures:
    """`count` pictures as batches of uint8 (B, channels, height, width); features (B, D) where they are such already.

    `shape` (channels, height, width) is None where only reading tells.
    """

    name: str
    count: int
    shape: tuple[int, ...] | None
    batches: Iterator[Tensor]


def of_split(recipe: Recipe, splits: Splits, split: str, most: int, batch: int, seed: int) -> Pictures:
    """Of a data set, as it is tested on: without augmentation; at random, where there are more than `most`.

    Raises:
        ConfigError: There is no such split, or no pictures in it.
    """
    dataset = getattr(splits, split)
    if not isinstance(splits.info, ImageInfo) or splits.info.channels not in CHANNELS:
        raise ConfigError(f"--reference: data set {recipe.data.name!r} holds no pictures, name a folder or FILE.npz")
    if dataset is None:
        raise ConfigError(f"--reference: data set {recipe.data.name!r} has no {split} split")
    dataset = plain(dataset, splits)
    chosen = Subset(dataset, drawn(len(dataset), most, seed))
    how = {"workers": loader_workers(recipe), "collate": splits.collate, "faults": recipe.trainer.faults}
    read = eval_batches(chosen, seed=seed, split=split, batch=batch, rank=0, world=1, pin=False, **how)
    shape = (splits.info.channels, *splits.info.size)
    return Pictures(split, len(chosen), shape, (x["image"][x["mask"]] for x in read))


def plain(dataset: Dataset, splits: Splits) -> Dataset:
    """A split's pictures as those that are held out are read; a resident one leaves nothing to chance as it is."""
    if isinstance(dataset, Images) and isinstance(splits.val, Images):
        return Images(dataset.source, splits.val.transform, dataset.indices)
    return dataset


def drawn(count: int, most: int, seed: int) -> list[int]:
    """`most` of so many at random, or all, in random order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].tolist()


def of_path(path: Path, most: int, batch: int, seed: int, channels: int) -> Pictures:
    """Of a folder of picture files, or an array.

    Raises:
        ConfigError: There are none.
    """
    if path.is_dir():
        return of_folder(path, most, batch, seed, channels)
    if path.suffix == ".npz" and path.is_file():
        return of_array(path, most, batch, seed)
    raise ConfigError(f"{path}: expected a run, a folder of pictures or FILE.npz")


def of_folder(path: Path, most: int, batch: int, seed: int, channels: int) -> Pictures:
    """Picture files at any depth, as grey or RGB."""
    files = [f"{folder}/{name}" for folder, names in walk(path) for name in names]
    files = [file for file in files if file.lower().endswith(IMG_EXTENSIONS)]
    if not files:
        raise ConfigError(f"{path}: no pictures in this folder ({', '.join(IMG_EXTENSIONS)})")
    random.Random(seed).shuffle(files)
    files, mode = files[:most], "L" if channels == 1 else "RGB"

    def read() -> Iterator[Tensor]:
        shape = None
        for start in range(0, len(files), batch):
            some = []
            for file in files[start : start + batch]:
                some.append(pil_to_tensor(converted(open_or_explain(file), mode)))
                shape = shape or some[0].shape
                if some[-1].shape != shape:
                    sizes = [" x ".join(map(str, s[1:])) for s in (some[-1].shape, shape)]
                    raise ConfigError(f"{file}: {sizes[0]} pixels, others are {sizes[1]}; all must be of one size")
            yield torch.stack(some)

    return Pictures(path.name, len(files), None, read())


def converted(picture: Image.Image, mode: str) -> Image.Image:
    return picture if picture.mode == mode else picture.convert(mode)


def of_array(path: Path, most: int, batch: int, seed: int) -> Pictures:
    """The first array of a file that is pictures, uint8 (N, channels, height, width) or (N, height, width, channels),
    or features, floating point (N, D)."""
    try:
        with np.load(path, allow_pickle=False) as held:
            found = next((held[name] for name in held.files if fits(held[name])), None)
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path}: not a readable array ({error})") from None
    if found is None:
        raise ConfigError(f"{path}: no uint8 pictures (N, channels, height, width), and no features (N, D), in it")
    if found.ndim == 4 and found.shape[1] not in CHANNELS:
        found = found.transpose(0, 3, 1, 2)
    order = drawn(len(found), most, seed)
    pieces = (torch.from_numpy(found[order[start : start + batch]]) for start in range(0, len(order), batch))
    return Pictures(path.stem, len(order), found.shape[1:], pieces)


def fits(array: np.ndarray) -> bool:
    """Whether it is pictures or features."""
    if array.ndim == 2:
        return np.issubdtype(array.dtype, np.floating)
    return array.ndim == 4 and array.dtype == np.uint8 and (array.shape[1] in CHANNELS or array.shape[3] in CHANNELS)


def open_diffusion(folder: Path, checkpoint: str, raw: bool) -> LoadedRun:
    """A run that makes pictures, with averaged weights where it has such, unless `raw`.

    Raises:
        ConfigError: It makes none, or cannot be opened.
    """
    recipe = resolve_run(folder)
    loaded = open_run(folder, checkpoint=checkpoint, ema=recipe.trainer.ema is not None and not raw)
    if not isinstance(loaded.task, Diffusion):
        other = "it writes text, ./run.sh generate RUN" if isinstance(loaded.task, CausalLM) else "diffusion does"
        raise ConfigError(f"{folder}: task {recipe.task.name!r} makes no pictures, {other}")
    return loaded


def of_run(loaded: LoadedRun, args: Any, runtime: Runtime) -> Pictures:
    """What a run makes of noise, each class as often as the others; a picture depends on seed and place alone.

    Raises:
        ConfigError: It makes latents.
    """
    task, folder = loaded.task, loaded.folder
    if not task.pictures:
        raise ConfigError(f"{folder}: it makes latents; give a folder of the pictures that they are decoded to")
    loaded.model.to(runtime.device)
    keep = args.keep and Kept(args.keep, loaded, args)

    def make(start: int) -> Tensor:
        places = torch.arange(start, start + args.batch, device=runtime.device)
        given = (places % len(task.info.classes), place_keys(args.seed, places))
        how = {"steps": args.steps, "guidance": args.guidance}
        try:
            with torch.inference_mode(), runtime.autocast(loaded.recipe.trainer.precision):
                return task.sample(loaded.model, *given, **how).cpu()
        except ValueError as error:
            raise ConfigError(f"--{error}") from None

    def pieces() -> Iterator[Tensor]:
        for start in range(0, args.samples, args.batch):
            made = keep.get(start, make) if keep else make(start)
            yield made[: args.samples - start]

    return Pictures(folder.name, args.samples, (task.info.channels, *task.info.size), pieces())


class Kept:
    """A folder of samples, FIRST.npy for each batch: what was made once is not made again.

    Raises:
        ConfigError: Others are there.
    """

    def __init__(self, folder: Path, loaded: LoadedRun, args: Any) -> None:
        self.folder = folder
        about = {"run": str(loaded.folder.resolve()), "step": loaded.checkpoint["step"]}
        about["weights"] = digest(loaded.model)  # trained anew, a run has others
        about |= {name: getattr(args, name) for name in ("steps", "guidance", "seed", "batch")}
        path = folder / MANIFEST
        try:
            folder.mkdir(parents=True, exist_ok=True)
            there = json.loads(path.read_text()) if path.exists() else None
        except (OSError, ValueError):
            raise ConfigError(f"--keep: {folder} is no folder for samples") from None
        if there is None and any(folder.iterdir()):
            raise ConfigError(f"--keep: {folder} holds other files")
        if there not in (None, about):
            there = there if isinstance(there, dict) else {}
            odd = next((name for name in about if there.get(name) != about[name]), MANIFEST)
            raise ConfigError(f"--keep: {folder} holds other samples, {odd} differs; name another folder")
        save_json(path, about)

    def get(self, start: int, make: Any) -> Tensor:
        path = self.folder / f"{start:08d}.npy"
        if not path.exists():
            made = make(start)
            write_atomic(path, lambda file: np.save(file, made.numpy()))
        return torch.from_numpy(np.load(path))
