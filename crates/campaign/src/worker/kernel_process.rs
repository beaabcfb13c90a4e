//! [`Worker`]: it is asked, and answers with a candidate.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::memory::WorkerMemory;
use super::process::{Process, Silence};
use super::ranks::RankShard;
use super::{LONGEST_LINE, PROTOCOL, guarded_folder};
use assay_core::guardian::Guardian;
use assay_core::implementation::Workload;
use assay_core::problem::{Candidate, Dtype};
use assay_core::spec::LossSpec;
use assay_core::text::{ForeignLines, ForeignText};
use assay_fixture::{FixtureError, MAX_HEADER_LEN, read_answer, write_problem};

/// The command that starts a worker, and the times that it may take.
#[derive(Clone, Debug)]
pub struct WorkerLaunch {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// The variables that are added to the process's environment.
    pub environment: Vec<(OsString, OsString)>,
    /// The time until the worker must have introduced itself: it may have a framework to load.
    pub start: Duration,
    /// The time until the worker must have answered a request: it may have a program to compile.
    pub answer: Duration,
    /// A flag that ends every wait for the worker once it is set.
    pub stop: Arc<AtomicBool>,
}

impl WorkerLaunch {
    /// A minute to start, a minute to answer.
    pub fn new<S: Into<OsString>>(command: impl IntoIterator<Item = S>) -> Self {
        let minute = Duration::from_mins(1);
        let command = command.into_iter().map(Into::into).collect();
        Self { command, environment: Vec::new(), start: minute, answer: minute, stop: Arc::default() }
    }

    /// Returns the command as messages show it.
    fn name(&self) -> ForeignText {
        self.command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ").into()
    }
}

/// A worker's introduction, the first line that it writes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct WorkerIntroduction {
    /// The protocol's name, which must be [`PROTOCOL`].
    protocol: String,
    /// Dtypes of logits, or of hidden states, that it takes.
    pub dtypes: Vec<Dtype>,
    /// The outputs among `logp`, `entropy` and `token_loss` that each of its candidates has.
    pub outputs: Vec<String>,
    /// The framework that computes, with its version.
    #[serde(default)]
    pub about: Option<String>,
}

#[derive(Serialize)]
struct Request<'r> {
    id: u64,
    problem: &'r Path,
    candidate: &'r Path,
    spec: &'r LossSpec,
    /// The share of this rank, where the kernel runs on several.
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<&'r RankShard>,
    /// The number of calls that the worker is to time, where it is asked to.
    #[serde(skip_serializing_if = "Option::is_none")]
    calls: Option<usize>,
}

/// The parts of a request besides its problem.
#[derive(Clone, Copy, Default)]
struct RequestExtras<'r> {
    shard: Option<&'r RankShard>,
    calls: Option<usize>,
}

#[derive(Deserialize)]
struct Reply {
    id: u64,
    #[serde(default)]
    seconds: Vec<f64>,
    unsupported: Option<String>,
    error: Option<String>,
    output: Option<RefusedOutput>,
    mutated: Option<String>,
}

/// An invalid output, as a worker reports it.
#[derive(Deserialize)]
struct RefusedOutput {
    field: String,
    given: String,
    expected: String,
}

/// A worker's answer to one problem.
#[derive(Debug)]
pub enum WorkerAnswer<G> {
    /// The outputs that the kernel computed.
    Candidate(Box<Candidate<G>>),
    /// The worker's reason why it does not compute the problem.
    Unsupported(ForeignText),
}

/// Why a worker gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The system does not start it.
    #[error("`{command}`: cannot be started: {reason}")]
    Start {
        /// The command that was started.
        command: ForeignText,
        /// The operating system's error.
        reason: io::Error,
    },
    /// The worker's process ended before it answered.
    #[error("`{command}`: ended while it was waited for: {status}{stderr}")]
    Died {
        /// The command that was started.
        command: ForeignText,
        /// The exit code or the signal of the process.
        status: String,
        /// The number of the signal.
        signal: Option<i32>,
        /// The last lines of its stderr, after a line break; empty if it wrote nothing.
        stderr: ForeignLines,
    },
    /// The worker did not answer in time and was killed.
    #[error("`{command}`: no {awaited} in {limit:?}: killed{stderr}")]
    TimedOut {
        /// The command that was started.
        command: ForeignText,
        /// The message that the campaign waited for.
        awaited: &'static str,
        /// The time that the worker had.
        limit: Duration,
        /// The last lines of its stderr, as in [`WorkerError::Died`].
        stderr: ForeignLines,
    },
    /// The worker broke the protocol and was killed.
    #[error("`{command}`: {field}: got {given}, expected {expected}{stderr}")]
    Protocol {
        /// The command that was started.
        command: ForeignText,
        /// The message or its field.
        field: &'static str,
        /// The message that the worker sent.
        given: ForeignText,
        /// The messages that the protocol allows here.
        expected: ForeignLines,
        /// The last lines of its stderr, as in [`WorkerError::Died`].
        stderr: ForeignLines,
    },
    /// The worker reports that the kernel failed.
    #[error("`{command}`: {message}")]
    Failed {
        /// The command that was started.
        command: ForeignText,
        /// The worker's own description of the failure.
        message: ForeignLines,
    },
    /// The worker reports that an output is missing, unknown or malformed.
    #[error("`{command}`: output `{field}`: got {given}, expected {expected}")]
    Output {
        /// The command that was started.
        command: ForeignText,
        /// The name of the output.
        field: ForeignText,
        /// The value or shape that the kernel returned.
        given: ForeignText,
        /// The value or shape that the output must have.
        expected: ForeignLines,
    },
    /// The worker reports that the kernel wrote to an input.
    #[error("`{command}`: input `{field}` has other content after the call: inputs are to be read")]
    InputMutated {
        /// The command that was started.
        command: ForeignText,
        /// The name of the input.
        field: ForeignText,
    },
    /// The campaign is asked to stop, and the worker was killed.
    #[error("`{command}`: the campaign was asked to stop")]
    Stopped {
        /// The command that was started.
        command: ForeignText,
    },
    /// The problem cannot be written, or its candidate cannot be read or believed.
    #[error("`{command}`: {reason}")]
    File {
        /// The command that was started.
        command: ForeignText,
        /// The reason why the file was refused.
        reason: FixtureError,
    },
}

impl WorkerError {
    /// The number of the signal that ended it; `None` where none did.
    pub fn signal(&self) -> Option<i32> {
        if let WorkerError::Died { signal, .. } = self { *signal } else { None }
    }
}

/// A kernel in a process of its own, which lives until this is dropped. One that ended is started again when it is asked.
pub struct Worker {
    launch: WorkerLaunch,
    hello: WorkerIntroduction,
    process: Option<Process>,
    asked: u64,
    /// The guardian, which is dropped after the process that it guards.
    guardian: Guardian,
}

impl Worker {
    /// Starts it and hears what it is.
    ///
    /// # Errors
    /// [`WorkerError`] where it does not start, or does not say so in time.
    pub fn start(launch: WorkerLaunch) -> Result<Self, WorkerError> {
        let mut guardian = guarded_folder().map_err(|reason| WorkerError::Start { command: launch.name(), reason })?;
        let (process, hello) = begin(&launch, &mut guardian)?;
        Ok(Self { launch, hello, process: Some(process), asked: 0, guardian })
    }

    /// Returns the worker's introduction, with the outputs that it promises.
    pub fn hello(&self) -> &WorkerIntroduction {
        &self.hello
    }

    /// Lets it compute `problem` under `spec`. Both files of the question are gone afterwards.
    ///
    /// # Errors
    /// [`WorkerError`]; after one that ended the process, the next question is for a new one.
    pub fn ask<P: Workload>(&mut self, spec: &LossSpec, problem: &P) -> Result<WorkerAnswer<P::Gradient>, WorkerError> {
        self.ask_for(spec, (problem, problem), RequestExtras::default()).map(|(answer, _)| answer)
    }

    /// Lets it compute `problem` again and again, and returns its answer with the seconds that it says `calls` of them took: none if it
    /// times nothing.
    ///
    /// # Errors
    /// As [`Worker::ask`]; [`WorkerError::Protocol`] for a time that no call can take.
    pub fn time<P: Workload>(
        &mut self,
        spec: &LossSpec,
        problem: &P,
        calls: usize,
    ) -> Result<(WorkerAnswer<P::Gradient>, Vec<f64>), WorkerError> {
        let extras = RequestExtras { calls: Some(calls), ..RequestExtras::default() };
        self.ask_for(spec, (problem, problem), extras)
    }

    /// Returns the memory of its processes, while it runs; `None` where the system does not tell.
    pub fn memory(&self) -> Option<WorkerMemory> {
        WorkerMemory::look_at(self.process.as_ref()?.group())
    }

    /// Lets it compute its share of `problem`, with outputs no larger than those of the problem `share`.
    pub(super) fn ask_shard<P: Workload>(
        &mut self,
        spec: &LossSpec,
        problem: &P,
        share: &P,
        shard: &RankShard,
    ) -> Result<WorkerAnswer<P::Gradient>, WorkerError> {
        let extras = RequestExtras { shard: Some(shard), ..RequestExtras::default() };
        self.ask_for(spec, (problem, share), extras).map(|(answer, _)| answer)
    }

    /// Ends the process; the next question starts it again.
    pub(super) fn end(&mut self) {
        self.process = None;
        self.guardian.watch(None);
    }

    /// Starts the process by `launch` when it is asked next.
    pub(super) fn launch_as(&mut self, launch: WorkerLaunch) {
        self.launch = launch;
    }

    fn ask_for<P: Workload>(
        &mut self,
        spec: &LossSpec,
        (problem, share): (&P, &P),
        extras: RequestExtras,
    ) -> Result<(WorkerAnswer<P::Gradient>, Vec<f64>), WorkerError> {
        let (array, dtype) = (P::ARRAYS[0], problem.dtype());
        if !self.hello.dtypes.contains(&dtype) {
            return Ok((WorkerAnswer::Unsupported(format!("{array} in {dtype}").into()), Vec::new()));
        }
        self.asked += 1;
        let [given, returned] = ["problem", "candidate"]
            .map(|name| self.guardian.folder().join(format!("{}-{name}.safetensors", self.asked)));
        let answer = self.answer(spec, (problem, share), extras, (&given, &returned));
        // The worker may have written none.
        let _ = (fs::remove_file(&given), fs::remove_file(&returned));
        answer
    }

    fn answer<P: Workload>(
        &mut self,
        spec: &LossSpec,
        (problem, share): (&P, &P),
        RequestExtras { shard, calls }: RequestExtras,
        (given, returned): (&Path, &Path),
    ) -> Result<(WorkerAnswer<P::Gradient>, Vec<f64>), WorkerError> {
        let command = self.launch.name();
        let file = |reason| WorkerError::File { command: command.clone(), reason };
        // The problem is a file; only its path goes through the pipe.
        write_problem(given, problem, &BTreeMap::new()).map_err(file)?;
        let request = Request { id: self.asked, problem: given, candidate: returned, spec, shard, calls };
        let request = serde_json::to_string(&request).expect("plain data has a JSON form");
        // A process that ended earlier is started again here, which may cost the load of a framework.
        let process = match &mut self.process {
            Some(process) => process,
            none => {
                let (process, hello) = begin(&self.launch, &mut self.guardian)?;
                self.hello = hello;
                none.insert(process)
            }
        };
        let deadline = in_time(self.launch.answer);
        let asked_at = Instant::now();
        process.send(request);
        let reply: Result<Reply, WorkerError> = hear(process, &self.launch, AwaitedMessage::WorkerAnswer, deadline);
        // An answer with another id belongs to an earlier question: the stream is out of step and cannot be trusted.
        let reply = reply.and_then(|reply| match reply.id {
            id if id == self.asked => Ok(reply),
            id => Err(broken(process, &command, "id", id.to_string(), self.asked.to_string())),
        });
        let waited = asked_at.elapsed().as_secs_f64();
        let reply = reply.and_then(|reply| match impossible_times(&reply.seconds, calls, waited) {
            None => Ok(reply),
            Some(expected) => Err(broken(process, &command, "seconds", format!("{:?}", reply.seconds), expected)),
        });
        let Reply { unsupported, error, output, mutated, seconds, .. } = reply.inspect_err(|_| {
            self.process = None;
            self.guardian.watch(None);
        })?;
        // The worker's own reports come before the file, which need not exist then.
        if let Some(message) = error {
            return Err(WorkerError::Failed { command, message: message.into() });
        }
        if let Some(RefusedOutput { field, given, expected }) = output {
            // Each is one line in a report.
            let [field, given, expected] = [field, given, expected].map(ForeignText::from);
            return Err(WorkerError::Output { command, field, given, expected: expected.to_string().into() });
        }
        if let Some(field) = mutated {
            return Err(WorkerError::InputMutated { command, field: field.into() });
        }
        if let Some(what) = unsupported {
            return Ok((WorkerAnswer::Unsupported(what.into()), Vec::new()));
        }
        // The file was written by a stranger: bound its length before reading, then require the promised outputs.
        expect_file(returned, given).map_err(file)?;
        let candidate = read_answer(returned, share).map_err(file)?;
        self.expect_outputs(&candidate, returned).map_err(file)?;
        Ok((WorkerAnswer::Candidate(Box::new(candidate)), seconds))
    }

    /// Checks that every promised output is in the candidate: one that is silently left out would not be judged.
    fn expect_outputs<G>(&self, candidate: &Candidate<G>, path: &Path) -> Result<(), FixtureError> {
        let Candidate { logp, entropy, token_loss, .. } = candidate;
        let there = |name: &str| match name {
            "logp" => logp.is_some(),
            "entropy" => entropy.is_some(),
            "token_loss" => token_loss.is_some(),
            _ => true,
        };
        let missing = self.hello.outputs.iter().find(|name| !there(name));
        missing.map_or(Ok(()), |name| Err(FixtureError::invalid(path, name, "nothing", "what the worker promised")))
    }
}

/// Returns the times that were expected, if a worker's cannot be those of its calls: of another number than it was asked for, not
/// above 0, or longer together than the answer was waited for. A worker that times nothing gives no times.
fn impossible_times(seconds: &[f64], calls: Option<usize>, waited: f64) -> Option<String> {
    if seconds.is_empty() {
        return None;
    }
    if calls.is_some_and(|calls| calls != seconds.len()) {
        return Some(format!("{} times", calls.unwrap_or_default()));
    }
    if seconds.iter().any(|seconds| !(seconds.is_finite() && *seconds > 0.0)) {
        return Some("numbers of seconds above 0".into());
    }
    let all: f64 = seconds.iter().sum();
    (calls.is_some() && all > waited).then(|| format!("at most {waited:.3} together, the seconds that the answer took"))
}

/// The message that the campaign waits for.
#[derive(Clone, Copy)]
enum AwaitedMessage {
    WorkerIntroduction,
    WorkerAnswer,
}

impl AwaitedMessage {
    fn name(self) -> &'static str {
        match self {
            AwaitedMessage::WorkerIntroduction => "first line",
            AwaitedMessage::WorkerAnswer => "answer",
        }
    }

    fn form(self) -> &'static str {
        match self {
            AwaitedMessage::WorkerIntroduction => r#"{"protocol": "assay-check/1", "dtypes": […], "outputs": […]}"#,
            AwaitedMessage::WorkerAnswer => {
                r#"{"id": …}, or with "unsupported", "error", "output" or "mutated"; what else there is to say goes to stderr"#
            }
        }
    }
}

/// A new process, and what it says of itself.
fn begin(launch: &WorkerLaunch, guardian: &mut Guardian) -> Result<(Process, WorkerIntroduction), WorkerError> {
    let name = launch.name();
    let start = |reason| WorkerError::Start { command: name.clone(), reason };
    let [program, arguments @ ..] = launch.command.as_slice() else {
        return Err(start(io::Error::new(io::ErrorKind::InvalidInput, "got no word, expected a program")));
    };
    let mut command = Command::new(program);
    command.args(arguments).envs(launch.environment.iter().map(|(name, value)| (name, value)));
    // The first line names the protocol and the outputs. Anything else comes from a program that is no worker, such as
    // a shell that prints a banner. The time to start is limited apart from that of an answer, as loading a framework
    // is slow.
    let deadline = in_time(launch.start);
    let mut process = Process::start(&mut command).map_err(start)?;
    guardian.watch(Some(process.group()));
    let hello: WorkerIntroduction = hear(&mut process, launch, AwaitedMessage::WorkerIntroduction, deadline)?;
    // An output of another name could not be judged, and would pass unseen.
    let known = |name: &&String| {
        ["loss", "dlogits", "dhidden", "dlm_head", "logp", "entropy", "token_loss"].contains(&name.as_str())
    };
    if hello.protocol != PROTOCOL {
        return Err(broken(
            &mut process,
            &name,
            "protocol",
            format!("`{}`", ForeignText::from(&hello.protocol)),
            PROTOCOL.into(),
        ));
    }
    if let Some(unknown) = hello.outputs.iter().find(|output| !known(output)) {
        let expected = "loss, dlogits, dhidden, dlm_head, logp, entropy, token_loss".into();
        return Err(broken(&mut process, &name, "outputs", format!("`{}`", ForeignText::from(unknown)), expected));
    }
    Ok((process, hello))
}

/// Returns the time after `patience`, or after a century where the clock cannot count so far.
fn in_time(patience: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_hours(100 * 365 * 24);
    Instant::now() + patience.min(CENTURY)
}

/// Reads the next message of `process`, and ends the process if there is none.
fn hear<M: for<'m> Deserialize<'m>>(
    process: &mut Process,
    launch: &WorkerLaunch,
    awaited: AwaitedMessage,
    deadline: Instant,
) -> Result<M, WorkerError> {
    let command = launch.name();
    match process.line(deadline, &launch.stop) {
        Ok(line) => serde_json::from_str(&line).map_err(|error| {
            let given = format!("`{}` ({error})", ForeignText::from(&line));
            broken(process, &command, awaited.name(), given, awaited.form().into())
        }),
        Err(Silence::Garbage(given)) => {
            let expected = format!("{} in at most {LONGEST_LINE} bytes", awaited.form());
            Err(broken(process, &command, awaited.name(), given, expected))
        }
        // stdout ends before the process does: wait for its exit status, which says why.
        Err(Silence::Ended) => {
            let ended = process.ended();
            let signal = ended.as_ref().ok().and_then(Option::as_ref).and_then(ExitStatusExt::signal);
            let status = match ended {
                Ok(Some(status)) if signal.is_none() => format!("it exited by itself, {status}"),
                Ok(Some(status)) => status.to_string(),
                Ok(None) => "it closed its stdout and went on, and was killed".into(),
                Err(error) => error.to_string(),
            };
            Err(WorkerError::Died { command, status, signal, stderr: told(process) })
        }
        Err(Silence::Stopped) => {
            let _ = process.end(Duration::ZERO);
            Err(WorkerError::Stopped { command })
        }
        Err(Silence::TimedOut) => {
            let limit = match awaited {
                AwaitedMessage::WorkerIntroduction => launch.start,
                AwaitedMessage::WorkerAnswer => launch.answer,
            };
            // Killed, whatever its status is.
            let _ = process.end(Duration::ZERO);
            Err(WorkerError::TimedOut { command, awaited: awaited.name(), limit, stderr: told(process) })
        }
    }
}

/// The error of a message that the protocol does not have. Ends the process.
fn broken(
    process: &mut Process,
    command: &ForeignText,
    field: &'static str,
    given: String,
    expected: String,
) -> WorkerError {
    let _ = process.end(Duration::ZERO);
    WorkerError::Protocol {
        command: command.clone(),
        field,
        given: given.into(),
        expected: expected.into(),
        stderr: told(process),
    }
}

/// Returns the process's last lines of stderr, as the end of a message.
fn told(process: &Process) -> ForeignLines {
    let words = process.last_words();
    if words.trim().is_empty() { ForeignLines::default() } else { format!("\n{words}").into() }
}

/// A candidate is a file, and no more is read of it than could be right: dlogits in f64 for logits of half the size.
fn expect_file(path: &Path, problem: &Path) -> Result<(), FixtureError> {
    let io = |reason| FixtureError::io(path, "read", reason);
    let length =
        |path: &Path| fs::symlink_metadata(path).map_err(io).map(|metadata| (metadata.is_file(), metadata.len()));
    let ((is_file, given), (_, problem)) = (length(path)?, length(problem)?);
    // dlogits in f64 for logits of 16 bits are four times as large as the problem.
    let longest = 4 * problem + MAX_HEADER_LEN;
    match is_file {
        false => Err(FixtureError::invalid(path, "candidate", "no regular file", "one")),
        true if given > longest => {
            Err(FixtureError::invalid(path, "length", format!("{given} bytes"), format!("at most {longest}")))
        }
        true => Ok(()),
    }
}
