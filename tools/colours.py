"""One colour for each mixer, in all plots."""

from __future__ import annotations

SOFTMAX = "black"
COLOURS = {
    "lion_s": "#1f77b4",
    "lion_lit": "#d62728",
    "lion_d": "#2ca02c",
    "lion_s_vector": "#17becf",
    "lightnet": "#ff7f0e",
    "gla": "#9467bd",
    "deltanet": "#8c564b",
    "gated_rfa": "#e377c2",
    "linear_transformer": "#c2a000",
    "lion_s_hippo": "#003f8a",
    "lion_d_hippo": "#00a878",
    "performer": "#bcbd22",
    "retnet": "#7f9a00",
    "mamba2": "#a3004f",
    "mamba": "#ff9da7",
    "rwkv6": "#5c5c9c",
    "hgrn2": "#b07aa1",
    "xlstm": "#6b8e6b",
    "gated_deltanet": "#c49c94",
    "kda": "#a65628",
    "comba": "#d9a441",
    "gdn2": "#6f4518",
    "deltaproduct": "#e6a57e",
    "rwkv7": "#393b79",
    "hydra": "#e7298a",
    "vim": "#1b9e77",
    "fox": "#8c8c8c",
}
OTHER = "#5c5c5c"


def colour_of(row: str) -> str:
    """Return the colour of a row by its mixer, which is the first word of the row."""
    mixer = row.split()[0].rstrip(",").removesuffix("_forward").removesuffix("_multiscan")
    if mixer in ("softmax", "sdpa"):
        return SOFTMAX
    return COLOURS.get(mixer, OTHER)
