"""Evaluation of a run in every form, on data that the caller passes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lion.config import ConfigError
from lion.evaluation.forms import form_label, forms_to_measure, measure
from lion.layers.mixers import forms_of
from lion.runs import LoadedRun, count_parameters
from lion.samples.base import Splits
from lion.samples.seeds import derive
from lion.trainer.compilation import compile_blocks
from lion.trainer.loader import Loading, eval_batches
from lion.trainer.plan import check_rows
from lion.trainer.runtime import Runtime, start_runtime

log = logging.getLogger("lion")


def evaluate_run(
    loaded: LoadedRun,
    splits: Splits,
    form: str = "all",
    chunk_size: int | Sequence[int] | None = None,
    *,
    split: str | None = None,
    workers: int = 0,
    eager: bool = False,
    runtime: Runtime | None = None,
) -> list[dict[str, Any]]:
    """Measure a run in one form, or in all forms of its mixer: metrics, speed, memory, deviation.

    The deviation is measured from the full form, or from the chunk form if samples are longer than `LONG`. The model is
    left in the form that was measured last, on the device and in the group of processes of `runtime`.

    Args:
        loaded: The run (`lion.runs.open_run`); one model serves all forms.
        splits: The data, a `lion.samples.base.Splits`; their `info` should be that of the run.
        form: A form, or "all".
        chunk_size: Tokens per chunk or step, or several numbers.
        split: "val" or "test"; default "test", or "val" without a test split.
        workers: Processes that load the data.
        eager: Whether not to compile, even if the recipe does.
        runtime: Device and process; by default those of the recipe. With `runtime.part`, its processes share the tokens
            of each row, groups of them share the samples, and all of them return the same values.

    Returns:
        One row per form: `form`, `chunk_size`, `value`, `values`, `samples_per_second`, `peak_bytes`, `deviation`, and
        the conditions of the measurement.

    Raises:
        ConfigError: The data have no such split, or the model does not split its rows over the processes.
    """
    recipe = loaded.recipe
    model = loaded.model
    task = loaded.task
    available = forms_of(model)
    forms = forms_to_measure(form, chunk_size, available, model.length)
    reference = forms_to_measure("all", chunk_size, available, model.length)[0]
    wanted = list(forms)
    if reference not in forms:  # the deviation is measured from it
        wanted.insert(0, reference)
    split = split or splits.reported
    dataset = getattr(splits, split)
    if dataset is None:
        raise ConfigError(f"--split {split}: the data of {loaded.folder} have no such split, use val")
    runtime = runtime or start_runtime(recipe.trainer.device, matmul=recipe.trainer.matmul)
    if runtime.part is not None:
        check_rows(model, runtime.part.count)
        model.part = runtime.part
    batch = min(recipe.trainer.micro_batch or recipe.trainer.batch_size, 256, len(dataset))
    batches = eval_batches(
        dataset,
        Loading(splits.collate, workers, recipe.trainer.faults, runtime.device),
        seed=recipe.seed,
        split=split,
        batch=batch,
        rank=runtime.batch_rank,
        world=runtime.batch_world,
    )
    model.to(runtime.device)  # before the compilation, which depends on the device
    compiled = recipe.trainer.compile and not eager and compile_blocks(model)
    about = {
        "metric": task.metric.name,
        "split": split,
        "best_step": loaded.checkpoint["step"],
        "weight_bytes": 4 * count_parameters(model),
        "batch": batch,
        "precision": recipe.trainer.precision,
        "compiled": compiled,
    }
    which = ", ".join(form_label(name, size) for name, size in wanted)
    if compiled:
        which += ", compiling first"
    log.info("evaluating on %s, %s %s in batches of %d: %s", split, f"{len(dataset):,}", task.unit, batch, which)
    rounds = -(-len(dataset) // (batch * runtime.batch_world))
    seed = derive(recipe.seed, split)
    results = measure(model, task, batches, rounds, wanted, runtime, recipe.trainer.precision, seed)
    return [{"form": form, "chunk_size": size, **about, **results[form, size]} for form, size in forms]
