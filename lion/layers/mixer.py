"""What every sequence mixer promises: x (B, L, dim) -> (B, L, dim), all at once or token by token."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout
from lion.ops import FORMS
from lion.ops.settings import check_chunk_size


class Facts(NamedTuple):
    """What is told of a mixer: where it was published, what has a decay of its own, what its rows are divided by, what
    of the published block is left out, and what tells the order of tokens in its published models: the hidden states of
    their MD-TPE, and their rotation, if it is no part of the mixer."""

    source: str
    memory: str = "-"
    divisor: str = "-"
    left_out: str = "-"
    tpe: int = 0
    rotation: str | None = None


class Mixer(nn.Module):
    """Mixes the tokens of a sequence. A new kind is one file and its line in `lion.layers.KINDS`.

    It is made as `Kind(dim, num_heads, name, config)`, `name` being that line's.

    A state is a tuple of tensors (a NamedTuple, registered with `state_type`, so that `torch.save` and
    `torch.load(weights_only=True)` take it), of any structure.
    """

    Config: ClassVar[type]  # the recipe's `model.attention` section, `AttentionConfig` or one that extends it
    forms: ClassVar[tuple[str, ...]] = ("full",)  # in which it can run, the first by default

    @staticmethod
    def resolve(name: str, config: Any) -> Any:
        """`config` with every None filled in by the conventions of the mixer called `name`.

        Raises:
            ValueError: A value that is no choice, or two that do not go together.
        """
        raise NotImplementedError

    @staticmethod
    def facts(name: str) -> Facts:
        """What is told of the mixer called `name`."""
        raise NotImplementedError

    @staticmethod
    def knows_order(name: str, config: Any) -> bool:
        """Whether the mixer called `name`, of a config that is resolved, knows the order of tokens by itself."""
        return False

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        """Mix tokens x (B, L, dim), as they stand in `layout`.

        What padding holds reaches neither tokens nor parameters; the output there means nothing, but is finite.
        """
        raise NotImplementedError

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one, so that the mixer streams."""
        return False

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        """The layout of tokens x (B, L, dim) with what this mixer makes of it alone, the same in every layer."""
        return layout

    def initial_state(self, batch: int) -> Any:
        """The empty state, for a stream without a prompt."""
        raise NotImplementedError

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, Any]:
        """Mix a prompt x (B, L, dim); the output (B, L, dim) and the state to go on from, of several segments the last.

        Raises:
            ValueError: The mixer is not causal.
        """
        raise NotImplementedError

    def step(self, x: Tensor, state: Any, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Mix the next token(s) x (B, C, dim); the output, as `forward` over the whole sequence, and the new state.

        Where `valid` (B, C) is False there is padding, which is not remembered.
        """
        raise NotImplementedError

    def set_form(self, form: str, chunk_size: int | None = None) -> None:
        """Run in another form from now on; weights are untouched."""

    def check_form(self, form: str) -> None:
        """Raises ValueError: A form that this mixer does not have."""
        if form not in ("auto", *self.forms):
            raise ValueError(f"form: {type(self).__name__} has only {', '.join(self.forms)}, got {form!r}")


def state_type(kind: type[NamedTuple]) -> type[NamedTuple]:
    """Let `torch.load(weights_only=True)` read states of this type."""
    torch.serialization.add_safe_globals([kind])
    return kind


def check_state(state: Any, kind: type[NamedTuple]) -> None:
    """Raises ValueError: The state of a stream is of another type than `kind`."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state: expected a {kind.__name__}, which prefill returns, and initial_state(batch) without a prompt; "
            f"got {type(state).__name__}"
        )


def mixers_of(model: nn.Module) -> list[Mixer]:
    return [m for m in model.modules() if isinstance(m, Mixer)]


def set_form(model: nn.Module, form: str, chunk_size: int | None = None) -> None:
    """Run every mixer of `model` in this form from now on; weights are untouched.

    Besides "auto" and `FORMS` there is "blockwise", the paper's own Lion-chunk (`lion.ops.blockwise`).

    Raises:
        ValueError: An unknown form, one that a mixer does not have, or a chunk without tokens.
    """
    known = ("auto", *FORMS, "blockwise")
    if form not in known:
        raise ValueError(f"form: expected one of {', '.join(known)}, got {form!r}")
    mixers = mixers_of(model)
    for mixer in mixers:  # all are asked before one is changed
        mixer.check_form(form)
    if chunk_size is not None:
        check_chunk_size(chunk_size)
    for mixer in mixers:
        mixer.set_form(form, chunk_size)


def forms_of(model: nn.Module) -> tuple[str, ...]:
    """The forms that a model can run in."""
    mixers = mixers_of(model)
    return tuple(f for f in mixers[0].forms if all(f in m.forms for m in mixers)) if mixers else Mixer.forms
