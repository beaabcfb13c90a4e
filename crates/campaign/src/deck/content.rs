//! [`DeckContent`]: what the arrays of a problem hold, beyond what its recipe draws.

use serde::Serialize;

use assay_core::problem::{Advantages, NO_ENTRY, OtherIds, Problem, Teacher, TeacherTopK};
use assay_core::spec::{Aspo, Cispo, LossSpec, Objective, PpoClip};
use assay_judge::generate::{RecipeError, Regime};

use super::{DealtRecipe, Deck};
use crate::subject::Subject;

/// The content of a problem's arrays, each of which shows a kind of bug that the others hide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeckContent {
    /// Sequences of random lengths, advantages and ratios as the generator draws them.
    Drawn,
    /// Every token counts, the last of a block of tokens included.
    EveryTokenCounts,
    /// The tokens at both ends of the batch count, and none between them: a batch of very many tokens costs little so.
    EndsCount,
    /// Masked tokens have NaN logits, advantages, log-probabilities and weights, and the id −100 if that is asked for.
    MaskedGarbage,
    /// One late vocabulary entry 90 to 1,000 nats above all others.
    FarColumn,
    /// Ratios at the bounds of the clip, in f32, and next to them.
    RatiosAtBounds,
    /// Log-probabilities and old log-probabilities that are tens of nats apart either way, or hundreds with ratios that underflow. Ratios
    /// do not overflow f32: the slope of one that the clip holds would be 0·∞ in plain automatic differentiation.
    FarRatios,
    /// All advantages are 0, as in a group of equal rewards.
    ZeroAdvantages,
    /// No token counts, so that every mean is over nothing.
    NoTokenCounts,
}

/// Scales of the noise of old log-probabilities that are far from the new ones, nats.
const TENS: f64 = 20.0;
const HUNDREDS: f64 = 300.0;

/// The tokens at each end of a batch of [`DeckContent::EndsCount`].
const ENDS: usize = 64;

/// The contents in turn, apart from masked garbage, which a third of the problems have.
const TURNS: [DeckContent; 25] = {
    use DeckContent::{Drawn, EveryTokenCounts, FarColumn, FarRatios, NoTokenCounts, RatiosAtBounds, ZeroAdvantages};
    [
        Drawn,
        RatiosAtBounds,
        FarColumn,
        Drawn,
        RatiosAtBounds,
        ZeroAdvantages,
        EveryTokenCounts,
        FarColumn,
        EveryTokenCounts,
        Drawn,
        Drawn,
        FarRatios,
        Drawn,
        EveryTokenCounts,
        FarColumn,
        Drawn,
        EveryTokenCounts,
        RatiosAtBounds,
        Drawn,
        EveryTokenCounts,
        EveryTokenCounts,
        EveryTokenCounts,
        Drawn,
        FarRatios,
        NoTokenCounts,
    ]
};

impl DeckContent {
    /// All contents, in the order of their declaration.
    pub(crate) const ALL: [Self; 9] = [
        Self::Drawn,
        Self::EveryTokenCounts,
        Self::EndsCount,
        Self::MaskedGarbage,
        Self::FarColumn,
        Self::RatiosAtBounds,
        Self::FarRatios,
        Self::ZeroAdvantages,
        Self::NoTokenCounts,
    ];

    /// The content of problem `index`.
    pub(super) fn in_turn(index: u64) -> Self {
        // The third of the places that has it moves along, so that it meets every dtype where there are three.
        if (index + index / 12) % 3 == 2 {
            return Self::MaskedGarbage;
        }
        let turn = index - index / 3;
        TURNS[(turn % TURNS.len() as u64) as usize]
    }

    /// Returns the content in words, for labels; `None` where there is nothing to add to the recipe.
    pub fn words(self) -> Option<&'static str> {
        match self {
            Self::Drawn | Self::FarColumn => None,
            Self::EveryTokenCounts => Some("every token counts"),
            Self::EndsCount => Some("the first and the last tokens count"),
            Self::MaskedGarbage => Some("garbage under the mask"),
            Self::RatiosAtBounds => Some("ratios at the bounds"),
            Self::FarRatios => Some("far ratios"),
            Self::ZeroAdvantages => Some("advantages 0"),
            Self::NoTokenCounts => Some("no token counts"),
        }
    }

    /// Whether a problem with this content may have no token with a gradient.
    pub(crate) fn may_lack_a_gradient(self) -> bool {
        matches!(self, Self::ZeroAdvantages | Self::NoTokenCounts)
    }

    /// Changes a recipe so that it draws this content, as far as a recipe can; a content that the deck excludes becomes `Drawn`.
    pub(super) fn apply(self, dealt: &mut DealtRecipe, deck: &Deck) {
        let recipe = &mut dealt.recipe;
        match self {
            Self::MaskedGarbage if deck.masked_garbage == Some(false) => dealt.content = Self::Drawn,
            Self::MaskedGarbage => recipe.masked_garbage = true,
            // Whoever names regimes gets no other.
            Self::FarColumn if deck.regimes != Regime::FINITE => dealt.content = Self::Drawn,
            Self::FarColumn => recipe.regime = Regime::FarColumn,
            // A sampled entry that has all the mass has logp 0, so that the ratio is exact in f32.
            Self::RatiosAtBounds if deck.regimes == Regime::FINITE && recipe.seed.is_multiple_of(2) => {
                recipe.regime = Regime::Confident;
            }
            Self::FarRatios => {
                recipe.old_logp_noise_scale = if recipe.seed.is_multiple_of(2) { TENS } else { HUNDREDS }
            }
            _ => {}
        }
    }

    /// Edits the arrays of a problem that `dealt` drew.
    ///
    /// # Errors
    /// [`RecipeError`] where the reference cannot evaluate the problem.
    pub(super) fn edit<P: Subject>(
        self,
        dealt: &DealtRecipe,
        spec: &LossSpec,
        problem: &mut P,
    ) -> Result<(), RecipeError> {
        let edited = match self {
            Self::Drawn | Self::EveryTokenCounts | Self::FarColumn => return Ok(()),
            Self::FarRatios if dealt.recipe.old_logp_noise_scale < HUNDREDS => return Ok(()),
            Self::FarRatios => {
                let evaluated = problem.evaluate(spec).map_err(RecipeError::Problem)?;
                let reference = P::on_logits(&evaluated);
                problem.map_tokens(|tokens| {
                    // Mirrored at the new log-probability, no old one is below it. Under the mask, where the new one is not known, none is
                    // below 0: a plain loss multiplies the ratios of masked tokens by 0, and 0·∞ is NaN.
                    for ((b, t), old) in tokens.old_logp.iter_mut().flat_map(|array| array.indexed_iter_mut()) {
                        let logp = reference.token(b, t).map_or(0.0, |token| token.inputs.logp);
                        *old = f64::from((logp + (*old - logp).abs()) as f32);
                    }
                })
            }
            Self::MaskedGarbage if dealt.garbage_ids => return Ok(()),
            Self::MaskedGarbage => problem.map_tokens(put_ids_into_the_vocabulary),
            Self::EndsCount => problem.map_tokens(|tokens| {
                let count = tokens.mask.len();
                let is_at_an_end = |place: usize| place < ENDS || place + ENDS >= count;
                tokens.mask.iter_mut().enumerate().for_each(|(place, counts)| *counts = is_at_an_end(place));
            }),
            Self::NoTokenCounts => problem.map_tokens(|tokens| tokens.mask.fill(false)),
            Self::ZeroAdvantages => problem.map_tokens(|tokens| match &mut tokens.advantages {
                Advantages::Sequence(advantages) => advantages.fill(0.0),
                Advantages::Token(advantages) | Advantages::Dlogp(advantages) => advantages.fill(0.0),
            }),
            Self::RatiosAtBounds => {
                let (bounds, turn) = (ratio_bounds(&spec.objective), (dealt.recipe.seed % 64) as usize);
                let evaluated = problem.evaluate(spec).map_err(RecipeError::Problem)?;
                let reference = P::on_logits(&evaluated);
                problem.map_tokens(|tokens| {
                    let Some(old_logp) = &mut tokens.old_logp else { return };
                    for ((b, t), old) in old_logp.indexed_iter_mut() {
                        let Some(logp) = reference.token(b, t).map(|token| token.inputs.logp) else { continue };
                        // The bound as a kernel has it, in f32, or one of its neighbours. One bound a sequence suits ratios of sequences.
                        let bound = bounds[(b + turn) % bounds.len()] as f32;
                        let ratio = [bound, bound.next_up(), bound, bound.next_down()][t % 4];
                        *old = f64::from((f64::from(logp as f32) - f64::from(ratio).ln()) as f32);
                    }
                })
            }
        };
        *problem = edited;
        Ok(())
    }
}

/// Replaces the ids of masked tokens by the first of the vocabulary: a kernel that looks one up must not read beyond its memory.
fn put_ids_into_the_vocabulary(tokens: &mut Problem<()>) {
    let Problem { ids, mask, extra, .. } = tokens;
    for (place, id) in ids.indexed_iter_mut() {
        if !mask[place] {
            *id = 0;
        }
    }
    if let Some(OtherIds { ids, .. }) = &mut extra.others {
        for ((b, t, _), id) in ids.indexed_iter_mut() {
            if !mask[[b, t]] {
                *id = 0;
            }
        }
    }
    if let Some(kept) = &mut extra.kept_ids {
        kept.indexed_iter_mut().filter(|((b, t, _), _)| !mask[[*b, *t]]).for_each(|(_, id)| *id = NO_ENTRY);
    }
    if let Some(Teacher::TopK(TeacherTopK { ids, .. })) = &mut extra.teacher {
        ids.indexed_iter_mut().filter(|((b, t, _), _)| !mask[[*b, *t]]).for_each(|(_, id)| *id = 0);
    }
}

/// Returns the ratios at which the objective changes its formula; those of a plain clip where it has none.
fn ratio_bounds(objective: &Objective) -> Vec<f64> {
    let bounds: Vec<f64> = match objective {
        Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, delta, dual_clip }) => {
            [1.0 - epsilon_low, 1.0 + epsilon_high].into_iter().chain(*delta).chain(*dual_clip).collect()
        }
        Objective::Cispo(Cispo { lower, upper }) => lower.iter().copied().chain([*upper]).collect(),
        Objective::Aspo(Aspo { epsilon_low, epsilon_high, .. }) => vec![1.0 - epsilon_low, 1.0 + epsilon_high],
        // Every objective is named, so that a new one is asked.
        Objective::Sapo(_)
        | Objective::Vespo(_)
        | Objective::PolicyGradient
        | Objective::ImportanceSampling(_)
        | Objective::MaskedRatio(_)
        | Objective::TrustRegion(_)
        | Objective::Dro(_)
        | Objective::KlCov(_)
        | Objective::ClipCov(_)
        | Objective::Topr(_)
        | Objective::CrossEntropy(_)
        | Objective::Distillation(_)
        | Objective::None => vec![0.8, 1.2],
    };
    // The logarithm of a bound must be a number.
    let bounds: Vec<f64> = bounds.into_iter().filter(|bound| *bound > 0.0 && bound.is_finite()).collect();
    if bounds.is_empty() { vec![0.8, 1.2] } else { bounds }
}
