"""Campaigns: a function of the user's before the library's engine, which judges, shrinks and names."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _native, _specs, _worker
from ._errors import AssayError
from ._native import Problem, Spec
from ._report import Report

Kernel = Callable[[Problem], Mapping[str, Any]]

# Set by the pytest plugin from its options, for what `assay.kernel` runs.
overrides: dict[str, Any] = {}


def check(
    fn: Kernel,
    spec: str | os.PathLike[str] | Spec = "trl",
    *,
    dtypes: Sequence[str] = ("bf16", "f32"),
    cases: int = 200,
    seconds: float | None = None,
    seed: int = 0,
    shapes: str | Sequence[str] = "auto",
    regimes: Sequence[str] | None = None,
    wide: int = 1,
    lm_head: bool = False,
    packed: bool = False,
    grade: str = "standard",
    allow: Sequence[str] = (),
    outputs: Sequence[str] | None = None,
    device: str | None = None,
    inplace: bool = False,
    isolate: bool = False,
    timeout: float = 30.0,
    shrink: bool = True,
    power: bool = True,
    repro_dir: str | os.PathLike[str] | None = ".assay",
    progress: bool | None = None,
    **spec_options: object,
) -> Report:
    """Judges `fn` on generated problems, and says what is wrong with it: each cause once, on a problem as small as it gets.

        def my_loss(problem):
            x = problem.torch()                      # or .jax(), .numpy()
            ...
            return {"loss": loss, "dlogits": x_grad, "logp": logp}

        print(assay.check(my_loss, "trl", loss_type="dapo", beta=0.04))

    Ctrl-C ends it early, and the report says what was found so far.

    Args:
        fn: Takes a `Problem` and returns its outputs by name, as `Problem.check` takes them.
        spec: The loss, as `assay.spec` takes it, with its options.
        dtypes: Of logits, or of hidden states and LM head: "f32", "bf16", "f16".
        cases: How many problems.
        seconds: After which no problem more is begun.
        seed: Of every draw.
        shapes: "many", "few" for kernels that are compiled for each shape, or a list of "BxTxV". "auto" is "few" for what
            uses JAX or Triton, and else "many".
        regimes: How logits are drawn; all in which every logp is a number if none are named.
        wide: How many of the problems, the last ones, have a vocabulary of 151,936.
        lm_head: Problems have hidden states and an LM head instead of logits.
        packed: The sequences of each problem are packed into one row, `[1,N,V]`, and `problem.cu_seqlens` says where each ends: the
            B of a shape, in B·T tokens, of lengths that differ, some without a token, and tokens behind the last.
        grade: "standard", as textbook formulas are, carefully evaluated in f32, or "exact".
        allow: Names of what may fail, which is printed and counted: causes, mutants or edges.
        outputs: Which of the outputs are judged; all that are returned if none are named.
        device: Where `problem.torch()` and `problem.jax()` put their arrays.
        inplace: Logits are a copy that may be written to, and dlogits may be that memory.
        isolate: `fn` runs in a process of its own, whose crash or hang is a cause. It must be importable.
        timeout: Seconds for one answer of that process.
        shrink: Whether problems that fail are made smaller.
        power: Whether it is counted how many of the library's wrong kernels this campaign would catch.
        repro_dir: Where problems that failed are kept, to be tried first the next time; None keeps none.
        progress: Whether a line on stderr says how far it is; on a terminal if not told.

    Raises:
        SpecError: As `assay.spec`.
        ProblemError: A dtype, extent or regime that there is not, or that this spec cannot have.
        AssayError: A name in `allow`, a grade, or a function that cannot be found by another process.
    """
    if not callable(fn):
        raise AssayError(f"fn: got {type(fn).__name__}, expected a function of a problem")
    if shapes == "auto":
        shapes = "few" if compiles(fn) else "many"
    campaign = _native.Campaign(
        kernel=getattr(fn, "__name__", type(fn).__name__),
        spec=_specs.of(spec, spec_options),
        dtypes=list(dtypes),
        cases=cases,
        seconds=seconds,
        seed=seed,
        shapes=_specs.shapes(shapes),
        regimes=None if regimes is None else list(regimes),
        wide=wide,
        lm_head=lm_head,
        packed=packed,
        grade=grade,
        allow=list(allow),
        shrink=shrink,
        power=power,
        repros=repro_dir,
    )
    shown = sys.stderr.isatty() if progress is None else progress
    line = _line if shown else None
    named = None if outputs is None else list(outputs)
    try:
        if isolate:
            return Report(*campaign.run_isolated(_worker.command(fn, named, device, inplace), timeout, line))
        return Report(*campaign.run(fn, named, device, inplace, line))
    finally:
        if shown:
            print(end="\r\033[K", file=sys.stderr)


def _line(tried: int, cases: int, failed: int) -> None:
    """How far it is, over the line of before."""
    print(f"\r\033[Kassay: {tried} of {cases} problems, {failed} failed", end="", file=sys.stderr, flush=True)


def compiles(fn: object) -> bool:
    """Whether `fn`, or a function that it names, uses JAX or Triton: what compiles a program for each shape."""
    seen: set[int] = set()
    waiting = [fn]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        home = found.__name__ if isinstance(found, types.ModuleType) else type(found).__module__
        if home.split(".")[0] in ("jax", "jaxlib", "triton"):
            return True
        found = getattr(found, "__func__", found)
        if isinstance(found, types.FunctionType):
            names = found.__code__.co_names
            # `problem.jax()` names it too.
            if "jax" in names:
                return True
            waiting.extend(found.__globals__[name] for name in names if name in found.__globals__)
            waiting.extend(cell.cell_contents for cell in found.__closure__ or () if _is_filled(cell))
    return False


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def kernel(spec: str | os.PathLike[str] | Spec = "trl", **options: Any) -> Callable[[Kernel], Callable[[], None]]:
    """Makes a test of a kernel: a function without parameters that raises what `Report.raise_for_failure` does.

        @assay.kernel("trl", beta=0.04)
        def test_my_loss(problem):
            return my_loss(problem.torch())

    pytest's options `--assay-cases`, `--assay-seed` and `--assay-seconds` stand before those given here.

    Args:
        spec: As `assay.check`.
        options: As `assay.check`.
    """

    def decorate(fn: Kernel) -> Callable[[], None]:
        def test() -> None:
            __tracebackhide__ = True
            report = check(fn, spec, **(options | {"progress": False} | overrides))
            reports.append((fn, report))
            report.raise_for_failure()

        test.__name__, test.__qualname__ = fn.__name__, fn.__qualname__
        test.__module__, test.__doc__ = fn.__module__, fn.__doc__
        return test

    return decorate


# What tests made by `kernel` found, until the pytest plugin takes it.
reports: list[tuple[Kernel, Report]] = []
