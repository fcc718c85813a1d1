"""Options of all commands. A command line is read here first, before PyTorch is loaded, which takes seconds."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lion.config import ConfigError
from tools.bench import OUT
from tools.cli import Parser, count, counts, file_name, number
from tools.commands import COMMANDS

# Names of tables of other modules, which import PyTorch; a test compares them.
FORMS = ("full", "chunk", "rnn")
EVERY_FORM = (*FORMS, "all")
INFERENCE_FORMS = ("full", "blockwise", "chunk", "rnn")
GPU_FORMS = ("full", "chunk")
GPUS = ("h100", "h200", "a100", "l40s", "rtx4090")
MODES = ("attention", "kv", "rnn")  # of generation
FORMATS = ("hub", "run", "pt2", "onnx", "aoti")  # of exports
GLUE_TASKS = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb")
MATMUL = ("highest", "high", "medium")
DTYPES = ("float32", "bfloat16", "float16")
SCALES = ("mini", "published")  # of the runs of a paper's table
CHECKPOINTS = ("best", "last")
HELD_OUT_TOKENS = 2**18  # of `eval --lengths`
COMPILED_FROM = 500  # samples to predict; compilation takes as long as a few hundred images of a small model
FEW = 10  # classes of `sample` without --classes
FIGURES = "distance.json"
GENERATED_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


class Options(NamedTuple):
    """The options of a command: a function that adds them to a parser, and one that checks them together."""

    add: Callable[[Parser], None]
    check: Callable[[Namespace], None] | None = None


def read(command: str, argv: list[str]) -> Namespace:
    """Read the command line of a command in `OPTIONS`.

    Raises:
        ConfigError: Options that are unknown, missing, out of range, or do not go together.
    """
    options = OPTIONS[command]
    prog = "run.sh"
    if command != "train":
        prog = f"run.sh {command}"
    text = COMMANDS[command].help
    parser = Parser(prog=prog, description=f"{text[0].upper()}{text[1:]}.")
    options.add(parser)
    parser.check_options(argv)
    args = parser.parse_intermixed_args(argv)
    if options.check is not None:
        options.check(args)
    return args


def add_recipe(parser: Parser) -> None:
    parser.add_argument("recipe")
    parser.several("overrides", "key=value")


def add_run(parser: Parser) -> None:
    parser.add_argument("run")
    parser.several("overrides", "data.root=PATH", "where the data are now")


def add_checkpoint(parser: Parser) -> None:
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="best")


def add_rounds(parser: Parser, *, rounds: int, seconds: int, of: str) -> None:
    """Add the options of a measurement in rounds."""
    parser.count("--rounds", default=rounds)
    parser.count("--seconds", f"time limit for the rounds of {of}", default=seconds)
    parser.count("--threads")
    parser.flag("--eager", "without torch.compile")


def add_results(parser: Parser) -> None:
    """Add the options of stored results."""
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the results (default: {OUT})")
    parser.flag("--fresh", "discard earlier results")


def refuse(args: Namespace, names: Sequence[str], why: str) -> None:
    """Raise a ConfigError if one of these options is given."""
    for name in names:
        if getattr(args, name):
            raise ConfigError(f"--{name}: {why}")


def read_mesh(text: str) -> tuple[int, int]:
    """Parse the value of an option as a mesh, such as 8x4."""
    data, x, sequence = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"expected DATAxSEQUENCE such as 8x4, got {text!r}")
    return count(data), count(sequence)


def names(text: str) -> list[str]:
    """Parse the value of an option as names separated by commas."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected tasks separated by commas, got {text!r}")
    return list(dict.fromkeys(found))


def train(parser: Parser) -> None:
    add_recipe(parser)
    parser.flag("--fresh", "rename the folder of an earlier run of this name, and start anew")
    parser.flag("--no-eval", "train without the final evaluation; the same command without this option evaluates later")
    parser.add_argument("--form", choices=EVERY_FORM, default="all", help="form of the final evaluation (default: all)")
    parser.count("--processes", "processes on this machine (default: as many visible GPUs as divide the batch)")
    parser.count("--nodes", "machines, each of which gets the same command", default=1)
    parser.add_argument("--head", metavar="HOST:PORT", help="one of these machines, and a free port of it")
    parser.count("--restarts", "restarts after a process or a machine has died", default=0)
    parser.flag("--eager", "train without torch.compile; same as trainer.compile=false")


def prepare(parser: Parser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--check-labels",
        type=count,
        metavar="STEPS",
        help="train a small network for STEPS steps on each half of the images, to see if the labels can be learned",
    )


def check_evaluate(args: Namespace) -> None:
    if args.chunk_size and args.form == "full":
        raise ConfigError("--chunk-size: the full form has no chunks, use --form chunk or rnn")
    for name in ("lengths", "split"):
        if args.choices and getattr(args, name):
            raise ConfigError(f"--choices: the file brings its own text, leave --{name} out")
    if not args.lengths:
        refuse(args, ("out", "tokens"), "only for --lengths")
    for name in ("choices", "lengths"):
        if args.processes > 1 and getattr(args, name):
            raise ConfigError(f"--processes: --{name} runs in one process")
    args.tokens = args.tokens or HELD_OUT_TOKENS


def evaluate(parser: Parser) -> None:
    add_run(parser)
    parser.add_argument("--form", choices=EVERY_FORM, default="all")
    parser.add_argument(
        "--chunk-size", type=counts, help="tokens per chunk (form chunk) or per step (form rnn): 16, or 1,8,16"
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--split", choices=("test", "val"), help="split of the data (default: test, or val if there is no test split)"
    )
    parser.flag("--ema", "use the averaged weights")
    parser.flag("--eager", "do not use torch.compile")
    parser.add_argument(
        "--lengths", type=counts, help="evaluate text in windows of these numbers of tokens, such as 256,512"
    )
    parser.path("--choices", "FILE.jsonl", "evaluate the multiple-choice questions of this file")
    parser.count("--tokens", f"with --lengths: most tokens of held-out text to use (default: {HELD_OUT_TOKENS})")
    parser.path("--out", "FOLDER", "with --lengths: folder for the results and a plot")
    parser.count("--processes", "processes on this machine that share the tokens of each row", default=1)


def list_recipes(parser: Parser) -> None:
    parser.several("patterns", "pattern", "parts of a name or row, in any order, or a pattern such as *lion_s*")
    parser.flag("--mixers", "list the mixers of layers instead of the recipes")


def show(parser: Parser) -> None:
    add_recipe(parser)
    parser.count("--processes", "number of processes, one per GPU (default: visible GPUs)")
    parser.add_argument(
        "--mesh",
        type=read_mesh,
        metavar="DATAxSEQUENCE",
        help="estimate memory and time on so many GPUs, such as 8x4: 8 groups, each of which shares rows among 4 GPUs",
    )


def predict(parser: Parser) -> None:
    parser.add_argument("run")
    parser.add_argument("files", nargs="+", metavar="FILE|FOLDER|SENTENCE")
    parser.add_argument("--form", choices=FORMS, help="form of the model (default: the form it has)")
    parser.flag(
        "--eager", f"do not use torch.compile, as for masked language models, and below {COMPILED_FROM} samples"
    )
    parser.path("--out", "FILE", "write all predictions to FILE.csv or FILE.json")
    parser.count("--top", "number of predictions to show, the most likely first (default: 3)", default=3)


def generate(parser: Parser) -> None:
    add_run(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="text to continue; repeat the option for several prompts in one batch",
    )
    parser.add_argument("--mode", choices=MODES, help="default: kv for softmax, rnn for linear mixers")
    parser.count("--tokens", "number of tokens to generate (default: 200)", default=200)
    parser.add_argument(
        "--temperature", type=number(0, 1000), default=1.0, help="1: default; 0: always the most likely token"
    )
    parser.count("--top-k", "draw from the K most likely tokens")
    parser.add_argument(
        "--top-p",
        type=number(0, 1),
        default=1.0,
        help="draw from the fewest tokens whose probabilities sum up to this share",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.path("--state", "FILE", "file in which the state at the end is stored, and from which to resume")
    add_checkpoint(parser)
    parser.count("--processes", "processes on this machine that read the prompts together", default=1)
    parser.flag("--eager", "do not use torch.compile")


def sample(parser: Parser) -> None:
    parser.add_argument("run")
    parser.add_argument("--classes", help=f"numbers or names, such as 0,1,cat (default: the first {FEW})")
    parser.count("--count", "images of each class (default: 8)", default=8)
    parser.count("--steps", "number of steps of DDIM (default: 50)", default=50)
    parser.add_argument(
        "--guidance",
        type=number(0, 100),
        default=1.5,
        help="0: unconditional, 1: no guidance, 1.5 (default) and more: clearer images",
    )
    parser.add_argument(
        "--eta", type=number(0, 1), default=0.0, help="share of fresh noise; 0 (default): DDIM, 1: like DDPM"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=FORMS, help="form of the model (default: the form it has)")
    parser.count("--chunk-size", "tokens per chunk (form chunk) or per step (form rnn)")
    add_checkpoint(parser)
    parser.flag("--raw", "use the weights as trained, not their average")
    parser.count("--batch", "most images per batch (default: 64)", default=64)
    parser.flag("--compile", "use torch.compile; pays off for many images")
    parser.path("--out", "FILE.png", "file to write (default: samples.png in the folder of the run)")


def distance(parser: Parser) -> None:
    parser.add_argument("samples_of", metavar="RUN|FOLDER|FILE.npz", help="images to evaluate")
    parser.several("overrides", "data.root=PATH", "where the real images are now")
    parser.add_argument("--features", metavar="RUN|FILE.pt", help="a classifier run, or a TorchScript module")
    parser.add_argument(
        "--reference",
        default="train",
        help="real images: split train (default), val or test of the data; or a folder or FILE.npz",
    )
    parser.count("--samples", "number of images to generate, or most images to read (default: 10000)", default=10_000)
    parser.count("--real", "most real images to use (default: 50000)", default=50_000)
    parser.count("--steps", "number of steps of DDIM (default: 50)", default=50)
    parser.add_argument(
        "--guidance", type=number(0, 100), default=1.0, help="guidance of the sampling; 1 (default): none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.count("--batch", "images per batch (default: 128)", default=128)
    parser.path("--keep", "FOLDER", "folder that stores generated images, for use in later calls")
    add_checkpoint(parser)
    parser.flag("--raw", "use the weights as trained, not their average")
    parser.flag("--eager", "do not use torch.compile")
    parser.path("--out", "FILE.json", f"file of the scores (default for a run: {FIGURES} in its folder)")


def glue(parser: Parser) -> None:
    parser.add_argument("run", help="a run of masked language modelling")
    parser.several("overrides", "key=value", "overrides for all tasks; data.path is the folder of GLUE")
    parser.add_argument("--recipe", required=True, help="a row of Table 8 (tools/glue/tables): bert24, m2_base, ..")
    parser.add_argument("--tasks", type=names, default=list(GLUE_TASKS), help=f"some of {','.join(GLUE_TASKS)}")
    parser.count("--seeds", "number of seeds of each task (default: as published, 1 to 5)")
    parser.flag("--no-mnli", "start rte, mrpc and stsb from RUN, not from the run of mnli")
    parser.flag("--cited", "use the values of the files that Table 8 cites, where they differ from Table 8")
    parser.count("--jobs", "runs at a time (default: one per visible GPU; without GPUs, one per two cores)")
    parser.add_argument("--name", type=file_name, help="name of the folder of these runs (default: the recipe)")
    parser.add_argument("--tokenizer", help="tokenizer of RUN, needed if the data of RUN are gone")
    parser.flag("--dry-run", "print the plan and its cost, without training")


def bench_ops(parser: Parser) -> None:
    parser.add_argument(
        "--mixer", nargs="+", metavar="NAME", help="mixers of ./run.sh list --mixers, or all (default: four of them)"
    )
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["full", "chunk", "rnn"])
    parser.add_argument("--length", type=count, nargs="+", default=[197, 1024, 4096])
    parser.add_argument("--pass", dest="passes", nargs="+", choices=("forward", "both"), default=["forward", "both"])
    parser.add_argument("--chunk-size", type=count, nargs="+", default=[64], help="tokens per chunk")
    parser.count("--heads", default=6)
    parser.count("--dim", "head dimension", default=64)
    parser.count("--tokens", "tokens per batch, at least one sequence", default=16 * 197)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="half precision as under autocast")
    add_rounds(parser, rounds=9, seconds=600, of="a length and pass")
    add_results(parser)


def bench_train(parser: Parser) -> None:
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--size", type=count, nargs="+", help="in px or tokens (default: the first recipe's)")
    parser.count("--batch", "samples per step (default: about 1,600 tokens, on a GPU 50,000)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: the recipe's on a GPU, fp32 on a CPU")
    parser.add_argument("--matmul", choices=MATMUL, default="highest", help="float32 products, see trainer.matmul")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="overrides of every recipe")
    add_rounds(parser, rounds=9, seconds=900, of="a size")
    parser.flag("--plain", "also time the same GPT in plain eager PyTorch")
    parser.add_argument("--against", metavar="RECIPE", help="a recipe of another shape, timed in the same rounds")
    add_results(parser)


def bench_inference(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN|RECIPE")
    parser.add_argument("--sizes", type=counts, help="input sizes in px or tokens, e.g. 224,384 (default: the run's)")
    parser.add_argument("--form", nargs="+", choices=INFERENCE_FORMS, default=["full", "chunk", "rnn"])
    parser.add_argument("--chunk-size", type=count, nargs="+", default=[64], help="tokens per chunk")
    parser.count("--batch", default=1)
    add_rounds(parser, rounds=9, seconds=300, of="a size")
    parser.add_argument(
        "--evaluate", type=count, metavar="N", dest="samples", help="metric on N random held-out samples"
    )
    parser.add_argument("--against", metavar="RECIPE", help="a recipe of softmax, in place of the run's own model")
    add_results(parser)


def bench_generate(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run or a recipe")
    parser.add_argument(
        "--lengths", type=counts, default=GENERATED_LENGTHS, help="tokens of the text so far, e.g. 256,1024"
    )
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", type=count, nargs="+", default=[1], help="numbers of sequences generated at once")
    add_rounds(parser, rounds=31, seconds=300, of="a batch size")
    add_results(parser)


def check_bench_gpu(args: Namespace) -> None:
    if args.clock:
        refuse(args, ("target", "compile", "against"), "belongs to estimates, leave out --clock")
    else:
        refuse(args, ("rounds", "kernels", "autotune"), "nothing is timed, add --clock")
    args.rounds = args.rounds or 9
    args.kernels = args.kernels or "graph"
    args.target = args.target or "h100"


def bench_gpu(parser: Parser) -> None:
    parser.several("names", "MIXER|RECIPE")
    parser.add_argument("--form", nargs="+", choices=GPU_FORMS, default=list(GPU_FORMS), help="forms of operators")
    parser.add_argument("--length", type=count, nargs="+", default=[197, 1024], help="tokens of operators")
    parser.add_argument("--target", choices=GPUS, help="GPU of the estimates (default: h100)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of operators")
    parser.count("--batch", "default: 4 samples of an operator, else many tokens")
    parser.count("--heads", "heads of operators", default=6)
    parser.count("--dim", "head dimension of operators", default=64)
    parser.flag("--compile", "compile all kernels to cubins for sm_80 and sm_90")
    parser.add_argument("--against", metavar="RECIPE", help="a recipe of softmax, in place of the recipes' own models")
    parser.flag("--clock", "time operators on this GPU, beside their estimates")
    parser.count("--rounds", "with --clock: rounds of a measurement (default: 9)")
    parser.add_argument("--kernels", choices=("graph", "triton"), help="with --clock: kernels of scalar decays")
    parser.flag("--autotune", "with --clock: time kernels for every matrix product, and take the fastest")
    add_results(parser)


def convert(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.several("overrides", "key=value")
    parser.flag("--ema", "use the averaged weights")


def export(parser: Parser) -> None:
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    parser.several("overrides", "data.path=PATH", "where the data are now")
    parser.add_argument("--format", choices=FORMATS, default="hub", help="default: hub")
    parser.add_argument(
        "--length", type=count, metavar="N", help="tokens that the longest input of the program has at least"
    )
    parser.flag("--step", "a step of a causal language model, from state to state")
    add_checkpoint(parser)
    parser.flag("--ema", "use the averaged weights")


def report(parser: Parser) -> None:
    parser.several("runs", "RUN")
    parser.add_argument(
        "--section", nargs="+", action="append", default=[], metavar=("TITLE", "RUN"), help="another table"
    )
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of the report")
    parser.add_argument("--name", type=file_name, help="of the report's files (default: by the task, or the first run)")
    parser.add_argument("--notes", type=Path, help="Markdown file to append to the report")
    parser.flag("--fresh", "replace an existing report of other runs")


def paper(parser: Parser) -> None:
    parser.add_argument("--table", nargs="+", default=[], metavar="NAME", help="some tables (default: all)")
    parser.add_argument("--scale", choices=SCALES, default="mini", help="small runs, or the recipes of the papers")
    parser.count(
        "--jobs",
        "runs at a time (default: one per visible GPU, which has room for ten small ones; else one per two cores)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "key=value"),
        help="other data in place of the data set NAME of the recipes",
    )
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of paper.md and paper.json")
    parser.flag("--dry-run", "print the plan and its cost, without training")
    parser.flag("--save", "with --dry-run: write the estimated hours on the page")
    parser.flag("--no-runs", "only write the page from the stored results")


def consolidate(parser: Parser) -> None:
    parser.add_argument("run")


def conform(parser: Parser) -> None:
    parser.add_argument("layer", help="MODULE:CLASS or FILE.py:CLASS; a function that returns a layer will do")
    parser.flag("--causal", "also check that no output depends on later tokens")
    parser.add_argument("--init", default="", metavar="NAME=VALUE,..", help="arguments of the constructor")
    parser.count("--dim", "width D of the tokens, where it cannot be inferred")
    parser.path("--adapter", "FILE.py", "file with `adapt(layer)`: how to call the layer")
    parser.flag("--eager", "leave out the check that compiles, the longest one")
    parser.path("--json", "FILE", "write all measured values and limits to this file")


OPTIONS = {
    "train": Options(train),
    "prepare": Options(prepare),
    "eval": Options(evaluate, check_evaluate),
    "list": Options(list_recipes),
    "show": Options(show),
    "predict": Options(predict),
    "generate": Options(generate),
    "sample": Options(sample),
    "distance": Options(distance),
    "glue": Options(glue),
    "bench ops": Options(bench_ops),
    "bench train": Options(bench_train),
    "bench inference": Options(bench_inference),
    "bench generate": Options(bench_generate),
    "bench gpu": Options(bench_gpu, check_bench_gpu),
    "convert": Options(convert),
    "export": Options(export),
    "report": Options(report),
    "paper": Options(paper),
    "consolidate": Options(consolidate),
    "conform": Options(conform),
}
