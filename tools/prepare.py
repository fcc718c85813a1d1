"""Prepare the data of a recipe once for all runs, such as token files and generated samples.

./run.sh prepare recipes/NAME.yaml [key=value ...]

An interrupted preparation is resumed.
"""

from __future__ import annotations

from tools import options
from tools.compose import open_data, resolve
from tools.labels import check_labels, check_pixels


def main(argv: list[str]) -> int:
    args = options.read("prepare", argv)
    source = open_data(resolve(args.recipe, args.overrides))
    if args.check_labels:
        known = source.published()
        if known is not None:
            info, _ = known
            check_pixels(info)
    source.prepare()
    print(source.check())
    splits = source.build()  # refuses what training would refuse
    print(f"{len(splits.train):,} samples for training, {len(splits.val):,} for validation")
    if args.check_labels:
        print(check_labels(splits, args.check_labels))
    return 0
