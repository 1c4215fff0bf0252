//! Removes objects from a store without automatic removal: the oldest first, until the rest is within the limits.
//!
//! It may run at any time beside writers, and in several processes at once. It keeps objects that were written or
//! renewed since they were listed, and objects that are younger than [`Limits::min_age`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use undercroft_contract::remote::RemoteError;
use undercroft_contract::remote::key::{ObjectName, VERSIONS};

use crate::objects::{ListedObject, Objects};
use crate::store_error::{ObjectStoreError, Result};

/// Most objects that are removed in one call.
const BATCH: usize = 1000;

/// Age at which the files of a killed writer are removed.
const LEFTOVER_AGE: Duration = Duration::from_secs(3600);

/// The limits that determine which objects are removed.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most bytes that stay: the oldest objects are removed first.
    pub max_bytes: Option<u64>,
    /// Older objects are removed.
    pub max_age: Option<Duration>,
    /// Younger objects always stay.
    pub min_age: Duration,
    /// Whether to remove nothing, and only report the objects that would be removed.
    pub dry_run: bool,
}

/// The result of a collection.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GcReport {
    /// Objects that were listed.
    pub objects: u64,
    /// Bytes of the listed objects.
    pub bytes: u64,
    /// Objects that were removed, or would be.
    pub removed_objects: u64,
    /// Bytes of the removed objects.
    pub removed_bytes: u64,
    /// Objects that were selected, but were written anew or removed by another process meanwhile.
    pub skipped_objects: u64,
    /// Files of writers that were killed.
    pub removed_leftovers: u64,
    /// Bytes above the limit that stay because their objects are too young.
    pub excess_bytes: u64,
    /// Age of the oldest remaining object in seconds.
    pub oldest_s: Option<f64>,
    /// Whether this was a dry run, which removes nothing.
    pub dry_run: bool,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Removes objects by the limits. `progress` gets the number of examined objects and of all objects. Once `stopped` is
/// true, no further object is removed.
///
/// # Errors
/// If the store fails, or `stopped` is true. Some objects may have been removed before.
pub fn collect(
    objects: &dyn Objects,
    limits: &Limits,
    stopped: &AtomicBool,
    mut progress: impl FnMut(usize, usize),
) -> Result<GcReport> {
    let started = Instant::now();
    let is_stopped = || stopped.load(Ordering::Relaxed);
    let go_on = || match is_stopped() {
        true => Err(ObjectStoreError::from(RemoteError::Stopped)),
        false => Ok(()),
    };
    // Ages are computed with the store's clock, like the times of its objects.
    let skew = match objects.clock_skew() {
        // Credentials for reads only do not suffice to read the clock.
        Err(_) if limits.dry_run => None,
        skew => skew?,
    };
    let skew = skew.unwrap_or(0.0);
    let now = shifted(SystemTime::now(), skew);
    let mut all = Vec::new();
    // Other names are of other applications.
    for version in VERSIONS {
        objects.list(&format!("{version}/"), &mut |entry| {
            if ObjectName::parse(&entry.path).is_some() {
                all.push(entry);
            }
            !is_stopped()
        })?;
    }
    go_on()?;
    // Two collections at once select the same objects.
    all.sort_by(|a, b| (a.modified, &a.path).cmp(&(b.modified, &b.path)));
    let mut report = GcReport {
        objects: all.len() as u64,
        bytes: all.iter().map(|entry| entry.bytes).sum(),
        dry_run: limits.dry_run,
        ..GcReport::default()
    };
    let chosen = choose(&all, limits, now, report.bytes);
    let left = report.bytes - all[..chosen].iter().map(|entry| entry.bytes).sum::<u64>();
    report.excess_bytes = limits.max_bytes.map_or(0, |most| left.saturating_sub(most));
    report.oldest_s = all.get(chosen).map(|entry| age(now, entry).as_secs_f64());
    for (index, batch) in all[..chosen].chunks(BATCH).enumerate() {
        go_on()?;
        let removed = if limits.dry_run {
            vec![true; batch.len()]
        } else {
            objects.delete_unchanged(batch)?
        };
        for (entry, removed) in batch.iter().zip(removed) {
            if removed {
                report.removed_objects += 1;
                report.removed_bytes += entry.bytes;
            } else {
                report.skipped_objects += 1;
            }
        }
        progress(index * BATCH + batch.len(), chosen);
    }
    go_on()?;
    if !limits.dry_run {
        report.removed_leftovers = objects.remove_leftovers(LEFTOVER_AGE)?;
    }
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

/// The number of objects to remove. `all` is in the order of age.
fn choose(all: &[ListedObject], limits: &Limits, now: SystemTime, total: u64) -> usize {
    let mut left = total;
    let goes = |entry: &ListedObject| {
        let age = age(now, entry);
        let is_old = limits.max_age.is_some_and(|most| age > most);
        let is_excess = limits.max_bytes.is_some_and(|most| left > most);
        let goes = age >= limits.min_age && (is_old || is_excess);
        left -= if goes { entry.bytes } else { 0 };
        goes
    };
    let kept = all.iter().map(goes).position(|goes| !goes);
    kept.unwrap_or(all.len())
}

fn age(now: SystemTime, entry: &ListedObject) -> Duration {
    now.duration_since(entry.modified).unwrap_or_default()
}

/// The time plus `seconds`, which may be negative.
pub(crate) fn shifted(time: SystemTime, seconds: f64) -> SystemTime {
    let by = Duration::from_secs_f64(seconds.abs().min(1e9));
    if seconds >= 0.0 { time + by } else { time - by }
}
