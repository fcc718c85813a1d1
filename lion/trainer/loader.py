"""Data loading: the samples of a step are a pure function of (seed, epoch, position), in whole batches.

The global batch of a step does not depend on the number of processes, loader workers or micro-batches. The augmentation
of a sample depends on (seed, epoch, position, sample) alone. For a data set that makes whole batches itself
(`DeviceDataset`), augmentation depends on (seed, epoch, position) of the first sample of the micro-batch. A run can
therefore stop at any step and resume exactly.
"""

from __future__ import annotations

import functools
import logging
import resource
import signal
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lion.config import ConfigError
from lion.samples.base import Batch, Collate, DeviceDataset, Split, Unreadable, moved
from lion.samples.order import Order
from lion.samples.seeds import derive
from lion.trainer.faults import FaultsConfig, RunError, full_disk

log = logging.getLogger("lion")

FEWEST_FILES = 256  # open files of a process with workers
NO_SHARED_MEMORY = (
    "the shared memory (/dev/shm) has no room for the batches of the loader workers: use fewer with data.workers=N "
    "(0: none), or in Docker more memory with --shm-size=8g"
)
SEARCH = 100  # following samples that are tried instead of an unreadable sample
ENDLESS = 2**62  # number of samples of a run of unknown length
CPU = torch.device("cpu")
Entries = list[tuple[int, int, int]]  # (epoch, place in the epoch, sample)


@dataclass(frozen=True)
class StepSampler:
    """A sequence of the micro-batches of one process, as lists of (epoch, place, sample).

    The micro-batches cover samples `start` to `end` of the run (None: no end). An epoch always consists of whole
    global batches of `batch` samples, even if the batch size of the steps grows.
    """

    size: int
    order: Order
    batch: int
    micro: int
    seed: int
    start: int
    end: int | None
    rank: int
    world: int

    def samples(self, count: int) -> list[int]:
        """Return the first `count` samples over all processes, or fewer if the epoch ends before."""
        return [sample for _, _, sample in self.take(self.start, count)]

    def take(self, first: int, count: int) -> Entries:
        """Return up to `count` entries (epoch, place, sample) from sample `first` of the run on, within one epoch."""
        per_epoch = self.size // self.batch * self.batch
        epoch, place = divmod(first, per_epoch)
        places = range(place, min(place + count, per_epoch))
        samples = self.order.samples(places, size=self.size, seed=self.seed, epoch=epoch)
        return [(epoch, place, sample) for place, sample in zip(places, samples)]

    def __len__(self) -> int:
        end = ENDLESS if self.end is None else self.end
        return (end - self.start) // (self.micro * self.world)

    def __getitem__(self, i: int) -> Entries:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.take(self.start + (i * self.world + self.rank) * self.micro, self.micro)

    def __iter__(self) -> Iterator[Entries]:
        return (self[i] for i in range(len(self)))


class Samples(list):
    """Samples of a data set, each read after torch's default generator is seeded by one of `seeds`.

    Attributes:
        beside: Additional columns of the batch, by name.
        unreadable: (index, reason) of every sample that could not be read.
        asked: Whether each sample is the one that was asked for.
    """

    def __init__(self, dataset: Split, indices: list[int], seeds: list[int]) -> None:
        super().__init__()
        self.beside: dict[str, list[Any]] = {}
        self.unreadable: list[tuple[int, str]] = []
        self.asked: list[bool] = []
        with torch.random.fork_rng(devices=[]):
            for index, seed in zip(indices, seeds):
                torch.default_generator.manual_seed(seed)
                self.append(self.read(dataset, index))

    def read(self, dataset: Split, index: int) -> Any:
        """Return `dataset[index]`, else the next readable sample, or None."""
        for candidate in range(index, index + SEARCH):
            candidate %= len(dataset)
            try:
                sample = dataset[candidate]
            except Unreadable as error:
                self.unreadable.append((candidate, str(error)))
                continue
            self.asked.append(candidate == index)
            return sample
        self.asked.append(False)
        return None


def collate(samples: Samples, make: Collate) -> tuple[Batch | None, list[tuple[int, str]]]:
    """Make a batch with `make`; return the batch, or None if a sample is missing, and the unreadable samples."""
    if any(s is None for s in samples):
        return None, samples.unreadable
    beside = {name: torch.tensor(values) for name, values in samples.beside.items()}
    return {**make(list(samples)), **beside}, samples.unreadable


@dataclass(frozen=True)
class SeededDataset(Dataset):
    """A data set whose random augmentation depends on (seed, epoch, place in the epoch, sample) alone."""

    dataset: Split
    seed: int

    def __getitems__(self, keys: Entries) -> Samples:
        seeds = [derive(self.seed, *key) for key in keys]
        return Samples(self.dataset, [index for _, _, index in keys], seeds)

    def batch(self, keys: Entries, device: torch.device) -> Batch:
        """Make a whole batch with a `DeviceDataset`, whose augmentation depends on (seed, epoch, first place)."""
        epoch, place, _ = keys[0]
        generator = torch.Generator(device).manual_seed(derive(self.seed, epoch, place))
        return cast(DeviceDataset, self.dataset).batch([index for _, _, index in keys], device, generator)


@dataclass(frozen=True)
class PaddedDataset(Dataset):
    """The `chosen` samples of an evaluation split, padded to whole batches, with the columns `mask` and `key`.

    `mask` (B,) is False for padding and for samples that cannot be read. `key` (B,), int64, depends on (seed, split,
    sample) alone. Noise generated from `key` (`lion.samples.seeds.uniform`) is the same for every model, form, batch
    size and number of processes. The same holds for random numbers that a data set draws from torch's default
    generator while it reads a sample.
    """

    dataset: Split
    seed: int
    split: str
    chosen: Sequence[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitems__(self, indices: list[int]) -> Samples:
        places, real, keys = self.places(indices)
        samples = Samples(self.dataset, places, keys)
        mask = [here and asked for here, asked in zip(real, samples.asked)]
        samples.beside = {"mask": mask, "key": keys}
        return samples

    def batch(self, indices: list[int], device: torch.device) -> Batch:
        """Make a whole batch with a `DeviceDataset`."""
        places, real, keys = self.places(indices)
        beside = {"mask": moved(torch.tensor(real), device), "key": moved(torch.tensor(keys), device)}
        return {**cast(DeviceDataset, self.dataset).batch(places, device), **beside}

    def places(self, indices: list[int]) -> tuple[list[int], list[bool], list[int]]:
        """Return the samples to read, whether each of them is real (not padding), and their keys."""
        real = [index < len(self) for index in indices]
        places = []
        for index, ok in zip(indices, real):
            places.append(self.chosen[index if ok else 0])
        keys = [derive(self.seed, self.split, place) for place in places]
        return places, real, keys


def leave_signals(_: int) -> None:
    """Set up a worker to ignore SIGINT and SIGTERM, because the main process still needs the worker to end its step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def steps_per_epoch(size: int, batch: int) -> int:
    """Return the number of whole batches in an epoch; the remainder is dropped so that all batches have one shape."""
    if not size:
        raise ConfigError("data: no training samples; the data set is empty, or shorter than one sample")
    if size < batch:
        raise ConfigError(
            f"trainer.batch_size: {batch} is more than the {size} training samples, nearest: {size} "
            "(with trainer.micro_batch=null, or a divisor of it)"
        )
    return size // batch


@dataclass(frozen=True)
class Loading:
    """Settings of a data loader.

    Attributes:
        collate: Function that makes a batch from a list of samples.
        workers: Number of loader processes.
        faults: Limits on the faults that the loading survives.
        device: Device on which the batches are used; for a GPU, batches are in pinned memory.
    """

    collate: Collate = default_collate
    workers: int = 0
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    device: torch.device = CPU


class Batches:
    """The batches of a data loader, whose faults are reported, counted and limited.

    Every unreadable sample is counted once. If a worker dies, all workers are restarted at the batch that was due.
    A `DeviceDataset` makes whole batches itself, without a data loader.
    """

    def __init__(
        self,
        dataset: SeededDataset | PaddedDataset,
        sampler: StepSampler | list[list[int]],
        loading: Loading,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.loading = loading
        self.workers = affordable(loading.workers)
        self.unreadable: set[int] = set()
        self.died = 0

    def loader(self, start: int) -> DataLoader:
        return DataLoader(
            self.dataset,
            batch_sampler=(self.sampler[i] for i in range(start, len(self.sampler))),
            num_workers=self.workers,
            pin_memory=self.loading.device.type == "cuda",
            collate_fn=functools.partial(collate, make=self.loading.collate),
            worker_init_fn=leave_signals,
            generator=torch.Generator(),  # separate: starting an iterator must not draw from the global generator
        )

    def __iter__(self) -> Generator[Batch, None, None]:
        if isinstance(self.dataset.dataset, DeviceDataset):
            for keys in self.sampler:
                yield self.dataset.batch(cast(list, keys), self.loading.device)
            return
        most = self.loading.faults.workers
        done = 0
        while True:
            workers: Sequence[Any] = ()
            try:
                batches = iter(self.loader(done))
                workers = getattr(batches, "_workers", ())
                if workers and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGCHLD, ignore)  # torch's handler would raise anywhere in the main thread
                for batch, unreadable in batches:
                    done += 1
                    self.report(unreadable)
                    if batch is None:
                        raise RunError(f"unreadable: {SEARCH} samples in a row, e.g. {unreadable[0][1]}")
                    yield batch
                return
            except (RuntimeError, OSError, EOFError) as error:  # raised by reading from a dead worker
                if self.workers and full_shared_memory(error):
                    raise RunError(NO_SHARED_MEMORY) from None
                time.sleep(0.5)  # the pipes close before the exit code is known
                codes = [w.exitcode for w in workers if w.exitcode]
                if not codes:
                    raise
                if -signal.SIGBUS in codes:
                    raise RunError(NO_SHARED_MEMORY) from None
                self.died += 1
                what = f"a loader worker died ({type(error).__name__}, exit code {codes[0]})"
                if self.died > most:
                    raise RunError(
                        f"{what}, death {self.died} of at most {most} (trainer.faults.workers); "
                        f"if memory is short, use fewer workers with data.workers=N"
                    ) from None
                log.warning("%s, %d of at most %d; its batch is loaded again", what, self.died, most)
            finally:
                for worker in workers:
                    worker.kill()  # they ignore SIGTERM, and a process does not end before its workers
                for worker in workers:
                    worker.join(5)

    def report(self, unreadable: list[tuple[int, str]]) -> None:
        limit = self.loading.faults.unreadable
        for index, reason in unreadable:
            if index in self.unreadable:
                continue
            self.unreadable.add(index)
            count = f"{len(self.unreadable)} of at most {limit}"
            if len(self.unreadable) > limit:
                raise RunError(f"unreadable: {reason}; {count} such samples (trainer.faults.unreadable)")
            log.warning("unreadable, skipped: %s (%s)", reason, count)


def affordable(workers: int) -> int:
    """Return the number of workers, 0 where the process may not open the files through which they send batches."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if workers and limit != resource.RLIM_INFINITY and limit < FEWEST_FILES:
        log.warning("at most %d open files are allowed (ulimit -n): samples are loaded without workers", limit)
        return 0
    return workers


def full_shared_memory(error: BaseException) -> bool:
    """Return whether an error reports that the shared memory, which holds the batches of workers, is full."""
    full = full_disk(error)
    return full is not None and (full.filename is None or "/dev/shm" in str(full.filename))


def ignore(number: int, frame: Any) -> None:
    """Do nothing, as a signal handler."""


def eval_batches(
    dataset: Split,
    loading: Loading,
    *,
    seed: int,
    split: str,
    batch: int,
    chosen: Sequence[int] | None = None,
    rank: int = 0,
    world: int = 1,
) -> Batches:
    """Return this process's share of a split, in batches of one shape; `seed` and `split` determine the noise.

    `chosen` are the indices of the samples to use, by default all.
    """
    if chosen is None:
        chosen = range(len(dataset))
    padded = PaddedDataset(dataset, seed, split, chosen)
    rounds = -(-len(padded) // (batch * world))
    first = rank * batch * rounds
    share = [list(range(start, start + batch)) for start in range(first, first + batch * rounds, batch)]
    return Batches(padded, share, loading)
