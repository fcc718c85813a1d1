import pytest
import torch
import torch.nn.functional as F

from lion.layers.convolution import ShortConvolution, neighbour
from lion.layers.layout import Layout

from .helpers import doubles, refused

WAYS = ("forward", "backward", "both")


def convolution(width=4, direction="forward", bias=True):
    torch.manual_seed(width)
    return ShortConvolution(6, width, direction, bias).double()


def conv1d(layer, x, direction):
    """Compute the same with PyTorch's convolution, of a row x (L, C)."""
    width = len(layer.weight)
    before = {"forward": width - 1, "backward": 0, "both": width // 2}[direction]
    padded = F.pad(x.T[None], (before, width - 1 - before))
    return F.conv1d(padded, layer.weight.T[:, None], layer.bias, groups=x.shape[1])[0].T


@pytest.mark.parametrize("direction", WAYS)
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_equals_a_depthwise_convolution(width, direction):
    layer = convolution(width, direction)
    for length in (1, 3, 11):
        x = doubles(2, length, 6)
        expected = torch.stack([conv1d(layer, row, direction) for row in x])
        assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("direction", WAYS)
def test_padding_anywhere_and_segments_are_as_if_alone(direction):
    """Compare each document with the same document without its neighbours and padding; gradients as well."""
    layer, x = convolution(4, direction), doubles(3, 12, 6)
    segments = torch.tensor(
        [[0] * 5 + [1] * 7, [-1, -1, *[0] * 6, *[1] * 3, -1], [0, -1, 0, 0, -1, 0, 1, 1, -1, 1, 1, 1]]
    )
    layout = Layout.of(x, segments=segments)
    x.requires_grad_()
    y = layer(layout.clean(x), layout)
    weights = torch.randn_like(y)
    (gradient,) = torch.autograd.grad((y * weights)[segments >= 0].sum(), x)
    for b, row in enumerate(segments):
        for s in (0, 1):
            alone = x[b, row == s].detach().requires_grad_()
            expected = conv1d(layer, alone, direction)
            assert torch.allclose(y[b, row == s], expected, rtol=0, atol=1e-12)
            (expected,) = torch.autograd.grad((expected * weights[b, row == s]).sum(), alone)
            assert torch.allclose(gradient[b, row == s], expected, rtol=0, atol=1e-12)


def test_neighbour():
    x = torch.arange(1.0, 7)[None, :, None]
    segments = torch.tensor([[0, 0, -1, 0, 1, 1]])
    layout = Layout.of(x, segments=segments)
    x = layout.clean(x)
    assert neighbour(x, -1, layout).flatten()[segments[0] >= 0].tolist() == [0, 1, 2, 0, 5]
    assert neighbour(x, 1, layout).flatten()[segments[0] >= 0].tolist() == [2, 4, 0, 6, 0]
    assert neighbour(x, 9).eq(0).all() and neighbour(x, 0).equal(x)


def test_width_is_checked():
    refused("width: expected at least 1, got 0", ShortConvolution, 6, 0)
