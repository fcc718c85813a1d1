"""The table of mixers: `./run.sh list --mixers`."""

from __future__ import annotations

from lion.layers.mixers import MIXERS
from tools.cli import aligned

MIXER_COLUMNS = ("published in", "decay", "normalised by", "`block: published` adds", "left out")

CHOICES = (  # task, mixer and settings, positions; lion/layers/README.md has the same rows, and says why
    (
        "pictures",
        "lion_s, model.attention.conv_width=4, model.attention.out_gate=silu",
        "model.position_embedding=true",
    ),
    ("text, both directions", "hydra, or lion_s with the same convolution and gate", "none"),
    ("text, one direction", "lion_s", "none"),
    ("long sequences (LRA)", "lion_d_hippo, lion_s_hippo", "none"),
    ("recall at any distance", "lion_s, model.attention.decay_temperature=16", "none"),
    ("one state for both directions", "lightnet", "model.attention.rotation=lrpe"),
    ("least time to train on a GPU, up to about 3,000 tokens", "softmax, then lion_lit", "learned"),
)


def mixer_table() -> str:
    """Return a table of all values of `model.mixer`, then which of them to choose for a task."""
    rows = [row[:-2] for row in mixer_rows()]
    mixers = aligned([["model.mixer", *MIXER_COLUMNS[:-2]], *rows])
    choices = aligned([["which one for", "mixer and settings", "positions"], *CHOICES])
    return "\n".join([*mixers, "", *choices])


def mixer_rows() -> list[list[str]]:
    """Return the rows of the table in lion/layers/README.md: name and facts of each mixer."""
    return [[name, *entry.layer.info(name)[: len(MIXER_COLUMNS)]] for name, entry in MIXERS.items()]
