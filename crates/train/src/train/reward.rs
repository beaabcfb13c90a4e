//! What a completion is worth, and its advantage within its group.

use super::task::{MARKER, answer_of};

/// Added to the standard deviation of a group's rewards.
const EPSILON: f64 = 1e-4;

/// Rewards of one completion.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reward {
    /// 1 where the number after the last `####` is the answer.
    pub answer: f64,
    /// 0.5 where there is exactly one `####`, and 0.5 where nothing but one number follows it.
    pub format: f64,
}

impl Reward {
    /// Of a completion `text` that ended by itself, or did not.
    pub fn of(text: &str, ended: bool, answer: i64) -> Self {
        let parts: Vec<&str> = text.split(MARKER).collect();
        let alone = |after: &str| ended && after.split_whitespace().count() == 1 && answer_of(text).is_some();
        let format = match parts[..] {
            [_, after] => 0.5 + if alone(after) { 0.5 } else { 0.0 },
            _ => 0.0,
        };
        Self { answer: f64::from(u8::from(answer_of(text) == Some(answer))), format }
    }

    /// Their sum.
    pub fn total(self) -> f64 {
        self.answer + self.format
    }
}

/// `(r − mean) / (std + 1e-4)` of the rewards of one group, with their own standard deviation `√(Σ (r − mean)² / n)`.
pub fn advantages(group: &[f64]) -> Vec<f64> {
    let mean = group.iter().sum::<f64>() / group.len() as f64;
    let variance = group.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / group.len() as f64;
    group.iter().map(|r| (r - mean) / (variance.sqrt() + EPSILON)).collect()
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
            assert_eq!(Reward::of(text, ended, 7), Reward { answer, format }, "{text}");
        }
    }

    #[test]
    fn advantages_are_those_of_the_group() {
        assert_eq!(advantages(&[2.0, 0.0]), [1.0 / 1.0001, -1.0 / 1.0001]);
        assert_eq!(advantages(&[1.0, 1.0]), [0.0, 0.0]);
    }
}
