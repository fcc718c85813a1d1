"""Invalid recipes by mutation, key by key and letter by letter."""

import dataclasses
import functools
import json
import math
import random
import types
import typing

import pytest
import yaml

from lion.config import ConfigError, join
from lion.recipe import dump_recipe
from tests.helpers import ROOT, refuse, tiny_recipe
from tools.compose import resolve

pytest.importorskip("sklearn")
QUICK = ROOT / "recipes/quickstart.yaml"
FOLDERS = {"data": {"name": "imagefolder", "root": str(ROOT)}}

WRONG = {  # invalid values by type
    bool: [1, "yes", [True]],
    int: ["many", 1.5, "1e99", True, ["a"], {"a": 1}],
    float: ["many", "nan", "inf", True, ["a"], {"a": 1}],
    str: [["a"], {"a": 1}, "a\0b"],
    tuple: ["many", True, [1], [1, 2, 3], ["a", "b"], {"a": 1}],
}


def leaves(config, key=""):
    """Yield (dotted key, field, annotation) of every setting of a recipe."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value, path = getattr(config, f.name), join(key, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, path)
        else:
            yield path, f, hints[f.name]


def wrong_values(hint):
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    lists = [WRONG[typing.get_origin(m) or m] for m in members if m is not type(None)]
    if any(typing.get_args(m) == (float, ...) for m in members):  # tuples of any length
        lists = [[v for v in values if v not in ([1], [1, 2, 3])] for values in lists]
    wrong = [v for v in lists[0] if all(repr(v) in map(repr, values) for values in lists)]
    return wrong if type(None) in members else [*wrong, None]


def values_outside(field):
    """Yield values just outside the range or choices of a field."""
    rule, whole = field.metadata, "int" in str(field.type)
    for name, way in (("min", -1), ("max", 1)) if rule else ():
        if rule[name] is not None:
            yield rule[name] + way if whole else math.nextafter(rule[name], way * math.inf)
    if rule and rule["above"] is not None:
        yield rule["above"]
    if rule and rule["choices"]:
        yield misspelt([*rule["choices"]][-1])


def misspelt(name):
    """Return the name with two letters swapped, or with one letter missing."""
    name = str(name)
    i = len(name) // 2
    swapped = name[: i - 1] + name[i] + name[i - 1] + name[i + 1 :]
    return swapped if swapped != name else name[:i] + name[i + 1 :]


@functools.cache
def every_leaf():
    """List (dotted key, field, annotation, changes of the recipe) for two data sets."""
    found = []
    for leaf in leaves(resolve(QUICK)):
        found.append((*leaf, {}))
    for leaf in leaves(resolve("deit_tiny_lion_s")):
        if leaf[0].startswith("data."):
            found.append((*leaf, FOLDERS))
    return found


@pytest.mark.parametrize("place", range(len(every_leaf())), ids=lambda i: every_leaf()[i][0])
@pytest.mark.slow
def test_every_key(place, tmp_path, capsys):
    """Check that wrong values of a key, in a file and in overrides by turns, and a wrong name are one line."""
    key, field, hint, changes = every_leaf()[place]
    section, _, name = key.rpartition(".")
    base = tiny_recipe(tmp_path, **changes)
    path = tmp_path / "bad.yaml"

    def line_of_file(key, value):
        tree = value
        for part in reversed(key.split(".")):
            tree = {part: tree}
        path.write_text(yaml.safe_dump({"extends": base.name, **tree}))
        line = refuse(capsys, "train", path)
        assert line.startswith(f"error: {path}: ")
        return line

    def line_of_override(key, value):
        line = refuse(capsys, "train", base, f"{key}={json.dumps(value)}")
        assert line.startswith("error: override: ")
        return line

    ways = (line_of_file, line_of_override)
    for number, value in enumerate([*wrong_values(hint), *values_outside(field)]):
        assert f" {key}" in ways[(place + number) % 2](key, value), value
    bad = join(section, misspelt(name))
    for line_of in ways:
        assert f"unknown key '{bad}': did you mean '{name}'?" in line_of(bad, 1)
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {"tiny.yaml", "bad.yaml"}


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_text_is_a_recipe_or_one_line(seed, tmp_path):
    text, path = dump_recipe(resolve(QUICK)).encode(), tmp_path / "r.yaml"
    dice, refused = random.Random(seed), 0
    for i in range(40):
        damaged = bytearray(text[: dice.randrange(len(text))] if i % 4 == 0 else text)
        for _ in range(dice.choice((1, 1, 3)) if i % 4 else 0):
            damaged[dice.randrange(len(damaged))] = dice.choice(b"\0\n\t :,#'\"[]{}&*!|>%@`~-?.09aZ\x80\xff")
        path.write_bytes(damaged)
        try:
            resolve(path)
        except ConfigError as error:
            refused += 1
            assert str(error).startswith(str(path)) and str(error).isprintable()
    assert refused > 20


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch touched']",
        "!!python/object/new:os.system ['touch touched']",
        "!!python/object/apply:eval [\"open('touched', 'w')\"]",
        "!!python/name:os.system",
        "!!python/module:antigravity",
        "!!timestamp x",
        "!!bool x",
        "!!map [x]",
        "&a {b: *a}",
        "[" * 999,
    ],
    ids=lambda text: text[:30],
)
def test_tags_and_aliases_do_nothing(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tiny_recipe(tmp_path)
    assert refuse(capsys, "train", path, f"seed={text}").startswith("error: override")
    path.write_text(path.read_text() + f"seed: {text}\n")
    assert refuse(capsys, "train", path).startswith(f"error: {path}: ")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize("key", ["data.name", "task.name", "model.mixer"])
def test_a_name_is_one_of_a_table(key, tmp_path, capsys):
    path = tiny_recipe(tmp_path)
    for name in ("os", "../x", "data.digits", "__init__", "common", "pictures", "digits.__class__", "/etc/passwd", ""):
        line = refuse(capsys, "train", path, f"{key}={name or repr(name)}")
        assert line.startswith(f"error: override: {key}: ") and repr(name) in line
    for name in ("[a]", "{a: 1}", "3"):
        assert f"error: override: {key}: " in refuse(capsys, "train", path, f"{key}={name}")


def test_a_run_stays_where_runs_are(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tiny_recipe(tmp_path)
    for name in ("a/b", "..", "../x", "/x", ".x", "a b", "''", "-x", '"a\\nb"', "x" * 300):
        assert "run.name: expected letters" in refuse(capsys, "train", path, f"run.name={name}")
    for root in ("~nobody-here/x", "/dev/null", path, '"a\\0b"', "x" * 300, "x" * 5000):
        refuse(capsys, "train", path, f"run.root={root}")
        refuse(capsys, "train", path, f"run.root={root}", "--fresh")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_base_that_is_none(tmp_path, capsys):
    (tmp_path / "other.yaml").write_text("extends: tiny.yaml")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    secret = tmp_path / "secret"
    secret.write_text("name:word:0:0\n")  # a file that is no recipe, as that of the users of a machine
    for base in ("gone.yaml", "binary", str(secret), "a\0b", "a\nb", "x" * 5000):
        line = refuse(capsys, "train", tiny_recipe(tmp_path, extends=base))
        assert repr(base)[1:-1] in line
        assert "word" not in line
    for base in ("other.yaml", ["a"], {"a": 1}, 3):
        assert "extends" in refuse(capsys, "train", tiny_recipe(tmp_path, extends=base))
    assert "Is a directory" in refuse(capsys, "train", tiny_recipe(tmp_path, extends="."))
    assert not (tmp_path / "runs").exists()
