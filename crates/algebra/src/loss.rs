//! The losses of tokens that may share a ratio, and their derivatives: everything between the softmaxes and dlogits, in
//! f64.
//!
//! With `x_t` the tokens' own log-ratios, `c_t` their weights and `f_t` their losses, in a row of `n`:
//!
//! ```text
//! token            w_t = x_t                    G_t = c_t (∂f_t/∂ℓ + x′_t ∂f_t/∂w)
//! sequence_token   w   = Σ x / (n + ε)          G_t = c_t (∂f_t/∂ℓ + ∂f_t/∂w)
//! sequence         w   = Σ x / (n + ε)          G_t = c_t ∂f_t/∂ℓ + x′_t Σ_u c_u ∂f_u/∂w / (n + ε)
//! sequence_product w   = Σ x                    G_t = c_t ∂f_t/∂ℓ + x′_t Σ_u c_u ∂f_u/∂w
//! ```

use super::arithmetic::Immediate;
use super::objective::{Held, Token, TokenLoss, own_log_ratio, sum, token_loss, unless};
use super::structure::{Input, Number, Numbers, Structure};
use assay_core::spec::{LossSpec, RatioLevel};

/// What is known of an unmasked token before its logits are looked at.
#[derive(Clone, Copy)]
pub struct Known {
    /// `A`
    pub advantage: f64,
    /// What the reduction multiplies the token's loss by.
    pub weight: f64,
    /// What that of the KL penalty multiplies it by, over `weight`.
    pub kl_share: f64,
    /// The place of the token, to look arrays up.
    pub at: (usize, usize),
}

/// The same with what its logits say.
#[derive(Clone, Copy)]
pub struct Scored {
    /// What was known before.
    pub known: Known,
    /// Log-probability of its id.
    pub logp: f64,
    /// Entropy of its distribution, nats.
    pub entropy: f64,
}

/// What is left of a token besides its dlogits.
pub struct Graded {
    /// Its loss.
    pub token: TokenLoss<f64, bool>,
    /// Log-probability of its id.
    pub logp: f64,
    /// Entropy of its distribution, nats.
    pub entropy: f64,
    /// `∂loss/∂logp`
    pub grad_logp: f64,
    /// Log-probabilities of its other ids, where the spec asks for them.
    pub logp_of_others: Vec<f64>,
}

impl Graded {
    /// With log-probabilities of other ids, and their cotangents, which are terms of the loss too.
    pub fn add_others(&mut self, others: impl Iterator<Item = (f64, f64)>) {
        for (logp, dlogp) in others {
            self.token.loss += dlogp * logp;
            self.token.reduced += dlogp * logp;
            self.logp_of_others.push(logp);
        }
    }
}

/// The loss of a spec.
pub struct Loss {
    structure: Structure,
    numbers: Numbers<f64>,
}

impl Loss {
    /// That of `spec`, whose structure is given, on `[B, T]` tokens.
    pub fn of(spec: &LossSpec, structure: Structure, extents: [usize; 2]) -> Self {
        let numbers = structure.numbers().into_iter().map(|number| (number, number.of(spec, extents)));
        Self { structure, numbers: Numbers::new(numbers) }
    }

    /// The tokens of a row; or one of them, where none depends on others. `input` gives the arrays that the structure
    /// reads.
    pub fn grade(&self, row: &[Scored], input: impl Fn(Input, (usize, usize)) -> Option<f64>) -> Vec<Graded> {
        let Self { structure, numbers } = self;
        let (on, structure) = (&mut Immediate, *structure);
        let old_logp = |token: &Scored| input(Input::OldLogp, token.known.at).unwrap_or(token.logp);
        let own: Vec<Held<f64, bool>> = row
            .iter()
            .map(|token| own_log_ratio(on, structure, numbers, [token.logp, old_logp(token), token.known.advantage]))
            .collect();
        let share = match structure.level {
            RatioLevel::Token => None,
            RatioLevel::Sequence | RatioLevel::SequenceToken => {
                Some((row.len() as f64 + numbers.get(Number::RatioEpsilon)).recip())
            }
            RatioLevel::SequenceProduct => Some(1.0),
        };
        let of_row = share.map(|share| share * own.iter().map(|x| x.value).sum::<f64>());
        let log_weight = {
            let x = |token: &Scored| (token.logp - old_logp(token)).clamp(-20.0, 20.0);
            let of_sampler = row.first().and_then(|token| input(Input::LogWeight, token.known.at));
            of_sampler.map(|of_sampler| of_sampler + row.iter().map(x).sum::<f64>())
        };
        let near = structure.off_policy_mask.then(|| {
            let fallen = |token: &Scored| Some(input(Input::Behaviour, token.known.at)? - token.logp);
            let scored = row.iter().filter_map(fallen).filter(|difference| !difference.is_nan());
            scored.sum::<f64>() / row.len() as f64 <= numbers.get(Number::OffPolicyThreshold)
        });

        let losses: Vec<TokenLoss<f64, bool>> = row
            .iter()
            .zip(&own)
            .map(|(scored @ Scored { known, logp, .. }, own)| {
                let token = Token {
                    logp: *logp,
                    old_logp: old_logp(scored),
                    advantage: known.advantage,
                    log_ratio: of_row.unwrap_or(own.value),
                    own: *own,
                    ref_logp: input(Input::RefLogp, known.at),
                    rollout_logp: input(Input::RolloutLogp, known.at),
                    policy_weight: input(Input::PolicyWeight, known.at),
                    kl_weight: input(Input::KlWeight, known.at),
                    kl_share: structure.kl_share().then_some(known.kl_share),
                    selected: input(Input::Selected, known.at),
                    log_weight,
                    on_policy: near.map(|near| near || known.advantage >= 0.0),
                };
                token_loss(on, structure, numbers, &token)
            })
            .collect();
        let owed = row.iter().zip(&losses);
        let owed = owed.map(|(token, loss)| token.known.weight * loss.by_log_ratio.unwrap_or(0.0));
        let owed: f64 = owed.sum();

        let graded = row.iter().zip(&own).zip(losses).map(|((&Scored { known, logp, entropy }, own), token)| {
            let grad_logp = match (structure.level, share) {
                (RatioLevel::Sequence | RatioLevel::SequenceProduct, Some(share)) => {
                    known.weight * token.by_logp.unwrap_or(0.0) + unless(on, own.held, share * owed)
                }
                (RatioLevel::SequenceToken, _) => known.weight * sum(on, token.by_logp, token.by_log_ratio),
                _ => known.weight * token.grad(on, *own),
            };
            Graded { token, logp, entropy, grad_logp, logp_of_others: Vec::new() }
        });
        graded.collect()
    }
}
