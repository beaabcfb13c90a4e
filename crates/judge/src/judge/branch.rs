//! [`BranchChoice`]: the branches of the loss that rounding may have put a token on, and the search for the one that fits best.
//!
//! A loss with a clip or a maximum is smooth between its kinks. Near a kink rounding decides the side, and either side is right; at
//! the kink itself every gradient between the two is. A token is held to one choice for its loss and its gradient alike.

use super::dlogits::{CandidateRow, RowTallies, compare_rows};
use super::gates::{GateLimit, StoredDtype};
use super::outputs::CandidateOutputs;
use super::token::JudgedToken;
use crate::U;
use crate::column_bounds::{ColumnErrors, DlogitsCondition};
use crate::condition::{BranchAlternative, ErrorBound};
use crate::distillation;
use crate::gate::Output;
use crate::metric::Tally;
use crate::tolerance::Limits;
use assay_reference::{Reference, TokenColumns};

/// The shares of a second branch's gradient that automatic differentiation may take at a kink.
///
/// It takes halves of halves: of two equal arguments of `minimum`, and of a value at the bound of `clip`.
const SHARES_AT_A_KINK: [f64; 3] = [0.25, 0.5, 0.75];

/// A branch that a token may be on, or a point at the kink between its own branch and another.
#[derive(Clone, Copy)]
struct BranchChoice<'c> {
    on: &'c BranchAlternative,
    /// At a kink: the other branch, and the share of its gradient.
    towards: Option<(&'c BranchAlternative, f64)>,
    /// The token's loss on the branch.
    loss: f64,
}

/// The fit of one candidate's token to the branch that suits it best.
pub(super) struct BestBranch {
    pub(super) token_loss: Tally,
    pub(super) row: RowTallies,
    /// The largest difference between the loss on a branch that fits and the loss on the reference's own: the scalar loss may be off
    /// by so much for this token.
    pub(super) kink: f64,
}

impl<'c> BranchChoice<'c> {
    /// Lists the choices of a token: its own branch first, the others, then the kinks between its own and each other.
    ///
    /// There is a kink only where the two losses meet within the limits. Where the loss jumps, as when a token may be selected or
    /// not, no gradient between two branches is right.
    fn choices(reference: &Reference, token: &'c JudgedToken, limits: &Limits) -> Vec<Self> {
        let alternatives = &token.condition.alternatives;
        let choice = |on: &'c BranchAlternative| {
            let of_row = token.token.of_others + token.token.row_term.value;
            let loss = reference.token_loss(&token.token.inputs, &on.branch) + of_row;
            Self { on, towards: None, loss }
        };
        let own = choice(&alternatives[0]);
        let others: Vec<Self> = alternatives[1..].iter().map(choice).collect();
        let ErrorBound { scale, floor } = token.condition.token_loss;
        let apart = limits.kappa(Output::TokenLoss) * U * scale + floor;
        let mut all = vec![own];
        all.extend(&others);
        for other in others.iter().filter(|other| (other.loss - own.loss).abs() <= apart) {
            all.extend(SHARES_AT_A_KINK.map(|share| Self { towards: Some((other.on, share)), ..own }));
        }
        all
    }

    /// Prepares the token's dlogits on this choice: everything that does not depend on the vocabulary entry.
    fn dlogits(&self, reference: &'c Reference, token: &'c JudgedToken) -> BranchDlogits<'c> {
        // The gradient of the loss by ℓ on a branch, with the sequence's ratio on the side that belongs to it.
        let grads = |on: &BranchAlternative| {
            let of_kl = reference.grad_kl_logp(token.token, &on.branch);
            [reference.grad_logp(token.token, &on.branch, on.coupling), of_kl]
        };
        let condition = |on| DlogitsCondition::new(&token.condition, reference, token.token, on);
        let mut dlogits = BranchDlogits { grads: grads(self.on), condition: condition(self.on), towards: None };
        // A point at a kink is a convex combination of two gradients; its error may be that of either branch.
        if let Some((other, share)) = self.towards {
            for (grad, other) in dlogits.grads.iter_mut().zip(grads(other)) {
                *grad += share * (other - *grad);
            }
            dlogits.towards = Some(condition(other));
        }
        dlogits
    }
}

/// The dlogits of a token on one choice, as far as they do not depend on the vocabulary entry.
pub(super) struct BranchDlogits<'c> {
    /// The gradient `∂loss/∂ℓ`, and that of the KL penalty's own log-probability, if it has one.
    grads: [f64; 2],
    condition: DlogitsCondition<'c>,
    /// At a kink, the conditions of the other branch.
    towards: Option<DlogitsCondition<'c>>,
}

impl BranchDlogits<'_> {
    /// Bounds the error of an id's dlogit that a relative error of the row's sum makes: `(|G| + |∂loss/∂lse|)·p_y/T` of it.
    pub(super) fn share_of_sum(&self, token: &JudgedToken) -> f64 {
        let of_row = token.token.weight * token.token.row_term.by_log_sum_exp;
        (self.grads[0].abs() + of_row.abs()) * (1.0 - token.token.probability_of_others) / token.token.temperature()
    }

    /// Evaluates the exact dlogits of `columns`, and how far each may be off.
    pub(super) fn evaluate(
        &self,
        reference: &Reference,
        token: &JudgedToken,
        columns: &TokenColumns,
    ) -> (Vec<f64>, ColumnErrors) {
        if let Some(divergence) = &token.condition.divergence {
            let weight = distillation::weight_of(token.token);
            let bounds = ColumnErrors::new(divergence.columns(reference, token.token, columns, weight));
            return (reference.dlogits_of(columns, token.token, self.grads), bounds);
        }
        let bounds = self.condition.whole(columns);
        let bounds = match &self.towards {
            Some(other) => bounds.or(&other.whole(columns)),
            None => bounds,
        };
        (reference.dlogits_of(columns, token.token, self.grads), bounds)
    }
}

/// Finds for each candidate the choice that the loss and the dlogits of `token` fit best, together.
pub(super) fn best_branches(
    reference: &Reference,
    candidates: &[CandidateOutputs],
    token: &JudgedToken,
    limits: &Limits,
) -> Vec<BestBranch> {
    let choices = BranchChoice::choices(reference, token, limits);
    // All candidates are compared at once: exact values and limits are the expensive part, and are the same for all of them.
    let rows = candidates.iter().map(|candidate| CandidateRow::new(token, candidate, reference, limits));
    let rows = match rows.collect::<Option<Vec<_>>>() {
        Some(rows) => {
            let dlogits: Vec<_> = choices.iter().map(|choice| choice.dlogits(reference, token)).collect();
            compare_rows(reference, token, &rows, &dlogits)
        }
        None => candidates.iter().map(|_| choices.iter().map(|_| RowTallies::default()).collect()).collect(),
    };
    let best = |(candidate, rows)| best_branch(candidate, token, &choices, rows, limits);
    candidates.iter().zip(rows).map(best).collect()
}

/// Picks the choice on which the worst error / limit of token loss and dlogits row is smallest.
fn best_branch(
    candidate: &CandidateOutputs,
    token: &JudgedToken,
    choices: &[BranchChoice],
    rows: Vec<RowTallies>,
    limits: &Limits,
) -> BestBranch {
    let mut fits = Vec::with_capacity(choices.len());
    for (choice, row) in choices.iter().zip(rows) {
        let mut token_loss = Tally::default();
        if let Some(values) = candidate.token_loss {
            let limit = GateLimit::elementwise(Output::TokenLoss, StoredDtype::scalar(values.dtype()), limits);
            let expected = (choice.loss, token.condition.token_loss);
            limit.compare(&mut token_loss, token, token.at(), expected, values.at(token.b, token.t));
        }
        fits.push((token_loss.badness().max(row.badness()), choice.loss, token_loss, row));
    }
    // The loss of a token that fits no choice may be that of any.
    let any_fits = fits.iter().any(|(badness, ..)| *badness <= 1.0);
    let possible = fits.iter().filter(|(badness, ..)| *badness <= 1.0 || !any_fits);
    let kink = possible.map(|(_, loss, ..)| (loss - choices[0].loss).abs()).fold(0.0, f64::max);
    // Of equal fits the first is taken, so that the reference's own branch wins.
    let best = fits.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
    let (_, _, token_loss, row) = best.expect("the reference's own branch is always a choice");
    BestBranch { token_loss, row, kink }
}
