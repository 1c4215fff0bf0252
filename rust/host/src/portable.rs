//! The file in which an operator moves the blocks of a namespace from one host to another.
//!
//! A file has a header block, the namespace's entry as in a directory's table of namespaces, then the blocks, parents
//! before their children. Each block is a record as in a directory's table, with its checksum, then the payload that
//! the record describes. The end has the number of blocks and bytes, so that a reader recognizes a file that was cut
//! off.

use std::io::{self, Read, Write};

use undercroft_contract::checksum::checksum;
use undercroft_contract::format::{
    BLOCK_BYTES, ENTRY_BYTES, NamespaceEntry, PLACEHOLDER, RECORD_BYTES, Record,
};
use undercroft_contract::little_endian::{u32_at, u64_at};
use undercroft_contract::namespace::NamespaceSpec;

/// Version of the file's format.
pub(crate) const PORTABLE_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"UCEXPORT";
const END_MAGIC: [u8; 8] = *b"UCEXPEND";
/// Where the checksum of the end lies.
const END_BODY: usize = 24;

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PortableError {
    /// The operating system refuses.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The file has another format.
    #[error("it is not a file that undercroft export has written")]
    NotOurs,
    /// The format has another version.
    #[error("its format has version {0}; this undercroft reads version {PORTABLE_VERSION}")]
    Version(u32),
    /// Bytes were changed, or the end is missing.
    #[error("it is damaged at byte {at}: {reason}; export the namespace again")]
    Damaged {
        /// Where the damaged part begins.
        at: u64,
        /// The damage.
        reason: &'static str,
    },
}

/// Blocks of a file, and bytes of their payloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Payloads.
    pub(crate) blocks: u64,
    /// Bytes of the payloads.
    pub(crate) bytes: u64,
}

/// Writes a portable file.
#[derive(Debug)]
pub(crate) struct PortableWriter<W> {
    out: W,
    totals: Totals,
}

impl<W: Write> PortableWriter<W> {
    /// Begins a file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn begin(mut out: W, entry: &NamespaceEntry) -> io::Result<Self> {
        let mut header = vec![0; BLOCK_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&PORTABLE_VERSION.to_le_bytes());
        out.write_all(&header)?;
        let encoded = entry.encode().ok_or(io::ErrorKind::InvalidData)?;
        let mut place = vec![0; ENTRY_BYTES];
        place[..encoded.len()].copy_from_slice(&encoded);
        out.write_all(&place)?;
        let totals = Totals::default();
        Ok(Self { out, totals })
    }

    /// Adds a block; the payload of a placeholder is empty.
    ///
    /// # Errors
    /// If the block cannot be written.
    pub(crate) fn add(&mut self, record: &Record, payload: &[u8]) -> io::Result<()> {
        let mut bytes = [0; RECORD_BYTES];
        record.encode(&mut bytes);
        self.out.write_all(&bytes)?;
        self.out.write_all(payload)?;
        if record.group != PLACEHOLDER {
            self.totals.blocks += 1;
            self.totals.bytes += payload.len() as u64;
        }
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// If the end cannot be written.
    pub(crate) fn finish(mut self) -> io::Result<(W, Totals)> {
        let mut end = [0; RECORD_BYTES];
        end[..8].copy_from_slice(&END_MAGIC);
        end[8..16].copy_from_slice(&self.totals.blocks.to_le_bytes());
        end[16..24].copy_from_slice(&self.totals.bytes.to_le_bytes());
        let sum = checksum(&end[..END_BODY]);
        end[END_BODY..END_BODY + 8].copy_from_slice(&sum.to_le_bytes());
        self.out.write_all(&end)?;
        self.out.flush()?;
        Ok((self.out, self.totals))
    }
}

/// Reads a portable file from its beginning to its end, and verifies every byte.
#[derive(Debug)]
pub(crate) struct PortableReader<R> {
    from: R,
    at: u64,
    spec: NamespaceSpec,
    totals: Totals,
}

impl<R: Read> PortableReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// If the file has another format, or is damaged.
    pub(crate) fn open(mut from: R) -> Result<Self, PortableError> {
        let mut header = vec![0; BLOCK_BYTES];
        fill(&mut from, &mut header, 0)?;
        if header[..8] != MAGIC {
            return Err(PortableError::NotOurs);
        }
        let version = u32_at(&header, 8);
        if version != PORTABLE_VERSION {
            return Err(PortableError::Version(version));
        }
        let mut entry = vec![0; ENTRY_BYTES];
        let at = BLOCK_BYTES as u64;
        fill(&mut from, &mut entry, at)?;
        let reason = "the description of the namespace has another checksum";
        let entry = NamespaceEntry::decode(&entry).ok_or(PortableError::Damaged { at, reason })?;
        Ok(Self {
            from,
            at: at + ENTRY_BYTES as u64,
            spec: entry.spec,
            totals: Totals::default(),
        })
    }

    /// The namespace.
    pub(crate) fn spec(&self) -> &NamespaceSpec {
        &self.spec
    }

    /// Where the next block begins, in bytes from the start of the file.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// The blocks so far.
    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// The next block; `None` at the end.
    ///
    /// # Errors
    /// If the block is damaged, or the end is missing.
    pub(crate) fn next_block(&mut self) -> Result<Option<(Record, Vec<u8>)>, PortableError> {
        let at = self.at;
        let damaged = |reason| PortableError::Damaged { at, reason };
        let mut bytes = [0; RECORD_BYTES];
        fill(&mut self.from, &mut bytes, at)?;
        if bytes[..8] == END_MAGIC {
            return match self.is_end(&bytes)? {
                true => Ok(None),
                false => Err(damaged("its end counts other blocks than the file has")),
            };
        }
        let record = Record::decode(&bytes).ok_or(damaged("a record has another checksum"))?;
        let group = usize::from(record.group);
        let of_group = self.spec.groups.get(group);
        let expected = match record.group {
            PLACEHOLDER => Some(0),
            _ => of_group.map(|of| of.payload_bytes),
        };
        if expected != Some(record.payload_bytes) {
            return Err(damaged("a block has another size than its namespace says"));
        }
        let mut payload = vec![0; record.payload_bytes as usize];
        fill(&mut self.from, &mut payload, at + RECORD_BYTES as u64)?;
        if record.group != PLACEHOLDER {
            if checksum(&payload) != record.checksum {
                return Err(damaged("a payload has another checksum"));
            }
            self.totals.blocks += 1;
            self.totals.bytes += payload.len() as u64;
        }
        self.at += (RECORD_BYTES + payload.len()) as u64;
        Ok(Some((record, payload)))
    }

    /// Whether the end is sound, and nothing follows.
    fn is_end(&mut self, end: &[u8; RECORD_BYTES]) -> io::Result<bool> {
        let told = Totals {
            blocks: u64_at(end, 8),
            bytes: u64_at(end, 16),
        };
        let is_sound = u64_at(end, END_BODY) == checksum(&end[..END_BODY]) && told == self.totals;
        Ok(is_sound && self.from.read(&mut [0])? == 0)
    }
}

fn fill(from: &mut impl Read, bytes: &mut [u8], at: u64) -> Result<(), PortableError> {
    from.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof if at == 0 => PortableError::NotOurs,
        io::ErrorKind::UnexpectedEof => PortableError::Damaged {
            at,
            reason: "it ends too early",
        },
        _ => PortableError::Io(error),
    })
}

#[cfg(test)]
mod tests {
    use undercroft_contract::key::BlockHash;
    use undercroft_contract::namespace::GroupKind;

    use super::*;

    fn file() -> Vec<u8> {
        let spec = NamespaceSpec::uniform("model", 16, &[(GroupKind::Full, 300)]);
        let entry = NamespaceEntry { instance: 7, spec };
        let mut writer = PortableWriter::begin(Vec::new(), &entry).unwrap();
        let mut parent = None;
        for depth in 1..=3 {
            let payload = vec![depth as u8; 300];
            let hash = BlockHash::new(&[depth as u8; 32]).unwrap();
            let record = Record {
                group: 0,
                hit_class: 0,
                seq: 1,
                instance: 7,
                slot: 0,
                payload_bytes: 300,
                checksum: checksum(&payload),
                depth,
                last: 5,
                written_s: 1_800_000_000,
                hash,
                parent: parent.replace(hash),
            };
            writer.add(&record, &payload).unwrap();
        }
        writer.finish().unwrap().0
    }

    fn read(bytes: &[u8]) -> Result<Totals, PortableError> {
        let mut reader = PortableReader::open(bytes)?;
        while reader.next_block()?.is_some() {}
        Ok(reader.totals())
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let totals = Totals {
            blocks: 3,
            bytes: 900,
        };
        assert_eq!(read(&file()).unwrap(), totals);
    }

    #[test]
    fn a_file_with_a_changed_byte_or_a_cut_is_refused() {
        let whole = file();
        let header = BLOCK_BYTES + ENTRY_BYTES;
        for at in (header..whole.len()).chain([0, 8, BLOCK_BYTES, BLOCK_BYTES + 30]) {
            let mut changed = whole.clone();
            changed[at] ^= 4;
            // Some bytes of the end have no meaning.
            let is_padding = at >= whole.len() - RECORD_BYTES + END_BODY + 8;
            assert!(is_padding || read(&changed).is_err(), "byte {at}");
        }
        for len in (0..whole.len()).step_by(37) {
            assert!(read(&whole[..len]).is_err(), "cut at {len}");
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert!(read(&longer).is_err());
        // One block is missing, and the end alone is sound.
        let mut shorter = whole.clone();
        shorter.drain(header + 2 * (RECORD_BYTES + 300)..header + 3 * (RECORD_BYTES + 300));
        assert!(matches!(read(&shorter), Err(PortableError::Damaged { .. })));
    }

    #[test]
    fn another_version_is_named() {
        let mut other = file();
        other[8] = 2;
        let said = read(&other).unwrap_err().to_string();
        assert!(
            said.contains("version 2") && said.contains("reads version 1"),
            "{said}"
        );
    }
}
