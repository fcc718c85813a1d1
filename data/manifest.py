"""Manifests of prepared data: the sizes and checksums of a folder's files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lion.config import ConfigError
from lion.files import digest, read_json

FORMAT = 1
MANIFEST = "manifest.json"


class FileRecord(NamedTuple):
    """Size in bytes and SHA-256 of a file, as recorded in its manifest."""

    size: int
    sha256: str


def short_hash(decided: Any) -> str:
    """Hash the JSON of the values that determine a folder's content to twelve digits, for the folder's name."""
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:12]


def fingerprint_of(files: Mapping[str, FileRecord]) -> str:
    """Hash the content of files to twelve digits, independent of their folder."""
    return short_hash({name: held.sha256 for name, held in files.items()})


def stamps(files: Iterable[Path]) -> list[list[Any]]:
    """Return path, size and time of change of each file, which identify its content."""
    found: list[list[Any]] = []
    for file in files:
        path = os.path.abspath(file)
        status = os.stat(path)
        found.append([path, status.st_size, status.st_mtime_ns])
    return found


def again(folder: Path) -> str:
    """Return the remedy for a damaged folder, as the end of an error message."""
    return f"remove {folder} and create it again with ./run.sh prepare RECIPE"


def open_manifest(
    folder: Path, files: Callable[[dict[str, Any]], Mapping[str, FileRecord]], what: str
) -> dict[str, Any]:
    """Read the manifest of a folder and compare the sizes of its `files`; the content of the files is not read.

    Raises:
        ConfigError: A file is missing or truncated (the message calls it `what`), or the format is another one.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["format"] != FORMAT:
            raise ConfigError(f"{folder}: format {manifest['format']}, this version reads {FORMAT}; {again(folder)}")
        wanted = files(manifest)
        for name, held in wanted.items():
            if type(held.size) is not int or not re.fullmatch("[0-9a-f]{64}", held.sha256):
                raise ValueError(f"no size and SHA-256 of {name}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{folder / MANIFEST}: cannot be read ({reason}); {again(folder)}") from None
    for name, held in wanted.items():
        path = folder / name
        found = 0
        if path.is_file():
            found = path.stat().st_size
        if found != held.size:
            raise ConfigError(
                f"{path}: {found:,} bytes, expected {held.size:,} by its manifest: a truncated {what}; {again(folder)}"
            )
    return manifest


def compare_sums(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Read every byte of some files and compare their SHA-256.

    Raises:
        ConfigError: A file is damaged.
    """
    for name, held in files.items():
        if digest(folder / name) != held.sha256:
            raise ConfigError(f"{folder / name}: damaged, its SHA-256 differs from the manifest; {again(folder)}")
