"""The common part of state space mixers, which have projections of their own around their scans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from lion.config import Absent, check_settings, fill, setting
from lion.layers.layout import Layout
from lion.layers.mixers.base import Mixer, check_width
from lion.layers.mixers.config import ALTERNATING, AttentionConfig, MixerConfig
from lion.layers.mixers.registry import entry_of, own_settings

OWN = ("conv_width", "expand", "state")


def settings_of_attention() -> dict[str, Absent]:
    """Return the settings of attention alone; stored recipes of earlier versions hold them without an effect."""
    common = {field.name for field in fields(MixerConfig)}
    found = dict(AttentionConfig.absent)
    for field in fields(AttentionConfig):
        plain = list(field.default) if isinstance(field.default, tuple) else field.default
        if field.name not in (*OWN, *common):
            unused = (plain, None, False, "none")
            found[field.name] = Absent(unused, "a setting of attention layers, which state space mixers do not have")
    return found


@dataclass
class StateSpaceConfig(MixerConfig):
    """Settings of a state space mixer. Both values of `block` are its published block.

    `expand` is the number of channels divided by the width of the tokens, `state` the number of state dimensions of a
    channel, and `conv_width` the number of tokens of the convolution; None: 4, or 7 in Hydra.
    """

    expand: int = setting(2, min=1, max=64)
    state: int = setting(16, min=1, max=65_536)
    conv_width: int | None = setting(None, min=1, max=64)

    usual_width: ClassVar[int] = 4
    absent: ClassVar[Mapping[str, Absent]] = MappingProxyType(settings_of_attention())

    def label(self) -> str:
        usual = type(self)()
        changed = [name for name in OWN if getattr(self, name) != getattr(usual, name)]
        return ", ".join(f"{name.replace('_', ' ')} {getattr(self, name)}" for name in changed)


class StateSpaceMixer(Mixer):
    """A mixer of one scan per direction, which projects tokens to its channels by the linear layer `inputs`.

    Raises:
        ValueError: A value out of its range, or a setting that the mixer does not have.
    """

    Config = StateSpaceConfig
    config: StateSpaceConfig
    inputs: nn.Linear

    def __init__(self, dim: int, num_heads: int, mixer: str, config: MixerConfig | None, **settings: Any) -> None:
        super().__init__()
        check_width(dim, num_heads)
        self.config = c = self.resolve(mixer, own_settings(mixer, config, settings, type(self)))
        if c.direction == ALTERNATING:
            raise ValueError(f"direction: {ALTERNATING!r} is for a model, a single layer is 'forward' or 'backward'")
        self.set_form(c.form)

    @staticmethod
    def resolve(name: str, config: Any) -> Any:
        layer = entry_of(name).layer
        check_settings(config)
        if config.score_dropout:
            raise ValueError(f"score_dropout is not available with mixer {name!r}, which computes no scores")
        if config.form not in ("auto", *layer.forms):
            raise ValueError(
                f"form {config.form!r} is not available with mixer {name!r}, which has {', '.join(layer.forms)}"
            )
        return fill(config, {"conv_width": config.usual_width})

    @staticmethod
    def knows_order(name: str, config: Any) -> bool:
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
