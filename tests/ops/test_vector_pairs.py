"""Scores of vector decays by differences of sums, as on a GPU, against those by products of lambdas."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lion.ops import Settings
from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS
from lion.ops.vector_scores import vector_scores

from .helpers import pairwise

KINDS = pairwise(DECAY_CONVENTIONS, (True, False))


def scores_and_gradients(
    tensors: tuple[Tensor, ...], how: Settings, diagonal: bool, triangle=lambda x: x
) -> list[Tensor]:
    """Return the scores and their gradients by q, k and log decays."""
    q, k, log_decay = (t.clone().requires_grad_() for t in tensors)
    scores = triangle(vector_scores(q, k, log_decay, None, how, diagonal))
    weights = torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).sin().view_as(scores)
    return [scores, *torch.autograd.grad((scores * weights).sum(), (q, k, log_decay))]


def check(
    monkeypatch, tensors: tuple[Tensor, ...], how: Settings, rtol: float, atol: float, diagonal: bool = True
) -> None:
    """Check results by sums, as on a GPU, against those by products."""
    products = scores_and_gradients(tensors, how, diagonal)
    with monkeypatch.context() as patch:
        patch.setattr("lion.ops.modes.for_gpu", lambda device: True)
        sums = scores_and_gradients(tensors, how, diagonal)
    for got, expected in zip(sums, products, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("convention, diagonal", KINDS)
def test_sums_agree_with_products(convention, diagonal, monkeypatch):
    torch.manual_seed(0)
    how = Settings(decay_convention=convention)
    for length in (1, 7, 8, 9, 40, 64, 100):
        q, k = torch.randn(2, 1, 2, length, 5, dtype=torch.float64)
        for steep in (1.0, 30.0, 1e4):  # with decays of 1 between
            log_decay = -steep * torch.rand(1, 2, length, 5, dtype=torch.float64)
            log_decay[..., ::3, :] = 0
            check(monkeypatch, (q, k, log_decay), how, 1e-9, 1e-10, diagonal)
            check(monkeypatch, (q.float(), k.float(), log_decay.float()), how, 2e-5, 2e-5, diagonal)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("value", (0.0, -1e-9, -1e4, -torch.inf, 1.0))  # positive values count as 0
def test_extreme_and_shared_decays(value, direction, monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 70, 5)
    log_decay = torch.full((1, 3, 70, 5), value)
    log_decay[..., ::4, 1] = -0.1
    check(monkeypatch, (q, k, log_decay), Settings(direction=direction), 2e-5, 2e-5)


@pytest.mark.parametrize("gpu", (False, True))
@pytest.mark.parametrize("convention, diagonal", KINDS)
def test_one_direction_is_one_triangle_of_both(convention, diagonal, gpu, monkeypatch):
    monkeypatch.setattr("lion.ops.modes.for_gpu", lambda device: gpu)
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 40, 5, dtype=torch.float64)
    tensors = (q, k, -torch.rand(2, 3, 40, 5, dtype=torch.float64))
    for direction, triangle in (("forward", torch.tril), ("backward", torch.triu)):
        how = Settings(decay_convention=convention, direction=direction)
        found = scores_and_gradients(tensors, how, diagonal)
        both = scores_and_gradients(tensors, replace(how, direction="both"), diagonal, triangle)
        for got, expected in zip(found, both, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
