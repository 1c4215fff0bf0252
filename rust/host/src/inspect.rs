//! Reads a directory of the disk tier without an engine, for operators.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use undercroft_contract::format::{Record, Superblock};
use undercroft_contract::pages::SLOT_ALIGN;
use undercroft_io::disk::inspect::{Summary, is_intact, is_same_payload};
use undercroft_io::disk::open::Contents;
use undercroft_io::disk::patient::{self, Patience};
use undercroft_io::disk::{StoreError, open};

use crate::config::{HostConfig, OnDiskError};
use crate::directories::store_options;
use crate::error::HostError;

/// Payloads verified between two reports of progress.
const STEP: usize = 64;

/// Most corrupt payloads that a report lists one by one.
const SHOWN_MAX: usize = 20;

/// Within this time an engine writes into the table of its directory that a slot has another payload.
const SETTLES: Duration = Duration::from_secs(5);

/// Least digits of a digest: fewer could match another namespace by mistake.
const DIGITS_MIN: usize = 8;

/// The contents of a directory.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// Version of the directory's format.
    pub format_version: u32,
    /// The process that has the directory open; 0 if the process is unknown.
    pub used_by: Option<u32>,
    /// Size of the data file.
    pub capacity_bytes: u64,
    /// Bytes of all payloads.
    pub used_bytes: u64,
    /// Number of payloads.
    pub records: usize,
    /// Records that are torn or damaged.
    pub damaged_records: u64,
    /// The namespaces in the directory.
    pub namespaces: Vec<NamespaceReport>,
}

/// The contents of one namespace in a directory.
#[derive(Clone, Debug, Serialize)]
pub struct NamespaceReport {
    /// Digest of the description, hexadecimal.
    pub digest: String,
    /// The namespace's canonical description.
    pub description: String,
    /// Number of payloads.
    pub blocks: u64,
    /// Bytes of these payloads.
    pub bytes: u64,
    /// Age of the oldest payload in seconds; `None` if there is no payload.
    pub oldest_s: Option<u64>,
    /// Age of the newest payload in seconds; `None` if there is no payload.
    pub newest_s: Option<u64>,
    /// Seconds since a session of the namespace was opened or closed, or a payload was written; `None` if unknown.
    pub last_use_s: Option<u64>,
}

/// The result of [`verify`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Payloads read.
    pub checked: usize,
    /// Payloads whose checksum does not match.
    pub corrupt: u64,
    /// Bytes of all payloads.
    pub bytes: u64,
    /// The first corrupt payloads.
    pub corrupt_blocks: Vec<CorruptBlock>,
    /// The process that has the directory open, if there is one; 0 if the process is unknown.
    pub used_by: Option<u32>,
}

/// A payload whose checksum does not match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CorruptBlock {
    /// Digest of the payload's namespace, hexadecimal.
    pub namespace: String,
    /// Offset of the payload in the data file, in bytes.
    pub offset: u64,
    /// Size of the payload.
    pub bytes: u32,
}

/// The effect of opening a directory with these options.
#[derive(Clone, Debug, Serialize)]
pub struct DiskExamination {
    /// The directory.
    pub path: String,
    /// The reason why the directory cannot be opened.
    pub error: Option<String>,
    /// Whether an engine starts: with the directory, without it, or as a client of the engine that has it open.
    pub starts: bool,
    /// Size of the data file; 0 if the directory cannot be opened.
    pub capacity: u64,
    /// Whether the directory holds a store, and a start keeps it.
    pub is_kept: bool,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

/// The effect of opening the directories of `config` now. Changes nothing.
///
/// # Errors
/// If the key file cannot be used.
pub fn examine(config: &HostConfig) -> Result<Vec<DiskExamination>, HostError> {
    config.cipher()?;
    let disks = config.disks.iter().zip(store_options(config));
    let examined = disks.map(|(disk, options)| {
        let path = disk.path.to_string_lossy().into_owned();
        match patient::examine_within(&disk.path, options, Patience::default()) {
            Ok(found) => DiskExamination {
                path,
                error: None,
                starts: true,
                capacity: found.capacity,
                is_kept: found.is_kept,
                notes: found.notes,
            },
            Err(StoreError::InUse { pid, .. }) if config.share => DiskExamination {
                error: Some(format!(
                    "disk_path {path} is in use by process {pid}: a vLLM that starts now shares the engine of that \
                     process, whose options count"
                )),
                path,
                starts: true,
                capacity: 0,
                is_kept: false,
                notes: Vec::new(),
            },
            Err(error) => DiskExamination {
                path,
                starts: error.may_pass() && config.on_disk_error == OnDiskError::Degrade,
                error: Some(error.to_string()),
                capacity: 0,
                is_kept: false,
                notes: Vec::new(),
            },
        }
    });
    Ok(examined.collect())
}

/// Reads the contents of a directory. Changes nothing.
///
/// # Errors
/// If `directory` is no directory of a disk tier, or cannot be read.
pub fn inspect(directory: &Path) -> Result<Inspection, HostError> {
    let contents = open::read(directory)?;
    let summary = Summary::of(&contents);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    let namespaces = summary.namespaces.iter().map(|space| {
        // The clock may have been set back.
        let since = |at: u32| now.saturating_sub(u64::from(at));
        let age = |at: u32| (space.blocks > 0).then(|| since(at));
        NamespaceReport {
            digest: space.spec.digest().to_hex(),
            description: space.spec.description.clone(),
            blocks: space.blocks,
            bytes: space.bytes,
            oldest_s: age(space.oldest_s),
            newest_s: age(space.newest_s),
            last_use_s: (space.used_s > 0).then(|| since(space.used_s)),
        }
    });
    let payloads = summary.records.iter().map(|record| record.payload_bytes);
    Ok(Inspection {
        format_version: Superblock::version(contents.superblock.encrypted),
        used_by: open::used_by(directory)?,
        capacity_bytes: contents.data_bytes,
        used_bytes: payloads.map(u64::from).sum(),
        records: summary.records.len(),
        damaged_records: summary.damaged,
        namespaces: namespaces.collect(),
    })
}

/// Reads every payload of a directory and compares its checksum. Changes nothing. `progress` is called now and then
/// with the number of read payloads and of all payloads. It may end the verification with an error of its own.
///
/// The directory may be in use: a payload that was replaced meanwhile is not counted as corrupt.
///
/// # Errors
/// The errors of [`inspect`], or if a payload cannot be read. Errors of `progress`.
pub fn verify<E: From<HostError>>(
    directory: &Path,
    mut progress: impl FnMut(usize, usize) -> Result<(), E>,
) -> Result<Verification, E> {
    let used_by = open::used_by(directory).map_err(HostError::from)?;
    let contents = open::read(directory).map_err(HostError::from)?;
    let summary = Summary::of(&contents);
    let mut found = Verification {
        used_by,
        ..Verification::default()
    };
    let mut suspects = Vec::new();
    for records in summary.records.chunks(STEP) {
        progress(found.checked, summary.records.len())?;
        for record in records {
            if !check(directory, record, &contents)? {
                suspects.push(*record);
            }
            found.bytes += u64::from(record.payload_bytes);
        }
        found.checked += records.len();
    }
    progress(found.checked, summary.records.len())?;
    let corrupt = confirm(directory, suspects).map_err(E::from)?;
    found.corrupt = corrupt.len() as u64;
    let digest = |instance| {
        let mut spaces = summary.namespaces.iter();
        let space = spaces.find(|space| space.instance == instance);
        space.map_or_else(String::new, |space| space.spec.digest().to_hex())
    };
    let shown = corrupt.iter().take(SHOWN_MAX);
    found.corrupt_blocks = shown
        .map(|record| CorruptBlock {
            namespace: digest(record.instance),
            offset: u64::from(record.slot) * SLOT_ALIGN,
            bytes: record.payload_bytes,
        })
        .collect();
    Ok(found)
}

fn check(directory: &Path, record: &Record, contents: &Contents) -> Result<bool, HostError> {
    let intact = is_intact(record, contents).map_err(|source| StoreError::Io {
        path: directory.to_owned(),
        action: "read a payload",
        source,
        hint: "",
    });
    Ok(intact?)
}

/// The records that are still in the table and whose payloads still do not match their checksums. An engine writes
/// the new state of a slot into the table soon after it uses the slot again.
fn confirm(directory: &Path, mut suspects: Vec<Record>) -> Result<Vec<Record>, HostError> {
    let end = Instant::now() + SETTLES;
    while !suspects.is_empty() {
        let is_used = open::used_by(directory)?.is_some();
        let contents = open::read(directory)?;
        let now = Summary::of(&contents).records;
        let mut corrupt = Vec::new();
        for suspect in suspects {
            let at = now.binary_search_by_key(&suspect.slot, |record| record.slot);
            let is_there = at.is_ok_and(|at| is_same_payload(&now[at], &suspect));
            if is_there && !check(directory, &suspect, &contents)? {
                corrupt.push(suspect);
            }
        }
        suspects = corrupt;
        if !is_used || Instant::now() >= end {
            break;
        }
        std::thread::sleep(SETTLES / 10);
    }
    Ok(suspects)
}

/// The descriptions of the namespaces in a directory, which may be in use. Fast, since it reads no records.
///
/// # Errors
/// The errors of [`inspect`].
pub fn descriptions(directory: &Path) -> Result<Vec<String>, HostError> {
    Ok(open::read_descriptions(directory)?)
}

/// Removes the namespaces whose digest starts with `digest` (hexadecimal, at least eight digits) from a directory
/// that is not in use. Returns how many were removed.
///
/// # Errors
/// If the digest is too short or the directory is in use, and the errors of [`inspect`].
pub fn drop_namespace(directory: &Path, digest: &str) -> Result<usize, HostError> {
    if digest.len() < DIGITS_MIN || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(HostError::Option(format!(
            "namespace {digest:?}: allowed are at least {DIGITS_MIN} hexadecimal digits, as undercroft inspect shows them"
        )));
    }
    Ok(open::drop_namespace(
        directory,
        &digest.to_ascii_lowercase(),
    )?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use undercroft_contract::key::BlockHash;
    use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
    use undercroft_contract::session::{SaveRequest, Tokens};
    use undercroft_driver::EngineAccess;
    use undercroft_engine::EngineConfig;
    use undercroft_io::IoEngineChoice;
    use undercroft_io::arena::Arena;

    use super::*;
    use crate::config::{DiskCapacity, DiskConfig};
    use crate::directories::Directories;
    use crate::running::RunningEngine;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn start(directory: &Path) -> RunningEngine {
        let config = HostConfig {
            disks: vec![DiskConfig {
                path: directory.to_owned(),
                capacity: DiskCapacity::Bytes(16 << 20),
            }],
            ..HostConfig::default()
        };
        let arena = Arc::new(Arena::create(8 << 20).unwrap());
        RunningEngine::start(
            EngineConfig::new(arena.size()),
            Directories::open(&config).unwrap(),
            (IoEngineChoice::Auto, 8),
            arena,
        )
        .unwrap()
    }

    /// Saves blocks of two sizes with bytes of their own, until `continues` returns false after a block.
    fn save(engine: &RunningEngine, first: u64, continues: impl Fn(u64) -> bool) -> u64 {
        let driver = engine.driver();
        let sessions = [20_000, 65_536].map(|payload_bytes| {
            let spec = NamespaceSpec::uniform(
                format!("blocks of {payload_bytes}"),
                16,
                &[(GroupKind::Full, payload_bytes)],
            );
            let session = driver.enter(|engine| engine.open_session(spec));
            (session.unwrap().unwrap(), payload_bytes as usize)
        });
        let mut block = first;
        while continues(block) {
            // The sizes alternate, so that pages change their size class.
            let (session, payload_bytes) = sessions[(block / 500 % 2) as usize];
            let mut hash = [7; 32];
            hash[..8].copy_from_slice(&block.to_le_bytes());
            let hashes = vec![BlockHash::new(&hash).unwrap()];
            let save = SaveRequest::new("r", &hashes, Tokens(16));
            let granted = driver.enter(|engine| engine.begin_save(session, &save).transfer);
            if let Some(transfer) = granted.unwrap() {
                let bytes: Vec<u8> = hash.iter().copied().cycle().take(payload_bytes).collect();
                let offset = transfer.extents[0].offsets[0].get().unwrap();
                engine.arena().write(offset, &bytes).unwrap();
                driver.enter(|engine| engine.end_transfer(transfer.id, true));
            }
            driver.enter(|engine| engine.finish_request(session, "r"));
            block += 1;
            if block.is_multiple_of(16) {
                driver.wait_until(PATIENCE, |engine| engine.gauges().saves == 0);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        block
    }

    /// Sets the flag when it is dropped, by a panic, too.
    struct Stop<'a>(&'a AtomicBool);

    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    fn verified(directory: &Path) -> Verification {
        verify(directory, |_, _| Ok::<(), HostError>(())).unwrap()
    }

    #[test]
    fn blocks_replaced_during_a_verification_are_not_corrupt() {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("store");
        let engine = start(&store);
        let filled = save(&engine, 0, |block| block < 1_000);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _saver_ends = Stop(&stop);
            scope.spawn(|| save(&engine, filled, |_| !stop.load(Ordering::Relaxed)));
            let evictions = || engine.stats()["disk_evictions"].as_u64().unwrap();
            let (before, started) = (evictions(), Instant::now());
            let mut checked = 0;
            while checked < 1_000 || evictions() - before < 1_000 {
                let found = verified(&store);
                assert_eq!(
                    (found.corrupt, found.used_by),
                    (0, Some(std::process::id()))
                );
                checked += found.checked;
                assert!(
                    started.elapsed() < PATIENCE,
                    "{checked} blocks were checked, {} evicted",
                    evictions() - before
                );
            }
        });
        engine.stop(PATIENCE);
        drop(engine);
        let found = verified(&store);
        assert_eq!((found.corrupt, found.used_by), (0, None));
    }

    #[test]
    fn a_corrupt_block_is_named_also_in_a_directory_in_use() {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("store");
        let engine = start(&store);
        save(&engine, 0, |block| block < 20);
        let driver = engine.driver();
        assert!(driver.wait_until(PATIENCE, |engine| engine.is_quiet()));
        let record = Summary::of(&open::read(&store).unwrap()).records[3];
        let offset = u64::from(record.slot) * SLOT_ALIGN;
        let data = std::fs::File::options()
            .write(true)
            .open(store.join("data"))
            .unwrap();
        std::os::unix::fs::FileExt::write_all_at(&data, b"other", offset + 100).unwrap();
        data.sync_all().unwrap();
        let found = verified(&store);
        assert_eq!(found.corrupt, 1);
        assert_eq!(found.corrupt_blocks[0].offset, offset);
        assert_eq!(found.corrupt_blocks[0].namespace.len(), 64);
        assert_eq!(found.checked, 20);
        engine.stop(PATIENCE);
    }
}
