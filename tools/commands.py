"""The table of commands. It needs the standard library alone: help is printed before anything is installed."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """What follows its name on the command line, one line of help, and where it is: `module` or `module:function`."""

    synopsis: str
    help: str
    where: str


COMMANDS = {
    "train": Command("RECIPE [key=value ...]", "train a recipe, then evaluate it in every form", "tools.train"),
    "prepare": Command("RECIPE [key=value ...]", "make what a recipe's data need, once for all runs", "tools.prepare"),
    "eval": Command(
        "RUN [--form full|chunk|rnn|all] [--chunk-size N] [--lengths N,N] [--choices FILE]",
        "a run in every form: metric, speed, memory",
        "tools.evaluate",
    ),
    "list": Command("", "the recipes and what they claim; the mixers", "tools.show:list_all"),
    "show": Command("RECIPE [key=value ...]", "a recipe in full; its steps, parameters, memory", "tools.show"),
    "predict": Command("RUN FILE|SENTENCE ...", "the answers of a run for files, or sentences", "tools.predict"),
    "generate": Command(
        "RUN --prompt TEXT [--mode attention|kv|rnn] [--state FILE]",
        "text that a causal run writes on from prompts",
        "tools.generate",
    ),
    "sample": Command(
        "RUN [--classes 0,1,cat] [--steps N] [--guidance G] [--out FILE.png]",
        "pictures that a run of diffusion makes of noise",
        "tools.sample",
    ),
    "distance": Command(
        "RUN|FOLDER|FILE.npz --features CLASSIFIER_RUN",
        "how far made pictures are from real ones: FD-own, IS-own, precision, recall",
        "tools.distance",
    ),
    "glue": Command(
        "RUN --recipe bert24|m2_base|m2_large|hydra|modified [--dry-run]",
        "fine-tune a masked language model on GLUE",
        "tools.glue",
    ),
    "bench ops": Command("", "time the operators against SDPA", "tools.bench.ops"),
    "bench train": Command("RECIPE ...", "time whole training steps against softmax", "tools.bench.train"),
    "bench inference": Command("RUN", "latency and memory by form and input size", "tools.bench.inference"),
    "bench generate": Command("RUN ...", "latency of a token and memory by length of the text", "tools.bench.generate"),
    "bench gpu": Command(
        "[MIXER|RECIPE ...]", "estimate a GPU's kernels, bytes and time, without one", "tools.bench.gpu"
    ),
    "bench lengths": Command("", "the README's picture, of what bench ops measured", "tools.bench.lengths"),
    "convert": Command(
        "CHECKPOINT RECIPE OUT", "make a run of a checkpoint of transformers, nanoGPT, DeiT, timm, ..", "tools.convert"
    ),
    "export": Command("RUN OUT", "make a folder of transformers of a run of BERT or GPT", "tools.convert.export"),
    "report": Command("RUN ...", "runs as tables beside the paper's numbers, with curves", "tools.report"),
    "consolidate": Command("RUN", "turn a sharded checkpoint into one file", "tools.consolidate"),
    "soak": Command("[--kills N] [key=value ...]", "kill a run again and again; nothing may be lost", "tools.soak"),
    "logs": Command("[TensorBoard's options]", "TensorBoard over runs/", "tools.programs:logs"),
    "test": Command(
        "[--quick] [pytest's options]", "the test suite; --quick: without its slow parts", "tools.programs:test"
    ),
}
DEFAULT = ("train", "recipes/quickstart.yaml")  # with no command, or with settings alone
HELP = ("-h", "--help", "help")
NOTES = """\
A RECIPE alone is trained, also by the bare name of one of ours: ./run.sh quickstart optim.lr=1e-3.
Options of every command: --help, --debug (show tracebacks); of training: --fresh (set an earlier run of this name
aside), --no-eval (train only), --processes N. Several visible GPUs are used through torchrun.
Paths are relative to this folder.
Environment: LION_DATA (data root), PYTHON (interpreter for .venv), CUDA_VISIBLE_DEVICES,
             LION_NO_INSTALL=1 (use the python on PATH as it is)"""


def help_for(argv: list[str]) -> str | None:
    """The help that a command line asks for, where it asks no command in particular."""
    if argv[:1] and argv[0] in HELP:
        return usage()
    if argv[1:] and argv[1] in HELP and grouped(argv[0]):
        return usage(f"{argv[0]} ")
    return None


def usage(group: str = "") -> str:
    """Every command with its help, or those of a group, as "bench "."""
    calls = {} if group else {"./run.sh": " ".join(DEFAULT)}
    for name, command in COMMANDS.items():
        if name.startswith(group):
            calls[f"./run.sh {name} {command.synopsis}".rstrip()] = command.help
    width = max(map(len, calls))
    lines = ["usage:", *(f"  {call.ljust(width)}  {text}" for call, text in calls.items())]
    return "\n".join(lines if group else [*lines, "", NOTES])


def called_by(argv: list[str]) -> tuple[str, list[str]]:
    """(name, arguments) of the command that a line calls; the name may be one that is not in the table."""
    first = argv[0] if argv else ""
    if not first or "=" in first or first.startswith("-"):
        return DEFAULT[0], [*DEFAULT[1:], *argv]
    if "/" in first or first.endswith((".yaml", ".yml")):
        return "train", argv
    words = 2 if grouped(first) else 1
    return " ".join(argv[:words]), argv[words:]


def grouped(word: str) -> bool:
    """Whether it is the first of two words that name a command."""
    return any(name.startswith(f"{word} ") for name in COMMANDS)
