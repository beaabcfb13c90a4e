//! What is sampled is what the loss scores, and a loss has what it reads.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::common::training::{config, run, settings, with};
use assay::implementation::{Implementation, RunError, Unavailable, Unsupported};
use assay::native::Native;
use assay::problem::{Candidate, Dtype, Problem, Shape};
use assay::spec::LossSpec;
use assay::train::disk::Disk;
use assay::train::{GrpoLoss, LossArm, NoObserver, TrainError, Trainer};
use serde_json::{Value, json};

#[test]
fn rollout_first_ratio_is_1_whatever_transforms_the_logits() {
    let folder = tempfile::tempdir().unwrap();
    for (i, loss) in [
        json!({}),
        json!({"logits": {"softcap": 2.0}}),
        json!({"logits": {"scale": 1.5}}),
        json!({"temperature": 0.7}),
        json!({"support": {"excluded_ids": [0, 33, 64]}}),
        json!({"logits": {"softcap": 4.0}, "temperature": 1.3, "support": {"vocab": 257}}),
    ]
    .into_iter()
    .enumerate()
    {
        let cache = folder.path().join(format!("warm-{i}"));
        let of_loss = json!({"loss": with(loss.clone(), json!({"entropy_coef": 0.01})), "warm_start": {"steps": 40, "cache": cache}, "update": {"micro_batches": 2}});
        let records = run(with(settings(folder.path(), &format!("{i}")), of_loss)).unwrap();
        for record in records {
            assert!(record.logp_gap > 0.0 && record.logp_gap < 1e-5, "{loss}: {record:?}");
            assert_eq!((record.clip_low, record.clip_high), (0.0, 0.0), "{loss}: {record:?}");
            assert!(record.grad_norm > 0.0, "{loss}: {record:?}");
        }
    }
}

/// The CPU kernel at a temperature 1 % off.
struct Warmer;

impl Implementation for Warmer {
    fn id(&self) -> &'static str {
        "warmer"
    }

    fn summary(&self) -> &'static str {
        "wrong on purpose"
    }

    fn class(&self) -> &'static str {
        "native"
    }

    fn available(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    fn supports(&self, _: &LossSpec, _: Shape, _: Dtype, _: usize) -> Result<(), Unsupported> {
        Ok(())
    }

    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        Native::default().run(&LossSpec { temperature: 1.01.into(), ..spec.clone() }, problem, devices)
    }
}

#[test]
fn rollout_of_another_policy_than_the_loss_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(settings(folder.path(), "out"));
    let arm = LossArm::Kernel(Box::new(GrpoLoss::by(LossSpec::default(), Arc::new(Warmer))));
    let disk = Disk::open(&config.out).unwrap();
    let mut trainer = Trainer::start(disk, config, arm, &AtomicBool::new(false)).unwrap();
    let error = trainer.advance(&mut NoObserver).unwrap_err();
    assert!(matches!(error, TrainError::OffPolicy(_)), "{error}");
    assert!(error.to_string().starts_with("step 1, part 0: the loss has log-probability "), "{error}");
}

#[test]
fn kl_penalty_is_against_the_policy_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let steps = |impl_name: &str| {
        let kl = json!({"loss": {"kl": {"beta": 0.04}}, "kernel": {"enabled": true, "impl": impl_name}, "steps": 4});
        run(with(settings(folder.path(), impl_name), kl)).unwrap()
    };
    for name in ["native", "native-lm-head"] {
        let kl: Vec<f64> = steps(name).iter().map(|record| record.kl.unwrap()).collect();
        assert!(kl[0].abs() < 1e-6, "before the first step the policy is its reference: {kl:?}");
        assert!(kl[3] > 1e-4, "{kl:?}");
    }
}

#[test]
fn rollout_sampler_of_16_bits_has_its_own_logp_to_correct() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, loss) in [
        ("bf16", json!({"rollout": {"source": "logp", "max": 2.0, "normalize": true}})),
        ("bf16", json!({"rejection": [{"estimator": "k3", "level": "sequence_mean", "max": 1e-6}]})),
        ("f16", json!({"old_logp": "rollout"})),
    ] {
        let of_16_bits = json!({"rollout": {"dtype": dtype}, "loss": loss, "update": {"micro_batches": 4}});
        let record = &run(with(settings(folder.path(), &loss.to_string()), of_16_bits)).unwrap()[0];
        assert!(record.logp_gap > 1e-5 && record.grad_norm > 0.0, "{loss}: {record:?}");
    }
}

#[test]
fn rollout_input_that_a_run_lacks_is_refused_at_its_start() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |others: Value, expected: &str| {
        let error = run(with(settings(folder.path(), "out"), others)).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}, expected {expected}");
        assert!(!folder.path().join("warm.safetensors").exists(), "{expected}");
    };
    let loss = |loss: Value| json!({"loss": loss});
    refused(loss(json!({"logits": {"bias": true}})), "`loss.logits.bias`: got true, expected false");
    refused(
        loss(json!({"temperature_divides": "logp", "temperature": 0.5})),
        "`loss.temperature_divides`: got logp, expected logits",
    );
    refused(loss(json!({"rollout": {"source": "given"}})), "`loss.rollout.source`: got given, expected logp");
    refused(loss(json!({"top_entropy": {"fraction": 0.5}})), "spec field `top_entropy`: got a choice, expected none");
    refused(
        loss(json!({"objective": {"kl_cov": {"coefficient": 1.0, "selection": {"fraction": 0.1}}}})),
        "spec field `objective.kl_cov.selection`: got a choice",
    );
    for (objective, given) in [
        (json!({"kl_cov": {"coefficient": 1.0}}), "kl_cov without a selection"),
        (json!({"clip_cov": {}}), "clip_cov without a selection"),
        (json!({"topr": {"positive": "selected"}}), "topr with `positive: selected`"),
        (json!({"aspo": {"selected": {"epsilon_low": 0.5, "epsilon_high": 0.5}}}), "aspo with `selected`"),
    ] {
        let expected = format!("`loss.objective`: got {given}, expected one that reads no `selected`");
        refused(loss(json!({"objective": objective})), &expected);
    }
    refused(loss(json!({"dentropy": true})), "`loss.dentropy`: got true, expected false");
    refused(loss(json!({"support": {"vocab": 256}})), "`loss.support`: got one without id 256");
    let kernel =
        json!({"kernel": {"enabled": true, "impl": "tile-one-pass"}, "loss": {"ratio": {"level": "sequence"}}});
    let error = run(with(settings(folder.path(), "out"), kernel)).unwrap_err().to_string();
    assert!(error.contains("ratio.level") || error.contains("plugin"), "{error}");
    assert!(!folder.path().join("warm.safetensors").exists());
}

#[test]
fn rollout_resamples_equal_groups_and_drops_endless_completions() {
    let folder = tempfile::tempdir().unwrap();
    let one =
        |name: &str, rollout: Value| run(with(settings(folder.path(), name), json!({"rollout": rollout}))).unwrap();
    let (plain, again) = (one("plain", json!({})), one("again", json!({"dynamic_sampling": {"attempts": 6}})));
    let even =
        |records: &[assay::train::metrics::StepRecord]| records.iter().map(|record| record.even_groups).sum::<usize>();
    assert!(plain.iter().all(|record| record.completions == 16));
    assert!(even(&plain) > 0 && even(&again) < even(&plain), "{plain:?} {again:?}");
    assert!(again.iter().any(|record| record.completions > 16), "{again:?}");
    let short = |name: &str, mask_truncated: bool| {
        one(name, json!({"max_new_tokens": 7, "mask_truncated": mask_truncated}))[0].clone()
    };
    let (all, ended) = (short("all", false), short("ended", true));
    assert_eq!(all.tokens_sha256, ended.tokens_sha256);
    assert!(all.truncated > 0 && ended.valid_tokens == all.valid_tokens - 7 * all.truncated, "{all:?} {ended:?}");
}
