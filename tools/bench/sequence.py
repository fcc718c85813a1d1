"""Memory of a layer whose rows are split over processes, and the time of its exchange on many GPUs, by arithmetic.

./run.sh bench sequence [--length 65536 131072 ..] [--processes 1 2 4] [--mixer lion_s] [--no-measure]
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from lion.config import ConfigError
from lion.files import save_text
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers import LINEAR, LionAttention
from lion.ops import Part
from lion.trainer.diagnostics import tensor_peak
from tools import options
from tools.bench.engine import Report, collect, typed
from tools.gpu.targets import TARGETS
from tools.meta import Received
from tools.probe import stamp
from tools.processes import Send
from tools.store import Row
from tools.tables import Table, fill, table

GPUS = (8, 64, 256, 1024)
NODE = 8  # GPUs that NVLink connects
NVLINK, NETWORK = 450e9, 50e9  # bytes/s into one H100: NVLink 4 in one direction, and a 400 Gb/s adapter
HOP = 10e-6  # seconds of latency of one step of a collective, an assumption
SHARE = 0.4  # share of the tensor cores' rate that products reach, an assumption
CHUNK = 64  # tokens per chunk
SCALAR = ("lion_lit", "lion_d", "lion_s")  # mixers with at most one decay per head, and with row sums
LEGEND = """\
`MiB` is the largest memory of the tensors of one process in a forward and backward pass of a layer on one row, without
torch.compile; the ratio to one process follows it. In every direction a split layer also keeps its decayed keys, which
make the state that leaves the part, and its decayed queries, which read the one that enters. `KB received` are the
bytes that come into a process in the forward pass, as counted in its collectives, and `by formula` those of
`B H (2 D E + 2 D + 1)` numbers from each other process (lion_lit, lion_d and lion_s)."""
ASSUMED = """\
The exchange overlaps with the work: the longer of the two remains. That holds for decays; delta rules, LightNet, the
selective scan, convolutions and all-to-alls wait for their exchange, so both times add up. Assumed per GPU: 450 GB/s
in a node of 8, 50 GB/s beyond, 10 us for each step of a collective, 40 % of the rate of bfloat16 products."""


class Layer(NamedTuple):
    """A linear layer on one row: heads H and head dimension D; keys and values have the same width."""

    heads: int
    dim: int

    def exchanged(self) -> int:
        """Return the numbers that a process sends in both directions: S, z and a decay (`lion.ops.split`)."""
        return self.heads * (2 * self.dim**2 + 2 * self.dim + 1)

    def flops(self, tokens: int) -> float:
        """Return the FLOPs of the chunk form, forward: pairs in chunks; states and reads, of chunks and of the part."""
        return 2.0 * self.heads * tokens * self.dim * (2 * CHUNK + 8 * self.dim)

    def softmax_flops(self, tokens: int, keys: int) -> float:
        """Return the FLOPs of softmax attention of `tokens` queries to `keys` keys, forward."""
        return 4.0 * self.heads * tokens * keys * self.dim


def transfer(size: float, gpus: int, hops: float) -> float:
    """Return the seconds in which `size` bytes come into each GPU, after `hops` steps of latency."""
    return size / (NVLINK if gpus <= NODE else NETWORK) + hops * HOP


def estimates(layer: Layer, length: int) -> list[dict[str, float]]:
    """Estimate the forward pass of a layer on one row, split over `GPUS`, in seconds and bytes.

    The gather of P parts brings P - 1 of them into each GPU, as float32. Ring attention brings the keys and values of
    all other parts, as bfloat16, in P - 1 steps.
    """
    rate = TARGETS["h100"].bf16 * SHARE
    sent = 4 * layer.exchanged()
    rows = []
    for gpus in GPUS:
        tokens = length / gpus
        ring = 2 * 2 * layer.heads * layer.dim * (length - tokens)
        rows.append(
            {
                "gpus": gpus,
                "sent": sent,
                "exchange": transfer(sent * (gpus - 1), gpus, (gpus - 1).bit_length()),
                "work": layer.flops(tokens) / rate,
                "ring": transfer(ring, gpus, gpus - 1),
                "softmax": layer.softmax_flops(tokens, length) / rate,
            }
        )
    return rows


class Job(NamedTuple):
    """A layer that is trained on a row of `length` tokens, split over processes."""

    mixer: str
    layer: Layer
    length: int
    processes: int
    command: str


def measure(job: Job, send: Send) -> None:
    """Train a layer on a row; send the largest memory of a process and what it received."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        start_processes(train, (folder, job), nprocs=job.processes, start_method="spawn")
        for path in Path(folder).glob("*.json"):
            found.append(json.loads(path.read_text()))
    row = {
        "mixer": job.mixer,
        "heads": job.layer.heads,
        "dim": job.layer.dim,
        "length": job.length,
        "processes": job.processes,
        "bytes": max(one["bytes"] for one in found),
        "received": max(one["received"] for one in found),
    }
    send({"kind": "row", "row": row | stamp(job.command)})


def train(rank: int, folder: str, job: Job) -> None:
    """Train the layer on the part of a row of process `rank`."""
    processes, layer = job.processes, job.layer
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes)
    part = Part.of(dist.group.WORLD)
    module = LionAttention(layer.heads * layer.dim, layer.heads, job.mixer)
    received = Received(processes)

    def step(length: int) -> None:
        layout = PLAIN
        if processes > 1:
            layout = Layout().split(torch.empty(1, length, 0), part)
        x = torch.randn(1, part.size(length), layer.heads * layer.dim)
        with received:
            y = module(x, layout)
        y.sum().backward()

    step(2 * CHUNK * processes)  # loads libraries
    received.bytes = 0
    used = tensor_peak(lambda: step(job.length), torch.device("cpu"))
    save_text(Path(folder) / f"{rank}.json", json.dumps({"bytes": used, "received": received.bytes}))
    dist.barrier()
    dist.destroy_process_group()


class SequenceReport(Report):
    """Memory of each process, and the estimates for many GPUs."""

    name = "sequence"
    heading = "Rows split over processes"
    command = "bench sequence"
    legend = LEGEND
    setting = ("mixer", "heads", "dim")
    key = (*setting, "length", "processes")

    def line(self, row: Row) -> str:
        return f"{row['bytes'] / 2**20:,.0f} MiB"

    def title(self, row: Row) -> str:
        return f"{row['mixer']}, {row['heads']} x {row['dim']}, float32, CPU"

    def tabled(self, rows: list[Row]) -> Table:
        """Return the table of one layer, with the ratio of the memory to that of one process."""
        alone = {row["length"]: row["bytes"] for row in rows if row["processes"] == 1}

        def ratio(row: Row) -> str:
            if row["length"] not in alone:
                return "-"
            return f"{row['bytes'] / alone[row['length']]:.2f}"

        columns = {
            "tokens": lambda row: f"{row['length']:,}",
            "processes": lambda row: str(row["processes"]),
            "MiB": lambda row: f"{row['bytes'] / 2**20:,.0f}",
            "x one process": ratio,
            "KB received": lambda row: f"{row['received'] / 1e3:.1f}",
            "by formula": formula_cell,
        }
        return fill(columns, sorted(rows, key=by_length))

    def markdown(self) -> str:
        dims = sorted({row["dim"] for row in self.rows.values()})
        return f"{super().markdown()}\n## On many GPUs\n\n```text\n{estimated(dims)}\n```\n"

    def terminal(self) -> str:
        dims = sorted({self.rows[key]["dim"] for key in self.new})
        return f"{super().terminal()}\n\n{estimated(dims)}"


def by_length(row: Row) -> tuple[int, int]:
    return row["length"], row["processes"]


def formula_cell(row: Row) -> str:
    if row["mixer"] not in SCALAR:
        return "-"
    return f"{4 * Layer(row['heads'], row['dim']).exchanged() * (row['processes'] - 1) / 1e3:.1f}"


def main(argv: list[str]) -> int:
    args = options.bench_sequence(argv)
    if args.mixer not in LINEAR:
        raise ConfigError(f"--mixer: expected one of {', '.join(LINEAR)}, got {args.mixer!r}")
    if args.no_measure:
        print(estimated([args.dim]))
        return 0
    report = SequenceReport(args.out).load(args.fresh)
    layer = Layer(args.heads, args.dim)
    jobs = {}
    for length in args.length:
        for processes in args.processes:
            job = Job(args.mixer, layer, length, processes, typed("bench sequence", argv))
            jobs[f"{length:,} tokens in {processes} processes"] = job
    return collect(report, jobs, measure, apart=False)


def estimated(dims: Sequence[int]) -> str:
    """Return the tables of `estimates` for layers of 12 heads of these dimensions as text."""
    parts = []
    for dim, length in itertools.product(dims, (2**20, 2**24)):
        header, cells = fill(ESTIMATES, estimates(Layer(12, dim), length))
        heading = f"by arithmetic, not measured: 12 x {dim}, forward, one row of {length:,} tokens, H100"
        parts.append(f"{heading}\n{table(header, cells)}")
    return "\n\n".join([*parts, ASSUMED])


ESTIMATES = {
    "GPUs": lambda row: f"{row['gpus']:,}",
    "MB sent": lambda row: f"{row['sent'] / 1e6:.2f}",
    "exchange ms": lambda row: f"{1e3 * row['exchange']:.3f}",
    "its work ms": lambda row: f"{1e3 * row['work']:.3f}",
    "ring's exchange ms": lambda row: f"{1e3 * row['ring']:.3f}",
    "softmax's work ms": lambda row: f"{1e3 * row['softmax']:.3f}",
}
