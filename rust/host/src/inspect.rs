//! A directory of the disk tier without an engine, for operators.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use undercroft_core::disk::format::FORMAT_VERSION;
use undercroft_core::disk::inspect::{Summary, is_intact};
use undercroft_core::disk::open;
use undercroft_core::error::StoreError;

use crate::error::HostError;

/// Payloads verified between two reports of progress.
const STEP: usize = 64;

/// Fewer digits could name a namespace that was not meant.
const DIGITS_MIN: usize = 8;

/// What a directory holds.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// Version of its format.
    pub format_version: u32,
    /// Size of the data file.
    pub capacity_bytes: u64,
    /// Bytes of all payloads.
    pub used_bytes: u64,
    /// Payloads.
    pub records: usize,
    /// Records that are torn or damaged.
    pub damaged_records: u64,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceReport>,
}

/// What a directory holds of one namespace.
#[derive(Clone, Debug, Serialize)]
pub struct NamespaceReport {
    /// Digest of the description, hexadecimal.
    pub digest: String,
    /// Its canonical description.
    pub description: String,
    /// Payloads.
    pub blocks: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Age of the oldest payload in seconds; `None` if there is no payload.
    pub oldest_s: Option<u64>,
    /// Age of the newest.
    pub newest_s: Option<u64>,
    /// Seconds since a session of it was opened or closed, or a payload was written; `None` if that is not known.
    pub last_use_s: Option<u64>,
}

/// What came of [`verify`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Payloads read.
    pub checked: usize,
    /// Payloads whose checksum does not match.
    pub corrupt: u64,
    /// Bytes of all payloads.
    pub bytes: u64,
}

/// Reads what a directory holds. Changes nothing.
///
/// # Errors
/// If it is no directory of a disk tier, or cannot be read.
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
        format_version: FORMAT_VERSION,
        capacity_bytes: contents.data_bytes,
        used_bytes: payloads.map(u64::from).sum(),
        records: summary.records.len(),
        damaged_records: summary.damaged,
        namespaces: namespaces.collect(),
    })
}

/// Reads every payload of a directory and compares its checksum. Changes nothing. `progress` gets the numbers of
/// payloads that were read and that there are, now and then, and may end it with an error of its own.
///
/// # Errors
/// As [`inspect`], if a payload cannot be read, or of `progress`.
pub fn verify<E: From<HostError>>(
    directory: &Path,
    mut progress: impl FnMut(usize, usize) -> Result<(), E>,
) -> Result<Verification, E> {
    let contents = open::read(directory).map_err(HostError::from)?;
    let summary = Summary::of(&contents);
    let mut found = Verification::default();
    for records in summary.records.chunks(STEP) {
        progress(found.checked, summary.records.len())?;
        for record in records {
            let intact = is_intact(record, &contents.data).map_err(|source| StoreError::Io {
                path: directory.to_owned(),
                action: "read a payload",
                source,
                hint: "",
            });
            found.corrupt += u64::from(!intact.map_err(HostError::from)?);
            found.bytes += u64::from(record.payload_bytes);
        }
        found.checked += records.len();
    }
    progress(found.checked, summary.records.len())?;
    Ok(found)
}

/// The descriptions of the namespaces that a directory holds, which may be in use. Fast: reads no records.
///
/// # Errors
/// As [`inspect`].
pub fn descriptions(directory: &Path) -> Result<Vec<String>, HostError> {
    Ok(open::read_descriptions(directory)?)
}

/// Removes the namespaces whose digest starts with `digest` (hexadecimal, at least eight digits) from a directory
/// that is not in use: how many.
///
/// # Errors
/// If the digest is too short, or as [`inspect`], or if the directory is in use.
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
