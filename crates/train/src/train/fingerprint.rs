//! The settings and inputs that a checkpoint must have been written under to be resumed: all that changes a curve, and nothing else.
//!
//! Files count by their content, wherever they are. A setting that is at its default is left out, so that one that is added
//! later changes no fingerprint; where a default itself changes, [`FORMAT`] does.

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::TrainError;
use super::config::{Gsm8k, KernelChoice, ModelSource, Rollout, RolloutDtype, TrainConfig, TrainTask, Update};
use super::optimizer::AdamWConfig;
use super::reward::AdvantageConfig;
use super::task::LONGEST;
use crate::checkpoint::{Qwen2Config, content_hash, hash_of};
use assay_core::spec::LossSpec;

/// The version of the meaning of defaults.
const FORMAT: u32 = 1;

/// The fingerprints of a whole run and of its warm start, as JSON.
pub(super) struct Fingerprints {
    pub(super) run: String,
    pub(super) warm_start: String,
}

impl Fingerprints {
    /// Computes the fingerprints of `config`, whose input files are read.
    ///
    /// # Errors
    /// [`TrainError`] where one cannot be read.
    pub(super) fn from_config(config: &TrainConfig) -> Result<Self, TrainError> {
        let hash = |path: &Path| hash_of(path, LONGEST).map_err(TrainError::from);
        let model = match &config.model {
            ModelSource::Init(model) => differing(model, &at_defaults()),
            ModelSource::Path(path) => json!({"sha256": content_hash(path)?}),
        };
        let tokenizer = match &config.tokenizer {
            Some(file) => json!({"sha256": hash(&file.path)?, "end": file.end}),
            None => Value::Null,
        };
        let task = match &config.task {
            TrainTask::Arithmetic(task) => {
                let mut task = value(task);
                // Verbs at their default are left out, so that files from before they were a setting still match.
                prune(&mut task, &json!({"verbs": ["gets", "loses"]}));
                task
            }
            TrainTask::Gsm8k(Gsm8k { train, evaluate }) => json!({"train": hash(train)?, "evaluate": hash(evaluate)?}),
        };
        let warm_start = config.warm_start.as_ref().map(|warm_start| {
            json!({
                "steps": warm_start.steps,
                "batch": warm_start.batch,
                "learning_rate": warm_start.learning_rate,
            })
        });
        // The warm start has a learning rate of its own, and the distribution of the loss.
        let optimizer = AdamWConfig { learning_rate: 0.0, ..config.update.optimizer.clone() };
        let LossSpec { logits, support, temperature, temperature_divides, .. } = config.loss.clone();
        let distribution = LossSpec { logits, support, temperature, temperature_divides, ..LossSpec::default() };
        let shared = json!({
            "format": FORMAT,
            "seed": config.seed,
            "model": model,
            "tokenizer": tokenizer,
            "task": task,
            "warm_start": warm_start,
        });
        // Both fingerprints begin with what the warm start depends on; the run adds its own settings.
        let with = |more: Value| {
            let (mut all, Value::Object(more)) = (shared.as_object().expect("an object").clone(), more) else {
                unreachable!("an object")
            };
            all.extend(more);
            // Nor does a group of settings that is added later.
            all.retain(|_, settings| !settings.is_null() && *settings != json!({}));
            Value::Object(all).to_string()
        };
        Ok(Self {
            run: with(json!({
                "rollout": differing(&config.rollout, &required_alone()),
                "advantages": differing(&config.advantages, &AdvantageConfig::default()),
                "update": differing(&config.update, &Update::default()),
                "loss": differing(&config.loss, &LossSpec::default()),
                "kernel": differing(&config.kernel, &KernelChoice::default()),
            })),
            warm_start: with(json!({
                "optimizer": differing(&optimizer, &AdamWConfig { learning_rate: 0.0, ..AdamWConfig::default() }),
                "loss": differing(&distribution, &LossSpec::default()),
            })),
        })
    }
}

/// The extents of a policy that must be given, at what none has, and its other settings at their defaults.
fn at_defaults() -> Qwen2Config {
    let given = json!({
        "vocab_size": 0, "hidden_size": 0, "intermediate_size": 0, "num_hidden_layers": 0, "num_attention_heads": 0,
        "num_key_value_heads": 0,
    });
    serde_json::from_value(given).expect("every extent that has no default")
}

/// Removes from the settings of rollouts what equals the defaults.
fn required_alone() -> Rollout {
    Rollout {
        prompts: 0,
        group: 0,
        max_new_tokens: 0,
        dtype: RolloutDtype::default(),
        draw: 0,
        dynamic_sampling: None,
        mask_truncated: false,
    }
}

fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).expect("plain data")
}

/// Returns the entries of `settings` that differ from `defaults`.
fn differing<T: Serialize>(settings: &T, defaults: &T) -> Value {
    let mut settings = value(settings);
    prune(&mut settings, &value(defaults));
    settings
}

fn prune(settings: &mut Value, defaults: &Value) {
    let (Value::Object(settings), Value::Object(defaults)) = (settings, defaults) else { return };
    // A group of settings that is empty after pruning is left out as a whole.
    let kept = std::mem::take(settings).into_iter().filter_map(|(name, mut value)| {
        let default = defaults.get(&name).unwrap_or(&Value::Null);
        prune(&mut value, default);
        let nothing = value == *default || (default.is_object() && value == Value::Object(Map::new()));
        (!nothing).then_some((name, value))
    });
    *settings = kept.collect();
}

/// Names the settings in which two fingerprints differ.
pub(super) fn differences(one: &str, other: &str) -> String {
    let [one, other]: [Map<String, Value>; 2] = [one, other].map(|text| serde_json::from_str(text).unwrap_or_default());
    let mut names: Vec<&String> = one.keys().chain(other.keys()).collect();
    names.sort();
    names.dedup();
    let differ = names.into_iter().filter(|name| one.get(*name) != other.get(*name)).map(|name| format!("`{name}`"));
    differ.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: Value) -> TrainConfig {
        serde_json::from_value(text).unwrap()
    }

    fn settings() -> Value {
        json!({
            "steps": 3,
            "out": "out",
            "model": {"init": {
                "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_key_value_heads": 1,
            }},
            "task": {"arithmetic": {"train": 32, "evaluate": 4, "largest": 5}},
            "rollout": {"prompts": 2, "group": 4, "max_new_tokens": 8},
        })
    }

    #[test]
    fn fingerprint_of_a_spelled_out_default_is_the_same() {
        let plain = Fingerprints::from_config(&config(settings())).unwrap().run;
        let mut said = settings();
        said["update"] = json!({"ppo_epochs": 1, "optimizer": {"beta1": 0.9}});
        said["loss"] = json!({"temperature": 1.0, "objective": {"ppo_clip": {"epsilon_low": 0.2}}});
        said["rollout"]["dtype"] = json!("f32");
        said["kernel"] = json!({"enabled": true});
        said["task"]["arithmetic"]["verbs"] = json!(["gets", "loses"]);
        said["model"]["init"]["rope_theta"] = json!(10_000.0);
        for (name, free) in
            [("threads", json!(3)), ("steps", json!(9)), ("evaluate_every", json!(1)), ("out", json!("b"))]
        {
            said[name] = free;
        }
        assert_eq!(Fingerprints::from_config(&config(said)).unwrap().run, plain);
        assert!(!plain.contains("beta1") && !plain.contains("null"), "{plain}");
    }

    #[test]
    fn fingerprint_changes_with_what_changes_a_curve() {
        let plain = Fingerprints::from_config(&config(settings())).unwrap();
        for (name, key, other) in [
            ("update", "ppo_epochs", json!(2)),
            ("loss", "temperature", json!(0.5)),
            ("rollout", "group", json!(2)),
            ("advantages", "deviation", json!("sample")),
        ] {
            let mut changed = settings();
            changed[name][key] = other;
            let changed = Fingerprints::from_config(&config(changed)).unwrap();
            assert_eq!(differences(&plain.run, &changed.run), format!("`{name}`"));
            // The warm start is one of the distribution alone.
            assert_eq!(plain.warm_start == changed.warm_start, name != "loss", "{name}");
        }
    }

    /// Another folder with the same files is the same, and the same folder with others is not.
    #[test]
    fn fingerprint_of_files_is_of_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let of = |model: &str| {
            let mut text = settings();
            text["model"] = json!({"path": folder.path().join(model)});
            Fingerprints::from_config(&config(text)).unwrap().run
        };
        for model in ["a", "b"] {
            write(&format!("{model}/config.json"), "{}");
            write(&format!("{model}/model.safetensors"), "\x02\0\0\0\0\0\0\0{}");
        }
        let before = of("a");
        assert_eq!(of("b"), before);
        write("a/model.safetensors", "\x03\0\0\0\0\0\0\0{ }");
        assert_eq!(differences(&of("a"), &before), "`model`");
    }
}
