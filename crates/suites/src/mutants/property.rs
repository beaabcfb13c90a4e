//! The cases that target each kind of bugs: a short list for each, on which all of its mutants fall.

use super::case::MutantCase;
use super::{MutantKind, QWEN_VOCABULARY};
use assay_core::implementation::Workload;
use assay_core::problem::{Dtype, HeadLayout, HeadProblem};
use assay_core::spec::{
    AdvantageLevel, Aspo, Averaging, Cispo, ClipWidths, Distillation, DistillationKind, DroppedTerm, Kl, KlEstimator,
    KlGradient, KlImportance, LogClip, LogitsTransform, LossSpec, LossTerms, Objective, OffPolicyMask, OldLogp,
    OutOfBounds, PositiveTokens, PpoClip, QuantilePrecision, Ratio, RatioLevel, Reduction, Rejection,
    RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights, Rows, Support, Temperature,
    TemperatureDivides, TokenWeights, TopEntropy, TopKRest, Topr, UnscoredWeight,
};
use assay_judge::generate::{HeadRecipe, Recipe, Regime};

/// Hidden units, which no step of a product divides.
const WIDTH: usize = 21;

/// A recipe for every combination.
struct Grid {
    specs: Vec<LossSpec>,
    shapes: Vec<[usize; 3]>,
    regimes: Vec<Regime>,
    dtypes: Vec<Dtype>,
    noise: f64,
}

impl Default for Grid {
    fn default() -> Self {
        Self {
            specs: vec![bonus()],
            shapes: vec![[4, 6, 33]],
            regimes: vec![Regime::Normal],
            dtypes: vec![Dtype::F32],
            noise: 0.3,
        }
    }
}

impl Grid {
    fn recipes(self, masked_garbage: bool) -> Vec<(LossSpec, Recipe)> {
        let Self { specs, shapes, regimes, dtypes, noise } = self;
        let mut recipes = Vec::new();
        for spec in &specs {
            for &shape in &shapes {
                for &regime in &regimes {
                    for &dtype in &dtypes {
                        // The seed is the number of the recipe, so that a case does not depend on the other classes'
                        // cases.
                        let (seed, old_logp_noise_scale) = (recipes.len() as u64, noise);
                        let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale, masked_garbage };
                        recipes.push((spec.clone(), recipe));
                    }
                }
            }
        }
        recipes
    }
}

fn plain() -> LossSpec {
    LossSpec::default()
}

fn bonus() -> LossSpec {
    LossSpec { entropy_coef: 0.02, ..plain() }
}

fn tempered(temperature_divides: TemperatureDivides) -> LossSpec {
    LossSpec { temperature: 0.7.into(), temperature_divides, ..bonus() }
}

fn clipped(clip: PpoClip) -> LossSpec {
    LossSpec { objective: Objective::PpoClip(clip), ..plain() }
}

fn penalised(kl: Kl) -> LossSpec {
    LossSpec { kl: Some(kl), ..plain() }
}

fn reduced(reduction: Reduction) -> LossSpec {
    LossSpec { reduction, ..plain() }
}

fn levelled(level: RatioLevel, spec: LossSpec) -> LossSpec {
    LossSpec { ratio: Ratio { level, ..Ratio::default() }, ..spec }
}

fn k3() -> Kl {
    Kl::plain(0.1, KlEstimator::K3)
}

/// Returns a spec with weights against the sampler in addition to a penalty.
fn rolled(rollout: RolloutWeights) -> LossSpec {
    LossSpec { rollout: Some(rollout), ..penalised(k3()) }
}

/// Returns unbounded rollout weights of one level.
fn weights(level: RolloutLevel) -> RolloutWeights {
    RolloutWeights {
        source: RolloutSource::Logp,
        level,
        outside: OutOfBounds::Truncate,
        min: None,
        max: None,
        clamp: None,
        normalize: false,
        unscored: UnscoredWeight::One,
        applies_to: LossTerms::Policy,
    }
}

/// Returns a spec with rejections in addition to a penalty, whose denominator differs between sequences.
fn rejected(rejection: Vec<Rejection>) -> LossSpec {
    let reduction = Reduction::SequenceMean { rows: Rows::All };
    LossSpec { rejection, reduction, ..penalised(k3()) }
}

fn rejection(estimator: RejectionEstimator, level: RejectionLevel, min: Option<f64>, max: f64) -> Rejection {
    Rejection { estimator, level, min, max, counts: false, drops_from: LossTerms::PolicyAndKl }
}

fn token_weighed(applies_to: LossTerms, spec: LossSpec) -> LossSpec {
    LossSpec { token_weights: Some(TokenWeights { applies_to }), ..spec }
}

/// The cases that target a class.
pub fn property(class: MutantKind) -> Vec<MutantCase> {
    let case = |(spec, recipe)| packed_where_needed(class, MutantCase::generated(class.name(), spec, &recipe));
    grid(class).recipes(true).into_iter().map(case).collect()
}

/// Returns the cases of heads in both layouts. Masked hidden states are finite, as they make a wrong number and no NaN.
pub fn head_property(class: MutantKind) -> Vec<MutantCase<HeadProblem>> {
    let heads = [(HeadLayout::HiddenByVocab, false), (HeadLayout::VocabByHidden, true)];
    let case = |(spec, recipe): (LossSpec, Recipe)| {
        heads.map(|(layout, rounds_logits)| {
            let recipe = HeadRecipe { hidden: WIDTH, layout, rounds_logits, recipe: recipe.clone() };
            packed_where_needed(class, MutantCase::with_head(class.name(), spec.clone(), &recipe))
        })
    };
    grid(class).recipes(false).into_iter().flat_map(case).collect()
}

/// Packs the sequences of the case if the class is about packing.
fn packed_where_needed<P: Workload>(class: MutantKind, case: MutantCase<P>) -> MutantCase<P> {
    if class == MutantKind::Packing { case.packed() } else { case }
}

/// Returns the cases of a class over Qwen's vocabulary, with the given sequences and tokens.
pub(super) fn production(class: MutantKind, [batch, tokens]: [usize; 2]) -> Vec<(LossSpec, Recipe)> {
    Grid { shapes: vec![[batch, tokens, QWEN_VOCABULARY]], ..grid(class) }.recipes(true)
}

/// Returns the cases of a class over Qwen's vocabulary, with a head of `hidden` states a column.
pub(super) fn head_production(
    class: MutantKind,
    hidden: usize,
    shape: [usize; 3],
    layout: HeadLayout,
) -> Vec<(LossSpec, HeadRecipe)> {
    let recipes = Grid { shapes: vec![shape], ..grid(class) }.recipes(false).into_iter();
    recipes.map(|(spec, recipe)| (spec, HeadRecipe { hidden, layout, rounds_logits: false, recipe })).collect()
}

#[expect(clippy::too_many_lines, reason = "one arm a class")]
fn grid(class: MutantKind) -> Grid {
    let of_ratio = || Kl { importance: KlImportance::Ratio, ..k3() };
    let by_token = || LossSpec { advantages: AdvantageLevel::Token, ..plain() };
    match class {
        // One column counts as much as another, so that one too few or too many shows.
        MutantKind::Columns => Grid {
            shapes: [1, 255, 257, 513, 600].map(|vocab| [2, 3, vocab]).into(),
            regimes: vec![Regime::Small, Regime::Negative, Regime::ShiftedDown],
            ..Grid::default()
        },
        // Sizes that a tile or a block divides, or exceeds by one, and more sequences, tokens and rows than a grid counts.
        MutantKind::Sizes => Grid {
            shapes: vec![
                [1, 2, 256],
                [1, 2, 1024],
                [1, 1, 16_384],
                [1, 2, 4097],
                [12, 63, 8],
                [12, 255, 8],
                [40, 1, 8],
                [67, 2, 1100],
            ],
            ..Grid::default()
        },
        // Blocks and tiles are powers of two: 515 and 1,025 columns leave a rest after each.
        MutantKind::Maximum => Grid {
            shapes: vec![[4, 6, 515], [2, 4, 1025]],
            regimes: vec![Regime::ShiftedUp, Regime::ShiftedDown, Regime::Negative, Regime::Peaked, Regime::Confident],
            ..Grid::default()
        },
        // A first half of nothing but −∞ spans whole tiles at 1,025 columns.
        MutantKind::Holes => {
            Grid { shapes: vec![[4, 8, 1025], [4, 8, 33]], regimes: vec![Regime::Holes], ..Grid::default() }
        }
        // Sums of many small terms show a narrow accumulator, large logits a missing conversion.
        MutantKind::Precision => Grid {
            specs: vec![plain(), tempered(TemperatureDivides::Logits)],
            shapes: vec![[2, 6, 1025], [2, 4, 4099]],
            regimes: vec![Regime::Small, Regime::Normal, Regime::Confident, Regime::ShiftedUp],
            dtypes: Dtype::KERNEL.into(),
            ..Grid::default()
        },
        MutantKind::Gradient => Grid {
            specs: vec![
                plain(),
                LossSpec { scale: 0.25, ..plain() },
                LossSpec { old_logp: OldLogp::Current, ..plain() },
                LossSpec { temperature: 0.7.into(), ..LossSpec::from_cotangents(false) },
            ],
            dtypes: Dtype::KERNEL.into(),
            ..Grid::default()
        },
        MutantKind::Temperature => Grid {
            specs: [TemperatureDivides::Logits, TemperatureDivides::Logp]
                .map(tempered)
                .into_iter()
                .chain([
                    LossSpec { temperature: 0.7.into(), ..LossSpec::from_cotangents(true) },
                    LossSpec { temperature: Temperature::Given, ..bonus() },
                ])
                .collect(),
            ..Grid::default()
        },
        // A cap that all logits are near to bends them; where a bias and a scale come before it, their order shows.
        MutantKind::Logits => {
            let changed = |scale, softcap, bias| LossSpec {
                logits: LogitsTransform { scale, softcap, bias },
                ..tempered(TemperatureDivides::Logits)
            };
            Grid {
                specs: vec![changed(0.5, None, true), changed(1.7, Some(3.0), false), changed(0.5, Some(2.0), true)],
                shapes: vec![[3, 5, 33], [2, 3, 600]],
                dtypes: vec![Dtype::F32, Dtype::Bf16],
                ..Grid::default()
            }
        }
        // Few tokens' ids are outside the support, where it keeps the sampled ones.
        MutantKind::Support => {
            let over = |vocab, excluded_ids, keep_sampled| LossSpec {
                support: Support { vocab, excluded_ids, keep_sampled, kept: None },
                ..bonus()
            };
            Grid {
                specs: vec![
                    over(Some(30), Vec::new(), false),
                    over(None, vec![1, 7], false),
                    over(Some(20), vec![3, 18], true),
                ],
                shapes: vec![[4, 6, 33], [6, 8, 33]],
                regimes: vec![Regime::Small, Regime::Normal],
                ..Grid::default()
            }
        }
        // Widths and bounds differ between the two sides, so that an exchange of the two shows.
        MutantKind::Clip => Grid {
            specs: vec![
                clipped(PpoClip { epsilon_low: 0.1, epsilon_high: 0.4, ..PpoClip::default() }),
                clipped(PpoClip { epsilon_high: 0.7, delta: Some(1.1), ..PpoClip::default() }),
                clipped(PpoClip { epsilon_high: 0.7, dual_clip: Some(1.1), ..PpoClip::default() }),
                LossSpec { objective: Objective::Cispo(Cispo { lower: Some(0.8), upper: 1.3 }), ..plain() },
                LossSpec { ratio: Ratio { clamp: Some(0.25), ..Ratio::default() }, ..clipped(wide_clip()) },
            ],
            regimes: vec![Regime::Normal, Regime::Ties],
            ..Grid::default()
        },
        // Advantages by token give a row some of either sign, and some of 0.
        MutantKind::LogClip => {
            let of = |ratio| LossSpec { ratio, objective: Objective::PpoClip(wide_clip()), ..by_token() };
            let clip = Some(LogClip { low: 0.2, high: 0.1 });
            Grid {
                specs: vec![
                    of(Ratio { clip, ..Ratio::default() }),
                    of(Ratio { clip, level: RatioLevel::Sequence, ..Ratio::default() }),
                    of(Ratio { cap: Some(0.1), ..Ratio::default() }),
                    of(Ratio { cap: Some(0.05), level: RatioLevel::Sequence, ..Ratio::default() }),
                ],
                shapes: vec![[8, 6, 5]],
                ..Grid::default()
            }
        }
        MutantKind::Topr => {
            let of = |positive| {
                let topr = Topr { positive_weight: 1.3, negative_weight: 0.7, upper: 1.1, positive };
                LossSpec { objective: Objective::Topr(topr), ..by_token() }
            };
            Grid { specs: vec![of(PositiveTokens::Advantage), of(PositiveTokens::Selected)], ..Grid::default() }
        }
        MutantKind::Aspo => {
            let of = |selected| {
                let [dual_clip_positive, dual_clip_negative] = [1.3, 1.4];
                let aspo =
                    Aspo { epsilon_low: 0.1, epsilon_high: 0.3, selected, dual_clip_positive, dual_clip_negative };
                LossSpec { objective: Objective::Aspo(aspo), ..by_token() }
            };
            Grid {
                specs: vec![of(None), of(Some(ClipWidths { epsilon_low: 0.3, epsilon_high: 0.1 }))],
                shapes: vec![[4, 6, 33], [8, 8, 33]],
                ..Grid::default()
            }
        }
        // Few columns, so that a share of one of them shows.
        MutantKind::CrossEntropy => {
            let of = |label_smoothing, z_loss, token_weights| LossSpec {
                token_weights,
                ..LossSpec::cross_entropy(label_smoothing, z_loss)
            };
            let weights = Some(TokenWeights { applies_to: LossTerms::Policy });
            Grid {
                specs: vec![of(0.1, 0.0, None), of(0.0, 0.01, None), of(0.2, 0.001, weights)],
                shapes: vec![[4, 6, 33], [4, 6, 5]],
                regimes: vec![Regime::Normal, Regime::Small],
                ..Grid::default()
            }
        }
        // Noise of 200 nats makes ratios that overflow f32 in one direction and vanish in the other.
        MutantKind::Overflow => Grid {
            specs: vec![by_token()],
            shapes: vec![[8, 8, 33], [8, 8, 5], [8, 16, 33]],
            regimes: vec![Regime::Normal, Regime::Small, Regime::Peaked, Regime::Ties],
            noise: 200.0,
            ..Grid::default()
        },
        MutantKind::Kl => Grid {
            specs: [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs]
                .map(|estimator| penalised(Kl::plain(0.1, estimator)))
                .into_iter()
                .chain([penalised(of_ratio()), levelled(RatioLevel::Sequence, penalised(of_ratio()))])
                .collect(),
            ..Grid::default()
        },
        MutantKind::KlWeight => {
            let weighs = |importance| penalised(Kl { importance, ..k3() });
            let with_gradient = |gradient| penalised(Kl { gradient, ..k3() });
            Grid {
                specs: vec![
                    levelled(RatioLevel::Sequence, weighs(KlImportance::Ratio)),
                    levelled(RatioLevel::Sequence, weighs(KlImportance::TokenRatio)),
                    weighs(KlImportance::Rollout),
                    weighs(KlImportance::Score),
                    with_gradient(KlGradient::K2),
                    levelled(RatioLevel::Sequence, with_gradient(KlGradient::K2Weighted(1.1))),
                ],
                // A token in twenty has no score of the sampler's.
                shapes: vec![[8, 8, 33]],
                ..Grid::default()
            }
        }
        MutantKind::KlClamp => {
            let k1 = Kl::plain(0.1, KlEstimator::K1);
            let held = |kl| Kl { difference_clamp: Some(0.2), ..kl };
            let averaging =
                Averaging { reduction: Reduction::SequenceMean { rows: Rows::NonEmpty }, denominator_epsilon: 0.0 };
            let of_product = Kl { value_clamp: Some(0.02), clamp_after_importance: true, ..of_ratio() };
            Grid {
                specs: vec![
                    penalised(held(k3())),
                    penalised(Kl { gradient: KlGradient::K2, ..held(k3()) }),
                    penalised(Kl { value_clamp: Some(0.2), ..k1 }),
                    penalised(Kl { value_clamp: Some(0.02), ..of_ratio() }),
                    penalised(of_product),
                    penalised(Kl { averaging: Some(averaging), ..k3() }),
                ],
                ..Grid::default()
            }
        }
        MutantKind::Sampler => {
            let from = OffPolicyMask { threshold: 0.02, behaviour: OldLogp::Rollout };
            Grid {
                specs: vec![
                    LossSpec { old_logp: OldLogp::Rollout, ..plain() },
                    LossSpec { off_policy_mask: Some(from), ..plain() },
                ],
                // A token in twenty has no score of the sampler's; the larger batch has some in every regime.
                shapes: vec![[4, 6, 5], [32, 8, 5]],
                ..Grid::default()
            }
        }
        MutantKind::OffPolicy => Grid {
            specs: vec![LossSpec {
                off_policy_mask: Some(OffPolicyMask { threshold: 0.02, behaviour: OldLogp::Given }),
                ..penalised(k3())
            }],
            shapes: vec![[8, 3, 33], [8, 6, 33], [8, 8, 33]],
            regimes: Regime::FINITE.into(),
            ..Grid::default()
        },
        MutantKind::Rollout => {
            let (token, sequence) = (weights(RolloutLevel::Token), weights(RolloutLevel::Sequence));
            let geometric = weights(RolloutLevel::Geometric);
            let gated =
                RolloutWeights { min: Some(0.95), max: Some(1.05), ..weights(RolloutLevel::TokenGatedByGeometric) };
            let given = RolloutWeights { source: RolloutSource::Given, ..geometric.clone() };
            let all = vec![
                RolloutWeights { max: Some(1.1), ..token.clone() },
                RolloutWeights { min: Some(0.9), max: Some(1.1), outside: OutOfBounds::Mask, ..token.clone() },
                RolloutWeights { min: Some(0.9), unscored: UnscoredWeight::Zero, ..token.clone() },
                RolloutWeights { clamp: Some(0.2), applies_to: LossTerms::PolicyAndKl, ..token.clone() },
                RolloutWeights { max: Some(1.2), normalize: true, unscored: UnscoredWeight::Zero, ..token.clone() },
                sequence.clone(),
                RolloutWeights { normalize: true, unscored: UnscoredWeight::Zero, ..sequence },
                RolloutWeights { min: Some(0.97), max: Some(1.03), ..geometric },
                gated.clone(),
                RolloutWeights { unscored: UnscoredWeight::Zero, ..gated },
                given,
            ];
            // A token in twenty has no score of the sampler's.
            Grid { specs: all.into_iter().map(rolled).collect(), shapes: vec![[9, 8, 33]], ..Grid::default() }
        }
        MutantKind::Rejection => {
            use RejectionEstimator::{AbsoluteRatio, BinaryKl, K1, K2, K3, Probability, TotalVariation};
            use RejectionLevel::{SecondMoment, SequenceMax, SequenceMean, SequenceMin, SequenceSum, Token};
            let of_rows = rejection(AbsoluteRatio, SequenceMean, None, 1.25);
            let counted = |drops_from| Rejection { counts: true, drops_from, ..rejection(K2, Token, None, 0.03) };
            let mut all: Vec<LossSpec> = [
                rejection(K2, Token, None, 0.03),
                rejection(K1, Token, Some(-0.2), 0.4),
                rejection(K3, Token, None, 0.03),
                rejection(BinaryKl, Token, Some(0.0005), 0.002),
                rejection(BinaryKl, Token, Some(0.001), 0.006),
                rejection(TotalVariation, Token, None, 0.005),
                rejection(Probability, Token, Some(-0.02), 0.003),
                rejection(K2, SequenceSum, None, 0.15),
                rejection(K2, SequenceMean, None, 0.04),
                rejection(K1, SequenceMax, None, 0.3),
                rejection(K1, SequenceMin, Some(-0.3), 1.0),
                rejection(K2, SecondMoment, None, 0.05),
                of_rows,
                counted(LossTerms::Policy),
                counted(LossTerms::PolicyAndKl),
            ]
            .map(|rejection| rejected(vec![rejection]))
            .into();
            all.push(rejected(vec![rejection(K1, Token, Some(-0.2), 0.4), of_rows]));
            let normalised = RolloutWeights { normalize: true, ..weights(RolloutLevel::Token) };
            all.push(LossSpec { rollout: Some(normalised), ..rejected(vec![rejection(K2, Token, None, 0.03)]) });
            // Vocabularies of five have some large probabilities, at which the two directions of a divergence are far
            // apart.
            Grid { specs: all, shapes: vec![[9, 8, 33], [9, 8, 5]], ..Grid::default() }
        }
        MutantKind::TokenWeights => {
            let normalised = RolloutWeights { normalize: true, ..weights(RolloutLevel::Token) };
            Grid {
                specs: vec![
                    token_weighed(LossTerms::Policy, penalised(k3())),
                    token_weighed(LossTerms::PolicyAndKl, penalised(k3())),
                    token_weighed(LossTerms::Policy, rolled(normalised)),
                ],
                ..Grid::default()
            }
        }
        // The largest vocabulary sums up what a mutant adds to each probability.
        MutantKind::Entropy => {
            let specs = vec![bonus(), LossSpec::from_cotangents(true)];
            let shapes = vec![[4, 6, 33], [1, 2, 60_000]];
            Grid { specs, shapes, regimes: vec![Regime::Small], ..Grid::default() }
        }
        // A batch with one token more than a multiple of five has a token that is the quantile itself.
        MutantKind::TopEntropy => {
            let of = |drops, spec| {
                let top = TopEntropy { fraction: 0.4, drops, precision: QuantilePrecision::Exact };
                LossSpec { top_entropy: Some(top), ..spec }
            };
            Grid {
                specs: vec![
                    of(DroppedTerm::PolicyTerm, LossSpec { entropy_coef: 0.02, ..penalised(k3()) }),
                    of(DroppedTerm::Ratio, levelled(RatioLevel::Sequence, plain())),
                ],
                shapes: vec![[4, 6, 5], [5, 6, 5], [1, 1, 5]],
                ..Grid::default()
            }
        }
        // A shard has two columns: some ids repeat, and some are in the other one.
        MutantKind::Several => Grid {
            specs: vec![LossSpec { temperature: 0.7.into(), ids_per_token: 3, ..LossSpec::from_cotangents(true) }],
            shapes: vec![[3, 4, 5], [2, 3, 33]],
            ..Grid::default()
        },
        // The teacher's regime goes by the seed, which is the number of the recipe: seven problems of each spec meet all of them.
        MutantKind::Distillation => {
            let all = |of: Distillation| {
                let kinds = [
                    Distillation { kind: DistillationKind::ForwardKl, beta: None, ..of.clone() },
                    Distillation { kind: DistillationKind::ReverseKl, beta: None, ..of.clone() },
                    Distillation { kind: DistillationKind::JensenShannon, beta: Some(0.1), ..of },
                ];
                kinds.map(|of| LossSpec { temperature: 2.0.into(), ..LossSpec::distillation(of) })
            };
            let top = |rest| Distillation { top_k: Some(6), rest: Some(rest), ..Distillation::default() };
            let squared = Distillation { temperature_squared: true, ..Distillation::default() };
            let teachers = [squared, top(TopKRest::Tail), top(TopKRest::Renormalized), top(TopKRest::Ignored)];
            Grid {
                specs: teachers.into_iter().flat_map(all).collect(),
                shapes: vec![[4, 6, 33]],
                regimes: [
                    Regime::Normal,
                    Regime::Small,
                    Regime::Peaked,
                    Regime::Holes,
                    Regime::Normal,
                    Regime::Ties,
                    Regime::Sampled,
                ]
                .into(),
                ..Grid::default()
            }
        }
        MutantKind::Mask => Grid { specs: vec![plain(), bonus(), LossSpec::from_cotangents(true)], ..Grid::default() },
        MutantKind::Reduction => Grid {
            specs: vec![
                penalised(k3()),
                LossSpec::cross_entropy(0.0, 0.0),
                reduced(Reduction::SequenceMean { rows: Rows::All }),
                reduced(Reduction::SequenceMean { rows: Rows::NonEmpty }),
                reduced(Reduction::SequenceSum { rows: Rows::All }),
                reduced(Reduction::FixedLength { rows: Rows::All, length: Some(1024) }),
                reduced(Reduction::Normalizer(64.0)),
                LossSpec { denominator_epsilon: 0.5, ..reduced(Reduction::SequenceMean { rows: Rows::All }) },
            ],
            shapes: vec![[6, 3, 33]],
            regimes: vec![Regime::Normal, Regime::Ties],
            ..Grid::default()
        },
        // A row whose tokens have one weight and one advantage has the same gradient under GSPO and GSPO-token, so
        // others are needed.
        MutantKind::SequenceRatio => Grid {
            specs: [RatioLevel::Sequence, RatioLevel::SequenceToken, RatioLevel::SequenceProduct]
                .into_iter()
                .flat_map(|level| [levelled(level, plain()), levelled(level, by_token())])
                .collect(),
            ..Grid::default()
        },
        MutantKind::Packing => Grid {
            specs: vec![
                plain(),
                levelled(RatioLevel::Sequence, plain()),
                reduced(Reduction::SequenceMean { rows: Rows::NonEmpty }),
                rolled(weights(RolloutLevel::Geometric)),
                rejected(vec![rejection(RejectionEstimator::K2, RejectionLevel::SequenceMean, None, 0.04)]),
            ],
            shapes: vec![[6, 6, 33], [8, 3, 33]],
            ..Grid::default()
        },
        MutantKind::Indexing => Grid {
            specs: vec![LossSpec { advantages: AdvantageLevel::Token, ..penalised(k3()) }],
            shapes: vec![[4, 6, 33], [4, 8, 4099], [2, 8, 60_000]],
            ..Grid::default()
        },
        MutantKind::Devices => Grid {
            specs: vec![bonus()],
            shapes: vec![[5, 6, 97], [4, 4, 33]],
            regimes: vec![Regime::Normal, Regime::Peaked, Regime::Confident],
            ..Grid::default()
        },
        MutantKind::State => Grid {
            shapes: vec![[4, 6, 67], [2, 6, 1025]],
            regimes: vec![Regime::Normal, Regime::Peaked, Regime::Confident],
            ..Grid::default()
        },
        // A vocabulary of five gives tokens of one chunk the same id.
        MutantKind::HeadChunks => Grid {
            specs: vec![plain(), bonus()],
            shapes: vec![[4, 6, 5], [4, 6, 97]],
            dtypes: vec![Dtype::F32, Dtype::Bf16],
            ..Grid::default()
        },
        MutantKind::HeadProducts => Grid {
            specs: vec![LossSpec { scale: 0.25, ..tempered(TemperatureDivides::Logits) }],
            shapes: vec![[3, 6, 97], [2, 4, 515]],
            dtypes: Dtype::KERNEL.into(),
            ..Grid::default()
        },
        MutantKind::HeadDevices => {
            Grid { shapes: vec![[5, 6, 97], [4, 4, 33]], dtypes: vec![Dtype::F32, Dtype::Bf16], ..Grid::default() }
        }
    }
}

/// No ratio of a generated problem is beyond it.
fn wide_clip() -> PpoClip {
    PpoClip { epsilon_low: 0.9, epsilon_high: 10.0, ..PpoClip::default() }
}
