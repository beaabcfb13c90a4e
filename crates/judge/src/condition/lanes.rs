//! The errors of sums in f32 whose terms are added one after another in lanes, as `torch.log_softmax` on a CPU and plain loops of
//! vector units add them, and of the entropy that is a difference of two numbers made from such sums.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::U;
use assay_reference::{OtherLogp, Reference, SoftmaxColumns, Token};

/// The lanes of vector units: eight f32 of AVX2, sixteen of AVX-512. GPUs have more, with fewer terms each.
const LANES: [usize; 2] = [8, 16];

/// The lanes of a plain loop.
const ONE_LANE: usize = 1;

/// The roundings of a tree that adds up to 256 lanes, as a block of a GPU has them.
const TREE: f64 = 8.0;

/// The number of vocabulary entries from which on a sum in lanes may lose more than the roundings that `κ` counts for it.
pub(crate) const LONG_ROW: usize = 4096;

/// The key of terms that a partial sum absorbs: the bits of no finite term.
const ABSORBED: u32 = u32::MAX;

/// Standard deviations of a sum of independent errors that are allowed.
const DEVIATIONS: f64 = 6.0;

/// A hasher of the bits of terms: a row's walks look up each of 151,936 terms.
#[derive(Default)]
struct TermHasher(u64);

impl Hasher for TermHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, bits: u32) {
        // The product's upper half mixes all bits, and a table takes its places from the lower ones.
        let product = (self.0 ^ u64::from(bits)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
}

/// A sum in lanes and the two parts of its error, each in the sum's own unit.
#[derive(Clone, Copy, Debug, Default)]
struct LaneErrors {
    /// The sum as the lanes have it.
    sum: f64,
    /// The size of the error of terms that are lost, or rounded up, by their size alone.
    absorbed: f64,
    /// The size of the error of all other terms as it is here.
    others: f64,
    /// The bound of the error of all other terms if they are independent unless they are equal.
    independent: f64,
}

impl LaneErrors {
    /// Adds `terms` one after another, the `j`th in lane `j mod lanes`.
    ///
    /// Adding a term `t` to a partial sum rounds to a multiple of the sum's ulp. Terms that are *equal* are rounded alike as long as
    /// the sum stays below the next power of two, so their errors add up, to `D_t` over all places of `t`. Terms of the size of the
    /// ulp or below, as all have that come after a peak in its lane, are lost or rounded up by their size alone, and add up to one
    /// `D`. Terms that differ otherwise have independent errors. The sum of all is off by at most `Σ |D_t|`, and by more than six
    /// times the root of `Σ D_t²` only by a chance of 2e-9; the smaller of the two, and what is absorbed, is the bound. Terms that crowd
    /// within a fraction of the sum's ulp are rounded alike without being equal, and lose more than that: see [`Self::alike`].
    fn walk(terms: impl Iterator<Item = f32>, lanes: usize) -> Self {
        let mut sums = vec![0.0_f32; lanes];
        let mut by_term: HashMap<u32, f64, BuildHasherDefault<TermHasher>> = HashMap::default();
        for (j, term) in terms.enumerate() {
            let lane = &mut sums[j % lanes];
            let exact = f64::from(*lane) + f64::from(term);
            *lane += term;
            let ulp = lane.abs().next_up() - lane.abs();
            let key = if term.abs() <= ulp { ABSORBED } else { term.to_bits() };
            *by_term.entry(key).or_default() += f64::from(*lane) - exact;
        }
        let absorbed = by_term.remove(&ABSORBED).unwrap_or_default().abs();
        let (sizes, squares) =
            by_term.values().fold((0.0, 0.0), |(sizes, squares), error| (sizes + error.abs(), squares + error * error));
        let others = by_term.values().sum::<f64>().abs();
        // The lanes' own sums are added in a few more steps, which κ counts.
        let sum = sums.iter().map(|lane| f64::from(*lane)).sum();
        Self { sum, absorbed, others, independent: f64::min(sizes, DEVIATIONS * f64::sqrt(squares)) }
    }

    /// Returns the error of terms that are rounded alike: what is absorbed, and what the walk's other terms lose beyond the bound for
    /// independent ones, which shows that they are not.
    fn alike(self) -> f64 {
        self.absorbed + (self.others - self.independent).max(0.0)
    }

    /// Bounds the size of the whole error.
    fn size(self) -> f64 {
        self.alike() + self.independent
    }
}

/// Returns the exponentials of a softmax as kernels have them, in f32 and with a largest of 1.
fn exponentials(probabilities: &[f64]) -> Vec<f32> {
    let largest = probabilities.iter().copied().fold(0.0, f64::max);
    probabilities.iter().map(|p| (p / largest) as f32).collect()
}

/// Bounds the relative error of the sum of exponentials, added in f32 in any number of lanes, which a tree adds, from a row's
/// probabilities up to a factor.
pub(super) fn any_sum_error(probabilities: &[f64]) -> f64 {
    sum_error_in(probabilities, ONE_LANE).max(lane_sum_error_of(probabilities)) + TREE * U
}

/// Bounds the relative error of the sum of exponentials, added in f32 in lanes, from a row's probabilities up to a factor.
pub(crate) fn lane_sum_error_of(probabilities: &[f64]) -> f64 {
    LANES.into_iter().map(|lanes| sum_error_in(probabilities, lanes)).fold(0.0, f64::max)
}

/// Bounds the same for one number of lanes.
fn sum_error_in(probabilities: &[f64], lanes: usize) -> f64 {
    let walk = LaneErrors::walk(exponentials(probabilities).into_iter(), lanes);
    walk.size() / walk.sum
}

/// Factors of a loss at which its cotangents are summed: how equal terms round depends on their place between two powers of two.
const FACTORS: i32 = 16;

/// Bounds the relative error of the sum of the cotangents `ε/V` of all log-probabilities of a row, and `1 − ε` more of the target's, added
/// in f32 in lanes, whatever the loss is multiplied by.
///
/// Automatic differentiation of a smoothed cross-entropy multiplies each probability by that sum, which is 1.
pub(super) fn cotangent_sum_error(label_smoothing: f64, id: usize, vocab: usize) -> f64 {
    let each = label_smoothing / vocab as f64;
    let of_id = 1.0 - label_smoothing + each;
    sum_error_at_any_scale(|factor| (0..vocab).map(move |j| (factor * if j == id { of_id } else { each }) as f32))
}

/// Bounds the relative error of a sum of cotangents of one sign, added in f32 in lanes, whatever the loss is multiplied by; `terms`
/// returns them times a factor.
pub(crate) fn sum_error_at_any_scale<I: Iterator<Item = f32>>(terms: impl Fn(f64) -> I) -> f64 {
    let error = |factor: i32, lanes: usize| {
        let factor = f64::exp2(f64::from(factor) / f64::from(FACTORS));
        let walk = LaneErrors::walk(terms(factor), lanes);
        if walk.sum == 0.0 { 0.0 } else { walk.size() / walk.sum }
    };
    let scales = LANES.into_iter().flat_map(|lanes| (0..FACTORS).map(move |factor| (factor, lanes)));
    scales.map(|(factor, lanes)| error(factor, lanes)).fold(0.0, f64::max)
}

/// The errors of an entropy, in nats.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EntropyErrors {
    /// The bound of the error of the entropy itself.
    pub(super) value: f64,
    /// The bound of the error of the entropy that the gradient's columns share, as they have one sum in common.
    pub(super) gradient: f64,
}

/// Bounds the error of an entropy that is computed as `−Σ p·ln p`, where the sum of exponentials is off by `lane_sum` of itself and
/// the second sum is added up in lanes too.
///
/// If every `p` is off by `η`, then so is every `ln p`, and the entropy by `η(H − 1)`. The second sum is walked like the first. Its terms
/// have the rounding of the `p` that the kernel has, which are off by `η` themselves, so they are walked with all of them at either end
/// of that range too. Equal terms are rounded alike in both sums, so that the two errors add up.
///
/// Automatic differentiation makes a sum of its own: that of the cotangents of all log-probabilities, `−E·p(1 + ln p)`, with the cotangent
/// `G` of logp among them where both are taken from one array. `G` may be a thousand times as large as the other terms of its lane, which
/// then are rounded at its size. A gradient through `softmax` instead of its logarithm has the terms in two sums.
pub(super) fn entropy_sum_error(
    reference: &Reference,
    (b, t): (usize, usize),
    token: &Token,
    lane_sum: f64,
) -> EntropyErrors {
    let row = reference.row(b, t, token);
    let SoftmaxColumns { z, probabilities } = row.entropy();
    let stats = &token.entropy_softmax.stats;
    let largest = probabilities.iter().copied().fold(0.0, f64::max);
    // The cotangents of logp, where they are added to those of the entropy.
    let mut cotangents = Vec::new();
    if token.entropy_softmax.is_same_function(&token.logp_softmax) {
        cotangents.push((token.id, reference.grad_logp(token, &token.branch, token.coupling)));
        cotangents.extend(reference.others(token).iter().map(|&OtherLogp { id, grad_logp, .. }| (id, grad_logp)));
    }
    if token.has_separate_kl() && token.entropy_softmax.is_same_function(&token.kl_softmax) {
        cotangents.push((token.id, reference.grad_kl_logp(token, &token.branch)));
    }
    let has_gradient = token.grad_entropy != 0.0;
    let is_shared = !cotangents.is_empty();

    let mut most = EntropyErrors::default();
    for shift in [-lane_sum, 0.0, lane_sum] {
        // The row as a kernel has it whose sum is off by `shift`. A column of probability 0 adds nothing.
        let columns = z.iter().zip(probabilities).map(|(z, p)| match *p {
            0.0 => [0.0; 2],
            p => [p * (1.0 - shift), stats.log_probability(*z) - shift].map(|x| x as f32),
        });
        let columns: Vec<[f32; 2]> = columns.collect();
        for lanes in LANES {
            let walk = |factor: f32, term: fn([f32; 2]) -> f32| {
                LaneErrors::walk(columns.iter().map(|column| factor * term(*column)), lanes)
            };
            // The products of probabilities, and those of exponentials that the sum divides.
            let [of_p, of_e] = [1.0, 1.0 / largest].map(|unit| walk(unit as f32, |[p, l]| p * l).size() / unit);
            most.value = most.value.max(of_p).max(of_e);
            if !has_gradient {
                continue;
            }
            let factor = token.grad_entropy as f32;
            let with_cotangents = |term: fn([f32; 2]) -> f32| {
                let mut terms: Vec<f32> = columns.iter().map(|column| factor * term(*column)).collect();
                for (id, grad) in &cotangents {
                    terms[*id] += *grad as f32;
                }
                LaneErrors::walk(terms.into_iter(), lanes).size()
            };
            let of_logs: fn([f32; 2]) -> f32 = |[p, l]| -p - p * l;
            let of_p: fn([f32; 2]) -> f32 = |[p, _]| -p;
            let mut errors = [walk(factor, of_logs).size(), walk(factor, of_p).size()];
            if is_shared {
                errors = [errors[0].max(with_cotangents(of_logs)), errors[1].max(with_cotangents(of_p))];
            }
            let in_two = walk(factor, |[p, l]| p * l).size() + errors[1];
            most.gradient = most.gradient.max(errors[0].max(in_two) / token.grad_entropy.abs());
        }
    }
    let of_sum = lane_sum * (1.0 + token.entropy);
    EntropyErrors { value: of_sum + most.value, gradient: of_sum + most.gradient.max(most.value) }
}

/// Bounds the error of an entropy that is computed as `ln S + m − Σ p·z`, beyond what the two numbers lose by being rounded at the
/// size of the largest logit.
///
/// An error of `S` moves the logarithm by itself and the mean `z̄ = Σ p·z` by that times `z̄`, and the sum of the products has its
/// own: `dH = (1 + z̄)·dS/S − d(Σ p·z)`. Each sum is walked in lanes; equal products are rounded alike, and are other numbers where
/// exponentials are divided by `S` before they are multiplied than where the sum is, so both are walked, and those of the gradient.
/// Products crowd about the minimum of `z·e^z` and are rounded alike there without being equal, so their errors count as the walk has
/// them too. In addition, each exponential, its product with `z`, the sums and the quotient are rounded at the size of `Σ p·|z|`,
/// `roundings` times.
pub(super) fn entropy_difference_error(
    reference: &Reference,
    (b, t): (usize, usize),
    token: &Token,
    roundings: f64,
) -> EntropyErrors {
    let row = reference.row(b, t, token);
    let SoftmaxColumns { z, probabilities } = row.entropy();
    let exponentials = exponentials(probabilities);
    let size: f64 = z.iter().zip(probabilities).map(|(z, p)| if *p == 0.0 { 0.0 } else { p * z.abs() }).sum();
    let error = |lanes| {
        let of_sum = LaneErrors::walk(exponentials.iter().copied(), lanes);
        let by_sum = 1.0 + size;
        let with_products = |divisor: f32| {
            // A column of probability 0 may have a logit of −∞, whose product would be NaN.
            let product = |(e, z): (&f32, &f64)| if *e == 0.0 { 0.0 } else { e / divisor * *z as f32 };
            let of_products = LaneErrors::walk(exponentials.iter().zip(z).map(product), lanes);
            let scale = f64::from(divisor) / of_sum.sum;
            let alike = of_products.absorbed + of_products.others;
            let alike = by_sum * of_sum.alike() / of_sum.sum + alike * scale;
            let independent = [by_sum * of_sum.independent / of_sum.sum, of_products.independent * scale];
            alike + f64::hypot(independent[0], independent[1])
        };
        let total = of_sum.sum as f32;
        // Automatic differentiation sums the products once more, times the cotangent of the entropy.
        let with_cotangent =
            if token.grad_entropy == 0.0 { 0.0 } else { with_products(total / token.grad_entropy.abs() as f32) };
        let value = with_products(1.0).max(with_products(total));
        EntropyErrors { value, gradient: value.max(with_cotangent) }
    };
    let rounded = roundings * U * size;
    LANES.into_iter().map(error).fold(EntropyErrors { value: rounded, gradient: rounded }, |most, error| {
        EntropyErrors {
            value: most.value.max(error.value + rounded),
            gradient: most.gradient.max(error.gradient + rounded),
        }
    })
}
