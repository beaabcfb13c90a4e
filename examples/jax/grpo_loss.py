"""The one-pass TPU kernel inside a JAX training step, compiled ahead of time for eight v6e that need not be there.

    pip install jax; make setup-tpu
    assay emit --impl tile-one-pass --shape 1x2048x151936 --dtype bf16 --target v6e:2x4 -o kernel
    python examples/jax/grpo_loss.py kernel

docs/jax.md says what the arrays hold. Nothing is run: no TPU has seen this yet.
"""
import argparse, json, os, pathlib

parser = argparse.ArgumentParser()
parser.add_argument("kernel", type=pathlib.Path, help="the folder that `assay emit` wrote")
parser.add_argument("--hidden", type=int, default=1024, help="width of the hidden states")
args = parser.parse_args()

installed = pathlib.Path(__file__).resolve().parents[2] / ".plugins/libtpu.so"
os.environ.setdefault("TPU_LIBRARY_PATH", str(installed))
os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_PLATFORMS="cpu")
os.environ.update(TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v6e-8")  # or libtpu complains

import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P

manifest = json.loads((args.kernel / "manifest.json").read_text())
if manifest["impl"] != "tile-one-pass" or manifest["spec"]["reduction"] != "token_mean":
    raise SystemExit(f"{args.kernel}: expected tile-one-pass with the reduction token_mean")
kernel, numbers = manifest["kernels"][0], manifest["numbers"]
operands, results = ({array["name"]: array for array in kernel[key]} for key in ("operands", "results"))
B, T, V = manifest["shape"]
ELEMENT = dict(f32=jnp.float32, bf16=jnp.bfloat16, f16=jnp.float16, i32=jnp.int32, i16=jnp.int16)
LOGITS = ELEMENT[manifest["dtype"]]

call = jax.ffi.ffi_call(
    "tpu_custom_call",
    [jax.ShapeDtypeStruct(array["shape"], ELEMENT[array["dtype"]]) for array in results.values()],
    custom_call_api_version=1,
    legacy_backend_config=(args.kernel / kernel["payload"]).read_text(),
    input_output_aliases={alias["operand"]: alias["result"] for alias in kernel["aliases"]},
)


def in_columns(names, values):
    """`[1,B·T,8]`, or as wide as the kernel has it, with each value in the column of its name and 0 elsewhere."""
    nothing = jnp.zeros((B, T))
    shape = operands["tokens"]["shape"]
    columns = [values.get(name, nothing) for name in names] + [nothing] * (shape[-1] - len(names))
    return jnp.stack(columns, -1).reshape(shape)


def evaluate(logits, batch, count, loss_scale):
    """This device's share of `loss_scale · loss`, what is logged of each token, and the derivative with respect to
    `logits`. `count` is the number of tokens of all devices."""
    count = jnp.maximum(count, 1.0)
    mask = batch["mask"].astype(jnp.float32)
    weight = mask * (loss_scale / count)
    entropy_factor = -numbers["entropy_coef"] / count * loss_scale
    tokens = in_columns(operands["tokens"]["columns"], dict(batch, mask=mask, weight=weight))
    of_spec = dict(numbers, entropy_factor=entropy_factor)
    given = dict(
        ids=batch["ids"].reshape(-1),
        numbers=jnp.stack([jnp.float32(of_spec[name]) for name in operands["numbers"]["columns"]]),  # float32("inf")
        # In rows, of which none knows its sequence; f16 goes in as i16.
        logits=jax.lax.bitcast_convert_type(logits, ELEMENT[operands["logits"]["dtype"]]).reshape(1, B * T, V),
        tokens=tokens,
    )
    dlogits, columns = call(*(given[name] for name in operands))
    # Under the mask stands anything, NaN too.
    names = results["results"]["columns"]
    of_token = {name: jnp.where(batch["mask"], columns[..., i].reshape(B, T), 0.0) for i, name in enumerate(names)}
    share = (weight * of_token["token_loss"] + entropy_factor * of_token["entropy"]).sum()
    return share, of_token, jax.lax.bitcast_convert_type(dlogits, LOGITS).reshape(B, T, V)


@jax.custom_vjp
def grpo_loss(logits, batch, count, loss_scale):
    return evaluate(logits, batch, count, loss_scale)[:2]


def forward(logits, batch, count, loss_scale):
    share, of_token, dlogits = evaluate(logits, batch, count, loss_scale)
    return (share, of_token), dlogits


def backward(dlogits, cotangents):
    # A cotangent of 1, as `jax.grad` of the loss itself has, is folded away; any other costs a pass over dlogits unless
    # what reads them takes it in. So a loss scale is better given than multiplied with afterwards.
    cotangent, _ = cotangents
    return (dlogits.astype(jnp.float32) * cotangent).astype(dlogits.dtype), None, None, None


grpo_loss.defvjp(forward, backward)


def step(hidden, head, batch, loss_scale):
    """One device's part of a step through the output layer: every device has its sequences, all have the head."""
    count = jax.lax.psum(batch["mask"].sum(dtype=jnp.float32), "data")

    def loss(hidden, head):
        return grpo_loss(jnp.dot(hidden, head, preferred_element_type=LOGITS), batch, count, loss_scale)

    (share, of_token), (dhidden, dhead) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
    return jax.lax.psum(share, "data"), of_token["logp"], dhidden, jax.lax.psum(dhead, "data")


def loss_of_logits(logits, batch):
    """The loss and dlogits alone, where logits come from outside: dlogits over them."""
    count = jax.lax.psum(batch["mask"].sum(dtype=jnp.float32), "data")
    (share, _), dlogits = jax.value_and_grad(grpo_loss, has_aux=True)(logits, batch, count, jnp.float32(1.0))
    return jax.lax.psum(share, "data"), dlogits


topology = topologies.get_topology_desc(manifest["target"].replace("v7x", "tpu7x"), "tpu")  # libtpu's name for it
mesh = jax.sharding.Mesh(topology.devices, "data")
devices = len(topology.devices)
rows, everywhere = P("data"), P()


def array(shape, dtype, spec, layout=None):
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=Format(layout, sharding) if layout else sharding)


def report(name, compiled):
    memory = compiled.memory_analysis()
    sizes = dict(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        aliases=memory.alias_size_in_bytes,
    )
    print(f"{name}:", ", ".join(f"{what} {size:,}" for what, size in sizes.items()), "bytes on each device")


def compile(function, arguments, in_specs, out_specs, **options):
    # Replication is not tracked: a custom call says nothing of it.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options).lower(*arguments).compile()


per_token = dict(ids=jnp.int32, mask=jnp.bool_, advantage=jnp.float32, old_logp=jnp.float32)
if manifest["spec"]["kl"]:
    per_token["ref_logp"] = jnp.float32
batch = {name: array((devices * B, T), dtype, rows) for name, dtype in per_token.items()}

hidden = array((devices * B, T, args.hidden), LOGITS, rows)
head = array((args.hidden, V), LOGITS, everywhere)
scale = array((), jnp.float32, everywhere)
compiled = compile(
    step, (hidden, head, batch, scale), (rows, everywhere, rows, everywhere), (everywhere, rows, rows, everywhere)
)
report("step", compiled)

# The kernel reads logits row by row. Inside a program XLA lays them out so; an argument's layout is the caller's to
# pin, or XLA may choose another and copy all of them.
row_major = Layout((0, 1, 2))
logits = array((devices * B, T, V), LOGITS, rows, row_major)
compiled = compile(
    loss_of_logits, (logits, batch), (rows, rows), (everywhere, rows), donate_argnums=0,
    out_shardings=(NamedSharding(mesh, everywhere), Format(row_major, NamedSharding(mesh, rows))),
)
report("loss of given logits", compiled)
