//! Tables that a command puts between their marks in a document, so that no figure there is copied by hand.

use std::fs;
use std::path::Path;

use super::CliError;

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
        return Err(CliError::Usage(format!("--into: got {bytes} bytes, expected a document of up to {LONGEST}")));
    }
    let mut document = fs::read_to_string(path).map_err(|reason| io("read", reason))?;
    for (marks, text) in texts {
        document = between(&document, marks, text).ok_or_else(|| {
            let (given, [start, end]) = (path.display(), marks);
            CliError::Usage(format!("--into: got {given}, expected a document with the lines `{start}` and `{end}`"))
        })?;
    }
    crate::fixture::persist(path, |file| file.write_all(document.as_bytes())).map_err(|reason| io("write", reason))
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
