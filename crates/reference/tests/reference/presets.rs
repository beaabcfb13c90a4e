//! The specs that presets resolve from a project's defaults and options, and the options that they refuse. The numbers themselves
//! are compared with recorded runs in `peers.rs`.

use assay_core::spec::presets::{BatchInputs, Preset, PresetError, PresetLoss, PresetOptions, WeightShape, spec};
use assay_core::spec::{AdvantageLevel, Kl, KlEstimator, LossSpec, LossTerms, Objective, PpoClip, RejectionLevel};
use serde_json::{Value, json};

fn resolve(
    preset: Preset,
    function: Option<&str>,
    pairs: &[&str],
    given: &BatchInputs,
) -> Result<PresetLoss, PresetError> {
    spec(preset, function, &PresetOptions::from_pairs(pairs).unwrap(), given)
}

#[track_caller]
fn of(preset: Preset, function: Option<&str>, pairs: &[&str]) -> LossSpec {
    resolve(preset, function, pairs, &BatchInputs::default()).unwrap_or_else(|error| panic!("{error}")).spec
}

#[track_caller]
fn with(preset: Preset, pairs: &[&str], given: &BatchInputs) -> LossSpec {
    resolve(preset, None, pairs, given).unwrap_or_else(|error| panic!("{error}")).spec
}

/// Old, reference and sampler's log-probabilities.
fn sampled() -> BatchInputs {
    BatchInputs { sampling_logps: true, ..BatchInputs::default() }
}

/// The columns of a line of a table, which `|` separates: project and function, options, and the rest.
fn columns(line: &str) -> (Preset, Option<&str>, Vec<&str>, Vec<&str>) {
    let columns: Vec<&str> = line.split('|').map(str::trim).collect();
    let (preset, function) = columns[0].split_once(' ').map_or((columns[0], None), |(name, of)| (name, Some(of)));
    (preset.parse().unwrap(), function, columns[1].split_whitespace().collect(), columns[2..].to_vec())
}

/// The inputs of a batch in words, in addition to old and reference log-probabilities.
fn inputs(words: &str) -> BatchInputs {
    let mut given = BatchInputs::default();
    for word in words.split_whitespace() {
        match word {
            "sampled" => given.sampling_logps = true,
            "no-old" => given.old_logps = false,
            "weights" => given.rollout_weights = Some(WeightShape::Sequence),
            "token-weights" => given.token_weights = true,
            "kept" => given.kept_ids = true,
            "60-items" => given.num_items_in_batch = Some(60.0),
            "float64" => given.float64 = true,
            _ => panic!("{word}"),
        }
    }
    given
}

/// Whether `value` has every member of `expected`, at any depth. `clip LOW HIGH DUAL` is the whole of PPO's clip, and
/// `plain BETA ESTIMATOR` the whole of a KL penalty.
fn has(value: &Value, expected: &Value) -> bool {
    let number = |word: &str| word.parse().ok();
    match (value, expected) {
        (Value::Object(value), Value::Object(expected)) => {
            expected.iter().all(|(name, expected)| value.get(name).is_some_and(|value| has(value, expected)))
        }
        (Value::Array(value), Value::Array(expected)) => {
            value.len() == expected.len() && value.iter().zip(expected).all(|(value, expected)| has(value, expected))
        }
        (Value::Number(value), Value::Number(expected)) => value.as_f64() == expected.as_f64(),
        (value, Value::String(text)) => match text.split_whitespace().collect::<Vec<_>>()[..] {
            ["clip", low, high, dual] => {
                let [epsilon_low, epsilon_high] = [low, high].map(|width| number(width).unwrap());
                let clip = PpoClip { epsilon_low, epsilon_high, dual_clip: number(dual), delta: None };
                *value == json!(Objective::PpoClip(clip))
            }
            ["plain", beta, estimator] => {
                let estimator: KlEstimator = serde_json::from_value(estimator.into()).unwrap();
                *value == json!(Kl::plain(number(beta).unwrap(), estimator))
            }
            _ => value == expected,
        },
        _ => value == expected,
    }
}

#[test]
fn preset_names_are_read_back() {
    for preset in Preset::ALL {
        assert_eq!(preset.name().parse::<Preset>().unwrap(), preset);
        for function in preset.functions() {
            assert!(of_any(preset, function).is_ok(), "{preset} {function}");
        }
    }
    assert_eq!("mllm_jax".parse::<Preset>().unwrap(), Preset::MllmJax);
    assert_eq!(of(Preset::Verl, Some("gspo"), &[]), of(Preset::Verl, Some("a.b.compute_policy_loss_gspo"), &[]));
}

#[test]
fn preset_of_a_preference_loss_is_refused_with_the_reason() {
    for name in ["dpo", "DPO", "ipo", "kto", "simpo"] {
        let error = name.parse::<Preset>().unwrap_err().to_string();
        let expected =
            format!("preset: got `{name}`, expected a loss of tokens: a preference loss is of the sums over a pair");
        assert!(error.starts_with(&expected), "{error}");
    }
}

/// A function under the options that it cannot do without.
fn of_any(preset: Preset, function: &str) -> Result<PresetLoss, PresetError> {
    let pairs: &[&str] = match function {
        "compute_policy_loss_dro" => &["dro_beta=0.1"],
        "dro" => &["beta=0.1"],
        "compute_topk_self_distillation_loss" => &["distillation_topk=4"],
        "LigerFusedLinearJSDLoss" => &["weight_hard_loss=0"],
        "LogitStrategy" | "CombinedDistillationStrategy" => &["alpha=1"],
        "kl_div" => &["reduction=batchmean"],
        _ => &[],
    };
    resolve(preset, Some(function), pairs, &sampled())
}

#[test]
fn trl_gmpo_reads_few_of_its_options() {
    let pairs = ["beta=0.1", "entropy_coef=0.5", "loss_type=dapo", "delta=2"];
    let gmpo = resolve(Preset::Trl, Some("GMPOTrainer"), &pairs, &BatchInputs::default()).unwrap();
    assert_eq!(gmpo.without_effect, ["delta", "entropy_coef", "loss_type"]);
    let clip = gmpo.spec.ratio.clip.unwrap();
    assert_eq!((clip.low, clip.high, gmpo.spec.entropy_coef), (0.4, 0.4, 0.0));
    assert_eq!(gmpo.spec.kl, Some(Kl::plain(0.1, KlEstimator::K3)));
}

/// Project and function, options, inputs, and fields of the spec.
const RESOLVED: &str = r#"
verl | | | {"objective": "clip 0.2 0.2 3", "ratio": {"clamp": 20}, "advantages": "token", "reduction": "token_mean", "kl": null}
tunix | | | {"kl": "plain 0.04 k1", "reduction": {"sequence_mean": {"rows": "non_empty"}}}
liger | | | {"kl": "plain 0.04 k3", "temperature": 1}
liger triton_grpo_loss | | | {"objective": "clip 0.2 0.4 -", "temperature": 0.9}
mllm-jax | temperature=0.7 | | {"temperature": 0.7, "temperature_divides": "logp"}
nemo | | | {"kl": {"beta": 0.01, "importance": "score", "difference_clamp": 20}}
verl | temperature=given | | {"temperature": "given"}
prime-rl | temperatures=given | | {"temperature": "given"}
prime-rl | | | {"objective": {"trust_region": {"low": 0.3, "high": 0.3, "two_sided": true, "penalty": 0, "truncate": null}}}
prime-rl | | | {"ratio": {"cap": 9.210340371976184, "straight_through": true}}
prime-rl default_loss_fn | | | {"objective": {"trust_region": {"low": 0.2, "high": 0.2, "penalty": 1e-3, "truncate": null}}}
skyrl | | | {"kl": {"averaging": {"reduction": {"sequence_mean": {"rows": "all"}}, "denominator_epsilon": 0}}}
unsloth | | | {"reduction": {"sequence_mean": {"rows": "all"}}}
openrlhf | | | {"ratio": {"clamp": 20}}

divergence | | | {"objective": {"distillation": {"kind": "jensen_shannon", "beta": 0.5}}, "old_logp": "current", "reduction": "token_mean"}
divergence | beta=0 temperature=2 | | {"objective": {"distillation": {"kind": "forward_kl", "beta": null, "top_k": null}}, "temperature": 2}
divergence | beta=1 top_k=8 | | {"objective": {"distillation": {"kind": "reverse_kl", "top_k": 8, "rest": "tail"}}}
divergence | beta=0 top_k=8 add_tail=false | | {"objective": {"distillation": {"top_k": 8, "rest": "renormalized"}}}
divergence | | 60-items | {"reduction": {"normalizer": 60}, "token_weights": null}
divergence | reduction=none | | {"reduction": {"normalizer": 1}, "token_weights": {"applies_to": "policy"}}
divergence _chunked_divergence_loss | | | {"objective": {"distillation": {"kind": "reverse_kl"}}}
divergence compute_full_logit_self_distillation_loss | | 60-items | {"objective": {"distillation": {"kind": "reverse_kl"}}, "reduction": "token_mean"}
divergence compute_topk_self_distillation_loss | distillation_topk=4 | | {"objective": {"distillation": {"top_k": 4, "rest": "renormalized"}}}
divergence LigerFusedLinearJSDLoss | weight_hard_loss=0 beta=0.1 | | {"objective": {"distillation": {"beta": 0.1}}, "scale": 0.5}
divergence LigerFusedLinearJSDFunction | jsd_beta=1 | | {"objective": {"distillation": {"kind": "reverse_kl"}}, "scale": 1}
divergence LogitStrategy | alpha=1 distill_top_k=5 | | {"objective": {"distillation": {"top_k": 5, "rest": "renormalized"}}}
divergence LogitStrategy | alpha=1 | | {"objective": {"distillation": {"top_k": null, "temperature_squared": true}}, "temperature": 2}
cross-entropy linear_softmax_cross_entropy_loss | | | {"objective": {"cross_entropy": {}}, "reduction": {"normalizer": 1}}
divergence liger_kernel.ops.kl_div.LigerKLDivLossFunction | | | {"objective": {"distillation": {"kind": "forward_kl"}}}

trl | STEPS loss_type=grpo | | {"scale": 0.5, "entropy_coef": 0.02}
trl | STEPS loss_type=grpo mode=eval | | {"scale": 1, "entropy_coef": 0.02}
trl | STEPS num_processes=3 | 60-items | {"reduction": {"normalizer": 10}, "scale": 1, "entropy_coef": 0.01}
trl | epsilon=0.1 epsilon_high=null | | {"objective": "clip 0.1 0.1 -"}
trl | loss_type=cispo epsilon_high=5 | | {"objective": {"cispo": {"lower": null, "upper": 5}}}
trl | loss_type=cispo | | {"objective": {"cispo": {"lower": null, "upper": 0.2}}}
trl | | no-old | {"old_logp": "current"}
trl | off_policy_mask_threshold=0.1 | | {"off_policy_mask": {"behaviour": "given"}}
trl | off_policy_mask_threshold=0.1 | sampled | {"off_policy_mask": {"behaviour": "rollout"}}
trl | off_policy_mask_threshold=0.1 | no-old | {"off_policy_mask": null}
trl | use_vllm=true | weights | {"rollout": {"source": "given", "applies_to": "policy"}}
trl | use_vllm=true | sampled | {"rollout": {"source": "logp", "level": "sequence", "outside": "mask", "max": 3}}
trl | loss_type=vespo | weights | {"rollout": {}, "objective": {"vespo": {"weights_of_masked_tokens": true}}}
trl | | | {"kl": null}
trl | beta=0.1 | | {"kl": {"importance": "ratio"}}
trl | beta=0.1 use_bias_correction_kl=False | | {"kl": "plain 0.1 k3"}
trl | fused_lm_head={"chunk_size":16,"final_logit_softcapping":3,"logit_scale":0.5} | | {"logits": {"scale": 0.5, "softcap": 3}}
trl | top_entropy_quantile=0.4 | | {"top_entropy": {"fraction": 0.4, "drops": "policy_term", "precision": "f32"}}
trl | top_entropy_quantile=0.4 | float64 | {"top_entropy": {"precision": "f32_threshold"}}
trl GMPOTrainer | top_entropy_quantile=0.4 | | {"top_entropy": {"drops": "ratio"}}
trl RLOOTrainer | beta=0.05 epsilon_high=0.3 | | {"ratio": {"level": "sequence_product", "clamp": null}, "kl": null}
trl RLOOTrainer | beta=0.05 epsilon_high=0.3 | | {"reduction": {"sequence_mean": {"rows": "all"}}}

verl cispo | clip_ratio_high=0.28 | | {"objective": {"cispo": {"lower": 0.8, "upper": 1.28}}}
verl | clip_ratio=0.4 | | {"objective": "clip 0.2 0.2 3"}
verl | clip_ratio=0.4 clip_ratio_low=null clip_ratio_high=None | | {"objective": "clip 0.4 0.4 3"}
verl gspo | | | {"ratio": {"level": "sequence_token", "cap": 10, "clamp": null, "denominator_epsilon": 0}}
verl gspo | | | {"denominator_epsilon": 1e-8, "objective": "clip 0.2 0.2 -"}
verl gspo | loss_agg_mode=token-mean | | {"denominator_epsilon": 0}
verl sapo | loss_agg_mode=token-mean | | {"denominator_epsilon": 1e-8}
verl reinforce | | | {"reduction": {"sequence_sum": {"rows": "non_empty"}}}
verl geo_mean | loss_agg_mode=token-sum | | {"reduction": {"sequence_mean": {"rows": "all"}}}
verl dppo_kl | | | {"objective": {"trust_region": {"divergence": "binary_kl", "truncate": 3}}}
verl | SAPO | | {"kl": {"averaging": {"reduction": "token_mean", "denominator_epsilon": 0}, "gradient": "k2", "value_clamp": 10}}
verl | SAPO | | {"entropy_averaging": {"reduction": "token_mean", "denominator_epsilon": 0}}
verl | SAPO | | {"reduction": {"sequence_mean": {"rows": "non_empty"}}}
verl vanilla | RANKS global_batch_info.batch_num_tokens=50 | | {"reduction": {"normalizer": 25}}
verl | SUMS data={"dp_size":2,"global_batch_size":9} | | {"reduction": {"fixed_length": {"rows": {"given": 4.5}, "length": 32}}}
verl | IS rollout_correction.rollout_is_threshold=0.5_5.0 | sampled | {"rollout": {"outside": "mask", "min": 0.5, "max": 5}}
verl | IS REJECT | sampled | {"rejection": [{"level": "token", "counts": false}, {"level": "sequence_max", "counts": false}]}
verl | IS REJECT | sampled | {"rejection": [{"min": -0.6931471805599453, "max": 0.6931471805599453}, {}]}
verl bypass_mode | REINFORCE | | {"ratio": {"level": "sequence_product", "clamp": 20}, "objective": {"cispo": {"lower": null, "upper": 2}}}
verl bypass_mode | REINFORCE rollout_correction.rollout_is=token | | {"ratio": {"level": "token"}}
verl bypass_mode | REINFORCE rollout_correction.rollout_is=null | | {"objective": "policy_gradient"}

tunix | temperature=0 | | {"temperature": 1}
tunix ppo_policy_loss_fn | kl_coef=0.1 entropy_coef=0.01 | | {"denominator_epsilon": 1e-8, "kl": "plain 0.1 k1"}
tunix ppo_policy_loss_fn | entropy_coef=0.01 | | {"entropy_averaging": {"reduction": "token_mean", "denominator_epsilon": 1e-8}}

unsloth | beta=0.1 VLLM | sampled | {"kl": {"clamp_after_importance": true}, "rollout": {"level": "geometric"}}
unsloth | beta=0.1 VLLM | sampled | {"rejection": [{"counts": true, "drops_from": "policy_and_kl"}]}
unsloth | support_top_k=20 support_top_p=0.9 support_min_p=0.1 | kept | {"support": {"keep_sampled": true, "kept": {"entropy": "set", "kl": "set"}}}
nemo | | kept | {"support": {"keep_sampled": false, "kept": {"entropy": "set", "kl": "vocabulary"}}}
trl | | kept | {"support": {"keep_sampled": false, "kept": {"entropy": "set", "kl": "set"}}}
unsloth | support_excluded_ids=[3,5] support_top_p=1.0 | | {"support": {"excluded_ids": [3, 5], "keep_sampled": true}}
unsloth | WEIGHED | token-weights | {"token_weights": {"applies_to": "policy_and_kl"}, "reduction": {"normalizer": 0.5}, "scale": 1}
unsloth | WEIGHED | token-weights | {"entropy_coef": 0.01}

skyrl | loss_reduction=prompt_mean | | {"token_weights": {"applies_to": "policy"}, "reduction": {"normalizer": 1}}
skyrl | OUTLIERS | sampled | {"rejection": [{"level": "sequence_max", "min": null, "max": 9.210340371976182}, {}]}
skyrl | OUTLIERS | sampled | {"rejection": [{}, {"level": "sequence_min", "min": -4.605170185988092, "max": 20}]}
prime-rl | rl_scale=9 | token-weights | {"token_weights": {"applies_to": "policy"}}
prime-rl default_loss_fn | | token-weights | {"token_weights": {"applies_to": "policy"}}
prime-rl | type=icepop | | {"objective": {"masked_ratio": {"lower": 0.2, "upper": 5, "surrogate": true}}, "ratio": {"cap": null}}
prime-rl PPOLoss | ratio_high=1.5 | | {"objective": "clip 0.19999999999999996 0.5 -", "ratio": {"straight_through": true}}
prime-rl | type=cispo ratio_low=0.5 | | {"objective": {"cispo": {"lower": 0.5, "upper": 5}}}
prime-rl | type=default | | {"objective": {"trust_region": {"two_sided": false, "penalty": 1e-3}}, "ratio": {"cap": null}}
prime-rl default_loss_fn | type=ipo | | {"objective": {"trust_region": {"two_sided": true, "low": 0.1}}, "ratio": {"cap": null}}
prime-rl ipo_loss_fn | IPO | | {"scale": 0.5, "reduction": {"normalizer": 40}, "objective": {"trust_region": {"two_sided": true}}}
prime-rl ipo_loss_fn | IPO | | {"objective": {"trust_region": {"penalty": 0.2}}}
openrlhf | GATE | sampled | {"rollout": {"level": "token", "min": null, "max": null}}
openrlhf | GATE | sampled | {"rejection": [{"estimator": "binary_kl", "level": "sequence_mean", "counts": true, "max": 0.01}]}
openrlhf | GATE | sampled | {"rejection": [{"drops_from": "policy"}]}
openrlhf | kl.use_loss=true kl.unbiased_gradient=true | | {"kl": {"estimator": "k1", "gradient": {"k2_weighted": 10}}}
nemo | use_on_policy_kl_approximation=true | sampled | {"kl": {"importance": "rollout", "clamp_after_importance": true}}
nemo | seq_logprob_error_threshold=1.5 | sampled | {"rejection": [{"estimator": "absolute_ratio", "counts": false, "max": 1.5}]}
nemo | seq_logprob_error_threshold=1.5 | sampled | {"rejection": [{"level": "sequence_mean"}]}
nemo | use_importance_sampling_correction=true | sampled | {"rollout": {"unscored": "zero"}}
trinity | | | {"objective": "clip 0.2 0.2 3", "ratio": {"clamp": 20}, "kl": "plain 0.001 k2", "reduction": "token_mean"}
trinity | algorithm.algorithm_type=dapo | | {"kl": null}
trinity | algorithm_type=topr | | {"objective": {"topr": {"positive_weight": 1, "negative_weight": 1, "upper": 1, "positive": "advantage"}}}
trinity | policy_loss_fn=gspo | | {"objective": "clip 0.0003 0.0004 -", "ratio": {"level": "sequence_token"}, "reduction": "token_mean"}
trinity | policy_loss_fn=gspo policy_loss_fn_args.clip_range=0.1 | | {"reduction": {"sequence_mean": {"rows": "all"}}}
trinity | policy_loss_fn=opmd entropy_loss_fn_args.entropy_coef=0.1 | | {"scale": 0.5, "entropy_coef": 0.2, "kl": {"beta": 0.002}}
trinity | policy_loss_fn=rec | | {"objective": "policy_gradient", "kl": {"estimator": "k2"}}
trinity | | no-old | {"old_logp": "rollout"}
tinker | | sampled | {"old_logp": "rollout", "reduction": {"normalizer": 1}, "objective": {"importance_sampling": {}}}
tinker | loss_fn=ppo | | {"objective": "clip 0.19999999999999996 0.19999999999999996 -", "old_logp": "given"}
tinker cispo | | | {"objective": {"cispo": {"lower": null, "upper": 4}}}
tinker | loss_fn=cispo loss_fn_config.clip_low_threshold=0.5 | | {"objective": {"cispo": {"lower": 0.5, "upper": 4}}}
tinker cross_entropy | | | {"objective": "policy_gradient", "old_logp": "current"}
fast-llm | | 60-items | {"objective": "clip 0.2 0.2 -", "reduction": {"normalizer": 60}, "advantages": "token"}
torchtitan | | sampled | {"ratio": {"clamp": 10}, "old_logp": "rollout", "reduction": {"normalizer": 1}}
axolotl | beta=0.1 | | {"kl": "plain 0.1 k3", "objective": "clip 0.2 0.2 -", "reduction": "token_mean"}
axolotl | use_vllm=true | sampled | {"rollout": {"level": "sequence", "outside": "mask", "max": 3, "min": null}}
axolotl AxolotlAsyncGRPOTrainer | use_vllm=true vllm_importance_sampling_cap=2 | sampled | {"rollout": {"level": "token", "min": 0.5, "max": 2}}
rl-kernel | beta=0.04 | | {"kl": "plain 0.04 k3", "advantages": "sequence", "reduction": "token_mean"}
cross-entropy | | | {"objective": {"cross_entropy": {"label_smoothing": 0, "z_loss": 0}}, "old_logp": "current", "reduction": "token_mean"}
cross-entropy | label_smoothing=0.1 z_loss=1e-4 softcap=30 logit_scale=0.5 reduction=sum | | {"objective": {"cross_entropy": {"label_smoothing": 0.1, "z_loss": 1e-4}}, "logits": {"scale": 0.5, "softcap": 30}, "reduction": {"normalizer": 1}}
cross-entropy | reduction=none | token-weights | {"token_weights": {"applies_to": "policy"}, "reduction": {"normalizer": 1}}
archer | | | {"objective": {"aspo": {"epsilon_low": 0.4, "epsilon_high": 0.4, "selected": {"epsilon_low": 0.2, "epsilon_high": 0.2}}}}
archer | ALIKE | | {"objective": {"aspo": {"epsilon_low": 0.2, "epsilon_high": 0.2}}}
areal | m2_threshold=0.04 | sampled | {"rejection": []}
"#;

/// Options that several lines have in common.
const SHORT: [(&str, &str); 15] = [
    ("STEPS", "gradient_accumulation_steps=2 steps_per_generation=4 entropy_coef=0.02"),
    ("SAPO", "loss_mode=sapo use_kl_loss=true entropy_coeff=0.01 kl_loss_type=k3+"),
    ("RANKS", "global_batch_info.dp_size=2"),
    ("SUMS", "loss_agg_mode=seq-mean-token-sum-norm loss_scale_factor=32"),
    ("IS", "rollout_correction.rollout_is=token"),
    ("REJECT", "rollout_correction.rollout_rs=token_k1,seq_max_k3 rollout_correction.rollout_rs_threshold=2,0.1"),
    ("REINFORCE", "rollout_correction.loss_type=reinforce"),
    ("VLLM", "use_vllm=true VCORRECTED rollout_rs=token_k2 rollout_rs_threshold=0.1"),
    ("VCORRECTED", "vllm_importance_sampling_correction=true vllm_importance_sampling_mode=geometric_truncate"),
    ("WEIGHED", "entropy_coef=0.02 current_gradient_accumulation_steps=2 steps_per_generation=4"),
    ("OUTLIERS", "OUTLIER_low=1e-4 OUTLIER_high=100"),
    ("OUTLIER", "off_policy_correction.outlier_token_is_threshold"),
    (
        "GATE",
        "is_correction_level=seq is_correction_gating=binary_kl is_correction_threshold_low=0 is_correction_threshold_high=0.01",
    ),
    ("IPO", "adv_tau=0.5 kl_tau=0.1 rl_scale=40"),
    ("ALIKE", "negative_high_entropy_clip_ratio_low=0.2 positive_high_entropy_clip_ratio_high=0.2"),
];

#[test]
fn preset_options_resolve_to_the_fields_of_a_spec() {
    assert_eq!(of(Preset::Trl, None, &[]), LossSpec::default());
    for line in RESOLVED.lines().filter(|line| !line.is_empty()) {
        let line = SHORT.iter().fold(format!("{line} "), |line, (short, long)| line.replace(short, long));
        let (preset, function, pairs, rest) = columns(&line);
        let resolved = resolve(preset, function, &pairs, &inputs(rest[0])).unwrap_or_else(|error| panic!("{error}"));
        let spec = serde_json::to_value(&resolved.spec).unwrap();
        assert!(has(&spec, &serde_json::from_str(rest[1]).unwrap()), "{line}\n{spec}");
    }
    let aspo = of(Preset::Archer, None, &SHORT[14].1.split(' ').collect::<Vec<_>>()).objective;
    assert!(matches!(aspo, Objective::Aspo(aspo) if aspo.selected.is_none()));
}

#[test]
fn preset_notes_name_what_is_missing() {
    let says = |preset, function, pairs: &[&str], given: &BatchInputs, words: &str| {
        let notes = resolve(preset, function, pairs, given).unwrap_or_else(|error| panic!("{error}")).notes;
        assert!(notes.iter().any(|note| note.contains(words)), "{notes:?}");
    };
    let weights = inputs("weights");
    assert!(with(Preset::Trl, &[], &weights).rollout.is_none());
    says(Preset::Trl, None, &[], &weights, "importance weights");
    says(Preset::Trl, None, &[], &inputs("token-weights"), "token weights");
    says(Preset::Skyrl, None, &["loss_reduction=prompt_mean"], &inputs(""), "1/(P·Σ n)");
    let none = BatchInputs { ref_logps: false, ..BatchInputs::default() };
    assert!(with(Preset::Tunix, &[], &none).kl.is_none());
    says(Preset::Tunix, None, &[], &none, "no reference logps");
}

#[test]
fn trl_async_clips_against_the_sampler() {
    let pairs = ["epsilon_high=0.28", "gradient_accumulation_steps=2", "num_processes=3"];
    let resolved = resolve(Preset::Trl, Some("AsyncGRPOTrainer"), &pairs, &inputs("sampled 60-items")).unwrap();
    let expected = json!({"objective": "clip 0.2 0.28 -", "old_logp": "rollout", "reduction": {"normalizer": 20.0},
        "scale": 0.5, "advantages": "token"});
    assert!(has(&json!(resolved.spec), &expected), "{:?}", resolved.spec);
    assert!(resolved.notes.iter().any(|note| note.contains("micro-batches")), "{:?}", resolved.notes);
}

#[test]
fn unsloth_entropy_bonus_is_divided_by_the_steps() {
    let bonus = |pair| {
        let spec = of(Preset::Unsloth, None, &["entropy_coef=0.02", "current_gradient_accumulation_steps=4", pair]);
        (spec.entropy_coef * spec.scale, spec.entropy_averaging)
    };
    for loss_type in ["loss_type=grpo", "loss_type=dapo"] {
        assert_eq!(bonus(loss_type), (0.005, None), "{loss_type}: divided by the steps, whatever the loss is");
    }
    assert_eq!(bonus("use_adaptive_entropy=true"), (0.0, None));
}

#[test]
fn skyrl_rejections_spare_the_kl_term() {
    let pairs = ["off_policy_correction.sequence_mask_metric=product"];
    let rejection = with(Preset::Skyrl, &pairs, &sampled()).rejection[0];
    assert_eq!((rejection.level, rejection.drops_from), (RejectionLevel::SequenceSum, LossTerms::Policy));
    assert!((rejection.max - 2_f64.ln()).abs() < 1e-15 && rejection.counts);
}

/// Project and function, options, and parts of the message.
const REFUSED: &str = r#"
unsloth | support_top_k=20 | `support_top_k` & 20 & logits
unsloth | support_top_p=0.9 | `support_top_p` & 0.9
unsloth | support_excluded_ids=[-1] | `support_excluded_ids` & [-1] & a list
trl AsyncGRPOTrainer |  | input `old_log_probs`
trl | use_adaptive_entropy=true | `use_adaptive_entropy` & true & off
trl | router_aux_loss_coef=0.1 | `router_aux_loss_coef` & 0.1
trl | loss_type=grpo nonsense=1 | `nonsense` & loss_type
trl | epsilon=high | `epsilon` & "high" & a number
trl | importance_sampling_level=word | `importance_sampling_level` & sequence
trl | gradient_accumulation_steps=0 | `gradient_accumulation_steps` & got 0
trl | temperature=0 | temperature & got 0
verl | loss_mode=mystery | `loss_mode` & geo_mean
verl dro |  | `dro_beta` & nothing
verl kl_penalty | kl_penalty=full | `kl_penalty` & "full" & low_var_kl
verl bypass_mode | rollout_correction.rollout_rs=token_k1 | `rollout_correction.rollout_rs`
tunix | loss_agg_mode=mean | `loss_agg_mode` & token-mean
liger | loss_type=cispo importance_sampling_level=sequence | `importance_sampling_level`
liger | loss_type=dr_grpo | `max_completion_length`
liger triton_grpo_loss | loss_type=sapo delta=2 | `delta`
mllm-jax | compute_dtype=bf16 | `compute_dtype` & f32
unsloth | rollout_logps_as_old=true | sampling_per_token_logps
skyrl | loss_reduction=token_mean_legacy | `loss_reduction` & how the batch is cut
nemo | positive_example_nll_weight=0.1 | `positive_example_nll_weight` & rewards
nemo | use_on_policy_kl_approximation=true | input `generation_logprobs`
prime-rl | adv_tau=0 | `adv_tau`
prime-rl | kl_tau=0.1 | `kl_tau` & ipo_loss_fn
prime-rl | score_centering=true | `score_centering` & lacks
prime-rl | max_importance_ratio=0.5 | `max_importance_ratio` & 0.5
trinity | policy_loss_fn=sapo | `policy_loss_fn` & topr
trinity | algorithm.algorithm_type=dpo | `algorithm_type` & "dpo"
trinity | policy_loss_fn=cispo policy_loss_fn_args.enable_mask_clip=true | `policy_loss_fn_args.enable_mask_clip` & PPO
trinity | policy_loss_fn=topr policy_loss_fn_args.advantage_threshold=0.5 | `policy_loss_fn_args.advantage_threshold` & sign
trinity | policy_loss_fn=rec policy_loss_fn_args.clip_mode=ring | `policy_loss_fn_args.clip_mode` & two-side
trinity | policy_loss_fn=rec policy_loss_fn_args.weight=importance_sampling | `policy_loss_fn_args.clip_mode` & two-side
trinity | policy_loss_fn_args.clip_ratio_c=3 | `policy_loss_fn_args.clip_range` & nothing
trinity | kl_loss_fn=corrected_k3 | `kl_loss_fn` & [0, 2]
tinker | loss_fn=dro | `beta` & nothing
tinker | loss_fn=gspo | `loss_fn` & importance_sampling
fast-llm | type=dpo | `type` & gspo
torchtitan | clip_eps=low | `clip_eps` & a number
axolotl | trl.loss_type=luspo | `loss_type` & importance_sampling_level
axolotl | use_liger_loss=true | `use_liger_loss` & liger
axolotl | loss_type=dr_grpo | `max_completion_length`
axolotl AxolotlAsyncGRPOTrainer | loss_type=vespo | `loss_type` & vespo
cross-entropy | reduction=average | `reduction` & mean, sum
cross-entropy | weight=2 | `weight` & same
cross-entropy | size_average=true | `size_average` & reduction
divergence | beta=0.5 top_k=8 | `top_k` & 8 & union
divergence | reduction=mean | `reduction` & batchmean
divergence | logits_are_probs=true | `logits_are_probs` & off
divergence | beta=2 | beta & got 2
divergence kl_div | | `reduction` & nothing & vocabulary
divergence LigerFusedLinearJSDLoss | | `weight_hard_loss` & cross-entropy
divergence LogitStrategy | alpha=0.5 | `alpha` & 0.5
divergence CombinedDistillationStrategy | alpha=1 beta_feature=0.1 | `beta_feature` & hidden
divergence compute_topk_self_distillation_loss | | `distillation_topk` & nothing
divergence _chunked_divergence_loss | student_logit_scale=2 | `student_logit_scale`
divergence _chunked_divergence_loss | teacher_final_logit_softcapping=30 | `teacher_final_logit_softcapping`
rl-kernel | beta=high | `beta` & a number
prime-rl | temperatures=given temperature=0.7 | `temperature` & 0.7
verl | temperature=given use_fused_kernels=true | `use_fused_kernels` & one
trl | temperature=given | `temperature` & a number
trl RLOOTrainer | delta=2 | `delta`
roll | train_infer_correction.filters=[1] | `train_infer_correction.filters`
roll agentic_actor_pg_worker | ratio_type=segment | `ratio_type` & packed
roll agentic_actor_pg_worker | actor_train.pg_variant=ppg | `pg_variant` & topr
areal | rl_loss_weight=0.5 | `rl_loss_weight` & two specs
areal | use_decoupled_loss=true | input `logprobs`
verl vanilla | global_batch_info.dp_size=2 | global_batch_info.batch_num_tokens & `dp_size`
"#;

#[test]
fn preset_option_not_reproduced_is_refused_by_name() {
    for line in REFUSED.lines().filter(|line| !line.is_empty()) {
        let (preset, function, pairs, parts) = columns(line);
        let error = resolve(preset, function, &pairs, &BatchInputs::default()).expect_err(line).to_string();
        for part in parts[0].split(" & ").chain([preset.name()]) {
            assert!(error.contains(part), "`{part}` not in: {error}");
        }
    }
    let rejects = "entropy_coef=0.1 use_vllm=true vllm_importance_sampling_correction=true rollout_rs=token_k2";
    let rejects: Vec<&str> = rejects.split(' ').chain(["rollout_rs_threshold=0.1"]).collect();
    let gated = ["is_correction_level=token", "is_correction_gating=tv"];
    for (preset, pairs, parts) in [
        (Preset::Unsloth, &rejects[..], ["`rollout_rs`", "would leave the entropy bonus"]),
        (Preset::OpenRlhf, &gated, ["`is_correction_threshold_low`", "0 with a divergence"]),
    ] {
        let error = resolve(preset, None, pairs, &sampled()).expect_err("refused").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// Where parts of a batch do not add up to it in the project, its preset says so, and nowhere else.
#[test]
fn preset_notes_name_means_of_micro_batches() {
    let says = |preset, pairs: &[&str], given: &BatchInputs| {
        let notes = resolve(preset, None, pairs, given).unwrap_or_else(|error| panic!("{error}")).notes;
        notes.iter().any(|note| ["micro-batch", "add up"].iter().any(|words| note.contains(words)))
    };
    let counted = BatchInputs { num_items_in_batch: Some(60.0), ..BatchInputs::default() };
    for preset in [Preset::Trl, Preset::Unsloth] {
        assert!(!says(preset, &["loss_type=grpo"], &counted), "{preset}");
        assert!(!says(preset, &["loss_type=dapo"], &counted), "{preset}");
        assert!(says(preset, &["loss_type=bnpo"], &counted), "{preset}");
        assert!(says(preset, &["loss_type=grpo", "entropy_coef=0.1"], &counted), "{preset}");
        assert!(says(preset, &["loss_type=grpo", "top_entropy_quantile=0.5"], &counted), "{preset}");
    }
    assert!(says(Preset::Liger, &[], &BatchInputs::default()) && !says(Preset::Liger, &[], &counted));
    assert!(says(Preset::Verl, &["loss_mode=geo_mean"], &counted) && !says(Preset::Verl, &[], &counted));
    assert!(says(Preset::Skyrl, &[], &counted) && !says(Preset::Skyrl, &["use_kl_loss=false"], &counted));
    assert!(says(Preset::Tunix, &[], &counted));
}

#[test]
fn preset_notes_name_differences_at_edges() {
    let notes = |preset, function, pairs: &[&str]| {
        resolve(preset, function, pairs, &sampled()).unwrap_or_else(|error| panic!("{error}")).notes.join("; ")
    };
    let bypass = ["loss_type=reinforce", "rollout_is=token", "rollout_is_threshold=0.5_2.0"]
        .map(|pair| format!("rollout_correction.{pair}"));
    let bypass: Vec<&str> = bypass.iter().map(String::as_str).collect();
    assert!(notes(Preset::Verl, Some("bypass_mode"), &bypass).contains("exactly, is kept there"));
    let corrected = notes(Preset::Nemo, None, &["use_importance_sampling_correction=true"]);
    assert!(corrected.contains("beyond the range of its dtype is 0 there"), "{corrected}");
    assert!(notes(Preset::Unsloth, None, &["rollout_logps_as_old=true"]).contains("has the ratio 1 there"));
}

#[test]
fn areal_gates_by_y_where_the_family_does_by_minus_y() {
    let gate = |pairs: &[&str]| {
        let pairs = [&["use_decoupled_loss=true"], pairs].concat();
        with(Preset::Areal, &pairs, &sampled()).rejection
    };
    let [ratio] = gate(&["rejection_sampling.upper=2", "rejection_sampling.lower=0.8"])[..] else { panic!("one gate") };
    assert_eq!((ratio.level, ratio.counts, ratio.drops_from), (RejectionLevel::Token, true, LossTerms::Policy));
    assert!((ratio.min.unwrap() + 2_f64.ln()).abs() < 1e-15 && (ratio.max + 0.8_f64.ln()).abs() < 1e-15);
    let sequence = ["rejection_sampling.level=sequence", "rejection_sampling.agg=max", "rejection_sampling.upper=2"];
    let [largest] = gate(&sequence)[..] else { panic!("one gate") };
    assert_eq!((largest.level, largest.max), (RejectionLevel::SequenceMin, 20.0));
    let [m2] = gate(&["m2_threshold=0.04"])[..] else { panic!("one gate") };
    assert_eq!((m2.level, m2.max, m2.counts), (RejectionLevel::SecondMoment, 0.04, false));
}

#[test]
fn preset_input_not_taken_is_refused() {
    let refused = |preset, function, given: &BatchInputs, part: &str| {
        let error = resolve(preset, function, &["loss_type=grpo"], given).expect_err("refused").to_string();
        assert!(error.contains(part), "{error}");
    };
    let by_token = BatchInputs { advantages: Some(AdvantageLevel::Token), ..BatchInputs::default() };
    refused(Preset::Liger, None, &by_token, "input `advantages`: got [B,T], expected [B]");
    refused(Preset::Trl, Some("GMPOTrainer"), &by_token, "input `advantages`");
    let flat = BatchInputs { rollout_weights: Some(WeightShape::Flat), ..BatchInputs::default() };
    refused(Preset::Liger, Some("ppo_loss_fn"), &flat, "input `vllm_is_ratio`: got [B]");
}
