//! The help of `assay`, its commands under headings: clap has headings for options alone.

use std::fmt::Write as _;

use clap::Command;

/// The commands under each heading, in order. A build without a feature lacks some of them.
const HEADINGS: [(&str, &[&str]); 4] = [
    ("Judge a kernel", &["check", "judge", "compare-logp", "suite", "generate", "replay", "gradcheck", "report"]),
    (
        "Look at losses, limits and implementations",
        &["list", "spec", "metrics", "peers", "tolerances", "mutants", "panel"],
    ),
    ("Time, compile and take kernels", &["bench", "compile", "emit"]),
    ("Train", &["train", "ab", "record"]),
];

/// The heading of commands that no other heading names, so that none is missing.
const OTHERS: &str = "Others";

/// `command` with a help that lists its commands by heading.
pub(super) fn grouped(command: Command) -> Command {
    let styles = command.get_styles();
    let (header, literal) = (styles.get_header(), styles.get_literal());
    let groups = groups(&command);
    // All names are padded to the longest of all groups, so that descriptions line up over the headings.
    let names = groups.iter().flat_map(|(_, commands)| commands.iter().map(|command| command.get_name().len()));
    let width = names.max().unwrap_or(0);
    let mut template = String::from("{about-with-newline}\n{usage-heading} {usage}\n");
    for (heading, commands) in &groups {
        let _ = writeln!(template, "\n{header}{heading}:{header:#}");
        for command in commands {
            let (name, about) = (command.get_name(), command.get_about().cloned().unwrap_or_default());
            let _ = writeln!(template, "  {literal}{name:width$}{literal:#}  {about}");
        }
    }
    let _ = write!(template, "\n{header}Options:{header:#}\n{{options}}\n\n");
    let _ = writeln!(template, "{literal}assay COMMAND --help{literal:#} says what a command takes.");
    command.help_template(template)
}

/// The commands that are shown, by heading; a heading without any is left out.
fn groups(command: &Command) -> Vec<(&'static str, Vec<&Command>)> {
    let shown = || command.get_subcommands().filter(|command| !command.is_hide_set());
    let called = |name: &&str| shown().find(|command| command.get_name() == *name);
    let under = |command: &&Command| HEADINGS.iter().any(|(_, names)| names.contains(&command.get_name()));
    let named = HEADINGS.iter().map(|&(heading, names)| (heading, names.iter().filter_map(called).collect()));
    let others = (OTHERS, shown().filter(|command| !under(command)).collect());
    named.chain([others]).filter(|(_, commands): &(_, Vec<_>)| !commands.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn help_has_every_command_under_exactly_one_heading() {
        let command = Cli::command();
        for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            let headings = HEADINGS.iter().filter(|(_, names)| names.contains(&name)).count();
            assert_eq!(headings, 1, "{name}");
        }
        // Which commands there are depends on the features.
        if cfg!(all(feature = "pjrt", feature = "mutants")) {
            for name in HEADINGS.iter().flat_map(|(_, names)| *names) {
                assert!(command.find_subcommand(name).is_some(), "{name}");
            }
        }
    }

    #[test]
    fn help_shows_every_command_once_even_without_a_heading() {
        let command = Cli::command().subcommand(Command::new("newcomer").about("Nobody gave it a heading"));
        let help = grouped(command.clone()).render_help().to_string();
        for command in command.get_subcommands() {
            let line = format!("\n  {} ", command.get_name());
            assert_eq!(help.matches(&line).count(), usize::from(!command.is_hide_set()), "{help}");
        }
        assert!(help.contains("\nOthers:\n  newcomer      Nobody gave it a heading\n"), "{help}");
        assert!(help.contains("--version"), "{help}");
    }
}
