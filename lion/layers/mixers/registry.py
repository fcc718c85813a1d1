"""The table of mixers by name, the recipe's `model.mixer`; `mixers/__init__.py` fills it from each file's `FAMILY`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from lion.config import absent_from, nearest
from lion.ops.settings import hint

if TYPE_CHECKING:
    from lion.layers.mixers.base import Mixer
    from lion.layers.mixers.parts import Parts


class Entry(NamedTuple):
    """An entry of `MIXERS`.

    Attributes:
        layer: The class of the layer.
        fields: The `LinearMixer` of a linear mixer.
        published: Parts of the published block of a mixer of softmax; None: none.
    """

    layer: type[Mixer]
    fields: Any = None
    published: Parts | None = None


MIXERS: dict[str, Entry] = {}


def entry_of(name: str) -> Entry:
    """Return the entry of a mixer.

    Raises:
        ValueError: An unknown mixer.
    """
    if not isinstance(name, str) or name not in MIXERS:
        raise ValueError(f"mixer: unknown mixer {name!r}, {nearest(name, MIXERS)}")
    return MIXERS[name]


def own_settings(
    name: str,
    config: Any = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    layer: type[Mixer] | None = None,
) -> Any:
    """Return a config of the class of a mixer, which may have settings of its own.

    Args:
        name: The mixer.
        config: A config of this or another class; None: the defaults of the mixer. Settings that the mixer does not
            have must have their defaults.
        settings: Values by name, in place of those of `config`.
        layer: The class that is being constructed; None: that of the mixer.

    Raises:
        ValueError: An unknown mixer, one of another class, or a setting that it does not have.
    """
    of_mixer = entry_of(name).layer
    if layer is not None:
        classes = {entry.layer for entry in MIXERS.values()}
        own = next((base for base in layer.__mro__ if base in classes), of_mixer)
        if own is not of_mixer:
            fits = ", ".join(other for other, entry in MIXERS.items() if entry.layer is own)
            raise ValueError(f"mixer: expected {fits} in {layer.__name__}, got {name!r}, a {of_mixer.__name__}")
    kind = of_mixer.Config
    if config is not None and not is_dataclass(config):
        raise ValueError(f"config: expected a {kind.__name__}, got {type(config).__name__}; settings go by name")
    names = [field.name for field in fields(kind)]
    given = dict(settings)
    for field in () if config is None else fields(config):
        value = getattr(config, field.name)
        if field.name in names or value != field.default:
            given.setdefault(field.name, value)
    for key in [key for key in given if key not in names]:
        absent = absent_from(kind, key)
        if absent is None:
            raise ValueError(f"{key}: unknown setting of mixer {name!r}, {hint(key, names)}")
        if absent.has_effect(given.pop(key)):
            raise ValueError(f"{key}: {absent.instead}")
    return replace(config, **settings) if isinstance(config, kind) else kind(**given)
