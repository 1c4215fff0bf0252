//! Tests of a directory alone.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use undercroft_contract::remote::{RemoteDone, RemoteError};
use undercroft_remote::measure::measure;
use undercroft_remote::{Location, ObjectBody, Objects, RemoteOptions, StoreHealth};

use crate::rig::{Rig, Segment, options, reads_only};

/// Type of a file system in memory (statfs(2)).
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

fn store(path: &Path, ttl: u64) -> Arc<dyn Objects> {
    let location = Location::parse(&format!("file://{}", path.display())).unwrap();
    let ttl = Duration::from_secs(ttl);
    undercroft_remote::open(&location, options(ttl)).unwrap()
}

fn rig(path: &Path, ttl: u64) -> Rig {
    Rig::over(store(path, ttl), Box::new(()))
}

fn files(below: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(below).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
fn objects_are_files_of_this_user_alone_and_no_temporary_file_stays() {
    let place = tempfile::tempdir().unwrap();
    let segment = Segment::new(1);
    let mut rig = rig(place.path(), 60);
    assert_eq!(rig.put(&segment, true), Ok(RemoteDone::Stored));
    assert_eq!(rig.put(&segment, true), Ok(RemoteDone::AlreadyThere));
    assert_eq!(rig.put(&segment, false), Ok(RemoteDone::Stored));
    let found = files(place.path());
    assert_eq!(found, [place.path().join(segment.key.path())]);
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&found[0]), 0o600);
    assert_eq!(mode(found[0].parent().unwrap()), 0o700);
    assert_eq!(std::fs::read(&found[0]).unwrap(), segment.bytes());
}

#[test]
fn no_link_leads_out_of_the_directory() {
    let place = tempfile::tempdir().unwrap();
    let (inside, outside) = (place.path().join("in"), place.path().join("out"));
    std::fs::create_dir(&outside).unwrap();
    let segment = Segment::new(2);
    let path = inside.join(segment.key.path());
    let mut rig = rig(&inside, 60);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    // The object itself is a link.
    let target = outside.join("object");
    std::fs::write(&target, segment.bytes()).unwrap();
    symlink(&target, &path).unwrap();
    assert_eq!(rig.probe(vec![segment.key]), Ok(RemoteDone::Present(0)));
    assert_eq!(rig.get_all(&segment), Err(RemoteError::Denied));
    assert_eq!(rig.put(&segment, true), Ok(RemoteDone::AlreadyThere));
    assert_eq!(rig.put(&segment, false), Ok(RemoteDone::Stored));
    assert!(!path.is_symlink(), "the link was replaced, not its target");
    // One of the object's directories is a link.
    let parent = path.parent().unwrap();
    std::fs::remove_dir_all(parent).unwrap();
    symlink(&outside, parent).unwrap();
    assert_eq!(rig.put(&segment, true), Err(RemoteError::Denied));
    assert_eq!(rig.get_all(&segment), Err(RemoteError::Denied));
    let StoreHealth::Failed(denied) = rig.pool.as_ref().unwrap().last_result().get() else {
        panic!("a link on the way");
    };
    assert!(denied.advice().contains("symbolic link"), "{denied}");
    assert_eq!(files(&outside), [target]);
}

/// Lets others write a path, or gives it to another user if this test may. Returns how to undo it.
fn give_away(path: &Path, to_a_user: bool) -> impl FnOnce() {
    let (path, mode) = (path.to_owned(), path.metadata().unwrap().permissions());
    if to_a_user {
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
    } else {
        let open = std::fs::Permissions::from_mode(mode.mode() | 0o020);
        std::fs::set_permissions(&path, open).unwrap();
    }
    move || {
        if to_a_user {
            std::os::unix::fs::chown(&path, Some(0), None).unwrap();
        }
        std::fs::set_permissions(&path, mode).unwrap();
    }
}

#[test]
fn bytes_that_another_user_may_choose_are_no_hit_unless_the_operator_says_so() {
    let is_root = rustix::process::geteuid().is_root();
    for to_a_user in [false, true] {
        if to_a_user && !is_root {
            eprintln!("skipped: only root gives files away");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let segment = Segment::new(1);
        let top = place.path().join("remote");
        let mut rig = rig(&top, 60);
        rig.put(&segment, true).unwrap();
        let object = top.join(segment.key.path());
        let location = Location::parse(&format!("file://{}", top.display())).unwrap();
        let any = RemoteOptions {
            any_owner: true,
            ..RemoteOptions::default()
        };
        let any = undercroft_remote::open(&location, any).unwrap();
        let mut any = Rig::over(any, Box::new(()));
        for directory in [&top, object.parent().unwrap()] {
            let undo = give_away(directory, to_a_user);
            assert_eq!(rig.get_all(&segment), Err(RemoteError::Denied));
            assert_eq!(rig.put(&segment, false), Err(RemoteError::Denied));
            let StoreHealth::Failed(denied) = rig.pool.as_ref().unwrap().last_result().get() else {
                panic!("others may write {directory:?}");
            };
            let names = |part: &str| denied.detail.contains(part);
            assert!(names(directory.to_str().unwrap()), "{denied}");
            assert!(
                names("belongs to uid 65534") || names(", with which others can write"),
                "{denied}"
            );
            assert!(denied.advice().contains("remote_any_owner"), "{denied}");
            any.get_all(&segment).unwrap();
            undo();
            rig.get_all(&segment).unwrap();
        }
        let undo = give_away(&object, to_a_user);
        any.get_all(&segment).unwrap();
        assert_eq!(rig.get_all(&segment), Err(RemoteError::Corrupt));
        rig.wait_until_gone(&segment.key.path());
        drop(undo);
    }
}

#[test]
fn a_directory_of_another_user_beside_those_of_undercroft_is_left_out() {
    let place = tempfile::tempdir().unwrap();
    let objects = store(place.path(), 60);
    objects.put("1/a", &ObjectBody::bytes(b"x"), true).unwrap();
    let other = place.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("file"), "x").unwrap();
    let _undo = give_away(&other, false);
    let mut found = Vec::new();
    let each = &mut |entry: undercroft_remote::ListedObject| {
        found.push(entry.path);
        true
    };
    objects.list("", each).unwrap();
    assert_eq!(found, ["1/a"]);
}

#[test]
fn a_directory_whose_file_system_is_not_mounted_is_unreachable_and_not_made() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("mount/remote");
    let location = Location::parse(&format!("file://{}", path.display())).unwrap();
    let error = undercroft_remote::open(&location, RemoteOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("mount the file system"),
        "{error}"
    );
    std::fs::create_dir(place.path().join("mount")).unwrap();
    let mut rig = rig(&path, 60);
    std::fs::remove_dir_all(place.path().join("mount")).unwrap();
    let segment = Segment::new(3);
    assert_eq!(rig.put(&segment, true), Err(RemoteError::Unreachable));
    assert_eq!(rig.get_all(&segment), Err(RemoteError::Unreachable));
    assert_eq!(rig.probe(vec![segment.key]), Err(RemoteError::Unreachable));
    let last = rig.pool.as_ref().unwrap().last_result().get();
    let StoreHealth::Failed(last) = last else {
        panic!("{last:?}");
    };
    assert!(
        last.to_string().contains(&path.display().to_string()),
        "{last}"
    );
}

/// Nobody makes directories there, not even root.
#[test]
fn a_directory_that_this_user_cannot_make_is_denied() {
    let rig = Rig::new("file:///sys/undercroft", Box::new(())).unwrap();
    let error = rig.objects.greet().unwrap_err();
    assert_eq!(error.kind, RemoteError::Denied, "{error}");
    let text = error.to_string();
    assert!(text.contains("/sys/undercroft cannot be made"), "{text}");
}

/// Bytes that this process has caused storage to be read, not from the page cache.
fn read_from_storage() -> u64 {
    let counters = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = counters
        .lines()
        .find_map(|one| one.strip_prefix("read_bytes: "));
    line.unwrap().parse().unwrap()
}

#[test]
fn measured_reads_are_not_from_the_page_cache() {
    let place = tempfile::tempdir().unwrap();
    if rustix::fs::statfs(place.path()).unwrap().f_type == TMPFS {
        return; // The files are nowhere else.
    }
    let before = read_from_storage();
    let (size, total) = (1 << 20, 4 << 20);
    let measured = measure(
        &store(place.path(), 60),
        &[size],
        total,
        &AtomicBool::new(false),
        |_| {},
    );
    assert_eq!(measured.unwrap().advised_bytes, size);
    // Three times bare and three times like the engine.
    assert!(read_from_storage() - before >= 6 * total);
}

fn age(path: &Path) -> Duration {
    let modified = path.metadata().unwrap().modified().unwrap();
    SystemTime::now()
        .duration_since(modified)
        .unwrap_or_default()
}

fn make_old(path: &Path, seconds: u64) {
    let then = SystemTime::now() - Duration::from_secs(seconds);
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(then).unwrap();
}

#[test]
fn an_old_object_that_is_read_becomes_new() {
    let place = tempfile::tempdir().unwrap();
    let segment = Segment::new(4);
    let mut rig = rig(place.path(), 1000);
    rig.put(&segment, true).unwrap();
    let path = place.path().join(segment.key.path());
    make_old(&path, 400);
    rig.get_all(&segment).unwrap();
    assert!(
        age(&path) > Duration::from_secs(300),
        "not half of its life has passed"
    );
    make_old(&path, 600);
    rig.get_all(&segment).unwrap();
    assert!(age(&path) < Duration::from_secs(300));
}

#[test]
fn a_host_that_only_reads_makes_no_object_new() {
    let place = tempfile::tempdir().unwrap();
    let segment = Segment::new(5);
    let location = Location::parse(&format!("file://{}", place.path().display())).unwrap();
    let objects = undercroft_remote::open(&location, reads_only()).unwrap();
    let mut rig = Rig::over(objects, Box::new(()));
    rig.put(&segment, true).unwrap();
    let path = place.path().join(segment.key.path());
    let old = 30 * 24 * 3600;
    make_old(&path, old);
    rig.get_all(&segment).unwrap();
    assert!(age(&path) >= Duration::from_secs(old));
}

#[test]
fn a_file_of_a_killed_writer_is_no_object_and_is_removed_when_it_is_old() {
    let place = tempfile::tempdir().unwrap();
    let objects = store(place.path(), 60);
    let path = Segment::new(5).key.path();
    objects.put(&path, &ObjectBody::bytes(b"x"), true).unwrap();
    let object = place.path().join(path);
    let left = object.with_file_name(".undercroft-0000000000000001-7");
    std::fs::write(&left, "half").unwrap();
    let mut listed = 0;
    let count = &mut |_| {
        listed += 1;
        true
    };
    objects.list("", count).unwrap();
    assert_eq!(listed, 1);
    let hour = Duration::from_secs(3600);
    assert_eq!(objects.remove_leftovers(hour).unwrap(), 0);
    make_old(&left, 7200);
    assert_eq!(objects.remove_leftovers(hour).unwrap(), 1);
    assert_eq!(files(place.path()), [object]);
}

/// A file system of 1 MiB, if this user may mount a file system.
#[test]
fn a_full_file_system_is_reported_and_leaves_no_partial_object() {
    let place = tempfile::tempdir().unwrap();
    let mount = |arguments: &[&str]| {
        let mut command = std::process::Command::new("mount");
        command.args(arguments).arg(place.path());
        command.output().is_ok_and(|output| output.status.success())
    };
    if !mount(&["-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs"]) {
        eprintln!("skipped: this user may not mount a tmpfs");
        return;
    }
    let mut rig = rig(place.path(), 60);
    let results: Vec<_> = (0..4)
        .map(|number| rig.put(&Segment::new(number), true))
        .collect();
    let left = files(place.path());
    let unmounted = std::process::Command::new("umount")
        .arg(place.path())
        .status();
    assert!(unmounted.unwrap().success());
    assert_eq!(results[3], Err(RemoteError::Full));
    let stored = results
        .iter()
        .filter(|result| **result == Ok(RemoteDone::Stored))
        .count();
    assert_eq!(left.len(), stored, "{left:?}");
}
