"""Exported programs: the outputs of the run, in processes without `lion`, and errors."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import lion
from data.text.tokenizers import open_tokenizer
from data.vision import images as pictures
from lion.config import to_dict
from lion.inference.text import Sampling
from lion.runs import open_run
from lion.samples.images import ImageInfo
from lion.samples.labels import TokenLabelsInfo
from lion.samples.sequences import SequenceInfo
from lion.samples.text import LabelledTextInfo
from lion.trainer.compilation import missing_compiler
from tests.helpers import ROOT, assert_in, column, here, refuse
from tests.test_docs import blocks
from tests.tools.untrained import text_info, untrained
from tools import place
from tools.cli import one_line
from tools.compose import resolve
from tools.export import FORMATS, aoti, pt2
from tools.export.onnx import solved
from tools.export.ports import PORTS, Port, facts_of
from tools.export.program import Program, make_program

SMALL = "model.dim=16 model.depth=1 model.num_heads=2 model.init_std=0.3 trainer.compile=false".split()
TEXT = ["data.name=text", "data.tokenizer=bytes"]
BYTES = open_tokenizer("bytes")
PIXELS = SequenceInfo(10, 64, mean=0.4, std=0.3)
DIGITS = ImageInfo((8, 8), 1, tuple("abcdefghij"), (0.287,), (0.354,))
NOISE = ImageInfo((8, 8), 1, tuple("ab"), (0.5,), (0.5,))
RUNS = {  # recipe, metadata of the data, and changes of the recipe
    "images": ("quickstart", DIGITS, ["model.patch_size=2"]),
    "text": ("gpt2_tiny_lion_s", text_info(BYTES, 33), TEXT),
    "softmax": ("gpt2_tiny_softmax", text_info(BYTES, 33), TEXT),
    "delta": ("gpt2_tiny_gla", text_info(BYTES, 33), [*TEXT, "model.mixer=deltanet"]),
    "tpe": ("mlm_tiny_lion_s", text_info(BYTES, 24), [*TEXT, "model.mixer=lightnet"]),
    "pixels": ("lra_image_softmax", PIXELS, []),
    "masked": ("lra_listops_softmax_masked", SequenceInfo(2, 32, 18), []),
    "masked_pixels": ("lra_image_softmax_masked", PIXELS, []),
    "windows": ("lra_listops_softmax_window", SequenceInfo(2, 32, 50), ["model.window=8"]),
    "pairs": ("lra_listops_softmax", SequenceInfo(2, 32, 50, parts=2), ["data.name=aan"]),
    "noise": ("dit_tiny_lightnet", NOISE, ["model.patch_size=2"]),
}


def add_noise(model):
    """Change all weights: a DiT starts with zeros."""
    for value in model.state_dict().values():
        value.add_(0.02 * torch.randn_like(value))


def make(folder: Path, name: str) -> Path:
    """Write an untrained run."""
    recipe, info, changes = RUNS[name]
    recipe = resolve(recipe, [*SMALL, *changes, f"run.root={folder}", f"run.name={name}"])
    return untrained(recipe, info, add_noise)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    for name in RUNS:
        make(folder / "runs", name)
    return folder


def export(folder, name, out, *options):
    assert here("export", folder / "runs" / name, folder / out, "--format", *options) == 0


def loaded(path):
    """Return a program of torch.export and its description."""
    files = {"metadata.json": ""}
    program = torch.export.load(path, extra_files=files).module()
    return program, json.loads(files["metadata.json"])


def model_of(folder, name):
    return lion.load(folder / "runs" / name, compile=False)


def alone(folder, code):
    """Run Python in a process that cannot import this package, and return the lines that it prints."""
    code = f"import sys\nfor name in ('lion', 'data', 'tools'): sys.modules[name] = None\n{code}"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_a_process_without_lion_runs_programs_of_torch_export(folder, capsys):
    """Run the examples of the README: logits of text and images, images from noise, and text token by token."""
    for name in ("text", "images", "noise"):
        export(folder, name, f"{name}.pt2", "pt2")
    export(folder, "text", "step.pt2", "pt2", "--step")
    said = capsys.readouterr().out
    assert_in(
        said,
        "tokens (batch, length), mask (batch, length), logits (batch, length, 261), at most 4031 tokens",
        "times (batch), labels (batch), noise (batch, 1, 8, 8);",
        "tokens (batch, 1), mask (batch, 1), position (batch), blocks_0_S (batch, 2, 8, 8)",
    )
    torch.manual_seed(1)
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    rows = []
    for batch, length in ((1, 1), (2, 2), (3, 64), (2, 700)):
        ends = torch.tensor([[length], [1], [7]])[:batch]
        rows.append((torch.randint(261, (batch, length)), torch.arange(length) < ends))
    torch.save([images, rows], folder / "inputs.pt")
    reading, _, drawing, writing = blocks(ROOT / "tools/export/README.md", "python")
    ports, prepare, *_, ids = alone(
        folder,
        f"""
{reading}
images, rows = torch.load("inputs.pt")
about = {{"metadata.json": ""}}
classes = torch.export.load("images.pt2", extra_files=about).module()
print(json.dumps(json.loads(about["metadata.json"])["prepare"]))
found = [logits, classes(images), [program(*row) for row in rows]]
torch.manual_seed(3)
{drawing}
torch.save([*found, predict(x, now.expand(count), labels), x], "outputs.pt")
{writing}
print("", ids)
""",
    )
    assert column(json.loads(ports.replace("'", '"')), "name") == ["tokens", "mask"]
    whole = {"mode": "L", "size": {"height": 8, "width": 8}, "resample": "bicubic"}
    assert json.loads(prepare) == whole
    said, classes, found, noise, drawn = torch.load(folder / "outputs.pt")
    model, prompt = model_of(folder, "text"), BYTES.encode("To be, or")
    close(said, model(torch.tensor([prompt])))
    for logits, (tokens, mask) in zip(found, rows, strict=True):
        close(logits[mask], model(tokens, mask)[mask])
    close(classes, model_of(folder, "images")(images))
    (wanted,) = lion.generate(model, [prompt], 20, sampling=Sampling(temperature=0))
    assert json.loads(ids) == wanted and len(set(wanted[len(prompt) :])) > 2
    run, labels = open_run(folder / "runs/noise"), torch.arange(2)
    close(noise, run.model(drawn, torch.zeros(2, dtype=torch.int64), labels))
    assert noise.std() > 0.1
    torch.manual_seed(3)
    start = torch.randn(2, 1, 8, 8)

    def predict(x, times):
        return run.model(x, times, labels)

    wanted = run.task.process.denoise(predict, start, steps=50, bound=1.0)
    torch.testing.assert_close(drawn, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [(16, 16), (24, 16), (16, 28)])
@pytest.mark.parametrize("settings", [{}, {"crop": 0.5}, {"pad": 2}])
def test_the_description_states_how_an_image_is_scaled_and_cropped(settings, size):
    info = ImageInfo(size, 3, ("a", "b"), (0.5,) * 3, (0.5,) * 3)
    config = pictures.PictureConfig("imagefolder", **settings)
    rule = facts_of(SimpleTask(info, 0), to_dict(config))["prepare"]
    picture = Image.effect_mandelbrot((60, 40), (-2, -1, 1, 1), 50)
    wanted = pictures.test_transform(config, info)(picture)
    if "crop_size" in rule:
        if "cover" in rule:
            height, width = rule["cover"].values()
            short = int(max(height, width * 40 / 60))
        else:
            short = rule["size"]["shortest_edge"]
        picture = v2.functional.resize(picture, [short], interpolation=pictures.BICUBIC)
        picture = v2.functional.center_crop(picture, list(rule["crop_size"].values()))
    else:
        height, width = rule["size"].values()
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    assert torch.equal(v2.functional.pil_to_tensor(picture.convert(rule["mode"])), wanted)


@pytest.mark.slow
@torch.no_grad()
def test_steps_of_any_size_continue_from_each_other(folder):
    steps = {}
    for size in (1, 4):
        export(folder, "softmax", f"{size}.pt2", "pt2", "--step", "--length", size)
        steps[size], about = loaded(folder / f"{size}.pt2")
    state = []
    for port in about["inputs"][2:]:
        dtype = getattr(torch, port["dtype"])
        port = Port(port["name"], dtype, port["shape"], port["about"], start=float(port["start"]))
        state.append(port.example({"batch": 2}))
    ids = torch.randint(261, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 6:8] = mask[1, :3] = False
    found = []
    for start, size in ((0, 4), (4, 4), (8, 1), (9, 1)):
        piece = slice(start, start + size)
        logits, *state = steps[size](ids[:, piece], mask[:, piece], *state)
        found.append(logits)
    close(torch.cat(found, 1)[mask], model_of(folder, "softmax")(ids, mask)[mask])


@pytest.mark.slow
@torch.no_grad()
def test_a_process_without_lion_runs_programs_of_onnx(folder):
    """Run the example of the README, a text of any length, and steps of a delta rule."""
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    export(folder, "images", "images.onnx", "onnx")
    export(folder, "softmax", "softmax.onnx", "onnx")
    export(folder, "delta", "step.onnx", "onnx", "--step", "--length", 5)
    (line,) = alone(
        folder,
        f"""
{blocks(ROOT / "tools/export/README.md", "python")[1]}
text = onnxruntime.InferenceSession("softmax.onnx")
assert json.loads(text.get_modelmeta().custom_metadata_map["tokenizer.json"])["model"]["type"] == "BPE"
assert [x.shape for x in text.get_inputs()] == [["batch", "length"]] * 2
ids = numpy.arange(2 * 10).reshape(2, 10)
mask = ids % 10 < 7
(more,) = text.run(None, {{"tokens": ids, "mask": mask}})
step = onnxruntime.InferenceSession("step.onnx")
state = {{}}
for port in json.loads(step.get_modelmeta().custom_metadata_map["metadata.json"])["inputs"][2:]:
    shape = [2 if n == "batch" else n for n in port["shape"]]
    state[port["name"]] = numpy.full(shape, float(port["start"]), port["dtype"])
found = []
for piece in (slice(0, 5), slice(5, 10)):
    one, *values = step.run(None, {{"tokens": ids[:, piece], "mask": mask[:, piece], **state}})
    state = dict(zip(state, values))
    found.append(one)
numpy.savez("onnx.npz", logits, more, numpy.concatenate(found, 1))
assert "torch" not in sys.modules
""",
    )
    assert len(json.loads(line.replace("'", '"'))) == 3
    classes, logits, delta = map(torch.from_numpy, numpy.load(folder / "onnx.npz").values())
    close(classes, model_of(folder, "images")(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)))
    ids = torch.arange(20).view(2, 10)
    mask = ids % 10 < 7
    close(logits[mask], model_of(folder, "softmax")(ids, mask)[mask])
    close(delta[mask], model_of(folder, "delta")(ids, mask)[mask])


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("size", [1, 37, 64])
def test_triangular_systems_by_operators_of_onnx(size, upper):
    """Solve random systems, and that of equal keys, whose powers exceed its inverse by a factor of 1e17."""
    torch.manual_seed(0)
    for A in (torch.randn(2, size, size) / 4, torch.ones(2, size, size)):
        B = torch.randn(2, size, 3)
        wanted = torch.linalg.solve_triangular(A.double(), B.double(), upper=upper, unitriangular=True)
        found = solved(A, B, upper=upper, unitriangular=True)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def ids_and_mask():
    ids = torch.arange(3 * 7).view(3, 7)
    return ids, ids % 7 < 5


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler() is not None, reason="no compiler")
@torch.no_grad()
def test_the_compiler_of_aotinductor_gets_the_graph_and_its_description(folder, tmp_path, monkeypatch):
    packages = {}

    def compiled(graph, package_path, inductor_configs):
        Path(package_path).touch()
        packages[package_path] = graph.module()
        packages["files"] = inductor_configs["aot_inductor.metadata"]

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", packages.get)
    assert here("export", folder / "runs/softmax", tmp_path / "a.pt2", "--format", "aoti") == 0
    program, files = packages.values()
    assert json.loads(files["metadata.json"])["task"] == "causal_lm" and "tokenizer.json" in files
    ids, mask = ids_and_mask()
    close(program(ids, mask)[mask], model_of(folder, "softmax")(ids, mask)[mask])


@pytest.mark.every
@pytest.mark.skipif(missing_compiler() is not None, reason="no compiler")
@torch.no_grad()
def test_programs_in_python_and_cpp_run_packages_of_aotinductor(folder):
    package = folder / "aoti.pt2"
    assert here("export", folder / "runs/softmax", package, "--format", "aoti") == 0
    model, (ids, mask) = model_of(folder, "softmax"), ids_and_mask()
    close(aoti.load(package)(ids, mask)[mask], model(ids, mask)[mask])
    (code,) = blocks(ROOT / "tools/export/README.md", "cpp")
    assert code.count("\n") <= 20
    (folder / "run.cpp").write_text(code)
    torch_folder = Path(torch.__file__).parent
    include, library = torch_folder / "include", torch_folder / "lib"
    flags = ["-std=c++20", f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{library}"]
    libraries = [f"-Wl,-rpath,{library}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", *flags, folder / "run.cpp", *libraries, "-o", folder / "run"], check=True, timeout=300)
    ids.numpy().tofile(folder / "ids")
    command = [folder / "run", package, folder / "ids", "7", folder / "logits"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout)["task"] == "causal_lm"
    found = torch.from_file(str(folder / "logits"), size=3 * 7 * 261).view(3, 7, 261)
    close(found, model(ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, expected",
    {
        "tpe": "tokens (batch, 20), mask (batch, 20), logits (batch, 20, 261);",
        "pairs": "tokens (batch, 2, length), mask (batch, 2, length), logits (batch, 2), at most 20 tokens;",
        "windows": "tokens (batch, 20), mask (batch, 20), logits (batch, 2);",
        "masked_pixels": "pixels (batch, 64), hidden (batch, 64), logits (batch, 64, 1);",
        "masked": "mask (batch, length), hidden (batch, length), logits (batch, length, 18), at most 20 tokens;",
    }.items(),
)
@torch.no_grad()
def test_programs_of_one_length_of_pairs_and_of_pixels(name, expected, folder, capsys):
    length = [] if name == "masked_pixels" else ["--length", 20]
    export(folder, name, f"{name}.pt2", "pt2", *length)
    assert expected in capsys.readouterr().out
    program, about = loaded(folder / f"{name}.pt2")
    model = model_of(folder, name)
    below = 18 if name == "masked" else 50
    ports = [Port(p["name"], getattr(torch, p["dtype"]), p["shape"], "", below) for p in about["inputs"]]
    for sizes in ({"batch": 1, "length": 13}, {"batch": 4, "length": 2}):
        inputs = [port.example(sizes) for port in ports]
        given = [inputs[0], None, inputs[1]] if name == "masked_pixels" else inputs
        found = program(*inputs)
        expected = model(*given)
        if found.dim() == 3 and ports[1].name == "mask":
            found = found[inputs[1]]
            expected = expected[inputs[1]]
        close(found, expected)


@torch.no_grad()
def test_delta_rules_have_one_length_and_pixels_no_mask(folder):
    delta = open_run(folder / "runs/delta")
    for given, length in ((20, 20), (None, 33)):
        program = make_program(delta, [], given)
        assert [port.shape for port in program.inputs] == [("batch", length)] * 2
        assert program.outputs[0].shape == ("batch", length, 261) and program.longest == length
    pixels = open_run(folder / "runs/pixels")
    program = make_program(pixels, [], None)
    assert [(port.name, port.shape) for port in program.inputs] == [("pixels", ("batch", 64))]
    assert program.outputs[0].shape == ("batch", 10) and program.longest is None
    (inputs,) = program.example(2, 1)
    close(program.module(inputs), pixels.model(inputs))


def test_inputs_and_outputs_of_labelled_text():
    info = LabelledTextInfo(**vars(text_info(BYTES, 16)), classes=("no", "yes"))
    task = SimpleTask(info, token_types=2)
    inputs, output = PORTS["sequence_classification"](task)
    assert [p.name for p in inputs] == ["tokens", "mask", "types"] and output.shape == ("batch", 2)
    inputs, output = PORTS["token_classification"](SimpleTask(TokenLabelsInfo(7, 16, 16, 30, 3), 0))
    assert inputs[0].shape == ("batch", "length", 3) and output.shape == ("batch", "length", 7)


class SimpleTask:
    """The parts of a run that ports depend on."""

    def __init__(self, info, token_types):
        self.task = self.model = self.config = self
        self.info = info
        self.token_types = token_types


BAD = {  # run, name of the file, and options; expected message
    "text a.pt2 onnx": "expected a name that ends with .onnx",
    "text a.onnx hub": "writes a folder; add --format onnx",
    "text a.pt2 hub": "writes a folder; add --format pt2 or aoti",
    "images a.pt2 pt2 --length 3": "its inputs have one size",
    "softmax a.pt2 pt2 --length 33": "its model has 32 position embeddings, got 33",
    "softmax a hub --length 3": "--length: not for --format hub",
    "softmax a hub --step": "--step: not for --format hub",
    "tpe a.pt2 pt2 --step": "only a model of task 'causal_lm' continues from a state, not 'masked_lm'",
    "noise a hub": "no class for 'dit', because transformers has none for diffusion; ./run.sh export --format pt2",
    "pixels file/a.pt2 pt2": "cannot be written (",
    "text a.pt2 aoti": "--format aoti compiles C++: no C++ compiler found (no-compiler); install g++, or use",
    "text a.onnx onnx": "--format onnx needs onnxruntime: pip install",
}


def test_bad_input(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (tmp_path / "file").write_text("")
    for words, message in BAD.items():
        name, out, *options = words.split()
        assert message in refuse(capsys, "export", folder / "runs" / name, tmp_path / out, "--format", *options)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_is_written_is_whole_and_readable(tmp_path):
    for error in (OSError(28, "No space left on device", "x"), RuntimeError("I/O error (os error 28)")):
        with pytest.raises(OSError, match="No space left") as full, place.written(tmp_path / "b"):
            raise error
        assert full.value.filename == str(tmp_path / "b") and one_line(full.value).endswith("No space left on device")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with place.written(tmp_path / "c") as folder:
        folder.mkdir()
        (folder / "own").touch(0o600)
    assert (tmp_path / "c/own").stat().st_mode == (tmp_path / "file").stat().st_mode


def test_programs_with_wrong_outputs_are_refused(folder, tmp_path, capsys, monkeypatch):
    """Check programs whose module is called in place of the graph, with changed outputs."""
    modules = []

    def write(program, graph, path):
        modules.append(program.module)
        path.touch()

    def shifted(y):
        return y + 7

    def broken(y):
        return y if len(y) == 1 else y * torch.nan

    monkeypatch.setattr(Program, "graph", lambda self: None)
    monkeypatch.setattr(pt2, "write", write)
    for change, line in (
        (shifted, "outputs of the program differ from those of the model by up to 7.0e+00, expected at most"),
        (broken, "not finite"),
    ):

        def load(path, change=change):
            return lambda *inputs: change(modules[-1](*inputs))

        monkeypatch.setattr(pt2, "load", load)
        assert line in refuse(capsys, "export", folder / "runs/text", tmp_path / "a.pt2", "--format", "pt2")
    assert not list(tmp_path.iterdir())


def test_every_format_is_documented():
    text = (ROOT / "tools/export/README.md").read_text()
    assert all(f"| `{name}`" in text for name in FORMATS)
    assert all(f"`{task}`" in text for task in PORTS)
