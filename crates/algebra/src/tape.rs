//! A token's loss as a list of operations on `[B,T]` arrays. A framework evaluates the list; the writer of a kernel learns from it
//! which operations a sum over a sequence depends on.
//!
//! ```text
//! let tape = token_losses(structure, |tape, number| tape.constant(number.value_in(spec, extents)));
//! logp, arrays of the batch, weights ─▶ tape ─▶ the loss of each token, its metrics, ∂loss/∂logp
//! ```

use serde::{Serialize, Serializer};

use super::arithmetic::Arithmetic;
use super::objective::{TokenArray, TokenArrays, sequence_losses};
use super::structure::{SpecNumber, SpecNumbers, Structure, TokenInput};

/// An operation whose operands are results of earlier operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "each is the method of `Arithmetic` of that name")]
pub enum TapeOperator {
    Add,
    Sub,
    Mul,
    Div,
    Neg,
    Exp,
    ExpM1,
    Ln,
    #[serde(rename = "ln_1p")]
    Ln1P,
    Less,
    Equal,
    And,
    Or,
    Select,
    /// The sum over the unmasked tokens of each sequence, in the places of all its tokens.
    RowSum,
}

/// One entry of a [`Tape`].
#[derive(Clone, Debug, PartialEq)]
pub enum TapeOperation {
    /// The array of this name.
    Input(&'static str),
    /// A number that is written into the tape.
    Constant(f64),
    /// An operator, applied to the results of the operations at these places of the tape.
    Apply(TapeOperator, Vec<usize>),
}

impl Serialize for TapeOperation {
    /// Writes `[name, operands]`: of an input its own name, of a constant its text.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Input(name) => ("input", name).serialize(serializer),
            Self::Constant(number) => ("constant", number.to_string()).serialize(serializer),
            Self::Apply(operator, operands) => (operator, operands).serialize(serializer),
        }
    }
}

/// A list of operations; an [`Arithmetic`] whose values are their places in it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tape {
    operations: Vec<TapeOperation>,
    outputs: Vec<(&'static str, usize)>,
}

impl Tape {
    fn push(&mut self, operation: TapeOperation) -> usize {
        self.operations.push(operation);
        self.operations.len() - 1
    }

    fn apply<const N: usize>(&mut self, operator: TapeOperator, operands: [usize; N]) -> usize {
        self.push(TapeOperation::Apply(operator, operands.to_vec()))
    }

    /// Adds the array called `name`.
    pub fn input(&mut self, name: &'static str) -> usize {
        self.push(TapeOperation::Input(name))
    }

    /// Adds the sum of `value` over the unmasked tokens of each sequence, in the places of all its tokens.
    pub fn row_sum(&mut self, value: usize) -> usize {
        self.apply(TapeOperator::RowSum, [value])
    }

    /// Names `value` as a result.
    pub fn output(&mut self, name: &'static str, value: usize) {
        self.outputs.push((name, value));
    }

    /// All operations, in order: each comes after those that it reads.
    pub fn operations(&self) -> &[TapeOperation] {
        &self.operations
    }

    /// The place of the result called `name`.
    ///
    /// # Panics
    /// If the tape has no such result.
    pub fn place_of(&self, name: &str) -> usize {
        let found = self.outputs.iter().find(|(output, _)| *output == name);
        found.unwrap_or_else(|| panic!("a tape has no result called `{name}`")).1
    }
}

impl Arithmetic for Tape {
    type Value = usize;
    type Truth = usize;

    fn constant(&mut self, x: f64) -> usize {
        self.push(TapeOperation::Constant(x))
    }
    fn add(&mut self, a: usize, b: usize) -> usize {
        self.apply(TapeOperator::Add, [a, b])
    }
    fn sub(&mut self, a: usize, b: usize) -> usize {
        self.apply(TapeOperator::Sub, [a, b])
    }
    fn mul(&mut self, a: usize, b: usize) -> usize {
        self.apply(TapeOperator::Mul, [a, b])
    }
    fn div(&mut self, a: usize, b: usize) -> usize {
        self.apply(TapeOperator::Div, [a, b])
    }
    fn neg(&mut self, a: usize) -> usize {
        self.apply(TapeOperator::Neg, [a])
    }
    fn exp(&mut self, a: usize) -> usize {
        self.apply(TapeOperator::Exp, [a])
    }
    fn exp_m1(&mut self, a: usize) -> usize {
        self.apply(TapeOperator::ExpM1, [a])
    }
    fn ln(&mut self, a: usize) -> usize {
        self.apply(TapeOperator::Ln, [a])
    }
    fn ln_1p(&mut self, a: usize) -> usize {
        self.apply(TapeOperator::Ln1P, [a])
    }
    fn less(&mut self, a: usize, b: usize) -> usize {
        self.apply(TapeOperator::Less, [a, b])
    }
    fn equal(&mut self, a: usize, b: usize) -> usize {
        self.apply(TapeOperator::Equal, [a, b])
    }
    fn and(&mut self, a: usize, b: usize) -> usize {
        self.apply(TapeOperator::And, [a, b])
    }
    fn or(&mut self, a: usize, b: usize) -> usize {
        self.apply(TapeOperator::Or, [a, b])
    }
    fn select(&mut self, condition: usize, yes: usize, no: usize) -> usize {
        self.apply(TapeOperator::Select, [condition, yes, no])
    }
}

/// Writes down the losses of tokens, their metrics and their derivatives by logp, as [`sequence_losses`] has them. `number` gives
/// the place of each number of the spec.
pub fn token_losses(structure: Structure, mut number: impl FnMut(&mut Tape, SpecNumber) -> usize) -> Tape {
    let on = &mut Tape::default();
    // Inputs and numbers come first on the tape: operations name their places.
    let [logp, advantage, weight] = ["logp", "advantages", "weight"].map(|name| on.input(name));
    let inputs: Vec<(TokenInput, usize)> =
        structure.inputs().into_iter().map(|input| (input, on.input(input.name()))).collect();
    let numbers: Vec<(SpecNumber, usize)> =
        structure.numbers().into_iter().map(|which| (which, number(on, which))).collect();
    let arrays = TokenArrays::load(structure, |array| match array {
        TokenArray::Advantage => advantage,
        TokenArray::KlShare => on.input("kl_share"),
        TokenArray::Input(wanted) => {
            inputs.iter().find(|(input, _)| *input == wanted).expect("the structure reads it").1
        }
    });
    let token_count = |on: &mut Tape| on.input("row_count");
    let numbers = SpecNumbers::new(numbers);
    let (token, grad) = sequence_losses(on, structure, &numbers, [logp, weight], arrays, Tape::row_sum, token_count);
    // The results, by the names that evaluators ask for.
    on.output("token_loss", token.loss);
    on.output("reduced", token.reduced);
    on.output("ratio", token.ratio);
    let kl = token.kl.unwrap_or_else(|| on.constant(0.0));
    on.output("kl", kl);
    on.output("clipped_low", token.clipped_low);
    on.output("clipped_high", token.clipped_high);
    on.output("grad_logp", grad);
    std::mem::take(on)
}
