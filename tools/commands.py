"""Table of commands. It needs the standard library alone, because help is printed before anything is installed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

IN_A_CLONE = (Path(__file__).parents[1] / "run.sh").is_file()


class Command(NamedTuple):
    """A command of run.sh.

    Attributes:
        synopsis: The arguments after the name of the command, as the usage line prints them.
        help: One line of help.
        where: Place of the code, as `module` or `module:function`.
    """

    synopsis: str
    help: str
    where: str


COMMANDS = {
    "train": Command("RECIPE [key=value ...]", "train a recipe, then evaluate it in every form", "tools.train"),
    "prepare": Command("RECIPE [key=value ...]", "prepare a recipe's data, once for all runs", "tools.prepare"),
    "eval": Command(
        "RUN [--form full|chunk|rnn|all] [--chunk-size N,N] [--lengths N,N] [--choices FILE]",
        "evaluate a run in every form: metric, speed, memory",
        "tools.evaluate",
    ),
    "list": Command(
        "[PATTERN ...] [--mixers]", "list the recipes and the results they aim at; the mixers", "tools.listing"
    ),
    "show": Command(
        "RECIPE [key=value ...]", "show what a recipe costs on this machine, and all its settings", "tools.show"
    ),
    "predict": Command(
        "RUN FILE|FOLDER|SENTENCE ... [--out FILE.csv]",
        "predict classes of files or sentences, or masked tokens",
        "tools.predict",
    ),
    "generate": Command(
        "RUN --prompt TEXT [--mode attention|kv|rnn] [--state FILE]",
        "generate text from prompts with a causal language model",
        "tools.generate",
    ),
    "sample": Command(
        "RUN [--classes 0,1,cat] [--steps N] [--guidance G] [--out FILE.png]",
        "generate images with a diffusion model",
        "tools.sample",
    ),
    "distance": Command(
        "RUN|FOLDER|FILE.npz --features CLASSIFIER_RUN",
        "compare generated images with real ones: FD-own, IS-own, precision, recall",
        "tools.distance",
    ),
    "glue": Command(
        "RUN --recipe bert24|m2_base|m2_large|hydra|modified|cramming|lightnet [--dry-run]",
        "fine-tune a masked language model on GLUE",
        "tools.glue",
    ),
    "bench ops": Command("", "time the operators against SDPA", "tools.bench.ops"),
    "bench train": Command("RECIPE ...", "time whole training steps against softmax attention", "tools.bench.train"),
    "bench inference": Command(
        "RUN|RECIPE", "measure latency and memory by form and input size", "tools.bench.inference"
    ),
    "bench generate": Command("RUN ...", "measure latency per token and memory by text length", "tools.bench.generate"),
    "bench gpu": Command(
        "[MIXER|RECIPE ...] [--clock]",
        "estimate kernels, memory traffic and time on a GPU, without a GPU; --clock: time operators on this GPU",
        "tools.bench.gpu",
    ),
    "convert": Command(
        "CHECKPOINT RECIPE OUT",
        "convert a checkpoint of transformers, nanoGPT, DeiT, timm, .. to a run",
        "tools.convert",
    ),
    "export": Command(
        "RUN OUT [--format hub|run|pt2|onnx|aoti] [--length N] [--step]",
        "export a run for transformers, torch.export, ONNX Runtime or C++ (AOTInductor), or a small run",
        "tools.export",
    ),
    "report": Command("RUN ...", "compare runs with the paper's numbers, in tables and curves", "tools.report"),
    "paper": Command("[--table NAME ...]", "run the papers' tables, with verdicts on their claims", "tools.paper"),
    "consolidate": Command("RUN", "turn a sharded checkpoint into one file", "tools.consolidate"),
    "conform": Command(
        "MODULE:CLASS|FILE.py:CLASS [--causal] [--init dim=64,..] [--adapter FILE.py]",
        "check any (B, L, D) layer: padding, packing, causality, streams, precision, gradients",
        "tools.conform",
    ),
    "logs": Command("[TensorBoard's options]", "show the curves of runs/ in TensorBoard", "tools.external:logs"),
    "test": Command(
        "[--quick|--every] [pytest's options]",
        "run the test suite on all cores; --quick: a part of it, in a minute; --every: all cases",
        "tools.external:test",
    ),
}
DEFAULT = ("train", "quickstart")  # for a line without a command, or with settings alone
HELP = ("-h", "--help", "help")
NOTES = """\
A RECIPE without a command is trained: ./run.sh quickstart optim.lr=1e-3. A recipe in recipes/ needs only its name.
Options of every command: --help, --debug (show tracebacks). Options of train: --fresh (rename the folder of an earlier
run of this name, and start anew), --no-eval (train only), --processes N. Several visible GPUs are used with torchrun;
--nodes N --head HOST:PORT --restarts N, with the same command on each, uses several machines.
Relative paths, also runs/, start at the current folder. The command `lion`, which pip installs, does the same.
Environment: LION_DATA (data root), PYTHON (interpreter for .venv), CUDA_VISIBLE_DEVICES,
             LION_NO_INSTALL=1 (use the python on PATH, and install nothing)"""


def help_for(argv: list[str]) -> str | None:
    """Return the help text if a command line asks for help on all commands or on a group of commands, else None."""
    if argv[:1] and argv[0] in HELP:
        return as_called(usage())
    if argv[1:] and argv[1] in HELP and is_group(argv[0]):
        return as_called(usage(f"{argv[0]} "))
    return None


def as_called(text: str) -> str:
    """Return a text in which commands have the name by which they are called: `lion` if no run.sh is beside them."""
    if IN_A_CLONE:
        return text
    return text.replace("./run.sh", "lion").replace("run.sh ", "lion ")


def usage(group: str = "") -> str:
    """Return the usage text of all commands, or of a group such as "bench "."""
    calls = {}
    if not group:
        calls["./run.sh"] = " ".join(DEFAULT)
    for name, command in COMMANDS.items():
        if name.startswith(group):
            calls[f"./run.sh {name} {command.synopsis}".rstrip()] = command.help
    width = max(map(len, calls))
    lines = ["usage:"]
    for call, text in calls.items():
        lines.append(f"  {call.ljust(width)}  {text}")
    if not group:
        lines += ["", NOTES]
    return "\n".join(lines)


def parse_command(argv: list[str]) -> tuple[str, list[str]]:
    """Return (name, arguments) of the command that a line calls; the name may be missing from the table."""
    first = ""
    if argv:
        first = argv[0]
    if not first or "=" in first or first.startswith("-"):
        return DEFAULT[0], [*DEFAULT[1:], *argv]
    if "/" in first or first.endswith((".yaml", ".yml")):
        return "train", argv
    words = 1
    if is_group(first):
        words = 2
    return " ".join(argv[:words]), argv[words:]


def is_group(word: str) -> bool:
    """Return whether `word` is the first of two words that name a command, such as "bench"."""
    return any(name.startswith(f"{word} ") for name in COMMANDS)
