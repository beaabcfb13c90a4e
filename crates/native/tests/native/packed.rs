//! Packed sequences: the reference and the kernel give them the bits of their padded twin.

use assay_core::implementation::{Implementation as _, Workload as _};
use assay_core::problem::{Advantages, Candidate, CuSeqlens, Dtype, HeadCandidate, ProblemPart, Sequences};
use assay_core::spec::{Kl, KlEstimator, LossSpec, Ratio, RatioLevel, Reduction, Rows};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::packed::Twins;
use assay_judge::trial::{JudgedProblem, hindrance};
use assay_native::{Native, NativeHead};
use assay_suites::cases;
use ndarray::s;
use proptest::prelude::*;

proptest! {
    #![proptest_config(cases::config(300))]

    #[test]
    fn packed_any_spec_has_bits_of_padded(spec in cases::any_spec(), recipe in cases::any_recipe()) {
        let padded = recipe.problem(&spec).unwrap_or_else(|error| panic!("{error}"));
        let Some(twins) = Twins::from_padded(&spec, &padded) else { return Ok(()) };
        let Twins { spec, padded, packed, .. } = &twins;
        let of_packed = JudgedProblem::new(spec, packed).unwrap_or_else(|error| panic!("{error}"));
        let of_padded = JudgedProblem::new(spec, padded).expect("a valid problem");
        let reference: [Candidate; 2] = [&of_packed, &of_padded].map(|known| known.reference.outcome().into());
        let [a, b] = &reference;
        prop_assert_eq!(twins.between(a, b).other, Vec::<&str>::new(), "reference");
        prop_assert!(a.metrics == b.metrics || !b.loss.as_ref().is_some_and(|loss| loss.value().is_finite()), "{:?}, {:?}", a.metrics, b.metrics);

        let native = Native::default();
        prop_assert_eq!(hindrance(&native, spec, packed, 1), hindrance(&native, spec, padded, 1));
        if hindrance(&native, spec, packed, 1).is_none() {
            let [a, b] = [packed, padded].map(|problem| native.run(spec, problem.clone(), 1).expect("supported"));
            prop_assert_eq!(twins.between(&a, &b).other, Vec::<&str>::new(), "native");
            prop_assert!(a.metrics == b.metrics || !b.loss.as_ref().is_some_and(|loss| loss.value().is_finite()), "{:?}, {:?}", a.metrics, b.metrics);
            of_packed.expect_right(&native, 1, &format!("packed {recipe:?}"));
        }
    }
}

proptest! {
    #![proptest_config(cases::config(40))]

    #[test]
    fn packed_any_head_has_bits_of_padded(spec in cases::any_spec(), recipe in cases::any_head_recipe()) {
        let padded = recipe.problem(&spec).unwrap_or_else(|error| panic!("{error}"));
        let Some(twins) = Twins::from_padded(&spec, &padded) else { return Ok(()) };
        let Twins { spec, padded, packed, .. } = &twins;
        let of_packed = JudgedProblem::new(spec, packed).unwrap_or_else(|error| panic!("{error}"));
        let of_padded = JudgedProblem::new(spec, padded).expect("a valid problem");
        let reference: [HeadCandidate; 2] = [&of_packed, &of_padded].map(|known| known.reference.outcome().into());
        let [a, b] = &reference;
        prop_assert_eq!(twins.between(a, b).other, Vec::<&str>::new(), "reference");
        prop_assert!(a.metrics == b.metrics || !b.loss.as_ref().is_some_and(|loss| loss.value().is_finite()), "{:?}, {:?}", a.metrics, b.metrics);
        let native = NativeHead::default().chunk(3);
        if hindrance(&native, spec, packed, 1).is_none() {
            let [a, b] = [packed, padded].map(|problem| native.run(spec, problem.clone(), 1).expect("supported"));
            prop_assert_eq!(twins.between(&a, &b).other, Vec::<&str>::new(), "native");
            prop_assert!(a.metrics == b.metrics || !b.loss.as_ref().is_some_and(|loss| loss.value().is_finite()), "{:?}, {:?}", a.metrics, b.metrics);
            of_packed.expect_right(&native, 1, &format!("packed {recipe:?}"));
        }
    }
}

/// Tokens behind the last sequence, as a width that is always the same leaves them, are nobody's.
#[test]
fn packed_tokens_after_last_sequence_change_no_bit() {
    let spec = LossSpec {
        ratio: Ratio { level: RatioLevel::Sequence, ..LossSpec::default().ratio },
        reduction: Reduction::SequenceMean { rows: Rows::All },
        kl: Some(Kl::plain(0.04, KlEstimator::K3)),
        entropy_coef: 0.01,
        ..LossSpec::default()
    };
    let recipe = Recipe {
        shape: [5, 7, 300],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 5,
        old_logp_noise_scale: 0.3,
        masked_garbage: true,
    };
    let (mut long, _) = recipe.problem(&spec).expect("a valid recipe").pack();
    let mut sequences = long.sequences();
    // The last one that has a token, and those behind it, are taken out.
    let last = sequences.iter().rposition(|sequence| !sequence.tokens.is_empty()).expect("some");
    sequences.truncate(last);
    let end = sequences.last().expect("more than one").tokens.end;
    long.extra.sequences =
        Sequences::Packed(CuSeqlens::from_lengths(sequences.iter().map(|sequence| sequence.tokens.len())));
    long.mask.slice_mut(s![0, end..]).fill(false);
    let Advantages::Sequence(advantages) = &long.advantages else { unreachable!("the default") };
    long.advantages = Advantages::Sequence(advantages.slice(s![..last]).to_owned());
    let part = ProblemPart { tokens: (0..end).collect(), ..ProblemPart::whole([last, long.mask.ncols(), 300]) };
    let short = long.select(&part);
    assert!(short.mask.ncols() < long.mask.ncols() && short.extra.sequences == long.extra.sequences);

    let native = Native::default();
    let [of_long, of_short] = [&long, &short].map(|problem| native.run(&spec, problem.clone(), 1).expect("supported"));
    assert_eq!((of_long.loss, of_long.metrics), (of_short.loss, of_short.metrics));
    for t in 0..long.mask.ncols() {
        let expected = if t < end { of_short.gradient.row(0, t) } else { vec![0.0; 300] };
        assert_eq!(of_long.gradient.row(0, t), expected, "[0,{t}]");
    }
    JudgedProblem::new(&spec, &long).expect("a valid problem").expect_right(
        &native,
        1,
        "tokens behind the last sequence",
    );
}
