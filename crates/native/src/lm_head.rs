//! The LM head with the loss: [`NativeHead`].

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, Ix3, s};
use rayon::prelude::*;

use super::{
    Isa, LogitsRow, LogpEntropy, NativeBatch, NativeOutputs, OutputCotangents, TokenEvaluation, TokenPlace,
    TokenScores, expect_supported, gemm,
};
use assay_core::implementation::{Implementation, RunError, Unavailable, Unsupported};
use assay_core::problem::{
    Dtype, FloatArray, FloatView, HeadCandidate, HeadGradient, HeadLayout, HeadProblem, HeadShape, ProjectionView,
    Tokens,
};
use assay_core::spec::LossSpec;

/// Bytes of a chunk's logits, unless [`NativeHead::chunk`] sets its tokens. A larger chunk reads and writes `dlm_head`
/// fewer times, and a 16-bit head is widened fewer times.
const CHUNK_BYTES: usize = 320 << 20;

/// Columns of a 16-bit head that are widened at once: 15 MB at `H = 896`.
const TILE: usize = 4096;

/// The LM head and the loss on the CPU: tokens in chunks, so that the logits of all never exist at once.
///
/// For each chunk of `n` tokens: `logits = hidden · lm_head`, dlogits over them by the kernel of [the module](super),
/// `dhidden = dlogits · lm_headᵀ`, `dlm_head += hiddenᵀ · dlogits`. Three products, or four where tokens of a row share a
/// ratio: all log-probabilities come first, and logits are made again. Masked tokens are in no chunk.
///
/// Arithmetic: products of f32 by the `gemm` crate, summed in f32 over `H`, `V` and a chunk's tokens, and over the chunks in
/// their order. bf16 and f16 are widened, exactly: a chunk's hidden states at once, the head by tiles of columns, twice a
/// chunk. dlogits stay f32. `dhidden` is rounded once to the dtype of `hidden`; `dlm_head` is f32. Results have the same
/// bits for any number of threads.
///
/// Memory beside inputs and outputs: a chunk of logits, at most 320 MiB unless [`NativeHead::chunk`] says otherwise; its
/// hidden states and their gradient; for 16-bit dtypes a tile of the head; and what the kernel takes.
pub struct NativeHead {
    isa: Isa,
    chunk: Option<usize>,
}

impl Default for NativeHead {
    fn default() -> Self {
        Self { isa: Isa::fastest(), chunk: None }
    }
}

impl NativeHead {
    /// Returns the kernel with chunks of `tokens`; 0 means as many as 320 MiB hold.
    #[must_use]
    pub fn chunk(self, tokens: usize) -> Self {
        Self { chunk: (tokens > 0).then_some(tokens), ..self }
    }

    /// Returns the number of tokens in a chunk over a vocabulary of `vocab`.
    pub fn chunk_tokens(&self, vocab: usize) -> usize {
        self.chunk.unwrap_or_else(|| (CHUNK_BYTES / size_of::<f32>() / vocab).max(1))
    }
}

impl Implementation<HeadProblem> for NativeHead {
    fn id(&self) -> &'static str {
        "native-lm-head"
    }

    fn summary(&self) -> &'static str {
        "CPU, LM head and loss by token chunks, f32 products, dlogits of a chunk in place"
    }

    fn class(&self) -> &'static str {
        "native-lm-head"
    }

    fn available(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    fn isa(&self) -> Option<&'static str> {
        Some(self.isa.name())
    }

    fn supports(&self, spec: &LossSpec, _: HeadShape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        expect_supported(Implementation::<HeadProblem>::id(self), "hidden dtype", spec, dtype, devices)
    }

    fn takes_packed(&self) -> bool {
        true
    }

    /// Returns the bytes of a chunk of logits, its hidden states and their gradient, and a tile of the head.
    fn host_bytes(&self, shape: HeadShape, dtype: Dtype) -> usize {
        let HeadShape { batch, tokens, hidden, vocab } = shape;
        let chunk = self.chunk_tokens(vocab).min(batch * tokens).max(1);
        size_of::<f32>() * (chunk * (vocab + 2 * hidden) + tile_elements(hidden, vocab, dtype))
    }

    fn run(&self, spec: &LossSpec, problem: HeadProblem, devices: usize) -> Result<HeadCandidate, RunError> {
        let projection = problem.logits.view();
        self.supports(spec, projection.check(spec, &problem.tokens())?, problem.dtype(), devices)?;
        let pass = self.work(spec, &projection, problem.tokens(), OutputCotangents::default())?;
        let (outputs, gradients) = pass.gradients(HeadDerivatives::default());
        let (dhidden, dlm_head) = (gradients.dhidden.expect("asked for"), gradients.dlm_head.expect("asked for"));
        let gradient = HeadGradient { dhidden, dlm_head: dlm_head.into(), dlogits_dtype: Dtype::F32 };
        Ok(outputs.with_gradient(gradient).into())
    }
}

impl NativeHead {
    /// Computes the loss and its gradients by hidden states and head, which are borrowed: those that `derivatives` asks
    /// for, whose bits do not depend on whether the other one is computed.
    ///
    /// # Errors
    /// [`RunError`] where the arrays do not fit each other or `spec`, or the kernel does not do it.
    pub fn forward_backward(
        &self,
        spec: &LossSpec,
        projection: &ProjectionView,
        tokens: Tokens,
        cotangents: OutputCotangents,
        derivatives: HeadDerivatives,
    ) -> Result<(NativeOutputs, NativeHeadGradients), RunError> {
        Ok(self.work(spec, projection, tokens, cotangents)?.gradients(derivatives))
    }

    /// Computes the loss without its gradients, with one product. Its bits are those of the loss with gradients.
    ///
    /// # Errors
    /// As [`NativeHead::forward_backward`].
    pub fn evaluate(
        &self,
        spec: &LossSpec,
        projection: &ProjectionView,
        tokens: Tokens,
    ) -> Result<NativeOutputs, RunError> {
        let mut work = self.work(spec, projection, tokens, OutputCotangents::default())?;
        let scores = work.scores();
        Ok(work.batch.evaluation(&work.batch.by_place(work.batch.evaluated(&scores))))
    }

    /// Computes logp and entropy without a loss, with one product.
    ///
    /// # Errors
    /// As [`NativeHead::forward_backward`].
    pub fn forward(
        &self,
        spec: &LossSpec,
        projection: &ProjectionView,
        tokens: Tokens,
    ) -> Result<LogpEntropy, RunError> {
        let mut work = self.work(spec, projection, tokens, OutputCotangents::default())?;
        let scores = work.scores();
        Ok(work.batch.logp_and_entropy(&scores))
    }

    fn work<'p>(
        &self,
        spec: &'p LossSpec,
        projection: &'p ProjectionView,
        tokens: Tokens<'p>,
        cotangents: OutputCotangents<'p>,
    ) -> Result<HeadPass<'p>, RunError> {
        let shape = projection.check(spec, &tokens)?;
        self.supports(spec, shape, projection.hidden.dtype(), 1)?;
        cotangents.check([shape.batch, shape.tokens])?;
        Ok(HeadPass::new(self, spec, projection.view(), tokens, cotangents))
    }
}

/// A checked problem and its buffers, from which results come chunk by chunk.
struct HeadPass<'p> {
    batch: NativeBatch<'p>,
    projection: ProjectionView<'p>,
    shape: HeadShape,
    /// Positions of the unmasked tokens, in order.
    places: Vec<TokenPlace>,
    chunk: usize,
    logits: Vec<f32>,
    tile: Vec<f32>,
}

/// The arrays that [`NativeHead::forward_backward`] differentiates by. Each that it does not differentiate by spares a
/// product.
#[derive(Clone, Copy, Debug)]
pub struct HeadDerivatives {
    /// Whether the gradient of the hidden states, `dlogits · lm_headᵀ`, is computed.
    pub hidden: bool,
    /// Whether the gradient of the head, `hiddenᵀ · dlogits` over all tokens, is computed.
    pub lm_head: bool,
}

impl Default for HeadDerivatives {
    /// Asks for the gradients of both the hidden states and the head.
    fn default() -> Self {
        Self { hidden: true, lm_head: true }
    }
}

/// The gradients of a loss with a head that were asked for; while they are computed, their sums over the chunks so far.
#[derive(Clone, Debug)]
pub struct NativeHeadGradients {
    /// Gradient of the hidden states, `[B,T,H]`, in their dtype.
    pub dhidden: Option<FloatArray<Ix3>>,
    /// Gradient of the head, in the layout of the head.
    pub dlm_head: Option<Array2<f32>>,
}

impl<'p> HeadPass<'p> {
    fn new(
        head: &NativeHead,
        spec: &'p LossSpec,
        projection: ProjectionView<'p>,
        tokens: Tokens<'p>,
        cotangents: OutputCotangents<'p>,
    ) -> Self {
        let shape @ HeadShape { hidden, vocab, .. } = projection.shape();
        // The rows of a chunk are f32, whatever the dtype of the hidden states.
        let batch = NativeBatch::new::<f32>(spec, head.isa, tokens, vocab, cotangents);
        // Only unmasked tokens have logits: a padded batch costs what its tokens cost, and padding is in no product.
        let places: Vec<TokenPlace> =
            batch.kernel_inputs.mask.indexed_iter().filter_map(|(at, &counts)| counts.then_some(at)).collect();
        // A chunk is at least one token: a batch without one would otherwise be walked in steps of 0.
        let chunk = head.chunk_tokens(vocab).min(places.len()).max(1);
        Self {
            batch,
            tile: vec![0.0; tile_elements(hidden, vocab, projection.hidden.dtype())],
            projection,
            shape,
            places,
            chunk,
            logits: vec![0.0; chunk * vocab],
        }
    }

    fn chunks(&self) -> Vec<Vec<TokenPlace>> {
        self.places.chunks(self.chunk).map(<[TokenPlace]>::to_vec).collect()
    }

    /// Scores every unmasked token, by one product.
    fn scores(&mut self) -> Vec<Option<TokenScores>> {
        let HeadShape { batch, tokens, vocab, .. } = self.shape;
        let mut scores: Array2<Option<TokenScores>> = Array2::from_elem((batch, tokens), None);
        for places in &self.chunks() {
            self.write_logits(&self.hidden_of(places));
            let rows = self.logits.chunks(vocab).zip(places).map(|(row, &at)| (at, row));
            for (&at, token) in places.iter().zip(self.batch.scores(rows)) {
                scores[at] = token;
            }
        }
        scores.into_raw_vec_and_offset().0
    }

    fn gradients(mut self, asked: HeadDerivatives) -> (NativeOutputs, NativeHeadGradients) {
        let HeadShape { batch, tokens, hidden, vocab } = self.shape;
        // `dlm_head` is summed over chunks in f32.
        let dhidden = || FloatArray::zeros((batch, tokens, hidden), self.projection.hidden.dtype());
        let dlm_head = || Array2::zeros(self.projection.layout.extents(hidden, vocab));
        let mut to =
            NativeHeadGradients { dhidden: asked.hidden.then(dhidden), dlm_head: asked.lm_head.then(dlm_head) };
        let mut evaluated: Array2<Option<TokenEvaluation>> = Array2::from_shape_simple_fn((batch, tokens), || None);
        if self.batch.structure.couples_rows() {
            // Tokens that share a ratio: one product for the scores of all, and each chunk's logits once more for its dlogits.
            let scores = self.scores();
            let known = self.batch.evaluated(&scores);
            for (i, places) in self.chunks().iter().enumerate() {
                let hidden = self.hidden_of(places);
                self.write_logits(&hidden);
                let rows = rows_of(&mut self.logits, vocab).zip(places);
                self.batch.write_rows(rows.map(|(row, &at)| (known[at.0 * tokens + at.1].as_ref(), at, row)));
                self.write_gradients(&mut to, &hidden, places, i > 0);
            }
            evaluated = self.batch.by_place(known);
        } else {
            // Otherwise a chunk's logits become its dlogits in place, from which both gradients follow.
            for (i, places) in self.chunks().iter().enumerate() {
                let hidden = self.hidden_of(places);
                self.write_logits(&hidden);
                let rows = rows_of(&mut self.logits, vocab);
                let tokens = self.batch.score_and_write(places.iter().copied().zip(rows));
                for (&at, token) in places.iter().zip(tokens) {
                    evaluated[at] = token;
                }
                self.write_gradients(&mut to, &hidden, places, i > 0);
            }
        }
        (self.batch.evaluation(&evaluated), to)
    }

    /// Gathers the hidden states of `places` into `[n,H]`, widened to f32.
    fn hidden_of(&self, places: &[TokenPlace]) -> Array2<f32> {
        let mut rows = Array2::zeros((places.len(), self.shape.hidden));
        for (mut row, &(b, t)) in rows.rows_mut().into_iter().zip(places) {
            // Only tokens that count have a row.
            let row = row.as_slice_mut().expect("dense");
            match &self.projection.hidden {
                FloatView::F64(_) => unreachable!("`supports` rejects f64"),
                FloatView::F32(hidden) => row.copy_from_slice(hidden.slice(s![b, t, ..]).as_slice().expect("dense")),
                FloatView::Bf16(hidden) => {
                    hidden.slice(s![b, t, ..]).as_slice().expect("dense").convert_to_f32_slice(row);
                }
                FloatView::F16(hidden) => {
                    hidden.slice(s![b, t, ..]).as_slice().expect("dense").convert_to_f32_slice(row);
                }
            }
        }
        rows
    }

    /// Fills the chunk with logits, `[n,V]`.
    fn write_logits(&mut self, hidden: &Array2<f32>) {
        let (n, vocab) = (hidden.nrows(), self.shape.vocab);
        let chunk = &mut self.logits[..n * vocab];
        let mut logits = ArrayViewMut2::from_shape((n, vocab), chunk).expect("V logits a token");
        // Tile by tile of the head, widened to f32 before its product.
        for columns in tiles(&self.projection, vocab) {
            let tile = tile(&self.projection, columns.clone(), &mut self.tile);
            gemm(logits.slice_mut(s![.., columns]), false, hidden.view(), tile);
        }
        // The problem may declare logits of the hidden states' dtype.
        if self.projection.rounds_logits {
            let dtype = self.projection.hidden.dtype();
            self.logits[..n * vocab].par_iter_mut().for_each(|x| *x = round(*x, dtype));
        }
    }

    /// Computes the gradients that are asked for from the dlogits of a chunk: `dhidden` of its tokens, and their part of
    /// `dlm_head`, which is added if `adds` and stored otherwise.
    fn write_gradients(
        &mut self,
        to: &mut NativeHeadGradients,
        hidden: &Array2<f32>,
        places: &[TokenPlace],
        adds: bool,
    ) {
        let (n, vocab) = (hidden.nrows(), self.shape.vocab);
        let mut dhidden = to.dhidden.is_some().then(|| Array2::zeros(hidden.dim()));
        // The few large dlogits of a set are no part of the sums over all columns, in which they would swallow the small ones.
        let of_sets = if dhidden.is_some() { self.taken_sets(places) } else { vec![] };
        // Tile by tile of the head, which is widened for dhidden alone: `dlm_head` does not depend on it.
        for (i, columns) in tiles(&self.projection, vocab).enumerate() {
            if let Some(dhidden) = &mut dhidden {
                let tile = tile(&self.projection, columns.clone(), &mut self.tile);
                let of_all = ArrayView2::from_shape((n, vocab), &self.logits[..n * vocab]).expect("V logits a token");
                gemm(dhidden.view_mut(), i > 0, of_all.slice(s![.., columns.clone()]), tile.t());
            }
            let Some(dlm_head) = &mut to.dlm_head else { continue };
            for (row, taken) in self.logits.chunks_mut(vocab).zip(&of_sets) {
                taken.iter().filter(|(v, _)| columns.contains(v)).for_each(|(v, dx)| row[*v] = *dx);
            }
            let dlogits = ArrayView2::from_shape((n, vocab), &self.logits[..n * vocab]).expect("V logits a token");
            let dlogits = dlogits.slice(s![.., columns.clone()]);
            let dlm_head = match self.projection.layout {
                HeadLayout::HiddenByVocab => dlm_head.slice_mut(s![.., columns]),
                HeadLayout::VocabByHidden => dlm_head.slice_mut(s![columns, ..]).reversed_axes(),
            };
            gemm(dlm_head, adds, hidden.t(), dlogits);
        }
        let (Some(mut dhidden), Some(to)) = (dhidden, &mut to.dhidden) else { return };
        self.add_sets(&mut dhidden, &of_sets);
        // Tokens' gradients are complete after the last tile: they are rounded once.
        for (row, &(b, t)) in dhidden.rows().into_iter().zip(places) {
            match to {
                FloatArray::F64(_) => unreachable!("`supports` rejects f64"),
                FloatArray::F32(dhidden) => dhidden.slice_mut(s![b, t, ..]).assign(&row),
                FloatArray::Bf16(dhidden) => {
                    dhidden.slice_mut(s![b, t, ..]).zip_mut_with(&row, |to, x| *to = half::bf16::from_f32(*x));
                }
                FloatArray::F16(dhidden) => {
                    dhidden.slice_mut(s![b, t, ..]).zip_mut_with(&row, |to, x| *to = half::f16::from_f32(*x));
                }
            }
        }
    }
}

impl HeadPass<'_> {
    /// Takes the dlogits of each token's kept set out of the chunk and leaves 0; nothing unless all columns have dlogits.
    fn taken_sets(&mut self, places: &[TokenPlace]) -> Vec<Vec<(usize, f32)>> {
        let vocab = self.shape.vocab;
        let taken = |(&at, row): (&TokenPlace, &mut [f32])| {
            let token = self.batch.kept_token(at).filter(|token| token.settings.over_vocabulary());
            let entries = token.map_or(Vec::new(), |token| token.entries);
            entries.into_iter().map(|v| (v, std::mem::take(&mut row[v]))).collect()
        };
        places.iter().zip(self.logits.chunks_mut(vocab)).map(taken).collect()
    }

    /// Adds the products of the dlogits that were taken out and their columns of the head, each token's in f64.
    fn add_sets(&self, dhidden: &mut Array2<f32>, of_sets: &[Vec<(usize, f32)>]) {
        let HeadShape { hidden, .. } = self.shape;
        let head = self.projection.lm_head.view();
        let rows: Vec<_> = dhidden.rows_mut().into_iter().zip(of_sets).filter(|(_, taken)| !taken.is_empty()).collect();
        rows.into_par_iter().for_each(|(mut row, taken)| {
            let mut sum = vec![0.0; hidden];
            for &(v, dx) in taken {
                let column = self.projection.layout.part(&head, v..v + 1, 0..hidden);
                sum.iter_mut().zip(&column).for_each(|(sum, weight)| *sum += f64::from(dx) * weight);
            }
            row.iter_mut().zip(sum).for_each(|(to, sum)| *to = (f64::from(*to) + sum) as f32);
        });
    }
}

/// Splits a chunk into rows over which their dlogits are written.
fn rows_of(logits: &mut [f32], vocab: usize) -> impl Iterator<Item = LogitsRow<'_, f32>> {
    logits.chunks_mut(vocab).map(|dlogits| LogitsRow { logits: None, dlogits })
}

fn round(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F64 | Dtype::F32 => x,
        Dtype::Bf16 => half::bf16::from_f32(x).to_f32(),
        Dtype::F16 => half::f16::from_f32(x).to_f32(),
    }
}

/// Returns the number of widened elements in a tile of the head; an f32 head has none.
fn tile_elements(hidden: usize, vocab: usize, dtype: Dtype) -> usize {
    if dtype == Dtype::F32 { 0 } else { hidden * TILE.min(vocab) }
}

/// Lists the ranges of columns that one product takes: all columns of an f32 head.
fn tiles(projection: &ProjectionView, vocab: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let width = if projection.lm_head.dtype() == Dtype::F32 { vocab } else { TILE };
    (0..vocab).step_by(width).map(move |first| first..vocab.min(first + width))
}

/// Returns the columns `columns` of the head as `[H,n]`, widened into `room` if they are not f32.
fn tile<'t>(projection: &'t ProjectionView, columns: Range<usize>, room: &'t mut [f32]) -> ArrayView2<'t, f32> {
    fn widened<'t, E: Copy + Sync>(
        head: ArrayView2<E>,
        layout: HeadLayout,
        room: &'t mut [f32],
        widen: impl Fn(&[E], &mut [f32]) + Sync,
    ) -> ArrayView2<'t, f32> {
        // The head is widened line by line: a line is dense even if `columns` cut it, and widening is exact, so the
        // number of threads changes no bit.
        let (rows, length) = head.dim();
        let room = &mut room[..rows * length];
        let lines = room.par_chunks_mut(length).enumerate();
        lines.for_each(|(i, to)| widen(head.row(i).as_slice().expect("a head's lines are dense"), to));
        let tile = ArrayView2::from_shape((rows, length), room).expect("just filled");
        by_hidden(tile, layout)
    }
    // An f32 head is used in place.
    let layout = projection.layout;
    match &projection.lm_head {
        FloatView::F64(_) => unreachable!("`supports` rejects f64"),
        FloatView::F32(head) => by_hidden(head_columns(head.view(), layout, columns), layout),
        FloatView::Bf16(head) => {
            widened(head_columns(head.view(), layout, columns), layout, room, HalfFloatSliceExt::convert_to_f32_slice)
        }
        FloatView::F16(head) => {
            widened(head_columns(head.view(), layout, columns), layout, room, HalfFloatSliceExt::convert_to_f32_slice)
        }
    }
}

/// Selects some columns of a head in its own layout.
fn head_columns<E>(head: ArrayView2<'_, E>, layout: HeadLayout, columns: Range<usize>) -> ArrayView2<'_, E> {
    match layout {
        HeadLayout::HiddenByVocab => head.slice_move(s![.., columns]),
        HeadLayout::VocabByHidden => head.slice_move(s![columns, ..]),
    }
}

/// Views columns of a head as `[H,n]`, whatever the layout.
fn by_hidden<E>(head: ArrayView2<'_, E>, layout: HeadLayout) -> ArrayView2<'_, E> {
    match layout {
        HeadLayout::HiddenByVocab => head,
        HeadLayout::VocabByHidden => head.reversed_axes(),
    }
}
