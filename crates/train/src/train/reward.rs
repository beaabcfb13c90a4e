//! The reward of a completion, and its advantage within its group.

use serde::{Deserialize, Serialize};

use super::task::{MARKER, answer_of};

/// The two parts of a completion's reward.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reward {
    /// 1 where the number after the last `####` is the answer.
    pub answer: f64,
    /// 0.5 where there is exactly one `####`, and 0.5 where nothing but one number follows it.
    pub format: f64,
}

impl Reward {
    /// Computes the reward of a completion `text`; `ended` says whether it ended by itself.
    pub fn from_text(text: &str, ended: bool, answer: i64) -> Self {
        let parts: Vec<&str> = text.split(MARKER).collect();
        let alone = |after: &str| ended && after.split_whitespace().count() == 1 && answer_of(text).is_some();
        let format = match parts[..] {
            [_, after] => 0.5 + if alone(after) { 0.5 } else { 0.0 },
            _ => 0.0,
        };
        Self { answer: f64::from(u8::from(answer_of(text) == Some(answer))), format }
    }

    /// Returns the sum of the two parts.
    pub fn total(self) -> f64 {
        self.answer + self.format
    }
}

/// The formula from the rewards of a batch to advantages.
///
/// ```text
/// A = (r − baseline) / (deviation + epsilon)      or r − baseline, where rewards are not scaled
/// A = (x − mean x) / √(var x + epsilon)           x = r − baseline, over all tokens that count: `tokens`
/// A = (x − mean x) / √max(var x, epsilon)         the same with a floor
/// ```
///
/// The default is that of MLLM-JAX: a group's mean, its population deviation, 1e-4.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdvantageConfig {
    /// The baseline that is subtracted from each reward.
    pub baseline: GroupBaseline,
    /// The rewards over which the deviation is taken.
    pub scale_rewards: ScaleRewards,
    /// The kind of standard deviation.
    pub deviation: Deviation,
    /// Added to it, or to the variance over tokens, `≥ 0`.
    pub epsilon: f64,
    /// Whether `epsilon` is the least variance over tokens and nothing is added to it.
    pub floor: bool,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self {
            baseline: GroupBaseline::Mean,
            scale_rewards: ScaleRewards::Group,
            deviation: Deviation::Population,
            epsilon: 1e-4,
            floor: false,
        }
    }
}

/// The baseline that is subtracted from a completion's reward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupBaseline {
    /// The mean of its group (GRPO).
    Mean,
    /// The mean of the others of its group (RLOO).
    LeaveOneOut,
    /// A baseline of 0 (REINFORCE++).
    None,
}

impl GroupBaseline {
    /// Returns the reward minus the baseline, in a group of `n` completions with the given mean.
    fn difference(self, reward: f64, mean: f64, n: f64) -> f64 {
        match self {
            Self::Mean => reward - mean,
            Self::LeaveOneOut => (reward - mean) * n / (n - 1.0),
            Self::None => reward,
        }
    }
}

/// The rewards whose deviation divides, named as in TRL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// Rewards are not divided (Dr. GRPO).
    None,
    /// The deviation of the group's rewards.
    Group,
    /// The deviation of all rewards of the batch.
    Batch,
    /// The deviation over all tokens of the batch that count, each with its completion's value; their mean is subtracted
    /// (REINFORCE++ of outcomes, nothing discounted).
    Tokens,
}

/// A standard deviation of `n` numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Deviation {
    /// `√(Σ (r − mean)² / (n − 1))`
    Sample,
    /// `√(Σ (r − mean)² / n)`
    Population,
}

impl Deviation {
    fn compute(self, rewards: &[f64]) -> f64 {
        let mean = mean(rewards);
        let squares = rewards.iter().map(|r| (r - mean).powi(2)).sum::<f64>();
        self.variance(squares, rewards.len() as f64).sqrt()
    }

    fn variance(self, squares: f64, count: f64) -> f64 {
        match self {
            Deviation::Sample => squares / (count - 1.0),
            Deviation::Population => squares / count,
        }
    }
}

fn mean(rewards: &[f64]) -> f64 {
    rewards.iter().sum::<f64>() / rewards.len() as f64
}

impl AdvantageConfig {
    /// Computes the advantages of `rewards`, in adjacent groups of `group` ≥ 2 completions with `tokens` tokens that count.
    pub fn advantages(&self, rewards: &[f64], tokens: &[usize], group: usize) -> Vec<f64> {
        if self.scale_rewards == ScaleRewards::Tokens {
            return self.whitened(rewards, tokens, group);
        }
        // The deviation of the whole batch is used only if rewards are scaled by it.
        let of_batch = self.deviation.compute(rewards);
        let of_group = |rewards: &[f64]| -> Vec<f64> {
            // A group of equal rewards gives no gradient; with an epsilon of 0 the quotient would be 0/0.
            if rewards.iter().all(|r| *r == rewards[0]) {
                return vec![0.0; rewards.len()];
            }
            let (n, mean) = (rewards.len() as f64, mean(rewards));
            // The divisor is the deviation plus epsilon, or 1 if rewards are not scaled.
            let divisor = match self.scale_rewards {
                ScaleRewards::None | ScaleRewards::Tokens => 1.0,
                ScaleRewards::Group => self.deviation.compute(rewards) + self.epsilon,
                ScaleRewards::Batch => of_batch + self.epsilon,
            };
            rewards.iter().map(|&r| self.baseline.difference(r, mean, n) / divisor).collect()
        };
        rewards.chunks(group).flat_map(of_group).collect()
    }

    /// Scales rewards above their baseline to mean 0 and variance 1 over all tokens; 0 where no two tokens differ.
    fn whitened(&self, rewards: &[f64], tokens: &[usize], group: usize) -> Vec<f64> {
        // First the baseline of each group, as without scaling.
        let above = |rewards: &[f64]| -> Vec<f64> {
            let (n, mean) = (rewards.len() as f64, mean(rewards));
            rewards.iter().map(|&r| self.baseline.difference(r, mean, n)).collect()
        };
        let above: Vec<f64> = rewards.chunks(group).flat_map(above).collect();
        let mut counted = above.iter().zip(tokens).filter(|(_, tokens)| **tokens > 0).map(|(x, _)| x);
        let first = counted.next();
        // Equal values give no gradient, and one token or none has no deviation.
        if counted.all(|x| Some(x) == first) {
            return vec![0.0; rewards.len()];
        }
        // Then mean and variance, where each completion counts once a token.
        let of_tokens =
            |of: &dyn Fn(f64) -> f64| above.iter().zip(tokens).map(|(&x, &n)| of(x) * n as f64).sum::<f64>();
        let count = of_tokens(&|_| 1.0);
        let mean = of_tokens(&|x| x) / count;
        let squares = of_tokens(&|x| (x - mean).powi(2));
        let variance = self.deviation.variance(squares, count);
        let variance = if self.floor { variance.max(self.epsilon) } else { variance + self.epsilon };
        above.into_iter().map(|x| (x - mean) / variance.sqrt()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewards_by_hand() {
        let cases = [
            (" #### 7", true, 1.0, 1.0),
            (" #### 8", true, 0.0, 1.0),
            (" #### 7", false, 1.0, 0.5),
            (" #### 7 figs", true, 1.0, 0.5),
            (" #### 6 #### 7", true, 1.0, 0.0),
            (" #### ", true, 0.0, 0.5),
            (" 7", true, 0.0, 0.0),
        ];
        for (text, ended, answer, format) in cases {
            assert_eq!(Reward::from_text(text, ended, 7), Reward { answer, format }, "{text}");
        }
    }

    /// Two groups of two, `[2, 0]` and `[4, 0]`: means 1 and 2, population deviations 1 and 2, sample deviations √2 and √8; of
    /// the batch, mean 1.5, squares 0.25 + 2.25 + 6.25 + 2.25 = 11.
    #[test]
    fn advantages_by_hand() {
        use {Deviation::*, GroupBaseline::*, ScaleRewards as Scale};
        let root = f64::sqrt;
        let cases = [
            (Mean, Scale::Group, Population, 1e-4, [1.0 / 1.0001, 2.0 / 2.0001]),
            (Mean, Scale::Group, Sample, 1e-4, [1.0 / (root(2.0) + 1e-4), 2.0 / (root(8.0) + 1e-4)]),
            (Mean, Scale::Batch, Sample, 1e-4, [1.0 / (root(11.0 / 3.0) + 1e-4), 2.0 / (root(11.0 / 3.0) + 1e-4)]),
            (Mean, Scale::Batch, Population, 0.0, [1.0 / root(2.75), 2.0 / root(2.75)]),
            (Mean, Scale::None, Sample, 1e-4, [1.0, 2.0]),
            (LeaveOneOut, Scale::None, Sample, 1e-4, [2.0, 4.0]),
            (LeaveOneOut, Scale::Group, Population, 0.0, [2.0, 2.0]),
        ];
        for (baseline, scale_rewards, deviation, epsilon, [first, second]) in cases {
            let config = AdvantageConfig { baseline, scale_rewards, deviation, epsilon, floor: false };
            let given = config.advantages(&[2.0, 0.0, 4.0, 0.0], &[1; 4], 2);
            for (given, expected) in given.iter().zip([first, -first, second, -second]) {
                assert!((given - expected).abs() < 1e-15, "{config:?}: {given}, expected {expected}");
            }
            assert_eq!(config.advantages(&[1.0; 4], &[1; 4], 2), [0.0; 4]);
        }
        let all = AdvantageConfig::default();
        assert_eq!((all.deviation, all.scale_rewards, all.epsilon), (Population, Scale::Group, 1e-4));
    }

    /// Four rewards as above, of 1, 2, 1 and 4 tokens: of eight the sum is 6, the mean 3/4, the squares 25/16 + 2·9/16 + 169/16 + 4·9/16 =
    /// 31/2. Above their groups' means `[1, −1, 2, −2]`: the sum is −7, the squares 23 − 49/8 = 135/8.
    #[test]
    fn advantages_of_reinforce_plus_plus_by_hand() {
        use {Deviation::*, GroupBaseline as Of};
        let cases = [
            (Of::None, Sample, 1e-8, false, 0.75, (15.5 / 7.0 + 1e-8_f64).sqrt(), [2.0, 0.0, 4.0, 0.0]),
            (Of::None, Population, 1e-8, true, 0.75, (15.5 / 8.0_f64).sqrt(), [2.0, 0.0, 4.0, 0.0]),
            (Of::None, Population, 100.0, true, 0.75, 10.0, [2.0, 0.0, 4.0, 0.0]),
            (Of::Mean, Sample, 1e-8, false, -0.875, (135.0 / 56.0 + 1e-8_f64).sqrt(), [1.0, -1.0, 2.0, -2.0]),
        ];
        for (baseline, deviation, epsilon, floor, mean, divisor, above) in cases {
            let config = AdvantageConfig { baseline, scale_rewards: ScaleRewards::Tokens, deviation, epsilon, floor };
            let given = config.advantages(&[2.0, 0.0, 4.0, 0.0], &[1, 2, 1, 4], 2);
            for (given, x) in given.iter().zip(above) {
                assert!((given - (x - mean) / divisor).abs() < 1e-15, "{config:?}: {given}, of {x}");
            }
            // A completion that is masked weighs nothing, and one token has no deviation.
            assert_eq!(config.advantages(&[1.0, 1.0, 1.0, 1.0], &[3, 0, 0, 1], 2), [0.0; 4]);
            assert_eq!(config.advantages(&[2.0, 0.0], &[1, 0], 2), [0.0; 2]);
            assert_eq!(config.advantages(&[2.0, 0.0], &[0, 0], 2), [0.0; 2]);
        }
    }
}
