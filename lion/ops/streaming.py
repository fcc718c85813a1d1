"""Incremental decoding of causal sequences: constant time and memory per token, with a state that holds the past."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lion.ops.api import linear_attention, normalized
from lion.ops.arguments import (
    Gates,
    check_gates,
    check_tokens,
    check_values,
    expand_decay,
    mismatch,
    no_autocast,
    take_gates,
)
from lion.ops.decay import CumulativeDecay, decay, prefix_sums, query_and_key
from lion.ops.delta import delta_advance, delta_chunks, with_delta
from lion.ops.rnn import Recurrence, advance
from lion.ops.rotary import rotate_each
from lion.ops.scores import separate_rowsum
from lion.ops.segments import SegmentIndex, check_masks, prepared
from lion.ops.settings import DEFAULTS, Settings, with_fields
from lion.ops.tokens import State, TokenBlock

UNUSED = ("form", "direction", "dropout_p", "scan_merge")  # a prompt is processed forward, in chunks, without dropout


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    gates: Gates | Tensor | None = None,
    *,
    valid: Tensor | None = None,
    settings: Settings = DEFAULTS,
    **fields: Any,
) -> tuple[Tensor, State]:
    """Compute one causal step: the output of `direction="forward"` for the next C tokens, and the state after them.

    Args:
        q, k, v: Tokens, q and k (B, H, C, D), v (B, H, C, E); C = 1 for streaming.
        state: State from `initial_state(k, v)`, `prefill` or the last step. Under the `source` convention, the state is
            stored already decayed by the last token.
        gates: As in `linear_attention`, with C for L; without `prefix`.
        valid: Boolean (B, C), False for padding, which leaves the state unchanged.
        settings, fields: See `Settings`. `form`, `direction`, `chunk_size`, `dropout_p` and `scan_merge` have no effect
            here, and are refused by name.

    Returns:
        Outputs (B, H, C, E) in the dtype of `v`, and the new state, which with gradients keeps the graph of all tokens
        before it.

    Raises:
        ValueError: An argument of the wrong shape, dtype or name, or two arguments that cannot be combined.
    """
    check_tokens(q, k, v)
    gates = take_gates(gates, fields, prefix=False)
    settings = with_fields(settings, fields, unused=(*UNUSED, "chunk_size"))
    check_gates(q, gates, settings)
    log_decay, beta, bonus, angles, _, erase, read, floor = gates
    check_masks(q, valid, None)
    q, k = TokenBlock(q, k, v, v, valid, feature_map=settings.feature_map).featurized()[:2]
    shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
    if not isinstance(state, State):
        raise ValueError(f"state: expected a State, from initial_state or prefill, got {type(state).__name__}")
    wide = state.S.dtype == state.z.dtype and state.S.dtype in (torch.float32, torch.float64)
    if state.S.shape != shape or state.z.shape != shape[:-1] or not wide:
        raise mismatch("state", f"S {shape}, z {shape[:-1]}, float32 or float64", state.S)
    normalize = settings.normalize
    with no_autocast(q):
        check_values(gates, valid)
        *rotated, erase, read = rotate_each(angles, valid, q, k, erase, read)
        if gates.delta:
            tokens = TokenBlock(*rotated, v, expand_decay(log_decay, q), valid)
            tokens = with_delta(tokens, beta, erase, read)
            y, row, state, _ = delta_advance(settings.undecayed_erase, state, None, tokens)
        else:
            weight = 1.0 if bonus is None else bonus.to(state.z.dtype).reshape(bonus.shape[0], 1, -1)
            separate = separate_rowsum(normalize, angles)
            recurrence = Recurrence(
                settings.decay_convention, "forward", weight, rowsum=normalize != "none" and not separate
            )
            tokens = TokenBlock(*rotated, v, expand_decay(log_decay, q), valid)
            y, row, new, _ = advance(recurrence, state, None, tokens)
            if separate:
                if normalize == "pre":
                    tokens = tokens._replace(gate=expand_decay(None, q))
                    recurrence = recurrence._replace(diagonal_weight=1.0)
                tokens = tokens._replace(q=q, k=k, v=v[..., :0])
                sums = advance(recurrence._replace(rowsum=True), state._replace(S=state.S[..., :0]), None, tokens)
                row, new = sums[1], State(new.S, sums[2].z)
            state = new
        return normalized(y, row, settings, q.shape[-1], floor).to(v.dtype), state


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | Tensor | None = None,
    *,
    valid: Tensor | None = None,
    segments: Tensor | SegmentIndex | None = None,
    settings: Settings = DEFAULTS,
    **fields: Any,
) -> tuple[Tensor, State]:
    """Compute the forward direction of a whole prompt in the chunk form, and the state from which `step` continues.

    Arguments and outputs are those of `linear_attention`. `form`, `direction`, `dropout_p` and `scan_merge` have no
    effect here, and are refused by name. With `segments`, the state is that of the last segment.
    """
    check_tokens(q, k, v)
    gates = take_gates(gates, fields)
    settings = with_fields(settings, fields, unused=UNUSED)
    settings = replace(settings, form="chunk", direction="forward", dropout_p=0.0)
    check_gates(q, gates, settings)
    log_decay, beta, _, angles, _, erase, read, _ = gates
    with no_autocast(q):
        checked, segments = isinstance(segments, SegmentIndex), prepared(q, valid, segments)
        index, valid = segments
        if not checked:
            check_values(gates, valid)
        q, k = TokenBlock(q, k, v, v, valid, feature_map=settings.feature_map).featurized()[:2]
        settings = replace(settings, feature_map=None)
        rotated_q, rotated_k, erase, read = rotate_each(angles, valid, q, k, erase, read)
        if gates.delta:
            tokens = TokenBlock(rotated_q, rotated_k, v, expand_decay(log_decay, q), valid, index)
            tokens = with_delta(tokens, beta, erase, read)
            y, state = delta_chunks(tokens, settings.chunk_size, "forward", settings.undecayed_erase, final=True)
            return normalized(y, None, settings, q.shape[-1]).to(v.dtype), state
        summed = k if separate_rowsum(settings.normalize, angles) else rotated_k
        tokens = TokenBlock(rotated_k, summed, v, expand_decay(log_decay, q), valid, index).masked()
        keys, summed, values, decays, _, index = tokens.to(tokens.gate.dtype)[:6]
        S = _decayed_keys(keys, decays, index, settings).mT @ values
        undecayed = settings.normalize == "pre"
        z = _decayed_keys(summed, torch.zeros_like(decays) if undecayed else decays, index, settings).sum(2)
    return linear_attention(q, k, v, gates, segments=segments, settings=settings), State(S, z)


def _decayed_keys(k: Tensor, log_decay: Tensor, segment_index: Tensor | None, settings: Settings) -> Tensor:
    """Return the keys (B, H, L, D), decayed up to the end of the sequence."""
    inclusive, exclusive = prefix_sums(log_decay)
    index = None if segment_index is None else segment_index[:, None, :, None]
    _, key = query_and_key(settings.decay_convention, "forward", inclusive, exclusive)
    last = CumulativeDecay(inclusive, index).map(lambda t: t[:, :, -1:])
    return k * decay(last, CumulativeDecay(key, index))
