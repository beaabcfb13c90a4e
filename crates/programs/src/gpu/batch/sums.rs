//! The loss and the means of a batch, from the sums of its sequences.

use super::{BatchExtent, BatchKernel, BatchWriter, CtaThreads, EXTENTS, SEQUENCES, at_least_one, extent};
use assay_algebra::structure::Structure;
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PtxTarget, PtxValue};

/// Floats of each sequence's sums.
pub(crate) const COLUMNS: usize = 8;

/// Columns of the sums of a sequence: the loss, and what is logged of its tokens in the order of the metrics; the last counts them.
pub(crate) const COUNT: usize = COLUMNS - 1;

/// The number of metrics of a batch.
const METRICS: usize = 6;

/// Adds up what [`losses`](super::super::losses) left of each sequence: the loss, and means over the tokens that count.
pub(crate) fn sums(target: PtxTarget, structure: Structure, threads: u32) -> BatchKernel {
    let mut writer = BatchWriter::new("grpo_sums", target, structure, threads);
    let extents = writer.input("extents", DeviceDtype::I32, BatchExtent::Batch, EXTENTS);
    let of_sequences = writer.input("sums", DeviceDtype::F32, BatchExtent::SequenceAndRest, COLUMNS);
    let loss = writer.output("loss", DeviceDtype::F32, BatchExtent::Batch, 1);
    let metrics = writer.output("metrics", DeviceDtype::F32, BatchExtent::Batch, METRICS);

    let on = &mut writer.on;
    let mut threads = CtaThreads::new(on, threads, COLUMNS as u32);
    let sequences = extent(on, extents, SEQUENCES);
    let all = on.add(sequences, 1);
    // Threads take the sequences in turn and add up in registers; the CTA's threads meet once at the end.
    let sums: [PtxValue<f32>; COLUMNS] = std::array::from_fn(|_| on.variable(0.0));
    let zero = on.variable(0);
    // One CTA adds up the sums of all sequences and of the tokens that belong to none.
    threads.each(on, [zero, all], |on, sequence| {
        let from = of_sequences.at(on, sequence);
        for (sum, column) in sums.into_iter().zip(0..) {
            let of_sequence = on.load(from.plus(4 * column));
            let next = on.add(sum, of_sequence);
            on.set(sum, next);
        }
    });
    let sums = sums.map(|sum| threads.sum(on, sum));
    let first = threads.is_first(on);
    on.when(first, |on| {
        on.store(loss.first(), sums[0]);
        // The loss is a sum already; metrics are means over the tokens that count.
        let count = at_least_one(on, sums[COUNT]);
        for (&sum, place) in sums[1..COUNT].iter().zip(0..) {
            let mean = on.div(sum, count);
            on.store(metrics.first().plus(4 * place), mean);
        }
    });
    writer.finish(BatchExtent::Batch)
}
