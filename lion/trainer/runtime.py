"""The machine: device, processes, seeds, precision, compilation."""

from __future__ import annotations

import logging
import os
import platform
import random
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lion.config import ConfigError

log = logging.getLogger("lion")


@dataclass(frozen=True)
class Runtime:
    """Where this process runs: its device, its rank, and the number of processes."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: Tensor) -> Tensor:
        """The values as one float64 tensor, added up over all processes."""
        total = torch.stack([v.detach().to(self.device, torch.float64) for v in values])
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process; talks over the CPU, so that no step waits for the GPU."""
        if self.world == 1:
            return flag
        total = torch.tensor(float(flag))
        dist.all_reduce(total)
        return bool(total)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order of rank."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def autocast(self, precision: str) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")


def start_runtime(device: str = "auto") -> Runtime:
    """This process's runtime; joins the process group when started by `torchrun`."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda" and world > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        kind = torch.device(device)
        torch.empty(0, device=kind)
    except (RuntimeError, AssertionError):
        available = "cuda, cpu" if torch.cuda.is_available() else "cpu"
        raise ConfigError(f"trainer.device: {device!r} is not available here, use one of {available}") from None
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo")
    return Runtime(kind, rank, world)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Every random state of this process, as plain data and tensors."""
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), place, has_gauss, cached],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def compile_blocks(model: nn.Module, backend: Any = "inductor") -> bool:
    """Compile every block of the model in place, with static shapes; eager, with a line, without a compiler.

    In place (`Module.compile`) the names in checkpoints stay as they are. Equal blocks share their graphs.
    """
    missing = missing_compiler() if backend == "inductor" else None
    if missing:
        log.warning("running eager, without torch.compile: %s", missing)
        return False
    torch._dynamo.config.recompile_limit = 32  # train, evaluation and each form are graphs of their own
    for block in model.encoder.blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    return True


def missing_compiler() -> str | None:
    """What Inductor would miss on this machine, if anything."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++").split()[0]
    if shutil.which(name) is None:
        return f"no C++ compiler found ({name}); install g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"no Python headers in {sysconfig.get_path('include')}; install python3-dev"
    return None


def environment() -> dict[str, Any]:
    """Versions, device and commit, for the run folder."""
    import torchvision

    def git(*args: str) -> str | None:
        try:
            out = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return out.stdout.strip() if out.returncode == 0 else None

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "devices": torch.cuda.device_count() if cuda else 0,
        "threads": torch.get_num_threads(),
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain")),
    }
