"""Full and chunk forms as fused attention kernels: row-normalised linear attention is a softmax.

For scores `s_ij = q_i . k_j` that are not negative, and rows that are divided by their sums,

    Y_i = sum_j s_ij M_ij v_j / sum_j s_ij M_ij,    s_ij M_ij = exp(log s_ij + log M_ij)

so `flex_attention` computes Y without an L x L matrix in memory. Each direction is a separate call, one for the lower
triangle with the diagonal and one for the upper triangle without it. The two outputs are added with weights that follow
from the logarithms of their row sums.

The cumulative decays t, `log M_ij = t_i - t_j` along a scan, are constants in the kernels. The kernels would otherwise
add up the gradients of t pair by pair, in any order. The gradients come from the products `q_i dL/dq_i - k_i dL/dk_i`
instead (`lion.ops.prefix`). A rounding error in a pair's gradient is the same in both products. It cancels in the
gradient of a token's decay if both tokens of the pair lie on the same side of that token.

Long sequences are cut into chunks. A state (S, z) that enters a chunk is D more keys `z_d e_d` with the values
`S_d / z_d`, because `q S = sum_d (q_d z_d) (S_d / z_d)`.

A row whose sum is below 1e-20 counts as empty: its output and gradients are 0.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lion.ops.arguments import Gates, expand_decay, is_static, no_autocast
from lion.ops.chunk import as_token, carry, chunk_edges, chunk_grid, in_chunks
from lion.ops.decay import CumulativeDecay, Direction, decay, materialized
from lion.ops.features import FEATURE_MAPS
from lion.ops.full import masked_parts
from lion.ops.prefix import gradient_to
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import FULL_UP_TO, Settings
from lion.ops.tokens import ScoreSettings, TokenBlock

SWITCH = "LION_FUSED"  # environment variable: 0 turns the fused form off
WHOLE_UP_TO = 1024  # tokens; longer sequences are cut into chunks, unless the form is "full"
CHUNK = 512  # tokens per chunk: the products of a chunk then take about as long as its memory traffic
LEAST_SCORE = 1e-25  # added to scores before their logarithm
LEAST_SUM = 1e-20
LEAST_LOG = -1e30  # replaces the logarithm of an empty sum, so that differences are finite
BLOCK = 128  # tokens; blocks of pairs on the wrong side of the diagonal are skipped
WHOLE = 1 << 30  # one block for all pairs
CHECK_LENGTHS = (150, 1100)  # tokens: two blocks, one of them not full; three chunks with states between them
TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # of the check, relative to the largest value; TF32 may be on

log = logging.getLogger("lion")
PASSED: set[tuple] = set()  # arguments of `checked` that have passed


def fused_applies(q: Tensor, v: Tensor, gates: Gates, settings: Settings) -> bool:
    """Return whether the fused form replaces the full form, for q (B, H, L, D) and v (B, H, L, E).

    The fused form is used in graphs of `torch.compile` for a GPU, where it is exact and has passed its check.
    """
    if q.device.type != "cuda" or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return suits(q, v, gates, settings) and usable(q.device, q.dtype, q.shape[-1], v.shape[-1])


def suits(q: Tensor, v: Tensor, gates: Gates, settings: Settings) -> bool:
    """Return whether the fused form is exact, and moves fewer bytes than the requested form.

    Without decay the limit is `FULL_UP_TO` tokens, because the product `Q (K^T V)` is linear in the length. The
    gradient of a decay per head adds up the rounding errors of all tokens, times the tokens' positions: such decays are
    fused in float32 only, and not in chunks.
    """
    dims = (q.shape[-1], v.shape[-1])
    if q.dtype not in TOLERANCES or not all(is_static(n) and 16 <= n <= 256 for n in dims):
        return False
    length, decay = q.shape[2], gates.log_decay
    if decay is not None and decay.dim() == 1 and q.dtype != torch.float32:
        return False
    if settings.form == "full":
        limit = math.inf if decay is not None else FULL_UP_TO
    else:
        limit = FULL_UP_TO if decay is None else WHOLE_UP_TO if decay.dim() == 1 else math.inf
    asked = settings.form in ("full", "auto") or (settings.form == "chunk" and decay is not None)
    return asked and length <= limit and expressible(gates, settings)


def expressible(gates: Gates, settings: Settings) -> bool:
    """Return whether the operator is a softmax of positive scores.

    This requires one row sum, and no gate other than one log decay per token and head.
    """
    others = (gates.bonus, gates.angles, gates.prefix)
    decay = gates.log_decay
    return (
        settings.normalize == "sum"
        and not settings.dropout_p
        and settings.feature_map is not None
        and FEATURE_MAPS[settings.feature_map].positive
        and all(x is None for x in others)
        and not gates.delta
        and (decay is None or (decay.dim() in (1, 3) and settings.decay_convention != "between"))
    )


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    valid: Tensor | None,
    segments: Tensor | SegmentIndex | None,
    settings: Settings,
) -> Tensor:
    """Compute `linear_attention` where it is `expressible`; arguments and result are those of `linear_attention`."""
    index, valid = prepared(q, valid, segments)
    length = q.shape[2]
    convention, side = settings.decay_convention, settings.direction
    how = ScoreSettings("chunk", convention, side, True, True, CHUNK)
    with no_autocast(q):
        index = None if index is None else index.int()
        tokens = TokenBlock(q, k, v, expand_decay(log_decay, q), valid, index, settings.feature_map).masked()
        whole = log_decay is None or settings.form == "full" or length <= WHOLE_UP_TO
        grid = (length, 1) if whole else chunk_grid(length, CHUNK)
        q, k, v, directions = in_chunks(tokens, how, *grid)
        if log_decay is None:
            outputs, log_sums = scan(q, Keys(k, v, None), directions[0].query, side)
        else:
            first, *rest = keys_of(k, v, directions)
            outputs, log_sums = scan(q, first, directions[0].query, side_of(directions[0]))
            for keys, direction in zip(rest, directions[1:]):
                others, log_others = scan(q, keys, direction.query, side_of(direction), include_diagonal=False)
                share = torch.sigmoid(log_sums - log_others)[..., None]
                outputs = outputs * share + others * (1 - share)
                log_sums = torch.logaddexp(log_sums, log_others)
        factor = (log_sums - math.log(max(settings.eps, LEAST_SUM))).clamp_max(0).exp()  # sums below eps count as eps
        factor = factor.masked_fill(log_sums < math.log(LEAST_SUM), 0)
        return (outputs * factor[..., None]).to(v.dtype).flatten(2, 3)[:, :, :length]


def side_of(direction: Direction) -> str:
    return "backward" if direction.reverse else "forward"


class Keys(NamedTuple):
    """Keys (B, H, N, C', D) and values (B, H, N, C', E) of chunks, and the cumulative decays of the chunk's tokens.

    C' is the number C of tokens in a chunk, or D more: a state that enters the chunk is D keys, which decay like the
    token that the state meets first. `ahead` of these keys come before the first token.
    """

    k: Tensor
    v: Tensor
    decay: CumulativeDecay | None
    ahead: int = 0


def scan(
    q: Tensor, keys: Keys, query: CumulativeDecay, side: str, *, include_diagonal: bool = True
) -> tuple[Tensor, Tensor]:
    """Attend from the queries q (B, H, N, C, D) of chunks to keys on one `side`.

    Returns:
        The output (B, H, N, C, E), divided by its row sums, and the logarithms of the row sums (B, H, N, C).
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention  # imports sympy: only when compiling

    k, v, by_key, ahead = keys
    (size, count), terms = (x.shape[3] for x in (q, k)), ()  # closures must not capture q or k
    segments = None if query.segment_index is None else query.segment_index[:, 0, ..., 0]  # (B, N, C)
    if by_key is not None:
        terms = tuple(zip(*(constants(t, q.shape[0]) for t in (query, by_key))))
        q = gradient_to(of_batch(query.terms[0], q.shape[0]), q, 1)  # gradients flow through the first term

    def token(j: Tensor) -> Tensor:  # of a key
        return j if count == size else (j - ahead).clamp(0, size - 1)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = torch.log(s.to(torch.promote_types(s.dtype, torch.float32)) + LEAST_SCORE)
        if not terms:
            return s
        between = sum(t[b, h, i] - u[b, h, token(j)] for t, u in terms)
        return s + torch.clamp_max(between, 0)  # also for masked pairs, where `between` may be positive

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        here = b >= 0
        if segments is not None:
            n = h % segments.shape[1]
            here = segments[b, n, i] == segments[b, n, token(j)]
        if side == "both":
            return here
        early, late = (i, j) if side == "backward" else (j - ahead, i)
        ordered = early <= late if include_diagonal else early < late
        return ordered if segments is None else ordered & here

    mask = block_mask(size, count, ahead, side, allowed, q.device)
    given = dict(score_mod=score, block_mask=mask, scale=1.0, kernel_options={"BACKEND": "TRITON"})
    chunks, flat = q.shape[1:3], (x.flatten(1, 2) for x in (q, k, v))
    outputs, beside = flex_attention(*flat, **given, return_aux=AuxRequest(lse=True))
    return outputs.unflatten(1, chunks), beside.lse.clamp_min(LEAST_LOG).unflatten(1, chunks)


def of_batch(t: Tensor, batch: int) -> Tensor:
    """Return t (b, ..) as (B, ..): a gradient is then summed over the other axes first, in the kernel that makes it."""
    return t.expand(batch, *t.shape[1:])


def constants(decay: CumulativeDecay, batch: int) -> list[Tensor]:
    """Return the terms of cumulative decays (b, H, N, C, 1) as constants (B, H * N, C)."""
    return [of_batch(t.detach(), batch).flatten(1, 2).squeeze(-1) for t in decay.terms]


def keys_of(k: Tensor, v: Tensor, directions: tuple[Direction, ...]) -> list[Keys]:
    """Return the keys of chunks for each direction: the tokens, and the state that enters the chunk.

    The state enters from the left or from the right, and its keys are in that place.
    """
    batch, _, count, size, dim = k.shape
    if count == 1:
        shared = [(k, v)] * len(directions)
    else:
        reverse = tuple(direction.reverse for direction in directions)
        states = zip(*entering_states(k, v, directions))
        shared = zip(*(_Joined.apply(reverse, x, *state) for x, state in zip((k, v), states)))
    made = []
    for direction, (keys, values) in zip(directions, shared):
        prefix = of_batch(direction.key.terms[0], batch)
        ahead = 0 if direction.reverse or count == 1 else dim
        keys = gradient_to(prefix, keys, -1, start=ahead)
        if count > 1:
            first = met_first(prefix, direction).expand(-1, -1, -1, dim, -1)
            keys = gradient_to(first, keys, -1, start=0 if ahead else size)
        made.append(Keys(keys, values, direction.key, ahead))
    return made


class _Joined(torch.autograd.Function):
    """Concatenation of tokens and a state per direction, in one tensor of which each direction is a view.

    The gradient of a view then has no zeros in place of the other state.
    """

    @staticmethod
    def forward(ctx, reverse: tuple[bool, ...], x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        ctx.reverse, ctx.sizes = reverse, (x.shape[3], states[0].shape[3])
        parts = {r: s for r, s in zip(reverse, states)}
        joined = torch.cat(
            [parts[r] if r is not None else x for r in (False, None, True) if r is None or r in parts], 3
        )
        size = sum(ctx.sizes)
        return tuple(joined.narrow(3, joined.shape[3] - size if r else 0, size) for r in reverse)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        size, width = ctx.sizes
        tokens = [dx.narrow(3, 0 if r else width, size) for r, dx in zip(ctx.reverse, gradients)]
        states = [dx.narrow(3, size if r else 0, width) for r, dx in zip(ctx.reverse, gradients)]
        return None, sum(tokens[1:], tokens[0]), *states


def met_first(t: Tensor, direction: Direction) -> Tensor:
    """Return the tokens (.., 1, D) of chunks that a scan reads first, out of t (.., C, D)."""
    return t[..., -1:, :] if direction.reverse else t[..., :1, :]


def entering_states(k: Tensor, v: Tensor, directions: tuple[Direction, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return the states that enter each chunk in each direction, as D keys and their values.

    A state (S, z) is the keys `z_d e_d`, whose scores are `q_d z_d`, with the values `S_d / z_d`.
    """
    (batch, *_, dim), wide = k.shape, directions[0].key.terms[0].dtype
    edges, writes = [], []
    for direction in directions:
        edge = chunk_edges(direction, None)
        first = direction.query.map(lambda t, at=direction: met_first(t, at).squeeze(3))
        edges.append(edge._replace(previous=first))
        write = k * of_batch(materialized(decay(edge.edge.map(as_token), direction.key)), batch)
        writes.append(write)
    write, made = torch.cat(writes, -1), []  # (B, H, N, C, 2 D)
    sums, states = write.sum(3).split(dim, 3), (write.to(v.dtype).mT @ v).split(dim, 3)
    for edge, z, S in zip(edges, sums, states):
        z, S = carry(z[..., None], edge)[0].squeeze(-1), carry(S, edge)[0]
        mean = S / z.to(k.dtype).to(wide).clamp_min(LEAST_SCORE)[..., None]  # z is rounded, as in the key
        made.append((torch.diag_embed(z).to(k.dtype), mean.to(v.dtype)))
    return made


def block_mask(
    queries: int, keys: int, ahead: int, side: str, allowed: Callable[..., Tensor], device: torch.device
) -> Any:
    """Build the mask of pairs on one side of the diagonal, or on both, from a list of its blocks.

    `ahead` keys come before the first token. `create_block_mask` would sort the blocks.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def up_to(number: Tensor, count: int) -> tuple[Tensor, Tensor]:  # per block: how many others, and which ones
        others = torch.arange(count, dtype=torch.int32, device=device)
        number = number if len(number) == count else number.clamp_max(count)
        return number[None, None], others.expand(1, 1, len(number), count)

    def starting_at(first: Tensor, count: int) -> tuple[Tensor, Tensor]:
        others = torch.arange(count, dtype=torch.int32, device=device)
        return (count - first)[None, None], (first[:, None] + others).clamp_max(count - 1)[None, None]

    size = WHOLE if side == "both" else BLOCK
    counts = [-(-n // size) for n in (queries, keys)]
    row, column = (torch.arange(n, dtype=torch.int32, device=device) for n in counts)
    if side == "backward":
        by_row = starting_at(row, counts[1])
    else:
        by_row = up_to((ahead + size - 1) // size + row + 1, counts[1])
    if side == "forward":
        by_column = starting_at((column * size - ahead).clamp_min(0) // size if ahead else column, counts[0])
    else:
        by_column = up_to(column + 1, counts[0])
    blocks = (*by_row, None, None, *by_column, None, None)
    return BlockMask((queries, keys), *blocks, BLOCK_SIZE=(size, size), mask_mod=allowed)


def switched_on() -> bool:
    return os.environ.get(SWITCH, "1") != "0"


def usable(device: torch.device, dtype: torch.dtype, dim: int, width: int) -> bool:
    """Return whether the fused form is switched on, and has passed its check."""
    return switched_on() and (device, dtype, dim, width) in PASSED


usable._dynamo_marked_constant = True  # `torch.compiler.assume_constant_result`, which imports the compiler


@functools.cache
def checked(device: torch.device, dtype: torch.dtype, dim: int, width: int) -> bool:
    """Check the compiled fused form against the full form on a few tokens, and log a line if the two differ.

    Without a passed check the fused form is not used. Call this function before a graph is traced, as `compile_blocks`
    does. A backward pass that is compiled while another graph is traced would wait forever.

    Returns:
        Whether the check has passed.
    """
    try:
        errors = [deviation(device, dtype, dim, width, length) for length in CHECK_LENGTHS]
        reason = next((f"off by {error:.1e}" for error in errors if not error <= TOLERANCES[dtype]), "")
    except Exception as failure:  # compilers raise errors of any kind
        reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
    if not reason:
        PASSED.add((device, dtype, dim, width))
    else:
        log.warning("no fused attention on %s, %s, heads of %d: %s", device, dtype, dim, reason)
    return not reason


def deviation(
    device: torch.device, dtype: torch.dtype, dim: int, width: int, length: int, backend: str = "inductor"
) -> float:
    """Return the largest error of the fused form against the full form of the same `length` tokens in float32.

    The errors of the output and of each gradient are relative to the largest value of that tensor.
    """
    settings = Settings(feature_map="relu")  # relu does not change these tokens
    how = ScoreSettings("full", settings.decay_convention, settings.direction, True, True, settings.chunk_size)

    rng = torch.Generator().manual_seed(0)

    def fused(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return fused_attention(q, k, v, log_decay, None, None, settings)

    def full(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        numerator, total = masked_parts(TokenBlock(q, k, v, log_decay[..., None]), how, 0.0)
        return numerator / total[..., None]

    rows = (2, 2, length)
    with no_autocast(torch.empty(0, device=device)), torch.inference_mode(False), torch.enable_grad():
        rounded = [torch.rand(*rows, n, generator=rng).to(device, dtype) for n in (dim, dim, width)]
        log_decay, weights = (-torch.rand(rows, generator=rng)).to(device), torch.randn(*rows, width, generator=rng)
        results = []
        for fn in (torch.compile(fused, backend=backend, fullgraph=True, dynamic=False), full):
            tokens = rounded if fn is not full else [x.float() for x in rounded]
            given = [x.detach().clone().requires_grad_() for x in (*tokens, log_decay)]
            y = fn(*given).float()
            gradients = torch.autograd.grad((y * weights.to(device)).sum(), given)
            results.append([x.float() for x in (y, *gradients)])
    errors = ((x - z).abs().max() / z.abs().max() for x, z in zip(*results))
    return max(error.item() for error in errors)
