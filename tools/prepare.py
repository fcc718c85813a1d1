"""Make what a recipe's data need, once for all runs: token files, generated samples. What was interrupted goes on.

python -m tools.prepare recipes/NAME.yaml [key=value ...]
"""

from __future__ import annotations

from tools.cli import Parser, run_command
from tools.compose import open_data, resolve


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh prepare", description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    source = open_data(resolve(args.recipe, args.overrides))
    source.prepare()
    print(source.check())
    return 0


if __name__ == "__main__":
    run_command(main)
