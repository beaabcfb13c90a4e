"""A GRPO loss in plain JAX, exported as a program that `assay` compiles, runs and judges: PPO-clip at 0.2/0.2, mean
over tokens (the default spec), dlogits by automatic differentiation.

    pip install jax
    python examples/export_jax.py --shape 2x5x1031 --dtype f32 program.mlir     # and its manifest, program.toml
    assay generate --shape 2x5x1031 --dtype f32 --regime normal -o problem.safetensors
    assay replay problem.safetensors --impl file:program.toml

A program named `.mlir` is written as text, any other as bytecode: a portable artifact, which a plugin of another version
of XLA can read too.
"""
import argparse, pathlib, jax, jax.numpy as jnp

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
OUTPUTS = ["loss", "dlogits", "logp", "entropy", "token_loss"]

parser = argparse.ArgumentParser()
parser.add_argument("program", type=pathlib.Path)
parser.add_argument("--shape", default="2x5x1031", help="BxTxV")
parser.add_argument("--dtype", default="f32", choices=DTYPES, help="of logits and dlogits")
parser.add_argument("--outputs", default="loss,dlogits", help=f"some of {','.join(OUTPUTS)}")
args = parser.parse_args()
B, T, V = map(int, args.shape.split("x"))
outputs = args.outputs.split(",")


def grpo(logits, ids, mask, advantages, old_logp):
    x = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)  # under the mask stands anything, NaN too
    logp_all = jax.nn.log_softmax(x)
    logp = jnp.take_along_axis(logp_all, ids[..., None], axis=-1)[..., 0]
    ratio = jnp.exp(logp - jnp.where(mask, old_logp, logp))
    a = advantages[:, None]
    token_loss = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
    loss = jnp.where(mask, token_loss, 0.0).sum() / mask.sum()
    p = jnp.exp(logp_all)
    entropy = -jnp.where(p > 0, p * logp_all, 0.0).sum(-1)
    return loss, dict(logp=logp, entropy=entropy, token_loss=token_loss)


@jax.jit
def program(*inputs):
    (loss, per_token), dlogits = jax.value_and_grad(grpo, has_aux=True)(*inputs)
    everything = dict(loss=loss, dlogits=dlogits, **per_token)
    return [everything[name] for name in outputs]


inputs = dict(
    logits=jax.ShapeDtypeStruct((B, T, V), DTYPES[args.dtype]),
    ids=jax.ShapeDtypeStruct((B, T), jnp.int32),
    mask=jax.ShapeDtypeStruct((B, T), jnp.bool_),
    advantages=jax.ShapeDtypeStruct((B,), jnp.float32),
    old_logp=jax.ShapeDtypeStruct((B, T), jnp.float32),
)
jax.config.update("jax_traceback_in_locations_limit", 0)  # or the program holds the paths of its sources
exported = jax.export.export(program, platforms=["cpu"])(*inputs.values())
if args.program.suffix == ".mlir":
    args.program.write_text(exported.mlir_module())
else:
    args.program.write_bytes(exported.mlir_module_serialized)

# Not every argument of the function is one of the program: jax.export leaves out those that it does not use.
kept = [list(inputs.items())[i] for i in exported.module_kept_var_idx]
element = {jnp.dtype(dtype): name for name, dtype in dict(DTYPES, i32=jnp.int32, pred=jnp.bool_).items()}
entry = "[[{}]]\nname = \"{}\"\ndtype = \"{}\"\n".format
entries = [entry("input", name, element[jnp.dtype(aval.dtype)]) for name, aval in kept]
entries += [entry("output", name, element[jnp.dtype(aval.dtype)]) for name, aval in zip(outputs, exported.out_avals)]
head = f"program = \"{args.program.name}\"\nshape = [{B}, {T}, {V}]\n\n[spec.objective.ppo_clip]\nepsilon_low = 0.2\nepsilon_high = 0.2\n"
args.program.with_suffix(".toml").write_text("\n".join([head, *entries]))
