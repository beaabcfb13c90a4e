//! Somebody's kernel in a process of its own, over files in shared memory: protocol `assay-check/1`.
//!
//! The process first says what it is, then answers one request after another, each message one line of JSON:
//!
//! ```text
//! worker   {"protocol": "assay-check/1", "dtypes": ["f32", "bf16"], "outputs": ["logp"], "about": "torch 2.15.0"}
//! request  {"id": 7, "problem": "/dev/shm/…/7.safetensors", "candidate": "/dev/shm/…", "spec": {…}}
//! worker   {"id": 7}    or    {"id": 7, "unsupported": "…"}    or    {"id": 7, "error": "…"}
//!          or    {"id": 7, "mutated": "logits"}
//!          or    {"id": 7, "output": {"field": "logp", "given": "shape [3]", "expected": "[2, 3]"}}
//! ```
//!
//! The problem is a file as `assay generate` writes it, the candidate one as `assay judge` reads it; the worker answers once
//! the latter is whole. `outputs` are those beside the loss and the gradient that every candidate has; `about` may be left out.
//! `output` says which one cannot be judged, `mutated` which input the kernel wrote to. The worker ends when its stdin does.
//!
//! A kernel on several ranks has a process for each, which finds its rank, the number of ranks and a file for their rendezvous in the
//! variables `ASSAY_RANK`, `ASSAY_RANKS` and `ASSAY_RENDEZVOUS`. Its requests have the whole problem and a share, and its candidates are
//! those of the share:
//!
//! ```text
//! request  {"id": 7, …, "shard": {"rank": 1, "ranks": 4, "cut": "vocabulary", "start": 250, "end": 500}}
//! ```
//!
//! A bench asks for times with the number of `calls`. The worker calls its kernel once more than that, and says how long each
//! call but the first took, without reading its problem and writing its candidate:
//!
//! ```text
//! request  {"id": 7, …, "calls": 10}
//! worker   {"id": 7, "seconds": [0.0132, 0.0129, …]}
//! ```
//!
//! A worker is a stranger: its lines and files are bounded before they are read, and when it breaks the protocol or takes too
//! long, the whole group of its processes is killed. So it is when the campaign ends, by whatever signal, and its files are removed; a
//! process that leaves the group by `setsid` is beyond that.

mod kernel_process;
mod memory;
mod process;
mod ranks;

use std::path::PathBuf;
use std::{env, io};

use assay_core::guardian::Guardian;

pub use kernel_process::{Worker, WorkerAnswer, WorkerError, WorkerIntroduction, WorkerLaunch};
pub use memory::WorkerMemory;
pub use ranks::{RankShard, RankedWorker, ShardCut};

/// The protocol and its version.
pub const PROTOCOL: &str = "assay-check/1";

/// The longest line that is read, in bytes.
pub const LONGEST_LINE: usize = 64 << 10;

/// Makes a guarded folder for problems and candidates, in memory that is a file system where there is some.
fn guarded_folder() -> io::Result<Guardian> {
    Guardian::start(&[PathBuf::from("/dev/shm"), env::temp_dir()], "assay-worker-")
}
