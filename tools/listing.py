"""List of the recipes by family, each with the row of a paper that it reproduces; those for two CPU cores first.

./run.sh list [PATTERN] [--mixers]

No model is built, so that the command needs no PyTorch; `show` counts parameters.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from pathlib import Path
from typing import Any

import yaml

from lion.config import ConfigError, nearest
from tools import options
from tools.cli import aligned
from tools.commands import as_called

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SMALL = "2 CPU cores"  # `about.hardware` of recipes that need minutes to hours without a GPU
FAMILIES = {  # title by the beginning of a name; the longest beginning that fits counts
    "deit": "ImageNet-1k, DeiT's training (LION, Tables 2 and 12)",
    "hydra": "ImageNet-1k, Hydra's training (LION, Table 2)",
    "vim": "ImageNet-1k, Vim's training (LION, Tables 2 and 12)",
    "distilled": "ImageNet-1k, distillation (LION, Table 15)",
    "cifar100": "CIFAR-100 (LION, Tables 13, 14 and 16)",
    "mlm": "Masked language models on C4 (LION, Tables 3 and 9 to 11)",
    "glue": "GLUE, one recipe per task (./run.sh glue runs all eight)",
    "gpt2": "Causal language models on OpenWebText (LION, Appendix A)",
    "lra": "Long Range Arena (LION, Tables 4 to 7)",
    "lightnet": "LightNet: ImageNet-1k (Table 1)",
    "lightnet_gen": "LightNet: image generation (Tables 2, 6 and 8)",
    "lightnet_lm": "LightNet: causal language models on the Pile (Tables 4 and 7)",
    "lightnet_wikitext103": "LightNet: WikiText-103 (Table 3)",
    "cramming": "LightNet: BERT in 24 hours (Table 5)",
    "dit": "DiT: image generation with softmax (2212.09748)",
}
OWN = "Your own"
TABLES = re.compile(r"Tables \d+(?:(?:, | and )\d+)+")
NO_ROW = re.compile(r"^- \((.*)\)$")  # an `about.row` that is no row of a paper
CPU = "For two CPU cores, minutes to hours; no result of a paper"


def recipe_files() -> dict[str, Path]:
    """Return the file of each of our recipes, by its bare name."""
    return recipes_in(RECIPES)


@functools.cache
def recipes_in(folder: Path) -> dict[str, Path]:
    """Return the recipes below a folder by bare name, without those of `base`."""
    found = {}
    for path in folder.rglob("*.yaml"):
        if path.parent != folder / "base":
            found[path.stem] = path
    return dict(sorted(found.items()))


def recipe_path(name: str | Path) -> Path:
    """Return the file of a recipe: `name` itself where it is a path, else ours of that bare name.

    Raises:
        ConfigError: A bare name that no recipe has.
    """
    path = Path(name)
    data = path.is_dir() and path.name == str(name) and not path.suffix  # a folder of data may have a recipe's name
    if os.path.lexists(path) and not data:
        return path
    ours = recipe_files()
    shipped = None
    if path.suffix in ("", ".yaml"):
        shipped = ours.get(path.stem)
    if path.name != str(name):
        if shipped is not None and path.suffix:
            raise ConfigError(f"{name}: no such file, did you mean {path.stem!r}?")
        return path
    if shipped is not None:
        return shipped
    of_run = Path("runs") / name / "recipe.yaml"
    if of_run.is_file():
        raise ConfigError(f"{name}: no such recipe, but a run; its recipe is {of_run}")
    names = list(ours) + [path.name for path in Path().glob("*.yaml")]
    raise ConfigError(f"{name}: no such recipe, {nearest(str(name), names, './run.sh list prints the recipes')}")


def complete_recipe(name: str | Path) -> Path:
    """Return the file of a recipe that can be trained, as `recipe_path` does.

    Raises:
        ConfigError: There is no such recipe, or it is a base of others.
    """
    path = recipe_path(name)
    if Path(os.path.realpath(path)).parent == RECIPES / "base":
        raise ConfigError(
            f"{path}: a base of several recipes, not a recipe; use a recipe that has 'extends: base/{path.name}'"
        )
    return path


def main(argv: list[str]) -> int:
    args = options.read("list", argv)
    if args.mixers:
        if args.patterns:
            raise ConfigError(f"--mixers: lists all mixers, leave {' '.join(args.patterns)!r} out")
        from tools.mixers import mixer_table

        print(mixer_table())
        return 0
    print(as_called(listing(*args.patterns)))
    return 0


def listing(*patterns: str) -> str:
    """Return the recipes that match all patterns, as one table per family: name, row of the paper, published value.

    Raises:
        ConfigError: No recipe matches.
    """
    titles: dict[str, str] = {}  # of the family of each recipe that matches
    rows = []
    files = recipe_files()
    for name, path in files.items():
        about = read_about(path)
        row = claim(about.get("row", ""))
        if all(matches(pattern, f"{name} {row}") for pattern in patterns):
            titles[name] = title_of(name, about)
            rows.append((name, row, about.get("expected", "")))
    if not rows:
        wanted = " ".join(patterns)
        near = nearest(wanted, files, "./run.sh list prints all recipes")
        raise ConfigError(f"{wanted!r}: no recipe's name or row matches, {near}")
    families: dict[str, list[str]] = {}
    for name, line in zip(titles, aligned(rows)):
        families.setdefault(titles[name], []).append(f"  {line}")
    text = ""
    for title in (OWN, CPU, *FAMILIES.values()):
        if title in families:
            text += "\n".join([title, *families[title], "", ""])
    return f"{text}./run.sh show NAME: all settings and the cost on this machine; ./run.sh list --mixers: the mixers"


def title_of(name: str, about: dict[str, Any]) -> str:
    """Return the title under which a recipe is listed."""
    if not about:
        return OWN
    if about.get("hardware") == SMALL:
        return CPU
    return family(name)


def matches(pattern: str, text: str) -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatch(text.split()[0], pattern)
    singly = TABLES.sub(each_table, text)
    return pattern.lower() in text.lower() or pattern.lower() in singly.lower()


def each_table(found: re.Match) -> str:
    """Return "Tables 2 and 3" as "Table 2 Table 3"."""
    return " ".join(f"Table {n}" for n in re.findall(r"\d+", found[0]))


def family(name: str) -> str:
    """Return the title of the family of a recipe: of the longest known beginning of its name."""
    fits = [known for known in FAMILIES if name.startswith(known)]
    if not fits:
        return OWN
    return FAMILIES[max(fits, key=len)]


def claim(row: str) -> str:
    """Return the row of a paper; a row "- (text)", which belongs to no paper, becomes "text"."""
    return NO_ROW.sub(r"\1", row)


@functools.cache
def read_about(path: Path) -> dict[str, Any]:
    """Return the `about` section of a recipe file. The section is not inherited through `extends`."""
    try:
        held = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(held, dict) or not isinstance(held.get("about"), dict):
        return {}
    return {key: str(value) for key, value in held["about"].items()}
