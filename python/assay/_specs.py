"""The reading of specs and of the shapes of problems, from the arguments of the package's functions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from . import _native
from ._errors import ProblemError, SpecError
from ._native import Spec

#: The name in place of a project's for logp and entropy without a loss.
LOGP = "logp"
_FILES = (".yaml", ".yml", ".toml", ".json")


def parse(source: str | os.PathLike[str] | Spec, options: Mapping[str, object], caller: Callable[..., object]) -> Spec:
    """Reads a loss as `assay.spec(source, **options)` does, for a function that takes all its other arguments by name.

    Raises:
        SpecError: As `spec`; or an option that looks like one of the `caller`'s arguments.
    """
    try:
        return spec(source, None, None, options)
    except SpecError as reason:
        import difflib
        import inspect

        for name in options:
            meant = difflib.get_close_matches(name, inspect.signature(caller).parameters, 1, 0.8)
            if meant and name in str(reason):
                said = f"`{name}`: got an option that neither assay.{caller.__name__} nor the loss has, is `{meant[0]}` meant?"
                raise SpecError(said) from None
        raise


def spec(
    source: str | os.PathLike[str] | Spec | None,
    function: str | None,
    batch: Mapping[str, object] | None,
    options: Mapping[str, object],
) -> Spec:
    """Reads a loss as `assay.spec` does."""
    if isinstance(source, Mapping):
        fields = "**{" + ", ".join(f"{name!r}: …" for name in source) + "}"
        raise SpecError(f"`spec`: got a dict, expected a project's name, a file or a Spec; fields are given by name, assay.spec({fields})")
    if not isinstance(source, (str, os.PathLike, Spec, type(None))):
        raise SpecError(f"`spec`: got {type(source).__name__}, expected a project's name, a file or a Spec")
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
    if isinstance(spec, Mapping):
        raise SpecError("`spec`: got a dict, expected a project's name, or a Spec, as spec=assay.spec(**fields)")
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
