import pytest
import torch
from torch.utils.data import Dataset

from lion.config import ConfigError
from lion.tasks.order import Drawn, Shuffled
from lion.trainer.loader import StepSampler, eval_batches, steps_per_epoch, train_batches

ORDER = Shuffled()


class Noisy(Dataset):
    """Samples that tell their index and a random draw."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"index": torch.tensor(index), "draw": torch.rand(())}


def batches(*, size=23, batch=8, micro=8, start=0, total=7, rank=0, world=1, workers=0, order=ORDER):
    where = {"start": start, "total": total, "rank": rank, "world": world}
    sampler = StepSampler(size, order=order, batch=batch, micro=micro, seed=3, **where)
    loader = train_batches(Noisy(size), sampler, workers=workers, pin=False)
    return [(b["index"].tolist(), b["draw"].tolist()) for b in loader]


def joined(parts):
    return [i for p in parts for i in p[0]], [d for p in parts for d in p[1]]


def test_an_epoch_sees_every_sample_once_and_epochs_differ():
    seen = batches(size=24, total=6)
    first, second = joined(seen[:3])[0], joined(seen[3:])[0]
    assert sorted(first) == sorted(second) == list(range(24)) and first != second


def test_the_ragged_end_is_dropped():
    assert steps_per_epoch(23, 8) == 2
    with pytest.raises(ConfigError, match="64 is more than the 23 training samples, nearest: 23"):
        steps_per_epoch(23, 64)


@pytest.mark.parametrize("order", [Shuffled(), Shuffled(3), Drawn()], ids=str)
@pytest.mark.parametrize("start", [1, 2, 5])
def test_a_run_goes_on_anywhere(start, order):
    assert batches(start=start, order=order) == batches(order=order)[start:]


@pytest.mark.parametrize("order", [Shuffled(), Shuffled(3), Drawn()], ids=str)
def test_micro_batches_and_processes_share_one_order(order):
    straight = batches(batch=8, micro=8, order=order)
    assert joined(batches(batch=8, micro=2, order=order)) == joined(straight)
    ranks = [batches(batch=8, micro=2, rank=r, world=2, order=order) for r in range(2)]
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


def test_augmentation_differs_between_epochs():
    draws = {}
    for indices, values in batches(size=8, total=2):
        for i, v in zip(indices, values):
            draws.setdefault(i, set()).add(v)
    assert all(len(v) == 2 for v in draws.values())


@pytest.mark.parametrize(("size", "world"), [(10, 1), (10, 2), (8, 2), (3, 2)])
def test_evaluation_pads_to_one_shape(size, world):
    seen = []
    for rank in range(world):
        for batch in eval_batches(Noisy(size), batch=4, rank=rank, world=world, workers=0, pin=False):
            assert len(batch["index"]) == 4
            seen += batch["index"][batch["mask"]].tolist()
    assert sorted(seen) == list(range(size))


class Whole(torch.utils.data.Dataset):
    """Makes batches of its own, as pictures on a device do."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise AssertionError("no sample is asked for")

    def batch(self, indices, device, generator=None):
        noise = None if generator is None else torch.rand(len(indices), generator=generator, device=device)
        index = torch.tensor(indices, device=device)
        return {"index": index} | ({} if noise is None else {"noise": noise})


def test_a_data_set_that_makes_its_own_batches():
    def batches(start, seed=3):
        sampler = StepSampler(10, order=ORDER, batch=4, micro=2, seed=seed, start=start, total=5, rank=0, world=1)
        return list(train_batches(Whole(), sampler, workers=2, pin=False)), sampler

    found, sampler = batches(0)
    steps = [torch.cat([b["index"] for b in found[2 * s : 2 * s + 2]]).tolist() for s in range(5)]
    assert steps == [sampler.samples(step) for step in range(5)]
    assert len({tuple(b["noise"].tolist()) for b in found}) == 10  # every micro-batch draws for itself
    for a, b in zip(found[6:], batches(3)[0]):  # and a resumed run draws the same
        assert torch.equal(a["noise"], b["noise"]) and torch.equal(a["index"], b["index"])
    assert not torch.equal(batches(0, seed=4)[0][0]["noise"], found[0]["noise"])
    parts = [list(eval_batches(Whole(), batch=4, rank=r, world=2, workers=0, pin=False)) for r in (0, 1)]
    kept = [i for part in parts for b in part for i, m in zip(b["index"].tolist(), b["mask"].tolist()) if m]
    assert sorted(kept) == list(range(10)) and all("noise" not in b for part in parts for b in part)
