//! The transform of logits in the specimen: scale, cap and bias, over the columns of the support.

use std::ops::Range;

use crate::bank::Bug;
use crate::launch::{SpecimenLaunch, SpecimenSoftmax, TILE};
use assay_core::problem::{Dtype, Float};
use assay_core::spec::{CrossEntropy, LogitsTransform, Objective, Support};

/// The reader of a row: a token, in the forward or the backward pass.
#[derive(Clone, Copy)]
pub(crate) struct LogitReader {
    /// Sampled column of the reader's token.
    pub(crate) id: usize,
    pub(crate) backward: bool,
}

impl SpecimenLaunch<'_> {
    /// Transforms a logit in a column of the shard `columns`: `cap · tanh(scale · (x + bias) / cap)`, −∞ outside the
    /// support.
    pub(crate) fn logit<E: Float>(&self, x: E, columns: &Range<usize>, column: usize, reader: LogitReader) -> f32 {
        let x = x.to_f64();
        if self.takes_logits_as_given {
            return x as f32;
        }
        if self.is_left_out(columns, column, reader) {
            return if self.has(Bug::ExcludedLogitsZeroed) { 0.0 } else { f32::NEG_INFINITY };
        }
        self.changed(E::DTYPE, x, columns, column, reader) as f32
    }

    fn changed(&self, dtype: Dtype, x: f64, columns: &Range<usize>, column: usize, reader: LogitReader) -> f64 {
        let LogitsTransform { scale, softcap, .. } = self.spec.logits;
        let forgotten = self.has(Bug::BiasForgottenInBackward) && reader.backward;
        let bias = if forgotten { 0.0 } else { self.bias(columns, column) };
        let scale = if self.has(Bug::LogitScaleForgotten) { 1.0 } else { scale };
        // All maps are of the raw logit in f64, so that a mutant differs by its mistake and not by a rounding.
        let scaled = match () {
            () if self.has(Bug::BiasAfterScale) => scale * x + bias,
            () if self.has(Bug::BiasAfterSoftcap) => scale * x,
            () => scale * (x + bias),
        };
        let is_forgotten =
            self.has(Bug::SoftcapForgotten) || (self.has(Bug::SoftcapForgottenInBackward) && reader.backward);
        let Some(cap) = softcap.filter(|_| !is_forgotten) else {
            return if self.has(Bug::BiasAfterSoftcap) { scaled + bias } else { scaled };
        };
        let temperature = self.spec.temperature.number().unwrap_or(1.0);
        let capped = match () {
            () if self.has(Bug::TanhNotMultiplied) => (scaled / cap).tanh(),
            () if self.has(Bug::TanhNotDivided) => cap * scaled.tanh(),
            () if self.has(Bug::SoftcapCuts) => scaled.clamp(-cap, cap),
            () if self.has(Bug::SoftcapBySoftsign) => cap * scaled / (cap + scaled.abs()),
            () if self.has(Bug::SoftcapBeforeScale) => scale * cap * ((x + bias) / cap).tanh(),
            // The softmax divides by the temperature.
            () if self.has(Bug::SoftcapAfterTemperature) => temperature * cap * (scaled / temperature / cap).tanh(),
            () => cap * (scaled / cap).tanh(),
        };
        match () {
            () if self.has(Bug::BiasAfterSoftcap) => capped + bias,
            () if self.has(Bug::SoftcapInLogitsDtype) => dtype.round(capped),
            () => capped,
        }
    }

    /// Computes the mean of `(m − x)/T` over all columns of a row, if a cross-entropy smooths labels; else 0.
    pub(crate) fn mean_gap_of_all<E: Float>(
        &self,
        logits: &[E],
        row: usize,
        softmax: &SpecimenSoftmax,
        id: usize,
    ) -> f64 {
        let Objective::CrossEntropy(CrossEntropy { label_smoothing, .. }) = self.spec.objective else { return 0.0 };
        if label_smoothing == 0.0 {
            return 0.0;
        }
        let (columns, reader) = (0..self.shape.vocab, LogitReader { id, backward: false });
        let x = |j: usize| f64::from(self.logit(logits[row + j], &columns, j, reader));
        let sum: f64 = columns.clone().map(|j| f64::from(softmax.max) - x(j)).sum();
        sum * f64::from(softmax.rate) / self.shape.vocab as f64
    }

    /// Computes the slope `∂h/∂x` of a column, `scale · (1 − tanh²)`.
    pub(crate) fn slope<E: Float>(&self, x: E, columns: &Range<usize>, column: usize) -> f64 {
        let LogitsTransform { scale, softcap, .. } = self.spec.logits;
        let outer = if self.has(Bug::LogitScaleForgottenInGradient) { 1.0 } else { scale };
        let Some(cap) = softcap.filter(|_| !self.has(Bug::SoftcapSlopeForgotten)) else { return outer };
        let scaled = scale * (x.to_f64() + self.bias(columns, column));
        let tanh = (scaled / cap).tanh();
        match () {
            () if self.has(Bug::SoftcapSlopeOfCapped) => outer / tanh.cosh().powi(2),
            () if self.has(Bug::SoftcapSlopeNotDivided) => outer * (1.0 - (cap * tanh).powi(2)),
            () if self.has(Bug::SoftcapSlopeNotSquared) => outer * (1.0 - tanh),
            () if self.has(Bug::SoftcapSlopeOverCap) => outer / cap / (scaled / cap).cosh().powi(2),
            () if self.has(Bug::SoftcapBySoftsign) => outer * (cap / (cap + scaled.abs())).powi(2),
            () => outer / (scaled / cap).cosh().powi(2),
        }
    }

    fn bias(&self, columns: &Range<usize>, column: usize) -> f64 {
        let given = self.tokens.extra.bias.as_ref().filter(|_| self.spec.logits.bias);
        let Some(bias) = given.filter(|_| !self.has(Bug::BiasForgotten)) else { return 0.0 };
        let column = match () {
            () if self.has(Bug::BiasOfNextColumn) => (column + 1) % self.shape.vocab,
            () if self.has(Bug::BiasOfTile) => (column - columns.start) % TILE,
            () if self.has(Bug::BiasOfFirstShard) => column - columns.start,
            () => column,
        };
        // Only a bug reads beyond the row.
        bias.get(column).copied().unwrap_or(0.0)
    }

    /// Whether `column` of the shard `columns` is outside the softmaxes of the reader's token.
    fn is_left_out(&self, columns: &Range<usize>, column: usize, reader: LogitReader) -> bool {
        match () {
            () if column == reader.id && !self.has(Bug::KeptIdLeftOut) => false,
            () if reader.backward && self.has(Bug::ExcludedGradientNotZero) => false,
            () if self.has(Bug::KeptIdForAll) && self.is_sampled(column) => false,
            () => self.is_excluded(columns, column),
        }
    }

    /// Whether `column` of the shard `columns` is outside the support.
    pub(crate) fn is_excluded(&self, columns: &Range<usize>, column: usize) -> bool {
        let Support { vocab, excluded_ids, .. } = &self.spec.support;
        let whole = self.shape.vocab;
        let end = match vocab {
            Some(_) if self.has(Bug::PaddingInSum) => whole,
            Some(vocab) if self.has(Bug::SupportTooLong) => vocab + 1,
            Some(vocab) if self.has(Bug::SupportTooShort) => vocab - 1,
            vocab => vocab.unwrap_or(whole),
        };
        let ids = match () {
            () if self.has(Bug::ExcludedIdsInSum) => &[],
            () if self.has(Bug::FirstExcludedIdAlone) => &excluded_ids[..excluded_ids.len().min(1)],
            () => excluded_ids.as_slice(),
        };
        let place = if self.has(Bug::ExcludedIdsOfShard) { column - columns.start } else { column };
        column >= end || ids.contains(&place)
    }

    /// Whether a token of the batch has `column` as its id.
    fn is_sampled(&self, column: usize) -> bool {
        let sampled = |((b, t), counts): ((usize, usize), &bool)| *counts && self.id(b, t) == column;
        self.mask().indexed_iter().any(sampled)
    }
}
