//! The products of a head, whole and by chunks, and what goes between devices beside them.

use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::objective::TokenLoss;
use assay_algebra::structure::Structure;
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::{Dtype, HeadLayout};

use super::chunks::{Chunks, SCATTERED_REGISTERS};
use crate::mesh::MeshAxis;
use crate::one_pass::one_pass;
use crate::program::{CoreInputs, CoreOutputs, Program};
use crate::tiled::{self, ForwardPass, KernelCalls, TokenStatistics};
use crate::{gpu, several};
use assay_tile::stablehlo::{Fold, HloComparison, HloType, HloValue};

/// The products of a head.
#[derive(Clone, Copy)]
pub(super) struct HeadMatmuls {
    /// The weights of the head, `[h,v]` or `[v,h]`.
    pub(super) weights: HloValue,
    pub(super) layout: HeadLayout,
    pub(super) dtype: Dtype,
    pub(super) rounds_logits: bool,
    /// Whether a product rounds its sums itself, so that they are never there in f32: a GPU's does, once.
    pub(super) rounds_sums: bool,
    /// Whether what is summed over devices comes back in parts.
    pub(super) scattered: bool,
}

/// One chunk's contribution to the gradients, and the values carried to the next chunk.
struct ChunkGradient {
    /// `[c,h]`, 0 where the mask hides a token.
    hidden: HloValue,
    /// `[c,v]`, in the dtype of hidden.
    dlogits: HloValue,
    /// The mask of the chunk's tokens, `[c]`.
    mask: HloValue,
    carried: Vec<HloValue>,
}

impl HeadMatmuls {
    /// The axis of the weights that is `H`, and the one that is `V`.
    fn axes(self) -> [usize; 2] {
        match self.layout {
            HeadLayout::HiddenByVocab => [0, 1],
            HeadLayout::VocabByHidden => [1, 0],
        }
    }

    /// `[n,v]` of `[n,h]`, f32, or rounded in the dtype of hidden.
    fn logits(self, on: &mut Program, hidden: HloValue) -> HloValue {
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

    /// Whether hidden states come in parts, one a device.
    fn gathers(self, on: &Program) -> bool {
        self.scattered && on.mesh.vocab > 1
    }

    /// Whether `dlm_head` goes out in parts, one a device.
    fn scatters(self, on: &Program) -> bool {
        self.scattered && on.mesh.batch * on.mesh.tokens > 1
    }

    /// Whether there is more than one part of either.
    fn in_parts(self, on: &Program) -> bool {
        self.gathers(on) || self.scatters(on)
    }

    /// dhidden `[n,h]` in the dtype of hidden, from `[n,v]` of dlogits; of as many parts as there are devices this one's. `mask` is `[n]`;
    /// where there is none, who calls sees to it that dhidden is 0 where a token is hidden.
    fn dhidden(self, on: &mut Program, dlogits: HloValue, mask: Option<HloValue>) -> HloValue {
        let [_, of_vocab] = self.axes();
        // What several devices sum is rounded after.
        let element = if self.rounds_sums && on.mesh.vocab == 1 { self.dtype.into() } else { DeviceDtype::F32 };
        let dhidden = on.builder.dot(dlogits, self.weights, [1, of_vocab], element);
        if self.gathers(on) {
            let dhidden = mask.map_or(dhidden, |mask| unmasked(on, dhidden, mask));
            let dhidden = on.scattered(&[MeshAxis::Vocab], dhidden);
            return on.builder.convert(dhidden, self.dtype.into());
        }
        let dhidden = on.over(&[MeshAxis::Vocab], Fold::Add, dhidden);
        let dhidden = on.builder.convert(dhidden, self.dtype.into());
        mask.map_or(dhidden, |mask| unmasked(on, dhidden, mask))
    }

    /// Returns this device's hidden states as `[N,h]` and, if sums come back in parts, the mask `[N]` of their
    /// tokens, with masked states set to 0. Masking here once, behind a barrier, lets products take them unchanged:
    /// libtpu fills its unit worse with products that mask an operand themselves, and takes longer to compile them.
    fn states(
        self,
        on: &mut Program,
        hidden: HloValue,
        in_line: &CoreInputs,
        chunks: Chunks,
    ) -> (HloValue, Option<HloValue>) {
        let states = chunks.states(on, hidden);
        if !self.in_parts(on) {
            return (states, None);
        }
        let mask = if chunks.parts > 1 {
            // Every device has the mask of all: of the sum of their copies it keeps its part.
            let copies = on.builder.convert(in_line.mask, DeviceDtype::F32);
            let part = on.scattered(&[MeshAxis::Vocab], copies);
            let nothing = on.builder.constant(0.0, on.builder.type_of(part).clone());
            on.builder.compare(HloComparison::Less, nothing, part)
        } else {
            in_line.mask
        };
        let mask = on.builder.reshape(mask, &[chunks.padded]);
        let states = unmasked(on, states, mask);
        (on.builder.barrier(states), Some(mask))
    }

    /// Returns this device's part of `dlm_head`, f32, in the head's layout; always `[h,v]` if it is to be scattered.
    fn dlm_head(self, on: &mut Program, hidden: HloValue, dlogits: HloValue) -> HloValue {
        match self.layout {
            HeadLayout::VocabByHidden if !self.scatters(on) => {
                on.builder.dot(dlogits, hidden, [0, 0], DeviceDtype::F32)
            }
            _ => on.builder.dot(hidden, dlogits, [0, 0], DeviceDtype::F32),
        }
    }

    /// Every logit at once, `[b,t,v]`, and what `core` makes of them.
    pub(super) fn materialised(
        self,
        on: &mut Program,
        given: &CoreInputs,
        hidden: HloValue,
        core: impl FnOnce(&mut Program, HloValue) -> CoreOutputs,
    ) -> CoreOutputs<[HloValue; 2]> {
        let [b, t, v] = on.local;
        let shape = on.builder.type_of(hidden).shape.clone();
        let width = shape[shape.len() - 1];
        // Where they come in parts, tokens that fill the last of them go along, masked.
        let hidden = if self.gathers(on) { on.gathered(&[MeshAxis::Vocab], hidden) } else { hidden };
        let all = on.builder.type_of(hidden).shape.iter().product::<usize>() / width;
        let hidden = on.builder.reshape(hidden, &[all, width]);
        let mask = on.builder.reshape(given.mask, &[b * t]);
        let hidden = on.builder.slice(hidden, &[0, 0], &[b * t, width]);
        let hidden = unmasked(on, hidden, mask);
        let logits = self.logits(on, hidden);
        let logits = on.builder.reshape(logits, &[b, t, v]);
        let CoreOutputs { gradient, logp, logp_of_others, entropy, token } = core(on, logits);
        let dlogits = on.builder.reshape(gradient, &[b * t, v]);
        let dlogits = on.builder.convert(dlogits, self.dtype.into());
        // The gradients of both factors; tokens that fill the last device's part have zero rows.
        let [mut rows, mut mask] = [dlogits, mask];
        if all > b * t {
            rows = on.filled(rows, &[all, v]);
            mask = on.filled(mask, &[all]);
        }
        let dhidden = self.dhidden(on, rows, Some(mask));
        let dhidden = on.builder.reshape(dhidden, &shape);
        let dlm_head = if self.scatters(on) {
            let hidden = on.divisible(hidden);
            let dlm_head = self.dlm_head(on, hidden, dlogits);
            let part = on.scattered(&MeshAxis::ROWS, dlm_head);
            self.as_it_lies(on, part)
        } else {
            let dlm_head = self.dlm_head(on, hidden, dlogits);
            on.over(&MeshAxis::ROWS, Fold::Add, dlm_head)
        };
        CoreOutputs { gradient: [dhidden, dlm_head], logp, logp_of_others, entropy, token }
    }

    /// A loss that one token decides.
    pub(super) fn in_one_loop(
        self,
        on: &mut Program,
        structure: Structure,
        given: &CoreInputs,
        hidden: HloValue,
        chunks: Chunks,
        calls: KernelCalls,
    ) -> CoreOutputs<[HloValue; 2]> {
        // A loss that one token decides needs each chunk's logits once: kernel, dhidden and dlm_head in one trip.
        let in_line = given.part(&mut |array| chunks.in_line(on, array));
        let whole = on.mesh.vocab == 1;
        let resident =
            whole.then(|| ResidentKernel::for_chunk(structure, [1, chunks.all_rows(), on.local[2]], calls)).flatten();
        // logp, entropy, token_loss, what the reduction weighs, ratio, KL; then where the ratio is clipped.
        // And logp of each id beside the first.
        let of_others = vec![DeviceDtype::F32; structure.ids_per_token - 1];
        let arrays = [[DeviceDtype::F32; 6].as_slice(), &[DeviceDtype::Pred; 2], &of_others].concat();
        let arrays = arrays.into_iter().map(|element| chunks.empty(on, element)).collect::<Vec<_>>();
        let dlogits = |on: &mut Program, first, given: &CoreInputs, logits, arrays: &[HloValue]| {
            let core = |on: &mut Program, given: &CoreInputs, logits| match &resident {
                Some(ResidentKernel::Tile(kernel)) => {
                    tiled::tile_one_pass_core(on, kernel, structure, given, logits, calls)
                }
                Some(ResidentKernel::Gpu(kernel)) => tiled::gpu_one_pass_core(on, kernel, structure, given, logits),
                None => tiled::two_pass_core(on, structure, given, logits, calls),
            };
            let evaluated = several::around(on, structure, given, logits, calls.dtype, core);
            let CoreOutputs { gradient, logp, logp_of_others, entropy, token } = evaluated;
            let others = logp_of_others.map_or_else(Vec::new, |others| several::apart(on, others));
            let TokenLoss { loss, reduced, ratio, kl, clipped_low, clipped_high, .. } = token;
            let kl = kl.unwrap_or_else(|| on.constant(0.0));
            let values = [logp, entropy, loss, reduced, ratio, kl, clipped_low, clipped_high];
            let put = arrays
                .iter()
                .zip(values.into_iter().chain(others))
                .map(|(&array, value)| chunks.put(on, array, value, first))
                .collect();
            (gradient, put)
        };
        let (gradient, arrays) = self.gradient_loop(on, hidden, &in_line, chunks, &arrays, dlogits);
        let arrays: Vec<HloValue> = arrays.iter().map(|&array| chunks.in_rows(on, array)).collect();
        let [logp, entropy, loss, reduced, ratio, kl, clipped_low, clipped_high, ref others @ ..] = arrays[..] else {
            unreachable!("as many as were carried")
        };
        let logp_of_others = (!others.is_empty()).then(|| several::together(on, others));
        let kl = structure.kl.map(|_| kl);
        let token = TokenLoss {
            loss,
            reduced,
            by_logp: None,
            by_kl_logp: None,
            by_log_ratio: None,
            ratio,
            kl,
            clipped_low,
            clipped_high,
        };
        CoreOutputs { gradient, logp, logp_of_others, entropy, token }
    }

    /// A loss that a sequence decides: its logits are made twice.
    pub(super) fn in_two_loops(
        self,
        on: &mut Program,
        structure: Structure,
        given: &CoreInputs,
        hidden: HloValue,
        chunks: Chunks,
        calls: KernelCalls,
    ) -> CoreOutputs<[HloValue; 2]> {
        const STATISTICS: usize = 5;
        // The first loop keeps statistics and logp of every token; the loss of the sequences follows between the
        // loops; the second loop makes the logits again and writes dlogits over them.
        let in_line = given.part(&mut |array| chunks.in_line(on, array));
        let (states, _) = self.states(on, hidden, &in_line, chunks);
        let arrays: Vec<HloValue> = (0..STATISTICS + 2).map(|_| chunks.empty(on, DeviceDtype::F32)).collect();
        let arrays = on.for_each_chunk(chunks, chunks.padded, &arrays, |on, first, arrays| {
            let given = in_line.part(&mut |array| chunks.cut(on, array, first));
            let hidden = chunks.hidden(on, states, first);
            let (_, logits) = self.logits_of_chunk(on, hidden, given.mask, chunks);
            let ForwardPass { statistics, logp, entropy } = tiled::rows(on, structure, &given.forward(logits), calls);
            let values = statistics.to_array().into_iter().chain([logp, entropy]);
            arrays.iter().zip(values).map(|(&array, value)| chunks.put(on, array, value, first)).collect()
        });
        let (statistics, logp_and_entropy) = arrays.split_at(STATISTICS);
        let [logp, entropy] = [0, 1].map(|place| chunks.in_rows(on, logp_and_entropy[place]));
        let (token, grad_logp) = on.token_loss(structure, given, logp);
        let grad_logp = chunks.in_line(on, grad_logp);
        let dlogits = |on: &mut Program, first, given: &CoreInputs, logits, _: &[HloValue]| {
            let mut cut = |array| chunks.cut(on, array, first);
            let statistics: [HloValue; STATISTICS] = std::array::from_fn(|place| cut(statistics[place]));
            let (statistics, grad_logp) = (TokenStatistics::from_array(statistics), cut(grad_logp));
            (tiled::dlogits(on, structure, given, logits, statistics, grad_logp, calls), vec![])
        };
        let (gradient, _) = self.gradient_loop(on, hidden, &in_line, chunks, &[], dlogits);
        CoreOutputs { gradient, logp, logp_of_others: None, entropy, token }
    }

    /// The hidden states of a chunk, `[c,h]`, 0 where the mask hides a token, and their logits `[c,v]`.
    fn logits_of_chunk(
        self,
        on: &mut Program,
        hidden: HloValue,
        mask: HloValue,
        chunks: Chunks,
    ) -> (HloValue, HloValue) {
        let mask = on.builder.reshape(mask, &[chunks.all_rows()]);
        let hidden = if self.in_parts(on) { hidden } else { unmasked(on, hidden, mask) };
        (hidden, self.logits(on, hidden))
    }

    /// A loop over the chunks that gathers the gradients of both: dhidden, written over the hidden states, and `dlm_head` in f32, over
    /// all devices. `dlogits` makes those of a chunk from its first row, what is given of its tokens, its logits `[c,v]` and what else is
    /// carried.
    fn gradient_loop(
        self,
        on: &mut Program,
        hidden: HloValue,
        in_line: &CoreInputs,
        chunks: Chunks,
        carried: &[HloValue],
        dlogits: impl Fn(&mut Program, HloValue, &CoreInputs, HloValue, &[HloValue]) -> (HloValue, Vec<HloValue>),
    ) -> ([HloValue; 2], Vec<HloValue>) {
        let shape = on.builder.type_of(hidden).shape.clone();
        let width = shape[shape.len() - 1];
        let (states, own_mask) = self.states(on, hidden, in_line, chunks);
        let chunk = |on: &mut Program, first, hidden, carried: &[HloValue]| {
            let given = in_line.part(&mut |array| chunks.cut(on, array, first));
            let (hidden, logits) = self.logits_of_chunk(on, hidden, given.mask, chunks);
            let (dlogits, carried) = dlogits(on, first, &given, logits, carried);
            let dlogits = on.builder.convert(dlogits, self.dtype.into());
            let mask = on.builder.reshape(given.mask, &[chunks.all_rows()]);
            ChunkGradient { hidden, dlogits, mask, carried }
        };
        let (states, dlm_head, carried) = if self.gathers(on) {
            self.loop_of_gathered(on, states, chunks, carried, chunk)
        } else if self.scatters(on) {
            self.loop_of_scattered(on, states, chunks, carried, chunk)
        } else {
            let of_head = on.builder.type_of(self.weights).shape.clone();
            // The head's gradient is summed over the chunks in f32, from zeros.
            let nothing = on.builder.constant(0.0, HloType::new(DeviceDtype::F32, &of_head));
            let (states, dlm_head, carried) =
                self.loop_up_to(on, chunks.padded, [states, nothing], chunks, carried, chunk);
            (states, on.over_rows(dlm_head, chunks.sum_bytes), carried)
        };
        let states = own_mask.map_or(states, |mask| {
            let states = on.builder.barrier(states);
            unmasked(on, states, mask)
        });
        let dhidden = on.builder.slice(states, &[0, 0], &[chunks.part(), width]);
        ([on.builder.reshape(dhidden, &shape), dlm_head], carried)
    }

    /// The loop over the chunks before `end`, from the hidden states and the gradient so far.
    fn loop_up_to(
        self,
        on: &mut Program,
        end: usize,
        [states, dlm_head]: [HloValue; 2],
        chunks: Chunks,
        carried: &[HloValue],
        chunk: impl Fn(&mut Program, HloValue, HloValue, &[HloValue]) -> ChunkGradient,
    ) -> (HloValue, HloValue, Vec<HloValue>) {
        let carried = [&[states, dlm_head], carried].concat();
        let results = on.for_each_chunk(chunks, end, &carried, |on, first, carried| {
            let &[states, dlm_head, ref carried @ ..] = carried else { unreachable!("as many as were given") };
            let hidden = chunks.hidden(on, states, first);
            let ChunkGradient { hidden, dlogits, mask, carried } = chunk(on, first, hidden, carried);
            let dhidden = self.dhidden(on, dlogits, (!self.in_parts(on)).then_some(mask));
            let of_chunk = self.dlm_head(on, hidden, dlogits);
            let start = on.at_row(first);
            let states = on.builder.dynamic_update_slice(states, dhidden, &start);
            let dlm_head = on.builder.add(dlm_head, of_chunk);
            [&[states, dlm_head], &carried[..]].concat()
        });
        let &[states, dlm_head, ref carried @ ..] = &results[..] else { unreachable!("as many as were given") };
        (states, dlm_head, carried.to_vec())
    }

    /// Runs the loop if every device has hidden states of its own and columns of its own. The next chunk's hidden
    /// states are gathered during the products of this one, and dhidden is scattered during the head's product.
    fn loop_of_gathered(
        self,
        on: &mut Program,
        states: HloValue,
        chunks: Chunks,
        carried: &[HloValue],
        chunk: impl Fn(&mut Program, HloValue, HloValue, &[HloValue]) -> ChunkGradient,
    ) -> (HloValue, HloValue, Vec<HloValue>) {
        let of_head = on.builder.type_of(self.weights).shape.clone();
        let nothing = on.builder.constant(0.0, HloType::new(DeviceDtype::F32, &of_head));
        let start = on.index(0);
        // The hidden states of the first chunk are gathered before the loop; each trip gathers those of the next.
        let hidden = chunks.hidden(on, states, start);
        let carried = [&[states, nothing, hidden], carried].concat();
        let results = on.for_each_chunk(chunks, chunks.padded, &carried, |on, first, carried| {
            let &[states, dlm_head, hidden, ref carried @ ..] = carried else { unreachable!("as many as were given") };
            // After the last chunk come its own once more, which nobody reads.
            let rows = on.index(chunks.rows);
            let next = on.builder.add(first, rows);
            let next = chunks.hidden(on, states, next);
            let ChunkGradient { hidden, dlogits, carried, .. } = chunk(on, first, hidden, carried);
            // They are there before dhidden is made: what is sent then has the links to itself.
            let [dlogits, next] = on.builder.barrier_of([dlogits, next]);
            let dhidden = self.dhidden(on, dlogits, None);
            let of_chunk = self.dlm_head(on, hidden, dlogits);
            let start = on.at_row(first);
            let states = on.builder.dynamic_update_slice(states, dhidden, &start);
            let dlm_head = on.builder.add(dlm_head, of_chunk);
            [&[states, dlm_head, next], &carried[..]].concat()
        });
        let &[states, dlm_head, _, ref carried @ ..] = &results[..] else { unreachable!("as many as were given") };
        (states, dlm_head, carried.to_vec())
    }

    /// Runs the loop if each device has rows of its own and gets back its own hidden units of the head's gradient.
    /// The last chunk's product is computed by columns: each part is sent while the next is multiplied, the last
    /// while dhidden is.
    fn loop_of_scattered(
        self,
        on: &mut Program,
        states: HloValue,
        chunks: Chunks,
        carried: &[HloValue],
        chunk: impl Fn(&mut Program, HloValue, HloValue, &[HloValue]) -> ChunkGradient,
    ) -> (HloValue, HloValue, Vec<HloValue>) {
        let [_, width] = on.builder.type_of(states).shape[..] else { unreachable!("in line") };
        let [_, _, vocab] = on.local;
        let first = chunks.padded - chunks.rows;
        let (mut so_far, mut states, mut carried) = (None, states, carried.to_vec());
        // All chunks but the last add up on the device; the sum goes to the other devices with the last chunk's
        // product, part by part.
        if first > 0 {
            let nothing = on.builder.constant(0.0, HloType::new(DeviceDtype::F32, &[width, vocab]));
            let (after, dlm_head, more) = self.loop_up_to(on, first, [states, nothing], chunks, &carried, &chunk);
            (so_far, states, carried) = (Some(dlm_head), after, more);
        }
        let first = on.index(first);
        let hidden = chunks.hidden(on, states, first);
        let ChunkGradient { hidden, dlogits, carried, .. } =
            on.in_chunk(chunks, |on| chunk(on, first, hidden, &carried));
        let hidden = on.divisible(hidden);
        let so_far = so_far.map(|dlm_head| {
            let whole = on.builder.type_of(hidden).shape[1];
            on.filled(dlm_head, &[whole, vocab])
        });
        let (dlm_head, dlogits) = self.scattered_columns(on, hidden, dlogits, so_far, chunks);
        let dhidden = self.dhidden(on, dlogits, None);
        let start = on.at_row(first);
        (on.builder.dynamic_update_slice(states, dhidden, &start), dlm_head, carried)
    }

    /// Returns this device's hidden units of `dlm_head`, summed over devices with other rows: the products of
    /// `hidden`, `[c,h]`, and `dlogits`, `[c,v]`, added to `so_far`, `[h,v]`. The dlogits that it returns are
    /// available once all parts but one have arrived.
    fn scattered_columns(
        self,
        on: &mut Program,
        hidden: HloValue,
        mut dlogits: HloValue,
        so_far: Option<HloValue>,
        chunks: Chunks,
    ) -> (HloValue, HloValue) {
        let [rows, width] = on.builder.type_of(hidden).shape[..] else { unreachable!("a chunk has two axes") };
        let [_, _, vocab] = on.local;
        // Each device keeps `own` hidden units of the sum: H over the devices that have other rows.
        let own = width / (on.mesh.batch * on.mesh.tokens);
        let mut whole = on.builder.constant(0.0, HloType::new(DeviceDtype::F32, &self.layout.extents(own, vocab)));
        // A part that is on its way, and its first column.
        let mut sent: Option<(HloValue, usize)> = None;
        for columns in chunks.parts_of_columns(width, vocab) {
            let (from, count) = (columns.start, columns.len());
            let of_part = on.builder.slice(dlogits, &[0, from], &[rows, count]);
            let mut part = on.builder.dot(hidden, of_part, [0, 0], DeviceDtype::F32);
            if let Some(so_far) = so_far {
                let before = on.builder.slice(so_far, &[0, from], &[width, count]);
                part = on.builder.add(before, part);
            }
            // The parts of a collective are whole registers, so a narrower part is padded before it is sent and cut
            // after.
            let unit = SCATTERED_REGISTERS * chunks.register;
            let padded = if chunks.register > 1 { count.next_multiple_of(unit) } else { count };
            let part = on.filled(part, &[width, padded]);
            let part = on.scattered(&MeshAxis::ROWS, part);
            let part = on.builder.slice(part, &[0, 0], &[own, count]);
            if let Some((arrived, from)) = sent.replace((part, from)) {
                // The part after next is not begun before this one has arrived: two are held at a time.
                let [arrived, held] = on.builder.barrier_of([arrived, dlogits]);
                dlogits = held;
                whole = self.put_columns(on, whole, arrived, from);
            }
        }
        let (last, from) = sent.expect("a head has columns");
        (self.put_columns(on, whole, last, from), dlogits)
    }

    /// `part`, `[h,k]`, as the head lies, in its place of `whole` from column `from` on.
    fn put_columns(self, on: &mut Program, whole: HloValue, part: HloValue, from: usize) -> HloValue {
        let part = self.as_it_lies(on, part);
        let from = on.index(from);
        let start = match self.layout {
            HeadLayout::HiddenByVocab => on.at_column(from),
            HeadLayout::VocabByHidden => on.at_row(from),
        };
        on.builder.dynamic_update_slice(whole, part, &start)
    }

    /// `[h,k]` as the head lies.
    fn as_it_lies(self, on: &mut Program, part: HloValue) -> HloValue {
        match self.layout {
            HeadLayout::HiddenByVocab => part,
            HeadLayout::VocabByHidden => on.builder.transpose(part),
        }
    }
}

/// A kernel that reads a chunk's logits once.
enum ResidentKernel {
    Tile(assay_tile::TileKernel),
    Gpu(assay_ptx::PtxKernel),
}

impl ResidentKernel {
    /// Returns the kernel for `[1,n,v]` logits; `None` if a row does not fit the memory in which it must stay.
    fn for_chunk(structure: Structure, chunk: [usize; 3], calls: KernelCalls) -> Option<Self> {
        let KernelCalls { dtype, machine, ptx, .. } = calls;
        match ptx {
            Some(target) => gpu::one_pass_if(structure, chunk, dtype.into(), target).map(Self::Gpu),
            None => one_pass(structure, chunk, dtype.into(), machine).map(Self::Tile),
        }
    }
}

/// `[n,m]`, 0 where `mask`, `[n]`, hides a row.
fn unmasked(on: &mut Program, array: HloValue, mask: HloValue) -> HloValue {
    let ty = on.builder.type_of(array).clone();
    let mask = on.builder.broadcast(mask, &[0], &ty.shape);
    let zero = on.builder.constant(0.0, ty);
    on.builder.select(mask, array, zero)
}
