//! Questions with exact answers: arithmetic word problems from a seed, or GSM8K's own.

use std::collections::HashSet;
use std::path::Path;

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::TrainError;
use assay_core::files::read_regular_text;

/// The marker before the answer, as in GSM8K.
pub const MARKER: &str = "####";

/// The longest file of exercises, in bytes.
pub(super) const LONGEST: u64 = 256 << 20;

/// The longest line of it, in bytes: a tokenizer would take minutes over one that no model has the positions for.
const LONGEST_LINE: usize = 1 << 20;

/// A question, a solution to imitate, and the number that is its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exercise {
    /// The prompt that the policy is given.
    pub question: String,
    /// A completion that is right: its last line is `#### N`.
    pub solution: String,
    /// The right answer, `N` after the marker.
    pub answer: i64,
}

/// The largest number that an exercise may have, so that no sum of two overflows.
const LARGEST: i64 = 1_000_000_000_000_000_000;

/// An exercise as the ids of its tokens.
pub(super) struct Prompted {
    pub(super) prompt: Vec<u32>,
    pub(super) solution: Vec<u32>,
    pub(super) answer: i64,
}

/// Arithmetic word problems of two numbers up to `largest`, the first no less than the second.
///
/// No two numbers that are evaluated on stand together in an exercise that is trained on: a policy that knows the answer has
/// learned how, and not that one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArithmeticTask {
    /// The number of exercises to train on.
    pub train: usize,
    /// The number of exercises to evaluate on.
    pub evaluate: usize,
    /// The largest of the numbers, `≥ 1`.
    pub largest: i64,
    /// The verbs that exercises are drawn from.
    #[serde(default = "sum_and_difference")]
    pub verbs: Vec<Verb>,
}

fn sum_and_difference() -> Vec<Verb> {
    vec![Verb::Gets, Verb::Loses]
}

/// The verb of an exercise: what a person who has `a` things does with `b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verb {
    /// The answer is `a + b`.
    Gets,
    /// The answer is `a − b`.
    Loses,
    /// `a`: wanting changes nothing. What a small policy learns in a minute, for numbers that it has not seen together too.
    Wants,
}

impl Verb {
    fn word(self) -> &'static str {
        match self {
            Verb::Gets => "gets",
            Verb::Loses => "loses",
            Verb::Wants => "wants",
        }
    }

    fn answer(self, a: i64, b: i64) -> i64 {
        match self {
            Verb::Gets => a + b,
            Verb::Loses => a - b,
            Verb::Wants => a,
        }
    }
}

const NAMES: [&str; 6] = ["Ann", "Bob", "Eve", "Kim", "Max", "Zoe"];
const THINGS: [&str; 6] = ["figs", "pens", "cups", "eggs", "nuts", "keys"];

/// Whether `a` and `b` are evaluated on; else they are trained on.
fn is_evaluated(a: i64, b: i64) -> bool {
    (a + 2 * b) % 5 == 0
}

impl ArithmeticTask {
    /// The exercises to train and to evaluate on, from `seed`: all different.
    ///
    /// # Errors
    /// [`TrainError`] where there are not so many different ones.
    pub fn exercises(&self, seed: u64) -> Result<(Vec<Exercise>, Vec<Exercise>), TrainError> {
        /// The largest number up to which pairs are counted; beyond it there are enough in any case.
        const COUNTED: i64 = 300;
        if self.verbs.is_empty() {
            return Err(TrainError::setting("task.arithmetic.verbs", "none", "gets, loses or wants"));
        }
        // Exercises are counted by verb, so that one that is listed twice would promise exercises that there are not.
        if let Some(twice) = self.verbs.iter().enumerate().find(|(i, verb)| self.verbs[..*i].contains(verb)) {
            let given = format!("{} twice", twice.1.word());
            return Err(TrainError::setting("task.arithmetic.verbs", given, "each verb once"));
        }
        if self.largest > LARGEST {
            let expected = format!("at most {LARGEST}");
            return Err(TrainError::setting("task.arithmetic.largest", self.largest, &expected));
        }
        let pairs = || (1..=self.largest.min(COUNTED)).flat_map(|a| (1..=a).map(move |b| (a, b)));
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut set = |wanted: usize, field: &'static str, evaluated: bool| {
            let numbers = pairs().filter(|&(a, b)| is_evaluated(a, b) == evaluated).count();
            // Exercises are drawn until they differ, which takes few draws while at most half of all that there are is
            // wanted.
            let most = numbers * self.verbs.len() * NAMES.len() * THINGS.len() / 2;
            if wanted == 0 || wanted > most {
                let expected = format!("at least 1 and at most {most} (`largest: {}`)", self.largest);
                return Err(TrainError::setting(field, wanted, &expected));
            }
            let (mut all, mut seen) = (Vec::with_capacity(wanted), HashSet::new());
            while all.len() < wanted {
                let exercise = self.draw(&mut rng, evaluated);
                if seen.insert(exercise.question.clone()) {
                    all.push(exercise);
                }
            }
            Ok(all)
        };
        let train = set(self.train, "task.arithmetic.train", false)?;
        Ok((train, set(self.evaluate, "task.arithmetic.evaluate", true)?))
    }

    fn draw(&self, rng: &mut ChaCha8Rng, evaluated: bool) -> Exercise {
        // The two numbers are ordered, so that a difference is never negative; a pair belongs to one of the two sets by
        // its numbers.
        let (a, b) = loop {
            let (a, b) = (rng.random_range(1..=self.largest), rng.random_range(1..=self.largest));
            let (a, b) = (a.max(b), a.min(b));
            if is_evaluated(a, b) == evaluated {
                break (a, b);
            }
        };
        let name = NAMES.choose(rng).expect("not empty");
        let things = THINGS.choose(rng).expect("not empty");
        let verb = self.verbs.choose(rng).expect("checked: not empty");
        let answer = verb.answer(a, b);
        let question = format!("{name} has {a} {things} and {} {b}. How many?", verb.word());
        Exercise { question, solution: format!(" {MARKER} {answer}"), answer }
    }
}

/// Reads GSM8K's `jsonl`: a line each with `question` and `answer`, whose last line is `#### N`.
///
/// # Errors
/// [`TrainError`] naming the line that is none, or a file without any.
pub fn read_gsm8k(path: &Path) -> Result<Vec<Exercise>, TrainError> {
    #[derive(Deserialize)]
    struct Gsm8kLine {
        question: String,
        answer: String,
    }
    let text = read_regular_text(path, LONGEST).map_err(|reason| TrainError::io(path, "read", reason))?;
    let mut exercises = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let invalid = |reason: String| TrainError::file(path, format!("line {}: {reason}", i + 1));
        if line.len() > LONGEST_LINE {
            return Err(invalid(format!("got {} bytes, expected at most {LONGEST_LINE}", line.len())));
        }
        let Gsm8kLine { question, answer: solution } =
            serde_json::from_str(line).map_err(|error| invalid(error.to_string()))?;
        let Some(answer) = answer_of(&solution) else {
            return Err(invalid(format!("`answer`: got no `{MARKER} N`, expected one at its end")));
        };
        if question.trim().is_empty() {
            return Err(invalid("`question`: got nothing, expected a question".into()));
        }
        // The newline separates the solution from the question, which come as one text.
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
    fn task_exercises_are_right_different_and_seeded() {
        let verbs = vec![Verb::Gets, Verb::Loses, Verb::Wants];
        let task = ArithmeticTask { train: 200, evaluate: 50, largest: 9, verbs };
        let (train, evaluate) = task.exercises(3).unwrap();
        assert_eq!((train.len(), evaluate.len()), (200, 50));
        let numbers = |exercise: &Exercise| -> Vec<i64> {
            exercise.question.split([' ', '.']).filter_map(|word| word.parse().ok()).collect()
        };
        for exercise in train.iter().chain(&evaluate) {
            let numbers = numbers(exercise);
            let expected = match &exercise.question {
                question if question.contains("gets") => numbers[0] + numbers[1],
                question if question.contains("loses") => numbers[0] - numbers[1],
                _ => numbers[0],
            };
            assert_eq!(exercise.answer, expected, "{exercise:?}");
            assert_eq!(answer_of(&exercise.solution), Some(expected));
        }
        let trained: HashSet<Vec<i64>> = train.iter().map(numbers).collect();
        assert!(evaluate.iter().all(|one| !trained.contains(&numbers(one))), "no sum is both trained and evaluated on");
        assert_eq!(task.exercises(3).unwrap().0, train);
        assert_ne!(task.exercises(4).unwrap().0, train);
    }

    #[test]
    fn task_with_too_many_exercises_is_an_error() {
        let task = |train, evaluate| ArithmeticTask { train, evaluate, largest: 3, verbs: sum_and_difference() };
        let message = |train, evaluate| task(train, evaluate).exercises(0).unwrap_err().to_string();
        assert_eq!(
            message(200, 1),
            "`task.arithmetic.train`: got 200, expected at least 1 and at most 180 (`largest: 3`)"
        );
        assert!(message(1, 40).starts_with("`task.arithmetic.evaluate`: got 40, expected at least 1 and at most 36"));
    }

    #[test]
    fn task_answers_are_after_the_last_marker() {
        let cases = [("#### 7", Some(7)), ("so #### 1,234\n", Some(1234)), ("#### -3 or", Some(-3)), ("#### x", None)];
        for (text, answer) in cases.into_iter().chain([("7", None), ("####", None), ("#### 1 #### 2", Some(2))]) {
            assert_eq!(answer_of(text), answer, "{text}");
        }
    }
}
