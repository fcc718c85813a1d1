"""The table of mixers by name, the recipe's `model.mixer`; `mixers/__init__.py` fills it from each file's `FAMILY`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lion.layers.mixers.base import Mixer


class Entry(NamedTuple):
    """A mixer: the class of its layer, and the fields that the class reads (`LinearMixer` for linear mixers)."""

    layer: type[Mixer]
    fields: Any = None


MIXERS: dict[str, Entry] = {}


def own_settings(name: str, config: Any) -> Any:
    """Return the settings as an object of the mixer's own class, which may have more of them."""
    kind = MIXERS[name].layer.Config
    return config if isinstance(config, kind) else kind(**vars(config))
