//! The final VLIW program of each kernel, as libtpu dumps it: loops, trips, cycles, slots.
//!
//! # Which files
//! `TIME-NAME-NN-final_bundles.txt` is the program of one kernel; the slots that each of its bundles uses are in
//! `TIME-NAME-NN-final_hlo-static-per-bundle-utilization.txt`. `NAME` is the HLO instruction: a fusion of XLA
//! (`fusion.15`), an all-reduce, or a Mosaic custom call under the name that its instruction has. Three more belong
//! to the program as a whole: `TLP`, the top level, which launches the kernels, waits for copies and executes the
//! smallest operations itself, and `<late-initialization>` and `<late-finalization>` around it. The files of a
//! kernel's earlier stages are not read. If a kernel was compiled twice under one name, the later one counts.
//! `SparseCore` programs (offloaded gathers) leave no such file: their time is not counted.
//!
//! # Bundles and loops
//! A bundle is one line, `0x35 LB: >> { … ;; … }`, sometimes drawn out over several by a comment; it issues in one
//! cycle. A loop starts at a bundle marked `LB` and ends with the branch back to the region that starts there, plus
//! the branch's delay slots (4 bundles; 6 on v7x). The number of `>` is the loop depth, but branches and delay slots
//! often lack the mark, so only the start is taken from it.
//!
//! # Trips
//! The loop's branch depends on a comparison `scmp.ge counter, N /* loop exit test */`; with a counter that starts at a
//! constant and grows by one, spilled or not, trips are known. The loop over the grid of a Mosaic kernel, and the
//! like loop of an XLA fusion, is a software pipeline: its exit test counts some trips more than the grid has steps
//! (2 to 10), in which the pipeline fills and drains and the body is branched over. Its trips are the grid's steps,
//! the product of the `iteration_bounds` that its DMAs carry. Any other exit test (a number from memory, a
//! collective's barrier) leaves the trips unknown, `None`: such a loop is counted as one trip, and so is a loop
//! that a branch may pass over, such as the copy of an argument that the caller did not donate.
//! `cycles` are a lower bound in that sense.
//!
//! A trip takes the shortest way through its loop, and the bundles off that way count once: the start of a copy that the last trips
//! leave out, the work of the first or the last step of a row, the longer side of a choice. A branch that would pass over more than
//! half of a trip is not taken: that half is the purpose of the loop, and only the trips in which a pipeline fills and drains, which
//! are not counted, pass over it.
//!
//! `cycles` are those of one launch; the HLO has the number of launches.

use std::collections::{BTreeMap, HashMap};
use std::iter;
use std::path::{Path, PathBuf};

pub use assay_schema::compile::{Loop, SlotUse, TpuLaunch};

use super::target::TpuChip;
use crate::error::AheadError;
use crate::files::{read_text, sorted_names};

const BUNDLES: &str = "-final_bundles.txt";
const UTILIZATION: &str = "-final_hlo-static-per-bundle-utilization.txt";

/// The passes whose dumps libtpu is asked to write, as a regular expression.
#[cfg(feature = "plugin")]
pub(super) const PASSES: &str = "final_bundles|final_hlo-static-per-bundle-utilization";

/// The most steps by which a pipeline's exit test exceeds its grid. The most that were seen is 10.
const MOST_STAGES: u64 = 16;

/// The assumed trips of a loop with unknown trips where loops are compared: it may be the longest.
const MANY: u64 = u32::MAX as u64;

/// Returns the cycles that these slots alone would take.
fn cycles_of(slot: &SlotUse) -> f64 {
    slot.used as f64 / slot.capacity as f64
}

/// Reads every kernel whose dump is in `folder`, in the order of their names.
///
/// # Errors
/// [`AheadError::Malformed`] for a file that does not read as expected, [`AheadError::Io`] for one that cannot be read.
pub fn read(folder: &Path, chip: &TpuChip) -> Result<Vec<TpuLaunch>, AheadError> {
    let mut utilizations = BTreeMap::new();
    let mut bundles = BTreeMap::new();
    // Names begin with the time, so that the latest of a kernel comes last and replaces the earlier ones.
    let names = sorted_names(folder)?;
    for name in &names {
        if let Some(kernel) = kernel_of(name, BUNDLES) {
            bundles.insert(kernel, folder.join(name));
        } else if let Some(kernel) = kernel_of(name, UTILIZATION) {
            utilizations.insert(kernel, folder.join(name));
        }
    }
    // Each kernel needs both files: the bundles, and the slots that each of them fills.
    let pair = |(name, path): (&str, PathBuf)| {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let missing = || AheadError::malformed(&file, 0, "no utilization file beside it", "one of the same kernel");
        let utilization = utilizations.get(name).ok_or_else(missing)?;
        parse(name, &read_text(&path)?, &read_text(utilization)?, chip)
    };
    if bundles.is_empty() {
        return Err(AheadError::malformed(BUNDLES, 0, "no such file", "the program of each kernel"));
    }
    bundles.into_iter().map(pair).collect()
}

/// Returns the kernel's name, `fusion.15` for `TIME-fusion.15-02-final_bundles.txt`.
fn kernel_of<'n>(file: &'n str, suffix: &str) -> Option<&'n str> {
    // The suffix begins with a dash, which `…-schedule-analysis_final_bundles.txt` lacks.
    let (kernel, _number) = file.strip_suffix(suffix)?.rsplit_once('-')?;
    let (time, name) = kernel.split_once('-')?;
    time.bytes().all(|byte| byte.is_ascii_digit()).then_some(name)
}

/// A bundle: the operations that issue in one cycle.
struct VliwBundle<'t> {
    starts_loop: bool,
    depth: usize,
    /// The lines of the dump up to the next bundle.
    lines: Vec<&'t str>,
}

impl<'t> VliwBundle<'t> {
    /// Parses a line that begins a bundle, and returns its address and the bundle.
    fn begin(line: &'t str) -> Option<(u64, VliwBundle<'t>)> {
        // `0x35 LB: >> { … }`: an address, marks of two capitals, the loop depth, and the instructions.
        let (address, body) = line.split_once(':')?;
        let mut words = address.split_whitespace();
        let first = words.next()?;
        let address = match first.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok()?,
            None => first.parse().ok().filter(|&address| address == 0)?,
        };
        let marks: Vec<&str> = words.collect();
        if marks.iter().any(|mark| mark.len() != 2 || !mark.bytes().all(|byte| byte.is_ascii_uppercase())) {
            return None;
        }
        let (depth, body) = body.split_once('{')?;
        if !depth.chars().all(|c| c == '>' || c == ' ') {
            return None;
        }
        let starts_loop = marks.contains(&"LB");
        Some((address, VliwBundle { starts_loop, depth: depth.matches('>').count(), lines: vec![body] }))
    }

    /// Splits the bundle into instructions, each with the comment that follows it.
    fn instructions(&self) -> impl Iterator<Item = &'t str> {
        self.lines.first().into_iter().flat_map(|line| line.split(";;")).map(str::trim)
    }

    /// Returns the numbers of the regions that start at this bundle.
    fn regions(&self) -> impl Iterator<Item = &'t str> {
        const STARTS: [&str; 2] = ["Start region ", "Start/End empty region "];
        let after = |line: &'t str| STARTS.into_iter().flat_map(|start| line.split(start).skip(1));
        self.lines.iter().copied().flat_map(after).map(leading_digits)
    }

    /// Returns the product of each of the `iteration_bounds` that the DMAs of the bundle have.
    fn grids(&self) -> impl Iterator<Item = u64> {
        self.lines.iter().filter_map(|line| {
            let extents = line.trim().strip_prefix("iteration_bounds: (")?.split_once(')')?.0;
            extents.split(',').try_fold(1_u64, |grid, extent| grid.checked_mul(extent.trim().parse().ok()?))
        })
    }
}

fn leading_digits(text: &str) -> &str {
    &text[..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())]
}

/// A branch to a region, with its condition.
struct VliwBranch<'t> {
    region: &'t str,
    /// The predicate that must be false for the branch to be taken.
    unless: Option<&'t str>,
}

impl<'t> VliwBranch<'t> {
    /// Parses a branch such as `%36 = sbr.rel (!%p34_p13) target = $region3177`.
    fn parse(instruction: &'t str) -> Option<VliwBranch<'t>> {
        let (_, branch) = instruction.split_once(" = sbr.rel ")?;
        let (predicate, region) = branch.split_once("target = $region")?;
        let unless = predicate.trim().strip_prefix("(!").and_then(|predicate| predicate.strip_suffix(')'));
        Some(VliwBranch { region: leading_digits(region), unless })
    }
}

/// The operation and the operands that define a scalar or a predicate.
type ScalarDefinition<'t> = (&'t str, Vec<&'t str>);

/// Parses a definition such as `%p34 = scmp.ge.s32.totalorder %s37, 598 /* loop exit test */`. A predicate before the operands, as in
/// `smov.u32 (%p3), 0`, is dropped: a name has one definition, and the predicate holds wherever the name is read.
fn definition(instruction: &str) -> Option<(&str, ScalarDefinition<'_>)> {
    let (name, expression) = instruction.split_once(" = ")?;
    // Comments and the end of the bundle are not part of the expression.
    let expression = &expression[..expression.find(['/', '}']).unwrap_or(expression.len())];
    let (operation, operands) = expression.trim().split_once(' ')?;
    if !name.starts_with('%') {
        return None;
    }
    let operands = operands.split(',').map(str::trim).filter(|operand| !operand.starts_with('('));
    Some((name, (operation, operands.collect())))
}

/// The scalars of a kernel and their definitions, by name.
struct ScalarDefinitions<'t> {
    definitions: HashMap<&'t str, Vec<ScalarDefinition<'t>>>,
    /// The values that are stored to each spill slot, `[smem:[#allocation7_spill]]`.
    spilled: HashMap<&'t str, Vec<&'t str>>,
}

impl<'t> ScalarDefinitions<'t> {
    fn new(bundles: &[VliwBundle<'t>]) -> ScalarDefinitions<'t> {
        let (mut definitions, mut spilled): (HashMap<_, Vec<_>>, HashMap<_, Vec<_>>) = Default::default();
        for (name, definition) in bundles.iter().flat_map(VliwBundle::instructions).filter_map(definition) {
            // A store to a spill slot: `sst [smem:[#allocation7_spill]] %s2_s1`.
            if let ("sst", [store]) = (definition.0, definition.1.as_slice())
                && let Some((slot, value)) = store.split_once(' ')
            {
                spilled.entry(slot).or_default().push(value);
            }
            definitions.entry(name).or_default().push(definition);
        }
        // A register, unlike a name, is written many times.
        definitions.retain(|_, all| all.len() == 1);
        ScalarDefinitions { definitions, spilled }
    }

    /// Returns the spilled value if `name` is loaded from a slot that only one value is stored to, and otherwise `name`.
    fn before_spill<'n>(&self, name: &'n str) -> &'n str
    where
        't: 'n,
    {
        let stored = self.operands(name, "sld").and_then(|slot| self.spilled.get(slot.first()?));
        match stored.map(Vec::as_slice) {
            Some([value]) => value,
            _ => name,
        }
    }

    /// Returns the operands of `name` if `operation` defines it.
    fn operands(&self, name: &str, operation: &str) -> Option<&[&'t str]> {
        let definitions = self.definitions.get(name)?;
        definitions.iter().find(|(defined, _)| defined.starts_with(operation)).map(|(_, operands)| operands.as_slice())
    }

    fn constant(&self, operand: &str) -> Option<u64> {
        match operand.parse() {
            Ok(value) => Some(value),
            Err(_) => self.operands(self.before_spill(operand), "smov.u32")?.first()?.parse().ok(),
        }
    }

    /// Returns the trips of the loop that ends when `exit` holds: `counter ≥ end`, counting up from a constant by one.
    fn trips(&self, exit: &str) -> Option<u64> {
        // The exit test: `scmp.ge counter, end`.
        let &[counter, end] = self.operands(exit, "scmp.ge.s32")? else { return None };
        let end = self.constant(end)?;
        // The counter grows by one in each trip, from the value of a `sphi` at the loop's start.
        let &[step, before] = self.operands(counter, "sadd.s32")? else { return None };
        let start = self.constant(self.operands(self.before_spill(before), "sphi")?.first()?)?;
        (step == "1" && end > start).then(|| end - start)
    }
}

/// The bundles of one loop, and how often it turns.
struct LoopSpan {
    start: usize,
    /// The last bundle of the loop, with the branch's delay slots.
    last: usize,
    depth: usize,
    trips: Option<u64>,
    optional: bool,
    /// Bundles of the loop and its inner loops that a branch may pass over, ascending.
    passed_over: Vec<usize>,
}

impl LoopSpan {
    fn holds(&self, other: &LoopSpan) -> bool {
        self.start <= other.start && self.last >= other.last
    }
}

/// A branch from one bundle to another, and the predicate that must be false for it to be taken.
type BranchJump<'t> = (usize, usize, Option<&'t str>);

/// Parses the kernel called `name` from the texts of its two files.
///
/// # Errors
/// [`AheadError::Malformed`], with the line that does not read as expected.
pub fn parse(name: &str, bundles: &str, utilization: &str, chip: &TpuChip) -> Result<TpuLaunch, AheadError> {
    // Both files list the bundles in the same order.
    let parsed = parse_bundles(&format!("{name}{BUNDLES}"), bundles)?;
    let file = format!("{name}{UTILIZATION}");
    let (kinds, rows) = parse_utilization(&file, utilization)?;
    if rows.len() != parsed.len() {
        let given = format!("{} rows for {} bundles", rows.len(), parsed.len());
        return Err(AheadError::malformed(&file, 0, given, "a row for each bundle"));
    }
    let spans = spans(&parsed, chip.branch_delay);
    Ok(count(name, &spans, &kinds, &rows))
}

fn parse_bundles<'t>(file: &str, text: &'t str) -> Result<Vec<VliwBundle<'t>>, AheadError> {
    let mut bundles: Vec<VliwBundle> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if let Some((address, bundle)) = VliwBundle::begin(line) {
            if address != bundles.len() as u64 {
                return Err(AheadError::malformed(file, at + 1, line.trim(), "the bundle after the one before it"));
            }
            bundles.push(bundle);
        } else if let Some(bundle) = bundles.last_mut() {
            bundle.lines.push(line);
        }
        // The lines before the first bundle are a legend.
    }
    if bundles.is_empty() {
        return Err(AheadError::malformed(file, 0, "no bundle", "lines such as `0x1 : { … }`"));
    }
    Ok(bundles)
}

/// The slots' names with their capacities, and the slots that each bundle fills.
type SlotUtilization<'t> = (Vec<(&'t str, u64)>, Vec<Vec<u64>>);

fn parse_utilization<'t>(file: &str, text: &'t str) -> Result<SlotUtilization<'t>, AheadError> {
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let mut next =
        |expected| lines.next().ok_or_else(|| AheadError::malformed(file, 0, "the end of the file", expected));
    let numbers = |(at, line): (usize, &str), count: usize| -> Result<Vec<u64>, AheadError> {
        let row: Option<Vec<u64>> = line.split_whitespace().map(|number| number.parse().ok()).collect();
        row.filter(|row| row.len() == count)
            .ok_or_else(|| AheadError::malformed(file, at + 1, line, "a number for each slot"))
    };
    // `== CAPACTIY:`, as libtpu spells it.
    let (at, heading) = next("a heading of capacities")?;
    if !heading.starts_with("== CAP") {
        return Err(AheadError::malformed(file, at + 1, heading, "a heading of capacities"));
    }
    let (_, names) = next("the names of the slots")?;
    let names: Vec<&str> = names.split(',').map(str::trim).collect();
    let capacity_line = next("the slots' capacities")?;
    let capacities = numbers(capacity_line, names.len())?;
    if capacities.contains(&0) {
        return Err(AheadError::malformed(file, capacity_line.0 + 1, capacity_line.1, "capacities of at least 1"));
    }
    let (at, heading) = next("a heading of rows")?;
    if !heading.starts_with("== UTIL") {
        return Err(AheadError::malformed(file, at + 1, heading, "`== UTILIZATION:`"));
    }
    let rows = lines.map(|line| numbers(line, names.len())).collect::<Result<_, _>>()?;
    Ok((names.into_iter().zip(capacities).collect(), rows))
}

/// Finds the loops with their trips, in order of their start.
fn spans(bundles: &[VliwBundle], delay: usize) -> Vec<LoopSpan> {
    // Branches name regions, and regions start at bundles: each branch becomes a jump from bundle to bundle.
    let scalars = ScalarDefinitions::new(bundles);
    let mut starts = HashMap::new();
    for (at, bundle) in bundles.iter().enumerate() {
        starts.extend(bundle.regions().map(|region| (region, at)));
    }
    let branches: Vec<BranchJump> = bundles
        .iter()
        .enumerate()
        .flat_map(|(at, bundle)| bundle.instructions().filter_map(VliwBranch::parse).map(move |branch| (at, branch)))
        .filter_map(|(at, branch)| Some((at, *starts.get(branch.region)?, branch.unless)))
        .collect();

    let mut spans: Vec<LoopSpan> = Vec::new();
    for (start, bundle) in bundles.iter().enumerate().filter(|(_, bundle)| bundle.starts_loop) {
        // The last branch to the loop's first bundle closes the loop; its delay slots belong to the loop.
        let back = branches.iter().rfind(|(at, to, _)| *to == start && *at >= start);
        // Without a branch back, the loop is what is marked as deep as its start.
        let marked = bundles[start..].iter().take_while(|inside| inside.depth >= bundle.depth).count();
        let end = back.map_or(start + marked.max(1) - 1, |(at, ..)| at + delay);
        let last = end.min(bundles.len() - 1);
        // The loops found so far that end later enclose this one.
        let depth = 1 + spans.iter().filter(|outer| outer.last >= last).count();
        let trips = back.and_then(|(_, _, unless)| scalars.trips((*unless)?));
        spans.push(LoopSpan { start, last, depth, trips, optional: false, passed_over: vec![] });
    }
    for at in 0..spans.len() {
        let LoopSpan { start, last, depth, trips, .. } = spans[at];
        let inner =
            |bundle: &usize| spans.iter().any(|span| span.start > start && (span.start..=span.last).contains(bundle));
        // A pipeline's exit test counts more trips than its grid has steps. The grid is the product in its DMAs' `iteration_bounds` that is
        // at most 16 below the exit test.
        let grids = (start..=last).filter(|bundle| !inner(bundle)).flat_map(|bundle| bundles[bundle].grids());
        let grid = grids
            .filter(|&grid| trips.is_some_and(|trips| (grid..=grid.saturating_add(MOST_STAGES)).contains(&trips)))
            .max();
        let passed = |&(from, to, _): &BranchJump| from < start && to > last;
        spans[at].trips = grid.filter(|&grid| grid > 0).or(trips);
        // A branch from before the loop to a place after it may pass over it.
        spans[at].optional = depth == 1 && branches.iter().any(passed);
    }
    for at in 0..spans.len() {
        // An inner loop that the outer one may pass over is optional too.
        let passed_over = passed_over(&spans, at, &branches, delay);
        let within = spans[at].depth + 1;
        for span in spans.iter_mut().filter(|span| span.depth == within) {
            span.optional |= passed_over.binary_search(&span.start).is_ok();
        }
        spans[at].passed_over = passed_over;
    }
    spans
}

/// Returns the bundles of the loop at `at` that are not on the shortest way through it, ascending.
fn passed_over(spans: &[LoopSpan], at: usize, branches: &[BranchJump], delay: usize) -> Vec<usize> {
    let LoopSpan { start, last, .. } = spans[at];
    let inner = || spans.iter().filter(|span| span.start > start && span.last <= last);
    // The weight of a bundle is the product of the trips of all inner loops around it.
    let mut trips = vec![1_u64; last + 1 - start];
    for span in inner() {
        for bundle in &mut trips[span.start - start..=span.last - start] {
            *bundle = bundle.saturating_mul(span.trips.unwrap_or(MANY));
        }
    }
    // Cycles before each bundle, by the straight way.
    let mut before = vec![0_u64];
    before.extend(trips.iter().scan(0_u64, |sum, trips| {
        *sum = sum.saturating_add(*trips);
        Some(*sum)
    }));
    // Prefix sums give the cycles between any two bundles.
    let all = before[trips.len()];
    // Of those that go on within the loop and leave no inner one, from where to where, with what is run in the branch's delay.
    // Candidates are forward jumps within this loop that start outside of inner loops. A jump over more than half of a trip is not taken:
    // that half is the purpose of the loop.
    let jumps = branches.iter().filter_map(|&(from, to, _)| {
        let own = (start..=last).contains(&from) && !inner().any(|span| (span.start..=span.last).contains(&from));
        let (leaves, lands) = ((from + 1 + delay).checked_sub(start)?, to.checked_sub(start)?);
        let skips = own && leaves < lands && to <= last;
        (skips && (before[lands] - before[leaves]).saturating_mul(2) <= all).then_some((leaves, lands))
    });
    let jumps: Vec<(usize, usize)> = jumps.collect();
    // Of each place the least cycles before it, and whence: by a jump, or by the bundle before.
    // Dynamic programming over the bundles: the least cycles to each bundle, and the bundle before it on that way.
    let mut shortest = vec![(0_u64, 0, false)];
    for (here, trips) in trips.iter().enumerate() {
        let straight = (shortest[here].0.saturating_add(*trips), here, false);
        let jumped = jumps.iter().filter(|(_, lands)| *lands == here + 1);
        let jumped = jumped.map(|&(leaves, _)| (shortest[leaves].0, leaves, true));
        shortest.push(jumped.chain([straight]).min().expect("the straight way"));
    }
    // Walks the shortest way back and collects the bundles that its jumps pass over.
    let mut passed_over = Vec::new();
    let mut here = trips.len();
    while here > 0 {
        let (_, from, jumped) = shortest[here];
        if jumped {
            passed_over.extend((from..here).rev().map(|bundle| start + bundle));
        }
        here = from;
    }
    passed_over.reverse();
    passed_over
}

/// Sums cycles and slots over the trips of all loops.
fn count(name: &str, spans: &[LoopSpan], kinds: &[(&str, u64)], rows: &[Vec<u64>]) -> TpuLaunch {
    // The innermost loop of each bundle, as an index into `spans` + 1; 0 is outside all.
    let mut innermost = vec![0; rows.len()];
    for (at, span) in spans.iter().enumerate() {
        innermost[span.start..=span.last].fill(at + 1);
    }
    // A loop turns as often as the trips of its whole nest say, up to the first loop that may be passed over.
    let nest = |span: &LoopSpan| spans.iter().filter(|outer| outer.holds(span)).collect::<Vec<_>>();
    let turns = |span: &LoopSpan| {
        let counted = nest(span).into_iter().rev().take_while(|outer| !outer.optional);
        counted.map(|outer| outer.trips.unwrap_or(1)).fold(1, u64::saturating_mul)
    };
    let turns: Vec<u64> = iter::once(1).chain(spans.iter().map(turns)).collect();
    // Counts bundles and slots by loop: a bundle that is passed over counts one turn.
    let mut own = vec![0_u64; spans.len() + 1];
    let mut passed_over = own.clone();
    let mut used = vec![vec![0_u64; kinds.len()]; spans.len() + 1];
    for (bundle, (row, &at)) in rows.iter().zip(&innermost).enumerate() {
        let once = at > 0 && spans[at - 1].passed_over.binary_search(&bundle).is_ok();
        let turns = if once { 1 } else { turns[at] };
        *if once { &mut passed_over[at] } else { &mut own[at] } += 1;
        for (sum, slots) in used[at].iter_mut().zip(row) {
            *sum = sum.saturating_add(slots.saturating_mul(turns));
        }
    }
    let slots = |used: &[u64]| -> Vec<SlotUse> {
        let with_use = kinds.iter().zip(used);
        with_use.map(|(&(name, capacity), &used)| SlotUse { name: name.into(), capacity, used }).collect()
    };
    // The kernel's sums are those outside of all loops, plus those of each loop.
    let mut total = used[0].clone();
    let mut cycles = own[0];
    let mut loops = Vec::new();
    for (at, span) in (1..).zip(spans) {
        for (total, used) in total.iter_mut().zip(&used[at]) {
            *total = total.saturating_add(*used);
        }
        // Cycles of a loop are known if the trips of its whole nest are.
        let known = nest(span).iter().all(|outer| outer.trips.is_some() && !outer.optional);
        let of_loop = own[at].saturating_mul(turns[at]).saturating_add(passed_over[at]);
        cycles = cycles.saturating_add(of_loop);
        loops.push(Loop {
            depth: span.depth,
            bundles: own[at],
            passed_over: passed_over[at],
            trips: span.trips,
            cycles: known.then_some(of_loop),
            optional: span.optional,
            slots: slots(&used[at]),
        });
    }
    let slots = slots(&total);
    // The slot that alone would take most cycles is the one that binds.
    let binding = slots.iter().filter(|slot| slot.used > 0).max_by(|a, b| cycles_of(a).total_cmp(&cycles_of(b)));
    let binding = binding.map(|slot| slot.name.clone());
    TpuLaunch { name: name.into(), bundles: rows.len() as u64, loops, cycles, runs: 1, slots, binding }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tpu::TpuTarget;

    const GRID: [&str; 2] = [
        include_str!("../../../../fixtures/tpu/mosaic_grid.bundles.txt"),
        include_str!("../../../../fixtures/tpu/mosaic_grid.utilization.txt"),
    ];
    const DYNAMIC: [&str; 2] = [
        include_str!("../../../../fixtures/tpu/mosaic_dynamic.bundles.txt"),
        include_str!("../../../../fixtures/tpu/mosaic_dynamic.utilization.txt"),
    ];

    fn parse([bundles, utilization]: [&str; 2]) -> Result<TpuLaunch, AheadError> {
        super::parse("name.1", bundles, utilization, TpuTarget::parse("v6e").unwrap().chip)
    }

    /// `(depth, bundles, trips, cycles, optional)`
    type LoopShape = (usize, u64, Option<u64>, Option<u64>, bool);

    fn shape(l: &Loop) -> LoopShape {
        (l.depth, l.bundles, l.trips, l.cycles, l.optional)
    }

    /// Writes the two files of a program with one bundle for each of `bodies`, which fill no slot but `VALU`.
    fn written(bodies: &[&str]) -> [String; 2] {
        let lines: Vec<String> = bodies.iter().enumerate().map(|(at, body)| format!(" {at:#x} {body}\n")).collect();
        let bundles = lines.concat().replacen("0x0", "0", 1);
        let rows = "1 0\n".repeat(bodies.len());
        [bundles, format!("== CAPACTIY:\nVALU, SALU\n 4 2\n== UTILIZATION:\n{rows}")]
    }

    fn loops_of(bodies: &[&str]) -> Vec<LoopShape> {
        let [bundles, utilization] = written(bodies);
        parse([&bundles, &utilization]).unwrap().loops.iter().map(shape).collect()
    }

    /// The kernel is a pipeline over 16 blocks, whose exit test counts 18 trips, around 8 steps of 24 bundles and 4 delay slots.
    #[test]
    fn schedule_of_a_grid_has_the_trips_that_were_written() {
        let kernel = parse(GRID).unwrap();
        let loops: Vec<_> = kernel.loops.iter().map(shape).collect();
        // 0x5 to 0x75 without 0x35 to 0x50.
        assert_eq!(loops, [(1, 85, Some(16), Some(85 * 16), false), (2, 28, Some(8), Some(28 * 16 * 8), false)]);
        assert_eq!(kernel.bundles, 122);
        assert_eq!(kernel.cycles, 122 - 85 - 28 + 85 * 16 + 28 * 16 * 8);
    }

    #[test]
    fn schedule_slots_are_counted_over_all_trips() {
        let kernel = parse(GRID).unwrap();
        let slot = |name: &str| kernel.slots.iter().find(|slot| slot.name == name).unwrap();
        // Eight vectors go through `exp` in each inner step.
        assert_eq!((slot("EUP").used, slot("EUP").capacity), (8 * 16 * 8, 1));
        assert_eq!((slot("VALU").capacity, slot("VLOAD").capacity, slot("MATMUL").used), (4, 3, 0));
        assert_eq!(kernel.binding.as_deref(), Some("SALU"));
    }

    #[test]
    fn schedule_trips_of_an_argument_are_unknown_and_count_once() {
        let kernel = parse(DYNAMIC).unwrap();
        let [grid, inner] = &kernel.loops[..] else { panic!("{:?}", kernel.loops) };
        assert_eq!((grid.trips, inner.depth, inner.trips, inner.cycles), (Some(16), 2, None, None));
        let outside = kernel.bundles - grid.bundles - inner.bundles;
        assert_eq!(kernel.cycles, outside + 16 * (grid.bundles + inner.bundles));
    }

    #[test]
    fn schedule_counter_is_followed_through_a_spill_slot() {
        let spilled = [
            ": { %s1_s0 = smov.u32 2 }",
            "LB: > { %s2_s1 = sphi %s1_s0 ;; %9 = sst [smem:[#allocation7_spill]] %s2_s1 } /* Start region 3 */",
            ": > { %s3_s1 = sld [smem:[#allocation7_spill]] }",
            ": > { %s4_s2 = sadd.s32 1, %s3_s1 ;; %p5_p0 = scmp.ge.s32.totalorder %s4_s2, 12 /* loop exit test */ }",
            ": { %6 = sbr.rel (!%p5_p0) target = $region3 }",
            ": {}",
        ];
        assert_eq!(loops_of(&spilled), [(1, 5, Some(10), Some(50), false)]);
        // A second value in the slot: which of them is loaded is not known.
        let mut twice = spilled;
        twice[2] = ": > { %s3_s1 = sld [smem:[#allocation7_spill]] ;; %8 = sst [smem:[#allocation7_spill]] %s1_s0 }";
        assert_eq!(loops_of(&twice), [(1, 5, None, None, false)]);
    }

    #[test]
    fn schedule_loop_that_may_be_passed_over_counts_once() {
        let copied = [
            ": { %1 = sbr.rel (%p0_p0) target = $region9 ;; %s1_s0 = smov.u32 0 }",
            "LB: > { %s2_s1 = sphi %s1_s0, %s4_s2 ;; %s4_s2 = sadd.s32 1, %s2_s1 } /* Start region 3 */",
            ": > { %p5_p0 = scmp.ge.s32.totalorder %s4_s2, 18994 ;; %6 = sbr.rel (!%p5_p0) target = $region3 }",
            ": {}",
            ": {}",
            ": {}",
            ": {}",
            "PF: {} /* Start/End empty region 9 */",
        ];
        assert_eq!(loops_of(&copied), [(1, 6, Some(18994), None, true)]);
        let [bundles, utilization] = written(&copied);
        assert_eq!(parse([&bundles, &utilization]).unwrap().cycles, 8);
    }

    /// A trip has 30 bundles and the branch's delay; a branch passes over eight of them.
    #[test]
    fn schedule_bundles_passed_over_in_a_loop_count_once() {
        let program = |skips: &str, inner: [&str; 2]| -> Vec<String> {
            let mut bodies = vec![": { %s1_s0 = smov.u32 0 }".to_string()];
            bodies.push(
                "LB: > { %s2_s1 = sphi %s1_s0, %s4_s2 ;; %s4_s2 = sadd.s32 1, %s2_s1 } /* Start region 3 */".into(),
            );
            bodies.push(format!(": > {{ %8 = sbr.rel (%p7_p1) target = $region{skips} }}"));
            bodies.extend((0..4).map(|_| ": > {}".to_string()));
            bodies.extend(inner.map(String::from));
            bodies.extend((0..6).map(|_| ": > {}".to_string()));
            bodies.push("PF: > {} /* Start region 5 */".into());
            bodies.extend((0..12).map(|_| ": > {}".to_string()));
            bodies.push("PF: > {} /* Start region 6 */".into());
            bodies.push(": > { %p5_p0 = scmp.ge.s32.totalorder %s4_s2, 100 /* loop exit test */ }".into());
            bodies.push(": > { %6 = sbr.rel (!%p5_p0) target = $region3 }".into());
            bodies.extend((0..4).map(|_| ": > {}".to_string()));
            bodies
        };
        let loops = |bodies: Vec<String>| {
            let [bundles, utilization] = written(&bodies.iter().map(String::as_str).collect::<Vec<_>>());
            let kernel = parse([&bundles, &utilization]).unwrap();
            // Each bundle fills a VALU slot.
            assert_eq!(kernel.slots[0].used, kernel.cycles);
            let shape = |l: &Loop| (l.bundles, l.passed_over, l.trips, l.cycles, l.optional);
            (kernel.cycles, kernel.loops.iter().map(shape).collect::<Vec<_>>())
        };
        let plain = [": > {}"; 2];
        let all = 1 + 100 * 34;
        assert_eq!(loops(program("9", plain)), (all, vec![(34, 0, Some(100), Some(100 * 34), false)]), "to nowhere");
        let with_skip = (34 - 8, 8, Some(100), Some(100 * (34 - 8) + 8), false);
        assert_eq!(loops(program("5", plain)), (1 + 100 * (34 - 8) + 8, vec![with_skip]));
        // 21 of 34 are what the loop is there for.
        assert_eq!(loops(program("6", plain)).0, all);
        // What is passed over may be a loop: it counts as one trip, once.
        let inner = [
            "LB: >> { %s12_s1 = sphi %s1_s0, %s14_s2 ;; %s14_s2 = sadd.s32 1, %s12_s1 } /* Start region 4 */",
            ": >> { %p15_p0 = scmp.ge.s32.totalorder %s14_s2, 2 ;; %16 = sbr.rel (!%p15_p0) target = $region4 }",
        ];
        let (cycles, found) = loops(program("5", inner));
        // Two bundles and the four of its branch's delay.
        assert_eq!(found[1], (6, 0, Some(2), None, true));
        assert_eq!(cycles, 1 + 100 * (34 - 8) + 2 + 6);
    }

    #[test]
    fn schedule_malformed_dumps_are_errors() {
        let [bundles, utilization] = GRID;
        let cut = |text: &str, bytes: usize| text[..bytes].to_string();
        let broken = [
            [String::new(), utilization.into()],
            ["= control target key start\n".into(), utilization.into()],
            [bundles.replace(" 0x10 ", " 0x11 "), utilization.into()],
            [bundles.into(), String::new()],
            [bundles.into(), cut(utilization, 60)],
            [bundles.into(), cut(utilization, utilization.len() - 22)],
            [bundles.into(), utilization.replace("    2     2     2     4", "    2     2     2     0")],
            [bundles.into(), utilization.replace("0 0 0 0 0 0 1 0 0 0 0", "0 0 0 0 0 0 -1 0 0 0 0")],
            [bundles.into(), utilization.replace("== UTILIZATION:", "== SOMETHING")],
        ];
        for (at, [bundles, utilization]) in broken.iter().enumerate() {
            let error = parse([bundles, utilization]).unwrap_err();
            assert!(matches!(error, AheadError::Malformed { .. }), "{at}: {error}");
        }
    }

    #[test]
    fn schedule_files_of_earlier_passes_are_left_out() {
        let name = |file| kernel_of(file, BUNDLES);
        assert_eq!(name("1795258552235389527-all-reduce.2-02-final_bundles.txt"), Some("all-reduce.2"));
        assert_eq!(name("17-<late-finalization>-02-final_bundles.txt"), Some("<late-finalization>"));
        assert_eq!(name("17-fusion.15-01-schedule-analysis_final_bundles.txt"), None);
        assert_eq!(name("final_bundles.txt"), None);
        assert_eq!(name("other-fusion.15-02-final_bundles.txt"), None);
    }
}
