//! [`Specimen`]: one correct GRPO kernel as teams write them, and every bug of the bank where it belongs.
//!
//! ```text
//! forward    a grid of rows; each walks its columns by tiles: a running maximum, sums that are rescaled when it rises
//! exchange   over vocabulary shards: the largest maximum, the sums relative to it, the chosen logit
//! loss       logp, entropy, token losses, their gradients; sums over row shards
//! backward   the same grid: dlogits over the logits, tile by tile
//! ```
//!
//! Exponents, exponentials and the ratio are f32; sums, and work that is done once per token, are f64; outputs are rounded once.
//! Devices are simulated: whole sequences over rows of the mesh, ranges of columns over its columns.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use ndarray::{Array2, arr0};

use crate::bank::Bug;
use crate::launch::{
    SimulatedMesh, SpecimenEvaluation, SpecimenGradient, SpecimenLaunch, SpecimenScore, SpecimenSoftmax, TILE,
    TokenCorrections, part,
};
use crate::logits::LogitReader;
use crate::loss;
use crate::rounding::{by_chance, to_tf32};
use assay_core::implementation::{Implementation, RunError, Unavailable, Unsupported};
use assay_core::problem::{Candidate, Dtype, Float, FloatArray, Problem, Shape, Tokens};
use assay_core::spec::{LogitsTransform, LossSpec, Objective, TemperatureDivides};

const ID: &str = "specimen";

/// Numbers of devices that the specimen simulates.
pub const DEVICE_COUNTS: [usize; 3] = [1, 2, 4];

/// A correct GRPO kernel, or one with a bug of the [bank](crate::BANK).
#[derive(Debug, Default)]
pub struct Specimen {
    bug: Option<Bug>,
    /// Evaluations so far, on which a kernel depends whose sums have no order.
    runs: AtomicUsize,
}

impl Specimen {
    /// Creates the kernel with `bug`.
    pub fn with(bug: Bug) -> Self {
        Self { bug: Some(bug), ..Self::default() }
    }

    /// Checks that the specimen computes `spec` on logits or hidden states of `dtype` over `devices` devices.
    ///
    /// # Errors
    /// [`Unsupported`], naming the first thing it does not do.
    pub fn expect_computed(spec: &LossSpec, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        let refused = |field, given: String, supported: &str| {
            Err(Unsupported { implementation: ID.into(), field, given, supported: supported.into() })
        };
        if dtype == Dtype::F64 {
            return refused("dtype", dtype.to_string(), "f32, bf16 and f16");
        }
        if !DEVICE_COUNTS.contains(&devices) {
            return refused("devices", devices.to_string(), "1, 2 and 4");
        }
        // The specimen has the objectives that the bank's mutants are about. Others are refused rather than
        // approximated.
        let objective = match spec.objective {
            Objective::PpoClip(_)
            | Objective::Cispo(_)
            | Objective::PolicyGradient
            | Objective::Topr(_)
            | Objective::Aspo(_)
            | Objective::CrossEntropy(_)
            | Objective::Distillation(_)
            | Objective::None => true,
            Objective::Sapo(_)
            | Objective::Vespo(_)
            | Objective::ImportanceSampling(_)
            | Objective::MaskedRatio(_)
            | Objective::TrustRegion(_)
            | Objective::Dro(_)
            | Objective::KlCov(_)
            | Objective::ClipCov(_) => false,
        };
        let objectives = "ppo_clip, cispo, policy_gradient, topr, aspo, cross_entropy, distillation and none";
        let computed = [
            (objective, "objective", objectives),
            (spec.entropy_averaging.is_none(), "entropy_averaging", "none"),
            (spec.support.kept.is_none(), "support.kept", "none"),
        ];
        match computed.into_iter().find(|(computed, ..)| !computed) {
            Some((_, field, supported)) => refused(field, "the setting given".into(), supported),
            None => Ok(()),
        }
    }

    /// Prepares one more evaluation of the kernel.
    pub(crate) fn launch<'l>(
        &self,
        spec: &'l LossSpec,
        shape: Shape,
        tokens: Tokens<'l>,
        mesh: SimulatedMesh,
    ) -> SpecimenLaunch<'l> {
        let corrections = TokenCorrections::none(tokens.mask);
        let turn = self.runs.fetch_add(1, Ordering::Relaxed) + 1;
        let takes_logits_as_given = spec.support.is_whole() && spec.logits == LogitsTransform::default();
        let mut launch =
            SpecimenLaunch { bug: self.bug, turn, spec, shape, tokens, mesh, takes_logits_as_given, corrections };
        launch.corrections = TokenCorrections::new(&launch);
        launch
    }
}

impl Implementation for Specimen {
    fn id(&self) -> &'static str {
        ID
    }

    fn summary(&self) -> &'static str {
        "the kernel that mutants are made of, on devices that are simulated"
    }

    /// Returns the arithmetic class: elements in f32 and sums in f64, as in the CPU kernel.
    fn class(&self) -> &'static str {
        "native"
    }

    fn available(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    fn device_counts(&self) -> Vec<usize> {
        DEVICE_COUNTS.into()
    }

    fn supports(&self, spec: &LossSpec, _: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        Self::expect_computed(spec, dtype, devices)
    }

    fn takes_packed(&self) -> bool {
        true
    }

    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        let shape = problem.check(spec)?;
        Self::expect_computed(spec, problem.logits.dtype(), devices)?;
        let Problem { mut logits, ids, mask, advantages, old_logp, ref_logp, extra } = problem;
        let (old_logp, ref_logp) = (old_logp.as_ref(), ref_logp.as_ref());
        let tokens = Tokens { ids: &ids, mask: &mask, advantages: &advantages, old_logp, ref_logp, extra: &extra };
        let launch = self.launch(spec, shape, tokens, SimulatedMesh::new(devices));
        if let Some(distillation) = spec.as_distillation() {
            return Ok(launch.distil(distillation, &logits));
        }
        let evaluation = match &mut logits {
            FloatArray::F64(_) => unreachable!("`supports` rejects f64"),
            FloatArray::F32(logits) => launch.run(logits.as_slice_mut().expect("checked: dense")),
            FloatArray::Bf16(logits) => launch.run(logits.as_slice_mut().expect("checked: dense")),
            FloatArray::F16(logits) => launch.run(logits.as_slice_mut().expect("checked: dense")),
        };
        let [logp, entropy, token_loss] = evaluation.per_token().map(Some);
        let loss = Some(arr0(evaluation.loss as f32).into());
        let logp_of_others = launch.logp_of_others(&evaluation);
        Ok(Candidate { loss, logp, logp_of_others, entropy, token_loss, gradient: logits, metrics: None })
    }
}

/// The running maximum and sums of one device while it reads the tiles of a row.
#[derive(Clone, Copy)]
pub(crate) struct Scratch {
    /// Maximum `m` so far, in logits.
    max: f32,
    /// Sum `Σ e_j` of the exponentials so far.
    sum: f64,
    /// Sum `Σ e_j` without the sampled column.
    others: f64,
    /// Sum `Σ e_j t_j`, with `t_j = (x_j − m)/T`.
    weighted: f64,
    /// Logit `x_y` of the sampled column, 0 if that is not on this device.
    chosen: f32,
}

impl Default for Scratch {
    fn default() -> Self {
        // The least finite number: −∞ − (−∞) would be NaN.
        Self { max: f32::MIN, sum: 0.0, others: 0.0, weighted: 0.0, chosen: 0.0 }
    }
}

impl SpecimenLaunch<'_> {
    fn run<E: Float>(&self, logits: &mut [E]) -> SpecimenEvaluation {
        let scored = self.forward(logits);
        let mut evaluation = loss::evaluate(self, scored);
        self.backward(logits, &evaluation.tokens);
        if self.has(Bug::DeviceRowsPermuted) {
            let last = part(self.shape.batch, self.mesh.rows, self.mesh.rows - 1);
            let mut tokens: Vec<_> = last.clone().map(|b| evaluation.tokens.row(b).to_owned()).collect();
            if self.mesh.rows > 1 {
                tokens.reverse();
            }
            for (b, row) in last.zip(tokens) {
                evaluation.tokens.row_mut(b).assign(&row);
            }
        }
        evaluation
    }

    /// Returns the offset of row `[b,t]` in the logits.
    fn offset(&self, b: usize, t: usize) -> usize {
        let row = if self.has(Bug::RowsTransposed) { t * self.shape.batch + b } else { b * self.shape.tokens + t };
        let offset = row * self.shape.vocab;
        if self.has(Bug::OffsetOverflows) { usize::from(offset as u16) } else { offset }
    }

    /// Returns the temperature `T` of token `[b,t]`.
    fn temperature(&self, at: (usize, usize)) -> f64 {
        let first = || self.tokens.mask.indexed_iter().find(|(_, counts)| **counts).map_or(at, |(first, _)| first);
        self.tokens.temperature(self.spec, if self.has(Bug::TemperatureOfFirstRow) { first() } else { at })
    }

    /// Returns `1/T` of the softmax that logp is of, and of that of the entropy.
    fn rates(&self, temperature: f64) -> [f32; 2] {
        let tempered = (1.0 / temperature) as f32;
        let tempered = match () {
            () if self.has(Bug::TemperatureForgotten) => 1.0,
            () if self.has(Bug::TemperatureTwice) => tempered * tempered,
            () if self.has(Bug::TemperatureMultiplies) => temperature as f32,
            () => tempered,
        };
        let of_logp = if self.divides_logits() { tempered } else { 1.0 };
        [of_logp, if self.has(Bug::EntropyWithoutTemperature) { 1.0 } else { tempered }]
    }

    pub(crate) fn divides_logits(&self) -> bool {
        let divides_logits = self.spec.temperature_divides == TemperatureDivides::Logits;
        divides_logits != self.has(Bug::TemperatureOnTheWrongSide)
    }

    /// Loads one tile of the columns `columns` of a row, transformed; −∞ beyond their end.
    pub(crate) fn load<E: Float>(
        &self,
        logits: &[E],
        row: usize,
        columns: &Range<usize>,
        tile: usize,
        reader: LogitReader,
    ) -> [f32; TILE] {
        let start = columns.start + tile * TILE;
        // A read beyond the last row gives −∞, as that of a guarded load would.
        let at = |column: usize| {
            logits.get(row + column).map_or(f32::NEG_INFINITY, |x| self.logit(*x, columns, column, reader))
        };
        let inside = columns.end.saturating_sub(start).min(TILE);
        let mut x = [f32::NEG_INFINITY; TILE];
        let (own, tail) = x.split_at_mut(inside);
        own.iter_mut().enumerate().for_each(|(lane, x)| *x = at(start + lane));
        // Small vocabularies have long tails: nothing is asked of their lanes one by one.
        match () {
            () if self.has(Bug::TailZeroPadded) => tail.fill(0.0),
            () if self.has(Bug::TailNanPadded) => tail.fill(f32::NAN),
            () if self.has(Bug::TailReadsNextRow) => {
                tail.iter_mut().enumerate().for_each(|(lane, x)| *x = at(start + inside + lane));
            }
            () if self.has(Bug::TailRepeatsLastColumn) => tail.iter_mut().for_each(|x| *x = at(columns.end - 1)),
            () => {}
        }
        if self.has(Bug::FirstColumnSkipped) && start == 0 {
            x[0] = f32::NEG_INFINITY;
        }
        let lost = self.first_lost_column(row);
        if lost < self.shape.vocab {
            x.iter_mut().enumerate().filter(|(lane, _)| start + lane >= lost).for_each(|(_, x)| *x = f32::NEG_INFINITY);
        }
        match () {
            () if self.has(Bug::LogitsInTf32) => x = x.map(to_tf32),
            () if self.has(Bug::LogitsInBf16InForward) && !reader.backward => {
                x = x.map(|x| bf16::from_f32(x).to_f32());
            }
            () => {}
        }
        let in_forward = self.has(Bug::TemperatureInLogitsDtypeInForward) && !reader.backward;
        if self.has(Bug::TemperatureInLogitsDtype) || in_forward {
            // All tokens have one temperature. `x/T` is rounded to `E` and multiplied by `T`, since the softmax divides
            // by `T` again.
            let temperature = self.spec.temperature.number().unwrap_or(1.0);
            x = x.map(|x| (E::DTYPE.round(f64::from(x) / temperature) * temperature) as f32);
        }
        x
    }

    /// Scores every row on every device.
    fn forward<E: Float>(&self, logits: &[E]) -> Array2<Option<SpecimenScore>> {
        let Shape { batch, tokens, .. } = self.shape;
        let mut scored = Array2::from_elem((batch, tokens), None);
        for device_row in 0..self.mesh.rows {
            let mut scratch = self.scratch();
            for b in part(batch, self.mesh.rows, device_row) {
                for t in (0..tokens).filter(|&t| self.counts(b, t)) {
                    scored[[b, t]] = Some(self.score_row(logits, self.offset(b, t), (b, t), &mut scratch));
                }
            }
        }
        scored
    }

    /// Creates the running sums of a row shard's devices, which they keep from one grid step to the next.
    pub(crate) fn scratch(&self) -> Vec<[Scratch; 2]> {
        vec![[Scratch::default(); 2]; self.mesh.columns]
    }

    /// Scores the row of token `[b,t]`, which begins at `row`, on the devices of `scratch`, and exchanges their sums.
    pub(crate) fn score_row<E: Float>(
        &self,
        logits: &[E],
        row: usize,
        at @ (b, t): (usize, usize),
        scratch: &mut [[Scratch; 2]],
    ) -> SpecimenScore {
        let (id, temperature) = (self.id(b, t), self.temperature(at));
        let rates = self.rates(temperature);
        // One softmax at each rate: every vocabulary shard reads its columns, then they exchange their sums.
        let mut of_rate = |i: usize| {
            let walked = |(device_column, scratch): (usize, &mut [Scratch; 2])| {
                let columns = part(self.shape.vocab, self.mesh.columns, device_column);
                self.walk(logits, row, &columns, id, rates[i], &mut scratch[i]);
                scratch[i]
            };
            let shards: Vec<Scratch> = scratch.iter_mut().enumerate().map(walked).collect();
            self.exchange(&shards, rates[i])
        };
        let of_logp = of_rate(0);
        // Logp and entropy share a softmax if their rates are equal.
        let of_rate = [of_logp, if rates[0] == rates[1] { of_logp } else { of_rate(1) }];
        let others = self.pick(logits, row, at, &of_logp.0, temperature);
        SpecimenScore { temperature, others, ..self.score::<E>(logits, row, id, of_rate, rates) }
    }

    /// Runs one grid step: the columns of one row on one device.
    fn walk<E: Float>(
        &self,
        logits: &[E],
        row: usize,
        columns: &Range<usize>,
        id: usize,
        rate: f32,
        scratch: &mut Scratch,
    ) {
        // Every row begins with fresh sums; stale ones are a bug of kernels that run many rows on one core.
        let before = *scratch;
        *scratch = Scratch::default();
        match () {
            () if self.has(Bug::StaleMax) => scratch.max = before.max,
            () if self.has(Bug::StaleSums) => *scratch = Scratch { chosen: 0.0, ..before },
            () if self.has(Bug::StaleChosen) => scratch.chosen = before.chosen,
            () if self.has(Bug::MaxStartsAtZero) || self.has(Bug::MaxNotSubtracted) => scratch.max = 0.0,
            () if self.has(Bug::MaxStartsAtMinusInfinity) => scratch.max = f32::NEG_INFINITY,
            () => {}
        }
        // The tiles in the order of the walk. The last one may be a tail.
        let tiles = columns.len().div_ceil(TILE);
        let partial = !columns.len().is_multiple_of(TILE);
        let last = tiles.saturating_sub(1);
        let order: Vec<usize> = match () {
            () if self.has(Bug::LastTileSkipped) && partial => (0..last).collect(),
            () if self.has(Bug::LastTileReadTwice) && partial => (0..tiles).chain([last]).collect(),
            () if self.has(Bug::SumInAnyOrder) && self.turn.is_multiple_of(2) => (0..tiles).rev().collect(),
            () => (0..tiles).collect(),
        };
        let lost = self.first_lost_column(row);
        for tile in order {
            let reader = LogitReader { id, backward: false };
            let x = self.load(logits, row, columns, tile, reader);
            // Online softmax: raise the maximum first, then add the tile relative to it.
            let fixed = self.has(Bug::MaxNotSubtracted) || (self.has(Bug::MaxOfFirstTile) && tile > 0);
            // A NaN counts for nothing here; the sum keeps it.
            let top = if fixed { scratch.max } else { x.iter().copied().fold(scratch.max, f32::max) };
            self.rescale(scratch, top, rate);
            for (lane, &x) in x.iter().enumerate() {
                let column = columns.start + tile * TILE + lane;
                let t = (x - scratch.max) * rate;
                let is_chosen = self.is_chosen(columns, column, id);
                // It adds 0 to every sum.
                if t == f32::NEG_INFINITY && column >= columns.end && !is_chosen {
                    continue;
                }
                // The sampled column is in the sum `S`, but not in that of the others, from which 1 − p follows.
                let is_dropped = is_chosen && self.has(Bug::KeptIdNotInSum) && self.is_excluded(columns, column);
                let e = if is_dropped { 0.0 } else { self.exp(t) };
                scratch.sum = self.add(scratch.sum, e);
                let weighted = f64::from(e * t);
                let selected = columns.contains(&column) && self.has(Bug::HoleTimesZero);
                scratch.weighted += if e == 0.0 && !selected { 0.0 } else { weighted };
                if is_chosen {
                    // The sampled column's logit is read by itself, and is there even where its tile is not.
                    let is_lost = column >= lost && columns.contains(&column);
                    scratch.chosen =
                        if is_lost { self.logit(logits[row + column], columns, column, reader) } else { x };
                } else {
                    scratch.others = self.add(scratch.others, e);
                }
            }
        }
        if self.has(Bug::ChosenFromEveryShard) && !columns.contains(&id) && !columns.is_empty() {
            let edge = id.clamp(columns.start, columns.end - 1);
            scratch.chosen = logits[row + edge].to_f64() as f32;
        }
    }

    /// Whether `column` of a shard is the sampled one.
    fn is_chosen(&self, columns: &Range<usize>, column: usize, id: usize) -> bool {
        match () {
            () if self.has(Bug::IdOfTile) => (column - columns.start) % TILE == id % TILE,
            () if self.has(Bug::ShardOffsetForgotten) => column - columns.start == id,
            // The lanes of a tail are columns of the next shard.
            () => column == id && columns.contains(&column),
        }
    }

    fn exp(&self, t: f32) -> f32 {
        if self.has(Bug::ExpByPolynomial) && t.is_finite() {
            // 2^floor(y) is exact; a polynomial of degree 3 for the rest is not.
            let y = (t * std::f32::consts::LOG2_E).max(-126.0);
            let fraction = y - y.floor();
            let power = 1.0 + fraction * (0.695_556 + fraction * (0.226_173 + fraction * 0.078_024));
            return power * 2.0_f32.powi(y.floor() as i32);
        }
        t.exp()
    }

    fn add(&self, sum: f64, e: f32) -> f64 {
        let sum = sum + f64::from(e);
        match () {
            () if self.has(Bug::SumInBf16) => bf16::from_f64(sum).to_f64(),
            () if self.has(Bug::SumInF16) => f16::from_f64(sum).to_f64(),
            () if self.has(Bug::SumInAnyOrder) => f64::from(sum as f32),
            () => sum,
        }
    }

    /// Makes the sums relative to a larger maximum: the gaps in `Σ e·t` move too.
    fn rescale(&self, scratch: &mut Scratch, max: f32, rate: f32) {
        // With `max` larger by −step: Σ e·t becomes factor·(Σ e·t + step·Σ e).
        let step = (f64::from(scratch.max) - f64::from(max)) * f64::from(rate);
        scratch.max = max;
        if step == 0.0 || self.has(Bug::SumNotRescaled) {
            return;
        }
        let shift = if scratch.sum == 0.0 || self.has(Bug::EntropySumNotShifted) { 0.0 } else { step * scratch.sum };
        let factor = if self.has(Bug::RescaledTwice) { (2.0 * step).exp() } else { step.exp() };
        scratch.weighted = factor * (scratch.weighted + shift);
        scratch.sum *= factor;
        scratch.others *= factor;
    }

    /// Joins the sums of a row's vocabulary shards.
    fn exchange(&self, shards: &[Scratch], rate: f32) -> (SpecimenSoftmax, f32) {
        // Two all-reduces: the largest maximum, then the sums relative to it and the chosen logit, 0 where it is not.
        let start = if self.has(Bug::MaxStartsAtMinusInfinity) { f32::NEG_INFINITY } else { f32::MIN };
        let max = shards.iter().map(|shard| shard.max).fold(start, f32::max);
        // Sums are relative to their own shard's maximum until they are rescaled by `exp((m_shard − m)/T)`.
        let mut whole = Scratch { max, ..Scratch::default() };
        let mut shard_sum = [0.0; 2];
        for (i, shard) in shards.iter().enumerate() {
            let mut shard = *shard;
            if !self.has(Bug::SumExchangedBeforeRescale) {
                self.rescale(&mut shard, max, rate);
            }
            shard_sum[i] = shard.sum;
            if i == 0 || !self.has(Bug::SumNotExchanged) {
                whole.sum += shard.sum;
                whole.others += shard.others;
            }
            if i == 0 || !(self.has(Bug::EntropySumNotExchanged) || self.has(Bug::SumNotExchanged)) {
                whole.weighted += shard.weighted;
            }
            if i == 0 || !self.has(Bug::ChosenNotExchanged) {
                whole.chosen += shard.chosen;
            }
        }
        let Scratch { sum, others, weighted, chosen, .. } = whole;
        let shard_max = [0, 1].map(|i| shards.get(i).map_or(max, |shard| shard.max));
        (SpecimenSoftmax { max, rate, sum, others, mean_gap: -weighted / sum, shard_max, shard_sum }, chosen)
    }

    /// Computes log-probability and entropy, from the two softmaxes and their chosen logits.
    fn score<E: Float>(
        &self,
        logits: &[E],
        row: usize,
        id: usize,
        [(logp_softmax, chosen), (entropy_softmax, _)]: [(SpecimenSoftmax, f32); 2],
        rates: [f32; 2],
    ) -> SpecimenScore {
        let t = f64::from((chosen - logp_softmax.max) * rates[0]);
        // Nothing is lost where the sampled column is the largest, and the others are tiny.
        let log_sum = if t == 0.0 { logp_softmax.others.ln_1p() } else { logp_softmax.sum.ln() };
        let mut logp = t - log_sum;
        if self.has(Bug::LogpOfClampedProbability) {
            logp = logp.exp().max(1e-8).ln();
        }
        if !self.divides_logits() {
            logp /= self.spec.temperature.number().unwrap_or(1.0);
        }
        if self.has(Bug::LogpInLogitsDtype) {
            logp = E::DTYPE.round(logp);
        }
        // H = ln S + ā, from sums that are relative to the maximum.
        let mut entropy = entropy_softmax.sum.ln() + entropy_softmax.mean_gap;
        if self.has(Bug::EntropyOfShiftedLog) {
            let SpecimenSoftmax { max, rate, sum, .. } = entropy_softmax;
            let p = |j: usize| ((logits[row + j].to_f64() - f64::from(max)) * f64::from(rate)).exp() / sum;
            entropy = -(0..self.shape.vocab).map(p).map(|p| p * (p + 1e-9).ln()).sum::<f64>();
        }
        if self.has(Bug::EntropyFromLogpSoftmax) {
            entropy = -logp;
        }
        if self.has(Bug::EntropyAsDifferenceInBf16) {
            // ln Σ exp(x/T) and Σ p·x/T, both of the size of the largest logit.
            let SpecimenSoftmax { max, rate, sum, mean_gap, .. } = entropy_softmax;
            let most = f64::from(max) * f64::from(rate);
            entropy = Dtype::Bf16.round(most + sum.ln()) - Dtype::Bf16.round(most - mean_gap);
        }
        if self.has(Bug::EntropyInLogitsDtype) {
            entropy = E::DTYPE.round(entropy);
        }
        SpecimenScore {
            logp,
            entropy,
            id,
            temperature: 1.0,
            logp_softmax,
            entropy_softmax,
            others: Vec::new(),
            mean_gap_of_all: self.mean_gap_of_all(logits, row, &logp_softmax, id),
        }
    }

    /// Computes the part of logp in a dlogit of probability `p`, without the temperature: `G·(1 − p)` in the sampled column, `−G·p` in
    /// the others.
    fn gradient_of_logp(&self, dtype: Dtype, p: f64, sampled: bool, token: &SpecimenGradient) -> f64 {
        let SpecimenScore { id, logp_softmax, ref others, .. } = token.scored;
        let grad_logp = token.grad_logp;
        let p = match () {
            () if self.has(Bug::ProbabilityRounded) => dtype.round(p),
            () if self.has(Bug::SmallProbabilitiesFlushed) && p < 1e-6 => 0.0,
            () => p,
        };
        match () {
            () if sampled && self.has(Bug::OneHotForgotten) => -grad_logp * p,
            () if sampled && self.forgets_first(id, others) => -grad_logp * p,
            () if sampled && self.has(Bug::TargetCollapses) => grad_logp * f64::from(1.0 - p as f32),
            () if sampled && self.has(Bug::SampledColumnUnscaled) => 1.0 - grad_logp * p,
            () if sampled => grad_logp * (logp_softmax.others / logp_softmax.sum),
            () if self.has(Bug::NonTargetDropped) => 0.0,
            // ∞ · 0: a column of probability 0 has no part even in an infinite gradient.
            () if p == 0.0 => 0.0,
            () => -grad_logp * p,
        }
    }

    /// Writes dlogits over the logits of all rows.
    fn backward<E: Float>(&self, logits: &mut [E], tokens: &Array2<Option<SpecimenGradient>>) {
        let Shape { batch, tokens: length, vocab } = self.shape;
        for (b, t) in (0..batch).flat_map(|b| (0..length).map(move |t| (b, t))) {
            // Every row is written, masked ones with zeros.
            let row = self.offset(b, t);
            if self.has(Bug::LastRowSkipped) && (b, t) == (batch - 1, length - 1) {
                continue;
            }
            for device_column in 0..self.mesh.columns {
                let columns = part(vocab, self.mesh.columns, device_column);
                match &tokens[[b, t]] {
                    Some(token) => self.write(logits, row, &columns, device_column, token),
                    None if self.has(Bug::MaskedDlogitsNotZeroed) => {}
                    None => logits[row + columns.start..row + columns.end].fill(E::from_f64(0.0)),
                }
            }
        }
    }

    /// dlogits of one row on one device:
    ///
    /// ```text
    /// dx_j = (G·(1[j=y] − p_j) + E·q_j(a_j − ā)) / T · ∂h_j/∂x_j        1 − p_y summed over the other columns
    /// ```
    pub(crate) fn write<E: Float>(
        &self,
        logits: &mut [E],
        row: usize,
        columns: &Range<usize>,
        shard: usize,
        token: &SpecimenGradient,
    ) {
        let SpecimenScore { id, temperature, logp_softmax, entropy_softmax, ref others, .. } = token.scored;
        let (grad_logp, grad_entropy) = (token.grad_logp, token.grad_entropy);
        // The derivative of the softmax's argument by a logit, 1/T.
        let per_logit = match () {
            () if self.has(Bug::TemperatureForgottenInGradient) => 1.0,
            () if self.has(Bug::TemperatureForgottenInFirstRow) && row < self.shape.tokens * self.shape.vocab => 1.0,
            () if self.has(Bug::TemperatureTwiceInGradient) => temperature.powi(2).recip(),
            () => temperature.recip(),
        };
        let shards = if self.has(Bug::GradientSummedOverShards) { self.mesh.columns as f64 } else { 1.0 };
        let tiles = columns.len().div_ceil(TILE);
        let reader = LogitReader { id, backward: true };
        // The maximum that exponentials were relative to in the forward pass.
        let mut logp_max = logp_softmax.max;
        if self.has(Bug::ShardMaxNotExchanged) {
            logp_max = logp_softmax.shard_max[shard];
        }
        if self.has(Bug::GradientWithMaxOfLastTile) {
            let last = self.load(logits, row, columns, tiles.saturating_sub(1), reader);
            logp_max = last.into_iter().fold(f32::MIN, f32::max);
        }
        let probability = |softmax: &SpecimenSoftmax, max: f32, x: f32| {
            let t = (x - max) * softmax.rate;
            let sum = if self.has(Bug::GradientWithOwnSum) { softmax.shard_sum[shard] } else { softmax.sum };
            (f64::from(self.exp(t)) / sum, f64::from(t))
        };
        let lost = self.first_lost_column(row);
        let is_elsewhere = self.has(Bug::GradientOfTargetsShard) && !columns.contains(&id);
        let mut largest_is_ahead = self.has(Bug::MaxNotDetached) && grad_logp != 0.0;
        for tile in 0..tiles {
            let start = columns.start + tile * TILE;
            let width = TILE.min(columns.end - start);
            let cut = self.has(Bug::TailGradientNotWritten) || self.has(Bug::LastTileSkipped);
            if width < TILE && cut {
                continue;
            }
            // A tile is read whole before any of its columns is overwritten.
            let x = self.load(logits, row, columns, tile, reader);
            for (lane, &x) in x.iter().enumerate().take(width) {
                let column = start + lane;
                let sampled = self.is_chosen(columns, column, id);
                let slope = self.slope(logits[row + column], columns, column);
                let mut dx = 0.0;
                // The part of logp: G·(1 − p) in the sampled column, −G·p in the others.
                if grad_logp != 0.0 {
                    let (p, _) = probability(&logp_softmax, logp_max, x);
                    dx = self.gradient_of_logp(E::DTYPE, p, sampled, token);
                }
                if !others.is_empty() {
                    let (p, _) = probability(&logp_softmax, logp_max, x);
                    dx += self.gradient_of_others(others, column, p);
                }
                // The terms of a cross-entropy's whole row: by the log-sum-exp, and by the mean of all logits.
                if token.grad_row != [0.0; 2] {
                    let (p, _) = probability(&logp_softmax, logp_max, x);
                    dx += token.grad_row[0] * p + token.grad_row[1] / self.shape.vocab as f64;
                }
                if self.has(Bug::GradientAddedInLogitsDtype) {
                    dx = E::DTYPE.round(dx);
                }
                // The part of entropy: E·q·(a − ā).
                if grad_entropy != 0.0 {
                    let x = if self.has(Bug::EntropyReadAfterWrite) {
                        logits[row + column] = E::from_f64(dx);
                        dx as f32
                    } else {
                        x
                    };
                    let (q, t) = probability(&entropy_softmax, entropy_softmax.max, x);
                    let mean_gap = if self.has(Bug::EntropyGradientWithoutMean) {
                        -entropy_softmax.sum.ln()
                    } else {
                        entropy_softmax.mean_gap
                    };
                    if q != 0.0 || self.has(Bug::HoleGradientTimesZero) {
                        dx += grad_entropy * (q * (-t - mean_gap));
                    }
                }
                // The gradient of a maximum is that of its first column.
                if largest_is_ahead && x == logp_softmax.max {
                    dx -= grad_logp;
                    largest_is_ahead = false;
                }
                // The chain rule, back to the logit as it is given.
                dx *= per_logit * shards * slope;
                let bug = if sampled { Bug::KeptIdWithoutGradient } else { Bug::ExcludedGradientNotWritten };
                if self.has(bug) && self.is_excluded(columns, column) {
                    if !sampled {
                        continue;
                    }
                    dx = 0.0;
                }
                let in_tail = width < TILE && self.has(Bug::WholeTilesOnlyInGradient);
                if in_tail || column >= lost || is_elsewhere {
                    dx = 0.0;
                }
                if self.has(Bug::StochasticRounding) {
                    dx = by_chance(dx, E::DTYPE, row + column);
                }
                logits[row + column] = E::from_f64(dx);
            }
        }
        if self.has(Bug::TargetReadAfterWrite) && columns.contains(&id) {
            let (p, _) = probability(&logp_softmax, logp_softmax.max, logits[row + id].to_f64() as f32);
            logits[row + id] = E::from_f64(grad_logp * (1.0 - p) * per_logit);
        }
    }
}
