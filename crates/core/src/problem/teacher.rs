//! [`Teacher`]: the distribution that a student's is compared with, as logits or as the likeliest entries of each token.

use std::collections::HashMap;

use ndarray::{Array2, Array3, Axis, Ix3, s};

use super::select::Gather;
use super::{FloatArray, ProblemError, Shape, Tokens};
use crate::spec::LossSpec;

/// A teacher's distribution of each token over the student's vocabulary.
///
/// Any values are allowed where the mask is false.
#[derive(Clone, Debug, PartialEq)]
pub enum Teacher {
    /// The teacher's logits, `[B,T,V]`, in nats before the temperature; −∞ for an entry without probability.
    Logits(FloatArray<Ix3>),
    /// The `K` likeliest entries of each token.
    TopK(TeacherTopK),
}

/// The `K` likeliest entries of a teacher for each token, in any order.
#[derive(Clone, Debug, PartialEq)]
pub struct TeacherTopK {
    /// The teacher's log-probabilities of its entries, `[B,T,K]`, nats, at the temperature of the loss; at most 0 up to rounding.
    pub logp: FloatArray<Ix3>,
    /// The ids of the entries, `[B,T,K]`, each once in a token.
    pub ids: Array3<i64>,
}

/// The largest log-probability that is taken for a rounded 0, as of a sum of many rounded probabilities.
const ROUNDED_ZERO: f64 = 1e-3;

impl Teacher {
    /// The name of a teacher's logits.
    pub const LOGITS: &'static str = "teacher_logits";
    /// The name of the log-probabilities of a teacher's likeliest entries.
    pub const LOGP: &'static str = "teacher_logp";
    /// The name of the ids of a teacher's likeliest entries.
    pub const IDS: &'static str = "teacher_ids";

    /// Returns the array of floats: logits `[B,T,V]`, or log-probabilities `[B,T,K]`.
    pub fn floats(&self) -> &FloatArray<Ix3> {
        match self {
            Teacher::Logits(logits) => logits,
            Teacher::TopK(top) => &top.logp,
        }
    }

    /// Returns the array of floats to be changed.
    pub fn floats_mut(&mut self) -> &mut FloatArray<Ix3> {
        match self {
            Teacher::Logits(logits) => logits,
            Teacher::TopK(top) => &mut top.logp,
        }
    }

    /// Returns the name of the array of floats.
    pub fn name(&self) -> &'static str {
        match self {
            Teacher::Logits(_) => Self::LOGITS,
            Teacher::TopK(_) => Self::LOGP,
        }
    }

    /// Gathers the tokens of another batch.
    pub(super) fn gathered(&self, places: &impl Gather) -> Self {
        match self {
            Teacher::Logits(logits) => Teacher::Logits(places.floats(logits)),
            Teacher::TopK(TeacherTopK { logp, ids }) => {
                Teacher::TopK(TeacherTopK { logp: places.floats(logp), ids: places.several(ids) })
            }
        }
    }

    /// Cuts the vocabulary down to `columns`. A token that loses one of the teacher's `K` entries no longer counts, nor one whose
    /// teacher has no probability left.
    pub(super) fn select_columns(&mut self, columns: &[usize], mask: &mut Array2<bool>) {
        match self {
            Teacher::Logits(logits) => {
                *logits = logits.select(Axis(2), columns);
                for ((b, t), counts) in mask.indexed_iter_mut().filter(|(_, counts)| **counts) {
                    *counts = logits.row(b, t).iter().any(|x| *x != f64::NEG_INFINITY);
                }
            }
            Teacher::TopK(top) => {
                let places: HashMap<usize, usize> = columns.iter().enumerate().map(|(new, old)| (*old, new)).collect();
                for ((b, t, _), id) in top.ids.indexed_iter_mut() {
                    let place = usize::try_from(*id).ok().and_then(|id| places.get(&id));
                    mask[[b, t]] &= place.is_some();
                    // The token of a lost entry is masked, so that any id will do.
                    *id = place.map_or(0, |place| i64::try_from(*place).expect("a column"));
                }
            }
        }
    }
}

impl TeacherTopK {
    /// Checks shapes and ids of the entries of a batch of `shape`, at most `most` of each token where `mask` is true.
    ///
    /// # Errors
    /// [`ProblemError`] naming the array or the entry that does not fit.
    pub fn check(&self, most: usize, mask: &Array2<bool>, shape: Shape) -> Result<(), ProblemError> {
        let Self { logp, ids } = self;
        let Shape { batch, tokens, vocab } = shape;
        let (rows, columns, count) = ids.dim();
        if (rows, columns) != (batch, tokens) || count == 0 || count > most.min(vocab) {
            let expected = format!("[{batch}, {tokens}, K] with 1 ≤ K ≤ {}", most.min(vocab));
            return Err(ProblemError::Shape { field: Teacher::IDS, given: ids.shape().to_vec(), expected });
        }
        if logp.shape() != ids.shape() {
            let expected = format!("{:?}, that of `{}`", ids.shape(), Teacher::IDS);
            return Err(ProblemError::Shape { field: Teacher::LOGP, given: logp.shape().to_vec(), expected });
        }
        for ((b, t), _) in mask.indexed_iter().filter(|(_, counts)| **counts) {
            let mut seen = HashMap::with_capacity(count);
            for (k, &id) in ids.slice(s![b, t, ..]).iter().enumerate() {
                if usize::try_from(id).ok().is_none_or(|id| id >= vocab) {
                    return Err(ProblemError::TeacherIdOutOfRange { b, t, k, id, vocab });
                }
                if let Some(first) = seen.insert(id, k) {
                    return Err(ProblemError::TeacherIdTwice { b, t, k, id, first });
                }
            }
        }
        Ok(())
    }
}

impl Tokens<'_> {
    /// Checks that each unmasked token has a teacher in the form that the spec reads, over the same vocabulary.
    pub(super) fn check_teacher(&self, spec: &LossSpec, shape: Shape) -> Result<(), ProblemError> {
        let Some(distillation) = spec.as_distillation() else { return Ok(()) };
        let Shape { batch, tokens, vocab } = shape;
        match (&self.extra.teacher, distillation.top_k) {
            (Some(Teacher::Logits(logits)), None) => {
                if logits.shape() != [batch, tokens, vocab] {
                    let expected = format!("[{batch}, {tokens}, {vocab}], that of the student's logits");
                    let given = logits.shape().to_vec();
                    return Err(ProblemError::Shape { field: Teacher::LOGITS, given, expected });
                }
            }
            (Some(Teacher::TopK(top)), Some(most)) => top.check(most, self.mask, shape)?,
            (_, None) => {
                return Err(ProblemError::Missing {
                    field: Teacher::LOGITS,
                    expected: vec![batch, tokens, vocab],
                    because: "an `objective.distillation` without `top_k`",
                });
            }
            (_, Some(_)) => return Err(ProblemError::NoTeacherEntries { batch, tokens }),
        }
        self.check_teacher_values()
    }

    /// Checks that each unmasked token's teacher has a distribution: no NaN, no +∞, and not −∞ alone.
    fn check_teacher_values(&self) -> Result<(), ProblemError> {
        let Some(teacher) = &self.extra.teacher else { return Ok(()) };
        let (field, floats) = (teacher.name(), teacher.floats());
        let is_logits = matches!(teacher, Teacher::Logits(_));
        let largest = if is_logits { f64::MAX } else { ROUNDED_ZERO };
        for ((b, t), _) in self.mask.indexed_iter().filter(|(_, counts)| **counts) {
            let row = floats.row(b, t);
            if let Some((k, &given)) = row.iter().enumerate().find(|(_, x)| x.is_nan() || **x > largest) {
                let of_logits = ProblemError::TeacherLogit { b, t, v: k, given };
                return Err(if is_logits { of_logits } else { ProblemError::TeacherLogp { b, t, k, given } });
            }
            if row.iter().all(|x| *x == f64::NEG_INFINITY) {
                return Err(ProblemError::TeacherWithoutMass { field, b, t });
            }
        }
        Ok(())
    }
}
