//! Formats a campaign's report for a terminal: per cause one sentence, the values, a picture, and code that shows it again.

use std::fmt::Write as _;

use crate::memory::{apart_from_memory, memory};
use crate::neighbours::short_name;
use assay_schema::campaign::{
    CampaignReport, CatchingOption, DeckCoverage, FailureCause, MutantName, MutationScore, VocabularyCost,
};
use assay_schema::invariance::RelationFinding;
use assay_schema::number::quotient;
use comfy_table::{CellAlignment, Table, presets::NOTHING};
use textwrap::Options;

/// The number of mutants that are named; the others are only counted.
const LISTED: usize = 3;

/// The width of a terminal that is taken for granted.
const WIDTH: usize = 80;

/// The width of a picture, four characters from the left.
pub(crate) const PICTURE_WIDTH: usize = WIDTH - 4;

/// The width of a label with the space after it.
const LABEL: usize = 13;

/// The parts of a report that are formatted.
#[derive(Clone, Debug, Default)]
pub struct TextForm {
    /// Whether inputs, bits, roundings, and all mutants that fail alike are listed.
    pub details: bool,
    /// The call of the kernel in Python, such as `my_kernel(problem)`; `None` if it is not a function of a problem.
    pub python_call: Option<String>,
}

/// Formats the whole report: every cause, the coverage, the mutation score, and a final line with the verdict.
pub fn text(campaign: &CampaignReport, form: &TextForm) -> String {
    let mut text = String::new();
    for cause in &campaign.causes {
        write_cause(&mut text, "FAIL", cause, form);
    }
    for cause in &campaign.allowed {
        write_cause(&mut text, if is_note(cause) { "NOTE" } else { "ALLOWED" }, cause, form);
    }
    for skipped in &campaign.skipped {
        write_line(&mut text, "", "skipped", &format!("{}: {}", problems(skipped.cases), skipped.why));
    }
    if let Some(why) = &campaign.stopped {
        let after = format!("after {} of {} problems: {why}", campaign.tried, campaign.cases);
        write_line(&mut text, "", "stopped", &after);
    }
    write_line(&mut text, "", "covered", &covered(campaign));
    if form.details {
        write_line(&mut text, "", "tokens", &tokens_covered(campaign));
        write_line(&mut text, "", "time", &costs(campaign));
    }
    if !campaign.invariance.is_empty() {
        write_line(&mut text, "", "invariance", &invariance(&campaign.invariance));
    }
    if !campaign.memory.is_empty() {
        write_line(&mut text, "", "memory", &memory(&campaign.memory));
    }
    if let Some(power) = &campaign.power {
        write_line(&mut text, "", "mutants", &score(power));
    }
    text + &total(campaign)
}

/// Writes a line with its label, wrapped; `indent` is before every line.
fn write_line(text: &mut String, indent: &str, label: &str, value: &str) {
    let rest = format!("{indent}{:LABEL$}", "");
    let first = format!("{indent}{label:<LABEL$}");
    // A path or a number is never broken.
    let options = Options::new(WIDTH).initial_indent(&first).subsequent_indent(&rest).break_words(false);
    for line in textwrap::wrap(value, options.word_splitter(textwrap::WordSplitter::NoHyphenation)) {
        let _ = writeln!(text, "{line}");
    }
}

/// Writes a number of problems: `1 problem`, `7 problems`.
pub(crate) fn problems(count: u64) -> String {
    if count == 1 { "1 problem".into() } else { format!("{count} problems") }
}

/// Returns the last line: `PASS  k: 200 problems, …`
pub(crate) fn total(campaign: &CampaignReport) -> String {
    let CampaignReport { passed, kernel, grade, seed, packed, tried, failed, allowed, seconds, coverage, .. } =
        campaign;
    let verdict = if *passed { "PASS" } else { "FAIL" };
    let packed = if *packed { " packed" } else { "" };
    let mut line =
        format!("{verdict}  {kernel}: {tried}{packed} problems at grade {grade}, seed {seed}, {failed} failed");
    let (causes, of_memory) = apart_from_memory(campaign);
    if causes > 0 {
        let _ = write!(line, " by {causes} {}", if causes == 1 { "cause" } else { "causes" });
    }
    line += &of_memory;
    let notes = allowed.iter().filter(|cause| is_note(cause)).count();
    for (count, word) in
        [(allowed.len() - notes, "allowed"), (notes, "noted")].into_iter().filter(|(count, _)| *count > 0)
    {
        let _ = write!(line, ", {count} {word}");
    }
    // A campaign that tested nothing must not read as a pass.
    if *tried == 0 {
        line += "; no problem was judged";
    } else if coverage.with_gradient == 0 {
        line += "; no token had a gradient";
    }
    format!("{line}, {seconds:.1} s\n")
}

/// Whether a cause is a note on what a kernel does with masked tokens, which nobody has to allow.
fn is_note(cause: &FailureCause) -> bool {
    cause.gate == "masked-garbage"
}

fn write_cause(text: &mut String, word: &str, cause: &FailureCause, form: &TextForm) {
    let FailureCause {
        gate, cases, sentence, first, in_common, like, diagnoses, computes, verdict, fault, worst, ..
    } = cause;
    // The sentence is the headline; what it says is not said again below it.
    let options = Options::new(WIDTH).subsequent_indent("      ").break_words(false);
    for line in textwrap::wrap(&format!("{word}  {sentence}"), options) {
        let _ = writeln!(text, "{line}");
    }
    write_line(text, "  ", "gate", &format!("{gate}, in {}", problems(*cases)));
    if let Some(property) = in_common {
        write_line(text, "  ", "in common", property);
    }
    // Several losses are an answer only if each has these numbers on every problem that was tried.
    if cause.computes_one_of && computes.len() > 1 {
        let others: Vec<String> = computes[1..].iter().map(|names| short_name(names)).collect();
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        let others = format!("{}; no problem that was tried distinguishes them", shortened(&others));
        write_line(text, "  ", "or of", &others);
    }
    for diagnosis in diagnoses.iter().filter(|diagnosis| *diagnosis != sentence) {
        write_line(text, "  ", "also", diagnosis);
    }
    let listed = if form.details { like.len() } else { 1 };
    for MutantName { mutant, does } in like.iter().take(listed) {
        let does = if does == sentence { String::new() } else { format!(": {does}") };
        write_line(text, "  ", "like mutant", &format!("{mutant}{does}"));
    }
    if like.len() > listed {
        let others: Vec<&str> = like[listed..].iter().map(|name| name.mutant.as_str()).collect();
        write_line(text, "  ", "or", &shortened(&others));
    }
    if let Some(rest) = fault.as_ref().and_then(|fault| fault.split_once('\n')) {
        for line in rest.1.lines() {
            let _ = writeln!(text, "  │ {line}");
        }
    }
    write_values(text, cause);
    if let Some(picture) = &cause.picture {
        let _ = writeln!(text);
        write_line(text, "  ", "where", &format!("{}; {}", picture.caption(), picture.beyond_in_words()));
        for line in picture.lines(PICTURE_WIDTH) {
            let _ = writeln!(text, "    {line}");
        }
    }
    if form.details {
        let _ = writeln!(text);
        write_line(text, "  ", "first", first);
        if let Some(worst) = worst {
            write_line(text, "  ", "worst", &worst.problem);
        }
        let lines = verdict.iter().flat_map(|verdict| verdict.lines.iter().chain(&verdict.details));
        for line in lines {
            write_line(text, "  ", &line.name, &line.text);
        }
    }
    write_example(text, cause, form);
    let _ = writeln!(text);
}

/// Writes the table of a cause's values, or its smallest problem if it has no values.
fn write_values(text: &mut String, cause: &FailureCause) {
    let rows = cause.value_rows();
    if rows.is_empty() {
        write_line(text, "  ", "smallest", &cause.problem);
        return;
    }
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(["", "problem", "place", "expected", "got", "error / limit"]).add_rows(rows);
    for column in 3..6 {
        table.column_mut(column).expect("the header has six columns").set_cell_alignment(CellAlignment::Right);
    }
    let _ = writeln!(text);
    for line in table.to_string().lines() {
        let _ = writeln!(text, " {}", line.trim_end());
    }
}

/// Writes code that shows the smallest problem again, with its values if they are few.
fn write_example(text: &mut String, cause: &FailureCause, form: &TextForm) {
    let mut lines = Vec::new();
    match (&cause.repro, &form.python_call) {
        (Some(repro), Some(call)) => {
            // A JSON string is one of Python too, whatever is in the path.
            lines.push(format!("problem = assay.load({})", serde_json::Value::from(repro.as_str())));
            lines.push(format!("problem.check({call}).raise_for_failure()"));
        }
        (Some(repro), None) => lines.push(format!("{repro}, which the next campaign tries first")),
        (None, _) => {}
    }
    if lines.is_empty() && cause.values.is_none() {
        return;
    }
    let _ = writeln!(text);
    for (line, label) in lines.iter().zip(["try again", ""]) {
        let _ = writeln!(text, "  {label:<LABEL$}{line}");
    }
    if let Some(values) = &cause.values {
        write_line(text, "  ", "its values", values);
    }
}

/// `a, b, c and 2 more`
fn shortened(names: &[&str]) -> String {
    let (listed, more) = names.split_at(names.len().min(LISTED));
    if more.is_empty() { listed.join(", ") } else { format!("{} and {} more", listed.join(", "), more.len()) }
}

/// `62 of 62 features of the deck; 812 tokens that count, 700 with a gradient`
pub(crate) fn covered(campaign: &CampaignReport) -> String {
    let DeckCoverage { tokens, with_gradient, features, .. } = &campaign.coverage;
    let missed: Vec<&str> = features.iter().filter(|row| row.problems == 0).map(|row| row.feature.as_str()).collect();
    let dealt = match missed.len() {
        0 if features.is_empty() => String::new(),
        0 => format!("all {} features of the deck; ", features.len()),
        count => {
            format!(
                "{} of {} features of the deck, not {}; ",
                features.len() - count,
                features.len(),
                shortened(&missed)
            )
        }
    };
    format!("{dealt}{tokens} tokens that count, {with_gradient} with a gradient")
}

/// Describes the tokens by what kernels branch on: the clip, the sign of the advantage, and the tiles at either end.
fn tokens_covered(campaign: &CampaignReport) -> String {
    let DeckCoverage { clipped, advantages, first_and_last_tile, empty_rows, .. } = &campaign.coverage;
    // Log-probabilities alone have no clip and no advantage.
    let loss = if campaign.from_cotangents {
        String::new()
    } else {
        format!(
            "{} clipped low and {} high, {} with A > 0 and {} with A < 0; ",
            clipped[0], clipped[1], advantages[0], advantages[1]
        )
    };
    format!(
        "{loss}{} targets in the first tile of 128 vocabulary entries and {} in the last; {empty_rows} sequences without a token",
        first_and_last_tile[0], first_and_last_tile[1],
    )
}

/// `V ≤ 1024: 110 problems in 0.21 s; V ≤ 16385: …`
fn costs(campaign: &CampaignReport) -> String {
    let of_range = |cost: &VocabularyCost| {
        format!("V ≤ {}: {} in {:.2} s", cost.vocabulary, problems(cost.problems), cost.seconds)
    };
    campaign.costs.iter().map(of_range).collect::<Vec<_>>().join("; ")
}

/// `53 of the 54 wrong kernels that show …; missed: …; grade=exact would reject …`
pub(crate) fn score(power: &MutationScore) -> String {
    let MutationScore { rejected, exercised, accepted, cases, options } = power;
    let mut line = format!(
        "{rejected} of the {exercised} wrong kernels that show under this loss are rejected ({cases} problems)"
    );
    if !accepted.is_empty() {
        let missed: Vec<&str> = accepted.iter().map(|name| name.mutant.as_str()).collect();
        let _ = write!(line, "; missed: {}", missed.join(", "));
    }
    for CatchingOption { option, mutants } in options {
        let _ = write!(line, "; {option} would reject {}", mutants.join(", "));
    }
    line
}

/// `same bits in repeat, order (44 problems); batch: other bits in 41 of 112 tokens, …; not asked: chunk (…)`
pub(crate) fn invariance(findings: &[RelationFinding]) -> String {
    let asked = || findings.iter().filter(|finding| finding.problems > 0);
    let same: Vec<&RelationFinding> = asked().filter(|finding| finding.other_bits == 0).collect();
    let mut parts = Vec::new();
    if !same.is_empty() {
        let names: Vec<&str> = same.iter().map(|finding| finding.relation.name()).collect();
        let count = same.iter().map(|finding| finding.problems).sum();
        parts.push(format!("same bits in {} ({})", names.join(", "), problems(count)));
    }
    for finding in asked().filter(|finding| finding.other_bits > 0) {
        let RelationFinding { relation, other_bits, tokens, outputs, difference_over_limit, .. } = finding;
        let mut part = format!("{relation}: other bits of {} in {other_bits} of {tokens} tokens", outputs.join(", "));
        if let Some(over) = difference_over_limit {
            let _ = write!(part, ", at most {} of the limit", quotient(*over));
        }
        parts.push(part);
    }
    let by_design: Vec<String> = asked()
        .filter(|finding| !finding.by_design.is_empty())
        .map(|finding| format!("{} in {}", finding.by_design.join(", "), finding.relation))
        .collect();
    if !by_design.is_empty() {
        parts.push(format!("changed by design: {}", by_design.join(", ")));
    }
    let not_asked: Vec<String> = findings
        .iter()
        .filter(|finding| finding.problems == 0)
        .map(|finding| {
            let why = finding.not_asked.as_deref().unwrap_or("no problem passed to ask it of");
            format!("{} ({why})", finding.relation)
        })
        .collect();
    if !not_asked.is_empty() {
        parts.push(format!("not asked: {}", not_asked.join(", ")));
    }
    parts.join("; ")
}
