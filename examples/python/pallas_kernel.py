"""TRL's default loss as a Pallas kernel, a row a program. `python pallas_kernel.py` judges it, interpreted without a device."""
import assay, jax, jax.numpy as jnp
from jax.experimental import pallas as pl

def row(x, ids, a, old, weight, token_loss, dlogits):
    z, w = x[...].astype(jnp.float32), weight[...]
    z, target = z - z.max(), jnp.arange(z.shape[1])[None] == ids[...]
    total = jnp.exp(z).sum()
    ratio = jnp.exp(jnp.where(w > 0, jnp.where(target, z, 0).sum() - jnp.log(total) - old[...], 0))
    token_loss[...] = -w * jnp.minimum(ratio * a[...], jnp.clip(ratio, 0.8, 1.2) * a[...])
    g = jnp.where(jnp.where(a[...] > 0, ratio <= 1.2, ratio >= 0.8), -ratio * a[...] * w, 0)
    dlogits[...] = (g * (target - jnp.exp(z) / total)).astype(dlogits.dtype)

@jax.jit
def outputs(x, ids, a, old, mask):
    (B, T, V), arrays = x.shape, (ids, jnp.broadcast_to(a[:, None], mask.shape), old, mask / mask.sum())
    one, whole = (pl.BlockSpec((1, n), lambda i: (i, 0)) for n in (1, V))
    shapes = jax.ShapeDtypeStruct((B * T, 1), jnp.float32), jax.ShapeDtypeStruct((B * T, V), x.dtype)
    call = pl.pallas_call(row, shapes, grid=(B * T,), in_specs=[whole, one, one, one, one], out_specs=(one, whole),
                          interpret=jax.default_backend() == "cpu")
    token_loss, dlogits = call(x.reshape(-1, V), *(array.reshape(-1, 1) for array in arrays))
    return {"loss": token_loss.sum(), "dlogits": dlogits.reshape(x.shape)}

def loss(problem: assay.Problem) -> dict[str, jax.Array]:
    t = problem.jax()
    return outputs(t.logits, t.ids, t.advantages, t.old_logp, t.mask)
