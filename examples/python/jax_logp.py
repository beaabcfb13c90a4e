"""Logp and entropy of hidden states and an LM head in JAX, forward and by `jax.vjp`. `python jax_logp.py` judges them."""
import jax, jax.numpy as jnp

import assay


def scores(hidden, lm_head, ids):
    x = jnp.einsum("bth,vh->btv", hidden, lm_head, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(x)
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    return jnp.take_along_axis(logp, ids[..., None], -1)[..., 0], entropy


if __name__ == "__main__":
    print(assay.check_logp(scores, framework="jax", entropy=True, lm_head=True, dtypes=["f32"]))
