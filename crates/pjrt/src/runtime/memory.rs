//! The memory figures of compiled programs and of devices.

use pjrt_sys::{PJRT_Device_MemoryStats_Args, PJRT_Executable, PJRT_Executable_GetCompiledMemoryStats_Args};

use super::client::Client;
use super::error::RuntimeError;
use super::execute::Executable;
use super::plugin::{Plugin, call};
use assay_core::memory::{CompiledMemory, DeviceMemory, available_host_bytes};

/// Reads the memory of one run of `executable` on each device.
pub(super) fn compiled_memory(
    plugin: &Plugin,
    executable: *mut PJRT_Executable,
) -> Result<CompiledMemory, RuntimeError> {
    let mut args = PJRT_Executable_GetCompiledMemoryStats_Args::new();
    args.executable = executable;
    call!(plugin, PJRT_Executable_GetCompiledMemoryStats, args, "read a program's memory")?;
    Ok(CompiledMemory {
        argument_bytes: args.argument_size_in_bytes,
        output_bytes: args.output_size_in_bytes,
        temp_bytes: args.temp_size_in_bytes,
        alias_bytes: args.alias_size_in_bytes,
        code_bytes: args.generated_code_size_in_bytes,
    })
}

impl Executable {
    /// Returns the memory of one run on each device, as the compiler counted it.
    ///
    /// # Errors
    /// The plugin's own, `UNIMPLEMENTED` where it does not count.
    pub fn memory(&self) -> Result<CompiledMemory, RuntimeError> {
        self.read(|executable| compiled_memory(self.client().plugin(), executable))
    }
}

impl Client {
    /// Returns the figures of a device's allocator.
    ///
    /// # Errors
    /// The plugin's own, `UNIMPLEMENTED` where it has no such figures (the CPU plugins have none).
    pub fn device_memory(&self, device: usize) -> Result<DeviceMemory, RuntimeError> {
        let mut args = PJRT_Device_MemoryStats_Args::new();
        args.device = self.device(device)?;
        call!(self.plugin(), PJRT_Device_MemoryStats, args, format!("read the memory of device {device}"))?;
        Ok(DeviceMemory {
            bytes_in_use: args.bytes_in_use,
            peak_bytes_in_use: args.peak_bytes_in_use_is_set.then_some(args.peak_bytes_in_use),
            peak_bytes_reserved: args.peak_bytes_reserved_is_set.then_some(args.peak_bytes_reserved),
            bytes_limit: args.bytes_limit_is_set.then_some(args.bytes_limit),
        })
    }

    /// Returns the bytes that may still be allocated on a device: the allocator's limit minus the bytes in use. For a plugin without these
    /// figures whose devices are this machine, it is the machine's free memory. `None` if neither is known.
    pub fn available_bytes(&self, device: usize) -> Option<usize> {
        if let Ok(DeviceMemory { bytes_in_use, bytes_limit: Some(limit), .. }) = self.device_memory(device) {
            return usize::try_from(limit - bytes_in_use).ok();
        }
        (self.platform() == "cpu").then(available_host_bytes).flatten()
    }
}
