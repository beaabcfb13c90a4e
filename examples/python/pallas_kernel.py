"""TRL's default loss as a Pallas kernel, a row a program. `python pallas_kernel.py` judges it, interpreted without a device."""
import assay, jax, jax.numpy as jnp, jax.experimental.pallas as pl

def row(x, ids, a, old, weight, token_loss, dlogits):
    logp, a, w, target = jax.nn.log_softmax(x[...].astype(jnp.float32)), a[...], weight[...], jnp.arange(x.size) == ids[...]
    ratio = jnp.exp(jnp.where(w > 0, jnp.where(target, logp, 0).sum() - old[...], 0))  # what is masked may overflow
    token_loss[...] = -w * jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
    g = jnp.where(jnp.where(a > 0, ratio <= 1.2, ratio >= 0.8), -ratio * a * w, 0)
    dlogits[...] = (g * (target - jnp.exp(logp))).astype(dlogits.dtype)

@jax.jit
def outputs(logits, ids, mask, advantages, old_logp, **_):
    a = advantages[:, None] * jnp.ones_like(old_logp)
    a, old, ids, weight = (array[..., None] for array in (a, old_logp, ids, mask / jnp.maximum(mask.sum(), 1)))
    one, whole = (pl.BlockSpec((None, None, n), lambda b, t: (b, t, 0)) for n in (1, logits.shape[2]))
    kernel = pl.pallas_call(row, (old, logits), grid=mask.shape, in_specs=[whole, one, one, one, one], out_specs=(one, whole),
                            interpret=jax.default_backend() == "cpu")
    token_loss, dlogits = kernel(logits, ids, a, old, weight)
    return {"loss": token_loss.sum(), "dlogits": dlogits}

def loss(problem: assay.Problem) -> dict[str, jax.Array]:
    return outputs(**vars(problem.jax()))

if __name__ == "__main__":
    print(assay.check(loss, "trl"))
