"""Masked, scaled linear attention in its exact forms, behind one entry."""

from lion.ops.api import FORMS, NORMALIZE, linear_attention, linear_attention_parts, resolve_form
from lion.ops.arguments import check_masks, no_autocast
from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS
from lion.ops.multiscan import SCAN_MERGES, multi_scan_attention
from lion.ops.reference import reference_attention
from lion.ops.rnn import State, initial_state
from lion.ops.rotary import rope_frequencies, rotary_angles, rotate
from lion.ops.streaming import prefill, step

__all__ = [
    "DECAY_CONVENTIONS",
    "DIRECTIONS",
    "FORMS",
    "NORMALIZE",
    "SCAN_MERGES",
    "State",
    "check_masks",
    "initial_state",
    "linear_attention",
    "linear_attention_parts",
    "multi_scan_attention",
    "no_autocast",
    "prefill",
    "reference_attention",
    "resolve_form",
    "rope_frequencies",
    "rotary_angles",
    "rotate",
    "step",
]
