//! Strangers' text in our messages.

/// The most characters of it that are shown.
const LONGEST: usize = 600;

/// `text` from a file, a compiler or another project, fit for an error message: on one line, what would drive a terminal
/// escaped, and cut after 600 characters.
pub fn one_line(text: &str) -> String {
    let mut line = String::new();
    for (at, c) in text.split_whitespace().flat_map(|word| [" ", word]).flat_map(str::chars).skip(1).enumerate() {
        if at == LONGEST {
            line.push('…');
            break;
        }
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_text_is_one_short_line_that_drives_no_terminal() {
        assert_eq!(one_line("  two\n\twords \u{1b}[2J"), "two words \\u{1b}[2J");
        assert_eq!(one_line(&"é".repeat(600)), "é".repeat(600));
        assert_eq!(one_line(&"é".repeat(601)), "é".repeat(600) + "…");
    }
}
