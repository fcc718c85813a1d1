"""Row sums from a scan of the keys, against row sums of the scores."""

import pytest
import torch
from torch import Tensor

from lion.ops import Settings
from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS
from lion.ops.vector_scores import vector_scores
from lion.ops.vector_sums import scan, vector_row_sums

from .checks import attend
from .helpers import Inputs, pairwise

HEADS, DIM = 2, 4


def tokens(length: int, shared: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Make q, k and a log decay."""
    torch.manual_seed(0)
    q, k = torch.rand(2, 2, HEADS, length, DIM, dtype=torch.float64)
    return q, k, -torch.rand(1 if shared else 2, HEADS, length, DIM, dtype=torch.float64)


def check(
    q: Tensor, k: Tensor, log_decay: Tensor, how: Settings, index: Tensor | None = None, diagonal: bool = True
) -> None:
    """Check values and gradients."""
    weights = torch.rand(q.shape[:3], dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, log_decay)]
    got = vector_row_sums(*leaves, index, how, diagonal)
    want = vector_scores(*leaves, index, how, diagonal).sum(-1)
    torch.testing.assert_close(got, want)
    found = torch.autograd.grad((got * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad((want * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    for name, ours, theirs in zip(("q", "k", "log_decay"), found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize(
    "direction, convention, diagonal, shared", pairwise(DIRECTIONS, DECAY_CONVENTIONS, (True, False), (True, False))
)
def test_every_convention(direction, convention, diagonal, shared):
    how = Settings(direction=direction, decay_convention=convention)
    for length in (1, 2, 7, 8, 9, 64, 65, 200):
        check(*tokens(length, shared), how, diagonal=diagonal)


@pytest.mark.parametrize("direction, convention", pairwise(DIRECTIONS, DECAY_CONVENTIONS))
def test_segments_know_nothing_of_one_another(direction, convention):
    index = torch.tensor([[1] * 20 + [2] * 1 + [3] * 49, [1] * 64 + [2] * 6])
    for shared in (False, True):
        check(*tokens(70, shared), Settings(direction=direction, decay_convention=convention), index)


@pytest.mark.parametrize("steep", (0.0, 1e-9, 30.0, 1e4, torch.inf))
def test_extreme_decays(steep):
    """Check no decay, complete decay, and values between, alternating with decays of 1."""
    q, k, log_decay = tokens(100)
    log_decay = torch.full_like(log_decay, -steep)
    log_decay[..., ::3, 1] = 0
    expected = vector_scores(q, k, log_decay, None, Settings()).sum(-1)
    torch.testing.assert_close(vector_row_sums(q, k, log_decay, None, Settings()), expected)
    leaves = [x.float().requires_grad_() for x in (q, k, log_decay)]
    total = vector_row_sums(*leaves, None, Settings())
    torch.testing.assert_close(total, expected.float())
    for grad in torch.autograd.grad(total.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("log_decay", [-0.7, -0.34, -0.042])
def test_what_fades_ends_as_zero(log_decay):
    lam = torch.full((1, 6000, 1), log_decay).exp()
    x = torch.zeros(1, 6000, 1)
    x[:, 0] = 1
    h = scan(x, lam)
    assert h[h != 0].min() > torch.finfo(torch.float32).tiny and h[0, -1] == 0
    torch.testing.assert_close(h[0, 20, 0], (20 * torch.tensor(log_decay)).exp())


@pytest.mark.parametrize("rate", [1e-4, 2e-5])
def test_long_sequences_lose_nothing(rate):
    """Check rotated tokens in chunks of 16,384: the divisor is as exact as the numerator."""
    torch.manual_seed(0)
    q, k, v = torch.rand(3, 1, 1, 16_384, DIM)
    inputs = Inputs(q, k, v, torch.full((1, DIM), -rate), angles=torch.zeros(16_384, DIM // 2))
    exact = attend(inputs.to(torch.float64), dict(form="chunk"))
    got = attend(inputs, dict(form="chunk"))
    with torch.no_grad():  # computed piece by piece
        pieces = attend(inputs, dict(form="chunk"))
    for y in (got, pieces):
        torch.testing.assert_close(y.double(), exact, atol=2e-6, rtol=2e-6)
