//! [`Replay`]: problem files, one after another, before the judge.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use assay_core::implementation::Implementation;
use assay_core::problem::Candidate;
use assay_core::spec::LossSpec;
use assay_core::text::{ForeignText, shell_option, shell_path};
use assay_fixture::{ProblemFile, verify};
use assay_judge::invariance::Invariance;
use assay_judge::judge::Verdict;
use assay_judge::judgeable::Judgeable;
use assay_judge::metric::Position;
use assay_judge::packed::Twins;
use assay_judge::recorded::{
    RecordedScalar, head_scalars, judge_recorded, recorded_spec, scalars, sub_vocabulary_problem, token_values,
};
use assay_judge::report::{self, explain_recorded, on_devices};
use assay_judge::standards::CandidateStandards;
use assay_judge::summary::summarize;
use assay_judge::tolerance::Tolerances;
use assay_judge::trial::{JudgedProblem, hindrance};
use assay_reference::Reference;
use assay_schema::verdicts::{BitComparison, GateCheck, IgnoredCheck, ImplementationSummary, Verdicts};
use ndarray::{Array2, Ix1, Ix2, Ix3};

use crate::ahead::{compile_ahead, device_counts};
use crate::recorded::RecordedValues;
use crate::{ReplayError, ReplayedImplementations};

/// The id of what is compared with recorded values.
const REFERENCE: &str = "reference";

/// The request for a replay.
#[derive(Clone, Default)]
pub struct ReplayRequest {
    /// The loss; `None` means each problem's own: the one it was generated with, or that its recorded scalars belong to.
    pub spec: Option<LossSpec>,
    /// The implementations that each problem goes through.
    pub implementations: ReplayedImplementations,
    /// The device counts to run on; if empty, the largest count that an implementation takes a problem on.
    pub devices: Vec<usize>,
    /// The name of the only logits tensor to use; `None` means all.
    pub logits: Option<String>,
    /// The name of the only old log-probabilities to use; `None` means all.
    pub old_logp: Option<String>,
    /// Whether the sequences of each problem are packed into one row, and the outputs compared with those of the padded problem.
    pub packed: bool,
    /// The standards that every implementation is held to.
    pub standards: CandidateStandards,
    /// Options that a command which shows one check again ends with, such as ` --spec FILE`.
    pub options: String,
}

impl ReplayRequest {
    /// Requests every problem of each file, under its own loss, by `implementations`.
    ///
    /// ```
    /// use assay_replay::{ReplayRequest, ReplayedImplementations};
    ///
    /// let request = ReplayRequest::new(ReplayedImplementations::all(None));
    /// assert!(request.spec.is_none() && request.devices.is_empty());
    /// ```
    pub fn new(implementations: ReplayedImplementations) -> Self {
        Self { implementations, ..Self::default() }
    }

    /// The command that shows one check again: of the implementation `id`, or of the reference.
    fn command(&self, path: &Path, logits: Option<&str>, old_logp: Option<&str>, id: Option<&str>) -> String {
        let mut command = format!("assay replay {}", shell_path(path));
        for (option, name) in [("--impl", id), ("--logits", logits), ("--old-logp", old_logp)] {
            if let Some(name) = name {
                command += &shell_option(option, name);
            }
        }
        command + &self.options
    }
}

/// The outcome of a replay.
#[derive(Clone, Debug)]
pub struct ReplayOutcome {
    /// Every check, with a summary of each implementation.
    pub verdicts: Verdicts,
    /// The checks that failed, in words.
    pub failures: Vec<String>,
}

/// A replay while it runs.
pub struct Replay {
    request: Arc<ReplayRequest>,
    checks: Vec<GateCheck>,
    ignored: Vec<IgnoredCheck>,
    invariance: Vec<BitComparison>,
    failures: Vec<String>,
    /// The total time of an implementation's runs on a device count.
    run_times: BTreeMap<(String, usize), Duration>,
}

impl Replay {
    /// Starts a replay that has no file yet.
    ///
    /// ```
    /// use assay_replay::{Replay, ReplayError, ReplayRequest, ReplayedImplementations};
    ///
    /// let native = ReplayedImplementations::with_ids(&["native".to_string()], None).unwrap();
    /// let request = ReplayRequest { devices: vec![2], ..ReplayRequest::new(native) };
    /// assert!(matches!(Replay::new(request), Err(ReplayError::Devices { given: 2, .. })));
    /// ```
    ///
    /// # Errors
    /// [`ReplayError::Devices`] if none of the implementations runs on one of the device counts.
    pub fn new(request: ReplayRequest) -> Result<Self, ReplayError> {
        request.implementations.expect_devices(&request.devices)?;
        Ok(Self {
            request: Arc::new(request),
            checks: Vec::new(),
            ignored: Vec::new(),
            invariance: Vec::new(),
            failures: Vec::new(),
            run_times: BTreeMap::new(),
        })
    }

    /// Returns all checks made so far, with a summary of each implementation.
    ///
    /// ```
    /// use assay_replay::{Replay, ReplayRequest, ReplayedImplementations};
    ///
    /// // A replay that was given no file has not failed, and has compared nothing.
    /// let outcome = Replay::new(ReplayRequest::new(ReplayedImplementations::default()))?.finish();
    /// assert!(outcome.failures.is_empty() && outcome.verdicts.checks.is_empty());
    /// # Ok::<(), assay_replay::ReplayError>(())
    /// ```
    pub fn finish(self) -> ReplayOutcome {
        let implementations = self.summaries();
        let Self { checks, ignored, invariance, failures, .. } = self;
        let verdicts = Verdicts { implementations, invariance, ..report::verdicts(checks, ignored) };
        ReplayOutcome { verdicts, failures }
    }

    /// Returns the summary of the reference and of each implementation, on each device count. Those that were asked for by
    /// id have a line each, even if they compared nothing.
    fn summaries(&self) -> Vec<ImplementationSummary> {
        let ReplayRequest { implementations, devices: asked, .. } = &*self.request;
        let asked_for = !implementations.ids.is_empty();
        let ran = |id: &str| -> Vec<usize> {
            let own = self.checks.iter().filter(|check| check.implementation == id);
            own.map(|check| check.devices).collect::<BTreeSet<_>>().into_iter().collect()
        };
        let mut lines: Vec<(String, usize)> =
            ran(REFERENCE).into_iter().map(|devices| (REFERENCE.into(), devices)).collect();
        for chosen in implementations.each() {
            let mut counts = ran(chosen.id());
            if asked_for && !asked.is_empty() {
                counts.clone_from(asked);
            } else if asked_for && counts.is_empty() {
                counts.push(chosen.device_counts().last().copied().unwrap_or(1));
            }
            for devices in counts {
                let line = (chosen.id().to_string(), devices);
                if !lines.contains(&line) {
                    lines.push(line);
                }
            }
        }
        let summary = |line: (String, usize)| {
            let run = self.run_times.get(&line).copied();
            summarize(&line.0, line.1, &self.checks, run)
        };
        lines.into_iter().map(summary).collect()
    }

    /// Replays every problem of the file `path`: the reference against the numbers recorded in it, then each implementation against
    /// the reference. A check that fails is a finding, and no error.
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// use assay_replay::{Replay, ReplayRequest, ReplayedImplementations};
    ///
    /// let mut replay = Replay::new(ReplayRequest::new(ReplayedImplementations::default()))?;
    /// let error = replay.replay(Path::new("no/such.safetensors")).unwrap_err();
    /// assert!(error.to_string().starts_with("no/such.safetensors: "));
    /// # Ok::<(), assay_replay::ReplayError>(())
    /// ```
    ///
    /// # Errors
    /// [`ReplayError`] if the file cannot be read, does not fit the loss, or an implementation fails.
    pub fn replay(&mut self, path: &Path) -> Result<(), ReplayError> {
        let request = Arc::clone(&self.request);
        let request = &*request;
        verify(path)?;
        let file = ProblemFile::open(path)?;
        let other_spec = request.spec.clone().map_or_else(|| file.spec(), |spec| Ok(Some(spec)))?;
        let has_recorded = other_spec.is_none();
        let spec = other_spec.unwrap_or_else(recorded_spec);
        if file.has_head() {
            return self.replay_head(request, &file, path, &spec);
        }
        let mut expected = RecordedValues::read(&file);
        let logits_names = chosen(request.logits.as_ref(), file.logits_names());
        let old_logps: Vec<Option<&str>> = if spec.reads_old_logp() {
            chosen(request.old_logp.as_ref(), file.old_logp_names()).into_iter().map(Some).collect()
        } else {
            vec![None]
        };
        if logits_names.is_empty() || old_logps.is_empty() {
            let wanted = if logits_names.is_empty() { "logits… [B,T,V]" } else { "old_logps… [B,T]" };
            return Err(ReplayError::Content {
                path: path.into(),
                reason: format!("got no tensor named {wanted}, expected one").into(),
            });
        }
        for logits in &logits_names {
            for old_logp in &old_logps {
                let label = label(path, logits, *old_logp);
                let problem = file.problem(logits, *old_logp)?;
                if request.packed {
                    let command = |id: Option<&str>| request.command(path, Some(logits), *old_logp, id);
                    self.replay_packed(&label, &request.implementations.on_logits, (&spec, &problem, path), &command)?;
                    continue;
                }
                let known = known(&spec, &problem, path)?;
                if has_recorded {
                    let values = scalars(&known.reference);
                    let command = request.command(path, Some(logits), *old_logp, None);
                    self.check_recorded(&label, &mut expected, logits, *old_logp, &values, &command)?;
                    self.check_recorded_tokens(&label, &file, logits, &known.reference, &command)?;
                }
                let command = |id: Option<&str>| request.command(path, Some(logits), *old_logp, id);
                self.check_all(&label, &request.implementations.on_logits, &known, None, &command)?;
            }
        }
        if request.packed {
            return Ok(());
        }
        if has_recorded && request.logits.is_none() && request.old_logp.is_none() {
            for old_logp in &old_logps {
                self.replay_sub_vocabulary(request, &file, path, *old_logp, &mut expected)?;
            }
            let why = "this version computes no scalar of that name";
            self.ignored.extend(expected.rest().map(|key| report::ignored(ForeignText::from(key).to_string(), why)));
        }
        Ok(())
    }

    /// A file that has an LM head, and nothing recorded.
    fn replay_head(
        &mut self,
        request: &ReplayRequest,
        file: &ProblemFile,
        path: &Path,
        spec: &LossSpec,
    ) -> Result<(), ReplayError> {
        let old_logps: Vec<Option<&str>> = if spec.reads_old_logp() {
            chosen(request.old_logp.as_ref(), file.old_logp_names()).into_iter().map(Some).collect()
        } else {
            vec![None]
        };
        for old_logp in old_logps {
            let problem = file.head_problem(old_logp)?;
            let label = label(path, "lm_head", old_logp);
            if request.packed {
                let command = |id: Option<&str>| request.command(path, None, old_logp, id);
                self.replay_packed(&label, &request.implementations.heads, (spec, &problem, path), &command)?;
                continue;
            }
            let known = known(spec, &problem, path)?;
            let command = |id: Option<&str>| request.command(path, None, old_logp, id);
            self.check_all(&label, &request.implementations.heads, &known, None, &command)?;
        }
        Ok(())
    }

    /// Replays a problem with its sequences packed into one row through the reference and each of `implementations`,
    /// and compares the bits of both with those of the padded problem.
    fn replay_packed<P: Judgeable>(
        &mut self,
        label: &str,
        implementations: &[Arc<dyn Implementation<P>>],
        (spec, problem, path): (&LossSpec, &P, &Path),
        command: &dyn Fn(Option<&str>) -> String,
    ) -> Result<(), ReplayError> {
        let label = format!("{label} packed");
        // Whatever is wrong with it is said of what is in the file.
        problem.checked_shape(spec).map_err(|reason| ReplayError::Problem { path: path.into(), reason })?;
        if problem.batch().extra.sequences.packed().is_some() {
            return Err(ReplayError::Packed { path: path.into() });
        }
        let Some(twins) = Twins::from_padded(spec, problem) else {
            let why = "the loss reads weights of masked tokens, of which a packed batch has fewer".into();
            self.ignored.push(IgnoredCheck { what: label, why, not_run: None });
            return Ok(());
        };
        let [packed, padded] = [&twins.packed, &twins.padded].map(|problem| known(&twins.spec, problem, path));
        let (packed, padded) = (packed?, padded?);
        let bits = twins.between(&P::outcome(&packed.reference), &P::outcome(&padded.reference));
        self.invariance.push(report::bit_comparison(&label, REFERENCE, [1, 1], true, &bits));
        self.check_all(&label, implementations, &packed, Some(&twins), command)
    }

    /// Checks each of `implementations` on one problem, as [`check_on_devices`](Self::check_on_devices) does, the next ones compiled ahead.
    fn check_all<P: Judgeable>(
        &mut self,
        label: &str,
        implementations: &[Arc<dyn Implementation<P>>],
        known: &JudgedProblem<P>,
        twins: Option<&Twins<P>>,
        command: &dyn Fn(Option<&str>) -> String,
    ) -> Result<(), ReplayError> {
        let request = Arc::clone(&self.request);
        compile_ahead(implementations, (known.spec, known.problem), &request.devices, |implementation| {
            let command = command(Some(implementation.id()));
            self.check_on_devices(label, implementation, known, twins, &command)
        })
    }

    /// One implementation on one problem, on the device counts asked for, or on the most that it supports; and on the padded twin of a
    /// packed one.
    fn check_on_devices<P: Judgeable>(
        &mut self,
        label: &str,
        implementation: &dyn Implementation<P>,
        known: &JudgedProblem<P>,
        twins: Option<&Twins<P>>,
        command: &str,
    ) -> Result<(), ReplayError> {
        let &JudgedProblem { spec, problem, .. } = known;
        let mut first: Option<(usize, Candidate<P::Gradient>)> = None;
        for devices in device_counts(&self.request.devices, implementation, spec, problem) {
            let name = on_devices(implementation.id(), devices);
            if let Some(why) = hindrance(implementation, spec, problem, devices) {
                self.ignored.push(IgnoredCheck { what: format!("{label} with {name}"), why, not_run: Some(name) });
                continue;
            }
            let given = problem.clone();
            let start = Instant::now();
            let outcome = implementation.run(spec, given, devices)?;
            *self.run_times.entry((implementation.id().into(), devices)).or_default() += start.elapsed();
            let command = format!("{command} --devices {devices}");
            for verdict in self.request.standards.judge(known, &outcome, implementation.class())? {
                if verdict.status.failed() {
                    self.failures.push(known.explain(&verdict, &name, &command).to_string());
                }
                let check = report::check(label, implementation.id(), &verdict.gate.to_string(), &verdict);
                self.checks.push(check.on_devices(devices, implementation.lowering()));
            }
            if let Some(twins) = twins.filter(|twins| hindrance(implementation, spec, &twins.padded, devices).is_none())
            {
                let padded = implementation.run(spec, twins.padded.clone(), devices)?;
                let bits = twins.between(&outcome, &padded);
                let of_both = report::bit_comparison(label, implementation.id(), [devices, devices], true, &bits);
                self.invariance.push(of_both);
            }
            match &first {
                None => first = Some((devices, outcome)),
                Some((first_devices, first)) => {
                    let bits = Invariance::between(first, &outcome);
                    let devices = [*first_devices, devices];
                    self.invariance.push(report::bit_comparison(label, implementation.id(), devices, false, &bits));
                }
            }
        }
        Ok(())
    }

    /// The reference against the scalars recorded for `<source>` and `<source>.<old_logp>`.
    fn check_recorded(
        &mut self,
        label: &str,
        expected: &mut RecordedValues,
        source: &str,
        old_logp: Option<&str>,
        values: &BTreeMap<&str, RecordedScalar>,
        command: &str,
    ) -> Result<(), ReplayError> {
        for (&name, &scalar) in values {
            let keys =
                [Some(format!("{source}.{name}")), old_logp.map(|old_logp| format!("{source}.{old_logp}.{name}"))];
            for key in keys.into_iter().flatten() {
                let Some(recorded) = expected.take(&key)? else { continue };
                let verdict = judge_recorded(&[(Position::default(), scalar, recorded)], Tolerances::builtin());
                self.add_recorded(label, name, &verdict, command);
            }
        }
        Ok(())
    }

    /// The reference against the `[B,T]` arrays recorded for `logits`.
    fn check_recorded_tokens(
        &mut self,
        label: &str,
        file: &ProblemFile,
        logits: &str,
        reference: &Reference,
        command: &str,
    ) -> Result<(), ReplayError> {
        for name in ["logp", "entropy"] {
            let tensor = format!("expected_{name}_of_{logits}");
            if !file.file().names().any(|held| held == tensor) {
                continue;
            }
            let recorded: Array2<f64> = file.file().numbers::<Ix2>(&tensor)?;
            let shape = reference.shape();
            file.file().expect_shape(&tensor, &[shape.batch, shape.tokens], "[B,T] of the logits")?;
            let pairs: Vec<_> = token_values(reference, name == "entropy")
                .map(|(at, scalar)| (Position::token(at.0, at.1), scalar, recorded[at]))
                .collect();
            let verdict = judge_recorded(&pairs, Tolerances::builtin());
            self.add_recorded(label, name, &verdict, command);
        }
        Ok(())
    }

    /// The check of what is recorded as `name`.
    fn add_recorded(&mut self, label: &str, name: &str, verdict: &Verdict, command: &str) {
        let output = format!("recorded {name}");
        if verdict.status.failed() {
            self.failures.push(explain_recorded(verdict, &format!("{REFERENCE}: {output}"), command).to_string());
        }
        self.checks.push(report::check(label, REFERENCE, &output, verdict));
    }

    /// The scalars recorded for a head with a part of the vocabulary, where the file has one.
    fn replay_sub_vocabulary(
        &mut self,
        request: &ReplayRequest,
        file: &ProblemFile,
        path: &Path,
        old_logp: Option<&str>,
        expected: &mut RecordedValues,
    ) -> Result<(), ReplayError> {
        const SOURCE: &str = "subvocab";
        let tensors = file.file();
        if !tensors.names().any(|name| name == "lm_head_rows") {
            return Ok(());
        }
        let row_ids = tensors.integers::<Ix1>("lm_head_row_ids")?;
        let whole = file.problem("logits", old_logp)?;
        let (hidden, rows) = (tensors.floats::<Ix3>("hidden")?, tensors.floats::<Ix2>("lm_head_rows")?);
        let problem = sub_vocabulary_problem(&whole, hidden, rows, &row_ids)
            .map_err(|reason| ReplayError::Content { path: path.into(), reason: reason.into() })?;
        let spec = recorded_spec();
        let known = known(&spec, &problem, path)?;
        let label = label(path, SOURCE, old_logp);
        let command = |id: Option<&str>| request.command(path, None, None, id);
        self.check_recorded(&label, expected, SOURCE, old_logp, &head_scalars(&known.reference), &command(None))?;
        self.check_all(&label, &request.implementations.heads, &known, None, &command)
    }
}

/// The names to replay: the one asked for, or all.
fn chosen<'n>(asked: Option<&'n String>, held: Vec<&'n str>) -> Vec<&'n str> {
    asked.map_or(held, |name| vec![name.as_str()])
}

fn known<'p, P: Judgeable>(
    spec: &'p LossSpec,
    problem: &'p P,
    path: &Path,
) -> Result<JudgedProblem<'p, P>, ReplayError> {
    JudgedProblem::new(spec, problem).map_err(|reason| ReplayError::Problem { path: path.into(), reason })
}

/// Returns the label of a problem: `qwen_tiny logits old_logps`.
fn label(path: &Path, logits: &str, old_logp: Option<&str>) -> String {
    let stem = ForeignText::from(path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy());
    format!("{stem} {} {}", ForeignText::from(logits), ForeignText::from(old_logp.unwrap_or("current")))
}
