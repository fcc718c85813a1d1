"""Compilation of a model's blocks by torch.compile, and the checks before it."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config

from lion.files import write_atomic

if TYPE_CHECKING:
    from lion.models.base import Model

log = logging.getLogger("lion")
EMPTY_KERNEL = 'extern "C" void kernel(float* x) {}'


def compile_blocks(
    model: Model,
    backend: Any = "inductor",
    *,
    dynamic: bool | None = False,
    memory_budget: float = 1.0,
    autotune: bool = False,
) -> bool:
    """Compile every block of the model in place, with static shapes; return False if there is no compiler.

    Without a compiler the model stays eager, and a warning is logged. Compilation in place (`Module.compile`) keeps the
    names in checkpoints. Equal blocks share their graphs. With `dynamic=None`, a size that changes between calls
    becomes symbolic, for callers with batches of different sizes. With a `memory_budget` below 1, graphs save less for
    the backward pass, which recomputes the rest (`activation_memory_budget` of PyTorch, for the whole process). With
    `autotune`, Inductor times its own kernels for matrix products beside the libraries' (for the whole process, too).
    """
    if not can_compile(backend):
        return False
    torch._functorch.config.activation_memory_budget = memory_budget
    avoid_wrong_gradients(model, torch.__version__)
    mend_split_scans(torch.__version__)
    if autotune:
        time_products()
    if getattr(model, "part", None) is not None:
        overlap_exchanges()
    for unit in model.units():
        unit.compile(backend=backend, fullgraph=True, dynamic=dynamic)
    return True


def load_compiled(file: str | None) -> None:
    """Fill the compiler's caches from a file of `save_compiled`, of this or of another machine.

    The file contains code that is run. Without a usable file, everything is compiled, and a warning is logged.
    """
    if file is None or not Path(file).exists():
        return
    logging.getLogger("torch.compiler._cache").setLevel(logging.ERROR)  # logs a traceback before our line
    try:
        if torch.compiler.load_cache_artifacts(Path(file).read_bytes()) is None:
            raise OSError(0, "no file of compiled code")
    except OSError as error:
        log.warning("%s: not used (%s)", file, error.strerror)


def save_compiled(file: str | None) -> None:
    """Write the code that this process has compiled, or found in its caches, to a file."""
    if file is None:
        return
    made = torch.compiler.save_cache_artifacts()
    if made is None:
        return
    try:
        write_atomic(Path(file), lambda f: f.write(made[0]))
    except OSError as error:
        log.warning("%s: not saved (%s)", file, error.strerror)


def avoid_wrong_gradients(model: Model, version: str) -> None:
    """Disable the fusion `mix_order_reduction`, which may silently compute wrong gradients of adaLN on a GPU.

    The bug is in Inductor before 2.15, for micro-batches of one sample of about 16,000 tokens or more
    (pytorch#193061).
    """
    modulated = any(getattr(unit, "conditional", False) for unit in model.units())
    if modulated and release(version) < (2, 15):
        from torch._inductor import config

        config.triton.mix_order_reduction = False


def mend_split_scans(version: str) -> None:
    """Let Inductor load values that are equal for all tokens, such as parameters, in the kernel of a cumulative sum.

    Inductor before 2.13 fails to generate such a kernel for a GPU (a TypeError in `get_block_shape`) if few sums are
    computed, as for vector decays of small models and batches: the shape of a load lacks the dimension of the sums.
    """
    if release(version) >= (2, 13):
        return
    from torch._inductor.codegen.triton import TritonSymbols
    from torch._inductor.virtualized import V
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    original = TritonSymbols.get_block_shape
    if original.__module__ == __name__:
        return

    def get_block_shape(cls: type, expr: Any) -> Any:
        sums = {x: 0 * x for x in expr.free_symbols if V.kernel.no_x_dim and symbol_is_type(x, SymT.XBLOCK)}
        return original(expr.xreplace(sums))

    setattr(TritonSymbols, "get_block_shape", classmethod(get_block_shape))  # noqa: B010 - a method


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version of PyTorch."""
    return tuple(map(int, version.split(".")[:2]))


def time_products() -> None:
    """Let Inductor take the fastest kernel for every matrix product, without printing the times."""
    from torch._inductor import config

    config.max_autotune_gemm = True
    if hasattr(config, "autotune_num_choices_displayed"):
        config.autotune_num_choices_displayed = 0


def overlap_exchanges() -> None:
    """Let Inductor start an exchange between processes as early as possible, and wait where its result is read."""
    from torch._inductor import config

    if hasattr(config, "reorder_for_compute_comm_overlap_passes"):
        config.reorder_for_compute_comm_overlap = True
        config.reorder_for_compute_comm_overlap_passes = ["sink_waits", "raise_comms"]


def compile_steps(model: Model, backend: Any = "inductor") -> bool:
    """Compile `step` of every block of a streaming model in place; return False if there is no compiler.

    Without a compiler the model stays eager, and a warning is logged. One graph serves all blocks and tokens; after a
    prompt of one token, a growing cache needs two more, because a graph takes a size of 1 as a constant. A growing
    cache must reserve memory, see `lion.layers.mixers.softmax.reserve`.
    """
    if not can_compile(backend):
        return False
    for unit in model.units():
        block: Any = unit
        block.step = torch.compile(block.step, backend=backend, fullgraph=True)
    return True


def can_compile(backend: Any) -> bool:
    """Return whether this machine can compile, after configuring torch.compile; log a warning if not."""
    missing = None
    if backend == "inductor":
        missing = missing_compiler()
    if missing:
        log.warning("running eager, without torch.compile: %s", missing)
        return False
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns about nvcc without a GPU
    warnings.filterwarnings("ignore", message=".*_prims_common.check.*", category=FutureWarning)  # from torch 2.14
    torch._dynamo.config.recompile_limit = 32  # training, evaluation and each form need separate graphs
    torch._dynamo.config.optimize_ddp = False  # it cuts graphs where gradients are sent: a block would be several
    torch._dynamo.config.specialize_float = True  # otherwise `dynamic=True` traces every graph twice
    return True


def missing_compiler() -> str | None:
    """Return which requirement of Inductor is missing on this machine, or None."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++").split()[0]
    if shutil.which(name) is None:
        return f"no C++ compiler found ({name}); install g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"no Python headers in {sysconfig.get_path('include')}; install python3-dev"
    cache = compiler_cache()
    if os.statvfs(cache).f_flag & os.ST_NOEXEC:
        return f"{cache} is on a file system without execution (noexec); set TORCHINDUCTOR_CACHE_DIR to another folder"
    return None


def compiler_cache() -> Path:
    """Return the folder of compiled code, or the nearest folder above it that exists."""
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir()))
    while not folder.exists():
        folder = folder.parent
    return folder


def prepare_compiler() -> threading.Thread | None:
    """Start a thread in which Inductor tests the vector instructions and precompiles its C++ headers.

    Both are needed once per machine and take seconds. Started early, they run beside the reading of data and the
    construction of the model, instead of before the first compiled graph. Returns None without a compiler.

    It calls internals of Inductor. Where they have changed, nothing is prepared, and the first graph takes longer.
    """
    if missing_compiler():
        return None
    try:  # imported here: two threads that import the compiler at once may see half of it
        import torch._dynamo  # noqa: F401
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401
    except ImportError as error:
        log.debug("compiler not prepared: %s", error)
        return None

    def prepare() -> None:
        try:
            flags = cpu_vec_isa.x86_isa_checker()
            sets = []
            for isa in cpu_vec_isa.supported_vec_isa_list:
                if all(flag in flags for flag in str(isa).split()):
                    sets.append(isa)
            with ThreadPoolExecutor() as pool:  # each test compiles and loads small libraries
                list(pool.map(bool, sets))
            codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], EMPTY_KERNEL)
        except Exception as error:
            log.debug("compiler not prepared: %s", error)

    thread = threading.Thread(target=prepare, name="prepare_compiler", daemon=True)
    thread.start()
    return thread
