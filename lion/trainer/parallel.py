"""One model over several processes: replicated (DDP) or sharded (FSDP2), and its state under plain names."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lion.trainer.runtime import Runtime

STRATEGIES = ("ddp", "fsdp")
STREAMING = ("prefill", "step")  # methods of models and blocks that use their parameters as `forward` does


def shard(model: nn.Module, runtime: Runtime) -> None:
    """Spread parameters over the processes in place, block by block; call it before the optimizer is made.

    Beside `forward`, what streams may be called: a task shows what a model generates.
    """
    mesh = init_device_mesh(runtime.device.type, (runtime.world,))
    for unit in model.units():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in (*model.units(), model):
        for name in STREAMING:
            if inspect.ismethod(getattr(part, name, None)):
                register_fsdp_forward_method(part, name)


def replicate(model: nn.Module, runtime: Runtime) -> nn.Module:
    """The module whose forward pass makes gradients agree between processes."""
    if runtime.world == 1 or isinstance(model, FSDPModule):
        return model
    # DDP lays gradients out anew after a process's first step, which changes the order in which more than two
    # processes add them: a resumed run would differ in the last bit. It never does so while it looks for unused ones.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return DistributedDataParallel(model, find_unused_parameters=runtime.world > 2)


def synchronise(forward: nn.Module, now: bool) -> AbstractContextManager:
    """Whether the backward pass inside talks to the other processes: only the last micro-batch needs to."""
    if isinstance(forward, FSDPModule):
        forward.set_requires_gradient_sync(now)
    elif isinstance(forward, DistributedDataParallel) and not now:
        return forward.no_sync()
    return contextlib.nullcontext()


def local(tensors: list[Tensor]) -> list[Tensor]:
    """The parts that this process holds, sharing memory."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def full(tensor: Tensor) -> Tensor:
    """A sharded result, put together in every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Learner:
    """Model, average and optimizer as one thing that is saved and restored, the same for every kind of parallelism."""

    def __init__(self, model: nn.Module, ema: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.ema, self.optimizer = model, ema, optimizer

    @property
    def sharded(self) -> bool:
        return isinstance(self.model, FSDPModule)

    def state(self) -> dict[str, Any]:
        """Tensors by plain names; sharded ones where the model is."""
        return {
            "model": get_model_state_dict(self.model),
            "ema": {} if self.ema is None else get_model_state_dict(self.ema),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def weights(self) -> dict[str, Any]:
        """Weights and averaged weights, put together in the first process; every process takes part."""
        options = StateDictOptions(full_state_dict=self.sharded, cpu_offload=self.sharded)
        models = {"model": self.model, "ema": self.ema}
        return {k: None if m is None else get_model_state_dict(m, options=options) for k, m in models.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, sharded or whole."""
        options = StateDictOptions(full_state_dict=self.sharded and not is_sharded(state["model"]))
        set_model_state_dict(self.model, state["model"], options=options)
        if self.ema is not None:
            set_model_state_dict(self.ema, state["ema"], options=options)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)


def is_sharded(tensors: dict[str, Tensor]) -> bool:
    return any(isinstance(t, DTensor) for t in tensors.values())


def save_shards(folder: Path, tensors: dict[str, Any]) -> None:
    """Every process writes its part into `folder`; all raise where one fails, as in `_plainly`."""
    with _plainly():
        dcp.save(tensors, checkpoint_id=folder)


def load_shards(folder: Path, into: dict[str, Any]) -> dict[str, Any]:
    """Read what any number of processes have written, into tensors of whatever sharding; raises as `_plainly` does."""
    with _plainly():
        dcp.load(into, checkpoint_id=folder)
    return into


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Raise what the first process that failed has met.

    Raises:
        OSError: A disk refuses.
        RuntimeError: Everything else.
    """
    try:
        yield
    except CheckpointException as error:  # no subclass of Exception
        causes = [cause for cause, _ in error.failures.values()]
        raise next((c for c in causes if isinstance(c, OSError)), RuntimeError(str(causes))) from error


def join_shards(folder: Path) -> dict[str, Any]:
    """All tensors of a sharded checkpoint, whole, in this process alone.

    The format's metadata is a pickle, which can run code: only for checkpoints of one's own.
    """
    out = folder / ".joined.tmp"
    try:
        dcp_to_torch_save(folder, out)
        return torch.load(out, weights_only=True)
    finally:
        out.unlink(missing_ok=True)
