//! The bugs: one small change each to a correct kernel.

use assay_core::spec::{Kl, KlGradient, KlImportance, LogitsTransform, LossSpec, Objective, OffPolicyMask, OldLogp};

/// A deliberately wrong kernel: what [`Specimen`](crate::Specimen) becomes with one bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutant {
    /// The change.
    pub bug: Bug,
    /// Named after the bug.
    pub name: &'static str,
    /// What kind of mistake it is.
    pub class: Class,
    /// What it computes instead, in one line.
    pub does: &'static str,
    /// Where it was seen; empty where it is only conceivable.
    pub seen: &'static str,
}

/// What goes wrong. Every class has a property of its own that targets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Tiles of the vocabulary, and the tail that does not fill one.
    Columns,
    /// The running maximum.
    Maximum,
    /// Columns of probability 0.
    Holes,
    /// Precision that is lost on the way.
    Precision,
    /// The derivative of the softmax.
    Gradient,
    /// What the temperature divides.
    Temperature,
    /// What becomes of logits before the temperature.
    Logits,
    /// Which columns the softmax runs over.
    Support,
    /// The bounds of the ratio.
    Clip,
    /// Log-ratios that are held: GMPO's clip, and the cap.
    LogClip,
    /// TOPR, which takes tokens by their sign.
    Topr,
    /// ASPO, whose ratio is upside down.
    Aspo,
    /// Ratios beyond what f32 holds.
    Overflow,
    /// The KL penalty.
    Kl,
    /// What the KL penalty is multiplied by, and whose gradient it has.
    KlWeight,
    /// The clamps of the KL penalty, and its own mean.
    KlClamp,
    /// The off-policy mask.
    OffPolicy,
    /// The sampler's policy in the place of the old one.
    Sampler,
    /// Weights against the sampler's policy.
    Rollout,
    /// Tokens and sequences that are rejected.
    Rejection,
    /// Weights of tokens that the trainer gives.
    TokenWeights,
    /// Entropy and its bonus.
    Entropy,
    /// The tokens of the highest entropy.
    TopEntropy,
    /// Logp of several ids a token.
    Several,
    /// Masked tokens.
    Mask,
    /// From token losses to one number.
    Reduction,
    /// Ratios that the tokens of a row share.
    SequenceRatio,
    /// Sequences that lie one after another in one row.
    Packing,
    /// Which element is read.
    Indexing,
    /// Vocabulary and rows over devices.
    Devices,
    /// What is left over from one grid step to another, or from one read to the next.
    State,
    /// With an LM head: chunks of tokens.
    HeadChunks,
    /// With an LM head: its three products.
    HeadProducts,
    /// With an LM head: tokens and vocabulary over devices.
    HeadDevices,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 34] = [
        Class::Columns,
        Class::Maximum,
        Class::Holes,
        Class::Precision,
        Class::Gradient,
        Class::Temperature,
        Class::Logits,
        Class::Support,
        Class::Clip,
        Class::LogClip,
        Class::Topr,
        Class::Aspo,
        Class::Overflow,
        Class::Kl,
        Class::KlWeight,
        Class::KlClamp,
        Class::OffPolicy,
        Class::Sampler,
        Class::Rollout,
        Class::Rejection,
        Class::TokenWeights,
        Class::Entropy,
        Class::TopEntropy,
        Class::Several,
        Class::Mask,
        Class::Reduction,
        Class::SequenceRatio,
        Class::Packing,
        Class::Indexing,
        Class::Devices,
        Class::State,
        Class::HeadChunks,
        Class::HeadProducts,
        Class::HeadDevices,
    ];

    /// Whether it is of the LM head's path, which a kernel on logits does not have.
    pub fn of_heads(self) -> bool {
        matches!(self, Class::HeadChunks | Class::HeadProducts | Class::HeadDevices)
    }

    /// Whether a spec, and a batch that is `packed` or not, have what it is of: elsewhere its mutants have the bits of the correct kernel.
    pub fn is_reached(self, spec: &LossSpec, packed: bool) -> bool {
        let weighs = |kl: &Kl| kl.importance != KlImportance::One || kl.gradient != KlGradient::Own;
        let bounds = |kl: &Kl| kl.difference_clamp.is_some() || kl.value_clamp.is_some() || kl.averaging.is_some();
        let of_sampler = |mask: OffPolicyMask| mask.behaviour == OldLogp::Rollout;
        match self {
            Class::Logits => spec.logits != LogitsTransform::default(),
            Class::Support => !spec.support.is_whole(),
            Class::Topr => matches!(spec.objective, Objective::Topr(_)),
            Class::Aspo => matches!(spec.objective, Objective::Aspo(_)),
            Class::KlWeight => spec.kl.as_ref().is_some_and(weighs),
            Class::KlClamp => spec.kl.as_ref().is_some_and(bounds),
            Class::LogClip => spec.ratio.clip.is_some() || spec.ratio.cap.is_some(),
            Class::Sampler => spec.old_logp == OldLogp::Rollout || spec.off_policy_mask.is_some_and(of_sampler),
            Class::TopEntropy => spec.top_entropy.is_some(),
            Class::Several => spec.ids_per_token > 1,
            Class::Packing => packed,
            Class::Rollout => spec.rollout.is_some(),
            Class::Rejection => !spec.rejection.is_empty(),
            Class::TokenWeights => spec.token_weights.is_some(),
            _ => true,
        }
    }

    /// Whether it has to do with how wide a vocabulary is: the others are of the tokens' losses, of where sequences lie, or of the ids
    /// of a token beside its first.
    pub fn is_of_columns(self) -> bool {
        !matches!(
            self,
            Class::Topr
                | Class::Aspo
                | Class::LogClip
                | Class::KlWeight
                | Class::KlClamp
                | Class::Sampler
                | Class::Rollout
                | Class::Rejection
                | Class::TokenWeights
                | Class::TopEntropy
                | Class::Several
                | Class::Packing
        )
    }

    /// Its name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Class::Columns => "columns",
            Class::Maximum => "maximum",
            Class::Holes => "holes",
            Class::Precision => "precision",
            Class::Gradient => "gradient",
            Class::Temperature => "temperature",
            Class::Logits => "logits",
            Class::Support => "support",
            Class::Clip => "clip",
            Class::LogClip => "log_clip",
            Class::Topr => "topr",
            Class::Aspo => "aspo",
            Class::Overflow => "overflow",
            Class::Kl => "kl",
            Class::KlWeight => "kl_weight",
            Class::KlClamp => "kl_clamp",
            Class::OffPolicy => "off_policy",
            Class::Sampler => "sampler",
            Class::Rollout => "rollout",
            Class::Rejection => "rejection",
            Class::TokenWeights => "token_weights",
            Class::Entropy => "entropy",
            Class::TopEntropy => "top_entropy",
            Class::Several => "several_ids",
            Class::Mask => "mask",
            Class::Reduction => "reduction",
            Class::SequenceRatio => "sequence_ratio",
            Class::Packing => "packing",
            Class::Indexing => "indexing",
            Class::Devices => "devices",
            Class::State => "state",
            Class::HeadChunks => "head_chunks",
            Class::HeadProducts => "head_products",
            Class::HeadDevices => "head_devices",
        }
    }

    /// Its heading.
    pub fn title(self) -> &'static str {
        match self {
            Class::Columns => "Columns: tiles of the vocabulary, and the tail",
            Class::Maximum => "Maximum",
            Class::Holes => "Holes: columns of probability 0",
            Class::Precision => "Precision",
            Class::Gradient => "Gradient",
            Class::Temperature => "Temperature",
            Class::Logits => "Logits that are changed before the softmax",
            Class::Support => "Support: columns that are left out",
            Class::Clip => "Clip",
            Class::LogClip => "Log-ratios that are held: clip and cap",
            Class::Topr => "TOPR",
            Class::Aspo => "ASPO",
            Class::Overflow => "Overflow: ratios beyond f32",
            Class::Kl => "KL penalty",
            Class::KlWeight => "KL penalty: what weighs it, and whose gradient it has",
            Class::KlClamp => "KL penalty: its clamps, and a mean of its own",
            Class::OffPolicy => "Off-policy mask",
            Class::Sampler => "The sampler's policy for the old one",
            Class::Rollout => "Weights against the sampler's policy",
            Class::Rejection => "Rejections",
            Class::TokenWeights => "Weights of tokens",
            Class::Entropy => "Entropy",
            Class::TopEntropy => "Tokens of the highest entropy",
            Class::Several => "Logp of several ids",
            Class::Mask => "Mask",
            Class::Reduction => "Reduction",
            Class::SequenceRatio => "Ratios of sequences",
            Class::Packing => "Packed sequences",
            Class::Indexing => "Indexing",
            Class::Devices => "Devices",
            Class::State => "State: what is left over",
            Class::HeadChunks => "LM head: chunks of tokens",
            Class::HeadProducts => "LM head: products",
            Class::HeadDevices => "LM head: devices",
        }
    }
}

macro_rules! bank {
    ($($class:ident { $($bug:ident, $name:literal, $does:literal, $seen:literal;)* })*) => {
        /// One small change to a correct kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[doc = $does] $bug,)*)*
        }

        /// Every mutant.
        pub const BANK: &[Mutant] = &[
            $($(Mutant { bug: Bug::$bug, name: $name, class: Class::$class, does: $does, seen: $seen },)*)*
        ];
    };
}

bank! {
    Columns {
        LastTileSkipped, "last-tile-skipped",
            "the grid has ⌊V / tile⌋ tiles: the tail is never read, and its logits stay where dlogits belong", "";
        LastTileReadTwice, "last-tile-read-twice",
            "the tail's exponentials are added twice", "";
        TailZeroPadded, "tail-zero-padded",
            "the tail is filled up with logits of 0, which are summed",
            "Tokamax HEAD `chunked_xla`: V = 3000, small logits, loss 8.331 for 8.023";
        TailNanPadded, "tail-nan-padded",
            "the tail is filled up with NaN, which is summed", "";
        TailReadsNextRow, "tail-reads-next-row",
            "the tail's load has no mask: columns of the next row are summed", "";
        TailRepeatsLastColumn, "tail-repeats-last-column",
            "the tail's load clamps its index: the last column is summed many times", "";
        TailGradientNotWritten, "tail-gradient-not-written",
            "the store has no tail: logits stay where dlogits belong", "";
        FirstColumnSkipped, "first-column-skipped",
            "column 0 is taken for padding and left out of the sum", "";
        WholeTilesOnlyInGradient, "tail-gradient-zero",
            "dlogits of the tail are 0", "";
    }
    Maximum {
        MaxNotSubtracted, "max-not-subtracted",
            "exponentials of the logits themselves", "";
        MaxStartsAtZero, "max-starts-at-zero",
            "the running maximum begins at 0",
            "verl 0.9.1, fused kernel's epilogue (verl#7439)";
        SumNotRescaled, "sum-not-rescaled",
            "what was summed stays relative to the old maximum when a tile has a larger one", "";
        RescaledTwice, "rescaled-twice",
            "what was summed is multiplied by the step of the maximum twice", "";
        MaxOfFirstTile, "max-of-first-tile",
            "the maximum is that of the first tile", "";
        GradientWithMaxOfLastTile, "gradient-with-max-of-last-tile",
            "dlogits take the maximum of the last tile", "";
        EntropySumNotShifted, "entropy-sum-not-shifted",
            "the sum of e·t is rescaled with the maximum, but its gaps are not moved", "";
    }
    Holes {
        MaxStartsAtMinusInfinity, "max-starts-at-minus-infinity",
            "a first tile of nothing but −∞ is −∞ − (−∞)",
            "TRL `kernels/logprob_entropy.py`, Liger: first block all −∞, NaN logp";
        HoleTimesZero, "hole-times-zero",
            "e·t of a column at −∞ is 0·∞ in the sum for the entropy",
            "TRL `kernels/logprob_entropy.py`: one −∞ logit, NaN entropy (trl#7221)";
        HoleGradientTimesZero, "hole-gradient-times-zero",
            "the entropy's derivative of a column at −∞ is 0·∞",
            "verl, prime-rl and Tunix: entropy NaN by its formula";
    }
    Precision {
        SumInBf16, "sum-in-bf16",
            "Σe is accumulated in bf16",
            "TRL's fused head notes that bf16 accumulation biased the entropy over dozens of steps";
        SumInF16, "sum-in-f16",
            "Σe is accumulated in f16, which ends at 65,504", "";
        ProbabilityRounded, "probability-rounded",
            "probabilities are rounded to the logits' dtype before the gradient multiplies them: two roundings", "";
        TemperatureInLogitsDtype, "temperature-in-logits-dtype",
            "logits over the temperature are rounded to the logits' dtype",
            "Tunix 0.1.7 and MaxText: 3.3e-2 for 6e-6 at V = 151,936";
        LogpInLogitsDtype, "logp-in-logits-dtype",
            "the log-probability is rounded to the logits' dtype",
            "bf16 log_softmax: error 0.041 at V = 151,936";
        EntropyInLogitsDtype, "entropy-in-logits-dtype",
            "the entropy is rounded to the logits' dtype",
            "Tunix 0.1.7: 10.0 for 9.938 at V = 151,936 in bf16";
        OldLogpInBf16, "old-logp-in-bf16",
            "the old log-probability is stored in bf16", "";
        GradientAddedInLogitsDtype, "gradient-added-in-logits-dtype",
            "the entropy's part is added to a policy's part that was rounded to the logits' dtype",
            "Liger's linear losses add `grad_weight` over chunks in the weight's dtype";
        SmallProbabilitiesFlushed, "small-probabilities-flushed",
            "probabilities below 1e-6 count as 0 in dlogits", "";
        LogpOfClampedProbability, "logp-of-clamped-probability",
            "ln max(p, 1e-8)", "";
        ExpByPolynomial, "exp-by-polynomial",
            "exp2 of the fraction by a polynomial of degree 3, right to 1e-4", "";
        TargetCollapses, "target-collapses",
            "the target's dlogit takes 1 − p in f32: 0 for a confident token",
            "TRL, Liger: margin 30 nats, −9.3e-11 becomes 0; unsloth's `stable_softmax.py` mends it";
    }
    Gradient {
        NonTargetDropped, "non-target-dlogits-dropped",
            "only the sampled column has a gradient",
            "within Liger's bf16 tolerance at V = 151,936, where there is no KL penalty";
        OneHotForgotten, "one-hot-forgotten",
            "−G·p in the sampled column too", "";
        ScaleForgottenInGradient, "scale-forgotten-in-gradient",
            "the loss is scaled, its gradient is not", "";
        GradientOfLoss, "upstream-gradient-twice",
            "the gradient is scaled twice", "";
        RatioDetached, "ratio-detached",
            "the ratio has no gradient", "";
        CurrentNotDetached, "current-logp-not-detached",
            "where the old log-probability is the policy's own, it takes the gradient with it", "";
        DlogpSignFlipped, "dlogp-sign-flipped",
            "the cotangent of logp is taken for an advantage, or logp for a cross entropy", "";
        SampledColumnUnscaled, "one-hot-before-softmax-scale",
            "the sampled column's 1 is not multiplied by G", "";
    }
    Temperature {
        TemperatureForgotten, "temperature-forgotten",
            "the logits are not divided",
            "trl#4159";
        TemperatureForgottenInGradient, "temperature-forgotten-in-gradient",
            "dlogits lack 1/T", "";
        TemperatureTwice, "temperature-twice",
            "the logits are divided twice", "";
        TemperatureTwiceInGradient, "temperature-twice-in-gradient",
            "dlogits have 1/T²", "";
        TemperatureMultiplies, "temperature-multiplies",
            "the logits are multiplied", "";
        TemperatureOnTheWrongSide, "temperature-on-the-wrong-side",
            "divides the log-probability for the logits, and the logits for the log-probability",
            "MLLM-JAX divides the log-probability; every other project the logits";
        EntropyWithoutTemperature, "entropy-without-temperature",
            "the entropy is that of the untempered logits", "";
        TemperatureOfFirstRow, "temperature-of-first-row",
            "the first token's temperature for all of the batch", "";
        TemperatureForgottenInFirstRow, "temperature-forgotten-in-first-row",
            "the dlogits of the first sequence lack 1/T", "";
    }
    Logits {
        LogitScaleForgotten, "logit-scale-forgotten",
            "the logits are not scaled", "";
        LogitScaleForgottenInGradient, "logit-scale-forgotten-in-gradient",
            "dlogits lack the scale", "";
        SoftcapForgotten, "softcap-forgotten",
            "logits are scaled and not capped, but dlogits have the cap's slope", "";
        SoftcapSlopeForgotten, "softcap-slope-forgotten",
            "dlogits lack 1 − tanh²", "";
        SoftcapSlopeOfCapped, "softcap-slope-of-capped-logit",
            "the slope is taken at the logit that is capped already", "";
        TanhNotMultiplied, "tanh-without-cap",
            "tanh(h / cap), not multiplied by the cap again", "";
        TanhNotDivided, "tanh-of-undivided-logit",
            "cap · tanh(h)", "";
        SoftcapCuts, "softcap-cuts",
            "logits are held to ±cap, and follow in between", "";
        SoftcapBeforeScale, "softcap-before-scale",
            "the capped logit is scaled", "";
        SoftcapAfterTemperature, "softcap-after-temperature",
            "the cap bounds the logit over the temperature", "";
        SoftcapInLogitsDtype, "softcap-in-logits-dtype",
            "the capped logit is rounded to the logits' dtype", "";
        BiasForgotten, "bias-forgotten",
            "the bias is not added", "";
        BiasForgottenInBackward, "bias-forgotten-in-backward",
            "dlogits are of the softmax without the bias", "";
        BiasOfNextColumn, "bias-of-next-column",
            "each column has the bias of the next", "";
        BiasOfTile, "bias-of-tile",
            "every tile adds the bias of the first", "";
        BiasOfFirstShard, "bias-of-first-shard",
            "every vocabulary shard adds the bias of the first", "";
        BiasAfterScale, "bias-after-scale",
            "the bias is added to the scaled logit", "";
        BiasAfterSoftcap, "bias-after-softcap",
            "the bias is added to the capped logit", "";
    }
    Support {
        ExcludedIdsInSum, "excluded-ids-in-sum",
            "the ids that the sampler never returns are summed", "";
        FirstExcludedIdAlone, "first-excluded-id-alone",
            "only the first of them is left out", "";
        ExcludedIdsOfShard, "excluded-ids-of-shard",
            "each vocabulary shard counts the excluded ids from its own column 0", "";
        ExcludedLogitsZeroed, "excluded-logits-zeroed",
            "the logits of excluded columns are 0, not −∞", "";
        ExcludedGradientNotZero, "excluded-gradient-not-zero",
            "excluded columns have the gradient of their exponential", "";
        ExcludedGradientNotWritten, "excluded-gradient-not-written",
            "dlogits of excluded columns are left as they were: logits", "";
        PaddingInSum, "padding-columns-in-sum",
            "the columns beyond the tokens' are summed", "";
        SupportTooLong, "support-one-too-long",
            "the first column of padding is summed", "";
        SupportTooShort, "support-one-too-short",
            "the last token's column is left out", "";
        KeptIdLeftOut, "kept-id-left-out",
            "a sampled id outside the support is not put back", "";
        KeptIdNotInSum, "kept-id-not-in-sum",
            "a sampled id that is put back is read, and not summed", "";
        KeptIdForAll, "kept-id-for-all",
            "an id that is sampled once in the batch is put back for every token", "";
        KeptIdWithoutGradient, "kept-id-without-gradient",
            "a sampled id that is put back has gradient 0", "";
    }
    Clip {
        EpsilonsSwapped, "epsilons-swapped",
            "1 − εh and 1 + εl", "";
        ClipIgnored, "clip-ignored",
            "no clip at all", "";
        ClipGradientKept, "clip-gradient-kept",
            "a clipped token keeps the gradient of its ratio", "";
        ClipOnTheWrongSide, "clip-on-the-wrong-side",
            "for A < 0 the smaller of ratio and bound, as for A > 0", "";
        ClipWithoutMin, "clip-without-min",
            "the clipped ratio whatever the unclipped one says", "";
        DeltaIgnored, "delta-ignored",
            "no upper bound on the unclipped ratio", "";
        DeltaStopsGradient, "delta-stops-gradient",
            "for A < 0 and δ < r ≤ 1 + εh the loss follows the ratio, and its gradient is 0",
            "Liger 0.8.5: gradient 0 for 1.165";
        DualClipIgnored, "dual-clip-ignored",
            "for A < 0 the loss grows without end", "";
        DualClipForPositive, "dual-clip-for-positive",
            "the dual clip also stops tokens of A > 0", "";
        CispoGradientClipped, "cispo-gradient-clipped",
            "beyond its bounds the weight has no gradient, as PPO's has none", "";
        CispoBoundFromOne, "cispo-bound-from-one",
            "`upper` is taken as an offset from 1",
            "TRL's and Liger's `epsilon_high` is the bound; verl's, SkyRL's and NeMo's is the bound − 1";
        CispoLowerIgnored, "cispo-lower-ignored",
            "no lower bound", "";
        CispoWithoutLogp, "cispo-ratio-not-detached",
            "the weight has a gradient, the log-probability none: PPO's derivative", "";
        RatioClampIgnored, "ratio-clamp-ignored",
            "log-ratios beyond the clamp stay",
            "verl, Tunix, SkyRL and OpenRLHF clamp at ±20; TRL and Liger do not";
        RatioClampGradientKept, "ratio-clamp-gradient-kept",
            "a clamped log-ratio keeps its gradient", "";
        RatioToFirstOrder, "ratio-to-first-order",
            "1 + x for exp(x)", "";
    }
    LogClip {
        LogClipIgnored, "log-clip-ignored",
            "no token's log-ratio is clipped", "";
        LogClipGradientKept, "log-clip-gradient-kept",
            "a clipped log-ratio keeps its gradient", "";
        LogClipOfBothSides, "log-clip-of-both-sides",
            "log-ratios are held from −low to high whatever the sign of A", "";
        LogClipOnTheWrongSide, "log-clip-on-the-wrong-side",
            "−low where A > 0, high where A < 0", "";
        LogClipOfMean, "log-clip-of-mean",
            "the row's mean is clipped, not what it is a mean of", "";
        LogClipWithoutAdvantage, "log-clip-without-advantage",
            "a token of A = 0 keeps its log-ratio in the row's mean", "";
        CapIgnored, "ratio-cap-ignored",
            "the level's log-ratio has no upper bound", "";
        CapGradientKept, "ratio-cap-gradient-kept",
            "a capped log-ratio keeps its gradient", "";
        CapOfTokens, "ratio-cap-of-tokens",
            "the cap is on what the row's log-ratio is a mean of", "";
        CapOfRatio, "ratio-cap-of-ratio",
            "the cap is on the ratio, not on its logarithm", "";
        CapOfBothSides, "ratio-cap-of-both-sides",
            "the level's log-ratio is held to ±cap", "";
    }
    Topr {
        ToprWeightsSwapped, "topr-weights-swapped",
            "w₋ where a token is positive, w₊ elsewhere", "";
        ToprNegativeWeightForgotten, "topr-negative-weight-forgotten",
            "no w₋", "";
        ToprRatioForPositive, "topr-ratio-for-positive",
            "positive tokens are multiplied by the clipped ratio too", "";
        ToprClipIgnored, "topr-clip-ignored",
            "the ratio has no upper bound", "";
        ToprClipFromBelow, "topr-clip-from-below",
            "max(ρ, upper)", "";
        ToprRatioNotDetached, "topr-ratio-not-detached",
            "the ratio has a gradient beside that of the log-probability", "";
        ToprGradientClipped, "topr-gradient-clipped",
            "beyond the bound there is no gradient, as PPO has none", "";
        ToprSelectedIgnored, "topr-positive-by-advantage",
            "the sign of the advantage where the positive tokens are given", "";
    }
    Aspo {
        AspoRatioNotInverted, "aspo-ratio-not-inverted",
            "u for 1/u where A > 0", "";
        AspoInvertedForAll, "aspo-inverted-for-all",
            "1/v for v where A < 0", "";
        AspoGradientOfInverse, "aspo-gradient-of-inverse",
            "u² is not held: the derivative is that of 1/u, of the other sign", "";
        AspoEpsilonsSwapped, "aspo-epsilons-swapped",
            "1 + εl and 1 − εh", "";
        AspoSelectedIgnored, "aspo-selected-ignored",
            "the widths of selected tokens are those of the others", "";
        AspoSelectedReversed, "aspo-selected-reversed",
            "selected tokens have the widths of the others, and these theirs", "";
        AspoClipAfterInverting, "aspo-clip-after-inverting",
            "where A > 0 the bound 1 + εh is on 1/ρ", "";
        AspoGradientKept, "aspo-clip-gradient-kept",
            "a clipped token keeps the gradient of its ratio", "";
        AspoDualClipsSwapped, "aspo-dual-clips-swapped",
            "c₋ where A > 0, c₊ where A < 0", "";
        AspoDualClipIgnored, "aspo-dual-clip-ignored",
            "no dual clip", "";
        AspoDualClipOfRatio, "aspo-dual-clip-of-ratio",
            "where A > 0 the ratio is compared with c₊, not its inverse", "";
        AspoDualClipWithoutLogp, "aspo-dual-clip-without-logp",
            "beyond the dual clip the loss is −c·A, as PPO's is, without gradient", "";
    }
    Overflow {
        OverflowingRatioTimesZero, "overflowing-ratio-times-zero",
            "a clipped token's gradient is 0·ρ·A: NaN where the ratio is ∞",
            "torch autograd and Liger; Soup#342, NeMo#4120, tunix#2310";
        ZeroAdvantageTimesRatio, "zero-advantage-times-ratio",
            "without an advantage the loss is 0·ρ: NaN where the ratio is ∞",
            "torch: loss NaN; Liger: gradient NaN";
    }
    Kl {
        KlEstimatorsSwapped, "kl-estimators-swapped",
            "k2 for k3, and k3 for k2", "";
        K1ForAbs, "kl-k1-for-abs",
            "−d for |d|", "";
        K3SignFlipped, "kl-k3-sign-flipped",
            "k3 of ℓ − `ref_logp`", "";
        KlDetached, "kl-detached",
            "the penalty has no gradient", "";
        K3GradientOfK1, "kl-k3-gradient-of-k1",
            "the derivative of k3 lacks its exponential", "";
        BetaTwiceInGradient, "kl-beta-twice-in-gradient",
            "beta² in the gradient", "";
        KlAgainstOldPolicy, "kl-against-old-policy",
            "`old_logp` for `ref_logp`", "";
        BiasCorrectionDetached, "kl-bias-correction-detached",
            "ρ·k3 without the gradient of ρ",
            "Liger's sequence-level bias-corrected KL, August snapshot (trl#6586)";
        BiasCorrectionIgnored, "kl-bias-correction-ignored",
            "k3 for ρ·k3",
            "on by default in TRL, off in Liger";
        KlClipped, "kl-clipped-with-the-ratio",
            "a token whose ratio is clipped loses its KL gradient too", "";
    }
    KlWeight {
        KlRatioOfToken, "kl-ratio-of-token",
            "the token's own ratio for that of its level", "";
        KlTokenRatioOfSequence, "kl-token-ratio-of-sequence",
            "the sequence's ratio for the token's own", "";
        KlTokenRatioDetached, "kl-token-ratio-detached",
            "the token's ratio has no gradient", "";
        KlRolloutIgnored, "kl-rollout-ignored",
            "the penalty is not weighed by exp(ℓ − `rollout_logp`)", "";
        KlRolloutInverted, "kl-rollout-inverted",
            "weighed by exp(`rollout_logp` − ℓ)", "";
        KlRolloutOfOldPolicy, "kl-rollout-of-old-policy",
            "weighed by exp(`old_logp` − `rollout_logp`), as the policy term", "";
        KlRolloutDetached, "kl-rollout-detached",
            "the weight has no gradient", "";
        KlUnscoredAsOne, "kl-unscored-as-one",
            "a token that the sampler did not score is weighed by 1", "";
        KlUnscoredNan, "kl-unscored-nan",
            "a token that the sampler did not score is weighed by NaN", "";
        KlScoreForgotten, "kl-score-forgotten",
            "the gradient lacks that of exp(ℓ − sg(ℓ))", "";
        KlScoreAlone, "kl-score-alone",
            "the estimate is held: the gradient is that of exp(ℓ − sg(ℓ)) alone", "";
        KlScoreInValue, "kl-score-in-value",
            "the loss has the estimate times ℓ: what the score's gradient is taken of", "";
        KlK2Ignored, "kl-gradient-k2-ignored",
            "the estimator's own gradient for that of k2", "";
        KlK2InValue, "kl-gradient-k2-in-value",
            "k2 for the value too", "";
        KlK2SignFlipped, "kl-gradient-k2-sign-flipped",
            "`ref_logp` − ℓ for the derivative of k2", "";
        KlK2WeightForgotten, "kl-k2-weight-forgotten",
            "the gradient of k2 is not weighed", "";
        KlK2WeightUnbounded, "kl-k2-weight-unbounded",
            "its weight has no bound", "";
        KlK2WeightOfSequence, "kl-k2-weight-of-sequence",
            "its weight is the ratio of the sequence", "";
    }
    KlClamp {
        KlDifferenceClampIgnored, "kl-difference-clamp-ignored",
            "`ref_logp` − ℓ is not clamped", "";
        KlDifferenceClampGradientKept, "kl-difference-clamp-gradient-kept",
            "a clamped difference keeps its gradient", "";
        KlDifferenceClampFromAbove, "kl-difference-clamp-from-above",
            "the difference has no lower bound", "";
        KlDifferenceClampOfExp, "kl-difference-clamp-of-exp",
            "e^d is held to e^±clamp, the d beside it is not", "";
        KlK2GradientClamped, "kl-gradient-k2-clamped",
            "the gradient of k2, which no clamp holds, is 0 where the difference is clamped", "";
        KlValueClampIgnored, "kl-value-clamp-ignored",
            "the estimate is not clamped", "";
        KlValueClampGradientKept, "kl-value-clamp-gradient-kept",
            "a clamped estimate keeps its gradient", "";
        KlValueClampFromAbove, "kl-value-clamp-from-above",
            "the estimate has no lower bound", "";
        KlValueClampOfPenalty, "kl-value-clamp-of-penalty",
            "the clamp is on beta · kl", "";
        KlValueClampOnTheWrongSide, "kl-value-clamp-on-the-wrong-side",
            "the clamp is on the product with the importance for the estimate, and the other way round", "";
        KlAveragingIgnored, "kl-averaging-ignored",
            "the penalty has the policy term's mean", "";
        KlAveragingOfPolicy, "kl-averaging-of-policy",
            "the policy term has the penalty's mean", "";
        KlAveragingNotInGradient, "kl-averaging-not-in-gradient",
            "the loss has the penalty's own mean, its gradient the policy term's", "";
        KlAveragingCountsEmptyRows, "kl-averaging-counts-empty-rows",
            "rows without a token count in the penalty's B′", "";
    }
    OffPolicy {
        OffPolicyMaskIgnored, "off-policy-mask-ignored",
            "every sequence keeps its policy term", "";
        OffPolicyMaskForPositive, "off-policy-mask-for-positive",
            "sequences of A ≥ 0 are dropped too", "";
        KlMaskedByOffPolicyMask, "kl-masked-by-off-policy-mask",
            "the off-policy mask takes the KL penalty with it",
            "TRL's masks leave the KL alone; verl's and unsloth's rejections do not";
        OffPolicyOverWidth, "off-policy-mean-over-width",
            "the mean divergence is over T", "";
        OffPolicySignFlipped, "off-policy-sign-flipped",
            "ℓ − `old_logp` against the threshold", "";
    }
    Sampler {
        SamplerIgnored, "sampler-ignored",
            "`old_logp` is the ratio's denominator where `rollout_logp` should be", "";
        SamplerShifted, "sampler-shifted",
            "the sampler's log-probability of the token before", "";
        SamplerInBf16, "sampler-in-bf16",
            "the sampler's log-probabilities are stored in bf16", "";
        OffPolicyOfOldPolicy, "off-policy-of-old-policy",
            "the off-policy mask compares `old_logp` where it should compare `rollout_logp`", "";
        OffPolicyUnscoredNan, "off-policy-unscored-nan",
            "a token that was not scored makes its row's divergence NaN, which is not below the threshold", "";
    }
    Rollout {
        RolloutIgnored, "rollout-ignored",
            "no token is weighed", "";
        RolloutInverted, "rollout-inverted",
            "exp(`rollout_logp` − `old_logp`)", "";
        RolloutNotInGradient, "rollout-not-in-gradient",
            "the loss is weighed, its gradient is not", "";
        RolloutMasks, "rollout-masks",
            "a weight out of bounds is 0, where it should be the bound", "";
        RolloutTruncates, "rollout-truncates",
            "a weight out of bounds is the bound, where it should be 0", "";
        RolloutMinIgnored, "rollout-min-ignored",
            "no lower bound", "";
        RolloutBoundOnLog, "rollout-bound-on-log",
            "the bounds are compared with the logarithm", "";
        RolloutClampIgnored, "rollout-clamp-ignored",
            "the logarithm is not clamped", "";
        RolloutClampAfterExp, "rollout-clamp-after-exp",
            "the weight is clamped, not its logarithm", "";
        RolloutSumForMean, "rollout-sequence-for-geometric",
            "exp of the sum for exp of the mean", "";
        RolloutMeanForSum, "rollout-geometric-for-sequence",
            "exp of the mean for exp of the sum", "";
        RolloutMeanOverWidth, "rollout-mean-over-width",
            "the geometric mean is over T", "";
        RolloutOfTokens, "rollout-of-tokens",
            "each token's own weight for that of its sequence", "";
        RolloutGateIgnored, "rollout-gate-ignored",
            "no sequence is gated", "";
        RolloutGateByToken, "rollout-gate-by-token",
            "the gate looks at the token's own weight", "";
        RolloutGateTruncates, "rollout-gate-truncates",
            "a gated token's own weight is held to the bounds too", "";
        RolloutGivenAsIs, "rollout-given-as-is",
            "given weights are not made geometric means", "";
        RolloutNormalisedOverPadding, "rollout-normalised-over-padding",
            "the mean weight counts masked tokens, at 1", "";
        RolloutNormalisedBeforeBounds, "rollout-normalised-before-bounds",
            "the weights are divided by their mean, then bounded", "";
        RolloutNormalisedByDevice, "rollout-normalised-by-device",
            "each row shard divides by its own mean weight", "";
        RolloutNormalisedOverTokens, "rollout-normalised-over-tokens",
            "weights of sequences are averaged over tokens, not over rows", "";
        RolloutOnKl, "rollout-on-kl",
            "the penalty is weighed where the policy term alone should be", "";
        RolloutNotOnKl, "rollout-not-on-kl",
            "the policy term alone is weighed where the penalty should be too", "";
        UnscoredNan, "unscored-nan",
            "a token that was not scored has the weight NaN", "";
        UnscoredOneAsZero, "unscored-one-as-zero",
            "a token that was not scored, and counts as 1, has the weight 0", "";
        UnscoredZeroAsOne, "unscored-zero-as-one",
            "a token that was not scored, and counts as 0, has the weight 1", "";
        UnscoredZeroesTokenAlone, "unscored-zeroes-token-alone",
            "the weight of a sequence is 0 at the token that was not scored, and stays at the others", "";
        UnscoredOutOfMean, "unscored-out-of-mean",
            "the geometric mean does not count the token", "";
        UnscoredOutOfNormaliser, "unscored-out-of-normaliser",
            "the mean weight does not count the token", "";
        UnscoredEscapesBounds, "unscored-escapes-bounds",
            "the weight 0 is not raised to the lower bound", "";
        UnscoredClosesGate, "unscored-closes-gate",
            "the gate is closed to a sequence with a token that was not scored", "";
    }
    Rejection {
        RejectionIgnored, "rejection-ignored",
            "no token is rejected", "";
        RejectionOnTheWrongSide, "rejection-on-the-wrong-side",
            "what is beyond the upper bound stays, what is within leaves", "";
        RejectionMinIgnored, "rejection-min-ignored",
            "no lower bound", "";
        RejectionK1SignFlipped, "rejection-k1-sign-flipped",
            "y for −y", "";
        RejectionK2NotHalved, "rejection-k2-not-halved",
            "y² for y²/2", "";
        RejectionK3SignFlipped, "rejection-k3-sign-flipped",
            "k3 of −y", "";
        RejectionKlReversed, "rejection-kl-reversed",
            "the KL divergence of the sampler's policy from the old one, the other way round", "";
        RejectionKlOfTokenAlone, "rejection-kl-of-token-alone",
            "the binary KL lacks the part of the other tokens", "";
        RejectionVariationSigned, "rejection-variation-signed",
            "p − q for |p − q|", "";
        RejectionProbabilityReversed, "rejection-probability-reversed",
            "p − q for q − p", "";
        RejectionRatioSigned, "rejection-ratio-signed",
            "e^y for e^|y|", "";
        RejectionSumForMean, "rejection-sum-for-mean",
            "a row's sum against the bound of its mean", "";
        RejectionMeanForSum, "rejection-mean-for-sum",
            "a row's mean against the bound of its sum", "";
        RejectionMeanOverWidth, "rejection-mean-over-width",
            "a row's mean is over T", "";
        RejectionMaxForMin, "rejection-max-for-min",
            "a row's largest value for its smallest", "";
        RejectionMinForMax, "rejection-min-for-max",
            "a row's smallest value for its largest", "";
        RejectionOfTokens, "rejection-of-tokens",
            "each token leaves by its own value where the row's should decide", "";
        RejectionCountsMasked, "rejection-counts-masked",
            "masked tokens have a part in a row's statistic", "";
        RejectedStillCount, "rejected-still-count",
            "rejected tokens lose their loss, and stay in denominators and in the row's ratio", "";
        RejectedDoNotCount, "rejected-do-not-count",
            "rejected tokens that count are left out of denominators and of the row's ratio", "";
        RejectionKeepsKl, "rejection-keeps-kl",
            "rejected tokens keep the penalty that they should lose", "";
        RejectionTakesKl, "rejection-takes-kl",
            "rejected tokens lose the penalty that they should keep", "";
        RejectedOutOfRollout, "rejected-out-of-rollout",
            "weights against the sampler are made of the tokens that stay", "";
        RejectionOfUnscored, "rejection-of-unscored",
            "a token that was not scored is rejected: no comparison with NaN holds", "";
        FirstRejectionAlone, "first-rejection-alone",
            "only the first of several rejections is looked at", "";
        RejectionByAll, "rejection-by-all",
            "a token leaves where every rejection rejects it", "";
        SecondMomentOfRow, "second-moment-of-row",
            "each row is brought below the bound by itself", "";
        SecondMomentOfDevice, "second-moment-of-device",
            "each row shard is brought below the bound by itself", "";
        SecondMomentOfToken, "second-moment-of-token",
            "each y² is held to the bound of their mean", "";
        SecondMomentHalved, "second-moment-halved",
            "the mean of y²/2", "";
        SecondMomentOfAll, "second-moment-of-all",
            "a batch above the bound loses all of its tokens above it, not the fewest", "";
    }
    TokenWeights {
        TokenWeightsIgnored, "token-weights-ignored",
            "no token is weighed", "";
        TokenWeightsSquared, "token-weights-squared",
            "weighed twice", "";
        TokenWeightsAsMask, "token-weights-as-mask",
            "1 where a weight is not 0", "";
        TokenWeightsNotInGradient, "token-weights-not-in-gradient",
            "the loss is weighed, its gradient is not", "";
        TokenWeightsInDenominator, "token-weights-in-denominator",
            "a weighted mean: over the sum of the weights", "";
        TokenWeightsOnKl, "token-weights-on-kl",
            "the penalty is weighed where the policy term alone should be", "";
        TokenWeightsNotOnKl, "token-weights-not-on-kl",
            "the policy term alone is weighed where the penalty should be too", "";
        TokenWeightsOfFirstToken, "token-weights-of-first-token",
            "the weight of a row's first token for all of them", "";
        TokenWeightOfFirstSequence, "token-weight-of-first-sequence",
            "the weight of the first sequence for all of them", "";
        ZeroWeightCounts, "zero-weight-counts",
            "a token of weight 0 stays in denominators", "";
        ZeroWeightOutOfRollout, "zero-weight-out-of-rollout",
            "weights against the sampler are made of the tokens whose weight is not 0", "";
    }
    Entropy {
        EntropyOfShiftedLog, "entropy-of-shifted-log",
            "−Σ p·ln(p + 1e-9)", "";
        EntropyGradientWithoutMean, "entropy-gradient-without-h",
            "−p·ln p: the derivative lacks p·H", "";
        EntropyBonusSubtracted, "entropy-bonus-sign-flipped",
            "the bonus is a penalty", "";
        EntropyDetached, "entropy-detached",
            "the bonus has no gradient",
            "SkyRL#1841";
        DentropyDropped, "dentropy-dropped",
            "the cotangent of the entropy is not sent back: its gradient is that of logp alone", "";
        DentropySignFlipped, "dentropy-sign-flipped",
            "the cotangent of the entropy is taken for the coefficient of a bonus", "";
        DentropyOfFirstToken, "dentropy-of-first-token",
            "the cotangent of a sequence's first entropy for all of its tokens", "";
        EntropyOverPadding, "entropy-mean-over-padding",
            "the bonus is a mean over B·T", "";
        EntropyFromLogpSoftmax, "entropy-of-the-sampled-token",
            "−logp for the entropy", "";
    }
    TopEntropy {
        TopEntropyIgnored, "top-entropy-ignored",
            "every token keeps its policy term", "";
        TopEntropyAbove, "top-entropy-above",
            "a token whose entropy is the quantile itself is left out: > for ≥", "";
        TopEntropyLowest, "top-entropy-lowest",
            "the tokens of the lowest entropy stay", "";
        TopEntropyOfFraction, "top-entropy-of-fraction",
            "the threshold is the quantile `fraction`, not 1 − `fraction`", "";
        TopEntropyOverPadding, "top-entropy-over-padding",
            "masked tokens have a part in the quantile, of entropy 0", "";
        TopEntropyOfRow, "top-entropy-of-row",
            "each row has a threshold of its own", "";
        TopEntropyOfDevice, "top-entropy-of-device",
            "each row shard has a threshold of its own", "";
        TopEntropyNotInterpolated, "top-entropy-not-interpolated",
            "the threshold is the entropy below the quantile", "";
        TopEntropyOutOfDenominator, "top-entropy-out-of-denominator",
            "tokens of low entropy do not count in denominators", "";
        TopEntropyTakesKl, "top-entropy-takes-kl",
            "tokens of low entropy lose the penalty too", "";
        TopEntropyBonusOfAll, "top-entropy-bonus-of-all",
            "tokens of low entropy keep their part in the entropy bonus", "";
        TopEntropyDropsTheOther, "top-entropy-drops-the-other",
            "tokens of low entropy are left out of the row's log-ratio where they should lose their policy term, and the other way round", "";
        TopEntropyMeanOfAll, "top-entropy-mean-of-all",
            "tokens that are left out of the row's log-ratio still count in its mean", "";
    }
    Several {
        SoftmaxOfFirstIdAlone, "several-softmax-of-first-alone",
            "−p is multiplied by the first id's cotangent, not by the sum of all", "";
        OneHotOfFirstIdAlone, "several-one-hot-of-first-alone",
            "only the first id's column has the 1 of its cotangent", "";
        RepeatedIdOverwritten, "several-repeated-id-overwritten",
            "the cotangents' ones are scattered, not added: of an id that stands twice the last stays", "";
        DlogpOfFirstId, "several-dlogp-of-first",
            "every id has the first one's cotangent", "";
        OtherIdsSorted, "several-logp-sorted",
            "logp comes back from the largest down, not in the order of the ids", "";
        OtherIdsStrideOne, "several-ids-stride-one",
            "the ids of the next token begin an id later, not K later", "";
        OtherIdFromEveryShard, "several-logit-of-every-shard",
            "a shard without an id adds the column at its edge", "";
    }
    Mask {
        MaskMultiplied, "mask-multiplied",
            "masked tokens are multiplied by 0, not left out: NaN under the mask stays",
            "Tunix 0.1.7 (tunix#2310), verl's sequence modes";
        MaskedDlogitsNotZeroed, "masked-dlogits-not-zeroed",
            "rows of masked tokens are left as they were", "";
        MaskShifted, "mask-shifted",
            "the mask of the next token", "";
        MaskOfFirstRow, "mask-of-first-row",
            "the mask of row 0 for every row",
            "Liger#1461: the mask's strides";
        MaskedTokensInLoss, "masked-tokens-in-loss",
            "a row counts up to its last token: what is masked within counts too", "";
    }
    Reduction {
        NormaliserCountsPadding, "normaliser-counts-padding",
            "B·T for Σm", "";
        EmptyRowsCounted, "empty-rows-counted",
            "rows without a token count in B′",
            "TRL, Liger, unsloth and MaxText count them; verl, Tunix and OpenRLHF do not";
        EmptyRowsLeftOut, "empty-rows-left-out",
            "rows without a token do not count in B", "verl, Tunix and OpenRLHF, as above";
        LengthFactor, "length-factor",
            "a row's sum weighs n/T",
            "Liger 0.8.5, LUSPO in Triton, ragged mask (trl#6654)";
        SequenceMeanOverTokens, "sequence-mean-over-tokens",
            "the mean over tokens for the mean over rows", "";
        FixedLengthOfWidth, "fixed-length-of-width",
            "the padded width for the length given",
            "verl `seq-mean-token-sum-norm`, unless told";
        GradientNotNormalised, "gradient-not-normalised",
            "the loss is a mean, its gradient that of a sum",
            "Liger#1082: gradient norms a hundred times too large";
        NormaliserOfBatchIgnored, "normaliser-of-batch-ignored",
            "the batch's own tokens for the count that is given",
            "Liger's dapo falls back to the current mask (trl#5890)";
        DenominatorEpsilonForgotten, "denominator-epsilon-forgotten",
            "the mean of a row lacks what is added to its count", "";
        LossOfPolicyAlone, "loss-without-kl",
            "the loss leaves the penalty out, its gradient does not", "";
    }
    SequenceRatio {
        RatioOverWidth, "sequence-ratio-over-width",
            "the mean log-ratio is over T", "";
        RatioOfSum, "sequence-ratio-of-sum",
            "exp of the sum for exp of the mean", "";
        SequenceGradientOfToken, "sequence-gradient-of-token",
            "each token has the gradient of its own loss alone, as in GSPO-token",
            "verl, Tunix and SkyRL mean GSPO-token, TRL and Liger do not";
        TokenGradientOfSequence, "token-gradient-of-sequence",
            "GSPO-token with the gradient of the mean", "";
        ShareForgotten, "sequence-share-forgotten",
            "the gradient of the mean lacks 1/n", "";
        SequenceRatioOfTokens, "sequence-ratio-of-tokens",
            "each token has a ratio of its own",
            "trl#6808: GMPO silently trained GRPO";
        MeanOfRatios, "sequence-mean-of-ratios",
            "the mean of the ratios for the exp of their mean", "";
    }
    Packing {
        BoundariesLate, "boundaries-late",
            "each sequence but the first begins a token late, and the one before it ends there", "";
        PackTakenForRow, "pack-taken-for-row",
            "the mean log-ratio, and the mean of the loss, are over all that is packed", "";
        EmptySequenceCountsAToken, "empty-sequence-counts-a-token",
            "a sequence without a token counts one in the normaliser",
            "slime: a sample without tokens counts one";
        LastSequenceDropped, "last-sequence-dropped",
            "`cu_seqlens` is read without its last value: the last sequence has no loss and no gradient", "";
        RolloutOfPack, "rollout-of-pack",
            "a weight against the sampler is that of all that is packed", "";
        RejectionOfPack, "rejection-of-pack",
            "what is packed is rejected as one sequence", "";
        PackedAdvantageZero, "packed-advantage-zero",
            "tokens of packed sequences have the advantage 0: none is found for them", "";
        SegmentIdsFromOne, "segment-ids-from-one",
            "segment ids that begin at 1 are taken for rows of the advantages: each sequence has that of the next", "";
    }
    Indexing {
        AdvantageOfNeighbour, "advantage-of-neighbour",
            "the advantage of the next row", "";
        AdvantageOfFirstToken, "advantage-of-first-token",
            "token advantages are read once a row", "";
        IdOffByOne, "id-off-by-one",
            "the column after the sampled one", "";
        IdTruncated, "id-truncated-to-i16",
            "ids beyond 32,767 wrap", "";
        OffsetOverflows, "offset-overflows",
            "row · V wraps at 2¹⁶: 32 bits with the index type narrowed",
            "B·T·V beyond 2³¹ with i32 offsets";
        IdOfTile, "id-of-tile",
            "the id is looked for in every tile by its place within one", "";
        RowsTransposed, "rows-transposed",
            "logits are read as `[T,B,V]`", "";
        OldLogpShifted, "old-logp-shifted",
            "the old log-probability of the token before", "";
        RefLogpOfFirstRow, "ref-logp-of-first-row",
            "the reference's log-probabilities of row 0 for every row", "";
    }
    Devices {
        ShardMaxNotExchanged, "shard-max-not-exchanged",
            "dlogits take the maximum of their own vocabulary shard", "";
        SumExchangedBeforeRescale, "sum-exchanged-before-rescale",
            "the shards' sums are added relative to their own maxima", "";
        EntropySumNotExchanged, "entropy-sum-not-exchanged",
            "the entropy's sum is that of the first shard", "";
        ChosenNotExchanged, "chosen-logit-not-exchanged",
            "the first shard's chosen logit, 0 where the id is in another",
            "silent `target_logit = 0` of ids out of range in TRL's and Liger's fused heads";
        ChosenFromEveryShard, "chosen-logit-of-every-shard",
            "a shard without the id adds the column at its edge", "";
        ShardOffsetForgotten, "shard-offset-forgotten",
            "each shard looks for the id from its own column 0", "";
        GradientSummedOverShards, "gradient-summed-over-shards",
            "dlogits are multiplied by the number of vocabulary shards", "";
        NormaliserLocal, "normaliser-local",
            "each row shard divides by its own tokens",
            "dapo's count per process and not per batch (trl#5890)";
        LossOfFirstDevice, "loss-of-first-device",
            "the loss is that of the first row shard", "";
        DeviceRowsPermuted, "device-rows-permuted",
            "the rows of the last row shard come back in reverse", "";
        AdvantagesOfFirstDevice, "advantages-of-first-device",
            "every row shard reads the advantages of the first", "";
    }
    State {
        StaleMax, "stale-max",
            "the maximum of the grid step before is not reset", "";
        StaleSums, "stale-sums",
            "the maximum and the sums of the grid step before are not reset", "";
        StaleChosen, "stale-chosen-logit",
            "the chosen logit of the grid step before is not reset", "";
        EntropyReadAfterWrite, "entropy-read-after-write",
            "the entropy's part of dlogits reads logits that were already overwritten", "";
        TargetReadAfterWrite, "target-read-after-write",
            "the sampled column is read again after its tile was overwritten",
            "double backward into in-place logits";
        SumInAnyOrder, "sum-in-any-order",
            "tiles add to an f32 sum in the order they finish",
            "verl's fused backward adds with f32 atomics";
        LastRowSkipped, "last-row-skipped",
            "the grid has one row too few: its dlogits are never written", "";
    }
    HeadChunks {
        LastChunkDropped, "last-chunk-dropped",
            "the backward loop has ⌊N / chunk⌋ trips: tokens beyond them have no `dhidden`, and add nothing to `dlm_head`", "";
        ChunkBeginsEarly, "chunk-begins-early",
            "each chunk but the first begins a token early: that one adds to `dlm_head` twice", "";
        LastChunkRepeatsLastToken, "last-chunk-repeats-last-token",
            "the last chunk is filled up with its last token, whose dlogits add to `dlm_head` each time", "";
        StaleRowsInLastChunk, "stale-rows-in-last-chunk",
            "the last chunk multiplies its whole buffer: rows of the chunk before add to `dlm_head` again", "";
        HiddenOfChunkBefore, "hidden-of-chunk-before",
            "in `dlm_head` a chunk's dlogits meet the hidden states of the chunk before", "";
        HiddenNotGathered, "hidden-not-gathered",
            "tokens that count are gathered, but `dlm_head` reads hidden states one after another, masked or not", "";
        MaskedDhiddenNotZeroed, "masked-dhidden-not-zeroed",
            "`dhidden` lies over the hidden states, and those of masked tokens stay", "";
        SoftmaxOfChunkBefore, "softmax-of-chunk-before",
            "dlogits take the maxima and sums that the chunk before left in their rows", "";
        NormaliserOfChunk, "normaliser-of-chunk",
            "dlogits are over the tokens of their chunk, not of the batch",
            "Liger's chunked losses are handed the whole mask for this";
        DlmHeadOverwritten, "dlm-head-overwritten",
            "`dlm_head` is what the last chunk adds", "";
        DlmHeadSummedInHeadDtype, "dlm-head-summed-in-head-dtype",
            "what the chunks add to `dlm_head` is summed in the dtype of the head",
            "Liger's linear losses add `grad_weight` over chunks in the weight's dtype";
        OneHotOverwritten, "one-hot-overwritten",
            "the sampled columns' part of `dlm_head` is scattered, not added: of a chunk's tokens with one id the last stays", "";
    }
    HeadProducts {
        HeadLayoutMistaken, "head-layout-mistaken",
            "a head `[V,H]` is read as `[H,V]`", "";
        DlmHeadLayoutMistaken, "dlm-head-layout-mistaken",
            "`dlm_head` of a head `[V,H]` is written as `[H,V]`", "";
        LogitsNotRounded, "logits-not-rounded",
            "logits stay f32 where they are declared rounded to the hidden states' dtype", "";
        LogitsRounded, "logits-rounded",
            "logits are rounded to the hidden states' dtype where they are declared f32", "";
        LogitsSummedInHiddenDtype, "logits-summed-in-hidden-dtype",
            "the product for the logits is summed in the hidden states' dtype", "";
        DepthTailDropped, "depth-tail-dropped",
            "the product for the logits takes ⌊H / 8⌋·8 hidden units", "";
        DhiddenOfLogits, "dhidden-of-logits",
            "`dhidden` multiplies the chunk before dlogits are written over its logits", "";
        DlogitsRounded, "dlogits-rounded",
            "dlogits are rounded to the hidden states' dtype before the products, and are said to be f32",
            "QuACK and Liger stage dlogits in bf16, which a candidate says";
        DhiddenLacksTail, "dhidden-lacks-tail",
            "`dhidden` lacks the columns that do not fill a tile", "";
        DlmHeadLacksTail, "dlm-head-lacks-tail",
            "`dlm_head` is 0 in the columns that do not fill a tile", "";
        DhiddenSummedInHiddenDtype, "dhidden-summed-in-hidden-dtype",
            "`dhidden` is summed over tiles of columns in the hidden states' dtype", "";
        ScaleForgottenInDlmHead, "scale-forgotten-in-dlm-head",
            "the loss and `dhidden` are scaled, `dlm_head` is not", "";
        TemperatureForgottenInDhidden, "temperature-forgotten-in-dhidden",
            "`dhidden` lacks 1/T", "";
    }
    HeadDevices {
        DhiddenOfFirstShard, "dhidden-of-first-shard",
            "`dhidden` is that of the first vocabulary shard, not the sum", "";
        DhiddenRoundedBeforeSum, "dhidden-rounded-before-sum",
            "each vocabulary shard's `dhidden` is rounded to its dtype before they are summed", "";
        HeadOffsetForgotten, "head-offset-forgotten",
            "in `dhidden` each vocabulary shard multiplies by the head's first columns", "";
        DlmHeadOfFirstDevice, "dlm-head-of-first-device",
            "`dlm_head` is that of the first row shard, not the sum", "";
        DlmHeadAveraged, "dlm-head-averaged",
            "`dlm_head` is averaged over row shards, as data parallelism does where each has a mean of its own", "";
        DlmHeadShardsSwapped, "dlm-head-shards-swapped",
            "the vocabulary shards of `dlm_head` come back in the wrong order", "";
    }
}
