//! Mutants at the widths that kernels are made for.

use std::fmt;

use super::case::MutantCase;
use super::run::{AT_ONCE, Kill, MutantOutcome, MutantSuite};
use super::{BANK, Mutant, MutantKind, QWEN_VOCABULARY, Specimen, property};
use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, HeadLayout};
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Tolerances};
use assay_mutants::DEVICE_COUNTS;

/// The amount of work at the widths that kernels are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductionRun {
    /// A selection that a test has time for: six tokens over Qwen's vocabulary, in bf16 where there is a choice, of
    /// untransformed logits, on one device except for mutants of several.
    Short,
    /// Sixteen tokens; every class of heads, six tokens at 4096 × 4,099 and at 896 × 151,936, in every dtype and on every number
    /// of devices.
    Full,
}

/// The fate of one mutant at one width.
#[derive(Clone, Debug)]
pub struct AtWidth {
    /// The mutant that was run.
    pub mutant: &'static Mutant,
    /// Columns, or hidden units by columns.
    pub width: String,
    /// The fate of the mutant.
    pub fate: MutantOutcome,
}

/// Mutants that are as accurate as the correct kernel at production widths, but for what their narrow cases show: a shift that is
/// not the maximum is right until logits are further apart than f32's exponents reach.
const ACCURATE_WHERE_WIDE: [&str; 2] = ["max-of-first-tile", "stale-max"];

impl AtWidth {
    /// Whether its acceptance at `grade` is by design.
    pub fn is_admitted(&self, grade: Grade) -> bool {
        let by_design = |name| Tolerances::builtin().admitted.iter().any(|admitted| admitted.mutant == name);
        (grade == Grade::Standard && by_design(self.mutant.name)) || ACCURATE_WHERE_WIDE.contains(&self.mutant.name)
    }
}

/// A class of mutants at one of the widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductionPart {
    class: MutantKind,
    /// Hidden units, columns and layout of an LM head; without one Qwen's vocabulary.
    head: Option<(usize, usize, HeadLayout)>,
    production: ProductionRun,
}

/// Mutants of wide heads that are judged at once: the gradients that each returns take half a gigabyte.
const HEADS_AT_ONCE: usize = 2;

/// Hidden units, columns and layout of the heads at the widths that kernels are made for.
const HEADS: [(usize, usize, HeadLayout); 2] =
    [(4096, 4099, HeadLayout::VocabByHidden), (896, QWEN_VOCABULARY, HeadLayout::HiddenByVocab)];

impl ProductionRun {
    /// Returns the parts of the run, in order.
    pub fn parts(self) -> impl Iterator<Item = ProductionPart> {
        let is_run = move |class: &MutantKind| match self {
            Self::Short => !matches!(class, MutantKind::Logits | MutantKind::Support),
            Self::Full => true,
        };
        let on_logits = MutantKind::ALL.into_iter().filter(|class| !class.is_of_heads() && class.is_of_columns());
        let on_logits = on_logits.filter(is_run);
        let on_logits = on_logits.map(|class| (class, None));
        let of_heads = MutantKind::ALL.into_iter().filter(move |class| self == Self::Full && class.is_of_heads());
        let of_heads = of_heads.flat_map(|class| HEADS.map(|head| (class, Some(head))));
        on_logits.chain(of_heads).map(move |(class, head)| ProductionPart { class, head, production: self })
    }
}

impl ProductionPart {
    /// Columns, or hidden units by columns.
    pub fn width(&self) -> String {
        self.head.map_or(QWEN_VOCABULARY.to_string(), |(hidden, vocab, _)| format!("{hidden}x{vocab}"))
    }

    /// Every mutant of the class, up to the first case that rejects it.
    ///
    /// # Errors
    /// What rejected the correct kernel: a false alarm.
    pub fn run(self, grade: Grade) -> Result<Vec<AtWidth>, Kill> {
        let short = self.production == ProductionRun::Short;
        let family = self.class.name();
        let Some((hidden, vocab, layout)) = self.head else {
            let mut recipes = property::production(self.class, if short { [2, 3] } else { [4, 4] });
            // A short run keeps bf16 alone of several dtypes.
            if short && recipes.iter().any(|(_, recipe)| recipe.dtype == Dtype::Bf16) {
                recipes.retain(|(_, recipe)| recipe.dtype == Dtype::Bf16);
            }
            let cases = recipes.into_iter().map(|(spec, recipe)| MutantCase::generated(family, spec, &recipe));
            // A bug within a row shows on one device.
            let on_all = !short || matches!(self.class, MutantKind::Devices | MutantKind::State);
            return self.fates(if on_all { &DEVICE_COUNTS } else { &[1] }, cases, grade);
        };
        let recipes = property::head_production(self.class, hidden, [2, 3, vocab], layout).into_iter();
        let cases = recipes.map(|(spec, head)| MutantCase::with_head(family, spec, &head));
        self.fates(&DEVICE_COUNTS, cases, grade)
    }

    /// Returns the fates of the mutants. Cases run one after another, as a wide problem with its reference takes
    /// gigabytes.
    fn fates<P: Judgeable>(
        self,
        devices: &'static [usize],
        cases: impl Iterator<Item = MutantCase<P>>,
        grade: Grade,
    ) -> Result<Vec<AtWidth>, Kill>
    where
        Specimen: Implementation<P>,
    {
        let mutants = BANK.iter().filter(|mutant| mutant.kind == self.class);
        let mut all: Vec<AtWidth> =
            mutants.map(|mutant| AtWidth { mutant, width: self.width(), fate: MutantOutcome::NotExercised }).collect();
        // Cases are made one at a time, and only those mutants are run on the next that no earlier case has killed.
        for case in cases {
            let mut left: Vec<&mut AtWidth> =
                all.iter_mut().filter(|at| !matches!(at.fate, MutantOutcome::Killed(_))).collect();
            if left.is_empty() {
                break;
            }
            let at_once = if self.head.is_some() { HEADS_AT_ONCE } else { AT_ONCE };
            let suite = MutantSuite::on(devices, std::slice::from_ref(&case), at_once, grade)?;
            let fates = suite.run(&left.iter().map(|at| at.mutant).collect::<Vec<_>>());
            // A case that does not exercise a mutant leaves the fate that an earlier case gave it.
            for (at, fate) in left.iter_mut().zip(fates).filter(|(_, fate)| *fate != MutantOutcome::NotExercised) {
                at.fate = fate;
            }
        }
        Ok(all)
    }
}

impl fmt::Display for ProductionPart {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} at {}", self.class.name(), self.width())
    }
}
