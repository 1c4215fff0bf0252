//! The records of a directory, as they are read when it is opened.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{channel, sync_channel};

use undercroft_contract::format::{BLOCK_BYTES, RECORD_BYTES};
use undercroft_contract::image::{RecordTable, TablePiece};

/// Bytes that are read at a time.
const PIECE: usize = 64 * BLOCK_BYTES;
/// Pieces that are decoded ahead.
const PIECES_AHEAD: usize = 2;

/// A `table` file.
#[derive(Debug)]
pub(super) struct TableFile(pub(super) File);

impl RecordTable for TableFile {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_block(&self, at: u64, block: &mut [u8; BLOCK_BYTES]) -> io::Result<()> {
        self.0.read_exact_at(block, at)
    }

    /// Reads and decodes in another thread, while `each` runs.
    fn read(&self, each: &mut dyn FnMut(&TablePiece)) {
        std::thread::scope(|scope| {
            let (to_caller, pieces) = sync_channel::<TablePiece>(PIECES_AHEAD);
            let (to_reader, spare) = channel::<TablePiece>();
            let reader = std::thread::Builder::new().name("undercroft-table".into());
            let reader = reader.spawn_scoped(scope, move || {
                let empty = || spare.try_recv().unwrap_or_default();
                self.decode(empty, |piece| to_caller.send(piece).is_ok());
            });
            if reader.is_err() {
                // Takes one piece after the other.
                let take = |piece| {
                    each(&piece);
                    true
                };
                self.decode(TablePiece::default, take);
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
}

impl TableFile {
    /// Calls `take` with the pieces of the file until `take` returns false. `empty` returns the pieces to fill.
    fn decode(&self, empty: impl Fn() -> TablePiece, mut take: impl FnMut(TablePiece) -> bool) {
        let len = self.bytes().unwrap_or(0);
        let mut bytes = vec![0; PIECE];
        for at in (0..len).step_by(PIECE) {
            // At most the length of a piece.
            let wanted = (len - at).min(PIECE as u64) as usize;
            let mut piece = empty();
            match self.0.read_exact_at(&mut bytes[..wanted], at) {
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
}
