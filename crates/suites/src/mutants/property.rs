//! What targets each class of bugs: a short list of cases for each, on which all of its mutants fall.

use super::QWEN_VOCABULARY;
use super::bank::Class;
use super::run::Case;
use assay_core::problem::{Dtype, HeadLayout, HeadProblem};
use assay_core::spec::{
    AdvantageLevel, Cispo, Kl, KlEstimator, KlImportance, LossSpec, Objective, OffPolicyMask, OldLogp, PpoClip, Ratio,
    RatioLevel, Reduction, Rows, TemperatureDivides,
};
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::packed::Packable;

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
    LossSpec { temperature: 0.7, temperature_divides, ..bonus() }
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

impl Class {
    /// The cases that target it.
    pub fn property(self) -> Vec<Case> {
        let case = |(spec, recipe)| self.of_layout(Case::generated(self.name(), spec, &recipe));
        self.grid().recipes(true).into_iter().map(case).collect()
    }

    /// The same of heads, in both layouts. Masked hidden states are finite: what they reach is a wrong number, and no NaN.
    pub fn head_property(self) -> Vec<Case<HeadProblem>> {
        let heads = [(HeadLayout::HiddenByVocab, false), (HeadLayout::VocabByHidden, true)];
        let case = |(spec, recipe): (LossSpec, Recipe)| {
            heads.map(|(layout, rounds_logits)| {
                let recipe = HeadRecipe { hidden: WIDTH, layout, rounds_logits, recipe: recipe.clone() };
                self.of_layout(Case::of_head(self.name(), spec.clone(), &recipe))
            })
        };
        self.grid().recipes(false).into_iter().flat_map(case).collect()
    }

    /// The case with its sequences packed, where that is what goes wrong.
    fn of_layout<P: Packable>(self, case: Case<P>) -> Case<P> {
        if self == Class::Packing { case.packed() } else { case }
    }

    /// Its cases at the width that kernels are made for: these sequences and tokens over Qwen's vocabulary.
    pub(super) fn production(self, [batch, tokens]: [usize; 2]) -> Vec<(LossSpec, Recipe)> {
        Grid { shapes: vec![[batch, tokens, QWEN_VOCABULARY]], ..self.grid() }.recipes(true)
    }

    /// The same of a head of `hidden` states a column.
    pub(super) fn head_production(
        self,
        hidden: usize,
        shape: [usize; 3],
        layout: HeadLayout,
    ) -> Vec<(LossSpec, HeadRecipe)> {
        let recipes = Grid { shapes: vec![shape], ..self.grid() }.recipes(false).into_iter();
        recipes.map(|(spec, recipe)| (spec, HeadRecipe { hidden, layout, rounds_logits: false, recipe })).collect()
    }

    #[expect(clippy::too_many_lines, reason = "one arm a class")]
    fn grid(self) -> Grid {
        let k3 = || Kl::plain(0.1, KlEstimator::K3);
        let of_ratio = || Kl { importance: KlImportance::Ratio, ..k3() };
        let by_token = || LossSpec { advantages: AdvantageLevel::Token, ..plain() };
        match self {
            // One column counts as much as another, so that one too few or too many shows.
            Class::Columns => Grid {
                shapes: [1, 255, 257, 513, 600].map(|vocab| [2, 3, vocab]).into(),
                regimes: vec![Regime::Small, Regime::Negative, Regime::ShiftedDown],
                ..Grid::default()
            },
            Class::Maximum => Grid {
                shapes: vec![[4, 6, 515], [2, 4, 1025]],
                regimes: vec![
                    Regime::ShiftedUp,
                    Regime::ShiftedDown,
                    Regime::Negative,
                    Regime::Peaked,
                    Regime::Confident,
                ],
                ..Grid::default()
            },
            Class::Holes => {
                Grid { shapes: vec![[4, 8, 1025], [4, 8, 33]], regimes: vec![Regime::Holes], ..Grid::default() }
            }
            Class::Precision => Grid {
                specs: vec![plain(), tempered(TemperatureDivides::Logits)],
                shapes: vec![[2, 6, 1025], [2, 4, 4099]],
                regimes: vec![Regime::Small, Regime::Normal, Regime::Confident, Regime::ShiftedUp],
                dtypes: Dtype::KERNEL.into(),
                ..Grid::default()
            },
            Class::Gradient => Grid {
                specs: vec![
                    plain(),
                    LossSpec { scale: 0.25, ..plain() },
                    LossSpec { old_logp: OldLogp::Current, ..plain() },
                ],
                dtypes: Dtype::KERNEL.into(),
                ..Grid::default()
            },
            Class::Temperature => Grid {
                specs: [TemperatureDivides::Logits, TemperatureDivides::Logp].map(tempered).into(),
                ..Grid::default()
            },
            Class::Clip => Grid {
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
            Class::Overflow => Grid {
                specs: vec![by_token()],
                shapes: vec![[8, 8, 33], [8, 8, 5], [8, 16, 33]],
                regimes: vec![Regime::Normal, Regime::Small, Regime::Peaked, Regime::Ties],
                noise: 200.0,
                ..Grid::default()
            },
            Class::Kl => Grid {
                specs: [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs]
                    .map(|estimator| penalised(Kl::plain(0.1, estimator)))
                    .into_iter()
                    .chain([penalised(of_ratio()), levelled(RatioLevel::Sequence, penalised(of_ratio()))])
                    .collect(),
                ..Grid::default()
            },
            Class::OffPolicy => Grid {
                specs: vec![LossSpec {
                    off_policy_mask: Some(OffPolicyMask { threshold: 0.02, behaviour: OldLogp::Given }),
                    ..penalised(k3())
                }],
                shapes: vec![[8, 3, 33], [8, 6, 33], [8, 8, 33]],
                regimes: Regime::FINITE.into(),
                ..Grid::default()
            },
            // At the largest vocabulary what is added to each probability adds up.
            Class::Entropy => {
                Grid { shapes: vec![[4, 6, 33], [1, 2, 60_000]], regimes: vec![Regime::Small], ..Grid::default() }
            }
            Class::Mask => Grid { specs: vec![plain(), bonus()], ..Grid::default() },
            Class::Reduction => Grid {
                specs: vec![
                    penalised(k3()),
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
            // Where all tokens of a row have one weight and one advantage, GSPO and GSPO-token are the same.
            Class::SequenceRatio => Grid {
                specs: [RatioLevel::Sequence, RatioLevel::SequenceToken]
                    .into_iter()
                    .flat_map(|level| [levelled(level, plain()), levelled(level, by_token())])
                    .collect(),
                ..Grid::default()
            },
            Class::Packing => Grid {
                specs: vec![
                    plain(),
                    levelled(RatioLevel::Sequence, plain()),
                    reduced(Reduction::SequenceMean { rows: Rows::NonEmpty }),
                ],
                shapes: vec![[6, 6, 33], [8, 3, 33]],
                ..Grid::default()
            },
            Class::Indexing => Grid {
                specs: vec![LossSpec { advantages: AdvantageLevel::Token, ..penalised(k3()) }],
                shapes: vec![[4, 6, 33], [4, 8, 4099], [2, 8, 60_000]],
                ..Grid::default()
            },
            Class::Devices => Grid {
                specs: vec![bonus()],
                shapes: vec![[5, 6, 97], [4, 4, 33]],
                regimes: vec![Regime::Normal, Regime::Peaked, Regime::Confident],
                ..Grid::default()
            },
            Class::State => Grid {
                shapes: vec![[4, 6, 67], [2, 6, 1025]],
                regimes: vec![Regime::Normal, Regime::Peaked, Regime::Confident],
                ..Grid::default()
            },
            // Among five columns tokens of a chunk have the same id.
            Class::HeadChunks => Grid {
                specs: vec![plain(), bonus()],
                shapes: vec![[4, 6, 5], [4, 6, 97]],
                dtypes: vec![Dtype::F32, Dtype::Bf16],
                ..Grid::default()
            },
            Class::HeadProducts => Grid {
                specs: vec![LossSpec { scale: 0.25, ..tempered(TemperatureDivides::Logits) }],
                shapes: vec![[3, 6, 97], [2, 4, 515]],
                dtypes: Dtype::KERNEL.into(),
                ..Grid::default()
            },
            Class::HeadDevices => {
                Grid { shapes: vec![[5, 6, 97], [4, 4, 33]], dtypes: vec![Dtype::F32, Dtype::Bf16], ..Grid::default() }
            }
        }
    }
}

/// No ratio of a generated problem is beyond it.
fn wide_clip() -> PpoClip {
    PpoClip { epsilon_low: 0.9, epsilon_high: 10.0, ..PpoClip::default() }
}
