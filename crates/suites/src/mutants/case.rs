//! [`MutantCase`]: a loss and a problem that mutants are run on.

use assay_core::implementation::Workload;
use assay_core::problem::{HeadProblem, Problem};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe};

/// One batch, and the loss that is asked for.
#[derive(Clone, Debug)]
pub struct MutantCase<P = Problem> {
    /// The name of the case in reports.
    pub label: String,
    /// The loss that kernels are asked for.
    pub spec: LossSpec,
    /// The batch that kernels are run on.
    pub problem: P,
}

impl MutantCase {
    /// The case of a recipe, called after `family`.
    pub(super) fn generated(family: &str, spec: LossSpec, recipe: &Recipe) -> Self {
        let problem = recipe.problem(&spec).expect("recipes of this crate are in range");
        let regime = serde_json::to_value(recipe.regime).expect("a name");
        let regime = regime.as_str().unwrap_or_default();
        let label = format!("{family}: {} {} {regime}, seed {}", problem.shape(), recipe.dtype, recipe.seed);
        Self { label, spec, problem }
    }
}

impl<P: Workload> MutantCase<P> {
    pub(super) fn is_packed(&self) -> bool {
        self.problem.batch().extra.sequences.packed().is_some()
    }

    /// Returns the case with its sequences packed into one row.
    pub(super) fn packed(self) -> Self {
        let spec = self.spec.with_width(self.problem.batch().mask.ncols());
        Self { label: format!("{}, packed", self.label), spec, problem: self.problem.pack().0 }
    }
}

impl MutantCase<HeadProblem> {
    /// Makes a case of a problem with an LM head.
    pub(super) fn with_head(family: &str, spec: LossSpec, recipe: &HeadRecipe) -> Self {
        let problem = recipe.problem(&spec).expect("recipes of this crate are in range");
        let HeadRecipe { layout, rounds_logits, recipe: Recipe { dtype, regime, seed, .. }, .. } = recipe;
        let regime = serde_json::to_value(regime).expect("a name");
        let regime = regime.as_str().unwrap_or_default();
        let rounding = if *rounds_logits { "rounded" } else { "f32 logits" };
        let (shape, layout) = (problem.shape(), layout.key());
        let label = format!("{family}: {shape} {layout} {dtype} {rounding} {regime}, seed {seed}");
        Self { label, spec, problem }
    }
}
