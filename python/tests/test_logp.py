"""`assay.check_logp` and forward passes alone, in NumPy where a framework is not needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import assay


def scored(problem: assay.Problem) -> dict[str, Any]:
    """Logp and entropy in f64, rounded once."""
    arrays = problem.numpy()
    x = np.where(arrays.mask[..., None], arrays.logits.astype(np.float64), 0.0)
    gap = x.max(-1, keepdims=True) - x
    e = np.exp(-gap)
    log_sum = np.log(e.sum(-1))
    ids = np.where(arrays.mask, arrays.ids, 0)[..., None]
    logp = -np.take_along_axis(gap, ids, -1)[..., 0] - log_sum
    entropy = log_sum + (e * np.where(e == 0.0, 0.0, gap)).sum(-1) / e.sum(-1)
    return {"logp": logp.astype(np.float32), "entropy": entropy.astype(np.float32)}


def test_a_forward_pass_is_judged_alone_and_says_so() -> None:
    for problem in assay.problems("logp", 8, dtypes=["f32"], regimes=["normal"]):
        verdicts = problem.check(scored(problem), grade="exact")
        verdicts.raise_for_failure()
        assert "ignored  dlogits: not returned" in repr(verdicts) and "ignored  loss: not returned" in repr(verdicts)
        wrong = scored(problem)
        wrong["logp"] = wrong["logp"] * np.float32(1.001)
        assert not problem.check(wrong)


def test_what_is_asked_for_must_be_there() -> None:
    problem = next(assay.problems("logp", 1, dtypes=["f32"]))
    with pytest.raises(assay.OutputError, match="`logp`: got nothing"):
        problem.check({"entropy": scored(problem)["entropy"]})
    of_a_loss = next(assay.problems("trl", 1, dtypes=["f32"]))
    with pytest.raises(assay.OutputError, match="`loss`: got nothing"):
        of_a_loss.check(scored(of_a_loss))


def test_a_problem_has_its_cotangents() -> None:
    problem = next(assay.problems("logp", 1, dtypes=["f32"]))
    arrays = problem.numpy()
    assert arrays.dlogp.shape == arrays.dentropy.shape == arrays.ids.shape and not hasattr(arrays, "advantages")
    alone = next(assay.problems("logp", 1, dtypes=["f32"], entropy=False))
    assert not hasattr(alone.numpy(), "dentropy")
    several = next(assay.problems("logp", 1, dtypes=["f32"], ids_per_token=3)).numpy()
    assert several.dlogp.shape == several.ids.shape == (*several.mask.shape, 3)


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(assay.SpecError, match="`temprature`: no such option, is `temperature` meant"):
        assay.spec("logp", temprature=1.0)
    with pytest.raises(assay.AssayError, match="framework: got 'tinygrad', expected one of torch, jax"):
        assay.check_logp(scored, framework="tinygrad")
    with pytest.raises(assay.AssayError, match="fn: got int"):
        assay.check_logp(3)  # type: ignore[arg-type]
    with pytest.raises(assay.AssayError, match="isolate: got True"):
        assay.check_logp(scored, isolate=True)
    with pytest.raises(assay.AssayError, match="ids_per_token: got 0, expected an integer of at least 1"):
        assay.check_logp(scored, ids_per_token=0)
    with pytest.raises(assay.SpecError, match="`ids_per_token`: got 2, expected 1, unless the spec computes only logp"):
        assay.spec(ids_per_token=2)
    old = assay.spec("logp", top=3)
    assert old == assay.spec("logp", ids_per_token=3)
    assert "note: `top` is the old name of `ids_per_token`" in old.describe()
    with pytest.warns(DeprecationWarning, match="`top` is the old name"), pytest.raises(assay.AssayError):
        assay.check_logp(scored, top=0)
    several = next(assay.problems("logp", 1, dtypes=["f32"], ids_per_token=3))
    with pytest.raises(assay.OutputError, match=r"`logp`: got shape .*, expected .* \[B,T,K\] of the ids"):
        several.check({"logp": np.zeros(several.numpy().mask.shape, np.float32)})


def test_logp_of_several_ids_is_judged_by_its_autograd() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-extensive")

    def logp(logits: Any, ids: Any) -> Any:
        return logits.float().log_softmax(-1).gather(-1, ids)

    function: Any = torch.autograd.Function

    class Overwrites(function):  # type: ignore[misc]
        """Sets where it should add."""

        @staticmethod
        def forward(ctx: Any, logits: Any, ids: Any) -> Any:
            log_p = logits.float().log_softmax(-1)
            ctx.save_for_backward(log_p, ids)
            return log_p.gather(-1, ids)

        @staticmethod
        def backward(ctx: Any, sent: Any) -> Any:
            log_p, ids = ctx.saved_tensors
            of_ids = torch.zeros_like(log_p).scatter(-1, ids, sent)
            return of_ids - log_p.exp() * sent.sum(-1, keepdim=True), None

    def first_alone(logits: Any, ids: Any) -> Any:
        scores = logp(logits, ids)
        return torch.cat([scores[..., :1], scores[..., 1:].detach()], -1)

    options: dict[str, Any] = {"cases": 8, "wide": 0, "power": False, "repro_dir": None, "regimes": ["normal", "peaked"]}
    assert assay.check_logp(logp, ids_per_token=4, **options)
    assert not assay.check_logp(Overwrites.apply, ids_per_token=4, **{**options, "dtypes": ["f32"]})
    assert not assay.check_logp(first_alone, ids_per_token=4, **{**options, "dtypes": ["f32"]})
    assert assay.check_logp(lambda logits, ids: logp(logits, ids[..., None])[..., 0], ids_per_token=1, **options)


def test_a_function_of_logits_and_ids_is_judged_by_its_autograd() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-extensive")

    def logp(logits: Any, ids: Any) -> Any:
        x = logits.float()  # once: each is a rounding of its own in the gradient of 16 bits
        return x.gather(-1, ids[..., None])[..., 0] - x.logsumexp(-1)

    def both(logits: Any, ids: Any) -> Any:
        x = logits.float()
        log_p = x - x.logsumexp(-1, keepdim=True)
        entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(torch.float32).min)).sum(-1)
        return log_p.gather(-1, ids[..., None])[..., 0], entropy

    def detached(logits: Any, ids: Any) -> Any:
        scores, entropy = both(logits, ids)
        return scores, entropy.detach() + 0.0 * scores

    options: dict[str, Any] = {"cases": 8, "wide": 0, "power": False, "repro_dir": None, "regimes": ["normal", "peaked"]}
    assert assay.check_logp(logp, **options)
    assert assay.check_logp(both, entropy=True, **options)
    wrong = assay.check_logp(detached, entropy=True, **options)
    names = [name for cause in wrong.causes for names in cause.spec_that_would_pass for name in names]
    assert not wrong and "no cotangent of the entropy" in names, wrong
    # What it returns is said, and does not crash the campaign.
    assert not assay.check_logp(logp, entropy=True, **options)
