//! Kinds of bugs: the part of a kernel that a mutant gets wrong.

use assay_core::spec::{Kl, KlGradient, KlImportance, LogitsTransform, LossSpec, Objective, OffPolicyMask, OldLogp};

macro_rules! kinds {
    ($($kind:ident = $name:literal, $title:literal;)*) => {
        /// The part of a kernel that a mutant gets wrong. Each kind has a property of its own that targets it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum MutantKind {
            $(#[doc = $title] $kind,)*
        }

        impl MutantKind {
            /// Every kind, in the order of tables.
            pub const ALL: [MutantKind; [$($name),*].len()] = [$(MutantKind::$kind),*];

            /// The kind's name in tables and JSON.
            pub fn name(self) -> &'static str {
                match self {
                    $(MutantKind::$kind => $name,)*
                }
            }

            /// The kind's heading in tables.
            pub fn title(self) -> &'static str {
                match self {
                    $(MutantKind::$kind => $title,)*
                }
            }
        }
    };
}

kinds! {
    Columns = "columns", "Columns: tiles of the vocabulary, and the tail";
    Sizes = "sizes", "Sizes: tiles, blocks and grids that few batches show";
    Maximum = "maximum", "Maximum";
    Holes = "holes", "Holes: columns of probability 0";
    Precision = "precision", "Precision";
    Gradient = "gradient", "Gradient";
    Temperature = "temperature", "Temperature";
    Logits = "logits", "Logits that are changed before the softmax";
    Support = "support", "Support: columns that are left out";
    Clip = "clip", "Clip";
    LogClip = "log_clip", "Log-ratios that are held: clip and cap";
    Topr = "topr", "TOPR";
    Aspo = "aspo", "ASPO";
    CrossEntropy = "cross_entropy", "Cross-entropy: label smoothing and z-loss";
    Overflow = "overflow", "Overflow: ratios beyond f32";
    Kl = "kl", "KL penalty";
    KlWeight = "kl_weight", "KL penalty: what weighs it, and whose gradient it has";
    KlClamp = "kl_clamp", "KL penalty: its clamps, and a mean of its own";
    OffPolicy = "off_policy", "Off-policy mask";
    Sampler = "sampler", "The sampler's policy for the old one";
    Rollout = "rollout", "Weights against the sampler's policy";
    Rejection = "rejection", "Rejections";
    TokenWeights = "token_weights", "Weights of tokens";
    Entropy = "entropy", "Entropy";
    TopEntropy = "top_entropy", "Tokens of the highest entropy";
    Several = "several_ids", "Logp of several ids";
    Distillation = "distillation", "Divergences from a teacher";
    Mask = "mask", "Mask";
    Reduction = "reduction", "Reduction";
    SequenceRatio = "sequence_ratio", "Ratios of sequences";
    Packing = "packing", "Packed sequences";
    Indexing = "indexing", "Indexing";
    Devices = "devices", "Devices";
    State = "state", "State: what is left over";
    HeadChunks = "head_chunks", "LM head: chunks of tokens";
    HeadProducts = "head_products", "LM head: products";
    HeadDevices = "head_devices", "LM head: devices";
}

impl MutantKind {
    /// Whether the kind belongs to the LM head's path, which a kernel on logits does not have.
    pub fn is_of_heads(self) -> bool {
        matches!(self, MutantKind::HeadChunks | MutantKind::HeadProducts | MutantKind::HeadDevices)
    }

    /// Whether a spec, and a batch that is `packed` or not, use the feature that the kind is about. Otherwise its mutants have the bits
    /// of the correct kernel.
    pub fn is_reached(self, spec: &LossSpec, packed: bool) -> bool {
        let weighs = |kl: &Kl| kl.importance != KlImportance::One || kl.gradient != KlGradient::Own;
        let bounds = |kl: &Kl| kl.difference_clamp.is_some() || kl.value_clamp.is_some() || kl.averaging.is_some();
        let compares_with_sampler = |mask: OffPolicyMask| mask.behaviour == OldLogp::Rollout;
        match self {
            MutantKind::Logits => spec.logits != LogitsTransform::default(),
            MutantKind::Support => !spec.support.is_whole(),
            MutantKind::Topr => matches!(spec.objective, Objective::Topr(_)),
            MutantKind::Aspo => matches!(spec.objective, Objective::Aspo(_)),
            MutantKind::CrossEntropy => matches!(&spec.objective, Objective::CrossEntropy(of) if of.reads_row()),
            MutantKind::KlWeight => spec.kl.as_ref().is_some_and(weighs),
            MutantKind::KlClamp => spec.kl.as_ref().is_some_and(bounds),
            MutantKind::LogClip => spec.ratio.clip.is_some() || spec.ratio.cap.is_some(),
            MutantKind::Sampler => {
                spec.old_logp == OldLogp::Rollout || spec.off_policy_mask.is_some_and(compares_with_sampler)
            }
            MutantKind::TopEntropy => spec.top_entropy.is_some(),
            MutantKind::Several => spec.ids_per_token > 1,
            MutantKind::Distillation => spec.reads_teacher(),
            MutantKind::Packing => packed,
            MutantKind::Rollout => spec.rollout.is_some(),
            MutantKind::Rejection => !spec.rejection.is_empty(),
            MutantKind::TokenWeights => spec.token_weights.is_some(),
            _ => true,
        }
    }

    /// Whether the kind depends on the width of the vocabulary. The others are about the tokens' losses, the places of sequences, or
    /// the ids of a token besides its first.
    pub fn is_of_columns(self) -> bool {
        !matches!(
            self,
            MutantKind::Sizes
                | MutantKind::Topr
                | MutantKind::Aspo
                | MutantKind::CrossEntropy
                | MutantKind::LogClip
                | MutantKind::KlWeight
                | MutantKind::KlClamp
                | MutantKind::Sampler
                | MutantKind::Rollout
                | MutantKind::Rejection
                | MutantKind::TokenWeights
                | MutantKind::TopEntropy
                | MutantKind::Several
                | MutantKind::Distillation
                | MutantKind::Packing
        )
    }
}
