from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

KERNELS = """
import sys
sys.path.insert(0, {tests!r})
import assay, kernels, pytest

@assay.kernel("trl", packed=True, cases=30, wide=0, power=False, repro_dir=None)
def test_honest(problem):
    "A kernel."
    return kernels.honest(problem)

@assay.kernel("trl", cases=30, wide=0, power=False, repro_dir=None)
def test_wrong(problem):
    return kernels.too_large(problem)

@pytest.mark.assay("trl", shapes=["2x3x33"], packed=True)
def test_one(assay_problem):
    assert assay_problem.shape == (1, 6, 33) and len(assay_problem.cu_seqlens) == 3
    assay_problem.check(kernels.honest(assay_problem)).raise_for_failure()
"""


@pytest.fixture
def run(pytester: pytest.Pytester) -> object:
    pytester.makepyfile(test_kernels=KERNELS.format(tests=str(Path(__file__).parent)))

    def run(*options: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess("-p", "assay._pytest", "-p", "no:cacheprovider", *options)

    return run


def test_a_kernel_is_a_test_and_the_fixture_a_problem(run: object) -> None:
    result = run("--assay-cases=3")  # type: ignore[operator]
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*gate *dlogits, in*", "*KernelFailure*"])
    # One line says what fails first, and the frames are those of the test.
    result.stdout.fnmatch_lines(["FAILED *::test_wrong - assay.KernelFailure: dlogits*"])
    result.stdout.no_fnmatch_line("*_report.py*")
    result.stdout.no_fnmatch_line("*_check.py*")


def test_a_page_is_written_for_each_campaign(run: object, pytester: pytest.Pytester) -> None:
    run("--assay-cases=2", "--assay-html=pages", "--assay-markdown=texts", "-n2")  # type: ignore[operator]
    pages = sorted(page.name for page in (pytester.path / "pages").iterdir())
    assert pages == ["test_kernels.py-test_honest.html", "test_kernels.py-test_wrong.html"]
    texts = sorted((pytester.path / "texts").iterdir())
    assert [text.name for text in texts] == ["test_kernels.py-test_honest.md", "test_kernels.py-test_wrong.md"]
    assert [text.read_text()[:8] for text in texts] == ["### PASS", "### FAIL"]


def test_the_seed_is_said_and_drawn_once_for_all_processes(run: object) -> None:
    result = run("--assay-cases=2", "--assay-seed=random", "-n2", "-v")  # type: ignore[operator]
    result.assert_outcomes(passed=3, failed=1)
    seed = re.search(r"--assay-seed=(\d+)", result.stdout.str())
    assert seed is not None
    result.stdout.fnmatch_lines([f"*test_one*seed{seed[1]}-1*"])


def test_no_problems_are_no_test(run: object) -> None:
    result = run("--assay-cases=0")  # type: ignore[operator]
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--assay-cases: got 0, expected at least 1*"])
    assert run("--assay-seed=x").ret == pytest.ExitCode.USAGE_ERROR  # type: ignore[operator]
