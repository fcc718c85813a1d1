"""The gated delta rule with the published signature, against its recurrence, and in a small model like Qwen3.5."""

import importlib
import inspect
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounter

pytest.importorskip("transformers")


from lion.transformers import chunk_gated_delta_rule, chunk_gated_delta_rule_beta_g, delta, use_delta_rule
from lion.transformers.delta import causal_conv1d_fn
from tests.layers.helpers import invalid
from tests.transformers.tiny import flattened, ids, left_padded

LENGTHS = [7, 20, 1]
EAGER = {"compile": False, "chunk_size": 8}


def arguments(*, batch=2, length=28, heads=2, values=4, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(batch, length, *shape, dtype=torch.float64, generator=generator)

    g = -torch.nn.functional.softplus(draw(values) * 4)  # from nearly 0 to strong decays
    found = [draw(heads, width), draw(heads, width), draw(values, 3), g, draw(values).sigmoid()]
    return [x.requires_grad_() for x in found]


def by_hand(q, k, v, g, beta, state=None, unit=False):
    """Run the recurrence of Gated DeltaNet (2412.06464, Eq. 10) token by token."""
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    if unit:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    S = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if state is None else state
    out = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) / q.shape[-1] ** 0.5)
    return torch.stack(out, 1), S


def close(found, wanted, atol=1e-11):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_it_is_the_recurrence_with_gradients(unit, started):
    given = arguments()
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True) if started else None
    given += [state] if started else []
    how = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": unit, **EAGER}
    found, wanted = chunk_gated_delta_rule(*given[:5], **how), by_hand(*given[:5], state=state, unit=unit)
    close(found, wanted)
    weights = [torch.randn_like(x) for x in wanted]
    both = [torch.autograd.grad(sum((x * w).sum() for x, w in zip(some, weights)), given) for some in (found, wanted)]
    close(*both)
    close(chunk_gated_delta_rule(*given[:5], **how | {"output_final_state": False})[0], wanted[0])


@pytest.mark.compiled
@torch.no_grad()
def test_one_graph_serves_all_lengths_after_a_state():
    torch._dynamo.reset()
    counter = CompileCounter()
    run = torch.compile(delta.computed, backend=counter, fullgraph=True)
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    for length in (40, 70, 97):
        given = arguments(length=length)
        found = run(*given, state, None, None, None, False, True, 8)
        close(found, by_hand(*given, state=state))
    assert counter.frame_count == 2  # the first length, and all others


@torch.no_grad()
def test_without_a_compiler_there_is_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-compiler")
    delta.compiled.cache_clear()
    given = arguments()
    for _ in range(3):
        close(chunk_gated_delta_rule(*given, chunk_size=8)[0], by_hand(*given)[0])
    delta.compiled.cache_clear()
    assert [record.message for record in caplog.records if "running eager" in record.message] == [
        "running eager, without torch.compile: no C++ compiler found (no-compiler); install g++"
    ]


@torch.no_grad()
def test_both_orders_of_arguments_and_of_axes():
    q, k, v, g, beta = arguments()
    wanted = by_hand(q, k, v, g, beta)[0]
    assert list(inspect.signature(chunk_gated_delta_rule).parameters)[:5] == ["q", "k", "v", "g", "beta"]
    close(chunk_gated_delta_rule(q, k, v, g, beta, **EAGER)[0], wanted)
    close(chunk_gated_delta_rule_beta_g(q, k, v, beta, g, **EAGER)[0], wanted)
    heads_first = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
    close(chunk_gated_delta_rule(*heads_first, head_first=True, **EAGER)[0].transpose(1, 2), wanted)
    close(chunk_gated_delta_rule(q, k, v, g, beta, scale=2.0, **EAGER)[0], wanted * 2 * 5**0.5)
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    wanted = by_hand(q, k, v, g, beta, state, unit=True)
    positional = (5**-0.5, state, True, True, None, False)  # the order of fla
    found = chunk_gated_delta_rule(q, k, v, g, beta, *positional, **EAGER)
    swapped = chunk_gated_delta_rule_beta_g(q, k, v, beta, g, *positional, **EAGER)
    close(found, wanted)
    close(swapped, wanted)
    with pytest.raises(ValueError, match=r"g: expected logarithms .*\(beta, g\) use chunk_gated_delta_rule_beta_g"):
        chunk_gated_delta_rule(q, k, v, beta, g, **EAGER)


@torch.no_grad()
@pytest.mark.parametrize("states", [False, True])
def test_packed_documents_are_separate(states):
    given = arguments(batch=1)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    entering = torch.randn(3, 4, 5, 3, dtype=torch.float64) if states else None
    how = {"initial_state": entering, "output_final_state": states, "cu_seqlens": ends.int(), **EAGER}
    y, last = chunk_gated_delta_rule(*given, **how)
    alone = [
        by_hand(*(x[:, a:b] for x in given), state=None if entering is None else entering[n : n + 1])
        for n, (a, b) in enumerate(pairwise(ends))
    ]
    close(y, torch.cat([x for x, _ in alone], 1))
    assert (last is None) is not states
    if states:
        close(last, torch.cat([S for _, S in alone]))
    harmless = {"cu_seqlens_cpu": ends, "cp_context": None, "transpose_state_layout": False}
    close(chunk_gated_delta_rule(*given, **how, **harmless)[0], y)
    cases = [
        ({"use_gate_in_kernel": True}, "chunk_gated_delta_rule: use_gate_in_kernel: this option of fla is not"),
        ({"chunk_size": 0}, "chunk_size: expected"),
    ]
    for bad in ([0, 7, 20, 27], [0, 7, 20, 29], [1, 7, 20, 28], [0, 20, 7, 28]):
        message = rf"cu_seqlens: .* rise from 0 to 28 tokens, got \[{bad[0]}, {bad[1]}"
        cases.append(({"cu_seqlens": torch.tensor(bad)}, message))
    for changes, message in cases:
        invalid(message, chunk_gated_delta_rule, *given, **how | changes)
    invalid("q: expected at least one token", chunk_gated_delta_rule, *(x[:, :0] for x in given), **EAGER)
    with pytest.raises(ValueError, match="cu_seqlens: expected packed documents in one row, got 2"):
        chunk_gated_delta_rule(*arguments(), cu_seqlens=ends, **EAGER)


@torch.no_grad()
def test_no_tap_of_the_convolution_reads_another_document():
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 3, 28), (3, 4), (3,)))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)

    def alone(x):
        padded = torch.nn.functional.pad(x, (3, 0))
        return torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=3))

    wanted = torch.cat([alone(x[..., a:b]) for a, b in pairwise(ends)], -1)
    documents = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None].int()
    close(causal_conv1d_fn(x, weight, bias, "silu", seq_idx=documents), wanted)
    close(causal_conv1d_fn(x, weight, bias, "silu", cu_seq_lens_q=ends), wanted)
    close(causal_conv1d_fn(x, weight, bias, "silu"), alone(x))


@pytest.fixture
def qwen(monkeypatch):
    """Make a function that returns a small random model like Qwen3.5, and put the replaced functions back after it."""
    code = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(code, name, getattr(code, name))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 40, "initializer_range": 0.1}
    linear = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
    sizes |= {f"linear_{name}": value for name, value in linear.items()}

    def make(**changes):
        torch.manual_seed(0)
        return code.Qwen3_5ForCausalLM(code.Qwen3_5TextConfig(**sizes | changes)).eval()

    return make


def test_a_model_like_qwen_computes_the_same_and_trains_on_packed_rows(qwen):
    model = qwen()
    rows = [ids(length, seed=length) for length in LENGTHS]
    tokens, mask = left_padded(rows)

    def outputs():
        model.zero_grad()
        logits = model(tokens, attention_mask=mask).logits[mask.bool()]
        logits.square().mean().backward()
        return logits.detach(), [p.grad.clone() for p in model.parameters()]

    batch = flattened(rows)
    wanted, gradients = outputs()
    alone = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows]).detach()
    text = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    invalid("packed sequences", model, **batch, use_cache=False)

    assert use_delta_rule(model, compile=False) == 3
    logits, found = outputs()
    close(logits, wanted, 5e-5)
    largest = max(x.abs().max() for x in gradients)
    close(found, gradients, 5e-5 * largest.item())
    assert torch.equal(model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False), text)
    packed = model(**batch, use_cache=False).logits[0]
    close(packed.detach(), alone, 5e-5)
    invalid("Linear has no layer of Gated DeltaNet", use_delta_rule, torch.nn.Linear(2, 2))


@pytest.mark.compiled
def test_a_compiled_model_like_qwen_trains_in_one_graph(qwen):
    """Check the graph that Dynamo captures: no break, and the values and gradients of the model outside it."""
    model, tokens = qwen(num_hidden_layers=1, layer_types=["linear_attention"]).double(), ids(2, 20)
    assert use_delta_rule(model) == 1

    def loss_and_gradients(forward):
        model.zero_grad()
        loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    found = loss_and_gradients(torch.compile(model, backend="eager", fullgraph=True))
    use_delta_rule(model, compile=False)
    close(found, loss_and_gradients(model))


@pytest.mark.compiled
def test_the_compiled_function_is_the_same(monkeypatch):
    """Check the joint graph of one chunk; test_conform.py runs Inductor's code of the gated delta rule."""
    monkeypatch.setattr(delta, "compiled", lambda: torch.compile(delta.computed, backend="aot_eager"))
    given = [x.detach().float().requires_grad_() for x in arguments(batch=1, length=10)]
    results = []
    for how in (True, False):
        y = chunk_gated_delta_rule(*given, compile=how, chunk_size=8)[0]
        results.append([y, *torch.autograd.grad(y.square().mean(), given)])
    close(*results, 5e-5)
