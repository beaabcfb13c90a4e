//! JUnit XML of a campaign, of verdicts and of a suite, as services for continuous integration read it.

use std::fmt::Write as _;

use assay_schema::agreement::LogpAgreement;
use assay_schema::campaign::{CampaignReport, FailureCause};
use assay_schema::verdicts::{GateCheck, Status, Verdicts};

/// A test case of JUnit: a gate, a cause of failures, or a group of problems.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JunitCase {
    /// The name, which stays the same from run to run where the same is judged.
    pub name: String,
    /// The outcome of the case.
    pub outcome: JunitOutcome,
}

/// The outcome of a test case of JUnit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JunitOutcome {
    /// Every value is within its limit.
    Passed,
    /// A value is wrong, or there is no answer.
    Failed {
        /// The failure in one line.
        message: String,
        /// The details, any number of lines.
        text: String,
    },
    /// Nothing was decided, or the failure is allowed.
    Skipped {
        /// The reason in one line.
        why: String,
    },
}

impl JunitCase {
    /// Returns a case that passed.
    pub fn passed(name: impl Into<String>) -> Self {
        Self { name: name.into(), outcome: JunitOutcome::Passed }
    }

    /// Returns a case that failed.
    pub fn failed(name: impl Into<String>, message: impl Into<String>, text: impl Into<String>) -> Self {
        Self { name: name.into(), outcome: JunitOutcome::Failed { message: message.into(), text: text.into() } }
    }

    /// Returns a case in which nothing was decided.
    pub fn skipped(name: impl Into<String>, why: impl Into<String>) -> Self {
        Self { name: name.into(), outcome: JunitOutcome::Skipped { why: why.into() } }
    }
}

/// Formats one suite of test cases; `seconds` is what they took together, if that is known.
///
/// ```
/// use assay_report::junit::{JunitCase, junit};
///
/// let xml = junit("my <kernel>", None, &[JunitCase::passed("logp"), JunitCase::skipped("loss", "not in the candidate")]);
/// assert!(xml.contains(r#"<testsuite name="my &lt;kernel&gt;" tests="2" failures="0" errors="0" skipped="1">"#));
/// ```
pub fn junit(suite: &str, seconds: Option<f64>, cases: &[JunitCase]) -> String {
    let count = |is: fn(&JunitOutcome) -> bool| cases.iter().filter(|case| is(&case.outcome)).count();
    let failed = count(|outcome| matches!(outcome, JunitOutcome::Failed { .. }));
    let skipped = count(|outcome| matches!(outcome, JunitOutcome::Skipped { .. }));
    let time = seconds.map_or(String::new(), |seconds| format!(r#" time="{seconds:.3}""#));
    let (name, tests) = (escaped(suite), cases.len());
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(xml, r#"<testsuites name="assay" tests="{tests}" failures="{failed}" errors="0"{time}>"#);
    let counts = format!(r#"tests="{tests}" failures="{failed}" errors="0" skipped="{skipped}"{time}"#);
    let _ = writeln!(xml, r#"  <testsuite name="{name}" {counts}>"#);
    for case in cases {
        let _ = write!(xml, r#"    <testcase classname="{name}" name="{}""#, escaped(&case.name));
        match &case.outcome {
            JunitOutcome::Passed => xml.push_str("/>\n"),
            JunitOutcome::Failed { message, text } => {
                let (message, text) = (escaped(message), escaped(text));
                let _ = writeln!(xml, "><failure message=\"{message}\" type=\"assay\">{text}</failure></testcase>");
            }
            JunitOutcome::Skipped { why } => {
                let _ = writeln!(xml, "><skipped message=\"{}\"/></testcase>", escaped(why));
            }
        }
    }
    xml + "  </testsuite>\n</testsuites>\n"
}

/// Lists the cases of a campaign: every output that was judged and did not fail, every cause of failures, and every
/// group of problems that was skipped. Allowed causes are skipped cases. A case failed exactly if the campaign did.
pub fn campaign_cases(campaign: &CampaignReport) -> Vec<JunitCase> {
    let mut cases = Vec::new();
    for (name, outputs) in judged_outputs(campaign) {
        // A gate's name begins with its output: `dlogits row_l2`. An output that fails has its causes instead.
        let is_of = |cause: &FailureCause| cause.gate.split_whitespace().next().is_some_and(|of| outputs.contains(&of));
        if !campaign.causes.iter().any(is_of) {
            cases.push(JunitCase::passed(name));
        }
    }
    for cause in &campaign.causes {
        cases.push(JunitCase::failed(case_name(cause), cause.sentence.clone(), details(cause)));
    }
    for cause in &campaign.allowed {
        cases.push(JunitCase::skipped(case_name(cause), format!("allowed: {}", cause.sentence)));
    }
    for skipped in &campaign.skipped {
        cases.push(JunitCase::skipped(format!("problems skipped: {}", skipped.why), problems(skipped.cases)));
    }
    if !campaign.passed && campaign.causes.is_empty() {
        let why = campaign.stopped.clone().unwrap_or_else(|| "no problem was judged".into());
        let tried = format!("{} of {} problems were tried", campaign.tried, campaign.cases);
        cases.push(JunitCase::failed("campaign", why, tried));
    }
    cases
}

/// Lists the names of the outputs that were judged, each with the beginnings of its gates; nothing if no problem passed.
fn judged_outputs(campaign: &CampaignReport) -> Vec<(&str, Vec<&str>)> {
    // A kernel that crashes on every problem returned no output that could be right.
    if campaign.failed >= campaign.tried {
        return Vec::new();
    }
    let loss = (!campaign.from_cotangents).then(|| ("loss", vec!["loss"]));
    let gradient = ("gradient", vec!["dlogits", "dhidden", "dlm_head"]);
    let optional = campaign.outputs.iter().map(|output| (output.as_str(), vec![output.as_str()]));
    loss.into_iter().chain([gradient]).chain(optional).collect()
}

/// Lists the cases of verdicts: every gate, and every check that was not made. A case failed exactly if the verdicts did.
pub fn verdict_cases(verdicts: &Verdicts) -> Vec<JunitCase> {
    let mut cases: Vec<JunitCase> = verdicts.checks.iter().map(|check| gate_case(check, &verdicts.diagnoses)).collect();
    cases.extend(verdicts.ignored.iter().map(|ignored| JunitCase::skipped(ignored.what.clone(), ignored.why.clone())));
    if !verdicts.pass && !verdicts.checks.iter().any(|check| check.verdict.failed()) {
        cases.push(JunitCase::failed("verdict", "no gradient was compared", ""));
    }
    cases
}

/// Returns the case of two programs' log-probabilities, with the whole comparison as its `text`.
pub fn agreement_case(agreement: &LogpAgreement, text: &str) -> JunitCase {
    match agreement.agrees {
        Some(true) => JunitCase::passed("agreement"),
        Some(false) => JunitCase::failed("agreement", agreement.conclusion.clone(), text),
        None => JunitCase::skipped("agreement", agreement.conclusion.clone()),
    }
}

fn gate_case(check: &GateCheck, diagnoses: &[String]) -> JunitCase {
    let name = format!("{}, {}: {}", check.fixture, check.run(), check.output);
    match check.verdict {
        Status::Pass => JunitCase::passed(name),
        Status::Fail | Status::Nonfinite => {
            let times = check.error_over_limit.map(|times| format!(", {times:.4} times the limit"));
            let place = if check.at.is_empty() { String::new() } else { format!(" at {}", check.at) };
            let word = if check.verdict == Status::Fail { "beyond its limit" } else { "NaN or ∞" };
            let message = format!("{} {word}{place}{}", check.output, times.unwrap_or_default());
            let number = |number: Option<f64>| number.map_or("–".into(), |number| format!("{number:e}"));
            let numbers = format!("error {}, limit {}\n", number(check.worst), number(check.limit));
            JunitCase::failed(name, message, numbers + &diagnoses.join("\n"))
        }
        Status::NotCompared | Status::Waived => JunitCase::skipped(name, check.verdict.word()),
    }
}

fn case_name(cause: &FailureCause) -> String {
    format!("{}: {}", cause.gate, cause.sentence)
}

fn problems(count: u64) -> String {
    if count == 1 { "1 problem".into() } else { format!("{count} problems") }
}

/// Lists the numbers of a cause, a line each.
fn details(cause: &FailureCause) -> String {
    let mut text = format!("{} failed, first {}\n", problems(cause.cases), cause.first);
    if let Some(property) = &cause.in_common {
        let _ = writeln!(text, "in common: {property}");
    }
    for [which, problem, place, expected, actual, over] in cause.value_rows() {
        let _ =
            writeln!(text, "{which}: {problem} at {place}: expected {expected}, got {actual}, error / limit {over}");
    }
    for diagnosis in &cause.diagnoses {
        let _ = writeln!(text, "{diagnosis}");
    }
    for (label, value) in [("fault", &cause.fault), ("problem", &cause.repro), ("values", &cause.values)] {
        if let Some(value) = value {
            let _ = writeln!(text, "{label}: {value}");
        }
    }
    text
}

/// Escapes text for an attribute or an element. XML 1.0 has no way to write most control characters: they become U+FFFD.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // As they are, a parser would take them for blanks within an attribute.
            '\n' => escaped.push_str("&#10;"),
            '\t' => escaped.push_str("&#9;"),
            '\r' => escaped.push_str("&#13;"),
            c if c.is_ascii_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}
