"""Strict parsing of YAML, for recipes and overrides."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import yaml

from lion.config import ConfigError

_NUMBERS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
_YAML_1_1 = re.compile(r"[-+]?0[0-9_]+|.*[_:].*|\d{4}-.*")


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys and aliases.

    Aliases are rejected because they can expand a short text without limit. Numbers have the value that people expect:
    010 is 10, not octal 8.
    """

    def resolve(self, kind: type, value: Any, implicit: Any) -> str:
        """Return the tag of a node.

        Numbers and dates of YAML 1.1 alone (010 for 8, 1:30 for 90, 1_000) remain text. `convert` turns this text into
        the annotated type (10) or raises an error.
        """
        tag = super().resolve(kind, value, implicit)
        if tag in _NUMBERS and _YAML_1_1.fullmatch(value):
            return self.DEFAULT_SCALAR_TAG
        return tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise ConfigError(f"line {event.start_mark.line + 1}: replace the alias '*{event.anchor}' by its value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        seen = set()
        pairs: list[tuple[yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            pairs = node.value
        for key_node, _ in pairs:
            name = self.construct_object(key_node, deep=True)
            if not isinstance(name, str):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: keys must be names, got {name!r}")
            if name in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {name!r} is given twice")
            seen.add(name)
        return super().construct_mapping(node, deep)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Return the data of YAML; many recipes share their bases."""
    return yaml.load(text, Loader=_Loader)


def parse_yaml(text: str, *, source: str) -> Any:
    """Parse YAML into plain data.

    Raises:
        ConfigError: A syntax error, with its line.
    """
    try:
        return copy.deepcopy(_parsed(text))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = ""
        if mark:
            place = f" line {mark.line + 1}"
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{source}:{place} not YAML: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not YAML: {error}") from None
    except (LookupError, AttributeError):
        raise ConfigError(f"{source}: not YAML: a value does not fit its tag") from None
