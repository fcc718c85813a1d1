"""Prompts that several processes read together: they take pieces in turn, and pass on the state of each stage.

A stage (a block of the model) reads a piece from the state in which the same stage has left the piece before. So a
process is one stage behind the process that reads the piece before, and all of them work at the same time:

    process 0   piece 0: stage 0   stage 1   stage 2   ..                  piece 2: stage 0   stage 1
    process 1                      piece 1: stage 0    stage 1   stage 2   ..

A state has a fixed size, so a message does not grow with the length of the prompt. Messages are sent from the CPU: NCCL
runs the messages of two processes in one order, so that each could wait for a message that the other sends later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lion.inference.text import PIECE, last_valid, padded, streaming_mode
from lion.layers.layout import Layout
from lion.models.gpt import GPT, GPTState


@torch.inference_mode()
def read_in_turn(model: GPT, rows: list[list[int]], group: dist.ProcessGroup) -> tuple[Tensor, GPTState]:
    """Compute the logits (B, vocabulary) after rows, and the state after them, in all processes of a group.

    Every process calls this function with the same model, in evaluation mode, and the same rows.

    Raises:
        ValueError: The state of the model grows with the length (softmax).
    """
    if streaming_mode(model) != "rnn":
        raise ValueError(f"processes: mixer {model.config.mixer!r} keeps all keys and values, use one process")
    tokens, valid = padded(rows, model.tokens.weight.device)
    count = group.size()
    length = tokens.shape[1]
    rounds = math.ceil(length / (count * PIECE))
    size = math.ceil(length / (count * rounds))  # as many pieces for each process
    pieces = list(zip(tokens.split(size, 1), valid.split(size, 1)))
    position, blocks = model.initial_state(len(rows))
    last = model.tokens.weight.new_zeros(len(rows), model.config.dim)
    chain = Chain(group, [*blocks, last])
    with torch.compiler.set_stance("force_eager"):  # only the step of one token is compiled
        for n, (piece, real) in enumerate(pieces):
            if n % count == group.rank():
                chain.first = n == 0
                chain.final = n + 1 == len(pieces)
                read_piece(model, piece, real, position, chain)
            position = position + real.sum(1)
    states = chain.shared((len(pieces) - 1) % count)
    last = states.pop()
    return model.logits(last), GPTState(position, states)


def read_piece(model: GPT, tokens: Tensor, real: Tensor, position: Tensor, chain: Chain) -> None:
    """Read the next tokens (B, C), whose first ones are at `position` (B,), stage by stage (`GPT.encode_next`)."""
    valid = None if real.all() else real
    x = model.embed(tokens)
    layout = Layout.after(x, position, valid)
    x = model.embedded(x, layout)
    stages: list[Any] = model.encoder.stages
    for number, stage in enumerate(stages):
        x, state = stage.step(x, chain.receive(number), valid=valid)
        chain.send(number, state)
    x = model.encoder.norm(x, Layout.of(x, valid))
    last = chain.receive(-1)
    last = torch.where(real.any(1, keepdim=True), last_valid(x, real), last)
    chain.send(-1, last)


@dataclass
class Chain:
    """States that processes pass on, each to the next one, the last one to the first.

    Attributes:
        states: States before the first token, replaced by those that this process has sent last.
        first, final: Whether this process reads the first piece, which receives nothing, or the final one, which sends
            nothing.
    """

    group: dist.ProcessGroup
    states: list[Any]
    first: bool = True
    final: bool = False
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def receive(self, number: int) -> Any:
        """Return the state of a stage after the piece before."""
        if self.first or self.group.size() == 1:
            return self.states[number]
        packed = to_bytes(self.states[number])
        source = (self.group.rank() - 1) % self.group.size()
        dist.recv(packed, group=self.group, group_src=source)
        return from_bytes(packed, self.states[number])

    def send(self, number: int, state: Any) -> None:
        """Pass on the state of a stage after this piece, without waiting for the process that receives it."""
        self.states[number] = state
        if self.final or self.group.size() == 1:
            return
        packed = to_bytes(state)
        target = (self.group.rank() + 1) % self.group.size()
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]  # a message lives until then
        work = dist.isend(packed, group=self.group, group_dst=target)
        if work is not None:  # as for every process of the group
            self.sent.append((work, packed))

    def shared(self, owner: int) -> list[Any]:
        """Return the states of one process, in all of them."""
        for work, _ in self.sent:
            work.wait()
        packed = to_bytes(self.states)
        dist.broadcast(packed, group=self.group, group_src=owner)
        return from_bytes(packed, self.states)


def to_bytes(state: Any) -> Tensor:
    """Return the bytes of all tensors of a state, on the CPU."""
    leaves = [leaf.contiguous().flatten().view(torch.uint8) for leaf in tree_leaves(state)]
    return torch.cat(leaves).cpu()


def from_bytes(packed: Tensor, like: Any) -> Any:
    """Return the state of which `to_bytes` made the bytes, with the shapes, dtypes and device of another one."""
    leaves, spec = tree_flatten(like)
    packed = packed.to(leaves[0].device)
    sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
    found = []
    for piece, leaf in zip(packed.split(sizes), leaves):
        found.append(piece.clone().view(leaf.dtype).view(leaf.shape))
    return tree_unflatten(found, spec)
