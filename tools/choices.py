"""Zero-shot multiple choice (LightNet's Table 7): how often the right answer is the most likely one for a causal model.

    ./run.sh eval RUN --choices FILE.jsonl [--form ..] [--chunk-size N]

Each line of the file is a question: {"context": TEXT, "choices": [TEXT, ..], "answer": NUMBER}, where the answer counts
from 0. Files of the Hub need no change if their fields have names listed in `FIELDS`. A blank separates a text from
the choice that follows. A text that is too long for the positions of the model is truncated at its beginning.
"""

from __future__ import annotations

import statistics
from argparse import Namespace

import torch

from lion.config import ConfigError
from lion.evaluation.choices import MultipleChoice, interval
from lion.evaluation.forms import form_label, forms_to_measure, measure
from lion.evaluation.questions import Choices, Question, encode, read_questions
from lion.layers.mixers.base import forms_of
from lion.tasks.causal_lm import CausalLM
from lion.trainer.compilation import compile_blocks
from tools.cli import choose_form
from tools.compose import check_finite, check_tokenizer, open_data, open_with_data, runtime_of
from tools.tables import Cell, fill, table


def evaluate_choices(args: Namespace) -> int:
    """Run the command `./run.sh eval RUN --choices FILE`."""
    questions = read_questions(args.choices)
    loaded = open_with_data(args.run, args.overrides, checkpoint=args.checkpoint, ema=args.ema)
    recipe = loaded.recipe
    model = loaded.model
    if not isinstance(loaded.task, CausalLM):
        raise ConfigError(f"--choices: {loaded.folder} is of task {recipe.task.name!r}, expected a run of causal_lm")
    choose_form(model, args.form)
    tokenizer = open_data(recipe, loaded.folder).tokenizer
    check_tokenizer(tokenizer, loaded.task.info, loaded.folder)
    rows, cut = encode(questions, tokenizer, model.longest)
    batch = min(recipe.trainer.micro_batch or recipe.trainer.batch_size, 256, len(rows))
    batches = Choices(rows, batch)
    runtime = runtime_of(recipe)
    model.to(runtime.device)
    compiled = recipe.trainer.compile and not args.eager and compile_blocks(model)
    forms = forms_to_measure(args.form, args.chunk_size, forms_of(model), batches.longest)
    reference = forms_to_measure("all", args.chunk_size, forms_of(model), batches.longest)[0]
    task = MultipleChoice(loaded.task.config, loaded.task.info)
    wanted = list(dict.fromkeys([reference, *forms]))  # the deviation is measured from the reference form
    found = measure(model, task, batches, len(batches), wanted, runtime, recipe.trainer.precision)
    check_finite(torch.tensor([found[form]["deviation"] for form in wanted]), loaded.folder)
    columns: dict[str, Cell] = {"form": lambda form: form_label(*form)}
    for metric in task.metrics:
        columns[metric.heading] = lambda form, name=metric.name: as_text(found[form]["values"][name], len(questions))
    columns["choices/s"] = lambda form: f"{found[form]['samples_per_second']:.0f}"
    columns["deviation"] = lambda form: f"{found[form]['deviation']:.1e}"
    header, cells = fill(columns, forms)
    print(table(header, cells))
    how = f"batch {batch}, {recipe.trainer.precision}, {'compiled' if compiled else 'eager'}"
    print(f"{about(questions)}; 95 % intervals; {how}; deviation in nats")
    if cut:
        print(
            f"{cut:,} of {len(questions):,} texts lost their beginning, because the model has {model.longest} positions"
        )
    return 0


def as_text(share: float, count: int) -> str:
    low, high = interval(share, count)
    return f"{100 * share:.2f} ({100 * low:.1f} to {100 * high:.1f})"


def about(questions: list[Question]) -> str:
    counts = [len(question.choices) for question in questions]
    several = str(min(counts))
    if max(counts) > min(counts):
        several += f" to {max(counts)}"
    chance = statistics.fmean(1 / count for count in counts)
    return f"{len(questions):,} questions of {several} choices, chance {100 * chance:.2f} %"
