"""Tracing of the graphs that torch.compile passes to Inductor.

The graphs are traced on the CPU and moved to the GPU afterwards (`tools.gpu.lower`), because autograd on a CUDA device
requires a CUDA driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx import GraphModule

from lion.layers.constants import Constants

UNTRACEABLE = (  # errors of a model that is not one graph of known shapes
    TorchDynamoException,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


@dataclass
class Graph:
    """A graph of one stage.

    Attributes:
        stage: "forward", "backward" or "inference".
        module: The graph.
        inputs: Shape, stride and dtype of every input tensor; other inputs unchanged.
        given: The inputs of the last call.
        results: The outputs of the last call.
    """

    stage: str
    module: GraphModule
    inputs: list[Any]
    given: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    def __call__(self, *args: Any) -> Any:
        self.given = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
        with torch.no_grad():
            outputs = self.module(*args)
        self.results = list(outputs)
        return outputs


def trace(fn: Callable[..., Tensor], *args: Any) -> list[Graph]:
    """Return the graphs for a GPU of `fn(*args)`, and of its gradients if they are enabled and the result requires one.

    A graph break is an error. With fake tensors, under their `FakeTensorMode`, nothing is computed.
    """
    graphs: list[Graph] = []

    def keep(stage: str) -> Callable:
        def compiler(module: GraphModule, example: Sequence[Any]) -> Callable:
            graphs.append(Graph(stage, module, [described(x) for x in example]))
            return make_boxed_func(graphs[-1])

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        inference_compiler=keep("inference"),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with mock.patch("lion.ops.modes.for_gpu", lambda _: True):
        out = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args)
    if torch.is_grad_enabled() and out.requires_grad:
        out.backward(torch.ones_like(out))
    return graphs


def partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph into the forward and the backward graph, as Inductor does with these `options`."""
    with V.set_fake_mode(detect_fake_mode(inputs)):
        joint = _recursive_joint_graph_passes(joint)
    return min_cut_rematerialization_partition(joint, inputs, **options)


def described(x: Any) -> Any:
    if isinstance(x, Tensor):
        return (tuple(x.shape), x.stride(), x.dtype)
    return x


def fake_module(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replace the parameters, buffers and constants of a module by fake tensors, in place; return the module."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, t in held.items():
                if t is None:
                    continue
                fake = mode.from_tensor(t.detach())
                held[name] = nn.Parameter(fake, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else fake
        if isinstance(part, Constants):
            part.replace(mode.from_tensor)
    return module
