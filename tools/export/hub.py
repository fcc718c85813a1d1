"""Export of a run to a folder that transformers loads with `from_pretrained`, the inverse of `convert`.

A BERT or GPT with softmax attention becomes a model of transformers' own class, if there is one for its settings
(`tools.export.transformers`). Every other text or image model becomes one of `lion.transformers`, which the Auto
classes load with `trust_remote_code=True`.

The folder holds the weights under the names of the run after the prefix `model.`, the configuration, the tokenizer or
the image processor, the recipe, and a model card. `./run.sh convert FOLDER FOLDER/recipe.yaml OUT` makes a run of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lion.config import ConfigError, to_dict
from lion.files import save_json, save_text
from lion.recipe import Recipe, dump_recipe
from lion.recipe_files import RECIPE
from lion.runs import LoadedRun, count_parameters
from lion.samples.images import ImageInfo
from lion.samples.text import TextInfo
from tools.compose import open_tokenizer_of, resolve_run
from tools.export.card import card
from tools.export.ports import scaling
from tools.export.transformers import classic, export_classic, save_tokenizer
from tools.place import written

BICUBIC = 3  # as numbered by PIL


def export(run: LoadedRun, out: Path, overrides: Sequence[str]) -> str:
    """Write the folder `out`, and return a line that describes it.

    Raises:
        ConfigError: transformers is not installed, has no class for the model or no processor for its images, or the
            tokenizer is not found.
    """
    converter = classic(run)
    if converter is not None:
        return export_classic(run, converter, out, overrides)
    try:
        from lion.transformers import from_run
        from lion.transformers.remote import AUTO
    except ImportError as error:
        raise ConfigError(f"{out}: {error}") from None
    model, recipe, info = from_run(run), resolve_run(run.folder, overrides), run.task.info
    auto = next(auto for auto, kind in AUTO.items() if kind == type(model).__name__)
    tokenizer = None
    if isinstance(info, TextInfo):
        tokenizer = open_tokenizer_of(run, overrides)
    processor = None
    if isinstance(info, ImageInfo):
        processor = image_processor(info, to_dict(recipe.data))
    with written(out) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            save_tokenizer(folder, tokenizer, run.model)
        if processor is not None:
            save_json(folder / "preprocessor_config.json", processor)
        save_text(folder / RECIPE, dump_recipe(public(recipe)))
        save_text(folder / "README.md", card(run, public(recipe), auto))
    return f"{type(model).__name__}, {recipe.model.mixer}, {count_parameters(model):,} parameters"


def image_processor(info: ImageInfo, data: dict[str, Any]) -> dict[str, Any]:
    """Return the image processor that prepares images as in the evaluation of a run with the `data` settings.

    Raises:
        ConfigError: There is none, because the images are cropped, and not square.
    """
    scaled = scaling(info, data)
    if "cover" in scaled:
        raise ConfigError(
            f"--format hub: transformers has no image processor that crops to {' x '.join(map(str, info.size))} px; "
            "--format pt2, onnx and aoti describe the crop"
        )
    kind = {"image_processor_type": "ViTImageProcessor"}
    if "crop_size" in scaled:
        kind = {"image_processor_type": "BitImageProcessor", "do_center_crop": True}
    return {
        **kind,
        **scaled,
        "do_normalize": True,
        "image_mean": list(info.mean),
        "image_std": list(info.std),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_convert_rgb": info.channels == 3,
        "do_resize": True,
        "resample": BICUBIC,
    }


def public(recipe: Recipe) -> Recipe:
    """Return a recipe without the places of its files on this machine: of a path, only the name remains."""

    def short(section: Any) -> Any:
        return replace(section, **{f.name: name_of(getattr(section, f.name)) for f in fields(section)})

    return replace(
        recipe,
        task=short(recipe.task),
        data=short(recipe.data),
        run=replace(recipe.run, root="runs"),
        init_from=name_of(recipe.init_from),
    )


def name_of(value: Any) -> Any:
    """Return the name of an absolute path; any other value unchanged."""
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value
