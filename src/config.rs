//! Specs and other settings in YAML, TOML or JSON files.

use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::files::{read_named_text, read_regular_text};
use crate::problem::ProblemError;
use crate::spec::LossSpec;
use crate::text::{ForeignText, ShownPath};

/// No settings file is longer; a larger one is something else.
const LONGEST: u64 = 1 << 20;

/// Settings that cannot be read or believed: one line that starts with the file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The operating system refused to read the file.
    #[error("{path}: cannot read: {reason}")]
    Io {
        /// The path of the file.
        path: ShownPath,
        /// The operating system's error.
        reason: io::Error,
    },
    /// The file's content is invalid.
    #[error("{path}: {reason}")]
    Invalid {
        /// The path of the file.
        path: ShownPath,
        /// The reason why it is invalid.
        reason: ForeignText,
    },
    /// A spec that is out of range.
    #[error("{path}: {reason}")]
    Spec {
        /// The path of the file.
        path: ShownPath,
        /// The error, which names the field.
        reason: ProblemError,
    },
}

/// Reads `path` as its extension says, YAML where it says nothing.
///
/// # Errors
/// [`ConfigError`] where it is not there, longer than any settings, or not a `T`.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    parse(path, &read_text(path)?)
}

/// Reads a file that is found in a folder and that no user named, as [`read`].
///
/// # Errors
/// As [`read`], and one if `path` leads to a pipe, a device or a folder, which are not waited for.
pub fn read_found<T: DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    let text = read_regular_text(path, LONGEST);
    parse(path, &text.map_err(|reason| ConfigError::Io { path: path.into(), reason })?)
}

fn read_text(path: &Path) -> Result<String, ConfigError> {
    let io = |reason| ConfigError::Io { path: path.into(), reason };
    read_named_text(path, LONGEST).map_err(io)
}

fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    let invalid = |reason: String| ConfigError::Invalid { path: path.into(), reason: reason.into() };
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml::from_str(text).map_err(|error| invalid(error.to_string())),
        Some("json") => serde_json::from_str(text).map_err(|error| invalid(error.to_string())),
        _ => serde_saphyr::from_str_with_options(text, yaml_options())
            .map_err(|error| invalid(yaml_reason(&error, text))),
    }
}

/// The spec in `path`, if one is named.
///
/// # Errors
/// Errors of [`read`], and one if the spec is out of range or empty.
pub fn read_spec(path: Option<&Path>) -> Result<Option<LossSpec>, ConfigError> {
    let Some(path) = path else { return Ok(None) };
    let text = read_text(path)?;
    // Every field has a default, so that an empty file, as an interrupted write leaves one, would be plain PPO-clip.
    let is_said = |line: &str| !matches!(line, "" | "---" | "..." | "null" | "~") && !line.starts_with('#');
    if !text.lines().any(|line| is_said(line.trim())) {
        let reason = "got an empty spec, expected a field of one, such as `objective`; `{}` and no file at all are plain PPO-clip";
        return Err(ConfigError::Invalid { path: path.into(), reason: reason.into() });
    }
    let spec: LossSpec = parse(path, &text)?;
    spec.check().map_err(|error| ConfigError::Spec { path: path.into(), reason: error.into() })?;
    Ok(Some(spec))
}

/// Returns a note for each old key in the spec file `path`, such as `top` for `ids_per_token`.
///
/// # Errors
/// As [`read`].
pub fn spec_notes(path: Option<&Path>) -> Result<Vec<String>, ConfigError> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let fields: serde_json::Map<String, serde_json::Value> = read(path)?;
    let old = LossSpec::OLD_KEYS.into_iter().filter(|(old, _)| fields.contains_key(*old));
    Ok(old.map(|(old, new)| format!("`{old}` is the old name of `{new}`")).collect())
}

/// Returns options under which an error gives the parser's message and its line, as the message does not name the
/// field. Infinities and NaN reach the field, whose error states what it expects.
fn yaml_options() -> serde_saphyr::Options {
    serde_saphyr::options! { non_finite_float_policy: serde_saphyr::options::NonFiniteFloatPolicy::PassThrough }
}

fn yaml_reason(error: &serde_saphyr::Error, text: &str) -> String {
    let line = error.location().and_then(|at| text.lines().nth(usize::try_from(at.line()).ok()?.checked_sub(1)?));
    let message = error.without_snippet();
    line.map_or(message.to_string(), |line| format!("{message}, in `{}`", line.trim()))
}
