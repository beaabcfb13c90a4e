//! Strangers' text in our messages.

/// The most characters of it that are shown.
const LONGEST: usize = 300;

/// `text` from a file, a compiler or another project, fit for an error message: on one line, what would drive a terminal
/// escaped, and cut after 300 characters.
pub fn one_line(text: &str) -> String {
    let mut line = String::new();
    for c in text.split_whitespace().flat_map(|word| [" ", word]).skip(1).flat_map(str::chars) {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
        if let Some((end, _)) = line.char_indices().nth(LONGEST) {
            line.truncate(end);
            line.push('…');
            break;
        }
    }
    line
}
