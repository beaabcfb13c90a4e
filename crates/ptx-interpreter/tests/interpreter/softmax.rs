//! A row in the shared memory of a cluster, softmax in place: right as it stands, and each wait of it needed.

use assay_ptx_interpreter::{
    ApproximateUnits, GlobalArray, GridLaunch, InterpretOptions, PtxFault, PtxInterpretError, PtxModule, ThreadOrder,
};
use half::bf16;

const TEXT: &str = include_str!("softmax.ptx");

/// A row of `slice` bytes for each of `ctas` CTAs.
#[derive(Clone, Copy)]
struct Row {
    ctas: u32,
    threads: u32,
    slice: u32,
}

const SMALL: Row = Row { ctas: 2, threads: 64, slice: 64 * 16 + 3 * 16 };
/// A row of 151,936 bf16.
const QWEN: Row = Row { ctas: 4, threads: 512, slice: 151_936 * 2 / 4 };

impl Row {
    fn text(&self, text: &str) -> String {
        text.replace("STRIDE", &(16 * self.threads).to_string())
            .replace("WARPS", &(self.threads / 32).to_string())
            .replace("THREADS", &self.threads.to_string())
            .replace("SLICE", &self.slice.to_string())
            .replace("CTAS", &self.ctas.to_string())
    }

    fn launch(&self, rows: u32) -> GridLaunch {
        GridLaunch {
            grid: [self.ctas * rows, 1, 1],
            block: [self.threads, 1, 1],
            cluster: [self.ctas, 1, 1],
            dynamic_shared: self.slice,
        }
    }

    fn elements(&self) -> usize {
        (self.ctas * self.slice / 2) as usize
    }

    fn input(&self, rows: u32) -> Vec<bf16> {
        let element = |i: usize| bf16::from_f32((i * 7919 % 1009) as f32 / 101.0 - 5.0);
        (0..self.elements() * rows as usize).map(element).collect()
    }

    /// What `text` makes of `rows` rows, by both orders.
    fn run(&self, text: &str, rows: u32, units: ApproximateUnits) -> Result<Vec<bf16>, PtxInterpretError> {
        let module = PtxModule::parse(&self.text(text))?;
        let bytes = self.input(rows).iter().flat_map(|x| x.to_le_bytes()).collect();
        let out =
            module.run_both("softmax", &self.launch(rows), vec![GlobalArray::input("row", bytes)], &[0], units, 7)?;
        Ok(out[0].bytes.chunks(2).map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]])).collect())
    }
}

/// That each of `got` is the softmax of its row, to half an ulp of bf16 and what f32 leaves.
fn assert_softmax(row: Row, rows: u32, got: &[bf16]) {
    for (input, got) in row.input(rows).chunks(row.elements()).zip(got.chunks(row.elements())) {
        let sum: f64 = input.iter().map(|x| x.to_f64().exp()).sum();
        for (x, got) in input.iter().zip(got) {
            let expected = x.to_f64().exp() / sum;
            let error = (got.to_f64() - expected).abs() / expected;
            assert!(error < 0.5_f64.powi(8), "{x}: {got}, expected {expected}");
        }
    }
}

#[test]
fn softmax_rows_are_right_by_all_units() {
    for units in [ApproximateUnits::Rounded, ApproximateUnits::Above, ApproximateUnits::Below] {
        assert_softmax(SMALL, 3, &SMALL.run(TEXT, 3, units).unwrap());
    }
}

#[test]
fn softmax_of_a_whole_row_is_right() {
    assert_softmax(QWEN, 1, &QWEN.run(TEXT, 1, ApproximateUnits::Rounded).unwrap());
}

/// What is found where lines of the text are others.
fn found(edits: &[(&str, &str)]) -> PtxFault {
    let mut text = TEXT.to_string();
    for (line, other) in edits {
        assert!(text.contains(line), "{line}");
        text = text.replace(line, other);
    }
    match SMALL.run(&text, 2, ApproximateUnits::Rounded) {
        Err(PtxInterpretError::Fault { fault, .. }) => fault,
        other => panic!("{edits:?}: {other:?}"),
    }
}

const START: (&str, &str) = (
    "barrier.cluster.arrive.relaxed.aligned;         // start",
    "barrier.cluster.wait.aligned;                   // start",
);
const MAXIMA: (&str, &str) = (
    "barrier.cluster.arrive.release.aligned;         // maxima",
    "barrier.cluster.wait.acquire.aligned;           // maxima",
);
const SUMS: (&str, &str) = (
    "barrier.cluster.arrive.release.aligned;         // sums",
    "barrier.cluster.wait.acquire.aligned;           // sums",
);

#[test]
fn softmax_needs_every_wait() {
    for (removed, fault) in [
        (vec!["cp.async.wait_group 0;                          // copy"], PtxFault::NotCopied),
        (vec!["bar.sync 0;                                     // maxima of warps"], PtxFault::Race),
        (vec!["bar.sync 0;                                     // sums of warps"], PtxFault::Race),
        (vec![START.0, START.1], PtxFault::PeerNotStarted),
        (vec![START.0], PtxFault::Deadlock),
        // The warp that gives nothing to peers comes first, to its next arrival.
        (vec![START.1], PtxFault::Undefined),
        (vec![MAXIMA.0, MAXIMA.1], PtxFault::Uninitialised),
        (vec![MAXIMA.0], PtxFault::Deadlock),
        (vec![MAXIMA.1], PtxFault::Uninitialised),
        (vec![SUMS.0, SUMS.1], PtxFault::Uninitialised),
        (vec![SUMS.0], PtxFault::Deadlock),
        (vec![SUMS.1], PtxFault::Uninitialised),
    ] {
        let edits: Vec<_> = removed.iter().map(|line| (*line, "")).collect();
        assert_eq!(found(&edits), fault, "{removed:?}");
    }
}

#[test]
fn softmax_relaxed_arrival_orders_nothing() {
    for (arrive, _) in [MAXIMA, SUMS] {
        assert_eq!(found(&[(arrive, "barrier.cluster.arrive.relaxed.aligned;")]), PtxFault::Race);
        let fenced = "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned;";
        let text = TEXT.replace(arrive, fenced);
        assert_softmax(SMALL, 2, &SMALL.run(&text, 2, ApproximateUnits::Rounded).unwrap());
        let too_near = "fence.acq_rel.cta; barrier.cluster.arrive.relaxed.aligned;";
        assert_eq!(found(&[(arrive, too_near)]), PtxFault::Race);
    }
    // Nor does a fence order what comes after it.
    let store = "@%p2 st.shared::cluster.f32 [%r20], %f0;";
    let early = format!("fence.acq_rel.cluster; {store}");
    assert_eq!(found(&[(store, &early), (MAXIMA.0, "barrier.cluster.arrive.relaxed.aligned;")]), PtxFault::Race);
}

#[test]
fn softmax_bounds_and_alignment_are_checked() {
    let rounds = ["copied", "found", "summed", "written"];
    for label in rounds {
        let right = format!("setp.ge.u32 %p0, %r5, SLICE;\n    @%p0 bra {label};");
        let wrong = format!("setp.gt.u32 %p0, %r5, SLICE;\n    @%p0 bra {label};");
        assert_eq!(found(&[(&right, &wrong)]), PtxFault::OutOfBounds, "{label}");
    }
    assert_eq!(
        found(&[("add.u32 %r6, %r4, %r5;\n    ld", "add.u32 %r6, %r4, %r5;\n add.u32 %r6, %r6, 8;\n    ld")]),
        PtxFault::Misaligned
    );
    assert_eq!(found(&[("st.global.cs.b32 [%rd3]", "st.global.cs.b32 [%rd3 + 2]")]), PtxFault::Misaligned);
    assert_eq!(found(&[("st.global.cs.b32 [%rd3]", "st.global.cs.b32 [%rd3 + -4]")]), PtxFault::OutOfBounds);
    assert_eq!(found(&[("mul.wide.u32 %rd1, %r1, SLICE;", "mul.wide.u32 %rd1, %r2, SLICE;")]), PtxFault::Race);
}

#[test]
fn softmax_threads_read_nothing_that_others_write() {
    // The next 16 bytes are another thread's, which it writes.
    let text = [("write_words:\n    ld.shared.b32 %r11, [%r6];", "write_words:\n    ld.global.b32 %r11, [%rd3];")];
    SMALL.run(&TEXT.replace(text[0].0, text[0].1), 1, ApproximateUnits::Rounded).unwrap();
    let other = [(text[0].0, "write_words:\n    ld.global.b32 %r11, [%rd0];")];
    assert_eq!(found(&other), PtxFault::Race);
    // A CTA leaves out the first words, and another writes them.
    let unwritten = PtxModule::parse(&SMALL.text(TEXT)).unwrap();
    let bytes = vec![0; 2 * SMALL.elements()];
    let options = InterpretOptions { order: ThreadOrder::Shuffled(3), ..InterpretOptions::default() };
    let whole = 0..bytes.len();
    let buffers = vec![GlobalArray::input("row", bytes).unwritten(std::iter::once(whole))];
    let error = unwritten.run("softmax", &SMALL.launch(1), buffers, &[0], &options).unwrap_err();
    assert!(matches!(error, PtxInterpretError::Fault { fault: PtxFault::Uninitialised, .. }), "{error}");
}

#[test]
fn softmax_launches_that_do_not_fit_are_refused() {
    let module = PtxModule::parse(&SMALL.text(TEXT)).unwrap();
    let right = SMALL.launch(1);
    let row = || GlobalArray::input("row", vec![0; 2 * SMALL.elements()]);
    let run = |launch: GridLaunch, buffers: Vec<GlobalArray>, arguments: &[usize]| match module.run(
        "softmax",
        &launch,
        buffers,
        arguments,
        &InterpretOptions::default(),
    ) {
        Err(PtxInterpretError::Launch(problem)) => problem,
        other => panic!("{launch:?}: {other:?}"),
    };
    for (launch, told) in [
        (GridLaunch { cluster: [1, 1, 1], ..right }, "clusters of [1, 1, 1], and .reqnctapercluster says [2, 1, 1]"),
        (GridLaunch { block: [32, 1, 1], ..right }, "a block of [32, 1, 1] threads, and .reqntid says [64, 1, 1]"),
        (GridLaunch { block: [0, 1, 1], ..right }, "a block of [0, 1, 1] threads, expected 1 to 1024"),
        (
            GridLaunch { grid: [3, 1, 1], ..right },
            "a grid of [3, 1, 1] CTAs in clusters of [2, 1, 1], expected whole clusters",
        ),
        (GridLaunch { grid: [u32::MAX - 1, 1, 1], ..right }, "a grid of"),
        (GridLaunch { dynamic_shared: 1 << 30, ..right }, "1073741824 bytes of dynamic shared memory are too many"),
    ] {
        let problem = run(launch, vec![row()], &[0]);
        assert!(problem.starts_with(told), "{problem}");
    }
    assert_eq!(run(right, vec![row()], &[]), "0 arguments, and softmax takes row");
    assert_eq!(run(right, vec![row()], &[1]), "argument 1 of 1 buffers");
}
