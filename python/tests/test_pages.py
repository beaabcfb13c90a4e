"""The Python in the documents: every block compiles, and what it names of this package is there."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assay

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "python" / "README.md", ROOT / "fixtures" / "README.md"])

_BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, str]]:
    """Yields each block of Python with the name of its page; an ellipsis as prose writes it is one of Python."""
    for page in PAGES:
        for indent, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            lines = (line.removeprefix(indent) for line in block.splitlines())
            yield page.name, "\n".join(lines).replace("…", "...")


def parsed(page: str, block: str) -> ast.Module:
    """Returns the block's syntax; in a call `f(x, ...)` an ellipsis stands for further arguments, also after those with a name."""
    block = re.sub(r",\s*\.\.\.\s*(?=[,)])", "", block)
    try:
        return ast.parse(block)
    except SyntaxError as error:
        raise AssertionError(f"{page}: {error}\n{block}") from error


def dotted(node: ast.expr) -> str:
    """Returns the dotted name of an expression, or nothing if it is another."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def public_names(module: str) -> set[str]:
    """Returns the names at the top of a module's source, as the framework that it imports may be missing."""
    source = (ROOT / "python" / "assay" / f"{module}.py").read_text(encoding="utf-8")
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def unknown(name: str) -> bool:
    """Whether a dotted name of this package leads to nothing."""
    _, first, *rest = name.split(".")
    if first in ("torch", "jax"):
        return bool(rest) and rest[0] not in public_names(first)
    return not hasattr(assay, first)


def test_pages_python_compiles_and_names_what_there_is() -> None:
    found, wrong = 0, []
    for page, block in blocks():
        found += 1
        for node in ast.walk(parsed(page, block)):
            if isinstance(node, ast.Attribute) and dotted(node).startswith("assay.") and unknown(dotted(node)):
                wrong.append(f"{page}: {dotted(node)}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("assay."):
                wrong += [f"{page}: {node.module}.{a.name}" for a in node.names if unknown(f"{node.module}.{a.name}")]
    assert not wrong
    assert found > 30


#: Functions whose other arguments are those of a spec or of a campaign: a keyword that none has is a mistake.
CALLED = ("check", "check_logp", "check_loss", "problems", "load", "spec", "kernel")


def keywords() -> set[str]:
    """Returns the names of all arguments of the package's functions."""
    functions: list[Any] = [getattr(assay, name) for name in CALLED]
    names = {name for function in functions for name in inspect.signature(function).parameters}
    fields = assay.spec().to_dict()
    # The options of projects that documents show.
    return names | set(fields) | {"loss_type", "beta", "epsilon_high", "policy_loss", "ids_per_token", "entropy", "batch"}


def test_pages_python_calls_with_arguments_that_there_are() -> None:
    known, wrong, called = keywords(), [], 0
    for page, block in blocks():
        for node in ast.walk(parsed(page, block)):
            if isinstance(node, ast.Call) and dotted(node.func) in {f"assay.{name}" for name in CALLED}:
                called += 1
                wrong += [f"{page}: {dotted(node.func)}({word.arg}=)" for word in node.keywords if word.arg and word.arg not in known]
    assert not wrong
    assert called > 10


@pytest.mark.parametrize(
    ("block", "message"),
    [("assay.chek(f)", "assay.chek"), ("assay.torch.grpo_los(x)", "assay.torch.grpo_los"), ("assay.torch.grpo_loss(x, ...)", "")],
)
def test_pages_names_that_are_missing_are_found(block: str, message: str) -> None:
    named = [dotted(node) for node in ast.walk(parsed("page", block)) if isinstance(node, ast.Attribute)]
    assert [name for name in named if name.startswith("assay.") and unknown(name)] == ([message] if message else [])


def test_pages_errors_have_a_heading_each() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    classes = [name for name in assay.__all__ if isinstance(getattr(assay, name), type) and issubclass(getattr(assay, name), Exception)]
    assert sorted(headings) == sorted(classes)
