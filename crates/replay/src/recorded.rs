//! [`RecordedValues`]: the numbers that are recorded with a problem.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use assay_fixture::ProblemFile;

use crate::ReplayError;

/// The `expected.…` entries of a file's metadata, ticked off as they are compared.
pub(crate) struct RecordedValues<'f> {
    path: &'f Path,
    entries: BTreeMap<&'f str, &'f str>,
    taken: BTreeSet<String>,
}

impl<'f> RecordedValues<'f> {
    pub(crate) fn read(file: &'f ProblemFile) -> Self {
        let entries =
            file.metadata().iter().filter_map(|(key, value)| Some((key.strip_prefix("expected.")?, value.as_str())));
        Self { path: file.file().path(), entries: entries.collect(), taken: BTreeSet::new() }
    }

    /// Returns the number recorded under `key`, once.
    pub(crate) fn take(&mut self, key: &str) -> Result<Option<f64>, ReplayError> {
        let Some(text) = self.entries.get(key) else { return Ok(None) };
        // A scalar of the logits alone is compared once, not once for each array of old log-probabilities.
        if !self.taken.insert(key.into()) {
            return Ok(None);
        }
        let number = text.parse().map_err(|_| {
            let reason = format!("metadata `expected.{key}`: got `{text}`, expected a number");
            ReplayError::Content { path: self.path.into(), reason: reason.into() }
        });
        number.map(Some)
    }

    /// The keys of numbers that were never compared; the other entries are text.
    pub(crate) fn rest(&self) -> impl Iterator<Item = &'f str> {
        let numbers = self.entries.iter().filter(|(_, text)| text.parse::<f64>().is_ok());
        numbers.map(|(key, _)| *key).filter(|key| !self.taken.contains(*key))
    }
}
