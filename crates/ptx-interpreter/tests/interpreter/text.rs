//! Texts that are refused, each with what is told of it, and texts that are nobody's.

use assay_ptx_interpreter::{GlobalArray, InterpretOptions, PtxInterpretError, PtxModule};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::small::{WARP, text};

/// What is told of a kernel whose body is the line 23.
#[track_caller]
fn refused(body: &str, told: &str) {
    let error = PtxModule::parse(&text(1, body)).unwrap_err().to_string();
    assert_eq!(error, format!("line 23: {told}"));
}

#[test]
fn text_with_unknown_instructions_is_refused() {
    refused("    wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned: the instruction is not known");
    refused("    add.rz.f32 %f0, %f1, %f2;", "add.rz.f32: modifier .rz is not supported here");
    refused("    add.f32x4 %f0, %f1, %f2;", "add.f32x4: expected a type as the last modifier");
    refused("    add.f64 %f0, %f1, %f2;", "add.f64: expected a type as the last modifier");
    refused("    fma.f32 %f0, %f1, %f2, %f3;", "fma.f32: expected .rn");
    refused("    max.ftz.bf16x2 %r5, %r6, %r7;", "max.ftz.bf16x2: modifier .ftz is not supported here");
    refused("    ld.global.v8.b32 %r5, [%rd0];", "ld.global.v8.b32: modifier .v8 is not supported here");
    refused("    ld.global.L2.b32 %r5, [%rd0];", "ld.global.L2.b32: modifier .L2 is not supported here");
    refused("    prefetch.global [%rd0];", "prefetch.global: expected one of .L1, .L2");
    refused("    ld.b32 %r5, [%rd0];", "ld.b32: expected one of .global, .shared, .shared::cta, .shared::cluster");
    refused(
        "    ld.acquire.gpu.global.b32 %r5, [%rd0];",
        "ld.acquire.gpu.global.b32: modifier .acquire is not supported here",
    );
    refused("    cvt.f32.f16 %f0, %r5;", "cvt.f32.f16: %r5 is .b32, expected .f16");
    refused("    cvt.bf16.f32 %h0, %f0;", "cvt.bf16.f32: there is no such conversion, or it is not supported");
    refused("    cvt.rn.s32.f32 %r5, %f0;", "cvt.rn.s32.f32: there is no such conversion, or it is not supported");
    refused("    cp.async.bulk.commit_group;", "cp.async.bulk.commit_group: modifier .bulk is not supported here");
    refused(
        "    cp.async.cg.shared.global [%r2], [%rd0], 8;",
        "cp.async.cg.shared.global: expected a size of 4, 8 or 16 bytes, of 16 with .cg",
    );
    refused("    cvta.shared.u64 %rd3, %rd4;", "cvta.shared.u64: expected one of .global");
    refused("    setp.lo.s32 %p0, %r5, %r6;", "setp.lo.s32: expected one of .eq, .ne, .lt, .le, .gt, .ge");
    refused(
        "    barrier.cluster.arrive.acquire;",
        "barrier.cluster.arrive.acquire: modifier .acquire is not supported here",
    );
}

#[test]
fn text_with_operands_that_do_not_fit_is_refused() {
    refused("    add.u32 %r5, %r6;", "add.u32: 2 operands, expected 3");
    refused("    add.u32 %r5, %r6, %x;", "add.u32: %x is not declared");
    refused("    add.u32 %r5, %r6, %rd0;", "add.u32: %rd0 is .b64, expected .u32");
    refused("    add.f32 %f0, %f1, 1;", "add.f32: Whole(1) is not a number of .f32");
    refused("    add.u32 %r5, %r6, 4294967296;", "add.u32: Whole(4294967296) is not a number of .u32");
    refused("    add.u32 %r5, %r6, room2;", "add.u32: room2 is not declared");
    refused("    mov.b64 %rd3, %tid.x;", "mov.b64: %tid.x has 32 bits, expected .b64");
    refused("    add.u32 5, %r6, %r7;", "add.u32: expected a register of .u32");
    refused("    @%r5 add.u32 %r5, %r6, %r7;", "add.u32: %r5 is .b32, expected .pred");
    refused("    ld.global.b32 %r5, %rd0;", "ld.global.b32: expected an address in [ ]");
    refused("    ld.global.b32 %r5, [%r2];", "ld.global.b32: %r2 is .b32, expected an address");
    refused("    ld.global.b32 %r5, [room];", "ld.global.b32: room is no address of this space");
    refused("    ld.global.v2.b32 %r5, [%rd0];", "ld.global.v2.b32: expected a vector of 2");
    refused(
        "    ld.global.v4.b64 {%rd3, %rd4, %rd5, %rd6}, [%rd0];",
        "ld.global.v4.b64: 4 of .b64 are more than 16 bytes",
    );
    refused("    ld.param.u64 %rd3, [c];", "ld.param.u64: there is no such parameter");
    refused("    ld.param.u32 %r5, [a];", "ld.param.u32: a pointer has 64 bits, not those of .u32");
    refused("    ld.global.b32 %r5, [%rd0 - 4];", "expected ], found -");
    refused("    ld.global.b32 %r5, [%rd0 + 1.5];", "expected an offset of 32 bits");
    refused("    bra nowhere;", "bra: there is no label nowhere");
    refused("    mov.b32 {%h0, %h1, %h2}, %r5;", "mov.b32: 3 parts of .b32 are not supported");
    refused("    { .reg .b32 %q; } mov.b32 %q, 1;", "mov.b32: %q is not declared");
}

#[test]
fn text_that_is_malformed_is_refused() {
    refused("    add.u32 %r5, %r6, %r7 %r8;", "expected ;, found %r8");
    refused("    .local .b8 stack[8];", "directive .local is not supported");
    refused("    .reg .b128 %q;", "registers of .b128 are not supported");
    refused("    .reg .b32 %q<65537>;", "more than 65536 registers of the name %q");
    refused("    .reg .b32 %r0;", "%r0 is declared twice");
    refused("    .shared .align 3 .b8 more[8];", "an alignment of 3, expected a power of two up to 512");
    refused("    .shared .b8 more[16777216];", "more does not fit into shared memory");
    refused("    add.u32 %r5, %r6, 0xG;", "expected an operand, found 0xG");
    refused("    add.u32 %r5, %r6, 017;", "expected an operand, found 017");
    refused("    ?", "expected an instruction, found ?");
    let told = |text: &str| PtxModule::parse(text).unwrap_err().to_string();
    assert_eq!(told(".version 8.0\n.func f() {}"), "line 2: directive .func is not supported");
    assert_eq!(told(".address_size 32"), "line 1: expected addresses of 64 bits, found 32");
    assert_eq!(told(".entry f(.param .f32 x) { ret; }"), "line 1: parameter x is .f32, expected a pointer of .u64");
    assert_eq!(told(".entry f(.param .u64 x, .param .u64 x) { ret; }"), "line 1: x is declared twice");
    assert_eq!(
        told(".entry f() .noreturn { ret; }"),
        "line 1: directive .noreturn with these numbers is not supported"
    );
    assert_eq!(told(".entry f() { a: a: ret; }"), "line 1: label a is declared twice");
    assert_eq!(told(".entry f() { ret;"), "line 1: expected an instruction, found the end of the text");
    let none = PtxModule::parse("// Nothing.\n/* at all */").unwrap();
    let error = none.run("f", &WARP.launch(), Vec::new(), &[], &InterpretOptions::default()).unwrap_err();
    assert_eq!(error, PtxInterpretError::Launch("there is no entry f, only []".into()));
}

/// An entry that a launch without clusters would run apart is refused, and one that relies on no cluster is not.
#[test]
fn cluster_entry_without_explicitcluster_is_refused() {
    let body = |instruction: &str| text(2, &format!("    {instruction}"));
    for instruction in [
        "barrier.cluster.arrive.relaxed;",
        "barrier.cluster.wait.acquire;",
        "mapa.shared::cluster.u32 %r5, %r2, 0;",
        "ld.shared::cluster.u32 %r5, [%r2];",
    ] {
        let explicit = body(instruction);
        PtxModule::parse(&explicit).unwrap();
        let error = PtxModule::parse(&explicit.replace(".explicitcluster\n", "")).unwrap_err().to_string();
        let name = instruction.split_whitespace().next().unwrap().trim_end_matches(';');
        let told = format!("{name}: the entry has .reqnctapercluster and no .explicitcluster, expected both");
        assert!(error.contains(&told), "{error}");
        // A cluster of one CTA is there however the kernel is launched.
        PtxModule::parse(&text(1, instruction).replace(".explicitcluster\n", "")).unwrap();
    }
    PtxModule::parse(&body("bar.sync 0;").replace(".explicitcluster\n", "")).unwrap();
}

#[test]
fn text_that_says_nothing_about_results_is_read() {
    let body = "    .pragma \"nounroll\";\n    .loc 1 2 3\n    prefetch.global.L2 [%rd0];\n    /* a */ ld.global.nc.L1::no_allocate.L2::128B.b32 %r10, [%rd0+4]; // b\n    \
        createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;\n    add.s64 %rd3, %rd1, %rd2;\n    \
        st.global.L2::cache_hint.b32 [%rd3], %r10, %rd9;";
    assert_eq!(WARP.run(body).unwrap(), [1; 32]);
}

const TEXT: &str = include_str!("softmax.ptx");

/// A row of 32 threads of the softmax, as others may have changed it.
fn run_whatever(text: &str) {
    let text = text
        .replace("STRIDE", "512")
        .replace("WARPS", "1")
        .replace("THREADS", "32")
        .replace("SLICE", "512")
        .replace("CTAS", "1");
    if let Ok(module) = PtxModule::parse(&text) {
        let launch = assay_ptx_interpreter::GridLaunch { dynamic_shared: 512, ..WARP.launch() };
        let options = InterpretOptions { most_work: 5000, ..InterpretOptions::default() };
        let _ = module.run("softmax", &launch, vec![GlobalArray::input("row", vec![0; 512])], &[0], &options);
    }
}

proptest! {
    #![proptest_config(crate::config(300))]

    #[test]
    fn text_of_any_kind_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = PtxModule::parse(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn text_of_a_changed_kernel_never_panics(
        changes in prop::collection::vec((any::<Index>(), any::<Index>(), 0..4), 1..4),
        word in select(vec!["-1", "0xFFFFFFFF", "%r5", "%p0", "%f3", "%rd2", "{", "}", "[", ";", ".v4", ".b64", "wide", "bar.sync 0;", "0", "!", "@%p0", "_"]),
    ) {
        let mut words: Vec<&str> = TEXT.split_inclusive([' ', ',', '.', ';', '\n']).collect();
        for (at, from, kind) in changes {
            let (at, from) = (at.index(words.len()), from.index(words.len()));
            match kind {
                0 => { words.remove(at); }
                1 => words[at] = words[from],
                2 => words.insert(at, words[from]),
                _ => words[at] = word,
            }
        }
        run_whatever(&words.concat());
    }
}
