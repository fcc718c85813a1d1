"""Prepare the data of a recipe once for all runs, such as token files and generated samples.

./run.sh prepare recipes/NAME.yaml [key=value ...]

An interrupted preparation is resumed.
"""

from __future__ import annotations

from tools import options
from tools.compose import open_data, resolve
from tools.labels import check_labels, check_pixels


def main(argv: list[str]) -> int:
    args = options.prepare(argv)
    source = open_data(resolve(args.recipe, args.overrides))
    if args.check_labels and (known := source.published()) is not None:
        check_pixels(known[0])
    source.prepare()
    print(source.check())
    if args.check_labels:
        print(check_labels(source.build(), args.check_labels))
    return 0
