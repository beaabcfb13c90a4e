"""GRPO in JAX on eight devices, the loss by autodiff or by a kernel: one key of the YAML, `grpo_kernel`.

    pip install -r examples/jax_train/requirements.txt            # and the package
    python examples/jax_train/train.py train examples/jax_train/small.yaml --out target/assay/jax_train
    python examples/jax_train/train.py ab examples/jax_train/small.yaml --out target/assay/jax_train   # both, and a page
    python examples/jax_train/train.py memory examples/jax_train/small.yaml --target v6e:2x4           # or h100

Each device has its sequences (`shard_map`). What a run writes is what `assay train` writes: metrics.jsonl, TensorBoard's events,
W&B's offline files, summary.json. `assay report` reads ab.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ahead
import assay
import task
from assay.jax import grpo_loss, logp_and_entropy
from policy import Policy

Batch = dict[str, Any]


def plain_loss(logits: jax.Array, batch: Batch, beta: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What a trainer writes without a kernel: PPO-clip with k3, the mean over all tokens, by autodiff."""
    logp_all = jax.nn.log_softmax(logits.astype(jnp.float32))
    logp = jnp.take_along_axis(logp_all, batch["ids"][..., None], -1)[..., 0]
    ratio, advantages = jnp.exp(logp - batch["old_logp"]), batch["advantages"][:, None]
    policy = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    gap = batch["ref_logp"] - logp
    kl = jnp.exp(gap) - gap - 1.0
    mask = batch["mask"]
    count = jnp.maximum(jax.lax.psum(mask.sum(), "data"), 1)

    def mean(values: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.where(mask, values, 0.0).sum(), "data") / count

    low, high = (ratio < 0.8) & (advantages < 0), (ratio > 1.2) & (advantages > 0)
    entropy = -(jnp.exp(logp_all) * logp_all).sum(-1)
    logged = dict(entropy_mean=entropy, kl_mean=kl, clip_low=low, clip_high=high, clip_region=low | high)
    return mean(policy + beta * kl), jax.lax.stop_gradient({name: mean(values) for name, values in logged.items()})


def loss_of(config: dict[str, Any], enabled: bool, target: str | None = None) -> Callable[[jax.Array, Batch], Any]:
    """The loss of a device's share of a batch: that of all devices, the same on each."""
    beta, kernel = config["loss"]["beta"], config["grpo_kernel"]
    spec = assay.spec(kl={"beta": beta, "estimator": "k3"})

    def of_kernel(logits: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        implementation = {"v": "mosaic", "h": "ptx", "b": "ptx"}[target[0]] if target else kernel["implementation"]
        of = grpo_loss(logits, **batch, spec=spec, implementation=implementation, target=target, batch_axis="data")
        return of.loss, of.metrics

    return of_kernel if enabled else lambda logits, batch: plain_loss(logits, batch, beta)


def optimizer(config: dict[str, Any]) -> optax.GradientTransformation:
    update = config["update"]
    return optax.chain(optax.clip_by_global_norm(update["max_grad_norm"]), optax.adamw(update["learning_rate"]))


def stepper(config: dict[str, Any], mesh: Any, enabled: bool, target: str | None = None) -> tuple[Any, Any]:
    """The gradient of a batch, and one step of the optimizer; both for jit."""
    loss, steps = loss_of(config, enabled, target), optimizer(config)

    def gradient(policy: Policy, sequences: jax.Array, batch: Batch) -> Any:
        def of_policy(policy: Policy) -> Any:
            # The logits before the last token score the completion.
            length = batch["ids"].shape[1]
            return loss(policy.last_logits(sequences[:, :-1], length), batch)

        return jax.value_and_grad(of_policy, has_aux=True)(policy)

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())

    def update(policy: Policy, state: Any, sequences: jax.Array, batch: Batch) -> Any:
        (loss, metrics), gradients = mapped(policy, sequences, batch)
        updates, state = steps.update(gradients, state, policy)
        metrics = dict(metrics, grad_norm=optax.global_norm(gradients))
        return eqx.apply_updates(policy, updates), state, loss, metrics

    return mapped, update


#: Vocabulary entries whose probabilities are added up first.
BLOCK = 64


def sampled(key: jax.Array, logits: jax.Array) -> jax.Array:
    """An id a row of `[B,V]`, by one random number: where the sum of probabilities passes it, by blocks and then within one."""
    p = jax.nn.softmax(logits.astype(jnp.float32)).reshape(len(logits), -1, BLOCK)
    blocks = jnp.cumsum(p.sum(-1), -1)
    asked = jax.random.uniform(key, (len(logits),)) * blocks[:, -1]
    block = jnp.minimum((blocks <= asked[:, None]).sum(-1), blocks.shape[1] - 1)
    rows = jnp.arange(len(logits))
    within = blocks[rows, block][:, None] - jnp.cumsum(p[rows, block, ::-1], -1)[:, ::-1]
    return block * BLOCK + jnp.maximum((within <= asked[:, None]).sum(-1) - 1, 0)


class Run:
    """One arm."""

    def __init__(self, config: dict[str, Any], enabled: bool, out: pathlib.Path) -> None:
        self.config, self.enabled, self.out = config, enabled, out
        self.mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
        self.rng = np.random.default_rng(config["seed"])
        pairs = task.split(self.rng, config["task"]["largest"])
        self.train, self.evaluation = (
            task.exercises(self.rng, config["task"][name], config["task"]["largest"], of)
            for name, of in zip(("train", "evaluate"), pairs, strict=True)
        )
        self.policy = Policy(**config["model"], key=jax.random.key(config["seed"]))
        self.update: Any = jax.jit(stepper(config, self.mesh, enabled)[1], donate_argnums=(0, 1))
        self.apart = jax.jit(self._apart)
        self.generate = jax.jit(self._generate, static_argnums=3)
        self.score = jax.jit(self._score)

    def _generate(self, policy: Policy, prompts: jax.Array, key: jax.Array, greedy: bool) -> jax.Array:
        length, new = prompts.shape[1], self.config["rollout"]["max_new_tokens"]
        sequences = jnp.pad(prompts, ((0, 0), (0, new)))

        def step(i: jax.Array, sequences: jax.Array) -> jax.Array:
            logits = policy.head(policy.hidden(sequences)[:, length + i - 1])
            drawn = logits.argmax(-1) if greedy else sampled(jax.random.fold_in(key, i), logits)
            return sequences.at[:, length + i].set(drawn.astype(jnp.int32))

        return jax.lax.fori_loop(0, new, step, sequences)

    def _score(self, policy: Policy, sequences: jax.Array) -> jax.Array:
        new = self.config["rollout"]["max_new_tokens"]
        return logp_and_entropy(policy.last_logits(sequences[:, :-1], new), sequences[:, -new:])[0]

    def warm_start(self) -> None:
        """Supervised: right answers, so that there is something to reward."""
        warm = self.config["warm_start"]
        adam = optax.adam(warm["learning_rate"])
        texts = task.encode([exercise.prompt + f" #### {exercise.answer}" for exercise in self.train])
        texts = np.pad(texts, ((0, 0), (0, 1)), constant_values=task.END)

        @jax.jit
        def step(policy: Policy, state: Any, sequences: jax.Array) -> Any:
            def loss(policy: Policy) -> jax.Array:
                logits = policy.last_logits(sequences[:, :-1], 7)
                return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, -7:]).mean()

            updates, state = adam.update(jax.grad(loss)(policy), state)
            return eqx.apply_updates(policy, updates), state

        state = adam.init(self.policy)
        for _ in range(warm["steps"]):
            chosen = self.rng.integers(0, len(texts), warm["batch"])
            self.policy, state = step(self.policy, state, texts[chosen])

    def rewards(self, sequences: np.ndarray, exercises: list[task.Exercise]) -> np.ndarray:
        new = self.config["rollout"]["max_new_tokens"]
        return np.array([task.reward(row[-new:], exercise) for row, exercise in zip(sequences, exercises, strict=True)])

    def evaluate(self) -> dict[str, float]:
        prompts = task.encode([exercise.prompt for exercise in self.evaluation])
        sequences = np.asarray(self.generate(self.policy, prompts, jax.random.key(0), True))
        answer, of_format = self.rewards(sequences, self.evaluation).mean(0)
        return {f"eval/reward/{k}/mean": v for k, v in dict(total=answer + of_format, answer=answer, format=of_format).items()}

    def steps(self) -> Iterator[dict[str, Any]]:
        """A record a step, under the keys of `assay train`."""
        config = self.config
        group, new = config["rollout"]["group"], config["rollout"]["max_new_tokens"]
        self.warm_start()
        before = self.evaluate()
        reference = jax.tree.map(jnp.copy, self.policy)
        state = optimizer(config).init(self.policy)
        place = NamedSharding(self.mesh, P("data"))
        # Laid out once as the steps return them.
        self.policy, state = jax.device_put((self.policy, state), NamedSharding(self.mesh, P()))
        for step in range(1, config["steps"] + 1):
            started = time.perf_counter()
            chosen = self.rng.integers(0, len(self.train), config["rollout"]["prompts"])
            asked = [self.train[i] for i in chosen for _ in range(group)]
            key = jax.random.fold_in(jax.random.key(config["seed"]), step)
            sequences = self.generate(self.policy, task.encode([exercise.prompt for exercise in asked]), key, False)
            generated = np.asarray(sequences)
            rollout_s = time.perf_counter() - started
            rewards = self.rewards(generated, asked)
            grouped = rewards.sum(1).reshape(-1, group)
            advantages = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 1e-4)
            ids = generated[:, -new:]
            ended = np.cumsum(ids == task.END, 1)
            batch = {
                "ids": ids,
                "mask": (ended == 0) | ((ended == 1) & (ids == task.END)),
                "advantages": advantages.reshape(-1).astype(np.float32),
                "old_logp": self.score(self.policy, generated),
                "ref_logp": self.score(reference, generated),
            }
            score_s = time.perf_counter() - started - rollout_s
            sequences, batch = jax.device_put((generated, batch), place)
            record: dict[str, Any] = {"step": step, "tokens_sha256": hashlib.sha256(generated.tobytes()).hexdigest()}
            if step % 10 == 1:
                record["gradient_apart"] = float(self.apart(self.policy, sequences, batch))
            if step == 1:
                # The program that all steps run, and what it holds on each device beside its arguments and results.
                self.update = self.update.lower(self.policy, state, sequences, batch).compile()
                record["update_temp_bytes"] = self.update.memory_analysis().temp_size_in_bytes
            updating = time.perf_counter()
            every = []
            for _ in range(config["update"]["epochs"]):
                self.policy, state, loss, metrics = self.update(self.policy, state, sequences, batch)
                every.append(jax.tree.map(float, dict(metrics, loss=loss)))
            means = {name: float(np.mean([one[name] for one in every])) for name in every[0]}
            done = time.perf_counter()
            record |= {
                "unix_time": time.time(),
                "loss": means["loss"],
                "entropy": means["entropy_mean"],
                **{name: means[name] for name in ("clip_low", "clip_high", "clip_region", "grad_norm")},
                "kl": means["kl_mean"],
                "reward/total/mean": float(rewards.sum(1).mean()),
                "reward/answer/mean": float(rewards[:, 0].mean()),
                "reward/format/mean": float(rewards[:, 1].mean()),
                "rollout/completions": len(asked),
                "rollout/even_groups": int((grouped.std(1) == 0).sum()),
                "rollout/truncated": int((ended[:, -1] == 0).sum()),
                "valid_tokens": int(np.asarray(batch["mask"]).sum()),
                "time/rollout_generate_s": rollout_s,
                "time/score_s": score_s,
                "time/update_s": done - updating,
                "time/step_s": done - started,
            }
            if step == 1:
                record["eval/step_0"] = before
            if step == config["steps"]:
                record |= self.evaluate()
            yield record

    def _apart(self, policy: Policy, sequences: jax.Array, batch: Batch) -> jax.Array:
        """How far the gradient of all weights by the kernel is from that by autodiff, over its norm."""
        arms = (stepper(self.config, self.mesh, enabled)[0] for enabled in (False, True))
        plain, kernel = (gradient(policy, sequences, batch)[1] for gradient in arms)
        return optax.global_norm(jax.tree.map(jnp.subtract, kernel, plain)) / (optax.global_norm(plain) + 1e-30)

    def run(self) -> list[dict[str, Any]]:
        self.out.mkdir(parents=True, exist_ok=True)
        records = []
        with Journal(self.out, self.config) as journal:
            for record in self.steps():
                records.append(record)
                journal.write(record)
        last = records[-1]
        summary = {"steps": len(records), "grpo_kernel": {**self.config["grpo_kernel"], "enabled": self.enabled}, **last}
        whole(self.out / "summary.json", json.dumps(summary, indent=2))
        return records


def whole(path: pathlib.Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(text + "\n")
    beside.replace(path)


class Journal:
    """metrics.jsonl; TensorBoard's and W&B's files where they are installed, which it says."""

    def __init__(self, out: pathlib.Path, config: dict[str, Any]) -> None:
        self.lines = (out / "metrics.jsonl").open("w")
        self.board = self.wandb = None
        try:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(out))
        except ImportError:
            print("tensorboardX is not installed: no events for TensorBoard", file=sys.stderr)
        try:
            import wandb

            settings = wandb.Settings(console="off", silent=True)
            self.wandb = wandb.init(project="grpo-assay", mode="offline", dir=str(out), config=config, settings=settings)
        except ImportError:
            print("wandb is not installed: no offline run for W&B", file=sys.stderr)

    def __enter__(self) -> Journal:
        return self

    def write(self, record: dict[str, Any]) -> None:
        self.lines.write(json.dumps(record) + "\n")
        self.lines.flush()
        scalars = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        if self.board is not None:
            for name, value in scalars.items():
                self.board.add_scalar(name, value, record["step"])
        if self.wandb is not None:
            self.wandb.log(scalars, step=record["step"])

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


#: Of a gradient's norm. Each of its sums of up to some hundred terms in f32 may be off by as many roundings, in both arms.
APART = 1e-4


def compared(config: dict[str, Any], arms: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """As `assay ab --json` writes it."""

    def step(record: dict[str, Any]) -> dict[str, Any]:
        nobody = {"loss_step_s": None, "loss_step_bytes": None}
        named = {"reward": record["reward/total/mean"], "update_s": record["time/update_s"]}
        return {name: record[name] for name in ("step", "loss", "entropy", "grad_norm")} | named | nobody

    def line(what: str, of: Callable[[list[dict[str, Any]]], float], ratio: bool = False) -> dict[str, Any]:
        baseline, kernel = (of(records) for records in arms.values())
        difference = baseline / kernel if ratio else kernel - baseline
        return dict(what=what, baseline=baseline, kernel=kernel, difference=difference, limit=None)

    worst = max(record["gradient_apart"] for records in arms.values() for record in records if "gradient_apart" in record)
    half = config["steps"] // 2
    equal = 0
    for one, other in zip(*arms.values(), strict=True):
        if one["tokens_sha256"] != other["tokens_sha256"]:
            break
        equal += 1
    verdicts = [
        dict(
            what="gradient of all weights, kernel from autodiff on the same tokens and weights, over its norm, worst",
            baseline=None,
            kernel=None,
            difference=worst,
            limit=APART,
            **{"pass": bool(worst <= APART)},
        ),
        dict(what="steps from the first on with the same tokens", baseline=None, kernel=None, difference=equal, limit=None),
        line("training reward, second half of the steps", lambda of: float(np.mean([r["reward/total/mean"] for r in of[half:]]))),
        line("evaluation reward before", lambda of: of[0]["eval/step_0"]["eval/reward/total/mean"]),
        line("evaluation reward after", lambda of: of[-1]["eval/reward/total/mean"]),
        line("entropy, last step", lambda of: of[-1]["entropy"]),
        line("update, s, median; baseline / kernel", lambda of: float(np.median([r["time/update_s"] for r in of])), True),
        line("step, s, median; baseline / kernel", lambda of: float(np.median([r["time/step_s"] for r in of])), True),
        line("temp of an update on each device, MB; baseline / kernel", lambda of: of[0]["update_temp_bytes"] / 1e6, True),
    ]
    implementations = ("jax", config["grpo_kernel"]["implementation"] or "native")
    return {
        "pass": all(verdict.get("pass") is not False for verdict in verdicts),
        "arms": [
            {"name": name, "impl": implementation, "runs": [{"seed": config["seed"], "steps": [step(r) for r in records]}]}
            for (name, records), implementation in zip(arms.items(), implementations, strict=True)
        ],
        "verdicts": [{"pass": None, **verdict} for verdict in verdicts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "ab", "memory"))
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/assay/jax_train"))
    parser.add_argument("--steps", type=int, help="in place of the settings' own")
    parser.add_argument("--target", default="v6e:2x4", help="of memory: v6e:2x4 or h100")
    asked = parser.parse_args()
    config = yaml.safe_load(asked.config.read_text())
    config["steps"] = asked.steps or config["steps"]
    if asked.what == "memory":
        for line in ahead.memory(config, asked.target, Policy, stepper, optimizer):
            print(line, flush=True)
        return
    if asked.what == "train":
        records = Run(config, config["grpo_kernel"]["enabled"], asked.out).run()
        print(json.dumps(records[-1], indent=2))
        return
    arms = {name: Run(config, enabled, asked.out / name).run() for name, enabled in (("baseline", False), ("kernel", True))}
    comparison = compared(config, arms)
    whole(asked.out / "ab.json", json.dumps(comparison))
    for verdict in comparison["verdicts"]:
        print(json.dumps(verdict))
    page = asked.out / "ab.html"
    subprocess.run([sys.executable, "-m", "assay", "report", str(asked.out / "ab.json"), "-o", str(page)], check=True)
    sys.exit(0 if comparison["pass"] else 1)


if __name__ == "__main__":
    main()
