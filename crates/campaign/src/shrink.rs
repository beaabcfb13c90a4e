//! Smaller problems that still fail the same way. The reference judges any problem, so every edit is a legal step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use assay_core::problem::{Advantages, ProblemPart};

use crate::subject::Subject;

/// The limits of the search for a smaller problem.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShrinkEffort {
    /// The most calls of the kernel.
    pub(crate) calls: usize,
    /// The most time for the search.
    pub(crate) time: Duration,
    /// Whether extents may change: each is a program to compile, where programs are.
    pub(crate) shapes: bool,
}

impl ShrinkEffort {
    pub(crate) const WHOLE: Self = Self { calls: 400, time: Duration::from_secs(20), shapes: true };
    /// The limits for a kernel that is compiled again for each shape: few calls, and the shape is kept.
    pub(crate) const FEW_SHAPES: Self = Self { calls: 40, time: Duration::from_secs(20), shapes: false };
}

/// A problem on its way to a smaller one.
struct Shrinker<'s, P> {
    problem: Arc<P>,
    effort: ShrinkEffort,
    calls: usize,
    deadline: Instant,
    fails: &'s mut dyn FnMut(&Arc<P>) -> bool,
}

/// The smallest problem that is found for which `still` holds, as it does of `problem`, within so many calls of it: first fewer
/// sequences, tokens and columns, then plainer numbers. It is asked of problems in which a token counts, and no others.
pub fn simplify<P: Subject>(problem: Arc<P>, calls: usize, still: &mut dyn FnMut(&Arc<P>) -> bool) -> Arc<P> {
    const NO_END: Duration = Duration::from_secs(u32::MAX as u64);
    shrink(problem, ShrinkEffort { calls, time: NO_END, shapes: true }, still)
}

/// Makes a problem smaller within an effort, as long as it still fails.
pub(crate) fn shrink<P: Subject>(
    problem: Arc<P>,
    effort: ShrinkEffort,
    fails: &mut dyn FnMut(&Arc<P>) -> bool,
) -> Arc<P> {
    let deadline = Instant::now() + effort.time;
    let mut shrinker = Shrinker { problem, effort, calls: 0, deadline, fails };
    // Remove parts until a whole pass removes nothing: once an axis is shorter, another may shrink further.
    if effort.shapes {
        while shrinker.narrow() {}
    }
    shrinker.simplify();
    shrinker.problem
}

impl<P: Subject> Shrinker<'_, P> {
    /// Takes `smaller` if it still fails.
    fn try_one(&mut self, smaller: P) -> bool {
        // A problem in which no token counts has no loss to compare.
        if !smaller.batch().mask.iter().any(|counts| *counts) || self.is_spent() {
            return false;
        }
        self.calls += 1;
        let smaller = Arc::new(smaller);
        let fails = (self.fails)(&smaller);
        if fails {
            self.problem = smaller;
        }
        fails
    }

    fn is_spent(&self) -> bool {
        self.calls >= self.effort.calls || Instant::now() > self.deadline
    }

    /// One pass over all axes; whether anything went.
    fn narrow(&mut self) -> bool {
        let axes: [fn(&mut ProblemPart) -> &mut Vec<usize>; 3] =
            [|part| &mut part.batch, |part| &mut part.tokens, |part| &mut part.columns];
        let mut any = false;
        for axis in axes {
            // As in delta debugging, remove half an axis first, and halve the block whenever no block of this size can
            // go.
            let mut size = usize::MAX;
            while size > 0 && !self.is_spent() {
                let mut whole = self.problem.whole();
                let length = axis(&mut whole).len();
                size = size.min(length / 2);
                // From the end, so that what is left keeps its place.
                let starts = (0..length).step_by(size.max(1)).collect::<Vec<_>>();
                let gone = size > 0
                    && starts.into_iter().rev().any(|start| {
                        let mut part = whole.clone();
                        axis(&mut part).retain(|i| !(start..start + size).contains(i));
                        // Never empty an axis: a problem without tokens or entries is invalid.
                        !axis(&mut part).is_empty() && self.try_one(self.problem.part(&part))
                    });
                any |= gone;
                if !gone {
                    size /= 2;
                }
            }
        }
        any
    }

    /// Plainer numbers in the same places.
    fn simplify(&mut self) {
        let rounded = |x: &mut f64| *x = x.round();
        let tenths = |x: &mut f64| *x = (*x * 8.0).round() / 8.0;
        // Advantages and cotangents become −1, 0 or 1, as their sign alone often decides.
        let plainer = [self.problem.map_tokens(|tokens| {
            if let Some(others) = &mut tokens.extra.others {
                others.dlogp.mapv_inplace(f64::signum);
            }
            match &mut tokens.advantages {
                Advantages::Sequence(advantages) => advantages.mapv_inplace(f64::signum),
                Advantages::Token(advantages) | Advantages::Dlogp(advantages) => advantages.mapv_inplace(f64::signum),
            }
        })];
        for problem in plainer {
            self.try_one(problem);
        }
        // Round the log-probabilities to integers, then to eighths, one array at a time.
        for edit in [rounded as fn(&mut f64), tenths] {
            for array in [0, 1, 2, 3] {
                let edited = self.problem.map_tokens(|tokens| {
                    let array = match array {
                        0 => &mut tokens.old_logp,
                        1 => &mut tokens.ref_logp,
                        2 => &mut tokens.extra.rollout_logp,
                        _ => &mut tokens.extra.dentropy,
                    };
                    array.iter_mut().flatten().for_each(edit);
                });
                self.try_one(edited);
            }
        }
        // Replace the logits or hidden states from the plainest values to the richest; the first edit that still fails
        // is kept. Infinities stay, as they may be the cause.
        let values: [fn(f64) -> f64; 4] = [
            |x| if x.is_finite() { 0.0 } else { x },
            |x| if x.is_finite() { x.signum() } else { x },
            f64::round,
            |x| if x.is_finite() { (x * 8.0).round() / 8.0 } else { x },
        ];
        for edit in values {
            if self.try_one(self.problem.map_values(edit)) {
                break;
            }
        }
    }
}
