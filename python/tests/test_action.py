"""The composite action, as a service runs it: `setup/action.py` with its inputs in the environment."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "examples/python/worker.py"
CHECK = "--preset trl --cases 8 --wide 0 --no-power --no-shrink --dtypes f32"


def act(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Runs the action in `folder`, where it leaves `summary.md` and `output`; nothing is installed."""
    service = {"GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "GITHUB_OUTPUT": str(folder / "output")}
    given = {f"ASSAY_{name.upper()}": value for name, value in ({"package": ""} | inputs).items()}
    command = [sys.executable, str(ROOT / "setup/action.py")]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | service | given)


def kernel(folder: Path, source: str) -> str:
    path = folder / "worker.py"
    path.write_text(source)
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(path))}"


def test_action_of_a_right_kernel_passes_and_writes_a_summary(tmp_path: Path) -> None:
    ran = act(tmp_path, kernel=kernel(tmp_path, WORKER.read_text()), options=CHECK)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "summary.md").read_text().startswith("### PASS")
    assert (tmp_path / "output").read_text() == "passed=true\n"
    assert "::error" not in ran.stdout and (tmp_path / "assay-report/junit.xml").exists()


def test_action_of_a_wrong_kernel_fails_with_annotations(tmp_path: Path) -> None:
    wrong = WORKER.read_text().replace("e / total[..., None]", "2 * e / total[..., None]")
    # A kernel that prints a command of the service prints it where none is taken.
    ran = act(tmp_path, kernel=kernel(tmp_path, "import sys; print('::error::planted', file=sys.stderr)\n" + wrong), options=CHECK)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert (tmp_path / "summary.md").read_text().startswith("### FAIL")
    assert (tmp_path / "output").read_text() == "passed=false\n"
    errors = [line for line in ran.stdout.splitlines() if line.startswith("::error")]
    assert errors and all(re.match(r"::error title=assay%3A dlogits", line) for line in errors), errors
    token = re.search(r"^::stop-commands::(\w+)$", ran.stdout, re.M)
    assert token and ran.stdout.index(f"::{token[1]}::") < ran.stdout.index("::error")


def test_action_of_tests_has_the_report_of_each(tmp_path: Path) -> None:
    test = "import sys; sys.path.insert(0, {!r}); import assay, kernels\n" + "".join(
        f"@assay.kernel('trl', cases=3, wide=0, power=False, repro_dir=None)\ndef test_{name}(p):\n    return kernels.{name}(p)\n"
        for name in ("honest", "too_large")
    )
    (tmp_path / "test_it.py").write_text(test.format(str(Path(__file__).parent)))
    ran = act(tmp_path, pytest="-q -p assay._pytest -p no:cacheprovider test_it.py")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("### PASS") == summary.count("### FAIL") == 1
    assert len(re.findall(r"^::error title=assay%3A test_too_large::", ran.stdout, re.M)) == 1, ran.stdout


def test_action_refuses_inputs_that_say_nothing(tmp_path: Path) -> None:
    for inputs in ({}, {"kernel": "k", "pytest": "t"}):
        ran = act(tmp_path, **inputs)
        assert ran.returncode == 2 and "expected one of the two" in ran.stdout
    unquoted = act(tmp_path, kernel="k", options="'a")
    assert unquoted.returncode == 1 and "options: got \"'a\", expected words quoted as for a shell" in unquoted.stderr


def test_action_gives_the_script_every_input(tmp_path: Path) -> None:
    text, script = (ROOT / "action.yml").read_text(), (ROOT / "setup/action.py").read_text()
    inputs = re.findall(r"^  ([a-z]+):$", text.split("outputs:")[0], re.M)
    assert inputs == re.findall(r"^        ASSAY_[A-Z]+: \$\{\{ inputs\.([a-z]+) \}\}$", text, re.M)
    assert all(f"ASSAY_{name.upper()}" in script or name == "python" for name in inputs)
