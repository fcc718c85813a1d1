import pytest
import torch
import torch.nn.functional as F

from lion.layers.convolution import ShortConvolution, neighbour
from lion.layers.layout import Layout

from .helpers import MASKS, check_padding, doubles, invalid

WAYS = ("forward", "backward", "both")


def convolution(width=4, direction="forward", bias=True):
    torch.manual_seed(width)
    return ShortConvolution(12, width, direction, bias).double()


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
        x = doubles(2, length, 12)
        expected = torch.stack([conv1d(layer, row, direction) for row in x])
        assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("direction", WAYS)
@pytest.mark.parametrize("valid, segments", MASKS)
def test_padding_anywhere_and_segments_are_as_if_alone(direction, valid, segments):
    layer = convolution(4, direction)

    def cleaned(x):
        layout = Layout.of(x, valid, segments)
        return layer(layout.clean(x), layout)

    check_padding(layer, valid, segments, cleaned)


def test_neighbour():
    x = torch.arange(1.0, 7)[None, :, None]
    segments = torch.tensor([[0, 0, -1, 0, 1, 1]])
    layout = Layout.of(x, segments=segments)
    x = layout.clean(x)
    assert neighbour(x, -1, layout).flatten()[segments[0] >= 0].tolist() == [0, 1, 2, 0, 5]
    assert neighbour(x, 1, layout).flatten()[segments[0] >= 0].tolist() == [2, 4, 0, 6, 0]
    assert neighbour(x, 9).eq(0).all() and neighbour(x, 0).equal(x)


def test_width_is_checked():
    invalid("width: expected at least 1, got 0", ShortConvolution, 6, 0)
