"""The loss around log-probabilities, over the arrays of any framework: `xp` is numpy, torch or jax.numpy."""

from collections.abc import Callable
from typing import Any

from protocol import Array, Form, Numbers, Tokens


def log_ratio(logp: Array, tokens: Tokens, form: Form) -> Array:
    """[B,T], or [B,1] for a sequence."""
    x = logp - tokens.old_logp
    return x if form.level == "token" else (x * tokens.mask).sum(-1, keepdims=True) / row_counts(tokens)


def counted(xp: Any, logp: Array, tokens: Tokens) -> Array:
    """Log-probabilities, 0 under the mask: selected before they are exponentiated, as ∞ · 0 is NaN."""
    return xp.where(tokens.mask > 0, logp, 0.0)


def row_counts(tokens: Tokens) -> Array:
    count = tokens.mask.sum(-1, keepdims=True)
    return count + (count == 0)


def token_count(tokens: Tokens) -> Array:
    """The number of tokens that count; 1 if none does, whose loss is 0."""
    count = tokens.mask.sum()
    return count + (count == 0)


def sigmoid(xp: Any, x: Array) -> Array:
    return 1 / (1 + xp.exp(-x))


def token_loss(
    xp: Any, logp: Array, tokens: Tokens, form: Form, numbers: Numbers, constant: Callable[[Array], Array]
) -> Array:
    """[B,T], to be differentiated; `constant` stops the gradient."""
    first, second, _, beta, _ = numbers
    logp = counted(xp, logp, tokens)
    advantages, ratio = tokens.advantages, xp.exp(log_ratio(logp, tokens, form))
    if form.objective == "ppo_clip":
        loss = -xp.minimum(ratio * advantages, xp.clip(ratio, first, second) * advantages)
    elif form.objective == "cispo":
        loss = -constant(xp.clip(ratio, first, second)) * advantages * logp
    else:
        tau = xp.where(advantages > 0, first, second)
        loss = -4 / tau * sigmoid(xp, tau * (ratio - 1)) * advantages
    if form.kl == "none":
        return loss + xp.zeros_like(logp)  # [B,T], where the ratio is of a sequence too
    d = tokens.ref_logp - logp
    kl = xp.exp(d) - d - 1
    return loss + beta * (ratio * kl if form.kl == "ratio" else kl)


def reduce(loss: Array, entropy: Array, tokens: Tokens, form: Form, numbers: Numbers) -> Array:
    """The scalar."""
    masked, count = loss * tokens.mask, token_count(tokens)
    mean = (masked.sum(-1, keepdims=True) / row_counts(tokens)).mean() if form.row_means else masked.sum() / count
    return mean - numbers.entropy_coef * (entropy * tokens.mask).sum() / count


def gradient(xp: Any, logp: Array, tokens: Tokens, form: Form, numbers: Numbers) -> Array:
    """∂loss/∂logp, [B,T], by hand."""
    first, second, _, beta, _ = numbers
    logp = counted(xp, logp, tokens)
    mask, advantages, ratio = tokens.mask, tokens.advantages, xp.exp(log_ratio(logp, tokens, form))
    weight = mask / row_counts(tokens) / mask.shape[0] if form.row_means else mask / token_count(tokens)
    through_ratio = form.objective != "cispo"
    if form.objective == "ppo_clip":
        follows = ((advantages > 0) & (ratio <= second)) | ((advantages < 0) & (ratio >= first))
        policy = xp.where(follows, -ratio * advantages, 0.0)
    elif form.objective == "cispo":
        policy = -xp.clip(ratio, first, second) * advantages
    else:
        tau = xp.where(advantages > 0, first, second)
        gate = sigmoid(xp, tau * (ratio - 1))
        policy = -4 * gate * (1 - gate) * ratio * advantages
    policy = weight * policy
    if form.level == "sequence" and through_ratio:
        policy = policy.sum(-1, keepdims=True) * mask / row_counts(tokens)
    if form.kl == "none":
        return policy
    d = tokens.ref_logp - logp
    return policy + weight * beta * (-ratio * d if form.kl == "ratio" else 1 - xp.exp(d))


def total(x: Array) -> Array:
    return x.sum(-1, keepdims=True)


def closed_form(
    xp: Any, take: Any, logits: Array, tokens: Tokens, form: Form, numbers: Numbers, *, gaps: bool, total: Any = total
) -> dict[str, Array]:
    """All outputs without autodiff.

    With `gaps` the maximum is subtracted before the temperature divides, and the gradient of the entropy is that of
    gaps; without, logits are divided first and the gradient is the textbook's −p·(log p + H). `total` adds up the
    softmax's denominator, and with `gaps` the entropy's terms.
    """
    if gaps:
        x = (logits - xp.amax(logits, -1, keepdims=True)) / numbers.temperature
        sums = total(xp.exp(x))
        logps, p = x - xp.log(sums), xp.exp(x) / sums
    else:
        x = logits / numbers.temperature
        top = xp.amax(x, -1, keepdims=True)
        logps = x - (top + xp.log(total(xp.exp(x - top))))
        p = xp.exp(logps)
    logp = take(logps, tokens.ids[..., None], -1)[..., 0]
    if gaps:
        seen = xp.where(p > 0, x, 0.0)
        mean = total(p * seen)
        entropy, of_entropy = xp.log(sums) - mean, p * (seen - mean)
    else:
        seen = xp.where(p > 0, logps, 0.0)
        entropy = -(p * seen).sum(-1, keepdims=True)
        of_entropy = p * (seen + entropy)
    entropy = entropy[..., 0]

    losses = token_loss(xp, logp, tokens, form, numbers, lambda constant: constant)
    g = gradient(xp, logp, tokens, form, numbers)[..., None]
    bonus = (numbers.entropy_coef * tokens.mask / token_count(tokens))[..., None]
    target = xp.where(xp.arange(logits.shape[-1]) == tokens.ids[..., None], 1.0, 0.0)
    dlogits = (g * (target - p) + bonus * of_entropy) / numbers.temperature
    loss = reduce(losses, entropy, tokens, form, numbers)
    return {"loss": loss, "logp": logp, "entropy": entropy, "token_loss": losses, "dlogits": dlogits}
