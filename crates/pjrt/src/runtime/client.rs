//! A client: the devices of a plugin, as one process uses them.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pjrt_sys::{
    PJRT_Client, PJRT_Client_AddressableDevices_Args, PJRT_Client_Create_Args, PJRT_Client_Destroy_Args,
    PJRT_Client_PlatformName_Args, PJRT_Client_PlatformVersion_Args, PJRT_Device, PJRT_Device_GetDescription_Args,
    PJRT_DeviceDescription_Id_Args, PJRT_DeviceDescription_Kind_Args, PJRT_NamedValue,
    PJRT_NamedValue_Type_PJRT_NamedValue_kInt64,
};

use super::abi::{bytes_from, slice_from};
use super::error::RuntimeError;
use super::flags::expect_flags;
use super::plugin::{Plugin, call};
use assay_core::text::ShownPath;

/// The devices that a CPU plugin is asked for. They share the machine's cores; an unused device costs next to nothing.
const CPU_DEVICES: usize = 8;

/// A plugin's devices. A clone is the same client.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    plugin: &'static Plugin,
    raw: NonNull<PJRT_Client>,
    devices: Vec<*mut PJRT_Device>,
    /// The plugin's numbers for the devices.
    device_ids: Vec<i64>,
    platform: String,
    device_kind: String,
    platform_version: String,
    /// A lock that is held while a program runs on several devices.
    collective: Mutex<()>,
    /// Whether programs are compiled with the least optimisation: see [`Client::compile_quickly`].
    compiles_quickly: AtomicBool,
}

// SAFETY: PJRT clients and devices may be used from any thread; nothing else here is shared or changes.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut args = PJRT_Client_Destroy_Args::new();
        args.client = self.raw.as_ptr();
        // A destructor cannot report an error: a client that cannot be freed is leaked.
        let _ = call!(self.plugin, PJRT_Client_Destroy, args, "free a client");
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} × {} of {:?}", self.device_count(), self.platform(), self.plugin())
    }
}

/// The clients of this process, by plugin.
static SHARED: Mutex<BTreeMap<PathBuf, Client>> = Mutex::new(BTreeMap::new());

/// Reads a device's number in the plugin, and its kind as the plugin names it: `TPU v6 lite`.
fn describe(plugin: &Plugin, device: *mut PJRT_Device) -> Result<(i64, String), RuntimeError> {
    let what = "describe a device";
    let mut description = PJRT_Device_GetDescription_Args::new();
    description.device = device;
    call!(plugin, PJRT_Device_GetDescription, description, what)?;
    let mut id = PJRT_DeviceDescription_Id_Args::new();
    id.device_description = description.device_description;
    call!(plugin, PJRT_DeviceDescription_Id, id, what)?;
    let mut kind = PJRT_DeviceDescription_Kind_Args::new();
    kind.device_description = description.device_description;
    call!(plugin, PJRT_DeviceDescription_Kind, kind, what)?;
    // SAFETY: the device owns the text.
    let text = unsafe { bytes_from(kind.device_kind, kind.device_kind_size) };
    Ok((id.id.into(), String::from_utf8_lossy(text).into_owned()))
}

impl Client {
    /// Returns the process's only client of the plugin at `path`. Most plugins can serve only one.
    ///
    /// # Errors
    /// As [`Plugin::load`] and [`Client::create`].
    pub fn shared(path: &Path) -> Result<Client, RuntimeError> {
        let plugin = Plugin::load(path)?;
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        // The lock is held while a client is created, so that two threads never create two.
        if let Some(client) = shared.get(plugin.path()) {
            return Ok(client.clone());
        }
        expect_flags(path)?;
        let client = Client::create(plugin)?;
        shared.insert(plugin.path().to_path_buf(), client.clone());
        Ok(client)
    }

    /// Creates a client with all the plugin's devices. A CPU plugin is asked for eight; if it does not know that option, it has its default
    /// number.
    ///
    /// # Errors
    /// [`RuntimeError::Plugin`] with the plugin's own message, or [`RuntimeError::Answer`] where it has no device.
    pub fn create(plugin: &'static Plugin) -> Result<Client, RuntimeError> {
        // Only a CPU plugin knows the option, and only a client knows its platform.
        let client = Self::create_with(plugin, &mut [])?;
        if client.platform() != "cpu" || client.device_count() >= CPU_DEVICES {
            return Ok(client);
        }
        drop(client);
        // Most plugins serve one client at a time, so the first is dropped before a client with eight devices is created.
        let name = b"cpu_device_count";
        let mut option = PJRT_NamedValue::new();
        option.name = name.as_ptr().cast::<c_char>();
        option.name_size = name.len();
        option.type_ = PJRT_NamedValue_Type_PJRT_NamedValue_kInt64;
        option.__bindgen_anon_1.int64_value = CPU_DEVICES as i64;
        option.value_size = 1;
        Self::create_with(plugin, &mut [option]).or_else(|_| Self::create_with(plugin, &mut []))
    }

    fn create_with(plugin: &'static Plugin, options: &mut [PJRT_NamedValue]) -> Result<Client, RuntimeError> {
        let what = || format!("create a client of {}", ShownPath(&plugin.path()));
        let mut args = PJRT_Client_Create_Args::new();
        args.create_options = options.as_mut_ptr();
        args.num_options = options.len();
        call!(plugin, PJRT_Client_Create, args, what())?;
        let Some(raw) = NonNull::new(args.client) else {
            return Err(RuntimeError::Answer { what: what(), given: "null".into(), expected: "a client".into() });
        };
        // From here on `inner` owns the client, so that every error below frees it.
        let mut inner = Inner {
            plugin,
            raw,
            devices: Vec::new(),
            device_ids: Vec::new(),
            platform: String::new(),
            device_kind: String::new(),
            platform_version: String::new(),
            collective: Mutex::new(()),
            compiles_quickly: AtomicBool::new(false),
        };

        let mut name = PJRT_Client_PlatformName_Args::new();
        name.client = raw.as_ptr();
        call!(plugin, PJRT_Client_PlatformName, name, "read the platform's name")?;
        // SAFETY: the client owns the text.
        let text = unsafe { bytes_from(name.platform_name, name.platform_name_size) };
        inner.platform = String::from_utf8_lossy(text).into_owned();

        let mut version = PJRT_Client_PlatformVersion_Args::new();
        version.client = raw.as_ptr();
        call!(plugin, PJRT_Client_PlatformVersion, version, "read the platform's version")?;
        // SAFETY: the client owns the text.
        let text = unsafe { bytes_from(version.platform_version, version.platform_version_size) };
        inner.platform_version = String::from_utf8_lossy(text).trim().to_string();

        let mut devices = PJRT_Client_AddressableDevices_Args::new();
        devices.client = raw.as_ptr();
        call!(plugin, PJRT_Client_AddressableDevices, devices, "list the devices")?;
        // SAFETY: the client owns the list and the devices.
        inner.devices = unsafe { slice_from(devices.addressable_devices, devices.num_addressable_devices) }.to_vec();
        if inner.devices.is_empty() || inner.devices.iter().any(|device| device.is_null()) {
            let given = format!("{} devices, some of them null", inner.devices.len());
            return Err(RuntimeError::Answer { what: what(), given, expected: "at least one device".into() });
        }
        let described = inner.devices.iter().map(|&device| describe(plugin, device));
        let (device_ids, kinds): (Vec<i64>, Vec<String>) =
            described.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        (inner.device_ids, inner.device_kind) = (device_ids, kinds.into_iter().next().unwrap_or_default());
        Ok(Client(Arc::new(inner)))
    }

    /// Returns the plugin that the client belongs to.
    pub fn plugin(&self) -> &'static Plugin {
        self.0.plugin
    }

    /// Returns the platform's name: `cpu`, `cuda`, `tpu`, …
    pub fn platform(&self) -> &str {
        &self.0.platform
    }

    /// Returns the kind of the devices as the plugin names it: `TPU v6 lite`.
    pub fn device_kind(&self) -> &str {
        &self.0.device_kind
    }

    /// Returns the plugin's description of its own version.
    pub fn platform_version(&self) -> &str {
        &self.0.platform_version
    }

    /// Returns the number of devices that this process can use.
    pub fn device_count(&self) -> usize {
        self.0.devices.len()
    }

    /// Checks that the client has at least `devices` devices, and that `devices` is not 0.
    ///
    /// # Errors
    /// [`RuntimeError::Devices`].
    pub fn expect_devices(&self, devices: usize) -> Result<(), RuntimeError> {
        let available = self.device_count();
        if (1..=available).contains(&devices) {
            return Ok(());
        }
        Err(RuntimeError::Devices { given: devices, available, platform: self.platform().into() })
    }

    /// Makes XLA's CPU backend optimise programs as little as it can from now on: they compile sooner and run slower. Tests use it, since
    /// they run a program a few times. It does not change programs on other platforms, or programs that are compiled ahead of time for a
    /// [`Topology`](super::Topology).
    pub fn compile_quickly(&self) {
        self.0.compiles_quickly.store(self.platform() == "cpu", Ordering::Relaxed);
    }

    pub(super) fn compiles_quickly(&self) -> bool {
        self.0.compiles_quickly.load(Ordering::Relaxed)
    }

    /// Returns the plugin's numbers for the devices.
    pub(super) fn device_ids(&self) -> &[i64] {
        &self.0.device_ids
    }

    /// Locks out other programs of several devices. Two that start on their devices in different orders would deadlock.
    pub(super) fn alone(&self) -> MutexGuard<'_, ()> {
        self.0.collective.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn raw(&self) -> *mut PJRT_Client {
        self.0.raw.as_ptr()
    }

    /// Returns the device with this index, from 0.
    pub(super) fn device(&self, index: usize) -> Result<*mut PJRT_Device, RuntimeError> {
        self.expect_devices(index + 1)?;
        Ok(self.0.devices[index])
    }
}
