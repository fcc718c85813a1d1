"""Export a run to a folder that transformers loads with `from_pretrained`, the inverse of `convert`.

    python -m tools export RUN OUT [data.path=PATH] [--checkpoint best|last] [--ema]

A BERT or GPT with softmax attention becomes a model of transformers' own class, with its tokenizer, if there is one for
its settings. Every other text or image model becomes one of `lion.transformers`, see `tools.export.hub`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import processors

from data.text.tokenizers import Tokenizer
from lion.config import ConfigError
from lion.files import save_json, sync
from lion.runs import LoadedRun, open_run
from tools.cli import Parser
from tools.compose import check_tokenizer, open_data, resolve_run
from tools.convert import CONVERTERS, converter_of
from tools.convert.files import CONFIG, FOLDER, safetensors
from tools.convert.language import LanguageConverter

ROLES = {  # names of special tokens in transformers
    "pad": ("pad_token",),
    "mask": ("mask_token",),
    "cls": ("cls_token",),
    "sep": ("sep_token",),
    "unk": ("unk_token",),
    "end": ("bos_token", "eos_token"),
}


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh export", description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="data.path=PATH", help="where the data are now")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights")
    args = parser.parse_intermixed_args(argv)
    if os.path.lexists(args.out):
        raise ConfigError(f"{args.out}: exists already, choose a new folder")
    write = safetensors(args.out).save_file
    loaded = open_run(args.run, checkpoint=args.checkpoint, ema=args.ema)
    if not classic(loaded):
        from tools.export.hub import export  # imports this module

        print(f"{args.out}: {export(loaded, args.out, args.overrides, None)}")
        return 0
    converter = converter_of(loaded.recipe)
    tokenizer = open_data(resolve_run(loaded.folder, args.overrides), loaded.folder).tokenizer
    check_tokenizer(tokenizer, loaded.task.info, loaded.folder)
    try:
        weights = {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in converter.restored(loaded.model).items()
        }
        config = converter.config(loaded.model, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"{loaded.folder}: {error}") from None
    inner, described = dressed(tokenizer)
    kinds = ["token_type_ids"] if config.get("type_vocab_size", 1) > 1 else []
    described |= {"model_input_names": ["input_ids", *kinds, "attention_mask"]}
    described |= {"model_max_length": loaded.model.longest}
    scratch = args.out.with_name(f".{args.out.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        write(weights, scratch / FOLDER[0], metadata={"format": "pt"})
        sync(scratch / FOLDER[0])
        save_json(scratch / CONFIG, config)
        inner.save(str(scratch / "tokenizer.json"))
        save_json(scratch / "tokenizer_config.json", described)
        os.rename(scratch, args.out)
        sync(args.out.parent)
    except OSError as error:
        raise ConfigError(f"{args.out}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    parameters = f"{sum(w.numel() for w in weights.values()):,} parameters"
    print(f"{args.out}: {config['architectures'][0]}, {parameters}, {tokenizer.vocabulary:,} ids")
    return 0


def classic(run: LoadedRun) -> bool:
    """Return whether a class of transformers itself has the model of a run."""
    converter = CONVERTERS.get(run.recipe.model.name)
    if converter is None or not issubclass(converter, LanguageConverter):
        return False
    try:
        converter().restored(run.model)
    except ConfigError:
        return False
    return run.model.config.mlp in converter.format.activations.values()


def dressed(tokenizer: Tokenizer) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer in the format of transformers, and its configuration.

    There, special tokens are recognized in text, and are added around text. The configuration holds their roles.
    """
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    words = {name: inner.id_to_token(i) for name, i in tokenizer.special.items()}
    inner.add_special_tokens(list(words.values()))
    framed = bool(tokenizer.frame[0])
    if framed and inner.post_processor is None:
        cls, sep = words["cls"], words["sep"]
        ids = [(words[name], tokenizer.special[name]) for name in ("cls", "sep")]
        single = f"{cls} $A {sep}"
        inner.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B:1 {sep}:1", special_tokens=ids
        )
    roles = {role: words[name] for name, taken in ROLES.items() if name in words for role in taken}
    return inner, {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
