"""Exported programs: the outputs of the run, in processes without `lion`, and errors."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
from lion.samples.text import LabelledTextInfo, TextInfo
from lion.trainer.compilation import missing_compiler
from tests.helpers import ROOT, here, refuse
from tests.test_docs import blocks
from tools.cli import one_line
from tools.compose import make_task, resolve
from tools.convert import write_run
from tools.export import FORMATS, place, pt2
from tools.export.onnx import solved
from tools.export.ports import PORTS, Port, facts_of

SMALL = ["model.dim=16", "model.depth=1", "model.num_heads=2", "model.init_std=0.3", "trainer.compile=false"]
TEXT = ["data.name=text", "data.tokenizer=bytes"]
BYTES = open_tokenizer("bytes")
FACTS = (BYTES.fingerprint, BYTES.special)
RUNS = {  # recipe, metadata of the data, and changes of the recipe
    "images": (
        "quickstart",
        ImageInfo((8, 8), 1, tuple("abcdefghij"), (0.287,), (0.354,)),
        ["model.patch_size=2"],
    ),
    "text": ("gpt2_tiny_lion_s", TextInfo(BYTES.vocabulary, 33, "bytes", *FACTS), TEXT),
    "softmax": ("gpt2_tiny_softmax", TextInfo(BYTES.vocabulary, 33, "bytes", *FACTS), TEXT),
    "delta": ("gpt2_tiny_gla", TextInfo(BYTES.vocabulary, 33, "bytes", *FACTS), [*TEXT, "model.mixer=deltanet"]),
    "tpe": ("mlm_tiny_lion_s", TextInfo(BYTES.vocabulary, 24, "bytes", *FACTS), [*TEXT, "model.mixer=lightnet"]),
    "pixels": ("lra_image_softmax", SequenceInfo(10, 64, mean=0.4, std=0.3), []),
    "masked": ("lra_listops_softmax_masked", SequenceInfo(2, 32, 18), []),
    "masked_pixels": ("lra_image_softmax_masked", SequenceInfo(10, 64, mean=0.4, std=0.3), []),
    "windows": ("lra_listops_softmax_window", SequenceInfo(2, 32, 50), ["model.window=8"]),
    "pairs": ("lra_listops_softmax", SequenceInfo(2, 32, 50, parts=2), ["data.name=aan"]),
    "noise": ("dit_tiny_lightnet", ImageInfo((8, 8), 1, tuple("ab"), (0.5,), (0.5,)), ["model.patch_size=2"]),
}


def make(folder: Path, name: str) -> Path:
    """Write an untrained run."""
    recipe, info, changes = RUNS[name]
    recipe = resolve(recipe, [*SMALL, *changes, f"run.root={folder}", f"run.name={name}"])
    torch.manual_seed(0)
    weights = make_task(recipe, info).build_model(recipe.model).state_dict()
    weights = {key: value + 0.02 * torch.randn_like(value) for key, value in weights.items()}  # a DiT starts with zeros
    write_run(recipe.folder, recipe, {"info": info.to_dict(), "model": weights, "ema": None}, {}, {})
    return recipe.folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    for name in RUNS:
        make(folder / "runs", name)
    return folder


def model_of(folder, name):
    return lion.load(folder / "runs" / name, compile=False)


def alone(folder, code):
    """Run Python in a process that cannot import this package, and return what it prints."""
    code = f"import sys\nfor name in ('lion', 'data', 'tools'): sys.modules[name] = None\n{code}"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_a_process_without_lion_runs_programs_of_torch_export(folder, capsys):
    assert here("export", folder / "runs" / "text", folder / "text.pt2", "--format", "pt2") == 0
    assert here("export", folder / "runs" / "images", folder / "images.pt2", "--format", "pt2") == 0
    assert "tokens (batch, length), mask (batch, length), logits (batch, length, 261), at most 4031 tokens" in (
        capsys.readouterr().out
    )
    code = blocks(ROOT / "tools/export/README.md", "python")[0]
    torch.manual_seed(1)
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    rows = [(torch.randint(261, (batch, length)), batch) for batch, length in ((1, 1), (2, 2), (3, 64), (2, 700))]
    masks = [torch.arange(ids.shape[1]) < torch.tensor([[ids.shape[1]], [1], [7]])[:n] for ids, n in rows]
    torch.save([images, [(ids, mask) for (ids, _), mask in zip(rows, masks)]], folder / "inputs.pt")
    code += """
images, rows = torch.load("inputs.pt")
classes = torch.export.load("images.pt2").module()
torch.save([logits, classes(images), [program(*row) for row in rows]], "outputs.pt")
"""
    inputs = json.loads(alone(folder, code).replace("'", '"'))
    assert [port["name"] for port in inputs] == ["tokens", "mask"]
    said, classes, found = torch.load(folder / "outputs.pt")
    model = model_of(folder, "text")
    close(said, model(torch.tensor([BYTES.encode("To be, or")])))
    for logits, (ids, _), mask in zip(found, rows, masks):
        close(logits[mask], model(ids, mask)[mask])
    close(classes, model_of(folder, "images")(images))
    about = {"metadata.json": ""}
    torch.export.load(folder / "images.pt2", extra_files=about)
    whole = {"mode": "L", "size": {"height": 8, "width": 8}, "resample": "bicubic"}
    assert json.loads(about["metadata.json"])["prepare"] == whole


@pytest.mark.parametrize("size", [(16, 16), (24, 16), (16, 28)])
@pytest.mark.parametrize("settings", [{}, {"crop": 0.5}, {"pad": 2}])
def test_the_description_states_how_an_image_is_scaled_and_cropped(settings, size):
    info = ImageInfo(size, 3, ("a", "b"), (0.5,) * 3, (0.5,) * 3)
    config = pictures.PictureConfig("imagefolder", **settings)
    rule = facts_of(SimpleTask(info, 0), to_dict(config))["prepare"]
    picture = Image.effect_mandelbrot((60, 40), (-2, -1, 1, 1), 50)
    wanted = pictures.test_transform(config, info)(picture)
    if "crop_size" in rule:
        sides = picture.height, picture.width
        if "cover" in rule:
            short = int(max(n * min(sides) / side for n, side in zip(rule["cover"].values(), sides)))
        else:
            short = rule["size"]["shortest_edge"]
        picture = v2.functional.resize(picture, [short], interpolation=pictures.BICUBIC)
        picture = v2.functional.center_crop(picture, [*rule["crop_size"].values()])
    else:
        picture = picture.resize([*rule["size"].values()][::-1], Image.Resampling.BICUBIC)
    assert torch.equal(v2.functional.pil_to_tensor(picture.convert(rule["mode"])), wanted)


@pytest.mark.slow
def test_a_process_without_lion_generates_text_and_images(folder, capsys):
    assert here("export", folder / "runs" / "noise", folder / "noise.pt2", "--format", "pt2") == 0
    assert "times (batch), labels (batch), noise (batch, 1, 8, 8);" in capsys.readouterr().out
    assert here("export", folder / "runs" / "text", folder / "step.pt2", "--format", "pt2", "--step") == 0
    assert (
        "tokens (batch, 1), mask (batch, 1), position (batch), blocks_0_S (batch, 2, 8, 8)" in capsys.readouterr().out
    )
    images, text = blocks(ROOT / "tools/export/README.md", "python")[2:4]
    images = f"import torch\ntorch.manual_seed(3)\n{images}"
    images += '\ntorch.save([predict(x, now.expand(count), labels), x], "noise.pt")'
    rows = alone(folder, f'{images}\n{text}\nprint("", ids)').splitlines()[-1]
    model, prompt = model_of(folder, "text"), BYTES.encode("To be, or")
    (wanted,) = lion.generate(model, [prompt], 20, sampling=Sampling(temperature=0))
    assert json.loads(rows) == wanted and len(set(wanted[len(prompt) :])) > 2
    noise, found = torch.load(folder / "noise.pt")
    run, labels = open_run(folder / "runs" / "noise"), torch.arange(2)
    with torch.no_grad():
        close(noise, run.model(found, torch.zeros(2, dtype=torch.int64), labels))
        assert noise.std() > 0.1
        torch.manual_seed(3)
        start = torch.randn(2, 1, 8, 8)
        wanted = run.task.process.denoise(lambda x, t: run.model(x, t, labels), start, steps=50, bound=1.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("delta", [5, 5]), ("softmax", [4, 4, 1, 1])])
@torch.no_grad()
def test_steps_of_any_size_continue_from_each_other(name, sizes, folder, tmp_path):
    steps = {}
    for size in {*sizes}:
        out = tmp_path / f"{size}.pt2"
        assert here("export", folder / "runs" / name, out, "--format", "pt2", "--step", "--length", size) == 0
        steps[size] = pt2.load(out)
    about = {"metadata.json": ""}
    torch.export.load(out, extra_files=about)
    ports = [Port(**{**p, "dtype": getattr(torch, p["dtype"])}) for p in json.loads(about["metadata.json"])["inputs"]]
    state = [replace(port, start=float(port.start)).example({"batch": 2}) for port in ports[2:]]
    ids = torch.randint(261, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 6:8] = mask[1, :3] = False
    found = []
    for size, *piece in zip(sizes, ids.split(sizes, 1), mask.split(sizes, 1)):
        logits, *state = steps[size](*piece, *state)
        found.append(logits)
    close(torch.cat(found, 1)[mask], model_of(folder, name)(ids, mask)[mask])


@pytest.mark.slow
@torch.no_grad()
def test_a_process_without_lion_runs_programs_of_onnx(folder):
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    for name in ("images", "softmax"):
        assert here("export", folder / "runs" / name, folder / f"{name}.onnx", "--format", "onnx") == 0
    assert here("export", folder / "runs" / "delta", folder / "delta.onnx", "--format", "onnx", "--length", 9) == 0
    step = ["--format", "onnx", "--step", "--length", 4]
    assert here("export", folder / "runs" / "text", folder / "step.onnx", *step) == 0  # which compares logits
    code = blocks(ROOT / "tools/export/README.md", "python")[1]
    code += """
text = onnxruntime.InferenceSession("softmax.onnx")
assert json.loads(text.get_modelmeta().custom_metadata_map["tokenizer.json"])["model"]["type"] == "BPE"
assert [x.shape for x in text.get_inputs()] == [["batch", "length"]] * 2
ids = numpy.arange(2 * 9).reshape(2, 9)
(more,) = text.run(None, {"tokens": ids, "mask": ids % 9 < 5})
(delta,) = onnxruntime.InferenceSession("delta.onnx").run(None, {"tokens": ids, "mask": ids % 9 < 5})
numpy.savez("onnx.npz", logits, more, delta)
assert "torch" not in sys.modules
"""
    assert len(json.loads(alone(folder, code).replace("'", '"'))) == 3
    import numpy

    classes, logits, delta = map(torch.from_numpy, numpy.load(folder / "onnx.npz").values())
    close(classes, model_of(folder, "images")(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)))
    ids, mask = torch.arange(18).view(2, 9), torch.arange(9).expand(2, -1) < 5
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


@pytest.mark.slow
@pytest.mark.compiled
@torch.no_grad()
def test_a_program_in_cpp_runs_packages_of_aotinductor(folder):
    if missing := missing_compiler():
        pytest.skip(missing)
    assert here("export", folder / "runs" / "softmax", folder / "aoti.pt2", "--format", "aoti") == 0
    (code,) = blocks(ROOT / "tools/export/README.md", "cpp")
    assert code.count("\n") <= 20
    (folder / "run.cpp").write_text(code)
    torch_folder = Path(torch.__file__).parent
    include, library = torch_folder / "include", torch_folder / "lib"
    flags = ["-std=c++20", f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{library}"]
    libraries = [f"-Wl,-rpath,{library}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", *flags, folder / "run.cpp", *libraries, "-o", folder / "run"], check=True, timeout=300)
    ids = torch.arange(3 * 7).view(3, 7)
    ids.numpy().tofile(folder / "ids")
    command = [folder / "run", folder / "aoti.pt2", folder / "ids", "7", folder / "logits"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout)["task"] == "causal_lm"
    found = torch.from_file(str(folder / "logits"), size=3 * 7 * 261).view(3, 7, 261)
    close(found, model_of(folder, "softmax")(ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("delta", "tokens (batch, 20), mask (batch, 20), logits (batch, 20, 261);"),
        ("tpe", "tokens (batch, 20), mask (batch, 20), logits (batch, 20, 261);"),
        ("pairs", "tokens (batch, 2, length), mask (batch, 2, length), logits (batch, 2), at most 20 tokens;"),
        ("windows", "tokens (batch, 20), mask (batch, 20), logits (batch, 2);"),
        ("pixels", "pixels (batch, 64), logits (batch, 10);"),
        ("masked_pixels", "pixels (batch, 64), hidden (batch, 64), logits (batch, 64, 1);"),
        ("masked", "mask (batch, length), hidden (batch, length), logits (batch, length, 18), at most 20 tokens;"),
    ],
)
@torch.no_grad()
def test_programs_of_one_length_of_pairs_and_of_pixels(name, expected, folder, tmp_path, capsys):
    length = [] if name in ("pixels", "masked_pixels") else ["--length", 20]
    assert here("export", folder / "runs" / name, tmp_path / "a.pt2", "--format", "pt2", *length) == 0
    assert expected in capsys.readouterr().out
    program, model = pt2.load(tmp_path / "a.pt2"), model_of(folder, name)
    about = {"metadata.json": ""}
    torch.export.load(tmp_path / "a.pt2", extra_files=about)
    about = json.loads(about["metadata.json"])
    below = 18 if name == "masked" else 50
    ports = [Port(p["name"], getattr(torch, p["dtype"]), p["shape"], "", below) for p in about["inputs"]]
    for sizes in ({"batch": 1, "length": 13}, {"batch": 4, "length": 2}):
        inputs = [port.example(sizes) for port in ports]
        given = [inputs[0], None, inputs[1]] if name == "masked_pixels" else inputs
        found, expected = program(*inputs), model(*given)
        per_token = found.dim() == 3 and ports[1].name == "mask"
        close(*((x[inputs[1]] for x in (found, expected)) if per_token else (found, expected)))


def test_inputs_and_outputs_of_labelled_text():
    info = LabelledTextInfo(BYTES.vocabulary, 16, "bytes", *FACTS, classes=("no", "yes"))
    task = SimpleTask(info, token_types=2)
    inputs, output = PORTS["sequence_classification"](task)
    assert [p.name for p in inputs] == ["tokens", "mask", "types"] and output.shape == ("batch", 2)
    inputs, output = PORTS["token_classification"](SimpleTask(TokenLabelsInfo(7, 16, 16, 30, 3), 0))
    assert inputs[0].shape == ("batch", "length", 3) and output.shape == ("batch", "length", 7)


class SimpleTask:
    """The parts of a run that ports depend on."""

    def __init__(self, info, token_types):
        self.task = self.model = self.config = self
        self.info, self.token_types = info, token_types


def test_bad_input(folder, tmp_path, capsys, monkeypatch):
    def line(name, *args):
        return refuse(capsys, "export", folder / "runs" / name, *args)

    assert "expected a name that ends with .onnx" in line("text", tmp_path / "a.pt2", "--format", "onnx")
    for suffix, fits in ((".onnx", "onnx"), (".pt2", "pt2 or aoti")):
        assert f"writes a folder; add --format {fits}" in line("text", tmp_path / f"a{suffix}")
    assert "its inputs have one size" in line("images", tmp_path / "a.pt2", "--format", "pt2", "--length", 3)
    assert "its model has 32 position embeddings, got 33" in line(
        "softmax", tmp_path / "a.pt2", "--format", "pt2", "--length", 33
    )
    assert "--length: not for --format hub" in line("softmax", tmp_path / "a", "--length", 3)
    assert "--step: not for --format hub" in line("softmax", tmp_path / "a", "--step")
    assert "only a model of task 'causal_lm' continues from a state, not 'masked_lm'" in line(
        "tpe", tmp_path / "a.pt2", "--format", "pt2", "--step"
    )
    assert "no class for 'dit', because transformers has none for diffusion; ./run.sh export --format pt2" in line(
        "noise", tmp_path / "a"
    )
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-compiler")
        assert "--format aoti compiles C++: no C++ compiler found (no-compiler); install g++, or use" in line(
            "text", tmp_path / "a.pt2", "--format", "aoti"
        )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        assert "--format onnx needs onnxruntime: pip install" in line("text", tmp_path / "a.onnx", "--format", "onnx")
    (tmp_path / "file").write_text("")
    assert "cannot be written (" in line("pixels", tmp_path / "file" / "a.pt2", "--format", "pt2")
    for error in (OSError(28, "No space left on device", "x"), RuntimeError("I/O error (os error 28)")):
        with pytest.raises(OSError, match="No space left") as full, place.written(tmp_path / "b"):
            raise error
        assert full.value.filename == str(tmp_path / "b") and one_line(full.value).endswith("No space left on device")
    with place.written(tmp_path / "c") as folder:
        folder.mkdir()
        (folder / "own").touch(0o600)
    assert (tmp_path / "c" / "own").stat().st_mode == (tmp_path / "file").stat().st_mode
    shutil.rmtree(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_programs_with_wrong_outputs_are_refused(folder, tmp_path, capsys, monkeypatch):
    right = pt2.load

    def wrong(change):
        return lambda path: lambda *inputs: change(right(path)(*inputs))

    for change, line in (
        (lambda y: y + 7, "outputs of the program differ from those of the model by up to 7.0e+00, expected at most"),
        (lambda y: y if len(y) == 1 else y * torch.nan, "not finite"),
    ):
        monkeypatch.setattr(pt2, "load", wrong(change))
        assert line in refuse(capsys, "export", folder / "runs/text", tmp_path / "a.pt2", "--format", "pt2")
    assert not [*tmp_path.iterdir()]


def test_every_format_is_documented():
    text = (ROOT / "tools/export/README.md").read_text()
    assert all(f"| `{name}`" in text for name in FORMATS)
    assert all(f"`{task}`" in text for task in PORTS)
