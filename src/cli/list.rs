//! `assay list`: the implementations, what they support, and why one cannot run here.

use clap::Args;
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

use super::{CliError, Passed, PluginChoice, Printing};
use crate::implementation::{Implementation, registry};
use crate::problem::{Dtype, Shape};
use crate::spec::{
    AdvantageLevel, Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows, TemperatureDivides,
};

/// The shape that support is asked for: eight sequences of eight tokens, which eight devices can cut.
const SHAPE: Shape = Shape { batch: 8, tokens: 8, vocab: 151_936 };

#[derive(Args)]
pub(super) struct List {
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    printing: Printing,
}

#[derive(Serialize)]
struct Listed {
    id: String,
    class: String,
    summary: String,
    available: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
    dtypes: Vec<Dtype>,
    devices: Vec<usize>,
    /// Spec options that it does not compute.
    unsupported: Vec<&'static str>,
}

impl Listed {
    fn of(implementation: &dyn Implementation) -> Self {
        let spec = LossSpec::default();
        let takes = |devices: &usize| implementation.supports(&spec, SHAPE, Dtype::F32, *devices).is_ok();
        let fewest = [1, 2, 4, 8].into_iter().find(takes).unwrap_or(1);
        let supports = |spec: &LossSpec, dtype| implementation.supports(spec, SHAPE, dtype, fewest).is_ok();
        let dtypes: Vec<_> = Dtype::KERNEL.into_iter().filter(|&dtype| supports(&spec, dtype)).collect();
        let some_dtype = dtypes.first().copied().unwrap_or(Dtype::F32);
        let available = implementation.available();
        Self {
            id: implementation.id().into(),
            class: implementation.class().into(),
            summary: implementation.summary().into(),
            available: available.is_ok(),
            why_not: available.err().map(|why| why.reason),
            devices: implementation.device_counts(),
            unsupported: options()
                .into_iter()
                .filter(|(_, spec)| !supports(spec, some_dtype))
                .map(|(name, _)| name)
                .collect(),
            dtypes,
        }
    }
}

/// Every option of the spec, alone.
fn options() -> Vec<(&'static str, LossSpec)> {
    let plain = LossSpec::default;
    let clip = |clip| LossSpec { objective: Objective::PpoClip(clip), ..plain() };
    let kl = |estimator| LossSpec { kl: Some(Kl::plain(0.04, estimator)), ..plain() };
    let reduction = |reduction| LossSpec { reduction, ..plain() };
    vec![
        ("ppo_clip", plain()),
        ("delta", clip(PpoClip { delta: Some(2.0), ..PpoClip::default() })),
        ("dual_clip", clip(PpoClip { dual_clip: Some(3.0), ..PpoClip::default() })),
        ("advantages: token", LossSpec { advantages: AdvantageLevel::Token, ..plain() }),
        ("old_logp: current", LossSpec { old_logp: OldLogp::Current, ..plain() }),
        ("temperature on logits", LossSpec { temperature: 0.7, ..plain() }),
        (
            "temperature on logp",
            LossSpec { temperature: 0.7, temperature_divides: TemperatureDivides::Logp, ..plain() },
        ),
        ("kl k1", kl(KlEstimator::K1)),
        ("kl k2", kl(KlEstimator::K2)),
        ("kl k3", kl(KlEstimator::K3)),
        ("kl abs", kl(KlEstimator::Abs)),
        ("entropy_coef", LossSpec { entropy_coef: 0.01, ..plain() }),
        ("sequence_mean", reduction(Reduction::SequenceMean { rows: Rows::All })),
        ("fixed_length", reduction(Reduction::FixedLength { rows: Rows::All, length: Some(1024) })),
        ("normalizer", reduction(Reduction::Normalizer(1024.0))),
    ]
}

impl List {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let listed: Vec<Listed> =
            registry(self.plugin.path()).iter().map(|implementation| Listed::of(&**implementation)).collect();
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["impl", "runs here", "dtypes", "devices", "spec options", "what it is"]);
        for entry in &listed {
            let runs = entry.why_not.as_ref().map_or("yes".to_string(), |why| format!("no: {why}"));
            let options = if entry.unsupported.is_empty() {
                "all".into()
            } else {
                format!("not {}", entry.unsupported.join(", "))
            };
            table.add_row([
                entry.id.clone(),
                runs,
                join(&entry.dtypes),
                join(&entry.devices),
                options,
                entry.summary.clone(),
            ]);
        }
        self.printing.finish(&format!("{table}\n"), &listed)?;
        Ok(Passed::Yes)
    }
}

fn join(items: &[impl ToString]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
