"""Time the operators, compiled, forward and backward, as ratios to PyTorch's SDPA in the same run.

    python -m tools.bench ops [--length 197 1024 4096] [--form full chunk] [--mixer lit d s vector]

Each form is verified against the definition first. Runs are interleaved, compilation and warm-up excluded;
a ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.config import ConfigError
from lion.ops import linear_attention, reference_attention
from lion.trainer.runtime import missing_compiler
from tools.common import Parser, count, run_command, table

TOKENS = 16 * 197  # about as many tokens at every length
MIXERS = ("lit", "d", "s", "vector")  # the last: a lambda a key dimension


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh bench", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("ops",))
    parser.add_argument("--length", type=count, nargs="+", default=[197, 1024, 4096])
    parser.add_argument("--form", nargs="+", choices=("full", "chunk"), default=["full", "chunk"])
    parser.add_argument("--mixer", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--heads", type=count, default=6)
    parser.add_argument("--dim", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=9)
    args = parser.parse_args(argv)
    if missing_compiler():
        raise ConfigError(f"bench: {missing_compiler()}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for length in args.length:
        shape = (max(1, TOKENS // length), args.heads, length, args.dim)
        rows += time_length(shape, args.mixer, args.form, args.rounds, device)
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, float32, forward + backward")
    print(table(["(B, H, L, D)", "what", "ms", "x SDPA", "worst deviation"], rows))
    return 0


def time_length(
    shape: tuple, mixers: list[str], forms: list[str], rounds: int, device: torch.device
) -> list[list[str]]:
    torch._dynamo.reset()  # variants of one length fit the compile cache, those of all lengths do not
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(shape, device=device) for _ in range(4))
    inputs = [q.softmax(-1).requires_grad_(), k.softmax(-1).requires_grad_(), v.requires_grad_()]
    decays = {
        "lit": None,
        "d": F.logsigmoid(torch.randn(shape[1], device=device)).requires_grad_(),
        "s": F.logsigmoid(torch.randn(shape[:3], device=device)).requires_grad_(),
        "vector": F.logsigmoid(torch.randn(shape, device=device)).requires_grad_(),
    }
    runs = {"sdpa": step(F.scaled_dot_product_attention, inputs, grad)}
    deviations = {"sdpa": "-"}
    for mixer in mixers:
        for form in forms:
            name = f"{label(mixer)} {form}"
            deviations[name] = f"{verify(mixer, form):.0e}"
            runs[name] = compiled_step(form, inputs, decays[mixer], grad)
    for run in runs.values():
        run()
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, device))
    ratios = {name: statistics.median(t / s for t, s in zip(ts, times["sdpa"])) for name, ts in times.items()}
    return [
        [str(shape), name, f"{1e3 * statistics.median(ts):.1f}", f"{ratios[name]:.2f}", deviations[name]]
        for name, ts in times.items()
    ]


def label(mixer: str) -> str:
    return "vector decay" if mixer == "vector" else f"lion_{mixer}"


def compiled_step(form: str, inputs: list[Tensor], log_decay: Tensor | None, grad: Tensor) -> Callable[[], None]:
    extra = [] if log_decay is None else [log_decay]
    run = torch.compile(lambda q, k, v, *a: linear_attention(q, k, v, *a, form=form), fullgraph=True, dynamic=False)
    once = step(run, [*inputs, *extra], grad)
    for _ in range(3):
        once()
    return once


def step(fn: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Callable[[], None]:
    def once() -> None:
        for x in inputs:
            x.grad = None
        fn(*inputs).backward(grad)

    return once


def seconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def verify(mixer: str, form: str, length: int = 130) -> float:
    """Largest error of a form over the largest value, against the definition in float64."""
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, 2, length, 16, dtype=torch.float64) for _ in range(3))
    decays = {"lit": None, "d": torch.randn(2), "s": torch.randn(1, 2, length), "vector": torch.randn(1, 2, length, 16)}
    log_decay = None if decays[mixer] is None else F.logsigmoid(decays[mixer].double())
    expected = reference_attention(q, k, v, log_decay)
    got = linear_attention(*(x.float() for x in (q, k, v)), None if log_decay is None else log_decay.float(), form=form)
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    if not error < 2e-5:
        raise ConfigError(f"bench: {label(mixer)} in form {form} is off by {error:.1e}: not timed")
    return error


if __name__ == "__main__":
    run_command(main)
