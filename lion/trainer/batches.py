"""Which samples a step sees, as a pure function of (seed, epoch, position).

The global batch of a step does not depend on the number of processes, loader workers or micro-batches, and
a sample's augmentation depends on (seed, epoch, sample) alone: a run can stop and go on anywhere.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lion.config import ConfigError


def derive(*numbers: int) -> int:
    """A seed from several numbers, far apart for neighbours."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def epoch_order(size: int, seed: int, epoch: int, repeats: int = 1) -> torch.Tensor:
    """The samples of an epoch in order; with `repeats`, as many fewer, each that often in a row (DeiT)."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(derive(seed, epoch)))
    return order.repeat_interleave(repeats)[:size]


class StepSampler(Sampler):
    """Micro-batches of one process for steps `start` to `total`, as lists of (epoch, place, sample)."""

    def __init__(
        self,
        size: int,
        *,
        batch: int,
        micro: int,
        seed: int,
        start: int,
        total: int,
        rank: int,
        world: int,
        repeats: int = 1,
    ) -> None:
        self.size, self.batch, self.micro, self.seed, self.repeats = size, batch, micro, seed, repeats
        self.start, self.total, self.rank, self.world = start, total, rank, world
        self.steps_per_epoch = size // batch

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        current, order = None, None
        for step in range(self.start, self.total):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != current:
                current, order = epoch, epoch_order(self.size, self.seed, epoch, self.repeats).tolist()
            first = position * self.batch
            for begin in range(first + self.rank * self.micro, first + self.batch, self.micro * self.world):
                yield [(epoch, place, order[place]) for place in range(begin, begin + self.micro)]


class SeededDataset(Dataset):
    """A data set whose random augmentation depends on (seed, epoch, place in the epoch) alone."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
        generator = torch.default_generator
        state = generator.get_state()
        try:
            return [self._sample(generator, *key) for key in keys]
        finally:
            generator.set_state(state)

    def _sample(self, generator: torch.Generator, epoch: int, place: int, index: int) -> dict[str, Any]:
        generator.manual_seed(derive(self.seed, epoch, place, index))
        return self.dataset[index]


class PaddedDataset(Dataset):
    """An evaluation split padded to whole batches; `mask` is False for the padding."""

    def __init__(self, dataset: Dataset, length: int) -> None:
        self.dataset, self.length = dataset, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        real = index < len(self.dataset)
        return {**self.dataset[index if real else 0], "mask": torch.tensor(real)}


def ignore_interrupt(_: int) -> None:
    """Workers leave signals to the main process, which still needs them to end its step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def steps_per_epoch(size: int, batch: int) -> int:
    """Whole batches in an epoch; the rest is dropped so that every step has one shape."""
    if size < batch:
        raise ConfigError(f"trainer.batch_size: {batch} is more than the {size} training samples, nearest: {size}")
    return size // batch


def train_loader(dataset: Dataset, sampler: StepSampler, *, workers: int, pin: bool) -> DataLoader:
    """All micro-batches of this process for the sampler's steps, across epochs."""
    return _loader(SeededDataset(dataset, sampler.seed), workers=workers, pin=pin, batch_sampler=sampler)


def eval_loader(dataset: Dataset, *, batch: int, rank: int, world: int, workers: int, pin: bool) -> DataLoader:
    """This process's share of a split in batches of one shape."""
    rounds = -(-len(dataset) // (batch * world))
    share = range(rank * batch * rounds, (rank + 1) * batch * rounds)
    padded = PaddedDataset(dataset, batch * rounds * world)
    return _loader(padded, workers=workers, pin=pin, batch_size=batch, sampler=share)


def _loader(dataset: Dataset, *, workers: int, pin: bool, **kwargs: Any) -> DataLoader:
    return DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=pin,
        worker_init_fn=ignore_interrupt,
        generator=torch.Generator(),  # its own: starting an iterator draws from it, not from the global state
        **kwargs,
    )
