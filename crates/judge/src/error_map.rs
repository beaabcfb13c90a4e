//! [`ErrorMap`]: the largest error / limit along one axis of an output, for a picture of the place of an error.
//!
//! A verdict names the worst value. A map shows all of them: a tile that is not written is a step, a logit that is rounded too early is
//! noise over the whole row. Only verdicts by [`Limits::with_error_maps`](crate::tolerance::Limits::with_error_maps) have maps.

use super::gate::{Gate, Model, Output};
use super::metric::Position;
use assay_core::problem::HeadShape;
use assay_schema::picture::{ErrorPicture, PictureAxis};

/// The largest number of cells of a map; longer axes have several places in a cell.
const MOST_CELLS: usize = 240;

/// The largest error / limit of each cell along one axis of an output.
#[derive(Clone, Debug, PartialEq)]
pub struct ErrorMap {
    /// The axis of the output.
    pub axis: PictureAxis,
    /// The number of places along the axis.
    pub extent: usize,
    /// The number of tokens in a sequence: place `b·T + t` is token `[b,t]`.
    tokens: usize,
    /// The number of places that share a cell; the last cell may have fewer.
    places: usize,
    /// The largest error / limit of each cell: NaN if nothing was compared there, ∞ if a value is wrongly NaN or ∞, or wrongly is not.
    cells: Vec<f64>,
}

impl ErrorMap {
    /// Returns an empty map of an axis with `extent` places.
    fn new(axis: PictureAxis, extent: usize, tokens: usize) -> Self {
        let places = extent.div_ceil(MOST_CELLS).max(1);
        Self { axis, extent, tokens, places, cells: vec![f64::NAN; extent.div_ceil(places)] }
    }

    /// Returns the empty maps of a gate on a problem of `shape`, whose hidden width is 0 without an LM head: the most telling axis first.
    pub(crate) fn for_gate(gate: Gate, shape: HeadShape) -> Vec<Self> {
        let HeadShape { batch, tokens, hidden, vocab } = shape;
        let map = |axis| {
            let extent = match axis {
                PictureAxis::VocabularyEntry => vocab,
                PictureAxis::HiddenUnit => hidden,
                PictureAxis::Token => batch * tokens,
            };
            Self::new(axis, extent, tokens)
        };
        let axes: &[PictureAxis] = match (gate.output, gate.model) {
            (Output::Dlogits, Model::Elementwise) => &[PictureAxis::VocabularyEntry, PictureAxis::Token],
            (Output::Dhidden, Model::Elementwise) => &[PictureAxis::HiddenUnit, PictureAxis::Token],
            (Output::DlmHead, Model::Elementwise) => &[PictureAxis::VocabularyEntry, PictureAxis::HiddenUnit],
            (Output::DlmHead, _) => &[PictureAxis::VocabularyEntry],
            (Output::Logp | Output::Entropy | Output::TokenLoss | Output::Dlogits | Output::Dhidden, _) => {
                &[PictureAxis::Token]
            }
            // A scalar has no place.
            _ => &[],
        };
        axes.iter().map(|axis| map(*axis)).collect()
    }

    /// Adds the error / limit of the value at `at`, which keeps a place of the map's axis.
    pub(super) fn add(&mut self, at: Position, error_over_limit: f64) {
        let place = match self.axis {
            PictureAxis::VocabularyEntry => at.v,
            PictureAxis::HiddenUnit => at.h,
            PictureAxis::Token => at.b.zip(at.t).map(|(b, t)| b * self.tokens + t),
        };
        if let Some(cell) = place.and_then(|place| self.cells.get_mut(place / self.places)) {
            // `max` ignores NaN, which is an empty cell.
            *cell = cell.max(error_over_limit);
        }
    }

    /// Takes the larger value of each cell of two maps of the same axis.
    pub(super) fn absorb(&mut self, other: &Self) {
        for (cell, other) in self.cells.iter_mut().zip(&other.cells) {
            *cell = cell.max(*other);
        }
    }

    /// Returns the share of the compared cells that are beyond the limit.
    fn share_beyond(&self) -> f64 {
        let compared = self.cells.iter().filter(|x| !x.is_nan()).count();
        self.cells.iter().filter(|x| **x > 1.0).count() as f64 / compared.max(1) as f64
    }

    /// Draws the map in the form of a report; `output` is the name of what was compared, `problem` the batch in words.
    fn picture(&self, output: &str, problem: &str) -> ErrorPicture {
        let finite = |x: f64| Some(x).filter(|x| x.is_finite());
        ErrorPicture {
            output: output.into(),
            problem: problem.into(),
            axis: self.axis,
            extent: self.extent as u64,
            places: self.places as u64,
            error_over_limit: self.cells.iter().map(|&x| finite(x)).collect(),
            nonfinite: (0..).zip(&self.cells).filter(|(_, x)| x.is_infinite()).map(|(cell, _)| cell).collect(),
        }
    }
}

/// Draws the most telling of the `maps`: the one of which the smallest share is beyond the limit, the first of equals. `None` if none has
/// a value beyond its limit.
pub(super) fn most_telling(maps: &[ErrorMap], output: &str, problem: &str) -> Option<ErrorPicture> {
    let shows = maps.iter().filter(|map| map.share_beyond() > 0.0 && map.extent > 1);
    let best = shows.min_by(|a, b| a.share_beyond().total_cmp(&b.share_beyond()))?;
    Some(best.picture(output, problem))
}
