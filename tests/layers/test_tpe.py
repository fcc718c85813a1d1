"""MD-TPE against Eq. 8 of LightNet, computed by a double loop: values, gradients, padding, segments, grids, streams."""

import itertools

import pytest
import torch

from lion.layers.layout import Layout, grid_layout
from lion.layers.optim_factors import optim_factors
from lion.layers.tpe import CHUNK, TPE

from .helpers import MASKS, check_finite, check_padding, close, invalid


def tpe(dim=3, states=4, grid=None) -> TPE:
    torch.manual_seed(0)
    module = TPE(dim, states, grid).double()
    with torch.no_grad():  # signs and decays of all magnitudes
        module.weight.normal_()
        module.decay.normal_(std=2)
    return module


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def oracle(module: TPE, x: torch.Tensor) -> torch.Tensor:
    """Compute Eq. 8 for x (B, n_1, .., n_k, dim), position by position."""
    decay = torch.sigmoid(module.decay)
    places = list(itertools.product(*map(range, x.shape[1:-1])))
    weight = module.weight * (1 - decay)
    rows = []
    for place in places:
        y = 0
        for axis, n in enumerate(place):
            for m in range(n + 1):
                there = (*place[:axis], m, *place[axis + 1 :])
                kernel = (weight[axis] * decay[axis] ** (n - m)).sum(-1)  # (dim,)
                y = y + kernel * x[(slice(None), *there)]
        rows.append(y)
    return torch.stack(rows, 1).view(x.shape)


def check(module, x, got, want) -> None:
    """Check values and gradients of `got(x)` against `want(x)`."""
    grads = []
    for run in (got, want):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        found = torch.autograd.grad((y * tokens(*y.shape)).sum(), [leaf, *module.parameters()])
        grads.append([y, *found])
    for a, b in zip(*grads):
        close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
@pytest.mark.slow
def test_one_axis_is_the_double_loop(length):
    module = tpe()
    check(module, tokens(2, length, 3), module, lambda x: oracle(module, x))


@pytest.mark.parametrize("grid", [(5,), (3, 4), (1, 6), (2, 3, 4), (2, CHUNK + 3)])
@pytest.mark.slow
def test_a_grid_is_the_double_loop(grid):
    module = tpe(grid=grid)
    places = torch.cartesian_prod(*map(torch.arange, grid)).view(-1, len(grid)).mT
    layout = Layout(coords=places)
    check(module, tokens(2, places.shape[1], 3), lambda x: module(x, layout), lambda x: flat(module, x, grid))


def flat(module, x, grid):
    return oracle(module, x.unflatten(1, grid)).flatten(1, len(grid))


def test_tokens_of_a_grid_in_any_order_with_cls_and_holes():
    """Check that tokens without coordinates are unchanged, and that empty or padded positions contribute nothing."""
    module = tpe(grid=(3, 4))
    layout = grid_layout(3, 4, special=2)
    x = tokens(2, 14, 3)
    whole = module(x, layout)
    assert torch.equal(whole[:, :2], x[:, :2])
    close(whole[:, 2:], flat(module, x[:, 2:], (3, 4)))
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    close(module(x[:, order], Layout(coords=layout.coords[:, order])), whole[:, order])
    valid = torch.ones(2, 14, dtype=torch.bool)
    valid[:, 5::3] = False
    kept = valid[0]
    empty = x.masked_fill(~valid[..., None], 0)
    want = flat(module, empty[:, 2:], (3, 4))[:, kept[2:]]
    bad = x.masked_fill(~valid[..., None], torch.nan)
    close(module(bad, layout.masked(x, valid))[:, kept][:, 2:], want)
    close(module(x[:, kept], Layout(coords=layout.coords[:, kept]))[:, 2:], want)


@pytest.mark.parametrize("valid, segments", MASKS)
def test_padding_and_segments_are_as_if_alone(valid, segments):
    module = tpe(dim=12)
    gives = [lambda x: module(x, Layout.of(x, valid, segments))]
    gives.append(lambda x: module.prefill(x, Layout.of(x, valid, segments))[0])
    check_padding(module, valid, segments, *gives)


def ragged(length):
    """Make segments of one token to several chunks, with padding at both ends, inside and between, and an empty row."""
    segments = torch.full((3, length), 5)
    segments[0, : CHUNK + 7], segments[0, CHUNK + 7] = 2, 3
    segments[1, :9], segments[1, 80:90], segments[1, -4:] = -1, -1, -1
    segments[1, 100:] = segments[1, 100:].where(segments[1, 100:] < 0, 6)
    segments[2] = -1
    return segments


@torch.inference_mode()
@pytest.mark.slow
def test_segments_over_chunks_and_what_goes_on_from_the_last():
    module = tpe()
    x = tokens(3, 230, 3)
    new = tokens(3, 5, 3)
    segments = ragged(230)
    layout = Layout.of(x, segments=segments)
    y, state = module.prefill(x, layout)
    close(module(x, layout), y)
    later, _ = module.step(new, state)
    for row in range(2):
        for i in segments[row].unique().tolist():
            kept = segments[row] == i
            if i >= 0:
                close(y[row, kept], oracle(module, x[row, kept][None])[0])
        alone = oracle(module, torch.cat([x[row, kept], new[row]])[None])  # `kept` of the last segment
        close(later[row], alone[0, -5:])
    close(state[2], torch.zeros_like(state[2]))


def test_what_comes_in_comes_through_at_the_start():
    """Check the initialisation: a position has weight 1 for itself and 0.1 for its neighbour."""
    module = TPE(64, 64, (14, 14))
    lam = torch.sigmoid(module.decay)
    assert 0.0999 < lam.min() < 0.1001 and 0.99 < lam.max() < 0.9991
    x = torch.randn(8, 196, 64)
    y = module(x, grid_layout(14, 14, special=0))
    assert 0.95 < y.std() < 1.05 and torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1] > 0.99


def test_a_step_of_one_size_changes_no_more_where_much_is_remembered():
    """Check that the gradient of a weight is that of a running average, whatever the memory of the state."""
    module = TPE(8, 64).double()
    x = torch.ones(1, 4000, 8).double()
    module(x)[:, -1].sum().backward()
    close(module.weight.grad, torch.ones(1, 8, 64).double(), 0.03)


def test_parameters_of_the_paper():
    """Check Table 1: 0.10 M parameters at dim 384, 0.20 M at 768, in two dimensions; without weight decay."""
    for dim, millions in ((384, 0.10), (768, 0.20)):
        module = TPE(dim, 64, (14, 14))
        assert round(sum(p.numel() for p in module.parameters()) / 1e6, 2) == millions
    assert {name: mark.weight_decay for name, mark in optim_factors(module).items()} == {"weight": 0, "decay": 0}


def test_long_and_extreme_sums_stay_finite():
    module = TPE(2, 4)
    x = torch.ones(1, 5000, 2)
    with torch.no_grad():
        module.decay.copy_(torch.tensor([-200.0, -1.0, 12.0, 200.0]))
        module.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    y = check_finite(module, x)
    lam = torch.sigmoid(module.decay.double())
    want = (module.weight[0] * (1 - lam[0] ** 5000)).sum(-1)  # lambda near 0: full weight; lambda near 1: weight near 0
    close(y[0, -1].double(), want, rtol=1e-4, atol=0)


def test_sums_are_float32_beside_narrow_tokens():
    module = TPE(3, 4)
    x = tokens(1, 200, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = module.prefill(x)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    close(y, module(x.float()).bfloat16(), 0)


def test_coordinates_that_do_not_fit():
    coords = grid_layout(2, 3).coords
    x = tokens(1, 7, 3)
    for changed, message in (
        (None, r"a grid of 2 x 3 needs coords \(2, 7\), got None"),
        (coords[:1], r"a grid of 2 x 3 needs coords \(2, 7\), got \(1, 7\)"),
        (coords[:, 1:], r"needs coords \(2, 7\), got \(2, 6\)"),
        (coords + (coords == 2), r"coords \(0, 3\) do not fit a grid of 2 x 3: outside"),
        (coords.where(coords != 1, -1), r"coords \(0, -1\) do not fit a grid of 2 x 3: outside"),
        (coords.where(coords != 2, 1), r"coords \(0, 1\) do not fit a grid of 2 x 3: two tokens at one position"),
    ):
        invalid(message, tpe(grid=(2, 3)), x, Layout(coords=changed))


def test_what_is_wrong_is_named():
    module = tpe(grid=(2, 3))
    x = tokens(1, 7, 3)
    packed = grid_layout(2, 3).masked(x, segments=torch.zeros(1, 7, dtype=torch.long))
    invalid("tpe: these tokens have coordinates on a grid", tpe(), x, grid_layout(2, 3))
    invalid("segments: a grid has one sample per row", module, x, packed)
    invalid("tpe: a grid is processed as a whole", module.prefill, x)
    invalid("tpe: a grid is processed as a whole", module.step, x, module.initial_state(1))
    invalid(r"x: expected tokens \(B, L >= 1, dim\), got shape \(2, 0, 4\)", TPE(4, 4), torch.zeros(2, 0, 4))


def test_packed_sequences_without_data():
    """Check packed sequences on meta tensors, with which `show` counts memory."""
    segments = torch.zeros(2, 2 * CHUNK, dtype=torch.long, device="meta")
    x = torch.empty(2, 2 * CHUNK, 3, device="meta")
    assert TPE(3, 4).to("meta")(x, Layout.of(x, segments=segments)).shape == x.shape
