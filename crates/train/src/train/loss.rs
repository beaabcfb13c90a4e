//! [`GrpoLoss`]: the losses of this crate as operations that candle differentiates.

use std::path::Path;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Layout, Shape, Tensor};
use ndarray::{Array, Array2, Dimension, Ix0, Ix2};

use super::TrainError;
use assay_core::implementation::{Implementation, RunError};
use assay_core::problem::{
    self, Candidate, Dtype, FloatArray, HeadCandidate, HeadGradient, HeadLayout, HeadShape, Metrics, Problem,
    Projection,
};
use assay_core::spec::LossSpec;
use assay_native::{Native, NativeHead, gemm};
use assay_registry::{find, head_registry, registry};

/// A batch without its logits: what a loss is told of the tokens.
pub type TrainBatch = Problem<()>;

/// A GRPO loss that candle differentiates.
///
/// ```text
/// loss = L(logits)                 dlogits  = ∂L/∂logits
/// loss = L(hidden · lm_headᵀ)      dhidden  = dlogits · lm_head      dlm_head = dlogitsᵀ · hidden
/// ```
///
/// with `L` of [`LossSpec`]. Shapes: logits `[B,T,V]`; hidden states `[B,T,H]` with an LM head `[V,H]`, as `candle_nn::Linear`
/// keeps it. Dtypes: f32, bf16, f16 on the CPU; the loss is an f32 scalar, gradients have the dtype of what they belong to.
/// Accumulators and error bounds are those of the implementation, [`assay_native`] unless another is chosen.
///
/// The gradients are computed with the loss, in one call; `backward` hands them out, times the gradient of the loss. Memory:
/// [`on_logits`](Self::on_logits) copies the logits once, and dlogits are written over the copy; candle then adds that to
/// zeros, so that four arrays `[B,T,V]` are there for a moment. [`on_hidden`](Self::on_hidden) has one, under `native`, or a
/// chunk of one, under `native-lm-head`, whatever candle does.
///
/// # Examples
/// ```
/// # mod assay { pub use {assay_core::problem, assay_core::spec, assay_train::train}; }
/// use assay::problem::Advantages;
/// use assay::spec::LossSpec;
/// use assay::train::{TrainBatch, GrpoLoss};
/// use candle_core::{DType, Device, Var};
///
/// let (b, t, v) = (1, 2, 5);
/// let logits = Var::zeros((b, t, v), DType::F32, &Device::Cpu)?;
/// let batch = TrainBatch {
///     logits: (),
///     ids: ndarray::array![[3, 1]],
///     mask: ndarray::array![[true, true]],
///     advantages: Advantages::Sequence(ndarray::array![1.0]),
///     old_logp: Some(ndarray::array![[-1.6, -1.6]]),
///     ref_logp: None,
///     extra: Default::default(),
/// };
/// let grpo = GrpoLoss::native(LossSpec::default());
/// let loss = grpo.on_logits(&logits, &batch)?.loss;
/// let dlogits = loss.backward()?.remove(&logits).unwrap();
/// assert_eq!(dlogits.dims3()?, (b, t, v));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct GrpoLoss {
    spec: LossSpec,
    kernel: AnyImplementation,
}

/// The implementation behind a loss, on logits or with an LM head.
#[derive(Clone)]
enum AnyImplementation {
    OnLogits(Arc<dyn Implementation>),
    WithHead(Arc<dyn Implementation<Problem<Projection>>>),
}

/// A loss, and what trainers log of it.
#[derive(Debug)]
pub struct LossEvaluation {
    /// The loss, an f32 scalar of candle's graph.
    pub loss: Tensor,
    /// Means over the unmasked tokens; `None` from an implementation that has none.
    pub metrics: Option<Metrics>,
    /// `[B,T]`, nats: the log-probabilities that the loss was made of; anything where no token counts, and `None` from an
    /// implementation that returns none.
    pub logp: Option<Array2<f64>>,
}

impl GrpoLoss {
    /// Creates the loss by the CPU kernel.
    pub fn native(spec: LossSpec) -> Self {
        Self { spec, kernel: AnyImplementation::OnLogits(Arc::new(Native::default())) }
    }

    /// Creates the loss by the CPU's LM head, which never makes all logits. It has no loss [on logits](Self::on_logits).
    pub fn native_lm_head(spec: LossSpec) -> Self {
        Self { spec, kernel: AnyImplementation::WithHead(Arc::new(NativeHead::default())) }
    }

    /// Creates the loss by the implementation `id` of [`registry`], on logits or with an LM head; those that need a PJRT plugin use
    /// `plugin`, as there.
    ///
    /// # Errors
    /// [`TrainError::Kernel`] where there is none of that name, or it cannot run here.
    pub fn by_id(spec: LossSpec, id: &str, plugin: Option<&Path>) -> Result<Self, TrainError> {
        let unknown = |reason: String| TrainError::Kernel { id: id.into(), reason: reason.into() };
        let heads = head_registry(plugin);
        // Implementations with an LM head are a registry of their own, which is searched first.
        if let Some(head) = heads.iter().find(|head| head.id() == id) {
            head.available().map_err(|why| unknown(why.to_string()))?;
            return Ok(Self { spec, kernel: AnyImplementation::WithHead(head.clone()) });
        }
        let implementation = find(id, plugin).map_err(|_| {
            let ids = registry(plugin).iter().map(|one| one.id().to_string()).collect::<Vec<_>>();
            let heads = heads.iter().map(|head| head.id().to_string());
            unknown(format!("expected one of: {}", ids.into_iter().chain(heads).collect::<Vec<_>>().join(", ")))
        })?;
        implementation.available().map_err(|why| unknown(why.to_string()))?;
        Ok(Self { spec, kernel: AnyImplementation::OnLogits(implementation) })
    }

    /// Creates the loss by another implementation on logits.
    pub fn by(spec: LossSpec, implementation: Arc<dyn Implementation>) -> Self {
        Self { spec, kernel: AnyImplementation::OnLogits(implementation) }
    }

    /// Returns the arithmetic class of `tolerances.toml` for the results of [`on_hidden`](Self::on_hidden).
    pub fn class_on_hidden(&self) -> String {
        match &self.kernel {
            AnyImplementation::OnLogits(kernel) => format!("{}-lm-head", kernel.class()),
            AnyImplementation::WithHead(kernel) => kernel.class().into(),
        }
    }

    /// Returns the loss `spec` by the same implementation.
    #[must_use]
    pub fn under(&self, spec: LossSpec) -> Self {
        Self { spec, kernel: self.kernel.clone() }
    }

    /// Whether the implementation is given logits, which are then made of all tokens at once.
    pub(super) fn makes_logits(&self) -> bool {
        matches!(self.kernel, AnyImplementation::OnLogits(_))
    }

    /// Returns the spec of the loss.
    pub fn spec(&self) -> &LossSpec {
        &self.spec
    }

    /// Evaluates the loss of `logits`, `[B,T,V]`.
    ///
    /// # Errors
    /// [`TrainError`] where `logits` and `batch` do not fit each other or the spec, or the implementation fails or has no loss
    /// on logits.
    pub fn on_logits(&self, logits: &Tensor, batch: &TrainBatch) -> Result<LossEvaluation, TrainError> {
        let AnyImplementation::OnLogits(implementation) = &self.kernel else {
            return Err(TrainError::NeedsHead { id: self.id().into() });
        };
        let outcome = implementation.run(&self.spec, batch.with_logits(array3("logits", logits)?), 1)?;
        let gradient = tensor(outcome.gradient)?;
        // The kernel has computed the gradient already; the operation hands it to autograd when asked.
        let op = KernelLossOp { loss: loss_of(outcome.loss), gradients: [gradient] };
        let logp = outcome.logp.map(|logp| logp.to_f64());
        Ok(LossEvaluation { loss: logits.apply_op1(op)?, metrics: outcome.metrics, logp })
    }

    /// Evaluates the loss of the logits `hidden · lm_headᵀ`, from hidden states `[B,T,H]` and the LM head `[V,H]`.
    ///
    /// # Errors
    /// [`TrainError`] where the arrays do not fit each other or the spec, or the implementation fails.
    pub fn on_hidden(
        &self,
        hidden: &Tensor,
        lm_head: &Tensor,
        batch: &TrainBatch,
    ) -> Result<LossEvaluation, TrainError> {
        // Logits of the loop are never rounded: they are the product in f32.
        let projection = Projection {
            hidden: array3("hidden", hidden)?,
            lm_head: array2("lm_head", lm_head)?,
            layout: HeadLayout::VocabByHidden,
            rounds_logits: false,
        };
        let (outcome, metrics, logp) = match &self.kernel {
            AnyImplementation::WithHead(implementation) => {
                let HeadCandidate { loss, gradient: HeadGradient { dhidden, dlm_head, .. }, metrics, logp, .. } =
                    implementation.run(&self.spec, batch.with_logits(projection), 1)?;
                let gradients = [tensor(dhidden)?, tensor(dlm_head)?];
                (KernelLossOp { loss: loss_of(loss), gradients }, metrics, logp)
            }
            AnyImplementation::OnLogits(implementation) => {
                self.through_logits(implementation.as_ref(), projection, batch)?
            }
        };
        let [dhidden, dlm_head] = outcome.gradients;
        // The gradient of a 16-bit head comes in f32; candle adds gradients in the dtype of what they belong to.
        let gradients = [dhidden.to_dtype(hidden.dtype())?, dlm_head.to_dtype(lm_head.dtype())?];
        let op = KernelLossOp { loss: outcome.loss, gradients };
        Ok(LossEvaluation { loss: hidden.apply_op2(lm_head, op)?, metrics, logp: logp.map(|logp| logp.to_f64()) })
    }

    /// Evaluates an implementation on logits between the products with the LM head, in f32.
    fn through_logits(
        &self,
        implementation: &dyn Implementation,
        projection: Projection,
        batch: &TrainBatch,
    ) -> Result<OnHidden, TrainError> {
        // Forward: all logits in f32.
        let problem = batch.with_logits(projection);
        let shape = problem.check(&self.spec)?;
        let rows = shape.batch * shape.tokens;
        let hidden = widened(problem.logits.hidden).into_shape_with_order((rows, shape.hidden)).expect("dense");
        let lm_head = widened(problem.logits.lm_head);
        let mut logits = Array2::zeros((rows, shape.vocab));
        gemm(logits.view_mut(), false, hidden.view(), lm_head.t());
        let logits = logits.into_shape_with_order((shape.batch, shape.tokens, shape.vocab)).expect("dense");
        let Candidate { loss, gradient: dlogits, metrics, logp, .. } =
            implementation.run(&self.spec, batch.with_logits(logits.into()), 1)?;
        // Backward: dhidden = dlogits · lm_head and dlm_head = dlogitsᵀ · hidden.
        let FloatArray::F32(dlogits) = dlogits else { unreachable!("dlogits have the dtype of the logits") };
        let dlogits = dlogits.into_shape_with_order((rows, shape.vocab)).expect("dense");
        let mut dhidden = Array2::zeros(hidden.dim());
        gemm(dhidden.view_mut(), false, dlogits.view(), lm_head.view());
        let mut dlm_head = Array2::zeros(lm_head.dim());
        gemm(dlm_head.view_mut(), false, dlogits.t(), hidden.view());
        let dhidden = dhidden.into_shape_with_order((shape.batch, shape.tokens, shape.hidden)).expect("dense");
        let gradients = [tensor(dhidden.into())?, tensor(dlm_head.into())?];
        Ok((KernelLossOp { loss: loss_of(loss), gradients }, metrics, logp))
    }

    /// Checks that the implementation computes this loss from hidden states of `shape` in f32.
    ///
    /// # Errors
    /// [`TrainError::Run`], naming the setting that it does not do.
    pub fn expect_supported(&self, shape: HeadShape) -> Result<(), TrainError> {
        let HeadShape { batch, tokens, vocab, .. } = shape;
        let supported = match &self.kernel {
            AnyImplementation::OnLogits(kernel) => {
                kernel.supports(&self.spec, problem::Shape { batch, tokens, vocab }, Dtype::F32, 1)
            }
            AnyImplementation::WithHead(kernel) => kernel.supports(&self.spec, shape, Dtype::F32, 1),
        };
        Ok(supported.map_err(RunError::from)?)
    }

    fn id(&self) -> &str {
        match &self.kernel {
            AnyImplementation::OnLogits(implementation) => implementation.id(),
            AnyImplementation::WithHead(implementation) => implementation.id(),
        }
    }
}

/// A loss with both gradients, what trainers log of it, and its log-probabilities.
type OnHidden = (KernelLossOp<2>, Option<Metrics>, Option<FloatArray<Ix2>>);

/// A loss whose gradients are known: an operation of one or two arguments whose result is a scalar.
struct KernelLossOp<const N: usize> {
    loss: f32,
    gradients: [Tensor; N],
}

/// The loss that an implementation returns.
fn loss_of(loss: Option<FloatArray<Ix0>>) -> f32 {
    loss.expect("an implementation returns its loss").value() as f32
}

impl<const N: usize> KernelLossOp<N> {
    fn result(&self) -> (CpuStorage, Shape) {
        (CpuStorage::F32(vec![self.loss]), Shape::from(()))
    }

    /// `∂result/∂argument` times the gradient of the result.
    fn scaled(&self, by: &Tensor) -> candle_core::Result<[Tensor; N]> {
        let by = f64::from(by.to_scalar::<f32>()?);
        // The gradient of the loss is 1 unless something is computed from it, and arrays are then not multiplied.
        if by == 1.0 {
            return Ok(self.gradients.clone());
        }
        let mut scaled = self.gradients.clone();
        for gradient in &mut scaled {
            *gradient = gradient.affine(by, 0.0)?;
        }
        Ok(scaled)
    }
}

impl CustomOp1 for KernelLossOp<1> {
    fn name(&self) -> &'static str {
        "grpo-loss"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok(self.result())
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, by: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let [gradient] = self.scaled(by)?;
        Ok(Some(gradient))
    }
}

impl CustomOp2 for KernelLossOp<2> {
    fn name(&self) -> &'static str {
        "grpo-loss-with-lm-head"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok(self.result())
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        by: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [first, second] = self.scaled(by)?;
        Ok((Some(first), Some(second)))
    }
}

/// The elements of `tensor`, copied once where it is dense.
fn elements<D: Dimension>(field: &'static str, tensor: &Tensor, shape: D) -> Result<FloatArray<D>, TrainError> {
    fn dense<T, D: Dimension>(shape: D, elements: Vec<T>) -> Array<T, D> {
        Array::from_shape_vec(shape, elements).expect("as many elements as the tensor has")
    }
    if !tensor.device().is_cpu() {
        return Err(TrainError::Device { field });
    }
    let flat = tensor.flatten_all()?;
    match tensor.dtype() {
        DType::F32 => Ok(FloatArray::F32(dense(shape, flat.to_vec1()?))),
        DType::BF16 => Ok(FloatArray::Bf16(dense(shape, flat.to_vec1()?))),
        DType::F16 => Ok(FloatArray::F16(dense(shape, flat.to_vec1()?))),
        given => Err(TrainError::Dtype { field, given: given.as_str().into() }),
    }
}

pub(super) fn array2(field: &'static str, tensor: &Tensor) -> Result<FloatArray<ndarray::Ix2>, TrainError> {
    let &[rows, columns] = tensor.dims() else { return Err(rank(field, tensor, "[V,H]")) };
    elements(field, tensor, ndarray::Dim([rows, columns]))
}

pub(super) fn array3(field: &'static str, tensor: &Tensor) -> Result<FloatArray<ndarray::Ix3>, TrainError> {
    let &[batch, tokens, width] = tensor.dims() else { return Err(rank(field, tensor, "three extents")) };
    elements(field, tensor, ndarray::Dim([batch, tokens, width]))
}

fn rank(field: &'static str, tensor: &Tensor, expected: &str) -> TrainError {
    TrainError::Shape { field: field.into(), given: tensor.dims().to_vec(), expected: expected.into() }
}

/// `array` as candle keeps it, not copied.
fn tensor<D: Dimension>(array: FloatArray<D>) -> Result<Tensor, TrainError> {
    let shape = array.shape().to_vec();
    let cpu = &candle_core::Device::Cpu;
    Ok(match array {
        FloatArray::F64(_) => unreachable!("no kernel is given f64"),
        FloatArray::F32(array) => Tensor::from_vec(array.into_raw_vec_and_offset().0, shape, cpu)?,
        FloatArray::Bf16(array) => Tensor::from_vec(array.into_raw_vec_and_offset().0, shape, cpu)?,
        FloatArray::F16(array) => Tensor::from_vec(array.into_raw_vec_and_offset().0, shape, cpu)?,
    })
}

pub(super) fn widened<D: Dimension>(array: FloatArray<D>) -> Array<f32, D> {
    match array {
        FloatArray::F64(_) => unreachable!("no tensor of f64 is taken"),
        FloatArray::F32(array) => array,
        FloatArray::Bf16(array) => array.mapv(half::bf16::to_f32),
        FloatArray::F16(array) => array.mapv(half::f16::to_f32),
    }
}
