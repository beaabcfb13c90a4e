//! Problems made from a seed, in the regimes where kernels go wrong.

use std::fmt;

use ndarray::{Array1, Array2, Array3, Ix3, Zip};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, StandardNormal, Uniform};
use serde::{Deserialize, Serialize};

use assay_core::problem::{
    Advantages, Dtype, Extra, FloatArray, HeadLayout, HeadProblem, HeadShape, OtherIds, Problem, ProblemError,
    Projection, Shape,
};
use assay_core::spec::{
    AdvantageLevel, LossSpec, Objective, OldLogp, Reduction, RolloutLevel, RolloutSource, Temperature, Vespo,
};
use assay_reference as reference;

/// How logits are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Regime {
    /// Uniform in ±0.1: every column counts alike, so a padded or dropped one shows.
    Small,
    /// Normal, σ = 1.
    Normal,
    /// Normal, σ = 8: as peaked as a trained model.
    Peaked,
    /// Normal, σ = 1, around 10⁴.
    ShiftedUp,
    /// Normal, σ = 1, around −10⁴.
    ShiftedDown,
    /// Normal, σ = 1, around −120: `exp` without the maximum subtracted is 0, and a maximum started at 0 is wrong.
    Negative,
    /// One column 30 to 60 nats above the rest, most often the sampled one.
    Confident,
    /// Normal, σ = 2, with a quarter of the other columns at −∞; where the first is, so is the first half: a block of
    /// nothing else.
    Holes,
    /// The same, and half of the sampled columns are at −∞ too, as where a filter that the sampler did not have is put on:
    /// their logp is −∞.
    TargetHoles,
    /// Each logit −1, 0 or 1: maxima and probabilities tie.
    Ties,
    /// As a trained model's: a bulk at 20 nats below the largest, above it a tail of columns whose gaps grow with the logarithm
    /// of their rank, and an id drawn from that softmax, with `p` of 1e-3 to 1 − 1e-6. Ids are at the first and the last column
    /// and at edges of tiles, masks are padded on either side and have gaps.
    Sampled,
    /// Most of the mass in columns of a probability around 1/V, behind a peak in the first one: what is added to a sum that is
    /// already large is lost of it. Ids and masks as in `sampled`.
    LongTail,
}

impl fmt::Display for Regime {
    /// As it is typed.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.serialize(f)
    }
}

impl Regime {
    /// All of them.
    pub const ALL: [Regime; 12] = [
        Regime::Small,
        Regime::Normal,
        Regime::Peaked,
        Regime::ShiftedUp,
        Regime::ShiftedDown,
        Regime::Negative,
        Regime::Confident,
        Regime::Holes,
        Regime::TargetHoles,
        Regime::Ties,
        Regime::Sampled,
        Regime::LongTail,
    ];

    /// Those in which every logp is a number: what is swept with any spec. Where a logp is −∞, many a loss is not finite.
    pub const FINITE: [Regime; 11] = [
        Regime::Small,
        Regime::Normal,
        Regime::Peaked,
        Regime::ShiftedUp,
        Regime::ShiftedDown,
        Regime::Negative,
        Regime::Confident,
        Regime::Holes,
        Regime::Ties,
        Regime::Sampled,
        Regime::LongTail,
    ];

    /// Whether ids and masks are laid out by design, and not drawn alike.
    fn is_designed(self) -> bool {
        matches!(self, Regime::Sampled | Regime::LongTail)
    }

    /// Whether some logits are −∞, which no product is.
    pub fn has_holes(self) -> bool {
        matches!(self, Regime::Holes | Regime::TargetHoles)
    }
}

/// A recipe for a [`Problem`]: the same recipe and spec give the same problem, bit for bit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// `[B, T, V]`.
    pub shape: [usize; 3],
    /// Dtype of the logits.
    pub dtype: Dtype,
    /// How logits are drawn.
    pub regime: Regime,
    /// Seed of every draw.
    #[serde(default)]
    pub seed: u64,
    /// `old_logp = logp + scale · N(0,1)`, and `ref_logp` likewise; either may exceed 0, as no kernel should mind.
    #[serde(default = "default_noise")]
    pub old_logp_noise_scale: f64,
    /// Whether NaN logits, advantages, log-probabilities and weights and the id −100 stand under the mask.
    #[serde(default)]
    pub masked_garbage: bool,
}

/// Around what other policies' log-probabilities lie where the policy's own is −∞.
const UNLIKELY: f64 = -20.0;

/// Bytes of a token beside its logits: its id, mask, advantage and log-probabilities, twice while they are drawn.
const OF_A_TOKEN: usize = 128;

/// And of each of its ids, with its cotangent.
const OF_AN_ID: usize = 32;

/// The seed project's own choice.
fn default_noise() -> f64 {
    0.3
}

/// A recipe that makes no problem.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RecipeError {
    /// A zero or unreasonable extent.
    #[error(
        "`shape`: got {given:?}, expected [B,T,V] with every extent ≥ 1 and no more bytes than there are addresses"
    )]
    Shape {
        /// The shape asked for.
        given: [usize; 3],
    },
    /// More than there is memory for.
    #[error("`shape`: got {given:?}, which takes {bytes} bytes, expected no more than there is memory for")]
    Memory {
        /// The shape asked for.
        given: [usize; 3],
        /// What it takes.
        bytes: usize,
    },
    /// A zero or unreasonable width.
    #[error("`hidden`: got {given}, expected H ≥ 1 with at most 2³¹ hidden states and weights")]
    Hidden {
        /// The width asked for.
        given: usize,
    },
    /// A regime that no product has.
    #[error("`regime`: got {given}, expected another: logits that are a product are not −∞")]
    Regime {
        /// The regime asked for.
        given: Regime,
    },
    /// A noise scale that is not a number ≥ 0.
    #[error("`old_logp_noise_scale`: got {given}, expected a finite number ≥ 0")]
    Noise {
        /// The scale asked for.
        given: f64,
    },
    /// The spec is out of range.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

impl Recipe {
    /// Checks the recipe and the spec that it would be made for.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn check(&self, spec: &LossSpec) -> Result<(), RecipeError> {
        self.expect_memory(spec, self.dtype.size())?;
        if !(self.old_logp_noise_scale >= 0.0 && self.old_logp_noise_scale.is_finite()) {
            return Err(RecipeError::Noise { given: self.old_logp_noise_scale });
        }
        Ok(spec.check().map_err(ProblemError::from)?)
    }

    /// Whether there may be memory for the tokens and for `of_a_logit` bytes a logit.
    fn expect_memory(&self, spec: &LossSpec, of_a_logit: usize) -> Result<(), RecipeError> {
        let of_a_token = spec.ids_per_token.saturating_mul(OF_AN_ID).saturating_add(OF_A_TOKEN);
        let [batch, tokens, vocab] = self.shape;
        let elements = (Shape { batch, tokens, vocab }).elements().filter(|n| *n > 0);
        let elements = elements.ok_or(RecipeError::Shape { given: self.shape })?;
        let of_tokens = (batch * tokens).saturating_mul(of_a_token);
        let bytes = elements.saturating_mul(of_a_logit).saturating_add(of_tokens);
        // Asked for and given back untouched: a system that could never give it says so.
        let refused = Vec::<u8>::new().try_reserve_exact(bytes).is_err();
        if refused { Err(RecipeError::Memory { given: self.shape, bytes }) } else { Ok(()) }
    }

    /// Makes the problem, with the arrays that the spec reads. Masks are ragged, with at least one token; a tenth of the
    /// advantages are 0; the sampler's log-probabilities are `old_logp` with noise of the same scale, at most 1, and a
    /// twentieth NaN where the spec allows that; given weights lie around 1, and a tenth of a trainer's are 0; given temperatures
    /// lie between 0.4 and 2, one a sequence or one a token; every value fits f32 exactly.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn problem(&self, spec: &LossSpec) -> Result<Problem, RecipeError> {
        let mut problem = self.draw(spec, Tokens::Ragged)?;
        if self.masked_garbage {
            put_garbage_under_the_mask(spec, &mut problem);
        }
        Ok(problem)
    }

    /// The same draws, but every token counts: a problem to be timed, since masked rows cost nothing to read.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn unmasked_problem(&self, spec: &LossSpec) -> Result<Problem, RecipeError> {
        self.draw(spec, Tokens::All)
    }

    fn draw(&self, spec: &LossSpec, tokens_that_count: Tokens) -> Result<Problem, RecipeError> {
        self.check(spec)?;
        let [batch, tokens, vocab] = self.shape;
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut sampled = Array2::from_shape_fn((batch, tokens), |_| draw_id(self.regime, &mut rng, vocab));
        if !spec.support.keep_sampled {
            sampled.mapv_inplace(|id| within_support(spec, vocab, id));
        }
        let mut logits = FloatArray::zeros((batch, tokens, vocab), self.dtype);
        let mut row = vec![0.0; vocab];
        for ((b, t), &id) in sampled.indexed_iter() {
            row.fill(0.0);
            draw_row(self.regime, &mut rng, &mut row, id);
            logits.set_row(b, t, &row);
        }
        self.around(spec, tokens_that_count, rng, logits, &sampled)
    }

    /// The problem around logits and the tokens that were sampled, from the draws that are left of `rng`.
    fn around(
        &self,
        spec: &LossSpec,
        tokens_that_count: Tokens,
        mut rng: ChaCha8Rng,
        logits: FloatArray<Ix3>,
        sampled: &Array2<usize>,
    ) -> Result<Problem, RecipeError> {
        let [batch, tokens, vocab] = self.shape;
        let mut mask = ragged_mask(self.regime, &mut rng, batch, tokens);
        if tokens_that_count == Tokens::All {
            mask.fill(true);
        }
        let mut advantage = || if rng.random_bool(0.1) { 0.0 } else { f32_value(rng.sample(StandardNormal)) };
        let advantages = match spec.advantages {
            AdvantageLevel::Token if spec.is_from_cotangents() => {
                Advantages::Dlogp(Array2::from_shape_fn((batch, tokens), |_| advantage()))
            }
            AdvantageLevel::Sequence => Advantages::Sequence(Array1::from_shape_fn(batch, |_| advantage())),
            AdvantageLevel::Token => Advantages::Token(Array2::from_shape_fn((batch, tokens), |_| advantage())),
        };
        let mut problem = Problem {
            logits,
            ids: sampled.mapv(|id| i64::try_from(id).expect("at most 2³¹")),
            mask,
            advantages,
            old_logp: None,
            ref_logp: None,
            extra: Extra::default(),
        };
        // Draws of their own: what a spec reads beside does not change the rest of its problem.
        let mut others = ChaCha8Rng::seed_from_u64(self.seed);
        others.set_stream(1);
        let mut normal = |scale: f64| f32_value(scale * others.sample::<f64, _>(StandardNormal));
        problem.extra.bias = spec.logits.bias.then(|| Array1::from_shape_simple_fn(vocab, || normal(1.0)));
        problem.extra.dentropy = spec.dentropy.then(|| Array2::from_shape_simple_fn((batch, tokens), || normal(0.3)));
        problem.extra.temperature = (spec.temperature == Temperature::Given).then(|| {
            let columns = if self.seed.is_multiple_of(2) { 1 } else { tokens };
            Array2::from_shape_simple_fn((batch, columns), || f32_value(normal(0.4).exp().clamp(0.4, 2.0)))
        });

        // The policy's own log-probabilities, which need nothing but its softmax.
        let policy = LossSpec {
            objective: Objective::None,
            old_logp: OldLogp::Current,
            kl: None,
            rollout: None,
            rejection: Vec::new(),
            token_weights: None,
            off_policy_mask: None,
            top_entropy: None,
            dentropy: false,
            ids_per_token: 1,
            reduction: Reduction::TokenMean,
            ..spec.clone()
        };
        let reference = reference::evaluate(&policy, &problem)?;
        let logp = |b, t| reference.token(b, t).map_or(0.0, |token| token.inputs.logp);
        let mut noisy = || {
            Array2::from_shape_fn((batch, tokens), |(b, t)| {
                let noise: f64 = rng.sample(StandardNormal);
                // Who sampled the token had a number for it.
                let logp = Some(logp(b, t)).filter(|logp| logp.is_finite()).unwrap_or(UNLIKELY);
                f32_value(logp + self.old_logp_noise_scale * noise)
            })
        };
        let (old_logp, ref_logp) = (noisy(), noisy());
        self.draw_sampler(spec, &old_logp, &mut problem.extra, &mut normal);
        (problem.old_logp, problem.ref_logp) = (Some(old_logp), Some(ref_logp));
        problem.extra.others = (spec.ids_per_token > 1).then(|| self.draw_others(spec, &problem));
        Ok(problem)
    }

    /// The ids of each token beside its first, and their cotangents: its largest logits, in order; in an eighth of the places any
    /// id, and in a quarter, half of the second places, the token's first once more. Ids are in the support, and have a
    /// logp wherever the regime has one for the first.
    fn draw_others(&self, spec: &LossSpec, problem: &Problem) -> OtherIds {
        let [batch, tokens, vocab] = self.shape;
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(2);
        let mut ids = Array3::zeros((batch, tokens, spec.ids_per_token - 1));
        for ((b, t), &first) in problem.ids.indexed_iter() {
            let row = problem.logits.row(b, t);
            let mut columns: Vec<usize> = (0..vocab)
                .filter(|&v| within_support(spec, vocab, v) == v)
                .filter(|&v| row[v].is_finite() || self.regime == Regime::TargetHoles)
                .collect();
            let raised = if spec.logits.scale < 0.0 { -1.0 } else { 1.0 };
            columns.sort_by(|&v, &w| (raised * row[w]).total_cmp(&(raised * row[v])));
            for k in 0..spec.ids_per_token - 1 {
                let again = rng.random_bool(if k == 0 { 0.5 } else { 0.25 }) || columns.is_empty();
                let any = rng.random_bool(0.125);
                let drawn = if any { rng.random_range(0..columns.len().max(1)) } else { k };
                let column = |at: usize| i64::try_from(columns[at % columns.len()]).expect("at most 2³¹");
                ids[[b, t, k]] = if again { first } else { column(drawn) };
            }
        }
        let dlogp = Array3::from_shape_simple_fn(ids.dim(), || f32_value(rng.sample(StandardNormal)));
        OtherIds { ids, dlogp }
    }

    /// What the sampler says, and which tokens are selected, where the spec reads it.
    fn draw_sampler(
        &self,
        spec: &LossSpec,
        old_logp: &Array2<f64>,
        extra: &mut Extra,
        normal: &mut impl FnMut(f64) -> f64,
    ) {
        let [batch, tokens, _] = self.shape;
        if reads_rollout_logp(spec) {
            let scale = self.old_logp_noise_scale.min(1.0);
            extra.rollout_logp = Some(old_logp.mapv(|logp| {
                let (noise, scored) = (normal(scale), normal(1.0) < 1.6 || spec.old_logp == OldLogp::Rollout);
                if scored { f32_value(logp + noise) } else { f64::NAN }
            }));
        }
        if let Some(rollout) = spec.rollout.as_ref().filter(|rollout| rollout.source == RolloutSource::Given) {
            let of_sequence = rollout.level == RolloutLevel::Token && self.seed.is_multiple_of(3);
            let columns = if of_sequence { 1 } else { tokens };
            let weights = Array2::from_shape_simple_fn((batch, columns), || f32_value(normal(0.3).exp()));
            extra.rollout_weights = Some(weights);
        }
        if spec.token_weights.is_some() {
            let columns = if self.seed % 3 == 1 { 1 } else { tokens };
            extra.token_weights = Some(Array2::from_shape_simple_fn((batch, columns), || {
                let left_out = normal(1.0) > 1.2;
                let weight = f32_value(normal(0.3).exp());
                if left_out { 0.0 } else { weight }
            }));
        }
        if spec.reads_selected() {
            extra.selected = Some(Array2::from_shape_simple_fn((batch, tokens), || normal(1.0) > 0.5));
        }
    }
}

/// A recipe for a [`HeadProblem`]: hidden states and a head whose product has the regime's logits, near enough.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRecipe {
    /// `H`.
    pub hidden: usize,
    /// How the head lies.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype.
    pub rounds_logits: bool,
    /// Extents, dtype of hidden states and head, regime and tokens. Not one with [holes](Regime::has_holes): a product is no −∞.
    pub recipe: Recipe,
}

impl HeadRecipe {
    /// `(B, T, H, V)`.
    pub fn shape(&self) -> HeadShape {
        let [batch, tokens, vocab] = self.recipe.shape;
        HeadShape { batch, tokens, hidden: self.hidden, vocab }
    }

    /// Checks the recipe and the spec that it would be made for.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn check(&self, spec: &LossSpec) -> Result<(), RecipeError> {
        let Self { hidden: width, ref recipe, .. } = *self;
        recipe.check(spec)?;
        // Logits are made twice in f64.
        recipe.expect_memory(spec, 2 * size_of::<f64>())?;
        let [batch, tokens, vocab] = recipe.shape;
        let too_large = |n: usize| n.checked_mul(width).is_none_or(|n| n == 0 || n > 1 << 31);
        if too_large(batch * tokens) || too_large(vocab) {
            return Err(RecipeError::Hidden { given: width });
        }
        if recipe.regime.has_holes() {
            return Err(RecipeError::Regime { given: recipe.regime });
        }
        Ok(())
    }

    /// Makes the problem, as [`Recipe::problem`] does; under the mask NaN stands in hidden states.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn problem(&self, spec: &LossSpec) -> Result<HeadProblem, RecipeError> {
        self.draw(spec, Tokens::Ragged)
    }

    /// The same draws, but every token counts.
    ///
    /// # Errors
    /// As [`HeadRecipe::problem`].
    pub fn unmasked_problem(&self, spec: &LossSpec) -> Result<HeadProblem, RecipeError> {
        self.draw(spec, Tokens::All)
    }

    fn draw(&self, spec: &LossSpec, tokens_that_count: Tokens) -> Result<HeadProblem, RecipeError> {
        let Self { hidden: width, layout, rounds_logits, ref recipe } = *self;
        self.check(spec)?;
        let [batch, tokens, vocab] = recipe.shape;
        let mut rng = ChaCha8Rng::seed_from_u64(recipe.seed);
        let mut sampled = Array2::from_shape_fn((batch, tokens), |_| draw_id(recipe.regime, &mut rng, vocab));
        if !spec.support.keep_sampled {
            sampled.mapv_inplace(|id| within_support(spec, vocab, id));
        }
        let (mut hidden, mut columns) = draw_factors(recipe.regime, &mut rng, [batch * tokens, width, vocab], &sampled);
        for factor in [&mut hidden, &mut columns] {
            factor.mapv_inplace(|x| recipe.dtype.round(x));
        }
        let logits = hidden.dot(&columns.t()).as_standard_layout().into_owned();
        let logits = logits.into_shape_with_order((batch, tokens, vocab)).expect("dense");
        let mut problem = recipe.around(spec, tokens_that_count, rng, FloatArray::F64(logits), &sampled)?;

        let lm_head = match layout {
            HeadLayout::HiddenByVocab => columns.reversed_axes().as_standard_layout().into_owned(),
            HeadLayout::VocabByHidden => columns,
        };
        let hidden = hidden.into_shape_with_order((batch, tokens, width)).expect("dense");
        let mut hidden = FloatArray::rounded_from(&hidden, recipe.dtype);
        if recipe.masked_garbage {
            put_garbage_under_the_mask(spec, &mut problem);
            for ((b, t), _) in problem.mask.indexed_iter().filter(|(_, counts)| !**counts) {
                hidden.fill_row(b, t, f64::NAN);
            }
        }
        let lm_head = FloatArray::rounded_from(&lm_head, recipe.dtype);
        Ok(problem.with_logits(Projection { hidden, lm_head, layout, rounds_logits }))
    }
}

/// Hidden states `[N,H]` and columns of a head `[V,H]` whose products are logits of `regime`.
fn draw_factors(
    regime: Regime,
    rng: &mut ChaCha8Rng,
    [n, width, vocab]: [usize; 3],
    sampled: &Array2<usize>,
) -> (Array2<f64>, Array2<f64>) {
    if regime == Regime::Ties {
        // Each logit is one weight.
        let hidden = Array2::from_shape_fn((n, width), |(i, h)| f64::from(u8::from(h == i % width)));
        return (hidden, Array2::from_shape_simple_fn((vocab, width), || f64::from(rng.random_range(-1..=1))));
    }
    let deviation = match regime {
        Regime::Small => 0.05,
        Regime::Peaked => 8.0,
        Regime::Sampled => 2.4,
        Regime::LongTail => 0.7,
        _ => 1.0,
    };
    let mut normal = |deviation: f64| deviation * rng.sample::<f64, _>(StandardNormal);
    let mut hidden = Array2::from_shape_simple_fn((n, width), || normal(1.0));
    let each = deviation / f64::sqrt(width as f64);
    let mut columns = Array2::from_shape_simple_fn((vocab, width), || normal(each));
    // The first hidden unit shifts all logits of a row alike.
    let shift = match regime {
        Regime::ShiftedUp => 1e4,
        Regime::ShiftedDown => -1e4,
        Regime::Negative => -120.0,
        _ => 0.0,
    };
    if shift != 0.0 {
        hidden.column_mut(0).fill(f64::sqrt(f64::abs(shift)));
        columns.column_mut(0).fill(f64::signum(shift) * f64::sqrt(f64::abs(shift)));
    }
    if regime == Regime::Confident {
        for (mut row, &id) in hidden.rows_mut().into_iter().zip(sampled) {
            let column = columns.row(id);
            let length2 = column.dot(&column);
            row.scaled_add(rng.random_range(30.0..60.0) / length2.max(0.1), &column);
        }
    }
    if regime == Regime::Sampled {
        for (mut row, &id) in hidden.rows_mut().into_iter().zip(sampled) {
            let logits = columns.dot(&row);
            let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let others =
                logits.iter().enumerate().filter(|(v, _)| *v != id).map(|(_, x)| (x - most).exp()).sum::<f64>();
            // The odds of the target, from 1e-3 to 1e6.
            let odds = rng.random_range(f64::ln(1e-3)..f64::ln(1e6));
            let column = columns.row(id);
            let length2 = column.dot(&column);
            let lacking = if others > 0.0 { most + others.ln() + odds - logits[id] } else { 0.0 };
            row.scaled_add(lacking / length2.max(0.1), &column);
        }
    }
    (hidden, columns)
}

fn reads_rollout_logp(spec: &LossSpec) -> bool {
    spec.old_logp == OldLogp::Rollout
        || spec.compares_with_sampler()
        || spec.weighs_kl_by_rollout()
        || spec.off_policy_mask.is_some_and(|mask| mask.behaviour == OldLogp::Rollout)
}

/// The first id from `id` on that the support has; `id` where it has none.
fn within_support(spec: &LossSpec, vocab: usize, id: usize) -> usize {
    let columns = spec.support.vocab.unwrap_or(vocab).min(vocab);
    let inside = (id..id + columns).map(|id| id % columns).find(|id| !spec.support.excluded_ids.contains(id));
    inside.unwrap_or(id)
}

/// Which tokens of a problem count.
#[derive(PartialEq, Eq)]
enum Tokens {
    Ragged,
    All,
}

/// Columns of a row above its bulk.
const HEAVY: usize = 32;

/// An id: any, or in half of the draws of a regime that is designed one at an edge of the vocabulary or of a tile.
fn draw_id(regime: Regime, rng: &mut ChaCha8Rng, vocab: usize) -> usize {
    let any = rng.random_range(0..vocab);
    if !regime.is_designed() || rng.random_bool(0.5) {
        return any;
    }
    let tile = 1 << rng.random_range(7..=12);
    let at = match rng.random_range(0..5) {
        0 => 0,
        1 => vocab - 1,
        // The first column of a tile, the last, and the first of the one that the vocabulary does not fill.
        2 => any / tile * tile,
        3 => any / tile * tile + tile - 1,
        _ => (vocab - 1) / tile * tile,
    };
    at.min(vocab - 1)
}

/// A column of a probability from 1e-3 to 1 − 1e-6, drawn from the softmax of `row`; the first with any where there is none such.
fn draw_column(rng: &mut ChaCha8Rng, row: &[f64]) -> usize {
    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
    let probability = |x: &f64| {
        let p = (x - most).exp() / sum;
        if (1e-3..1.0 - 1e-6).contains(&p) { p } else { 0.0 }
    };
    let mut left = rng.random_range(0.0..1.0) * row.iter().map(probability).sum::<f64>();
    let drawn = row.iter().position(|x| {
        left -= probability(x);
        left <= 0.0 && probability(x) > 0.0
    });
    drawn.or_else(|| row.iter().position(|x| probability(x) > 0.0)).unwrap_or(0)
}

fn f32_value(x: f64) -> f64 {
    f64::from(x as f32)
}

fn draw_row(regime: Regime, rng: &mut ChaCha8Rng, row: &mut [f64], id: usize) {
    let normal = |mean, deviation| Normal::new(mean, deviation).expect("finite and positive");
    let mut fill = |distribution: &dyn Fn(&mut ChaCha8Rng) -> f64| row.iter_mut().for_each(|x| *x = distribution(rng));
    match regime {
        Regime::Small => {
            let uniform = Uniform::new(-0.1, 0.1).expect("a non-empty range");
            fill(&|rng| uniform.sample(rng));
        }
        Regime::Normal | Regime::Confident => fill(&|rng| normal(0.0, 1.0).sample(rng)),
        Regime::Peaked => fill(&|rng| normal(0.0, 8.0).sample(rng)),
        Regime::ShiftedUp => fill(&|rng| normal(1e4, 1.0).sample(rng)),
        Regime::ShiftedDown => fill(&|rng| normal(-1e4, 1.0).sample(rng)),
        Regime::Negative => fill(&|rng| normal(-120.0, 1.0).sample(rng)),
        Regime::Holes | Regime::TargetHoles => {
            fill(&|rng| if rng.random_bool(0.25) { f64::NEG_INFINITY } else { normal(0.0, 2.0).sample(rng) });
        }
        Regime::Ties => fill(&|rng| f64::from(rng.random_range(-1..=1))),
        Regime::Sampled => fill(&|rng| normal(-5.0, 2.4).sample(rng)),
        Regime::LongTail => fill(&|rng| normal(0.0, 0.7).sample(rng)),
    }
    match regime {
        Regime::Sampled => {
            // Of a recorded model the gap of the k-th column is about 2.7 ln k; a row may be flatter or steeper.
            let (peak, steepness) = (normal(15.0, 2.0).sample(rng), rng.random_range(1.0..6.0));
            for rank in 1..=row.len().min(HEAVY) {
                let gap: f64 = steepness * f64::from(u32::try_from(rank).expect("few")).ln();
                row[rng.random_range(0..row.len())] = peak - gap * rng.random_range(0.8..1.2);
            }
            let drawn = draw_column(rng, row);
            row.swap(drawn, id);
        }
        Regime::LongTail => {
            let peak = (row.len() as f64).ln() + rng.random_range(-1.5..0.5);
            row[0] = peak;
            if rng.random_bool(0.3) {
                row[id] = peak - rng.random_range(0.0..2.0);
            }
        }
        Regime::Confident => {
            let peak = if rng.random_bool(0.8) { id } else { rng.random_range(0..row.len()) };
            row[peak] += rng.random_range(30.0..60.0);
        }
        Regime::Holes | Regime::TargetHoles => {
            let leading = if row[0] == f64::NEG_INFINITY { row.len() / 2 } else { 0 };
            row[..leading].fill(f64::NEG_INFINITY);
            row[id] = normal(0.0, 2.0).sample(rng);
            let softmax_without_it = row.iter().enumerate().any(|(j, x)| j != id && x.is_finite());
            if regime == Regime::TargetHoles && softmax_without_it && rng.random_bool(0.5) {
                row[id] = f64::NEG_INFINITY;
            }
        }
        _ => {}
    }
}

/// Completions end at random lengths, some rows are empty, and a few tokens inside are left out, as tool calls are. In a regime that
/// is designed every other row is padded on the left, and no row but the last of several is empty.
fn ragged_mask(regime: Regime, rng: &mut ChaCha8Rng, batch: usize, tokens: usize) -> Array2<bool> {
    let mut mask = Array2::from_elem((batch, tokens), false);
    if regime.is_designed() {
        for (b, mut row) in mask.rows_mut().into_iter().enumerate() {
            if b > 1 && b == batch - 1 {
                continue;
            }
            let length = rng.random_range(tokens.div_ceil(2)..=tokens);
            let start = if b % 2 == 1 { tokens - length } else { 0 };
            let counts = |t: usize| t == start || !rng.random_bool(0.1);
            let drawn: Vec<bool> = (start..start + length).map(counts).collect();
            row.iter_mut().skip(start).zip(drawn).for_each(|(counts, drawn)| *counts = drawn);
        }
        return mask;
    }
    for mut row in mask.rows_mut() {
        let length = rng.random_range(0..=tokens);
        row.iter_mut().take(length).for_each(|counts| *counts = !rng.random_bool(0.1));
    }
    mask[[rng.random_range(0..batch), 0]] = true;
    mask
}

fn put_garbage_under_the_mask(spec: &LossSpec, problem: &mut Problem) {
    let mask = &problem.mask;
    Zip::from(&mut problem.ids).and(mask).for_each(|id, &counts| {
        if !counts {
            *id = -100;
        }
    });
    let garbage = |array: &mut Array2<f64>| {
        Zip::from(array).and(mask).for_each(|x, &counts| {
            if !counts {
                *x = f64::NAN;
            }
        });
    };
    let Extra { rollout_logp, rollout_weights, token_weights, dentropy, temperature, .. } = &mut problem.extra;
    for array in [&mut problem.old_logp, &mut problem.ref_logp, rollout_logp, dentropy].into_iter().flatten() {
        garbage(array);
    }
    // One spec has a use for weights of masked tokens.
    let read = matches!(&spec.objective, Objective::Vespo(Vespo { weights_of_masked_tokens: true, .. }));
    if let Some(weights) = rollout_weights.as_mut().filter(|weights| !read && weights.dim() == mask.dim()) {
        garbage(weights);
    }
    for array in [token_weights, temperature].into_iter().flatten().filter(|array| array.dim() == mask.dim()) {
        garbage(array);
    }
    if let Advantages::Token(advantages) | Advantages::Dlogp(advantages) = &mut problem.advantages {
        garbage(advantages);
    }
    if let Some(OtherIds { ids, dlogp }) = &mut problem.extra.others {
        for ((b, t, k), dlogp) in dlogp.indexed_iter_mut().filter(|((b, t, _), _)| !mask[[*b, *t]]) {
            (ids[[b, t, k]], *dlogp) = (-100, f64::NAN);
        }
    }
    for ((b, t), &counts) in mask.indexed_iter() {
        if !counts {
            problem.logits.fill_row(b, t, f64::NAN);
        }
    }
}
