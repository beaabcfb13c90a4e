//! The devices of a plugin, how a batch is cut over them, and what was compiled for them.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::shards::Shards;
use crate::runtime::{Client, DeviceBuffer, Executable, PjrtProgram, RuntimeError, locate};
use assay_core::implementation::{RunsOn, Unavailable, Unsupported};
use assay_core::memory::{CompiledMemory, DeviceMemory};
use assay_core::problem::Shape;
use assay_programs::{Device, LOOPS_VARIABLE, Sharding};

/// The largest device count that is offered, besides the number of all devices.
const MOST_DEVICES: usize = 8;

/// The plugin of an implementation, and how its batches are cut over the devices.
pub(super) struct PluginDevices {
    sharding: Sharding,
    /// The plugin; `None` means the one that [`locate`] finds.
    plugin: Option<PathBuf>,
}

impl PluginDevices {
    pub(super) fn new(sharding: Sharding, plugin: Option<&Path>) -> Self {
        Self { sharding, plugin: plugin.map(Path::to_path_buf) }
    }

    pub(super) fn client(&self) -> Result<Client, RuntimeError> {
        Client::shared(&locate(self.plugin.as_deref())?)
    }

    /// Checks that the plugin has as many devices as the sharding needs.
    pub(super) fn available(&self) -> Result<(), Unavailable> {
        let client = self.client().map_err(|error| Unavailable { reason: error.to_string() })?;
        if self.counts().is_empty() {
            let reason =
                format!("{} device(s) of {}, fewer than it cuts over", client.device_count(), client.platform());
            return Err(Unavailable { reason });
        }
        Ok(())
    }

    /// Returns the device counts that the sharding can cut a batch over, ascending.
    pub(super) fn counts(&self) -> Vec<usize> {
        let Ok(client) = self.client() else { return Vec::new() };
        let all = client.device_count();
        let beyond = (all > MOST_DEVICES).then_some(all);
        (1..=all.min(MOST_DEVICES)).chain(beyond).filter(|&devices| self.cuts_over(devices)).collect()
    }

    /// Whether the plugin has `devices` devices, and the sharding cuts over that many.
    pub(super) fn takes(&self, devices: usize) -> bool {
        self.client().is_ok_and(|client| devices <= client.device_count()) && self.cuts_over(devices)
    }

    /// Whether the sharding cuts a shape that is divisible by `devices` along every axis.
    fn cuts_over(&self, devices: usize) -> bool {
        let roomy = Shape { batch: devices, tokens: devices, vocab: devices };
        self.sharding.mesh(roomy, devices).is_ok()
    }
}

/// Describes the devices of a client to the programs of the implementation `id`. Tile kernels are loops on a TPU if the
/// [environment](LOOPS_VARIABLE) asks for them.
pub(super) fn device(client: &Client, id: &str) -> Result<Device, Unsupported> {
    let (platform, kind) = (client.platform(), client.device_kind());
    let asked = std::env::var(LOOPS_VARIABLE).is_ok_and(|value| !["", "0"].contains(&value.as_str()));
    if asked {
        return Ok(Device::in_loops(platform, kind));
    }
    Device::from_platform(platform, kind).map_err(|supported| Unsupported {
        implementation: id.into(),
        field: "device kind",
        given: kind.into(),
        supported,
    })
}

/// A program with the plugin and the text that it is compiled from. The text contains the shapes; the numbers of a spec are run-time
/// inputs.
struct CachedProgram {
    plugin: PathBuf,
    code: Arc<str>,
    executable: Arc<CachedExecutable>,
}

/// The executable of a program; `None` until its first user has compiled it.
type CachedExecutable = Mutex<Option<Arc<Executable>>>;

/// The programs used last, the latest at the end.
static KEPT: Mutex<VecDeque<CachedProgram>> = Mutex::new(VecDeque::new());

/// The number of executables that are kept, each of which takes megabytes.
const MOST_KEPT: usize = 64;

/// Returns the executable of a program, which is compiled unless it is one of those used last.
pub(super) fn compiled(client: &Client, code: String, devices: usize) -> Result<Arc<Executable>, RuntimeError> {
    let code: Arc<str> = code.into();
    // Others may compile another program meanwhile; who asks for this one waits.
    let kept = kept(client.plugin().path(), &code);
    let mut executable = kept.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(executable) = &*executable {
        return Ok(Arc::clone(executable));
    }
    let compiled = Arc::new(client.compile(&PjrtProgram::replicated(code.as_bytes(), devices))?);
    Ok(Arc::clone(executable.insert(compiled)))
}

/// Returns the cache entry of a program, which becomes the latest.
fn kept(plugin: &Path, code: &Arc<str>) -> Arc<CachedExecutable> {
    let mut all = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    // A hit moves to the end; a new entry gets an empty slot, which its first user fills.
    let entry = match all.iter().position(|entry| entry.code == *code && entry.plugin == plugin) {
        Some(at) => all.remove(at).expect("just found"),
        None => CachedProgram { plugin: plugin.to_path_buf(), code: Arc::clone(code), executable: Arc::default() },
    };
    // The oldest entry goes. Its users keep its executable alive.
    if all.len() == MOST_KEPT {
        all.pop_front();
    }
    let executable = Arc::clone(&entry.executable);
    all.push_back(entry);
    executable
}

/// The program of one shape, and how a batch is cut for it.
pub(super) struct ShardedProgram {
    pub(super) shards: Shards,
    executable: Arc<Executable>,
}

impl ShardedProgram {
    /// Compiles `code`, and checks that the memory of a run is available.
    pub(super) fn compile(code: String, shards: Shards) -> Result<Self, RuntimeError> {
        let devices = shards.mesh.devices();
        shards.client.expect_devices(devices)?;
        let executable = compiled(&shards.client, code, devices)?;
        shards.expect_room(&executable)?;
        Ok(Self { shards, executable })
    }

    /// Runs the program: `outputs[device][output]` from `inputs[device][argument]`. Inputs that outputs overwrite are gone afterwards.
    pub(super) fn execute(&self, inputs: &[Vec<DeviceBuffer>]) -> Result<Vec<Vec<DeviceBuffer>>, RuntimeError> {
        let arguments: Vec<Vec<&DeviceBuffer>> = inputs.iter().map(|buffers| buffers.iter().collect()).collect();
        self.executable.execute(&arguments)
    }

    /// Returns the bytes of this machine's memory that a run takes.
    pub(super) fn host_bytes(&self) -> usize {
        if self.shards.on_host() { self.shards.bytes_needed(&self.executable) } else { 0 }
    }

    pub(super) fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable> {
        self.executable.memory().map_err(|error| Unavailable { reason: error.to_string() })
    }

    pub(super) fn device_memory(&self) -> Result<DeviceMemory, Unavailable> {
        self.shards.client.device_memory(0).map_err(|error| Unavailable { reason: error.to_string() })
    }

    /// Returns the devices' kind, or `None` if they are this machine's cores.
    pub(super) fn runs_on(&self) -> Option<RunsOn> {
        let client = &self.shards.client;
        (!self.shards.on_host()).then(|| RunsOn { device: client.device_kind().into(), bytes_per_s: None })
    }
}
