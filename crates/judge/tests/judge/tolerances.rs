//! `tolerances.toml`: a person's decisions, each with a reason, and what follows from them.

use assay_judge::gate::Output;
use assay_judge::tolerance::{Grade, Limits, ToleranceError, Tolerances};

fn text() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tolerances.toml")).unwrap()
}

#[test]
fn tolerances_file_is_read_in_a_minute() {
    assert!(text().lines().count() <= 60, "{} lines", text().lines().count());
    assert_eq!(&Tolerances::parse(&text()).unwrap(), Tolerances::builtin());
}

#[test]
fn tolerances_out_of_range_or_without_reason_are_refused() {
    let refused = |from: &str, to: &str| {
        assert!(text().contains(from), "{from}");
        Tolerances::parse(&text().replacen(from, to, 1)).unwrap_err().to_string()
    };
    let number =
        |field: &str, given: &str| format!("tolerances: `{field}`: got {given}, expected a finite number above 0");
    assert_eq!(refused("offset = 4", "offset = -1"), number("standard.offset", "-1"));
    assert_eq!(refused("deviations = 6", "deviations = nan"), number("sums.deviations", "NaN"));
    assert_eq!(refused("[class.native]\nlogp = 3", "[class.native]\nlogp = 0"), number("class.native.logp", "0"));
    assert_eq!(refused("kappa = 64", "kappa = inf"), number("recorded.kappa", "inf"));
    let why = refused("why = \"A gap rounded thrice, exp within 1 ulp; sums go on in f64.\"", "why = \"because\"");
    assert_eq!(why, "tolerances: `class.native.why`: expected a reason of four words or more, got `because`");
    assert!(refused("offset = 4", "offset = 4\nslack = 2").contains("slack"));
    assert!(refused("offset = 4", "").contains("offset"));
}

#[test]
fn limits_follow_from_class_and_grade() {
    let external = Limits::for_class("external").unwrap();
    assert_eq!((external.grade, Limits::for_class("native").unwrap().grade), (Grade::Standard, Grade::Exact));
    assert_eq!(Limits::for_class("external-lm-head").unwrap().grade, Grade::Standard);
    for (output, kappa) in [
        (Output::Logp, 19.0),
        (Output::TokenLoss, 19.0),
        (Output::Entropy, 27.0),
        (Output::Loss, 27.0),
        (Output::Dlogits, 35.0),
        (Output::Dhidden, 35.0),
        (Output::ClipLow, 0.0),
        (Output::Recorded, 64.0),
    ] {
        assert_eq!(external.kappa(output), kappa, "{output:?}");
        assert_eq!(external.at(Grade::Exact).kappa(output), kappa, "a grade changes scales, and no κ");
    }
    let unknown = Limits::for_class("cuda-lm-head").unwrap_err();
    assert!(matches!(&unknown, ToleranceError::Class { given, .. } if given.raw() == "cuda-lm-head"));
    assert_eq!(
        unknown.to_string(),
        "class: got `cuda-lm-head`, for which tolerances.toml has no limits; expected one of external, gpu, native, tile, xla"
    );
}
