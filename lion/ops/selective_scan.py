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
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lion.ops.arguments import no_autocast
from lion.ops.modes import exporting, transforms_active
from lion.ops.piecewise import compiled
from lion.ops.rnn import Compiler, eager

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
    chunk_size: int = 64,
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
        state = dt.new_zeros(*dt.shape[:2], *A.shape[-2:])
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
    outputs, u, B, C = [], dt * x, B.to(dt.dtype), C.to(dt.dtype)
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
    wide, T = dt.dtype, x.shape[2]
    given = x.dtype, B.dtype, C.dtype
    x, B, C, grad_y = (part.to(wide) for part in (x, B, C, grad_y))
    u, decays, before, after, grads = dt * x, [], [], [], []
    for t in range(T):
        decays.append(torch.exp(dt[:, :, t, :, None] * A[:, None]))
        before.append(from_start(h, start, t))
        h = decays[t] * before[t] + u[:, :, t, :, None] * B[:, :, t, None]
        after.append(h)
    grad_x, grad_dt = [], []
    for t in reversed(range(T)):
        grad_h = grad_h + grad_y[:, :, t, :, None] * C[:, :, t, None]
        grads.append(grad_h)
        grad_u = (grad_h * B[:, :, t, None]).sum(-1)
        grad_exponent = grad_h * decays[t] * before[t]
        grad_x.append(grad_u * dt[:, :, t])
        grad_dt.append(grad_u * x[:, :, t] + (grad_exponent * A[:, None]).sum(-1))
        grad_A = grad_A + grad_exponent * dt[:, :, t, :, None]
        grad_h = from_start(decays[t] * grad_h, start, t)
    grad_x, grad_dt = (torch.stack(part[::-1], 2) for part in (grad_x, grad_dt))
    grad_B, grad_C = channel_sums(grads[::-1], u), channel_sums(after, grad_y)
    return (grad_x.to(given[0]), grad_dt, grad_B.to(given[1]), grad_C.to(given[2])), grad_h, grad_A


def channel_sums(states: list[Tensor], values: Tensor) -> Tensor:
    """Return the sums (G, B, T, N) over channels of T states (G, B, E, N) times values (G, B, T, E)."""
    if stacks(values):
        return (torch.stack(states, 2) * values[..., None]).sum(3)
    return torch.stack([(h * values[:, :, t, :, None]).sum(2) for t, h in enumerate(states)], 2)


def stacks(x: Tensor) -> bool:
    """Return whether to stack the states of several tokens in memory before a sum over channels.

    On a GPU this is one kernel instead of one for each token; on a CPU it takes three times as long.
    """
    return x.device.type != "cpu"


def from_start(h: Tensor, start: Tensor | None, t: int) -> Tensor:
    """Return the state h (G, B, E, N), or 0 in sequences that start again at token t."""
    return h if start is None else h.masked_fill(start[:, :, t, None, None], 0)


def pieces(count: int, size: int, *tokens: Tensor | None, reverse: bool = False) -> Iterator[tuple[slice, list]]:
    """Yield the place and a contiguous copy of each `size` of `count` tokens (G, B, L, ..), the last piece first if
    `reverse`; the last piece is filled up with zeros, which change no state.
    """
    places = range(0, count, size)
    for begin in reversed(places) if reverse else places:
        here = slice(begin, min(begin + size, count))
        missing = size - (here.stop - begin)
        yield here, [x if x is None else filled(x[:, :, here], missing) for x in tokens]


def filled(x: Tensor, missing: int) -> Tensor:
    """Return tokens x (G, B, T) or (G, B, T, E) with `missing` zeros after them, contiguous."""
    return F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing)) if missing else x.contiguous()


def compiler_of(compile_steps: bool) -> Compiler:
    return functools.partial(compiled, batch_dim=1) if compile_steps else eager


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
    step, count = compiler_of(compile_steps)(scan_piece), x.shape[2]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    states = state.new_empty(-(-count // size) if stores else 0, *state.shape)
    A, h = A.contiguous(), state.contiguous()
    with torch.no_grad(), no_autocast(x):
        for here, tokens in pieces(count, size, x, dt, B, C, start):
            if stores:
                states[here.start // size] = h
            output, h = step(*tokens, A, h)
            y[:, :, here] = output[:, :, : here.stop - here.start]
    return y, h, states


@scan.register_fake
def _(x, dt, A, B, C, start, state, size, stores, compile_steps):
    states = state.new_empty(-(-x.shape[2] // size) if stores else 0, *state.shape)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, torch.empty_like(state, memory_format=torch.contiguous_format), states


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
    step, count = compiler_of(compile_steps)(piece_gradients), x.shape[2]
    grads = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in (x, dt, B, C)]
    A, grad_h, grad_A = A.contiguous(), grad_state.contiguous(), torch.zeros_like(states[0])
    with torch.no_grad(), no_autocast(x):
        for here, tokens in pieces(count, size, x, dt, B, C, start, grad_y, reverse=True):
            h = states[here.start // size]
            found, grad_h, grad_A = step(*tokens, A, h, grad_h, grad_A)
            for grad, part in zip(grads, found):
                grad[:, :, here] = part[:, :, : here.stop - here.start]
    return grads[0], grads[1], grad_A.sum(1), grads[2], grads[3], grad_h


@scan_gradients.register_fake
def _(grad_y, grad_state, x, dt, A, B, C, start, states, size, compile_steps):
    return tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in (x, dt, A, B, C, grad_state))


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
    dx, d_dt, dA, dB, dC, first = scan_gradients(grad_y, grad_state, *ctx.saved_tensors, ctx.size, ctx.compile_steps)
    return dx, d_dt, dA, dB, dC, None, first, None, None, None


scan.register_autograd(gradients, setup_context=keep_inputs)
