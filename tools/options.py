"""Options of all commands. A command line is read here first, before PyTorch is loaded, which takes seconds."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

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


def parser_of(command: str) -> Parser:
    """Return an empty parser of a command."""
    prog = "run.sh" if command == "train" else f"run.sh {command}"
    text = COMMANDS[command].help
    return Parser(prog=prog, description=f"{text[0].upper()}{text[1:]}.")


def add_recipe(parser: Parser) -> None:
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")


def add_run(parser: Parser) -> None:
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*", metavar="data.root=PATH", help="where the data are now")


def add_rounds(parser: Parser, *, rounds: int, seconds: int, of: str) -> None:
    """Add the options of a measurement in rounds."""
    parser.add_argument("--rounds", type=count, default=rounds)
    parser.add_argument("--seconds", type=count, default=seconds, help=f"time limit for the rounds of {of}")
    parser.add_argument("--threads", type=count)
    parser.flag("--eager", "without torch.compile")


def add_results(parser: Parser) -> None:
    """Add the options of stored results."""
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the results (default: {OUT})")
    parser.flag("--fresh", "discard earlier results")


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


def train(argv: list[str]) -> Namespace:
    parser = parser_of("train")
    add_recipe(parser)
    parser.flag("--fresh", "rename the folder of an earlier run of this name, and start anew")
    parser.flag("--no-eval", "train without the final evaluation; the same command without this option evaluates later")
    parser.add_argument("--form", choices=EVERY_FORM, default="all", help="form of the final evaluation (default: all)")
    parser.add_argument(
        "--processes", type=count, help="processes on this machine (default: as many visible GPUs as divide the batch)"
    )
    parser.add_argument("--nodes", type=count, default=1, help="machines, each of which gets the same command")
    parser.add_argument("--head", metavar="HOST:PORT", help="one of these machines, and a free port of it")
    parser.add_argument("--restarts", type=count, default=0, help="restarts after a process or a machine has died")
    parser.flag("--eager", "train without torch.compile; same as trainer.compile=false")
    return parser.parse_intermixed_args(argv)


def prepare(argv: list[str]) -> Namespace:
    parser = parser_of("prepare")
    add_recipe(parser)
    parser.add_argument(
        "--check-labels",
        type=count,
        metavar="STEPS",
        help="train a small network for STEPS steps on each half of the images, to see if the labels can be learned",
    )
    return parser.parse_intermixed_args(argv)


def evaluate(argv: list[str]) -> Namespace:
    parser = parser_of("eval")
    add_run(parser)
    parser.add_argument("--form", choices=EVERY_FORM, default="all")
    parser.add_argument(
        "--chunk-size", type=counts, help="tokens per chunk (form chunk) or per step (form rnn): 16, or 1,8,16"
    )
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="best")
    parser.add_argument(
        "--split", choices=("test", "val"), help="split of the data (default: test, or val if there is no test split)"
    )
    parser.flag("--ema", "use the averaged weights")
    parser.flag("--eager", "do not use torch.compile")
    parser.add_argument(
        "--lengths", type=counts, help="evaluate text in windows of these numbers of tokens, such as 256,512"
    )
    parser.add_argument(
        "--choices", type=Path, metavar="FILE.jsonl", help="evaluate the multiple-choice questions of this file"
    )
    parser.add_argument(
        "--tokens", type=count, help=f"with --lengths: most tokens of held-out text to use (default: {HELD_OUT_TOKENS})"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="with --lengths: folder for the results and a plot")
    parser.add_argument(
        "--processes", type=count, default=1, help="processes on this machine that share the tokens of each row"
    )
    args = parser.parse_intermixed_args(argv)
    if args.chunk_size and args.form == "full":
        raise ConfigError("--chunk-size: the full form has no chunks, use --form chunk or rnn")
    if args.choices and (args.lengths or args.split):
        other = "--lengths" if args.lengths else "--split"
        raise ConfigError(f"--choices: the file brings its own text, leave {other} out")
    for name in ("out", "tokens"):
        if getattr(args, name) and not args.lengths:
            raise ConfigError(f"--{name}: only for --lengths")
    if args.processes > 1 and (args.choices or args.lengths):
        raise ConfigError(f"--processes: {'--choices' if args.choices else '--lengths'} runs in one process")
    args.tokens = args.tokens or HELD_OUT_TOKENS
    return args


def list_recipes(argv: list[str]) -> Namespace:
    parser = parser_of("list")
    parser.add_argument(
        "patterns",
        nargs="*",
        metavar="pattern",
        help="parts of a name or row, in any order, or a pattern such as *lion_s*",
    )
    parser.flag("--mixers", "list the mixers of layers instead of the recipes")
    return parser.parse_args(argv)


def show(argv: list[str]) -> Namespace:
    parser = parser_of("show")
    add_recipe(parser)
    parser.add_argument("--processes", type=count, help="number of processes, one per GPU (default: visible GPUs)")
    parser.add_argument(
        "--mesh",
        type=read_mesh,
        metavar="DATAxSEQUENCE",
        help="estimate memory and time on so many GPUs, such as 8x4: 8 groups, each of which shares rows among 4 GPUs",
    )
    return parser.parse_intermixed_args(argv)


def predict(argv: list[str]) -> Namespace:
    parser = parser_of("predict")
    parser.add_argument("run")
    parser.add_argument("files", nargs="+", metavar="FILE|FOLDER|SENTENCE")
    parser.add_argument("--form", choices=FORMS, help="form of the model (default: the form it has)")
    parser.flag(
        "--eager", f"do not use torch.compile, as for masked language models, and below {COMPILED_FROM} samples"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all predictions to FILE.csv or FILE.json")
    parser.add_argument(
        "--top", type=count, default=3, help="number of predictions to show, the most likely first (default: 3)"
    )
    return parser.parse_intermixed_args(argv)


def generate(argv: list[str]) -> Namespace:
    parser = parser_of("generate")
    add_run(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="text to continue; repeat the option for several prompts in one batch",
    )
    parser.add_argument("--mode", choices=MODES, help="default: kv for softmax, rnn for linear mixers")
    parser.add_argument("--tokens", type=count, default=200, help="number of tokens to generate (default: 200)")
    parser.add_argument(
        "--temperature", type=number(0, 1000), default=1.0, help="1: default; 0: always the most likely token"
    )
    parser.add_argument("--top-k", type=count, help="draw from the K most likely tokens")
    parser.add_argument(
        "--top-p",
        type=number(0, 1),
        default=1.0,
        help="draw from the fewest tokens whose probabilities sum up to this share",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="file in which the state at the end is stored, and from which to resume",
    )
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="best")
    parser.add_argument(
        "--processes", type=count, default=1, help="processes on this machine that read the prompts together"
    )
    parser.flag("--eager", "do not use torch.compile")
    return parser.parse_intermixed_args(argv)


def sample(argv: list[str]) -> Namespace:
    parser = parser_of("sample")
    parser.add_argument("run")
    parser.add_argument("--classes", help=f"numbers or names, such as 0,1,cat (default: the first {FEW})")
    parser.add_argument("--count", type=count, default=8, help="images of each class (default: 8)")
    parser.add_argument("--steps", type=count, default=50, help="number of steps of DDIM (default: 50)")
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
    parser.add_argument("--chunk-size", type=count, help="tokens per chunk (form chunk) or per step (form rnn)")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="best")
    parser.flag("--raw", "use the weights as trained, not their average")
    parser.add_argument("--batch", type=count, default=64, help="most images per batch (default: 64)")
    parser.flag("--compile", "use torch.compile; pays off for many images")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.png", help="file to write (default: samples.png in the folder of the run)"
    )
    return parser.parse_args(argv)


def distance(argv: list[str]) -> Namespace:
    parser = parser_of("distance")
    parser.add_argument("samples_of", metavar="RUN|FOLDER|FILE.npz", help="images to evaluate")
    parser.add_argument("overrides", nargs="*", metavar="data.root=PATH", help="where the real images are now")
    parser.add_argument("--features", metavar="RUN|FILE.pt", help="a classifier run, or a TorchScript module")
    parser.add_argument(
        "--reference",
        default="train",
        help="real images: split train (default), val or test of the data; or a folder or FILE.npz",
    )
    parser.add_argument(
        "--samples",
        type=count,
        default=10_000,
        help="number of images to generate, or most images to read (default: 10000)",
    )
    parser.add_argument("--real", type=count, default=50_000, help="most real images to use (default: 50000)")
    parser.add_argument("--steps", type=count, default=50, help="number of steps of DDIM (default: 50)")
    parser.add_argument(
        "--guidance", type=number(0, 100), default=1.0, help="guidance of the sampling; 1 (default): none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=count, default=128, help="images per batch (default: 128)")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="folder that stores generated images, for use in later calls"
    )
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="best")
    parser.flag("--raw", "use the weights as trained, not their average")
    parser.flag("--eager", "do not use torch.compile")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help=f"file of the scores (default for a run: {FIGURES} in its folder)"
    )
    return parser.parse_intermixed_args(argv)


def glue(argv: list[str]) -> Namespace:
    parser = parser_of("glue")
    parser.add_argument("run", help="a run of masked language modelling")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides for all tasks; data.path is the folder of GLUE"
    )
    parser.add_argument("--recipe", required=True, help="a row of Table 8 (tools/glue/tables): bert24, m2_base, ..")
    parser.add_argument("--tasks", type=names, default=list(GLUE_TASKS), help=f"some of {','.join(GLUE_TASKS)}")
    parser.add_argument("--seeds", type=count, help="number of seeds of each task (default: as published, 1 to 5)")
    parser.flag("--no-mnli", "start rte, mrpc and stsb from RUN, not from the run of mnli")
    parser.flag("--cited", "use the values of the files that Table 8 cites, where they differ from Table 8")
    parser.add_argument(
        "--jobs", type=count, help="runs at a time (default: one per visible GPU; without GPUs, one per two cores)"
    )
    parser.add_argument("--name", type=file_name, help="name of the folder of these runs (default: the recipe)")
    parser.add_argument("--tokenizer", help="tokenizer of RUN, needed if the data of RUN are gone")
    parser.flag("--dry-run", "print the plan and its cost, without training")
    return parser.parse_intermixed_args(argv)


def bench_ops(argv: list[str]) -> Namespace:
    parser = parser_of("bench ops")
    parser.add_argument(
        "--mixer", nargs="+", metavar="NAME", help="mixers of ./run.sh list --mixers, or all (default: four of them)"
    )
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["full", "chunk", "rnn"])
    parser.add_argument("--length", type=count, nargs="+", default=[197, 1024, 4096])
    parser.add_argument("--pass", dest="passes", nargs="+", choices=("forward", "both"), default=["forward", "both"])
    parser.add_argument("--chunk-size", type=count, nargs="+", default=[64], help="tokens per chunk")
    parser.add_argument("--heads", type=count, default=6)
    parser.add_argument("--dim", type=count, default=64, help="head dimension")
    parser.add_argument("--tokens", type=count, default=16 * 197, help="tokens per batch, at least one sequence")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="half precision as under autocast")
    add_rounds(parser, rounds=9, seconds=600, of="a length and pass")
    add_results(parser)
    return parser.parse_args(argv)


def bench_train(argv: list[str]) -> Namespace:
    parser = parser_of("bench train")
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--size", type=count, nargs="+", help="in px or tokens (default: the first recipe's)")
    parser.add_argument("--batch", type=count, help="samples per step (default: about 1,600 tokens, on a GPU 50,000)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: the recipe's on a GPU, fp32 on a CPU")
    parser.add_argument("--matmul", choices=MATMUL, default="highest", help="float32 products, see trainer.matmul")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="overrides of every recipe")
    add_rounds(parser, rounds=9, seconds=900, of="a size")
    parser.flag("--plain", "also time the same GPT in plain eager PyTorch")
    parser.add_argument("--against", metavar="RECIPE", help="a recipe of another shape, timed in the same rounds")
    add_results(parser)
    return parser.parse_intermixed_args(argv)


def bench_inference(argv: list[str]) -> Namespace:
    parser = parser_of("bench inference")
    parser.add_argument("run", metavar="RUN|RECIPE")
    parser.add_argument("--sizes", type=counts, help="input sizes in px or tokens, e.g. 224,384 (default: the run's)")
    parser.add_argument("--form", nargs="+", choices=INFERENCE_FORMS, default=["full", "chunk", "rnn"])
    parser.add_argument("--chunk-size", type=count, nargs="+", default=[64], help="tokens per chunk")
    parser.add_argument("--batch", type=count, default=1)
    add_rounds(parser, rounds=9, seconds=300, of="a size")
    parser.add_argument(
        "--evaluate", type=count, metavar="N", dest="samples", help="metric on N random held-out samples"
    )
    parser.add_argument("--against", metavar="RECIPE", help="a recipe of softmax, in place of the run's own model")
    add_results(parser)
    return parser.parse_args(argv)


def bench_generate(argv: list[str]) -> Namespace:
    parser = parser_of("bench generate")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run or a recipe")
    parser.add_argument(
        "--lengths", type=counts, default=GENERATED_LENGTHS, help="tokens of the text so far, e.g. 256,1024"
    )
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", type=count, nargs="+", default=[1], help="numbers of sequences generated at once")
    add_rounds(parser, rounds=31, seconds=300, of="a batch size")
    add_results(parser)
    return parser.parse_intermixed_args(argv)


def bench_gpu(argv: list[str]) -> Namespace:
    parser = parser_of("bench gpu")
    parser.add_argument("names", nargs="*", metavar="MIXER|RECIPE")
    parser.add_argument("--form", nargs="+", choices=GPU_FORMS, default=list(GPU_FORMS), help="forms of operators")
    parser.add_argument("--length", type=count, nargs="+", default=[197, 1024], help="tokens of operators")
    parser.add_argument("--target", choices=GPUS, help="GPU of the estimates (default: h100)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of operators")
    parser.add_argument("--batch", type=count, help="default: 4 samples of an operator, else many tokens")
    parser.add_argument("--heads", type=count, default=6, help="heads of operators")
    parser.add_argument("--dim", type=count, default=64, help="head dimension of operators")
    parser.flag("--compile", "compile all kernels to cubins for sm_80 and sm_90")
    parser.add_argument("--against", metavar="RECIPE", help="a recipe of softmax, in place of the recipes' own models")
    parser.flag("--clock", "time operators on this GPU, beside their estimates")
    parser.add_argument("--rounds", type=count, help="with --clock: rounds of a measurement (default: 9)")
    parser.add_argument("--kernels", choices=("graph", "triton"), help="with --clock: kernels of scalar decays")
    parser.flag("--autotune", "with --clock: time kernels for every matrix product, and take the fastest")
    add_results(parser)
    args = parser.parse_args(argv)
    for name in ("rounds", "kernels", "autotune"):
        if getattr(args, name) and not args.clock:
            raise ConfigError(f"--{name}: nothing is timed, add --clock")
    for name in ("target", "compile", "against"):
        if getattr(args, name) and args.clock:
            raise ConfigError(f"--{name}: belongs to estimates, leave out --clock")
    args.rounds = args.rounds or 9
    args.kernels = args.kernels or "graph"
    args.target = args.target or "h100"
    return args


def convert(argv: list[str]) -> Namespace:
    parser = parser_of("convert")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.flag("--ema", "use the averaged weights")
    return parser.parse_intermixed_args(argv)


def export(argv: list[str]) -> Namespace:
    parser = parser_of("export")
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="data.path=PATH", help="where the data are now")
    parser.add_argument("--format", choices=FORMATS, default="hub", help="default: hub")
    parser.add_argument(
        "--length", type=count, metavar="N", help="tokens that the longest input of the program has at least"
    )
    parser.flag("--step", "a step of a causal language model, from state to state")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="best")
    parser.flag("--ema", "use the averaged weights")
    return parser.parse_intermixed_args(argv)


def report(argv: list[str]) -> Namespace:
    parser = parser_of("report")
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument(
        "--section", nargs="+", action="append", default=[], metavar=("TITLE", "RUN"), help="another table"
    )
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of the report")
    parser.add_argument("--name", type=file_name, help="of the report's files (default: by the task, or the first run)")
    parser.add_argument("--notes", type=Path, help="Markdown file to append to the report")
    parser.flag("--fresh", "replace an existing report of other runs")
    return parser.parse_intermixed_args(argv)


def paper(argv: list[str]) -> Namespace:
    parser = parser_of("paper")
    parser.add_argument("--table", nargs="+", default=[], metavar="NAME", help="some tables (default: all)")
    parser.add_argument("--scale", choices=SCALES, default="mini", help="small runs, or the recipes of the papers")
    parser.add_argument(
        "--jobs",
        type=count,
        help="runs at a time (default: one per visible GPU, which has room for ten small ones; else one per two cores)",
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
    return parser.parse_args(argv)


def consolidate(argv: list[str]) -> Namespace:
    parser = parser_of("consolidate")
    parser.add_argument("run")
    return parser.parse_args(argv)


def conform(argv: list[str]) -> Namespace:
    parser = parser_of("conform")
    parser.add_argument("layer", help="MODULE:CLASS or FILE.py:CLASS; a function that returns a layer will do")
    parser.flag("--causal", "also check that no output depends on later tokens")
    parser.add_argument("--init", default="", metavar="NAME=VALUE,..", help="arguments of the constructor")
    parser.add_argument("--dim", type=count, help="width D of the tokens, where it cannot be inferred")
    parser.add_argument(
        "--adapter", type=Path, metavar="FILE.py", help="file with `adapt(layer)`: how to call the layer"
    )
    parser.flag("--eager", "leave out the check that compiles, the longest one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measured values and limits to this file")
    return parser.parse_args(argv)


READERS: dict[str, Callable[[list[str]], Namespace]] = {  # by command
    "train": train,
    "prepare": prepare,
    "eval": evaluate,
    "list": list_recipes,
    "show": show,
    "predict": predict,
    "generate": generate,
    "sample": sample,
    "distance": distance,
    "glue": glue,
    "bench ops": bench_ops,
    "bench train": bench_train,
    "bench inference": bench_inference,
    "bench generate": bench_generate,
    "bench gpu": bench_gpu,
    "convert": convert,
    "export": export,
    "report": report,
    "paper": paper,
    "consolidate": consolidate,
    "conform": conform,
}
