"""Identities of the operator: equivalent formulas, and the size of the error of wrong formulas."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from lion.ops import linear_attention

from .helpers import DECAY_CONVENTIONS, DIRECTIONS, SMALL_FORMS, Inputs, assert_close, error, make, oracle_masks

# Sum of two directions


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_two_scans_added_up_count_the_diagonal_twice(form):
    """Check the error of the uncorrected sum of two directions, divided by the sum of both row sums, against `both`."""
    ones = torch.ones(2, 3, 19, 1, dtype=torch.float64)
    inputs, how = make("S", 19), SMALL_FORMS[form]

    def summed(q, k, v, a, decay_convention):
        values = torch.cat([v, ones], -1)  # the row sum as an additional value
        y = sum(
            linear_attention(q, k, values, a, direction=d, decay_convention=decay_convention, normalize="none", **how)
            for d in ("forward", "backward")
        )
        return y[..., :-1], y[..., -1:]

    for decay_convention, size in zip(DECAY_CONVENTIONS, (0.309, 0.294, 0.324, 0.347)):
        exact = linear_attention(*inputs, decay_convention=decay_convention, **how, feature_map=None)
        numerator, rowsum = summed(*inputs, decay_convention)
        assert error(numerator / rowsum, exact) == pytest.approx(size, abs=1e-3)
        own = (inputs.q * inputs.k).sum(-1, keepdim=True) / 2  # the default scale of D = 4
        assert_close((numerator - own * inputs.v) / (rowsum - own), exact, 1e-12)


# Fused softmax: with positive scores, `softmax(log s + log M) V` is the masked form with normalised rows


PADDED = torch.arange(16) < torch.tensor([[16], [11]])  # (B, L)


@pytest.fixture(params=("lit", "D", "S"))
def fused(request):
    """Return a batch whose second row is padded, with `log M` for all tokens including padding."""

    def of(direction: str):
        inputs = make(request.param, 16)
        log_mask = oracle_masks(inputs, "source", direction).log()  # -inf at tokens outside the direction
        return inputs, log_mask.masked_fill(~PADDED[:, None, None], -torch.inf)

    return of


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_softmax_of_logarithms(direction, fused):
    (q, k, v, _), log_mask = inputs, log_mask = fused(direction)
    weights = torch.softmax((q @ k.mT).log() + log_mask, -1)
    for form, how in SMALL_FORMS.items():
        got = linear_attention(*inputs, direction=direction, valid=PADDED, **how, feature_map=None)
        assert_close(got, (weights.nan_to_num(0) @ v).where(PADDED[:, None, :, None], 0), 1e-12, form)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flex_attention(direction, fused):
    """Check flex_attention, run eagerly, with a modification of each score."""
    (q, k, v, _), log_mask = inputs, log_mask = fused(direction)

    def score_mod(score, b, h, i, j):
        return score.log() + log_mask[b, h, i, j]

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the warning that flex_attention is not compiled
        fused_output = flex_attention(q, k, v, score_mod=score_mod, scale=1.0)
    got = linear_attention(*inputs, direction=direction, valid=PADDED, feature_map=None)
    shown = PADDED[:, None, :, None]
    assert_close(got, fused_output.where(shown, 0), 1e-12)


def test_softmax_needs_positive_scores():
    """Check that a score of -1, which has no logarithm, gives NaN and not another number."""
    assert torch.softmax(torch.tensor([[1.0, -1.0]]).log(), -1).isnan().all()


@pytest.mark.parametrize("decay_convention", ["source", "target", "between", "symmetric"])
@pytest.mark.parametrize("decay", ["D", "S", "vector"])
def test_both_directions_do_not_distinguish_an_order_from_its_reverse(decay_convention, decay):
    """Check invariance to reversal: without position embedding, an image rotated by 180 degrees looks the same."""
    inputs = make(decay, 17)
    a = inputs.log_decay
    turned = Inputs(*(x.flip(2) for x in inputs[:3]), a if a.dim() < 3 else a.flip(2))

    def difference(direction):
        how = dict(decay_convention=decay_convention, direction=direction)
        return error(
            turned.on(linear_attention, **how, feature_map=None).flip(2),
            inputs.on(linear_attention, **how, feature_map=None),
        )

    same = decay_convention != "symmetric" or decay == "D"  # its two halves follow different conventions
    assert (difference("both") < 1e-13) == same
    assert difference("forward") > 1e-2
