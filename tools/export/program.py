"""A run as one program: preprocessing and model in a graph of `torch.export`, with a description of both.

A program takes uint8 pixels, or token ids with a mask of padding, in batches of any size. It contains the normalisation
of pixels, but no scaling of images. Linear mixers run in chunks, and then one graph serves all lengths up to `CHUNKS`
chunks. The loops of delta rules, of Vim and of MD-TPE on text are unrolled, so that their programs have one length, as
have those of models with windows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import lion
from lion.config import ConfigError, to_dict
from lion.layers.mixers import forms_of, mixers_of, set_form
from lion.layers.tpe import TPE
from lion.ops.chunk import GROUP
from lion.runs import LoadedRun, count_parameters
from lion.samples.text import TextInfo
from tools.compose import open_tokenizer_of, resolve_run
from tools.export.ports import BATCH, LENGTH, PORTS, SEEN, Port, facts_of
from tools.export.transformers import dressed

CHUNK = 64  # fewest tokens of a chunk
CHUNKS = 2 * GROUP - 1  # chunks of the longest input: a graph with a symbolic length adds one chunk of padding
LONGEST = CHUNK * CHUNKS - 1  # tokens of the longest input, by default
METADATA, TOKENIZER = "metadata.json", "tokenizer.json"  # names of the texts in a program


class Pixels(nn.Module):
    """A model of uint8 pixels, of which it may predict the `hidden` ones, with outputs in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, hidden: Tensor | None = None) -> Tensor:
        if hidden is None:
            return self.model(pixels).float()
        return self.model(pixels, None, hidden).float()


class Tokens(Pixels):
    """A model of token ids, a mask that is False for padding, and types or hidden ids if the model has any."""

    def forward(self, tokens: Tensor, mask: Tensor, more: Tensor | None = None) -> Tensor:
        if more is None:
            return self.model(tokens, mask).float()
        return self.model(tokens, mask, more).float()


class Noise(Pixels):
    """A model that predicts the noise in images at diffusion times, with float32 outputs."""

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return self.model(images, times, labels).float()


MODULES: dict[str, type[nn.Module]] = {"images": Noise, "pixels": Pixels, "tokens": Tokens}  # by the first input


@dataclass(frozen=True)
class Program:
    """A program and its description.

    Attributes:
        module: Module with the positional arguments `inputs`.
        inputs, outputs: Inputs and outputs, in order.
        longest: Tokens of the longest text; None if there is no limit.
        files: Texts inside the program, by name: its description, and its tokenizer if it reads text.
    """

    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    longest: int | None
    files: dict[str, str]

    def example(self, batch: int = 3, length: int = 100, seen: int = 7) -> tuple[Tensor, ...]:
        """Return random inputs, with fewer tokens if `length` exceeds `longest`; a step comes after `seen` tokens.

        The default sizes are those with which a graph is traced.
        """
        if self.longest is not None:
            length = min(length, self.longest)
        sizes = {BATCH: batch, LENGTH: length, SEEN: seen}
        return tuple(port.example(sizes) for port in self.inputs)

    def varying(self) -> tuple[Any, ...]:
        """Return the dimensions of each argument of the module that may vary."""
        found = []
        for port in self.inputs:
            named = [place for place, size in enumerate(port.shape) if isinstance(size, str)]
            found.append(dict.fromkeys(named, Dim.DYNAMIC))
        return tuple(found)

    @torch.no_grad()
    def graph(self) -> ExportedProgram:
        """Trace the module."""
        return torch.export.export(self.module, self.example(), dynamic_shapes=self.varying(), strict=False)

    @torch.no_grad()
    def deviation(self, run: Callable[..., Tensor]) -> float:
        """Return the largest difference between outputs of `run`, the loaded program, and of the model in form "auto".

        The inputs have other sizes than those of the trace.
        """
        set_form(self.module, "auto")
        found = []
        for batch, length in ((1, 1), (2, 300)):
            inputs = self.example(batch, length)
            apart = (run(*inputs) - self.module(*inputs)).abs()
            for port, mask in zip(self.inputs, inputs):
                if port.name == "mask" and apart.dim() == 3:
                    apart = apart[mask]  # the outputs at padding have no meaning
            found.append(apart.max())
        return torch.stack(found).max().item()  # NaN, if there is one


def make_program(run: LoadedRun, overrides: Sequence[str], length: int | None) -> Program:
    """Return the program of a run, and set the form of its model.

    Args:
        run: The run.
        overrides: Places of the data of the run, for its tokenizer.
        length: Tokens that the longest input has at least; None: as many as position embeddings allow, or `LONGEST`. A
            program of one length has `length` tokens, by default as many as the samples in training.

    Raises:
        ConfigError: There is no program for the task, or the model does not take the length.
    """
    task, model = run.recipe.task.name, run.model
    if task not in PORTS:
        raise ConfigError(f"{run.folder}: task {task!r} cannot be exported as a program, only {', '.join(PORTS)}")
    inputs, output = PORTS[task](run)
    longest = None
    if any(LENGTH in port.shape for port in inputs):
        longest = longest_input(run, length)
        if has_one_length(model):
            inputs = tuple(with_length(port, longest) for port in inputs)
            output = with_length(output, longest)
        elif "chunk" in forms_of(model):
            size = max(CHUNK, -(-(longest + 1) // CHUNKS))
            set_form(model, "chunk", size)
            if model.longest is None:
                longest = size * CHUNKS - 1
    elif length is not None:
        raise ConfigError(f"--length: {run.folder}: its inputs have one size")
    files = files_of(run, overrides, inputs, (output,), longest)
    return Program(MODULES[inputs[0].name](model).eval(), inputs, (output,), longest, files)


def longest_input(run: LoadedRun, length: int | None) -> int | None:
    """Return the number of tokens of the longest input; None if there is no limit."""
    limit, size = run.model.longest, run.task.info.sample_size
    if length is not None and limit is not None and length > limit:
        raise ConfigError(f"--length: {run.folder}: its model has {limit} position embeddings, got {length}")
    if length is not None:
        return length
    if has_one_length(run.model):
        if limit is None:
            return size
        return min(size, limit)
    if limit is None and "chunk" in forms_of(run.model):
        return max(size, LONGEST)
    return limit


def has_one_length(model: nn.Module) -> bool:
    """Return whether a graph of the model has one length: it unrolls a loop over tokens, or cuts rows into windows."""
    if getattr(model.config, "window", None) is not None:
        return True
    if any(mixer.unrolled for mixer in mixers_of(model)):
        return True
    return any(isinstance(module, TPE) for module in model.modules())


def with_length(port: Port, length: int) -> Port:
    sizes = {LENGTH: length}
    return replace(port, shape=tuple(sizes.get(size, size) for size in port.shape))


def files_of(
    run: LoadedRun, overrides: Sequence[str], inputs: Sequence[Port], outputs: Sequence[Port], longest: int | None
) -> dict[str, str]:
    """Return the texts inside a program: its description, and the tokenizer of a run on text.

    In the description, `data` holds class names, and special tokens by name; `alphas_cumprod` describes the diffusion,
    and `prepare` how a picture becomes pixels of the size of the input.
    """
    about = {
        "lion": lion.__version__,
        "run": run.folder.resolve().name,
        "task": run.recipe.task.name,
        "model": run.recipe.model.name,
        "mixer": run.recipe.model.mixer,
        "step": run.checkpoint["step"],
        "parameters": count_parameters(run.model),
        "inputs": [port.described() for port in inputs],
        "outputs": [port.described() for port in outputs],
        "longest": longest,
    }
    about |= facts_of(run, to_dict(resolve_run(run.folder, overrides).data))
    files = {METADATA: json.dumps(about, indent=2)}
    if isinstance(run.task.info, TextInfo):
        files[TOKENIZER] = dressed(open_tokenizer_of(run, overrides), run.model)[0].to_str()
    return files
