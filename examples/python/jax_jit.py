"""TRL's default loss in JAX, its gradient by `jax.grad`. `python jax_jit.py` judges it, on few shapes: each is compiled."""
import jax, jax.numpy as jnp

import assay


@jax.jit
def outputs(x, ids, mask, a, old_logp):
    def mean(x):
        logp = jnp.take_along_axis(jax.nn.log_softmax(x.astype(jnp.float32)), ids[..., None], -1)[..., 0]
        ratio = jnp.exp(jnp.where(mask, logp - old_logp, 0))  # what is masked may overflow
        token_loss = jnp.where(mask, -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a), 0)
        return token_loss.sum() / jnp.maximum(mask.sum(), 1), {"logp": jnp.where(mask, logp, 0), "token_loss": token_loss}

    (loss, others), dlogits = jax.value_and_grad(mean, has_aux=True)(x)
    return others | {"loss": loss, "dlogits": dlogits}


def loss(problem: assay.Problem) -> dict[str, jax.Array]:
    t = problem.jax()
    return outputs(t.logits, t.ids, t.mask, t.advantages[:, None], t.old_logp)


if __name__ == "__main__":
    print(assay.check(loss, "trl"))
