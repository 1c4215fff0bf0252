//! Checks of a store before an engine uses it.

use std::time::{Duration, Instant};

use undercroft_contract::remote::RemoteError;

use crate::body::ObjectBody;
use crate::finding::{Finding, Status};
use crate::objects::Objects;
use crate::receiver::Receiver;
use crate::store_error::ObjectStoreError;

/// Directory of the samples.
pub(crate) const SAMPLES: &str = "check";
/// Bytes that are written and read back.
const SAMPLE: usize = 64 << 10;
/// Number of probes. Their median time is reported.
const PROBES: usize = 11;
/// A store whose probes take longer than this answers lookups late.
const SLOW: Duration = Duration::from_millis(100);
/// Seconds. S3 refuses requests whose time differs by fifteen minutes. Ages of objects are wrong by the difference.
const SKEW_WARN: f64 = 60.0;
const SKEW_FAIL: f64 = 900.0;

/// Checks whether the store can be reached and written, its features, and the time of its probes.
pub fn check(objects: &dyn Objects) -> Vec<Finding> {
    let mut found = Vec::new();
    // The store may have to start first. The calls below report its failure.
    let _ = objects.greet();
    let path = sample_path();
    if let Err(error) = written(objects, &path, &mut found) {
        let advice = error.advice();
        found.push(Finding::new(
            "remote",
            Status::Fail,
            error.to_string(),
            advice,
        ));
        // The sample is removed even after a failure.
        let _ = objects.delete(std::slice::from_ref(&path));
        return found;
    }
    found.push(removed(objects, &path));
    found.push(listed(objects));
    match clock(objects) {
        Ok(finding) => found.extend(finding),
        Err(error) => found.push(Finding::new(
            "remote clock",
            Status::Warn,
            error.to_string(),
            "",
        )),
    }
    found.extend(objects.exposure().map(|text| {
        let advice = "use https:// or rediss://, or keep the store in a network that you trust";
        Finding::new("remote transport", Status::Warn, text, advice)
    }));
    found.extend(objects.advice());
    found
}

/// A name that no other check uses at the same time.
pub(crate) fn sample_path() -> String {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(std::process::id());
    format!("{SAMPLES}/{random:016x}")
}

/// Writes a sample, reads it back, and probes it.
fn written(
    objects: &dyn Objects,
    path: &str,
    found: &mut Vec<Finding>,
) -> Result<(), ObjectStoreError> {
    let sample: Vec<u8> = (0..SAMPLE).map(|at| (at * 31) as u8).collect();
    let started = Instant::now();
    objects.put(path, &ObjectBody::bytes(&sample), true)?;
    let put = started.elapsed();
    let started = Instant::now();
    let mut receiver = Receiver::bytes(SAMPLE as u64);
    objects.get(path, &mut receiver)?;
    let get = started.elapsed();
    if receiver.into_bytes() != sample {
        return Err(ObjectStoreError::new(
            RemoteError::Corrupt,
            "the store returns other bytes than were written",
        ));
    }
    let name = objects.name();
    let (put, get) = (milliseconds(put), milliseconds(get));
    let text = format!("{name}: 64 KiB written in {put} ms, read in {get} ms");
    found.push(Finding::new("remote", Status::Ok, text, ""));
    let again = objects.put(path, &ObjectBody::bytes(&sample), true)?;
    found.push(if again {
        Finding::new(
            "remote writes",
            Status::Warn,
            "the store replaces an object that is there although it is asked not to",
            "nothing goes wrong, but hosts that compute the same prefix write it each; a newer release of the store may tell",
        )
    } else {
        Finding::new("remote writes", Status::Ok, "conditional", "")
    });
    found.push(probed(objects, path)?);
    Ok(())
}

fn probed(objects: &dyn Objects, path: &str) -> Result<Finding, ObjectStoreError> {
    let paths = [path.to_owned(), format!("{path}-absent")];
    let mut times = Vec::with_capacity(PROBES);
    for _ in 0..PROBES {
        let started = Instant::now();
        let bits = objects.probe(&paths)?;
        times.push(started.elapsed());
        if bits != 1 {
            return Err(ObjectStoreError::new(
                RemoteError::Corrupt,
                "the store does not tell objects that exist from others",
            ));
        }
    }
    times.sort_unstable();
    let middle = times[PROBES / 2];
    let text = format!("{} ms for a probe", milliseconds(middle));
    Ok(if middle > SLOW {
        let advice =
            "lookups of prompts that start at once miss it; use a store nearer to this host";
        Finding::new("remote latency", Status::Warn, text, advice)
    } else {
        Finding::new("remote latency", Status::Ok, text, "")
    })
}

fn removed(objects: &dyn Objects, path: &str) -> Finding {
    let name = "remote deletes";
    match objects.delete(&[path.to_owned()]) {
        Ok(()) => Finding::new(name, Status::Ok, "allowed", ""),
        Err(error) => {
            let advice = "damaged objects stay, and `undercroft remote gc` needs other credentials; allow deletes";
            Finding::new(name, Status::Warn, error.to_string(), advice)
        }
    }
}

fn listed(objects: &dyn Objects) -> Finding {
    let name = "remote lists";
    match objects.list("1/", &mut |_| false) {
        Ok(()) => Finding::new(name, Status::Ok, "allowed", ""),
        Err(error) => {
            let advice = "`undercroft remote gc` and `undercroft inspect` need it; engines do not";
            Finding::new(name, Status::Warn, error.to_string(), advice)
        }
    }
}

fn clock(objects: &dyn Objects) -> Result<Option<Finding>, ObjectStoreError> {
    let Some(skew) = objects.clock_skew()? else {
        return Ok(None);
    };
    let status = match skew.abs() {
        skew if skew > SKEW_FAIL => Status::Fail,
        skew if skew > SKEW_WARN => Status::Warn,
        _ => Status::Ok,
    };
    let advice = match status {
        Status::Ok => "",
        _ => {
            "set this machine's clock by NTP: S3 refuses requests of another time, and objects seem old or new"
        }
    };
    let text = match skew {
        skew if skew.abs() < 1.0 => "within a second of this machine's".to_owned(),
        skew if skew > 0.0 => format!("{skew:.0} s ahead of this machine's"),
        skew => format!("{:.0} s behind this machine's", -skew),
    };
    Ok(Some(Finding::new("remote clock", status, text, advice)))
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e3)
}
