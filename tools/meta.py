"""Memory, products and exchange of a training pass, counted on the `meta` device without computing anything."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lion.layers.constants import constants_of
from lion.models import Model
from lion.ops import Part
from lion.recipe import Recipe
from lion.runs import build_on_meta
from lion.tasks import Task


class FusedSoftmax(TorchFunctionMode):
    """A mode in which softmax attention saves the same tensors for the backward pass as its fused kernels.

    The tensors are queries, keys, values and outputs. Otherwise, attention on the `meta` device would save all scores.
    """

    class SavedTensors(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            y = q.new_empty(*q.shape[:-1], v.shape[-1])
            ctx.save_for_backward(q, k, v, y)
            return y

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k, v, *_ = args
            return self.SavedTensors.apply(q, k, v)
        return func(*args, **(kwargs or {}))


def activation_bytes(task: Task, recipe: Recipe, micro: int, sharing: int = 1) -> int:
    """Estimate the bytes of activations that are saved for the backward pass of a micro-batch.

    With `sharing` processes for each row, these are the bytes of one process.
    """
    seen: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        seen[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    model = part_on_meta(task, recipe, sharing)
    held = [*model.parameters(), *model.buffers(), *constants_of(model)]
    own = {t.untyped_storage()._cdata for t in held}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), FusedSoftmax():
        loss = task.loss(model, task.example(micro, "meta")).loss
    kept = sum(size for storage, size in seen.items() if storage not in own)
    del loss
    if recipe.trainer.precision == "bf16":
        return kept // 2
    return kept


def part_on_meta(task: Task, recipe: Recipe, sharing: int) -> Model:
    """Return the model on the `meta` device, as the first of `sharing` processes for each row computes it."""
    model = build_on_meta(task, recipe.model)
    if sharing > 1:
        model.part = Part("", 0, sharing)
    return model


class Received(TorchDispatchMode):
    """A mode that counts collectives of `sharing` processes, and the bytes that come into each process.

    Attributes:
        calls: Number of collectives.
        bytes: Their bytes: a piece from each other process in an all-to-all, all others by a ring.
    """

    def __init__(self, sharing: int) -> None:
        super().__init__()
        others = sharing - 1
        self.rounds = {
            "all_gather_into_tensor": others,
            "reduce_scatter_tensor": others / sharing,
            "all_reduce": 2 * others / sharing,
            "all_to_all_single": others / sharing,
        }
        self.calls, self.bytes = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" and name in self.rounds:
            self.calls += 1
            self.bytes += self.rounds[name] * args[0].nbytes
        return func(*args, **(kwargs or {}))


class Pass(NamedTuple):
    """The work of a forward and backward pass of a micro-batch in one process.

    Attributes:
        flops: FLOPs of matrix products.
        calls: Number of exchanges with the processes that share its rows.
        received: Bytes that come into the process in these exchanges.
    """

    flops: float
    calls: int
    received: float


def count_pass(task: Task, recipe: Recipe, micro: int, sharing: int = 1) -> Pass:
    """Count the work of one of `sharing` processes for each row in a pass of `micro` samples."""
    model = part_on_meta(task, recipe, sharing).train()
    with FlopCounterMode(display=False) as counter, Received(sharing) as received:
        task.loss(model, task.example(micro, "meta")).loss.backward()
    return Pass(counter.get_total_flops(), received.calls, received.bytes)
