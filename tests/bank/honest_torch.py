"""Honest forms in PyTorch: losses, log-probabilities and entropies, as trainers write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from callers import Fused, chosen, token_losses
from honest import HonestForm, each_wide
from torch.utils.checkpoint import checkpoint

# Log-probabilities of f32 logits.


def log_softmax(x: Any, ids: Any) -> Any:
    return chosen(x.log_softmax(-1), ids)


def logsumexp(x: Any, ids: Any) -> Any:
    return chosen(x, ids) - x.logsumexp(-1)


def cross_entropy(x: Any, ids: Any) -> Any:
    return -F.cross_entropy(x.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)


def nll_loss(x: Any, ids: Any) -> Any:
    return -F.nll_loss(x.log_softmax(-1).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)


def row_by_row(x: Any, ids: Any) -> Any:
    return torch.stack([chosen(row.log_softmax(-1), each) for row, each in zip(x, ids)])


def in_chunks_of_tokens(x: Any, ids: Any) -> Any:
    return torch.cat([logsumexp(part, each) for part, each in zip(x.split(4, 1), ids.split(4, 1))], 1)


def by_distribution(x: Any, ids: Any) -> Any:
    return torch.distributions.Categorical(logits=x, validate_args=False).log_prob(ids)


def checkpointed(x: Any, ids: Any) -> Any:
    return checkpoint(logsumexp, x, ids, use_reentrant=False)


def in_f64(x: Any, ids: Any) -> Any:
    return logsumexp(x.double(), ids).float()


def by_index(x: Any, ids: Any) -> Any:
    logps = x.log_softmax(-1).flatten(0, 1)
    return logps[torch.arange(len(logps)), ids.flatten()].view(ids.shape)


LOGPS = (log_softmax, logsumexp, cross_entropy, nll_loss, row_by_row, in_chunks_of_tokens)
OTHERS = (by_distribution, checkpointed, in_f64, by_index)


# Entropies of f32 logits.


def entropy_of_logps(x: Any) -> Any:
    logps = x.log_softmax(-1)
    p = logps.exp()
    return -(p * logps.where(p > 0, 0)).sum(-1)


def entropy_of_softmax(x: Any) -> Any:
    p = x.softmax(-1)
    return x.logsumexp(-1) - (p * x.where(p > 0, 0)).sum(-1)


def scores(logp: Any, entropy: Any = None, temperature: float = 1.0, softcap: float | None = None) -> Any:
    """A function as `check_logp` takes it, which upcasts first; with three arguments of hidden states and a head."""

    def fn(*args: Any) -> Any:
        *inputs, ids = args
        x = inputs[0].float()
        if len(inputs) == 2:
            x = torch.einsum("bth,vh->btv", x, inputs[1].float())
        x = softcap * torch.tanh(x / softcap) if softcap else x
        x = x / temperature
        return (logp(x, ids), entropy(x)) if entropy else logp(x, ids)

    fn.__name__ = logp.__name__
    return fn


def loss_by(logp: Any) -> Any:
    def fn(x: Any) -> Any:
        counting = x.logits.float().where(x.mask[..., None], 0)
        of_tokens = logp(counting, x.ids.where(x.mask, 0))
        return token_losses(x, of_tokens).sum(), {"logp": of_tokens}

    fn.__name__ = logp.__name__
    return fn


def of_head(x: Any) -> Any:
    """A loss by a linear layer."""
    counting = x.hidden.float().where(x.mask[..., None], 0)
    return token_losses(x, logsumexp(F.linear(counting, x.lm_head.float()), x.ids.where(x.mask, 0))).sum()


def of_head_in_chunks(x: Any) -> Any:
    """A loss whose logits are made a chunk of tokens at a time, and made again in the backward pass."""
    head, counting, ids = x.lm_head.float(), x.hidden.float().where(x.mask[..., None], 0), x.ids.where(x.mask, 0)

    def of(hidden: Any, ids: Any) -> Any:
        return log_softmax(F.linear(hidden, head), ids)

    parts = [checkpoint(of, each, some, use_reentrant=False) for each, some in zip(counting.split(4, 1), ids.split(4, 1))]
    return token_losses(x, torch.cat(parts, 1)).sum()


def fused(x: Any) -> Any:
    """A loss that makes dlogits in its forward pass."""
    return Fused.apply(x.logits, x)


def both_of_one_array(x: Any, ids: Any) -> Any:
    """Log-probabilities and entropies of one `log_softmax`, whose gradient adds up the cotangents of both."""
    logps = x.float().log_softmax(-1)
    return chosen(logps, ids), -(logps.exp() * logps.where(logps.exp() > 0, 0)).sum(-1)


def several(x: Any, ids: Any) -> Any:
    return x.float().log_softmax(-1).gather(-1, ids)


# PyTorch adds the terms of transposed logits one by one, as `sums.py` shows: that form is off by tens of limits from V = 32,768 on, and
# is in the bank of wrong kernels.
FORMS = [HonestForm(f"torch {fn.__name__}", scores(fn), "check_logp", {}) for fn in LOGPS + OTHERS]
FORMS += [HonestForm(f"torch {fn.__name__}, wide", scores(fn), "check_logp", each_wide("f32", "bf16")) for fn in LOGPS]
FORMS += [HonestForm(f"torch {fn.__name__}, loss", loss_by(fn), "check_loss", {}) for fn in LOGPS + OTHERS]
FORMS += [
    HonestForm("torch T 0.7", scores(logsumexp, temperature=0.7), "check_logp", {"temperature": 0.7}),
    HonestForm("torch softcap", scores(logsumexp, softcap=30.0), "check_logp", {"logits": {"softcap": 30.0}}),
    HonestForm("torch f16", scores(log_softmax), "check_logp", {"dtypes": ["f16"]}),
    HonestForm("torch several ids", several, "check_logp", {"ids_per_token": 8}),
    HonestForm("torch entropy of logps", scores(log_softmax, entropy_of_logps), "check_logp", {"entropy": True}),
    HonestForm("torch entropy of softmax", scores(logsumexp, entropy_of_softmax), "check_logp", {"entropy": True}),
    HonestForm("torch logp and entropy of one array", both_of_one_array, "check_logp", {"entropy": True}),
    HonestForm("torch head", scores(logsumexp), "check_logp", {"lm_head": True}),
    HonestForm("torch head [H,V]", scores(log_softmax), "check_logp", {"lm_head": True, "layout": "hv"}),
    HonestForm("torch head, loss", of_head, "check_loss", {"lm_head": True}),
    HonestForm("torch head in chunks, loss", of_head_in_chunks, "check_loss", {"lm_head": True}),
    HonestForm("torch fused, loss", fused, "check_loss", {"dtypes": ["f32"]}),
    HonestForm("torch entropy, wide", scores(log_softmax, entropy_of_logps), "check_logp", {"entropy": True, **each_wide("f32", "bf16")}),
    HonestForm("torch entropy of one array, wide", both_of_one_array, "check_logp", {"entropy": True, **each_wide("f32", "bf16")}),
]
