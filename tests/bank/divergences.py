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
    lp, lq = logps(student, teacher, temperature=temperature)
    return (probability(lq, teacher) * (lq - lp)).sum(-1)


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


@wrong(KIND, r"distillation\.kind: reverse_kl", also=r"beta-exchanged", campaign=CAMPAIGN)
def reverse_for_forward(student: Any, teacher: Any) -> Any:
    """Student and teacher are exchanged."""
    return reverse_kl(student, teacher)


@wrong(KIND, r"distillation-beta-exchanged", also=r"beta: 1 - beta", campaign=CAMPAIGN, kind="jensen_shannon", beta=0.1)
def beta_on_the_other_side(student: Any, teacher: Any) -> Any:
    """The weight of the teacher is that of the student."""
    return jensen_shannon(student, teacher, 0.9)


@wrong(KIND, r"square-forgotten", also=r"temperature_squared|0\.25 times", campaign=CAMPAIGN, temperature=2.0, temperature_squared=True)
def temperature_squared_forgotten(student: Any, teacher: Any) -> Any:
    """The divergence is not multiplied by the square of the temperature."""
    return forward_kl(student, teacher, 2.0)


@wrong(KIND, r"teacher-untempered", campaign=CAMPAIGN, temperature=2.0)
def teacher_at_temperature_1(student: Any, teacher: Any) -> Any:
    """The teacher's logits are not divided by the temperature."""
    return forward_kl(student, teacher * 2, 2.0)


@wrong(KIND, r"minus_infinity not finite", campaign=CAMPAIGN, dtypes=["f32"])
def log_target_of_an_absent_entry(student: Any, teacher: Any) -> Any:
    """PyTorch's `kl_div` of log-probabilities is NaN where the teacher's logit is −∞, as TRL's and Liger's divergences are."""
    return F.kl_div(student.float().log_softmax(-1), teacher.float().log_softmax(-1), reduction="none", log_target=True).sum(-1)


@wrong(KIND, r"tail-ignored", also=r"rest: ignored", campaign=CAMPAIGN, teacher_top_k=5, rest="tail")
def tail_left_out(student: Any, logp: Any, ids: Any) -> Any:
    """The probability outside the teacher's entries is no bin."""
    (lp,) = logps(student)
    entries = lp.gather(-1, ids)
    return (logp.float().exp() * (logp.float() - entries)).sum(-1)


@wrong(KIND, r"student-not-renormalized", campaign=CAMPAIGN, teacher_top_k=5, rest="renormalized")
def student_not_renormalized(student: Any, logp: Any, ids: Any) -> Any:
    """The teacher's entries are divided by their sum, and the student's are not."""
    (lp,) = logps(student)
    lq = logp.float().log_softmax(-1)
    return (lq.exp() * (lq - lp.gather(-1, ids))).sum(-1)


@wrong(KIND, r"bf16 only", campaign=CAMPAIGN, lm_head=True, dtypes=["f32", "bf16"])
def teacher_product_in_16_bits(hidden: Any, head: Any, teacher_hidden: Any, teacher_head: Any) -> Any:
    """The teacher's logits are rounded to the dtype of its hidden states, and the student's are not."""
    return forward_kl(F.linear(hidden.float(), head.float()), F.linear(teacher_hidden, teacher_head))


# Honest ones.


def mean(student: Any, teacher: Any) -> Any:
    """PyTorch's own, of entries that the student has: `kl_div` is NaN where both lack one."""
    lp, lq = logps(student, teacher)
    return F.kl_div(lp, probability(lq, teacher), reduction="batchmean")


def hot(student: Any, teacher: Any) -> Any:
    return 4 * forward_kl(student, teacher, 2.0)


def half(student: Any, teacher: Any) -> Any:
    return jensen_shannon(student, teacher, 0.5)


def in_chunks(student: Any, teacher: Any) -> Any:
    """Sums of chunks of tokens, whose graph is made again in the backward pass."""
    parts = [checkpoint(half, x, y, use_reentrant=False) for x, y in zip(student.split(5), teacher.split(5), strict=True)]
    return torch.cat(parts).sum()


def of_heads(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A divergence of the logits of hidden states and heads, the teacher's too unless that is a few entries."""

    def of_hidden(hidden: Any, head: Any, *teacher: Any) -> Any:
        if teacher[1].ndim == 2:
            teacher = (F.linear(teacher[0].float(), teacher[1].float()),)
        return fn(F.linear(hidden.float(), head.float()), *teacher)

    return of_hidden


def of_top(rest: str) -> Callable[..., Any]:
    def fn(student: Any, logp: Any, ids: Any) -> Any:
        absent = student.gather(-1, ids) == -torch.inf
        lp, lq = student.float().log_softmax(-1), logp.float()
        of_entries = lp.gather(-1, ids)
        if rest == "renormalized":
            of_entries, lq = of_entries.log_softmax(-1), lq.log_softmax(-1)
        q = lq.exp()
        terms = (q * (lq.masked_fill(lq == -torch.inf, 0) - of_entries.masked_fill(absent, 0))).sum(-1)
        if rest == "tail":
            # The student's is a sum of the others; the teacher's others are not known. A masked token may have none.
            others = lp.clamp(min=-1e4).scatter(-1, ids, -1e4).logsumexp(-1)
            tail = torch.log(-torch.expm1(logp.double().logsumexp(-1))).float()
            terms = terms + tail.exp() * (tail - others)
        return terms

    return fn


def compiled(student: Any, teacher: Any) -> Any:
    return COMPILED(student, teacher)


COMPILED = torch.compile(forward_kl, dynamic=True)
FORMS = [
    HonestForm("divergence, forward", forward_kl, CAMPAIGN),
    HonestForm("divergence, kl_div", mean, CAMPAIGN, {"reduction": "mean"}),
    HonestForm("divergence, T 2", hot, CAMPAIGN, {"temperature": 2.0, "temperature_squared": True}),
    HonestForm("divergence, reverse", reverse_kl, CAMPAIGN, {"kind": "reverse_kl"}),
    HonestForm("divergence, mixture", jensen_shannon, CAMPAIGN, {"kind": "jensen_shannon", "beta": 0.1}),
    HonestForm("divergence, half", half, CAMPAIGN, {"kind": "jensen_shannon"}),
    HonestForm("divergence in chunks", in_chunks, CAMPAIGN, {"kind": "jensen_shannon", "reduction": "sum"}),
    HonestForm("divergence, compiled", compiled, CAMPAIGN, {"shapes": "few", "dtypes": ["f32"]}),
    HonestForm("divergence of heads, forward", of_heads(forward_kl), CAMPAIGN, {"lm_head": True}),
    HonestForm("divergence of heads, reverse", of_heads(reverse_kl), CAMPAIGN, {"lm_head": True, "kind": "reverse_kl", "layout": "hv"}),
    HonestForm("divergence of heads, mean", of_heads(mean), CAMPAIGN, {"lm_head": True, "reduction": "mean"}),
    HonestForm("divergence of heads, half", of_heads(half), CAMPAIGN, {"lm_head": True, "kind": "jensen_shannon"}),
    HonestForm("divergence of a head, tail", of_heads(of_top("tail")), CAMPAIGN, {"lm_head": True, "teacher_top_k": 5, "rest": "tail"}),
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
