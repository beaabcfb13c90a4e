"""Liger: the Triton kernel through Triton's interpreter, and the loss with an LM head, the identity, in torch."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.transformers.grpo_loss import triton_grpo_loss

from peers import fits_identity
from protocol import Outputs, Problem, Unsupported, versions
from torch_kernels import array, moved, tensor

ABOUT = versions("liger-kernel", "torch", "triton")
OUTPUTS: list[str] = []
LOSSES = {("ppo_clip", False): "dapo", ("ppo_clip", True): "grpo", ("cispo", False): "cispo", ("sapo", True): "sapo"}


def options(problem: Problem) -> dict[str, object]:
    form, numbers = problem.form, problem.numbers
    loss_type = LOSSES.get((form.objective, form.row_means))
    if loss_type is None or numbers.entropy_coef != 0:
        raise Unsupported(f"{form.objective} with this reduction, or an entropy bonus")
    clips = form.objective == "ppo_clip"
    return {
        "loss_type": loss_type,
        "temperature": numbers.temperature,
        "beta": numbers.beta,
        "importance_sampling_level": form.level,
        "use_bias_correction_kl": form.kl == "ratio",
        "low": 1 - numbers.first if clips else 0.2,
        "high": numbers.second - 1 if clips else numbers.second,
        "tau": (numbers.first, numbers.second) if form.objective == "sapo" else (1.0, 1.05),
    }


def triton(problem: Problem) -> Outputs:
    given, tokens = options(problem), moved(problem, torch.float32)
    low, high, (positive, negative) = given.pop("low"), given.pop("high"), given.pop("tau")
    leaf = tensor(problem.logits).requires_grad_()
    padded = torch.cat([leaf, torch.zeros_like(leaf[:, :1])], 1)  # the last position predicts nothing
    rest = {"sapo_temperature_pos": positive, "sapo_temperature_neg": negative, "eps_low": low, "eps_high": high}
    loss, _ = triton_grpo_loss(
        padded,
        tokens.old_logp,
        tokens.ref_logp,
        tokens.ids,
        tokens.advantages[:, 0].contiguous(),
        tokens.mask,
        inplace=False,
        reduce=True,
        **rest,
        **given,
    )
    (dlogits,) = torch.autograd.grad(loss, leaf)
    return {"loss": array(loss.float()), "dlogits": array(dlogits)}


def linear(problem: Problem) -> Outputs:
    if not fits_identity(problem.logits):
        raise Unsupported("a head of this size, or −∞ through a product")
    given, tokens = options(problem), moved(problem, torch.float32)
    low, high, (positive, negative) = given.pop("low"), given.pop("high"), given.pop("tau")
    leaf = tensor(problem.logits).requires_grad_()
    rest = {
        "sapo_temperature_pos": positive,
        "sapo_temperature_neg": negative,
        "epsilon_low": low,
        "epsilon_high": high,
    }
    module = LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=given["beta"] != 0, **rest, **given)
    loss, _ = module(
        leaf,
        torch.eye(leaf.shape[-1], dtype=leaf.dtype),
        tokens.ids,
        tokens.mask,
        tokens.advantages[:, 0],
        ref_per_token_logps=tokens.ref_logp,
        old_per_token_logps=tokens.old_logp,
    )
    (dlogits,) = torch.autograd.grad(loss, leaf)
    return {"loss": array(loss.float()), "dlogits": array(dlogits)}
