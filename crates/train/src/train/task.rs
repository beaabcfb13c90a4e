//! Questions with exact answers: arithmetic word problems from a seed, or GSM8K's own.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::TrainError;

/// What stands before the answer.
pub const MARKER: &str = "####";

/// A question, a solution to imitate, and the number that is its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exercise {
    /// What the policy is given.
    pub question: String,
    /// A completion that is right: its last line is `#### N`.
    pub solution: String,
    /// `N`.
    pub answer: i64,
}

/// Arithmetic word problems: two numbers up to `largest`, added or subtracted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arithmetic {
    /// How many to train on.
    pub train: usize,
    /// How many to evaluate on, none of which is trained on.
    pub evaluate: usize,
    /// The largest of the numbers, `≥ 1`.
    pub largest: i64,
}

const NAMES: [&str; 6] = ["Ann", "Bob", "Eve", "Kim", "Max", "Zoe"];
const THINGS: [&str; 6] = ["figs", "pens", "cups", "eggs", "nuts", "keys"];

impl Arithmetic {
    /// The exercises to train and to evaluate on, from `seed`: all different.
    ///
    /// # Errors
    /// [`TrainError`] where there are not so many different ones.
    pub fn exercises(&self, seed: u64) -> Result<(Vec<Exercise>, Vec<Exercise>), TrainError> {
        // Numbers a ≥ b of a sum or a difference, names and things.
        let numbers = usize::try_from(self.largest).unwrap_or(0);
        let there_are = numbers * (numbers + 1) * NAMES.len() * THINGS.len();
        let wanted = self.train.saturating_add(self.evaluate);
        if self.train == 0 || self.evaluate == 0 || wanted > there_are / 2 {
            let given = format!("{} to train and {} to evaluate on", self.train, self.evaluate);
            let expected =
                format!("at least 1 of each and at most {} together (`largest: {}`)", there_are / 2, self.largest);
            return Err(TrainError::Setting { field: "task.arithmetic", given, expected });
        }
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut all = Vec::with_capacity(wanted);
        let mut seen = std::collections::HashSet::new();
        while all.len() < wanted {
            let exercise = self.draw(&mut rng);
            if seen.insert(exercise.question.clone()) {
                all.push(exercise);
            }
        }
        let evaluate = all.split_off(self.train);
        Ok((all, evaluate))
    }

    fn draw(&self, rng: &mut ChaCha8Rng) -> Exercise {
        let (a, b) = (rng.random_range(1..=self.largest), rng.random_range(1..=self.largest));
        let (a, b) = (a.max(b), a.min(b));
        let name = NAMES.choose(rng).expect("not empty");
        let things = THINGS.choose(rng).expect("not empty");
        let (verb, answer) = if rng.random() { ("gets", a + b) } else { ("loses", a - b) };
        let question = format!("{name} has {a} {things} and {verb} {b}. How many?");
        Exercise { question, solution: format!(" {MARKER} {answer}"), answer }
    }
}

/// Reads GSM8K's `jsonl`: a line each with `question` and `answer`, whose last line is `#### N`.
///
/// # Errors
/// [`TrainError`] naming the line that is none, or a file without any.
pub fn read_gsm8k(path: &Path) -> Result<Vec<Exercise>, TrainError> {
    #[derive(Deserialize)]
    struct Line {
        question: String,
        answer: String,
    }
    let file = File::open(path).map_err(|reason| TrainError::io(path, "read", reason))?;
    let mut exercises = Vec::new();
    for (i, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|reason| TrainError::io(path, "read", reason))?;
        if line.trim().is_empty() {
            continue;
        }
        let invalid = |reason: String| TrainError::file(path, format!("line {}: {reason}", i + 1));
        let Line { question, answer: solution } =
            serde_json::from_str(&line).map_err(|error| invalid(error.to_string()))?;
        let Some(answer) = answer_of(&solution) else {
            return Err(invalid(format!("`answer`: got no `{MARKER} N`, expected one at its end")));
        };
        if question.trim().is_empty() {
            return Err(invalid("`question`: got nothing, expected a question".into()));
        }
        exercises.push(Exercise { question, solution: format!("\n{solution}"), answer });
    }
    if exercises.is_empty() {
        return Err(TrainError::file(path, "got no exercise, expected at least one line".into()));
    }
    Ok(exercises)
}

/// The number after the last marker, thousands separated by commas or not; `None` where there is none.
pub fn answer_of(text: &str) -> Option<i64> {
    let (_, after) = text.rsplit_once(MARKER)?;
    after.split_whitespace().next()?.replace(',', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exercises_are_right_different_and_the_same_for_a_seed() {
        let task = Arithmetic { train: 200, evaluate: 50, largest: 9 };
        let (train, evaluate) = task.exercises(3).unwrap();
        assert_eq!((train.len(), evaluate.len()), (200, 50));
        for exercise in train.iter().chain(&evaluate) {
            let numbers: Vec<i64> = exercise.question.split([' ', '.']).filter_map(|word| word.parse().ok()).collect();
            let expected =
                if exercise.question.contains("gets") { numbers[0] + numbers[1] } else { numbers[0] - numbers[1] };
            assert_eq!(exercise.answer, expected, "{exercise:?}");
            assert_eq!(answer_of(&exercise.solution), Some(expected));
        }
        assert!(evaluate.iter().all(|one| !train.contains(one)));
        assert_eq!(task.exercises(3).unwrap().0, train);
        assert_ne!(task.exercises(4).unwrap().0, train);
    }

    #[test]
    fn more_exercises_than_there_are_is_an_error() {
        let task = Arithmetic { train: 40, evaluate: 1, largest: 1 };
        assert!(task.exercises(0).unwrap_err().to_string().starts_with("`task.arithmetic`: got 40 to train"));
    }

    #[test]
    fn answers_stand_after_the_last_marker() {
        let cases = [("#### 7", Some(7)), ("so #### 1,234\n", Some(1234)), ("#### -3 or", Some(-3)), ("#### x", None)];
        for (text, answer) in cases.into_iter().chain([("7", None), ("####", None), ("#### 1 #### 2", Some(2))]) {
            assert_eq!(answer_of(text), answer, "{text}");
        }
    }
}
