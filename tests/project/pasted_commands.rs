//! Commands, options, make targets and anchors in documents: each is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use clap::Command;
use clap::error::ErrorKind;

use super::documents::documents;

/// Options that documents name of programs other than `assay`.
const FOREIGN: [&str; 4] = ["--test", "--bench", "--budget", "--list"];

/// Whether an option is one of XLA's, of pytest with this project's plugin, or of another program.
fn is_foreign(option: &str, of_pytest: &str) -> bool {
    option.starts_with("--xla_") || of_pytest.contains(&format!("\"{option}\"")) || FOREIGN.contains(&option)
}

/// The lines of a document, split into fenced blocks with their language and running text.
struct MarkdownText {
    fences: Vec<(String, String)>,
    prose: String,
}

impl MarkdownText {
    fn new(text: &str) -> Self {
        let (mut fences, mut prose) = (Vec::new(), String::new());
        let mut open: Option<(String, String)> = None;
        for line in text.lines() {
            match (&mut open, line.trim_start().strip_prefix("```")) {
                (None, Some(language)) => open = Some((language.trim().to_string(), String::new())),
                (Some(_), Some(_)) => fences.extend(open.take()),
                (Some((_, block)), None) => *block += &format!("{line}\n"),
                (None, None) => prose += &format!("{line}\n"),
            }
        }
        Self { fences, prose }
    }

    /// Returns the code between single backticks, which may go on in the next line.
    fn inline_code(&self) -> Vec<String> {
        let paragraphs = self.prose.split("\n\n");
        let code = paragraphs.flat_map(|paragraph| paragraph.split('`').skip(1).step_by(2));
        code.map(|code| code.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    /// Returns the commands of the blocks for a shell, each in words.
    fn shell_commands(&self) -> Vec<Vec<String>> {
        let blocks = self.fences.iter().filter(|(language, _)| ["sh", "bash", "console"].contains(&language.as_str()));
        let lines =
            blocks.flat_map(|(_, block)| block.replace("\\\n", " ").lines().map(str::to_string).collect::<Vec<_>>());
        lines.flat_map(|line| commands_of(line.trim_start_matches("$ "))).collect()
    }
}

/// Returns the commands of one line of a shell, without variables that are set before them.
fn commands_of(line: &str) -> Vec<Vec<String>> {
    let words = shlex::split(line).unwrap_or_default();
    let separates = |word: &String| ["&&", "||", "|", ";", "&"].contains(&word.as_str());
    let commands = words.split(separates).map(|words| {
        let words = words.iter().skip_while(|word| is_assignment(word));
        // What is redirected is no argument.
        words.take_while(|word| !word.starts_with(['>', '<']) && !word.starts_with("2>")).cloned().collect::<Vec<_>>()
    });
    commands.filter(|words| !words.is_empty()).collect()
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=')
        .is_some_and(|(name, _)| !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
}

/// Returns the arguments of `assay` where that is what the words run.
fn arguments(words: &[String]) -> Option<&[String]> {
    let (program, rest) = words.split_first()?;
    if program == "assay" || program.ends_with("/assay") {
        return Some(rest);
    }
    let runs = program == "cargo"
        && rest.first().is_some_and(|word| word == "run")
        && !rest.iter().any(|word| word == "--example");
    let after = rest.iter().position(|word| word == "--").filter(|_| runs)?;
    Some(&rest[after + 1..])
}

/// Parses arguments as the command would; what only a run can refuse is not seen.
fn parse(command: &Command, arguments: &[String]) -> Result<(), String> {
    let words = std::iter::once("assay".to_string()).chain(arguments.iter().cloned());
    match command.clone().try_get_matches_from(words) {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => Ok(()),
        Err(error) => Err(error.to_string().lines().next().unwrap_or_default().to_string()),
    }
}

/// The option that a word of code names, without brackets, values and alternatives around it.
fn option_of(word: &str) -> Option<&str> {
    let word = word.trim_start_matches(['[', '(', '|']);
    let end = word.find(|c: char| !(c.is_ascii_alphanumeric() || "-_".contains(c))).unwrap_or(word.len());
    let name = word[..end].trim_end_matches('-');
    (name.starts_with("--") && name.len() > 3).then_some(name)
}

/// Returns the options of one command, or of all where `name` is none.
fn options(command: &Command, name: Option<&str>) -> BTreeSet<String> {
    let commands = command.get_subcommands().filter(|command| name.is_none_or(|name| command.get_name() == name));
    let arguments = commands.flat_map(Command::get_arguments).chain(command.get_arguments());
    let named = arguments.flat_map(|argument| {
        argument
            .get_long_and_visible_aliases()
            .unwrap_or_default()
            .into_iter()
            .chain(argument.get_all_aliases().unwrap_or_default())
    });
    named.map(|name| format!("--{name}")).collect()
}

fn built() -> Command {
    let mut command = assay::cli::command();
    command.build();
    command
}

#[test]
fn pasted_commands_of_documents_are_parsed() {
    let command = built();
    let (mut parsed, mut refused) = (0, Vec::new());
    for document in documents() {
        let text = MarkdownText::new(&fs::read_to_string(&document).unwrap());
        for words in text.shell_commands() {
            let Some(given) = arguments(&words) else { continue };
            // A placeholder is for the reader to replace.
            if given.iter().any(|word| word.contains('…')) {
                continue;
            }
            parsed += 1;
            if let Err(error) = parse(&command, given) {
                refused.push(format!("{}: assay {}: {error}", document.display(), given.join(" ")));
            }
        }
    }
    assert!(parsed > 35, "{parsed}");
    assert!(refused.is_empty(), "{refused:#?}");
}

#[test]
fn pasted_options_of_documents_are_there() {
    let command = built();
    let all = options(&command, None);
    let of_pytest = fs::read_to_string("python/assay/_pytest.py").unwrap();
    let mut unknown = Vec::new();
    for document in documents() {
        let text = MarkdownText::new(&fs::read_to_string(&document).unwrap());
        for code in text.inline_code() {
            let mut words = code.split(' ');
            let first = words.next().unwrap_or_default();
            // A command is `assay` with one of its commands; any other program has its own options.
            let known = match (first, words.next()) {
                ("assay", Some(name)) if name.starts_with(char::is_lowercase) => {
                    if command.find_subcommand(name).is_none() {
                        unknown.push(format!("{}: `{code}`: no command {name}", document.display()));
                        continue;
                    }
                    options(&command, Some(name))
                }
                (option, _) if option.starts_with("--") => all.clone(),
                _ => continue,
            };
            let named = code.split(' ').filter_map(option_of);
            let absent = named.filter(|name| !known.contains(*name) && !is_foreign(name, &of_pytest));
            unknown.extend(absent.map(|name| format!("{}: `{code}`: no option {name}", document.display())));
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
}

#[test]
fn pasted_make_targets_of_documents_are_there() {
    let makefile = fs::read_to_string("Makefile").unwrap();
    let targets: BTreeSet<&str> = makefile
        .lines()
        .filter(|line| line.starts_with(|c: char| c.is_ascii_alphabetic()) && !line.contains(":="))
        .filter_map(|line| Some(line.split_once(':')?.0))
        .flat_map(str::split_whitespace)
        .collect();
    let mut absent = Vec::new();
    for document in documents() {
        let text = MarkdownText::new(&fs::read_to_string(&document).unwrap());
        let inline = text.inline_code().into_iter().flat_map(|code| commands_of(&code));
        for words in inline.chain(text.shell_commands()).filter(|words| words[0] == "make") {
            // Variables and options are no targets.
            let named = words[1..].iter().take_while(|word| !word.starts_with('#'));
            let named = named.filter(|word| !word.starts_with('-') && !word.contains(['=', '…']));
            let missing = named.filter(|word| !targets.contains(word.as_str()));
            absent.extend(missing.map(|word| format!("{}: make {word}", document.display())));
        }
    }
    assert!(absent.is_empty(), "{absent:#?}");
}

/// Returns the anchors of a page: those of its headings, as the site and as GitHub make them, and those that it sets.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        anchors.extend(line.split("{#").skip(1).filter_map(|rest| Some(rest.split_once('}')?.0.to_string())));
        anchors.extend(line.split("id=\"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_string())));
        if line.starts_with('#') {
            let heading = line.trim_start_matches('#').trim().split(" {#").next().unwrap();
            let kept: String =
                heading.to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect();
            // GitHub makes each blank a hyphen, the site each run of them.
            anchors.insert(kept.trim().replace(' ', "-"));
            let words = kept.split([' ', '-']).filter(|word| !word.is_empty());
            anchors.insert(words.collect::<Vec<_>>().join("-"));
        }
    }
    anchors
}

#[test]
fn pasted_anchors_of_documents_are_there() {
    let mut missing = Vec::new();
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        for target in targets.filter(|target| !target.contains("://")) {
            let Some((file, anchor)) = target.split_once('#') else { continue };
            let path: PathBuf = if file.is_empty() { document.clone() } else { document.parent().unwrap().join(file) };
            // Lines of a source file are no headings.
            if path.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let there = fs::read_to_string(&path).map(|text| anchors(&text)).unwrap_or_default();
            if !there.contains(anchor) {
                missing.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn pasted_commands_are_found_in_text() {
    let text = MarkdownText::new(
        "Run `assay check --exec ./k\n--cases 4` or `make docs`.\n\n```sh\nX=1 assay list -q | cat > out  # not this\n\
         cargo run --release -- spec \\\n  --schema && make docs\n```\n\n```text\nassay no\n```\n",
    );
    assert_eq!(text.inline_code(), ["assay check --exec ./k --cases 4", "make docs"]);
    let commands = text.shell_commands();
    let given: Vec<String> =
        commands.iter().filter_map(|words| arguments(words)).map(|words| words.join(" ")).collect();
    assert_eq!(given, ["list -q", "spec --schema"]);
    assert!(parse(&built(), &["spec".into(), "--schema".into()]).is_ok());
    assert!(parse(&built(), &["spec".into(), "--schemas".into()]).unwrap_err().contains("--schemas"));
    assert_eq!(option_of("[--layout"), Some("--layout"));
    assert_eq!(option_of("--cases=4]"), Some("--cases"));
    assert_eq!(anchors("## `a b`, C\n### x {#y}\n```\n# no\n```\n"), ["a-b-c", "x", "y"].map(String::from).into());
}
