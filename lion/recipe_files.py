"""Files of recipes: a YAML file preceded by those that it extends, and the recipe of a run. Needs no PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

from lion.config import ConfigError, nearest
from lion.yaml_text import parse_yaml

RECIPE = "recipe.yaml"  # in the folder of a run
SUMMARY = "summary.json"  # of a complete run
OVERRIDE = "override"  # the source of keys from the command line


def read_layers(path: Path, seen: tuple[str, ...] = ()) -> list[tuple[str, dict]]:
    """Read the mapping of a recipe, preceded by those that it extends; each with its file name."""
    try:
        place = os.path.realpath(path)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = []
        for other in path.parent.glob("*.yaml"):
            if other.exists() and os.path.realpath(other) not in seen:
                others.append(other.name)
        if path.is_symlink():
            raise ConfigError(f"{path}: a link to {os.readlink(path)}, which does not exist") from None
        near = nearest(path.name, others, otherwise="")
        if near:
            near = f", {near}"
        where = ""
        if seen:
            where = f"{seen[-1]}: extends: relative paths start at its folder; "
        raise ConfigError(f"{where}{path}: no such file{near}") from None
    except (OSError, ValueError) as error:
        if (path / RECIPE).is_file():
            raise ConfigError(f"{path}: a run, whose recipe is {path}/{RECIPE}") from None
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if place in seen:
        raise ConfigError(f"{path}: extends itself")
    values = parse_yaml(text, source=str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections of keys")
    base = values.pop("extends", None)
    if base is None:
        return [(str(path), values)]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: expected the path of a recipe, got {base!r}")
    layers = read_layers(path.parent / base, (*seen, place))
    layers.append((str(path), values))
    return layers


def run_folder(run: str | Path) -> Path | None:
    """Return the folder of a run, a path or a name under `runs/`; None if there is no such run."""
    for folder in (Path(run), Path("runs") / run):
        if (folder / RECIPE).is_file():
            return folder
    return None


def find_run(run: str | Path) -> Path:
    """Return the folder of a run, see `run_folder`.

    Raises:
        ConfigError: There is no such run; the message has the nearest name.
    """
    folder = run_folder(run)
    if folder is not None:
        return folder
    path = Path(run)
    for place in path.parents:
        if place.name and (place / RECIPE).is_file():
            raise ConfigError(f"run {str(run)!r}: not a run's folder, did you mean {str(place)!r}?")
    if path.is_file():
        raise ConfigError(f"run {str(run)!r}: a file, not a run's folder; ./run.sh convert makes a run of a checkpoint")
    known = sorted(p.parent.name for p in Path("runs").glob(f"*/{RECIPE}"))
    hint = "there are none under runs/ yet"
    if known:
        hint = nearest(path.name, known)
    places = " or ".join(dict.fromkeys([str(path), str("runs" / path)]))
    raise ConfigError(f"run {str(run)!r}: no {RECIPE} in {places}, {hint}")
