//! The reward of the recorded fixtures: an arithmetic answer, its form, and an end.

/// 1 if the last number of `text` is `answer`, and ¼ each for a text that starts with `#### <number>` and for one that
/// ended by itself.
pub(super) fn score(text: &str, ended: bool, answer: Option<f64>) -> f64 {
    let numbers = numbers(text);
    let right = answer.is_some() && numbers.last().copied() == answer;
    let formed =
        text.strip_prefix("#### ").is_some_and(|rest| rest.starts_with(|c: char| c == '-' || c.is_ascii_digit()));
    let formed = formed && !numbers.is_empty();
    f64::from(u8::from(right)) + 0.25 * f64::from(u8::from(formed)) + 0.25 * f64::from(u8::from(ended))
}

/// The decimal numbers in `text`, commas between digits left out.
pub(super) fn numbers(text: &str) -> Vec<f64> {
    let mut numbers = Vec::new();
    let mut current = String::new();
    // The added space closes a number that ends with the text.
    for c in text.chars().chain([' ']) {
        match c {
            '0'..='9' => current.push(c),
            ',' if ends_in_digit(&current) => {}
            '.' if ends_in_digit(&current) && !current.contains('.') => current.push(c),
            _ => {
                // A full stop after a number ends the sentence.
                numbers.extend(current.trim_end_matches('.').parse::<f64>());
                current.clear();
                if c == '-' {
                    current.push(c);
                }
            }
        }
    }
    numbers
}

fn ends_in_digit(text: &str) -> bool {
    text.ends_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reward_numbers_are_read_as_people_write_them() {
        assert_eq!(numbers("1,234 and -5.50. Then 7,"), [1234.0, -5.5, 7.0]);
        assert_eq!(numbers("no - number."), [] as [f64; 0]);
    }

    #[test]
    fn reward_of_recorded_completions_is_that_recorded() {
        // `completions_text`, `ended_by_itself` and `rewards` of fixtures/qwen_gsm8k.safetensors, whose answer is 400.
        let recorded = [
            ("#### 3000<|im_end|>", true, 0.5),
            ("#### 35.00<|im_end|>", true, 0.5),
            ("### Explanation:\nJack collects some seawater in an old bucket and realizes it's", false, 0.0),
            ("#### 400<|im_end|>", true, 1.5),
        ];
        for (text, ended, reward) in recorded {
            assert_eq!(score(text, ended, Some(400.0)), reward, "{text}");
        }
        assert_eq!(score("400", true, None), 0.25, "without an answer nothing is right");
    }
}
