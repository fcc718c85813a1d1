from dataclasses import dataclass, field

import pytest
import yaml

from lion.config import ConfigError, build, flatten, merge, parse_overrides, setting, to_dict
from lion.yaml_text import parse_yaml
from tests.helpers import refused


@dataclass
class Inner:
    rate: float = setting(0.5, min=0, max=1)
    kind: str = setting("a", choices=("a", "b"))


@dataclass
class Outer:
    size: int
    pair: tuple[int, int] | int = 3
    name: str | None = None
    flag: bool = False
    values: list[float] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)


def make(values):
    return build(Outer, values, source=lambda key: "r.yaml")


def test_values_take_their_types():
    out = make({"size": "1e3", "pair": [1, 2], "values": ["1e-4", 2], "inner": {"rate": 1}})
    assert out == Outer(size=1000, pair=(1, 2), values=[1e-4, 2.0], inner=Inner(rate=1.0))
    assert isinstance(out.inner.rate, float) and isinstance(out.size, int)
    assert make(to_dict(out)) == out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 1, "sise": 2}, "r.yaml: unknown key 'sise': did you mean 'size'?"),
        ({"size": 1, "inner": {"rat": 2}}, "r.yaml: unknown key 'inner.rat': did you mean 'rate'?"),
        ({}, "r.yaml: missing key 'size'"),
        ({"size": 1.5}, "size: expected a whole number, got 1.5"),
        ({"size": True}, "size: expected a whole number, got True"),
        ({"size": "many"}, "size: expected a whole number, got 'many'"),
        ({"size": 1, "flag": "yes"}, "flag: expected true or false, got 'yes'"),
        ({"size": 1, "flag": 1}, "flag: expected true or false, got 1"),
        ({"size": 1, "name": True}, "name: expected text, got True; write it in quotes"),
        ({"size": 1, "name": "a\udcff"}, "name: 'a\\udcff' is not UTF-8 text; rename the file or folder"),
        ({"size": 1, "pair": [1, 2, 3]}, "pair: expected"),
        ({"size": 1, "inner": {"rate": 1.5}}, "inner.rate: expected at most 1, got 1.5"),
        ({"size": 1, "inner": {"rate": "nan"}}, "inner.rate: expected a number, got 'nan'"),
        ({"size": 1, "inner": {"kind": "c"}}, "inner.kind: 'c' is not a choice, valid: a, b"),
        ({"size": 1, "inner": 3}, "inner: expected a section of keys, got 3"),
        ({"size": None}, "size: expected a whole number, got None"),
    ],
)
def test_refusals_name_key_file_and_choice(values, message):
    with pytest.raises(ConfigError) as error:
        make(values)
    assert message in str(error.value) and str(error.value).startswith("r.yaml") and "\n" not in str(error.value)


def test_overrides_nest():
    assert parse_overrides(["a.b=1", "a.c=[1, x]", "d=null"]) == {"a": {"b": "1", "c": [1, "x"]}, "d": None}
    both = {"a": {"b": "1", "c": 2}}
    assert parse_overrides(["a.b=1", "a={c: 2}"]) == parse_overrides(["a={c: 2}", "a.b=1"]) == both
    for bad in ("a", "=1", "a..b=1", "a.=1"):
        refused(r"expected section\.key=value", parse_overrides, [bad])
    refused("value and keys", parse_overrides, ["a=1", "a.b=2"])
    refused("value and keys", parse_overrides, ["a.b=2", "a=1"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("-010", -10), ("0_8", 8), ("00", 0), ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("1e3", 1000)],
)
def test_whole_numbers_are_what_people_read(text, value):
    """Check numbers that YAML 1.1 reads differently from people (010 as 8)."""
    assert make(parse_yaml(f"size: {text}", source="r.yaml")).size == value
    assert make({"size": 1, "inner": parse_overrides(["rate=01"])}).inner.rate == 1


def test_values_that_are_not_numbers_are_not_converted():
    """Check texts that YAML 1.1 reads as numbers or dates (1:30 as 90, 2026-11-22 as a date)."""
    for text in ("1:30", "-1:30", "1:30.5", "2026-11-22", "0o10"):
        refused(f"size: expected a whole number, got '{text}'", make, parse_overrides([f"size={text}"]))
    for text in ("1:30", "2026-11-22", "010", "0o10"):
        out = make(parse_overrides(["size=1", f"name={text}"]))
        assert out.name == text
        assert make(parse_yaml(yaml.safe_dump(to_dict(out)), source="r.yaml")) == out  # the way a run stores it


def test_text_of_overrides_stays_as_it_is():
    for text in ("20240101", "on", "1e5", "1_000", "/a #b", "/a: b", "it's", "*a", "@a", "a=b", " a", "!!bool x"):
        assert make(parse_overrides(["size=1", f"name={text}"])).name == text
    for text in ("'a #b'", '"a #b"'):
        assert make(parse_overrides(["size=1", f"name={text}"])).name == "a #b"
    out = make(parse_overrides(["size=10 # tokens", "flag=on", "values=[1, 2]", "inner={rate: 1}"]))
    assert out == Outer(size=10, flag=True, values=[1.0, 2.0], inner=Inner(rate=1.0))


def test_whole_numbers_of_files_are_text_where_text_is_expected():
    assert make(parse_yaml("size: 1\nname: 20240101", source="r.yaml")).name == "20240101"
    assert make(parse_yaml("size: 1\nname: 1_000", source="r.yaml")).name == "1_000"


def test_yaml_errors_have_a_line():
    refused(r"r\.yaml: line 2: key 'a' is given twice", parse_yaml, "a: 1\na: 2", source="r.yaml")
    refused(r"r\.yaml: line 2 not YAML", parse_yaml, "a: 1\n b: [", source="r.yaml")
    refused("keys must be names, got 1", parse_yaml, "1: 2", source="r.yaml")
    refused("not YAML", parse_yaml, "a: !!python/object/apply:os.system ['true']", source="r.yaml")


def test_merge_and_flatten():
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}
    assert flatten({"a": {"b": 1, "c": {}}, "d": 4}) == {"a.b": 1, "a.c": {}, "d": 4}
