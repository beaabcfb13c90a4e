//! What of a spec shapes a program.

use crate::spec::{KlEstimator, LossSpec, OldLogp, Reduction, Rows, TemperatureDivides};

/// What of a spec shapes a program. Its numbers are run-time inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Structure {
    pub(crate) old_logp_given: bool,
    pub(crate) temperature: Temperature,
    pub(crate) kl: Option<KlEstimator>,
    pub(crate) entropy_bonus: bool,
    pub(crate) denominator: Denominator,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Temperature {
    One,
    Logits,
    Logp,
}

/// What a token's loss is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denominator {
    /// The tokens of the batch.
    Tokens,
    /// The tokens of its row, times a number of rows: those that have any.
    RowTokensFilledRows,
    /// The tokens of its row, times a number that is given.
    RowTokens,
    /// A number that is given.
    Given,
}

impl Structure {
    pub(crate) fn of(spec: &LossSpec) -> Self {
        Self {
            old_logp_given: spec.old_logp == OldLogp::Given,
            temperature: match spec.temperature_divides {
                _ if spec.temperature == 1.0 => Temperature::One,
                TemperatureDivides::Logits => Temperature::Logits,
                TemperatureDivides::Logp => Temperature::Logp,
            },
            kl: spec.kl.as_ref().map(|kl| kl.estimator),
            entropy_bonus: spec.entropy_coef != 0.0,
            denominator: match spec.reduction {
                Reduction::TokenMean => Denominator::Tokens,
                Reduction::SequenceMean { rows: Rows::NonEmpty } => Denominator::RowTokensFilledRows,
                Reduction::SequenceMean { .. } => Denominator::RowTokens,
                _ => Denominator::Given,
            },
        }
    }
}
