//! Results of other commands, read from files that nobody vouches for.

use std::io;
use std::path::Path;

use assay_schema::ab::AbComparison;
use assay_schema::agreement::LogpAgreement;
use assay_schema::bench::BenchFigures;
use assay_schema::campaign::CampaignReport;
use assay_schema::compile::{TpuProgramReport, TpuTable};
use assay_schema::gpu;
use assay_schema::mutants::MutationReport;
use assay_schema::peers::PeersReport;
use assay_schema::programs::ProgramBench;
use assay_schema::verdicts::Verdicts;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::number::clipped;
use super::part::ReportPart;
use assay_core::files::read_named;
use assay_core::text::{ForeignLines, ForeignText, ShownPath};

/// Longest input accepted, in bytes. A replay of everything needs one or two million.
pub const LONGEST: u64 = 16 << 20;

/// A file that cannot become a part of a report. The message is one line and starts with the file.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// The operating system refused to read the file.
    #[error("{path}: cannot read: {reason}")]
    Io {
        /// The path of the file.
        path: ShownPath,
        /// The operating system's error.
        reason: io::Error,
    },
    /// The file is no result of a command, or not one that has a part in a report.
    #[error("{path}: got {given}, expected {expected}")]
    Invalid {
        /// The path of the file.
        path: ShownPath,
        /// The value that the file contains.
        given: ForeignText,
        /// The values that are valid.
        expected: ForeignLines,
    },
}

/// One result, as `--json` of its command wrote it.
pub struct Input {
    pub(super) name: String,
    /// The heading of the result's part of the page.
    pub(super) title: &'static str,
    pub(super) command: Option<String>,
    pub(super) part: Box<dyn ReportPart>,
}

type Parse = fn(Value) -> serde_json::Result<Box<dyn ReportPart>>;

fn parse<P: ReportPart + DeserializeOwned + 'static>(value: Value) -> serde_json::Result<Box<dyn ReportPart>> {
    Ok(Box::new(serde_json::from_value::<P>(value)?))
}

/// The key that only results of a kind have, the commands that write them, the heading and the parser.
const KINDS: [(&str, &str, &str, Parse); 12] = [
    ("checks", "replay, gradcheck or judge", "Verdicts", parse::<Verdicts>),
    ("step_s_p50", "bench", "Time and memory", parse::<BenchFigures>),
    ("cycles", "compile", "Compiled for a TPU", parse::<TpuProgramReport>),
    ("rows", "compile --table", "Compiled for a TPU", parse::<TpuTable>),
    ("launches", "compile", "Compiled for a GPU", parse::<gpu::GpuProgramReport>),
    ("gpu_rows", "compile --table gpus", "Compiled for a GPU", parse::<gpu::GpuTable>),
    ("mutants", "mutants", "Wrong kernels", parse::<MutationReport>),
    ("files", "peers", "Recorded runs of others", parse::<PeersReport>),
    ("arms", "ab", "Kernel off and on", parse::<AbComparison>),
    ("causes", "check", "Campaign", parse::<CampaignReport>),
    ("programs", "bench --exec", "Programs side by side", parse::<ProgramBench>),
    ("agrees", "compare-logp", "Trainer and sampler", parse::<LogpAgreement>),
];

impl Input {
    /// Reads one result.
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// use assay_report::Input;
    ///
    /// let Err(error) = Input::read(Path::new("no/such.json")) else { panic!("there is no such file") };
    /// assert!(error.to_string().starts_with("no/such.json: "));
    /// ```
    ///
    /// # Errors
    /// [`InputError::Io`]; [`InputError::Invalid`] where the file is longer than [`LONGEST`], no JSON object, of no known
    /// kind, or lacks what its kind has.
    pub fn read(path: &Path) -> Result<Self, InputError> {
        let io = |reason| InputError::Io { path: path.into(), reason };
        Self::parse(path, &read_named(path, LONGEST).map_err(io)?)
    }

    /// Parses bytes that were read already, under the name `path`.
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// use assay_report::Input;
    ///
    /// assert!(Input::parse(Path::new("replay.json"), br#"{"pass": true, "checks": []}"#).is_ok());
    /// let Err(error) = Input::parse(Path::new("other.json"), b"{}") else { panic!("no command writes that") };
    /// assert!(error.to_string().contains("got an empty object"));
    /// ```
    ///
    /// # Errors
    /// [`InputError::Invalid`] if they are no result of a command.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, InputError> {
        let invalid = |given: String, expected: String| InputError::Invalid {
            path: path.into(),
            given: given.into(),
            expected: expected.into(),
        };
        if bytes.len() as u64 > LONGEST {
            return Err(invalid(format!("more than {LONGEST} bytes"), "a shorter result".into()));
        }
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| invalid(format!("`{}`", clipped(&error.to_string())), "JSON".into()))?;
        let kind = KINDS.iter().find(|(key, ..)| value.get(key).is_some());
        let Some((_, commands, title, parse)) = kind else {
            let kinds: Vec<String> = KINDS.iter().map(|(key, commands, ..)| format!("{commands} (`{key}`)")).collect();
            let expected = format!("the JSON of an `assay` command: {}", kinds.join(", "));
            return Err(invalid(described(&value), expected));
        };
        let command = value.get("command").and_then(Value::as_str).map(str::to_owned);
        let part = parse(value).map_err(|error| {
            invalid(format!("`{}`", clipped(&error.to_string())), format!("what `assay {commands} --json` writes"))
        })?;
        Ok(Self { name: ShownPath(path).to_string(), title, command, part })
    }
}

/// Names the kind of a JSON value, for an error message.
fn described(value: &Value) -> String {
    const SHOWN: usize = 6;
    match value {
        Value::Object(map) if map.is_empty() => "an empty object".into(),
        Value::Object(map) => {
            let keys: Vec<String> = map.keys().take(SHOWN).map(|key| format!("`{}`", clipped(key))).collect();
            let more = if map.len() > SHOWN { ", …" } else { "" };
            format!("an object with {}{more}", keys.join(", "))
        }
        Value::Array(_) => "an array".into(),
        _ => "a single value".into(),
    }
}
