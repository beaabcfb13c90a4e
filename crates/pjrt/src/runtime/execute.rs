//! Programs that are compiled for a client, and their runs.

use std::env;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use pjrt::CompileOptions;
use pjrt::protos::xla::{DeviceAssignmentProto, device_assignment_proto::ComputationDevice};
use pjrt_sys::{
    PJRT_Buffer, PJRT_Client_Compile_Args, PJRT_Event, PJRT_Executable, PJRT_Executable_Destroy_Args,
    PJRT_Executable_NumOutputs_Args, PJRT_ExecuteOptions, PJRT_LoadedExecutable, PJRT_LoadedExecutable_Destroy_Args,
    PJRT_LoadedExecutable_Execute_Args, PJRT_LoadedExecutable_GetExecutable_Args, PJRT_Program,
};

use super::buffers::{DeviceBuffer, wait_until};
use super::client::Client;
use super::error::{LIMIT_VARIABLE, RuntimeError};
use super::plugin::call;

/// `env_option_overrides { key: "xla_backend_optimization_level" value { int_field: 0 } }`, a field of `CompileOptionsProto` that is newer
/// than `pjrt-sys`. Appended to an encoded message, it is one more field.
const LEAST_OPTIMIZATION: &[u8] = b"\x3a\x24\x0a\x1exla_backend_optimization_level\x12\x02\x18\x00";

/// The time that a run may take unless the environment says otherwise.
pub const TIME_LIMIT: Duration = Duration::from_mins(30);

/// The longest time that is waited for a run: the clock cannot count all the seconds that a limit may have.
const CENTURY: Duration = Duration::from_hours(100 * 365 * 24);

/// Returns the limit `given` in seconds, or [`TIME_LIMIT`] without one.
fn time_limit(given: Option<&str>) -> Result<Duration, RuntimeError> {
    let Some(given) = given.filter(|given| !given.is_empty()) else { return Ok(TIME_LIMIT) };
    let seconds = given.parse().ok().filter(|&seconds| seconds > 0);
    seconds.map(Duration::from_secs).ok_or_else(|| RuntimeError::Limit { given: given.into() })
}

/// A program to compile, and the number of its copies.
#[derive(Clone, Copy, Debug)]
pub struct PjrtProgram<'p> {
    /// The program in StableHLO, as MLIR text or bytecode.
    pub code: &'p [u8],
    /// The number of copies joined by collectives, each on its own device.
    pub replicas: usize,
    /// The number of copies of a program that counts its devices as partitions, as `jax.export` writes it.
    pub partitions: usize,
}

impl<'p> PjrtProgram<'p> {
    /// Creates a program for `replicas` devices and one partition.
    pub fn replicated(code: &'p [u8], replicas: usize) -> Self {
        Self { code, replicas, partitions: 1 }
    }

    /// Returns the number of devices that it runs on.
    pub fn devices(&self) -> usize {
        self.replicas * self.partitions
    }

    /// Encodes the compile options: copy `r`, partition `p` runs on device `r · partitions + p` of `device_ids`.
    pub(super) fn options(&self, device_ids: &[i64]) -> Vec<u8> {
        let on = |partition| {
            let device = |replica| device_ids[replica * self.partitions + partition];
            ComputationDevice { replica_device_ids: (0..self.replicas).map(device).collect() }
        };
        let mut options = CompileOptions::new();
        if let Some(build) = &mut options.proto_mut().executable_build_options {
            build.num_replicas = self.replicas as i64;
            build.num_partitions = self.partitions as i64;
            build.use_spmd_partitioning = self.partitions > 1;
            // Which `jax.export` writes for; what has older annotations is read by it too.
            build.use_shardy_partitioner = self.partitions > 1;
            // Without this the plugin chooses another order, and arguments would be on the wrong devices.
            build.device_assignment = Some(DeviceAssignmentProto {
                replica_count: self.replicas as i32,
                computation_count: self.partitions as i32,
                computation_devices: (0..self.partitions).map(on).collect(),
            });
        }
        options.encode()
    }

    /// Returns the program in the form that plugins take; it points to the code of this one.
    pub(super) fn raw(&self) -> PJRT_Program {
        const FORMAT: &[u8] = b"mlir";
        let mut raw = PJRT_Program::new();
        raw.code = self.code.as_ptr().cast_mut().cast();
        raw.code_size = self.code.len();
        raw.format = FORMAT.as_ptr().cast();
        raw.format_size = FORMAT.len();
        raw
    }
}

/// A program compiled for the first devices of a client. Freed when dropped.
#[derive(Debug)]
pub struct Executable {
    client: Client,
    raw: NonNull<PJRT_LoadedExecutable>,
    devices: usize,
    outputs: usize,
}

// SAFETY: PJRT executables may be used from any thread.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        let mut args = PJRT_LoadedExecutable_Destroy_Args::new();
        args.executable = self.raw.as_ptr();
        // A destructor cannot report an error: an executable that cannot be freed is leaked.
        let _ = call!(self.client.plugin(), PJRT_LoadedExecutable_Destroy, args, "free an executable");
    }
}

impl Client {
    /// Compiles a program for devices `0 .. program.devices()`.
    ///
    /// # Errors
    /// [`RuntimeError::Devices`]; the plugin's own error where the program does not compile.
    pub fn compile(&self, program: &PjrtProgram) -> Result<Executable, RuntimeError> {
        let devices = program.devices();
        self.expect_devices(devices)?;
        let mut options = program.options(self.device_ids());
        if self.compiles_quickly() {
            options.extend(LEAST_OPTIMIZATION);
        }
        // The encoded options are a protobuf message, to which fields may be appended.
        let mut code = program.raw();
        let mut args = PJRT_Client_Compile_Args::new();
        args.client = self.raw();
        args.program = &raw mut code;
        args.compile_options = options.as_ptr().cast();
        args.compile_options_size = options.len();
        call!(self.plugin(), PJRT_Client_Compile, args, "compile")?;
        let Some(raw) = NonNull::new(args.executable) else {
            let (given, expected) = ("null".into(), "an executable".into());
            return Err(RuntimeError::Answer { what: "compile".into(), given, expected });
        };
        let mut executable = Executable { client: self.clone(), raw, devices, outputs: 0 };
        executable.outputs = executable.read(|unloaded| {
            let mut args = PJRT_Executable_NumOutputs_Args::new();
            args.executable = unloaded;
            call!(self.plugin(), PJRT_Executable_NumOutputs, args, "count outputs").map(|()| args.num_outputs)
        })?;
        Ok(executable)
    }
}

impl Executable {
    /// Returns the number of devices that it runs on.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Returns the client that compiled the program.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Calls `read` with the executable's description, and frees that.
    pub(super) fn read<R>(
        &self,
        read: impl FnOnce(*mut PJRT_Executable) -> Result<R, RuntimeError>,
    ) -> Result<R, RuntimeError> {
        let plugin = self.client.plugin();
        let mut args = PJRT_LoadedExecutable_GetExecutable_Args::new();
        args.loaded_executable = self.raw.as_ptr();
        call!(plugin, PJRT_LoadedExecutable_GetExecutable, args, "describe an executable")?;
        let result = read(args.executable);
        let mut destroy = PJRT_Executable_Destroy_Args::new();
        destroy.executable = args.executable;
        let freed = call!(plugin, PJRT_Executable_Destroy, destroy, "free an executable's description");
        result.and_then(|value| freed.map(|()| value))
    }

    /// Runs on every device and returns when all have finished: `outputs[device][output]` from `arguments[device][argument]`. An argument
    /// that the program aliases to an output is donated: its buffer is gone, and using it again is an error. A run that exceeds
    /// [`TIME_LIMIT`], or the seconds in [`LIMIT_VARIABLE`], is an error, but it continues, since PJRT cannot cancel it.
    ///
    /// # Errors
    /// [`RuntimeError::Arguments`] where the lists do not have one entry a device; the plugin's own error, from the
    /// call or from any device; [`RuntimeError::TimedOut`]; [`RuntimeError::Limit`].
    pub fn execute(&self, arguments: &[Vec<&DeviceBuffer>]) -> Result<Vec<Vec<DeviceBuffer>>, RuntimeError> {
        let limit = time_limit(env::var(LIMIT_VARIABLE).ok().as_deref())?;
        // PJRT takes one argument list for each device, all of the same length.
        let counts: Vec<usize> = arguments.iter().map(Vec::len).collect();
        if counts.len() != self.devices || counts.iter().any(|&count| count != counts[0]) {
            let given = format!("argument counts {counts:?}");
            let expected = format!("the same number of arguments for each of {} devices", self.devices);
            return Err(RuntimeError::Arguments { given, expected });
        }
        // Lists of pointers for every device; the plugin writes outputs and completion events into the empty ones.
        let inputs: Vec<Vec<*mut PJRT_Buffer>> =
            arguments.iter().map(|list| list.iter().map(|buffer| buffer.raw()).collect()).collect();
        let input_lists: Vec<*const *mut PJRT_Buffer> = inputs.iter().map(Vec::as_ptr).collect();
        let mut outputs = vec![vec![ptr::null_mut::<PJRT_Buffer>(); self.outputs]; self.devices];
        let mut output_lists: Vec<*mut *mut PJRT_Buffer> = outputs.iter_mut().map(Vec::as_mut_ptr).collect();
        let mut events = vec![ptr::null_mut::<PJRT_Event>(); self.devices];

        let mut options = PJRT_ExecuteOptions::new();
        let mut args = PJRT_LoadedExecutable_Execute_Args::new();
        args.executable = self.raw.as_ptr();
        args.options = &raw mut options;
        args.argument_lists = input_lists.as_ptr();
        args.num_devices = self.devices;
        args.num_args = counts[0];
        args.output_lists = output_lists.as_mut_ptr();
        args.device_complete_events = events.as_mut_ptr();
        // Two programs with collectives that start in different orders on different devices would deadlock.
        let alone = (self.devices > 1).then(|| self.client.alone());
        let launched = call!(self.client.plugin(), PJRT_LoadedExecutable_Execute, args, "execute");

        // Every event is awaited and every buffer owned before the first error is returned.
        let deadline = Instant::now() + limit.min(CENTURY);
        let await_one = |(device, event)| {
            let what = format!("execute on device {device}");
            let result = wait_until(self.client.plugin(), event, deadline, &what);
            result.unwrap_or(Err(RuntimeError::TimedOut { what, limit }))
        };
        let finished: Vec<Result<(), RuntimeError>> = events.into_iter().enumerate().map(await_one).collect();
        drop(alone);
        let owned: Vec<Vec<_>> = outputs
            .iter()
            .map(|list| list.iter().map(|&raw| DeviceBuffer::own(&self.client, raw, "execute")).collect())
            .collect();
        launched?;
        if finished.iter().any(|result| matches!(result, Err(RuntimeError::TimedOut { .. }))) {
            // A plugin may wait for a run before it frees what that writes.
            owned.into_iter().flatten().for_each(std::mem::forget);
            return finished.into_iter().find_map(Result::err).map_or(Ok(vec![]), Err);
        }
        finished.into_iter().collect::<Result<(), _>>()?;
        owned.into_iter().map(|list| list.into_iter().collect()).collect()
    }
}
