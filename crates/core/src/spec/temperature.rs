//! The softmax temperature: one number, or the temperatures that come with the batch.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The softmax temperature `T > 0`, dimensionless: a number, or `given` in a file.
///
/// ```
/// # use assay_core as assay;
/// use assay::spec::{LossSpec, Temperature};
///
/// let cool = LossSpec { temperature: 0.7.into(), ..LossSpec::default() };
/// assert_eq!(cool.temperature.number(), Some(0.7));
/// let per_token = LossSpec { temperature: Temperature::Given, ..LossSpec::default() };
/// assert_eq!(per_token.temperature.number(), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Temperature {
    /// One temperature for all tokens.
    Number(f64),
    /// The problem's `temperature`, one per sequence or one per token: verl's per-sequence temperatures, prime-rl's
    /// `temperatures`.
    Given,
}

impl Temperature {
    /// The temperature 1: a softmax of the logits as they are.
    pub const ONE: Self = Self::Number(1.0);

    /// Returns the temperature of all tokens; `None` if it comes with the batch.
    pub fn number(self) -> Option<f64> {
        match self {
            Self::Number(temperature) => Some(temperature),
            Self::Given => None,
        }
    }
}

impl From<f64> for Temperature {
    fn from(temperature: f64) -> Self {
        Self::Number(temperature)
    }
}

impl Serialize for Temperature {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(temperature) => serializer.serialize_f64(*temperature),
            Self::Given => serializer.serialize_str("given"),
        }
    }
}

impl<'de> Deserialize<'de> for Temperature {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A number or a word: only self-describing formats, such as YAML and JSON, have specs.
        deserializer.deserialize_any(NumberOrGiven)
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Temperature {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Temperature".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "The softmax temperature `T > 0`, dimensionless: a number, or `given`.",
            "oneOf": [
                {"description": "One temperature for all tokens.", "type": "number", "exclusiveMinimum": 0},
                {"description": "The problem's `temperature`, one per sequence or one per token.", "const": "given"},
            ],
        })
    }
}

struct NumberOrGiven;

impl de::Visitor<'_> for NumberOrGiven {
    type Value = Temperature;

    fn expecting(&self, to: &mut fmt::Formatter) -> fmt::Result {
        to.write_str("a number > 0 or `given`")
    }

    fn visit_f64<E: de::Error>(self, temperature: f64) -> Result<Temperature, E> {
        Ok(Temperature::Number(temperature))
    }

    fn visit_u64<E: de::Error>(self, temperature: u64) -> Result<Temperature, E> {
        Ok(Temperature::Number(temperature as f64))
    }

    fn visit_i64<E: de::Error>(self, temperature: i64) -> Result<Temperature, E> {
        Ok(Temperature::Number(temperature as f64))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Temperature, E> {
        if text == "given" { Ok(Temperature::Given) } else { Err(E::invalid_value(de::Unexpected::Str(text), &self)) }
    }
}

/// The value that the temperature divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TemperatureDivides {
    /// The logits, `logp = log_softmax(logits / T)[id]`, as in every published project but one.
    Logits,
    /// The log-probability, `logp = log_softmax(logits)[id] / T`, while the entropy is of `softmax(logits / T)`:
    /// MLLM-JAX.
    Logp,
}
