//! [`Deck`]: the problems of a campaign, so chosen that every [`Feature`] a kernel may depend on is covered, whatever the seed.

mod content;
mod features;
mod packing;
mod shapes;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use assay_core::problem::{Dtype, HeadLayout, HeadShape};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, RecipeError, Regime};

use crate::campaign::CampaignError;
use crate::subject::Subject;

pub use content::DeckContent;
pub use features::{Feature, FeatureCounts};
pub use shapes::{DeckShapes, FEW_SHAPES};

use packing::cu_seqlens;
use shapes::{
    DESIGNED_PACKED_SHAPES, DESIGNED_SHAPES, FEW_PACKED_SHAPES, WIDE, WIDE_PACKED, fixed_content, random_shape,
};

/// Rounds over the designed shapes, each with another dtype and another regime; after them, shapes are drawn at random.
const ROUNDS: u64 = 3;

/// The largest number of hidden states and weights of a problem with an LM head whose width the deck chooses.
const HEAD_ELEMENTS: usize = 1 << 20;

/// The widths `H` that the deck chooses from: around tiles, of small models, and of no multiple of a block.
const WIDTHS: [usize; 8] = [64, 33, 896, 128, 65, 2_048, 16, 100];

/// The width of heads over vocabularies that leave no room for another.
const NARROW: usize = 16;

/// Problems under constraints, by number: the same number is the same problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deck {
    /// The dtypes of the logits, or of hidden states and head, in turn.
    pub dtypes: Vec<Dtype>,
    /// The shapes of the problems.
    pub shapes: DeckShapes,
    /// The ways of drawing logits, in turn. Those with −∞ are left out where logits are the product of an LM head.
    pub regimes: Vec<Regime>,
    /// The number of problems.
    pub cases: u64,
    /// The number of problems at the end of the deck that have Qwen's vocabulary.
    pub wide: u64,
    /// The seed of every random draw.
    pub seed: u64,
    /// Whether the `B` sequences of a shape lie in one row of `B·T` tokens, of lengths that differ.
    #[serde(default)]
    pub packed: bool,
    /// Whether masked tokens hold garbage in a third of the problems, which then must not show; `None` deals it too, with ids inside
    /// the vocabulary, and only notes a kernel that reads it.
    #[serde(default)]
    pub masked_garbage: Option<bool>,
    /// The LM head whose product the logits are; `None` if logits are given.
    #[serde(default)]
    pub head: Option<DeckHead>,
}

/// The LM heads of a deck.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeckHead {
    /// The hidden widths `H`, in turn; empty if the deck chooses them.
    pub hidden: Vec<usize>,
    /// The memory layout of the head's weights.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype of the hidden states.
    pub rounds_logits: bool,
}

impl Default for DeckHead {
    /// Widths that the deck chooses, `[V,H]`, logits in f32.
    fn default() -> Self {
        Self { hidden: Vec::new(), layout: HeadLayout::VocabByHidden, rounds_logits: false }
    }
}

impl Default for Deck {
    /// 200 problems in bf16 and f32, every finite regime, a wide one in each dtype.
    fn default() -> Self {
        Self {
            dtypes: vec![Dtype::Bf16, Dtype::F32],
            shapes: DeckShapes::Many,
            regimes: Regime::FINITE.to_vec(),
            cases: 200,
            wide: Self::usual_wide(200, 2),
            seed: 0,
            packed: false,
            masked_garbage: None,
            head: None,
        }
    }
}

/// The recipe of one problem of a deck.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DealtRecipe {
    /// The recipe of the tokens and the logits, whatever those are made of.
    #[serde(flatten)]
    pub recipe: Recipe,
    /// The LM head whose product the logits are; `None` if logits are given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head: Option<DealtHead>,
    /// The content of the arrays, beyond what the recipe draws.
    pub content: DeckContent,
    /// Whether the sequences lie in one row.
    pub packed: bool,
    /// Whether masked tokens with garbage have ids outside the vocabulary as well.
    #[serde(skip)]
    pub(crate) garbage_ids: bool,
}

/// The LM head of one problem.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DealtHead {
    /// The hidden width `H`.
    pub hidden: usize,
    /// The memory layout of the head's weights.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype of the hidden states.
    pub rounds_logits: bool,
}

impl DealtRecipe {
    /// A recipe of logits, and nothing beyond what it draws.
    pub(crate) fn from_recipe(recipe: Recipe) -> Self {
        Self { recipe, head: None, content: DeckContent::Drawn, packed: false, garbage_ids: false }
    }

    /// Returns the recipe with ordinary numbers under the mask.
    pub(crate) fn without_garbage(&self) -> Self {
        if self.content != DeckContent::MaskedGarbage {
            return self.clone();
        }
        let recipe = Recipe { masked_garbage: false, ..self.recipe.clone() };
        Self { recipe, content: DeckContent::Drawn, ..self.clone() }
    }

    /// The recipe for a problem with an LM head; the head is narrow if none was chosen.
    pub(crate) fn head_recipe(&self) -> HeadRecipe {
        let head =
            self.head.unwrap_or(DealtHead { hidden: NARROW, layout: HeadLayout::VocabByHidden, rounds_logits: false });
        let DealtHead { hidden, layout, rounds_logits } = head;
        HeadRecipe { hidden, layout, rounds_logits, recipe: self.recipe.clone() }
    }

    /// Returns the problem in a few words: `2x8x257 bf16 peaked, seed 3`.
    pub fn label(&self) -> String {
        let Self { recipe: Recipe { shape: [batch, tokens, vocab], dtype, regime, seed, .. }, .. } = self;
        let (batch, tokens, vocab) = (*batch, *tokens, *vocab);
        let extents = match self.head {
            None => format!("{batch}x{tokens}x{vocab}"),
            Some(DealtHead { hidden, layout, .. }) => {
                format!("{} {}", HeadShape { batch, tokens, hidden, vocab }, layout.key())
            }
        };
        let content = self.content.words().map(|words| format!(", {words}")).unwrap_or_default();
        let packed = if self.packed { ", packed" } else { "" };
        format!("{extents} {dtype} {regime}{content}, seed {seed}{packed}")
    }
}

impl Deck {
    /// Checks that there is a problem to deal, which [`Deck::deal`] needs: a deck may come from a file.
    ///
    /// # Errors
    /// [`CampaignError::Empty`] naming the field that leaves nothing to deal.
    pub fn check(&self) -> Result<(), CampaignError> {
        let empty = |field, given: &str, expected| Err(CampaignError::Empty { field, given: given.into(), expected });
        match () {
            () if self.cases == 0 => empty("cases", "0", "at least one problem"),
            () if self.dtypes.is_empty() => empty("dtypes", "none", "one of f32, bf16 and f16"),
            () if self.possible_regimes().is_empty() => empty("regimes", "none", "one that this kind of problem has"),
            () if self.shapes == DeckShapes::Given(Vec::new()) => empty("shapes", "none", "[B,T,V]"),
            () => Ok(()),
        }
    }

    /// Returns the recipes of all problems, in order.
    pub fn recipes(&self) -> impl Iterator<Item = DealtRecipe> + '_ {
        (0..self.cases).map(|index| self.deal(index))
    }

    /// Returns the number of wide problems where none is asked for: one for each dtype and two at least, and a tenth of the deck at most.
    pub fn usual_wide(cases: u64, dtypes: usize) -> u64 {
        (cases / 10).min(dtypes.max(2) as u64)
    }

    /// Returns the regimes that this kind of problem can have: no product of finite numbers is −∞.
    pub fn possible_regimes(&self) -> Vec<Regime> {
        self.regimes.iter().copied().filter(|regime| self.head.is_none() || !regime.has_holes()).collect()
    }

    /// Returns the recipe of problem `index`: designed shapes in rounds, then random ones, and the wide ones last.
    ///
    /// Everything but the numbers in the arrays depends on `index` alone, so that what the deck covers does not depend on the seed.
    ///
    /// # Panics
    /// If [`Deck::check`] fails.
    pub fn deal(&self, index: u64) -> DealtRecipe {
        let regimes = self.possible_regimes();
        // The wide problems are counted by themselves: they are the same however many others there are.
        let narrow = self.cases.saturating_sub(self.wide);
        let wide = index.checked_sub(narrow).filter(|_| matches!(self.shapes, DeckShapes::Many | DeckShapes::Few));
        let number = wide.map_or(index, |wide| (1 << 31) + wide);
        let shapes = if self.packed { &DESIGNED_PACKED_SHAPES[..] } else { &DESIGNED_SHAPES[..] };
        let (round, place) = (index / shapes.len() as u64, index % shapes.len() as u64);
        let in_turn = |turn: u64, length: usize| (turn % length as u64) as usize;
        // A stream of its own for each number keeps a problem the same, however many problems the deck has.
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(number);

        // The next round gives a shape another dtype and another regime. Five regimes on, as two and eleven, and two and nine, have
        // no common divisor: a shape meets a regime twice only after as many rounds as there are regimes.
        let (dtype, regime) = match wide {
            Some(wide) => (in_turn(wide, self.dtypes.len()), in_turn(wide, regimes.len())),
            None => (in_turn(place + round, self.dtypes.len()), in_turn(place + 5 * round, regimes.len())),
        };
        let shape = match (&self.shapes, wide) {
            (DeckShapes::Given(shapes), _) => shapes[in_turn(index, shapes.len())],
            (_, Some(_)) => {
                if self.packed {
                    WIDE_PACKED
                } else {
                    WIDE
                }
            }
            (DeckShapes::Few, _) if self.packed => FEW_PACKED_SHAPES[in_turn(index, FEW_PACKED_SHAPES.len())],
            (DeckShapes::Few, _) => FEW_SHAPES[in_turn(index, FEW_SHAPES.len())],
            (DeckShapes::Many, _) if round < ROUNDS => shapes[place as usize],
            (DeckShapes::Many, _) => random_shape(&mut rng, if self.packed { 8 } else { 4 }),
        };
        let designed = matches!(self.shapes, DeckShapes::Many) && round < ROUNDS;
        let content = match wide {
            Some(_) => DeckContent::Drawn,
            None => designed.then(|| fixed_content(shape)).flatten().unwrap_or_else(|| DeckContent::in_turn(index)),
        };
        let mut dealt = DealtRecipe {
            recipe: Recipe {
                shape,
                dtype: self.dtypes[dtype],
                regime: regimes[regime],
                seed: self.seed.wrapping_mul(1 << 32).wrapping_add(number),
                old_logp_noise_scale: [0.3, 0.1, 1.0, 0.3, 0.0][in_turn(index, 5)],
                masked_garbage: false,
            },
            head: None,
            content,
            packed: self.packed,
            garbage_ids: self.masked_garbage == Some(true),
        };
        content.apply(&mut dealt, self);
        dealt.head = self.head.as_ref().map(|head| head.in_turn(index, shape));
        dealt
    }

    /// Makes the problem of a recipe.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn draw<P: Subject>(&self, dealt: &DealtRecipe, spec: &LossSpec) -> Result<P, RecipeError> {
        let mut problem = P::draw(dealt, spec)?;
        dealt.content.edit(dealt, spec, &mut problem)?;
        if !dealt.packed {
            return Ok(problem);
        }
        let Recipe { shape: [sequences, tokens, _], seed, .. } = dealt.recipe;
        Ok(problem.laid_out(cu_seqlens(seed, [sequences, sequences * tokens])))
    }
}

impl DeckHead {
    /// The head of problem `index`: the named widths in turn, or the next one of the deck's that leaves the head small.
    fn in_turn(&self, index: u64, [batch, tokens, vocab]: [usize; 3]) -> DealtHead {
        let Self { layout, rounds_logits, .. } = *self;
        let at = |widths: &[usize], turn: u64| widths[(turn % widths.len() as u64) as usize];
        let hidden = if self.hidden.is_empty() {
            let mut from_here = (0..WIDTHS.len() as u64).map(|step| at(&WIDTHS, index + step));
            // Extents may be a stranger's, and are checked only when the problem is drawn.
            let rows = batch.saturating_mul(tokens).saturating_add(vocab);
            from_here.find(|width| width.saturating_mul(rows) <= HEAD_ELEMENTS).unwrap_or(NARROW)
        } else {
            at(&self.hidden, index)
        };
        DealtHead { hidden, layout, rounds_logits }
    }
}
