"""Selective scan of Mamba (2312.00752): a decay for each token, channel and state dimension, in linear time.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T      y_t = h_t C_t

The state `h` (E, N) of a sequence has N numbers for each of its E channels. All decays are at most 1, because dt is
positive and A negative, so that no state grows and no exponent is positive.

The loop takes a few tokens per step. A compiled step is one kernel, whose states stay in registers; the loop is one
operator of its caller's graph, whatever the length. For gradients the operator stores the state before each step, and
its backward pass computes the states within a step again. Beyond inputs, outputs and these states, memory is that of
one step.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lion.ops.arguments import no_autocast
from lion.ops.modes import exporting, transforms_active
from lion.ops.piecewise import compiled
from lion.ops.rnn import Compiler, eager
from lion.ops.settings import CHUNK_SIZE

TOKENS = {"cpu": 8}  # most tokens of a step; of 4, 8 and 16 the fastest with AVX512
TOKENS_ELSEWHERE = 16  # on a GPU (not measured)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    start: Tensor | None = None,
    state: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Scan sequences from left to right; G groups of sequences have separate A.

    Args:
        x: Inputs (G, B, L, E).
        dt: Positive steps (G, B, L, E), float32 or wider. A token with x = 0 and dt = 0 changes no state.
        A: Negative rates (G, E, N), in the dtype of dt.
        B, C: Vectors (G, B, L, N) that write to the state and read from it.
        start: Boolean (G, B, L), True where the state starts again from 0; None: only at the start of a sequence.
        state: State (G, B, E, N) before the first token, in the dtype of dt; None: 0.
        chunk_size: Tokens per step of the loop, at most `TOKENS`.

    Returns:
        Outputs (G, B, L, E) in the dtype of x, and the state after the last token.
    """
    if state is None:
        state = dt.new_zeros(dt.shape[:2] + A.shape[-2:])
    size = min(chunk_size, TOKENS.get(x.device.type, TOKENS_ELSEWHERE), x.shape[2])
    stores = torch.is_grad_enabled()
    whole = (size == x.shape[2] or exporting()) and not stores
    with no_autocast(x):
        if whole or transforms_active():  # exported programs and transforms have operators of torch alone
            return scan_piece(x, dt, B, C, start, A, state)
        return scan(x, dt, A, B, C, start, state, size, stores, torch.compiler.is_compiling())[:2]


def scan_piece(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, start: Tensor | None, A: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs (G, B, T, E) of T tokens that follow the state h (G, B, E, N), and the state after them."""
    u = dt * x
    B, C = B.to(dt.dtype), C.to(dt.dtype)
    outputs = []
    for t in range(x.shape[2]):
        h = torch.exp(dt[:, :, t, :, None] * A[:, None]) * from_start(h, start, t)
        h = h + u[:, :, t, :, None] * B[:, :, t, None]
        outputs.append((h * C[:, :, t, None]).sum(-1))
    return torch.stack(outputs, 2).to(x.dtype), h


def piece_gradients(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    start: Tensor | None,
    grad_y: Tensor,
    A: Tensor,
    h: Tensor,
    grad_h: Tensor,
    grad_A: Tensor,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return the gradients of x, dt, B and C of T tokens, of the state h before them, and of A.

    `grad_h` (G, B, E, N) is the gradient of the state after the tokens, `grad_A` (G, B, E, N) the sum of the gradients
    of A by all later tokens.
    """
    wide = dt.dtype
    x_dtype, B_dtype, C_dtype = x.dtype, B.dtype, C.dtype
    x, B, C, grad_y = x.to(wide), B.to(wide), C.to(wide), grad_y.to(wide)
    u = dt * x
    decays, before, after = [], [], []
    for t in range(x.shape[2]):
        decays.append(torch.exp(dt[:, :, t, :, None] * A[:, None]))
        before.append(from_start(h, start, t))
        h = decays[t] * before[t] + u[:, :, t, :, None] * B[:, :, t, None]
        after.append(h)
    grads, grad_x, grad_dt = [], [], []
    for t in reversed(range(x.shape[2])):
        grad_h = grad_h + grad_y[:, :, t, :, None] * C[:, :, t, None]
        grads.append(grad_h)
        grad_u = (grad_h * B[:, :, t, None]).sum(-1)
        grad_exponent = grad_h * decays[t] * before[t]
        grad_x.append(grad_u * dt[:, :, t])
        grad_dt.append(grad_u * x[:, :, t] + (grad_exponent * A[:, None]).sum(-1))
        grad_A = grad_A + grad_exponent * dt[:, :, t, :, None]
        grad_h = from_start(decays[t] * grad_h, start, t)
    of_x = torch.stack(grad_x[::-1], 2).to(x_dtype)
    of_dt = torch.stack(grad_dt[::-1], 2)
    of_B = channel_sums(grads[::-1], u).to(B_dtype)
    of_C = channel_sums(after, grad_y).to(C_dtype)
    return (of_x, of_dt, of_B, of_C), grad_h, grad_A


def channel_sums(states: list[Tensor], values: Tensor) -> Tensor:
    """Return the sums (G, B, T, N) over channels of T states (G, B, E, N) times values (G, B, T, E)."""
    if stacks(values):
        return (torch.stack(states, 2) * values[..., None]).sum(3)
    sums = []
    for t, h in enumerate(states):
        sums.append((h * values[:, :, t, :, None]).sum(2))
    return torch.stack(sums, 2)


def stacks(x: Tensor) -> bool:
    """Return whether to stack the states of several tokens in memory before a sum over channels.

    On a GPU this is one kernel instead of one for each token; on a CPU it takes three times as long.
    """
    return x.device.type != "cpu"


def from_start(h: Tensor, start: Tensor | None, t: int) -> Tensor:
    """Return the state h (G, B, E, N), or 0 in sequences that start again at token t."""
    if start is None:
        return h
    return h.masked_fill(start[:, :, t, None, None], 0)


def piece_of(x: Tensor | None, begin: int, size: int) -> Tensor | None:
    """Return a contiguous copy of `size` tokens of x (G, B, L) or (G, B, L, E) from `begin`.

    The last piece is filled up with zeros, which change no state.
    """
    if x is None:
        return None
    piece = x[:, :, begin : begin + size]
    missing = size - piece.shape[2]
    if not missing:
        return piece.contiguous()
    if x.dim() == 3:
        return F.pad(piece, (0, missing))
    return F.pad(piece, (0, 0, 0, missing))


def compiler_of(compile_steps: bool) -> Compiler:
    if compile_steps:
        return functools.partial(compiled, batch_dim=1)
    return eager


def stored_states(x: Tensor, state: Tensor, size: int, stores: bool) -> Tensor:
    """Return memory for the state before each step of `size` tokens of x (G, B, L, E); without any, if not `stores`."""
    steps = -(-x.shape[2] // size) if stores else 0
    return state.new_empty(steps, *state.shape)


def result_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("lion::selective_scan", mutates_args=())
def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    start: Tensor | None,
    state: Tensor,
    size: int,
    stores: bool,
    compile_steps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the loop; the third result holds the state before each step, for the gradients, if it `stores` them."""
    step = compiler_of(compile_steps)(scan_piece)
    length = x.shape[2]
    y = result_like(x)
    states = stored_states(x, state, size, stores)
    A, h = A.contiguous(), state.contiguous()
    with torch.no_grad(), no_autocast(x):
        for begin in range(0, length, size):
            if stores:
                states[begin // size] = h
            output, h = step(
                piece_of(x, begin, size),
                piece_of(dt, begin, size),
                piece_of(B, begin, size),
                piece_of(C, begin, size),
                piece_of(start, begin, size),
                A,
                h,
            )
            y[:, :, begin : begin + size] = output[:, :, : length - begin]
    return y, h, states


@scan.register_fake
def _(x, dt, A, B, C, start, state, size, stores, compile_steps):
    return result_like(x), result_like(state), stored_states(x, state, size, stores)


@torch.library.custom_op("lion::selective_scan_gradients", mutates_args=())
def scan_gradients(
    grad_y: Tensor,
    grad_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    start: Tensor | None,
    states: Tensor,
    size: int,
    compile_steps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and of the first state."""
    step = compiler_of(compile_steps)(piece_gradients)
    length = x.shape[2]
    grads = result_like(x), result_like(dt), result_like(B), result_like(C)
    A, grad_h, grad_A = A.contiguous(), grad_state.contiguous(), torch.zeros_like(states[0])
    with torch.no_grad(), no_autocast(x):
        for begin in reversed(range(0, length, size)):
            found, grad_h, grad_A = step(
                piece_of(x, begin, size),
                piece_of(dt, begin, size),
                piece_of(B, begin, size),
                piece_of(C, begin, size),
                piece_of(start, begin, size),
                piece_of(grad_y, begin, size),
                A,
                states[begin // size],
                grad_h,
                grad_A,
            )
            for grad, part in zip(grads, found):
                grad[:, :, begin : begin + size] = part[:, :, : length - begin]
    grad_x, grad_dt, grad_B, grad_C = grads
    return grad_x, grad_dt, grad_A.sum(1), grad_B, grad_C, grad_h


@scan_gradients.register_fake
def _(grad_y, grad_state, x, dt, A, B, C, start, states, size, compile_steps):
    return result_like(x), result_like(dt), result_like(A), result_like(B), result_like(C), result_like(grad_state)


@register_flop_formula(torch.ops.lion.selective_scan)
def flops_of_scan(x: torch.Size, dt: torch.Size, A: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the decay, the write and the read of every state, for arguments given by their shapes."""
    return 6 * math.prod(x) * A[-1]


@register_flop_formula(torch.ops.lion.selective_scan_gradients)
def flops_of_gradients(grad_y: torch.Size, grad_state: torch.Size, *inputs: torch.Size, **__: Any) -> int:
    """Return the FLOPs of the states, which are computed again, and of twice as many for their gradients."""
    return 3 * flops_of_scan(*inputs)


def keep_inputs(ctx, inputs, output) -> None:
    x, dt, A, B, C, start, _, size, _, compile_steps = inputs
    ctx.save_for_backward(x, dt, A, B, C, start, output[2])
    ctx.size, ctx.compile_steps = size, compile_steps
    ctx.mark_non_differentiable(output[2])


def gradients(ctx, grad_y: Tensor, grad_state: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, dt, A, B, C, start, states = ctx.saved_tensors
    of_x, of_dt, of_A, of_B, of_C, of_state = scan_gradients(
        grad_y, grad_state, x, dt, A, B, C, start, states, ctx.size, ctx.compile_steps
    )
    return of_x, of_dt, of_A, of_B, of_C, None, of_state, None, None, None


scan.register_autograd(gradients, setup_context=keep_inputs)
