from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

import assay


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "assay", *arguments], capture_output=True, text=True, cwd=cwd)


def test_codes_are_the_binarys() -> None:
    assert run("--version").stdout.startswith("assay ")
    assert run("--version").returncode == 0
    help = run("--help")
    assert help.returncode == 0 and "Judge a kernel:" in help.stdout
    nothing = run()
    assert nothing.returncode == 2 and "Usage: assay" in nothing.stderr
    unknown = run("jugde")
    assert unknown.returncode == 2 and "judge" in unknown.stderr
    missing = run("judge", "--problem", "nowhere.safetensors", "--candidate", "nowhere.safetensors")
    assert missing.returncode == 2 and missing.stderr.startswith("assay: nowhere.safetensors")


def test_a_generated_problem_is_loaded_and_says_what_made_it(tmp_path: Path) -> None:
    made = run(
        "generate", "--shape", "2x3x257", "--seed", "1", "-o", "problem.safetensors", "--json", "made.json", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    command = json.loads((tmp_path / "made.json").read_text())["command"]
    assert command == "assay generate --shape 2x3x257 --seed 1 -o problem.safetensors --json made.json"
    assert assay.load(tmp_path / "problem.safetensors").shape == (2, 3, 257)


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_an_interrupt_ends_it_as_it_ends_the_binary() -> None:
    command = [sys.executable, "-m", "assay", "generate", "--shape", "64x256x151936", "-o", os.devnull]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT


def _cases(path: Path) -> dict[str, ElementTree.Element]:
    """The test cases of a JUnit file by name, after its counts have been compared with them."""
    root = ElementTree.fromstring(path.read_bytes())
    assert root.tag == "testsuites" and [suite.tag for suite in root] == ["testsuite"]
    suite = root[0]
    cases = {case.attrib["name"]: case for case in suite}
    assert len(cases) == len(suite), "a name is given twice"
    for attribute, tag in [("failures", "failure"), ("skipped", "skipped")]:
        assert int(suite.attrib[attribute]) == sum(case.find(tag) is not None for case in suite)
    assert int(suite.attrib["tests"]) == int(root.attrib["tests"]) == len(suite)
    return cases


# Every character that XML, a shell or a terminal could take for its own; NUL and a slash no file name has.
_NAME = "a <&\"'>]]>\t\n\x07\x1b[31m π \U0001f600\ufffe"


def test_junit_of_judge_has_a_case_for_each_gate(tmp_path: Path) -> None:
    problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x33"]))
    problem.save(tmp_path / "problem.safetensors")
    candidate = tmp_path / f"{_NAME}.safetensors"
    zeros = np.zeros(problem.shape, np.float32)
    save_file({"loss": np.zeros((1,), np.float32), "dlogits": zeros}, candidate)
    command = ["judge", "--problem", "problem.safetensors", "--candidate", str(candidate), "--junit", "report.xml"]
    judged = run(*command, "--json", "report.json", cwd=tmp_path)
    assert judged.returncode == 1, judged.stderr
    cases = _cases(tmp_path / "report.xml")
    found = json.loads((tmp_path / "report.json").read_text())
    failed = {case for case, element in cases.items() if element.find("failure") is not None}
    statuses = [check["verdict"] for check in found["checks"]]
    assert len(failed) == sum(status in ("fail", "nonfinite") for status in statuses) > 0
    assert len(cases) == len(found["checks"]) + len(found["ignored"])
    name = next(iter(cases.values())).attrib["classname"]
    # Control characters are shown, blanks are one, and XML has no such character as the last.
    assert name == _NAME.replace("\t\n", " ").replace("\x07", r"\u{7}").replace("\x1b", r"\u{1b}").replace("\ufffe", "\ufffd")


def test_junit_of_check_has_a_case_for_each_output_and_cause(tmp_path: Path) -> None:
    worker, report = tmp_path / "worker.py", tmp_path / "report.xml"
    right = (Path(__file__).parents[2] / "examples/python/worker.py").read_text()
    wrong = right.replace("e / total[..., None]", "2 * e / total[..., None]")
    assert wrong != right
    kernel = f"{shlex.quote(sys.executable)} {shlex.quote(str(worker))}"
    command = ["check", "--preset", "trl", "--cases", "12", "--wide", "0", "--no-power", "--no-shrink", "--dtypes", "f32"]
    for source, code in [(right, 0), (wrong, 1)]:
        worker.write_text(source)
        found = run(*command, "--exec", kernel, "--junit", str(report), "--json", "-")
        assert found.returncode == code, found.stdout + found.stderr
        result, cases = json.loads(found.stdout), _cases(report)
        failed = [case for case in cases.values() if case.find("failure") is not None]
        assert len(failed) == len(result["causes"]) and bool(failed) == bool(code)
        # The outputs that are right are cases that passed: the loss of the wrong kernel is right.
        passed = {name for name, case in cases.items() if len(case) == 0}
        assert passed == {"loss", "logp"} | ({"gradient"} if code == 0 else set())


def test_a_worker_is_judged_and_times_its_own_calls(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    right = (Path(__file__).parents[2] / "examples/python/worker.py").read_text()
    kernel = f"{shlex.quote(sys.executable)} {shlex.quote(str(worker))}"
    command = ["bench", "--exec", kernel, "--preset", "trl", "--shape", "1x8x512", "--dtype", "f32", "--calls", "3", "--json", "b.json"]
    worker.write_text(right)
    timed = run(*command, cwd=tmp_path)
    assert timed.returncode == 0, timed.stdout + timed.stderr
    (program,) = json.loads((tmp_path / "b.json").read_text())["programs"]
    assert program["times"]["calls"] == 3 and program["times"]["least"] > 0
    # Logits in f64 and what NumPy makes of them: at least one array more than it is given.
    assert program["memory"]["peak"] > 0 and program["memory"]["kept"] is None
    assert "a copy of the logits" in timed.stdout
    # One that is wrong has no time, and neither has one that times nothing.
    for source, words in [
        (right.replace("e / total[..., None]", "2 * e / total[..., None]"), "wrong  "),
        (right.replace(', "seconds": seconds[1:]', ""), "times nothing"),
        # Right where it is only judged, and nothing where it is timed.
        (right.replace("save_file(outputs,", "save_file({n: 0 * x if request.get('calls') else x for n, x in outputs.items()},"), "wrong  "),
    ]:
        assert source != right
        worker.write_text(source)
        untimed = run(*command, cwd=tmp_path)
        assert untimed.returncode == 1 and words in untimed.stdout, untimed.stdout + untimed.stderr
        (program,) = json.loads((tmp_path / "b.json").read_text())["programs"]
        assert program["times"] is None
    refused = run("bench", "--impl", "native", "--preset", "trl", "--shape", "1x8x512")
    assert refused.returncode == 2 and "--preset: got a loss, expected --exec CMD beside it" in refused.stderr


def test_junit_and_markdown_of_suite_list_its_problems(tmp_path: Path) -> None:
    made = run("suite", "--cases", "3", "--wide", "0", "-o", "suite", "--junit", "s.xml", "--markdown", "s.md", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    written = {path.name for path in (tmp_path / "suite").glob("*.safetensors")}
    cases = _cases(tmp_path / "s.xml")
    assert {name.split(":")[0] for name, case in cases.items() if case.find("skipped") is None} == written
    assert all(name in (tmp_path / "s.md").read_text() for name in written)
    twice = run("suite", "-o", "other", "--junit", "-", "--markdown", "-", cwd=tmp_path)
    assert twice.returncode == 2 and "--markdown and --junit: got stdout twice" in twice.stderr


def test_emit_writes_text_and_needs_no_plugin(tmp_path: Path) -> None:
    for target, kernel in [("v6e", "mlir"), ("h100", "ptx")]:
        emitted = run("emit", "--shape", "1x8x4096", "--target", target, "-o", target, cwd=tmp_path)
        assert emitted.returncode == 0, emitted.stderr
        assert list((tmp_path / target).glob(f"*.{kernel}")) and (tmp_path / target / "manifest.json").exists()


def test_version_is_the_commands() -> None:
    assert run("--version").stdout == f"assay {assay.__version__}\n"
