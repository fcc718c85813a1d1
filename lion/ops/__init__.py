"""Linear attention with a decay mask: one entry point to several exact forms."""

from lion.ops.api import linear_attention, linear_attention_parts
from lion.ops.arguments import NO_GATES, Gates, no_autocast
from lion.ops.blockwise import blockwise_attention
from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS, includes_query_decay
from lion.ops.exchange import Part
from lion.ops.logcumsumexp import logcumsumexp
from lion.ops.multiscan import multi_scan_attention
from lion.ops.one_scan import one_scan_attention
from lion.ops.reference import reference_attention, reference_one_scan_attention
from lion.ops.rotary import rope_frequencies, rotary_angles, rotate
from lion.ops.segments import SegmentIndex, segment_index
from lion.ops.settings import FORMS, NORMALIZE, SCAN_MERGES, Settings, resolve_form
from lion.ops.split import split_attention, split_attention_parts
from lion.ops.split_one_scan import log_sum_outside, split_one_scan_attention
from lion.ops.streaming import prefill, step
from lion.ops.tokens import State, initial_state

__all__ = [
    "DECAY_CONVENTIONS",
    "DIRECTIONS",
    "FORMS",
    "NORMALIZE",
    "NO_GATES",
    "SCAN_MERGES",
    "Gates",
    "Part",
    "SegmentIndex",
    "Settings",
    "State",
    "blockwise_attention",
    "includes_query_decay",
    "initial_state",
    "linear_attention",
    "linear_attention_parts",
    "log_sum_outside",
    "logcumsumexp",
    "multi_scan_attention",
    "no_autocast",
    "one_scan_attention",
    "prefill",
    "reference_attention",
    "reference_one_scan_attention",
    "resolve_form",
    "rope_frequencies",
    "rotary_angles",
    "rotate",
    "segment_index",
    "split_attention",
    "split_attention_parts",
    "split_one_scan_attention",
    "step",
]
