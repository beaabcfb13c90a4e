//! The keys of a spec.

use assay::spec::{LogitsTransform, LossSpec};
use serde_json::json;

#[test]
fn the_transform_of_logits_is_read_under_both_names_and_written_under_one() {
    let read = |file| serde_json::from_value::<LossSpec>(file);
    let transform = json!({"scale": 0.5, "softcap": 30.0, "bias": true});
    let expected = LogitsTransform { scale: 0.5, softcap: Some(30.0), bias: true };
    for name in ["logits", "head"] {
        let spec = read(json!({ name: transform })).unwrap();
        assert_eq!(spec, LossSpec { logits: expected.clone(), ..LossSpec::default() }, "{name}");
        let written = serde_json::to_value(&spec).unwrap();
        assert_eq!((&written["logits"], written.get("head")), (&transform, None), "{name}");
    }
    let both = read(json!({"head": transform, "logits": transform})).unwrap_err();
    assert_eq!(both.to_string(), "duplicate field `logits (old key: head)`");
}
