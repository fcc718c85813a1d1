"""Streams of all mixers, of short convolutions and of MD-TPE."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lion.layers.convolution import ShortConvolution
from lion.layers.layout import Layout
from lion.layers.mixers import LINEAR, make_mixer
from lion.layers.mixers.linear import LinearState
from lion.layers.tpe import TPE

from .helpers import DIM, near, perturbed, saved, stream

MIXERS = {name: (name, {}) for name in LINEAR} | {
    "hydra": ("hydra", {"state": 4}),
    "vim": ("vim", {"state": 3}),
    "fox": ("fox", {}),
    "xlstm, exponential": ("xlstm", {"input_gate": "exp"}),
    "lightnet, own decay": ("lightnet", {"share": False}),
}
OTHERS = {
    "tpe": (TPE, DIM, 4),
    "convolution 1": (ShortConvolution, DIM, 1, "forward", True),
    "convolution 2": (ShortConvolution, DIM, 2, "forward", True),
    "convolution 4": (ShortConvolution, DIM, 4, "forward", True),
}
every_module = pytest.mark.parametrize("name", [*MIXERS, *OTHERS])


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name in MIXERS:
        mixer, settings = MIXERS[name]
        module = make_mixer(mixer, DIM, 3, direction="forward", chunk_size=8, **settings)
    else:
        kind, *sizes = OTHERS[name]
        module = kind(*sizes)
    return perturbed(module)


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    """Make tokens of which the later ones are larger: they raise the running maxima of exponentials."""
    x = torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(1)).double()
    x[:, length // 2 :] *= 3
    return x


def check_steps(module, grows: bool = False, narrow: float = 2e-5) -> None:
    """Check steps, prompts with steps, and what a state is: a value of one size (unless it grows) that can be saved."""
    x = tokens(20)
    whole = module(x)

    def check_outputs(y: torch.Tensor, tolerance: float) -> None:  # the later tokens are larger
        near(y[:, :10], whole[:, :10], tolerance)
        near(y[:, 10:], whole[:, 10:], tolerance)

    for own, tolerance in ((module, 1e-11), (copy.deepcopy(module).float(), narrow)):
        given = x.to(next(own.parameters()).dtype)
        for pieces in ([1] * 20, [3, 1, 9, 7], [20]):
            check_outputs(stream(own, given, pieces)[0], tolerance)
        for prompt in (1, 7, 16):
            y, state = own.prefill(given[:, :prompt])
            rest, last = own.step(given[:, prompt:], state)
            check_outputs(torch.cat([y, rest], 1), tolerance)
            one, after = own.step(given[:, prompt : prompt + 1], state)
            for same in (saved(state), state):  # unchanged by the steps above
                assert torch.equal(own.step(given[:, prompt:], same)[0], rest)
                again, after_again = own.step(given[:, prompt : prompt + 1], same)
                assert torch.equal(again, one)
                assert all(map(torch.equal, tree_leaves(after_again), tree_leaves(after)))
            masked = own.prefill(given, Layout.of(given, torch.ones(2, 20, dtype=torch.bool)))[1]
            for held in () if grows else (state, last, after, masked):
                check_size(held, own.initial_state(2))


def check_size(state, empty) -> None:
    for part, first in zip(tree_leaves(state), tree_leaves(empty), strict=True):
        assert (part.shape, part.dtype) == (first.shape, first.dtype)
        assert part.untyped_storage().nbytes() == part.nbytes  # not a view, which would keep the prompt in memory


def check_padded_steps(module, hole: float = torch.nan) -> torch.Tensor:
    """Check padding between tokens, at both sides, left and right, and a row of padding alone.

    Returns:
        The outputs of the prompt at padding.
    """
    x = tokens(14, batch=5)
    valid = torch.ones(5, 10, dtype=torch.bool)
    valid[0, 2:5] = False
    valid[1, :4] = False
    valid[1, 8:] = False
    valid[2] = False
    valid[3, :6] = False
    valid[4, 7:] = False
    given = x[:, :10]
    new = x[:, 10:]
    given[~valid] = hole
    prefilled = module.prefill(given, Layout.of(given, valid))
    stepped = stream(module, given, [1, 3, 6], valid=valid)
    for y, state in (prefilled, stepped):
        assert y.isfinite().all()
        if isinstance(state, LinearState):
            assert state.position.tolist() == valid.sum(1).tolist()
        rest, _ = module.step(new, state)
        for row, kept in enumerate(valid):
            alone = module(torch.cat([given[row, kept], new[row]])[None])[0]
            near(torch.cat([y[row, kept], rest[row]]), alone)
    return prefilled[0][~valid]


@every_module
@torch.no_grad()
def test_steps_are_the_whole_sequence(name):
    check_steps(make(name), grows=name == "fox", narrow=5e-5 if "exponential" in name else 2e-5)


@every_module
@torch.no_grad()
def test_padding_is_skipped_wherever_it_is(name):
    module = make(name)
    y = check_padded_steps(module, 0 if "convolution" in name else torch.nan)  # a mixer cleans these tokens
    if name in LINEAR:
        assert torch.equal(y, module.proj.bias.expand_as(y))  # 0 before the projection


@pytest.mark.parametrize("name", LINEAR)
def test_an_empty_state_holds_a_matrix_of_keys_and_values(name):
    module = make(name)
    state = module.initial_state(2)
    keys = module.count if name == "performer" else DIM // 3
    assert state.S.shape == (2, 3, keys, DIM // 3)
    assert len(state.decay) == (1 if name in ("lightnet", "performer") else 0)
    assert not any(part.any() for part in (state.S, state.z, state.position))


@every_module
@torch.no_grad()
def test_of_several_segments_the_last_goes_on(name):
    module = make(name)
    x = tokens(14)
    segments = torch.tensor([[0] * 5 + [1] * 5, [0] * 2 + [1] * 7 + [-1]])
    layout = Layout.of(x[:, :10], segments=segments)
    _, state = module.prefill(layout.clean(x[:, :10]), layout)
    rest, _ = module.step(x[:, 10:], state)
    for row, (first, last) in enumerate(((5, 10), (2, 9))):
        alone = torch.cat([x[row, first:last], x[row, 10:]])[None]
        near(rest[row], module(alone)[0, last - first :])
