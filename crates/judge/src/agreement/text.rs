//! An agreement in words, as a terminal shows it.

use std::fmt::Write as _;

use super::figures::{difference, size};
use assay_schema::agreement::{LogpAgreement, SideFinding, TokenPair};
use assay_schema::number::six;

/// The characters of a label at the start of a line.
const LABEL: usize = 12;

/// Concludes in one sentence what was found.
pub(super) fn conclusion(agreement: &LogpAgreement) -> String {
    let LogpAgreement { sides, nonfinite_tokens, tokens, .. } = agreement;
    let explained = explanation_of_sides(sides);
    if *nonfinite_tokens == 0 {
        return explained;
    }
    let nonfinite = format!("{nonfinite_tokens} of {tokens} tokens are NaN or infinite on one side at least");
    // Where rounding explains all other tokens, these are the finding.
    if sides.iter().all(|side| side.declared) { nonfinite } else { format!("{explained}; {nonfinite}") }
}

/// Concludes from what both sides compute.
fn explanation_of_sides(sides: &[SideFinding]) -> String {
    if sides.is_empty() {
        return "not judged: without logits only sizes and signs are known; give the logits, or hidden states and LM head".into();
    }
    let wrong: Vec<&SideFinding> = sides.iter().filter(|side| !side.declared).collect();
    let unexplained: Vec<&str> =
        wrong.iter().filter(|side| side.computes.is_empty()).map(|side| side.side.as_str()).collect();
    match (&wrong[..], &unexplained[..]) {
        ([], _) => "both sides are what they declare to be: the difference is rounding".into(),
        (_, []) => {
            let said: Vec<String> =
                wrong.iter().map(|side| format!("in the {}, {}", side.side, side.computes[0])).collect();
            said.join("; ")
        }
        (_, [one]) => format!(
            "the {one}'s numbers are not explained by the logits: its hidden states or weights are others, or two causes meet"
        ),
        _ => "neither side's numbers are explained by the logits: their hidden states or weights are others".into(),
    }
}

/// Writes an agreement for a terminal: the conclusion, what each side computes, the floor, the figures, and where it is worst.
pub fn agreement_text(agreement: &LogpAgreement) -> String {
    let mut text = String::new();
    let verdict = match agreement.agrees {
        Some(true) => "PASS",
        Some(false) => "FAIL",
        None => "NOT JUDGED",
    };
    let _ = writeln!(text, "{verdict}  {}\n", agreement.conclusion);
    for side in &agreement.sides {
        line(&mut text, &side.side, &finding(side));
        for other in side.computes.iter().skip(1) {
            line(&mut text, "", &format!("or {other}: the same numbers within the limits"));
        }
    }
    if let Some(floor) = &agreement.floor {
        let of = agreement.tokens - agreement.nonfinite_tokens;
        let text_of_floor = format!(
            "rounding alone may put the sides {} nats apart in the median, {} at most; {} of {of} tokens are farther apart",
            six(floor.median),
            six(floor.largest),
            floor.beyond
        );
        line(&mut text, "floor", &text_of_floor);
        let [low, high] = floor.bounds;
        let crossing =
            format!("rounding can carry at most {} tokens across the ratio's bounds {low} and {high}", floor.may_cross);
        line(&mut text, "", &crossing);
    }
    for trend in &agreement.trends {
        let grows = if trend.correlation > 0.0 { "grows" } else { "falls" };
        line(
            &mut text,
            "trend",
            &format!("the difference {grows} with {} (rank correlation {:.2})", trend.with, trend.correlation),
        );
    }
    let worst: Vec<&TokenPair> = agreement.worst.iter().chain(&agreement.nonfinite).collect();
    for (i, pair) in worst.into_iter().enumerate() {
        line(&mut text, if i == 0 { "worst" } else { "" }, &place(pair));
    }
    for (i, sequence) in agreement.sequences.iter().take(3).enumerate() {
        let label = if i == 0 { "sequences" } else { "" };
        line(
            &mut text,
            label,
            &format!("{}: mean |Δ| {} over {} tokens", sequence.sequence, six(sequence.mean), sequence.tokens),
        );
    }
    text.push('\n');
    for figure in &agreement.figures {
        let _ = writeln!(text, "{:<30} {:>12}  {}", figure.name, six(figure.value), figure.definition);
    }
    text
}

/// Says what one side computes.
fn finding(side: &SideFinding) -> String {
    match (&side.computes[..], side.declared, side.explained_error) {
        (_, true, Some(error)) => format!("what is declared; error / limit at most {}", six(error)),
        ([first, ..], false, Some(error)) => {
            format!(
                "{first}; error / limit at most {}, against what is declared {}",
                six(error),
                six(side.declared_error)
            )
        }
        _ => format!("nothing that is known; error / limit against what is declared {}", six(side.declared_error)),
    }
}

/// Writes one token: `[0,3]: trainer −1.25, sampler −1.5, apart by 0.25`.
fn place(pair: &TokenPair) -> String {
    let TokenPair { b, t, trainer, sampler, floor } = pair;
    let floor = floor.map_or(String::new(), |floor| format!(", {} times the floor", six(size(pair) / floor)));
    format!("[{b},{t}]: trainer {}, sampler {}, Δ = {}{floor}", six(*trainer), six(*sampler), six(difference(pair)))
}

fn line(text: &mut String, label: &str, value: &str) {
    let _ = writeln!(text, "{label:<LABEL$}{value}");
}
