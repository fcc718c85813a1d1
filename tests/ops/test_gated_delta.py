"""The delta rule with decays and with vectors of its own, against the recurrence token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from lion.ops import Gates, linear_attention, reference_attention

from .checks import (
    BATCH,
    LENGTH,
    assert_finite,
    attend,
    check_gradients,
    check_masks,
    long_bfloat16,
    narrow_and_exact,
    values_and_gradients,
)
from .helpers import DIRECTIONS, Inputs, assert_close, case, make, oracle_attention, pairwise, unit_keys
from .test_prefill import check as check_stream

FORMS = {
    "full": dict(form="full"),
    "chunk5": dict(form="chunk", chunk_size=5),
    "chunk64": dict(form="chunk", chunk_size=64),
    "rnn1": dict(form="rnn", chunk_size=1),
    "rnn5": dict(form="rnn", chunk_size=5),
}
DECAYS = ("lit", "D", "S", "extreme", "fixed vector", "vector", "extreme vector")
VECTORS = ("beta", "read", "erase", "beta, read", "beta, erase, read")  # e, r and w are these, k, or beta k
every_kind = pytest.mark.parametrize(
    "decay, vectors, direction, undecayed_erase", pairwise(DECAYS, VECTORS, DIRECTIONS, (False, True))
)


def settings(direction: str, undecayed_erase: bool) -> dict:
    return dict(direction=direction, undecayed_erase=undecayed_erase, normalize="none", decay_convention="target")


def inputs(decay: str, length: int, vectors: str, **shape) -> Inputs:
    return case(unit_keys(make(decay, length, **shape)), vectors)


@every_kind
@pytest.mark.slow
def test_outputs_and_gradients(decay, vectors, direction, undecayed_erase):
    how = settings(direction, undecayed_erase)
    for length in (1, 2, 9):
        some = inputs(decay, length, f"{vectors}, angles BHL")
        assert_close(some.on(reference_attention, **how), oracle_attention(some, **how), 1e-12, f"L={length}")
    for length, shape in ((1, {}), (2, {}), (33, dict(dim=8, value_dim=3)), (65, {})):
        some = inputs(decay, length, f"{vectors}, angles BHL", batch=1, heads=2, **shape)
        check_gradients(some, FORMS, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, kind, erase",
    pairwise(
        ("full", "chunk5", "rnn1", "rnn5"),
        (("lit", "beta, angles HL"), ("S", "beta"), ("vector", "beta, erase, read"), ("extreme", "read")),
        (("both", False), ("forward", True), ("backward", True)),
    ),
)
def test_masks(form, kind, erase):
    decay, vectors = kind
    some = inputs(decay, LENGTH, vectors, batch=BATCH, heads=2)
    check_masks(some, FORMS[form] | settings(*erase))


@pytest.mark.parametrize("decay, vectors, undecayed_erase", pairwise(DECAYS, VECTORS, (False, True)))
def test_streams(decay, vectors, undecayed_erase):
    some = inputs(decay, 14, f"{vectors}, angles L", batch=1, heads=2)
    check_stream(some, undecayed_erase=undecayed_erase, normalize="none", decay_convention="target")


@pytest.mark.parametrize(
    "decay, vectors, direction, undecayed_erase",
    [
        ("S", "beta", "both", False),
        ("S", "beta", "backward", True),
        ("vector", "erase, read", "both", True),
        ("vector", "erase, read", "forward", False),
    ],
)
def test_many_chunks_are_carried_in_groups(decay, vectors, direction, undecayed_erase):
    """Check more than two groups of chunks, some of which are empty."""
    some = inputs(decay, 131, vectors, batch=1, heads=1)
    how = {"chunk1": dict(form="chunk", chunk_size=1), "chunk2": dict(form="chunk", chunk_size=2)}
    check_gradients(some, how, **settings(direction, undecayed_erase))


def test_defaults_of_the_vectors():
    """Check that e is w and r is k by default, and that w is k without beta."""
    some = inputs("S", 21, "beta")
    how = settings("both", False)
    want = some.on(linear_attention, **how)
    w = some.beta[..., None] * some.k
    q, k, v, a = some[:4]
    equal = [
        (k, Gates(a, beta=some.beta, read=k)),
        (k, Gates(a, beta=some.beta, erase=w)),
        (w, Gates(a, read=k)),
        (w, Gates(a, erase=w, read=k)),
    ]
    for key, gates in equal:
        assert_close(linear_attention(q, key, v, gates, **how), want, 1e-12)
    none = linear_attention(q, w, v, Gates(a, erase=torch.zeros_like(w)), **how)
    assert_close(none, linear_attention(q, w, v, a, normalize="none", decay_convention="target"), 1e-12)


@pytest.mark.parametrize(
    "decay, undecayed_erase", [("S", True), ("vector", False), ("extreme", False), ("extreme vector", True)]
)
@pytest.mark.slow
def test_long_sequences(decay, undecayed_erase):
    """Check a thousand tokens: decays from 1e-30 to nearly 1, beta up to 2, gradients of the decays' logits."""
    length = 1000
    some = inputs(decay, length, "beta", batch=1, heads=1, dim=8, value_dim=8)
    some = some._replace(beta=2 * some.beta)
    if undecayed_erase:  # r reads more than is left of the state: beta at most lambda keeps the state bounded
        least = some.log_decay.exp().reshape(1, 1, length, -1).amin(-1)
        some = some._replace(beta=some.beta * least / 2)
    forms = {"chunk": dict(form="chunk"), "rnn": dict(form="rnn", chunk_size=64)}
    check_gradients(some, forms, **settings("forward", undecayed_erase))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 5e-3)])
def test_dtypes(dtype, tolerance, form):
    """Check bf16 tokens with float32 gates, and float16 tokens."""
    some = inputs("vector", 40, "beta, read", dtype=dtype)
    some = some._replace(log_decay=some.log_decay.float(), beta=some.beta.float())
    got, grads = values_and_gradients(some, FORMS[form], settings("both", False))
    assert got.dtype == dtype
    assert_close(got, oracle_attention(some.to(torch.float64), **settings("both", False)), tolerance)
    assert_finite(got, grads)


@pytest.mark.parametrize(
    "decay, direction", [("lit", "forward"), ("S", "both"), ("vector", "both"), ("vector", "backward")]
)
def test_chunks_in_bfloat16_cost_little_accuracy(decay, direction):
    """Check the relative errors of outputs and gradients, which must not grow with the number of chunks.

    A state passes up to six matrix products with rounded factors in a chunk; the roundings (2^-9 each) partly average
    out, and decays and beta forget those of earlier chunks.
    """
    inputs = long_bfloat16(decay, 2048, 0.01)
    beta = torch.rand(1, 2, 2048, generator=torch.Generator().manual_seed(1))
    inputs = inputs._replace(k=F.normalize(inputs.k.float(), dim=-1).bfloat16(), beta=beta)

    def quarters(x: torch.Tensor) -> torch.Tensor:
        """Return the norms of the quarters of all tokens."""
        return x.unflatten(2, (4, -1)).square().sum((0, 1, 3, 4)).sqrt()

    how = settings(direction, False) | dict(form="chunk", chunk_size=64)
    narrow, exact = narrow_and_exact(inputs, how)
    for n, name in enumerate(("y", "dq", "dk", "dv")):
        assert narrow[n].dtype == torch.bfloat16
        off = quarters(narrow[n].double() - exact[n])
        errors = off / quarters(exact[n])
        assert errors.max() < 0.01, f"{name} {errors}"
        assert errors.max() < 1.25 * errors.min(), f"{name} {errors}"


def test_decays_that_are_zero():
    """Check that lambda = 0, a log decay of minus infinity, starts from an empty state, with finite gradients."""
    some = inputs("vector", 12, "beta")
    forgotten = torch.arange(12)[:, None] == 6
    some = some._replace(log_decay=some.log_decay.masked_fill(forgotten, -torch.inf))
    for form in FORMS.values():
        how = form | settings("forward", False)
        got, grads = values_and_gradients(some, how)
        assert_close(got[:, :, 6:], attend(some.at(slice(6, 12)), how), 1e-12, f"{form}")
        assert_finite(got, grads)


def test_counters_of_flops_see_the_products_of_the_chunks():
    batch, heads, chunk, count = 2, 3, 4, 5
    some = inputs("S", chunk * count, "beta", batch=batch, heads=heads).leaves()
    dim = some.k.shape[-1]
    width = some.v.shape[-1]
    how = dict(form="chunk", chunk_size=chunk) | settings("forward", False)
    with FlopCounterMode(display=False) as counter:
        attend(some, how).sum().backward()
    products = 2 * batch * heads * count * (2 * chunk * dim * width + chunk * chunk * width)
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.lion.delta_states] == counts[torch.ops.lion.delta_states_backward] == products
