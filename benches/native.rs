//! The CPU kernel against what memory allows: dlogits over the logits, and beside them, against a copy; logp and entropy alone
//! against a read; and both as often on rows that never leave the caches, which is what its instructions take. At Qwen's vocabulary
//! and half a gigabyte of logits, for every instruction set and number of threads; then how the time grows with rows and columns.
//! Each answer is judged before it is timed; the two sides of a ratio take turns; medians.
//!
//! Then what temperature, support, scale and softcap cost, by one thread on a few rows that stay in the third cache: of drawn
//! logits and of recorded ones, against the plain row; the least of many turns. With the argument `settings` that alone.
//!
//! `ASSAY_BENCH_ROWS` asks for another number of rows of bf16.

use std::time::{Duration, Instant};

use assay::bandwidth::{LogitsCopy, time_read};
use assay::fixture::ProblemFile;
use assay::judge::generate::{Recipe, Regime};
use assay::judge::trial::JudgedProblem;
use assay::native::{Isa, Native, OutputCotangents};
use assay::problem::{Dtype, FloatArray, Problem};
use assay::spec::{LogitsTransform, LossSpec, OldLogp, Support};
use ndarray::{Ix3, s};
use rayon::ThreadPoolBuilder;

const VOCAB: usize = 151_936;
const SAMPLES: usize = 10;

/// Rows on which settings are timed, and how often.
const FEW: usize = 8;
const TURNS: usize = 40;

/// Rows of a thread that stay in its second cache, with the exponentials of one: 1.2 MB.
const ROWS_IN_CACHE: usize = 2;

fn main() {
    if !std::env::args().any(|argument| argument == "settings") {
        sizes();
    }
    ThreadPoolBuilder::new().num_threads(1).build().expect("a thread").install(|| {
        println!("\ndtype  logits    setting                isa      forward us a row  to plain  | gradient us a row  to plain");
        for dtype in Dtype::KERNEL {
            let drawn = problem(FEW, VOCAB, dtype);
            settings("peaked", &drawn);
            settings("recorded", &recorded(drawn));
        }
    });
}

fn sizes() {
    let rows = std::env::var("ASSAY_BENCH_ROWS").map_or(1792, |rows| rows.parse().expect("a number of rows"));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "dtype  threads  isa       in place     GB/s  ratio_to_copy  in_cache_to_copy  |     beside  ratio_to_copy  |    forward    GB/s  ratio_to_read  in_cache_to_read"
    );
    for dtype in Dtype::KERNEL {
        let problem = problem(rows * 2 / dtype.size(), VOCAB, dtype);
        for isa in Isa::available() {
            check(isa, &LossSpec::default(), &self::problem(problem.shape().tokens.min(32), VOCAB, dtype));
            for threads in [1, threads] {
                let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
                // Not worth a minute: the portable path is for machines that have nothing else.
                if isa.name() != "portable" {
                    pool.install(|| line(isa, threads, &problem));
                }
            }
        }
    }
    println!("\nbf16, {}, {threads} threads: ns an element", Isa::fastest());
    for (what, shapes) in [
        ("rows", [(rows / 8, VOCAB), (rows / 4, VOCAB), (rows / 2, VOCAB), (rows, VOCAB)]),
        ("columns", [(rows, VOCAB / 8), (rows, VOCAB / 4), (rows, VOCAB / 2), (rows, VOCAB)]),
    ] {
        let points: Vec<(f64, f64)> = shapes
            .into_iter()
            .map(|(rows, vocab)| {
                let problem = problem(rows, vocab, Dtype::Bf16);
                let seconds = median((0..SAMPLES).map(|_| backward(&Native::default(), &problem)).collect());
                println!("  {rows} x {vocab}: {:.4}", seconds * 1e9 / (rows * vocab) as f64);
                ((rows * vocab) as f64, seconds)
            })
            .collect();
        println!("  slope over {what}: {:.4}", slope(&points) * 1e9);
    }
}

fn problem(rows: usize, vocab: usize, dtype: Dtype) -> Problem {
    let recipe = Recipe {
        shape: [1, rows, vocab],
        dtype,
        regime: Regime::Peaked,
        seed: 0,
        // So near to the policy that no token is clipped: one that is costs less.
        old_logp_noise_scale: 0.03,
        masked_garbage: false,
    };
    recipe.unmasked_problem(&LossSpec::default()).expect("a valid recipe")
}

/// The same with logits, and ids, of a sequence that Qwen2.5 was asked for.
fn recorded(drawn: Problem) -> Problem {
    let file = ProblemFile::open("fixtures/qwen_gsm8k.safetensors").expect("cargo runs benches where the package is");
    let recorded = file.problem("logits", None).expect("a recorded problem");
    let logits = recorded.logits.to_f64().slice(s![2..3, ..FEW, ..]).to_owned();
    let logits = FloatArray::rounded_from(&logits, drawn.logits.dtype());
    Problem { logits, ids: recorded.ids.slice(s![2..3, ..FEW]).to_owned(), ..drawn }
}

fn check(isa: Isa, spec: &LossSpec, problem: &Problem) {
    let known = JudgedProblem::new(spec, problem).expect("a valid problem");
    known.expect_right(&Native::on(isa), 1, &format!("this bench on {isa}"));
}

/// What each setting costs, forward alone and with the gradient; the first is the plain row.
fn settings(logits: &str, problem: &Problem) {
    // The ratio is 1, whatever the setting.
    let plain = LossSpec { old_logp: OldLogp::Current, ..LossSpec::default() };
    let mut settings: Vec<(String, LossSpec)> = [1.0, 0.5, 0.3, 0.2, 0.1]
        .into_iter()
        .map(|temperature| {
            (format!("temperature {temperature}"), LossSpec { temperature: temperature.into(), ..plain.clone() })
        })
        .collect();
    let support = Support { vocab: Some(151_643), keep_sampled: true, ..Support::default() };
    settings.push(("support.vocab 151643".into(), LossSpec { support, ..plain.clone() }));
    let scaled = LogitsTransform { scale: 0.5, ..LogitsTransform::default() };
    settings.push(("scale 0.5".into(), LossSpec { logits: scaled, ..plain.clone() }));
    let capped = LogitsTransform { softcap: Some(30.0), ..LogitsTransform::default() };
    settings.push(("softcap 30".into(), LossSpec { logits: capped, ..plain }));
    let isas: Vec<Isa> = Isa::available().into_iter().filter(|isa| isa.name() != "portable").collect();
    let sides: Vec<_> = isas.iter().flat_map(|&isa| settings.iter().map(move |setting| (isa, setting))).collect();
    for (isa, (_, spec)) in &sides {
        check(*isa, spec, problem);
    }
    let mut least = vec![[Duration::MAX; 2]; sides.len()];
    for _ in 0..TURNS {
        for ((isa, (_, spec)), least) in sides.iter().zip(&mut least) {
            let native = Native::on(*isa);
            let times = [forward(&native, problem, spec), backward_again(&native, problem, spec, 1)];
            *least = [least[0].min(times[0]), least[1].min(times[1])];
        }
    }
    for (i, (isa, (setting, _))) in sides.iter().enumerate() {
        let [forward, gradient] = least[i].map(|time| time.as_secs_f64() * 1e6 / FEW as f64);
        let [to_forward, to_gradient] =
            least[i / settings.len() * settings.len()].map(|time| time.as_secs_f64() * 1e6 / FEW as f64);
        println!(
            "{:5}  {logits:8}  {setting:21}  {isa:7}  {forward:16.1}  {:8.2}  |  {gradient:16.1}  {:8.2}",
            problem.logits.dtype().to_string(),
            forward / to_forward,
            gradient / to_gradient,
        );
    }
}

fn line(isa: Isa, threads: usize, problem: &Problem) {
    let native = Native::on(isa);
    let mut copy = LogitsCopy::new(&problem.logits);
    let mut dlogits = problem.logits.clone();
    let few = self::problem(ROWS_IN_CACHE * threads, VOCAB, problem.logits.dtype());
    let often = problem.shape().tokens / (ROWS_IN_CACHE * threads);
    // The ratio is 1, however far one step on the dlogits of another leads.
    let on_policy = LossSpec { old_logp: OldLogp::Current, ..LossSpec::default() };
    let mut times = [const { Vec::new() }; 7];
    for _ in 0..=SAMPLES {
        times[0].push(backward(&native, problem));
        times[1].push(copy.time());
        times[2].push(beside(&native, problem, &mut dlogits));
        times[3].push(backward_again(&native, &few, &on_policy, often));
        times[4].push(forward(&native, problem, &LossSpec::default()));
        times[5].push(time_read(&problem.logits));
        times[6].push(forward_in_cache(&native, problem));
    }
    // The first warms up.
    let [backward, copy, beside, backward_in_cache, forward, read, forward_in_cache] =
        times.map(|times| median(times[1..].to_vec()));
    let shape = problem.shape();
    let gigabytes = (shape.tokens * shape.vocab * problem.logits.dtype().size()) as f64 / 1e9;
    println!(
        "{:5}  {threads:7}  {isa:8}  {:6.1} ms  {:6.2}  {:13.2}  {:16.2}  |  {:6.1} ms  {:13.2}  |  {:6.1} ms  {:6.2}  {:13.2}  {:16.2}",
        problem.logits.dtype().to_string(),
        backward * 1e3,
        2.0 * gigabytes / backward,
        backward / copy,
        backward_in_cache / copy,
        beside * 1e3,
        beside / copy,
        forward * 1e3,
        gigabytes / forward,
        forward / read,
        forward_in_cache / read,
    );
}

/// A step on a copy of the logits.
fn backward(native: &Native, problem: &Problem) -> Duration {
    backward_again(native, problem, &LossSpec::default(), 1)
}

/// The same `often`, each but the first on what the one before it left there.
fn backward_again(native: &Native, problem: &Problem, spec: &LossSpec, often: usize) -> Duration {
    let tokens = problem.tokens();
    macro_rules! step {
        ($logits:expr) => {{
            let mut logits = $logits.clone();
            let started = Instant::now();
            for _ in 0..often {
                native
                    .forward_backward_in_place(spec, logits.view_mut(), tokens, OutputCotangents::default())
                    .expect("supported");
            }
            started.elapsed()
        }};
    }
    match &problem.logits {
        FloatArray::F64(_) => unreachable!("no kernel takes f64"),
        FloatArray::F32(logits) => step!(logits),
        FloatArray::Bf16(logits) => step!(logits),
        FloatArray::F16(logits) => step!(logits),
    }
}

/// A step that leaves the logits as they are.
fn beside(native: &Native, problem: &Problem, dlogits: &mut FloatArray<Ix3>) -> Duration {
    let (spec, tokens) = (LossSpec::default(), problem.tokens());
    let started = Instant::now();
    match (&problem.logits, dlogits) {
        (FloatArray::F32(x), FloatArray::F32(dx)) => {
            native.forward_backward(&spec, x.view(), dx.view_mut(), tokens, OutputCotangents::default())
        }
        (FloatArray::Bf16(x), FloatArray::Bf16(dx)) => {
            native.forward_backward(&spec, x.view(), dx.view_mut(), tokens, OutputCotangents::default())
        }
        (FloatArray::F16(x), FloatArray::F16(dx)) => {
            native.forward_backward(&spec, x.view(), dx.view_mut(), tokens, OutputCotangents::default())
        }
        _ => unreachable!("a clone has its original's dtype, and no kernel takes f64"),
    }
    .expect("supported");
    started.elapsed()
}

fn forward(native: &Native, problem: &Problem, spec: &LossSpec) -> Duration {
    let tokens = problem.tokens();
    let started = Instant::now();
    match &problem.logits {
        FloatArray::F64(_) => unreachable!("no kernel takes f64"),
        FloatArray::F32(logits) => native.forward(spec, logits.view(), tokens),
        FloatArray::Bf16(logits) => native.forward(spec, logits.view(), tokens),
        FloatArray::F16(logits) => native.forward(spec, logits.view(), tokens),
    }
    .expect("supported");
    started.elapsed()
}

/// The same, where each row is the first one.
fn forward_in_cache(native: &Native, problem: &Problem) -> Duration {
    let (spec, tokens) = (LossSpec::default(), problem.tokens());
    macro_rules! forward {
        ($logits:expr) => {{
            let first = $logits.slice(s![.., ..1, ..]);
            native.forward(&spec, first.broadcast($logits.dim()).expect("one row as many"), tokens)
        }};
    }
    let started = Instant::now();
    match &problem.logits {
        FloatArray::F64(_) => unreachable!("no kernel takes f64"),
        FloatArray::F32(logits) => forward!(logits),
        FloatArray::Bf16(logits) => forward!(logits),
        FloatArray::F16(logits) => forward!(logits),
    }
    .expect("supported");
    started.elapsed()
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

/// Of the line through `points` with the smallest squared distances.
fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let products: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    products / points.iter().map(|p| (p.0 - x).powi(2)).sum::<f64>()
}
