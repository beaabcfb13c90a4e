"""Programs that take turns on one problem: judged, timed beside what none can be faster than, measured, and judged again."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from . import _frameworks, _memory, _native, _opponents
from ._errors import InputMutated, OutputError, SpecError
from ._native import Problem
from ._programs import Program

#: The turns of a program: at least and at most so many.
TURNS = (5, 30)


def logits_bytes(extents: Sequence[int], dtype: str) -> int:
    return _memory.logits_count(extents) * (4 if dtype == "f32" else 2)


@contextmanager
def _bounded_memory(device: str | None) -> Iterator[None]:
    """Lets the process have what memory is free and no more, so that a program that needs more gets an error instead of a kill. A GPU's
    driver reserves more addresses than there is memory."""
    free = _native.available_bytes()
    if free is None or not is_cpu(device):
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    bound = mapped + free
    resource.setrlimit(resource.RLIMIT_AS, (bound if soft == resource.RLIM_INFINITY else min(soft, bound), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def is_cpu(device: str | None) -> bool:
    return device is None or str(device).split(":")[0] == "cpu"


#: The extents `[B,T]` of the part of a problem with a head that is judged: the reference takes minutes for more.
_JUDGED = [2, 3]


class Turns:
    """Programs that take turns on one problem."""

    def __init__(
        self,
        drawn: Callable[[Sequence[int]], Problem],
        extents: Sequence[int],
        made: Callable[[str, Problem], Program],
        device: str | None,
        grade: str,
        say: Callable[[str], None],
    ) -> None:
        self._problem = drawn(extents)
        self._judged = self._problem if len(extents) == 3 else drawn([*_JUDGED, *extents[2:]])
        self._made, self._device, self._grade, self._say = made, device, grade, say
        self._unit = logits_bytes(extents, self._problem.dtype)
        #: The programs that were right so far.
        self.programs: dict[str, Program] = {}
        #: What is known of every program, as `BenchedProgram` has it.
        self.found: dict[str, dict[str, Any]] = {}
        self.bound: dict[str, Any] | None = None
        self.clock_mhz: float | None = None
        self.no_memory: str | None = None
        self._kept: dict[str, int] = {}

    def timed(self) -> list[str]:
        return [name for name, one in self.found.items() if one.get("times")]

    def judge(self, names: Sequence[str], call_seconds: float, looks_at_memory: bool) -> None:
        """Calls each program for the first times, and keeps those whose answer is right: none if the first one's, the kernel's, is not."""
        for name in names:
            self._say(f"assay: judging {name}")
            self.found[name] = {"name": name, "outcome": "timed"}
            with self._noting(name), _memory.quick_collections() if looks_at_memory else nullcontext():
                program = self._made(name, self._problem)
                _memory.warm(program.framework)
                held = _held(program) if looks_at_memory else 0
                # The first call may compile, and fills what is kept for later ones.
                self._once(program)
                self._kept[name] = max(_held(program) - held, 0) if looks_at_memory else 0
                judged = program if self._judged is self._problem else self._made(name, self._judged)
                self._expect_right(judged, self._judged)
                took = self._once(program)
                if took > call_seconds:
                    raise _opponents.NotHere(f"one call took {took:.1f} s, and {call_seconds:g} s are allowed")
                self.found[name]["grade"] = self._grade
                self.programs[name] = program
            if name not in self.programs and name == names[0]:
                for other in names[1:]:
                    self.drop(other, "ignored", "nothing is timed beside a kernel that has no time itself")
                return

    def _expect_right(self, program: Program, problem: Problem) -> None:
        """Judges the answer to a call.

        Raises:
            _Wrong: It is wrong.
            InputMutated: Its inputs are not what they were.
        """
        program.load()
        with _bounded_memory(self._device):
            returned = program.call()
        verdicts = problem.check(program.outputs(returned), grade=self._grade)
        if not verdicts:
            raise _Wrong(_in_a_line(verdicts.failures[0]))
        program.expect_unchanged()

    def _once(self, program: Program) -> float:
        program.load()
        program.wait()
        started = time.perf_counter()
        with _bounded_memory(self._device):
            program.call()
        program.wait()
        return time.perf_counter() - started

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Notes why a program cannot go on, and lets the others do so."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except (Exception, SystemExit) as reason:
            outcome = "failed"
            if isinstance(reason, (_Wrong, OutputError, InputMutated)):
                outcome = "wrong"
            elif isinstance(reason, (_opponents.NotHere, SpecError, NotImplementedError)) or _is_out_of_memory(reason):
                outcome = "ignored"
            named = isinstance(reason, (_Wrong, _opponents.NotHere))
            said = str(reason) if named else f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
            self.drop(name, outcome, said)

    def drop(self, name: str, outcome: str, why: str) -> None:
        """Takes a program out, with all its figures."""
        self.programs.pop(name, None)
        self.found[name] = {"name": name, "outcome": outcome, "why_untimed": why}

    def time(self, seconds: float, framework: str | None) -> None:
        """Times the programs in turns, and what they are bound by among them."""
        bound, bytes_moved = _bound(self._problem, self._device, framework)
        clock: _Clock = _CudaClock(self._device) if _is_cuda(self._device, framework) else _Clock()
        taken: dict[str, list[float]] = {name: [] for name in self.programs}
        of_bound: list[float] = []
        least, most = TURNS
        started = time.perf_counter()
        for turn in range(most):
            if turn >= least:
                clock.settle()
                if time.perf_counter() - started > seconds:
                    break
            self._say(f"assay: turn {turn + 1}")
            for name, program in list(self.programs.items()):
                with self._noting(name):
                    program.load()
                    with _bounded_memory(self._device):
                        clock.time(program.call, taken[name])
            if bound is not None:
                clock.time(bound, of_bound)
        clock.settle()
        for name in self.programs:
            self.found[name]["times"] = _spread(taken[name])
        self.clock_mhz = clock.mhz()
        if of_bound:
            spread = _spread(of_bound)
            self.bound = {
                "name": "the three products of the head" if bytes_moved is None else "a copy of the logits",
                "times": spread,
                "gb_per_s": None if bytes_moved is None else bytes_moved / spread["median"] / 1e9,
                "device_gb_per_s": clock.gb_per_s(),
            }

    def measure(self) -> None:
        """Measures the memory of each program that was timed."""
        for name, program in list(self.programs.items()):
            meter = _memory.meter_of(self._device, program.framework)
            if isinstance(meter, str):
                self.no_memory = meter
                continue
            self._say(f"assay: memory of {name}")
            with self._noting(name), _bounded_memory(self._device):
                # Inputs are put in place before a call's first pass begins.
                def call(program: Program = program) -> None:
                    program.load()
                    program.call()

                found = _memory.measure(call, meter, self._unit)
                kept = self._kept[name] if self._kept[name] >= _memory.KEPT * self._unit else 0
                self.found[name]["memory"] = found._replace(kept=max(kept - found.leaked, 0))._asdict()

    def judge_again(self) -> None:
        """Judges each program once more: one that was right at first only has no time."""
        for name, program in list(self.programs.items()):
            with self._noting(name):
                if self._judged is self._problem:
                    self._expect_right(program, self._problem)
                else:
                    self._expect_right(self._made(name, self._judged), self._judged)
                    program.expect_unchanged()

    def expect_as_right(self, other: Turns, extents: Sequence[int]) -> None:
        """Drops what is wrong at another size."""
        for name, one in other.found.items():
            if one["outcome"] != "timed":
                self.drop(name, one["outcome"], f"at {'x'.join(map(str, extents))}: {one['why_untimed']}")

    def points(self, extents: Sequence[int]) -> list[dict[str, Any]]:
        """The programs at one size."""
        size = {"tokens": extents[0] * extents[1], "vocabulary": extents[-1]}
        timed = [one for one in self.found.values() if one.get("times")]
        peaks = [one.get("memory", {}).get("peak") for one in timed]
        return [
            {"program": one["name"], **size, "median": one["times"]["median"], "peak": peak}
            for one, peak in zip(timed, peaks)
        ]


class _Wrong(Exception):
    """The failure of an answer, in a line."""


def _in_a_line(failure: str) -> str:
    """A failure of the judge: the place, expected and actual value, and the error over its limit."""
    first, *rest = (" ".join(line.split()) for line in failure.strip().splitlines())
    told = [line for line in rest if line.startswith(("expected", "actual", "error"))]
    return "; ".join([first.removeprefix("FAIL kernel: "), *told])


def _held(program: Program) -> int:
    """What is held by what a program's memory is measured by, 0 where it is not."""
    meter = _memory.meter_of(program.device, program.framework)
    if isinstance(meter, str):
        return 0
    meter.release()
    return meter.held()


def _is_out_of_memory(reason: BaseException) -> bool:
    said = str(reason).lower()
    return isinstance(reason, MemoryError) or any(
        words in said for words in ("out of memory", "allocate memory", "resource_exhausted")
    )


def _spread(times: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "calls": len(ordered),
        "median": statistics.median(ordered),
        "least": ordered[0],
        "p90": ordered[max(math.ceil(0.9 * len(ordered)) - 1, 0)],
    }


def _bound(problem: Problem, device: str | None, framework: str | None) -> tuple[Callable[[], object] | None, int | None]:
    """The program that none can be faster than: a copy of the logits, with the bytes that it moves, or the products of a head. There is none
    on an accelerator that PyTorch does not drive."""
    if not is_cpu(device) and not _is_cuda(device, framework):
        return None, None
    if len(problem.shape) == 3:
        copy, size = _copy_on_gpu(problem, device) if _is_cuda(device, framework) else _copy(problem)
        return copy, 2 * size
    if framework == "torch":
        import torch

        x = problem.torch(device)
        hidden, head = x.hidden.flatten(0, 1), x.lm_head
        if device is None and problem.dtype != "f32":
            hidden, head = hidden.to(torch.float32), head.to(torch.float32)
    else:
        arrays = _frameworks.imported("numpy").asarray, problem.numpy()
        hidden, head = (arrays[0](x, "float32") for x in (arrays[1].hidden, arrays[1].lm_head))
        hidden = hidden.reshape(-1, hidden.shape[-1])
    head = head.T if problem.layout == "hv" else head

    def products() -> object:
        logits = hidden @ head.T
        return logits @ head, logits.T @ hidden

    return products, None


def _copy(problem: Problem) -> tuple[Callable[[], object], int]:
    """A copy by all threads."""
    from concurrent.futures import ThreadPoolExecutor

    np = _frameworks.imported("numpy")
    logits = np.asarray(problem.logits).reshape(-1).view(np.uint8)
    place, count = np.empty_like(logits), threads()
    place.fill(0)
    edges = [len(logits) * i // count for i in range(count + 1)]
    parts = [slice(start, end) for start, end in zip(edges, edges[1:])]
    pool = ThreadPoolExecutor(count)
    return lambda: list(pool.map(lambda part: np.copyto(place[part], logits[part]), parts)), logits.nbytes


def _copy_on_gpu(problem: Problem, device: str | None) -> tuple[Callable[[], object], int]:
    logits = problem.torch(device).logits
    place = logits.new_empty(logits.shape)
    return lambda: place.copy_(logits), logits.nbytes


def threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_cuda(device: str | None, framework: str | None) -> bool:
    return framework == "torch" and device is not None and str(device).startswith("cuda")


class _Clock:
    """The clock of the wall."""

    #: The threads of one program, which spin for a while when it has ended, are to take nothing from the next.
    _PAUSE = 0.01

    def time(self, call: Callable[[], object], times: list[float]) -> None:
        time.sleep(self._PAUSE)
        started = time.perf_counter()
        returned = call()
        times.append(time.perf_counter() - started)
        del returned

    def settle(self) -> None:
        """Waits for the times of all calls."""

    def mhz(self) -> float | None:
        return None

    def gb_per_s(self) -> float | None:
        return None


class _CudaClock(_Clock):
    """A GPU's own clock, between events. Before each call its L2 cache is written over; while that runs the host queues the call."""

    def __init__(self, device: str | None) -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)
        self._properties = torch.cuda.get_device_properties(self._device)
        self._flush = torch.empty(4 * max(self._properties.L2_cache_size, 1 << 20), dtype=torch.uint8, device=self._device)
        self._events: list[tuple[Any, Any, list[float]]] = []

    def time(self, call: Callable[[], object], times: list[float]) -> None:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        self._events.append((start, end, times))

    def settle(self) -> None:
        self._torch.cuda.synchronize(self._device)
        for start, end, times in self._events:
            times.append(start.elapsed_time(end) / 1e3)
        self._events.clear()

    def mhz(self) -> float | None:
        try:
            return float(self._torch.cuda.clock_rate(self._device))
        except Exception:
            # It is asked of NVML, which need not be there.
            return None

    def gb_per_s(self) -> float | None:
        clock, width = (getattr(self._properties, name, None) for name in ("memory_clock_rate", "memory_bus_width"))
        # Both edges of a clock in kHz, on a bus of so many bits.
        return 2 * clock * 1e3 * width / 8 / 1e9 if clock and width else None
