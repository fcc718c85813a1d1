"""Calls of the Triton kernels in Triton's interpreter, against the definition in float64; a process of its own.

Prints one line of JSON for each case: its name, and the largest error of the outputs and of each gradient, divided by
the largest value. Triton reads TRITON_INTERPRET when it is imported.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F

from lion.layers.layout import Layout
from lion.layers.mixers import LionAttention
from lion.ops import fused, linear_attention, reference_attention
from lion.ops.features import apply_feature_map
from tools.gpu.interpret import products_of_bf16

SHORT = (17, 40)  # tokens of one chunk, and of three chunks
PADDED = torch.arange(40) < torch.tensor([[40], [33]])
PADDED[0, 3] = False
PACKED = torch.tensor([[0] * 13 + [1] * 8 + [2] * 19, [0] * 7 + [1] * 33])
STEEP = torch.tensor([0.0, -1e-6, -0.1, -30.0, -200.0, -torch.inf])

# Every value of a setting is paired with both paths (one chunk and several) and with those that it can interact with.
CASES = {
    "Lion-S": {},
    "Lion-D": {"decay": "head"},
    "Lion-lit": {"decay": None},
    "forward": {"direction": "forward"},
    "backward": {"direction": "backward", "decay_convention": "target"},
    "target": {"decay_convention": "target"},
    "symmetric": {"decay_convention": "symmetric", "direction": "forward"},
    "no row sums": {"normalize": "none", "feature_map": None, "scale": 0.3},
    "elu1, wide values": {"feature_map": "elu1", "E": 32},
    "another map": {"feature_map": "relu", "direction": "backward"},
    "padding": {"valid": PADDED},
    "packed": {"segments": PACKED},
    "packed, forward, padding": {"segments": PACKED, "valid": PADDED, "direction": "forward"},
    "packed, backward": {"segments": PACKED, "direction": "backward", "decay_convention": "symmetric"},
    "extreme decays": {"decay": "steep"},
    "small row sums": {"eps": 3.0},
    "bfloat16": {"dtype": torch.bfloat16, "D": 64, "E": 64},
    "float16": {"dtype": torch.float16},
}


def operands(length, rows=2, decay="token", dtype=torch.float32, D=16, E=16):
    """Return q, k, v as views of one projection, and log decays."""
    torch.manual_seed(0)
    projection = torch.randn(rows, length, 2, 2 * D + E, dtype=torch.float64).to(dtype).double()
    q, k, v = (x.transpose(1, 2) for x in projection.split([D, D, E], -1))
    log_decay = F.logsigmoid(2 * torch.randn(rows, 2, length, dtype=torch.float64) + 1)
    if decay == "head":
        log_decay = log_decay[0, :, 0]
    if decay == "steep":
        log_decay = STEEP[torch.randint(len(STEEP), (rows, 2, length))].double()
    return [q, k, v] if decay is None else [q, k, v, log_decay]


def errors(length, settings):
    """Return the largest errors of outputs and gradients, divided by the largest values."""
    settings = {"feature_map": "silu_shifted", **settings}
    dtype = settings.pop("dtype", torch.float32)
    shape = {name: settings.pop(name) for name in ("decay", "D", "E") if name in settings}
    rows = 1
    for mask in ("valid", "segments"):
        if mask in settings:
            settings[mask] = settings[mask][:, :length]
            rows = 2
    held = operands(length, rows, dtype=dtype, **shape)
    exact = [x.clone().requires_grad_() for x in held]
    narrow = [x.to(dtype if n < 3 else torch.float32).requires_grad_() for n, x in enumerate(held)]
    feature_map = settings["feature_map"]
    others = {name: value for name, value in settings.items() if name != "feature_map"}
    q, k = (apply_feature_map(feature_map, x) for x in exact[:2])
    expected = reference_attention(q, k, exact[2], *exact[3:], **others)
    found = linear_attention(*narrow, kernels="triton", **settings)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    of_expected = torch.autograd.grad(expected, exact, weights.double())
    of_found = torch.autograd.grad(found, narrow, weights)
    apart = []
    for x, y in zip((found, *of_found), (expected, *of_expected)):
        apart.append(((x.double() - y).abs().max() / y.abs().max().clamp_min(1e-6)).item())
    return apart


def behaviour():
    """Return what must be true of the operator beside its values."""
    q, k, v, log_decay = (x.float().requires_grad_() for x in operands(40))
    how = {"feature_map": "silu_shifted", "kernels": "triton", "valid": PADDED}

    def run(*tokens):
        y = linear_attention(*tokens, **how)
        return y, *torch.autograd.grad(y.square().sum(), tokens)

    first, second = run(q, k, v, log_decay), run(q, k, v, log_decay)
    alone = linear_attention(q[:1], k[:1], v[:1], log_decay[:1], **{**how, "valid": PADDED[:1]})
    broken = [x.masked_fill(~PADDED[:, None, :, None], torch.nan) for x in (q, k, v)]
    hidden = run(*broken, log_decay.masked_fill(~PADDED[:, None], torch.nan))
    compiled = torch.compile(lambda *x: linear_attention(*x, **how), fullgraph=True, backend="aot_eager")
    layer = LionAttention(32, 2, "lion_s", kernels="triton")
    tokens = torch.randn(2, 40, 32)
    calls = []
    op = fused.attention_op
    fused.attention_op = lambda *given: calls.append(given) or op(*given)
    y = layer(tokens, Layout())
    graph = LionAttention(32, 2, "lion_s")
    graph.load_state_dict(layer.state_dict())
    apart = (y - graph(tokens, Layout())).abs().max().item()
    fused.attention_op = op
    return {
        "same bits": all(torch.equal(a, b) for a, b in zip(first, second)),
        "no influence of the batch": torch.equal(alone, first[0][:1]),
        "padding is not read": all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, hidden)),
        "no graph break": torch.equal(compiled(q, k, v, log_decay), first[0]),
        "a layer takes it, and auto does not": len(calls) == 1 and apart < 1e-5,
    }


if __name__ == "__main__":
    fused.ONE_CHUNK = fused.CHUNK = 16
    with products_of_bf16():
        for name, settings in CASES.items():
            for length in SHORT if "--every" in sys.argv else SHORT[1:]:
                print(json.dumps([f"{name}, {length} tokens in chunks", errors(length, settings)]), flush=True)
        fused.ONE_CHUNK = 64
        for name, settings in CASES.items():
            print(json.dumps([f"{name}, full", errors(40, settings)]), flush=True)
        fused.ONE_CHUNK = fused.CHUNK = 16
        print(json.dumps(["behaviour", behaviour()]), flush=True)
