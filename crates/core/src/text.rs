//! Text of other programs, and names that are nearly right, in error messages; commands that can be pasted into a shell.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The largest number of characters that a message quotes.
const LONGEST: usize = 300;

/// The largest number of characters of several lines, or of a list, that a message quotes.
const LONGEST_LINES: usize = 10_000;

/// The most digits of a number that a message quotes.
const MOST_DIGITS: usize = 40;
const FIRST_LEFT_OUT: usize = MOST_DIGITS + 1;

/// A name or value that nobody vouches for: from a file, a compiler, another process or another project.
///
/// It is shown on one line, without characters that drive a terminal, and cut after 300 characters, or as many as the precision of the
/// format. [`raw`](Self::raw) is the text itself.
///
/// ```
/// use assay_core::text::ForeignText;
///
/// let name = ForeignText::from("logits\u{1b}[2J\n  PASS");
/// assert_eq!(name.to_string(), r"logits\u{1b}[2J PASS");
/// assert_eq!(ForeignText::from("9".repeat(300)).to_string(), "9".repeat(40) + "…");
/// ```
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ForeignText(String);

impl ForeignText {
    /// Returns the text as it was given, which is not to be shown.
    pub fn raw(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for ForeignText {
    fn from(text: T) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for ForeignText {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (mut line, mut digits, longest) = (String::new(), 0, f.precision().unwrap_or(LONGEST));
        // Words are joined by one blank, whatever white space was between them.
        for c in self.0.split_whitespace().flat_map(|word| [" ", word]).skip(1).flat_map(str::chars) {
            digits = if c.is_ascii_digit() { digits + 1 } else { 0 };
            match digits {
                0..=MOST_DIGITS => push_shown(&mut line, c),
                FIRST_LEFT_OUT => line.push('…'),
                _ => continue,
            }
            // Cut at a character and not at a byte.
            if let Some((end, _)) = line.char_indices().nth(longest) {
                line.truncate(end);
                line.push('…');
                break;
            }
        }
        if f.precision().is_some() { f.write_str(&line) } else { f.pad(&line) }
    }
}

impl fmt::Debug for ForeignText {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Lines that nobody vouches for, or that quote such text: shown without characters that drive a terminal, and cut after 10,000
/// characters.
///
/// ```
/// use assay_core::text::ForeignLines;
///
/// assert_eq!(ForeignLines::from("one\r\ntwo\u{9b}2J").to_string(), "one\ntwo\\u{9b}2J");
/// assert_eq!(ForeignLines::from("x".repeat(100_000)).to_string(), "x".repeat(10_000) + "…");
/// ```
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ForeignLines(String);

impl ForeignLines {
    /// Returns the lines as they were given, which are not to be shown.
    pub fn raw(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for ForeignLines {
    fn from(text: T) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for ForeignLines {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let shown = shown_lines(&self.0);
        // Cut at a character and not at a byte.
        match shown.char_indices().nth(LONGEST_LINES) {
            Some((end, _)) => write!(f, "{}…", &shown[..end]),
            None => f.write_str(&shown),
        }
    }
}

impl fmt::Debug for ForeignLines {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// A path in a message or a report: shown without characters that drive a terminal, as a file may have any name.
///
/// ```
/// use assay_core::text::ShownPath;
/// use std::path::Path;
///
/// assert_eq!(ShownPath(Path::new("a\u{1b}[31m b")).to_string(), r"a\u{1b}[31m b");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShownPath<P = PathBuf>(pub P);

impl<T: Into<PathBuf>> From<T> for ShownPath {
    fn from(path: T) -> Self {
        Self(path.into())
    }
}

impl<P: AsRef<Path>> fmt::Display for ShownPath<P> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut shown = String::new();
        self.0.as_ref().to_string_lossy().chars().for_each(|c| push_shown(&mut shown, c));
        f.pad(&shown)
    }
}

/// A number in a message, with its exponent where it would have many digits.
///
/// ```
/// use assay_core::text::ShownNumber;
///
/// assert_eq!([ShownNumber(0.25), ShownNumber(-1e300), ShownNumber(5e-324)].map(|x| x.to_string()), ["0.25", "-1e300", "5e-324"]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShownNumber(pub f64);

impl fmt::Display for ShownNumber {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let magnitude = self.0.abs();
        let is_short = magnitude == 0.0 || !magnitude.is_finite() || (1e-6..1e16).contains(&magnitude);
        if is_short { self.0.fmt(f) } else { fmt::LowerExp::fmt(&self.0, f) }
    }
}

/// Returns `text` with every character that drives a terminal escaped, but line breaks and tabs.
pub fn shown_lines(text: &str) -> Cow<'_, str> {
    let is_kept = |c: char| c == '\n' || c == '\t' || !drives_terminal(c);
    if text.chars().all(is_kept) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::new();
    for c in text.replace("\r\n", "\n").chars() {
        if is_kept(c) { shown.push(c) } else { push_shown(&mut shown, c) }
    }
    Cow::Owned(shown)
}

/// Appends `c`, or its escape if it drives a terminal.
fn push_shown(shown: &mut String, c: char) {
    if drives_terminal(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
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

/// Whether `c` changes what a terminal shows besides itself: a control character, a separator of lines, or one that turns the direction
/// of writing.
pub fn drives_terminal(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
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

/// Escapes what Markdown would take for its own: the text is a stranger's.
///
/// ```
/// # use assay_core::text::markdown_escaped;
/// assert_eq!(markdown_escaped("a|<b>\n`c`\u{1b}"), "a\\|&lt;b&gt; \\`c\\`");
/// ```
pub fn markdown_escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.trim_end().chars() {
        match c {
            '\n' | '\r' => escaped.push(' '),
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '#' | '~' | '!' => escaped.extend(['\\', c]),
            c if drives_terminal(c) => {}
            c => escaped.push(c),
        }
    }
    escaped
}
