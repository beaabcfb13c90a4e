"""The loss and its gradient on a CPU in JAX: the op, and programs that people jit without it. Needs the package and JAX.

    python benches/jax_loss.py [--tokens 512] [--vocab 151936] [--repeats 5] [--hidden H]

Every program is timed in turn, `--repeats` times over, and its least time counts: other work on the machine makes none of them
faster; so does, apart, the least time of all threads' processors. Logits are donated to each, made again outside of the time. Peak: what
the compiled program holds in addition to its logits. With `--hidden` each program makes its logits by a product of hidden states
`[tokens,H]` and a head `[H,vocab]`, and is differentiated by both; its peak is then all that it holds in addition to these and their
gradients, logits included.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import assay
from assay.jax import grpo_loss

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=512)
parser.add_argument("--vocab", type=int, default=151936)
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
parser.add_argument("--hidden", type=int, default=0, metavar="H")
asked = parser.parse_args()

shape = (1, asked.tokens, asked.vocab)
rng = np.random.default_rng(0)
source = rng.standard_normal(shape[1:], np.float32)[None] * 2
ids = jnp.asarray(rng.integers(0, asked.vocab, shape[:2]), jnp.int32)
mask, advantages = jnp.ones(shape[:2], bool), jnp.ones(1)
old_logp = jnp.full(shape[:2], -12.0) + jnp.asarray(rng.normal(size=shape[:2]) * 0.1, jnp.float32)
spec = assay.spec()


def of_logp(logp: jax.Array) -> jax.Array:
    ratio = jnp.exp(logp - old_logp)
    return jnp.where(mask, -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages), 0.0).sum() / mask.sum()


def log_softmax(logits: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return of_logp(jnp.take_along_axis(logp, ids[..., None], -1)[..., 0])


def logsumexp(logits: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0].astype(jnp.float32)
    return of_logp(chosen - jax.nn.logsumexp(logits.astype(jnp.float32), -1))


def one_hot(logits: jax.Array) -> jax.Array:
    x = logits.astype(jnp.float32)
    chosen = jnp.where(jax.lax.broadcasted_iota(jnp.int32, shape, 2) == ids[..., None], x, 0.0).sum(-1)
    return of_logp(chosen - jax.nn.logsumexp(x, -1))


def op(implementation: str) -> Any:
    given: dict[str, Any] = dict(mask=mask, advantages=advantages, old_logp=old_logp, spec=spec)
    return lambda logits: grpo_loss(logits, ids, implementation=implementation, **given).loss


PROGRAMS = {
    "log_softmax, gather, autodiff": log_softmax,
    "logsumexp, gather, autodiff": logsumexp,
    "logsumexp, one-hot, autodiff": one_hot,
    "grpo_loss, xla": op("xla"),
    "grpo_loss, native": op("native"),
}


def inputs() -> tuple[jax.Array, ...]:
    """Logits to be donated, or hidden states and head."""
    if not asked.hidden:
        return (jnp.asarray(source, asked.dtype).block_until_ready(),)
    make = np.random.default_rng(1).standard_normal
    sides = make((asked.tokens, asked.hidden), np.float32), make((asked.hidden, asked.vocab), np.float32) / 4
    return tuple(jnp.asarray(side, asked.dtype).block_until_ready() for side in sides)


def program(f: Any) -> Any:
    if not asked.hidden:
        return jax.jit(jax.value_and_grad(f), donate_argnums=0)
    return jax.jit(jax.value_and_grad(lambda hidden, lm_head: f((hidden @ lm_head)[None]), argnums=(0, 1)))


size = math.prod(shape) * np.dtype(jnp.dtype(asked.dtype)).itemsize
compiled = {name: program(f).lower(*inputs()).compile() for name, f in PROGRAMS.items()}
least = dict.fromkeys(PROGRAMS, (float("inf"), float("inf")))
losses = {}
for _ in range(asked.repeats):
    for name, of_inputs in compiled.items():
        given = inputs()
        started = time.perf_counter(), time.process_time()
        loss, gradients = jax.block_until_ready(of_inputs(*given))
        took = time.perf_counter() - started[0], time.process_time() - started[1]
        least[name] = min(least[name][0], took[0]), min(least[name][1], took[1])
        losses[name] = float(loss)
        del given, gradients
best = min(seconds for name, (seconds, _) in least.items() if "native" not in name)
own = least["grpo_loss, native"][0]
print(f"{asked.dtype} 1x{asked.tokens}x{asked.vocab}, {size:,} bytes of logits, {os.cpu_count()} cores, JAX {jax.__version__}")
print("| program | s | s of processors | times the op | bytes beside | loss |\n|---|---|---|---|---|---|")
for name, (seconds, processors) in least.items():
    memory = compiled[name].memory_analysis()
    of_results = 0 if asked.hidden else memory.output_size_in_bytes - memory.alias_size_in_bytes
    beside = memory.temp_size_in_bytes + of_results
    print(f"| {name} | {seconds:.3f} | {processors:.3f} | {seconds / own:.2f} | {beside:,} | {losses[name]:.6f} |")
print(f"the fastest other takes {best / own:.2f} times as long as the CPU kernel")
