//! Opening a directory whose filesystem may hang, as a frozen one or NFS without its server does.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use undercroft_contract::log::{Level, say};

use super::names::failed;
use super::open::{Directory, Examination, StoreOptions, examine, open_if};
use crate::disk::StoreError;
use crate::within;

/// How long a start waits for a directory.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// After this time the log names the directory that is waited for.
    pub silent: Duration,
    /// After this time the start goes on without a directory that has not taken the first write. These first
    /// operations are few and small, whatever the size of the store.
    pub limit: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            silent: Duration::from_secs(5),
            limit: Duration::from_secs(30),
        }
    }
}

/// The messages of the thread that opens a directory.
enum Opening {
    /// The filesystem answers. The rest, such as the allocation of a large store, takes the time that it takes.
    Answers,
    Ended(Box<Result<Directory, StoreError>>),
}

/// Like [`open`](super::open::open), on a thread of its own. If the filesystem does not answer in time, the thread goes
/// on alone, and changes no store.
///
/// # Errors
/// As [`open`](super::open::open), and [`StoreError::Hangs`].
pub fn open_within(
    path: &Path,
    options: StoreOptions,
    store_id: u64,
    patience: Patience,
) -> Result<Directory, StoreError> {
    let place = path.to_owned();
    let tell = |line| say(Level::Warning, line);
    watched(path, patience, tell, move |sender| {
        let is_wanted = || sender.send(Opening::Answers).is_ok();
        open_if(&place, options, store_id, is_wanted)
    })
}

/// Like [`examine`], on a thread of its own.
///
/// # Errors
/// As [`examine`], and [`StoreError::Hangs`].
pub fn examine_within(
    path: &Path,
    options: StoreOptions,
    patience: Patience,
) -> Result<Examination, StoreError> {
    let place = path.to_owned();
    let examined = within(patience.limit, move || examine(&place, options));
    examined.unwrap_or_else(|| Err(hangs(path, patience.limit)))
}

fn hangs(path: &Path, waited: Duration) -> StoreError {
    StoreError::Hangs {
        path: path.to_owned(),
        waited,
    }
}

fn watched(
    path: &Path,
    patience: Patience,
    mut tell: impl FnMut(String),
    open: impl FnOnce(&SyncSender<Opening>) -> Result<Directory, StoreError> + Send + 'static,
) -> Result<Directory, StoreError> {
    // Nothing is queued: a message that was sent has been received, so that the thread knows whether it is waited for.
    let (sender, steps) = sync_channel(0);
    std::thread::Builder::new()
        .name("undercroft-open".to_owned())
        .spawn(move || {
            let opened = open(&sender);
            // If nobody waits any more, this closes the directory.
            let _ = sender.send(Opening::Ended(Box::new(opened)));
        })
        .map_err(failed(path, "start a thread"))?;
    let begun = Instant::now();
    let (mut answers, mut pause) = (false, patience.silent);
    loop {
        let at = if answers {
            pause
        } else {
            pause.min(patience.limit)
        };
        match steps.recv_timeout(at.saturating_sub(begun.elapsed())) {
            Ok(Opening::Answers) => answers = true,
            Ok(Opening::Ended(opened)) => return *opened,
            Err(RecvTimeoutError::Disconnected) => {
                // The panic hook has reported it.
                return Err(failed(path, "open it")(std::io::Error::other("a panic")));
            }
            Err(RecvTimeoutError::Timeout) if !answers && at == patience.limit => {
                return Err(hangs(path, patience.limit));
            }
            Err(RecvTimeoutError::Timeout) => {
                tell(waits(path, begun.elapsed(), answers, patience));
                pause *= 2;
            }
        }
    }
}

/// The line about a directory that is waited for.
fn waits(path: &Path, since: Duration, answers: bool, patience: Patience) -> String {
    let (path, since) = (path.display(), since.as_secs());
    if answers {
        return format!(
            "undercroft: the start has waited {since} s for disk_path {path}, whose store is made ready"
        );
    }
    format!(
        "undercroft: the start has waited {since} s for the filesystem of disk_path {path}, and waits for {} s at most",
        patience.limit.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use undercroft_contract::pages::CAPACITY_MIN;

    use super::*;
    use crate::disk::open::open;

    const SHORT: Patience = Patience {
        silent: Duration::from_millis(20),
        limit: Duration::from_millis(100),
    };

    #[test]
    fn a_filesystem_that_does_not_answer_is_waited_for_no_longer_than_the_limit() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("cache");
        let (release, hung) = channel::<()>();
        let (tell, told) = channel();
        let place = path.clone();
        let mut said = Vec::new();
        let refused = watched(
            &path,
            SHORT,
            |line| said.push(line),
            move |sender| {
                let _released = hung.recv();
                let options = StoreOptions::from(CAPACITY_MIN);
                let opened = open_if(&place, options, 1, || sender.send(Opening::Answers).is_ok());
                tell.send(place.join("super").exists()).unwrap();
                opened
            },
        );
        let refused = refused.unwrap_err();
        assert!(refused.may_pass() && matches!(refused, StoreError::Hangs { .. }));
        assert!(refused.to_string().contains(path.to_str().unwrap()));
        let waited = format!("for the filesystem of disk_path {}", path.display());
        assert!(said[0].contains(&waited), "{said:?}");
        // The thread makes no store that nobody wants, and leaves the directory free.
        drop(release);
        assert!(!told.recv().unwrap());
        let end = Instant::now() + Duration::from_secs(30);
        while let Err(error) = open(&path, CAPACITY_MIN, 2) {
            assert!(Instant::now() < end, "{error}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_store_that_takes_long_is_waited_for() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("cache");
        let place = path.clone();
        let mut said = Vec::new();
        let opened = watched(
            &path,
            SHORT,
            |line| said.push(line),
            move |sender| {
                sender.send(Opening::Answers).unwrap();
                std::thread::sleep(2 * SHORT.limit);
                open(&place, CAPACITY_MIN, 1)
            },
        );
        assert_eq!(opened.unwrap().path, path);
        assert!(said[0].contains("whose store is made ready"), "{said:?}");
        let again = open_within(&path, CAPACITY_MIN.into(), 1, SHORT);
        assert!(
            again.is_ok(),
            "the directory is free, and is opened: {again:?}"
        );
    }
}
