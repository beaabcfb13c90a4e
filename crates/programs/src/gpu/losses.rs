//! The losses of tokens between the statistics of their rows and their gradients, a sequence by each CTA.
//!
//! The arithmetic is that of [`assay_algebra::tape`], which all kernels share. A loss whose tokens depend on each other has sums over
//! its sequence in the middle of it, and a CTA has more tokens than threads. So it walks its sequence once for each sum, computing of
//! each token no more than that sum waits for, and once more for the results:
//!
//! ```text
//! for each sum of the tape     for each token: softmax, the operations that lead to the sum; add it up; threads meet
//! results                      for each token: all operations, with the sums known
//! ```

use std::collections::BTreeMap;
use std::f64::consts::LN_2;

use super::batch::{
    BatchArray, BatchExtent, BatchForm, BatchKernel, BatchWriter, CtaThreads, FOLDS_OF_WEIGHTS, InputArrays,
    NumberArray, SUMS, SequenceArrays, TermFactors, entropy_factor,
};
use super::folds::store_8;
use crate::two_pass::{PER_TOKEN, Statistic};
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::softmax::{SoftmaxStatistics, SoftmaxSums};
use assay_algebra::structure::{GapRate, SpecNumber, Structure, TemperaturePlace, TokenInput};
use assay_algebra::tape::{Tape, TapeOperation, TapeOperator, token_losses};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PtxBuilder, PtxTarget, PtxValue};

/// The columns of a token's record, from which [`dlogits`](super::two_pass::dlogits) makes its gradient for whatever cotangents.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TokenRecord {
    /// The largest logit of the row.
    Max,
    /// The derivative `∂loss/∂logp` of the token.
    GradLogp,
    /// `1/(S·T)` of the softmax that logp is of.
    LogpShare,
    /// `s` of it: the sum without the target.
    Others,
    /// 1 where the token counts, else 0.
    Counts,
    /// The derivative `∂loss/∂entropy`, without the factor `1/T`.
    Entropy,
    /// `1/(S·T)` of the softmax that entropy is of.
    EntropyShare,
    /// The mean gap of that softmax.
    MeanGap,
}

/// The softmaxes of a token: of the one that entropy is of, and of that of logp.
struct TokenSoftmaxes {
    max: PtxValue<f32>,
    /// The factor of gaps, where it is not 1.
    tempered: Option<PtxValue<f32>>,
    of_entropy: SoftmaxStatistics<PtxValue<f32>>,
    of_logp: SoftmaxStatistics<PtxValue<f32>>,
    logp: PtxValue<f32>,
}

/// The arrays, numbers and sums from which the kernel computes its tokens.
struct SequenceEvaluation {
    structure: Structure,
    sequences: SequenceArrays,
    numbers: NumberArray,
    inputs: InputArrays,
    statistics: BatchArray,
    /// The sequence whose advantage they have.
    owner: PtxValue<u32>,
    /// The number of tokens of the sequence that count.
    row_count: PtxValue<f32>,
    weights: TermFactors,
    tape: Tape,
    /// The sums over the sequence so far, by their places on the tape.
    known: BTreeMap<usize, TapeValue>,
}

/// A result of the tape within the kernel.
#[derive(Clone, Copy)]
enum TapeValue {
    Number(PtxValue<f32>),
    Truth(PtxValue<bool>),
}

impl TapeValue {
    fn number(self) -> PtxValue<f32> {
        match self {
            Self::Number(value) => value,
            Self::Truth(_) => panic!("a tape computes with a truth value as if it were a number"),
        }
    }

    fn truth(self) -> PtxValue<bool> {
        match self {
            Self::Truth(value) => value,
            Self::Number(_) => panic!("a tape decides by a number as if it were a truth value"),
        }
    }
}

/// A token in a walk.
#[derive(Clone, Copy)]
struct CountedToken {
    token: PtxValue<u32>,
    /// 1, or NaN where it is invalid.
    counted: PtxValue<f32>,
}

/// The arrays that the kernel writes.
struct LossArrays {
    /// Logp, entropy and loss of each token.
    of_token: [BatchArray; 3],
    record: BatchArray,
    /// The sums of each sequence's losses and metrics.
    sums: BatchArray,
}

/// Writes losses, metrics and records of all tokens, from the statistics of their rows.
pub(crate) fn losses(target: PtxTarget, structure: Structure, form: BatchForm, threads: u32) -> BatchKernel {
    let mut writer = BatchWriter::new("grpo_losses", target, structure, threads);
    let sequences = SequenceArrays::declare(&mut writer);
    let numbers = NumberArray::declare(&mut writer);
    let normalizer = writer.f32s("normalizer", BatchExtent::Batch);
    let inputs = InputArrays::declare(&mut writer, form);
    let statistics = writer.input("statistics", DeviceDtype::F32, BatchExtent::Token, PER_TOKEN);
    let of_token =
        ["logp", "entropy", "token_loss"].map(|name| writer.output(name, DeviceDtype::F32, BatchExtent::Token, 1));
    let record = writer.output("record", DeviceDtype::F32, BatchExtent::Token, PER_TOKEN);
    let sums = writer.output("sums", DeviceDtype::F32, BatchExtent::SequenceAndRest, SUMS);
    let written = LossArrays { of_token, record, sums };

    // The tape is the loss as a list of operations; sums over the sequence are the points at which threads must meet.
    let tape = token_losses(structure, |tape, number| tape.input(number.name()));
    let of_sequence: Vec<usize> = (0..tape.operations().len()).filter(|&place| is_row_sum(&tape, place)).collect();

    let on = &mut writer.on;
    let mut threads = CtaThreads::new(on, threads, FOLDS_OF_WEIGHTS + (of_sequence.len() + SUMS) as u32);
    let span = sequences.span(on, threads.cta);
    let weights = TermFactors::new(on, structure, &mut threads, sequences, &numbers, normalizer);
    let owner = sequences.owner(on, threads.cta);
    let row_count = sequences.count(on, threads.cta);
    let mut tokens = SequenceEvaluation {
        structure,
        sequences,
        numbers,
        inputs,
        statistics,
        owner,
        row_count,
        weights,
        tape,
        known: BTreeMap::new(),
    };

    // Each sum over the sequence, in the order of the tape: a later one may wait for an earlier.
    for place in of_sequence {
        let total = on.variable(0.0);
        tokens.each(on, &threads, span, |on, at, hidden| {
            let counts = on.not(hidden);
            on.when(counts, |on| {
                let softmaxes = tokens.softmaxes(on, at);
                // Only the operations that lead to this sum are written, and nothing before an earlier sum is
                // computed again.
                let summand = operands(&tokens.tape, place)[0];
                let computed = tokens.compute(on, &[summand], at, &softmaxes);
                let next = PtxBuilder::add(on, total, computed[&summand].number());
                on.set(total, next);
            });
        });
        let total = threads.sum(on, total);
        tokens.known.insert(place, TapeValue::Number(total));
    }

    // With all sums known, one more walk computes results, records and the sums for loss and metrics.
    let totals: [PtxValue<f32>; SUMS] = std::array::from_fn(|_| on.variable(0.0));
    tokens.each(on, &threads, span, |on, at, hidden| {
        on.when(hidden, |on| written.hide(on, at.token));
        let counts = on.not(hidden);
        on.when(counts, |on| {
            let terms = tokens.results(on, &written, at);
            for (total, term) in totals.into_iter().zip(terms) {
                let next = PtxBuilder::add(on, total, term);
                on.set(total, next);
            }
        });
    });
    let totals = totals.map(|total| threads.sum(on, total));
    let first = threads.is_first(on);
    on.when(first, |on| {
        let to = written.sums.at(on, threads.cta);
        store_8(on, to, totals);
    });
    writer.finish(BatchExtent::SequenceAndRest)
}

impl LossArrays {
    /// Writes zeros for a masked token.
    fn hide(&self, on: &mut PtxBuilder, token: PtxValue<u32>) {
        for array in self.of_token {
            let to = array.at(on, token);
            on.store(to, 0.0);
        }
        let to = self.record.at(on, token);
        store_8(on, to, [0.0.into(); 8]);
    }
}

/// `factor · term`; 0 where the factor is, whatever the term.
fn weighed(on: &mut PtxBuilder, factor: PtxValue<f32>, term: PtxValue<f32>) -> PtxValue<f32> {
    let product = PtxBuilder::mul(on, factor, term);
    let nothing = on.equal(factor, 0.0);
    on.select(nothing, 0.0, product)
}

fn is_row_sum(tape: &Tape, place: usize) -> bool {
    matches!(tape.operations()[place], TapeOperation::Apply(TapeOperator::RowSum, _))
}

/// The places that an operation reads.
fn operands(tape: &Tape, place: usize) -> &[usize] {
    match &tape.operations()[place] {
        TapeOperation::Apply(_, operands) => operands,
        TapeOperation::Input(_) | TapeOperation::Constant(_) => &[],
    }
}

/// The operations that lead to `wanted`, in order; what stands before a sum over the sequence is not among them.
fn needed(tape: &Tape, wanted: &[usize]) -> Vec<usize> {
    let mut is_needed = vec![false; tape.operations().len()];
    for &place in wanted {
        is_needed[place] = true;
    }
    // Operands come before their operation, so one pass from the end marks everything that is needed.
    for place in (0..is_needed.len()).rev() {
        if is_needed[place] && !is_row_sum(tape, place) {
            for &operand in operands(tape, place) {
                is_needed[operand] = true;
            }
        }
    }
    (0..is_needed.len()).filter(|&place| is_needed[place]).collect()
}

impl SequenceEvaluation {
    /// Calls `body` on each token of the sequence, and whether the mask hides it.
    fn each(
        &self,
        on: &mut PtxBuilder,
        threads: &CtaThreads,
        span: [PtxValue<u32>; 2],
        body: impl FnOnce(&mut PtxBuilder, CountedToken, PtxValue<bool>),
    ) {
        threads.each(on, span, |on, token| {
            let counted = self.sequences.counted.load(on, token);
            let hidden = on.equal(counted, 0.0);
            body(on, CountedToken { token, counted }, hidden);
        });
    }

    /// Writes the results of a token that counts, and returns its terms of the [sums](SUMS).
    fn results(&self, on: &mut PtxBuilder, written: &LossArrays, at: CountedToken) -> [PtxValue<f32>; SUMS] {
        let CountedToken { token, counted } = at;
        let softmaxes = self.softmaxes(on, at);
        let names = ["token_loss", "reduced", "ratio", "kl", "clipped_low", "clipped_high", "grad_logp"];
        // All results are made by one list of operations, so that parts that they share are computed once.
        let places = names.map(|name| self.tape.place_of(name));
        let computed = self.compute(on, &places, at, &softmaxes);
        let [loss, reduced, ratio, kl, clipped_low, clipped_high, grad_logp] = places.map(|place| computed[&place]);
        let entropy = softmaxes.of_entropy.entropy(on);
        for (array, value) in written.of_token.into_iter().zip([softmaxes.logp, entropy, loss.number()]) {
            let to = array.at(on, token);
            on.store(to, value);
        }
        let factor = entropy_factor(on, self.structure, &self.weights, &self.inputs, token);
        let record = softmaxes.record(on, grad_logp.number(), factor);
        let to = written.record.at(on, token);
        store_8(on, to, record);

        // The loss of the sequence is a sum of weighted terms; metrics are plain sums here, and divided by the count of
        // the batch later.
        let weight = PtxBuilder::mul(on, self.weights.policy, counted);
        let [policy, bonus] =
            [(weight, reduced.number()), (factor, entropy)].map(|(factor, term)| weighed(on, factor, term));
        let of_loss = PtxBuilder::add(on, policy, bonus);
        let [low, high] = [clipped_low, clipped_high].map(|clipped| on.select(clipped.truth(), 1.0, 0.0));
        let either = on.max(low, high);
        [of_loss, low, high, either, kl.number(), entropy, ratio.number(), 1.0.into()]
    }

    /// Loads the factor of a token's gaps.
    fn rate(&self, on: &mut PtxBuilder, rate: GapRate, token: PtxValue<u32>) -> PtxValue<f32> {
        match rate {
            GapRate::OfAll(number) => self.numbers.load(on, number),
            GapRate::OfToken => self.inputs.load(on, TokenInput::Rate, token).expect("temperatures are given"),
        }
    }

    fn softmaxes(&self, on: &mut PtxBuilder, at: CountedToken) -> TokenSoftmaxes {
        let from = self.statistics.at(on, at.token);
        let mut column = |which: Statistic| -> PtxValue<f32> { on.load(from.plus(4 * which as u32)) };
        let [max, target_logit] = [Statistic::Max, Statistic::TargetLogit].map(&mut column);
        let entropy_sums = [Statistic::Others, Statistic::Weighted].map(&mut column);
        let logp_sums = [Statistic::LogpOthers, Statistic::LogpWeighted].map(&mut column);
        let rates = self.structure.gap_rates().into_iter();
        let rates: Vec<_> = rates.map(|rate| rate.map(|rate| self.rate(on, rate, at.token))).collect();
        // The statistics weigh by exponents of 2.
        let mut softmax = |[others, weighted]: [PtxValue<f32>; 2], rate| {
            let weighted = PtxBuilder::mul(on, weighted, -LN_2 as f32);
            SoftmaxSums { max, target_logit, others, weighted }.softmax(on, rate)
        };
        let of_entropy = softmax(entropy_sums, rates[0]);
        let of_logp = if rates.len() > 1 { softmax(logp_sums, rates[1]) } else { of_entropy };
        let mut logp = of_logp.logp(on);
        if self.structure.temperature == TemperaturePlace::Logp {
            let inverse = self.numbers.load(on, SpecNumber::InverseTemperature);
            logp = PtxBuilder::mul(on, logp, inverse);
        }
        // NaN of an invalid token.
        let logp = PtxBuilder::mul(on, logp, at.counted);
        TokenSoftmaxes { max, tempered: rates[0], of_entropy, of_logp, logp }
    }

    /// The results of the tape at `wanted`, and what led to them.
    fn compute(
        &self,
        on: &mut PtxBuilder,
        wanted: &[usize],
        at: CountedToken,
        softmaxes: &TokenSoftmaxes,
    ) -> BTreeMap<usize, TapeValue> {
        let mut computed = BTreeMap::new();
        for place in needed(&self.tape, wanted) {
            let value = match &self.tape.operations()[place] {
                TapeOperation::Constant(number) => TapeValue::Number(on.constant(*number)),
                TapeOperation::Input(name) => TapeValue::Number(self.leaf(on, name, at, softmaxes)),
                // A sum over the sequence was computed in an earlier walk, and nothing before it is computed again.
                TapeOperation::Apply(TapeOperator::RowSum, _) => self.known[&place],
                TapeOperation::Apply(operator, operands) => {
                    let operands: Vec<TapeValue> = operands.iter().map(|operand| computed[operand]).collect();
                    apply(on, *operator, &operands)
                }
            };
            computed.insert(place, value);
        }
        computed
    }

    /// An input of the tape: a number of the spec, or an element of an array of the batch.
    fn leaf(
        &self,
        on: &mut PtxBuilder,
        name: &str,
        CountedToken { token, counted }: CountedToken,
        softmaxes: &TokenSoftmaxes,
    ) -> PtxValue<f32> {
        match name {
            "logp" => softmaxes.logp,
            "advantages" => self.inputs.advantage(on, [token, self.owner]),
            "weight" => PtxBuilder::mul(on, self.weights.policy, counted),
            "row_count" => self.row_count,
            "kl_share" => self.weights.kl_share.expect("a KL penalty with a reduction of its own"),
            _ => {
                if let Some(value) = self.inputs.named(on, name, token) {
                    return value;
                }
                let number = self.structure.numbers().into_iter().find(|number| number.name() == name);
                self.numbers.load(on, number.unwrap_or_else(|| panic!("a token is given no `{name}`")))
            }
        }
    }
}

fn apply(on: &mut PtxBuilder, operator: TapeOperator, operands: &[TapeValue]) -> TapeValue {
    let number = |place: usize| operands[place].number();
    let truth = |place: usize| operands[place].truth();
    TapeValue::Number(match operator {
        TapeOperator::Add => Arithmetic::add(on, number(0), number(1)),
        TapeOperator::Sub => Arithmetic::sub(on, number(0), number(1)),
        TapeOperator::Mul => Arithmetic::mul(on, number(0), number(1)),
        TapeOperator::Div => Arithmetic::div(on, number(0), number(1)),
        TapeOperator::Neg => Arithmetic::neg(on, number(0)),
        TapeOperator::Exp => on.exp(number(0)),
        TapeOperator::ExpM1 => on.exp_m1(number(0)),
        TapeOperator::Ln => on.ln(number(0)),
        TapeOperator::Ln1P => on.ln_1p(number(0)),
        TapeOperator::Select => Arithmetic::select(on, truth(0), number(1), number(2)),
        TapeOperator::Less => return TapeValue::Truth(Arithmetic::less(on, number(0), number(1))),
        TapeOperator::Equal => return TapeValue::Truth(Arithmetic::equal(on, number(0), number(1))),
        TapeOperator::And => return TapeValue::Truth(Arithmetic::and(on, truth(0), truth(1))),
        TapeOperator::Or => return TapeValue::Truth(Arithmetic::or(on, truth(0), truth(1))),
        TapeOperator::RowSum => unreachable!("a sum over the sequence is known before"),
    })
}

impl TokenSoftmaxes {
    /// The columns of a [`TokenRecord`].
    fn record(
        &self,
        on: &mut PtxBuilder,
        grad_logp: PtxValue<f32>,
        entropy: PtxValue<f32>,
    ) -> [PtxValue<f32>; PER_TOKEN] {
        let rate = self.tempered.unwrap_or(1.0.into());
        // Each softmax has its own sum, while derivatives by logits are multiplied by the first one's rate in both.
        let [logp_share, entropy_share] = [&self.of_logp, &self.of_entropy].map(|of| on.div(rate, of.sum));
        let mut columns = [PtxValue::from(0.0); PER_TOKEN];
        let named = [
            (TokenRecord::Max, self.max),
            (TokenRecord::GradLogp, grad_logp),
            (TokenRecord::LogpShare, logp_share),
            (TokenRecord::Others, self.of_logp.others),
            (TokenRecord::Counts, 1.0.into()),
            (TokenRecord::Entropy, entropy),
            (TokenRecord::EntropyShare, entropy_share),
            (TokenRecord::MeanGap, self.of_entropy.mean_gap),
        ];
        for (column, value) in named {
            columns[column as usize] = value;
        }
        columns
    }
}
