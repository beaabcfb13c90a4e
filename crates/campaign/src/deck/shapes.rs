//! The shapes of a deck: designed ones, each with the sizes at which kernels break, and random ones.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use assay_core::problem::ProblemShape;

use super::DeckContent;

/// The designed shapes `[B,T,V]`, the most telling first: a campaign of few problems deals the first of them.
///
/// Tails of tokens meet small vocabularies, and large vocabularies few tokens, so that a round of all of them has about three
/// million logits.
pub(super) const DESIGNED_SHAPES: [[usize; 3]; 58] = [
    // Ordinary problems, with vocabularies next to a tile or prime.
    [2, 8, 257],
    [3, 4, 1031],
    [1, 17, 4099],
    [4, 16, 32],
    [2, 3, 2],
    [1, 1, 131],
    // Tails of tokens: a tile of 8, 32, 128 or 256 less one, full, and plus one. Vocabularies around tiles of 128 to 1,024.
    [1, 33, 511],
    [2, 9, 1025],
    [1, 129, 255],
    [1, 32, 512],
    [1, 8, 1024],
    [1, 257, 127],
    [3, 7, 1023],
    [1, 31, 513],
    [1, 128, 256],
    [1, 127, 257],
    [1, 256, 128],
    [1, 255, 129],
    // More sequences than a block of 32, and as many.
    [33, 2, 131],
    [32, 1, 67],
    // Vocabularies around tiles of 2,048 to 65,536.
    [1, 3, 4096],
    [2, 1, 4097],
    [1, 3, 8192],
    [1, 2, 8193],
    [1, 2, 16_384],
    [2, 1, 16_385],
    [1, 2, 32_768],
    [1, 2, 32_769],
    [1, 2, 65_536],
    [2, 1, 65_537],
    [3, 1, 2048],
    [1, 3, 2049],
    [1, 2, 2047],
    [2, 1, 4095],
    [1, 2, 8191],
    [2, 1, 16_383],
    [1, 2, 32_767],
    [1, 2, 65_535],
    // Three tiles of 4,096, 8,192 and 16,384: what fails there and at twice the tile fails at any multiple of it.
    [1, 2, 12_288],
    [2, 1, 24_576],
    [1, 1, 49_152],
    // More rows than a GPU has multiprocessors, with vocabularies above a tile.
    [2, 67, 1153],
    [5, 61, 2053],
    [150, 1, 1031],
    // Vocabularies of models: Llama 2, GPT-2, Phi-3, DeepSeek, Llama 3, gpt-oss, Gemma.
    [1, 2, 32_000],
    [2, 1, 50_257],
    [1, 2, 100_352],
    [1, 1, 128_256],
    [1, 1, 129_280],
    [1, 1, 201_088],
    [1, 1, 262_144],
    // Primes, single columns past a vector, and many short sequences.
    [8, 2, 37],
    [3, 7, 509],
    [16, 5, 8],
    [1, 6, 997],
    [7, 3, 65],
    [4, 9, 33],
    // More rows than a grid's second axis counts.
    [16, 4_097, 8],
];

/// Returns the content that a designed shape always has: a tail of tokens shows only if its last token counts, and ratios meet a
/// bound of the clip by chance, which takes many tokens.
pub(super) fn fixed_content(shape: [usize; 3]) -> Option<DeckContent> {
    match shape {
        [4, 16, 32] | [9, 7, 32] => Some(DeckContent::RatiosAtBounds),
        [_, 4_097, _] => Some(DeckContent::EndsCount),
        [batch, tokens, _] => (tokens > 30 || batch > 30).then_some(DeckContent::EveryTokenCounts),
    }
}

/// The shapes `[B,T,V]` for kernels that are compiled again for each shape.
pub const FEW_SHAPES: [[usize; 3]; 4] = [[2, 8, 257], [1, 4, 4099], [4, 16, 32], [3, 4, 1031]];

/// The designed shapes of packed sequences, `[S,N/S,V]`: also sequences longer than a tile of tokens, many sequences, and as
/// many sequences as tokens.
pub(super) const DESIGNED_PACKED_SHAPES: [[usize; 3]; 38] = [
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
    [3, 129, 127],
    [5, 65, 129],
    [4, 64, 128],
    [3, 11, 511],
    [4, 8, 512],
    [3, 3, 1025],
    [40, 3, 67],
    [3, 1, 4096],
    [3, 1, 4097],
    [3, 1, 8192],
    [3, 1, 8193],
    [3, 1, 16_384],
    [3, 1, 16_385],
    [3, 1, 32_768],
    [3, 1, 32_769],
    [3, 1, 65_536],
    [3, 1, 65_537],
    [4, 35, 1153],
    [3, 1, 32_000],
    [3, 1, 50_257],
    [3, 1, 128_256],
    [3, 10, 255],
    [3, 11, 256],
    [4, 33, 33],
    [7, 3, 509],
    [16, 4_097, 8],
];

/// The shapes of packed sequences for kernels that are compiled again for each shape.
pub(super) const FEW_PACKED_SHAPES: [[usize; 3]; 4] = [[4, 7, 257], [3, 3, 4099], [9, 7, 32], [4, 4, 1031]];

/// One problem over Qwen's vocabulary of 151,936 entries.
pub(super) const WIDE: [usize; 3] = [1, 3, 151_936];

/// Packed sequences over Qwen's vocabulary, one of them most often empty.
pub(super) const WIDE_PACKED: [usize; 3] = [3, 1, 151_936];

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
    /// A text that names the argument which differs from all of these.
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

/// Draws a shape `[B,T,V]` of at most `sequences` sequences and about [`RANDOM_ELEMENTS`] elements.
pub(super) fn random_shape(rng: &mut ChaCha8Rng, sequences: usize) -> [usize; 3] {
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
