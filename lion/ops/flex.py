"""Full and chunk forms as fused attention kernels: row-normalised linear attention is a softmax.

For scores `s_ij = q_i . k_j` that are not negative, and rows that are divided by their sums,

    Y_i = sum_j s_ij M_ij v_j / sum_j s_ij M_ij,    s_ij M_ij = exp(log s_ij + log M_ij)

so `flex_attention` computes Y without an L x L matrix in memory. With decays, each direction is a softmax of its own,
one over the lower triangle with the diagonal and one over the upper triangle without it (`lion.ops.flex_scan`). The two
outputs are added with weights that follow from the logarithms of their row sums. Long sequences are cut into chunks.

A row whose sum is below 1e-20 counts as empty: its output and gradients are 0.
"""

from __future__ import annotations

import functools
import logging
import math
import os

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lion.ops.arguments import Gates, expand_decay, is_static, no_autocast
from lion.ops.chunk import chunk_grid, in_chunks
from lion.ops.decay import materialized
from lion.ops.features import FEATURE_MAPS
from lion.ops.flex_scan import Pairs, attend, block_lists, scan
from lion.ops.full import masked_parts
from lion.ops.modes import exporting
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import FULL_UP_TO, Settings
from lion.ops.tokens import ScoreSettings, TokenBlock

SWITCH = "LION_FUSED"  # environment variable: 0 turns the fused form off
WHOLE_UP_TO = 1024  # tokens; longer sequences are cut into chunks, unless the form is "full"
# tokens per chunk: its products then take about as long as its memory traffic; 1,024 moves 6 % fewer bytes, with 1.8
# times the products (masked pairs counted): at half of the peak rate 454 us for 298 at 4,096 tokens on an H100
CHUNK = 512
LEAST_SUM = 1e-20
CHECK_LENGTHS = (150, 1100)  # tokens: two blocks, one of them not full; three chunks with states between them
TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # of the check, relative to the largest value; TF32 may be on

log = logging.getLogger("lion")
PASSED: set[tuple] = set()  # arguments of `checked` that have passed


def fused_applies(q: Tensor, v: Tensor, gates: Gates, settings: Settings) -> bool:
    """Return whether the fused form replaces the full form, for q (B, H, L, D) and v (B, H, L, E).

    The fused form is used in graphs of `torch.compile` for a GPU, where it is exact and has passed its check.
    """
    if q.device.type != "cuda" or not torch.compiler.is_compiling() or exporting():
        return False
    return suits(q, v, gates, settings) and usable(q.device, q.dtype, q.shape[-1], v.shape[-1])


def suits(q: Tensor, v: Tensor, gates: Gates, settings: Settings) -> bool:
    """Return whether the fused form is exact, and moves fewer bytes than the requested form.

    Without decay the limit is `FULL_UP_TO` tokens, because the product `Q (K^T V)` is linear in the length. The
    gradient of a decay per head adds up the rounding errors of all tokens, times the tokens' positions: such decays are
    fused in float32 only, and not in chunks.
    """
    dims = (q.shape[-1], v.shape[-1])
    if q.dtype not in TOLERANCES or not all(map(is_static, (*q.shape, v.shape[-1]))):
        return False
    if not all(16 <= n <= 256 for n in dims):
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
            lists = block_lists((side,), q.shape[3], q.shape[3], 0, q.device)
            pairs = Pairs((side,), directions[0].query.segment_index, q.shape[3], lists)
            outputs, log_sums = attend(*(x[:, :, :, None] for x in (q, k, v)), pairs)
        else:
            outputs, log_sums = scan(q, k, v, directions)
        y = _Merged.apply(outputs, log_sums, max(settings.eps, LEAST_SUM)).to(v.dtype)
        return y.unflatten(0, q.shape[:3]).flatten(2, 3)[:, :, :length]


class _Merged(torch.autograd.Function):
    """The sum of the outputs (F, S, C, E) of S directions, weighted by their shares p of the row sums.

    For the sum y, the gradient of the logarithm of a row sum is `p_s dl/dy (outputs_s - y)`. It is written out, because
    the outputs are then read once.
    """

    @staticmethod
    def forward(ctx, outputs: Tensor, log_sums: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(outputs, log_sums)
        ctx.eps = eps
        return (outputs * shares(log_sums, eps)[0]).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        outputs, log_sums = ctx.saved_tensors
        share, small = shares(log_sums, ctx.eps)
        full = share.masked_fill(small, 0)
        of_outputs = gradient[:, None] * share
        own, other = materialized(1 - full), materialized(full.sum(1, keepdim=True) - full)  # other: 0 if S is 1
        difference = outputs * own - outputs.flip(1) * other
        return of_outputs.to(outputs.dtype), (of_outputs * difference).sum(-1), None


def shares(log_sums: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the shares (F, S, C, 1) of directions in the sum of a row, and whether that is below `eps`.

    Sums below `eps` count as `eps`.
    """
    largest = log_sums.amax(1, keepdim=True)  # `logsumexp` handles infinities, too, in a kernel of its own
    total = largest + (log_sums - largest).exp().sum(1, keepdim=True).log()
    share = (log_sums - total.clamp_min(math.log(eps))).exp().masked_fill(total < math.log(LEAST_SUM), 0)
    return share[..., None], (total < math.log(eps))[..., None]


def switched_on() -> bool:
    return os.environ.get(SWITCH, "1") != "0"


def usable(device: torch.device, dtype: torch.dtype, dim: int, width: int) -> bool:
    """Return whether the fused form is switched on, and has passed its check."""
    return switched_on() and (device, dtype, dim, width) in PASSED


usable._dynamo_marked_constant = True  # `torch.compiler.assume_constant_result`, which imports the compiler


@functools.cache
def checked(device: torch.device, dtype: torch.dtype, dim: int, width: int) -> bool:
    """Check the compiled fused form against the full form on a few tokens, and log a line if the two differ.

    Without a passed check the fused form is not used. Call this function before a graph is traced, as models compiled
    by `compile_blocks` do. A backward pass that is compiled while another graph is traced would wait forever.

    Returns:
        Whether the check has passed.
    """
    try:
        device = torch.empty(0, device=device).device  # "cuda" is "cuda:0", as tensors there have it
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
            if fn is not full:
                with torch.no_grad():  # a graph of its own, as in evaluation
                    fn(*given)
            results.append([x.float() for x in (y, *gradients)])
    errors = ((x - z).abs().max() / z.abs().max() for x, z in zip(*results))
    return max(error.item() for error in errors)
