//! What every part of a page is.

use maud::Markup;

/// What a result says for itself.
pub(super) trait Part {
    /// Whether it passed; `None` where it decides nothing.
    fn passed(&self) -> Option<bool>;
    /// One line.
    fn summary(&self) -> String;
    /// Tables and plots.
    fn body(&self) -> Markup;
}
