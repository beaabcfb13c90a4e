"""The loss and its gradient in JAX on all chips of a host, judged and timed: a step of setup/tpu-record.sh.

    python setup/tpu_record_jax.py --shape 1x4096x151936     # what each chip holds

Ends with 77, and the reason in its last line, where JAX has no TPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import assay
from assay.jax import grpo_loss

#: Timed steps, after one that compiles.
STEPS = 20


def step(spec: Any, mesh: Mesh) -> Any:
    """Loss, logp, entropy and dlogits of sequences that are cut over the mesh."""

    def of_one(logits: jax.Array, ids: jax.Array, given: dict[str, jax.Array]) -> Any:
        def loss(logits: jax.Array) -> tuple[jax.Array, Any]:
            result = grpo_loss(logits, ids, spec=spec, batch_axis="data", **given)
            return result.loss, (result.logp, result.entropy)

        (value, (logp, entropy)), dlogits = jax.value_and_grad(loss, has_aux=True)(logits)
        return value, logp, entropy, dlogits

    rows = P("data")
    mapped = jax.shard_map(of_one, mesh=mesh, in_specs=(rows, rows, rows), out_specs=(P(), rows, rows, rows))
    return jax.jit(mapped, donate_argnums=0)


def judged(mesh: Mesh) -> bool:
    """The verdicts on a generated batch of a sequence a chip, by the judge."""
    chips = mesh.devices.size
    spec = assay.spec("trl", beta=0.04)
    # 40 rows a chip: the kernel's second block of 32 reaches beyond the last.
    problem = next(assay.problems(spec, 1, 1, dtypes=["bf16"], shapes=[f"{chips}x40x3000"]))
    rows = NamedSharding(mesh, P("data"))
    arrays = {name: jax.device_put(array, rows) for name, array in vars(problem.jax()).items()}
    logits, ids = arrays.pop("logits"), arrays.pop("ids").astype(jnp.int32)
    loss, logp, entropy, dlogits = step(spec, mesh)(logits, ids, arrays)
    verdicts = problem.check({"loss": loss, "logp": logp, "entropy": entropy, "dlogits": dlogits})
    print(verdicts)
    return bool(verdicts)


def timed(mesh: Mesh, shape: tuple[int, int, int]) -> None:
    """Milliseconds a step, dlogits over the logits, each step's result the next one's logits."""
    (batch, tokens, vocab), chips = shape, mesh.devices.size
    spec, rows = assay.spec("trl"), NamedSharding(mesh, P("data"))
    whole = (batch * chips, tokens)
    draw = jax.jit(lambda key: jax.random.normal(key, (*whole, vocab), jnp.bfloat16), out_shardings=rows)
    drawn = draw(jax.random.key(0))
    ids = jax.device_put(np.zeros(whole, np.int32), rows)
    given = {name: np.zeros(whole, np.float32) for name in ("old_logp",)}
    given |= {"mask": np.ones(whole, np.bool_), "advantages": np.ones(whole[0], np.float32)}
    given = {name: jax.device_put(array, rows) for name, array in given.items()}
    run = step(spec, mesh)
    *_, drawn = jax.block_until_ready(run(drawn, ids, given))
    began = time.perf_counter()
    for _ in range(STEPS):
        *_, drawn = run(drawn, ids, given)
    jax.block_until_ready(drawn)
    milliseconds = (time.perf_counter() - began) / STEPS * 1e3
    device = mesh.devices.flat[0].device_kind
    print(json.dumps({"step_ms": milliseconds, "chips": chips, "shape": shape, "device": device}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1x4096x151936", help="BxTxV, what each chip holds")
    given = parser.parse_args()
    batch, tokens, vocab = (int(extent) for extent in given.shape.split("x"))
    devices = jax.devices()
    if devices[0].platform != "tpu":
        print(f"JAX {jax.__version__} has no TPU here: its devices are {devices[0].platform}s (pip install jax[tpu])")
        return 77
    mesh = Mesh(np.array(devices), ("data",))
    print(f"JAX {jax.__version__}, {len(devices)} of {devices[0].device_kind}")
    if not judged(mesh):
        return 1
    timed(mesh, (batch, tokens, vocab))
    return 0


if __name__ == "__main__":
    sys.exit(main())
