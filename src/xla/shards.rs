//! A batch cut over a mesh, and put together again.

use std::ops::Range;

use bytemuck::Pod;
use ndarray::{Array2, Ix3};

use super::program::local_shape;
use crate::element::{ArrayBytes, Element};
use crate::memory::expect_room;
use crate::problem::{FloatArray, Shape};
use crate::runtime::{Axis, Buffer, Client, Executable, Mesh, RuntimeError, shard};

/// A batch of `shape` over the devices of `mesh`.
pub(super) struct Shards {
    pub(super) shape: Shape,
    pub(super) mesh: Mesh,
    pub(super) client: Client,
}

/// What one device holds; the rest of its local shape is padding.
pub(super) struct Part {
    pub(super) batch: Range<usize>,
    pub(super) tokens: Range<usize>,
    pub(super) vocab: Range<usize>,
}

const DENSE: &str = "checked: dense row-major";

impl Shards {
    /// What `device` holds.
    pub(super) fn part(&self, device: usize) -> Part {
        let along = |axis, extent| shard(extent, self.mesh.extent(axis), self.mesh.coordinate(device, axis));
        Part {
            batch: along(Axis::Batch, self.shape.batch),
            tokens: along(Axis::Tokens, self.shape.tokens),
            vocab: along(Axis::Vocab, self.shape.vocab),
        }
    }

    /// Whether the devices share this machine's memory.
    pub(super) fn on_host(&self) -> bool {
        self.client.platform() == "cpu"
    }

    /// Bytes that one run takes of a device's memory, or of all devices' where they share it; 0 where the plugin does
    /// not count.
    pub(super) fn bytes_needed(&self, executable: &Executable) -> usize {
        let sharers = if self.on_host() { self.mesh.devices() } else { 1 };
        let peak = executable.memory().map_or(0, |memory| memory.peak_bytes());
        usize::try_from(peak).unwrap_or(0).saturating_mul(sharers)
    }

    /// Checks that one run fits in what every device has left.
    pub(super) fn expect_room(&self, executable: &Executable) -> Result<(), RuntimeError> {
        let what = || format!("the program for {} on {} device(s)", self.shape, self.mesh.devices());
        Ok(expect_room(what, self.bytes_needed(executable), self.client.available_bytes(0))?)
    }

    /// The runs of consecutive elements that a part shares with the whole: `(offset in the whole, offset in the part,
    /// length)`.
    fn runs(&self, part: &Part) -> impl Iterator<Item = (usize, usize, usize)> {
        let Shape { tokens, vocab, .. } = self.shape;
        let [_, local_tokens, local_vocab] = local_shape(self.shape, self.mesh);
        let Part { batch, tokens: part_tokens, vocab: columns } = part;
        let (first_row, first_token) = (batch.start, part_tokens.start);
        let columns = columns.clone();
        let rows = batch.clone().flat_map({
            let part_tokens = part_tokens.clone();
            move |b| part_tokens.clone().map(move |t| (b, t))
        });
        rows.map(move |(b, t)| {
            let whole = (b * tokens + t) * vocab + columns.start;
            let local = ((b - first_row) * local_tokens + (t - first_token)) * local_vocab;
            (whole, local, columns.len())
        })
    }

    pub(super) fn upload_logits(&self, device: usize, logits: &FloatArray<Ix3>) -> Result<Buffer, RuntimeError> {
        let element = Element::from(logits.dtype());
        let local = local_shape(self.shape, self.mesh);
        if self.mesh.devices() == 1 {
            return self.client.upload(device, element, &local, logits.bytes());
        }
        // All bits set is a NaN in every float type: padding that enters a result shows.
        let mut bytes = vec![0xFF; local.iter().product::<usize>() * element.size()];
        for (whole, part, length) in self.runs(&self.part(device)) {
            let [whole, part, length] = [whole, part, length].map(|elements| elements * element.size());
            bytes[part..part + length].copy_from_slice(&logits.bytes()[whole..whole + length]);
        }
        self.client.upload(device, element, &local, &bytes)
    }

    /// Writes a device's dlogits to their place in the whole.
    pub(super) fn download_logits(
        &self,
        device: usize,
        buffer: &Buffer,
        whole: &mut FloatArray<Ix3>,
    ) -> Result<(), RuntimeError> {
        let element = Element::from(whole.dtype());
        let local = local_shape(self.shape, self.mesh);
        if self.mesh.devices() == 1 {
            return buffer.download(element, &local, whole.bytes_mut());
        }
        let mut bytes = vec![0; local.iter().product::<usize>() * element.size()];
        buffer.download(element, &local, &mut bytes)?;
        let target = whole.bytes_mut();
        for (whole, part, length) in self.runs(&self.part(device)) {
            let [whole, part, length] = [whole, part, length].map(|elements| elements * element.size());
            target[whole..whole + length].copy_from_slice(&bytes[part..part + length]);
        }
        Ok(())
    }

    /// Sends a device its part of a `[B,T]` array, with `padding` in the tokens past `B` and `T`.
    pub(super) fn upload_per_token<P: Pod>(
        &self,
        device: usize,
        element: Element,
        values: &Array2<P>,
        padding: P,
    ) -> Result<Buffer, RuntimeError> {
        let [b, t, _] = local_shape(self.shape, self.mesh);
        let part = self.part(device);
        let local = Array2::from_shape_fn((b, t), |(b, t)| {
            let (b, t) = (part.batch.start + b, part.tokens.start + t);
            if part.batch.contains(&b) && part.tokens.contains(&t) { values[[b, t]] } else { padding }
        });
        self.client.upload(device, element, &[b, t], bytemuck::cast_slice(local.as_slice().expect(DENSE)))
    }

    /// A `[B,T]` array from the devices that hold the first columns.
    pub(super) fn download_per_token<'b>(
        &self,
        buffer: impl Fn(usize) -> Result<&'b Buffer, RuntimeError>,
    ) -> Result<Array2<f32>, RuntimeError> {
        let [b, t, _] = local_shape(self.shape, self.mesh);
        let mut whole = Array2::zeros((self.shape.batch, self.shape.tokens));
        let mut local = vec![0.0_f32; b * t];
        let holders = (0..self.mesh.devices()).filter(|&device| self.mesh.coordinate(device, Axis::Vocab) == 0);
        for device in holders {
            buffer(device)?.download(Element::F32, &[b, t], bytemuck::cast_slice_mut(&mut local))?;
            let part = self.part(device);
            for b in part.batch.clone() {
                for token in part.tokens.clone() {
                    whole[[b, token]] = local[(b - part.batch.start) * t + token - part.tokens.start];
                }
            }
        }
        Ok(whole)
    }
}
