"""The common part of state space mixers, which have projections of their own around their scans."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from lion.config import check_settings, fill, setting
from lion.layers.layout import Layout
from lion.layers.mixers.base import Mixer, check_width
from lion.layers.mixers.config import ALTERNATING, AttentionConfig
from lion.layers.mixers.registry import entry_of, own_settings
from lion.layers.norms import NO_NORM
from lion.layers.rotations import NO_ROTATION

OWN = ("expand", "state")
# Settings of attention layers that these mixers have, too. Both values of `block` are their published block.
SHARED = ("block", "conv_width", "direction", "form", "chunk_size")
OFF = (None, 0, False, "none")  # values that turn off what these mixers do not have anyway


@dataclass
class StateSpaceConfig(AttentionConfig):
    """Settings of a state space mixer.

    `expand` is the number of channels divided by the width of the tokens, `state` the number of state dimensions of a
    channel. The convolution has `conv_width` tokens, by default those of the publication.
    """

    expand: int = setting(2, min=1, max=64)
    state: int = setting(16, min=1, max=65_536)

    def label(self) -> str:
        usual = type(self)()
        return ", ".join(f"{name} {getattr(self, name)}" for name in OWN if getattr(self, name) != getattr(usual, name))


class StateSpaceMixer(Mixer):
    """A mixer of one scan per direction, which projects tokens to its channels by the linear layer `inputs`.

    Attributes:
        usual: Values of settings that are None.

    Raises:
        ValueError: A value out of its range, or a setting of attention layers that the mixer does not have.
    """

    Config = StateSpaceConfig
    config: StateSpaceConfig
    usual: ClassVar[dict[str, Any]]
    inputs: nn.Linear

    def __init__(self, dim: int, num_heads: int, mixer: str, config: AttentionConfig | None, **settings: Any) -> None:
        super().__init__()
        check_width(dim, num_heads)
        self.config = c = self.resolve(mixer, own_settings(mixer, config, settings, type(self)))
        if c.direction == ALTERNATING:
            raise ValueError(f"direction: {ALTERNATING!r} is for a model, a single layer is 'forward' or 'backward'")
        self.set_form(c.form)

    @staticmethod
    def resolve(name: str, config: AttentionConfig) -> StateSpaceConfig:
        layer = entry_of(name).layer
        check_settings(config)
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name not in (*OWN, *SHARED) and value != field.default and value not in OFF:
                raise ValueError(
                    f"{field.name}: not available with mixer {name!r}, which has {', '.join((*OWN, *SHARED))}"
                )
        if config.conv_width == 0:
            raise ValueError(f"conv_width: mixer {name!r} has a convolution, expected at least 1")
        if config.form not in ("auto", *layer.forms):
            raise ValueError(
                f"form {config.form!r} is not available with mixer {name!r}, which has {', '.join(layer.forms)}"
            )
        return fill(config, {"rotation": NO_ROTATION, "out_norm": NO_NORM, **layer.usual})

    @staticmethod
    def knows_order(name: str, config: AttentionConfig) -> bool:
        return True

    def check_split(self, count: int) -> None:
        """Accept any number of processes: scans exchange their states, and the convolution its neighbours."""

    @property
    def causal(self) -> bool:
        return self.config.direction == "forward"

    def check_causal(self) -> None:
        if not self.causal:
            raise ValueError(f"direction: only 'forward' streams, this layer has {self.config.direction!r}")

    def set_form(self, form: str, chunk_size: int | None = None) -> None:
        super().set_form(form, chunk_size)
        self.form = form
        self.chunk_size = self.config.chunk_size if chunk_size is None else chunk_size

    def cleaned(self, x: Tensor, layout: Layout) -> Tensor:
        """Return tokens x (B, L, dim) with zeros for padding.

        Raises:
            ValueError: Tokens of another width, or no tokens.
        """
        if x.dim() != 3 or x.shape[-1] != self.inputs.in_features or x.shape[1] == 0:
            raise ValueError(f"x: expected tokens (B, L >= 1, {self.inputs.in_features}), got shape {tuple(x.shape)}")
        return layout.clean(x)
