"""Published divergences from a teacher before `assay.check_divergence`, as a table for docs/distillation.md:

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu MAXTEXT=FOLDER python tests/panel/divergence.py

On the CPU: PyTorch's, TRL's, optax', Tunix' and MaxText's, and Liger's by Triton's interpreter on small problems. What
has a head is given an identity, through which −∞ goes as the dtype's lowest number. MAXTEXT is the folder of MaxText's
wheel, as fixtures/peers/record/divergence.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import assay
import torch
from torch.nn import functional as F

from loss_table import Published, of_maxtext, print_table
from peers import bare

Divergence = Callable[..., Any]
#: Triton's interpreter runs a program at a time.
SMALL: dict[str, Any] = {"shapes": ["2x3x33", "1x2x257"]}
#: An identity of the vocabulary's size.
IDENTITY: dict[str, Any] = {"shapes": ["2x3x33", "1x4x257", "2x2x1025"]}
MEAN = {"reduction": "mean"}
TWICE = {"temperature": 2.0, "temperature_squared": True}
TOP = {"teacher_top_k": 8, "kind": "reverse_kl"}


def mixed(beta: float) -> dict[str, Any]:
    kinds = {0.0: "forward_kl", 1.0: "reverse_kl"}
    return {"kind": kinds[beta]} if beta in kinds else {"kind": "jensen_shannon", "beta": beta}


def of_torch(cast: bool, log_target: bool) -> Divergence:
    def loss(student: Any, teacher: Any) -> Any:
        if cast:
            student, teacher = student.float(), teacher.float()
        target = teacher.log_softmax(-1) if log_target else teacher.softmax(-1)
        return F.kl_div(student.log_softmax(-1), target, reduction="none", log_target=log_target).sum(-1)

    return loss


def of_gkd(beta: float) -> Callable[[], Divergence]:
    def make() -> Divergence:
        from trl.experimental.gkd.gkd_trainer import GKDTrainer

        return lambda student, teacher: GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta)

    return make


def of_sdpo() -> Divergence:
    from trl.experimental.sdpo.loss_utils import compute_full_logit_self_distillation_loss

    return lambda student, teacher: compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=0.5)


def of_sdpo_top(add_tail: bool) -> Callable[[], Divergence]:
    """SDPO over a teacher's entries, by the statements of its trainer with `use_teacher_server`."""

    def make() -> Divergence:
        from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

        def loss(student: Any, logp: Any, ids: Any) -> Any:
            own = torch.gather(torch.log_softmax(student, dim=-1), dim=-1, index=ids)
            if add_tail:
                own, logp = add_tail_bucket(own), add_tail_bucket(logp)
            else:
                own = own - torch.logsumexp(own, dim=-1, keepdim=True)
                logp = logp - torch.logsumexp(logp, dim=-1, keepdim=True)
            return compute_divergence(own, logp, 1.0)

        return loss

    return make


def lowest(x: Any) -> Any:
    """Logits that go through a product: −∞ is the lowest number."""
    return x.clamp_min(torch.finfo(x.dtype).min)


def eye(x: Any) -> Any:
    return torch.eye(x.shape[-1], dtype=x.dtype)


def of_chunked(beta: float) -> Callable[[], Divergence]:
    def make() -> Divergence:
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        def loss(student: Any, teacher: Any) -> Any:
            s, t = lowest(student)[None], lowest(teacher)[None]
            mask = torch.ones(s.shape[:2], dtype=torch.int64)
            return _chunked_divergence_loss(s, t, eye(s), eye(t), mask, beta)[0]

        return loss

    return make


def of_liger_chunked(beta: float) -> Callable[[], Divergence]:
    def make() -> Divergence:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)

        def loss(student: Any, teacher: Any) -> Any:
            s, t = lowest(student), lowest(teacher)
            return module(s, eye(s), t, eye(t), torch.zeros(len(s), dtype=torch.int64))

        return loss

    return make


def of_liger_jsd(beta: float) -> Callable[[], Divergence]:
    def make() -> Divergence:
        from liger_kernel.ops.jsd import LigerJSDFunction

        def loss(student: Any, teacher: Any) -> Any:
            return LigerJSDFunction.apply(student.log_softmax(-1), teacher.log_softmax(-1), None, beta)

        return loss

    return make


def of_liger_linear_jsd(beta: float) -> Callable[[], Divergence]:
    def make() -> Divergence:
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

        def loss(student: Any, teacher: Any) -> Any:
            s, t = lowest(student), lowest(teacher)
            return LigerFusedLinearJSDFunction.apply(s, eye(s), t, eye(t), None, beta)

        return loss

    return make


def scalar(number: float) -> Any:
    """A number that Triton makes a scalar of on a GPU, and its interpreter does not."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(np.array([number], np.float32), tl.float32), tl.float32)


def of_liger_kl_div() -> Divergence:
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    def loss(student: Any, teacher: Any) -> Any:
        target = teacher.softmax(-1)
        return LigerKLDivLossFunction.apply(student.log_softmax(-1), target, "batchmean", False, scalar(1e-10))

    return loss


def of_liger_linear_kl_div() -> Divergence:
    from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction

    def loss(student: Any, teacher: Any) -> Any:
        s = lowest(student)
        target = teacher.float().softmax(-1)
        return LigerFusedLinearKLDivFunction.apply(s, eye(s), target, None, "batchmean", -100, 1.0, scalar(1e-10))

    return loss


def of_optax() -> Divergence:
    import jax
    import optax

    def loss(student: Any, teacher: Any) -> Any:
        return optax.losses.kl_divergence(jax.nn.log_softmax(student), jax.nn.softmax(teacher))

    return loss


def of_optax_logs() -> Divergence:
    import jax
    import optax

    def loss(student: Any, teacher: Any) -> Any:
        return optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(student), jax.nn.log_softmax(teacher))

    return loss


def no_labels(student: Any) -> Any:
    """Labels of a loss that has no weight."""
    import jax

    return jax.nn.one_hot(jax.numpy.zeros(student.shape[:-1], int), student.shape[-1])


def of_tunix() -> Divergence:
    bare("tunix", "tunix.distillation", "tunix.distillation.strategies")
    from tunix.distillation.strategies.logit import LogitStrategy

    strategy = LogitStrategy(None, None, None, temperature=2.0, alpha=1.0)
    return lambda student, teacher: strategy.compute_loss(student, teacher, no_labels(student))[0]


def of_maxtext_strategy() -> Divergence:
    from types import SimpleNamespace

    import jax
    import jax.numpy as jnp
    import optax

    within = {"jax": jax, "jnp": jnp, "optax": optax}
    within["DistillationStrategy"] = type("DistillationStrategy", (), {"__init__": lambda self, *_, **__: None})
    path = "trainers/post_train/distillation/distillation_utils.py"
    found = of_maxtext(path, {"CombinedDistillationStrategy"}, within, r"METRIC_\w+|_PPL_CE_CAP")
    strategy = found["CombinedDistillationStrategy"](None, None, temperature=2.0, alpha=1.0)

    def loss(student: Any, teacher: Any) -> Any:
        both = (
            SimpleNamespace(logits=x, out_projection_activations=None, moe_lb_loss=None) for x in (student, teacher)
        )
        return strategy.compute_loss(*both, no_labels(student))[0]

    return loss


def of_own(**options: Any) -> Callable[[], Divergence]:
    """The operation of this package, from logits or from a teacher's entries."""

    def make() -> Divergence:
        import assay.torch

        def loss(student: Any, teacher: Any, ids: Any = None) -> Any:
            given = {"teacher_logits": teacher} if ids is None else {"teacher_logp": teacher, "teacher_ids": ids}
            return assay.torch.divergence(student, **given, **options)

        return loss

    return make


LOSSES = [
    Published("`F.kl_div` of log-softmax and softmax", lambda: of_torch(False, False)),
    Published("the same of `logits.float()`", lambda: of_torch(True, False)),
    Published("the same, `log_target=True`", lambda: of_torch(True, True)),
    Published("TRL's `generalized_jsd_loss(beta=0)`", of_gkd(0), {**mixed(0.0), **MEAN}),
    Published("TRL's `generalized_jsd_loss(beta=0.5)`", of_gkd(0.5), {**mixed(0.5), **MEAN}),
    Published("TRL's `generalized_jsd_loss(beta=1)`", of_gkd(1), {**mixed(1.0), **MEAN}),
    Published("TRL SDPO, all entries, `distillation_alpha=0.5`", of_sdpo, mixed(0.5)),
    Published("TRL SDPO, a teacher's 8 entries and a tail", of_sdpo_top(True), {**TOP, "rest": "tail"}),
    Published("TRL SDPO, a teacher's 8 entries", of_sdpo_top(False), {**TOP, "rest": "renormalized"}),
    Published("TRL's `_chunked_divergence_loss(beta=0)`", of_chunked(0.0), {**mixed(0.0), **MEAN, **IDENTITY}),
    Published("TRL's `_chunked_divergence_loss(beta=0.5)`", of_chunked(0.5), {**mixed(0.5), **MEAN, **IDENTITY}),
    Published(
        "Liger's `LigerFusedLinearJSDLoss(beta=0.5)`",
        of_liger_chunked(0.5),
        {**mixed(0.5), **MEAN, **IDENTITY},
    ),
    Published("Liger's `LigerJSDFunction(beta=0)`", of_liger_jsd(0.0), {**mixed(0.0), **MEAN, **SMALL}),
    Published("Liger's `LigerJSDFunction(beta=0.5)`", of_liger_jsd(0.5), {**mixed(0.5), **MEAN, **SMALL}),
    Published(
        "Liger's `LigerFusedLinearJSDFunction(jsd_beta=0.5)`",
        of_liger_linear_jsd(0.5),
        {**mixed(0.5), **MEAN, **SMALL},
    ),
    Published("Liger's `LigerKLDivLossFunction`", of_liger_kl_div, {**MEAN, **SMALL}),
    Published("Liger's `LigerFusedLinearKLDivFunction`", of_liger_linear_kl_div, {**MEAN, **SMALL}),
    Published("optax's `kl_divergence`", of_optax, {"framework": "jax"}),
    Published("optax's `kl_divergence_with_log_targets`", of_optax_logs, {"framework": "jax"}),
    Published("Tunix' `LogitStrategy`", of_tunix, {"framework": "jax", **TWICE, **MEAN}),
    Published("MaxText's `CombinedDistillationStrategy`", of_maxtext_strategy, {"framework": "jax", **TWICE, **MEAN}),
    Published("`assay.torch.divergence`", of_own()),
    Published("`assay.torch.divergence(beta=0.5)`", of_own(kind="jensen_shannon", beta=0.5), mixed(0.5)),
    Published(
        "`assay.torch.divergence`, a teacher's 8 entries and a tail",
        of_own(kind="reverse_kl", rest="tail"),
        {**TOP, "rest": "tail"},
    ),
]

if __name__ == "__main__":
    torch.manual_seed(0)
    print_table(assay.check_divergence, LOSSES)
