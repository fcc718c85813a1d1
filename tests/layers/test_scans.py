"""Scan orders, and layers with several scans."""

import pytest
import torch

from lion.layers.layout import SCANS, Layout, grid_layout
from lion.layers.mixers import LINEAR, SOFTMAX, AttentionConfig, LionAttention, resolve_mixer
from lion.layers.mixers.base import set_form
from lion.ops import SCAN_MERGES
from tests.ops import test_multiscan
from tests.ops.helpers import Inputs

from .helpers import close, doubles, invalid
from .oracle_parts import shifted

SNAKES = ("row_snake", "column_snake")
S = [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11, 15, 14, 13, 12]  # the 4 x 4 orders of the curves in the released code
SR = [0, 4, 8, 12, 13, 9, 5, 1, 2, 6, 10, 14, 15, 11, 7, 3]


def test_orders_of_the_released_code():
    grid = grid_layout(4, 4, SNAKES, special=0)
    assert grid.orders.tolist() == [S, SR]
    assert grid_layout(4, 4, SNAKES).orders.tolist() == [[0, *(1 + i for i in s)] for s in (S, SR)]  # cls comes first
    assert grid_layout(4, 4).orders is None


@pytest.mark.parametrize("name", SCANS)
def test_every_order_visits_all_tokens_once(name):
    for height, width, extra in ((1, 1, 1), (1, 5, 0), (5, 1, 1), (2, 3, 3), (7, 4, 0), (8, 8, 3)):
        grid = grid_layout(height, width, (name, name), extra)
        order = grid.orders[0]
        patches = height * width
        assert order.sort().values.tolist() == list(range(extra + patches))
        assert order[:extra].tolist() == list(range(extra))
        assert grid.special.tolist() == [True] * extra + [False] * patches
        if name != "row_major":  # a snake moves between neighbouring patches
            places = grid.coords[:, order[extra:]]
            assert (places.diff(dim=1).abs().sum(0) == 1).all()


def layer_of(mixer: str, **settings) -> LionAttention:
    torch.manual_seed(0)
    layer = LionAttention(12, 3, mixer, scans=SNAKES, **settings).double()
    for decay in layer.decays:  # very different decays
        for parameter in decay.parameters():
            torch.nn.init.normal_(parameter)
    return layer


def oracle(layer: LionAttention, x: torch.Tensor, grid, **how) -> torch.Tensor:
    """Compute a layer from its definition, with decays from the weights alone."""
    q, k, v = layer.qkv(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
    decays = []
    for decay in layer.decays:
        if hasattr(decay, "a"):
            lam = torch.sigmoid(decay.a)
        else:
            lam = torch.sigmoid(x @ decay.gate.weight.T + decay.gate.bias).mT.clone()
            lam[:, :, 0] = 1  # cls
        decays.append(lam.log())
    y = test_multiscan.oracle(Inputs(shifted(q), shifted(k), v), decays, grid.orders, **how)
    return layer.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mixer", ["lion_d", "lion_s"])
@pytest.mark.parametrize("merge", SCAN_MERGES)
@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
def test_layer_is_the_definition_in_every_form(mixer, merge, direction):
    how = dict(scan_merge=merge, direction=direction, decay_convention="source")
    layer = layer_of(mixer, **how)
    grid = grid_layout(4, 5, SNAKES)
    x = doubles(2, 21, 12)
    with torch.no_grad():
        want = oracle(layer, x, grid, **how)
        for form, size in (("auto", 64), ("full", 64), ("chunk", 4), ("chunk", 64), ("rnn", 1), ("rnn", 16)):
            set_form(layer, form, size)
            assert (layer(x, grid) - want).abs().max() < 1e-12, (form, size)


@pytest.mark.parametrize("mixer", ["lion_d", "lion_s"])
@pytest.mark.parametrize("merge", SCAN_MERGES)
def test_every_scan_learns_a_decay_of_its_own(mixer, merge):
    layer = layer_of(mixer, scan_merge=merge)
    grid = grid_layout(3, 3, SNAKES)
    layer(doubles(2, 10, 12), grid).square().sum().backward()
    grads = [torch.cat([p.grad.flatten() for p in d.parameters()]) for d in layer.decays]
    assert all(g.abs().max() > 1e-8 for g in grads) and not torch.allclose(*grads)


def test_one_scan_in_another_order():
    plain, snake = (LionAttention(12, 3, "lion_s", scans=s).double() for s in (("row_major",), ("row_snake",)))
    snake.load_state_dict(plain.state_dict())
    grid = grid_layout(4, 4, ("row_snake",))
    x = doubles(2, 17, 12)
    order = grid.orders[0]
    close(snake(x, grid)[:, order], plain(x[:, order], grid_layout(4, 4)))


def test_other_mixers_have_one_scan():
    for mixer in (SOFTMAX, *LINEAR):
        if mixer not in ("lion_d", "lion_s", "lion_s_vector"):
            invalid(f"scans: not available with mixer '{mixer}'", resolve_mixer, mixer, AttentionConfig(scans=SNAKES))


def test_bad_scans():
    layer = layer_of("lion_s")
    x = doubles(1, 10, 12)
    causal = layer_of("lion_s", direction="forward")
    unordered = "layout: scans row_snake, column_snake need the orders"
    packed = grid_layout(3, 3, SNAKES).masked(x, segments=torch.zeros(1, 10, dtype=torch.long))
    unknown, stream = "scans: unknown scan 'snake', did you mean 'row_snake'", "scans: a stream has one order"
    invalid(unknown, resolve_mixer, "lion_s", AttentionConfig(scans=("snake",)))
    invalid("scans: expected at least one", resolve_mixer, "lion_s", AttentionConfig(scans=()))
    invalid(unknown, grid_layout, 3, 3, ("snake",))
    invalid("expected 'row_major' with 2 patches before the special", grid_layout, 3, 3, SNAKES, before=2)
    invalid(unordered, layer, x, Layout())
    invalid(unordered, layer, x, grid_layout(3, 3))
    invalid(unordered, layer, x, grid_layout(3, 3, ("row_snake",)))
    invalid("segments: several scans", layer, x, packed)
    invalid(stream, causal.prefill, x)
    invalid(stream, causal.step, x, causal.initial_state(1))
