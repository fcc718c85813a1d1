"""Gradients of decays computed from cumulative sums, against gradients through every decay."""

import pytest
import torch
import torch.nn.functional as F

from lion.ops import linear_attention, prefill

from .helpers import SMALL_FORMS, assert_close, pairwise

B, H, L, D, E = 2, 2, 21, 4, 3
SEGMENTS = torch.tensor([[-1] + [0] * 6 + [-1] + [0] * 3 + [4] * 9 + [-1], [1] * 10 + [2] * 11])
CASES = pairwise(("source", "target", "symmetric"), ("forward", "backward"), (False, True), (False, True))


def inputs() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, L, n, generator=rng, dtype=torch.float64) for n in (D, D, E))
    falls = torch.rand(B, H, L, D, generator=rng, dtype=torch.float64)
    falls[:, :, 5::6, 0] = 1e4  # one dimension forgets everything at some tokens
    return {name: x.requires_grad_() for name, x in dict(q=q, k=k, v=v, falls=falls).items()}


def sums_and_decays(falls: torch.Tensor, convention: str, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums s along the scan, including or excluding the token itself, and decays with mask `exp(s_i - s_j)`."""
    reverse = direction == "backward"
    inclusive = convention == "target" or (convention == "symmetric" and not reverse)
    s = -(falls.flip(2) if reverse else falls).cumsum(2)
    s = s if inclusive else F.pad(s[:, :, :-1], (0, 0, 1, 0))
    return (s.flip(2) if reverse else s), -falls


def gradients(x: dict[str, torch.Tensor], convention: str, direction: str, by_sums: bool, **given) -> list:
    s, decays = sums_and_decays(x["falls"], convention, direction)
    given |= dict(decay_convention=convention, direction=direction, normalize="none", scale=1.0)
    y = linear_attention(x["q"], x["k"], x["v"], decays, prefix=s if by_sums else None, **given)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(x.values()))]


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("convention, direction, turned, cut", CASES)
def test_gradients_by_sums(form, convention, direction, turned, cut):
    x, given = inputs(), dict(SMALL_FORMS[form])
    if turned:
        given["angles"] = torch.randn(L, D // 2, generator=torch.Generator().manual_seed(1)).double()
    if cut:
        given["segments"] = SEGMENTS
        with torch.no_grad():
            for name in "qkv":
                x[name].transpose(1, 2)[SEGMENTS < 0] = torch.nan
            x["falls"].transpose(1, 2)[SEGMENTS < 0] = 0
    want = gradients(x, convention, direction, False, **given)
    got = gradients(x, convention, direction, True, **given)
    assert want[-1].abs().max() > 1 and torch.equal(got[0], want[0])
    if cut:  # sums do not change at absent tokens
        got[-1] = got[-1].masked_fill((SEGMENTS < 0)[:, None, :, None], 0)
    for a, b in zip(got[1:], want[1:]):
        assert_close(a, b, 1e-12)


def test_a_feature_map_and_a_prompt():
    """Check gradients with a feature map, and with the state of a prompt."""
    x = inputs()
    want, got = (gradients(x, "target", "forward", on, feature_map="silu") for on in (False, True))
    for a, b in zip(got, want):
        assert_close(a, b, 1e-12)
    s, decays = sums_and_decays(x["falls"], "target", "forward")
    for by_sums in (None, s):
        y, state = prefill(
            x["q"], x["k"], x["v"], decays, prefix=by_sums, normalize="none", scale=1.0, decay_convention="target"
        )
        got = torch.autograd.grad(y.square().sum() + state.S.square().sum(), list(x.values()), retain_graph=True)
        want = got if by_sums is None else want
    for a, b in zip(got, want):
        assert_close(a, b, 1e-12)


def test_what_it_does_not_take():
    q = torch.rand(B, H, L, D)
    given = dict(prefix=-q, normalize="none", direction="forward")
    with pytest.raises(ValueError, match="prefix: expected the sums of a log_decay of the same shape"):
        linear_attention(q, q, q, **given, feature_map=None)
    with pytest.raises(ValueError, match="prefix: expected floating point"):
        linear_attention(q, q, q, -q, **given | dict(prefix=-q[..., 0]), feature_map=None)
    for name, value in dict(direction="both", normalize="sum", decay_convention="between").items():
        with pytest.raises(ValueError, match=f"prefix: cannot be combined with {name}='{value}'"):
            linear_attention(q, q, q, -q, **given | {name: value}, feature_map=None)
    with pytest.raises(ValueError, match="prefix: cannot be combined with a bonus"):
        linear_attention(q, q, q, -q, **given, bonus=q[0, :, 0], feature_map=None)
