//! `xla` beside the other ways to write it: the least bound of those that are as accurate is its own.

use std::path::Path;

use assay::ahead::{CompileOptions, CompileRequest};
use assay::implementation::Implementation;
use assay::judge::generate::{Recipe, Regime};
use assay::judge::tolerance::{Grade, Limits};
use assay::problem::Dtype;
use assay::programs::{LossProgram, Programs};
use assay::spec::LossSpec;
use assay::tpu::TpuTarget;
use assay::tpu::table;
use assay::xla::Xla;
use assay_testkit::JudgedProblem;
use libtest_mimic::Failed;

/// On the devices of `plugin`: all reach `standard`, and `exact` those that are said to keep the digits that it asks for.
pub(crate) fn reach_their_grades(plugin: &Path) -> Result<(), Failed> {
    let spec = LossSpec::default();
    assert_eq!(LossProgram::alternatives().count(), 5);
    for program in LossProgram::alternatives() {
        let kernel = Xla::new(program, Some(plugin));
        let mut short_of_exact = Vec::new();
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for regime in Regime::FINITE {
                let recipe = super::run::recipe([6, 10, 131], dtype, regime, 28);
                let recipe = Recipe { masked_garbage: false, ..recipe };
                let problem = recipe.problem(&spec)?;
                let known = JudgedProblem::new(&spec, &problem)?;
                let candidate = kernel.run(&spec, problem.clone(), 1)?;
                for grade in [Grade::Standard, Grade::Exact] {
                    let judged = known.judge(candidate.clone(), &Limits::external(grade).alone())?;
                    let Some(failed) = judged.verdicts.iter().find(|verdict| !verdict.passed()) else { continue };
                    let failure =
                        format!("{} in {dtype} {regime:?} at {grade}: {} {}", program.id(), failed.gate, failed.dtype);
                    match grade {
                        Grade::Standard => return Err(failure.into()),
                        Grade::Exact => short_of_exact.push(failure),
                    }
                }
            }
        }
        if short_of_exact.is_empty() != program.keeps_digits() {
            return Err(format!(
                "{}: said to reach exact: {}; {short_of_exact:?}",
                program.id(),
                program.keeps_digits()
            )
            .into());
        }
    }
    Ok(())
}

/// At 1x4096x151936 bf16 on `v6e:2x4`.
pub(crate) fn none_beats_xla() -> Result<(), Failed> {
    let compiler = super::tpu::compiler()?;
    let target = TpuTarget::parse(table::TARGET)?;
    let bound = |program: LossProgram| -> Result<f64, Failed> {
        let request = CompileRequest {
            target: target.clone(),
            implementation: program.id().into(),
            shape: "1x4096x151936".parse()?,
            options: CompileOptions::new(LossSpec::default(), Dtype::Bf16),
        };
        Ok(request.compile(&compiler)?.bound.predicted_ms)
    };
    let xla = bound(LossProgram::all()[0])?;
    let as_accurate: Vec<LossProgram> = LossProgram::alternatives().filter(|program| program.keeps_digits()).collect();
    assert!(!as_accurate.is_empty(), "nothing to compare with");
    for program in as_accurate {
        let other = bound(program)?;
        // Where dlogits lie moves a few cycles of millions.
        if other < 0.999 * xla {
            return Err(format!("{}: {other} ms, xla: {xla} ms", program.id()).into());
        }
    }
    Ok(())
}
