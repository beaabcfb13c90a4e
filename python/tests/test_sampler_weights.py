"""Plain ports of the gated sampler weights of OpenRLHF and verl, written from what `describe()` says and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import assay


def loss(problem: assay.Problem, weights: Any, kept: Any, dual_clip: float | None) -> dict[str, Any]:
    """PPO-clip at 0.2/0.2 of a log-ratio within ±20, each policy term times its weight, over the kept tokens."""
    arrays = problem.numpy()
    mask = arrays.mask & kept
    x = np.where(arrays.mask[..., None], arrays.logits.astype(np.float64), 0.0)
    target = np.arange(x.shape[-1]) == np.where(arrays.mask, arrays.ids, 0)[..., None]
    top = x.max(-1, keepdims=True)
    e = np.exp(x - top)
    p = e / e.sum(-1, keepdims=True)
    logp = np.where(target, x - top, 0.0).sum(-1) - np.log(e.sum(-1))
    a = np.where(arrays.mask, arrays.advantages, 0.0)
    log_ratio = logp - np.where(arrays.mask, arrays.old_logp, logp)
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    clipped = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    most = np.inf if dual_clip is None else dual_clip
    token_loss = np.where((a < 0) & (ratio > most), -a * np.minimum(ratio, most), clipped)
    active = mask & np.where(a > 0, ratio <= 1.2, (ratio >= 0.8) & (ratio <= most)) & (abs(log_ratio) <= 20)
    count = max(mask.sum(), 1)
    grad = np.where(active, -weights * ratio * a, 0.0)[..., None] / count
    others = np.where(target, 0.0, p).sum(-1, keepdims=True)
    dlogits = np.where(active[..., None], grad * np.where(target, others, -p), 0.0)
    total = np.where(mask, weights * token_loss, 0.0).sum()
    return {"loss": np.float32(total / count), "dlogits": dlogits.astype(arrays.logits.dtype)}


def log_ratios(arrays: Any) -> tuple[Any, Any]:
    """`y = old_logp − rollout_logp`, or 0 where rollout_logp is NaN, and the mean of each row."""
    y = np.where(arrays.mask & ~np.isnan(arrays.rollout_logp), arrays.old_logp.astype(np.float64) - arrays.rollout_logp, 0.0)
    return y, y.sum(-1, keepdims=True) / np.maximum(arrays.mask.sum(-1, keepdims=True), 1)


def openrlhf(problem: assay.Problem) -> dict[str, Any]:
    """OpenRLHF with `is_correction_level: seq`."""
    y, mean = log_ratios(problem.numpy())
    within = (np.exp(mean) >= 0.5) & (np.exp(mean) <= 5.0)
    return loss(problem, np.where(within, np.exp(np.minimum(y, 700.0)), 0.0), True, None)


def openrlhf_of_tokens(problem: assay.Problem) -> dict[str, Any]:
    """OpenRLHF with `is_correction_level: token`."""
    weights = np.exp(np.minimum(log_ratios(problem.numpy())[0], 700.0))
    return loss(problem, np.where((weights >= 0.5) & (weights <= 5.0), weights, 0.0), True, None)


def verl(problem: assay.Problem) -> dict[str, Any]:
    """verl with truncated weights of tokens, and rows rejected by their geometric mean."""
    y, _ = log_ratios(problem.numpy())
    clamped = np.clip(y, -20, 20)
    mean = clamped.sum(-1, keepdims=True) / np.maximum(problem.numpy().mask.sum(-1, keepdims=True), 1)
    kept = (-mean >= np.log(0.5)) & (-mean <= np.log(2.0))
    return loss(problem, np.minimum(np.exp(clamped), 2.0), kept, 3.0)


VERL = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
LOSSES: list[Any] = [
    ("openrlhf", openrlhf, {"is_correction_level": "seq"}),
    ("openrlhf", openrlhf_of_tokens, {"is_correction_level": "token"}),
    ("verl", verl, {f"rollout_correction.{name}": value for name, value in VERL.items()}),
]


@pytest.mark.parametrize(("project", "kernel", "options"), LOSSES)
def test_sampler_weights_port_of_the_description_passes(project: str, kernel: Any, options: dict[str, str]) -> None:
    spec = assay.spec(project, batch={"sampling_logps": True}, **options)
    assert "where rollout_logp is NaN (not scored)" in spec.describe()
    problems = list(assay.problems(spec, 60))
    scored = [~np.isnan(problem.numpy().rollout_logp) | ~problem.numpy().mask for problem in problems]
    assert sum(not each.all() for each in scored) > 4, "no problem has a token that was not scored"
    verdicts = [problem.check(kernel(problem)) for problem in problems]
    # A batch of which no token counts, or every row is rejected, has no gradient to compare, which is no pass.
    assert [failure for each in verdicts for failure in each.failures] == []
    assert sum(each.passed for each in verdicts) > 50


def test_sampler_weights_report_shows_the_unscored_token() -> None:
    spec = assay.spec("openrlhf", batch={"sampling_logps": True}, is_correction_level="token")
    shown = ""
    for problem in assay.problems(spec, 60):
        arrays = problem.numpy()
        with np.errstate(all="ignore"):
            weights = np.exp(arrays.old_logp.astype(np.float64) - arrays.rollout_logp)
        if np.isnan(weights[arrays.mask]).any():
            shown += "\n".join(problem.check(loss(problem, weights, True, None)).failures)
    assert "rollout_logp NaN (not scored)" in shown, shown
