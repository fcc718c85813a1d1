"""Delta rule: each token corrects the value that the state stores, with or without decays.

    S_i = (I - e_i r_i^T) Diag(lambda_i) S_{i-1} + w_i v_i^T        y_i = q_i S_i

The token reads the decayed state with r, erases along e, and writes its value along w. DeltaNet (arXiv 2406.06484) has
no decay, r = k and e = w = beta k. With keys of norm 1 and beta in [0, 2], its steps never enlarge the state. With
`undecayed_erase` (RWKV-7, Comba), r reads the state before the decay:
`S_i = (Diag(lambda_i) - e_i r_i^T) S_{i-1} + w_i v_i^T`. In both directions together, `(q_i . w_i) v_i` is subtracted
once, so that a token's own value is counted once.

Inside a chunk that a state S enters, let `(R E)_ji` be the product of r_j and e_i under the decays of the tokens from i
to j (i excluded; j included, except for an undecayed erase), and `R` the vectors r under the decays since the start of
the chunk. What all tokens read, `P`, solves a triangular system (the UT transform):

    P = (I + tril(R E, -1))^-1 (R S + tril(R W, -1) V)
    Y = Q S + tril(Q W) V - tril(Q E) P             S <- Diag(kept) S + W^T V - E^T P

`N = -P` are the values that e writes. Where e = w, they are the new values `N = V - P`, at half the products. In both
cases `N = (I + tril(R E, -1))^-1 (X - R S)`, where X is `-tril(R W, -1) V`, or V.

All exponents are sums of log decays over tokens between two others, so none is positive. Both directions share the
products of all pairs of a chunk: the lower triangle is the forward scan, the upper one the backward scan. A backward
scan is then the forward scan of reversed tokens, and both are computed as one (`lion.ops.delta_states`). Over a whole
sequence S = 0, and the full form without decays is `tril(Q K^T) T_F V + triu(Q K^T) T_B V - diag(beta q k) V` with one
`T = (I + tril(R E, -1))^-1 B` for each direction. The paper of LION prints something else. Appendix B.7 subtracts
`q_i . k_i` without its beta. `(Q K^T) T V` in Table 1 multiplies before it masks, and its `triu(., -1)` should be
`triu(., +1)`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import Gates
from lion.ops.chunk import chunk_grid
from lion.ops.decay import bounded, decay_mask, exp_where, make_directions, scan_directions
from lion.ops.delta_states import chunk_states
from lion.ops.dtypes import sum_dtype, wide_dtype
from lion.ops.exchange import Part
from lion.ops.rnn import Compiler, leaving_segment, scan
from lion.ops.settings import Settings
from lion.ops.tokens import EnteringState, State, Sums, Tokens, initial_state, optional
from lion.ops.vector import exclusive_sum
from lion.ops.vector_pairs import FACTORS, lambdas
from lion.ops.vector_scores import vector_scores


def with_delta(tokens: Tokens, gates: Gates) -> Tokens:
    """Return the tokens with the vectors of a delta rule."""
    beta = gates.beta
    if beta is not None:
        beta = beta[..., None]
    return tokens._replace(beta=beta, erase=gates.erase, read=gates.read)


def delta_sums(tokens: Tokens, settings: Settings, form: str, part: Part | None = None) -> Sums:
    """Compute the outputs (B, H, L, E) in full or in chunks, without row sums; the tokens may be a `part` of rows."""
    size = None if form == "full" else settings.chunk_size
    if part is None:
        y = delta_chunks(tokens, settings, size)
    else:
        y = delta_chunks_of_part(tokens, settings, size, part)
    return counted_once(y, tokens, settings)


def delta_rnn_sums(tokens: Tokens, settings: Settings, compiler: Compiler) -> Sums:
    """Compute the outputs (B, H, L, E) in the sequential form, without row sums."""
    y = scan(delta_advance, tokens, settings, compiler).numerator
    return counted_once(y, tokens, settings)


def counted_once(y: Tensor, tokens: Tokens, settings: Settings) -> Sums:
    """Return the outputs of all directions, in which the value of a token itself is counted once."""
    if settings.direction == "both":
        tokens = tokens.masked().to(y.dtype)
        own = (tokens.q * write_vectors(tokens)).sum(-1, keepdim=True)
        y = y - own * tokens.v
    return Sums(y.to(sum_dtype(tokens.v)), None)


def write_vectors(tokens: Tokens) -> Tensor:
    """Return w (B, H, .., C, D), along which values are written."""
    if tokens.beta is None:
        return tokens.k
    return tokens.beta * tokens.k


def delta_chunks(tokens: Tokens, settings: Settings, size: int | None) -> Tensor:
    """Scan the tokens in chunks of at most `size`, and return the outputs (B, H, L, E).

    Without a size, one chunk holds all tokens, which is the full form. All that does not depend on the states is
    computed for all chunks at once.

    Decays, triangular systems and sums are in float32. Their results are rounded to the dtype of the tokens before they
    are multiplied, unless states leave the function.
    """
    scans = chunk_scans(tokens, settings, size, tokens.v.dtype)
    if scans.segment is not None:
        scans = in_segments(scans, scans.segment, shifted_segments(scans.segment, scans.segment[:1, :, 0]))
    written = values_along_w(scans)
    if len(scans.q) == 1:
        outputs = chunk_outputs(scans, None, new_values(scans, written.right), written.y)
    else:
        S, new = states_of(scans, written)
        outputs = chunk_outputs(scans, S[:-1], new, written.y)
    return merged(outputs, settings.direction)[:, :, : tokens.q.shape[2]]


def delta_prefill(tokens: Tokens, settings: Settings) -> tuple[Tensor, State]:
    """Scan the tokens forward in chunks, and return the outputs (B, H, L, E) and the state after the last token."""
    empty = initial_state(tokens.k, tokens.v)
    scans = chunk_scans(tokens, settings, settings.chunk_size, empty.S.dtype)
    if scans.segment is not None:
        scans = in_segments(scans, scans.segment, shifted_segments(scans.segment, scans.segment[:1, :, 0]))
    written = values_along_w(scans)
    S, new = states_of(scans, written)
    outputs = chunk_outputs(scans, S[:-1], new, written.y)
    y = merged(outputs, "forward")[:, :, : tokens.q.shape[2]]
    return y, State(S[-1].clone(), empty.z)  # not a view of all states


def delta_chunks_of_part(tokens: Tokens, settings: Settings, size: int | None, part: Part) -> Tensor:
    """Compute `delta_chunks` of tokens that are a part of the rows; the processes exchange maps of states."""
    wide = wide_dtype(tokens.k)
    scans = chunk_scans(tokens, settings, size, wide)
    if scans.segment is not None:
        outer = entering_segments(part, scans.segment[0, :, 0], settings.direction)
        scans = in_segments(scans, scans.segment, shifted_segments(scans.segment, outer))
    written = values_along_w(scans)
    S, new = part_states(scans, written, part, settings.direction)
    outputs = chunk_outputs(scans, S[:-1], new, written.y)
    return merged(outputs, settings.direction)[:, :, : tokens.q.shape[2]]


def delta_advance(tokens: Tokens, settings: Settings, state: EnteringState) -> tuple[Sums, EnteringState]:
    """Read and update a state by C tokens in one direction, as `lion.ops.rnn.advance` does."""
    last = leaving_segment(tokens, settings)
    chunk = tokens.masked().to(state.S.dtype).in_chunks(tokens.q.shape[2], 1)
    scans = in_scan_order(pair_products(chunk, settings), settings.direction, state.S.dtype)
    if scans.segment is not None and state.segment is not None:
        scans = in_segments(scans, scans.segment, state.segment[None])
    written = values_along_w(scans)
    new = new_values(scans, written.right - scans.read @ state.S)
    S = scans.kept * state.S + scans.erase.mT @ new
    if written.state is not None:
        S = S + written.state
    y = merged(chunk_outputs(scans, state.S, new, written.y), settings.direction)
    return Sums(y, None), EnteringState(S[0], state.z, last)


def chunk_scans(tokens: Tokens, settings: Settings, size: int | None, dtype: torch.dtype) -> Scan:
    """Cut tokens into chunks of at most `size`, and return the chunks of all directions in scan order."""
    length = tokens.q.shape[2]
    tokens = tokens.masked().to(wide_dtype(tokens.k))
    grid = (length, 1) if size is None else chunk_grid(length, size)
    chunks = tokens.in_chunks(*grid)
    return in_scan_order(pair_products(chunks, settings), settings.direction, dtype)


class PairProducts(NamedTuple):
    """Vectors of the tokens of chunks (B, H, .., C, D), and their products, which both directions share.

    Attributes:
        q, read: Queries and vectors r, times the decay of their own token (r of an undecayed erase: without it).
        erase, write: Vectors e and w; w is None where it is e.
        v: Values (B, H, .., C, E).
        read_erase, read_write: Products of r with e and w under the decays of the tokens between each pair
            (B, H, .., C, C); those of a token with itself do not count. `read_write` is None where w is e.
        score_erase, score_write: Products of q with e and w; those of a token with itself have no decay.
        before, after: Decays of all tokens before and after each token of the chunk (b, H, .., C, D or 1).
        kept: Decays of all tokens of the chunk (b, H, .., D or 1, 1).
        segment: Segment numbers (B, .., C), or None.
    """

    q: Tensor
    read: Tensor
    erase: Tensor
    write: Tensor | None
    v: Tensor
    read_erase: Tensor
    read_write: Tensor | None
    score_erase: Tensor
    score_write: Tensor | None
    before: Tensor
    after: Tensor
    kept: Tensor
    segment: Tensor | None


def pair_products(tokens: Tokens, settings: Settings) -> PairProducts:
    """Compute the products of all pairs of tokens inside chunks (B, H, .., C, D)."""
    log_decay = bounded(tokens.decays())
    tokens = tokens._replace(log_decay=log_decay)
    lam = lambdas(log_decay)
    read = tokens.k if tokens.read is None else tokens.read
    write = write_vectors(tokens)
    erase = write if tokens.erase is None else tokens.erase
    targets = [write] if tokens.erase is None else [erase, write]
    # in this order, Inductor computes the decayed vectors where they are read, and does not store them
    q = lam * tokens.q
    decayed_read = read if settings.undecayed_erase else lam * read
    pairs = vector_pairs if tokens.vector else scalar_pairs
    of_read, of_q = pairs(tokens, read, targets, settings)
    return PairProducts(
        q=q,
        read=decayed_read,
        erase=erase,
        write=None if tokens.erase is None else write,
        v=tokens.v,
        read_erase=of_read[0],
        read_write=None if tokens.erase is None else of_read[1],
        score_erase=of_q[0],
        score_write=None if tokens.erase is None else of_q[1],
        before=exp_where(exclusive_sum(log_decay), factors=FACTORS),
        after=exp_where(exclusive_sum(log_decay.flip(-2)).flip(-2), factors=FACTORS),
        kept=exp_where(log_decay.sum(-2))[..., None],
        segment=tokens.segment,
    )


def scalar_pairs(
    tokens: Tokens, read: Tensor, targets: list[Tensor], settings: Settings
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the products of r, and of q, with each of the targets, under one decay for all key dimensions.

    The rows r and q of a token are neighbours in one product. On a GPU, their gradients then have the strides of
    tokens, so that one kernel adds up all gradients of a token.
    """
    mask = pair_mask(tokens, "target", settings)
    read_mask = mask
    if settings.undecayed_erase:
        read_mask = pair_mask(tokens, "between", settings)
    rows = torch.stack([read, tokens.q], -2).flatten(-3, -2)
    columns = torch.stack(targets, -3).flatten(-3, -2)
    pairs = rows @ columns.mT
    of_read, of_q = pairs.unflatten(-2, (-1, 2)).unflatten(-1, (len(targets), -1)).unbind(-3)
    return (of_read * read_mask).unbind(-2), (of_q * mask).unbind(-2)


def pair_mask(tokens: Tokens, decay_convention: str, settings: Settings) -> Tensor:
    """Return the decays (b, H, .., C, 1, C) of all pairs of tokens in chunks."""
    directions = make_directions(tokens.decays(), decay_convention, settings.direction)
    return decay_mask(directions, tokens.segment).squeeze(-1)[..., None, :]


def vector_pairs(
    tokens: Tokens, read: Tensor, targets: list[Tensor], settings: Settings
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the products of r, and of q, with each of the targets, under a decay for each key dimension."""
    lam = lambdas(tokens.decays())
    target = torch.stack(targets)
    decayed_read = read if settings.undecayed_erase else lam * read
    readers = torch.stack([decayed_read, lam * tokens.q])[:, None]
    readers, columns = torch.broadcast_tensors(readers, target)
    between = replace(settings, decay_convention="between")
    of_read, of_q = vector_scores(readers, columns, tokens.decays(), tokens.segment, between, False)
    same = torch.eye(of_q.shape[-1], dtype=torch.bool, device=of_q.device)
    of_q = torch.where(same, (tokens.q * target).sum(-1, keepdim=True), of_q)
    return of_read.unbind(), of_q.unbind()


class Scan(NamedTuple):
    """Chunks in scan order, as one forward scan; two scans are two halves of the batch b.

    Attributes:
        q, read: Queries and vectors r (N, b, H, C, D), times the decays since the start of the chunk.
        erase, write: Vectors e and w, times the decays to the end of the chunk; w is None where it is e.
        v: Values (N, b, H, C, E).
        read_erase, read_write, score_erase, score_write: As in `PairProducts`, of which the lower triangle counts.
        kept: Decays of all tokens of the chunk (N, b, H, D or 1, 1).
        segment: Segment numbers (N, b, C), or None.
    """

    q: Tensor
    read: Tensor
    erase: Tensor
    write: Tensor | None
    v: Tensor
    read_erase: Tensor
    read_write: Tensor | None
    score_erase: Tensor
    score_write: Tensor | None
    kept: Tensor
    segment: Tensor | None


def in_scan_order(p: PairProducts, direction: str, dtype: torch.dtype) -> Scan:
    """Return the chunks in scan order; a backward scan reverses the chunks, and the tokens of each chunk.

    All but the triangular system and the decays are rounded to `dtype`.
    """

    def tokens(forward: Tensor, backward: Tensor) -> Tensor:  # (B, H, N, C, D)
        return scans_of(forward.to(dtype), backward.to(dtype), direction, 2, [-2])

    def pairs(x: Tensor) -> Tensor:  # (B, H, N, C, C)
        return scans_of(x.to(dtype), x.to(dtype), direction, 2, [-2, -1])

    kept = p.kept.expand(*p.q.shape[:-2], -1, -1)
    return Scan(
        q=tokens(p.q * p.before, p.q * p.after),
        read=tokens(p.read * p.before, p.read * p.after),
        erase=tokens(p.erase * p.after, p.erase * p.before),
        write=None if p.write is None else tokens(p.write * p.after, p.write * p.before),
        v=tokens(p.v, p.v),
        read_erase=scans_of(p.read_erase, p.read_erase, direction, 2, [-2, -1]),
        read_write=optional(pairs, p.read_write),
        score_erase=pairs(p.score_erase),
        score_write=optional(pairs, p.score_write),
        kept=scans_of(kept, kept, direction, 2, []),
        segment=None if p.segment is None else scans_of(p.segment, p.segment, direction, 1, [2]),
    )


def scans_of(forward: Tensor, backward: Tensor, direction: str, chunks: int, dims: list[int]) -> Tensor:
    """Return the chunks (N, b, ..) of all active directions; the backward ones are flipped along chunks and `dims`."""
    scans = []
    if direction != "backward":
        scans.append(forward.movedim(chunks, 0))
    if direction != "forward":
        scans.append(backward.flip(chunks, *dims).movedim(chunks, 0))
    if len(scans) == 1:
        return scans[0]
    return torch.cat(scans, 1)


def merged(y: Tensor, direction: str) -> Tensor:
    """Add up the outputs (N, b, H, C, E) of every scan, in the order of the tokens (B, H, N C, E)."""
    if direction == "backward":
        y = y.flip(0, -2)
    if direction == "both":
        forward, backward = y.unflatten(1, (2, -1)).unbind(1)
        y = forward + backward.flip(0, -2)
    return y.movedim(0, 2).flatten(2, 3)


def in_segments(scans: Scan, segment: Tensor, entering: Tensor) -> Scan:
    """Return the chunks, where tokens read their own segment only, and only the last segment is passed on.

    `segment` (N, b, C) numbers the segments of the tokens, `entering` (N, b) those of the states that enter.
    """
    segment = segment[..., None, :]  # (N, b, 1, C)
    first = (segment == entering[..., None, None])[..., None]  # (N, b, 1, C, 1)
    final = (segment == segment[..., -1, None])[..., None]
    return scans._replace(
        q=scans.q * first,
        read=scans.read * first,
        erase=scans.erase * final,
        write=None if scans.write is None else scans.write * final,
        kept=scans.kept * first[..., -1, None, :],
    )


def shifted_segments(segment: Tensor, outer: Tensor) -> Tensor:
    """Return the segments (N, b) of the states that enter chunks (N, b, C); `outer` (1, b) enters the first one."""
    return torch.cat([outer, segment[:-1, :, -1]])


def entering_segments(part: Part, first: Tensor, direction: str) -> Tensor:
    """Return the segments (1, b) of the states that enter a part; `first` (b,) are those of its first tokens."""
    segments = []
    for name in scan_directions(direction):
        segment = part.entering_segment(name == "backward")
        if segment is None:
            return first[None]
        segments.append(segment)
    return torch.cat(segments)[None]


def states_of(scans: Scan, written: Written) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk and after the last one, and the new values (`chunk_states`)."""
    return chunk_states(scans.read_erase, scans.read, written.right, scans.erase, scans.kept, written.state)


def part_states(scans: Scan, written: Written, part: Part, direction: str) -> tuple[Tensor, Tensor]:
    """Return the states and new values of `states_of` for a part of the rows, which exchanges maps of states.

    A map (.., D, D + E) is affine: its first D columns are multiplied by a state, and the others are added. The maps
    from the state that enters a part to its states and new values are those of a scan with D more values.
    """
    dim, width = scans.read.shape[-1], written.right.shape[-1]
    right = F.pad(written.right, (dim, 0))
    state = written.state
    if state is not None:
        state = F.pad(state, (dim, 0))
    unchanged = torch.eye(dim, dim + width, dtype=right.dtype, device=right.device)
    maps, values = chunk_states(scans.read_erase, scans.read, right, scans.erase, scans.kept, state, unchanged)
    names = scan_directions(direction)
    every = part.gather(*maps[-1].unflatten(0, (len(names), -1)))
    S = torch.cat([entering_state(one, part, name == "backward") for one, name in zip(every, names)])
    return applied(maps, S), applied(values, S)


def applied(maps: Tensor, S: Tensor) -> Tensor:
    """Return states or values (.., E), from maps (.., D + E) of a state S (.., D, E)."""
    dim = S.shape[-2]
    return maps[..., :dim] @ S + maps[..., dim:]


def entering_state(maps: Tensor, part: Part, reverse: bool) -> Tensor:
    """Return the state (B, H, D, E) that enters a part, from the maps (P, B, H, D, D + E) of all parts."""
    order = range(len(maps))
    if reverse:
        order = order[::-1]
    states = {}
    S = torch.zeros_like(maps[0, ..., maps.shape[-2] :])
    for p in order:
        states[p] = S
        S = applied(maps[p], S)
    # a function of all maps: every process takes part in the reduction
    return torch.stack([states[p] for p in range(len(maps))])[part.rank]


def new_values(scans: Scan, right: Tensor) -> Tensor:
    """Return the values (N, b, H, C, E) that e writes, for the right side of their triangular system."""
    lower = scans.read_erase
    new = torch.linalg.solve_triangular(lower, right.to(lower.dtype), upper=False, unitriangular=True)
    return new.to(right.dtype)


class Written(NamedTuple):
    """Contributions of the values that the tokens of chunks write, if no state enters.

    Attributes:
        right: Right side (N, b, H, C, E) of the triangular system.
        y: Outputs (N, b, H, C, E) of the values that are written along w; None where w is e.
        state: State (N, b, H, D, E) that these values leave; None where w is e.
    """

    right: Tensor
    y: Tensor | None
    state: Tensor | None


def values_along_w(scans: Scan) -> Written:
    """Compute the contributions of the values that the tokens of chunks write along w."""
    if scans.write is None or scans.read_write is None or scans.score_write is None:
        return Written(scans.v, None, None)
    return Written(
        right=-(scans.read_write.tril(-1) @ scans.v),
        y=scans.score_write.tril() @ scans.v,
        state=scans.write.mT @ scans.v,
    )


def chunk_outputs(scans: Scan, S: Tensor | None, new: Tensor, y: Tensor | None) -> Tensor:
    """Return the outputs (N, b, H, C, E) of chunks with new values `new`, which are read beside S and y."""
    outputs = scans.score_erase.tril() @ new
    if y is not None:
        outputs = outputs + y
    if S is None:
        return outputs
    flat = outputs.flatten(0, -3)
    return torch.baddbmm(flat, scans.q.flatten(0, -3), S.flatten(0, -3)).view_as(outputs)  # rounds once
