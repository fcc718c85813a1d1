"""Target GPUs of code generation, and a context that makes torch find such a GPU on this machine.

Rates are from the data sheets: dense tensor-core rates (without sparsity) of bfloat16 with float32 sums, TF32 off.
"""

from __future__ import annotations

import types
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from lion.config import ConfigError
from lion.trainer.compilation import release

TORCH = ((2, 11), (2, 14), (2, 15))  # supported versions, whose internals this package uses
LAUNCH = 6e-6  # CPU seconds per launch or library call in Inductor's Python wrapper; an assumption
GAP = 1e-6  # seconds between two kernels of a CUDA graph; an assumption
FUSED_SHARE = 0.5  # share of the tensor cores' rate in FlashAttention; an assumption (about 500 TFLOP/s on an H100)
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Target:
    """A GPU.

    Attributes:
        name: Name of the product.
        capability: Compute capability (major, minor).
        bandwidth: Memory bandwidth, bytes/s.
        bf16: FLOP/s of bfloat16 products.
        fp32: FLOP/s of float32 products.
        processors: Number of streaming multiprocessors.
        memory: Memory, GiB.
        shared: Largest shared memory of a block, bytes.
        cache: L2 cache, MiB.
    """

    name: str
    capability: tuple[int, int]
    bandwidth: float
    bf16: float
    fp32: float
    processors: int
    memory: int
    shared: int
    cache: int

    @property
    def architecture(self) -> int:
        major, minor = self.capability
        return 10 * major + minor

    def rate(self, dtype: torch.dtype) -> float:
        if dtype == torch.float32:
            return self.fp32
        return self.bf16

    def properties(self) -> types.SimpleNamespace:
        """Return the fields of `torch.cuda.get_device_properties`."""
        return types.SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.processors,
            total_memory=self.memory << 30,
            warp_size=32,
            max_threads_per_multi_processor=2048 if self.architecture in (80, 90) else 1536,
            max_threads_per_block=1024,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared,
            shared_memory_per_multiprocessor=self.shared + 1024,
            L2_cache_size=self.cache << 20,
        )


TARGETS = {
    "h100": Target("NVIDIA H100 SXM", (9, 0), 3.35e12, 989e12, 67e12, 132, 80, 232448, 50),
    "h200": Target("NVIDIA H200", (9, 0), 4.8e12, 989e12, 67e12, 132, 141, 232448, 50),
    "a100": Target("NVIDIA A100 SXM 80 GB", (8, 0), 2.039e12, 312e12, 19.5e12, 108, 80, 166912, 40),
    "l40s": Target("NVIDIA L40S", (8, 9), 0.864e12, 362e12, 91.6e12, 142, 48, 101376, 96),
    "rtx4090": Target("NVIDIA GeForce RTX 4090", (8, 9), 1.008e12, 165e12, 82.6e12, 128, 24, 101376, 72),
}


def check_toolchain() -> None:
    """Check that this torch is supported and that Triton is installed.

    Raises:
        ConfigError: The version of torch is not supported, or there is no Triton.
    """
    if release(torch.__version__) not in TORCH:
        known = ", ".join(".".join(map(str, v)) for v in TORCH)
        raise ConfigError(f"GPU code can only be generated under torch {known}; this is {torch.__version__}")
    try:
        import triton  # noqa: F401
    except ImportError:
        raise ConfigError("no Triton in this environment: install torch's default wheel, not the CPU wheel") from None


def pretend(target: Target) -> ExitStack:
    """Return a context in which torch, Inductor and Triton find the target GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    properties = target.properties()
    answers: dict[str, Any] = {
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_properties": properties,
        "torch.cuda._get_device_properties": properties,
        "torch.cuda.get_device_capability": target.capability,
        "torch.cuda.get_device_name": target.name,
        "torch.cuda._lazy_init": None,
        "torch.cuda.synchronize": None,
        "torch.cuda.is_bf16_supported": True,
        "torch.utils._triton.has_triton": True,
        "torch._inductor.scheduler.has_triton": True,
        "torch._inductor.utils.has_triton": True,
        "torch._inductor.utils.get_gpu_dram_gbps": target.bandwidth / 1e9,
        "torch._dynamo.device_interface.CudaInterface.is_available": True,
        "torch._dynamo.device_interface.CudaInterface.get_device_properties": properties,
        "torch._dynamo.device_interface.CudaInterface.get_compute_capability": target.architecture,
    }

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", target.architecture, 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return DEVICE

    def answer(value: Any) -> Any:
        return lambda *_, **__: value

    stack = ExitStack()
    for name, value in answers.items():
        stack.enter_context(mock.patch(name, answer(value), create=True))
    stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", Driver()))
    return stack
