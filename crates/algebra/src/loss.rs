//! The losses of tokens that may share a ratio, and their derivatives: everything between the softmaxes and dlogits, in f64. The
//! formulas are those of [`objective`](super::objective).

use super::arithmetic::Immediate;
use super::cross_entropy::{WholeRow, row_term};
use super::objective::{LossInputs, TokenArray, TokenArrays, TokenLoss, VESPO_LOG_RATIO, own_slope, token_loss};
use super::structure::{SpecNumber, SpecNumbers, Structure, TokenInput};
use super::term::{sum, unless};
use assay_core::spec::{LossSpec, RatioLevel};

/// An unmasked token before its logits are read: its advantage and its weights in the loss.
#[derive(Clone, Copy)]
pub struct WeightedToken {
    /// Advantage `A` of the token.
    pub advantage: f64,
    /// Factor of the token's loss in the reduction, `∂loss/∂token_loss`.
    pub weight: f64,
    /// Factor of the KL penalty in its own reduction, divided by `weight`.
    pub kl_share: f64,
    /// Position `[b,t]` of the token, by which arrays are read.
    pub at: (usize, usize),
}

/// A token whose logits have been read.
#[derive(Clone, Copy)]
pub struct ScoredToken {
    /// The token with its weights.
    pub weighted: WeightedToken,
    /// Log-probability of the sampled id, nats.
    pub logp: f64,
    /// Log-probability that the KL penalty reads, if it is another than `logp`, nats.
    pub kl_logp: Option<f64>,
    /// Entropy of the token's distribution, nats.
    pub entropy: f64,
    /// Values of the whole row; `None` unless a cross-entropy has terms that read them.
    pub row: Option<WholeRow<f64>>,
}

/// Every result of a token except its dlogits.
pub struct TokenEvaluation {
    /// The loss with its derivatives and metrics.
    pub token: TokenLoss<f64, bool>,
    /// Log-probability of the sampled id, nats.
    pub logp: f64,
    /// Entropy of the token's distribution, nats.
    pub entropy: f64,
    /// Derivative `∂loss/∂logp` of the whole loss.
    pub grad_logp: f64,
    /// Derivative of the whole loss by the log-probability that the KL penalty alone reads; 0 if it reads `logp`.
    pub grad_kl_logp: f64,
    /// Derivative of the whole loss by the row's log-sum-exp, besides that through `logp`.
    pub grad_log_sum_exp: f64,
    /// Derivative of the whole loss by the mean of the row's logits.
    pub grad_mean_logit: f64,
    /// Log-probabilities of the token's other ids, nats, if the spec asks for several ids a token.
    pub logp_of_others: Vec<f64>,
}

impl TokenEvaluation {
    /// Adds the token's other ids, given as `(logp, cotangent of logp)`: their products are terms of the loss.
    pub fn add_others(&mut self, others: impl Iterator<Item = (f64, f64)>) {
        for (logp, dlogp) in others {
            self.token.loss += dlogp * logp;
            self.token.reduced += dlogp * logp;
            self.logp_of_others.push(logp);
        }
    }
}

/// The loss of a spec with its numbers, ready to evaluate tokens.
///
/// ```
/// use assay_algebra::loss::{LossEvaluator, ScoredToken, WeightedToken};
/// use assay_algebra::structure::{TokenInput, Structure};
/// use assay_core::spec::LossSpec;
///
/// // PPO-clip with ε = 0.2: one token of advantage 2 whose probability has grown by a tenth.
/// let spec = LossSpec::default();
/// let evaluator = LossEvaluator::new(&spec, Structure::from_spec(&spec), [1, 1]);
/// let weighted = WeightedToken { advantage: 2.0, weight: 1.0, kl_share: 1.0, at: (0, 0) };
/// let score = ScoredToken { weighted, logp: 0.55_f64.ln(), kl_logp: None, entropy: 0.69, row: None };
/// let old_logp = 0.5_f64.ln();
/// let tokens = evaluator.evaluate(&[score], |input, _| match input {
///     TokenInput::OldLogp => old_logp,
///     other => unreachable!("PPO-clip reads no {}", other.name()),
/// });
/// // The ratio is 1.1, within the clip: the loss −r·A follows it, and so does its derivative by logp.
/// assert!((tokens[0].token.loss + 2.2).abs() < 1e-12);
/// assert!((tokens[0].grad_logp + 2.2).abs() < 1e-12);
/// ```
pub struct LossEvaluator {
    structure: Structure,
    numbers: SpecNumbers<f64>,
}

impl LossEvaluator {
    /// Reads the numbers of `spec`, whose structure is given, for a batch of `[B,T]` tokens.
    pub fn new(spec: &LossSpec, structure: Structure, extents: [usize; 2]) -> Self {
        let numbers = structure.numbers().into_iter().map(|number| (number, number.value_in(spec, extents)));
        Self { structure, numbers: SpecNumbers::new(numbers) }
    }

    /// Evaluates the unmasked tokens of a sequence, or one of them alone if none depends on others. `input` gives the elements of
    /// the arrays that the structure reads.
    pub fn evaluate(
        &self,
        row: &[ScoredToken],
        input: impl Fn(TokenInput, (usize, usize)) -> f64,
    ) -> Vec<TokenEvaluation> {
        let Self { structure, numbers } = self;
        let (on, structure) = (&mut Immediate, *structure);
        let gathered = row.iter().map(|token| {
            let WeightedToken { advantage, kl_share, at, .. } = token.weighted;
            let arrays = TokenArrays::load(structure, |array| match array {
                TokenArray::Advantage => advantage,
                TokenArray::KlShare => kl_share,
                TokenArray::Input(wanted) => input(wanted, at),
            });
            LossInputs { kl_logp: token.kl_logp, ..LossInputs::new(on, structure, numbers, token.logp, arrays) }
        });
        let mut tokens: Vec<LossInputs<f64, bool>> = gathered.collect();

        // The tokens of a sequence share its log-ratio, VESPO's weight, and whether the off-policy mask keeps it. The
        // log-ratio is the mean of the tokens', or their sum, and `share` is its derivative by one of them.
        let share = match structure.level {
            RatioLevel::Token => None,
            RatioLevel::Sequence | RatioLevel::SequenceToken => {
                Some((row.len() as f64 + numbers.get(SpecNumber::RatioEpsilon)).recip())
            }
            RatioLevel::SequenceProduct => Some(1.0),
        };
        let log_ratio = share.map(|share| share * tokens.iter().map(|token| token.own.value).sum::<f64>());
        let [least, most] = VESPO_LOG_RATIO;
        let log_weight = tokens.first().and_then(|token| token.arrays.sampler_log_weight).map(|sampler| {
            sampler + tokens.iter().map(|token| (token.logp - token.old_logp).clamp(least, most)).sum::<f64>()
        });
        let near = structure.off_policy_mask.then(|| {
            // The mean counts every token of the sequence: one that the behaviour policy did not score has fallen by 0.
            let fallen = tokens.iter().filter_map(|token| Some(token.arrays.behaviour_logp? - token.logp));
            let scored = fallen.filter(|difference| !difference.is_nan());
            scored.sum::<f64>() / row.len() as f64 <= numbers.get(SpecNumber::OffPolicyThreshold)
        });
        for token in &mut tokens {
            token.log_ratio = log_ratio.unwrap_or(token.log_ratio);
            token.log_weight = log_weight;
            // A token with an advantage ≥ 0 is kept even where the sequence has moved too far.
            token.on_policy = near.map(|near| near || token.arrays.advantage >= 0.0);
        }

        let losses: Vec<TokenLoss<f64, bool>> =
            tokens.iter().map(|token| token_loss(on, structure, numbers, token)).collect();

        // The derivative of all losses together by the log-ratio that they share.
        let shared: f64 =
            row.iter().zip(&losses).map(|(token, loss)| token.weighted.weight * loss.by_log_ratio.unwrap_or(0.0)).sum();
        let evaluated = row.iter().zip(&tokens).zip(losses).map(|((score, inputs), mut token)| {
            let &ScoredToken { weighted: WeightedToken { weight, .. }, logp, entropy, .. } = score;
            let grad_kl_logp = weight * token.by_kl_logp.unwrap_or(0.0);
            // The level decides how the derivative by the shared log-ratio reaches a token: as its share of the sum
            // over the sequence, or by the token's own log-probability alone.
            let grad_logp = match (structure.level, share) {
                (RatioLevel::Sequence | RatioLevel::SequenceProduct, Some(share)) => {
                    weight * token.by_logp.unwrap_or(0.0) + unless(on, inputs.own.replaced, share * shared)
                }
                (RatioLevel::SequenceToken, _) => weight * sum(on, token.by_logp, token.by_log_ratio),
                _ => weight * own_slope(on, &token, inputs),
            };
            // The terms of the row have the token's own weight, as the policy term has.
            let (mut grad_log_sum_exp, mut grad_mean_logit) = (0.0, 0.0);
            if let Some(row) = score.row {
                let own = inputs.arrays.policy_weight.unwrap_or(1.0);
                if own != 0.0 {
                    let term = row_term(on, structure, numbers, row);
                    token.loss += own * term.value;
                    token.reduced += own * term.value;
                    grad_log_sum_exp = weight * own * term.by_log_sum_exp;
                    grad_mean_logit = weight * own * term.by_mean;
                }
            }
            TokenEvaluation {
                token,
                logp,
                entropy,
                grad_logp,
                grad_kl_logp,
                grad_log_sum_exp,
                grad_mean_logit,
                logp_of_others: Vec::new(),
            }
        });
        evaluated.collect()
    }
}
