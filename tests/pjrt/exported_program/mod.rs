//! Users' own programs: the shipped examples are judged right and broken ones are not, on every CPU plugin that set-up
//! installs; and every way that a manifest can be wrong is refused by name.

mod arrays;
mod judged;
mod refused;

use std::fs;
use std::path::{Path, PathBuf};

use assay::exported::ExportedProgram;
use assay::implementation::{Implementation, RunError};
use assay::judge::generate::{Recipe, Regime};
use assay::judge::judge::Verdict;
use assay::judge::tolerance::Limits;
use assay::problem::{Advantages, Candidate, Dtype, Problem};
use assay::spec::LossSpec;
use assay_testkit::JudgedProblem;
use ndarray::arr1;
use tempfile::TempDir;

const F32: &str = "fixtures/exported/grpo_f32.toml";
const BF16: &str = "fixtures/exported/grpo_bf16.toml";
const PACKED: &str = "fixtures/exported/grpo_f32_packed.toml";
const SHAPE: [usize; 3] = [2, 5, 1031];

fn recipe(regime: Regime, dtype: Dtype, seed: u64) -> Recipe {
    Recipe { shape: SHAPE, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true }
}

/// A problem in which whatever a program gets wrong shows: every token counts and learns, at a ratio of 1 or, the first,
/// of 1.15.
fn full_problem() -> Problem {
    let recipe = Recipe { masked_garbage: false, old_logp_noise_scale: 0.0, ..recipe(Regime::Normal, Dtype::F32, 1) };
    let mut problem = recipe.problem(&LossSpec::default()).unwrap();
    problem.mask.fill(true);
    problem.advantages = Advantages::Sequence(arr1(&[1.0, -0.5]));
    problem.old_logp.as_mut().unwrap()[[0, 0]] -= 0.14;
    problem
}

fn read(manifest: impl AsRef<Path>, plugin: &Path) -> ExportedProgram {
    ExportedProgram::read(manifest, Some(plugin)).unwrap_or_else(|error| panic!("{error}"))
}

/// The verdicts on `candidate` by the limits of users' own kernels.
fn judge(candidate: Candidate, problem: &Problem) -> Vec<Verdict> {
    let spec = LossSpec::default();
    let limits = Limits::for_class("external").unwrap();
    JudgedProblem::new(&spec, problem).unwrap().judge(candidate, &limits).unwrap().verdicts
}

fn run(exported: &ExportedProgram, problem: &Problem) -> Result<Candidate, RunError> {
    exported.run(&LossSpec::default(), problem.clone(), 1)
}

fn verdicts(exported: &ExportedProgram, problem: &Problem) -> Vec<Verdict> {
    judge(run(exported, problem).unwrap_or_else(|error| panic!("{error}")), problem)
}

fn failed(verdicts: &[Verdict]) -> Vec<String> {
    verdicts.iter().filter(|verdict| !verdict.passed()).map(|verdict| verdict.gate.to_string()).collect()
}

/// The f32 example in a folder of its own, to be changed.
struct Copy {
    folder: TempDir,
}

impl Copy {
    fn new() -> Self {
        let copy = Self { folder: TempDir::new().unwrap() };
        for name in ["grpo_f32.toml", "grpo_f32.mlir"] {
            fs::copy(Path::new("fixtures/exported").join(name), copy.path(name)).unwrap();
        }
        copy
    }

    /// One whose program has `from`, which it holds, replaced by `to`.
    #[track_caller]
    fn with_program(from: &str, to: &str) -> Self {
        let copy = Self::new();
        copy.edit("grpo_f32.mlir", from, to);
        copy
    }

    /// One whose manifest has `from`, which it holds, replaced by `to`.
    #[track_caller]
    fn with_manifest(from: &str, to: &str) -> Self {
        let copy = Self::new();
        copy.edit("grpo_f32.toml", from, to);
        copy
    }

    #[track_caller]
    fn edit(&self, name: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(name)).unwrap();
        assert!(text.contains(from), "{name} does not hold `{from}`");
        fs::write(self.path(name), text.replacen(from, to, 1)).unwrap();
    }

    /// A program of its own, with a manifest that begins with `head` and lists inputs and outputs as `name dtype` or `name dtype cut`.
    fn written(program: &str, head: &str, inputs: &[&str], outputs: &[&str]) -> Self {
        let copy = Self::new();
        fs::write(copy.path("grpo_f32.mlir"), program).unwrap();
        let mut manifest = format!("program = \"grpo_f32.mlir\"\n{head}\n");
        for (kind, entries) in [("input", inputs), ("output", outputs)] {
            for entry in entries {
                let fields = ["name", "dtype", "cut"].iter().zip(entry.split(' '));
                let fields = fields.map(|(field, value)| format!("{field} = \"{value}\"\n"));
                manifest += &format!("[[{kind}]]\n{}", fields.collect::<String>());
            }
        }
        fs::write(copy.manifest(), manifest).unwrap();
        copy
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn manifest(&self) -> PathBuf {
        self.path("grpo_f32.toml")
    }

    /// The manifest is refused in one line that starts with its folder and says all of `parts`.
    #[track_caller]
    fn assert_refused(&self, parts: &[&str]) {
        let error = ExportedProgram::read(self.manifest(), None).err().expect("a manifest that is wrong").to_string();
        assert!(error.starts_with(self.folder.path().to_str().unwrap()) && error.lines().count() == 1, "{error}");
        for part in parts {
            assert!(error.contains(part), "`{part}` not in: {error}");
        }
    }
}
