"""Validation: invalid arguments raise a ValueError that names the argument; and dropout."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lion.ops import full, initial_state, linear_attention, linear_attention_parts, prefill, step

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
    "beta": [
        torch.rand(B, L, H),
        torch.rand(H),
        torch.rand(1, H, L),
        torch.rand(B, H, L, 1),
        torch.ones(B, H, L, dtype=torch.int64),
        torch.ones(B, H, L, dtype=torch.bool),
    ],
    **{
        name: [torch.rand(B, H, L), torch.rand(B, H, L, D + 1), torch.rand(1, H, L, D), torch.ones(B, H, L, D).bool()]
        for name in ("erase", "read")
    },
    "bonus": [
        torch.rand(D),
        torch.rand(1),
        torch.rand(D, H),
        torch.rand(H, 1),
        torch.rand(B, H, D),
        torch.tensor(1.0),
        torch.ones(H, dtype=torch.int64),
    ],
    "angles": [
        torch.rand(L, D),
        torch.rand(L),
        torch.rand(L + 1, D // 2),
        torch.rand(B, L, D // 2),
        torch.rand(1, L, D // 2),
        torch.rand(1, H, L, D // 2),
        torch.rand(B, H, L, D),
        torch.zeros(L, D // 2, dtype=torch.int64),
        torch.zeros(L, D // 2, dtype=torch.complex64),
    ],
    "valid": [torch.ones(B, L), torch.ones(L, dtype=torch.bool), torch.ones(B, L + 1, dtype=torch.bool)],
    "segments": [torch.zeros(B, L), torch.zeros(L, dtype=torch.int64), torch.zeros(B, L, dtype=torch.bool)],
}
BAD_CHOICES = [
    dict(form="rotate"),
    dict(decay_convention="eq14"),
    dict(direction="bidirectional"),
    dict(normalize="softmax"),
    dict(normalize=True),
    dict(chunk_size=0),
    dict(chunk_size=-1),
    dict(dropout_p=0.1, form="chunk"),
    dict(dropout_p=0.1, form="rnn"),
]


STEP_TENSORS = ("q", "k", "v", "log_decay", "beta", "erase", "read", "bonus", "angles")
DELTA = dict(log_decay=None, beta=torch.rand(B, H, L))
BAD_PAIRS = [  # the argument named first in the message, tensors, other arguments
    # in addition to the log_decay of good(), under the default convention "source"
    ("decay_convention", dict(beta=DELTA["beta"]), dict(normalize="none")),
    ("decay_convention", dict(read=torch.rand(B, H, L, D)), dict(normalize="none", decay_convention="between")),
    ("beta", DELTA | dict(bonus=torch.rand(H)), dict(normalize="none")),
    ("beta", DELTA, dict(normalize="sum")),
    ("beta", DELTA, {}),
    ("erase", dict(log_decay=None, erase=torch.rand(B, H, L, D)), {}),
    ("read", dict(read=torch.rand(B, H, L, D), bonus=torch.rand(H)), dict(normalize="none")),
    ("undecayed_erase", {}, dict(undecayed_erase=True)),
    ("beta", DELTA, dict(normalize="max")),
    ("beta", DELTA, dict(normalize="pre")),
    ("dropout_p", DELTA, dict(normalize="none", dropout_p=0.1)),
    ("form", {}, dict(form="blocks")),
    ("decay_convention", {}, dict(decay_convention="before")),
    ("normalize", {}, dict(normalize="mean")),
    ("chunk_size", {}, dict(form="chunk", chunk_size=0)),
    ("chunk_size", DELTA, dict(form="chunk", normalize="none", chunk_size=0)),
]


def good(**changes):
    q, k, v, log_decay = make("S", L, dtype=torch.float32)
    return dict(q=q, k=k, v=v, log_decay=log_decay) | changes


def call(function, tensors, **arguments):
    x = [tensors.pop(name) for name in ("q", "k", "v", "log_decay")]
    return function(*x, **tensors, **{"feature_map": None} | arguments)


@pytest.mark.parametrize("form", ("full", "chunk", "rnn", "auto"))
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors(name, form):
    for bad in BAD_TENSORS[name]:
        for function in (linear_attention, linear_attention_parts):
            with pytest.raises(
                ValueError, match=rf"^{name}: .*got \w+ {str(tuple(bad.shape))[:-1]}".replace("(", r"\(")
            ):
                call(function, good(**{name: bad}), form=form)


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_values_that_are_not_tensors(name):
    for bad in (-0.1, [1.0], "x", *[None] * (name in "qkv")):
        for function in (linear_attention, linear_attention_parts, prefill):
            with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {type(bad).__name__}$"):
                call(function, good(**{name: bad}))


@pytest.mark.parametrize("name, tensors, arguments", BAD_PAIRS, ids=range(len(BAD_PAIRS)))
def test_pairs(name, tensors, arguments):
    for function in (linear_attention, linear_attention_parts):
        with pytest.raises(ValueError, match=f"^{name}: "):
            call(function, good(**tensors), **arguments)


def test_angles_turn_pairs():
    odd = torch.rand(B, H, L, 5)
    with pytest.raises(ValueError, match=r"^angles: .*odd D = 5"):
        linear_attention(odd, odd, odd, angles=torch.rand(L, 2), feature_map=None)


def test_no_tokens():
    empty = torch.rand(B, H, 0, D)
    with pytest.raises(ValueError, match=r"^q: .*at least one token"):
        linear_attention(empty, empty, torch.rand(B, H, 0, E), feature_map=None)
    empty = torch.rand(B, H, L, 0)
    with pytest.raises(ValueError, match=r"^q: .*one dimension"):
        linear_attention(empty, empty, torch.rand(B, H, L, E), feature_map=None)


@pytest.mark.parametrize("bad", BAD_CHOICES, ids=str)
def test_choices(bad):
    name = next(iter(bad))
    with pytest.raises(ValueError, match=rf"^{name}: .*got"):
        call(linear_attention, good(), **bad)


@pytest.mark.parametrize("p", (-0.1, 1.5))
def test_dropout_range(p):
    for decay in ("lit", "S"):
        with pytest.raises(ValueError, match="dropout"):
            linear_attention(*make(decay, L), dropout_p=p, feature_map=None)


def test_step_and_prefill():
    tensors = good()
    state = initial_state(tensors["k"], tensors["v"])

    def one(*x, **y):
        return step(*x[:3], state, *x[3:], **y)

    for function, names in ((one, STEP_TENSORS), (prefill, BAD_TENSORS)):
        for name in names:
            for bad in BAD_TENSORS[name]:
                with pytest.raises(ValueError, match=f"^{name}: "):
                    call(function, good(**{name: bad}))
        for bad in (dict(decay_convention="eq14"), dict(normalize="softmax")):
            with pytest.raises(ValueError, match=f"^{next(iter(bad))}: "):
                call(function, good(), **bad)
        for name, changes, arguments in BAD_PAIRS[:10]:
            with pytest.raises(ValueError, match=f"^{name}: "):
                call(function, good(**changes), **arguments)


def test_state_of_other_tokens():
    tensors = good()
    state = initial_state(tensors["k"], tensors["v"])
    narrow = state._replace(S=state.S.bfloat16(), z=state.z.bfloat16())
    shapes = (state._replace(S=state.S[:1]), state._replace(S=state.S[..., :1]), state._replace(z=state.z[..., :1]))
    for bad in (*shapes, narrow, tuple(state), None):
        with pytest.raises(ValueError, match=r"^state: "):
            call(lambda *x, bad=bad, **y: step(*x[:3], bad, *x[3:], **y), good())


@pytest.mark.parametrize("size", (0, -1))
@pytest.mark.parametrize("name", ("decay", "delta"))
def test_chunk_size_of_a_prompt(name, size):
    some = good() if name == "decay" else good(**DELTA)
    with pytest.raises(ValueError, match=r"^chunk_size: "):
        call(prefill, some, chunk_size=size, normalize="none")


# Dropout


@pytest.mark.parametrize("decay", DECAYS)
def test_dropout(decay):
    inputs = make(decay, 8, batch=1, heads=1)
    plain = linear_attention(*inputs, feature_map=None)

    def dropped(copies: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        many = (x if x is None or x.dim() == 1 else x.expand(copies, *x.shape[1:]) for x in inputs)
        return linear_attention(*many, dropout_p=0.5, feature_map=None)

    assert torch.equal(dropped(1, 0), dropped(1, 0))
    assert not torch.equal(dropped(1, 0), dropped(1, 1))
    assert (dropped(1, 0) - plain).abs().max() > 0.1 * plain.abs().max()
    # The row sum is computed before dropout, so the mean of n draws has error sd / sqrt(n); sd is at most max |v|
    mean = dropped(20_000, 0).mean(0, keepdim=True)
    assert_close(mean, plain, 5 * inputs.v.abs().max().item() / plain.abs().max().item() / 20_000**0.5)


@pytest.mark.parametrize("direction", ("both", "forward", "backward"))
def test_dropout_where_nothing_decays(direction, monkeypatch):
    """Check that dropout without decay builds no mask, and equals dropout under decays of one, bit for bit."""
    q, k, v = (torch.randn(2, 3, 69, 8, requires_grad=True) for _ in range(3))
    segments = torch.arange(69).div(30, rounding_mode="floor").expand(2, -1).clone()
    segments[1, -9:] = -1
    found = []
    for log_decay in (None, torch.zeros(3)):
        for masks in ({}, {"segments": segments}):
            torch.manual_seed(0)
            with monkeypatch.context() as patch:
                if log_decay is None:
                    patch.delattr(full, "log_decay_mask")
                y = linear_attention(
                    q, k, v, log_decay, feature_map="silu_shifted", direction=direction, dropout_p=0.5, **masks
                )
            found.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v))))
    for plain, decayed in zip(found[:2], found[2:]):
        assert all(torch.equal(*pair) for pair in zip(plain, decayed))
    assert not torch.equal(found[0][0], found[1][0])


def test_no_dropout_no_randomness():
    inputs = make("S", 8)
    assert torch.equal(
        linear_attention(*inputs, dropout_p=0.0, feature_map=None), linear_attention(*inputs, feature_map=None)
    )


@pytest.mark.parametrize("form", ["full", "chunk", "rnn"])
@pytest.mark.parametrize("decay", ["D", "S", "vector"])
def test_decays_in_place_of_their_logarithms_are_refused(decay, form):
    """Check that lambda from 0 to 1 is refused, except at padding, and that a rounding error above 0 counts as 0."""
    inputs = make(decay, 9)
    lam, line = inputs.log_decay.exp(), r"^log_decay: expected logarithms, at most 0 \(the log\(\) of .*\), got 0\.\d+$"
    with pytest.raises(ValueError, match=line):
        linear_attention(*inputs._replace(log_decay=lam), form=form, feature_map="elu1")
    with FakeTensorMode(allow_non_fake_inputs=True):  # a tensor without values is not checked
        fake = linear_attention(*inputs, form=form, feature_map="elu1")
    assert fake.shape == inputs.v.shape
    almost = linear_attention(*inputs._replace(log_decay=torch.full_like(lam, 1e-7)), form=form, feature_map="elu1")
    assert torch.equal(
        almost, linear_attention(*inputs._replace(log_decay=torch.zeros_like(lam)), form=form, feature_map="elu1")
    )
    for floor in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"^floor: expected values above 0, got {floor:.4g}"):
            given = dict(floor=torch.full((2, 3, 9), floor), normalize="max", form=form, feature_map="elu1")
            linear_attention(*inputs, **given)
    if decay != "D":
        valid = torch.arange(9).expand(len(lam), -1) < 6
        unknown = lam.clone()
        unknown[:, :, 6:] = torch.nan  # in padding, any value is allowed
        with pytest.raises(ValueError, match=line):
            linear_attention(*inputs._replace(log_decay=unknown), form=form, feature_map="elu1", valid=valid)
        padded = inputs.log_decay.clone()
        padded[:, :, 6:] = 0.5
        y = linear_attention(*inputs._replace(log_decay=padded), valid=valid, form=form, feature_map="elu1")
        assert torch.equal(y[:, :, :6], linear_attention(*inputs, valid=valid, form=form, feature_map="elu1")[:, :, :6])
        with pytest.raises(ValueError, match=line):
            prefill(*inputs._replace(log_decay=lam), feature_map="elu1")
        with pytest.raises(ValueError, match=line):
            step(*inputs[:3], initial_state(*inputs[1:3]), lam, feature_map="elu1")


@pytest.mark.parametrize("form", ["full", "chunk", "rnn"])
def test_an_expanded_decay_has_a_gradient_for_each_token(form):
    inputs = make("S", 9, dtype=torch.float32)
    expanded = inputs.log_decay.detach()[..., :1].expand_as(inputs.log_decay)
    grads = []
    for log_decay in (expanded, expanded.contiguous()):
        leaf = log_decay.detach().requires_grad_()
        y = linear_attention(*inputs._replace(log_decay=leaf), form=form, feature_map="elu1")
        grads.append(torch.autograd.grad(y.square().sum(), leaf)[0])
    torch.testing.assert_close(*grads)
    assert grads[0].count_nonzero() > grads[0].numel() / 2
