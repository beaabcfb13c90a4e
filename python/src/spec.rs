//! [`Spec`]: a loss, as a published project, a file or its own fields have it.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyType;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error;
use assay::config::read_spec;
use assay::spec::presets::{self, BatchInputs, Preset, PresetError, PresetOptions, WeightShape};
use assay::spec::{AdvantageLevel, LossSpec};
use assay::text::{ForeignText, nearest};

/// One GRPO loss, in full.
#[pyclass(frozen, module = "assay", eq, from_py_object)]
#[derive(Clone)]
pub(crate) struct Spec {
    pub(crate) loss: Arc<LossSpec>,
    /// The project and its function.
    name: Option<String>,
    /// The project and its options, `name=value`.
    pub(crate) project: Option<(Preset, Vec<String>)>,
    /// The notes on how the project's options were read.
    notes: Vec<String>,
}

impl PartialEq for Spec {
    /// Compares the losses, not where they came from.
    fn eq(&self, other: &Self) -> bool {
        self.loss == other.loss
    }
}

impl Spec {
    pub(crate) fn from_loss(loss: LossSpec) -> Self {
        Self { loss: Arc::new(loss), name: None, project: None, notes: Vec::new() }
    }

    /// Returns the loss for a batch that is padded to `width`, whatever the width of the batch that it is computed for.
    pub(crate) fn with_width(&self, width: usize) -> Self {
        Self { loss: Arc::new((*self.loss).clone().with_width(width)), ..self.clone() }
    }

    /// Returns the spec as JSON text.
    pub(crate) fn json(&self) -> String {
        serde_json::to_string(&*self.loss).expect("plain data has a JSON form")
    }
}

#[pymethods]
impl Spec {
    /// Describes the loss in words.
    fn describe(&self) -> String {
        let notes = self.notes.iter().map(|note| format!("\nnote: {note}"));
        self.loss.describe() + &notes.collect::<String>()
    }

    /// Every field, as a file that `assay.spec(path)` and `assay judge --spec` read.
    #[getter]
    fn yaml(&self, py: Python<'_>) -> PyResult<String> {
        serde_saphyr::to_string(&*self.loss).map_err(|reason| error::spec_error(py, reason))
    }

    /// Returns every field as JSON text.
    fn to_json(&self) -> String {
        self.json()
    }

    /// The spec as JSON text, in an attribute, for tracers that cannot follow a call.
    #[getter]
    fn _json(&self) -> String {
        self.json()
    }

    /// Every field, as plain data.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        plain_data(py, &self.json())
    }

    fn __repr__(&self) -> String {
        let name = self.name.as_ref().map_or(String::new(), |name| format!("{name}: "));
        format!("<assay.Spec {name}{}>", self.loss.describe().lines().next().unwrap_or_default())
    }

    #[classmethod]
    fn _of_json(class: &Bound<'_, PyType>, json: &str) -> PyResult<Self> {
        serde_json::from_str(json).map(Self::from_loss).map_err(|reason| error::spec_error(class.py(), reason))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().getattr("_of_json")?, (slf.get().json(),)))
    }
}

/// JSON as Python's own dicts, lists and numbers.
pub(crate) fn plain_data<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (json,))
}

/// The optional inputs that a batch has, for projects that choose their loss by them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(clippy::struct_excessive_bools, reason = "each says whether one input is there")]
struct DeclaredInputs {
    old_logps: bool,
    ref_logps: bool,
    sampling_logps: bool,
    rollout_weights: Option<Level>,
    token_weights: bool,
    kept_ids: bool,
    num_items_in_batch: Option<f64>,
    advantages: Option<Level>,
    float64: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Token,
    Sequence,
}

impl Default for DeclaredInputs {
    fn default() -> Self {
        Self {
            old_logps: true,
            ref_logps: true,
            sampling_logps: false,
            rollout_weights: None,
            token_weights: false,
            kept_ids: false,
            num_items_in_batch: None,
            advantages: None,
            float64: false,
        }
    }
}

impl From<DeclaredInputs> for BatchInputs {
    fn from(inputs: DeclaredInputs) -> Self {
        let shape = |level| match level {
            Level::Token => WeightShape::Token,
            Level::Sequence => WeightShape::Sequence,
        };
        let level = |level| match level {
            Level::Token => AdvantageLevel::Token,
            Level::Sequence => AdvantageLevel::Sequence,
        };
        Self {
            old_logps: inputs.old_logps,
            ref_logps: inputs.ref_logps,
            sampling_logps: inputs.sampling_logps,
            rollout_weights: inputs.rollout_weights.map(shape),
            token_weights: inputs.token_weights,
            kept_ids: inputs.kept_ids,
            num_items_in_batch: inputs.num_items_in_batch,
            advantages: inputs.advantages.map(level),
            float64: inputs.float64,
        }
    }
}

/// The names of projects for the log-probabilities of the sampler, or for what is made of them.
const OF_THE_SAMPLER: [&str; 8] = [
    "generation_logprobs",
    "importance_sampling_ratio",
    "infer_logprobs",
    "logprobs",
    "old_log_probs",
    "rollout_log_probs",
    "rollout_logprobs",
    "sampling_logps",
];

/// The end of the error where they are missing.
const SAMPLER_HINT: &str = "; batch={\"sampling_logps\": True} says that the batch has those of the sampler, and so does `rollout_logp=` of `grpo_loss`";

/// Returns the loss that the project `name` computes: `function` is one of the project's functions, and `options` and
/// `batch` are JSON objects.
#[pyfunction]
pub(crate) fn spec_of_preset(
    py: Python<'_>,
    name: &str,
    function: Option<&str>,
    options: &str,
    batch: &str,
) -> PyResult<Spec> {
    let wrong = |reason: &dyn std::fmt::Display| error::spec_error(py, reason);
    let preset: Preset = name.parse().map_err(|reason| {
        let meant = nearest(name, Preset::ALL.map(Preset::name));
        let meant = meant.map_or(String::new(), |meant| format!(": is `{meant}` meant?"));
        error::spec_error(py, format!("{reason}, or the path of a YAML, TOML or JSON file{meant}"))
    })?;
    let options: Value = serde_json::from_str(options).map_err(|reason| wrong(&reason))?;
    // Keep the options as `name=value`, so that a campaign can try the loss with one of them changed.
    let pairs = as_pairs("", &options);
    let options = PresetOptions::from_json(&options).map_err(|reason| wrong(&reason))?;
    let inputs: DeclaredInputs = serde_json::from_str(batch).map_err(|reason| wrong(&format!("batch: {reason}")))?;
    let inputs = BatchInputs::from(inputs);
    let resolved = presets::spec(preset, function, &options, &inputs).map_err(|reason| {
        // Projects name the sampler's log-probabilities in many ways; the package has one.
        let sampler = matches!(&reason, PresetError::Input { input, .. } if OF_THE_SAMPLER.contains(input));
        let hint = if sampler && !inputs.sampling_logps { SAMPLER_HINT } else { "" };
        wrong(&format!("{reason}{hint}"))
    })?;
    let without = resolved.without_effect.iter().map(|option| format!("`{option}` has no effect on the loss"));
    Ok(Spec {
        loss: Arc::new(resolved.spec),
        name: Some(format!("{}, {}", preset.versioned(), resolved.function)),
        // Another function of the project's has options of its own.
        project: function.is_none().then_some((preset, pairs)),
        notes: resolved.notes.iter().cloned().chain(without).collect(),
    })
}

/// Options as a command line has them, those within others named with dots.
fn as_pairs(name: &str, value: &Value) -> Vec<String> {
    let within = |member: &str| if name.is_empty() { member.into() } else { format!("{name}.{member}") };
    match value {
        Value::Object(members) => members.iter().flat_map(|(member, value)| as_pairs(&within(member), value)).collect(),
        Value::String(text) => vec![format!("{name}={text}")],
        value => vec![format!("{name}={value}")],
    }
}

/// The spec in the YAML, TOML or JSON file at `path`.
#[pyfunction]
pub(crate) fn spec_of_file(py: Python<'_>, path: PathBuf) -> PyResult<Spec> {
    let read = read_spec(Some(&path)).map_err(|reason| error::spec_error(py, reason))?;
    Ok(Spec::from_loss(read.expect("a path is named")))
}

/// Logp, or logp and entropy, without a loss: by their given cotangents. `options`, a JSON object, says what becomes of logits before
/// their softmax, and of how many ids logp is asked.
#[pyfunction]
pub(crate) fn spec_of_cotangents(py: Python<'_>, entropy: bool, options: &str) -> PyResult<Spec> {
    const OPTIONS: [&str; 5] = ["temperature", "temperature_divides", "logits", "support", "ids_per_token"];
    let mut given: Map<String, Value> =
        serde_json::from_str(options).map_err(|reason| error::spec_error(py, reason))?;
    let notes = rename_old_keys(&mut given);
    if let Some(stranger) = given.keys().find(|name| !OPTIONS.contains(&name.as_str())) {
        let meant = nearest(stranger, OPTIONS).map_or(String::new(), |meant| format!("is `{meant}` meant? "));
        let all = OPTIONS.join(", ");
        return Err(error::spec_error(py, format!("`{stranger}`: no such option, {meant}expected entropy, {all}")));
    }
    let mut fields = serde_json::to_value(LossSpec::from_cotangents(entropy)).expect("plain data has a JSON form");
    // The options replace fields of a spec whose loss is `Σ dlogp·logp`, with the entropy's part if it is asked for.
    fields.as_object_mut().expect("a spec is an object").extend(given);
    let loss: LossSpec = serde_json::from_value(fields)
        .map_err(|reason| error::spec_error(py, ForeignText::from(reason.to_string())))?;
    loss.check().map_err(|reason| error::spec_error(py, reason))?;
    Ok(Spec { notes, ..Spec::from_loss(loss) })
}

/// Gives fields with an old key their new one, and returns a note for each; a field under both keys is left for the parser to refuse.
fn rename_old_keys(fields: &mut Map<String, Value>) -> Vec<String> {
    let mut notes = Vec::new();
    for (old, new) in LossSpec::OLD_KEYS {
        if !fields.contains_key(new)
            && let Some(value) = fields.remove(old)
        {
            fields.insert(new.into(), value);
            notes.push(format!("`{old}` is the old name of `{new}`"));
        }
    }
    notes
}

/// The spec with `fields`, a JSON object; what is left out is as in plain PPO-clip.
#[pyfunction]
pub(crate) fn spec_of_fields(py: Python<'_>, fields: &str) -> PyResult<Spec> {
    let mut given: Map<String, Value> = serde_json::from_str(fields).map_err(|reason| error::spec_error(py, reason))?;
    let notes = rename_old_keys(&mut given);
    let plain = serde_json::to_value(LossSpec::default()).expect("plain data has a JSON form");
    // A default spec is written with every field but `ids_per_token`, which is written only where it is not 1.
    let known = || plain.as_object().into_iter().flat_map(Map::keys).map(String::as_str).chain(["ids_per_token"]);
    if let Some(stranger) = given
        .keys()
        .find(|name| LossSpec::OLD_KEYS.iter().all(|(old, _)| old != name) && known().all(|field| field != *name))
    {
        let meant = nearest(stranger, known()).map_or(String::new(), |meant| format!("is `{meant}` meant? "));
        let all: Vec<&str> = known().collect();
        return Err(error::spec_error(
            py,
            format!("`{stranger}`: no such field, {meant}expected one of {}", all.join(", ")),
        ));
    }
    // The names were checked above, where the nearest one could be named, as this error cannot.
    let loss: LossSpec = serde_json::from_value(Value::Object(given))
        .map_err(|reason| error::spec_error(py, ForeignText::from(reason.to_string())))?;
    loss.check().map_err(|reason| error::spec_error(py, reason))?;
    Ok(Spec { notes, ..Spec::from_loss(loss) })
}
