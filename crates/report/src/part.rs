//! [`ReportPart`]: the trait of every part of a page.

use maud::Markup;

/// One result's part of the page.
pub(super) trait ReportPart {
    /// Whether it passed; `None` where it decides nothing.
    fn passed(&self) -> Option<bool>;
    /// Returns a summary of one line.
    fn summary(&self) -> String;
    /// Draws the tables and plots.
    fn body(&self) -> Markup;
}
