//! The page of the command line, from its parser.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command};

use super::{WRITTEN, hold, wrapped};

const FILE: &str = "docs/command-line.md";

/// The width of a line of the page.
const WIDTH: usize = 140;

#[test]
fn pages_command_line_is_current() {
    let mut command = assay::cli::command();
    command.build();
    let mut text = format!("# The command line\n\n{WRITTEN}\n\n{HEAD}");
    let _ = writeln!(text, "```text\n{}\n```", command.clone().render_help().to_string().trim_end());
    for command in command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help") {
        section(command, &mut text);
    }
    hold(FILE, &(text.trim_end().to_string() + "\n"));
}

/// Writes one command: its purpose, its usage, and its arguments by heading.
fn section(command: &Command, text: &mut String) {
    let name = command.get_name();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string().replace("Usage: ", "");
    let usage = usage.split_whitespace().collect::<Vec<_>>().join(" ");
    let _ = writeln!(text, "\n## assay {name}\n\n{about}.\n\n```text\n{usage}\n```\n");
    let shown: Vec<&Arg> = command.get_arguments().filter(|argument| !argument.is_hide_set()).collect();
    // Positional arguments come first, as in the usage.
    let ordered = shown.iter().filter(|argument| argument.is_positional());
    for argument in ordered.chain(shown.iter().filter(|argument| !argument.is_positional())) {
        entry(argument, text);
    }
}

/// Writes one argument as an item of a list.
fn entry(argument: &Arg, text: &mut String) {
    // The help of help says nothing of a command.
    if matches!(
        argument.get_action(),
        ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
    ) {
        return;
    }
    let values = argument.get_value_names().unwrap_or_default();
    let takes = argument.get_action().takes_values();
    let value = if takes { values.iter().fold(String::new(), |text, name| text + " " + name) } else { String::new() };
    let short = argument.get_short().map(|short| format!("-{short}"));
    let long = argument.get_long().map(|long| format!("--{long}"));
    let names: Vec<String> = short.into_iter().chain(long).collect();
    let term = if argument.is_positional() { value.trim().to_string() } else { format!("{}{value}", names.join(", ")) };
    let mut help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    if !help.ends_with('.') {
        help.push('.');
    }
    // Values that the help names already are not listed again.
    let possible: Vec<String> = if takes {
        argument
            .get_possible_values()
            .iter()
            .filter(|value| !value.is_hide_set())
            .map(|value| value.get_name().to_string())
            .collect()
    } else {
        Vec::new()
    };
    if !possible.is_empty() {
        let _ =
            write!(help, " One of {}.", possible.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "));
    }
    let defaults: Vec<String> =
        argument.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    if takes && !defaults.is_empty() {
        let _ = write!(help, " Default: {}.", defaults.join(", "));
    }
    if matches!(argument.get_action(), ArgAction::Append) {
        help += " May be given several times.";
    }
    let _ = writeln!(text, "- {}", wrapped(&format!("`{term}`: {}", escaped(&help)), "    ", WIDTH));
}

/// Returns a help text with what Markdown would read outside of code escaped.
fn escaped(help: &str) -> String {
    let mut parts: Vec<String> = help.split('`').map(str::to_string).collect();
    for part in parts.iter_mut().step_by(2) {
        *part = part.replace('<', "&lt;").replace('*', "\\*").replace('_', "\\_").replace('[', "\\[");
    }
    parts.join("`")
}

/// The beginning of the page.
const HEAD: &str = "\
For everybody who looks an option up: every command with its arguments, as `assay COMMAND --help` prints them. What the commands are for is in
[commands.md](commands.md). This is the build with all features: the Python package's `assay` lacks the commands that need a PJRT plugin or
the feature `train`.

Exit codes: 0 if every verdict passed, 1 if one failed, 2 for bad usage or input.

";
