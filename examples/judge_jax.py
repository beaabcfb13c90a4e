"""A GRPO kernel in JAX, judged: PPO-clip at 0.2/0.2, mean over tokens (the default spec).

    pip install jax safetensors
    assay generate --shape 4x64x151936 --dtype bf16 --seed 1 -o problem.safetensors
    python examples/judge_jax.py problem.safetensors candidate.safetensors
    assay judge --problem problem.safetensors --candidate candidate.safetensors

Replace `others` by `1 - p` and confident targets lose their gradient: the judge says so, and grants grade `standard`.
"""
import sys, jax, jax.numpy as jnp
from safetensors.flax import load_file, save_file

problem = load_file(sys.argv[1])
mask, a = problem["mask"] == 1, problem["advantages"][:, None]
x = jnp.where(mask[..., None], problem["logits"].astype(jnp.float32), 0.0)
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
dlogits = jnp.where(active[..., None], grad * jnp.where(target, others, -p), 0.0).astype(problem["logits"].dtype)
loss = jnp.where(mask, token_loss, 0.0).sum() / jnp.maximum(mask.sum(), 1)

save_file(dict(loss=loss, dlogits=dlogits, logp=logp, entropy=entropy, token_loss=token_loss), sys.argv[2])
