"""Exchange between processes that hold parts of the same rows, with gradients, as operators of a graph.

The two halves of a gather are separate: what is computed between `start` and `finish` overlaps with the communication,
in eager code and in a graph. Backward, the reduction begins where the gather was finished and ends where it began, so
it overlaps with the gradients of the same work. Inductor by itself waits at the start of an exchange; training lets it
move the waits (`lion.trainer.compilation.overlap_exchanges`).

Linear attention with decays computes its own tokens in between. Delta rules, LightNet, the selective scan, windows over
neighbours, sums (`Part.sum`) and all-to-alls (`Part.swap`) wait at once.

Every process must call the same functions in the same order, and use the results in its loss. Otherwise the others wait
for a reduction that this process never begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lion.ops.segments import SegmentIndex

ops = torch.ops._c10d_functional


class Part(NamedTuple):
    """The part of every row that this process holds; the parts of all processes follow each other in order of rank.

    Attributes:
        group: Name of the process group whose processes share the rows (`ProcessGroup.group_name`).
        rank: Rank of this process in the group.
        count: Number of processes in the group.
        first, last: Integer (B, count), the segments of the first and of the last token of every part; None without
            segments.
        length: Number of tokens of whole rows, if all parts have the same size (`size`); else 0.
    """

    group: str
    rank: int
    count: int  # type: ignore[assignment]  # also a method of tuples
    first: Tensor | None = None
    last: Tensor | None = None
    length: int = 0

    @staticmethod
    def of(group: dist.ProcessGroup) -> Part:
        """Return the part that this process holds in a process group."""
        return Part(group.group_name, dist.get_rank(group), dist.get_world_size(group))

    def size(self, length: int) -> int:
        """Return the number of tokens of each part of rows of `length` tokens, with the padding at their end."""
        return -(-length // self.count)

    def own(self, x: Tensor, dim: int = 1, fill: float | bool = 0) -> Tensor:
        """Return the tokens of this part of rows x, whose tokens are along `dim`; `fill` is the value of padding.

        All parts have the same size, so that the processes make the same graph and draw the same random numbers.
        """
        size = self.size(x.shape[dim])
        padding = size * self.count - x.shape[dim]
        if padding:
            shape = [*x.shape]
            shape[dim] = padding
            x = torch.cat([x, x.new_full(shape, fill)], dim)
        return x.narrow(dim, self.rank * size, size)

    def with_segments(self, index: Tensor, starts: Sequence[int]) -> Part:
        """Return this part with the segments at all borders.

        Args:
            index: Segment numbers (B, L) of whole rows (`SegmentIndex`).
            starts: First token of every part.
        """
        ends = [start - 1 for start in (*starts[1:], index.shape[1])]
        return self._replace(first=index[:, list(starts)], last=index[:, ends])

    def numbered(self, segments: SegmentIndex | None) -> SegmentIndex | None:
        """Return the segments of a part unchanged.

        Raises:
            ValueError: Segments that are not numbered over whole rows.
        """
        known = isinstance(segments, SegmentIndex) and (segments.index is None or self.first is not None)
        if segments is not None and not known:
            raise ValueError("segments: expected those of whole rows, see SegmentIndex.part and Part.with_segments")
        return segments

    def entering_segment(self, reverse: bool) -> Tensor | None:
        """Return the segment (B,) of the state that enters this part from the left, or from the right if `reverse`.

        At the end of the rows, where no state enters, the segment has no meaning.
        """
        if self.first is None or self.last is None:
            return None
        return self.first[:, (self.rank + 1) % self.count] if reverse else self.last[:, self.rank - 1]

    def outside(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return two boolean masks (count, B or 1) of the other parts.

        The first one marks earlier parts in the sequence of this part's first token, the second one later parts in the
        sequence of its last token. A part that lies in several sequences counts with the one next to this part.
        """
        place = torch.arange(self.count, device=device)[:, None]
        before, after = place < self.rank, place > self.rank
        if self.first is None or self.last is None:
            return before, after
        earlier = before & self.last.eq(self.first[:, self.rank, None]).mT
        return earlier, after & self.first.eq(self.last[:, self.rank, None]).mT

    def start(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to gather tensors of one dtype, of the same shapes in all processes.

        The function that is returned ends the gathering. It returns every tensor of all processes, (count, ..).
        """
        flat = torch.cat([t.flatten() for t in tensors])
        sent, received = _Start.apply(flat, self.count, self.group)

        def finish() -> list[Tensor]:
            every = _Finish.apply(sent, received, self.count, self.group).view(self.count, -1)
            pieces = every.split([t.numel() for t in tensors], 1)
            return [piece.reshape(self.count, *t.shape) for piece, t in zip(pieces, tensors)]

        return finish

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Return every tensor of all processes, (count, ..)."""
        return self.start(*tensors)()

    def swap(self, x: Tensor, cut: int, join: int) -> Tensor:
        """Cut x into a piece for every process along dim `cut`; return the pieces of all of them, joined along `join`.

        The pieces have the same size: `count` divides the size of x along `cut`.
        """
        pieces = torch.stack(x.chunk(self.count, cut))
        return torch.cat(_Swapped.apply(pieces, self.group).unbind(), join)

    def token(self, x: Tensor, place: int) -> Tensor:
        """Return token `place` (B, ..) of whole rows, from the tokens x (B, L, ..) of parts of equal size."""
        rank, here = divmod(place, x.shape[1])
        return self.sum(x[:, here] if rank == self.rank else x[:, 0] * 0)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the processes, in each of them."""
        return Summed.apply(x, self.group)


class _Start(torch.autograd.Function):
    """The first half of a gather; its gradient is the second half of the reduction that `_Finish` begins."""

    @staticmethod
    def forward(ctx, x: Tensor, count: int, group: str) -> tuple[Tensor, Tensor]:
        received = ops.all_gather_into_tensor(x, count, group)
        ctx.mark_non_differentiable(received)
        return x.view_as(x), received

    @staticmethod
    def backward(ctx, gradient: Tensor, _: None) -> tuple[Tensor, None, None]:
        return ops.wait_tensor(gradient), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sent: Tensor, received: Tensor, count: int, group: str) -> Tensor:
        ctx.count, ctx.group = count, group
        return ops.wait_tensor(received).view_as(received)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ops.reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.count, ctx.group), None, None, None


class _Swapped(torch.autograd.Function):
    """An exchange of pieces (count, ..), one for every process and one from every process."""

    @staticmethod
    def forward(ctx, pieces: Tensor, group: str) -> Tensor:
        ctx.group = group
        return swapped(pieces, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return swapped(gradient, ctx.group), None


def swapped(pieces: Tensor, group: str) -> Tensor:
    sizes = [1] * len(pieces)
    return ops.wait_tensor(ops.all_to_all_single(pieces.contiguous(), sizes, sizes, group))


class Summed(torch.autograd.Function):
    """A sum over processes, whose gradient is summed over the processes as well."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


def summed(x: Tensor, group: str) -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))
