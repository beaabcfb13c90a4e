"""Log-probabilities of a vocabulary that JAX's devices share: `XLA_FLAGS=--xla_force_host_platform_device_count=4 python jax_ranks.py`."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def of_share(x, ids):  # [B,T,V/N], [B,T] -> [B,T]
    width = x.shape[-1]
    local = ids - jax.lax.axis_index("ranks") * width
    own = (local >= 0) & (local < width)
    top = jax.lax.pmax(jax.lax.stop_gradient(x.max(-1)), "ranks")
    total = jax.lax.psum(jnp.exp(x - top[..., None]).sum(-1), "ranks")
    chosen = jnp.take_along_axis(x, jnp.clip(local, 0, width - 1)[..., None], -1)[..., 0]
    chosen = jax.lax.psum(jnp.where(own, chosen, 0), "ranks")
    return chosen - top - jnp.log(total)


def logp(logits, ids):
    devices = len(jax.devices())
    # A vocabulary that the devices do not divide is filled up.
    added = ((0, 0), (0, 0), (0, -logits.shape[-1] % devices))
    x = jnp.pad(logits.astype("float32"), added, constant_values=-jnp.inf)
    mesh = jax.sharding.Mesh(jax.devices(), ("ranks",))
    return jax.shard_map(of_share, mesh=mesh, in_specs=(P(None, None, "ranks"), P()), out_specs=P())(x, ids)


if __name__ == "__main__":
    import assay

    print(assay.check_logp(logp, framework="jax", ranks=4, shapes="few", cases=40))
