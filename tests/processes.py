"""Helpers that run a function in several real processes of one group, and return what each of them returned."""

import datetime
import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes


def in_processes(count: int, function, *args) -> list:
    """Call `function(group, *args)` in every process of a group of `count`; return the results in order of rank.

    The processes are forked from one server, which imports torch and the trainer once.
    """
    multiprocessing.set_forkserver_preload(["torch", "tools.train"])
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
