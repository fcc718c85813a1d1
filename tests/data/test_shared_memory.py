"""Test of a data set that several processes read: one copy in memory."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import in_processes
from tools.compose import build_data, resolve

WORLD = 3


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


def read(group, overrides):
    """Read all tokens in this process; return their sum, and the size and the memory of the token file."""
    train = build_data(resolve("gpt2_tiny_lion_s", overrides)).train
    total = sum(int(train[i]["tokens"].sum()) for i in range(0, len(train), 64))
    torch.distributed.barrier()  # all have read, none has ended
    memory = mapped(train.tokens.path)
    torch.distributed.barrier()
    return total, train.tokens.path.stat().st_size, memory


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_processes_share_a_token_file(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {i} of a long book\n" for i in range(4_000)))
    overrides = [f"data.path={tmp_path / 'book.txt'}", f"data.root={tmp_path / 'tokens'}", "data.name=text"]
    overrides += ["data.tokenizer=bytes", "data.length=65", "data.pack=windows"]
    totals, sizes, memory = zip(*in_processes(WORLD, read, overrides))
    size = -(-sizes[0] // mmap.PAGESIZE) * mmap.PAGESIZE
    assert size > 2**16 and len(set(totals)) == 1
    for each in memory:
        assert each["Rss"] == size  # all of the file is in the memory of each process
        assert each["Private_Clean"] == each["Private_Dirty"] == each["Anonymous"] == 0  # and none of it is its own
        assert each["Pss"] == pytest.approx(size / WORLD, abs=2048)  # its share of the only copy, in whole kB
