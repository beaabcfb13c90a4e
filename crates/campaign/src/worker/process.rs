//! A process group that is spoken to in lines, and gone afterwards.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::LONGEST_LINE;

/// The number of last bytes of stderr that messages show.
const TAIL: usize = 4 << 10;
const TAIL_LINES: usize = 12;

/// The time that a process may take to end once its stdin is closed, and its stderr to be read once it has ended.
const PATIENCE: Duration = Duration::from_millis(500);

/// The time that a process may take to end once it has closed its stdout: an interpreter with a framework takes seconds.
const FAREWELL: Duration = Duration::from_secs(10);

/// The time after which who waits for a line looks whether to stop.
const LOOK: Duration = Duration::from_millis(50);

/// The pause between two looks at a process that is ending.
const PAUSE: Duration = Duration::from_millis(1);

/// Why there is no line.
#[derive(Debug)]
pub(super) enum Silence {
    /// The process closed its stdout, or ended.
    Ended,
    /// The time for the line is over.
    TimedOut,
    /// Whoever waits for the line is asked to stop.
    Stopped,
    /// The bytes are no line of text, for the reason given.
    Garbage(String),
}

/// A running process, the first of a group of its own. Its pipes are served by threads, so that nothing that it does or
/// leaves undone holds up who speaks to it.
pub(super) struct Process {
    child: Child,
    group: Pid,
    /// The sender of lines to the process's stdin, which closes when this is dropped.
    requests: Option<Sender<String>>,
    lines: Receiver<Result<String, String>>,
    stderr: Arc<Mutex<VecDeque<u8>>>,
    stderr_reader: JoinHandle<()>,
    /// Whether it has been waited for.
    over: bool,
}

impl Process {
    pub(super) fn start(command: &mut Command) -> io::Result<Self> {
        // A group of its own contains every process that the worker starts, so that one signal ends them all.
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.process_group(0).spawn()?;
        let group = Pid::from_child(&child);
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(stdout), Some(stderr)) = pipes else { unreachable!("all three are piped") };

        // One thread writes requests, one reads stdout and one keeps the tail of stderr.
        let (requests, received) = channel::<String>();
        thread::spawn(move || while received.recv().is_ok_and(|line| stdin.write_all(line.as_bytes()).is_ok()) {});
        // One line is read ahead: a worker that talks without end is held up by its pipe.
        let (sender, lines) = sync_channel(1);
        thread::spawn(move || read_lines(stdout, &sender));
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&tail);
        let stderr_reader = thread::spawn(move || keep_tail(stderr, &kept));
        Ok(Self { child, group, requests: Some(requests), lines, stderr: tail, stderr_reader, over: false })
    }

    /// Returns the group of all processes that it has started.
    pub(super) fn group(&self) -> Pid {
        self.group
    }

    /// Sends a line. One that does not arrive is seen by the answer that does not come.
    pub(super) fn send(&self, line: String) {
        let _ = self.requests.as_ref().map(|requests| requests.send(line + "\n"));
    }

    /// The next line, before `deadline` and until `stop` is set.
    pub(super) fn line(&self, deadline: Instant, stop: &AtomicBool) -> Result<String, Silence> {
        let mut exited: Option<Instant> = None;
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(rest.min(LOOK)) {
                Ok(line) => return line.map_err(Silence::Garbage),
                Err(RecvTimeoutError::Disconnected) => return Err(Silence::Ended),
                // A process that it started may hold the pipes open after its end. Lines on their way are waited for.
                Err(RecvTimeoutError::Timeout) if exited.is_some_and(|at| at.elapsed() >= PATIENCE) => {
                    return Err(Silence::Ended);
                }
                Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => return Err(Silence::Stopped),
                Err(RecvTimeoutError::Timeout) if rest <= LOOK => {
                    return Err(if self.has_exited() { Silence::Ended } else { Silence::TimedOut });
                }
                Err(RecvTimeoutError::Timeout) if exited.is_none() && self.has_exited() => {
                    exited = Some(Instant::now());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Closes the process's stdin, waits for `patience`, kills the rest of its group, and returns the first process's
    /// exit status.
    pub(super) fn end(&mut self, patience: Duration) -> io::Result<ExitStatus> {
        // Closing stdin asks the worker to end; whoever is left after the wait is killed.
        self.requests = None;
        wait_until(patience, || self.has_exited());
        // Until it is waited for, no other group can have its number.
        let _ = kill_process_group(self.group, Signal::KILL);
        self.over = true;
        self.child.wait()
    }

    /// Waits for the end of a process whose stdout is closed, and which is therefore about to end by itself; `None` if it did not, and
    /// was killed.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.requests = None;
        wait_until(FAREWELL, || self.has_exited());
        let by_itself = self.has_exited();
        self.end(Duration::ZERO).map(|status| by_itself.then_some(status))
    }

    fn has_exited(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        !matches!(waitid(WaitId::Pid(self.group), options), Ok(None))
    }

    /// The last lines that it wrote to stderr.
    pub(super) fn last_words(&self) -> String {
        wait_until(PATIENCE, || self.stderr_reader.is_finished());
        let mut tail = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(tail.make_contiguous()).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.over {
            let _ = self.end(PATIENCE);
        }
    }
}

fn wait_until(patience: Duration, done: impl Fn() -> bool) {
    let deadline = Instant::now() + patience;
    while !done() && Instant::now() < deadline {
        thread::sleep(PAUSE);
    }
}

/// Sends line after line; the first that is no text is sent as a description of what is wrong, and is the last.
fn read_lines(stdout: impl Read, lines: &SyncSender<Result<String, String>>) {
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut bytes = Vec::new();
        // Bound the line before it is read, and take one byte more to notice a longer one.
        let line = match (&mut stdout).take(LONGEST_LINE as u64 + 1).read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(_) if bytes.pop_if(|last| *last == b'\n').is_some() => {
                String::from_utf8(bytes).map_err(|error| format!("a line that is not UTF-8: {error}"))
            }
            Ok(n) if n > LONGEST_LINE => Err(format!("a line of more than {LONGEST_LINE} bytes")),
            Ok(_) => Err(format!("a line without an end: {}", String::from_utf8_lossy(&bytes))),
        };
        let last = line.is_err();
        if lines.send(line).is_err() || last {
            return;
        }
    }
}

fn keep_tail(mut stderr: impl Read, tail: &Mutex<VecDeque<u8>>) {
    let mut bytes = [0; TAIL];
    while let Ok(n @ 1..) = stderr.read(&mut bytes) {
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.extend(&bytes[..n]);
        // Drop the oldest bytes: the last lines explain the end.
        let excess = tail.len().saturating_sub(TAIL);
        tail.drain(..excess);
    }
}
