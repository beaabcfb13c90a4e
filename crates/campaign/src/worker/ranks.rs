//! [`RankedWorker`]: one kernel on several ranks, a process for each, whose shares are put together to one answer.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use ndarray::{Axis, Dimension, IxDyn, RemoveAxis};
use serde::{Deserialize, Serialize};

use super::{Worker, WorkerAnswer, WorkerError, WorkerLaunch, guarded_folder};
use crate::kernel::{CallWay, CallWayKind, Fault, KernelUnderTest, worker_fault};
use crate::subject::Subject;
use assay_core::guardian::Guardian;
use assay_core::problem::{Candidate, FloatArray, FloatView, Gradient, HeadLayout, Shape, joined};
use assay_core::spec::LossSpec;

/// The axis that the ranks of a kernel share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardCut {
    /// Each rank has a range of vocabulary entries, and every token.
    Vocabulary,
    /// Each rank has some of the sequences.
    Batch,
    /// Each rank has some of the tokens of every sequence.
    Tokens,
}

impl ShardCut {
    /// Every axis, with the name that options have for it.
    pub const ALL: [(Self, &'static str); 3] =
        [(Self::Vocabulary, "vocabulary"), (Self::Batch, "batch"), (Self::Tokens, "tokens")];

    /// Returns the name that options and messages have for it.
    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(cut, _)| *cut == self).map_or("", |(_, name)| name)
    }
}

/// The share of one rank in a problem: the indices `start..end` of the axis that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankShard {
    /// The rank of the process, counted from 0.
    pub rank: usize,
    /// The number of ranks that share the problem.
    pub ranks: usize,
    /// The axis that is cut.
    pub cut: ShardCut,
    /// The first index of the share.
    pub start: usize,
    /// The index after the last of the share.
    pub end: usize,
}

impl RankShard {
    /// Cuts an axis of `extent` for all ranks; shares differ by one where `ranks` does not divide it. `None` if a rank had nothing.
    pub fn all(ranks: usize, cut: ShardCut, extent: usize) -> Option<Vec<Self>> {
        let share = |rank| Self { rank, ranks, cut, start: rank * extent / ranks, end: (rank + 1) * extent / ranks };
        (extent >= ranks).then(|| (0..ranks).map(share).collect())
    }
}

/// The variables by which a process knows its place before the first problem: rank, number of ranks, and a file for their rendezvous.
const VARIABLES: [&str; 3] = ["ASSAY_RANK", "ASSAY_RANKS", "ASSAY_RENDEZVOUS"];

/// The pause between two looks at whether the campaign is to stop.
const LOOK: Duration = Duration::from_millis(20);

/// A kernel on several ranks. All processes end together: where one fails, the others may wait for it without end.
pub struct RankedWorker {
    launch: WorkerLaunch,
    workers: Vec<Worker>,
    /// The kernel on one rank, from the first question for it on.
    alone: Option<Worker>,
    /// The one other way of calling: on one rank.
    ways: [CallWay; 1],
    /// Whether one rank is asked, in place of all.
    asks_alone: bool,
    cut: ShardCut,
    /// The flag that ends the wait for every rank.
    halt: Arc<AtomicBool>,
    /// The folder of the files by which ranks find one another: a file for each start.
    rendezvous: Guardian,
    starts: usize,
    /// Whether the processes wait for a question.
    are_running: bool,
}

impl RankedWorker {
    /// Starts `ranks` processes of one command.
    ///
    /// # Errors
    /// [`WorkerError`] of the first that does not start.
    pub fn start(launch: WorkerLaunch, ranks: usize, cut: ShardCut) -> Result<Self, WorkerError> {
        let rendezvous = guarded_folder();
        let rendezvous = rendezvous.map_err(|reason| WorkerError::Start { command: "the ranks".into(), reason })?;
        let halt = Arc::new(AtomicBool::new(false));
        let ways = [CallWay { words: "on one rank".into(), equal_cotangents: false, kind: CallWayKind::OneRank }];
        let (workers, alone, asks_alone) = (Vec::new(), None, false);
        let mut ranked =
            Self { launch, workers, alone, ways, asks_alone, cut, halt, rendezvous, starts: 0, are_running: true };
        let launches: Vec<WorkerLaunch> = (0..ranks).map(|rank| ranked.launch_of(rank, ranks)).collect();
        // Each loads its framework, which takes as long for all as for one.
        let started: Vec<Result<Worker, WorkerError>> = thread::scope(|scope| {
            let starting: Vec<_> = launches.into_iter().map(|launch| scope.spawn(|| Worker::start(launch))).collect();
            all_finished(starting, &ranked.launch.stop, &ranked.halt)
        });
        ranked.workers = started.into_iter().collect::<Result<_, _>>()?;
        Ok(ranked)
    }

    /// Returns the launch of one rank, with what it needs to find the others.
    fn launch_of(&self, rank: usize, ranks: usize) -> WorkerLaunch {
        let file = self.rendezvous.folder().join(self.starts.to_string()).into_os_string();
        let values: [OsString; 3] = [rank.to_string().into(), ranks.to_string().into(), file];
        let added = VARIABLES.iter().map(OsString::from).zip(values);
        let environment = self.launch.environment.iter().cloned().chain(added).collect();
        WorkerLaunch { environment, stop: Arc::clone(&self.halt), ..self.launch.clone() }
    }

    /// Ends every process; the next question starts them again, with a rendezvous of their own.
    fn end(&mut self) {
        self.are_running = false;
        self.workers.iter_mut().for_each(Worker::end);
    }

    /// Asks one rank for the whole problem.
    fn ask_alone<P: Subject>(
        &mut self,
        spec: &LossSpec,
        problem: &P,
        shard: &RankShard,
    ) -> Result<WorkerAnswer<P::Gradient>, WorkerError> {
        self.halt.store(false, Ordering::Relaxed);
        let mut worker = if let Some(worker) = self.alone.take() {
            worker
        } else {
            // A rendezvous of its own: the file of the others has their number.
            self.starts += 1;
            Worker::start(WorkerLaunch { stop: Arc::clone(&self.launch.stop), ..self.launch_of(0, 1) })?
        };
        let answer = worker.ask_shard(spec, problem, problem, shard);
        // One that failed is started again, with another file.
        self.alone = answer.is_ok().then_some(worker);
        answer
    }

    /// Asks every rank for its share, and returns one answer for each.
    fn ask<P: Subject>(
        &mut self,
        spec: &LossSpec,
        problem: &P,
        shards: &[RankShard],
    ) -> Vec<Result<WorkerAnswer<P::Gradient>, WorkerError>> {
        if !self.are_running {
            self.starts += 1;
            let ranks = self.workers.len();
            let launches: Vec<WorkerLaunch> = (0..ranks).map(|rank| self.launch_of(rank, ranks)).collect();
            self.workers.iter_mut().zip(launches).for_each(|(worker, launch)| worker.launch_as(launch));
            self.are_running = true;
        }
        self.halt.store(false, Ordering::Relaxed);
        let (halt, stop) = (&self.halt, &self.launch.stop);
        thread::scope(|scope| {
            let asked = self.workers.iter_mut().zip(shards).map(|(worker, shard)| {
                let asking = move || {
                    let answer = worker.ask_shard(spec, problem, &share_of(problem, *shard), shard);
                    // The other ranks wait for this one, in an exchange that does not come.
                    if !matches!(answer, Ok(WorkerAnswer::Candidate(_))) {
                        halt.store(true, Ordering::Relaxed);
                    }
                    answer
                };
                scope.spawn(asking)
            });
            all_finished(asked.collect(), stop, halt)
        })
    }
}

/// Waits for the threads of all ranks, and halts every rank when the campaign is to stop.
fn all_finished<T>(threads: Vec<ScopedJoinHandle<T>>, stop: &AtomicBool, halt: &AtomicBool) -> Vec<T> {
    while threads.iter().any(|thread| !thread.is_finished()) {
        if stop.load(Ordering::Relaxed) {
            halt.store(true, Ordering::Relaxed);
        }
        thread::sleep(LOOK);
    }
    threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
}

impl<P: Subject> KernelUnderTest<P> for RankedWorker {
    fn cut(&self) -> Option<ShardCut> {
        Some(self.cut)
    }

    fn ways(&self) -> &[CallWay] {
        &self.ways
    }

    fn call_by(&mut self, way: Option<usize>) {
        self.asks_alone = way.is_some();
    }

    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        let (ranks, cut) = (if self.asks_alone { 1 } else { self.workers.len() }, self.cut);
        let Shape { batch, tokens, vocab } = problem.shape().into();
        if cut != ShardCut::Vocabulary && problem.batch().extra.sequences.packed().is_some() {
            return Err(Fault::Unsupported(format!("packed sequences, cut over the {}", cut.name()).into()));
        }
        let extent = match cut {
            ShardCut::Vocabulary => vocab,
            ShardCut::Batch => batch,
            ShardCut::Tokens => tokens,
        };
        let shards = RankShard::all(ranks, cut, extent).ok_or_else(|| {
            Fault::Unsupported(format!("{ranks} ranks, more than there are indices of the {}", cut.name()).into())
        })?;
        let answers = match &shards[..] {
            [whole] if self.asks_alone => vec![self.ask_alone(spec, &**problem, whole)],
            _ => self.ask(spec, &**problem, &shards),
        };
        let mut shares = Vec::new();
        let mut refused = None;
        let mut failed: Option<(usize, WorkerError)> = None;
        for (rank, answer) in answers.into_iter().enumerate() {
            match answer {
                Ok(WorkerAnswer::Candidate(candidate)) => shares.push(*candidate),
                Ok(WorkerAnswer::Unsupported(what)) => {
                    refused.get_or_insert(what);
                }
                // A rank that was ended for another's sake has not failed itself.
                Err(WorkerError::Stopped { .. }) => {}
                Err(error) => {
                    failed.get_or_insert((rank, error));
                }
            }
        }
        if shares.len() == ranks {
            let whole = put_together(&**problem, cut, &shares)?;
            read(&whole.lend());
            return Ok(());
        }
        self.end();
        match (failed, refused) {
            (Some((rank, error)), _) => Err(worker_fault(error).at_rank(rank)),
            (None, Some(what)) => Err(Fault::Unsupported(what)),
            (None, None) => Err(Fault::Interrupted),
        }
    }
}

/// Returns the part of a problem that a rank has: what its outputs are as large as.
fn share_of<P: Subject>(problem: &P, shard: RankShard) -> P {
    let mut part = problem.whole();
    let indices = (shard.start..shard.end).collect();
    match shard.cut {
        ShardCut::Vocabulary => part.columns = indices,
        ShardCut::Batch => part.batch = indices,
        ShardCut::Tokens => part.tokens = indices,
    }
    problem.part(&part)
}

/// The way in which the arrays of all ranks make one.
#[derive(Clone, Copy)]
enum JoinedShares {
    /// One after another along an axis.
    Along(usize),
    /// Every rank has the whole array, with the same bits.
    Replicated,
}

impl JoinedShares {
    /// Joins the arrays of all ranks.
    fn join<D: RemoveAxis>(self, output: &str, shares: &[&FloatArray<D>]) -> Result<FloatArray<D>, Fault> {
        let axis = match self {
            JoinedShares::Along(axis) => Axis(axis),
            JoinedShares::Replicated => return replica(output, shares),
        };
        let first = shares[0].shape();
        let is_like_first = |share: &FloatArray<D>| {
            let others = |shape: &[usize]| {
                shape.iter().enumerate().filter(|(i, _)| *i != axis.0).map(|(_, n)| *n).collect::<Vec<_>>()
            };
            share.shape().len() == first.len()
                && others(share.shape()) == others(first)
                && share.dtype() == shares[0].dtype()
        };
        match shares.iter().position(|share| !is_like_first(share)) {
            Some(rank) => Err(Fault::Output {
                field: output.into(),
                given: format!("{} {:?} on rank {rank}", shares[rank].dtype(), shares[rank].shape()).into(),
                expected: format!("{} {first:?} as on rank 0, but for the axis that is cut", shares[0].dtype()).into(),
            }),
            None => Ok(joined(axis, shares)),
        }
    }
}

/// Returns the array that all ranks have, if it has the same bits on all.
fn replica<D: Dimension>(output: &str, shares: &[&FloatArray<D>]) -> Result<FloatArray<D>, Fault> {
    match shares.iter().position(|share| !share.same_bits(shares[0])) {
        Some(rank) => Err(Fault::Output {
            field: output.into(),
            given: format!("other bits on rank {rank} than on rank 0").into(),
            expected: "the same bits on every rank, each of which has the whole array".to_string().into(),
        }),
        None => Ok(shares[0].clone()),
    }
}

/// Collects one output of all shares; `None` if some rank lacks it, and the judge says whether it may be missing.
fn all<'s, C, T>(shares: &'s [C], of: impl Fn(&'s C) -> Option<&'s T>) -> Option<Vec<&'s T>> {
    shares.iter().map(of).collect()
}

/// Puts the answers of all ranks together to one on the whole problem.
fn put_together<P: Subject>(
    problem: &P,
    cut: ShardCut,
    shares: &[Candidate<P::Gradient>],
) -> Result<Candidate<P::Gradient>, Fault> {
    let of_tokens = match cut {
        ShardCut::Vocabulary => JoinedShares::Replicated,
        ShardCut::Batch => JoinedShares::Along(0),
        ShardCut::Tokens => JoinedShares::Along(1),
    };
    let per_token = |output: &str, arrays: Option<Vec<&FloatArray<_>>>| {
        arrays.map(|arrays| of_tokens.join(output, &arrays)).transpose()
    };
    let head_axis = P::head_form(problem.form()).map(|form| match form.layout {
        HeadLayout::VocabByHidden => 0,
        HeadLayout::HiddenByVocab => 1,
    });
    let lent: Vec<_> = shares.iter().map(|share| share.gradient.lend()).collect();
    let arrays: Vec<Vec<FloatArray<IxDyn>>> =
        lent.iter().map(|view| P::Gradient::arrays(view).iter().map(FloatView::to_owned).collect()).collect();
    let joined_array = |(place, name): (usize, &&str)| {
        let join = match (place, cut, head_axis) {
            // Each rank has dlogits of its own entries; the gradient of hidden states is a sum over all entries, which all ranks have.
            (0, ShardCut::Vocabulary, None) => JoinedShares::Along(2),
            (0, ShardCut::Vocabulary, Some(_)) => JoinedShares::Replicated,
            (0, ..) => of_tokens,
            (_, ShardCut::Vocabulary, Some(axis)) => JoinedShares::Along(axis),
            _ => JoinedShares::Replicated,
        };
        join.join(name, &arrays.iter().map(|arrays| &arrays[place]).collect::<Vec<_>>())
    };
    let gradient = P::Gradient::ARRAYS.iter().enumerate().map(joined_array).collect::<Result<Vec<_>, _>>()?;
    let others = all(shares, |share| share.logp_of_others.as_ref());
    Ok(Candidate {
        loss: all(shares, |share| share.loss.as_ref()).map(|losses| replica("loss", &losses)).transpose()?,
        gradient: P::Gradient::from_arrays(gradient, P::Gradient::dlogits_dtype(&lent[0])),
        logp: per_token("logp", all(shares, |share| share.logp.as_ref()))?,
        logp_of_others: others.map(|others| of_tokens.join("logp", &others)).transpose()?,
        entropy: per_token("entropy", all(shares, |share| share.entropy.as_ref()))?,
        token_loss: per_token("token_loss", all(shares, |share| share.token_loss.as_ref()))?,
        metrics: None,
    })
}
