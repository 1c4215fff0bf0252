//! One directory on a device that keeps, loses, tears and corrupts the bytes written to it.

use undercroft_core::disk::DeviceImage;
use undercroft_core::disk::format::Superblock;
use undercroft_core::io::FileKind;

use crate::content::{SECTOR, Token, sectors};
use crate::random::Random;

/// Most writes of a device that are not synced.
const UNSYNCED_MAX: usize = 256;

/// Contents of the three files.
#[derive(Debug)]
struct Files {
    data: Vec<Token>,
    table: Vec<u8>,
    super_file: Vec<u8>,
}

/// One write, of whole sectors.
#[derive(Clone, Debug)]
pub(crate) enum Write {
    Data {
        offset: u64,
        tokens: Vec<Token>,
    },
    Meta {
        file: FileKind,
        offset: u64,
        bytes: Box<[u8]>,
    },
}

/// The part of a write that takes place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Persisted {
    Whole,
    Nothing,
    /// Any subset of its sectors.
    Torn,
}

impl Write {
    fn file(&self) -> FileKind {
        match self {
            Self::Data { .. } => FileKind::Data,
            Self::Meta { file, .. } => *file,
        }
    }
}

impl Clone for Files {
    fn clone(&self) -> Self {
        Self {
            data: self.data.clone(),
            table: self.table.clone(),
            super_file: self.super_file.clone(),
        }
    }

    /// Reuses the memory. A derived implementation would allocate.
    fn clone_from(&mut self, from: &Self) {
        self.data.clone_from(&from.data);
        self.table.clone_from(&from.table);
        self.super_file.clone_from(&from.super_file);
    }
}

impl Files {
    fn apply(&mut self, write: &Write, extent: Persisted, random: &mut Random) {
        let mut lands = |_| match extent {
            Persisted::Whole => true,
            Persisted::Nothing => false,
            Persisted::Torn => random.chance(500),
        };
        match write {
            Write::Data { offset, tokens } => {
                let first = (offset / SECTOR) as usize;
                for (at, &token) in (first..).zip(tokens) {
                    if lands(at) {
                        self.data[at] = token;
                    }
                }
            }
            Write::Meta {
                file,
                offset,
                bytes,
            } => {
                let target = match file {
                    FileKind::Super => &mut self.super_file,
                    _ => &mut self.table,
                };
                let end = *offset as usize + bytes.len();
                if target.len() < end {
                    target.resize(end, 0);
                }
                let target = &mut target[*offset as usize..end];
                let sectors = target.chunks_mut(SECTOR as usize);
                for (at, (to, from)) in sectors.zip(bytes.chunks(SECTOR as usize)).enumerate() {
                    if lands(at) {
                        to.copy_from_slice(from);
                    }
                }
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct SimDevice {
    pub(crate) capacity: u64,
    pub(crate) page_bytes: u64,
    now: Files,
    /// The files after a loss of power, before the writes that were not synced.
    stable: Files,
    unsynced: Vec<Write>,
}

impl SimDevice {
    pub(crate) fn new((capacity, page_bytes): (u64, u64), encrypted: bool) -> Self {
        let superblock = Superblock {
            store_id: 7,
            page_bytes,
            encrypted,
        };
        let files = Files {
            data: vec![0; sectors(capacity)],
            table: Vec::new(),
            super_file: superblock.encode().into(),
        };
        Self {
            capacity,
            page_bytes,
            stable: files.clone(),
            now: files,
            unsynced: Vec::new(),
        }
    }

    /// The image that opening the directory reads.
    pub(crate) fn image(&self) -> DeviceImage {
        DeviceImage {
            capacity: self.capacity,
            page_bytes: self.page_bytes,
            super_bytes: self.now.super_file.clone(),
            table: self.now.table.clone().into(),
        }
    }

    /// Changes the capacity, as an operator changes `disk_capacity` while the store is closed.
    pub(crate) fn resize(&mut self, capacity: u64) {
        self.capacity = capacity;
        self.now.data.resize(sectors(capacity), 0);
        self.stable = self.now.clone();
        self.unsynced.clear();
    }

    pub(crate) fn at(&self, offset: u64, len: u64) -> &[Token] {
        let from = (offset / SECTOR) as usize;
        &self.now.data[from..from + sectors(len)]
    }

    /// Flips a bit of a payload durably.
    pub(crate) fn corrupt(&mut self, offset: u64, len: u64, random: &mut Random) {
        let at = (offset / SECTOR) as usize + random.index(sectors(len));
        self.now.data[at] ^= 1 << random.below(64);
        self.stable.data[at] = self.now.data[at];
    }

    /// The table, to change it durably while the store is closed.
    pub(crate) fn table_mut(&mut self) -> &mut Vec<u8> {
        self.stable.clone_from(&self.now);
        self.unsynced.clear();
        &mut self.now.table
    }

    /// Flips a bit of the table durably.
    pub(crate) fn corrupt_table(&mut self, random: &mut Random) {
        let len = self.now.table.len();
        if len > 0 {
            self.now.table[random.index(len)] ^= 1 << random.below(8);
        }
    }

    /// Carries out the part `extent` of a write.
    pub(crate) fn write(&mut self, write: Write, extent: Persisted, random: &mut Random) {
        self.now.apply(&write, extent, random);
        if extent == Persisted::Nothing {
            return;
        }
        self.unsynced.push(write);
        if self.unsynced.len() > UNSYNCED_MAX {
            for write in self.unsynced.drain(..UNSYNCED_MAX / 2) {
                self.stable.apply(&write, Persisted::Whole, random);
            }
        }
    }

    /// All writes to a file so far are durable.
    pub(crate) fn sync(&mut self, file: FileKind, random: &mut Random) {
        for write in &self.unsynced {
            if write.file() == file {
                self.stable.apply(write, Persisted::Whole, random);
            }
        }
        self.unsynced.retain(|write| write.file() != file);
    }

    /// The process ends, and perhaps the power goes: any write that was not synced may be gone.
    pub(crate) fn crash(&mut self, power_loss: bool, random: &mut Random) {
        if power_loss {
            for write in &self.unsynced {
                let extent = match random.below(10) {
                    0 | 1 => Persisted::Nothing,
                    2 => Persisted::Torn,
                    _ => Persisted::Whole,
                };
                self.stable.apply(write, extent, random);
            }
            self.now.clone_from(&self.stable);
        } else {
            self.stable.clone_from(&self.now);
        }
        self.unsynced.clear();
    }
}
