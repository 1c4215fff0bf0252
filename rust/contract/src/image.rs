//! The contents of a disk directory, as they were when it was opened. Whoever opens the directory reads them; the engine
//! takes them over.

use std::fmt::Debug;
use std::io;
use std::ops::Range;

use crate::format::{BLOCK_BYTES, RECORD_BYTES, Record, Superblock};
use crate::pages::PAGE_BYTES_MAX;

/// Blocks by which the number of records in use is estimated.
const SAMPLE: u64 = 64;

/// Contents of a directory, as read when it was opened.
#[derive(Debug)]
pub struct DeviceImage {
    /// Bytes of the data file that may be used.
    pub capacity: u64,
    /// Page size of the data file.
    pub page_bytes: u64,
    /// Ranges of the data file without space, which are not used.
    pub holes: Vec<Range<u64>>,
    /// The `super` file.
    pub super_bytes: Vec<u8>,
    /// The `table` file.
    pub table: Box<dyn RecordTable>,
}

impl DeviceImage {
    /// The image of a directory that could not be opened yet.
    pub fn absent() -> Self {
        Self {
            capacity: 0,
            page_bytes: PAGE_BYTES_MAX,
            holes: Vec::new(),
            super_bytes: Vec::new(),
            table: Vec::new().into(),
        }
    }

    /// The id of the store, if its payloads are encrypted.
    pub fn encrypted_store(&self) -> Option<u64> {
        let superblock = Superblock::decode(&self.super_bytes).ok()?;
        superblock.encrypted.then_some(superblock.store_id)
    }
}

/// The records of a directory, as they are read when it is opened: in pieces, since they may take gigabytes.
pub trait RecordTable: Debug + Send {
    /// Length of the table in bytes.
    ///
    /// # Errors
    /// If the length of the file cannot be read.
    fn bytes(&self) -> io::Result<u64>;

    /// Reads a block that begins `at` bytes behind the start.
    ///
    /// # Errors
    /// If the table ends before the end of the block, or the file cannot be read.
    fn read_block(&self, at: u64, block: &mut [u8; BLOCK_BYTES]) -> io::Result<()>;

    /// Calls `each` with the pieces, one after the other.
    fn read(&self, each: &mut dyn FnMut(&TablePiece));

    /// Estimates the number of records in use from some blocks of the table.
    fn estimate(&self) -> usize {
        let blocks = self.bytes().unwrap_or(0) / BLOCK_BYTES as u64;
        let looked_at = blocks.min(SAMPLE);
        let mut used = 0;
        let mut block = [0; BLOCK_BYTES];
        for sample in 0..looked_at {
            let at = sample * blocks / looked_at * BLOCK_BYTES as u64;
            if self.read_block(at, &mut block).is_ok() {
                let records = block.chunks_exact(RECORD_BYTES);
                used += records.filter(|record| record[0] != 0).count();
            }
        }
        // A table has fewer than 2^32 records.
        used * blocks as usize / looked_at.max(1) as usize
    }
}

/// A table in memory.
impl RecordTable for Vec<u8> {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_block(&self, at: u64, block: &mut [u8; BLOCK_BYTES]) -> io::Result<()> {
        // Whoever asks has the table's length.
        let at = at as usize;
        let found = self.get(at..at + BLOCK_BYTES);
        block.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn read(&self, each: &mut dyn FnMut(&TablePiece)) {
        let mut piece = TablePiece::default();
        piece.decode(self, 0);
        each(&piece);
    }
}

impl From<Vec<u8>> for Box<dyn RecordTable> {
    fn from(bytes: Vec<u8>) -> Self {
        Box::new(bytes)
    }
}

/// The records of a part of a table.
#[derive(Debug, Default)]
pub struct TablePiece {
    /// Sound records, with their numbers.
    pub records: Vec<(u32, Record)>,
    /// Records that are damaged, or could not be read.
    pub damaged: u64,
}

impl TablePiece {
    /// Decodes whole records from number `first` on. A table that was cut off may end with a part of a record.
    pub fn decode(&mut self, bytes: &[u8], first: u32) {
        for (index, bytes) in (first..).zip(bytes.chunks_exact(RECORD_BYTES)) {
            match Record::decode(bytes) {
                Some(record) => self.records.push((index, record)),
                None => self.damaged += u64::from(!Record::is_blank(bytes)),
            }
        }
    }
}
