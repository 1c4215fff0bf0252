//! Tests of an object store alone.

use std::time::{Duration, Instant, SystemTime};

use undercroft_contract::remote::RemoteError;
use undercroft_remote::{Location, ObjectBody, RemoteOptions, StoreHealth};

use crate::child::{child, url_of_parent};
use crate::rig::{Rig, Segment, options, s3_url};

const PATIENCE: Duration = Duration::from_secs(30);

fn url() -> Option<String> {
    let url = s3_url();
    url.inspect_err(|reason| eprintln!("skipped: {reason}"))
        .ok()
}

fn modified(rig: &Rig) -> SystemTime {
    let mut found = None;
    let each = &mut |entry: undercroft_remote::ListedObject| {
        found = Some(entry.modified);
        true
    };
    rig.objects.list("", each).unwrap();
    found.expect("one object")
}

fn is_read(rig: &mut Rig, segment: &Segment) {
    let read = rig.get_all(segment);
    let last = rig.pool.as_ref().unwrap().last_result().get();
    assert!(read.is_ok(), "{read:?}: {last:?}");
}

#[test]
fn an_old_object_that_is_read_becomes_new() {
    let Some(url) = url() else { return };
    let location = Location::parse(&url).unwrap();
    let ttl = Duration::from_secs(2);
    let objects = undercroft_remote::open(&location, options(ttl)).unwrap();
    let mut rig = Rig::over(objects, Box::new(()));
    let segment = Segment::new(1);
    rig.put(&segment, true).unwrap();
    let first = modified(&rig);
    let end = Instant::now() + PATIENCE;
    while modified(&rig) == first {
        assert!(Instant::now() < end, "it is still of {first:?}");
        is_read(&mut rig, &segment);
    }
    is_read(&mut rig, &segment);
}

/// The store's times are whole seconds.
#[test]
fn two_that_collect_at_once_keep_the_limit_under_load() {
    let Some(url) = url() else { return };
    let location = Location::parse(&url).unwrap();
    let objects = undercroft_remote::open(&location, RemoteOptions::default()).unwrap();
    let [min_age, inexact, time] = [4, 2, 12].map(Duration::from_secs);
    crate::collecting::stays_within_its_limit_under_load(&*objects, min_age, inexact, time);
}

#[test]
fn several_that_remove_an_object_at_once_all_succeed() {
    let Some(url) = url() else { return };
    let location = Location::parse(&url).unwrap();
    let objects = &undercroft_remote::open(&location, RemoteOptions::default()).unwrap();
    let paths = &["1/removed".to_owned()];
    for _ in 0..100 {
        objects
            .put(&paths[0], &ObjectBody::bytes(b"x"), true)
            .unwrap();
        std::thread::scope(|scope| {
            let all = [(); 4].map(|()| scope.spawn(|| objects.delete(paths)));
            for one in all {
                one.join().unwrap().unwrap();
            }
        });
        assert_eq!(objects.probe(paths), Ok(0));
    }
}

#[test]
fn wrong_credentials_and_a_missing_bucket_are_reported() {
    let Some(url) = url() else { return };
    let test = "cloud::with_wrong_credentials";
    child(test, &url, &[("AWS_SECRET_ACCESS_KEY", "wrong")]);
    let mut rig = Rig::new("s3://no-such-bucket/prefix", Box::new(())).unwrap();
    assert_eq!(rig.get_all(&Segment::new(2)), Err(RemoteError::Unreachable));
    let StoreHealth::Failed(error) = rig.pool.as_ref().unwrap().last_result().get() else {
        panic!("the bucket is missing");
    };
    assert!(error.detail.contains("NoSuchBucket"), "{error}");
}

/// The test above runs this one.
#[test]
#[ignore = "a part of another test"]
fn with_wrong_credentials() {
    let mut rig = Rig::new(&url_of_parent(), Box::new(())).unwrap();
    let segment = Segment::new(2);
    assert_eq!(rig.get_all(&segment), Err(RemoteError::Denied));
    assert_eq!(rig.put(&segment, true), Err(RemoteError::Denied));
    assert_eq!(rig.probe(vec![segment.key]), Err(RemoteError::Denied));
}
