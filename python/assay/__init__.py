"""The answer key and the bench for GRPO loss kernels.

    def my_loss(problem):
        arrays = problem.torch()                      # or .jax(), .numpy(): lent without a copy
        ...
        return {"loss": loss, "dlogits": dlogits, "logp": logp}

    print(assay.check(my_loss, "trl", beta=0.04))

Notation, everywhere: B sequences of T tokens over a vocabulary of V; H is the width of the hidden states. Frameworks are
imported when they are first needed.
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
from ._native import Array, Problem, Spec, Verdicts

# As type checkers read it: `typing` alone takes as long to import as the rest of this package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from ._check import check as check
    from ._check import kernel as kernel
    from ._logp import check_logp as check_logp
    from ._report import Cause as Cause
    from ._report import Report as Report

__all__ = [
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
    "Report",
    "Spec",
    "SpecError",
    "Verdicts",
    "check",
    "check_logp",
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
    """A loss: a project's by its own options, a file's, or one by its fields.

        assay.spec("trl", loss_type="grpo", beta=0.04)
        assay.spec("verl", policy_loss={"loss_mode": "gspo"})
        assay.spec("loss.yaml")
        assay.spec(objective={"cispo": {"upper": 5.0, "lower": None}}, temperature=0.7)
        assay.spec("logp", temperature=0.7)

    Args:
        source: The name of a project (trl, verl, tunix, liger, mllm-jax, unsloth, skyrl, nemo, prime-rl, openrlhf, roll, archer or areal), the
            path of a YAML, TOML or JSON file, or nothing, where `options` are the fields of a spec. "logp" is no loss, but logp and
            entropy (`entropy=False`: logp alone) and their backward pass by given cotangents, the problem's `dlogp` and
            `dentropy`; its other options are `temperature`, `temperature_divides`, `logits`, `support` and `ids_per_token`, the number of
            ids whose logp is computed for each token.
        function: Which of the project's functions; the usual one if none is given.
        batch: What the batch has, where a project chooses by it what it computes: `old_logps`, `ref_logps`,
            `sampling_logps`, `token_weights` (bools), `rollout_weights` and `advantages` ("token" or "sequence"), `num_items_in_batch`.
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
    packed: bool = False,
    **spec_options: object,
) -> Iterator[Problem]:
    """Generated problems for `spec`, the deck of a campaign: the same arguments give the same bits.

    Args:
        spec: As `assay.spec` takes it, with its options.
        n: How many.
        seed: Of every draw.
        first: The number of the first; the others follow it.
        dtypes: Of logits, or of hidden states and LM head: "f32", "bf16", "f16".
        shapes: "many", "few", or a list of "BxTxV", or of "BxTxHxV" for problems with an LM head.
        regimes: How logits are drawn, as `assay generate --help` names it; all in which every logp is a number if none are
            named.
        wide: How many of the problems, the last ones, have a vocabulary of 151,936.
        lm_head: Problems have hidden states and an LM head instead of logits.
        packed: Their sequences are packed into one row, as in `assay.check`.

    Raises:
        ProblemError: A name or an extent that there is not.
        SpecError: As `assay.spec`.
    """
    from . import _specs
    from ._native import Problems

    return Problems(
        _specs.of(spec, spec_options),
        first,
        first + n,
        seed,
        list(dtypes),
        _specs.shapes(shapes),
        None if regimes is None else list(regimes),
        wide,
        lm_head,
        packed,
    )


def load(
    path: str | os.PathLike[str],
    spec: str | os.PathLike[str] | Spec | None = None,
    *,
    logits: str = "logits",
    old_logp: str = "old_logps",
    **spec_options: object,
) -> Problem:
    """The problem in a safetensors file, as `assay generate`, `assay record` and `Problem.save` write it.

    Args:
        path: The file.
        spec: The loss, as `assay.spec` takes it, with its options; a generated problem carries its own.
        logits: The tensor of the logits, where there is no LM head.
        old_logp: The tensor of the old log-probabilities.

    Raises:
        ProblemError: A file that is none, or a problem that does not fit its spec.
    """
    from . import _native, _specs

    return _native.load(path, None if spec is None else _specs.of(spec, spec_options), logits, old_logp)


def __getattr__(name: str) -> object:
    """What campaigns are made with is imported when it is first needed."""
    if name in ("check", "kernel"):
        from . import _check as module
    elif name == "check_logp":
        from . import _logp as module  # type: ignore[no-redef]
    elif name in ("Cause", "Report"):
        from . import _report as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
