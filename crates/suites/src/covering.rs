//! Specs among which every two settings that shape a program meet: a few dozen programs in place of all combinations.

use std::collections::BTreeSet;

use assay_core::problem::Shape;
use assay_core::spec::{
    AdvantageLevel, Averaging, Kl, KlEstimator, KlGradient, KlImportance, LogClip, LogitsTransform, LossSpec,
    LossTerms, Objective, OldLogp, OutOfBounds, Ratio, Reduction, Rejection, RejectionEstimator, RejectionLevel,
    RolloutLevel, RolloutSource, RolloutWeights, Rows, Support, Temperature, TemperatureDivides, UnscoredWeight,
};
use assay_judge::variants::{SHAPE, variants};

/// Rows of one choice a factor, of as many as `choices` says, among which any two choices of any two factors meet.
fn pairwise(choices: &[usize]) -> Vec<Vec<usize>> {
    let factors = 0..choices.len();
    let pairs_of = |row: &[Option<usize>], factor: usize, choice: usize| -> Vec<[(usize, usize); 2]> {
        let met = row.iter().enumerate().filter_map(|(other, met)| met.map(|met| (other, met)));
        met.filter(|(other, _)| *other != factor)
            .map(|other| if other.0 < factor { [other, (factor, choice)] } else { [(factor, choice), other] })
            .collect()
    };
    // At first every pair of choices of two factors is missing.
    let mut missing: BTreeSet<[(usize, usize); 2]> = BTreeSet::new();
    for b in factors.clone() {
        for (a, x, y) in (0..b).flat_map(|a| (0..choices[a]).flat_map(move |x| (0..choices[b]).map(move |y| (a, x, y))))
        {
            missing.insert([(a, x), (b, y)]);
        }
    }
    let mut rows: Vec<Vec<usize>> = Vec::new();
    while let Some(&[(a, x), (b, y)]) = missing.first() {
        // Each row begins with the first missing pair, and then takes for one factor after the other the choice that
        // meets the most pairs that are still missing.
        let mut row = vec![None; choices.len()];
        (row[a], row[b]) = (Some(x), Some(y));
        for factor in factors.clone().filter(|factor| ![a, b].contains(factor)) {
            let new =
                |choice: &usize| pairs_of(&row, factor, *choice).iter().filter(|pair| missing.contains(*pair)).count();
            // Among equals another at each row, so that no choice is worn out.
            let turned = (0..choices[factor]).map(|choice| (choice + rows.len()) % choices[factor]);
            row[factor] = turned.max_by_key(new);
        }
        for factor in factors.clone() {
            for pair in pairs_of(&row, factor, row[factor].expect("all are chosen")) {
                missing.remove(&pair);
            }
        }
        rows.push(row.into_iter().flatten().collect());
    }
    rows
}

const OF_ROWS: Averaging =
    Averaging { reduction: Reduction::SequenceMean { rows: Rows::All }, denominator_epsilon: 0.0 };

const ESTIMATORS: [Option<KlEstimator>; 5] =
    [None, Some(KlEstimator::K1), Some(KlEstimator::K2), Some(KlEstimator::K3), Some(KlEstimator::Abs)];
const IMPORTANCES: [KlImportance; 5] =
    [KlImportance::One, KlImportance::Ratio, KlImportance::TokenRatio, KlImportance::Rollout, KlImportance::Score];
const GRADIENTS: [KlGradient; 3] = [KlGradient::Own, KlGradient::K2, KlGradient::K2Weighted(1.1)];
const DIFFERENCE_CLAMPS: [Option<f64>; 2] = [None, Some(0.2)];
/// Each with whether it comes after the importance weight.
const VALUE_CLAMPS: [(Option<f64>, bool); 3] = [(None, false), (Some(0.02), false), (Some(0.02), true)];
const KL_AVERAGINGS: [Option<Averaging>; 2] = [None, Some(OF_ROWS)];
/// The reductions, each with its denominator epsilon.
const REDUCTIONS: [(Reduction, f64); 5] = [
    (Reduction::TokenMean, 0.0),
    (Reduction::SequenceMean { rows: Rows::All }, 0.0),
    (Reduction::SequenceMean { rows: Rows::NonEmpty }, 0.5),
    (Reduction::SequenceSum { rows: Rows::NonEmpty }, 0.0),
    (Reduction::FixedLength { rows: Rows::All, length: Some(7) }, 0.0),
];
/// Each with the mean that the bonus is of, and whether in its place a cotangent comes with each token.
const ENTROPIES: [(f64, Option<Averaging>, bool); 4] =
    [(0.0, None, false), (0.03, None, false), (-0.02, Some(OF_ROWS), false), (0.0, None, true)];
const TEMPERATURES: [(Temperature, TemperatureDivides); 4] = [
    (Temperature::ONE, TemperatureDivides::Logits),
    (Temperature::Number(0.8), TemperatureDivides::Logits),
    (Temperature::Number(1.3), TemperatureDivides::Logp),
    (Temperature::Given, TemperatureDivides::Logits),
];
const OLD_LOGPS: [OldLogp; 3] = [OldLogp::Given, OldLogp::Current, OldLogp::Rollout];
/// The bounds of a log-ratio: `clamp`, `clip`, `cap`, `straight_through`.
type BoundsChoice = (Option<f64>, Option<LogClip>, Option<f64>, bool);

/// The bounds that a log-ratio may have.
const BOUNDS: [BoundsChoice; 5] = [
    (None, None, None, false),
    (Some(0.25), None, None, false),
    (None, Some(LogClip { low: 0.2, high: 0.1 }), None, false),
    (None, None, Some(0.1), false),
    (None, None, Some(0.1), true),
];
/// The terms that rollout weights may apply to.
const WEIGHTS: [Option<LossTerms>; 3] = [None, Some(LossTerms::Policy), Some(LossTerms::PolicyAndKl)];
/// The terms that rejected tokens may be dropped from.
const DROPS: [Option<LossTerms>; 3] = [None, Some(LossTerms::Policy), Some(LossTerms::PolicyAndKl)];
const ADVANTAGES: [AdvantageLevel; 2] = [AdvantageLevel::Sequence, AdvantageLevel::Token];

/// The transforms of logits: scale, softcap, whether there is a bias, and the number of excluded ids.
const TRANSFORMS: [(f64, Option<f64>, bool, usize); 3] =
    [(1.0, None, false, 0), (-0.5, None, false, 3), (2.0, Some(9.0), true, 0)];

/// The number of choices of each factor, in the order in which [`spec`] reads them.
const CHOICES: [usize; 15] = [
    ESTIMATORS.len(),
    IMPORTANCES.len(),
    GRADIENTS.len(),
    DIFFERENCE_CLAMPS.len(),
    VALUE_CLAMPS.len(),
    KL_AVERAGINGS.len(),
    REDUCTIONS.len(),
    ENTROPIES.len(),
    TEMPERATURES.len(),
    OLD_LOGPS.len(),
    BOUNDS.len(),
    WEIGHTS.len(),
    DROPS.len(),
    ADVANTAGES.len(),
    TRANSFORMS.len(),
];

/// One choice of each factor around an objective.
fn spec(objective: Objective, row: &[usize]) -> LossSpec {
    let [estimator, importance, gradient, difference, value, of_kl, rest @ ..] = row else {
        unreachable!("15 factors")
    };
    let [reduction, entropy, temperature, old_logp, bounds, weights, drops, advantages, transform] = *rest else {
        unreachable!("15 factors")
    };
    let kl = ESTIMATORS[*estimator].map(|estimator| Kl {
        importance: IMPORTANCES[*importance],
        gradient: GRADIENTS[*gradient],
        difference_clamp: DIFFERENCE_CLAMPS[*difference],
        value_clamp: VALUE_CLAMPS[*value].0,
        clamp_after_importance: VALUE_CLAMPS[*value].1,
        averaging: KL_AVERAGINGS[*of_kl],
        ..Kl::plain(0.07, estimator)
    });
    let rollout = WEIGHTS[weights].map(|applies_to| RolloutWeights {
        source: RolloutSource::Logp,
        level: RolloutLevel::Token,
        outside: OutOfBounds::Truncate,
        min: None,
        max: Some(1.1),
        clamp: None,
        normalize: false,
        unscored: UnscoredWeight::One,
        applies_to,
    });
    let rejection = DROPS[drops].map(|drops_from| Rejection {
        estimator: RejectionEstimator::K2,
        level: RejectionLevel::Token,
        min: None,
        max: 0.03,
        counts: true,
        drops_from,
    });
    let (clamp, clip, cap, straight_through) = BOUNDS[bounds];
    let (scale, softcap, bias, left_out) = TRANSFORMS[transform];
    LossSpec {
        objective,
        ratio: Ratio { clamp, clip, cap, straight_through, ..Ratio::default() },
        advantages: ADVANTAGES[advantages],
        old_logp: OLD_LOGPS[old_logp],
        logits: LogitsTransform { scale, softcap, bias },
        support: Support { excluded_ids: (0..left_out).collect(), keep_sampled: left_out > 0, ..Support::default() },
        temperature: TEMPERATURES[temperature].0,
        temperature_divides: TEMPERATURES[temperature].1,
        kl,
        entropy_coef: ENTROPIES[entropy].0,
        entropy_averaging: ENTROPIES[entropy].1,
        dentropy: ENTROPIES[entropy].2,
        rollout,
        rejection: rejection.into_iter().collect(),
        reduction: REDUCTIONS[reduction].0,
        denominator_epsilon: REDUCTIONS[reduction].1,
        ..LossSpec::default()
    }
}

/// Whether something computes a spec for a shape.
pub type Supports<'s> = &'s dyn Fn(&LossSpec, Shape) -> bool;

/// Specs with every objective in turn that is supported, and valid with any other choice.
///
/// ```
/// use assay_core::implementation::Implementation;
/// use assay_core::problem::Dtype;
/// use assay_native::Native;
/// use assay_suites::covering::pairs;
///
/// let native = Native::default();
/// let all = pairs(&|spec, shape| native.supports(spec, shape, Dtype::F32, 1).is_ok());
/// assert!(all.iter().any(|spec| spec.kl.is_some() && spec.rollout.is_some()));
/// ```
///
/// # Panics
/// Where another setting of one of them is not supported.
pub fn pairs(supports: Supports) -> Vec<LossSpec> {
    rows(supports).into_iter().map(|(_, spec)| spec).collect()
}

/// Few of these that have every choice and every objective: the one with most that is new, again and again.
///
/// ```
/// use assay_core::implementation::Implementation;
/// use assay_core::problem::Dtype;
/// use assay_native::Native;
/// use assay_suites::covering::{choices, pairs};
///
/// let native = Native::default();
/// let supports = |spec: &_, shape| native.supports(spec, shape, Dtype::F32, 1).is_ok();
/// assert!(choices(&supports).len() < pairs(&supports).len());
/// ```
///
/// # Panics
/// As [`pairs`] does.
pub fn choices(supports: Supports) -> Vec<LossSpec> {
    let mut rows: Vec<(BTreeSet<(usize, usize)>, LossSpec)> =
        rows(supports).into_iter().map(|(row, spec)| (row.into_iter().enumerate().collect(), spec)).collect();
    let mut missing: BTreeSet<(usize, usize)> = rows.iter().flat_map(|(row, _)| row.iter().copied()).collect();
    let mut specs = Vec::new();
    while !missing.is_empty() {
        // The cover is greedy: the row with the most choices that no earlier one has comes next.
        let new = |(row, _): &(BTreeSet<(usize, usize)>, LossSpec)| row.intersection(&missing).count();
        let most = (0..rows.len()).max_by_key(|&at| new(&rows[at])).expect("what is missing is in a row");
        let (row, spec) = rows.swap_remove(most);
        missing.retain(|met| !row.contains(met));
        specs.push(spec);
    }
    specs
}

fn shape() -> Shape {
    let [batch, tokens, vocab] = SHAPE;
    Shape { batch, tokens, vocab }
}

/// One choice of each factor, and of the objective, with their spec.
fn rows(supports: Supports) -> Vec<(Vec<usize>, LossSpec)> {
    let rows = pairwise(&CHOICES);
    let of_objective = variants().into_iter().filter(|variant| variant.field == "objective");
    let supported = of_objective.filter(|variant| supports(&variant.spec, shape()));
    // An objective that only a certain ratio and reduction go with cannot take its turn with any other choice.
    let fits = |objective: &Objective| rows.iter().all(|row| spec(objective.clone(), row).check().is_ok());
    let objectives: Vec<Objective> = supported.map(|variant| variant.spec.objective).filter(fits).collect();
    // The objectives take turns over the rows: they need not meet every other choice.
    let turns = objectives.iter().enumerate().cycle();
    let rows = rows.into_iter().zip(turns).map(|(mut row, (place, objective))| {
        let spec = spec(objective.clone(), &row);
        assert!(supports(&spec, shape()), "not supported: {spec:?}");
        row.push(place);
        (row, spec)
    });
    rows.collect()
}
