//! Connects the campaign engine to a kernel that is a Python function.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyKeyboardInterrupt, PyNotImplementedError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};

use crate::deck::DeckOptions;
use crate::error;
use crate::outputs::Returned;
use crate::problem::{Batch, KeptArrays, Problem, ProblemArray};
use crate::spec::Spec;
use assay::campaign::{
    self, AskedInvariance, CallWay, CallWayKind, CampaignProgress, Fault, KernelUnderTest, Subject, TextForm,
};
use assay::fixture::write_candidate;
use assay::implementation::Workload;
use assay::problem::{self as core, Candidate, HeadCandidate, HeadProblem};
use assay::report::{Input, render};
use assay::schema::campaign::CampaignReport;
use assay::spec::LossSpec;
use assay::text::shown_lines;
use assay::worker::{RankedWorker, ShardCut, Worker, WorkerError, WorkerLaunch};

/// The least time between two progress lines.
const PAUSE: Duration = Duration::from_millis(100);

/// One kernel before a deck of problems.
#[pyclass(frozen, module = "assay")]
pub(crate) struct Campaign {
    engine: campaign::Campaign,
    spec: Spec,
}

#[pymethods]
impl Campaign {
    #[new]
    #[pyo3(signature = (*, kernel, spec, deck, seconds, grade, allow, shrink, power, repros, invariant, alone))]
    #[expect(clippy::too_many_arguments, reason = "they are the options of `assay.check`, each by its name")]
    fn new(
        py: Python<'_>,
        kernel: &str,
        spec: Spec,
        deck: DeckOptions,
        seconds: Option<f64>,
        grade: &str,
        allow: Vec<String>,
        shrink: bool,
        power: bool,
        repros: Option<PathBuf>,
        invariant: Option<Vec<String>>,
        alone: bool,
    ) -> PyResult<Self> {
        let seconds = seconds.map(|given| {
            Duration::try_from_secs_f64(given)
                .map_err(|_| error::other(py, format!("seconds: got {given}, expected a number ≥ 0")))
        });
        let deck = deck.deck(py)?;
        let asked = invariant.map(|words| AskedInvariance::from_words(&words, &spec.loss, &deck));
        let asked = asked.transpose().map_err(|reason| error::other(py, format!("invariant: {reason}")))?;
        let engine = campaign::Campaign {
            invariance: asked.map(|asked| if alone { asked.alone() } else { asked }),
            project: spec.project.clone(),
            deck,
            grade: grade.parse().map_err(|reason| error::other(py, format!("grade: {reason}")))?,
            allow,
            shrink,
            power,
            time: seconds.transpose()?,
            repros,
            ..campaign::Campaign::new(kernel, (*spec.loss).clone())
        };
        Ok(Self { engine, spec })
    }

    /// Runs it on `function`, which is called with each problem, and with the words of one of the `ways` of calling if it is not the plain
    /// one. Each of these says whether it is for problems with equal cotangents, and whether it is another variant of the kernel.
    #[expect(clippy::too_many_arguments, reason = "they are the options of `assay.check`")]
    fn run(
        &self,
        py: Python<'_>,
        function: Py<PyAny>,
        outputs: Option<Vec<String>>,
        device: Option<String>,
        inplace: bool,
        progress: Option<Py<PyAny>>,
        ways: Vec<(String, bool, bool)>,
    ) -> PyResult<String> {
        let question = Question::new(self.spec.clone(), outputs, device, inplace);
        let way = |(words, equal_cotangents, is_variant)| CallWay {
            words,
            equal_cotangents,
            kind: if is_variant { CallWayKind::Variant } else { CallWayKind::Caller },
        };
        let ways = ways.into_iter().map(way);
        self.on(py, PythonKernel { function, question, ways: ways.collect(), way: None }, progress)
    }

    /// Runs it on the kernel that the process of `command` serves, by protocol assay-check/1. With `ranks` there is a process for each, and
    /// they share the axis that is named.
    fn run_isolated(
        &self,
        py: Python<'_>,
        command: Vec<OsString>,
        timeout: f64,
        progress: Option<Py<PyAny>>,
        ranks: Option<(usize, String)>,
    ) -> PyResult<String> {
        let answer = Duration::try_from_secs_f64(timeout)
            .map_err(|_| error::other(py, format!("timeout: got {timeout}, expected seconds")))?;
        let launch = WorkerLaunch { answer, ..WorkerLaunch::new(command) };
        let crashed = |reason: WorkerError| error::kernel_crashed(py, &reason, reason.signal());
        if let Some((ranks, name)) = ranks {
            let cut = ShardCut::ALL.into_iter().find(|(_, other)| *other == name).map(|(cut, _)| cut);
            let cut = cut.ok_or_else(|| {
                let names = ShardCut::ALL.map(|(_, name)| name).join(", ");
                error::other(py, format!("cut: got {name:?}, expected one of {names}"))
            })?;
            let worker = error::apart(py, || RankedWorker::start(launch, ranks, cut))?;
            return self.on(py, Served(worker.map_err(crashed)?), progress);
        }
        // The worker is a process of its own, which may take long to start: the interpreter goes on meanwhile.
        let worker = error::apart(py, || Worker::start(launch))?;
        self.on(py, Served(worker.map_err(crashed)?), progress)
    }
}

impl Campaign {
    fn on<K: KernelUnderTest<core::Problem> + KernelUnderTest<HeadProblem> + Send>(
        &self,
        py: Python<'_>,
        kernel: K,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let mut kernel = GuardedKernel { kernel, has_answered: false, absent: None };
        let mut said = Instant::now();
        let mut say = |CampaignProgress { tried, cases, failed }: CampaignProgress| {
            let Some(progress) = progress.as_ref().filter(|_| said.elapsed() > PAUSE) else { return };
            said = Instant::now();
            // A line that cannot be shown is no reason to stop.
            let _ = Python::attach(|py| progress.call1(py, (tried, cases, failed)).map(drop));
        };
        let found = error::apart(py, || match &self.engine.deck.head {
            None => self.engine.run::<core::Problem>(&mut kernel, &mut say),
            Some(_) => self.engine.run::<HeadProblem>(&mut kernel, &mut say),
        })?;
        if let Some(absent) = kernel.absent {
            return Err(error::other(py, absent));
        }
        let found = found.map_err(|reason| error::other(py, reason))?;
        Ok(serde_json::to_string_pretty(&found).expect("plain data has a JSON form"))
    }
}

/// The options of asking a function: which outputs are judged, on which device, and in whose memory.
struct Question {
    spec: Spec,
    /// The outputs that are judged; `None` for all.
    outputs: Option<Vec<String>>,
    device: Option<String>,
    inplace: bool,
    /// The arrays of the last problem that Python borrowed as copies.
    kept: KeptArrays,
}

impl Question {
    fn new(spec: Spec, outputs: Option<Vec<String>>, device: Option<String>, inplace: bool) -> Self {
        Self { spec, outputs, device, inplace, kept: KeptArrays::default() }
    }

    /// Calls `function` with `problem`, in the way of calling that is named, and reads the outputs that it returns: those of `share`, if
    /// that is given.
    ///
    /// # Errors
    /// What it raises; `OutputError`; `InputMutated`.
    fn ask<P: Workload>(
        &mut self,
        function: &Bound<'_, PyAny>,
        problem: &Arc<P>,
        way: Option<&str>,
        share: Option<&P>,
    ) -> PyResult<Returned>
    where
        Batch: From<Arc<P>>,
    {
        let py = function.py();
        let Self { spec, outputs, device, inplace, kept } = self;
        let asked = Problem::from_batch(spec.clone(), Arc::clone(problem).into(), None).on_device(device.clone());
        let asked = asked.with_kept_memory(kept);
        let asked = if *inplace { asked.with_writable_logits() } else { asked };
        let inputs = || asked.arrays().iter().filter(|lent| !lent.writable);
        let checksums =
            || inputs().map(|ProblemArray { name, block, .. }| (*name, block.checksum())).collect::<Vec<_>>();
        // A kernel must not write to its inputs: their checksums are compared before and after the call.
        let before = checksums();
        let answer = match way {
            None => function.call1((asked.clone(),))?,
            Some(words) => function.call1((asked.clone(), words))?,
        };
        let answer = match outputs {
            None => answer,
            Some(named) => chosen(&answer, named)?,
        };
        // Read the outputs first: this waits for a framework that still computes, and may still write.
        let returned = Returned::read(&spec.loss, share.unwrap_or(problem), &answer, false)?;
        if let Some(((name, _), _)) = before.iter().zip(checksums()).find(|(before, after)| *before != after) {
            return Err(error::input_mutated(py, name));
        }
        // An output that is a view of an input would change with the next problem, and is refused.
        for (output, addresses) in returned.addresses::<P::Gradient>() {
            let shared = inputs().find(|ProblemArray { block, .. }| {
                let held = block.addresses();
                held.start < addresses.end && addresses.start < held.end
            });
            if let Some(ProblemArray { name, .. }) = shared {
                let expected = "memory of its own, or inplace=True for dlogits in the memory of the logits";
                return Err(error::output_error(py, output, format!("a view of the input `{name}`"), expected));
            }
        }
        Ok(returned)
    }
}

/// Selects the outputs that are named.
fn chosen<'py>(answer: &Bound<'py, PyAny>, named: &[String]) -> PyResult<Bound<'py, PyAny>> {
    // What is no mapping is said where it is read.
    let Ok(mapping) = answer.cast::<PyMapping>() else { return Ok(answer.clone()) };
    let chosen = PyDict::new(answer.py());
    for name in named {
        if !mapping.contains(name)? {
            return Err(error::output_error(answer.py(), name, "nothing", "it to be returned, as `outputs` names it"));
        }
        chosen.set_item(name, mapping.get_item(name)?)?;
    }
    Ok(chosen.into_any())
}

/// A function that is called in this process.
struct PythonKernel {
    function: Py<PyAny>,
    question: Question,
    ways: Vec<CallWay>,
    /// The way of the next call, a place in `ways`.
    way: Option<usize>,
}

impl<P: Subject> KernelUnderTest<P> for PythonKernel
where
    Batch: From<Arc<P>>,
{
    fn ways(&self) -> &[CallWay] {
        &self.ways
    }

    fn call_by(&mut self, way: Option<usize>) {
        self.way = way;
    }

    fn answer(
        &mut self,
        _: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        let Self { function, question, ways, way } = self;
        let words = way.map(|way| ways[way].words.as_str());
        let returned = Python::attach(|py| {
            let asked = py.check_signals().and_then(|()| question.ask(function.bind(py), problem, words, None));
            asked.map_err(|reason| fault(py, &reason))
        })?;
        read(&returned.candidate(&**problem));
        // Its arrays are given back now, and not when the interpreter is next entered.
        Python::attach(|_| drop(returned));
        Ok(())
    }
}

/// A kernel whose campaign ends at its first call if that call misses a device or a package: every other problem would show the same, and
/// none anything of the kernel.
struct GuardedKernel<K> {
    kernel: K,
    has_answered: bool,
    /// The error in place of a report.
    absent: Option<String>,
}

impl<P: Subject, K: KernelUnderTest<P>> KernelUnderTest<P> for GuardedKernel<K> {
    fn cut(&self) -> Option<ShardCut> {
        self.kernel.cut()
    }

    fn ways(&self) -> &[CallWay] {
        self.kernel.ways()
    }

    fn call_by(&mut self, way: Option<usize>) {
        self.kernel.call_by(way);
    }

    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        let answer = self.kernel.answer(spec, problem, read);
        // A kernel that has answered can run here; what it raises later is a finding.
        self.has_answered |= answer.is_ok();
        match &answer {
            Err(Fault::Raised(text)) if !self.has_answered => {
                self.absent = absent(text.raw());
                if self.absent.is_some() { Err(Fault::Interrupted) } else { answer }
            }
            _ => answer,
        }
    }
}

/// The words of `PyTorch`, JAX, Triton and Python for a device or a package that is missing.
const ABSENT: [&str; 9] = [
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Torch not compiled with",
    "invalid device ordinal",
    "0 active drivers",
    "RuntimeError: Unknown backend",
    "RuntimeError: Unable to initialize backend",
    "Available backends are [",
    "ModuleNotFoundError: No module named",
];

/// Returns the error for a kernel that raised `text` because a device or a package is missing here; `None` for another reason. From a
/// worker the text is a traceback, whose last line names the exception.
fn absent(text: &str) -> Option<String> {
    // A traceback indents what it quotes of the source.
    let lines = || text.lines().rev().filter(|line| !line.starts_with(' '));
    // This package's own checks already say what is missing.
    let own = lines().find_map(|line| {
        let (_, reason) = line
            .split_once("AssayError: ")
            .filter(|(_, reason)| ["device: got", "framework: got"].iter().any(|start| reason.starts_with(start)))?;
        Some(
            reason
                .rsplit_once(" (")
                .filter(|(_, place)| place.contains("_frameworks.py:"))
                .map_or(reason, |(said, _)| said),
        )
    });
    if let Some(reason) = own {
        return Some(reason.into());
    }
    let given = lines().find(|line| ABSENT.iter().any(|words| line.contains(words)))?;
    Some(format!(
        "device: got a kernel that raises {given} before its first answer, expected one whose devices and packages are here; run it where \
         they are"
    ))
}

/// Converts the exception of a call to the fault of a kernel.
fn fault(py: Python<'_>, reason: &PyErr) -> Fault {
    let value = reason.value(py);
    let text = |name: &str| value.getattr(name).map_or_else(|_| String::new(), |text| text.to_string());
    // An interruption and an unsupported problem are no failures of the kernel.
    if reason.is_instance_of::<PyKeyboardInterrupt>(py) {
        return Fault::Interrupted;
    }
    if reason.is_instance_of::<PyNotImplementedError>(py) {
        return Fault::Unsupported(value.to_string().into());
    }
    match value.get_type().name().map(|name| name.to_string()).unwrap_or_default().as_str() {
        "OutputError" => Fault::Output {
            field: text("field").into(),
            given: text("given").into(),
            expected: text("expected").into(),
        },
        "InputMutated" => Fault::InputMutated(text("field").into()),
        name => Fault::Raised(format!("{name}: {value}{}", place(reason, py).unwrap_or_default()).into()),
    }
}

/// Returns the file and the line of the innermost frame, where the exception was raised.
fn place(reason: &PyErr, py: Python<'_>) -> Option<String> {
    // The innermost frame is the last of the linked list of frames.
    let mut frame = reason.traceback(py)?.into_any();
    while let Some(inner) = frame.getattr("tb_next").ok().filter(|inner| !inner.is_none()) {
        frame = inner;
    }
    let file = frame.getattr("tb_frame").ok()?.getattr("f_code").ok()?.getattr("co_filename").ok()?;
    Some(format!(" ({file}:{})", frame.getattr("tb_lineno").ok()?))
}

/// A worker that can be interrupted: Ctrl-C does not reach its process, so signals are checked between two questions.
struct Served<W>(W);

impl<P: Subject, W: KernelUnderTest<P>> KernelUnderTest<P> for Served<W> {
    fn cut(&self) -> Option<ShardCut> {
        self.0.cut()
    }

    fn ways(&self) -> &[CallWay] {
        self.0.ways()
    }

    fn call_by(&mut self, way: Option<usize>) {
        self.0.call_by(way);
    }

    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        Python::attach(|py| py.check_signals().map_err(|_| Fault::Interrupted))?;
        self.0.answer(spec, problem, read)
    }
}

/// Returns the part of a problem that one rank has: a range of the axis that is cut.
fn share_of<P: Subject>(problem: &P, share: Option<(&str, Range<usize>)>) -> Option<P> {
    let (cut, range) = share?;
    let mut part = problem.whole();
    let indices = range.collect();
    match cut {
        "vocabulary" => part.columns = indices,
        "batch" => part.batch = indices,
        _ => part.tokens = indices,
    }
    Some(problem.part(&part))
}

/// Asks `function` about `problem`, or a rank about its `share` of it, and writes the outputs to `path`. This runs in the process that has
/// one kernel to itself.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are the options of `assay.check`, and where to write")]
pub(crate) fn answer(
    py: Python<'_>,
    function: &Bound<'_, PyAny>,
    problem: &Problem,
    outputs: Option<Vec<String>>,
    device: Option<String>,
    inplace: bool,
    path: PathBuf,
    share: Option<(String, usize, usize)>,
) -> PyResult<()> {
    let mut question = Question::new(problem.under().clone(), outputs, device, inplace);
    let share = share.as_ref().map(|(cut, start, end)| (cut.as_str(), *start..*end));
    let written = match problem.batch() {
        Batch::Logits(problem) => {
            let share = share_of(&**problem, share);
            let returned = question.ask(function, problem, None, share.as_ref())?;
            let candidate = returned.candidate(share.as_ref().unwrap_or(problem));
            write_candidate(path, &<Candidate>::from_lent(&candidate), &BTreeMap::new())
        }
        Batch::Head(problem) => {
            let share = share_of(&**problem, share);
            let returned = question.ask(function, problem, None, share.as_ref())?;
            let candidate = returned.candidate(share.as_ref().unwrap_or(problem));
            write_candidate(path, &HeadCandidate::from_lent(&candidate), &BTreeMap::new())
        }
    };
    written.map_err(|reason| error::other(py, reason))
}

/// Formats the report of a campaign from its JSON; `call` is the call of the kernel on `problem`, if it is a function of one.
#[pyfunction]
pub(crate) fn report_text(py: Python<'_>, json: &str, details: bool, call: Option<String>) -> PyResult<String> {
    let report: CampaignReport = serde_json::from_str(json).map_err(|reason| error::other(py, reason))?;
    Ok(shown_lines(&campaign::text(&report, &TextForm { details, python_call: call })).into_owned())
}

/// Formats the report of a campaign as Markdown, from its JSON.
#[pyfunction]
pub(crate) fn report_markdown(py: Python<'_>, json: &str) -> PyResult<String> {
    let report: CampaignReport = serde_json::from_str(json).map_err(|reason| error::other(py, reason))?;
    Ok(shown_lines(&campaign::markdown(&report)).into_owned())
}

/// Renders the report page of a campaign from its JSON.
#[pyfunction]
pub(crate) fn page(py: Python<'_>, json: &str) -> PyResult<String> {
    let input = Input::parse(Path::new("assay.check"), json.as_bytes()).map_err(|reason| error::other(py, reason))?;
    Ok(render(&[input], "assay.check(…).to_html(path)"))
}
