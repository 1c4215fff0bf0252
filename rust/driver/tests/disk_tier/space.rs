//! A store on a filesystem whose space others have taken since the last start.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FallocateFlags;
use undercroft_engine::ResizeOrder;
use undercroft_io::disk::open;
use undercroft_io::disk::open::{Capacity, OnOtherVersion, StoreOptions};
use undercroft_io::fault_hook::Direct;

use crate::rig::{Io, Model, Open, Rig, SECOND, dir};

const MIB: u64 = 1 << 20;
const FILESYSTEM: u64 = 100 * MIB;
const RESERVE: u64 = FILESYSTEM / 20;
const CAPACITY: u64 = 64 * MIB;
const MODEL: Model = Model {
    id: 6,
    payload_bytes: 60_000,
};

/// A filesystem in memory; `None` if this user may not mount one.
struct Filesystem(tempfile::TempDir);

impl Filesystem {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={FILESYSTEM},mode=700");
        let mut mount = Command::new("mount");
        let mount = mount.args(["-t", "tmpfs", "-o", &size, "none"]);
        let status = mount.arg(dir.path()).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("not tested: this user may not mount a filesystem");
            return None;
        }
        Some(Self(dir))
    }

    fn free(&self) -> u64 {
        let found = rustix::fs::statvfs(self.0.path()).unwrap();
        found.f_bavail * found.f_frsize
    }

    /// Another user takes all but so many bytes.
    fn fill(&self, left: u64) -> PathBuf {
        let path = self.0.path().join("tenant");
        let mut file = File::create(&path).unwrap();
        let bytes = vec![1; (self.free() - left) as usize];
        file.write_all(&bytes).unwrap();
        path
    }
}

impl Drop for Filesystem {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.0.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()));
    }
}

fn start(dirs: &[PathBuf], capacity: u64) -> Rig {
    let mut open = Open::new(dirs);
    open.capacity = capacity;
    open.plain()
}

/// Prompts of one block that fill the store.
fn fill_store(rig: &mut Rig) {
    (0..2 * CAPACITY / 60_000).for_each(|prompt| rig.save_of(&MODEL, prompt, 1));
}

/// As many payloads as fit, written, read and compared, without a failed write.
fn works(rig: &mut Rig, first: u64) {
    let before = *rig.engine.counters();
    for prompt in first..first + 300 {
        rig.save_of(&MODEL, prompt, 1);
        rig.pass(SECOND);
        rig.pump();
    }
    let counters = *rig.engine.counters();
    assert_eq!(counters.write_failures, 0);
    assert_eq!(counters.disk_writes - before.disk_writes, 300);
    let hits: u32 = (first..first + 300)
        .map(|prompt| rig.hit_of(&MODEL, prompt, 1))
        .sum();
    assert!(hits >= 200, "{hits} of the last 300");
    assert_eq!(rig.engine.counters().checksum_failures, 0);
}

fn resize(rig: &mut Rig, bytes: u64) {
    let order = ResizeOrder {
        disk_bytes: Some(bytes),
        ..ResizeOrder::default()
    };
    rig.engine.resize(&order, None).unwrap();
    for _ in 0..1000 {
        rig.pass(SECOND);
        rig.pump();
        if !rig.engine.resized().disk.resizing {
            return;
        }
    }
    panic!("{:?}", rig.engine.resized());
}

fn examined(path: &Path) -> open::Examination {
    let options = StoreOptions {
        capacity: Capacity::Bytes(CAPACITY),
        on_other_version: OnOtherVersion::default(),
        encrypted: false,
    };
    open::examine(path, options).unwrap()
}

#[test]
fn a_start_after_a_resize_takes_only_free_space_reports_it_and_continues_to_write() {
    let Some(filesystem) = Filesystem::mount() else {
        return;
    };
    let dirs = [filesystem.0.path().join("store")];
    let mut rig = start(&dirs, CAPACITY);
    fill_store(&mut rig);
    resize(&mut rig, 24 * MIB);
    let kept = rig.engine.gauges().disk_blocks;
    drop(rig);
    for left in [3 * MIB, RESERVE + 8 * MIB] {
        let tenant = filesystem.fill(left);
        let examined = examined(&dirs[0]);
        let mut rig = start(&dirs, CAPACITY);
        let taken = left - filesystem.free();
        assert!(taken <= left.saturating_sub(RESERVE), "{taken} of {left}");
        let told = &rig.notes[0];
        assert!(told.contains("are used until the next start"), "{told}");
        assert!(examined.notes[0].contains("are used until the next start"));
        let capacity = rig.engine.gauges().disk_capacity_bytes;
        let expected = 23 * MIB + left.saturating_sub(RESERVE);
        assert!(
            capacity.abs_diff(expected) < 2 * MIB,
            "{capacity} {expected}"
        );
        assert!(
            examined.capacity.abs_diff(capacity) < 2 * MIB,
            "{examined:?}"
        );
        let resized = rig.engine.resized().disk;
        assert_eq!(
            (resized.capacity_bytes, resized.resizing),
            (capacity, false)
        );
        assert_eq!(resized.maximum_bytes, capacity);
        if left == 3 * MIB {
            assert_eq!(
                rig.recovery.blocks, kept,
                "no block in the part that has space is lost"
            );
        }
        works(&mut rig, left);
        // A resize within the part with space works as ever.
        resize(&mut rig, 16 * MIB);
        resize(&mut rig, capacity);
        works(&mut rig, left + 1000);
        drop(rig);
        std::fs::remove_file(tenant).unwrap();
    }
    let mut rig = start(&dirs, CAPACITY);
    assert!(rig.notes.is_empty(), "{:?}", rig.notes);
    assert!(rig.engine.gauges().disk_capacity_bytes > 60 * MIB);
    works(&mut rig, 7_000_000);
}

#[test]
fn blocks_in_the_holes_of_a_sparse_copy_are_misses_and_no_later_start_finds_them() {
    let Some(filesystem) = Filesystem::mount() else {
        return;
    };
    let dirs = [filesystem.0.path().join("store")];
    let mut rig = start(&dirs, CAPACITY);
    fill_store(&mut rig);
    let blocks = rig.engine.gauges().disk_blocks;
    drop(rig);
    // Every other MiB is a hole, but for its last block of 4 KiB.
    let data = File::options()
        .write(true)
        .open(dirs[0].join("data"))
        .unwrap();
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for at in (0..CAPACITY / MIB - 4).step_by(2) {
        rustix::fs::fallocate(&data, mode, at * MIB, MIB - 4096).unwrap();
    }
    let tenant = filesystem.fill(RESERVE + MIB);
    let rig = start(&dirs, CAPACITY);
    assert!(filesystem.free() >= RESERVE);
    let (found, capacity) = (rig.recovery.blocks, rig.engine.gauges().disk_capacity_bytes);
    assert!((30 * MIB..36 * MIB).contains(&capacity), "{capacity}");
    assert!(
        found > blocks / 3 && found < blocks * 3 / 5,
        "{found} of {blocks}"
    );
    drop(rig);
    std::fs::remove_file(tenant).unwrap();
    let mut rig = start(&dirs, CAPACITY);
    assert!(rig.engine.gauges().disk_capacity_bytes > 60 * MIB);
    let hits = (0..2 * CAPACITY / 60_000).map(|prompt| u64::from(rig.hit_of(&MODEL, prompt, 1)));
    let hits = hits.sum::<u64>();
    // Where a hole has got space, the record is found and the bytes are not.
    assert!(hits > blocks / 3 && hits <= found, "{hits} of {found}");
}

#[test]
#[ignore = "needs a device with less space than it says: make test-filesystems"]
fn a_device_that_runs_out_of_space_costs_blocks_and_no_byte() {
    let (_dir, path) = dir();
    let dirs = [path];
    let prompts = 2 * CAPACITY / 60_000;
    // Each hit compares every byte.
    let hits = |rig: &mut Rig| -> u32 { (0..prompts).map(|at| rig.hit_of(&MODEL, at, 1)).sum() };
    let mut rig = start(&dirs, CAPACITY);
    fill_store(&mut rig);
    let counters = *rig.engine.counters();
    assert!(counters.write_failures > 0, "there was space for all");
    assert!(counters.disk_writes > 100 && hits(&mut rig) > 0);
    drop(rig);
    let mut open = Open::new(&dirs);
    open.capacity = CAPACITY;
    match open.open(|arena, devices| Io::Pool.open(arena, devices, Direct)) {
        Ok(mut rig) => {
            hits(&mut rig);
        }
        // The filesystem itself may take no more writes.
        Err(refused) => eprintln!("the start is refused: {refused}"),
    }
}
