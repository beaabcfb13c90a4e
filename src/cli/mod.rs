//! The `assay` command. Exit codes: 0 every verdict passed, 1 one failed, 2 bad usage or input.

#[cfg(feature = "train")]
mod ab;
mod bench;
mod check;
mod compare_logp;
#[cfg(feature = "pjrt")]
mod compile;
#[cfg(feature = "pjrt")]
mod compile_gpu;
mod deck_choice;
mod document;
mod emit;
mod generate;
mod gradcheck;
mod head_choice;
mod help;
mod judge;
mod list;
mod metrics;
#[cfg(feature = "mutants")]
mod mutants;
mod output;
mod panel;
mod peers;
mod problem_choice;
#[cfg(feature = "train")]
mod record;
mod replay;
mod report;
mod spec;
mod spec_choice;
mod standards;
mod suite;
mod target_choice;
mod tolerances;
#[cfg(feature = "train")]
mod train;

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::ahead::AheadError;
use crate::bench::BenchError;
use crate::campaign::CampaignError;
#[cfg(feature = "pjrt")]
use crate::compile_worker::{CompileWorkerError, WORKER_COMMAND};
use crate::config::ConfigError;
use crate::fixture::FixtureError;
use crate::implementation::RunError;
use crate::judge::generate::RecipeError;
use crate::judge::judge::JudgeError;
use crate::judge::tolerance::ToleranceError;
use crate::problem::ProblemError;
#[cfg(feature = "train")]
use crate::record::RecordError;
use crate::replay::ReplayError;
use crate::report::InputError;
use crate::schema::CommandOutput;
use crate::spec::presets::PresetError;
use crate::suites::measure::MeasureError;
use crate::text::{ForeignLines, ShownPath, shell_word, shown_lines};
#[cfg(feature = "train")]
use crate::train::TrainError;
use crate::worker::WorkerError;

/// Judges GRPO loss kernels against an f64 reference.
#[derive(Parser)]
#[command(name = "assay", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Evaluate recorded problems with every implementation and judge the results
    Replay(replay::ReplayCommand),
    /// Check one implementation's loss and gradient on one batch
    Gradcheck(gradcheck::GradcheckCommand),
    /// Time one implementation on one batch, after judging its answer, in turns with others
    Bench(bench::BenchCommand),
    /// Write a problem for a kernel of your own
    Generate(generate::GenerateCommand),
    /// Judge the outputs of a kernel of your own
    Judge(judge::JudgeCommand),
    /// Give a kernel of your own many problems, and say what is wrong with it and why
    Check(check::CheckCommand),
    /// Compare a trainer's log-probabilities with a sampler's, and say what explains the difference
    CompareLogp(compare_logp::CompareLogpCommand),
    /// Write a folder of problems, to be judged together
    Suite(suite::SuiteCommand),
    /// Show what trainers would log of a problem, and what it means
    Metrics(metrics::MetricsCommand),
    /// Compile one implementation for TPUs that need not be there
    #[cfg(feature = "pjrt")]
    Compile(compile::CompileCommand),
    /// Write the kernels of one implementation for a program of your own
    Emit(emit::EmitCommand),
    /// Show the implementations and what they support
    List(list::ListCommand),
    /// Compare the reference with what published implementations returned
    Peers(peers::PeersCommand),
    /// Judge deliberately wrong kernels: which of them the suite rejects, and by what
    #[cfg(feature = "mutants")]
    Mutants(mutants::MutantsCommand),
    /// Judge kernels written in Python, honest and wrong, in every regime and dtype
    Panel(panel::PanelCommand),
    /// Run a Qwen2 model and keep its logits as a fixture
    #[cfg(feature = "train")]
    Record(record::RecordCommand),
    /// Make one page of what other commands wrote with --json
    Report(report::ReportCommand),
    /// Say what a loss computes, as a published project or a spec file has it
    Spec(spec::SpecCommand),
    /// Show the limits of the judge, or measure them again
    Tolerances(tolerances::TolerancesCommand),
    /// Train a small policy with GRPO, by a kernel or by candle's own operations
    #[cfg(feature = "train")]
    Train(train::TrainCommand),
    /// Make the same run by candle's own operations and by a kernel, and compare them
    #[cfg(feature = "train")]
    Ab(ab::AbCommand),
    /// Run a Qwen2 model and keep its logits as a fixture (in builds with the feature `train`)
    #[cfg(not(feature = "train"))]
    Record(NotBuilt),
    /// Train a small policy with GRPO (in builds with the feature `train`)
    #[cfg(not(feature = "train"))]
    Train(NotBuilt),
    /// Make the same run by candle's own operations and by a kernel (in builds with the feature `train`)
    #[cfg(not(feature = "train"))]
    Ab(NotBuilt),
    /// Compile one implementation for TPUs or GPUs that need not be there (in builds with the feature `pjrt`)
    #[cfg(not(feature = "pjrt"))]
    Compile(NotBuilt),
    /// Judge deliberately wrong kernels (in builds with the feature `mutants`)
    #[cfg(not(feature = "mutants"))]
    Mutants(NotBuilt),
    #[cfg(feature = "pjrt")]
    #[command(hide = true, name = WORKER_COMMAND)]
    CompileWorker(compile::CompileWorkerArgs),
    #[cfg(feature = "pjrt")]
    #[command(hide = true, name = crate::runtime::TRIAL_COMMAND)]
    TryPlugin(PluginTrial),
}

/// The arguments of the child process that tries a plugin with the flags of the environment.
#[cfg(feature = "pjrt")]
#[derive(Args)]
struct PluginTrial {
    plugin: PathBuf,
}

/// The options of output that every command takes.
#[derive(Args)]
struct Printing {
    /// Write the result as JSON to PATH; `-` is stdout, and the text then goes to stderr
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// Print failures and nothing else
    #[arg(short, long)]
    quiet: bool,
}

/// The option of commands that judge a kernel of the user's own.
#[derive(Args)]
struct Details {
    /// Print inputs, bits, roundings and all wrong kernels that fail alike too
    #[arg(short = 'v', long = "verbose")]
    shown: bool,
}

/// The arguments of a command that this build lacks, which are not read.
#[cfg(not(all(feature = "train", feature = "pjrt", feature = "mutants")))]
#[derive(Args)]
struct NotBuilt {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<String>,
}

#[cfg(not(all(feature = "train", feature = "pjrt", feature = "mutants")))]
impl NotBuilt {
    /// Refuses the command `name`, which needs `feature`, and says how to build an `assay` that has it.
    #[expect(clippy::unused_self, reason = "as all commands are run")]
    fn refuse(self, name: &str, feature: &str) -> Result<Passed, CliError> {
        Err(CliError::usage(format!(
            "assay {name}: this build lacks it; in the project's sources, with Rust, `make setup` and \
             `cargo install --path . --features {feature}` build and install an `assay` that has it"
        )))
    }
}

/// The PJRT plugin that the device implementations use.
#[derive(Args)]
struct PluginChoice {
    /// PJRT plugin library; the one that `ASSAY_PJRT_PLUGIN` names, or that `make setup` installed, if none is given
    #[arg(long = "plugin", value_name = "FILE.so")]
    path: Option<PathBuf>,
}

impl PluginChoice {
    fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The path, once a plugin that was asked for has been seen to work: what nobody asked for may be absent.
    #[cfg(feature = "pjrt")]
    fn checked_path(&self) -> Result<Option<&Path>, CliError> {
        // A plugin that is named must work, or the command stops here with the reason; the default one may be missing,
        // and then only the implementations that need it are.
        if let Some(path) = crate::runtime::asked_for(self.path()) {
            crate::runtime::Client::shared(&path).map_err(RunError::from)?;
        }
        Ok(self.path())
    }

    #[cfg(not(feature = "pjrt"))]
    fn checked_path(&self) -> Result<Option<&Path>, CliError> {
        self.path().map_or(Ok(None), |path| {
            let (path, why) = (ShownPath(path), crate::registry::LACKS_PLUGINS);
            Err(CliError::usage(format!("--plugin {path}: {why}")))
        })
    }
}

/// Why a command could not do its work: one line that names the file or field.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    Fixture(#[from] FixtureError),
    #[error("{path}: {reason}")]
    Problem { path: ShownPath, reason: ProblemError },
    #[error("{path}: {reason}")]
    Config { path: ShownPath, reason: ForeignLines },
    #[error("{path}: cannot {action}: {reason}")]
    Io { path: ShownPath, action: &'static str, reason: io::Error },
    #[error(transparent)]
    Settings(#[from] ConfigError),
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Judge(#[from] JudgeError),
    #[error(transparent)]
    Tolerance(#[from] ToleranceError),
    #[error(transparent)]
    Measure(#[from] MeasureError),
    #[error(transparent)]
    Bench(#[from] BenchError),
    #[error(transparent)]
    Campaign(#[from] CampaignError),
    #[error(transparent)]
    Preset(#[from] PresetError),
    #[error(transparent)]
    Replay(#[from] ReplayError),
    #[error(transparent)]
    Input(#[from] InputError),
    #[cfg(feature = "train")]
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Ahead(#[from] AheadError),
    #[cfg(feature = "pjrt")]
    #[error(transparent)]
    CompileWorker(#[from] CompileWorkerError),
    #[cfg(feature = "train")]
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("{0}")]
    Usage(ForeignLines),
}

impl CliError {
    fn usage(reason: impl Into<ForeignLines>) -> Self {
        CliError::Usage(reason.into())
    }
}

/// A parser of what is one of `all`, each typed as it is shown.
fn one_of<T: Copy + fmt::Display + Send + Sync + 'static>(all: &'static [T]) -> impl TypedValueParser<Value = T> {
    let names = all.iter().map(|value| PossibleValue::new(value.to_string()));
    PossibleValuesParser::new(names).map(|name| {
        // The parser has checked the name against `all`, so the search finds it.
        let value = all.iter().find(|value| value.to_string() == name);
        *value.expect("clap takes no other name")
    })
}

/// Whether every verdict of a command passed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Passed {
    Yes,
    No,
}

impl From<bool> for Passed {
    fn from(pass: bool) -> Self {
        if pass { Passed::Yes } else { Passed::No }
    }
}

/// Returns the command line as its parser has it, for pages that describe it and checks of what others write.
pub fn command() -> clap::Command {
    help::grouped(Cli::command())
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    ExitCode::from(run(std::env::args_os()))
}

/// Runs a command line, whose first word is the command's own name, and returns its exit code. The process goes on: it may
/// be an interpreter's.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    // The command line is kept for the whole process: results, pages and records name the command that made them.
    *COMMAND_LINE.lock().unwrap_or_else(PoisonError::into_inner) = as_typed(&arguments);
    let code = match parsed(&arguments) {
        Ok(Cli { command }) => command.run(),
        // What is asked for, as help is, is no error: clap knows where either is printed, and the code.
        Err(stopped) => {
            // An argument may be the name of a stranger's file, which clap quotes as it is.
            let shown: Vec<OsString> = arguments.iter().map(|word| ShownPath(word).to_string().into()).collect();
            let stopped = if shown == arguments { stopped } else { parsed(&shown).err().unwrap_or(stopped) };
            let _ = stopped.print();
            u8::try_from(stopped.exit_code()).expect("clap's are 0 and 2")
        }
    };
    // What ends with `main` flushes it; an interpreter's end does not.
    let _ = io::stdout().flush();
    code
}

fn parsed(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    let matches = command().try_get_matches_from(arguments)?;
    output::claim_stdout(&matches)?;
    Cli::from_arg_matches(&matches)
}

impl Command {
    /// Runs it, says what went wrong, and returns the exit code.
    fn run(self) -> u8 {
        match self.passed() {
            Ok(Passed::Yes) => 0,
            Ok(Passed::No) => 1,
            Err(error) => {
                // Nothing is left to do where even stderr is closed.
                let _ = writeln!(io::stderr(), "assay: {}", shown_lines(&error.to_string()));
                2
            }
        }
    }

    fn passed(self) -> Result<Passed, CliError> {
        expect_threads()?;
        match self {
            Command::Replay(command) => command.run(),
            Command::Gradcheck(command) => command.run(),
            Command::Bench(command) => command.run(),
            Command::Generate(command) => command.run(),
            Command::Judge(command) => command.run(),
            Command::Check(command) => command.run(),
            Command::CompareLogp(command) => command.run(),
            Command::Suite(command) => command.run(),
            Command::Metrics(command) => command.run(),
            #[cfg(feature = "pjrt")]
            Command::Compile(command) => command.run(),
            Command::Emit(command) => command.run(),
            Command::List(command) => command.run(),
            Command::Peers(command) => command.run(),
            #[cfg(feature = "mutants")]
            Command::Mutants(command) => command.run(),
            Command::Panel(command) => command.run(),
            #[cfg(feature = "train")]
            Command::Record(command) => command.run(),
            Command::Report(command) => command.run(),
            Command::Spec(command) => command.run(),
            Command::Tolerances(command) => command.run(),
            #[cfg(feature = "train")]
            Command::Train(command) => command.run(),
            #[cfg(feature = "train")]
            Command::Ab(command) => command.run(),
            #[cfg(not(feature = "train"))]
            Command::Record(absent) => absent.refuse("record", "train"),
            #[cfg(not(feature = "train"))]
            Command::Train(absent) => absent.refuse("train", "train"),
            #[cfg(not(feature = "train"))]
            Command::Ab(absent) => absent.refuse("ab", "train"),
            #[cfg(not(feature = "pjrt"))]
            Command::Compile(absent) => absent.refuse("compile", "pjrt"),
            #[cfg(not(feature = "mutants"))]
            Command::Mutants(absent) => absent.refuse("mutants", "mutants"),
            #[cfg(feature = "pjrt")]
            Command::CompileWorker(command) => command.run(),
            #[cfg(feature = "pjrt")]
            Command::TryPlugin(PluginTrial { plugin }) => {
                crate::runtime::try_plugin(&plugin).map_err(RunError::from)?;
                Ok(Passed::Yes)
            }
        }
    }
}

/// Refuses a number of threads in the environment that no machine has: each takes memory before any work is done.
fn expect_threads() -> Result<(), CliError> {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    const MOST: usize = 4096;
    let given = std::env::var(VARIABLE).unwrap_or_default();
    // A number with more digits than an address does not parse, and rayon then takes the machine's cores.
    match given.parse::<usize>() {
        Ok(threads) if threads > MOST => {
            Err(CliError::Usage(format!("{VARIABLE}: got {threads}, expected at most {MOST}").into()))
        }
        _ => Ok(()),
    }
}

/// The arguments of the last call of [`run`], quoted for a shell.
static COMMAND_LINE: Mutex<String> = Mutex::new(String::new());

/// The command line, as a shell takes it.
fn command_line() -> String {
    COMMAND_LINE.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The libraries and toolkits that this process gives to other processes, such as the one that compiles.
#[cfg(feature = "pjrt")]
static HANDED_ON: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Notes code that another process runs for this command; see [`code_run`].
#[cfg(feature = "pjrt")]
fn hand_on<'p>(paths: impl IntoIterator<Item = &'p Path>) {
    let mut all = HANDED_ON.lock().unwrap_or_else(PoisonError::into_inner);
    for path in paths.into_iter().filter_map(|path| std::path::absolute(path).ok()) {
        if !all.contains(&path) {
            all.push(path);
        }
    }
}

/// The foreign code that this command has run so far, by path: plugins loaded into this process or a worker, and toolkits.
#[cfg(feature = "pjrt")]
fn code_run() -> Vec<String> {
    let mut paths: Vec<PathBuf> =
        crate::runtime::Plugin::loaded().into_iter().map(|plugin| plugin.path().to_path_buf()).collect();
    paths.extend(HANDED_ON.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned());
    paths.into_iter().map(|path| path.to_string_lossy().into_owned()).collect()
}

#[cfg(not(feature = "pjrt"))]
fn code_run() -> Vec<String> {
    Vec::new()
}

/// Lines that name the foreign code that this command has run, for `-v`.
fn code_lines() -> String {
    code_run().iter().fold(String::new(), |lines, path| lines + &format!("plugin   {}\n", ShownPath(path)))
}

/// `result` with the command line and the foreign code that made it.
fn output_of<R>(result: R) -> CommandOutput<R> {
    CommandOutput { command: command_line(), result, plugins: code_run() }
}

/// `arguments`, the first of which is a program's path, as a shell takes them.
fn as_typed(arguments: &[OsString]) -> String {
    let arguments = arguments.iter().skip(1).map(shell_word);
    std::iter::once("assay".into()).chain(arguments).collect::<Vec<_>>().join(" ")
}

/// The exit code of a command that Ctrl-C ends at once, as a shell has it.
const INTERRUPTED: i32 = 130;

/// Returns the flag that Ctrl-C, SIGTERM and SIGHUP set, so that a command can end in good order. A second signal ends the process.
fn stop_flag() -> Result<Arc<AtomicBool>, CliError> {
    static STOP: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);
    let mut stop = STOP.lock().unwrap_or_else(PoisonError::into_inner);
    // Signals have one handler a process, which may run several commands.
    if let Some(stop) = &*stop {
        stop.store(false, Ordering::Relaxed);
        return Ok(Arc::clone(stop));
    }
    let made = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&made);
    let handler = move || {
        if set.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
    };
    ctrlc::set_handler(handler)
        .map_err(|error| CliError::Usage(format!("Ctrl-C: cannot be listened to: {error}").into()))?;
    *stop = Some(Arc::clone(&made));
    Ok(made)
}

impl Printing {
    /// Prints `text` unless quiet, and writes `result`, an object, with the command that made it where asked to.
    fn finish(&self, text: &str, result: &impl Serialize) -> Result<(), CliError> {
        self.finish_list(text, &output_of(result))
    }

    /// Prints `text` unless quiet, and writes `json` as it is where asked to.
    fn finish_list(&self, text: &str, json: &impl Serialize) -> Result<(), CliError> {
        if !self.quiet {
            print(text)?;
        }
        self.json.as_deref().map_or(Ok(()), |path| output::write_json(path, json))
    }

    /// A bar over `steps` on a terminal; nothing in a pipe or when quiet.
    fn progress(&self, steps: usize) -> ProgressBar {
        let target = if self.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len}  {msg}").expect("a valid template");
        ProgressBar::with_draw_target(Some(steps as u64), target).with_style(style)
    }
}

/// Prints to stdout, or to stderr if stdout carries a result; a reader that has gone away is no error. Whatever `text` quotes, it does not
/// drive the terminal.
fn print(text: &str) -> Result<(), CliError> {
    let shown = shown_lines(text);
    if output::takes_stdout() {
        return output::unless_closed("stderr", io::stderr().write_all(shown.as_bytes()));
    }
    output::unless_closed("stdout", io::stdout().write_all(shown.as_bytes()))
}
