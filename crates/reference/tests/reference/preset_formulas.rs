//! Losses of projects whose own code runs nowhere here, as their documents or sources have them: each formula is written out with its
//! derivative by `ℓ`, and compared with the reference under the preset's spec.

use assay_core::problem::Problem;
use assay_core::spec::presets::{BatchInputs, Preset, PresetOptions, spec};
use assay_fixture::PeerFile;
use assay_reference as reference;

/// One token as the formulas name it.
struct Token {
    /// Log-probability of the policy.
    p: f64,
    /// Log-probability of the sampler.
    q: f64,
    advantage: f64,
}

impl Token {
    fn ratio(&self) -> f64 {
        (self.p - self.q).exp()
    }
}

/// The value of a token's term and its derivative by `ℓ`.
type Formula = fn(&Token) -> (f64, f64);

/// A batch in which one log-ratio is near 12, and two tokens were nearly certain to the sampler.
fn batch() -> Problem {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../fixtures/peers/torchtitan_dapo.json");
    let mut problem = PeerFile::read(path).unwrap().problem;
    let rollout_logp = problem.extra.rollout_logp.as_mut().unwrap();
    (rollout_logp[[2, 0]], rollout_logp[[1, 0]]) = (-0.01, -0.02);
    problem
}

/// Returns the tokens of the batch that count, each with its place and its probabilities.
fn tokens(problem: &Problem) -> Vec<(Token, TokenRow)> {
    let (shape, logits_of) = (problem.shape(), problem.logits.to_f64());
    let places = (0..shape.batch).flat_map(|b| (0..shape.tokens).map(move |t| (b, t)));
    let token = |(b, t): (usize, usize)| {
        let logits: Vec<f64> = (0..shape.vocab).map(|v| logits_of[[b, t, v]]).collect();
        let whole: f64 = logits.iter().map(|x| x.exp()).sum();
        let id = usize::try_from(problem.ids[[b, t]]).unwrap();
        let q = problem.extra.rollout_logp.as_ref().unwrap()[[b, t]];
        let token = Token { p: logits[id] - whole.ln(), q, advantage: problem.advantage((b, t)) };
        (token, TokenRow { at: (b, t), id, probabilities: logits.iter().map(|x| x.exp() / whole).collect() })
    };
    places.filter(|(b, t)| problem.mask[[*b, *t]]).map(token).collect()
}

/// The place of a token, its id and its softmax.
struct TokenRow {
    at: (usize, usize),
    id: usize,
    probabilities: Vec<f64>,
}

/// Compares the preset under `pairs` with the formula: within 1e-12 of the largest entry.
#[track_caller]
fn assert_formula(preset: Preset, pairs: &[&str], count: f64, formula: Formula) {
    let problem = batch();
    let given = BatchInputs { sampling_logps: true, ..BatchInputs::default() };
    let resolved = spec(preset, None, &PresetOptions::from_pairs(pairs).unwrap(), &given).unwrap();
    let reference = reference::evaluate(&resolved.spec, &problem).unwrap();
    let terms: Vec<_> = tokens(&problem).into_iter().map(|(token, row)| (formula(&token), row)).collect();
    let loss = terms.iter().map(|((value, _), _)| value / count).sum::<f64>();
    assert!((reference.loss() - loss).abs() <= 1e-12 * loss.abs(), "{pairs:?}: {} and {loss}", reference.loss());
    let largest = terms.iter().fold(0.0_f64, |most, ((_, slope), _)| most.max((slope / count).abs()));
    for ((_, slope), row) in terms {
        let own = reference.dlogits_row(row.at.0, row.at.1);
        for (j, (own, p)) in own.into_iter().zip(row.probabilities).enumerate() {
            let by_hand = slope / count * (f64::from(u8::from(j == row.id)) - p);
            assert!((own - by_hand).abs() <= 1e-12 * largest, "{pairs:?}: {own} and {by_hand}");
        }
    }
}

#[test]
fn tinker_losses_match_the_documented_formulas() {
    assert_formula(Preset::Tinker, &[], 1.0, |token| {
        let term = -token.ratio() * token.advantage;
        (term, term)
    });
    assert_formula(Preset::Tinker, &["loss_fn=ppo"], 1.0, |token| {
        let (ratio, a) = (token.ratio(), token.advantage);
        let clipped = ratio.clamp(0.8, 1.2);
        if ratio * a <= clipped * a { (-ratio * a, -ratio * a) } else { (-clipped * a, 0.0) }
    });
    assert_formula(Preset::Tinker, &["loss_fn=cispo"], 1.0, |token| {
        let weight = token.ratio().clamp(0.0, 4.0);
        (-weight * token.p * token.advantage, -weight * token.advantage)
    });
    assert_formula(Preset::Tinker, &["loss_fn=dro", "beta=0.05"], 1.0, |token| {
        let x = token.p - token.q;
        (-(token.p * token.advantage - 0.5 * 0.05 * x * x), -(token.advantage - 0.05 * x))
    });
    assert_formula(Preset::Tinker, &["loss_fn=cross_entropy"], 1.0, |token| {
        (-token.p * token.advantage, -token.advantage)
    });
}

/// The ratio of prime-rl: `min(ρ, 10⁴)`, whose derivative by `ℓ` is itself.
fn capped(token: &Token) -> f64 {
    token.ratio().min(1e4)
}

#[test]
fn prime_rl_losses_of_main_match_their_formulas() {
    // A token whose probability moved by more than eps has no term.
    assert_formula(Preset::PrimeRl, &["rl_scale=7"], 7.0, |token| {
        let kept = (token.p.exp() - token.q.exp()).abs() <= 0.3;
        let term = if kept { -token.advantage * capped(token) } else { 0.0 };
        (term, term)
    });
    assert_formula(Preset::PrimeRl, &["rl_scale=7", "type=icepop", "adv_tau=0.5"], 7.0, |token| {
        let kept = (0.2_f64.ln()..=5.0_f64.ln()).contains(&(token.p - token.q));
        let term = if kept { -0.5 * token.advantage * token.ratio() } else { 0.0 };
        (term, term)
    });
    assert_formula(Preset::PrimeRl, &["rl_scale=7", "type=ppo"], 7.0, |token| {
        let (ratio, a) = (capped(token), token.advantage);
        let clipped = ratio.clamp(0.8, 1.2);
        if ratio * a <= clipped * a { (-ratio * a, -ratio * a) } else { (-clipped * a, 0.0) }
    });
    assert_formula(Preset::PrimeRl, &["rl_scale=7", "type=cispo"], 7.0, |token| {
        let weight = token.ratio().min(5.0);
        (-weight * token.advantage * token.p, -weight * token.advantage)
    });
}

#[test]
fn prime_rl_batch_has_a_kept_ratio_beyond_the_cap() {
    let problem = batch();
    let some = |holds: fn(&Token) -> bool| tokens(&problem).iter().any(|(token, _)| holds(token));
    let moved = |token: &Token| (token.p.exp() - token.q.exp()).abs();
    assert!(tokens(&problem).iter().any(|(token, _)| token.ratio() > 1e4 && moved(token) <= 0.3));
    assert!(tokens(&problem).iter().any(|(token, _)| moved(token) > 0.3));
    assert!(some(|token| token.ratio() < 0.2));
}
