import pytest
import torch
from torch.utils.data import Dataset, default_collate

from lion.samples.base import DeviceDataset
from lion.samples.order import Drawn, Shuffled
from lion.samples.seeds import uniform
from lion.trainer.loader import Batches, Loading, SeededDataset, StepSampler, eval_batches, steps_per_epoch
from tests.helpers import refused

ORDER = Shuffled()


class Noisy(Dataset):
    """Samples that hold their index and a random draw."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"index": torch.tensor(index), "draw": torch.rand(())}


def batches(*, size=23, batch=8, micro=8, start=0, total=7, rank=0, world=1, workers=0, order=ORDER):
    where = {"start": start * batch, "end": total * batch, "rank": rank, "world": world}
    sampler = StepSampler(size, order=order, batch=batch, micro=micro, seed=3, **where)
    loader = Batches(SeededDataset(Noisy(size), 3), sampler, Loading(workers=workers))
    return [(b["index"].tolist(), b["draw"].tolist()) for b in loader]


def joined(parts):
    return [i for p in parts for i in p[0]], [d for p in parts for d in p[1]]


def test_an_epoch_sees_every_sample_once_and_epochs_and_their_draws_differ():
    seen = batches(size=24, total=6)
    first, draws = joined(seen[:3])
    second, others = joined(seen[3:])
    assert sorted(first) == sorted(second) == list(range(24)) and first != second
    assert len({*draws, *others}) == 48
    indices, draws = joined(batches(size=24, total=3, order=Shuffled(3)))  # three views of a sample in an epoch
    assert len(set(indices)) == 8 and len(set(draws)) == 24


def test_the_ragged_end_is_dropped():
    assert steps_per_epoch(23, 8) == 2
    refused("64 is more than the 23 training samples, nearest: 23", steps_per_epoch, 23, 64)


@pytest.mark.parametrize("order", [Shuffled(), Shuffled(3), Drawn()], ids=str)
def test_micro_batches_processes_and_stops_share_one_order(order):
    straight = batches(order=order)
    for start in (1, 2, 5):
        assert batches(start=start, order=order) == straight[start:]
    assert joined(batches(micro=2, order=order)) == joined(straight)
    ranks = [batches(micro=2, rank=r, world=2, order=order) for r in range(2)]
    for step, (indices, draws) in enumerate(straight):
        shares = [joined(r[2 * step : 2 * step + 2]) for r in ranks]
        assert sorted(shares[0][0] + shares[1][0]) == sorted(indices)
        assert sorted(shares[0][1] + shares[1][1]) == sorted(draws)


def test_loader_workers_change_nothing_and_the_global_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    alone = batches()
    assert torch.equal(torch.rand(3), expected)
    assert batches(workers=2) == alone


def evaluation(dataset, *, batch=4, seed=0, split="val", collate=default_collate, workers=0, **where):
    return eval_batches(dataset, Loading(collate, workers), seed=seed, split=split, batch=batch, **where)


@pytest.mark.parametrize(("size", "world"), [(10, 1), (10, 2), (8, 2), (3, 2)])
def test_evaluation_pads_to_one_shape(size, world):
    seen = []
    for rank in range(world):
        for batch in evaluation(Noisy(size), rank=rank, world=world):
            assert len(batch["index"]) == 4
            seen += batch["index"][batch["mask"]].tolist()
    assert sorted(seen) == list(range(size))


def noise(dataset, **how):
    """Return, by sample, what the data set drew and what a task draws from the key."""
    found = {}
    for rank in range(how.get("world", 1)):
        for batch in evaluation(dataset, rank=rank, **how):
            keys, draws = uniform(batch["key"], 3).tolist(), batch.get("draw", batch["index"]).tolist()
            for i in batch["mask"].nonzero()[:, 0].tolist():
                found[batch["index"][i].item()] = draws[i], keys[i]
    return found


def test_the_noise_of_evaluation_depends_on_seed_split_and_sample_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = noise(Noisy(10))
    assert torch.equal(torch.rand(3), expected)  # the global random state is unchanged
    assert sorted(found) == list(range(10)) and len({draw for draw, _ in found.values()}) == 10
    for how in ({"batch": 3}, {"batch": 1}, {"world": 2}, {"workers": 2}):
        assert noise(Noisy(10), **how) == found
    for how in ({"seed": 1}, {"split": "test"}):
        other = noise(Noisy(10), **how)
        assert not {draw for draw, _ in other.values()} & {draw for draw, _ in found.values()}
        assert all(other[i][1] != found[i][1] for i in found)
    assert {i: key for i, (_, key) in noise(Whole()).items()} == {i: key for i, (_, key) in found.items()}
    assert noise(Noisy(10), chosen=[7, 2, 5, 9, 0], batch=3) == {i: found[i] for i in (7, 2, 5, 9, 0)}
    assert {i: key for i, (_, key) in noise(Whole(), chosen=[7, 2]).items()} == {i: found[i][1] for i in (7, 2)}


class Ragged(Dataset):
    """Samples of different lengths: sample i holds i numbers."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return list(range(index))


def side_by_side(samples):
    return {
        "lengths": torch.tensor([len(s) for s in samples]),
        "numbers": torch.tensor([i for s in samples for i in s]),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_may_make_its_batches_of_samples_itself(workers):
    sampler = StepSampler(9, order=ORDER, batch=3, micro=3, seed=1, start=0, end=9, rank=0, world=1)
    seen = list(Batches(SeededDataset(Ragged(), 1), sampler, Loading(side_by_side, workers)))
    assert sorted(n for b in seen for n in b["lengths"].tolist()) == list(range(9))
    assert all(len(b["numbers"]) == b["lengths"].sum() for b in seen)
    seen = list(evaluation(Ragged(), collate=side_by_side, workers=workers))
    assert [len(b["mask"]) for b in seen] == [4, 4, 4] and sum(b["mask"].sum() for b in seen) == 9


class Whole(DeviceDataset):
    """A data set that makes its batches itself, like images stored on a device."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise AssertionError("no sample is asked for")

    def batch(self, indices, device, generator=None):
        noise = None if generator is None else torch.rand(len(indices), generator=generator, device=device)
        index = torch.tensor(indices, device=device)
        return {"index": index} | ({} if noise is None else {"noise": noise})


def test_a_data_set_that_makes_its_own_batches():
    def sampler(start, seed=3):
        return StepSampler(10, order=ORDER, batch=4, micro=2, seed=seed, start=4 * start, end=20, rank=0, world=1)

    def batches(start, seed=3):
        return list(Batches(SeededDataset(Whole(), seed), sampler(start, seed), Loading(workers=2)))

    found = batches(0)
    for step in range(5):
        both = torch.cat([b["index"] for b in found[2 * step : 2 * step + 2]])
        assert both.tolist() == sampler(step).samples(4)
    assert len({tuple(b["noise"].tolist()) for b in found}) == 10  # every micro-batch has different draws
    for a, b in zip(found[6:], batches(3), strict=True):  # a resumed run draws the same numbers
        assert torch.equal(a["noise"], b["noise"]) and torch.equal(a["index"], b["index"])
    assert not torch.equal(batches(0, 4)[0]["noise"], found[0]["noise"])
    kept = []
    for batch in [*evaluation(Whole(), rank=0, world=2), *evaluation(Whole(), rank=1, world=2)]:
        kept += batch["index"][batch["mask"]].tolist()
        assert "noise" not in batch
    assert sorted(kept) == list(range(10))
