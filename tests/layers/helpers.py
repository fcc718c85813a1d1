"""Helpers of tests of layers: tokens, parameters, and checks against oracles and against sequences alone."""

import copy
import io

import pytest
import torch

from lion.config import ConfigError, build
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers import MIXERS, make_mixer
from lion.layers.mixers.base import set_form
from tests.ops.helpers import error

DIM, HEADS = 12, 3
DIRECTIONS = ("both", "forward", "backward")
PADDED = torch.tensor([[False, True, True, True, False, True, True, False], [True] * 5 + [False] * 3])
PACKED = torch.tensor([[-1, 4, 4, 4, 4, 2, 2, 2], [0, 0, 1, 1, 1, -1, 1, 1]])
SHORT_FORMS = (("full", None), ("chunk", 3), ("rnn", 1), ("rnn", 3))  # with borders inside of these
MASKS = ((PADDED, None), (None, PACKED), (PADDED, PACKED))


def tokens(length: int, batch: int = 2, seed: int = 1, dim: int = DIM) -> torch.Tensor:
    """Make float64 tokens whose values are float32 numbers."""
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(seed)).double()


def doubles(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double)


def close(got, want, atol: float | None = None, rtol: float | None = None, msg=None) -> None:
    """Compare tensors, by an absolute tolerance alone if there is no relative one."""
    if atol is not None and rtol is None:
        rtol = 0
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol, msg=msg)


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-11) -> None:
    """Compare with float64, relative to the largest value or 1."""
    close(got.double(), want, tolerance * max(1, want.abs().max().item()))


def saved(state):
    """Return a state after `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stream(module, x: torch.Tensor, pieces: list[int], state=None, valid: torch.Tensor | None = None):
    """Run a layer piece by piece; return all outputs and the last state."""
    if state is None:
        state = module.initial_state(len(x))
    masks = [None] * len(pieces) if valid is None else valid.split(pieces, 1)
    outputs = []
    for piece, mask in zip(x.split(pieces, 1), masks):
        y, state = module.step(piece, state, valid=mask)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def perturbed(layer, spread: float = 0.3):
    """Return the layer in float64; parameters leave their first values, which hide faults, for float32 numbers."""
    layer.double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
        for value in layer.state_dict().values():
            value.copy_(value.float())
    return layer


def weights(layer) -> dict[str, torch.Tensor]:
    return {name: x.detach().double().clone() for name, x in layer.state_dict().items()}


def invalid(message: str, call, *given, **settings) -> None:
    """Check that a call raises a ValueError, or `build` a ConfigError, with this message."""
    with pytest.raises(ConfigError if call is build else ValueError, match=message):
        call(*given, **settings)


def of_rows(oracle, direction: str):
    """Return an oracle of weights and tokens (B, L, dim) from one of a row (L, dim)."""
    return lambda w, x: torch.stack([oracle(w, row, direction) for row in x])


def check_oracle(layer, oracle, x, forms, tolerance: float, narrow: float | None = None) -> None:
    """Check values and all gradients in each form against `oracle(weights, x)`, and values in float32."""
    leaves = weights(layer) | {"x": x.clone()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    want = oracle(leaves, leaves["x"])
    projection = torch.randn(want.shape, generator=torch.Generator().manual_seed(2)).double()
    (want * projection).sum().backward()
    single = copy.deepcopy(layer).float()
    floor = 1e-4 if x.shape[1] > 2 else 1  # one token has no past to depend on
    for form in forms:
        if form:
            set_form(layer, *form)
            set_form(single, *form)
        layer.zero_grad()
        given = x.clone().requires_grad_()
        y = layer(given)
        (y * projection).sum().backward()
        found = error(y, want)
        assert found < tolerance, (form, found)
        for name, leaf in [*layer.named_parameters(), ("x", given)]:
            wanted, got = (torch.zeros_like(leaf) if grad is None else grad for grad in (leaves[name].grad, leaf.grad))
            assert floor == 1 or wanted.abs().max() > floor, f"{name} does not matter"
            found = error(got, wanted, floor)
            assert found < tolerance, (form, name, found)
        with torch.no_grad():
            assert error(layer(x), want) < tolerance, form
            assert narrow is None or error(single(x.float()), want) < narrow, form


def check_finite(layer, x: torch.Tensor, layout: Layout = PLAIN, unused: bool = False) -> torch.Tensor:
    """Check that outputs and all gradients are finite; return the outputs. Parameters may be `unused`."""
    layer.zero_grad()
    given = x.detach().clone().requires_grad_()
    y = layer(given, layout)
    (y + y.square()).sum().backward()
    assert y.isfinite().all() and given.grad.isfinite().all()
    for name, parameter in layer.named_parameters():
        if parameter.grad is None:
            assert unused, name
        else:
            assert parameter.grad.isfinite().all(), name
    return y


def small(mixer: str, form: str, direction: str):
    """Make a layer of 8 features in float64 with perturbed parameters, in one of its forms."""
    layer = make_mixer(mixer, 8, 2, MIXERS[mixer].layer.Config(direction=direction, chunk_size=4))
    if form in layer.forms:
        layer.set_form(form, 4)
    return perturbed(layer)


def check_padding(module, valid, segments, *gives) -> None:
    """Check outputs and all gradients with NaN and infinities in padding against every sequence separately."""
    x = torch.randn(2, 8, 12, dtype=torch.double)
    kept = torch.ones(2, 8, dtype=torch.bool) if valid is None else valid
    ids = torch.zeros(2, 8, dtype=torch.long) if segments is None else segments
    kept = kept & (ids >= 0)
    bad = x.masked_fill(~kept[..., None], torch.nan)
    bad[~kept, ::2] = torch.inf
    weight = torch.randn(2, 8, 12, dtype=torch.double)

    def gradients(run, x):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        total = run(leaf)
        total.backward()
        return {name: p.grad for name, p in module.named_parameters()} | {"x": leaf.grad, "total": total.detach()}

    def alone(x):
        total = 0
        for row in range(2):
            for i in ids[row][kept[row]].unique():
                own = kept[row] & (ids[row] == i)
                total = total + (weight[row, own] * module(x[row, own][None])).sum()
        return total

    want = gradients(alone, x)
    for give in gives or (lambda x: module(x, Layout.of(x, valid, segments)),):

        def padded(x, give=give):
            y = give(x)
            assert y.isfinite().all()
            return (weight * y)[kept].sum()

        got = gradients(padded, bad)
        for name, grad in got.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        assert not got["x"][~kept].any()
