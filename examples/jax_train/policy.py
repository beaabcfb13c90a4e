"""A policy of Qwen2's shape: RMS norms, rotary positions, grouped attention with biases, SwiGLU; the head is the embedding."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp


class Layer(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    before: eqx.nn.RMSNorm
    after: eqx.nn.RMSNorm
    heads: int = eqx.field(static=True)
    kv_heads: int = eqx.field(static=True)

    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, *, key: jax.Array) -> None:
        keys = iter(jax.random.split(key, 7))

        def linear(inputs: int, outputs: int, bias: bool) -> eqx.nn.Linear:
            return eqx.nn.Linear(inputs, outputs, use_bias=bias, key=next(keys))

        of_kv = hidden // heads * kv_heads
        self.q, self.k, self.v = linear(hidden, hidden, True), linear(hidden, of_kv, True), linear(hidden, of_kv, True)
        self.o = linear(hidden, hidden, False)
        self.gate, self.up = linear(hidden, intermediate, False), linear(hidden, intermediate, False)
        self.down = linear(intermediate, hidden, False)
        self.before, self.after = (eqx.nn.RMSNorm(hidden, eps=1e-6, use_bias=False) for _ in range(2))
        self.heads, self.kv_heads = heads, kv_heads

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[T,H]` to the same."""
        tokens, hidden = x.shape
        width = hidden // self.heads
        normed = jax.vmap(self.before)(x)
        q, k, v = (jax.vmap(of)(normed).reshape(tokens, -1, width) for of in (self.q, self.k, self.v))
        q, k = rotated(q), rotated(k)
        k, v = (jnp.repeat(array, self.heads // self.kv_heads, 1) for array in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / math.sqrt(width)
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + jax.vmap(self.o)(mixed.reshape(tokens, hidden))
        normed = jax.vmap(self.after)(x)
        return x + jax.vmap(self.down)(jax.nn.silu(jax.vmap(self.gate)(normed)) * jax.vmap(self.up)(normed))


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of `[T,heads,width]`."""
    tokens, _, width = x.shape
    rates = 1e6 ** (-jnp.arange(0, width, 2) / width)
    angles = jnp.arange(tokens)[:, None, None] * rates
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    low, high = jnp.split(x, 2, -1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


class Policy(eqx.Module):
    embedding: jax.Array
    layers: list[Layer]
    norm: eqx.nn.RMSNorm

    def __init__(
        self, vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, key: jax.Array
    ) -> None:
        of_embedding, *of_layers = jax.random.split(key, 1 + layers)
        self.embedding = 0.02 * jax.random.normal(of_embedding, (vocab, hidden))
        self.layers = [Layer(hidden, intermediate, heads, kv_heads, key=key) for key in of_layers]
        self.norm = eqx.nn.RMSNorm(hidden, eps=1e-6, use_bias=False)

    def hidden(self, ids: jax.Array) -> jax.Array:
        """Hidden states `[B,T,H]` of `[B,T]`."""

        def of_sequence(ids: jax.Array) -> jax.Array:
            x = self.embedding[ids]
            for layer in self.layers:
                x = layer(x)
            return jax.vmap(self.norm)(x)

        return jax.vmap(of_sequence)(ids)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Logits `[...,V]` of the token after each of `[...,H]`."""
        return jnp.einsum("...h,vh->...v", hidden, self.embedding)

    def last_logits(self, ids: jax.Array, count: int) -> jax.Array:
        """Logits `[B,count,V]` after the last `count` of `[B,T]`: no others are made."""
        return self.head(self.hidden(ids)[:, -count:])
