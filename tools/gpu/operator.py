"""The operator of a mixer, forward and backward, as programs for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.bench.operators import OPERATORS
from tools.gpu.graphs import Graph, trace
from tools.gpu.lower import Program, lower
from tools.gpu.targets import Target


def operator_programs(
    mixer: str, form: str, shape: tuple[int, int, int, int], dtype: torch.dtype, target: Target, chunk_size: int = 64
) -> list[Program]:
    """The programs of a mixer's operator on tokens (B, H, L, D), with the feature map that q and k go through."""
    batch, heads, length, dim = shape
    operator = OPERATORS[mixer]
    tensors, fixed = operator.inputs(heads, dim, batch, length, torch.device("cpu"), dtype, featurized=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {name: mode.from_tensor(t.detach()).requires_grad_(t.requires_grad) for name, t in tensors.items()}
    with mode:
        graphs = operator_graphs(mixer, form, fakes, fixed, chunk_size)
    return [lower(graph, target) for graph in graphs]


def operator_graphs(
    mixer: str, form: str, tensors: dict[str, Tensor], fixed: dict, chunk_size: int = 64
) -> list[Graph]:
    names = tuple(tensors)

    def run(*given: Tensor) -> Tensor:
        return OPERATORS[mixer].run(dict(zip(names, given)), fixed, form, chunk_size)

    return trace(run, *tensors.values())
