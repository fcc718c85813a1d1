"""Checkpoints, which are never half-written, and are checked before they are trusted.

A checkpoint is a folder `RUN/checkpoints/KIND-STEP/` with its manifest (sizes and SHA-256 of its files). It is
filled under a hidden name and renamed when it is on the disk: a checkpoint that has its name is complete.
`last-*` holds everything that a run needs to go on, `best-*` the weights that did best on the validation split.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from lion.config import ConfigError
from lion.files import digest, save_json, sync
from lion.trainer.faults import out_of_memory

log = logging.getLogger("lion")

FOLDER, MANIFEST = "checkpoints", "manifest.json"
STATE = "state.pt"  # plain checkpoints: everything; sharded ones: all but the tensors of model and optimizer
SHARDS = ".metadata"  # what PyTorch says of the shards beside it
CONSOLIDATED = "consolidated.pt"  # everything, of a checkpoint that was sharded
_NAME = re.compile(r"(last|best)-(\d+)")
_Read = TypeVar("_Read")


class Unusable(ConfigError):
    """A checkpoint is damaged, or nothing can be made of what it holds: the one before it may do."""


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk; `state` is the file that `load_state` reads, `sharded` says whether it is all."""

    path: Path
    step: int
    state: Path
    sharded: bool


def scratch_path(run: Path, kind: str, step: int) -> Path:
    """Where a checkpoint is filled before it has its name."""
    return run / FOLDER / f".{kind}-{step}.tmp"


def scratch_folder(run: Path, kind: str, step: int) -> Path:
    """An empty hidden folder to fill and then to `seal`."""
    path = scratch_path(run, kind, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def seal(scratch: Path, *, sharded: bool = False) -> Path:
    """Give a filled scratch folder its manifest, flush it, and put it in place in one step."""
    write_manifest(scratch, [p for p in sorted(scratch.iterdir()) if p.is_file()], sharded=sharded)
    target = scratch.with_name(scratch.name.removeprefix(".").removesuffix(".tmp"))
    os.rename(scratch, target)
    sync(target.parent)
    return target


def write_manifest(folder: Path, files: list[Path], *, sharded: bool) -> None:
    """What `folder` must hold from now on."""
    entries = {}
    for path in files:
        sync(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    save_json(folder / MANIFEST, {"sharded": sharded, "files": entries})


def verified(step: int, folder: Path) -> Checkpoint:
    """The checkpoint in a folder, checked against its manifest.

    Raises:
        Unusable: What is wrong with it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        state = CONSOLIDATED if CONSOLIDATED in manifest["files"] else STATE
        needed = SHARDS if manifest["sharded"] else state
        if needed not in manifest["files"]:
            raise Unusable(f"{MANIFEST} names no {needed}")
        for name, entry in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise Unusable(f"{name} is missing")
            if path.stat().st_size != entry["bytes"]:
                raise Unusable(f"{name} has {path.stat().st_size:,} bytes of {entry['bytes']:,}")
            if digest(path) != entry["sha256"]:
                raise Unusable(f"{name} is not what was written (SHA-256 differs)")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"{MANIFEST} cannot be read ({type(error).__name__})") from None
    return Checkpoint(folder, step, folder / state, manifest["sharded"])


def steps_of(run: Path, kind: str) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a kind, newest first, unchecked: it may be a file, or gone by now.

    Raises:
        ConfigError: Something else stands where a run has its checkpoints.
    """
    try:
        names = os.listdir(run / FOLDER)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{run / FOLDER}: not a folder of checkpoints ({error.strerror})") from None
    matches = [match for match in map(_NAME.fullmatch, names) if match and kind in (match[1], "*")]
    return sorted(((int(match[2]), run / FOLDER / match[0]) for match in matches), reverse=True)


def newest(
    run: Path,
    kind: str,
    *,
    read: Callable[[Checkpoint], _Read] = lambda found: found,
    repair: bool = False,
    quiet: bool = False,
) -> _Read | None:
    """What `read` makes of the newest checkpoint of a kind that is whole; None where there never was one.

    One that is damaged, or that `read` finds `Unusable`, is reported, unless `quiet`, and the one before it is taken;
    with `repair` it is set aside so that its step can be saved again. The run may train on meanwhile.

    Raises:
        ConfigError: There are checkpoints, and none of them can be used.
    """
    while True:
        damaged = {}
        for step, path in steps_of(run, kind):
            try:
                out = read(verified(step, path))
            except Unusable as error:
                if not os.path.lexists(path):  # a run that trains has put a newer one in its place: look again
                    break
                damaged[path] = str(error).removeprefix(f"{path}/")
                continue
            for bad, why in damaged.items():
                if not quiet:
                    log.warning("%s is damaged: %s; going back to %s", bad, why, path.name)
                if repair:
                    set_aside(bad)
            return out
        else:
            if not damaged:
                return None
            reasons = "; ".join(f"{path.name}: {why}" for path, why in damaged.items())
            raise ConfigError(
                f"{run}: no {kind!r} checkpoint can be used ({reasons}); --fresh starts anew and keeps this folder"
            )


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that its step can be saved again; nothing is deleted."""
    names = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in ("", *(f".{n}" for n in range(1, 10_000))))
    os.rename(path, next(name for name in names if not name.exists()))


def prune(newest: Path, keep: int) -> None:
    """Delete all of a checkpoint's kind but itself and the `keep - 1` before it, and what interrupted saves left."""
    kind, run = newest.name.partition("-")[0], newest.parent.parent
    others = [path for _, path in steps_of(run, kind) if path != newest and path.is_dir()]
    for path in others[keep - 1 :]:
        os.rename(path, path.with_name(f".{path.name}.tmp"))  # so that a kill leaves no half of a checkpoint
    for path in newest.parent.glob(f".{kind}-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def load_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """A checkpoint file's tensors and plain data, on the CPU; it cannot run code.

    With `mapped` the tensors stay in the file until they are read.

    Raises:
        Unusable: No such file, or not a checkpoint.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is an error here
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise Unusable(f"{path}: no such checkpoint") from None
    except Exception as error:
        if out_of_memory(error):
            raise
        raise Unusable(f"{path}: not a readable checkpoint, which torch.save writes ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise Unusable(f"{path}: not a readable checkpoint (it holds a {type(state).__name__})")
    return state


def check_space(run: Path, state: int, best: int, keep: int) -> None:
    """Refuse a run whose checkpoints will not fit: `keep` of `state` bytes, one of `best`, and one being written.

    Raises:
        ConfigError: The disk lacks the room.
    """
    have = sum(p.stat().st_size for _, folder in steps_of(run, "*") for p in folder.glob("*"))
    place = next(p for p in (run.absolute(), *run.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(place).free + have
    need = state * (keep + 1) + best
    if need > free:
        less = f", trainer.keep_last=1 (needs {mib(2 * state + best)})" if keep > 1 else ""
        raise ConfigError(
            f"run.root: checkpoints in {run} need {mib(need)} and {mib(free)} are free: make room{less} "
            f"or choose another run.root"
        )


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
