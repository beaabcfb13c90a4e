//! Programs of which the text is changed before it is compiled.

use assay::implementation::{ProblemFormat, Unsupported, Workload};
use assay::problem::Dtype;
use assay::programs::{Device, Programs, Sharding, StructuredSpec};
use assay::spec::LossSpec;

/// A program that does something else.
#[derive(Clone, Copy)]
pub(super) struct Rewritten<P> {
    pub(super) program: P,
    pub(super) rewrite: Rewrite,
}

/// What.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rewrite {
    /// Output `.0` is combined, by operation `.1`, with the device's number.
    Output(usize, &'static str),
    /// In lines with `.0` every `.1` is `.2`.
    Lines(&'static str, &'static str, &'static str),
}

impl Rewrite {
    fn of(self, text: &str) -> String {
        match self {
            Rewrite::Output(place, operation) => with_number(text, place, operation),
            Rewrite::Lines(within, from, to) => {
                let changed = |line: &str| if line.contains(within) { line.replace(from, to) } else { line.into() };
                let rewritten: Vec<String> = text.lines().map(changed).collect();
                let rewritten = rewritten.join("\n");
                assert_ne!(rewritten, text.trim_end(), "no {from} in a line with {within}");
                rewritten
            }
        }
    }
}

fn with_number(text: &str, place: usize, operation: &str) -> String {
    // The last line but the brackets: `return %a, … : tensor<…>, …`.
    let (body, returned) = text.rsplit_once("    return ").expect("a program returns");
    let (returned, end) = returned.split_once('\n').expect("brackets follow");
    let (names, types) = returned.split_once(" : ").expect("types follow the names");
    let mut names: Vec<&str> = names.split(", ").collect();
    let name = std::mem::replace(&mut names[place], "%wrong");
    let ty = types.split(", ").nth(place).expect("a type each");
    let element = ty.trim_end_matches('>').rsplit('x').next().expect("an element type");
    let scalar = format!("tensor<{}>", element.trim_start_matches("tensor<"));
    let wrong = format!(
        "    %replica = stablehlo.replica_id : tensor<ui32>\n    %number = stablehlo.convert %replica : (tensor<ui32>) -> {scalar}\n    \
         %numbers = stablehlo.broadcast_in_dim %number, dims = [] : ({scalar}) -> {ty}\n    \
         %wrong = stablehlo.{operation} {name}, %numbers : {ty}\n"
    );
    format!("{body}{wrong}    return {} : {types}\n{end}", names.join(", "))
}

impl<P: Programs> Programs for Rewritten<P> {
    type Problem = P::Problem;

    fn all() -> Vec<Self> {
        Vec::new()
    }

    fn id(self) -> &'static str {
        self.program.id()
    }

    fn summary(self) -> &'static str {
        self.program.summary()
    }

    fn class(self) -> &'static str {
        self.program.class()
    }

    fn sharding(self) -> Sharding {
        self.program.sharding()
    }

    fn scatters(self) -> bool {
        self.program.scatters()
    }

    fn supports(
        self,
        spec: &LossSpec,
        shape: <P::Problem as Workload>::Shape,
        dtype: Dtype,
        devices: usize,
    ) -> Result<(), Unsupported> {
        self.program.supports(spec, shape, dtype, devices)
    }

    fn has_kernels(self) -> bool {
        self.program.has_kernels()
    }

    fn text(
        self,
        loss: StructuredSpec,
        given: ProblemFormat<P::Problem>,
        devices: usize,
        device: Device,
    ) -> Result<String, Unsupported> {
        Ok(self.rewrite.of(&self.program.text(loss, given, devices, device)?))
    }
}
