//! The gate of memory: the peak of a call beyond its inputs, and the bytes that it leaves behind.

use assay_schema::campaign::{CampaignReport, FailureCause, MemoryFinding};
use assay_schema::number::six;
use assay_schema::programs::CallMemory;

use crate::cause::is_called;
use crate::text::problems;

/// The gate of a kernel that takes more memory than it may.
pub(crate) const MEMORY: &str = "memory";
/// The gate of a kernel that leaves more behind with each call.
pub(crate) const LEAK: &str = "leak";

/// Adds the memory of a kernel's calls to the report of its campaign, and a cause for what is beyond its limit.
///
/// ```
/// use assay_campaign::{Campaign, Deck, LocalKernel, add_memory};
/// use assay_core::problem::Problem;
/// use assay_core::spec::LossSpec;
/// use assay_native::Native;
/// use assay_schema::campaign::MemoryFinding;
/// use assay_schema::programs::CallMemory;
///
/// let deck = Deck { cases: 2, wide: 0, ..Deck::default() };
/// let campaign = Campaign { deck, power: false, ..Campaign::new("native", LossSpec::default()) };
/// let mut report = campaign.run(&mut LocalKernel::<Problem>(&Native::default()), &mut |_| ()).unwrap();
/// let call = CallMemory { forward: Some(100), backward: Some(300), peak: 300, kept: None, leaked: None };
/// let problem = "1x1x25 f32".to_string();
/// let found = MemoryFinding { problem, logits_bytes: 100, limit: 1.1, call: Some(call), raised: None };
/// add_memory(&mut report, vec![found], &[]);
/// assert!(report.causes[0].sentence.contains("the backward pass holds 3.00 × the logits"));
/// ```
pub fn add_memory(report: &mut CampaignReport, found: Vec<MemoryFinding>, allow: &[String]) {
    for (gate, sentence) in [(MEMORY, beyond as fn(&MemoryFinding) -> Option<String>), (LEAK, left_behind)] {
        let failed: Vec<(&MemoryFinding, String)> =
            found.iter().filter_map(|one| Some((one, sentence(one)?))).collect();
        // The dtypes fail alike: the one that takes, or leaves, most in units of its logits speaks for all.
        let size = |found: &MemoryFinding| if gate == LEAK { leaked_in_logits(found) } else { in_logits(found) };
        let worst = failed.iter().max_by(|(a, _), (b, _)| size(a).total_cmp(&size(b)));
        let Some((worst, sentence)) = worst else { continue };
        let cause = FailureCause {
            gate: gate.into(),
            sentence: sentence.clone(),
            cases: failed.len() as u64,
            first: failed[0].0.problem.clone(),
            problem: worst.problem.clone(),
            ..FailureCause::default()
        };
        if allow.iter().any(|name| is_called(&cause, name)) {
            report.allowed.push(cause);
        } else {
            report.causes.push(cause);
            report.passed = false;
        }
    }
    report.memory = found;
}

/// Returns the peak of a call with what is kept between calls, in units of the logits.
fn in_logits(found: &MemoryFinding) -> f64 {
    let call = found.call.as_ref();
    call.map_or(f64::INFINITY, |call| (call.peak + call.kept.unwrap_or(0)) as f64 / found.logits_bytes as f64)
}

fn leaked_in_logits(found: &MemoryFinding) -> f64 {
    let leaked = found.call.as_ref().and_then(|call| call.leaked);
    leaked.map_or(0.0, |leaked| leaked as f64 / found.logits_bytes as f64)
}

/// Says where a call takes more than it may.
fn beyond(found: &MemoryFinding) -> Option<String> {
    if let Some(raised) = &found.raised {
        return Some(format!("the kernel raises an error where its memory is measured: {raised}"));
    }
    let call = found.call.as_ref()?;
    let held = in_logits(found);
    if held <= found.limit {
        return None;
    }
    let CallMemory { forward, backward, kept, peak, .. } = call;
    let pass = match (forward, backward) {
        (Some(forward), Some(backward)) if forward >= backward => "the forward pass",
        (Some(_), Some(_)) => "the backward pass",
        _ => "a call",
    };
    let of_logits = |n: u64| n as f64 / found.logits_bytes as f64;
    // An array that is a little smaller than the logits counts as one: a pass may leave out a vocabulary entry.
    let arrays = match of_logits(*peak) + 0.05 {
        less if less < 1.0 => "no array of their size".to_string(),
        one if one < 2.0 => "an array of their size".into(),
        count => format!("{} arrays of their size at once", count.floor()),
    };
    let limit = six(found.limit);
    let held = of_logits(*peak);
    Some(match kept.filter(|kept| *kept > 0) {
        None => format!("{pass} holds {held:.2} × the logits beside its inputs, and {limit} is allowed: {arrays}"),
        Some(kept) => {
            let (kept, all) = (of_logits(kept), held + of_logits(kept));
            format!(
                "a call needs {all:.2} × the logits beside its inputs, and {limit} is allowed: {kept:.2} is kept from the first call on, and \
                 {pass} holds {held:.2}"
            )
        }
    })
}

/// Says what each call leaves behind.
fn left_behind(found: &MemoryFinding) -> Option<String> {
    let leaked = found.call.as_ref()?.leaked.filter(|leaked| *leaked > 0)?;
    let of_logits = leaked_in_logits(found);
    Some(format!("each call leaves {of_logits:.2} × the logits behind, {:.1} MB", leaked as f64 / 1e6))
}

/// `forward 1.00, backward 3.00 × the logits of 1x256x151936 f32; at most 1.1 is allowed`
pub(crate) fn memory(found: &[MemoryFinding]) -> String {
    let one = |found: &MemoryFinding| {
        let of_logits = |n: u64| format!("{:.2}", n as f64 / found.logits_bytes as f64);
        let Some(CallMemory { forward, backward, peak, kept, .. }) = &found.call else {
            let why = found.raised.as_deref().unwrap_or("it was not asked");
            return format!("not measured of {}: {why}", found.problem);
        };
        let passes = match (forward, backward) {
            (Some(forward), Some(backward)) => {
                format!("forward {}, backward {}", of_logits(*forward), of_logits(*backward))
            }
            _ => format!("a call {}", of_logits(*peak)),
        };
        let kept = kept.filter(|kept| *kept > 0).map_or(String::new(), |kept| format!(", kept {}", of_logits(kept)));
        format!("{passes}{kept} × the logits of {}", found.problem)
    };
    let limit = found.first().map_or(String::new(), |found| format!("; at most {} is allowed", six(found.limit)));
    format!("{}{limit}", found.iter().map(one).collect::<Vec<_>>().join("; "))
}

/// The end of the last line of a report for what its causes of memory are, and the number of the other causes.
pub(crate) fn apart_from_memory(report: &CampaignReport) -> (usize, String) {
    let (of_memory, others): (Vec<_>, Vec<_>) =
        report.causes.iter().partition(|cause| [MEMORY, LEAK].contains(&cause.gate.as_str()));
    let raised = report.memory.iter().any(|found| found.raised.is_some());
    let words = of_memory.iter().map(|cause| {
        let failed = problems(cause.cases);
        match cause.gate.as_str() {
            LEAK => format!(", a leak in {failed}"),
            _ if raised => format!(", memory not measured in {failed}"),
            _ => format!(", too much memory in {failed}"),
        }
    });
    (others.len(), words.collect())
}
