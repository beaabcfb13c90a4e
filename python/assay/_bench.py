"""The bench: how long a kernel takes and how much memory, in turns with opponents, once its answer is right."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from operator import methodcaller
from pathlib import Path
from typing import Any

from . import _autograd, _frameworks, _memory, _native, _opponents, _specs
from ._errors import AssayError, KernelFailure, OutputError, ProblemError
from ._native import Problem, Spec
from ._programs import FunctionProgram, JaxProgram, Program, TorchProgram

# pytest shows the test's own frames alone.
__tracebackhide__ = methodcaller("errisinstance", AssayError)

#: The turns of a program: at least and at most so many.
TURNS = (5, 30)
#: The packages whose versions a bench names where they run.
_PACKAGES = ("torch", "jax", "numpy", "trl", "liger-kernel", "triton")


class ProgramBench:
    """The figures that `assay.bench` measured. Printed, it is the table.

    >>> import assay, jax
    >>> def logp(logits, ids):
    ...     return jax.numpy.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)[..., 0]
    >>> found = assay.bench(logp, "logp", entropy=False, shape="1x8x512", framework="jax", seconds=0.0, progress=False)
    >>> isinstance(found, assay.ProgramBench), found.median["logp"] > 0
    (True, True)
    """

    def __init__(self, found: dict[str, Any], wrong: str | None) -> None:
        self._data = found
        self._json = json.dumps(found, indent=1)
        self._wrong = wrong

    @property
    def passed(self) -> bool:
        """Whether the kernel's answers were right, so that it was timed."""
        return self._data["programs"][0].get("times") is not None

    @property
    def median(self) -> dict[str, float]:
        """The median time of each program that was timed, in seconds, by its name."""
        return {each["name"]: each["times"]["median"] for each in self._data["programs"] if each.get("times")}

    @property
    def memory(self) -> dict[str, float]:
        """The peak of one call of each program beyond its inputs, in units of the logits' size, by its name."""
        unit = self._data["logits_bytes"]
        return {each["name"]: each["memory"]["peak"] / unit for each in self._data["programs"] if each.get("memory")}

    @property
    def leaks(self) -> dict[str, int]:
        """The bytes that each call leaves behind, by the name of the program; empty where none does."""
        all_of_them = {each["name"]: each["memory"]["leaked"] for each in self._data["programs"] if each.get("memory")}
        return {name: leaked for name, leaked in all_of_them.items() if leaked}

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return _native.programs_text(self._json).rstrip()

    def _repr_html_(self) -> str:
        from html import escape

        return f'<iframe srcdoc="{escape(_native.programs_page(self._json))}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the figures as JSON, which `assay report` takes too, and writes them to `path` if one is given."""
        if path is not None:
            Path(path).write_text(self._json, encoding="utf-8")
        return self._json

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the figures as an HTML page to `path`."""
        Path(path).write_text(_native.programs_page(self._json), encoding="utf-8")

    def to_markdown(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as Markdown to `path`."""
        Path(path).write_text(_native.programs_markdown(self._json), encoding="utf-8")

    def raise_for_failure(self) -> None:
        """Raises an error unless the kernel was timed.

        Raises:
            KernelFailure: Its answer is wrong, or it did not run.
        """
        if not self.passed:
            raise KernelFailure(self._wrong or repr(self))


def bench(
    fn: Callable[..., Any],
    spec: str | os.PathLike[str] | Spec = "trl",
    *,
    shape: str = "1x256x151936",
    dtype: str = "f32",
    device: str | None = None,
    against: Sequence[str | Callable[..., Any]] = (),
    framework: str | None = "torch",
    layout: str = "vh",
    inplace: bool = False,
    grade: str = "standard",
    tokens: Sequence[int] = (),
    vocabularies: Sequence[int] = (),
    memory: bool = True,
    seconds: float = 20.0,
    limit: float = 60.0,
    seed: int = 0,
    progress: bool | None = None,
    **spec_options: object,
) -> ProgramBench:
    """Times a kernel beside opponents, forward and backward, and measures its memory. A program whose answer is wrong gets no time.

        >>> import assay, jax, jax.numpy as jnp
        >>> def loss(x):
        ...     logp = jnp.take_along_axis(jax.nn.log_softmax(x.logits), x.ids[..., None], -1)[..., 0]
        ...     return -jnp.where(x.mask, logp * x.advantages[:, None], 0.0).sum() / x.mask.sum()
        >>> spec = assay.spec(objective="policy_gradient")
        >>> found = assay.bench(loss, spec, shape="1x8x512", framework="jax", seconds=0.0, progress=False)
        >>> found.passed, list(found.median)
        (True, ['loss'])

    In PyTorch:

        def loss(x):                                  # x.logits needs a gradient
            return my_grpo_loss(x.logits, x.ids, x.advantages, x.mask, x.old_logp)

        print(assay.bench(loss, "trl", beta=0.04, against=["eager", "torch.compile", "trl", "assay"]))

    All programs are given one problem in which every token counts, take turns, and are judged first. Beside them runs what no program can be
    faster than: a copy of the logits, or with a head its three products. On a CPU a time is that of the wall; on a GPU that between two
    events, with a cold L2 cache and calls queued back to back.

    Memory is the peak of one call beyond its inputs: on a CPU that of the process, whose high-water mark is set back before the call, on a
    GPU that of PyTorch's allocator. What the first call leaves behind is *kept*, and what each further call does is a leak.

    Args:
        fn: With `framework` a function as `assay.check_loss` takes it, or under the spec "logp" one as `assay.check_logp` takes it; with
            `framework=None` one of a problem that returns its outputs, as `assay.check` takes it.
        spec: The loss, as `assay.spec` takes it, with its options.
        shape: The extents, "BxTxV", or with hidden states and a head "BxTxHxV".
        dtype: "f32", "bf16" or "f16", of logits, or of hidden states and head.
        device: A device of the framework; by default the CPU.
        against: Opponents: other functions as `fn` is, or "eager", "torch.compile", "trl", "liger", "jax", "xla" and "assay". One that
            is not installed, or has no such loss, is ignored by name.
        framework: "torch", "jax" or None.
        layout: The layout of the head, "vh" for `[V,H]` or "hv" for `[H,V]`.
        inplace: Whether logits may be written to, in JAX by donation; they are put in place again before each call, which is not timed.
        grade: What answers are held to, "standard" or "exact".
        tokens: Other numbers of tokens at which all are timed too, and how time grows with them.
        vocabularies: Other sizes of the vocabulary.
        memory: Whether memory is measured, in calls of its own.
        seconds: The time after which no further turn begins, once there were five; at most there are 30.
        limit: The seconds of one call from which on a program is too slow to be timed.
        seed: The seed of the problem.
        progress: Whether a line on stderr says what is done; by default on a terminal.

    Raises:
        SpecError, ProblemError: The spec, a shape or dtype is invalid, or the problem does not fit in memory.
        AssayError: An opponent, the framework or the device is unknown.
    """
    if not callable(fn):
        raise AssayError(f"fn: got {type(fn).__name__}, expected a function")
    if framework not in ("torch", "jax", None):
        raise AssayError(f"framework: got {framework!r}, expected 'torch', 'jax' or None, for a function of a problem")
    if framework is not None:
        _autograd.expect_options(framework, (framework,), {"device": device})
    parsed = _specs.parse(spec, spec_options, bench)
    own_name = getattr(fn, "__name__", type(fn).__name__)
    asked: dict[str, str | Callable[..., Any]] = {own_name: fn}
    for one in against:
        name = one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__)
        if name in asked:
            raise AssayError(f"against: got {name!r} twice, expected names that differ, the kernel's among them")
        if not callable(one):
            _opponents.expect(one)
        asked[name] = one
    shown = sys.stderr.isatty() if progress is None else progress

    def say(words: str) -> None:
        if shown:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

    def made(name: str, problem: Problem) -> Program:
        one = asked[name]
        if isinstance(one, str):
            return _opponents.opponent(one, problem, device, inplace, framework)
        if framework == "torch":
            return TorchProgram(one, problem, device, inplace)
        return JaxProgram(one, problem, device, inplace) if framework == "jax" else FunctionProgram(one, problem)

    def drawn(extents: Sequence[int]) -> Problem:
        return _problem(parsed, extents, dtype, layout, seed)

    extents = _extents(shape)
    try:
        say(f"assay: drawing {shape} {dtype}")
        main = _Turns(drawn, extents, list(asked), made, grade, limit, say)
        main.judge()
        if main.found[own_name].get("why_untimed"):
            return ProgramBench(_figures(main, own_name, spec, extents, dtype, device), main.found[own_name]["why_untimed"])
        main.time(seconds, device, framework)
        if memory:
            main.measure(device, framework)
        found = _figures(main, own_name, spec, extents, dtype, device)
        for size in _sizes(extents, tokens, vocabularies):
            say(f"assay: {'x'.join(map(str, size))}")
            turns = main if size == list(extents) else _Turns(drawn, size, main.timed(), made, grade, limit, say)
            if turns is not main:
                turns.judge()
                turns.time(seconds / 4, device, framework)
                if memory:
                    turns.measure(device, framework)
            found["sizes"] += turns.points(size)
        found["growths"] = _growths(found["sizes"], extents)
        return ProgramBench(found, None)
    finally:
        say("")


def _extents(shape: str) -> list[int]:
    parts = shape.split("x") if isinstance(shape, str) else []
    if len(parts) not in (3, 4) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ProblemError(
            f"`shape`: got {shape!r}, expected extents such as '1x256x151936', or with a head '1x256x64x151936'"
        )
    return [int(part) for part in parts]


def _problem(spec: Spec, extents: Sequence[int], dtype: str, layout: str, seed: int) -> Problem:
    """Draws the problem, all of whose tokens count.

    Raises:
        ProblemError: It does not fit in memory with what one call of a plain program makes.
    """
    size, count = _logits_bytes(extents, dtype), _memory.logits_count(extents)
    # It is drawn in f64; a call has a copy of it, dlogits, and f32 copies of 16-bit logits.
    needed = size + max(8 * count, 2 * size + (8 * count if dtype != "f32" else 0))
    free = _free_memory()
    if free is not None and needed > free:
        raise ProblemError(
            f"`shape`: got {'x'.join(map(str, extents))} in {dtype}, whose calls take {needed / 1e9:.1f} GB at least, expected at most the "
            f"{free / 1e9:.1f} GB that are free"
        )
    return _native.unmasked_problem(spec, list(extents), dtype, layout=layout, seed=seed)


def _logits_bytes(extents: Sequence[int], dtype: str) -> int:
    return _memory.logits_count(extents) * (4 if dtype == "f32" else 2)


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Lets the process have what memory is free and no more, so that a program that needs more gets an error instead of a kill."""
    import resource

    free = _free_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if free is None:
        yield
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    bound = mapped + free
    resource.setrlimit(resource.RLIMIT_AS, (bound if soft == resource.RLIM_INFINITY else min(soft, bound), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


#: The extents `[B,T]` of the part of a problem with a head that is judged: the reference takes minutes for more.
_JUDGED = [2, 3]


class _Turns:
    """Programs that take turns on one problem."""

    def __init__(
        self,
        drawn: Callable[[Sequence[int]], Problem],
        extents: Sequence[int],
        names: Sequence[str],
        made: Callable[[str, Problem], Program],
        grade: str,
        limit: float,
        say: Callable[[str], None],
    ) -> None:
        self.problem = drawn(extents)
        self._judged = self.problem if len(extents) == 3 else drawn([*_JUDGED, *extents[2:]])
        self._made, self._grade, self._limit, self._say = made, grade, limit, say
        self._programs: dict[str, Program] = {}
        self.found: dict[str, dict[str, Any]] = {name: {"name": name} for name in names}
        self.bound: dict[str, Any] | None = None
        self.clock: float | None = None
        self.no_memory: str | None = None

    def timed(self) -> list[str]:
        return [name for name, one in self.found.items() if one.get("times")]

    def judge(self) -> None:
        """Calls each program for the first time, and keeps those whose answer is right."""
        for name, one in self.found.items():
            self._say(f"assay: judging {name}")
            try:
                with _bounded_memory():
                    judged = self._made(name, self._judged)
                    judged.load()
                    verdicts = self._judged.check(judged.outputs(judged.call()), grade=self._grade)
                    program = judged if self._judged is self.problem else self._made(name, self.problem)
                    # The first call may compile.
                    took = [self._once(program), self._once(program)][1]
            except _opponents.NotHere as reason:
                one["why_untimed"] = str(reason)
            except AssayError as reason:
                one |= {"why_untimed": _in_a_line(reason), "is_wrong": isinstance(reason, OutputError)}
            except Exception as reason:
                one |= {"why_untimed": _in_a_line(reason), "is_wrong": not _is_out_of_memory(reason)}
            else:
                if not verdicts:
                    one |= {"why_untimed": _failure_in_a_line(verdicts.failures[0]), "is_wrong": True}
                elif took > self._limit:
                    one["why_untimed"] = f"one call took {took:.1f} s, and the limit is {self._limit:g} s"
                else:
                    one["grade"] = self._grade
                    self._programs[name] = program

    def _once(self, program: Program) -> float:
        program.load()
        started = time.perf_counter()
        program.call()
        return time.perf_counter() - started

    def time(self, seconds: float, device: str | None, framework: str | None) -> None:
        """Times the programs in turns, and what they are bound by among them."""
        bound, bytes_moved = _bound(self.problem, device, framework)
        clock: _Clock = _CudaClock(device) if _is_cuda(device, framework) else _Clock()
        taken: dict[str, list[float]] = {name: [] for name in self._programs}
        of_bound: list[float] = []
        least, most = TURNS
        started = time.perf_counter()
        for turn in range(most):
            if turn >= least and time.perf_counter() - started > seconds:
                break
            self._say(f"assay: turn {turn + 1}")
            for name, program in self._programs.items():
                program.load()
                clock.time(program.call, taken[name])
            clock.time(bound, of_bound)
        clock.settle()
        for name, times in taken.items():
            self.found[name]["times"] = _spread(times)
        self.clock = clock.mhz()
        spread = _spread(of_bound)
        is_copy = bytes_moved is not None
        self.bound = {
            "name": "a copy of the logits" if is_copy else "the three products of the head",
            "times": spread,
            "gb_per_s": bytes_moved / spread["median"] / 1e9 if bytes_moved is not None else None,
            "device_gb_per_s": clock.gb_per_s(),
        }

    def measure(self, device: str | None, framework: str | None) -> None:
        """Measures the memory of each program that was timed."""
        meter = _memory.meter_of(device, framework)
        if isinstance(meter, str):
            self.no_memory = meter
            return
        for name, program in self._programs.items():
            self._say(f"assay: memory of {name}")
            # Inputs are put in place before a call's first pass begins.
            found = _memory.measure(
                lambda program=program: (program.load(), program.call()),  # type: ignore[misc]
                meter,
                _logits_bytes(self.problem.shape, self.problem.dtype),
            )
            self.found[name]["memory"] = found._asdict()

    def points(self, extents: Sequence[int]) -> list[dict[str, Any]]:
        """The programs at one size."""
        size = {"tokens": extents[0] * extents[1], "vocabulary": extents[-1]}
        timed = [one for one in self.found.values() if one.get("times")]
        peaks = [one.get("memory", {}).get("peak") for one in timed]
        return [
            {"program": one["name"], **size, "median": one["times"]["median"], "peak": peak}
            for one, peak in zip(timed, peaks)
        ]


def _failure_in_a_line(failure: str) -> str:
    """A failure of the judge: the place, expected and actual value, and the error over its limit."""
    first, *rest = (" ".join(line.split()) for line in failure.strip().splitlines())
    told = [line for line in rest if line.startswith(("expected", "actual", "error"))]
    return "; ".join([first.removeprefix("FAIL kernel: "), *told])


def _in_a_line(reason: Exception) -> str:
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"


def _is_out_of_memory(reason: Exception) -> bool:
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


def _bound(problem: Problem, device: str | None, framework: str | None) -> tuple[Callable[[], object], int | None]:
    """What no program can be faster than: a copy of the logits, with the bytes that it moves, or the products of a head."""
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
    place, threads = np.empty_like(logits), _threads()
    place.fill(0)
    edges = [len(logits) * i // threads for i in range(threads + 1)]
    parts = [slice(start, end) for start, end in zip(edges, edges[1:])]
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda part: np.copyto(place[part], logits[part]), parts)), logits.nbytes


def _copy_on_gpu(problem: Problem, device: str | None) -> tuple[Callable[[], object], int]:
    logits = problem.torch(device).logits
    place = logits.new_empty(logits.shape)
    return lambda: place.copy_(logits), logits.nbytes


def _threads() -> int:
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


def _figures(
    turns: _Turns, kernel: str, spec: object, extents: Sequence[int], dtype: str, device: str | None
) -> dict[str, Any]:
    """The bench as `ProgramBench` of the library has it."""
    return {
        "kernel": kernel,
        "loss": spec if isinstance(spec, str) else "as given",
        "shape": list(extents),
        "dtype": dtype,
        "device": "cpu" if device is None else str(device),
        "versions": _versions(),
        "threads": _threads(),
        "clock_mhz": turns.clock,
        "logits_bytes": _logits_bytes(extents, dtype),
        "bound": turns.bound,
        "programs": list(turns.found.values()),
        "sizes": [],
        "growths": [],
        "no_memory": turns.no_memory,
    }


def _versions() -> list[str]:
    """The packages that were imported, as a record needs them."""
    found = []
    for package in _PACKAGES:
        module = package.replace("liger-kernel", "liger_kernel")
        if module in sys.modules:
            try:
                found.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                continue
    return found


def _sizes(extents: Sequence[int], tokens: Sequence[int], vocabularies: Sequence[int]) -> list[list[int]]:
    """The extents of every size that is asked for, the problem's own among them where any is."""
    sizes = [[1, count, *extents[2:]] for count in tokens] + [[*extents[:-1], vocab] for vocab in vocabularies]
    return [*sizes, list(extents)] if sizes else []


def _growths(points: Sequence[dict[str, Any]], extents: Sequence[int]) -> list[dict[str, Any]]:
    """The exponents of time over each size, by least squares over logarithms."""
    own = {"tokens": extents[0] * extents[1], "vocabulary": extents[-1]}
    growths = []
    for size, other in (("tokens", "vocabulary"), ("vocabulary", "tokens")):
        for program in dict.fromkeys(point["program"] for point in points):
            among = [point for point in points if point["program"] == program and point[other] == own[other]]
            if len({point[size] for point in among}) > 1:
                line = statistics.linear_regression(
                    *zip(*((math.log(point[size]), math.log(point["median"])) for point in among))
                )
                growths.append({"program": program, "size": size, "exponent": line.slope, "sizes": len(among)})
    return growths
