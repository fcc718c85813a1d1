"""Rules of the code base: import order, file sizes, and packages."""

import ast
from pathlib import Path

import pytest

from tests.conftest import MOST_CASES

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    "config",
    "files",
    "ops",
    "layers",
    "models",
    "samples",
    "inference",
    "tasks",
    "trainer",
    "recipe",
    "runs",
    "teachers",
    "evaluation",
    "timm",
    "transformers",
]  # each module may import the modules before it
COMPILING = {
    "lion/trainer/compilation.py",
    "lion/ops/piecewise.py",
    "lion/transformers/delta.py",
    "tools/bench/ops.py",
    "tools/bench/clock.py",
    "tools/bench/beside.py",
    "tools/gpu/graphs.py",
}
EXTRAS = {  # optional packages, imported where they are used
    "tools/convert/files.py": {"safetensors"},
    "tools/export/onnx.py": {"onnx", "onnxruntime", "onnxscript"},
    "tools/gpu/cubins.py": {"triton"},  # comes with torch for GPUs
    "tools/gpu/interpret.py": {"triton"},
    "tools/gpu/targets.py": {"triton"},
    "lion/tasks/sequence_classification.py": {"scipy", "sklearn"},
    "tools/statistics.py": {"scipy"},
}
EXTRAS |= {
    f"lion/{room}/{path.name}": {room}
    for room in ("timm", "transformers")
    for path in (ROOT / "lion" / room).glob("*.py")
}
EXTRAS["lion/transformers/attention.py"] |= {"safetensors"}  # a dependency of transformers
SOURCES = sorted(p for folder in ("lion", "data", "tools") for p in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert not any(a.name == "*" for a in node.names), f"{path}: star import"
            names.append(node.module)
            names += [f"{node.module}.{a.name}" for a in node.names]
    return names


def place(path: Path) -> str:
    """Return the path of a file relative to the repository root."""
    return path.relative_to(ROOT).as_posix()


def room(path: Path) -> str:
    """Return the top-level folder of a file."""
    return place(path).split("/")[0]


def floor(module: str) -> int | None:
    parts = module.split(".")
    return FLOORS.index(parts[1]) if parts[0] == "lion" and len(parts) > 1 and parts[1] in FLOORS else None


@pytest.mark.parametrize("path", [p for p in SOURCES if room(p) == "lion"], ids=place)
def test_imports_run_one_way(path):
    here = floor(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for name in imported(path):
        assert name.split(".")[0] not in ("data", "tools", "tests"), f"lion must not import {name}"
        there = floor(name)
        if here is not None and there is not None:
            assert there <= here, f"{name} comes after {path.name} in FLOORS"


@pytest.mark.parametrize("path", [p for p in SOURCES if room(p) == "data"], ids=place)
def test_data_imports_the_contract_of_samples_and_no_task(path):
    modules = {".".join(n.split(".")[:2]) for n in imported(path) if n.split(".")[0] in ("lion", "tools")}
    assert modules <= {"lion.config", "lion.files", "lion.progress", "lion.samples"}, path


@pytest.mark.parametrize("path", SOURCES, ids=place)
def test_files_stay_small_and_quiet(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    tree = ast.parse(text)
    assert not text.strip() or ast.get_docstring(tree), "a module needs a docstring"
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    if room(path) != "tools":
        assert not any(isinstance(f, ast.Name) and f.id == "print" for f in calls), "print belongs to tools"
    compiles = [f for f in calls if isinstance(f, ast.Attribute) and ast.unparse(f) == "torch.compile"]
    assert not compiles or place(path) in COMPILING, (
        "models are compiled in lion/trainer/compilation.py alone, pieces by hand"
    )


def test_core_needs_only_the_fixed_packages():
    allowed = {"torch", "torchvision", "datasets", "tokenizers", "numpy", "yaml", "tensorboard", "tqdm", "PIL"}
    import sys

    for path in SOURCES:
        roots = {n.split(".")[0] for n in imported(path)} - set(sys.stdlib_module_names) - {"lion", "data", "tools"}
        assert roots <= allowed | EXTRAS.get(place(path), set()), (path, roots - allowed)


def test_one_place_asks_whether_code_is_exported():
    """In graphs of torch 2.11, `torch.compiler.is_exporting` is always True."""
    asking = [place(path) for path in SOURCES if "is_exporting()" in path.read_text()]
    assert asking == ["lion/ops/modes.py"]


def test_a_quick_run_stays_quick(pytestconfig):
    """Count one case of each collected test that is fast; where there are too many, slow tests need their marker."""
    assert pytestconfig.fast_tests <= MOST_CASES
