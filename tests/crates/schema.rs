//! What is written as JSON and read again.

use std::collections::BTreeMap;

use assay::schema::bench::{BenchFigures, Ratios};
use serde_json::{Value, json};

/// What the page cannot do without, and what a stranger may put beside it.
fn least() -> Value {
    json!({"command": "assay bench", "impl": "native", "devices": 1, "shape": [1, 4, 65], "dtype": "bf16", "steps": 3,
           "first_call_s": 0.5, "step_s_p50": 0.25, "step_s_p90": 0.25, "step_s_min": 0.25, "step_s_max": 1,
           "threads": 2, "nobody": {"knows": [1, null]}, "ratio_to_copy": 2, "ratio_to_gemm": "none"})
}

#[test]
fn schema_ratios_have_their_keys_and_the_rest_is_passed_over() {
    let read: BenchFigures = serde_json::from_value(least()).unwrap();
    assert_eq!(read.ratios, Ratios(BTreeMap::from([("copy".into(), 2.0)])));
    assert_eq!((read.step_s_max, read.isa.as_deref(), read.warmup), (1.0, None, 0));
    assert!(read.avg_step_ms.is_nan());
    let written = serde_json::to_value(&read).unwrap();
    assert_eq!((&written["ratio_to_copy"], &written["isa"]), (&json!(2.0), &Value::Null));
    assert!(written.get("gb_per_s").is_none() && written.get("layout").is_none() && written.get("nobody").is_none());
}

#[test]
fn schema_field_that_is_missing_is_named() {
    let mut lacking = least();
    lacking.as_object_mut().unwrap().remove("step_s_p90");
    let error = serde_json::from_value::<BenchFigures>(lacking).unwrap_err();
    assert_eq!(error.to_string(), "missing field `step_s_p90`");
}
