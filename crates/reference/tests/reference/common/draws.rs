//! A case, where its logits lie, and the runner that draws cases.

use std::f64::consts::TAU;
use std::fmt;

use assay_core::problem::Problem;
use assay_core::spec::LossSpec;
use assay_suites::cases::config;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseResult, TestError, TestRunner};

/// One spec and one batch for it.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) spec: LossSpec,
    pub(crate) problem: Problem,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:?}\n{:?}", self.spec, self.problem)
    }
}

/// Where logits lie. Each has broken a published kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Regime {
    /// Within ±0.1: all columns weigh the same.
    Small,
    /// Normal, σ = 1.
    Normal,
    /// Normal, σ = 8.
    Wide,
    /// Normal, around 10⁴ or −10⁴.
    Shifted,
    /// Normal, around −120: a maximum that starts at 0 underflows every exponential.
    Low,
    /// One column 30, 60 or 100 nats above the rest, the target or another.
    Confident,
    /// Normal, with −∞ on ids other than the target.
    Excluded,
    /// 0, 1 or 2: columns tie, the largest among them.
    Tied,
}

impl Regime {
    /// `V` logits of one token.
    pub(crate) fn row(self, vocab: usize, id: usize) -> BoxedStrategy<Vec<f64>> {
        let normals = |mean: f64, sigma: f64| vec(normal().prop_map(move |x| mean + sigma * x), vocab);
        match self {
            Regime::Small => vec(-0.1..0.1, vocab).boxed(),
            Regime::Normal => normals(0.0, 1.0).boxed(),
            Regime::Wide => normals(0.0, 8.0).boxed(),
            Regime::Shifted => prop_oneof![normals(1e4, 1.0), normals(-1e4, 1.0)].boxed(),
            Regime::Low => normals(-120.0, 1.0).boxed(),
            Regime::Confident => (normals(0.0, 0.5), select(vec![30.0, 60.0, 100.0]), 0..2 * vocab)
                .prop_map(move |(mut row, margin, peak)| {
                    row[if peak < vocab { peak } else { id }] += margin;
                    row
                })
                .boxed(),
            Regime::Excluded => (normals(0.0, 2.0), vec(any::<bool>(), vocab))
                .prop_map(move |(row, excluded)| {
                    let keep = |j: usize| j == id || !excluded[j];
                    row.into_iter().enumerate().map(|(j, x)| if keep(j) { x } else { f64::NEG_INFINITY }).collect()
                })
                .boxed(),
            Regime::Tied => vec(select(vec![0.0, 1.0, 2.0]), vocab).boxed(),
        }
    }
}

/// A standard normal deviate (Box and Muller 1958).
fn normal() -> impl Strategy<Value = f64> {
    (f64::MIN_POSITIVE..1.0, 0.0..TAU).prop_map(|(u, angle): (f64, f64)| (-2.0 * u.ln()).sqrt() * angle.cos())
}

/// Runs `check` on `count` draws of `cases`, unless the environment asks for another number, and returns the smallest case that
/// fails, in words. Seeds of failures are kept in `fixtures/regressions/{failures}.txt`.
pub(crate) fn run(
    failures: &str,
    count: u32,
    cases: &BoxedStrategy<Case>,
    check: impl Fn(Case) -> TestCaseResult,
) -> Result<(), String> {
    let path = format!("{}/../../../fixtures/regressions/{failures}.txt", env!("CARGO_MANIFEST_DIR"));
    let failures = Box::leak(path.into_boxed_str());
    let config = config(count);
    let mut runner = TestRunner::new(Config {
        // Some arms reject several draws a case: proptest's own limit is for fewer cases.
        max_global_rejects: 4 * config.cases.max(config.max_global_rejects),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(failures))),
        ..config
    });
    runner.run(cases, check).map_err(|error| match error {
        TestError::Fail(reason, case) => format!("{reason}\n{case:#?}"),
        TestError::Abort(reason) => reason.to_string(),
    })
}
