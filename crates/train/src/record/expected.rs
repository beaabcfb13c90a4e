//! The scalars that are recorded with the logits, by which a reader is checked: the definitions of `fixtures/README.md`, in
//! float64 on the stored numbers, in code that is shared with no other crate.

use std::collections::BTreeMap;

/// The clip of the recorded scalars, low and high.
pub(super) const CLIP: [f64; 2] = [0.2, 0.3];

/// The columns that are summed one after another before the block sums are added.
const BLOCK: usize = 512;

fn sum(terms: impl Iterator<Item = f64>) -> f64 {
    let (mut blocks, mut block) = (0.0, 0.0);
    for (i, term) in terms.enumerate() {
        if i % BLOCK == 0 {
            blocks += block;
            block = 0.0;
        }
        block += term;
    }
    blocks + block
}

/// Computes `log softmax(logits / temperature)` in f64, in nats.
pub(super) fn log_softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|&x| f64::from(x) / temperature).collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = max + sum(scaled.iter().map(|x| (x - max).exp())).ln();
    scaled.into_iter().map(|x| x - lse).collect()
}

/// The numbers of one row of logits from which the scalars of a batch are summed.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenScalars {
    pub(super) logp: f64,
    pub(super) entropy: f64,
    /// `Σ p` and `Σ p²` of all columns but the chosen one.
    rest: f64,
    rest2: f64,
    /// The sampled logit above the mean: `x_id − Σ p·x`.
    dot: f64,
}

impl TokenScalars {
    pub(super) fn from_logits(logits: &[f64], id: usize) -> Self {
        // The softmax in f64, shifted by the largest logit.
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = sum(logits.iter().map(|x| (x - max).exp()));
        let p = |x: f64| (x - max).exp() / total;
        let others = || logits.iter().enumerate().filter(|(v, _)| *v != id).map(|(_, x)| *x);
        Self {
            logp: logits[id] - max - total.ln(),
            entropy: total.ln() - sum(logits.iter().map(|&x| (x - max) * p(x))),
            rest: sum(others().map(p)),
            rest2: sum(others().map(|x| p(x) * p(x))),
            dot: logits[id] - sum(logits.iter().map(|&x| p(x) * x)),
        }
    }
}

/// The scalars of a batch, token by token.
#[derive(Clone, Debug, Default)]
pub(super) struct BatchScalars {
    tokens: Vec<(TokenScalars, f64, f64)>,
}

impl BatchScalars {
    /// Adds one unmasked token, with its old log-probability in nats.
    pub(super) fn add(&mut self, row: TokenScalars, old_logp: f64, advantage: f64) {
        self.tokens.push((row, old_logp, advantage));
    }

    /// Computes the scalars and names them as the metadata of a fixture does.
    pub(super) fn scalars(&self) -> BTreeMap<String, String> {
        let [low, high] = [1.0 - CLIP[0], 1.0 + CLIP[1]];
        let n = self.tokens.len() as f64;
        let ratios: Vec<f64> = self.tokens.iter().map(|(row, old, _)| (row.logp - old).exp()).collect();
        let each = || self.tokens.iter().zip(&ratios).map(|((row, _, a), &r)| (row, *a, r));
        let clipped_low = |a: f64, r: f64| a < 0.0 && r < low;
        let clipped_high = |a: f64, r: f64| a > 0.0 && r > high;
        let gradient = |a: f64, r: f64| if clipped_low(a, r) || clipped_high(a, r) { 0.0 } else { -r * a / n };
        let over = |of: &dyn Fn(&TokenScalars, f64) -> f64| sum(each().map(|(row, a, r)| of(row, gradient(a, r))));
        let count = |holds: &dyn Fn(f64, f64) -> bool| each().filter(|(_, a, r)| holds(*a, *r)).count();
        // The smallest distance of a ratio from a bound: a reader whose ratio is off by more may clip differently.
        let margin = ratios.iter().map(|r| (r - low).abs().min((r - high).abs())).fold(f64::INFINITY, f64::min);
        // The dlogits of a token are `g·(1 − p)` at its id and `−g·p_j` elsewhere, with `g` from `gradient`: sums of
        // absolute values and of squares follow from `Σ p` and `Σ p²` of the other columns, without a row of dlogits.
        let of_logits = [
            ("n_tokens", self.tokens.len().to_string()),
            ("entropy_mean", format!("{:e}", sum(each().map(|(row, ..)| row.entropy)) / n)),
        ];
        let of_both = [
            ("loss", format!("{:e}", sum(each().map(|(_, a, r)| -(r * a).min(r.clamp(low, high) * a))) / n)),
            ("dlogits_sum_abs", format!("{:e}", over(&|row, g| g.abs() * 2.0 * row.rest))),
            ("dlogits_sum_sq", format!("{:e}", over(&|row, g| g * g * (row.rest * row.rest + row.rest2)))),
            ("dlogits_dot_logits", format!("{:e}", over(&|row, g| g * row.dot))),
            ("ratio_low", count(&|_, r| r < low).to_string()),
            ("ratio_high", count(&|_, r| r > high).to_string()),
            ("clipped_low", count(&clipped_low).to_string()),
            ("clipped_high", count(&clipped_high).to_string()),
            ("ratio_min", format!("{:e}", ratios.iter().copied().fold(f64::INFINITY, f64::min))),
            ("ratio_max", format!("{:e}", ratios.iter().copied().fold(0.0, f64::max))),
            ("tie_margin", format!("{margin:e}")),
        ];
        let named = |prefix: &str, (name, value): (&str, String)| (format!("expected.{prefix}.{name}"), value);
        let of_logits = of_logits.into_iter().map(|entry| named("logits", entry));
        of_logits.chain(of_both.into_iter().map(|entry| named("logits.old_logps", entry))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_of_two_columns_by_hand() {
        // p = 3/4, 1/4.
        let row = TokenScalars::from_logits(&[3f64.ln(), 0.0], 0);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-15, "{a} {b}");
        close(row.logp, 0.75f64.ln());
        close(row.entropy, -(0.75 * 0.75f64.ln() + 0.25 * 0.25f64.ln()));
        close(row.rest, 0.25);
        close(row.dot, 0.25 * 3f64.ln());
        close(log_softmax(&[1.0, 1.0], 2.0)[0], 0.5f64.ln());
        let mut expected = BatchScalars::default();
        // r = 1, A = 2: loss −2, g = −2, dlogits = −2·(1/4, −1/4).
        expected.add(row, row.logp, 2.0);
        let scalars = expected.scalars();
        let scalar = |name: &str| scalars[&format!("expected.logits.old_logps.{name}")].parse::<f64>().unwrap();
        close(scalar("loss"), -2.0);
        close(scalar("dlogits_sum_abs"), 1.0);
        close(scalar("dlogits_sum_sq"), 0.5);
        close(scalar("dlogits_dot_logits"), -0.5 * 3f64.ln());
        assert_eq!(scalars["expected.logits.n_tokens"], "1");
    }
}
