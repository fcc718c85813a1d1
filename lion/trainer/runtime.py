"""Runtime of a process: device, process group, seeds, precision, compilation."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import logging
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lion.config import ConfigError
from lion.ops import Part
from lion.samples.seeds import derive

log = logging.getLogger("lion")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class Runtime:
    """The device and rank of this process, and the number of processes (`world`).

    `part` is the part of each row that this process computes, if several processes share the tokens of a row. The
    processes of one row have neighbouring ranks.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    part: Part | None = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def sequence(self) -> int:
        """The number of processes that share a row."""
        if self.part is None:
            return 1
        return self.part.count

    @property
    def batch_rank(self) -> int:
        """The place of this process's samples in a batch, of `batch_world`; processes that share rows are in one."""
        return self.rank // self.sequence

    @property
    def batch_world(self) -> int:
        """The number of processes, or groups of processes that share rows, with different samples."""
        return self.world // self.sequence

    def sum(self, *values: Tensor) -> Tensor:
        """Sum values of equal shapes over all processes; return one float64 tensor with an element per value."""
        total = torch.stack([v.detach().to(self.device, torch.float64) for v in values])
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set in any process.

        The processes communicate on the CPU, so that no step waits for the GPU.
        """
        if self.world == 1:
            return list(flags)
        total = torch.tensor(flags, dtype=torch.float32)
        dist.all_reduce(total)
        return (total > 0).tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order of rank."""
        if self.world == 1:
            return [value]
        return gathered(value)

    def agree(self, value: Any) -> Any:
        """Return the value of the first process, in every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed torch's random numbers by `seed` and `batch_rank` inside, and restore the previous state afterwards."""
        devices = []
        if self.device.type == "cuda":
            devices.append(self.device)
        with torch.random.fork_rng(devices):
            torch.manual_seed(derive(seed, self.batch_rank))
            yield

    def autocast(self, precision: str) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")


MATMUL = ("highest", "high", "medium")


def slow_precision(precision: str, device: torch.device) -> str | None:
    """Return a hint if the device only emulates the precision; None if it does not, or if that is not known."""
    known: Mapping[str, Any] = {}
    if hasattr(torch.cpu, "get_capabilities"):
        known = torch.cpu.get_capabilities()
    if precision != "bf16" or device.type != "cpu" or known.get("architecture") != "x86_64":
        return None
    if known.get("avx512_bf16") or known.get("amx_bf16"):
        return None
    return "this CPU emulates bf16, which is several times slower than float32: trainer.precision=fp32"


def start_runtime(
    device: str = "auto", *, deterministic: bool = False, matmul: str = "highest", sequence: int = 1
) -> Runtime:
    """Set up this process and return its runtime; join the process group if started by `torchrun`.

    `matmul` is the precision of float32 products (`torch.set_float32_matmul_precision`), and of convolutions on a GPU.
    `sequence` processes share the tokens of each row.
    """
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"  # by default, convolutions round to TF32 in any case
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    rank, world = join_processes()
    kind = check_device(device, world)
    if kind.type == "cuda":
        torch.cuda.set_device(kind)
    if sequence == 1:
        return Runtime(kind, rank, world)
    mesh = init_device_mesh(kind.type, (world // sequence, sequence), mesh_dim_names=("data", "sequence"))
    return Runtime(kind, rank, world, Part.of(mesh.get_group("sequence")))


def join_processes() -> tuple[int, int]:
    """Join the process group if started by a launcher such as `torchrun`; return rank and number of processes."""
    rank = from_launcher("RANK", 0)
    world = from_launcher("WORLD_SIZE", 1)
    if rank > 0:
        log.setLevel(logging.WARNING)  # progress is reported by the first process
    if world > 1 and not dist.is_initialized():
        end_with_launcher()
        try:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend)
        except ValueError as error:
            raise ConfigError(f"RANK={rank} WORLD_SIZE={world} (set as by a launcher): {error}") from None
    return rank, world


def gathered(value: Any) -> list[Any]:
    """Return the values of all processes, in order of rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(work: Callable[[], _Out]) -> _Out:
    """Return `work()` if it succeeds in every process.

    If it raises a ConfigError in any process, the first process raises it, and all others end with exit code 2.
    """
    done: list[_Out] = []
    error = own = None
    try:
        done.append(work())
    except ConfigError as raised:
        error = raised
        own = (str(error), socket.gethostname())
    found = gathered(own)
    if not any(found):
        return done[0]
    if dist.is_initialized() and dist.get_rank():
        sys.exit(2)
    rank, (text, host) = next((rank, each) for rank, each in enumerate(found) if each)
    raise error or ConfigError(f"process {rank} on {host}: {text}")


def from_launcher(name: str, default: int) -> int:
    """Return an environment variable that `torchrun` sets, as an integer.

    Raises:
        ConfigError: The variable is not a whole number.
    """
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name}: expected a whole number, got {text!r}")
    return int(text)


def check_device(device: str, world: int = 1) -> torch.device:
    """Return the device of this process, once it is available and each of `world` processes can use a separate GPU.

    With a launcher, only its processes on this machine count. A process that is about to launch others does not use
    the device itself.

    Raises:
        ConfigError: The device is not available or does not work; the message names the available devices.
    """
    gpus = 0
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    try:
        kind = torch.device(device)
        known = device == "cpu" or (kind.type == "cuda" and (kind.index or 0) < gpus)
    except RuntimeError:
        known = False
    if not known:
        choices = "cuda, cpu" if gpus else "cpu"
        raise ConfigError(f"trainer.device: {device!r} is not available here, use one of {choices}")
    if kind.type == "cpu":
        return kind
    here = from_launcher("LOCAL_WORLD_SIZE", world)
    if world > 1 and (kind.index is not None or here > gpus):
        raise ConfigError(f"trainer.device: {device!r} cannot give {here} processes one GPU each, {gpus} are available")
    own = kind.index or 0
    if world > 1:
        own = from_launcher("LOCAL_RANK", from_launcher("RANK", 0))
    kind = torch.device("cuda", own)
    if world == 1 or dist.is_initialized():
        try:
            torch.zeros(1, device=kind).item()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"trainer.device: '{kind}' does not work: {reason}") from None
    return kind


def end_with_launcher() -> None:
    """Ask the kernel to send SIGTERM (save and stop) to this process when the launcher dies; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return all random states of this process, as plain data and tensors."""
    version, numbers, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    numpy = state["state"]
    cuda = None
    if torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state()  # of this process's device
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": [version, list(numbers), gauss],
        "numpy": [
            state["bit_generator"],
            torch.from_numpy(numpy["key"].astype(np.int64)),
            numpy["pos"],
            state["has_gauss"],
            state["gauss"],
        ],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))


@contextlib.contextmanager
def catch_signals(work: Any, then: str = "saving after this step") -> Iterator[None]:
    """Set `work.stopping` on SIGINT or SIGTERM, so that `work` ends in good order; a second signal ends it at once.

    `then` says in the log message what happens next.
    """

    asked = 0.0

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if work.stopping:
            if time.monotonic() - asked < 1:  # the same signal, sent by the terminal and forwarded by the launcher
                return
            raise KeyboardInterrupt
        work.stopping = True
        asked = time.monotonic()
        log.warning("%s: %s; repeat to stop at once", signal.Signals(number).name, then)

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def cpu_name() -> str:
    """Return the CPU model and its vector instructions, which both affect the choice of kernels."""
    name = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    name = name or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def name_of(device: torch.device) -> str:
    """Return the name of a GPU or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device and git commit (None without a clone), to be stored in the run folder."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": importlib.metadata.version("torchvision"),  # not imported: only images need torchvision
        "platform": platform.platform(),
        "device": name_of(device),
        "devices": torch.cuda.device_count() if device.type == "cuda" else 0,
        "threads": torch.get_num_threads(),
        **code_version(),
    }


@functools.cache  # a process runs the code that it began with, and reports that it writes change the clone
def code_version() -> dict[str, Any]:
    """Return the git commit of this clone (None without a clone), and whether files differ from it."""
    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}


def git(*args: str) -> str | None:
    """Return what a command of git prints in this clone; None without a clone, or if the command fails."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / ".git").exists():  # an installed wheel, perhaps inside the repository of another project
        return None
    try:
        out = subprocess.run(["git", *args], cwd=clone, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip()
