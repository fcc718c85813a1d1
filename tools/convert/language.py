"""Base class of converters from and to language models of `transformers`; `bert.py` and `gpt.py` are the models."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from data.text.tokenizers import BUILT_IN, Tokenizer, local_files, open_tokenizer
from lion.config import ConfigError, flatten, to_dict
from lion.layers.mixers import SOFTMAX
from lion.layers.rotations import NO_ROTATION
from lion.models.tokens import TokenModel
from lion.recipe import Recipe
from lion.samples.text import TextInfo
from tools.compose import open_data
from tools.convert.base import Converter, Setting, checked, kept_tokenizer, no_place
from tools.convert.files import CheckpointContents

PLAIN = {  # our settings for the attention and the blocks of these models
    "attention.feature_map": None,
    "attention.rotation": NO_ROTATION,
    "attention.block": "plain",
    "norm": "layernorm",
    "position_embedding": True,
}
PADDED = tuple(2**n for n in range(11))  # embeddings may be padded to a multiple of any of these
BY_TOKEN = ("tokens.weight", "head.bias")  # weights with a row for each token id
BLOCK = r"encoder\.blocks\.(\d+)\."


@dataclass(frozen=True)
class Format:
    """The format of a model of transformers, and its relation to our model."""

    kind: str  # `model_type` in config.json
    architecture: str  # class of transformers, for export
    whose: str  # description of the checkpoints that can be read, for messages
    plain: dict[str, Any]  # settings with which our model equals theirs
    keys: dict[str, str]  # keys of config.json by the names used here
    assumed: dict[str, Any]  # heads, eps and activation if config.json does not set them
    only: dict[str, Any]  # keys of config.json of which our model supports only this value
    activations: dict[str, str]  # our `model.mlp` by their activation
    tied: dict[str, str]  # tied weights: the name in `names`, and the second name
    unused: str  # pattern of their weights that our model does not have
    outer: dict[str, str]  # our weights outside of the blocks, and the name of theirs
    inner: dict[str, tuple[str, ...]]  # our weights in a block, and theirs, which are concatenated
    blocks: str  # their name for the blocks


def with_biases(modules: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the names of the weights and the biases of modules, ours and theirs."""
    found = {}
    for ours, theirs in modules.items():
        for kind in ("weight", "bias"):
            found[f"{ours}.{kind}"] = tuple(f"{name}.{kind}" for name in theirs)
    return found


class LanguageConverter(Converter):
    """A converter of language models.

    The recipe is adjusted to the checkpoint. For a folder, the `config.json` determines the model, and the run gets the
    tokenizer of the folder. For a single file, only shapes determine the model.
    """

    format: ClassVar[Format]
    trusted = ("model.num_heads", "model.norm_eps", "model.mlp", "data.tokenizer")
    matrices: ClassVar[tuple[str, ...]] = ("tokens.weight", "positions.weight", "encoder.blocks.0.mlp.fc1.weight")

    def names(self, depth: int) -> dict[str, tuple[str, ...]]:
        """Return the names of our weights in `depth` blocks, each with the names of their weights that form it."""
        found = {ours: (theirs,) for ours, theirs in self.format.outer.items()}
        for n in range(depth):
            for ours, theirs in self.format.inner.items():
                found[f"encoder.blocks.{n}.{ours}"] = tuple(f"{self.format.blocks}.{n}.{each}" for each in theirs)
        return found

    @abstractmethod
    def cleaned(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """Return their weights under the names of `names`, with linear weights in the layout of PyTorch."""

    def optional(self, name: str, theirs: dict[str, Any]) -> bool:
        """Return whether the checkpoint `theirs` may lack a weight of our model."""
        return False

    def rename(self, held: CheckpointContents) -> dict[str, Tensor]:
        self.check_kind(held)
        theirs = {}
        for name, value in self.cleaned(held.weights).items():
            if not re.fullmatch(self.format.unused, name):
                theirs[name] = value
        for kept, other in self.format.tied.items():
            if other in theirs:
                twin = theirs.pop(other)
                value = theirs.setdefault(kept, twin)
                if not torch.is_tensor(value) or not torch.is_tensor(twin) or not torch.equal(value, twin):
                    raise ConfigError(f"{held.path}: {other} differs from {kept}: our model has one weight for both")
        numbers = block_numbers(rf"{re.escape(self.format.blocks)}\.(\d+)\.", theirs)
        names = self.names(1 + max(numbers, default=0))
        ours = {}
        for our, parts in names.items():
            missing = [name for name in parts if name not in theirs]
            if len(missing) == len(parts) and self.optional(our, theirs):
                continue
            if missing:
                raise ConfigError(f"{held.path}: {missing[0]} is missing: not {self.format.whose}")
            values = [checked(name, theirs.pop(name), held.path) for name in parts]
            if len({value.shape for value in values}) > 1:
                raise ConfigError(f"{held.path}: {', '.join(parts)} have different shapes")
            ours[our] = torch.cat(values)
        if theirs:
            raise no_place(next(iter(theirs)), held.path)
        for name in self.matrices:
            if ours[name].dim() != 2:
                raise ConfigError(
                    f"{held.path}: {names[name][0]} has the shape {tuple(ours[name].shape)}, expected a matrix"
                )
        return ours

    def check_kind(self, held: CheckpointContents) -> None:
        """Check that our model supports the model of `config.json`.

        Raises:
            ConfigError: Our model does not support it.
        """
        said = held.said
        if said.get("model_type", self.format.kind) != self.format.kind:
            raise ConfigError(
                f"{held.path}: model_type {said['model_type']!r}, but the model of the recipe is a {self.format.kind}; "
                "valid: bert (recipes mlm_*) and gpt2 (recipes gpt2_*)"
            )
        for key, value in self.format.only.items():
            if said.get(key, value) != value:
                raise ConfigError(
                    f"{held.path}: its config.json has {key} {said[key]!r}, our model supports only {value!r}"
                )

    def sizes(self, ours: dict[str, Tensor]) -> dict[str, int]:
        """Return the sizes that the shapes of our weights show, by the names of `Format.keys`."""
        rows, dim = ours["tokens.weight"].shape
        return {
            "rows": rows,
            "dim": dim,
            "depth": 1 + max(block_numbers(BLOCK, ours)),
            "hidden": len(ours["encoder.blocks.0.mlp.fc1.weight"]),
            "positions": len(ours["positions.weight"]),
        }

    def facts(self, held: CheckpointContents, ours: dict[str, Tensor]) -> dict[str, tuple[Any, str]]:
        """Return (value, source) of the settings of the model that the checkpoint shows, by key of the recipe."""
        keys = self.format.keys
        metadata = self.metadata(held)
        sizes = self.sizes(ours)
        for name, size in sizes.items():
            wanted = metadata.get(keys[name])
            if wanted not in (None, size):
                raise ConfigError(f"{held.path}: {keys[name]} is {wanted} in its config, {size} by its weights")
        shown = {"dim": sizes["dim"], "depth": sizes["depth"], "mlp_ratio": ratio(sizes["hidden"], sizes["dim"])}
        shown |= self.format.plain | self.more(ours)
        found = {key: (value, "its weights") for key, value in shown.items()}
        for name, key in (("heads", "num_heads"), ("eps", "norm_eps")):
            if keys[name] in metadata:
                found[key] = metadata[keys[name]], "its config"
        activation = metadata.get(keys["activation"])
        if activation is not None:
            known = self.format.activations
            if activation not in known:
                raise ConfigError(
                    f"{held.path}: its activation is {activation!r}, our model supports {', '.join(known)}"
                )
            found["mlp"] = known[activation], "its config"
        return {f"model.{key}": value for key, value in found.items()}

    def metadata(self, held: CheckpointContents) -> dict[str, Any]:
        """Return the metadata stored with the weights, with defaults for missing keys."""
        if not held.said:
            return {}
        assumed = {self.format.keys[name]: value for name, value in self.format.assumed.items()}
        return assumed | held.said

    def more(self, ours: dict[str, Tensor]) -> dict[str, Any]:
        """Return further settings of the model that shapes show."""
        return {}

    def adopted(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
        if recipe.model.mixer != SOFTMAX:
            raise ConfigError(
                f"{held.path}: softmax attention, but the recipe has mixer {recipe.model.mixer!r}: convert it with "
                "the softmax recipe, and initialize other mixers from that run (init_from=RUN)"
            )
        shown = {key: value for key, (value, _) in self.facts(held, ours).items()}
        return self.own_tokenizer(held) | shown

    def own_tokenizer(self, held: CheckpointContents) -> dict[str, Any]:
        """Return the setting of the tokenizer of the folder, if it has one."""
        folder = held.folder
        if folder is None or local_files(str(folder)) is None:
            return {}
        return {"data.tokenizer": str(folder)}

    def info(self, held: CheckpointContents, recipe: Recipe) -> TextInfo:
        name = recipe.data.tokenizer
        found = open_data(recipe).tokenizer if name in BUILT_IN[1:] else open_tokenizer(name)
        return TextInfo(found.vocabulary, recipe.data.length, found.name, found.fingerprint, found.special)

    def settings(
        self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: TextInfo
    ) -> Iterator[Setting]:
        mine = flatten({"model": to_dict(recipe.model.resolved())})
        for key, (value, seen) in self.facts(held, ours).items():
            yield Setting(key, value, mine[key], seen)
        if held.folder is not None and recipe.data.tokenizer == str(held.folder):
            yield Setting("data.tokenizer", str(held.folder), recipe.data.tokenizer, "its folder")

    def fit(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: TextInfo) -> TextInfo:
        """Resize the embeddings to the vocabulary, padded as in the recipe. Rows beyond the vocabulary belong to no
        token, and are replaced by zeros.
        """
        rows = len(ours["tokens.weight"])
        ids = info.vocabulary
        if rows not in [-(-ids // multiple) * multiple for multiple in PADDED]:
            raise ConfigError(
                f"{held.path}: embeddings of {rows:,} tokens, but tokenizer {info.tokenizer!r} has {ids:,} ids: "
                "another vocabulary; set data.tokenizer to the tokenizer of the checkpoint"
            )
        wanted = -(-ids // recipe.model.pad_vocabulary) * recipe.model.pad_vocabulary
        for name in BY_TOKEN:
            if name in ours:
                missing = [0] * 2 * (ours[name].dim() - 1) + [0, wanted - ids]
                ours[name] = F.pad(ours[name][:ids], missing)
        return info

    def keep(self, held: CheckpointContents, recipe: Recipe) -> dict[str, str]:
        """Return the tokenizer of the folder, so that the folder may be deleted."""
        if held.folder is None or recipe.data.tokenizer != str(held.folder):
            return {}
        return kept_tokenizer(recipe.data.tokenizer, recipe)

    def describe(self, held: CheckpointContents, recipe: Recipe, info: TextInfo) -> str:
        c = recipe.model
        text = f"{c.depth} blocks of width {c.dim}, {c.num_heads} heads, "
        text += f"{info.vocabulary:,} ids of tokenizer {info.tokenizer!r}"
        unused = {}  # each name once for all blocks
        for name in self.cleaned(held.weights):
            if re.fullmatch(self.format.unused, name):
                unused[re.sub(r"\d+", "*", name)] = None
        if unused:
            text += f"; not used: {', '.join(unused)}"
        return text

    def supports(self, model: TokenModel) -> bool:
        """Return whether the model of transformers can compute what our model computes."""
        mine = flatten(to_dict(model.config))
        for key, value in self.format.plain.items():
            if mine[key] != value:
                return False
        if mine["mixer"] != SOFTMAX or mine["mlp"] not in self.format.activations.values():
            return False
        return model.state_dict().keys() <= self.names(model.config.depth).keys()

    def restored(self, model: TokenModel) -> dict[str, Tensor]:
        """Return the weights of a supported model under their names; weights that our model lacks are zero."""
        ours = model.state_dict()
        found = {}
        for our, parts in self.names(model.config.depth).items():
            if our in BY_TOKEN and our in ours:
                value = ours[our][: model.vocabulary]
            elif our in ours:
                value = ours[our]
            elif our.endswith("bias"):
                value = torch.zeros(len(ours[our.replace("bias", "weight")]))
            else:  # the embeddings of token types
                value = torch.zeros(1, model.config.dim)
            found |= zip(parts, value.chunk(len(parts)))
        return found

    def config(self, model: TokenModel, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the `config.json` of a supported model."""
        c = model.config
        activations = {ours: theirs for theirs, ours in reversed(self.format.activations.items())}
        mine = {
            "rows": model.vocabulary,
            "dim": c.dim,
            "depth": c.depth,
            "positions": model.longest,
            "hidden": int(c.dim * c.mlp_ratio),
            "heads": c.num_heads,
            "eps": c.norm_eps,
            "activation": activations[c.mlp],
            "std": c.init_std,
            "dropout": c.dropout,
            "score_dropout": c.attention.score_dropout,
        }
        held = {"architectures": [self.format.architecture], "model_type": self.format.kind}
        for name, value in mine.items():
            held[self.format.keys[name]] = value
        return held | {"dtype": "float32"}


def block_numbers(pattern: str, names: Iterable[str]) -> list[int]:
    """Return the numbers of the blocks in names of weights."""
    matches = [re.match(pattern, name) for name in names]
    return [int(match[1]) for match in matches if match]


def ratio(hidden: int, dim: int) -> float:
    """Return the `mlp_ratio` for which `int(dim * mlp_ratio)` equals `hidden`."""
    found = hidden / dim
    if int(dim * found) == hidden:
        return found
    return math.nextafter(found, math.inf)
