"""Memory and step time of a GPU in a mesh of `data x sequence` GPUs: an estimate by arithmetic, nothing is timed.

Assumptions: products reach `SHARE` of the GPU's rate; everything else of the passes moves each byte of activations
`CROSSINGS` times; the update reads and writes its state once; gradients and states travel by rings, at the rate of
NVLink in a node and of the network beyond, and hide behind the passes as far as these last.
That is too good for states of delta rules and LightNet, selective scans and all-to-alls, which layers wait for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from lion.config import ConfigError
from lion.models import Model
from lion.recipe import Recipe
from lion.runs import build_on_meta, count_parameters
from lion.tasks import Task
from lion.trainer.plan import Plan, make_plan
from tools.checks import check_sharing
from tools.gpu.targets import TARGETS
from tools.meta import Pass, activation_bytes, count_pass
from tools.tables import digits, table

# How often a byte that is kept for the backward pass crosses the memory in a step. Fitted to the steps of DeiT small in
# reports/train.md (H100, batch 254, bf16), from which the estimate differs by -2 % for softmax, and by -5, +6 and +4 %
# for Lion-lit, -D and -S.
CROSSINGS = 10
SHARE = 0.4  # share of the tensor cores' rate that products reach, an assumption
NODE = 8  # GPUs that NVLink connects
NVLINK, NETWORK = 450e9, 50e9  # bytes/s into one H100: NVLink 4 in one direction, and a 400 Gb/s adapter
HOP = 10e-6  # seconds of latency of one step of a collective, an assumption
FLOAT = 4  # bytes of a weight, a gradient or a moment
GPU = TARGETS["h100"]
PARALLEL = ("ddp", "fsdp")
HEADER = ["mesh", "micro", "weights", "gradients", "optimizer", "buffers", "activations", "GiB", "fits"]
HEADER += ["products", "memory", "exchange", "update", "ms", "hours"]


class Mesh(NamedTuple):
    """A mesh of GPUs: `sequence` of them share the tokens of a row, and `data` such groups have different rows."""

    data: int
    sequence: int

    @property
    def gpus(self) -> int:
        return self.data * self.sequence

    def __str__(self) -> str:
        return f"{self.data}x{self.sequence}"


class Memory(NamedTuple):
    """Bytes in one GPU.

    Attributes:
        weights: Weights in float32.
        gradients: Their gradients.
        optimizer: Two moments of every weight, and the averaged weights.
        buffers: Buffers of the exchange of gradients; with FSDP2, what is gathered.
        activations: Activations that are kept for the backward pass of a micro-batch, with the states of other parts.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float

    @property
    def state(self) -> float:
        """The bytes that do not depend on the micro-batch."""
        return sum(self) - self.activations


class Time(NamedTuple):
    """Seconds of the parts of a step; `memory` is that of all passes without products."""

    products: float
    memory: float
    exchange: float
    update: float

    @property
    def step(self) -> float:
        return max(self.products + self.memory, self.exchange) + self.update


def memory_of(model: Model, recipe: Recipe, mesh: Mesh, parallel: str, activations: float) -> Memory:
    """Return the memory of one GPU.

    With DDP, every GPU holds all weights, and a copy of the gradients in buckets. With FSDP2, it holds its share, and
    for a while the weights outside of blocks with their gradients, the weights of two blocks and the gradients of one.
    """
    own = every = buffers = FLOAT * count_parameters(model)
    if parallel == "fsdp":
        blocks = [FLOAT * count_parameters(unit) for unit in model.units()]
        own = every / mesh.gpus
        buffers = 2 * (every - sum(blocks)) + 3 * max(blocks)
    if mesh.gpus == 1:
        buffers = 0
    moments = 3
    if recipe.trainer.ema is None:
        moments = 2
    return Memory(own, own, own * moments, buffers, activations)


def time_of(recipe: Recipe, plan: Plan, mesh: Mesh, parallel: str, one: Pass, held: Memory) -> Time:
    """Return the time of a step whose micro-batches have the work `one`."""
    gpus = mesh.gpus
    passes = plan.accumulation
    every = held.weights
    rounds = 2  # DDP sums the gradients once, in two rounds
    if parallel == "fsdp":
        every *= gpus
        rounds = 2 * passes + 1  # the weights are gathered twice in a pass, and the gradients summed once
    gradients = transfer(rounds * every * (gpus - 1) / gpus, gpus, rounds * (gpus - 1).bit_length())
    states = transfer(one.received, mesh.sequence, one.calls * (mesh.sequence - 1).bit_length())
    return Time(
        products=passes * one.flops / (SHARE * rate(recipe)),
        memory=passes * CROSSINGS * held.activations / GPU.bandwidth,
        exchange=gradients + passes * states,
        update=(held.gradients + 2 * (held.weights + held.optimizer)) / GPU.bandwidth,  # each read, all else written
    )


def transfer(size: float, gpus: int, hops: float) -> float:
    """Return the seconds in which `size` bytes come into each GPU, after `hops` steps of latency."""
    return size / (NVLINK if gpus <= NODE else NETWORK) + hops * HOP


def rate(recipe: Recipe) -> float:
    """Return the FLOP/s of the products of a recipe on the GPU; TF32 has half the rate of bfloat16."""
    if recipe.trainer.precision == "bf16":
        return GPU.bf16
    if recipe.trainer.matmul == "highest":
        return GPU.fp32
    return GPU.bf16 / 2


def largest(held: Memory, plan: Plan, batch: int) -> int:
    """Return the largest micro-batch, a divisor of the `batch` samples of a group, that fits a GPU; 0: none."""
    room = GPU.memory * 2**30 - held.state
    found = 0
    for micro in range(1, batch + 1):
        if batch % micro == 0 and micro * held.activations / plan.micro <= room:
            found = micro
    return found


def on_mesh(recipe: Recipe, mesh: Mesh) -> Recipe:
    """Return a recipe whose processes share rows as in a mesh; where they do, scores have no dropout."""
    model, trainer = recipe.model, replace(recipe.trainer, sequence=mesh.sequence)
    if mesh.sequence > 1 and model.attention.score_dropout:
        model = replace(model, attention=replace(model.attention, score_dropout=0.0))
    return replace(recipe, model=model, trainer=trainer)


def meshes(asked: Mesh) -> list[Mesh]:
    """Return the mesh that was asked for, then all others of as many GPUs whose rows are shared within a node."""
    found = [asked]
    for sequence in range(1, NODE + 1):
        mesh = Mesh(asked.gpus // sequence, sequence)
        if mesh.gpus == asked.gpus and mesh != asked:
            found.append(mesh)
    return found


def describe_meshes(task: Task, recipe: Recipe, samples: int, asked: Mesh) -> str:
    """Return a table of what the meshes of as many GPUs need, with DDP and with FSDP2, the asked one first.

    Other meshes that the batch or the model does not allow are left out.
    """
    rows = []
    for mesh in meshes(asked):
        try:
            rows += rows_of(task, on_mesh(recipe, mesh), samples, mesh)
        except ConfigError:
            if mesh == asked:
                raise
    return (
        f"GiB in each of {asked.gpus} GPUs ({GPU.name}, {GPU.memory} GiB), milliseconds of a step, and hours of the "
        "run without\nevaluation: an estimate by arithmetic, nothing is timed here\n"
        f"{table(HEADER, rows)}\n"
        "fits: the largest micro-batch that fits the memory, with the activations of eager code. Assumed: products at "
        f"{SHARE:.0%}\nof the GPU's rate; each byte of activations crosses its memory {CROSSINGS} times, as in "
        f"measured steps of DeiT small; the\nexchange, at {NVLINK / 1e9:.0f} GB/s in a node of {NODE} and "
        f"{NETWORK / 1e9:.0f} GB/s beyond, hides behind both as far as they last."
    )


def rows_of(task: Task, recipe: Recipe, samples: int, mesh: Mesh) -> list[list[str]]:
    """Return the rows of a mesh, with DDP and with FSDP2.

    Raises:
        ConfigError: The batch or the model does not allow this mesh.
    """
    plan = make_plan(recipe, samples=samples, world=mesh.gpus)
    model = build_on_meta(task, recipe.model)
    check_sharing(recipe, model, mesh.gpus)
    one = count_pass(task, recipe, plan.micro, mesh.sequence)
    rows = []
    activations = activation_bytes(task, recipe, plan.micro, mesh.sequence)
    for parallel in PARALLEL:
        held = memory_of(model, recipe, mesh, parallel, activations)
        spent = time_of(recipe, plan, mesh, parallel, one, held)
        fits = largest(held, plan, recipe.trainer.batch_size // mesh.data)
        row = [f"{mesh} {parallel}", str(plan.micro)]
        for part in (*held, sum(held)):
            row.append(f"{part / 2**30:.2f}")
        row.append(str(fits or "-"))
        for seconds in (*spent, spent.step):
            row.append(digits(1e3 * seconds))
        row.append("-" if plan.total is None else digits(plan.total * spent.step / 3600))
        rows.append(row)
    return rows
