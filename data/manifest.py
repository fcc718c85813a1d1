"""What prepared data say of themselves: a folder's manifest, with the sizes of its files and their checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lion.config import ConfigError
from lion.files import digest

FORMAT = 1
MANIFEST = "manifest.json"


def mark_of(decided: Any) -> str:
    """For a folder's name: what decides its content, as JSON, in twelve digits."""
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:12]


def again(folder: Path) -> str:
    """What helps where a folder is damaged."""
    return f"remove {folder} and make it anew with ./run.sh prepare RECIPE"


def open_manifest(folder: Path, sizes: Callable[[dict[str, Any]], Mapping[str, int]], what: str) -> dict[str, Any]:
    """What a folder holds; `sizes` of its files, in bytes, are compared, their content is not read.

    Raises:
        ConfigError: Something is missing, truncated (`what` it is, in words), or of another format.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ConfigError(f"{folder}: format {manifest['format']}, this version reads {FORMAT}; {again(folder)}")
        wanted = sizes(manifest)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / MANIFEST}: cannot be read ({error}); {again(folder)}") from None
    for name, size in wanted.items():
        path = folder / name
        held = path.stat().st_size if path.is_file() else 0
        if held != size:
            raise ConfigError(
                f"{path}: {held:,} bytes, its manifest says {size:,}: a truncated {what}; {again(folder)}"
            )
    return manifest


def compare_sums(folder: Path, wanted: Mapping[str, str]) -> None:
    """Read every byte of some files and compare their SHA-256.

    Raises:
        ConfigError: One is damaged.
    """
    for name, found in wanted.items():
        if digest(folder / name) != found:
            raise ConfigError(f"{folder / name}: damaged, its SHA-256 is not that of the manifest; {again(folder)}")
