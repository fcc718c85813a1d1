"""Incremental decoding of causal sequences: constant time and memory per token, with a state that holds the past."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lion.ops.arguments import Gates, check_gates, check_tokens, mismatch, no_autocast, take_gates
from lion.ops.delta import delta_advance, delta_prefill
from lion.ops.dtypes import wide_dtype
from lion.ops.forms import Scores, call_sums, prepare
from lion.ops.rnn import advance, direction_of, written_state
from lion.ops.scale import normalized
from lion.ops.segments import SegmentIndex, check_masks
from lion.ops.settings import DEFAULTS, Settings, with_fields
from lion.ops.tokens import EnteringState, State, Sums

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
    settings = replace(settings, form="rnn", direction="forward", dropout_p=0.0, chunk_size=DEFAULTS.chunk_size)
    check_gates(q, gates, settings)
    check_masks((q.shape[0], q.shape[2]), valid, None)
    check_state(k, v, state)
    dim = q.shape[-1]
    with no_autocast(q):
        scores, of_rows = prepare(q, k, v, gates, valid, None, settings)
        if scores.tokens.delta:
            sums, new = delta_advance(scores.tokens, settings, entering(state))
            return normalized(sums, settings, dim).to(v.dtype), State(new.S, new.z)
        sums, new = advance(scores.tokens, scores.settings, entering(state))
        z = new.z
        if of_rows is not None:
            empty = State(state.S[..., :0], state.z)
            rows, new_rows = advance(of_rows.tokens, of_rows.settings, entering(empty))
            sums = Sums(sums.numerator, rows.row_sum)
            z = new_rows.z
        return normalized(sums, settings, dim, gates.floor).to(v.dtype), State(new.S, z)


def check_state(k: Tensor, v: Tensor, state: State) -> None:
    """Check the shapes and the dtype of a state of keys (B, H, C, D) and values (B, H, C, E)."""
    if not isinstance(state, State):
        raise ValueError(f"state: expected a State, from initial_state or prefill, got {type(state).__name__}")
    shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
    wide = state.S.dtype == state.z.dtype and state.S.dtype in (torch.float32, torch.float64)
    if state.S.shape != shape or state.z.shape != shape[:-1] or not wide:
        raise mismatch("state", f"S {shape}, z {shape[:-1]}, float32 or float64", state.S)


def entering(state: State) -> EnteringState:
    return EnteringState(state.S, state.z, None)


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
    dim = q.shape[-1]
    with no_autocast(q):
        scores, of_rows = prepare(q, k, v, gates, valid, segments, settings)
        if scores.tokens.delta:
            y, state = delta_prefill(scores.tokens, settings)
            return normalized(Sums(y, None), settings, dim).to(v.dtype), state
        sums = call_sums(scores, of_rows)
        if gates.prefix is not None:  # the state has the gradients of the decays
            scores, of_rows = prepare(q, k, v, gates._replace(prefix=None), valid, segments, settings)
        state = last_state(scores)
        if of_rows is not None:
            state = State(state.S, last_state(of_rows).z)
        return normalized(sums, settings, dim, gates.floor).to(v.dtype), state


def last_state(scores: Scores) -> State:
    """Return the state after all tokens, in the forward direction."""
    tokens = scores.tokens.masked()
    tokens = tokens.to(wide_dtype(tokens.k))
    return written_state(tokens, direction_of(tokens, scores.settings))
