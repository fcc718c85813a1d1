"""Prediction of masked tokens in text: `./run.sh predict RUN "The capital of France is [MASK]."`"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data.text.tokenizers import Tokenizer
from lion.config import ConfigError
from lion.runs import LoadedRun
from tools.cli import say
from tools.compose import check_finite, open_tokenizer_of
from tools.tables import table


def fill(loaded: LoadedRun, texts: list[str], top: int) -> int:
    """Print the `top` most likely tokens for each mask in each text.

    An error is printed for each text that cannot be read; the exit code is then 2, and the other texts are still
    predicted.
    """
    tokenizer = open_tokenizer_of(loaded)
    rows: list[list[str]] = []
    code = 0
    for text in texts:
        try:
            answers = answer(loaded, tokenizer, text, top)
        except ConfigError as error:
            say(f"error: {error}")
            code = 2
            continue
        for number, words in enumerate(answers, 1):
            named = text
            if len(answers) != 1:
                named = f"{text} ({number})"
            rows.append([named, *words])
    if rows:
        print_answers(["text"], rows)
    return code


def print_answers(asks: Sequence[str], rows: list[list[str]]) -> None:
    """Print a table of predictions: each row has the arguments, named by `asks`, then the answers."""
    header = list(asks)
    for place in range(1, len(rows[0]) - len(asks) + 1):
        header.append(f"top {place}")
    print(table(header, rows))


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
    ids = list(before) + first
    for part in rest:
        ids += [hidden, *part]
    ids += after
    tokens = torch.tensor([ids], device=next(loaded.model.parameters()).device)  # (1, L)
    try:
        with torch.inference_mode():
            logits = loaded.task.outputs(loaded.model, {"tokens": tokens})[tokens == hidden]  # (masks, vocabulary)
    except ValueError as error:
        raise ConfigError(f"{text[:40]!r}: {error}") from None
    check_finite(logits, loaded.folder)
    likely = logits.softmax(-1).topk(min(top, logits.shape[-1]))
    answers = []
    for shares, tokens_of_mask in zip(likely.values.tolist(), likely.indices.tolist()):
        words = []
        for share, token in zip(shares, tokens_of_mask):
            words.append(f"{shown(tokenizer.decode([token]))} {100 * share:.1f}%")
        answers.append(words)
    return answers


def shown(token: str) -> str:
    """Return the text of a token, in quotes if it has blanks or unprintable characters."""
    if token and token.strip() == token and token.isprintable():
        return token
    return repr(token)
