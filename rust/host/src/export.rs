//! Writes the blocks of a namespace to a file, from directories that an engine may have open.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufWriter};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::Serialize;
use undercroft_contract::binding::StoredPayload;
use undercroft_contract::checksum::checksum;
use undercroft_contract::cipher::{PayloadCipher, SEAL_BYTES};
use undercroft_contract::format::{NamespaceEntry, PLACEHOLDER, RECORD_BYTES, Record};
use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::SLOT_ALIGN;
use undercroft_io::disk::inspect::{NamespaceSummary, Summary};
use undercroft_io::disk::open;
use undercroft_io::disk::open::Contents;

use crate::portable::{PortableError, PortableWriter};

use crate::config::HostConfig;
use crate::error::HostError;

/// Blocks between two reports of progress.
const STEP: u64 = 64;
/// Least digits of a digest: fewer could match another namespace by mistake.
const DIGITS_MIN: usize = 8;

/// The contents of a file that was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Exported {
    /// Digest of the namespace, hexadecimal.
    pub namespace: String,
    /// Number of payloads.
    pub blocks: u64,
    /// Bytes of these payloads.
    pub bytes: u64,
    /// Payloads in the tables that were left out: replaced meanwhile, unreadable, not decrypted, or below such a block.
    pub left_out: u64,
}

/// One block, and the data file that holds it.
struct Source {
    record: Record,
    directory: usize,
}

/// Writes the blocks on disk of the one namespace whose digest begins with `digest` to a new file at `path`.
/// The file has plain bytes. `key_file` has the keys of encrypted directories, and is empty without encryption.
///
/// `progress` is called now and then with the number of written blocks and of all blocks. It may end the export with
/// an error of its own. Then there is no file at `path`.
///
/// # Errors
/// If the namespace does not exist, a directory cannot be read, or the file cannot be written. Errors of `progress`.
pub fn export<E: From<HostError>>(
    directories: &[PathBuf],
    digest: &str,
    (path, key_file): (&Path, &Path),
    mut progress: impl FnMut(u64, u64) -> Result<(), E>,
) -> Result<Exported, E> {
    if path.exists() {
        return Err(exists(path).into());
    }
    let mut contents = Vec::new();
    for directory in directories {
        contents.push(open::read(directory).map_err(HostError::from)?);
    }
    let cipher = cipher(directories, &contents, key_file)?;
    let summaries: Vec<Summary> = contents.iter().map(Summary::of).collect();
    let space = chosen(&summaries, digest)?;
    let stores = Stores {
        contents: &contents,
        cipher,
        namespace: space.spec.digest(),
    };
    let tables = contents.iter().map(|of| of.table_bytes.as_slice());
    let sources = connected(&space, &summaries, tables.enumerate());
    let part = path.with_file_name(format!(
        "{}.part-{}",
        path.file_name().unwrap_or_default().to_string_lossy(),
        std::process::id()
    ));
    let written = write(&space, &sources, &stores, &part, &mut progress).and_then(|exported| {
        publish(&part, path)?;
        Ok(exported)
    });
    if written.is_err() {
        // If the removal fails, the file's name still shows that the file is incomplete.
        let _ = std::fs::remove_file(&part);
    }
    written
}

/// Gives the finished file its name. A file that another process has made at `path` meanwhile stays.
fn publish(part: &Path, path: &Path) -> Result<(), HostError> {
    match renameat_with(CWD, part, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => Err(exists(path)),
        // The file system does not know the flag.
        Err(Errno::INVAL | Errno::NOSYS) if !path.exists() => {
            std::fs::rename(part, path).map_err(|error| failed(path, error))
        }
        Err(Errno::INVAL | Errno::NOSYS) => Err(exists(path)),
        Err(errno) => Err(failed(path, io::Error::from(errno))),
    }
}

fn exists(path: &Path) -> HostError {
    let reason = "it exists; delete it or name another file";
    failed(path, io::Error::new(io::ErrorKind::AlreadyExists, reason))
}

/// The error of a file.
pub(crate) fn failed(path: &Path, error: impl Into<PortableError>) -> HostError {
    HostError::Portable {
        path: path.to_owned(),
        source: error.into(),
    }
}

/// The one namespace that `digest` names.
fn chosen(summaries: &[Summary], digest: &str) -> Result<NamespaceSummary, HostError> {
    let digits = digest.to_ascii_lowercase();
    let spaces = summaries.iter().flat_map(|of| &of.namespaces);
    let mut named: HashMap<String, &NamespaceSummary> = HashMap::new();
    for space in spaces {
        let of_space = space.spec.digest().to_hex();
        if digits.len() >= DIGITS_MIN && of_space.starts_with(&digits) {
            named.insert(of_space, space);
        }
    }
    match named.len() {
        1 => Ok(named.into_values().next().expect("there is one").clone()),
        0 => Err(HostError::Option(format!(
            "namespace {digest:?}: the directories hold none; allowed are {DIGITS_MIN} or more first digits of one that \
             undercroft inspect shows"
        ))),
        count => Err(HostError::Option(format!(
            "namespace {digest:?} is the beginning of {count} namespaces: give more digits"
        ))),
    }
}

/// The blocks of a namespace: parents before children, and all blocks of a node together.
fn connected<'a>(
    space: &NamespaceSummary,
    summaries: &[Summary],
    tables: impl Iterator<Item = (usize, &'a [u8])>,
) -> Vec<Source> {
    let mut sources = Vec::new();
    for (directory, summary) in summaries.iter().enumerate() {
        let records = summary.records.iter();
        let own = records.filter(|record| record.instance == space.instance);
        sources.extend(own.map(|&record| Source { record, directory }));
    }
    for (directory, table) in tables {
        let records = table.chunks_exact(RECORD_BYTES).filter_map(Record::decode);
        let own = records
            .filter(|record| record.group == PLACEHOLDER && record.instance == space.instance);
        sources.extend(own.map(|record| Source { record, directory }));
    }
    // The later of two records of a payload counts.
    sources.sort_unstable_by_key(|source| {
        let record = &source.record;
        let order = u64::MAX - record.seq;
        (record.depth, record.hash, record.group, order)
    });
    let mut seen = HashSet::new();
    sources.retain(|source| seen.insert((source.record.hash, source.record.group)));
    sources
}

/// The nodes in the file. A node is in the file if its required payloads and its ancestors are.
#[derive(Default)]
struct Written {
    nodes: HashSet<BlockHash>,
    left_out: u64,
}

fn write<E: From<HostError>>(
    space: &NamespaceSummary,
    sources: &[Source],
    stores: &Stores<'_>,
    part: &Path,
    progress: &mut impl FnMut(u64, u64) -> Result<(), E>,
) -> Result<Exported, E> {
    let error = |error: io::Error| E::from(failed(part, error));
    let mut options = File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(part);
    let entry = NamespaceEntry {
        instance: space.instance,
        spec: space.spec.clone(),
    };
    let out = BufWriter::with_capacity(1 << 20, file.map_err(error)?);
    let mut writer = PortableWriter::begin(out, &entry).map_err(error)?;
    let mut written = Written::default();
    let mut at = 0;
    while at < sources.len() {
        let hash = sources[at].record.hash;
        let count = sources[at..].iter().take_while(|of| of.record.hash == hash);
        let node = &sources[at..at + count.count()];
        if (at as u64 / STEP) != (at + node.len()) as u64 / STEP || at == 0 {
            progress(at as u64, sources.len() as u64)?;
        }
        at += node.len();
        add_node(&space.spec, node, stores, &mut writer, &mut written).map_err(error)?;
    }
    let (out, totals) = writer.finish().map_err(error)?;
    let file = out
        .into_inner()
        .map_err(|broken| error(broken.into_error()))?;
    file.sync_all().map_err(error)?;
    progress(sources.len() as u64, sources.len() as u64)?;
    Ok(Exported {
        namespace: space.spec.digest().to_hex(),
        blocks: totals.blocks,
        bytes: totals.bytes,
        left_out: written.left_out,
    })
}

/// Adds the intact payloads of a node, if all its required payloads are intact and its parent is in the file.
fn add_node(
    spec: &NamespaceSpec,
    node: &[Source],
    stores: &Stores<'_>,
    writer: &mut PortableWriter<BufWriter<File>>,
    written: &mut Written,
) -> io::Result<()> {
    let first = &node[0].record;
    let has_parent = first.parent.is_none_or(|of| written.nodes.contains(&of));
    let mut payloads = Vec::new();
    for source in node.iter().filter(|_| has_parent) {
        payloads.extend(stores.read(source)?);
    }
    let has = |group: usize| {
        payloads
            .iter()
            .any(|(record, _)| usize::from(record.group) == group)
    };
    let is_whole = required_groups(spec, first.depth).all(has);
    if !has_parent || payloads.is_empty() || !is_whole {
        written.left_out += node
            .iter()
            .filter(|of| of.record.group != PLACEHOLDER)
            .count() as u64;
        return Ok(());
    }
    written.left_out += (node.len() - payloads.len()) as u64;
    for (record, payload) in &payloads {
        writer.add(record, payload)?;
    }
    written.nodes.insert(first.hash);
    Ok(())
}

/// The groups whose blocks at a node are required payloads.
pub(crate) fn required_groups(
    spec: &NamespaceSpec,
    depth: u32,
) -> impl Iterator<Item = usize> + '_ {
    let groups = spec.groups.iter().enumerate();
    let full = groups.filter(|(_, of)| of.kind == GroupKind::Full);
    full.map(|(group, _)| group)
        .filter(move |&group| spec.ends_block(group, depth))
}

/// The directories from which payloads are read.
struct Stores<'a> {
    contents: &'a [Contents],
    cipher: Option<Arc<dyn PayloadCipher>>,
    namespace: NamespaceDigest,
}

/// The cipher of the key file, if a directory needs one.
fn cipher(
    directories: &[PathBuf],
    contents: &[Contents],
    key_file: &Path,
) -> Result<Option<Arc<dyn PayloadCipher>>, HostError> {
    let mut pairs = directories.iter().zip(contents);
    let encrypted = pairs.find(|(_, of)| of.superblock.encrypted);
    let keys = HostConfig {
        key_file: key_file.to_owned(),
        ..HostConfig::default()
    };
    match (encrypted, keys.cipher()?) {
        (Some((directory, _)), None) => Err(HostError::Option(format!(
            "{} is encrypted: name its key file with --key-file. The exported file is not encrypted",
            directory.display()
        ))),
        (_, cipher) => Ok(cipher),
    }
}

impl Stores<'_> {
    /// A payload with the record of its plain bytes; `None` if the slot holds another payload by now.
    fn read(&self, source: &Source) -> io::Result<Option<(Record, Vec<u8>)>> {
        let record = source.record;
        let (contents, bytes) = (&self.contents[source.directory], record.payload_bytes);
        let mut payload = vec![0; bytes as usize];
        if record.group == PLACEHOLDER {
            return Ok(Some((record, payload)));
        }
        let encrypted = contents.superblock.encrypted;
        payload.resize(payload.len() + if encrypted { SEAL_BYTES } else { 0 }, 0);
        let file_offset = u64::from(record.slot) * SLOT_ALIGN;
        match contents.data.read_exact_at(&mut payload, file_offset) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        if !encrypted {
            return Ok((checksum(&payload) == record.checksum).then_some((record, payload)));
        }
        let stored = StoredPayload {
            store_id: contents.superblock.store_id,
            file_offset,
            namespace: &self.namespace,
            instance: record.instance,
            hash: &record.hash,
            group: record.group,
            payload_bytes: bytes,
            write_id: record.checksum,
        };
        let cipher = self.cipher.as_ref();
        if !cipher.is_some_and(|cipher| cipher.decrypt(&stored.binding(), &mut payload)) {
            return Ok(None);
        }
        payload.truncate(bytes as usize);
        let checksum = checksum(&payload);
        Ok(Some((Record { checksum, ..record }, payload)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_made_during_the_export_is_not_overwritten() {
        let root = tempfile::tempdir().unwrap();
        let (part, path) = (root.path().join("part"), root.path().join("file"));
        std::fs::write(&part, "exported").unwrap();
        std::fs::write(&path, "theirs").unwrap();
        let refused = publish(&part, &path).unwrap_err().to_string();
        assert!(refused.contains("name another file"), "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
        std::fs::remove_file(&path).unwrap();
        // A link that leads nowhere is there, too.
        std::os::unix::fs::symlink("nowhere", &path).unwrap();
        publish(&part, &path).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        publish(&part, &path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"exported");
        assert!(!part.exists());
    }
}
