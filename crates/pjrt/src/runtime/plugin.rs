//! A PJRT plugin: a shared library that exports `GetPjrtApi`.

use std::collections::BTreeMap;
use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use object::Endianness;
use object::elf::FileHeader64;
use object::read::ReadCache;
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use pjrt_sys::{PJRT_Api, PJRT_Plugin_Initialize_Args};

use assay_core::project;
use assay_core::text::ShownPath;

use super::abi::{self, OLDEST_MINOR, SLOTS};
use super::error::{RuntimeError, check};

/// The environment variable that names a plugin instead of the installed one.
pub const PLUGIN_VARIABLE: &str = "ASSAY_PJRT_PLUGIN";

/// The environment variable that selects which messages of XLA go to stderr.
const LOG_LEVEL: &str = "TF_CPP_MIN_LOG_LEVEL";

/// Keeps plugins from writing notices and warnings to stderr, unless the environment asks for them: every error is also returned as a
/// value. It must be called first in `main`; once there are other threads it has no effect.
pub fn quiet_plugins() {
    let alone = fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    if alone && env::var_os(LOG_LEVEL).is_none() {
        // SAFETY: no other thread can be reading the environment, because this is the only thread.
        unsafe { env::set_var(LOG_LEVEL, "3") };
    }
}

/// Returns the plugin `given`, else the one that [`PLUGIN_VARIABLE`] names; `None` if neither does.
pub fn asked_for(given: Option<&Path>) -> Option<PathBuf> {
    let variable = || env::var_os(PLUGIN_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    given.map(Path::to_path_buf).or_else(variable)
}

/// Returns the plugin of [`asked_for`], else the installed one, which is searched in [`project::code_folders`] and never in the working
/// directory.
///
/// ```
/// use assay_pjrt::runtime::{Plugin, RuntimeError, locate};
///
/// // A path that was given wins over the environment and the installed plugin.
/// let path = locate(Some("Cargo.toml".as_ref()))?;
/// // Loading it shows that it is no library.
/// assert!(matches!(Plugin::load(&path), Err(RuntimeError::Load { .. })));
/// # Ok::<(), RuntimeError>(())
/// ```
///
/// # Errors
/// [`RuntimeError::NoPlugin`] with every path that was tried.
pub fn locate(given: Option<&Path>) -> Result<PathBuf, RuntimeError> {
    if let Some(path) = asked_for(given) {
        return Ok(path);
    }
    find_installed("pjrt_cpu.so").map_err(|looked| RuntimeError::NoPlugin { looked })
}

/// Returns the installed library called `name`; see [`project::find_code`].
///
/// # Errors
/// Every path that was tried.
pub fn find_installed(name: &str) -> Result<PathBuf, Vec<PathBuf>> {
    project::find_code(name)
}

/// Returns the end of an ELF file's last segment and the file's length, if the file is shorter: mapping such a library ends the process.
/// The system's loader reports everything else that is wrong with a library.
fn cut_short(path: &Path) -> Option<(u64, u64)> {
    let file = fs::File::open(path).ok()?;
    let given = file.metadata().ok()?.len();
    let cache = ReadCache::new(file);
    let header = FileHeader64::<Endianness>::parse(&cache).ok()?;
    let endian = header.endian().ok()?;
    let segments = header.program_headers(endian, &cache).ok()?;
    let ends = segments.iter().map(|segment| segment.p_offset(endian).saturating_add(segment.p_filesz(endian)));
    ends.max().filter(|&needed| needed > given).map(|needed| (needed, given))
}

/// A loaded plugin. It stays loaded until the process ends.
pub struct Plugin {
    path: PathBuf,
    table: PJRT_Api,
    version: (i32, i32),
}

// SAFETY: the table is read-only, and PJRT's functions may be called from any thread.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} (C API {}.{})", ShownPath(&self.path), self.version.0, self.version.1)
    }
}

/// The plugins of this process, in the order of their slots.
static LOADED: Mutex<Vec<&'static Plugin>> = Mutex::new(Vec::new());

/// The libraries that could not be loaded as plugins, and why: an attempt runs a library's code, so there is only one.
static REFUSED: Mutex<BTreeMap<PathBuf, RuntimeError>> = Mutex::new(BTreeMap::new());

impl Plugin {
    /// Loads and initialises the plugin at `path`, once a process. Loading a library runs its code, so only trusted libraries should be
    /// named.
    ///
    /// # Errors
    /// [`RuntimeError`] where the file is missing, is no shared library or no PJRT plugin, speaks a C API older than
    /// 0.54, or fails to initialise.
    pub fn load(path: &Path) -> Result<&'static Plugin, RuntimeError> {
        // One entry for each file, whatever path names it.
        let path = fs::canonicalize(path)
            .map_err(|error| RuntimeError::Load { path: path.into(), reason: error.to_string().into() })?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plugin) = loaded.iter().find(|plugin| plugin.path == path) {
            return Ok(plugin);
        }
        if loaded.len() == SLOTS {
            return Err(RuntimeError::TooManyPlugins { path: path.into(), limit: SLOTS });
        }
        let mut refused = REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = refused.get(&path) {
            return Err(error.clone());
        }
        let attempt = Self::load_into(loaded.len(), path.clone());
        let plugin = attempt.inspect_err(|error| drop(refused.insert(path, error.clone())))?;
        let plugin: &Plugin = Box::leak(Box::new(plugin));
        loaded.push(plugin);
        drop(loaded);
        Ok(plugin)
    }

    fn load_into(slot: usize, path: PathBuf) -> Result<Plugin, RuntimeError> {
        // Mapping a truncated library ends the process with SIGBUS, so its length is checked first.
        if let Some((needed, given)) = cut_short(&path) {
            let found = format!("it is cut short: {given} bytes of at least {needed}");
            return Err(RuntimeError::NotAPlugin { path: path.into(), found });
        }
        // SAFETY: the library's initialisers run; the user has named it as a plugin.
        let library = unsafe { Library::new(&path) }
            .map_err(|error| RuntimeError::Load { path: path.clone().into(), reason: error.to_string().into() })?;
        // SAFETY: the symbol's type is fixed by PJRT.
        // Every plugin exports one function, which returns its table of functions.
        let entry = unsafe { library.get::<unsafe extern "C" fn() -> *const PJRT_Api>(b"GetPjrtApi\0") };
        let Ok(get_api) = entry else {
            return Err(RuntimeError::NotAPlugin {
                path: path.into(),
                found: "it does not export `GetPjrtApi`".into(),
            });
        };
        // SAFETY: the function takes nothing and returns a table that lives as long as the library.
        let plugin_table = unsafe { get_api() };
        if plugin_table.is_null() {
            return Err(RuntimeError::NotAPlugin { path: path.into(), found: "its `GetPjrtApi` returned null".into() });
        }
        // SAFETY: every version of the table begins with its size, then a pointer, then its version.
        let (size, version) = unsafe { ((*plugin_table).struct_size, (*plugin_table).pjrt_api_version) };
        // Older tables lack functions that are called here; newer ones only grow at their end.
        let (major, minor) = (version.major_version, version.minor_version);
        if major != 0 || minor < OLDEST_MINOR {
            return Err(RuntimeError::Version { path: path.into(), major, minor, oldest: OLDEST_MINOR });
        }
        if size < size_of::<PJRT_Api>() {
            let found = format!("its table of functions takes {size} bytes, less than {}", size_of::<PJRT_Api>());
            return Err(RuntimeError::NotAPlugin { path: path.into(), found });
        }
        // The table, and the threads that the library has started, outlive any owner.
        std::mem::forget(library);
        // The adapted table hands newer plugins longer argument structs.
        let table = abi::adapt(slot, plugin_table);
        if let Some(initialize) = table.PJRT_Plugin_Initialize {
            let mut args = PJRT_Plugin_Initialize_Args::new();
            // SAFETY: the struct is alive over the call, and the status is freed by `check`.
            unsafe { check(&table, initialize(&raw mut args), || format!("initialise {}", ShownPath(&path)))? };
        }
        Ok(Plugin { path, table, version: (major, minor) })
    }

    /// Returns the plugins that this process has loaded, in order.
    pub fn loaded() -> Vec<&'static Plugin> {
        LOADED.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the canonical path of the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the major and the minor version of its C API.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns its functions, each of which accepts longer arguments.
    pub(super) fn table(&self) -> &PJRT_Api {
        &self.table
    }
}

/// Calls the plugin's function `$entry` with `$args`, and turns a missing function or a bad status into an error.
macro_rules! call {
    ($plugin:expr, $entry:ident, $args:expr, $what:expr) => {{
        let table = $plugin.table();
        match table.$entry {
            None => Err($crate::runtime::RuntimeError::Missing { what: $what.into() }),
            // SAFETY: the struct and everything it points to are alive over the call, and what it points to was made
            // by this plugin; the status is freed by `check`.
            Some(entry) => unsafe { $crate::runtime::error::check(table, entry(&raw mut $args), || $what.into()) },
        }
    }};
}
pub(super) use call;
