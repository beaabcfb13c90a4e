//! The page of outputs, gates, edges, statuses and regimes, from the enums' own docs, with a plot of one row of each regime.

use std::fmt::Write as _;
use std::fs;

use assay::judge::generate::{Recipe, Regime};
use assay::problem::Dtype;
use assay::report::plot::{Axis, Curve, Markup, Tone, curves};
use assay::spec::LossSpec;

use super::schema::snake;
use super::{WRITTEN, hold, standalone, wrapped};

const FILE: &str = "docs/verdicts.md";

/// The entries of the row that is drawn, two tiles of 64 and one entry.
const ENTRIES: usize = 129;

#[test]
fn pages_verdicts_and_regimes_are_current() {
    let mut text = format!("# Outputs, gates, edges, statuses, regimes\n\n{WRITTEN}\n\n{HEAD}");
    for (heading, words, file, name) in LISTS {
        let _ = writeln!(text, "\n## {heading}\n\n{}\n", wrapped(words, "", 140));
        for (arm, docs) in arms(file, name) {
            if name != "Regime" {
                let _ = writeln!(text, "- {}", wrapped(&format!("`{arm}`: {docs}"), "    ", 140));
                continue;
            }
            let regime = Regime::ALL.into_iter().find(|regime| regime.to_string() == arm).unwrap();
            hold(format!("docs/regimes/{arm}.svg"), &drawing(regime));
            let _ = writeln!(text, "### {arm}\n\n{}\n", wrapped(&docs, "", 140));
            let alt = format!("One row of logits in the regime {arm}, by vocabulary entry");
            let _ = writeln!(text, "<figure class=\"row\" markdown>\n![{alt}](regimes/{arm}.svg)\n</figure>\n");
        }
    }
    hold(FILE, &(text.trim_end().to_string() + "\n"));
}

/// Each list of the page: its heading, what it is, and the enum whose docs it shows.
const LISTS: [(&str, &str, &str, &str); 5] = [
    ("Outputs", "A gate begins with the name of its output.", "crates/judge/src/gate.rs", "Output"),
    (
        "Gates",
        "The rest of a gate's name says how the output is compared: `dlogits row_l2`. Without it, each element is compared by itself.",
        "crates/judge/src/gate.rs",
        "Model",
    ),
    (
        "Edges",
        "Tokens at an edge have gates of their own, `dlogits at minus_infinity`. `--allow EDGE` waives one by its name.",
        "crates/judge/src/gate.rs",
        "Edge",
    ),
    ("Statuses", "Each gate ends in one of these.", "crates/schema/src/verdicts.rs", "Status"),
    (
        "Regimes",
        "A regime is a way of drawing logits: `--regimes peaked`, `regimes=[\"peaked\"]`. The pictures have one row of 129 entries, f32, seed 4, at \
         temperature 1; a gap is −∞.",
        "crates/judge/src/generate/regime.rs",
        "Regime",
    ),
];

/// Returns the arms of an enum, as files spell them, with their doc comments.
fn arms(file: &str, name: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(file).unwrap();
    let (_, body) = text.split_once(&format!("pub enum {name} {{\n")).unwrap();
    let body = body.split("\n}").next().unwrap();
    let (mut arms, mut docs) = (Vec::new(), Vec::new());
    for line in body.lines().map(str::trim) {
        if let Some(words) = line.strip_prefix("///") {
            docs.push(words.trim());
        } else if line.starts_with(char::is_uppercase) {
            arms.push((snake(line.trim_end_matches(',')), in_words(&docs.join(" "))));
            docs.clear();
        }
    }
    assert!(!arms.is_empty(), "{file}: {name}");
    arms
}

/// Returns a doc comment with links to arms as names of files.
fn in_words(docs: &str) -> String {
    let mut words = String::new();
    let mut rest = docs;
    while let Some((before, after)) = rest.split_once("[`") {
        let (code, after) = after.split_once("`]").unwrap();
        let _ = write!(words, "{before}`{}`", snake(code.rsplit("::").next().unwrap()));
        rest = after;
    }
    words + rest
}

/// Draws one row of logits of a regime as an SVG of its own.
fn drawing(regime: Regime) -> String {
    let recipe = Recipe {
        shape: [1, 1, ENTRIES],
        dtype: Dtype::F32,
        regime,
        seed: 4,
        old_logp_noise_scale: 0.3,
        masked_garbage: false,
    };
    let problem = recipe.problem(&LossSpec::default()).unwrap();
    let points = problem.logits.to_f64().iter().enumerate().map(|(entry, &logit)| (entry as f64, logit)).collect();
    let axis = Axis { format: |x| format!("{x:.0}"), from_zero: false };
    let small = Axis { format: |x| format!("{x:.2}"), from_zero: false };
    let axis = if regime == Regime::Small { small } else { axis };
    standalone(curves(&[Curve { tone: Tone::First, points }], &axis, &Markup::default()))
}

/// The beginning of the page.
const HEAD: &str = "\
For everybody who meets a name in a verdict: every name there is, with its meaning. How they work together is in
[How a kernel is judged](judging.md).
";
