//! The manifest of an exported program, and the checks that it passes.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::ExportedError;
use assay_core::device_dtype::DeviceDtype;
use assay_core::files::read_regular;
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::{AdvantageLevel, LossSpec, OldLogp, Temperature};
use assay_core::text::ShownPath;

/// The largest manifest, in bytes; a larger file is something else.
const LONGEST_MANIFEST: u64 = 1 << 20;
/// The largest program, with room for constants. A loss has no weights.
const LONGEST_PROGRAM: u64 = 64 << 20;

/// The first bytes of MLIR bytecode.
const BYTECODE: &[u8] = b"ML\xefR";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExportManifest {
    program: PathBuf,
    /// Extents `[B, T, V]` of the logits.
    shape: [usize; 3],
    /// The number of sequences packed into the one row; `None` if each row is one sequence.
    pub(super) sequences: Option<usize>,
    #[serde(default = "one_device")]
    pub(super) devices: usize,
    #[serde(default)]
    pub(super) devices_are: DevicesAre,
    #[serde(default)]
    pub(super) spec: LossSpec,
    #[serde(rename = "input")]
    pub(super) inputs: Vec<ExportInput>,
    #[serde(rename = "output")]
    pub(super) outputs: Vec<ExportOutput>,
}

fn one_device() -> usize {
    1
}

/// The way in which a program for several devices counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DevicesAre {
    /// The program is over whole arrays, and XLA partitions it: the form that `jax.export` writes.
    #[default]
    Partitions,
    /// Every device runs the program, which contains collectives.
    Replicas,
}

/// One of the axes of `[B,T,V]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum ExportAxis {
    B,
    T,
    V,
}

impl ExportAxis {
    const ALL: [ExportAxis; 3] = [ExportAxis::B, ExportAxis::T, ExportAxis::V];

    /// Returns the index of the axis among the `axes` of an array that has it.
    pub(super) fn position(self, axes: &[ExportAxis]) -> usize {
        axes.iter().position(|&axis| axis == self).expect("checked: the array has the axis")
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExportInput {
    pub(super) name: ExportInputName,
    pub(super) dtype: DeviceDtype,
    /// The axis along which each device has a part; `None` if every device has the whole array.
    pub(super) cut: Option<ExportAxis>,
}

/// Declares an enum of names, with the list of its variants and the name that a manifest has for each.
macro_rules! names {
    ($(#[$doc:meta])* $names:ident: $($variant:ident $name:literal,)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
        pub(super) enum $names {
            $(#[serde(rename = $name)] $variant,)*
        }

        impl $names {
            const ALL: &[Self] = &[$(Self::$variant,)*];

            pub(super) fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

names! {
    /// An array that a program may be given.
    ExportInputName:
    Logits "logits",
    Ids "ids",
    Mask "mask",
    Advantages "advantages",
    OldLogp "old_logp",
    RefLogp "ref_logp",
    RolloutLogp "rollout_logp",
    RolloutWeights "rollout_weights",
    TokenWeights "token_weights",
    Selected "selected",
    Bias "bias",
    Temperature "temperature",
    CuSeqlens "cu_seqlens",
    SegmentIds "segment_ids",
}

names! {
    /// An array that a program may return.
    ExportOutputName:
    Loss "loss",
    Dlogits "dlogits",
    Logp "logp",
    Entropy "entropy",
    TokenLoss "token_loss",
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExportOutput {
    pub(super) name: ExportOutputName,
    pub(super) dtype: Dtype,
    /// The axis along which each device has a part; `None` if every device has the whole array.
    pub(super) cut: Option<ExportAxis>,
}

impl ExportOutputName {
    /// Returns the axes of `[B,T,V]` that the output has.
    pub(super) fn axes(self) -> &'static [ExportAxis] {
        match self {
            ExportOutputName::Loss => &[],
            ExportOutputName::Dlogits => &ExportAxis::ALL,
            ExportOutputName::Logp | ExportOutputName::Entropy | ExportOutputName::TokenLoss => &ExportAxis::ALL[..2],
        }
    }
}

impl ExportManifest {
    /// Reads and checks the manifest at `path`.
    pub(super) fn read(path: &Path) -> Result<Self, ExportedError> {
        let bytes = read(path, LONGEST_MANIFEST)?;
        let text = str::from_utf8(&bytes)
            .map_err(|_| ExportedError::invalid(path, "text", "bytes that are no UTF-8", "TOML"))?;
        let manifest: ExportManifest = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start].matches('\n').count());
            let within = text.lines().nth(line).unwrap_or_default().trim();
            ExportedError::program(
                format!("{}: line {}", ShownPath(&path), line + 1),
                format!("{}, in `{within}`", error.message()),
            )
        })?;
        manifest.check(path)?;
        Ok(manifest)
    }

    pub(super) fn shape(&self) -> Shape {
        let [batch, tokens, vocab] = self.shape;
        Shape { batch, tokens, vocab }
    }

    /// Returns the program's file; its path is relative to the manifest's folder.
    pub(super) fn program(&self, path: &Path) -> PathBuf {
        path.parent().unwrap_or(Path::new("")).join(&self.program)
    }

    pub(super) fn logits_dtype(&self) -> DeviceDtype {
        let logits = self.inputs.iter().find(|input| input.name == ExportInputName::Logits);
        logits.expect("checked: every manifest has logits").dtype
    }

    fn check(&self, path: &Path) -> Result<(), ExportedError> {
        let invalid = |field: &str, given: &dyn ToString, expected: &str| {
            Err(ExportedError::invalid(path, field, given.to_string(), expected))
        };
        // First the numbers that everything else depends on.
        match self.shape().elements() {
            Some(1..) => {}
            Some(0) => return invalid("shape", &format!("{:?}", self.shape), "[B,T,V] with B, T, V ≥ 1"),
            None => return invalid("shape", &format!("{:?}", self.shape), "[B,T,V] with a product that fits 63 bits"),
        }
        if self.devices == 0 {
            return invalid("devices", &self.devices, "at least 1");
        }
        if self.sequences.is_some_and(|sequences| sequences == 0 || self.shape().batch != 1) {
            let given = format!("{} in {} rows", self.sequences.unwrap_or(0), self.shape().batch);
            return invalid("sequences", &given, "at least 1, packed into one row: a `shape` of [1, N, V]");
        }
        // Then the loss, and the parts of a spec that no exported program can be given.
        self.spec.check().map_err(|error| ExportedError::program(ShownPath(&path), error))?;
        if let (Some(_), Err(field)) = (self.sequences, self.spec.expect_no_width()) {
            let expected = "a number ≥ 1, since packed sequences have no padded width";
            return invalid(&format!("spec.{field}"), &"none", expected);
        }
        if self.spec.dentropy {
            return invalid("spec.dentropy", &true, "false: programs are given no cotangent of the entropy");
        }
        if self.spec.reads_kept_ids() {
            return invalid("spec.support.kept", &"given", "none: programs are given no kept sets");
        }
        if self.spec.ids_per_token > 1 {
            return invalid("spec.ids_per_token", &self.spec.ids_per_token, "1: programs are given one id a token");
        }
        // Each input once, in a dtype that it can have.
        for (i, input) in self.inputs.iter().enumerate() {
            let name = input.name.name();
            if self.inputs[..i].iter().any(|other| other.name == input.name) {
                return invalid("input", &format!("`{name}` twice"), "each name once");
            }
            if let Err(expected) = self.accepts(*input) {
                return invalid(&format!("input `{name}`: dtype"), &input.dtype, expected);
            }
        }
        // Each cut along an axis that the array has and that the devices divide evenly.
        let cuts = self.inputs.iter().map(|input| ("input", input.name.name(), input.cut, self.axes(input.name)));
        let of_outputs =
            self.outputs.iter().map(|output| ("output", output.name.name(), output.cut, output.name.axes()));
        for (kind, name, cut, axes) in cuts.chain(of_outputs) {
            let Some(cut) = cut else { continue };
            let field = format!("{kind} `{name}`: cut");
            if !axes.contains(&cut) {
                return invalid(&field, &format!("{cut:?}"), "an axis that it has");
            }
            let extent = self.shape[cut as usize];
            if !extent.is_multiple_of(self.devices) {
                let expected = format!("an axis that {} devices cut in equal parts", self.devices);
                return invalid(&field, &format!("{cut:?} of {extent}"), &expected);
            }
        }
        for &name in ExportOutputName::ALL {
            if self.outputs.iter().filter(|output| output.name == name).count() > 1 {
                return invalid("output", &format!("`{}` twice", name.name()), "each name once");
            }
        }
        // Exactly the inputs that the spec reads.
        for &name in ExportInputName::ALL {
            let listed = self.inputs.iter().any(|input| input.name == name);
            if let Err(expected) = self.expects(name, listed) {
                let given = format!("{} `{}`", if listed { "an" } else { "no" }, name.name());
                return invalid("input", &given, expected);
            }
        }
        for name in [ExportOutputName::Loss, ExportOutputName::Dlogits] {
            if !self.outputs.iter().any(|output| output.name == name) {
                return invalid("output", &format!("no `{}`", name.name()), "at least `loss` and `dlogits`");
            }
        }
        Ok(())
    }

    /// Returns the axes of `[B,T,V]` that an input has.
    pub(super) fn axes(&self, name: ExportInputName) -> &'static [ExportAxis] {
        match name {
            ExportInputName::Logits => &ExportAxis::ALL,
            ExportInputName::CuSeqlens => &[],
            ExportInputName::Advantages if self.spec.advantages == AdvantageLevel::Sequence => {
                if self.sequences.is_some() { &[] } else { &ExportAxis::ALL[..1] }
            }
            ExportInputName::Bias => &ExportAxis::ALL[2..],
            _ => &ExportAxis::ALL[..2],
        }
    }

    /// Checks that a program may take this input in this dtype; the error is the expectation.
    fn accepts(&self, input: ExportInput) -> Result<(), &'static str> {
        match input.name {
            ExportInputName::Mask | ExportInputName::Selected => Ok(()),
            ExportInputName::Ids => match input.dtype {
                // An i32 must hold every id below V.
                DeviceDtype::I32 if i32::try_from(self.shape().vocab).is_err() => Err("i64, as V is beyond i32"),
                DeviceDtype::I32 | DeviceDtype::I64 => Ok(()),
                _ => Err("i32 or i64"),
            },
            ExportInputName::CuSeqlens | ExportInputName::SegmentIds => match input.dtype {
                DeviceDtype::I32 if i32::try_from(self.shape().tokens).is_err() => Err("i64, as N is beyond i32"),
                DeviceDtype::I32 | DeviceDtype::I64 => Ok(()),
                _ => Err("i32 or i64"),
            },
            _ if input.dtype.is_float() => Ok(()),
            _ => Err("f64, f32, bf16 or f16"),
        }
    }

    /// Checks that an input is listed if the spec reads it, and left out if not; the error is the expectation. A program without a mask is
    /// for batches in which every token counts.
    fn expects(&self, name: ExportInputName, listed: bool) -> Result<(), &'static str> {
        use ExportInputName as Name;
        let spec = &self.spec;
        // Whether the spec reads the input, the expectation if it does and the input is missing, and if it does not and it is there.
        let (is_read, one, none) = match name {
            Name::Mask => return Ok(()),
            Name::Logits | Name::Ids | Name::Advantages => (true, "at least `logits`, `ids` and `advantages`", ""),
            Name::CuSeqlens | Name::SegmentIds => {
                let packed = self.sequences.is_some();
                // One of the two is enough.
                let other = self.inputs.iter().any(|input| input.name == Name::SegmentIds);
                if packed && !listed && (other || name == Name::SegmentIds) {
                    return Ok(());
                }
                let one = "it or `segment_ids`, as the manifest has `sequences`";
                (packed, one, "none, as the manifest has no `sequences`, which are packed into one row")
            }
            Name::OldLogp => {
                let one = "one, as the spec has `old_logp: given`, or compares it with another";
                let none = match spec.old_logp {
                    OldLogp::Current => "none, as the spec has `old_logp: current`",
                    _ => "none, as the spec has `old_logp: rollout`",
                };
                (spec.reads_old_logp(), one, none)
            }
            Name::RefLogp => {
                (spec.kl.is_some(), "one, as the spec has a `kl` term", "none, as the spec has no `kl` term")
            }
            Name::RolloutLogp => {
                (spec.reads_rollout_logp(), "one, as the spec reads it", "none, as the spec does not read it")
            }
            Name::RolloutWeights => (
                spec.reads_rollout_weights(),
                "one, as the spec has `rollout.source: given`",
                "none, as the spec has no `rollout.source: given`",
            ),
            Name::TokenWeights => (
                spec.token_weights.is_some(),
                "one, as the spec has `token_weights`",
                "none, as the spec has no `token_weights`",
            ),
            Name::Selected => (
                spec.reads_selected(),
                "one, as the spec has an objective that reads it: TOPR by `selected`, or KL-Cov or Clip-Cov without `selection`",
                "none, as the spec has no objective that reads it: TOPR by `selected`, or KL-Cov or Clip-Cov without `selection`",
            ),
            Name::Bias => (
                spec.logits.bias,
                "one, as the spec has `logits.bias: true`",
                "none, as the spec has `logits.bias: false`",
            ),
            Name::Temperature => (
                spec.temperature == Temperature::Given,
                "one, as the spec has `temperature: given`",
                "none, as the spec has one `temperature` for all tokens",
            ),
        };
        match (is_read, listed) {
            (true, false) => Err(one),
            (false, true) => Err(none),
            _ => Ok(()),
        }
    }
}

/// Reads the program in the file at `path`.
pub(super) fn read_program(path: &Path) -> Result<Vec<u8>, ExportedError> {
    let code = read(path, LONGEST_PROGRAM)?;
    if code.starts_with(BYTECODE) || str::from_utf8(&code).is_ok_and(|text| !text.trim().is_empty()) {
        return Ok(code);
    }
    let expected = "StableHLO as MLIR text or bytecode, which jax.export gives as `mlir_module()` and \
        `mlir_module_serialized`; its `serialize()` wraps that in a format of its own";
    Err(ExportedError::invalid(path, "program", "neither MLIR text nor bytecode", expected))
}

/// Reads a whole file of at most `longest` bytes.
fn read(path: &Path, longest: u64) -> Result<Vec<u8>, ExportedError> {
    let io = |reason: std::io::Error| ExportedError::program(ShownPath(&path), format!("cannot read: {reason}"));
    read_regular(path, longest).map_err(io)
}
