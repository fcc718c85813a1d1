"""What the trainer reads: the samples of a step, as a pure function of (seed, epoch, position), in whole batches.

The global batch of a step does not depend on the number of processes, loader workers or micro-batches, and a sample's
augmentation depends on (seed, epoch, position, sample) alone (of a data set that makes its own batches, on that of its
micro-batch): a run can stop and go on anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lion.config import ConfigError
from lion.tasks.data import Batch, DeviceDataset, Unreadable
from lion.tasks.order import Order
from lion.tasks.seeds import derive
from lion.trainer.faults import FaultsConfig, RunError

log = logging.getLogger("lion")

SEARCH = 100  # neighbours tried in place of a sample that cannot be read


ENDLESS = 2**62  # samples of a run whose length is not known


class StepSampler(Sequence):
    """Micro-batches of one process from the `start`-th sample of a run to the `end`-th, as lists of (epoch, place,
    sample); whatever steps they make up, an epoch has whole global batches of `batch`."""

    def __init__(
        self,
        size: int,
        *,
        order: Order,
        batch: int,
        micro: int,
        seed: int,
        start: int,
        end: int | None,
        rank: int,
        world: int,
    ) -> None:
        self.size, self.order, self.micro, self.seed = size, order, micro, seed
        self.start, self.end, self.rank, self.world = start, ENDLESS if end is None else end, rank, world
        self.per_epoch = size // batch * batch

    def samples(self, count: int) -> list[int]:
        """The first `count` samples of all processes, or as many as the epoch has left."""
        return [sample for _, _, sample in self.take(self.start, count)]

    def take(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """From the `first`-th sample of the run on, within its epoch."""
        epoch, place = divmod(first, self.per_epoch)
        places = range(place, min(place + count, self.per_epoch))
        samples = self.order.samples(places, size=self.size, seed=self.seed, epoch=epoch)
        return [(epoch, place, sample) for place, sample in zip(places, samples)]

    def __len__(self) -> int:
        return (self.end - self.start) // (self.micro * self.world)

    def __getitem__(self, i: int) -> list[tuple[int, int, int]]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.take(self.start + (i * self.world + self.rank) * self.micro, self.micro)


class Samples(list):
    """The samples of a batch, the batch's other columns (`beside`), and (index, reason) of what could not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: dict[str, list[Any]] = {}
        self.unreadable: list[tuple[int, str]] = []

    def read(self, dataset: Dataset, index: int) -> bool:
        """Take `dataset[index]`, or the next that can be read (or None); says whether it was the first."""
        for candidate in range(index, index + SEARCH):
            candidate %= len(dataset)
            try:
                self.append(dataset[candidate])
                return candidate == index
            except Unreadable as error:
                self.unreadable.append((candidate, str(error)))
        self.append(None)
        return False


def collate(samples: Samples, make: Callable[[list[Any]], Batch]) -> tuple[Batch | None, list[tuple[int, str]]]:
    """A batch as `make` makes it, or None where too little could be read, and what could not be."""
    if any(s is None for s in samples):
        return None, samples.unreadable
    beside = {name: torch.tensor(values) for name, values in samples.beside.items()}
    return {**make(list(samples)), **beside}, samples.unreadable


@contextlib.contextmanager
def preserved_generator() -> Iterator[torch.Generator]:
    """torch's default generator, to be seeded inside; afterwards it has the state that it had before."""
    generator = torch.default_generator
    state = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(state)


class SeededDataset(Dataset):
    """A data set whose random augmentation depends on (seed, epoch, place in the epoch) alone."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: list[tuple[int, int, int]]) -> Samples:
        samples = Samples()
        with preserved_generator() as generator:
            for epoch, place, index in keys:
                generator.manual_seed(derive(self.seed, epoch, place, index))
                samples.read(self.dataset, index)
        return samples

    def batch(self, keys: list[tuple[int, int, int]], device: torch.device) -> Batch:
        """Of a data set that makes its own batches; its chance depends on (seed, epoch, first place)."""
        generator = torch.Generator(device).manual_seed(derive(self.seed, *keys[0][:2]))
        return self.dataset.batch([index for *_, index in keys], device, generator)


class PaddedDataset(Dataset):
    """An evaluation split padded to whole batches, with what its task cannot know beside them.

    `mask` (B,) is False for padding and for what cannot be read. `key` (B,), int64, depends on (seed, split, sample)
    alone: noise made of it (`lion.tasks.seeds.uniform`) is the same for every model, form, batch size and number of
    processes. So is what a data set draws from torch's generator as it reads a sample.
    """

    def __init__(self, dataset: Dataset, seed: int, split: str) -> None:
        self.dataset, self.seed, self.split = dataset, seed, split

    def __getitems__(self, indices: list[int]) -> Samples:
        samples, (places, real, keys) = Samples(), self.places(indices)
        with preserved_generator() as generator:
            for i, (place, key) in enumerate(zip(places, keys)):
                generator.manual_seed(key)
                real[i] &= samples.read(self.dataset, place)
        samples.beside = {"mask": real, "key": keys}
        return samples

    def batch(self, indices: list[int], device: torch.device) -> Batch:
        """Of a data set that makes its own batches."""
        places, real, keys = self.places(indices)
        beside = {"mask": torch.tensor(real, device=device), "key": torch.tensor(keys, device=device)}
        return {**self.dataset.batch(places, device), **beside}

    def places(self, indices: list[int]) -> tuple[list[int], list[bool], list[int]]:
        """The samples to read, which of them are no padding, and their keys."""
        real = [index < len(self.dataset) for index in indices]
        places = [index if ok else 0 for index, ok in zip(indices, real)]
        return places, real, [derive(self.seed, self.split, place) for place in places]


def leave_signals(_: int) -> None:
    """Workers leave signals to the main process, which still needs them to end its step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def steps_per_epoch(size: int, batch: int) -> int:
    """Whole batches in an epoch; the rest is dropped so that every step has one shape."""
    if size < batch:
        raise ConfigError(f"trainer.batch_size: {batch} is more than the {size} training samples, nearest: {size}")
    return size // batch


class Batches:
    """Batches of a loader, whose faults are named, counted and limited; `unreadable` samples are counted once.

    A worker that dies is replaced, with all others, at the batch that was due. A `DeviceDataset` is
    no loader's work: it is asked for whole batches.
    """

    def __init__(
        self,
        dataset: SeededDataset | PaddedDataset,
        sampler: Sequence[Any],
        *,
        collate: Callable[[list[Any]], Batch],
        workers: int,
        pin: bool,
        faults: FaultsConfig,
        device: torch.device | str,
    ) -> None:
        self.collate, self.device = collate, torch.device(device)
        self.dataset, self.sampler, self.workers, self.pin, self.faults = dataset, sampler, workers, pin, faults
        self.unreadable: set[int] = set()
        self.died = 0

    def loader(self, start: int) -> DataLoader:
        return DataLoader(
            self.dataset,
            batch_sampler=(self.sampler[i] for i in range(start, len(self.sampler))),
            num_workers=self.workers,
            pin_memory=self.pin,
            collate_fn=functools.partial(collate, make=self.collate),
            worker_init_fn=leave_signals,
            generator=torch.Generator(),  # its own: starting an iterator draws from it, not from the global state
        )

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.dataset.dataset, DeviceDataset):
            yield from (self.dataset.batch(list(keys), self.device) for keys in self.sampler)
            return
        done = 0
        while True:
            batches = iter(self.loader(done))
            if self.workers and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, ignore)  # torch's raises wherever the main thread is; we ask here
            try:
                for batch, unreadable in batches:
                    done += 1
                    self.report(unreadable)
                    if batch is None:
                        raise RunError(f"unreadable: {SEARCH} samples in a row, e.g. {unreadable[0][1]}")
                    yield batch
                return
            except (RuntimeError, OSError, EOFError) as error:  # what a reader meets whose writer is gone
                time.sleep(0.5)  # its pipes close before its exit code is known
                codes = [w.exitcode for w in getattr(batches, "_workers", ()) if w.exitcode]
                if not codes:
                    raise
                self.died += 1
                what = f"a loader worker died ({type(error).__name__}, exit code {codes[0]})"
                if self.died > self.faults.workers:
                    raise RunError(
                        f"{what}, the {self.died}. of at most {self.faults.workers} (trainer.faults.workers); "
                        f"is memory short? data.workers=N takes fewer"
                    ) from None
                log.warning("%s, %d of at most %d; its batch is read again", what, self.died, self.faults.workers)

    def report(self, unreadable: list[tuple[int, str]]) -> None:
        limit = self.faults.unreadable
        for index, reason in unreadable:
            if index in self.unreadable:
                continue
            self.unreadable.add(index)
            count = f"{len(self.unreadable)} of at most {limit}"
            if len(self.unreadable) > limit:
                raise RunError(f"unreadable: {reason}; {count} such samples (trainer.faults.unreadable)")
            log.warning("unreadable, passed over: %s (%s)", reason, count)


def ignore(number: int, frame: Any) -> None:
    """A signal handler."""


def train_batches(
    dataset: Dataset,
    sampler: StepSampler,
    *,
    collate: Callable[[list[Any]], Batch] = default_collate,
    workers: int,
    pin: bool,
    faults: FaultsConfig | None = None,
    device: torch.device | str = "cpu",
) -> Batches:
    """All micro-batches of this process that the sampler names, across epochs."""
    how = {"collate": collate, "workers": workers, "pin": pin, "faults": faults or FaultsConfig(), "device": device}
    return Batches(SeededDataset(dataset, sampler.seed), sampler, **how)


def eval_batches(
    dataset: Dataset,
    *,
    seed: int,
    split: str,
    batch: int,
    rank: int,
    world: int,
    collate: Callable[[list[Any]], Batch] = default_collate,
    workers: int,
    pin: bool,
    faults: FaultsConfig | None = None,
    device: torch.device | str = "cpu",
) -> Batches:
    """This process's share of a split in batches of one shape; `seed` and the split's name decide its noise."""
    rounds = -(-len(dataset) // (batch * world))
    first = rank * batch * rounds
    share = [range(start, start + batch) for start in range(first, first + batch * rounds, batch)]
    how = {"collate": collate, "workers": workers, "pin": pin, "faults": faults or FaultsConfig(), "device": device}
    return Batches(PaddedDataset(dataset, seed, split), share, **how)
