"""A step of a causal language model as a program: tokens and a state in, logits and the next state out.

A step has a fixed number of tokens, 1 to generate, more to read prompts; shorter pieces are padded. Steps of any size
continue from each other's states. In linear mixers a state has a constant size; softmax and fox keep all tokens.
"""

from __future__ import annotations

import itertools
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
        empty = tokens.new_zeros(tokens.shape[0], 0, 0)
        leaves = [next(held) if used else empty for used in self.used]
        logits, new = self.model.step(tokens, tree_unflatten(leaves, self.structure), mask)
        kept = itertools.compress(tree_leaves(new), self.used)
        return logits.float(), *kept


class StepProgram(Program):
    """The program of a step."""

    def varying(self) -> tuple[Any, ...]:
        tokens, mask, *state = super().varying()
        return tokens, mask, tuple(state)

    @torch.no_grad()
    def deviation(self, run: Callable[..., Any]) -> float:
        """Return the largest difference between logits of two steps of `run`, the loaded program, and of the model."""
        set_form(self.module, "auto")
        tokens, mask, *state = self.example(2, 0, 0)
        logits, *state = run(tokens, mask, *state)
        if self.longest is None or 2 * tokens.shape[1] <= self.longest:
            more, _, *_ = self.example(2, 0, 0)
            valid = torch.ones_like(mask)
            later, *state = run(more, valid, *state)
            tokens = torch.cat([tokens, more], 1)
            mask = torch.cat([mask, valid], 1)
            logits = torch.cat([logits, later], 1)
        return (logits - self.module.model(tokens, mask)).abs()[mask].max().item()


@torch.no_grad()
def make_step(run: LoadedRun, overrides: Sequence[str], length: int | None) -> StepProgram:
    """Return the program of a step of `length` tokens, by default one.

    Raises:
        ConfigError: The run has no causal language model, or the model does not take the length.
    """
    model = run.model
    task = run.recipe.task.name
    length = length or 1
    if task != TASK or not model.streams:
        raise ConfigError(f"--step: {run.folder}: only a model of task {TASK!r} continues from a state, not {task!r}")
    longest_input(run, length)
    (tokens, mask), logits = of_causal_text(run)
    inputs = [with_length(tokens, length), with_length(mask, length)]
    outputs = [with_length(logits, length)]
    held, structure = tree_flatten_with_path(model.initial_state(1))
    later = tree_leaves(model.step(torch.zeros(1, length, dtype=torch.long), model.initial_state(1))[1])
    used = [x.numel() > 0 for x in later]
    for (path, before), after in zip(held, later):
        if after.numel():
            taken, returned = ports_of(keystr(path), before, after, length)
            inputs.append(taken)
            outputs.append(returned)
    files = files_of(run, overrides, inputs, outputs, model.longest)
    return StepProgram(Step(model, structure, used).eval(), tuple(inputs), tuple(outputs), model.longest, files)


def ports_of(path: str, before: Tensor, after: Tensor, length: int) -> tuple[Port, Port]:
    """Return the input and the output of a tensor of a state, from its values before and after the first tokens."""
    name = re.sub(r"\W+", "_", path).strip("_")
    shape: list[int | str] = [BATCH]
    grown: list[int | str] = [BATCH]
    for size, other in zip(before.shape[1:], after.shape[1:]):
        shape.append(size if size == other else SEEN)
        grown.append(size if size == other else f"{SEEN} + {length}")
    start = 0.0
    if before.numel():
        start = before.flatten()[0].item()
    taken = Port(name, before.dtype, tuple(shape), f"state {name}", start=float(start))
    return taken, replace(taken, name=f"next_{name}", shape=tuple(grown), start=None)
