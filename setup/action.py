"""The work of `action.yml`: installs the package, judges a kernel, and writes a job summary and annotations.

Inputs are environment variables, as `action.yml` sets them. The exit code is that of `assay check` or of pytest: 0 if the kernel passed,
2 for bad usage.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

# A service shows a few annotations; the job summary has all.
MOST_ANNOTATIONS = 10


def annotation(title: str, text: str) -> str:
    """Formats an error of the workflow; `%` and line ends are escaped, so that text from a report cannot be another command."""

    def data(value: str) -> str:
        return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    return f"::error title={data(title).replace(':', '%3A').replace(',', '%2C')}::{data(text)}"


def failure_annotations(junit: Path) -> list[str]:
    """Formats an annotation for each failed test case of a JUnit file, and one line for those that are too many."""
    failed = []
    for case in ElementTree.fromstring(junit.read_bytes()).iter("testcase"):
        for failure in [*case.findall("failure"), *case.findall("error")]:
            failed.append(annotation(f"assay: {case.get('name', '')}", failure.get("message") or failure.text or "failed"))
    rest = len(failed) - MOST_ANNOTATIONS
    return failed[:MOST_ANNOTATIONS] + ([annotation("assay", f"{rest} more failures in the job summary")] if rest > 0 else [])


def words(name: str) -> list[str]:
    """Splits an input as a shell does."""
    try:
        return shlex.split(os.environ.get(name, ""))
    except ValueError as error:
        given = os.environ[name]
        raise SystemExit(f"{name.removeprefix('ASSAY_').lower()}: got {given!r}, expected words quoted as for a shell: {error}") from error


def append(variable: str, text: str) -> None:
    """Appends to a file of the service, if it gave one."""
    path = os.environ.get(variable)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


def main() -> int:
    kernel, tests = os.environ.get("ASSAY_KERNEL", "").strip(), words("ASSAY_PYTEST")
    if bool(kernel) == bool(tests):
        print(annotation("assay", "kernel and pytest: got both or none, expected one of the two"), flush=True)
        return 2
    options, package = words("ASSAY_OPTIONS"), words("ASSAY_PACKAGE")
    if package:
        install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *package, *(["pytest"] if tests else [])]
        subprocess.run(install, check=True)
    report = Path(os.environ.get("ASSAY_REPORT") or "assay-report").resolve()
    report.mkdir(parents=True, exist_ok=True)
    junit, texts = report / "junit.xml", report / "markdown"
    texts.mkdir(exist_ok=True)
    # A result of an earlier step would be taken for one of this.
    for stale in [junit, *texts.glob("*.md")]:
        stale.unlink(missing_ok=True)
    if kernel:
        command = ["assay", "check", *options, "--exec", kernel, "--junit", str(junit), "--markdown", str(texts / "check.md")]
    else:
        command = ["pytest", *tests, f"--junitxml={junit}", f"--assay-markdown={texts}"]
    # Between these two lines the service takes nothing that a kernel prints for a command.
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        ended = subprocess.run([sys.executable, "-m", *command])
    finally:
        print(f"::{token}::", flush=True)
    if junit.exists():
        print("\n".join(failure_annotations(junit)), flush=True)
    elif ended.returncode:
        print(annotation("assay", f"no report was written, exit code {ended.returncode}: see the log"), flush=True)
    for text in sorted(texts.glob("*.md")):
        append("GITHUB_STEP_SUMMARY", text.read_text(encoding="utf-8") + "\n")
    append("GITHUB_OUTPUT", f"passed={'false' if ended.returncode else 'true'}\n")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
