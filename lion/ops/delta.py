"""Delta rule: each token corrects the value that the state stores, with or without decays.

    S_i = (I - e_i r_i^T) Diag(lambda_i) S_{i-1} + w_i v_i^T        y_i = q_i S_i

The token reads the decayed state with r, erases along e, and writes its value along w. DeltaNet (arXiv 2406.06484) has
no decay, r = k and e = w = beta k. With keys of norm 1 and beta in [0, 2], its steps never enlarge the state. With
`undecayed_erase` (RWKV-7), r reads the state before the decay:
`S_i = (Diag(lambda_i) - e_i r_i^T) S_{i-1} + w_i v_i^T`. In both directions together, `(q_i . w_i) v_i` is subtracted
once, so that a token's own value is counted once.

Inside a chunk that a state S enters, let `(R E)_ji` be the product of r_j and e_i under the decays of the tokens from i
to j (i excluded; j included, except for an undecayed erase), and `R` the vectors r under the decays since the start of
the chunk. What all tokens read, `P`, solves a triangular system (the UT transform):

    P = (I + tril(R E, -1))^-1 (R S + tril(R W, -1) V)
    Y = Q S + tril(Q W) V - tril(Q E) P             S <- Diag(kept) S + W^T V - E^T P

`N = -P` are the values that e writes. Where e = w, they are the new values `N = V - P`, at half the products. In both
cases `N = U - A S` with `A = (I + tril(R E, -1))^-1 R`. U is the same inverse times `-tril(R W, -1) V`, or V.

All exponents are sums of log decays over tokens between two others, so none is positive. Both directions share the
products of all pairs of a chunk: the lower triangle is the forward scan, the upper one the backward scan. Over a whole
sequence S = 0, and the full form without decays is `tril(Q K^T) T_F V + triu(Q K^T) T_B V - diag(beta q k) V` with one
`T = (I + tril(R E, -1))^-1 B` for each direction. The paper of LION prints something else. Appendix B.7 subtracts
`q_i . k_i` without its beta. `(Q K^T) T V` in Table 1 multiplies before it masks, and its `triu(., -1)` should be
`triu(., +1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import sum_dtype
from lion.ops.chunk import GROUP, chunk_grid, group_grid
from lion.ops.decay import LOG_ZERO, exp_where, make_directions
from lion.ops.exchange import Part
from lion.ops.full import decayed_scores, pad_segments
from lion.ops.rnn import Compiler, eager, scan
from lion.ops.tokens import ScoreSettings, State, TokenBlock, initial_state, scan_directions
from lion.ops.vector import exclusive_sum
from lion.ops.vector_scores import FACTORS, lambdas, vector_scores


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
        tokens = tokens.masked()
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

    Without a size, one chunk holds all tokens, which is the full form. The transforms of all chunks are computed at
    once. A loop over chunks then updates the state alone.
    """
    length = tokens.q.shape[2]
    empty = initial_state(tokens.k, tokens.v)
    tokens = tokens.masked().to(empty.S.dtype)
    size, count = (length, 1) if size is None else chunk_grid(length, size)
    padding = size * count - length
    index = pad_segments(tokens.segment_index, padding)
    chunks = tokens.map(lambda x: (F.pad(x, (0, 0, 0, padding)) if padding else x).unflatten(2, (count, size)))
    if index is not None:
        index = index.unflatten(1, (count, size))  # (B, N, C)
    products = pair_products(chunks._replace(segment_index=index), direction, undecayed_erase)

    carried = count > 1 or final or part is not None
    scans = []
    for name in scan_directions(direction):
        reverse, entering = name == "backward", index
        if index is not None:  # the segments (B, N) of the states that enter
            outer = None if part is None else part.entering_segment(reverse)
            outer = (index[:, -1, -1] if reverse else index[:, 0, 0]) if outer is None else outer
            inner = (index[:, 1:, 0], outer[:, None]) if reverse else (outer[:, None], index[:, :-1, -1])
            entering = torch.cat(inner, 1)
        scans.append((transform(products, reverse, entering, stateless=not carried), reverse))

    y, state, first = 0, None, [empty.S] * len(scans)
    groups = [None] * len(scans)
    if part is not None:
        groups = [group_maps(*scan) for scan in scans]
        every = part.gather(*(composed(whole, reverse) for (_, whole), (_, reverse) in zip(groups, scans)))
        first = [entering_state(maps, part, reverse) for maps, (_, reverse) in zip(every, scans)]
    for (chunk, reverse), group, S in zip(scans, groups, first):
        new, states = chunk.U, None
        if carried:
            states, new, last = carry(chunk, reverse, S, group)
            state = empty._replace(S=last)
        y = y + outputs(chunk, states, new)
    return y.flatten(2, 3)[:, :, :length], state


def delta_advance(undecayed_erase: bool, state: State, segment: Tensor | None, tokens: TokenBlock):
    """Read and update a state by C tokens, with the arguments and results of `lion.ops.rnn.advance`."""
    tokens = tokens.masked().to(state.S.dtype)
    chunk = transform(pair_products(tokens, "forward", undecayed_erase), False, segment)
    S, new = update(state.S, chunk.A, chunk.U, chunk.erase, chunk.kept, chunk.S)
    return (
        outputs(chunk, state.S, new),
        None,
        state._replace(S=S),
        None if segment is None else tokens.segment_index[:, -1],
    )


class PairProducts(NamedTuple):
    """Vectors of the tokens of chunks (B, H, .., C, D), and their products, which both directions share.

    Attributes:
        q, read: Queries and vectors r, times the decay of their own token (r of an undecayed erase: without it).
        erase, write: Vectors e and w; w is None where it is e.
        v: Values (B, H, .., C, E).
        gram, scores: Products of r, and of q, with e and (unless it is e) w, under the decays of the tokens between
            each pair (B, H, .., C, C); 0 for a token with itself.
        own: Products of each token's q with its e and w, without decay (B, H, .., C, 1).
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
    own: tuple[Tensor, ...]
    before: Tensor
    after: Tensor
    kept: Tensor
    segment_index: Tensor | None


def pair_products(tokens: TokenBlock, direction: str, undecayed_erase: bool) -> PairProducts:
    """Compute the products of all pairs of tokens inside chunks (B, H, .., C, D)."""
    log_decay, index = tokens.gate.clamp(LOG_ZERO, 0), tokens.segment_index
    read, write, erase = tokens.k if tokens.read is None else tokens.read, write_vectors(tokens), tokens.erase
    targets = torch.stack([write] if erase is None else [erase, write])
    own = (tokens.q * targets).sum(-1, keepdim=True)
    lam = lambdas(log_decay)
    q, read = lam * tokens.q, read if undecayed_erase else lam * read
    readers = torch.stack([read, q])[:, None]
    if log_decay.shape[-1] == 1:
        between = make_directions(log_decay, index, decay_convention="between", direction=direction)
        pairs = decayed_scores(readers, targets, between, include_diagonal=False)
    else:
        how = ScoreSettings("full", "between", direction, False, False, 0)
        pairs = vector_scores(*torch.broadcast_tensors(readers, targets), log_decay, index, how)
    sums = exclusive_sum(log_decay), exclusive_sum(log_decay.flip(-2)).flip(-2)
    before, after = (exp_where(x, factors=FACTORS) for x in sums)
    kept = exp_where(log_decay.sum(-2))[..., None]
    vectors = (q, read, write, None) if erase is None else (q, read, erase, write)
    gram, scores, own = *(row.unbind() for row in pairs.unbind()), own.unbind()
    return PairProducts(*vectors, tokens.v, gram, scores, own, before, after, kept, index)


class Chunk(NamedTuple):
    """A chunk as a map of states, in one direction.

    Attributes:
        q: Queries (.., C, D) that read the entering state.
        A: Corrections (.., C, D): the new values are `U - A S` for the entering state S. None without a state.
        U: New values (.., C, E) without an entering state.
        scores, own: Scores (.., C, C) of earlier tokens and (.., C, 1) of the token itself, which read the new values.
        erase: Vectors (.., C, D) that write the new values into the state.
        kept: Decays (.., D or 1, 1) of the entering state; 0 if the chunk ends in another segment.
        y, S: Outputs (.., C, E) of the values along w, and the state (.., D, E) that they leave; None where w is e.
    """

    q: Tensor
    A: Tensor | None
    U: Tensor
    scores: Tensor
    own: Tensor
    erase: Tensor
    kept: Tensor
    y: Tensor | None
    S: Tensor | None


def transform(p: PairProducts, reverse: bool, entering: Tensor | None, stateless: bool = False) -> Chunk:
    """Compute the UT transform of chunks in one direction.

    Args:
        p: Products of the tokens of the chunks.
        reverse: Whether the scan goes from right to left.
        entering: Segment numbers (B, ..) of the states that enter, or None.
        stateless: Whether no state enters.
    """
    triangle = torch.triu if reverse else torch.tril
    near, far = (p.after, p.before) if reverse else (p.before, p.after)  # decays to the states that enter and leave
    q, read, erase, kept = p.q * near, p.read * near, p.erase * far, p.kept
    write = None if p.write is None else p.write * far
    if p.segment_index is not None:  # tokens read their own segment only, and only the last segment is passed on
        index = p.segment_index[:, None]  # (B, 1, .., C)
        last = 0 if reverse else -1
        first = (index == entering[:, None, ..., None])[..., None]  # (B, 1, .., C, 1)
        final = (index == index[..., last, None])[..., None]
        q, read, erase, kept = q * first, read * first, erase * final, kept * first[..., last, None, :]
        write = None if write is None else write * final

    right, y, S = p.v, None, None
    if write is not None:
        right = -(triangle(p.gram[1]) @ p.v)
        y = triangle(p.scores[1]) @ p.v + p.own[1] * p.v
        S = write.mT @ p.v
    U = torch.linalg.solve_triangular(  # reads one triangle, and takes the diagonal as 1
        p.gram[0], right if stateless else torch.cat([read, right], -1), upper=reverse, unitriangular=True
    )
    A, U = (None, U) if stateless else U.split([read.shape[-1], right.shape[-1]], -1)
    return Chunk(q, A, U, triangle(p.scores[0]), p.own[0], erase, kept, y, S)


def outputs(chunk: Chunk, S: Tensor | None, new: Tensor) -> Tensor:
    """Return the outputs (.., C, E) of chunks that states S (.., D, E) enter, with their new values (.., C, E)."""
    y = chunk.scores @ new + chunk.own * new
    if chunk.y is not None:
        y = y + chunk.y
    return y if S is None else y + chunk.q @ S


def carry(
    chunk: Chunk, reverse: bool, S: Tensor, groups: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states (B, H, N, D, E) that enter N chunks, their new values (B, H, N, C, E), and the last state.

    The first state is S (B, H, D, E). Many chunks are carried in groups: first the maps of states of all groups at once
    (`group_maps`), then the states from group to group. The number of steps grows with the root of the number of
    chunks.
    """
    if groups is None and chunk.U.shape[2] <= 2 * GROUP:
        return steps(chunk, S, reverse)
    within, whole = group_maps(chunk, reverse) if groups is None else groups
    entering, S = through(whole.unbind(2), S, reverse)
    entering, dim = entering.movedim(0, 2)[:, :, :, None], S.shape[-2]
    states = (within[..., :dim] @ entering + within[..., dim:]).flatten(2, 3)
    return states, chunk.U - chunk.A @ states, S


def group_maps(chunk: Chunk, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return maps of states: from the start of a group to each of its chunks, and to the end of the group.

    A map (.., D, D + E) is affine: its first D columns are multiplied by a state, and the others are added. The results
    have the shapes (B, H, groups, chunks, D, D + E) and (B, H, groups, D, D + E).
    """
    (*batch, count, _, width), dim = chunk.U.shape, chunk.q.shape[-1]
    grid = group_grid(count) if count > 2 * GROUP else (1, count)  # `chunk_grid` rounds larger counts to whole groups
    groups = Chunk(*(x if x is None else x.unflatten(2, grid) for x in chunk))  # (B, H, groups, G, ..)
    values = (x if x is None else F.pad(x, (dim, 0)) for x in (groups.U, groups.S))  # the maps' D columns come first
    groups = groups._replace(**dict(zip(("U", "S"), values)))
    unchanged = torch.eye(dim, dim + width, dtype=chunk.U.dtype, device=chunk.U.device).expand(*batch, grid[0], -1, -1)
    within, _, whole = steps(groups, unchanged, reverse)
    return within, whole


def through(maps: Sequence[Tensor], S: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Pass a state S (.., D, E) through maps (.., D, D + E); return the states that enter each map, and the last."""
    order, states, dim = -1 if reverse else 1, [], S.shape[-2]
    for step in maps[::order]:
        states.append(S)
        S = step[..., :dim] @ S + step[..., dim:]
    return torch.stack(states[::order]), S


def composed(whole: Tensor, reverse: bool) -> Tensor:
    """Return the map (B, H, D, D + E) through all groups, from the maps (B, H, groups, D, D + E) of each."""
    first, *others = whole.unbind(2)[:: -1 if reverse else 1]
    dim = whole.shape[-2]
    for step in others:
        first = step[..., :dim] @ first + F.pad(step[..., dim:], (dim, 0))
    return first


def entering_state(maps: Tensor, part: Part, reverse: bool) -> Tensor:
    """Return the state (B, H, D, E) that enters a part, from the maps (P, B, H, D, D + E) of all parts."""
    empty = torch.zeros_like(maps[0, ..., maps.shape[-2] :])
    return through(maps.unbind(0), empty, reverse)[0][part.rank]


def steps(chunk: Chunk, S: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Update a state S (.., D, E) by chunks (.., N, C, D), one after the other, with the results of `carry`."""
    order, states, values = -1 if reverse else 1, [], []
    for some in [*zip(*(x.unbind(-3) for x in (chunk.A, chunk.U, chunk.erase, chunk.kept)), written(chunk))][::order]:
        states.append(S)
        S, new = update(S, *some)
        values.append(new)
    return torch.stack(states[::order], -3), torch.stack(values[::order], -3), S


def written(chunk: Chunk) -> list[Tensor] | list[None]:
    """Return what each of the chunks writes into the state along w, where w is not e."""
    return [None] * chunk.U.shape[-3] if chunk.S is None else [*chunk.S.unbind(-3)]


def update(S: Tensor, A: Tensor, U: Tensor, erase: Tensor, kept: Tensor, write: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the state (.., D, E) after a chunk, and the new values (.., C, E) of the chunk."""
    new = U - A @ S
    S = kept * S + erase.mT @ new
    return S if write is None else S + write, new
