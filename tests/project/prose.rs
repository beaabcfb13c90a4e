//! The project's own text: counts of what makes names and comments hard to read, none of which may rise.
//!
//! ```sh
//! cargo test --test it prose -- --nocapture                           # the table of this checkout
//! PROSE_ROOT=../other cargo test --test it prose -- --nocapture       # the table of another checkout, and how its counts differ
//! ```
//!
//! Names and comments are counted in all Rust of the workspace but tests, benches and examples; code lines, long files and the names of
//! tests in these as well.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};
use std::{env, fs};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The rules, in the order of [`ALLOWED`]'s numbers.
const RULES: [&str; 7] =
    ["openings", "short comments", "phrases", "wide lines", "repeated types", "functions `of`", "long files"];

/// The rules that no crate may have a finding of.
const FORBIDDEN: [&str; 1] = ["long test names"];

/// The findings that each crate has of each rule: they may only fall. A crate that is not listed may have none.
const ALLOWED: &[(&str, [usize; RULES.len()])] = &[
    ("algebra", [0, 0, 2, 0, 0, 0, 0]),
    ("campaign", [2, 4, 4, 0, 1, 0, 0]),
    ("core", [0, 19, 1, 0, 1, 0, 1]),
    ("fixture", [0, 1, 1, 0, 0, 0, 0]),
    ("judge", [17, 24, 5, 0, 0, 0, 0]),
    ("mosaic-interpreter", [0, 0, 1, 0, 0, 0, 0]),
    ("native", [0, 0, 3, 0, 0, 0, 0]),
    ("programs", [0, 0, 46, 19, 1, 0, 0]),
    ("ptx", [0, 1, 2, 0, 0, 0, 0]),
    ("ptx-interpreter", [0, 1, 1, 0, 0, 0, 0]),
    ("python", [0, 6, 17, 1, 4, 0, 0]),
    ("reference", [0, 1, 0, 0, 0, 0, 1]),
    ("report", [0, 1, 1, 0, 0, 0, 0]),
    ("schema", [3, 8, 2, 0, 1, 0, 0]),
    ("simd", [0, 0, 2, 0, 0, 0, 0]),
    ("src", [3, 6, 1, 1, 0, 0, 0]),
    ("suites", [1, 3, 2, 0, 0, 0, 0]),
    ("tests", [0, 0, 0, 0, 0, 0, 1]),
    ("tile", [0, 1, 2, 2, 0, 0, 0]),
    ("train", [0, 0, 11, 2, 0, 0, 0]),
];

/// Words that a doc comment must not open with: free relatives, pronouns without an antecedent, and prepositions.
const OPENINGS: [&str; 46] = [
    "what", "where", "which", "who", "whose", "whatever", "when", "why", "how", "that", "those", "this", "these",
    "its", "their", "it", "they", "them", "of", "with", "without", "by", "as", "in", "on", "for", "from", "at", "to",
    "into", "over", "under", "after", "before", "between", "within", "per", "so", "than", "because", "if", "beside",
    "behind", "beyond", "such", "like",
];

/// Two words that are no opening either.
const SAME: [&str; 2] = ["the same", "the others"];

/// Phrases that are grammatical and not technical English, from the writing guide.
const PHRASES: [&str; 17] = [
    "stands",
    "stood",
    "comes to",
    "come to",
    "hangs on",
    "anew",
    "is none",
    "are none",
    "nobody's",
    "tells apart",
    "told apart",
    "says so",
    "untold",
    "lent",
    "beside",
    "what is left",
    "waits for nothing",
];

/// The longest line of a comment, in characters.
const WIDTH: usize = 140;

/// The most words of a comment that is too short to say anything.
const SHORT: usize = 4;

/// The most lines of a file.
const LONG: usize = 700;

/// The most characters of a test's name.
const TEST_NAME: usize = 60;

/// One place in a source file.
#[derive(Clone, Debug)]
struct SourcePlace {
    file: PathBuf,
    line: usize,
    text: String,
}

/// The counts of one file or of many.
#[derive(Clone, Debug, Default)]
struct ProseCounts {
    /// Lines with code, in all files.
    code_lines: usize,
    /// Lines with code, in files whose names and comments count.
    source_lines: usize,
    comment_lines: usize,
    doc_comments: usize,
    doctests: usize,
    /// The findings of each rule.
    findings: BTreeMap<&'static str, Vec<SourcePlace>>,
    /// The definitions of each type name.
    types: BTreeMap<String, Vec<SourcePlace>>,
}

impl AddAssign for ProseCounts {
    fn add_assign(&mut self, other: Self) {
        self.code_lines += other.code_lines;
        self.source_lines += other.source_lines;
        self.comment_lines += other.comment_lines;
        self.doc_comments += other.doc_comments;
        self.doctests += other.doctests;
        for (rule, places) in other.findings {
            self.findings.entry(rule).or_default().extend(places);
        }
        for (name, places) in other.types {
            self.types.entry(name).or_default().extend(places);
        }
    }
}

impl ProseCounts {
    fn found(&self, rule: &str) -> usize {
        self.findings.get(rule).map_or(0, Vec::len)
    }
}

/// One doc comment: the line that it begins on, and its text without the slashes.
struct DocComment {
    line: usize,
    text: String,
}

/// A Rust file as the counts need it.
struct SourceFile {
    /// For each line, whether a token is on it that is no comment.
    is_code: Vec<bool>,
    lines: Vec<String>,
    tokens: TokenStream,
}

impl SourceFile {
    fn parse(text: &str) -> Self {
        let tokens: TokenStream = text.parse().expect("a Rust file");
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        // The lexer turns a doc comment into an attribute, whose tokens have the comment's place.
        let is_comment: Vec<bool> = lines.iter().map(|line| line.trim_start().starts_with("//")).collect();
        let mut is_code = vec![false; lines.len()];
        mark(&tokens, &mut |first, last| {
            if !is_comment[first - 1] {
                is_code[first - 1..last].fill(true);
            }
        });
        Self { is_code, lines, tokens }
    }

    /// The doc comments in front of items, `///`, in their order; those of modules, `//!`, have no item to name.
    fn doc_comments(&self) -> Vec<DocComment> {
        let mut comments: Vec<DocComment> = Vec::new();
        let mut previous = None;
        for (index, line) in self.lines.iter().enumerate() {
            let Some(text) = line.trim_start().strip_prefix("///").filter(|_| !self.is_code[index]) else { continue };
            match comments.last_mut().filter(|_| previous == Some(index.wrapping_sub(1))) {
                Some(comment) => {
                    *comment = DocComment { text: format!("{}\n{}", comment.text, text.trim()), ..*comment }
                }
                None => comments.push(DocComment { line: index + 1, text: text.trim().into() }),
            }
            previous = Some(index);
        }
        comments
    }

    /// The lines of comments, doc comments among them where `docs`.
    fn comments(&self, docs: bool) -> impl Iterator<Item = (usize, &str)> {
        let is_doc = |text: &str| text.starts_with("///") || text.starts_with("//!");
        let lines = self.lines.iter().enumerate().map(|(index, line)| (index, line.trim_start()));
        lines.filter(move |(index, text)| text.starts_with("//") && !self.is_code[*index] && (docs || !is_doc(text)))
    }
}

/// Calls `on_lines` with the first and the last line of every token, counted from 1.
fn mark(tokens: &TokenStream, on_lines: &mut impl FnMut(usize, usize)) {
    for token in tokens.clone() {
        if let TokenTree::Group(group) = &token {
            for span in [group.span_open(), group.span_close()] {
                let line = span.start().line;
                on_lines(line, line);
            }
            mark(&group.stream(), on_lines);
        } else {
            let span = token.span();
            on_lines(span.start().line, span.end().line);
        }
    }
}

/// Adds the types and functions that `tokens` define; `associated` where they are the items of an `impl` or a `trait`.
fn definitions(tokens: TokenStream, associated: bool, defined: &mut Vec<(&'static str, String, usize)>) {
    // Between `impl` or `trait` and its items; between `fn` and its body, where `impl` is a type.
    let (mut within, mut signature) = (false, false);
    let mut keyword: Option<&'static str> = None;
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                if let Some(kind) = keyword.take() {
                    defined.push((kind, name, ident.span().start().line));
                    continue;
                }
                keyword = match name.as_str() {
                    "struct" | "enum" | "union" => Some("type"),
                    "trait" => {
                        within = true;
                        Some("type")
                    }
                    "type" if !associated => Some("type"),
                    "fn" => {
                        signature = true;
                        Some("fn")
                    }
                    "impl" => {
                        within |= !signature;
                        None
                    }
                    _ => None,
                };
            }
            TokenTree::Group(group) => {
                keyword = None;
                let items = group.delimiter() == Delimiter::Brace && within;
                definitions(group.stream(), items, defined);
                if group.delimiter() == Delimiter::Brace {
                    (within, signature) = (false, false);
                }
            }
            TokenTree::Punct(punct) if punct.as_char() == ';' => (within, signature) = (false, false),
            _ => keyword = None,
        }
    }
}

/// A test function: its name after those of the modules around it in the file, and the line of its name.
#[derive(Debug, PartialEq)]
pub(super) struct TestFunction {
    pub(super) module: String,
    pub(super) name: String,
    line: usize,
}

/// The functions in `text`, a Rust file, that have the attribute `#[test]`, in macros such as `proptest!` too.
pub(super) fn test_functions(text: &str) -> Vec<TestFunction> {
    let mut tests = Vec::new();
    add_tests(text.parse().expect("a Rust file"), "", &mut tests);
    tests
}

/// Adds the tests among `tokens`, the items of `module`.
fn add_tests(tokens: TokenStream, module: &str, tests: &mut Vec<TestFunction>) {
    let is_test = |stream: TokenStream| {
        let mut attribute = stream.into_iter();
        matches!(attribute.next(), Some(TokenTree::Ident(ident)) if ident == "test") && attribute.next().is_none()
    };
    // Between `#[test]` and its function; between `mod` and its items.
    let (mut marked, mut inner) = (false, None);
    let mut keyword = String::new();
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                match keyword.as_str() {
                    "fn" if marked => {
                        let line = ident.span().start().line;
                        tests.push(TestFunction { module: module.into(), name: name.clone(), line });
                        marked = false;
                    }
                    "mod" => inner = Some(format!("{module}{name}::")),
                    _ => {}
                }
                keyword = name;
            }
            TokenTree::Group(group) => {
                if group.delimiter() == Delimiter::Bracket && is_test(group.stream()) {
                    marked = true;
                } else {
                    let inner = if group.delimiter() == Delimiter::Brace { inner.take() } else { None };
                    add_tests(group.stream(), inner.as_deref().unwrap_or(module), tests);
                }
                keyword.clear();
            }
            TokenTree::Punct(punct) => {
                if punct.as_char() == ';' {
                    inner = None;
                }
                keyword.clear();
            }
            TokenTree::Literal(_) => keyword.clear(),
        }
    }
}

/// The text of a doc comment without the marks of code and links.
fn plain(text: &str) -> String {
    text.replace(['`', '[', ']', '*'], "").to_lowercase()
}

/// Whether `text` has `phrase`, as whole words.
fn has_phrase(text: &str, phrase: &str) -> bool {
    text.match_indices(phrase).any(|(at, _)| {
        let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        !text[..at].ends_with(is_word) && !text[at + phrase.len()..].starts_with(is_word)
    })
}

/// The counts of the file `path`, whose names and comments count where `is_source`.
fn counts_of_file(path: &Path, text: &str, is_source: bool) -> ProseCounts {
    let file = SourceFile::parse(text);
    let place =
        |line: usize, text: &str| SourcePlace { file: path.into(), line, text: text.chars().take(80).collect() };
    let code_lines = file.is_code.iter().filter(|&&code| code).count();
    let mut counts = ProseCounts { code_lines, ..ProseCounts::default() };
    let mut found = |rule: &'static str, place: SourcePlace| counts.findings.entry(rule).or_default().push(place);

    if file.lines.len() > LONG {
        found("long files", place(1, &format!("{} lines", file.lines.len())));
    }
    for test in test_functions(text).into_iter().filter(|test| test.name.len() > TEST_NAME) {
        found("long test names", place(test.line, &format!("{} characters: {}", test.name.len(), test.name)));
    }
    if !is_source {
        return counts;
    }
    for comment in file.doc_comments() {
        let text = plain(&comment.text);
        let words: Vec<&str> = text.split_whitespace().collect();
        let first = words.first().map_or("", |word| word.trim_end_matches(|c: char| !c.is_alphanumeric()));
        if OPENINGS.contains(&first) || SAME.iter().any(|same| text.starts_with(same)) {
            found("openings", place(comment.line, &comment.text));
        }
        if words.len() <= SHORT {
            found("short comments", place(comment.line, &comment.text));
        }
        counts.doc_comments += 1;
    }
    counts.source_lines = code_lines;
    for (index, text) in file.comments(true) {
        if file.lines[index].chars().count() > WIDTH {
            found("wide lines", place(index + 1, text));
        }
        let lower = text.to_lowercase();
        for phrase in PHRASES.iter().filter(|phrase| has_phrase(&lower, phrase)) {
            found("phrases", place(index + 1, &format!("{phrase}: {text}")));
        }
    }
    // An example opens and closes a block; `text`, `sh` and what is ignored are no Rust.
    let fences = file.comments(true).filter_map(|(_, text)| text.get(3..)?.trim().strip_prefix("```"));
    let mut open = false;
    for language in fences {
        if !open && ["", "no_run", "should_panic", "rust"].contains(&language) {
            counts.doctests += 1;
        }
        open = !open;
    }
    counts.comment_lines = file.comments(false).count();
    let mut defined = Vec::new();
    definitions(file.tokens.clone(), false, &mut defined);
    for (kind, name, line) in defined {
        if kind == "type" {
            counts.types.entry(name.clone()).or_default().push(place(line, &name));
        } else if name == "of" || name.starts_with("of_") {
            found("functions `of`", place(line, &name));
        }
    }
    counts
}

/// Whether the names and comments of the file at `path`, relative to the root, count.
fn is_source(path: &Path) -> bool {
    let mut parts = path.iter().map(|part| part.to_str().unwrap());
    match parts.next() {
        Some("src") => true,
        Some("python") => parts.next() == Some("src"),
        Some("crates") => parts.nth(1) == Some("src"),
        _ => false,
    }
}

/// The crate that the file at `path` belongs to, as its folder.
fn crate_of(path: &Path) -> String {
    let mut parts = path.iter().map(|part| part.to_str().unwrap());
    match (parts.next(), parts.next()) {
        (Some("crates"), Some(name)) => name.into(),
        (Some(folder), _) => folder.into(),
        _ => String::new(),
    }
}

/// Adds the Rust files below `folder` to `files`.
pub(super) fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        let name = entry.file_name();
        let is_ours = !name.to_str().unwrap().starts_with('.') && name != "target" && name != "node_modules";
        if entry.file_type().unwrap().is_dir() && is_ours {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The counts of each crate of the checkout at `root`, repeated type names among the findings.
fn counts_of_checkout(root: &Path) -> BTreeMap<String, ProseCounts> {
    let mut files = Vec::new();
    rust_files(root, &mut files);
    let mut crates: BTreeMap<String, ProseCounts> = BTreeMap::new();
    for file in files {
        let path = file.strip_prefix(root).unwrap();
        let counts = counts_of_file(path, &fs::read_to_string(&file).unwrap(), is_source(path));
        *crates.entry(crate_of(path)).or_default() += counts;
    }
    let mut types = BTreeMap::<String, Vec<SourcePlace>>::new();
    for counts in crates.values() {
        for (name, places) in &counts.types {
            types.entry(name.clone()).or_default().extend(places.iter().cloned());
        }
    }
    for place in types.into_values().filter(|places| places.len() > 1).flatten() {
        let counts = crates.get_mut(&crate_of(&place.file)).unwrap();
        counts.findings.entry("repeated types").or_default().push(place);
    }
    crates
}

/// The counts of the whole checkout as the lines of a table.
fn table(crates: &BTreeMap<String, ProseCounts>, root: &Path) -> String {
    let mut all = ProseCounts::default();
    crates.values().cloned().for_each(|counts| all += counts);
    let of_comments = |rule: &str| 100.0 * all.found(rule) as f64 / all.doc_comments as f64;
    let repeated = all.types.values().filter(|places| places.len() > 1).count();
    let source_lines: usize = crates.values().map(|counts| counts.source_lines).sum();
    let folders = fs::read_dir(root.join("crates")).unwrap().count();
    let rows = [
        ("doc comments", all.doc_comments.to_string()),
        ("doc comments that open with what, where, of, its, …", format!("{:.1} %", of_comments("openings"))),
        ("doc comments of four words or fewer", format!("{:.1} %", of_comments("short comments"))),
        ("type names", all.types.len().to_string()),
        ("type names defined more than once", format!("{:.1} %", 100.0 * repeated as f64 / all.types.len() as f64)),
        ("functions `of`, `of_*`", all.found("functions `of`").to_string()),
        (
            "comment lines per 100 lines of code",
            format!("{:.1}", 100.0 * all.comment_lines as f64 / source_lines as f64),
        ),
        ("examples in doc comments", all.doctests.to_string()),
        ("phrases of the guide's list", all.found("phrases").to_string()),
        ("comment lines over the width", all.found("wide lines").to_string()),
        ("files over 700 lines", all.found("long files").to_string()),
        ("tests named in over 60 characters", all.found("long test names").to_string()),
        ("Rust code lines", all.code_lines.to_string()),
        ("folders of `crates`", folders.to_string()),
    ];
    rows.into_iter().fold(String::new(), |mut text, (name, value)| {
        writeln!(text, "{name:<55} {value:>8}").unwrap();
        text
    })
}

/// The difference from `allowed`: the findings of a crate that has more of a rule than it may, and the row of one that has fewer.
fn differences(crates: &BTreeMap<String, ProseCounts>, allowed: &[(&str, [usize; RULES.len()])]) -> String {
    let mut text = String::new();
    for (name, counts) in crates {
        let limits = allowed.iter().find(|row| row.0 == name).map_or([0; RULES.len()], |row| row.1);
        let found = RULES.map(|rule| counts.found(rule));
        let forbidden = FORBIDDEN.map(|rule| ((rule, counts.found(rule)), 0));
        for ((rule, count), limit) in RULES.into_iter().zip(found).zip(limits).chain(forbidden) {
            if count > limit {
                writeln!(text, "{name}: {count} {rule}, allowed {limit}:").unwrap();
                for place in counts.findings.get(rule).into_iter().flatten() {
                    let line = place.text.replace('\n', " ");
                    writeln!(text, "  {}:{}: {line}", place.file.display(), place.line).unwrap();
                }
            }
        }
        if found.iter().zip(&limits).any(|(count, limit)| count < limit) {
            writeln!(text, "{name}: fewer than allowed, its row is now (\"{name}\", {found:?})").unwrap();
        }
    }
    text
}

#[test]
fn prose_counts_are_those_allowed() {
    let root = env::var_os("PROSE_ROOT").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let crates = counts_of_checkout(&root);
    print!("{}", table(&crates, &root));
    let differences = differences(&crates, ALLOWED);
    assert!(differences.is_empty(), "\n{differences}");
}

#[test]
fn prose_of_a_file_is_counted_by_rule() {
    let text = "\
//! What a module opens with is not counted.
/// What it is.
struct Row;
/// Returns the sum of all columns,
/// in f64.
///
/// ```
/// assert!(true);
/// ```
fn of_row(text: &str) -> impl Iterator<Item = u8> {
    // A comment that stands alone.
    type Local = u8; // at the end of a line of code
    let _ = \"
// not a comment
\";
}
impl Iterator for Row {
    type Item = u8;
}
";
    let counts = counts_of_file(Path::new("crates/x/src/a.rs"), text, true);
    let lines = |rule: &str| -> Vec<usize> { counts.findings[rule].iter().map(|place| place.line).collect() };
    assert_eq!((lines("openings"), lines("short comments"), lines("functions `of`")), (vec![2], vec![2], vec![10]));
    assert_eq!(lines("phrases"), [11]);
    assert_eq!((counts.doc_comments, counts.doctests, counts.comment_lines, counts.code_lines), (2, 1, 1, 10));
    assert_eq!(counts.types.keys().collect::<Vec<_>>(), ["Local", "Row"]);

    let crates = BTreeMap::from([("x".to_owned(), counts)]);
    let text = differences(&crates, &[("x", [2, 1, 0, 0, 0, 1, 0])]);
    assert_eq!(
        text,
        "x: 1 phrases, allowed 0:\n  crates/x/src/a.rs:11: stands: // A comment that stands alone.\n\
         x: fewer than allowed, its row is now (\"x\", [1, 1, 1, 0, 0, 1, 0])\n"
    );
    assert!(!has_phrase("understands", "stands") && has_phrase("it stands.", "stands"));
}

#[test]
fn prose_long_test_names_are_found_in_modules_and_macros() {
    let name = "x".repeat(TEST_NAME);
    let text = format!(
        "#[test]\nfn {name}() {{}}\nfn {name}_helper() {{}}\nproptest! {{\n#[test]\nfn {name}_a(n in 0..3) {{}}\n}}\n\
         #[cfg(test)]\nmod outer;\nmod inner {{\n#[test]\n#[should_panic(expected = \"b\")]\nfn {name}_b() {{ fn inside() {{}} }}\n}}\n"
    );
    let found = test_functions(&text).into_iter().map(|test| (test.module, test.name, test.line)).collect::<Vec<_>>();
    let expected = [("", "", 2), ("", "_a", 6), ("inner::", "_b", 13)];
    assert_eq!(found, expected.map(|(module, end, line)| (module.into(), format!("{name}{end}"), line)));

    let crates = BTreeMap::from([("x".to_owned(), counts_of_file(Path::new("crates/x/tests/a.rs"), &text, false))]);
    let text = differences(&crates, &[]);
    assert!(text.starts_with("x: 2 long test names, allowed 0:\n  crates/x/tests/a.rs:6: 62 characters: xx"), "{text}");
}
