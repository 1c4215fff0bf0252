//! The removal of old objects.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use undercroft_contract::remote::RemoteError;
use undercroft_remote::gc::{GcReport, Limits, collect};
use undercroft_remote::{
    ListedObject, Location, ObjectBody, Objects, Receiver, RemoteOptions, Result,
};

const MIB: usize = 1 << 20;

struct Place {
    objects: Arc<dyn Objects>,
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let location = Location::parse(&format!("file://{}", directory.path().display())).unwrap();
        let objects = undercroft_remote::open(&location, RemoteOptions::default()).unwrap();
        Self { objects, directory }
    }

    fn put(&self, number: u64, age: u64) {
        let path = path(number);
        let bytes = vec![0; MIB / 16];
        self.objects
            .put(&path, &ObjectBody::bytes(&bytes), false)
            .unwrap();
        let file = std::fs::File::options()
            .write(true)
            .open(self.directory.path().join(path))
            .unwrap();
        let then = SystemTime::now() - Duration::from_secs(age);
        file.set_modified(then).unwrap();
    }

    fn listed(&self) -> Vec<String> {
        let mut found: Vec<ListedObject> = Vec::new();
        let each = &mut |entry| {
            found.push(entry);
            true
        };
        self.objects.list("", each).unwrap();
        let mut paths: Vec<String> = found.into_iter().map(|entry| entry.path).collect();
        paths.sort();
        paths
    }

    fn collect(&self, limits: Limits) -> GcReport {
        collect(&*self.objects, &limits, &AtomicBool::new(false), |_, _| ()).unwrap()
    }
}

pub(crate) fn path(number: u64) -> String {
    let first = number % 4;
    format!("1/0123456789abcdef0123456789abcdef/{first:02x}/{first:02x}{number:062x}-8")
}

fn limits(max_bytes: Option<usize>, max_age: Option<u64>) -> Limits {
    Limits {
        max_bytes: max_bytes.map(|bytes| bytes as u64),
        max_age: max_age.map(Duration::from_secs),
        min_age: Duration::from_secs(60),
        dry_run: false,
    }
}

fn paths(numbers: impl IntoIterator<Item = u64>) -> Vec<String> {
    let mut paths: Vec<String> = numbers.into_iter().map(path).collect();
    paths.sort();
    paths
}

#[test]
fn the_oldest_go_until_the_rest_fits() {
    let place = Place::new();
    // The order of the objects by name differs from their order by age.
    for number in 0..32 {
        place.put(number, 1000 + (number * 7 % 32) * 100);
    }
    let about = "1/0123456789abcdef0123456789abcdef/about.json";
    place
        .objects
        .put(about, &ObjectBody::bytes(b"{}"), true)
        .unwrap();
    let dry = place.collect(Limits {
        dry_run: true,
        ..limits(Some(MIB), None)
    });
    assert_eq!((dry.objects, dry.removed_objects), (32, 16));
    assert_eq!(place.listed().len(), 33, "a dry run removes nothing");
    let report = place.collect(limits(Some(MIB), None));
    assert_eq!(
        (report.removed_objects, report.removed_bytes),
        (16, MIB as u64)
    );
    assert!(
        (2499.0..2600.0).contains(&report.oldest_s.unwrap()),
        "{report:?}"
    );
    let mut left = paths((0..32).filter(|number| number * 7 % 32 < 16));
    left.push(about.to_owned());
    left.sort();
    assert_eq!(place.listed(), left);
    let again = place.collect(limits(Some(MIB), None));
    assert_eq!(again.removed_objects, 0);
}

#[test]
fn the_old_go_though_there_is_room_and_the_young_stay_though_there_is_none() {
    let place = Place::new();
    for (number, age) in [(0, 5000), (1, 4000), (2, 3000), (3, 10), (4, 0)] {
        place.put(number, age);
    }
    let report = place.collect(limits(Some(100 * MIB), Some(3500)));
    assert_eq!(report.removed_objects, 2);
    assert_eq!(place.listed(), paths(2..5));
    let report = place.collect(limits(Some(0), None));
    assert_eq!(
        (report.removed_objects, report.excess_bytes),
        (1, MIB as u64 / 8)
    );
    assert_eq!(place.listed(), paths(3..5));
}

/// Two collections run at once, while writers renew some old objects and write new objects.
#[test]
fn no_new_object_is_removed_and_two_collections_remove_no_more_than_one() {
    let place = Place::new();
    for number in 0..400 {
        place.put(number, 10_000 - number);
    }
    let most = 100 * MIB / 16;
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let removed: u64 = std::thread::scope(|scope| {
        scope.spawn(|| {
            let bytes = vec![1; MIB / 16];
            let mut next = 0;
            while !stop.load(Ordering::Relaxed) {
                // The oldest objects, which are being removed now, and new objects.
                for number in [next % 400, 1000 + next] {
                    place
                        .objects
                        .put(&path(number), &ObjectBody::bytes(&bytes), false)
                        .unwrap();
                }
                next += 1;
                written.store(next, Ordering::Relaxed);
            }
        });
        while written.load(Ordering::Relaxed) < 5 {
            std::thread::yield_now();
        }
        let two = [0, 1].map(|_| scope.spawn(|| place.collect(limits(Some(most), None))));
        let removed = two.map(|one| one.join().unwrap().removed_objects);
        stop.store(true, Ordering::Relaxed);
        removed.iter().sum()
    });
    let written = written.into_inner();
    let left = place.listed();
    for number in (0..written.min(400)).chain(1000..1000 + written) {
        assert!(
            left.contains(&path(number)),
            "object {number} of {written} was just written"
        );
    }
    let new_ones = 2 * written;
    assert!(
        removed <= 300 + new_ones,
        "{removed} removed, {written} written"
    );
    assert!((left.len() as u64) <= 100 + new_ones, "{} left", left.len());
}

/// The end of a write under load, if it has ended.
type Written = Option<Instant>;

/// Bytes of an object under load.
const LOAD_BYTES: usize = MIB / 16;

/// Writes new objects until `stop` is set. Checks that each object exists as long as it is young.
fn write_on(
    objects: &dyn Objects,
    young: Duration,
    stop: &AtomicBool,
    written: &Mutex<Vec<Written>>,
) {
    let bytes = vec![1; LOAD_BYTES];
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let began = Instant::now();
        written.lock().unwrap().push(None);
        let path = path(number);
        objects
            .put(&path, &ObjectBody::bytes(&bytes), true)
            .unwrap();
        written.lock().unwrap()[number as usize] = Some(Instant::now());
        let found = objects.probe(&[path]).unwrap();
        assert!(
            found == 1 || began.elapsed() >= young,
            "object {number} was removed after {:?}",
            began.elapsed()
        );
    }
}

/// Two threads collect again and again, beside a writer. `inexact`: the difference between the store's times and this
/// machine's times. At any time the store has at most the limit, and in addition the bytes that were written since the
/// last collection began, or shortly before.
pub(crate) fn stays_within_its_limit_under_load(
    objects: &dyn Objects,
    min_age: Duration,
    inexact: Duration,
    time: Duration,
) {
    const MOST: usize = 8 * LOAD_BYTES;
    let limits = Limits {
        min_age,
        ..limits(Some(MOST), None)
    };
    let (stop, written) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let collections: Mutex<Vec<Instant>> = Mutex::default();
    let (mut looks, mut removed) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| write_on(objects, min_age - inexact, &stop, &written));
        let two = [0, 1].map(|_| {
            scope.spawn(|| {
                let mut removed = 0;
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    removed += collect(objects, &limits, &AtomicBool::new(false), |_, _| ())
                        .unwrap()
                        .removed_objects;
                    collections.lock().unwrap().push(began);
                }
                removed
            })
        });
        let end = Instant::now() + time;
        while Instant::now() < end {
            let collected = collections.lock().unwrap().iter().max().copied();
            let mut stored = 0;
            let each = &mut |entry: ListedObject| {
                // To read the store's clock, a collection writes a separate object.
                stored += if entry.path.starts_with("1/") {
                    entry.bytes
                } else {
                    0
                };
                true
            };
            objects.list("", each).unwrap();
            let Some(collected) = collected else { continue };
            let since = collected - min_age - inexact;
            let written = written.lock().unwrap();
            let new = written
                .iter()
                .filter(|one| one.is_none_or(|ended| ended > since));
            let most = (MOST + new.count() * LOAD_BYTES) as u64;
            assert!(stored <= most, "{stored} bytes, {most} are allowed");
            looks += 1;
        }
        stop.store(true, Ordering::Relaxed);
        removed = two.map(|one| one.join().unwrap()).iter().sum::<u64>();
    });
    let written = written.into_inner().unwrap();
    // S3 does not tell which of two collections has removed an object: both count the object.
    let most = written.len() as u64 * if objects.name() == "s3" { 2 } else { 1 };
    assert!(looks > 3 && removed > 0, "{looks} looks, {removed} removed");
    assert!(removed <= most, "{removed} removed of {}", written.len());
    eprintln!(
        "{} written, {removed} removed, {looks} looks",
        written.len()
    );
}

#[test]
fn two_that_collect_at_once_keep_the_limit_under_load() {
    let place = Place::new();
    let (min_age, inexact) = (Duration::from_millis(200), Duration::from_millis(30));
    let time = Duration::from_secs(2);
    stays_within_its_limit_under_load(&*place.objects, min_age, inexact, time);
}

/// A collection over a bad network (`set_bad`) fails, and the next collection finishes the work.
#[cfg(feature = "s3")]
pub(crate) fn a_collection_completes_after_a_fault(objects: &dyn Objects, set_bad: impl Fn(bool)) {
    for number in 0..8 {
        let bytes = vec![1; LOAD_BYTES];
        (objects.put(&path(number), &ObjectBody::bytes(&bytes), true)).unwrap();
    }
    let limits = Limits {
        min_age: Duration::ZERO,
        ..limits(Some(0), None)
    };
    set_bad(true);
    collect(objects, &limits, &AtomicBool::new(false), |_, _| ()).unwrap_err();
    set_bad(false);
    let listed = || {
        let mut count = 0;
        let each = &mut |entry: ListedObject| {
            count += u64::from(entry.path.starts_with("1/"));
            true
        };
        objects.list("", each).unwrap();
        count
    };
    let left = listed();
    assert!(left >= 8, "{left} objects");
    let report = collect(objects, &limits, &AtomicBool::new(false), |_, _| ()).unwrap();
    assert_eq!((report.removed_objects, listed()), (left, 0));
}

/// Passes everything on, and counts the calls that remove objects.
#[derive(Debug)]
struct Counted {
    store: Arc<dyn Objects>,
    removals: AtomicU64,
    /// Whether the credentials only allow reads. Reading the store's clock takes a write.
    only_reads: bool,
}

impl Objects for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }
    fn parallel(&self) -> usize {
        1
    }
    fn probe(&self, paths: &[String]) -> Result<u64> {
        self.store.probe(paths)
    }
    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()> {
        self.store.get(path, receiver)
    }
    fn put(&self, path: &str, body: &ObjectBody<'_>, if_absent: bool) -> Result<bool> {
        self.store.put(path, body, if_absent)
    }
    fn delete(&self, _: &[String]) -> Result<()> {
        unreachable!("a collection removes only unchanged objects")
    }
    fn list(&self, below: &str, each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()> {
        self.store.list(below, each)
    }
    fn delete_unchanged(&self, entries: &[ListedObject]) -> Result<Vec<bool>> {
        self.removals.fetch_add(1, Ordering::Relaxed);
        self.store.delete_unchanged(entries)
    }
    fn clock_skew(&self) -> Result<Option<f64>> {
        match self.only_reads {
            true => Err(RemoteError::Denied.into()),
            false => self.store.clock_skew(),
        }
    }
    fn remove_leftovers(&self, _: Duration) -> Result<u64> {
        self.removals.fetch_add(1, Ordering::Relaxed);
        Ok(0)
    }
}

/// The list ends at the next object, no batch follows, and neither do the files of killed writers.
#[test]
fn a_collection_that_is_stopped_removes_nothing_more() {
    let place = Place::new();
    // More than one batch.
    for number in 0..1200 {
        let path = place.directory.path().join(path(number));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "x").unwrap();
    }
    let objects = Counted {
        store: Arc::clone(&place.objects),
        removals: AtomicU64::new(0),
        only_reads: false,
    };
    let limits = Limits {
        min_age: Duration::ZERO,
        ..limits(Some(0), None)
    };
    let collect = |stopped: &AtomicBool, stops| {
        let told = |_, _| stopped.store(stops, Ordering::Relaxed);
        let collected = collect(&objects, &limits, stopped, told);
        (collected, objects.removals.swap(0, Ordering::Relaxed))
    };
    let is_stopped = |collected: Result<GcReport>| {
        collected.is_err_and(|error| error.kind == RemoteError::Stopped)
    };
    let (collected, removals) = collect(&AtomicBool::new(true), true);
    assert!(is_stopped(collected), "stopped during the list");
    assert_eq!((removals, place.listed().len()), (0, 1200));
    let (collected, removals) = collect(&AtomicBool::new(false), true);
    assert!(is_stopped(collected), "stopped after the first batch");
    assert_eq!((removals, place.listed().len()), (1, 200));
    let (collected, removals) = collect(&AtomicBool::new(false), false);
    assert_eq!(collected.map(|report| report.removed_objects), Ok(200));
    assert_eq!((removals, place.listed().len()), (2, 0));
}

#[test]
fn a_dry_run_needs_credentials_for_reads_only() {
    let place = Place::new();
    for number in 0..3 {
        place.put(number, 3600);
    }
    let objects = Counted {
        store: Arc::clone(&place.objects),
        removals: AtomicU64::new(0),
        only_reads: true,
    };
    let collect = |dry_run| {
        let limits = Limits {
            dry_run,
            ..limits(Some(0), None)
        };
        collect(&objects, &limits, &AtomicBool::new(false), |_, _| ())
    };
    let found = collect(true).unwrap();
    assert_eq!((found.objects, found.removed_objects), (3, 3));
    assert_eq!(collect(false).unwrap_err().kind, RemoteError::Denied);
    assert_eq!(objects.removals.into_inner(), 0);
    assert_eq!(place.listed().len(), 3);
}
