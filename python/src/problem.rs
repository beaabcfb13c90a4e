//! [`Problem`]: one batch, whose arrays are lent, and where batches come from.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use ndarray::{Array as Dense, Dimension};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::deck::DeckOptions;
use crate::error;
use crate::memory::{Array, Block, Element};
use crate::outputs::Returned;
use crate::spec::{Spec, plain_data};
use crate::verdicts::{self, Standards, Verdicts};
use assay::campaign::{Deck, Subject, simplify};
use assay::fixture::{ProblemFile, SPEC_KEY, verify, write_problem};
use assay::implementation::Workload as _;
use assay::judge::generate::RecipeError;
use assay::problem::{self, Advantages, Dtype, HeadProblem, ProblemPart, ProblemShape, Sequences, with_others};
use assay::text::ShownPath;

/// The arrays that are the logits, or that they are made of.
const LOGITS: [&str; 3] = ["logits", "hidden", "lm_head"];

/// A batch of either kind.
#[derive(Clone)]
pub(crate) enum Batch {
    Logits(Arc<problem::Problem>),
    Head(Arc<HeadProblem>),
}

impl From<Arc<problem::Problem>> for Batch {
    fn from(problem: Arc<problem::Problem>) -> Self {
        Self::Logits(problem)
    }
}

impl From<Arc<HeadProblem>> for Batch {
    fn from(problem: Arc<HeadProblem>) -> Self {
        Self::Head(problem)
    }
}

/// One GRPO batch under one loss.
#[pyclass(frozen, module = "assay", name = "Problem")]
#[derive(Clone)]
pub(crate) struct Problem {
    spec: Spec,
    batch: Batch,
    /// The recipe as JSON, of a batch that was generated.
    recipe: Option<String>,
    arrays: Vec<ProblemArray>,
    /// The device on which frameworks create their arrays; `None` for the framework's default.
    device: Option<String>,
}

/// The memory of arrays that Python borrows as copies, as the problem has them in f64 or in another layout.
#[derive(Default)]
pub(crate) struct KeptArrays {
    /// The address of the logits, or of the hidden states, that the copies belong to.
    logits: usize,
    copies: Vec<ProblemArray>,
    /// The copies of earlier problems, whose memory no later one is to be given: their answers must not depend on it.
    earlier: VecDeque<Vec<ProblemArray>>,
}

impl KeptArrays {
    /// The number of earlier problems whose copies are kept.
    const EARLIER: usize = 4;

    /// Takes the copies out that belong to these logits, and begins those of the next problem.
    fn take(&mut self, logits: usize) -> Vec<ProblemArray> {
        let copies = std::mem::take(&mut self.copies);
        if std::mem::replace(&mut self.logits, logits) == logits {
            return copies;
        }
        self.earlier.push_back(copies);
        if self.earlier.len() > Self::EARLIER {
            self.earlier.pop_front();
        }
        Vec::new()
    }
}

/// An array of a problem that Python borrows.
#[derive(Clone)]
pub(crate) struct ProblemArray {
    pub(crate) name: &'static str,
    pub(crate) block: Block,
    /// Whether it is a copy that may be written to.
    pub(crate) writable: bool,
}

impl Problem {
    pub(crate) fn from_batch(spec: Spec, batch: Batch, recipe: Option<String>) -> Self {
        let arrays = match &batch {
            Batch::Logits(owner) => {
                let logits = Block::floats(owner, |problem| &problem.logits);
                [("logits", logits)].into_iter().chain(token_arrays(owner)).collect::<Vec<_>>()
            }
            Batch::Head(owner) => {
                let hidden = Block::floats(owner, |problem| &problem.logits.hidden);
                let lm_head = Block::floats(owner, |problem| &problem.logits.lm_head);
                [("hidden", hidden), ("lm_head", lm_head)].into_iter().chain(token_arrays(owner)).collect()
            }
        };
        let lent = |(name, block): (_, Option<Block>)| {
            // Python borrows the arrays and cannot write to them: the judge reads the same memory afterwards.
            let block = block.expect("problems are generated and read densely");
            ProblemArray { name, block, writable: false }
        };
        Self { spec, batch, recipe, arrays: arrays.into_iter().map(lent).collect(), device: None }
    }

    pub(crate) fn on_device(self, device: Option<String>) -> Self {
        Self { device, ..self }
    }

    /// Replaces the arrays of tokens by copies in the memory that the last problem's had, if its logits were in the memory of these: a
    /// campaign refills the memory of a whole problem, to find kernels that keep something by address.
    pub(crate) fn with_kept_memory(mut self, kept: &mut KeptArrays) -> Self {
        let logits = self.arrays[0].block.addresses().start;
        let mut copies = kept.take(logits);
        for lent in self.arrays.iter_mut().filter(|lent| !LOGITS.contains(&lent.name)) {
            let place = copies.iter().position(|copy| copy.name == lent.name);
            let refilled =
                place.map(|place| copies.swap_remove(place).block).and_then(|block| block.refilled(&lent.block));
            lent.block = refilled.unwrap_or_else(|| lent.block.copied());
            kept.copies.push(lent.clone());
        }
        self
    }

    /// Replaces the logits, or the hidden states, by copies that may be written to.
    pub(crate) fn with_writable_logits(mut self) -> Self {
        for lent in self.arrays.iter_mut().filter(|lent| ["logits", "hidden"].contains(&lent.name)) {
            (lent.block, lent.writable) = (lent.block.copied(), true);
        }
        self
    }

    pub(crate) fn arrays(&self) -> &[ProblemArray] {
        &self.arrays
    }

    pub(crate) fn batch(&self) -> &Batch {
        &self.batch
    }

    pub(crate) fn under(&self) -> &Spec {
        &self.spec
    }

    fn extents(&self) -> ProblemShape {
        match &self.batch {
            Batch::Logits(problem) => ProblemShape::Logits(problem.shape()),
            Batch::Head(problem) => ProblemShape::Head(problem.shape()),
        }
    }

    /// Borrows the array `name`.
    fn lent(&self, name: &str) -> PyResult<Array> {
        let found = self.arrays.iter().find(|lent| lent.name == name);
        let lent = found.ok_or_else(|| {
            let held: Vec<&str> = self.arrays.iter().map(|lent| lent.name).collect();
            PyAttributeError::new_err(format!("this problem has no `{name}`, expected one of {}", held.join(", ")))
        })?;
        Ok(Array::lend(lent.block.clone(), lent.writable))
    }

    /// Returns the arrays by name.
    fn by_name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let arrays = PyDict::new(py);
        for ProblemArray { name, block, writable } in &self.arrays {
            arrays.set_item(name, Array::lend(block.clone(), *writable))?;
        }
        Ok(arrays)
    }
}

/// `given` of the axis `name`; all `length` where none are.
fn indices(py: Python<'_>, name: &str, given: Option<Vec<i64>>, length: usize) -> PyResult<Vec<usize>> {
    let Some(given) = given else { return Ok((0..length).collect()) };
    let wrong =
        |given: String| error::problem_error(py, format!("{name}: got {given}, expected indices below {length}"));
    if given.is_empty() {
        return Err(wrong("none".into()));
    }
    let index = |i: i64| usize::try_from(i).ok().filter(|i| *i < length).ok_or_else(|| wrong(i.to_string()));
    given.into_iter().map(index).collect()
}

fn frameworks(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("assay._frameworks")
}

/// The arrays of each token.
fn token_arrays<L: Send + Sync + 'static>(owner: &Arc<problem::Problem<L>>) -> Vec<(&'static str, Option<Block>)> {
    let extra = &owner.extra;
    // Several ids a token are one array `[B,T,K]` here, joined in a copy.
    let advantages = match &owner.advantages {
        Advantages::Sequence(advantages) => numbers(advantages),
        Advantages::Token(advantages) => numbers(advantages),
        Advantages::Dlogp(dlogp) => match &extra.others {
            Some(others) => numbers(&with_others(dlogp, &others.dlogp)),
            None => numbers(dlogp),
        },
    };
    let ids = match &extra.others {
        Some(others) => {
            let all = Arc::new(with_others(&owner.ids, &others.ids));
            Block::lend(&all, Element::Int64, |ids| ids)
        }
        None => Block::lend(owner, Element::Int64, |problem| &problem.ids),
    };
    let mut arrays = vec![
        ("ids", ids),
        ("mask", Block::lend(owner, Element::Bool, |problem| &problem.mask)),
        (owner.advantages.name(), advantages),
    ];
    let optional = [
        ("old_logp", &owner.old_logp),
        ("ref_logp", &owner.ref_logp),
        ("rollout_logp", &extra.rollout_logp),
        ("rollout_weights", &extra.rollout_weights),
        ("dentropy", &extra.dentropy),
        ("token_weights", &extra.token_weights),
        ("temperature", &extra.temperature),
    ];
    arrays.extend(optional.into_iter().filter_map(|(name, array)| Some((name, numbers(array.as_ref()?)))));
    arrays.extend(extra.bias.iter().map(|bias| ("bias", numbers(bias))));
    if let Sequences::Packed(cu_seqlens) = &extra.sequences {
        let ends = Arc::new(cu_seqlens.values().mapv(|end| end as i64));
        arrays.push(("cu_seqlens", Block::lend(&ends, Element::Int64, |ends| ends)));
    }
    if let Some(kept) = &extra.kept_ids {
        let wide = Arc::new(kept.mapv(i64::from));
        arrays.push(("kept_ids", Block::lend(&wide, Element::Int64, |kept| kept)));
    }
    if let Some(teacher) = &extra.teacher {
        let teacher = Arc::new(teacher.clone());
        arrays.push((teacher.name(), Block::floats(&teacher, |teacher| teacher.floats())));
        if let problem::Teacher::TopK(top) = &*teacher {
            arrays.push((problem::Teacher::IDS, Block::lend(&Arc::new(top.ids.clone()), Element::Int64, |ids| ids)));
        }
    }
    if let Some(selected) = &extra.selected {
        arrays.push(("selected", Block::lend(&Arc::new(selected.clone()), Element::Bool, |selected| selected)));
    }
    arrays
}

/// `array` in f32 where that loses nothing, in f64 where it does: as files have it.
fn numbers<D: Dimension + 'static>(array: &Dense<f64, D>) -> Option<Block> {
    if array.iter().all(|x| x.is_nan() || f64::from(*x as f32).to_bits() == x.to_bits()) {
        let narrow = Arc::new(array.mapv(|x| x as f32));
        return Block::lend(&narrow, Element::Float(Dtype::F32), |array| array);
    }
    Block::lend(&Arc::new(array.clone()), Element::Float(Dtype::F64), |array| array)
}

#[pymethods]
impl Problem {
    /// The loss that the problem is for.
    #[getter]
    fn spec(&self) -> Spec {
        self.spec.clone()
    }

    /// `(B, T, V)`, or `(B, T, H, V)` with an LM head.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.extents().to_vec())
    }

    /// `f32`, `bf16`, `f16` or `f64`: of the logits, or of hidden states and LM head.
    #[getter]
    fn dtype(&self) -> String {
        match &self.batch {
            Batch::Logits(problem) => problem.logits.dtype().to_string(),
            Batch::Head(problem) => problem.dtype().to_string(),
        }
    }

    /// `hv` or `vh`: how the LM head lies; `None` where there is none.
    #[getter]
    fn layout(&self) -> Option<&'static str> {
        match &self.batch {
            Batch::Logits(_) => None,
            Batch::Head(problem) => Some(problem.logits.layout.key()),
        }
    }

    /// The recipe that the problem was generated from; `None` for one that was not generated.
    #[getter]
    fn recipe<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.recipe.as_deref().map(|recipe| plain_data(py, recipe)).transpose()
    }

    /// `[B,T,V]`, where it has no LM head.
    #[getter]
    fn logits(&self) -> PyResult<Array> {
        self.lent("logits")
    }

    /// `[B,T,H]`, with an LM head.
    #[getter]
    fn hidden(&self) -> PyResult<Array> {
        self.lent("hidden")
    }

    /// `[H,V]` or `[V,H]`, as `layout` says, with an LM head.
    #[getter]
    fn lm_head(&self) -> PyResult<Array> {
        self.lent("lm_head")
    }

    /// `[B,T]` i64: the sampled tokens; anything may stand where the mask is false.
    #[getter]
    fn ids(&self) -> PyResult<Array> {
        self.lent("ids")
    }

    /// `[B,T]` bool: true for the tokens that count.
    #[getter]
    fn mask(&self) -> PyResult<Array> {
        self.lent("mask")
    }

    /// `[B,T]`: the cotangent of logp, where logp and entropy are the result.
    #[getter]
    fn dlogp(&self) -> PyResult<Array> {
        self.lent("dlogp")
    }

    /// `[B,T]`: the cotangent of entropy, where the spec reads it.
    #[getter]
    fn dentropy(&self) -> PyResult<Array> {
        self.lent("dentropy")
    }

    /// `[B]` or `[B,T]`, as the spec has it; `[S]` or `[1,N]` of packed sequences.
    #[getter]
    fn advantages(&self) -> PyResult<Array> {
        self.lent("advantages")
    }

    /// `[B,T]`, nats: under the policy that sampled, or that the last epoch left.
    #[getter]
    fn old_logp(&self) -> PyResult<Array> {
        self.lent("old_logp")
    }

    /// `[B,T]`, nats: under the reference policy of the KL penalty.
    #[getter]
    fn ref_logp(&self) -> PyResult<Array> {
        self.lent("ref_logp")
    }

    /// `[B,T]`, nats: under the policy that the sampler ran; NaN: not scored.
    #[getter]
    fn rollout_logp(&self) -> PyResult<Array> {
        self.lent("rollout_logp")
    }

    /// `[B,T]` or `[B,1]`: importance weights against the sampler's policy.
    #[getter]
    fn rollout_weights(&self) -> PyResult<Array> {
        self.lent("rollout_weights")
    }

    /// `[B,T]` or `[B,1]`: weights of tokens that the trainer gives.
    #[getter]
    fn token_weights(&self) -> PyResult<Array> {
        self.lent("token_weights")
    }

    /// `[B,T]` or `[B,1]`: softmax temperatures, where the spec has them given.
    #[getter]
    fn temperature(&self) -> PyResult<Array> {
        self.lent("temperature")
    }

    /// `[B,T,K]` i64: the vocabulary entries that the sampler has kept for each token, -1 for no entry.
    #[getter]
    fn kept_ids(&self) -> PyResult<Array> {
        self.lent("kept_ids")
    }

    /// `[B,T,V]`: the teacher's logits, nats.
    #[getter]
    fn teacher_logits(&self) -> PyResult<Array> {
        self.lent("teacher_logits")
    }

    /// `[B,T,K]`, nats: the teacher's log-probabilities of its likeliest entries.
    #[getter]
    fn teacher_logp(&self) -> PyResult<Array> {
        self.lent("teacher_logp")
    }

    /// `[B,T,K]` i64: the ids of the teacher's likeliest entries.
    #[getter]
    fn teacher_ids(&self) -> PyResult<Array> {
        self.lent("teacher_ids")
    }

    /// `[B,T]` bool: the tokens that KL-Cov penalizes, or that Clip-Cov leaves out.
    #[getter]
    fn selected(&self) -> PyResult<Array> {
        self.lent("selected")
    }

    /// `[S+1]` i64, where `S` sequences are packed into one row, `[1,N]`: 0, and where each ends.
    #[getter]
    fn cu_seqlens(&self) -> PyResult<Array> {
        self.lent("cu_seqlens")
    }

    /// Returns the problem with its sequences packed into one row, each cut off after its last token that counts.
    fn pack(&self, py: Python<'_>) -> PyResult<Self> {
        let already = |sequences: &Sequences| match sequences {
            Sequences::Rows => Ok(()),
            Sequences::Packed(_) => Err(error::problem_error(py, "pack: got packed sequences, expected one a row")),
        };
        // A packed batch has no padded width, which a reduction by a fixed length reads: the spec takes the width
        // along.
        let [_, width, _] = self.extents().logits();
        let packed = match &self.batch {
            Batch::Logits(problem) => {
                already(&problem.extra.sequences)?;
                Batch::Logits(Arc::new(error::apart(py, || problem.pack().0)?))
            }
            Batch::Head(problem) => {
                already(&problem.extra.sequences)?;
                Batch::Head(Arc::new(error::apart(py, || problem.pack().0)?))
            }
        };
        Ok(Self::from_batch(self.spec.with_width(width), packed, None).on_device(self.device.clone()))
    }

    /// `[V]`: bias of the LM head.
    #[getter]
    fn bias(&self) -> PyResult<Array> {
        self.lent("bias")
    }

    /// The arrays as `NumPy`'s, read-only.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        frameworks(py)?.call_method1("numpy", (self.by_name(py)?,))
    }

    /// The arrays as tensors of `PyTorch`'s.
    #[pyo3(signature = (device = None))]
    fn torch<'py>(&self, py: Python<'py>, device: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        let own = || PyString::new(py, self.device.as_deref().unwrap_or("cpu")).into_any();
        frameworks(py)?.call_method1("torch", (self.by_name(py)?, device.unwrap_or_else(own)))
    }

    /// Returns the arrays as those of JAX.
    #[pyo3(signature = (device = None))]
    fn jax<'py>(&self, py: Python<'py>, device: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        let own = || self.device.as_deref().map(|name| PyString::new(py, name).into_any());
        frameworks(py)?.call_method1("jax", (self.by_name(py)?, device.or_else(own)))
    }

    /// Judges `outputs`, a dict of arrays.
    #[pyo3(signature = (outputs, *, grade="standard", allow=vec![]))]
    fn check(&self, py: Python<'_>, outputs: &Bound<'_, PyAny>, grade: &str, allow: Vec<String>) -> PyResult<Verdicts> {
        let standards = Standards::new(py, grade, &allow)?;
        let spec = &*self.spec.loss;
        let judged = match &self.batch {
            Batch::Logits(problem) => {
                let returned = Returned::read(spec, &**problem, outputs, true)?;
                error::apart(py, || verdicts::judge(spec, &**problem, &returned, &standards))?
            }
            Batch::Head(problem) => {
                let returned = Returned::read(spec, &**problem, outputs, true)?;
                error::apart(py, || verdicts::judge(spec, &**problem, &returned, &standards))?
            }
        };
        judged.map_err(|reason| error::problem_error(py, reason))
    }

    /// A part of it, a problem of its own. Of a packed one `batch` are its sequences.
    #[pyo3(signature = (*, batch=None, tokens=None, columns=None, units=None))]
    fn select(
        &self,
        py: Python<'_>,
        batch: Option<Vec<i64>>,
        tokens: Option<Vec<i64>>,
        columns: Option<Vec<i64>>,
        units: Option<Vec<i64>>,
    ) -> PyResult<Self> {
        let [of_batch, of_tokens, of_columns] = self.extents().logits();
        // Sequences are the rows of a padded batch, and the parts of the one row of a packed batch.
        let sequences = match &self.batch {
            Batch::Logits(problem) => problem.extra.sequences.count(of_batch),
            Batch::Head(problem) => problem.extra.sequences.count(of_batch),
        };
        // Check the indices of each axis against its extent; `None` keeps the whole axis.
        let part = ProblemPart {
            batch: indices(py, "batch", batch, sequences)?,
            tokens: indices(py, "tokens", tokens, of_tokens)?,
            columns: indices(py, "columns", columns, of_columns)?,
        };
        let selected = match &self.batch {
            Batch::Logits(_) if units.is_some() => {
                return Err(error::problem_error(py, "units: got some of a problem with logits, expected an LM head"));
            }
            Batch::Logits(problem) => error::apart(py, || Batch::Logits(Arc::new(problem.select(&part))))?,
            Batch::Head(problem) => {
                let units = indices(py, "units", units, problem.shape().hidden)?;
                error::apart(py, || Batch::Head(Arc::new(problem.select(&part, &units))))?
            }
        };
        Ok(Self::from_batch(self.spec.clone(), selected, None).on_device(self.device.clone()))
    }

    /// The smallest problem that is found for which `fails` still says so.
    #[pyo3(signature = (fails, *, calls=400))]
    fn simplify(&self, py: Python<'_>, fails: &Bound<'_, PyAny>, calls: usize) -> PyResult<Self> {
        let of = |batch| Self::from_batch(self.spec.clone(), batch, None).on_device(self.device.clone());
        let mut raised = None;
        // Once it has raised, nothing is asked any more.
        let mut ask = |batch: Batch| {
            raised.is_none()
                && fails.call1((of(batch),)).and_then(|says| says.is_truthy()).unwrap_or_else(|error| {
                    raised = Some(error);
                    false
                })
        };
        // Shrinking a problem that does not fail would return an arbitrary one.
        let holds = ask(self.batch.clone());
        let simple = match &self.batch {
            batch if !holds => batch.clone(),
            Batch::Logits(problem) => {
                Batch::Logits(simplify(Arc::clone(problem), calls, &mut |part| ask(Batch::Logits(Arc::clone(part)))))
            }
            Batch::Head(problem) => {
                Batch::Head(simplify(Arc::clone(problem), calls, &mut |part| ask(Batch::Head(Arc::clone(part)))))
            }
        };
        match raised {
            Some(error) => Err(error),
            None if holds => Ok(of(simple)),
            None => Err(error::problem_error(py, "fails: got no of the problem itself, expected yes")),
        }
    }

    /// Writes it as `assay generate` does, for `assay.load` and `assay judge`.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let mut metadata = BTreeMap::from([
            (SPEC_KEY.to_string(), self.spec.json()),
            ("generator".to_string(), format!("grpo-assay {}", env!("CARGO_PKG_VERSION"))),
        ]);
        metadata.extend(self.recipe.clone().map(|recipe| ("recipe".to_string(), recipe)));
        let written = error::apart(py, || match &self.batch {
            Batch::Logits(problem) => write_problem(&path, &**problem, &metadata),
            Batch::Head(problem) => write_problem(&path, &**problem, &metadata),
        })?;
        written.map_err(|reason| error::problem_error(py, reason))
    }

    fn __repr__(&self) -> String {
        let recipe = self.recipe.as_ref().map_or(String::new(), |recipe| format!(" {recipe}"));
        format!("<assay.Problem {} {}{recipe}>", self.extents(), self.dtype())
    }
}

/// The problem in the safetensors file at `path`, with the spec that it carries or the one given.
#[pyfunction]
pub(crate) fn load(
    py: Python<'_>,
    path: PathBuf,
    spec: Option<Spec>,
    logits: String,
    old_logp: String,
) -> PyResult<Problem> {
    let read = error::apart(py, || -> Result<_, String> {
        verify(&path).map_err(|reason| reason.to_string())?;
        let file = ProblemFile::open(&path).map_err(|reason| reason.to_string())?;
        let within = || file.spec().map_err(|reason| reason.to_string());
        let spec = match spec {
            Some(spec) => spec,
            None => within()?.map(Spec::from_loss).ok_or_else(|| {
                format!(
                    "{}: metadata `{SPEC_KEY}`: not in the file, expected spec=… to say which loss is meant",
                    ShownPath(&path)
                )
            })?,
        };
        // Read only the arrays that the loss needs, and check the problem against it.
        let old_logp = spec.loss.reads_old_logp().then_some(old_logp.as_str());
        let batch = if file.has_head() {
            let problem = file.head_problem(old_logp).map_err(|reason| reason.to_string())?;
            Batch::Head(Arc::new(problem.with_advantages_for(&spec.loss)))
        } else {
            let problem = file.problem(&logits, old_logp).map_err(|reason| reason.to_string())?;
            Batch::Logits(Arc::new(problem.with_advantages_for(&spec.loss)))
        };
        let checked = match &batch {
            Batch::Logits(problem) => problem.check(&spec.loss).map(drop),
            Batch::Head(problem) => problem.check(&spec.loss).map(drop),
        };
        checked.map_err(|reason| format!("{}: {reason}", ShownPath(&path)))?;
        Ok((spec, batch, file.metadata().get("recipe").cloned()))
    })?;
    let (spec, batch, recipe) = read.map_err(|reason| error::problem_error(py, reason))?;
    Ok(Problem::from_batch(spec, batch, recipe))
}

/// Generated problems, one after another.
#[pyclass(module = "assay")]
pub(crate) struct Problems {
    spec: Spec,
    deck: Deck,
    next: u64,
}

#[pymethods]
impl Problems {
    /// Iterates over the problems of a deck from number `first` on.
    #[new]
    fn new(py: Python<'_>, spec: Spec, first: u64, deck: DeckOptions) -> PyResult<Self> {
        Ok(Self { spec, deck: deck.deck(py)?, next: first })
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Problem>> {
        let Self { spec, deck, next } = self;
        if *next >= deck.cases {
            return Ok(None);
        }
        let made = match &deck.head {
            None => drawn::<problem::Problem>(py, deck, *next, spec)?
                .map(|(problem, recipe)| (Batch::Logits(problem), recipe)),
            Some(_) => {
                drawn::<HeadProblem>(py, deck, *next, spec)?.map(|(problem, recipe)| (Batch::Head(problem), recipe))
            }
        };
        let (batch, recipe) = made.map_err(|reason| error::problem_error(py, reason))?;
        *next += 1;
        Ok(Some(Problem::from_batch(spec.clone(), batch, Some(recipe))))
    }
}

/// Draws the problem of a number, and writes its recipe as JSON.
fn drawn<P: Subject>(
    py: Python<'_>,
    deck: &Deck,
    index: u64,
    spec: &Spec,
) -> PyResult<Result<(Arc<P>, String), RecipeError>> {
    let dealt = deck.deal(index);
    let problem = error::apart(py, || deck.draw(&dealt, &spec.loss))?;
    let recipe = serde_json::to_string(&dealt).expect("plain data has a JSON form");
    Ok(problem.map(|problem| (Arc::new(problem), recipe)))
}
