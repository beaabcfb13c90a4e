"""The pytest plugin: options for campaigns, and problems as a fixture."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import assay

from . import _check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Problems of the fixture, unless an option says how many.
_PROBLEMS = 20

# The property of a test that has the table of a bench.
_TABLE = "assay_bench"

# The options that name a folder for reports, the endings of the files there, and how they are written.
_PAGES = [("assay_html", ".html", assay.Report.to_html), ("assay_markdown", ".md", assay.Report.to_markdown)]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("assay", "GRPO loss kernels")
    group.addoption("--assay-cases", type=int, metavar="N", help="problems of each campaign, and of the fixture assay_problem")
    group.addoption("--assay-seed", metavar="N|random", help="seed of the problems; random says which it was")
    group.addoption("--assay-seconds", type=float, metavar="S", help="seconds after which a campaign begins no more problems")
    group.addoption("--assay-html", metavar="DIR", help="write each campaign's report page into this folder")
    group.addoption("--assay-markdown", metavar="DIR", help="write each campaign's report as Markdown into this folder")


def _seed(config: pytest.Config) -> int | None:
    """The seed that is asked for; under xdist the one that its controller drew."""
    if hasattr(config, "workerinput"):
        drawn: int | None = config.workerinput["assay_seed"]
        return drawn
    given = config.getoption("assay_seed")
    if given is None:
        return None
    if given == "random":
        return random.randrange(1 << 31)
    if not given.isdecimal():
        raise pytest.UsageError(f"--assay-seed: got {given!r}, expected a whole number or random")
    return int(given)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "assay(spec, **options): the loss of assay_problem, and what assay.problems takes")
    cases, seconds = config.getoption("assay_cases"), config.getoption("assay_seconds")
    if cases is not None and cases < 1:
        raise pytest.UsageError(f"--assay-cases: got {cases}, expected at least 1: no problems show nothing")
    told = {"cases": cases, "seconds": seconds, "seed": _seed(config)}
    _check.overrides.update({name: value for name, value in told.items() if value is not None})


def pytest_unconfigure() -> None:
    _check.overrides.clear()


class _Controller:
    """The hook by which the controller of xdist sends its seed to the workers."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["assay_seed"] = _check.overrides.get("seed")


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    if not manager.hasplugin("assay-controller") and manager.hasplugin("xdist"):
        manager.register(_Controller(), "assay-controller")


def pytest_report_header() -> str | None:
    seed = _check.overrides.get("seed")
    return None if seed is None else f"assay: --assay-seed={seed}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "assay_problem" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("assay")
    arguments, options = (marker.args, dict(marker.kwargs)) if marker else ((), {})
    spec = arguments[0] if arguments else options.pop("spec", "trl")
    count = _check.overrides.get("cases", _PROBLEMS)
    seed = _check.overrides.get("seed", options.pop("seed", 0))
    # One after another when they are asked for: a problem is made of its number alone.
    cases = [(spec, seed, number, options) for number in range(count)]
    metafunc.parametrize("assay_problem", cases, indirect=True, ids=[f"seed{seed}-{number}" for number in range(count)])


@pytest.fixture
def assay_problem(request: pytest.FixtureRequest) -> assay.Problem:
    """A generated problem, another one in each run of the test: `assay_problem.check(outputs).raise_for_failure()`.

    The loss is TRL's default, or that of the marker `@pytest.mark.assay("trl", beta=0.04)`.
    """
    spec, seed, number, options = request.param
    return next(assay.problems(spec, 1, seed, first=number, **options))


@pytest.fixture
def assay_bench(request: pytest.FixtureRequest) -> Callable[..., assay.ProgramBench]:
    """Times a kernel as `assay.bench` does: the test fails unless its answers are right, and the table stands in pytest's summary.

    `found = assay_bench(my_loss, "trl", against=["eager"])`, and then such as `assert found.memory["my_loss"] < 1.1`.
    """

    def bench(fn: Any, spec: Any = "trl", **options: Any) -> assay.ProgramBench:
        __tracebackhide__ = True
        found = assay.bench(fn, spec, **({"progress": False} | options))
        # Properties reach the controller of xdist too.
        request.node.user_properties.append((_TABLE, repr(found)))
        found.raise_for_failure()
        return found

    return bench


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for entry in getattr(report, "user_properties", ()):
                # Other plugins' entries may be of any form.
                if report.when == "call" and len(entry) == 2 and entry[0] == _TABLE:
                    terminalreporter.section(f"assay_bench in {report.nodeid}")
                    terminalreporter.write_line(entry[1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _check.reports.clear()
    try:
        return (yield)
    finally:
        for option, ending, write in _PAGES:
            folder = item.config.getoption(option)
            for number, (_, report) in enumerate(_check.reports if folder is not None else []):
                # The test's own name: each is written by the one process that ran it.
                name = re.sub(r"[^\w.-]+", "-", item.nodeid) + (f"-{number}" if number else "")
                os.makedirs(folder, exist_ok=True)
                write(report, Path(folder) / f"{name}{ending}")
