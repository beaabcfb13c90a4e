//! What published implementations returned, under the judge: each recorded run is a candidate, held to the limits of class
//! `external` as `assay judge` would hold it. Four runs record a defect of their release; `docs/peers.md` has the figures.
//!
//! A float64 run is held to the limits of f32 kernels too, which it meets with ease: a candidate stored wider gets no wider
//! limit. `reference` holds it to float64's own precision.

use std::fs;

use assay_fixture::PeerFile;
use assay_judge::gate::{Model, Output};
use assay_judge::judge::Verdict;
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::Limits;
use assay_reference as reference;

/// A recorded run under judgement.
struct Case {
    recorded: PeerFile,
    /// The loss of its options' formula.
    loss: f64,
    verdicts: Vec<Verdict>,
}

impl Case {
    fn of(file: &str) -> Self {
        let path = format!("{}/../../../fixtures/peers/{file}.json", env!("CARGO_MANIFEST_DIR"));
        let recorded = PeerFile::read(path).unwrap();
        let spec = recorded.resolve().unwrap().spec;
        let reference = reference::evaluate(&spec, &recorded.problem).unwrap();
        let verdicts = recorded
            .problem
            .judge(&reference, &recorded.candidate().lend(), &Limits::for_class("external").unwrap())
            .unwrap();
        let loss = reference.loss();
        Self { recorded, loss, verdicts }
    }

    fn verdict(&self, output: Output, model: Model) -> &Verdict {
        let gate = |verdict: &&Verdict| verdict.gate.output == output && verdict.gate.model == model;
        self.verdicts.iter().find(gate).expect("judged")
    }

    /// How many times its limit the worst error is.
    fn share(&self, output: Output) -> f64 {
        self.verdict(output, Model::Elementwise).worst().expect("compared").error_over_limit()
    }

    /// Checks the loss recorded and the formula's, that the loss and dlogits are rejected, and how many times their limit the worst errors are.
    #[track_caller]
    fn assert_defect(&self, losses: [f64; 2], loss: Option<f64>, dlogits: Option<f64>) {
        assert_quoted(self.recorded.loss, losses[0]);
        assert_quoted(self.loss, losses[1]);
        for (output, share) in [(Output::Loss, loss), (Output::Dlogits, dlogits)] {
            assert!(!self.verdict(output, Model::Elementwise).passed());
            share.inspect(|&share| assert_quoted(self.share(output), share));
        }
    }

    /// `∂loss/∂logits` of a sampled token: the formula's, and the one recorded.
    fn target(&self, b: usize, t: usize) -> [f64; 2] {
        let spec = self.recorded.resolve().unwrap().spec;
        let reference = reference::evaluate(&spec, &self.recorded.problem).unwrap();
        let id = usize::try_from(self.recorded.problem.ids[[b, t]]).unwrap();
        [reference.dlogits_row(b, t)[id], self.recorded.dlogits[[b, t, id]]]
    }
}

/// To the digits that are quoted.
#[track_caller]
fn assert_quoted(value: f64, quoted: f64) {
    assert!((value - quoted).abs() <= 6e-4 * quoted.abs(), "{value:.5e}, quoted as {quoted}");
}

#[test]
fn peer_luspo_weights_of_a_ragged_mask_are_rejected() {
    let case = Case::of("liger_triton_luspo_quirk");
    for t in 0..4 {
        let [formula, recorded] = case.target(2, t);
        assert_quoted(recorded / formula, 0.8);
    }
    case.assert_defect([-1.9442, -1.9455], Some(59.309), Some(14_734.0));
}

#[test]
fn peer_luspo_loss_of_masked_tokens_is_rejected() {
    let case = Case::of("liger_luspo_token_quirk");
    let [formula, recorded] = case.target(1, 5);
    assert_eq!(formula, 0.0, "masked");
    assert_quoted(recorded, 1.1121);
    case.assert_defect([-0.060_389, -0.89297], None, None);
}

#[test]
fn peer_delta_below_the_clip_bound_is_rejected() {
    let case = Case::of("liger_triton_delta_quirk");
    assert!(case.verdict(Output::Loss, Model::Elementwise).passed(), "its loss is right");
    let [formula, recorded] = case.target(1, 2);
    assert_quoted(formula, 0.077_509);
    assert_eq!(recorded, 0.0);
    assert!(!case.verdict(Output::Dlogits, Model::Elementwise).passed());
    assert_quoted(case.share(Output::Dlogits), 28_605.0);
}

/// TRL's tail of at least 1e-7 and its missing gradient are below what f32 resolves of a tail, and no gate can tell.
#[test]
fn peer_tail_below_f32_resolution_is_not_compared() {
    let case = Case::of("divergence_trl_sdpo_tail_quirk");
    assert_quoted(case.recorded.loss, 0.82912);
    assert_quoted(case.loss, 0.96879);
    assert!(case.verdicts.iter().all(Verdict::passed));
}

/// The recorded defects, and the gates that each fails.
const DEFECTS: [(&str, &[&str]); 4] = [
    ("divergence_trl_sdpo_tail_quirk", &[]),
    ("liger_luspo_token_quirk", &["loss", "dlogits", "dlogits at masked", "dlogits row_l2"]),
    ("liger_triton_delta_quirk", &["dlogits", "dlogits row_l2"]),
    ("liger_triton_luspo_quirk", &["loss", "dlogits", "dlogits row_l2"]),
];

#[test]
fn peer_runs_pass_and_recorded_defects_fail_their_gates() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../fixtures/peers");
    let (mut judged, mut with_entropy) = (0, 0);
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap();
        let case = Case::of(name);
        let failed = case.verdicts.iter().filter(|verdict| !verdict.passed());
        let failed: Vec<String> = failed.map(|verdict| verdict.gate.to_string()).collect();
        let expected: &[&str] = DEFECTS.iter().find(|(defect, _)| *defect == name).map_or(&[], |(_, gates)| gates);
        assert_eq!(failed, expected, "{name}");
        let plain = |verdict: &&Verdict| verdict.gate.edge.is_none();
        let outputs =
            |output| case.verdicts.iter().filter(plain).filter(|verdict| verdict.gate.output == output).count();
        assert_eq!((outputs(Output::Loss), outputs(Output::Logp), outputs(Output::Dlogits)), (1, 1, 3), "{name}");
        with_entropy += outputs(Output::Entropy);
        judged += 1;
    }
    assert_eq!((judged, with_entropy), (260, 96));
}
