//! [`Coverage`]: the features of a problem that decide which bugs of a kernel it can show.

use std::fmt;

use serde::Serialize;

use assay_reference::Reference;

/// The features of a problem that decide which bugs it can show.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Coverage {
    /// The number of tokens that count.
    pub tokens: usize,
    /// The number of tokens whose dlogits are not all 0.
    pub with_gradient: usize,
    /// The number of tokens that count as clipped, on either side.
    pub clipped: usize,
    /// The number of sequences without a token that counts.
    pub empty_rows: usize,
    /// The smallest and the largest probability of a target that has a gradient.
    pub target_probability: Option<[f64; 2]>,
    /// The number of targets with a gradient at the first vocabulary entry, and at the last.
    pub first_and_last_column: [usize; 2],
}

impl Coverage {
    /// Counts the features of the problem behind `reference`.
    pub fn from_reference(reference: &Reference) -> Self {
        let shape = reference.shape();
        let mut coverage = Self::default();
        for sequence in reference.problem().sequences() {
            let tokens: Vec<_> = sequence.places().filter_map(|(b, t)| reference.token(b, t)).collect();
            coverage.empty_rows += usize::from(tokens.is_empty());
            for token in tokens {
                coverage.tokens += 1;
                coverage.clipped += usize::from(token.clipped_low || token.clipped_high);
                if !reference.has_gradient(token) {
                    continue;
                }
                coverage.with_gradient += 1;
                let p = 1.0 - token.probability_of_others;
                let [least, most] = coverage.target_probability.unwrap_or([p, p]);
                coverage.target_probability = Some([least.min(p), most.max(p)]);
                coverage.first_and_last_column[0] += usize::from(token.id == 0);
                coverage.first_and_last_column[1] += usize::from(token.id == shape.vocab - 1);
            }
        }
        coverage
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { tokens, with_gradient, clipped, empty_rows, first_and_last_column: [first, last], .. } = self;
        write!(f, "{tokens} tokens that count, {with_gradient} with a gradient, {clipped} clipped")?;
        if let Some([least, most]) = self.target_probability {
            write!(f, "; p of their targets {least:.1e} to {:.1e} below 1", 1.0 - most)?;
        }
        write!(f, "; {first} targets in the first column, {last} in the last; {empty_rows} rows without a token")
    }
}
