//! The LM head and the loss in one program: hidden states and a head come in, the gradients of both go out.
//!
//! ```text
//! logits   [n,V] = hidden [n,H] · lm_head [H,V]            f32 sums; rounded to the dtype of hidden where the problem says so
//! dlogits  [n,V]   of the loss on those logits: a core of the programs on logits
//! dhidden  [n,H] = dlogits [n,V] · lm_headᵀ [V,H]          f32 sums, rounded once to the dtype of hidden
//! dlm_head [H,V] = hiddenᵀ [H,n] · dlogits [n,V]           f32 sums, f32
//! ```
//!
//! | id | logits |
//! |---|---|
//! | `xla-lm-head` | all of them, in plain XLA operations: the baseline |
//! | `xla-lm-head-seed` | the same by `log_softmax` and autodiff, as MLLM-JAX does: only to be compiled |
//! | `tile-lm-head` | a chunk of the tokens at a time, in a loop: no array of `B·T·V` elements is ever there |
//! | `gpu-lm-head` | the same, by the kernels for NVIDIA's GPUs |
//!
//! The products of dlogits are taken in the dtype of `hidden`, as published kernels take them: bf16 and f16 dlogits are
//! rounded to it before, whether logits were or not. An f16 dlogit below 6e-8 is then 0. f32 operands are multiplied as
//! f32, which a TPU does in six passes of its bf16 units.
//!
//! In the loop a chunk's logits are in f32, or rounded in the dtype of `hidden`; a kernel writes their gradient over
//! them:
//!
//! | losses that | are decided by | products |
//! |---|---|---|
//! | one token decides | one loop; one pass over a row in VMEM or in a cluster's shared memory, or two where the vocabulary is cut or too large, or there are no clusters | 3 |
//! | a sequence decides | a loop for every log-probability, the loss, and a loop that makes the logits again | 4 |
//!
//! What a token's loss weighs, and the normalisers, are those of the whole batch. Tokens that fill the last chunk, and
//! those that fill the devices, are masked: a masked hidden state is 0 before anything is made of it.
//!
//! `-rows` sums `dlm_head` over the devices, `-vocab` dhidden, and the statistics of a row as the programs on logits do;
//! `-mesh` all of these. With `-scattered` what is summed comes back in parts, one a device, and takes half of what a sum everywhere
//! does between devices:
//!
//! | | comes in | comes back | between devices |
//! |---|---|---|---|
//! | `-rows-scattered` | the head whole | `dlm_head` of `⌈H/n⌉` hidden units, `[⌈H/n⌉,V]` or `[V,⌈H/n⌉]` | columns of the last chunk's product, each part summed while the next is multiplied, the last beside dhidden |
//! | `-vocab-scattered` | the hidden states of `⌈B·T/n⌉` tokens, in the order of the batch | dhidden of these | the next chunk's hidden states beside a chunk's logits, its dhidden, in f32, beside its part of `dlm_head` |
//!
//! Whether a compiler does what is beside one another at once is its choice; nothing that is computed waits for what is sent.

mod chunks;
mod head;

use assay_algebra::family::{KernelScope, expect_around_one_id, expect_one_id, expect_plain_logits};
use assay_algebra::structure::StructuredSpec;
use assay_core::device_dtype::DeviceDtype;
use assay_core::implementation::{self, Unsupported};
use assay_core::problem::{Dtype, HeadForm, HeadProblem, HeadShape};
use assay_core::spec::LossSpec;

use chunks::{CHUNK_ROWS, Chunks};
use head::HeadMatmuls;

use crate::alternatives::BaselineAlternative;
use crate::frame::frame;
use crate::mesh::Mesh;
use crate::one_pass::most_tokens;
use crate::program::{CoreInputs, DeviceShare, Program, ProgramOutput, local_shape};
use crate::rows::in_rows;
use crate::sharding::Sharding;
use crate::tiled::KernelCalls;
use crate::two_pass::LocalLogits;
use crate::{ANY_DEVICE, Device, Lowering, Programs, PtxTarget, baseline, gpu, several, unsupported};
use assay_tile::TileMachine;
use assay_tile::stablehlo::{HloBuilder, HloType};

/// Bytes of a chunk's logits, at most. A chunk reads the head twice, and reads and writes its f32 gradient: the fewer the
/// better for HBM. At (8192, 4096, 151936) bf16 there are four of them, which move 45 GB, 28 ms on a v6e beside 41 ms of
/// products; so nothing is gained by larger ones, which are held beside 4 GB of arguments and results.
pub const CHUNK_BYTES: usize = 640_000_000;

/// The part of the program that computes the loss of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeadCore {
    Baseline,
    Seed,
    Tile,
    Gpu,
}

/// The programs of an LM head and a loss under one sharding. See [the module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadProgram {
    core: HeadCore,
    sharding: Sharding,
    /// Whether what is summed over devices comes back in parts.
    scattered: bool,
    /// [`CHUNK_BYTES`] if none is given, and with the head's gradient in parts as much as all of it.
    chunk_bytes: Option<usize>,
    /// A quarter of the gradient, within limits, if none is given.
    sum_bytes: Option<usize>,
}

impl Programs for HeadProgram {
    type Problem = HeadProblem;

    fn all() -> Vec<HeadProgram> {
        let cores = [HeadCore::Baseline, HeadCore::Tile, HeadCore::Gpu].into_iter();
        let shardings = cores.flat_map(|core| Sharding::ALL.map(|sharding| (core, sharding, false)));
        let scattered = [HeadCore::Baseline, HeadCore::Tile].into_iter();
        let scattered =
            scattered.flat_map(|core| [Sharding::Rows, Sharding::Vocab].map(|sharding| (core, sharding, true)));
        shardings
            .chain([(HeadCore::Seed, Sharding::Whole, false)])
            .chain(scattered)
            .map(|(core, sharding, scattered)| HeadProgram {
                core,
                sharding,
                scattered,
                chunk_bytes: None,
                sum_bytes: None,
            })
            .collect()
    }

    fn sharding(self) -> Sharding {
        self.sharding
    }

    fn id(self) -> &'static str {
        match (self.core, self.sharding) {
            (HeadCore::Baseline, Sharding::Rows) if self.scattered => "xla-lm-head-rows-scattered",
            (HeadCore::Baseline, Sharding::Vocab) if self.scattered => "xla-lm-head-vocab-scattered",
            (HeadCore::Tile, Sharding::Rows) if self.scattered => "tile-lm-head-rows-scattered",
            (HeadCore::Tile, Sharding::Vocab) if self.scattered => "tile-lm-head-vocab-scattered",
            (HeadCore::Baseline, Sharding::Whole) => "xla-lm-head",
            (HeadCore::Baseline, Sharding::Rows) => "xla-lm-head-rows",
            (HeadCore::Baseline, Sharding::Vocab) => "xla-lm-head-vocab",
            (HeadCore::Baseline, Sharding::RowsAndVocab) => "xla-lm-head-mesh",
            (HeadCore::Seed, _) => "xla-lm-head-seed",
            (HeadCore::Tile, Sharding::Whole) => "tile-lm-head",
            (HeadCore::Tile, Sharding::Rows) => "tile-lm-head-rows",
            (HeadCore::Tile, Sharding::Vocab) => "tile-lm-head-vocab",
            (HeadCore::Tile, Sharding::RowsAndVocab) => "tile-lm-head-mesh",
            (HeadCore::Gpu, Sharding::Whole) => "gpu-lm-head",
            (HeadCore::Gpu, Sharding::Rows) => "gpu-lm-head-rows",
            (HeadCore::Gpu, Sharding::Vocab) => "gpu-lm-head-vocab",
            (HeadCore::Gpu, Sharding::RowsAndVocab) => "gpu-lm-head-mesh",
        }
    }

    fn summary(self) -> &'static str {
        match (self.core, self.sharding) {
            (HeadCore::Baseline, Sharding::Whole) => "XLA through PJRT, LM head and loss, every logit at once",
            (HeadCore::Tile, Sharding::Whole) => {
                "XLA's products and TPU kernels, LM head and loss, logits in chunks, as loops on any PJRT device"
            }
            (HeadCore::Gpu, Sharding::Whole) => {
                "XLA's products and PTX kernels, LM head and loss, logits in chunks, on NVIDIA GPUs of sm_80"
            }
            (HeadCore::Seed, _) => "the same by log_softmax and autodiff: MLLM-JAX's program",
            (_, Sharding::Rows) if self.scattered => "the same, rows over devices, dlm_head back in parts",
            (_, Sharding::Vocab) if self.scattered => {
                "the same, vocabulary over devices, hidden states and dhidden in parts"
            }
            (_, Sharding::Rows) => "the same, rows over devices",
            (_, Sharding::Vocab) => "the same, vocabulary over devices",
            (_, Sharding::RowsAndVocab) => "the same, rows × vocabulary over devices",
        }
    }

    fn class(self) -> &'static str {
        match self.core {
            HeadCore::Baseline | HeadCore::Seed => "xla-lm-head",
            HeadCore::Tile => "tile-lm-head",
            HeadCore::Gpu => "gpu-lm-head",
        }
    }

    fn is_implementation(self) -> bool {
        self.core != HeadCore::Seed
    }

    fn scatters(self) -> bool {
        self.scattered
    }

    fn supports(self, spec: &LossSpec, shape: HeadShape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        let changes = match self.core {
            HeadCore::Baseline | HeadCore::Tile | HeadCore::Gpu => expect_around_one_id(spec),
            HeadCore::Seed => expect_one_id(spec).and_then(|()| expect_plain_logits(spec)),
        };
        changes
            .and_then(|()| KernelScope::Row.expect(spec))
            .map_err(|beyond| unsupported(self, beyond.field, beyond.given, beyond.supported))?;
        if let Some((field, given, supported)) = BaselineAlternative::LogSoftmax.lacks(spec)
            && self.core == HeadCore::Seed
        {
            return Err(unsupported(self, field, given, supported));
        }
        if dtype == Dtype::F64 {
            return Err(unsupported(self, "hidden dtype", dtype, "f32, bf16 and f16"));
        }
        // Columns, ids and rows are i32 on the device.
        let most = "up to 2147483647";
        if i32::try_from(shape.vocab).is_err() {
            return Err(unsupported(self, "vocabulary", shape.vocab, most));
        }
        let tokens = shape.batch.checked_mul(shape.tokens).filter(|&tokens| i32::try_from(tokens).is_ok());
        if tokens.is_none() {
            return Err(unsupported(self, "tokens", format!("{}x{}", shape.batch, shape.tokens), most));
        }
        let mesh = self.mesh(shape.logits(), devices)?;
        if self.core == HeadCore::Gpu {
            let local = local_shape(shape.logits(), mesh, ANY_DEVICE);
            gpu::expect_two_pass_fits(in_rows(local), dtype.into()).map_err(
                |gpu::CapacityError { field, given, most, room }| {
                    unsupported(self, field, given, format!("up to {most} of {dtype} {room}"))
                },
            )?;
        }
        Ok(())
    }

    fn text(
        self,
        loss: StructuredSpec,
        given: implementation::ProblemFormat<HeadProblem>,
        devices: usize,
        device: Device,
    ) -> Result<String, Unsupported> {
        self.expect_device(device)?;
        self.supports(loss.spec, given.shape, given.dtype, devices)?;
        let mesh = self.mesh(given.shape.logits(), devices)?;
        Ok(self.program(loss, given, mesh, device.lowering, device.machine))
    }

    fn has_kernels(self) -> bool {
        matches!(self.core, HeadCore::Tile | HeadCore::Gpu)
    }

    fn least_target(self) -> Option<PtxTarget> {
        (self.core == HeadCore::Gpu).then_some(PtxTarget::Sm80)
    }
}

impl HeadProgram {
    /// Returns the program with chunks of up to `bytes` of logits, but at least eight rows, instead of
    /// [`CHUNK_BYTES`]; `-rows-scattered` has as many as the head's gradient takes in f32, which it then need not
    /// hold. Fewer chunks read the head less often, smaller ones take less memory. The baseline has no chunks.
    #[must_use]
    pub fn chunk_bytes(self, bytes: usize) -> Self {
        Self { chunk_bytes: Some(bytes), ..self }
    }

    /// Returns the program with the gradient summed over devices by about `bytes` at a time, instead of a quarter of
    /// it.
    #[must_use]
    pub fn sum_bytes(self, bytes: usize) -> Self {
        Self { sum_bytes: Some(bytes), ..self }
    }

    /// The program of each of `devices`. Of `xla-lm-head` and `tile-lm-head`, `given` is what one device holds: hidden
    /// states of its own, all of them together one batch, and the whole head. Of the others it is the batch and the head,
    /// cut as the [sharding](Self::sharding) says. A text for compilers: nothing is run. Tile kernels are called as
    /// kernels for a TPU that is `machine`.
    ///
    /// # Errors
    /// [`Unsupported`], for f64, for a vocabulary or a batch beyond i32, and for devices that do not cut the arrays.
    pub fn program_for(
        self,
        loss: StructuredSpec,
        given: implementation::ProblemFormat<HeadProblem>,
        devices: usize,
        machine: TileMachine,
    ) -> Result<String, Unsupported> {
        self.expect_device(Device { machine, lowering: Lowering::Mosaic })?;
        let implementation::ProblemFormat { shape, dtype, .. } = given;
        if !self.is_whole() {
            self.supports(loss.spec, shape, dtype, devices)?;
            let mesh = self.mesh(shape.logits(), devices)?;
            return Ok(self.program(loss, given, mesh, Lowering::Mosaic, machine));
        }
        self.supports(loss.spec, shape, dtype, 1)?;
        let batch = shape.batch.checked_mul(devices).filter(|&batch| i32::try_from(batch).is_ok());
        let Some(batch) = batch else {
            let supported = format!("up to {} on {devices} devices", i32::MAX as usize / devices.max(1));
            return Err(unsupported(self, "sequences a device", shape.batch, supported));
        };
        let given = implementation::ProblemFormat { shape: HeadShape { batch, ..shape }, ..given };
        let mesh = Mesh { batch: devices, tokens: 1, vocab: 1 };
        Ok(self.program(loss, given, mesh, Lowering::Mosaic, machine))
    }

    /// The kernels of PTX that [`text`](Programs::text) calls for a GPU, in the order of their calls; none of a program that has none.
    ///
    /// # Errors
    /// As of [`expect_device`](Programs::expect_device) and [`supports`](Programs::supports).
    pub fn gpu_kernels_for(
        self,
        loss: StructuredSpec,
        given: implementation::ProblemFormat<HeadProblem>,
        devices: usize,
        target: PtxTarget,
    ) -> Result<Vec<assay_ptx::PtxKernel>, Unsupported> {
        self.expect_device(Device::gpu(target))?;
        let implementation::ProblemFormat { shape, dtype, form, .. } = given;
        self.supports(loss.spec, shape, dtype, devices)?;
        if self.core != HeadCore::Gpu {
            return Ok(vec![]);
        }
        let mesh = self.mesh(shape.logits(), devices)?;
        let [b, t, v] = local_shape(shape.logits(), mesh, ANY_DEVICE);
        let logits = if form.rounds_logits { dtype } else { Dtype::F32 };
        let rows = self.chunks([b * t, shape.hidden, v], mesh, logits, ANY_DEVICE).rows;
        let chunk = [1, rows, v];
        // One pass needs a loss in which no token depends on another, and rows that are whole on the device.
        let by_token = KernelScope::Token.expect(loss.spec).is_ok() && mesh.vocab == 1;
        if let Some(kernel) = by_token.then(|| gpu::one_pass_if(loss.structure, chunk, logits.into(), target)).flatten()
        {
            return Ok(vec![kernel]);
        }
        let local = LocalLogits::new(chunk, shape.vocab, mesh);
        let statistics = gpu::two_pass::statistics(target, loss.structure, local, logits.into());
        Ok(vec![statistics, gpu::two_pass::dlogits(target, loss.structure, local, logits.into(), gpu::Factors::Scales)])
    }

    /// The program of one device of `mesh`.
    fn program(
        self,
        loss: StructuredSpec,
        given: implementation::ProblemFormat<HeadProblem>,
        mesh: Mesh,
        lowering: Lowering,
        machine: TileMachine,
    ) -> String {
        let structure = loss.structure;
        let implementation::ProblemFormat { shape, dtype, form: HeadForm { layout, rounds_logits }, packed } = given;
        let logits_dtype = if rounds_logits { dtype } else { Dtype::F32 };
        let share @ DeviceShare { local: [b, t, v], .. } = DeviceShare::new(shape.logits(), packed, mesh, machine);
        let parts = if self.scattered { mesh.vocab } else { 1 };
        let states = if parts > 1 { vec![(b * t).div_ceil(parts), shape.hidden] } else { vec![b, t, shape.hidden] };
        let parameters = |builder: &mut HloBuilder| {
            let array = |extents: &[usize]| HloType::new(dtype.into(), extents);
            let hidden = builder.parameter(array(&states), Some(ProgramOutput::Gradient as usize));
            let weights = builder.parameter(array(&layout.extents(shape.hidden, v)), None);
            let rounds_sums = self.core == HeadCore::Gpu;
            (hidden, HeadMatmuls { weights, layout, dtype, rounds_logits, rounds_sums, scattered: self.scattered })
        };
        frame(structure, share, parameters, |on, given, (hidden, head)| match self.core {
            HeadCore::Baseline => {
                let core =
                    |on: &mut Program, given: &CoreInputs, logits| baseline::core(on, structure, given, logits, dtype);
                head.materialised(on, given, hidden, |on, logits| {
                    several::around(on, structure, given, logits, logits_dtype, core)
                })
            }
            HeadCore::Seed => head.materialised(on, given, hidden, |on, logits| {
                BaselineAlternative::LogSoftmax.core(on, structure, given, logits, dtype)
            }),
            HeadCore::Tile | HeadCore::Gpu => {
                let chunks = self.chunks([b * t, shape.hidden, v], mesh, logits_dtype, machine);
                let calls = KernelCalls { dtype: logits_dtype, lowering, machine, ptx: self.ptx_target(lowering) };
                if KernelScope::Token.expect(loss.spec).is_ok() {
                    head.in_one_loop(on, structure, given, hidden, chunks, calls)
                } else {
                    head.in_two_loops(on, structure, given, hidden, chunks, calls)
                }
            }
        })
    }

    /// Divides `tokens` into chunks of equal size, in each part that they are in.
    fn chunks(self, [tokens, hidden, vocab]: [usize; 3], mesh: Mesh, logits: Dtype, machine: TileMachine) -> Chunks {
        let parts = if self.scattered { mesh.vocab } else { 1 };
        let scatters = self.scattered && mesh.batch * mesh.tokens > 1;
        let gradient = if scatters { hidden * vocab * DeviceDtype::F32.size() } else { 0 };
        let chunk_bytes = self.chunk_bytes.unwrap_or(CHUNK_BYTES.max(gradient));
        // As few chunks as the bytes allow, and then chunks as equal as possible, so that the last is nearly full.
        let most = if self.core == HeadCore::Gpu { usize::MAX } else { most_tokens(machine) };
        let most = (chunk_bytes / (vocab * logits.size())).min(most) / parts;
        let most = most / CHUNK_ROWS * CHUNK_ROWS;
        let part = tokens.div_ceil(parts);
        let trips = part.div_ceil(most.max(CHUNK_ROWS));
        let rows = part.div_ceil(trips).next_multiple_of(CHUNK_ROWS);
        let register = machine.memory_columns;
        Chunks { tokens, parts, rows, padded: trips * rows, sum_bytes: self.sum_bytes, register }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ANY_TPU;
    use assay_core::problem::HeadLayout;

    /// Rows of each part of the gradient that is summed over eight devices, of a head `[H,V]`.
    fn summed(hidden: usize, vocab: usize, sum_bytes: Option<usize>) -> Vec<usize> {
        let spec = LossSpec::default();
        let shape = HeadShape { batch: 1, tokens: 2048, hidden, vocab };
        let form = HeadForm { layout: HeadLayout::HiddenByVocab, rounds_logits: true };
        let given = implementation::ProblemFormat { shape, dtype: Dtype::Bf16, form, packed: None };
        let head = HeadProgram {
            sum_bytes,
            ..HeadProgram::all().into_iter().find(|head| head.id() == "tile-lm-head").unwrap()
        };
        let text = head.program_for(StructuredSpec::new(&spec), given, 8, ANY_TPU).unwrap();
        // The sum's region ends with its type.
        let of_gradient = text.lines().filter(|line| line.trim_start().starts_with("}) : (tensor<"));
        let rows = of_gradient.filter_map(|line| {
            let extents = line.split_once("tensor<")?.1.split_once(&format!("x{vocab}xf32>"))?.0;
            extents.parse().ok()
        });
        rows.collect()
    }

    #[test]
    fn lm_head_gradient_is_summed_by_quarters_or_as_asked() {
        // Qwen2.5-0.5B's, 545 MB.
        assert_eq!(summed(896, 151_936, None), [224; 4]);
        assert_eq!(summed(896, 151_936, Some(640_000_000)), [896]);
        assert_eq!(summed(896, 151_936, Some(1)), [56; 16], "sixteen parts at most");
        assert_eq!(summed(64, 4096, None), [64], "a megabyte is summed at once");
    }

    #[test]
    fn lm_head_gradient_is_scattered_by_columns_and_never_whole() {
        let spec = LossSpec::default();
        let form = HeadForm { layout: HeadLayout::VocabByHidden, rounds_logits: true };
        let head = HeadProgram::all().into_iter().find(|head| head.id() == "tile-lm-head-rows-scattered").unwrap();
        let text = |tokens| {
            let shape = HeadShape { batch: 8, tokens, hidden: 4094, vocab: 151_936 };
            let given = implementation::ProblemFormat { shape, dtype: Dtype::Bf16, form, packed: None };
            head.program_for(StructuredSpec::new(&spec), given, 8, ANY_TPU).unwrap()
        };
        // As many logits as the gradient has bytes in f32, less than a chunk of eight rows.
        let at_once = text(8184);
        let sent = at_once.lines().filter_map(|line| {
            let columns = line.trim_start().strip_prefix("}) : (tensor<4096x")?.split_once("xf32>) -> tensor<512x")?.0;
            columns.parse().ok()
        });
        let sent: Vec<usize> = sent.collect();
        assert_eq!(sent, [[10_240; 14].as_slice(), &[8192, 1024]].concat(), "384 columns are filled up to 1024");
        assert!(at_once.contains("-> (tensor<1x8184x4094xbf16>") && at_once.contains("tensor<151936x512xf32>)"));
        for whole in ["tensor<4096x151936xf32>", "tensor<4094x151936xf32>"] {
            assert!(!at_once.contains(whole), "{whole}");
            assert!(text(8200).contains(whole), "a second chunk's is added to the first's: {whole}");
        }
    }
}
