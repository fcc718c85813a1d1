"""Untrained runs, and the metadata of text, for the tests of tools."""

import torch

from lion.samples.text import TextInfo
from tools.compose import make_task
from tools.convert import write_run


def text_info(tokenizer, length, name="bytes"):
    return TextInfo(tokenizer.vocabulary, length, name, tokenizer.fingerprint, tokenizer.special)


def untrained(recipe, info, change=None):
    """Write a run with random weights, after `change(model)`, and return its folder."""
    torch.manual_seed(0)
    model = make_task(recipe, info).build_model(recipe.model)
    if change is not None:
        change(model)
    state = {"info": info.to_dict(), "model": model.state_dict(), "ema": None}
    write_run(recipe.folder, recipe, state, {}, {})
    return recipe.folder
