from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
