//! The records of a directory, as they are read when it is opened: in pieces, since they may take gigabytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{channel, sync_channel};

use super::format::{BLOCK_BYTES, RECORD_BYTES, Record};

/// Bytes that are read at a time.
const PIECE: usize = 64 * BLOCK_BYTES;
/// Pieces that are decoded ahead.
const PIECES_AHEAD: usize = 2;
/// Blocks by which the number of records in use is estimated.
const SAMPLE: u64 = 64;

/// A `table` file.
#[derive(Debug)]
pub enum Table {
    /// In memory: for tests.
    Bytes(Vec<u8>),
    /// In a filesystem.
    File(File),
}

impl From<Vec<u8>> for Table {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl Table {
    /// Length of the table in bytes.
    ///
    /// # Errors
    /// If the length of the file cannot be read.
    pub fn bytes(&self) -> io::Result<u64> {
        match self {
            Self::Bytes(bytes) => Ok(bytes.len() as u64),
            Self::File(file) => Ok(file.metadata()?.len()),
        }
    }

    /// Estimates the number of records in use from some blocks of the table.
    pub(crate) fn estimate(&self) -> usize {
        let blocks = self.bytes().unwrap_or(0) / BLOCK_BYTES as u64;
        let looked_at = blocks.min(SAMPLE);
        let mut used = 0;
        let mut block = vec![0; BLOCK_BYTES];
        for sample in 0..looked_at {
            let at = sample * blocks / looked_at * BLOCK_BYTES as u64;
            let found = match self {
                // `at` lies within the table.
                Self::Bytes(bytes) => bytes.get(at as usize..at as usize + BLOCK_BYTES),
                Self::File(file) => file.read_exact_at(&mut block, at).ok().map(|()| &block[..]),
            };
            let records = found.unwrap_or_default().chunks_exact(RECORD_BYTES);
            used += records.filter(|record| record[0] != 0).count();
        }
        // A table has fewer than 2^32 records.
        used * blocks as usize / looked_at.max(1) as usize
    }

    /// Calls `each` with the pieces, one after the other.
    pub(crate) fn read(&self, mut each: impl FnMut(&TablePiece)) {
        match self {
            Self::Bytes(bytes) => {
                let mut piece = TablePiece::default();
                piece.decode(bytes, 0);
                each(&piece);
            }
            Self::File(file) => read_file(file, each),
        }
    }
}

/// The records of a part of a table.
#[derive(Debug, Default)]
pub(crate) struct TablePiece {
    /// Sound records, with their numbers.
    pub(crate) records: Vec<(u32, Record)>,
    /// Records that are damaged, or could not be read.
    pub(crate) damaged: u64,
}

impl TablePiece {
    /// Decodes whole records from number `first` on. A table that was cut off may end with a part of a record.
    fn decode(&mut self, bytes: &[u8], first: u32) {
        for (index, bytes) in (first..).zip(bytes.chunks_exact(RECORD_BYTES)) {
            match Record::decode(bytes) {
                Some(record) => self.records.push((index, record)),
                None => self.damaged += u64::from(!Record::is_blank(bytes)),
            }
        }
    }
}

/// Reads and decodes in another thread, while `each` runs.
fn read_file(file: &File, mut each: impl FnMut(&TablePiece)) {
    std::thread::scope(|scope| {
        let (to_caller, pieces) = sync_channel::<TablePiece>(PIECES_AHEAD);
        let (to_reader, spare) = channel::<TablePiece>();
        let reader = std::thread::Builder::new().name("undercroft-table".into());
        let reader = reader.spawn_scoped(scope, move || {
            let empty = || spare.try_recv().unwrap_or_default();
            decode_file(file, empty, |piece| to_caller.send(piece).is_ok());
        });
        if reader.is_err() {
            // Takes one piece after the other.
            let take = |piece| {
                each(&piece);
                true
            };
            decode_file(file, TablePiece::default, take);
            return;
        }
        for mut piece in pieces {
            each(&piece);
            piece.records.clear();
            piece.damaged = 0;
            // The send fails if the reader has ended.
            let _ = to_reader.send(piece);
        }
    });
}

/// Calls `take` with the pieces of a file until `take` returns false. `empty` returns the pieces to fill.
fn decode_file(
    file: &File,
    empty: impl Fn() -> TablePiece,
    mut take: impl FnMut(TablePiece) -> bool,
) {
    let len = file.metadata().map_or(0, |metadata| metadata.len());
    let mut bytes = vec![0; PIECE];
    for at in (0..len).step_by(PIECE) {
        // At most the length of a piece.
        let wanted = (len - at).min(PIECE as u64) as usize;
        let mut piece = empty();
        match file.read_exact_at(&mut bytes[..wanted], at) {
            Ok(()) => {
                let first = u32::try_from(at / RECORD_BYTES as u64);
                let first = first.expect("a table has fewer than 2^32 records");
                piece.decode(&bytes[..wanted], first);
            }
            // Other pieces may be readable.
            Err(_) => piece.damaged = (wanted / RECORD_BYTES) as u64,
        }
        if !take(piece) {
            return;
        }
    }
}
