"""Parallel training: replication (DDP) or sharding (FSDP2) of a model, and its state under plain names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
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

from lion.models.base import Model
from lion.trainer.runtime import Runtime

STREAMING = ("prefill", "step")  # methods of models and blocks that use their parameters as `forward` does


def shard(model: Model, runtime: Runtime) -> None:
    """Shard the parameters over the processes, block by block and in place, before the optimizer is made.

    Besides `forward`, `prefill` and `step` are registered with FSDP2, because a task may generate samples.
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
    """Return the module for the forward pass of training, which synchronises gradients between processes."""
    if runtime.world == 1 or isinstance(model, FSDPModule):
        return model
    # DDP rebuilds its gradient buckets after the first step of a process. With more than two processes this changes
    # the order of additions, and a resumed run would differ in the last bit. With find_unused_parameters=True, DDP
    # never rebuilds its buckets.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return DistributedDataParallel(model, find_unused_parameters=runtime.world > 2)


def synchronise(forward: nn.Module, now: bool) -> AbstractContextManager:
    """Switch gradient synchronisation on or off for a backward pass; only the last micro-batch needs `now=True`."""
    if isinstance(forward, FSDPModule):
        forward.set_requires_gradient_sync(now)
    elif isinstance(forward, DistributedDataParallel) and not now:
        return forward.no_sync()
    return contextlib.nullcontext()


def local(tensors: list[Tensor]) -> list[Tensor]:
    """Return the shards that this process holds, without copies."""
    shards = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        shards.append(tensor)
    return shards


def full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor in every process; return any other tensor unchanged."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


@dataclass(frozen=True)
class TrainedModels:
    """Model, averaged model and optimizer, saved and restored together in the same way for DDP and FSDP2."""

    model: nn.Module
    ema: nn.Module | None
    optimizer: torch.optim.Optimizer

    @property
    def sharded(self) -> bool:
        return isinstance(self.model, FSDPModule)

    def state(self) -> dict[str, Any]:
        """Return all tensors by plain names; the tensors are sharded if the model is sharded."""
        state: dict[str, Any] = {"model": get_model_state_dict(self.model), "ema": {}}
        if self.ema is not None:
            state["ema"] = get_model_state_dict(self.ema)
        state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def weights(self) -> dict[str, Any]:
        """Gather weights and averaged weights in the first process; all processes must call this method."""
        options = StateDictOptions(full_state_dict=self.sharded, cpu_offload=self.sharded)
        weights = {"model": get_model_state_dict(self.model, options=options), "ema": None}
        if self.ema is not None:
            weights["ema"] = get_model_state_dict(self.ema, options=options)
        return weights

    def restore(self, state: dict[str, Any]) -> None:
        """Restore tensors that `state` returned, sharded or whole."""
        held_in_shards = any(isinstance(tensor, DTensor) for tensor in state["model"].values())
        options = StateDictOptions(full_state_dict=self.sharded and not held_in_shards)
        set_model_state_dict(self.model, state["model"], options=options)
        if self.ema is not None:
            set_model_state_dict(self.ema, state["ema"], options=options)
        found = state["optimizer"]
        now_held: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer)
        groups = now_held["param_groups"]
        now = [group["params"] for group in groups]
        then = [group["params"] for group in found["param_groups"]]
        if now != then:
            found = {**found, "param_groups": groups}  # an earlier version spared others from weight decay
        set_optimizer_state_dict(self.model, self.optimizer, found, options=options)


def shard_writer(folder: Path, tensors: dict[str, Any], *, beside: bool) -> Callable[[], None]:
    """Return a function that writes the shards of every process into `folder`; every process must call both functions.

    With `beside`, the function writes copies that are made now, and may be called by a thread: its processes
    communicate in a group that only such functions use. If one process fails, all raise as in `_ordinary_errors`.
    """
    saving = None
    if beside:
        saving = cast(Future, dcp.async_save(tensors, checkpoint_id=folder, process_group=_writers()))

    def write() -> None:
        with _ordinary_errors():
            if saving is None:
                dcp.save(tensors, checkpoint_id=folder)
            else:
                saving.result()

    return write


@functools.lru_cache(maxsize=1)
def _writers() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo"))


def load_shards(folder: Path, into: dict[str, Any]) -> dict[str, Any]:
    """Load shards of any number of processes into tensors of any sharding; raise errors as in `_ordinary_errors`."""
    with _ordinary_errors():
        dcp.load(into, checkpoint_id=folder)
    return into


@contextlib.contextmanager
def _ordinary_errors() -> Iterator[None]:
    """Convert a CheckpointException into an ordinary error.

    Raises:
        OSError: The operating system reported an error, such as a full disk, in at least one process.
        RuntimeError: Any other error.
    """
    try:
        yield
    except CheckpointException as error:  # not a subclass of Exception
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError):
                raise cause from error
        raise RuntimeError(str(causes)) from error


def join_shards(folder: Path) -> dict[str, Any]:
    """Load all tensors of a sharded checkpoint, unsharded, in this process alone.

    The metadata of the format is a pickle, which can execute code: load only checkpoints from a trusted source.
    """
    out = folder / ".joined.tmp"
    try:
        dcp_to_torch_save(folder, out)
        return torch.load(out, weights_only=True)
    finally:
        out.unlink(missing_ok=True)
