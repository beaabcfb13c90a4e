//! Every named variant of the family, for the suites to run one by one.

use std::collections::BTreeSet;

use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, Shape};
pub use assay_judge::variants::{SHAPE, recipe};
use assay_judge::variants::{Variant, variants};

/// The settings that an implementation may refuse, and no other.
fn refusals(id: &str) -> BTreeSet<&'static str> {
    // These choices look at the whole batch, those of `of_rows` at a whole row: a kernel that sees less must refuse
    // them.
    let of_batch = ["objective.clip_cov.selection", "objective.kl_cov.selection", "top_entropy"];
    let of_rows = ["off_policy_mask", "ratio.level"];
    let mut all: BTreeSet<&str> = of_batch.into();
    // A divergence reads a second distribution, which no kernel but that is given.
    if id != "native" {
        all.extend(["objective", "objective.importance_sampling.empty_rows", "support.kept"]);
    }
    if id.starts_with("tile-one-pass") {
        all.extend(of_rows);
    }
    all
}

/// The variants that `implementation` computes. Those that it refuses are refused for the reasons there are.
///
/// ```
/// use assay_native::Native;
/// use assay_suites::supported::supported;
///
/// let variants = supported(&Native::default(), 1);
/// assert!(variants.iter().any(|variant| variant.choice == "ppo_clip"));
/// ```
///
/// # Panics
/// Where it refuses another setting, or computes one that it should refuse.
pub fn supported(implementation: &dyn Implementation, devices: usize) -> Vec<Variant> {
    let [batch, tokens, vocab] = SHAPE;
    let mut refused = BTreeSet::new();
    let all = variants().into_iter().filter(|variant| {
        match implementation.supports(&variant.spec, Shape { batch, tokens, vocab }, Dtype::F32, devices) {
            Ok(()) => true,
            Err(why) => {
                refused.insert(why.field);
                false
            }
        }
    });
    // A refusal for any other reason, or one that is missing, is a mistake of the implementation's `supports`.
    let all: Vec<Variant> = all.collect();
    assert_eq!(refused, refusals(implementation.id()), "{} refuses", implementation.id());
    all
}
