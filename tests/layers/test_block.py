import torch

from lion.layers.attention import AttentionConfig
from lion.layers.block import Block, DropPath


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
            block = Block(12, 3, mixer="lion_d", attention=AttentionConfig(), mlp=mlp, norm=norm, drop_path=0.1)
            block(x).sum().backward()
            assert all(p.grad is not None for p in block.parameters())
