"""Gradients of decays computed from cumulative sums, against gradients through every decay."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops import linear_attention, prefill

from .helpers import SMALL_FORMS, assert_close, pairwise

B, H, L, D, E = 2, 2, 21, 4, 3
SEGMENTS = torch.tensor([[-1] + [0] * 6 + [-1] + [0] * 3 + [4] * 9 + [-1], [1] * 10 + [2] * 11])


def inputs() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, L, n, generator=rng, dtype=torch.float64) for n in (D, D, E))
    falls = torch.rand(B, H, L, D, generator=rng, dtype=torch.float64)
    falls[:, :, 5::6, 0] = 1e4  # one dimension forgets everything at some tokens
    return dict(q=q, k=k, v=v, falls=falls)


def prefix_sums(falls: Tensor, convention: str, direction: str) -> Tensor:
    """Return sums s along the scan, including or excluding the token itself, with mask `exp(s_i - s_j)`."""
    reverse = direction == "backward"
    s = -(falls.flip(2) if reverse else falls).cumsum(2)
    if convention == "source" or (convention == "symmetric" and reverse):
        s = F.pad(s[:, :, :-1], (0, 0, 1, 0))
    return s.flip(2) if reverse else s


def gradients(x: dict[str, Tensor], by_sums: bool, function=linear_attention, **given) -> list[Tensor]:
    """Return outputs, and the gradients of all inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in x.values()]
    q, k, v, falls = leaves
    if by_sums:
        given["prefix"] = prefix_sums(falls, given["decay_convention"], given["direction"])
    if function is prefill:
        del given["direction"]
    out = function(q, k, v, -falls, normalize="none", scale=1.0, **given)
    if function is prefill:
        return torch.autograd.grad(out[0].square().sum() + out[1].S.square().sum(), leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize(
    "form, convention, direction, turned, cut",
    pairwise(
        tuple(SMALL_FORMS), ("source", "target", "symmetric"), ("forward", "backward"), (False, True), (False, True)
    ),
)
def test_gradients_by_sums(form, convention, direction, turned, cut):
    x = inputs()
    given = SMALL_FORMS[form] | dict(decay_convention=convention, direction=direction)
    if turned:
        given["angles"] = torch.randn(L, D // 2, generator=torch.Generator().manual_seed(1)).double()
    absent = (SEGMENTS < 0)[:, None, :, None]
    if cut:
        given["segments"] = SEGMENTS
        x = {name: tensor.masked_fill(absent, 0 if name == "falls" else torch.nan) for name, tensor in x.items()}
    want = gradients(x, False, **given)
    got = gradients(x, True, **given)
    assert want[-1].abs().max() > 1 and torch.equal(got[0], want[0])
    if cut:  # sums do not change at absent tokens
        got[-1] = got[-1].masked_fill(absent, 0)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("function, given", [(linear_attention, dict(feature_map="silu")), (prefill, {})])
def test_a_feature_map_and_a_prompt(function, given):
    """Check gradients with a feature map, and with the state of a prompt."""
    given = given | dict(decay_convention="target", direction="forward")
    want = gradients(inputs(), False, function, **given)
    got = gradients(inputs(), True, function, **given)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize(
    "log_decay, change, message",
    [
        (False, {}, "prefix: expected the sums of a log_decay of the same shape"),
        (True, dict(prefix=-torch.rand(B, H, L)), "prefix: expected floating point"),
        (True, dict(direction="both"), "prefix: cannot be combined with direction='both'"),
        (True, dict(normalize="sum"), "prefix: cannot be combined with normalize='sum'"),
        (True, dict(decay_convention="between"), "prefix: cannot be combined with decay_convention='between'"),
        (True, dict(bonus=torch.rand(H, D)), "prefix: cannot be combined with a bonus"),
    ],
)
def test_what_it_does_not_take(log_decay, change, message):
    q = torch.rand(B, H, L, D)
    given = dict(prefix=-q, normalize="none", direction="forward", feature_map=None) | change
    with pytest.raises(ValueError, match=message):
        linear_attention(q, q, q, -q if log_decay else None, **given)
