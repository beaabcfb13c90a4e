//! Seeded mutants of valid files: bit flips, truncations, splices, and numbers at their extremes.

use std::env;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::entries::{ENTRIES, Entry, valid_bytes};
use super::kinds::Format;
use super::sandbox::{Content, Ends, Trial};

/// The seed of all mutants, unless another is given.
const SEED: u64 = 57;

/// Returns the seed that the environment gives.
pub(super) fn seed() -> Option<u64> {
    env::var("ASSAY_HOSTILE_SEED").ok()?.parse().ok()
}

/// The entries whose files are mutated, each with how often it is taken among a hundred mutants.
const WEIGHTS: &[(&str, usize)] = &[
    ("spec --spec .yaml", 12),
    ("spec --spec .toml", 6),
    ("spec --spec .json", 4),
    ("metrics --problem", 8),
    ("judge --candidate", 4),
    ("judge --problem", 4),
    ("judge SUITE", 4),
    ("judge --candidates", 2),
    ("replay", 4),
    ("manifest.toml beside a problem", 3),
    ("replay --impl file:", 4),
    ("check --repros", 2),
    ("peers FILE", 8),
    ("report of judge", 3),
    ("report of check", 4),
    ("report of peers", 2),
    ("train --config", 3),
    ("a run's checkpoint", 5),
    ("a run's journal", 4),
    ("record: config.json", 3),
    ("record: tokenizer.json", 2),
    ("record: weights", 2),
    ("record: GGUF", 6),
    ("record --prompts", 1),
];

/// Numbers at the edges of their types, as text has them.
const NUMBERS: &[&str] = &[
    "0",
    "-0",
    "-1",
    "1",
    "2",
    "127",
    "255",
    "256",
    "65536",
    "2147483647",
    "2147483648",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e309",
    "-1e308",
    "5e-324",
    "1e-400",
    "0.1",
    "NaN",
    "inf",
    "null",
    "1000000",
    "99999999999999999999999999999999999999",
];

/// Bytes that text formats give a meaning to, or which drive a terminal.
const BYTES: &[u8] = b"\0\n\r\t \"'{}[]:,#&*!|>%@`\\-.0e\x1b\x7f\x80\x9b\xc2\xff";

/// The mutant with number `i`.
pub(super) fn trial(i: u64) -> Trial {
    let mut rng = ChaCha8Rng::seed_from_u64(seed().unwrap_or(SEED).wrapping_mul(1 << 32).wrapping_add(i));
    let entry = entry_of(usize::try_from(i % 100).unwrap());
    let valid = valid_bytes(entry.file);
    let mut bytes = valid.to_vec();
    for _ in 0..rng.random_range(1..=3) {
        mutate(&mut bytes, entry.format, &mut rng);
    }
    // Half of the changed headers get a length that fits, or all would end at the same error.
    if entry.format == Format::Safetensors && rng.random_bool(0.5) {
        mend_length(&mut bytes);
    }
    // A checkpoint has a hash: no other bytes are taken for it.
    let ends = if entry.name == "a run's checkpoint" && bytes != valid { Ends::Refused } else { entry.ends };
    entry.trial("mutants", format!("mutant {i}"), Content::of(bytes), ends)
}

fn entry_of(mut at: usize) -> &'static Entry {
    let total: usize = WEIGHTS.iter().map(|(_, weight)| weight).sum();
    assert_eq!(total, 100);
    for (name, weight) in WEIGHTS {
        if at < *weight {
            return ENTRIES.iter().find(|entry| entry.name == *name).expect(name);
        }
        at -= weight;
    }
    unreachable!("the weights are a hundred")
}

fn mutate(bytes: &mut Vec<u8>, format: Format, rng: &mut ChaCha8Rng) {
    if bytes.is_empty() {
        return bytes.extend_from_slice(b"{}");
    }
    // Headers are what is parsed: most changes are in the first bytes.
    let reach = if rng.random_bool(0.7) { bytes.len().min(2048) } else { bytes.len() };
    let at = rng.random_range(0..reach);
    let end = (at + rng.random_range(1..64)).min(bytes.len());
    let is_binary = matches!(format, Format::Safetensors | Format::Gguf);
    match rng.random_range(0..8) {
        0 => bytes[at] ^= 1 << rng.random_range(0..8),
        1 => bytes[at] = BYTES[rng.random_range(0..BYTES.len())],
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..end)),
        4 => {
            let copy = bytes[at..end].to_vec();
            let to = rng.random_range(0..=bytes.len());
            bytes.splice(to..to, copy);
        }
        // A piece of another valid file.
        5 => {
            let other = valid_bytes(entry_of(rng.random_range(0..100)).file);
            let from = rng.random_range(0..other.len());
            let piece = &other[from..(from + rng.random_range(1..200)).min(other.len())];
            bytes.splice(at..at, piece.iter().copied());
        }
        // A number of 4 or 8 bytes.
        6 if is_binary && at + 8 <= bytes.len() => {
            let number = [0, 1, 0x7f, 0xff, 1 << 31, u64::from(u32::MAX), 1 << 32, (1 << 63) - 1, 1 << 63, u64::MAX]
                [rng.random_range(0..10)];
            let width = if rng.random_bool(0.5) { 4 } else { 8 };
            bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
        }
        // The next number in text.
        _ => {
            let Some(start) = (at..bytes.len()).find(|&i| bytes[i].is_ascii_digit()) else { return };
            let is_part = |byte: &u8| byte.is_ascii_digit() || b".eE+-".contains(byte);
            let stop = start + bytes[start..].iter().take_while(|byte| is_part(byte)).count();
            bytes.splice(start..stop, NUMBERS[rng.random_range(0..NUMBERS.len())].bytes());
        }
    }
}

fn mend_length(bytes: &mut [u8]) {
    if let Some(brace) = bytes.windows(2).position(|pair| pair == b"}}" || pair == b"} ").filter(|at| *at >= 8) {
        let end = brace + 1 + bytes[brace + 1..].iter().take_while(|byte| b"} ".contains(byte)).count();
        bytes[..8].copy_from_slice(&((end - 8) as u64).to_le_bytes());
    }
}
