//! [`Subject`]: what a campaign can do with a problem, whether its logits are given or a product.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::swap;

use ndarray::{Array, Array3, ArrayViewD, Dimension, s};

#[cfg(feature = "mutants")]
use assay_core::implementation::Implementation;
use assay_core::problem::{Advantages, Dtype, FloatArray, HeadProblem, Problem, ProblemPart, Shape, Teacher};
use assay_core::spec::{LogitsTransform, LossSpec, OldLogp};
use assay_fixture::{FixtureError, ProblemFile};
use assay_judge::generate::{Recipe, RecipeError, Regime};
use assay_judge::judgeable::Judgeable;
#[cfg(feature = "mutants")]
use assay_suites::mutants::{MutantKind, Specimen};

use crate::deck::{DealtRecipe, DeckContent};

/// A problem that a deck deals.
pub trait Subject: Judgeable {
    /// Draws the problem of a recipe, before its content is edited and its sequences are packed.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    fn draw(dealt: &DealtRecipe, spec: &LossSpec) -> Result<Self, RecipeError>;

    /// Whether a wrong kernel of this class is one of such problems on one device.
    #[cfg(feature = "mutants")]
    fn is_of(class: MutantKind) -> bool;

    /// Whether mutants of a class show where such a problem is cut over several ranks, and nowhere else.
    #[cfg(feature = "mutants")]
    fn is_of_ranks(class: MutantKind) -> bool;

    /// Returns the part that contains the whole problem.
    fn whole(&self) -> ProblemPart {
        let Shape { batch, tokens, vocab } = self.shape().into();
        ProblemPart::whole([self.batch().extra.sequences.count(batch), tokens, vocab])
    }

    /// Returns the problem with its tokens edited, and its logits as they are.
    #[must_use]
    fn map_tokens(&self, edit: impl FnOnce(&mut Problem<()>)) -> Self {
        let mut tokens = self.batch().with_logits(());
        edit(&mut tokens);
        tokens.with_logits(self.batch().logits.clone()).into()
    }

    /// Returns the problem with each float of its logits or hidden states replaced by `edit` of it, rounded.
    #[must_use]
    fn map_values(&self, edit: impl Fn(f64) -> f64) -> Self {
        let rows = FloatArray::rounded_from(&self.rows().to_f64().mapv(edit), self.dtype());
        self.batch().with_logits(self.with_rows(rows)).into()
    }

    /// A part of it, packed if it is; hidden units are all kept.
    #[must_use]
    fn part(&self, part: &ProblemPart) -> Self;

    /// `self`'s memory with the content of `other`, which has the same extents and dtype.
    #[must_use]
    fn refilled(self, other: Self) -> Self;

    /// Returns the problem with `count` vocabulary entries more, whose logits are −∞; `None` where they would not have probability 0, or
    /// logits are a product.
    fn with_dead_entries(&self, spec: &LossSpec, count: usize) -> Option<Self>;

    /// Writes the values of a tiny problem that `spec` reads, as they are written in code; `None` if there are many.
    fn values_in_words(&self, spec: &LossSpec) -> Option<String> {
        let arrays: Vec<_> = Self::ARRAYS.iter().copied().zip(self.arrays()).collect();
        let Problem { ids, mask, advantages, old_logp, ref_logp, .. } = self.batch();
        let values: usize = arrays.iter().map(|(_, array)| array.shape().iter().product::<usize>()).sum();
        if values + ids.len() > FEW_VALUES {
            return None;
        }
        let floats = arrays.iter().map(|(name, array)| (*name, nested(array.to_f64().view())));
        let advantages = match advantages {
            Advantages::Dlogp(dlogp) => ("dlogp", nested(dlogp.view().into_dyn())),
            Advantages::Sequence(one) => ("advantages", nested(one.view().into_dyn())),
            Advantages::Token(all) => ("advantages", nested(all.view().into_dyn())),
        };
        let whole = [
            ("ids", nested(ids.mapv(|id| id as f64).view().into_dyn())),
            ("mask", nested(mask.mapv(|counts| f64::from(u8::from(counts))).view().into_dyn())),
        ];
        let advantages = Some(advantages).filter(|_| spec.reads_advantages());
        let old_logp = old_logp.as_ref().filter(|_| spec.old_logp == OldLogp::Given);
        let ref_logp = ref_logp.as_ref().filter(|_| spec.kl.is_some());
        let optional = [("old_logp", old_logp), ("ref_logp", ref_logp)];
        let optional = optional.into_iter().filter_map(|(name, x)| Some((name, nested(x?.view().into_dyn()))));
        let all = floats.chain(whole).chain(advantages).chain(optional);
        Some(all.map(|(name, values)| format!("{name} = {values}")).collect::<Vec<_>>().join(", "))
    }

    /// Returns a number that problems of other content do not share.
    fn fingerprint(&self) -> u64 {
        // Hash the bits, so that −0 and 0 differ and NaN equals itself.
        let mut hasher = DefaultHasher::new();
        let mut floats = |values: &mut dyn Iterator<Item = &f64>| values.for_each(|x| x.to_bits().hash(&mut hasher));
        for array in self.arrays() {
            floats(&mut array.to_f64().iter());
        }
        let Problem { ids, mask, old_logp, ref_logp, .. } = self.batch();
        for array in [old_logp, ref_logp] {
            floats(&mut array.iter().flatten());
        }
        ids.hash(&mut hasher);
        mask.hash(&mut hasher);
        hasher.finish()
    }

    /// Reads what [`write_problem`](assay_fixture::write_problem) wrote; `None` where the file holds the other kind of problem.
    ///
    /// # Errors
    /// Those of [`ProblemFile::problem`].
    fn read(file: &ProblemFile, old_logp: Option<&str>) -> Result<Option<Self>, FixtureError>;

    /// A mutant, as a kernel of it.
    #[cfg(feature = "mutants")]
    fn mutant(specimen: &Specimen) -> &dyn Implementation<Self>;
}

/// The largest number of values that are written out.
const FEW_VALUES: usize = 12;

/// Writes an array as nested lists: `[[1, 2], [3, 4]]`.
fn nested(array: ArrayViewD<f64>) -> String {
    match array.ndim() {
        0 => array.first().map_or_else(String::new, |x| format!("{x:?}").trim_end_matches(".0").to_string()),
        _ => format!("[{}]", array.outer_iter().map(nested).collect::<Vec<_>>().join(", ")),
    }
}

/// The recipe, of this number, of a problem with what losses differ in: sequences of several lengths, ratios on either side of a
/// clip.
pub(crate) fn telling(index: u64) -> DealtRecipe {
    DealtRecipe::from_recipe(Recipe {
        shape: [4, 7, 33],
        dtype: Dtype::F32,
        regime: [Regime::Normal, Regime::Sampled, Regime::Small][(index % 3) as usize],
        seed: (1 << 62) + index,
        old_logp_noise_scale: [0.3, 1.0][(index % 2) as usize],
        masked_garbage: false,
    })
}

impl Subject for Problem {
    fn draw(dealt: &DealtRecipe, spec: &LossSpec) -> Result<Self, RecipeError> {
        match dealt.content {
            DeckContent::EveryTokenCounts => dealt.recipe.unmasked_problem(spec),
            _ => dealt.recipe.problem(spec),
        }
    }

    #[cfg(feature = "mutants")]
    fn is_of(class: MutantKind) -> bool {
        !class.is_of_heads() && class != MutantKind::Devices
    }

    #[cfg(feature = "mutants")]
    fn is_of_ranks(class: MutantKind) -> bool {
        class == MutantKind::Devices
    }

    fn part(&self, part: &ProblemPart) -> Self {
        self.select(part)
    }

    fn with_dead_entries(&self, spec: &LossSpec, count: usize) -> Option<Self> {
        // A teacher has the vocabulary of its student.
        if spec.logits != LogitsTransform::default() || !spec.support.is_whole() || spec.reads_teacher() {
            return None;
        }
        let logits = self.logits.to_f64();
        let (batch, tokens, vocab) = logits.dim();
        let mut longer = Array3::from_elem((batch, tokens, vocab + count), f64::NEG_INFINITY);
        longer.slice_mut(s![.., .., ..vocab]).assign(&logits);
        Some(self.with_logits(FloatArray::rounded_from(&longer, self.logits.dtype())))
    }

    fn refilled(mut self, mut other: Self) -> Self {
        self.logits.assign(&other.logits);
        swap(&mut self.logits, &mut other.logits);
        refill_tokens(&mut self, &mut other);
        other
    }

    fn read(file: &ProblemFile, old_logp: Option<&str>) -> Result<Option<Self>, FixtureError> {
        if file.has_head() { Ok(None) } else { file.problem("logits", old_logp).map(Some) }
    }

    #[cfg(feature = "mutants")]
    fn mutant(specimen: &Specimen) -> &dyn Implementation {
        specimen
    }
}

impl Subject for HeadProblem {
    fn draw(dealt: &DealtRecipe, spec: &LossSpec) -> Result<Self, RecipeError> {
        match dealt.content {
            DeckContent::EveryTokenCounts => dealt.head_recipe().unmasked_problem(spec),
            _ => dealt.head_recipe().problem(spec),
        }
    }

    #[cfg(feature = "mutants")]
    fn is_of(class: MutantKind) -> bool {
        !matches!(class, MutantKind::HeadDevices | MutantKind::Devices)
    }

    #[cfg(feature = "mutants")]
    fn is_of_ranks(class: MutantKind) -> bool {
        matches!(class, MutantKind::HeadDevices | MutantKind::Devices)
    }

    fn part(&self, part: &ProblemPart) -> Self {
        let units: Vec<usize> = (0..self.shape().hidden).collect();
        self.select(part, &units)
    }

    fn with_dead_entries(&self, _: &LossSpec, _: usize) -> Option<Self> {
        None
    }

    fn refilled(mut self, mut other: Self) -> Self {
        self.logits.hidden.assign(&other.logits.hidden);
        self.logits.lm_head.assign(&other.logits.lm_head);
        swap(&mut self.logits, &mut other.logits);
        refill_tokens(&mut self, &mut other);
        other
    }

    fn read(file: &ProblemFile, old_logp: Option<&str>) -> Result<Option<Self>, FixtureError> {
        if file.has_head() { file.head_problem(old_logp).map(Some) } else { Ok(None) }
    }

    #[cfg(feature = "mutants")]
    fn mutant(specimen: &Specimen) -> &dyn Implementation<HeadProblem> {
        specimen
    }
}

/// Moves the arrays of `content` apart from its logits into the memory of `memory`, and leaves them in `content`.
fn refill_tokens<L>(memory: &mut Problem<L>, content: &mut Problem<L>) {
    fn refill<T: Clone, D: Dimension>(memory: &mut Array<T, D>, content: &mut Array<T, D>) {
        if memory.raw_dim() == content.raw_dim() {
            memory.assign(content);
            swap(memory, content);
        }
    }
    fn refill_optional<T: Clone, D: Dimension>(memory: &mut Option<Array<T, D>>, content: &mut Option<Array<T, D>>) {
        if let (Some(memory), Some(content)) = (memory, content) {
            refill(memory, content);
        }
    }
    refill(&mut memory.ids, &mut content.ids);
    refill(&mut memory.mask, &mut content.mask);
    match (&mut memory.advantages, &mut content.advantages) {
        (Advantages::Sequence(memory), Advantages::Sequence(content)) => refill(memory, content),
        (Advantages::Token(memory), Advantages::Token(content))
        | (Advantages::Dlogp(memory), Advantages::Dlogp(content)) => refill(memory, content),
        _ => {}
    }
    refill_optional(&mut memory.old_logp, &mut content.old_logp);
    refill_optional(&mut memory.ref_logp, &mut content.ref_logp);
    let (memory, content) = (&mut memory.extra, &mut content.extra);
    refill_optional(&mut memory.rollout_logp, &mut content.rollout_logp);
    refill_optional(&mut memory.rollout_weights, &mut content.rollout_weights);
    refill_optional(&mut memory.token_weights, &mut content.token_weights);
    refill_optional(&mut memory.selected, &mut content.selected);
    refill_optional(&mut memory.bias, &mut content.bias);
    refill_optional(&mut memory.dentropy, &mut content.dentropy);
    refill_optional(&mut memory.temperature, &mut content.temperature);
    if let (Some(memory), Some(content)) = (&mut memory.others, &mut content.others) {
        refill(&mut memory.ids, &mut content.ids);
        refill(&mut memory.dlogp, &mut content.dlogp);
    }
    refill_optional(&mut memory.kept_ids, &mut content.kept_ids);
    if let (Some(memory), Some(content)) = (&mut memory.teacher, &mut content.teacher) {
        if memory.floats().dtype() == content.floats().dtype() && memory.floats().shape() == content.floats().shape() {
            memory.floats_mut().assign(content.floats());
            swap(memory.floats_mut(), content.floats_mut());
        }
        if let (Teacher::TopK(memory), Teacher::TopK(content)) = (memory, content) {
            refill(&mut memory.ids, &mut content.ids);
        }
    }
}
