"""The interface of sequence mixers: x (B, L, dim) -> (B, L, dim), all at once or token by token."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lion.config import check_settings, fill
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers.config import AttentionConfig, MixerConfig
from lion.layers.norms import NO_NORM
from lion.layers.rotations import NO_ROTATION
from lion.layers.weights import like
from lion.ops import FORMS
from lion.ops.settings import check_chunk_size, choice, number


class MixerInfo(NamedTuple):
    """Metadata of a mixer.

    Attributes:
        source: Publication.
        memory: What has a separate decay.
        divisor: What the rows are divided by.
        block: Parts that `attention.block: published` adds.
        left_out: Parts of the published block that are left out.
        tpe: Number of hidden states of MD-TPE, which encodes the order of tokens in the published models; 0: none.
        rotation: Rotation that encodes the order of tokens in the published models, if it is not part of the mixer.
    """

    source: str
    memory: str = "-"
    divisor: str = "-"
    block: str = "-"
    left_out: str = "-"
    tpe: int = 0
    rotation: str | None = None


class Mixer(nn.Module):
    """Base class of layers that mix the tokens of a sequence. A new family is one file with its table `FAMILY`.

    The constructor is `Kind(dim, num_heads, name, config)`, where `name` is the key in `MIXERS`. A mixer defines
    `forward`; all else has a default.

    A state is a tuple of tensors of any structure: a NamedTuple, registered with `state_type`, so that `torch.save` and
    `torch.load(weights_only=True)` accept it.
    """

    Config: ClassVar[type[MixerConfig]] = AttentionConfig  # class of the recipe's `model.attention` section
    proj: nn.Linear  # writes into the residual stream
    forms: ClassVar[tuple[str, ...]] = ("full",)  # in which the mixer can run; the first is the default

    @property
    def unrolled(self) -> bool:
        """Return whether export unrolls a loop over tokens; the exported graph then has a fixed length."""
        return False

    @staticmethod
    def resolve(name: str, config: Any) -> Any:
        """Return `config` with every None replaced by the convention of the mixer `name`.

        Raises:
            ValueError: An invalid value, or two values that cannot be combined.
        """
        check_settings(config)
        return fill(config, {"rotation": NO_ROTATION, "out_norm": NO_NORM})

    @staticmethod
    def info(name: str) -> MixerInfo:
        """Return the metadata of the mixer `name`."""
        return MixerInfo(source="-")

    @staticmethod
    def knows_order(name: str, config: Any) -> bool:
        """Return whether the mixer's outputs depend on the order of tokens without position embeddings.

        `config` is resolved.
        """
        return False

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        """Mix tokens x (B, L, dim), whose positions, padding and segments are in `layout`.

        The content of padding affects neither tokens nor parameters. The output at padding has no meaning, but is
        finite.
        """
        raise NotImplementedError

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one, so that the mixer streams."""
        return False

    def check_split(self, count: int) -> None:
        """Check that the tokens of a row may be split over `count` processes (`Layout.split`).

        Raises:
            ValueError: They may not, with this mixer or these settings.
        """
        raise ValueError(f"mixer: {type(self).__name__} does not split rows over processes")

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        """Add to the layout of tokens x (B, L, dim) the fields that all layers of this mixer share; return it."""
        return layout

    @property
    def like(self) -> Tensor:
        """An empty tensor with dtype and device of a state: those of `proj`, or else of another part."""
        return like(self.proj, like(self))

    def initial_state(self, batch: int) -> Any:
        """Return the empty state, for a stream without a prompt."""
        raise NotImplementedError

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, Any]:
        """Mix a prompt x (B, L, dim). Return the output (B, L, dim), and the state after the last segment.

        Raises:
            ValueError: The mixer is not causal.
        """
        raise NotImplementedError

    def step(self, x: Tensor, state: Any, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Mix the next tokens x (B, C, dim). Return the output, as of `forward` over all tokens, and the new state.

        `valid` (B, C) is False for padding, which does not change the state. Outside of `torch.inference_mode` or
        `torch.no_grad`, a state keeps the graph of all tokens before it.
        """
        raise NotImplementedError

    def set_form(self, form: str, chunk_size: int | None = None) -> None:
        """Run in another form from now on; weights are unchanged.

        Raises:
            ValueError: The mixer does not have this form, or a chunk size below 1.
        """
        self.check_form(form)
        if chunk_size is not None:
            check_chunk_size(chunk_size)

    def check_form(self, form: str) -> None:
        """Check that this mixer has the form.

        Raises:
            ValueError: The mixer does not have this form.
        """
        if form not in ("auto", *self.forms):
            raise ValueError(f"form: {type(self).__name__} has only {', '.join(self.forms)}, got {form!r}")


def check_width(dim: int, num_heads: int) -> None:
    """Check that `dim` is a multiple of `num_heads`.

    Raises:
        ValueError: It is not, or one of them is not a whole number.
    """
    number("num_heads", num_heads, Integral, 1)
    number("dim", dim, Integral, 1)
    if dim % num_heads:
        raise ValueError(f"dim: expected a multiple of num_heads={num_heads}, got {dim}")


def state_type(kind: type[NamedTuple]) -> type[NamedTuple]:
    """Register a type of state, so that `torch.load(weights_only=True)` can load it."""
    torch.serialization.add_safe_globals([kind])
    return kind


def check_state(state: Any, kind: type[NamedTuple], x: Tensor) -> None:
    """Check the state of a stream whose next tokens are x (B, C, dim).

    Raises:
        ValueError: A state of another type than `kind`, or of another number of sequences.
    """
    if not isinstance(state, kind):
        raise ValueError(
            f"state: expected a {kind.__name__}, which prefill returns, and initial_state(batch) without a prompt; "
            f"got {type(state).__name__}"
        )
    for batch in batches(state):
        if batch != x.shape[0]:
            raise ValueError(f"state: made for {batch} sequences, got {x.shape[0]}")


def batches(state: Any) -> Iterator[int]:
    """Return the numbers of sequences of all tensors of a state."""
    if isinstance(state, Tensor):
        yield state.shape[0]
    for part in state if isinstance(state, tuple) else ():
        yield from batches(part)


def mixers_of(model: nn.Module) -> list[Mixer]:
    """Return all mixers of a model, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, Mixer)]


def set_form(model: nn.Module, form: str, chunk_size: int | None = None) -> None:
    """Run every mixer of `model` in this form, "auto" or one of `FORMS`, from now on; weights are unchanged.

    Without `chunk_size`, chunks have the size of the mixer's config. Training with score dropout needs "full" or
    "auto".

    Raises:
        ValueError: An unknown form, a form that a mixer does not have, a chunk size below 1, or a model without mixers.
    """
    choice("form", form, ("auto", *FORMS))
    mixers = mixers_of(model)
    if not mixers:
        raise ValueError(f"model: {type(model).__name__} has no mixers of lion, and so no forms")
    for mixer in mixers:  # check all mixers before changing one
        mixer.check_form(form)
    if chunk_size is not None:
        check_chunk_size(chunk_size)
    for mixer in mixers:
        mixer.set_form(form, chunk_size)


def forms_of(model: nn.Module) -> tuple[str, ...]:
    """Return the forms that all mixers of a model can run in."""
    mixers = mixers_of(model)
    return tuple(f for f in mixers[0].forms if all(f in m.forms for m in mixers)) if mixers else Mixer.forms
