//! The law against a measurement: figures are lowered freely and raised for a reason; all else in the file stays.

use std::fmt::Write as _;
use std::str::FromStr;

use serde::Serialize;
use toml_edit::{DocumentMut, Item, Table, Value};

use crate::measure::{Measurement, Subject};
use assay_judge::tolerance::{Tolerance, ToleranceError, Tolerances};

/// `κ` may be this many times `worst_seen`, where `derived` allows it.
const SLACK: f64 = 4.0;

/// A figure that a measurement meets this closely, relatively, stands: files have four digits.
const SAME: f64 = 1e-3;

/// A reason has at least so many words.
const WORDS: usize = 4;

/// Why figures may be raised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(String);

impl FromStr for Reason {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let said = text.split_whitespace().count() >= WORDS;
        if said { Ok(Self(text.into())) } else { Err("expected a reason of four words or more".into()) }
    }
}

/// The measured figures of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// The limit.
    pub kappa: f64,
    /// The largest `κ` that a correct implementation has needed.
    pub worst_seen: f64,
}

/// What a measurement means for an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// No case reached the gate: as it was.
    NotMeasured,
    /// The same figures.
    Stands,
    /// Less was needed, but the figures were accepted for a reason: as they were, until the reason is taken out.
    Held,
    /// Less was needed.
    Lowered,
    /// More was needed, or the limit was below what the rule gives.
    Raised,
}

/// One entry of the file, before and after.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// What the entry is for.
    #[serde(flatten)]
    pub subject: Subject,
    /// What a measurement means for it.
    pub change: Change,
    /// The figures in the file.
    pub old: Figures,
    /// The figures that the measurement gives.
    pub new: Figures,
    /// What was derived: no limit is above it.
    pub derived: f64,
    /// The case that needed most.
    pub case: Option<String>,
}

/// Every entry of a file against a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Revision {
    /// In file order.
    pub entries: Vec<Line>,
}

/// A file that was not rewritten.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ReviseError {
    /// Entries would be raised, and nobody gave a reason.
    #[error("more was needed than the law has seen, and nothing is raised without a reason (--accept):{}", list(.0))]
    Raised(Vec<Line>),
    /// More was needed than was derived, which no reason mends.
    #[error("more was needed than was derived: the implementation is wrong, or the derivation:{}", list(.0))]
    Beyond(Vec<Line>),
    /// Not a tolerance file.
    #[error(transparent)]
    Tolerances(#[from] ToleranceError),
}

fn list(lines: &[Line]) -> String {
    let mut text = String::new();
    for Line { subject, old, new, case, .. } in lines {
        let case = case.as_ref().map_or_else(String::new, |case| format!("\n    needed by {case}"));
        let _ = write!(
            text,
            "\n  {subject}: worst_seen {} → {}, kappa {} → {}{case}",
            old.worst_seen, new.worst_seen, old.kappa, new.kappa
        );
    }
    text
}

impl Revision {
    /// What `measurement` means for each of `tolerances`.
    pub fn of(tolerances: &Tolerances, measurement: &Measurement) -> Self {
        Self { entries: tolerances.entries().map(|entry| line(entry, measurement)).collect() }
    }

    /// The entries that needed more than was derived.
    pub fn beyond(&self) -> impl Iterator<Item = &Line> {
        let measured = self.entries.iter().filter(|line| line.change != Change::NotMeasured);
        measured.filter(|line| line.new.worst_seen > line.derived)
    }

    /// The entries that would be raised.
    pub fn raised(&self) -> impl Iterator<Item = &Line> {
        self.entries.iter().filter(|line| line.change == Change::Raised)
    }

    /// `text`, the file that the entries are of, with the new figures and `measured_on(class)`; an entry that is raised
    /// keeps `accept`, the reason. Comments, order and layout are those of `text`.
    ///
    /// # Errors
    /// [`ReviseError::Beyond`], with every entry that needed more than was derived; [`ReviseError::Raised`], with every
    /// entry that would be raised, where `accept` is `None`;
    /// [`ReviseError::Tolerances`] where `text` is no list of `[[tolerance]]`.
    pub fn rewrite(
        &self,
        text: &str,
        measured_on: impl Fn(&str) -> Option<String>,
        accept: Option<&Reason>,
    ) -> Result<String, ReviseError> {
        let beyond: Vec<Line> = self.beyond().cloned().collect();
        if !beyond.is_empty() {
            return Err(ReviseError::Beyond(beyond));
        }
        let raised: Vec<Line> = self.raised().cloned().collect();
        if accept.is_none() && !raised.is_empty() {
            return Err(ReviseError::Raised(raised));
        }
        let parse = |reason: String| ToleranceError::Parse(reason);
        let mut document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| parse(error.to_string()))?;
        let tables = document.get_mut("tolerance").and_then(Item::as_array_of_tables_mut);
        let tables = tables.ok_or_else(|| parse("got an inline array, expected [[tolerance]] tables".into()))?;
        for (table, line) in tables.iter_mut().zip(&self.entries) {
            if matches!(line.change, Change::NotMeasured | Change::Held) {
                continue;
            }
            if line.new.kappa != line.old.kappa {
                set(table, "kappa", line.new.kappa);
            }
            if line.new.worst_seen != line.old.worst_seen {
                set(table, "worst_seen", line.new.worst_seen);
            }
            if let Some(measured_on) = measured_on(&line.subject.class) {
                set(table, "measured_on", measured_on);
            }
            if let (Change::Raised, Some(Reason(reason))) = (line.change, accept) {
                set(table, "accepted", reason);
            }
        }
        Ok(document.to_string())
    }
}

fn line(entry: &Tolerance, measurement: &Measurement) -> Line {
    let subject = Subject { gate: entry.gate(), dtype: entry.dtype, class: entry.class.clone() };
    let old = Figures { kappa: entry.kappa, worst_seen: entry.worst_seen };
    let Some(needed) = measurement.needed(&subject) else {
        return Line { subject, change: Change::NotMeasured, old, new: old, derived: entry.derived, case: None };
    };
    let same = (needed.kappa - old.worst_seen).abs() <= SAME * old.worst_seen;
    let worst_seen = if same { old.worst_seen } else { written(needed.kappa) };
    let new = Figures { kappa: entry.derived.min(SLACK * worst_seen), worst_seen };
    let change = if new.worst_seen > old.worst_seen || new.kappa > old.kappa {
        Change::Raised
    } else if new == old {
        Change::Stands
    } else if entry.accepted.is_some() {
        Change::Held
    } else {
        Change::Lowered
    };
    let new = if change == Change::Held { old } else { new };
    Line { subject, change, old, new, derived: entry.derived, case: Some(needed.case.clone()) }
}

/// To four digits.
fn written(figure: f64) -> f64 {
    format!("{figure:.3e}").parse().expect("a number as it was just written")
}

/// Sets a field, and leaves the space and comment around its value.
fn set(table: &mut Table, key: &str, value: impl Into<Value>) {
    let mut value = value.into();
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(old) => {
            *value.decor_mut() = old.decor().clone();
            *old = value;
        }
        None => drop(table.insert(key, Item::Value(value))),
    }
}
