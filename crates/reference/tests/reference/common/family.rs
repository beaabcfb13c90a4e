//! The loss of every [`LossSpec`], written down literally over any [`Number`].
//!
//! Written from the published formulas, the docs of the spec and the peers' sources, apart from `crates/reference`. A
//! minimum is a minimum and a clamp a clamp: no branch is chosen for the sake of a derivative and none is taken. What a
//! formula holds constant stands in [`Frozen`]; everything else is a function of the log-probabilities and entropies in
//! [`Policy`]. Once constants are held, rows do not meet: the loss is the sum of [`Loss::row`] over rows.

use std::cmp::Ordering;
use std::iter::Sum;
use std::ops::{Add, Div, Mul, Neg, Sub};

use assay_core::problem::Problem;
use assay_core::spec::{
    AdvantageLevel, Aspo, Averaging, Cispo, ClipCov, CovarianceBand, Divergence, Drops, Kl, KlCov, KlEstimator,
    KlGradient, KlImportance, LossSpec, MaskedRatio, Objective, OldLogp, Outside, Positive, PpoClip, RatioLevel,
    Reduction, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights, Rows, Sapo,
    Temperature, TemperatureDivides, Terms, TopCovariance, Topr, TrustRegion, Unscored, Vespo,
};
use ndarray::Array2;

use super::real::Real;

/// What the formulas ask of a number.
pub(crate) trait Number:
    Clone
    + From<f64>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Sum
{
    fn exp(&self) -> Self;
    fn ln(&self) -> Self;
    fn abs(&self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// `e^x − 1 − x`
    fn exp_excess(&self) -> Self;
    /// `x − sg(held)`, where `held` is what `x` is at the base point.
    fn since(&self, held: &Self) -> Self;
    /// By value, where a choice hangs on it.
    fn order(&self, other: &Self) -> Ordering;
    /// By value, where none does.
    fn compare(&self, other: &Self) -> Ordering;

    fn at_most(&self, bound: f64) -> bool {
        self.order(&Self::from(bound)) != Ordering::Greater
    }

    fn at_least(&self, bound: f64) -> bool {
        self.order(&Self::from(bound)) != Ordering::Less
    }

    fn clamp(self, low: f64, high: f64) -> Self {
        self.max(Self::from(low)).min(Self::from(high))
    }

    fn within(self, bound: Option<f64>) -> Self {
        bound.map_or(self.clone(), |bound| self.clamp(-bound, bound))
    }

    fn squared(&self) -> Self {
        self.clone() * self.clone()
    }
}

impl Number for Real {
    fn exp(&self) -> Self {
        self.exp()
    }

    fn ln(&self) -> Self {
        self.ln()
    }

    fn abs(&self) -> Self {
        self.abs()
    }

    fn min(self, other: Self) -> Self {
        self.min(other)
    }

    fn max(self, other: Self) -> Self {
        self.max(other)
    }

    fn exp_excess(&self) -> Self {
        self.exp() - Real::from(1.0) - self.clone()
    }

    fn since(&self, held: &Self) -> Self {
        self.clone() - held.clone()
    }

    fn order(&self, other: &Self) -> Ordering {
        self.compare(other)
    }

    fn compare(&self, other: &Self) -> Ordering {
        self.partial_cmp(other).expect("finite numbers")
    }
}

/// One row of logits; `None` is −∞, or a column outside the support.
pub(crate) type Row = Vec<Option<Real>>;

/// The finite logits of token `[b,t]`, exactly, as the LM head made them.
pub(crate) fn logits(problem: &Problem, b: usize, t: usize) -> Row {
    let row = problem.logits.row(b, t);
    row.into_iter().map(|x| (x != f64::NEG_INFINITY).then(|| Real::from(x))).collect()
}

/// Whether column `j` is in the softmax of a token whose id is `id`.
pub(crate) fn in_support(spec: &LossSpec, j: usize, id: usize) -> bool {
    let support = &spec.support;
    let inside = support.vocab.is_none_or(|vocab| j < vocab) && !support.excluded_ids.contains(&j);
    inside || (support.keep_sampled && j == id)
}

/// `softcap · tanh(scale · (a + bias) / softcap)` of the columns in the support.
pub(crate) fn scaled(spec: &LossSpec, problem: &Problem, row: &Row, id: usize) -> Row {
    let bias = |j: usize| match &problem.extra.bias {
        Some(bias) if spec.logits.bias => Real::from(bias[j]),
        _ => Real::from(0.0),
    };
    let column = |(j, a): (usize, &Option<Real>)| {
        let linear = Real::from(spec.logits.scale) * (a.clone()? + bias(j));
        let capped = |cap: f64| Real::from(cap) * tanh(&(linear.clone() / Real::from(cap)));
        in_support(spec, j, id).then(|| spec.logits.softcap.map_or(linear.clone(), capped))
    };
    row.iter().enumerate().map(column).collect()
}

fn tanh(x: &Real) -> Real {
    let (up, down) = (x.exp(), (-x.clone()).exp());
    (up.clone() - down.clone()) / (up + down)
}

/// `ln Σ exp z_j`
fn log_sum_exp(z: &Row) -> Real {
    z.iter().flatten().map(Real::exp).sum::<Real>().ln()
}

fn divided(row: &Row, divisor: f64) -> Row {
    row.iter().map(|x| x.clone().map(|x| x / Real::from(divisor))).collect()
}

/// `T` of token `[b,t]`.
pub(crate) fn temperature(spec: &LossSpec, problem: &Problem, b: usize, t: usize) -> f64 {
    match (spec.temperature, &problem.extra.temperature) {
        (Temperature::Number(temperature), _) => temperature,
        (Temperature::Given, Some(given)) => given[[b, if given.ncols() == 1 { 0 } else { t }]],
        (Temperature::Given, None) => panic!("the spec reads it"),
    }
}

/// `log_softmax(x / T)[y]`, or `log_softmax(x)[y] / T`, of a row of [`scaled`] logits.
pub(crate) fn logp(spec: &LossSpec, row: &Row, id: usize, temperature: f64) -> Real {
    let log_softmax = |z: &Row| z[id].clone().expect("a finite logit on the sampled id") - log_sum_exp(z);
    match spec.temperature_divides {
        TemperatureDivides::Logits => log_softmax(&divided(row, temperature)),
        TemperatureDivides::Logp => log_softmax(row) / Real::from(temperature),
    }
}

/// `−Σ q_j ln q_j = ln S − Σ e_j z_j / S` with `z = x / T`, `e = exp(z)` and `S = Σ e_j`, of a row of [`scaled`] logits.
pub(crate) fn entropy(row: &Row, temperature: f64) -> Real {
    let z: Vec<Real> = divided(row, temperature).into_iter().flatten().collect();
    let e: Vec<Real> = z.iter().map(Real::exp).collect();
    let s = e.iter().cloned().sum::<Real>();
    s.ln() - e.into_iter().zip(z).map(|(e, z)| e * z).sum::<Real>() / s
}

/// What the network makes of every token; `None` where the problem's mask is false.
#[derive(Clone)]
pub(crate) struct Policy<N> {
    pub(crate) logp: Array2<Option<N>>,
    pub(crate) entropy: Array2<Option<N>>,
}

impl<N: Number> Policy<N> {
    fn logp(&self, b: usize, t: usize) -> N {
        self.logp[[b, t]].clone().expect("an unmasked token")
    }

    fn entropy(&self, b: usize, t: usize) -> N {
        self.entropy[[b, t]].clone().expect("an unmasked token")
    }
}

/// Clip-Cov's random choice, which no formula makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Undetermined {
    pub(crate) candidates: usize,
    pub(crate) taken: usize,
}

/// Everything that is held constant while the loss is differentiated.
pub(crate) struct Frozen<N> {
    /// `ℓ` and `H` at the base point.
    base: Policy<N>,
    /// `m`: the problem's mask, without the tokens that a rejection takes out of it.
    pub(crate) counts: Array2<bool>,
    /// The tokens of `m` that keep their policy term whatever was rejected.
    pub(crate) stays: Array2<bool>,
    /// The tokens of `m` whose row is near enough to the policy that acted, or has nothing to fear.
    pub(crate) near: Array2<bool>,
    /// What the policy term is multiplied by.
    policy_factor: Array2<N>,
    /// What the KL penalty is multiplied by.
    kl_factor: Array2<N>,
    /// The tokens whose entropy is among the highest; all of `m` without that choice.
    pub(crate) top: Array2<bool>,
    /// `c` of a term `−c·A·ℓ`.
    score: Array2<N>,
    /// The tokens that KL-Cov penalizes, that Clip-Cov leaves out, or that a trust region keeps.
    pub(crate) selected: Array2<bool>,
}

/// What becomes of one row.
pub(crate) struct RowLoss<N> {
    /// What the row adds to the loss.
    pub(crate) loss: N,
    /// By token of the row.
    pub(crate) tokens: Vec<Option<TokenLoss<N>>>,
}

/// What becomes of one token of `m`.
pub(crate) struct TokenLoss<N> {
    /// Times masks and weights, before the reduction.
    pub(crate) policy: N,
    /// Times weights, without `beta`.
    pub(crate) kl: Option<N>,
    /// `beta · kl`
    penalty: N,
    pub(crate) loss: N,
}

/// The formulas of one spec on one batch.
#[derive(Clone, Copy)]
pub(crate) struct Loss<'a> {
    pub(crate) spec: &'a LossSpec,
    pub(crate) problem: &'a Problem,
}

/// `f(b, t)` for every token.
fn grid<T>(shape: (usize, usize), f: impl Fn(usize, usize) -> T) -> Array2<T> {
    Array2::from_shape_fn(shape, |(b, t)| f(b, t))
}

fn at<'a>(array: Option<&'a Array2<f64>>, name: &str) -> impl Fn(usize, usize) -> f64 + 'a {
    let array = array.unwrap_or_else(|| panic!("the spec reads `{name}`"));
    |b, t| array[[b, t]]
}

/// All tokens in `mask`, in row-major order.
fn all(mask: &Array2<bool>) -> Vec<(usize, usize)> {
    mask.indexed_iter().filter(|(_, inside)| **inside).map(|(at, _)| at).collect()
}

/// `max(1, ⌊fraction · count⌋)`
fn taken(fraction: f64, count: usize) -> usize {
    whole((fraction * count as f64).floor()).max(1)
}

/// A number that is one of tokens.
#[allow(clippy::cast_sign_loss, reason = "not below 0")]
fn whole(count: f64) -> usize {
    count as usize
}

fn mean<N: Number>(values: &[N]) -> N {
    values.iter().cloned().sum::<N>() / N::from(values.len().max(1) as f64)
}

impl Loss<'_> {
    fn shape(&self) -> (usize, usize) {
        self.problem.mask.dim()
    }

    fn advantage(&self, b: usize, t: usize) -> f64 {
        self.problem.advantages.at(b, t)
    }

    /// The tokens of row `b` in `mask`.
    fn tokens_of(&self, mask: &Array2<bool>, b: usize) -> Vec<usize> {
        (0..self.shape().1).filter(|t| mask[[b, *t]]).collect()
    }
}

/// Against the sampler: weights and rejections.
impl Loss<'_> {
    /// `y = old_logp − rollout_logp`; 0 where the sampler did not score the token.
    fn sampler_log_ratio<N: Number>(&self, b: usize, t: usize) -> N {
        let old = at(self.problem.old_logp.as_ref(), "old_logp")(b, t);
        let rollout = at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t);
        if rollout.is_nan() { N::from(0.0) } else { N::from(old) - N::from(rollout) }
    }

    fn scored(&self, b: usize, t: usize) -> bool {
        !at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t).is_nan()
    }

    /// `[exp(rollout_logp), exp(old_logp)]`; an unscored token's are alike.
    fn probabilities<N: Number>(&self, b: usize, t: usize) -> [N; 2] {
        let old = N::from(at(self.problem.old_logp.as_ref(), "old_logp")(b, t));
        let rollout = at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t);
        let rollout = if rollout.is_nan() { old.clone() } else { N::from(rollout) };
        [rollout.exp(), old.exp()]
    }

    /// M2PO: tokens leave, largest `y²` first, until the mean of those that are left is below the threshold, or one is left.
    fn below_second_moment<N: Number>(&self, threshold: f64) -> Array2<bool> {
        let mut left: Vec<((usize, usize), N)> = all(&self.problem.mask)
            .into_iter()
            .map(|(b, t)| ((b, t), self.sampler_log_ratio::<N>(b, t).squared()))
            .collect();
        let mut stays = self.problem.mask.clone();
        let mean_of = |left: &[((usize, usize), N)]| mean(&left.iter().map(|(_, y)| y.clone()).collect::<Vec<N>>());
        while left.len() > 1 && mean_of(&left).at_least(threshold) {
            let largest = (1..left.len())
                .fold(0, |most, i| if left[i].1.order(&left[most].1) == Ordering::Greater { i } else { most });
            let (at, _) = left.remove(largest);
            stays[at] = false;
        }
        stays
    }

    /// Whether `rejection` lets the tokens of row `b` pass.
    fn passes<N: Number>(&self, rejection: &Rejection, b: usize) -> Vec<bool> {
        let tokens = self.tokens_of(&self.problem.mask, b);
        let estimate = |t: &usize| {
            let log_ratio = self.sampler_log_ratio::<N>(b, *t);
            let y = log_ratio.clone().clamp(-20.0, 20.0);
            let [p, q] = self.probabilities::<N>(b, *t);
            let inner = |p: N| p.clamp(1e-6, 1.0 - 1e-6);
            let others = |p: N| N::from(1.0) - p;
            match rejection.estimator {
                RejectionEstimator::K1 => -y,
                RejectionEstimator::K2 => y.squared() / N::from(2.0),
                RejectionEstimator::K3 => y.exp_excess(),
                RejectionEstimator::BinaryKl => {
                    let (p, q) = (inner(p), inner(q));
                    p.clone() * (p.clone() / q.clone()).ln() + others(p.clone()) * (others(p) / others(q)).ln()
                }
                RejectionEstimator::TotalVariation => (inner(p) - inner(q)).abs(),
                RejectionEstimator::Probability => q - p,
                RejectionEstimator::AbsoluteRatio => log_ratio.abs().exp(),
            }
        };
        let of_tokens: Vec<N> = tokens.iter().map(estimate).collect();
        let passes = |x: &N| x.at_most(rejection.max) && rejection.min.is_none_or(|min| x.at_least(min));
        let of_row = match rejection.level {
            RejectionLevel::Token => {
                let mut all = vec![true; self.shape().1];
                for (t, estimate) in tokens.iter().zip(&of_tokens) {
                    all[*t] = passes(estimate);
                }
                return all;
            }
            RejectionLevel::SequenceSum => of_tokens.into_iter().sum(),
            RejectionLevel::SequenceMean => mean(&of_tokens),
            RejectionLevel::SequenceMax => of_tokens.into_iter().reduce(N::max).unwrap_or(N::from(0.0)),
            RejectionLevel::SequenceMin => of_tokens.into_iter().reduce(N::min).unwrap_or(N::from(0.0)),
            RejectionLevel::SecondMoment => {
                return self.below_second_moment::<N>(rejection.max).row(b).to_vec();
            }
        };
        vec![passes(&of_row); self.shape().1]
    }

    /// `(m, the tokens of it that keep their policy term, and their KL penalty)`.
    fn rejected<N: Number>(&self) -> [Array2<bool>; 3] {
        let mask = &self.problem.mask;
        let [mut counts, mut stays, mut stays_for_kl] = [(); 3].map(|()| mask.clone());
        for rejection in &self.spec.rejection {
            for b in 0..self.shape().0 {
                for (t, passes) in self.passes::<N>(rejection, b).into_iter().enumerate() {
                    stays[[b, t]] &= passes;
                    let spared = rejection.counts && rejection.drops_from == Terms::Policy;
                    stays_for_kl[[b, t]] &= passes || spared;
                    counts[[b, t]] &= passes || rejection.counts;
                }
            }
        }
        // What has no weight is not there.
        for (at, counts) in counts.indexed_iter_mut() {
            *counts = *counts && self.token_weight(at.0, at.1) != 0.0;
        }
        [counts, stays, stays_for_kl]
    }

    /// The trainer's own weight of a token.
    fn token_weight(&self, b: usize, t: usize) -> f64 {
        match (self.spec.token_weights, &self.problem.extra.token_weights) {
            (Some(_), Some(given)) => given[[b, if given.ncols() == 1 { 0 } else { t }]],
            _ => 1.0,
        }
    }

    /// The weight against the sampler's policy of every token, masked ones too. Where a mask comes from rejections, the
    /// weights are of before: verl and unsloth take both from the same arrays.
    fn rollout_weights<N: Number>(&self, rollout: &RolloutWeights) -> Array2<N> {
        let mask = &self.problem.mask;
        let given = rollout.source == RolloutSource::Given;
        let raw = |b: usize, t: usize| {
            let weights = self.problem.extra.rollout_weights.as_ref().expect("given weights");
            weights[[b, if weights.ncols() == 1 { 0 } else { t }]]
        };
        // A masked token's log-ratio is 0, as its difference is multiplied by the mask.
        let log = |b: usize, t: usize| if mask[[b, t]] { self.sampler_log_ratio(b, t) } else { N::from(0.0) };
        let sum = |b: usize| self.tokens_of(mask, b).into_iter().map(|t| log(b, t)).sum::<N>();
        let count = |b: usize| self.tokens_of(mask, b).len() as f64;
        let exp = |log: N| log.within(rollout.clamp).exp();
        let geometric = |b: usize| exp(sum(b) / N::from(count(b).max(1.0)));
        let bounded = |weight: N| bounded(rollout, weight);
        // In NeMo a NaN goes through sum and exponential, and is then 0.
        let nan = |t: usize, b: usize| rollout.unscored == Unscored::Zero && mask[[b, t]] && !self.scored(b, t);
        let or_zero = |nan: bool, weight: N| if nan { N::from(0.0) } else { weight };
        let any_nan = |b: usize| (0..mask.ncols()).any(|t| nan(t, b));
        let weights = grid(self.shape(), |b, t| match rollout.level {
            RolloutLevel::Token if given => bounded(N::from(raw(b, t))),
            RolloutLevel::Geometric if given => {
                let logs = self.tokens_of(mask, b).into_iter().map(|t| (N::from(raw(b, t)) + N::from(1e-10)).ln());
                bounded(exp(logs.sum::<N>() / (N::from(count(b)) + N::from(1e-8))))
            }
            RolloutLevel::Token => bounded(or_zero(nan(t, b), exp(log(b, t)))),
            RolloutLevel::Sequence => bounded(or_zero(any_nan(b), exp(sum(b)))),
            RolloutLevel::Geometric => bounded(or_zero(any_nan(b), geometric(b))),
            RolloutLevel::TokenGatedByGeometric => {
                if inside(rollout, &geometric(b)) {
                    or_zero(nan(t, b), exp(log(b, t)))
                } else {
                    N::from(0.0)
                }
            }
        });
        if !rollout.normalize {
            return weights;
        }
        let per_row = matches!(rollout.level, RolloutLevel::Sequence | RolloutLevel::Geometric);
        let counted: Vec<N> = if per_row {
            let filled = (0..self.shape().0).filter_map(|b| Some((b, *self.tokens_of(mask, b).first()?)));
            filled.map(|at| weights[at].clone()).collect()
        } else {
            all(mask).into_iter().map(|at| weights[at].clone()).collect()
        };
        // verl's masked_mean has 1e-8 more tokens than there are, also in the mean of one weight over its own row.
        let plus = |count: f64| N::from(count) + N::from(1e-8);
        let mean = if per_row {
            let own = |b: usize| N::from(count(b)) / plus(count(b));
            let filled = (0..self.shape().0).filter(|b| count(*b) > 0.0);
            let shrunk = counted.iter().zip(filled).map(|(weight, b)| weight.clone() * own(b));
            shrunk.sum::<N>() / N::from(counted.len().max(1) as f64)
        } else {
            counted.iter().cloned().sum::<N>() / plus(counted.len() as f64)
        };
        if mean.at_most(1e-8) { weights } else { weights.mapv(|weight| weight / mean.clone()) }
    }
}

fn inside<N: Number>(rollout: &RolloutWeights, weight: &N) -> bool {
    rollout.min.is_none_or(|min| weight.at_least(min)) && rollout.max.is_none_or(|max| weight.at_most(max))
}

fn bounded<N: Number>(rollout: &RolloutWeights, weight: N) -> N {
    match rollout.outside {
        Outside::Mask if inside(rollout, &weight) => weight,
        Outside::Mask => N::from(0.0),
        Outside::Truncate => {
            let weight = rollout.min.map_or(weight.clone(), |min| weight.max(N::from(min)));
            rollout.max.map_or(weight.clone(), |max| weight.min(N::from(max)))
        }
    }
}

/// Choices by entropy, by distance and by covariance.
impl Loss<'_> {
    /// `H ≥` the `1 − fraction` quantile of the tokens in `counts`.
    fn top<N: Number>(&self, base: &Policy<N>, counts: &Array2<bool>) -> Array2<bool> {
        let Some(top) = &self.spec.top_entropy else { return counts.clone() };
        let mut sorted: Vec<N> = all(counts).into_iter().map(|(b, t)| base.entropy(b, t)).collect();
        if sorted.is_empty() {
            return counts.clone();
        }
        sorted.sort_by(N::compare);
        let place = (1.0 - top.fraction) * (sorted.len() - 1) as f64;
        let (below, above) = (&sorted[whole(place.floor())], &sorted[whole(place.ceil())]);
        let threshold = below.clone() + N::from(place - place.floor()) * (above.clone() - below.clone());
        // Where the quantile is a token's own entropy that token stays: the choice is between it and the next below.
        let next = (place.floor() == place.ceil()).then(|| whole(place).checked_sub(1));
        match next {
            Some(Some(next)) => _ = below.order(&sorted[next]),
            Some(None) => {}
            None => _ = (below.order(&threshold), above.order(&threshold)),
        }
        let stays = |b: usize, t: usize| base.entropy(b, t).compare(&threshold) != Ordering::Less;
        grid(self.shape(), |b, t| counts[[b, t]] && stays(b, t))
    }

    /// `A ≥ 0` or `Σ m (behaviour − ℓ) / Σ m ≤ threshold`.
    fn near_policy<N: Number>(&self, base: &Policy<N>, counts: &Array2<bool>, b: usize, t: usize) -> bool {
        let Some(mask) = &self.spec.off_policy_mask else { return true };
        let behaviour = |t: usize| match mask.behaviour {
            OldLogp::Given => at(self.problem.old_logp.as_ref(), "old_logp")(b, t),
            OldLogp::Rollout => at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t),
            OldLogp::Current => unreachable!("refused by the spec's check"),
        };
        let difference = |t: usize| {
            let behaviour = behaviour(t);
            if behaviour.is_nan() { N::from(0.0) } else { N::from(behaviour) - base.logp(b, t) }
        };
        let differences: Vec<N> = self.tokens_of(counts, b).into_iter().map(difference).collect();
        self.advantage(b, t) >= 0.0 || mean(&differences).at_most(mask.threshold)
    }

    /// `(A − mean A)·(ℓ − mean ℓ)` of the tokens in `counts`, with means over `Σ m + epsilon`.
    fn covariances<N: Number>(
        &self,
        base: &Policy<N>,
        counts: &Array2<bool>,
        epsilon: f64,
    ) -> Vec<((usize, usize), N)> {
        let tokens = all(counts);
        let count = || N::from(tokens.len() as f64) + N::from(epsilon);
        let advantage = |(b, t): (usize, usize)| N::from(self.advantage(b, t));
        let mean_advantage = tokens.iter().copied().map(advantage).sum::<N>() / count();
        let mean_logp = tokens.iter().map(|(b, t)| base.logp(*b, *t)).sum::<N>() / count();
        let covariance =
            |at: (usize, usize)| (advantage(at) - mean_advantage.clone()) * (base.logp(at.0, at.1) - mean_logp.clone());
        tokens.iter().map(|at| (*at, covariance(*at))).collect()
    }

    /// The `max(1, ⌊fraction · Σ m⌋)` tokens with the largest covariance.
    fn most_covariant<N: Number>(&self, top: TopCovariance, frozen: &Frozen<N>) -> Array2<bool> {
        let mut covariances = self.covariances(&frozen.base, &frozen.counts, 0.0);
        let taken = taken(top.fraction, covariances.len());
        covariances.sort_by(|(_, a), (_, b)| b.compare(a));
        if let [.., (_, last), (_, next)] = &covariances[..covariances.len().min(taken + 1)]
            && taken < covariances.len()
        {
            // The choice is between the last one taken and the next.
            _ = last.order(next);
        }
        let mut selected = Array2::from_elem(self.shape(), false);
        for (at, _) in covariances.into_iter().take(taken) {
            selected[at] = true;
        }
        selected
    }

    /// The unclipped tokens with a covariance strictly within `band`, where there are no more than are taken.
    fn within_band<N: Number>(
        &self,
        band: CovarianceBand,
        clip: &PpoClip,
        frozen: &Frozen<N>,
    ) -> Result<Array2<bool>, Undetermined> {
        let covariances = self.covariances(&frozen.base, &frozen.counts, 1e-8);
        let taken = taken(band.fraction, covariances.len());
        let mut selected = Array2::from_elem(self.shape(), false);
        for (at @ (b, t), covariance) in covariances {
            let ratio = self.log_ratio(frozen, &frozen.base, b, t).exp();
            let a = self.advantage(b, t);
            // Where the clipped loss is the larger.
            let held = (a > 0.0 && !ratio.at_most(1.0 + clip.epsilon_high))
                || (a < 0.0 && !ratio.at_least(1.0 - clip.epsilon_low));
            selected[at] = !held && !covariance.at_most(band.lower) && !covariance.at_least(band.upper);
        }
        let candidates = selected.iter().filter(|selected| **selected).count();
        if candidates > taken { Err(Undetermined { candidates, taken }) } else { Ok(selected) }
    }

    /// Whether the token's probability has not moved too far.
    fn trusted<N: Number>(&self, region: &TrustRegion, base: &Policy<N>, b: usize, t: usize) -> bool {
        let (logp, old) = (base.logp(b, t), self.old_logp(base, b, t));
        let (p, p_old) = (logp.exp(), old.exp());
        let up = self.advantage(b, t) > 0.0;
        let bound = if up { region.high } else { region.low };
        match region.divergence {
            Divergence::TotalVariation => {
                let moved = p - p_old;
                if region.two_sided {
                    return moved.abs().at_most(bound);
                }
                if up { moved.at_most(bound) } else { (-moved).at_most(bound) }
            }
            Divergence::BinaryKl => {
                let rest = |p: N| N::from(1.0) - p + N::from(1e-8);
                let divergence = p_old.clone() * (old - logp)
                    + (N::from(1.0) - p_old.clone()) * (rest(p_old.clone()) / rest(p.clone())).ln();
                let moves_back = || if up { p.order(&p_old) } else { p_old.order(&p) } != Ordering::Greater;
                divergence.at_most(bound) || (!region.two_sided && moves_back())
            }
        }
    }

    /// `φ = exp(λ + k·ln w − λ·w)`
    fn gamma_weight<N: Number>(
        &self,
        vespo: &Vespo,
        frozen: &Frozen<N>,
        weights: Option<&Array2<N>>,
        b: usize,
        t: usize,
    ) -> N {
        let own = |t: usize| {
            let (base, spec) = (&frozen.base, self.spec);
            let current = spec.old_logp == OldLogp::Current;
            let x = if current { N::from(0.0) } else { base.logp(b, t) - self.old_logp(base, b, t) };
            x.clamp(-20.0, 20.0)
        };
        let mut log = self.tokens_of(&frozen.counts, b).into_iter().map(own).sum::<N>();
        if let (Some(rollout), Some(weights)) = (&self.spec.rollout, weights) {
            // The logarithm of 0 is −∞, which the lower bound lifts.
            let log_weight = |t: usize| weights[[b, t]].clone().max(N::from(1e-8)).ln().min(N::from(20.0));
            let one_a_row = matches!(rollout.level, RolloutLevel::Sequence | RolloutLevel::Geometric)
                || (rollout.source == RolloutSource::Given
                    && self.problem.extra.rollout_weights.as_ref().is_some_and(|weights| weights.ncols() == 1));
            log = log
                + if one_a_row {
                    log_weight(t)
                } else if vespo.weights_of_masked_tokens && rollout.source == RolloutSource::Given {
                    (0..self.shape().1).map(log_weight).sum::<N>()
                } else {
                    // A computed weight under the mask is 1.
                    self.tokens_of(&frozen.counts, b).into_iter().map(log_weight).sum::<N>()
                };
        }
        let log = log.max(N::from(1e-8).ln()).min(N::from(20.0));
        let (k, lambda) = if self.advantage(b, t) >= 0.0 {
            (vespo.k_positive, vespo.lambda_positive)
        } else {
            (vespo.k_negative, vespo.lambda_negative)
        };
        let lambda = || N::from(lambda.max(1e-4));
        (lambda() + N::from(k) * log.clone() - lambda() * log.exp()).exp()
    }
}

impl Loss<'_> {
    /// Everything that is constant, from the policy at the base point.
    pub(crate) fn freeze<N: Number>(&self, base: Policy<N>) -> Result<Frozen<N>, Undetermined> {
        let shape = self.shape();
        let [counts, stays, stays_for_kl] = self.rejected::<N>();
        let top = self.top(&base, &counts);
        let weights = self.spec.rollout.as_ref().map(|rollout| self.rollout_weights::<N>(rollout));
        let weight = |b, t| weights.as_ref().map_or(N::from(1.0), |weights| weights[[b, t]].clone());
        // VESPO has the weights within φ, and does not multiply its policy term by them.
        let vespo = matches!(self.spec.objective, Objective::Vespo(_));
        let weighs_kl = self.spec.rollout.as_ref().is_some_and(|rollout| rollout.applies_to == Terms::PolicyAndKl);
        let drops_policy = self.spec.top_entropy.is_some_and(|top| top.drops == Drops::PolicyTerm);
        let near = grid(shape, |b, t| counts[[b, t]] && self.near_policy(&base, &counts, b, t));
        let policy_factor = grid(shape, |b, t| {
            let keeps = stays[[b, t]] && (!drops_policy || top[[b, t]]) && near[[b, t]];
            let own = || N::from(self.token_weight(b, t));
            match keeps {
                true if vespo => own(),
                true => weight(b, t) * own(),
                false => N::from(0.0),
            }
        });
        let own_weighs_kl = self.spec.token_weights.is_some_and(|weights| weights.applies_to == Terms::PolicyAndKl);
        let kl_factor = grid(shape, |b, t| {
            let own = N::from(if own_weighs_kl { self.token_weight(b, t) } else { 1.0 });
            match (stays_for_kl[[b, t]], weighs_kl) {
                (false, _) => N::from(0.0),
                (true, false) => own,
                (true, true) => weight(b, t) * own,
            }
        });
        let mut frozen = Frozen {
            base,
            stays,
            near,
            policy_factor,
            kl_factor,
            top,
            score: Array2::from_elem(shape, N::from(0.0)),
            selected: Array2::from_elem(shape, false),
            counts,
        };
        frozen.selected = self.selected(&frozen)?;
        frozen.score =
            grid(
                shape,
                |b, t| {
                    if frozen.counts[[b, t]] { self.score(&frozen, weights.as_ref(), b, t) } else { N::from(0.0) }
                },
            );
        Ok(frozen)
    }

    fn selected<N: Number>(&self, frozen: &Frozen<N>) -> Result<Array2<bool>, Undetermined> {
        let given = || self.problem.extra.selected.clone().expect("an objective without `selection`");
        match &self.spec.objective {
            Objective::KlCov(KlCov { selection, .. }) => {
                Ok(selection.map_or_else(given, |top| self.most_covariant(top, frozen)))
            }
            Objective::ClipCov(ClipCov { selection, clip }) => {
                selection.map_or_else(|| Ok(given()), |band| self.within_band(band, clip, frozen))
            }
            Objective::Topr(topr) => Ok(match topr.positive {
                Positive::Selected => given(),
                Positive::Advantage => grid(self.shape(), |b, t| self.advantage(b, t) > 0.0),
            }),
            Objective::TrustRegion(region) => {
                Ok(grid(self.shape(), |b, t| frozen.counts[[b, t]] && self.trusted(region, &frozen.base, b, t)))
            }
            _ => Ok(Array2::from_elem(self.shape(), false)),
        }
    }

    fn score<N: Number>(&self, frozen: &Frozen<N>, weights: Option<&Array2<N>>, b: usize, t: usize) -> N {
        let ratio = || self.log_ratio(frozen, &frozen.base, b, t).exp();
        match &self.spec.objective {
            Objective::Cispo(Cispo { lower, upper }) => {
                let ratio = lower.map_or(ratio(), |lower| ratio().max(N::from(lower)));
                ratio.min(N::from(*upper))
            }
            Objective::Vespo(vespo) => self.gamma_weight(vespo, frozen, weights, b, t),
            Objective::PolicyGradient | Objective::Dro(_) => N::from(1.0),
            Objective::MaskedRatio(MaskedRatio { lower, upper }) => {
                let ratio = ratio();
                if ratio.at_most(*lower) || ratio.at_least(*upper) { N::from(0.0) } else { ratio }
            }
            Objective::TrustRegion(TrustRegion { truncate: Some(truncate), .. }) => ratio().min(N::from(*truncate)),
            Objective::Topr(Topr { positive_weight, negative_weight, upper, .. }) => {
                if frozen.selected[[b, t]] {
                    N::from(*positive_weight)
                } else {
                    N::from(*negative_weight) * ratio().min(N::from(*upper))
                }
            }
            _ => N::from(0.0),
        }
    }
}

/// What is differentiated.
impl Loss<'_> {
    fn old_logp<N: Number>(&self, base: &Policy<N>, b: usize, t: usize) -> N {
        match self.spec.old_logp {
            OldLogp::Given => N::from(at(self.problem.old_logp.as_ref(), "old_logp")(b, t)),
            OldLogp::Current => base.logp(b, t),
            OldLogp::Rollout => N::from(at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t)),
        }
    }

    /// `x = ℓ − old_logp`, clamped.
    fn token_log_ratio<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let ratio = &self.spec.ratio;
        let logp = policy.logp(b, t);
        let x = match self.spec.old_logp {
            OldLogp::Current => logp.since(&frozen.base.logp(b, t)),
            OldLogp::Given | OldLogp::Rollout => logp - self.old_logp(&frozen.base, b, t),
        };
        let x = if ratio.level == RatioLevel::SequenceProduct { x } else { x.within(ratio.clamp) };
        let advantage = self.advantage(b, t);
        match ratio.clip {
            None => x,
            Some(clip) if advantage > 0.0 => x.min(N::from(clip.high)),
            Some(clip) if advantage < 0.0 => x.max(N::from(-clip.low)),
            Some(_) => N::from(0.0),
        }
    }

    /// `Σ x` over the tokens of the row that its ratio is made of, and how many they are.
    fn sum_of_log_ratios<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize) -> (N, usize) {
        let drops = self.spec.top_entropy.is_some_and(|top| top.drops == Drops::Ratio);
        let tokens = self.tokens_of(if drops { &frozen.top } else { &frozen.counts }, b);
        (tokens.iter().map(|t| self.token_log_ratio(frozen, policy, b, *t)).sum::<N>(), tokens.len())
    }

    /// `Σ x / Σ 1`
    fn mean_log_ratio<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize) -> N {
        let (sum, count) = self.sum_of_log_ratios(frozen, policy, b);
        sum / (N::from(count.max(1) as f64) + N::from(self.spec.ratio.denominator_epsilon))
    }

    /// `ln ρ`
    fn log_ratio<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let log = match self.spec.ratio.level {
            RatioLevel::Token => self.token_log_ratio(frozen, policy, b, t),
            RatioLevel::Sequence => self.mean_log_ratio(frozen, policy, b),
            RatioLevel::SequenceToken => {
                policy.logp(b, t).since(&frozen.base.logp(b, t)) + self.mean_log_ratio(frozen, &frozen.base, b)
            }
            RatioLevel::SequenceProduct => self.sum_of_log_ratios(frozen, policy, b).0.within(self.spec.ratio.clamp),
        };
        self.spec.ratio.cap.map_or(log.clone(), |cap| log.min(N::from(cap)))
    }

    /// `ρ` of every token of `m`, at the base point.
    pub(crate) fn ratios<N: Number>(&self, frozen: &Frozen<N>) -> Vec<N> {
        all(&frozen.counts).into_iter().map(|(b, t)| self.log_ratio(frozen, &frozen.base, b, t).exp()).collect()
    }

    /// The policy term, before masks and weights.
    fn policy<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let advantage = self.advantage(b, t);
        let a = || N::from(advantage);
        let log_ratio = || self.log_ratio(frozen, policy, b, t);
        let surrogate = || -(log_ratio().exp() * a());
        let score = || -(frozen.score[[b, t]].clone() * a() * policy.logp(b, t));
        let selected = frozen.selected[[b, t]];
        match &self.spec.objective {
            Objective::PpoClip(clip) => ppo_clip(clip, &log_ratio().exp(), advantage),
            Objective::Cispo(_) | Objective::Vespo(_) | Objective::PolicyGradient | Objective::MaskedRatio(_) => {
                score()
            }
            Objective::Sapo(Sapo { tau_positive, tau_negative }) => {
                let tau = || N::from(if advantage > 0.0 { *tau_positive } else { *tau_negative });
                let z = tau() * (log_ratio().exp() - N::from(1.0));
                let sigmoid = N::from(1.0) / (N::from(1.0) + (-z).exp());
                -(N::from(4.0) / tau() * sigmoid * a())
            }
            Objective::TrustRegion(region) => {
                let term = match (selected, region.truncate) {
                    (false, _) => N::from(0.0),
                    (true, None) => surrogate(),
                    (true, Some(_)) => score(),
                };
                term + N::from(region.penalty) * log_ratio().squared()
            }
            Objective::Dro(dro) => {
                -(a() * policy.logp(b, t) - N::from(dro.beta) / N::from(2.0) * log_ratio().squared())
            }
            Objective::KlCov(cov) if selected => surrogate() + N::from(cov.coefficient) * log_ratio().abs(),
            Objective::ImportanceSampling(_) | Objective::KlCov(_) => surrogate(),
            Objective::ClipCov(_) if selected => N::from(0.0),
            Objective::ClipCov(cov) => ppo_clip(&cov.clip, &log_ratio().exp(), advantage),
            Objective::Topr(_) => score(),
            Objective::Aspo(aspo) => self.aspo(aspo, frozen, policy, b, t),
            Objective::None => N::from(0.0),
        }
    }

    /// Archer2.0's `compute_policy_loss_archer`, with an ε for each sign, and others for the selected: a clipped ratio, over its own constant square where
    /// the advantage is positive, and a score function beyond the dual clip.
    fn aspo<N: Number>(&self, aspo: &Aspo, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let advantage = self.advantage(b, t);
        let a = || N::from(advantage);
        let selected = self.problem.extra.selected.as_ref().is_some_and(|selected| selected[[b, t]]);
        let widths = aspo.selected.filter(|_| selected);
        let epsilon_low = widths.map_or(aspo.epsilon_low, |widths| widths.epsilon_low);
        let epsilon_high = widths.map_or(aspo.epsilon_high, |widths| widths.epsilon_high);
        let clipped = |policy: &Policy<N>| {
            let ratio = self.log_ratio(frozen, policy, b, t).exp();
            if advantage > 0.0 {
                ratio.min(N::from(1.0) + N::from(epsilon_high))
            } else {
                ratio.max(N::from(1.0) - N::from(epsilon_low))
            }
        };
        let held = clipped(&frozen.base);
        let dual = |c: f64| -(N::from(c) * a() * policy.logp(b, t));
        if advantage > 0.0 {
            let inverse = N::from(1.0) / held.clone();
            if inverse.at_most(aspo.dual_clip_positive) {
                -(a() * clipped(policy) / (held.clone() * held))
            } else {
                dual(aspo.dual_clip_positive)
            }
        } else if held.at_most(aspo.dual_clip_negative) {
            -(a() * clipped(policy))
        } else {
            dual(aspo.dual_clip_negative)
        }
    }

    /// The KL estimate, with what multiplies it.
    fn kl<N: Number>(&self, kl: &Kl, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let reference = at(self.problem.ref_logp.as_ref(), "ref_logp")(b, t);
        let estimate_at = |policy: &Policy<N>| {
            let d = (N::from(reference) - policy.logp(b, t)).within(kl.difference_clamp);
            let estimate = match kl.estimator {
                KlEstimator::K1 => -d,
                KlEstimator::K2 => d.squared() / N::from(2.0),
                KlEstimator::K3 => d.exp_excess(),
                KlEstimator::Abs => d.abs(),
            };
            if kl.clamp_after_importance { estimate } else { estimate.within(kl.value_clamp) }
        };
        let beyond = |clamp: f64| !(N::from(reference) - frozen.base.logp(b, t)).abs().at_most(clamp);
        let k2_at = |policy: &Policy<N>| (N::from(reference) - policy.logp(b, t)).squared() / N::from(2.0);
        let estimate = match kl.gradient {
            KlGradient::Own => estimate_at(policy),
            // Straight through: the value of the estimate, the gradient of k2.
            KlGradient::K2 => k2_at(policy).since(&k2_at(&frozen.base)) + estimate_at(&frozen.base),
            KlGradient::K2Weighted(bound) => {
                let old = self.old_logp(&frozen.base, b, t);
                let weight = (frozen.base.logp(b, t) - old).exp().min(N::from(bound));
                weight * k2_at(policy).since(&k2_at(&frozen.base)) + estimate_at(&frozen.base)
            }
        };
        let importance = match kl.importance {
            KlImportance::One => {
                return if kl.clamp_after_importance { estimate.within(kl.value_clamp) } else { estimate };
            }
            KlImportance::Ratio => self.log_ratio(frozen, policy, b, t).exp(),
            KlImportance::TokenRatio => self.token_log_ratio(frozen, policy, b, t).exp(),
            KlImportance::Rollout => {
                let rollout = at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t);
                if rollout.is_nan() {
                    N::from(0.0)
                } else if kl.difference_clamp.is_some_and(beyond) {
                    (frozen.base.logp(b, t) - N::from(rollout)).exp()
                } else {
                    (policy.logp(b, t) - N::from(rollout)).exp()
                }
            }
            // NeMo holds the weight, too, where the difference is.
            KlImportance::Score if kl.difference_clamp.is_some_and(beyond) => N::from(1.0),
            KlImportance::Score => policy.logp(b, t).since(&frozen.base.logp(b, t)).exp(),
        };
        let product = importance * estimate;
        if kl.clamp_after_importance { product.within(kl.value_clamp) } else { product }
    }

    /// The weight of a token of row `b`.
    pub(crate) fn weight<N: Number>(&self, averaging: Averaging, frozen: &Frozen<N>, b: usize) -> N {
        let count = |b: usize| self.tokens_of(&frozen.counts, b).len();
        let rows = |rows: Rows| match rows {
            Rows::All => self.shape().0 as f64,
            Rows::NonEmpty => (0..self.shape().0).filter(|b| count(*b) > 0).count() as f64,
            Rows::Given(rows) => rows,
        };
        let plus_epsilon = |count: usize| N::from(count as f64) + N::from(averaging.denominator_epsilon);
        let denominator = match averaging.reduction {
            Reduction::TokenMean => plus_epsilon((0..self.shape().0).map(count).sum()),
            Reduction::SequenceMean { rows: b_prime } => N::from(rows(b_prime)) * plus_epsilon(count(b)),
            Reduction::SequenceSum { rows: b_prime } => N::from(rows(b_prime)),
            Reduction::FixedLength { rows: b_prime, length } => {
                N::from(rows(b_prime)) * N::from(length.unwrap_or(self.shape().1) as f64)
            }
            Reduction::Normalizer(normalizer) => N::from(normalizer),
        };
        N::from(1.0) / denominator
    }

    /// What the entropy of a token is multiplied by.
    fn entropy_weight<N: Number>(&self, frozen: &Frozen<N>, b: usize, t: usize) -> N {
        let coef = N::from(self.spec.entropy_coef);
        if let Some(averaging) = self.spec.entropy_averaging {
            return coef * self.weight(averaging, frozen, b);
        }
        let drops_policy = self.spec.top_entropy.is_some_and(|top| top.drops == Drops::PolicyTerm);
        let kept = if drops_policy { &frozen.top } else { &frozen.counts };
        if kept[[b, t]] { coef / N::from(all(kept).len().max(1) as f64) } else { N::from(0.0) }
    }

    /// Row `b`: what it adds to the loss, and its tokens.
    pub(crate) fn row<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize) -> RowLoss<N> {
        let spec = self.spec;
        let token = |t: usize| {
            frozen.counts[[b, t]].then(|| {
                let policy_term = if frozen.stays[[b, t]] {
                    frozen.policy_factor[[b, t]].clone() * self.policy(frozen, policy, b, t)
                } else {
                    N::from(0.0)
                };
                let factor = || frozen.kl_factor[[b, t]].clone();
                let kl = spec.kl.as_ref().map(|kl| factor() * self.kl(kl, frozen, policy, b, t));
                let beta = || N::from(spec.kl.as_ref().map_or(0.0, |kl| kl.beta));
                let penalty = kl.clone().map_or(N::from(0.0), |kl| beta() * kl);
                TokenLoss { loss: policy_term.clone() + penalty.clone(), policy: policy_term, kl, penalty }
            })
        };
        let tokens: Vec<Option<TokenLoss<N>>> = (0..self.shape().1).map(token).collect();
        let mut loss = self.empty_row(frozen, b);
        for (t, token) in tokens.iter().enumerate() {
            let Some(token) = token else { continue };
            loss = loss
                + self.weight(spec.averaging(), frozen, b) * token.policy.clone()
                + self.weight(spec.kl_averaging(), frozen, b) * token.penalty.clone();
            if spec.entropy_coef != 0.0 {
                loss = loss - self.entropy_weight(frozen, b, t) * policy.entropy(b, t);
            }
            if spec.dentropy {
                let dentropy = self.problem.extra.dentropy.as_ref().expect("the spec reads it")[[b, t]];
                loss = loss + N::from(dentropy) * policy.entropy(b, t);
            }
        }
        RowLoss { loss: N::from(spec.scale) * loss, tokens }
    }

    /// `−A/B` for a row without tokens, where the objective counts those.
    fn empty_row<N: Number>(&self, frozen: &Frozen<N>, b: usize) -> N {
        let counts = matches!(&self.spec.objective, Objective::ImportanceSampling(sampling) if sampling.empty_rows);
        if !counts || !self.tokens_of(&frozen.counts, b).is_empty() {
            return N::from(0.0);
        }
        debug_assert_eq!(self.spec.advantages, AdvantageLevel::Sequence);
        -(N::from(self.advantage(b, 0)) / N::from(self.shape().0 as f64))
    }
}

/// `−min(min(ρ, δ)·A, clip(ρ, 1 − εl, 1 + εh)·A)`; with a dual clip and `A < 0` at most `−c·A`.
fn ppo_clip<N: Number>(clip: &PpoClip, ratio: &N, advantage: f64) -> N {
    let a = || N::from(advantage);
    let unclipped = clip.delta.map_or(ratio.clone(), |delta| ratio.clone().min(N::from(delta)));
    let low = N::from(1.0) - N::from(clip.epsilon_low);
    let high = N::from(1.0) + N::from(clip.epsilon_high);
    let clipped = ratio.clone().max(low).min(high);
    let loss = -(unclipped * a()).min(clipped * a());
    match clip.dual_clip {
        Some(c) if advantage < 0.0 => loss.min(-(N::from(c) * a())),
        _ => loss,
    }
}
