"""Write `build/api.md`, the page of the public interface, from the docstrings: python -m tools.api"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lion.files import save_text

PAGE = Path(__file__).resolve().parent.parent / "build" / "api.md"
EXTRAS = ("lion.timm", "lion.transformers")  # which need packages of an extra
# modules whose `__all__` is public
MODULES = ("lion", "lion.ops", "lion.layers.mixers", "lion.layers.mixers.decay", "lion.layers.weights", *EXTRAS)
SECTION = re.compile(r"(Args|Attributes|Returns|Raises):$")


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    save_text(PAGE, page())
    print(f"written: {PAGE}")


def page() -> str:
    """Return the page in Markdown. An object is described in the first module that exports it."""
    lines = [
        "# Public interface",
        "",
        "Generated from the docstrings by `python -m tools.api`. Versions are semantic: what is listed here changes",
        "incompatibly only with the first number, and before 1.0 with the second.",
    ]
    seen: dict[int, str] = {}
    for module in MODULES:
        lines += ["", f"## {module}"]
        exported = importlib.import_module(module)
        for name in sorted(exported.__all__, key=str.lower):
            value = getattr(exported, name)
            described = inspect.isfunction(value) or inspect.isclass(value)
            if described and id(value) in seen:
                lines += ["", f"### {name}", "", f"See `{seen[id(value)]}`."]
            elif described:
                seen[id(value)] = f"{module}.{name}"
                lines += ["", f"### {name}", "", *described_object(name, value)]
            else:
                lines += ["", f"### {name}", "", constant(value)]
    return "\n".join(lines) + "\n"


def described_object(name: str, value: Any) -> Iterator[str]:
    """Yield the lines that describe a function, or a class with its public methods."""
    node = parsed(value)
    yield from code(f"{name}{signature(node)}")
    yield from docstring(node)
    if not isinstance(node, ast.ClassDef):
        return
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            call = f"{name}.{method.name}"
            if not any(ast.unparse(each).endswith("property") for each in method.decorator_list):
                call += signature(method)
            yield ""
            yield from code(call)
            yield from docstring(method)


def parsed(value: Any) -> ast.stmt:
    """Return the code of a function or a class, or of the base of a class that a function has made."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    except OSError:
        return parsed(value.__base__)


def signature(node: ast.AST) -> str:
    """Return the arguments of a function, of the constructor of a class, or the fields of a class without one."""
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                return f"({without_self(each)})"
        marks = " ".join(map(ast.unparse, node.decorator_list + node.bases))
        record = re.search(r"dataclass|NamedTuple", marks)
        fields = []
        for each in node.body:
            if not isinstance(each, ast.AnnAssign) or "ClassVar" in ast.unparse(each.annotation):
                continue
            if record or each.value:
                fields.append(ast.unparse(each))
        return f"({', '.join(fields)})"
    assert isinstance(node, ast.FunctionDef)
    if node.returns is None:
        return f"({without_self(node)})"
    return f"({without_self(node)}) -> {ast.unparse(node.returns)}"


def without_self(node: ast.FunctionDef) -> str:
    return re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))


def code(text: str) -> Iterator[str]:
    """Yield a line of Python as a block of code, one argument per line if it is long."""
    if len(text) > 120:
        text = re.sub(r"^(\w+(?:\.\w+)?)\((.*)\)", one_per_line, text)
    yield from ("```python", text, "```")


def one_per_line(found: re.Match[str]) -> str:
    parts, depth = [""], 0
    for character in found[2]:
        depth += (character in "[(") - (character in ")]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    lines = [f"    {part.strip()},\n" for part in parts]
    return f"{found[1]}(\n{''.join(lines)})"


def docstring(node: Any) -> Iterator[str]:
    """Yield a docstring in Markdown: sections such as `Args:` become lists."""
    text = ast.get_docstring(node)
    if text is None:
        return
    yield ""
    section = ""
    for line in text.split("\n"):
        found = SECTION.match(line)
        if found:
            section = found[1]
            yield from (f"**{section}**", "")
            continue
        if line and not line.startswith(" "):
            section = ""
        if not section or not line:
            yield line
        elif section == "Returns":
            yield line.strip()
        elif line.startswith("     "):
            yield f"  {line.strip()}"
        else:
            item, _, rest = line.strip().partition(": ")
            yield f"- `{item}`: {rest}"


def constant(value: Any) -> str:
    """Describe a table or tuple by its names."""
    names = [repr(value)]
    if isinstance(value, (dict, tuple)) and all(isinstance(name, str) for name in value):
        names = list(value)
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main()
