//! What the spec does to logits before their softmax, and to dlogits on the way back.
//!
//! ```text
//! h_j  = cap · tanh(scale · (x_j + bias_j) / cap)       −∞ outside the support
//! dx_j = dh_j · scale / cosh²(scale · (x_j + bias_j) / cap)
//! ```

use ndarray::Array1;

use super::row::{Element, Row};
use assay_core::spec::{self, LossSpec};

/// What the spec does to logits, in f32.
pub(super) struct LogitsTransform {
    scale: f32,
    softcap: Option<f32>,
    bias: Option<Vec<f32>>,
    /// Columns outside the support.
    excluded: Vec<usize>,
}

impl LogitsTransform {
    /// `None` where the softmax is of the logits as they are.
    pub(super) fn of(spec: &LossSpec, bias: Option<&Array1<f64>>, vocab: usize) -> Option<Self> {
        if spec.logits == spec::LogitsTransform::default() && spec.support.is_whole() {
            return None;
        }
        let mut excluded: Vec<usize> = (spec.support.vocab.unwrap_or(vocab)..vocab).collect();
        excluded.extend(spec.support.excluded_ids.iter().filter(|&&id| id < vocab));
        Some(Self {
            scale: spec.logits.scale as f32,
            softcap: spec.logits.softcap.map(|cap| cap as f32),
            bias: bias.filter(|_| spec.logits.bias).map(|bias| bias.iter().map(|&x| x as f32).collect()),
            excluded,
        })
    }

    /// `scale · (x_j + bias_j)`
    fn scaled<E: Element>(&self, j: usize, x: E) -> f32 {
        self.scale * (x.to_f32() + self.bias.as_ref().map_or(0.0, |bias| bias[j]))
    }

    /// Fills `h` from the row of a token whose id is `id`.
    pub(super) fn forward<E: Element>(&self, row: &[E], id: usize, h: &mut Vec<f32>) {
        h.clear();
        h.extend(row.iter().enumerate().map(|(j, &x)| {
            let scaled = self.scaled(j, x);
            self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh())
        }));
        // An id that was sampled although it is outside counts for its own token.
        self.excluded.iter().filter(|&&j| j != id).for_each(|&j| h[j] = f32::NEG_INFINITY);
    }

    /// Writes dlogits from those of `h`.
    pub(super) fn backward<E: Element>(&self, row: &mut Row<E>, dh: &[f32]) {
        for (j, &dh) in dh.iter().enumerate() {
            let slope = match self.softcap {
                Some(cap) => self.scale / (self.scaled(j, row.logits()[j]) / cap).cosh().powi(2),
                None => self.scale,
            };
            // What stands outside the support may have no slope that is a number.
            row.dlogits[j] = E::from_f32(if dh == 0.0 { 0.0 } else { dh * slope });
        }
    }
}
