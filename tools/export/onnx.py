"""Programs for ONNX Runtime: one file, with the description and the tokenizer as metadata properties."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lion.config import ConfigError
from lion.runs import LoadedRun
from tools.export.program import Program

MOST = 2**31 - 2**20  # bytes of the largest file of ONNX (2 GiB), with room for the graph


def check(run: LoadedRun, out: Path) -> None:
    """Check that the packages are installed, and that the weights fit into a file of ONNX.

    Raises:
        ConfigError: They are not, or do not.
    """
    runtime()
    if (size := sum(value.nbytes for value in run.model.state_dict().values())) > MOST:
        raise ConfigError(f"{out}: {size / 2**30:.1f} GiB of weights, a file of ONNX holds 2 GiB; use --format pt2")


def runtime() -> Any:
    """Import ONNX Runtime, and check that the other packages are installed.

    Raises:
        ConfigError: A package is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--format onnx needs {error.name}: pip install onnx onnxruntime onnxscript") from None
    return onnxruntime


def solved(A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Return `torch.linalg.solve_triangular(A, B)` for `unitriangular` A (.., C, C), by operators that ONNX has.

    The inverse grows from blocks of s tokens to blocks of 2 s: that of [[F, 0], [G, H]] has -H^-1 G F^-1 in its corner.
    No power of A is formed, which could grow far above the inverse.

    Raises:
        NotImplementedError: A solution from the right, or a diagonal, which delta rules do not have.
    """
    if not left or not unitriangular:
        raise NotImplementedError("solve_triangular: only delta rules' left, unitriangular systems")
    size, index = A.shape[-1], torch.arange(A.shape[-1], device=A.device)
    A, inverse = A.triu(1) if upper else A.tril(-1), torch.eye(size, dtype=A.dtype, device=A.device).expand_as(A)
    block = 1
    while block < size:
        own, outer = index // block, index // (2 * block)
        corners = (outer[:, None] == outer) & (own[:, None] != own)
        inverse = inverse - inverse @ (A * corners) @ inverse
        block *= 2
    return inverse @ B


def write(program: Program, graph: ExportedProgram, path: Path) -> None:
    for name in ("torch.onnx", "onnxscript"):
        logging.getLogger(name).setLevel(logging.ERROR)
    names = [port.name for port in program.inputs]
    graph = graph.run_decompositions({torch.ops.aten.linalg_solve_triangular.default: solved})
    try:
        made = torch.onnx.export(
            graph, verbose=False, input_names=names, output_names=[p.name for p in program.outputs]
        )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(f"{path.name}: ONNX lacks an operator of this model ({reason}); use --format pt2") from None
    axes = [zip(value.shape, port.shape) for value, port in zip(made.model.graph.inputs, program.inputs)]
    made.rename_axes({str(theirs): ours for pairs in axes for theirs, ours in pairs if isinstance(ours, str)})
    made.model.metadata_props.update(program.files)
    made.save(path, external_data=False)


def load(path: Path) -> Callable[..., Any]:
    session = runtime().InferenceSession(path)
    names = [port.name for port in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor | list[Tensor]:
        found = [torch.from_numpy(x) for x in session.run(None, dict(zip(names, (x.numpy() for x in inputs))))]
        if len(found) > 1:
            return found
        return found[0]

    return run
