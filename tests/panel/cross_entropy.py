"""Published cross-entropies before `assay.check_cross_entropy`, as a table for docs/cross-entropy.md:

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu MAXTEXT=FOLDER python tests/panel/cross_entropy.py

On the CPU: PyTorch's functions, Transformers', optax', MaxText's, Tokamax' and Apple's, and Liger's by Triton's
interpreter on small problems. What `make panel` and `make peers` do not install is named in
fixtures/peers/record/cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import assay
import torch
from torch.nn import functional as F

from loss_table import Published, of_maxtext, one_call, print_table

#: Triton's interpreter runs a program at a time.
SMALL: dict[str, Any] = {"shapes": ["2x3x33", "1x2x257"]}
SMALL_HEAD: dict[str, Any] = {"shapes": ["2x3x64x33", "1x2x16x257"], "lm_head": True}
HEAD: dict[str, Any] = {"lm_head": True}
JAX = {"framework": "jax"}


def transformers() -> Callable[..., Any]:
    from transformers.loss.loss_utils import fixed_cross_entropy

    return lambda x, ids: fixed_cross_entropy(x.float(), ids)


def mean_of(losses: Any, counts: Any) -> Any:
    """The mean over the tokens that count, which is the caller's."""
    import jax.numpy as jnp

    return jnp.where(counts, losses, 0).sum() / counts.sum()


def of_optax() -> Callable[..., Any]:
    import jax.numpy as jnp
    import optax

    def loss(logits: Any, ids: Any) -> Any:
        counts = ids != -100
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, ids, 0))
        return mean_of(losses, counts)

    return loss


def of_maxtext_utils() -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    names = ["cross_entropy_with_logits", "_cross_entropy_with_logits_fwd", "_cross_entropy_with_logits_bwd"]
    found = of_maxtext("utils/max_utils.py", set(names), {"jax": jax, "jnp": jnp})
    cross_entropy_with_logits, *passes = (found[name] for name in names)
    cross_entropy_with_logits.defvjp(*passes)

    def loss(logits: Any, ids: Any) -> Any:
        targets = jax.nn.one_hot(ids, logits.shape[-1])
        return mean_of(cross_entropy_with_logits(logits, targets, 0.0)[0], ids != -100)

    return loss


def of_tokamax() -> Callable[..., Any]:
    import jax.numpy as jnp
    from absl import flags
    from tokamax import linear_softmax_cross_entropy_loss

    # It would read the command line otherwise.
    flags.FLAGS(["tokamax"])

    def loss(hidden: Any, weight: Any, ids: Any) -> Any:
        # No id is ignored there: what does not count is a row of zeros, whose loss is ln V and whose gradients are 0.
        counts = ids != -100
        rows, labels = jnp.where(counts[:, None], hidden, 0), jnp.where(counts, ids, 0)
        total = linear_softmax_cross_entropy_loss(
            rows, labels, jnp.asarray(weight).T, reduction="sum", implementation="xla"
        )
        return (total - (~counts).sum() * jnp.log(float(weight.shape[0]))) / jnp.maximum(counts.sum(), 1)

    return loss


def of_apple(impl: str) -> Callable[[], Callable[..., Any]]:
    def make() -> Callable[..., Any]:
        from cut_cross_entropy import linear_cross_entropy

        # A campaign has more shapes than are compiled anew by default.
        torch._dynamo.config.recompile_limit = 10_000
        fn = lambda hidden, weight, ids: linear_cross_entropy(hidden, weight, ids, impl=impl)  # noqa: E731
        return one_call(
            fn, torch.ones(4, 16, requires_grad=True), torch.ones(33, 16), torch.zeros(4, dtype=torch.int64)
        )

    return make


def of_quack() -> Callable[..., Any]:
    from quack.cross_entropy import cross_entropy

    return one_call(cross_entropy, torch.ones(4, 1024, requires_grad=True), torch.zeros(4, dtype=torch.int64))


def of_liger() -> Callable[..., Any]:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # It writes dlogits over its logits.
    return lambda logits, ids: LigerCrossEntropyFunction.apply(logits.clone(), ids, None)[0]


def of_liger_head() -> Callable[..., Any]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, ids: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, ids)[0]


def own() -> Callable[..., Any]:
    import assay.torch

    return lambda x, ids: assay.torch.cross_entropy(x, ids)


LOSSES = [
    Published("`F.cross_entropy`", lambda: F.cross_entropy),
    Published("`F.cross_entropy` of `logits.float()`", lambda: lambda x, ids: F.cross_entropy(x.float(), ids)),
    Published(
        "the same, `label_smoothing=0.1`",
        lambda: lambda x, ids: F.cross_entropy(x.float(), ids, label_smoothing=0.1),
        {"label_smoothing": 0.1},
    ),
    Published("`F.linear_cross_entropy`", lambda: lambda h, w, ids: F.linear_cross_entropy(h, w, ids), HEAD),
    Published("Transformers' `fixed_cross_entropy` of `logits.float()`", transformers),
    Published("optax's `softmax_cross_entropy_with_integer_labels`", of_optax, JAX),
    Published("MaxText's `cross_entropy_with_logits`", of_maxtext_utils, JAX),
    Published("Tokamax' `linear_softmax_cross_entropy_loss`, `xla`", of_tokamax, {**HEAD, **JAX}),
    Published("Apple's `linear_cross_entropy`, `torch_compile`", of_apple("torch_compile"), HEAD),
    Published("Apple's `linear_cross_entropy`, `cce`", of_apple("cce"), SMALL_HEAD),
    Published("QuACK's `cross_entropy`", of_quack),
    Published("Liger's `LigerCrossEntropyFunction`", of_liger, SMALL),
    Published("Liger's `LigerFusedLinearCrossEntropyFunction`", of_liger_head, SMALL_HEAD),
    Published("`assay.torch.cross_entropy`", own),
]

if __name__ == "__main__":
    torch.manual_seed(0)
    print_table(assay.check_cross_entropy, LOSSES)
