"""The reading of specs and of the shapes of problems, from the arguments of the package's functions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence

from . import _native
from ._errors import ProblemError, SpecError
from ._native import Spec

#: The name in place of a project's for logp and entropy without a loss.
LOGP = "logp"
_FILES = (".yaml", ".yml", ".toml", ".json")


def parse(source: str | os.PathLike[str] | Spec, options: Mapping[str, object]) -> Spec:
    """Reads a loss as `assay.spec(source, **options)` does."""
    return spec(source, None, None, options)


def spec(
    source: str | os.PathLike[str] | Spec | None,
    function: str | None,
    batch: Mapping[str, object] | None,
    options: Mapping[str, object],
) -> Spec:
    """Reads a loss as `assay.spec` does."""
    is_preset = isinstance(source, str) and os.sep not in source and not source.endswith(_FILES)
    if not is_preset and (function is not None or batch is not None):
        raise SpecError("`function` and `batch`: got one without a project, expected a project's name as the first argument")
    if source == LOGP:
        if function is not None or batch:
            raise SpecError(f"`function` and `batch`: got one beside {LOGP!r}, expected none: there is no loss")
        others = {name: value for name, value in options.items() if name != "entropy"}
        return _native.spec_of_cotangents(bool(options.get("entropy", True)), _json(others))
    if isinstance(source, str) and is_preset:
        return _native.spec_of_preset(source, function, _json(options), _json(batch or {}))
    if source is None:
        return _native.spec_of_fields(_json(options))
    if options:
        raise SpecError(f"got {', '.join(options)} beside {source!r}, expected options only with a project's name")
    if isinstance(source, Spec):
        return source
    return _native.spec_of_file(os.fspath(source))


def _json(options: Mapping[str, object]) -> str:
    try:
        return json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as reason:
        raise SpecError(f"options: {reason}, expected numbers, text, truth values, None, lists and dicts") from None


def required(spec: str | os.PathLike[str] | Spec | None) -> str | os.PathLike[str] | Spec:
    """Returns the loss that `grpo_loss` is asked for. It has no default: no two projects mean the same by GRPO."""
    if spec is None:
        raise SpecError(
            '`spec`: not given, expected the loss to compute: a project\'s name, as spec="trl", or a Spec with the project\'s options, as '
            'spec=assay.spec("verl", clip_ratio_high=0.28)'
        )
    return spec


def refuse_foreign(names: Iterable[str], owner: str, instead: Mapping[str, str]) -> None:
    """Refuses the arguments that only the other framework's `grpo_loss` has, and says what to use here.

    Args:
        names: The arguments that were given and that the signature does not have.
        owner: The module that has them, such as `assay.jax`.
        instead: What to do here, by argument.
    """
    for name in names:
        if name in instead:
            raise ProblemError(f"`{name}`: got an argument of {owner}, expected none; {instead[name]}")


def shapes(given: str | Sequence[str]) -> list[str]:
    """Returns `many` or `few`, or extents, as a list."""
    return [given] if isinstance(given, str) else list(given)
