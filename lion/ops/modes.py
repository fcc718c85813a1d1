"""The mode of execution: in a graph or eager, on a GPU or a CPU, under `torch.func`, with or without gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def transforms_active() -> bool:
    """Return whether a transform of `torch.func` is active, such as `grad`, `vmap` or `jvp`."""
    return torch._C._are_functorch_transforms_active()


def reuses_memory() -> bool:
    """Return whether intermediate results may be overwritten: without gradients, and outside of `torch.func`."""
    return not torch.is_grad_enabled() and (torch.compiler.is_compiling() or not transforms_active())


def exporting() -> bool:
    """Return whether `torch.export` traces. In graphs of torch 2.11, `torch.compiler.is_exporting` is always True."""
    return torch.compiler.is_exporting()


# as `torch.compiler.assume_constant_result`, which imports the compiler
exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_static(size: int) -> bool:
    """Return whether `size` is a fixed number.

    A symbol is not: it represents all sizes in a graph of `torch.compile` or `torch.export`.
    """
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy: only when compiling

    return has_static_value(size)


def may_wait(device: torch.device) -> bool:
    """Return whether a check may read its result: on a CPU, outside of graphs, of `torch.func` and of dispatch modes.

    Tensors may have no values in a mode, such as `FakeTensorMode` and that of `make_fx`.
    """
    if device.type != "cpu" or torch.compiler.is_compiling() or transforms_active():
        return False
    return torch._C._len_torch_dispatch_stack() == 0


def for_gpu(device: torch.device) -> bool:
    """Return whether the code runs on a GPU.

    Graphs that are traced on a CPU for a GPU replace this function, so it is called as `modes.for_gpu`.
    """
    return device.type == "cuda"


def holds(condition: Tensor, message: str) -> bool:
    """Return the value of a condition (); the caller raises an error if it is False.

    Where values may not be read, the condition becomes an asynchronous assertion with `message`, which nothing waits
    for and which does not split a graph. The result is then True. Under `torch.func` nothing is checked.
    """
    if may_wait(condition.device):
        return bool(condition)
    if transforms_active() and not torch.compiler.is_compiling():
        return True
    torch._assert_async(condition, message)
    return True
