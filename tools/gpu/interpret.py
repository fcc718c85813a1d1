"""Run Inductor's GPU code on CPU tensors: Triton's interpreter runs every kernel, program by program, in numpy.

    python -m tools.gpu.interpret FOLDER MIXER,FORM,DIRECTION,TOKENS[,bfloat16][,autotune] ...

For each stage of a mixer's layer, the command prints one line of JSON with the largest error of the output or of the
gradients, divided by the largest value of the same graph run on the CPU. It writes the kernels into the folder. MIXER
may also be `selective_scan`, for a step of its loop. With `autotune`, matrix products are kernels of Inductor's, too.
Sizes are small: 16 features, 2 heads, chunks of 16 tokens. A separate process is needed, because Triton reads
TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch._inductor import config
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from lion.layers.mixers import MIXERS
from tools.gpu.cubins import load
from tools.gpu.graphs import Graph, trace
from tools.gpu.lower import Program, call_of, lower
from tools.gpu.scans import SCAN, scan_graphs
from tools.gpu.targets import TARGETS

WIDTH, HEADS, CHUNK = 16, 2, 16
BLOCKS = {"XBLOCK": 64, "YBLOCK": 16, "ZBLOCK": 1, "R0_BLOCK": 16, "R1_BLOCK": 16}  # elements per program
LANGUAGE = "sqrt|rsqrt|exp|exp2|log|log2|sin|cos|erf|floor|ceil"  # functions of libdevice that `tl` also has
STAND_INS = {
    "log1p(x)": "tl.log(1 + x)",
    "expm1(x)": "tl.exp(x) - 1",
    "tanh(x)": "2 * tl.sigmoid(2 * x) - 1",
    "pow(x, y)": "tl.exp(y * tl.log(x))",  # for positive x
    "isinf(x)": "tl.abs(x) == float('inf')",
    "isnan(x)": "x != x",
}
CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment", "assert_tensor_metadata")


class Unsupported(Exception):
    """Error for a kernel that calls a function which the interpreter cannot run."""


class Kernel:
    """A Triton kernel that runs on CPU tensors."""

    def __init__(self, name: str, source: str, folder: Path) -> None:
        source = re.sub(r"@triton_heuristics\.\w+\(\n(?:.|\n)*?\n\)\n@triton\.jit", "@triton.jit", source)
        source = re.sub(rf"libdevice\.({LANGUAGE})\b", r"tl.\1", source)
        for call, value in STAND_INS.items():
            function = call.partition("(")[0]
            if f"libdevice.{function}(" in source:
                body = f"@triton.jit\ndef own_{call}:\n    return {value}\n\n\n@triton.jit"
                source = source.replace(f"libdevice.{function}(", f"own_{function}(").replace("@triton.jit", body, 1)
        left = sorted(set(re.findall(r"libdevice\.(\w+)\(", source)))
        if left:
            raise Unsupported(f"{name}: libdevice.{', '.join(left)}")
        self.fn = load(name, source, folder)

    def run(self, *args: Any, stream: Any = None) -> None:
        names = self.fn.arg_names
        sizes = dict(zip(names, args))
        if len(args) > len(names):  # the grid of a template comes last
            self.fn[args[len(names) :]](*args[: len(names)])
            return
        grid = []
        for axis in "xyz":
            grid.append(-(-sizes.get(f"{axis}numel", 1) // BLOCKS[f"{axis.upper()}BLOCK"]))
        blocks = {name: BLOCKS[name] for name in names if name in BLOCKS}
        self.fn[tuple(grid)](*args, **blocks)


class Library:
    """A stand-in for Inductor's `extern_kernels`, which calls torch's matrix products."""

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return lambda *args, out=None, **given: out.copy_(getattr(torch, name)(*args, **given))


def widened(x: TensorHandle) -> TensorHandle:
    """Return bfloat16 numbers, which the interpreter holds as uint16, as float32; others unchanged."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def products_of_bf16() -> Any:
    """Return a patch of `tl.dot`, which multiplies the bits of bfloat16 numbers in Triton 3.8's interpreter."""
    dot = InterpreterBuilder.create_dot
    return mock.patch.object(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    )


def runner(program: Program, folder: Path) -> Callable[[list[Any]], Any]:
    """Return the generated code's function `call`, for CPU tensors.

    Raises:
        Unsupported: The interpreter cannot run one of the kernels.
    """
    source = textwrap.dedent(call_of(program.code)).replace("def call(self, args):", "def call(args):")
    source = re.sub(r"torch\.cuda\._DeviceGuard\(\d+\)", "contextlib.nullcontext()", source)
    source = re.sub(r"torch\.cuda\.set_device\(\d+\)", "None", source)

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def reinterpret(x: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
        return x.as_strided(size, stride, x.storage_offset() + offset)

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    names: dict[str, Any] = {"torch": torch, "contextlib": contextlib, "aten": torch.ops.aten}
    names |= {"get_raw_stream": nothing, "reinterpret_tensor": reinterpret, "extern_kernels": Library()}
    names |= dict.fromkeys(CHECKS, nothing) | dict.fromkeys(("empty_strided_cuda", "empty_strided_cpu"), empty)
    names |= {name: Kernel(name, kernel, folder) for name, kernel in program.kernels.items()}
    exec(source, names)
    return names["call"]


def largest_error(graph: Graph, program: Program, least: int) -> float:
    """Return the largest error of the program's results, divided by the largest value of the graph's results.

    For the forward stage, only the output is compared; for the backward stage, gradients of at least `least` numbers.
    """
    with tempfile.TemporaryDirectory() as folder, products_of_bf16():
        call = runner(program, Path(folder))
        found = call([laid_out(x, description) for x, description in zip(graph.given, graph.inputs)])
    expected = graph.results[:1] if graph.stage == "forward" else graph.results
    errors = []
    for x, y in zip(found, expected):
        if isinstance(y, Tensor) and y.is_floating_point() and y.numel() >= least:
            error = (x - y).abs().max() / y.abs().max().clamp_min(1e-6)
            errors.append(error.item())
    return max(errors)


def laid_out(x: Any, description: Any) -> Any:
    """Return a copy of an input with the strides that the graph was lowered for; other inputs unchanged."""
    if not isinstance(x, Tensor):
        return x
    size, stride, dtype = description
    held = [1 if s == 0 else n for n, s in zip(size, stride)]
    part = x[tuple(slice(0, n) for n in held)]
    return torch.empty_strided(held, stride, dtype=dtype).copy_(part).expand(size)


def graphs_of(mixer: str, form: str, direction: str, length: int, dtype: str) -> list[Graph]:
    """Return the graphs of a mixer's layer on one sequence, or of a step of the selective scan."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    if mixer == SCAN:
        return scan_graphs(length, 2 * WIDTH, WIDTH, getattr(torch, dtype))
    layer = MIXERS[mixer].layer(WIDTH, HEADS, mixer, form=form, direction=direction, chunk_size=CHUNK)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        return trace(layer, torch.randn(1, length, WIDTH, requires_grad=True))


def verify(case: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Check a mixer's layer on one sequence, as named on the command line; yield one row per stage."""
    mixer, form, direction, length, *options = case.split(",")
    narrow = "bfloat16" in options
    graphs = graphs_of(mixer, form, direction, int(length), "bfloat16" if narrow else "float32")
    least = 2 * HEADS if narrow else 1  # gradients of the gates' biases are sums over tokens that cancel
    for graph in graphs:
        with config.patch(split_reductions=False):  # programs of a split reduction wait for each other
            program = lower(graph, TARGETS["h100"], autotune="autotune" in options)
        (folder / f"{case} {graph.stage}.json").write_text(json.dumps(program.kernels))
        row = {
            "case": case,
            "stage": graph.stage,
            "kernels": len(program.kernels),
            "library": program.cost.library,
            "fallbacks": program.fallbacks,
        }
        try:
            row["error"] = largest_error(graph, program, least)
        except Unsupported as error:
            row["unsupported"] = str(error)
        yield row


if __name__ == "__main__":
    for case in sys.argv[2:]:
        for row in verify(case, Path(sys.argv[1])):
            print(json.dumps(row), flush=True)
