//! Functions of the CUDA driver, by their addresses.

#![expect(
    unsafe_code,
    reason = "calls functions of the CUDA driver by their addresses"
)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const UNTIMED: c_uint = 2;

pub(super) type Event = *mut c_void;
pub(super) type Stream = *mut c_void;
pub(super) type Module = *mut c_void;
pub(super) type Kernel = *mut c_void;
type CopyBatch = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    *mut usize,
    Stream,
) -> u32;
type CreateEvent = unsafe extern "C" fn(*mut Event, c_uint) -> u32;
type RecordEvent = unsafe extern "C" fn(Event, Stream) -> u32;
type QueryEvent = unsafe extern "C" fn(Event) -> u32;
type WaitEvent = unsafe extern "C" fn(Stream, Event, c_uint) -> u32;
type LoadModule = unsafe extern "C" fn(*mut Module, *const c_void) -> u32;
type GetKernel = unsafe extern "C" fn(*mut Kernel, Module, *const c_char) -> u32;
type Launch = unsafe extern "C" fn(
    Kernel,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Stream,
    *const *const c_void,
    *const *const c_void,
) -> u32;

/// `CUmemcpyAttributes`, without a hint at the place of either side.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Attributes {
    pub(super) order: c_uint,
    pub(super) source: [c_int; 2],
    pub(super) destination: [c_int; 2],
    pub(super) flags: c_uint,
}

/// Functions of the CUDA driver, 12.8 or newer.
#[derive(Clone, Copy, Debug)]
pub struct DriverFunctions {
    pub(super) copy: CopyBatch,
    pub(super) create: CreateEvent,
    pub(super) record: RecordEvent,
    pub(super) query: QueryEvent,
    pub(super) wait: WaitEvent,
    pub(super) load: LoadModule,
    pub(super) find: GetKernel,
    pub(super) launch: Launch,
}

impl DriverFunctions {
    /// From addresses. `None` if one is null.
    ///
    /// # Safety
    ///
    /// The addresses are those of `cuMemcpyBatchAsync` in version 12.8 of its interface, `cuEventCreate`,
    /// `cuEventRecord`, `cuEventQuery`, `cuStreamWaitEvent`, `cuModuleLoadData`, `cuModuleGetFunction` and
    /// `cuLaunchKernel`, in libraries that are never unloaded.
    #[must_use]
    pub unsafe fn at(addresses: [usize; 8]) -> Option<Self> {
        let [copy, create, record, query, wait, load, find, launch] = addresses;
        Some(Self {
            // SAFETY: by the contract, the address of such a function. So are the following ones.
            copy: unsafe { function(copy) }?,
            // SAFETY: see above.
            create: unsafe { function(create) }?,
            // SAFETY: see above.
            record: unsafe { function(record) }?,
            // SAFETY: see above.
            query: unsafe { function(query) }?,
            // SAFETY: see above.
            wait: unsafe { function(wait) }?,
            // SAFETY: see above.
            load: unsafe { function(load) }?,
            // SAFETY: see above.
            find: unsafe { function(find) }?,
            // SAFETY: see above.
            launch: unsafe { function(launch) }?,
        })
    }

    /// A new event, which is never destroyed: streams of copies live as long as the process.
    pub(super) fn new_event(&self) -> Result<Event, Refused> {
        let mut made = std::ptr::null_mut();
        // SAFETY: the place for the event is valid for the call.
        let code = unsafe { (self.create)(&raw mut made, UNTIMED) };
        called("cuEventCreate", code)?;
        Ok(made)
    }

    /// # Safety
    ///
    /// An event and a stream of this driver.
    pub(super) unsafe fn record_event(&self, event: Event, stream: Stream) -> Result<(), Refused> {
        // SAFETY: by the contract.
        called("cuEventRecord", unsafe { (self.record)(event, stream) })
    }
}

/// The function at an address; `None` at 0.
///
/// # Safety
///
/// `F` is the type of a pointer to the function there.
unsafe fn function<F: Copy>(address: usize) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
    let pointer = NonNull::new(std::ptr::with_exposed_provenance_mut::<c_void>(address))?;
    // SAFETY: by the contract, and both have the size of a pointer.
    Some(unsafe { std::mem::transmute_copy(&pointer) })
}

/// The driver refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A batch. Earlier copies are queued.
    #[error("cuMemcpyBatchAsync failed with error {code}{}", at(*place))]
    Copies {
        /// The driver's error.
        code: u32,
        /// The copy that failed, as far as the driver knows it.
        place: Option<usize>,
    },
    /// Another function. All work that was given before is queued.
    #[error("{function} failed with error {code}")]
    Call {
        /// Its name.
        function: &'static str,
        /// The driver's error.
        code: u32,
    },
}

fn at(place: Option<usize>) -> String {
    place.map_or_else(String::new, |place| format!(" at copy {place}"))
}

/// The result of a call of the driver's `function`, which has answered `code`.
pub(super) fn called(function: &'static str, code: u32) -> Result<(), Refused> {
    match code {
        0 => Ok(()),
        code => Err(Refused::Call { function, code }),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Functions that no test calls.
    pub(in crate::copy) fn uncalled() -> DriverFunctions {
        // SAFETY: nothing is called.
        unsafe { DriverFunctions::at([1; 8]) }.expect("not null")
    }

    #[test]
    fn a_null_address_is_no_function() {
        // SAFETY: nothing is called.
        assert!(unsafe { DriverFunctions::at([1, 1, 1, 1, 1, 1, 0, 1]) }.is_none());
    }
}
