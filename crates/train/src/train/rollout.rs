//! [`generate`]: completions from a policy, with the log-probabilities that they were sampled with.
//!
//! What is sampled is what a loss scores ([`Distribution`]): the same transform of logits, support and temperature.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::TrainError;
use super::qwen2::{KvCache, Qwen2};
use assay_core::memory::expect_host_room;
use assay_core::spec::{LogitsTransform, LossSpec, Support};

/// The way in which tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TokenSampling {
    /// The most likely one, the first of equals.
    Greedy,
    /// Tokens are drawn from the distribution. Sequence `i` of a call has random numbers of its own, a function of `seed` and `i` alone.
    Random {
        /// The seed of the call.
        seed: u64,
    },
}

/// The distribution that a loss scores: with logits `a`, in f64,
///
/// ```text
/// softmax(softcap · tanh(scale · a / softcap) / temperature)     over the support
/// ```
#[derive(Clone, Debug)]
pub struct Distribution {
    scale: f64,
    softcap: Option<f64>,
    temperature: f64,
    support: Support,
}

/// The temperature of a loss that a configuration may have: one for all tokens.
pub(super) fn one_temperature(spec: &LossSpec) -> f64 {
    spec.temperature.number().expect("checked: a configuration's temperature is a number")
}

impl Distribution {
    /// Creates the distribution of `spec`, whose logits have no bias and are divided by its one temperature.
    pub fn from_spec(spec: &LossSpec) -> Self {
        let LogitsTransform { scale, softcap, bias: _ } = spec.logits;
        Self { scale, softcap, temperature: one_temperature(spec), support: spec.support.clone() }
    }

    /// Whether `id` is ever drawn.
    pub fn has(&self, id: u32) -> bool {
        let id = id as usize;
        self.support.vocab.is_none_or(|vocab| id < vocab) && !self.support.excluded_ids.contains(&id)
    }

    /// Transforms logits to the arguments of the softmax; −∞ outside the support.
    fn transformed(&self, logits: &[f32]) -> Vec<f64> {
        let transform = |&logit: &f32| {
            let scaled = self.scale * f64::from(logit);
            self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh()) / self.temperature
        };
        let mut all: Vec<f64> = logits.iter().map(transform).collect();
        let padding = self.support.vocab.unwrap_or(all.len())..all.len();
        for id in padding.chain(self.support.excluded_ids.iter().copied()).filter(|id| *id < logits.len()) {
            all[id] = f64::NEG_INFINITY;
        }
        all
    }
}

/// A completion of one prompt, sampled from the policy.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledCompletion {
    /// The tokens; the last is the end token if the completion ended.
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
    distribution: &Distribution,
    sampling: TokenSampling,
) -> Result<Vec<SampledCompletion>, TrainError> {
    // Prompts of one length run together, without padding: each batch has one position for all its sequences.
    let mut by_length: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (i, prompt) in prompts.iter().enumerate() {
        by_length.entry(prompt.len()).or_default().push(i);
    }
    let mut completions = vec![SampledCompletion { ids: Vec::new(), logp: Vec::new(), ended: false }; prompts.len()];
    for (length, mut going) in by_length {
        // A sequence has a random stream of its own: its tokens do not depend on which others run with it.
        let mut rngs: BTreeMap<usize, ChaCha8Rng> = going.iter().map(|&i| (i, random_of(sampling, i))).collect();
        let mut cache = KvCache::default();
        let given: Vec<u32> = going.iter().flat_map(|&i| prompts[i].iter().copied()).collect();
        let mut next = Tensor::from_vec(given, (going.len(), length), &Device::Cpu)?;
        for _ in 0..room {
            // The logits, and their copy that tokens are drawn from: however many completions are asked for go on at once.
            let bytes = [going.len(), policy.config().vocab_size, 2 * size_of::<f32>()];
            let what = || format!("the sampler, for the logits of {} completions of one length,", going.len());
            expect_host_room(what, bytes.into_iter().fold(1, usize::saturating_mul))?;
            // The first pass reads the whole prompt, later ones one token, with the keys and values of all before it.
            let hidden = policy.hidden(&next, Some(&mut cache))?;
            let last = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.squeeze(1)?.contiguous()?;
            let logits = last.matmul(&policy.lm_head().t()?)?;
            let uniform: Vec<f64> = going.iter().map(|i| rngs.get_mut(i).expect("one each").random()).collect();
            let (vocab, logits) = (logits.dim(1)?, logits.flatten_all()?.to_vec1::<f32>()?);
            let drawn: Vec<(u32, f64)> = logits
                .par_chunks(vocab)
                .zip(uniform)
                .map(|(row, uniform)| draw(&distribution.transformed(row), sampling, uniform))
                .collect();
            // Append each token; a sequence that has ended leaves the batch.
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
            // The cache keeps only the sequences that go on.
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

fn random_of(sampling: TokenSampling, sequence: usize) -> ChaCha8Rng {
    let seed = if let TokenSampling::Random { seed } = sampling { seed } else { 0 };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(sequence as u64);
    rng
}

/// A column of the softmax of `z`, and its log-probability: the first whose cumulative probability is beyond `uniform`.
fn draw(z: &[f64], sampling: TokenSampling, uniform: f64) -> (u32, f64) {
    // The maximum is subtracted before the exponentials, which so stay at most 1.
    let (best, max) =
        z.iter().enumerate().fold((0, f64::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
    let sum: f64 = z.iter().map(|x| (x - max).exp()).sum();
    let chosen = match sampling {
        TokenSampling::Greedy => best,
        TokenSampling::Random { .. } => {
            // Inverse transform sampling: the first column at which the cumulative sum exceeds `uniform` times the total.
            let mut left = uniform * sum;
            let beyond = z.iter().position(|x| {
                left -= (x - max).exp();
                left < 0.0
            });
            // Rounding may leave the cumulative sum below the drawn number; the likeliest column is taken then.
            beyond.unwrap_or(best)
        }
    };
    (chosen as u32, z[chosen] - max - sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANDOM: TokenSampling = TokenSampling::Random { seed: 0 };

    #[test]
    fn rollout_draws_columns_by_their_probabilities() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].map(f32::ln).to_vec();
        let mut spec = LossSpec::default();
        let z = Distribution::from_spec(&spec).transformed(&logits);
        for (uniform, column) in [(0.0, 0), (0.099, 0), (0.101, 1), (0.299, 1), (0.301, 2), (0.599, 2), (0.601, 3)] {
            let (drawn, logp) = draw(&z, RANDOM, uniform);
            assert_eq!(drawn, column, "{uniform}");
            assert!((logp - f64::from(logits[column as usize])).abs() < 1e-7);
        }
        assert_eq!(draw(&z, TokenSampling::Greedy, 0.0).0, 3);
        // 0.1², 0.2², … at half the temperature, over 0.3.
        spec.temperature = 0.5.into();
        let (drawn, logp) = draw(&Distribution::from_spec(&spec).transformed(&logits), RANDOM, 0.032);
        assert_eq!(drawn, 0);
        assert!((logp - (0.01f64 / 0.3).ln()).abs() < 1e-6);
    }

    /// Two columns of the five, whose logits are turned round and bounded.
    #[test]
    fn rollout_draws_within_the_support_after_the_transform() {
        let spec = LossSpec {
            logits: LogitsTransform { scale: -2.0, softcap: Some(3.0), bias: false },
            support: Support { vocab: Some(3), excluded_ids: vec![1], ..Support::default() },
            ..LossSpec::default()
        };
        let distribution = Distribution::from_spec(&spec);
        let z = distribution.transformed(&[1.0, 9.0, -1.0, -9.0, -9.0]);
        let expected = 3.0 * (2.0f64 / 3.0).tanh();
        assert!((z[2] - expected).abs() < 1e-12 && (z[0] + expected).abs() < 1e-12, "{z:?}");
        assert_eq!([z[1], z[3], z[4]], [f64::NEG_INFINITY; 3]);
        assert_eq!(draw(&z, TokenSampling::Greedy, 0.0).0, 2);
        for i in 0..100 {
            assert!([0, 2].contains(&draw(&z, RANDOM, f64::from(i) / 100.0).0));
        }
        assert_eq!([0, 1, 2, 3].map(|id| distribution.has(id)), [true, false, true, false]);
    }
}
