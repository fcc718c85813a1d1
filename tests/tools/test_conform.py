"""Tests of `conform`: our layers pass every check, layers with one fault fail in the check of that name alone."""

import itertools
import re

import pytest
from torch import nn

from lion.files import read_json
from lion.layers.mixers import MIXERS, LionAttention
from tests.helpers import ROOT, column, here, printed, refuse
from tests.tools.conform_layers import FAULTS, Attention, BorderLeak, CompileFault, FirstRow, Streaming
from tools.conform.subject import Subject, adapt_mixer, adapt_plain
from tools.conform.suite import ABSENT, CHECKS, COMPILE, FAILS, HOLDS, examine
from tools.conform.target import open_subject, parse_init

LAYERS = "tests/tools/conform_layers.py"
EAGER = [name for name in CHECKS if name != COMPILE]
CAUSAL = {"causal in evaluation", "causal in training"}
STREAMS = "steps equal whole"
DIRECTIONS = ("both", "forward", "backward")
PUBLISHED = [name for name, entry in MIXERS.items() if entry.layer.info(name).block != "-"]
PLAIN = [name for name in MIXERS if name not in PUBLISHED]
CASES = [
    *zip(PUBLISHED, itertools.repeat("forward"), itertools.repeat(",block=published")),
    *zip(PLAIN, itertools.cycle(DIRECTIONS), itertools.repeat("")),
    *zip(PUBLISHED[::3], itertools.cycle(("both", "backward")), itertools.repeat("")),
]
SOME_CASES = [case if i % 3 == 2 else pytest.param(*case, marks=pytest.mark.every) for i, case in enumerate(CASES)]


def failures(subject, names=EAGER):
    return {result.name for result in examine(subject, names) if result.status == FAILS}


def causal(kind):
    return Subject(kind.__name__, kind(), adapt_plain, 8, causal=True)


def mixer(name, direction, more=""):
    kind = MIXERS[name].layer
    init = f"dim=16,num_heads=2,mixer={name},direction={direction}{more}"
    return open_subject(f"lion.layers.mixers:{kind.__name__}", init, causal=direction == "forward")


@pytest.mark.slow
@pytest.mark.parametrize("name, direction, more", SOME_CASES, ids=str)
def test_our_mixers_pass(name, direction, more):
    results = examine(mixer(name, direction, more), EAGER)
    assert not [(r.name, r.detail) for r in results if r.status == FAILS]
    absent = {r.name: r.detail for r in results if r.status == ABSENT}
    expected = set() if direction == "forward" else CAUSAL.copy()
    if direction != "forward" and name != "none":  # without a mixer, each direction streams
        expected.add(STREAMS)
    if "chunk" not in MIXERS[name].layer.forms:
        expected.add("chunk sizes")
    assert absent.keys() == expected
    reason = "streams in one direction only: --init direction=forward"
    assert absent.get(STREAMS, reason) == reason


@pytest.mark.parametrize("kind", [Attention, Streaming, *FAULTS], ids=lambda kind: kind.__name__)
def test_a_fault_is_found_by_the_check_of_its_name(kind):
    assert failures(causal(kind)) == {FAULTS.get(kind)} - {None, COMPILE}


def test_faults_beyond_the_first_chunk_and_row_are_found():
    masks = {"padding", "packed documents"}
    assert failures(causal(BorderLeak)) == CAUSAL | masks
    assert failures(causal(FirstRow)) == masks


@pytest.mark.compiled
def test_a_fault_of_the_compiled_layer_is_found():
    (right,) = examine(causal(Attention), [COMPILE])
    assert right.status == HOLDS and right.worst.limit == 1e-4, right
    (wrong,) = examine(causal(CompileFault), [COMPILE])
    assert wrong.status == FAILS and 0.005 < wrong.worst.value < 0.02


@pytest.mark.every
@pytest.mark.compiled
def test_our_mixers_compile():
    (result,) = examine(mixer("lion_s", "forward"), [COMPILE])
    assert result.status == HOLDS, result


def test_dropout_in_training_does_not_count_as_a_leak():
    layer = LionAttention(16, 2, "lion_s", direction="forward", score_dropout=0.5)
    assert all(r.status == HOLDS for r in examine(Subject("", layer, adapt_mixer, 16, causal=True), CAUSAL))


def test_batch_norm_shows_the_future_in_training_alone():
    layer = LionAttention(16, 2, "lion_s", direction="forward", out_norm="batchnorm")
    assert failures(Subject("", layer, adapt_mixer, 16, causal=True)) == {"causal in training"}


def test_counts_are_printed_with_what_they_count(capsys):
    for kind, line in (
        ("DeadFault", "a parameter gets no gradient and cannot be trained: parameters: 1 (unused)"),
        ("WriteFault", r"the layer writes to its inputs: changed numbers: \d+ (x, in a call with valid)"),
        ("LengthFault", r"not finite: numbers that are not finite: \d+ (length 33)"),
    ):
        assert here("conform", f"{LAYERS}:{kind}", "--eager") == 1
        assert re.search(line.replace("(", r"\(").replace(")", r"\)"), capsys.readouterr().out), kind


def test_every_check_has_a_layer_that_fails_in_it():
    assert sorted(FAULTS.values()) == sorted(CHECKS)


def test_table_json_and_exit_code(tmp_path, capsys):
    file = tmp_path / "results.json"
    call = ("conform", f"{LAYERS}:PaddingLeak", "--init", "dim=12", "--causal", "--eager", "--json", file)
    assert here(*call) == 1
    out = capsys.readouterr().out
    assert re.search(r"^padding +fails +0\.\d+ +0\.0001 +padding \w+", out, re.M)
    assert re.search(r"^padding fails: padding changes the outputs of valid .*: largest difference \d+ % \(", out, re.M)
    assert re.search(r"^steps equal whole +not offered +- +- +no methods `prefill` and `step`$", out, re.M)
    assert out.endswith("\n15 hold, 1 fail, 1 not offered\n") and "width 12, 624 parameters" in out
    held = read_json(file)
    assert column(held["checks"], "name") == EAGER and held["dim"] == 12 and held["causal"]
    checks = {check["name"]: check for check in held["checks"]}
    assert checks["padding"]["result"] == "fails" and checks["padding"]["value"] > checks["padding"]["limit"]
    assert len(checks["padding"]["measures"]) == 6 and checks["steps equal whole"]["value"] is None
    assert "17 hold, 0 fail, 0 not offered" in printed(capsys, "conform", f"{LAYERS}:Streaming", "--causal", "--eager")


def test_errors_and_nan_of_a_layer_are_failures(tmp_path, capsys):
    file = tmp_path / "results.json"
    assert here("conform", f"{LAYERS}:StrideFault", "--eager", "--json", file) == 1
    out = capsys.readouterr().out
    line = "the result depends on the strides of the input: tokens and channels transposed: RuntimeError: view size is"
    assert line in out and re.search(r"^non-contiguous input +fails +- +- +raises an error$", out, re.M)
    assert here("conform", f"{LAYERS}:NanLeak", "--eager", "--json", file) == 1
    assert "reaches valid outputs or gradients: not finite (outputs, padding left)" in capsys.readouterr().out
    (check,) = (c for c in read_json(file)["checks"] if c["result"] == "fails")
    assert check["value"] is None and check["limit"] == 1e-4


@pytest.fixture
def adapter(tmp_path):
    """Write the adapter of tools/README.md to a file."""
    (code,) = re.findall(r"^```python\n(# ./run.sh con.*?)^```", (ROOT / "tools/README.md").read_text(), re.S | re.M)
    path = tmp_path / "adapter.py"
    path.write_text(code)
    return path


def test_attention_of_pytorch_passes_with_the_adapter_of_the_readme(adapter, capsys):
    call = ("conform", "torch.nn:MultiheadAttention", "--init", "embed_dim=16,num_heads=2,batch_first=true", "--eager")
    assert "12 hold, 0 fail, 5 not offered" in printed(capsys, *call, "--adapter", adapter)
    layer = "\n\ndef layer():\n    return torch.nn.MultiheadAttention(16, 2, batch_first=True)\n"
    adapter.write_text(adapter.read_text() + layer)
    assert open_subject(f"{adapter}:layer").fresh().offers == {"valid"}  # the adapter is in the file of the layer
    adapter.write_text(re.sub(r".*masked_fill.*\n", "", adapter.read_text()))
    assert here(*call, "--adapter", adapter) == 1  # a weight of zero times NaN is NaN
    assert "nan in padding fails" in capsys.readouterr().out


BAD = {  # words of the command line, expected message
    "lion": "lion: expected MODULE:CLASS or FILE.py:CLASS",
    "tortch:Layer": "no module 'tortch', did you mean 'torch'?",
    "lion.layers.mixer:X": "no module 'lion.layers.mixer', did you mean 'mixers'?",
    "lion.layer.mixers:X": "no module 'lion.layer', did you mean 'layers'?",
    "lion:LionAttentio": "lion has no LionAttentio, did you mean 'LionAttention'?",
    "collections:OrderedDict": "OrderedDict is not a class of torch.nn.Module, no layer there",
    "json:dumps --init obj=3": "json:dumps: returned str, expected a torch.nn.Module",
    "lion:LionAttention --init dim=16": "--init: lion:LionAttention needs num_heads=..",
    "lion:LionAttention --init dim=16,num_heads=3": "raises ValueError: dim: expected a multiple of",
    "torch.nn:Linear --init in_features=4,out_feature=4": "did you mean 'out_features'?",
    "torch.nn:Linear --init in_features=4,out_features=8": "no width works; tokens (1, 8, 4) TypeError",
    "torch:add": "add is not a class of torch.nn.Module",
    "torch.nn:Linear --init in_features": "--init: expected NAME=VALUE,..",
    "torch.nn:Linear --init in_features=[4": "--init: in_features",
    "torch.nn:GRU --init input_size=8,hidden_size=8": "returned tuple, expected a tensor (B, L, D)",
    f"{LAYERS}:Atention": "has no Atention, did you mean 'Attention'?",
    f"{LAYERS[:-3]}x.py:Attention": f"no such file, did you mean '{LAYERS}'?",
    f"{LAYERS}:Attention --adapter none.py": "--adapter: none.py: no such file",
    f"{LAYERS}:Attention --adapter {LAYERS}": f"--adapter: {LAYERS} defines no function or class `adapt`",
    f"{LAYERS}:Attention --dim 9": "forward fails with tokens (1, 8, 9) RuntimeError",
    f"{LAYERS}:Attention --json none/x.json": "--json: no folder none",
    f"{LAYERS}:Attention --json tests": "--json: tests is a folder",
    f"{LAYERS}:Attention --casual": "unknown option --casual: did you mean '--causal'?",
}


@pytest.mark.parametrize("words, message", BAD.items())
def test_bad_input_is_one_line(words, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert message in refuse(capsys, "conform", *words.split())


def test_a_file_that_fails_is_bad_input(tmp_path, capsys):
    for code, message in (("1 / 0", "ZeroDivisionError"), ("x = (", "SyntaxError"), ("import nonesuch", "nonesuch")):
        path = tmp_path / f"{message}.py"
        path.write_text(code)
        assert message in refuse(capsys, "conform", f"{path}:Layer")


def test_arguments_of_constructors():
    values = parse_init("dim=64,sizes=[1, 2],name=gla,rate=1e-3, flag=true,none=null")
    assert values == dict(dim=64, sizes=[1, 2], name="gla", rate=1e-3, flag=True, none=None)


def test_parameters_of_the_layer_are_not_at_their_start():
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.weight)
    subject = Subject("", layer, adapt_plain, 4)
    assert 0 < subject.layer.weight.abs().max() < 0.1 and failures(subject) == set()


def test_defaults_of_the_constructor_are_widths(tmp_path, capsys):
    layer = "import torch\nclass L(torch.nn.Module):\n    def __init__(self, dim=32):\n        super().__init__()\n"
    layer += "        self.table = torch.nn.Parameter(torch.zeros(64, 64))\n    def forward(self, x):\n"
    (tmp_path / "fits.py").write_text(f"{layer}        return x @ self.table[: x.shape[2], :32]\n")
    assert open_subject(f"{tmp_path / 'fits.py'}:L").dim == 32
    (tmp_path / "fails.py").write_text(f"{layer}        return self.table @ x\n")
    line = refuse(capsys, "conform", f"{tmp_path / 'fails.py'}:L")
    assert "no width works; tokens (1, 8, 32) RuntimeError" in line
