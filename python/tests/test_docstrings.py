"""The docstrings of the package: each public name has one with an example, and every example runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
from types import ModuleType

import pytest

import assay

#: The modules with public names, and the framework that each needs.
MODULES = {"assay": None, "assay.torch": "torch", "assay.jax": "jax"}
#: The framework that an example of a module without one needs.
FRAMEWORKS = {"check_divergence": "jax", "check_logp": "jax", "check_loss": "jax"}
#: Classes of the extension: their examples are in the package's docstring.
NATIVE = ("Array", "Problem", "Spec", "Verdicts")


def module_of(name: str) -> ModuleType:
    if framework := MODULES[name]:
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    return importlib.import_module(name)


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_of_public_names_begin_with_a_sentence(module: str) -> None:
    home = module_of(module)
    for name in home.__all__:
        value = getattr(home, name)
        if not callable(value):
            continue
        text = inspect.getdoc(value) or ""
        sentence = text.split("\n\n")[0]
        assert sentence.endswith((".", ":")) and len(sentence.split()) >= 5, f"{module}.{name}: {sentence!r}"
        if name in NATIVE:
            assert f"assay.{name})" in (assay.__doc__ or ""), name
        else:
            assert ">>> " in text, f"{module}.{name} has no example"


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_have_examples_that_run(module: str) -> None:
    home = module_of(module)
    found = [home] if ">>> " in (home.__doc__ or "") else []
    found += [getattr(home, name) for name in home.__all__ if name not in NATIVE and callable(getattr(home, name))]
    for value in found:
        name = getattr(value, "__name__", module)
        if framework := FRAMEWORKS.get(name):
            pytest.importorskip(framework, reason=f"{framework} is not installed")
        parsed = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", {}, name, None, 0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        told: list[str] = []
        assert parsed.examples and not runner.run(parsed, out=told.append).failed, "".join(told)
