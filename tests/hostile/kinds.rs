//! The kinds of bad files, for each format, made from a valid one.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::sandbox::Content;

/// Text that moves a terminal's cursor, sets its title, and turns the direction of writing.
pub(super) const ESCAPES: &str = "\u{1b}]0;pwned\u{7}\u{1b}[2J\u{9b}31m\u{202e}\u{2066}\u{8}";

/// A text that is replaced by a number which JSON's own type cannot hold.
const NUMBER: &str = "@number@";

/// The number of tensors of a file that become bad ones: a checkpoint has many alike.
const MOST_TENSORS: usize = 6;

/// The format of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Yaml,
    Toml,
    Json,
    /// A JSON object a line.
    Lines,
    Safetensors,
    Gguf,
    /// Text of no format that is read here.
    Text,
    /// A shared library.
    Library,
}

/// One bad file.
pub(super) struct Bad {
    /// The column of the table.
    pub(super) kind: &'static str,
    pub(super) name: String,
    pub(super) content: Content,
    /// Whether no reader may take it.
    pub(super) refused: bool,
}

fn bad(kind: &'static str, name: impl Into<String>, content: Content, refused: bool) -> Bad {
    Bad { kind, name: name.into(), content, refused }
}

/// Files that are no regular file, or regular ones whose bytes have nothing to do with the format.
pub(super) fn foreign(valid: &[u8], format: Format) -> Vec<Bad> {
    let is_lenient = matches!(format, Format::Text | Format::Library);
    let text = !matches!(format, Format::Safetensors | Format::Gguf | Format::Library);
    let noise: Vec<u8> = (0..4096_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let half = &valid[..valid.len() / 2];
    let mut all = vec![
        bad("files", "absent", Content::Absent, true),
        bad("files", "a folder", Content::Folder, true),
        bad("files", "a link to /dev/zero", Content::Link("/dev/zero".into()), true),
        bad("files", "a link to /dev/null", Content::Link("/dev/null".into()), !is_lenient),
        bad("files", "a link to nothing", Content::Link("nowhere".into()), true),
        bad("files", "a link to /proc/self/mem", Content::Link("/proc/self/mem".into()), true),
        bad("files", "a TiB", Content::Sparse(valid.into(), 1 << 40), true),
        bad("files", "8 GB of which all but the start is a hole", Content::Sparse(valid.into(), 8_000_000_000), true),
        bad("bytes", "empty", Content::of(""), !is_lenient),
        bad("bytes", "blanks", Content::of(" \n \n"), !is_lenient),
        bad("bytes", "4096 zeros", Content::of([0; 4096]), true),
        bad("bytes", "noise", Content::of(&noise), true),
        bad("bytes", "a byte that is no UTF-8 first", Content::of([b"\xff", valid].concat()), true),
        bad("bytes", "escapes", Content::of(ESCAPES), !is_lenient),
        bad("bytes", "the first half", Content::of(half), !is_lenient && format != Format::Lines),
        bad("bytes", "escapes behind it", Content::of([valid, ESCAPES.as_bytes()].concat()), false),
        bad("sizes", "17 MB of one line", Content::of(vec![b'a'; 17 << 20]), !is_lenient),
        bad("sizes", "a million brackets", Content::of("[".repeat(1_000_000)), true),
        bad("sizes", "100,000 keys", Content::of(keys(100_000, format)), !is_lenient),
    ];
    // The start of a library and a hole of zeros can be loaded, and is then code that does nothing good: who names a library trusts it.
    if format == Format::Library {
        all.retain(|bad| !matches!(bad.content, Content::Sparse(..)));
    }
    if text {
        all.extend([
            bad("bytes", "UTF-16", Content::of(utf16(valid)), true),
            bad("sizes", "a million braces", Content::of("{\"a\":".repeat(1_000_000)), true),
        ]);
    }
    if format == Format::Yaml {
        let bomb = (1..30).fold("a0: &a0 [x, x]\n".to_string(), |text, i| {
            text + &format!("a{i}: &a{i} [*a{0}, *a{0}, *a{0}, *a{0}]\n", i - 1)
        });
        all.extend([
            bad("sizes", "aliases of aliases", Content::of(bomb), true),
            bad("bytes", "two documents", Content::of("--- {}\n--- {}\n"), true),
            bad("bytes", "a comment alone", Content::of("# nothing\n---\n"), true),
            bad("bytes", "an unknown tag", Content::of("!!python/object:os.system {}\n"), false),
            bad(
                "sizes",
                "deep blocks",
                Content::of((0..5000).map(|i| " ".repeat(i) + "a:\n").collect::<String>()),
                true,
            ),
        ]);
    }
    if format == Format::Lines {
        all.push(bad("sizes", "a line of 20 MB", Content::of(long_line(valid)), false));
    }
    all
}

fn keys(count: usize, format: Format) -> String {
    let line = |i: usize| if format == Format::Toml { format!("k{i} = 1\n") } else { format!("\"k{i}\": 1,\n") };
    let lines = (0..count).map(line).collect::<String>();
    if format == Format::Toml { lines } else { format!("{{{}}}", lines.trim_end_matches(",\n")) }
}

fn utf16(valid: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(valid);
    [0xfe, 0xff].into_iter().chain(text.encode_utf16().flat_map(u16::to_be_bytes)).collect()
}

/// The first line with its first text made 20 MB long.
fn long_line(valid: &[u8]) -> String {
    let first = String::from_utf8_lossy(valid).lines().next().unwrap_or_default().to_string();
    let mut line: Value = serde_json::from_str(&first).unwrap();
    if let Some(text) = line.as_object_mut().and_then(|line| line.values_mut().find(|value| value.is_string())) {
        *text = "word ".repeat(4 << 20).into();
    }
    line.to_string() + "\n"
}

/// A value that a field may be given.
struct BadValue {
    kind: &'static str,
    name: &'static str,
    make: fn() -> Value,
    /// The token that stands for [`NUMBER`].
    number: &'static str,
}

const fn value(kind: &'static str, name: &'static str, make: fn() -> Value) -> BadValue {
    BadValue { kind, name, make, number: "" }
}

const fn number(name: &'static str, number: &'static str) -> BadValue {
    BadValue { kind: "numbers", name, make: || NUMBER.into(), number }
}

const DIGITS_300: &str = concat!(
    "99999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999",
    "99999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999",
    "99999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999",
);

const VALUES: &[BadValue] = &[
    number("2⁶³", "9223372036854775808"),
    value("fields", "null", || Value::Null),
    value("escapes", "text of escapes", || ESCAPES.into()),
    number("−1", "-1"),
    value("fields", "an empty list", || Value::Array(Vec::new())),
    number("1e308", "1e308"),
    value("escapes", "a key of escapes", || Value::Object([(ESCAPES.into(), 1.into())].into_iter().collect())),
    number("2⁶⁴ − 1", "18446744073709551615"),
    value("fields", "a number", || 0.5.into()),
    number("0", "0"),
    value("sizes", "text of 100,000", || "x".repeat(100_000).into()),
    number("300 digits", DIGITS_300),
    value("fields", "an empty object", || Value::Object(Map::new())),
    number("1e999", "1e999"),
    value("fields", "truth", || true.into()),
    number("10⁹", "1000000000"),
    value("sizes", "100,000 elements", || vec![1; 100_000].into()),
    number("the least above 0", "5e-324"),
    value("sizes", "100 lists in each other", || (0..100).fold(Value::Null, |inner, _| vec![inner].into())),
    number("2³¹", "2147483648"),
];

/// Copies of `valid` with a bad value in a field: every value of [`VALUES`] comes about as often as each other, `per_field` of them in
/// each field; and one with the field left out.
pub(super) fn fields(valid: &Value, format: Format, per_field: usize) -> Vec<Bad> {
    let mut all = Vec::new();
    let mut next = 0;
    for pointer in pointers(valid) {
        for _ in 0..per_field {
            let chosen = &VALUES[next % VALUES.len()];
            next += 1;
            let mut changed = valid.clone();
            *changed.pointer_mut(&pointer).unwrap() = (chosen.make)();
            let Some(text) = written(&changed, format) else { continue };
            let text = text.replace(&format!("\"{NUMBER}\""), chosen.number);
            all.push(bad(chosen.kind, format!("{pointer}: {}", chosen.name), Content::of(text), false));
        }
        let mut without = valid.clone();
        let (parent, last) = pointer.rsplit_once('/').unwrap();
        if let Some(object) = without.pointer_mut(parent).and_then(Value::as_object_mut) {
            object.remove(&last.replace("~1", "/").replace("~0", "~"));
            let text = written(&without, format);
            all.extend(text.map(|text| bad("fields", format!("{pointer}: absent"), Content::of(text), false)));
        }
    }
    let mut more = valid.clone();
    if let Some(object) = more.as_object_mut() {
        object.insert(ESCAPES.into(), ESCAPES.into());
        let text = written(&more, format);
        all.extend(text.map(|text| bad("escapes", "an unknown field of escapes", Content::of(text), false)));
    }
    all
}

/// The value as text of a format; `None` where it has no such text.
fn written(value: &Value, format: Format) -> Option<String> {
    match format {
        Format::Toml => toml::to_string(&without_null(value.clone())?).ok(),
        Format::Lines => Some(value.to_string() + "\n"),
        _ => Some(value.to_string()),
    }
}

/// TOML has no null.
pub(super) fn without_null(value: Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::Object(fields) => {
            let fields = fields.into_iter().filter_map(|(name, value)| Some((name, without_null(value)?)));
            Some(Value::Object(fields.collect()))
        }
        other => Some(other),
    }
}

/// Every field, and of every list the first element.
fn pointers(value: &Value) -> Vec<String> {
    let members: Vec<(String, &Value)> = match value {
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| (name.replace('~', "~0").replace('/', "~1"), value)).collect()
        }
        Value::Array(items) => items.first().map(|item| ("0".into(), item)).into_iter().collect(),
        _ => Vec::new(),
    };
    let below = |(name, value): (String, &Value)| {
        let deeper = pointers(value).into_iter().map(|rest| format!("/{name}{rest}"));
        [format!("/{name}")].into_iter().chain(deeper).collect::<Vec<_>>()
    };
    members.into_iter().flat_map(below).collect()
}

/// A safetensors file taken apart.
pub(super) struct Tensors {
    pub(super) header: Map<String, Value>,
    pub(super) data: Vec<u8>,
}

impl Tensors {
    pub(super) fn new(bytes: &[u8]) -> Self {
        let (length, rest) = bytes.split_at(8);
        let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(length.try_into().unwrap())).unwrap());
        Self { header: serde_json::from_slice(header).unwrap(), data: data.to_vec() }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        with_header(&serde_json::to_string(&self.header).unwrap(), &self.data)
    }

    fn tensors(&self) -> Vec<String> {
        self.header.keys().filter(|name| *name != "__metadata__").cloned().collect()
    }
}

/// A safetensors file of a header, padded as the format asks for, and data.
pub(super) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut header = header.as_bytes().to_vec();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
}

/// Bad safetensors files.
pub(super) fn tensors(valid: &[u8]) -> Vec<Bad> {
    let whole = Tensors::new(valid);
    let first = whole.tensors()[0].clone();
    let mut all = Vec::new();
    for length in [0, 1, 7, 1 << 20, (1 << 63) - 1, u64::MAX] {
        let bytes = [&u64::to_le_bytes(length)[..], &valid[8..]].concat();
        all.push(bad("bytes", format!("a header of {length} bytes"), Content::of(bytes), true));
    }
    for (at, name) in [(7, "seven bytes"), (8, "no header"), (valid.len() - 1, "the last byte missing")] {
        all.push(bad("bytes", name, Content::of(&valid[..at]), true));
    }
    for (name, header) in
        [("no object", "[]"), ("a number", "1"), ("empty", "{}"), ("twice", "{}{}"), ("open", "{\"a\":")]
    {
        all.push(bad("bytes", format!("a header that is {name}"), Content::of(with_header(header, &whole.data)), true));
    }
    let nested = with_header(&"[".repeat(500_000), &whole.data);
    all.push(bad("sizes", "a header of 500,000 brackets", Content::of(nested), true));
    let mut many = whole.header.clone();
    many.extend(
        (0..100_000)
            .map(|i| (format!("t{i}"), serde_json::json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}))),
    );
    let many = Tensors { header: many, data: whole.data.clone() };
    all.push(bad("sizes", "100,000 tensors more", Content::of(many.bytes()), false));

    // The largest tensor grown to 6 GB of a hole: only its shape says that it is wrong.
    let huge = huge(&whole);
    all.push(huge);

    let changes: [(&str, &'static str, Value); 15] = [
        ("dtype", "fields", "F33".into()),
        ("dtype", "escapes", ESCAPES.into()),
        ("dtype", "fields", "BOOL".into()),
        ("dtype", "fields", Value::Null),
        ("shape", "numbers", serde_json::json!([-1])),
        ("shape", "numbers", serde_json::json!([1_u64 << 63, 2])),
        ("shape", "numbers", serde_json::json!([u64::MAX, u64::MAX, u64::MAX])),
        ("shape", "numbers", serde_json::json!([0, u64::MAX])),
        ("shape", "fields", serde_json::json!([])),
        ("shape", "sizes", vec![1; 10_000].into()),
        ("shape", "numbers", serde_json::json!([1e300])),
        ("data_offsets", "numbers", serde_json::json!([0, u64::MAX])),
        ("data_offsets", "numbers", serde_json::json!([u64::MAX, 0])),
        ("data_offsets", "numbers", serde_json::json!([8, 4])),
        ("data_offsets", "fields", serde_json::json!([0])),
    ];
    for name in whole.tensors().into_iter().take(MOST_TENSORS) {
        for (field, kind, change) in changes.iter().filter(|(field, ..)| name == first || *field == "dtype") {
            let mut header = whole.header.clone();
            header[&name][field] = change.clone();
            let shown: String = change.to_string().chars().take(30).collect();
            let changed = Tensors { header, data: whole.data.clone() };
            all.push(bad(kind, format!("{name}.{field}: {shown:?}"), Content::of(changed.bytes()), false));
        }
        for (kind, other) in [("escapes", ESCAPES), ("fields", "other"), ("escapes", "it's $(touch pwned)")] {
            let mut header = whole.header.clone();
            let tensor = header.remove(&name).unwrap();
            header.insert(other.into(), tensor);
            let renamed = Tensors { header, data: whole.data.clone() };
            all.push(bad(kind, format!("{name} renamed to {other:?}"), Content::of(renamed.bytes()), false));
        }
        // Numbers that no kernel returns and no batch has.
        for (byte, what) in [(0xff, "NaN"), (0x7f, "NaN or large"), (0x80, "tiny")] {
            let range = &whole.header[&name]["data_offsets"];
            let [start, end] = [0, 1].map(|i| usize::try_from(range[i].as_u64().unwrap()).unwrap());
            let mut data = whole.data.clone();
            data[start..end].fill(byte);
            let filled = Tensors { header: whole.header.clone(), data };
            all.push(bad("numbers", format!("{name} of {what}"), Content::of(filled.bytes()), false));
        }
    }
    // Metadata: each entry a text of escapes, extreme numbers, and no text at all.
    let metadata = whole.header.get("__metadata__").and_then(Value::as_object).cloned().unwrap_or_default();
    let keys = metadata
        .keys()
        .cloned()
        .chain(["spec", "expected.logits.n_tokens", "expected.loss", "called", "cause"].map(String::from));
    for key in keys {
        for (kind, text) in
            [("escapes", ESCAPES), ("numbers", "1e999"), ("fields", ""), ("fields", "{}"), ("numbers", "-1")]
        {
            let mut changed = Tensors { header: whole.header.clone(), data: whole.data.clone() };
            let mut metadata = metadata.clone();
            metadata.insert(key.clone(), text.into());
            changed.header.insert("__metadata__".into(), metadata.into());
            all.push(bad(kind, format!("metadata {key}: {text:?}"), Content::of(changed.bytes()), false));
        }
    }
    let mut metadata = metadata;
    metadata.insert(format!("expected.{ESCAPES}"), ESCAPES.into());
    metadata.insert(ESCAPES.into(), ESCAPES.into());
    let mut changed = Tensors { header: whole.header.clone(), data: whole.data.clone() };
    changed.header.insert("__metadata__".into(), metadata.into());
    all.push(bad("escapes", "metadata of unknown keys", Content::of(changed.bytes()), false));
    changed.header.insert("__metadata__".into(), 1.into());
    all.push(bad("fields", "metadata that is a number", Content::of(changed.bytes()), true));
    all
}

/// The file with the last tensor of its data made 6 GB long.
fn huge(whole: &Tensors) -> Bad {
    const BYTES: u64 = 6_000_000_000;
    let end = |name: &String| whole.header[name]["data_offsets"][1].as_u64().unwrap();
    let last = whole.tensors().into_iter().max_by_key(end).unwrap();
    let mut header = whole.header.clone();
    let start = header[&last]["data_offsets"][0].as_u64().unwrap();
    let size = match header[&last]["dtype"].as_str().unwrap() {
        "F64" | "I64" => 8,
        "F32" | "I32" => 4,
        "BF16" | "F16" => 2,
        _ => 1,
    };
    let rank = header[&last]["shape"].as_array().unwrap().len().max(1);
    let mut shape = vec![1; rank];
    shape[rank - 1] = BYTES / size;
    header[&last]["shape"] = shape.into();
    header[&last]["data_offsets"] = serde_json::json!([start, start + BYTES]);
    let bytes = with_header(&serde_json::to_string(&header).unwrap(), &whole.data);
    let length = bytes.len() as u64 - whole.data.len() as u64 + start + BYTES;
    bad("sizes", format!("{last} of 6 GB"), Content::Sparse(bytes.into(), length), true)
}

/// Bad GGUF files: every count, length and type in the first part of a valid one, made extreme.
pub(super) fn gguf(valid: &[u8]) -> Vec<Bad> {
    let mut all = Vec::new();
    for (at, name) in [(4, "version"), (8, "number of tensors"), (16, "number of entries"), (24, "length of a key")] {
        for number in [0_u64, 1, 1 << 31, 1 << 32, (1 << 63) - 1, u64::MAX] {
            let mut bytes = valid.to_vec();
            let width = if at == 4 { 4 } else { 8 };
            bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
            all.push(bad(
                "numbers",
                format!("{name}: {number}"),
                Content::of(bytes),
                at != 24 && number != 1 && at != 4,
            ));
        }
    }
    for length in [0, 3, 4, 8, 16, 23, 24, 25, 100, 500] {
        all.push(bad("bytes", format!("{length} bytes"), Content::of(&valid[..length]), true));
    }
    // An entry in front of all others: an alignment, an array in arrays, a text without an end.
    let entry = |key: &str, kind: u32, value: &[u8]| -> Vec<u8> {
        let mut bytes = valid.to_vec();
        let count = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) + 1;
        bytes[16..24].copy_from_slice(&count.to_le_bytes());
        let entry = [&(key.len() as u64).to_le_bytes()[..], key.as_bytes(), &kind.to_le_bytes(), value].concat();
        bytes.splice(24..24, entry);
        bytes
    };
    for alignment in [0_u32, 1, 3, 1 << 31, u32::MAX] {
        let bytes = entry("general.alignment", 4, &alignment.to_le_bytes());
        all.push(bad("numbers", format!("alignment {alignment}"), Content::of(bytes), alignment == 0));
    }
    // The alignment behind two million bytes of text.
    let long = [&(2_u64 << 20).to_le_bytes()[..], &vec![b'x'; 2 << 20]].concat();
    let mut late = entry("general.alignment", 4, &0_u32.to_le_bytes());
    let count = u64::from_le_bytes(late[16..24].try_into().unwrap()) + 1;
    late[16..24].copy_from_slice(&count.to_le_bytes());
    late.splice(24..24, [&4_u64.to_le_bytes()[..], b"long", &8_u32.to_le_bytes(), &long].concat());
    all.push(bad("numbers", "alignment 0 behind 2 MiB", Content::of(late), true));
    // The extents of tensors, behind their names and the number of the extents.
    for name in ["token_embd.weight", "output_norm.weight", "output.weight"] {
        let Some(at) = valid.windows(name.len()).position(|part| part == name.as_bytes()) else { continue };
        for extent in [0, 1, 1 << 32, (1 << 63) - 1, 1 << 63, u64::MAX] {
            let (mut bytes, at) = (valid.to_vec(), at + name.len() + 4);
            bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(extent));
            all.push(bad("numbers", format!("an extent of {name}: {extent}"), Content::of(bytes), true));
        }
    }
    let nested: Vec<u8> =
        (0..100_000).flat_map(|_| [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat()).collect();
    all.push(bad("sizes", "100,000 arrays in each other", Content::of(entry("deep", 9, &nested)), true));
    let wide = [&8_u32.to_le_bytes()[..], &(1_u64 << 40).to_le_bytes()].concat();
    all.push(bad("sizes", "2⁴⁰ texts", Content::of(entry("wide", 9, &wide)), true));
    all.push(bad("numbers", "a text of 2⁶³ bytes", Content::of(entry("text", 8, &(1_u64 << 63).to_le_bytes())), true));
    all.push(bad("fields", "an unknown type", Content::of(entry("type", 77, &[0; 8])), true));
    let escapes = [&(ESCAPES.len() as u64).to_le_bytes()[..], ESCAPES.as_bytes()].concat();
    all.push(bad(
        "escapes",
        "an architecture of escapes",
        Content::of(entry("general.architecture", 8, &escapes)),
        false,
    ));
    all.push(bad("escapes", "a key of escapes", Content::of(entry(ESCAPES, 4, &[0; 4])), false));
    // A name of a tensor, or of a key, in which a letter became an escape.
    for word in ["token_embd.weight", "output_norm.weight", "qwen2.block_count", "tokenizer.ggml.model", "gpt2"] {
        if let Some(at) = valid.windows(word.len()).position(|part| part == word.as_bytes()) {
            let mut bytes = valid.to_vec();
            bytes[at] = 0x1b;
            all.push(bad("escapes", format!("an escape in {word}"), Content::of(bytes), false));
        }
    }
    all
}

/// A library that cannot be loaded: the start of a valid one.
pub(super) fn library() -> Arc<[u8]> {
    let own = std::fs::read(super::sandbox::command_path()).unwrap();
    own[..own.len().min(1 << 16)].into()
}
