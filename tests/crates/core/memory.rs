//! What control groups leave of the memory.

use std::fs;
use std::path::Path;

use assay::memory::Hierarchy;

#[test]
fn memory_limit_is_that_of_the_narrowest_group() {
    let root = tempfile::tempdir().unwrap();
    let write = |group: &str, name: &str, text: &str| {
        let folder = root.path().join(group);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), text).unwrap();
    };
    for (group, most, held) in [("pod", "1000\n", "400\n"), ("pod/container", "max\n", "300\n")] {
        write(group, "memory.max", most);
        write(group, "memory.current", held);
    }
    write("pod", "memory.stat", "anon 300\ninactive_file 50\nactive_file 50\n");
    let left = |group: &str| Hierarchy::UNIFIED.available(root.path(), Path::new(group));
    assert_eq!(left("pod/container"), Some(650));
    assert_eq!(left("elsewhere"), None);
    write("pod/container", "memory.max", "200\n");
    assert_eq!(left("pod/container"), Some(0));
}
