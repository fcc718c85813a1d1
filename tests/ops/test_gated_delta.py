"""The delta rule with decays and with vectors of its own, against the recurrence token by token."""

import math

import pytest
import torch

from lion.ops import Gates, linear_attention, reference_attention

from .checks import BATCH, LENGTH, check_gradients, check_masks, gradcheck
from .helpers import DIRECTIONS, Case, assert_close, backward, case, make, oracle_attention, pairwise, unit_keys
from .test_prefill import check as check_stream

FORMS = {
    "full": dict(form="full"),
    "chunk5": dict(form="chunk", chunk_size=5),
    "chunk64": dict(form="chunk", chunk_size=64),
    "rnn1": dict(form="rnn", chunk_size=1),
    "rnn5": dict(form="rnn", chunk_size=5),
}
DECAYS = ("D", "S", "extreme", "fixed vector", "vector", "extreme vector")
VECTORS = ("beta", "read", "erase", "beta, read", "beta, erase, read")  # e, r and w are these, k, or beta k
every_kind = pytest.mark.parametrize(
    "decay, vectors, direction, undecayed_erase", pairwise(DECAYS, VECTORS, DIRECTIONS, (False, True))
)


def settings(direction: str, undecayed_erase: bool) -> dict:
    return dict(direction=direction, undecayed_erase=undecayed_erase, normalize="none", decay_convention="target")


def inputs(decay: str, length: int, vectors: str, **shape) -> Case:
    return case(unit_keys(make(decay, length, **shape)), vectors)


@every_kind
def test_reference(decay, vectors, direction, undecayed_erase):
    for length in (1, 2, 9):
        some, how = inputs(decay, length, f"{vectors}, angles BHL"), settings(direction, undecayed_erase)
        assert_close(some.on(reference_attention, **how), oracle_attention(some, **how), 1e-12, f"L={length}")


@every_kind
def test_outputs_and_gradients(decay, vectors, direction, undecayed_erase):
    for length in (2, 33):
        check_gradients(inputs(decay, length, vectors, heads=2), FORMS, **settings(direction, undecayed_erase))


@pytest.mark.slow
@pytest.mark.parametrize("form", ("full", "chunk5", "rnn1", "rnn5"))
@pytest.mark.parametrize("decay, vectors", [("S", "beta"), ("vector", "beta, erase, read"), ("extreme", "read")])
def test_masks(decay, vectors, form):
    for direction, undecayed_erase in (("both", False), ("forward", True), ("backward", True)):
        some = inputs(decay, LENGTH, vectors, batch=BATCH, heads=2)
        check_masks(some, FORMS[form] | settings(direction, undecayed_erase))


@every_kind
def test_streams(decay, vectors, direction, undecayed_erase):
    how = settings("forward", undecayed_erase)
    del how["direction"]
    check_stream(inputs(decay, 14, f"{vectors}, angles L", batch=1, heads=2), **how)


@pytest.mark.parametrize("form", ("full", "chunk5", "rnn5"))
@pytest.mark.parametrize("decay", ("S", "vector"))
def test_gradcheck(decay, form):
    leaves = inputs(decay, 4, "beta, erase, read", batch=1, heads=1, dim=2, value_dim=2).leaves()
    gradcheck(leaves, **FORMS[form], **settings("both", True))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_chunks_are_carried_in_groups(direction):
    """Check more than two groups of chunks, some of which are empty."""
    for decay, vectors, undecayed_erase in (("S", "beta", False), ("vector", "erase, read", True)):
        some = inputs(decay, 131, vectors, batch=1, heads=1)
        how = {"chunk1": dict(form="chunk", chunk_size=1), "chunk2": dict(form="chunk", chunk_size=2)}
        check_gradients(some, how, **settings(direction, undecayed_erase))


def test_defaults_of_the_vectors():
    """Check that e is w and r is k by default, and that w is k without beta."""
    some, how = inputs("S", 21, "beta"), settings("both", False)
    want, w = some.on(linear_attention, **how), some.beta[..., None] * some.k
    q, k, v, a = some[:4]
    for gates in (Gates(a, beta=some.beta, read=k), Gates(a, beta=some.beta, erase=w)):
        assert_close(linear_attention(q, k, v, gates, **how), want, 1e-12)
    assert_close(linear_attention(q, w, v, Gates(a, read=k), **how), want, 1e-12)
    assert_close(linear_attention(q, w, v, Gates(a, erase=w, read=k), **how), want, 1e-12)
    none = linear_attention(q, w, v, Gates(a, erase=torch.zeros_like(w)), **how)
    assert_close(none, linear_attention(q, w, v, a, normalize="none", decay_convention="target"), 1e-12)


@pytest.mark.parametrize("decay", ("S", "vector", "extreme", "extreme vector"))
@pytest.mark.parametrize("undecayed_erase", (False, True))
def test_long_sequences(decay, undecayed_erase):
    """Check thousands of tokens: decays from 1e-30 to nearly 1, beta up to 2, gradients of the decays' logits."""
    length = 3000
    some = inputs(decay, length, "beta", batch=1, heads=1, dim=8, value_dim=8)
    some = some._replace(beta=2 * some.beta)
    if undecayed_erase:  # r reads more than is left of the state: beta at most lambda keeps the state bounded
        least = some.log_decay.exp().reshape(1, 1, length, -1).amin(-1)
        some = some._replace(beta=some.beta * least / 2)
    expected, expected_grads = token_by_token(some, undecayed_erase)
    for form in ({"form": "chunk"}, {"form": "rnn", "chunk_size": 64}):
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 5e-5)):
            leaves = some.to(dtype).leaves()
            got = leaves.on(linear_attention, **form, **settings("forward", undecayed_erase))
            assert_close(got, expected, tolerance, f"{form} {dtype}")
            for name, grad in backward(got, leaves).items():
                assert_close(grad, expected_grads[name], tolerance, f"d{name} {form} {dtype}")


def token_by_token(some: Case, undecayed_erase: bool):
    """Compute outputs and gradients of the forward recurrence of one head, with e = w = beta k and r = k."""
    leaves = some.leaves()
    q, k, v, a, beta = (x[0, 0] for x in leaves[:5])
    lam, S, out = a.exp().reshape(len(a), -1, 1), q.new_zeros(q.shape[-1], v.shape[-1]), []
    for i in range(len(q)):
        decayed = lam[i] * S
        held = k[i] @ (S if undecayed_erase else decayed)
        S = decayed + torch.outer(beta[i] * k[i], v[i] - held)
        out.append(q[i] @ S / math.sqrt(q.shape[-1]))
    y = torch.stack(out)[None, None]
    return y.detach(), backward(y, leaves)


@pytest.mark.parametrize("form", FORMS)
def test_dtypes(form):
    """Check bf16 tokens with float32 gates, and float16 tokens."""
    how = FORMS[form] | settings("both", False)
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 5e-3)):
        some = inputs("vector", 40, "beta, read", dtype=dtype)
        some = some._replace(log_decay=some.log_decay.float(), beta=some.beta.float())
        got = some.on(linear_attention, **how)
        assert got.dtype == dtype
        assert_close(got, oracle_attention(some.to(torch.float64), **settings("both", False)), tolerance)
        leaves = some.leaves()
        grads = backward(leaves.on(linear_attention, **how), leaves)
        assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("decay", ("none", "S", "vector"))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_chunks_in_bfloat16_cost_little_accuracy(direction, decay):
    """Check the relative errors of outputs and gradients, which must not grow with the number of chunks.

    A state passes up to six matrix products with rounded factors in a chunk; the roundings (2^-9 each) partly average
    out, and decays and beta forget those of earlier chunks.
    """
    torch.manual_seed(0)
    length, dim = 2048, 16
    shape = {"none": None, "S": (1, 2, length), "vector": (1, 2, length, dim)}[decay]
    log_decay = None if shape is None else -0.01 * torch.rand(shape)
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    beta = torch.rand(1, 2, length)
    tokens = [x.bfloat16() for x in (q, torch.nn.functional.normalize(k, dim=-1), v)]
    weight = torch.randn(1, 2, length, dim)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in tokens]
        gates = [x if x is None or dtype == torch.bfloat16 else x.to(dtype) for x in (log_decay, beta)]
        how = settings(direction, False) | dict(form="chunk", chunk_size=64)
        out = linear_attention(*leaves, Gates(gates[0], beta=gates[1]), **how, feature_map=None)
        return [out, *torch.autograd.grad((out * weight.to(dtype)).sum(), leaves)]

    for name, got, exact in zip(("y", "dq", "dk", "dv"), results(torch.bfloat16), results(torch.float64)):
        assert got.dtype == torch.bfloat16
        error = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got.split(512, 2), exact.split(512, 2))]
        assert max(error) < 0.01, f"{name} {error}"
        assert max(error) < 1.25 * min(error), f"{name} {error}"


def test_decays_that_are_zero():
    """Check that lambda = 0, a log decay of minus infinity, starts from an empty state, with finite gradients."""
    some = inputs("vector", 12, "beta")
    forgotten = torch.arange(12)[:, None] == 6
    some = some._replace(log_decay=some.log_decay.masked_fill(forgotten, -torch.inf))
    for form in FORMS.values():
        leaves = some.leaves()
        got = leaves.on(linear_attention, **form, **settings("forward", False))
        late = some.tokens(0, torch.arange(6, 12)).on(linear_attention, **form, **settings("forward", False))
        assert_close(got[:1, :, 6:].detach(), late, 1e-12, f"{form}")
        assert all(grad.isfinite().all() for grad in backward(got, leaves).values())
