"""One causal token after another: constant time and memory a token, from a state that is all there is to remember."""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.api import NORMALIZE, check_pairs, default_scale, finish, linear_attention, separate_rowsum
from lion.ops.arguments import (
    as_lanes,
    as_runs,
    check_chunk_size,
    check_gates,
    check_masks,
    check_tokens,
    choice,
    mismatch,
    no_autocast,
)
from lion.ops.decay import DECAY_CONVENTIONS, Clock, decay, prefix_sums, read_and_write
from lion.ops.delta import delta_advance, delta_scan
from lion.ops.features import apply_feature_map, check_feature_map
from lion.ops.rnn import Recurrence, State, Tokens, advance
from lion.ops.rotary import rotate_pair


def step(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    angles: Tensor | None = None,
    feature_map: str | None = None,
    normalize: str = "sum",
    decay_convention: str = "source",
    scale: float | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, State]:
    """One causal step: the output of `direction="forward"` for the next token(s), and the state after it.

    Defaults are those of `linear_attention`.

    Args:
        state: `initial_state(k, v)`, or what `prefill` or the last step returned. Under the `source` convention it is
            stored already decayed by the last token.
        q, k: (B, H, C, D); v: (B, H, C, E), C = 1 for streaming. The others as in `linear_attention`, with C for L.

    Returns:
        (B, H, C, E) in the dtype of `v`, and the new state.
    """
    _check(q, k, v, log_decay, beta, bonus, angles, feature_map, normalize, decay_convention)
    q, k = apply_feature_map(feature_map, q), apply_feature_map(feature_map, k)
    shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
    if state.S.shape != shape or state.z.shape != shape[:-1]:
        raise mismatch("state", f"S {shape}, z {shape[:-1]}", state.S)
    with no_autocast(q):
        turned = rotate_pair(q, k, angles)
        if beta is not None:
            y, row, state, _ = delta_advance(None, state, None, Tokens(*turned, v, beta[..., None]))
        else:
            own = 1.0 if bonus is None else bonus.to(state.z.dtype).reshape(bonus.shape[0], 1, -1)
            apart = separate_rowsum(normalize, angles)
            way = Recurrence(decay_convention, "forward", own, normalize != "none" and not apart)
            tokens = Tokens(*turned, v, as_lanes(log_decay, q))
            y, row, new, _ = advance(way, state, None, tokens)
            if apart:
                if normalize == "pre":
                    tokens, way = tokens._replace(gate=as_lanes(None, q)), way._replace(own=1.0)
                tokens = tokens._replace(q=q, k=k, v=v[..., :0])
                sums = advance(way._replace(rowsum=True), state._replace(S=state.S[..., :0]), None, tokens)
                row, new = sums[1], new._replace(z=sums[2].z)
            state = new
        return finish(y, row, normalize, scale=default_scale(scale, q), eps=eps).to(v.dtype), state


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    angles: Tensor | None = None,
    feature_map: str | None = None,
    normalize: str = "sum",
    decay_convention: str = "source",
    scale: float | None = None,
    chunk_size: int = 64,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, State]:
    """The forward direction of a whole prompt in the chunk form, and the state to go on from with `step`.

    Arguments and output as in `linear_attention`. With `segments` the state is that of the last one.
    """
    _check(q, k, v, log_decay, beta, bonus, angles, feature_map, normalize, decay_convention)
    check_masks(q, valid, segments)
    check_chunk_size(chunk_size)
    with no_autocast(q):
        run, kept = as_runs(valid, segments)
        q, k = Tokens(q, k, v, v, kept, phi=feature_map).mapped()[:2]
        read, turned = rotate_pair(q, k, angles, kept)
        if beta is not None:
            y, state = delta_scan(Tokens(read, turned, v, beta[..., None], kept, run), chunk_size, False)
            return finish(y, None, normalize, scale=default_scale(scale, q), eps=eps).to(v.dtype), state
        summed = k if separate_rowsum(normalize, angles) else turned
        tokens = Tokens(turned, summed, v, as_lanes(log_decay, q), kept, run).kept()
        turned, plain, values, decays, _, run, _ = tokens.to(tokens.gate.dtype)
        S = _decayed(turned, decays, run, decay_convention).mT @ values
        z = _decayed(plain, torch.zeros_like(decays) if normalize == "pre" else decays, run, decay_convention).sum(2)
    y = linear_attention(
        q,
        k,
        v,
        log_decay,
        beta=beta,
        bonus=bonus,
        angles=angles,
        form="chunk",
        direction="forward",
        normalize=normalize,
        decay_convention=decay_convention,
        scale=scale,
        chunk_size=chunk_size,
        valid=valid,
        segments=segments,
        eps=eps,
    )
    return y, State(S, z)


def _decayed(k: Tensor, log_decay: Tensor, run: Tensor | None, decay_convention: str) -> Tensor:
    """Keys (B, H, L, D) as they are left after the last token."""
    upto, before = prefix_sums(log_decay)
    run = None if run is None else run[:, None, :, None]
    key = Clock(read_and_write(decay_convention, "forward", upto, before)[1], run)
    return k * decay(Clock(upto, run).map(lambda t: t[:, :, -1:]), key)


def _check(q, k, v, log_decay, beta, bonus, angles, feature_map, normalize, decay_convention) -> None:
    check_tokens(q, k, v)
    check_gates(q, log_decay, beta, bonus, angles)
    check_feature_map(feature_map)
    choice("decay_convention", decay_convention, DECAY_CONVENTIONS)
    check_pairs(choice("normalize", normalize, NORMALIZE), log_decay, beta, bonus)
