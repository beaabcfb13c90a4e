//! Matrix products, by the `gemm` crate.

use gemm::Parallelism;
use ndarray::{ArrayView2, ArrayViewMut2};
use rayon::current_num_threads;

/// `c ← a·b`, or `c ← c + a·b` where it `adds`: `[M,N]`, `[M,K]` and `[K,N]` of any strides, f32, with fused products, on all
/// threads. Each element is summed over `K` by one thread, in an order that the number of threads does not change.
///
/// # Panics
/// Where the extents do not fit each other.
pub fn gemm(mut c: ArrayViewMut2<f32>, adds: bool, a: ArrayView2<f32>, b: ArrayView2<f32>) {
    let ((m, n), k) = (c.dim(), a.ncols());
    assert_eq!((a.nrows(), b.nrows(), b.ncols()), (m, k, n), "extents of a product");
    let strides = [c.strides(), a.strides(), b.strides()].map(|strides| [strides[0], strides[1]]);
    let [[c_rows, c_columns], [a_rows, a_columns], [b_rows, b_columns]] = strides;
    // SAFETY: the views hold m × n, m × k and k × n elements at the strides given, as was just checked; `c` is borrowed
    // mutably, so that it overlaps neither `a` nor `b`, nor, being a view, itself.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            c_columns,
            c_rows,
            adds,
            a.as_ptr(),
            a_columns,
            a_rows,
            b.as_ptr(),
            b_columns,
            b_rows,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(current_num_threads()),
        );
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, s};

    use super::*;

    /// Small integers: sums are exact in any order.
    fn matrix(rows: usize, columns: usize, seed: usize) -> Array2<f32> {
        Array2::from_shape_fn((rows, columns), |(i, j)| ((i * 31 + j * 17 + seed) % 7) as f32 - 3.0)
    }

    #[test]
    fn gemm_any_strides_is_exact_on_integers() {
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (17, 33, 65), (64, 40, 129)] {
            let (a, b) = (matrix(m, k, 1), matrix(k, n, 2));
            let expected = Array2::from_shape_fn((m, n), |(i, j)| (0..k).map(|l| a[[i, l]] * b[[l, j]]).sum::<f32>());
            let (at, bt) = (a.t().as_standard_layout().into_owned(), b.t().as_standard_layout().into_owned());
            let mut c = Array2::zeros((m, n));
            gemm(c.view_mut(), false, at.t(), bt.t());
            assert_eq!(c, expected, "{m} {n} {k}");
            gemm(c.view_mut(), true, a.view(), bt.t());
            assert_eq!(c, &expected * 2.0, "{m} {n} {k}");
            // Every other column of a wider array, and nothing beside.
            let mut wide = Array2::from_elem((m, 2 * n), 9.0);
            gemm(wide.slice_mut(s![.., ..;2]), false, a.view(), b.view());
            assert_eq!(wide.slice(s![.., ..;2]), expected);
            assert!(wide.slice(s![.., 1..;2]).iter().all(|x| *x == 9.0));
        }
    }
}
