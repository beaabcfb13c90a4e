"""One of two processes of `jax.distributed`, two CPU devices each: the loss of a batch that is cut over both processes."""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import assay
from assay.jax import grpo_loss

address, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, rank)
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2

rng = np.random.default_rng(0)
batch, tokens, vocab = 4, 6, 64
logits = rng.normal(size=(batch, tokens, vocab)).astype(np.float32)
ids = rng.integers(0, vocab, (batch, tokens)).astype(np.int32)
given: dict[str, Any] = {
    # The process of the first rows has fewer tokens than the other: the mean is of all.
    "mask": np.arange(tokens) < np.array([[1], [2], [6], [5]]),
    "advantages": rng.normal(size=batch).astype(np.float32),
    "old_logp": rng.normal(size=(batch, tokens)).astype(np.float32) - 4,
    "ref_logp": rng.normal(size=(batch, tokens)).astype(np.float32) - 4,
}
spec = assay.spec("trl", beta=0.04)
of_all = jax.jit(jax.value_and_grad(lambda x: grpo_loss(x, ids, spec=spec, **given).loss))
whole_loss, whole = (np.asarray(array) for array in of_all(jnp.asarray(logits)))

# Devices 0 and 1 are of the first process: along `model` a row's columns lie across both, or within a process.
across, within = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
for order in (across, within) if "ASSAY_CASES" in os.environ else (across,):
    devices = np.array(jax.devices())[np.array(order)]
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    cut, of_tokens = P("data", None, "model"), P("data")

    def place(array: np.ndarray, spec: P, mesh: jax.sharding.Mesh = mesh) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    def loss(logits: jax.Array, ids: jax.Array, given: dict[str, Any], **axes: Any) -> jax.Array:
        return grpo_loss(logits, ids, spec=spec, **axes, **given).loss

    mapped = jax.shard_map(
        lambda logits, ids, given: jax.value_and_grad(loss)(logits, ids, given, batch_axis="data", vocab_axis="model"),
        mesh=mesh,
        in_specs=(cut, of_tokens, of_tokens),
        out_specs=(P(), cut),
    )
    arrays = place(logits, cut), place(ids, of_tokens), {name: place(array, of_tokens) for name, array in given.items()}
    # By jit and by shard_map, one each.
    value, dlogits = jax.jit(jax.value_and_grad(loss) if order is across else mapped)(*arrays)
    np.testing.assert_allclose(value, whole_loss, rtol=1e-5)
    for shard in dlogits.addressable_shards:
        np.testing.assert_allclose(shard.data, whole[shard.index], rtol=1e-4, atol=1e-8)
print(f"process {rank}: loss {float(whole_loss):.6f} over 2 processes")
