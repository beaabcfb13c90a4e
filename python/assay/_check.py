"""Campaigns: `check` runs a user's function on generated problems by the library's engine, which judges, shrinks and names causes."""

from __future__ import annotations

import json
import math
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

from . import _memory, _native, _ranks, _specs, _worker
from ._autograd import SCORES, WAYS
from ._errors import AssayError
from ._native import Problem, Spec
from ._report import Report

# pytest shows the test's own frames alone.
__tracebackhide__ = methodcaller("errisinstance", AssayError)

Kernel = Callable[..., Mapping[str, Any]]

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
    wide: int | None = None,
    lm_head: bool = False,
    layout: str = "vh",
    rounds_logits: bool = False,
    packed: bool = False,
    masked_garbage: bool | None = None,
    grade: str = "standard",
    allow: Sequence[str] = (),
    outputs: Sequence[str] | None = None,
    device: str | None = None,
    inplace: bool = False,
    isolate: bool = False,
    ranks: int | None = None,
    cut: str = "vocabulary",
    timeout: float = 30.0,
    shrink: bool = True,
    power: bool = True,
    invariant: bool | str | Sequence[str] = False,
    variants: Sequence[Kernel] = (),
    judged: bool = True,
    memory: float | None = None,
    repro_dir: str | os.PathLike[str] | None = ".assay",
    progress: bool | None = None,
    **spec_options: object,
) -> Report:
    """Judges `fn` on generated problems, and reports each cause of failures once, on a problem as small as possible.

        >>> import assay, numpy as np
        >>> def zeros(problem):
        ...     logits = problem.numpy().logits
        ...     return {"loss": np.zeros((), np.float32), "dlogits": np.zeros_like(logits)}
        >>> options = dict(dtypes=["f32"], shapes=["2x3x7"], cases=4, wide=0, power=False, repro_dir=None)
        >>> report = assay.check(zeros, "trl", beta=0.04, progress=False, **options)
        >>> report.passed
        False

    A kernel that is to be judged has this form:

        def my_loss(problem):
            x = problem.torch()                      # or .jax(), .numpy()
            ...
            return {"loss": loss, "dlogits": x_grad, "logp": logp}

        print(assay.check(my_loss, "trl", loss_type="dapo", beta=0.04))

    Ctrl-C ends the campaign early, and the report has what was found until then.

    Args:
        fn: Takes a `Problem` and returns its outputs by name, as `Problem.check` takes them.
        spec: The loss, as `assay.spec` takes it, with its options.
        dtypes: The dtypes of logits, or of hidden states and LM head: "f32", "bf16", "f16".
        cases: The number of problems.
        seconds: The time after which no further problem is begun; None: no limit.
        seed: The seed of every draw.
        shapes: "many", "few" for kernels that are compiled for each shape, or a list of "BxTxV". "auto" is "few" for a function
            that uses JAX or Triton, and else "many".
        regimes: The ways of drawing logits; by default all in which every logp is a number.
        wide: The number of problems, the last ones, with a vocabulary of 151,936; by default one for each dtype and two at least, but
            no more than a tenth of `cases`.
        lm_head: Whether problems have hidden states and an LM head instead of logits.
        layout: The layout of the LM head, "vh" for `[V,H]` or "hv" for `[H,V]`.
        rounds_logits: Whether the logits of the LM head are rounded to its dtype.
        packed: Whether the sequences of each problem are packed into one row, `[1,N,V]`, and `problem.cu_seqlens` says where each ends: the
            B of a shape, in B·T tokens, of lengths that differ, some without a token, and tokens after the last.
        masked_garbage: Whether masked tokens hold garbage in a quarter of the problems, NaN and the id −100, which must not reach an
            output. By default they hold NaN and ids of the vocabulary, and a kernel that reads them gets a note; False deals none.
        grade: "standard", as textbook formulas are, carefully evaluated in f32, or "exact".
        allow: The names of causes, mutants or edges that may fail; they are printed and counted.
        outputs: The names of the outputs that are judged; by default all that are returned.
        device: The device on which `problem.torch()` and `problem.jax()` put their arrays.
        inplace: Whether logits are a copy that may be written to; dlogits may then be that memory.
        isolate: Whether `fn` runs in a process of its own, whose crash or hang is a cause. It must be importable.
        ranks: The number of processes that `fn` runs in, each with a share of every problem: `fn(problem, shard=shard)` is given the whole
            problem and an `assay.Shard`, and returns the outputs of its share. What every rank has must have the same bits on all. A
            function that uses PyTorch finds its default process group made, of backend gloo.
        cut: The axis that the ranks share: "vocabulary", "batch" or "tokens".
        timeout: The seconds for one answer of that process.
        shrink: Whether problems that fail are made smaller.
        power: Whether the campaign counts how many of the library's wrong kernels it would catch.
        invariant: Whether a token must have the same numbers in another call: True asks each relation by its usual grade, "bits" and "limits"
            all of them by that grade, a list of names some: "repeat", "order", "neighbours", "batch", "length", "packing", "vocabulary",
            "alignment", "chunk", "ranks".
        variants: Other forms of `fn`, such as with other chunks, that must give the numbers of `fn`: the relation "chunk" calls them.
        judged: Whether answers are judged. With False the relations of `invariant` alone are asked, and need no reference.
        memory: The most that a call may hold beside its inputs, in units of the logits' size: the peak of its forward and backward pass,
            with what is kept from the first call on. It is measured before the campaign, on a problem with a vocabulary of 151,936 for each
            dtype, or on the largest of listed `shapes`; more is the cause `memory`, and what further calls leave behind the cause `leak`.
        repro_dir: The folder of problems that failed, which are tried first the next time; None keeps none.
        progress: Whether a line on stderr shows the progress; by default on a terminal.

    Raises:
        SpecError: The spec is invalid, as for `assay.spec`.
        ProblemError: A dtype, extent or regime is unknown, or this spec cannot have it.
        AssayError: A name in `allow` or a grade is unknown, or another process cannot import the function.
    """
    if not callable(fn):
        raise AssayError(f"fn: got {type(fn).__name__}, expected a function of a problem")
    if shapes == "auto":
        shapes = "few" if compiles(fn) else "many"
    asked = _relations(invariant, variants)
    if not judged and invariant == "limits":
        raise AssayError('invariant: got "limits", expected bits or relations with judged=False: limits need the judge')
    if not judged and asked is None:
        raise AssayError("judged: got False, expected True, or `invariant` to say what is asked instead")
    shared = None if ranks is None else _ranks.expect(ranks, cut)
    if variants and (isolate or shared):
        raise AssayError("variants: got functions, expected none with `isolate` or `ranks`: another process imports one function")
    kernel = with_variants(fn, variants) if variants else fn
    if memory is not None and (isolate or shared):
        raise AssayError("memory: got a limit, expected none with `isolate` or `ranks`: what is measured is the memory of this process")
    if memory is not None and not (type(memory) in (int, float) and 0 <= memory < math.inf):
        raise AssayError(f"memory: got {memory!r}, expected a number of arrays of the logits' size, such as 1.1")
    parsed = _specs.parse(spec, spec_options, check)
    campaign = _native.Campaign(
        kernel=getattr(fn, "__name__", type(fn).__name__),
        spec=parsed,
        deck={
            "cases": cases,
            "seed": seed,
            "dtypes": list(dtypes),
            "shapes": _specs.shapes(shapes),
            "regimes": None if regimes is None else list(regimes),
            "wide": wide,
            "lm_head": lm_head,
            "layout": layout,
            "rounds_logits": rounds_logits,
            "packed": packed,
            "masked_garbage": masked_garbage,
        },
        seconds=seconds,
        grade=grade,
        allow=list(allow),
        shrink=shrink,
        power=power and judged,
        repros=repro_dir,
        invariant=asked,
        alone=not judged,
    )
    measured = []
    if memory is not None:
        # Before the campaign, whose problems may be as large: what the kernel keeps from its first call on is to be seen.
        options = {"layout": layout, "seed": seed, "device": device, "inplace": inplace}
        wide_shapes = _memory.question(shapes, dtypes, lm_head)
        measured = [_memory.finding(fn, parsed, shape, dtype, memory, packed, options) for dtype, shape in wide_shapes.items()]
    shown = sys.stderr.isatty() if progress is None else progress
    line = _line if shown else None
    named = None if outputs is None else list(outputs)
    # Functions of logits and ids are no functions of a problem, and cannot be called with one.
    call = None if hasattr(fn, WAYS) or not hasattr(fn, "__name__") else f"{fn.__name__}(problem)"
    try:
        if isolate or shared:
            # A function of logits and ids is made a kernel where it runs.
            own, scores = getattr(fn, SCORES, (fn, None))
            command = _worker.command(own, named, device, inplace, scores, "ranks" if shared else "isolate")
            return Report(campaign.run_isolated(command, timeout, line, shared), call)
        found = campaign.run(kernel, named, device, inplace, line, getattr(kernel, WAYS, []))
        if measured:
            found = _native.with_memory(found, json.dumps(measured), list(allow))
        return Report(found, call)
    finally:
        if shown:
            print(end="\r\033[K", file=sys.stderr)


def _relations(invariant: bool | str | Sequence[str], variants: Sequence[Kernel]) -> list[str] | None:
    """Returns the words that the engine reads of `invariant`; None asks nothing."""
    if invariant is False:
        if variants:
            raise AssayError("variants: got functions, expected none without `invariant`, such as invariant=True")
        return None
    if invariant is True:
        return ["usual"]
    named = [invariant] if isinstance(invariant, str) else invariant
    if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
        raise AssayError(f'invariant: got {invariant!r}, expected True, False, "bits", "limits" or a list of relations')
    return list(named)


def with_variants(fn: Kernel, variants: Sequence[Kernel]) -> Kernel:
    """Returns a kernel that calls `fn`, or one of its variants in the way that names it."""
    for place, variant in enumerate(variants):
        if not callable(variant):
            raise AssayError(f"variants[{place}]: got {type(variant).__name__}, expected a function as `fn` is")
    named = {f"as variant {place + 1}, {getattr(variant, '__name__', 'unnamed')}": variant for place, variant in enumerate(variants)}
    ways = getattr(fn, WAYS, [])

    def kernel(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        if way in named:
            return named[way](problem)
        return fn(problem, way) if ways else fn(problem)

    kernel.__name__ = getattr(fn, "__name__", type(fn).__name__)
    setattr(kernel, WAYS, [*ways, *((words, False, True) for words in named)])
    return kernel


def _line(tried: int, cases: int, failed: int) -> None:
    """Prints the progress over the line printed before."""
    print(f"\r\033[Kassay: {tried} of {cases} problems, {failed} failed", end="", file=sys.stderr, flush=True)


def compiles(fn: object) -> bool:
    """Whether `fn`, or a function that it names, uses JAX or Triton, which compile a program for each shape."""
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
    """Makes a test of a kernel: a function without parameters that raises the error of `Report.raise_for_failure`.

        >>> import assay, numpy as np
        >>> @assay.kernel("trl", dtypes=["f32"], shapes=["2x3x7"], cases=2, wide=0, power=False, repro_dir=None)
        ... def test_zeros(problem):
        ...     logits = problem.numpy().logits
        ...     return {"loss": np.zeros((), np.float32), "dlogits": np.zeros_like(logits)}
        >>> try:
        ...     test_zeros()
        ... except assay.KernelFailure:
        ...     print("test_zeros fails")
        test_zeros fails

    In a test file, found and run by pytest:

        @assay.kernel("trl", beta=0.04)
        def test_my_loss(problem):
            return my_loss(problem.torch())

    pytest's options `--assay-cases`, `--assay-seed` and `--assay-seconds` override those given here.

    Args:
        spec: The loss, as `assay.check` takes it.
        options: The other arguments of `assay.check`.
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
