//! The bank of mutants: [`Bug`] names every change to the correct kernel, and the table `bank.tsv` describes each in one line.

use std::sync::LazyLock;

use crate::kind::MutantKind;

/// A kernel that is wrong on purpose: what [`Specimen`](crate::Specimen) becomes with one bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutant {
    /// The change that makes the correct kernel wrong.
    pub bug: Bug,
    /// Name of the mutant in tables, JSON and options, in kebab case.
    pub name: &'static str,
    /// Kind of the mistake, which decides the property that targets it.
    pub kind: MutantKind,
    /// Description of the wrong computation, in one line.
    pub does: &'static str,
    /// Project, version or issue where the mistake was observed; empty if it is only conceivable.
    pub seen: &'static str,
}

macro_rules! bugs {
    ($($bug:ident)*) => {
        /// One small change to a correct kernel. The line of `bank.tsv` with the variant's name describes it.
        #[expect(missing_docs, reason = "each is described in bank.tsv")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($bug,)*
        }

        /// Every bug with its name, in the order of the table.
        const BUGS: &[(Bug, &str)] = &[$((Bug::$bug, stringify!($bug)),)*];
    };
}

bugs! {
    LastTileSkipped LastTileReadTwice TailZeroPadded TailNanPadded TailReadsNextRow
    TailRepeatsLastColumn TailGradientNotWritten FirstColumnSkipped WholeTilesOnlyInGradient
    FullTileLost FullTileOf1024Lost FullTileOf4096Lost FullTileOf8192Lost FullTileOf16384Lost
    OneColumnTailLost OneColumnTailOf4096Lost TokenTailOf32Lost TokenTailOf128Lost
    AdvantageOfRowModulo32 PersistentGridDropsColumns
    MaxNotSubtracted MaxStartsAtZero SumNotRescaled RescaledTwice MaxOfFirstTile
    GradientWithMaxOfLastTile EntropySumNotShifted
    MaxStartsAtMinusInfinity HoleTimesZero HoleGradientTimesZero
    SumInBf16 SumInF16 ProbabilityRounded TemperatureInLogitsDtype LogpInLogitsDtype
    EntropyInLogitsDtype OldLogpInBf16 GradientAddedInLogitsDtype LogitsInTf32 LogitsInBf16InForward
    TemperatureInLogitsDtypeInForward StochasticRounding EntropyAsDifferenceInBf16
    SmallProbabilitiesFlushed LogpOfClampedProbability ExpByPolynomial TargetCollapses
    NonTargetDropped OneHotForgotten ScaleForgottenInGradient GradientOfLoss RatioDetached
    CurrentNotDetached DlogpSignFlipped SampledColumnUnscaled DlogpOfFirstToken DlogpOfFirstInRow
    DlogpOfNextRow MaxNotDetached
    TemperatureForgotten TemperatureForgottenInGradient TemperatureTwice TemperatureTwiceInGradient
    TemperatureMultiplies TemperatureOnTheWrongSide EntropyWithoutTemperature TemperatureOfFirstRow
    TemperatureForgottenInFirstRow
    LogitScaleForgotten LogitScaleForgottenInGradient SoftcapForgotten SoftcapSlopeForgotten
    SoftcapSlopeOfCapped SoftcapForgottenInBackward SoftcapSlopeNotDivided SoftcapSlopeNotSquared
    SoftcapSlopeOverCap SoftcapBySoftsign TanhNotMultiplied TanhNotDivided SoftcapCuts
    SoftcapBeforeScale SoftcapAfterTemperature SoftcapInLogitsDtype BiasForgotten
    BiasForgottenInBackward BiasOfNextColumn BiasOfTile BiasOfFirstShard BiasAfterScale BiasAfterSoftcap
    ExcludedIdsInSum FirstExcludedIdAlone ExcludedIdsOfShard ExcludedLogitsZeroed
    ExcludedGradientNotZero ExcludedGradientNotWritten PaddingInSum SupportTooLong SupportTooShort
    KeptIdLeftOut KeptIdNotInSum KeptIdForAll KeptIdWithoutGradient
    EpsilonsSwapped ClipIgnored ClipGradientKept ClipOnTheWrongSide ClipWithoutMin DeltaIgnored
    DeltaStopsGradient DualClipIgnored DualClipForPositive DualClipRaisesPositive CispoGradientClipped
    CispoBoundFromOne CispoLowerIgnored CispoWithoutLogp RatioClampIgnored RatioClampGradientKept
    RatioToFirstOrder RatioInverted
    LogClipIgnored LogClipGradientKept LogClipOfBothSides LogClipOnTheWrongSide LogClipOfMean
    LogClipWithoutAdvantage CapIgnored CapGradientKept CapOfTokens CapOfRatio CapOfBothSides
    ToprWeightsSwapped ToprNegativeWeightForgotten ToprRatioForPositive ToprClipIgnored
    ToprClipFromBelow ToprRatioNotDetached ToprGradientClipped ToprSelectedIgnored
    AspoRatioNotInverted AspoInvertedForAll AspoGradientOfInverse AspoEpsilonsSwapped
    AspoSelectedIgnored AspoSelectedReversed AspoClipAfterInverting AspoGradientKept
    AspoDualClipsSwapped AspoDualClipIgnored AspoDualClipOfRatio AspoDualClipWithoutLogp
    SmoothingOverOthers SmoothingNotInGradient SmoothingKeepsTarget SmoothingNotDivided
    ZLossNotInGradient ZLossOfShiftedSum ZLossSlopeHalved
    OverflowingRatioTimesZero ZeroAdvantageTimesRatio
    KlEstimatorsSwapped K1ForAbs K3SignFlipped KlDetached KlSubtracted K3GradientOfK1
    BetaTwiceInGradient KlAgainstOldPolicy BiasCorrectionDetached BiasCorrectionIgnored KlClipped
    KlRatioOfToken KlTokenRatioOfSequence KlTokenRatioDetached KlRolloutIgnored KlRolloutInverted
    KlRolloutOfOldPolicy KlRolloutDetached KlUnscoredAsOne KlUnscoredNan KlScoreForgotten KlScoreAlone
    KlScoreInValue KlK2Ignored KlK2InValue KlK2SignFlipped KlK2WeightForgotten KlK2WeightUnbounded
    KlK2WeightOfSequence
    KlDifferenceClampIgnored KlDifferenceClampGradientKept KlDifferenceClampFromAbove
    KlDifferenceClampOfExp KlK2GradientClamped KlValueClampIgnored KlValueClampGradientKept
    KlValueClampFromAbove KlValueClampOfPenalty KlValueClampOnTheWrongSide KlAveragingIgnored
    KlAveragingOfPolicy KlAveragingNotInGradient KlAveragingCountsEmptyRows
    OffPolicyMaskIgnored OffPolicyMaskForPositive KlMaskedByOffPolicyMask OffPolicyOverWidth
    OffPolicySignFlipped
    SamplerIgnored SamplerShifted SamplerInBf16 OffPolicyOfOldPolicy OffPolicyUnscoredNan
    RolloutIgnored RolloutInverted RolloutNotInGradient RolloutMasks RolloutTruncates RolloutMinIgnored
    RolloutBoundOnLog RolloutClampIgnored RolloutClampAfterExp RolloutSumForMean RolloutMeanForSum
    RolloutMeanOverWidth RolloutOfTokens RolloutGateIgnored RolloutGateByToken RolloutGateTruncates
    RolloutGivenAsIs RolloutNormalisedOverPadding RolloutNormalisedBeforeBounds
    RolloutNormalisedByDevice RolloutNormalisedOverTokens RolloutOnKl RolloutNotOnKl UnscoredNan
    UnscoredOneAsZero UnscoredZeroAsOne UnscoredZeroesTokenAlone UnscoredOutOfMean
    UnscoredOutOfNormaliser UnscoredEscapesBounds UnscoredClosesGate
    RejectionIgnored RejectionOnTheWrongSide RejectionMinIgnored RejectionK1SignFlipped
    RejectionK2NotHalved RejectionK3SignFlipped RejectionKlReversed RejectionKlOfTokenAlone
    RejectionVariationSigned RejectionProbabilityReversed RejectionRatioSigned RejectionSumForMean
    RejectionMeanForSum RejectionMeanOverWidth RejectionMaxForMin RejectionMinForMax RejectionOfTokens
    RejectionCountsMasked RejectedStillCount RejectedDoNotCount RejectionKeepsKl RejectionTakesKl
    RejectedOutOfRollout RejectionOfUnscored FirstRejectionAlone RejectionByAll SecondMomentOfRow
    SecondMomentOfDevice SecondMomentOfToken SecondMomentHalved SecondMomentOfAll
    TokenWeightsIgnored TokenWeightsSquared TokenWeightsAsMask TokenWeightsNotInGradient
    TokenWeightsInDenominator TokenWeightsOnKl TokenWeightsNotOnKl TokenWeightsOfFirstToken
    TokenWeightOfFirstSequence ZeroWeightCounts ZeroWeightOutOfRollout
    EntropyOfShiftedLog EntropyGradientWithoutMean EntropyBonusSubtracted EntropyDetached
    DentropyDropped DentropySignFlipped DentropyOfFirstToken EntropyOverPadding EntropyFromLogpSoftmax
    TopEntropyIgnored TopEntropyAbove TopEntropyLowest TopEntropyOfFraction TopEntropyOverPadding
    TopEntropyOfRow TopEntropyOfDevice TopEntropyNotInterpolated TopEntropyOutOfDenominator
    TopEntropyTakesKl TopEntropyBonusOfAll TopEntropyDropsTheOther TopEntropyMeanOfAll
    SoftmaxOfFirstIdAlone OneHotOfFirstIdAlone RepeatedIdOverwritten DlogpOfFirstId OtherIdsSorted
    OtherIdsStrideOne OtherIdFromEveryShard
    DistillationExchanged DistillationBetaExchanged DistillationMixtureOfLogits
    DistillationSquareForgotten DistillationSquareNotInGradient DistillationTeacherUntempered
    DistillationTeacherEntropyForgotten DistillationTeacherOfNextToken DistillationColumnDropped
    DistillationHoleTimesZero DistillationNotCentred DistillationTailIgnored
    DistillationStudentNotRenormalized
    MaskMultiplied MaskedDlogitsNotZeroed MaskShifted MaskOfFirstRow MaskedTokensInLoss
    NormaliserCountsPadding EmptyRowsCounted EmptyRowsLeftOut LengthFactor SequenceMeanOverTokens
    MeanOfRowMeans LossSummedInBf16 FixedLengthOfWidth GradientNotNormalised NormaliserOfBatchIgnored DenominatorEpsilonForgotten
    LossOfPolicyAlone
    RatioOverWidth RatioOfSum SequenceGradientOfToken TokenGradientOfSequence ShareForgotten
    SequenceRatioOfTokens MeanOfRatios SumOfRatios
    BoundariesLate PackTakenForRow EmptySequenceCountsAToken LastSequenceDropped RolloutOfPack
    RejectionOfPack PackedAdvantageZero SegmentIdsFromOne IdOfNextSequence
    AdvantageOfNeighbour AdvantageOfFirstToken IdOffByOne IdTruncated OffsetOverflows IdOfTile
    RowsTransposed OldLogpShifted RefLogpOfFirstRow
    ShardMaxNotExchanged SumExchangedBeforeRescale EntropySumNotExchanged ChosenNotExchanged
    SumNotExchanged GradientWithOwnSum GradientOfTargetsShard ChosenFromEveryShard ShardOffsetForgotten
    GradientSummedOverShards NormaliserLocal LossOfFirstDevice DeviceRowsPermuted
    AdvantagesOfFirstDevice
    StaleMax StaleSums StaleChosen EntropyReadAfterWrite TargetReadAfterWrite SumInAnyOrder
    LastRowSkipped
    LastChunkDropped ChunkBeginsEarly LastChunkRepeatsLastToken StaleRowsInLastChunk HiddenOfChunkBefore
    HiddenNotGathered MaskedDhiddenNotZeroed SoftmaxOfChunkBefore NormaliserOfChunk DlmHeadOverwritten
    DlmHeadSummedInHeadDtype OneHotOverwritten
    HeadLayoutMistaken DhiddenLayoutMistaken DlmHeadLayoutMistaken LogitsNotRounded LogitsNotRoundedInBackward
    LogitsRounded LogitsSummedInHiddenDtype ProductsInTf32 LogitProductInTf32 DepthTailDropped DhiddenOfLogits DlogitsRounded
    DhiddenLacksTail DlmHeadLacksTail DhiddenSummedInHiddenDtype ScaleForgottenInDlmHead
    TemperatureForgottenInDhidden
    DhiddenOfFirstShard DhiddenRoundedBeforeSum HeadOffsetForgotten DlmHeadOfFirstDevice DlmHeadAveraged
    DlmHeadShardsSwapped
}

/// Every mutant, in the order of the table.
///
/// ```
/// use assay_mutants::BANK;
///
/// let of_masks: Vec<&str> = BANK.iter().filter(|mutant| mutant.kind.name() == "mask").map(|mutant| mutant.name).collect();
/// assert!(of_masks.contains(&"mask-shifted"));
/// // Many of them were observed in trainers.
/// assert!(BANK.iter().filter(|mutant| !mutant.seen.is_empty()).count() > 40);
/// ```
pub static BANK: LazyLock<Vec<Mutant>> = LazyLock::new(|| {
    let lines: Vec<&str> = include_str!("bank.tsv").lines().skip(1).collect();
    assert_eq!(lines.len(), BUGS.len(), "bank.tsv has a line for each bug");
    let mutant = |(line, &(bug, variant)): (&'static str, &(Bug, &str))| {
        let Ok([kind, named, name, does, seen]) = <[&'static str; 5]>::try_from(line.split('\t').collect::<Vec<_>>())
        else {
            panic!("five columns, not {line}")
        };
        assert_eq!(named, variant, "bank.tsv lists bugs in the order of `Bug`");
        let kind = MutantKind::ALL.into_iter().find(|other| other.name() == kind);
        Mutant { bug, name, kind: kind.unwrap_or_else(|| panic!("no kind in {line}")), does, seen }
    };
    lines.into_iter().zip(BUGS).map(mutant).collect()
});
