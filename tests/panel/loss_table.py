"""A table of published losses before a campaign of `assay`, a column for each dtype of the logits."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "fixtures/peers/record"))

DTYPES = ("f32", "bf16", "f16")
CAMPAIGN: dict[str, Any] = {"cases": 60, "wide": 0, "power": False, "repro_dir": None, "progress": False}


@dataclass(frozen=True)
class Published:
    """A published function: its line's name, a maker of what a campaign is given, and the campaign's arguments.

    The maker imports the project. One that is not installed, or not for this machine, is a line that says so.
    """

    name: str
    make: Callable[[], Callable[..., Any]]
    options: dict[str, Any] = field(default_factory=dict)


class NotRunError(Exception):
    """The reason why a function does not run here."""


def one_call(fn: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Returns `fn` if it runs on small arguments."""
    try:
        fn(*arguments)
    except Exception as error:
        words = re.findall(
            r"expected device_type=\w+|'\w+' object has no attribute '\w+'", str(error).replace("\\", "")
        )
        raise NotRunError(f"{type(error).__name__}, {(words or [str(error)])[0]}") from error
    return fn


def of_maxtext(path: str, names: set[str], within: dict[str, Any], constants: str | None = None) -> dict[str, Any]:
    """Functions and classes of MaxText without the package, and constants of a pattern.

    `MAXTEXT` names the folder of its wheel.
    """
    from batch import of_source

    if "MAXTEXT" not in os.environ:
        raise NotRunError("MAXTEXT is not set")
    source = Path(os.environ["MAXTEXT"]) / "maxtext" / path
    found = re.findall(rf"^({constants}) =", source.read_text(), re.MULTILINE) if constants else []
    return of_source(source, {*names, *found}, within)


def cell(report: Any) -> str:
    """The findings of a campaign in a few words: the gates that failed, and how, where it is not by a limit."""
    if report.passed:
        return "passes"
    said = [re.search(r"\b[A-Z]\w*(Error|Exception|Hit)\b", cause.fault) for cause in report.causes if cause.fault]
    faults = sorted({f"raises {match[0]}" if match else "does not answer" for match in said})
    gates = sorted({cause.gate for cause in report.causes if not cause.fault})
    # Beyond a limit, and not a number: the latter only where a logit is −∞, or elsewhere too.
    infinite = [gate for gate in gates if gate.endswith("not finite")]
    beyond = [gate for gate in gates if gate not in infinite]
    parts = [", ".join(beyond)] if beyond else []
    if infinite:
        parts.append("NaN at −∞" if all("minus_infinity" in gate for gate in infinite) else "NaN or ∞")
    return f"fails: {'; '.join(parts + faults)}"


def print_table(check: Callable[..., Any], losses: list[Published]) -> None:
    """Prints a line for each loss, as soon as it is known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a word of the losses' names")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument(
        "--causes", action="store_true", help="a line for each cause, with the time that a campaign took"
    )
    arguments = parser.parse_args()
    print(f"| function | {' | '.join(arguments.dtypes)} |\n|---|{'---|' * len(arguments.dtypes)}")
    for loss in losses:
        if arguments.only not in loss.name:
            continue
        try:
            fn = loss.make()
        except (ImportError, NotRunError) as error:
            print(f"| {loss.name} | {' | '.join([f'not run: {error}'] * len(arguments.dtypes))} |", flush=True)
            continue
        cells = []
        for dtype in arguments.dtypes:
            began = time.monotonic()
            report = check(fn, dtypes=[dtype], **{**CAMPAIGN, **loss.options})
            cells.append(cell(report))
            if arguments.causes:
                print(f"<!-- {loss.name}, {dtype}: {report.cases} problems, {time.monotonic() - began:.0f} s")
                for cause in report.causes:
                    print(f"  {cause.summary}")
                print("-->", flush=True)
        print(f"| {loss.name} | {' | '.join(cells)} |", flush=True)
