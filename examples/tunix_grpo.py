"""Tunix's GRPO with the loss of `assay.jax`: one function, registered under a name of its own.

    python tunix_grpo.py

A tiny Qwen2-like policy that is made from a config, with a tokenizer of its own, learns on the CPU to say one word more often. At every
step the loss and every parameter's gradient are compared with what Tunix's own function computes for the same batch: two optimizer
steps a rollout, so that the ratio is not 1, a KL term, and completions of different lengths.

Rollouts and optimizer steps are a few lines here; log-probabilities, advantages, batches and the registry are Tunix's. Its trainer takes the
function by its name: `GRPOConfig(policy_loss_fn="assay")`.
"""

import dataclasses
import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType

# Tunix is installed without what it depends on; its packages' own `__init__` would import all of that.
for name in ("tunix", "tunix.rl", "tunix.sft"):
    module = ModuleType(name)
    module.__path__, module.__spec__ = find_spec(name).submodule_search_locations, find_spec(name)
    sys.modules[name] = module

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers
from tunix.rl import algo_core, common, function_registry

import assay
from assay.jax import grpo_loss


# What of a GRPOConfig shapes the loss.
OPTIONS = (
    "beta",
    "epsilon",
    "epsilon_high",
    "epsilon_c",
    "kl_clamp_value",
    "kl_loss_mode",
    "loss_algo",
    "loss_agg_mode",
    "temperature",
)


@function_registry.register_policy_loss_fn("assay")
def assay_grpo_loss(model, train_example, algo_config, pad_id, eos_id, **_):
    """Tunix's `grpo_loss_fn`, its logits handed to one operation."""
    old, ref = train_example.old_per_token_logps, train_example.ref_per_token_logps
    batch = {"old_logps": old is not None, "ref_logps": ref is not None}
    if getattr(train_example, "sampler_is_weights", None) is not None:
        raise NotImplementedError("`sampler_is_weights`: hand them over as `policy_weight`, with `rollout_weights` in the spec's batch")
    options = {name: getattr(algo_config, name) for name in OPTIONS if hasattr(algo_config, name)}
    spec = assay.spec("tunix", batch=batch, **options)
    completion = train_example.completion_ids
    ids, positions, seen, _ = common.process_ids(train_example.prompt_ids, completion, pad_id, eos_id)
    logits, _ = model(ids, positions=positions, cache=None, attention_mask=seen)
    result = grpo_loss(
        logits[:, -completion.shape[1] - 1 : -1],
        completion,
        mask=train_example.completion_mask,
        advantages=train_example.advantages,
        old_logp=old,
        ref_logp=ref,
        spec=spec,
    )
    metrics = result.metrics
    return result.loss, {"kl": metrics.get("kl_mean", 0.0), "entropy": metrics["entropy_mean"], "is_ratio/mean": metrics["ratio_mean"]}


@dataclasses.dataclass(frozen=True)
class Config:
    """What both functions read of Tunix's `GRPOConfig`, by its names."""

    beta: float = 0.04
    epsilon: float = 0.2
    kl_loss_mode: str = "low_var_kl"
    kl_clamp_value: float | None = None
    loss_algo: str = "grpo"
    loss_agg_mode: str = "sequence-mean-token-mean"
    temperature: float = 0.9
    policy_loss_fn: str = "assay"


@dataclasses.dataclass(frozen=True)
class Shape:
    vocab: int
    width: int = 32
    inner: int = 64
    layers: int = 2
    heads: int = 4


class Block(nnx.Module):
    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.heads = shape.heads
        self.before, self.between = nnx.RMSNorm(shape.width, rngs=rngs), nnx.RMSNorm(shape.width, rngs=rngs)
        self.qkv = nnx.Linear(shape.width, 3 * shape.width, rngs=rngs)
        self.out, self.down = linear(shape.width, shape.width), linear(shape.inner, shape.width)
        self.gate, self.up = linear(shape.width, shape.inner), linear(shape.width, shape.inner)

    def __call__(self, x, positions, seen):
        def rotated(x):
            half = x.shape[-1] // 2
            angles = positions[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
            a, b = x[..., :half], x[..., half:]
            return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)

        heads = self.qkv(self.before(x)).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = rotated(heads[:, :, 0]), rotated(heads[:, :, 1]), heads[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])
        x = x + self.out(mixed.reshape(x.shape))
        y = self.between(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Policy(nnx.Module):
    """Called as Tunix calls its models."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(shape.vocab, shape.width, rngs=rngs)
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.layers)])
        self.norm = nnx.RMSNorm(shape.width, rngs=rngs)
        self.head = nnx.Linear(shape.width, shape.vocab, use_bias=False, rngs=rngs)

    def __call__(self, input_tokens, positions, cache, attention_mask):
        x = self.embedding(input_tokens)
        for block in self.blocks:
            x = block(x, positions, attention_mask)
        return self.head(self.norm(x)), cache


def tokenizer() -> Tokenizer:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


PAD, EOS = 0, 1
GENERATIONS, LENGTH = 4, 24


@nnx.jit
def next_logits(model, ids, place):
    seen = ids != PAD
    positions, mask = common.build_positions_from_mask(seen), common.make_causal_attn_mask(seen)
    logits, _ = model(ids, positions=positions, cache=None, attention_mask=mask)
    return jax.lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False).at[:, PAD].set(-jnp.inf)


def completions(model, prompts, temperature, key) -> np.ndarray:
    """Sampled until `<eos>`, and padded."""
    ids = np.concatenate([prompts, np.full((len(prompts), LENGTH), PAD, np.int32)], axis=1)
    going = np.ones(len(prompts), bool)
    for place in range(prompts.shape[1], ids.shape[1]):
        key, step = jax.random.split(key)
        sampled = jax.random.categorical(step, next_logits(model, jnp.asarray(ids), place - 1) / temperature)
        ids[going, place] = np.asarray(sampled)[going]
        going &= ids[:, place] != EOS
    return ids[:, prompts.shape[1] :]


def logps_of(model, prompts, completion, temperature):
    graph, state = nnx.split(model)
    return common.compute_per_token_logps(
        graph, state, prompt_tokens=prompts, completion_tokens=completion, pad_id=PAD, eos_id=EOS, temperature=temperature
    )


def main() -> None:
    words, config = tokenizer(), Config()
    policy = Policy(Shape(words.get_vocab_size()), nnx.Rngs(0))
    reference = nnx.clone(policy)
    optimizer = nnx.Optimizer(policy, optax.adam(5e-3), wrt=nnx.Param)

    def of(name):
        loss_fn = function_registry.get_policy_loss_fn(name)
        call = partial(loss_fn, algo_config=config, pad_id=PAD, eos_id=EOS)
        return nnx.jit(nnx.value_and_grad(lambda model, batch: call(model, batch), has_aux=True))

    ours, theirs = of(config.policy_loss_fn), of("grpo")
    compared = []
    for rollout in range(3):
        texts = [f"w{i} w{i + 1} w{i + 2}" for i in (2 * rollout, 2 * rollout + 1) for _ in range(GENERATIONS)]
        prompts = np.array([words.encode(text).ids for text in texts], np.int32)
        sampled = completions(policy, prompts, config.temperature, jax.random.key(rollout))
        said = [words.decode(row[row != PAD].tolist()).split() for row in sampled]
        rewards = np.array([said_here.count("w7") - 0.1 * len(said_here) for said_here in said], np.float32)
        given = (jnp.asarray(prompts), jnp.asarray(sampled))
        example = common.TrainExample(
            prompt_ids=given[0],
            prompt_mask=given[0] != PAD,
            completion_ids=given[1],
            completion_mask=given[1] != PAD,
            advantages=jnp.asarray(algo_core.compute_advantages(rewards, GENERATIONS)),
            ref_per_token_logps=logps_of(reference, *given, config.temperature),
            old_per_token_logps=logps_of(policy, *given, config.temperature),
        )
        for _ in range(2):
            (loss, metrics), gradients = ours(policy, example)
            (loss_of_theirs, of_theirs), gradients_of_theirs = theirs(policy, example)
            error, worst, parameters = 0.0, "", 0
            for (path, a), b in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(gradients_of_theirs), strict=True):
                assert jnp.abs(b).max() > 0, f"{path}: no gradient"
                relative = float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
                parameters += 1
                if relative >= error:
                    error, worst = relative, jax.tree_util.keystr(path)
            ratio = jnp.exp(logps_of(policy, *given, config.temperature) - example.old_per_token_logps) - 1
            ratio = float(jnp.abs(jnp.where(example.completion_mask, ratio, 0)).max())
            lengths = np.asarray(example.completion_mask).sum(1).tolist()
            print(
                f"step {len(compared)}: loss {float(loss):+.7f} and Tunix's {float(loss_of_theirs):+.7f}, gradients of {parameters} "
                f"parameters within {error:.1e} ({worst}), KL {float(metrics['kl']):.5f} and {float(of_theirs['kl']):.5f}, "
                f"largest |ratio − 1| {ratio:.1e}, lengths {lengths}"
            )
            compared.append((float(loss), float(loss_of_theirs), error, ratio, lengths))
            optimizer.update(policy, gradients)
    assert max(ratio for *_, ratio, _ in compared) > 1e-3, "the ratio is 1 everywhere"
    assert any(len(set(lengths)) > 1 for *_, lengths in compared), "all completions are as long"
    worst = max(error for _, _, error, _, _ in compared)
    apart = max(abs(ours - theirs) for ours, theirs, *_ in compared)
    print(f"{len(compared)} steps: losses within {apart:.1e}, gradients within {worst:.1e} of their norm")
    if worst > 2e-5 or apart > 2e-6:
        sys.exit("not Tunix's loss")


if __name__ == "__main__":
    main()
