"""What a campaign found, as Python reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _native
from ._errors import AssayError, InputMutated, KernelCrashed, KernelFailure, KernelTimeout, NotReproducible
from ._native import Problem

_CLASSES: dict[str, type[AssayError]] = {
    "input-mutated": InputMutated,
    "crashed": KernelCrashed,
    "timed-out": KernelTimeout,
    "not-reproducible": NotReproducible,
}


class Cause:
    """Failures that look alike.

    Attributes:
        gate: The gate that failed, such as `dlogits`, or what the kernel did instead of answering, such as `raised`.
        status: `fail`, `nonfinite`, or None where there was no answer.
        like: Names of wrong kernels that fail alike.
        cases: Problems that it was seen in.
        verdict: The verdict on the smallest problem: `at`, `expected`, `actual`, `error`, `limit` and `lines` in words; None
            where there was no answer.
        fault: What the kernel did, or said, where there was none.
        signal: The number of the signal that ended the kernel's process; None where none did.
        repro: The file that holds the smallest problem; None where none is kept.
        spec_that_would_pass: Losses whose numbers these are, each a list of its names.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self.gate: str = data["gate"]
        self.verdict: Mapping[str, Any] | None = data["verdict"]
        self.status: str | None = self.verdict["status"] if self.verdict else None
        self.like: list[str] = [name["mutant"] for name in data["like"]]
        self.cases: int = data["cases"]
        self.fault: str | None = data["fault"]
        self.signal: int | None = data["signal"]
        self.repro: str | None = data["repro"]
        self.spec_that_would_pass: list[list[str]] = data["computes"]

    @property
    def problem(self) -> Problem:
        """The smallest problem that it was seen in.

        Raises:
            AssayError: None is kept, as `repro_dir` was None.
        """
        if self.repro is None:
            raise AssayError(f"problem: got repro_dir=None, expected a folder to keep {self._data['problem']} in")
        return _native.load(self.repro, None, "logits", "old_logps")

    def __repr__(self) -> str:
        alike = f", like {' or '.join(self.like[:3])}" if self.like else ""
        return f"<assay.Cause {self.gate}: {self.cases} problems, smallest {self._data['problem']}{alike}>"


class Report:
    """What a campaign found; true where it passed. Its repr is the whole of it in words.

    Attributes:
        passed: Whether problems were judged, and nothing failed that is not allowed.
        cases: Problems that were tried.
        seed: Of the deck.
        grade: What was asked of accuracy.
        causes: What failed, a `Cause` each.
        allowed: What failed and is allowed by name.
        skipped: What was not tried, with the reasons.
        coverage: What the problems had in them.
        power: How many of the library's wrong kernels it would have caught; None where nobody counted.
        stopped: Why it ended before every problem was tried; None where it did not.
    """

    def __init__(self, data: str, text: str) -> None:
        self._json, self._text = data, text
        read = json.loads(data)
        self.passed: bool = read["passed"]
        self.cases: int = read["tried"]
        self.seed: int = read["seed"]
        self.grade: str = read["grade"]
        self.causes = [Cause(cause) for cause in read["causes"]]
        self.allowed = [Cause(cause) for cause in read["allowed"]]
        self.skipped: list[Mapping[str, Any]] = read["skipped"]
        self.coverage: Mapping[str, Any] = read["coverage"]
        self.power: Mapping[str, Any] | None = read["power"]
        self.stopped: str | None = read["stopped"]

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return self._text.rstrip()

    def _repr_html_(self) -> str:
        from html import escape

        # A page has styles of its own, which a notebook's must not meet.
        return f'<iframe srcdoc="{escape(_native.page(self._json))}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as `assay check --json` writes it, also to `path` where one is given."""
        if path is not None:
            Path(path).write_text(self._json)
        return self._json

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the project's report page of it to `path`."""
        Path(path).write_text(_native.page(self._json), encoding="utf-8")

    def raise_for_failure(self) -> None:
        """Raises what it found, unless it passed.

        Raises:
            KernelCrashed, KernelTimeout, InputMutated, NotReproducible: That, and nothing else, is what the kernel did.
            KernelFailure: All else: wrong numbers, no problem that was judged.
        """
        if self.passed:
            return
        gates = {cause.gate for cause in self.causes}
        raised = _CLASSES.get(gates.pop(), KernelFailure) if len(gates) == 1 else KernelFailure
        if raised is KernelCrashed:
            raise KernelCrashed(f"\n{self}", self.causes[0].signal)
        raise raised(f"\n{self}")
