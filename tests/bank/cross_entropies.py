"""Cross-entropies: wrong ones in PyTorch for the bank, and honest ones of PyTorch and JAX, compiled, in chunks and fused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from entries import wrong
from honest import HonestForm
from torch.utils.checkpoint import checkpoint

KIND = "cross-entropy"
CAMPAIGN = "check_cross_entropy"
IGNORED = -100


def of_tokens(logits: Any, ids: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Any, Any]:
    """The loss of each token in f32, 0 where it does not count, and which count."""
    counts = ids != IGNORED
    x = logits.float().where(counts[:, None], 0)
    lse = x.logsumexp(-1)
    losses = (1 - label_smoothing) * (lse - x.gather(-1, ids.where(counts, 0)[:, None])[:, 0])
    if label_smoothing:
        losses = losses + label_smoothing * (lse - x.mean(-1))
    if z_loss:
        losses = losses + z_loss * lse**2
    return losses.where(counts, 0), counts


# Wrong ones.


@wrong(KIND, r"normaliser-counts-padding|each batch has of its own", also=r"every token of the padded width", campaign=CAMPAIGN)
def ignored_tokens_in_the_mean(logits: Any, ids: Any) -> Any:
    """The mean divides by all tokens."""
    return of_tokens(logits, ids)[0].mean()


@wrong(KIND, r"loss-summed-in-bf16", campaign=CAMPAIGN)
def mean_added_up_in_bf16(logits: Any, ids: Any) -> Any:
    """Token losses are added up in bf16, one by one, as PyTorch's linear_cross_entropy adds chunks of bf16 inputs."""
    losses, counts = of_tokens(logits, ids)
    total = torch.zeros((), dtype=torch.bfloat16)
    for loss in losses:
        total = (total.float() + loss).bfloat16()
    return total.float() / counts.sum()


@wrong(KIND, r"smoothing-over-others", campaign=CAMPAIGN, label_smoothing=0.1)
def smoothing_over_the_other_classes(logits: Any, ids: Any) -> Any:
    """The uniform share is over the V − 1 classes that are not the target."""
    (hard, counts), (uniform, _) = of_tokens(logits, ids), of_tokens(logits, ids, 1.0)
    vocab = logits.shape[-1]
    return (0.9 * hard + 0.1 * (vocab * uniform - hard) / (vocab - 1)).sum() / counts.sum()


@wrong(KIND, r"no label_smoothing", campaign=CAMPAIGN, label_smoothing=0.1)
def smoothing_forgotten(logits: Any, ids: Any) -> Any:
    """The target is hard."""
    losses, counts = of_tokens(logits, ids)
    return losses.sum() / counts.sum()


@wrong(KIND, r"smoothing-keeps-target", campaign=CAMPAIGN, label_smoothing=0.1)
def smoothing_added_to_a_whole_target(logits: Any, ids: Any) -> Any:
    """The target's weight stays 1."""
    (hard, counts), (uniform, _) = of_tokens(logits, ids), of_tokens(logits, ids, 1.0)
    return (hard + 0.1 * uniform).sum() / counts.sum()


@wrong(KIND, r"z-loss-not-in-gradient", campaign=CAMPAIGN, z_loss=1e-2)
def z_loss_detached(logits: Any, ids: Any) -> Any:
    """The squared log-sum-exp has no gradient."""
    (hard, counts), (both, _) = of_tokens(logits, ids), of_tokens(logits, ids, z_loss=1e-2)
    return (hard + (both - hard).detach()).sum() / counts.sum()


@wrong(KIND, r"z-loss-of-shifted-sum", campaign=CAMPAIGN, z_loss=1e-2)
def z_loss_without_the_maximum(logits: Any, ids: Any) -> Any:
    """The logarithm is of the sum relative to the maximum."""
    losses, counts = of_tokens(logits, ids)
    x = logits.float().where(counts[:, None], 0)
    shifted = (x - x.amax(-1, keepdim=True).detach()).logsumexp(-1)
    return (losses + (1e-2 * shifted**2).where(counts, 0)).sum() / counts.sum()


class UpstreamIgnored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, ids: Any) -> Any:
        with torch.enable_grad():
            x = logits.detach().requires_grad_()
            losses, counts = of_tokens(x, ids)
            loss = losses.sum() / counts.sum()
            (ctx.gradient,) = torch.autograd.grad(loss, x)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, sent: Any) -> Any:
        return ctx.gradient, None


@wrong(KIND, r"upstream gradient", also=r"that of what it is called with", campaign=CAMPAIGN)
def gradient_of_the_forward_pass(logits: Any, ids: Any) -> Any:
    """The gradient is made in the forward pass, and the upstream gradient is not looked at."""
    return UpstreamIgnored.apply(logits, ids)


class MultipliedInPlace(UpstreamIgnored):
    @staticmethod
    def backward(ctx: Any, sent: Any) -> Any:
        return ctx.gradient.mul_(sent.to(ctx.gradient.dtype)), None


@wrong(KIND, r"second backward pass", also=r"dlogits are -1\.9+\d* times", campaign=CAMPAIGN)
def gradient_multiplied_in_place(logits: Any, ids: Any) -> Any:
    """The kept gradient is multiplied where it lies: a second backward pass has the first's factor too, as in Liger 0.8.5."""
    return MultipliedInPlace.apply(logits, ids)


# Honest ones.


def plain(logits: Any, ids: Any) -> Any:
    return F.cross_entropy(logits.float(), ids)


def smooth(logits: Any, ids: Any) -> Any:
    return F.cross_entropy(logits.float(), ids, label_smoothing=0.1)


def each(logits: Any, ids: Any) -> Any:
    return F.cross_entropy(logits.float(), ids, reduction="none")


def smooth_sum(logits: Any, ids: Any) -> Any:
    return F.cross_entropy(logits.float(), ids, reduction="sum", label_smoothing=0.3)


def with_z_loss(logits: Any, ids: Any) -> Any:
    losses, counts = of_tokens(logits, ids, 0.1, 1e-3)
    return losses.sum() / counts.sum()


def capped(logits: Any, ids: Any) -> Any:
    return F.cross_entropy(30 * torch.tanh(0.5 * logits.float() / 30), ids)


def in_chunks(logits: Any, ids: Any) -> Any:
    """Sums of chunks of tokens, whose graph is made again in the backward pass."""

    def total(x: Any, ids: Any) -> Any:
        return F.cross_entropy(x.float(), ids, reduction="sum")

    parts = [checkpoint(total, x, some, use_reentrant=False) for x, some in zip(logits.split(5), ids.split(5))]
    return torch.stack(parts).sum() / (ids != IGNORED).sum()


def of_head(hidden: Any, weight: Any, ids: Any) -> Any:
    return F.cross_entropy(F.linear(hidden.float(), weight.float()), ids)


def linear(hidden: Any, weight: Any, ids: Any) -> Any:
    return F.linear_cross_entropy(hidden, weight, ids)


def compiled(logits: Any, ids: Any) -> Any:
    return COMPILED(logits, ids)


COMPILED = torch.compile(smooth, dynamic=True)
FORMS = [
    HonestForm("cross-entropy", plain, CAMPAIGN),
    HonestForm("cross-entropy, smooth", smooth, CAMPAIGN, {"label_smoothing": 0.1}),
    HonestForm("cross-entropy of tokens", each, CAMPAIGN, {"reduction": "none"}),
    HonestForm("cross-entropy, smooth sum", smooth_sum, CAMPAIGN, {"reduction": "sum", "label_smoothing": 0.3}),
    HonestForm("cross-entropy, z-loss", with_z_loss, CAMPAIGN, {"label_smoothing": 0.1, "z_loss": 1e-3}),
    HonestForm("cross-entropy, softcap", capped, CAMPAIGN, {"softcap": 30.0, "logit_scale": 0.5}),
    HonestForm("cross-entropy in chunks", in_chunks, CAMPAIGN),
    HonestForm("cross-entropy, compiled", compiled, CAMPAIGN, {"label_smoothing": 0.1, "shapes": "few", "dtypes": ["f32"]}),
    HonestForm("cross-entropy of a head", of_head, CAMPAIGN, {"lm_head": True}),
    HonestForm("linear cross-entropy", linear, CAMPAIGN, {"lm_head": True, "dtypes": ["f32"]}),
]


def of_jax() -> list[HonestForm]:
    import jax
    import jax.numpy as jnp

    def losses(logits: Any, ids: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Any, Any]:
        """The loss of each token, 0 where it does not count, and which count."""
        counts = ids != IGNORED
        x = jnp.where(counts[:, None], logits.astype(jnp.float32), 0.0)
        logp = jax.nn.log_softmax(x)
        hard = -jnp.take_along_axis(logp, jnp.where(counts, ids, 0)[:, None], axis=-1)[:, 0]
        uniform = -logp.mean(-1) if label_smoothing else 0.0
        squares = z_loss * jax.nn.logsumexp(x, axis=-1) ** 2 if z_loss else 0.0
        return jnp.where(counts, (1 - label_smoothing) * hard + label_smoothing * uniform + squares, 0.0), counts

    def plain(logits: Any, ids: Any) -> Any:
        of_each, counts = losses(logits, ids)
        return of_each.sum() / counts.sum()

    def smooth_with_z_loss(logits: Any, ids: Any) -> Any:
        of_each, counts = losses(logits, ids, 0.1, 1e-3)
        return of_each.sum() / counts.sum()

    few = {"framework": "jax", "shapes": "few"}
    return [
        HonestForm("cross-entropy in JAX", plain, CAMPAIGN, few),
        HonestForm("cross-entropy in JAX, z-loss", smooth_with_z_loss, CAMPAIGN, {**few, "label_smoothing": 0.1, "z_loss": 1e-3}),
    ]


if find_spec("jax"):
    FORMS += of_jax()
