//! Devices that are described and not there: what a plugin compiles for ahead of time.

use std::fmt;
use std::ptr::{self, NonNull};

use pjrt_sys::{
    PJRT_Compile_Args, PJRT_DeviceDescription, PJRT_DeviceDescription_Attributes_Args, PJRT_DeviceDescription_Id_Args,
    PJRT_Executable, PJRT_Executable_Destroy_Args, PJRT_NamedValue, PJRT_NamedValue_Type_PJRT_NamedValue_kInt64List,
    PJRT_NamedValue_Type_PJRT_NamedValue_kString, PJRT_TopologyDescription, PJRT_TopologyDescription_Create_Args,
    PJRT_TopologyDescription_Destroy_Args, PJRT_TopologyDescription_GetDeviceDescriptions_Args,
};

use super::abi::{bytes_from, slice_from};
use super::error::RuntimeError;
use super::execute::PjrtProgram;
use super::memory::compiled_memory;
use super::plugin::{Plugin, call};
use assay_core::memory::CompiledMemory;

/// Devices of a machine that need not exist. The topology is freed when it is dropped.
pub struct Topology {
    plugin: &'static Plugin,
    raw: NonNull<PJRT_TopologyDescription>,
    name: String,
    /// The plugin's numbers for the devices.
    device_ids: Vec<i64>,
    /// The coordinates of each device, as far as the plugin reports them.
    coordinates: Vec<Vec<i64>>,
}

// SAFETY: PJRT topologies may be used from any thread.
unsafe impl Send for Topology {}
// SAFETY: as above.
unsafe impl Sync for Topology {}

impl Drop for Topology {
    fn drop(&mut self) {
        let mut args = PJRT_TopologyDescription_Destroy_Args::new();
        args.topology = self.raw.as_ptr();
        // A destructor cannot report an error: a topology that cannot be freed is leaked.
        let _ = call!(self.plugin, PJRT_TopologyDescription_Destroy, args, "free a topology");
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} ({} devices) of {:?}", self.name, self.device_count(), self.plugin)
    }
}

impl Topology {
    /// Describes the topology that `plugin` knows by `name`, such as `v6e:2x4` of libtpu.
    ///
    /// # Errors
    /// [`RuntimeError::Plugin`] with the plugin's own message where it knows no such name;
    /// [`RuntimeError::Answer`] where the topology has no device.
    pub fn named(plugin: &'static Plugin, name: &str) -> Result<Topology, RuntimeError> {
        Self::with_options(plugin, name, &[])
    }

    /// Describes a topology that needs options. XLA's CUDA plugin takes `topology` (`1x1x8`: slices, hosts of one, devices of one) and
    /// `target_config` (a `GpuTargetConfigProto` as text).
    ///
    /// # Errors
    /// As of [`named`](Self::named).
    pub fn with_options(
        plugin: &'static Plugin,
        name: &str,
        options: &[(String, String)],
    ) -> Result<Topology, RuntimeError> {
        let what = || format!("describe the topology `{name}`");
        let answer = |given: &str, expected: &str| RuntimeError::Answer {
            what: what(),
            given: given.into(),
            expected: expected.into(),
        };
        let mut args = PJRT_TopologyDescription_Create_Args::new();
        args.topology_name = name.as_ptr().cast();
        args.topology_name_size = name.len();
        let mut options: Vec<PJRT_NamedValue> = options.iter().map(|(name, value)| text_option(name, value)).collect();
        args.create_options = options.as_mut_ptr();
        args.num_options = options.len();
        call!(plugin, PJRT_TopologyDescription_Create, args, what())?;
        let raw = NonNull::new(args.topology).ok_or_else(|| answer("null", "a topology"))?;
        let mut topology = Topology { plugin, raw, name: name.into(), device_ids: Vec::new(), coordinates: Vec::new() };

        // The numbers of the devices go into the compile options, the coordinates to the caller.
        let mut devices = PJRT_TopologyDescription_GetDeviceDescriptions_Args::new();
        devices.topology = raw.as_ptr();
        call!(plugin, PJRT_TopologyDescription_GetDeviceDescriptions, devices, "list the devices of a topology")?;
        // SAFETY: the topology owns the list and the descriptions.
        let descriptions = unsafe { slice_from(devices.descriptions, devices.num_descriptions) };
        if descriptions.is_empty() {
            return Err(answer("no devices", "at least one"));
        }
        for &description in descriptions {
            let mut args = PJRT_DeviceDescription_Id_Args::new();
            args.device_description = description;
            call!(plugin, PJRT_DeviceDescription_Id, args, "read a device's number")?;
            topology.device_ids.push(args.id.into());
            topology.coordinates.push(coordinates(plugin, description)?);
        }
        Ok(topology)
    }

    /// Returns the coordinates of each device in the grid of chips, in the order in which programs count devices; empty if the plugin does
    /// not report them.
    pub fn coordinates(&self) -> &[Vec<i64>] {
        &self.coordinates
    }

    /// Returns the number of devices of the topology.
    pub fn device_count(&self) -> usize {
        self.device_ids.len()
    }

    /// Compiles a program for devices `0 .. program.devices()`.
    ///
    /// # Errors
    /// [`RuntimeError::Devices`]; the plugin's own error where the program does not compile.
    pub fn compile(&self, program: &PjrtProgram) -> Result<UnloadedExecutable, RuntimeError> {
        let available = self.device_count();
        if !(1..=available).contains(&program.devices()) {
            return Err(RuntimeError::Devices { given: program.devices(), available, platform: self.name.clone() });
        }
        let options = program.options(&self.device_ids);
        let mut code = program.raw();
        let mut args = PJRT_Compile_Args::new();
        args.topology = self.raw.as_ptr();
        args.program = &raw mut code;
        args.compile_options = options.as_ptr().cast();
        args.compile_options_size = options.len();
        // No client takes part: the program is compiled for devices that this machine need not have.
        args.client = ptr::null_mut();
        call!(self.plugin, PJRT_Compile, args, "compile")?;
        let Some(raw) = NonNull::new(args.executable) else {
            let (given, expected) = ("null".into(), "an executable".into());
            return Err(RuntimeError::Answer { what: "compile".into(), given, expected });
        };
        Ok(UnloadedExecutable { plugin: self.plugin, raw })
    }
}

/// Creates an option with a text value; it points to both texts.
fn text_option(name: &str, value: &str) -> PJRT_NamedValue {
    let mut option = PJRT_NamedValue::new();
    option.name = name.as_ptr().cast();
    option.name_size = name.len();
    option.type_ = PJRT_NamedValue_Type_PJRT_NamedValue_kString;
    option.__bindgen_anon_1.string_value = value.as_ptr().cast();
    option.value_size = value.len();
    option
}

/// Reads a device's coordinates, the attribute `coords`; empty if it has none.
fn coordinates(plugin: &Plugin, description: *mut PJRT_DeviceDescription) -> Result<Vec<i64>, RuntimeError> {
    let mut args = PJRT_DeviceDescription_Attributes_Args::new();
    args.device_description = description;
    call!(plugin, PJRT_DeviceDescription_Attributes, args, "read a device's attributes")?;
    // SAFETY: the description owns the list and what it names.
    let attributes = unsafe { slice_from(args.attributes, args.num_attributes) };
    for attribute in attributes {
        // SAFETY: the same.
        let name = unsafe { bytes_from(attribute.name, attribute.name_size) };
        if name == b"coords" && attribute.type_ == PJRT_NamedValue_Type_PJRT_NamedValue_kInt64List {
            // SAFETY: the same; a list of integers is what its type says.
            let list = unsafe { slice_from(attribute.__bindgen_anon_1.int64_array_value, attribute.value_size) };
            return Ok(list.to_vec());
        }
    }
    Ok(Vec::new())
}

/// A program compiled for a topology. It is freed when it is dropped.
#[derive(Debug)]
pub struct UnloadedExecutable {
    plugin: &'static Plugin,
    raw: NonNull<PJRT_Executable>,
}

// SAFETY: PJRT executables may be used from any thread.
unsafe impl Send for UnloadedExecutable {}
// SAFETY: as above.
unsafe impl Sync for UnloadedExecutable {}

impl Drop for UnloadedExecutable {
    fn drop(&mut self) {
        let mut args = PJRT_Executable_Destroy_Args::new();
        args.executable = self.raw.as_ptr();
        // A destructor cannot report an error: an executable that cannot be freed is leaked.
        let _ = call!(self.plugin, PJRT_Executable_Destroy, args, "free an executable");
    }
}

impl UnloadedExecutable {
    /// Returns the memory of one run on each device, as the compiler counted it.
    ///
    /// # Errors
    /// The plugin's own, `UNIMPLEMENTED` where it does not count.
    pub fn memory(&self) -> Result<CompiledMemory, RuntimeError> {
        compiled_memory(self.plugin, self.raw.as_ptr())
    }
}
