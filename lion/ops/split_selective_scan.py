"""The selective scan of rows whose tokens are split over processes, with one exchange of states for all directions.

A state that enters a part decays by `exp(A sum_t dt_t)` up to its end, and adds to what the part leaves without it.
Each process therefore scans its tokens twice: from zero, for the state `E N` and the sums `E` of dt that it sends, and
again from the state that enters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lion.ops.arguments import no_autocast
from lion.ops.exchange import Part


def entering_states(left: Tensor, dt: Tensor, A: Tensor, part: Part, reverse: Sequence[bool]) -> Tensor:
    """Return the states (G, B, E, N) that enter this part in G scans.

    Args:
        left: States (G, B, E, N) that leave this part if none enters.
        dt: Sums (G, B, E) of the steps of its tokens.
        A: Negative rates (G, E, N).
        part: The part, with the segments at its borders if there are segments.
        reverse: Whether each of the scans goes from right to left.
    """
    every, steps = part.gather(left, dt)  # (P, G, B, E, ..)
    taken, states = part.outside(left.device), []
    with no_autocast(left):
        for g, backward in enumerate(reverse):
            state = 0 * every[part.rank, g]  # every process takes part in the reduction of gradients
            for p in range(part.count - 1, part.rank, -1) if backward else range(part.rank):
                kept = torch.exp(steps[p, g, ..., None] * A[g])
                state = kept * state + every[p, g] * taken[backward][p, :, None, None]
            states.append(state)
    return torch.stack(states)
