//! Operations that move elements: other extents, slices, transposes, gathers and scatters.

use super::{HloBuilder, HloType, HloValue};
use assay_core::device_dtype::DeviceDtype;

impl HloBuilder {
    /// `a` repeated to `shape`; dimension `i` of `a`, of that extent or of one, becomes dimension `dimensions[i]`.
    pub fn broadcast(&mut self, a: HloValue, dimensions: &[usize], shape: &[usize]) -> HloValue {
        let from = self.type_of(a).clone();
        assert_eq!(from.shape.len(), dimensions.len(), "broadcast: one dimension for each of {from}");
        for (&extent, &dimension) in from.shape.iter().zip(dimensions) {
            // Extents agree, or the operand's is one and is repeated.
            let fits = shape.get(dimension).is_some_and(|&wanted| extent == wanted || extent == 1);
            assert!(fits, "broadcast: {from} to {shape:?} along {dimensions:?}");
        }
        let ty = HloType { element: from.element, shape: shape.to_vec() };
        let operation = format!("stablehlo.broadcast_in_dim {a}, dims = {dimensions:?} : ({from}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// Returns the same elements in row-major order with other extents.
    pub fn reshape(&mut self, a: HloValue, shape: &[usize]) -> HloValue {
        let from = self.type_of(a).clone();
        if from.shape == shape {
            return a;
        }
        let ty = HloType::new(from.element, shape);
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        assert_eq!(count(&from.shape), count(shape), "reshape: {from} to {ty}");
        self.define(ty.clone(), format_args!("stablehlo.reshape {a} : ({from}) -> {ty}"))
    }

    /// Elements `start[d] .. start[d] + sizes[d]` along each dimension.
    pub fn slice(&mut self, a: HloValue, start: &[usize], sizes: &[usize]) -> HloValue {
        let from = self.type_of(a).clone();
        assert!(start.len() == from.shape.len() && sizes.len() == from.shape.len(), "slice: {start:?} of {from}");
        let range = |(&start, &size): (&usize, &usize)| format!("{start}:{}", start + size);
        let inside = |((&start, &size), &extent): ((&usize, &usize), &usize)| start + size <= extent;
        assert!(start.iter().zip(sizes).zip(&from.shape).all(inside), "slice: {start:?} + {sizes:?} of {from}");
        if sizes == from.shape {
            return a;
        }
        let ranges = start.iter().zip(sizes).map(range).collect::<Vec<_>>().join(", ");
        let ty = HloType::new(from.element, sizes);
        self.define(ty.clone(), format_args!("stablehlo.slice {a} [{ranges}] : ({from}) -> {ty}"))
    }

    /// Element `index` of a vector, as a scalar.
    pub fn element_at(&mut self, vector: HloValue, index: usize) -> HloValue {
        let one = self.slice(vector, &[index], &[1]);
        self.reshape(one, &[])
    }

    /// Returns a vector of the given scalars.
    pub fn vector(&mut self, scalars: &[HloValue]) -> HloValue {
        let ones: Vec<HloValue> = scalars.iter().map(|&scalar| self.reshape(scalar, &[1])).collect();
        self.concatenate(&ones, 0)
    }

    /// The arrays one after another along `dimension`.
    pub fn concatenate(&mut self, arrays: &[HloValue], dimension: usize) -> HloValue {
        let mut ty = self.type_of(arrays[0]).clone();
        ty.shape[dimension] = 0;
        for &array in arrays {
            let other = self.type_of(array);
            let extent = other.shape[dimension];
            ty.shape[dimension] += extent;
            // The arrays agree in all extents except the one along which they are joined.
            let same_but_there = {
                let mut expected = ty.clone();
                expected.shape[dimension] = extent;
                *other == expected
            };
            assert!(same_but_there, "concatenate: {other} with others along {dimension}");
        }
        let (names, types) = self.lists(arrays);
        self.define(ty.clone(), format_args!("stablehlo.concatenate {names}, dim = {dimension} : ({types}) -> {ty}"))
    }

    /// `a` with `value`, a scalar, behind it along each dimension, up to `shape`.
    pub fn pad(&mut self, a: HloValue, value: HloValue, shape: &[usize]) -> HloValue {
        let from = self.type_of(a).clone();
        if from.shape == shape {
            return a;
        }
        let scalar = HloType::new(from.element, &[]);
        assert_eq!(*self.type_of(value), scalar, "pad: the value");
        // Padding is added after the last element of each dimension only.
        let behind: Vec<usize> = shape.iter().zip(&from.shape).map(|(whole, part)| whole - part).collect();
        let nothing = vec![0; shape.len()];
        let ty = HloType::new(from.element, shape);
        let operation = format!(
            "stablehlo.pad {a}, {value}, low = {nothing:?}, high = {behind:?}, interior = {nothing:?} : ({from}, {scalar}) -> {ty}"
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `sizes` elements from `start`, one i32 scalar a dimension. A start too far out is moved until the slice is inside.
    pub fn dynamic_slice(&mut self, a: HloValue, start: &[HloValue], sizes: &[usize]) -> HloValue {
        let from = self.type_of(a).clone();
        assert_eq!(start.len(), from.shape.len(), "dynamic_slice: one start a dimension of {from}");
        let ty = HloType::new(from.element, sizes);
        let (starts, start_types) = self.lists(start);
        let operation =
            format!("stablehlo.dynamic_slice {a}, {starts}, sizes = {sizes:?} : ({from}, {start_types}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// `a` with `update` written at `start`, as [`dynamic_slice`](Self::dynamic_slice) would read it.
    pub fn dynamic_update_slice(&mut self, a: HloValue, update: HloValue, start: &[HloValue]) -> HloValue {
        let ty = self.type_of(a).clone();
        let part = self.type_of(update).clone();
        assert_eq!((start.len(), part.element), (ty.shape.len(), ty.element), "dynamic_update_slice: {part} of {ty}");
        let (starts, start_types) = self.lists(start);
        let operation =
            format!("stablehlo.dynamic_update_slice {a}, {update}, {starts} : ({ty}, {part}, {start_types}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }
    /// A matrix with rows for columns.
    pub fn transpose(&mut self, a: HloValue) -> HloValue {
        let from = self.type_of(a).clone();
        let [rows, columns] = from.shape[..] else { panic!("transpose: {from} has not two axes") };
        let ty = HloType::new(from.element, &[columns, rows]);
        self.define(ty.clone(), format_args!("stablehlo.transpose {a}, dims = [1, 0] : ({from}) -> {ty}"))
    }
    /// `a[b, t, indices[b, t]]`, the last axis of `a` gathered. An index out of range is moved to the nearest end.
    pub fn take_along_last(&mut self, a: HloValue, indices: HloValue) -> HloValue {
        // Batching dimensions [0,1] pair each token with its own index: a gather without them would take every index
        // from every row.
        let from = self.type_of(a).clone();
        let index = self.type_of(indices).clone();
        let [batch, tokens, _] = from.shape[..] else { panic!("take_along_last: {from} has not three axes") };
        assert_eq!(index, HloType::new(DeviceDtype::I32, &[batch, tokens]), "take_along_last: the indices");
        let column = HloType::new(DeviceDtype::I32, &[batch, tokens, 1]);
        let starts = self.reshape(indices, &column.shape);
        let ty = HloType::new(from.element, &[batch, tokens]);
        let operation = format!(
            r#""stablehlo.gather"({a}, {starts}) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [2], operand_batching_dims = [0, 1], start_indices_batching_dims = [0, 1], start_index_map = [2], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 1, 1>}}> : ({from}, {column}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `a[b, t, indices[b, t, k]]` of several places of the last axis. An index out of range is moved to the nearest end.
    pub fn take_several_along_last(&mut self, a: HloValue, indices: HloValue) -> HloValue {
        let (ty, places) = self.places_along_last("take_several_along_last", a, indices);
        let (from, index) = (self.type_of(a).clone(), self.type_of(places).clone());
        let operation = format!(
            r#""stablehlo.gather"({a}, {places}) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [2], operand_batching_dims = [0, 1], start_indices_batching_dims = [0, 1], start_index_map = [2], index_vector_dim = 3>, indices_are_sorted = false, slice_sizes = array<i64: 1, 1, 1>}}> : ({from}, {index}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `a` with `a[b, t, indices[b, t, k]] = values[b, t, k]`. An index out of range sets nothing; of equal ones one is taken, whichever.
    pub fn set_several_along_last(&mut self, a: HloValue, indices: HloValue, values: HloValue) -> HloValue {
        let (ty, places) = self.places_along_last("set_several_along_last", a, indices);
        assert_eq!(self.type_of(values), &ty, "set_several_along_last: the values");
        let (into, index) = (self.type_of(a).clone(), self.type_of(places).clone());
        let scalar = HloType::new(into.element, &[]);
        // The region's names are its own.
        let operation = format!(
            r#""stablehlo.scatter"({a}, {places}, {values}) <{{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [2], input_batching_dims = [0, 1], scatter_indices_batching_dims = [0, 1], scatter_dims_to_operand_dims = [2], index_vector_dim = 3>, indices_are_sorted = false, unique_indices = false}}> ({{
      ^bb0(%left: {scalar}, %right: {scalar}):
        stablehlo.return %right : {scalar}
    }}) : ({into}, {index}, {ty}) -> {into}"#
        );
        self.define(into, format_args!("{operation}"))
    }

    /// The type of `indices` many elements of `a`, and those indices as a vector of one each.
    fn places_along_last(&mut self, what: &str, a: HloValue, indices: HloValue) -> (HloType, HloValue) {
        let (from, index) = (self.type_of(a).clone(), self.type_of(indices).clone());
        let [batch, tokens, _] = from.shape[..] else { panic!("{what}: {from} has not three axes") };
        let [_, _, count] = index.shape[..] else { panic!("{what}: {index} has not three axes") };
        assert_eq!(index, HloType::new(DeviceDtype::I32, &[batch, tokens, count]), "{what}: the indices");
        (HloType::new(from.element, &index.shape), self.reshape(indices, &[batch, tokens, count, 1]))
    }

    /// `a[indices]` of a vector, for indices of any shape. An index out of range is moved to the nearest end.
    pub fn take(&mut self, a: HloValue, indices: HloValue) -> HloValue {
        let (from, index) = (self.type_of(a).clone(), self.type_of(indices).clone());
        assert_eq!((from.shape.len(), index.element), (1, DeviceDtype::I32), "take: of {from} at {index}");
        // Indices of any shape become a list of vectors of one index each, which is the form that a gather takes.
        let places = self.reshape(indices, &[&index.shape[..], &[1]].concat());
        let ty = HloType { element: from.element, shape: index.shape };
        let (dimension, index) = (ty.shape.len(), self.type_of(places).clone());
        let operation = format!(
            r#""stablehlo.gather"({a}, {places}) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = {dimension}>, indices_are_sorted = false, slice_sizes = array<i64: 1>}}> : ({from}, {index}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }
}
