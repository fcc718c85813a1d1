"""Strict configuration: nested mappings to typed dataclasses, with errors that a person can act on.

A section is a dataclass; its annotations are the schema. `setting(...)` adds a range, choices, or marks a
field that does not change the course of a run (`free`).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

import yaml

LARGEST_INT = 2**63 - 1  # what seeds and counters hold
_NUMBERS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
_YAML_1_1 = re.compile(r"[-+]?0[0-9_]+|.*:.*|\d{4}-.*")
DEEPEST = 20  # names in a dotted key
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # stands in no file and no path


class ConfigError(Exception):
    """Something the user gave is wrong; the message is one line that says what, where and the nearest valid choice."""

    def __str__(self) -> str:
        """One line, whatever the names in it hold."""
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


def setting(
    default: Any = MISSING,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    choices: typing.Iterable[str] | None = None,
    free: bool = False,
) -> Any:
    """A dataclass field with a range (`min`, `max` inclusive, `above` exclusive), `choices`, or `free`.

    A `free` field may differ when a run is resumed.
    """
    metadata = {"min": min, "max": max, "above": above, "choices": choices and tuple(choices), "free": free}
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, names: typing.Iterable[str], otherwise: str | None = None) -> str:
    """A hint naming the closest valid name, else `otherwise`, or all of them."""
    names = sorted(map(str, names))
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    if close:
        longer = [n for n in close if n.startswith(str(name))]
        return f"did you mean {(longer or close)[0]!r}?"
    if otherwise is not None:
        return otherwise
    return f"valid: {', '.join(names)}" if names else "nothing is valid here"


Source = Callable[[str], str]  # names the file (or override) that a dotted key comes from


class Section:
    """A dataclass of which some fields depend on others in their type."""

    @classmethod
    def types(cls, values: dict[str, Any]) -> dict[str, type]:
        """The annotations that these values, still unchecked, put in the place of those of the class."""
        return {}


def build(schema: type, values: Any, *, source: Source, key: str = "") -> Any:
    """An instance of the dataclass `schema` from a mapping that stands at `key` of the recipe.

    Raises:
        ConfigError: An unknown key, a missing key, a wrong type or a value out of range.
    """
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{source(key)}: {key or 'recipe'}: expected a section of keys, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(schema)}
    hints = typing.get_type_hints(schema)
    if issubclass(schema, Section):
        hints |= schema.types(values)
    for name in values:
        if name not in fields:
            raise ConfigError(f"{source(join(key, name))}: unknown key '{join(key, name)}': {nearest(name, fields)}")
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
    except ValueError as error:  # what `__post_init__` finds wrong between fields
        raise ConfigError(f"{source(key)}: {join(key, error)}") from None


def join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def convert(hint: Any, value: Any, *, source: Source, key: str) -> Any:
    """`value` as the annotated type; text that is a number is taken as the number it is (YAML reads 1e-4 as text)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        error = None
        for option in sorted((a for a in args if a is not type(None)), key=lambda a: a is str):
            try:
                return convert(option, value, source=source, key=key)
            except ConfigError as e:
                error = error or e
        raise error
    if dataclasses.is_dataclass(hint):
        return build(hint, value, source=source, key=key)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{source(key)}: {key}: expected a list such as [{value}, {value}], got {value!r}")
        kinds = args if origin is tuple and Ellipsis not in args else [args[0]] * len(value)
        if len(kinds) != len(value):
            raise ConfigError(f"{source(key)}: {key}: expected {len(kinds)} values with commas between, got {value!r}")
        return origin(convert(t, v, source=source, key=f"{key}[{i}]") for i, (t, v) in enumerate(zip(kinds, value)))
    if origin is dict or hint is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{source(key)}: {key}: expected a section of keys, got {value!r}")
        return dict(value)

    number = value
    if isinstance(value, str) and hint in (int, float):
        try:
            number = float(value)
        except ValueError:
            number = value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and not _NO_TEXT.search(value):
        return value
    if hint in (int, float) and isinstance(number, (int, float)) and not isinstance(number, bool):
        if hint is float and abs(number) <= sys.float_info.max:
            return float(number)
        if hint is int and abs(number) <= LARGEST_INT and number == int(number):
            return int(number)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise ConfigError(f"{source(key)}: {key}: expected {names.get(hint, hint)}, got {value!r}")


def check_range(field: dataclasses.Field, value: Any, *, source: Source, key: str) -> None:
    """Refuse a value outside the field's choices or range."""
    rule = field.metadata
    if value is None or not rule:
        return
    if rule["choices"] and value not in rule["choices"]:
        raise ConfigError(f"{source(key)}: {key}: {value!r} is not a choice, {nearest(value, rule['choices'])}")
    for bad, words in (
        (rule["min"] is not None and value < rule["min"], f"at least {rule['min']}"),
        (rule["max"] is not None and value > rule["max"], f"at most {rule['max']}"),
        (rule["above"] is not None and value <= rule["above"], f"more than {rule['above']}"),
    ):
        if bad:
            raise ConfigError(f"{source(key)}: {key}: expected {words}, got {value!r}")


def check_settings(config: Any) -> None:
    """What `build` refuses, of a dataclass that was made without it.

    Raises:
        ValueError: A field outside its choices or range.
    """
    for f in dataclasses.fields(config):
        try:
            check_range(f, getattr(config, f.name), source=lambda _: type(config).__name__, key=f.name)
        except ConfigError as error:
            raise ValueError(str(error)) from None


def to_dict(config: Any) -> Any:
    """The plain mapping that `build` would read back."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, (list, tuple)):
        return [to_dict(v) for v in config]
    return config


def fill(config: Any, values: dict[str, Any]) -> Any:
    """A copy of a dataclass in which `values` stand where it has None, section by section."""
    filled = copy.copy(config)
    for name, value in values.items():
        held = getattr(config, name)
        if isinstance(value, dict):
            setattr(filled, name, fill(held, value))
        elif held is None:
            setattr(filled, name, value)
    return filled


def flatten(values: dict, key: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat = {}
    for name, value in values.items():
        path = join(key, name)
        if isinstance(value, dict) and value:
            flat.update(flatten(value, path))
        else:
            flat[path] = value
    return flat


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, and aliases, with which a short text is endless; numbers are what people
    read in them."""

    def resolve(self, kind: type, value: Any, implicit: Any) -> str:
        """A node's tag. What YAML 1.1 alone takes for a number or a date (010 for 8, 1:30 for 90) stays text, of which
        `convert` makes what is asked for: 10, or an error."""
        tag = super().resolve(kind, value, implicit)
        return self.DEFAULT_SCALAR_TAG if tag in _NUMBERS and _YAML_1_1.fullmatch(value) else tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise ConfigError(
                f"line {event.start_mark.line + 1}: write out what the alias '*{event.anchor}' stands for"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name = self.construct_object(key_node, deep=True)
            if not isinstance(name, str):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: keys are names, got {name!r}")
            if name in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {name!r} is given twice")
            seen.add(name)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, *, source: str) -> Any:
    """Plain YAML data; a syntax error names its line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{source}:{place} not YAML: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not YAML: {error}") from None
    except (LookupError, AttributeError):
        raise ConfigError(f"{source}: not YAML: a value does not fit its tag") from None


def parse_overrides(items: typing.Iterable[str]) -> dict[str, Any]:
    """`["a.b=1"]` as `{"a": {"b": 1}}`; values are YAML."""
    tree: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(f"override {item!r}: expected section.key=value")
        if key.count(".") >= DEEPEST:
            raise ConfigError(f"override '{item[:60]}..': expected section.key=value, {DEEPEST} names deep at most")
        value = parse_yaml(text, source=f"override {item!r}")
        node = tree
        *parents, name = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {item!r}: {parent!r} is given a value and keys")
        if isinstance(node.get(name), dict) and not isinstance(value, dict):
            raise ConfigError(f"override {item!r}: {name!r} is given a value and keys")
        node[name] = value
    return tree


def merge(base: dict, over: dict) -> dict:
    """`over` laid on `base`, section by section."""
    merged = dict(base)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both else value
    return merged
