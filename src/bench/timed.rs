//! [`Timed`]: the two kinds of problem that a bench times, logits, or hidden states and the LM head.

use std::time::Duration;

use crate::bandwidth::LogitsCopy;
use crate::implementation::ProblemFormat;
use crate::judge::generate::{HeadRecipe, Recipe, RecipeError};
use crate::judge::judgeable::Judgeable;
use crate::problem::{Dtype, HeadForm, HeadProblem, HeadShape, Problem, Shape};
use crate::products::HeadProducts;
use crate::schema::bench::BenchFigures;
use crate::spec::LossSpec;

/// A recipe for a problem to be timed.
pub(super) trait Timed: Clone + Sync {
    type Problem: Judgeable;

    /// The field of a config that says the recipe.
    const FIELD: &'static str;

    /// The name of the work that no implementation can avoid, as an opponent.
    const BOUND: &'static str;

    /// A description of that work.
    const BOUND_IS: &'static str;

    /// All but the extents of the logits.
    fn recipe(&self) -> &Recipe;
    /// Returns the inputs that an implementation is prepared for.
    fn given(&self) -> ProblemFormat<Self::Problem>;
    fn extents(&self) -> Vec<usize>;
    fn check(&self, spec: &LossSpec) -> Result<(), RecipeError>;
    fn unmasked_problem(&self, spec: &LossSpec) -> Result<Self::Problem, RecipeError>;

    /// Returns the part of the tokens that is judged, at least one for each of `devices`; `None` if all of them are.
    fn judged_part(&self, devices: usize) -> Option<Self>;

    /// Bytes of this machine's memory while the problem is made, and judged on `devices`.
    fn making_bytes(&self, devices: usize) -> usize;

    /// Bytes of the problem, of a copy of it and of its outcome.
    fn running_bytes(&self) -> usize;

    /// Bytes of the logits, or of hidden states and head.
    fn input_bytes(&self) -> usize;

    /// Bytes of the bound's own arrays.
    fn bound_bytes(&self) -> usize;

    /// The bound, to be timed again and again.
    fn bound<'p>(&self, problem: &'p Self::Problem) -> Box<dyn FnMut() -> Duration + 'p>;

    /// Adds the figures that this kind of problem alone has: the rate over the median step, and what else is said of it on
    /// `devices`.
    fn add_own(&self, devices: usize, figures: &mut BenchFigures);
}

/// Bytes of a product of extents; the most there can be where that overflows.
fn bytes(extents: &[usize], each: usize) -> usize {
    extents.iter().fold(each, |bytes, &extent| bytes.saturating_mul(extent))
}

impl Timed for Recipe {
    type Problem = Problem;
    const FIELD: &'static str = "batch.generate";
    const BOUND: &'static str = "copy";
    const BOUND_IS: &'static str = "a copy of the logits";

    fn recipe(&self) -> &Recipe {
        self
    }

    fn given(&self) -> ProblemFormat {
        let [batch, tokens, vocab] = self.shape;
        ProblemFormat { shape: Shape { batch, tokens, vocab }, dtype: self.dtype, form: (), packed: None }
    }

    fn extents(&self) -> Vec<usize> {
        self.shape.to_vec()
    }

    fn check(&self, spec: &LossSpec) -> Result<(), RecipeError> {
        self.check(spec)
    }

    fn unmasked_problem(&self, spec: &LossSpec) -> Result<Problem, RecipeError> {
        self.unmasked_problem(spec)
    }

    fn judged_part(&self, _: usize) -> Option<Self> {
        None
    }

    /// Logits in f64 and in their dtype.
    fn making_bytes(&self, _: usize) -> usize {
        bytes(&self.shape, Dtype::F64.size() + self.dtype.size())
    }

    fn running_bytes(&self) -> usize {
        bytes(&self.shape, 2 * self.dtype.size())
    }

    fn input_bytes(&self) -> usize {
        bytes(&self.shape, self.dtype.size())
    }

    fn bound_bytes(&self) -> usize {
        bytes(&self.shape, self.dtype.size())
    }

    fn bound<'p>(&self, problem: &'p Problem) -> Box<dyn FnMut() -> Duration + 'p> {
        let mut copy = LogitsCopy::new(&problem.logits);
        Box::new(move || copy.time())
    }

    /// Logits read and dlogits written.
    fn add_own(&self, _: usize, figures: &mut BenchFigures) {
        let moved = bytes(&self.shape, 2 * self.dtype.size()) as f64 / 1e9;
        figures.gb_per_s = Some(moved / figures.step_s_p50);
    }
}

/// Sequences of a head, and tokens of each, whose answer is judged: the reference adds `H·V` products a token with
/// compensation, and holds six arrays of `H·V` and of `N·V` in f64.
const JUDGED: [usize; 2] = [2, 3];

/// The extents of the arrays that `N·V`, `H·V` and `N·H` are the sizes of.
fn sizes(recipe: &HeadRecipe) -> [[usize; 3]; 3] {
    let HeadShape { batch, tokens, hidden, vocab } = recipe.shape();
    [[batch, tokens, vocab], [1, hidden, vocab], [batch, tokens, hidden]]
}

impl Timed for HeadRecipe {
    type Problem = HeadProblem;
    const FIELD: &'static str = "batch.generate_head.recipe";
    const BOUND: &'static str = "gemm";
    const BOUND_IS: &'static str = "the three products alone";

    fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    fn given(&self) -> ProblemFormat<HeadProblem> {
        let form = HeadForm { layout: self.layout, rounds_logits: self.rounds_logits };
        ProblemFormat { shape: self.shape(), dtype: self.recipe.dtype, form, packed: None }
    }

    fn extents(&self) -> Vec<usize> {
        let HeadShape { batch, tokens, hidden, vocab } = self.shape();
        vec![batch, tokens, hidden, vocab]
    }

    fn check(&self, spec: &LossSpec) -> Result<(), RecipeError> {
        self.check(spec)
    }

    fn unmasked_problem(&self, spec: &LossSpec) -> Result<HeadProblem, RecipeError> {
        self.unmasked_problem(spec)
    }

    fn judged_part(&self, devices: usize) -> Option<Self> {
        let [batch, tokens, vocab] = self.recipe.shape;
        // The judged part has at least one token for each device, so that no device's answer goes unseen.
        let rows = batch.min(JUDGED[0]);
        let shape = [rows, tokens.min(JUDGED[1].max(devices.div_ceil(rows))), vocab];
        let part = Self { recipe: Recipe { shape, ..self.recipe.clone() }, ..self.clone() };
        (shape != self.recipe.shape).then_some(part)
    }

    /// Made: logits and two heads in f64, and a head in its dtype. Judged: six of each for the part.
    fn making_bytes(&self, devices: usize) -> usize {
        let [logits, head, _] = sizes(self);
        // Two things need memory at different times, of which the larger counts: drawing the problem, and the reference
        // of its judged part.
        let made = bytes(&logits, 8).saturating_add(bytes(&head, 16 + self.recipe.dtype.size()));
        let part = self.judged_part(devices).unwrap_or_else(|| self.clone());
        made.max(bytes(&sizes(&part)[0], 48).saturating_add(bytes(&head, 48)))
    }

    /// Returns the bytes of a run, in which `dlm_head` is f32.
    fn running_bytes(&self) -> usize {
        let (dtype, [_, head, hidden]) = (self.recipe.dtype.size(), sizes(self));
        bytes(&head, 2 * dtype + 4).saturating_add(bytes(&hidden, 3 * dtype))
    }

    fn input_bytes(&self) -> usize {
        let [_, head, hidden] = sizes(self);
        bytes(&head, self.recipe.dtype.size()).saturating_add(bytes(&hidden, self.recipe.dtype.size()))
    }

    fn bound_bytes(&self) -> usize {
        let [logits, head, hidden] = sizes(self);
        [(logits, 4), (head, 8), (hidden, 8)]
            .into_iter()
            .fold(0, |sum, (extents, each)| bytes(&extents, each).saturating_add(sum))
    }

    fn bound<'p>(&self, _: &'p HeadProblem) -> Box<dyn FnMut() -> Duration + 'p> {
        let mut products = HeadProducts::new(self.shape());
        Box::new(move || products.time())
    }

    /// The operations of the three products, also where an implementation makes four.
    fn add_own(&self, devices: usize, figures: &mut BenchFigures) {
        let operations = HeadProducts::operations(self.shape()) / 1e9;
        figures.gflop_per_s = Some(operations / figures.step_s_p50);
        let judged = self.judged_part(devices).map_or_else(|| self.extents(), |part| part.extents());
        figures.judged_shape = Some(judged);
        figures.layout = Some(self.layout.key().into());
        figures.rounds_logits = Some(self.rounds_logits);
    }
}
