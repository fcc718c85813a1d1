"""Masked, scaled linear attention in its three exact forms, behind one entry."""

from lion.ops.attention import FORMS, linear_attention, linear_attention_parts, no_autocast, resolve_form, step
from lion.ops.reference import reference_attention
from lion.ops.rnn import State, initial_state

__all__ = [
    "FORMS",
    "State",
    "initial_state",
    "linear_attention",
    "linear_attention_parts",
    "no_autocast",
    "reference_attention",
    "resolve_form",
    "step",
]
