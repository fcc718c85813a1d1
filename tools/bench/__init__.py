"""`./run.sh bench WHAT`: what is fast, how fast, and what it takes."""

from __future__ import annotations

import importlib

from lion.config import ConfigError, nearest

KINDS = {"ops": "tools.bench.ops", "train": "tools.bench.train", "inference": "tools.bench.inference"}


def main(argv: list[str]) -> int:
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(f"usage: run.sh bench {{{','.join(KINDS)}}} ... [-h]")
        return 0
    if name not in KINDS:
        raise ConfigError(f"bench: {name!r} is nothing to measure, {nearest(name, KINDS)}")
    return importlib.import_module(KINDS[name]).main(argv[1:])
