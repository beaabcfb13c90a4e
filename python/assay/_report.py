"""The findings of a campaign: `Report` and `Cause`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

from . import _native
from ._errors import AssayError, InputMutated, KernelCrashed, KernelFailure, KernelTimeout, NotReproducible
from ._native import Problem

# pytest shows the test's own frames alone.
__tracebackhide__ = methodcaller("errisinstance", AssayError)

_CLASSES: dict[str, type[AssayError]] = {
    "input-mutated": InputMutated,
    "crashed": KernelCrashed,
    "timed-out": KernelTimeout,
    "not-reproducible": NotReproducible,
}


class Cause:
    """A cause of failures: all failures of a campaign that look alike.

        >>> import assay, numpy as np
        >>> def zeros(problem):
        ...     logits = problem.numpy().logits
        ...     return {"loss": np.zeros((), np.float32), "dlogits": np.zeros_like(logits)}
        >>> options = dict(dtypes=["f32"], shapes=["2x3x7"], cases=4, wide=0, power=False, repro_dir=None)
        >>> cause = assay.check(zeros, "trl", progress=False, **options).causes[0]
        >>> isinstance(cause, assay.Cause), cause.cases > 0, cause.status
        (True, True, 'fail')

    Attributes:
        sentence: The most telling explanation.
        gate: The gate that failed, such as `dlogits`, or what the kernel did instead of answering, such as `raised`.
        status: `fail`, `nonfinite`, or None where there was no answer.
        like: Names of wrong kernels that fail alike.
        cases: The number of problems that have it.
        verdict: The verdict on the smallest problem: `at`, `expected`, `actual`, `error`, `limit`, and `lines` and `details` in words;
            None where there was no answer.
        fault: The error of a kernel that did not answer, in words; None if it answered.
        signal: The number of the signal that ended the kernel's process; None if none did.
        repro: The file that holds the smallest problem; None if none is kept.
        spec_that_would_pass: The losses that the kernel computes instead, each a list of its names.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self.sentence: str = data["sentence"]
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
        """The smallest problem that has it.

        Raises:
            AssayError: None is kept, as `repro_dir` was None.
        """
        if self.repro is None:
            raise AssayError(f"problem: got repro_dir=None, expected a folder to keep {self._data['problem']} in")
        return _native.load(self.repro, None, "logits", "old_logps")

    @property
    def summary(self) -> str:
        """The cause in one line: gate, sentence, number of problems, and the smallest of them."""
        problems = "problem" if self.cases == 1 else "problems"
        return f"{self.gate}: {self.sentence} ({self.cases} {problems}, smallest {self._data['problem']})"

    def __repr__(self) -> str:
        return f"<assay.Cause {self.summary}>"


class Report:
    """The findings of a campaign; true if it passed. Its repr is the report in words.

        >>> import assay, json, numpy as np
        >>> def zeros(problem):
        ...     logits = problem.numpy().logits
        ...     return {"loss": np.zeros((), np.float32), "dlogits": np.zeros_like(logits)}
        >>> options = dict(dtypes=["f32"], shapes=["2x3x7"], cases=4, wide=0, power=False, repro_dir=None)
        >>> report = assay.check(zeros, "trl", progress=False, **options)
        >>> isinstance(report, assay.Report), bool(report), report.cases
        (True, False, 4)
        >>> json.loads(report.to_json())["passed"]
        False

    Attributes:
        passed: Whether problems were judged, and nothing failed that is not allowed.
        cases: The number of problems that were tried.
        seed: The seed of the problems.
        grade: The grade of accuracy, `standard` or `exact`.
        causes: The causes of failures, a `Cause` each.
        allowed: The causes that are allowed by name.
        skipped: The problems that were not tried, with the reasons.
        coverage: The features that the problems covered.
        power: The share of the library's wrong kernels that the campaign would have caught; None if it was not counted.
        invariance: The findings about each relation that `invariant` asked for: `relation`, `grade`, `problems`, `failed`, `tokens`,
            `other_bits`, `outputs`, `by_design`, `difference_over_limit`, `not_asked`.
        stopped: The reason why it ended before every problem was tried; None if all were.
    """

    def __init__(self, data: str, call: str | None) -> None:
        self._json, self._call = data, call
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
        self.invariance: list[Mapping[str, Any]] = read["invariance"]
        self.stopped: str | None = read["stopped"]

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return self.text()

    def text(self, *, details: bool = False) -> str:
        """Returns the report in words; with `details` also inputs, bits, roundings and all wrong kernels that fail alike."""
        return _native.report_text(self._json, details, self._call).rstrip()

    def _repr_html_(self) -> str:
        from html import escape

        # A page has styles of its own, which a notebook's must not meet.
        return f'<iframe srcdoc="{escape(_native.page(self._json))}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as `assay check --json` writes it, and writes it to `path` if one is given."""
        if path is not None:
            Path(path).write_text(self._json)
        return self._json

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as an HTML page to `path`."""
        Path(path).write_text(_native.page(self._json), encoding="utf-8")

    def to_markdown(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as Markdown to `path`, as for the summary of a job."""
        Path(path).write_text(_native.report_markdown(self._json), encoding="utf-8")

    def raise_for_failure(self) -> None:
        """Raises an error with the report in words, unless the campaign passed.

        Raises:
            KernelCrashed, KernelTimeout, InputMutated, NotReproducible: Every cause is of that kind.
            KernelFailure: Any other failure: wrong numbers, or no problem was judged.
        """
        if self.passed:
            return
        gates = {cause.gate for cause in self.causes}
        raised = _CLASSES.get(gates.pop(), KernelFailure) if len(gates) == 1 else KernelFailure
        # The first line is what a summary of tests shows.
        said = f"{self.causes[0].summary if self.causes else self.text().splitlines()[-1]}\n{self}"
        if raised is KernelCrashed:
            raise KernelCrashed(said, self.causes[0].signal)
        raise raised(said)
