"""Layers for the tests of `conform`: a correct one, and one fault each."""

import torch
from torch import nn


class Attention(nn.Module):
    """Causal softmax attention with one head, which takes padding, segments and chunk sizes, and has no fault."""

    def __init__(self, dim=8):
        super().__init__()
        self.qkv, self.proj, self.chunk = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), None

    def forward(self, x, valid=None, segments=None):
        x = self.clean(x, valid)
        return self.proj(self.attend(*self.qkv(x).chunk(3, -1), self.mask(x, valid, segments)))

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
        parts = zip(*(t.split(self.chunk or q.shape[1], 1) for t in (q, mask)))
        return torch.cat([self.weights(q, k, m) @ v for q, m in parts], 1)

    def weights(self, q, k, mask):
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)

    def set_chunk_size(self, size):
        self.chunk = size


class Streaming(Attention):
    """Attention with a cache of keys and values."""

    def prefill(self, x):
        return self(x), self.qkv(x).chunk(3, -1)[1:]

    def step(self, x, state):
        q, *new = self.qkv(x).chunk(3, -1)
        k, v = (torch.cat([old, token], 1) for old, token in zip(state, new))
        return self.proj(self.weights(q, k, torch.ones(1, 1, k.shape[1], dtype=torch.bool)) @ v), (k, v)


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
    def forward(self, x, valid=None, segments=None):
        y = super().forward(x, valid, segments)
        return y + 0.1 * x.mean(1, keepdim=True) if self.training else y


class BatchLeak(Attention):
    """Rows of a batch mix, unless there are masks."""

    def forward(self, x, valid=None, segments=None):
        mixed = valid is None and segments is None
        return super().forward(x + 0.1 * (x - x.mean(0)) if mixed else x, valid, segments)


class BorderLeak(Attention):
    """A chunk of 64 tokens sees the next one."""

    def order(self, length):
        chunk = torch.arange(length) // 64
        return super().order(length) | (chunk == chunk[:, None] + 1)


class FirstRow(Attention):
    """The masks of the first row are those of all rows."""

    def mask(self, x, valid, segments):
        return super().mask(x, *(None if mask is None else mask[:1] for mask in (valid, segments)))


class CompileFault(Attention):
    def forward(self, x, valid=None, segments=None):
        y = super().forward(x, valid, segments)
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
    def forward(self, x, valid=None, segments=None):
        return super().forward(x, valid, segments) / (x.shape[1] != 33)


class LongFault(Attention):
    """Outputs are wrong for sequences much longer than the one before."""

    longest = 300

    def forward(self, x, valid=None, segments=None):
        far, self.longest = x.shape[1] > 8 * self.longest, x.shape[1]
        return super().forward(x, valid, segments) * (1.1 if far else 1)


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

    def forward(self, x, valid=None, segments=None):
        y = super().forward(x, valid, segments)
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
