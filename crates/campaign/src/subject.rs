//! [`Subject`]: what a campaign can do with a problem, whether its logits are given or a product.

use std::hash::{DefaultHasher, Hash, Hasher};

use ndarray::{Array2, Ix3};

#[cfg(feature = "mutants")]
use assay_core::implementation::Implementation;
use assay_core::problem::{
    Candidate, CuSeqlens, Dtype, FloatArray, HeadCandidate, HeadProblem, Problem, ProblemPart, Projection,
};
use assay_core::spec::LossSpec;
use assay_fixture::{FixtureError, ProblemFile, StoredProblem};
use assay_judge::generate::{Recipe, RecipeError, Regime};
use assay_judge::judgeable::Judgeable;
use assay_reference::{HeadReference, Reference};
#[cfg(feature = "mutants")]
use assay_suites::mutants::{MutantKind, Specimen};

use crate::deck::{DealtRecipe, DeckContent};

/// A problem that a deck deals.
pub trait Subject: Judgeable + StoredProblem {
    /// Draws the problem of a recipe, before its content is edited and its sequences are packed.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    fn draw(dealt: &DealtRecipe, spec: &LossSpec) -> Result<Self, RecipeError>;

    /// Returns the extents `[B,T,V]` of the logits.
    fn extents(&self) -> [usize; 3];

    /// `[B,T]`: the tokens that count.
    fn mask(&self) -> &Array2<bool>;

    /// `1x1x2`, or with an LM head `1x1x8x2`.
    fn extents_in_words(&self) -> String;

    /// Whether a wrong kernel of this class is one of such problems on one device.
    #[cfg(feature = "mutants")]
    fn is_of(class: MutantKind) -> bool;

    /// Returns the problem with its tokens in one row, which `cu_seqlens` cuts into as many sequences as there were
    /// rows.
    #[must_use]
    fn laid_out(&self, cu_seqlens: CuSeqlens) -> Self;

    /// Returns the part that contains the whole problem.
    fn whole(&self) -> ProblemPart {
        let [batch, tokens, vocab] = self.extents();
        ProblemPart::whole([self.which_sequences().count(batch), tokens, vocab])
    }

    /// Returns the problem with its tokens edited, and its logits as they are.
    #[must_use]
    fn map_tokens(&self, edit: impl FnOnce(&mut Problem<()>)) -> Self;

    /// Returns the problem with each float of its logits or hidden states replaced by `edit` of it.
    #[must_use]
    fn map_values(&self, edit: impl Fn(f64) -> f64) -> Self;

    /// A part of it, packed if it is; hidden units are all kept.
    #[must_use]
    fn part(&self, part: &ProblemPart) -> Self;

    /// `self`'s memory with the content of `other`, which has the same extents and dtype.
    #[must_use]
    fn refilled(self, other: Self) -> Self;

    /// A number that problems of other content do not share.
    fn fingerprint(&self) -> u64;

    /// All outputs of the reference.
    fn outcome(reference: &Self::Reference<'_>) -> Candidate<Self::Gradient>;

    /// Reads what [`write_problem`](assay_fixture::write_problem) wrote; `None` where the file holds the other kind of problem.
    ///
    /// # Errors
    /// Those of [`ProblemFile::problem`].
    fn read(file: &ProblemFile, old_logp: Option<&str>) -> Result<Option<Self>, FixtureError>;

    /// A mutant, as a kernel of it.
    #[cfg(feature = "mutants")]
    fn mutant(specimen: &Specimen) -> &dyn Implementation<Self>;
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

/// The tokens of a problem, edited apart from its logits.
fn edited<L: Clone>(problem: &Problem<L>, edit: impl FnOnce(&mut Problem<()>)) -> Problem<L> {
    let mut tokens = problem.with_logits(());
    edit(&mut tokens);
    tokens.with_logits(problem.logits.clone())
}

/// Each element as `edit` makes it of the old one, rounded.
fn mapped(array: &FloatArray<Ix3>, edit: impl Fn(f64) -> f64) -> FloatArray<Ix3> {
    FloatArray::rounded_from(&array.to_f64().mapv(edit), array.dtype())
}

impl Subject for Problem {
    fn draw(dealt: &DealtRecipe, spec: &LossSpec) -> Result<Self, RecipeError> {
        match dealt.content {
            DeckContent::EveryTokenCounts => dealt.recipe.unmasked_problem(spec),
            _ => dealt.recipe.problem(spec),
        }
    }

    fn extents(&self) -> [usize; 3] {
        let shape = self.shape();
        [shape.batch, shape.tokens, shape.vocab]
    }

    fn mask(&self) -> &Array2<bool> {
        &self.mask
    }

    fn extents_in_words(&self) -> String {
        self.shape().to_string()
    }

    #[cfg(feature = "mutants")]
    fn is_of(class: MutantKind) -> bool {
        !class.is_of_heads() && class != MutantKind::Devices
    }

    fn laid_out(&self, cu_seqlens: CuSeqlens) -> Self {
        self.laid_out(cu_seqlens)
    }

    fn map_tokens(&self, edit: impl FnOnce(&mut Problem<()>)) -> Self {
        edited(self, edit)
    }

    fn map_values(&self, edit: impl Fn(f64) -> f64) -> Self {
        self.with_logits(mapped(&self.logits, edit))
    }

    fn part(&self, part: &ProblemPart) -> Self {
        self.select(part)
    }

    fn refilled(mut self, other: Self) -> Self {
        self.logits.assign(&other.logits);
        other.with_logits(self.logits)
    }

    fn fingerprint(&self) -> u64 {
        hashed(self, [&self.logits.to_f64().into_iter().collect::<Vec<f64>>()])
    }

    fn outcome(reference: &Reference<'_>) -> Candidate {
        reference.outcome().into()
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

    fn extents(&self) -> [usize; 3] {
        let shape = self.shape().logits();
        [shape.batch, shape.tokens, shape.vocab]
    }

    fn mask(&self) -> &Array2<bool> {
        &self.mask
    }

    fn extents_in_words(&self) -> String {
        self.shape().to_string()
    }

    #[cfg(feature = "mutants")]
    fn is_of(class: MutantKind) -> bool {
        !matches!(class, MutantKind::HeadDevices | MutantKind::Devices)
    }

    fn laid_out(&self, cu_seqlens: CuSeqlens) -> Self {
        self.laid_out(cu_seqlens)
    }

    fn map_tokens(&self, edit: impl FnOnce(&mut Problem<()>)) -> Self {
        edited(self, edit)
    }

    fn map_values(&self, edit: impl Fn(f64) -> f64) -> Self {
        self.with_logits(Projection { hidden: mapped(&self.logits.hidden, edit), ..self.logits.clone() })
    }

    fn part(&self, part: &ProblemPart) -> Self {
        let units: Vec<usize> = (0..self.shape().hidden).collect();
        self.select(part, &units)
    }

    fn refilled(self, other: Self) -> Self {
        let mut projection = self.logits;
        projection.hidden.assign(&other.logits.hidden);
        projection.lm_head.assign(&other.logits.lm_head);
        other.with_logits(projection)
    }

    fn fingerprint(&self) -> u64 {
        let Projection { hidden, lm_head, .. } = &self.logits;
        let (hidden, lm_head) = (hidden.to_f64().into_iter().collect(), lm_head.to_f64().into_iter().collect());
        hashed::<_, 2>(self, [&hidden, &lm_head])
    }

    fn outcome(reference: &HeadReference<'_>) -> HeadCandidate {
        reference.outcome().into()
    }

    fn read(file: &ProblemFile, old_logp: Option<&str>) -> Result<Option<Self>, FixtureError> {
        if file.has_head() { file.head_problem(old_logp).map(Some) } else { Ok(None) }
    }

    #[cfg(feature = "mutants")]
    fn mutant(specimen: &Specimen) -> &dyn Implementation<HeadProblem> {
        specimen
    }
}

/// A number of the tokens of a problem and the values that its logits are, or are made of.
fn hashed<L, const N: usize>(problem: &Problem<L>, values: [&Vec<f64>; N]) -> u64 {
    // Hash the bits, so that −0 and 0 differ and NaN equals itself.
    let mut hasher = DefaultHasher::new();
    let mut floats = |values: &mut dyn Iterator<Item = &f64>| values.for_each(|x| x.to_bits().hash(&mut hasher));
    for values in values {
        floats(&mut values.iter());
    }
    for array in [&problem.old_logp, &problem.ref_logp] {
        floats(&mut array.iter().flatten());
    }
    problem.ids.hash(&mut hasher);
    problem.mask.hash(&mut hasher);
    hasher.finish()
}
