"""The table of mixers: `./run.sh list --mixers`."""

from __future__ import annotations

from collections.abc import Iterable

from lion.layers.mixers import LINEAR, MIXERS
from tools.cli import aligned

MIXER_COLUMNS = ("published in", "decay", "normalised by", "`block: published` adds", "left out")


def mixer_table() -> str:
    """Return a table of all values of `model.mixer`: name, publication, decay and normalisation of each mixer."""
    return "\n".join(aligned([["model.mixer", *MIXER_COLUMNS[:-2]], *(row[:-2] for row in mixer_rows(MIXERS))]))


def mixer_rows(names: Iterable[str] = LINEAR) -> list[list[str]]:
    """Return rows of the table in lion/layers/README.md: name and facts of each mixer (default: all linear mixers)."""
    return [[name, *MIXERS[name].layer.info(name)[: len(MIXER_COLUMNS)]] for name in names]
