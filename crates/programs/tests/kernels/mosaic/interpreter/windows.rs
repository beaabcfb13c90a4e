//! Windows, their fetches and write-backs, and the rules of a core.

use super::*;
use assay_mosaic_interpreter::{MosaicOptions, TpuCore, run_with};
use std::ops::Range;

#[test]
fn in_place_block_read_before_it_is_written_passes() {
    let tables = Tables { reads: &[0, 1, 2, 3], writes: &[0, 1, 2, 3], body: ADD_ONE, semantics: ARBITRARY };
    let x = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let expected = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    assert_values(&tables.run(&x, 7, true).unwrap(), &expected, "in place");
    assert_values(&tables.run(&x, 7, false).unwrap(), &expected, "apart");
}

#[test]
fn in_place_fetch_that_meets_a_write_back_is_refused() {
    let x = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    for (reads, writes, expected) in [
        // Block 0 is written after step 0 and fetched for step 1.
        (vec![1, 0], vec![0, 1], "still to come"),
        // … and for step 2, when it may not have landed.
        (vec![3, 2, 0], vec![0, 1, 2], "is under way"),
        // Block 0 stays for two steps and is written after the second.
        (vec![3, 2, 0], vec![0, 0, 1], "still to come"),
    ] {
        let tables = Tables { reads: &reads, writes: &writes, body: ADD_ONE, semantics: ARBITRARY };
        let problem = problem(tables.run(&x, 8, true));
        assert!(problem.contains(expected) && problem.contains("input 0, at grid step"), "{reads:?}: {problem}");
        tables.run(&x, 8, false).expect("arrays of their own cannot meet");
    }
}

#[test]
fn in_place_block_that_has_landed_is_read_as_written() {
    let tables = Tables { reads: &[3, 3, 3, 0], writes: &[0, 1, 2, 3], body: ADD_ONE, semantics: ARBITRARY };
    let found = tables.run(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8, true).unwrap();
    assert_values(&found, &[7.0, 8.0, 7.0, 8.0, 7.0, 8.0, 8.0, 9.0], "block 3 is block 0 as step 0 left it, plus 1");
}

#[test]
fn in_place_block_that_stays_in_vmem_is_not_fetched_again() {
    let tables = Tables { reads: &[0, 0, 0], writes: &[0, 1, 2], body: ADD_ONE, semantics: ARBITRARY };
    let found = tables.run(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 6, true).unwrap();
    assert_values(&found, &[1.0, 2.0, 1.0, 2.0, 1.0, 2.0], "all from the block as it was fetched");
}

#[test]
fn parallel_dimension_that_shares_a_block_is_refused() {
    let x = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    let run = |reads: &[i32], writes: &[i32], semantics: &str, aliased| {
        Tables { reads, writes, body: ADD_ONE, semantics }.run(&x, 8, aliased)
    };
    let own: (&[i32], &[i32]) = (&[0, 1, 2, 3], &[0, 1, 2, 3]);
    assert_eq!(run(own.0, own.1, PARALLEL, true).unwrap(), run(own.0, own.1, ARBITRARY, true).unwrap());
    // What is one block of an output, and one that is read after another core has written it.
    let shared: [(&[i32], &[i32], bool, &str); 2] = [
        (&[0, 1, 2, 3], &[0, 0, 1, 2], false, "output 0, at grid step [1]: stays at block [0] for another index"),
        (&[3, 3, 3, 0], &[0, 1, 2, 3], true, "input 0, at grid step [3]: block [0] shares elements with one"),
    ];
    for (reads, writes, aliased, expected) in shared {
        run(reads, writes, ARBITRARY, aliased).expect("one core runs the steps in order");
        let problem = problem(run(reads, writes, PARALLEL, aliased));
        assert!(problem.contains(expected), "{problem}");
    }
    let problem = problem(run(own.0, own.1, "#tpu.dimension_semantics<core_parallel>", false));
    assert!(problem.contains("expected parallel or arbitrary"), "{problem}");
}

#[test]
fn parallel_dimension_that_carries_scratch_is_refused() {
    // Each step adds its input to what scratch holds, which the first of them sets, or all of them.
    let body = |sets: &str| {
        format!(
            "%zero = \"arith.constant\"() {{value = 0 : index}} : () -> index
%x = \"vector.load\"(%w0, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%c0 = \"arith.constant\"() {{value = 0 : i32}} : () -> i32
%first = \"arith.cmpi\"(%i0, %c0) {{predicate = 0 : i64}} : (i32, i32) -> i1
%always = \"arith.cmpi\"(%c0, %c0) {{predicate = 0 : i64}} : (i32, i32) -> i1
\"scf.if\"({sets}) ({{
  \"tpu.vector_store\"(%x, %s0, %zero) {{operandSegmentSizes = array<i32: 1, 1, 1, 0>}} : (vector<2xf32>, vmem<2xf32>, \
             index) -> ()
  \"scf.yield\"() : () -> ()
}}, {{
}}) : (i1) -> ()
%kept = \"vector.load\"(%s0, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%y = \"arith.addf\"(%x, %kept) : (vector<2xf32>, vector<2xf32>) -> vector<2xf32>
\"tpu.vector_store\"(%y, %w1, %zero) {{operandSegmentSizes = array<i32: 1, 1, 1, 0>}} : (vector<2xf32>, vmem<2xf32>, \
             index) -> ()"
        )
    };
    let run = |sets: &str, semantics: &str| {
        let windows = &[("2xf32", "", "%i0"), ("2xf32", "", "%i0")];
        let text = Kernel { grid: &[2], prefetch: &[], windows, scratch: &["2xf32"], body: &body(sets) }.text();
        let x = array(DeviceDtype::F32, &[4], &[1.0, 2.0, 3.0, 4.0]);
        let written = run(&with_semantics(&text, semantics), vec![x], &[(DeviceDtype::F32, vec![4])], &[]);
        written.map(|written| values(&written[0]))
    };
    assert_values(&run("%first", ARBITRARY).unwrap(), &[2.0, 4.0, 4.0, 6.0], "carried from the first step");
    assert_values(&run("%always", PARALLEL).unwrap(), &[2.0, 4.0, 6.0, 8.0], "set by each step");
    let problem = problem(run("%first", PARALLEL));
    assert!(
        problem.contains("reads scratch that a step of another index along a parallel dimension wrote"),
        "{problem}"
    );
}

#[test]
fn output_that_comes_back_to_a_block_is_refused() {
    let tables = Tables { reads: &[0, 1, 2], writes: &[0, 1, 0], body: ADD_ONE, semantics: ARBITRARY };
    let problem = problem(tables.run(&[0.0; 6], 6, false));
    assert!(problem.starts_with("output 0, at grid step [2]: comes back to block [0]"), "{problem}");
}

#[test]
fn block_outside_its_array_is_refused() {
    for reads in [[0, 3], [0, -1], [0, i32::MAX]] {
        let tables = Tables { reads: &reads, writes: &[0, 1], body: ADD_ONE, semantics: ARBITRARY };
        let problem = problem(tables.run(&[0.0; 5], 4, false));
        assert!(problem.contains("input 0, at grid step [1]: block ["), "{problem}");
    }
}

#[test]
fn transforms_choose_the_blocks() {
    let tables = Tables { reads: &[2, 0, 1], writes: &[1, 2, 0], body: ADD_ONE, semantics: ARBITRARY };
    let found = tables.run(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 6, false).unwrap();
    assert_values(&found, &[3.0, 4.0, 5.0, 6.0, 1.0, 2.0], "as the tables say");
}

#[test]
fn output_is_kept_while_it_stays_and_poison_when_it_comes() {
    // out = out + in, and out = in at step 0.
    let body = "%x = \"vector.load\"(%w0, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%before = \"vector.load\"(%w1, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%sum = \"arith.addf\"(%x, %before) : (vector<2xf32>, vector<2xf32>) -> vector<2xf32>
%c0 = \"arith.constant\"() {value = 0 : i32} : () -> i32
%first = \"arith.cmpi\"(%i0, %c0) {predicate = 0 : i64} : (i32, i32) -> i1
%y = \"arith.select\"(%first, %x, %sum) : (i1, vector<2xf32>, vector<2xf32>) -> vector<2xf32>
\"tpu.vector_store\"(%y, %w1, %zero) {operandSegmentSizes = array<i32: 1, 1, 1, 0>} : (vector<2xf32>, vmem<2xf32>, \
                index) -> ()";
    let tables = Tables { reads: &[0, 1, 2], writes: &[0, 0, 1], body, semantics: ARBITRARY };
    let found = tables.run(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 6, false).unwrap();
    assert_values(&found, &[4.0, 6.0, NAN, NAN, NAN, NAN], "a sum, its stale start, and what no step wrote");
}

#[test]
fn store_to_an_input_is_refused_where_its_window_stays() {
    let body = format!("{ADD_ONE}\n{}", ADD_ONE.lines().last().unwrap().replace("%w1", "%w0"));
    let run = |reads: &[i32]| {
        let tables = Tables { reads, writes: &[0, 1, 2, 3], body: &body, semantics: ARBITRARY };
        tables.run(&[0.0, 0.0, 5.0, 5.0], 8, false)
    };
    let found = run(&[0, 1, 0, 1]).unwrap();
    assert_values(&found, &[1.0, 1.0, 6.0, 6.0, 1.0, 1.0, 6.0, 6.0], "in HBM it is as it was");
    // Wherever the two steps are: before the store is seen, or after it.
    for (reads, step) in [([0, 0, 1, 0], 0), ([0, 1, 0, 0], 2)] {
        let problem = problem(run(&reads));
        let expected =
            format!("input 0, at grid step [{step}]: is stored to, line 9, though it does not move every step");
        assert_eq!(problem, expected);
    }
}

/// A copy of `x`, of which `window` at a time is in VMEM, under the rules of a core with `vmem_bytes`.
fn copy_on_a_core(window: [usize; 2], x: &HostArray, vmem_bytes: usize) -> Result<Vec<f64>, MosaicInterpretError> {
    let element = x.element.mlir();
    let ty = format!("{}x{}x{element}", window[0], window[1]);
    let body = format!(
        "%zero = \"arith.constant\"() {{value = 0 : index}} : () -> index
%x = \"vector.load\"(%w0, %zero, %zero) : ( vmem<{ty}>, index, index) -> vector<{ty}>
\"tpu.vector_store\"(%x, %w1, %zero, %zero) {{operandSegmentSizes = array<i32: 1, 1, 2, 0>}} : (vector<{ty}>, vmem<{ty}>, \
             index, index) -> ()"
    );
    let grid = [x.shape[0].div_ceil(window[0]), x.shape[1].div_ceil(window[1])];
    let windows = &[(ty.as_str(), "", "%i0, %i1"), (ty.as_str(), "", "%i0, %i1")];
    let text = Kernel { grid: &grid, prefetch: &[], windows, scratch: &[], body: &body }.text();
    let options = MosaicOptions { core: Some(TpuCore { vmem_bytes }), ..MosaicOptions::default() };
    let written = run_with(options, &text, vec![x.clone()], &[(x.element, x.shape.clone())], &[])?;
    Ok(values(&written[0]))
}

#[test]
fn core_refuses_partial_tiles_and_more_vmem_than_it_has() {
    let zeros = |element: DeviceDtype, shape: [usize; 2]| array(element, &shape, &vec![0.0; shape[0] * shape[1]]);
    let (wide, narrow) = (zeros(DeviceDtype::F32, [20, 200]), zeros(DeviceDtype::Bf16, [20, 200]));
    // Tiles of 8 × 128 take 4,096 bytes: two buffers of each of two windows.
    for (window, x, vmem_bytes) in [
        ([8, 128], &wide, 4 * 4096),
        ([16, 128], &narrow, 4 * 4096),
        ([20, 128], &wide, 4 * 3 * 4096),
        ([8, 200], &wide, 4 * 2 * 4096),
    ] {
        copy_on_a_core(window, x, vmem_bytes).unwrap();
        let problem = copy_on_a_core(window, x, vmem_bytes - 1).unwrap_err().to_string();
        let expected = format!("core: two buffers of each window take {vmem_bytes} bytes of VMEM");
        assert!(problem.starts_with(&expected), "{problem}");
    }
    for (window, x, expected) in [
        ([4, 128], &wide, "core: input 0: blocks of vector<4x128xf32> over [20, 200], expected whole tiles of 8 × 128"),
        ([8, 64], &wide, "core: input 0: blocks of vector<8x64xf32> over"),
        (
            [8, 128],
            &narrow,
            "core: input 0: blocks of vector<8x128xbf16> over [20, 200], expected whole tiles of 16 × 128",
        ),
    ] {
        let problem = copy_on_a_core(window, x, 1 << 20).unwrap_err().to_string();
        assert!(problem.starts_with(expected), "{problem}");
    }
}

/// Races are looked for by element. That finds those within a tile too, as long as this holds of the blocks that a core takes.
#[test]
fn block_that_shares_no_element_shares_no_tile() {
    const ROWS_OF_A_TILE: usize = 8;
    for size in 1..=40 {
        let x = array(DeviceDtype::F32, &[size, 128], &vec![0.0; size * 128]);
        let taken = |extent: &usize| copy_on_a_core([*extent, 128], &x, 1 << 20).is_ok();
        let extents: Vec<usize> = (1..=48).filter(taken).collect();
        assert!(extents.contains(&size) && extents.len() >= size / ROWS_OF_A_TILE, "{size}: {extents:?}");
        let blocks = |extent: usize| {
            (0..size).step_by(extent).map(move |start| start..size.min(start + extent)).collect::<Vec<_>>()
        };
        for (a, b) in extents.iter().flat_map(|&a| extents.iter().map(move |&b| (a, b))) {
            for (a, b) in blocks(a).iter().flat_map(|a| blocks(b).into_iter().map(move |b| (a.clone(), b))) {
                let share = a.start < b.end && b.start < a.end;
                let last = |block: &Range<usize>| (block.end - 1) / ROWS_OF_A_TILE;
                let share_a_tile = a.start / ROWS_OF_A_TILE <= last(&b) && b.start / ROWS_OF_A_TILE <= last(&a);
                assert_eq!(share, share_a_tile, "{a:?} and {b:?} of {size}");
            }
        }
    }
}

#[test]
fn scratch_is_counted_in_whole_tiles() {
    let x = array(DeviceDtype::F32, &[8, 128], &[0.0; 8 * 128]);
    for (scratch, bytes) in [("2x9x130xf32", 2 * 16 * 256 * 4), ("9x130xbf16", 16 * 256 * 2), ("129xf32", 8 * 256 * 4)]
    {
        let windows = &[("8x128xf32", "", "%i0, %i0"), ("8x128xf32", "", "%i0, %i0")];
        let text = Kernel { grid: &[1], prefetch: &[], windows, scratch: &[scratch], body: "" }.text();
        let options = MosaicOptions { core: Some(TpuCore { vmem_bytes: 1 }), ..MosaicOptions::default() };
        let outputs = [(x.element, x.shape.clone())];
        let problem = run_with(options, &text, vec![x.clone()], &outputs, &[]).unwrap_err().to_string();
        assert!(problem.contains(&format!("and scratch {bytes}, expected at most 1 in all")), "{scratch}: {problem}");
    }
}

/// `out = Σ over lanes of in`, broadcast over the window, for each step of a grid over `columns`.
fn lane_sums(rows: usize, columns: usize) -> Vec<f64> {
    let body = "%zero = \"arith.constant\"() {value = 0 : index} : () -> index
%x = \"vector.load\"(%w0, %zero, %zero) : ( vmem<1x4xf32>, index, index) -> vector<1x4xf32>
%none = \"arith.constant\"() {value = dense<0.0> : vector<1xf32>} : () -> vector<1xf32>
%sums = \"vector.multi_reduction\"(%x, %none) {kind = #vector.kind<add>, reduction_dims = array<i64: 1>} : \
                (vector<1x4xf32>, vector<1xf32>) -> vector<1xf32>
%column = \"vector.shape_cast\"(%sums) : (vector<1xf32>) -> vector<1x1xf32>
%y = \"vector.broadcast\"(%column) : (vector<1x1xf32>) -> vector<1x4xf32>
\"tpu.vector_store\"(%y, %w1, %zero, %zero) {operandSegmentSizes = array<i32: 1, 1, 2, 0>, strides = array<i32>, add \
                = false} : (vector<1x4xf32>, vmem<1x4xf32>, index, index) -> ()";
    let windows = &[("1x4xf32", "", "%i0, %i1"), ("1x4xf32", "", "%i0, %i1")];
    let text = Kernel { grid: &[rows, columns.div_ceil(4)], prefetch: &[], windows, scratch: &[], body }.text();
    let x: Vec<f64> = (0..rows * columns).map(|i| i as f64).collect();
    let written = run(
        &text,
        vec![array(DeviceDtype::F32, &[rows, columns], &x)],
        &[(DeviceDtype::F32, vec![rows, columns])],
        &[],
    );
    values(&written.unwrap()[0])
}

#[test]
fn edge_reads_beyond_are_nan_and_writes_are_dropped() {
    // The tail's sum is NaN in its two columns, and does not spill into the next row.
    let expected = [6.0, 6.0, 6.0, 6.0, NAN, NAN, 30.0, 30.0, 30.0, 30.0, NAN, NAN];
    assert_values(&lane_sums(2, 6), &expected, "a tail of 2 of 4");
    assert_values(&lane_sums(1, 4), &[6.0; 4], "no tail");
}

#[test]
fn scratch_begins_as_poison_and_integers_have_theirs() {
    let body = "%zero = \"arith.constant\"() {value = 0 : index} : () -> index
%x = \"vector.load\"(%s0, %zero) : ( vmem<2xi32>, index) -> vector<2xi32>
\"tpu.vector_store\"(%x, %w0, %zero) {operandSegmentSizes = array<i32: 1, 1, 1, 0>} : (vector<2xi32>, vmem<2xi32>, \
                index) -> ()";
    let windows = &[("2xi32", "", "%i0")];
    let text = Kernel { grid: &[1], prefetch: &[], windows, scratch: &["2xi32"], body }.text();
    let written = run(&text, vec![], &[(DeviceDtype::I32, vec![3])], &[]).unwrap();
    assert_eq!(written[0].bytes, [0x5A; 12]);
}
