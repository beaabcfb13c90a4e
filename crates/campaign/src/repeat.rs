//! Asks a kernel again for the problems that it failed: a failure that does not show again is of memory or of state, and no gate
//! explains it.

use std::collections::BTreeMap;
use std::sync::Arc;

use assay_judge::trial::JudgedProblem;

use crate::examine::{Examiner, FailedProblem, FailureGroup, FailureKind};
use crate::subject::Subject;

/// Failures of one kind that must show again before the others of that kind are taken to do so too.
const SHOWN_AGAIN: usize = 2;

/// Copies of a problem that a kernel is asked for, each in memory of its own: what a kernel keeps by address may be right for one of
/// them by chance, and wrong for another whose memory held other problems before.
const COPIES: usize = 4;

/// Moves failures of gates, or by garbage under the mask, that do not show again into kinds of their own: `stale-memory` where the same
/// problem passes in other memory, and `not-reproducible` where it passes in its own.
pub(crate) fn split_off_unrepeated<P: Subject>(
    buckets: &mut BTreeMap<(Option<usize>, FailureKind), FailureGroup<P>>,
    bench: &mut Examiner<P>,
) {
    for ((way, kind), mut group) in std::mem::take(buckets) {
        bench.call_by(way);
        let mut moved: Vec<(FailureKind, FailedProblem<P>)> = Vec::new();
        if matches!(kind, FailureKind::Gate(..) | FailureKind::MaskedGarbage) {
            // The smallest problems come first: a kernel that fails two of them again has a mistake that shows by itself.
            let (mut shown_again, mut rest) = (0, std::mem::take(&mut group.kept).into_iter());
            while shown_again < SHOWN_AGAIN
                && let Some(failing) = rest.next()
            {
                match unrepeated_kind(bench, &failing.problem) {
                    None => {
                        shown_again += 1;
                        group.kept.push(failing);
                    }
                    Some(other) => moved.push((other, failing)),
                }
            }
            group.kept.extend(rest);
        }
        let mut add = |kind: FailureKind, group: FailureGroup<P>| match buckets.get_mut(&(way, kind.clone())) {
            Some(known) => known.add(group),
            None => drop(buckets.insert((way, kind), group)),
        };
        if group.kept.is_empty()
            && let Some((other, _)) = moved.last()
        {
            // No problem that was kept fails again: those that were not kept are taken for what these are.
            let other = other.clone();
            group.worst = None;
            for (_, failing) in moved {
                group.keep(failing);
            }
            add(other, group);
        } else {
            for (other, failing) in moved {
                add(other, group.split_off(failing));
            }
            add(kind, group);
        }
    }
    bench.call_by(None);
}

/// Returns the kind of failure of a problem that failed a gate and does not in memory of its own; `None` if it fails there too.
fn unrepeated_kind<P: Subject>(bench: &mut Examiner<P>, problem: &Arc<P>) -> Option<FailureKind> {
    let known = JudgedProblem::new(bench.spec, &**problem).ok()?;
    let mut copies = Vec::new();
    while copies.len() < COPIES {
        let copy = Arc::new((**problem).clone());
        // A failure by another gate is a failure.
        if bench.judged(&copy, &known).kinds.is_empty() {
            let again = bench.judged(problem, &known).kinds;
            return Some(if again.is_empty() { FailureKind::OtherBits } else { FailureKind::Stale });
        }
        // All copies are kept until the end, so that each has other memory.
        copies.push(copy);
    }
    None
}
