import pytest
import torch

from lion.layers import AttentionConfig
from lion.layers.block import DropPath, PreNorm
from tests.layers.test_attention import PACKED, PADDED, check_padding


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    layer, x = DropPath(0.25), torch.ones(4000, 2, 3)
    y = layer(x)
    per_sample = y[:, 0, 0]
    assert set(per_sample.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (y == per_sample[:, None, None]).all()
    assert abs(y.mean() - 1) < 0.03
    assert torch.equal(layer.eval()(x), x)
    assert "rate" not in layer.state_dict()


def test_variants_of_the_block():
    x = torch.randn(2, 5, 12)
    for mlp in ("mlp", "glu"):
        for norm in ("layernorm", "rmsnorm"):
            block = PreNorm(12, 3, mixer="lion_d", attention=AttentionConfig(), mlp=mlp, norm=norm, drop_path=0.1)
            block(x).sum().backward()
            assert all(p.grad is not None for p in block.parameters())


@pytest.mark.parametrize("mixer", ["softmax", "lion_s"])
@pytest.mark.parametrize("valid, segments", [(PADDED, None), (None, PACKED), (PADDED, PACKED)])
def test_what_padding_holds_reaches_no_parameter(mixer, valid, segments):
    """Neither through the residual, which goes around the attention."""
    torch.manual_seed(0)
    for mlp, norm in (("mlp", "layernorm"), ("glu", "rmsnorm")):
        block = PreNorm(12, 3, mixer=mixer, attention=AttentionConfig(), mlp=mlp, norm=norm).double()
        check_padding(block, valid, segments)
