//! Options as a project spells them, and the reader that all presets use.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Preset, PresetError};
use crate::spec::Temperature;
use crate::text::{ForeignLines, nearest};

/// The option names and values of one project. Nested options are named with dots, such as `data.dp_size`.
///
/// ```
/// # use assay_core as assay;
/// use assay::spec::presets::{BatchInputs, Preset, PresetOptions, spec};
///
/// let options = PresetOptions::from_pairs(&["loss_type=grpo", "epsilon_hihg=0.28"])?;
/// let error = spec(Preset::Trl, None, &options, &BatchInputs::default()).unwrap_err();
/// assert!(error.to_string().contains("is `epsilon_high` meant?"));
/// # Ok::<(), assay::spec::presets::PresetError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PresetOptions(BTreeMap<String, Value>);

impl PresetOptions {
    /// Reads the members of a JSON object.
    ///
    /// # Errors
    /// [`PresetError::NotAnObject`] for any other value.
    pub fn from_json(value: &Value) -> Result<Self, PresetError> {
        let Value::Object(members) = value else {
            return Err(PresetError::NotAnObject { given: value.to_string().into() });
        };
        let mut options = Self::default();
        members.iter().for_each(|(name, value)| options.insert(name, value.clone()));
        Ok(options)
    }

    /// Reads `name=value` pairs. A value is JSON, or Python's `True`, `False` and `None`, or else a plain word.
    ///
    /// # Errors
    /// [`PresetError::NotAPair`] for text without a name and `=`.
    pub fn from_pairs<S: AsRef<str>>(pairs: &[S]) -> Result<Self, PresetError> {
        let mut options = Self::default();
        for pair in pairs {
            let pair = pair.as_ref();
            let Some((name, text)) = pair.split_once('=').filter(|(name, _)| !name.trim().is_empty()) else {
                return Err(PresetError::NotAPair { given: pair.into() });
            };
            let value = match text.trim() {
                "True" => Value::Bool(true),
                "False" => Value::Bool(false),
                "None" => Value::Null,
                text => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.into())),
            };
            options.insert(name.trim(), value);
        }
        Ok(options)
    }

    /// Sets one option; the members of an object become separate options.
    pub fn insert(&mut self, name: &str, value: Value) {
        match value {
            Value::Object(members) => {
                members.into_iter().for_each(|(member, value)| self.insert(&format!("{name}.{member}"), value));
            }
            value => {
                self.0.insert(name.into(), value);
            }
        }
    }

    /// Copies the options without a leading `prefix` in their names, which some projects write and some leave out.
    pub(super) fn without_prefix(&self, prefix: &str) -> Self {
        Self(
            self.0
                .iter()
                .map(|(name, value)| (name.strip_prefix(prefix).unwrap_or(name).into(), value.clone()))
                .collect(),
        )
    }
}

/// The options of one call, which records the names that were read.
pub(super) struct OptionReader<'o> {
    preset: Preset,
    function: &'static str,
    options: &'o PresetOptions,
    read: RefCell<BTreeSet<&'static str>>,
}

impl<'o> OptionReader<'o> {
    pub(super) fn new(preset: Preset, function: &'static str, options: &'o PresetOptions) -> Self {
        Self { preset, function, options, read: RefCell::default() }
    }

    fn get(&self, name: &'static str) -> Option<&'o Value> {
        // Record the name, given or not: every name that is read is a known one.
        self.read.borrow_mut().insert(name);
        self.options.0.get(name)
    }

    /// Whether the option was given a value other than null.
    pub(super) fn is_given(&self, name: &'static str) -> bool {
        self.options.0.get(name).is_some_and(|value| !value.is_null())
    }

    /// Whether the option was given at all, be it null.
    pub(super) fn names(&self, name: &str) -> bool {
        self.options.0.contains_key(name)
    }

    /// Whether any option within `name` was given a value.
    pub(super) fn any_within(&self, name: &str) -> bool {
        let within = |key: &str| key.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
        self.options.0.iter().any(|(key, value)| within(key) && !value.is_null())
    }

    /// Returns the error that the option `name` has another value than `expected`.
    pub(super) fn refuse(&self, name: &str, expected: impl Into<ForeignLines>) -> PresetError {
        PresetError::Option {
            preset: self.preset,
            function: self.function,
            option: name.into(),
            given: self.options.0.get(name).map_or_else(|| "nothing".into(), Value::to_string).into(),
            expected: expected.into(),
        }
    }

    /// Returns the error that an input of the batch is missing or of another form.
    pub(super) fn lacks(
        &self,
        input: &'static str,
        given: &'static str,
        expected: impl Into<ForeignLines>,
    ) -> PresetError {
        PresetError::Input { preset: self.preset, function: self.function, input, given, expected: expected.into() }
    }

    /// Reads a number; null is refused.
    pub(super) fn number(&self, name: &'static str, default: f64) -> Result<f64, PresetError> {
        self.get(name).map_or(Ok(default), |value| value.as_f64().ok_or_else(|| self.refuse(name, "a number")))
    }

    /// Reads a softmax temperature: a number, or `given` if it comes with the batch; 1 by default.
    pub(super) fn temperature(&self, name: &'static str) -> Result<Temperature, PresetError> {
        match self.get(name) {
            None => Ok(Temperature::ONE),
            Some(Value::String(word)) if word == "given" => Ok(Temperature::Given),
            Some(value) => {
                let number = value.as_f64().map(Temperature::Number);
                number.ok_or_else(|| self.refuse(name, "a number, or `given`: the batch has one a sequence or a token"))
            }
        }
    }

    /// Reads a number, or null for none.
    pub(super) fn number_or_null(&self, name: &'static str, default: Option<f64>) -> Result<Option<f64>, PresetError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| self.refuse(name, "a number or null")),
        }
    }

    /// Reads a whole number `≥ 1`, or null; the default is null.
    pub(super) fn count_or_null(&self, name: &'static str) -> Result<Option<usize>, PresetError> {
        let Some(number) = self.number_or_null(name, None)? else { return Ok(None) };
        // JSON numbers are f64, exact for whole numbers up to 2⁵³.
        let whole = number >= 1.0 && number.fract() == 0.0 && number <= 2_f64.powi(53);
        #[allow(clippy::cast_sign_loss, reason = "it is ≥ 1")]
        if whole { Ok(Some(number as usize)) } else { Err(self.refuse(name, "a whole number ≥ 1, or null")) }
    }

    /// Reads a list of token ids; null or a missing option is an empty list.
    pub(super) fn ids(&self, name: &'static str) -> Result<Vec<usize>, PresetError> {
        let expected = || self.refuse(name, "a list of token ids, or null");
        match self.get(name) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(items)) => {
                let id = |item: &Value| item.as_u64().and_then(|id| usize::try_from(id).ok()).ok_or_else(expected);
                items.iter().map(id).collect()
            }
            Some(_) => Err(expected()),
        }
    }

    /// Reads a truth value; null is refused.
    pub(super) fn flag(&self, name: &'static str, default: bool) -> Result<bool, PresetError> {
        self.get(name).map_or(Ok(default), |value| value.as_bool().ok_or_else(|| self.refuse(name, "true or false")))
    }

    /// Reads text, or a number as text; null or a missing option is `None`.
    pub(super) fn text(&self, name: &'static str) -> Result<Option<String>, PresetError> {
        match self.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(Value::Number(number)) => Ok(Some(number.to_string())),
            Some(_) => Err(self.refuse(name, "text or a number")),
        }
    }

    /// Reads one of `words`; null is refused.
    pub(super) fn word<T: Copy>(&self, name: &'static str, default: T, words: &[(&str, T)]) -> Result<T, PresetError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        let found = words.iter().find(|(word, _)| value.as_str() == Some(word));
        found.map(|(_, meaning)| *meaning).ok_or_else(|| self.refuse(name, one_of(words.iter().map(|(word, _)| *word))))
    }

    /// Refuses every value except those that leave the option off: null, false, 0 and an empty list.
    pub(super) fn off(&self, name: &'static str, why: &str) -> Result<(), PresetError> {
        let off = |value: &Value| match value {
            Value::Null => true,
            Value::Bool(on) => !on,
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::Array(items) => items.is_empty(),
            Value::String(_) | Value::Object(_) => false,
        };
        if self.get(name).is_none_or(off) { Ok(()) } else { Err(self.refuse(name, format!("it to be off: {why}"))) }
    }

    /// Lists the options that were given and never read, all of which are among the function's `known` ones.
    ///
    /// # Errors
    /// [`PresetError::Unknown`] naming the first option that is neither.
    pub(super) fn finish(&self, known: &'static str) -> Result<Vec<String>, PresetError> {
        let read = self.read.borrow();
        let known: Vec<&str> = known.split_whitespace().collect();
        let mut without_effect = Vec::new();
        for (name, value) in &self.options.0 {
            let within = |known: &&str| known.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('.'));
            // An option that was read has its effect.
            if read.contains(name.as_str()) {
                continue;
            }
            // `data: null` is `data` without members.
            let is_absent_group = value.is_null() && read.iter().chain(&known).any(within);
            if !is_absent_group && !known.contains(&name.as_str()) {
                // Neither known nor read: name the nearest one, and all that exist.
                let accepted: BTreeSet<&str> = read.iter().chain(&known).copied().collect();
                let meant = nearest(name, accepted.iter().copied());
                let meant = meant.map_or(String::new(), |meant| format!("is `{meant}` meant? "));
                return Err(PresetError::Unknown {
                    preset: self.preset,
                    function: self.function,
                    option: name.clone().into(),
                    given: value.to_string().into(),
                    expected: format!("{meant}expected {}", one_of(accepted.into_iter())).into(),
                });
            }
            without_effect.push(name.clone());
        }
        Ok(without_effect)
    }
}

/// Joins words as `one of a, b and c`.
pub(super) fn one_of<'w>(words: impl Iterator<Item = &'w str>) -> String {
    let words: Vec<&str> = words.collect();
    match words.as_slice() {
        [] => "nothing".into(),
        [only] => format!("`{only}`"),
        [first @ .., last] => format!("one of {} and {last}", first.join(", ")),
    }
}
