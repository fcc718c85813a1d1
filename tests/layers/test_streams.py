"""Streams of mixers with code of their own (`test_mixers` streams the others), short convolutions and MD-TPE."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lion.layers.convolution import ShortConvolution
from lion.layers.layout import Layout
from lion.layers.mixers import make_mixer
from lion.layers.tpe import TPE

from .helpers import perturbed, saved

DIM = 12
MIXERS = {
    "hydra": {"state": 4},
    "vim": {"state": 3},
    "fox": {},
    "performer": {},
    "xlstm": {"input_gate": "exp"},
    "lightnet": {"share": False},
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
        module = make_mixer(name, DIM, 3, direction="forward", **MIXERS[name])
    else:
        kind, *sizes = OTHERS[name]
        module = kind(*sizes)
    return perturbed(module)


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    """Make tokens of which the later ones are larger: they raise the running maxima of exponentials."""
    x = torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(1)).double()
    x[:, length // 2 :] *= 3
    return x


def stream(module, x: torch.Tensor, pieces: list[int], valid: torch.Tensor | None = None):
    state, outputs, start = module.initial_state(len(x)), [], 0
    for piece in pieces:
        cut = slice(start, start + piece)
        y, state = module.step(x[:, cut], state, valid=None if valid is None else valid[:, cut])
        outputs.append(y)
        start += piece
    return torch.cat(outputs, 1), state


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-11 * max(1, want.abs().max().item()), rtol=0)


@every_module
@torch.no_grad()
def test_steps_are_the_whole_sequence(name):
    module, x = make(name), tokens(20)
    whole = module(x)
    for pieces in ([1] * 20, [3, 1, 9, 7], [20]):
        close(stream(module, x, pieces)[0], whole)
    for prompt in (1, 7, 16):
        y, state = module.prefill(x[:, :prompt])
        rest, _ = module.step(x[:, prompt:], saved(state))
        close(torch.cat([y, rest], 1), whole)
        if name != "fox":  # which keeps all tokens
            for part, first in zip(tree_leaves(state), tree_leaves(module.initial_state(2)), strict=True):
                assert (part.shape, part.dtype) == (first.shape, first.dtype)
                assert part.untyped_storage().nbytes() == part.nbytes  # no view, which would keep the prompt in memory


@every_module
@torch.no_grad()
def test_padding_is_skipped_wherever_it_is(name):
    module, x = make(name), tokens(14, batch=3)
    valid = torch.ones(3, 10, dtype=torch.bool)
    valid[0, 2:5] = False
    valid[1, :4] = False
    valid[1, 8:] = False
    valid[2] = False
    given, new = x[:, :10], x[:, 10:]
    given[~valid] = 0 if "convolution" in name else torch.nan  # a mixer cleans the tokens of its convolution
    prefilled = module.prefill(given, Layout.of(given, valid))
    stepped = stream(module, given, [1, 3, 6], valid)
    for y, state in (prefilled, stepped):
        assert y.isfinite().all()
        rest, _ = module.step(new, state)
        for row, kept in enumerate(valid):
            alone = module(torch.cat([given[row, kept], new[row]])[None])[0]
            close(torch.cat([y[row, kept], rest[row]]), alone)


@every_module
@torch.no_grad()
def test_of_several_segments_the_last_goes_on(name):
    module, x = make(name), tokens(14)
    segments = torch.tensor([[0] * 5 + [1] * 5, [0] * 2 + [1] * 7 + [-1]])
    layout = Layout.of(x[:, :10], segments=segments)
    _, state = module.prefill(layout.clean(x[:, :10]), layout)
    rest, _ = module.step(x[:, 10:], state)
    for row, (first, last) in enumerate(((5, 10), (2, 9))):
        alone = torch.cat([x[row, first:last], x[row, 10:]])[None]
        close(rest[row], module(alone)[0, last - first :])
