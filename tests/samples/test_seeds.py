"""Tests of draws that depend only on a sample's key."""

import torch

from lion.samples.seeds import GOLDEN, derive, mix, normal, uniform


def test_the_generator_is_the_published_one():
    """Compare with SplitMix64 of seed 1234567, as Rosetta Code and the reference in C print it."""
    words = mix(1234567 + torch.arange(1, 6) * GOLDEN)
    assert [word % 2**64 for word in words.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def keys(count, split="val"):
    return torch.tensor([derive(0, split, index) for index in range(count)])


def test_a_row_depends_on_its_key_alone():
    whole = uniform(keys(12), 50)
    assert whole.shape == (12, 50) and whole.dtype == torch.float32
    for size in (1, 5):
        assert torch.equal(torch.cat([uniform(part, 50) for part in keys(12).split(size)]), whole)
    assert torch.equal(uniform(keys(12).flip(0), 50).flip(0), whole)
    assert torch.equal(uniform(keys(12), 30), whole[:, :30])
    assert not (uniform(keys(12, "test"), 50) == whole).any()
    if torch.cuda.is_available():
        assert torch.equal(uniform(keys(12).cuda(), 50).cpu(), whole)


def test_draws_are_uniform():
    draws = uniform(keys(500), 400)
    assert 0 <= draws.min() and draws.max() < 1
    counts = torch.histc(draws, 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 150  # 99 degrees of freedom
    for a, b in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):  # neighbouring samples, then draws
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.01


def test_draws_are_normal():
    draws = normal(keys(500), 400)
    assert draws.dtype == torch.float32 and draws.isfinite().all() and 4 < draws.abs().max() < 5.5
    counts = torch.histc(torch.special.ndtr(draws.double()), 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 150
    assert torch.equal(draws[3:5], normal(keys(500)[3:5], 400))


def test_no_draw_is_infinite(monkeypatch):
    """Check the normal draws for the smallest and the largest uniform draw."""
    ends = torch.tensor([[0.0, 1 - 2.0**-24]])
    monkeypatch.setattr("lion.samples.seeds.uniform", lambda keys, n: ends)
    low, high = normal(None, 2)[0].tolist()
    assert low == -high and 5 < high < 6
