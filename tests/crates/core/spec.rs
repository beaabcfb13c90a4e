//! Old and new keys of a spec file.

use assay::spec::LossSpec;
use serde_json::{Value, json};

#[test]
fn spec_old_key_is_read_and_new_key_is_written() {
    let transform = json!({"scale": 0.5, "softcap": 30.0, "bias": true});
    let plain = serde_json::to_value(LossSpec::default()).unwrap();
    for ((old, new), value, default) in
        [(LossSpec::OLD_KEYS[0], transform, Some(&plain["logits"])), (LossSpec::OLD_KEYS[1], json!(3), None)]
    {
        let read = |fields: Value| serde_json::from_value::<LossSpec>(fields);
        for name in [new, old] {
            let written = serde_json::to_value(read(json!({ name: value })).unwrap()).unwrap();
            let mut expected = plain.clone();
            expected[new] = value.clone();
            assert_eq!(written, expected, "{name}");
        }
        assert_eq!(plain.get(new), default, "{new}");
        let both = read(json!({ old: value, new: value })).unwrap_err();
        assert_eq!(both.to_string(), format!("duplicate field `{new} (old key: {old})`"));
    }
}
