"""Tracing of a mixer's operator, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.bench.operators import OPERATORS
from tools.gpu.graphs import Graph, trace


def operator_graphs(mixer: str, form: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[Graph]:
    """Return the graphs of a mixer's operator in chunks of 64 tokens, including the feature map of q and k.

    Args:
        mixer: Name in `OPERATORS`.
        form: Form of the operator.
        shape: (B, H, L, D) of q, k and v.
        dtype: Dtype of q, k and v.
    """
    batch, heads, length, dim = shape
    operator = OPERATORS[mixer]
    tensors, fixed = operator.inputs(heads, dim, batch, length, torch.device("cpu"), dtype, featurized=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {name: mode.from_tensor(t.detach()).requires_grad_(t.requires_grad) for name, t in tensors.items()}

    def run(*given: Tensor) -> Tensor:
        return operator.run(dict(zip(fakes, given)), fixed, form, 64)

    with mode:
        return trace(run, *fakes.values())
