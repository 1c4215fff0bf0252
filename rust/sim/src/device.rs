//! One directory on a device that keeps, loses, tears and corrupts the bytes written to it.

use std::collections::BTreeSet;
use std::ops::Range;

use undercroft_contract::cipher::SEAL_BYTES;
use undercroft_contract::format::{PLACEHOLDER, RECORD_BYTES, Record, Superblock};
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{FileKind, IO_ALIGN};

use crate::content::{SECTOR, Token, sectors};
use crate::random::Random;

/// Most writes of a device that are not synced.
const UNSYNCED_MAX: usize = 256;

/// Bytes of a block of the filesystem.
const BLOCK: u64 = IO_ALIGN;

/// Free blocks where space is never short.
pub(crate) const FREE: u64 = u64::MAX / 2;

/// Bytes of the smallest page, where the largest has `page_bytes`.
fn unit_bytes(page_bytes: u64) -> u64 {
    (page_bytes / 64).max(BLOCK)
}

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
    /// Blocks of the data file that take no space.
    holes: BTreeSet<u64>,
    /// Blocks of the filesystem that nobody uses.
    pub(crate) free: u64,
    /// Ranges of the data file that the last start left without space.
    excluded: Vec<Range<u64>>,
}

impl SimDevice {
    /// An empty store in the directory `at`.
    pub(crate) fn new(at: usize, (capacity, page_bytes): (u64, u64), encrypted: bool) -> Self {
        let superblock = Superblock {
            store_id: at as u64 + 1,
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
            holes: BTreeSet::new(),
            free: FREE,
            excluded: Vec::new(),
        }
    }

    /// Allocates space for holes, as far as space is free, like a start of a store. Where a unit keeps a hole, the
    /// bytes of the unit are gone. Returns whether there is such a unit.
    pub(crate) fn fill_holes(&mut self) -> bool {
        let per_unit = unit_bytes(self.page_bytes) / BLOCK;
        self.excluded.clear();
        for unit in 0..self.capacity / BLOCK / per_unit {
            let blocks = unit * per_unit..(unit + 1) * per_unit;
            let missing = self.holes.range(blocks.clone()).count() as u64;
            if missing <= self.free {
                self.free -= missing;
                for block in blocks {
                    self.holes.remove(&block);
                }
            } else {
                let bytes = blocks.start * BLOCK..blocks.end * BLOCK;
                self.punch(bytes.start, bytes.end - bytes.start);
                self.excluded.push(bytes);
            }
        }
        !self.excluded.is_empty()
    }

    /// Returns the space of a range to the filesystem, durably: its bytes are zeros.
    pub(crate) fn punch(&mut self, offset: u64, len: u64) {
        let sectors = (offset / SECTOR) as usize..((offset + len) / SECTOR) as usize;
        for files in [&mut self.now, &mut self.stable] {
            files.data[sectors.clone()].fill(0);
        }
        for block in offset / BLOCK..(offset + len) / BLOCK {
            self.free += u64::from(self.holes.insert(block));
        }
    }

    /// Takes the space that a write needs. Returns whether there is enough.
    pub(crate) fn take_space(&mut self, offset: u64, len: u64) -> bool {
        let blocks = offset / BLOCK..(offset + len).div_ceil(BLOCK);
        let missing: Vec<u64> = self.holes.range(blocks).copied().collect();
        let fits = missing.len() as u64 <= self.free;
        if fits {
            self.free -= missing.len() as u64;
            for block in missing {
                self.holes.remove(&block);
            }
        }
        fits
    }

    /// Whether the last start left a part of a range without space.
    pub(crate) fn is_excluded(&self, offset: u64, len: u64) -> bool {
        let mut excluded = self.excluded.iter();
        excluded.any(|of| of.start < offset + len && offset < of.end)
    }

    /// The image that a start would read if all that is not durable were lost now.
    pub(crate) fn durable_image(&self) -> DeviceImage {
        DeviceImage {
            super_bytes: self.stable.super_file.clone(),
            table: self.stable.table.clone().into(),
            ..self.image()
        }
    }

    /// The sectors of a range that are durable.
    pub(crate) fn durable_at(&self, offset: u64, len: u64) -> &[Token] {
        let from = (offset / SECTOR) as usize;
        &self.stable.data[from..from + sectors(len)]
    }

    /// Offset and bytes of the payload of each record.
    pub(crate) fn recorded(&self) -> Vec<(u64, u64)> {
        let records = self.now.table.chunks_exact(RECORD_BYTES);
        let records = records.filter_map(Record::decode);
        let payloads = records.filter(|record| record.group != PLACEHOLDER);
        let places = payloads.map(|record| {
            let bytes = u64::from(record.payload_bytes) + SEAL_BYTES as u64;
            (
                u64::from(record.slot) * BLOCK,
                bytes.next_multiple_of(BLOCK),
            )
        });
        places
            .filter(|(offset, bytes)| offset + bytes <= self.capacity)
            .collect()
    }

    /// Exchanges the records and the payloads of two stores, but not their superblocks and namespaces.
    pub(crate) fn exchange_payloads(&mut self, other: &mut Self) {
        for (one, two) in [
            (&mut self.now, &mut other.now),
            (&mut self.stable, &mut other.stable),
        ] {
            std::mem::swap(&mut one.data, &mut two.data);
            std::mem::swap(&mut one.table, &mut two.table);
        }
        std::mem::swap(&mut self.holes, &mut other.holes);
        for of in [self, other] {
            of.unsynced.clear();
        }
    }

    /// The image that opening the directory reads.
    pub(crate) fn image(&self) -> DeviceImage {
        DeviceImage {
            capacity: self.capacity,
            page_bytes: self.page_bytes,
            holes: self.excluded.clone(),
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
        self.holes.retain(|block| block * BLOCK < capacity);
        self.excluded.clear();
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
