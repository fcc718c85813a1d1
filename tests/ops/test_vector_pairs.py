"""Scores of vector decays by differences of sums, as on a GPU, against those by products of lambdas."""

import pytest
import torch

from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS
from lion.ops.tokens import ScoreSettings
from lion.ops.vector_scores import vector_scores


def both_ways(monkeypatch, tensors, how):
    """Return the scores and their gradients by q, k and log decays, by products and by sums."""
    results = []
    for gpu in (False, True):
        monkeypatch.setattr("lion.ops.modes.for_gpu", lambda device, gpu=gpu: gpu)
        leaves = [t.clone().requires_grad_() for t in tensors]
        scores = vector_scores(*leaves, None, how)
        weights = torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).sin().view_as(scores)
        results.append([scores, *torch.autograd.grad((scores * weights).sum(), leaves)])
    return zip(*results)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("convention", DECAY_CONVENTIONS)
def test_sums_agree_with_products(convention, diagonal, monkeypatch):
    torch.manual_seed(0)
    for length in (1, 7, 8, 9, 40, 64, 100):
        q, k = torch.randn(2, 2, 3, length, 5, dtype=torch.float64)
        how = ScoreSettings("full", convention, "both", diagonal, True, 64)
        for steep in (1.0, 30.0, 1e4):  # with decays of 1 between
            log_decay = -steep * torch.rand(2, 3, length, 5, dtype=torch.float64)
            log_decay[..., ::3, :] = 0
            for products, sums in both_ways(monkeypatch, (q, k, log_decay), how):
                torch.testing.assert_close(sums, products, rtol=1e-9, atol=1e-10)
            for products, sums in both_ways(monkeypatch, (q.float(), k.float(), log_decay.float()), how):
                torch.testing.assert_close(sums, products, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_extreme_and_shared_decays(direction, monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 70, 5)
    how = ScoreSettings("full", "source", direction, True, True, 64)
    for value in (0.0, -1e-9, -1e4, -torch.inf, 1.0):  # positive values count as 0
        log_decay = torch.full((1, 3, 70, 5), value)
        log_decay[..., ::4, 1] = -0.1
        for products, sums in both_ways(monkeypatch, (q, k, log_decay), how):
            assert sums.isfinite().all()
            torch.testing.assert_close(sums, products, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("convention", DECAY_CONVENTIONS)
def test_one_direction_is_one_triangle_of_both(convention, diagonal, monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 40, 5, dtype=torch.float64)
    log_decay = -torch.rand(2, 3, 40, 5, dtype=torch.float64)

    def found(direction, part):
        leaves = [t.clone().requires_grad_() for t in (q, k, log_decay)]
        scores = part(vector_scores(*leaves, None, ScoreSettings("full", convention, direction, diagonal, True, 64)))
        return [scores, *torch.autograd.grad((scores * scores).sum(), leaves)]

    for gpu in (False, True):
        monkeypatch.setattr("lion.ops.modes.for_gpu", lambda device, gpu=gpu: gpu)
        for direction, triangle in (("forward", torch.tril), ("backward", torch.triu)):
            for one, both in zip(found(direction, lambda x: x), found("both", triangle)):
                torch.testing.assert_close(one, both, rtol=1e-12, atol=1e-12)
