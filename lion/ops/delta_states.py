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
        ctx.save_for_backward(T, read, erase, kept, *outputs)
        ctx.writes = write is not None

    @staticmethod
    def backward(ctx, of_states: Tensor, of_values: Tensor) -> tuple[Tensor | None, ...]:
        T, read, erase, kept, states, values = ctx.saved_tensors
        before = states[:-1]
        with no_autocast(read):  # a backward pass inside of autocast
            with torch.no_grad():  # see `once` below
                of_before, of_right = backward_op(T, read, erase, kept, of_states, of_values)
            after = of_before[1:]
            of_lower, of_read, of_erase = of_right @ values.mT, of_right @ before.mT, values @ after.mT
            of_lower = -of_lower.tril(-1).to(kept.dtype)
            of_kept = (after.to(kept.dtype) * before).sum_to_size(kept.shape)
        found = (of_lower, -of_read, of_right, of_erase, of_kept, after)
        of_lower, *found, after = once(
            "the delta rule in chunks", found, T, read, erase, kept, states, values, of_states, of_values
        )
        return of_lower, None, *found, after if ctx.writes else None, None


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
    results = results_like(right, read)
    states, values = (x.flatten(1, 2) for x in results)
    states[0] = 0 if first is None else first
    S = states[0]
    steps = zip(states[:-1], states[1:], values, *(x.flatten(1, 2) for x in (T, read, right, erase, kept)))
    for n, (before, after, new, t, r, v, e, decay) in enumerate(steps):
        new.baddbmm_(t, torch.baddbmm(v, r, before, alpha=-1), beta=0)
        added = e.mT @ new
        S = torch.addcmul(added if write is None else added + write[n].flatten(0, 1), decay, S)
        after.copy_(S)
    return results


def results_like(right: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty states (N + 1, B, H, D, E) and values (N, B, H, C, E)."""
    count, *heads, _, width = right.shape
    return right.new_empty(count + 1, *heads, read.shape[-1], width), right.new_empty(right.shape)


loop_op = torch.library.custom_op("lion::delta_states", loop, mutates_args=())


def batched(op: Callable, info: Any, in_dims: tuple[int | None, ...], *args: Tensor | None) -> tuple[tuple, tuple]:
    """Apply a loop to arguments (N, B, H, ..) that `vmap` batches along `in_dims`, as more rows of B."""

    def rows(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None or x.dim() == 2:  # a constant first state
            return x
        x = x[:, None].expand(-1, info.batch_size, *x.shape[1:]) if dim is None else x.movedim(dim, 1)
        return x.flatten(1, 2)

    results = op(*map(rows, args, in_dims))
    return tuple(x.unflatten(1, (info.batch_size, -1)) for x in results), (1, 1)


@loop_op.register_fake
def _(T, read, right, erase, kept, write, first):
    return results_like(right, read)


@torch.library.custom_op("lion::delta_states_backward", mutates_args=())
def backward_op(
    T: Tensor, read: Tensor, erase: Tensor, kept: Tensor, of_states: Tensor, of_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states (N + 1, B, H, D, E), through later chunks too, and of V (N, B, H, C, E)."""
    results = results_like(of_values, read)
    before, of_right = (x.flatten(1, 2) for x in results)
    of_states = of_states.flatten(1, 2)
    dS = before[-1] = of_states[-1]
    given = (x.flatten(1, 2) for x in (T, read, erase, kept, of_values))
    steps = [*zip(before[1:], of_states, before, of_right, *given)]
    for of_after, of_state, of_before, dv, t, r, e, decay, dn in reversed(steps):
        dv.baddbmm_(t.mT, torch.baddbmm(dn, e, of_after), beta=0)
        dS = torch.addcmul(torch.baddbmm(of_state, r.mT, dv, alpha=-1), decay, dS)
        of_before.copy_(dS)
    return results


@backward_op.register_fake
def _(T, read, erase, kept, of_states, of_values):
    return results_like(of_values, read)


@register_flop_formula([torch.ops.lion.delta_states, torch.ops.lion.delta_states_backward])
def flops_of_loop(T: torch.Size, read: torch.Size, *_: Any, out_shape: Any, **__: Any) -> int:
    """Return the FLOPs of the three products of every chunk, whose arguments are given by their shapes."""
    *chunks, tokens, dim = read
    width = out_shape[1][-1]
    return 2 * math.prod(chunks) * (2 * tokens * dim * width + tokens * tokens * width)


loop_op.register_vmap(functools.partial(batched, loop_op))
backward_op.register_vmap(functools.partial(batched, backward_op))
