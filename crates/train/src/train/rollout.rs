//! [`generate`]: completions from a policy, with the log-probabilities that they were sampled with.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::TrainError;
use super::qwen2::{KvCache, Qwen2};

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The most likely one, the first of equals.
    Greedy,
    /// From the softmax of `logits / temperature`. Sequence `i` of a call has random numbers of its own, a function of `seed`
    /// and `i` alone.
    Softmax {
        /// `> 0`
        temperature: f64,
        /// Of the call.
        seed: u64,
    },
}

/// What a policy made of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Its tokens; the last is the end, where it came.
    pub ids: Vec<u32>,
    /// Log-probability of each, nats, in f64 from f32 logits.
    pub logp: Vec<f64>,
    /// Whether it ended before there was no more room.
    pub ended: bool,
}

/// A completion of each of `prompts`, at most `room` tokens long, until `end`. Prompts of equal length go through the policy
/// together.
///
/// # Errors
/// [`TrainError`] where an id is beyond the vocabulary.
pub fn generate(
    policy: &Qwen2,
    prompts: &[&[u32]],
    room: usize,
    end: u32,
    sampling: Sampling,
) -> Result<Vec<Completion>, TrainError> {
    let mut by_length: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (i, prompt) in prompts.iter().enumerate() {
        by_length.entry(prompt.len()).or_default().push(i);
    }
    let mut completions = vec![Completion { ids: Vec::new(), logp: Vec::new(), ended: false }; prompts.len()];
    for (length, mut going) in by_length {
        let mut rngs: BTreeMap<usize, ChaCha8Rng> = going.iter().map(|&i| (i, random_of(sampling, i))).collect();
        let mut cache = KvCache::default();
        let given: Vec<u32> = going.iter().flat_map(|&i| prompts[i].iter().copied()).collect();
        let mut next = Tensor::from_vec(given, (going.len(), length), &Device::Cpu)?;
        for _ in 0..room {
            let hidden = policy.hidden(&next, Some(&mut cache))?;
            let last = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.squeeze(1)?.contiguous()?;
            let logits = last.matmul(&policy.lm_head().t()?)?;
            let uniform: Vec<f64> = going.iter().map(|i| rngs.get_mut(i).expect("one each").random()).collect();
            let (vocab, logits) = (logits.dim(1)?, logits.flatten_all()?.to_vec1::<f32>()?);
            let drawn: Vec<(u32, f64)> =
                logits.par_chunks(vocab).zip(uniform).map(|(row, uniform)| draw(row, sampling, uniform)).collect();
            let mut kept = Vec::new();
            for (row, (&i, &(id, logp))) in going.iter().zip(&drawn).enumerate() {
                let completion = &mut completions[i];
                completion.ids.push(id);
                completion.logp.push(logp);
                completion.ended = id == end;
                if !completion.ended {
                    kept.push(row);
                }
            }
            if kept.len() < going.len() {
                cache.keep(&kept.iter().map(|&row| row as u32).collect::<Vec<_>>())?;
                going = kept.iter().map(|&row| going[row]).collect();
            }
            if going.is_empty() {
                break;
            }
            let ids: Vec<u32> = kept.iter().map(|&row| drawn[row].0).collect();
            next = Tensor::from_vec(ids, (going.len(), 1), &Device::Cpu)?;
        }
    }
    Ok(completions)
}

fn random_of(sampling: Sampling, sequence: usize) -> ChaCha8Rng {
    let seed = if let Sampling::Softmax { seed, .. } = sampling { seed } else { 0 };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(sequence as u64);
    rng
}

/// A column of `logits`, and its log-probability: the first whose cumulative probability is beyond `uniform`.
fn draw(logits: &[f32], sampling: Sampling, uniform: f64) -> (u32, f64) {
    let temperature = if let Sampling::Softmax { temperature, .. } = sampling { temperature } else { 1.0 };
    let (best, max) =
        logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
    let scaled = |x: f32| (f64::from(x) - f64::from(max)) / temperature;
    let sum: f64 = logits.iter().map(|&x| scaled(x).exp()).sum();
    let chosen = match sampling {
        Sampling::Greedy => best,
        Sampling::Softmax { .. } => {
            let mut left = uniform * sum;
            let beyond = logits.iter().position(|&x| {
                left -= scaled(x).exp();
                left < 0.0
            });
            // Rounding may leave a rest after the last.
            beyond.unwrap_or(best)
        }
    };
    (chosen as u32, scaled(logits[chosen]) - sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_drawn_by_their_probabilities() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].map(f32::ln).to_vec();
        let sampling = Sampling::Softmax { temperature: 1.0, seed: 0 };
        for (uniform, column) in [(0.0, 0), (0.099, 0), (0.101, 1), (0.299, 1), (0.301, 2), (0.599, 2), (0.601, 3)] {
            let (drawn, logp) = draw(&logits, sampling, uniform);
            assert_eq!(drawn, column, "{uniform}");
            assert!((logp - f64::from(logits[column as usize])).abs() < 1e-7);
        }
        assert_eq!(draw(&logits, Sampling::Greedy, 0.0).0, 3);
        // 0.1², 0.2², … at half the temperature, over 0.3.
        let (drawn, logp) = draw(&logits, Sampling::Softmax { temperature: 0.5, seed: 0 }, 0.032);
        assert_eq!(drawn, 0);
        assert!((logp - (0.01f64 / 0.3).ln()).abs() < 1e-6);
    }
}
