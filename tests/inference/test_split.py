"""Prompts that 2 and 3 real processes read together, against one process."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lion.inference import split
from lion.inference.split import read_in_turn
from lion.inference.text import Continuation, streaming_mode
from lion.layers.mixers import LINEAR
from tests.processes import in_processes

from .test_text import gpt

pytestmark = pytest.mark.process
PROMPTS = [[1, 2, 3] * 6, [7], [8, 9, 1] * 4]  # ends in different pieces


def read(group, models):
    split.PIECE = 4  # several pieces for each process
    return {name: read_in_turn(model, PROMPTS, group) for name, model in models.items()}


def test_processes_read_prompts_together():
    models = {mixer: gpt(mixer).double() for mixer in LINEAR if streaming_mode(gpt(mixer)) == "rnn"}
    assert len(models) > 10
    expected = {name: Continuation.of(model, "rnn", PROMPTS) for name, model in models.items()}
    for count in (2, 3):
        for found in in_processes(count, read, models):
            for name, (logits, state) in found.items():
                torch.testing.assert_close(logits, expected[name].logits, rtol=0, atol=1e-11, msg=name)
                for a, b in zip(tree_leaves(state), tree_leaves(expected[name].state), strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=name)


def test_a_prompt_may_be_shorter_than_the_number_of_processes():
    model = gpt("lion_s").double()
    for logits, state in in_processes(3, short, model):
        expected = Continuation.of(model, "rnn", [[5]])
        torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-11)
        assert state.position.tolist() == [1]


def short(group, model):
    return read_in_turn(model, [[5]], group)
