//! The reduction of token losses to one number.

use serde::{Deserialize, Serialize};

use super::LossSpec;

/// The reduction of token losses to one number: the weight `w_b` of every token of sequence `b`, with
/// `n_b = Σ_t m[b,t]` and `ε` the `denominator_epsilon`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reduction {
    /// The mean over the unmasked tokens of the batch, `w_b = 1 / (Σ n_b + ε)` (bnpo; dapo on one device).
    TokenMean,
    /// The mean over sequences of their token means, `w_b = 1 / (B′ · (n_b + ε))` (grpo).
    SequenceMean {
        /// The number of sequences, `B′`.
        rows: Rows,
    },
    /// The mean over sequences of their token sums, `w_b = 1 / B′` (luspo, verl's `seq-mean-token-sum`).
    SequenceSum {
        /// The number of sequences, `B′`.
        rows: Rows,
    },
    /// The token sum over a fixed length, `w_b = 1 / (B′ · length)` (`dr_grpo`).
    FixedLength {
        /// The number of sequences, `B′`.
        rows: Rows,
        /// The completion length that every sequence is divided by, `≥ 1`; `None` is the padded width `T`.
        #[serde(default)]
        length: Option<usize>,
    },
    /// The sum over tokens divided by a given number, `w_b = 1 / normalizer`, such as the token count of the global
    /// batch (dapo).
    Normalizer(f64),
}

/// The number of sequences that a reduction divides by, `B′`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// All `B` sequences: one without an unmasked token counts with loss 0 (TRL, Liger).
    All,
    /// The number of sequences with at least one unmasked token (verl, Tunix).
    NonEmpty,
    /// A given number `> 0`, such as the sequences of the global batch.
    Given(f64),
}

/// A reduction of one term of the loss, other than that of the policy term.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Averaging {
    /// The weights of the tokens.
    pub reduction: Reduction,
    /// A number `≥ 0` that is added to token counts, as [`LossSpec::denominator_epsilon`].
    #[serde(default)]
    pub denominator_epsilon: f64,
}

impl LossSpec {
    /// Returns the reduction of the policy term, with its epsilon.
    pub fn averaging(&self) -> Averaging {
        Averaging { reduction: self.reduction, denominator_epsilon: self.denominator_epsilon }
    }

    /// Lists every reduction in the spec with the path of its field.
    fn averagings(&mut self) -> impl Iterator<Item = (&'static str, &mut Reduction)> {
        let kl = self.kl.as_mut().and_then(|kl| kl.averaging.as_mut());
        let entropy = self.entropy_averaging.as_mut();
        let own = [("kl.averaging", kl), ("entropy_averaging", entropy)];
        let own = own.into_iter().filter_map(|(field, of)| Some((field, &mut of?.reduction)));
        std::iter::once(("reduction", &mut self.reduction)).chain(own)
    }

    /// Checks that no reduction divides by the padded width, which packed sequences do not have.
    ///
    /// # Errors
    /// The path of the first field that has to be set, such as `reduction.fixed_length.length`.
    pub fn expect_no_width(&self) -> Result<(), &'static str> {
        // The list of reductions borrows mutably, hence the clone.
        let mut spec = self.clone();
        let wide = spec.averagings().find(|(_, of)| matches!(of, Reduction::FixedLength { length: None, .. }));
        wide.map_or(Ok(()), |(field, _)| {
            Err(match field {
                "kl.averaging" => "kl.averaging.reduction.fixed_length.length",
                "entropy_averaging" => "entropy_averaging.reduction.fixed_length.length",
                _ => "reduction.fixed_length.length",
            })
        })
    }

    /// Fixes the padded width that reductions divide by to `width`, for a batch that is cut into narrower parts.
    #[must_use]
    pub fn with_width(mut self, width: usize) -> Self {
        for (_, of) in self.averagings() {
            if let Reduction::FixedLength { length: length @ None, .. } = of {
                *length = Some(width);
            }
        }
        self
    }

    /// Returns the reduction of the KL penalty: its own, or that of the policy term.
    pub fn kl_averaging(&self) -> Averaging {
        self.kl.as_ref().and_then(|kl| kl.averaging).unwrap_or_else(|| self.averaging())
    }
}
