"""The tutorial: its code runs as it is written, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"

_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def without_times(text: str) -> str:
    """The text without the seconds that a campaign took, nor blanks at the ends of lines."""
    return "\n".join(re.sub(r"\d+\.\d s$", "… s", line).rstrip() for line in text.strip().splitlines())


def test_tutorial_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    printed, compared = "", 0
    for kind, block in _BLOCK.findall((DOCS / "tutorial.md").read_text(encoding="utf-8")):
        if kind == "python":
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                exec(compile(block, "tutorial.md", "exec"), names)
            printed = shown.getvalue()
        else:
            assert without_times(block) == without_times(printed)
            compared += 1
    assert compared == 3
