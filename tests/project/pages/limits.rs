//! The page of limits: what each implementation takes, asked of it.

use std::sync::Arc;

use assay::implementation::{Implementation, Workload};
use assay::problem::{Dtype, HeadShape, Shape};
use assay::registry::{head_registry, registry};
use assay::spec::LossSpec;

use super::{WRITTEN, hold};

const FILE: &str = "docs/limits.md";

/// The largest vocabulary and number of tokens that are asked for.
const LARGEST: usize = 1 << 31;

#[test]
fn pages_limits_are_those_of_the_implementations() {
    let mut text = format!("# Limits\n\n{WRITTEN}\n\n{HEAD}");
    let (shape, mut rows) = (|tokens, vocab| Shape { batch: 8, tokens, vocab }, Vec::new());
    for each in registry(None) {
        row(&mut rows, &each, shape);
    }
    text += &table(rows);
    text += "\n## With an LM head\n\nAsked with hidden states of 896 units.\n\n";
    let (shape, mut rows) = (|tokens, vocab| HeadShape { batch: 8, tokens, hidden: 896, vocab }, Vec::new());
    for each in head_registry(None) {
        row(&mut rows, &each, shape);
    }
    text += &table(rows);
    text += FILES;
    hold(FILE, &text);
}

/// The heading of a table.
const COLUMNS: &str =
    "| implementation | dtypes | devices | largest V in f32 | in bf16 | most tokens |\n|---|---|---|--:|--:|--:|\n";

/// Writes the row of one implementation; neighbours of one class that take the same share it.
fn row<P: Workload>(
    rows: &mut Vec<(String, String)>,
    each: &Arc<dyn Implementation<P>>,
    shape: impl Fn(usize, usize) -> P::Shape,
) {
    let spec = LossSpec::default();
    let takes = |shape: P::Shape, dtype: Dtype, devices: usize| each.supports(&spec, shape, dtype, devices).is_ok();
    // The smallest shape that eight devices can cut in any way.
    let plain = || shape(8, 1024);
    let devices: Vec<usize> =
        [1, 2, 4, 8].into_iter().filter(|&n| Dtype::KERNEL.iter().any(|&d| takes(plain(), d, n))).collect();
    let fewest = devices.first().copied().unwrap_or(1);
    let dtypes = Dtype::KERNEL.into_iter().filter(|&dtype| takes(plain(), dtype, fewest));
    let dtypes: Vec<String> = dtypes.map(|dtype| dtype.to_string()).collect();
    let devices: Vec<String> = devices.iter().map(ToString::to_string).collect();
    let vocab = |dtype| most(|vocab| takes(shape(8, vocab), dtype, fewest));
    // Tokens come in batches of eight sequences.
    let tokens = most(|tokens| takes(shape(tokens, 1024), Dtype::F32, fewest));
    let tokens = if tokens == LARGEST { words(tokens) } else { words(8 * tokens) };
    let (f32, bf16) = (words(vocab(Dtype::F32)), words(vocab(Dtype::Bf16)));
    let takes = format!("{} | {} | {f32} | {bf16} | {tokens} |", dtypes.join(", "), devices.join(", "));
    match rows.last_mut() {
        Some((ids, last)) if *last == takes => *ids += &format!(", `{}`", each.id()),
        _ => rows.push((format!("`{}`", each.id()), takes)),
    }
}

fn table(rows: Vec<(String, String)>) -> String {
    rows.iter().fold(COLUMNS.to_string(), |text, (ids, takes)| text + &format!("| {ids} | {takes}\n"))
}

/// Returns the largest size that is taken; sizes up to it are, and none of those above it.
fn most(takes: impl Fn(usize) -> bool) -> usize {
    // A vocabulary or a sequence is cut over eight devices: steps are of eight.
    let (mut low, mut high) = (0, LARGEST / 8);
    if takes(LARGEST) {
        return LARGEST;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if takes(8 * middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    8 * low
}

fn words(size: usize) -> String {
    // Offsets of 32 bits end the others.
    match size {
        LARGEST => return "no limit".into(),
        _ if size > LARGEST - 128 => return "2³¹".into(),
        _ => {}
    }
    let digits = size.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap()).collect();
    groups.join(",")
}

/// The beginning of the page.
const HEAD: &str = "\
For everybody who asks whether a size can be computed at all: each implementation with the dtypes, the numbers of devices, the vocabulary and
the tokens that it takes. *No limit* means at least 2³¹, and 2³¹ that offsets have 32 bits. A limit of memory comes before most of these: a
problem of `[B,T,V]` in f32 takes 4·B·T·V bytes, and judging it a few times as many in f64, a row at a time. Sizes are asked in steps of
eight.

What an implementation does not take is an error that names the limit. `assay list` says which implementations run on this machine, and
[platforms and plugins](commands.md#devices-and-plugins) what they need.

## On logits

";

/// The limits of the judge and of files.
const FILES: &str = "
## The judge, files and campaigns

| what | limit |
|---|---|
| the judge and the reference: V, T, B, H | memory alone |
| dtypes of logits in files | f64, f32, bf16, f16; kernels get no f64 |
| one line of a worker | 64 KiB |
| a document for `--into` | 1 MiB |
| threads in `RAYON_NUM_THREADS`, or `threads` of training settings | 4,096 |
";
