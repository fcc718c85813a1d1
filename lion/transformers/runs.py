"""Trained runs as models of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from lion.config import ConfigError, to_dict
from lion.runs import LoadedRun, open_run
from lion.samples.images import ImageInfo
from lion.samples.labels import TokenLabelsInfo
from lion.samples.sequences import SequenceInfo
from lion.samples.text import LabelledTextInfo, TextInfo
from lion.transformers.base import LionPreTrainedModel
from lion.transformers.classifiers import LionForSequenceClassification, LionForTokenClassification
from lion.transformers.config import LionConfig
from lion.transformers.images import LionForImageClassification
from lion.transformers.text import LionForCausalLM, LionForMaskedLM

KINDS: dict[str, type[LionPreTrainedModel]] = {  # by `model.name`
    "bert": LionForMaskedLM,
    "bert_classifier": LionForSequenceClassification,
    "gpt": LionForCausalLM,
    "lra": LionForSequenceClassification,
    "lra_masked": LionForMaskedLM,
    "token_classifier": LionForTokenClassification,
    "vit": LionForImageClassification,
}


def from_run(run: LoadedRun | str | Path) -> LionPreTrainedModel:
    """Return the model of a run with a copy of its weights, in evaluation mode on the CPU.

    Args:
        run: The run (`lion.open_run`), or its folder or name.

    Raises:
        ConfigError: There is no such run, or no class for its model.
    """
    if not isinstance(run, LoadedRun):
        run = open_run(run)
    name = run.recipe.model.name
    info = run.task.info
    if name not in KINDS:
        raise ConfigError(
            f"{run.folder}: model.name: lion.transformers has no class for {name!r}, because transformers has none for "
            "diffusion; ./run.sh export --format pt2 writes its program"
        )
    data = {"task": to_dict(run.recipe.task), "info": info.to_dict()}
    config = LionConfig(model=to_dict(run.recipe.model), data=data, **FIELDS[type(info).kind](run))
    model = KINDS[name](config)
    model.model.load_state_dict(run.model.state_dict())
    return model.eval()


def fields_of_text(run: LoadedRun) -> dict[str, Any]:
    info = cast("TextInfo", run.task.info)
    special = info.special
    return {
        "vocab_size": run.model.vocabulary,
        "length": run.model.length,
        "pad_token_id": special.get("pad"),
        "sep_token_id": special.get("sep"),
        "bos_token_id": special.get("end"),
        "eos_token_id": special.get("end"),
    }


def fields_of_labelled_text(run: LoadedRun) -> dict[str, Any]:
    classes = cast("LabelledTextInfo", run.task.info).classes
    labels = {"num_labels": 1, "problem_type": "regression"}
    if classes:
        labels = names_of(classes)
    return {**fields_of_text(run), **labels}


def fields_of_labelled_tokens(run: LoadedRun) -> dict[str, Any]:
    info = cast("TokenLabelsInfo", run.task.info)
    return {"vocab_size": info.vocabulary, "length": run.model.length, "num_labels": info.classes}


def fields_of_sequences(run: LoadedRun) -> dict[str, Any]:
    info = cast("SequenceInfo", run.task.info)
    sizes = {"vocab_size": info.vocabulary, "length": info.length, "parts": info.parts, "num_labels": info.classes}
    return {**sizes, "mean": [info.mean], "std": [info.std]}


def fields_of_images(run: LoadedRun) -> dict[str, Any]:
    info = cast("ImageInfo", run.task.info)
    pixels = {"mean": list(info.mean), "std": list(info.std)}
    return {"image_size": list(info.size), "num_channels": info.channels, **pixels, **names_of(info.classes)}


def names_of(classes: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}


FIELDS = {
    "images": fields_of_images,
    "labelled text": fields_of_labelled_text,
    "labelled tokens": fields_of_labelled_tokens,
    "sequences": fields_of_sequences,
    "text": fields_of_text,
}
