"""Helpers that run functions and commands in real processes.

The processes are forked from one server, which imports torch and the trainer once: a new interpreter takes seconds.
"""

import datetime
import multiprocessing
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(  # most runs of the tests read digits
    ["torch", "torch.utils.tensorboard", "tools.train", "sklearn.datasets", "data.vision.digits"]
)


def in_processes(count: int, function, *args) -> list:
    """Call `function(group, *args)` in every process of a group of `count`; return the results in order of rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save((function, args), Path(folder) / "call.pt")
        start_processes(_work, (count, folder), nprocs=count, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _work(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    function, args = torch.load(Path(folder) / "call.pt", weights_only=False)
    limit = datetime.timedelta(seconds=60)  # a process that waits for ever fails the test
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count, timeout=limit)
    torch.save(function(dist.group.WORLD, *args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


class Command:
    """A running command of `python -m tools` in a session of its own, with additional environment variables."""

    def __init__(self, *args, **variables) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.outputs = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        for path in self.outputs:  # the process may be killed before it opens them
            path.touch()
        given = [str(arg) for arg in args], {name: str(value) for name, value in variables.items()}
        self.process = CONTEXT.Process(target=run_in, args=(self.folder.name, *given))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float = 120) -> subprocess.CompletedProcess:
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        out, err = (path.read_text() for path in self.outputs)
        return subprocess.CompletedProcess([], self.process.exitcode, out, err)


def run_in(folder: str, args: list[str], variables: dict[str, str]) -> None:
    """Run a command in this process, which it ends; its output goes to files in a folder."""
    from tools import __main__ as commands
    from tools.cli import run_command

    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    os.setsid()
    torch.set_num_threads(1)
    run_command(commands.main, args)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def as_rank(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables that `torchrun` gives to one of its processes on a machine."""
    variables = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    return variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}


def in_ranks(count: int, *args) -> subprocess.CompletedProcess:
    """Run a command in `count` processes, as `torchrun` does; return what the first one printed, or one that failed."""
    port = free_port()
    ranks = [Command(*args, **as_rank(rank, count, port)) for rank in range(count)]
    return max([rank.wait() for rank in ranks], key=lambda done: done.returncode != 0)
