"""Prediction of masked tokens in text: `./run.sh predict RUN "The capital of France is [MASK]."`"""

from __future__ import annotations

import sys

import torch

from data.text.tokenizers import Tokenizer
from lion.config import ConfigError
from lion.runs import LoadedRun
from tools.compose import check_finite, open_tokenizer_of
from tools.tables import table


def fill(loaded: LoadedRun, texts: list[str], top: int) -> int:
    """Print the `top` most likely tokens for each mask in each text.

    An error is printed for each text that cannot be read; the exit code is then 2, and the other texts are still
    predicted.
    """
    tokenizer = open_tokenizer_of(loaded)
    rows, code = [], 0
    for text in texts:
        try:
            answers = answer(loaded, tokenizer, text, top)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
            continue
        numbers = [""] if len(answers) == 1 else [f" ({i})" for i in range(1, len(answers) + 1)]
        rows += [[f"{text}{number}", *words] for number, words in zip(numbers, answers)]
    if rows:
        print(table(["text", *(f"top {i}" for i in range(1, len(rows[0])))], rows))
    return code


def answer(loaded: LoadedRun, tokenizer: Tokenizer, text: str, top: int) -> list[list[str]]:
    """Return the most likely tokens, with their probabilities, for each mask of a text.

    Raises:
        ConfigError: The text has no mask or more tokens than the model has positions, or the logits are not finite.
    """
    hidden = loaded.task.mask_id
    mask = tokenizer.inner.id_to_token(hidden)
    before, after = tokenizer.frame
    parts = text.split(mask)
    added = tokenizer.inner.get_added_tokens_decoder().get(hidden)
    if added is not None and added.lstrip:  # blanks before such a mask belong to it
        parts[:-1] = [part.rstrip() for part in parts[:-1]]
    if added is not None and added.rstrip:
        parts[1:] = [part.lstrip() for part in parts[1:]]
    first, *rest = map(tokenizer.encode, parts)
    if not rest:
        raise ConfigError(f"{text[:40]!r}: expected at least one {mask}, the token to predict")
    ids = [*before, *first, *(i for part in rest for i in (hidden, *part)), *after]
    tokens = torch.tensor([ids], device=next(loaded.model.parameters()).device)  # (1, L)
    try:
        with torch.inference_mode():
            logits = loaded.task.outputs(loaded.model, {"tokens": tokens})[tokens == hidden]  # (masks, vocabulary)
    except ValueError as error:
        raise ConfigError(f"{text[:40]!r}: {error}") from None
    check_finite(logits, loaded.folder)
    likely = logits.softmax(-1).topk(min(top, logits.shape[-1]))
    pairs = zip(likely.values.tolist(), likely.indices.tolist())
    return [[f"{shown(tokenizer.decode([i]))} {100 * share:.1f}%" for share, i in zip(*pair)] for pair in pairs]


def shown(token: str) -> str:
    """Return the text of a token, in quotes if it has blanks or unprintable characters."""
    return token if token.strip() == token and token.isprintable() and token else repr(token)
