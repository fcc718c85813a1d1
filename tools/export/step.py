"""A step of a causal language model as a program: tokens and a state in, logits and the next state out.

A step has a fixed number of tokens, 1 to generate, more to read prompts; shorter pieces are padded. Steps of any size
continue from each other's states. In linear mixers a state has a constant size; softmax and fox keep all tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from lion.config import ConfigError
from lion.layers.mixers import set_form
from lion.models.gpt import GPT
from lion.runs import LoadedRun
from tools.export.ports import BATCH, SEEN, Port, of_causal_text
from tools.export.program import Pixels, Program, files_of, longest_input, with_length

TASK = "causal_lm"


class Step(Pixels):
    """A causal model of ids, a mask that is False for padding, and the tensors of a state.

    Args:
        model: The model.
        structure: Structure of its state.
        used: Whether each tensor of the state has values; parts that a mixer lacks are empty.
    """

    def __init__(self, model: GPT, structure: TreeSpec, used: Sequence[bool]) -> None:
        super().__init__(model)
        self.structure, self.used = structure, used

    def forward(self, tokens: Tensor, mask: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        held = iter(state)
        leaves = [next(held) if used else tokens.new_zeros(tokens.shape[0], 0, 0) for used in self.used]
        logits, new = self.model.step(tokens, tree_unflatten(leaves, self.structure), mask)
        return logits.float(), *(x for x, used in zip(tree_leaves(new), self.used) if used)


class StepProgram(Program):
    """The program of a step."""

    def varying(self) -> tuple[Any, ...]:
        tokens, mask, *state = super().varying()
        return tokens, mask, tuple(state)

    @torch.no_grad()
    def deviation(self, run: Callable[..., Any]) -> float:
        """Return the largest difference between logits of two steps of `run`, the loaded program, and of the model."""
        set_form(self.module, "auto")
        tokens, mask, *state = self.example(2, 0)
        pieces = [(tokens, mask), (self.example(2, 0)[0], torch.ones_like(mask))]
        if self.longest is not None and 2 * tokens.shape[1] > self.longest:
            del pieces[1:]
        found = []
        for piece in pieces:
            logits, *state = run(*piece, *state)
            found.append(logits)
        ids, masks = (torch.cat(parts, 1) for parts in zip(*pieces))
        return (torch.cat(found, 1) - self.module.model(ids, masks)).abs()[masks].max().item()


@torch.no_grad()
def make_step(run: LoadedRun, overrides: Sequence[str], length: int | None) -> StepProgram:
    """Return the program of a step of `length` tokens, by default one.

    Raises:
        ConfigError: The run has no causal language model, or the model does not take the length.
    """
    model, task, length = run.model, run.recipe.task.name, length or 1
    if task != TASK or not model.streams:
        raise ConfigError(f"--step: {run.folder}: only a model of task {TASK!r} continues from a state, not {task!r}")
    longest_input(run, length)
    (tokens, mask), logits = of_causal_text(run)
    inputs, outputs = [with_length(port, length) for port in (tokens, mask)], [with_length(logits, length)]
    held, structure = tree_flatten_with_path(model.initial_state(1))
    later = tree_leaves(model.step(torch.zeros(1, length, dtype=torch.long), model.initial_state(1))[1])
    used = [x.numel() > 0 for x in later]
    for (path, before), after in zip(held, later):
        if after.numel():
            for ports, port in zip((inputs, outputs), ports_of(keystr(path), before, after, length)):
                ports.append(port)
    files = files_of(run, overrides, inputs, outputs, model.longest)
    return StepProgram(Step(model, structure, used).eval(), tuple(inputs), tuple(outputs), model.longest, files)


def ports_of(path: str, before: Tensor, after: Tensor, length: int) -> tuple[Port, Port]:
    """Return the input and the output of a tensor of a state, from its values before and after the first tokens."""
    name = re.sub(r"\W+", "_", path).strip("_")
    shapes = (
        (BATCH, *(size if size == other else seen for size, other in zip(before.shape[1:], after.shape[1:])))
        for seen in (SEEN, f"{SEEN} + {length}")
    )
    start = before.flatten()[0].item() if before.numel() else 0.0
    taken, returned = (Port(name, before.dtype, shape, f"state {name}", start=float(start)) for shape in shapes)
    return taken, replace(returned, name=f"next_{name}", start=None)
