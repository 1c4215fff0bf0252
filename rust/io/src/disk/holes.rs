//! Space for the holes of a data file: pages that a resize has returned, a copy that was made sparse, a filesystem that
//! allocates only where bytes are written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

/// Bytes of the filesystem that a file takes.
pub(super) fn space_of(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.blocks() * 512)
}

/// Allocates space for the holes of the first `len` bytes of a file, no more than `budget` bytes beyond the space that
/// the file takes already. Returns the ranges, in whole units, that stay without space: their bytes are lost.
///
/// `unit` and `page` are the bytes of the smallest and the largest pages of slots.
pub(super) fn fill_holes(
    file: &File,
    len: u64,
    (unit, page): (u64, u64),
    budget: u64,
) -> io::Result<Vec<Range<u64>>> {
    let before = space_of(file)?;
    let holes = holes_of(file, len)?;
    // Some filesystems show space that was allocated and never written as a hole. This space becomes free, to be
    // allocated again below.
    for hole in &holes {
        free(file, hole);
    }
    let mut left = budget.saturating_add(before.saturating_sub(space_of(file)?));
    let mut blocks: Vec<Range<u64>> = holes
        .into_iter()
        .flat_map(|hole| aligned_blocks(hole, page))
        .collect();
    // Small blocks complete pages that hold payloads: most pages have an end that no slot reaches.
    blocks.sort_by_key(bytes_in);
    let mut lost: Vec<Range<u64>> = Vec::new();
    for block in blocks {
        let needed = bytes_in(&block);
        if needed <= left && allocate(file, &block)? {
            left -= needed;
            continue;
        }
        // No larger block fits into the rest. Perhaps others take space meanwhile.
        left = 0;
        lost.push(block.start / unit * unit..block.end.next_multiple_of(unit).min(len));
    }
    lost.sort_unstable_by_key(|run| run.start);
    lost.dedup_by(|next, run| {
        let joins = next.start <= run.end;
        if joins {
            run.end = run.end.max(next.end);
        }
        joins
    });
    for run in &lost {
        free(file, run);
    }
    Ok(lost)
}

/// Cuts a hole into blocks of powers of two, at multiples of their sizes, of at most `most` bytes.
fn aligned_blocks(hole: Range<u64>, most: u64) -> Vec<Range<u64>> {
    let (mut blocks, mut at) = (Vec::new(), hole.start);
    while at < hole.end {
        let aligned = most.min(1 << at.trailing_zeros().min(62));
        let fits = 1 << (hole.end - at).ilog2();
        let end = at + aligned.min(fits);
        blocks.push(at..end);
        at = end;
    }
    blocks
}

fn bytes_in(range: &Range<u64>) -> u64 {
    range.end - range.start
}

/// The holes of the first `len` bytes of a file. A filesystem that does not know them shows none.
fn holes_of(file: &File, len: u64) -> io::Result<Vec<Range<u64>>> {
    let mut holes = Vec::new();
    let mut at = 0;
    while at < len {
        let start = match seek(file, SeekFrom::Hole(at)) {
            Ok(start) => start,
            Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => break,
            Err(errno) => return Err(errno.into()),
        };
        if start >= len {
            break;
        }
        // Behind the last byte that was written, there is only a hole.
        at = match seek(file, SeekFrom::Data(start)) {
            Ok(end) => end.min(len),
            Err(Errno::NXIO) => len,
            Err(errno) => return Err(errno.into()),
        };
        holes.push(start..at);
    }
    Ok(holes)
}

/// Returns the space of a range to the filesystem, if the filesystem can do so.
fn free(file: &File, range: &Range<u64>) {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // Without this the range keeps its space, which only costs the filesystem.
    let _ = fallocate(file, mode, range.start, bytes_in(range));
}

/// Allocates space for a range. False, and the range has none, if the filesystem has too little.
fn allocate(file: &File, range: &Range<u64>) -> io::Result<bool> {
    match fallocate(
        file,
        FallocateFlags::KEEP_SIZE,
        range.start,
        bytes_in(range),
    ) {
        // Where space cannot be allocated, it is taken when bytes are written.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(true),
        Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
            free(file, range);
            Ok(false)
        }
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    reason = "a list may have a single range"
)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const UNIT: u64 = 64 << 10;
    const LEN: u64 = 16 * UNIT;

    /// A file of 16 units with bytes in some of its blocks of 4 KiB, and its holes.
    fn file(written: &[Range<u64>]) -> File {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.set_len(LEN).unwrap();
        for run in written {
            let bytes = vec![1; bytes_in(run) as usize];
            file.write_all_at(&bytes, run.start).unwrap();
        }
        file.sync_all().unwrap();
        file
    }

    const PAGE: u64 = 4 * UNIT;

    fn joined(mut runs: Vec<Range<u64>>) -> Vec<Range<u64>> {
        runs.dedup_by(|next, run| {
            let joins = next.start == run.end;
            run.end = if joins { next.end } else { run.end };
            joins
        });
        runs
    }

    #[test]
    fn the_pages_that_need_the_least_space_get_it_first_and_no_byte_more_is_taken() {
        // The first page lacks a block of 4 KiB, the third lacks a unit, and the others lack all.
        let written = [0..PAGE - 4096, 2 * PAGE..3 * PAGE - UNIT];
        let lacking = |first: Range<u64>| vec![first, PAGE..2 * PAGE, 3 * PAGE - UNIT..LEN];
        for (budget, lost) in [
            (0, lacking(PAGE - UNIT..PAGE)),
            (4096, vec![PAGE..2 * PAGE, 3 * PAGE - UNIT..LEN]),
            (4096 + UNIT, vec![PAGE..2 * PAGE, 3 * PAGE..LEN]),
            (4096 + UNIT + PAGE, vec![3 * PAGE..LEN]),
            (LEN, vec![]),
        ] {
            let file = file(&written);
            let before = space_of(&file).unwrap();
            let found = fill_holes(&file, LEN, (UNIT, PAGE), budget).unwrap();
            assert_eq!(joined(found), joined(lost.clone()), "budget {budget}");
            let after = space_of(&file).unwrap();
            // A filesystem may count a block of its own for a file in many pieces.
            assert!(
                after <= before + budget + 4096,
                "{before} + {budget}: {after}"
            );
            let lost: u64 = lost.iter().map(bytes_in).sum();
            assert!(after >= LEN - lost, "{after} of {LEN} without {lost}");
        }
    }

    #[test]
    fn space_that_was_never_written_counts_as_space() {
        let file = file(&[0..UNIT]);
        fallocate(&file, FallocateFlags::empty(), 0, 4 * UNIT).unwrap();
        let before = space_of(&file).unwrap();
        let lost = fill_holes(&file, LEN, (UNIT, PAGE), 0).unwrap();
        assert_eq!(lost, [4 * UNIT..LEN]);
        assert!(space_of(&file).unwrap() <= before);
        let mut bytes = vec![0; UNIT as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 1), "bytes are kept");
    }
}
