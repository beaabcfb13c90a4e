//! The part of a loss that the host computes around the kernels, since no XLA does it: the inputs of tokens, the losses between two
//! kernels, and the reduction of token losses. All of it is f64, rounded to f32 where a kernel reads it.

use std::f64::consts::LN_2;

use assay_algebra::arithmetic::Immediate;
use assay_algebra::loss::{LossEvaluator, ScoredToken, TokenEvaluation, WeightedToken};
use assay_algebra::objective::TokenLoss;
use assay_algebra::reduction::{self, ReductionWeights};
use assay_algebra::rollout::KernelInputs;
use assay_algebra::softmax::{SoftmaxStatistics, SoftmaxSums};
use assay_algebra::structure::{GapRate, SpecNumber, StructuredSpec, TemperaturePlace, TokenInput};
use assay_algebra::transform::ColumnBiases;
use assay_core::problem::{FloatArray, Metrics, Sequence, Tokens};
use assay_programs::arrays::{self, PER_TOKEN, ResultColumn, Scale, Statistic, TokenColumn};
use ndarray::{Array2, Ix0, Ix2, arr0};

/// The tokens of a batch, and the loss of a spec on them.
pub(crate) struct HostLoss<'s> {
    loss: StructuredSpec<'s>,
    ids: Vec<i32>,
    advantages: Array2<f64>,
    sequences: Vec<Sequence>,
    settled: KernelInputs,
    weights: ReductionWeights,
    /// The biases of columns, if the spec transforms logits by column.
    columns: Option<ColumnBiases>,
}

/// The two softmaxes of a row: one for entropy, one for logp. They differ if only logp is tempered.
#[derive(Clone, Copy)]
pub(crate) struct RowSoftmaxes {
    max: f64,
    entropy: SoftmaxStatistics<f64>,
    logp: SoftmaxStatistics<f64>,
}

/// The outcome of a batch without its gradient.
pub(crate) struct HostResults {
    pub(crate) loss: FloatArray<Ix0>,
    pub(crate) logp: FloatArray<Ix2>,
    pub(crate) entropy: FloatArray<Ix2>,
    pub(crate) token_loss: FloatArray<Ix2>,
    pub(crate) metrics: Metrics,
}

impl<'s> HostLoss<'s> {
    /// Prepares checked tokens over `vocab` columns.
    pub(crate) fn new(loss: StructuredSpec<'s>, tokens: &Tokens, vocab: usize) -> Self {
        let settled = KernelInputs::new(loss, tokens);
        let transform = loss.structure.transform.filter(|transform| transform.columns);
        Self {
            loss,
            // What the mask hides may be anything; its loss is never used.
            ids: tokens.ids.iter().map(|&id| i32::try_from(id).unwrap_or(0)).collect(),
            advantages: tokens.advantages_of_tokens(),
            sequences: tokens.sequences(),
            weights: ReductionWeights::new(loss.spec, &settled, &tokens.extra.sequences),
            settled,
            columns: transform.map(|_| ColumnBiases::new(loss.spec, tokens, vocab)),
        }
    }

    /// Returns the sampled id of each token, `[n]`.
    pub(crate) fn ids(&self) -> &[i32] {
        &self.ids
    }

    fn number(&self, number: SpecNumber) -> f32 {
        let (rows, columns) = self.settled.mask.dim();
        number.value_in(self.loss.spec, [rows, columns]) as f32
    }

    /// Returns the numbers of the two kernels that read logits twice.
    pub(crate) fn softmax_numbers(&self) -> Vec<f32> {
        arrays::softmax_numbers(self.loss.structure).into_iter().map(|number| self.number(number)).collect()
    }

    /// Returns the biases of columns and of targets.
    pub(crate) fn columns(&self) -> Option<&ColumnBiases> {
        self.columns.as_ref()
    }

    fn weighted(&self, at: (usize, usize)) -> WeightedToken {
        self.weights.token(self.advantages[at], at)
    }

    fn input(&self, input: TokenInput, at: (usize, usize)) -> Option<f64> {
        self.settled.input(input).map(|values| values[at])
    }

    /// Returns the numbers of the kernel that reads logits once.
    pub(crate) fn numbers(&self) -> Vec<f32> {
        // Where tokens differ in it, it comes with them. Rows without a token have none.
        let entropy_factor = self.weights.entropy.iter().copied().find(|&factor| factor != 0.0).unwrap_or(0.0);
        let value = |number: SpecNumber| match number {
            SpecNumber::EntropyFactor => entropy_factor as f32,
            other => self.number(other),
        };
        arrays::numbers(self.loss.structure).into_iter().map(value).collect()
    }

    /// Returns the inverse temperature of each token, `[n]`; `None` if the spec has one temperature.
    pub(crate) fn rates(&self) -> Option<Vec<f32>> {
        let rates = self.settled.input(TokenInput::Rate)?;
        Some(rates.iter().map(|&rate| rate as f32).collect())
    }

    /// Returns the columns that the one-pass kernel reads of each token, `[n, width]`.
    pub(crate) fn tokens(&self) -> Vec<f32> {
        let columns = arrays::given_columns(self.loss.structure);
        // One line of floats for each token, in the order in which the kernel reads its columns.
        let width = arrays::width(columns.len());
        let mut values = vec![0.0; self.ids.len() * width];
        for ((at, &counts), of_token) in self.settled.mask.indexed_iter().zip(values.chunks_mut(width)) {
            let weighted = self.weighted(at);
            for (value, column) in of_token.iter_mut().zip(&columns) {
                let input = |input| self.input(input, at).unwrap_or(0.0);
                let given = match column {
                    TokenColumn::Advantage => weighted.advantage,
                    TokenColumn::OldLogp => input(TokenInput::OldLogp),
                    TokenColumn::RefLogp => input(TokenInput::RefLogp),
                    TokenColumn::PolicyWeight => input(TokenInput::PolicyWeight),
                    TokenColumn::KlWeight => input(TokenInput::KlWeight),
                    TokenColumn::Selected => input(TokenInput::Selected),
                    TokenColumn::RolloutLogp => input(TokenInput::RolloutLogp),
                    TokenColumn::Rate => input(TokenInput::Rate),
                    TokenColumn::TargetBias => self.columns.as_ref().map_or(0.0, |columns| columns.target[at].into()),
                    // The mask leaves nothing of a token.
                    TokenColumn::Weight | TokenColumn::Mask | TokenColumn::KlShare | TokenColumn::EntropyFactor
                        if !counts =>
                    {
                        0.0
                    }
                    TokenColumn::Weight => weighted.weight,
                    TokenColumn::Mask => 1.0,
                    TokenColumn::KlShare => weighted.kl_share,
                    TokenColumn::EntropyFactor => self.weights.entropy[at],
                };
                *value = given as f32;
            }
        }
        values
    }

    /// Collects the token losses that the kernel computed from its output for each token.
    pub(crate) fn evaluated_by_kernel(&self, results: &[f32]) -> Array2<Option<TokenEvaluation>> {
        let structure = self.loss.structure;
        let evaluated = self.settled.mask.iter().zip(results.chunks(PER_TOKEN)).map(|(&counts, results)| {
            let of = |column: ResultColumn| f64::from(results[column as usize]);
            let loss = of(ResultColumn::Loss);
            let token = TokenLoss {
                loss,
                reduced: if structure.kl_share() { of(ResultColumn::Reduced) } else { loss },
                // The derivatives stay in the kernel.
                by_logp: None,
                by_kl_logp: None,
                by_log_ratio: None,
                ratio: of(ResultColumn::Ratio),
                kl: structure.kl.map(|_| of(ResultColumn::Kl)),
                clipped_low: of(ResultColumn::ClippedLow) > 0.0,
                clipped_high: of(ResultColumn::ClippedHigh) > 0.0,
            };
            let [logp, entropy] = [ResultColumn::Logp, ResultColumn::Entropy].map(of);
            counts.then_some(TokenEvaluation {
                grad_log_sum_exp: 0.0,
                grad_mean_logit: 0.0,
                token,
                logp,
                entropy,
                grad_logp: f64::NAN,
                grad_kl_logp: f64::NAN,
                logp_of_others: Vec::new(),
            })
        });
        Array2::from_shape_vec(self.settled.mask.dim(), evaluated.collect()).expect("one entry a token")
    }

    /// Computes the softmaxes of each row from its statistics.
    pub(crate) fn softmaxes(&self, statistics: &[f32]) -> Array2<RowSoftmaxes> {
        let on = &mut Immediate;
        let places = ndarray::indices(self.settled.mask.dim()).into_iter();
        let softmaxes = statistics.chunks(PER_TOKEN).zip(places).map(|(row, at)| {
            let scales = self.gap_scales(at);
            let of = |which: Statistic| f64::from(row[which as usize]);
            let [max, target_logit] = [Statistic::Max, Statistic::TargetLogit].map(of);
            let mut softmax = |[others, weighted]: [Statistic; 2], scale| {
                let (others, weighted) = (of(others), -LN_2 * of(weighted));
                SoftmaxSums { max, target_logit, others, weighted }.softmax(on, scale)
            };
            let entropy = softmax([Statistic::Others, Statistic::Weighted], scales[0]);
            let logp = match scales.get(1) {
                Some(&scale) => softmax([Statistic::LogpOthers, Statistic::LogpWeighted], scale),
                None => entropy,
            };
            RowSoftmaxes { max, entropy, logp }
        });
        Array2::from_shape_vec(self.settled.mask.dim(), softmaxes.collect()).expect("one entry a token")
    }

    /// Returns the factors of a token's gaps in each softmax, rounded to f32 as the kernels have them.
    fn gap_scales(&self, at: (usize, usize)) -> Vec<Option<f64>> {
        let rate = |rate| match rate {
            GapRate::OfAll(number) => self.number(number),
            GapRate::OfToken => self.input(TokenInput::Rate, at).expect("the structure reads it") as f32,
        };
        self.loss.structure.gap_rates().into_iter().map(|of| of.map(|of| rate(of).into())).collect()
    }

    /// Returns log-probability and entropy of a row.
    fn logp_and_entropy(&self, softmaxes: &RowSoftmaxes) -> [f64; 2] {
        let on = &mut Immediate;
        let logp = softmaxes.logp.logp(on);
        let two = self.loss.structure.temperature == TemperaturePlace::Logp;
        let logp = if two { logp * f64::from(self.number(SpecNumber::InverseTemperature)) } else { logp };
        [logp, softmaxes.entropy.entropy(on)]
    }

    /// Returns `[B,T]` logp and entropy, 0 where the mask hides a token.
    pub(crate) fn logp_and_entropy_of_all(&self, softmaxes: &Array2<RowSoftmaxes>) -> [FloatArray<Ix2>; 2] {
        [0, 1].map(|which| {
            let of = |at: (usize, usize)| {
                if self.settled.mask[at] { self.logp_and_entropy(&softmaxes[at])[which] as f32 } else { 0.0 }
            };
            Array2::from_shape_fn(softmaxes.dim(), of).into()
        })
    }

    /// Evaluates the losses of all tokens between the two kernels.
    pub(crate) fn evaluated(&self, softmaxes: &Array2<RowSoftmaxes>) -> Array2<Option<TokenEvaluation>> {
        let StructuredSpec { spec, structure } = self.loss;
        let (rows, columns) = softmaxes.dim();
        let loss = LossEvaluator::new(spec, structure, [rows, columns]);
        let mut all = Array2::from_shape_simple_fn((rows, columns), || None);
        for sequence in &self.sequences {
            // A loss may couple the tokens of a sequence, so that sequences are evaluated one by one, without their masked tokens.
            let places: Vec<(usize, usize)> = sequence.places().filter(|&at| self.settled.mask[at]).collect();
            let scored = places.iter().map(|&at| {
                let [logp, entropy] = self.logp_and_entropy(&softmaxes[at]);
                ScoredToken { weighted: self.weighted(at), logp, kl_logp: None, entropy, row: None }
            });
            let evaluated = loss.evaluate(&scored.collect::<Vec<_>>(), |input, at| {
                self.input(input, at).expect("the structure reads it")
            });
            for (at, evaluated) in places.into_iter().zip(evaluated) {
                all[at] = Some(evaluated);
            }
        }
        all
    }

    /// Returns the factors that the second kernel multiplies by, `[n, 8]`.
    pub(crate) fn scales(
        &self,
        softmaxes: &Array2<RowSoftmaxes>,
        evaluated: &Array2<Option<TokenEvaluation>>,
    ) -> Vec<f32> {
        let structure = self.loss.structure;
        let mut values = vec![0.0; self.ids.len() * PER_TOKEN];
        for ((at, evaluated), of_token) in evaluated.indexed_iter().zip(values.chunks_mut(PER_TOKEN)) {
            let Some(evaluated) = evaluated else { continue };
            let RowSoftmaxes { max, entropy, logp } = softmaxes[at];
            // The chain rule through the temperature: dlogits have the same factor as the gaps.
            let tempered = self.gap_scales(at)[0].unwrap_or(1.0);
            let mut set = |place: Scale, value: f64| of_token[place as usize] = value as f32;
            set(Scale::Max, max);
            set(Scale::Share, -evaluated.grad_logp * tempered / logp.sum);
            set(Scale::Others, logp.others);
            set(Scale::Mask, 1.0);
            if structure.entropy_bonus.is_some() {
                set(Scale::Bonus, self.weights.entropy[at] * tempered / entropy.sum);
                set(Scale::MeanGap, entropy.mean_gap);
            }
        }
        values
    }

    /// Reduces the losses of tokens to the outcome of the batch.
    pub(crate) fn results(&self, evaluated: &Array2<Option<TokenEvaluation>>) -> HostResults {
        let per_token = |value: fn(&TokenEvaluation) -> f64| {
            evaluated.map(|evaluated| evaluated.as_ref().map_or(0.0, value) as f32).into()
        };
        HostResults {
            loss: arr0(reduction::loss(evaluated, &self.weights) as f32).into(),
            logp: per_token(|evaluated| evaluated.logp),
            entropy: per_token(|evaluated| evaluated.entropy),
            token_loss: per_token(|evaluated| evaluated.token.loss),
            metrics: reduction::metrics(self.loss.spec, evaluated),
        }
    }
}
