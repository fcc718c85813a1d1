"""States between the chunks of a delta rule, and the new values that the tokens of the chunks write.

    N_n = (I + tril(L_n, -1))^-1 (V_n - R_n S_n)        S_{n+1} = kept_n S_n + E_n^T N_n + W_n

The loop over the chunks is one operator of a graph, whatever their number, and the loop of its gradient is another one.
Each step of a loop consists of three matrix products. A graph that is exported holds the steps themselves. States add
up in the dtype of L, and are multiplied and returned in that of V.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lion.ops.arguments import no_autocast
from lion.ops.modes import exporting
from lion.ops.once import once


def chunk_states(
    lower: Tensor,
    read: Tensor,
    right: Tensor,
    erase: Tensor,
    kept: Tensor,
    write: Tensor | None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the states before each of N chunks and after the last one, and the new values.

    Args:
        lower: Products L (N, B, H, C, C) of the tokens of a chunk, of which the strictly lower triangle counts.
        read, erase: Vectors R and E (N, B, H, C, D).
        right: Values V (N, B, H, C, E).
        kept: Decays (N, B, H, D or 1, 1) of the states.
        write: States W (N, B, H, D, E) that the chunks add, or None.
        first: First state (D, E), a constant; None is 0.

    Returns:
        States (N + 1, B, H, D, E), and new values (N, B, H, C, E).
    """
    if exporting():
        return loop(inverse(lower).to(right.dtype), read, right, erase, kept, write, first)
    T = inverse(lower.detach()).to(right.dtype)
    return _States.apply(lower, T, read, right, erase, kept, write, first)


class _States(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        lower: Tensor,
        T: Tensor,
        read: Tensor,
        right: Tensor,
        erase: Tensor,
        kept: Tensor,
        write: Tensor | None,
        first: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return loop_op(T, read, right, erase, kept, write, first)

    @staticmethod
    def setup_context(ctx, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        _, T, read, _, erase, kept, write, _ = inputs
        states, values = outputs
        ctx.save_for_backward(T, read, erase, kept, states, values)
        ctx.writes = write is not None

    @staticmethod
    def backward(ctx, of_states: Tensor, of_values: Tensor) -> tuple[Tensor | None, ...]:
        T, read, erase, kept, states, values = ctx.saved_tensors
        before = states[:-1]
        with no_autocast(read):  # a backward pass inside of autocast
            with torch.no_grad():  # see `once` below
                of_before, of_right = backward_op(T, read, erase, kept, of_states, of_values)
            after = of_before[1:]
            of_read = -(of_right @ before.mT)
            of_erase = values @ after.mT
            of_lower = -(of_right @ values.mT).tril(-1).to(kept.dtype)
            of_kept = (after.to(kept.dtype) * before).sum_to_size(kept.shape)
        of_lower, of_read, of_right, of_erase, of_kept, after = once(
            "the delta rule in chunks",
            (of_lower, of_read, of_right, of_erase, of_kept, after),
            T,
            read,
            erase,
            kept,
            states,
            values,
            of_states,
            of_values,
        )
        of_write = after if ctx.writes else None
        return of_lower, None, of_read, of_right, of_erase, of_kept, of_write, None


def inverse(lower: Tensor) -> Tensor:
    """Return `(I + tril(lower, -1))^-1`, (.., C, C)."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)


def loop(
    T: Tensor,
    read: Tensor,
    right: Tensor,
    erase: Tensor,
    kept: Tensor,
    write: Tensor | None,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `chunk_states` chunk by chunk, with the inverses T (N, B, H, C, C)."""
    states, values = results_like(right, read)
    flat_states, flat_values = states.flatten(1, 2), values.flatten(1, 2)  # (N, B H, ..), for `baddbmm`
    T, read, right = T.flatten(1, 2), read.flatten(1, 2), right.flatten(1, 2)
    erase, kept = erase.flatten(1, 2), kept.flatten(1, 2)
    if first is None:
        flat_states[0] = 0
    else:
        flat_states[0] = first
    S = flat_states[0]
    for n in range(len(right)):
        new = flat_values[n]
        new.baddbmm_(T[n], torch.baddbmm(right[n], read[n], flat_states[n], alpha=-1), beta=0)
        added = erase[n].mT @ new
        if write is not None:
            added = added + write[n].flatten(0, 1)
        S = torch.addcmul(added, kept[n], S)
        flat_states[n + 1].copy_(S)
    return states, values


def results_like(right: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty states (N + 1, B, H, D, E) and values (N, B, H, C, E)."""
    count, batch, heads, _, width = right.shape
    return right.new_empty(count + 1, batch, heads, read.shape[-1], width), right.new_empty(right.shape)


loop_op = torch.library.custom_op("lion::delta_states", loop, mutates_args=())


def batched(op: Callable, info: Any, in_dims: tuple[int | None, ...], *args: Tensor | None) -> tuple[tuple, tuple]:
    """Apply a loop to arguments (N, B, H, ..) that `vmap` batches along `in_dims`, as more rows of B."""

    def rows(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None or x.dim() == 2:  # a constant first state
            return x
        if dim is None:
            x = x.unsqueeze(1).repeat_interleave(info.batch_size, 1)
        else:
            x = x.movedim(dim, 1)
        return x.flatten(1, 2)

    first, second = op(*map(rows, args, in_dims))
    shape = (info.batch_size, -1)
    return (first.unflatten(1, shape), second.unflatten(1, shape)), (1, 1)


@loop_op.register_fake
def _(T, read, right, erase, kept, write, first):
    return results_like(right, read)


@torch.library.custom_op("lion::delta_states_backward", mutates_args=())
def backward_op(
    T: Tensor, read: Tensor, erase: Tensor, kept: Tensor, of_states: Tensor, of_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states (N + 1, B, H, D, E), through later chunks too, and of V (N, B, H, C, E)."""
    of_before, of_right = results_like(of_values, read)
    flat_before, flat_right = of_before.flatten(1, 2), of_right.flatten(1, 2)
    T, read, erase, kept = T.flatten(1, 2), read.flatten(1, 2), erase.flatten(1, 2), kept.flatten(1, 2)
    of_states, of_values = of_states.flatten(1, 2), of_values.flatten(1, 2)
    dS = of_states[-1]
    flat_before[-1] = dS
    for n in reversed(range(len(read))):
        dv = flat_right[n]
        dv.baddbmm_(T[n].mT, torch.baddbmm(of_values[n], erase[n], flat_before[n + 1]), beta=0)
        dS = torch.addcmul(torch.baddbmm(of_states[n], read[n].mT, dv, alpha=-1), kept[n], dS)
        flat_before[n].copy_(dS)
    return of_before, of_right


@backward_op.register_fake
def _(T, read, erase, kept, of_states, of_values):
    return results_like(of_values, read)


@register_flop_formula([torch.ops.lion.delta_states, torch.ops.lion.delta_states_backward])
def flops_of_loop(T: torch.Size, read: torch.Size, *_: Any, out_shape: Any, **__: Any) -> int:
    """Return the FLOPs of the three products of every chunk, whose arguments are given by their shapes."""
    tokens, dim = read[-2:]
    width = out_shape[1][-1]
    return 2 * math.prod(read[:-2]) * (2 * tokens * dim * width + tokens * tokens * width)


loop_op.register_vmap(functools.partial(batched, loop_op))
backward_op.register_vmap(functools.partial(batched, backward_op))
