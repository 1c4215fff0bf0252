//! Calls that move no bytes: erasures and syncs.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;
use undercroft_contract::io::{FileKind, IoRequest};
use undercroft_io::arena::Arena;
use undercroft_io::fault::Script;
use undercroft_io::fault_hook::{CallKind, Verdict};

use crate::rig::{DEPTH, Open, Rig, UNIT, device_in, meta, os, pattern};

fn erase(file_offset: u64, len: u64, frees: bool) -> IoRequest {
    IoRequest::Erase {
        token: 4,
        device: 0,
        file_offset,
        len: len as u32,
        frees,
    }
}

/// Erases the middle of the data file. Returns the bytes that the file takes before and after.
fn erase_the_middle(rig: &mut Rig, frees: bool) -> [u64; 2] {
    let bytes = pattern(8, 64 * UNIT);
    rig.prepare(0, &bytes);
    let space = |rig: &Rig| {
        let file = rig.file("data");
        file.sync_all().unwrap();
        file.metadata().unwrap().blocks() * 512
    };
    let before = space(rig);
    assert_eq!(rig.one(erase(16 * UNIT, 32 * UNIT, frees)), Ok(0));
    let mut expected = bytes;
    expected[16 * UNIT as usize..48 * UNIT as usize].fill(0);
    let mut found = vec![0; expected.len()];
    rig.file("data").read_exact_at(&mut found, 0).unwrap();
    assert!(found == expected, "exactly the range reads as zeros");
    [before, space(rig)]
}

pub(crate) fn an_erasure_zeroes_the_range_and_returns_its_space_if_asked(open: Open) {
    for frees in [false, true] {
        let mut rig = Rig::new(open, Script::default());
        // A filesystem that cannot, such as tmpfs, makes a hole instead.
        let mode = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        let zeroes = rustix::fs::fallocate(rig.file("data"), mode, 0, UNIT).is_ok();
        let [before, after] = erase_the_middle(&mut rig, frees);
        let expected = frees || !zeroes;
        assert_eq!(after < before, expected, "{before} bytes, then {after}");
    }
}

/// The filesystem of shared memory cannot zero a range in place.
pub(crate) fn an_erasure_makes_a_hole_where_the_filesystem_zeroes_no_range(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    let file = rustix::fs::memfd_create("data", MemfdFlags::CLOEXEC).unwrap();
    // The rig finds the file by its name.
    let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    std::fs::remove_file(rig.path("data")).unwrap();
    std::os::unix::fs::symlink(name, rig.path("data")).unwrap();
    let arena = Arc::new(Arena::create(UNIT).unwrap());
    let other = tempfile::tempdir().unwrap();
    let mut device = device_in(other.path());
    device.data = file.try_clone().unwrap().into();
    rig.engine = open(DEPTH, arena, vec![device], Script::default());
    let [before, after] = erase_the_middle(&mut rig, false);
    assert!(after < before);
}

pub(crate) fn endless_interruptions_of_any_call_end(open: Open) {
    let bytes = pattern(4, UNIT);
    for kind in [
        CallKind::Read,
        CallKind::Write,
        CallKind::Sync,
        CallKind::Erase,
    ] {
        for errno in [Errno::AGAIN, Errno::INTR] {
            let again = std::iter::repeat_n(Verdict::Fail(errno.raw_os_error()), 1000);
            let mut rig = Rig::new(open, Script::default().then(kind, again));
            rig.prepare(0, &bytes);
            let result = match kind {
                CallKind::Read => rig.read(0, 0, &bytes),
                CallKind::Write => rig.write(0, 0, UNIT as u32),
                CallKind::Sync => rig.one(meta(FileKind::Super, 0, &bytes, true)),
                CallKind::Erase => rig.one(erase(0, UNIT, false)),
            };
            assert_eq!(result, os(errno), "{kind:?}");
        }
    }
}
