"""Lowering of a graph to Inductor's code for a GPU, and the counts of its kernels, bytes and FLOPs."""

from __future__ import annotations

import copy
import math
import re
from typing import Any, NamedTuple

import torch
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import Dep, MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernelOut, TritonTemplateBuffer
from torch._inductor.scheduler import BaseSchedulerNode, FusedSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.node import Node, map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.flop_counter import flop_registry

from lion.trainer.compilation import mend_split_scans
from tools.gpu.cost import Cost
from tools.gpu.graphs import Graph
from tools.gpu.scans import steps_of
from tools.gpu.targets import DEVICE, Target, pretend

OWN_PRODUCTS = {  # one choice for each product, so that nothing is timed
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
    "test_configs.max_mm_configs": 1,
}
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.S)


class Program(NamedTuple):
    """The generated code of a graph for a GPU.

    Attributes:
        stage: The stage of the graph.
        code: The generated Python code.
        kernels: Sources of the Triton kernels by name.
        fallbacks: Names of the eager operators that the code calls, except matrix products.
        cost: Counts of the code.
    """

    stage: str
    code: str
    kernels: dict[str, str]
    fallbacks: list[str]
    cost: Cost


def lower(graph: Graph, target: Target, autotune: bool = False) -> Program:
    """Generate Inductor's code of a graph for a target.

    With `autotune`, every matrix product is a kernel of Inductor's, which neighbours may be fused with. On a GPU, the
    trainer's setting of this name times such kernels beside those of libraries; here none are timed, and the first of
    Inductor's is taken.
    """
    mend_split_scans(torch.__version__)
    module = GraphModule(graph.module, copy.deepcopy(graph.module.graph))
    move(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = []
    with mode:
        for given in graph.inputs:
            if isinstance(given, tuple):
                size, stride, dtype = given
                given = torch.empty_strided(size, stride, dtype=dtype, device=DEVICE)
            inputs.append(given)
    options = {"compile_threads": 1}
    if autotune:
        options |= OWN_PRODUCTS
    with pretend(target), config.patch(options):
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
        flops = sum(map(flops_of, module.graph.nodes))
        with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            _recursive_post_grad_passes(module, is_inference=graph.stage == "inference")
            lowering = GraphLowering(module, example_inputs=inputs, shape_env=None)
            with V.set_graph_handler(lowering):
                lowering.run(*inputs)
                code = lowering.codegen()[0]
                moved = sum(map(bytes_of, lowering.scheduler.nodes))
    code = getattr(code, "value", code)
    body = call_of(code)
    kernels = {name: source.replace("\\'", "'") for name, source in KERNEL.findall(code)}
    fallbacks = re.findall(r"= (torch\.ops\.[\w.]+|aten\.[\w.]+)\(", body)
    cost = Cost(
        kernels=len(kernels),
        launches=len(re.findall(r"\btriton_\w+\.run\(", body)),
        library=len(re.findall(r"\bextern_kernels\.\w+\(", body)),
        fallbacks=len(fallbacks),
        moved=int(moved),
        flops=flops,
    )
    for step, count in steps_of(graph.module):
        cost += lower(step, target, autotune).cost * count
    return Program(graph.stage, code, kernels, fallbacks, cost)


def bytes_of(node: BaseSchedulerNode) -> int:
    """Return the bytes that a kernel reads and writes.

    Inductor counts whole buffers for fused kernels and for products of libraries, and reads of the size of the result
    for its own products. Here, a kernel that reads a part of a buffer has the bytes of that part.
    """
    found = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    parts: dict[str, int] = {}
    deps: set[Dep] = set()
    for each in node.get_nodes():
        if isinstance(each.node, (ExternKernelOut, TritonTemplateBuffer)):
            for view in each.node.inputs:
                size = math.prod(map(int, view.get_size())) * view.get_dtype().itemsize
                parts[view.get_name()] = parts.get(view.get_name(), 0) + size
        elif isinstance(node, FusedSchedulerNode):
            deps |= each.read_writes.reads | each.read_writes.writes
    for dep in deps:
        size = found.get(dep.name, 0)
        if isinstance(dep, MemoryDep) and not dep.is_indirect():
            size = int(dep.get_numel()) * V.graph.get_dtype(dep.name).itemsize
        parts[dep.name] = parts.get(dep.name, 0) + size
    if node.is_template():
        found = {name: int(V.graph.get_numel(name)) * V.graph.get_dtype(name).itemsize for name in found}
    return sum(min(count, parts.get(name, count)) for name, count in found.items())


def flops_of(node: Node) -> int:
    """Return the FLOPs of a product or of attention, masked pairs counted (twice the FLOPs of a triangle)."""
    args, kwargs = map_aggregate((node.args, node.kwargs), value_of)
    return operator_flops(node.target, args, kwargs, value_of(node))


def operator_flops(operator: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of a call of an operator, 0 for one that is neither a product nor attention."""
    count = flop_registry.get(getattr(operator, "overloadpacket", operator))
    if count is None:
        return 0
    return int(count(*args, **kwargs, out_val=out))


def value_of(x: Any) -> Any:
    if isinstance(x, Node):
        return x.meta.get("val")
    return x


def move(module: torch.fx.GraphModule) -> None:
    """Replace every device in a graph and its subgraphs by the GPU."""
    for part in module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            node.args = map_aggregate(node.args, on_gpu)
            node.kwargs = map_aggregate(node.kwargs, on_gpu)
        part.recompile()


def on_gpu(x: Any) -> Any:
    if isinstance(x, torch.device):
        return DEVICE
    return x


def call_of(code: str) -> str:
    """Return the source of the function `call`, which launches the kernels of generated code."""
    start = code.rindex("\n", 0, code.index("def call(")) + 1
    first, *rest = code[start:].split("\n")
    lines = [first]
    for line in rest:
        if line.strip() and indent_of(line) <= indent_of(first):
            break
        lines.append(line)
    return "\n".join(lines)


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())
