//! An engine as the connector opens it, with one namespace of equal blocks, for measurements.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use undercroft_contract::error::RegisterError;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::{EngineConfig, SessionId};
use undercroft_host::{
    Directories, DiskCapacity, DiskConfig, HostConfig, HostError, OnDiskError, RunningEngine,
};
use undercroft_io::arena::{Arena, ArenaError};
use undercroft_io::disk::StoreError;
use undercroft_io::{IoEngineChoice, IoFeatures};

/// Tokens of one block; nothing depends on the number.
pub(crate) const BLOCK_TOKENS: u32 = 16;
/// Longest wait for the device before a measurement is given up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// A measurement could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The arena could not be made.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The directory could not be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The engine could not be started.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The block size does not fit.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The operating system refused.
    #[error("{action}: {source}")]
    Io {
        /// The operation.
        action: &'static str,
        /// The reason.
        source: std::io::Error,
    },
    /// An argument makes no sense.
    #[error("{name} is {value}; allowed: {allowed}")]
    Argument {
        /// The argument.
        name: &'static str,
        /// The given value.
        value: u64,
        /// The allowed values.
        allowed: &'static str,
    },
    /// The engine did something else than the benchmark measures.
    #[error("the engine {0}: the figures would mean nothing")]
    Engine(String),
}

/// Makes an IO error of an action.
pub(crate) fn failed(action: &'static str) -> impl FnOnce(std::io::Error) -> BenchError {
    move |source| BenchError::Io { action, source }
}

/// A running engine over one directory.
pub(crate) struct Rig {
    engine: RunningEngine,
    pub(crate) driver: Arc<Driver>,
    pub(crate) session: SessionId,
}

impl Rig {
    /// Opens `dir` with `capacity` bytes.
    pub(crate) fn open(
        dir: &Path,
        capacity: u64,
        arena: Arc<Arena>,
        depth: usize,
        block_bytes: u32,
        (choice, key_file): (IoEngineChoice, &Path),
    ) -> Result<Self, BenchError> {
        let disk = DiskConfig {
            path: dir.to_owned(),
            capacity: DiskCapacity::Bytes(capacity),
        };
        let directories = Directories::open(&HostConfig {
            disks: vec![disk],
            on_disk_error: OnDiskError::Refuse,
            io_engine: choice,
            key_file: key_file.to_owned(),
            ..HostConfig::default()
        })?;
        let config = EngineConfig::new(arena.size());
        let engine = RunningEngine::start(config, directories, (choice, depth), arena)?;
        let driver = Arc::clone(engine.driver());
        let session = driver.enter(|engine| engine.open_session(spec(block_bytes)));
        Ok(Self {
            engine,
            driver,
            session: session.unwrap_or(Err(RegisterError::Broken))?,
        })
    }

    /// How the device is read and written.
    pub(crate) fn io(&self) -> &IoFeatures {
        self.engine.io()
    }

    /// Blocks that were found in the directory.
    pub(crate) fn blocks_recovered(&self) -> u64 {
        self.engine.recovery().blocks
    }

    /// Stops the engine in an orderly way: all pending writes end.
    pub(crate) fn close(self) -> Result<(), BenchError> {
        self.engine.stop(PATIENCE);
        match self.driver.enter(|engine| engine.is_quiet()) {
            Some(true) => Ok(()),
            _ => Err(BenchError::Engine("did not come to rest".to_owned())),
        }
    }
}

/// A namespace with one full-attention group.
pub(crate) fn spec(block_bytes: u32) -> NamespaceSpec {
    NamespaceSpec::uniform(
        "undercroft bench",
        BLOCK_TOKENS,
        &[(GroupKind::Full, block_bytes)],
    )
}

/// The hash of block `index`: well mixed, as a cryptographic hash's bytes are.
pub(crate) fn hash(index: u64) -> BlockHash {
    let mut bytes = [0; 32];
    for (word, chunk) in (0u64..).zip(bytes.chunks_exact_mut(8)) {
        chunk.copy_from_slice(&mix(index.wrapping_mul(4).wrapping_add(word)).to_le_bytes());
    }
    // A hash of 32 bytes is always taken.
    BlockHash::new(&bytes).unwrap_or_else(|| unreachable!("32 bytes"))
}

/// SplitMix64 at a position.
pub(crate) fn mix(position: u64) -> u64 {
    let mut state = position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Processor time of this process so far, in seconds.
pub(crate) fn process_time() -> f64 {
    undercroft_io::raw::process_time().as_secs_f64()
}
