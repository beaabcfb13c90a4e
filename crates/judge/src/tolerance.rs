//! `tolerances.toml`, what a person decides of the limits, and [`Limits`], what follows from it for one class and grade.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::gate::Output;
pub use assay_schema::verdicts::Grade;

/// How many roundings a class of arithmetic may add up to, as an error analysis of it gives them: `κ` of what its outputs are
/// limited by. Derived in `docs/tolerances.md`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// Of logp, and of what follows from it alone: token losses, KL estimates, ratios.
    pub logp: f64,
    /// Of entropy, and of the loss, which it may be part of.
    pub entropy: f64,
    /// Of dlogits, and of the gradients that are products with them.
    pub gradient: f64,
    /// What the roundings are.
    pub why: String,
}

/// What [`Grade::Standard`] forgives beside cancellations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standard {
    /// Roundings at the size of a row's largest logit that logp may carry.
    pub offset: f64,
    /// What they are.
    pub why: String,
}

/// Sums whose errors have random signs: the products of an LM head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sums {
    /// How many standard deviations of such a sum are allowed.
    pub deviations: f64,
    /// Why so many.
    pub why: String,
}

/// Scalars recorded with fixtures, which check the reference itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// `κ`, with `u = 2⁻⁵³`.
    pub kappa: f64,
    /// What it counts.
    pub why: String,
}

/// A wrong kernel that a grade admits by design.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Admitted {
    /// Its name among the mutants.
    pub mutant: String,
    /// Why no limit of the grade sees it.
    pub why: String,
}

/// The parsed file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tolerances {
    /// By name.
    pub class: BTreeMap<String, Class>,
    /// Of grade `standard`.
    pub standard: Standard,
    /// Of LM heads.
    pub sums: Sums,
    /// Of recorded scalars.
    pub recorded: Recorded,
    /// What grade `standard` does not reject.
    #[serde(default)]
    pub admitted: Vec<Admitted>,
}

/// A tolerance file that cannot be used, or does not say what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToleranceError {
    /// Not TOML, or an unknown or missing field.
    #[error("tolerances: {0}")]
    Parse(String),
    /// A number that is none, or negative.
    #[error("tolerances: `{field}`: got {given}, expected a finite number above 0")]
    Number {
        /// Which.
        field: String,
        /// What it is.
        given: String,
    },
    /// A decision without a reason.
    #[error("tolerances: `{field}`: expected a reason of four words or more, got `{given}`")]
    Reason {
        /// Which.
        field: String,
        /// What it says.
        given: String,
    },
    /// No such class.
    #[error("class: got `{given}`, for which tolerances.toml has no limits; expected one of {expected}")]
    Class {
        /// Class of implementation.
        given: String,
        /// Those of the file.
        expected: String,
    },
}

/// A reason has at least so many words.
const WORDS: usize = 4;

/// What the name of a class ends in where the LM head is part of the kernel. Its arithmetic is that of the class without.
const HEAD: &str = "-lm-head";

/// The class of kernels that are not ours.
pub const EXTERNAL: &str = "external";

impl Tolerances {
    /// Parses a tolerance file.
    ///
    /// # Errors
    /// [`ToleranceError`] for a field that is missing, unknown, out of range or gives no reason.
    pub fn parse(text: &str) -> Result<Self, ToleranceError> {
        let file: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
            ToleranceError::Parse(format!("line {line}: {}", error.message()))
        })?;
        let number = |field: String, given: f64| {
            let fault = || ToleranceError::Number { field, given: given.to_string() };
            if given.is_finite() && given > 0.0 { Ok(()) } else { Err(fault()) }
        };
        let reason = |field: String, given: &str| {
            let fault = || ToleranceError::Reason { field, given: given.into() };
            if given.split_whitespace().count() >= WORDS { Ok(()) } else { Err(fault()) }
        };
        for (name, class) in &file.class {
            for (field, given) in [("logp", class.logp), ("entropy", class.entropy), ("gradient", class.gradient)] {
                number(format!("class.{name}.{field}"), given)?;
            }
            reason(format!("class.{name}.why"), &class.why)?;
        }
        number("standard.offset".into(), file.standard.offset)?;
        reason("standard.why".into(), &file.standard.why)?;
        number("sums.deviations".into(), file.sums.deviations)?;
        reason("sums.why".into(), &file.sums.why)?;
        number("recorded.kappa".into(), file.recorded.kappa)?;
        reason("recorded.why".into(), &file.recorded.why)?;
        for admitted in &file.admitted {
            reason(format!("admitted.{}.why", admitted.mutant), &admitted.why)?;
        }
        Ok(file)
    }

    /// The project's own `tolerances.toml`, built in.
    pub fn builtin() -> &'static Self {
        static BUILTIN: OnceLock<Tolerances> = OnceLock::new();
        BUILTIN.get_or_init(|| {
            Self::parse(include_str!("../../../tolerances.toml")).expect("checked by the tests of the judge")
        })
    }

    /// The limits of `class`, with or without an LM head: [`Grade::Standard`] for what is not ours, [`Grade::Exact`] for what is.
    ///
    /// # Errors
    /// [`ToleranceError::Class`] where the file has no such class.
    pub fn limits(&self, class: &str) -> Result<Limits<'_>, ToleranceError> {
        let name = class.strip_suffix(HEAD).unwrap_or(class);
        let found = self.class.get(name).ok_or_else(|| ToleranceError::Class {
            given: class.into(),
            expected: self.class.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
        })?;
        let grade = if name == EXTERNAL { Grade::Standard } else { Grade::Exact };
        Ok(Limits { tolerances: self, class: found, grade, tries_better: true })
    }
}

/// What a candidate is held to: `|x̂ − x| ≤ ½ulp_out(x) + κ·u·scale + floor`, with `κ` of its class and the scale and the floor of
/// its grade.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'t> {
    tolerances: &'t Tolerances,
    class: &'t Class,
    /// What is asked of cancellations.
    pub grade: Grade,
    /// Whether the better grade is tried first.
    tries_better: bool,
}

impl Limits<'static> {
    /// Those of `class` by the tolerances that are built in.
    ///
    /// # Errors
    /// [`ToleranceError::Class`] where there is no such class.
    pub fn of(class: &str) -> Result<Self, ToleranceError> {
        Tolerances::builtin().limits(class)
    }

    /// Those of a kernel that is not ours.
    pub fn external(grade: Grade) -> Self {
        Self { grade, ..Self::of(EXTERNAL).expect("checked by the tests of the judge") }
    }
}

impl Limits<'_> {
    /// At another grade.
    #[must_use]
    pub fn at(self, grade: Grade) -> Self {
        Self { grade, ..self }
    }

    /// At this grade alone: a verdict passes or fails by its limits, and does not say whether the better grade would be reached. Where
    /// no more than that is asked it takes half the time.
    #[must_use]
    pub fn alone(self) -> Self {
        Self { tries_better: false, ..self }
    }

    /// The better grade, where it is tried first.
    pub(crate) fn better(&self) -> Option<Self> {
        (self.tries_better && self.grade == Grade::Standard).then(|| self.at(Grade::Exact))
    }

    /// `κ`: 0 for what is counted.
    pub fn kappa(&self, output: Output) -> f64 {
        match output {
            Output::Logp | Output::TokenLoss | Output::KlMean | Output::RatioMean => self.class.logp,
            Output::Entropy | Output::EntropyMean | Output::Loss => self.class.entropy,
            Output::Dlogits | Output::Dhidden | Output::DlmHead => self.class.gradient,
            Output::Recorded => self.tolerances.recorded.kappa,
            Output::ClipLow | Output::ClipHigh | Output::ClipRegion => 0.0,
        }
    }

    /// By how many `u` of a row's largest logit an exponent may be off beside its gap's own error: half of what logp may be.
    pub(crate) fn offset(&self) -> f64 {
        match self.grade {
            Grade::Standard => self.tolerances.standard.offset,
            Grade::Exact => 0.0,
        }
    }

    /// By how much a sum of errors that are uniform within `±1` and of random signs may exceed the root of their squares' sum.
    pub(crate) fn spread(&self) -> f64 {
        self.tolerances.sums.deviations / f64::sqrt(3.0)
    }
}
