"""`assay.compare_logp` on arrays of NumPy: what it takes, names and refuses."""

import json
from pathlib import Path
from typing import Any

import assay
import numpy as np
import pytest

Array = np.ndarray[Any, Any]


def log_softmax(z: Array) -> Array:
    z = z - z.max(-1, keepdims=True)
    shifted: Array = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return shifted


def batch(seed: int = 0, shape: tuple[int, int, int] = (3, 8, 257)) -> tuple[Array, Array]:
    draw = np.random.default_rng(seed)
    logits = (draw.normal(size=shape) * 3).astype(np.float32)
    ids = draw.integers(0, shape[-1], shape[:2])
    return logits, ids


def logp(logits: Array, ids: Array, temperature: float = 1.0) -> Array:
    rows = log_softmax(logits.astype(np.float64) / temperature)
    return np.take_along_axis(rows, ids[..., None], -1)[..., 0].astype(np.float32)


def test_agreement_of_arrays_and_its_page(tmp_path: Path) -> None:
    logits, ids = batch()
    own, cool = logp(logits, ids), logp(logits, ids, 0.7)
    assert assay.compare_logp(own, own, ids=ids, logits=logits).agrees
    found = assay.compare_logp(own, cool, ids=ids, logits=logits, ratio_bounds=(0.9, 1.1))
    assert found.agrees is False and "the temperature is 0.7, not 1" in found.conclusion
    assert found.figures["max |Δ|"] == pytest.approx(np.abs(own.astype(np.float64) - cool).max())
    assert [side["declared"] for side in found.sides] == [True, False]
    with pytest.raises(assay.KernelFailure, match="temperature is 0.7"):
        found.raise_for_failure()
    # The declared temperature is an option of the spec.
    assert assay.compare_logp(cool, cool, ids=ids, logits=logits, temperature=0.7).agrees
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "temperature is 0.7" in page
    assert json.loads(found.to_json())["floor"]["bounds"] == [0.9, 1.1]


def test_agreement_behind_an_lm_head_and_without_logits() -> None:
    draw = np.random.default_rng(1)
    hidden, head = (draw.normal(size=shape).astype(np.float32) for shape in [(2, 4, 32), (131, 32)])
    ids = draw.integers(0, 131, (2, 4))
    own = logp(hidden.astype(np.float64) @ head.T.astype(np.float64), ids)
    assert assay.compare_logp(own, own, ids=ids, hidden=hidden, lm_head=head).agrees
    transposed = np.ascontiguousarray(head.T)
    assert assay.compare_logp(own, own, ids=ids, hidden=hidden, lm_head=transposed, layout="hv").agrees
    figures = assay.compare_logp(own, own + np.float32(0.5), mask=np.array([[1, 0, 1, 1]] * 2))
    assert figures.agrees is None and "not judged" in figures.conclusion
    assert figures.figures["mean |Δ|"] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampler": np.zeros((3, 7), np.float32)}, "`sampler`: got shape [3, 7], expected [3, 8], that of `trainer`"),
        ({"ids": None}, "`ids`: got nothing"),
        ({"ids": [[0] * 7] * 3}, "`ids`: got shape [3, 7], expected [3, 8]"),
        ({"mask": [[True], [True, False]]}, "`mask`: got rows of unequal lengths"),
        ({"hidden": np.zeros((3, 8, 4), np.float32)}, "`hidden` and `lm_head`: got one of them"),
        ({"top_p": 0.0}, "`top_p`: got 0, expected 0 < p ≤ 1"),
        ({"sampler_logits": "fp8"}, "`logits_dtypes`: got `fp8`, expected f64, f32, bf16 or f16"),
    ],
)
def test_agreement_refuses_what_does_not_fit(change: dict[str, Any], said: str) -> None:
    logits, ids = batch()
    own = logp(logits, ids)
    arguments: dict[str, Any] = {"trainer": own, "sampler": own, "ids": ids, "logits": logits} | change
    with pytest.raises(assay.ProblemError) as refused:
        assay.compare_logp(arguments.pop("trainer"), arguments.pop("sampler"), **arguments)
    assert said in str(refused.value)
