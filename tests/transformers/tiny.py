"""Tiny models of `lion.transformers` with weights that every part of a model affects."""

import torch

from lion.transformers import LionConfig

SECTION = {"dim": 16, "depth": 2, "num_heads": 2, "init_std": 0.4}
IMAGES = {"image_size": (8, 12), "num_channels": 1, "mean": (0.4,), "std": (0.3,)}


def config(name, mixer="lion_s", model=None, **fields):
    if name == "vit":
        fields = IMAGES | fields
        model = {"patch_size": 4, **(model or {})}
    else:
        fields = {"vocab_size": 40, "length": 32} | fields
    return LionConfig(model={"name": name, "mixer": mixer, **SECTION, **(model or {})}, **fields)


def made(kind, name, mixer="lion_s", model=None, seed=0, **fields):
    """Return a model in float64 and evaluation mode, with noise on all weights."""
    torch.manual_seed(seed)
    found = kind(config(name, mixer, model, **fields)).double().eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return found


def ids(*shape, seed=0):
    return torch.randint(1, 40, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows):
    """Return rows of ids as a batch that is padded in front, and its attention mask."""
    length = max(map(len, rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, length - len(row) :] = row
        mask[i, length - len(row) :] = 1
    return tokens, mask


def flattened(rows):
    """Return rows of ids packed in one row, as the collator of transformers does, with all arguments of packed rows."""
    from transformers import DataCollatorWithFlattening  # which some versions lack

    collate = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    return collate([{"input_ids": row} for row in rows])
