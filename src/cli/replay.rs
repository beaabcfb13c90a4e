//! `assay replay`: recorded problems through every implementation.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use ndarray::{Array2, Ix1, Ix2, Ix3};

use super::standards::CandidateStandards;
use super::{CliError, Passed, PluginChoice, Printing};
use crate::config;
use crate::fixture::{ProblemFile, manifest_files, verify};
use crate::implementation::{Implementation, ProblemFormat};
use crate::judge::invariance::Invariance;
use crate::judge::judge::Verdict;
use crate::judge::judgeable::Judgeable;
use crate::judge::metric::Position;
use crate::judge::packed::{Packable, Twin, Twins};
use crate::judge::recorded::{
    RecordedScalar, head_scalars, judge_recorded, recorded_spec, scalars, sub_vocabulary_problem, token_values,
};
use crate::judge::report::{self, explain_recorded, on_devices};
use crate::judge::summary::{self, summarize};
use crate::judge::tolerance::Tolerances;
use crate::judge::trial::{Known, hindrance};
use crate::problem::{Candidate, HeadProblem, Problem};
use crate::project;
use crate::reference::Reference;
use crate::registry::{find, registry};
use crate::schema::verdicts::{BitComparison, GateCheck, IgnoredCheck, ImplementationSummary, Verdicts};
use crate::spec::LossSpec;

/// The folder of fixtures that is used when none is named.
const DEFAULT_FOLDER: &str = "fixtures";

/// Implementations whose programs are compiled before they run. Fewer programs than are kept for who asks again, on as many device
/// counts as there are.
const AHEAD: usize = 8;

/// The id of what is compared with recorded values.
const REFERENCE: &str = "reference";

#[derive(Args)]
pub(super) struct ReplayCommand {
    /// Problem files; all that `fixtures/manifest.toml` lists if none is named
    #[arg(value_name = "FIXTURE.safetensors")]
    fixtures: Vec<PathBuf>,
    /// Run only these implementations; `file:MANIFEST.toml` is a program of your own
    #[arg(long = "impl", value_name = "ID")]
    implementations: Vec<String>,
    /// Run on these device counts; each implementation's largest if none is given
    #[arg(long, value_name = "D,…", value_delimiter = ',')]
    devices: Vec<NonZeroUsize>,
    #[command(flatten)]
    plugin: PluginChoice,
    /// The loss, in YAML, TOML or JSON, instead of the problem's own: the one it was generated with, or that its recorded
    /// scalars belong to
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Use only this logits tensor
    #[arg(long, value_name = "NAME")]
    logits: Option<String>,
    /// Use only these old log-probabilities
    #[arg(long, value_name = "NAME")]
    old_logp: Option<String>,
    /// Pack the sequences of each problem into one row, and compare what comes of it with what comes of the padded one
    #[arg(long)]
    packed: bool,
    /// Show every check, not one line an implementation alone
    #[arg(short, long, conflicts_with = "quiet")]
    verbose: bool,
    #[command(flatten)]
    standards: CandidateStandards,
    #[command(flatten)]
    printing: Printing,
}

impl ReplayCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let spec = config::read_spec(self.spec.as_deref())?;
        let (implementations, heads) = self.implementations()?;
        let fixtures = if self.fixtures.is_empty() {
            manifest_files(project::find(DEFAULT_FOLDER).unwrap_or_else(|_| DEFAULT_FOLDER.into()))?
        } else {
            self.fixtures.clone()
        };
        let mut session = Session {
            spec,
            implementations,
            heads,
            devices: self.devices.iter().map(|devices| devices.get()).collect(),
            standards: self.standards.clone(),
            ..Session::default()
        };
        self.expect_devices(&session.chosen())?;
        let progress = self.printing.progress(fixtures.len());
        for path in &fixtures {
            progress.set_message(path.display().to_string());
            session.replay(self, path)?;
            progress.inc(1);
        }
        progress.finish_and_clear();

        let implementations = session.summaries(!self.implementations.is_empty());
        let verdicts = Verdicts {
            implementations,
            invariance: session.invariance,
            ..report::verdicts(session.checks, session.ignored)
        };
        if !self.printing.quiet {
            let every_check = if self.verbose { report::checks_table(&verdicts) } else { String::new() };
            super::print(&(every_check + &summary::summary(&verdicts)))?;
        }
        for failure in &session.failures {
            super::print(&format!("{failure}\n"))?;
        }
        let rest = if self.verbose { report::below_table(&verdicts) } else { summary::below_summary(&verdicts) };
        self.printing.finish(&rest, &verdicts)?;
        Ok(verdicts.pass.into())
    }

    /// Refuses a device count that none of `chosen` can be run on here.
    fn expect_devices(&self, chosen: &[Chosen]) -> Result<(), CliError> {
        let Some(given) = self.devices.iter().find(|given| !chosen.iter().any(|one| one.takes(given.get()))) else {
            return Ok(());
        };
        let counts: BTreeSet<usize> = chosen.iter().flat_map(Chosen::device_counts).collect();
        let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
        let whose = match self.implementations.as_slice() {
            [] => "some implementation".into(),
            ids => ids.join(" or "),
        };
        Err(CliError::Usage(format!(
            "--devices: got {given}, expected counts that {whose} takes here: {}",
            counts.join(", ")
        )))
    }

    /// Returns the implementations that were asked for, or all.
    fn implementations(&self) -> Result<Implementations, CliError> {
        let plugin = self.plugin.checked_path()?;
        let heads = registry::<HeadProblem>(plugin);
        if self.implementations.is_empty() {
            return Ok((registry::<Problem>(plugin), heads));
        }
        let (mut of_logits, mut of_heads) = (Vec::new(), Vec::new());
        for id in &self.implementations {
            if let Some(head) = heads.iter().find(|head| head.id() == id) {
                head.available().map_err(|why| CliError::Usage(format!("{id}: {why}")))?;
                of_heads.push(Arc::clone(head));
                continue;
            }
            let implementation = find::<Problem>(id, plugin).map_err(CliError::Usage)?;
            implementation.available().map_err(|why| CliError::Usage(format!("{id}: {why}")))?;
            of_logits.push(implementation);
        }
        Ok((of_logits, of_heads))
    }

    /// The names to replay: the one asked for, or all.
    fn chosen<'n>(asked: Option<&'n String>, held: Vec<&'n str>) -> Vec<&'n str> {
        asked.map_or(held, |name| vec![name.as_str()])
    }

    /// The command that shows one check again: of the implementation `id`, or of the reference.
    fn command(&self, path: &Path, logits: Option<&str>, old_logp: Option<&str>, id: Option<&str>) -> String {
        let mut command = format!("assay replay {}", path.display());
        for (option, name) in [("--impl", id), ("--logits", logits), ("--old-logp", old_logp)] {
            if let Some(name) = name {
                command += &format!(" {option} {name}");
            }
        }
        if let Some(spec) = &self.spec {
            command += &format!(" --spec {}", spec.display());
        }
        if let Some(plugin) = self.plugin.path() {
            command += &format!(" --plugin {}", plugin.display());
        }
        if self.packed {
            command += " --packed";
        }
        command += &self.standards.options();
        command
    }
}

/// One implementation to run, of either kind.
enum Chosen<'s> {
    OnLogits(&'s dyn Implementation),
    Head(&'s dyn Implementation<HeadProblem>),
}

impl Chosen<'_> {
    fn id(&self) -> &str {
        match self {
            Self::OnLogits(implementation) => implementation.id(),
            Self::Head(head) => head.id(),
        }
    }

    fn device_counts(&self) -> Vec<usize> {
        match self {
            Self::OnLogits(implementation) => implementation.device_counts(),
            Self::Head(head) => head.device_counts(),
        }
    }

    fn takes(&self, devices: usize) -> bool {
        match self {
            Self::OnLogits(implementation) => implementation.takes(devices),
            Self::Head(head) => head.takes(devices),
        }
    }
}

/// The implementations of the loss on logits, and those with an LM head.
type Implementations = (Vec<Arc<dyn Implementation>>, Vec<Arc<dyn Implementation<HeadProblem>>>);

#[derive(Default)]
struct Session {
    /// `None` means each problem's own.
    spec: Option<LossSpec>,
    standards: CandidateStandards,
    implementations: Vec<Arc<dyn Implementation>>,
    heads: Vec<Arc<dyn Implementation<HeadProblem>>>,
    devices: Vec<usize>,
    checks: Vec<GateCheck>,
    ignored: Vec<IgnoredCheck>,
    invariance: Vec<BitComparison>,
    failures: Vec<String>,
    /// The total time of an implementation's runs on a device count.
    run_times: BTreeMap<(String, usize), Duration>,
}

impl Session {
    fn chosen(&self) -> Vec<Chosen<'_>> {
        let on_logits = self.implementations.iter().map(|implementation| Chosen::OnLogits(&**implementation));
        on_logits.chain(self.heads.iter().map(|head| Chosen::Head(&**head))).collect()
    }

    /// Returns the summary of the reference and of each implementation, on each device count. Those that were
    /// `asked_for` by name have a line each, even if they compared nothing.
    fn summaries(&self, asked_for: bool) -> Vec<ImplementationSummary> {
        let ran = |id: &str| -> Vec<usize> {
            let own = self.checks.iter().filter(|check| check.implementation == id);
            own.map(|check| check.devices).collect::<BTreeSet<_>>().into_iter().collect()
        };
        let mut lines: Vec<(String, usize)> =
            ran(REFERENCE).into_iter().map(|devices| (REFERENCE.into(), devices)).collect();
        for chosen in self.chosen() {
            let mut counts = ran(chosen.id());
            if asked_for && !self.devices.is_empty() {
                counts.clone_from(&self.devices);
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

    fn replay(&mut self, args: &ReplayCommand, path: &Path) -> Result<(), CliError> {
        verify(path)?;
        let file = ProblemFile::open(path)?;
        let other_spec = self.spec.clone().map_or_else(|| config::spec_within(&file), |spec| Ok(Some(spec)))?;
        let has_recorded = other_spec.is_none();
        let spec = other_spec.unwrap_or_else(recorded_spec);
        if file.has_head() {
            return self.replay_head(args, &file, path, &spec);
        }
        let mut expected = RecordedValues::read(&file);
        let logits_names = ReplayCommand::chosen(args.logits.as_ref(), file.logits_names());
        let old_logps: Vec<Option<&str>> = if spec.reads_old_logp() {
            ReplayCommand::chosen(args.old_logp.as_ref(), file.old_logp_names()).into_iter().map(Some).collect()
        } else {
            vec![None]
        };
        if logits_names.is_empty() || old_logps.is_empty() {
            let wanted = if logits_names.is_empty() { "logits… [B,T,V]" } else { "old_logps… [B,T]" };
            return Err(CliError::Config {
                path: path.into(),
                reason: format!("got no tensor named {wanted}, expected one"),
            });
        }
        for logits in &logits_names {
            for old_logp in &old_logps {
                let label = label(path, logits, *old_logp);
                let problem = file.problem(logits, *old_logp)?;
                if args.packed {
                    let command = |id: Option<&str>| args.command(path, Some(logits), *old_logp, id);
                    self.replay_packed(&label, &self.implementations.clone(), (&spec, &problem, path), &command)?;
                    continue;
                }
                let known = known(&spec, &problem, path)?;
                if has_recorded {
                    let values = scalars(&known.reference);
                    let command = args.command(path, Some(logits), *old_logp, None);
                    self.check_recorded(&label, &mut expected, logits, *old_logp, &values, &command)?;
                    self.check_recorded_tokens(&label, &file, logits, &known.reference, &command)?;
                }
                let command = |id: Option<&str>| args.command(path, Some(logits), *old_logp, id);
                self.check_all(&label, &self.implementations.clone(), &known, None, &command)?;
            }
        }
        if args.packed {
            return Ok(());
        }
        if has_recorded && args.logits.is_none() && args.old_logp.is_none() {
            for old_logp in &old_logps {
                self.replay_sub_vocabulary(args, &file, path, *old_logp, &mut expected)?;
            }
            let why = "this version computes no scalar of that name";
            self.ignored.extend(expected.rest().map(|key| report::ignored(key, why)));
        }
        Ok(())
    }

    /// A file that has an LM head, and nothing recorded.
    fn replay_head(
        &mut self,
        args: &ReplayCommand,
        file: &ProblemFile,
        path: &Path,
        spec: &LossSpec,
    ) -> Result<(), CliError> {
        let old_logps: Vec<Option<&str>> = if spec.reads_old_logp() {
            ReplayCommand::chosen(args.old_logp.as_ref(), file.old_logp_names()).into_iter().map(Some).collect()
        } else {
            vec![None]
        };
        for old_logp in old_logps {
            let problem = file.head_problem(old_logp)?;
            let label = label(path, "lm_head", old_logp);
            if args.packed {
                let command = |id: Option<&str>| args.command(path, None, old_logp, id);
                self.replay_packed(&label, &self.heads.clone(), (spec, &problem, path), &command)?;
                continue;
            }
            let known = known(spec, &problem, path)?;
            let command = |id: Option<&str>| args.command(path, None, old_logp, id);
            self.check_all(&label, &self.heads.clone(), &known, None, &command)?;
        }
        Ok(())
    }

    /// Replays a problem with its sequences packed into one row through the reference and each of `implementations`,
    /// and compares the bits of both with those of the padded problem.
    fn replay_packed<P: Judgeable + Packable>(
        &mut self,
        label: &str,
        implementations: &[Arc<dyn Implementation<P>>],
        (spec, problem, path): (&LossSpec, &P, &Path),
        command: &dyn Fn(Option<&str>) -> String,
    ) -> Result<(), CliError> {
        let label = format!("{label} packed");
        // Whatever is wrong with it is said of what is in the file.
        problem.checked_shape(spec).map_err(|reason| CliError::Problem { path: path.into(), reason })?;
        if problem.which_sequences().packed().is_some() {
            return Err(CliError::Usage(format!("--packed: {} has packed sequences already", path.display())));
        }
        let Some(twins) = Twins::of(spec, problem) else {
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

    /// Each of `implementations` on one problem, as [`check_on_devices`](Self::check_on_devices) does. While one runs and is judged, the
    /// programs of the next [`AHEAD`] are compiled, one a thread: half of a compile leaves the other cores idle.
    fn check_all<P: Judgeable + Sync>(
        &mut self,
        label: &str,
        implementations: &[Arc<dyn Implementation<P>>],
        known: &Known<P>,
        twins: Option<&dyn Twin<P>>,
        command: &dyn Fn(Option<&str>) -> String,
    ) -> Result<(), CliError> {
        let (spec, problem, devices) = (known.spec, known.problem, self.devices.clone());
        let (next, ahead) = mpsc::channel::<&dyn Implementation<P>>();
        let ahead = Mutex::new(ahead);
        let take = || ahead.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let compile = || {
            while let Ok(implementation) = take() {
                for devices in device_counts(&devices, implementation, spec, problem) {
                    // Whatever hinders it is said where it is run.
                    if let Ok(given) = ProblemFormat::from_problem(spec, problem) {
                        drop(implementation.prepare(spec, given, devices));
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..rayon::current_num_threads().min(AHEAD) {
                scope.spawn(compile);
            }
            let mut left = implementations.iter();
            let mut compile_one = || {
                if let Some(one) = left.next() {
                    next.send(&**one).expect("`ahead` outlives this");
                }
            };
            (0..AHEAD).for_each(|_| compile_one());
            let checked = implementations.iter().try_for_each(|implementation| {
                compile_one();
                let command = command(Some(implementation.id()));
                self.check_on_devices(label, &**implementation, known, twins, &command)
            });
            drop(next);
            // Where one has ended in an error, none is left to compile.
            while take().is_ok() {}
            checked
        })
    }

    /// One implementation on one problem, on the device counts asked for, or on the most that it supports; and on the padded twin of a
    /// packed one.
    fn check_on_devices<P: Judgeable>(
        &mut self,
        label: &str,
        implementation: &dyn Implementation<P>,
        known: &Known<P>,
        twins: Option<&dyn Twin<P>>,
        command: &str,
    ) -> Result<(), CliError> {
        let &Known { spec, problem, .. } = known;
        let mut first: Option<(usize, Candidate<P::Gradient>)> = None;
        for devices in device_counts(&self.devices, implementation, spec, problem) {
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
            for verdict in self.standards.judge(known, &outcome, implementation.class())? {
                if verdict.status.failed() {
                    self.failures.push(known.explain(&verdict, &name, &command).to_string());
                }
                let check = report::check(label, implementation.id(), &verdict.gate.to_string(), &verdict);
                self.checks.push(check.on_devices(devices, implementation.lowering()));
            }
            if let Some(twins) =
                twins.filter(|twins| hindrance(implementation, spec, twins.padded(), devices).is_none())
            {
                let padded = implementation.run(spec, twins.padded().clone(), devices)?;
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
    ) -> Result<(), CliError> {
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
    ) -> Result<(), CliError> {
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
        args: &ReplayCommand,
        file: &ProblemFile,
        path: &Path,
        old_logp: Option<&str>,
        expected: &mut RecordedValues,
    ) -> Result<(), CliError> {
        const SOURCE: &str = "subvocab";
        let tensors = file.file();
        if !tensors.names().any(|name| name == "lm_head_rows") {
            return Ok(());
        }
        let row_ids = tensors.integers::<Ix1>("lm_head_row_ids")?;
        let whole = file.problem("logits", old_logp)?;
        let (hidden, rows) = (tensors.floats::<Ix3>("hidden")?, tensors.floats::<Ix2>("lm_head_rows")?);
        let problem = sub_vocabulary_problem(&whole, hidden, rows, &row_ids)
            .map_err(|reason| CliError::Config { path: path.into(), reason })?;
        let spec = recorded_spec();
        let known = known(&spec, &problem, path)?;
        let label = label(path, SOURCE, old_logp);
        let command = |id: Option<&str>| args.command(path, None, None, id);
        self.check_recorded(&label, expected, SOURCE, old_logp, &head_scalars(&known.reference), &command(None))?;
        self.check_all(&label, &self.heads.clone(), &known, None, &command)
    }
}

/// The device counts to run on: those `asked` for, or the most that `implementation` takes the problem on.
fn device_counts<P: Judgeable>(
    asked: &[usize],
    implementation: &dyn Implementation<P>,
    spec: &LossSpec,
    problem: &P,
) -> Vec<usize> {
    if !asked.is_empty() {
        return asked.to_vec();
    }
    let counts = implementation.device_counts();
    let supported = |devices: &usize| {
        let supports = |given| implementation.supports_given(spec, given, *devices);
        ProblemFormat::from_problem(spec, problem).is_ok_and(|given| supports(given).is_ok())
    };
    vec![counts.iter().rev().copied().find(supported).or(counts.first().copied()).unwrap_or(1)]
}

fn known<'p, P: Judgeable>(spec: &'p LossSpec, problem: &'p P, path: &Path) -> Result<Known<'p, P>, CliError> {
    Known::of(spec, problem).map_err(|reason| CliError::Problem { path: path.into(), reason })
}

/// Returns the label of a problem: `qwen_tiny logits old_logps`.
fn label(path: &Path, logits: &str, old_logp: Option<&str>) -> String {
    let stem = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
    format!("{stem} {logits} {}", old_logp.unwrap_or("current"))
}

/// The `expected.…` entries of a file's metadata, ticked off as they are compared.
struct RecordedValues<'f> {
    path: &'f Path,
    entries: BTreeMap<&'f str, &'f str>,
    taken: BTreeSet<String>,
}

impl<'f> RecordedValues<'f> {
    fn read(file: &'f ProblemFile) -> Self {
        let entries =
            file.metadata().iter().filter_map(|(key, value)| Some((key.strip_prefix("expected.")?, value.as_str())));
        Self { path: file.file().path(), entries: entries.collect(), taken: BTreeSet::new() }
    }

    fn take(&mut self, key: &str) -> Result<Option<f64>, CliError> {
        let Some(text) = self.entries.get(key) else { return Ok(None) };
        // A scalar of the logits alone is compared once, not once for each array of old log-probabilities.
        if !self.taken.insert(key.into()) {
            return Ok(None);
        }
        let number = text.parse().map_err(|_| {
            let reason = format!("metadata `expected.{key}`: got `{text}`, expected a number");
            CliError::Config { path: self.path.into(), reason }
        });
        number.map(Some)
    }

    /// The keys of numbers that were never compared; the other entries are text.
    fn rest(&self) -> impl Iterator<Item = &'f str> {
        let numbers = self.entries.iter().filter(|(_, text)| text.parse::<f64>().is_ok());
        numbers.map(|(key, _)| *key).filter(|key| !self.taken.contains(*key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::implementation::{Prepared, RunError, Unavailable, Unsupported};
    use crate::judge::generate::{Recipe, Regime};
    use crate::problem::{Dtype, Shape};

    /// The number of implementations that were prepared and run, and the most that were prepared and not yet run.
    #[derive(Debug, Default)]
    struct RunCounts {
        prepared: usize,
        run: usize,
        most: usize,
    }

    /// The implementation `native`, which counts its calls.
    struct CountedImplementation {
        native: Arc<dyn Implementation>,
        counts: Arc<Mutex<RunCounts>>,
    }

    impl Implementation for CountedImplementation {
        fn id(&self) -> &str {
            self.native.id()
        }

        fn summary(&self) -> &str {
            self.native.summary()
        }

        fn class(&self) -> &str {
            self.native.class()
        }

        fn available(&self) -> Result<(), Unavailable> {
            Ok(())
        }

        fn supports(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
            self.native.supports(spec, shape, dtype, devices)
        }

        fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
            // Whoever compiles has time to go too far.
            while self.counts.lock().unwrap().prepared < AHEAD {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(2));
            self.counts.lock().unwrap().run += 1;
            self.native.run(spec, problem, devices)
        }

        fn prepare<'s>(
            &'s self,
            spec: &'s LossSpec,
            given: ProblemFormat<Problem>,
            devices: usize,
        ) -> Result<Box<dyn Prepared + 's>, RunError> {
            let mut counts = self.counts.lock().unwrap();
            counts.prepared += 1;
            counts.most = counts.most.max(counts.prepared - counts.run);
            self.native.prepare(spec, given, devices)
        }
    }

    #[test]
    fn programs_are_compiled_ahead_of_their_runs_but_not_all_at_once() {
        let (native, counts) = (find("native", None).unwrap(), Arc::default());
        let counting = |_| Arc::new(CountedImplementation { native: Arc::clone(&native), counts: Arc::clone(&counts) });
        let implementations: Vec<Arc<dyn Implementation>> = (0..3 * AHEAD).map(|i| counting(i) as Arc<_>).collect();
        let spec = LossSpec::default();
        let (shape, dtype, regime) = ([1, 2, 5], Dtype::F32, Regime::Normal);
        let recipe = Recipe { shape, dtype, regime, seed: 1, old_logp_noise_scale: 0.3, masked_garbage: false };
        let problem = recipe.problem(&spec).unwrap();
        let known = Known::of(&spec, &problem).unwrap();
        let mut session = Session::default();
        session.check_all("a problem", &implementations, &known, None, &|_| String::new()).unwrap();
        assert!(session.failures.is_empty(), "{:?}", session.failures);
        let RunCounts { prepared, run, most } = &*counts.lock().unwrap();
        assert_eq!([prepared, run], [&implementations.len(); 2]);
        assert!((AHEAD..=AHEAD + 1).contains(most), "{most} were compiled before they ran");
    }
}
