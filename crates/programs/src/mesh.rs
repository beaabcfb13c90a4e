//! Devices as a grid, and arrays cut along its axes.

use std::ops::Range;

/// An axis of the mesh, and the axis of `[B,T,V]` that is cut along it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeshAxis {
    /// The axis along which sequences are distributed.
    Batch,
    /// The axis along which a sequence's tokens are distributed.
    Tokens,
    /// The axis along which the vocabulary is distributed.
    Vocab,
}

impl MeshAxis {
    const ALL: [MeshAxis; 3] = [MeshAxis::Batch, MeshAxis::Tokens, MeshAxis::Vocab];

    /// The axes that distribute rows.
    pub(crate) const ROWS: [MeshAxis; 2] = [MeshAxis::Batch, MeshAxis::Tokens];
}

/// A grid of devices, numbered row-major over (batch, tokens, vocab).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mesh {
    /// Parts that the batch is cut into.
    pub batch: usize,
    /// Parts that each sequence is cut into.
    pub tokens: usize,
    /// Parts that the vocabulary is cut into.
    pub vocab: usize,
}

impl Mesh {
    /// A mesh of one device.
    pub const ONE: Mesh = Mesh { batch: 1, tokens: 1, vocab: 1 };

    /// Returns the number of devices in the grid.
    pub fn devices(self) -> usize {
        self.batch * self.tokens * self.vocab
    }

    /// Returns the number of devices along an axis.
    pub fn extent(self, axis: MeshAxis) -> usize {
        match axis {
            MeshAxis::Batch => self.batch,
            MeshAxis::Tokens => self.tokens,
            MeshAxis::Vocab => self.vocab,
        }
    }

    /// Returns the difference between the numbers of two devices that are neighbours along an axis.
    pub fn stride(self, axis: MeshAxis) -> usize {
        match axis {
            MeshAxis::Batch => self.tokens * self.vocab,
            MeshAxis::Tokens => self.vocab,
            MeshAxis::Vocab => 1,
        }
    }

    /// Returns the coordinate of a device along an axis.
    pub fn coordinate(self, device: usize, axis: MeshAxis) -> usize {
        device / self.stride(axis) % self.extent(axis)
    }

    /// The groups of devices that differ along `axes` only, each in order: who takes part in a collective over `axes`.
    pub fn groups(self, axes: &[MeshAxis]) -> Vec<Vec<usize>> {
        let fixed = |device: usize| -> Vec<usize> {
            MeshAxis::ALL
                .into_iter()
                .filter(|axis| !axes.contains(axis))
                .map(|axis| self.coordinate(device, axis))
                .collect()
        };
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for device in 0..self.devices() {
            match groups.iter_mut().find(|group| fixed(group[0]) == fixed(device)) {
                Some(group) => group.push(device),
                None => groups.push(vec![device]),
            }
        }
        groups
    }
}

/// Part `index` of `extent` cut into parts of `length`; the last ones may be shorter, or empty.
pub fn shard(extent: usize, length: usize, index: usize) -> Range<usize> {
    (index * length).min(extent)..((index + 1) * length).min(extent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_hold_every_device_once_and_follow_their_axes() {
        let mesh = Mesh { batch: 2, tokens: 1, vocab: 4 };
        assert_eq!(mesh.groups(&[MeshAxis::Vocab]), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(mesh.groups(&[MeshAxis::Batch]), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(mesh.groups(&[MeshAxis::Batch, MeshAxis::Tokens, MeshAxis::Vocab]), [[0, 1, 2, 3, 4, 5, 6, 7]]);
        assert_eq!(mesh.groups(&[]).len(), 8);
    }

    #[test]
    fn shards_cover_the_extent_once_in_order() {
        for extent in 1_usize..40 {
            for parts in [1, 2, 4, 8] {
                let length = extent.div_ceil(parts);
                let covered: Vec<usize> = (0..parts).flat_map(|index| shard(extent, length, index)).collect();
                assert_eq!(covered, (0..extent).collect::<Vec<_>>(), "{extent} in {parts}");
            }
        }
    }
}
