"""The base class of all models: it builds a model of this package and gives it the conventions of `transformers`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer

from lion.layers.blocks import BLOCKS
from lion.layers.blocks.base import Block
from lion.layers.constants import Constants
from lion.layers.weights import like
from lion.models import Model
from lion.transformers.config import LionConfig
from lion.transformers.remote import AUTO_MAP, write_code


@cache
def checkpointed(block: type[Block]) -> type[Block]:
    """Return a subclass of a block whose activations `activation_checkpointing_enable` recomputes.

    `prefill` and `step` also pass through `forward`, where the hooks of transformers record hidden states.
    """

    class Checkpointed(block, GradientCheckpointingLayer):  # type: ignore[valid-type, misc]
        def forward(self, *args: Any, method: Callable[..., Any] = block.forward, **named: Any) -> Any:
            with loaded(offload_hooks(self)):
                return method(self, *args, **named)

        def prefill(self, *args: Any) -> tuple[Tensor, Any]:
            return self(*args, method=block.prefill)

        def step(self, *args: Any, **named: Any) -> tuple[Tensor, Any]:
            return self(*args, method=block.step, **named)

        def __reduce__(self) -> tuple[Any, ...]:
            """Pickle the class by `block`, because it has no place in a module."""
            return new_block, (block,), vars(self)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Checkpointed, name, getattr(block, name))
    return Checkpointed


def offload_hooks(block: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return the parts of a block whose weights accelerate has offloaded, with the hooks that load them."""
    first = next(block.parameters(), None)
    if first is None or not first.is_meta:  # nearly every call ends here
        return []
    found = []
    for part in block.modules():
        hook = vars(part).get("_hf_hook")
        for each in getattr(hook, "hooks", (hook,)):
            if getattr(each, "offload", False):
                found.append((part, each))
    return found


@contextmanager
def loaded(hooks: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Load the weights of all parts of a block at once, because its parts also read weights of each other."""
    for part, hook in hooks:
        hook.pre_forward(part)
        hook.offload = False  # until the end, calls of the part leave the weights where they are
    try:
        yield
    finally:
        for part, hook in hooks:
            hook.offload = True
            hook.post_forward(part, None)


def new_block(block: type[Block]) -> Block:
    """Return an instance of `checkpointed(block)` without attributes, which unpickling adds."""
    kind = checkpointed(block)  # type: ignore[arg-type]  # mypy takes no class for hashable
    return kind.__new__(kind)


class LionPreTrainedModel(PreTrainedModel):
    """A model of this package in `self.model`, whose weights keep their names after the prefix `model.`.

    A subclass sets `names` and `build`. Weights without the prefix, as in a checkpoint of a run, load as well.

    Attributes:
        names: By `model.name` of the configuration: the name of the model that is built from it.
    """

    config_class = LionConfig
    config: LionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = [block.__name__ for block in BLOCKS.values()]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012
    names: ClassVar[dict[str, str]]

    def __init__(self, config: LionConfig) -> None:
        super().__init__(copy.deepcopy(config))  # `settings` changes it, and other models may share it
        self.model = self.build()
        for block in self.model.units():
            block.__class__ = checkpointed(type(block))  # type: ignore[arg-type]
        self.post_init()

    def build(self) -> Model:
        """Return a new model of this package, with random weights."""
        raise NotImplementedError

    def settings(self) -> Any:
        """Return the settings of the model that is built from the configuration."""
        return self.config.settings(self.names, type(self).__name__)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialize all weights and buffers that no checkpoint has set, with those of a new model."""
        tensors: dict[str, Tensor] = {}
        for path, part in self.model.named_modules():
            if initialized(part):
                continue
            own = dict(part.named_parameters(path, recurse=False))
            own |= part.named_buffers(path, recurse=False)
            tensors |= {name: x for name, x in own.items() if not initialized(x)}
        super().initialize_weights()
        for part in self.model.modules():
            if isinstance(part, Constants) and part.on_meta:
                device = like(self.model).device
                if device.type == "meta":
                    device = torch.device("cpu")
                part.remake(device)
        if not tensors:
            return
        if any(isinstance(x, nn.Parameter) for x in tensors.values()):
            new = self.build()
        else:
            with initialization.no_init_weights():
                new = self.build()
        values: dict[str, Tensor] = dict(new.named_parameters())
        values.update(new.named_buffers())
        for name, value in values.items():
            if name in tensors:
                tensors[name].copy_(value)

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the model, and the code with which the Auto classes load it by `trust_remote_code=True`."""
        self.config.auto_map = AUTO_MAP
        write_code(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: `save_pretrained` writes its own code."""

    def share_of_batch(self, loss: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """Return the share of the loss of a micro-batch in the mean over the `count` labels of a whole batch, if known.

        transformers returns this share for classes alone, else the mean over the micro-batch.
        """
        if count is None or self.config.problem_type == "single_label_classification":
            return loss
        return loss * labels.numel() / count

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize embeddings that `resize_token_embeddings` adds; `initialize_weights` does all others."""
        if isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=self.settings().init_std)


def initialized(part: Tensor | nn.Module) -> bool:
    """Return whether a checkpoint has set a tensor, or all tensors of a module, which `transformers` marks."""
    return getattr(part, "_is_hf_initialized", False)
