"""Trained runs as models of `transformers`."""

from __future__ import annotations

from typing import Any

from lion.config import ConfigError, nearest, to_dict
from lion.runs import LoadedRun
from lion.samples.images import ImageInfo
from lion.samples.text import TextInfo
from lion.transformers.base import LionPreTrainedModel
from lion.transformers.config import LionConfig
from lion.transformers.images import LionForImageClassification
from lion.transformers.text import LionForCausalLM, LionForMaskedLM, LionForSequenceClassification

KINDS: dict[str, type[LionPreTrainedModel]] = {  # by `model.name`
    "bert": LionForMaskedLM,
    "bert_classifier": LionForSequenceClassification,
    "gpt": LionForCausalLM,
    "vit": LionForImageClassification,
}


def from_run(run: LoadedRun) -> LionPreTrainedModel:
    """Return the model of a run (`lion.open_run`), with a copy of its weights, in evaluation mode on the CPU.

    Raises:
        ConfigError: There is no class for the model of the run.
    """
    name, info = run.recipe.model.name, run.task.info
    if name not in KINDS:
        raise ConfigError(
            f"{run.folder}: model.name: lion.transformers has no class for {name!r}, {nearest(name, KINDS)}"
        )
    classes = tuple(getattr(info, "classes", ()))
    labels = (
        {"id2label": dict(enumerate(classes)), "label2id": {c: i for i, c in enumerate(classes)}} if classes else {}
    )
    if name == "bert_classifier" and not classes:
        labels = {"num_labels": 1, "problem_type": "regression"}
    data = {"task": to_dict(run.recipe.task), "info": info.to_dict()}
    config = LionConfig(model=to_dict(run.recipe.model), data=data, **labels, **FIELDS[type(info).kind](run))
    model = KINDS[name](config)
    model.model.load_state_dict(run.model.state_dict())
    return model.eval()


def fields_of_text(run: LoadedRun) -> dict[str, Any]:
    info: TextInfo = run.task.info
    ids = {f"{role}_token_id": info.special.get(role) for role in ("pad", "sep")}
    ids |= dict.fromkeys(("bos_token_id", "eos_token_id"), info.special.get("end"))
    return {"vocab_size": run.model.vocabulary, "length": run.model.length, **ids}


def fields_of_images(run: LoadedRun) -> dict[str, Any]:
    info: ImageInfo = run.task.info
    pixels = {"mean": list(info.mean), "std": list(info.std)}
    return {"image_size": list(info.size), "num_channels": info.channels, **pixels}


FIELDS = {"text": fields_of_text, "labelled text": fields_of_text, "images": fields_of_images}
