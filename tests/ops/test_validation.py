"""Validation: invalid arguments raise a ValueError that names the argument; and dropout."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lion.ops import full, initial_state, linear_attention, linear_attention_parts, prefill, step

from .checks import attend
from .helpers import DECAYS, DIRECTIONS, Inputs, assert_close, make, pairwise

B, H, L, D, E = 2, 3, 5, 4, 6
BAD_SHAPES = {
    "q": [(B, L, D), (B, H, 0, D)],
    "k": [(B, H, L, D + 1), (B, H, L + 1, D), (B, 1, L, D)],
    "v": [(B, H, L + 1, E), (B, H, L), (1, H, L, E)],
    "log_decay": [(B, L, H), (H + 1,), (1,), (), (B, H), (1, H, L)],
    "beta": [(B, L, H), (H,), (1, H, L), (B, H, L, 1)],
    "erase": [(B, H, L), (B, H, L, D + 1), (1, H, L, D)],
    "read": [(B, H, L), (B, H, L, D + 1), (1, H, L, D)],
    "bonus": [(D,), (1,), (D, H), (H, 1), (B, H, D), ()],
    "angles": [
        (L, D),
        (L,),
        (L + 1, D // 2),
        (B, L, D // 2),
        (1, L, D // 2),
        (1, H, L, D // 2),
        (B, H, L, D),
    ],
    "valid": [(L,), (B, L + 1)],
    "segments": [(L,)],
}
BAD_DTYPES = [
    ("q", (B, H, L, D), torch.int64),
    ("k", (B, H, L, D), torch.float64),
    ("v", (B, H, L, E), torch.bfloat16),
    ("log_decay", (H,), torch.int64),
    ("beta", (B, H, L), torch.int64),
    ("beta", (B, H, L), torch.bool),
    ("erase", (B, H, L, D), torch.bool),
    ("read", (B, H, L, D), torch.bool),
    ("bonus", (H,), torch.int64),
    ("angles", (L, D // 2), torch.int64),
    ("angles", (L, D // 2), torch.complex64),
    ("valid", (B, L), torch.float32),
    ("segments", (B, L), torch.float32),
    ("segments", (B, L), torch.bool),
]
DTYPES = {"valid": torch.bool, "segments": torch.int64}
BAD_TENSORS = {}
for argument, shapes in BAD_SHAPES.items():
    BAD_TENSORS[argument] = [torch.zeros(shape, dtype=DTYPES.get(argument, torch.float32)) for shape in shapes]
for argument, shape, dtype in BAD_DTYPES:
    BAD_TENSORS[argument].append(torch.ones(shape, dtype=dtype))
VECTOR = torch.rand(B, H, L, D)
BONUS = torch.rand(H)
DELTA = dict(log_decay=None, beta=torch.rand(B, H, L))
NONE = dict(normalize="none")
BAD_PAIRS = [  # the argument named first in the message, other arguments
    # in addition to the log_decay of good(), under the default convention "source"
    ("decay_convention", NONE | dict(beta=DELTA["beta"])),
    ("decay_convention", NONE | dict(read=VECTOR, decay_convention="between")),
    ("beta", NONE | DELTA | dict(bonus=BONUS)),
    ("beta", DELTA),
    ("erase", dict(log_decay=None, erase=VECTOR)),
    ("read", NONE | dict(read=VECTOR, bonus=BONUS)),
    ("undecayed_erase", dict(undecayed_erase=True)),
    ("beta", DELTA | dict(normalize="max")),
    ("beta", DELTA | dict(normalize="pre")),
    ("decay_convention", dict(decay_convention="eq14")),
    ("normalize", dict(normalize="softmax")),
    ("normalize", dict(normalize=True)),
]
NO_STREAM = [  # in addition, where scores may be computed in several forms
    ("dropout_p", NONE | DELTA | dict(dropout_p=0.1)),
    ("dropout_p", dict(dropout_p=0.1, form="chunk")),
    ("dropout_p", dict(dropout_p=0.1, form="rnn")),
    ("dropout_p", dict(dropout_p=-0.1)),
    ("chunk_size", NONE | DELTA | dict(form="chunk", chunk_size=-1)),
]


def good() -> dict:
    q, k, v, log_decay = make("S", L, dtype=torch.float32)[:4]
    return dict(q=q, k=k, v=v, log_decay=log_decay, feature_map=None)


def one_step(q, k, v, **arguments):
    tensors = good()
    return step(q, k, v, initial_state(tensors["k"], tensors["v"]), **arguments)


WHOLE = (linear_attention, linear_attention_parts)


@pytest.mark.parametrize("form", ("full", "chunk", "rnn", "auto"))
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors(name, form):
    for bad in BAD_TENSORS[name]:
        shape = re.escape(str(tuple(bad.shape)))
        for function in WHOLE:
            with pytest.raises(ValueError, match=rf"^{name}: .*got \w+ {shape}"):
                function(**good() | {name: bad, "form": form})


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_of_streams(name):
    functions = (prefill,) if name in ("valid", "segments") else (prefill, one_step)
    for bad in BAD_TENSORS[name]:
        for function in functions:
            with pytest.raises(ValueError, match=f"^{name}: "):
                function(**good() | {name: bad})


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_values_that_are_not_tensors(name):
    values = [-0.1, [1.0], "x"]
    if name in "qkv":
        values.append(None)
    for bad in values:
        for function in (*WHOLE, prefill):
            with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {type(bad).__name__}$"):
                function(**good() | {name: bad})


EVERYWHERE = [(*pair, (*WHOLE, prefill, one_step)) for pair in BAD_PAIRS]


@pytest.mark.parametrize("name, arguments, functions", EVERYWHERE + [(*pair, WHOLE) for pair in NO_STREAM])
def test_pairs(name, arguments, functions):
    for function in functions:
        with pytest.raises(ValueError, match=f"^{name}: "):
            function(**good() | arguments)


@pytest.mark.parametrize(
    "shape, change, message",
    [
        ((B, H, L, 5), dict(angles=torch.rand(L, 2)), r"^angles: .*odd D = 5"),
        ((B, H, 0, D), {}, r"^q: .*at least one token"),
        ((B, H, L, 0), {}, r"^q: .*one dimension"),
    ],
)
def test_shapes_of_tokens(shape, change, message):
    x = torch.rand(shape)
    with pytest.raises(ValueError, match=message):
        linear_attention(x, x, x, feature_map=None, **change)


def test_state_of_other_tokens():
    q, k, v = make("lit", L)[:3]
    state = initial_state(k, v)
    for bad in (
        state._replace(S=state.S[:1]),
        state._replace(S=state.S[..., :1]),
        state._replace(z=state.z[..., :1]),
        state._replace(S=state.S.bfloat16(), z=state.z.bfloat16()),
        tuple(state),
        None,
    ):
        with pytest.raises(ValueError, match=r"^state: "):
            step(q, k, v, bad, feature_map=None)


# Dropout


@pytest.mark.parametrize("decay", DECAYS)
def test_dropout(decay):
    inputs = make(decay, 8, batch=1, heads=1)
    plain = attend(inputs)

    def dropped(copies: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        many = inputs.map(lambda x: x if x.dim() == 1 else x.repeat_interleave(copies, 0))
        return attend(many, dict(dropout_p=0.5))

    assert torch.equal(attend(inputs, dict(dropout_p=0.0)), plain)
    assert torch.equal(dropped(1, 0), dropped(1, 0))
    assert not torch.equal(dropped(1, 0), dropped(1, 1))
    assert (dropped(1, 0) - plain).abs().max() > 0.1 * plain.abs().max()
    # The row sum is computed before dropout, so the mean of n draws has error sd / sqrt(n); sd is at most max |v|
    mean = dropped(20_000, 0).mean(0, keepdim=True)
    assert_close(mean, plain, 5 * inputs.v.abs().max().item() / plain.abs().max().item() / 20_000**0.5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dropout_where_nothing_decays(direction, monkeypatch):
    """Check that dropout without decay builds no mask, and equals dropout under decays of one, bit for bit."""
    q, k, v = (torch.randn(2, 3, 69, 8, requires_grad=True) for _ in range(3))
    segments = (torch.arange(69) // 30).repeat(2, 1)
    segments[1, -9:] = -1

    def found(masks: dict, log_decay: torch.Tensor | None = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        how = dict(feature_map="silu_shifted", direction=direction, dropout_p=0.5)
        y = linear_attention(q, k, v, log_decay, **how, **masks)
        return [y, *torch.autograd.grad(y.square().sum(), (q, k, v))]

    outputs = []
    for masks in ({}, dict(segments=segments)):
        with monkeypatch.context() as patch:
            patch.delattr(full, "log_decay_mask")
            plain = found(masks)
        for got, decayed in zip(plain, found(masks, torch.zeros(3)), strict=True):
            assert torch.equal(got, decayed)
        outputs.append(plain[0])
    assert not torch.equal(outputs[0], outputs[1])


# Values of decays


LINE = r"^log_decay: expected logarithms, at most 0 \(the log\(\) of .*\), got 0\.\d+$"
every_decay_and_form = pytest.mark.parametrize("decay, form", pairwise(("D", "S", "vector"), ("full", "chunk", "rnn")))


def mapped(inputs: Inputs, form: str, **arguments) -> torch.Tensor:
    return inputs.on(linear_attention, form=form, **{"feature_map": "elu1"} | arguments)


@every_decay_and_form
def test_decays_in_place_of_their_logarithms_are_refused(decay, form):
    """Check that lambda from 0 to 1 is refused, and that a rounding error above 0 counts as 0."""
    inputs = make(decay, 9)
    lam = inputs.log_decay.exp()
    with pytest.raises(ValueError, match=LINE):
        mapped(inputs._replace(log_decay=lam), form)
    with FakeTensorMode(allow_non_fake_inputs=True):  # a tensor without values is not checked
        assert mapped(inputs, form).shape == inputs.v.shape
    almost = mapped(inputs._replace(log_decay=torch.full_like(lam, 1e-7)), form)
    assert torch.equal(almost, mapped(inputs._replace(log_decay=torch.zeros_like(lam)), form))
    for floor in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"^floor: expected values above 0, got {floor:.4g}"):
            mapped(inputs, form, floor=torch.full((2, 3, 9), floor), normalize="max")


@every_decay_and_form
def test_decays_at_padding_may_be_anything(decay, form):
    inputs = make("S" if decay == "D" else decay, 9)
    lam = inputs.log_decay.exp()
    valid = torch.arange(9).expand(len(lam), -1) < 6
    unknown = lam.clone()
    unknown[:, :, 6:] = torch.nan
    with pytest.raises(ValueError, match=LINE):
        mapped(inputs._replace(log_decay=unknown), form, valid=valid)
    padded = inputs.log_decay.clone()
    padded[:, :, 6:] = 0.5
    y = mapped(inputs._replace(log_decay=padded), form, valid=valid)
    assert torch.equal(y[:, :, :6], mapped(inputs, form, valid=valid)[:, :, :6])


@pytest.mark.parametrize("decay", ("S", "vector"))
def test_streams_refuse_decays_in_place_of_their_logarithms(decay):
    inputs = make(decay, 9)
    lam = inputs.log_decay.exp()
    with pytest.raises(ValueError, match=LINE):
        inputs._replace(log_decay=lam).on(prefill, feature_map="elu1")
    with pytest.raises(ValueError, match=LINE):
        step(inputs.q, inputs.k, inputs.v, initial_state(inputs.k, inputs.v), lam, feature_map="elu1")


@pytest.mark.parametrize("form", ["full", "chunk", "rnn"])
def test_an_expanded_decay_has_a_gradient_for_each_token(form):
    inputs = make("S", 9, dtype=torch.float32)
    expanded = inputs.log_decay[..., :1].expand_as(inputs.log_decay)
    grads = []
    for log_decay in (expanded, expanded.contiguous()):
        leaf = log_decay.detach().requires_grad_()
        y = mapped(inputs._replace(log_decay=leaf), form)
        grads.append(torch.autograd.grad(y.square().sum(), leaf)[0])
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0].count_nonzero() > grads[0].numel() / 2
