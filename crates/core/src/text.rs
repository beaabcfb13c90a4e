//! Text of other programs, and names that are nearly right, in error messages.

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
