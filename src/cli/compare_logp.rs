//! `assay compare-logp`: a trainer's log-probabilities against a sampler's.

use std::path::{Path, PathBuf};

use clap::Args;
use ndarray::{Array2, Ix2};

use super::check::Pages;
use super::problem_choice::AnyProblem;
use super::{CliError, Passed, Printing, one_of};
use crate::config;
use crate::fixture::{ProblemFile, SafetensorsFile, verify};
use crate::judge::agreement::{
    AgreementError, LogpQuestion, SamplingParameters, SharedLogits, agreement_text, compare_logp,
};
use crate::problem::{Dtype, FloatArray, mask_from};
use crate::report::junit::{agreement_case, junit};
use crate::spec::{LogitsTransform, LossSpec, Support, Temperature};
use crate::text::ShownPath;

/// The dtypes that logits may have.
const DTYPES: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::Bf16, Dtype::F16];

#[derive(Args)]
pub(super) struct CompareLogpCommand {
    /// File with the trainer's log-probabilities, `[B,T]`
    #[arg(long, value_name = "FILE.safetensors")]
    trainer: PathBuf,
    /// Name of the trainer's tensor
    #[arg(long, value_name = "NAME", default_value = "logp")]
    trainer_tensor: String,
    /// File with the sampler's log-probabilities, `[B,T]`
    #[arg(long, value_name = "FILE.safetensors")]
    sampler: PathBuf,
    /// Name of the sampler's tensor
    #[arg(long, value_name = "NAME", default_value = "logp")]
    sampler_tensor: String,
    /// Problem file with the logits that both sides compute from; without it, or `--hidden`, nothing is judged
    #[arg(long, value_name = "PROBLEM.safetensors", conflicts_with = "hidden")]
    logits: Option<PathBuf>,
    /// Name of the logits within that file
    #[arg(long, value_name = "NAME", default_value = "logits")]
    logits_tensor: String,
    /// Problem file with hidden states and LM head in their place
    #[arg(long, value_name = "PROBLEM.safetensors")]
    hidden: Option<PathBuf>,
    /// The loss, of which the transform of logits, the support and the temperature are read
    #[arg(long, value_name = "FILE", conflicts_with_all = ["temperature", "softcap", "vocab"])]
    spec: Option<PathBuf>,
    /// Softmax temperature that both sides should apply
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Softcap that both sides should apply to the logits
    #[arg(long, value_name = "CAP")]
    softcap: Option<f64>,
    /// Number of vocabulary entries that are tokens, the rest being padding
    #[arg(long, value_name = "V")]
    vocab: Option<usize>,
    /// The sampler's top-k, which a side may have applied before it took log-probabilities
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// The sampler's top-p, which a side may have applied likewise
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// The sampler's min-p, which a side may have applied likewise
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Dtype of the trainer's own logits, where it is not that of the logits given
    #[arg(long, value_name = "DTYPE", value_parser = one_of(&DTYPES))]
    trainer_logits: Option<Dtype>,
    /// Dtype of the sampler's own logits
    #[arg(long, value_name = "DTYPE", value_parser = one_of(&DTYPES))]
    sampler_logits: Option<Dtype>,
    /// Lower bound of the ratio exp(trainer − sampler) of the trainer's clip
    #[arg(long, value_name = "RATIO", default_value_t = 0.8)]
    ratio_low: f64,
    /// Upper bound of that ratio
    #[arg(long, value_name = "RATIO", default_value_t = 1.2)]
    ratio_high: f64,
    #[command(flatten)]
    pages: Pages,
    #[command(flatten)]
    printing: Printing,
}

impl CompareLogpCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let trainer = read_logp(&self.trainer, &self.trainer_tensor)?;
        let sampler = read_logp(&self.sampler, &self.sampler_tensor)?;
        let mut question = LogpQuestion {
            logits_dtypes: [self.trainer_logits, self.sampler_logits],
            sampling: SamplingParameters { top_k: self.top_k, top_p: self.top_p, min_p: self.min_p },
            ratio_bounds: [self.ratio_low, self.ratio_high],
            ..LogpQuestion::new(trainer, sampler, Array2::default((0, 0)))
        };
        match self.logits.as_ref().or(self.hidden.as_ref()) {
            Some(path) => self.add_logits(&mut question, path)?,
            None => question.mask = self.mask(question.trainer.shape())?,
        }
        let agreement = compare_logp(question).map_err(|error| self.named(error))?;
        let text = agreement_text(&agreement);
        // A fence of four is not closed by what a stranger's file is called.
        let junit = || junit("compare-logp", None, &[agreement_case(&agreement, &text)]);
        self.pages.write(&agreement.conclusion, &agreement, || format!("````text\n{text}````\n"), junit)?;
        self.printing.finish(&text, &agreement)?;
        Ok(agreement.agrees.is_none_or(|agrees| agrees).into())
    }

    /// Reads the problem, and takes mask and advantages from it.
    fn add_logits(&self, question: &mut LogpQuestion, path: &Path) -> Result<(), CliError> {
        verify(path)?;
        let file = ProblemFile::open(path)?;
        if self.hidden.is_some() != file.has_head() {
            let (given, other) = if file.has_head() { ("an LM head", "--hidden") } else { ("no LM head", "--logits") };
            return Err(CliError::Usage(
                format!("{}: got {given}, expected {other} for such a file", ShownPath(path)).into(),
            ));
        }
        let spec = match config::read_spec(self.spec.as_deref())? {
            Some(spec) => spec,
            None => LossSpec {
                temperature: Temperature::Number(self.temperature),
                logits: LogitsTransform { softcap: self.softcap, ..LogitsTransform::default() },
                support: Support { vocab: self.vocab, ..Support::default() },
                ..LossSpec::default()
            },
        };
        let logits = match AnyProblem::read(&file, &self.logits_tensor, None)? {
            AnyProblem::Logits(problem) => {
                (question.mask, question.advantages) =
                    (problem.mask.clone(), Some(problem.tokens().advantages_of_tokens()));
                SharedLogits::Logits(problem)
            }
            AnyProblem::Head(problem) => {
                (question.mask, question.advantages) =
                    (problem.mask.clone(), Some(problem.tokens().advantages_of_tokens()));
                SharedLogits::Head(problem)
            }
        };
        question.logits = Some((spec, logits));
        Ok(())
    }

    /// Reads the mask of the trainer's file, or of the sampler's; every token counts if neither has one.
    fn mask(&self, shape: &[usize]) -> Result<Array2<bool>, CliError> {
        for path in [&self.trainer, &self.sampler] {
            let file = SafetensorsFile::open(path)?;
            if file.names().any(|name| name == "mask") {
                let wrong = |reason| CliError::Problem { path: path.clone().into(), reason };
                return mask_from("mask", &file.numbers("mask")?).map_err(wrong);
            }
        }
        Ok(Array2::from_elem((shape[0], shape[1]), true))
    }

    /// An error with the file that it is about.
    fn named(&self, error: AgreementError) -> CliError {
        let path = match &error {
            AgreementError::Shape { field: "sampler", .. } => &self.sampler,
            AgreementError::Problem(_) | AgreementError::Shape { .. } => {
                self.logits.as_ref().or(self.hidden.as_ref()).unwrap_or(&self.trainer)
            }
            _ => return CliError::Usage(error.to_string().into()),
        };
        CliError::Config { path: path.clone().into(), reason: error.to_string().into() }
    }
}

fn read_logp(path: &Path, tensor: &str) -> Result<FloatArray<Ix2>, CliError> {
    Ok(SafetensorsFile::open(path)?.floats(tensor)?)
}
