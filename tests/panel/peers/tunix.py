"""Tunix."""

from peers import bare

bare("tunix", "tunix.rl", "tunix.sft")

import jax.numpy as jnp  # noqa: E402
from tunix.rl.algo_core import compute_entropy_from_logits  # noqa: E402
from tunix.rl.common import selective_log_softmax  # noqa: E402

from jax_kernels import autodiff, compute  # noqa: E402
from protocol import Array, Outputs, Problem, versions  # noqa: E402

ABOUT = versions("google-tunix", "jax")


def logps(x: Array, ids: Array) -> tuple[Array, Array]:
    return selective_log_softmax(x, ids), compute_entropy_from_logits(x).astype(jnp.float32)


def selective(problem: Problem) -> Outputs:
    return compute(autodiff, logps, problem, upcast=False)
