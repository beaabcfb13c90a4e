//! Each rule: a kernel that keeps it, and its twin that breaks it.

use std::ops::Range;

use assay_ptx_interpreter::{GlobalArray, InterpretOptions, PtxFault, PtxInterpretError, PtxModule};

use crate::small::{APART, CTA, PAIR, Shape, WARP, text};

/// Writes `%r10` to the thread's word of `b`.
const OUT: &str = "add.u64 %rd3, %rd1, %rd2;\n st.global.b32 [%rd3], %r10;\n";
/// The thread's word of `a` goes to its place in `room`, at `%r5`.
const COPY: &str = "shl.b32 %r5, %r0, 2;\n add.u32 %r5, %r2, %r5;\n add.u64 %rd4, %rd0, %rd2;\n \
    cp.async.ca.shared.global [%r5], [%rd4], 4;\n";
/// The thread's number goes to its place in `room`, at `%r5`.
const SHARE: &str = "shl.b32 %r5, %r0, 2;\n add.u32 %r5, %r2, %r5;\n st.shared.b32 [%r5], %r0;\n";

/// `kept` runs and gives `expected` in each thread; with `other` in place of `line`, `fault` is found, and what is told of
/// it has `told` in it.
#[track_caller]
fn needs(
    shape: Shape,
    kept: &str,
    expected: impl Fn(u32) -> u32,
    line: &str,
    other: &str,
    fault: PtxFault,
    told: &str,
) {
    let all = shape.ctas * shape.threads;
    assert_eq!(shape.run(kept).unwrap(), (0..all).map(expected).collect::<Vec<_>>());
    assert!(kept.contains(line));
    let (found, problem) = shape.found(&kept.replace(line, other));
    assert_eq!(found, fault, "{problem}");
    assert!(problem.contains(told), "{problem}");
}

#[test]
fn registers_are_written_before_they_are_read() {
    let kept = format!("mov.u32 %r10, 5;\n add.u32 %r10, %r10, 1;\n{OUT}");
    needs(WARP, &kept, |_| 6, "mov.u32 %r10, 5;\n", "", PtxFault::Uninitialised, "a register");
    // By every thread that reads.
    let some = "setp.lt.u32 %p0, %r0, 31;\n @%p0 mov.u32 %r10, 5;\n";
    assert_eq!(WARP.found(&format!("{some}{OUT}")).0, PtxFault::Uninitialised);
}

#[test]
fn shared_memory_is_written_before_it_is_read() {
    let kept = format!("{SHARE} bar.sync 0;\n ld.shared.b32 %r10, [%r5];\n{OUT}");
    needs(WARP, &kept, |i| i, "st.shared.b32 [%r5], %r0;", "", PtxFault::Uninitialised, "never written");
    // By byte.
    let bytes = kept.replace("st.shared.b32 [%r5], %r0;", "st.shared.b8 [%r5], %r0; st.shared.b16 [%r5 + 2], %r0;");
    assert_eq!(WARP.found(&bytes).0, PtxFault::Uninitialised);
}

#[test]
fn outputs_are_written_whole_and_not_read() {
    let kept = format!("mov.u32 %r10, 5;\n{OUT}");
    let module = PtxModule::parse(&text(1, &kept)).unwrap();
    let error = |b: usize| {
        let buffers = vec![GlobalArray::input("a", Vec::new()), GlobalArray::output("b", b)];
        module.run("small", &WARP.launch(), buffers, &[0, 1], &InterpretOptions::default()).unwrap_err()
    };
    assert_eq!(error(136), PtxInterpretError::Unwritten { buffer: "b".into(), bytes: 8, first: 128 });
    assert_eq!(error(136).to_string(), "b: 8 bytes were never written, the first at 128");
    let read = format!("ld.global.b32 %r10, [%rd1];\n{OUT}");
    assert_eq!(WARP.found(&read), (PtxFault::Uninitialised, "byte 0 of b was never written".into()));
    // A part of an array alone.
    let part = |bytes: Range<usize>, text: String| {
        let buffers = vec![
            GlobalArray::input("a", Vec::new()),
            GlobalArray::input("b", vec![0; 136]).unwritten(std::iter::once(bytes)),
        ];
        PtxModule::parse(&text).unwrap().run("small", &WARP.launch(), buffers, &[0, 1], &InterpretOptions::default())
    };
    let whole = |bytes| part(bytes, text(1, &kept));
    assert!(whole(4..128).is_ok());
    assert_eq!(whole(120..132).unwrap_err(), PtxInterpretError::Unwritten { buffer: "b".into(), bytes: 4, first: 128 });
    assert!(matches!(whole(120..137), Err(PtxInterpretError::Launch(why)) if why.contains("120..137 of b")));
    let beyond = text(1, &format!("ld.global.b32 %r10, [%rd1 + 132];\n{OUT}"));
    part(0..128, beyond.clone()).unwrap();
    assert!(matches!(part(132..136, beyond), Err(PtxInterpretError::Fault { fault: PtxFault::Uninitialised, .. })));
}

#[test]
fn accesses_outside_an_array_are_refused() {
    let kept = format!("add.u64 %rd4, %rd0, %rd2;\n ld.global.b32 %r10, [%rd4];\n{OUT}");
    let beyond = "[%rd4 + 4]";
    needs(WARP, &kept, |i| i, "[%rd4]", beyond, PtxFault::OutOfBounds, "4 bytes at byte 128 of a, which has 128");
    needs(WARP, &kept, |i| i, "[%rd4]", "[%rd4 + -4]", PtxFault::OutOfBounds, "4 bytes at byte -4 of a, which has 128");
    needs(WARP, &kept, |i| i, "%rd0, %rd2;\n ld", "%rd2, %rd2;\n ld", PtxFault::OutOfBounds, "which is in no array");
    // Nor do they begin inside and end outside.
    let module = PtxModule::parse(&text(1, "ld.global.v2.b32 {%r5, %r6}, [%rd0 + 8];")).unwrap();
    let run = |bytes: usize| {
        let buffers = vec![GlobalArray::input("a", vec![0; bytes]), GlobalArray::input("b", Vec::new())];
        module.run("small", &WARP.launch(), buffers, &[0, 1], &InterpretOptions::default())
    };
    assert!(run(16).is_ok());
    assert!(matches!(run(12), Err(PtxInterpretError::Fault { fault: PtxFault::OutOfBounds, .. })));
    let kept = format!("st.shared.b32 [room + 252], 7;\n ld.shared.b32 %r10, [room + 252];\n{OUT}")
        .replace("st.shared", "setp.eq.u32 %p0, %r0, 0;\n @%p0 st.shared")
        .replace("\n ld.shared", "\n bar.sync 0;\n ld.shared");
    let told = "4 bytes at byte 256 of an array of 256 in shared memory";
    needs(WARP, &kept, |_| 7, "[room + 252];", "[room + 256];", PtxFault::OutOfBounds, told);
}

#[test]
fn accesses_are_aligned_to_their_size() {
    let kept = format!("ld.global.v4.b32 {{%r6, %r7, %r8, %r10}}, [%rd0 + 16];\n{OUT}");
    needs(WARP, &kept, |_| 7, "[%rd0 + 16]", "[%rd0 + 8]", PtxFault::Misaligned, "16 bytes at byte 8 of a");
    let kept = format!("{SHARE} bar.sync 0;\n ld.shared.v2.b32 {{%r6, %r10}}, [%r2 + 8];\n{OUT}");
    needs(WARP, &kept, |_| 3, "[%r2 + 8]", "[%r2 + 4]", PtxFault::Misaligned, "8 bytes at byte 4");
    // An array of 16 is no better aligned than that.
    let kept = format!("{{ .reg .b32 %q<2>; and.b32 %q0, %r2, 31; mov.u32 %r10, %q0; }}\n{OUT}");
    assert_eq!(WARP.run(&kept).unwrap(), [16; 32]);
}

/// A kernel sees where an array begins, and reads no more at once than suits that.
#[test]
fn arrays_that_begin_late_are_no_better_aligned() {
    let place = format!("{{ .reg .b64 %q<2>; and.b64 %q0, %rd0, 15; cvt.u32.u64 %r10, %q0; }}\n{OUT}");
    let word = format!("ld.global.b32 %r10, [%rd0 + 16];\n{OUT}");
    let block = format!("ld.global.v4.b32 {{%r6, %r7, %r8, %r10}}, [%rd0 + 16];\n{OUT}");
    for late in [0, 4, 12] {
        assert_eq!(WARP.run_late(&place, late).unwrap(), [late; 32]);
        assert_eq!(WARP.run_late(&word, late).unwrap(), [4; 32]);
        let ran = WARP.run_late(&block, late);
        match ran {
            Ok(words) => assert_eq!((late, words), (0, vec![7; 32])),
            Err(PtxInterpretError::Fault { fault, problem, .. }) => {
                assert_eq!(fault, PtxFault::Misaligned);
                assert!(late > 0 && problem.contains("16 bytes at byte 16 of a"), "{problem}");
            }
            Err(other) => panic!("{other}"),
        }
    }
    let word = word.replace("+ 16", "+ 128");
    assert!(WARP.run_late(&word, 4).unwrap_err().to_string().contains("byte 128 of a, which has 128"));
}

#[test]
fn copies_are_waited_for() {
    let kept = format!("{COPY} cp.async.wait_all;\n ld.shared.b32 %r10, [%r5];\n{OUT}");
    needs(CTA, &kept, |i| i, "cp.async.wait_all;\n", "", PtxFault::NotCopied, "is being written by CTA 0, thread 0");
    // A group that is not committed is not waited for, and one that is newest may be under way.
    let group = "cp.async.commit_group; cp.async.wait_group 0;";
    let kept = kept.replace("cp.async.wait_all;", group);
    needs(CTA, &kept, |i| i, "cp.async.commit_group;", "", PtxFault::NotCopied, "is being written");
    needs(CTA, &kept, |i| i, "wait_group 0", "wait_group 1", PtxFault::NotCopied, "is being written");
    let older = kept.replace(group, "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;");
    assert_eq!(CTA.run(&older).unwrap(), (0..64).collect::<Vec<_>>());
    // Nobody waits by going.
    let told = "it exits, and a cp.async that it issued was not waited for";
    assert_eq!(CTA.found(&format!("{COPY} mov.u32 %r10, 0;\n{OUT}")), (PtxFault::NotCopied, told.into()));
}

#[test]
fn copies_are_published_by_a_barrier() {
    let other = "xor.b32 %r6, %r0, 1;\n shl.b32 %r6, %r6, 2;\n add.u32 %r6, %r2, %r6;\n";
    let kept = format!("{COPY}{other} cp.async.wait_all;\n bar.sync 0;\n ld.shared.b32 %r10, [%r6];\n{OUT}");
    needs(CTA, &kept, |i| i ^ 1, "bar.sync 0;\n", "", PtxFault::Race, "was written by CTA 0, thread 1");
    let (right, late) = ("cp.async.wait_all;\n bar.sync 0;", "bar.sync 0;\n cp.async.wait_all;");
    needs(CTA, &kept, |i| i ^ 1, right, late, PtxFault::Race, "nothing orders that before this");
    needs(CTA, &kept, |i| i ^ 1, "cp.async.wait_all;", "", PtxFault::NotCopied, "is being written by CTA 0, thread");
}

#[test]
fn copy_source_is_not_written_before_the_copy_ends() {
    let kept = format!("{COPY} cp.async.wait_all;\n st.global.b32 [%rd4], 7;\n ld.shared.b32 %r10, [%r5];\n{OUT}");
    let (wait, store) = (" cp.async.wait_all;\n", " st.global.b32 [%rd4], 7;\n");
    let swapped = format!("{store}{wait}");
    needs(CTA, &kept, |i| i, &format!("{wait}{store}"), &swapped, PtxFault::NotCopied, "byte 0 of a is being read");
    // Not even by who reads it once more.
    let again = format!("ld.global.b32 %r9, [%rd4];\n{store}{wait}");
    needs(CTA, &kept, |i| i, &format!("{wait}{store}"), &again, PtxFault::NotCopied, "byte 0 of a is being read");
    // Nor by another, if nothing tells it.
    let other = kept.replace("[%rd4], 7", "[%rd5], 7").replace(
        wait,
        " xor.b32 %r6, %r0, 1; mul.wide.u32 %rd5, %r6, 4; add.u64 %rd5, %rd0, %rd5; cp.async.wait_all;\n bar.sync 0;\n",
    );
    needs(CTA, &other, |i| i, "bar.sync 0;", "", PtxFault::Race, "byte 4 of a was read by CTA 0, thread 1");
}

#[test]
fn copy_source_of_many_is_written_once_all_have_it() {
    let write = "setp.eq.u32 %p0, %r0, 9;\n @%p0 st.global.b32 [%rd0], 7;\n";
    let copy = COPY.replace("[%r5], [%rd4]", "[%r5], [%rd0]");
    let kept = format!("{copy} cp.async.wait_all;\n bar.sync 0;\n{write} ld.shared.b32 %r10, [%r5];\n{OUT}");
    needs(CTA, &kept, |_| 0, "bar.sync 0;", "", PtxFault::Race, "byte 0 of a was read by CTA 0, thread 0");
}

#[test]
fn copies_of_fewer_bytes_are_filled_with_zeros() {
    let kept = format!("{COPY} cp.async.wait_all;\n ld.shared.b32 %r10, [%r5];\n{OUT}");
    let of_thread = |size: &str| kept.replace("[%rd4], 4;", &format!("[%rd4], 4, {size};"));
    let far = |i: u32| if i == 40 { 0 } else { i };
    let size = "setp.ne.u32 %p0, %r0, 40;\n selp.u32 %r6, 4, 0, %p0;\n";
    assert_eq!(CTA.run(&format!("{size}{}", of_thread("%r6"))).unwrap(), (0..64).map(far).collect::<Vec<_>>());
    let ignored = "setp.eq.u32 %p0, %r0, 40;\n";
    assert_eq!(CTA.run(&format!("{ignored}{}", of_thread("%p0"))).unwrap(), (0..64).map(far).collect::<Vec<_>>());
    let cut = |i: u32| i & 0xFF;
    assert_eq!(CTA.run(&of_thread("1")).unwrap(), (0..64).map(cut).collect::<Vec<_>>());
    assert_eq!(CTA.found(&of_thread("5")), (PtxFault::Undefined, "5 bytes to be read for 4".into()));
    // What is not read need not be there.
    let beyond = format!("add.u64 %rd0, %rd0, 4096;\n{}", of_thread("0"));
    assert_eq!(CTA.run(&beyond).unwrap(), [0; 64]);
    assert_eq!(CTA.found(&beyond.replace(", 0;", ", 1;")).0, PtxFault::OutOfBounds);
    let misaligned = kept.replace("[%r5], [%rd4]", "[%r5], [%rd4 + 2]");
    assert_eq!(CTA.found(&misaligned).0, PtxFault::Misaligned);
}

#[test]
fn threads_of_a_cta_are_ordered_by_its_barrier() {
    let other = "xor.b32 %r6, %r0, 33;\n shl.b32 %r6, %r6, 2;\n add.u32 %r6, %r2, %r6;\n";
    let read = format!("{SHARE}{other} bar.sync 0;\n ld.shared.b32 %r10, [%r6];\n{OUT}");
    needs(CTA, &read, |i| i ^ 0x21, "bar.sync 0;", "", PtxFault::Uninitialised, "never written");
    // What was read may be overwritten once all have read it.
    let overwritten = read.replace(OUT, &format!("bar.sync 1;\n st.shared.b32 [%r5], 7;\n{OUT}"));
    needs(CTA, &overwritten, |i| i ^ 0x21, "bar.sync 1;", "", PtxFault::Race, "nothing orders that before this");
    // Twice written is a race even of one value.
    let twice = format!("st.shared.b32 [%r2], 7;\n mov.u32 %r10, 0;\n{OUT}");
    let (fault, problem) = CTA.found(&twice);
    assert_eq!(fault, PtxFault::Race);
    let told = "byte 0 of an array of 256 in shared memory, of CTA 0 was written by CTA 0, thread 0 at line 23 \
                (st.shared.b32), and nothing orders that before this";
    assert_eq!(problem, told);
}

#[test]
fn threads_of_a_warp_are_ordered_by_its_barrier_alone() {
    let other = "xor.b32 %r6, %r0, 1;\n shl.b32 %r6, %r6, 2;\n add.u32 %r6, %r2, %r6;\n";
    let read = format!("{SHARE}{other} bar.warp.sync 0xFFFFFFFF;\n ld.shared.b32 %r10, [%r6];\n{OUT}");
    let shuffle = "shfl.sync.idx.b32 %r7, %r0, 0, 31, 0xFFFFFFFF;";
    needs(
        CTA,
        &read,
        |i| i ^ 1,
        "bar.warp.sync 0xFFFFFFFF;",
        shuffle,
        PtxFault::Race,
        "was written by CTA 0, thread 1",
    );
    let half = read
        .replace("0xFFFFFFFF", "%r8")
        .replace("bar.warp", "and.b32 %r7, %r0, 16;\n shl.b32 %r8, 0xFFFF, %r7;\n bar.warp");
    assert_eq!(CTA.run(&half).unwrap(), (0..64).map(|i| i ^ 1).collect::<Vec<_>>());
    let across = half.replace("%r0, 1;", "%r0, 16;");
    assert_eq!(CTA.found(&across).0, PtxFault::Race);
}

#[test]
fn barriers_of_some_threads_order_those() {
    // Warp 0 produces and goes on, warp 1 waits.
    let body = format!(
        "setp.lt.u32 %p0, %r0, 32;\n mov.u32 %r10, 0;\n @%p0 bra produce;\n bar.sync 3, 64;\n \
         ld.shared.b32 %r10, [room];\n bra done;\nproduce:\n setp.eq.u32 %p1, %r0, 0;\n @%p1 st.shared.b32 [room], 9;\n \
         bar.arrive 3, 64;\ndone:\n{OUT}"
    );
    let expected = |i| if i < 32 { 0 } else { 9 };
    needs(CTA, &body, expected, "bar.arrive 3, 64;", "", PtxFault::Deadlock, "32 threads wait at line");
    needs(CTA, &body, expected, "bar.arrive 3, 64;", "bar.arrive 3, 96;", PtxFault::Undefined, "barrier 3 for Some");
    needs(CTA, &body, expected, "bar.arrive 3, 64;", "bar.arrive 2, 64;", PtxFault::Deadlock, "");
    needs(CTA, &body, expected, "bar.arrive 3, 64;", "bar.arrive 16, 64;", PtxFault::Undefined, "barrier 16");
    // Threads that exit hold up no barrier of all.
    let exits = format!("mov.u32 %r10, 4;\n{OUT} setp.lt.u32 %p0, %r0, 32;\n @%p0 exit;\n bar.sync 0;\n");
    assert_eq!(CTA.run(&exits).unwrap(), [4; 64]);
}

#[test]
fn barriers_that_reduce_give_all_the_result() {
    let body = |form: &str, to: &str| {
        format!(
            "setp.lt.u32 %p0, %r0, 5;\n bar.red.{form} {to}, 0, %p0;\n selp.u32 %r11, 1, 0, %p1;\n add.u32 %r10, %r10, %r11;\n{OUT}"
        )
    };
    let start = "mov.u32 %r10, 0;\n setp.ne.u32 %p1, %r10, %r10;\n";
    let run = |form, to| CTA.run(&format!("{start}{}", body(form, to))).unwrap();
    assert_eq!(run("popc.u32", "%r10"), [5; 64]);
    assert_eq!(run("or.pred", "%p1"), [1; 64]);
    assert_eq!(run("and.pred", "%p1"), [0; 64]);
}

#[test]
fn barriers_are_reached_by_a_whole_warp() {
    let kept = format!("setp.lt.u32 %p0, %r0, 64;\n @%p0 bar.sync 0;\n mov.u32 %r10, 1;\n{OUT}");
    needs(CTA, &kept, |_| 1, "64;\n @", "16;\n @", PtxFault::Divergence, "thread 16 of the warp steps over it");
    // Without .aligned, threads of a warp may come one by one; who exits holds up nobody.
    let apart = kept.replace("bar.sync", "barrier.sync").replace("64;", "16;");
    assert_eq!(CTA.run(&apart).unwrap(), [1; 64]);
    let branches = "setp.lt.u32 %p0, %r0, 16;\n @%p0 bra one;\n bar.sync 0;\n bra two;\none:\n bar.sync 0;\ntwo:\n";
    let (fault, problem) = WARP.found(branches);
    assert_eq!(fault, PtxFault::Divergence);
    assert!(problem.contains("of the warp is at line"), "{problem}");
    let exits = "setp.lt.u32 %p0, %r0, 16;\n @%p0 exit;\n bar.sync 0;\n";
    assert_eq!(WARP.found(exits), (PtxFault::Divergence, "thread 0 of the warp has exited".into()));
}

#[test]
fn branches_called_uniform_are_uniform() {
    let kept =
        format!("mov.u32 %r10, 1;\n setp.lt.u32 %p0, %r0, 32;\n @%p0 bra.uni low;\n mov.u32 %r10, 2;\nlow:\n{OUT}");
    let expected = |i| if i < 32 { 1 } else { 2 };
    needs(CTA, &kept, expected, "%r0, 32;", "%r0, 33;", PtxFault::Divergence, "take the branch and this does not");
}

#[test]
fn shuffles_need_who_they_name() {
    let kept = format!("shfl.sync.bfly.b32 %r10, %r0, 1, 31, 0xFFFFFFFF;\n{OUT}");
    let guarded = "@%p0 shfl";
    let guard = "setp.lt.u32 %p0, %r0, 8;\n";
    needs(
        WARP,
        &format!("{guard}{kept}"),
        |i| i ^ 1,
        "shfl",
        guarded,
        PtxFault::Divergence,
        "thread 8 of the warp steps over",
    );
    // Some may, if they name themselves alone.
    let some = format!("mov.u32 %r10, 0;\n{guard}{kept}").replace("shfl", guarded).replace("0xFFFFFFFF", "0xFF");
    assert_eq!(WARP.run(&some).unwrap()[..9], [1, 0, 3, 2, 5, 4, 7, 6, 0]);
    let (fault, problem) = WARP.found(&some.replace(", 1, 31", ", 8, 31"));
    assert_eq!((fault, problem), (PtxFault::Undefined, "the value of lane 8, which takes no part".into()));
    assert_eq!(WARP.found(&some.replace("0xFF", "%r0")).0, PtxFault::Divergence);
}

#[test]
fn peers_are_touched_while_they_are_there() {
    let start = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; // start\n";
    let end = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; // end\n";
    let peer = "xor.b32 %r6, %r1, 1;\n mapa.shared::cluster.u32 %r7, %r5, %r6;\n";
    // A write to the peer, which reads it.
    let push = format!(
        "shl.b32 %r5, %r0, 2;\n add.u32 %r5, %r2, %r5;\n{start}{peer} st.shared::cluster.b32 [%r7], %r3;\n{end} \
         ld.shared.b32 %r10, [%r5];\n{OUT}"
    );
    let swapped = |i| i ^ 32;
    needs(PAIR, &push, swapped, start, "", PtxFault::PeerNotStarted, "is not known to have started");
    // A read of the peer, which stays until it is over.
    let pull = format!(
        "shl.b32 %r5, %r0, 2;\n add.u32 %r5, %r2, %r5;\n st.shared.b32 [%r5], %r3;\n\
         barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n{peer} ld.shared::cluster.b32 %r10, [%r7];\n{OUT}{end}"
    );
    needs(PAIR, &pull, swapped, end, "", PtxFault::PeerExited, "nothing keeps CTA");
    let relaxed = end.replace("arrive", "arrive.relaxed");
    needs(PAIR, &pull, swapped, end, &relaxed, PtxFault::PeerExited, "nothing keeps CTA");
    // The CTA's own address is no peer's, and a peer's is none of its own.
    needs(
        PAIR,
        &pull,
        swapped,
        "mapa.shared::cluster.u32 %r7, %r5, %r6",
        "mov.u32 %r7, 0x3000000",
        PtxFault::OutOfBounds,
        "",
    );
    needs(
        PAIR,
        &pull,
        swapped,
        "ld.shared::cluster",
        "ld.shared::cta",
        PtxFault::OutOfBounds,
        "which is not of this space",
    );
    needs(
        PAIR,
        &pull,
        swapped,
        "xor.b32 %r6, %r1, 1;",
        "add.u32 %r6, %r1, 1;",
        PtxFault::Undefined,
        "rank 2 of 2 CTAs",
    );
}

#[test]
fn peers_starts_may_be_learnt_from_others() {
    let kept = |bits: u32, bound: u32, barrier: &str| {
        format!(
            "shl.b32 %r5, %r0, 2;\n add.u32 %r5, %r2, %r5;\n barrier.cluster.arrive.relaxed;\n and.b32 %r9, %r0, {bits};\n \
             setp.lt.u32 %p0, %r9, {bound};\n @%p0 barrier.cluster.wait;\n {barrier}\n xor.b32 %r6, %r1, 1;\n \
             mapa.shared::cluster.u32 %r7, %r5, %r6;\n st.shared::cluster.b32 [%r7], %r3;\n \
             @!%p0 barrier.cluster.wait;\n barrier.cluster.arrive;\n barrier.cluster.wait;\n ld.shared.b32 %r10, [%r5];\n{OUT}"
        )
    };
    let two = Shape { threads: 64, ..PAIR };
    for (bits, bound, barrier) in [(63, 32, "bar.sync 0;"), (31, 16, "bar.warp.sync -1;")] {
        let kept = kept(bits, bound, barrier);
        needs(two, &kept, |i| i ^ 0x40, barrier, "", PtxFault::PeerNotStarted, "is not known to have started");
    }
    // Half a warp that waits for the other half, which waits for it.
    let kept =
        "setp.lt.u32 %p0, %r0, 16;\n @%p0 barrier.cluster.arrive;\n @%p0 barrier.cluster.wait;\n bar.warp.sync -1;\n";
    let (fault, problem) = WARP.found(kept);
    assert_eq!(fault, PtxFault::Deadlock);
    let told = "16 threads wait at line 25 (barrier.cluster.wait), the first CTA 0, thread 0; \
                16 threads wait at line 26 (bar.warp.sync), the first CTA 0, thread 16; 0 threads have exited";
    assert_eq!(problem, told);
}

#[test]
fn cluster_phases_have_arrivals_and_waits_by_all() {
    let kept = format!(
        "setp.lt.u32 %p0, %r1, 2;\n @%p0 barrier.cluster.arrive.aligned;\n @%p0 barrier.cluster.wait.aligned;\n \
         mov.u32 %r10, 1;\n{OUT}"
    );
    let arrive = "@%p0 barrier.cluster.arrive.aligned;";
    needs(PAIR, &kept, |_| 1, arrive, "", PtxFault::Deadlock, "a phase on which it did not arrive");
    needs(PAIR, &kept, |_| 1, arrive, &arrive.repeat(2), PtxFault::Undefined, "it arrives again");
    // A warp that leaves out a phase, and waits for one that does not.
    let two = Shape { threads: 64, ..PAIR };
    let kept = kept.replace("%r1, 2;", "%r0, 64;").replace("mov", "bar.sync 0;\n mov");
    let told = "64 threads wait at line 25 (barrier.cluster.wait.aligned), the first CTA 0, thread 0; \
                64 threads wait at line 26 (bar.sync), the first CTA 0, thread 32; 0 threads have exited";
    needs(two, &kept, |_| 1, "%r0, 64;", "%r0, 32;", PtxFault::Deadlock, told);
    // One that exits holds up nobody.
    assert_eq!(PAIR.run(&kept.replace("lt.u32 %p0, %r0, 64", "eq.u32 %p0, %r1, 1")).unwrap(), [1; 64]);
}

#[test]
fn cluster_threads_that_exit_are_not_waited_for_twice() {
    // Warp 0 of the second CTA reads what warp 1 wrote before its arrival; the first CTA arrived and went.
    let kept = format!(
        "mov.u32 %r10, 0;\n{OUT} setp.eq.u32 %p0, %r1, 0;\n @%p0 barrier.cluster.arrive;\n @%p0 exit;\n \
         setp.eq.u32 %p1, %r0, 32;\n @%p1 st.shared.b32 [room], 5;\n barrier.cluster.arrive;\n barrier.cluster.wait;\n \
         ld.shared.b32 %r10, [room];\n{OUT}"
    );
    let two = Shape { threads: 64, ..PAIR };
    let expected = |i| if i < 64 { 0 } else { 5 };
    needs(two, &kept, expected, "barrier.cluster.arrive;\n barrier.cluster.wait;", "", PtxFault::Uninitialised, "");
}

#[test]
fn clusters_are_never_ordered() {
    let kept = format!("add.u64 %rd4, %rd0, %rd2;\n ld.global.b32 %r10, [%rd4];\n st.global.b32 [%rd4], 3;\n{OUT}");
    // One writes what another reads, or writes.
    let both =
        "add.u64 %rd4, %rd0, %rd2;\n and.b32 %r6, %r0, 31;\n mul.wide.u32 %rd4, %r6, 4;\n add.u64 %rd4, %rd0, %rd4;\n";
    needs(APART, &kept, |i| i, "add.u64 %rd4, %rd0, %rd2;\n", both, PtxFault::Race, "by CTA");
    // Of the writer's own cluster all have read before.
    let reads = format!("ld.global.b32 %r10, [%rd0 + 4];\n bar.sync 0;\n{OUT}");
    let write = format!("setp.eq.u32 %p0, %r3, 33;\n @%p0 st.global.b32 [%rd0 + 4], 1;\n{OUT}");
    needs(APART, &reads, |_| 1, OUT, &write, PtxFault::Race, "byte 4 of a was read by CTA 0, thread");
    let three = Shape { ctas: 3, ..APART };
    needs(three, &reads, |_| 1, OUT, &write.replace("33", "70"), PtxFault::Race, "byte 4 of a was read by CTA");
}

#[test]
fn atomic_operations_order_nothing_and_race_with_plain_ones() {
    let kept = format!(
        "setp.eq.u32 %p0, %r0, 0;\n @%p0 st.shared.u32 [room], 0;\n bar.sync 0;\n atom.shared.add.u32 %r6, [room], 2;\n \
         bar.sync 1;\n ld.shared.u32 %r10, [room];\n{OUT}"
    );
    needs(CTA, &kept, |_| 128, "bar.sync 1;", "", PtxFault::Race, "was read by CTA 0, thread");
    // In sequence too, where every read comes after all of them.
    let module = PtxModule::parse(&text(1, &kept.replace("bar.sync 1;", ""))).unwrap();
    let buffers = vec![GlobalArray::input("a", Vec::new()), GlobalArray::output("b", 128)];
    let error = module.run("small", &WARP.launch(), buffers, &[0, 1], &InterpretOptions::default()).unwrap_err();
    assert!(matches!(error, PtxInterpretError::Fault { fault: PtxFault::Race, line: 28, .. }), "{error}");
    needs(CTA, &kept, |_| 128, "bar.sync 0;", "", PtxFault::Race, "was written by CTA 0, thread 0");
    needs(CTA, &kept, |_| 128, "@%p0 st.shared.u32 [room], 0;", "", PtxFault::Uninitialised, "never written");
    // What comes first gets what depends on the order.
    let order = kept.replace("ld.shared.u32 %r10, [room];", "mov.u32 %r10, %r6;");
    assert!(matches!(CTA.run(&order), Err(PtxInterpretError::OrderDependent { .. })));
    // Across clusters too.
    let all = format!("red.global.add.u32 [%rd0], 1;\n mov.u32 %r10, 1;\n{OUT}");
    assert_eq!(APART.run(&all).unwrap(), [1; 64]);
    let read = format!(
        "red.global.add.u32 [%rd0], 1;\n setp.eq.u32 %p0, %r3, 40;\n @%p0 ld.global.u32 %r6, [%rd0];\n mov.u32 %r10, 1;\n{OUT}"
    );
    assert_eq!(APART.found(&read).0, PtxFault::Race);
}

#[test]
fn constant_loads_of_written_bytes_are_refused() {
    let kept = format!("add.u64 %rd4, %rd0, %rd2;\n ld.global.b32 %r10, [%rd4];\n st.global.b32 [%rd4], 3;\n{OUT}");
    needs(WARP, &kept, |i| i, "ld.global", "ld.global.nc", PtxFault::Undefined, "byte 0 of a was read");
    let after = kept.replace("st.global.b32 [%rd4], 3;", "st.global.b32 [%rd4], 3;\n ld.global.b32 %r6, [%rd4];");
    needs(
        WARP,
        &after,
        |i| i,
        "ld.global.b32 %r6",
        "ld.global.nc.b32 %r6",
        PtxFault::Undefined,
        "byte 0 of a was written",
    );
}

#[test]
fn run_without_end_is_given_up() {
    let module = PtxModule::parse(&text(1, "again:\n bra again;")).unwrap();
    let buffers = vec![GlobalArray::input("a", Vec::new()), GlobalArray::input("b", Vec::new())];
    let options = InterpretOptions { most_work: 1000, ..InterpretOptions::default() };
    let error = module.run("small", &WARP.launch(), buffers, &[0, 1], &options).unwrap_err();
    assert_eq!(error, PtxInterpretError::Endless { most: 1000 });
}
