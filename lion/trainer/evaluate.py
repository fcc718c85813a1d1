"""Evaluation of a model on a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lion.layers.decay import Decay, Gating
from lion.tasks.base import Task, to_device
from lion.tasks.data import Batch
from lion.trainer.runtime import Runtime


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    runtime: Runtime,
    *,
    precision: str = "fp32",
    stop: Callable[[], bool] = lambda: False,
    collect: Callable[[Tensor], None] | None = None,
) -> dict[str, float] | None:
    """Metrics over all samples and processes: sums first, then one division.

    `collect` is given the model's outputs of real samples, in order (one process). None when `stop` says so.
    """
    training = model.training
    model.eval()
    totals: dict[str, list[Tensor]] = {}
    try:
        for batch in batches:
            if stop():
                return None
            batch = to_device(batch, runtime.device)
            with runtime.autocast(precision):
                sums, out = task.evaluate(model, batch)
            for name, pair in sums.items():
                pair = [x.double() for x in pair]
                totals[name] = [a + b for a, b in zip(totals[name], pair)] if name in totals else pair
            if collect is not None:
                collect(out[batch["mask"]])
    finally:
        model.train(training)
    flat = runtime.sum(*[x for pair in totals.values() for x in pair]).tolist()
    return {name: flat[2 * i] / max(flat[2 * i + 1], 1) for i, name in enumerate(totals)}


def all_finite(results: dict[str, dict[str, float]], weights: list[Tensor]) -> bool:
    """Whether every metric and every weight is."""
    metrics = (value for part in results.values() for value in part.values())
    return all(map(math.isfinite, metrics)) and all(torch.stack([w.isfinite().all() for w in weights]).tolist())


def decay_values(model: nn.Module, batch: Batch, task: Task) -> dict[str, Tensor]:
    """Every decay lambda that the layers use on this batch, by layer (the paper's Fig. 12)."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, gating: Gating) -> None:
            if gating.log_decay is not None:
                name_of_layer = name.removeprefix("encoder.").replace(".attention.decays", "").removesuffix(".0")
                found[name_of_layer] = gating.log_decay.exp().float().cpu()

        return hook

    hooks = [m.register_forward_hook(keep(n)) for n, m in model.named_modules() if isinstance(m, Decay)]
    if not hooks:
        return {}
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            task.evaluate(model, batch)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return found
