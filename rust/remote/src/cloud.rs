//! `s3://`, `gs://`, `az://`: object stores, by the crate `object_store`.
//!
//! Requests run on a runtime of two threads. The caller waits for them, with limits of this module. Bodies are not
//! signed: each object has checksums, and TLS protects bodies in transit.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::{StreamExt, TryStreamExt};
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};
use tokio::runtime::{Builder, Runtime};
use undercroft_contract::remote::RemoteError;

use crate::RemoteOptions;
use crate::body::ObjectBody;
use crate::directory::seconds_between;
use crate::location::{Location, LocationError};
use crate::objects::{ListedObject, Objects};
use crate::receiver::Receiver;
use crate::redact::redacted;
use crate::store_error::{ObjectStoreError, Result};
use client::{CLOCK, CLOCK_WORDS, ROLES, StoreClient, client, credentials, reach};

mod client;
mod endpoint;
mod http;
mod profile;

/// Most calls at a time: this many gets of 16 MiB fill a fast network, and more do not make a slow network faster.
const PARALLEL: usize = 32;
/// Requests of one call at a time.
const REQUESTS: usize = 64;
/// Threads of the runtime.
const THREADS: usize = 2;

/// A call is late after this time without a byte.
const STALL: Duration = Duration::from_secs(1);
/// A get ends within this time and the time of its bytes at this rate in bytes a second: a server that sends a byte now and
/// then is never without one.
const GET_LIMIT: Duration = Duration::from_secs(5);
const GET_RATE: u64 = 1 << 20;
/// A put ends within this time and the time of its bytes at this rate in bytes a second.
const PUT_LIMIT: Duration = Duration::from_secs(5);
const PUT_RATE: u64 = 4 << 20;
/// A list, or the operator's first request, which may have to fetch credentials.
const PATIENT: Duration = Duration::from_secs(20);
/// Attempts to remove objects.
const REMOVALS: usize = 3;

/// Objects of a bucket or a container.
#[derive(Debug)]
pub(crate) struct CloudStore {
    name: &'static str,
    /// The remedy if the store refuses the credentials, or if there are none.
    credentials: &'static str,
    /// The remedy if the store cannot be reached.
    reach: &'static str,
    exposure: Option<String>,
    store: Arc<dyn ObjectStore>,
    prefix: String,
    renew_after: Duration,
    renew_rate: Option<u64>,
    /// `None` only during the drop.
    runtime: Option<Runtime>,
}

impl CloudStore {
    pub(crate) fn open(
        location: &Location,
        options: RemoteOptions,
    ) -> std::result::Result<Self, LocationError> {
        let StoreClient {
            name,
            store,
            exposure,
        } = client(location)?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("undercroft-http")
            .enable_all()
            .build()
            .map_err(|error| location.refused(error))?;
        Ok(Self {
            name,
            credentials: credentials(location.scheme),
            reach: reach(location.scheme),
            exposure,
            store,
            prefix: location.path.clone(),
            renew_after: options.ttl / 2,
            renew_rate: options.renew_rate,
            runtime: Some(runtime),
        })
    }

    fn path(&self, path: &str) -> Path {
        if self.prefix.is_empty() {
            Path::from(path)
        } else {
            Path::from(format!("{}/{path}", self.prefix))
        }
    }

    /// The name below the store's prefix.
    fn below<'p>(&self, path: &'p Path) -> Option<&'p str> {
        let prefix = Path::from(self.prefix.as_str());
        let rest = path.as_ref().strip_prefix(prefix.as_ref())?;
        Some(rest.strip_prefix('/').unwrap_or(rest))
    }

    fn wait<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let runtime = self.runtime.as_ref().expect("only dropping takes it");
        runtime.block_on(work).map_err(|error| {
            let is_role = ROLES.iter().any(|host| error.detail.contains(host));
            let is_clock = CLOCK_WORDS.iter().any(|word| error.detail.contains(word));
            match error.kind {
                _ if is_clock => error.or_advice(CLOCK),
                RemoteError::Denied => error.or_advice(self.credentials),
                _ if is_role => error.or_advice(self.credentials),
                RemoteError::Unreachable => error.or_advice(self.reach),
                _ => error,
            }
        })
    }

    async fn head(&self, path: &Path, limit: Duration) -> Result<Option<ObjectMeta>> {
        match again(limit, || self.store.head(path)).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind == RemoteError::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn receive(&self, path: &Path, receiver: &mut Receiver<'_>) -> Result<()> {
        // Without a range, the unwanted bytes would have to be read, or the connection closed.
        let range = Some(GetRange::Bounded(0..receiver.wanted()));
        let options = || GetOptions {
            range: range.clone(),
            ..GetOptions::default()
        };
        let limit = GET_LIMIT + Duration::from_secs(receiver.wanted() / GET_RATE);
        let end = tokio::time::Instant::now() + limit;
        let found = again(STALL, || self.store.get_opts(path, options())).await?;
        if receiver.wants_all() && self.renews(found.meta.last_modified.into()) {
            receiver.keep();
        }
        let mut stream = found.into_stream();
        while let Some(bytes) = within(STALL, stream.next()).await? {
            if tokio::time::Instant::now() > end {
                let detail = format!("the object takes longer than {} s", limit.as_secs());
                return Err(ObjectStoreError::new(RemoteError::Late, detail));
            }
            receiver.take(&bytes.map_err(store_error)?)?;
        }
        Ok(())
    }

    /// If two processes remove an object at once, some stores report a failure to one of them.
    async fn remove(&self, mut paths: Vec<Path>) -> Result<()> {
        for _ in 1..REMOVALS {
            match self.remove_once(paths.clone()).await {
                Err(error) if error.kind == RemoteError::Unreachable => {}
                ended => return ended,
            }
            let left = paths.iter().map(|path| async move {
                Result::Ok(self.head(path, PATIENT).await?.map(|_| path.clone()))
            });
            let left = futures_util::stream::iter(left).buffer_unordered(REQUESTS);
            paths = left
                .try_filter_map(async |path| Ok(path))
                .try_collect()
                .await?;
            if paths.is_empty() {
                return Ok(());
            }
        }
        self.remove_once(paths).await
    }

    async fn remove_once(&self, paths: Vec<Path>) -> Result<()> {
        let paths = futures_util::stream::iter(paths.into_iter().map(Ok)).boxed();
        let mut removed = self.store.delete_stream(paths);
        while let Some(result) = within(PATIENT, removed.next()).await? {
            match result {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(store_error(error)),
            }
        }
        Ok(())
    }
}

impl Drop for CloudStore {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Objects for CloudStore {
    fn name(&self) -> &'static str {
        self.name
    }

    fn parallel(&self) -> usize {
        PARALLEL
    }

    /// Sends a list request: unlike the answer to a HEAD, its answer names the error, such as a missing bucket.
    fn greet(&self) -> Result<()> {
        let path = self.path("check");
        let listed = self.list("check", &mut |_| false);
        match listed {
            // The credentials may allow only reads and writes, not lists.
            Err(error) if error.kind == RemoteError::Denied => self
                .wait(self.head(&path, PATIENT))
                .map(drop)
                .map_err(|_| error),
            listed => listed,
        }
    }

    fn probe(&self, paths: &[String]) -> Result<u64> {
        let asked = paths.iter().enumerate().map(|(index, path)| async move {
            let found = self.head(&self.path(path), STALL).await?;
            Ok(u64::from(found.is_some()) << index)
        });
        self.wait(async {
            futures_util::stream::iter(asked)
                .buffer_unordered(REQUESTS)
                .try_fold(0, |bits, bit| async move { Ok(bits | bit) })
                .await
        })
    }

    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()> {
        let path = self.path(path);
        self.wait(self.receive(&path, receiver))
    }

    fn put(&self, path: &str, body: &ObjectBody<'_>, if_absent: bool) -> Result<bool> {
        let limit = PUT_LIMIT + Duration::from_secs(body.len() / PUT_RATE);
        let payload = PutPayload::from(body.to_vec());
        let mode = if if_absent {
            PutMode::Create
        } else {
            PutMode::Overwrite
        };
        let options = PutOptions::from(mode);
        let path = self.path(path);
        let put = self.wait(again(limit, || {
            (self.store).put_opts(&path, payload.clone(), options.clone())
        }));
        match put {
            Ok(_) => Ok(true),
            Err(error) if error.detail == ALREADY_THERE => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn delete(&self, paths: &[String]) -> Result<()> {
        let paths = paths.iter().map(|path| self.path(path)).collect();
        self.wait(self.remove(paths))
    }

    fn list(&self, below: &str, each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()> {
        let below = self.path(below);
        let below = (!below.as_ref().is_empty()).then_some(&below);
        self.wait(async {
            let mut found = self.store.list(below);
            while let Some(object) = within(PATIENT, found.next()).await? {
                let object = object.map_err(store_error)?;
                let Some(path) = self.below(&object.location) else {
                    continue;
                };
                let entry = ListedObject {
                    path: path.to_owned(),
                    bytes: object.size,
                    modified: object.last_modified.into(),
                };
                if !each(entry) {
                    break;
                }
            }
            Ok(())
        })
    }

    fn delete_unchanged(&self, entries: &[ListedObject]) -> Result<Vec<bool>> {
        let asked = entries.iter().map(|entry| async move {
            let found = self.head(&self.path(&entry.path), PATIENT).await?;
            // A HEAD returns whole seconds. A list may return fractions.
            let same = |found: ObjectMeta| {
                whole_seconds(found.last_modified.into()) == whole_seconds(entry.modified)
                    && found.size == entry.bytes
            };
            Result::Ok(found.is_some_and(same))
        });
        self.wait(async {
            let stream = futures_util::stream::iter(asked).buffered(REQUESTS);
            let same: Vec<bool> = stream.try_collect().await?;
            let chosen = entries.iter().zip(&same).filter(|(_, same)| **same);
            let paths: Vec<Path> = chosen.map(|(entry, _)| self.path(&entry.path)).collect();
            if !paths.is_empty() {
                self.remove(paths).await?;
            }
            Ok(same)
        })
    }

    /// From the time of a new object, which has whole seconds.
    fn clock_skew(&self) -> Result<Option<f64>> {
        // The object has a unique name: another process may check at the same time.
        let path = self.path(&crate::check::sample_path());
        self.wait(async {
            let before = SystemTime::now();
            let payload = || PutPayload::from_static(b"clock");
            again(PATIENT, || self.store.put(&path, payload())).await?;
            let between = before + before.elapsed().unwrap_or_default() / 2;
            let found = again(PATIENT, || self.store.head(&path)).await?;
            self.remove(vec![path.clone()]).await?;
            let skew = seconds_between(between, found.last_modified.into());
            // The store cuts the fraction off.
            Ok(Some(if (-1.0..=0.0).contains(&skew) {
                0.0
            } else {
                skew
            }))
        })
    }

    fn exposure(&self) -> Option<String> {
        self.exposure.clone()
    }

    fn renews(&self, modified: SystemTime) -> bool {
        (SystemTime::now().duration_since(modified)).is_ok_and(|age| age > self.renew_after)
    }

    fn renew_rate(&self) -> Option<u64> {
        self.renew_rate
    }
}

/// The detail of the error if an object of the name exists.
const ALREADY_THERE: &str = "an object of that name exists";

fn whole_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// The result of `work`, or the error that it is late.
async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(limit, work).await.map_err(|_| {
        let detail = format!("no answer within {} s", limit.as_secs());
        ObjectStoreError::new(RemoteError::Late, detail)
    })
}

/// The result of a request. The request is repeated once if the server has closed its connection, or has an internal
/// error: Ceph reports such an error for a read of an object that is being replaced.
async fn again<T, F>(limit: Duration, request: impl Fn() -> F) -> Result<T>
where
    F: Future<Output = object_store::Result<T>>,
{
    let first = within(limit, request()).await?;
    let result = match first {
        Err(error) if is_closed_connection(&error) || status(&error) == Some(500) => {
            within(limit, request()).await?
        }
        result => result,
    };
    result.map_err(store_error)
}

fn causes(error: &object_store::Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |error| error.source())
}

fn http_kind(error: &object_store::Error) -> Option<HttpErrorKind> {
    causes(error).find_map(|cause| Some(cause.downcast_ref::<HttpError>()?.kind()))
}

fn is_closed_connection(error: &object_store::Error) -> bool {
    use HttpErrorKind::{Interrupted, Request};
    matches!(http_kind(error), Some(Request | Interrupted))
}

/// The text before the status in an error of the crate.
const STATUS_WORDS: &str = "non-2xx status code: ";

/// The status of a failed response. The crate has it only in the error's text.
fn status(error: &object_store::Error) -> Option<u16> {
    causes(error).find_map(|cause| {
        let text = cause.to_string();
        let digits = text.get(text.find(STATUS_WORDS)? + STATUS_WORDS.len()..)?;
        let digits = digits.get(..3)?;
        digits.parse().ok()
    })
}

fn store_error(error: object_store::Error) -> ObjectStoreError {
    use object_store::Error::{
        AlreadyExists, NotFound, PermissionDenied, Precondition, Unauthenticated,
    };
    let detail = || causes(&error).last().map_or_else(String::new, detail_of);
    let kind = match &error {
        AlreadyExists { .. } | Precondition { .. } => {
            return ObjectStoreError::new(RemoteError::Unreachable, ALREADY_THERE);
        }
        // Without its bucket the store cannot be used.
        NotFound { .. } if detail().contains("NoSuchBucket") => RemoteError::Unreachable,
        NotFound { .. } => RemoteError::NotFound,
        PermissionDenied { .. } | Unauthenticated { .. } => RemoteError::Denied,
        _ => match (status(&error), http_kind(&error)) {
            (Some(429 | 503), _) => RemoteError::Throttled,
            (Some(401 | 403), _) => RemoteError::Denied,
            (Some(507), _) => RemoteError::Full,
            // The object is shorter than the requested range.
            (Some(416), _) => RemoteError::Corrupt,
            (_, Some(HttpErrorKind::Timeout)) => RemoteError::Late,
            _ if detail().contains("QuotaExceeded") => RemoteError::Full,
            _ => RemoteError::Unreachable,
        },
    };
    ObjectStoreError::new(kind, detail())
}

/// The last cause of an error, on one line. Of an answer in XML: its code and message.
fn detail_of(error: &(dyn std::error::Error + 'static)) -> String {
    // This comes before the text is cut to its length.
    let text = redacted(&error.to_string());
    let text = text.strip_prefix("Server returned ").unwrap_or(&text);
    let text = text.strip_prefix(STATUS_WORDS).unwrap_or(text);
    let of = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        Some(rest.split_once("</")?.0).filter(|value| !value.is_empty())
    };
    let said = [of("Code"), of("Message")].into_iter().flatten();
    let said = said.collect::<Vec<_>>().join(": ");
    let shown = match said.as_str() {
        "" => text,
        said => &format!("{}{said}", text.split('<').next().unwrap_or_default()),
    };
    let words: Vec<&str> = shown.split_whitespace().collect();
    let mut line = words.join(" ");
    if let Some((end, _)) = line.char_indices().nth(300) {
        line.truncate(end);
    }
    line
}
