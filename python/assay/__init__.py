"""The answer key and the bench for GRPO loss kernels.

    def my_loss(problem):
        arrays = problem.torch()                      # or .jax(), .numpy(): lent without a copy
        ...
        return {"loss": loss, "dlogits": dlogits, "logp": logp}

    print(assay.check(my_loss, "trl", beta=0.04))

One `Problem` under one `Spec`, its arrays (an `Array` is one of them, without a copy) and the `Verdicts` on an answer:

    >>> import assay, numpy as np
    >>> spec = assay.spec("trl", beta=0.04)
    >>> problem = next(assay.problems(spec, n=1, dtypes=["f32"], shapes=["2x3x7"]))
    >>> isinstance(problem, assay.Problem), isinstance(problem.spec, assay.Spec), problem.shape
    (True, True, (2, 3, 7))
    >>> isinstance(problem.logits, assay.Array), problem.numpy().logits.dtype
    (True, dtype('float32'))
    >>> zeros = {"loss": np.zeros((), np.float32), "dlogits": np.zeros((2, 3, 7), np.float32)}
    >>> verdicts = problem.check(zeros)
    >>> isinstance(verdicts, assay.Verdicts), verdicts.passed
    (True, False)

Notation in the whole package: B sequences of T tokens over a vocabulary of V; H is the width of the hidden states. Frameworks
are imported when they are first needed.
"""

from __future__ import annotations

from ._errors import (
    AssayError,
    InputMutated,
    KernelCrashed,
    KernelFailure,
    KernelTimeout,
    NotReproducible,
    OutputError,
    ProblemError,
    SpecError,
)
from ._native import Array, Problem, Spec, Verdicts, __version__

# As type checkers read it: `typing` alone takes as long to import as the rest of this package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from ._agreement import Agreement as Agreement
    from ._agreement import compare_logp as compare_logp
    from ._bench import ProgramBench as ProgramBench
    from ._bench import bench as bench
    from ._check import check as check
    from ._check import kernel as kernel
    from ._cross_entropy import check_cross_entropy as check_cross_entropy
    from ._divergence import check_divergence as check_divergence
    from ._logp import check_invariance as check_invariance
    from ._logp import check_logp as check_logp
    from ._loss import check_loss as check_loss
    from ._ranks import Shard as Shard
    from ._report import Cause as Cause
    from ._report import Report as Report

__all__ = [
    "Agreement",
    "Array",
    "AssayError",
    "Cause",
    "InputMutated",
    "KernelCrashed",
    "KernelFailure",
    "KernelTimeout",
    "NotReproducible",
    "OutputError",
    "Problem",
    "ProblemError",
    "ProgramBench",
    "Report",
    "Shard",
    "Spec",
    "SpecError",
    "Verdicts",
    "__version__",
    "bench",
    "check",
    "check_cross_entropy",
    "check_divergence",
    "check_invariance",
    "check_logp",
    "check_loss",
    "compare_logp",
    "kernel",
    "load",
    "problems",
    "spec",
]


def spec(
    source: str | os.PathLike[str] | Spec | None = None,
    /,
    *,
    function: str | None = None,
    batch: Mapping[str, object] | None = None,
    **options: object,
) -> Spec:
    """Reads a loss: a project's by its own options, a file's, or one by its fields.

        >>> import assay
        >>> spec = assay.spec("trl", loss_type="grpo", beta=0.04)
        >>> spec.to_dict()["kl"]["beta"]
        0.04
        >>> assay.spec(**spec.to_dict()) == spec
        True

    Further forms:

        assay.spec("verl", policy_loss={"loss_mode": "gspo"})
        assay.spec("loss.yaml")
        assay.spec(objective={"cispo": {"upper": 5.0, "lower": None}}, temperature=0.7)
        assay.spec("logp", temperature=0.7)

    Args:
        source: The name of a project (trl, verl, tunix, liger, mllm-jax, unsloth, skyrl, nemo, prime-rl, openrlhf, roll, archer,
            areal, trinity, tinker, fast-llm, torchtitan, axolotl or rl-kernel) or `cross_entropy`, the path of a YAML, TOML or JSON file, or nothing if
            `options` are the fields of a spec. "logp" is not a loss, but logp and entropy (`entropy=False`: logp alone) and their backward pass by given cotangents, the problem's `dlogp` and
            `dentropy`; its other options are `temperature`, `temperature_divides`, `logits`, `support` and `ids_per_token`, the number of
            ids whose logp is computed for each token.
        function: Which of the project's functions; the usual one if none is given.
        batch: What the batch has, where a project chooses by it what it computes: `old_logps`, `ref_logps`,
            `sampling_logps`, `token_weights`, `kept_ids` (bools), `rollout_weights` and `advantages` ("token" or "sequence"), `num_items_in_batch`.
        options: The project's options, named as it names them, or the fields of a spec.

    Raises:
        SpecError: An unknown project, option or field, with the nearest name, or a number out of range.
    """
    from . import _specs

    return _specs.spec(source, function, batch, options)


def problems(
    spec: str | os.PathLike[str] | Spec = "trl",
    n: int = 200,
    seed: int = 0,
    *,
    first: int = 0,
    dtypes: Sequence[str] = ("bf16", "f32"),
    shapes: str | Sequence[str] = "many",
    regimes: Sequence[str] | None = None,
    wide: int = 0,
    lm_head: bool = False,
    layout: str = "vh",
    rounds_logits: bool = False,
    packed: bool = False,
    masked_garbage: bool = False,
    **spec_options: object,
) -> Iterator[Problem]:
    """Generates the problems of a campaign for `spec`: equal arguments give equal bits.

        >>> import assay
        >>> [problem.shape for problem in assay.problems("trl", n=2, dtypes=["f32"], shapes=["2x3x7"])]
        [(2, 3, 7), (2, 3, 7)]

    Args:
        spec: As `assay.spec` takes it, with its options.
        n: The number of problems.
        seed: The seed of every draw.
        first: The number of the first problem; the others follow it.
        dtypes: The dtypes of logits, or of hidden states and LM head: "f32", "bf16", "f16".
        shapes: "many", "few", or a list of "BxTxV", or of "BxTxHxV" for problems with an LM head.
        regimes: The ways of drawing logits, as `assay generate --help` names them; by default all in which every logp is a number.
        wide: The number of problems, the last ones, with a vocabulary of 151,936.
        lm_head: Whether problems have hidden states and an LM head instead of logits.
        layout: The layout of the LM head, as in `assay.check`.
        rounds_logits: Whether the logits of the LM head are rounded to its dtype.
        packed: Whether the sequences are packed into one row, as in `assay.check`.
        masked_garbage: Whether masked tokens hold garbage, NaN and the id −100, in a quarter of the problems.

    Raises:
        ProblemError: A name is unknown, or an extent is out of range.
        SpecError: The spec is invalid, as for `assay.spec`.
    """
    from . import _specs
    from ._native import Problems

    return Problems(
        _specs.parse(spec, spec_options, problems),
        first,
        {
            "cases": first + n,
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
    )


def load(
    path: str | os.PathLike[str],
    spec: str | os.PathLike[str] | Spec | None = None,
    *,
    logits: str = "logits",
    old_logp: str = "old_logps",
    **spec_options: object,
) -> Problem:
    """Reads the problem in a safetensors file, as `assay generate`, `assay record` and `Problem.save` write it.

        >>> import assay, os, tempfile
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "problem.safetensors")
        ...     problem.save(path)
        ...     assay.load(path).shape
        (2, 3, 7)

    Args:
        path: The path of the file.
        spec: The loss, as `assay.spec` takes it, with its options; a generated problem carries its own.
        logits: The name of the tensor of the logits, if the problem has no LM head.
        old_logp: The name of the tensor of the old log-probabilities.

    Raises:
        ProblemError: The file is invalid, or the problem does not fit its spec.
    """
    from . import _native, _specs

    return _native.load(path, None if spec is None else _specs.parse(spec, spec_options, load), logits, old_logp)


def __getattr__(name: str) -> object:
    """Imports the modules of campaigns when one of their names is first needed."""
    if name in ("check", "kernel"):
        from . import _check as module
    elif name == "check_divergence":
        from . import _divergence as module  # type: ignore[no-redef]
    elif name in ("check_invariance", "check_logp"):
        from . import _logp as module  # type: ignore[no-redef]
    elif name == "check_cross_entropy":
        from . import _cross_entropy as module  # type: ignore[no-redef]
    elif name == "check_loss":
        from . import _loss as module  # type: ignore[no-redef]
    elif name in ("Agreement", "compare_logp"):
        from . import _agreement as module  # type: ignore[no-redef]
    elif name in ("ProgramBench", "bench"):
        from . import _bench as module  # type: ignore[no-redef]
    elif name == "Shard":
        from . import _ranks as module  # type: ignore[no-redef]
    elif name in ("Cause", "Report"):
        from . import _report as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
