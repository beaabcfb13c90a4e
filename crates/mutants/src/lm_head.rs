//! The LM head around the specimen's loss, in chunks as teams write it, and every bug of that path where it belongs.
//!
//! ```text
//! forward    each row shard takes the tokens that count by chunks: logits = hidden · lm_head, and the loss kernel over them
//! loss       once, over the batch
//! backward   by the same chunks: dlogits over their logits
//!            dhidden = dlogits · lm_headᵀ, summed over vocabulary shards
//!            dlm_head += hiddenᵀ · dlogits, summed over row shards
//! ```
//!
//! Products are summed in f64 and rounded to f32 once, as are the sums over chunks and shards; dlogits stay f32; `dhidden` is
//! rounded to the dtype of `hidden` in the end, `dlm_head` is f32.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, Axis, CowArray, Ix2, arr0, concatenate, s};
use rayon::prelude::*;

use crate::bank::Bug;
use crate::distillation::DistilledTokens;
use crate::launch::{SimulatedMesh, SpecimenEvaluation, SpecimenGradient, SpecimenLaunch, SpecimenScore, TILE, part};
use crate::loss;
use crate::rounding::to_tf32;
use crate::specimen::{DEVICE_COUNTS, Specimen};
use assay_core::implementation::{Implementation, RunError, Unavailable, Unsupported};
use assay_core::problem::{
    Dtype, FloatArray, HeadCandidate, HeadGradient, HeadLayout, HeadProblem, HeadShape, Projection,
};
use assay_core::spec::{Distillation, LossSpec};

/// Number of tokens in a chunk: few enough that a batch of the suite has many chunks, and a last one that is not full.
const CHUNK: usize = 5;

/// Number of hidden units that the product for the logits takes at once.
const DEPTH: usize = 8;

/// Number of columns of a product that a thread takes at once.
const AT_ONCE: usize = 512;

impl Implementation<HeadProblem> for Specimen {
    fn id(&self) -> &'static str {
        "specimen-lm-head"
    }

    fn summary(&self) -> &'static str {
        "the LM head by token chunks around the kernel that mutants are made of"
    }

    fn class(&self) -> &'static str {
        "native-lm-head"
    }

    fn available(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    fn device_counts(&self) -> Vec<usize> {
        DEVICE_COUNTS.into()
    }

    fn supports(&self, spec: &LossSpec, _: HeadShape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        Self::expect_computed(spec, dtype, devices)
    }

    fn takes_packed(&self) -> bool {
        true
    }

    fn run(&self, spec: &LossSpec, problem: HeadProblem, devices: usize) -> Result<HeadCandidate, RunError> {
        let shape = problem.check(spec)?;
        Self::expect_computed(spec, problem.dtype(), devices)?;
        let launch = self.launch(spec, shape.logits(), problem.tokens(), SimulatedMesh::new(devices));
        Ok(SpecimenHead::new(launch, &problem.logits, shape).candidate())
    }
}

/// Position of a token: its sequence, and its place in it.
type SequencePlace = (usize, usize);

/// Logits `[n,V]` of each chunk, by its tokens.
type ChunkLogits = HashMap<Vec<SequencePlace>, Vec<f32>>;

/// One evaluation of the specimen with an LM head.
struct SpecimenHead<'l> {
    launch: SpecimenLaunch<'l>,
    projection: &'l Projection,
    shape: HeadShape,
    /// Hidden states of all tokens, `[N,H]`.
    hidden: Array2<f64>,
    /// The head that the logits are computed with.
    head: HeadMatrix<'l>,
    /// The head that `dhidden` is computed with.
    backward_head: HeadMatrix<'l>,
}

/// A head's matrix as a kernel reads it.
#[derive(Clone)]
struct HeadMatrix<'l> {
    matrix: Cow<'l, FloatArray<Ix2>>,
    layout: HeadLayout,
}

impl HeadMatrix<'_> {
    /// Takes the same memory for a matrix of the other layout.
    fn misread(self) -> Self {
        let &[rows, columns] = self.matrix.shape() else { unreachable!("a matrix has two axes") };
        let mistaken = self.matrix.to_f64().into_shape_with_order((columns, rows)).expect("as many elements");
        let layout = match self.layout {
            HeadLayout::VocabByHidden => HeadLayout::HiddenByVocab,
            HeadLayout::HiddenByVocab => HeadLayout::VocabByHidden,
        };
        Self { matrix: Cow::Owned(FloatArray::rounded_from(&mistaken, self.matrix.dtype())), layout }
    }

    /// Returns a part of the head, `[units,columns]`, in f64.
    fn part(&self, units: Range<usize>, columns: Range<usize>) -> Array2<f64> {
        match self.layout {
            HeadLayout::HiddenByVocab => self.matrix.part(units, columns),
            HeadLayout::VocabByHidden => self.matrix.view().part_transposed(columns, units),
        }
    }
}

/// Rounds a factor of a product to TF32, if `is_rounded`.
fn in_tf32(factor: ArrayView2<'_, f64>, is_rounded: bool) -> CowArray<'_, f64, Ix2> {
    if is_rounded { factor.mapv(|x| f64::from(to_tf32(x as f32))).into() } else { factor.into() }
}

/// Adds an array to another, if there is one.
fn sum(one: Option<Array2<f32>>, other: Array2<f32>) -> Array2<f32> {
    match one {
        Some(one) => one + &other,
        None => other,
    }
}

/// The arrays of a chunk that the next one may read by mistake.
struct HeadChunk {
    /// Hidden states of the chunk, `[n,H]`.
    hidden: Array2<f64>,
    /// Derivatives by the chunk's logits, `[n,V]`.
    dlogits: Array2<f64>,
}

impl<'l> SpecimenHead<'l> {
    fn new(launch: SpecimenLaunch<'l>, projection: &'l Projection, shape: HeadShape) -> Self {
        let HeadShape { batch, tokens, hidden: width, .. } = shape;
        let hidden = projection.hidden.to_f64().into_shape_with_order((batch * tokens, width)).expect("dense");
        let given = HeadMatrix { matrix: Cow::Borrowed(&projection.lm_head), layout: projection.layout };
        let as_read = |is_misread: bool| if is_misread { given.clone().misread() } else { given.clone() };
        let head = as_read(launch.has(Bug::HeadLayoutMistaken));
        let backward_head = as_read(launch.has(Bug::HeadLayoutMistaken) || launch.has(Bug::DhiddenLayoutMistaken));
        Self { launch, projection, shape, hidden, head, backward_head }
    }

    fn has(&self, bug: Bug) -> bool {
        self.launch.has(bug)
    }

    fn candidate(&self) -> HeadCandidate {
        let HeadShape { batch, tokens, hidden: width, vocab } = self.shape;
        let (scored, logits) = self.forward();
        let evaluation = loss::evaluate(&self.launch, scored);
        let distilled = self.launch.spec.as_distillation().map(|distillation| self.distil(distillation, &logits));
        let (dhidden, dlm_head) = self.backward(&evaluation, &logits, distilled.as_ref());
        let (mut loss, [mut logp, mut entropy, mut token_loss]) = (evaluation.loss, evaluation.per_token().map(Some));
        if let Some(distilled) = distilled {
            (loss, logp, entropy, token_loss) = (distilled.loss, None, None, Some(distilled.token_loss.into()));
        }
        let dhidden = dhidden.into_shape_with_order((batch, tokens, width)).expect("dense");
        // The kernel computes `[H,V]`. The other layout is its transpose, in memory of its own; the mutant gives the
        // same numbers another shape.
        let dlm_head = match self.projection.layout {
            HeadLayout::HiddenByVocab => dlm_head,
            HeadLayout::VocabByHidden if self.has(Bug::DlmHeadLayoutMistaken) => {
                dlm_head.into_shape_with_order((vocab, width)).expect("as many elements")
            }
            HeadLayout::VocabByHidden => dlm_head.reversed_axes().as_standard_layout().into_owned(),
        };
        HeadCandidate {
            loss: Some(arr0(loss as f32).into()),
            gradient: HeadGradient {
                dhidden: FloatArray::rounded_from(&dhidden, self.dtype()),
                dlm_head: dlm_head.into(),
                dlogits_dtype: Dtype::F32,
            },
            logp,
            logp_of_others: self.launch.logp_of_others(&evaluation),
            entropy,
            token_loss,
            metrics: None,
        }
    }

    /// Evaluates the divergence of each token from its teacher, of the logits of the forward pass.
    fn distil(&self, distillation: &Distillation, logits: &ChunkLogits) -> DistilledTokens {
        let vocab = self.shape.vocab;
        let row = |place: SequencePlace| {
            let found = logits.iter().find_map(|(places, logits)| {
                let i = places.iter().position(|other| *other == place)?;
                Some(logits[i * vocab..][..vocab].iter().map(|x| f64::from(*x)).collect())
            });
            found.expect("every token that counts is in a chunk")
        };
        self.launch.distil_rows(distillation, row)
    }

    /// Returns the dtype of hidden states and head.
    fn dtype(&self) -> Dtype {
        self.projection.hidden.dtype()
    }

    /// Lists the unmasked tokens of a row shard, chunk by chunk.
    fn chunks(&self, device_row: usize) -> Vec<Vec<SequencePlace>> {
        let rows = part(self.shape.batch, self.launch.mesh.rows, device_row);
        let places = rows.flat_map(|b| (0..self.shape.tokens).map(move |t| (b, t)));
        let places: Vec<SequencePlace> = places.filter(|&(b, t)| self.launch.counts(b, t)).collect();
        places.chunks(CHUNK).map(<[SequencePlace]>::to_vec).collect()
    }

    /// Lists the columns of each vocabulary shard.
    fn shards(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (vocab, shards) = (self.shape.vocab, self.launch.mesh.columns);
        (0..shards).map(move |shard| (shard, part(vocab, shards, shard)))
    }

    /// Scores every token that counts, and keeps the logits of the chunks.
    fn forward(&self) -> (Array2<Option<SpecimenScore>>, ChunkLogits) {
        let HeadShape { batch, tokens, vocab, .. } = self.shape;
        let (mut scored, mut all) = (Array2::from_elem((batch, tokens), None), ChunkLogits::new());
        for device_row in 0..self.launch.mesh.rows {
            let mut scratch = self.launch.scratch();
            for places in self.chunks(device_row) {
                let logits = self.logits(&self.hidden_of(&places), true);
                for (i, &(b, t)) in places.iter().enumerate() {
                    scored[[b, t]] = Some(self.launch.score_row(&logits, i * vocab, (b, t), &mut scratch));
                }
                all.insert(places, logits);
            }
        }
        (scored, all)
    }

    /// Gathers the hidden states of tokens, `[n,H]`.
    fn hidden_of(&self, places: &[SequencePlace]) -> Array2<f64> {
        let rows: Vec<usize> = places.iter().map(|(b, t)| b * self.shape.tokens + t).collect();
        self.hidden.select(Axis(0), &rows)
    }

    /// Computes the logits of a chunk, `[n,V]`, and rounds them if the problem declares that and `is_rounded` allows it.
    fn logits(&self, hidden: &Array2<f64>, is_rounded: bool) -> Vec<f32> {
        let width = self.shape.hidden;
        let depth = if self.has(Bug::DepthTailDropped) { width - width % DEPTH } else { width };
        let mut logits = Array2::zeros((hidden.nrows(), self.shape.vocab));
        // Products by stretches of columns over threads, and by stretches of hidden units.
        let rounds_factors = self.has(Bug::ProductsInTf32) || self.has(Bug::LogitProductInTf32);
        let parts: Vec<_> = logits.axis_chunks_iter_mut(Axis(1), AT_ONCE).collect();
        parts.into_par_iter().enumerate().for_each(|(i, mut logits)| {
            let columns = i * AT_ONCE..i * AT_ONCE + logits.ncols();
            for first in (0..depth).step_by(DEPTH) {
                let units = first..depth.min(first + DEPTH);
                let hidden = in_tf32(hidden.slice(s![.., units.clone()]), rounds_factors);
                let weights = self.head.part(units, columns.clone());
                general_mat_mul(1.0, &hidden, &in_tf32(weights.view(), rounds_factors), 1.0, &mut logits);
                if self.has(Bug::LogitsSummedInHiddenDtype) {
                    logits.mapv_inplace(|x| self.dtype().round(x));
                }
            }
        });
        // Logits are f32, or rounded to the dtype of the hidden states if the problem declares it.
        let wrong = if self.projection.rounds_logits { Bug::LogitsNotRounded } else { Bug::LogitsRounded };
        let rounds = is_rounded && self.projection.rounds_logits != self.has(wrong);
        let dtype = if rounds { self.dtype() } else { Dtype::F32 };
        logits.into_iter().map(|x| dtype.round(x) as f32).collect()
    }

    /// Computes `dhidden` `[N,H]` and `dlm_head` `[H,V]`.
    fn backward(
        &self,
        evaluation: &SpecimenEvaluation,
        logits: &ChunkLogits,
        distilled: Option<&DistilledTokens>,
    ) -> (Array2<f64>, Array2<f32>) {
        let mut dhidden = Array2::zeros(self.hidden.dim());
        // None until something is added: an array of the head's size is gigabytes.
        let mut dlm_head: Option<Array2<f32>> = None;
        if self.has(Bug::MaskedDhiddenNotZeroed) {
            dhidden.assign(&self.hidden);
        }
        for device_row in 0..self.launch.mesh.rows {
            // Chunk by chunk, as memory allows: logits again, their dlogits, and both products.
            let mut of_shard: Option<Array2<f32>> = None;
            let mut chunks = self.chunks(device_row);
            self.change(&mut chunks);
            let mut done: Vec<HeadChunk> = Vec::new();
            for (i, places) in chunks.iter().enumerate() {
                let before = if i > 0 { chunks[i - 1].as_slice() } else { &[] };
                let hidden = self.hidden_of(places);
                let rounds = !self.has(Bug::LogitsNotRoundedInBackward);
                let kept = logits.get(places).filter(|_| rounds).cloned();
                let logits = kept.unwrap_or_else(|| self.logits(&hidden, rounds));
                let dlogits = match distilled {
                    Some(distilled) => self.dlogits_of(distilled, places),
                    None => self.dlogits(logits.clone(), places, before, evaluation),
                };
                let multiplied = if self.has(Bug::DhiddenOfLogits) { self.rows_of(logits) } else { dlogits.clone() };
                // `dhidden` of the chunk's tokens is complete.
                for (row, &(b, t)) in self.dhidden(&multiplied).rows().into_iter().zip(places) {
                    let mut dhidden = dhidden.row_mut(b * self.shape.tokens + t);
                    dhidden.assign(&row);
                    if self.has(Bug::TemperatureForgottenInDhidden) {
                        dhidden *= self.launch.tokens.temperature(self.launch.spec, (b, t));
                    }
                }
                // `dlm_head` is a sum over chunks, in f32.
                let chunk = HeadChunk { hidden, dlogits };
                let added = self.dlm_head(&chunk, places, done.last(), evaluation);
                let before = of_shard.take().filter(|_| !self.has(Bug::DlmHeadOverwritten));
                let mut sum = sum(before, added);
                if self.has(Bug::DlmHeadSummedInHeadDtype) {
                    sum.mapv_inplace(|x| self.dtype().round(x.into()) as f32);
                }
                of_shard = Some(sum);
                done.push(chunk);
            }
            // And over row shards, by an all-reduce.
            if device_row == 0 || !self.has(Bug::DlmHeadOfFirstDevice) {
                dlm_head = of_shard.map(|of_shard| sum(dlm_head.take(), of_shard)).or(dlm_head);
            }
        }
        let mut dlm_head = dlm_head.unwrap_or_else(|| Array2::zeros((self.shape.hidden, self.shape.vocab)));
        if self.has(Bug::DlmHeadAveraged) {
            dlm_head /= self.launch.mesh.rows as f32;
        }
        if self.has(Bug::DlmHeadShardsSwapped) {
            let mut shards: Vec<_> = self.shards().map(|(_, columns)| dlm_head.slice(s![.., columns])).collect();
            shards.reverse();
            dlm_head = concatenate(Axis(1), &shards).expect("as many rows each");
        }
        (dhidden, dlm_head)
    }

    /// Applies the bugs that change which tokens a chunk has.
    fn change(&self, chunks: &mut Vec<Vec<SequencePlace>>) {
        let partial = |places: &Vec<SequencePlace>| places.len() < CHUNK;
        if self.has(Bug::LastChunkDropped) && chunks.last().is_some_and(partial) {
            chunks.pop();
        }
        if self.has(Bug::ChunkBeginsEarly) {
            for i in (1..chunks.len()).rev() {
                let before = *chunks[i - 1].last().expect("no chunk is empty");
                chunks[i].insert(0, before);
            }
        }
        if self.has(Bug::LastChunkRepeatsLastToken)
            && let Some(last) = chunks.last_mut()
        {
            last.resize(CHUNK, *last.last().expect("no chunk is empty"));
        }
    }

    /// Writes dlogits over the logits of a chunk, `[n,V]`.
    fn dlogits(
        &self,
        mut logits: Vec<f32>,
        places: &[SequencePlace],
        before: &[SequencePlace],
        evaluation: &SpecimenEvaluation,
    ) -> Array2<f64> {
        // Only unmasked tokens are in chunks, so that each of them was evaluated.
        let evaluated = |&(b, t): &SequencePlace| evaluation.tokens[[b, t]].as_ref().expect("each of them counts");
        for (i, place) in places.iter().enumerate() {
            let mut token: SpecimenGradient = evaluated(place).clone();
            if self.has(Bug::SoftmaxOfChunkBefore)
                && let Some(stale) = before.get(i)
            {
                token.scored = token.scored.with_softmax_of(&evaluated(stale).scored);
            }
            if self.has(Bug::NormaliserOfChunk) {
                // This mutant takes the mean over the chunk's tokens where it is over all tokens of the batch.
                let all = self.launch.mask().iter().filter(|counts| **counts).count();
                let share = all as f64 / places.len() as f64;
                token.grad_logp *= share;
                token.grad_entropy *= share;
            }
            // Every vocabulary shard writes its columns.
            for (shard, columns) in self.shards() {
                self.launch.write(&mut logits, i * self.shape.vocab, &columns, shard, &token);
            }
        }
        let mut dlogits = self.rows_of(logits);
        if self.has(Bug::DlogitsRounded) {
            dlogits.mapv_inplace(|x| self.dtype().round(x));
        }
        dlogits
    }

    /// Gathers the dlogits of a chunk's divergences, `[n,V]`.
    fn dlogits_of(&self, distilled: &DistilledTokens, places: &[SequencePlace]) -> Array2<f64> {
        let dtype = if self.has(Bug::DlogitsRounded) { self.dtype() } else { Dtype::F32 };
        let dlogits = places.iter().flat_map(|place| &distilled.dlogits[place]).map(|x| dtype.round(*x)).collect();
        Array2::from_shape_vec((places.len(), self.shape.vocab), dlogits).expect("V elements a row")
    }

    fn rows_of(&self, chunk: Vec<f32>) -> Array2<f64> {
        let rows = chunk.len() / self.shape.vocab;
        let chunk = chunk.into_iter().map(f64::from).collect();
        Array2::from_shape_vec((rows, self.shape.vocab), chunk).expect("V elements a row")
    }

    /// Returns a factor of a product of the backward pass, as the product reads it.
    fn factor<'a>(&self, factor: ArrayView2<'a, f64>) -> CowArray<'a, f64, Ix2> {
        in_tf32(factor, self.has(Bug::ProductsInTf32))
    }

    /// Computes `dhidden` of a chunk, `[n,H]`.
    fn dhidden(&self, dlogits: &Array2<f64>) -> Array2<f64> {
        let mut dhidden = Array2::zeros((dlogits.nrows(), self.shape.hidden));
        for (shard, columns) in self.shards() {
            let mut of_shard = Array2::zeros(dhidden.dim());
            // A shard adds up its tiles of columns; then the shards are added up.
            for first in columns.clone().step_by(TILE) {
                let tile = first..columns.end.min(first + TILE);
                if self.has(Bug::DhiddenLacksTail) && tile.len() < TILE {
                    continue;
                }
                // The head's columns are those of the whole vocabulary; the mutant counts them from the shard's own
                // first.
                let from = if self.has(Bug::HeadOffsetForgotten) { columns.start } else { 0 };
                let weights = self.backward_head.part(0..self.shape.hidden, tile.start - from..tile.end - from);
                of_shard += &self.factor(dlogits.slice(s![.., tile])).dot(&self.factor(weights.view()).t());
                if self.has(Bug::DhiddenSummedInHiddenDtype) {
                    of_shard.mapv_inplace(|x| self.dtype().round(x));
                }
            }
            let rounds = self.has(Bug::DhiddenRoundedBeforeSum);
            let dtype = if rounds { self.dtype() } else { Dtype::F32 };
            if shard == 0 || !self.has(Bug::DhiddenOfFirstShard) {
                dhidden += &of_shard.mapv(|x| dtype.round(x));
            }
        }
        dhidden
    }

    /// Computes the part of `dlm_head` that a chunk adds, `[H,V]`.
    fn dlm_head(
        &self,
        chunk: &HeadChunk,
        places: &[SequencePlace],
        before: Option<&HeadChunk>,
        evaluation: &SpecimenEvaluation,
    ) -> Array2<f32> {
        let n = chunk.dlogits.nrows();
        // The hidden states that meet the chunk's dlogits. The first mutant takes those of the chunk before, the second
        // the rows that follow the chunk's first token, as if no token between them were masked.
        let mut hidden = match before {
            Some(before) if self.has(Bug::HiddenOfChunkBefore) => before.hidden.slice(s![..n, ..]).to_owned(),
            _ if self.has(Bug::HiddenNotGathered) => {
                let (b, t) = places[0];
                let first = b * self.shape.tokens + t;
                let rows: Vec<usize> = (first..first + n).map(|row| row.min(self.hidden.nrows() - 1)).collect();
                self.hidden.select(Axis(0), &rows)
            }
            _ => chunk.hidden.clone(),
        };
        // A buffer that is longer than the last chunk still has rows of the one before.
        let mut dlogits = chunk.dlogits.view();
        let with_stale;
        if let Some(before) = before.filter(|before| self.has(Bug::StaleRowsInLastChunk) && n < before.hidden.nrows()) {
            hidden = concatenate![Axis(0), hidden, before.hidden.slice(s![n.., ..])];
            with_stale = concatenate![Axis(0), dlogits, before.dlogits.slice(s![n.., ..])];
            dlogits = with_stale.view();
        }
        let mut added = self.product_with_hidden(&hidden, dlogits);
        if self.has(Bug::DlmHeadLacksTail) {
            for (_, columns) in self.shards() {
                let whole = columns.len() - columns.len() % TILE;
                added.slice_mut(s![.., columns.start + whole..columns.end]).fill(0.0);
            }
        }
        if self.has(Bug::OneHotOverwritten) {
            // A scatter that overwrites keeps the one-hot part of the last token with an id: the parts `G/T·hidden` of
            // earlier ones are taken out again.
            for (i, (b, t)) in places.iter().enumerate() {
                let id = self.launch.id(*b, *t);
                if places[i + 1..].iter().any(|(b, t)| self.launch.id(*b, *t) == id) {
                    let token = evaluation.tokens[[*b, *t]].as_ref().expect("it counts");
                    let own = token.grad_logp / token.scored.temperature;
                    let mut column = added.column_mut(id);
                    column.zip_mut_with(&chunk.hidden.row(i), |sum, x| *sum = (f64::from(*sum) - own * x) as f32);
                }
            }
        }
        if self.has(Bug::ScaleForgottenInDlmHead) {
            added.mapv_inplace(|x| (f64::from(x) / self.launch.spec.scale) as f32);
        }
        added
    }

    /// Computes `hiddenᵀ · dlogits`, summed in f64 and rounded to f32 once.
    fn product_with_hidden(&self, hidden: &Array2<f64>, dlogits: ArrayView2<f64>) -> Array2<f32> {
        let mut products = Array2::zeros((self.shape.hidden, self.shape.vocab));
        let hidden = self.factor(hidden.view());
        let dlogits = dlogits.axis_chunks_iter(Axis(1), AT_ONCE);
        let parts: Vec<_> = products.axis_chunks_iter_mut(Axis(1), AT_ONCE).zip(dlogits).collect();
        parts.into_par_iter().for_each(|(mut products, dlogits)| {
            products.zip_mut_with(&hidden.t().dot(&self.factor(dlogits)), |product, sum: &f64| *product = *sum as f32);
        });
        products
    }
}
