//! The losses of published projects as [`LossSpec`]s, by the projects' own option names and defaults.
//!
//! ```
//! # use assay_core as assay;
//! use assay::spec::presets::{BatchInputs, Preset, PresetOptions, spec};
//!
//! let options = PresetOptions::from_pairs(&["loss_type=grpo", "epsilon_high=0.28"])?;
//! let resolved = spec(Preset::Trl, None, &options, &BatchInputs::default())?;
//! assert_eq!(resolved.spec.temperature.number(), Some(1.0));
//! # Ok::<(), assay::spec::presets::PresetError>(())
//! ```
//!
//! A preset reproduces what one version of a project computes, without its known defects: [`PresetLoss::notes`] names
//! them if the options would show them. An option that is not reproduced is an error that names it; one that has no effect on the
//! loss is listed in [`PresetLoss::without_effect`].

mod archer;
mod areal;
mod axolotl;
mod cross_entropy;
mod divergence;
mod fast_llm;
mod liger;
mod loss_type;
mod mllm_jax;
mod nemo;
mod openrlhf;
mod options;
mod prime_rl;
mod rl_kernel;
mod roll;
mod skyrl;
mod tinker;
mod torchtitan;
mod trinity;
mod trl;
mod tunix;
mod unsloth;
mod verl;

use std::fmt;
use std::str::FromStr;

pub use options::PresetOptions;
use options::{OptionReader, one_of};

use super::{
    AdvantageLevel, LossSpec, OldLogp, QuantilePrecision, RolloutLevel, RolloutSource, RolloutWeights, SpecError,
};
use crate::text::{ForeignLines, ForeignText};

/// A project whose losses are known here, at a fixed version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Preset {
    /// TRL, version 1.16.0, and its experimental trainers.
    Trl,
    /// verl, version 0.9.1, by policy loss.
    Verl,
    /// Tunix, version 0.1.7, on JAX.
    Tunix,
    /// Liger Kernel, version 0.8.5.
    Liger,
    /// MLLM-JAX, commit 04809656, on TPU.
    MllmJax,
    /// Unsloth Zoo, version 2026.10.9.
    Unsloth,
    /// SkyRL, version 0.3.0, by loss type.
    Skyrl,
    /// NeMo RL, commit 7ea279ab.
    Nemo,
    /// prime-rl, `main` after #3586 by loss type, and both losses of commit 559b4477.
    PrimeRl,
    /// OpenRLHF, version 0.11.2, `PolicyLoss`.
    OpenRlhf,
    /// ROLL, commit 8eb27cc2, both pipelines.
    Roll,
    /// Archer2.0, commit b08d963d, ASPO.
    Archer,
    /// `AReaL`, version 1.0.4, also decoupled.
    Areal,
    /// Trinity-RFT, version 0.6.0, by policy loss.
    Trinity,
    /// Tinker's API, SDK 0.38.0, by loss function.
    Tinker,
    /// Fast-LLM, commit 7d61a1ba, GRPO and GSPO.
    FastLlm,
    /// torchtitan, version 0.3.0, GRPO and DAPO.
    Torchtitan,
    /// Axolotl, version 0.19.0, both trainers.
    Axolotl,
    /// RL-Kernel, commit 202f0e30, its native and its Triton operator.
    RlKernel,
    /// Cross-entropy, as `PyTorch` 2.15 has it, with a z-loss and a softcap.
    CrossEntropy,
    /// A divergence from a teacher: TRL 1.16.0, Liger 0.8.5, `PyTorch`, optax and Tunix.
    Divergence,
}

impl Preset {
    /// The list of all projects.
    pub const ALL: [Self; 21] = [
        Self::Trl,
        Self::Verl,
        Self::Tunix,
        Self::Liger,
        Self::MllmJax,
        Self::Unsloth,
        Self::Skyrl,
        Self::Nemo,
        Self::PrimeRl,
        Self::OpenRlhf,
        Self::Roll,
        Self::Archer,
        Self::Areal,
        Self::Trinity,
        Self::Tinker,
        Self::FastLlm,
        Self::Torchtitan,
        Self::Axolotl,
        Self::RlKernel,
        Self::CrossEntropy,
        Self::Divergence,
    ];

    /// Returns the name on the command line, the functions, the usual one first, and the reader of options.
    const fn entry(self) -> (&'static str, &'static [&'static str], Resolve) {
        match self {
            Self::Trl => ("trl", trl::FUNCTIONS, trl::resolve),
            Self::Verl => ("verl", verl::FUNCTIONS, verl::resolve),
            Self::Tunix => ("tunix", tunix::FUNCTIONS, tunix::resolve),
            Self::Liger => ("liger", liger::FUNCTIONS, liger::resolve),
            Self::MllmJax => ("mllm-jax", mllm_jax::FUNCTIONS, mllm_jax::resolve),
            Self::Unsloth => ("unsloth", unsloth::FUNCTIONS, unsloth::resolve),
            Self::Skyrl => ("skyrl", skyrl::FUNCTIONS, skyrl::resolve),
            Self::Nemo => ("nemo", nemo::FUNCTIONS, nemo::resolve),
            Self::PrimeRl => ("prime-rl", prime_rl::FUNCTIONS, prime_rl::resolve),
            Self::OpenRlhf => ("openrlhf", openrlhf::FUNCTIONS, openrlhf::resolve),
            Self::Roll => ("roll", roll::FUNCTIONS, roll::resolve),
            Self::Archer => ("archer", archer::FUNCTIONS, archer::resolve),
            Self::Areal => ("areal", areal::FUNCTIONS, areal::resolve),
            Self::Trinity => ("trinity", trinity::FUNCTIONS, trinity::resolve),
            Self::Tinker => ("tinker", tinker::FUNCTIONS, tinker::resolve),
            Self::FastLlm => ("fast-llm", fast_llm::FUNCTIONS, fast_llm::resolve),
            Self::Torchtitan => ("torchtitan", torchtitan::FUNCTIONS, torchtitan::resolve),
            Self::Axolotl => ("axolotl", axolotl::FUNCTIONS, axolotl::resolve),
            Self::RlKernel => ("rl-kernel", rl_kernel::FUNCTIONS, rl_kernel::resolve),
            Self::CrossEntropy => ("cross-entropy", cross_entropy::FUNCTIONS, cross_entropy::resolve),
            Self::Divergence => ("divergence", divergence::FUNCTIONS, divergence::resolve),
        }
    }

    /// Returns the name on the command line and in recorded runs, such as `mllm-jax`.
    pub const fn name(self) -> &'static str {
        self.entry().0
    }

    /// Returns the release whose losses and defaults are reproduced, such as `1.16.0` or `commit 04809656`.
    pub const fn release(self) -> &'static str {
        match self {
            Self::Trl => "1.16.0",
            Self::Verl => "0.9.1",
            Self::Tunix => "0.1.7",
            Self::Liger => "0.8.5",
            Self::MllmJax => "commit 04809656",
            Self::Unsloth => "2026.10.9",
            Self::Skyrl | Self::Torchtitan => "0.3.0",
            Self::Nemo => "commit 7ea279ab",
            Self::PrimeRl => "main after #3586, and 559b4477",
            Self::OpenRlhf => "0.11.2",
            Self::Roll => "commit 8eb27cc2",
            Self::Archer => "commit b08d963d",
            Self::Areal => "1.0.4",
            Self::Trinity => "0.6.0",
            Self::Tinker => "0.38.0",
            Self::FastLlm => "commit 7d61a1ba",
            Self::Axolotl => "0.19.0",
            Self::RlKernel => "commit 202f0e30",
            Self::CrossEntropy => "of PyTorch 2.15",
            Self::Divergence => "of TRL 1.16.0",
        }
    }

    /// Returns the name with the release, such as `trl 1.16.0`.
    pub fn versioned(self) -> String {
        format!("{} {}", self.name(), self.release())
    }

    /// Lists all projects with their releases in one phrase, for help texts.
    pub fn catalogue() -> String {
        Self::ALL.map(Self::versioned).join(", ")
    }

    /// Returns the names of the project's functions that compute a loss, the usual one first.
    pub const fn functions(self) -> &'static [&'static str] {
        self.entry().1
    }

    /// Finds the function that `name` means: alone, without verl's `compute_policy_loss_`, or as a word of a longer
    /// path such as `trl.trainer.grpo_trainer.GRPOTrainer._compute_loss`.
    fn function(self, name: Option<&str>) -> Result<&'static str, PresetError> {
        let Some(name) = name else { return Ok(self.functions()[0]) };
        // A recorded run has the full path of the function, a user may leave out verl's long prefix.
        let words: Vec<&str> = name.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        let means = |function: &&str| {
            let short = function.strip_prefix(verl::POLICY_LOSS);
            words.contains(function) || short == Some(name)
        };
        self.functions().iter().copied().find(means).ok_or_else(|| PresetError::Function {
            preset: self,
            given: name.into(),
            expected: one_of(self.functions().iter().copied()).into(),
        })
    }
}

/// Preference losses by which somebody may ask for one. IPO is here the identity-preference loss; prime-rl's of the same name is an
/// option of its preset.
const PREFERENCES: [&str; 7] = ["bco", "cpo", "dpo", "ipo", "kto", "orpo", "simpo"];

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preset {
    type Err = PresetError;

    /// Parses the name of a project; hyphens and underscores are equivalent.
    fn from_str(name: &str) -> Result<Self, PresetError> {
        let wanted = name.replace('_', "-");
        if PREFERENCES.contains(&wanted.to_lowercase().as_str()) {
            return Err(PresetError::Preference { given: name.into() });
        }
        Self::ALL.into_iter().find(|preset| preset.name() == wanted).ok_or_else(|| PresetError::Preset {
            given: name.into(),
            expected: one_of(Self::ALL.iter().map(|preset| preset.name())).into(),
        })
    }
}

/// The optional inputs of a batch, by which projects choose the loss that they compute.
#[allow(clippy::struct_excessive_bools, reason = "each says whether one input is there")]
#[derive(Clone, Debug, PartialEq)]
pub struct BatchInputs {
    /// Whether the batch has log-probabilities of the old policy.
    pub old_logps: bool,
    /// Whether the batch has log-probabilities of the reference policy.
    pub ref_logps: bool,
    /// Whether the batch has log-probabilities that the sampler returned.
    pub sampling_logps: bool,
    /// The shape of ready-made importance weights against the sampler, if the batch has them.
    pub rollout_weights: Option<WeightShape>,
    /// Whether the batch has weights of tokens or sequences that the trainer gives.
    pub token_weights: bool,
    /// Whether the batch has the set of vocabulary entries that the sampler has kept for each token.
    pub kept_ids: bool,
    /// The number of tokens of the whole generation batch, if it is given.
    pub num_items_in_batch: Option<f64>,
    /// The shape of the advantages; `None` is the project's own.
    pub advantages: Option<AdvantageLevel>,
    /// Whether the project runs in float64, which shows where it rounds to float32 on its way.
    pub float64: bool,
}

impl Default for BatchInputs {
    /// Returns a batch with old and reference log-probabilities, and nothing else.
    fn default() -> Self {
        Self {
            old_logps: true,
            ref_logps: true,
            sampling_logps: false,
            rollout_weights: None,
            token_weights: false,
            kept_ids: false,
            num_items_in_batch: None,
            advantages: None,
            float64: false,
        }
    }
}

impl BatchInputs {
    fn advantages_or(&self, usual: AdvantageLevel) -> AdvantageLevel {
        self.advantages.unwrap_or(usual)
    }

    /// Returns the source of the ratio's denominator in projects that use the current policy for a missing old one.
    fn old_logp(&self) -> OldLogp {
        if self.old_logps { OldLogp::Given } else { OldLogp::Current }
    }
}

impl BatchInputs {
    /// Lists the inputs of the sampler that the batch has and `spec` does not read.
    fn unread_by(&self, spec: &LossSpec) -> Vec<String> {
        // The inputs of the sampler that any part of the spec reads.
        let source = spec.rollout.as_ref().map(|rollout| rollout.source);
        let reads_logps = source == Some(RolloutSource::Logp)
            || !spec.rejection.is_empty()
            || spec.old_logp == OldLogp::Rollout
            || spec.weighs_kl_by_rollout()
            || spec.off_policy_mask.is_some_and(|mask| mask.behaviour == OldLogp::Rollout);
        let weights = self.rollout_weights.is_some() && source != Some(RolloutSource::Given);
        let logps = self.sampling_logps && !reads_logps;
        let own = self.token_weights && spec.token_weights.is_none();
        let unread = [(weights, "importance weights"), (logps, "sampling logps"), (own, "token weights")];
        let unread = unread.into_iter().filter(|(unread, _)| *unread);
        unread.map(|(_, what)| format!("the batch's {what} have no part in the loss under these options")).collect()
    }

    /// Returns the precision of TRL's quantile of entropies: f32, whatever dtype it runs in.
    fn quantile_precision(&self) -> QuantilePrecision {
        if self.float64 { QuantilePrecision::F32Threshold } else { QuantilePrecision::F32 }
    }
}

/// The shape of an array of importance weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightShape {
    /// One weight per token, `[B,T]`.
    Token,
    /// One weight per sequence, `[B,1]`.
    Sequence,
    /// One weight per sequence as `[B]`, which some functions read as `[B,1]`.
    Flat,
}

/// Returns the source of the ratio's denominator in projects that divide by the sampler's log-probabilities: those, or
/// the old ones of a batch that calls them so.
fn sampler_or_old(given: &BatchInputs) -> OldLogp {
    if given.sampling_logps { OldLogp::Rollout } else { OldLogp::Given }
}

/// Returns the use of ready-made weights, unchanged.
fn ready_made() -> RolloutWeights {
    weights_from(RolloutSource::Given)
}

/// Returns weights per token on the policy term, without bounds.
fn weights_from(source: RolloutSource) -> RolloutWeights {
    RolloutWeights {
        source,
        level: RolloutLevel::default(),
        outside: super::OutOfBounds::default(),
        min: None,
        max: None,
        clamp: None,
        normalize: false,
        unscored: super::UnscoredWeight::default(),
        applies_to: super::LossTerms::default(),
    }
}

/// A project's loss, resolved to a spec.
#[derive(Clone, Debug, PartialEq)]
pub struct PresetLoss {
    /// The loss that the options define.
    pub spec: LossSpec,
    /// The name of the project's function that computes it.
    pub function: &'static str,
    /// The options that were given and have no effect on the loss.
    pub without_effect: Vec<String>,
    /// Notes about defects that are not reproduced, and differences at edges.
    pub notes: Vec<String>,
}

/// Options that do not define a [`LossSpec`], with the project, its function and the accepted values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PresetError {
    /// The project's name is unknown.
    #[error("preset: got `{given}`, expected {expected}")]
    Preset {
        /// The name that was given.
        given: ForeignText,
        /// The names that are known.
        expected: ForeignLines,
    },
    /// The name is that of a preference loss, which no project here has.
    #[error(
        "preset: got `{given}`, expected a loss of tokens: a preference loss is of the sums over a pair of sequences, and a problem \
         has no pairs; docs/support.md says what it would take"
    )]
    Preference {
        /// The name that was given.
        given: ForeignText,
    },
    /// The function's name is unknown.
    #[error("preset {}, function: got `{given}`, expected {expected}", preset.versioned())]
    Function {
        /// The project of the function.
        preset: Preset,
        /// The name that was given.
        given: ForeignText,
        /// The names that are known.
        expected: ForeignLines,
    },
    /// An option is not of the form `name=value`.
    #[error("option: got `{given}`, expected name=value")]
    NotAPair {
        /// The text that was given.
        given: ForeignText,
    },
    /// The options are not a JSON object.
    #[error("options: got {given}, expected an object of names and values")]
    NotAnObject {
        /// The value that was given.
        given: ForeignText,
    },
    /// An option is unknown to the function, or is not reproduced.
    #[error("preset {}, {function}: option `{option}` (given {given}) is not known, {expected}", preset.versioned())]
    Unknown {
        /// The project of the option.
        preset: Preset,
        /// The function of the option.
        function: &'static str,
        /// The name that was given.
        option: ForeignText,
        /// The value that was given.
        given: ForeignText,
        /// The nearest name, if one is near, and all accepted names.
        expected: ForeignLines,
    },
    /// The value of an option is invalid, or is not reproduced.
    #[error("preset {}, {function}: option `{option}`: got {given}, expected {expected}", preset.versioned())]
    Option {
        /// The project of the option.
        preset: Preset,
        /// The function of the option.
        function: &'static str,
        /// The name of the option.
        option: ForeignText,
        /// The value that was given.
        given: ForeignText,
        /// The values that would be accepted, in words.
        expected: ForeignLines,
    },
    /// An input of the batch is missing, or the function does not take it.
    #[error("preset {}, {function}: input `{input}`: got {given}, expected {expected}", preset.versioned())]
    Input {
        /// The project of the input.
        preset: Preset,
        /// The function of the input.
        function: &'static str,
        /// The name of the input.
        input: &'static str,
        /// The input that the batch has, in words.
        given: &'static str,
        /// The inputs that would be accepted, in words.
        expected: ForeignLines,
    },
    /// An option makes a number of the spec invalid.
    #[error("preset {}, {function}: {reason}", preset.versioned())]
    Spec {
        /// The project of the option.
        preset: Preset,
        /// The function of the option.
        function: &'static str,
        /// The field of the spec that is wrong.
        reason: SpecError,
    },
}

/// Resolves the loss that one project computes under `options`, when `function` runs on a batch with the inputs
/// `given`; `None` is the project's usual function.
///
/// # Errors
/// [`PresetError`] naming the option or input that is not reproduced.
pub fn spec(
    preset: Preset,
    function: Option<&str>,
    options: &PresetOptions,
    given: &BatchInputs,
) -> Result<PresetLoss, PresetError> {
    let function = preset.function(function)?;
    // Some projects' options may have a prefix.
    let prefix = match preset {
        Preset::Verl => Some("policy_loss."),
        Preset::Roll => Some(roll::ACTOR_TRAIN),
        Preset::Trinity => Some(trinity::ALGORITHM),
        Preset::Tinker => Some(tinker::CONFIG),
        Preset::Axolotl => Some(axolotl::TRL),
        _ => None,
    };
    let options = prefix.map_or(options.clone(), |prefix| options.without_prefix(prefix));
    let options = &options;
    let reader = OptionReader::new(preset, function, options);
    // The project's own reading, which also records the options that were read.
    let (_, _, resolve) = preset.entry();
    let ProjectLoss { mut spec, known, mut notes } = resolve(&reader, function, given)?;
    // A project that says nothing of kept sets has all of its loss over them.
    if given.kept_ids {
        spec.support.kept.get_or_insert_default();
    }
    // Options that nothing read are unknown, or have no effect on the loss.
    let without_effect = reader.finish(known)?;
    // Ranges are checked here, so that a preset cannot return an invalid spec.
    spec.check().map_err(|reason| PresetError::Spec { preset, function, reason })?;
    notes.extend(given.unread_by(&spec));
    Ok(PresetLoss { spec, function, without_effect, notes })
}

/// A project's reading of its options for one of its functions and the inputs of a batch.
type Resolve = fn(&OptionReader, &'static str, &BatchInputs) -> Result<ProjectLoss, PresetError>;

/// One project's reading of its options.
struct ProjectLoss {
    spec: LossSpec,
    /// The names of all options of the function, separated by white space: one that was given and not read has no
    /// effect.
    known: &'static str,
    notes: Vec<String>,
}

impl ProjectLoss {
    fn new(spec: LossSpec, known: &'static str) -> Self {
        Self { spec, known, notes: Vec::new() }
    }
}
