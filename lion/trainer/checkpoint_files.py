"""Checkpoint files: atomic writes, verification before use, and pruning.

A checkpoint is a folder `RUN/checkpoints/KIND-STEP/` with a manifest (sizes and SHA-256 of its files). The folder is
filled under a hidden name and renamed once its files are flushed to disk, so a checkpoint with its final name is
complete. `last-*` holds everything needed to resume a run. `best-*` holds the weights with the best metric on the
validation split.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from lion.config import ConfigError
from lion.files import digest, read_json, save_json, sync
from lion.trainer.faults import full_disk, out_of_memory

log = logging.getLogger("lion")

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.pt"  # plain checkpoint: everything; sharded checkpoint: all but the tensors of model and optimizer
SHARDS = ".metadata"  # PyTorch's description of the shards in the same folder
CONSOLIDATED = "consolidated.pt"  # everything, after a sharded checkpoint was joined
_NAME = re.compile(r"(last|best)-(\d+)")
_Read = TypeVar("_Read")


class UnusableCheckpoint(ConfigError):
    """Error for a checkpoint that is damaged or has unusable contents; an earlier checkpoint may still be usable."""


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk.

    Attributes:
        path: The folder of the checkpoint.
        step: Number of training steps before the checkpoint was saved.
        state: The file that `load_state` reads.
        sharded: Whether the tensors are in shards beside `state`; otherwise `state` holds everything.
    """

    path: Path
    step: int
    state: Path
    sharded: bool


def scratch_path(run: Path, kind: str, step: int) -> Path:
    """Return the hidden folder in which a checkpoint is filled before it gets its final name."""
    return run / FOLDER / f".{kind}-{step}.tmp"


def scratch_folder(run: Path, kind: str, step: int) -> Path:
    """Create an empty hidden folder, to be filled and then passed to `seal`."""
    path = scratch_path(run, kind, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def seal(scratch: Path, *, sharded: bool = False) -> Path:
    """Write the manifest of a filled scratch folder, flush all files, and rename the folder atomically.

    A checkpoint of the same step, made by an earlier attempt, is set aside.
    """
    files = [p for p in sorted(scratch.iterdir()) if p.is_file()]
    write_manifest(scratch, files, sharded=sharded)
    target = scratch.with_name(scratch.name.removeprefix(".").removesuffix(".tmp"))
    if target.is_dir():
        set_aside(target, "earlier")
    os.rename(scratch, target)
    sync(target.parent)
    return target


def write_manifest(folder: Path, files: list[Path], *, sharded: bool) -> None:
    """Flush `files` to disk and record their sizes and SHA-256 in the manifest of `folder`."""
    entries = {}
    for path in files:
        sync(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    save_json(folder / MANIFEST, {"sharded": sharded, "files": entries})


def verified(step: int, folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder, after checking its files against the manifest.

    Raises:
        UnusableCheckpoint: The manifest is unreadable, or a file is missing or changed.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        state = STATE
        if CONSOLIDATED in manifest["files"]:
            state = CONSOLIDATED
        needed = state
        if manifest["sharded"]:
            needed = SHARDS
        if needed not in manifest["files"]:
            raise UnusableCheckpoint(f"{MANIFEST} does not list {needed}")
        for name, entry in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise UnusableCheckpoint(f"{name} is missing")
            if path.stat().st_size != entry["bytes"]:
                raise UnusableCheckpoint(f"{name} has {path.stat().st_size:,} of {entry['bytes']:,} bytes")
            if digest(path) != entry["sha256"]:
                raise UnusableCheckpoint(f"{name} has changed since it was written (SHA-256 differs)")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableCheckpoint(f"{MANIFEST} cannot be read ({type(error).__name__})") from None
    return Checkpoint(folder, step, folder / state, manifest["sharded"])


def steps_of(run: Path, kind: str) -> list[tuple[int, Path]]:
    """List (step, folder) of every checkpoint of a kind ("*": all kinds), newest first.

    The entries are not verified: an entry may be a file, or may have been deleted in the meantime.

    Raises:
        ConfigError: The path of the checkpoints folder is not a readable folder.
    """
    try:
        names = os.listdir(run / FOLDER)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{run / FOLDER}: not a folder of checkpoints ({error.strerror})") from None
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match and kind in (match[1], "*"):
            found.append((int(match[2]), run / FOLDER / name))
    return sorted(found, reverse=True)


def unread(found: Checkpoint) -> Any:
    """Return the checkpoint itself, for `newest`."""
    return found


def newest(
    run: Path,
    kind: str,
    *,
    read: Callable[[Checkpoint], _Read] = unread,
    repair: bool = False,
    quiet: bool = False,
) -> _Read | None:
    """Return `read(checkpoint)` for the newest usable checkpoint of a kind, or None if the run has none of that kind.

    A checkpoint that is damaged, or for which `read` raises `UnusableCheckpoint`, is reported (unless `quiet`), and the
    previous checkpoint is tried. With `repair`, damaged checkpoints are set aside, and their steps can be saved again.
    The run may continue to train, and save or prune checkpoints, during this call.

    Raises:
        ConfigError: There are checkpoints, but none of them can be used.
    """
    while True:
        damaged = {}
        for step, path in steps_of(run, kind):
            try:
                out = read(verified(step, path))
            except UnusableCheckpoint as error:
                if not os.path.lexists(path):  # pruned by a run that saved a newer one: look again
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
                f"{run}: no {kind!r} checkpoint can be used ({reasons}); training with --fresh starts a new run and "
                "keeps this folder"
            )


def set_aside(path: Path, prefix: str = "damaged") -> None:
    """Rename a checkpoint that is not used, so that its step can be saved again; nothing is deleted."""
    target = path.with_name(f"{prefix}-{path.name}")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{prefix}-{path.name}.{number}")
    os.rename(path, target)


def prune(newest: Path, keep: int) -> None:
    """Delete old checkpoints of the same kind, and leftovers of interrupted saves.

    `newest` and the `keep - 1` checkpoints before it are kept.
    """
    kind = newest.name.partition("-")[0]
    steps = steps_of(newest.parent.parent, kind)
    others = [path for _, path in steps if path != newest and path.is_dir()]
    for path in others[keep - 1 :]:
        os.rename(path, path.with_name(f".{path.name}.tmp"))  # a kill must not leave a partial checkpoint
    for path in newest.parent.glob(f".{kind}-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def load_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Load the tensors and plain data of a checkpoint file onto the CPU, without executing code from the file.

    With `mapped`, the file is memory-mapped: tensors stay on disk until they are accessed.

    Raises:
        UnusableCheckpoint: The file does not exist or is not a checkpoint.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # such a warning is followed by an error here
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise UnusableCheckpoint(f"{path}: no such checkpoint") from None
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UnusableCheckpoint(f"{path}: not a readable checkpoint of torch.save ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise UnusableCheckpoint(f"{path}: not a readable checkpoint (it holds a {type(state).__name__})")
    return state


def check_space(run: Path, state: int, best: int, keep: int) -> None:
    """Check that the checkpoints of a run fit on the disk.

    A run needs `keep` checkpoints of `state` bytes, one of `best` bytes, and another of `state` bytes while it is
    being written.

    Raises:
        ConfigError: The folder is not writable, or the disk has too little free space.
    """
    have = 0
    for _, folder in steps_of(run, "*"):
        have += sum(path.stat().st_size for path in folder.glob("*"))
    place = run.absolute()
    while not place.is_dir():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise ConfigError(f"run.root: {place} cannot be written to")
    free = shutil.disk_usage(place).free + have
    need = state * (keep + 1) + best
    if need > free:
        less = ""
        if keep > 1:
            less = f", set trainer.keep_last=1 (needs {mib(2 * state + best)})"
        raise ConfigError(
            f"run.root: checkpoints in {run} need {mib(need)}, but {mib(free)} are free: make room{less} "
            f"or choose another run.root"
        )


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


class Writing:
    """A checkpoint that is being written.

    Args:
        kind, step: Kind and step of the checkpoint.
        scratch: Hidden folder of the checkpoint.
        write: Function that fills `scratch` and gives it its final name.
        beside: Whether a thread calls `write`. Otherwise, the checkpoint is written before the constructor returns.
    """

    def __init__(self, kind: str, step: int, scratch: Path, write: Callable[[], None], *, beside: bool) -> None:
        self.kind = kind
        self.step = step
        self.scratch = scratch
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        if beside:
            self.thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
            self.thread.start()
        else:
            self._run(write)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self.error = error

    def refusal(self) -> str | None:
        """Wait until the checkpoint is written; return why the system refused it, or None. Raise any other error."""
        if self.thread is not None:
            self.thread.join()
        if self.error is None:
            return None
        return refusal(self.error)


def refusal(error: Exception) -> str:
    """Return the message of a full disk or another error of the operating system; raise every other error again."""
    found = full_disk(error) or error
    if not isinstance(found, OSError):
        raise error
    return str(found).splitlines()[0]


def copied(state: Any) -> Any:
    """Return a state (nested dictionaries and lists) with copies of its tensors on the CPU.

    Tensors that share memory also share the memory of the copy, so that they take the same space in a file.
    """
    storages: dict[int, UntypedStorage] = {}
    copies: dict[int, Tensor] = {}
    for x in tree_leaves(state):
        if not isinstance(x, Tensor):
            continue
        source = x.untyped_storage()
        address = source.data_ptr()
        if address not in storages:
            storages[address] = source.clone() if x.device.type == "cpu" else source.cpu()
        empty = torch.empty(0, dtype=x.dtype)
        copies[id(x)] = empty.set_(storages[address], x.storage_offset(), x.shape, x.stride())
    return copy.deepcopy(state, copies)
