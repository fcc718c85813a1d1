"""Entry point of the commands of run.sh: `python -m tools COMMAND ...`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import Namespace

from tools.commands import COMMANDS, help_for, parse_command


def main(argv: list[str]) -> int:
    """Run a command; the name of a recipe without a command trains the recipe.

    Commands and options are checked before PyTorch is loaded.

    Raises:
        ConfigError: An unknown command, recipe or option; the message names the nearest valid one.
    """
    if text := help_for(argv):
        print(text)
        return 0
    from lion.config import ConfigError, nearest
    from lion.progress import announced
    from lion.recipe_files import RECIPE, run_folder
    from tools.listing import recipe_files
    from tools.options import OPTIONS, read

    name, rest = parse_command(argv)
    recipes = recipe_files()
    if name in recipes:
        name, rest = "train", argv
    if name not in COMMANDS:
        if (run := run_folder(name)) is not None:
            raise ConfigError(f"{name!r} is a run: ./run.sh {run / RECIPE} trains it to its end")
        otherwise = f"valid: {', '.join(COMMANDS)}, or a recipe of ./run.sh list"
        raise ConfigError(f"unknown command {name!r}, {nearest(name, [*COMMANDS, *recipes], otherwise)}")
    if name in OPTIONS:  # the others pass their options on to another program
        check(name, read(name, rest))
    module, _, function = COMMANDS[name].where.partition(":")
    with announced("loading PyTorch"):
        loaded = importlib.import_module(module)
    return getattr(loaded, function or "main")(rest)


def check(name: str, args: Namespace) -> None:
    """Check the recipe of a command, its keys, and the files of its data; or the run of a command.

    Raises:
        ConfigError: There is no such recipe, key, file or run.
    """
    from lion.recipe_files import find_run
    from tools.keys import check_files, check_keys, layers_of
    from tools.listing import complete_recipe, recipe_path

    if COMMANDS[name].synopsis.startswith("RECIPE [key=value"):
        path = complete_recipe(args.recipe)
        layers = layers_of(path, args.overrides)
        check_keys(layers)
        if name != "show":  # which takes published numbers
            check_files(path, layers)
    elif "run" in args and name != "bench inference":  # which also takes a recipe
        find_run(args.run)
    elif name == "bench train":
        for recipe in args.recipes:
            recipe_path(recipe)


if __name__ == "__main__":
    if help_for(sys.argv[1:]):  # needs the standard library alone, unlike `run_command`
        try:
            main(sys.argv[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # `--help | head -1` has read enough
            sys.stdout = None
        sys.exit(0)
    if missing := [name for name in ("torch", "yaml") if not importlib.util.find_spec(name)]:
        named = " and no ".join(missing)
        print(f"error: this Python has no {named}: pip install -e ., or unset LION_NO_INSTALL", file=sys.stderr)
        sys.exit(2)
    from tools.cli import run_command

    run_command(main, sys.argv[1:])
