"""The loss and its gradient on a CPU in JAX: the op, and programs that people jit without it. Needs the package and JAX.

    python benches/jax_loss.py [--tokens 512] [--vocab 151936] [--repeats 5]

Every program is timed in turn, `--repeats` times over, and its least time counts: other work on the machine makes none of them
faster. Logits are donated to each, made anew outside of the time. Peak: what the compiled program holds beside its logits.
"""

from __future__ import annotations

import argparse
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
logits = lambda: jnp.asarray(source, asked.dtype).block_until_ready()  # noqa: E731
size = logits().nbytes
compiled = {name: jax.jit(jax.value_and_grad(f), donate_argnums=0).lower(logits()).compile() for name, f in PROGRAMS.items()}
least = dict.fromkeys(PROGRAMS, float("inf"))
losses = {}
for _ in range(asked.repeats):
    for name, program in compiled.items():
        given = logits()
        started = time.perf_counter()
        loss, dlogits = jax.block_until_ready(program(given))
        least[name] = min(least[name], time.perf_counter() - started)
        losses[name] = float(loss)
        del given, dlogits
best = min(seconds for name, seconds in least.items() if "native" not in name)
print(f"{asked.dtype} 1x{asked.tokens}x{asked.vocab}, {size:,} bytes of logits, {os.cpu_count()} cores, JAX {jax.__version__}")
print("| program | s | times the op | bytes beside logits | loss |\n|---|---|---|---|---|")
for name, seconds in least.items():
    memory = compiled[name].memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    print(f"| {name} | {seconds:.3f} | {seconds / least['grpo_loss, native']:.2f} | {beside:,} | {losses[name]:.6f} |")
print(f"the fastest other takes {best / least['grpo_loss, native']:.2f} times as long as the CPU kernel")
