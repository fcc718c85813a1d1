"""Scalar decays by the kernels of `lion.ops.kernels`, as an operator with gradients.

A call takes the kernels if `kernels` is "triton" and it fits (`fits`). Everything else takes the graphs of PyTorch,
which are the definition. "auto" takes the graphs, because no GPU has timed the kernels yet.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lion.ops import modes
from lion.ops.decay import bounded
from lion.ops.modes import exporting, transforms_active
from lion.ops.settings import Settings
from lion.ops.tokens import Tokens, mask_tokens

ONE_CHUNK = 256  # tokens; longer sequences have chunks of `CHUNK`
CHUNK = 128
DIMS = (16, 32, 64, 128)  # of keys and of values
MAPS = (None, "identity", "silu_shifted", "elu1")  # computed in the kernels; other maps are applied before
INCLUSIVE = {"source": (False, True), "target": (True, False), "symmetric": (True, True)}  # sums `low` and `up`


def interpreting() -> bool:
    """Return whether Triton runs kernels on CPU tensors, program by program, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def fits(tokens: Tokens, settings: Settings, form: str) -> bool:
    """Return whether the kernels compute a call: scalar decays or none, row sums or none, and common sizes."""
    if settings.kernels != "triton" or form == "rnn":
        return False
    q, v = tokens.q, tokens.v
    others = tokens.delta or tokens.vector or tokens.bonus is not None or settings.dropout_p
    if others or settings.normalize not in ("sum", "none") or settings.decay_convention not in INCLUSIVE:
        return False
    if q.dtype not in (torch.bfloat16, torch.float32) or q.shape[-1] not in DIMS or v.shape[-1] not in DIMS:
        return False
    if transforms_active() or exporting():
        return False
    return interpreting() or (modes.for_gpu(q.device) and importlib.util.find_spec("triton") is not None)


def fused_attention(tokens: Tokens, settings: Settings) -> Tensor:
    """Compute `Y = scale(Q K^T * M) V` (B, H, L, E) for tokens that fit."""
    if tokens.feature_map not in MAPS:
        tokens = tokens.featurized()
    feature_map = tokens.feature_map
    if feature_map in (None, "identity"):
        feature_map = "none"
    batch, heads, length, dim = tokens.q.shape
    log_decay = None
    if tokens.log_decay is not None:
        decays = bounded(mask_tokens(tokens.log_decay, tokens.valid).float())
        log_decay = decays.squeeze(-1).expand(batch, heads, length).reshape(batch * heads, length)
    valid = None if tokens.valid is None else tokens.valid.to(torch.uint8)
    segment = None if tokens.segment is None else tokens.segment.int()
    scale = settings.scale_of(dim)
    convention, direction = settings.decay_convention, settings.direction
    options = (feature_map, convention, direction, settings.row_sums, scale, settings.eps)
    return attention_op(tokens.q, tokens.k, tokens.v, log_decay, valid, segment, *options)[0]


def chunks_of(length: int) -> tuple[int, int]:
    """Return the tokens of a chunk, a power of 2, and the number of chunks."""
    size = CHUNK
    if length <= ONE_CHUNK:
        size = max(16, 1 << (length - 1).bit_length())
    return size, -(-length // size)


def rows_like(x: Tensor) -> Tensor:
    """Return empty memory for tokens like x (B, H, L, D), laid out as (B, L, H, D)."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


def results_like(q: Tensor, v: Tensor, decays: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return empty outputs, row sums (B H, L), sums of decays (2, B H, N C), ends (B H, N), states and their z."""
    batch, heads, length, dim = q.shape
    size, count = chunks_of(length)
    rows = batch * heads
    wide = torch.float32
    sums = q.new_empty(2, rows if decays else 0, size * count, dtype=wide)
    end = q.new_empty(rows if decays else 0, count, dtype=wide)
    states = count if count > 1 else 0
    S = q.new_empty(2, rows, states, dim, v.shape[-1])
    z_of_S = q.new_empty(2, rows, states, dim, dtype=wide)
    return rows_like(v), q.new_empty(rows, length, dtype=wide), sums, end, S, z_of_S


class Launch:
    """The arguments that the kernels of one call share."""

    def __init__(
        self, q: Tensor, v: Tensor, valid: Tensor | None, segment: Tensor | None, decays: bool, options: tuple[Any, ...]
    ) -> None:
        feature_map, convention, direction, row_sums, scale, eps = options
        self.heads, self.length = q.shape[1:3]
        self.rows = q.shape[0] * self.heads
        self.size, self.count = chunks_of(self.length)
        self.tile = min(self.size, 64 if q.dtype == torch.bfloat16 and max(q.shape[-1], v.shape[-1]) <= 64 else 32)
        self.inclusive = INCLUSIVE[convention]
        self.below = direction != "backward"
        self.above = direction != "forward"
        self.masks = (q if valid is None else valid, q if segment is None else segment)  # `q` is not read
        self.sizes = (self.heads, self.length, self.count, scale, eps)
        self.flags = {
            "MAP": feature_map,
            "DECAY": decays,
            "SUMS": row_sums,
            "VALID": valid is not None,
            "PACKED": segment is not None,
            "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
            "D": q.shape[-1],
            "E": v.shape[-1],
            "C": self.size,
        }
        self.tiles = {"STATES": self.count > 1, "BELOW": self.below, "ABOVE": self.above, "ROWS": self.tile}
        self.grid = (self.count * self.size // self.tile, self.rows)

    def states(self, k: Tensor, v: Tensor, rows: tuple, sums: tuple, S: Tensor, z: Tensor, gradient: bool) -> None:
        """Compute the states that enter each chunk; `gradient`: those of queries and gradients of outputs."""
        from lion.ops.kernels import states_kernel

        first = int(self.above and not self.below) if not gradient else int(self.below and not self.above)
        states_kernel[self.rows, self.below + self.above](
            k, v, *rows, *self.masks, *sums, S, z, *self.sizes, *k.stride()[:3], *v.stride()[:3],
            GRADIENT=gradient, FIRST=first, BLOCK=self.tile, **self.flags, num_warps=4, num_stages=2,
        )  # fmt: skip


def inner(x: Tensor) -> Tensor:
    """Return x with numbers of a token side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("lion::scalar_attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    valid: Tensor | None,
    segment: Tensor | None,
    feature_map: str,
    decay_convention: str,
    direction: str,
    row_sums: bool,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, row sums, sums of decays, ends of chunks, states and their z, see `results_like`."""
    from lion.ops.kernels import outputs_kernel, sums_kernel

    q, k, v = inner(q), inner(k), inner(v)
    options = (feature_map, decay_convention, direction, row_sums, scale, eps)
    call = Launch(q, v, valid, segment, log_decay is not None, options)
    y, z, sums, end, S, z_of_S = results_like(q, v, log_decay is not None)
    low, up = sums
    if log_decay is not None:
        low_inclusive, up_inclusive = call.inclusive
        sums_kernel[call.count, call.rows](
            log_decay.contiguous(), low, up, end, call.length, call.count,
            LOW_INCLUSIVE=low_inclusive, UP_INCLUSIVE=up_inclusive, C=call.size,
        )  # fmt: skip
    if call.count > 1:
        call.states(k, v, (z, z), (low, up, end), S, z_of_S, gradient=False)
    outputs_kernel[call.grid](
        q, k, v, *call.masks, low, up, end, S, z_of_S, y, z, *call.sizes,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        BLOCK=call.tile, **call.tiles, **call.flags, num_warps=4, num_stages=2,
    )  # fmt: skip
    return y, z, sums, end, S, z_of_S


@attention_op.register_fake
def _(q, k, v, log_decay, *_):
    return results_like(q, v, log_decay is not None)


@torch.library.custom_op("lion::scalar_attention_gradients", mutates_args=())
def gradients_op(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    segment: Tensor | None,
    y: Tensor,
    z: Tensor,
    sums: Tensor,
    end: Tensor,
    S: Tensor,
    z_of_S: Tensor,
    feature_map: str,
    decay_convention: str,
    direction: str,
    row_sums: bool,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and those of the sums `low` and `up` (2, B H, L), natural logarithms."""
    from lion.ops.kernels import keys_kernel, queries_kernel

    dy, q, k, v = inner(dy), inner(q), inner(k), inner(v)
    options = (feature_map, decay_convention, direction, row_sums, scale, eps)
    decays = len(end) > 0
    call = Launch(q, v, valid, segment, decays, options)
    dq, dk, dv, d_sums = gradients_like(q, v, decays)
    delta = torch.empty_like(z)
    low, up = sums
    d_low, d_up = d_sums
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3])
    how = {"BLOCK": min(call.tile, 32), **call.tiles, **call.flags, "num_stages": 2}
    queries_kernel[call.grid](
        q, k, v, *call.masks, low, up, end, S, z_of_S, y, z, dy, dq, delta, d_low, d_up, *call.sizes, *strides,
        **how, num_warps=4,
    )  # fmt: skip
    G, z_of_G = torch.empty_like(S), torch.empty_like(z_of_S)
    if call.count > 1:
        call.states(q, dy, (z, delta), (low, up, end), G, z_of_G, gradient=True)
    keys_kernel[call.grid](
        q, k, v, *call.masks, low, up, end, G, z_of_G, z, delta, dy, dk, dv, d_low, d_up, *call.sizes, *strides,
        **how, num_warps=8,  # of 4 warps, registers would spill to memory
    )  # fmt: skip
    return dq, dk, dv, d_sums


def gradients_like(q: Tensor, v: Tensor, decays: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = q.shape[0] * q.shape[1] if decays else 0
    d_sums = q.new_empty(2, rows, q.shape[2], dtype=torch.float32)
    return rows_like(q), rows_like(q), rows_like(v), d_sums


@gradients_op.register_fake
def _(dy, q, k, v, valid, segment, y, z, sums, end, *_):
    return gradients_like(q, v, end.shape[0] > 0)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_decay, valid, segment, *options = inputs
    ctx.save_for_backward(q, k, v, valid, segment, *output)
    ctx.options = options
    ctx.decays = log_decay is not None
    ctx.mark_non_differentiable(*output[1:])


def gradients(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs; a decay has those of all sums that contain it."""
    q, k, v, valid, segment, *kept = ctx.saved_tensors
    dq, dk, dv, d_sums = gradients_op(dy, q, k, v, valid, segment, *kept, *ctx.options)
    of_decays = None
    if ctx.decays:
        d_sums = d_sums.double()
        from_here = d_sums.flip(-1).cumsum(-1).flip(-1)
        inclusive = INCLUSIVE[ctx.options[1]]
        parts = []
        for n in range(2):
            parts.append(from_here[n] if inclusive[n] else from_here[n] - d_sums[n])
        of_decays = (parts[0] + parts[1]).float()
    return dq, dk, dv, of_decays, *[None] * 8


attention_op.register_autograd(gradients, setup_context=keep)


@register_flop_formula(torch.ops.lion.scalar_attention)
def flops_of_attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the pairs of each chunk, and of the states, for arguments given by their shapes."""
    batch, heads, length, dim = q
    size, count = chunks_of(length)
    pairs = min(size, length) * (dim + v[-1])
    states = 4 * dim * v[-1] if count > 1 else 0
    return 2 * batch * heads * length * (pairs + states)


@register_flop_formula(torch.ops.lion.scalar_attention_gradients)
def flops_of_gradients(dy: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of seven products of pairs in place of two, and of as many states again."""
    return 7 * flops_of_attention(q, k, v) // 2
