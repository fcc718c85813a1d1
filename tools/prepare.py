"""Prepare the data of a recipe once for all runs, such as token files and generated samples.

./run.sh prepare recipes/NAME.yaml [key=value ...]

An interrupted preparation is resumed.
"""

from __future__ import annotations

from tools.cli import Parser, count, run_command
from tools.compose import open_data, resolve
from tools.labels import check_labels, check_pixels


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh prepare", description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--check-labels",
        type=count,
        metavar="STEPS",
        help="train a small network for STEPS steps on each half of the images, to see if the labels can be learned",
    )
    args = parser.parse_intermixed_args(argv)
    source = open_data(resolve(args.recipe, args.overrides))
    if args.check_labels and (known := source.published()) is not None:
        check_pixels(known[0])
    source.prepare()
    print(source.check())
    if args.check_labels:
        print(check_labels(source.build(), args.check_labels))
    return 0


if __name__ == "__main__":
    run_command(main)
