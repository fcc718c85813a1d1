"""Turn a sharded checkpoint (trainer.parallel=fsdp) into one file, in place.

./run.sh consolidate RUN
"""

from __future__ import annotations

from pathlib import Path

import torch

from lion.config import ConfigError
from lion.files import write_atomic
from lion.recipe_files import find_run
from lion.runs import lock_run
from lion.trainer.checkpoint_files import CONSOLIDATED, MANIFEST, load_state, newest, write_manifest
from lion.trainer.checkpointer import TENSORS
from lion.trainer.parallel import join_shards
from tools import options


def main(argv: list[str]) -> int:
    args = options.read("consolidate", argv)
    folder = find_run(args.run)
    with lock_run(folder):
        found = newest(folder, "last")
        if found is None:
            raise ConfigError(f"{folder}: no checkpoint yet")
        if not found.sharded:
            if found.state.name == CONSOLIDATED:
                sweep(found.path)  # files of an interrupted call
            print(f"{found.path} is not sharded, nothing to do")
            return 0
        empty = {name: {} for name in TENSORS}  # shards have no entry of a part without tensors, as `ema` of some runs
        state = {**load_state(found.state), **empty, **join_shards(found.path)}
        target = found.path / CONSOLIDATED
        write_atomic(target, lambda file: torch.save(state, file))
        write_manifest(found.path, [target], sharded=False)  # from now on this file is the checkpoint
        sweep(found.path)
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB, step {found.step}")
    return 0


def sweep(folder: Path) -> None:
    """Delete the files that the manifest of a consolidated checkpoint no longer lists."""
    for path in folder.iterdir():
        if path.name not in (CONSOLIDATED, MANIFEST):
            path.unlink()
