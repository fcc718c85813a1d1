"""Strict configuration: conversion of nested mappings to typed dataclasses, with errors that name key and file.

A section is a dataclass, and its annotations are the schema. `setting(...)` adds a range or choices, or marks a field
that does not affect the course of training (`free`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from typing import Any, NamedTuple, TypeVar

C = TypeVar("C")
LARGEST_INT = 2**63 - 1  # limit of seeds and counters
DEEPEST = 20  # maximum number of names in a dotted key
LIMITS = (("min", "at least", operator.ge), ("max", "at most", operator.le), ("above", "more than", operator.gt))
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # characters that are invalid in files and paths


class ConfigError(Exception):
    """Error for invalid user input; the message is one line with the error, its place and the nearest valid choice."""

    def __str__(self) -> str:
        """Return the message as one line, with unprintable characters escaped."""
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


def setting(
    default: Any = MISSING,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    choices: typing.Iterable[str] | None = None,
    free: bool | str = False,
    hint: str = "",
) -> Any:
    """Define a dataclass field with a range (`min`, `max` inclusive, `above` exclusive), `choices`, or `free`.

    A `free` field may change when a run is resumed; if it is "rounding", results are then rounded differently. `hint`
    ends the error for a value that is not one of `choices`.
    """
    if choices is not None and not isinstance(choices, Mapping):  # a table keeps growing, as that of mixers
        choices = tuple(choices)
    metadata = {"min": min, "max": max, "above": above, "choices": choices, "free": free, "hint": hint}
    return dataclasses.field(default=default, metadata=metadata)


def first_line(error: Exception) -> str:
    """Return the first line of the message of an error; empty without a message."""
    return (str(error).splitlines() or [""])[0]


def nearest(name: str, names: typing.Iterable[str], otherwise: str | None = None) -> str:
    """Return a hint with the closest valid name; if none is close, `otherwise` or a list of all valid names."""
    names = sorted(map(str, names))
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    if close:
        longer = [n for n in close if n.startswith(str(name))]
        return f"did you mean {(longer or close)[0]!r}?"
    if otherwise is not None:
        return otherwise
    if not names:
        return "nothing is valid here"
    return f"valid: {', '.join(names)}"


def nearest_divisor(number: int, of: int) -> int:
    """Return the divisor of `of` that is closest to `number`."""
    return min((n for n in range(1, of + 1) if of % n == 0), key=lambda n: abs(n - number))


Source = Callable[[str], str]  # returns the file (or "override") that a dotted key comes from


class Word(str):
    """The text of an override; a field that does not hold text reads it as YAML."""


class Section:
    """A dataclass in which the types of some fields depend on the values of others."""

    @classmethod
    def types(cls, values: dict[str, Any]) -> dict[str, type]:
        """Return the annotations that replace those of the class for these values, which are not checked yet."""
        return {}


@functools.cache
def hints_of(schema: type) -> Mapping[str, Any]:
    """Return the annotations of a dataclass; they are evaluated once."""
    return types.MappingProxyType(typing.get_type_hints(schema))


class Absent(NamedTuple):
    """A setting that a class does not have: values without an effect, which stored recipes hold, and what to say.

    A class names such settings in its attribute `absent`.
    """

    unused: tuple[Any, ...]
    instead: str

    def has_effect(self, value: Any) -> bool:
        return (list(value) if isinstance(value, tuple) else value) not in self.unused


def absent_from(schema: type, name: str) -> Absent | None:
    return getattr(schema, "absent", {}).get(name)


def build(schema: type, values: Any, *, source: Source, key: str = "") -> Any:
    """Build an instance of the dataclass `schema` from the mapping at `key` of the recipe.

    Raises:
        ConfigError: An unknown key, a missing key, a wrong type or a value out of range.
    """
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{source(key)}: {key or 'recipe'}: expected a section of keys, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(schema)}
    hints = hints_of(schema)
    if issubclass(schema, Section):
        hints = {**hints, **schema.types(values)}
    for name, value in values.items():
        absent = absent_from(schema, name)
        if absent is not None:
            if absent.has_effect(value):
                raise ConfigError(f"{source(join(key, name))}: {join(key, name)}: {absent.instead}")
        elif name not in fields:
            below = sorted(keys_named(name, schema, values, key), key=lambda path: path.count("."))
            likely = nearest(name, fields)
            if below:
                likely = f"did you mean {' or '.join(map(repr, below[:3]))}?"
            raise ConfigError(f"{source(join(key, name))}: unknown key '{join(key, name)}': {likely}")
    arguments = {}
    for name, f in fields.items():
        path = join(key, name)
        if name in values:
            arguments[name] = convert(hints[name], values[name], source=source, key=path)
            check_range(f, arguments[name], source=source, key=path)
        elif dataclasses.is_dataclass(hints[name]):
            arguments[name] = build(hints[name], {}, source=source, key=path)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{source(path)}: missing key '{path}'")
    try:
        return schema(**arguments)
    except ValueError as error:  # from `__post_init__`, which checks fields against each other
        raise ConfigError(f"{source(key)}: {join(key, error)}") from None


def keys_named(name: str, schema: Any, values: Any, key: str) -> Iterator[str]:
    """Yield the dotted keys of all fields called `name` in the sections below `schema`.

    A section of `values` that is built already is searched by its own class.
    """
    for section, hint in hints_of(schema).items():
        if isinstance(values, dict):
            value = values.get(section)
        else:
            value = getattr(values, section, None)
        kind: Any = hint
        if dataclasses.is_dataclass(value):
            kind = type(value)
        if dataclasses.is_dataclass(kind):
            path = join(key, section)
            if name in {f.name for f in dataclasses.fields(kind)}:
                yield join(path, name)
            yield from keys_named(name, kind, value, path)


def join(key: str, name: Any) -> str:
    if not key:
        return str(name)
    return f"{key}.{name}"


def convert(hint: Any, value: Any, *, source: Source, key: str) -> Any:
    """Convert `value` to the annotated type; text such as "1e-4", which YAML does not read as a number, becomes one."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if isinstance(value, Word) and hint is not str and origin not in (types.UnionType, typing.Union):
        from lion.yaml_text import parse_yaml  # a layer alone needs no YAML

        value = parse_yaml(value, source=f"{source(key)}: {key}")
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        errors = []
        options = [a for a in args if a is not type(None)]
        for option in sorted(options, key=lambda a: a is str):
            try:
                return convert(option, value, source=source, key=key)
            except ConfigError as e:
                errors.append(e)
        raise errors[0]
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, source=source, key=key)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{source(key)}: {key}: expected a list such as [{value}, {value}], got {value!r}")
        kinds: typing.Sequence[Any] = args
        if origin is list or Ellipsis in args:
            kinds = [args[0]] * len(value)
        if len(kinds) != len(value):
            raise ConfigError(f"{source(key)}: {key}: expected {len(kinds)} values separated by commas, got {value!r}")
        converted = []
        for i, (kind, item) in enumerate(zip(kinds, value)):
            converted.append(convert(kind, item, source=source, key=f"{key}[{i}]"))
        return origin(converted)
    if origin is dict or hint is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{source(key)}: {key}: expected a section of keys, got {value!r}")
        return {name: convert(Any, inner, source=source, key=join(key, name)) for name, inner in value.items()}

    if hint is str:
        return convert_text(value, source=source, key=key)
    number = value
    if isinstance(value, str) and hint in (int, float):
        with contextlib.suppress(ValueError):
            number = float(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint in (int, float) and isinstance(number, (int, float)) and not isinstance(number, bool):
        if hint is float and abs(number) <= sys.float_info.max:
            return float(number)
        if hint is int and abs(number) <= LARGEST_INT and number == int(number):
            return int(number)
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    raise ConfigError(f"{source(key)}: {key}: expected {names.get(hint, hint)}, got {value!r}")


def convert_text(value: Any, *, source: Source, key: str) -> str:
    """Return text; a whole number in a file, such as 20240101 for a name, stands for its digits.

    Raises:
        ConfigError: `value` is not text, or cannot be a path.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ConfigError(f"{source(key)}: {key}: expected text, got {value!r}; write it in quotes")
    if _NO_TEXT.search(value):
        raise ConfigError(f"{source(key)}: {key}: {value!r} is not UTF-8 text; rename the file or folder")
    return str(value)


def check_range(field: dataclasses.Field, value: Any, *, source: Source, key: str) -> None:
    """Check that a value is within the choices and the range of its field.

    Raises:
        ConfigError: The value is not a choice or out of range.
    """
    rule = field.metadata
    if value is None or not rule:
        return
    if rule["choices"] and value not in rule["choices"]:
        hint = nearest(value, rule["choices"])
        if rule["hint"]:
            hint = f"{hint}; {rule['hint']}"
        raise ConfigError(f"{source(key)}: {key}: {value!r} is not a choice, {hint}")
    for name, words, holds in LIMITS:
        limit = rule[name]
        if limit is not None and not holds(value, limit):
            raise ConfigError(f"{source(key)}: {key}: expected {words} {limit}, got {value!r}")


def check_settings(config: Any) -> None:
    """Check types, choices and ranges of a dataclass that was constructed without `build`; lists become tuples.

    Raises:
        ValueError: A field is of another type, not one of its choices, or out of range.
    """
    kind: type = type(config)
    hints = hints_of(kind)

    def source(key: str) -> str:
        return kind.__name__

    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        try:
            right = value
            if not dataclasses.is_dataclass(value):
                right = convert(hints[f.name], value, source=source, key=f.name)
            if isinstance(right, tuple) and isinstance(value, list):
                setattr(config, f.name, right)
            elif right != value:  # text in place of a number
                raise ConfigError(f"{type(config).__name__}: {f.name}: expected {right!r}, got {value!r}")
            check_range(f, value, source=source, key=f.name)
        except ConfigError as error:
            raise ValueError(str(error)) from None


def to_dict(config: Any) -> Any:
    """Convert a dataclass to the plain mapping from which `build` makes it again."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, (list, tuple)):
        return [to_dict(v) for v in config]
    return config


def changed(config: Any) -> dict[str, Any]:
    """Return the settings that differ from the defaults of their dataclasses, as plain values by dotted key.

    Settings without a default, and all names of sections (`name`), are always included.
    """
    found: dict[str, Any] = {}
    for key, f, value in settings_of(config):
        usual = f.default
        if f.default_factory is not MISSING:
            usual = f.default_factory()
        if f.name == "name" or value != usual:
            found[key] = to_dict(value)
    return found


def settings_of(config: Any, key: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield the dotted key, field and value of every setting of a dataclass and of the sections below it."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        path = join(key, f.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, path)
        else:
            yield path, f, value


def rounding(config: Any) -> dict[str, Any]:
    """Return the settings that are free up to rounding (`setting`), by dotted key."""
    return {path: value for path, f, value in settings_of(config) if f.metadata.get("free") == "rounding"}


def present(value: C | None, name: str) -> C:
    """Return the value called `name`.

    Raises:
        ValueError: It is None.
    """
    if value is None:
        raise ValueError(f"{name}: missing")
    return value


def fill(config: C, values: dict[str, Any]) -> C:
    """Return a copy of a dataclass in which fields that are None are filled from `values`, section by section."""
    filled = copy.copy(config)
    for name, value in values.items():
        held = getattr(config, name)
        if isinstance(value, dict):
            setattr(filled, name, fill(held, value))
        elif held is None:
            setattr(filled, name, value)
    return filled


def flatten(values: dict, key: str = "") -> dict[str, Any]:
    """Flatten a nested mapping to dotted keys: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat = {}
    for name, value in values.items():
        path = join(key, name)
        if isinstance(value, dict) and value:
            flat.update(flatten(value, path))
        else:
            flat[path] = value
    return flat


def parse_overrides(items: typing.Iterable[str]) -> dict[str, Any]:
    """Parse overrides into a nested mapping: `["a.b=1"]` becomes `{"a": {"b": "1"}}`, see `override_value`."""
    tree: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(f"override {item!r}: expected section.key=value")
        if key.count(".") >= DEEPEST:
            raise ConfigError(f"override '{item[:60]}..': expected section.key=value, at most {DEEPEST} names deep")
        value = override_value(text, source=f"override {item!r}")
        node = tree
        *parents, name = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {item!r}: {parent!r} has both a value and keys")
        if isinstance(node.get(name), dict) and not isinstance(value, dict):
            raise ConfigError(f"override {item!r}: {name!r} has both a value and keys")
        if isinstance(value, dict):
            value = merge(node.get(name) or {}, value)
        node[name] = value
    return tree


def override_value(text: str, *, source: str) -> Any:
    """Return the value of an override: a list or section, None for null, the content of quotes, else a `Word`."""
    if text.startswith(("[", "{", "'", '"')):
        from lion.yaml_text import parse_yaml

        return parse_yaml(text, source=source)
    if text.strip() in ("", "null", "~"):
        return None
    return Word(text)


def merge(base: dict, over: dict) -> dict:
    """Merge two nested mappings; entries of `over` override entries of `base`, section by section."""
    merged = dict(base)
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            value = merge(merged[name], value)
        merged[name] = value
    return merged
