"""Export of a BERT or GPT run with softmax attention to a folder of transformers' own classes, the inverse of convert.

`AutoModelForMaskedLM` or `AutoModelForCausalLM`, and `AutoTokenizer`, load the folder with `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import processors

from data.text.tokenizers import Tokenizer
from lion.files import save_json, sync
from lion.runs import LoadedRun
from tools.compose import open_tokenizer_of
from tools.convert import CONVERTERS
from tools.convert.files import CONFIG, FOLDER, safetensors
from tools.convert.language import LanguageConverter
from tools.place import written


def classic(run: LoadedRun) -> LanguageConverter | None:
    """Return the converter to a class of transformers itself that has the model of a run, or None."""
    kind = CONVERTERS.get(run.recipe.model.name)
    if kind is None or not issubclass(kind, LanguageConverter) or not kind().supports(run.model):
        return None
    return kind()


ROLES = {  # names of special tokens in transformers
    "pad": ("pad_token",),
    "mask": ("mask_token",),
    "cls": ("cls_token",),
    "sep": ("sep_token",),
    "unk": ("unk_token",),
    "end": ("bos_token", "eos_token"),
}


def export_classic(run: LoadedRun, converter: LanguageConverter, out: Path, overrides: Sequence[str]) -> str:
    """Write the folder `out`, and return a line that describes it.

    Raises:
        ConfigError: The tokenizer of the run is not found.
    """
    write = safetensors(out).save_file
    tokenizer = open_tokenizer_of(run, overrides)
    weights = {}
    for name, value in converter.restored(run.model).items():
        weights[name] = value.clone(memory_format=torch.contiguous_format)
    config = converter.config(run.model, tokenizer)
    with written(out) as folder:
        folder.mkdir()
        write(weights, folder / FOLDER[0], metadata={"format": "pt"})
        sync(folder / FOLDER[0])
        save_json(folder / CONFIG, config)
        save_tokenizer(folder, tokenizer, run.model)
    parameters = f"{sum(w.numel() for w in weights.values()):,} parameters"
    return f"{config['architectures'][0]}, {parameters}, {tokenizer.vocabulary:,} ids"


def save_tokenizer(folder: Path, tokenizer: Tokenizer, model: Any) -> None:
    """Write the tokenizer of a model in the format of transformers."""
    inner, described = dressed(tokenizer, model)
    inner.save(str(folder / "tokenizer.json"))
    save_json(folder / "tokenizer_config.json", described)


def dressed(tokenizer: Tokenizer, model: Any) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a model in the format of transformers, and its configuration.

    There, special tokens are recognized in text, and are added around text, except around prompts, which a causal model
    continues. Padding stands before prompts, so that they end where the continuation begins; without a token for it, it
    has the id of the end. The configuration holds the roles of special tokens.
    """
    prompts = model.streams
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    words = {name: inner.id_to_token(i) for name, i in tokenizer.special.items()}
    known = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    inner.add_special_tokens([word for word in words.values() if word not in known])  # would lose their own rules
    if prompts and tokenizer.frame[1] and inner.num_special_tokens_to_add(False):
        inner.post_processor = processors.Sequence([])
    if tokenizer.frame[0] and not prompts and inner.post_processor is None:
        cls, sep = words["cls"], words["sep"]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, tokenizer.special["cls"]), (sep, tokenizer.special["sep"])],
        )
    described = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, roles in ROLES.items():
        if name in words:
            described |= dict.fromkeys(roles, words[name])
    described["model_input_names"] = ["input_ids", "attention_mask"]
    if getattr(model.config, "token_types", 0) > 1:
        described["model_input_names"].insert(1, "token_type_ids")
    described["model_max_length"] = model.longest
    if prompts:
        described |= {"padding_side": "left", "pad_token": words.get("pad", words.get("end"))}
    return inner, {name: value for name, value in described.items() if value is not None}
