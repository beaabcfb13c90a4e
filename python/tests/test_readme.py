"""The READMEs: their first example runs as it is written and prints what they show, with NumPy alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module that is None is not found: a plain environment has NumPy and nothing else.
_PLAIN = "import sys; sys.modules.update(dict.fromkeys(['ml_dtypes', 'jax', 'torch']))\n"


@pytest.mark.parametrize("page", ["README.md", "python/README.md"])
def test_readme_example_prints_what_it_shows(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    code, shown = (re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)[0] for kind in ("python", "text"))
    ran = subprocess.run([sys.executable, "-c", _PLAIN + code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = [line.rstrip() for line in ran.stdout.splitlines()]
    assert lines[: len(shown.splitlines())] == shown.splitlines()


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130
