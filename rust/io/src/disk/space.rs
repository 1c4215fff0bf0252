//! The size of a store, by the configured capacity, the space of its filesystem, and the payloads that the store
//! already holds.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use undercroft_contract::pages::{CAPACITY_MIN, capacity_for, data_of, page_bytes_for};
use undercroft_contract::size::Bytes;

use crate::disk::StoreError;

use super::names::{DATA, SUPER, TABLE};

/// Pages that are this many times too large for the capacity are made smaller: a data file needs several pages.
const PAGES_TOO_LARGE: u64 = 4;

/// The most bytes that all files of a directory may hold together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Capacity {
    /// This many bytes.
    Bytes(u64),
    /// A part of the space that is free or that the store takes, split among `ways` directories of the filesystem.
    Share {
        /// Above 0, at most 1.
        share: f64,
        /// At least 1.
        ways: u32,
    },
}

/// The space of a filesystem, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filesystem {
    /// Size of the filesystem.
    total: u64,
    /// The bytes that this process may use.
    free: u64,
    /// The bytes that stay free.
    reserve: u64,
}

impl Filesystem {
    /// The space of the filesystem of a path that exists.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let found = rustix::fs::statvfs(path)?;
        let total = found.f_blocks * found.f_frsize;
        Ok(Self {
            total,
            free: found.f_bavail * found.f_frsize,
            reserve: (total / 20).min(4 << 30),
        })
    }

    /// The bytes that a store may take without the reserve.
    pub(super) fn available(self) -> u64 {
        self.free.saturating_sub(self.reserve)
    }
}

/// The space that the files of a store take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeptFiles {
    /// Length of the data file.
    data_len: u64,
    /// Bytes that the data file takes of the filesystem: fewer than its length if it has holes.
    data_space: u64,
    /// Bytes that all files take of the filesystem.
    all: u64,
    page_bytes: u64,
    /// The store has no records: nothing depends on the size of its pages.
    is_empty: bool,
}

impl KeptFiles {
    /// Measures a store that is kept, whose pages have `page_bytes`.
    pub(super) fn of(path: &Path, page_bytes: u64) -> io::Result<Self> {
        let [superblock, table, data] = [SUPER, TABLE, DATA].map(|name| path.join(name));
        let (superblock, table, data) = (
            fs::symlink_metadata(superblock)?,
            fs::symlink_metadata(table)?,
            fs::symlink_metadata(data)?,
        );
        Ok(Self {
            data_len: data.len(),
            data_space: data.blocks() * 512,
            all: (superblock.blocks() + table.blocks() + data.blocks()) * 512,
            page_bytes,
            is_empty: table.len() == 0,
        })
    }

    /// Files that are deleted before a new store is made.
    pub(super) fn discarded(bytes: u64) -> Self {
        Self {
            all: bytes,
            is_empty: true,
            ..Self::default()
        }
    }
}

/// The size of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sizing {
    /// Bytes of the data file: whole pages.
    pub(super) data_bytes: u64,
    pub(super) page_bytes: u64,
    /// Bytes of a kept data file that have no space, about: holes for which too little is free.
    pub(super) lost: u64,
    /// A note about the size, for the operator.
    pub(super) note: Option<String>,
}

/// The size of a store at `path`. Payloads that the store holds are never refused. With a share, a store that is kept
/// keeps its size unless space is short.
///
/// # Errors
/// If a new store has no room, or the capacity is impossible.
pub(super) fn size(
    path: &Path,
    capacity: Capacity,
    held: KeptFiles,
    filesystem: Filesystem,
) -> Result<Sizing, StoreError> {
    let Filesystem {
        total,
        free,
        reserve,
    } = filesystem;
    let space = free.saturating_add(held.all);
    let available = space.saturating_sub(reserve);
    let kept = match held.data_len {
        0 => 0,
        data_len => capacity_for(data_len),
    };
    let wanted = match capacity {
        Capacity::Bytes(bytes) => bytes,
        Capacity::Share { share, ways } => {
            // A share of a disk needs no more digits than a double has.
            let part = (space as f64 * share) as u64 / u64::from(ways.max(1));
            part.max(kept).min(available)
        }
    };
    let is_share = matches!(capacity, Capacity::Share { .. });
    if kept == 0 {
        check_new(path, wanted, is_share, available, filesystem)?;
    } else if !is_share && wanted < CAPACITY_MIN {
        return Err(too_small(path, wanted));
    }
    let grows = kept > 0 && cut(data_of(wanted), held.page_bytes) > held.data_len;
    let capacity = if grows {
        wanted.min(available.max(kept))
    } else {
        wanted.max(CAPACITY_MIN)
    };
    let page_bytes = page_bytes(data_of(capacity), held);
    let data_bytes = cut(data_of(capacity), page_bytes);
    let missing = data_bytes
        .min(held.data_len)
        .saturating_sub(held.data_space);
    let lost = missing.saturating_sub(filesystem.available());
    let path = path.display();
    let note = if grows && capacity < wanted {
        Some(format!(
            "disk_capacity {} for {path} does not fit now: {} are used ({} of {} are free)",
            Bytes(wanted),
            Bytes(capacity),
            Bytes(free),
            Bytes(total)
        ))
    } else if data_bytes < cut(held.data_len, page_bytes) {
        Some(format!(
            "disk_path {path} shrinks from {} to {}: blocks beyond that are dropped ({} of {} are free)",
            Bytes(kept),
            Bytes(capacity),
            Bytes(free),
            Bytes(total)
        ))
    } else {
        None
    };
    Ok(Sizing {
        data_bytes,
        page_bytes,
        lost,
        note,
    })
}

/// Tells the operator that `lost` bytes of a data file of `data_bytes` have no space.
pub(super) fn short_of_space(path: &Path, lost: u64, data_bytes: u64) -> String {
    format!(
        "disk_path {}: {} of {} are used until the next start, because the filesystem has no space for the rest; free \
         space there, or lower disk_capacity",
        path.display(),
        Bytes(capacity_for(data_bytes - lost)),
        Bytes(capacity_for(data_bytes)),
    )
}

/// Whether a new store of `wanted` bytes has room.
fn check_new(
    path: &Path,
    wanted: u64,
    is_share: bool,
    available: u64,
    filesystem: Filesystem,
) -> Result<(), StoreError> {
    let Filesystem {
        total,
        free,
        reserve,
    } = filesystem;
    let path = path.to_owned();
    // Mistakes in the option come first: free space would not help there.
    if !is_share && wanted < CAPACITY_MIN {
        Err(too_small(&path, wanted))
    } else if !is_share && wanted > total {
        Err(StoreError::TooLarge {
            path,
            capacity: wanted,
            total,
            available,
        })
    } else if available < CAPACITY_MIN {
        Err(StoreError::Full {
            path,
            free,
            total,
            reserve,
        })
    } else if wanted < CAPACITY_MIN {
        Err(too_small(&path, wanted))
    } else if wanted > available {
        Err(StoreError::NoSpace {
            path,
            capacity: wanted,
            available,
            reserve,
        })
    } else {
        Ok(())
    }
}

fn too_small(path: &Path, capacity: u64) -> StoreError {
    StoreError::TooSmall {
        path: path.to_owned(),
        capacity,
        minimum: CAPACITY_MIN,
    }
}

/// The size of the pages. The capacity decides it, except in a store with records, which keeps its pages.
fn page_bytes(data_bytes: u64, held: KeptFiles) -> u64 {
    let wanted = page_bytes_for(data_bytes);
    let do_pages_fit = wanted <= held.page_bytes && held.page_bytes < wanted * PAGES_TOO_LARGE;
    if held.is_empty || !do_pages_fit {
        wanted
    } else {
        held.page_bytes
    }
}

/// Rounds down to whole pages.
fn cut(bytes: u64, page_bytes: u64) -> u64 {
    bytes / page_bytes.max(1) * page_bytes.max(1)
}

#[cfg(test)]
mod tests {
    use undercroft_contract::pages::{CAPACITY_MAX, PAGE_BYTES_MAX};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn filesystem(free: u64) -> Filesystem {
        Filesystem {
            total: 100 * GIB,
            free,
            reserve: 4 * GIB,
        }
    }

    fn held(capacity: u64) -> KeptFiles {
        let page_bytes = page_bytes_for(data_of(capacity));
        let data_len = cut(data_of(capacity), page_bytes);
        KeptFiles {
            data_len,
            data_space: data_len,
            all: data_len,
            page_bytes,
            is_empty: false,
        }
    }

    fn sized(capacity: Capacity, held: KeptFiles, free: u64) -> Result<Sizing, StoreError> {
        size(Path::new("/d"), capacity, held, filesystem(free))
    }

    fn share(share: f64) -> Capacity {
        Capacity::Share { share, ways: 1 }
    }

    #[test]
    fn a_kept_store_needs_no_free_space() {
        let kept = held(10 * GIB);
        for free in [0, GIB, 50 * GIB] {
            let found = sized(Capacity::Bytes(10 * GIB), kept, free).unwrap();
            assert_eq!((found.data_bytes, found.note), (kept.data_len, None));
        }
        // A growing store takes the space that is free.
        let found = sized(Capacity::Bytes(20 * GIB), kept, GIB).unwrap();
        assert_eq!(found.data_bytes, kept.data_len);
        assert!(found.note.unwrap().contains("does not fit now"));
        let found = sized(Capacity::Bytes(20 * GIB), kept, 9 * GIB).unwrap();
        assert!(found.data_bytes > kept.data_len && found.data_bytes < 15 * GIB);
    }

    #[test]
    fn a_share_keeps_the_size_of_a_store_unless_space_is_short() {
        let new = sized(share(0.5), KeptFiles::default(), 40 * GIB).unwrap();
        assert!(new.data_bytes > 19 * GIB && new.data_bytes < 20 * GIB);
        let kept = held(20 * GIB);
        // Another user of the filesystem took half of the free space.
        let found = sized(share(0.5), kept, 10 * GIB).unwrap();
        assert_eq!((found.data_bytes, found.note), (kept.data_len, None));
        // Another user has taken the reserve: the store shrinks by the reserve only.
        let found = sized(share(0.5), kept, GIB).unwrap();
        assert!(
            found.data_bytes < 17 * GIB && found.data_bytes > 15 * GIB,
            "{found:?}"
        );
        let note = found.note.unwrap();
        assert!(
            note.contains("shrinks from 19.") && note.contains(" to 16."),
            "{note}"
        );
        // A larger share makes a larger store.
        let found = sized(share(0.9), kept, 20 * GIB).unwrap();
        assert!(found.data_bytes > 30 * GIB && found.note.is_none());
        // No space is left: a small store is better than none.
        let found = sized(share(0.5), held(GIB), 0).unwrap();
        assert!(found.data_bytes > 0);
    }

    #[test]
    fn messages_name_the_number_that_works() {
        let said = |capacity, free| {
            sized(capacity, KeptFiles::default(), free)
                .unwrap_err()
                .to_string()
        };
        let full = said(share(0.5), 4 * GIB);
        assert!(
            full.contains("is full") && full.contains("4 GiB of 100 GiB are free"),
            "{full}"
        );
        let short = said(Capacity::Bytes(7 * GIB), 10 * GIB + 12_345);
        assert!(
            short.contains("only 6 GiB can be used now") && short.contains("7 GiB"),
            "{short}"
        );
        sized(
            Capacity::Bytes(6 * GIB),
            KeptFiles::default(),
            10 * GIB + 12_345,
        )
        .unwrap();
        let impossible = sized(Capacity::Bytes(101 * GIB), KeptFiles::default(), 50 * GIB);
        assert!(!impossible.unwrap_err().may_pass());
        assert!(
            sized(share(0.5), KeptFiles::default(), GIB)
                .unwrap_err()
                .may_pass()
        );
        let small = said(Capacity::Bytes(1 << 20), 50 * GIB);
        assert!(small.contains("at least 16 MiB"), "{small}");
    }

    #[test]
    fn pages_follow_the_capacity() {
        let small = held(64 << 20);
        let grown = sized(Capacity::Bytes(8 * GIB), small, 50 * GIB).unwrap();
        assert_eq!(grown.page_bytes, PAGE_BYTES_MAX);
        let shrunk = sized(Capacity::Bytes(64 << 20), held(8 * GIB), 50 * GIB).unwrap();
        assert_eq!(shrunk.page_bytes, small.page_bytes);
        // With small changes of the capacity, pages keep their size, and slots their places.
        let mut kept = held(4 * GIB);
        kept.page_bytes = 64 << 20;
        let found = sized(Capacity::Bytes(3 * GIB), kept, 50 * GIB).unwrap();
        assert_eq!(found.page_bytes, 64 << 20);
        kept.is_empty = true;
        let found = sized(Capacity::Bytes(3 * GIB), kept, 50 * GIB).unwrap();
        assert_eq!(found.page_bytes, 32 << 20);
    }

    #[test]
    fn the_largest_data_file_is_a_file_here() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.set_len(CAPACITY_MAX).unwrap();
        assert_eq!(data_of(1 << 50), CAPACITY_MAX);
        assert!(CAPACITY_MAX.is_multiple_of(PAGE_BYTES_MAX));
    }
}
