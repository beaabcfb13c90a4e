//! A batch cut over a mesh, and put together again.

use std::ops::Range;

use bytemuck::Pod;
use ndarray::{Array2, Array3, Dimension, Ix2};

use crate::runtime::{Client, DeviceBuffer, Executable, RuntimeError};
use assay_core::device_dtype::{ArrayBytes, DeviceDtype};
use assay_core::memory::expect_room;
use assay_core::problem::{Dtype, FloatArray, Shape};
use assay_programs::mesh::{Mesh, MeshAxis, shard};
use assay_programs::{Device, local_shape, logits_in_rows, row_major_copy};

use super::devices::compiled;

/// A batch of `shape` over the devices of `mesh`.
pub(super) struct Shards {
    pub(super) shape: Shape,
    pub(super) mesh: Mesh,
    pub(super) client: Client,
    pub(super) device: Device,
    /// Whether logits and dlogits have one axis for all rows, as kernels take them.
    pub(super) in_rows: bool,
    /// Whether logits must be row-major on the device.
    pub(super) row_major: bool,
    /// Whether sums over devices are returned in parts, one on each device.
    pub(super) scatters: bool,
}

/// The ranges of a batch that one device has; the rest of its local shape is padding.
pub(super) struct ShardRanges {
    pub(super) batch: Range<usize>,
    pub(super) tokens: Range<usize>,
    pub(super) vocab: Range<usize>,
}

/// The block of an array that a device has: `ranges` of `whole`, in `local` extents, followed by padding.
pub(crate) struct ArrayBlock {
    whole: Vec<usize>,
    ranges: Vec<Range<usize>>,
    local: Vec<usize>,
    /// Whether the array has one axis for all rows on the device.
    in_rows: bool,
}

/// The value beyond the ends of an array.
#[derive(Clone, Copy)]
pub(super) enum Padding {
    /// Zero, which a sum may include.
    Zero,
    /// NaN, which shows in every result that it enters.
    Nan,
}

impl ArrayBlock {
    /// Creates the block that is the whole array.
    pub(crate) fn all(extents: &[usize]) -> Self {
        let ranges = extents.iter().map(|&extent| 0..extent).collect();
        Self { whole: extents.to_vec(), ranges, local: extents.to_vec(), in_rows: false }
    }

    /// Returns element type and extents of the block on the device.
    fn on_device(&self, element: DeviceDtype) -> (DeviceDtype, Vec<usize>) {
        match self.local[..] {
            [b, t, v] if self.in_rows => logits_in_rows([b, t, v], element),
            _ => (element, self.local.clone()),
        }
    }

    /// Restricts the block to `range` along `axis`, in a `local` extent.
    pub(crate) fn cut(mut self, axis: usize, range: Range<usize>, local: usize) -> Self {
        self.ranges[axis] = range;
        self.local[axis] = local;
        self
    }

    fn is_whole(&self) -> bool {
        self.local == self.whole && self.ranges.iter().zip(&self.whole).all(|(range, &extent)| *range == (0..extent))
    }

    /// Returns the runs of consecutive elements that block and whole share: `(offset in the whole, offset in the block, length)`.
    fn runs(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        // All axes but the innermost are enumerated; along the innermost a run is contiguous.
        let mut starts = vec![(0, 0)];
        let mut axes = self.ranges.iter().zip(self.whole.iter().zip(&self.local));
        // A scalar is an array of one element.
        let (range, (&whole_run, &local_run)) = axes.next_back().unwrap_or((&(0..1), (&1, &1)));
        for (range, (whole, local)) in axes {
            let inside = |(in_whole, in_block): (usize, usize)| {
                range.clone().map(move |i| (in_whole * whole + i, in_block * local + i - range.start))
            };
            starts = starts.into_iter().flat_map(inside).collect();
        }
        let (start, length) = (range.start, range.len());
        starts.into_iter().map(move |(a, b)| (a * whole_run + start, b * local_run, length))
    }

    /// Copies the block from an array's `bytes`, with bytes of `fill` as padding.
    pub(crate) fn part_of(&self, bytes: &[u8], element: DeviceDtype, fill: u8) -> Vec<u8> {
        let mut local = vec![fill; self.local.iter().product::<usize>() * element.size()];
        for (whole, part, length) in self.runs() {
            let [whole, part, length] = [whole, part, length].map(|elements| elements * element.size());
            local[part..part + length].copy_from_slice(&bytes[whole..whole + length]);
        }
        local
    }

    /// Returns the extents of the block on the device.
    pub(crate) fn extents(&self) -> &[usize] {
        &self.local
    }

    /// Downloads a device's block in row-major order.
    fn bytes(&self, buffer: &DeviceBuffer, element: DeviceDtype) -> Result<Vec<u8>, RuntimeError> {
        let mut bytes = vec![0; self.local.iter().product::<usize>() * element.size()];
        let (on_device, extents) = self.on_device(element);
        buffer.download(on_device, &extents, &mut bytes)?;
        Ok(bytes)
    }

    /// Downloads a device's block into its place in the whole.
    fn download<D: Dimension>(&self, buffer: &DeviceBuffer, whole: &mut FloatArray<D>) -> Result<(), RuntimeError> {
        // A block that is the whole array is downloaded in place.
        let element = DeviceDtype::from(whole.dtype());
        if self.is_whole() {
            let (on_device, extents) = self.on_device(element);
            return buffer.download(on_device, &extents, whole.bytes_mut());
        }
        let bytes = self.bytes(buffer, element)?;
        let target = whole.bytes_mut();
        for (whole, part, length) in self.runs() {
            let [whole, part, length] = [whole, part, length].map(|elements| elements * element.size());
            target[whole..whole + length].copy_from_slice(&bytes[part..part + length]);
        }
        Ok(())
    }

    /// Finds the first element that differs between a device's block and the whole. Any two NaNs are equal.
    fn differs<D: Dimension>(
        &self,
        buffer: &DeviceBuffer,
        whole: &FloatArray<D>,
    ) -> Result<Option<ReplicaDifference>, RuntimeError> {
        let element = DeviceDtype::from(whole.dtype());
        let (size, bytes) = (element.size(), self.bytes(buffer, element)?);
        for (first, part, length) in self.runs() {
            // Bytes are compared run by run; elements only where a run differs.
            let [held, own] = [&whole.bytes()[first * size..], &bytes[part * size..]].map(|of| &of[..length * size]);
            if held == own {
                continue;
            }
            let pairs = held.chunks_exact(size).zip(own.chunks_exact(size)).enumerate();
            let mut other =
                pairs.filter(|(_, (held, own))| held != own && !(is_nan(element, held) && is_nan(element, own)));
            if let Some((at, (held, own))) = other.next() {
                let [expected, given] = [held, own].map(in_hexadecimal);
                return Ok(Some(ReplicaDifference { element: first + at, given, expected }));
            }
        }
        Ok(None)
    }
}

/// An element that differs between a device and an earlier one.
struct ReplicaDifference {
    /// The index of the element in the whole array.
    element: usize,
    given: String,
    expected: String,
}

/// Whether the bytes of an element are a NaN.
fn is_nan(element: DeviceDtype, bytes: &[u8]) -> bool {
    match (element, bytes) {
        (DeviceDtype::F64, &[a, b, c, d, e, f, g, h]) => f64::from_ne_bytes([a, b, c, d, e, f, g, h]).is_nan(),
        (DeviceDtype::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]).is_nan(),
        (DeviceDtype::Bf16, &[a, b]) => half::bf16::from_ne_bytes([a, b]).is_nan(),
        (DeviceDtype::F16, &[a, b]) => half::f16::from_ne_bytes([a, b]).is_nan(),
        _ => false,
    }
}

/// Formats bytes as a hexadecimal number, `0x3f800000`.
fn in_hexadecimal(bytes: &[u8]) -> String {
    let digits = bytes.iter().rev().map(|byte| format!("{byte:02x}"));
    format!("0x{}", digits.collect::<String>())
}

const DENSE: &str = "checked: dense row-major";

impl Shards {
    /// Returns the extents that each device has of `[B,T,V]`.
    pub(super) fn local(&self) -> [usize; 3] {
        local_shape(self.shape, self.mesh, self.device.machine)
    }

    /// Returns the ranges of the batch that `device` has.
    pub(super) fn part(&self, device: usize) -> ShardRanges {
        let [b, t, v] = self.local();
        let along = |axis, extent, local| shard(extent, local, self.mesh.coordinate(device, axis));
        ShardRanges {
            batch: along(MeshAxis::Batch, self.shape.batch, b),
            tokens: along(MeshAxis::Tokens, self.shape.tokens, t),
            vocab: along(MeshAxis::Vocab, self.shape.vocab, v),
        }
    }

    /// Whether the devices share this machine's memory.
    pub(super) fn on_host(&self) -> bool {
        self.client.platform() == "cpu"
    }

    /// Returns the bytes that one run takes of a device's memory, or of all devices' memory if they share it; 0 if the plugin does not
    /// count them.
    pub(super) fn bytes_needed(&self, executable: &Executable) -> usize {
        // On a CPU all devices share this machine's memory.
        let sharers = if self.on_host() { self.mesh.devices() } else { 1 };
        let peak = executable.memory().map_or(0, |memory| memory.peak_bytes());
        usize::try_from(peak).unwrap_or(0).saturating_mul(sharers)
    }

    /// Checks that every device has enough free memory for one run.
    pub(super) fn expect_room(&self, executable: &Executable) -> Result<(), RuntimeError> {
        let what = || format!("the program for {} on {} device(s)", self.shape, self.mesh.devices());
        Ok(expect_room(what, self.bytes_needed(executable), self.client.available_bytes(0))?)
    }

    /// Returns the block of a `[B,T,width]` array that `device` has.
    pub(super) fn rows(&self, device: usize, width: usize) -> ArrayBlock {
        let [b, t, _] = self.local();
        let ShardRanges { batch, tokens, .. } = self.part(device);
        let Shape { batch: rows, tokens: columns, .. } = self.shape;
        let whole = vec![rows, columns, width];
        ArrayBlock { whole, ranges: vec![batch, tokens, 0..width], local: vec![b, t, width], in_rows: false }
    }

    /// Returns the block of the logits that `device` has.
    pub(super) fn logits(&self, device: usize) -> ArrayBlock {
        let rows = self.rows(device, self.shape.vocab);
        let [_, _, v] = self.local();
        ArrayBlock { in_rows: self.in_rows, ..rows.cut(2, self.part(device).vocab, v) }
    }

    /// Uploads a device's block of an array.
    pub(super) fn upload_block<D: Dimension>(
        &self,
        device: usize,
        array: &FloatArray<D>,
        block: &ArrayBlock,
        padding: Padding,
    ) -> Result<DeviceBuffer, RuntimeError> {
        let element = DeviceDtype::from(array.dtype());
        if block.is_whole() {
            let (on_device, extents) = block.on_device(element);
            return self.client.upload(device, on_device, &extents, array.bytes());
        }
        let fill = match padding {
            Padding::Zero => 0,
            // All bits set is a NaN in every float type.
            Padding::Nan => 0xFF,
        };
        let bytes = block.part_of(array.bytes(), element, fill);
        let (on_device, extents) = block.on_device(element);
        self.client.upload(device, on_device, &extents, &bytes)
    }

    /// Replaces the logits, the first of each device's arguments, by row-major copies if the program needs that layout and the plugin chose
    /// another one: libtpu chooses the layout with the least padding. Both copies exist until the first are freed.
    pub(super) fn lay_out_logits(&self, arguments: &mut [Vec<DeviceBuffer>]) -> Result<(), RuntimeError> {
        if !self.row_major || arguments.iter().all(|buffers| buffers[0].is_row_major()) {
            return Ok(());
        }
        // The copy is a program, since PJRT has no call that changes a layout on the device.
        let (element, shape) = (arguments[0][0].element()?, arguments[0][0].shape()?);
        let copy = compiled(&self.client, row_major_copy(element, &shape), arguments.len())?;
        let given: Vec<Vec<&DeviceBuffer>> = arguments.iter().map(|buffers| vec![&buffers[0]]).collect();
        let copies = copy.execute(&given)?;
        for (buffers, copy) in arguments.iter_mut().zip(copies.into_iter().flatten()) {
            buffers[0] = copy;
        }
        Ok(())
    }

    /// Uploads a device's part of a `[B,T]` array, with `padding` in the tokens past `B` and `T`.
    pub(super) fn upload_per_token<P: Pod>(
        &self,
        device: usize,
        element: DeviceDtype,
        values: &Array2<P>,
        padding: P,
    ) -> Result<DeviceBuffer, RuntimeError> {
        let [b, t, _] = self.local();
        let part = self.part(device);
        let local = Array2::from_shape_fn((b, t), |(b, t)| {
            let (b, t) = (part.batch.start + b, part.tokens.start + t);
            if part.batch.contains(&b) && part.tokens.contains(&t) { values[[b, t]] } else { padding }
        });
        self.client.upload(device, element, &[b, t], bytemuck::cast_slice(local.as_slice().expect(DENSE)))
    }

    /// Uploads a device's part of a `[B,T,n]` array, with `padding` in the tokens past `B` and `T`.
    pub(super) fn upload_of_others<P: Pod>(
        &self,
        device: usize,
        element: DeviceDtype,
        values: &Array3<P>,
        padding: P,
    ) -> Result<DeviceBuffer, RuntimeError> {
        let ([b, t, _], count) = (self.local(), values.dim().2);
        let part = self.part(device);
        let local = Array3::from_shape_fn((b, t, count), |(b, t, k)| {
            let (b, t) = (part.batch.start + b, part.tokens.start + t);
            if part.batch.contains(&b) && part.tokens.contains(&t) { values[[b, t, k]] } else { padding }
        });
        self.client.upload(device, element, &[b, t, count], bytemuck::cast_slice(local.as_slice().expect(DENSE)))
    }

    /// Uploads a device's part of a `[V]` f32 array, with `padding` in the columns past `V`.
    pub(super) fn upload_columns(
        &self,
        device: usize,
        values: &[f32],
        padding: f32,
    ) -> Result<DeviceBuffer, RuntimeError> {
        let [_, _, v] = self.local();
        let mut local = values[self.part(device).vocab].to_vec();
        local.resize(v, padding);
        self.client.upload(device, DeviceDtype::F32, &[v], bytemuck::cast_slice(&local))
    }

    /// Returns the block of a `[B,T]` array that `device` has.
    fn per_token(&self, device: usize) -> ArrayBlock {
        let [b, t, _] = self.local();
        let ShardRanges { batch, tokens, .. } = self.part(device);
        let whole = vec![self.shape.batch, self.shape.tokens];
        ArrayBlock { whole, ranges: vec![batch, tokens], local: vec![b, t], in_rows: false }
    }

    /// Collects a `[B,T]` f32 array; errors call it `output`.
    pub(super) fn gather_per_token<'b>(
        &self,
        output: &'static str,
        buffer: impl Fn(usize) -> Result<&'b DeviceBuffer, RuntimeError>,
    ) -> Result<FloatArray<Ix2>, RuntimeError> {
        let mut whole = FloatArray::zeros([self.shape.batch, self.shape.tokens], Dtype::F32);
        self.gather(output, |device| self.per_token(device), buffer, &mut whole)?;
        Ok(whole)
    }

    /// Collects an array from the devices of the mesh; see [`gather`].
    pub(super) fn gather<'b, D: Dimension>(
        &self,
        output: &'static str,
        block: impl Fn(usize) -> ArrayBlock,
        buffer: impl Fn(usize) -> Result<&'b DeviceBuffer, RuntimeError>,
        whole: &mut FloatArray<D>,
    ) -> Result<(), RuntimeError> {
        gather(self.mesh.devices(), output, block, buffer, whole)
    }
}

/// Collects `whole` from the `block` of each device, which is in its `buffer`; errors call it `output`. Blocks that several devices have
/// must be the same on all of them, because a collective may be right on one device and wrong on another.
pub(crate) fn gather<'b, D: Dimension>(
    devices: usize,
    output: &'static str,
    block: impl Fn(usize) -> ArrayBlock,
    buffer: impl Fn(usize) -> Result<&'b DeviceBuffer, RuntimeError>,
    whole: &mut FloatArray<D>,
) -> Result<(), RuntimeError> {
    let mut held = Vec::new();
    for device in 0..devices {
        let (block, buffer) = (block(device), buffer(device)?);
        // The first device with these ranges delivers them; every later one is compared with it.
        if !held.contains(&block.ranges) {
            block.download(buffer, whole)?;
            held.push(block.ranges);
        } else if let Some(ReplicaDifference { element, given, expected }) = block.differs(buffer, whole)? {
            return Err(RuntimeError::Replicas { output, device, element, given, expected });
        }
    }
    Ok(())
}
