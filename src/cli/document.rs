//! Tables that a command puts between their marks in a document, so that no figure there is copied by hand.

use std::fs;
use std::path::Path;

use super::CliError;
use crate::files::read_named_text;
use crate::text::ShownPath;

/// The largest size of a document, in bytes.
const LONGEST: u64 = 1 << 20;

/// The lines that stand around what is put in.
pub(super) type Marks = [&'static str; 2];

/// Puts each text between its marks in the document `path`, which is written whole or not at all.
///
/// # Errors
/// [`CliError`], naming the marks that the document lacks, or what could not be read or written.
pub(super) fn put_into<'t>(path: &Path, texts: impl IntoIterator<Item = (Marks, &'t str)>) -> Result<(), CliError> {
    let io = |action, reason| CliError::Io { path: path.into(), action, reason };
    // The document is read whole, so that its size is limited first.
    let bytes = fs::metadata(path).map_err(|reason| io("read", reason))?.len();
    if bytes > LONGEST {
        return Err(CliError::Usage(
            format!("--into: got {} of {bytes} bytes, expected a document of up to {LONGEST}", ShownPath(&path)).into(),
        ));
    }
    // A device has a size of 0 and no end.
    let mut document = read_named_text(path, LONGEST).map_err(|reason| io("read", reason))?;
    for (marks, text) in texts {
        document = between(&document, marks, text).ok_or_else(|| {
            let (given, [start, end]) = (ShownPath(&path), marks);
            CliError::Usage(
                format!("--into: got {given}, expected a document with the lines `{start}` and `{end}`").into(),
            )
        })?;
    }
    crate::fixture::persist(path, |file| file.write_all(document.as_bytes())).map_err(|reason| io("write", reason))
}

/// Puts `summary` between the marks of the document `path`, and the whole of the tables in `whole` as CSV into the file `NAME.csv` of
/// the folder `data` next to it: a table of more than 25 rows is data.
///
/// # Errors
/// [`CliError`], as [`put_into`], or naming the data file.
pub(super) fn put_with_data(path: &Path, marks: Marks, name: &str, whole: &str, summary: &str) -> Result<(), CliError> {
    let data = path.parent().unwrap_or(Path::new("")).join("data");
    let file = data.join(format!("{name}.csv"));
    let io = |reason| CliError::Io { path: file.clone().into(), action: "write", reason };
    fs::create_dir_all(&data).map_err(io)?;
    put_into(path, [(marks, format!("{summary}\nAll of it: [{name}.csv](data/{name}.csv).\n\n").as_str())])?;
    crate::fixture::persist(&file, |file| file.write_all(csv(whole).as_bytes())).map_err(io)
}

/// Returns the tables of a text in Markdown as one of CSV. Where tables are under headings of the third level, these are the first column.
fn csv(markdown: &str) -> String {
    let titled = markdown.lines().any(|line| line.starts_with("### "));
    let (mut text, mut title, mut within, mut columns) = (String::new(), "", false, 0);
    for line in markdown.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            title = heading;
        }
        let Some(cells) = line.strip_prefix("| ").and_then(|line| line.strip_suffix(" |")) else {
            // The rule below a table's head is no row, and the table goes on behind it.
            within = within && line.starts_with("|---");
            continue;
        };
        // A table before the first heading is not one of those under headings, and the heads of all are the same.
        let is_head = !std::mem::replace(&mut within, true);
        if (titled && title.is_empty()) || (is_head && columns > 0) {
            continue;
        }
        let kind = if is_head { "kind" } else { title };
        let cells = cells.replace("<br>", " ").replace("**", "").replace('`', "");
        let cells = titled.then_some(kind).into_iter().chain(cells.split(" | "));
        let mut cells: Vec<String> = cells.map(|cell| quoted(cell.trim())).collect();
        // A later table may lack the last columns.
        columns = columns.max(cells.len());
        cells.resize(columns, String::new());
        text += &(cells.join(",") + "\n");
    }
    text
}

/// Returns a cell as CSV has it.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.into() }
}

/// `document` with `text`, whole lines, between its marks; `None` where one of them is missing.
fn between(document: &str, [start, end]: Marks, text: &str) -> Option<String> {
    let (before, rest) = document.split_once(start)?;
    let (_, after) = rest.split_once(end)?;
    Some(format!("{before}{start}\n{text}{end}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKS: Marks = ["<!-- start -->", "<!-- end -->"];

    #[test]
    fn document_text_between_marks_alone_is_replaced() {
        let once = between("before\n<!-- start -->\nold\n<!-- end -->\nafter\n", MARKS, "| new |\n").unwrap();
        assert_eq!(once, "before\n<!-- start -->\n| new |\n<!-- end -->\nafter\n");
        assert_eq!(between(&once, MARKS, "| new |\n").unwrap(), once);
    }

    #[test]
    fn document_table_with_data_is_summary_and_csv() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("document.md");
        fs::write(&path, "<!-- start -->\n<!-- end -->\n").unwrap();
        let whole = "| of | all |\n|---|---|\n| 1 | 2 |\n\n### First\n\n| name | does |\n|---|--:|\n| `a` | **x**, y |\n\n\
                     ### Second\n\n| name | does |\n|---|--:|\n| b | \"z\" |\n";
        put_with_data(&path, MARKS, "things", whole, "| sum |\n").unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("<!-- start -->\n| sum |\n\nAll of it: [things.csv](data/things.csv)."), "{text}");
        let data = fs::read_to_string(folder.path().join("data/things.csv")).unwrap();
        assert_eq!(data, "kind,name,does\nFirst,a,\"x, y\"\nSecond,b,\"\"\"z\"\"\"\n");
        assert_eq!(csv("| a | b |\n|---|---|\n| 1 |  |\n"), "a,b\n1,\n");
    }

    #[test]
    fn document_without_both_marks_is_refused_and_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("document.md");
        for text in ["", "<!-- start -->\n", "<!-- end -->\n", "<!-- end -->\n<!-- start -->\n"] {
            fs::write(&path, text).unwrap();
            let error = put_into(&path, [(MARKS, "| new |\n")]).expect_err("refused").to_string();
            assert!(error.contains("`<!-- start -->` and `<!-- end -->`"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }
}
