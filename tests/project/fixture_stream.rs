//! Files that are written a tensor at a time.

use std::collections::BTreeMap;
use std::path::Path;

use assay::fixture::{SafetensorsFile, SafetensorsStream, StoredDtype};
use ndarray::{Ix1, Ix2, arr1, arr2};

fn names(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn fixture_stream_tensors_grow_in_turns_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let layout: [(&str, StoredDtype, &[usize]); 2] = [("a", StoredDtype::U8, &[3]), ("b", StoredDtype::F32, &[2, 1])];
    let mut stream = SafetensorsStream::create(&path, &layout, BTreeMap::from([("k".into(), "v".into())])).unwrap();
    stream.append("b", &1.5f32.to_le_bytes()).unwrap();
    stream.append("a", &[1, 2, 3]).unwrap();
    stream.append("b", &(-2f32).to_le_bytes()).unwrap();
    assert!(stream.append("b", &[0]).unwrap_err().to_string().contains("`b`: got 1 bytes, expected at most 0 more"));
    assert!(stream.append("c", &[0]).unwrap_err().to_string().contains("tensor `c`: not in the file"));
    stream.finish(BTreeMap::from([("n".into(), "7".into())])).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    assert_eq!(file.integers::<Ix1>("a").unwrap(), arr1(&[1, 2, 3]));
    assert_eq!(file.numbers::<Ix2>("b").unwrap(), arr2(&[[1.5], [-2.0]]));
    assert_eq!((&*file.metadata()["k"], &*file.metadata()["n"]), ("v", "7"));
    // printf '\001\002\003' | sha256sum
    let hash = "039058c6f2c0cb492c533b0a4d14ef77cc0f78abccced5287d84a1a2011cfb81";
    assert_eq!(file.metadata()["sha256.a"], hash);
    assert_eq!(names(folder.path()), 1);
}

#[test]
fn fixture_stream_that_is_not_full_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let layout: [(&str, StoredDtype, &[usize]); 1] = [("a", StoredDtype::U8, &[3])];
    let mut stream = SafetensorsStream::create(&path, &layout, BTreeMap::new()).unwrap();
    stream.append("a", &[1]).unwrap();
    assert_eq!(names(folder.path()), 1);
    let error = stream.finish(BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("tensor `a`: got 1 bytes, expected 3"), "{error}");
    assert_eq!(names(folder.path()), 0);
    let layout: [(&str, StoredDtype, &[usize]); 1] = [("a", StoredDtype::F32, &[usize::MAX, 2])];
    assert!(SafetensorsStream::create(&path, &layout, BTreeMap::new()).is_err());
}
