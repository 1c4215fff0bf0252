//! Files of other applications in the same place: a bucket or a mount without a prefix of its own.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::remote::ObjectKey;
use undercroft_remote::contents::contents;
use undercroft_remote::gc::{GcReport, Limits, collect};
use undercroft_remote::{Location, ObjectBody, Objects, RemoteOptions};

const SPACE: &str = "0123456789abcdef0123456789abcdef";
const HASH: &str = "ab00000000000000000000000000000000000000000000000000000000000000";

fn key() -> ObjectKey {
    ObjectKey {
        namespace: NamespaceDigest([7; 32]),
        end: BlockHash::new(&[0xab; 32]).unwrap(),
        hash_blocks: 8,
        group: None,
    }
}

/// Names that look like undercroft's.
fn foreign() -> Vec<String> {
    let near = [
        format!("1/{SPACE}/ab/{HASH}"),
        format!("1/{SPACE}/ab/{HASH}-8.bak"),
        format!("1/{SPACE}/ab/{HASH}-08"),
        format!("1/{SPACE}/ab/{HASH}-8-g"),
        format!("1/{SPACE}/ab/{HASH}-8-g256"),
        format!("1/{SPACE}/ac/{HASH}-8"),
        format!("1/{SPACE}/AB/{}-8", HASH.to_uppercase()),
        format!("1/{SPACE}0/ab/{HASH}-8"),
        format!("1/{SPACE}/ab/c/{HASH}-8"),
        format!("01/{SPACE}/ab/{HASH}-8"),
        format!("3/{SPACE}/ab/{HASH}-8"),
        format!("backup/1/{SPACE}/ab/{HASH}-8"),
        format!("1/{SPACE}/notes.json"),
        format!("{SPACE}/ab/{HASH}-8"),
    ];
    let plain = [
        "2024/05/12/access.log",
        "1/a/b/c",
        "2/0/0/0",
        "4294967295/x/y/z",
        "check/list.txt",
        "readme",
    ];
    near.into_iter().chain(plain.map(str::to_owned)).collect()
}

/// By age, by bytes, by both, and all.
fn policies() -> [Limits; 4] {
    let second = Some(Duration::from_secs(1));
    [
        (None, second),
        (Some(0), None),
        (Some(1), second),
        (Some(0), Some(Duration::ZERO)),
    ]
    .map(|(max_bytes, max_age)| Limits {
        max_bytes,
        max_age,
        min_age: Duration::ZERO,
        dry_run: false,
    })
}

fn collected(objects: &dyn Objects, limits: &Limits) -> GcReport {
    collect(objects, limits, &AtomicBool::new(false), |_, _| ()).unwrap()
}

/// No policy removes the files of others. Undercroft's own objects in the same place are removed.
pub(crate) fn stay(objects: &dyn Objects, make_old: impl Fn(&str)) {
    let put = |path: &str| {
        objects
            .put(path, &ObjectBody::bytes(b"theirs"), false)
            .unwrap();
        make_old(path);
    };
    let foreign = foreign();
    foreign.iter().for_each(|path| put(path));
    let own = [key().path(), key().encrypted_path()];
    for limits in policies() {
        // By age goes only what can be made old.
        own.iter().for_each(|path| put(path));
        let report = collected(objects, &limits);
        assert_eq!(report.objects, 2, "{limits:?}");
        assert!(report.removed_objects == 2 || limits.max_bytes.is_none());
        for path in &foreign {
            let found = objects.probe(std::slice::from_ref(path));
            assert_eq!(found, Ok(1), "{path} is not undercroft's: {limits:?}");
        }
    }
    own.iter().for_each(|path| put(path));
    let found = contents(objects).unwrap();
    assert_eq!(found.objects, 2);
    assert_eq!(found.other_objects, foreign.len() as u64);
    let [space] = &found.namespaces[..] else {
        panic!("one namespace: {:?}", found.namespaces);
    };
    assert_eq!(space.digest, "07".repeat(16));
}

fn store(path: &Path) -> Arc<dyn Objects> {
    let location = Location::parse(&format!("file://{}", path.display())).unwrap();
    undercroft_remote::open(&location, RemoteOptions::default()).unwrap()
}

fn make_old(path: &Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let then = SystemTime::now() - Duration::from_secs(400 * 24 * 3600);
    file.set_modified(then).unwrap();
}

#[test]
fn files_of_others_in_a_directory_stay() {
    let place = tempfile::tempdir().unwrap();
    stay(&*store(place.path()), |path| {
        make_old(&place.path().join(path))
    });
}

/// An old file with a temporary name is removed only if the name and the directory are undercroft's.
#[test]
fn temporary_files_of_others_in_a_directory_stay() {
    let place = tempfile::tempdir().unwrap();
    let file = |path: &str| {
        let path = place.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "half").unwrap();
        make_old(&path);
        path
    };
    let own = ".undercroft-0123456789abcdef-7";
    let object_path = key().path();
    let (of_objects, _) = object_path.rsplit_once('/').unwrap();
    let theirs = [
        ".tmp-x".to_owned(),
        ".tmp-0123456789abcdef-7".to_owned(),
        "a/.tmp-x".to_owned(),
        format!("{of_objects}/.tmp-x"),
        format!("{of_objects}/.undercroft-x"),
        format!("{of_objects}/.undercroft-0123456789ABCDEF-7"),
        format!("{of_objects}/.undercroft-123456789abcdef-7"),
        format!("{of_objects}/{own}x"),
        format!("{of_objects}/x{own}"),
        format!("{of_objects}/deeper/{own}"),
        format!("a/{own}"),
        format!("2024/05/12/{own}"),
        format!("1/ab/{own}"),
    ];
    let theirs = theirs.map(|path| file(&path));
    let parents = [
        "",
        "check/",
        &format!("1/{SPACE}/"),
        &format!("{of_objects}/"),
    ];
    let leftovers = parents.map(|parent| file(&format!("{parent}{own}")));
    for limits in policies() {
        collected(&*store(place.path()), &limits);
    }
    let there = |paths: &[std::path::PathBuf]| -> Vec<_> {
        paths.iter().filter(|path| path.exists()).cloned().collect()
    };
    assert_eq!(there(&theirs), theirs);
    assert_eq!(there(&leftovers), Vec::<std::path::PathBuf>::new());
}
