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
    config = LionConfig(model=to_dict(run.recipe.model), data=data, **fields_of(run))
    model = KINDS[name](config)
    model.model.load_state_dict(run.model.state_dict())
    return model.eval()


def fields_of(run: LoadedRun) -> dict[str, Any]:
    """Return the fields of `LionConfig` that describe the data of a run."""
    info = run.task.info
    if isinstance(info, ImageInfo):
        pixels = {"mean": list(info.mean), "std": list(info.std), "num_channels": info.channels}
        return names_of(info.classes) | pixels | {"image_size": list(info.size)}
    if isinstance(info, SequenceInfo):
        return {
            "vocab_size": info.vocabulary,
            "length": info.length,
            "parts": info.parts,
            "mean": [info.mean],
            "std": [info.std],
            "num_labels": info.classes,
        }
    if isinstance(info, TokenLabelsInfo):
        return {"vocab_size": info.vocabulary, "length": run.model.length, "num_labels": info.classes}
    special = cast("TextInfo", info).special
    fields = {
        "vocab_size": run.model.vocabulary,
        "length": run.model.length,
        "pad_token_id": special.get("pad"),
        "sep_token_id": special.get("sep"),
        "bos_token_id": special.get("end"),
        "eos_token_id": special.get("end"),
    }
    if not isinstance(info, LabelledTextInfo):
        return fields
    if info.classes:
        return fields | names_of(info.classes)
    return fields | {"num_labels": 1, "problem_type": "regression"}


def names_of(classes: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
