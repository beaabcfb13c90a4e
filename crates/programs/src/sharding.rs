//! The distribution of a batch over devices.

use assay_core::problem::Shape;

use crate::mesh::Mesh;

/// The axes along which logits are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// A device holds all of them.
    Whole,
    /// Each device holds some rows.
    Rows,
    /// Some columns of every row.
    Vocab,
    /// Some columns of some rows.
    RowsAndVocab,
}

impl Sharding {
    /// All ways of distributing logits.
    pub const ALL: [Sharding; 4] = [Sharding::Whole, Sharding::Rows, Sharding::Vocab, Sharding::RowsAndVocab];

    /// The mesh that `devices` make for a batch of `shape`.
    ///
    /// # Errors
    /// The counts that would do.
    pub fn mesh(self, shape: Shape, devices: usize) -> Result<Mesh, String> {
        // Sequences stay whole as far as the devices divide the batch; the rest of them cut the tokens.
        let rows = |devices: usize| {
            let batch = greatest_common_divisor(shape.batch, devices);
            (batch, devices / batch)
        };
        let power_of_two = devices.is_power_of_two();
        match self {
            Sharding::Whole if devices == 1 => Ok(Mesh::ONE),
            Sharding::Whole => Err("1".into()),
            Sharding::Rows | Sharding::Vocab if !power_of_two => Err("powers of two".into()),
            Sharding::Rows => {
                let (batch, tokens) = rows(devices);
                if tokens > shape.tokens {
                    return Err(format!("at most {} for {shape}", batch * shape.tokens));
                }
                Ok(Mesh { batch, tokens, vocab: 1 })
            }
            Sharding::Vocab if devices > shape.vocab => Err(format!("at most {} for {shape}", shape.vocab)),
            Sharding::Vocab => Ok(Mesh { batch: 1, tokens: 1, vocab: devices }),
            Sharding::RowsAndVocab if !power_of_two || devices < 4 => Err("4, 8 and larger powers of two".into()),
            Sharding::RowsAndVocab => {
                let (batch, tokens) = rows(devices / 2);
                if tokens > shape.tokens || shape.vocab < 2 {
                    return Err(format!("at most {} for {shape}", batch * shape.tokens * shape.vocab.min(2)));
                }
                Ok(Mesh { batch, tokens, vocab: 2 })
            }
        }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
