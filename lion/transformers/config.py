"""The configuration of models of this package in `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from lion.config import ConfigError, build, nearest
from lion.models import MODELS
from lion.models.base import ModelConfig
from lion.models.tokens import TokenModel


def entry(key: str) -> Any:
    """Return a property that reads an entry of the `model` section, under the name that transformers has for it."""

    def read(self: LionConfig) -> Any:
        return self.section[key]

    def write(self: LionConfig, value: Any) -> None:
        raise ValueError(f"LionConfig: sizes are in the model section, model={{'{key}': {value!r}, ..}}")

    return property(read, write)


class LionConfig(PreTrainedConfig):
    """Configuration of a model: the `model` section of a recipe, sizes of the data, and the fields of `transformers`.

    Args:
        model: The `model` section of a recipe, for example `{"name": "gpt", "mixer": "lion_s", "dim": 384, "depth": 6,
            "num_heads": 6}`. `name` is a model of a recipe, except "dit".
        vocab_size: Number of token ids; None: intensities of pixels (Long Range Arena), or images.
        length: Largest number of tokens of a training sample; in a GPT also the number of position embeddings, if any.
        image_size: (height, width) in pixels.
        num_channels: Number of image channels.
        parts: Number of documents of a sample, 2 for the pairs of the Long Range Arena.
        mean, std: Mean and standard deviation of each channel (or one value for all) of pixels in [0, 1].
            They normalise uint8 images; images in floating point must be normalised already.
        data: Facts about the data of an exported run, from which `./run.sh convert` restores the run.

    `num_labels`, `id2label` and `problem_type` describe the outputs of classifiers, as in all models of `transformers`.
    """

    model_type = "lion"

    model: dict[str, Any] | None = None
    vocab_size: int | None = None
    length: int = 512
    parts: int = 1
    image_size: list[int] | tuple[int, int] | None = None
    num_channels: int = 3
    mean: list[float] | tuple[float, ...] = (0.0,)
    std: list[float] | tuple[float, ...] = (1.0,)
    data: dict[str, Any] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sep_token_id: int | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration from the contents of a `config.json`.

        Raises:
            ValueError: It describes a model of another type.
        """
        kind = config_dict.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(
                f"config.json: a model of type {kind!r}, not {cls.model_type!r}; ./run.sh convert reads BERT and "
                "GPT-2, and ./run.sh export writes folders of this package"
            )
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `save_pretrained` of a model writes its own code, see `lion.transformers.remote`."""

    hidden_size = entry("dim")
    num_hidden_layers = entry("depth")
    num_attention_heads = entry("num_heads")

    @property
    def max_position_embeddings(self) -> int:
        """The largest number of tokens of a row, in a model of tokens with position embeddings.

        Raises:
            AttributeError: The model has no such limit, so that programs that ask for the attribute find none.
        """
        kind = MODELS.get((self.model or {}).get("name", ""))
        if kind is not None and issubclass(kind, TokenModel):
            settings = build(kind.Config, self.model, source=lambda key: "LionConfig", key="model").resolved()
            if settings.position_embedding:
                return getattr(settings, "max_positions", self.length)
        raise AttributeError("max_position_embeddings: this model has no position embeddings of tokens")

    @property
    def section(self) -> dict[str, Any]:
        """The `model` section.

        Raises:
            ValueError: There is none.
        """
        if not self.model:
            raise ValueError(
                "LionConfig: model: missing section, for example "
                "{'name': 'gpt', 'mixer': 'lion_s', 'dim': 384, 'depth': 6, 'num_heads': 6}"
            )
        if not self.tie_word_embeddings:
            raise ValueError("LionConfig: tie_word_embeddings: heads share the token embeddings; expected True")
        return self.model

    def settings(self, names: Mapping[str, str], whose: str) -> ModelConfig:
        """Return the settings of the model that the class `whose` builds.

        Args:
            names: Map from `model.name` of the section to the name of the model that the class builds. Where the two
                differ, as in a classifier that starts from a masked language model, the section takes the new name, and
                loses the settings that only the other model has.

        Raises:
            ValueError: Invalid settings, or a model that the class cannot build.
        """
        section = self.section
        name = section.get("name", next(iter(names)))
        if name not in names:
            raise ValueError(
                f"LionConfig: model.name: {whose} is made from {', '.join(names)}, not from {name!r}, "
                f"{nearest(name, names)}"
            )
        kind = MODELS[names[name]].Config
        own = {f.name for f in fields(kind)}
        kept = dict(section)
        for field in fields(MODELS[name].Config):
            if field.name not in own:
                kept.pop(field.name, None)
        kept["name"] = names[name]
        self.model = kept
        try:
            return build(kind, self.model, source=lambda key: "LionConfig", key="model")
        except ConfigError as error:
            raise ValueError(str(error)) from None
