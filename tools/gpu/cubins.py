"""Compilation of generated Triton kernels to cubins by Triton and ptxas, as on a GPU."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tools.gpu.targets import Target, pretend


def compile_kernels(kernels: dict[str, str], target: Target) -> None:
    """Compile every kernel to a cubin.

    Args:
        kernels: Sources of the kernels by name.
        target: GPU to compile for.

    Raises:
        Exception: Any error of the compiler.
    """
    with tempfile.TemporaryDirectory() as folder, pretend(target):
        for name, source in kernels.items():
            compile_kernel(load(name, source, Path(folder)), target)


def compile_kernel(kernel: Any, target: Target) -> None:
    chosen, meta, names = kernel.configs[0], kernel.triton_meta, kernel.fn.arg_names
    constants = {**meta.get("constants", {}), **chosen.kwargs}
    signature = {n: "constexpr" if n in chosen.kwargs else meta["signature"].get(n, "constexpr") for n in names}
    constexprs = {(names.index(n),): value for n, value in constants.items() if n in names}
    attrs = {}
    if meta.get("configs"):
        attrs = meta["configs"][0]
    source = ASTSource(kernel.fn, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", target.architecture, 32), options=options)
    if not built.asm["cubin"]:
        raise RuntimeError(f"{kernel.fn.__name__}: no cubin")


def load(name: str, source: str, folder: Path) -> Any:
    """Load a kernel from its generated source, through a file with a short name: Triton reads sources from files."""
    path = folder / f"kernel_{len(list(folder.iterdir()))}.py"
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
