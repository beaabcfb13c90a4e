//! [`HeadRecipe`]: a recipe for a problem whose logits are the product of hidden states and an LM head.

use ndarray::{Array2, Ix3};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use super::regime::{Regime, far_column};
use super::tokens::{CountedTokens, draw_id, put_garbage_under_the_mask, within_support};
use super::{Recipe, RecipeError};
use assay_core::problem::{Dtype, FloatArray, HeadLayout, HeadProblem, HeadShape, Projection, Teacher};
use assay_core::spec::LossSpec;

/// A recipe for a [`HeadProblem`]: hidden states and a head whose product has approximately the regime's logits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRecipe {
    /// The hidden width `H`.
    pub hidden: usize,
    /// The layout of the head in memory, `[H,V]` or `[V,H]`.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype.
    pub rounds_logits: bool,
    /// Extents, dtype of hidden states and head, regime and tokens. The regime has no [holes](Regime::has_holes), as a product is finite.
    pub recipe: Recipe,
}

impl HeadRecipe {
    /// Returns the extents `(B, T, H, V)`.
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
        // Drawing needs the logits twice in f64.
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

    /// Makes the problem, as [`Recipe::problem`] does; masked garbage is NaN in the hidden states.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn problem(&self, spec: &LossSpec) -> Result<HeadProblem, RecipeError> {
        self.draw(spec, CountedTokens::Ragged)
    }

    /// Makes the same problem, but with every token counting.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn unmasked_problem(&self, spec: &LossSpec) -> Result<HeadProblem, RecipeError> {
        self.draw(spec, CountedTokens::All)
    }

    fn draw(&self, spec: &LossSpec, tokens_that_count: CountedTokens) -> Result<HeadProblem, RecipeError> {
        let Self { hidden: width, layout, rounds_logits, ref recipe } = *self;
        self.check(spec)?;
        let [batch, tokens, vocab] = recipe.shape;
        let mut rng = ChaCha8Rng::seed_from_u64(recipe.seed);
        let mut sampled = Array2::from_shape_fn((batch, tokens), |_| draw_id(recipe.regime, &mut rng, vocab));
        if !spec.support.keep_sampled {
            sampled.mapv_inplace(|id| within_support(spec, vocab, id));
        }
        // Factors are rounded before they are multiplied: logits are then those of the very numbers that a kernel is
        // given.
        let (mut hidden, mut columns) = draw_factors(recipe.regime, &mut rng, [batch * tokens, width, vocab], &sampled);
        for factor in [&mut hidden, &mut columns] {
            factor.mapv_inplace(|x| recipe.dtype.round(x));
        }
        let logits = hidden.dot(&columns.t()).as_standard_layout().into_owned();
        let logits = logits.into_shape_with_order((batch, tokens, vocab)).expect("dense");
        let mut problem = recipe.around_logits(spec, tokens_that_count, rng, FloatArray::F64(logits), &sampled)?;
        if let Some(Teacher::Logits(logits)) = &mut problem.extra.teacher {
            *logits = as_exact_product(logits, recipe.dtype, rounds_logits);
        }

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

/// The logit, nats, in place of −∞, which no product has: too far below all others to have a probability.
const FAR_BELOW: f64 = -2e4;

/// Makes a teacher's logits sums of two numbers of a dtype, the second times a power of two: what a product of hidden states with two
/// numbers each and a head with two columns a token is, in any order and with no rounding. Rounded logits are the first number alone.
fn as_exact_product(logits: &FloatArray<Ix3>, dtype: Dtype, rounds_logits: bool) -> FloatArray<Ix3> {
    // The ratio of a rounding error to the number that was rounded.
    let scale = match dtype {
        Dtype::Bf16 => 1.0 / 256.0,
        Dtype::F16 => 1.0 / 2048.0,
        Dtype::F32 | Dtype::F64 => 1.0,
    };
    let sum = |x: f64| {
        let x = if x == f64::NEG_INFINITY { FAR_BELOW } else { x };
        let high = dtype.round(x);
        let has_low = !rounds_logits && high.is_finite();
        high + if has_low { dtype.round((x - high) / scale) * scale } else { 0.0 }
    };
    FloatArray::rounded_from(&logits.to_f64().mapv_into(sum), Dtype::F32)
}

/// Draws hidden states `[N,H]` and columns of a head `[V,H]` whose products are logits of `regime`.
fn draw_factors(
    regime: Regime,
    rng: &mut ChaCha8Rng,
    [n, width, vocab]: [usize; 3],
    sampled: &Array2<usize>,
) -> (Array2<f64>, Array2<f64>) {
    if regime == Regime::Ties {
        // Each hidden state is a unit vector, so that each logit is one weight.
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
    // The first hidden unit shifts all logits of a token alike.
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
    // A hidden state moves towards the column of its id, which raises that logit above the rest.
    if regime == Regime::Confident {
        for (mut row, &id) in hidden.rows_mut().into_iter().zip(sampled) {
            let column = columns.row(id);
            let length2 = column.dot(&column);
            row.scaled_add(rng.random_range(30.0..60.0) / length2.max(0.1), &column);
        }
    }
    if regime == Regime::FarColumn {
        for (mut row, &id) in hidden.rows_mut().into_iter().zip(sampled) {
            let column = columns.row(far_column(rng, id, vocab));
            let length2 = column.dot(&column);
            row.scaled_add(rng.random_range(90.0..1000.0) / length2.max(0.1), &column);
        }
    }
    if regime == Regime::Sampled {
        for (mut row, &id) in hidden.rows_mut().into_iter().zip(sampled) {
            let logits = columns.dot(&row);
            let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let others =
                logits.iter().enumerate().filter(|(v, _)| *v != id).map(|(_, x)| (x - most).exp()).sum::<f64>();
            // The logarithm of the target's odds is uniform from 1e-3 to 1e6.
            let odds = rng.random_range(f64::ln(1e-3)..f64::ln(1e6));
            let column = columns.row(id);
            let length2 = column.dot(&column);
            let lacking = if others > 0.0 { most + others.ln() + odds - logits[id] } else { 0.0 };
            row.scaled_add(lacking / length2.max(0.1), &column);
        }
    }
    (hidden, columns)
}
