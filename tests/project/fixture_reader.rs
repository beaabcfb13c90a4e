//! Files from strangers: what is malformed is refused by name, what is written reads back unchanged.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, ErrorKind};
use std::path::{Path, PathBuf};

use assay::fixture::{
    FixtureError, MAX_HEADER_LEN, ProblemFile, SafetensorsFile, StoredDtype, Verified, candidate, read_candidate,
    verify, write_candidate, write_problem,
};
use assay::implementation::Workload as _;
use assay::problem::{
    Advantages, Candidate, CuSeqlens, Dtype, Extra, FloatArray, Metrics, OtherIds, Problem, ProblemError, Sequences,
    narrowed_kept_ids,
};
use ndarray::{Array1, Array2, Array3, Axis, Ix0, Ix1, Ix2, Ix3, IxDyn, arr0, array};
use proptest::prelude::*;
use proptest::sample::Index;
use safetensors::SafeTensors;

const DTYPES: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::Bf16, Dtype::F16];

type InMemory = SafetensorsFile<Cursor<Vec<u8>>>;

fn open(bytes: Vec<u8>) -> Result<InMemory, FixtureError> {
    SafetensorsFile::new(Cursor::new(bytes), "given.safetensors")
}

/// A file with this header and `data_len` zero bytes of tensors.
fn file(header: impl AsRef<[u8]>, data_len: usize) -> Vec<u8> {
    let header = header.as_ref();
    [&(header.len() as u64).to_le_bytes(), header, &vec![0; data_len]].concat()
}

/// One entry of a header.
fn entry(name: &str, dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

/// A file of the given entries, each `(name, dtype, shape, bytes)`, laid end to end.
fn tensors(entries: &[(&str, &str, &str, &[u8])]) -> InMemory {
    let mut data = Vec::new();
    let mut header = Vec::new();
    for (name, dtype, shape, bytes) in entries {
        let begin = data.len();
        data.extend_from_slice(bytes);
        header.push(entry(name, dtype, shape, &format!("[{begin},{}]", data.len())));
    }
    let mut bytes = file(format!("{{{}}}", header.join(",")), 0);
    bytes.extend(data);
    open(bytes).unwrap()
}

/// Asserts that the message is one line that starts with the file and holds every part.
#[track_caller]
fn assert_says<T>(result: Result<T, FixtureError>, path: impl AsRef<Path>, parts: &[&str]) {
    let Err(error) = result else { panic!("accepted, expected an error with {parts:?}") };
    let message = error.to_string();
    assert!(message.starts_with(&format!("{}: ", path.as_ref().display())), "{message}");
    assert!(!message.contains(char::is_control), "{message:?}");
    assert!(message.len() < 1000, "{} bytes: {message}", message.len());
    for part in parts {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
}

#[track_caller]
fn assert_refused(bytes: Vec<u8>, parts: &[&str]) {
    assert_says(open(bytes), "given.safetensors", parts);
}

fn temp_dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn metadata() -> BTreeMap<String, String> {
    [("made_by", "a test"), ("note", "β = 0 \"quoted\"\n")].map(|(k, v)| (k.into(), v.into())).into()
}

// Malformed files.

#[test]
fn length_shorter_than_a_prefix_is_refused() {
    assert_refused(vec![], &["file length", "got 0 bytes", "at least 8"]);
    assert_refused(vec![0; 7], &["file length", "got 7 bytes", "at least 8"]);
}

#[test]
fn header_length_beyond_the_file_is_refused_before_allocation() {
    let mut bytes = file("{}", 0);
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_refused(bytes, &["header length", "got 18446744073709551615 bytes", "at most the 2 that follow"]);
}

#[test]
fn header_length_beyond_the_limit_is_refused_before_allocation() {
    let sparse = tempfile::NamedTempFile::new().unwrap();
    let beyond = MAX_HEADER_LEN + 1;
    fs::write(&sparse, beyond.to_le_bytes()).unwrap();
    sparse.as_file().set_len(1 << 30).unwrap();
    assert_says(SafetensorsFile::open(&sparse), &sparse, &["header length", "got 16777217 bytes", "at most 16777216"]);
}

#[test]
fn header_outside_utf8_is_refused_with_its_offset() {
    assert_refused(file(b"{\"\xff\":0}", 0), &["header: got a byte outside UTF-8 at offset 10", "JSON in UTF-8"]);
}

#[test]
fn header_that_is_no_json_object_is_refused() {
    for header in ["", "{", "nul", "[]", "3", "{}{}", "{\"a\"}"] {
        assert_refused(file(header, 0), &["header: got `", "expected one JSON object"]);
    }
    let deep = "[".repeat(1 << 20);
    assert_refused(file(format!(r#"{{"a":{{"dtype":{deep}"#), 0), &["header: got `a: ", "expected one JSON object"]);
}

#[test]
fn header_entry_without_its_fields_is_refused_by_name() {
    let offsets = r#""data_offsets":[0,4]"#;
    for (entry, given) in [
        ("3".into(), "logits: invalid type: integer `3`"),
        (format!(r#"{{"dtype":"F32",{offsets}}}"#), "logits: missing field `shape`"),
        (format!(r#"{{"dtype":"F31","shape":[1],{offsets}}}"#), "logits: unknown variant `F31`"),
        (format!(r#"{{"dtype":"F32","shape":[-1],{offsets}}}"#), "logits: invalid value: integer `-1`"),
        (format!(r#"{{"dtype":"F32","shape":[1.5],{offsets}}}"#), "logits: invalid type: floating point `1.5`"),
        (r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#.into(), "logits: invalid length 1"),
    ] {
        assert_refused(file(format!(r#"{{"logits":{entry}}}"#), 4), &["header: got `", given, "expected one JSON"]);
    }
}

#[test]
fn header_key_given_twice_is_refused_by_name() {
    let logits = entry("logits", "F32", "[1]", "[0,4]");
    assert_refused(file(format!("{{{logits},{logits}}}"), 4), &["header: got `logits: key given twice"]);
    let strings = r#""__metadata__":{}"#;
    assert_refused(file(format!("{{{strings},{strings}}}"), 0), &["header: got `__metadata__: key given twice"]);
    let header = r#"{"__metadata__":{"seed":"1","seed":"2"}}"#;
    assert_refused(file(header, 0), &["header: got `__metadata__: seed: key given twice"]);
}

#[test]
fn metadata_value_that_is_no_string_is_refused_by_name() {
    let header = r#"{"__metadata__":{"seed":1}}"#;
    assert_refused(file(header, 0), &["__metadata__: seed: invalid type: integer `1`, expected a string"]);
    assert_refused(file(r#"{"__metadata__":[]}"#, 0), &["__metadata__: invalid type: sequence", "object of strings"]);
}

#[test]
fn tensors_that_overlap_or_leave_a_hole_are_refused_by_name() {
    let first = entry("first", "F32", "[2]", "[0,8]");
    for offsets in ["[4,8]", "[12,16]", "[0,4]", "[8,4]"] {
        let header = format!("{{{first},{}}}", entry("second", "F32", "[1]", offsets));
        let given = format!("got {}", offsets.replace(',', ", "));
        // Of two that begin at 0 the shorter is taken to come first.
        let (blamed, expected) = if offsets == "[0,4]" { ("first", "[4, end]") } else { ("second", "[8, end]") };
        let given = if blamed == "first" { "got [0, 8]" } else { &given };
        assert_refused(file(header, 16), &[&format!("tensor `{blamed}`: data_offsets: {given}"), expected]);
    }
    let header = format!("{{{}}}", entry("late", "F32", "[1]", "[4,8]"));
    assert_refused(file(header, 8), &["tensor `late`: data_offsets: got [4, 8]", "expected [0, end]"]);
}

#[test]
fn tensor_beyond_the_file_is_refused_by_name() {
    let header = format!("{{{}}}", entry("logits", "F32", "[2]", "[0,8]"));
    let whole = file(&header, 8);
    open(whole.clone()).unwrap();
    for kept in header.len() + 8..whole.len() {
        let given = format!("the file's {} bytes", kept - header.len() - 8);
        assert_refused(whole[..kept].into(), &["tensor `logits`: data_offsets: got [0, 8]", &given]);
    }
    let header = format!("{{{}}}", entry("logits", "U8", "[18446744073709551615]", "[0,18446744073709551615]"));
    assert_refused(file(header, 8), &["tensor `logits`: data_offsets: got [0, 18446744073709551615]"]);
}

#[test]
fn bytes_after_the_last_tensor_are_refused() {
    let header = format!("{{{}}}", entry("logits", "F32", "[2]", "[0,8]"));
    assert_refused(file(header, 9), &["data: got 9 bytes after the header", "expected 8, where the last tensor ends"]);
    assert_refused(file("{}", 1), &["data: got 1 bytes after the header", "expected 0"]);
}

#[test]
fn shape_unlike_its_bytes_is_refused_by_name() {
    for (dtype, shape, given) in [
        ("F32", "[3]", "got 96 bits for F32 [3]"),
        ("F32", "[]", "got 32 bits for F32 []"),
        ("F32", "[0]", "got 0 bits for F32 [0]"),
        ("BF16", "[2]", "got 32 bits for BF16 [2]"),
        ("F4", "[15]", "got 60 bits for F4 [15]"),
        ("U8", "[4294967296,4294967296]", "got over 2⁶⁴ bits for U8 [4294967296, 4294967296]"),
        ("F64", "[2305843009213693953]", "got over 2⁶⁴ bits for F64 [2305843009213693953]"),
    ] {
        let header = format!("{{{}}}", entry("logits", dtype, shape, "[0,8]"));
        assert_refused(file(header, 8), &["tensor `logits`: shape: ", given, "expected the 8 bytes of its"]);
    }
}

#[test]
fn names_of_strangers_are_shortened_and_escaped_in_messages() {
    let name = "x\\n\\u001b[31m".repeat(1000);
    let header = format!("{{{}}}", entry(&name, "F32", "[1]", "[4,8]"));
    assert_refused(file(header, 8), &["tensor `x \\u{1b}[31mx", "…`: data_offsets: got [4, 8]"]);
    let shape = format!("[{}1]", "1,".repeat(10_000));
    assert_refused(file(format!("{{{}}}", entry("deep", "F32", &shape, "[0,8]")), 8), &["tensor `deep`: shape", "…"]);
}

// Single tensors.

#[test]
fn missing_tensor_is_refused_with_the_names_there_are() {
    let held = tensors(&[("b", "U8", "[1]", &[1]), ("a", "U8", "[1]", &[2])]);
    assert_says(held.info("c"), "given.safetensors", &["tensor `c`: not in the file", "expected one of [a, b]"]);
    let names: Vec<String> = (0..100).map(|i| format!("t{i:02}")).collect();
    let many: Vec<_> = names.iter().map(|name| (name.as_str(), "U8", "[0]", &[][..])).collect();
    assert_says(tensors(&many).info("c"), "given.safetensors", &["t00, t01", "t31, 68 more]"]);
}

#[test]
fn rank_other_than_asked_for_is_refused() {
    let held = tensors(&[("a", "F32", "[1,2]", &[0; 8])]);
    let parts = ["tensor `a`", "got shape [1, 2]", "expected rank 3"];
    assert_says(held.floats::<Ix3>("a"), "given.safetensors", &parts);
    assert_says(held.numbers::<Ix3>("a"), "given.safetensors", &parts);
    assert_eq!(held.floats::<Ix2>("a").unwrap().shape(), [1, 2]);
    assert_eq!(held.floats::<IxDyn>("a").unwrap().shape(), [1, 2]);
}

#[test]
fn empty_tensor_with_extents_beyond_memory_is_refused() {
    let held = tensors(&[("a", "U8", "[0,9223372036854775808]", &[])]);
    let parts = ["tensor `a`", "got shape [0, 9223372036854775808]", "fits 63 bits"];
    assert_says(held.numbers::<Ix2>("a"), "given.safetensors", &parts);
    assert!(tensors(&[("a", "U8", "[0,3]", &[])]).numbers::<Ix2>("a").unwrap().is_empty());
}

#[test]
fn numbers_of_every_dtype_widen_exactly() {
    let cases: [(&str, &[u8], f64); 13] = [
        ("F64", &(-0.1f64).to_le_bytes(), -0.1),
        ("F32", &1.5f32.to_le_bytes(), 1.5),
        ("BF16", &[0x80, 0xbf], -1.0),
        ("F16", &[0x00, 0x3e], 1.5),
        ("I64", &(-(1i64 << 53)).to_le_bytes(), -9_007_199_254_740_992.0),
        ("I32", &i32::MIN.to_le_bytes(), -2_147_483_648.0),
        ("I16", &[0xfe, 0xff], -2.0),
        ("I8", &[0xff], -1.0),
        ("U64", &(1u64 << 63).to_le_bytes(), 9_223_372_036_854_775_808.0),
        ("U32", &0xffff_0001_u32.to_le_bytes(), 4_294_901_761.0),
        ("U16", &[0x01, 0xff], 65281.0),
        ("U8", &[0xff], 255.0),
        ("BOOL", &[1], 1.0),
    ];
    for (dtype, bytes, expected) in cases {
        let held = tensors(&[("a", dtype, "[]", bytes)]);
        assert_eq!(held.numbers::<Ix0>("a").unwrap(), arr0(expected), "{dtype}");

        let integer = dtype.starts_with(['I', 'U']) && dtype != "U64";
        let integers = held.integers::<Ix0>("a");
        if integer {
            assert_eq!(integers.unwrap(), arr0(expected as i64), "{dtype}");
        } else {
            let given = format!("got {dtype}");
            assert_says(integers, "given.safetensors", &["tensor `a`", &given, "expected I64, I32"]);
        }

        let floats = held.floats::<Ix0>("a");
        if dtype.contains('F') {
            assert_eq!(floats.unwrap().value(), expected, "{dtype}");
        } else {
            let given = format!("got {dtype}");
            assert_says(floats, "given.safetensors", &["tensor `a`", &given, "expected F64, F32, BF16 or F16"]);
        }
    }
    let eight_bits = tensors(&[("a", "F8_E4M3", "[1]", &[0])]);
    assert_says(eight_bits.numbers::<Ix1>("a"), "given.safetensors", &["tensor `a`", "got F8_E4M3", "16 bits or more"]);
}

#[test]
fn tensor_larger_than_a_chunk_reads_in_order() {
    let expected = Array1::from_iter((0..50_000).map(f64::from));
    let bytes: Vec<u8> = expected.iter().flat_map(|x| x.to_le_bytes()).collect();
    let held = tensors(&[("before", "U8", "[8]", &[7; 8]), ("a", "F64", "[50000]", &bytes)]);
    assert_eq!(held.numbers::<Ix1>("a").unwrap(), expected);
}

#[test]
fn file_cut_after_opening_is_an_error() {
    let dir = temp_dir();
    let path = dir.path().join("cut.safetensors");
    write_problem(&path, &problem(Dtype::F32), &metadata()).unwrap();
    let held = SafetensorsFile::open(&path).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    assert_says(held.numbers::<Ix2>("mask"), &path, &["cannot read tensor `mask`"]);
}

// Problems and candidates.

const SHAPE: (usize, usize, usize) = (2, 3, 5);

fn ramp3(dtype: Dtype) -> FloatArray<Ix3> {
    FloatArray::rounded_from(&Array3::from_shape_fn(SHAPE, |(b, t, j)| (b * 31 + t * 7 + j) as f64 / 3.0 - 9.0), dtype)
}

fn ramp2(start: f64) -> Array2<f64> {
    Array2::from_shape_fn((SHAPE.0, SHAPE.1), |(b, t)| start + b as f64 / 4.0 - t as f64 / 8.0)
}

fn problem(logits: Dtype) -> Problem {
    Problem {
        logits: ramp3(logits),
        ids: array![[0, 4, 2], [1, i64::MAX, i64::MIN]],
        mask: array![[true, true, false], [true, false, false]],
        advantages: Advantages::Sequence(array![0.5, -0.5]),
        old_logp: Some(ramp2(-1.0)),
        ref_logp: Some(ramp2(-0.1)),
        extra: Extra {
            rollout_logp: Some(ramp2(-1.5)),
            rollout_weights: Some(ramp2(1.0)),
            token_weights: Some(ramp2(0.75)),
            selected: Some(array![[true, false, false], [false, true, false]]),
            bias: Some(array![0.5, 0.25, 0.0, -0.25, -0.5]),
            dentropy: Some(ramp2(0.25)),
            temperature: Some(ramp2(0.875)),
            kept_ids: Some(Array3::from_shape_fn((2, 3, 2), |(b, t, k)| (b + t) as i32 - 2 * k as i32)),
            ..Extra::default()
        },
    }
}

fn assert_same(given: &Problem, expected: &Problem) {
    assert_eq!(given.logits, expected.logits);
    assert_eq!(given.ids, expected.ids);
    assert_eq!(given.mask, expected.mask);
    assert_eq!(given.advantages, expected.advantages);
    assert_eq!(given.old_logp, expected.old_logp);
    assert_eq!(given.ref_logp, expected.ref_logp);
    assert_eq!(given.extra, expected.extra);
}

#[test]
fn problem_of_every_dtype_reads_back_unchanged() {
    let dir = temp_dir();
    for dtype in DTYPES {
        let path = dir.path().join(format!("{dtype}.safetensors"));
        let mut given = problem(dtype);
        write_problem(&path, &given, &metadata()).unwrap();
        let held = ProblemFile::open(&path).unwrap();
        assert_eq!(held.metadata(), &metadata());
        assert_eq!(held.logits_names(), ["logits"]);
        assert_eq!(held.old_logp_names(), ["old_logps"]);
        assert_same(&held.problem("logits", Some("old_logps")).unwrap(), &given);

        given.advantages = Advantages::Token(ramp2(0.25));
        given.old_logp = None;
        given.ref_logp = None;
        given.extra = Extra {
            rollout_weights: Some(array![[0.5], [2.0]]),
            token_weights: Some(array![[1.0], [0.0]]),
            temperature: Some(array![[0.5], [2.0]]),
            ..Extra::default()
        };
        write_problem(&path, &given, &BTreeMap::new()).unwrap();
        let held = ProblemFile::open(&path).unwrap();
        assert!(held.metadata().is_empty() && held.old_logp_names().is_empty());
        assert_same(&held.problem("logits", None).unwrap(), &given);

        given.advantages = Advantages::Dlogp(ramp2(0.25));
        let extents = (2, 3, 2);
        let ids = Array3::from_shape_fn(extents, |(b, t, k)| (b + t * k) as i64);
        let dlogp = Array3::from_shape_fn(extents, |(b, t, k)| (b * t) as f64 - 0.1 * k as f64);
        given.extra = Extra { others: Some(OtherIds { ids, dlogp }), ..Extra::default() };
        write_problem(&path, &given, &BTreeMap::new()).unwrap();
        assert_same(&ProblemFile::open(&path).unwrap().problem("logits", None).unwrap(), &given);
    }
}

#[test]
fn packed_problems_read_back_unchanged() {
    let dir = temp_dir();
    let path = dir.path().join("packed.safetensors");
    let (mut packed, _) = problem(Dtype::F32).pack();
    packed.extra.rollout_weights = Some(array![[0.5], [2.0]]);
    write_problem(&path, &packed, &BTreeMap::new()).unwrap();
    assert_same(&ProblemFile::open(&path).unwrap().problem("logits", Some("old_logps")).unwrap(), &packed);
}

#[test]
fn segment_ids_pack_as_cu_seqlens_and_either_is_checked() {
    let with = |name, dtype, shape, bytes: &[u8]| {
        let file = problem_with("bias", (name, dtype, shape, bytes));
        file.problem("logits", None).map(|problem| problem.extra.sequences)
    };
    let one = Sequences::Packed(CuSeqlens::new(&[0, 2]).unwrap());
    assert_eq!(with("segment_ids", "U8", "[1,2]", &[1, 1]).unwrap(), one);
    assert_eq!(with("cu_seqlens", "U8", "[2]", &[0, 2]).unwrap(), one);
    let path = "given.safetensors";
    assert_says(with("cu_seqlens", "U8", "[2]", &[1, 2]), path, &["`cu_seqlens[0]`: got 1, expected 0"]);
    assert_says(with("cu_seqlens", "U8", "[1]", &[0]), path, &["`cu_seqlens`: got shape [1], expected [S+1]"]);
    assert_says(with("segment_ids", "U8", "[1,2]", &[2, 1]), path, &["`segment_ids[1]`: got 1, expected at least 2"]);
    assert_says(
        with("segment_ids", "U8", "[2]", &[1, 1]),
        path,
        &["segment_ids", "[2]", "[1, 2], [B,T] of the logits"],
    );
    // Two sequences have two advantages.
    assert_says(with("cu_seqlens", "U8", "[3]", &[0, 1, 2]), path, &["advantages", "[1]", "[2], [S]"]);
}

#[test]
fn kept_ids_of_any_integers_are_read_and_others_refused() {
    let with = |dtype, shape, bytes: &[u8]| {
        let file = problem_with("bias", ("kept_ids", dtype, shape, bytes));
        file.problem("logits", None).map(|problem| problem.extra.kept_ids.unwrap())
    };
    let path = "given.safetensors";
    assert_eq!(with("U8", "[1,2,2]", &[0, 1, 2, 1]).unwrap(), array![[[0, 1], [2, 1]]]);
    let long: Vec<u8> = [-1_i64, i64::MAX].iter().flat_map(|id| id.to_le_bytes()).collect();
    // An id beyond 32 bits is in no vocabulary: under the mask it counts as no entry, and elsewhere it is an error.
    assert_eq!(with("I64", "[1,2,1]", &long).unwrap(), array![[[-1], [-1]]]);
    let said = narrowed_kept_ids(&array![[[1, i64::MAX]]], &array![[true]], 5).unwrap_err().to_string();
    assert!(said.starts_with("`kept_ids[0,0,1]`: got 9223372036854775807, expected 0 ≤ id < V = 5"), "{said}");
    for shape in ["[1,2]", "[2,1,2]", "[1,2,2,1]"] {
        assert_says(
            with("U8", shape, &[0; 4][..if shape == "[1,2]" { 2 } else { 4 }]),
            path,
            &["kept_ids", "[1, 2, K]"],
        );
    }
    assert_says(with("U8", "[1,2,0]", &[]), path, &["kept_ids", "[1, 2, 0]", "K ≥ 1"]);
    assert_says(with("F32", "[1,2,1]", &[0; 8]), path, &["kept_ids", "F32"]);
}

#[test]
fn dlogp_beside_advantages_is_refused() {
    let both = problem_with("bias", ("dlogp", "F32", "[1,2]", &[0; 8]));
    let said = ["tensor `dlogp`: got `advantages` as well", "one of the two"];
    assert_says(both.problem("logits", None), "given.safetensors", &said);
    let alone = problem_with("advantages", ("dlogp", "F32", "[1,2]", &[0; 8]));
    assert!(matches!(alone.problem("logits", None).unwrap().advantages, Advantages::Dlogp(_)));
}

#[test]
fn problem_numbers_are_f32_where_exact_and_f64_where_not() {
    let dir = temp_dir();
    let path = dir.path().join("problem.safetensors");
    let mut given = problem(Dtype::F32);
    given.old_logp.as_mut().unwrap()[[0, 2]] = f64::NEG_INFINITY;
    write_problem(&path, &given, &metadata()).unwrap();
    let held = ProblemFile::open(&path).unwrap();
    let dtype = |name| held.file().info(name).unwrap().0;
    assert_eq!(
        ["advantages", "old_logps", "ref_logps"].map(dtype),
        [
            StoredDtype::F32,
            StoredDtype::F32,
            StoredDtype::F64, // −0.1 is no f32
        ]
    );
    assert_eq!(["ids", "mask", "logits"].map(dtype), [StoredDtype::I64, StoredDtype::U8, StoredDtype::F32]);
    assert_same(&held.problem("logits", Some("old_logps")).unwrap(), &given);
}

#[test]
fn problem_with_strided_logits_is_written_row_major() {
    let dir = temp_dir();
    let path = dir.path().join("strided.safetensors");
    let FloatArray::F32(dense) = ramp3(Dtype::F32) else { unreachable!() };
    let mut strided = dense.clone();
    strided.invert_axis(Axis(2));
    let expected = strided.as_standard_layout().into_owned();
    write_problem(&path, &Problem { logits: strided.into(), ..problem(Dtype::F32) }, &metadata()).unwrap();
    let read = ProblemFile::open(&path).unwrap().problem("logits", None).unwrap().logits;
    assert!(read.is_standard_layout());
    assert_eq!(read, expected.into());
}

/// A small problem file, valid but that the tensor `replaced` gave way to another.
fn problem_with(replaced: &str, by: (&str, &str, &str, &[u8])) -> ProblemFile<Cursor<Vec<u8>>> {
    let valid: [(&str, &str, &str, &[u8]); 10] = [
        ("logits", "F32", "[1,2,3]", &[0; 24]),
        ("ids", "I32", "[1,2]", &[0; 8]),
        ("mask", "U8", "[1,2]", &[1, 0]),
        ("advantages", "F32", "[1]", &[0; 4]),
        ("old_logps", "F32", "[1,2]", &[0; 8]),
        ("ref_logps", "F32", "[1,2]", &[0; 8]),
        ("rollout_logps", "F32", "[1,2]", &[0; 8]),
        ("rollout_weights", "F32", "[1,2]", &[0; 8]),
        ("selected", "U8", "[1,2]", &[1, 0]),
        ("bias", "F32", "[3]", &[0; 12]),
    ];
    ProblemFile::new(tensors(&valid.map(|held| if held.0 == replaced { by } else { held })))
}

#[test]
fn problem_with_a_shape_unlike_its_logits_is_refused_by_name() {
    problem_with("no tensor", ("", "", "", &[])).problem("logits", Some("old_logps")).unwrap();
    let names = ["ids", "mask", "advantages", "old_logps", "ref_logps", "rollout_logps", "rollout_weights", "selected"];
    for name in names {
        for (shape, given) in [("[2,1]", "got shape [2, 1]"), ("[2]", "got shape [2]"), ("[]", "got shape []")] {
            let dtype = if shape == "[]" { "I16" } else { "I8" };
            let held = problem_with(name, (name, dtype, shape, &[1; 2]));
            let field = format!("tensor `{name}`");
            let expected =
                if (name, shape) == ("advantages", "[2]") { "expected [1], [B] of" } else { "[1, 2], [B,T] of" };
            assert_says(held.problem("logits", Some("old_logps")), "given.safetensors", &[&field, given, expected]);
        }
    }
    let of_sequences = problem_with("bias", ("temperature", "F32", "[1]", &1.25_f32.to_le_bytes()));
    let read = of_sequences.problem("logits", None).unwrap();
    assert_eq!(read.extra.temperature, Some(array![[1.25]]));
    let held = problem_with("bias", ("temperature", "F32", "[2]", &[0; 8]));
    assert_says(
        held.problem("logits", None),
        "given.safetensors",
        &["tensor `temperature`", "[2]", "expected [1], [B]"],
    );
    let held = problem_with("bias", ("bias", "F32", "[2]", &[0; 8]));
    assert_says(held.problem("logits", None), "given.safetensors", &["tensor `bias`", "got shape [2]", "[3], [V] of"]);
    let held = problem_with("logits", ("logits", "F32", "[2,3]", &[0; 24]));
    assert!(held.logits_names().is_empty());
    assert_says(held.problem("logits", None), "given.safetensors", &["tensor `logits`", "got shape [2, 3]", "[B,T,V]"]);
}

#[test]
fn problem_with_the_wrong_dtype_is_refused_by_name() {
    let floats = problem_with("ids", ("ids", "F32", "[1,2]", &[0; 8]));
    assert_says(floats.problem("logits", None), "given.safetensors", &["tensor `ids`", "got F32", "expected I64"]);
    let integers = problem_with("logits", ("logits", "I32", "[1,2,3]", &[0; 24]));
    assert_says(integers.problem("logits", None), "given.safetensors", &["tensor `logits`", "got I32", "expected F64"]);
}

#[test]
fn problem_with_a_mask_beyond_0_and_1_is_refused() {
    let held = problem_with("mask", ("mask", "BOOL", "[1,2]", &[1, 2]));
    let refused = held.problem("logits", None);
    assert!(matches!(refused, Err(FixtureError::Problem { reason: ProblemError::Mask { b: 0, t: 1, .. }, .. })));
    assert_says(refused, "given.safetensors", &["`mask[0,1]`: got 2, expected 0 or 1"]);
}

#[test]
fn problem_without_a_tensor_is_refused_by_name() {
    for name in ["logits", "ids", "mask", "advantages", "old_logps"] {
        let held = problem_with(name, ("elsewhere", "U8", "[0]", &[]));
        let parts = [&format!("tensor `{name}`: not in the file"), "expected one of [", "elsewhere"];
        assert_says(held.problem("logits", Some("old_logps")), "given.safetensors", &parts);
    }
    let held = problem_with("ref_logps", ("elsewhere", "U8", "[0]", &[]));
    assert_eq!(held.problem("logits", Some("old_logps")).unwrap().ref_logp, None);
}

fn candidate_of(dtype: Dtype) -> Candidate {
    let per_token = |start| Some(FloatArray::rounded_from(&ramp2(start), dtype));
    Candidate {
        loss: Some(FloatArray::rounded_from(&arr0(1.0 / 3.0), dtype)),
        gradient: ramp3(dtype),
        logp: per_token(-1.0),
        logp_of_others: None,
        entropy: per_token(1.0),
        token_loss: per_token(0.0),
        metrics: Some(Metrics::default()),
    }
}

fn assert_same_outputs(given: &Candidate, expected: &Candidate) {
    assert_eq!(given.loss, expected.loss);
    assert_eq!(given.gradient, expected.gradient);
    assert_eq!(given.logp, expected.logp);
    assert_eq!(given.entropy, expected.entropy);
    assert_eq!(given.token_loss, expected.token_loss);
    assert_eq!(given.metrics, None);
}

#[test]
fn candidate_of_every_dtype_reads_back_unchanged() {
    let dir = temp_dir();
    for dtype in DTYPES {
        let path = dir.path().join(format!("{dtype}.safetensors"));
        let mut given = candidate_of(dtype);
        write_candidate(&path, &given, &metadata()).unwrap();
        assert_same_outputs(&read_candidate(&path).unwrap(), &given);
        assert_eq!(SafetensorsFile::open(&path).unwrap().metadata(), &metadata());

        (given.logp, given.token_loss) = (None, None);
        write_candidate(&path, &given, &metadata()).unwrap();
        assert_same_outputs(&read_candidate(&path).unwrap(), &given);
    }
}

#[test]
fn candidate_loss_of_one_element_is_a_scalar() {
    for (dtype, bytes) in [
        ("F64", &1.5f64.to_le_bytes()[..]),
        ("F32", &1.5f32.to_le_bytes()),
        ("BF16", &[0xc0, 0x3f]),
        ("F16", &[0x00, 0x3e]),
    ] {
        for shape in ["[]", "[1]"] {
            let held = tensors(&[("loss", dtype, shape, bytes), ("dlogits", "F32", "[1,1,1]", &[0; 4])]);
            let loss = candidate::<FloatArray<Ix3>, _>(&held).unwrap().loss.unwrap();
            assert_eq!((loss.value(), loss.dtype().to_string()), (1.5, dtype.to_lowercase()));
        }
    }
}

#[test]
fn candidate_that_is_malformed_is_refused_by_name() {
    let loss = ("loss", "F32", "[1]", &[0; 4][..]);
    let dlogits = ("dlogits", "F32", "[1,1,2]", &[0; 8][..]);
    let refused = |entries: &[_], parts: &[&str]| {
        assert_says(candidate::<FloatArray<Ix3>, _>(&tensors(entries)), "given.safetensors", parts);
    };
    refused(&[loss], &["tensor `dlogits`: not in the file", "[loss]"]);
    refused(&[dlogits], &["tensor `loss`: not in the file", "[dlogits]"]);
    refused(&[("loss", "F32", "[2]", &[0; 8]), dlogits], &["tensor `loss`: got shape [2]", "expected [] or [1]"]);
    refused(&[("loss", "I32", "[1]", &[0; 4]), dlogits], &["tensor `loss`: got I32", "expected F64"]);
    refused(&[loss, ("dlogits", "F32", "[2,1]", &[0; 8])], &["tensor `dlogits`: got shape [2, 1]", "[B,T,V]"]);
    let transposed = ("entropy", "F32", "[2,1]", &[0; 8][..]);
    refused(&[loss, dlogits, transposed], &["tensor `entropy`: got shape [2, 1]", "[1, 1], [B,T] of the dlogits"]);
}

// Writing.

#[test]
fn written_bytes_repeat_and_another_reader_agrees() {
    let dir = temp_dir();
    let paths = ["one", "two"].map(|name| dir.path().join(name));
    for path in &paths {
        write_problem(path, &problem(Dtype::Bf16), &metadata()).unwrap();
    }
    let bytes = fs::read(&paths[0]).unwrap();
    assert_eq!(bytes, fs::read(&paths[1]).unwrap());

    let other = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = other.names();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "advantages",
            "bias",
            "dentropy",
            "ids",
            "kept_ids",
            "logits",
            "mask",
            "old_logps",
            "ref_logps",
            "rollout_logps",
            "rollout_weights",
            "selected",
            "temperature",
            "token_weights"
        ]
    );
    assert_eq!(other.tensor("mask").unwrap().data(), [1, 1, 0, 1, 0, 0]);
    assert_eq!(other.tensor("ids").unwrap().data()[8..16], 4i64.to_le_bytes());
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().clone().unwrap().into_iter().collect::<BTreeMap<_, _>>(), metadata());
}

#[test]
fn write_into_a_missing_folder_leaves_nothing() {
    let dir = temp_dir();
    let path = dir.path().join("missing").join("problem.safetensors");
    let refused = write_problem(&path, &problem(Dtype::F32), &metadata());
    assert!(matches!(&refused, Err(FixtureError::Io { reason, .. }) if reason.kind() == ErrorKind::NotFound));
    assert_says(refused, &path, &["cannot write"]);
    assert_says(write_candidate(&path, &candidate_of(Dtype::F32), &metadata()), &path, &["cannot write"]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
}

#[test]
fn write_that_cannot_be_renamed_leaves_nothing() {
    let dir = temp_dir();
    let path = dir.path().join("a_folder");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("kept"), "").unwrap();
    assert_says(write_problem(&path, &problem(Dtype::F32), &metadata()), &path, &["cannot write"]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn written_file_is_as_readable_as_any_other() {
    use std::os::unix::fs::PermissionsExt;
    let dir = temp_dir();
    let (ours, plain) = (dir.path().join("ours"), dir.path().join("plain"));
    write_problem(&ours, &problem(Dtype::F32), &metadata()).unwrap();
    fs::write(&plain, "").unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(ours), mode(plain));
}

// Recorded runs.

#[test]
fn recorded_files_have_the_shapes_and_metadata_of_their_readme() {
    for (name, [b, t], logits_names, n_tokens) in [
        ("qwen_tiny.safetensors", [2, 4], vec!["logits", "logits_f32"], 7),
        ("qwen_gsm8k.safetensors", [4, 16], vec!["logits"], 37),
    ] {
        let held = ProblemFile::open(recorded(name)).unwrap();
        assert_eq!(held.logits_names(), logits_names);
        assert_eq!(held.old_logp_names(), ["old_logps", "old_logps_stale"]);
        assert_eq!(held.metadata()["expected.logits.n_tokens"], n_tokens.to_string());
        assert_eq!(held.file().info("hidden").unwrap(), (StoredDtype::F32, &[b, t, 896][..]));
        for logits in logits_names {
            let read = held.problem(logits, Some("old_logps_stale")).unwrap();
            assert_eq!(read.logits.shape(), [b, t, 151_936]);
            assert_eq!(read.logits.dtype(), if logits == "logits" { Dtype::Bf16 } else { Dtype::F32 });
            assert_eq!(read.mask.iter().filter(|&&counts| counts).count(), n_tokens);
            assert_eq!(read.advantages.shape(), [b]);
            assert!(read.ref_logp.is_some());
            read.check(&assay::spec::LossSpec::default()).unwrap();
        }
    }
}

#[test]
fn recorded_logp_follows_from_the_logits_read() {
    let held = ProblemFile::open(recorded("qwen_tiny.safetensors")).unwrap();
    for logits in held.logits_names() {
        let read = held.problem(logits, None).unwrap();
        let expected = held.file().numbers::<Ix2>(&format!("expected_logp_of_{logits}")).unwrap();
        let logits = read.logits.to_f64();
        for ((b, t), expected) in expected.indexed_iter() {
            let row = logits.index_axis(Axis(0), b).index_axis_move(Axis(0), t).to_vec();
            let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
            let logp = row[usize::try_from(read.ids[[b, t]]).unwrap()] - lse;
            assert!((logp - expected).abs() < 1e-9, "[{b},{t}]: {logp} against {expected}");
        }
    }
}

#[test]
fn recorded_files_match_their_manifest() {
    for name in ["qwen_tiny.safetensors", "qwen_gsm8k.safetensors"] {
        assert_eq!(verify(recorded(name)).unwrap(), Verified::Matches);
    }
    assert_eq!(verify(recorded("README.md")).unwrap(), Verified::NotListed);
}

#[test]
fn changed_copy_is_refused_with_both_hashes() {
    let dir = temp_dir();
    let name = "qwen_gsm8k.safetensors";
    let path = dir.path().join(name);
    let mut bytes = fs::read(recorded(name)).unwrap();
    fs::write(&path, &bytes).unwrap();
    assert_eq!(verify(&path).unwrap(), Verified::NotListed);
    fs::copy(recorded("manifest.toml"), dir.path().join("manifest.toml")).unwrap();
    assert_eq!(verify(&path).unwrap(), Verified::Matches);

    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let listed = "expected 2597e94a1449e811da696c51ea4ba406d5ecd2983e00a4a7b52999de086f9694";
    assert_says(verify(&path), &path, &["sha256: got ", listed]);
    fs::write(&path, &bytes[..last]).unwrap();
    assert_says(verify(&path), &path, &["bytes: got 19688311", "expected 19688312"]);
    fs::remove_file(&path).unwrap();
    assert_says(verify(&path), &path, &["cannot read"]);
}

#[test]
fn malformed_manifest_is_refused_with_its_line() {
    let dir = temp_dir();
    let manifest = dir.path().join("manifest.toml");
    for (text, parts) in [
        ("\n[[file]\nname = \"a.safetensors\"", ["line 2: got ", "expected `[[file]]` tables"]),
        (
            "[[file]]\nname = 1 # a.safetensors\n",
            ["line 2: got invalid type: integer `1`", "expected `[[file]]` tables"],
        ),
        ("[[file]]\nname = \"a.safetensors\"\n", ["line 1: got missing field `bytes`", "expected `[[file]]` tables"]),
    ] {
        fs::write(&manifest, text).unwrap();
        assert_says(verify(dir.path().join("a.safetensors")), &manifest, &parts);
    }
}

#[test]
fn manifest_of_something_else_says_nothing_of_a_file() {
    let dir = temp_dir();
    fs::write(dir.path().join("manifest.toml"), "[package]\nname = \"someone's\"\n").unwrap();
    assert_eq!(verify(dir.path().join("a.safetensors")).unwrap(), Verified::NotListed);
}

// Random damage.

/// One change to a file. Half of the places lie in its first 64 bytes, where lengths and the first entry are.
#[derive(Clone, Debug)]
enum Damage {
    Flip(Index, bool, u8),
    Insert(Index, bool, u8),
    Truncate(Index),
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let place = |at: &Index, early: bool, len: usize| at.index(if early { len.min(64) } else { len });
        match self {
            Damage::Flip(at, early, bits) if !bytes.is_empty() => {
                let at = place(at, *early, bytes.len());
                bytes[at] ^= bits;
            }
            Damage::Flip(..) => {}
            Damage::Insert(at, early, byte) => bytes.insert(place(at, *early, bytes.len() + 1), *byte),
            Damage::Truncate(at) => bytes.truncate(at.index(bytes.len() + 1)),
        }
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let json = prop::sample::select(&b"0123456789-.eE{}[],:\"\\ \n"[..]);
    prop_oneof![
        4 => (any::<Index>(), any::<bool>(), any::<u8>()).prop_map(|(at, early, bits)| Damage::Flip(at, early, bits)),
        4 => (any::<Index>(), any::<bool>(), json).prop_map(|(at, early, byte)| Damage::Insert(at, early, byte)),
        1 => any::<Index>().prop_map(Damage::Truncate),
    ]
}

/// Reads all there is, in every way there is. Errors are fine.
fn read_everything(held: InMemory, file_len: usize) {
    for name in held.names() {
        let (dtype, shape) = held.info(name).unwrap();
        assert!(shape.iter().product::<usize>() * dtype.bitsize() / 8 <= file_len, "{name}: {dtype} {shape:?}");
        let _ = held.floats::<IxDyn>(name);
        let _ = held.numbers::<IxDyn>(name);
        let _ = held.integers::<IxDyn>(name);
    }
    let _ = candidate::<FloatArray<Ix3>, _>(&held);
    let held = ProblemFile::new(held);
    for logits in held.logits_names() {
        for old_logp in held.old_logp_names() {
            let _ = held.problem(logits, Some(old_logp));
        }
    }
}

fn small_files() -> [Vec<u8>; 2] {
    let dir = temp_dir();
    let paths = ["problem", "candidate"].map(|name| dir.path().join(name));
    write_problem(&paths[0], &problem(Dtype::Bf16), &metadata()).unwrap();
    write_candidate(&paths[1], &candidate_of(Dtype::F32), &metadata()).unwrap();
    paths.map(|path| fs::read(path).unwrap())
}

proptest! {
    #![proptest_config(assay_suites::cases::config(4096))]

    #[test]
    fn damaged_file_never_panics_and_agrees_with_another_reader(
        mut bytes in prop::sample::select(small_files().to_vec()),
        damages in prop::collection::vec(damage(), 0..4),
        header_kept in any::<bool>(),
    ) {
        for damage in &damages {
            damage.apply(&mut bytes);
        }
        if header_kept && let Some(end) = bytes.windows(3).rposition(|end| end == b"}} ".as_slice()) {
            // Gives back a length that fits, so that damage inside the header gets past the prefix.
            let padding = bytes[end + 2..].iter().take_while(|&&byte| byte == b' ').count();
            let len = (end + 2 + padding).saturating_sub(8) as u64;
            bytes[..8].copy_from_slice(&len.to_le_bytes());
        }
        if let Ok(held) = open(bytes.clone()) {
            prop_assert!(SafeTensors::deserialize(&bytes).is_ok());
            read_everything(held, bytes.len());
        }
    }
}
