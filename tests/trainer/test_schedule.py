import math

import pytest

from lion.trainer.optim import ScheduleConfig, learning_rate, to_steps
from tests.layers.helpers import invalid


def curve(total, warmup=0, peak=1.0, **settings):
    config = ScheduleConfig(**settings)
    return [learning_rate(s, config=config, peak=peak, warmup=warmup, total=total) for s in range(total + 1)]


def test_durations():
    given = [2000, "2000", "2000st", "5ep", "1.5ep", "2%", "1e3"]
    assert [to_steps(d, steps_per_epoch=10, total=500) for d in given] == [2000, 2000, 2000, 50, 15, 10, 1000]
    for bad in ("5 epochs", "", "-3", "ep", None, "2%%"):
        invalid("expected steps", to_steps, bad, steps_per_epoch=10, total=500)


def test_linear_by_hand():
    assert curve(6, warmup=2, kind="linear", min_lr=0.2) == pytest.approx([0, 0.5, 1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_by_hand():
    half = [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]
    assert curve(4, kind="cosine") == pytest.approx(half)
    assert curve(6, warmup=2, kind="cosine") == pytest.approx([0, 0.5, *half])


def test_deit_lays_the_warmup_over_the_cosine():
    lr = curve(300, warmup=5, peak=1e-3, kind="cosine", overlay=True, warmup_lr=1e-6, min_lr=1e-5)
    assert lr[0] == 1e-6 and lr[-1] == pytest.approx(1e-5)
    assert lr[5] == pytest.approx(1e-5 + 0.99e-3 * (1 + math.cos(math.pi * 5 / 300)) / 2)


def test_inverse_sqrt_and_constant():
    lr = curve(16, warmup=4, kind="inverse_sqrt")
    assert lr[4] == 1 and lr[16] == pytest.approx(0.5) and lr[2] == 0.5
    assert curve(3, warmup=1, kind="constant") == [0, 1, 1, 1]


def test_the_triangle_of_a_budget():
    """Compare with recipes.md 7.4: from 25 % to 100 % of the peak over 75 % of the run, then to 0."""
    assert curve(8, kind="budget_triangle") == pytest.approx([0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 0.5, 0])
    assert curve(4, kind="budget_triangle", min_lr=0.2)[3:] == [1, 0.2]
    assert curve(8, kind="budget_triangle", min_lr=0.5)[:4] == [0.5, 0.5, 0.5, 0.625]
    config = ScheduleConfig(kind="budget_triangle", warmup="30min")
    day = [learning_rate(3600.0 * h, config=config, peak=1, warmup=0, total=86_400) for h in (0, 9, 18, 21, 24)]
    assert day == pytest.approx([0.25, 0.625, 1, 0.5, 0])
