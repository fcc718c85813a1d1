"""Bad arguments raise a ValueError that names the argument; dropout."""

import pytest
import torch

from lion.ops import initial_state, linear_attention, linear_attention_parts, step

from .helpers import DECAYS, assert_close, make

B, H, L, D, E = 2, 3, 5, 4, 6
BAD_TENSORS = {
    "q": [torch.rand(B, L, D), torch.ones(B, H, L, D, dtype=torch.int64), torch.rand(B, H, 0, D)],
    "k": [
        torch.rand(B, H, L, D + 1),
        torch.rand(B, H, L + 1, D),
        torch.rand(B, 1, L, D),
        torch.rand(B, H, L, D).double(),
    ],
    "v": [torch.rand(B, H, L + 1, E), torch.rand(B, H, L), torch.rand(1, H, L, E), torch.rand(B, H, L, E).bfloat16()],
    "log_decay": [
        -torch.rand(B, L, H),
        -torch.rand(H + 1),
        -torch.rand(1),
        torch.tensor(-1.0),
        -torch.rand(B, H),
        -torch.rand(1, H, L),
        -torch.ones(H, dtype=torch.int64),
    ],
    "valid": [torch.ones(B, L), torch.ones(L, dtype=torch.bool), torch.ones(B, L + 1, dtype=torch.bool)],
    "segments": [torch.zeros(B, L), torch.zeros(L, dtype=torch.int64), torch.zeros(B, L, dtype=torch.bool)],
}
BAD_CHOICES = [
    dict(form="rotate"),
    dict(gate="eq14"),
    dict(direction="bidirectional"),
    dict(normalize="softmax"),
    dict(normalize=True),
    dict(chunk_size=0),
    dict(chunk_size=-1),
    dict(dropout_p=0.1, form="chunk"),
    dict(dropout_p=0.1, form="rnn"),
]


def good(**changes):
    q, k, v, log_decay = make("S", L, dtype=torch.float32)
    return dict(q=q, k=k, v=v, log_decay=log_decay) | changes


def call(function, tensors, **arguments):
    return function(
        tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), tensors.pop("log_decay"), **tensors, **arguments
    )


@pytest.mark.parametrize("form", ("full", "chunk", "rnn", "auto"))
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors(name, form):
    for bad in BAD_TENSORS[name]:
        for function in (linear_attention, linear_attention_parts):
            with pytest.raises(
                ValueError, match=rf"^{name}: .*got \w+ {str(tuple(bad.shape))[:-1]}".replace("(", r"\(")
            ):
                call(function, good(**{name: bad}), form=form)


def test_no_tokens():
    empty = torch.rand(B, H, 0, D)
    with pytest.raises(ValueError, match=r"^q: .*at least one token"):
        linear_attention(empty, empty, torch.rand(B, H, 0, E))


@pytest.mark.parametrize("bad", BAD_CHOICES, ids=str)
def test_choices(bad):
    name = next(iter(bad))
    with pytest.raises(ValueError, match=rf"^{name}: .*got"):
        call(linear_attention, good(), **bad)


@pytest.mark.parametrize("p", (-0.1, 1.5))
def test_dropout_range(p):
    for decay in ("lit", "S"):
        with pytest.raises(ValueError, match="dropout"):
            linear_attention(*make(decay, L), dropout_p=p)


def test_step():
    tensors = good()
    state = initial_state(tensors["k"], tensors["v"])
    for name in ("q", "k", "v", "log_decay"):
        for bad in BAD_TENSORS[name]:
            with pytest.raises(ValueError, match=f"^{name}: "):
                call(lambda *x, **y: step(state, *x, **y), good(**{name: bad}))
    for bad in (dict(gate="eq14"), dict(normalize="softmax")):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}: "):
            call(lambda *x, **y: step(state, *x, **y), good(), **bad)


# Dropout


@pytest.mark.parametrize("decay", DECAYS)
def test_dropout(decay):
    inputs = make(decay, 8, batch=1, heads=1)
    plain = linear_attention(*inputs)

    def dropped(copies: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        many = (x if x is None or x.dim() == 1 else x.expand(copies, *x.shape[1:]) for x in inputs)
        return linear_attention(*many, dropout_p=0.5)

    assert torch.equal(dropped(1, 0), dropped(1, 0))
    assert not torch.equal(dropped(1, 0), dropped(1, 1))
    assert (dropped(1, 0) - plain).abs().max() > 0.1 * plain.abs().max()
    # The row sum is taken before the drop, so the mean of n draws is off by sd / sqrt(n); sd is at most max |v|
    mean = dropped(20_000, 0).mean(0, keepdim=True)
    assert_close(mean, plain, 5 * inputs.v.abs().max().item() / plain.abs().max().item() / 20_000**0.5)


def test_no_dropout_no_randomness():
    inputs = make("S", 8)
    assert torch.equal(linear_attention(*inputs, dropout_p=0.0), linear_attention(*inputs))
