//! Saves the blocks of a file in a running engine through a session, as a vLLM saves its blocks.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::Serialize;
use undercroft_contract::checksum::checksum;
use undercroft_contract::format::{PLACEHOLDER, RECORD_BYTES};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{
    Extent, LookupRequest, Offer, Save, SaveGrant, SaveRequest, Session, Tokens,
};
use undercroft_io::arena::Arena;
use undercroft_ipc::{attach, let_go};

use crate::portable::{PortableError, PortableReader, Totals};

use crate::config::HostConfig;
use crate::error::HostError;
use crate::export::{failed, required_groups};
use crate::{EngineHost, RemoteHost};

/// Blocks between two reports of progress.
const STEP: u64 = 64;
/// Bytes of one save: the engine reserves this much of its memory at a time.
const SAVE_BYTES: u64 = 8 << 20;
/// Longest time for which the engine may have no memory for a save, or not answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause before the engine is asked again.
const PAUSE: Duration = Duration::from_millis(2);

/// The result of an import.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Imported {
    /// Digest of the namespace, hexadecimal.
    pub namespace: String,
    /// Payloads of the file.
    pub blocks: u64,
    /// Bytes of these payloads.
    pub bytes: u64,
    /// Payloads that the engine saved. It had the other payloads already, or does not admit them.
    pub saved_blocks: u64,
}

/// The place of a payload in the file.
#[derive(Clone, Copy, Debug)]
struct ArenaPlace {
    at: u64,
    bytes: u32,
    checksum: u64,
}

/// The blocks of a file, all of which are intact.
#[derive(Debug)]
struct Index {
    spec: NamespaceSpec,
    totals: Totals,
    payloads: HashMap<(BlockHash, u8), ArenaPlace>,
    parents: HashMap<BlockHash, Option<BlockHash>>,
    /// The ends of the chains, the least recently used first.
    ends: Vec<BlockHash>,
}

/// Saves the blocks of the file at `path` in the engine at `socket`. Every byte is verified before the first block is
/// saved. `progress` gets the progress of the verification or of the saves, and the total. It may end the import with
/// an error of its own.
///
/// # Errors
/// If the file is damaged, or the engine refuses the namespace, does not answer, or has no memory. Errors of
/// `progress`.
pub fn import<E: From<HostError>>(
    socket: &Path,
    path: &Path,
    mut progress: impl FnMut(&'static str, u64, u64) -> Result<(), E>,
) -> Result<Imported, E> {
    let file = File::open(path).map_err(|error| failed(path, error))?;
    let size = file.metadata().map_err(|error| failed(path, error))?.len();
    let reader = PortableReader::open(BufReader::with_capacity(1 << 20, &file));
    let mut reader = reader.map_err(|error| failed(path, error))?;
    let index = Index::read(&mut reader, path, |at| progress("verify", at, size))?;
    let namespace = index.spec.digest().to_hex();
    let config = HostConfig {
        server_timeout_ms: Some(PATIENCE.as_secs_f64() * 1e3),
        ..HostConfig::default()
    };
    let host = RemoteHost::of_server(&config, socket.to_owned());
    let session = host.register(index.spec.clone(), Tokens(0))?;
    let address = host.arena();
    let address = address.ok_or_else(|| HostError::NotConnected(host.connection().reason))?;
    let worker = attach(&address.socket, address.session).map_err(HostError::from)?;
    let mut importer = Importer {
        file: &file,
        path,
        index: &index,
        session,
        arena: &worker.arena,
        done: HashSet::new(),
        saved_blocks: 0,
    };
    let imported = importer.run(&mut progress);
    let saved_blocks = importer.saved_blocks;
    let_go(worker.connection);
    host.close();
    imported?;
    Ok(Imported {
        namespace,
        blocks: index.totals.blocks,
        bytes: index.totals.bytes,
        saved_blocks,
    })
}

impl Index {
    fn read<R: std::io::Read, E: From<HostError>>(
        reader: &mut PortableReader<R>,
        path: &Path,
        mut progress: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut index = Self {
            spec: reader.spec().clone(),
            totals: Totals::default(),
            payloads: HashMap::new(),
            parents: HashMap::new(),
            ends: Vec::new(),
        };
        let mut last = HashMap::new();
        let mut inner = HashSet::new();
        loop {
            let at = reader.at();
            let block = reader.next_block().map_err(|error| failed(path, error))?;
            let Some((record, _)) = block else { break };
            if record
                .parent
                .is_some_and(|of| !index.parents.contains_key(&of))
            {
                let reason = "a block comes before its parent";
                return Err(failed(path, PortableError::Damaged { at, reason }).into());
            }
            inner.extend(record.parent);
            let first = index.parents.entry(record.hash).or_insert(record.parent);
            // Otherwise a block could be its own ancestor, and its chain would not end.
            if *first != record.parent {
                let reason = "a block has two parents";
                return Err(failed(path, PortableError::Damaged { at, reason }).into());
            }
            let used: &mut u64 = last.entry(record.hash).or_default();
            *used = record.last.max(*used);
            if record.group != PLACEHOLDER {
                let place = ArenaPlace {
                    at: at + RECORD_BYTES as u64,
                    bytes: record.payload_bytes,
                    checksum: record.checksum,
                };
                index.payloads.insert((record.hash, record.group), place);
            }
            if reader.totals().blocks.is_multiple_of(STEP) {
                progress(reader.at())?;
            }
        }
        index.totals = reader.totals();
        let ends = index.parents.keys().filter(|hash| !inner.contains(*hash));
        index.ends = ends.copied().collect();
        index.ends.sort_unstable_by_key(|hash| (last[hash], *hash));
        Ok(index)
    }

    /// The hashes of a chain, from its root to the first missing node.
    fn chain(&self, end: BlockHash) -> Vec<BlockHash> {
        let above = std::iter::successors(Some(end), |hash| self.parents[hash]);
        let mut chain: Vec<BlockHash> = above.collect();
        chain.reverse();
        let has_all = |&(at, hash): &(usize, &BlockHash)| {
            let mut required = required_groups(&self.spec, at as u32 + 1);
            required.all(|group| self.payloads.contains_key(&(*hash, group as u8)))
        };
        let whole = chain.iter().enumerate().take_while(has_all).count();
        chain.truncate(whole);
        chain
    }

    /// The blocks of windows and states in the file for the hash blocks after `from` up to `to` of a chain.
    fn offers(&self, chain: &[BlockHash], from: u32, to: u32) -> Vec<Offer> {
        let mut offers: Vec<Offer> = Vec::new();
        for (group, of) in self.spec.groups.iter().enumerate() {
            if matches!(of.kind, GroupKind::Full | GroupKind::Ignored) {
                continue;
            }
            let ends = (from + 1..=to).filter(|&depth| self.spec.ends_block(group, depth));
            for depth in ends {
                let key = (chain[depth as usize - 1], group as u8);
                let block = depth / self.spec.hash_blocks(group) - 1;
                if !self.payloads.contains_key(&key) {
                    continue;
                }
                match offers.last_mut() {
                    Some(last) if last.group == key.1 && last.end_block == block => {
                        last.end_block += 1;
                    }
                    _ => offers.push(Offer {
                        group: key.1,
                        first_block: block,
                        end_block: block + 1,
                    }),
                }
            }
        }
        offers
    }

    /// Bytes of the blocks that end at a node.
    fn bytes_at(&self, hash: BlockHash) -> u64 {
        let groups = 0..self.spec.groups.len() as u8;
        let places = groups.filter_map(|group| self.payloads.get(&(hash, group)));
        places.map(|place| u64::from(place.bytes)).sum()
    }
}

struct Importer<'a> {
    file: &'a File,
    path: &'a Path,
    index: &'a Index,
    session: Arc<dyn Session>,
    arena: &'a Arena,
    /// Nodes whose save was requested.
    done: HashSet<BlockHash>,
    saved_blocks: u64,
}

impl Importer<'_> {
    fn run<E: From<HostError>>(
        &mut self,
        progress: &mut impl FnMut(&'static str, u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let total = self.index.parents.len() as u64;
        for (number, &end) in self.index.ends.iter().enumerate() {
            progress("import", self.done.len() as u64, total)?;
            let chain = self.index.chain(end);
            let name = format!("import-{number}");
            self.save_chain(&name, &chain, || progress("import", number as u64, total))?;
            self.done.extend(&chain);
        }
        // The answer to this last question follows the ends of all saves.
        if let Some(&end) = self.index.ends.last() {
            let chain = self.index.chain(end);
            let deadline = Instant::now() + PATIENCE;
            let asked = LookupRequest::new("imported", &chain).max(Tokens::MAX);
            while self.session.lookup(&asked).is_pending() && Instant::now() < deadline {
                sleep(PAUSE);
            }
            self.session.finish_request("imported".into());
        }
        progress("import", total, total)
    }

    fn save_chain<E: From<HostError>>(
        &mut self,
        name: &str,
        chain: &[BlockHash],
        mut progress: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let known = chain.iter().take_while(|hash| self.done.contains(*hash));
        let mut from = known.count() as u32;
        let hashes = chain.to_vec();
        let asked = LookupRequest::new(name, &hashes).max(Tokens(0)).prefetch();
        self.session.lookup(&asked);
        while (from as usize) < chain.len() {
            progress()?;
            let mut bytes = 0;
            let rest = chain[from as usize..].iter();
            let count = rest.take_while(|&&hash| {
                let fits = bytes == 0 || bytes + self.index.bytes_at(hash) <= SAVE_BYTES;
                bytes += self.index.bytes_at(hash);
                fits
            });
            let to = from + count.count() as u32;
            self.save_part(name, chain, (from, to))?;
            from = to;
        }
        self.session.finish_request(name.into());
        Ok(())
    }

    /// Saves the hash blocks of a chain after `from` up to `to`.
    fn save_part(
        &mut self,
        name: &str,
        chain: &[BlockHash],
        (from, to): (u32, u32),
    ) -> Result<(), HostError> {
        let offers = self.index.offers(chain, from, to);
        let tokens = Tokens(to * self.index.spec.hash_block_size);
        let deadline = Instant::now() + PATIENCE;
        let hashes = chain.to_vec();
        loop {
            let save = SaveRequest::new(name, &hashes, tokens)
                .offers(&offers)
                .wanted(true);
            let grant = self.granted(self.session.begin_save(&save), deadline)?;
            let refused = grant.end.refused.is_some();
            if !grant.extents.is_empty() {
                let copied = self.copy(chain, &grant.extents);
                self.session.end_transfer(grant.id, copied.is_ok());
                self.saved_blocks += copied?;
            }
            if !refused {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(HostError::NotConnected(
                    "its host memory is full of data in use".to_owned(),
                ));
            }
            sleep(PAUSE);
        }
    }

    fn granted(&self, answer: Save, deadline: Instant) -> Result<SaveGrant, HostError> {
        let id = match answer {
            Save::Granted(grant) => return Ok(grant),
            Save::Pending(id) => id,
            Save::Unavailable => {
                return Err(HostError::NotConnected("it takes no saves now".to_owned()));
            }
        };
        loop {
            let mut grants = self.session.poll_saves().into_iter();
            if let Some(grant) = grants.find(|grant| grant.id == id) {
                return Ok(grant);
            }
            if Instant::now() >= deadline {
                return Err(HostError::NotConnected("it does not answer".to_owned()));
            }
            sleep(PAUSE);
        }
    }

    /// Copies payloads into slots. Returns the number of payloads.
    fn copy(&self, chain: &[BlockHash], extents: &[Extent]) -> Result<u64, HostError> {
        let mut count = 0;
        for extent in extents {
            let hash_blocks = self.index.spec.hash_blocks(usize::from(extent.group));
            for (block, offset) in (extent.first_block..).zip(&extent.offsets) {
                let Some(offset) = offset.get() else { continue };
                let hash = chain[((block + 1) * hash_blocks) as usize - 1];
                let place = self.index.payloads.get(&(hash, extent.group));
                let payload = place.map(|place| self.payload(place)).transpose()?;
                let Some(payload) = payload.flatten() else {
                    let reason = "the file has changed since it was verified";
                    let at = place.map_or(0, |place| place.at);
                    return Err(failed(self.path, PortableError::Damaged { at, reason }));
                };
                let written = self.arena.write(offset, &payload);
                written.map_err(|out| {
                    HostError::NotConnected(format!("it gave a slot outside: {out:?}"))
                })?;
                count += 1;
            }
        }
        Ok(count)
    }

    fn payload(&self, place: &ArenaPlace) -> Result<Option<Vec<u8>>, HostError> {
        let mut payload = vec![0; place.bytes as usize];
        let read = self.file.read_exact_at(&mut payload, place.at);
        read.map_err(|error| failed(self.path, error))?;
        Ok((checksum(&payload) == place.checksum).then_some(payload))
    }
}

#[cfg(test)]
mod tests {
    use undercroft_contract::format::{NamespaceEntry, Record};

    use crate::portable::PortableWriter;

    use super::*;

    fn hash(name: u8) -> BlockHash {
        BlockHash::new(&[name; 32]).unwrap()
    }

    /// A file with these blocks and their parents. All its checksums are right.
    fn read(blocks: &[(u8, Option<u8>)]) -> Result<Index, HostError> {
        let spec = NamespaceSpec::uniform("model", 16, &[(GroupKind::Full, 8)]);
        let entry = NamespaceEntry { instance: 7, spec };
        let mut writer = PortableWriter::begin(Vec::new(), &entry).unwrap();
        for &(name, parent) in blocks {
            let payload = [name; 8];
            let record = Record {
                group: 0,
                hit_class: 0,
                seq: 1,
                instance: 7,
                slot: 0,
                payload_bytes: 8,
                checksum: checksum(&payload),
                depth: if parent.is_none() { 1 } else { 2 },
                last: 5,
                written_s: 1_800_000_000,
                hash: hash(name),
                parent: parent.map(hash),
            };
            writer.add(&record, &payload).unwrap();
        }
        let bytes = writer.finish().unwrap().0;
        let mut reader = PortableReader::open(bytes.as_slice()).unwrap();
        Index::read(&mut reader, Path::new("file"), |_| Ok(()))
    }

    #[test]
    fn a_file_in_which_a_block_is_its_own_ancestor_is_damaged() {
        let whole = [(1, None), (2, Some(1)), (2, Some(1)), (3, Some(2))];
        let index = read(&whole).unwrap();
        assert_eq!(index.ends, [hash(3)]);
        assert_eq!(index.chain(hash(3)), [hash(1), hash(2), hash(3)]);
        for circle in [
            [(1, None), (2, Some(1)), (1, Some(2)), (3, Some(2))],
            [(1, None), (1, Some(1)), (2, Some(1)), (3, Some(2))],
        ] {
            let error = read(&circle).unwrap_err().to_string();
            assert!(error.contains("a block has two parents"), "{error}");
        }
        let error = read(&[(1, Some(1))]).unwrap_err().to_string();
        assert!(error.contains("before its parent"), "{error}");
    }
}
