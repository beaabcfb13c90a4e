//! Tokens whose own logit is −∞, through every implementation: logp is −∞, and all else as if they had no part.

use assay::implementation::Implementation;
use assay::judge::generate::{Recipe, Regime};
use assay::judge::trial::Known;
use assay::problem::{Dtype, Problem};
use assay::registry::registry;
use assay::spec::{LossSpec, TemperatureDivides};

/// Rows that end in the middle of a register.
const SHAPE: [usize; 3] = [8, 3, 2049];

/// Losses that stay finite: the ratio of such a token is 0.
fn specs() -> [LossSpec; 3] {
    let bonus = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
    let of_logp = LossSpec { temperature: 0.7, temperature_divides: TemperatureDivides::Logp, ..bonus.clone() };
    [LossSpec::default(), bonus, of_logp]
}

/// How many tokens whose logp is −∞ were judged.
fn expect_right(implementation: &dyn Implementation, devices: usize, spec: &LossSpec, dtype: Dtype) -> usize {
    let recipe = Recipe {
        shape: SHAPE,
        dtype,
        regime: Regime::TargetHoles,
        seed: 3,
        old_logp_noise_scale: 0.3,
        masked_garbage: true,
    };
    let id = implementation.id();
    let problem = recipe.problem(spec).unwrap();
    let known = Known::of(spec, &problem).unwrap();
    let reference = &known.reference;
    assert!(reference.loss().is_finite(), "else this shows little");
    let outcome = known.expect_right(implementation, devices, "this test");
    let logp = outcome.logp.as_ref().expect("it returns logp");
    let mut holes = 0;
    for ((b, t), _) in problem.mask.indexed_iter().filter(|(_, counts)| **counts) {
        if reference.token(b, t).unwrap().inputs.logp == f64::NEG_INFINITY {
            assert_eq!(logp.at(b, t), f64::NEG_INFINITY, "{id}, {dtype}, {devices} devices: logp[{b},{t}]");
            holes += 1;
        }
    }
    holes
}

/// The dtypes and losses that an implementation is asked for: one that cuts a batch over devices has the kernels of the one
/// that holds it whole, and f32 and f16 programs differ from those of bf16 in how logits are loaded alone.
fn asked(devices: usize) -> Vec<(Dtype, LossSpec)> {
    let plain = [Dtype::Bf16, Dtype::F32, Dtype::F16].map(|dtype| (dtype, LossSpec::default()));
    if devices > 1 {
        return plain[..1].to_vec();
    }
    plain.into_iter().chain(specs().into_iter().skip(1).map(|spec| (Dtype::Bf16, spec))).collect()
}

#[test]
fn all_outputs_target_at_minus_infinity_match_reference() {
    let plugins = super::cpu_plugins();
    let mut all = registry::<Problem>(Some(plugins[0]));
    // Kernels for GPUs have no other lowering.
    all.retain(|implementation| implementation.available().is_ok());
    assert_eq!(all.len(), 11, "each is asked for something");
    for implementation in all {
        let devices = *implementation.device_counts().last().expect("the CPU has devices");
        let asked = asked(devices).into_iter();
        let holes = asked.map(|(dtype, spec)| expect_right(&*implementation, devices, &spec, dtype));
        assert!(holes.sum::<usize>() > 1, "{}", implementation.id());
    }
}
