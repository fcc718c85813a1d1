"""Rotations: RoPE, and MD-LRPE of LightNet on grids with any number of axes."""

import pytest
import torch

from lion.layers.layout import Layout, grid_layout
from lion.layers.mixers import LINEAR, SOFTMAX, AttentionConfig, make_mixer, resolve_mixer
from lion.layers.optim_factors import optim_factors
from lion.layers.rotations import ROTATIONS, LearnedLrpe, Lrpe, Rope
from lion.ops import rope_frequencies, rotary_angles

from .helpers import close, doubles, invalid

LRPE = [name for name, kind in ROTATIONS.items() if issubclass(kind, Lrpe)]
CUBE = Layout(coords=torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).mT)  # patches of a volume
X = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.double)


def angles_by_hand(coords: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Compute Eq. 10-14 pair by pair: (L, D/2)."""
    axes, length = coords.shape
    each = head_dim // 2 // axes
    out = torch.zeros(length, head_dim // 2, dtype=torch.double)
    for token in range(length):
        for axis in range(axes):
            for j in range(each):
                place = max(coords[axis, token].item(), 0)
                out[token, axis * each + j] = place * 10_000 ** (-2 * j / head_dim)
    return out


@pytest.mark.parametrize("head_dim", [12, 16])  # 16: 8 pairs, of which 2 are left over with three axes
@pytest.mark.parametrize("layout", [CUBE, grid_layout(3, 5), grid_layout(1, 6, special=0)])
def test_pairs_are_shared_out_among_the_axes(layout, head_dim):
    x = torch.randn(2, layout.coords.shape[1], 2 * head_dim)
    got = Lrpe(2, head_dim)(x, layout)
    close(got, angles_by_hand(layout.coords, head_dim), 1e-12)
    assert not got[(layout.coords < 0).all(0)].any()
    axes = len(layout.coords)
    assert not got[:, head_dim // 2 // axes * axes :].any()
    close(LearnedLrpe(2, head_dim)(x, layout), got.expand(2, -1, -1))


@pytest.mark.parametrize("layout", [CUBE, grid_layout(3, 5)])
def test_as_printed_the_pairs_are_numbered_over_all_axes(layout):
    """Check Eq. 12: theta_j = 10000^(-2j / d), s d / k < j <= (s + 1) d / k for axis s; pairs start at j = 0 here."""
    axes = len(layout.coords)
    each = 6 // len(layout.coords)
    got = ROTATIONS["lrpe_printed"](2, 12)(torch.randn(2, layout.coords.shape[1], 24), layout)
    for j in range(axes * each):
        want = layout.coords[j // each].clamp(min=0).double() * 10_000 ** (-2 * j / 12)
        close(got[:, j], want, 1e-12)


def test_in_text_it_is_rope_and_rope_is_as_it_was():
    segments = torch.tensor([[0, 0, 1, 1, 1, -1, 1], [0] * 7])
    for layout in (Layout(), Layout.of(X, segments=segments)):
        positions = layout.positions_of(X)
        places = positions[:, None] if len(positions) > 1 else positions
        want = rotary_angles(places, rope_frequencies(4, dtype=torch.float64))
        for name in ("rope", "lrpe", "lrpe_printed"):
            assert torch.equal(ROTATIONS[name](3, 4)(X, layout), want)
    grid = grid_layout(2, 3)
    assert torch.equal(Rope(3, 4)(X, grid), Rope(3, 4)(X, Layout()))  # which uses sequence positions for images, too
    assert not torch.equal(Lrpe(3, 4)(X, grid), Rope(3, 4)(X, grid))


@pytest.mark.parametrize("mixer", [SOFTMAX, "retnet", "mamba2", "deltanet"])
@pytest.mark.parametrize("rotation", LRPE)
def test_scores_depend_on_differences_of_places_alone(mixer, rotation):
    """Check shifts along each of three axes; excluded are mixers with different decays in a pair (GLA)."""
    layer = make_mixer(mixer, 24, 2, AttentionConfig(rotation=rotation)).double().eval()
    if rotation == "lrpe_learned":
        torch.nn.init.normal_(layer.rotation.log_scale, std=0.3)
    x = doubles(1, 24, 24)
    y = layer(x, CUBE)
    moved = layer(x, CUBE._replace(coords=CUBE.coords + torch.tensor([[3], [5], [7]])))
    close(y, moved, 1e-10)
    least = 1e-6 if rotation == "lrpe_printed" else 1e-4  # the last axis rotates slowly
    for axis in range(3):  # each axis must matter
        other = CUBE.coords.clone()
        other[axis] *= 2
        assert (layer(x, CUBE._replace(coords=other)) - y).abs().max() > least


@pytest.mark.parametrize("rotation", LRPE)
def test_row_sums_do_not_go_with_it(rotation):
    for mixer, normalize in (("lion_s", None), ("lion_s", "pre"), ("linear_transformer", None), ("xlstm", None)):
        message = rf"rotation '{rotation}' does not go with row sums \(normalize '\w+'\); use"
        invalid(message, resolve_mixer, mixer, AttentionConfig(rotation=rotation, normalize=normalize))
    assert resolve_mixer("lion_s", AttentionConfig(rotation=rotation, normalize="none")).rotation == rotation
    assert resolve_mixer("lion_s", AttentionConfig(rotation="rope")).normalize == "sum"
    for mixer in LINEAR:  # no mixer may have conflicting conventions
        resolve_mixer(mixer, AttentionConfig())


def test_more_axes_than_pairs():
    invalid("rotation: head dimension 4 has 2 pairs, the grid has 3 axes", Lrpe(3, 4), X, CUBE)
    message = "rotation needs pairs, got an odd head dimension 3"
    invalid(message, make_mixer, SOFTMAX, 12, 4, AttentionConfig(rotation="lrpe"))


def test_learned_angles_learn_and_are_not_decayed():
    layer = make_mixer("gla", 12, 3, AttentionConfig(rotation="lrpe_learned"))
    grid = grid_layout(2, 3)
    layer(X.float(), grid).square().sum().backward()
    assert layer.rotation.log_scale.shape == (3, 2) and layer.rotation.log_scale.grad.abs().min() > 0
    assert optim_factors(layer)["rotation.log_scale"].weight_decay == 0
