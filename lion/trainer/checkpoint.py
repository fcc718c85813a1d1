"""Files of a run that must never be half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lion.config import ConfigError


def write_atomic(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write to a temporary file beside `path`, flush it to the disk, and put it in place in one step."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    write_atomic(path, lambda file: torch.save(state, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's tensors and plain data, on the CPU; it cannot run code.

    Raises:
        ConfigError: No such file, or not a checkpoint.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such checkpoint") from None
    except Exception as error:
        raise ConfigError(f"{path}: not a readable checkpoint ({type(error).__name__})") from None


def save_json(path: Path, values: Any) -> None:
    write_atomic(path, lambda file: file.write((json.dumps(values, indent=2) + "\n").encode()))


def save_text(path: Path, text: str) -> None:
    write_atomic(path, lambda file: file.write(text.encode()))
