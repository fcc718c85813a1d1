"""The cost of a whole training step of a recipe.

Inductor compiles the blocks of the model. The trainer runs all other operators eagerly, with one launch per operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import register_flop_formula

from lion.recipe import Recipe
from lion.tasks import Task
from tools.bench.train import training_step
from tools.gpu.cost import Cost
from tools.gpu.graphs import Graph, fake_module, trace
from tools.gpu.lower import lower, operator_flops
from tools.gpu.targets import Target

FREE = ("empty", "detach", "alias", "_record_function", "device", "is_same_size")  # operators without a kernel
FREE += ("clone",)  # of fake gradients; real gradients are used unchanged
OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")  # do not read their target


@dataclass
class Step:
    """The graphs and costs of a training step.

    Attributes:
        blocks: Graphs of each kind of block, and the number of blocks of that kind.
        around: Cost of the eager operators around the blocks.
    """

    blocks: list[tuple[list[Graph], int]]
    around: Cost

    @property
    def graphs(self) -> list[Graph]:
        found: list[Graph] = []
        for graphs, _ in self.blocks:
            found += graphs
        return found

    def costs(self, target: Target) -> dict[str, Cost]:
        """Return the cost of all blocks by stage, and the cost `around` them."""
        found = {"forward": Cost(), "backward": Cost()}
        for graphs, n in self.blocks:
            for graph in graphs:
                found[graph.stage] += lower(graph, target).cost * n
        return found | {"around": self.around}


def trace_step(recipe: Recipe, task: Task, batch: int) -> Step:
    """Trace a training step on `batch` samples, in the recipe's precision."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    precision = recipe.trainer.precision
    device = torch.device("cpu")
    example = tree_map(mode.from_tensor, task.example(batch, device))
    model = fake_module(task.build_model(recipe.model), mode)
    with mode, softmax_as_one_operator():
        with recorded(model) as calls, gpu_behaviour(model):
            step = training_step(model, task, recipe, example, precision, device)
            with Counter() as around:
                step()  # the first step allocates the optimizer's state
                around.cost = Cost()
                step()
        blocks = []
        for (unit, args, kwargs), units in calls.values():
            unit.train()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                graphs = trace(lambda *xs, unit=unit, kwargs=kwargs: unit(*xs, **kwargs), *args)
            blocks.append((graphs, len(units)))
    return Step(blocks, around.cost)


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[dict[Any, tuple]]:
    """Replace the blocks of a model by functions without cost, and record the blocks' calls.

    On exit, the yielded dict holds one call (block, args, kwargs) of each kind of block, and the set of blocks of that
    kind. Blocks are of one kind if their type, settings and the shapes of parameters and inputs agree.
    """
    calls: dict[Any, tuple] = {}

    def stand_in(unit: nn.Module) -> Callable:
        parameters = list(unit.parameters())

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            given = tree_map(as_leaf, (x, *args))
            shapes = [(tuple(y.shape), y.dtype) for y in [*parameters, *tensors_of(given)]]
            key = (type(unit), str(shapes), str(unit))
            _, units = calls.setdefault(key, ((unit, given, kwargs), set()))
            units.add(unit)
            others = [y for y in tensors_of((args, kwargs)) if y.requires_grad]
            return _StandIn.apply(x, *others, *parameters)

        return forward

    with contextlib.ExitStack() as stack:
        for unit in model.units():
            stack.enter_context(mock.patch.object(unit, "forward", stand_in(unit)))
        yield calls


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def as_leaf(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.requires_grad)


class _StandIn(torch.autograd.Function):
    """A block that computes nothing and returns a gradient for every input."""

    @staticmethod
    def forward(ctx, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x, *others)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


class Counter(TorchDispatchMode):
    """A mode that sums the costs of eager operators; views and operators without a kernel are free."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket._qualified_op_name.partition("::")[2]
        if name == "_local_scalar_dense":  # fake numbers have no value: 0.5 for numbers drawn on the CPU, as in MixUp
            return 0.5 if args[0].dtype.is_floating_point else True  # checks pass; a GPU does not wait for them
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or name.startswith(FREE):
            return out
        used = args
        if name in OVERWRITING:
            used = args[1:]
        crossed = tensors_of((used, kwargs)) + tensors_of(changed(func, args, kwargs) or out)
        flops = operator_flops(func, args, kwargs, out)
        moved = sum(x.numel() * x.itemsize for x in crossed)
        self.cost += Cost(launches=int(not flops), library=int(bool(flops)), moved=moved, flops=flops)
        return out


def changed(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """Return the arguments that an operator writes in place, by its schema.

    Fused optimizers declare gradients, too, but write them only if they are scaled.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    found = []
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and argument.name != "grads" and argument.name in given:
            found.append(given[argument.name])
    return found


@contextlib.contextmanager
def gpu_behaviour(model: nn.Module) -> Iterator[None]:
    """Compute the norms of all gradients in one operator, as on a GPU, and keep fake parameters on their device."""
    with mock.patch("torch.nn.utils.clip_grad._has_foreach_support", lambda *_: True):
        with mock.patch.object(model, "to", lambda *_: model):
            yield


def attention_results(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return placeholders of fused softmax attention: the output, and one float32 number per token."""
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


softmax_attention = torch.library.custom_op("lion_gpu::softmax_attention", attention_results, mutates_args=())
softmax_attention.register_fake(attention_results)
softmax_attention_backward = torch.library.custom_op(
    "lion_gpu::softmax_attention_backward", attention_gradients, mutates_args=()
)
softmax_attention_backward.register_fake(attention_gradients)


def keep_inputs(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.causal = inputs[3]


def gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *softmax_attention_backward(grad, *ctx.saved_tensors, ctx.causal), None


softmax_attention.register_autograd(gradients, setup_context=keep_inputs)


def product_flops(q: Any, k: Any, causal: bool) -> int:
    """Return the FLOPs of one product of queries and keys of these shapes, in causal attention of half of the pairs."""
    pairs = q[0] * q[1] * q[2] * k[2]
    if causal:
        return pairs * q[3]
    return 2 * pairs * q[3]


@register_flop_formula(torch.ops.lion_gpu.softmax_attention)
def _(q: Any, k: Any, v: Any, causal: bool, **_: Any) -> int:
    return 2 * product_flops(q, k, causal)


@register_flop_formula(torch.ops.lion_gpu.softmax_attention_backward)
def _(grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, causal: bool, **_: Any) -> int:
    return 5 * product_flops(q, k, causal)


def softmax_as_one_operator() -> Any:
    """Return a patch that makes PyTorch's SDPA one operator, as on a GPU, in graphs traced on a CPU."""

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_: Any) -> Tensor:
        return softmax_attention(q, k, v, is_causal)[0]

    return mock.patch.object(F, "scaled_dot_product_attention", attention)
