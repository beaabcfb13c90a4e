//! [`Tolerances`], the numbers of `tolerances.toml`, and [`Limits`], which follow from them for one arithmetic class and grade.
//!
//! ```
//! use assay_judge::gate::Output;
//! use assay_judge::tolerance::{Grade, Limits};
//!
//! // Kernels that are not ours are held to grade `standard`, and each gate reports whether it reaches `exact`.
//! let limits = Limits::for_class("external")?;
//! assert_eq!(limits.grade, Grade::Standard);
//! // κ counts roundings: a gradient is a longer computation than a log-probability.
//! assert!(limits.kappa(Output::Dlogits) > limits.kappa(Output::Logp));
//! # Ok::<(), assay_judge::tolerance::ToleranceError>(())
//! ```

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::gate::Output;
use assay_core::problem::{HeadShape, Shape};
use assay_core::text::{ForeignText, ShownNumber};
pub use assay_schema::verdicts::Grade;

/// The `κ` of one arithmetic class: the number of roundings that an error analysis allows its outputs. Derived in
/// `docs/tolerances.md`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArithmeticClass {
    /// The `κ` of logp, and of token losses, KL estimates and ratios, which follow from it alone.
    pub logp: f64,
    /// The `κ` of entropy, and of the loss, which may contain it.
    pub entropy: f64,
    /// The `κ` of dlogits, and of the gradients of hidden states and head, which are products with them.
    pub gradient: f64,
    /// The roundings that are counted, in words.
    pub why: String,
}

/// The offset error that [`Grade::Standard`] forgives in addition to cancellations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StandardTolerance {
    /// The number of roundings at the size of a token's largest logit that logp may contain.
    pub offset: f64,
    /// The steps that round so, in words.
    pub why: String,
}

/// The limit of sums whose errors have random signs: the products of an LM head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumTolerance {
    /// The number of standard deviations of such a sum that are allowed.
    pub deviations: f64,
    /// The reason for the number.
    pub why: String,
}

/// The limit of scalars that were recorded with fixtures, which check the reference itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedTolerance {
    /// The `κ` of such a scalar, in units of `u = 2⁻⁵³`.
    pub kappa: f64,
    /// The roundings that are counted, in words.
    pub why: String,
}

/// A mutant that grade `standard` admits by design.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdmittedMutant {
    /// The name of the mutant.
    pub mutant: String,
    /// The reason why no limit of the grade rejects it.
    pub why: String,
}

/// The contents of `tolerances.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tolerances {
    /// The arithmetic classes by name.
    pub class: BTreeMap<String, ArithmeticClass>,
    /// The offset error that grade `standard` forgives.
    pub standard: StandardTolerance,
    /// The limit of the products of LM heads.
    pub sums: SumTolerance,
    /// The limit of recorded scalars.
    pub recorded: RecordedTolerance,
    /// The mutants that grade `standard` does not reject.
    #[serde(default)]
    pub admitted: Vec<AdmittedMutant>,
}

/// The reason why a tolerance file cannot be used, or has no limits for a class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToleranceError {
    /// The file is not TOML, or a field is unknown or missing.
    #[error("tolerances: {0}")]
    Parse(ForeignText),
    /// A number is not finite, or not above 0.
    #[error("tolerances: `{field}`: got {given}, expected a finite number above 0")]
    Number {
        /// The path of the field.
        field: ForeignText,
        /// The number in the file.
        given: ForeignText,
    },
    /// A number has no reason of four words or more.
    #[error("tolerances: `{field}`: expected a reason of four words or more, got `{given}`")]
    Reason {
        /// The path of the field.
        field: ForeignText,
        /// The text in the file.
        given: ForeignText,
    },
    /// The file has no such arithmetic class.
    #[error("class: got `{given}`, for which tolerances.toml has no limits; expected one of {expected}")]
    Class {
        /// The class that was asked for.
        given: ForeignText,
        /// The classes of the file.
        expected: String,
    },
}

/// The least number of words of a reason.
const WORDS: usize = 4;

/// The suffix of a class whose kernels contain the LM head; its limits are those of the class without the suffix.
const HEAD: &str = "-lm-head";

/// The arithmetic class of kernels that are not part of this project.
pub const EXTERNAL: &str = "external";

/// The arithmetic class whose sums have no errors: its `κ` counts the other roundings.
const WITHOUT_SUMS: &str = "native";

impl Tolerances {
    /// Parses a tolerance file.
    ///
    /// # Errors
    /// [`ToleranceError`] for a field that is missing, unknown, out of range or gives no reason.
    pub fn parse(text: &str) -> Result<Self, ToleranceError> {
        let file: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
            ToleranceError::Parse(format!("line {line}: {}", error.message()).into())
        })?;
        let number = |field: String, given: f64| {
            let fault = || ToleranceError::Number { field: field.into(), given: ShownNumber(given).to_string().into() };
            if given.is_finite() && given > 0.0 { Ok(()) } else { Err(fault()) }
        };
        let reason = |field: String, given: &str| {
            let fault = || ToleranceError::Reason { field: field.into(), given: given.into() };
            if given.split_whitespace().count() >= WORDS { Ok(()) } else { Err(fault()) }
        };
        // A number without a reason is refused like one out of range: a limit that nobody derived must not enter the
        // file.
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

    /// Returns the project's own `tolerances.toml`, which is built in.
    pub fn builtin() -> &'static Self {
        static BUILTIN: OnceLock<Tolerances> = OnceLock::new();
        BUILTIN.get_or_init(|| {
            Self::parse(include_str!("../../../tolerances.toml")).expect("checked by the tests of the judge")
        })
    }

    /// Returns the limits of `class`, with or without an LM head: [`Grade::Standard`] for [`EXTERNAL`], [`Grade::Exact`] for every other.
    ///
    /// # Errors
    /// [`ToleranceError::Class`] if the file has no such class.
    pub fn limits(&self, class: &str) -> Result<Limits<'_>, ToleranceError> {
        let name = class.strip_suffix(HEAD).unwrap_or(class);
        let found = self.class.get(name).ok_or_else(|| ToleranceError::Class {
            given: class.into(),
            expected: self.class.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
        })?;
        let grade = if name == EXTERNAL { Grade::Standard } else { Grade::Exact };
        Ok(Limits {
            tolerances: self,
            class: found,
            grade,
            tries_better: true,
            lanes: false,
            entropy_difference: false,
            differences: false,
            maps: false,
        })
    }
}

/// The limits of a candidate: `|x̂ − x| ≤ ½ulp_out(x) + κ·u·scale + floor`, with `κ` from its arithmetic class, and scale and floor from
/// its grade.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Limits<'t> {
    tolerances: &'t Tolerances,
    class: &'t ArithmeticClass,
    /// The grade that is asked for.
    pub grade: Grade,
    /// Whether grade `exact` is tried first if `standard` is asked for.
    tries_better: bool,
    /// Whether a sum in f32 may have been added up in lanes, one term after another.
    lanes: bool,
    /// Whether an entropy may have been computed as `lse − Σ p·z`, two numbers of the size of the largest logit.
    entropy_difference: bool,
    /// Whether half of the difference of two answers is judged, in place of an answer.
    differences: bool,
    /// Whether errors are mapped by their place.
    maps: bool,
}

impl Limits<'static> {
    /// Returns the limits of `class` from the tolerances that are built in.
    ///
    /// # Errors
    /// [`ToleranceError::Class`] if there is no such class.
    pub fn for_class(class: &str) -> Result<Self, ToleranceError> {
        Tolerances::builtin().limits(class)
    }

    /// Returns the limits of [`EXTERNAL`] kernels, at `grade`.
    pub fn external(grade: Grade) -> Self {
        Self { grade, ..Self::for_class(EXTERNAL).expect("checked by the tests of the judge") }
    }

    /// Returns the limits of half the difference of two answers to one question, whose sums over a row were added up in two orders.
    ///
    /// Both answers round the same logits. An online softmax that is cut otherwise rounds gaps and exponentials once more, as `κ` of a
    /// class without errors of sums counts; the sums of each row may be off by what f32 loses of that very row, in one lane or several.
    pub fn for_differences(grade: Grade) -> Self {
        let class = Self::for_class(WITHOUT_SUMS).expect("checked by the tests of the judge");
        Self { grade, tries_better: false, lanes: true, differences: true, ..class }
    }
}

impl Limits<'_> {
    /// Returns the limits at another grade.
    #[must_use]
    pub fn at(self, grade: Grade) -> Self {
        Self { grade, ..self }
    }

    /// Returns the limits of this grade alone: verdicts do not report whether the better grade is reached, which takes half the time.
    #[must_use]
    pub fn alone(self) -> Self {
        Self { tries_better: false, ..self }
    }

    /// Returns limits whose verdicts have an [`ErrorMap`](crate::error_map::ErrorMap) for each axis of an output, which takes more time.
    #[must_use]
    pub fn with_error_maps(self) -> Self {
        Self { maps: true, ..self }
    }

    /// Returns the extents of the maps of errors, if there are maps.
    pub(crate) fn mapped(&self, Shape { batch, tokens, vocab }: Shape, hidden: usize) -> Option<HeadShape> {
        self.maps.then_some(HeadShape { batch, tokens, hidden, vocab })
    }

    /// Returns limits that forgive what a long sum of exponentials loses if it is added up in lanes of f32.
    pub(crate) fn with_sums_in_lanes(self) -> Self {
        Self { lanes: true, ..self }
    }

    /// Returns limits that forgive what an entropy loses if it is computed as `lse − Σ p·z`.
    pub(crate) fn with_entropy_as_difference(self) -> Self {
        Self { entropy_difference: true, ..self }
    }

    /// Whether the error of `lse − Σ p·z` is forgiven.
    pub(crate) fn entropy_as_difference(&self) -> bool {
        self.entropy_difference
    }

    /// Whether the error of a long sum in lanes is forgiven.
    pub(crate) fn sums_in_lanes(&self) -> bool {
        self.lanes
    }

    /// Whether half of a difference is judged.
    pub(crate) fn are_of_differences(&self) -> bool {
        self.differences
    }

    /// Returns the limits of grade `exact`, if they are tried first.
    pub(crate) fn better(&self) -> Option<Self> {
        (self.tries_better && self.grade == Grade::Standard).then(|| self.at(Grade::Exact))
    }

    /// Returns the `κ` of an output; 0 for shares, which are counted.
    pub fn kappa(&self, output: Output) -> f64 {
        match output {
            Output::Logp | Output::TokenLoss | Output::KlMean | Output::RatioMean => self.class.logp,
            Output::Entropy | Output::EntropyMean | Output::Loss => self.class.entropy,
            Output::Dlogits | Output::Dhidden | Output::DlmHead => self.class.gradient,
            Output::Recorded => self.tolerances.recorded.kappa,
            Output::ClipLow | Output::ClipHigh | Output::ClipRegion => 0.0,
        }
    }

    /// Returns the offset error of an exponent in units of `u` and the token's largest logit; 0 at grade `exact`.
    pub(crate) fn offset(&self) -> f64 {
        match self.grade {
            Grade::Standard => self.tolerances.standard.offset,
            Grade::Exact => 0.0,
        }
    }

    /// Returns the factor by which a sum of errors that are uniform within `±1` may exceed the root of their squares' sum.
    pub(crate) fn spread(&self) -> f64 {
        self.tolerances.sums.deviations / f64::sqrt(3.0)
    }
}
