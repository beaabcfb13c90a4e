//! Cross-entropy as `PyTorch` 2.15 has it, with what fused kernels add: a z-loss, which Liger 0.8.5 calls `lse_square_scale`, a
//! softcap, and a scale of the logits. Functions of optax 0.2.8, Transformers 5.23.0, `MaxText` 0.2.5, Tokamax 0.0.12 and Apple's
//! `cut_cross_entropy` 25.1.1 have options of these names too, or their callers have them.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss};
use crate::spec::{LogitsTransform, LossSpec, LossTerms, Reduction, TokenWeights};

pub(super) const FUNCTIONS: &[&str] = &[
    "cross_entropy",
    "linear_cross_entropy",
    "fixed_cross_entropy",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "LigerCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyFunction",
    "cross_entropy_with_logits",
    TOKAMAX,
];

/// Tokamax's function, whose reduction is a sum unless it is given.
const TOKAMAX: &str = "linear_softmax_cross_entropy_loss";

const KNOWN: &str = "
    ignore_index label_smoothing logit_scale lse_square_scale reduction size_average softcap temperature weight z_loss
";

/// The reduction of token losses, by `PyTorch`'s name.
#[derive(Clone, Copy)]
pub(super) enum TokenReduction {
    Mean,
    Sum,
    None,
}

impl TokenReduction {
    /// Returns the reduction of a spec.
    pub(super) fn reduction(self) -> Reduction {
        match self {
            TokenReduction::Mean => Reduction::TokenMean,
            TokenReduction::Sum | TokenReduction::None => Reduction::Normalizer(1.0),
        }
    }

    /// Returns weights where there is no reduction: each token's loss then has a cotangent, which is its weight in a sum.
    pub(super) fn token_weights(self) -> Option<TokenWeights> {
        matches!(self, TokenReduction::None).then_some(TokenWeights { applies_to: LossTerms::Policy })
    }
}

pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    _: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let words = [("mean", TokenReduction::Mean), ("sum", TokenReduction::Sum), ("none", TokenReduction::None)];
    let usual = if function == TOKAMAX { TokenReduction::Sum } else { TokenReduction::Mean };
    let reduction = reader.word("reduction", usual, &words)?;
    reader.off("weight", "the target is one class, and all classes weigh the same")?;
    reader.off("size_average", "it is PyTorch's old name of `reduction`")?;
    let spec = LossSpec {
        logits: LogitsTransform {
            scale: reader.number("logit_scale", 1.0)?,
            softcap: reader.number_or_null("softcap", None)?,
            bias: false,
        },
        temperature: reader.temperature("temperature")?,
        reduction: reduction.reduction(),
        token_weights: reduction.token_weights(),
        ..LossSpec::cross_entropy(reader.number("label_smoothing", 0.0)?, z_loss(reader)?)
    };
    Ok(ProjectLoss::new(spec, KNOWN))
}

/// Reads the weight of the squared log-sum-exp under either of its names.
fn z_loss(reader: &OptionReader) -> Result<f64, PresetError> {
    let both = reader.is_given("z_loss") && reader.is_given("lse_square_scale");
    if both {
        return Err(reader.refuse("z_loss", "none beside `lse_square_scale`, Liger's name of it"));
    }
    reader.number("lse_square_scale", reader.number("z_loss", 0.0)?)
}
