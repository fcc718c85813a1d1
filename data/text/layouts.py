"""Layouts of documents in samples of one length; each sample is computed from its index alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from data.base import BatchedSamples
from data.text.store import Tokens
from lion.samples.base import Batch, moved


class TokenLayout(BatchedSamples):
    """Deterministic samples {tokens (L,)}, with {segments (L,)} in layouts that separate documents."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.tokens, self.length = tokens, length

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays (B, L) of the samples with indices (B,)."""

    def batch(
        self, indices: Sequence[int], device: torch.device | str, generator: torch.Generator | None = None
    ) -> Batch:
        """Return tokens (B, L), and segments (B, L) where the layout has them, -1 for padding, both int64."""
        rows = self.rows(np.asarray(indices, np.int64))
        return {name: moved(torch.from_numpy(values.astype(np.int64)), device) for name, values in rows.items()}


class Windows(TokenLayout):
    """Windows of `length` tokens over the concatenated documents; a window begins at every `stride`-th token."""

    def __init__(self, tokens: Tokens, length: int, stride: int = 1) -> None:
        super().__init__(tokens, length)
        self.stride = stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens.ids) - self.length) // self.stride + 1)

    def rows(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": self.tokens.take(samples[:, None] * self.stride + np.arange(self.length))}


class Packed(TokenLayout):
    """The concatenated documents, cut into consecutive samples without overlap or loss; the last sample is padded.

    A document that does not fit continues in the next sample, as a separate segment.
    """

    def __init__(self, tokens: Tokens, length: int, pad: int) -> None:
        super().__init__(tokens, length)
        self.pad = pad

    def __len__(self) -> int:
        return -(-len(self.tokens.ids) // self.length)

    def rows(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        places = samples[:, None] * self.length + np.arange(self.length)  # (B, L)
        real = places < len(self.tokens.ids)
        places = np.minimum(places, len(self.tokens.ids) - 1)
        document = np.searchsorted(self.tokens.ends, places, side="right")
        return {
            "tokens": np.where(real, self.tokens.take(places), self.pad),
            "segments": np.where(real, document - document[:, :1], -1),
        }


class Padded(TokenLayout):
    """Documents, one per sample, padded or truncated; a truncated sample ends with the token `close`, as in BERT."""

    def __init__(self, tokens: Tokens, length: int, pad: int, close: int | None) -> None:
        super().__init__(tokens, length)
        self.pad, self.close = pad, close

    def __len__(self) -> int:
        return len(self.tokens.ends)

    def filled(self) -> float:
        """Return the share of positions that hold tokens, from at most 2^16 evenly spaced documents."""
        starts, ends = self.bounds(np.linspace(0, len(self) - 1, min(len(self), 2**16), dtype=np.int64))
        return float(np.minimum(ends - starts, self.length).mean() / self.length)

    def bounds(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the begins and ends (B,) of the documents (B,) in the token file."""
        ends = self.tokens.ends
        return np.where(samples > 0, ends[np.maximum(samples - 1, 0)], 0), np.asarray(ends[samples])

    def rows(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        starts, ends = self.bounds(samples)
        places = starts[:, None] + np.arange(self.length)  # (B, L)
        real = places < ends[:, None]
        tokens = np.where(real, self.tokens.take(np.minimum(places, len(self.tokens.ids) - 1)), self.pad)
        if self.close is not None:
            tokens[ends - starts > self.length, -1] = self.close
        return {"tokens": tokens, "segments": np.where(real, 0, -1)}
