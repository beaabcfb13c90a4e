//! The specs that presets resolve from a project's defaults and options, and the options that they refuse. The numbers themselves
//! are compared with recorded runs in `peers.rs`.

use assay_core::spec::presets::{BatchInputs, Preset, PresetError, PresetLoss, PresetOptions, WeightShape, spec};
use assay_core::spec::{
    AdvantageLevel, Averaging, Cispo, ClipWidths, Divergence, DroppedTerm, Kl, KlEstimator, KlGradient, KlImportance,
    LossSpec, LossTerms, Objective, OldLogp, OutOfBounds, PpoClip, QuantilePrecision, RatioLevel, Reduction,
    RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource, Rows, Temperature, TemperatureDivides,
    UnscoredWeight,
};

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

/// Refused, and the message says all of `parts`.
#[track_caller]
fn refuses(preset: Preset, function: Option<&str>, pairs: &[&str], parts: &[&str]) {
    let error = resolve(preset, function, pairs, &BatchInputs::default()).expect_err("refused").to_string();
    for part in [&[preset.name()], parts].concat() {
        assert!(error.contains(part), "`{part}` not in: {error}");
    }
}

fn clip(epsilon_low: f64, epsilon_high: f64) -> Objective {
    Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, ..PpoClip::default() })
}

fn dual(epsilon_low: f64, epsilon_high: f64, c: f64) -> Objective {
    Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, dual_clip: Some(c), delta: None })
}

/// Old, reference and sampler's log-probabilities.
fn sampled() -> BatchInputs {
    BatchInputs { sampling_logps: true, ..BatchInputs::default() }
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

/// A function under the options that it cannot do without.
fn of_any(preset: Preset, function: &str) -> Result<PresetLoss, PresetError> {
    let pairs: &[&str] = match function {
        "compute_policy_loss_dro" => &["dro_beta=0.1"],
        _ => &[],
    };
    resolve(preset, Some(function), pairs, &sampled())
}

#[test]
fn preset_defaults_are_those_of_each_project() {
    let trl = of(Preset::Trl, None, &[]);
    assert_eq!(trl, LossSpec::default());

    let verl = of(Preset::Verl, None, &[]);
    assert_eq!((verl.objective, verl.ratio.clamp), (dual(0.2, 0.2, 3.0), Some(20.0)));
    assert_eq!((verl.advantages, verl.reduction), (AdvantageLevel::Token, Reduction::TokenMean));
    assert!(verl.kl.is_none());

    let tunix = of(Preset::Tunix, None, &[]);
    assert_eq!(tunix.kl, Some(Kl::plain(0.04, KlEstimator::K1)));
    assert_eq!(tunix.reduction, Reduction::SequenceMean { rows: Rows::NonEmpty });

    let liger = of(Preset::Liger, None, &[]);
    assert_eq!((liger.kl, liger.temperature), (Some(Kl::plain(0.04, KlEstimator::K3)), 1.0.into()));
    let triton = of(Preset::Liger, Some("triton_grpo_loss"), &[]);
    assert_eq!((triton.objective, triton.temperature), (clip(0.2, 0.4), 0.9.into()));

    let mllm = of(Preset::MllmJax, None, &["temperature=0.7"]);
    assert_eq!((mllm.temperature, mllm.temperature_divides), (0.7.into(), TemperatureDivides::Logp));

    let nemo = of(Preset::Nemo, None, &[]);
    let kl = nemo.kl.unwrap();
    assert_eq!((kl.beta, kl.importance, kl.difference_clamp), (0.01, KlImportance::Score, Some(20.0)));

    for (preset, option) in [(Preset::Verl, "temperature=given"), (Preset::PrimeRl, "temperatures=given")] {
        assert_eq!(of(preset, None, &[option]).temperature, Temperature::Given);
    }
    let prime = of(Preset::PrimeRl, None, &[]);
    let Objective::TrustRegion(region) = prime.objective else { panic!("{:?}", prime.objective) };
    assert_eq!((region.low, region.high, region.penalty, region.truncate), (0.2, 0.2, 1e-3, None));

    let skyrl = of(Preset::Skyrl, None, &[]).kl.unwrap();
    let rows = Reduction::SequenceMean { rows: Rows::All };
    assert_eq!(skyrl.averaging, Some(Averaging { reduction: rows, denominator_epsilon: 0.0 }));

    assert_eq!(of(Preset::Unsloth, None, &[]).reduction, Reduction::SequenceMean { rows: Rows::All });
    assert_eq!(of(Preset::OpenRlhf, None, &[]).ratio.clamp, Some(20.0));
}

#[test]
fn trl_spreads_a_loss_over_accumulation_steps() {
    let steps = ["gradient_accumulation_steps=2", "steps_per_generation=4", "entropy_coef=0.02"];
    let grpo = of(Preset::Trl, None, &[&["loss_type=grpo"], &steps[..]].concat());
    assert_eq!((grpo.scale, grpo.entropy_coef), (0.5, 0.02));
    let eval = of(Preset::Trl, None, &[&["loss_type=grpo", "mode=eval"], &steps[..]].concat());
    assert_eq!((eval.scale, eval.entropy_coef), (1.0, 0.02));

    let given = BatchInputs { num_items_in_batch: Some(60.0), ..BatchInputs::default() };
    let dapo = with(Preset::Trl, &[&["num_processes=3"], &steps[..]].concat(), &given);
    assert_eq!((dapo.reduction, dapo.scale), (Reduction::Normalizer(10.0), 1.0));
    assert_eq!(dapo.entropy_coef, 0.01, "the bonus is divided by the steps, whatever the loss is divided by");
}

#[test]
fn trl_epsilon_high_of_null_and_of_cispo() {
    assert_eq!(of(Preset::Trl, None, &["epsilon=0.1", "epsilon_high=null"]).objective, clip(0.1, 0.1));
    let cispo = |upper| Objective::Cispo(Cispo { lower: None, upper });
    assert_eq!(of(Preset::Trl, None, &["loss_type=cispo", "epsilon_high=5"]).objective, cispo(5.0));
    assert_eq!(of(Preset::Trl, None, &["loss_type=cispo"]).objective, cispo(0.2));
    let verl = of(Preset::Verl, Some("cispo"), &["clip_ratio_high=0.28"]).objective;
    assert_eq!(verl, Objective::Cispo(Cispo { lower: Some(0.8), upper: 1.28 }));
}

#[test]
fn trl_inputs_decide_what_is_read() {
    let none = BatchInputs { old_logps: false, ..BatchInputs::default() };
    assert_eq!(with(Preset::Trl, &[], &none).old_logp, OldLogp::Current);
    let mask = |given: &BatchInputs| with(Preset::Trl, &["off_policy_mask_threshold=0.1"], given).off_policy_mask;
    assert_eq!(mask(&BatchInputs::default()).unwrap().behaviour, OldLogp::Given);
    assert_eq!(mask(&sampled()).unwrap().behaviour, OldLogp::Rollout);
    assert_eq!(mask(&none), None, "the divergence from the policy itself is 0");

    let ready = BatchInputs { rollout_weights: Some(WeightShape::Sequence), ..BatchInputs::default() };
    let weights = with(Preset::Trl, &["use_vllm=true"], &ready).rollout.unwrap();
    assert_eq!((weights.source, weights.applies_to), (RolloutSource::Given, LossTerms::Policy));
    let unused = resolve(Preset::Trl, None, &[], &ready).unwrap();
    assert!(unused.spec.rollout.is_none() && unused.notes.iter().any(|note| note.contains("importance weights")));

    let made = with(Preset::Trl, &["use_vllm=true"], &sampled()).rollout.unwrap();
    let expected = (RolloutSource::Logp, RolloutLevel::Sequence, OutOfBounds::Mask, Some(3.0));
    assert_eq!((made.source, made.level, made.outside, made.max), expected);

    let vespo = with(Preset::Trl, &["loss_type=vespo"], &ready);
    assert!(vespo.rollout.is_some(), "VESPO reads the array whether vLLM is used or not");
    let Objective::Vespo(vespo) = vespo.objective else { panic!("vespo") };
    assert!(vespo.weights_of_masked_tokens);
}

#[test]
fn trl_kl_is_corrected_and_beta_0_leaves_it_out() {
    assert!(of(Preset::Trl, None, &[]).kl.is_none());
    assert_eq!(of(Preset::Trl, None, &["beta=0.1"]).kl.unwrap().importance, KlImportance::Ratio);
    let plain = of(Preset::Trl, None, &["beta=0.1", "use_bias_correction_kl=False"]);
    assert_eq!(plain.kl, Some(Kl::plain(0.1, KlEstimator::K3)));
}

#[test]
fn trl_head_and_entropy_quantile() {
    let spec = of(
        Preset::Trl,
        None,
        &["fused_lm_head={\"chunk_size\": 16, \"final_logit_softcapping\": 3, \"logit_scale\": 0.5}"],
    );
    assert_eq!((spec.logits.scale, spec.logits.softcap), (0.5, Some(3.0)));
    let pairs = ["top_entropy_quantile=0.4"];
    let top = of(Preset::Trl, None, &pairs).top_entropy.unwrap();
    assert_eq!((top.fraction, top.drops, top.precision), (0.4, DroppedTerm::PolicyTerm, QuantilePrecision::F32));
    let f64_run = BatchInputs { float64: true, ..BatchInputs::default() };
    assert_eq!(with(Preset::Trl, &pairs, &f64_run).top_entropy.unwrap().precision, QuantilePrecision::F32Threshold);
    assert_eq!(of(Preset::Trl, Some("GMPOTrainer"), &pairs).top_entropy.unwrap().drops, DroppedTerm::Ratio);
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

#[test]
fn verl_clip_widths_hide_clip_ratio_unless_null() {
    assert_eq!(of(Preset::Verl, None, &["clip_ratio=0.4"]).objective, dual(0.2, 0.2, 3.0));
    let null = ["clip_ratio=0.4", "clip_ratio_low=null", "clip_ratio_high=None"];
    assert_eq!(of(Preset::Verl, None, &null).objective, dual(0.4, 0.4, 3.0));
}

#[test]
fn verl_functions_differ_in_reduction_and_clamp() {
    let epsilon = |function, pairs: &[&str]| of(Preset::Verl, Some(function), pairs).denominator_epsilon;
    let gspo = of(Preset::Verl, Some("gspo"), &[]);
    assert_eq!((gspo.ratio.level, gspo.ratio.cap, gspo.ratio.clamp), (RatioLevel::SequenceToken, Some(10.0), None));
    assert_eq!((gspo.ratio.denominator_epsilon, gspo.denominator_epsilon), (0.0, 1e-8));
    assert_eq!(gspo.objective, clip(0.2, 0.2), "no dual clip");
    assert_eq!(epsilon("gspo", &["loss_agg_mode=token-mean"]), 0.0);
    assert_eq!(epsilon("sapo", &["loss_agg_mode=token-mean"]), 1e-8, "SAPO has a mode of its own");
    let sum = of(Preset::Verl, Some("reinforce"), &[]).reduction;
    assert_eq!(sum, Reduction::SequenceSum { rows: Rows::NonEmpty });
    let geo = of(Preset::Verl, Some("geo_mean"), &["loss_agg_mode=token-sum"]);
    assert_eq!(geo.reduction, Reduction::SequenceMean { rows: Rows::All });
    let Objective::TrustRegion(dppo) = of(Preset::Verl, Some("dppo_kl"), &[]).objective else { panic!("dppo") };
    assert_eq!((dppo.divergence, dppo.truncate), (Divergence::BinaryKl, Some(3.0)));
}

#[test]
fn verl_terms_of_sapo_are_averaged_apart() {
    let pairs = ["loss_mode=sapo", "use_kl_loss=true", "entropy_coeff=0.01", "kl_loss_type=k3+"];
    let spec = of(Preset::Verl, None, &pairs);
    let tokens = Some(Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 });
    let kl = spec.kl.unwrap();
    assert_eq!((kl.averaging, spec.entropy_averaging), (tokens, tokens));
    assert_eq!((kl.gradient, kl.value_clamp), (KlGradient::K2, Some(10.0)));
    assert_eq!(spec.reduction, Reduction::SequenceMean { rows: Rows::NonEmpty });
}

#[test]
fn verl_global_batch_is_divided_among_ranks() {
    let info = ["global_batch_info.dp_size=2", "global_batch_info.batch_num_tokens=50"];
    assert_eq!(of(Preset::Verl, Some("vanilla"), &info).reduction, Reduction::Normalizer(25.0));
    refuses(Preset::Verl, Some("vanilla"), &info[..1], &["global_batch_info.batch_num_tokens", "`dp_size`"]);
    let pairs = ["loss_agg_mode=seq-mean-token-sum-norm", "data={\"dp_size\": 2, \"global_batch_size\": 9}"];
    let spec = of(Preset::Verl, None, &[&pairs[..], &["loss_scale_factor=32"]].concat());
    assert_eq!(spec.reduction, Reduction::FixedLength { rows: Rows::Given(4.5), length: Some(32) });
}

#[test]
fn verl_rollout_correction_is_made_of_both_logps() {
    let pairs = [
        "rollout_correction.rollout_is=token",
        "rollout_correction.rollout_is_threshold=0.5_5.0",
        "rollout_correction.rollout_rs=token_k1,seq_max_k3",
        "rollout_correction.rollout_rs_threshold=2,0.1",
    ];
    let spec = with(Preset::Verl, &pairs, &sampled());
    let weights = spec.rollout.unwrap();
    assert_eq!((weights.outside, weights.min, weights.max), (OutOfBounds::Mask, Some(0.5), Some(5.0)));
    let levels: Vec<_> = spec.rejection.iter().map(|rejection| (rejection.level, rejection.counts)).collect();
    assert_eq!(levels, [(RejectionLevel::Token, false), (RejectionLevel::SequenceMax, false)]);
    assert_eq!((spec.rejection[0].min, spec.rejection[0].max), (Some(0.5_f64.ln()), 2_f64.ln()));
}

#[test]
fn tunix_temperature_0_and_missing_reference() {
    assert_eq!(of(Preset::Tunix, None, &["temperature=0"]).temperature, 1.0.into());
    let none = BatchInputs { ref_logps: false, ..BatchInputs::default() };
    let resolved = resolve(Preset::Tunix, None, &[], &none).unwrap();
    assert!(resolved.spec.kl.is_none() && !resolved.notes.is_empty());
    let ppo = of(Preset::Tunix, Some("ppo_policy_loss_fn"), &["kl_coef=0.1", "entropy_coef=0.01"]);
    let mean = Some(Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 1e-8 });
    assert_eq!((ppo.denominator_epsilon, ppo.entropy_averaging), (1e-8, mean));
    assert_eq!(ppo.kl, Some(Kl::plain(0.1, KlEstimator::K1)));
}

#[test]
fn unsloth_clamps_kl_late_and_counts_rejected_tokens() {
    let pairs = [
        "beta=0.1",
        "use_vllm=true",
        "vllm_importance_sampling_correction=true",
        "rollout_rs=token_k2",
        "rollout_rs_threshold=0.1",
    ];
    let geometric = "vllm_importance_sampling_mode=geometric_truncate";
    let spec = with(Preset::Unsloth, &[&pairs[..], &[geometric]].concat(), &sampled());
    assert!(spec.kl.unwrap().clamp_after_importance);
    assert_eq!(spec.rollout.unwrap().level, RolloutLevel::Geometric);
    assert!(spec.rejection[0].counts && spec.rejection[0].drops_from == LossTerms::PolicyAndKl);
}

#[test]
fn unsloth_entropy_bonus_and_support() {
    let steps = ["entropy_coef=0.02", "current_gradient_accumulation_steps=4"];
    let bonus = |pairs: &[&str]| {
        let spec = of(Preset::Unsloth, None, &[&steps[..], pairs].concat());
        (spec.entropy_coef * spec.scale, spec.entropy_averaging)
    };
    for loss_type in ["loss_type=grpo", "loss_type=dapo"] {
        assert_eq!(bonus(&[loss_type]), (0.005, None), "{loss_type}: divided by the steps, whatever the loss is");
    }
    assert_eq!(bonus(&["use_adaptive_entropy=true"]), (0.0, None));
    let support = of(Preset::Unsloth, None, &["support_excluded_ids=[3,5]", "support_top_p=1.0"]).support;
    assert_eq!((support.excluded_ids, support.keep_sampled), (vec![3, 5], true));
    refuses(Preset::Unsloth, None, &["support_top_k=20"], &["`support_top_k`", "20", "logits"]);
    refuses(Preset::Unsloth, None, &["support_top_p=0.9"], &["`support_top_p`", "0.9"]);
    refuses(Preset::Unsloth, None, &["support_excluded_ids=[-1]"], &["`support_excluded_ids`", "[-1]", "a list"]);

    let rejects = ["entropy_coef=0.1", "use_vllm=true", "vllm_importance_sampling_correction=true"];
    let rejects = [&rejects[..], &["rollout_rs=token_k2", "rollout_rs_threshold=0.1"]].concat();
    let error = resolve(Preset::Unsloth, None, &rejects, &sampled()).expect_err("refused").to_string();
    assert!(error.contains("`rollout_rs`") && error.contains("would leave the entropy bonus"), "{error}");
}

#[test]
fn trl_async_clips_against_the_sampler() {
    let given = BatchInputs { num_items_in_batch: Some(60.0), ..sampled() };
    let pairs = ["epsilon_high=0.28", "gradient_accumulation_steps=2", "num_processes=3"];
    let resolved = resolve(Preset::Trl, Some("AsyncGRPOTrainer"), &pairs, &given).unwrap();
    let LossSpec { objective, old_logp, reduction, scale, advantages, .. } = resolved.spec;
    assert_eq!((objective, old_logp), (clip(0.2, 0.28), OldLogp::Rollout));
    assert_eq!((reduction, scale, advantages), (Reduction::Normalizer(20.0), 0.5, AdvantageLevel::Token));
    assert!(resolved.notes.iter().any(|note| note.contains("micro-batches")), "{:?}", resolved.notes);
    refuses(Preset::Trl, Some("AsyncGRPOTrainer"), &[], &["input `old_log_probs`"]);
}

#[test]
fn token_weights_replace_the_reduction() {
    let given = BatchInputs { token_weights: true, ..BatchInputs::default() };
    let pairs = ["entropy_coef=0.02", "current_gradient_accumulation_steps=2", "steps_per_generation=4"];
    let unsloth = with(Preset::Unsloth, &pairs, &given);
    assert_eq!(unsloth.token_weights.unwrap().applies_to, LossTerms::PolicyAndKl);
    assert_eq!((unsloth.reduction, unsloth.scale), (Reduction::Normalizer(0.5), 1.0));
    assert_eq!(unsloth.entropy_coef, 0.01);
    let skyrl = resolve(Preset::Skyrl, None, &["loss_reduction=prompt_mean"], &BatchInputs::default()).unwrap();
    assert_eq!(skyrl.spec.token_weights.unwrap().applies_to, LossTerms::Policy);
    assert_eq!(skyrl.spec.reduction, Reduction::Normalizer(1.0));
    assert!(skyrl.notes.iter().any(|note| note.contains("1/(P·Σ n)")), "{:?}", skyrl.notes);
    let prime = with(Preset::PrimeRl, &[], &given);
    assert_eq!(prime.token_weights.unwrap().applies_to, LossTerms::Policy);
    let unread = resolve(Preset::Trl, None, &[], &given).unwrap();
    assert!(unread.notes.iter().any(|note| note.contains("token weights")), "{:?}", unread.notes);
}

#[test]
fn rejection_is_that_of_each_project() {
    let gate = ["is_correction_level=seq", "is_correction_gating=binary_kl", "is_correction_threshold_low=0"];
    let pairs = [&gate[..], &["is_correction_threshold_high=0.01"]].concat();
    let openrlhf = with(Preset::OpenRlhf, &pairs, &sampled());
    let weights = openrlhf.rollout.unwrap();
    assert_eq!((weights.level, weights.min, weights.max), (RolloutLevel::Token, None, None));
    let gate = openrlhf.rejection[0];
    assert_eq!((gate.estimator, gate.level), (RejectionEstimator::BinaryKl, RejectionLevel::SequenceMean));
    assert!(gate.counts && gate.drops_from == LossTerms::Policy && gate.max == 0.01);
    let low = resolve(Preset::OpenRlhf, None, &["is_correction_level=token", "is_correction_gating=tv"], &sampled());
    assert!(low.unwrap_err().to_string().contains("`is_correction_threshold_low`"));

    let nemo = with(Preset::Nemo, &["seq_logprob_error_threshold=1.5"], &sampled()).rejection[0];
    assert_eq!((nemo.estimator, nemo.level), (RejectionEstimator::AbsoluteRatio, RejectionLevel::SequenceMean));
    assert!(!nemo.counts && nemo.max == 1.5);
    let corrected = with(Preset::Nemo, &["use_importance_sampling_correction=true"], &sampled()).rollout.unwrap();
    assert_eq!(corrected.unscored, UnscoredWeight::Zero);

    let outliers =
        ["low=1e-4", "high=100"].map(|pair| format!("off_policy_correction.outlier_token_is_threshold_{pair}"));
    let skyrl = with(Preset::Skyrl, &outliers.each_ref().map(String::as_str), &sampled()).rejection;
    let found: Vec<_> = skyrl.iter().map(|rejection| (rejection.level, rejection.min, rejection.max)).collect();
    let [low, high] = [1e-4_f64, 100.0].map(|bound| -bound.ln());
    assert_eq!(found, [(RejectionLevel::SequenceMax, None, low), (RejectionLevel::SequenceMin, Some(high), 20.0)]);
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
fn kl_is_weighed_as_each_project_does() {
    let openrlhf = of(Preset::OpenRlhf, None, &["kl.use_loss=true", "kl.unbiased_gradient=true"]).kl.unwrap();
    assert_eq!((openrlhf.estimator, openrlhf.gradient), (KlEstimator::K1, KlGradient::K2Weighted(10.0)));
    let nemo = with(Preset::Nemo, &["use_on_policy_kl_approximation=true"], &sampled()).kl.unwrap();
    assert_eq!((nemo.importance, nemo.clamp_after_importance), (KlImportance::Rollout, true));
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
fn skyrl_rejections_spare_the_kl_term() {
    let pairs = ["off_policy_correction.sequence_mask_metric=product"];
    let rejection = with(Preset::Skyrl, &pairs, &sampled()).rejection[0];
    assert_eq!((rejection.level, rejection.drops_from), (RejectionLevel::SequenceSum, LossTerms::Policy));
    assert!((rejection.max - 2_f64.ln()).abs() < 1e-15 && rejection.counts);
}

#[test]
fn archer_clips_the_tokens_of_its_mask_nearer() {
    let widths = |pairs: &[&str]| match of(Preset::Archer, None, pairs).objective {
        Objective::Aspo(aspo) => (aspo.epsilon_low, aspo.epsilon_high, aspo.selected),
        other => panic!("{other:?}"),
    };
    assert_eq!(widths(&[]), (0.4, 0.4, Some(ClipWidths { epsilon_low: 0.2, epsilon_high: 0.2 })));
    let alike = ["negative_high_entropy_clip_ratio_low=0.2", "positive_high_entropy_clip_ratio_high=0.2"];
    assert_eq!(widths(&alike), (0.2, 0.2, None));
}

#[test]
fn prime_rl_scales_the_advantages_by_scaling_the_loss() {
    let spec = of(Preset::PrimeRl, Some("ipo_loss_fn"), &["adv_tau=0.5", "kl_tau=0.1", "rl_scale=40"]);
    let Objective::TrustRegion(region) = spec.objective else { panic!("a trust region") };
    assert_eq!((spec.scale, region.penalty, region.two_sided), (0.5, 0.2, true));
    assert_eq!(spec.reduction, Reduction::Normalizer(40.0));
}

#[test]
fn sequence_product_is_that_of_rloo_and_bypass_mode() {
    let rloo = of(Preset::Trl, Some("RLOOTrainer"), &["beta=0.05", "epsilon_high=0.3"]);
    assert_eq!((rloo.ratio.level, rloo.ratio.clamp), (RatioLevel::SequenceProduct, None));
    assert_eq!((rloo.kl, rloo.reduction), (None, Reduction::SequenceMean { rows: Rows::All }));
    let bypass = |pairs: &[&str]| {
        let pairs: Vec<String> = pairs.iter().map(|pair| format!("rollout_correction.{pair}")).collect();
        let pairs: Vec<&str> = pairs.iter().map(String::as_str).collect();
        of(Preset::Verl, Some("bypass_mode"), &pairs)
    };
    let usual = bypass(&["loss_type=reinforce"]);
    assert_eq!((usual.ratio.level, usual.ratio.clamp), (RatioLevel::SequenceProduct, Some(20.0)));
    assert_eq!(usual.objective, Objective::Cispo(Cispo { lower: None, upper: 2.0 }));
    assert_eq!(bypass(&["loss_type=reinforce", "rollout_is=token"]).ratio.level, RatioLevel::Token);
    assert_eq!(bypass(&["loss_type=reinforce", "rollout_is=null"]).objective, Objective::PolicyGradient);
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
    // Of one policy there is nothing to gate.
    assert_eq!(with(Preset::Areal, &["m2_threshold=0.04"], &sampled()).rejection, []);
}

#[test]
fn preset_option_not_reproduced_is_refused_by_name() {
    refuses(Preset::Trl, None, &["use_adaptive_entropy=true"], &["`use_adaptive_entropy`", "true", "off"]);
    refuses(Preset::Trl, None, &["router_aux_loss_coef=0.1"], &["`router_aux_loss_coef`", "0.1"]);
    refuses(Preset::Trl, None, &["loss_type=grpo", "nonsense=1"], &["`nonsense`", "loss_type"]);
    refuses(Preset::Trl, None, &["epsilon=high"], &["`epsilon`", "\"high\"", "a number"]);
    refuses(Preset::Trl, None, &["importance_sampling_level=word"], &["`importance_sampling_level`", "sequence"]);
    refuses(Preset::Trl, None, &["gradient_accumulation_steps=0"], &["`gradient_accumulation_steps`", "got 0"]);
    refuses(Preset::Trl, None, &["temperature=0"], &["temperature", "got 0"]);
    refuses(Preset::Verl, None, &["loss_mode=mystery"], &["`loss_mode`", "geo_mean"]);
    refuses(Preset::Verl, Some("dro"), &[], &["`dro_beta`", "nothing"]);
    refuses(Preset::Verl, Some("kl_penalty"), &["kl_penalty=full"], &["`kl_penalty`", "\"full\"", "low_var_kl"]);
    refuses(
        Preset::Verl,
        Some("bypass_mode"),
        &["rollout_correction.rollout_rs=token_k1"],
        &["`rollout_correction.rollout_rs`"],
    );
    refuses(Preset::Tunix, None, &["loss_agg_mode=mean"], &["`loss_agg_mode`", "token-mean"]);
    refuses(
        Preset::Liger,
        None,
        &["loss_type=cispo", "importance_sampling_level=sequence"],
        &["`importance_sampling_level`"],
    );
    refuses(Preset::Liger, None, &["loss_type=dr_grpo"], &["`max_completion_length`"]);
    refuses(Preset::Liger, Some("triton_grpo_loss"), &["loss_type=sapo", "delta=2"], &["`delta`"]);
    refuses(Preset::MllmJax, None, &["compute_dtype=bf16"], &["`compute_dtype`", "f32"]);
    refuses(Preset::Unsloth, None, &["rollout_logps_as_old=true"], &["sampling_per_token_logps"]);
    refuses(Preset::Skyrl, None, &["loss_reduction=token_mean_legacy"], &["`loss_reduction`", "how the batch is cut"]);
    refuses(Preset::Nemo, None, &["positive_example_nll_weight=0.1"], &["`positive_example_nll_weight`", "rewards"]);
    refuses(Preset::Nemo, None, &["use_on_policy_kl_approximation=true"], &["input `generation_logprobs`"]);
    refuses(Preset::PrimeRl, None, &["adv_tau=0"], &["`adv_tau`"]);
    refuses(Preset::PrimeRl, None, &["temperatures=given", "temperature=0.7"], &["`temperature`", "0.7"]);
    refuses(Preset::Verl, None, &["temperature=given", "use_fused_kernels=true"], &["`use_fused_kernels`", "one"]);
    refuses(Preset::Trl, None, &["temperature=given"], &["`temperature`", "a number"]);
    refuses(Preset::Trl, Some("RLOOTrainer"), &["delta=2"], &["`delta`"]);
    refuses(Preset::Roll, None, &["train_infer_correction.filters=[1]"], &["`train_infer_correction.filters`"]);
    refuses(Preset::Roll, Some("agentic_actor_pg_worker"), &["ratio_type=segment"], &["`ratio_type`", "packed"]);
    refuses(Preset::Roll, Some("agentic_actor_pg_worker"), &["actor_train.pg_variant=ppg"], &["`pg_variant`", "topr"]);
    refuses(Preset::Areal, None, &["rl_loss_weight=0.5"], &["`rl_loss_weight`", "two specs"]);
    refuses(Preset::Areal, None, &["use_decoupled_loss=true"], &["input `logprobs`"]);
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
