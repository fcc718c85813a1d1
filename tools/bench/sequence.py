"""Memory of a layer whose rows are split over processes, and the time of its exchange on many GPUs, by arithmetic.

./run.sh bench sequence [--length 65536 131072 ..] [--processes 1 2 4] [--mixer lion_s] [--no-measure]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from lion.config import ConfigError
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers import LINEAR, LionAttention
from lion.ops import Part
from lion.trainer.memory import tensor_peak
from tools.cli import Parser, count, table
from tools.gpu.targets import TARGETS

GPUS = (8, 64, 256, 1024)
NODE = 8  # GPUs that NVLink connects
NVLINK, NETWORK = 450e9, 50e9  # bytes/s into one H100: NVLink 4 in one direction, and a 400 Gb/s adapter
HOP = 10e-6  # seconds of latency of one step of a collective, an assumption
SHARE = 0.4  # share of the tensor cores' rate that products reach, an assumption
CHUNK = 64  # tokens per chunk


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


def measure(length: int, processes: int, mixer: str, layer: Layer) -> float:
    """Measure the largest memory in bytes of the tensors with which a process trains a layer on its part of a row."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_train, (processes, folder, length, mixer, layer), nprocs=processes, start_method="spawn")
        return max(float(path.read_text()) for path in Path(folder).glob("*.bytes"))


def _train(rank: int, processes: int, folder: str, length: int, mixer: str, layer: Layer) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes)
    part = Part.of(dist.group.WORLD)
    module = LionAttention(layer.heads * layer.dim, layer.heads, mixer)

    def train(length: int) -> None:
        rows = torch.empty(1, length, 0)
        layout = PLAIN if processes == 1 else Layout().split(rows, part)
        module(torch.randn(1, part.size(length), layer.heads * layer.dim), layout).sum().backward()

    train(2 * CHUNK * processes)  # loads libraries
    used = tensor_peak(lambda: train(length), torch.device("cpu"))
    (Path(folder) / f"{rank}.bytes").write_text(str(used))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh bench sequence", description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=count, nargs="+", default=[65_536, 131_072, 262_144], help="tokens of a row")
    parser.add_argument("--processes", type=count, nargs="+", default=[1, 2, 4], help="processes that share a row")
    parser.add_argument("--mixer", default="lion_s", help="a linear mixer (default: lion_s)")
    parser.add_argument("--heads", type=count, default=1, help="heads of the measured layer")
    parser.add_argument("--dim", type=count, default=64, help="dimension of a head")
    parser.add_argument("--no-measure", action="store_true", help="print the arithmetic alone")
    args = parser.parse_args(argv)
    if args.mixer not in LINEAR:
        raise ConfigError(f"--mixer: expected one of {', '.join(LINEAR)}, got {args.mixer!r}")
    if not args.no_measure:
        layer, rows = Layer(args.heads, args.dim), []
        for length in args.length:
            found = [f"{measure(length, n, args.mixer, layer) / 2**20:.0f}" for n in args.processes]
            rows.append([f"{length:,}", *found])
        header = ["tokens", *(f"{n} processes" for n in args.processes)]
        print(
            f"MiB of tensors in each process: {args.mixer}, forward and backward, {args.heads} x {args.dim}, float32, "
            "eager, CPU"
        )
        print(table(header, rows) + "\n")
    layer = Layer(12, args.dim)
    for length in (2**20, 2**24):
        rows = [
            [
                f"{row['gpus']:,}",
                f"{row['sent'] / 1e6:.2f}",
                *(f"{1e3 * row[name]:.3f}" for name in ("exchange", "work", "ring", "softmax")),
            ]
            for row in estimates(layer, length)
        ]
        print(f"by arithmetic, not measured: a layer of 12 x {args.dim}, forward, one row of {length:,} tokens, H100")
        print(table(["GPUs", "MB sent", "exchange ms", "its work ms", "ring's exchange ms", "softmax's work ms"], rows))
    print(
        "The exchange overlaps with the work: the longer of the two remains. Assumed per GPU: 450 GB/s in a node of 8,"
    )
    print("50 GB/s beyond, 10 us for each step of a collective, 40 % of the rate of bfloat16 products.")
    return 0
