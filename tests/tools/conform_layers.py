"""Layers for the tests of `conform`: a correct one, and one fault each."""

import torch
from torch import nn


class Attention(nn.Module):
    """Causal softmax attention with one head, which takes padding, segments and chunk sizes, and has no fault."""

    def __init__(self, dim=8):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.chunk = None

    def forward(self, x, valid=None, segments=None):
        tokens = self.clean(x, valid)
        q, k, v = self.qkv(tokens).chunk(3, -1)
        y = self.attend(q, k, v, self.mask(tokens, valid, segments))
        return self.end(self.proj(y), x)

    def end(self, y, x):
        """Return the output from the right one, y, and the input x."""
        return y

    def clean(self, x, valid):
        return x if valid is None else x.masked_fill(~valid[..., None], 0)

    def mask(self, x, valid, segments):
        mask = self.order(x.shape[1])[None]
        if valid is not None:
            mask = mask & valid[:, None]
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None])
        return mask | torch.eye(x.shape[1], dtype=torch.bool)  # padding attends to itself: no empty row

    def order(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril()

    def attend(self, q, k, v, mask):
        size = self.chunk or q.shape[1]
        outputs = []
        for queries, seen in zip(q.split(size, 1), mask.split(size, 1)):
            outputs.append(self.weights(queries, k, seen) @ v)
        return torch.cat(outputs, 1)

    def weights(self, q, k, mask):
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)

    def set_chunk_size(self, size):
        self.chunk = size


class Streaming(Attention):
    """Attention with a cache of keys and values."""

    def prefill(self, x):
        return self(x), self.qkv(x).chunk(3, -1)[1:]

    def step(self, x, state):
        q, k, v = self.qkv(x).chunk(3, -1)
        k = torch.cat([state[0], k], 1)
        v = torch.cat([state[1], v], 1)
        seen = torch.ones(1, 1, k.shape[1], dtype=torch.bool)
        return self.proj(self.weights(q, k, seen) @ v), (k, v)


class PaddingLeak(Attention):
    """Keys of padding are those of zeros, but take part in the softmax."""

    def mask(self, x, valid, segments):
        return super().mask(x, None, segments)


class NanLeak(Attention):
    """Padding has weight zero, and zero times NaN is NaN."""

    def clean(self, x, valid):
        return x


class SegmentLeak(Attention):
    def mask(self, x, valid, segments):
        return super().mask(x, valid, None)


class FutureLeak(Attention):
    def order(self, length):
        mask = super().order(length)
        return mask if self.training else torch.ones_like(mask)


class TrainingLeak(Streaming):
    def end(self, y, x):
        return y + 0.1 * x.mean(1, keepdim=True) if self.training else y


class BatchLeak(Attention):
    """Rows of a batch mix, unless there are masks."""

    def forward(self, x, valid=None, segments=None):
        if valid is None and segments is None:
            x = x + 0.1 * (x - x.mean(0))
        return super().forward(x, valid, segments)


class BorderLeak(Attention):
    """A chunk of 64 tokens sees the next one."""

    def order(self, length):
        chunk = torch.arange(length) // 64
        return super().order(length) | (chunk == chunk[:, None] + 1)


class FirstRow(Attention):
    """The masks of the first row are those of all rows."""

    def mask(self, x, valid, segments):
        if valid is not None:
            valid = valid[:1]
        if segments is not None:
            segments = segments[:1]
        return super().mask(x, valid, segments)


class CompileFault(Attention):
    def end(self, y, x):
        return 1.01 * y if torch.compiler.is_compiling() else y


class StepFault(Streaming):
    """The first token is forgotten."""

    def step(self, x, state):
        return super().step(x, tuple(t[:, -11:] for t in state))


class ChunkFault(Attention):
    """Chunks do not see earlier chunks."""

    def attend(self, q, k, v, mask):
        index = torch.arange(q.shape[1]) // (self.chunk or q.shape[1])
        return super().attend(q, k, v, mask & (index[:, None] == index))


class LengthFault(Attention):
    def end(self, y, x):
        return y / (x.shape[1] != 33)


class LongFault(Attention):
    """Outputs are wrong for sequences much longer than the one before."""

    longest = 300

    def end(self, y, x):
        before = self.longest
        self.longest = x.shape[1]
        return 1.1 * y if x.shape[1] > 8 * before else y


class StrideFault(Attention):
    def clean(self, x, valid):
        return super().clean(x.view(-1, x.shape[-1]).view(x.shape), valid)


class WriteFault(Attention):
    def clean(self, x, valid):
        return x if valid is None else x.masked_fill_(~valid[..., None], 0)


class RandomFault(Attention):
    def clean(self, x, valid):
        x = super().clean(x, valid)
        return x + 3e-7 * torch.randn_like(x) if x.dtype == torch.float32 else x


class LowPrecisionFault(Attention):
    def clean(self, x, valid):
        return super().clean(1.2 * x if x.dtype == torch.bfloat16 else x, valid)


class OverflowFault(Attention):
    def clean(self, x, valid):
        x = super().clean(x, valid)
        return x + 0 * (0.1 * x).exp()


class GradientFault(Attention):
    """Gradients have the wrong sign."""

    def end(self, y, x):
        return 2 * y.detach() - y


class DeadFault(Attention):
    def __init__(self, dim=8):
        super().__init__(dim)
        self.unused = nn.Parameter(torch.ones(dim))


FAULTS = {
    PaddingLeak: "padding",
    NanLeak: "nan in padding",
    SegmentLeak: "packed documents",
    FutureLeak: "causal in evaluation",
    TrainingLeak: "causal in training",
    BatchLeak: "batch equals single",
    CompileFault: "compiled equals eager",
    StepFault: "steps equal whole",
    ChunkFault: "chunk sizes",
    LengthFault: "ragged lengths",
    LongFault: "longer than seen",
    StrideFault: "non-contiguous input",
    WriteFault: "inputs unchanged",
    RandomFault: "deterministic",
    LowPrecisionFault: "bfloat16",
    OverflowFault: "extreme inputs",
    GradientFault: "gradients",
    DeadFault: "no dead parameter",
}
