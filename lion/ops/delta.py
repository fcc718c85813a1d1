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

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import sum_dtype
from lion.ops.chunk import chunk_grid
from lion.ops.decay import bounded, decay_mask, exp_where, make_directions, scan_directions
from lion.ops.delta_states import chunk_states
from lion.ops.exchange import Part
from lion.ops.full import pad_segments
from lion.ops.rnn import Compiler, eager, scan
from lion.ops.tokens import ScoreSettings, State, TokenBlock, initial_state
from lion.ops.vector import exclusive_sum
from lion.ops.vector_pairs import FACTORS, lambdas
from lion.ops.vector_scores import vector_scores


def with_delta(tokens: TokenBlock, beta: Tensor | None, erase: Tensor | None, read: Tensor | None) -> TokenBlock:
    """Return the tokens with beta (B, H, L), erase and read (B, H, L, D) of the delta rule."""
    return tokens._replace(beta=None if beta is None else beta[..., None], erase=erase, read=read)


def delta_parts(
    tokens: TokenBlock, how: ScoreSettings, compiler: Compiler = eager, part: Part | None = None
) -> tuple[Tensor, None]:
    """Compute the numerator (B, H, L, E), without a row sum; the tokens may be a `part` of the rows."""
    if how.form == "delta_rnn":
        steps = dict.fromkeys(scan_directions(how.direction), how.undecayed_erase)
        y, _ = scan(steps, delta_advance, tokens, rowsum=False, size=how.chunk_size, compiler=compiler)
    else:
        size = None if how.form == "full" else how.chunk_size
        y, _ = delta_chunks(tokens, size, how.direction, how.undecayed_erase, part=part)
    if how.direction == "both":
        tokens = tokens.masked().to(y.dtype)
        y = y - (tokens.q * write_vectors(tokens)).sum(-1, keepdim=True) * tokens.v
    return y.to(sum_dtype(tokens.v)), None


def write_vectors(tokens: TokenBlock) -> Tensor:
    """Return w (B, H, .., C, D), along which values are written."""
    return tokens.k if tokens.beta is None else tokens.beta * tokens.k


def delta_chunks(
    tokens: TokenBlock,
    size: int | None,
    direction: str,
    undecayed_erase: bool,
    final: bool = False,
    part: Part | None = None,
) -> tuple[Tensor, State | None]:
    """Scan the tokens in chunks of at most `size`, and return the outputs, and with `final` the last state.

    Without a size, one chunk holds all tokens, which is the full form. All that does not depend on the states is
    computed for all chunks at once. `final` requires the direction "forward". The tokens may be a `part` of the rows.

    Decays, triangular systems and sums are in float32. Their results are rounded to the dtype of the tokens before they
    are multiplied, unless states leave the function.
    """
    length = tokens.q.shape[2]
    empty = initial_state(tokens.k, tokens.v)
    narrow = tokens.v.dtype if part is None and not final else empty.S.dtype
    tokens = tokens.masked().to(empty.S.dtype)
    size, count = (length, 1) if size is None else chunk_grid(length, size)
    padding = size * count - length
    index = pad_segments(tokens.segment_index, padding)
    chunks = tokens.map(lambda x: (F.pad(x, (0, 0, 0, padding)) if padding else x).unflatten(2, (count, size)))
    if index is not None:
        index = index.unflatten(1, (count, size))  # (B, N, C)
    products = pair_products(chunks._replace(segment_index=index), direction, undecayed_erase)
    p = in_scan_order(products, direction, narrow)
    if index is not None:
        index = p.segment_index
        outer = index[:1, :, 0] if part is None else entering_segments(part, index[0, :, 0], direction)
        p = in_segments(p, torch.cat([outer, index[:-1, :, -1]]))
    right, y, written = values_along_w(p)
    if part is not None:
        S, new = part_states(p, right, written, part, direction)
    elif count > 1 or final:
        S, new = chunk_states(p.gram[0], p.read, right, p.erase, p.kept, written)
    else:
        S, new = None, new_values(p, right)
    state = State(S[-1].clone(), empty.z) if final else None  # not a view of all states
    S = S if S is None else S[:-1]
    return merged(outputs(p, S, new, y), direction)[:, :, :length], state


def delta_advance(undecayed_erase: bool, state: State, segment: Tensor | None, tokens: TokenBlock):
    """Read and update a state by C tokens, with the arguments and results of `lion.ops.rnn.advance`."""
    tokens = tokens.masked().to(state.S.dtype)
    chunk = tokens.map(lambda x: x.unsqueeze(2), lambda x: x.unsqueeze(1))
    p = in_scan_order(pair_products(chunk, "forward", undecayed_erase), "forward", state.S.dtype)
    p = p if segment is None else in_segments(p, segment[None])
    right, y, written = values_along_w(p)
    new = new_values(p, right - p.read @ state.S)
    S = p.kept * state.S + p.erase.mT @ new
    S = S if written is None else S + written
    y = merged(outputs(p, state.S, new, y), "forward")
    return y, None, State(S[0], state.z), None if segment is None else tokens.segment_index[:, -1]


class PairProducts(NamedTuple):
    """Vectors of the tokens of chunks (B, H, .., C, D), and their products, which both directions share.

    Attributes:
        q, read: Queries and vectors r, times the decay of their own token (r of an undecayed erase: without it).
        erase, write: Vectors e and w; w is None where it is e.
        v: Values (B, H, .., C, E).
        gram, scores: Products of r, and of q, with e and (unless it is e) w, under the decays of the tokens between
            each pair (B, H, .., C, C). For a token with itself, those of q have no decay, and those of r do not count.
        before, after: Decays of all tokens before and after each token of the chunk (b, H, .., C, D or 1).
        kept: Decays of all tokens of the chunk (b, H, .., D or 1, 1).
        segment_index: Segment numbers (B, .., C), or None.
    """

    q: Tensor
    read: Tensor
    erase: Tensor
    write: Tensor | None
    v: Tensor
    gram: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    before: Tensor
    after: Tensor
    kept: Tensor
    segment_index: Tensor | None


def pair_products(tokens: TokenBlock, direction: str, undecayed_erase: bool) -> PairProducts:
    """Compute the products of all pairs of tokens inside chunks (B, H, .., C, D)."""
    tokens = tokens._replace(gate=bounded(tokens.gate))
    log_decay, lam = tokens.gate, lambdas(tokens.gate)
    read, write, erase = tokens.k if tokens.read is None else tokens.read, write_vectors(tokens), tokens.erase
    pairs = scalar_pairs if log_decay.shape[-1] == 1 else vector_pairs
    # in this order, Inductor computes the decayed vectors where they are read, and does not store them
    q, decayed_read = lam * tokens.q, read if undecayed_erase else lam * read
    gram, scores = pairs(tokens, read, [write] if erase is None else [erase, write], direction, undecayed_erase)
    vectors = (q, decayed_read, write, None) if erase is None else (q, decayed_read, erase, write)
    sums = exclusive_sum(log_decay), exclusive_sum(log_decay.flip(-2)).flip(-2)
    before, after = (exp_where(x, factors=FACTORS) for x in sums)
    kept = exp_where(log_decay.sum(-2))[..., None]
    return PairProducts(*vectors, tokens.v, gram, scores, before, after, kept, tokens.segment_index)


def scalar_pairs(
    tokens: TokenBlock, read: Tensor, targets: list[Tensor], direction: str, undecayed_erase: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the products of r, and of q, with each of the targets, under one decay for all key dimensions.

    The rows r and q of a token are neighbours in one product. On a GPU, their gradients then have the strides of
    tokens, so that one kernel adds up all gradients of a token.
    """
    masks = []
    for convention in ("target", "between")[: 1 + undecayed_erase]:
        directions = make_directions(
            tokens.gate, tokens.segment_index, decay_convention=convention, direction=direction
        )
        masks.append(decay_mask(directions).squeeze(-1)[..., None, :])  # (b, H, .., C, 1, C)
    rows, columns = torch.stack([read, tokens.q], -2), torch.stack(targets, -3)
    pairs = rows.flatten(-3, -2) @ columns.flatten(-3, -2).mT
    gram, scores = pairs.unflatten(-2, (-1, 2)).unflatten(-1, (len(targets), -1)).unbind(-3)
    return (gram * masks[-1]).unbind(-2), (scores * masks[0]).unbind(-2)


def vector_pairs(
    tokens: TokenBlock, read: Tensor, targets: list[Tensor], direction: str, undecayed_erase: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the products of r, and of q, with each of the targets, under a decay for each key dimension."""
    lam, target = lambdas(tokens.gate), torch.stack(targets)
    readers = torch.stack([read if undecayed_erase else lam * read, lam * tokens.q])[:, None]
    how = ScoreSettings("full", "between", direction, False, False, 0)
    gram, scores = vector_scores(*torch.broadcast_tensors(readers, target), tokens.gate, tokens.segment_index, how)
    same = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    scores = torch.where(same, (tokens.q * target).sum(-1, keepdim=True), scores)
    return gram.unbind(), scores.unbind()


class Scan(NamedTuple):
    """Chunks in scan order, as one forward scan; two scans are two halves of the batch b.

    Attributes:
        q, read: Queries and vectors r (N, b, H, C, D), times the decays since the start of the chunk.
        erase, write: Vectors e and w, times the decays to the end of the chunk; w is None where it is e.
        v: Values (N, b, H, C, E).
        gram, scores: As in `PairProducts`, of which the lower triangle counts.
        kept: Decays of all tokens of the chunk (N, b, H, D or 1, 1).
        segment_index: Segment numbers (N, b, C), or None.
    """

    q: Tensor
    read: Tensor
    erase: Tensor
    write: Tensor | None
    v: Tensor
    gram: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    kept: Tensor
    segment_index: Tensor | None


def in_scan_order(p: PairProducts, direction: str, dtype: torch.dtype) -> Scan:
    """Return the chunks in scan order; a backward scan reverses the chunks, and the tokens of each chunk.

    All but the triangular system and the decays are rounded to `dtype`.
    """
    names = scan_directions(direction)

    def scans(
        forward: Tensor, backward: Tensor, *dims: int, chunks: int = 2, dtype: torch.dtype | None = None
    ) -> Tensor:
        parts = [forward if name == "forward" else backward.flip(chunks, *dims) for name in names]
        parts = [x.movedim(chunks, 0).to(dtype=dtype) for x in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    reads = (scans(x * p.before, x * p.after, -2, dtype=dtype) for x in (p.q, p.read))
    writes = (x if x is None else scans(x * p.after, x * p.before, -2, dtype=dtype) for x in (p.erase, p.write))
    kept = p.kept.expand(*p.q.shape[:-2], -1, -1)
    index = p.segment_index
    return Scan(
        *reads,
        *writes,
        v=scans(p.v, p.v, -2, dtype=dtype),
        gram=(scans(p.gram[0], p.gram[0], -2, -1), *(scans(x, x, -2, -1, dtype=dtype) for x in p.gram[1:])),
        scores=tuple(scans(x, x, -2, -1, dtype=dtype) for x in p.scores),
        kept=scans(kept, kept),
        segment_index=index if index is None else scans(index, index, 2, chunks=1),
    )


def merged(y: Tensor, direction: str) -> Tensor:
    """Add up the outputs (N, b, H, C, E) of every scan, in the order of the tokens (B, H, N C, E)."""
    if direction != "forward":
        *forward, backward = y.unflatten(1, (len(scan_directions(direction)), -1)).unbind(1)
        y = sum(forward, backward.flip(0, -2))
    return y.movedim(0, 2).flatten(2, 3)


def in_segments(p: Scan, entering: Tensor) -> Scan:
    """Return the chunks, where tokens read their own segment only, and only the last segment is passed on.

    `entering` (N, b) numbers the segments of the states that enter.
    """
    index = p.segment_index[..., None, :]  # (N, b, 1, C)
    first = (index == entering[..., None, None])[..., None]  # (N, b, 1, C, 1)
    final = (index == index[..., -1, None])[..., None]
    return p._replace(
        q=p.q * first,
        read=p.read * first,
        erase=p.erase * final,
        write=None if p.write is None else p.write * final,
        kept=p.kept * first[..., -1, None, :],
    )


def entering_segments(part: Part, first: Tensor, direction: str) -> Tensor:
    """Return the segments (1, b) of the states that enter a part; `first` (b,) are those of its first tokens."""
    segments = [part.entering_segment(name == "backward") for name in scan_directions(direction)]
    return first[None] if segments[0] is None else torch.cat(segments)[None]


def part_states(p: Scan, right: Tensor, written: Tensor | None, part: Part, direction: str) -> tuple[Tensor, Tensor]:
    """Return the states and new values of `chunk_states` for a part of the rows, which exchanges maps of states.

    A map (.., D, D + E) is affine: its first D columns are multiplied by a state, and the others are added. The maps
    from the state that enters a part to its states and new values are those of a scan with D more values.
    """
    dim, width = p.read.shape[-1], right.shape[-1]
    right, written = (x if x is None else F.pad(x, (dim, 0)) for x in (right, written))
    unchanged = torch.eye(dim, dim + width, dtype=right.dtype, device=right.device)
    maps, values = chunk_states(p.gram[0], p.read, right, p.erase, p.kept, written, unchanged)
    names = scan_directions(direction)
    every = part.gather(*maps[-1].unflatten(0, (len(names), -1)))
    S = torch.cat([entering_state(one, part, name == "backward") for one, name in zip(every, names)])
    return applied(maps, S), applied(values, S)


def applied(maps: Tensor, S: Tensor) -> Tensor:
    """Return states or values (.., E), from maps (.., D + E) of a state S (.., D, E)."""
    return maps[..., : S.shape[-2]] @ S + maps[..., S.shape[-2] :]


def entering_state(maps: Tensor, part: Part, reverse: bool) -> Tensor:
    """Return the state (B, H, D, E) that enters a part, from the maps (P, B, H, D, D + E) of all parts."""
    S, states, order = torch.zeros_like(maps[0, ..., maps.shape[-2] :]), [], -1 if reverse else 1
    for one in maps.unbind(0)[::order]:
        states.append(S)
        S = applied(one, S)
    return torch.stack(states[::order])[part.rank]  # a function of all maps: every process takes part in the reduction


def new_values(p: Scan, right: Tensor) -> Tensor:
    """Return the values (N, b, H, C, E) that e writes, for the right side of their triangular system."""
    new = torch.linalg.solve_triangular(p.gram[0], right.to(p.gram[0].dtype), upper=False, unitriangular=True)
    return new.to(right.dtype)


def values_along_w(p: Scan) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the right side (N, b, H, C, E) of the triangular system without an entering state.

    Where w is not e, the others are the outputs (N, b, H, C, E) of the values that are written along w, and the state
    (N, b, H, D, E) that they leave.
    """
    if p.write is None:
        return p.v, None, None
    return -(p.gram[1].tril(-1) @ p.v), p.scores[1].tril() @ p.v, p.write.mT @ p.v


def outputs(p: Scan, S: Tensor | None, new: Tensor, y: Tensor | None) -> Tensor:
    """Return the outputs (N, b, H, C, E) of chunks with new values `new`, which are read beside S and y."""
    read = p.scores[0].tril() @ new
    read = read if y is None else read + y
    if S is None:
        return read
    return torch.baddbmm(*(x.flatten(0, -3) for x in (read, p.q, S))).view_as(read)  # rounds once
