//! The memory that this process holds, in bytes.

use peak_alloc::PeakAlloc;

/// Counts the bytes that the allocator of this process hands out, where that is [`PeakAlloc`]; another does not count.
pub(super) struct Meter(Option<Counted>);

/// Bytes at the beginning, and the most since.
struct Counted {
    before: usize,
    highest: usize,
}

impl Meter {
    /// Starts counting from the current number of bytes.
    pub(super) fn start() -> Self {
        let before = PeakAlloc.current_usage();
        PeakAlloc.reset_peak_usage();
        Self((before > 0).then_some(Counted { before, highest: before }))
    }

    /// Runs `work`, and returns its result and the most bytes that it held in addition to those before.
    pub(super) fn most_bytes<T>(&mut self, work: impl FnOnce() -> T) -> (T, Option<usize>) {
        self.catch_up();
        let before = PeakAlloc.current_usage();
        let result = work();
        (result, self.catch_up().map(|peak| peak.saturating_sub(before)))
    }

    /// Runs `work` without counting its bytes, including those that it leaves allocated.
    pub(super) fn apart<T>(&mut self, work: impl FnOnce() -> T) -> T {
        self.catch_up();
        let before = PeakAlloc.current_usage();
        let result = work();
        let left = PeakAlloc.current_usage().saturating_sub(before);
        if let Some(counted) = &mut self.0 {
            counted.before += left;
            counted.highest += left;
        }
        PeakAlloc.reset_peak_usage();
        result
    }

    /// Returns the most bytes that were held since the start, in addition to those at the start.
    pub(super) fn finish(mut self) -> Option<usize> {
        self.catch_up();
        self.0.map(|counted| counted.highest.saturating_sub(counted.before))
    }

    /// Returns the most bytes held since the last call.
    fn catch_up(&mut self) -> Option<usize> {
        let counted = self.0.as_mut()?;
        let peak = PeakAlloc.peak_usage();
        PeakAlloc.reset_peak_usage();
        counted.highest = counted.highest.max(peak);
        Some(peak)
    }
}
