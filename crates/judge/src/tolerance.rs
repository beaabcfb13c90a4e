//! `tolerances.toml`, the law.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use assay_core::problem::Dtype;

/// Something that is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// The scalar loss.
    Loss,
    /// `[B,T]` log-probabilities.
    Logp,
    /// `[B,T]` entropies.
    Entropy,
    /// `[B,T]` token losses.
    TokenLoss,
    /// `[B,T,V]` gradient.
    Dlogits,
    /// `[B,T,H]` gradient of the hidden states.
    Dhidden,
    /// `[H,V]` or `[V,H]` gradient of the LM head.
    DlmHead,
    /// Metric: mean entropy.
    EntropyMean,
    /// Metric: mean KL estimate.
    KlMean,
    /// Metric: mean ratio.
    RatioMean,
    /// Metric: share clipped low.
    ClipLow,
    /// Metric: share clipped high.
    ClipHigh,
    /// Metric: share clipped on either side.
    ClipRegion,
    /// A scalar recorded with a fixture, which checks the reference itself.
    Recorded,
}

impl Output {
    /// The name that `tolerances.toml` and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Output::Loss => "loss",
            Output::Logp => "logp",
            Output::Entropy => "entropy",
            Output::TokenLoss => "token_loss",
            Output::Dlogits => "dlogits",
            Output::Dhidden => "dhidden",
            Output::DlmHead => "dlm_head",
            Output::EntropyMean => "entropy_mean",
            Output::KlMean => "kl_mean",
            Output::RatioMean => "ratio_mean",
            Output::ClipLow => "clip_low",
            Output::ClipHigh => "clip_high",
            Output::ClipRegion => "clip_region",
            Output::Recorded => "recorded",
        }
    }
}

/// How an output is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// Every element: `|x̂ − x| ≤ ½ulp(x) + κ·u·scale`.
    Elementwise,
    /// Each row of dlogits without its target, of `dhidden`, or column of `dlm_head`:
    /// `‖x̂ − x‖₂ ≤ ‖½ulp(x)‖₂ + κ·u·‖scale‖₂`.
    RowL2,
    /// Each row of dlogits: `|Σ x̂ − Σ x| ≤ Σ ½ulp(x) + κ·u·Σ scale`.
    RowSum,
    /// A share of tokens: exact, but for tokens inside a tie band.
    Count,
}

impl Model {
    /// The name that `tolerances.toml` uses.
    pub fn name(self) -> &'static str {
        match self {
            Model::Elementwise => "elementwise",
            Model::RowL2 => "row_l2",
            Model::RowSum => "row_sum",
            Model::Count => "count",
        }
    }
}

/// An output and the way it is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Gate {
    /// What is judged.
    pub output: Output,
    /// How.
    pub model: Model,
}

impl Gate {
    /// The dtype under which the file lists an output of `dtype`.
    pub fn listed_dtype(self, dtype: Dtype) -> Dtype {
        if dtype == Dtype::F64 && self.output != Output::Recorded { Dtype::F32 } else { dtype }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.output.name())?;
        match self.model {
            Model::Elementwise | Model::Count => Ok(()),
            Model::RowL2 => f.write_str(" row_l2"),
            Model::RowSum => f.write_str(" row_sum"),
        }
    }
}

/// One entry of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tolerance {
    /// What is judged.
    pub output: Output,
    /// How.
    pub model: Model,
    /// Dtype of the output itself.
    pub dtype: Dtype,
    /// Class of implementation: what arithmetic it uses.
    pub class: String,
    /// `κ`: the limit is `κ·u·scale` beyond the output's own rounding, `u = 2⁻²⁴` (`2⁻⁵³` for dtype f64).
    pub kappa: f64,
    /// `κ` as an error analysis gives it, in the worst case.
    pub derived: f64,
    /// The largest `κ` that correct implementations of this class have needed.
    pub worst_seen: f64,
    /// What `worst_seen` was measured on.
    pub measured_on: String,
    /// The reason that was given when the figures were raised; they are not lowered while it stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<String>,
    /// Why `derived` is what it is.
    pub why: String,
}

/// The parsed file, which remembers what was asked for.
#[derive(Debug)]
pub struct Tolerances {
    entries: Vec<(Tolerance, AtomicBool)>,
}

/// A tolerance file that cannot be used, or does not say what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToleranceError {
    /// Not TOML, or an unknown or missing field.
    #[error("tolerances: {0}")]
    Parse(String),
    /// Two entries for one thing.
    #[error("tolerances: `{gate}`, dtype {dtype}, class `{class}` is listed twice")]
    Duplicate {
        /// What is judged and how.
        gate: Gate,
        /// Dtype of the output.
        dtype: Dtype,
        /// Class of implementation.
        class: String,
    },
    /// No entry for this output.
    #[error(
        "`{gate}`: got dtype {dtype}, for which tolerances.toml has no limit in class `{class}`; expected {expected}"
    )]
    Absent {
        /// What is judged and how.
        gate: Gate,
        /// Dtype of the output.
        dtype: Dtype,
        /// Class of implementation.
        class: String,
        /// The dtypes it has limits for.
        expected: String,
    },
}

impl Tolerances {
    /// Parses a tolerance file.
    ///
    /// # Errors
    /// [`ToleranceError`] for anything but a list of distinct, complete `[[tolerance]]` entries.
    pub fn parse(text: &str) -> Result<Self, ToleranceError> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct File {
            tolerance: Vec<Tolerance>,
        }
        let file: File = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
            ToleranceError::Parse(format!("line {line}: {}", error.message()))
        })?;
        let mut entries: Vec<(Tolerance, AtomicBool)> = Vec::new();
        for entry in file.tolerance {
            let gate = Gate { output: entry.output, model: entry.model };
            if entries.iter().any(|(other, _)| other.answers(gate, entry.dtype, &entry.class)) {
                return Err(ToleranceError::Duplicate { gate, dtype: entry.dtype, class: entry.class });
            }
            entries.push((entry, AtomicBool::new(false)));
        }
        Ok(Self { entries })
    }

    /// The crate's own `tolerances.toml`, built in.
    pub fn builtin() -> &'static Self {
        static BUILTIN: OnceLock<Tolerances> = OnceLock::new();
        BUILTIN.get_or_init(|| {
            Self::parse(include_str!("../../../tolerances.toml")).expect("checked by the tests of the law")
        })
    }

    /// `κ` for a gate. An output stored as f64 is held to the f32 entry: it was computed by an f32 kernel and stored wider.
    ///
    /// # Errors
    /// [`ToleranceError::Absent`] where the file has no entry.
    pub fn kappa(&self, gate: Gate, dtype: Dtype, class: &str) -> Result<f64, ToleranceError> {
        let wanted = gate.listed_dtype(dtype);
        let found = self.entries.iter().find(|(entry, _)| entry.answers(gate, wanted, class));
        let Some((entry, used)) = found else {
            let of_class = self.entries.iter().filter(|(entry, _)| entry.answers(gate, entry.dtype, class));
            let dtypes: Vec<_> = of_class.map(|(entry, _)| entry.dtype.to_string()).collect();
            let expected = if dtypes.is_empty() { "no such output".into() } else { dtypes.join(", ") };
            return Err(ToleranceError::Absent { gate, dtype, class: class.into(), expected });
        };
        used.store(true, Ordering::Relaxed);
        Ok(entry.kappa)
    }

    /// All entries, in file order.
    pub fn entries(&self) -> impl Iterator<Item = &Tolerance> {
        self.entries.iter().map(|(entry, _)| entry)
    }

    /// The entries that [`Tolerances::kappa`] has not been asked for.
    pub fn unused(&self) -> impl Iterator<Item = &Tolerance> {
        self.entries.iter().filter(|(_, used)| !used.load(Ordering::Relaxed)).map(|(entry, _)| entry)
    }
}

impl Tolerance {
    /// What is judged and how.
    pub fn gate(&self) -> Gate {
        Gate { output: self.output, model: self.model }
    }

    fn answers(&self, gate: Gate, dtype: Dtype, class: &str) -> bool {
        self.gate() == gate && self.dtype == dtype && self.class == class
    }
}
