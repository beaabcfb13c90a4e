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
//! | `xla-lm-head-seed` | the same by `log_softmax` and autodiff, as the seed's: only to be compiled |
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
//! `-mesh` all of these.

use std::mem;
use std::ops::RangeInclusive;

use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::family::Reach;
use assay_algebra::objective::TokenLoss;
use assay_algebra::structure::{Shaped, Structure};
use assay_core::device_dtype::DeviceDtype;
use assay_core::implementation::{self, Unsupported};
use assay_core::problem::{Dtype, HeadForm, HeadLayout, HeadProblem, HeadShape};
use assay_core::spec::LossSpec;

use crate::alternatives::Alternative;
use crate::mesh::{Axis, Mesh};
use crate::one_pass::{most_tokens, one_pass};
use crate::program::{Evaluated, Given, Output, Program, Share, frame, local_shape};
use crate::rows::in_rows;
use crate::sharding::Sharding;
use crate::tiled::{self, Calls, Rows, Statistics};
use crate::two_pass::Local;
use crate::{ANY_DEVICE, Device, Lowering, Programs, Target, baseline, gpu, unsupported};
use assay_tile::Machine;
use assay_tile::stablehlo::{Builder, Comparison, Fold, Type, Value};

/// Bytes of a chunk's logits, at most. A chunk reads the head twice, and reads and writes its f32 gradient: the fewer the
/// better for HBM. At (8192, 4096, 151936) bf16 there are four of them, which move 45 GB, 28 ms on a v6e beside 41 ms of
/// products; so nothing is gained by larger ones, which are held beside 4 GB of arguments and results.
pub const CHUNK_BYTES: usize = 640_000_000;

/// Bytes of a gradient that are summed over devices at a time: a quarter of it, within these. A collective has its result beside what
/// it sums, so that what is held twice follows the head's size.
const SUM_BYTES: RangeInclusive<usize> = 32_000_000..=640_000_000;

/// Rows of a chunk, and of a block of the sum, are a multiple of it: the rows of an f32 register.
const CHUNK_ROWS: usize = 8;

/// In how many blocks at most a gradient is summed over devices.
const MOST_BLOCKS: usize = 16;

/// What makes the loss of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Core {
    Baseline,
    Seed,
    Tile,
    Gpu,
}

/// The programs of an LM head and a loss under one sharding. See [the module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadProgram {
    core: Core,
    sharding: Sharding,
    chunk_bytes: usize,
    /// [`SUM_BYTES`] if none is given.
    sum_bytes: Option<usize>,
}

impl Programs for HeadProgram {
    type Problem = HeadProblem;

    fn all() -> Vec<HeadProgram> {
        let cores = [Core::Baseline, Core::Tile, Core::Gpu].into_iter();
        let shardings = cores.flat_map(|core| Sharding::ALL.map(|sharding| (core, sharding)));
        shardings
            .chain([(Core::Seed, Sharding::Whole)])
            .map(|(core, sharding)| HeadProgram { core, sharding, chunk_bytes: CHUNK_BYTES, sum_bytes: None })
            .collect()
    }

    fn sharding(self) -> Sharding {
        self.sharding
    }

    fn id(self) -> &'static str {
        match (self.core, self.sharding) {
            (Core::Baseline, Sharding::Whole) => "xla-lm-head",
            (Core::Baseline, Sharding::Rows) => "xla-lm-head-rows",
            (Core::Baseline, Sharding::Vocab) => "xla-lm-head-vocab",
            (Core::Baseline, Sharding::RowsAndVocab) => "xla-lm-head-mesh",
            (Core::Seed, _) => "xla-lm-head-seed",
            (Core::Tile, Sharding::Whole) => "tile-lm-head",
            (Core::Tile, Sharding::Rows) => "tile-lm-head-rows",
            (Core::Tile, Sharding::Vocab) => "tile-lm-head-vocab",
            (Core::Tile, Sharding::RowsAndVocab) => "tile-lm-head-mesh",
            (Core::Gpu, Sharding::Whole) => "gpu-lm-head",
            (Core::Gpu, Sharding::Rows) => "gpu-lm-head-rows",
            (Core::Gpu, Sharding::Vocab) => "gpu-lm-head-vocab",
            (Core::Gpu, Sharding::RowsAndVocab) => "gpu-lm-head-mesh",
        }
    }

    fn summary(self) -> &'static str {
        match (self.core, self.sharding) {
            (Core::Baseline, Sharding::Whole) => "XLA through PJRT, LM head and loss, every logit at once",
            (Core::Tile, Sharding::Whole) => {
                "XLA's products and TPU kernels, LM head and loss, logits in chunks, as loops on any PJRT device"
            }
            (Core::Gpu, Sharding::Whole) => {
                "XLA's products and PTX kernels, LM head and loss, logits in chunks, on NVIDIA GPUs of sm_80"
            }
            (Core::Seed, _) => "the same by log_softmax and autodiff: the seed's program",
            (_, Sharding::Rows) => "the same, rows over devices",
            (_, Sharding::Vocab) => "the same, vocabulary over devices",
            (_, Sharding::RowsAndVocab) => "the same, rows × vocabulary over devices",
        }
    }

    fn class(self) -> &'static str {
        match self.core {
            Core::Baseline | Core::Seed => "xla-lm-head",
            Core::Tile | Core::Gpu => "tile-lm-head",
        }
    }

    fn is_implementation(self) -> bool {
        self.core != Core::Seed
    }

    fn supports(self, spec: &LossSpec, shape: HeadShape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        Reach::Row.expect(spec).map_err(|beyond| unsupported(self, beyond.field, beyond.given, beyond.supported))?;
        if let Some((field, given, supported)) = Alternative::LogSoftmax.lacks(spec)
            && self.core == Core::Seed
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
        if self.core == Core::Gpu {
            let local = local_shape(shape.logits(), mesh, ANY_DEVICE);
            gpu::expect_two_pass_fits(in_rows(local), dtype.into()).map_err(
                |gpu::Beyond { field, given, most, room }| {
                    unsupported(self, field, given, format!("up to {most} of {dtype} {room}"))
                },
            )?;
        }
        Ok(())
    }

    fn text(
        self,
        loss: Shaped,
        given: implementation::Given<HeadProblem>,
        devices: usize,
        device: Device,
    ) -> Result<String, Unsupported> {
        self.expect_device(device)?;
        self.supports(loss.spec, given.shape, given.dtype, devices)?;
        let mesh = self.mesh(given.shape.logits(), devices)?;
        Ok(self.program(loss, given, mesh, device.lowering, device.machine))
    }

    fn has_kernels(self) -> bool {
        matches!(self.core, Core::Tile | Core::Gpu)
    }

    fn least_target(self) -> Option<Target> {
        (self.core == Core::Gpu).then_some(Target::Sm80)
    }
}

impl HeadProgram {
    /// With chunks of up to `bytes` of logits, but at least eight rows, instead of [`CHUNK_BYTES`]: fewer chunks read the
    /// head less often, smaller ones take less memory. The baseline has none.
    #[must_use]
    pub fn chunk_bytes(self, bytes: usize) -> Self {
        Self { chunk_bytes: bytes, ..self }
    }

    /// With the gradient summed over devices by about so many bytes at a time, instead of a quarter of it.
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
        loss: Shaped,
        given: implementation::Given<HeadProblem>,
        devices: usize,
        machine: Machine,
    ) -> Result<String, Unsupported> {
        self.expect_device(Device { machine, lowering: Lowering::Mosaic })?;
        let implementation::Given { shape, dtype, .. } = given;
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
        let given = implementation::Given { shape: HeadShape { batch, ..shape }, ..given };
        let mesh = Mesh { batch: devices, tokens: 1, vocab: 1 };
        Ok(self.program(loss, given, mesh, Lowering::Mosaic, machine))
    }

    /// The kernels of PTX that [`text`](Programs::text) calls for a GPU, in the order of their calls; none of a program that has none.
    ///
    /// # Errors
    /// As of [`expect_device`](Programs::expect_device) and [`supports`](Programs::supports).
    pub fn gpu_kernels_for(
        self,
        loss: Shaped,
        given: implementation::Given<HeadProblem>,
        devices: usize,
        target: Target,
    ) -> Result<Vec<assay_ptx::Kernel>, Unsupported> {
        self.expect_device(Device::gpu(target))?;
        let implementation::Given { shape, dtype, form } = given;
        self.supports(loss.spec, shape, dtype, devices)?;
        if self.core != Core::Gpu {
            return Ok(vec![]);
        }
        let mesh = self.mesh(shape.logits(), devices)?;
        let [b, t, v] = local_shape(shape.logits(), mesh, ANY_DEVICE);
        let logits = if form.rounds_logits { dtype } else { Dtype::F32 };
        let rows = self.chunks([b * t, v], logits, ANY_DEVICE).rows;
        let chunk = [1, rows, v];
        let by_token = Reach::Token.expect(loss.spec).is_ok() && mesh.vocab == 1;
        if let Some(kernel) = by_token.then(|| gpu::one_pass_if(loss.structure, chunk, logits.into(), target)).flatten()
        {
            return Ok(vec![kernel]);
        }
        let local = Local::of(chunk, shape.vocab, mesh);
        let statistics = gpu::two_pass::statistics(target, loss.structure.temperature, local, logits.into());
        Ok(vec![statistics, gpu::two_pass::dlogits(target, loss.structure, local, logits.into())])
    }

    /// The program of one device of `mesh`.
    fn program(
        self,
        loss: Shaped,
        given: implementation::Given<HeadProblem>,
        mesh: Mesh,
        lowering: Lowering,
        machine: Machine,
    ) -> String {
        let structure = loss.structure;
        let implementation::Given { shape, dtype, form: HeadForm { layout, rounds_logits } } = given;
        let logits_dtype = if rounds_logits { dtype } else { Dtype::F32 };
        let share @ Share { local: [b, t, v], .. } = Share::of(shape.logits(), mesh, machine);
        let parameters = |builder: &mut Builder| {
            let array = |extents: &[usize]| Type::new(dtype.into(), extents);
            let hidden = builder.parameter(array(&[b, t, shape.hidden]), Some(Output::Gradient as usize));
            let weights = builder.parameter(array(&layout.extents(shape.hidden, v)), None);
            (hidden, Head { weights, layout, dtype, rounds_logits, rounds_sums: self.core == Core::Gpu })
        };
        frame(structure, share, parameters, |on, given, (hidden, head)| match self.core {
            Core::Baseline => {
                head.materialised(on, given, hidden, |on, logits| baseline::core(on, structure, given, logits, dtype))
            }
            Core::Seed => head.materialised(on, given, hidden, |on, logits| {
                Alternative::LogSoftmax.core(on, structure, given, logits, dtype)
            }),
            Core::Tile | Core::Gpu => {
                let chunks = self.chunks([b * t, v], logits_dtype, machine);
                let calls = Calls { dtype: logits_dtype, lowering, machine, ptx: self.ptx_target(lowering) };
                if Reach::Token.expect(loss.spec).is_ok() {
                    head.in_one_loop(on, structure, given, hidden, chunks, calls)
                } else {
                    head.in_two_loops(on, structure, given, hidden, chunks, calls)
                }
            }
        })
    }

    /// How many tokens a trip takes of a device's.
    fn chunks(self, [tokens, vocab]: [usize; 2], logits: Dtype, machine: Machine) -> Chunks {
        let most = if self.core == Core::Gpu { usize::MAX } else { most_tokens(machine) };
        let most = (self.chunk_bytes / (vocab * logits.size())).min(most) / CHUNK_ROWS * CHUNK_ROWS;
        let trips = tokens.div_ceil(most.max(CHUNK_ROWS));
        let rows = tokens.div_ceil(trips).next_multiple_of(CHUNK_ROWS);
        Chunks { tokens, rows, padded: trips * rows, sum_bytes: self.sum_bytes }
    }
}

/// The products of a head.
#[derive(Clone, Copy)]
struct Head {
    /// `[h,v]` or `[v,h]`
    weights: Value,
    layout: HeadLayout,
    dtype: Dtype,
    rounds_logits: bool,
    /// Whether a product rounds its sums itself, so that they are never there in f32: a GPU's does, once.
    rounds_sums: bool,
}

impl Head {
    /// The axis of the weights that is `H`, and the one that is `V`.
    fn axes(self) -> [usize; 2] {
        match self.layout {
            HeadLayout::HiddenByVocab => [0, 1],
            HeadLayout::VocabByHidden => [1, 0],
        }
    }

    /// `[n,v]` of `[n,h]`, f32, or rounded in the dtype of hidden.
    fn logits(self, on: &mut Program, hidden: Value) -> Value {
        let [of_hidden, _] = self.axes();
        let rounded = self.rounds_logits && self.dtype != Dtype::F32;
        let element = if rounded && self.rounds_sums { self.dtype.into() } else { DeviceDtype::F32 };
        let logits = on.builder.dot(hidden, self.weights, [1, of_hidden], element);
        if !rounded || self.rounds_sums {
            return logits;
        }
        // Compilers carry more digits than they are asked for where they see that a value is widened again.
        let rounded = on.builder.convert(logits, self.dtype.into());
        on.builder.barrier(rounded)
    }

    /// dhidden `[n,h]` in the dtype of hidden, and this device's part of `dlm_head`, f32, from `[n,v]` of dlogits. `mask` is `[n]`.
    fn gradients(self, on: &mut Program, hidden: Value, dlogits: Value, mask: Value) -> [Value; 2] {
        let dlogits = on.builder.convert(dlogits, self.dtype.into());
        let [_, of_vocab] = self.axes();
        // What several devices sum is rounded after.
        let element = if self.rounds_sums && on.mesh.vocab == 1 { self.dtype.into() } else { DeviceDtype::F32 };
        let dhidden = on.builder.dot(dlogits, self.weights, [1, of_vocab], element);
        let dhidden = on.over(&[Axis::Vocab], Fold::Add, dhidden);
        let dhidden = on.builder.convert(dhidden, self.dtype.into());
        let dhidden = unmasked(on, dhidden, mask);
        let dlm_head = match self.layout {
            HeadLayout::HiddenByVocab => on.builder.dot(hidden, dlogits, [0, 0], DeviceDtype::F32),
            HeadLayout::VocabByHidden => on.builder.dot(dlogits, hidden, [0, 0], DeviceDtype::F32),
        };
        [dhidden, dlm_head]
    }

    /// Every logit at once, `[b,t,v]`, and what `core` makes of them.
    fn materialised(
        self,
        on: &mut Program,
        given: &Given,
        hidden: Value,
        core: impl FnOnce(&mut Program, Value) -> Evaluated,
    ) -> Evaluated<[Value; 2]> {
        let [b, t, v] = on.local;
        let shape = on.builder.type_of(hidden).shape.clone();
        let hidden = on.builder.reshape(hidden, &[b * t, shape[2]]);
        let mask = on.builder.reshape(given.mask, &[b * t]);
        let hidden = unmasked(on, hidden, mask);
        let logits = self.logits(on, hidden);
        let logits = on.builder.reshape(logits, &[b, t, v]);
        let Evaluated { gradient, logp, entropy, token } = core(on, logits);
        let dlogits = on.builder.reshape(gradient, &[b * t, v]);
        let [dhidden, dlm_head] = self.gradients(on, hidden, dlogits, mask);
        let dhidden = on.builder.reshape(dhidden, &shape);
        let dlm_head = on.over(&[Axis::Batch, Axis::Tokens], Fold::Add, dlm_head);
        Evaluated { gradient: [dhidden, dlm_head], logp, entropy, token }
    }

    /// A loss that one token decides.
    fn in_one_loop(
        self,
        on: &mut Program,
        structure: Structure,
        given: &Given,
        hidden: Value,
        chunks: Chunks,
        calls: Calls,
    ) -> Evaluated<[Value; 2]> {
        let in_line = given.part(&mut |array| chunks.in_line(on, array));
        let whole = on.mesh.vocab == 1;
        let resident = whole.then(|| OnePass::of(structure, [1, chunks.rows, on.local[2]], calls)).flatten();
        // logp, entropy, token_loss, what the reduction weighs, ratio, KL; then where the ratio is clipped.
        let arrays = [[DeviceDtype::F32; 6].as_slice(), &[DeviceDtype::Pred; 2]].concat();
        let arrays = arrays.into_iter().map(|element| chunks.empty(on, element)).collect::<Vec<_>>();
        let dlogits = |on: &mut Program, first, given: &Given, logits, arrays: &[Value]| {
            let Evaluated { gradient, logp, entropy, token } = match &resident {
                Some(OnePass::Tile(kernel)) => tiled::tile_one_pass_core(on, kernel, structure, given, logits, calls),
                Some(OnePass::Gpu(kernel)) => {
                    let call = |on: &mut Program, operands: [Value; 4]| tiled::call_ptx(on, kernel, &operands);
                    tiled::one_pass_core(on, structure, given, logits, call)
                }
                None => tiled::two_pass_core(on, structure, given, logits, calls),
            };
            let TokenLoss { loss, reduced, ratio, kl, clipped_low, clipped_high, .. } = token;
            let kl = kl.unwrap_or_else(|| on.constant(0.0));
            let values = [logp, entropy, loss, reduced, ratio, kl, clipped_low, clipped_high];
            let put = arrays.iter().zip(values).map(|(&array, value)| on.put(array, value, first)).collect();
            (gradient, put)
        };
        let (gradient, arrays) = self.gradient_loop(on, hidden, &in_line, chunks, &arrays, dlogits);
        let arrays: Vec<Value> = arrays.iter().map(|&array| chunks.in_rows(on, array)).collect();
        let [logp, entropy, loss, reduced, ratio, kl, clipped_low, clipped_high] = arrays[..] else {
            unreachable!("as many as were carried")
        };
        let kl = structure.kl.map(|_| kl);
        let token =
            TokenLoss { loss, reduced, by_logp: None, by_log_ratio: None, ratio, kl, clipped_low, clipped_high };
        Evaluated { gradient, logp, entropy, token }
    }

    /// A loss that a sequence decides: its logits are made twice.
    fn in_two_loops(
        self,
        on: &mut Program,
        structure: Structure,
        given: &Given,
        hidden: Value,
        chunks: Chunks,
        calls: Calls,
    ) -> Evaluated<[Value; 2]> {
        const STATISTICS: usize = 5;
        let in_line = given.part(&mut |array| chunks.in_line(on, array));
        let states = chunks.states(on, hidden);
        let arrays: Vec<Value> = (0..STATISTICS + 2).map(|_| chunks.empty(on, DeviceDtype::F32)).collect();
        let arrays = on.for_each_chunk(chunks, &arrays, |on, first, arrays| {
            let given = in_line.part(&mut |array| chunks.cut(on, array, first));
            let (_, logits) = self.logits_of_chunk(on, states, given.mask, chunks, first);
            let Rows { statistics, logp, entropy } = tiled::rows(on, structure, &given.forward(logits), calls);
            let values = statistics.to_array().into_iter().chain([logp, entropy]);
            arrays.iter().zip(values).map(|(&array, value)| on.put(array, value, first)).collect()
        });
        let (statistics, logp_and_entropy) = arrays.split_at(STATISTICS);
        let [logp, entropy] = [0, 1].map(|place| chunks.in_rows(on, logp_and_entropy[place]));
        let (token, grad_logp) = on.token_loss(structure, given, logp);
        let grad_logp = chunks.in_line(on, grad_logp);
        let dlogits = |on: &mut Program, first, given: &Given, logits, _: &[Value]| {
            let mut cut = |array| chunks.cut(on, array, first);
            let statistics: [Value; STATISTICS] = std::array::from_fn(|place| cut(statistics[place]));
            let (statistics, grad_logp) = (Statistics::from_array(statistics), cut(grad_logp));
            (tiled::dlogits(on, structure, given, logits, statistics, grad_logp, calls), vec![])
        };
        let (gradient, _) = self.gradient_loop(on, hidden, &in_line, chunks, &[], dlogits);
        Evaluated { gradient, logp, entropy, token }
    }

    /// `[c,h]` of the hidden states `[N,h]` from row `first` on, 0 where the mask hides a token, and their logits `[c,v]`.
    fn logits_of_chunk(
        self,
        on: &mut Program,
        states: Value,
        mask: Value,
        chunks: Chunks,
        first: Value,
    ) -> (Value, Value) {
        let start = on.at_row(first);
        let width = on.builder.type_of(states).shape[1];
        let hidden = on.builder.dynamic_slice(states, &start, &[chunks.rows, width]);
        let mask = on.builder.reshape(mask, &[chunks.rows]);
        let hidden = unmasked(on, hidden, mask);
        (hidden, self.logits(on, hidden))
    }

    /// A loop over the chunks that gathers the gradients of both: dhidden `[b,t,h]`, written over the hidden states, and
    /// `dlm_head` in f32, over all devices. `dlogits` makes those of a chunk from its first row, what is given of its tokens,
    /// its logits `[c,v]` and what else is carried.
    fn gradient_loop(
        self,
        on: &mut Program,
        hidden: Value,
        in_line: &Given,
        chunks: Chunks,
        carried: &[Value],
        dlogits: impl FnOnce(&mut Program, Value, &Given, Value, &[Value]) -> (Value, Vec<Value>),
    ) -> ([Value; 2], Vec<Value>) {
        let shape = on.builder.type_of(hidden).shape.clone();
        let states = chunks.states(on, hidden);
        let of_head = on.builder.type_of(self.weights).shape.clone();
        let nothing = on.builder.constant(0.0, Type::new(DeviceDtype::F32, &of_head));
        let carried = [&[states, nothing], carried].concat();
        let results = on.for_each_chunk(chunks, &carried, |on, first, carried| {
            let &[states, dlm_head, ref carried @ ..] = carried else { unreachable!("as many as were given") };
            let given = in_line.part(&mut |array| chunks.cut(on, array, first));
            let (hidden, logits) = self.logits_of_chunk(on, states, given.mask, chunks, first);
            let (dlogits, next) = dlogits(on, first, &given, logits, carried);
            let mask = on.builder.reshape(given.mask, &[chunks.rows]);
            let [dhidden, of_chunk] = self.gradients(on, hidden, dlogits, mask);
            let start = on.at_row(first);
            let states = on.builder.dynamic_update_slice(states, dhidden, &start);
            let dlm_head = on.builder.add(dlm_head, of_chunk);
            [&[states, dlm_head], &next[..]].concat()
        });
        let &[states, dlm_head, ref carried @ ..] = &results[..] else { unreachable!("as many as were given") };
        let dhidden = on.builder.slice(states, &[0, 0], &[chunks.tokens, shape[2]]);
        let dhidden = on.builder.reshape(dhidden, &shape);
        let dlm_head = on.over_rows(dlm_head, chunks.sum_bytes);
        ([dhidden, dlm_head], carried.to_vec())
    }
}

/// A kernel that reads a chunk's logits once.
enum OnePass {
    Tile(assay_tile::Kernel),
    Gpu(assay_ptx::Kernel),
}

impl OnePass {
    /// For `[1,n,v]` logits; `None` where a row fits no memory that it could stay in.
    fn of(structure: Structure, chunk: [usize; 3], calls: Calls) -> Option<Self> {
        let Calls { dtype, machine, ptx, .. } = calls;
        match ptx {
            Some(target) => gpu::one_pass_if(structure, chunk, dtype.into(), target).map(Self::Gpu),
            None => one_pass(structure, chunk, dtype.into(), machine).map(Self::Tile),
        }
    }
}

/// `[n,m]`, 0 where `mask`, `[n]`, hides a row.
fn unmasked(on: &mut Program, array: Value, mask: Value) -> Value {
    let ty = on.builder.type_of(array).clone();
    let mask = on.builder.broadcast(mask, &[0], &ty.shape);
    let zero = on.builder.constant(0.0, ty);
    on.builder.select(mask, array, zero)
}

/// A device's tokens in one line, cut into chunks of as many each.
#[derive(Clone, Copy)]
struct Chunks {
    /// `b·t`
    tokens: usize,
    /// Of a chunk.
    rows: usize,
    /// `N`, of all chunks.
    padded: usize,
    /// What of the gradient is summed over devices at a time.
    sum_bytes: Option<usize>,
}

impl Chunks {
    /// `[b,t]` as `[1,N]`, with 0 behind; a scalar as it is.
    fn in_line(self, on: &mut Program, array: Value) -> Value {
        let ty = on.builder.type_of(array).clone();
        if ty.shape.is_empty() {
            return array;
        }
        let line = on.builder.reshape(array, &[1, self.tokens]);
        let zero = on.builder.constant(0.0, Type::new(ty.element, &[]));
        on.builder.pad(line, zero, &[1, self.padded])
    }

    /// `[1,N]` as `[b,t]`.
    fn in_rows(self, on: &mut Program, line: Value) -> Value {
        let [b, t, _] = on.local;
        let line = on.builder.slice(line, &[0, 0], &[1, self.tokens]);
        on.builder.reshape(line, &[b, t])
    }

    /// `[1,N]` to be filled.
    fn empty(self, on: &mut Program, element: DeviceDtype) -> Value {
        on.builder.constant(0.0, Type::new(element, &[1, self.padded]))
    }

    /// `[b,t,h]` as `[N,h]`, with 0 behind.
    fn states(self, on: &mut Program, hidden: Value) -> Value {
        let Type { element, shape } = on.builder.type_of(hidden).clone();
        let line = on.builder.reshape(hidden, &[self.tokens, shape[2]]);
        let zero = on.builder.constant(0.0, Type::new(element, &[]));
        on.builder.pad(line, zero, &[self.padded, shape[2]])
    }

    /// The chunk of `[1,N]` from `first` on, `[1,c]`; a scalar as it is.
    fn cut(self, on: &mut Program, line: Value, first: Value) -> Value {
        if on.builder.type_of(line).shape.is_empty() {
            return line;
        }
        let start = on.at_column(first);
        on.builder.dynamic_slice(line, &start, &[1, self.rows])
    }
}

impl Program {
    /// Where a part of a matrix begins that has its rows from `first` on.
    fn at_row(&mut self, first: Value) -> [Value; 2] {
        [first, self.builder.constant(0.0, Type::new(DeviceDtype::I32, &[]))]
    }

    /// The same for its columns.
    fn at_column(&mut self, first: Value) -> [Value; 2] {
        let [first, zero] = self.at_row(first);
        [zero, first]
    }

    /// `[1,N]` with a chunk of it written at `first`.
    fn put(&mut self, line: Value, chunk: Value, first: Value) -> Value {
        let start = self.at_column(first);
        self.builder.dynamic_update_slice(line, chunk, &start)
    }

    /// Goes on from `carried` with `body` for the first row of each chunk.
    fn for_each_chunk(
        &mut self,
        chunks: Chunks,
        carried: &[Value],
        body: impl FnOnce(&mut Program, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let index = Type::new(DeviceDtype::I32, &[]);
        let local = [1, chunks.rows, self.local[2]];
        let (mesh, vocab) = (self.mesh, self.vocab);
        let carried = [&[self.builder.constant(0.0, index.clone())], carried].concat();
        let results = self.builder.while_loop(
            &carried,
            |builder, carried| {
                let end = builder.constant(chunks.padded as f64, index.clone());
                builder.compare(Comparison::Less, carried[0], end)
            },
            |builder, carried| {
                let mut on = Program { builder: mem::take(builder), local, mesh, vocab };
                let next = body(&mut on, carried[0], &carried[1..]);
                let step = on.builder.constant(chunks.rows as f64, index.clone());
                let following = on.builder.add(carried[0], step);
                *builder = on.builder;
                [&[following], &next[..]].concat()
            },
        );
        results[1..].to_vec()
    }

    /// `[m,k]` in f32 summed over the devices that hold other rows of the batch, about `bytes` at a time, or a quarter of it within
    /// [`SUM_BYTES`]. Blocks begin with a register, or XLA puts them back three times as slowly.
    fn over_rows(&mut self, mut array: Value, bytes: Option<usize>) -> Value {
        let axes = [Axis::Batch, Axis::Tokens];
        let [rows, width] = self.builder.type_of(array).shape[..] else { unreachable!("a head has two axes") };
        let all = rows * width * DeviceDtype::F32.size();
        let bytes = bytes.unwrap_or((all / 4).clamp(*SUM_BYTES.start(), *SUM_BYTES.end()));
        let blocks = all.div_ceil(bytes.max(1)).min(MOST_BLOCKS);
        let block = rows.div_ceil(blocks).next_multiple_of(CHUNK_ROWS);
        if self.mesh.batch * self.mesh.tokens == 1 || block >= rows {
            return self.over(&axes, Fold::Add, array);
        }
        for first in (0..rows).step_by(block) {
            // One after another: sums side by side would take their memory together.
            array = self.builder.barrier(array);
            let part = self.builder.slice(array, &[first, 0], &[block.min(rows - first), width]);
            let part = self.over(&axes, Fold::Add, part);
            let first = self.builder.constant(first as f64, Type::new(DeviceDtype::I32, &[]));
            let start = self.at_row(first);
            array = self.builder.dynamic_update_slice(array, part, &start);
        }
        array
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ANY_TPU;

    /// Rows of each part of the gradient that is summed over eight devices, of a head `[H,V]`.
    fn summed(hidden: usize, vocab: usize, sum_bytes: Option<usize>) -> Vec<usize> {
        let spec = LossSpec::default();
        let shape = HeadShape { batch: 1, tokens: 2048, hidden, vocab };
        let form = HeadForm { layout: HeadLayout::HiddenByVocab, rounds_logits: true };
        let given = implementation::Given { shape, dtype: Dtype::Bf16, form };
        let head = HeadProgram {
            sum_bytes,
            ..HeadProgram::all().into_iter().find(|head| head.id() == "tile-lm-head").unwrap()
        };
        let text = head.program_for(Shaped::of(&spec), given, 8, ANY_TPU).unwrap();
        // The sum's region ends with its type.
        let of_gradient = text.lines().filter(|line| line.trim_start().starts_with("}) : (tensor<"));
        let rows = of_gradient.filter_map(|line| {
            let extents = line.split_once("tensor<")?.1.split_once(&format!("x{vocab}xf32>"))?.0;
            extents.parse().ok()
        });
        rows.collect()
    }

    #[test]
    fn a_gradient_is_summed_over_devices_by_quarters_or_as_asked() {
        // Qwen2.5-0.5B's, 545 MB.
        assert_eq!(summed(896, 151_936, None), [224; 4]);
        assert_eq!(summed(896, 151_936, Some(640_000_000)), [896]);
        assert_eq!(summed(896, 151_936, Some(1)), [56; 16], "sixteen parts at most");
        assert_eq!(summed(64, 4096, None), [64], "a megabyte is summed at once");
    }
}
