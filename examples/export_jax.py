"""A GRPO loss in plain JAX, exported as a program that `assay` compiles, runs and judges: PPO-clip at 0.2/0.2, mean
over tokens (the default spec), dlogits by automatic differentiation.

    pip install jax
    python examples/export_jax.py --shape 2x5x1031 --dtype f32 program.mlir     # and its manifest, program.toml
    assay generate --shape 2x5x1031 --dtype f32 --regime normal -o problem.safetensors
    assay replay problem.safetensors --impl file:program.toml

With `--devices N` the sequences are cut over N devices; with `--sequences S`, and a shape of 1xNxV, S of them are packed into one
row, and `cu_seqlens` says where each lies. A program named `.mlir` is written as text, any other as bytecode: a portable artifact, which a plugin of another version
of XLA can read too.
"""
import argparse, os, pathlib

OUTPUTS = ["loss", "dlogits", "logp", "entropy", "token_loss"]

parser = argparse.ArgumentParser()
parser.add_argument("program", type=pathlib.Path)
parser.add_argument("--shape", default="2x5x1031", help="BxTxV")
parser.add_argument("--dtype", default="f32", choices=["f32", "bf16", "f16"], help="of logits and dlogits")
parser.add_argument("--outputs", default="loss,dlogits", help=f"some of {','.join(OUTPUTS)}")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--sequences", type=int, help="packed into one row")
args = parser.parse_args()
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={args.devices}")

import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
B, T, V = map(int, args.shape.split("x"))
outputs = args.outputs.split(",")


def grpo(logits, ids, mask, advantages, old_logp, cu_seqlens=None):
    x = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)  # under the mask stands anything, NaN too
    logp_all = jax.nn.log_softmax(x)
    logp = jnp.take_along_axis(logp_all, ids[..., None], axis=-1)[..., 0]
    ratio = jnp.exp(logp - jnp.where(mask, old_logp, logp))
    a = advantages[:, None]
    if cu_seqlens is not None:  # the last sequence that begins at or before the token, or none behind them all
        owner = jnp.searchsorted(cu_seqlens, jnp.arange(T), side="right") - 1
        a = advantages[jnp.minimum(owner, args.sequences - 1)][None]
    token_loss = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
    loss = jnp.where(mask, token_loss, 0.0).sum() / jnp.maximum(mask.sum(), 1)
    p = jnp.exp(logp_all)
    entropy = -jnp.where(p > 0, p * logp_all, 0.0).sum(-1)
    return loss, dict(logp=logp, entropy=entropy, token_loss=token_loss)


mesh = jax.make_mesh((args.devices,), ("data",))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
of_output = [whole if name == "loss" else rows for name in outputs]


def program(*inputs):
    (loss, per_token), dlogits = jax.value_and_grad(grpo, has_aux=True)(*inputs)
    everything = dict(loss=loss, dlogits=dlogits, **per_token)
    return [everything[name] for name in outputs]


inputs = dict(
    logits=jax.ShapeDtypeStruct((B, T, V), DTYPES[args.dtype]),
    ids=jax.ShapeDtypeStruct((B, T), jnp.int32),
    mask=jax.ShapeDtypeStruct((B, T), jnp.bool_),
    advantages=jax.ShapeDtypeStruct((args.sequences or B,), jnp.float32),
    old_logp=jax.ShapeDtypeStruct((B, T), jnp.float32),
)
if args.sequences:
    inputs["cu_seqlens"] = jax.ShapeDtypeStruct((args.sequences + 1,), jnp.int32)
jax.config.update("jax_traceback_in_locations_limit", 0)  # or the program holds the paths of its sources
if args.devices > 1:
    program = jax.jit(program, in_shardings=rows, out_shardings=of_output)
else:
    program = jax.jit(program)
exported = jax.export.export(program, platforms=["cpu"])(*inputs.values())
if args.program.suffix == ".mlir":
    args.program.write_text(exported.mlir_module())
else:
    args.program.write_bytes(exported.mlir_module_serialized)

# Not every argument of the function is one of the program: jax.export leaves out those that it does not use.
kept = [list(inputs.items())[i] for i in exported.module_kept_var_idx]
element = {jnp.dtype(dtype): name for name, dtype in dict(DTYPES, i32=jnp.int32, pred=jnp.bool_).items()}


def entry(kind, name, aval):
    cut = "" if args.devices == 1 or name == "loss" else "cut = \"B\"\n"
    return f"[[{kind}]]\nname = \"{name}\"\ndtype = \"{element[jnp.dtype(aval.dtype)]}\"\n{cut}"


entries = [entry("input", name, aval) for name, aval in kept]
entries += [entry("output", name, aval) for name, aval in zip(outputs, exported.out_avals)]
more = f"sequences = {args.sequences}\n" if args.sequences else ""
more += f"devices = {args.devices}\n" if args.devices > 1 else ""
head = f"program = \"{args.program.name}\"\nshape = [{B}, {T}, {V}]\n{more}\n[spec.objective.ppo_clip]\nepsilon_low = 0.2\nepsilon_high = 0.2\n"
args.program.with_suffix(".toml").write_text("\n".join([head, *entries]))
