"""Delta rule (DeltaNet, arXiv 2406.06484): each token corrects the value that the state stores under its key.

    S_i = (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T        y_i = q_i S_i

With keys of norm 1 and beta in [0, 1], a step never enlarges the state. In both directions together,
`beta_i (q_i . k_i) v_i` is subtracted once, so that a token's own value is counted once.

Over C tokens the corrections are a triangular system (the UT transform), `R = V - tril(K K^T, -1) B R - K S`. `R_i` is
what token i writes, divided by its beta, and `N_i = beta_i R_i` are the new values. With `A = I + tril(B K K^T, -1)`,

    W = A^-1 B K        U = A^-1 B V        N = U - W S
    Y = Q S + tril(Q K^T) N                 S <- S + K^T N

Over a whole sequence S = 0, and the full form is `tril(Q K^T) T_F V + triu(Q K^T) T_B V - diag(beta q k) V` with
`T = A^-1 B`, one T for each direction. The paper's versions are not this recurrence. Appendix B.7 subtracts `q_i . k_i`
without its beta. `(Q K^T) T V` in Table 1 multiplies before it masks, and its `triu(., -1)` should be `triu(., +1)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import sum_dtype
from lion.ops.rnn import Compiler, eager, scan
from lion.ops.tokens import ScoreSettings, State, TokenBlock, flip, initial_state, scan_directions


def delta_parts(tokens: TokenBlock, how: ScoreSettings, compiler: Compiler = eager) -> tuple[Tensor, None]:
    """Compute the numerator (B, H, L, E), without a row sum; `tokens.gate` is beta (B, H, L, 1)."""
    names = scan_directions(how.direction)
    if how.form == "delta_rnn":
        steps = dict.fromkeys(names)
        y, _ = scan(steps, delta_advance, tokens, rowsum=False, size=how.chunk_size, compiler=compiler)
    else:
        size = tokens.q.shape[2] if how.form == "full" else how.chunk_size  # one chunk is the full form
        y = sum(delta_scan(tokens, size, name == "backward")[0] for name in names)
    if how.direction == "both":
        q, k, v, beta, *_ = tokens.masked()
        y = y - ((q * k).sum(-1, keepdim=True) * beta) * v
    return y.to(sum_dtype(tokens.v)), None


def delta_scan(tokens: TokenBlock, size: int, reverse: bool) -> tuple[Tensor, State]:
    """Scan the tokens in one direction, and return the outputs and the last state.

    The transform of all chunks is computed at once. A loop over chunks then updates the state.
    """
    length = tokens.q.shape[2]
    tokens = tokens.slice(0, length, reverse).masked()
    state = initial_state(tokens.k, tokens.v)
    size = min(size, length)
    padding = -length % size
    q, k, v, beta = (
        F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, size)) for x in tokens.to(state.z.dtype)[:4]
    )  # (B, H, N, C, D)
    index = entering = None
    if tokens.segment_index is not None:
        last = tokens.segment_index[:, -1:].expand(-1, padding)
        index = torch.cat([tokens.segment_index, last], 1).unflatten(1, (-1, size))  # (B, N, C)
        entering = torch.cat([index[:, :1, 0], index[:, :-1, -1]], 1)  # (B, N), the segment of the state that enters
    chunk = transform(q, k, v, beta, index, entering)
    S, out = state.S, []
    for n in range(q.shape[2]):
        y, S = read_and_update(S, Chunk(*(x if x is None else x[:, :, n] for x in chunk)))
        out.append(y)
    return flip(torch.cat(out, 2)[:, :, :length], 2, reverse), state._replace(S=S)


def delta_advance(_: None, state: State, segment: Tensor | None, tokens: TokenBlock):
    """Read and update a state by C tokens, with the arguments and results of `lion.ops.rnn.advance`."""
    q, k, v, beta, _, index, _ = tokens.masked().to(state.S.dtype)
    y, S = read_and_update(state.S, transform(q, k, v, beta, index, segment))
    return y, None, state._replace(S=S), None if index is None else index[:, -1]


class Chunk(NamedTuple):
    """A chunk as a map of states.

    Attributes:
        q: Queries (.., C, D) that read the entering state.
        W: Corrections (.., C, D): the new values are `U - W S` for the entering state S.
        U: New values (.., C, E) without an entering state.
        scores: Causal scores (.., C, C) that read the new values.
        k: Keys (.., C, D) that write the new values into the state.
        keep: Factor (.., 1, 1) on the entering state: 0 if the chunk ends in another segment. None without segments.
    """

    q: Tensor
    W: Tensor
    U: Tensor
    scores: Tensor
    k: Tensor
    keep: Tensor | None


def transform(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, segment_index: Tensor | None, entering: Tensor | None
) -> Chunk:
    """Compute the UT transform of chunks (B, H, .., C, D).

    Args:
        segment_index: Segment numbers of the tokens (B, .., C), or None.
        entering: Segment numbers of the states that enter (B, ..), or None.
    """
    gram, scores = k @ k.mT, (q @ k.mT).tril()
    keep = None
    seen, kept = k, k
    if segment_index is not None:  # tokens read their own segment only, and only the last segment is passed on
        index = segment_index[:, None]  # (B, 1, .., C)
        same = index[..., :, None] == index[..., None, :]
        gram, scores = gram.masked_fill(~same, 0), scores.masked_fill(~same, 0)
        first = (index == entering[:, None, ..., None])[..., None]  # (B, 1, .., C, 1)
        final = index[..., -1:, None] == index[..., None]
        q, seen, kept = q * first, k * first, k * final
        keep = first[..., -1:, :]
    lower = (beta * gram).tril(-1)
    solved = torch.linalg.solve_triangular(  # the diagonal is taken as 1
        lower, torch.cat([beta * seen, beta * v], -1), upper=False, unitriangular=True
    )
    W, U = solved.split([k.shape[-1], v.shape[-1]], -1)
    return Chunk(q, W, U, scores, kept, keep)


def read_and_update(S: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, H, C, E) of a chunk that a state S (B, H, D, E) enters, and the state after the chunk."""
    new = chunk.U - chunk.W @ S
    y = chunk.q @ S + chunk.scores @ new
    return y, (S if chunk.keep is None else S * chunk.keep) + chunk.k.mT @ new
