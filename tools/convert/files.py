"""Reading of checkpoint files: torch.save, safetensors, and folders of `transformers`."""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lion.config import ConfigError
from lion.files import digest, read_json
from lion.trainer.checkpoint_files import load_state
from tools.processes import first_line

CONFIG = "config.json"
FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


class CheckpointContents(NamedTuple):
    """Contents of a checkpoint.

    Attributes:
        path: The file or folder.
        weights: The weights by name.
        said: Metadata stored with the weights: arguments of the training, or the `config.json` of transformers.
        sums: SHA-256 of each file that was read.
    """

    path: Path
    weights: dict[str, Any]
    said: dict[str, Any]
    sums: dict[str, str]

    @property
    def folder(self) -> Path | None:
        """Folder with the files of transformers, or None for other checkpoints."""
        if "model_type" not in self.said:
            return None
        folder = self.path
        if not folder.is_dir():
            folder = folder.parent
        return folder.resolve()


def read_checkpoint(path: Path, ema: bool) -> CheckpointContents:
    """Read a checkpoint: a file of weights, or a folder that contains one of the files `FOLDER`.

    Raises:
        ConfigError: The checkpoint is missing, damaged, or without weights.
    """
    file = path
    if path.is_dir():
        there = [path / name for name in FOLDER if (path / name).is_file()]
        if not there:
            raise ConfigError(f"{path}: no checkpoint in this folder, expected {FOLDER[0]} or {FOLDER[2]}")
        file = there[0]
    files = [file]
    if file.name.endswith(".index.json"):
        files = shards(file)
    weights: dict[str, Any] = {}
    for each in files:
        weights |= read_file(each)
    said: dict[str, Any] = {}
    if file.name not in FOLDER:
        weights, said = inside(path, weights, ema)
    elif ema:
        raise ConfigError(f"{path}: --ema: a checkpoint of transformers holds no averaged weights")
    elif path.is_dir() or file.with_name(CONFIG).exists():
        said = json_object(file.with_name(CONFIG))
    plain = {plain_name(str(name)): value for name, value in weights.items()}
    return CheckpointContents(path, plain, said, {each.name: digest(each) for each in files})


def plain_name(name: str) -> str:
    """Return the name of a weight without the prefixes of DDP and torch.compile."""
    return re.sub(r"^(module\.)+", "", name.replace("_orig_mod.", ""))


def read_file(path: Path) -> dict[str, Any]:
    """Read the contents of a safetensors or torch.save file."""
    if path.suffix != ".safetensors":
        check_sums(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # DeiT saves its arguments with the weights
            return load_state(path)
    load = safetensors(path).load_file
    if not path.is_file():
        raise ConfigError(f"{path}: no such checkpoint")
    try:
        return load(path)
    except Exception as error:  # errors of safetensors have no common type
        raise ConfigError(f"{path}: not a readable safetensors file ({first_line(error)})") from None


def safetensors(path: Path) -> Any:
    """Import `safetensors.torch`, which is needed to read or write `path`."""
    try:
        import safetensors.torch as library
    except ImportError:
        raise ConfigError(f"{path}: needs safetensors: pip install safetensors") from None
    return library


def shards(index: Path) -> list[Path]:
    """Return the files of weights that an index lists."""
    held = json_object(index).get("weight_map")
    names = []
    if isinstance(held, dict):
        names = list(held.values())
    if not names or not all(map(is_file_name, names)):
        raise ConfigError(f"{index}: not an index of weights, it has no 'weight_map' with names of files")
    return [index.with_name(Path(name).name) for name in sorted(set(names))]


def is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and Path(name).name != ""


def json_object(path: Path) -> dict[str, Any]:
    try:
        held = read_json(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file, a folder of transformers needs it next to the weights") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(held, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return held


def inside(path: Path, held: dict[str, Any], ema: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights and the stored arguments of a training state, or of a file that holds only weights."""
    if isinstance(held.get("state"), dict):  # Composer
        held = held["state"]
    keys = ("model", "state_dict")
    if ema:
        keys = ("model_ema", "state_dict_ema")
    found = [held[key] for key in keys if isinstance(held.get(key), dict)]
    if not found and ema:
        raise ConfigError(f"{path}: the file holds no {keys[0]!r}, leave out --ema")
    weights = held
    if found:
        weights = found[0]
    if isinstance(held.get("args"), argparse.Namespace):
        return weights, vars(held["args"])
    said = held.get("model_args")  # nanoGPT
    if not isinstance(said, dict):
        said = {}
    return weights, said


def check_sums(path: Path) -> None:
    """Check the checksums of a torch.save file. Files of torch before 1.6 have no checksums.

    Raises:
        ConfigError: The file is damaged.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as file:
            written = any(entry.CRC for entry in file.infolist())  # torch can write files without checksums
            bad = None
            if written:
                bad = file.testzip()
    except Exception as error:  # a damaged table of contents can raise any error
        bad = type(error).__name__
    if bad:
        raise ConfigError(f"{path}: damaged, its checksums do not match ({bad}); download it again")
