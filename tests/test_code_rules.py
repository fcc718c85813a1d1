"""Rules of the code base: import order, file sizes, and packages."""

import ast
import functools
import sys
from pathlib import Path

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
    "lion/ops/kernels.py": {"triton"},  # comes with torch for GPUs
    "tools/gpu/cubins.py": {"triton"},
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
SOURCES = sorted(path for folder in ("lion", "data", "tools") for path in (ROOT / folder).rglob("*.py"))
CONTRACT = {"lion.config", "lion.files", "lion.progress", "lion.samples"}  # what `data` needs of `lion`
CORE = {"torch", "torchvision", "datasets", "tokenizers", "numpy", "yaml", "tensorboard", "tqdm", "PIL"}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> list[str]:
    """List the modules that a file imports, and what it imports from them."""
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module)
            for alias in node.names:
                assert alias.name != "*", f"{path}: star import"
                names.append(f"{node.module}.{alias.name}")
    return names


def place(path: Path) -> str:
    """Return the path of a file relative to the repository root."""
    return path.relative_to(ROOT).as_posix()


def room(path: Path) -> str:
    """Return the top-level folder of a file."""
    return place(path).split("/")[0]


def floor(module: str) -> int:
    """Return the place of a module of `lion` in FLOORS; modules outside are below all."""
    parts = module.split(".")
    if parts[0] == "lion" and len(parts) > 1 and parts[1] in FLOORS:
        return FLOORS.index(parts[1])
    return -1


def test_imports_run_one_way():
    for path in SOURCES:
        if room(path) != "lion":
            continue
        here = floor(place(path).removesuffix(".py").replace("/", "."))
        for name in imported(path):
            assert name.split(".")[0] not in ("data", "tools", "tests"), f"{path}: imports {name}"
            assert here == -1 or floor(name) <= here, f"{path}: {name} comes later in FLOORS"


def test_data_imports_the_contract_of_samples_and_no_task():
    for path in SOURCES:
        if room(path) != "data":
            continue
        for name in imported(path):
            top, _, rest = name.partition(".")
            allowed = f"lion.{rest.partition('.')[0]}" in CONTRACT
            assert top not in ("lion", "tools") or name == "lion" or (top == "lion" and allowed), (path, name)


def test_files_have_docstrings_and_are_quiet():
    for path in SOURCES:
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(tree_of(path)), f"{path}: no docstring"
        calls = [ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        assert room(path) == "tools" or "print" not in calls, f"{path}: print belongs to tools"
        assert "torch.compile" not in calls or place(path) in COMPILING, f"{path}: see lion/trainer/compilation.py"


def test_core_needs_only_the_fixed_packages():
    ours = {"lion", "data", "tools"}
    for path in SOURCES:
        roots = {name.split(".")[0] for name in imported(path)}
        others = roots - set(sys.stdlib_module_names) - ours - CORE
        assert others <= EXTRAS.get(place(path), set()), path


def test_one_place_asks_whether_code_is_exported():
    """In graphs of torch 2.11, `torch.compiler.is_exporting` is always True."""
    asking = [place(path) for path in SOURCES if "is_exporting()" in path.read_text()]
    assert asking == ["lion/ops/modes.py"]


def test_a_quick_run_stays_quick(pytestconfig):
    """Count one case of each collected test that is fast; where there are too many, slow tests need their marker."""
    assert pytestconfig.fast_tests <= MOST_CASES
