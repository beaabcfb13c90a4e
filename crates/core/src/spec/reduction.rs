//! The reduction of token losses to one number.

use serde::{Deserialize, Serialize};

use super::LossSpec;

/// How token losses become one number: the weight `w_b` of every token of row `b`, with `n_b = Σ_t m[b,t]` and `ε` the
/// `denominator_epsilon`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reduction {
    /// `1 / (Σ n_b + ε)`: mean over the batch's unmasked tokens (bnpo; dapo on one device).
    TokenMean,
    /// `1 / (B′ · (n_b + ε))`: mean over rows of each row's token mean (grpo).
    SequenceMean {
        /// What is `B′`.
        rows: Rows,
    },
    /// `1 / B′`: mean over rows of each row's token sum (luspo, verl's `seq-mean-token-sum`).
    SequenceSum {
        /// What is `B′`.
        rows: Rows,
    },
    /// `1 / (B′ · length)` (`dr_grpo`).
    FixedLength {
        /// What is `B′`.
        rows: Rows,
        /// The completion length that every row is divided by, `≥ 1`; `None`: the padded width `T`.
        #[serde(default)]
        length: Option<usize>,
    },
    /// `1 / normalizer`, a count taken elsewhere, such as the tokens of the global batch (dapo).
    Normalizer(f64),
}

/// How many rows a reduction divides by, `B′`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// `B`: a fully masked row counts with loss 0 (TRL, Liger).
    All,
    /// The number of rows with at least one token (verl, Tunix).
    NonEmpty,
    /// A count taken elsewhere, `> 0`: the sequences of the global batch.
    Given(f64),
}

/// A reduction of its own for one term.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Averaging {
    /// The weights.
    pub reduction: Reduction,
    /// As [`LossSpec::denominator_epsilon`].
    #[serde(default)]
    pub denominator_epsilon: f64,
}

impl LossSpec {
    /// The reduction of the policy term.
    pub fn averaging(&self) -> Averaging {
        Averaging { reduction: self.reduction, denominator_epsilon: self.denominator_epsilon }
    }

    /// The averagings that are asked for, by the name of the length that each may have.
    fn averagings(&mut self) -> impl Iterator<Item = (&'static str, &mut Reduction)> {
        let kl = self.kl.as_mut().and_then(|kl| kl.averaging.as_mut());
        let entropy = self.entropy_averaging.as_mut();
        let own = [("kl.averaging", kl), ("entropy_averaging", entropy)];
        let own = own.into_iter().filter_map(|(field, of)| Some((field, &mut of?.reduction)));
        std::iter::once(("reduction", &mut self.reduction)).chain(own)
    }

    /// Checks that no mean is over the padded width, which packed sequences do not have.
    ///
    /// # Errors
    /// The setting that has one.
    pub fn expect_no_width(&self) -> Result<(), &'static str> {
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

    /// The same loss of a batch that is padded to `width`, whatever the width of the batch it is asked of.
    #[must_use]
    pub fn with_width(mut self, width: usize) -> Self {
        for (_, of) in self.averagings() {
            if let Reduction::FixedLength { length: length @ None, .. } = of {
                *length = Some(width);
            }
        }
        self
    }

    /// The reduction of the KL penalty.
    pub fn kl_averaging(&self) -> Averaging {
        self.kl.as_ref().and_then(|kl| kl.averaging).unwrap_or_else(|| self.averaging())
    }
}
