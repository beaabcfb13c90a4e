"""TRL's GRPOTrainer with the loss of `assay.torch`: one method, overridden.

    python trl_grpo.py

A tiny Qwen2 that is made from a config, with a tokenizer of its own, learns on the CPU to say one word more often. At every step
the loss and every parameter's gradient are compared with what TRL's own method computes for the same batch: two optimizer steps
a rollout, so that the ratio is not 1, a KL term, and completions of different lengths.
"""

import os
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import assay
import assay.torch


# What of a GRPOConfig shapes the loss.
OPTIONS = (
    "beta",
    "delta",
    "entropy_coef",
    "epsilon",
    "epsilon_high",
    "importance_sampling_level",
    "loss_type",
    "off_policy_mask_threshold",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "temperature",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_bias_correction_kl",
    "use_vllm",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)


class AssayGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with hidden states and LM head handed to one operation, which never makes all logits.

    For the losses that are divided by the tokens of all ranks and steps, as TRL's default `dapo` is: others are refused.
    """

    def _spec(self, inputs):
        """The loss of what TRL hands over, which differs from batch to batch in its arrays alone."""
        weights = inputs.get("importance_sampling_ratio")
        batch = {
            "old_logps": inputs.get("old_per_token_logps") is not None,
            "ref_logps": self.args.beta != 0,
            "sampling_logps": inputs.get("sampling_per_token_logps") is not None,
            "rollout_weights": None if weights is None else "sequence" if weights.shape[-1] == 1 else "token",
            "num_items_in_batch": 1.0,
        }
        return assay.spec("trl", batch=batch, **{name: getattr(self.args, name) for name in OPTIONS if hasattr(self.args, name)})

    def _compute_loss(self, model, inputs):
        tokens = inputs["completion_ids"].size(1)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        steps = self.current_gradient_accumulation_steps
        counted = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        result = assay.torch.grpo_loss(
            None,
            hidden=hidden[:, -tokens - 1 : -1],
            lm_head=model.get_output_embeddings().weight,
            spec=self._spec(inputs),
            normalizer=counted * steps / self.args.steps_per_generation,
            **assay.torch.trl_arguments(inputs),
        )
        self._metrics["train"]["kl"].append(result.metrics["kl_mean"].item())
        self._metrics["train"]["entropy"].append(result.metrics["entropy_mean"].item())
        return result.loss


class Compared(AssayGRPOTrainer):
    """The same, beside TRL's own method."""

    def _compute_loss(self, model, inputs):
        names, parameters = zip(*model.named_parameters())
        theirs = GRPOTrainer._compute_loss(self, model, inputs)
        of_theirs = torch.autograd.grad(theirs, parameters)
        ours = super()._compute_loss(model, inputs)
        of_ours = torch.autograd.grad(ours, parameters, retain_graph=True)
        error, worst = 0.0, ""
        for name, a, b in zip(names, of_ours, of_theirs):
            assert b.abs().max() > 0, f"{name}: no gradient"
            relative = ((a - b).norm() / b.norm()).item()
            if relative >= error:
                error, worst = relative, name
        ratio = 0.0
        if (old := inputs.get("old_per_token_logps")) is not None:
            ids, mask = inputs["completion_ids"], inputs["completion_mask"]
            full = torch.cat([inputs["prompt_ids"], ids], dim=1)
            seen = torch.cat([inputs["prompt_mask"], mask], dim=1)
            logps, _, _ = self._get_per_token_logps_and_entropies(model, full, seen, ids.size(1))
            ratio = ((logps - old).exp() - 1).abs().mul(mask).max().item()
        lengths = inputs["completion_mask"].sum(1).tolist()
        print(
            f"step {self.state.global_step}: loss {ours.item():+.7f} and TRL's {theirs.item():+.7f}, gradients of "
            f"{len(names)} parameters within {error:.1e} ({worst}), largest |ratio − 1| {ratio:.1e}, lengths {lengths}"
        )
        self.compared = [*getattr(self, "compared", []), (ours.item(), theirs.item(), error, ratio, lengths)]
        return ours


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model(vocab: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(text.split().count("w7")) - 0.1 * len(text.split()) for text in completions]


def main() -> None:
    words = tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
            max_steps=6,
            per_device_train_batch_size=8,
            num_generations=4,
            num_iterations=2,
            max_completion_length=24,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            loss_type="dapo",
            beta=0.04,
            temperature=1.0,
            gradient_checkpointing=False,
        )
        # TRL makes the reference policy from where the policy was read.
        model(len(words)).save_pretrained(f"{folder}/policy")
        policy = Qwen2ForCausalLM.from_pretrained(f"{folder}/policy")
        prompts = Dataset.from_list([{"prompt": f"w{i} w{i + 1} w{i + 2}"} for i in range(16)])
        trainer = Compared(model=policy, reward_funcs=reward, args=args, train_dataset=prompts, processing_class=words)
        trainer.train()
    compared = trainer.compared
    assert len(compared) == 6
    assert max(ratio for *_, ratio, _ in compared) > 1e-3, "the ratio is 1 everywhere"
    assert any(len(set(lengths)) > 1 for *_, lengths in compared), "all completions are as long"
    worst = max(error for _, _, error, _, _ in compared)
    apart = max(abs(ours - theirs) for ours, theirs, *_ in compared)
    print(f"{len(compared)} steps: losses within {apart:.1e}, gradients within {worst:.1e} of their norm")
    if worst > 2e-5 or apart > 2e-6:
        sys.exit("not TRL's loss")


if __name__ == "__main__":
    main()
