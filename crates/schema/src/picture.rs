//! [`ErrorPicture`]: the place of an error along one axis of an output, and its drawing in a terminal.

use serde::{Deserialize, Serialize};

/// The axis of an output along which its errors are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PictureAxis {
    /// The entries of the vocabulary.
    VocabularyEntry,
    /// The units of the hidden states.
    HiddenUnit,
    /// The tokens, sequence by sequence: place `b·T + t` is token `[b,t]`.
    Token,
}

impl PictureAxis {
    /// Returns the name of one place of the axis.
    pub fn name(self) -> &'static str {
        match self {
            PictureAxis::VocabularyEntry => "vocabulary entry",
            PictureAxis::HiddenUnit => "hidden unit",
            PictureAxis::Token => "token",
        }
    }
}

/// The largest error / limit of each part of one axis of an output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ErrorPicture {
    /// The name of what was compared, such as `dlogits`.
    pub output: String,
    /// The extents and the dtype of the problem.
    pub problem: String,
    /// The axis of the output that the cells are along.
    pub axis: PictureAxis,
    /// The number of places along the axis.
    pub extent: u64,
    /// The number of places that share a cell; the last cell may have fewer.
    pub places: u64,
    /// The largest error / limit of each cell; `None` if nothing was compared there, or a value is not finite.
    pub error_over_limit: Vec<Option<f64>>,
    /// The cells with a value that is NaN or ∞ and should not be, or that is not and should be.
    pub nonfinite: Vec<u64>,
}

/// The rows of a terminal's drawing above the limit.
const ABOVE: usize = 3;
/// The rows below the limit, each of one power of ten.
const BELOW: usize = 2;
/// The characters before the bars of a drawing.
const LABEL: usize = 7;

impl ErrorPicture {
    /// Returns the caption of the picture, in one line.
    pub fn caption(&self) -> String {
        let cell = if self.places > 1 { format!(" ({} in each cell)", self.places) } else { String::new() };
        format!("error / limit of {} by {}{cell}, in {}", self.output, self.axis.name(), self.problem)
    }

    /// Returns the share of the axis that is beyond the limit: the smaller, the more a picture tells.
    pub fn share_beyond(&self) -> f64 {
        let places: u64 = self.beyond().iter().map(|[first, last]| last + 1 - first).sum();
        places as f64 / self.extent as f64
    }

    /// Returns the cells that are beyond the limit as ranges of places, first and last.
    pub fn beyond(&self) -> Vec<[u64; 2]> {
        let mut ranges: Vec<[u64; 2]> = Vec::new();
        for (cell, error) in (0..).zip(self.filled()) {
            if error.is_some_and(|error| error > 1.0) {
                let [first, last] = [cell * self.places, ((cell + 1) * self.places).min(self.extent) - 1];
                match ranges.last_mut() {
                    Some(range) if range[1] + 1 == first => range[1] = last,
                    _ => ranges.push([first, last]),
                }
            }
        }
        ranges
    }

    /// Returns the places beyond the limit in words: `beyond the limit: 4096 to 4098`, or their number if they are many ranges.
    pub fn beyond_in_words(&self) -> String {
        const LISTED: usize = 3;
        let ranges = self.beyond();
        let range = |[first, last]: &[u64; 2]| {
            if first == last { first.to_string() } else { format!("{first} to {last}") }
        };
        match ranges.as_slice() {
            [[0, last]] if last + 1 == self.extent => "beyond the limit everywhere".into(),
            ranges if ranges.len() <= LISTED => {
                format!("beyond the limit: {}", ranges.iter().map(range).collect::<Vec<_>>().join(", "))
            }
            ranges => {
                let places: u64 = ranges.iter().map(|[first, last]| last + 1 - first).sum();
                format!("beyond the limit: {places} of {} places, spread over the axis", self.extent)
            }
        }
    }

    /// Returns each cell's error / limit, ∞ for values that are wrongly NaN or ∞.
    pub fn filled(&self) -> Vec<Option<f64>> {
        let mut cells = self.error_over_limit.clone();
        for &cell in &self.nonfinite {
            if let Some(cell) = usize::try_from(cell).ok().and_then(|cell| cells.get_mut(cell)) {
                *cell = Some(f64::INFINITY);
            }
        }
        cells
    }

    /// Draws bars on a logarithmic scale, in lines of at most `width` characters. A bar above the line `limit` fails; `!` marks NaN or ∞.
    pub fn lines(&self, width: usize) -> Vec<String> {
        // Merge cells until they fit, each column the largest of its cells.
        let cells = self.filled();
        let merged = cells.len().div_ceil(width.saturating_sub(LABEL).max(1)).max(1);
        let column = |cells: &[Option<f64>]| cells.iter().flatten().copied().reduce(f64::max);
        let columns: Vec<Option<f64>> = cells.chunks(merged).map(column).collect();
        // The upper rows reach to the largest error, a decade at least.
        let largest = columns.iter().flatten().copied().filter(|x| x.is_finite()).fold(10.0, f64::max);
        let decades = largest.log10().ceil();
        let row = |label: &str, low: f64, high: f64| {
            let bar = |value: &Option<f64>| bar(*value, low, high);
            format!("{label:>5} │{}", columns.iter().map(bar).collect::<String>())
        };
        let mut lines = Vec::new();
        for above in (0..ABOVE).rev() {
            let [low, high] = [above, above + 1].map(|row| decades * row as f64 / ABOVE as f64);
            let label = if above + 1 == ABOVE { format!("1e{decades}") } else { String::new() };
            lines.push(row(&label, low, high));
        }
        let crossing = |value: &Option<f64>| if value.is_some_and(|value| value > 1.0) { '█' } else { '─' };
        lines.push(format!("limit ┼{}", columns.iter().map(crossing).collect::<String>()));
        for below in 1..=BELOW {
            let label = if below == BELOW { format!("1e-{below}") } else { String::new() };
            lines.push(row(&label, -(below as f64), 1.0 - below as f64));
        }
        let last = (self.extent - 1).to_string();
        lines.push(format!("{:LABEL$}0{last:>1$}", "", columns.len().saturating_sub(1).max(last.len() + 1)));
        lines.iter().map(|line| line.trim_end().to_string()).collect()
    }
}

/// Draws a column's part between two powers of ten: a block of up to eight eighths.
fn bar(value: Option<f64>, low: f64, high: f64) -> char {
    const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    match value {
        None => ' ',
        Some(value) if value.is_infinite() => {
            if low >= 0.0 {
                '!'
            } else {
                '█'
            }
        }
        Some(value) => {
            let filled = (value.log10() - low) / (high - low);
            // The number of eighths that are filled; a value of 0 fills none.
            EIGHTHS[(1..EIGHTHS.len()).filter(|&eighths| filled * 8.0 + 0.5 >= eighths as f64).count()]
        }
    }
}
