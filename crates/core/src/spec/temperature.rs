//! The softmax temperature: one, or those that come with the batch.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Softmax temperature `T > 0`, dimensionless. In a file it is a number, or `given`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Temperature {
    /// One for all tokens.
    Number(f64),
    /// The problem's `temperature`, one a sequence or one a token: verl's per-sequence temperatures, prime-rl's `temperatures`.
    Given,
}

impl Temperature {
    /// That of a softmax of the logits as they are.
    pub const ONE: Self = Self::Number(1.0);

    /// The one for all tokens, if it is one.
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
        deserializer.deserialize_any(NumberOrGiven)
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

/// What the temperature divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemperatureDivides {
    /// `logp = log_softmax(logits / T)[id]`: every published project but one.
    Logits,
    /// `logp = log_softmax(logits)[id] / T`, while entropy keeps `softmax(logits / T)`: MLLM-JAX.
    Logp,
}
