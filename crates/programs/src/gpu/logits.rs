//! Logits as a kernel for GPUs reads and writes them: elements and blocks of 16 bytes, widened to f32 in pairs.

use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PackedFloat, PtxAddress, PtxBuilder, PtxValue};

/// The size of a block in bytes.
pub(crate) const BLOCK: u32 = 16;

/// The bytes that an array begins at a multiple of where each of its elements, f32 or i32, is read alone.
pub(crate) const SCALAR: u64 = 4;
/// Two neighbouring elements, on which a B200 computes at once.
pub(crate) type FloatPair = [PtxValue<f32>; 2];

/// The storage format of logits in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogitsFormat {
    F32,
    Packed(PackedFloat),
}

impl LogitsFormat {
    pub(crate) fn from_dtype(dtype: DeviceDtype) -> Self {
        match dtype {
            DeviceDtype::F32 => Self::F32,
            DeviceDtype::Bf16 => Self::Packed(PackedFloat::Bf16),
            DeviceDtype::F16 => Self::Packed(PackedFloat::F16),
            other => unreachable!("logits of {other}"),
        }
    }

    pub(crate) fn size(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::Packed(_) => 2,
        }
    }

    /// Returns the number of elements in a block.
    pub(crate) fn per_block(self) -> u32 {
        BLOCK / self.size()
    }

    /// The bytes that an array of rows of `vocab` logits begins at a multiple of: a block where rows are whole
    /// blocks, which are then read and written as such from the first byte on; else an element, because blocks are
    /// found by the addresses of rows.
    pub(crate) fn alignment(self, vocab: usize) -> u64 {
        let whole = (vocab * self.size() as usize).is_multiple_of(BLOCK as usize);
        u64::from(if whole { BLOCK } else { self.size() })
    }

    /// The bytes that an array of `vocab` biases, f32, begins at a multiple of: a block where those of a block of
    /// logits are read by blocks, which is where rows are whole blocks; else one bias.
    pub(crate) fn alignment_of_biases(self, vocab: usize) -> u64 {
        if self.alignment(vocab) == u64::from(BLOCK) { u64::from(BLOCK) } else { SCALAR }
    }

    /// Reads one element and widens it.
    pub(crate) fn load(self, on: &mut PtxBuilder, from: PtxAddress) -> PtxValue<f32> {
        match self {
            Self::F32 => on.load(from),
            Self::Packed(packed) => {
                let x = on.load(from);
                on.widen(packed, x)
            }
        }
    }

    /// Rounds one element and writes it.
    pub(crate) fn store(self, on: &mut PtxBuilder, to: PtxAddress, x: impl Into<PtxValue<f32>>) {
        let x = x.into();
        match self {
            Self::F32 => on.store(to, x),
            Self::Packed(packed) => {
                let x = on.narrow(packed, x);
                on.store(to, x);
            }
        }
    }

    /// Copies one element from `from` to `to`, bit by bit.
    pub(crate) fn copy(self, on: &mut PtxBuilder, to: PtxAddress, from: PtxAddress) {
        match self {
            Self::F32 => {
                let x: PtxValue<u32> = on.load(from);
                on.store(to, x);
            }
            Self::Packed(_) => {
                let x: PtxValue<u16> = on.load(from);
                on.store(to, x);
            }
        }
    }

    /// The elements of a block, in f32, by two.
    pub(crate) fn load_block(self, on: &mut PtxBuilder, from: PtxAddress) -> Vec<FloatPair> {
        match self {
            Self::F32 => {
                let [a, b, c, d] = on.load_all(from);
                vec![[a, b], [c, d]]
            }
            Self::Packed(packed) => {
                let words: [PtxValue<u32>; 4] = on.load_all(from);
                words.into_iter().map(|word| on.unpack(packed, word)).collect()
            }
        }
    }

    /// A block's elements as they are stored, each rounded to nearest even.
    pub(crate) fn pack_block(self, on: &mut PtxBuilder, values: &[FloatPair]) -> [PtxValue<u32>; 4] {
        std::array::from_fn(|word| match self {
            Self::F32 => on.bits(values[word / 2][word % 2]),
            Self::Packed(packed) => {
                let [low, high] = values[word];
                on.pack(packed, low, high)
            }
        })
    }

    /// A word of the lowest finite number.
    pub(crate) fn lowest(self) -> u32 {
        let twice = |bits: u16| u32::from(bits) << 16 | u32::from(bits);
        match self {
            Self::F32 => f32::MIN.to_bits(),
            Self::Packed(PackedFloat::Bf16) => twice(half::bf16::MIN.to_bits()),
            Self::Packed(PackedFloat::F16) => twice(half::f16::MIN.to_bits()),
        }
    }

    /// Returns the larger of each pair of elements in two words.
    pub(crate) fn max_words(self, on: &mut PtxBuilder, a: PtxValue<u32>, b: PtxValue<u32>) -> PtxValue<u32> {
        match self {
            Self::F32 => {
                let (a, b) = (on.float_from_bits(a), on.float_from_bits(b));
                let max = on.max(a, b);
                on.bits(max)
            }
            Self::Packed(packed) => on.max_packed(packed, a, b),
        }
    }

    /// The largest element of a word.
    pub(crate) fn max_of_word(self, on: &mut PtxBuilder, word: PtxValue<u32>) -> PtxValue<f32> {
        match self {
            Self::F32 => on.float_from_bits(word),
            Self::Packed(packed) => {
                let [low, high] = on.unpack(packed, word);
                on.max(low, high)
            }
        }
    }
}
