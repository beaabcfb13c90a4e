//! Makes problems from a seed, in the regimes where kernels go wrong.
//!
//! ```
//! use assay_core::problem::Dtype;
//! use assay_core::spec::LossSpec;
//! use assay_judge::generate::{Recipe, Regime};
//!
//! let recipe = Recipe {
//!     shape: [2, 3, 32],
//!     dtype: Dtype::Bf16,
//!     regime: Regime::Peaked,
//!     seed: 7,
//!     old_logp_noise_scale: 0.3,
//!     masked_garbage: true,
//! };
//! let problem = recipe.problem(&LossSpec::default())?;
//! assert_eq!(problem.logits.shape(), [2, 3, 32]);
//! // The same recipe and spec give the same bits.
//! assert!(problem.logits.same_bits(&recipe.problem(&LossSpec::default())?.logits));
//! # Ok::<(), assay_judge::generate::RecipeError>(())
//! ```

mod head;
mod regime;
mod teacher;
mod tokens;

use std::collections::HashSet;

use ndarray::{Array1, Array2, Array3, Ix3};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use assay_core::memory::available_host_bytes;
use assay_core::problem::{Advantages, Dtype, Extra, FloatArray, NO_ENTRY, OtherIds, Problem, ProblemError, Shape};
use assay_core::spec::{
    AdvantageLevel, LossSpec, Objective, OldLogp, Reduction, RolloutLevel, RolloutSource, Temperature,
};
use assay_core::text::ShownNumber;
use assay_reference as reference;
use regime::draw_row;
use tokens::{CountedTokens, draw_id, put_garbage_under_the_mask, ragged_mask, within_support};

pub use head::HeadRecipe;
pub use regime::Regime;
pub use teacher::TeacherRegime;
/// A recipe for a [`Problem`]: the same recipe and spec give the same problem, bit for bit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The extents `[B, T, V]`.
    pub shape: [usize; 3],
    /// The dtype of the logits.
    pub dtype: Dtype,
    /// The way in which logits are drawn.
    pub regime: Regime,
    /// The seed of every random draw.
    #[serde(default)]
    pub seed: u64,
    /// The scale in `old_logp = logp + scale · N(0,1)`, and likewise of `ref_logp`; either may exceed 0, which no kernel should mind.
    #[serde(default = "default_noise")]
    pub old_logp_noise_scale: f64,
    /// Whether masked tokens have NaN logits, advantages, log-probabilities and weights, and the id −100.
    #[serde(default)]
    pub masked_garbage: bool,
}

/// The centre of other policies' log-probabilities if the policy's own is −∞.
const UNLIKELY: f64 = -20.0;

/// The bytes of a token in addition to its logits: id, mask, advantage and log-probabilities, twice while they are drawn.
const TOKEN_BYTES: usize = 128;

/// The bytes of each of a token's ids, with its cotangent.
const ID_BYTES: usize = 32;

/// The largest number of entries in a kept set.
const KEPT: usize = 48;

/// The bytes of a vocabulary entry in the rows that are drawn and evaluated one at a time, in f64.
const ENTRY_BYTES: usize = 2 * size_of::<f64>();

/// The bytes up to which a problem is drawn without a look at the memory that there is.
const SMALL_BYTES: usize = 16 << 20;

/// Returns the noise scale that MLLM-JAX uses.
fn default_noise() -> f64 {
    0.3
}

/// The reason why a recipe makes no problem.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RecipeError {
    /// An extent is 0, or their product is too large to address.
    #[error(
        "`shape`: got {given:?}, expected [B,T,V] with every extent ≥ 1 and no more bytes than there are addresses"
    )]
    Shape {
        /// The shape of the recipe, `[B, T, V]`.
        given: [usize; 3],
    },
    /// The problem needs more memory than there is.
    #[error("`shape`: got {given:?}, which takes {bytes} bytes, expected no more than there is memory for")]
    Memory {
        /// The shape of the recipe, `[B, T, V]`.
        given: [usize; 3],
        /// The bytes that the problem takes.
        bytes: usize,
    },
    /// The hidden width is 0 or too large.
    #[error("`hidden`: got {given}, expected H ≥ 1 with at most 2³¹ hidden states and weights")]
    Hidden {
        /// The hidden width of the recipe.
        given: usize,
    },
    /// The regime has logits of −∞, which no product is.
    #[error("`regime`: got {given}, expected another: logits that are a product are not −∞")]
    Regime {
        /// The regime of the recipe.
        given: Regime,
    },
    /// The noise scale is not a finite number ≥ 0.
    #[error("`old_logp_noise_scale`: got {}, expected a finite number ≥ 0", ShownNumber(*given))]
    Noise {
        /// The noise scale of the recipe.
        given: f64,
    },
    /// The spec is out of range, or does not fit the problem.
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

    /// Checks that there may be memory for the tokens, with `logit_bytes` for each logit.
    fn expect_memory(&self, spec: &LossSpec, logit_bytes: usize) -> Result<(), RecipeError> {
        let kept_bytes = if spec.reads_kept_ids() { KEPT * size_of::<i32>() } else { 0 };
        let token_bytes = spec.ids_per_token.saturating_mul(ID_BYTES).saturating_add(TOKEN_BYTES + kept_bytes);
        let [batch, tokens, vocab] = self.shape;
        let elements = (Shape { batch, tokens, vocab }).elements().filter(|n| *n > 0);
        let elements = elements.ok_or(RecipeError::Shape { given: self.shape })?;
        let all_tokens = (batch * tokens).saturating_mul(token_bytes);
        let row = vocab.saturating_mul(ENTRY_BYTES);
        let logit_bytes = if spec.reads_teacher() { 2 * logit_bytes } else { logit_bytes };
        let bytes = elements.saturating_mul(logit_bytes).saturating_add(all_tokens).saturating_add(row);
        // An allocation that fails ends the process, and one that is more than there is may end another. Small ones are not worth a look.
        let refused = bytes > SMALL_BYTES
            && (available_host_bytes().is_some_and(|available| bytes > available)
                || Vec::<u8>::new().try_reserve_exact(bytes).is_err());
        if refused { Err(RecipeError::Memory { given: self.shape, bytes }) } else { Ok(()) }
    }

    /// Makes the problem, with the arrays that the spec reads; every value fits f32 exactly.
    ///
    /// | array | values |
    /// |---|---|
    /// | mask | ragged, with at least one token |
    /// | advantages | normal, a tenth of them 0 |
    /// | the sampler's log-probabilities | `old_logp` with noise of the same scale, at most 1; a twentieth NaN if the spec allows it |
    /// | given weights | around 1; a tenth of a trainer's weights are 0 |
    /// | given temperatures | 0.4 to 2, one per sequence or one per token |
    /// | the teacher | around the student's logits, as [`TeacherRegime`] has them; or its likeliest entries |
    /// | kept sets | the own id and up to 47 others, most of them the likeliest |
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn problem(&self, spec: &LossSpec) -> Result<Problem, RecipeError> {
        let mut problem = self.draw(spec, CountedTokens::Ragged)?;
        if self.masked_garbage {
            put_garbage_under_the_mask(spec, &mut problem);
        }
        Ok(problem)
    }

    /// Makes the same problem, but with every token counting, to be timed: masked tokens cost nothing to read.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn unmasked_problem(&self, spec: &LossSpec) -> Result<Problem, RecipeError> {
        self.draw(spec, CountedTokens::All)
    }

    fn draw(&self, spec: &LossSpec, tokens_that_count: CountedTokens) -> Result<Problem, RecipeError> {
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
        self.around_logits(spec, tokens_that_count, rng, logits, &sampled)
    }

    /// Makes the problem around its logits and sampled ids, from the next draws of `rng`.
    fn around_logits(
        &self,
        spec: &LossSpec,
        tokens_that_count: CountedTokens,
        mut rng: ChaCha8Rng,
        logits: FloatArray<Ix3>,
        sampled: &Array2<usize>,
    ) -> Result<Problem, RecipeError> {
        let [batch, tokens, vocab] = self.shape;
        let mut mask = ragged_mask(self.regime, &mut rng, batch, tokens);
        if tokens_that_count == CountedTokens::All {
            mask.fill(true);
        }
        // Advantages of 0 occur in training where all rewards of a group are equal; a kernel may skip such tokens, and
        // then loses their KL term.
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
        // A separate stream of draws: the other arrays that a spec reads do not change the rest of its problem.
        let mut others = ChaCha8Rng::seed_from_u64(self.seed);
        others.set_stream(1);
        let mut normal = |scale: f64| f32_value(scale * others.sample::<f64, _>(StandardNormal));
        problem.extra.bias = spec.logits.bias.then(|| Array1::from_shape_simple_fn(vocab, || normal(1.0)));
        problem.extra.dentropy = spec.dentropy.then(|| Array2::from_shape_simple_fn((batch, tokens), || normal(0.3)));
        problem.extra.temperature = (spec.temperature == Temperature::Given).then(|| {
            // The shape alternates with the seed, so that both layouts of temperatures are drawn for every spec.
            let columns = if self.seed.is_multiple_of(2) { 1 } else { tokens };
            Array2::from_shape_simple_fn((batch, columns), || f32_value(normal(0.4).exp().clamp(0.4, 2.0)))
        });

        problem.extra.kept_ids = spec.reads_kept_ids().then(|| self.draw_kept(spec, &problem));

        problem.extra.teacher = spec.as_distillation().map(|distillation| {
            let temperature = |b, t| problem.tokens().temperature(spec, (b, t));
            self.draw_teacher(distillation, &problem.logits, temperature)
        });

        // The policy's own log-probabilities, from the reference of a spec that needs nothing but a softmax.
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
        // Log-probabilities of other policies are around the policy's own, so that ratios are around 1 and tokens fall
        // on either side of every clip.
        let mut noisy = || {
            Array2::from_shape_fn((batch, tokens), |(b, t)| {
                let noise: f64 = rng.sample(StandardNormal);
                // The policy that sampled the token had a finite number for it.
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

    /// Draws the kept set of each token: its own id and up to [`KEPT`] others, most of them the likeliest, in any order and with places
    /// left empty. An own id outside the support, or an eighth of those inside, is left out where the spec puts it back.
    fn draw_kept(&self, spec: &LossSpec, problem: &Problem) -> Array3<i32> {
        let [batch, tokens, vocab] = self.shape;
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(3);
        // An own logit of −∞ needs another entry, or the softmax would be 0/0.
        let needed = if self.regime.has_holes() { 2 } else { 1 };
        let width = rng.random_range(needed.min(vocab)..=vocab.min(KEPT));
        let raised = if spec.logits.scale < 0.0 { -1.0 } else { 1.0 };
        let mut kept = Array3::from_elem((batch, tokens, width), NO_ENTRY);
        for ((b, t), &id) in problem.ids.indexed_iter() {
            let row: Vec<f64> = problem.logits.row(b, t).into_iter().map(|x| raised * x).collect();
            let mut likeliest: Vec<usize> = (0..vocab).collect();
            if width < vocab {
                likeliest.select_nth_unstable_by(width, |&v, &w| row[w].total_cmp(&row[v]));
                likeliest.truncate(width);
            }
            likeliest.sort_by(|&v, &w| row[w].total_cmp(&row[v]));
            let own = usize::try_from(id).expect("drawn: 0 ≤ id < V");
            let mut set = vec![own];
            set.extend((!row[own].is_finite()).then_some(likeliest[0]));
            let size = rng.random_range(1..=width);
            for &likely in likeliest.iter().take(size) {
                set.push(if rng.random_bool(0.25) { rng.random_range(0..vocab) } else { likely });
            }
            let mut seen = HashSet::new();
            set.retain(|v| seen.insert(*v));
            set.truncate(width);
            if spec.support.keep_sampled && rng.random_bool(0.125) {
                set.remove(0);
            }
            let mut places: Vec<usize> = (0..width).collect();
            places.shuffle(&mut rng);
            for (place, v) in places.into_iter().zip(set) {
                kept[[b, t, place]] = i32::try_from(v).expect("at most 2³¹");
            }
        }
        kept
    }

    /// Draws the ids of each token after its first, and their cotangents: the largest logits, in order.
    ///
    /// An eighth of the places have any id, and a quarter, or half of the second places, repeat the token's first. Ids are in the
    /// support, and have a finite logp wherever the regime has one for the first.
    fn draw_others(&self, spec: &LossSpec, problem: &Problem) -> OtherIds {
        let [batch, tokens, vocab] = self.shape;
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(2);
        let mut ids = Array3::zeros((batch, tokens, spec.ids_per_token - 1));
        for ((b, t), &first) in problem.ids.indexed_iter() {
            let row = problem.logits.row(b, t);
            let kept = problem.tokens().kept_entries(spec, (b, t));
            let mut columns: Vec<usize> = (0..vocab)
                .filter(|&v| within_support(spec, vocab, v) == v)
                .filter(|v| kept.as_ref().is_none_or(|kept| kept.contains(v)))
                .filter(|&v| row[v].is_finite() || self.regime == Regime::TargetHoles)
                .collect();
            let raised = if spec.logits.scale < 0.0 { -1.0 } else { 1.0 };
            // A negative scale turns the order of logits round, and the likeliest columns are then the lowest.
            columns.sort_by(|&v, &w| (raised * row[w]).total_cmp(&(raised * row[v])));
            for k in 0..spec.ids_per_token - 1 {
                let again = rng.random_bool(if k == 0 { 0.5 } else { 0.25 }) || columns.is_empty();
                let any = rng.random_bool(0.125);
                let drawn = if any { rng.random_range(0..columns.len().max(1)) } else { k };
                // More ids than columns wrap around.
                let column = |at: usize| i64::try_from(columns[at % columns.len()]).expect("at most 2³¹");
                ids[[b, t, k]] = if again { first } else { column(drawn) };
            }
        }
        let dlogp = Array3::from_shape_simple_fn(ids.dim(), || f32_value(rng.sample(StandardNormal)));
        OtherIds { ids, dlogp }
    }

    /// Draws the sampler's log-probabilities and weights, token weights and the selection, as far as the spec reads them.
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
            // The weights of some seeds are one per sequence, of the others one per token.
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

/// Whether the spec reads the sampler's log-probabilities.
fn reads_rollout_logp(spec: &LossSpec) -> bool {
    spec.old_logp == OldLogp::Rollout
        || spec.compares_with_sampler()
        || spec.weighs_kl_by_rollout()
        || spec.off_policy_mask.is_some_and(|mask| mask.behaviour == OldLogp::Rollout)
}

/// Rounds to f32, so that every dtype of a kernel starts from the same number.
fn f32_value(x: f64) -> f64 {
    f64::from(x as f32)
}
