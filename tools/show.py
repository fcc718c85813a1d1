"""Summary of a recipe before training: all its settings, then its cost on this machine.

./run.sh show recipes/NAME.yaml [key=value ...]
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

from data.folders import data_root
from lion.config import ConfigError, flatten, to_dict
from lion.models import Model
from lion.recipe import Recipe, dump_recipe
from lion.runs import build_on_meta, count_parameters
from lion.trainer.plan import Plan, make_plan
from tools import options
from tools.bench.floors import published_flops
from tools.checks import check_sharing, checkpoint_bytes
from tools.compose import describe_data, describe_warmup, doubts, make_task, open_data, process_count, resolve
from tools.cost import describe_time
from tools.listing import claim
from tools.mesh import Mesh, describe_meshes, on_mesh
from tools.meta import activation_bytes
from tools.tables import digits


def main(argv: list[str]) -> int:
    args = options.read("show", argv)
    mesh = None
    if args.mesh is not None:
        data, sequence = args.mesh
        mesh = Mesh(data, sequence)
    for text in parts(args.recipe, args.overrides, args.processes, mesh):
        print(text, flush=True)
    return 0


def parts(path: str, overrides: list[str], processes: int | None, mesh: Mesh | None) -> Iterator[str]:
    """Yield a recipe resolved in full, then its cost on this machine (time, memory, disk), piece by piece.

    With a mesh, memory and time are estimates for its GPUs. What is measured comes last, where a terminal shows it.
    """
    given = recipe = resolve(path, overrides)
    if mesh is not None and processes is not None:
        raise ConfigError(f"--processes: a mesh has {mesh.gpus}, leave it out")
    if mesh is not None:
        recipe, processes = on_mesh(recipe, mesh), mesh.gpus
    info, samples, note = describe_data(recipe)
    task = make_task(recipe, info)
    processes = processes or process_count(recipe)
    plan = make_plan(recipe, samples=samples, world=processes)
    model = build_on_meta(task, recipe.model)
    sharing = check_sharing(recipe, model, processes)
    parameters = count_parameters(model)
    c = recipe.trainer
    softmax, rnn = published_flops(model.length, recipe.model.dim)
    state = parameters * 4 * (4 if c.ema is None else 5)  # weights, gradients, two moments, EMA; float32
    teacher = getattr(recipe.task, "teacher", None)
    yield f"{dump_recipe(recipe)}\n{open_settings(recipe)}\n"
    known = " (published, or an estimate)"
    if note is None:
        known = ""
    flops = f"{digits(softmax / 1e6)} MFLOP per layer and sample with softmax, {digits(rnn / 1e6)} as an RNN"
    lines = [
        fact("recipe", f"{recipe.run.name}: {claim(recipe.about.row)}, {recipe.about.expected}"),
        fact("model", f"{recipe.model.mixer}, {parameters:,} parameters"),
        fact("data", describe_store(recipe, note)),
        fact("training samples", f"{samples:,}{known}"),
        length(plan),
        fact("batch", describe_batch(plan, processes, sharing)),
        fact("learning rate", f"{recipe.optim.peak(c.batch_size):g} at its peak, {describe_warmup(plan)}"),
        fact("run folder", f"{recipe.folder}, {describe_checkpoints(recipe, model)}"),
        fact("attention", f"{flops}, in one head (C.12)"),
    ]
    if teacher:
        lines.insert(2, fact("teacher", f"{teacher}; its time and memory are not counted"))
    yield "\n".join(lines)
    warnings = [fact("warning", doubt) for doubt in doubts(recipe, plan)]
    if warnings:
        yield "\n".join(warnings)
    if mesh is None:
        activations = activation_bytes(task, recipe, plan.micro, sharing)
        yield fact("memory", describe_memory(state, activations, plan))
        yield fact("time", describe_time(task, recipe, plan, state, activations))
    if note is not None:
        yield f"note: {note}"
    if mesh is not None:
        yield f"\n{describe_meshes(task, recipe, samples, mesh)}"
    if recipe.model != given.model:
        yield "estimated with model.attention.score_dropout=0, which a run that shares rows needs"


def fact(name: str, value: str) -> str:
    """Return a line with a name and its value."""
    return f"{name.ljust(len('training samples'))}  {value}"


def describe_store(recipe: Recipe, note: str | None) -> str:
    """Describe the data; for absent data, add the bytes to download and to write, and the free disk space."""
    described = recipe.data.describe()
    if note is None:
        return described
    source = open_data(recipe)
    parts = []
    if source.download:
        parts.append(f"{gigabytes(source.download)} to download")
    written = source.disk()
    if written:
        parts.append(f"about {gigabytes(written)} to write")
    place = data_root().absolute()
    while not place.is_dir():
        place = place.parent
    free = gigabytes(shutil.disk_usage(place).free)
    return f"{described}; {' and '.join(parts) or 'not on this machine'}, {free} free under {data_root()}"


def describe_memory(state: float, activations: float, plan: Plan) -> str:
    """Describe the memory of a process, from bytes of weights, gradients and moments, and bytes of activations."""
    return (
        f"{gigabytes(state)} of state, about {gigabytes(activations)} of activations per process "
        f"({plan.micro} samples, eager; compiled code takes less)"
    )


def describe_checkpoints(recipe: Recipe, model: Model) -> str:
    """Describe the size of the checkpoints of a run on disk."""
    state, best = checkpoint_bytes(model, recipe.trainer.ema is not None)
    return f"{gigabytes(recipe.trainer.keep_last * state + best)} of checkpoints"


def gigabytes(size: float) -> str:
    """Format a number of bytes in decimal units: 327 GB, 0.19 GB, 1.1 MB."""
    if size >= 1e8:
        return f"{digits(size / 1e9)} GB"
    return f"{digits(size / 1e6)} MB"


def length(plan: Plan) -> str:
    """Return the line on the length of a run: its time, or its steps and epochs."""
    if plan.total is None:
        more = f"as many steps as fit; an epoch is {plan.steps_per_epoch:,} steps of the full batch"
        return fact("length", f"{plan.trainer.time} of training, without compilation, evaluation and saving: {more}")
    epochs = plan.samples / (plan.steps_per_epoch * plan.trainer.batch_size)
    return fact("steps", f"{plan.total:,} = {digits(epochs)} epochs of {plan.steps_per_epoch:,}")


def open_settings(recipe: Recipe) -> str:
    """Return, as lines of comments, the settings that the recipe leaves open, with the values that the model gets."""
    asked = flatten(to_dict(recipe.model))
    built = flatten(to_dict(recipe.model.resolved()))
    text = "# the recipe leaves these settings open; the model is built with\n"
    for key, value in built.items():
        if asked.get(key) is None and value is not None:
            text += f"#   model.{key}: {json.dumps(value)}\n"
    return text


def describe_batch(plan: Plan, processes: int, sharing: int) -> str:
    """Describe how the samples of a batch, and the tokens of a row, are divided among processes."""
    samples = f"{plan.accumulation} accumulated x {plan.micro}"
    if sharing == 1:
        return f"{plan.trainer.batches()} = {processes} processes x {samples}"
    groups = f"{processes // sharing} groups of {sharing} processes"
    shared = "the processes of a group share the tokens of each row"
    return f"{plan.trainer.batches()} = {groups} x {samples}; {shared}"
