//! The mutation score: how many wrong kernels a campaign would catch, and which option catches the others.

use std::marker::PhantomData;
use std::ops::Range;

use assay_core::problem::{Candidate, Dtype, Gradient, Shape};
use assay_core::spec::LossSpec;
use assay_judge::gate::{Gate, Model, Output};
use assay_judge::generate::Regime;
use assay_judge::invariance::Invariance;
use assay_judge::judge::Verdict;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use assay_schema::campaign as schema;
use assay_suites::mutants::{BANK, BatchSizes, Mutant, MutantKind, Specimen};
use rayon::prelude::*;

use crate::campaign::{Campaign, CampaignError};
use crate::deck::{DealtRecipe, Deck, DeckShapes};
use crate::invariance_mutants::add_to_score;
use crate::outputs::values;
use crate::subject::Subject;
use crate::worker::ShardCut;

/// Problems that wrong kernels are run on, and their elements: small ones show what large ones do, many times sooner.
const CASES: usize = 50;
const ELEMENTS: usize = 1 << 13;

/// Elements of larger ones: more than 16 bits count.
const LARGER: Range<usize> = 1 << 16..1 << 18;

/// And of one of Qwen's vocabulary.
const WIDE: Range<usize> = 1 << 18..1 << 20;

/// Problems of other sizes, and wide ones, that mutants are run on which the others accept.
const FEW: usize = 4;

/// Problems that are evaluated before mutants are run on them.
const AT_ONCE: usize = 8;

/// Problems of the deck that a mutant is run on which depends on sizes alone.
const SIZED: usize = 2;

/// Problems of a deck that deals each of its shapes.
const WHOLE: u64 = 200;

/// Problems of a larger campaign, and wide ones, which may reject what this one accepts.
const MORE: u64 = 1_000;
const MORE_WIDE: u64 = 12;

/// Returns the mutants that problems of this kind, packed or not and on ranks or not, and this loss can show.
fn shown<P: Subject>(spec: &LossSpec, packed: bool, has_ranks: bool) -> Vec<&'static Mutant> {
    let is_of = |kind| P::is_of(kind) || (has_ranks && P::is_of_ranks(kind));
    BANK.iter().filter(|mutant| is_of(mutant.kind) && mutant.kind.is_reached(spec, packed)).collect()
}

/// Removes the outputs that the judged kernel does not have.
fn limited<G>(mut candidate: Candidate<G>, outputs: &[&'static str]) -> Candidate<G> {
    let Candidate { logp, logp_of_others, entropy, token_loss, metrics, .. } = &mut candidate;
    *logp_of_others = logp_of_others.take().filter(|_| outputs.contains(&"logp"));
    for (name, output) in [("logp", logp), ("entropy", entropy), ("token_loss", token_loss)] {
        if !outputs.contains(&name) {
            *output = None;
        }
    }
    *metrics = None;
    candidate
}

/// The fate of one mutant in the campaign.
#[derive(Clone, Copy)]
enum MutantFate {
    Rejected,
    Accepted,
    NotExercised,
}

impl MutantFate {
    fn is_rejected(self) -> bool {
        matches!(self, MutantFate::Rejected)
    }

    fn is_unseen(self) -> bool {
        matches!(self, MutantFate::NotExercised)
    }
}

/// A problem, and what the correct kernel returns for it.
struct MutantTrial<'p, P: Subject> {
    known: JudgedProblem<'p, P>,
    correct: Candidate<P::Gradient>,
    /// Candidate on several simulated devices, and their number; `None` for a kernel of one process.
    on_devices: Option<(Candidate<P::Gradient>, usize)>,
}

/// A mutant's kernel, with what the correct one returns on as many simulated devices, and their number.
type Launched<'c, G> = (Specimen, (&'c Candidate<G>, usize));

impl<P: Subject> MutantTrial<'_, P> {
    /// Returns the fate of each mutant on this problem. A mutant whose numbers equal the correct kernel's shows
    /// nothing, unless a second call returns other numbers.
    fn fates(&self, mutants: &[&Mutant], limits: &Limits, outputs: &[&'static str]) -> Vec<MutantFate> {
        let JudgedProblem { spec, problem, .. } = self.known;
        // A second call is one of the same kernel, with the state that the first has left.
        let on = |mutant: &Mutant| {
            let of_ranks = self.on_devices.as_ref().filter(|_| P::is_of_ranks(mutant.kind));
            of_ranks.map_or((&self.correct, 1), |(correct, devices)| (correct, *devices))
        };
        let kernels: Vec<Launched<P::Gradient>> =
            mutants.iter().map(|mutant| (Specimen::with(mutant.bug), on(mutant))).collect();
        let run = |(kernel, (_, devices)): &Launched<P::Gradient>| {
            let candidate = P::mutant(kernel).run(spec, problem.clone(), *devices).ok()?;
            Some(limited(candidate, outputs))
        };
        let first = |launched: &Launched<P::Gradient>| {
            let candidate = run(launched)?;
            Some((same_numbers(launched.1.0, &candidate), candidate))
        };
        // Run every mutant once. Equal numbers need no verdict, so only the differing candidates are judged, all in
        // one pass over the reference.
        let runs: Vec<Option<(bool, Candidate<P::Gradient>)>> = kernels.par_iter().map(first).collect();
        let others = runs.iter().flatten().filter(|(same, _)| !same).map(|(_, candidate)| candidate.lend());
        let verdicts = self.known.verdicts_of_all(&others.collect::<Vec<_>>(), limits).unwrap_or_default();
        let mut passes = verdicts.iter().map(|verdicts| verdicts.iter().all(Verdict::passed));
        let fate = |run: &Option<(bool, _)>| match run {
            Some((false, _)) if passes.next().unwrap_or(false) => MutantFate::Accepted,
            Some((false, _)) => MutantFate::Rejected,
            Some((true, _)) | None => MutantFate::NotExercised,
        };
        let fates: Vec<MutantFate> = runs.iter().map(fate).collect();
        // Run the mutants that were not rejected once more: some keep state, and differ only in the second call.
        kernels
            .par_iter()
            .zip(runs)
            .zip(fates)
            .map(|((kernel, first), fate)| match (first, fate) {
                (Some((_, candidate)), MutantFate::Accepted | MutantFate::NotExercised) => {
                    let again = run(kernel);
                    let agrees = again.is_some_and(|again| Invariance::between(&candidate, &again).other.is_empty());
                    if agrees { fate } else { MutantFate::Rejected }
                }
                _ => fate,
            })
            .collect()
    }
}

/// Whether all numbers of two candidates are the same: −0 is 0.
fn same_numbers<G: Gradient>(a: &Candidate<G>, b: &Candidate<G>) -> bool {
    let gates = [Output::Loss, Output::Logp, Output::Entropy, Output::TokenLoss, Output::Dlogits];
    gates.into_iter().all(|output| {
        let gate = Gate::new(output, Model::Elementwise);
        let (a, b) = (values(a, gate), values(b, gate));
        a.len() == b.len() && a.iter().zip(&b).all(|(x, y)| x == y || (x.is_nan() && y.is_nan()))
    })
}

/// The mutants of a campaign, and the fate of each so far.
struct ScoreRound<'c, P> {
    campaign: &'c Campaign,
    outputs: &'c [&'static str],
    /// The number of simulated devices for mutants of ranks; `None` for a kernel of one process.
    devices: Option<usize>,
    mutants: Vec<(&'static Mutant, MutantFate)>,
    /// The number of problems that mutants were run on.
    cases: usize,
    subject: PhantomData<P>,
}

impl<P: Subject> ScoreRound<'_, P> {
    /// Runs the mutants that `is_left` on the problems of some recipes, and notes their fates. Returns false where the correct kernel
    /// does not compute the loss.
    fn run(
        &mut self,
        deck: &Deck,
        recipes: impl Iterator<Item = DealtRecipe>,
        grade: Grade,
        is_left: impl Fn(&Mutant, MutantFate) -> bool,
    ) -> Result<bool, CampaignError> {
        // A few problems at a time: none is evaluated once no mutant is left.
        for recipes in recipes.collect::<Vec<_>>().chunks(AT_ONCE) {
            if !self.run_some(deck, recipes, grade, &is_left)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn run_some(
        &mut self,
        deck: &Deck,
        recipes: &[DealtRecipe],
        grade: Grade,
        is_left: impl Fn(&Mutant, MutantFate) -> bool,
    ) -> Result<bool, CampaignError> {
        if !self.mutants.iter().any(|(mutant, fate)| is_left(mutant, *fate)) {
            return Ok(true);
        }
        let (spec, limits) = (&self.campaign.spec, Limits::external(grade).alone());
        let problems = recipes.iter().map(|dealt| Ok((dealt.label(), deck.draw(dealt, spec)?)));
        let problems: Vec<(String, P)> = problems.collect::<Result<_, CampaignError>>()?;
        let mut trials = Vec::new();
        // Evaluate the reference and the correct kernel. A failure of the correct kernel is a false alarm of the
        // judge, which would make the score worthless.
        for (label, problem) in &problems {
            let Ok(known) = JudgedProblem::new(spec, problem) else { continue };
            let Ok(correct) = P::mutant(&Specimen::default()).run(spec, problem.clone(), 1) else { return Ok(false) };
            let correct = limited(correct, self.outputs);
            let on_devices = self.devices.and_then(|devices| {
                let ranked = P::mutant(&Specimen::default()).run(spec, problem.clone(), devices).ok()?;
                Some((limited(ranked, self.outputs), devices))
            });
            let verdicts = known.verdicts(&correct.lend(), &limits).unwrap_or_default();
            if let Some(failed) = verdicts.iter().find(|verdict| !verdict.passed()) {
                return Err(CampaignError::FalseAlarm { gate: failed.gate.to_string(), case: label.clone() });
            }
            trials.push(MutantTrial { known, correct, on_devices });
        }
        self.cases += trials.len();
        // Run only the mutants that are not yet rejected, and drop each as soon as one problem rejects it.
        let outputs = self.outputs;
        let mut left: Vec<_> = self.mutants.iter_mut().filter(|(mutant, fate)| is_left(mutant, *fate)).collect();
        for trial in &trials {
            let of_left: Vec<&Mutant> = left.iter().map(|(mutant, _)| *mutant).collect();
            for ((_, fate), here) in left.iter_mut().zip(trial.fates(&of_left, &limits, outputs)) {
                if !matches!(here, MutantFate::NotExercised) {
                    *fate = here;
                }
            }
            left.retain(|(_, fate)| !matches!(fate, MutantFate::Rejected));
        }
        Ok(true)
    }

    /// Runs mutants of sizes on the smallest problems of the deck that have their size.
    fn run_sizes(&mut self) -> Result<(), CampaignError> {
        let campaign = self.campaign;
        let recipes = with_gradient(&campaign.deck);
        for (mutant, _) in self.mutants.clone() {
            for dealt in with_sizes_of(&recipes, mutant) {
                let is_left = |other: &Mutant, fate: MutantFate| other.bug == mutant.bug && !fate.is_rejected();
                self.run_some(&campaign.deck, &[dealt], campaign.grade, is_left)?;
            }
        }
        Ok(())
    }

    /// Finds the options under which the campaign rejects the mutants that it accepts, and those whose sizes it does not deal: these are
    /// accepted from here on.
    fn options(&mut self) -> Vec<schema::CatchingOption> {
        let campaign = self.campaign;
        let mut all: Vec<schema::CatchingOption> = Vec::new();
        // An attempt is a copy of the round: what it rejects is accepted still.
        let mut attempt = |option: String,
                           round: &Self,
                           deck: &Deck,
                           recipes: Vec<DealtRecipe>,
                           grade: Grade,
                           is_left: &dyn Fn(&Mutant, MutantFate) -> bool| {
            let is_found = |name: &str| all.iter().any(|found| found.mutants.iter().any(|other| other == name));
            let is_left = |mutant: &Mutant, fate| is_left(mutant, fate) && !is_found(mutant.name);
            let mut tried = ScoreRound { mutants: round.mutants.clone(), ..*round };
            // An option under which the correct kernel would be rejected is no advice.
            if tried.run(deck, recipes.into_iter(), grade, is_left).is_err() {
                return;
            }
            let caught = tried.mutants.iter().zip(&round.mutants);
            let caught = caught.filter(|((_, there), (_, here))| there.is_rejected() && !here.is_rejected());
            let mutants: Vec<String> = caught.map(|((mutant, _), _)| mutant.name.to_string()).collect();
            match all.iter_mut().find(|found| found.option == option) {
                Some(found) => found.mutants.extend(mutants),
                None if mutants.is_empty() => {}
                None => all.push(schema::CatchingOption { option, mutants }),
            }
        };
        // Sizes that the deck does not deal: the smallest problems with them of a whole deck of all shapes.
        let deck = Deck { shapes: DeckShapes::Many, cases: campaign.deck.cases.max(WHOLE), ..campaign.deck.clone() };
        let changed = [
            (campaign.deck.shapes != deck.shapes).then(|| "shapes=many".to_string()),
            (campaign.deck.cases != deck.cases).then(|| format!("cases={WHOLE}")),
        ];
        let option = changed.into_iter().flatten().collect::<Vec<_>>().join(" ");
        let recipes = with_gradient(&deck);
        for (mutant, _) in self.mutants.iter().filter(|(_, fate)| fate.is_unseen() && !option.is_empty()) {
            let with_size = with_sizes_of(&recipes, mutant);
            attempt(option.clone(), self, &deck, with_size, campaign.grade, &|other, _| other.bug == mutant.bug);
        }
        // The other mutants: each option that the campaign has not, on as many small problems as it takes to reject most.
        let is_accepted = |_: &Mutant, fate: MutantFate| matches!(fate, MutantFate::Accepted);
        let small = |deck: &Deck, cases: u64| -> Vec<DealtRecipe> {
            dealt(deck, cases).filter(|dealt| elements(dealt) < ELEMENTS).take(CASES).collect()
        };
        if campaign.grade != Grade::Exact {
            let recipes = small(&campaign.deck, campaign.deck.cases);
            attempt("grade=exact".into(), self, &campaign.deck, recipes, Grade::Exact, &is_accepted);
        }
        for dtype in Dtype::KERNEL.into_iter().filter(|dtype| !campaign.deck.dtypes.contains(dtype)) {
            let deck = Deck { dtypes: vec![dtype], ..campaign.deck.clone() };
            attempt(format!("dtypes={dtype}"), self, &deck, small(&deck, deck.cases), campaign.grade, &is_accepted);
        }
        for regime in Regime::ALL.into_iter().filter(|regime| !campaign.deck.regimes.contains(regime)) {
            let deck = Deck { regimes: vec![regime], ..campaign.deck.clone() };
            if !deck.possible_regimes().is_empty() {
                let recipes = small(&deck, deck.cases);
                attempt(format!("regimes={regime}"), self, &deck, recipes, campaign.grade, &is_accepted);
            }
        }
        if campaign.deck.masked_garbage != Some(true) {
            let deck = Deck { masked_garbage: Some(true), ..campaign.deck.clone() };
            attempt("masked_garbage=true".into(), self, &deck, small(&deck, deck.cases), campaign.grade, &is_accepted);
        }
        if campaign.deck.cases < MORE {
            let deck = Deck { cases: MORE, ..campaign.deck.clone() };
            let recipes = dealt(&deck, MORE).skip(CASES).filter(|dealt| elements(dealt) < ELEMENTS).take(2 * CASES);
            attempt(format!("cases={MORE}"), self, &deck, recipes.collect(), campaign.grade, &is_accepted);
        }
        // More wide problems, one after another: each has another regime.
        let shapes_are_the_decks = !matches!(campaign.deck.shapes, DeckShapes::Given(_));
        for wide in (campaign.deck.wide.saturating_add(1)..=MORE_WIDE).filter(|_| shapes_are_the_decks) {
            let deck = Deck { wide, cases: campaign.deck.cases.max(wide), ..campaign.deck.clone() };
            let last = vec![dealt_one(&deck, deck.cases - 1)];
            attempt(format!("wide={wide}"), self, &deck, last, campaign.grade, &is_accepted);
        }
        // A mutant of a size that the deck does not deal is missed by the deck, not by the loss.
        for (mutant, fate) in &mut self.mutants {
            if fate.is_unseen() && all.iter().any(|found| found.mutants.iter().any(|name| name == mutant.name)) {
                *fate = MutantFate::Accepted;
            }
        }
        all
    }
}

/// Runs the mutants on the deck, judged by the outputs that the kernel has: on its first small problems, and those that these do
/// not reject on a few larger ones; what is accepted there on the wide ones too. Those of ranks, where the kernel has some, run on two
/// shards of the vocabulary, and where sequences or tokens are `cut` on two of the sequences as well. `None` where the correct kernel
/// does not compute the loss.
pub(crate) fn power<P: Subject>(
    campaign: &Campaign,
    outputs: &[&'static str],
    cut: Option<ShardCut>,
) -> Result<Option<schema::MutationScore>, CampaignError> {
    let devices = cut.map(|cut| if cut == ShardCut::Vocabulary { 2 } else { 4 });
    let mutants = shown::<P>(&campaign.spec, campaign.deck.packed, devices.is_some());
    let mutants = mutants.into_iter().map(|mutant| (mutant, MutantFate::NotExercised)).collect();
    let mut round = ScoreRound::<P> { campaign, outputs, devices, mutants, cases: 0, subject: PhantomData };
    let between = ELEMENTS..LARGER.start;
    for (sizes, most, accepted_only) in
        [(0..ELEMENTS, CASES, false), (LARGER, 1, false), (between, FEW, true), (WIDE, FEW, true)]
    {
        // Draw the problems of this size from the campaign's own deck.
        let recipes = dealt(&campaign.deck, campaign.deck.cases).filter(|dealt| sizes.contains(&elements(dealt)));
        // A mutant that depends on sizes alone is run on those below.
        let is_left = |mutant: &Mutant, fate: MutantFate| {
            let is_settled = fate.is_rejected() || (accepted_only && fate.is_unseen());
            !is_settled && mutant.kind != MutantKind::Sizes
        };
        if !round.run(&campaign.deck, recipes.take(most), campaign.grade, is_left)? {
            return Ok(None);
        }
    }
    round.run_sizes()?;
    if round.cases == 0 {
        return Ok(None);
    }
    let cases = round.cases;
    let options = round.options();
    // Count a mutant if any problem exercised it, and list the accepted ones by name.
    let mut power = schema::MutationScore { rejected: 0, exercised: 0, accepted: Vec::new(), cases, options };
    for (mutant, fate) in round.mutants {
        match fate {
            MutantFate::NotExercised => continue,
            MutantFate::Rejected => power.rejected += 1,
            MutantFate::Accepted => power.accepted.push(named(mutant)),
        }
        power.exercised += 1;
    }
    let recipes = dealt(&campaign.deck, campaign.deck.cases).map(|dealt| dealt.without_garbage());
    add_to_score::<P>(campaign, outputs, recipes, &mut power);
    Ok(Some(power))
}

/// Returns the first recipes of a deck. What the campaign does not hold against a kernel does not count against a mutant.
fn dealt(deck: &Deck, cases: u64) -> impl Iterator<Item = DealtRecipe> + '_ {
    (0..cases).map(|index| dealt_one(deck, index))
}

/// Returns one recipe of a deck, likewise.
fn dealt_one(deck: &Deck, index: u64) -> DealtRecipe {
    let dealt = deck.deal(index);
    if deck.masked_garbage.is_none() { dealt.without_garbage() } else { dealt }
}

/// Returns the recipes of a deck in which a token may have a gradient, without the wide ones, the smallest first.
fn with_gradient(deck: &Deck) -> Vec<DealtRecipe> {
    let mut recipes: Vec<DealtRecipe> = dealt(deck, deck.cases)
        .filter(|dealt| !dealt.content.may_lack_a_gradient() && elements(dealt) < WIDE.start)
        .collect();
    recipes.sort_by_key(elements);
    recipes
}

/// Returns the first recipes whose sizes alone can show a mutant; none if it does not depend on sizes alone.
fn with_sizes_of(recipes: &[DealtRecipe], mutant: &Mutant) -> Vec<DealtRecipe> {
    let has_its_size = |dealt: &&DealtRecipe| mutant.bug.is_shown_by(dealt_sizes(dealt)) == Some(true);
    recipes.iter().filter(has_its_size).take(SIZED).cloned().collect()
}

/// Returns the number of logits of a recipe.
fn elements(dealt: &DealtRecipe) -> usize {
    dealt.recipe.shape.iter().product()
}

/// Returns the sizes of the problem that a recipe is of.
fn dealt_sizes(dealt: &DealtRecipe) -> BatchSizes {
    let [sequences, tokens, vocab] = dealt.recipe.shape;
    let rows = sequences * tokens;
    BatchSizes { sequences, tokens: if dealt.packed { rows } else { tokens }, rows, vocab }
}

/// Returns the sizes of a problem.
pub(crate) fn sizes<P: Subject>(problem: &P) -> BatchSizes {
    let Shape { batch, tokens, vocab } = problem.shape().into();
    BatchSizes { sequences: problem.batch().extra.sequences.count(batch), tokens, rows: batch * tokens, vocab }
}

/// A mutant by its name.
pub(crate) fn named(mutant: &Mutant) -> schema::MutantName {
    schema::MutantName { mutant: mutant.name.into(), does: mutant.does.into() }
}
