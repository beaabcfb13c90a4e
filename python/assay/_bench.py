"""The bench: how long a kernel takes and how much memory, in turns with opponents, once its answer is right."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from operator import methodcaller
from pathlib import Path
from typing import Any

from . import _autograd, _memory, _native, _opponents, _specs
from ._errors import AssayError, KernelFailure, ProblemError
from ._native import Problem, Spec
from ._programs import FunctionProgram, JaxProgram, Program, TorchProgram
from ._turns import Turns, logits_bytes, threads

# pytest shows the test's own frames alone.
__tracebackhide__ = methodcaller("errisinstance", AssayError)

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

    def __init__(self, found: dict[str, Any]) -> None:
        self._data = found
        self._json = json.dumps(found, indent=1)

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
        """The peak of one call of each program beyond its inputs, with what it keeps, in units of the logits' size, by its name."""
        unit = self._data["logits_bytes"]
        held = {each["name"]: each["memory"] for each in self._data["programs"] if each.get("memory")}
        return {name: (memory["peak"] + memory["kept"]) / unit for name, memory in held.items()}

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
            raise KernelFailure(f"{self._data['programs'][0]['why_untimed']}\n{self}")


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
    call_seconds: float = 60.0,
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

    Each program's last answer is judged as its first is, and its inputs must be what they were: what is wrong at any time has no time.

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
        call_seconds: The seconds of one call from which on a program is too slow to be timed. A call is not interrupted.
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
    for name, value, least in (("seconds", seconds, 0.0), ("call_seconds", call_seconds, 0.0)):
        if not isinstance(value, (int, float)) or not least <= value < math.inf:
            raise AssayError(f"{name}: got {value!r}, expected a number of seconds ≥ 0")
    if grade not in ("standard", "exact"):
        raise AssayError(f"grade: got {grade!r}, expected 'standard' or 'exact'")
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise ProblemError(f"`seed`: got {seed!r}, expected an integer from 0 to 2⁶⁴ − 1")
    for name, listed in (("tokens", tokens), ("vocabularies", vocabularies)):
        if not isinstance(listed, (list, tuple)) or not all(type(size) is int and 0 < size <= 1 << 31 for size in listed):
            raise AssayError(f"{name}: got {listed!r}, expected a list of sizes, such as [128, 512]")
    parsed = _specs.parse(spec, spec_options, bench)
    extents = _extents(shape)
    others = _sizes(extents, tokens, vocabularies)
    for size in [extents, *others]:
        _expect_room(size, dtype)
    programs = {_name(fn): fn}
    for one in against:
        name = one if isinstance(one, str) else _name(one)
        if name in programs:
            raise AssayError(f"against: got {name!r} twice, expected names that differ, the kernel's among them")
        if not callable(one):
            _opponents.expect(one)
        programs[name] = one  # type: ignore[assignment]
    shown = sys.stderr.isatty() if progress is None else progress

    def say(words: str) -> None:
        if shown:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

    def made(name: str, problem: Problem) -> Program:
        one: Any = programs[name]
        if isinstance(one, str):
            return _opponents.opponent(one, problem, device, inplace, framework)
        if framework == "torch":
            return TorchProgram(one, problem, device, inplace)
        return JaxProgram(one, problem, device, inplace) if framework == "jax" else FunctionProgram(one, problem, device)

    def drawn(size: Sequence[int]) -> Problem:
        given: dict[str, Any] = {} if framework is not None else {"device": device, "inplace": inplace}
        return _native.unmasked_problem(parsed, list(size), dtype, layout=layout, seed=seed, **given)

    def turns(size: Sequence[int], names: Sequence[str], seconds: float) -> Turns:
        say(f"assay: {'x'.join(map(str, size))} {dtype}")
        found = Turns(drawn, size, made, device, grade, say)
        found.judge(names, call_seconds, memory)
        if names[0] in found.programs:
            found.time(seconds, framework)
            if memory:
                found.measure()
            found.judge_again()
        return found

    try:
        main = turns(extents, list(programs), seconds)
        loss = " ".join([str(spec) if isinstance(spec, (str, os.PathLike)) else "as given", *_words(spec_options)])
        sizes: list[dict[str, Any]] = []
        for size in others:
            if not main.timed():
                break
            at_size = main if size == extents else turns(size, main.timed(), seconds / 4)
            main.expect_as_right(at_size, size)
            sizes += at_size.points(size)
        found = _figures(main, _name(fn), loss, extents, dtype, device)
        timed = main.timed()
        found["sizes"] = [point for point in sizes if point["program"] in timed]
        found["growths"] = _growths(found["sizes"], extents)
        return ProgramBench(found)
    finally:
        say("")


def _name(fn: Any) -> str:
    """The name of a function, as reports can show it."""
    name = getattr(fn, "__name__", None)
    return (name if isinstance(name, str) else type(fn).__name__).encode(errors="replace").decode()


def _words(options: dict[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def _extents(shape: str) -> list[int]:
    parts = shape.split("x") if isinstance(shape, str) else []
    if len(parts) not in (3, 4) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ProblemError(
            f"`shape`: got {shape!r}, expected extents such as '1x256x151936', or with a head '1x256x64x151936'"
        )
    return [int(part) for part in parts]


def _expect_room(extents: Sequence[int], dtype: str) -> None:
    """Checks that a problem fits in memory with what one call of a plain program makes.

    Raises:
        ProblemError: It does not, or the dtype is none of logits.
    """
    if dtype not in ("f32", "bf16", "f16"):
        raise ProblemError(f"`dtype`: got {dtype!r}, expected f32, bf16 or f16")
    size, count = logits_bytes(extents, dtype), _memory.logits_count(extents)
    # It is drawn in f64; a call has a copy of it, dlogits, and f32 copies of 16-bit logits.
    needed = size + max(8 * count, 2 * size + (8 * count if dtype != "f32" else 0))
    free = _native.available_bytes()
    if free is not None and needed > free:
        raise ProblemError(
            f"`shape`: got {'x'.join(map(str, extents))} in {dtype}, whose calls take {needed / 1e9:.1f} GB at least, expected at most the "
            f"{free / 1e9:.1f} GB that are free"
        )


def _figures(turns: Turns, kernel: str, loss: str, extents: Sequence[int], dtype: str, device: str | None) -> dict[str, Any]:
    """The bench as `ProgramBench` of the library has it."""
    return {
        "kernel": kernel,
        "loss": loss,
        "shape": list(extents),
        "dtype": dtype,
        "device": "cpu" if device is None else str(device),
        "versions": _versions(),
        "threads": threads(),
        "clock_mhz": turns.clock_mhz,
        "logits_bytes": logits_bytes(extents, dtype),
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


def _sizes(extents: list[int], tokens: Sequence[int], vocabularies: Sequence[int]) -> list[list[int]]:
    """The extents of every size that is asked for, each once, and the problem's own where any is."""
    sizes = [[1, count, *extents[2:]] for count in tokens if count != extents[0] * extents[1]]
    sizes += [[*extents[:-1], vocab] for vocab in vocabularies if vocab != extents[-1]]
    distinct = [list(size) for size in dict.fromkeys(tuple(size) for size in sizes)]
    return [*distinct, extents] if distinct else []


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
