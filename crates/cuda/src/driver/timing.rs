//! Times by the device's own clock.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use super::kernel::KernelCall;
use super::{CudaContext, CudaMemory, CudaStream, Driver};
use crate::error::CudaError;

/// The times of consecutive launches, each of the same input.
pub struct ReplayTimes {
    /// The times of the copies that restored the input, one for each launch.
    pub copies: Vec<Duration>,
    /// The times of each kernel, one for each launch.
    pub kernels: Vec<Vec<Duration>>,
}

impl CudaContext {
    /// Launches `calls` one after another, `launches` times after `warmup` times that are not timed, and before each time copies `input.0`
    /// to `input.1`. All of it is enqueued first, with an event between any two launches, so that the device never waits for the host.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`]; [`CudaError::Size`]; [`CudaError::Call`].
    pub fn replay(
        self: &Arc<Self>,
        input: (&CudaMemory, &CudaMemory),
        calls: &[KernelCall],
        warmup: usize,
        launches: usize,
    ) -> Result<ReplayTimes, CudaError> {
        let current = self.enter()?;
        let driver = current.driver;
        let addresses = |call: &KernelCall| call.kernel.addresses(&call.inputs, &call.outputs);
        let addresses = calls.iter().map(addresses).collect::<Result<Vec<_>, CudaError>>()?;
        // Before the copy, after it, and after each kernel.
        let of_launch = || (0..calls.len() + 2).map(|_| CudaEvent::new(driver)).collect::<Result<Vec<_>, CudaError>>();
        let events = (0..launches).map(|_| of_launch()).collect::<Result<Vec<_>, CudaError>>()?;
        for launch in 0..warmup + launches {
            let mut moments = launch.checked_sub(warmup).map(|timed| events[timed].iter()).into_iter().flatten();
            let mut moment = || moments.next().map_or(Ok(()), CudaEvent::record);
            moment()?;
            input.1.enqueue_copy(driver, input.0)?;
            moment()?;
            for (call, addresses) in calls.iter().zip(&addresses) {
                let (kernel, stream) = (call.kernel, CudaStream::default_one());
                // SAFETY: the arrays are as large as the kernel reads and writes and are alive until all has been
                // waited for.
                unsafe { kernel.call(&current, kernel.kernel().grid, stream, addresses.clone()) }?;
                moment()?;
            }
        }
        let names: Vec<&str> = calls.iter().map(|call| call.kernel.kernel().name.as_str()).collect();
        events.last().and_then(|events| events.last()).map_or(Ok(()), |last| last.wait(&names.join(", ")))?;
        let mut replayed = ReplayTimes { copies: Vec::new(), kernels: vec![Vec::new(); calls.len()] };
        for events in &events {
            let took = events.windows(2).map(|two| two[1].since(&two[0]));
            let took = took.collect::<Result<Vec<_>, CudaError>>()?;
            replayed.copies.push(took[0]);
            replayed.kernels.iter_mut().zip(&took[1..]).for_each(|(all, &took)| all.push(took));
        }
        Ok(replayed)
    }
}

impl CudaMemory {
    /// Copies `from`, which has the same size, to this array, and waits for the copy.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn copy_from(&self, from: &Self) -> Result<(), CudaError> {
        let current = self.context.enter()?;
        let done = CudaEvent::new(current.driver)?;
        self.enqueue_copy(current.driver, from)?;
        done.record()?;
        done.wait("a copy on the device")
    }

    /// Enqueues a copy on the default stream of the current context.
    fn enqueue_copy(&self, driver: &Driver, from: &Self) -> Result<(), CudaError> {
        self.expect_bytes(from.bytes);
        let stream = CudaStream::default_one().pointer();
        // SAFETY: both sides hold as many bytes, in the context that is current; who calls it waits for the stream
        // before either is freed.
        let status = unsafe { (driver.table.copy)(self.address, from.address, self.bytes, stream) };
        driver.check(status, || format!("copy {} bytes on the device", self.bytes))
    }
}

/// An event in the current context, which marks a moment of the device's clock.
pub(super) struct CudaEvent<'d> {
    driver: &'d Driver,
    handle: *mut c_void,
}

impl Drop for CudaEvent<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created once; one that is still to come is freed when it has.
        unsafe { (self.driver.table.destroy_event)(self.handle) };
    }
}

impl<'d> CudaEvent<'d> {
    pub(super) fn new(driver: &'d Driver) -> Result<Self, CudaError> {
        let handle = driver.handle(
            || "create an event".into(),
            |handle| {
                // SAFETY: the handle is alive over the call, in a current context.
                unsafe { (driver.table.create_event)(handle, 0) }
            },
        )?;
        Ok(Self { driver, handle })
    }

    pub(super) fn record(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive, the stream that of the current context.
        let status = unsafe { (self.driver.table.record)(self.handle, CudaStream::default_one().pointer()) };
        self.driver.check(status, || "record an event".into())
    }

    /// Waits until the device has reached the event. An error of the device is returned here.
    pub(super) fn wait(&self, what: &str) -> Result<(), CudaError> {
        // SAFETY: the event is alive and was recorded.
        let status = unsafe { (self.driver.table.synchronize)(self.handle) };
        self.driver.check(status, || format!("run {what}"))
    }

    pub(super) fn since(&self, before: &Self) -> Result<Duration, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events have come, and the number is alive over the call.
        let status = unsafe { (self.driver.table.elapsed)(&raw mut milliseconds, before.handle, self.handle) };
        self.driver.check(status, || "read the device's clock".into())?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}
