"""A trainer's log-probabilities against a sampler's: `assay.compare_logp`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _native, _specs
from ._errors import KernelFailure, ProblemError
from ._native import Spec


class Agreement:
    """The agreement of a trainer's and a sampler's log-probabilities.

        >>> import assay, numpy as np
        >>> found = assay.compare_logp(np.full((1, 2), -1.0, np.float32), np.full((1, 2), -1.5, np.float32))
        >>> isinstance(found, assay.Agreement), found.agrees, found.figures["mean |Δ|"]
        (True, None, 0.5)

    Attributes:
        agrees: Whether both sides are what they declare to be, up to rounding; None without logits, as nothing is then judged.
        conclusion: The conclusion, in one sentence.
        figures: The figures that projects log of such a pair, by name.
        sides: What each side computes, the trainer's first: `side`, `declared`, `computes`, `declared_error`, `explained_error`.
        floor: The distance that rounding alone may put between the sides, summarised; None without logits.
    """

    def __init__(self, data: str) -> None:
        self._json = data
        read = json.loads(data)
        self.agrees: bool | None = read["agrees"]
        self.conclusion: str = read["conclusion"]
        self.figures: dict[str, float] = {figure["name"]: figure["value"] for figure in read["figures"]}
        self.sides: list[Mapping[str, Any]] = read["sides"]
        self.floor: Mapping[str, Any] | None = read["floor"]

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Returns the report in words."""
        return _native.agreement_text(self._json).rstrip()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as `assay compare-logp --json` writes it, and writes it to `path` if one is given."""
        if path is not None:
            Path(path).write_text(self._json, encoding="utf-8")
        return self._json

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as an HTML page to `path`."""
        Path(path).write_text(_native.agreement_page(self._json), encoding="utf-8")

    def raise_for_failure(self) -> None:
        """Raises an error with the report in words, unless both sides are what they declare to be.

        Raises:
            KernelFailure: A side computes something else, or nothing was judged.
        """
        if not self.agrees:
            raise KernelFailure(f"{self.conclusion}\n{self}")


def _list(field: str, array: Any, kind: type) -> list[list[Any]] | None:
    """Returns an array of two extents as rows of Python's own numbers."""
    if array is None:
        return None
    rows = array.tolist() if hasattr(array, "tolist") else array
    try:
        return [[kind(x) for x in row] for row in rows]
    except TypeError:
        raise ProblemError(f"`{field}`: got {type(array).__name__}, expected an array [B,T]") from None


def compare_logp(
    trainer: Any,
    sampler: Any,
    *,
    ids: Any = None,
    mask: Any = None,
    advantages: Any = None,
    logits: Any = None,
    hidden: Any = None,
    lm_head: Any = None,
    layout: str = "vh",
    spec: str | os.PathLike[str] | Spec = _specs.LOGP,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    trainer_logits: str | None = None,
    sampler_logits: str | None = None,
    ratio_bounds: Sequence[float] = (0.8, 1.2),
    **spec_options: object,
) -> Agreement:
    """Compares a trainer's log-probabilities with a sampler's, and says what explains the difference.

        >>> import assay, numpy as np
        >>> logits = np.log(np.array([[[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]], np.float32))
        >>> ids = np.array([[0, 2]])
        >>> logp = np.log(np.array([[1 / 6, 1 / 6]], np.float32))
        >>> assay.compare_logp(logp, logp, ids=ids, logits=logits).agrees
        True
        >>> one_too_high = np.log(np.array([[2 / 6, 1 / 6]], np.float32))
        >>> assay.compare_logp(logp, one_too_high, ids=ids, logits=logits).agrees
        False

    Without logits, or hidden states and an LM head, only figures are given, and nothing is judged.

    Args:
        trainer: The trainer's log-probabilities, `[B,T]`, nats: an array of NumPy, PyTorch or JAX in f32, f64, f16 or bf16.
        sampler: The sampler's log-probabilities of the same tokens, `[B,T]`, nats.
        ids: The ids of the tokens, `[B,T]`; needed with logits.
        mask: The tokens that count, `[B,T]`; all if none is given.
        advantages: The advantages of the tokens, `[B,T]`, whose correlation with the difference is told.
        logits: The logits that both sides compute from, `[B,T,V]`.
        hidden: The hidden states in their place, `[B,T,H]`, with `lm_head`.
        lm_head: The LM head, `[V,H]` or `[H,V]` as `layout` says, of the same dtype.
        layout: "vh" or "hv".
        spec: The loss whose transform of logits, support and temperature both sides should apply, as `assay.spec` takes it, with its
            options; the softmax of the logits as they are if none is given: `temperature=0.7` is enough for another temperature.
        top_k: The sampler's top-k, which a side may have applied before it took log-probabilities.
        top_p: The sampler's top-p.
        min_p: The sampler's min-p.
        trainer_logits: The dtype of the trainer's own logits, if it is not that of the logits given: "f32", "bf16", "f16".
        sampler_logits: The dtype of the sampler's own logits.
        ratio_bounds: The bounds of the ratio exp(trainer − sampler) that the trainer's clip has.

    Raises:
        ProblemError: An array has another shape or dtype, or a parameter is out of range.
        SpecError: The spec is invalid, as for `assay.spec`.
    """
    if (hidden is None) != (lm_head is None):
        raise ProblemError("`hidden` and `lm_head`: got one of them, expected both or none")
    if hidden is not None and logits is not None:
        raise ProblemError("`logits`: got them beside `hidden`, expected one of the two")
    loss = _specs.parse(spec, spec_options, compare_logp)
    low, high = ratio_bounds
    found = _native.compare_logp(
        trainer,
        sampler,
        _list("mask", mask, bool),
        _list("advantages", advantages, float),
        _list("ids", ids, int),
        logits,
        None if hidden is None else (hidden, lm_head, layout),
        loss,
        {
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "logits_dtypes": [trainer_logits, sampler_logits],
            "ratio_bounds": [low, high],
        },
    )
    return Agreement(found)
