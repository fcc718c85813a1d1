"""Place of exported files, which appear in one step when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError
from lion.files import sync
from lion.trainer.checkpoint_files import STATE, scratch_folder, seal
from lion.trainer.faults import full_disk


@contextmanager
def written(out: Path) -> Iterator[Path]:
    """Yield the path at which a file or folder is written; after the block it becomes `out`, unless an error occurred.

    Raises:
        ConfigError: `out` cannot be written.
        OSError: The disk is full.
    """
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        yield scratch / out.name
        share(scratch)
        sync(scratch / out.name)
        os.rename(scratch / out.name, out)
        sync(out.parent)
    except Exception as error:
        if full := full_disk(error):
            raise OSError(full.errno, full.strerror, str(out)) from None
        if isinstance(error, OSError):
            raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save_best(run: Path, state: dict[str, Any]) -> None:
    """Write the `best` checkpoint of a run."""
    folder = scratch_folder(run, "best", state["step"])
    with open(folder / STATE, "wb") as file:
        torch.save(state, file)
    seal(folder)


def share(folder: Path) -> None:
    """Give all files of a folder the permissions of new files; safetensors may write for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)
