"""Atomic file writes, and digests to verify files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file beside `path`, flush it to disk, and rename it to `path` atomically."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and not error.filename:  # the error of a full disk has no file name
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def save_json(path: Path, values: Any) -> None:
    save_text(path, json.dumps(values, indent=2) + "\n")


def save_text(path: Path, text: str) -> None:
    write_atomic(path, lambda file: file.write(text.encode()))


def keep_aside(path: Path) -> Path:
    """Rename a file or a folder to NAME.oldN, with the first free N; return the new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return path.rename(aside)


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
