//! Remote stores: directories on shared file systems, object stores, Redis, Mooncake.
//!
//! [`Location`] reads a URL, [`open`] makes the [`Objects`] behind it, and [`RequestPool`] carries out an engine's requests
//! on them, on threads of its own. [`check`], [`gc`], [`contents`] and [`measure`] are for the operator's commands.

mod body;
pub mod check;
#[cfg(feature = "s3")]
mod cloud;
pub mod contents;
mod directory;
pub mod finding;
pub mod gc;
mod location;
pub mod measure;
mod mooncake;
mod objects;
mod pool;
mod receiver;
mod redact;
#[cfg(feature = "redis")]
mod redis;
mod renewals;
mod sealed;
mod store_error;
mod unusable;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use undercroft_contract::remote::RemoteConfig;

pub use body::ObjectBody;
pub use contents::describe;
pub use location::{Location, LocationError, Scheme};
pub use mooncake::set_python;
pub use objects::{ListedObject, Objects};
pub use pool::{LastResult, RequestPool, StoreHealth};
pub use receiver::Receiver;
pub use store_error::{ObjectStoreError, Result, advice};

/// The settings of a store besides its URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteOptions {
    /// Time to live of an object after its last use (`remote_ttl`). Redis then removes the object. In other stores, an
    /// object of half this age becomes new again when it is read, so that `undercroft remote gc` removes it later.
    pub ttl: Duration,
    /// Most bytes a second of old objects that are put again because they were read; 0 for no limit. `None` if this
    /// host only reads: then no object becomes new in any store.
    pub renew_rate: Option<u64>,
    /// Whether the directory, its directories and its objects may belong to other users, or be written by them
    /// (`remote_any_owner`). Stores of other kinds have no owners.
    pub any_owner: bool,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(3 * 24 * 3600),
            renew_rate: Some(RemoteConfig::default().write_rate),
            any_owner: false,
        }
    }
}

/// The store at `location`, for an operator's commands. Does not make a directory.
///
/// # Errors
/// The errors of [`open`], or if there is no such directory.
pub fn open_existing(
    location: &Location,
    options: RemoteOptions,
) -> std::result::Result<Arc<dyn Objects>, LocationError> {
    if location.scheme == Scheme::File && !Path::new(&location.path).exists() {
        let reason = "no such directory; check the path, and whether its file system is mounted";
        return Err(location.refused(reason));
    }
    open(location, options)
}

/// The store at `location`, for an engine, whose start it neither delays nor prevents. If a directory's file system is
/// not mounted yet, or if the environment cannot be used, the operations fail with the reason.
///
/// # Errors
/// If this build does not support the kind of store.
pub fn open_for_engine(
    location: &Location,
    options: RemoteOptions,
) -> std::result::Result<Arc<dyn Objects>, LocationError> {
    if location.scheme == Scheme::File {
        let store = directory::DirectoryStore::later(location, options);
        return Ok(Arc::new(store));
    }
    match open(location, options) {
        Err(error) if is_supported(location.scheme) => {
            Ok(Arc::new(unusable::UnusableStore::new(location, &error)))
        }
        opened => opened,
    }
}

/// Why an engine could not use the store at `location` now; `None` if it probably could. Sends no request to the store,
/// and makes no directory.
///
/// # Errors
/// The errors of [`open_for_engine`].
pub fn examine(
    location: &Location,
    options: RemoteOptions,
) -> std::result::Result<Option<LocationError>, LocationError> {
    let found = match location.scheme {
        Scheme::File => directory::examine(location, options),
        _ => open(location, options).map(drop),
    };
    match found {
        Err(error) if !is_supported(location.scheme) => Err(error),
        found => Ok(found.err()),
    }
}

fn is_supported(scheme: Scheme) -> bool {
    match scheme {
        Scheme::S3 | Scheme::Gs | Scheme::Az => cfg!(feature = "s3"),
        Scheme::Redis | Scheme::Rediss => cfg!(feature = "redis"),
        Scheme::File | Scheme::Mooncake => true,
    }
}

/// The store at `location`. Sends no request to the store yet. A directory is made if its parent exists.
///
/// # Errors
/// If the configuration or the environment cannot be used, or if this build does not support the kind of store.
pub fn open(
    location: &Location,
    options: RemoteOptions,
) -> std::result::Result<Arc<dyn Objects>, LocationError> {
    match location.scheme {
        Scheme::File => Ok(Arc::new(directory::DirectoryStore::open(
            location, options,
        )?)),
        #[cfg(feature = "s3")]
        Scheme::S3 | Scheme::Gs | Scheme::Az => {
            Ok(Arc::new(cloud::CloudStore::open(location, options)?))
        }
        #[cfg(feature = "redis")]
        Scheme::Redis | Scheme::Rediss => Ok(Arc::new(redis::RedisStore::open(location, options)?)),
        Scheme::Mooncake => Ok(Arc::new(mooncake::MooncakeStore::open(location)?)),
        #[cfg(not(all(feature = "s3", feature = "redis")))]
        scheme => {
            let feature = match scheme {
                Scheme::Redis | Scheme::Rediss => "remote-redis",
                _ => "remote-s3",
            };
            Err(location.refused(format_args!(
                "this undercroft was built without the feature {feature}; install a wheel that has it, or use a store of \
                 another kind, such as file:///mnt/shared/undercroft"
            )))
        }
    }
}
