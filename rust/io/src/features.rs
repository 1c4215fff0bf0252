//! The choice of an IO engine, and a report on the chosen engine.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use undercroft_contract::cipher::PayloadCipher;
use undercroft_contract::io::engine_depth;

use super::fault_hook::Direct;
use super::pool::ThreadPool;
use super::ring::Ring;
use super::uring::{Uring, UringParts};
use super::{DeviceFiles, IoEngine};
use crate::arena::Arena;

/// Which IO engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IoEngineChoice {
    /// io_uring where it is allowed, else the thread pool.
    #[default]
    Auto,
    /// io_uring; an error where it is not allowed.
    IoUring,
    /// The thread pool.
    ThreadPool,
}

/// The features that an engine was granted; shown to the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoFeatures {
    /// The name, as in [`IoEngine::name`].
    pub engine: &'static str,
    /// Whether the data files of all devices bypass the page cache.
    pub o_direct: bool,
    /// Whether transfers use registered memory (the rest of the arena follows as it is populated).
    pub registered_buffers: bool,
    /// Why the engine is not io_uring, if io_uring was preferred.
    pub fallback: Option<String>,
}

/// Opens an engine over the files of `devices`, which requests name by their index. The engine gives each device
/// up to `depth` reads, or as many writes, at a time. The error of [`IoEngineChoice::IoUring`]
/// names the remedy.
pub fn open_io_engine(
    choice: IoEngineChoice,
    depth: usize,
    arena: Arc<Arena>,
    devices: Vec<DeviceFiles>,
) -> io::Result<(Box<dyn IoEngine>, IoFeatures)> {
    let depth = engine_depth(depth);
    let fallback = match choice {
        IoEngineChoice::ThreadPool => None,
        IoEngineChoice::Auto | IoEngineChoice::IoUring => {
            match UringParts::open(depth, &arena, &devices) {
                Ok(parts) => {
                    let engine = Uring::over(parts, arena, devices, Direct);
                    let features = engine.features();
                    return Ok((Box::new(engine), features));
                }
                Err(error) => Some(refusal(&error)),
            }
        }
    };
    if let (IoEngineChoice::IoUring, Some(reason)) = (choice, &fallback) {
        return Err(io::Error::other(format!(
            "{reason}; set io_engine to \"auto\" or \"thread_pool\""
        )));
    }
    open_pool(depth, (arena, devices), fallback, None)
}

/// Like [`open_io_engine`], for payloads that are encrypted on disk: opens the thread pool, whose threads encrypt and
/// decrypt.
pub fn open_encrypting_engine(
    depth: usize,
    arena: Arc<Arena>,
    devices: Vec<DeviceFiles>,
    cipher: Arc<dyn PayloadCipher>,
) -> io::Result<(Box<dyn IoEngine>, IoFeatures)> {
    open_pool(engine_depth(depth), (arena, devices), None, Some(cipher))
}

fn open_pool(
    depth: usize,
    (arena, devices): (Arc<Arena>, Vec<DeviceFiles>),
    fallback: Option<String>,
    cipher: Option<Arc<dyn PayloadCipher>>,
) -> io::Result<(Box<dyn IoEngine>, IoFeatures)> {
    let o_direct = devices.iter().all(|device| device.o_direct);
    let engine = ThreadPool::open(depth, arena, devices, (Direct, cipher))?;
    let features = IoFeatures {
        engine: engine.name(),
        o_direct,
        registered_buffers: false,
        fallback,
    };
    Ok((Box::new(engine), features))
}

/// Whether this process may use io_uring. The error says why not, with the likely cause.
pub fn probe_io_uring() -> Result<(), String> {
    let arena = Arena::create(crate::arena::ARENA_ALIGN).map_err(|error| error.to_string())?;
    // Registers a file, as an engine registers the files of its devices.
    let file = arena
        .fd()
        .try_clone_to_owned()
        .map_err(|error| refusal(&error))?;
    Ring::new(1, &[file.as_fd()], Arc::new(arena), false)
        .map(drop)
        .map_err(|error| refusal(&error))
}

/// An error of io_uring with its likely cause.
fn refusal(error: &io::Error) -> String {
    let cause = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            " (a container's seccomp profile, or the sysctl kernel.io_uring_disabled)"
        }
        io::ErrorKind::Unsupported => " (a container's seccomp profile, or a kernel before 5.11)",
        io::ErrorKind::OutOfMemory => " (RLIMIT_MEMLOCK is too low)",
        _ => "",
    };
    format!("io_uring refused: {error}{cause}")
}

#[cfg(test)]
mod tests {
    use undercroft_contract::io::device_depth;

    use super::*;
    use crate::open_file;

    fn open(choice: IoEngineChoice) -> (Box<dyn IoEngine>, IoFeatures) {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| open_file(&dir.path().join(name), true).unwrap();
        let (data, o_direct) = file("data");
        let device = DeviceFiles {
            superblock: file("super").0,
            table: file("table").0,
            data,
            o_direct,
            lock: None,
        };
        open_io_engine(
            choice,
            4,
            Arc::new(Arena::create(4096).unwrap()),
            vec![device],
        )
        .unwrap()
    }

    #[test]
    fn the_features_name_the_engine_that_was_opened() {
        for choice in [IoEngineChoice::Auto, IoEngineChoice::ThreadPool] {
            let (engine, features) = open(choice);
            assert_eq!(engine.name(), features.engine);
            assert_eq!(device_depth(engine.depth()), 4);
            // Auto falls back only with a reason; a thread pool by choice has no reason.
            let fell_back = choice == IoEngineChoice::Auto && engine.name() == "thread_pool";
            assert_eq!(features.fallback.is_some(), fell_back);
        }
    }

    #[test]
    fn the_probe_agrees_with_the_opened_engine() {
        let (engine, features) = open(IoEngineChoice::Auto);
        match probe_io_uring() {
            Ok(()) => assert_eq!(engine.name(), "io_uring"),
            Err(reason) => assert_eq!(features.fallback, Some(reason)),
        }
    }

    #[test]
    fn a_refusal_names_its_likely_cause() {
        let reason = refusal(&rustix::io::Errno::PERM.into());
        assert!(
            reason.contains("seccomp") && reason.contains("io_uring_disabled"),
            "{reason}"
        );
        assert!(refusal(&rustix::io::Errno::NOSYS.into()).contains("5.11"));
        assert!(refusal(&rustix::io::Errno::NOMEM.into()).contains("RLIMIT_MEMLOCK"));
    }
}
