"""Row sums from a scan of the keys, against row sums of the scores."""

import pytest
import torch

from lion.ops import linear_attention, linear_attention_parts
from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS
from lion.ops.tokens import ScoreSettings, TokenBlock
from lion.ops.vector_scores import vector_scores
from lion.ops.vector_sums import scan, vector_row_sums

HEADS, DIM = 2, 4


def tokens(length: int, batch: int = 2, steep: float = 1.0, shared: bool = False) -> TokenBlock:
    torch.manual_seed(0)
    q, k = torch.rand(2, batch, HEADS, length, DIM, dtype=torch.float64)
    log_decay = -steep * torch.rand(1 if shared else batch, HEADS, length, DIM, dtype=torch.float64)
    return TokenBlock(q, k, q[..., :0], log_decay)


def settings(direction: str = "both", convention: str = "source", diagonal: bool = True) -> ScoreSettings:
    return ScoreSettings("full", convention, direction, diagonal, True, 64)


def by_scan(x: TokenBlock, how: ScoreSettings) -> torch.Tensor:
    return vector_row_sums(*x[:2], x.gate, x.segment_index, how)


def by_scores(x: TokenBlock, how: ScoreSettings) -> torch.Tensor:
    return vector_scores(*x[:2], x.gate, x.segment_index, how).sum(-1)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_convention(direction, convention, diagonal):
    how = settings(direction, convention, diagonal)
    for length in (1, 2, 7, 8, 9, 64, 65, 200):
        for shared in (False, True):
            x = tokens(length, shared=shared)
            torch.testing.assert_close(by_scan(x, how), by_scores(x, how))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_segments_know_nothing_of_one_another(direction):
    index = torch.tensor([[1] * 20 + [2] * 1 + [3] * 49, [1] * 64 + [2] * 6])
    for convention in DECAY_CONVENTIONS:
        x, how = tokens(70)._replace(segment_index=index), settings(direction, convention)
        torch.testing.assert_close(by_scan(x, how), by_scores(x, how))


@pytest.mark.parametrize("convention", DECAY_CONVENTIONS)
def test_gradients(convention):
    index, how = torch.tensor([[1] * 9 + [2] * 8]), settings("both", convention)
    for shared in (False, True):
        x = tokens(17, batch=2, shared=shared)
        weights = torch.rand(x.q.shape[:3], dtype=torch.float64)

        def gradients(sums, x=x, weights=weights):
            leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.gate)]
            given = TokenBlock(leaves[0], leaves[1], x.v, leaves[2], segment_index=index.expand(2, -1))
            return torch.autograd.grad((sums(given, how) * weights).sum(), leaves)

        for ours, want in zip(gradients(by_scan), gradients(by_scores)):
            torch.testing.assert_close(ours, want)


def test_extreme_decays():
    """Check no decay, complete decay, and values between, alternating with decays of 1."""
    for steep in (0.0, 1e-9, 30.0, 1e4, torch.inf):
        x, how = tokens(100), settings()
        log_decay = torch.full_like(x.gate, -steep)
        log_decay[..., ::3, 1] = 0
        x = x._replace(gate=log_decay)
        torch.testing.assert_close(by_scan(x, how), by_scores(x, how))
        leaves = [t.float().requires_grad_() for t in (x.q, x.k, log_decay)]
        total = vector_row_sums(*leaves, None, how)
        torch.testing.assert_close(total, by_scores(x, how).float())
        for grad in torch.autograd.grad(total.sum(), leaves):
            assert grad.isfinite().all()


@pytest.mark.parametrize("log_decay", [-0.7, -0.34, -0.042])
def test_what_fades_ends_as_zero(log_decay):
    x, lam = torch.zeros(1, 6000, 1), torch.full((1, 6000, 1), log_decay).exp()
    x[:, 0] = 1
    h = scan(x, lam)
    assert h[h != 0].min() > torch.finfo(torch.float32).tiny and h[0, -1] == 0
    torch.testing.assert_close(h[0, 20, 0], (20 * torch.tensor(log_decay)).exp())


@pytest.mark.parametrize("rate", [1e-4, 2e-5])
def test_long_sequences_lose_nothing(rate):
    """Check rotated tokens in chunks of 16,384: the divisor is as exact as the numerator."""
    torch.manual_seed(0)
    q, k, v = torch.rand(3, 1, 1, 16_384, DIM)
    given = dict(
        log_decay=torch.full((1, DIM), -rate), normalize="sum", form="chunk", angles=torch.zeros(16_384, DIM // 2)
    )
    exact = linear_attention(
        q.double(), k.double(), v.double(), **given | dict(log_decay=given["log_decay"].double()), feature_map=None
    )
    torch.testing.assert_close(
        linear_attention(q, k, v, **given, feature_map=None).double(), exact, atol=2e-6, rtol=2e-6
    )
    with torch.no_grad():  # computed piece by piece
        torch.testing.assert_close(
            linear_attention(q, k, v, **given, feature_map=None).double(), exact, atol=2e-6, rtol=2e-6
        )


def test_no_row_sum_is_none():
    x = tokens(70)
    for form in ("full", "chunk"):
        given = dict(log_decay=x.gate, normalize="none", form=form)
        assert linear_attention_parts(x.q, x.k, x.v, **given, feature_map=None)[1] is None
