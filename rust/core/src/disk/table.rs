//! The records of a directory, as they are read when it is opened: in pieces, since they may take gigabytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::format::{BLOCK_BYTES, RECORD_BYTES};

/// Bytes that are read at a time.
const PIECE: usize = 256 * BLOCK_BYTES;
/// Blocks that tell about how many records are in use.
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
    /// Its length in bytes.
    ///
    /// # Errors
    /// If the filesystem does not tell.
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
                // Within the table.
                Self::Bytes(bytes) => bytes.get(at as usize..at as usize + BLOCK_BYTES),
                Self::File(file) => file.read_exact_at(&mut block, at).ok().map(|()| &block[..]),
            };
            let records = found.unwrap_or_default().chunks_exact(RECORD_BYTES);
            used += records.filter(|record| record[0] != 0).count();
        }
        // Fewer than 2^32 records.
        used * blocks as usize / looked_at.max(1) as usize
    }

    /// Calls `each` with one piece after the other: whole records, but for the end of a table that was cut off.
    /// Returns how many bytes could not be read.
    pub(crate) fn read(&self, mut each: impl FnMut(&[u8])) -> u64 {
        match self {
            Self::Bytes(bytes) => {
                each(bytes);
                0
            }
            Self::File(file) => read_file(file, each),
        }
    }
}

fn read_file(file: &File, mut each: impl FnMut(&[u8])) -> u64 {
    let Ok(len) = file.metadata().map(|metadata| metadata.len()) else {
        return 0;
    };
    let mut piece = vec![0; PIECE];
    let (mut at, mut unread) = (0, 0);
    while at < len {
        // At most a piece.
        let wanted = (len - at).min(PIECE as u64) as usize;
        match file.read_exact_at(&mut piece[..wanted], at) {
            Ok(()) => each(&piece[..wanted]),
            Err(_) => {
                // Others may be readable. These keep their numbers.
                piece[..wanted].fill(0);
                each(&piece[..wanted]);
                unread += wanted as u64;
            }
        }
        at += wanted as u64;
    }
    unread
}
