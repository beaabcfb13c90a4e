"""Divergences from a teacher in PyTorch and JAX: wrong ones for the bank, and honest ones, eager, compiled and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from entries import wrong
from honest import HonestForm
from torch.utils.checkpoint import checkpoint

KIND = "divergence"
CAMPAIGN = "check_divergence"


def logps(*logits: Any, temperature: float = 1.0) -> list[Any]:
    """The log-probabilities in f32, and 0 where the probability is 0: no gradient comes back there, and nothing is NaN."""
    all_logps = []
    for x in logits:
        absent = x == -torch.inf
        all_logps.append((x.float() / temperature).log_softmax(-1).masked_fill(absent, 0))
    return all_logps


def probability(logp: Any, logits: Any) -> Any:
    return logp.exp().masked_fill(logits == -torch.inf, 0)


def forward_kl(student: Any, teacher: Any, temperature: float = 1.0) -> Any:
    return F.kl_div((student.float() / temperature).log_softmax(-1), (teacher.float() / temperature).softmax(-1), reduction="none").sum(-1)


def reverse_kl(student: Any, teacher: Any) -> Any:
    lp, lq = logps(student, teacher)
    return (probability(lp, student) * (lp - lq)).sum(-1)


def jensen_shannon(student: Any, teacher: Any, beta: float = 0.1) -> Any:
    lp, lq = logps(student, teacher)
    p, q = probability(lp, student), probability(lq, teacher)
    mixture = beta * q + (1 - beta) * p
    lm = mixture.where(mixture > 0, 1).log()
    return (beta * q * (lq - lm) + (1 - beta) * p * (lp - lm)).sum(-1)


# Wrong ones.


@wrong(KIND, r"teacher-exchanged|numbers of another loss: objective\.distillation\.kind", campaign=CAMPAIGN)
def reverse_for_forward(student: Any, teacher: Any) -> Any:
    """Student and teacher are exchanged."""
    return reverse_kl(student, teacher)


@wrong(KIND, r"beta", campaign=CAMPAIGN, kind="jensen_shannon", beta=0.1)
def beta_on_the_other_side(student: Any, teacher: Any) -> Any:
    """The weight of the teacher is that of the student."""
    return jensen_shannon(student, teacher, 0.9)


@wrong(KIND, r"temperature", campaign=CAMPAIGN, temperature=2.0, temperature_squared=True)
def temperature_squared_forgotten(student: Any, teacher: Any) -> Any:
    """The divergence is not multiplied by the square of the temperature."""
    return forward_kl(student, teacher, 2.0)


@wrong(KIND, r"teacher", campaign=CAMPAIGN, temperature=2.0)
def teacher_at_temperature_1(student: Any, teacher: Any) -> Any:
    """The teacher's logits are not divided by the temperature."""
    return forward_kl(student, teacher * 2, 2.0)


@wrong(KIND, r"minus.infinity.*not finite|not finite", campaign=CAMPAIGN, dtypes=["f32"])
def log_target_of_an_absent_entry(student: Any, teacher: Any) -> Any:
    """PyTorch's `kl_div` of log-probabilities is NaN where the teacher's logit is −∞, as TRL's and Liger's divergences are."""
    return F.kl_div(student.float().log_softmax(-1), teacher.float().log_softmax(-1), reduction="none", log_target=True).sum(-1)


@wrong(KIND, r"gradient|dlogits", campaign=CAMPAIGN, kind="jensen_shannon", beta=0.5)
def mixture_detached(student: Any, teacher: Any) -> Any:
    """The mixture has no gradient, and its part does not cancel: that of the teacher's side is lost."""
    lp, lq = logps(student, teacher)
    p, q = probability(lp, student), probability(lq, teacher)
    mixture = (0.5 * q + 0.5 * p).detach()
    lm = mixture.where(mixture > 0, 1).log()
    return (0.5 * q * (lq - lm) + 0.5 * p.detach() * (lp - lm)).sum(-1)


@wrong(KIND, r"tail", campaign=CAMPAIGN, teacher_top_k=5, rest="tail")
def tail_left_out(student: Any, logp: Any, ids: Any) -> Any:
    """The probability outside the teacher's entries is no bin."""
    (lp,) = logps(student)
    entries = lp.gather(-1, ids)
    return (logp.float().exp() * (logp.float() - entries)).sum(-1)


@wrong(KIND, r"renormal", campaign=CAMPAIGN, teacher_top_k=5, rest="renormalized")
def student_not_renormalized(student: Any, logp: Any, ids: Any) -> Any:
    """The teacher's entries are divided by their sum, and the student's are not."""
    (lp,) = logps(student)
    lq = logp.float().log_softmax(-1)
    return (lq.exp() * (lq - lp.gather(-1, ids))).sum(-1)


# Honest ones.


def mean(student: Any, teacher: Any) -> Any:
    return F.kl_div(student.float().log_softmax(-1), teacher.float().softmax(-1), reduction="batchmean")


def hot(student: Any, teacher: Any) -> Any:
    return 4 * forward_kl(student, teacher, 2.0)


def half(student: Any, teacher: Any) -> Any:
    return jensen_shannon(student, teacher, 0.5)


def in_chunks(student: Any, teacher: Any) -> Any:
    """Sums of chunks of tokens, whose graph is made again in the backward pass."""
    parts = [checkpoint(half, x, y, use_reentrant=False) for x, y in zip(student.split(5), teacher.split(5), strict=True)]
    return torch.cat(parts).sum()


def of_top(rest: str) -> Callable[..., Any]:
    def fn(student: Any, logp: Any, ids: Any) -> Any:
        lp, lq = student.float().log_softmax(-1).gather(-1, ids), logp.float()
        if rest == "renormalized":
            lp, lq = lp.log_softmax(-1), lq.log_softmax(-1)
        terms = F.kl_div(lp, lq.exp(), reduction="none").sum(-1)
        if rest == "tail":
            left = [torch.log(-torch.expm1(x.logsumexp(-1).clamp(max=-1e-7))) for x in (lp, lq)]
            terms = terms + left[1].exp() * (left[1] - left[0])
        return terms

    return fn


def compiled(student: Any, teacher: Any) -> Any:
    return COMPILED(student, teacher)


COMPILED = torch.compile(forward_kl, dynamic=True)
FORMS = [
    HonestForm("divergence, kl_div", forward_kl, CAMPAIGN),
    HonestForm("divergence, batchmean", mean, CAMPAIGN, {"reduction": "mean"}),
    HonestForm("divergence, T 2", hot, CAMPAIGN, {"temperature": 2.0, "temperature_squared": True}),
    HonestForm("divergence, reverse", reverse_kl, CAMPAIGN, {"kind": "reverse_kl"}),
    HonestForm("divergence, mixture", jensen_shannon, CAMPAIGN, {"kind": "jensen_shannon", "beta": 0.1}),
    HonestForm("divergence, half", half, CAMPAIGN, {"kind": "jensen_shannon"}),
    HonestForm("divergence in chunks", in_chunks, CAMPAIGN, {"kind": "jensen_shannon", "reduction": "sum"}),
    HonestForm("divergence, compiled", compiled, CAMPAIGN, {"shapes": "few"}),
    *(HonestForm(f"divergence, {rest}", of_top(rest), CAMPAIGN, {"teacher_top_k": 5, "rest": rest}) for rest in ("tail", "renormalized", "ignored")),
]


def of_jax() -> list[HonestForm]:
    import jax
    import jax.numpy as jnp

    def kl(student: Any, teacher: Any) -> Any:
        lp = jax.nn.log_softmax(student.astype(jnp.float32))
        q = jax.nn.softmax(teacher.astype(jnp.float32))
        lq = jax.nn.log_softmax(teacher.astype(jnp.float32))
        return jnp.where(q > 0, q * (jnp.where(q > 0, lq, 0) - jnp.where(q > 0, lp, 0)), 0).sum(-1)

    def scaled(student: Any, teacher: Any) -> Any:
        return 0.25 * kl(student / jnp.asarray(0.5, student.dtype), teacher / jnp.asarray(0.5, teacher.dtype))

    few = {"framework": "jax", "shapes": "few"}
    return [
        HonestForm("divergence in JAX", kl, CAMPAIGN, few),
        HonestForm("divergence in JAX, T 0.5", scaled, CAMPAIGN, {**few, "temperature": 0.5, "temperature_squared": True}),
    ]


if find_spec("jax"):
    FORMS += of_jax()
