import pytest
import torch
import torch.nn.functional as F

from lion.layers.blocks import BLOCKS
from lion.layers.blocks.adaln import AdaLNZero
from lion.layers.blocks.base import MLPS, DropPath, PreNorm
from lion.layers.blocks.post_norm import PostNorm
from lion.layers.layout import PLAIN
from lion.layers.mixers import AttentionConfig

from .helpers import MASKS, check_padding, close, doubles, invalid


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    layer = DropPath(0.25)
    x = torch.ones(4000, 2, 3)
    y = layer(x)
    per_sample = y[:, 0, 0]
    assert set(per_sample.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (y == per_sample[:, None, None]).all()
    assert abs(y.mean() - 1) < 0.03
    assert torch.equal(layer.eval()(x), x)
    assert "rate" not in layer.state_dict()
    assert not DropPath(1.0)(x).any()


@pytest.mark.parametrize("kind", BLOCKS.values())
def test_variants_of_the_block(kind):
    x = torch.randn(2, 5, 12)
    for mlp in MLPS:
        for norm in ("layernorm", "rmsnorm"):
            block = kind(12, 3, mixer="lion_d", attention=AttentionConfig(), mlp=mlp, norm=norm, drop_path=0.1)
            block(x, context=torch.randn(2, 12)).sum().backward()
            assert all(p.grad is not None for p in block.parameters())


def moved(block):
    """Return the block with modulations that are not 0."""
    for part in (block.before_mixer, block.after_mixer):
        torch.nn.init.normal_(part.weight, std=0.3)
    return block


class Told(torch.nn.Module):
    """A block with a context that is shared by all rows."""

    def __init__(self, block):
        super().__init__()
        self.block, self.context = moved(block), torch.nn.Parameter(doubles(1, 12))

    def forward(self, x, layout=PLAIN):
        return self.block(x, layout, self.context)


def adaln(**settings):
    torch.manual_seed(0)
    return AdaLNZero(12, 3, **{"mixer": "lion_s", "attention": AttentionConfig(), **settings})


@torch.no_grad()
def test_adaln_zero_as_it_is_written():
    """Check AdaLN-Zero, whose one linear layer in DiT is split here: modulation before and after the mixer."""
    block = adaln(mlp="mlp_tanh")
    x = torch.randn(2, 5, 12)
    context = torch.randn(2, 12)
    assert torch.equal(block(x, context=context), x)  # it starts as the identity
    moved(block)
    shift, scale = block.before_mixer.vectors(context)
    gate, shift2, scale2, gate2 = block.after_mixer.vectors(context)
    y = x + gate * block.attention(F.layer_norm(x, (12,), eps=1e-6) * (1 + scale) + shift)
    y = y + gate2 * block.mlp(F.layer_norm(y, (12,), eps=1e-6) * (1 + scale2) + shift2)
    close(block(x, context=context), y)
    assert gate.shape == (2, 1, 12)
    names = {name for name, _ in block.named_parameters()}
    assert not any("norm" in name for name in names)


def test_a_norm_that_needs_weights_is_refused():
    invalid("'batchnorm' always has learned weights, block 'adaln_zero' takes layernorm or rm", adaln, norm="batchnorm")


@torch.no_grad()
def test_where_the_norms_stand():
    x = torch.randn(2, 5, 12)
    for kind in (PreNorm, PostNorm):
        block = kind(12, 3, mixer="lion_d", attention=AttentionConfig())
        for norm in (block.norm1, block.norm2):
            norm.weight.normal_(), norm.bias.normal_()
        mix = block.attention
        mlp = block.mlp
        norm1 = block.norm1
        norm2 = block.norm2
        if kind is PreNorm:
            middle = x + mix(norm1(x))
            expected = middle + mlp(norm2(middle))
        else:
            middle = norm1(x + mix(x))
            expected = norm2(middle + mlp(middle))
        close(block(x), expected)


@torch.no_grad()
def test_blocks_without_an_mlp():
    x = torch.randn(2, 5, 12)
    context = torch.randn(2, 12)
    for name, kind in BLOCKS.items():
        block = kind(12, 3, mixer="lion_d", attention=AttentionConfig(), mlp="none")
        mix = block.attention
        norm = block.norm1
        if kind is PostNorm:
            expected = norm(x + mix(x))
        elif kind is AdaLNZero:
            (gate,), (shift, scale) = (part.vectors(context) for part in (moved(block).after_mixer, block.before_mixer))
            expected = x + gate * mix(norm(x) * (1 + scale) + shift)
        else:
            expected = x + mix(norm(x))
        close(block(x, context=context), expected)
        assert not any(part in key for key in block.state_dict() for part in ("mlp", "norm2")), name


@pytest.mark.parametrize("kind", BLOCKS.values())
@torch.no_grad()
def test_blocks_stream(kind):
    block = kind(12, 3, mixer="lion_s", attention=AttentionConfig(direction="forward")).double()
    if kind is AdaLNZero:
        moved(block)
    x = doubles(2, 8, 12)
    context = doubles(2, 12)
    start, state = block.prefill(x[:, :5], context=context)
    end, _ = block.step(x[:, 5:], state, context=context)
    close(torch.cat([start, end], 1), block(x, context=context), 1e-10)


@pytest.mark.parametrize("kind", BLOCKS.values())
@pytest.mark.parametrize("mixer", ["softmax", "lion_s"])
@pytest.mark.parametrize("valid, segments", MASKS)
def test_contents_of_padding_do_not_change_gradients(kind, mixer, valid, segments):
    """Check that padding reaches no gradient of a parameter, not even through the residual connection."""
    for mlp, norm in (("mlp", "layernorm"), ("glu", "rmsnorm")):
        block = kind(12, 3, mixer=mixer, attention=AttentionConfig(), mlp=mlp, norm=norm).double()
        if kind.conditional:
            block = Told(block)
        check_padding(block, valid, segments)


def test_the_tanh_of_gpt2_is_near_the_exact_gelu_and_not_the_same():
    exact = MLPS["mlp"](12, 24)
    near = MLPS["mlp_tanh"](12, 24)
    near.load_state_dict(exact.state_dict())
    x = 3 * torch.randn(5, 12)
    hidden = exact.fc1(x)
    written = hidden / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    close(near(x), near.fc2(written))
    assert 1e-5 < (near(x) - exact(x)).abs().max() < 1e-2
