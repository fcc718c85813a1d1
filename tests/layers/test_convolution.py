import pytest
import torch
import torch.nn.functional as F

from lion.layers.convolution import ShortConvolution, neighbour
from lion.layers.layout import Layout

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
        x = torch.randn(2, length, 6, dtype=torch.double)
        expected = torch.stack([conv1d(layer, row, direction) for row in x])
        assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("direction", WAYS)
def test_padding_anywhere_and_segments_are_as_if_alone(direction):
    """Compare each document with the same document without its neighbours and padding; gradients as well."""
    layer, x = convolution(4, direction), torch.randn(3, 12, 6, dtype=torch.double)
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


@pytest.mark.parametrize("width", [1, 2, 4])
def test_streams(width):
    """Check prefill and steps of ragged pieces with padding against the whole, also after packed documents."""
    layer, x = convolution(width), torch.randn(2, 9, 6, dtype=torch.double)
    whole = layer(x)
    y, state = layer.prefill(x[:, :2])
    pieces = [y]
    for piece in (x[:, 2:3], x[:, 3:7], x[:, 7:]):
        y, state = layer.step(piece, state)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
    valid = torch.tensor([[True, False, True, False], [False, False, False, True]])
    piece = torch.randn(2, 4, 6, dtype=torch.double).masked_fill(~valid[..., None], 0)
    y, after = layer.step(piece, state, valid)
    for b, keep in enumerate(valid):
        expected = layer(torch.cat([x[b], piece[b, keep]])[None])[0, 9:]
        assert torch.allclose(y[b, keep], expected, rtol=0, atol=1e-12)
        assert torch.equal(after[b], torch.cat([x[b], piece[b, keep]])[len(x[b]) + int(keep.sum()) - width + 1 :])
    segments = torch.tensor([[0] * 7 + [1] * 2, [0] * 4 + [1] * 4 + [-1]])
    layout = Layout.of(x, segments=segments)
    _, packed = layer.prefill(layout.clean(x), layout)
    for b, (first, last) in enumerate(((7, 9), (4, 8))):
        assert torch.equal(packed[b], layer.prefill(x[b : b + 1, first:last])[1][0])


def test_neighbour():
    x = torch.arange(1.0, 7)[None, :, None]
    segments = torch.tensor([[0, 0, -1, 0, 1, 1]])
    layout = Layout.of(x, segments=segments)
    x = layout.clean(x)
    assert neighbour(x, -1, layout).flatten()[segments[0] >= 0].tolist() == [0, 1, 2, 0, 5]
    assert neighbour(x, 1, layout).flatten()[segments[0] >= 0].tolist() == [2, 4, 0, 6, 0]
    assert neighbour(x, 9).eq(0).all() and neighbour(x, 0).equal(x)


def test_width_is_checked():
    with pytest.raises(ValueError, match="width: expected at least 1, got 0"):
        ShortConvolution(6, 0)
