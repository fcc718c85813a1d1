"""Tests of a data set that several processes read: one copy in memory, and one order of samples."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from lion.trainer.plan import make_plan
from lion.trainer.runtime import Runtime
from lion.trainer.state import RunData
from tests.processes import in_processes
from tests.trainer.toys import settings
from tools.compose import build_data, resolve

WORLD, BATCH, STEPS = 3, 12, 20


def mapped(path: Path) -> dict[str, int]:
    """Return the bytes of this process's mappings of a file by their kind, as the kernel counts them."""
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the first line of a mapping
            inside = line.endswith(f" {path}")
        elif inside and values[-1] == "kB":
            found[name[:-1]] = found.get(name[:-1], 0) + 1024 * int(values[0])
    return found


def order(splits, rank, world):
    plan = make_plan(settings(batch_size=BATCH, steps=STEPS, micro_batch=2), samples=len(splits.train), world=world)
    return list(RunData(splits, plan, Runtime(torch.device("cpu"), rank, world)).sampler(0))


def read(group, overrides):
    """Read all tokens in this process, then return the memory of the token file, and the samples of the run."""
    splits, rank = build_data(resolve("gpt2_tiny_lion_s", overrides)), torch.distributed.get_rank()
    total = sum(int(splits.train[i]["tokens"].sum()) for i in range(0, len(splits.train), 64))
    torch.distributed.barrier()  # all have read, none has ended
    path = splits.train.tokens.path
    memory = mapped(path)
    torch.distributed.barrier()
    return total, path.stat().st_size, memory, order(splits, rank, WORLD), order(splits, 0, 1)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_processes_share_a_token_file_and_one_order(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {i} of a long book\n" for i in range(4_000)))
    overrides = [f"data.path={tmp_path / 'book.txt'}", f"data.root={tmp_path / 'tokens'}", "data.name=text"]
    totals, sizes, memory, orders, alone = zip(
        *in_processes(WORLD, read, [*overrides, "data.tokenizer=bytes", "data.length=65", "data.pack=windows"])
    )
    size = -(-sizes[0] // mmap.PAGESIZE) * mmap.PAGESIZE
    assert size > 2**16 and len(set(totals)) == 1
    for each in memory:
        assert each["Rss"] == size  # all of the file is in the memory of each process
        assert each["Private_Clean"] == each["Private_Dirty"] == each["Anonymous"] == 0  # and none of it is its own
        assert each["Pss"] == pytest.approx(size / WORLD, abs=2048)  # its share of the only copy, in whole kB
    step = BATCH // 2 // WORLD
    for i in range(STEPS):
        together = [key for rank in orders for batch in rank[i * step : (i + 1) * step] for key in batch]
        assert sorted(together) == sorted(
            key for batch in alone[0][i * BATCH // 2 : (i + 1) * BATCH // 2] for key in batch
        )
