//! The deck covers every feature that a kernel may depend on, whatever the seed.

use assay_campaign::{DealtRecipe, Deck, DeckContent, DeckHead, FeatureCounts};
use assay_core::problem::{Dtype, Problem};
use assay_core::spec::LossSpec;
use assay_schema::campaign::FeatureCoverage;

use crate::finds::trl;

fn table(deck: &Deck) -> Vec<FeatureCoverage> {
    let mut counts = FeatureCounts::new(deck);
    deck.recipes().for_each(|dealt| counts.add(&dealt));
    counts.table()
}

/// The default deck in several sets of dtypes, of logits, of heads, and packed.
fn default_decks() -> Vec<Deck> {
    let dtypes = [vec![Dtype::Bf16, Dtype::F32], vec![Dtype::F32], vec![Dtype::F32, Dtype::Bf16, Dtype::F16]];
    let decks = dtypes.into_iter().flat_map(|dtypes| {
        let deck = Deck { wide: Deck::usual_wide(200, dtypes.len()), dtypes, ..Deck::default() };
        let head = Some(DeckHead::default());
        [deck.clone(), Deck { packed: true, seed: 77, ..deck.clone() }, Deck { head, ..deck }]
    });
    decks.collect()
}

#[test]
fn deck_covers_each_feature_twice_in_two_regimes_and_each_dtype() {
    for deck in default_decks() {
        let missed: Vec<FeatureCoverage> = table(&deck)
            .into_iter()
            .filter(|row| {
                // One regime alone has such a column.
                let regimes = if row.feature.starts_with("a late entry") { 1 } else { 2 };
                row.problems < 2 || row.regimes < regimes || row.dtypes.len() < deck.dtypes.len()
            })
            .collect();
        assert!(missed.is_empty(), "{:?}, packed {}, head {:?}: {missed:#?}", deck.dtypes, deck.packed, deck.head);
    }
}

#[test]
fn deck_wide_problems_do_not_depend_on_cases() {
    let wide = |cases| {
        let deck = Deck { cases, ..Deck::default() };
        deck.recipes().filter(|dealt| dealt.recipe.shape[2] == 151_936).collect::<Vec<DealtRecipe>>()
    };
    assert_eq!(wide(200), wide(60));
    assert_eq!(wide(200).len(), 2);
}

/// The kernel's own ratio, in f32, from a log-probability that is the reference's to its last bit or the next.
fn ratios(problem: &Problem, spec: &LossSpec) -> Vec<f32> {
    let reference = assay_reference::evaluate(spec, problem).unwrap();
    let old_logp = problem.old_logp.as_ref().unwrap();
    let ratio =
        |((b, t), old): ((usize, usize), &f64)| Some((reference.token(b, t)?.inputs.logp as f32 - *old as f32).exp());
    old_logp.indexed_iter().filter_map(ratio).collect()
}

#[test]
fn deck_ratios_meet_both_bounds_of_the_clip_exactly() {
    let (deck, spec) = (Deck::default(), trl());
    let (mut at, mut beyond) = ([0; 2], [0; 2]);
    for dealt in deck.recipes().filter(|dealt| dealt.content == DeckContent::RatiosAtBounds) {
        for ratio in ratios(&deck.draw(&dealt, &spec).unwrap(), &spec) {
            for (i, bound) in [0.8_f32, 1.2].into_iter().enumerate() {
                at[i] += usize::from(ratio == bound);
                beyond[i] += usize::from(ratio != bound && (ratio - bound).abs() < 1e-6);
            }
        }
    }
    assert!(at.iter().all(|count| *count > 10), "{at:?} at a bound");
    assert!(beyond.iter().all(|count| *count > 5), "{beyond:?} next to a bound");
}

/// A plain loss multiplies the ratios of masked tokens by 0, and 0·∞ is NaN.
#[test]
fn deck_far_ratios_are_finite_in_f32_under_the_mask() {
    let deck = Deck { cases: 2_000, dtypes: vec![Dtype::F32], wide: 0, ..Deck::default() };
    let is_far =
        |dealt: &DealtRecipe| dealt.content == DeckContent::FarRatios && dealt.recipe.old_logp_noise_scale > 100.0;
    let small = |dealt: &DealtRecipe| dealt.recipe.shape.iter().product::<usize>() < 10_000;
    let mut masked = 0;
    for dealt in deck.recipes().filter(|dealt| is_far(dealt) && small(dealt)) {
        let problem: Problem = deck.draw(&dealt, &trl()).unwrap();
        for (at, old) in problem.old_logp.as_ref().unwrap().indexed_iter() {
            if !problem.mask[at] {
                masked += 1;
                // No log-probability is above 0.
                assert!((-*old as f32).exp().is_finite(), "{}: old_logp {old} at {at:?}", dealt.label());
            }
        }
    }
    assert!(masked > 20, "{masked} masked tokens");
}
