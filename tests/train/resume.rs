//! A run goes on to the same bits, whatever write it was killed at, and whatever a loss of power left of what was not synced.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use crate::common::training::{config, settings, with};
use assay::train::disk::{Disk, DiskOperation, DiskWatcher};
use assay::train::metrics::StepRecord;
use assay::train::{LossArm, NoObserver, TrainConfig, TrainError, complete_by};
use serde_json::json;

/// A run whose files are all there are: a warm start, a reference policy, two checkpoints.
fn settings_in(folder: &Path) -> TrainConfig {
    let folder = folder.to_str().unwrap();
    config(with(
        settings(Path::new(""), "out"),
        json!({
            "out": folder,
            "steps": 4,
            "checkpoint_every": 2,
            "evaluate_every": 3,
            "warm_start": {"steps": 3, "batch": 2, "cache": null},
            "task": {"arithmetic": {"evaluate": 1}},
            "rollout": {"prompts": 1, "group": 2, "max_new_tokens": 3},
            "loss": {"kl": {"beta": 0.04}, "entropy_coef": 0.01},
        }),
    ))
}

fn run(folder: &Path, watch: Option<Arc<dyn DiskWatcher>>) -> Result<(), TrainError> {
    let config = settings_in(folder);
    let disk = Disk::open(folder)?;
    let disk = watch.map_or(disk.clone(), |watch| disk.watched(watch));
    let arm = LossArm::from_config(&config, None)?;
    complete_by(disk, &config, arm, &AtomicBool::new(false), &mut NoObserver, &mut |_| ()).map(|_| ())
}

/// The bits of the last checkpoint, and of the curve what no clock said.
fn outcome(folder: &Path) -> (Vec<u8>, Vec<StepRecord>) {
    let timeless = |line: &str| StepRecord {
        unix_time: 0.0,
        rollout_s: 0.0,
        score_s: 0.0,
        update_s: 0.0,
        loss_step_s: 0.0,
        step_s: 0.0,
        loss_step_bytes: None,
        update_bytes: None,
        ..serde_json::from_str(line).unwrap()
    };
    let curve = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    (fs::read(folder.join("checkpoint.safetensors")).unwrap(), curve.lines().map(timeless).collect())
}

/// What an operation was, with the bytes of its own.
#[derive(Clone)]
enum Recorded {
    Create(PathBuf),
    Append(PathBuf, Vec<u8>),
    Sync(PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    SyncFolder,
}

#[derive(Default)]
struct Recorder(Mutex<Vec<Recorded>>);

impl DiskWatcher for Recorder {
    fn before(&self, operation: DiskOperation) -> io::Result<()> {
        let name = |path: &Path| PathBuf::from(path.file_name().unwrap());
        self.0.lock().unwrap().push(match operation {
            DiskOperation::Create(path) => Recorded::Create(name(path)),
            DiskOperation::Append(path, bytes) => Recorded::Append(name(path), bytes.to_vec()),
            DiskOperation::Sync(path) => Recorded::Sync(name(path)),
            DiskOperation::Rename(from, to) => Recorded::Rename(name(from), name(to)),
            DiskOperation::Remove(path) => Recorded::Remove(name(path)),
            DiskOperation::SyncFolder(_) => Recorded::SyncFolder,
        });
        Ok(())
    }
}

/// The operations of a whole run in `folder`.
fn recorded(folder: &Path) -> Vec<Recorded> {
    let recorder = Arc::new(Recorder::default());
    run(folder, Some(recorder.clone())).unwrap();
    recorder.0.lock().unwrap().clone()
}

/// Refuses the operation `at` and all after it; of what it would have appended, half gets there.
struct Killed {
    at: usize,
    seen: Mutex<usize>,
}

impl DiskWatcher for Killed {
    fn before(&self, operation: DiskOperation) -> io::Result<()> {
        let mut seen = self.seen.lock().unwrap();
        *seen += 1;
        if *seen <= self.at {
            return Ok(());
        }
        if let (true, DiskOperation::Append(path, bytes)) = (*seen == self.at + 1, operation) {
            let whole = [fs::read(path)?, bytes[..bytes.len() / 2].to_vec()].concat();
            fs::write(path, whole)?;
        }
        Err(io::Error::other("killed"))
    }
}

#[test]
fn resume_after_a_kill_at_any_write_has_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    let operations = recorded(&whole).len();
    let expected = outcome(&whole);
    assert!(operations > 40 && expected.1.len() == 4, "{operations}");
    for at in 0..operations {
        let out = folder.path().join(at.to_string());
        let error = run(&out, Some(Arc::new(Killed { at, seen: Mutex::new(0) }))).unwrap_err().to_string();
        assert!(error.ends_with("killed"), "{error}");
        run(&out, None).unwrap_or_else(|error| panic!("killed at {at}: {error}"));
        assert!(outcome(&out) == expected, "killed at {at}");
    }
}

/// A file, and how much of it is synced.
#[derive(Clone, Default)]
struct Held {
    bytes: Vec<u8>,
    synced: usize,
}

/// What is in the folder where power fails after `operations`: files without what was not synced, and with `names_too` without
/// the names that were not.
fn left(operations: &[Recorded], names_too: bool) -> BTreeMap<PathBuf, Vec<u8>> {
    // Files by number, as a name may come to mean another.
    let (mut files, mut names) = (Vec::<Held>::new(), BTreeMap::<PathBuf, usize>::new());
    let mut synced = names.clone();
    for operation in operations {
        match operation {
            Recorded::Create(name) => {
                files.push(Held::default());
                names.insert(name.clone(), files.len() - 1);
            }
            Recorded::Append(name, bytes) => files[names[name]].bytes.extend(bytes),
            Recorded::Sync(name) => {
                let file = &mut files[names[name]];
                file.synced = file.bytes.len();
            }
            Recorded::Rename(from, to) => {
                let file = names.remove(from).unwrap();
                names.insert(to.clone(), file);
            }
            Recorded::Remove(name) => {
                names.remove(name);
            }
            Recorded::SyncFolder => synced.clone_from(&names),
        }
    }
    let names = if names_too { synced } else { names };
    names.into_iter().map(|(name, file)| (name, files[file].bytes[..files[file].synced].to_vec())).collect()
}

#[test]
fn resume_after_a_power_cut_has_the_same_bits_from_synced_data() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    let operations = recorded(&whole);
    let expected = outcome(&whole);
    let states: BTreeSet<BTreeMap<PathBuf, Vec<u8>>> = (0..=operations.len())
        .flat_map(|done| [false, true].map(|names_too| left(&operations[..done], names_too)))
        .collect();
    assert!(states.len() > 15, "{}", states.len());
    for (i, state) in states.iter().enumerate() {
        let out = folder.path().join(i.to_string());
        fs::create_dir(&out).unwrap();
        for (name, bytes) in state {
            fs::write(out.join(name), bytes).unwrap();
        }
        let names: Vec<_> = state.iter().map(|(name, bytes)| (name, bytes.len())).collect();
        run(&out, None).unwrap_or_else(|error| panic!("{error}, from {names:?}"));
        let (checkpoint, curve) = outcome(&out);
        assert!(checkpoint == expected.0 && curve == expected.1, "from {names:?}");
    }
}

#[test]
fn resume_with_a_short_curve_leaves_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, out) = (folder.path().join("whole"), folder.path().join("out"));
    run(&whole, None).unwrap();
    let first = TrainConfig { steps: 2, ..settings_in(&out) };
    let half = |config: &TrainConfig| {
        let disk = Disk::open(&config.out).unwrap();
        let arm = LossArm::from_config(config, None).unwrap();
        complete_by(disk, config, arm, &AtomicBool::new(false), &mut NoObserver, &mut |_| ()).unwrap().summary
    };
    half(&first);
    fs::write(out.join("metrics.jsonl"), "").unwrap();
    let summary = half(&settings_in(&out));
    assert_eq!((summary.steps, summary.steps_missing), (4, 2));
    let ((given, curve), (expected, all)) = (outcome(&out), outcome(&whole));
    assert!(given == expected && curve == all[2..], "{curve:?}");
}

#[test]
fn resume_of_two_runs_in_one_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let first = Disk::open(folder.path()).unwrap();
    let error = run(folder.path(), None).unwrap_err().to_string();
    assert!(error.ends_with("another run writes here; wait for it, or choose another folder"), "{error}");
    drop(first);
    run(folder.path(), None).unwrap();
}

#[test]
fn resume_refuses_a_checkpoint_with_a_flipped_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (out, path) = (folder.path().join("out"), folder.path().join("out/checkpoint.safetensors"));
    run(&out, None).unwrap();
    let whole = fs::read(&path).unwrap();
    run(&out, None).unwrap();
    let header_len = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header = str::from_utf8(&whole[8..8 + header_len]).unwrap();
    let in_header = |what: &str| 8 + header.find(what).unwrap() + what.len();
    // Tensors at either end and in the middle, and two numbers of the run.
    let data = whole.len() - header_len - 8;
    let places = [header_len + 8, header_len + 8 + data / 2, whole.len() - 2];
    for at in
        places.into_iter().chain(["\\\"step\\\":", "\\\"optimizer_steps\\\":", "\\\"sha256\\\":\\\""].map(in_header))
    {
        let mut flipped = whole.clone();
        flipped[at] ^= 1;
        fs::write(&path, &flipped).unwrap();
        let error = run(&out, None).expect_err(&at.to_string()).to_string();
        assert!(error.contains("checkpoint.safetensors: content: got sha256 "), "byte {at}: {error}");
    }
    fs::write(&path, &whole).unwrap();
    run(&out, None).unwrap();
}

#[test]
#[cfg(unix)]
fn run_writes_through_no_link_and_reads_no_device() {
    let folder = tempfile::tempdir().unwrap();
    let (out, victim) = (folder.path().join("out"), folder.path().join("victim"));
    fs::create_dir(&out).unwrap();
    fs::write(&victim, "somebody's").unwrap();
    let plant = |name: &str| std::os::unix::fs::symlink("../victim", out.join(name)).unwrap();
    for name in [".tmp-checkpoint.safetensors", ".tmp-metrics.jsonl", "events.out.tfevents.assay"] {
        plant(name);
    }
    run(&out, None).unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "somebody's");
    fs::remove_file(out.join(".lock")).unwrap();
    plant(".lock");
    let error = run(&out, None).unwrap_err().to_string();
    assert!(error.contains("cannot lock"), "{error}");
    assert_eq!(fs::read_to_string(&victim).unwrap(), "somebody's");
    fs::remove_file(out.join(".lock")).unwrap();
    fs::remove_file(out.join("metrics.jsonl")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", out.join("metrics.jsonl")).unwrap();
    let error = run(&out, None).unwrap_err().to_string();
    assert!(error.contains("metrics.jsonl: cannot read: got a device, expected a regular file"), "{error}");
}
