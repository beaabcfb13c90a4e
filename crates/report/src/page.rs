//! The page around the parts.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::input::Input;
use super::number::clipped;
use super::plot::Tone;

const STYLE: &str = include_str!("style.css");

/// The page, whole. `command` made it.
///
/// ```
/// use std::path::Path;
///
/// use assay_report::{Input, render};
///
/// let json = br#"{"command": "assay replay", "pass": true, "checks": []}"#;
/// let input = Input::parse(Path::new("replay.json"), json).unwrap();
/// let page = render(&[input], "assay report replay.json");
/// assert!(page.starts_with("<!DOCTYPE html>") && page.contains("assay replay"));
/// ```
pub fn render(inputs: &[Input], command: &str) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                // The page shows text of foreign files. Nothing can be loaded or run from it, whatever they contain:
                // its styles are inline, its plots are SVG within it, and it has no script.
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'";
                title { "grpo-assay: report" }
                style { (PreEscaped(STYLE)) (PreEscaped(Tone::rules())) }
            }
            body {
                header {
                    h1 { "grpo-assay" }
                    p { "Does this kernel compute the GRPO loss, token entropy and dlogits that it should?" }
                }
                main {
                    @if inputs.len() > 1 { (contents(inputs)) }
                    @for (i, input) in inputs.iter().enumerate() { (part(i, input)) }
                }
                footer { p { "assay " (env!("CARGO_PKG_VERSION")) } (shell(command)) }
            }
        }
    };
    page.into_string()
}

fn contents(inputs: &[Input]) -> Markup {
    html! {
        nav {
            h2 { "Contents" }
            div.scroll { table.contents { tbody {
                @for (i, input) in inputs.iter().enumerate() {
                    tr {
                        td { a href=(format!("#part-{i}")) { (input.title) } }
                        td { (clipped(&input.part.summary())) }
                        td { (badge(input.part.passed())) }
                    }
                }
            } } }
        }
    }
}

fn badge(passed: Option<bool>) -> Markup {
    match passed {
        Some(true) => html! { span.badge.well { "pass" } },
        Some(false) => html! { span.badge.bad { "fail" } },
        None => html! {},
    }
}

/// Draws a command that can be copied.
fn shell(command: &str) -> Markup {
    html! { pre { code { (command) } } }
}

fn part(i: usize, input: &Input) -> Markup {
    html! {
        section id=(format!("part-{i}")) {
            h2 { (input.title) " " (badge(input.part.passed())) }
            p.lead { (clipped(&input.part.summary())) }
            @if let Some(command) = &input.command { (shell(command)) }
            p.note { "from " (clipped(&input.name)) }
            (input.part.body())
        }
    }
}
