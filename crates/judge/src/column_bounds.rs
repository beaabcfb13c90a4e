//! [`DlogitsCondition`]: the bounds of a token's dlogits, one per vocabulary entry, derived in [`condition`](super::condition).
//!
//! The bounds are evaluated term by term, each over all columns: there are millions, and a loop without a branch is vectorised.

use super::condition::{
    BranchAlternative, Condition, ErrorBound, FLUSHED, GradTerms, SoftmaxErrors, grad_flushed, grad_terms, response,
    sum_error, transform_rounding,
};
use super::distillation::{self, DivergenceCondition};
use super::tolerance::Grade;
use assay_core::spec::{RatioLevel, SoftmaxRange};
use assay_reference::{Reference, ScaledSoftmax, SoftmaxColumns, Token, TokenColumns, TokenInputs};
use multiversion::multiversion;

/// The bounds `κ·u·scale + floor` of the errors of some columns.
#[derive(Clone, Debug)]
pub(super) struct ColumnErrors {
    /// The parts that `κ·u` multiplies.
    pub(super) scale: Vec<f64>,
    /// The parts that nothing multiplies.
    pub(super) floor: Vec<f64>,
}

/// The bounds of some columns of dlogits, and the parts of them that add up differently in a product with a head.
#[derive(Clone, Debug)]
pub(super) struct ColumnErrorParts {
    /// The whole bound of each column.
    pub(super) whole: ColumnErrors,
    /// The part that has one sign in all columns but the target, in proportion to their probabilities: errors of `G` and of the softmax's
    /// sum.
    pub(super) common: ColumnErrors,
    /// The part that all tokens of a sequence with a shared ratio have in common; 0 if each token has a ratio of its own.
    pub(super) of_ratio: ColumnErrors,
    /// The part of the floor that f32 flushes to 0, which has one sign too.
    pub(super) flushed: Vec<f64>,
}

/// The condition of a token's dlogits on one of its branches, as far as it does not depend on the column.
pub(super) struct DlogitsCondition<'c> {
    reference: &'c Reference<'c>,
    token: &'c Token,
    condition: &'c Condition,
    /// The size `G_abs` of the gradient's terms; `W` if the token has several ids.
    grad: f64,
    /// The token's ids, each once.
    targets: Vec<TargetColumn>,
    /// The relative error of the sum of the ids' gradients.
    summed: f64,
    /// The movement `ΔG` of the gradient by logp.
    moved: ErrorBound,
    /// The movement of the derivative by the row's log-sum-exp, of a cross-entropy.
    moved_by_row: ErrorBound,
    /// The size of the part that every column has alike, before `1/T`, of a cross-entropy that smooths labels.
    constant: f64,
    /// The part of `G` that may be flushed, in units of [`FLUSHED`].
    flushed: f64,
    /// The gradient by the log-probability of the KL penalty, if that is of another softmax than `ℓ`.
    kl: Option<SeparateKl>,
    /// The size `|E|` of the gradient by entropy.
    grad_entropy: f64,
    /// The error that rounding transformed logits adds to a gap of the softmax of `ℓ`, in units of `u`.
    rounded: f64,
    /// The error that rounding transformed logits adds to a gap of the softmax of entropy, in units of `u`.
    rounded_of_entropy: f64,
}

/// The gradient of a KL penalty whose log-probability `ℓ′` is of another softmax than that of the ratio.
#[derive(Clone, Copy)]
struct SeparateKl {
    /// The size `G′_abs` of the gradient's terms.
    grad: f64,
    /// The movement of the gradient.
    moved: ErrorBound,
    /// The error that rounding transformed logits adds to a gap, in units of `u`.
    rounded: f64,
}

/// The column of one of the token's ids.
#[derive(Clone, Copy)]
struct TargetColumn {
    id: usize,
    /// The sum `C` of `G_abs` over the places of this id.
    own: f64,
    /// The sum `R` of `G_abs` over the places of the other ids.
    rest: f64,
    /// The probability `1 − p_y` of all other columns.
    others: f64,
}

impl TargetColumn {
    /// Lists the ids of a token, whose first has gradient terms of the size `grad`.
    fn list(reference: &Reference, token: &Token, grad: f64) -> Vec<Self> {
        let first = (token.id, grad, token.probability_of_others);
        let others = reference.others(token).iter();
        let others = others.map(|other| (other.id, other.grad_logp.abs(), other.probability_of_others));
        let places: Vec<(usize, f64, f64)> = std::iter::once(first).chain(others).collect();
        let mut all: Vec<Self> = Vec::new();
        for &(id, _, others) in &places {
            if all.iter().all(|target| target.id != id) {
                let sum = |own: bool| places.iter().filter(|place| (place.0 == id) == own).map(|place| place.1).sum();
                all.push(Self { id, own: sum(true), rest: sum(false), others });
            }
        }
        all
    }
}

impl ColumnErrors {
    /// Collects the bounds of some columns.
    pub(super) fn new(bounds: Vec<ErrorBound>) -> Self {
        let (scale, floor) = bounds.into_iter().map(|bound| (bound.scale, bound.floor)).unzip();
        Self { scale, floor }
    }

    fn zeros(columns: usize) -> Self {
        Self { scale: vec![0.0; columns], floor: vec![0.0; columns] }
    }

    /// Returns the bound of column `v`.
    pub(super) fn at(&self, v: usize) -> ErrorBound {
        ErrorBound { scale: self.scale[v], floor: self.floor[v] }
    }

    fn set(&mut self, v: usize, ErrorBound { scale, floor }: ErrorBound) {
        (self.scale[v], self.floor[v]) = (scale, floor);
    }

    fn in_proportion(bound: ErrorBound, shares: &[f64]) -> Self {
        let times = |factor: f64| shares.iter().map(|share| share * factor).collect();
        Self { scale: times(bound.scale), floor: times(bound.floor) }
    }

    fn add(&mut self, other: &Self) {
        self.scale.iter_mut().zip(&other.scale).for_each(|(ours, theirs)| *ours += theirs);
        self.floor.iter_mut().zip(&other.floor).for_each(|(ours, theirs)| *ours += theirs);
    }

    fn multiply(&mut self, factors: &[f64]) {
        for values in [&mut self.scale, &mut self.floor] {
            values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
        }
    }

    /// Takes the larger scale and the larger floor of each column.
    pub(super) fn or(mut self, other: &Self) -> Self {
        let larger = |(ours, theirs): (&mut f64, &f64)| *ours = ours.max(*theirs);
        self.scale.iter_mut().zip(&other.scale).for_each(larger);
        self.floor.iter_mut().zip(&other.floor).for_each(larger);
        self
    }
}

impl<'c> DlogitsCondition<'c> {
    pub(super) fn new(
        condition: &'c Condition,
        reference: &'c Reference<'c>,
        token: &'c Token,
        alternative: &BranchAlternative,
    ) -> Self {
        let spec = reference.spec();
        let BranchAlternative { branch, coupling } = alternative;
        let on_branch =
            |inputs: &TokenInputs| reference.grad_logp(&Token { inputs: *inputs, ..*token }, branch, *coupling);
        let GradTerms { logp: by_logp, kl_logp: by_kl_logp, log_ratio: by_log_ratio } =
            grad_terms(spec, token, branch, condition.grade);
        // The gradient reaches ℓ in two ways: directly, and through the log-ratio w. A token's own ratio has a factor
        // of its slope; one that the sequence shares has the slope and the token's share `1/n` of the sum over all of
        // its tokens.
        let through_ratio = match spec.ratio.level {
            RatioLevel::Token => branch.slope * by_log_ratio,
            RatioLevel::SequenceToken => by_log_ratio,
            RatioLevel::Sequence | RatioLevel::SequenceProduct => branch.slope * token.share * condition.shared.sum,
        };
        // The sum over the sequence has an error of its own too, of which the token has the same share.
        let mut moved = response(spec, &token.inputs, condition.moves, &on_branch);
        let mut flushed = grad_flushed(spec, token, branch, condition.grade);
        if spec.ratio.level.is_shared() {
            moved.scale += branch.slope * token.share * condition.shared.moved.scale;
            moved.floor += branch.slope * token.share * condition.shared.moved.floor;
            flushed += token.share * condition.shared.flushed;
        }
        let grad_entropy = token.grad_entropy.abs();
        let rounded_at = |softmax: &ScaledSoftmax| transform_rounding(spec, softmax.stats.max);
        // The largest logit of the vocabulary may be outside a kept set.
        let rounded = rounded_at(&token.logp_softmax);
        let kl = token.has_separate_kl().then(|| {
            let on_branch = |inputs: &TokenInputs| reference.grad_kl_logp(&Token { inputs: *inputs, ..*token }, branch);
            let moved = response(spec, &token.inputs, condition.moves, &on_branch);
            SeparateKl { grad: by_kl_logp, moved, rounded: rounded_at(&token.kl_softmax) }
        });
        // The first id has the policy's and the KL's terms; the others have a cotangent each.
        let of_first = by_logp + through_ratio;
        let mut targets = TargetColumn::list(reference, token, of_first);
        let others = reference.others(token);
        // A cross-entropy's derivative by the log-sum-exp multiplies every probability, the target's too.
        let of_row = (token.weight * token.row_term.by_log_sum_exp).abs();
        for target in &mut targets {
            target.rest += of_row;
        }
        let constant = (token.weight * token.row_term.by_mean).abs() / reference.shape().vocab as f64;
        Self {
            reference,
            token,
            condition,
            grad: of_first + of_row + others.iter().map(|other| other.grad_logp.abs()).sum::<f64>(),
            targets,
            summed: sum_error(others.len() + 1 + usize::from(of_row > 0.0)),
            moved,
            moved_by_row: condition.row.slope.times(token.weight),
            constant,
            flushed: flushed + others.len() as f64,
            kl,
            grad_entropy,
            rounded,
            rounded_of_entropy: if token.entropy_softmax.range == SoftmaxRange::Vocabulary {
                rounded_at(&token.entropy_softmax)
            } else {
                rounded
            },
        }
    }

    /// Bounds the dlogits of `columns`.
    pub(super) fn whole(&self, columns: &TokenColumns) -> ColumnErrors {
        whole_and_flushed(self, columns).0
    }

    /// Bounds the dlogits of `columns`, and splits off the parts that they share.
    pub(super) fn parts(&self, columns: &TokenColumns) -> ColumnErrorParts {
        if let Some(divergence) = &self.condition.divergence {
            return self.parts_of_divergence(divergence, columns);
        }
        let (mut whole, flushed) = whole_and_flushed(self, columns);
        // The common part is what an error of `G`, of `S` or of the mean gap does to every column alike, in proportion
        // to `p_j`. It is split off because such errors cannot cancel in a product with the head's weights.
        let p = &columns.logp().probabilities;
        let [mut common, mut of_ratio] = [(); 2].map(|()| ColumnErrors::zeros(p.len()));
        let t = 1.0 / self.token.temperature();
        if self.grad != 0.0 {
            common = ColumnErrors::in_proportion(self.common().times(t), p);
            if self.token.inputs.row_log_ratio.is_some() {
                let moved = self.moved.times(t);
                of_ratio = ColumnErrors::in_proportion(moved, p);
                // A target's column moves by `1 − p_y` where the others move by `p_j`.
                for (target, y) in self.targets_in(columns) {
                    of_ratio.set(y, moved.times(target.others));
                }
            }
            // A target's share of a common error has the other sign, so that none of it counts as common.
            for (_, y) in self.targets_in(columns) {
                common.set(y, ErrorBound::default());
            }
        }
        if let Some(kl) = self.kl {
            let of_kl = ColumnErrors::in_proportion(self.common_of_kl(kl).times(t), &columns.kl().probabilities);
            common.add(&of_kl);
            for (_, y) in self.targets_in(columns) {
                common.set(y, ErrorBound::default());
            }
        }
        // The rounding of the part that all columns have alike is one error.
        let constant = self.constant * t;
        common.scale.iter_mut().for_each(|scale| *scale += constant);
        if let Some(slopes) = columns.slopes() {
            let slopes: Vec<f64> = slopes.iter().map(|slope| slope.abs()).collect();
            common.multiply(&slopes);
            of_ratio.multiply(&slopes);
        }
        self.add_row_shift(columns, &mut whole, &mut common);
        ColumnErrorParts { whole, common, of_ratio, flushed }
    }

    /// Bounds the dlogits of a divergence, and splits off what errors of sums and of the mean slope do to all columns.
    fn parts_of_divergence(&self, divergence: &DivergenceCondition, columns: &TokenColumns) -> ColumnErrorParts {
        let (weight, p) = (distillation::weight_of(self.token), &columns.logp().probabilities);
        let whole = ColumnErrors::new(divergence.columns(self.reference, self.token, columns, weight));
        let of = self.reference.divergence(self.token).expect("a divergence has a condition");
        // Nothing is known of a tail that is lost, and the errors of all columns are infinite.
        let of_all =
            if divergence.loses_tail { ErrorBound::default() } else { divergence.shared_by_columns(of, weight).0 };
        let common = ColumnErrors::in_proportion(of_all, p);
        let flushed = vec![2.0 * distillation::flushed(of, weight); p.len()];
        ColumnErrorParts { whole, common, of_ratio: ColumnErrors::zeros(p.len()), flushed }
    }

    /// Adds what errors of the row's sum and of its entropy do to all columns, in proportion to their probabilities, if they are forgiven.
    ///
    /// Given logits have no such part in their limits: their rows are compared at the shift that fits. A product with a head has one
    /// value for all columns, in which the error of the row enters once.
    fn add_row_shift(&self, columns: &TokenColumns, whole: &mut ColumnErrors, common: &mut ColumnErrors) {
        let (lane_sum, SoftmaxErrors { entropy_shift, .. }) = (self.condition.row_sum(), self.condition.softmax);
        if lane_sum == 0.0 && entropy_shift == 0.0 {
            return;
        }
        let t = 1.0 / self.token.temperature();
        let (of_sum, of_entropy) = (self.grad * lane_sum * t, self.grad_entropy * entropy_shift * t);
        let probabilities = columns.logp().probabilities.iter().zip(&columns.entropy().probabilities);
        for (v, (p, q)) in probabilities.enumerate() {
            let slope = columns.slopes().map_or(1.0, |slopes| slopes[v].abs());
            let shift = (of_sum * p + of_entropy * q) * slope;
            whole.floor[v] += shift;
            common.floor[v] += shift;
        }
        // The sum moves a target's column by `1 − p_y` or by `p_y`, as the formula has it: all of it is the column's own.
        for (_, y) in self.targets_in(columns) {
            common.floor[y] = 0.0;
        }
    }

    /// Iterates over the ids among `columns`, each with its place there.
    fn targets_in(&self, columns: &TokenColumns) -> impl Iterator<Item = (TargetColumn, usize)> {
        self.targets.iter().filter_map(|target| Some((*target, columns.place_of(target.id)?)))
    }

    /// Bounds the part that has one sign in all columns but a target: for a probability of 1, and before `1/T`.
    fn common(&self) -> ErrorBound {
        let softmax = &self.token.logp_softmax;
        let mean_gap = softmax.stats.mean_gap + self.rounded;
        let error = self.condition.softmax.mean_error / softmax.divisor + self.condition.softmax.offsets[0];
        ErrorBound {
            scale: self.grad * (1.0 + mean_gap) + self.moved.scale + self.moved_by_row.scale,
            floor: self.grad * (error + self.summed) + self.moved.floor + self.moved_by_row.floor,
        }
    }

    /// Bounds the same part of a KL penalty's own log-probability.
    fn common_of_kl(&self, SeparateKl { grad, moved, rounded }: SeparateKl) -> ErrorBound {
        let (softmax, errors) = (&self.token.kl_softmax, self.condition.softmax.vocabulary);
        let error = errors.mean_error / softmax.divisor + errors.offset + errors.separate_sum;
        ErrorBound {
            scale: grad * (1.0 + softmax.stats.mean_gap + rounded) + moved.scale,
            floor: grad * error + moved.floor,
        }
    }

    /// Adds the gradient of a KL penalty's own log-probability `ℓ′` to the bounds of `columns`, before `1/T`: that of `ℓ`, with the
    /// probabilities of the other softmax.
    fn add_kl(
        &self,
        kl: SeparateKl,
        columns: &TokenColumns,
        errors: Option<&[f64]>,
        (whole, flushed, value): (&mut ColumnErrors, &mut [f64], &mut Option<Vec<f64>>),
    ) {
        let SeparateKl { grad, moved, rounded } = kl;
        let (softmax, p) = (&self.token.kl_softmax, &columns.kl().probabilities);
        let gaps = gaps(softmax, columns.kl(), rounded);
        let common = self.common_of_kl(kl);
        let y = columns.place_of(self.token.id);
        for v in (0..p.len()).filter(|v| Some(*v) != y) {
            let error = errors.map_or(0.0, |errors| errors[v]) / softmax.divisor;
            whole.scale[v] += p[v] * (common.scale + grad * gaps[v]);
            whole.floor[v] += p[v] * (common.floor + grad * error);
            flushed[v] += grad;
        }
        value.iter_mut().flatten().zip(p).for_each(|(value, p)| *value += grad * p);
        let Some(y) = y else { return };
        if let Some(value) = value {
            value[y] += grad * self.token.kl_probability_of_others;
        }
        let (others, known) = (self.token.kl_probability_of_others, self.condition.softmax.vocabulary);
        let error = errors.map_or(0.0, |errors| errors[y]) / softmax.divisor;
        let (mean_gap, mean_error) = (softmax.stats.mean_gap + rounded, known.mean_error / softmax.divisor);
        let scale = grad * (others * (1.0 + mean_gap) + (mean_gap - p[y] * gaps[y]).max(0.0));
        let textbook = grad * (1.0 + p[y] * (gaps[y] + mean_gap));
        whole.scale[y] += if self.is_standard() { scale.max(textbook) } else { scale } + others * moved.scale;
        whole.floor[y] += grad
            * (others * mean_error + (mean_error - p[y] * error).max(0.0) + p[y] * (known.offset + known.separate_sum))
            + others * moved.floor;
        let sum_of_others = softmax.stats.log_sum.exp() * others;
        flushed[y] += grad * self.reference.shape().vocab as f64 + sum_of_others;
    }

    /// Bounds the gradients of policy and KL in a target's column, before `1/T`.
    fn target_bound(
        &self,
        TargetColumn { own, rest, others, .. }: TargetColumn,
        p: f64,
        gap: f64,
        error: f64,
    ) -> ErrorBound {
        let Self { token, moved, summed, .. } = *self;
        let softmax = &token.logp_softmax;
        let (mean_gap, mean_error) =
            (softmax.stats.mean_gap + self.rounded, self.condition.softmax.mean_error / softmax.divisor);
        // The sum of the others is Σ p_j a_j less the target's own term. It is a difference of rounded numbers, which
        // may be slightly below 0 where the target has nearly all of the mass.
        let gaps_of_others = (mean_gap - p * gap).max(0.0);
        let errors_of_others = (mean_error - p * error).max(0.0);
        let offset = self.condition.softmax.offsets[0];
        // The terms of the token's other places, which a column with an id of its own has like any other column.
        let of_rest = rest * p * (1.0 + gap + mean_gap) + others * moved.scale + p * self.moved_by_row.scale;
        let scale = own * (others * (1.0 + mean_gap) + gaps_of_others) + of_rest;
        // The textbook's G − G·p rounds G itself, and not only G·(1 − p).
        let textbook = own * (1.0 + p * (gap + mean_gap)) + of_rest;
        let sums = if self.is_standard() { own + (own + rest) * p } else { own * others + rest * p };
        ErrorBound {
            scale: if self.is_standard() { scale.max(textbook) } else { scale },
            floor: own * (others * mean_error + errors_of_others + p * offset)
                + rest * p * (error + mean_error + offset)
                + summed * sums
                + others * moved.floor
                + p * self.moved_by_row.floor,
        }
    }

    fn is_standard(&self) -> bool {
        self.condition.grade == Grade::Standard
    }
}

/// Bounds the dlogits of `columns`, and returns the part of the floor that is flushed.
#[multiversion(targets("x86_64+avx2"))]
fn whole_and_flushed(of_token: &DlogitsCondition, columns: &TokenColumns) -> (ColumnErrors, Vec<f64>) {
    let DlogitsCondition { reference, token, condition, grad, grad_entropy, rounded, .. } = *of_token;
    let spec = reference.spec();
    let (of_logp, of_entropy) = (columns.logp(), columns.entropy());
    let (p, q) = (&of_logp.probabilities, &of_entropy.probabilities);
    let (logp, entropy, base) = (&token.logp_softmax, &token.entropy_softmax, &condition.softmax);
    let scale_of_logits = spec.logits.scale.abs();
    let errors: Option<Vec<f64>> = (!condition.errors.is_empty())
        .then(|| (columns.first()..).take(p.len()).map(|j| scale_of_logits * condition.errors.at(j)).collect());
    let gaps_of_logp = gaps(logp, of_logp, rounded);

    let mut whole = ColumnErrors::zeros(p.len());
    // The flushed part, in units of FLUSHED. f32 flushes exp below its smallest normal number: once a column, and V times on the
    // target.
    let mut flushed = vec![1.0 + of_token.flushed + grad; p.len()];
    // The sizes of the dlogit's own terms, which a softcap's slope multiplies.
    let mut value = spec.logits.softcap.map(|_| vec![0.0; p.len()]);
    // The gradient by logp: p_j (G_abs(1 + a_j + ā) + ΔG), then the targets' columns.
    if grad != 0.0 {
        let common = of_token.common();
        let bounds = whole.scale.iter_mut().zip(&mut whole.floor);
        for ((scale, floor), (&p, gap)) in bounds.zip(p.iter().zip(&gaps_of_logp)) {
            *scale = p * (common.scale + grad * gap);
            *floor = p * common.floor;
        }
        for (v, error) in errors.iter().flatten().enumerate() {
            whole.floor[v] += p[v] * grad * error / logp.divisor;
        }
        value.iter_mut().flatten().zip(p).for_each(|(value, &p)| *value = grad * p);
        for (target, y) in of_token.targets_in(columns) {
            let error = errors.as_ref().map_or(0.0, |errors| errors[y]) / logp.divisor;
            whole.set(y, of_token.target_bound(target, p[y], gaps_of_logp[y], error));
            if let Some(value) = &mut value {
                value[y] = target.own * target.others + target.rest * p[y];
            }
            flushed[y] += target.own * (reference.shape().vocab as f64 - 1.0);
            // G/S itself, before Σ_{j≠y} e_j multiplies it; of another column, whose e_j is at most 1, that is no more than what
            // the output may lose.
            let sum_of_others = logp.stats.log_sum.exp() * target.others;
            flushed[y] += sum_of_others * of_token.targets.len() as f64;
        }
    }
    // The part of the mean of the logits is rounded, and so is its sum with the others.
    if of_token.constant != 0.0 {
        whole.scale.iter_mut().for_each(|scale| *scale += 2.0 * of_token.constant);
        value.iter_mut().flatten().for_each(|value| *value += of_token.constant);
    }
    if let Some(kl) = of_token.kl {
        of_token.add_kl(kl, columns, errors.as_deref(), (&mut whole, &mut flushed, &mut value));
    }
    // The entropy bonus: C_E, without 1/T.
    if grad_entropy > 0.0 {
        let is_shared = logp.is_same_function(entropy);
        let rounded = of_token.rounded_of_entropy;
        let mut spans = if is_shared { gaps_of_logp } else { gaps(entropy, of_entropy, rounded) };
        let over_vocabulary = entropy.range == SoftmaxRange::Vocabulary;
        let mean_error = if over_vocabulary { base.vocabulary.mean_error } else { base.mean_error };
        let of_sum = if over_vocabulary { base.vocabulary.separate_sum } else { 0.0 };
        // ā may lose e·a of every column, which is largest where e is the smallest number that f32 keeps.
        let (sum, lost_of_mean_gap) = (entropy.stats.log_sum.exp(), reference.shape().vocab as f64 * -FLUSHED.ln());
        let bounds = whole.scale.iter_mut().zip(&mut flushed);
        for ((scale, flushed), (&q, span)) in bounds.zip(q.iter().zip(&mut spans)) {
            *span += entropy.stats.mean_gap;
            *scale += grad_entropy * q * (*span * (1.0 + *span) + base.second_moment);
            // E/S may be flushed too, before e_j·(a_j − ā) multiplies it.
            *flushed += 1.0 + q * sum * *span + grad_entropy * (1.0 + *span + q * lost_of_mean_gap);
        }
        if let Some(errors) = &errors {
            for (v, error) in errors.iter().enumerate() {
                let error = (error + mean_error) / entropy.divisor;
                whole.floor[v] += grad_entropy * q[v] * (error * (1.0 + 2.0 * spans[v] + error) + base.spread);
            }
        }
        if of_token.is_standard() {
            // The textbook's −q_j(ln q_j + H): |ln q_j| is the gap and ln S, more than the span by this.
            let beside_gap = 2.0 + entropy.stats.log_sum + token.entropy - rounded - entropy.stats.mean_gap;
            for v in 0..p.len() {
                let (of_q, span) = (grad_entropy * q[v], spans[v]);
                whole.scale[v] += of_q * (1.0 + span) * beside_gap.max(0.0);
                whole.floor[v] += of_q * (base.offsets[1] + of_sum) * (span + beside_gap);
            }
        }
        value.iter_mut().flatten().zip(q.iter().zip(&spans)).for_each(|(value, (&q, span))| {
            *value += grad_entropy * q * span;
        });
    }
    // A transform of logits multiplies everything by its slope.
    if let Some(slopes) = columns.slopes() {
        let slopes: Vec<f64> = slopes.iter().map(|slope| slope.abs()).collect();
        whole.multiply(&slopes);
        flushed.iter_mut().zip(&slopes).for_each(|(flushed, slope)| *flushed *= slope.max(1.0));
    }
    // 1 − tanh² is rounded at the size of 1.
    if let (Some(cap), Some(value)) = (spec.logits.softcap, value) {
        for (v, value) in value.into_iter().enumerate() {
            let error = errors.as_ref().map_or(0.0, |errors| errors[v]);
            whole.scale[v] += scale_of_logits * value;
            whole.floor[v] += scale_of_logits * value * 2.0 * error / cap;
        }
    }
    // Numbers flushed before the transform of logits are multiplied by its slope, and divided by the temperature.
    let flushed_once = FLUSHED / token.temperature().min(1.0);
    let t = 1.0 / token.temperature();
    for ((scale, floor), flushed) in whole.scale.iter_mut().zip(&mut whole.floor).zip(&mut flushed) {
        *flushed *= flushed_once;
        *scale *= t;
        *floor = *floor * t + *flushed;
    }
    (whole, flushed)
}

/// Returns the gap `a_j` of each column with its rounding; 0 for a column of probability 0.
///
/// `z` is the quotient by `T` that the maximum was taken of: a product by `1/T` would leave the maximum's own gap a little below 0, which
/// is more than everything else in a row that is nearly certain.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the loop is compiled for the vector unit of its caller")]
fn gaps(softmax: &ScaledSoftmax, columns: &SoftmaxColumns, rounded: f64) -> Vec<f64> {
    let max = softmax.stats.max;
    let gap = |(&z, &p): (&f64, &f64)| {
        let gap = max - z;
        (if p == 0.0 { 0.0 } else { gap }) + rounded
    };
    columns.z.iter().zip(&columns.probabilities).map(gap).collect()
}
