//! The features of a problem that a kernel may depend on, each with its reason, in the order of their importance.
//!
//! The default campaign deals each at least twice, in two regimes and in each dtype, whatever the seed. A campaign of fewer
//! problems deals the designed shapes and contents from their start; its report names the features that it left out.

use std::collections::BTreeSet;

use assay_core::problem::Dtype;
use assay_judge::generate::Recipe;
use assay_schema::campaign as schema;

use super::{DealtHead, DealtRecipe, Deck, DeckContent};

/// The tiles of vocabulary entries that kernels use.
const VOCAB_TILES: [usize; 10] = [128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536];

/// Three tiles of 4,096, of 8,192 and of 16,384 vocabulary entries.
const THREE_TILES: [usize; 3] = [12_288, 24_576, 49_152];

/// The tiles of tokens that kernels use.
const TOKEN_TILES: [usize; 4] = [8, 32, 128, 256];

/// The vocabularies of models, each with one of them.
const MODEL_VOCABS: [(usize, &str); 8] = [
    (151_936, "Qwen"),
    (128_256, "Llama 3"),
    (262_144, "Gemma 3"),
    (129_280, "DeepSeek-V3"),
    (201_088, "gpt-oss"),
    (32_000, "Llama 2"),
    (50_257, "GPT-2"),
    (100_352, "Phi-4"),
];

/// The vocabularies of models that packed problems have.
const PACKED_MODEL_VOCABS: [usize; 4] = [151_936, 128_256, 32_000, 50_257];

/// The multiprocessors of an H100.
const MULTIPROCESSORS: usize = 132;

/// The tokens of a packed row from which on its first sequence ends one token past a tile of 128.
pub(super) const LONG_PACK: usize = 345;

/// A property of a problem that a kernel may depend on.
pub struct Feature {
    /// The name, as reports print it.
    pub name: String,
    /// The mistake of kernels that the feature shows.
    pub reason: &'static str,
    holds: Predicate,
}

/// A feature of recipes: its name, its reason, and the test.
type FeatureOfRecipe = (&'static str, &'static str, fn(&DealtRecipe) -> bool);

/// The test whether a problem has a feature.
enum Predicate {
    Vocab(usize),
    Tokens(usize),
    Content(DeckContent),
    Recipe(fn(&DealtRecipe) -> bool),
}

impl Feature {
    fn new(name: impl Into<String>, reason: &'static str, holds: Predicate) -> Self {
        Self { name: name.into(), reason, holds }
    }

    /// Returns the features that problems of the deck's kind can have, the most important first.
    pub fn all(deck: &Deck) -> Vec<Self> {
        let mut all = Self::content_features();
        // Whoever names the widths asks for no other.
        if deck.head.as_ref().is_some_and(|head| head.hidden.is_empty()) {
            all.extend(Self::head_features());
        }
        for (vocab, model) in MODEL_VOCABS {
            if !deck.packed || PACKED_MODEL_VOCABS.contains(&vocab) {
                let reason = "sizes at which kernels are tuned, and 16-bit or split sums break";
                all.push(Self::new(format!("V = {vocab} ({model})"), reason, Predicate::Vocab(vocab)));
            }
        }
        all.extend(if deck.packed { Self::packed_features() } else { Self::token_features() });
        for tile in VOCAB_TILES {
            for vocab in [tile - 1, tile, tile + 1] {
                // Packed rows of three sequences spend their logits on full and just overfull tiles.
                if !deck.packed || (vocab >= tile && tile != 2_048 && tile != 512) {
                    let reason = "the last tile of vocabulary entries, full or not";
                    all.push(Self::new(format!("V = {vocab}"), reason, Predicate::Vocab(vocab)));
                }
            }
        }
        if !deck.packed {
            for vocab in THREE_TILES {
                let reason = "a tile is told from its double by what is a multiple of one only";
                all.push(Self::new(format!("V = {vocab}"), reason, Predicate::Vocab(vocab)));
            }
        }
        let of_rows: [FeatureOfRecipe; 2] = [
            ("more than 132 rows, V > 1,024", "the second row of a persistent program", |dealt| {
                tokens(dealt) > MULTIPROCESSORS && dealt.recipe.shape[2] > 1_024
            }),
            ("more than 65,535 rows", "a grid's second axis ends there", |dealt| tokens(dealt) > 65_535),
        ];
        all.extend(of_rows.map(|(name, reason, holds)| Self::new(name, reason, Predicate::Recipe(holds))));
        let contents = [
            ("advantages 0", "0/0 in a normalised loss", DeckContent::ZeroAdvantages),
            ("no token counts", "a mean over nothing", DeckContent::NoTokenCounts),
        ];
        all.extend(contents.map(|(name, reason, content)| Self::new(name, reason, Predicate::Content(content))));
        all
    }

    /// The features of the arrays' content.
    fn content_features() -> Vec<Self> {
        use DeckContent::{EveryTokenCounts, FarColumn, FarRatios, MaskedGarbage, RatiosAtBounds};
        let of = Predicate::Content;
        let all = [
            ("every token counts", "the last token of a block loses its gradient", of(EveryTokenCounts)),
            ("garbage under the mask", "masked tokens reach the sums, or 0·NaN the gradient", of(MaskedGarbage)),
            (
                "ratios of 1",
                "without noise of old log-probabilities a clip at 1 shows",
                Predicate::Recipe(|dealt| dealt.recipe.old_logp_noise_scale == 0.0),
            ),
            ("ratios at the clip's bounds", "a comparison on the wrong side, or 0/0", of(RatiosAtBounds)),
            ("ratios far from 1", "a clamped or underflowing log-ratio", of(FarRatios)),
            (
                "a late entry 90 to 1,000 nats up",
                "tiles that are merged by exp of a difference overflow",
                of(FarColumn),
            ),
        ];
        all.map(|(name, reason, holds)| Self::new(name, reason, holds)).into()
    }

    /// The features of LM heads.
    fn head_features() -> Vec<Self> {
        let all: [FeatureOfRecipe; 4] = [
            ("H = 896", "partial products over blocks of H", |dealt| width(dealt) == 896),
            ("H = 2048", "a whole row of H no longer fits shared memory", |dealt| width(dealt) == 2_048),
            ("H no multiple of 16", "the tail of a block of H", |dealt| !width(dealt).is_multiple_of(16)),
            ("V > 8,192 and H > 32", "indices of the head, and tiles over both", |dealt| {
                width(dealt) > 32 && dealt.recipe.shape[2] > 8_192
            }),
        ];
        all.map(|(name, reason, holds)| Self::new(name, reason, Predicate::Recipe(holds))).into()
    }

    /// The features of packed sequences.
    fn packed_features() -> Vec<Self> {
        let all: [FeatureOfRecipe; 3] = [
            ("a sequence of 129 tokens", "a sequence that ends past a tile of tokens", |dealt| {
                tokens(dealt) >= LONG_PACK
            }),
            ("an empty sequence", "a mean over nothing", |dealt| dealt.recipe.seed.is_multiple_of(2)),
            ("more than 32 sequences", "a sequence is looked up in one block", |dealt| dealt.recipe.shape[0] > 32),
        ];
        all.map(|(name, reason, holds)| Self::new(name, reason, Predicate::Recipe(holds))).into()
    }

    /// The features of the numbers of sequences and tokens.
    fn token_features() -> Vec<Self> {
        let lengths = TOKEN_TILES.into_iter().flat_map(|tile| [tile - 1, tile, tile + 1]);
        let reason = "the last block of tokens, full or not, whose last token counts";
        let mut all: Vec<Self> =
            lengths.map(|length| Self::new(format!("T = {length}"), reason, Predicate::Tokens(length))).collect();
        let reason = "one sequence for each thread of a warp";
        all.push(Self::new("B = 32", reason, Predicate::Recipe(|dealt| dealt.recipe.shape[0] == 32)));
        all.push(Self::new("B > 32", reason, Predicate::Recipe(|dealt| dealt.recipe.shape[0] > 32)));
        all.push(Self::new("one token", "loops that need two", Predicate::Recipe(|dealt| tokens(dealt) == 1)));
        all
    }

    /// Whether the problem of a recipe has the feature.
    pub fn holds(&self, dealt: &DealtRecipe) -> bool {
        let Recipe { shape: [_, tokens, vocab], .. } = dealt.recipe;
        match self.holds {
            Predicate::Vocab(extent) => vocab == extent,
            Predicate::Tokens(extent) => {
                tokens == extent && (extent < 30 || dealt.content == DeckContent::EveryTokenCounts)
            }
            Predicate::Content(content) => dealt.content == content,
            Predicate::Recipe(holds) => holds(dealt),
        }
    }
}

/// The tokens `B·T` of a problem.
fn tokens(dealt: &DealtRecipe) -> usize {
    dealt.recipe.shape[0].saturating_mul(dealt.recipe.shape[1])
}

/// The hidden width of a problem with an LM head.
fn width(dealt: &DealtRecipe) -> usize {
    dealt.head.map_or(0, |DealtHead { hidden, .. }| hidden)
}

/// The problems, regimes and dtypes in which each feature was dealt.
pub struct FeatureCounts(Vec<(Feature, FeatureCount)>);

#[derive(Default)]
struct FeatureCount {
    problems: u64,
    regimes: BTreeSet<String>,
    dtypes: BTreeSet<String>,
}

impl FeatureCounts {
    /// Counts of no problem yet.
    pub fn new(deck: &Deck) -> Self {
        Self(Feature::all(deck).into_iter().map(|feature| (feature, FeatureCount::default())).collect())
    }

    /// Adds a problem.
    pub fn add(&mut self, dealt: &DealtRecipe) {
        let Recipe { dtype, regime, .. } = dealt.recipe;
        for (_, count) in self.0.iter_mut().filter(|(feature, _)| feature.holds(dealt)) {
            count.problems += 1;
            count.regimes.insert(regime.to_string());
            count.dtypes.insert(Dtype::to_string(&dtype));
        }
    }

    /// Returns the counts as reports have them, in the order of importance.
    pub fn table(&self) -> Vec<schema::FeatureCoverage> {
        let row = |(Feature { name, reason, .. }, count): &(Feature, FeatureCount)| schema::FeatureCoverage {
            feature: name.clone(),
            reason: (*reason).into(),
            problems: count.problems,
            regimes: count.regimes.len() as u64,
            dtypes: count.dtypes.iter().cloned().collect(),
        };
        self.0.iter().map(row).collect()
    }
}
