//! The machine that a kernel is written for.

use assay_core::device_dtype::DeviceDtype;

/// A core, and how arrays lie in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileMachine {
    /// Columns of a vector register: dynamic columns are multiples of it.
    pub lanes: usize,
    /// Rows of a register of 32-bit elements; narrower ones have as many more.
    pub sublanes: usize,
    /// Bytes of VMEM that a kernel may use.
    pub vmem_bytes: usize,
    /// Bytes of SMEM that it may.
    pub smem_bytes: usize,
    /// Whether it computes in bf16.
    pub bf16_arithmetic: bool,
    /// Columns that lie together in memory: XLA turns an array round that does not fill them. 1 where rows follow one another.
    pub memory_columns: usize,
}

impl TileMachine {
    /// A TPU core: registers of 8 × 128, 1 MiB of SMEM, of which one part in sixteen is left alone.
    pub const fn tpu(vmem_bytes: usize, bf16_arithmetic: bool) -> Self {
        let smem_bytes = (1 << 20) / 16 * 15;
        Self { lanes: 128, sublanes: 8, vmem_bytes, smem_bytes, bf16_arithmetic, memory_columns: 128 }
    }

    /// Rows of which a register of an element type holds a column.
    pub fn rows_of_a_register(self, element: DeviceDtype) -> usize {
        self.sublanes * DeviceDtype::F32.size() / element.size()
    }

    /// Bytes that `[rows, columns]` take in VMEM, where rows and columns fill whole registers.
    pub fn tile_bytes(self, element: DeviceDtype, [rows, columns]: [usize; 2]) -> usize {
        // VMEM is allocated by registers: rows and columns that fill one in part take all of it.
        let rows = rows.next_multiple_of(self.rows_of_a_register(element));
        rows * columns.next_multiple_of(self.lanes) * element.size()
    }
}
