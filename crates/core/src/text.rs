//! Text of other programs, and names that are nearly right, in error messages; commands that can be pasted into a shell.

use std::ffi::OsStr;
use std::path::Path;

/// The largest number of characters that a message quotes.
const LONGEST: usize = 300;

/// Makes `text` from a file, a compiler or another project fit for an error message: on one line, with control
/// characters escaped, and cut after 300 characters.
pub fn one_line(text: &str) -> String {
    let mut line = String::new();
    // Words are joined by one blank, whatever white space was between them.
    for c in text.split_whitespace().flat_map(|word| [" ", word]).skip(1).flat_map(str::chars) {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
        // Cut at a character and not at a byte.
        if let Some((end, _)) = line.char_indices().nth(LONGEST) {
            line.truncate(end);
            line.push('…');
            break;
        }
    }
    line
}

/// Returns `word` as a shell reads it: in single quotes where it has a character with a meaning to the shell, and in `$'…'`, which bash and
/// zsh read, where it has bytes that a terminal cannot show.
///
/// ```
/// use assay_core::text::shell_word;
///
/// assert_eq!(shell_word("a/b.json"), "a/b.json");
/// assert_eq!(shell_word("it's $HOME"), r"'it'\''s $HOME'");
/// assert_eq!(shell_word("\u{1b}[2J"), r"$'\x1b[2J'");
/// ```
pub fn shell_word(word: impl AsRef<OsStr>) -> String {
    // These characters mean nothing to a shell.
    let is_plain = |c: char| c.is_alphanumeric() || "-_./:=,+@%^".contains(c);
    let word = word.as_ref();
    match word.to_str() {
        Some(text) if !text.is_empty() && text.chars().all(is_plain) => text.into(),
        // A quote within quotes ends and reopens them.
        Some(text) if !text.chars().any(drives_terminal) => format!("'{}'", text.replace('\'', r"'\''")),
        _ => {
            let mut quoted = String::from("$'");
            for &byte in word.as_encoded_bytes() {
                match byte {
                    b'\'' | b'\\' => quoted.extend(['\\', char::from(byte)]),
                    b' '..=b'~' => quoted.push(char::from(byte)),
                    _ => quoted += &format!("\\x{byte:02x}"),
                }
            }
            quoted + "'"
        }
    }
}

/// Returns ` --option value` for a shell, or ` --option=value` where the value begins like an option.
pub fn shell_option(option: &str, value: impl AsRef<OsStr>) -> String {
    let value = value.as_ref();
    let between = if value.as_encoded_bytes().starts_with(b"-") { '=' } else { ' ' };
    format!(" {option}{between}{}", shell_word(value))
}

/// Returns a path for a shell, as an argument that is no option.
pub fn shell_path(path: &Path) -> String {
    if path.as_os_str().as_encoded_bytes().starts_with(b"-") {
        return shell_word(Path::new(".").join(path));
    }
    shell_word(path)
}

/// Whether `c` changes what a terminal shows besides itself: a control character, or one that turns the direction of writing.
fn drives_terminal(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns the one of `names` that `given` is most likely meant to be: at most a third of its letters, or one, differ.
pub fn nearest<'n>(given: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let most = (given.chars().count() / 3).max(1);
    let near = names.into_iter().map(|name| (edits(given, name), name)).filter(|(edits, _)| *edits <= most);
    near.min().map(|(_, name)| name)
}

/// Counts the letters that must be inserted, deleted or replaced to turn one word into the other, and the neighbours
/// that must be swapped (the "optimal string alignment" distance).
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // `rows[i][j]` is the distance between the first `i` letters of `a` and the first `j` of `b`.
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 0..a.len() {
        let mut row = vec![i + 1];
        for j in 0..b.len() {
            let exchanged = rows[i][j] + usize::from(a[i] != b[j]);
            let mut least = exchanged.min(row[j] + 1).min(rows[i][j + 1] + 1);
            // Two neighbours that are swapped count once.
            if i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j] {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}
