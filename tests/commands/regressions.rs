//! The cases that once failed, each with its reason, through the command that a user replays them with.

use std::fs;

#[test]
fn regressions_stay_mended() {
    let mut seen = 0;
    for entry in fs::read_dir("fixtures/regressions").unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.starts_with("reason: "), "{} says why it is kept", path.display());
            assert_cmd::cargo::cargo_bin_cmd!("assay").args(["gradcheck", "--config"]).arg(&path).assert().success();
            seen += 1;
        }
    }
    assert!(seen > 0, "fixtures/regressions holds no case");
}
