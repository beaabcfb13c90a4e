//! Formats a campaign's report for a terminal.

use std::fmt::Write as _;

use assay_schema::campaign::{CampaignReport, DeckCoverage, FailureCause, MutantName, MutationScore, WorstProblem};

/// The number of mutants that are named; the others are only counted.
const LISTED: usize = 3;

/// Formats the whole report: every cause, the coverage, the mutation score, and a final line with the verdict.
pub fn text(campaign: &CampaignReport) -> String {
    let mut text = String::new();
    for cause in &campaign.causes {
        write_cause(&mut text, "CAUSE", cause);
    }
    for cause in &campaign.allowed {
        write_cause(&mut text, if is_note(cause) { "NOTE" } else { "allowed" }, cause);
    }
    for skipped in &campaign.skipped {
        let _ = writeln!(text, "skipped  {} problems: {}", skipped.cases, skipped.why);
    }
    if let Some(why) = &campaign.stopped {
        let _ = writeln!(text, "stopped  after {} of {} problems: {why}", campaign.tried, campaign.cases);
    }
    let _ = writeln!(text, "covered  {}", covered(&campaign.coverage));
    if let Some(power) = &campaign.power {
        let _ = writeln!(text, "power    {}", score(power));
    }
    text + &total(campaign)
}

/// `PASS  k: 200 problems, …`
fn total(campaign: &CampaignReport) -> String {
    let CampaignReport {
        passed, kernel, grade, seed, packed, tried, failed, causes, allowed, seconds, coverage, ..
    } = campaign;
    let verdict = if *passed { "PASS" } else { "FAIL" };
    let packed = if *packed { " packed" } else { "" };
    let mut line =
        format!("{verdict}  {kernel}: {tried}{packed} problems at grade {grade}, seed {seed}, {failed} failed");
    if !causes.is_empty() {
        let _ = write!(line, " by {} {}", causes.len(), if causes.len() == 1 { "cause" } else { "causes" });
    }
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

fn write_cause(text: &mut String, word: &str, cause: &FailureCause) {
    let FailureCause {
        gate,
        cases,
        first,
        problem,
        worst,
        in_common,
        like,
        diagnoses,
        computes,
        computes_one_of,
        verdict,
        fault,
        repro,
        ..
    } = cause;
    let problems = if *cases == 1 { "problem" } else { "problems" };
    let alike = if like.is_empty() { String::new() } else { format!(", like {}", names(like)) };
    let _ = writeln!(text, "{word} {gate}: {cases} {problems}{alike}");
    // First the extents of the failure, then its explanations, each on a line with its own label.
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "  {name:<9} {value}");
    };
    line("first", first);
    line("smallest", problem);
    if let Some(WorstProblem { problem, error_over_limit }) = worst {
        line("worst", &format!("{error_over_limit:.4} times the limit in {problem}"));
    }
    if let Some(property) = in_common {
        line("common", property);
    }
    if let Some(fault) = fault {
        line("fault", fault);
    }
    for MutantName { mutant, does } in like.iter().take(LISTED) {
        line("like", &format!("{mutant}: {does}"));
    }
    for diagnosis in diagnoses {
        line("likely", diagnosis);
    }
    // Several losses are an answer only if each has these numbers on every problem that was tried.
    let listed: Vec<String> = computes.iter().map(|names| names.join(", which is ")).collect();
    match listed.as_slice() {
        [] => {}
        [one] => line("computes", &format!("the numbers of {one}")),
        several if *computes_one_of => {
            let listed = several.join("; or ");
            line("computes", &format!("the numbers of {listed}; no problem that was tried tells them apart"));
        }
        several => line("computes", &format!("the numbers of {}", several.join("; or "))),
    }
    for of in verdict.iter().flat_map(|verdict| &verdict.lines).filter(|of| !of.text.is_empty()) {
        line(&of.name, &of.text);
    }
    if let Some(repro) = repro {
        line("repro", repro);
    }
}

/// `a, b, c and 2 more`
fn names(like: &[MutantName]) -> String {
    let names: Vec<&str> = like.iter().map(|name| name.mutant.as_str()).collect();
    if names.len() > LISTED { shortened(&names) } else { names.join(" or ") }
}

/// `a, b, c and 2 more`
fn shortened(names: &[&str]) -> String {
    let (listed, more) = names.split_at(names.len().min(LISTED));
    if more.is_empty() { listed.join(", ") } else { format!("{} and {} more", listed.join(", "), more.len()) }
}

/// `812 tokens that count, …`
pub fn covered(coverage: &DeckCoverage) -> String {
    let DeckCoverage { tokens, with_gradient, clipped, advantages, first_and_last_tile, empty_rows, features } =
        coverage;
    let missed: Vec<&str> = features.iter().filter(|row| row.problems == 0).map(|row| row.feature.as_str()).collect();
    let dealt = match missed.len() {
        0 if features.is_empty() => String::new(),
        0 => format!("; all {} features of the deck", features.len()),
        _ => format!(
            "; {} of {} features of the deck, not {}",
            features.len() - missed.len(),
            features.len(),
            shortened(&missed)
        ),
    };
    format!(
        "{tokens} tokens that count, {with_gradient} with a gradient, {} clipped low and {} high, {} with A > 0 and {} with \
         A < 0; {} targets in the first tile of 128 columns and {} in the last; {empty_rows} sequences without a token{dealt}",
        clipped[0], clipped[1], advantages[0], advantages[1], first_and_last_tile[0], first_and_last_tile[1],
    )
}

/// `53 of 54 wrong kernels would be rejected; not …`
fn score(power: &MutationScore) -> String {
    let MutationScore { rejected, exercised, accepted, cases } = power;
    let mut line = format!(
        "{rejected} of the {exercised} wrong kernels that show under this loss are rejected ({cases} problems)"
    );
    if !accepted.is_empty() {
        let _ = write!(line, "; accepted: {}", names(accepted));
    }
    line
}
