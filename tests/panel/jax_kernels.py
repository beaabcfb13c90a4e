"""JAX on the CPU. A program is compiled for each shape and form."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from grpo import closed_form, reduce, token_loss
from protocol import Array, Form, Numbers, Outputs, Problem, Tokens, versions

ABOUT = versions("jax", "jaxlib")


def entropy_of(logps: Array) -> Array:
    p = jnp.exp(logps)
    return -(p * jnp.where(p > 0, logps, 0.0)).sum(-1)


def chosen(x: Array, ids: Array) -> Array:
    return jnp.take_along_axis(x, ids[..., None], -1)[..., 0]


def by_logsumexp(x: Array, ids: Array) -> tuple[Array, Array]:
    lse = jax.nn.logsumexp(x, axis=-1, keepdims=True)
    return chosen(x, ids) - lse[..., 0], entropy_of(x - lse)


def by_log_softmax(x: Array, ids: Array) -> tuple[Array, Array]:
    logps = jax.nn.log_softmax(x)
    return chosen(logps, ids), entropy_of(logps)


@partial(jax.jit, static_argnums=(0, 3))
def autodiff(logps: Callable, logits: Array, tokens: Tokens, form: Form, numbers: Numbers) -> dict[str, Array]:
    def loss(logits: Array) -> tuple[Array, dict[str, Array]]:
        logp, entropy = logps(logits / numbers.temperature, tokens.ids)
        losses = token_loss(jnp, logp, tokens, form, numbers, jax.lax.stop_gradient)
        value = reduce(losses, entropy, tokens, form, numbers)
        return value, {"loss": value, "logp": logp, "entropy": entropy, "token_loss": losses}

    dlogits, values = jax.grad(loss, has_aux=True)(logits)
    return values | {"dlogits": dlogits}


def total(x: Array) -> Array:
    """In parts of 128: left to itself XLA's CPU compiler may add a long row one term after the other."""
    parts = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 128)]).reshape(*x.shape[:-1], -1, 128)
    return jax.lax.optimization_barrier(parts.sum(-1)).sum(-1, keepdims=True)


@partial(jax.jit, static_argnums=(0, 3))
def closed(gaps: bool, logits: Array, tokens: Tokens, form: Form, numbers: Numbers) -> dict[str, Array]:
    sums = {"total": total} if gaps else {}
    return closed_form(jnp, jnp.take_along_axis, logits, tokens, form, numbers, gaps=gaps, **sums)


def compute(program: Callable, option: object, problem: Problem, *, upcast: bool = True) -> Outputs:
    tokens = problem.tokens._replace(ids=problem.tokens.ids.astype(np.int32))
    logits = problem.logits.astype(np.float32) if upcast else problem.logits
    values = program(option, logits, tokens, problem.form, problem.numbers)
    arrays = {name: np.asarray(value) for name, value in values.items()}
    return {**arrays, "dlogits": arrays["dlogits"].astype(problem.logits.dtype)}


def logsumexp(problem: Problem) -> Outputs:
    return compute(autodiff, by_logsumexp, problem)


def log_softmax(problem: Problem) -> Outputs:
    return compute(autodiff, by_log_softmax, problem)


def textbook(problem: Problem) -> Outputs:
    return compute(closed, False, problem)


def gaps(problem: Problem) -> Outputs:
    return compute(closed, True, problem)
