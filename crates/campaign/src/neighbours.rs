//! Finds which loss a kernel computes instead of the requested one, by trying the losses one option away against its
//! numbers.

use assay_core::problem::Candidate;
use assay_core::spec::presets::{self, BatchInputs, Preset, PresetOptions};
use assay_core::spec::{
    CrossEntropy, Distillation, DistillationKind, Kl, KlEstimator, KlGradient, KlImportance, LogitsTransform, LossSpec,
    LossTerms, Objective, OldLogp, RatioLevel, Reduction, Rows, SoftmaxRange, Support, Temperature, TemperatureDivides,
    TopKRest,
};
use assay_judge::gate::Output;
use assay_judge::judge::Verdict;
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::Limits;

/// A loss whose numbers a kernel has.
#[derive(Clone, Debug, PartialEq)]
pub struct ComputedLoss {
    /// The changed options, starting from the loss that was asked for.
    pub names: Vec<String>,
    /// The loss that the kernel appears to compute.
    pub spec: LossSpec,
}

/// Names a loss by its first name, and one more that a reader may know better: `reduction: token_mean (trl loss_type=dapo)`.
pub fn short_name(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [one] => one.clone(),
        [first, others @ ..] => {
            let known = others.iter().find(|name| name.contains("loss_type=")).unwrap_or(&others[0]);
            format!("{first} ({known})")
        }
    }
}

/// Returns those of `specs` whose reference agrees with every candidate at all gates: the losses that the kernel may
/// compute. Equal losses are adjacent.
pub fn computed<P: Judgeable>(
    specs: Vec<ComputedLoss>,
    answers: &[(&P, &Candidate<P::Gradient>)],
    limits: &Limits,
) -> Vec<ComputedLoss> {
    // Whether a candidate's numbers are those of `spec`, and if so, whether a gradient was among those that were compared.
    let comes_to = |spec: &LossSpec, problem: &P, candidate: &Candidate<P::Gradient>| {
        // A loss that this problem cannot have, for lack of an input, is not what the kernel computes.
        let reference = problem.evaluate(spec).ok()?;
        // Most losses differ in the loss itself, which is compared in a small part of the time that a gradient takes.
        if is_far(problem, &reference, candidate, limits) {
            return None;
        }
        let verdicts = problem.judge(&reference, &candidate.lend(), limits).ok()?;
        verdicts.iter().all(Verdict::passed).then(|| verdicts.iter().any(Verdict::compared_a_gradient))
    };
    let all = |of: &ComputedLoss| {
        let compared: Option<Vec<bool>> =
            answers.iter().map(|(problem, candidate)| comes_to(&of.spec, problem, candidate)).collect();
        // Agreement without any compared gradient proves nothing: a zero gradient fits many losses.
        compared.is_some_and(|compared| compared.contains(&true))
    };
    specs.into_iter().filter(all).collect()
}

/// Error / limit of a loss that no form of the formula explains: a long sum in lanes is off by a few times the limit.
const FAR: f64 = 16.0;

/// Whether the loss of a candidate is far from the exact one, as it is if the kernel computes another.
fn is_far<P: Judgeable>(
    problem: &P,
    reference: &P::Reference<'_>,
    candidate: &Candidate<P::Gradient>,
    limits: &Limits,
) -> bool {
    let Some(loss) = &candidate.loss else { return false };
    let forward = Candidate {
        loss: Some(loss.clone()),
        gradient: (),
        logp: None,
        logp_of_others: None,
        entropy: None,
        token_loss: None,
        metrics: None,
    };
    let Ok(verdicts) = problem.judge_forward(reference, &forward, &limits.alone()) else { return false };
    verdicts.iter().any(|verdict| verdict.gate.output == Output::Loss && verdict.tally.badness() > FAR)
}

/// The losses one option away from `asked`; where it is a project's, with one other option of that project's; and what every
/// project computes by default. Of equal losses there is one, under all its names; `asked` is not among them.
pub fn neighbours(asked: &LossSpec, project: Option<(Preset, &[String])>) -> Vec<ComputedLoss> {
    let mut all: Vec<ComputedLoss> = Vec::new();
    let mut add = |name: String, spec: LossSpec| {
        if spec == *asked || spec.check().is_err() {
            return;
        }
        match all.iter_mut().find(|other| other.spec == spec) {
            Some(other) if other.names.contains(&name) => {}
            Some(other) => other.names.push(name),
            None => all.push(ComputedLoss { names: vec![name], spec }),
        }
    };
    // A project's own options come first: they name the mistake in the words of whoever configured it.
    if let Some((preset, options)) = project {
        for &(option, values) in OPTIONS {
            let others = || options.iter().filter(|pair| pair.split('=').next() != Some(option)).cloned();
            for value in values {
                let changed = format!("{option}={value}");
                let pairs: Vec<String> = others().chain([changed.clone()]).collect();
                if let Some(spec) = preset_spec(preset, None, &pairs) {
                    add(changed, spec);
                }
            }
        }
    }
    for (name, spec) in one_field_away(asked) {
        // Then single fields of the spec, for mistakes that no project's option describes.
        add(name, spec);
    }
    // Then what each project computes by default, and under each `loss_type`.
    for preset in Preset::ALL {
        let usual = preset_spec(preset, None, &[]);
        for function in preset.functions() {
            let Some(spec) = preset_spec(preset, Some(function), &[]) else { continue };
            let is_usual = *function == preset.functions()[0];
            let name = if is_usual { preset.versioned() } else { format!("{} {function}", preset.versioned()) };
            // Functions of one default have one name.
            if is_usual || usual.as_ref() != Some(&spec) {
                add(format!("the default of {name}"), spec);
            }
        }
        for loss_type in LOSS_TYPES {
            let pair = format!("loss_type={loss_type}");
            if let Some(spec) = preset_spec(preset, None, &[pair]) {
                add(format!("{} loss_type={loss_type}", preset.versioned()), spec);
            }
        }
    }
    all
}

/// `loss_type` of TRL, Liger and Unsloth.
const LOSS_TYPES: &[&str] = &["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"];

/// Options that choose a loss, with what they may be. A project passes over those that it does not have.
const OPTIONS: &[(&str, &[&str])] = &[
    ("loss_type", LOSS_TYPES),
    ("importance_sampling_level", &["token", "sequence"]),
    ("use_bias_correction_kl", &["true", "false"]),
    ("loss_agg_mode", &["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
    ("kl_loss_type", &["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]),
    ("loss_algo", &["grpo", "gspo-token"]),
    ("loss_reduction", &["token_mean", "sequence_mean", "seq_mean_token_sum_norm"]),
    ("token_level_loss", &["true", "false"]),
];

fn preset_spec(preset: Preset, function: Option<&str>, pairs: &[String]) -> Option<LossSpec> {
    let options = PresetOptions::from_pairs(pairs).ok()?;
    presets::spec(preset, function, &options, &BatchInputs::default()).ok().map(|resolved| resolved.spec)
}

/// Every setting that is often taken for another, changed alone.
fn one_field_away(asked: &LossSpec) -> Vec<(String, LossSpec)> {
    let mut all = Vec::new();
    let mut add = |name: &str, change: &dyn Fn(&mut LossSpec)| {
        let mut spec = asked.clone();
        // Every neighbour differs from `asked` in one setting: a kernel that computes its numbers has that setting
        // wrong. Changes that change nothing, as the setting was so already, are sorted out by the caller.
        change(&mut spec);
        all.push((name.to_string(), spec));
    };
    for (name, reduction) in [
        ("reduction: token_mean", Reduction::TokenMean),
        ("reduction: sequence_mean over all rows", Reduction::SequenceMean { rows: Rows::All }),
        ("reduction: sequence_mean over rows with a token", Reduction::SequenceMean { rows: Rows::NonEmpty }),
        ("reduction: sequence_sum over all rows", Reduction::SequenceSum { rows: Rows::All }),
        ("reduction: sequence_sum over rows with a token", Reduction::SequenceSum { rows: Rows::NonEmpty }),
        ("reduction: every token of the padded width", Reduction::FixedLength { rows: Rows::All, length: None }),
        ("reduction: the sum of all tokens", Reduction::Normalizer(1.0)),
    ] {
        add(name, &|spec| spec.reduction = reduction);
    }
    if let Objective::PpoClip(clip) = &asked.objective {
        let with = |change: &dyn Fn(&mut assay_core::spec::PpoClip)| {
            let mut clip = clip.clone();
            change(&mut clip);
            Objective::PpoClip(clip)
        };
        let swapped = with(&|of| (of.epsilon_low, of.epsilon_high) = (of.epsilon_high, of.epsilon_low));
        add("epsilon_low and epsilon_high swapped", &|spec| spec.objective = swapped.clone());
        let symmetric = with(&|of| of.epsilon_high = of.epsilon_low);
        add("epsilon_high: that of epsilon_low", &|spec| spec.objective = symmetric.clone());
        // A ratio is at least 0, and of one that is clipped at 1e30 nothing is left of f32.
        let unbounded = with(&|of| of.epsilon_low = 1.0);
        add("no clip below", &|spec| spec.objective = unbounded.clone());
        let unbounded = with(&|of| of.epsilon_high = 1e30);
        add("no clip above", &|spec| spec.objective = unbounded.clone());
        let unbounded = with(&|of| (of.epsilon_low, of.epsilon_high) = (1.0, 1e30));
        add("no clip", &|spec| spec.objective = unbounded.clone());
        let plain = with(&|of| of.delta = None);
        add("no delta", &|spec| spec.objective = plain.clone());
        let plain = with(&|of| of.dual_clip = None);
        add("no dual_clip", &|spec| spec.objective = plain.clone());
    }
    objective_neighbours(&asked.objective, &mut add);
    distillation_neighbours(asked, &mut add);
    for (name, level) in [
        ("ratio.level: token", RatioLevel::Token),
        ("ratio.level: sequence", RatioLevel::Sequence),
        ("ratio.level: sequence_token", RatioLevel::SequenceToken),
        ("ratio.level: sequence_product", RatioLevel::SequenceProduct),
    ] {
        add(name, &|spec| spec.ratio.level = level);
    }
    add("ratio without clamp, clip and cap", &|spec| {
        (spec.ratio.clamp, spec.ratio.clip, spec.ratio.cap) = (None, None, None);
    });
    add("old_logp: current, a ratio of 1", &|spec| spec.old_logp = OldLogp::Current);
    // The KL term has the most settings, and its neighbours are listed apart.
    kl_neighbours(asked, &mut add);
    add("no entropy bonus", &|spec| spec.entropy_coef = 0.0);
    add("no cotangent of the entropy", &|spec| spec.dentropy = false);
    add("entropy bonus of the other sign", &|spec| spec.entropy_coef = -spec.entropy_coef);
    // A temperature is mistaken for its reciprocal by a kernel that multiplies with it, and for its square by one that
    // divides twice.
    add("temperature: 1", &|spec| spec.temperature = Temperature::ONE);
    if let Some(temperature) = asked.temperature.number() {
        for (name, other) in
            [("temperature: its reciprocal", 1.0 / temperature), ("temperature: its square", temperature * temperature)]
        {
            add(name, &|spec| spec.temperature = other.into());
        }
    }
    for (name, divides) in [
        ("temperature_divides: logits", TemperatureDivides::Logits),
        ("temperature_divides: logp", TemperatureDivides::Logp),
    ] {
        add(name, &|spec| spec.temperature_divides = divides);
    }
    add("scale: 1", &|spec| spec.scale = 1.0);
    add("logits without scale, softcap and bias", &|spec| spec.logits = LogitsTransform::default());
    add("logits without softcap", &|spec| spec.logits.softcap = None);
    add("support: every column", &|spec| spec.support = Support::default());
    for range in [SoftmaxRange::Set, SoftmaxRange::Vocabulary] {
        let text = if range == SoftmaxRange::Set { "the kept set" } else { "the vocabulary" };
        add(&format!("entropy over {text}"), &|spec| {
            spec.support.kept.iter_mut().for_each(|kept| kept.entropy = range);
        });
        add(&format!("kl over {text}"), &|spec| spec.support.kept.iter_mut().for_each(|kept| kept.kl = range));
    }
    add("no rollout weights", &|spec| spec.rollout = None);
    add("rollout.applies_to: the other", &|spec| {
        if let Some(rollout) = &mut spec.rollout {
            rollout.applies_to =
                if rollout.applies_to == LossTerms::Policy { LossTerms::PolicyAndKl } else { LossTerms::Policy };
        }
    });
    add("no rejection", &|spec| spec.rejection.clear());
    add("no token_weights", &|spec| spec.token_weights = None);
    add("token_weights.applies_to: the other", &|spec| {
        if let Some(weights) = &mut spec.token_weights {
            weights.applies_to =
                if weights.applies_to == LossTerms::Policy { LossTerms::PolicyAndKl } else { LossTerms::Policy };
        }
    });
    add("no off_policy_mask", &|spec| spec.off_policy_mask = None);
    add("no top_entropy", &|spec| spec.top_entropy = None);
    all
}

/// The plain policy gradient, or of a cross-entropy that without its terms of the row.
fn objective_neighbours(asked: &Objective, add: &mut impl FnMut(&str, &dyn Fn(&mut LossSpec))) {
    let Objective::CrossEntropy(own) = asked else {
        add("objective: policy_gradient", &|spec| spec.objective = Objective::PolicyGradient);
        return;
    };
    let mut without = |name: &str, label_smoothing: f64, z_loss: f64| {
        add(name, &|spec| spec.objective = Objective::CrossEntropy(CrossEntropy { label_smoothing, z_loss }));
    };
    without("no label_smoothing", 0.0, own.z_loss);
    without("no z_loss", own.label_smoothing, 0.0);
    without("no label_smoothing and no z_loss", 0.0, 0.0);
}

/// The divergences that are taken for another.
fn distillation_neighbours(asked: &LossSpec, add: &mut impl FnMut(&str, &dyn Fn(&mut LossSpec))) {
    let Some(distillation) = asked.as_distillation() else { return };
    let mut with = |name: &str, change: &dyn Fn(&mut Distillation)| {
        let mut other = distillation.clone();
        change(&mut other);
        add(name, &|spec| spec.objective = Objective::Distillation(other.clone()));
    };
    let kl = |kind| move |of: &mut Distillation| (of.kind, of.beta) = (kind, None);
    with("objective.distillation.kind: reverse_kl", &kl(DistillationKind::ReverseKl));
    with("objective.distillation.kind: forward_kl", &kl(DistillationKind::ForwardKl));
    with("objective.distillation.kind: jensen_shannon, beta 0.5", &kl(DistillationKind::JensenShannon));
    if distillation.kind == DistillationKind::JensenShannon {
        let exchanged = 1.0 - distillation.teacher_weight();
        with("objective.distillation.beta: 1 - beta", &|of| of.beta = Some(exchanged));
    }
    with("objective.distillation.temperature_squared: the other", &|of| {
        of.temperature_squared = !of.temperature_squared;
    });
    for (name, rest) in [
        ("objective.distillation.rest: tail", TopKRest::Tail),
        ("objective.distillation.rest: renormalized", TopKRest::Renormalized),
        ("objective.distillation.rest: ignored", TopKRest::Ignored),
    ] {
        if distillation.top_k.is_some() {
            with(name, &|of| of.rest = Some(rest));
        }
    }
}

/// The KL penalty: none, or another one.
fn kl_neighbours(asked: &LossSpec, add: &mut impl FnMut(&str, &dyn Fn(&mut LossSpec))) {
    let Some(kl) = &asked.kl else { return };
    add("no kl", &|spec| spec.kl = None);
    let mut with = |name: &str, kl: Kl| add(name, &|spec| spec.kl = Some(kl.clone()));
    for (name, estimator) in [
        ("kl.estimator: k1", KlEstimator::K1),
        ("kl.estimator: k2", KlEstimator::K2),
        ("kl.estimator: k3", KlEstimator::K3),
        ("kl.estimator: abs", KlEstimator::Abs),
    ] {
        with(name, Kl { estimator, ..kl.clone() });
    }
    with("kl.importance: one", Kl { importance: KlImportance::One, ..kl.clone() });
    with("kl.importance: ratio", Kl { importance: KlImportance::Ratio, ..kl.clone() });
    with("kl.importance: token_ratio", Kl { importance: KlImportance::TokenRatio, ..kl.clone() });
    with("kl.gradient: own", Kl { gradient: KlGradient::Own, ..kl.clone() });
    with("kl.gradient: k2", Kl { gradient: KlGradient::K2, ..kl.clone() });
    with("kl without clamps", Kl { difference_clamp: None, value_clamp: None, ..kl.clone() });
    with("kl.averaging: that of the policy term", Kl { averaging: None, ..kl.clone() });
}
