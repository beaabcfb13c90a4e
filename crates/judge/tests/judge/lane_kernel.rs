//! [`LaneKernel`]: a plain f32 kernel of log-probabilities and entropies, whose long sums are added one after another in lanes.

use assay_core::problem::{Candidate, Dtype, FloatArray, HeadCandidate, HeadGradient, HeadProblem, Problem};
use assay_judge::judge::Verdict;
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use ndarray::{Array2, Array3, Ix1, s};

/// The vocabulary of Qwen 2.5.
pub(crate) const VOCAB: usize = 151_936;

/// Returns the step from one regime to the next that is tried behind an LM head, whose judging takes seconds: 1 with `ASSAY_PRODUCTION`.
pub(crate) fn regimes_apart() -> usize {
    if std::env::var_os("ASSAY_PRODUCTION").is_some() { 1 } else { 3 }
}

/// The way in which a kernel computes entropy, and its gradient.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum EntropyForm {
    /// The textbook's `−Σ p ln p`.
    Textbook,
    /// verl's `lse − Σ p·x` with `p = softmax(x)`, and the gradient that automatic differentiation makes of it.
    Difference,
    /// The textbook's, and the gradient that automatic differentiation makes of it, through one array of log-probabilities that logp is
    /// taken from too, or through two.
    Autograd { shared: bool },
    /// TRL's `lse − t/s`, with both sums carried on from chunk to chunk, and the gradient `−p(x − lse + H)`.
    Chunked(usize),
}

/// A kernel in f32, and what is wrong with it.
#[derive(Clone, Copy)]
pub(crate) struct LaneKernel {
    /// The lanes of each sum; 0 for sums in f64.
    pub(crate) lanes: usize,
    /// The terms at the end of the row that are left out of every sum.
    pub(crate) left_out: usize,
    /// The rounding of each logit.
    pub(crate) logit: fn(f32) -> f32,
    /// The rounding of each exponential, and of each probability.
    pub(crate) round: fn(f32) -> f32,
    /// The rounding of each partial sum.
    pub(crate) carry: fn(f32) -> f32,
    pub(crate) entropy: EntropyForm,
    /// The factor of the entropy.
    pub(crate) factor: f32,
    /// The factor of the sum of exponentials.
    pub(crate) sum_factor: f32,
    /// Whether the first column with the largest logit is left out of every sum.
    pub(crate) skips_largest: bool,
    /// The factor of each sum's own error.
    pub(crate) error_factor: f64,
}

/// The kernel without a mistake, in eight lanes.
pub(crate) const RIGHT: LaneKernel = LaneKernel {
    lanes: 8,
    left_out: 0,
    logit: |x| x,
    round: |x| x,
    carry: |x| x,
    entropy: EntropyForm::Textbook,
    factor: 1.0,
    sum_factor: 1.0,
    skips_largest: false,
    error_factor: 1.0,
};

pub(crate) fn to_f16(x: f32) -> f32 {
    half::f16::from_f32(x).to_f32()
}

pub(crate) fn to_bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

pub(crate) fn to_tf32(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0x1000) & !0x1fff)
}

/// The outputs of a kernel for one token.
struct TokenOutputs {
    logp: f32,
    entropy: f32,
    dlogits: Vec<f64>,
}

/// Returns the cotangent of a log-probability `l` in the gradient `dentropy` of an entropy, as automatic differentiation adds it up.
fn log_cotangent(p: f32, l: f32, dentropy: f32) -> f32 {
    if p == 0.0 { 0.0 } else { -dentropy * p + -dentropy * l * p }
}

impl LaneKernel {
    fn sum(&self, terms: impl Iterator<Item = f32>) -> f32 {
        if self.lanes == 0 {
            return terms.map(f64::from).sum::<f64>() as f32;
        }
        let mut lanes = vec![0.0_f32; self.lanes];
        let mut exact = 0.0;
        for (j, term) in terms.enumerate() {
            let lane = &mut lanes[j % self.lanes];
            *lane = (self.carry)(*lane + term);
            exact += f64::from(term);
        }
        let sum: f32 = lanes.into_iter().sum();
        (exact + self.error_factor * (f64::from(sum) - exact)) as f32
    }

    /// Computes one token from its logits, its id, and the cotangents of logp and entropy.
    fn token(&self, logits: &[f64], id: usize, [dlogp, dentropy]: [f32; 2]) -> TokenOutputs {
        let x: Vec<f32> = logits.iter().map(|x| (self.logit)(*x as f32)).collect();
        let counted = x.len() - self.left_out;
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut e: Vec<f32> = x.iter().map(|x| (self.round)((x - max).exp())).collect();
        if let Some(largest) = x.iter().position(|x| self.skips_largest && *x == max) {
            e[largest] = 0.0;
        }
        let product = |(e, x): (&f32, &f32)| if *e == 0.0 { 0.0 } else { e * x };
        let total = match self.entropy {
            EntropyForm::Chunked(chunk) => {
                e[..counted].chunks(chunk).fold(0.0, |sum, e| sum + self.sum(e.iter().copied()))
            }
            _ => self.sum(e[..counted].iter().copied()),
        };
        let total = self.sum_factor * total;
        let lse = max + total.ln();
        let p: Vec<f32> = e.iter().map(|e| (self.round)(e / total)).collect();
        let entropy = self.factor
            * match self.entropy {
                EntropyForm::Textbook | EntropyForm::Autograd { .. } => {
                    let term = |(p, x): (&f32, &f32)| if *p == 0.0 { 0.0 } else { p * (x - max - total.ln()) };
                    -self.sum(p.iter().zip(&x).map(term).take(counted))
                }
                EntropyForm::Difference => lse - self.sum(p.iter().zip(&x).map(product).take(counted)),
                EntropyForm::Chunked(chunk) => {
                    let chunks = e[..counted].chunks(chunk).zip(x.chunks(chunk));
                    let of_products = chunks.fold(0.0, |sum, (e, x)| sum + self.sum(e.iter().zip(x).map(product)));
                    lse - of_products / total
                }
            };
        // The cotangents of the log-probabilities, and their sum.
        let of_logs: Vec<f32> = match self.entropy {
            EntropyForm::Autograd { .. } => {
                p.iter().zip(&x).map(|(p, x)| log_cotangent(*p, x - max - total.ln(), dentropy)).collect()
            }
            _ => Vec::new(),
        };
        let of_logs = |with_id: bool| {
            let mut terms = of_logs.clone();
            terms.iter_mut().skip(id).take(usize::from(with_id)).for_each(|term| *term += dlogp);
            let sum = self.sum(terms.iter().copied().take(counted));
            (terms, sum)
        };
        let of_logs = of_logs(self.entropy == EntropyForm::Autograd { shared: true });
        let mean = match self.entropy {
            EntropyForm::Difference => self.sum(p.iter().zip(&x).map(product)),
            _ => lse - entropy,
        };
        let dlogit = |(v, (p, x)): (usize, (&f32, &f32))| {
            let of_entropy = match self.entropy {
                _ if *p == 0.0 || dentropy == 0.0 => 0.0,
                // The gradients of lse, of each p's own x, and of the softmax.
                EntropyForm::Difference => dentropy * ((x - lse).exp() - p) - dentropy * p * (x - mean),
                EntropyForm::Autograd { .. } => of_logs.0[v] - p * of_logs.1,
                _ => -dentropy * p * (x - lse + entropy),
            };
            let of_logp = match self.entropy {
                EntropyForm::Autograd { shared: true } if dentropy != 0.0 => 0.0,
                _ if v == id => dlogp - dlogp * p,
                _ => -dlogp * p,
            };
            f64::from(of_logp + of_entropy)
        };
        let dlogits = p.iter().zip(&x).enumerate().map(dlogit).collect();
        TokenOutputs { logp: x[id] - max - total.ln(), entropy, dlogits }
    }

    /// Computes logp, entropy if the problem asks for its gradient, and dlogits `[B·T,V]` of f32 logits.
    fn compute<L>(&self, problem: &Problem<L>, logits: impl Fn(usize, usize) -> Vec<f64>) -> Candidate<Array2<f64>> {
        let (batch, tokens) = problem.mask.dim();
        let dentropy = problem.extra.dentropy.as_ref();
        let mut logp = Array2::<f32>::zeros((batch, tokens));
        let mut entropy = logp.clone();
        let mut dlogits = Vec::new();
        for ((b, t), _) in problem.mask.indexed_iter() {
            let id = usize::try_from(problem.ids[[b, t]]).unwrap();
            let cotangents = [-problem.advantage((b, t)), dentropy.map_or(0.0, |dentropy| dentropy[[b, t]])];
            let outputs = self.token(&logits(b, t), id, cotangents.map(|x| x as f32));
            (logp[[b, t]], entropy[[b, t]]) = (outputs.logp, outputs.entropy);
            dlogits.extend(outputs.dlogits);
        }
        let width = dlogits.len() / (batch * tokens);
        Candidate {
            loss: None,
            gradient: Array2::from_shape_vec((batch * tokens, width), dlogits).unwrap(),
            logp: Some(logp.into()),
            logp_of_others: None,
            entropy: dentropy.map(|_| entropy.into()),
            token_loss: None,
            metrics: None,
        }
    }

    /// Runs the kernel on given logits.
    pub(crate) fn run(&self, problem: &Problem) -> Candidate {
        let shape = problem.shape();
        let computed = self.compute(problem, |b, t| problem.logits.row(b, t));
        let dlogits: Array3<f64> =
            computed.gradient.clone().into_shape_with_order((shape.batch, shape.tokens, shape.vocab)).unwrap();
        computed.with_gradient(FloatArray::rounded_from(&dlogits, problem.logits.dtype()))
    }

    /// Runs the kernel on the logits of a head, which it multiplies in f32. The products of its dlogits are exact.
    pub(crate) fn run_head(&self, known: &JudgedProblem<HeadProblem>) -> HeadCandidate {
        let (problem, reference) = (known.problem, &known.reference);
        let shape = reference.shape();
        let weights = reference.columns(0..shape.vocab).mapv(|w| w as f32);
        let logits = |b: usize, t: usize| {
            let hidden = problem.logits.hidden.row(b, t).iter().map(|x| *x as f32).collect::<Vec<_>>();
            let hidden = ndarray::Array::<f32, Ix1>::from(hidden);
            weights.dot(&hidden).mapv(f64::from).to_vec()
        };
        let computed = self.compute(problem, logits);
        let dlogits = &computed.gradient;
        let dhidden = reference.dhidden(|columns| dlogits.slice(s![.., columns]).to_owned());
        let dhidden = dhidden.into_shape_with_order((shape.batch, shape.tokens, shape.hidden)).unwrap();
        let dtypes = (problem.logits.hidden.dtype(), problem.logits.lm_head.dtype());
        computed.with_gradient(HeadGradient {
            dhidden: FloatArray::rounded_from(&dhidden, dtypes.0),
            dlm_head: FloatArray::rounded_from(&reference.dlm_head(dlogits), dtypes.1),
            dlogits_dtype: Dtype::F32,
        })
    }
}

/// Judges the candidates of one problem at grade `standard`.
pub(crate) fn judged<P: Judgeable>(
    known: &JudgedProblem<P>,
    candidates: &[Candidate<P::Gradient>],
) -> Vec<Vec<Verdict>> {
    let lent: Vec<_> = candidates.iter().map(Candidate::lend).collect();
    known.verdicts_of_all(&lent, &Limits::external(Grade::Standard)).unwrap()
}

/// Lists the gates that failed, with the worst error / limit of each.
pub(crate) fn failed(verdicts: &[Verdict]) -> Vec<String> {
    let failed = verdicts.iter().filter(|verdict| !verdict.passed());
    failed.map(|verdict| format!("{} {:?}", verdict.gate, verdict.worst())).collect()
}
