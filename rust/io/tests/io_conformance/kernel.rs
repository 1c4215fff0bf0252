//! Errors of the kernel itself, and syncs.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use undercroft_contract::checksum::checksum;
use undercroft_contract::io::{FileKind, IoRequest};
use undercroft_io::fault::Script;
use undercroft_io::fault_hook::{CallKind, Verdict};

use crate::rig::{DEPTH, Open, Rig, UNIT, os, pattern};

/// Each error comes from the kernel, not from before the call.
pub(crate) fn calls_that_fail_in_the_kernel_leave_room_for_others(open: Open) {
    let mut rig = Rig::with(|arena, mut device| {
        let path = format!("/proc/self/fd/{}", device.data.as_raw_fd());
        device.data = OwnedFd::from(File::open(path).unwrap()).into();
        open(DEPTH, arena, vec![device], Script::default())
    });
    for _ in 0..50 * DEPTH {
        let result = rig.write(0, 0, UNIT as u32);
        assert_eq!(result, os(Errno::BADF));
    }
    let bytes = pattern(1, UNIT);
    rig.file("data").write_all_at(&bytes, 0).unwrap();
    assert_eq!(rig.read(0, 0, &bytes), Ok(checksum(&bytes)));
}

pub(crate) fn a_sync_of_each_file_succeeds_or_reports_its_failure(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    let sync = |file| IoRequest::Sync {
        token: 9,
        device: 0,
        file,
    };
    for file in [FileKind::Super, FileKind::Table, FileKind::Data] {
        assert_eq!(rig.one(sync(file)), Ok(0));
        let fails = Verdict::Fail(Errno::IO.raw_os_error());
        let script = Script::default().then(CallKind::Sync, [fails]);
        let mut failing = Rig::new(open, script);
        assert_eq!(failing.one(sync(file)), os(Errno::IO));
    }
}
