"""Tests of the order of samples: for stored permutations, and for data sets too large for one."""

import itertools
import tracemalloc

import pytest
import torch

from lion.samples import order as orders
from lion.samples.order import MAX_STORED, Drawn, Shuffled, permutation, permute
from lion.samples.seeds import derive
from tests.helpers import Largest

HUGE = 365_000_000  # number of documents in C4


def whole(order, size, seed=1, epoch=2):
    return order.samples(range(size), size=size, seed=seed, epoch=epoch)


@pytest.mark.parametrize(("size", "repeats"), [(1, 1), (10, 1), (10, 3), (1000, 4), (MAX_STORED, 1)])
def test_sets_that_fit_a_list_keep_their_order(size, repeats):
    """Check that the order never changes, because stored runs resume in it."""
    expected = torch.randperm(size, generator=torch.Generator().manual_seed(derive(5, 7)))
    expected = expected.repeat_interleave(repeats)[:size]
    positions = range(size) if size < MAX_STORED else range(3, size, 999)
    got = Shuffled(repeats).samples(positions, size=size, seed=5, epoch=7)
    assert got == expected[list(positions)].tolist()


def test_seeds_as_stored_runs_have_them():
    assert (derive(5, 7), derive(0)) == (3382668665974615944, 4246866556266386882)
    assert derive(0, "val", 3) != derive(0, "test", 3)


def test_a_list_is_drawn_once_an_epoch(monkeypatch):
    drawn, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **kwargs: drawn.append(args) or randperm(*args, **kwargs))
    permutation.cache_clear()
    for epoch in (0, 1, 0, 1):  # reading ahead and saving alternate between two epochs
        for begin in range(0, 40, 8):
            Shuffled().samples(range(begin, begin + 8), size=50, seed=1, epoch=epoch)
    assert len(drawn) == 2


def test_order_depends_on_seed_and_epoch_alone(monkeypatch):
    for listed in (MAX_STORED, 0):
        monkeypatch.setattr(orders, "MAX_STORED", listed)
        for order in (Shuffled(), Drawn()):
            found = [whole(order, 50, *at) for at in ((1, 2), (2, 1), (1, 1), (1, 2))]
            assert found[0] == found[3] and len(set(map(tuple, found))) == 3


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000, 4097, 65_536, 100_003])
def test_a_permutation_without_a_list_is_one(size):
    found = permute(torch.arange(size), size, key=3)
    assert torch.equal(found.sort().values, torch.arange(size))


def test_above_the_bound_every_sample_comes_once_and_repeats_stand_in_a_row(monkeypatch):
    monkeypatch.setattr(orders, "MAX_STORED", 99)
    assert sorted(whole(Shuffled(), 100)) == list(range(100))
    order = whole(Shuffled(3), 100)
    assert order[:3] == [order[0]] * 3 and len(order) == 100 and len(set(order)) == 34


def chi_square(counts, expected):
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.slow
def test_permutations_are_evenly_spread():
    """Check that permutations are uniform.

    Over keys, all orders of four samples are equally likely. In a permutation of a huge set, places, neighbours and
    steps are spread evenly.
    """
    found = [tuple(permute(torch.arange(4), 4, derive(key)).tolist()) for key in range(2400)]
    counts = [found.count(p) for p in itertools.permutations(range(4))]
    assert chi_square(counts, 100) < 50  # 23 degrees of freedom: chance exceeds 50 once in 1,000 times
    for begin in (0, HUGE // 2):
        share = permute(torch.arange(begin, begin + 100_000), HUGE, key=1).double() / HUGE
        assert chi_square(torch.histc(share, 100, 0, 1).tolist(), 1000) < 150  # 99 degrees of freedom
        for lag in (1, 2, 19_105):  # 19,105: length of a row of the grid
            pairs = torch.corrcoef(torch.stack([share[:-lag], share[lag:]]))
            assert abs(pairs[0, 1]) < 0.02
        assert share.diff().unique().numel() > 99_000


def test_drawn_samples_repeat_as_chance_has_it():
    found = torch.tensor(whole(Drawn(), 100_000))
    assert 0 <= found.min() and found.max() < 100_000
    assert abs(found.unique().numel() / 100_000 - (1 - torch.e**-1)) < 0.01
    assert chi_square(torch.histc(found.double(), 100, 0, 100_000).tolist(), 1000) < 150


@pytest.mark.parametrize("order", [Shuffled(), Shuffled(3), Drawn()], ids=str)
@pytest.mark.parametrize("size", [MAX_STORED + 1, HUGE, 2**61])
def test_a_batch_costs_what_a_batch_costs(order, size):
    with Largest():  # the first mode of a process imports modules
        order.samples(range(8), size=size, seed=1, epoch=0)
    tracemalloc.start()
    with Largest() as seen:
        found = order.samples(range(size - 256, size), size=size, seed=1, epoch=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 256 and all(0 <= sample < size for sample in found)
    assert seen.elements <= 256 and seen.operations < 400 and peak < 2**20
