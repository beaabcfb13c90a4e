//! Barriers in shared memory and asynchronous stores: kernels that meet by them, and their twins that break a rule.

use assay_ptx_interpreter::PtxFault;

use crate::small::{PAIR, Shape, WARP};

/// Thread 0 makes the barrier at byte 248 of `room` and expects `BYTES`; then the cluster's CTAs have started.
const INIT: &str = "setp.eq.u32 %p0, %r0, 0;\n @!%p0 bra made;\n mbarrier.init.shared::cta.b64 [room + 248], 1;\n \
    fence.mbarrier_init.release.cluster;\n mbarrier.arrive.expect_tx.shared::cta.b64 _, [room + 248], BYTES;\nmade:\n \
    barrier.cluster.arrive.relaxed;\n barrier.cluster.wait.acquire;\n";
/// Each thread stores its number of the grid in the peer's `room`, at `%r7`.
const STORE: &str = "shl.b32 %r5, %r0, 2;\n add.u32 %r5, %r2, %r5;\n xor.b32 %r6, %r1, 1;\n \
    mapa.shared::cluster.u32 %r7, %r5, %r6;\n add.u32 %r8, %r2, 248;\n mapa.shared::cluster.u32 %r8, %r8, %r6;\n \
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r7], %r3, [%r8];\n";
const WAIT: &str =
    "again:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [room + 248], 0;\n @!%p1 bra again;\n";
const READ: &str = "ld.shared.b32 %r10, [%r5];\n add.u64 %rd3, %rd1, %rd2;\n st.global.b32 [%rd3], %r10;\n";

fn kept() -> String {
    format!("{}{STORE}{WAIT}{READ}", INIT.replace("BYTES", "128"))
}

/// The kernel that keeps all rules, with `other` in place of `line`, shows `fault` and says `told`.
#[track_caller]
fn breaks(line: &str, other: &str, faults: &[PtxFault], told: &str) {
    let kept = kept();
    assert!(kept.contains(line), "{line}");
    let (found, problem) = PAIR.found(&kept.replace(line, other));
    assert!(faults.contains(&found), "{found}: {problem}");
    assert!(problem.contains(told), "{problem}");
}

#[test]
fn async_stores_are_there_after_their_phase() {
    assert_eq!(PAIR.run(&kept()).unwrap(), (0..64).map(|i| i ^ 32).collect::<Vec<_>>());
    // Vectors, more phases, and an arrival that counts alone.
    let vector = kept()
        .replace("BYTES", "128")
        .replace("bytes.b32 [%r7], %r3", "bytes.v2.b32 [%r7], {%r3, %r3}")
        .replace("expect_tx.shared::cta.b64 _, [room + 248], 128", "expect_tx.shared::cta.b64 _, [room + 248], 240")
        .replace("shl.b32 %r5, %r0, 2", "shl.b32 %r5, %r0, 3")
        .replace(
            "mapa.shared::cluster.u32 %r8, %r8, %r6;\n",
            "mapa.shared::cluster.u32 %r8, %r8, %r6;\n setp.lt.u32 %p2, %r0, 30;\n @%p2",
        )
        .replace(" ld.shared", "");
    let vector = vector.replace("ld.shared.b32 %r10, [%r5];", "mov.u32 %r10, 0;\n @%p2 ld.shared.b32 %r10, [%r5 + 4];");
    let expected = |i: u32| if i % 32 < 30 { i ^ 32 } else { 0 };
    assert_eq!(PAIR.run(&vector).unwrap(), (0..64).map(expected).collect::<Vec<_>>());
}

#[test]
fn async_phases_alternate_in_parity() {
    let second = "bar.warp.sync -1;\n @%p0 mbarrier.arrive.shared::cta.b64 _, [room + 248];\n";
    let again = WAIT.replace("again", "more").replace("], 0", "], 1");
    let two = kept().replace(READ, &format!("{second}{again}{READ}"));
    assert_eq!(PAIR.run(&two).unwrap(), (0..64).map(|i| i ^ 32).collect::<Vec<_>>());
    // The end of the second phase never comes.
    let (fault, problem) = PAIR.found(&two.replace(second, ""));
    assert_eq!(fault, PtxFault::Deadlock, "{problem}");
    assert!(problem.contains("lacks 1 arrivals and 0 bytes in its phase 1"), "{problem}");
}

#[test]
fn async_stores_before_their_phase_are_not_read() {
    let unread = [PtxFault::NotCopied, PtxFault::Uninitialised];
    breaks(WAIT, "", &unread, "");
    // One try may fail, whenever it is made.
    breaks("@!%p1 bra again;", "", &unread, "");
    // Nor does it help that the phase is over by then.
    let late = format!("barrier.cluster.arrive.relaxed;\n barrier.cluster.wait;\n{WAIT}");
    assert_eq!(PAIR.run(&kept().replace(WAIT, &late)).unwrap().len(), 64);
    breaks(
        WAIT,
        &late.replace("@!%p1 bra again;", ""),
        &[PtxFault::NotCopied],
        "did not wait for the end of the phase",
    );
    // The parity of the phase before is that of one that is over.
    breaks("], 0;\n @!", "], 1;\n @!", &unread, "");
    // Nothing of peers is acquired.
    breaks("acquire.cluster", "acquire.cta", &[PtxFault::NotCopied], "did not wait for the end of the phase");
    breaks("acquire.cluster", "relaxed.cluster", &[PtxFault::NotCopied], "did not wait for the end of the phase");
}

#[test]
fn async_bytes_that_are_miscounted_are_refused() {
    let early = [PtxFault::NotCopied, PtxFault::Uninitialised, PtxFault::PeerExited];
    breaks("248], 128", "248], 124", &early, "");
    breaks(
        "248], 128",
        "248], 132",
        &[PtxFault::Deadlock],
        "a barrier of CTA 0 lacks 0 arrivals and 4 bytes in its phase 0",
    );
    breaks(
        "arrive.expect_tx.shared::cta.b64 _, [room + 248], 128",
        "arrive.shared::cta.b64 _, [room + 248]",
        &early,
        "",
    );
    let arrival = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [room + 248], 128;";
    breaks(arrival, "", &[PtxFault::Deadlock], "lacks 1 arrivals and -128 bytes");
    breaks("248], 128", "248], 1048576", &[PtxFault::Undefined], "expects 1048576 bytes, expected at most 1048575");
    breaks(arrival, &arrival.repeat(2), &[PtxFault::Undefined], "");
}

#[test]
fn async_barriers_are_initialised_once_and_known() {
    breaks(
        "fence.mbarrier_init.release.cluster;",
        "",
        &[PtxFault::Race],
        "(mbarrier.init.shared::cta.b64), and nothing",
    );
    let init = "mbarrier.init.shared::cta.b64 [room + 248], 1;";
    breaks(init, "", &[PtxFault::Uninitialised], "there is no barrier here");
    breaks(init, &init.repeat(2), &[PtxFault::Undefined], "initialised twice");
    breaks("248], 1;", "248], 0;", &[PtxFault::Undefined], "a count of 0 arrivals");
    breaks("248], 1;", "248], 2;", &[PtxFault::Deadlock], "lacks 1 arrivals and 0 bytes");
    // Every thread makes it.
    breaks("@!%p0 bra made;", "", &[PtxFault::Undefined], "initialised twice");
    // A barrier is no memory.
    breaks(READ, &format!("ld.shared.b64 %rd4, [room + 248];\n{READ}"), &[PtxFault::Undefined], "bytes of an mbarrier");
    breaks(READ, &format!("st.shared.b32 [room + 252], 0;\n{READ}"), &[PtxFault::Undefined], "bytes of an mbarrier");
    // Nor is the store's barrier another CTA's.
    breaks("u32 %r8, %r8, %r6", "u32 %r8, %r8, %r1", &[PtxFault::Undefined], "expected those of one CTA");
}

/// A CTA that goes before it has what peers store there, or that never learns of it.
#[test]
fn async_stores_to_a_cta_that_exits_are_refused() {
    let silent = "mov.u32 %r10, 0;\n add.u64 %rd3, %rd1, %rd2;\n st.global.b32 [%rd3], %r10;\n";
    let no_wait = kept().replace(WAIT, "").replace(READ, silent);
    let (fault, problem) = PAIR.found(&no_wait);
    assert_eq!(fault, PtxFault::PeerExited, "{problem}");
    assert!(problem.contains("from exiting before these bytes are stored"), "{problem}");
    // One thread that waits keeps its CTA.
    let one = kept().replace(WAIT, &format!("@!%p0 bra done;\n{WAIT}done:\n")).replace(READ, silent);
    assert_eq!(PAIR.run(&one).unwrap(), [0; 64]);
    // A peer that is not known to have started.
    let start = "barrier.cluster.arrive.relaxed;\n barrier.cluster.wait.acquire;\n";
    breaks(start, "", &[PtxFault::PeerNotStarted], "not known to have started");
}

/// An asynchronous store makes nothing else known that its thread did, and its thread must know what it stores over.
#[test]
fn async_stores_order_nothing_else() {
    let four = Shape { threads: 64, ..PAIR };
    let store = STORE
        .replace(
            "mapa.shared::cluster.u32 %r7, %r5, %r6;",
            "add.u32 %r7, %r2, 240;\n \
        mapa.shared::cluster.u32 %r7, %r7, %r6;\n setp.eq.u32 %p2, %r0, 40;\n",
        )
        .replace(" st.async", " @%p2 st.async");
    // Warp 1 reads what warp 0 wrote before the store of a peer.
    let cross = "and.b32 %r9, %r0, 31;\n shl.b32 %r9, %r9, 1;\n add.u32 %r9, %r2, %r9;\n";
    let write = "shl.b32 %r11, %r0, 1;\n add.u32 %r11, %r2, %r11;\n st.shared.b16 [%r11], 5;\n";
    let read =
        "mov.u32 %r10, 0;\n ld.shared.u16 %r10, [%r9];\n add.u64 %rd3, %rd1, %rd2;\n st.global.b32 [%rd3], %r10;\n";
    let init = INIT.replace("BYTES", "4");
    let kept = format!("{init}{write}{store}{cross}{WAIT} bar.sync 0;\n{read}");
    assert_eq!(four.run(&kept).unwrap(), [5; 128]);
    let (fault, problem) = four.found(&kept.replace("bar.sync 0;\n", ""));
    assert_eq!(fault, PtxFault::Race, "{problem}");
    // Two stores of one phase to one place.
    let twice = STORE.replace("mapa.shared::cluster.u32 %r7, %r5, %r6", "mapa.shared::cluster.u32 %r7, %r2, %r6");
    breaks(STORE, &twice, &[PtxFault::NotCopied], "is being written since line");
    // Another CTA's threads read what is stored over.
    let over = format!("st.shared.b32 [%r5], %r0;\n{STORE}")
        .replace("st.shared", "shl.b32 %r5, %r0, 2;\n add.u32 %r5, %r2, %r5;\n st.shared");
    breaks(STORE, &over, &[PtxFault::Race, PtxFault::NotCopied], "");
}

#[test]
fn async_forms_that_are_not_known_are_refused() {
    for (line, other, told) in [
        ("st.async.weak.shared::cluster", "st.async.weak.shared::cta", "expected one of .shared::cluster"),
        ("mbarrier::complete_tx::bytes", "mbarrier::complete", "expected one of .mbarrier::complete_tx::bytes"),
        ("arrive.expect_tx.shared::cta.b64 _,", "arrive.expect_tx.shared::cta.b64 %rd5,", "a state that is kept"),
        ("try_wait.parity", "try_wait", "expected one of .parity"),
        ("fence.mbarrier_init.release", "fence.mbarrier_init", "expected one of .release"),
        ("mbarrier.init", "mbarrier.inval", "expected one of .try_wait"),
    ] {
        let error = PAIR.run(&kept().replace(line, other)).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
    let many: String =
        (0..9).fold(String::new(), |all, i| format!("{all}@%p0 mbarrier.init.shared.b64 [room + {}], 1;\n", 8 * i));
    let (fault, problem) = WARP.found(&format!("setp.eq.u32 %p0, %r0, 0;\n{many}"));
    assert_eq!((fault, problem), (PtxFault::Undefined, "a CTA with more than 8 barriers is not supported".into()));
}
