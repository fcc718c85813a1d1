"""Writing of checkpoints by a thread, from a copy of the state, while training continues."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from lion.trainer.faults import full_disk


class Writing:
    """A checkpoint that is being written.

    Args:
        kind, step: Kind and step of the checkpoint.
        scratch: Hidden folder of the checkpoint.
        write: Function that fills `scratch` and gives it its final name.
        beside: Whether a thread calls `write`. Otherwise, the checkpoint is written before the constructor returns.
    """

    def __init__(self, kind: str, step: int, scratch: Path, write: Callable[[], None], *, beside: bool) -> None:
        self.kind, self.step, self.scratch = kind, step, scratch
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
        return None if self.error is None else refusal(self.error)


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

    def copy_of(x: Tensor) -> Tensor:
        source = x.untyped_storage()
        if source.data_ptr() not in storages:
            storages[source.data_ptr()] = source.clone() if x.device.type == "cpu" else source.cpu()
        return torch.empty(0, dtype=x.dtype).set_(storages[source.data_ptr()], x.storage_offset(), x.shape, x.stride())

    return copy.deepcopy(state, {id(x): copy_of(x) for x in tree_leaves(state) if isinstance(x, Tensor)})
