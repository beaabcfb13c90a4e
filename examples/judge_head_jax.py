"""A GRPO kernel with its LM head in JAX, judged: PPO-clip at 0.2/0.2, mean over tokens (the default spec).

    pip install jax safetensors
    assay generate --shape 2x16x896x151936 --dtype bf16 --seed 1 -o problem.safetensors
    python examples/judge_head_jax.py problem.safetensors candidate.safetensors
    assay judge --problem problem.safetensors --candidate candidate.safetensors

dlogits go into their two products in the dtype of the hidden states, and both gradients come out in it.
"""
import sys, jax, jax.numpy as jnp
from safetensors import safe_open
from safetensors.flax import load_file, save_file

problem = load_file(sys.argv[1])
metadata = safe_open(sys.argv[1], "flax").metadata()
mask, a = problem["mask"] == 1, problem["advantages"][:, None]
hidden = jnp.where(mask[..., None], problem["hidden"], 0.0)
head = problem["lm_head"] if metadata["layout"] == "hv" else problem["lm_head"].T
product = lambda spec, a, b: jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

x = product("bth,hv->btv", hidden, head)
if metadata["rounds_logits"] == "true":
    x = x.astype(hidden.dtype).astype(jnp.float32)
target = jax.nn.one_hot(problem["ids"], x.shape[-1], dtype=bool)

logp_all = jax.nn.log_softmax(x)
p = jnp.exp(logp_all)
entropy = -jnp.where(p > 0, p * logp_all, 0.0).sum(-1)
logp = jnp.where(target, logp_all, 0.0).sum(-1)
ratio = jnp.exp(logp - jnp.where(mask, problem["old_logps"], logp))
token_loss = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
active = mask & jnp.where(a > 0, ratio <= 1.2, ratio >= 0.8)
others = jnp.where(target, 0.0, p).sum(-1, keepdims=True)  # 1 − p of the target, without cancellation
grad = jnp.where(active, -ratio * a, 0.0)[..., None] / jnp.maximum(mask.sum(), 1)
dlogits = jnp.where(active[..., None], grad * jnp.where(target, others, -p), 0.0).astype(hidden.dtype)
loss = jnp.where(mask, token_loss, 0.0).sum() / jnp.maximum(mask.sum(), 1)

dhidden = product("btv,hv->bth", dlogits, head).astype(hidden.dtype)
dlm_head = product("bth,btv->hv", hidden, dlogits).astype(hidden.dtype)
if metadata["layout"] == "vh":
    dlm_head = dlm_head.T
outputs = dict(loss=loss, dhidden=dhidden, dlm_head=dlm_head, logp=logp, entropy=entropy, token_loss=token_loss)
save_file(outputs, sys.argv[2], {"dlogits_dtype": {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[str(hidden.dtype)]})
