"""The table of mixers: `./run.sh list --mixers`."""

from __future__ import annotations

from lion.layers.mixers import MIXERS
from tools.cli import aligned

MIXER_COLUMNS = ("published in", "decay", "normalised by", "`block: published` adds", "left out")


def mixer_table() -> str:
    """Return a table of all values of `model.mixer`: name, publication, decay and normalisation of each mixer."""
    return "\n".join(aligned([["model.mixer", *MIXER_COLUMNS[:-2]], *(row[:-2] for row in mixer_rows())]))


def mixer_rows() -> list[list[str]]:
    """Return the rows of the table in lion/layers/README.md: name and facts of each mixer."""
    return [[name, *entry.layer.info(name)[: len(MIXER_COLUMNS)]] for name, entry in MIXERS.items()]
