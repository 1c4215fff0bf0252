//! The directories of the disk tier: open directories, and directories that are tried again.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use undercroft_contract::cipher::PayloadCipher;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::IoFault;
use undercroft_engine::disk::{Health, LATENCY_LIMITS_NS, Latency};
use undercroft_io::DeviceFiles;
use undercroft_io::disk::open::{Capacity, Directory, DirectoryLock, StoreOptions};
use undercroft_io::disk::patient::{Patience, open_within};
use undercroft_io::within;

use crate::config::{DiskCapacity, HostConfig, OnDiskError};
use crate::error::HostError;
use crate::random::random;

/// The report on an open directory, and its lock.
#[derive(Debug)]
pub(crate) struct OpenDirectory {
    pub(crate) capacity: u64,
    o_direct: bool,
    pub(crate) blocks_recovered: u64,
    /// Notes for the operator about the opening.
    notes: Vec<String>,
    pub(crate) lock: DirectoryLock,
}

/// A directory that could not be opened.
#[derive(Debug)]
pub(crate) struct Unavailable {
    pub(crate) path: PathBuf,
    pub(crate) options: StoreOptions,
    pub(crate) reason: String,
}

/// A directory of the disk tier, in the order of the options.
#[derive(Debug)]
pub(crate) enum DirectoryState {
    Open(OpenDirectory),
    Unavailable(Unavailable),
}

/// The directories of the disk tier. Open directories are locked.
#[derive(Debug, Default)]
pub struct Directories {
    pub(crate) files: Vec<DeviceFiles>,
    pub(crate) images: Vec<DeviceImage>,
    pub(crate) states: Vec<DirectoryState>,
    /// The cipher of the directories' payloads, if these are encrypted.
    pub(crate) cipher: Option<Arc<dyn PayloadCipher>>,
}

impl Directories {
    /// Opens all directories. If the options allow it, opens only the directories that can be opened now.
    ///
    /// # Errors
    /// If a directory or the key file cannot be used.
    pub fn open(config: &HostConfig) -> Result<Self, HostError> {
        let mut all = Self {
            cipher: config.cipher()?,
            ..Self::default()
        };
        for (disk, options) in config.disks.iter().zip(store_options(config)) {
            match open_within(&disk.path, options, random(), Patience::default()) {
                Ok(directory) => {
                    let (files, image, directory) = OpenDirectory::of(directory);
                    all.files.push(files);
                    all.images.push(image);
                    all.states.push(DirectoryState::Open(directory));
                }
                Err(error) if error.may_pass() && config.on_disk_error == OnDiskError::Degrade => {
                    all.files
                        .push(DeviceFiles::absent().map_err(HostError::Io)?);
                    all.images.push(DeviceImage::absent());
                    all.states.push(DirectoryState::Unavailable(Unavailable {
                        path: disk.path.clone(),
                        options,
                        reason: error.to_string(),
                    }));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(all)
    }
}

/// The options of each directory's store. Directories on one filesystem share its space.
pub(crate) fn store_options(config: &HostConfig) -> Vec<StoreOptions> {
    let devices: Vec<Option<u64>> = match &config.disks[..] {
        // Nothing shares its space.
        [_] => vec![None],
        several => several.iter().map(|disk| device_of(&disk.path)).collect(),
    };
    let mut ways: HashMap<u64, u32> = HashMap::new();
    for device in devices.iter().flatten() {
        *ways.entry(*device).or_default() += 1;
    }
    let pairs = config.disks.iter().zip(devices);
    pairs
        .map(|(disk, device)| StoreOptions {
            capacity: match disk.capacity {
                DiskCapacity::Bytes(bytes) => Capacity::Bytes(bytes),
                DiskCapacity::Share { share } => Capacity::Share {
                    share,
                    ways: device.map_or(1, |device| ways[&device]),
                },
            },
            on_other_version: config.disk_on_other_version,
            encrypted: config.key_file != Path::new(""),
        })
        .collect()
}

/// The filesystem of a directory, which may not exist yet; `None` if it does not answer.
fn device_of(path: &Path) -> Option<u64> {
    let path = path.to_owned();
    let found = within(Patience::default().silent, move || {
        let mut places = path.ancestors();
        places.find_map(|place| std::fs::metadata(place).ok())
    });
    found.flatten().map(|found| found.dev())
}

impl OpenDirectory {
    pub(crate) fn of(directory: Directory) -> (DeviceFiles, DeviceImage, Self) {
        let o_direct = directory.files.o_direct;
        let notes = directory.notes.clone();
        let (files, image, lock) = directory.into_parts();
        let open = Self {
            capacity: image.capacity,
            o_direct,
            blocks_recovered: 0,
            notes,
            lock,
        };
        (files, image, open)
    }

    fn info(&self, health: Health, fault: Option<IoFault>) -> Value {
        let missing = self.lock.missing_file();
        let name = match health {
            Health::Good if missing.is_some() => "file_missing",
            Health::Good => "good",
            Health::NoWrites { .. } => "no_writes",
            Health::Stalled => "stalled",
            Health::Failed { .. } => "failed",
        };
        let stalled = (health == Health::Stalled)
            .then(|| "operations on it have not ended for a second".to_owned());
        json!({
            "path": self.lock.path().to_string_lossy(),
            "capacity": self.capacity,
            "o_direct": self.o_direct,
            "blocks_recovered": self.blocks_recovered,
            "health": name,
            "fault": fault.map(|fault| fault.to_string()).or(stalled).or(missing),
            "notes": self.notes,
        })
    }
}

/// The latencies of a directory's reads and writes.
pub(crate) fn latency_json(latencies: &[Latency; 2]) -> Value {
    let [load, save] = latencies.map(
        |latency| json!({"at_most": latency.at_most(), "seconds": latency.total_ns() as f64 / 1e9}),
    );
    let limits = LATENCY_LIMITS_NS.map(|limit| limit as f64 / 1e9);
    json!({"limits_s": limits, "load": load, "save": save})
}

impl DirectoryState {
    /// The report on a directory. `health` is the engine's view of it.
    pub(crate) fn info(&self, health: Health, fault: Option<IoFault>) -> Value {
        match self {
            Self::Open(directory) => directory.info(health, fault),
            Self::Unavailable(directory) => json!({
                "path": directory.path.to_string_lossy(),
                "capacity": 0,
                "o_direct": false,
                "blocks_recovered": 0,
                "health": "unavailable",
                "fault": directory.reason,
                "notes": [],
            }),
        }
    }

    /// Whether a file of an open directory was deleted. The engine does not notice this.
    pub(crate) fn lacks_file(&self) -> bool {
        match self {
            Self::Open(directory) => directory.lock.missing_file().is_some(),
            Self::Unavailable(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::DiskConfig;

    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
    use undercroft_contract::session::{SaveRequest, Tokens};
    use undercroft_driver::EngineAccess;
    use undercroft_engine::EngineConfig;
    use undercroft_io::IoEngineChoice;
    use undercroft_io::arena::Arena;

    use super::*;
    use crate::running::RunningEngine;

    const PATIENCE: Duration = Duration::from_secs(30);
    const BLOCKS: u32 = 64;

    fn config(paths: &[&Path]) -> HostConfig {
        let disks = paths.iter().map(|path| DiskConfig {
            path: (*path).to_owned(),
            capacity: DiskCapacity::Bytes(64 << 20),
        });
        HostConfig {
            disks: disks.collect(),
            ..HostConfig::default()
        }
    }

    fn start(config: &HostConfig, choice: IoEngineChoice) -> RunningEngine {
        let arena = Arc::new(Arena::create(16 << 20).unwrap());
        RunningEngine::start_with(
            EngineConfig::new(arena.size()),
            Directories::open(config).unwrap(),
            (choice, 8),
            arena,
            (Some(Duration::from_millis(1)), false),
        )
        .unwrap()
    }

    fn health(engine: &RunningEngine) -> Vec<String> {
        let info = engine.info();
        let disks = info["disks"].as_array().unwrap().iter();
        disks
            .map(|disk| disk["health"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Saves chains of one block, and waits until they are on disk.
    fn save(engine: &RunningEngine, salt: u8) {
        let spec = NamespaceSpec::uniform("test", 16, &[(GroupKind::Full, 4096)]);
        let session = engine.driver().enter(|engine| engine.open_session(spec));
        let session = session.unwrap().unwrap();
        for block in 0..BLOCKS {
            let mut hash = [salt; 32];
            hash[..4].copy_from_slice(&block.to_le_bytes());
            let hashes = vec![undercroft_contract::key::BlockHash::new(&hash).unwrap()];
            engine.driver().enter(|engine| {
                let save = SaveRequest::new("r", &hashes, Tokens(16));
                let transfer = engine.begin_save(session, &save).transfer.unwrap();
                engine.end_transfer(transfer.id, true);
                engine.finish_request(session, "r");
            });
        }
        let driver = engine.driver();
        assert!(driver.wait_until(PATIENCE, |engine| engine.is_quiet()));
    }

    fn blocks(engine: &RunningEngine) -> Vec<u64> {
        let devices = engine.driver().read(|engine| engine.devices()).unwrap();
        devices.iter().map(|device| device.blocks).collect()
    }

    #[test]
    fn an_engine_starts_without_a_bad_directory_and_uses_it_when_it_is_good() {
        for choice in [IoEngineChoice::Auto, IoEngineChoice::ThreadPool] {
            let root = tempfile::tempdir().unwrap();
            let (good, bad) = (root.path().join("good"), root.path().join("bad"));
            drop(start(&config(&[&bad]), choice));
            // As with a device that loses bits, the superblock's checksum is wrong.
            let intact = std::fs::read(bad.join("super")).unwrap();
            let mut damaged = intact.clone();
            damaged[20] ^= 1;
            std::fs::write(bad.join("super"), &damaged).unwrap();
            let engine = start(&config(&[&bad, &good]), choice);
            assert_eq!(health(&engine), ["unavailable", "good"]);
            let info = engine.info();
            let fault = info["disks"][0]["fault"].as_str().unwrap();
            assert!(fault.contains("superblock is damaged"), "{fault}");
            assert_eq!(engine.stats()["disk_degraded"], 1);
            save(&engine, 1);
            assert_eq!(blocks(&engine), [0, u64::from(BLOCKS)]);
            std::fs::write(bad.join("super"), &intact).unwrap();
            let end = Instant::now() + PATIENCE;
            while health(&engine) != ["good", "good"] || engine.stats()["disk_degraded"] != 0 {
                assert!(Instant::now() < end, "{:?}", engine.info());
                std::thread::sleep(Duration::from_millis(1));
            }
            save(&engine, 2);
            let spread = blocks(&engine);
            assert!(spread[0] > 10, "{spread:?}");
            assert_eq!(spread.iter().sum::<u64>(), 2 * u64::from(BLOCKS));
            engine.stop(PATIENCE);
            drop(engine);
            let again = start(&config(&[&bad, &good]), choice);
            assert_eq!(blocks(&again), spread, "what was written is found again");
        }
    }

    #[test]
    fn a_bad_directory_is_refused_if_the_options_say_so_and_a_foreign_one_always() {
        let root = tempfile::tempdir().unwrap();
        let bad = root.path().join("bad");
        drop(start(&config(&[&bad]), IoEngineChoice::ThreadPool));
        std::fs::write(bad.join("super"), b"UNDRCRFT").unwrap();
        let mut refuse = config(&[&bad]);
        refuse.on_disk_error = OnDiskError::Refuse;
        assert!(Directories::open(&refuse).is_err());
        let foreign = root.path().join("foreign");
        std::fs::create_dir(&foreign).unwrap();
        std::fs::write(foreign.join("mine"), "").unwrap();
        let error = Directories::open(&config(&[&foreign])).unwrap_err();
        assert!(error.to_string().contains("no undercroft store"), "{error}");
    }

    #[test]
    fn directories_on_one_filesystem_share_it() {
        let root = tempfile::tempdir().unwrap();
        let (one, other) = (root.path().join("one"), root.path().join("other"));
        let mut config = config(&[&one, &other]);
        for disk in &mut config.disks {
            disk.capacity = DiskCapacity::Share { share: 0.5 };
        }
        let capacity = Capacity::Share {
            share: 0.5,
            ways: 2,
        };
        let found = store_options(&config);
        assert!(found.iter().all(|options| options.capacity == capacity));
    }
}
