//! A batch, and what a device computes around a kernel: in f64, and by nothing of the kernels' own.

use super::{bytes_of, f32_bytes, logits_of, number, per_token, target_bias};
use assay_core::problem::{Candidate, Problem, Shape};
use assay_core::spec::{
    Averaging, ImportanceSampling, LogitsTransform, LossSpec, LossTerms, Objective, OldLogp, OutOfBounds, PpoClip,
    Ratio, RatioLevel, Reduction, RolloutLevel, RolloutSource, RolloutWeights, Rows, Sapo, Temperature,
    TemperatureDivides, UnscoredWeight,
};
use ndarray::{Array2, arr0};

/// A batch and its loss.
pub(crate) struct Batch<'p> {
    pub(crate) spec: &'p LossSpec,
    pub(crate) problem: &'p Problem,
    pub(crate) shape: Shape,
    pub(crate) mask: Vec<bool>,
    count: f64,
}

impl<'p> Batch<'p> {
    pub(crate) fn new(spec: &'p LossSpec, problem: &'p Problem) -> Self {
        let mask: Vec<bool> = problem.mask.iter().copied().collect();
        let count = mask.iter().filter(|&&counts| counts).count() as f64;
        Self { spec, problem, shape: problem.shape(), mask, count }
    }

    /// What a token's terms are divided by in a reduction, over the scale of the spec; for a masked one infinite.
    pub(crate) fn denominator(&self, token: usize, averaging: Averaging) -> f64 {
        if !self.mask[token] {
            return f64::INFINITY;
        }
        let row_counts = self.mask.chunks(self.shape.tokens).map(|row| row.iter().filter(|&&counts| counts).count());
        let row_counts: Vec<usize> = row_counts.collect();
        let rows = |rows: Rows| match rows {
            Rows::All => self.shape.batch as f64,
            Rows::NonEmpty => row_counts.iter().filter(|&&count| count > 0).count() as f64,
            Rows::Given(count) => count,
        };
        let (of_row, epsilon) = (row_counts[token / self.shape.tokens] as f64, averaging.denominator_epsilon);
        let denominator = match averaging.reduction {
            Reduction::TokenMean => self.count + epsilon,
            Reduction::SequenceMean { rows: of } => rows(of) * (of_row + epsilon),
            Reduction::SequenceSum { rows: of } => rows(of),
            Reduction::FixedLength { rows: of, length } => rows(of) * length.unwrap_or(self.shape.tokens) as f64,
            Reduction::Normalizer(value) => value,
        };
        denominator / self.spec.scale
    }

    /// What a token's loss is multiplied by.
    pub(crate) fn weight(&self, token: usize) -> f64 {
        self.denominator(token, self.spec.averaging()).recip()
    }

    /// And the bonus of its entropy.
    pub(crate) fn entropy_weight(&self, token: usize) -> f64 {
        if self.spec.dentropy {
            let given = self.token(self.problem.extra.dentropy.as_ref(), token);
            return if self.mask[token] { self.spec.scale * given } else { 0.0 };
        }
        match self.spec.entropy_averaging {
            Some(averaging) => -self.spec.entropy_coef / self.denominator(token, averaging),
            None => self.entropy_factor(),
        }
    }

    pub(crate) fn entropy_factor(&self) -> f64 {
        let first = self.mask.iter().position(|&counts| counts);
        match (self.spec.entropy_averaging, first) {
            (Some(averaging), Some(first)) => -self.spec.entropy_coef / self.denominator(first, averaging),
            _ => -self.spec.entropy_coef * self.spec.scale / self.count.max(1.0),
        }
    }

    /// The sampler's weight of a token.
    pub(crate) fn rollout_weight(&self, token: usize) -> f64 {
        let at = (token / self.shape.tokens, token % self.shape.tokens);
        self.problem
            .extra
            .rollout_weights
            .as_ref()
            .map_or(1.0, |weights| weights[if weights.ncols() == 1 { (at.0, 0) } else { at }])
    }

    pub(crate) fn selected(&self, token: usize) -> f64 {
        let at = (token / self.shape.tokens, token % self.shape.tokens);
        f64::from(u8::from(self.problem.extra.selected.as_ref().is_some_and(|selected| selected[at])))
    }

    /// `1/T` of a token, times what a softmax multiplies by what its logits become.
    pub(crate) fn rate(&self, token: usize) -> f64 {
        let changes = self.spec.logits != LogitsTransform::default() || !self.spec.support.is_whole();
        if changes { number(self.spec, "logp_rate") * self.inverse(token) } else { self.inverse(token) }
    }

    /// `1/T` of a token.
    pub(crate) fn inverse(&self, token: usize) -> f64 {
        let (b, t) = (token / self.shape.tokens, token % self.shape.tokens);
        let given = self.problem.extra.temperature.as_ref();
        let of_token = || given.map(|given| given[[b, if given.ncols() == 1 { 0 } else { t }]]);
        self.spec.temperature.number().or_else(of_token).expect("the spec reads it").recip()
    }

    /// The rates of all tokens, where they are given to a kernel.
    pub(crate) fn rates(&self) -> Vec<u8> {
        f32_bytes((0..self.tokens()).map(|token| self.rate(token)))
    }

    /// Whether entropy is of another softmax than logp.
    pub(crate) fn two_softmaxes(&self) -> bool {
        self.spec.temperature != Temperature::ONE && self.spec.temperature_divides == TemperatureDivides::Logp
    }

    pub(crate) fn ids(&self) -> Vec<u8> {
        bytes_of(self.problem.ids.iter().map(|&id| (id as i32).to_le_bytes()))
    }

    pub(crate) fn token(&self, values: Option<&Array2<f64>>, token: usize) -> f64 {
        let at = (token / self.shape.tokens, token % self.shape.tokens);
        values.map_or(f64::NAN, |values| values[at])
    }

    pub(crate) fn advantage(&self, token: usize) -> f64 {
        self.problem.advantages.at(token / self.shape.tokens, token % self.shape.tokens)
    }

    pub(crate) fn tokens(&self) -> usize {
        self.shape.batch * self.shape.tokens
    }

    pub(crate) fn candidate(
        &self,
        logp: impl Fn(usize) -> f64,
        entropy: impl Fn(usize) -> f64,
        [loss, reduced]: [&dyn Fn(usize) -> f64; 2],
        dlogits: &[u8],
    ) -> Candidate {
        let total: f64 = (0..self.tokens()).filter(|&i| self.mask[i]).map(|i| self.weight(i) * reduced(i)).sum();
        let bonus: f64 =
            (0..self.tokens()).filter(|&i| self.mask[i]).map(|i| self.entropy_weight(i) * entropy(i)).sum();
        let array = |of: &dyn Fn(usize) -> f64| {
            let values = (0..self.tokens()).map(|i| if self.mask[i] { of(i) as f32 } else { 0.0 }).collect();
            Some(Array2::from_shape_vec((self.shape.batch, self.shape.tokens), values).unwrap().into())
        };
        Candidate {
            loss: Some(arr0((total + bonus) as f32).into()),
            gradient: logits_of(dlogits, self.shape, self.problem.logits.dtype()),
            logp: array(&logp),
            logp_of_others: None,
            entropy: array(&entropy),
            token_loss: array(&loss),
            metrics: None,
        }
    }

    /// The numbers that the one-pass kernel is given, by name.
    pub(crate) fn numbers_of_one_pass(&self, names: &[&'static str]) -> Vec<u8> {
        f32_bytes(names.iter().map(|&name| match name {
            "inverse_temperature" => 1.0 / self.spec.temperature.number().expect("one for all"),
            "entropy_factor" => self.entropy_factor(),
            other => number(self.spec, other),
        }))
    }

    /// What it is given of each token.
    pub(crate) fn tokens_of_one_pass(&self, names: &[&'static str]) -> Vec<u8> {
        let of_sampler = |applies: bool, token| if applies { self.rollout_weight(token) } else { 1.0 };
        let on_kl = self.spec.rollout.as_ref().is_some_and(|rollout| rollout.applies_to == LossTerms::PolicyAndKl);
        let spared =
            |token| if matches!(self.spec.objective, Objective::ClipCov(_)) { 1.0 - self.selected(token) } else { 1.0 };
        let old_logp = match self.spec.old_logp {
            OldLogp::Rollout => self.problem.extra.rollout_logp.as_ref(),
            _ => self.problem.old_logp.as_ref(),
        };
        let of_targets = target_bias(self.spec, self.problem);
        per_token(names, self.tokens(), |name, token| match name {
            "target_bias" => of_targets[token],
            "advantage" => self.advantage(token),
            "old_logp" => self.token(old_logp, token),
            "ref_logp" => self.token(self.problem.ref_logp.as_ref(), token),
            "weight" => self.weight(token),
            "mask" => f64::from(u8::from(self.mask[token])),
            "policy_weight" => of_sampler(true, token) * spared(token),
            "kl_weight" => of_sampler(on_kl, token),
            "selected" => self.selected(token),
            "rollout_logp" => self.token(self.problem.extra.rollout_logp.as_ref(), token),
            "kl_share" => {
                self.denominator(token, self.spec.averaging()) / self.denominator(token, self.spec.kl_averaging())
            }
            "entropy_factor" => self.entropy_weight(token),
            "rate" => self.rate(token),
            other => panic!("{other}: not known here"),
        })
    }
}

/// What surrounds the two-pass kernels here knows this much of the loss.
pub(crate) fn plain(spec: &LossSpec) -> LossSpec {
    let Objective::PpoClip(clip) = &spec.objective else { unreachable!("only PPO-clip is drawn") };
    let clip = PpoClip { delta: None, dual_clip: None, ..clip.clone() };
    LossSpec { objective: Objective::PpoClip(clip), kl: None, ..spec.clone() }
}

/// What surrounds the one-pass kernel here weighs tokens only by weights that are given for each, and rejects none; the
/// kernel refuses the rest.
pub(crate) fn token_by_token(spec: LossSpec) -> LossSpec {
    let objective = match spec.objective {
        Objective::Vespo(_) => Objective::Sapo(Sapo::default()),
        other => other,
    };
    let rollout = spec.rollout.map(|rollout| RolloutWeights {
        source: RolloutSource::Given,
        level: RolloutLevel::Token,
        outside: OutOfBounds::Truncate,
        min: None,
        max: None,
        clamp: None,
        normalize: false,
        unscored: UnscoredWeight::One,
        ..rollout
    });
    LossSpec {
        ratio: Ratio { level: RatioLevel::Token, ..spec.ratio },
        token_weights: None,
        // What is around the kernel makes them.
        ids_per_token: 1,
        rollout,
        rejection: vec![],
        off_policy_mask: None,
        objective: match objective {
            Objective::ImportanceSampling(_) => Objective::ImportanceSampling(ImportanceSampling::default()),
            other => other,
        },
        ..spec
    }
}
