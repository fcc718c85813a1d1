"""Construction of the layer that a command line names, and its adapter."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lion.config import ConfigError, nearest
from lion.layers.mixers.base import Mixer
from lion.yaml_text import parse_yaml
from tools.conform.measure import error_line
from tools.conform.subject import Adapt, Calls, Subject, adapt_mixer, adapt_plain

LARGEST = 4096  # largest width to try where it is not known


def open_subject(
    place: str, init: str = "", *, dim: int | None = None, causal: bool = False, adapter: Path | None = None
) -> Subject:
    """Construct the layer `MODULE:CLASS` or `FILE.py:CLASS` with the arguments "name=value,..", and find its adapter.

    The adapter is `adapt` of the file `adapter`, else of the file of the layer, else the adapter of `lion`'s mixers,
    else the layer itself.

    Raises:
        ConfigError: An unknown module, class or argument, a class that is not a layer, a constructor or an adapter that
            fails, or a layer for which no width D is found.
    """
    module, make = find_maker(place)
    settings = parse_init(init)
    layer = construct(place, make, settings)
    adapt = adapt_plain
    if isinstance(layer, Mixer):
        adapt = adapt_mixer
    if adapter:
        adapt = getattr(load_file(adapter, "--adapter: "), "adapt", None)
        if not callable(adapt):
            raise ConfigError(f"--adapter: {adapter} defines no function or class `adapt`")
    elif place.rpartition(":")[0].endswith(".py"):
        adapt = getattr(module, "adapt", adapt)
    width = find_width(place, layer, adapt, [dim] if dim else widths(make, layer, settings))
    return Subject(f"{place}({as_arguments(settings)})", layer, adapt, width, causal)


def as_arguments(settings: dict[str, Any]) -> str:
    """Return settings as they stand in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def find_maker(place: str) -> tuple[ModuleType, Callable[..., Any]]:
    """Return the module and the class, or the function that returns a layer, that `MODULE:CLASS` names."""
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise ConfigError(f"{place}: expected MODULE:CLASS or FILE.py:CLASS, such as lion:LionAttention")
    file = source.endswith(".py")
    module = load_file(Path(source)) if file else load_module(source)
    public = [name for name in dir(module) if not name.startswith("_")]
    makers = []
    for each in public:
        value = vars(module).get(each)
        if is_layer(value) or (file and inspect.isfunction(value)):
            makers.append(each)
    others = "no layer there"
    if makers:
        others = f"layers there: {', '.join(makers[:8])}"
    if len(makers) > 8:
        others += ", .."
    if not hasattr(module, name):
        raise ConfigError(f"{place}: {source} has no {name}, {nearest(name, makers or public, others)}")
    make = getattr(module, name)
    if not inspect.isfunction(make) and not is_layer(make):
        raise ConfigError(f"{place}: {name} is not a class of torch.nn.Module, {nearest(name, makers, others)}")
    return module, make


def is_layer(value: Any) -> bool:
    """Return whether a value is a class of layers."""
    return isinstance(value, type) and issubclass(value, nn.Module)


def load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):  # a module that this module imports
            raise ConfigError(f"{name}: cannot be imported: {error_line(error)}") from None
        parent, _, leaf = missing.rpartition(".")
        path = None
        if parent:
            path = getattr(sys.modules.get(parent), "__path__", [])
        known = [module.name for module in pkgutil.iter_modules(path)]
        hint = nearest(leaf, known, "is it installed in this Python?")
        raise ConfigError(f"{name}: no module {missing!r}, {hint}") from None
    except Exception as error:
        raise ConfigError(f"{name}: cannot be imported: {error_line(error)}") from None


def load_file(path: Path, option: str = "") -> ModuleType:
    """Import a file, which may import other files of its folder."""
    if not path.is_file():
        names = [str(p) for p in path.parent.glob("*.py")]
        raise ConfigError(f"{option}{path}: no such file, {nearest(str(path), names, 'expected a Python file')}")
    spec = importlib.util.spec_from_file_location(f"conform_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{option}{path}: cannot be imported: {error_line(error)}") from None
    return module


def parse_init(text: str) -> dict[str, Any]:
    """Parse arguments such as "dim=64,scales=[1, 2],mixer=gla"; values are those of YAML."""
    settings: dict[str, Any] = {}
    if not text.strip():
        return settings
    for part in re.split(r",(?=\s*\w+\s*=)", text):
        name, sign, value = map(str.strip, part.partition("="))
        if not sign or not name.isidentifier():
            raise ConfigError(f"--init: expected NAME=VALUE,.. such as dim=64,num_heads=4, got {part!r}")
        settings[name] = parse_yaml(value, source=f"--init: {name}")
        if isinstance(settings[name], str):
            with contextlib.suppress(ValueError):  # YAML reads 1e-3 as text
                settings[name] = float(value)
    return settings


def construct(place: str, make: Callable[..., Any], settings: dict[str, Any]) -> nn.Module:
    """Construct the layer from a fixed seed."""
    parameters = parameters_of(make)
    named = []
    missing = []
    open_ = False  # whether any argument is taken
    for each in parameters:
        if each.kind is each.VAR_KEYWORD:
            open_ = True
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            named.append(each.name)
            if each.default is each.empty and each.name not in settings:
                missing.append(f"{each.name}=..")
    for name in settings:
        if name not in named and not open_:
            raise ConfigError(f"--init: {place} has no argument {name!r}, {nearest(name, named)}")
    if missing:
        raise ConfigError(f"--init: {place} needs {', '.join(missing)}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = make(**settings)
    except Exception as error:
        raise ConfigError(f"--init: {place}({as_arguments(settings)}) raises {error_line(error)}") from None
    if not isinstance(layer, nn.Module):
        raise ConfigError(f"{place}: returned {type(layer).__name__}, expected a torch.nn.Module")
    return layer


def parameters_of(make: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, or of the constructor of a class, without `self`."""
    if isinstance(make, type):
        _, *parameters = inspect.signature(make.__init__).parameters.values()
        return parameters
    return list(inspect.signature(make).parameters.values())


def widths(make: Callable[..., Any], layer: nn.Module, settings: dict[str, Any]) -> list[int]:
    """Return the widths to try: whole numbers among the arguments and their defaults, then sizes of parameters."""
    found = list(settings.values())
    for each in parameters_of(make):
        if each.name not in settings:
            found.append(each.default)
    for parameter in layer.parameters():
        found += reversed(parameter.shape)
    found.append(64)
    return list(dict.fromkeys(size for size in found if type(size) is int and 1 < size <= LARGEST))


def find_width(place: str, layer: nn.Module, adapt: Adapt, candidates: list[int]) -> int:
    """Return the first width D for which the layer maps (1, 8, D) to (1, 8, D)."""
    first = None
    for width in candidates:
        try:
            run = Calls(copy.deepcopy(layer).eval(), adapt)
            with torch.no_grad():
                run(torch.randn(1, 8, width))
            return width
        except Exception as error:
            first = first or f"{(1, 8, width)} {error_line(error)}"
    if len(candidates) == 1:
        raise ConfigError(f"{place}: forward fails with tokens {first}; --adapter sets how to call the layer")
    raise ConfigError(f"{place}: no width works; tokens {first}; --dim sets the width, --adapter how to call the layer")
