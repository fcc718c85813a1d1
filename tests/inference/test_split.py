"""Prompts that 2 and 3 real processes read together, against one process."""

import pytest
from torch.utils._pytree import tree_leaves

from lion.inference import split
from lion.inference.split import read_in_turn
from lion.inference.text import Continuation
from tests.layers.helpers import close, invalid
from tests.processes import in_processes

from .test_text import gpt

MIXERS = ("lion_s", "mamba", "gla", "xlstm", "deltanet", "deltaproduct", "rwkv7", "retnet")  # states of each kind
PROMPTS = [[1, 2, 3] * 6, [7], [8, 9, 1] * 4]  # ends in different pieces
SHORT = [[5]]  # fewer tokens than processes


def read(group, models):
    split.PIECE = 4  # several pieces for each process
    found = {name: read_in_turn(model, PROMPTS, group) for name, model in models.items()}
    return found, read_in_turn(models["lion_s"], SHORT, group)


def assert_reads(found, model, prompts):
    logits, state = found
    expected = Continuation.of(model, "rnn", prompts)
    close(logits, expected.logits, 1e-11)
    close(tree_leaves(state), tree_leaves(expected.state), 1e-11)


@pytest.mark.process
def test_processes_read_prompts_together():
    models = {mixer: gpt(mixer).double() for mixer in MIXERS}
    for count in (2, 3):
        for found, short in in_processes(count, read, models):
            assert_reads(short, models["lion_s"], SHORT)
            for name, model in models.items():
                assert_reads(found[name], model, PROMPTS)


def test_mixers_whose_state_grows_are_refused():
    invalid("processes: mixer 'softmax' keeps all keys and values, use one process", read_in_turn, gpt(), PROMPTS, None)
