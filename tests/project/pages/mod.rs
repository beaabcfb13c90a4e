//! Pages that are written from the code: each is held to what the code says now.
//!
//! ```sh
//! make docs-data                                       # all of them are written again
//! cargo test --locked --all-features --test it pages   # which of them are stale
//! ```

use std::fs;
use std::path::Path;

use assay::report::plot::{Markup, Tone};

mod charts;
mod command_line;
mod limits;
mod schema;
mod spec;
mod verdicts;

/// The line below the heading of a page that is written from the code.
const WRITTEN: &str = "<!-- Written by `make docs-data`: edit the code that it is made from. -->";

/// Compares the file at `path` with `text`, or writes it where `ASSAY_BLESS` is set.
fn hold(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    let held = fs::read_to_string(path).unwrap_or_default();
    if held == text {
        return;
    }
    if std::env::var_os("ASSAY_BLESS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        return;
    }
    let first = held.lines().zip(text.lines()).position(|(held, made)| held != made);
    let line = first.unwrap_or_else(|| held.lines().count().min(text.lines().count()));
    let of = |text: &str| text.lines().nth(line).unwrap_or("no such line").to_string();
    panic!(
        "{}: got line {} `{}`, expected `{}`; `make docs-data` writes it again",
        path.display(),
        line + 1,
        of(&held),
        of(text)
    );
}

/// Returns `text` in lines of at most `width` characters, each of which begins with `indent` but the first.
fn wrapped(text: &str, indent: &str, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last().unwrap();
        let prefix = if lines.len() > 1 { indent.chars().count() } else { 0 };
        if !line.is_empty() && prefix + line.chars().count() + 1 + word.chars().count() > width {
            lines.push(String::new());
        }
        let line = lines.last_mut().unwrap();
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.join(&format!("\n{indent}"))
}

/// Returns the plot of a figure as a file of its own, with the report's colours for light and for dark.
fn standalone(figure: Markup) -> String {
    let figure = figure.into_string();
    let (_, svg) = figure.split_once("<svg").unwrap();
    let (svg, _) = svg.split_once("</svg>").unwrap();
    let (head, body) = svg.split_once('>').unwrap();
    // The report's colours, for light and for dark.
    let style = fs::read_to_string("crates/report/src/style.css").unwrap();
    let schemes = style.split(":root {").skip(1).map(|rest| {
        let colours = rest.split('}').next().unwrap().split(';').map(str::trim).filter(|rule| rule.starts_with("--"));
        format!(":root {{ {} }}", colours.collect::<Vec<_>>().join("; "))
    });
    let schemes: Vec<String> = schemes.take(2).collect();
    let rules = Tone::rules().replace("svg [", "[");
    let style = format!("{}\n@media (prefers-color-scheme: dark) {{ {} }}\n{rules}", schemes[0], schemes[1]);
    let ground = "<rect width=\"100%\" height=\"100%\" style=\"fill: var(--paper)\"/>";
    format!("<svg{head}>\n<style>\n{style}</style>\n{ground}\n{}\n</svg>\n", body.trim())
}
