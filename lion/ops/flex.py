"""Full form as fused attention kernels: row-normalised linear attention is a softmax.

For scores `s_ij = q_i . k_j` that are not negative, and rows that are divided by their sums,

    Y_i = sum_j s_ij M_ij v_j / sum_j s_ij M_ij,    s_ij M_ij = exp(log s_ij + log M_ij)

so `flex_attention` computes Y without an L x L matrix in memory. Each direction is a separate call, one for the lower
triangle with the diagonal and one for the upper triangle without it. The two outputs are added with weights that follow
from the logarithms of their row sums.

The cumulative decays t, `log M_ij = t_i - t_j` along a scan, are constants in the kernels. The kernels would otherwise
add up the gradients of t pair by pair, in any order. The gradients come from the products `q_i dL/dq_i - k_i dL/dk_i`
instead (`lion.ops.prefix`). A rounding error in a pair's gradient is the same in both products. It cancels in the
gradient of a token's decay if both tokens of the pair lie on the same side of that token.

A row whose sum is below 1e-20 counts as empty: its output and gradients are 0.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lion.ops.arguments import Gates, expand_decay, is_static, no_autocast
from lion.ops.decay import Direction, make_directions
from lion.ops.features import FEATURE_MAPS
from lion.ops.full import masked_parts
from lion.ops.prefix import gradients_to
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import FULL_UP_TO, Settings
from lion.ops.tokens import ScoreSettings, TokenBlock

SWITCH = "LION_FUSED"  # environment variable: 0 turns the fused form off
FUSED_UP_TO = 1024  # tokens; "auto" is fused up to here: above, its products cost more than chunks' memory traffic
LEAST_SCORE = 1e-25  # added to scores before their logarithm
LEAST_SUM = 1e-20
LEAST_LOG = -1e30  # replaces the logarithm of an empty sum, so that differences are finite
BLOCK = 128  # tokens; blocks of pairs on the wrong side of the diagonal are skipped
WHOLE = 1 << 30  # one block for all pairs
CHECK_LENGTH = 150  # tokens: two blocks, one of them not full
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

    Without decay the limit is `FULL_UP_TO` tokens, because the product `Q (K^T V)` is linear in the length.
    """
    dims = (q.shape[-1], v.shape[-1])
    if q.dtype not in TOLERANCES or not all(is_static(n) and 16 <= n <= 256 for n in dims):
        return False
    length, decayed = q.shape[2], gates.log_decay is not None
    if settings.form == "auto":
        asked = length <= (FUSED_UP_TO if decayed else FULL_UP_TO)
    else:
        asked = settings.form == "full" and (decayed or length <= FULL_UP_TO)
    return asked and expressible(gates, settings)


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
    with no_autocast(q):
        decays = expand_decay(log_decay, q)
        tokens = TokenBlock(q, k, v, decays, valid, index, settings.feature_map).masked()
        index = None if index is None else index.int()
        if log_decay is None:
            side = settings.direction
            outputs, log_sums = scan(tokens, None, side, index, include_diagonal=True)
        else:
            convention, gate = settings.decay_convention, tokens.gate
            first, *rest = make_directions(gate, None, decay_convention=convention, direction=settings.direction)
            outputs, log_sums = scan(tokens, first, side_of(first), index, include_diagonal=True)
            for direction in rest:
                others, log_others = scan(tokens, direction, side_of(direction), index, include_diagonal=False)
                share = torch.sigmoid(log_sums - log_others)[..., None]
                outputs = outputs * share + others * (1 - share)
                log_sums = torch.logaddexp(log_sums, log_others)
        factor = (log_sums - math.log(max(settings.eps, LEAST_SUM))).clamp_max(0).exp()  # sums below eps count as eps
        factor = factor.masked_fill(log_sums < math.log(LEAST_SUM), 0)
        return (outputs * factor[..., None]).to(v.dtype)


def side_of(direction: Direction) -> str:
    return "backward" if direction.reverse else "forward"


def scan(
    tokens: TokenBlock, direction: Direction | None, side: str, index: Tensor | None, include_diagonal: bool
) -> tuple[Tensor, Tensor]:
    """Attend to the pairs on one `side`.

    Returns:
        The output (B, H, L, E), divided by its row sums, and the logarithms of the row sums (B, H, L).
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention  # imports sympy: only when compiling

    q, k, v = tokens[:3]
    sums = ()
    if direction is not None:
        terms = direction.query.terms  # equal to those of the keys
        q, k = gradients_to(terms[0].expand(q.shape), q, k, None)  # gradients flow through the first term
        sums = tuple(t.detach().squeeze(-1).expand(q.shape[:3]) for t in terms)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = torch.log(s.to(torch.promote_types(s.dtype, torch.float32)) + LEAST_SCORE)
        if not sums:
            return s
        between = sum(t[b, h, i] - t[b, h, j] for t in sums)
        return s + torch.clamp_max(between, 0)  # also for masked pairs, where `between` may be positive

    mask = block_mask(q, side, index, include_diagonal)
    given = dict(score_mod=score, block_mask=mask, scale=1.0, kernel_options={"BACKEND": "TRITON"})
    outputs, beside = flex_attention(q, k, v, **given, return_aux=AuxRequest(lse=True))
    return outputs, beside.lse.clamp_min(LEAST_LOG)


def block_mask(q: Tensor, side: str, index: Tensor | None, include_diagonal: bool) -> Any:
    """Build the mask of pairs on one side of the diagonal, or on both, from a list of its blocks.

    `create_block_mask` would sort the blocks.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length, size = q.shape[2], WHOLE if side == "both" else BLOCK
    count = 1 if side == "both" else -(-length // BLOCK)
    block = torch.arange(count, dtype=torch.int32, device=q.device)
    before = (block + 1)[None, None], block.expand(1, 1, count, count)  # per block: how many, and which ones
    behind = (count - block)[None, None], (block[:, None] + block).clamp_max(count - 1)[None, None]
    keys, queries = {"forward": (before, behind), "backward": (behind, before), "both": (before, before)}[side]
    blocks = (*keys, None, None, *queries, None, None)
    allowed = pairs(side, index, include_diagonal)
    return BlockMask((length, length), *blocks, BLOCK_SIZE=(size, size), mask_mod=allowed)


def pairs(side: str, index: Tensor | None, include_diagonal: bool) -> Callable[..., Tensor]:
    """Return the function that decides whether query i attends to key j: on this side, and within a segment."""

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        here = b >= 0 if index is None else index[b, i] == index[b, j]
        if side == "both":
            return here
        early, late = (i, j) if side == "backward" else (j, i)
        ordered = early <= late if include_diagonal else early < late
        return ordered if index is None else ordered & here

    return allowed


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
        error = deviation(device, dtype, dim, width)
        reason = "" if error <= TOLERANCES[dtype] else f"off by {error:.1e}"
    except Exception as failure:  # compilers raise errors of any kind
        reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
    if not reason:
        PASSED.add((device, dtype, dim, width))
    else:
        log.warning("no fused attention on %s, %s, heads of %d: %s", device, dtype, dim, reason)
    return not reason


def deviation(device: torch.device, dtype: torch.dtype, dim: int, width: int, backend: str = "inductor") -> float:
    """Return the largest error of the fused form against the full form of the same tokens in float32.

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

    rows = (2, 2, CHECK_LENGTH)
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
