//! The metrics that trainers log, under their own names and by their own definitions.
//!
//! [`assay_core::problem::Metrics`] is what this project's kernels return. This module computes the numbers of a project's
//! dashboard for the same batch: one name is not the same number in two projects. Options that are logged as they are set are left
//! out.
//!
//! ```
//! # mod assay { pub use {assay_core::{problem, spec}, assay_reference as reference}; }
//! # use assay::problem::{Advantages, Extra, Problem};
//! # use ndarray::{Array2, Array3, arr1};
//! # let problem: Problem = Problem {
//! #     logits: Array3::<f64>::zeros((1, 2, 4)).into(),
//! #     ids: Array2::zeros((1, 2)),
//! #     mask: Array2::from_elem((1, 2), true),
//! #     advantages: Advantages::Sequence(arr1(&[2.0])),
//! #     old_logp: Some(Array2::from_elem((1, 2), -4_f64.ln())),
//! #     ref_logp: None,
//! #     extra: Extra::default(),
//! # };
//! use assay::reference::{evaluate, metrics::MetricsProject};
//!
//! let spec = assay::spec::LossSpec::default();
//! let metrics = MetricsProject::Trl.metrics(&evaluate(&spec, &problem)?);
//! let entropy = metrics.iter().find(|metric| metric.name == "entropy").unwrap();
//! assert_eq!((entropy.value, entropy.definition), (4_f64.ln(), "Σ m·H / Σ m, nats"));
//! # Ok::<(), assay::problem::ProblemError>(())
//! ```

use std::fmt;

use serde::Serialize;

use super::objective::gamma_weight;
use super::rollout::{corrections, log_weights};
use super::sum::Sum;
use super::{Reference, Token};
use assay_core::problem::Sequence;
use assay_core::spec::{Cispo, LossSpec, Objective, PpoClip, RolloutLevel};

/// A project whose logged metrics are reproduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MetricsProject {
    /// The metrics of TRL 1.16, `GRPOTrainer` and `GMPOTrainer`.
    Trl,
    /// The metrics of verl 0.9, `compute_policy_loss_*`, `ppo_loss` and its rollout correction.
    Verl,
    /// The metrics of Tunix 0.1, `grpo_loss_fn` and `ppo_policy_loss_fn`.
    Tunix,
    /// The metrics of Liger 0.8, its GRPO losses.
    Liger,
}

/// One number that a project logs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Metric {
    /// The project's name for the number.
    pub name: &'static str,
    /// The value of the number for the batch.
    pub value: f64,
    /// The definition of the number, as a formula or in words.
    pub definition: &'static str,
}

impl fmt::Display for MetricsProject {
    /// Writes the name as it is typed, such as `trl`.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.serialize(f)
    }
}

impl MetricsProject {
    /// The list of all projects.
    pub const ALL: [MetricsProject; 4] =
        [MetricsProject::Trl, MetricsProject::Verl, MetricsProject::Tunix, MetricsProject::Liger];

    /// Computes the metrics that the project logs of a batch under its spec, in the order of its source.
    pub fn metrics(self, reference: &Reference) -> Vec<Metric> {
        let batch = MetricsBatch::new(reference);
        let mut log = Log::default();
        match self {
            MetricsProject::Trl => batch.trl(&mut log),
            MetricsProject::Verl => batch.verl(&mut log),
            MetricsProject::Tunix => batch.tunix(&mut log),
            MetricsProject::Liger => batch.liger(&mut log),
        }
        log.0
    }
}

#[derive(Default)]
struct Log(Vec<Metric>);

impl Log {
    fn add(&mut self, name: &'static str, value: f64, definition: &'static str) {
        self.0.push(Metric { name, value, definition });
    }
}

fn count(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

/// The unmasked tokens of a batch, by sequences.
struct MetricsBatch<'r> {
    reference: &'r Reference<'r>,
    spec: &'r LossSpec,
    /// The tokens of each sequence; empty for a sequence without an unmasked one.
    rows: Vec<SequenceTokens<'r>>,
}

/// The unmasked tokens of a sequence, each with its position.
type SequenceTokens<'r> = Vec<((usize, usize), &'r Token)>;

type TokenFunction<'f> = &'f dyn Fn(&Token) -> f64;

impl<'r> MetricsBatch<'r> {
    fn new(reference: &'r Reference) -> Self {
        let row =
            |sequence: &Sequence| sequence.places().filter_map(|at| Some((at, reference.token(at.0, at.1)?))).collect();
        Self { reference, spec: reference.spec(), rows: reference.problem().sequences().iter().map(row).collect() }
    }

    fn tokens(&self) -> impl Iterator<Item = &Token> {
        self.rows.iter().flatten().map(|(_, token)| *token)
    }

    fn sum(&self, value: TokenFunction) -> f64 {
        self.tokens().map(value).collect::<Sum>().value()
    }

    /// Returns the mean `Σ m·value / max(Σ m, 1)`.
    fn mean(&self, value: TokenFunction) -> f64 {
        self.sum(value) / self.tokens().count().max(1) as f64
    }

    /// Returns `Σ m·value / (Σ m + 1e-8)`, the `masked_mean` of verl and Tunix.
    fn masked_mean(&self, value: TokenFunction) -> f64 {
        self.sum(value) / (self.tokens().count() as f64 + 1e-8)
    }

    /// Returns `Σ w·m·value`, with the weights of the loss.
    fn reduced(&self, value: TokenFunction) -> f64 {
        self.sum(&|token| token.weight * value(token))
    }

    /// Returns the mean of each sequence: `value` of any token if all share a ratio, else `Σ m·value / Σ m`, NaN for an
    /// empty sequence.
    fn row_means(&self, value: TokenFunction) -> Vec<f64> {
        let shared = self.spec.ratio.level.is_shared() && self.spec.ratio.clip.is_none();
        let mean = |row: &SequenceTokens| match row.first() {
            Some((_, token)) if shared => value(token),
            None if shared => 0.0,
            _ => row.iter().map(|(_, token)| value(token)).collect::<Sum>().value() / row.len() as f64,
        };
        self.rows.iter().map(mean).collect()
    }

    /// Returns TRL's `global_masked_mean` of a value that has the shape of the ratio: one value per sequence counts
    /// sequences, not tokens.
    fn level_mean(&self, value: TokenFunction) -> f64 {
        let shared = self.spec.ratio.level.is_shared() && self.spec.ratio.clip.is_none();
        if shared { self.row_means(value).into_iter().sum::<f64>() / self.rows.len() as f64 } else { self.mean(value) }
    }

    fn ratio(&self, token: &Token) -> f64 {
        token.inputs.ratio(self.spec)
    }

    /// Returns the clip of the objective, if it has PPO's.
    fn ppo_clip(&self) -> Option<&PpoClip> {
        match &self.spec.objective {
            Objective::PpoClip(clip) => Some(clip),
            Objective::ClipCov(cov) => Some(&cov.clip),
            _ => None,
        }
    }

    /// Returns the clipped loss `−A·clip(ρ, 1 − εl, 1 + εh)`.
    fn clipped_loss(&self, clip: &PpoClip, token: &Token) -> f64 {
        -token.inputs.advantage * self.ratio(token).clamp(1.0 - clip.epsilon_low, 1.0 + clip.epsilon_high)
    }

    /// Returns the unclipped loss `−A·ρ` of a token.
    fn unclipped_loss(&self, token: &Token) -> f64 {
        -token.inputs.advantage * self.ratio(token)
    }

    /// Whether the clipped loss is the larger, as `pg_clipfrac` counts it.
    fn held(&self, clip: &PpoClip, token: &Token) -> bool {
        self.clipped_loss(clip, token) > self.unclipped_loss(token)
    }

    /// Whether the dual clip bounds the loss.
    fn held_by_dual_clip(&self, clip: &PpoClip, token: &Token) -> bool {
        let loss = self.unclipped_loss(token).max(self.clipped_loss(clip, token));
        let advantage = token.inputs.advantage;
        clip.dual_clip.is_some_and(|c| loss > -advantage * c && advantage < 0.0)
    }

    /// Lists `old_logp − rollout_logp` of every token that the sampler scored, with its sequence.
    fn sampler_differences(&self) -> Vec<(usize, f64)> {
        let problem = self.reference.problem();
        let (Some(old), Some(rollout)) = (&problem.old_logp, &problem.extra.rollout_logp) else { return Vec::new() };
        let places = self.rows.iter().enumerate().flat_map(|(s, row)| row.iter().map(move |(at, _)| (s, *at)));
        places.map(|(s, at)| (s, old[at] - rollout[at])).filter(|(_, y)| !y.is_nan()).collect()
    }

    fn trl(&self, log: &mut Log) {
        let spec = self.spec;
        if spec.kl.is_some() {
            log.add("kl", self.mean(&|token| token.kl.value), "Σ m·kl / Σ m, after bias correction, before beta");
        }
        log.add("entropy", self.mean(&|token| token.entropy), "Σ m·H / Σ m, nats");
        // `delta` holds the ratio before TRL counts.
        let delta = self.ppo_clip().and_then(|clip| clip.delta).unwrap_or(f64::INFINITY);
        let low = |token: &Token| count(token.clipped_low);
        let high = |token: &Token| {
            let counts = self.ppo_clip().is_none_or(|clip| delta > 1.0 + clip.epsilon_high);
            count(token.clipped_high && counts)
        };
        if self.ppo_clip().is_some() || spec.ratio.clip.is_some() {
            log.add(
                "clip_ratio/low_mean",
                self.level_mean(&low),
                "share of tokens (rows, if they share a ratio) with ρ < 1−εl and A < 0",
            );
            log.add("clip_ratio/high_mean", self.level_mean(&high), "share with min(ρ, delta) > 1+εh and A > 0");
            log.add("clip_ratio/region_mean", self.level_mean(&|token| low(token) + high(token)), "share with either");
            let finite = |rows: Vec<f64>| rows.into_iter().filter(|x| !x.is_nan());
            let min = finite(self.row_means(&low)).fold(f64::NAN, f64::min);
            let max = finite(self.row_means(&high)).fold(f64::NAN, f64::max);
            log.add("clip_ratio/low_min", min, "the smallest row's share of low clips");
            log.add("clip_ratio/high_max", max, "the largest row's share of high clips");
        }
        if let Objective::Cispo(Cispo { upper, .. }) = &spec.objective {
            let held = |token: &Token| count(self.ratio(token) > *upper && token.inputs.advantage > 0.0);
            log.add(
                "cispo_clip_ratio",
                self.level_mean(&held),
                "share of tokens with ρ > epsilon_high and A > 0; those with A < 0 are not counted",
            );
        }
        if let Objective::Vespo(_) = &spec.objective {
            log.add("vespo/phi_seq_mean", self.phi_mean(), "mean over rows, empty ones too, of φ");
        }
        if spec.entropy_coef != 0.0 {
            let policy = self.reduced(&|token| token.token_loss) / spec.scale;
            log.add(
                "policy_loss",
                policy,
                "the loss before the entropy bonus and the division by accumulation steps, KL included",
            );
        }
        self.trl_sampling(log);
    }

    fn trl_sampling(&self, log: &mut Log) {
        if self.spec.rollout.is_none() {
            return;
        }
        let differences: Vec<f64> = self.sampler_differences().into_iter().map(|(_, y)| y.abs()).collect();
        if !differences.is_empty() {
            let mean = differences.iter().copied().collect::<Sum>().value() / differences.len() as f64;
            log.add(
                "sampling/sampling_logp_difference/mean",
                mean,
                "mean of |old_logp − rollout_logp| over scored tokens, nats",
            );
            let max = differences.iter().copied().fold(0.0, f64::max);
            log.add("sampling/sampling_logp_difference/max", max, "the largest of them");
        }
        let of_rows = self.spec.rollout.as_ref().is_some_and(|rollout| rollout.level != RolloutLevel::Token);
        let weights: Vec<f64> = if of_rows {
            self.rows.iter().map(|row| row.first().map_or(1.0, |(_, token)| token.inputs.policy_weight)).collect()
        } else {
            self.tokens().map(|token| token.inputs.policy_weight).collect()
        };
        if !weights.is_empty() {
            let mean = weights.iter().copied().collect::<Sum>().value() / weights.len() as f64;
            log.add(
                "sampling/importance_sampling_ratio/min",
                weights.iter().copied().fold(f64::INFINITY, f64::min),
                "the smallest rollout weight, of tokens or of rows",
            );
            log.add("sampling/importance_sampling_ratio/mean", mean, "their mean");
            log.add(
                "sampling/importance_sampling_ratio/max",
                weights.iter().copied().fold(0.0, f64::max),
                "the largest",
            );
        }
    }

    /// Returns the mean of VESPO's `φ` over all sequences; one without tokens has the `φ` of its rollout weights.
    fn phi_mean(&self) -> f64 {
        let Objective::Vespo(vespo) = &self.spec.objective else { return f64::NAN };
        let problem = self.reference.problem();
        let corrections = corrections(self.spec, problem);
        let sequences = problem.sequences();
        let phi = |(s, row): (usize, &SequenceTokens)| {
            let of_empty = || log_weights(self.spec, problem, &corrections, &sequences[s]);
            let log_weight = row.first().map_or_else(of_empty, |(_, token)| token.inputs.row_log_weight);
            gamma_weight(vespo, log_weight, problem.tokens().advantage_of(&sequences[s]))
        };
        self.rows.iter().enumerate().map(phi).collect::<Sum>().value() / self.rows.len() as f64
    }

    fn verl(&self, log: &mut Log) {
        const PG: &str = "actor/pg_clipfrac";
        const LOWER: &str = "actor/pg_clipfrac_lower";
        const NONE: &str = "0: not counted for this loss";
        let share = |holds: &dyn Fn(&Token) -> bool| self.masked_mean(&|token| count(holds(token)));
        match &self.spec.objective {
            Objective::PpoClip(clip) => {
                let held = share(&|token| self.held(clip, token));
                log.add(PG, held, "share of tokens whose clipped loss −A·clip(ρ) exceeds −A·ρ");
                let dual = share(&|token| self.held_by_dual_clip(clip, token));
                log.add(LOWER, dual, "share of tokens with A < 0 whose loss exceeds −c·A");
            }
            Objective::Cispo(Cispo { lower, upper }) => {
                let lower = lower.unwrap_or(f64::NEG_INFINITY);
                let outside = share(&|token| !(lower..=*upper).contains(&self.ratio(token)));
                log.add(PG, outside, "share of tokens whose ratio is clipped, whatever the sign of A");
                log.add(LOWER, 0.0, NONE);
            }
            Objective::Sapo(_) => {
                log.add(PG, 0.0, NONE);
                log.add(LOWER, 0.0, NONE);
            }
            Objective::TrustRegion(region) => {
                let most = region.truncate.unwrap_or(f64::INFINITY);
                log.add(PG, share(&|token| !token.branch.within), "share of tokens outside the trust region");
                let truncated = share(&|token| token.branch.within && self.ratio(token) > most);
                log.add(LOWER, truncated, "share of tokens inside it whose ratio is truncated");
            }
            Objective::ClipCov(_) => {
                log.add(
                    PG,
                    share(&|token| token.branch.selected),
                    "share of tokens left out by their covariance; the clip is not counted",
                );
            }
            Objective::ImportanceSampling(_) if self.spec.ratio.clip.is_some() => {
                let clip = self.spec.ratio.clip.expect("just seen");
                let outside = |token: &Token| {
                    let x = token.inputs.logp - token.inputs.old_logp;
                    x < -clip.low || x > clip.high
                };
                let positive = share(&|token| outside(token) && token.inputs.advantage > 0.0);
                log.add(PG, positive, "share of tokens with A > 0 whose log-ratio is outside the clip, on either side");
                let negative = share(&|token| outside(token) && token.inputs.advantage < 0.0);
                log.add(LOWER, negative, "the same with A < 0");
            }
            _ => {}
        }
        self.verl_divergences(log);
        let pg = self.reduced(&|token| token.policy.value);
        log.add("actor/pg_loss", pg, "the policy term, reduced as the loss is");
        let entropy = self.sum(&|token| token.entropy_weight * token.entropy);
        log.add("actor/entropy_loss", entropy, "the entropy, reduced as the loss is");
        if self.spec.kl.is_some() {
            log.add(
                "kl_loss",
                self.sum(&|token| token.kl_weight * token.kl.value),
                "the KL estimate, reduced as the loss is",
            );
        }
    }

    fn verl_divergences(&self, log: &mut Log) {
        let clamp = self.spec.ratio.clamp.unwrap_or(f64::INFINITY);
        let x = |token: &Token| (token.inputs.logp - token.inputs.old_logp).clamp(-clamp, clamp);
        let (kl, definition) = match &self.spec.objective {
            Objective::KlCov(_) => (self.masked_mean(&|token| x(token).abs()), "mean of |ℓ − old_logp|"),
            _ => (self.masked_mean(&|token| -x(token)), "mean of −(ℓ − old_logp), clamped as the loss clamps it"),
        };
        log.add("actor/ppo_kl", kl, definition);
        let differences = self.sampler_differences();
        if differences.is_empty() {
            return;
        }
        let tokens = differences.len() as f64 + 1e-8;
        let mean =
            |value: &dyn Fn(f64) -> f64| differences.iter().map(|(_, y)| value(*y)).collect::<Sum>().value() / tokens;
        log.add("rollout_corr/kl", mean(&|y| -y), "mean of rollout_logp − old_logp");
        log.add("rollout_corr/k3_kl", mean(&|y| y.exp() - y - 1.0), "mean of e^y − y − 1, y = old_logp − rollout_logp");
        let chi2 = mean(&|y| (2.0 * y.clamp(-20.0, 20.0)).exp()) - 1.0;
        log.add("rollout_corr/chi2_token", chi2, "mean of e^2y, less 1");
        let rows = self.rows.len();
        let of_row = |b: usize| -> f64 { differences.iter().filter(|(row, _)| *row == b).map(|(_, y)| *y).sum() };
        let sums: Vec<f64> = (0..rows).map(of_row).collect();
        let chi2 = sums.iter().map(|y| (2.0 * y.clamp(-20.0, 20.0)).exp()).sum::<f64>() / rows as f64 - 1.0;
        log.add("rollout_corr/chi2_seq", chi2, "mean over rows of e^(2·Σ y), less 1");
        let counted = |b: usize| self.rows[b].len() as f64 + 1e-8;
        let ppl = (0..rows).map(|b| (-sums[b] / counted(b)).exp()).sum::<f64>() / rows as f64;
        log.add(
            "rollout_corr/ppl_ratio",
            ppl,
            "mean over rows of exp(−mean y): trainer's perplexity over the sampler's",
        );
        let weights: Vec<f64> = self.tokens().map(|token| token.inputs.policy_weight).collect();
        let mean_weight = weights.iter().sum::<f64>() / weights.len() as f64;
        let second = weights.iter().map(|w| (w / (mean_weight + 1e-8)).powi(2)).sum::<f64>() / weights.len() as f64;
        log.add(
            "rollout_corr/rollout_is_eff_sample_size",
            1.0 / second,
            "1 / mean of (weight / mean weight)²: a share of 1",
        );
    }

    fn tunix(&self, log: &mut Log) {
        let spec = self.spec;
        if spec.kl.is_some() {
            let count = self.tokens().count().max(1) as f64 + spec.denominator_epsilon;
            log.add("kl", self.sum(&|token| token.kl.value) / count, "Σ m·kl / Σ m");
            log.add(
                "kl_loss",
                self.sum(&|token| token.kl_weight * token.kl.value),
                "the KL estimate, reduced as the loss is",
            );
        } else {
            log.add("kl", 0.0, "0 without a KL term");
            log.add("kl_loss", 0.0, "0 without a KL term");
        }
        log.add("pg_loss", self.reduced(&|token| token.policy.value), "the policy term, reduced as the loss is");
        if let Some(clip) = self.ppo_clip() {
            let held = self.masked_mean(&|token| count(self.held(clip, token)));
            log.add("pg_clipfrac", held, "share of tokens whose clipped loss −A·clip(ρ) exceeds −A·ρ");
            let dual = self.reduced(&|token| count(self.held_by_dual_clip(clip, token)));
            log.add("pg_clipfrac_lower", dual, "tokens with A < 0 whose loss exceeds −c·A, reduced as the loss is");
            let clipped = self.masked_mean(&|token| self.clipped_loss(clip, token));
            log.add("pg_loss/clipped_mean", clipped, "mean of −A·clip(ρ)");
        }
        let x = |token: &Token| token.inputs.logp - token.inputs.old_logp;
        log.add("ppo_kl", self.masked_mean(&|token| -x(token)), "mean of −(ℓ − old_logp), before any clamp");
        let ratios = || self.tokens().map(|token| self.ratio(token));
        log.add("is_ratio/mean", self.masked_mean(&|token| self.ratio(token)), "mean ratio");
        log.add("is_ratio/max", ratios().fold(0.0, f64::max), "largest ratio");
        log.add("is_ratio/min", ratios().fold(f64::INFINITY, f64::min), "smallest ratio");
        let abs = self.masked_mean(&|token| token.inputs.level_log_ratio(spec).value.abs());
        log.add("log_ratio/abs_mean", abs, "mean of |ln ρ|, after clamps");
        log.add("pg_loss/unclipped_mean", self.masked_mean(&|token| self.unclipped_loss(token)), "mean of −A·ρ");
        let advantages = || self.tokens().map(|token| token.inputs.advantage);
        log.add(
            "advantage/abs_mean",
            self.masked_mean(&|token| token.inputs.advantage.abs()),
            "mean of |A| over tokens",
        );
        log.add("advantage/max", advantages().fold(f64::NEG_INFINITY, f64::max), "largest advantage");
        log.add("advantage/min", advantages().fold(f64::INFINITY, f64::min), "smallest advantage");
        let nonzero = self.masked_mean(&|token| count(token.inputs.advantage.abs() > 1e-8));
        log.add("advantage/nonzero_frac", nonzero, "share of tokens with |A| > 1e-8");
        let weights = || self.tokens().map(|token| token.inputs.policy_weight);
        let weighted = spec.rollout.is_some();
        let mean = if weighted { self.masked_mean(&|token| token.inputs.policy_weight) } else { 1.0 };
        log.add("sampler_is/weight_mean", mean, "mean sampler weight; 1 without any");
        let min = if weighted { weights().fold(f64::INFINITY, f64::min) } else { 1.0 };
        log.add("sampler_is/weight_min", min, "smallest sampler weight; 1 without any");
        log.add("entropy", self.reduced(&|token| token.entropy), "the entropy, reduced as the loss is");
        log.add("loss/entropy", self.masked_mean(&|token| token.entropy), "mean entropy (ppo_policy_loss_fn)");
    }

    fn liger(&self, log: &mut Log) {
        if self.spec.kl.is_some() {
            log.add("kl_mean", self.mean(&|token| token.kl.value), "Σ m·kl / Σ m, after bias correction, before beta");
        }
        let clipped = self.mean(&|token| count(token.clipped_low || token.clipped_high));
        log.add(
            "clip_ratio",
            clipped,
            "share of tokens with ρ < 1−εl and A < 0, or ρ > 1+εh and A > 0, whatever `delta`",
        );
    }
}
