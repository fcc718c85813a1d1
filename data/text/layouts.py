"""How a split of documents becomes samples of one length, each computed from its number alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data.text.store import Tokens
from lion.tasks.data import Batch, DeviceDataset


class Layout(DeviceDataset):
    """Samples {tokens (L,)}, with {segments (L,)} where documents are kept apart; nothing is left to chance."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.tokens, self.length = tokens, length

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays (B, L) of samples (B,)."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: values[0] for name, values in self.batch([index], "cpu").items()}

    def batch(
        self, indices: Sequence[int], device: torch.device | str, generator: torch.Generator | None = None
    ) -> Batch:
        """tokens (B, L), and segments, -1 for padding, both int64."""
        rows = self.rows(np.asarray(indices, np.int64))
        return {name: torch.from_numpy(values.astype(np.int64)).to(device) for name, values in rows.items()}


class Windows(Layout):
    """Stretches of the row of all documents that begin at every `stride`-th token."""

    def __init__(self, tokens: Tokens, length: int, stride: int = 1) -> None:
        super().__init__(tokens, length)
        self.stride = stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens.ids) - self.length) // self.stride + 1)

    def rows(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": self.tokens.take(samples[:, None] * self.stride + np.arange(self.length))}


class Packed(Layout):
    """The row of all documents in stretches that neither overlap nor leave a token out: the last is padded.

    A document that does not fit goes on in the next sample, as a segment of its own.
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


class Padded(Layout):
    """One document a sample, padded; what is longer is cut. With a `close` the cut one ends with it, as in BERT."""

    def __init__(self, tokens: Tokens, length: int, pad: int, close: int | None) -> None:
        super().__init__(tokens, length)
        self.pad, self.close = pad, close

    def __len__(self) -> int:
        return len(self.tokens.ends)

    def filled(self) -> float:
        """The share of its places that hold tokens; of 2^16 documents that lie evenly, where there are more."""
        starts, ends = self.bounds(np.linspace(0, len(self) - 1, min(len(self), 2**16), dtype=np.int64))
        return float(np.minimum(ends - starts, self.length).mean() / self.length)

    def bounds(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents (B,) begin and end."""
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
