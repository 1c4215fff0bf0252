//! Files that are not what they should be.

use std::fs::File;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};

use super::*;
use crate::child::child;

type Lie = fn(&Path);

const LIES: [(&str, Lie); 5] = [
    ("a file of 2^40 bytes", |path| {
        File::create(path).unwrap().set_len(1 << 40).unwrap();
    }),
    ("a pipe", |path| {
        rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    }),
    ("a socket", |path| {
        rustix::fs::mknodat(CWD, path, FileType::Socket, Mode::RWXU, 0).unwrap();
    }),
    ("a directory", |path| std::fs::create_dir(path).unwrap()),
    ("a device without an end", |path| {
        std::os::unix::fs::symlink("/dev/zero", path).unwrap();
    }),
];

#[test]
fn nothing_in_a_directory_ends_the_process_or_fills_its_memory() {
    child("liars::directory::before_a_liar", "", &[]);
}

/// Makes directories inside each other, of which no path names the last.
fn nest(top: &Path, count: usize) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut at = rustix::fs::open(top, flags, Mode::empty()).unwrap();
    for _ in 0..count {
        rustix::fs::mkdirat(&at, "a", Mode::RWXU).unwrap();
        at = rustix::fs::openat(&at, "a", flags, Mode::empty()).unwrap();
    }
}

/// The test above runs this one.
#[test]
#[ignore = "a part of another test"]
fn before_a_liar() {
    for (name, lie) in LIES {
        let place = tempfile::tempdir().unwrap();
        let url = format!("file://{}", place.path().display());
        let mut rig = Rig::new(&url, Box::new(())).unwrap();
        warm(&mut rig);
        let path = place.path().join(Segment::new(1).key.path());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        lie(&path);
        withstands(&mut rig, name, |rig| {
            read(rig, name);
            operate(rig);
        });
    }
    let place = tempfile::tempdir().unwrap();
    let url = format!("file://{}", place.path().display());
    let mut rig = Rig::new(&url, Box::new(())).unwrap();
    warm(&mut rig);
    nest(place.path(), 2000);
    withstands(&mut rig, "directories inside each other", |rig| {
        rig.objects.list("", &mut |_| true).unwrap();
        rig.objects.remove_leftovers(Duration::ZERO).unwrap();
    });
    // A path of all directories would be too long to remove them.
    let removed = std::process::Command::new("rm")
        .arg("-rf")
        .arg(place.path())
        .status();
    assert!(removed.unwrap().success());
}
