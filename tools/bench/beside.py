"""The softmax model beside a measured one, and the memory of one layer's mixing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lion.config import ConfigError
from lion.layers.mixers import SOFTMAX, Attention
from lion.models.base import Model, ModelConfig
from lion.runs import build_on_meta
from lion.tasks.base import Task
from lion.trainer.diagnostics import tensor_peak
from tools.compose import resolve


def softmax_beside(own: ModelConfig, against: str | None, task: Task) -> ModelConfig:
    """Return the settings of the softmax model to compare a model `own` with: itself with softmax, or a recipe's model.

    Args:
        own: Settings of the measured model.
        against: A recipe of the same kind of model with softmax, for models whose blocks are not those of a Transformer
            (Hydra, Vim); None: the measured model with softmax.
        task: The task, for which the model is built.

    Raises:
        ConfigError: The recipe has another kind of model or another mixer, or cannot be built for the task.
    """
    if against is None:
        return own.with_mixer(SOFTMAX)
    found = resolve(against).model
    if (found.name, found.mixer) != (own.name, SOFTMAX):
        raise ConfigError(
            f"--against: expected a recipe of model {own.name!r} with {SOFTMAX}, {against} has {found.name!r} with "
            f"{found.mixer}"
        )
    build_on_meta(task, found)
    return found


def mixer_peak(model: Model, once: Callable[[], object], device: torch.device, compiled: bool) -> int | None:
    """Return the peak bytes of the first attention layer's mixing beyond q, k and v; None without such a layer.

    Args:
        model: The model.
        once: Function that runs the model.
        device: Device of the model.
        compiled: Whether to compile the mixing.
    """
    layer = next((m for m in model.modules() if isinstance(m, Attention)), None)
    if layer is None:
        return None
    given: list[tuple[Any, ...]] = []
    handle = layer.register_forward_pre_hook(lambda layer, args: given.append(args))
    once()
    handle.remove()
    x, layout = given[0]
    mix = layer.mix
    if compiled:
        mix = torch.compile(mix, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        q, k, v = (t.contiguous() for t in layer.heads(x))
        mixing = partial(mix, x, q, k, v, layout)
        mixing()
        return tensor_peak(mixing, device)
