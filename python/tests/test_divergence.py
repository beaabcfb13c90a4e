"""`assay.check_divergence`, in NumPy where a framework is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import assay

OPTIONS: dict[str, Any] = {"dtypes": ["f32"], "shapes": "few", "cases": 42, "wide": 0, "power": False, "repro_dir": None, "progress": False}
Kernel = Callable[..., Any]


def log_softmax(x: Any) -> Any:
    x = x.astype(np.float64)
    gap = x - x.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return gap - np.log(np.exp(gap).sum(-1, keepdims=True))


def weighted(logp: Any, x: Any) -> Any:
    """The product of a probability and a number, which is 0 where the probability is."""
    return np.where(np.isneginf(logp), 0.0, np.exp(logp) * np.where(np.isneginf(logp), 0.0, x))


def of_logp(beta: float, lp: Any, lq: Any) -> tuple[Any, Any]:
    """The divergence of bins, and its derivatives by the student's log-probabilities, in f64."""
    with np.errstate(invalid="ignore"):
        if beta == 0.0:
            return weighted(lq, lq - lp).sum(-1), -np.exp(lq)
        if beta == 1.0:
            return weighted(lp, lp - lq).sum(-1), weighted(lp, lp - lq + 1.0)
        lm = np.logaddexp(lp + np.log1p(-beta), lq + np.log(beta))
        value = beta * weighted(lq, lq - lm).sum(-1) + (1.0 - beta) * weighted(lp, lp - lm).sum(-1)
        return value, (1.0 - beta) * weighted(lp, lp - lm)


def divergence(beta: float, temperature: float = 1.0, squared: bool = False, rest: str | None = None) -> Kernel:
    """A kernel in f64, which is rounded once."""

    def fn(student: Any, *others: Any) -> Any:
        *teacher, upstream = others
        lp = log_softmax(student / student.dtype.type(1) if temperature == 1.0 else student.astype(np.float64) / temperature)
        if rest is None:
            lq = log_softmax(teacher[0].astype(np.float64) / temperature)
            value, slopes = of_logp(beta, lp, lq)
        else:
            logp, ids = (np.nan_to_num(teacher[0].astype(np.float64)), np.where(teacher[1] < 0, 0, teacher[1]))
            entries = np.take_along_axis(lp, ids, -1)
            value, of_entries = of_top(beta, rest, entries, logp)
            slopes = np.zeros_like(lp)
            np.put_along_axis(slopes, ids, of_entries, -1)
        factor = temperature**2 if squared else 1.0
        upstream = np.asarray(upstream)[..., None]
        gradient = factor / temperature * (slopes - np.exp(lp) * slopes.sum(-1, keepdims=True))
        gradient = np.where(upstream == 0, 0.0, gradient * upstream)
        return (factor * value).astype(np.float32), gradient.astype(student.dtype)

    return fn


def of_top(beta: float, rest: str, lp: Any, lq: Any) -> tuple[Any, Any]:
    if rest == "ignored":
        return of_logp(beta, lp, lq)
    if rest == "renormalized":
        lp, lq = log_softmax(lp), log_softmax(lq)
        value, slopes = of_logp(beta, lp, lq)
        return value, slopes - np.exp(lp) * slopes.sum(-1, keepdims=True)

    def with_tail(logp: Any) -> Any:
        with np.errstate(divide="ignore"):
            return np.concatenate([logp, np.log(np.maximum(1.0 - np.exp(logp).sum(-1, keepdims=True), 0.0))], -1)

    student = with_tail(lp)
    value, slopes = of_logp(beta, student, with_tail(lq))
    with np.errstate(divide="ignore", invalid="ignore"):
        return value, slopes[..., :-1] - slopes[..., -1:] * np.exp(lp - student[..., -1:])


ASKED = [
    ("forward_kl", None, 0.0),
    ("reverse_kl", None, 1.0),
    ("jensen_shannon", None, 0.5),
    ("jensen_shannon", 0.1, 0.1),
    ("jensen_shannon", 0.0, 0.0),
    ("jensen_shannon", 1.0, 1.0),
]


@pytest.mark.parametrize(("kind", "beta", "weight"), ASKED)
def test_divergence_in_numpy_passes(kind: str, beta: float | None, weight: float) -> None:
    fn = divergence(weight, 2.0, True)
    report = assay.check_divergence(
        fn, kind=kind, beta=beta, temperature=2.0, temperature_squared=True, framework="numpy", **OPTIONS
    )
    assert report.passed, str(report)


@pytest.mark.parametrize("rest", ["tail", "renormalized", "ignored"])
@pytest.mark.parametrize(("kind", "weight"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jensen_shannon", 0.5)])
def test_divergence_of_likeliest_entries_in_numpy_passes(kind: str, weight: float, rest: str) -> None:
    report = assay.check_divergence(
        divergence(weight, rest=rest), kind=kind, teacher_top_k=4, rest=rest, framework="numpy", **OPTIONS
    )
    assert report.passed, str(report)


def of_heads(fn: Kernel, product_dtype: Any = np.float32) -> Kernel:
    """The divergence of logits that are products, the teacher's rounded to `product_dtype`, with exact products of its gradient."""

    def kernel(hidden: Any, head: Any, *others: Any) -> Any:
        *teacher, upstream = others
        hidden, head = np.nan_to_num(hidden.astype(np.float64)), head.astype(np.float64)
        if len(teacher[1].shape) == 2:
            states, other_head = (x.astype(np.float64) for x in teacher)
            teacher = [(states @ other_head.T).astype(product_dtype)]
        values, dlogits = fn((hidden @ head.T).astype(np.float32), *teacher, upstream)
        dlogits = dlogits.astype(np.float64)
        dlm_head = dlogits.reshape(-1, dlogits.shape[-1]).T @ hidden.reshape(-1, hidden.shape[-1])
        return values, (dlogits @ head).astype(np.float32), dlm_head.astype(np.float32)

    return kernel


HEADS: dict[str, Any] = {**OPTIONS, "lm_head": True, "masked_garbage": False, "framework": "numpy"}


@pytest.mark.parametrize(("kind", "weight"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jensen_shannon", 0.5)])
@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_divergence_of_heads_in_numpy_passes(kind: str, weight: float, layout: str) -> None:
    report = assay.check_divergence(of_heads(divergence(weight)), kind=kind, layout=layout, **HEADS)
    assert report.passed, str(report)
    fn = of_heads(divergence(weight, rest="renormalized"))
    report = assay.check_divergence(fn, kind=kind, teacher_top_k=4, rest="renormalized", layout=layout, **HEADS)
    assert report.passed, str(report)


def test_divergence_of_heads_as_a_mean_passes() -> None:
    def mean(hidden: Any, head: Any, states: Any, other_head: Any, upstream: float) -> Any:
        assert hidden.ndim == 2 and len(states) == len(hidden)
        upstreams = np.full(len(hidden), upstream / len(hidden))
        values, *gradients = of_heads(divergence(0.0))(hidden, head, states, other_head, upstreams)
        return np.float32(values.mean(dtype=np.float64)), *gradients

    report = assay.check_divergence(mean, reduction="mean", **HEADS)
    assert report.passed, str(report)


def test_divergence_of_heads_with_a_wrong_product_fails() -> None:
    # The teacher's logits are known to the last bit: a product that rounds to 11 bits shows.
    rounds = of_heads(lambda student, teacher, upstream: divergence(0.0)(student, teacher.astype(np.float32), upstream), np.float16)
    report = assay.check_divergence(rounds, **{**HEADS, "regimes": ["normal"], "shapes": ["2x3x16x65"]})
    assert not report.passed
    # Shapes of four extents are of heads.
    report = assay.check_divergence(of_heads(divergence(1.0)), **{**HEADS, "lm_head": False, "shapes": ["2x3x16x65"], "regimes": ["normal"]})
    assert not report.passed and "reverse_kl" in said(report), str(report)
    report = assay.check_divergence(lambda *all: of_heads(divergence(0.0))(*all)[:2], **HEADS)
    assert not report.passed and "dhidden and dlm_head" in said(report), str(report)


def said(report: assay.Report) -> str:
    """The report on one line."""
    return " ".join(str(report).split())


def test_divergence_that_is_another_is_named() -> None:
    options = {**OPTIONS, "regimes": ["normal"]}
    report = assay.check_divergence(divergence(1.0), kind="forward_kl", framework="numpy", **options)
    assert not report.passed and "reverse_kl" in said(report), str(report)
    report = assay.check_divergence(divergence(0.9), kind="jensen_shannon", beta=0.1, framework="numpy", **options)
    assert not report.passed and "1 - beta" in said(report), str(report)
    report = assay.check_divergence(
        divergence(0.0, 2.0), kind="forward_kl", temperature=2.0, temperature_squared=True, framework="numpy", **options
    )
    assert not report.passed and "temperature_squared" in said(report), str(report)
    report = assay.check_divergence(
        divergence(0.0, rest="ignored"), kind="forward_kl", teacher_top_k=4, rest="tail", framework="numpy", **options
    )
    assert not report.passed and "rest: ignored" in said(report), str(report)


def test_divergence_as_a_mean_is_given_the_tokens_that_count() -> None:
    def mean(student: Any, teacher: Any, upstream: float) -> Any:
        assert student.ndim == 2 and not np.isnan(student).any()
        values, gradient = divergence(0.0)(student, teacher, np.full(len(student), upstream / len(student)))
        return np.float32(values.mean(dtype=np.float64)), gradient

    report = assay.check_divergence(mean, reduction="mean", framework="numpy", **OPTIONS)
    assert report.passed, str(report)

    def of_batch(student: Any, teacher: Any, upstream: float) -> Any:
        loss, gradient = mean(student, teacher, upstream)
        return loss, gradient / np.float32(upstream)

    report = assay.check_divergence(of_batch, reduction="mean", framework="numpy", **OPTIONS)
    assert not report.passed and "upstream gradient" in said(report), str(report)


def test_divergence_that_does_not_fit_is_refused_by_name() -> None:
    fn = divergence(0.0)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (assay.AssayError, "fn: got int", {"fn": 3}),
        (assay.AssayError, "framework: got 'tinygrad', expected one of torch, jax, numpy", {"framework": "tinygrad"}),
        (assay.AssayError, "reduction: got 'batch', expected one of none, mean, sum", {"reduction": "batch"}),
        (assay.AssayError, "packed: got True", {"packed": True}),
        (assay.SpecError, "objective.distillation.beta`: got 1.5, expected a number from 0 to 1", {"kind": "jensen_shannon", "beta": 1.5}),
        (assay.SpecError, "objective.distillation.beta`: got 0.5, expected none unless", {"beta": 0.5}),
        (assay.SpecError, "objective.distillation.rest`: got none, expected tail", {"teacher_top_k": 4}),
        (assay.SpecError, "objective.distillation.rest`: got tail, expected none", {"rest": "tail"}),
        (assay.SpecError, "objective.distillation.top_k`: got 0", {"teacher_top_k": 0, "rest": "tail"}),
    ]
    for error, words, arguments in refused:
        with pytest.raises(error, match=words):
            assay.check_divergence(**{"fn": fn, "framework": "numpy", **OPTIONS, **arguments})
    report = assay.check_divergence(lambda *_: (np.zeros(3, np.float32), None), framework="numpy", **OPTIONS)
    assert not report.passed and "one divergence for each token" in said(report)


def test_divergence_in_jax_passes() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def reverse_kl(student: Any, teacher: Any) -> Any:
        lp, lq = (jax.nn.log_softmax(x.astype("float32")) for x in (student, teacher))
        has_mass = lp > -jnp.inf
        lp, lq = jnp.where(has_mass, lp, 0.0), jnp.where(has_mass, lq, 0.0)
        return jnp.where(has_mass, jnp.exp(lp) * (lp - lq), 0.0).sum(-1)

    options = {**OPTIONS, "cases": 21, "regimes": ["normal", "peaked", "ties"]}
    assert assay.check_divergence(reverse_kl, kind="reverse_kl", framework="jax", **options).passed
    mean = assay.check_divergence(
        lambda *both: reverse_kl(*both).mean(), kind="reverse_kl", reduction="mean", framework="jax", **options
    )
    assert mean.passed, str(mean)
    wrong = assay.check_divergence(lambda x, y: reverse_kl(y, x), kind="reverse_kl", framework="jax", **options)
    assert not wrong.passed

    def of_hidden(hidden: Any, head: Any, states: Any, other_head: Any) -> Any:
        product = jax.lax.Precision.HIGHEST
        return reverse_kl(jnp.matmul(hidden, head.T, precision=product), jnp.matmul(states, other_head.T, precision=product))

    # One shape, as each is compiled.
    options = {**options, "lm_head": True, "masked_garbage": False, "shapes": ["2x3x16x65"], "cases": 7}
    heads = assay.check_divergence(of_hidden, kind="reverse_kl", framework="jax", **options)
    assert heads.passed, str(heads)
    mean = assay.check_divergence(lambda *all: of_hidden(*all).mean(), kind="reverse_kl", reduction="mean", framework="jax", **options)
    assert mean.passed, str(mean)


def test_divergence_in_torch_passes() -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    def forward_kl(student: Any, teacher: Any) -> Any:
        lp, q = student.float().log_softmax(-1), teacher.float().softmax(-1)
        return functional.kl_div(lp, q, reduction="none").sum(-1)

    def tail(student: Any, logp: Any, ids: Any) -> Any:
        lp = student.float().log_softmax(-1).gather(-1, ids.clamp(0))
        both = [torch.cat([x, torch.log(-torch.expm1(x.logsumexp(-1, keepdim=True)))], -1) for x in (lp, logp)]
        return (both[1].exp() * (both[1] - both[0])).sum(-1)

    options = {**OPTIONS, "dtypes": ["bf16", "f32"], "regimes": ["normal", "peaked", "ties", "sampled"]}
    report = assay.check_divergence(forward_kl, **options)
    assert report.passed, str(report)
    report = assay.check_divergence(tail, teacher_top_k=4, rest="tail", **options)
    assert report.passed, str(report)
    report = assay.check_divergence(lambda *both: forward_kl(*both).mean(), reduction="mean", **options)
    assert report.passed, str(report)

    def of_hidden(hidden: Any, head: Any, states: Any, other_head: Any) -> Any:
        return forward_kl(functional.linear(hidden.float(), head.float()), functional.linear(states.float(), other_head.float()))

    report = assay.check_divergence(of_hidden, lm_head=True, **options)
    assert report.passed, str(report)
    report = assay.check_divergence(lambda *all: of_hidden(*all).mean(), lm_head=True, reduction="mean", layout="hv", **options)
    assert report.passed, str(report)

    # PyTorch's form by log-probabilities is NaN where the teacher has no probability.
    def by_log_target(student: Any, teacher: Any) -> Any:
        lp, lq = (x.float().log_softmax(-1) for x in (student, teacher))
        return functional.kl_div(lp, lq, reduction="none", log_target=True).sum(-1)

    report = assay.check_divergence(by_log_target, **options)
    assert not report.passed and "minus_infinity" in said(report), str(report)
