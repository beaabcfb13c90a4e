//! [`Deck`]: problems under the constraints of a campaign, the telling ones first.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use assay_core::problem::{CuSeqlens, Dtype, HeadLayout, HeadProblem, Problem, ProblemShape};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, RecipeError, Regime};

use crate::subject::{DeckRecipe, Subject};

/// Around the tiles of vector units and GPU blocks, primes, one column, one token, many rows.
const DIRECTED_SHAPES: [[usize; 3]; 12] = [
    [2, 8, 257],
    [3, 4, 1031],
    [1, 17, 4099],
    [4, 16, 32],
    [2, 5, 127],
    [2, 5, 129],
    [1, 6, 1024],
    [1, 6, 2049],
    [8, 2, 37],
    [2, 3, 2],
    [1, 1, 131],
    [3, 7, 509],
];

/// The shapes `[B,T,V]` for kernels that are compiled again for each shape.
pub const FEW_SHAPES: [[usize; 3]; 4] = [[2, 8, 257], [1, 4, 4099], [4, 16, 32], [3, 4, 1031]];

/// The directed shapes of packed sequences, `[S,N/S,V]`: also rows longer than a tile of tokens, many sequences, and as
/// many sequences as tokens.
const PACKED_SHAPES: [[usize; 3]; 12] = [
    [4, 7, 257],
    [3, 89, 8],
    [4, 4, 1031],
    [3, 3, 4099],
    [9, 7, 32],
    [4, 5, 127],
    [4, 5, 129],
    [3, 2, 1024],
    [3, 2, 2049],
    [16, 3, 37],
    [3, 2, 2],
    [8, 1, 131],
];

/// The shapes of packed sequences for kernels that are compiled again for each shape.
const FEW_PACKED_SHAPES: [[usize; 3]; 4] = [[4, 7, 257], [3, 3, 4099], [9, 7, 32], [4, 4, 1031]];

/// More rows than a grid's second axis counts.
const MANY_ROWS: [usize; 3] = [16, 4_097, 8];

/// One problem over Qwen's vocabulary of 151,936 entries.
const WIDE: [usize; 3] = [1, 3, 151_936];

/// Packed sequences over Qwen's vocabulary, one of them most often empty.
const WIDE_PACKED: [usize; 3] = [3, 1, 151_936];

/// Elements of a problem that is drawn at random.
const RANDOM_ELEMENTS: usize = 1 << 14;

/// The choice of the shapes that a deck deals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeckShapes {
    /// Many, another one nearly every time.
    Many,
    /// [`FEW_SHAPES`], for what is compiled for each.
    Few,
    /// Exactly these shapes `[B,T,V]`, in turn.
    Given(Vec<[usize; 3]>),
}

impl DeckShapes {
    /// Parses `many`, `few`, or shapes, which are all `BxTxV` or all `BxTxHxV`; returns the widths `H` of the latter as
    /// well.
    ///
    /// # Errors
    /// A text that names the argument which is none of these.
    pub fn read(given: &[String]) -> Result<(Self, Vec<usize>), String> {
        match given {
            [name] if name == "many" => return Ok((DeckShapes::Many, Vec::new())),
            [name] if name == "few" => return Ok((DeckShapes::Few, Vec::new())),
            _ => {}
        }
        let read =
            |text: &String| text.parse::<ProblemShape>().map_err(|reason| format!("{reason}; or one of many, few"));
        let extents = given.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let width = |extents: &ProblemShape| match extents {
            ProblemShape::Logits(_) => None,
            ProblemShape::Head(shape) => Some(shape.hidden),
        };
        let hidden: Vec<usize> = extents.iter().filter_map(width).collect();
        if !hidden.is_empty() && hidden.len() < extents.len() {
            return Err("got BxTxV beside BxTxHxV, expected one of the two".into());
        }
        Ok((DeckShapes::Given(extents.into_iter().map(ProblemShape::logits).collect()), hidden))
    }
}

/// Problems under constraints, by number: the same number is the same problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deck {
    /// The dtypes of the logits, or of hidden states and head, in turn.
    pub dtypes: Vec<Dtype>,
    /// The shapes of the problems.
    pub shapes: DeckShapes,
    /// The ways of drawing logits, in turn.
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
}

impl Default for Deck {
    /// 200 problems in bf16 and f32, every finite regime, one of them wide.
    fn default() -> Self {
        Self {
            dtypes: vec![Dtype::Bf16, Dtype::F32],
            shapes: DeckShapes::Many,
            regimes: Regime::FINITE.to_vec(),
            cases: 200,
            wide: 1,
            seed: 0,
            packed: false,
        }
    }
}

impl Deck {
    /// Returns the recipes of all problems, in order.
    pub fn recipes(&self) -> impl Iterator<Item = Recipe> + '_ {
        (0..self.cases).map(|index| self.recipe(index))
    }

    /// First every regime with every dtype, on shapes in turn; ratios that overflow, and many rows; then at random; the wide
    /// ones last.
    pub fn recipe(&self, index: u64) -> Recipe {
        // A stream of its own for each index keeps problem `index` the same, however many problems the deck has.
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(index);
        let at = |n: usize| (index % n as u64) as usize;
        let (regimes, dtypes) = (self.regimes.len(), self.dtypes.len());
        let directed = (regimes * dtypes) as u64;
        let mut recipe = Recipe {
            shape: [0; 3],
            // Every dtype meets every regime in as many problems as there are pairs.
            // Consecutive problems change the regime; the dtype shifts by one after each round of regimes.
            dtype: self.dtypes[(at(regimes * dtypes) / regimes + at(regimes)) % dtypes],
            regime: self.regimes[at(regimes)],
            seed: self.seed.wrapping_mul(1 << 32).wrapping_add(index),
            old_logp_noise_scale: [0.3, 0.1, 1.0, 0.3, 0.0][at(5)],
            masked_garbage: false,
        };
        let wide = index >= self.cases.saturating_sub(self.wide);
        // Choose the extents: a given list in turn, the wide ones at the end, directed ones until every regime has met
        // every dtype, and then random ones.
        let of = |padded: [usize; 3], packed: [usize; 3]| if self.packed { packed } else { padded };
        recipe.shape = match &self.shapes {
            DeckShapes::Given(shapes) => shapes[at(shapes.len())],
            _ if wide => of(WIDE, WIDE_PACKED),
            DeckShapes::Few => of(FEW_SHAPES[at(FEW_SHAPES.len())], FEW_PACKED_SHAPES[at(FEW_PACKED_SHAPES.len())]),
            DeckShapes::Many if index < directed => {
                of(DIRECTED_SHAPES[at(DIRECTED_SHAPES.len())], PACKED_SHAPES[at(PACKED_SHAPES.len())])
            }
            DeckShapes::Many if index == directed + 1 => MANY_ROWS,
            DeckShapes::Many => random_shape(&mut rng, if self.packed { 8 } else { 4 }),
        };
        if index == directed {
            // Ratios beyond f32.
            (recipe.regime, recipe.old_logp_noise_scale) = (Regime::Normal, 60.0);
            if !self.regimes.contains(&Regime::Normal) {
                recipe.regime = self.regimes[0];
            }
        }
        recipe
    }
}

/// Draws a shape `[B,T,V]` of at most `sequences` sequences and about [`RANDOM_ELEMENTS`] elements.
fn random_shape(rng: &mut ChaCha8Rng, sequences: usize) -> [usize; 3] {
    // Vocabularies are tiny, next to a power of two, prime, or anything in between.
    let vocab = match rng.random_range(0..4) {
        0 => rng.random_range(2..40),
        1 => (1_usize << rng.random_range(5..12)) + rng.random_range(0..3) - 1,
        2 => [97, 509, 997, 1031, 4099][rng.random_range(0..5)],
        _ => rng.random_range(40..2500),
    };
    // Spend the logits that the vocabulary leaves on sequences first, and then on tokens.
    let rows = (RANDOM_ELEMENTS / vocab).max(1);
    let batch = rng.random_range(1..=sequences.min(rows));
    [batch, rng.random_range(1..=12.min((rows / batch).max(1))), vocab]
}

/// Cuts a row of `tokens` tokens into `sequences` sequences at random places. In half of the draws one of them is
/// emptied, and in two of three some tokens after the last sequence belong to none.
fn cu_seqlens(seed: u64, [sequences, tokens]: [usize; 2]) -> CuSeqlens {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Draws of their own: the problem is that of its recipe, cut otherwise.
    rng.set_stream(2);
    // Leave up to a quarter of the row behind the last sequence, and cut the remainder at random.
    let behind = if rng.random_range(0..3) > 0 { rng.random_range(0..=tokens / 4) } else { 0 };
    let end = tokens - behind;
    let mut ends: Vec<usize> = (1..sequences).map(|_| rng.random_range(0..=end)).chain([end]).collect();
    ends.sort_unstable();
    // Empty one sequence by moving its end back to its start.
    if sequences > 1 && rng.random_bool(0.5) {
        let empty = rng.random_range(1..sequences);
        ends[empty - 1] = ends[empty];
    }
    let starts = std::iter::once(0).chain(ends.iter().copied());
    CuSeqlens::from_lengths(ends.iter().zip(starts).map(|(end, start)| end - start))
}

/// The deck of a kind of problem, by number.
pub trait ProblemDeck<P: Subject> {
    /// The recipe of a number.
    fn deal(&self, index: u64) -> P::Recipe;

    /// Returns the constraints that both kinds of problem share.
    fn deck(&self) -> &Deck;

    /// The problem of a recipe, packed where those of the deck are.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    fn draw(&self, recipe: &P::Recipe, spec: &LossSpec) -> Result<P, RecipeError> {
        let problem = P::draw(recipe, spec)?;
        let Recipe { shape: [batch, tokens, _], seed, .. } = *recipe.logits_recipe();
        Ok(if self.deck().packed { problem.laid_out(cu_seqlens(seed, [batch, batch * tokens])) } else { problem })
    }

    /// The problem of a recipe in a few words.
    fn label(&self, recipe: &P::Recipe) -> String {
        recipe.label() + if self.deck().packed { ", packed" } else { "" }
    }
}

impl ProblemDeck<Problem> for Deck {
    fn deal(&self, index: u64) -> Recipe {
        self.recipe(index)
    }

    fn deck(&self) -> &Deck {
        self
    }
}

/// A [`Deck`] of problems with an LM head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadDeck {
    /// The deck of tokens and logits. Regimes with −∞ are left out, as no product of finite numbers is −∞.
    pub deck: Deck,
    /// The hidden widths `H`, in turn.
    pub hidden: Vec<usize>,
    /// The memory layout of the head's weights.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype of the hidden states.
    pub rounds_logits: bool,
}

impl HeadDeck {
    /// Widths around tiles, `[V,H]`, logits in f32.
    pub fn new(mut deck: Deck) -> Self {
        // A product of finite numbers has no −∞.
        deck.regimes.retain(|regime| !regime.has_holes());
        let few = deck.shapes != DeckShapes::Many;
        let hidden = if few { vec![64] } else { vec![64, 31, 128, 65, 16] };
        Self { deck, hidden, layout: HeadLayout::VocabByHidden, rounds_logits: false }
    }
}

impl ProblemDeck<HeadProblem> for HeadDeck {
    fn deal(&self, index: u64) -> HeadRecipe {
        let Self { deck, hidden, layout, rounds_logits } = self;
        let hidden = hidden[(index % hidden.len() as u64) as usize];
        HeadRecipe { hidden, layout: *layout, rounds_logits: *rounds_logits, recipe: deck.recipe(index) }
    }

    fn deck(&self) -> &Deck {
        &self.deck
    }
}
