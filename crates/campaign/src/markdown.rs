//! Formats a campaign's report as Markdown, as for the summary of a job or a comment on a pull request.

use std::fmt::Write as _;

use assay_schema::campaign::{CampaignReport, FailureCause};

use crate::memory::memory;
use crate::text::{PICTURE_WIDTH, covered, invariance, problems, score, total};
use assay_core::text::markdown_escaped;

/// Formats the whole report: the verdict as a heading, then each cause with its values, and the place of its errors folded.
///
/// ```
/// use assay_campaign::{Campaign, Deck, LocalKernel, markdown};
/// use assay_core::problem::Problem;
/// use assay_core::spec::LossSpec;
/// use assay_native::Native;
///
/// let deck = Deck { cases: 2, wide: 0, ..Deck::default() };
/// let campaign = Campaign { deck, power: false, ..Campaign::new("native", LossSpec::default()) };
/// let native = Native::default();
/// let report = campaign.run(&mut LocalKernel::<Problem>(&native), &mut |_| ()).unwrap();
/// assert!(markdown(&report).starts_with("### PASS"));
/// ```
pub fn markdown(campaign: &CampaignReport) -> String {
    let mut text = format!("### {}\n", markdown_escaped(&total(campaign)));
    for cause in &campaign.causes {
        write_cause(&mut text, "", cause);
    }
    for cause in &campaign.allowed {
        write_cause(&mut text, "Allowed or noted: ", cause);
    }
    for skipped in &campaign.skipped {
        let _ = writeln!(text, "\nSkipped: {}: {}", problems(skipped.cases), markdown_escaped(&skipped.why));
    }
    if let Some(why) = &campaign.stopped {
        let _ = writeln!(
            text,
            "\nStopped after {} of {} problems: {}",
            campaign.tried,
            campaign.cases,
            markdown_escaped(why)
        );
    }
    let _ = writeln!(text, "\nCovered: {}.", markdown_escaped(&covered(campaign)));
    if !campaign.invariance.is_empty() {
        let _ = writeln!(text, "\nInvariance: {}.", markdown_escaped(&invariance(&campaign.invariance)));
    }
    if !campaign.memory.is_empty() {
        let _ = writeln!(text, "\nMemory: {}.", markdown_escaped(&memory(&campaign.memory)));
    }
    if let Some(power) = &campaign.power {
        let _ = writeln!(text, "\nMutants: {}.", markdown_escaped(&score(power)));
    }
    text
}

fn write_cause(text: &mut String, word: &str, cause: &FailureCause) {
    let FailureCause { gate, cases, sentence, in_common, picture, repro, values, .. } = cause;
    let _ = writeln!(
        text,
        "\n**{word}{}**\n\n{}, in {}.",
        markdown_escaped(sentence),
        markdown_escaped(gate),
        problems(*cases)
    );
    if let Some(property) = in_common {
        let _ = writeln!(text, "In common: {}.", markdown_escaped(property));
    }
    let rows = cause.value_rows();
    if !rows.is_empty() {
        text.push_str("\n| | problem | place | expected | got | error / limit |\n|---|---|---|--:|--:|--:|\n");
        for row in rows {
            let _ = writeln!(text, "| {} |", row.map(|cell| markdown_escaped(&cell)).join(" | "));
        }
    }
    if let Some(picture) = picture {
        let caption = format!("{}; {}", picture.caption(), picture.beyond_in_words());
        let _ = writeln!(text, "\n<details><summary>Where</summary>\n\n{}\n\n```text", markdown_escaped(&caption));
        for line in picture.lines(PICTURE_WIDTH) {
            let _ = writeln!(text, "{line}");
        }
        text.push_str("```\n\n</details>\n");
    }
    for (name, value) in [("Problem", repro), ("Its values", values)] {
        if let Some(value) = value {
            let _ = writeln!(text, "\n{name}: {}", markdown_escaped(value));
        }
    }
}
