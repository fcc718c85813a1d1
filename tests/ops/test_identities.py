"""Identities of the operator: equivalent formulas, and the size of the error of wrong formulas."""

import pytest
import torch

from .checks import attend
from .helpers import DECAY_CONVENTIONS, SMALL_FORMS, assert_close, error, make, pairwise


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_two_scans_added_up_count_the_diagonal_twice(form):
    """Check the error of the uncorrected sum of two directions, divided by the sum of both row sums, against `both`."""
    inputs = make("S", 19)
    ones = torch.ones_like(inputs.v[..., :1])
    summed = inputs._replace(v=torch.cat([inputs.v, ones], -1))  # the row sum as an additional value
    own = (inputs.q * inputs.k).sum(-1, keepdim=True) / 2  # the default scale of D = 4
    for decay_convention, size in zip(DECAY_CONVENTIONS, (0.309, 0.294, 0.324, 0.347)):
        how = SMALL_FORMS[form] | dict(decay_convention=decay_convention)
        exact = attend(inputs, how)
        none = how | dict(normalize="none")
        y = attend(summed, none, dict(direction="forward")) + attend(summed, none, dict(direction="backward"))
        numerator = y[..., :-1]
        rowsum = y[..., -1:]
        assert error(numerator / rowsum, exact) == pytest.approx(size, abs=1e-3)
        assert_close((numerator - own * inputs.v) / (rowsum - own), exact, 1e-12)


@pytest.mark.parametrize("decay, decay_convention", pairwise(("D", "S", "vector"), DECAY_CONVENTIONS))
def test_both_directions_do_not_distinguish_an_order_from_its_reverse(decay_convention, decay):
    """Check invariance to reversal: without position embedding, an image rotated by 180 degrees looks the same."""
    inputs = make(decay, 17)
    turned = inputs.at(torch.arange(17).flip(0))

    def difference(direction: str) -> float:
        how = dict(decay_convention=decay_convention, direction=direction)
        return error(attend(turned, how).flip(2), attend(inputs, how))

    same = decay_convention != "symmetric" or decay == "D"  # its two halves follow different conventions
    assert (difference("both") < 1e-13) == same
    assert difference("forward") > 1e-2
