"""Memory of a layer whose rows are split over processes, and the time of its exchange on many GPUs, by arithmetic.

    ./run.sh bench sequence [--length 65536 131072 ..] [--processes 1 2 4] [--mixer lion_s] [--no-measure]

`MiB` is the largest memory of the tensors of one process in a forward and backward pass of a layer on one row, without
torch.compile; the ratio to one process follows it. In every direction a split layer also keeps its decayed keys, which
make the state that leaves the part, and its decayed queries, which read the one that enters. `KB received` are the
bytes that come into a process in the forward pass, as counted in its collectives, and `by formula` those of
`B H (2 D E + 2 D + 1)` numbers from each other process (lion_lit, lion_d and lion_s).

Results are added to `sequence.md` and `sequence.json` in runs/bench, or in the folder `--out`.
"""

from __future__ import annotations

import itertools
import json
import shlex
import tempfile
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
from tools.cli import say, table
from tools.gpu.targets import TARGETS
from tools.meta import Received
from tools.probe import stamp
from tools.store import Row, Store, pipes

GPUS = (8, 64, 256, 1024)
NODE = 8  # GPUs that NVLink connects
NVLINK, NETWORK = 450e9, 50e9  # bytes/s into one H100: NVLink 4 in one direction, and a 400 Gb/s adapter
HOP = 10e-6  # seconds of latency of one step of a collective, an assumption
SHARE = 0.4  # share of the tensor cores' rate that products reach, an assumption
CHUNK = 64  # tokens per chunk
SCALAR = ("lion_lit", "lion_d", "lion_s")  # mixers with at most one decay per head, and with row sums
SETTING = ("mixer", "heads", "dim")
KEY = (*SETTING, "length", "processes")
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
    rate, rows = TARGETS["h100"].bf16 * SHARE, []
    for gpus in GPUS:
        sent, tokens = 4 * layer.exchanged(), length / gpus
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


def measure(length: int, processes: int, mixer: str, layer: Layer) -> Row:
    """Train a layer on one row, split over processes; return the largest memory of a process and what it received."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_train, (processes, folder, length, mixer, layer), nprocs=processes, start_method="spawn")
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {name: max(one[name] for one in found) for name in ("bytes", "received")}


def _train(rank: int, processes: int, folder: str, length: int, mixer: str, layer: Layer) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes)
    part = Part.of(dist.group.WORLD)
    module = LionAttention(layer.heads * layer.dim, layer.heads, mixer)
    received = Received(processes)

    def train(length: int) -> None:
        rows = torch.empty(1, length, 0)
        layout = PLAIN if processes == 1 else Layout().split(rows, part)
        x = torch.randn(1, part.size(length), layer.heads * layer.dim)
        with received:
            y = module(x, layout)
        y.sum().backward()

    train(2 * CHUNK * processes)  # loads libraries
    received.bytes = 0
    used = tensor_peak(lambda: train(length), torch.device("cpu"))
    save_text(Path(folder) / f"{rank}.json", json.dumps({"bytes": used, "received": received.bytes}))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    args = options.bench_sequence(argv)
    if args.mixer not in LINEAR:
        raise ConfigError(f"--mixer: expected one of {', '.join(LINEAR)}, got {args.mixer!r}")
    arithmetic = estimated(args.dim)
    if args.no_measure:
        print(arithmetic)
        return 0
    report = Store(args.out / "sequence.json", rows=KEY).load(args.fresh)
    command, layer = shlex.join(["./run.sh", "bench", "sequence", *argv]), Layer(args.heads, args.dim)
    for length in args.length:
        for n in args.processes:
            made = {"mixer": args.mixer, "heads": args.heads, "dim": args.dim, "length": length, "processes": n}
            report.add({**made, **measure(length, n, args.mixer, layer), **stamp(command)})
            with report.alone():
                report.save(markdown(report))
            say(f"measured {length:,} tokens in {n} processes")
    print("\n\n".join([*(f"{title(rows[0])}\n{table(*tabled(rows))}" for rows in report.groups(SETTING)), arithmetic]))
    print(report.files())
    return 0


def title(row: Row) -> str:
    return f"{row['mixer']}, {row['heads']} x {row['dim']}, float32, CPU"


def tabled(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the table of one layer, with the ratio of the memory to that of one process."""
    alone, cells = {row["length"]: row["bytes"] for row in rows if row["processes"] == 1}, []
    for row in sorted(rows, key=lambda row: (row["length"], row["processes"])):
        ratio = f"{row['bytes'] / alone[row['length']]:.2f}" if row["length"] in alone else "-"
        formula = 4 * Layer(row["heads"], row["dim"]).exchanged() * (row["processes"] - 1)
        kilobytes = [f"{row['received'] / 1e3:.1f}", f"{formula / 1e3:.1f}" if row["mixer"] in SCALAR else "-"]
        size = f"{row['bytes'] / 2**20:,.0f}"
        cells.append([f"{row['length']:,}", str(row["processes"]), size, ratio, *kilobytes])
    return ["tokens", "processes", "MiB", "x one process", "KB received", "by formula"], cells


def estimated(*dims: int) -> str:
    """Return the tables of `estimates` for layers of 12 heads of these dimensions as text."""
    header, parts = ["GPUs", "MB sent", "exchange ms", "its work ms", "ring's exchange ms", "softmax's work ms"], []
    for dim, length in itertools.product(dims, (2**20, 2**24)):
        rows = [
            [
                f"{row['gpus']:,}",
                f"{row['sent'] / 1e6:.2f}",
                *(f"{1e3 * row[name]:.3f}" for name in ("exchange", "work", "ring", "softmax")),
            ]
            for row in estimates(Layer(12, dim), length)
        ]
        heading = f"by arithmetic, not measured: 12 x {dim}, forward, one row of {length:,} tokens, H100"
        parts.append(f"{heading}\n{table(header, rows)}")
    return "\n\n".join([*parts, ASSUMED])


def markdown(report: Store) -> str:
    parts = ["# Rows split over processes", "Written by `./run.sh bench sequence`.", __doc__.split("\n\n")[2].strip()]
    dims = set()
    for rows in report.groups(SETTING):
        dims.add(rows[0]["dim"])
        parts += [f"## {title(rows[0])}", pipes(*tabled(rows)), report.commands(rows)]
    return "\n\n".join([*parts, "## On many GPUs", f"```text\n{estimated(*sorted(dims))}\n```"]) + "\n"
