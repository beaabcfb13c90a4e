//! What the problems on which a kernel failed have in common, and those that it passed do not.

use std::rc::Rc;

use assay_core::problem::Dtype;
use assay_judge::generate::Recipe;

use crate::deck::{DealtHead, DealtRecipe, DeckContent};

/// Problems that must have failed, and passed, before they are compared.
const FEW: usize = 3;

/// The share of campaigns in which some property that explains nothing may be told.
const BY_CHANCE: f64 = 0.01;

/// A property of a problem, in words.
type Property = (String, Box<dyn Fn(&DealtRecipe) -> bool>);

/// A property of all failing problems, which few passing ones have.
#[derive(Clone)]
pub(crate) struct CommonProperty {
    /// The property in words: `V mod 8192 = 0`.
    pub(crate) words: String,
    /// The number of passing problems that have it, such as those without a gradient.
    pub(crate) passing: usize,
    holds: Rc<dyn Fn(&DealtRecipe) -> bool>,
}

impl CommonProperty {
    /// Returns the property that all failing problems have and the fewest passing ones, the plainest of several; `None` if many
    /// passing ones have each, or there are too few problems to tell.
    pub(crate) fn find(failing: &[&DealtRecipe], passing: &[&DealtRecipe]) -> Option<Self> {
        if failing.len() < FEW || passing.len() < FEW {
            return None;
        }
        let all = properties();
        let tried = all.len() as f64;
        let shared = all.into_iter().filter(|(_, holds)| failing.iter().all(|dealt| holds(dealt)));
        let counted = shared.map(|(words, holds)| {
            let passing = passing.iter().filter(|dealt| holds(dealt)).count();
            Self { words, passing, holds: holds.into() }
        });
        // A property that all passing problems have too explains nothing. Many have a few of the passing ones; those that have more may
        // be told if all failing problems have it by chance, for any of the properties that are tried, in few campaigns.
        let tells = |property: &Self| {
            let by_chance = tried * chance(failing.len(), property.passing, passing.len());
            let is_rare = 4 * property.passing <= passing.len() && by_chance < BY_CHANCE;
            (3 * property.passing <= failing.len() || is_rare) && property.passing < passing.len()
        };
        counted.min_by_key(|property| property.passing).filter(tells)
    }

    /// Whether the property holds for each of some problems.
    pub(crate) fn holds_for(
        &self,
        mut problems: impl Iterator<Item = impl std::ops::Deref<Target = DealtRecipe>>,
    ) -> bool {
        problems.all(|dealt| (self.holds)(&dealt))
    }
}

/// Returns the probability that `failing` problems have a property that `with` others of `passing` have, if they are any of all.
fn chance(failing: usize, with: usize, passing: usize) -> f64 {
    // The first is one of those with it, the second one of those that are left, and so on.
    (0..failing).map(|taken| (failing + with - taken) as f64 / (failing + passing - taken) as f64).product()
}

/// The properties that are tried, of several that fit alike the first. Of bounds between two sizes that a deck deals, that is the largest:
/// no problem below it was seen to fail.
fn properties() -> Vec<Property> {
    let mut all: Vec<Property> = Vec::new();
    let mut add = |words: String, holds: Box<dyn Fn(&DealtRecipe) -> bool>| all.push((words, holds));
    for dtype in Dtype::KERNEL {
        add(format!("{dtype} only"), Box::new(move |dealt| dealt.recipe.dtype == dtype));
    }
    for content in DeckContent::ALL {
        if let Some(words) = content.words() {
            add(words.into(), Box::new(move |dealt| dealt.content == content));
        }
    }
    for regime in assay_judge::generate::Regime::ALL {
        add(format!("regime {regime}"), Box::new(move |dealt| dealt.recipe.regime == regime));
    }
    add("B > 1".into(), Box::new(|dealt| batch(dealt) > 1));
    add("T > 1".into(), Box::new(|dealt| tokens(dealt) > 1));
    for tile in [1_024, 512, 256, 128, 64, 32, 16, 8] {
        add(format!("B > {tile}"), Box::new(move |dealt| batch(dealt) > tile));
        add(format!("H > {tile}"), Box::new(move |dealt| hidden(dealt) > tile));
    }
    for tile in [8, 16, 32, 64, 128, 256] {
        add(
            format!("T > {tile} and T mod {tile} ≠ 0"),
            Box::new(move |dealt| tokens(dealt) > tile && !tokens(dealt).is_multiple_of(tile)),
        );
        add(format!("T mod {tile} ≠ 0"), Box::new(move |dealt| !tokens(dealt).is_multiple_of(tile)));
        add(format!("T mod {tile} = 0"), Box::new(move |dealt| tokens(dealt).is_multiple_of(tile)));
        add(format!("T > {tile}"), Box::new(move |dealt| tokens(dealt) > tile));
        add(format!("H mod {tile} ≠ 0"), Box::new(move |dealt| !hidden(dealt).is_multiple_of(tile)));
    }
    for tile in (3..18).map(|power| 1_usize << power) {
        add(format!("V mod {tile} = 0"), Box::new(move |dealt| vocab(dealt).is_multiple_of(tile)));
        add(
            format!("V > {tile} and V mod {tile} = 0"),
            Box::new(move |dealt| vocab(dealt) > tile && vocab(dealt).is_multiple_of(tile)),
        );
        add(format!("V mod {tile} = 1"), Box::new(move |dealt| vocab(dealt) > tile && vocab(dealt) % tile == 1));
        add(format!("V mod {tile} ≠ 0"), Box::new(move |dealt| !vocab(dealt).is_multiple_of(tile)));
        add(format!("V > {tile}"), Box::new(move |dealt| vocab(dealt) > tile));
        add(
            format!("V > {tile} and V mod {tile} ≠ 0"),
            Box::new(move |dealt| vocab(dealt) > tile && !vocab(dealt).is_multiple_of(tile)),
        );
        for dtype in Dtype::KERNEL {
            add(
                format!("{dtype} and V > {tile}"),
                Box::new(move |dealt| dealt.recipe.dtype == dtype && vocab(dealt) > tile),
            );
        }
    }
    for width in [1_024, 512, 256, 128, 64, 32, 16] {
        for tile in (10..18).map(|power| 1_usize << power) {
            add(
                format!("H > {width} and V > {tile}"),
                Box::new(move |dealt| hidden(dealt) > width && vocab(dealt) > tile),
            );
        }
    }
    for rows in [65_535, 1_024, 256, 132, 128, 64, 32] {
        add(format!("B·T > {rows}"), Box::new(move |dealt| batch(dealt) * tokens(dealt) > rows));
        add(
            format!("B·T > {rows} and V > 1024"),
            Box::new(move |dealt| batch(dealt) * tokens(dealt) > rows && vocab(dealt) > 1_024),
        );
    }
    all
}

fn batch(dealt: &DealtRecipe) -> usize {
    dealt.recipe.shape[0]
}

fn tokens(dealt: &DealtRecipe) -> usize {
    dealt.recipe.shape[1]
}

fn vocab(DealtRecipe { recipe: Recipe { shape: [_, _, vocab], .. }, .. }: &DealtRecipe) -> usize {
    *vocab
}

fn hidden(dealt: &DealtRecipe) -> usize {
    dealt.head.map_or(0, |DealtHead { hidden, .. }| hidden)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deck::{Deck, DeckHead};

    /// Returns the property that is found where those problems of a deck fail that `fails` selects.
    fn found(deck: &Deck, fails: impl Fn(&DealtRecipe) -> bool) -> Option<String> {
        let dealt: Vec<DealtRecipe> = deck.recipes().collect();
        let (failing, passing): (Vec<&DealtRecipe>, Vec<&DealtRecipe>) = dealt.iter().partition(|dealt| fails(dealt));
        CommonProperty::find(&failing, &passing).map(|property| property.words)
    }

    #[test]
    fn common_property_is_the_size_at_which_a_kernel_breaks() {
        let deck = Deck::default();
        for tile in [4_096, 8_192, 16_384] {
            let words = found(&deck, |dealt| vocab(dealt) > tile && vocab(dealt).is_multiple_of(tile));
            assert_eq!(words, Some(format!("V > {tile} and V mod {tile} = 0")));
        }
        assert_eq!(found(&deck, |dealt| batch(dealt) > 32).as_deref(), Some("B > 32"));
        assert_eq!(found(&deck, |dealt| tokens(dealt).is_multiple_of(32)).as_deref(), Some("T mod 32 = 0"));
        let persistent = |dealt: &DealtRecipe| batch(dealt) * tokens(dealt) > 132 && vocab(dealt) > 1_024;
        assert_eq!(found(&deck, persistent).as_deref(), Some("B·T > 132 and V > 1024"));
        let of_heads = Deck { head: Some(DeckHead::default()), ..deck };
        assert_eq!(found(&of_heads, |dealt| hidden(dealt) > 512).as_deref(), Some("H > 512"));
        let wide_head = |dealt: &DealtRecipe| hidden(dealt) > 32 && vocab(dealt) > 8_192;
        assert_eq!(found(&of_heads, wide_head).as_deref(), Some("H > 32 and V > 8192"));
    }

    /// Some of the problems of that size pass, as those without a gradient in what is lost.
    #[test]
    fn common_property_of_many_failures_may_be_of_some_that_pass() {
        let wrong = |dealt: &DealtRecipe| tokens(dealt) > 8 && !tokens(dealt).is_multiple_of(8);
        let fails = |dealt: &DealtRecipe| wrong(dealt) && dealt.recipe.seed % 5 < 3;
        assert_eq!(found(&Deck::default(), fails).as_deref(), Some("T > 8 and T mod 8 ≠ 0"));
        // Of few failing problems two in five are no evidence.
        let few = |dealt: &DealtRecipe| fails(dealt) && dealt.recipe.seed % 17 < 4;
        assert_ne!(found(&Deck::default(), few).as_deref(), Some("T > 8 and T mod 8 ≠ 0"));
        // Few problems are one in twelve of a deck: that six of them fail, and no others, is no chance.
        let at_bounds = |dealt: &DealtRecipe| dealt.content == DeckContent::RatiosAtBounds && dealt.recipe.seed % 5 < 2;
        assert_eq!(found(&Deck::default(), at_bounds).as_deref(), Some("ratios at the bounds"));
    }

    #[test]
    fn common_property_by_chance_is_a_share_of_all_choices() {
        // Three of six problems have it: one choice of three in twenty is that of these.
        assert!((chance(3, 0, 3) - 1.0 / 20.0).abs() < 1e-12);
        assert!((chance(2, 1, 2) - 3.0 / 6.0).abs() < 1e-12);
    }
}
