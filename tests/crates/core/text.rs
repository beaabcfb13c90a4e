//! Names that are nearly right.

use assay::text::nearest;

#[test]
fn names_nearest_is_found_and_a_stranger_has_none() {
    let names = ["beta", "epsilon", "epsilon_high", "loss_type"];
    for (given, expected) in [
        ("bta", Some("beta")),
        ("ebta", Some("beta")),
        ("epsilon_hgih", Some("epsilon_high")),
        ("epsilonn", Some("epsilon")),
        ("losstype", Some("loss_type")),
        ("temperature", None),
        ("", None),
    ] {
        assert_eq!(nearest(given, names), expected, "{given}");
    }
}
