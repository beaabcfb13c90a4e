//! Checks of one operation: its counts, its attributes and the types of its operands and results.

use super::MosaicInterpretError;
use super::parse::{MosaicAttribute, MosaicOperation};
use super::value::{ArrayType, ElementKind, MemorySpace, MosaicType};

/// Result of a check, or the first mistake that it found.
pub(super) type Checked<T> = Result<T, MosaicInterpretError>;

/// Prefix of every dialect's name in the text that libtpu reads.
pub(super) const PREFIX: &str = "stable_mosaic.";

impl MosaicOperation {
    /// Returns the name without the prefix that every operation but the module carries.
    pub(super) fn short_name(&self) -> &str {
        self.name.strip_prefix(PREFIX).unwrap_or(&self.name)
    }

    pub(super) fn error(&self, problem: String) -> MosaicInterpretError {
        MosaicInterpretError::Operation { line: self.line, name: self.short_name().to_string(), problem }
    }

    pub(super) fn expect_name(&self, name: &str) -> Checked<()> {
        if self.name == name { Ok(()) } else { Err(self.error(format!("expected {name}, found {}", self.name))) }
    }

    pub(super) fn expect_counts(&self, operands: usize, results: usize, regions: usize) -> Checked<()> {
        for (what, found, expected) in [
            ("operands", self.operand_types.len(), operands),
            ("results", self.result_types.len(), results),
            ("regions", self.regions.len(), regions),
        ] {
            if found != expected {
                return Err(self.error(format!("{found} {what}, expected {expected}")));
            }
        }
        Ok(())
    }

    /// Checks that the operation has no attribute besides `known`: an unknown one may change its meaning.
    pub(super) fn expect_attributes(&self, known: &[&str]) -> Checked<()> {
        match self.attributes.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(self.error(format!("attribute {key} is not supported"))),
            None => Ok(()),
        }
    }

    pub(super) fn attribute(&self, key: &str) -> Checked<&MosaicAttribute> {
        self.attributes.get(key).ok_or_else(|| self.error(format!("attribute {key} is missing")))
    }

    /// Checks that attribute `key`, if it is present, is `expected`.
    pub(super) fn expect_default(&self, key: &str, expected: &MosaicAttribute) -> Checked<()> {
        match self.attributes.get(key) {
            Some(found) if found != expected => {
                Err(self.error(format!("attribute {key} is {found:?}; only {expected:?} is supported")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn whole(&self, key: &str) -> Checked<i64> {
        let number = match self.attribute(key)? {
            MosaicAttribute::Whole(number) => Some(*number),
            MosaicAttribute::Scalar(text, _) => text.parse().ok(),
            _ => None,
        };
        number.ok_or_else(|| self.error(format!("attribute {key} must be a whole number")))
    }

    /// Reads a count, which is 0 if the attribute is missing.
    pub(super) fn count(&self, key: &str) -> Checked<usize> {
        if !self.attributes.contains_key(key) {
            return Ok(0);
        }
        usize::try_from(self.whole(key)?).map_err(|_| self.error(format!("attribute {key} must not be negative")))
    }

    pub(super) fn places(&self, attribute: &MosaicAttribute, key: &str) -> Checked<Vec<usize>> {
        let numbers: Option<Vec<i64>> = match attribute {
            MosaicAttribute::Array(numbers) => Some(numbers.clone()),
            MosaicAttribute::List(items) => {
                items.iter().map(|item| if let MosaicAttribute::Whole(x) = item { Some(*x) } else { None }).collect()
            }
            _ => None,
        };
        let places = numbers.and_then(|numbers| numbers.into_iter().map(|x| usize::try_from(x).ok()).collect());
        places.ok_or_else(|| self.error(format!("attribute {key} must be a list of whole numbers from 0 on")))
    }

    pub(super) fn extents(&self, attribute: &MosaicAttribute, key: &str) -> Checked<Vec<usize>> {
        let extents = self.places(attribute, key)?;
        if extents.contains(&0) { Err(self.error(format!("an extent of 0 in {key}"))) } else { Ok(extents) }
    }

    pub(super) fn memory(&self, ty: &MosaicType, expected: Option<MemorySpace>) -> Checked<ArrayType> {
        match ty {
            MosaicType::MemRef(shaped, space) if expected.is_none_or(|expected| expected == *space) => {
                Ok(shaped.clone())
            }
            _ => Err(self.error(format!("a parameter of type {ty}, expected a memref in its memory"))),
        }
    }

    /// Returns the type of operand `i`, which must be a scalar or a vector.
    pub(super) fn operand(&self, i: usize) -> Checked<&ArrayType> {
        match &self.operand_types[i] {
            MosaicType::Data(shaped) => Ok(shaped),
            memory @ MosaicType::MemRef(..) => {
                Err(self.error(format!("operand {i} is {memory}, expected a scalar or a vector")))
            }
        }
    }

    /// Returns the type of the only result.
    pub(super) fn result(&self) -> Checked<&ArrayType> {
        match &self.result_types[..] {
            [MosaicType::Data(shaped)] => Ok(shaped),
            _ => Err(self.error("expected one result, a scalar or a vector".to_string())),
        }
    }

    /// Checks that there are `count` operands of the result's type, and returns that type.
    pub(super) fn uniform(&self, count: usize) -> Checked<&ArrayType> {
        self.expect_counts(count, 1, 0)?;
        let result = self.result()?;
        for i in 0..count {
            self.expect_operand(i, result)?;
        }
        Ok(result)
    }

    pub(super) fn expect_operand(&self, i: usize, expected: &ArrayType) -> Checked<()> {
        let found = &self.operand_types[i];
        match found {
            MosaicType::Data(shaped) if shaped == expected => Ok(()),
            _ => Err(self.error(format!("operand {i} is {found}, expected {expected}"))),
        }
    }

    pub(super) fn expect_result(&self, expected: &ArrayType) -> Checked<()> {
        let found = self.result()?;
        if found == expected { Ok(()) } else { Err(self.error(format!("the result is {found}, expected {expected}"))) }
    }

    pub(super) fn expect_kind(&self, kind: ElementKind, right: bool, what: &str) -> Checked<()> {
        if right { Ok(()) } else { Err(self.error(format!("elements of {kind}, expected {what}"))) }
    }
}
