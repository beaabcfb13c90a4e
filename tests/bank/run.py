"""Runs the bank: wrong kernels must fail and be described, honest ones must pass, hostile ones must end nothing but themselves.

    python tests/bank/run.py                          # all three, a few thousand honest problems: `make campaign-bank`
    python tests/bank/run.py wrong --only log_of_softmax --print
    python tests/bank/run.py honest --honest 100000 --jobs 8 --json target/assay/bank.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HOME = str(Path(__file__).parent)
if HOME not in sys.path:
    sys.path.insert(0, HOME)

import entries  # noqa: E402

PARTS = ("wrong", "honest", "hostile")


def load(part: str) -> list[Any]:
    """Returns the entries of a part that this Python has the frameworks for."""
    if part == "wrong":
        import wrong  # noqa: F401

        if find_spec("torch"):
            import callers  # noqa: F401
            import cross_entropies  # noqa: F401
            import divergences  # noqa: F401
        return entries.BANK
    if part == "honest":
        import honest

        return honest.forms()
    import hostile

    return hostile.KERNELS


def quiet(**options: Any) -> dict[str, Any]:
    """The default campaign, without what neither judges nor explains."""
    return {"power": False, "repro_dir": None, "progress": False} | options


# Each of these runs in a process of its own.


def run_wrong(name: str, seed: int) -> dict[str, Any]:
    import assay

    entry = next(entry for entry in load("wrong") if entry.name == name)
    report = getattr(assay, entry.campaign)(entry.fn, **quiet(seed=seed, **entry.options))
    return {
        "kind": entry.kind,
        "name": name,
        "wrong_by": entry.is_wrong_by,
        "seed": seed,
        "passed": report.passed,
        "causes": [cause._data for cause in report.causes],
        "described": entry.is_said_by(repr(report)),
        "misleading": entry.misleading([cause._data for cause in report.causes]),
        "says": entry.says,
        "harmless": entry.harmless,
        "text": repr(report),
    }


def run_verdict(name: str, seed: int) -> dict[str, Any]:
    """Looks for a problem of the campaign that a wrong kernel fails, and explains nothing."""
    import assay

    entry = next(entry for entry in load("wrong") if entry.name == name)
    found = {"kind": entry.kind, "name": name, "seed": seed, "passed": False, "verdict": True, "harmless": entry.harmless}
    if entry.campaign == "check":
        for number, problem in enumerate(assay.problems(n=200, wide=2, seed=seed, **entry.options)):
            # `check` compares nothing in a batch without a counting token, and the campaign does.
            if problem.numpy().mask.any() and not problem.check(entry.fn(problem)):
                return found | {"text": f"problem {number}"}
    # Questions of a campaign alone: a second call, refilled memory, other ways of calling.
    report = getattr(assay, entry.campaign)(entry.fn, **quiet(seed=seed, shrink=False, **entry.options))
    return found | {"passed": report.passed, "text": repr(report)}


def run_honest(name: str, seed: int, cases: int, invariant: str | None) -> dict[str, Any]:
    form = next(form for form in load("honest") if form.name == name)
    # What is only noted would be shrunk too, which takes longer than all problems.
    report = form.run(**quiet(seed=seed, cases=cases, shrink=False, **({"invariant": invariant} if invariant else {})))
    # What fails in a campaign that passes is noted: NaN under the mask that reaches a masked gradient.
    failed = json.loads(report.to_json())["failed"]
    failed, noted = (0, failed) if report.passed else (failed, 0)
    compared = sum(relation["problems"] for relation in json.loads(report.to_json())["invariance"])
    return {"name": name, "seed": seed, "passed": report.passed, "tried": report.cases, "failed": failed, "noted": noted,
            "compared": compared, "skipped": sum(each["cases"] for each in report.skipped), "text": repr(report)}  # fmt: skip


def run_hostile(name: str, seed: int) -> dict[str, Any]:
    import assay
    import hostile

    entry = next(entry for entry in load("hostile") if entry.name == name)
    started = time.monotonic()
    report = assay.check(
        getattr(hostile, name), **quiet(seed=seed, cases=6, wide=0, shapes=["2x3x33"], isolate=True, timeout=entry.timeout, shrink=False)
    )
    return {"name": name, "seed": seed, "passed": report.passed, "described": bool(re.search(entry.says, " ".join(repr(report).split()))),
            "says": entry.says, "may_pass": entry.may_pass, "seconds": time.monotonic() - started, "text": repr(report)}  # fmt: skip


RUNNERS: dict[str, Any] = {"wrong": run_wrong, "verdict": run_verdict, "honest": run_honest, "hostile": run_hostile}


def work(task: tuple[str, tuple[Any, ...]]) -> tuple[str, dict[str, Any]]:
    part, arguments = task
    return part.replace("verdict", "wrong"), RUNNERS[part](*arguments)


def child(task: tuple[str, tuple[Any, ...]], answers: Any) -> None:
    # A hostile kernel's process is to inherit no pipe of this program.
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            os.set_inheritable(number, False)
    answers.put(work(task))


def outcomes(tasks: Iterable[tuple[str, tuple[Any, ...]]], jobs: int, limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs each task in a process of its own, `jobs` at a time: one that aborts, or is silent for `limit` seconds, is an outcome too."""
    spawn = multiprocessing.get_context("spawn")
    waiting = list(reversed(list(tasks)))
    running: list[Any] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop()
            answers = spawn.SimpleQueue()
            process = spawn.Process(target=child, args=(task, answers))
            process.start()
            running.append((task, answers, process, time.monotonic()))
        time.sleep(0.05)
        for one in list(running):
            (part, arguments), answers, process, started = one
            silent = time.monotonic() - started > limit
            if not answers.empty():
                yield answers.get()
            elif process.is_alive() and not silent:
                continue
            else:
                process.kill()
                ended = f"silent for {limit:.0f} s" if silent else f"its process ended, exit code {process.exitcode}"
                yield part.replace("verdict", "wrong"), {"name": arguments[0], "seed": arguments[1], "ended": ended}
            process.join()
            running.remove(one)


def cause_line(one: dict[str, Any]) -> str:
    """The first cause in one line."""
    if not one.get("causes"):
        return entries.causes_of(one.get("text", "")) if "causes" not in one else ""
    cause = one["causes"][0]
    told = [f"{cause['gate']}: {cause['cases']} problems"]
    told += [f"common {cause['in_common']}"] if cause["in_common"] else []
    told += [f"like {' or '.join(like['mutant'] for like in cause['like'][:3])}"] if cause["like"] else []
    told += [f"computes {', which is '.join(names)}" for names in cause["computes"]] + cause["diagnoses"]
    told += cause["fault"].splitlines()[:1] if cause["fault"] else []
    told += [cause["first"][cause["first"].index("called") :]] if "called" in cause["first"] else []
    return "; ".join(told)


def short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def judge_wrong(one: dict[str, Any]) -> tuple[str, bool]:
    """A word for a wrong kernel's outcome, and whether it is as it should be."""
    if "ended" in one:
        return one["ended"], False
    if one["passed"]:
        return ("harmless", True) if one["harmless"] else ("PASSED", False)
    if one.get("verdict"):
        return "fails", True
    is_gap = one["name"] in entries.gaps()
    if one["described"] and not one["misleading"]:
        # A mended kernel leaves the list, so that the list can only get shorter.
        return ("MENDED GAP", False) if is_gap and one["seed"] == 0 else ("described", True)
    if is_gap or one["harmless"]:
        return "gap", True
    return ("MISLEADING" if one["described"] else "NOT DESCRIBED"), False


def judge_honest(one: dict[str, Any]) -> tuple[str, bool]:
    if "ended" in one:
        return one["ended"], False
    return ("passes", True) if one["passed"] else ("FALSE ALARM", False)


def judge_hostile(one: dict[str, Any]) -> tuple[str, bool]:
    if "ended" in one:
        return one["ended"], False
    if one["passed"]:
        return ("passes", True) if one["may_pass"] else ("PASSED", False)
    return ("named", True) if one["described"] else ("NOT NAMED", False)


JUDGES = {"wrong": judge_wrong, "honest": judge_honest, "hostile": judge_hostile}


def tasks_of(part: str, asked: argparse.Namespace) -> list[tuple[str, tuple[Any, ...]]]:
    names = [entry.name for entry in load(part) if not asked.only or any(re.search(only, entry.name) for only in asked.only)]
    seeds = range(asked.seed, asked.seed + asked.seeds)
    if part != "honest":
        runner = "verdict" if part == "wrong" and asked.verdicts else part
        return [(runner, (name, seed)) for seed in seeds for name in names]
    # Every form is asked as often as any other, until there are as many problems as asked for.
    rounds = max(-(-asked.honest // (asked.cases * max(len(names), 1))), 1)
    return [(part, (name, asked.seed + turn, asked.cases, asked.invariant)) for turn in range(rounds) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="wrong, honest, hostile: all by default")
    parser.add_argument("--only", action="append", help="a regular expression of names")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds of wrong and hostile kernels")
    parser.add_argument("--verdicts", action="store_true", help="only whether wrong kernels fail, not what is said of them")
    parser.add_argument("--honest", type=int, default=4000, help="the number of problems of honest kernels, at least")
    parser.add_argument("--cases", type=int, default=200, help="the problems of one campaign of an honest kernel")
    parser.add_argument("--invariant", choices=("bits", "limits"), help="ask honest kernels for the same numbers in another call too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="the number of processes")
    parser.add_argument("--limit", type=float, default=1800, help="the seconds after which a campaign counts as hanging")
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    parser.add_argument("--print", action="store_true", help="the whole report of each")
    asked = parser.parse_args()
    asked.parts = asked.parts or list(PARTS)
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"parts: got {', '.join(sorted(unknown))}, expected {', '.join(PARTS)}")

    # Each process gets its share of the cores, in Rust and in PyTorch.
    threads = str(max((os.cpu_count() or 1) // asked.jobs, 1))
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    tasks = [task for part in asked.parts for task in tasks_of(part, asked)]
    counts: dict[str, dict[str, int]] = {part: {} for part in asked.parts}
    problems = failed = noted = compared = 0
    wrong_words, found = [], []
    for part, one in outcomes(tasks, asked.jobs, asked.limit):
        word, as_it_should = JUDGES[part](one)
        counts[part][word] = counts[part].get(word, 0) + 1
        found.append({"part": part, "outcome": word, **one})
        if not as_it_should:
            misled = "; ".join(one.get("misleading", []))
            wrong_words.append(f"{part} {one['name']}, seed {one['seed']}: {word} {misled}")
        if part == "honest":
            problems += one.get("tried", 0)
            failed += one.get("failed", 0)
            noted += one.get("noted", 0)
            compared += one.get("compared", 0)
        told = cause_line(one)
        print(f"{one.get('kind', part):18} {one['name']:40} {one['seed']:4} {word:14} {short(told, 200)}", flush=True)
        if asked.print:
            print(one.get("text", ""))
        if asked.json:
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            totals = {"problems": problems, "failed": failed, "noted": noted, "compared": compared}
            asked.json.write_text(json.dumps({"counts": counts, **totals, "found": found}, indent=1))
    for part in asked.parts:
        calls = f", {compared} compared with another call" if compared else ""
        of_honest = f"{failed} of {problems} problems failed, {noted} noted{calls}"
        total = of_honest if part == "honest" else f"{sum(counts[part].values())} campaigns"
        print(f"{part}: {total}: " + ", ".join(f"{count} {word}" for word, count in sorted(counts[part].items())))
    for line in wrong_words:
        print("NOT AS IT SHOULD BE:", line)
    return 1 if wrong_words else 0


if __name__ == "__main__":
    sys.exit(main())
