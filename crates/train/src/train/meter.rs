//! How many bytes this process holds.

use peak_alloc::PeakAlloc;

/// Counts the bytes that the allocator of this process hands out, where that is [`PeakAlloc`].
pub(super) struct Meter {
    before: usize,
    highest: usize,
}

impl Meter {
    /// Begins; `None` where another allocator is installed, which does not count.
    pub(super) fn start() -> Option<Self> {
        let before = PeakAlloc.current_usage();
        PeakAlloc.reset_peak_usage();
        (before > 0).then_some(Self { before, highest: before })
    }

    /// What `work` comes to, and the most bytes that it held beyond what there was.
    pub(super) fn most_bytes<T>(&mut self, work: impl FnOnce() -> T) -> (T, usize) {
        self.catch_up();
        let before = PeakAlloc.current_usage();
        let result = work();
        (result, self.catch_up().saturating_sub(before))
    }

    /// What `work` comes to, whose bytes do not count.
    pub(super) fn apart<T>(&mut self, work: impl FnOnce() -> T) -> T {
        self.catch_up();
        let result = work();
        PeakAlloc.reset_peak_usage();
        result
    }

    /// The most bytes that were held since the beginning, beyond what there was.
    pub(super) fn finish(mut self) -> usize {
        self.catch_up();
        self.highest.saturating_sub(self.before)
    }

    /// The most since the last call.
    fn catch_up(&mut self) -> usize {
        let peak = PeakAlloc.peak_usage();
        PeakAlloc.reset_peak_usage();
        self.highest = self.highest.max(peak);
        peak
    }
}
