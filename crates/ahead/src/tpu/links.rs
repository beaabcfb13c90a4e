//! Lower bounds on the time of collectives on the links between chips.
//!
//! The chips form a grid, and each is connected to its neighbours along each axis by a link in each direction. For every part of the
//! grid, the bytes that must cross its boundary use the links that cross it:
//!
//! | collective of `n` devices, `a` of them inside the part and `b` outside | bytes across its boundary, of `S` bytes |
//! |---|---|
//! | all-reduce: `S` on each | `S`: the other side's sum |
//! | reduce-scatter of `S` on each | out `S·b/n`, in `S·a/n`: the sum of what the other side keeps |
//! | all-gather to `S` on each | out `S·a/n`, in `S·b/n` |
//! | all-to-all of `S` on each | `S·a·b/n` |
//! | permute of `S` | `S` for each pair |
//!
//! Groups that work at once share the links. The bound of a collective is the largest over all boxes of the grid: a single chip, a
//! line, a half. It leaves out hops, latency, and bytes that an algorithm sends in addition. Two devices on one chip exchange bytes
//! for free. Collectives that overlap with computing may overlap with each other too: their bound is that of the box over whose
//! boundary all of them together take longest.
//!
//! The operations between the start and the end of a collective hide it for as long as they take, and so do its own reads and writes
//! of HBM; for the remaining time the chip stalls. Two collectives that overlap each other but no computation are counted one after
//! the other: there the bound may be too high. Collectives that overlap with the same operations share the time of these: each
//! stalls for the part of its own time that they do not hide, and all of them for the part of their joint time over one boundary.

use std::collections::{BTreeSet, HashMap};

use super::target::TpuTarget;
use crate::traffic::{Collective, CollectiveKind, Traffic};

/// The most pairs of box and device that are examined; larger grids have slabs and single chips alone.
const MOST_LOOKS: usize = 20_000_000;

/// Lower bounds on the time that a program's collectives take on the links between chips, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkTimes {
    /// The time of all collectives: those that overlap with computing run together, the others one after another.
    pub all_ms: f64,
    /// The part of [`all_ms`](Self::all_ms) during which nothing else is computed: collectives without overlap, and the part of the others
    /// that exceeds the work they overlap with.
    pub exposed_ms: f64,
    /// The part of [`exposed_ms`](Self::exposed_ms) that comes from collectives with overlap.
    pub stalled_ms: f64,
    /// The collective that takes longest, with the box whose boundary bounds it.
    pub narrowest: Option<String>,
}

/// A box of the grid, whose boundary collectives cross.
struct GridBox {
    from: Vec<usize>,
    extents: Vec<usize>,
}

impl GridBox {
    fn holds(&self, chip: &[usize]) -> bool {
        // A chip is in the box if its coordinate is within the box on every axis.
        let mut axes = chip.iter().zip(&self.from).zip(&self.extents);
        axes.all(|((&at, &from), &extent)| (from..from + extent).contains(&at))
    }

    /// Returns the number of links that leave the box, each in one direction.
    fn links(&self, grid: &[usize], target: &TpuTarget) -> usize {
        let faces = |axis: usize| {
            // A box that spans the whole axis has no face across it.
            let (from, extent, all) = (self.from[axis], self.extents[axis], grid[axis]);
            if extent == all {
                return 0;
            }
            let wraps = target.chip.wraps(all);
            // Each end has a face where the grid goes on, or where the axis closes to a ring.
            let ends = usize::from(from > 0 || wraps) + usize::from(from + extent < all || wraps);
            // A face has one link for each chip on it.
            let area: usize = (0..grid.len()).filter(|&other| other != axis).map(|other| self.extents[other]).product();
            ends * area
        };
        (0..grid.len()).map(faces).sum()
    }

    fn name(&self) -> String {
        let list = |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        format!("{} at {}", list(&self.extents), list(&self.from))
    }
}

/// Returns all boxes of a grid but the whole grid. Large grids have slabs and single chips alone, so that at most [`MOST_LOOKS`] pairs of
/// box and device are examined.
fn boxes(grid: &[usize], devices: usize) -> Vec<GridBox> {
    let spans = |extent: usize| (0..extent).flat_map(move |from| (1..=extent - from).map(move |length| (from, length)));
    let all: usize = grid.iter().map(|&extent| extent * (extent + 1) / 2).product();
    // Every box of a small grid; of a large one, along each axis, the whole axis or one chip.
    let every = all.saturating_mul(devices) <= MOST_LOOKS;
    let mut boxes = vec![GridBox { from: vec![], extents: vec![] }];
    for &extent in grid {
        let spans: Vec<(usize, usize)> =
            spans(extent).filter(|&(_, length)| every || length == extent || length == 1).collect();
        let longer = |GridBox { from, extents }: &GridBox, (at, length)| GridBox {
            from: [&from[..], &[at]].concat(),
            extents: [&extents[..], &[length]].concat(),
        };
        // Extends each box by every span along the next axis.
        boxes = boxes.iter().flat_map(|part| spans.iter().map(move |&span| longer(part, span))).collect();
    }
    boxes.retain(|part| part.extents != grid);
    boxes
}

impl LinkTimes {
    /// Computes the times of a program for `target` whose device `i` is on the chip at `chips[i]`. `took` returns the milliseconds of all
    /// runs of an instruction, by name.
    pub fn new(target: &TpuTarget, chips: &[Vec<usize>], traffic: &Traffic, took: impl Fn(&str) -> f64) -> LinkTimes {
        let mut links = LinkTimes::default();
        let grid = target.topology();
        let boxes = boxes(grid, chips.len());
        let mut most = 0.0;
        let mut beside_ms = vec![0.0; boxes.len()];
        let mut windows: Vec<OverlapWindow> = Vec::new();
        let mut alone_ms = HashMap::new();
        for collective in &traffic.moved {
            // The milliseconds over each box whose boundary the collective crosses.
            let times = boxes.iter().enumerate().filter_map(|(i, part)| {
                let within: Vec<bool> =
                    chips.iter().map(|chip| part.holds(&chip[..grid.len().min(chip.len())])).collect();
                // Both directions of a link work at once, so that the fuller one counts.
                let [out, back] = collective.crossing(&within);
                let ms = out.max(back) / (part.links(grid, target) as f64 * target.chip.port_gb_per_s * 1e6);
                (out.max(back) > 0.0).then_some((ms * collective.runs as f64, part, i))
            });
            let times: Vec<(f64, &GridBox, usize)> = times.collect();
            // The narrowest box bounds the collective; one that crosses no link takes no time.
            let Some(&(ms, part, _)) = times.iter().max_by(|(a, ..), (b, ..)| a.total_cmp(b)) else { continue };
            // An exposed collective takes its own turn. One with overlap shares the links with others: its time is added box by box, and
            // the largest sum is taken at the end.
            if collective.is_alone() {
                links.exposed_ms += ms;
                alone_ms.insert(&*collective.name, ms);
            } else {
                let mut over = vec![0.0; boxes.len()];
                for &(ms, _, i) in &times {
                    over[i] = ms;
                    beside_ms[i] += ms;
                }
                OverlapWindow::new(collective, over).join(&mut windows);
            }
            if ms > most {
                most = ms;
                let Collective { name, runs, .. } = collective;
                let (count, cut) = (part.links(grid, target), part.name());
                let times = if *runs == 1 { String::new() } else { format!(" × {runs}") };
                links.narrowest = Some(format!("{name}{times}, {cut}: {count} links"));
            }
        }
        // Collectives with overlap run at once in the best case.
        links.all_ms = links.exposed_ms + beside_ms.into_iter().fold(0.0, f64::max);
        // A collective that is waited for during another one hides it for its own time on the links.
        let took = |name: &str| alone_ms.get(name).copied().unwrap_or_else(|| took(name));
        links.stalled_ms = windows.iter().map(|window| window.stalls(took)).sum();
        links.exposed_ms += links.stalled_ms;
        // Windows that have nothing in common come one after another.
        links.all_ms = links.all_ms.max(links.exposed_ms);
        links
    }
}

/// Collectives whose spans from start to end have instructions in common.
struct OverlapWindow<'t> {
    /// The names of all instructions that the collectives overlap with.
    within: BTreeSet<&'t str>,
    /// The milliseconds of each collective, and the instructions between its own ends.
    each: Vec<(f64, BTreeSet<&'t str>)>,
    /// The milliseconds of all these collectives together, for each cut.
    over: Vec<f64>,
}

impl<'t> OverlapWindow<'t> {
    fn new(collective: &'t Collective, over: Vec<f64>) -> Self {
        // Its own bytes pass while it does.
        let Collective { beside, awaited, ends, .. } = collective;
        let within: BTreeSet<&str> = beside.iter().chain(awaited).chain(ends).map(String::as_str).collect();
        let ms = over.iter().copied().fold(0.0, f64::max);
        Self { each: vec![(ms, within.clone())], within, over }
    }

    /// Adds the window to `windows`, merged with those that share an instruction with it.
    fn join(mut self, windows: &mut Vec<Self>) {
        // Collectives that overlap with the same instructions share the time of these.
        let joined: Vec<Self> = windows.extract_if(.., |other| !other.within.is_disjoint(&self.within)).collect();
        for other in joined {
            self.within.extend(other.within);
            self.each.extend(other.each);
            for (all, ms) in self.over.iter_mut().zip(other.over) {
                *all += ms;
            }
        }
        windows.push(self);
    }

    /// Returns the milliseconds during which nothing is computed; `took` returns those of an instruction.
    fn stalls(&self, took: impl Fn(&str) -> f64) -> f64 {
        // Each instruction hides for as long as it runs.
        let hides = |within: &BTreeSet<&str>| within.iter().map(|name| took(name)).sum::<f64>();
        // Jointly they stall for the part of the joint time over one boundary that is not hidden, and each alone for its own.
        let together = self.over.iter().copied().fold(0.0, f64::max) - hides(&self.within);
        self.each.iter().map(|(ms, within)| ms - hides(within)).fold(together.max(0.0), f64::max)
    }
}

impl Collective {
    /// Returns the least bytes that leave and that reach the devices marked in `within`.
    fn crossing(&self, within: &[bool]) -> [f64; 2] {
        let is_within = |device: &usize| within.get(*device).copied().unwrap_or(false);
        let bytes = self.bytes as f64;
        let all = [(0..within.len()).collect()];
        // No groups means one group of all devices.
        let groups: &[Vec<usize>] =
            if self.groups.is_empty() && self.kind != CollectiveKind::Permute { &all } else { &self.groups };
        let mut sums = [0.0; 2];
        for group in groups {
            if self.kind == CollectiveKind::Permute {
                let [from, to] = group[..] else { continue };
                let [from, to] = [from, to].map(|device| is_within(&device));
                sums[0] += if from && !to { bytes } else { 0.0 };
                sums[1] += if to && !from { bytes } else { 0.0 };
                continue;
            }
            // The formulas of the module's table: `a` devices inside of the box, `b` outside.
            let n = group.len() as f64;
            let a = group.iter().filter(|device| is_within(device)).count() as f64;
            let b = n - a;
            if a == 0.0 || b == 0.0 {
                continue;
            }
            let [out, back] = match self.kind {
                CollectiveKind::AllReduce => [bytes, bytes],
                CollectiveKind::ReduceScatter => [bytes * b / n, bytes * a / n],
                CollectiveKind::AllGather => [bytes * a / n, bytes * b / n],
                CollectiveKind::AllToAll => [bytes * a * b / n; 2],
                CollectiveKind::Permute => unreachable!("counted by pairs"),
            };
            sums[0] += out;
            sums[1] += back;
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists the chips of a grid, the first axis fastest, with one device on each.
    fn chips([x, y]: [usize; 2]) -> Vec<Vec<usize>> {
        (0..y).flat_map(|j| (0..x).map(move |i| vec![i, j])).collect()
    }

    fn links(target: &str, kind: CollectiveKind, bytes: u64, groups: &[&[usize]]) -> LinkTimes {
        let target = TpuTarget::parse(target).unwrap();
        let groups = groups.iter().map(|group| group.to_vec()).collect();
        let (beside, awaited, ends) = Default::default();
        let collective = Collective { name: "it".into(), kind, bytes, groups, runs: 1, beside, awaited, ends };
        let traffic = Traffic { moved: vec![collective], ..Traffic::default() };
        let grid = target.topology().to_vec();
        LinkTimes::new(&target, &chips([grid[0], grid[1]]), &traffic, |_| unreachable!("nothing is computed"))
    }

    /// A head of 4096 × 151,936 has an f32 gradient of 2.489 GB. On a v6e:2x4 two links join the halves of the grid, and a corner has two
    /// ports.
    #[test]
    fn links_of_a_gradient_sum_are_bound_by_the_halves() {
        const GRADIENT: u64 = 4096 * 151_936 * 4;
        let all: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7];
        let near = |found: f64, expected: f64| (found - expected).abs() < 0.005 * expected;
        let sum = links("v6e:2x4", CollectiveKind::AllReduce, GRADIENT, &[all]);
        assert!(near(sum.all_ms, 12.446) && sum.exposed_ms == sum.all_ms, "{sum:?}");
        // Scattered, the seven eighths that a corner does not keep leave it by two ports.
        let scattered = links("v6e:2x4", CollectiveKind::ReduceScatter, GRADIENT, &[all]);
        assert!(near(scattered.all_ms, 10.891), "{scattered:?}");
        assert!(scattered.narrowest.unwrap().contains("1x1 at"));
        // Two lines of four, each with half of it: one link of each joins its halves.
        let lines: [&[usize]; 2] = [&[0, 2, 4, 6], &[1, 3, 5, 7]];
        let in_lines = links("v6e:2x4", CollectiveKind::AllReduce, GRADIENT / 2, &lines);
        assert!(near(in_lines.all_ms, 12.446), "{in_lines:?}");
        // A v5e's links carry half as much.
        assert!(near(links("v5e:2x4", CollectiveKind::AllReduce, GRADIENT, &[all]).all_ms, 24.893));
    }

    #[test]
    fn links_of_pairs_and_single_devices_count_their_boundary() {
        // Pairs along the short axis: each has a link of its own.
        let pairs: [&[usize]; 4] = [&[0, 1], &[2, 3], &[4, 5], &[6, 7]];
        let ms = links("v6e:2x4", CollectiveKind::AllReduce, 1_000_000_000, &pairs).all_ms;
        assert!((ms - 10.0).abs() < 1e-9, "{ms}");
        assert_eq!(links("v6e:2x4", CollectiveKind::AllReduce, 1_000_000_000, &[&[3]]), LinkTimes::default());
        // From one corner to its neighbour and back: a port each way, by the cut that joins nothing else.
        let ms = links("v6e:2x4", CollectiveKind::Permute, 1_000_000_000, &[&[0, 1], &[1, 0]]).all_ms;
        assert!((ms - 5.0).abs() < 1e-9, "by either of a corner's two ports: {ms}");
    }

    /// Creates an all-reduce over pairs along one axis of a v6e:2x2. It takes 10 ms on links that the other axis does not use, and has no
    /// HBM bytes.
    fn sum_of_pairs(groups: [[usize; 2]; 2], beside: &[&str], awaited: &[&str]) -> Collective {
        let names = |names: &[&str]| names.iter().map(|name| (*name).into()).collect();
        Collective {
            name: format!("{groups:?}"),
            kind: CollectiveKind::AllReduce,
            bytes: 1_000_000_000,
            groups: groups.map(Vec::from).to_vec(),
            runs: 1,
            beside: names(beside),
            awaited: names(awaited),
            ends: vec![format!("start of {groups:?} beside {beside:?}")],
        }
    }

    const ALONG_X: [[usize; 2]; 2] = [[0, 1], [2, 3]];
    const ALONG_Y: [[usize; 2]; 2] = [[0, 2], [1, 3]];

    fn links_of_pairs(moved: Vec<Collective>, took: impl Fn(&str) -> f64) -> LinkTimes {
        let target = TpuTarget::parse("v6e:2x2").unwrap();
        LinkTimes::new(&target, &chips([2, 2]), &Traffic { moved, ..Traffic::default() }, took)
    }

    /// Sums over pairs along different axes use different links: they may run at once if both overlap with computing, and otherwise run in
    /// turn.
    #[test]
    fn links_are_shared_with_overlap_and_taken_in_turn_without() {
        let both = |beside: &[&str]| {
            let moved = [ALONG_X, ALONG_Y].map(|groups| sum_of_pairs(groups, beside, &[]));
            links_of_pairs(moved.into(), |name| if name == "product" { 10.0 } else { 0.0 })
        };
        let (at_once, in_turn) = (both(&["product"]), both(&[]));
        assert_eq!((at_once.exposed_ms, in_turn.exposed_ms), (0.0, 20.0));
        assert_eq!((at_once.all_ms, in_turn.all_ms), (10.0, 20.0), "each axis has two links, a corner two ports");
    }

    #[test]
    fn links_stall_for_the_part_that_computing_does_not_hide() {
        let stalls = |moved: Vec<Collective>| {
            let takes = |name: &str| match name {
                "short" | "other" => 3.0,
                "long" => 12.0,
                _ => 0.0,
            };
            let links = links_of_pairs(moved, takes);
            assert!(links.exposed_ms >= links.stalled_ms && links.all_ms >= links.exposed_ms, "{links:?}");
            links.stalled_ms
        };
        let x = |beside: &[&str]| sum_of_pairs(ALONG_X, beside, &[]);
        let y = |beside: &[&str]| sum_of_pairs(ALONG_Y, beside, &[]);
        assert_eq!(stalls(vec![x(&["short"])]), 7.0);
        assert_eq!(stalls(vec![x(&["long"])]), 0.0);
        assert_eq!(stalls(vec![x(&["short"]), x(&["long"])]), 7.0, "what the long one leaves is no help to the other");
        // Both overlap with one product; the links are the same, or different ones.
        assert_eq!(stalls(vec![x(&["long"]), x(&["long"])]), 8.0);
        assert_eq!(stalls(vec![x(&["long"]), y(&["long"])]), 0.0);
        assert_eq!(stalls(vec![x(&["short"]), y(&["short"])]), 7.0);
        // With nothing in common they come one after another, by whatever links.
        assert_eq!(stalls(vec![x(&["short"]), y(&["other"])]), 14.0);
        // One after another, joined by a third.
        assert_eq!(stalls(vec![x(&["short"]), x(&["long"]), x(&["short", "long"])]), 15.0);
        // What is waited for meanwhile takes its own time.
        let awaited = sum_of_pairs(ALONG_Y, &[], &[]);
        let over_it = sum_of_pairs(ALONG_X, &["short"], &[&awaited.name]);
        let links = links_of_pairs(vec![awaited, over_it], |_| 3.0);
        assert_eq!((links.stalled_ms, links.exposed_ms), (0.0, 10.0));
        // What it reads and writes itself passes meanwhile.
        let own = sum_of_pairs(ALONG_X, &["short"], &[]);
        let takes = |name: &str| if name == "short" { 3.0 } else { 2.0 };
        assert_eq!(links_of_pairs(vec![own], takes).stalled_ms, 5.0);
    }

    #[test]
    fn links_of_a_ring_are_one_more() {
        // 16 of a v5e or v6e close a ring; four do not.
        let line: Vec<usize> = (0..16).collect();
        let ring = links("v6e:1x16", CollectiveKind::AllReduce, 1_000_000_000, &[&line]).all_ms;
        let open = links("v6e:1x8", CollectiveKind::AllReduce, 1_000_000_000, &[&line[..8]]).all_ms;
        assert!((ring - 5.0).abs() < 1e-9 && (open - 10.0).abs() < 1e-9, "{ring} {open}");
    }
}
