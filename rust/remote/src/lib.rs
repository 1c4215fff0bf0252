//! Remote stores: directories on shared file systems, object stores, Redis.
//!
//! [`Location`] reads a URL, [`open`] makes the [`Objects`] behind it, and [`Pool`] carries out an engine's requests on
//! them, on threads of its own. [`check`], [`gc`], [`contents`] and [`measure`] are for the operator's commands.

mod body;
pub mod check;
#[cfg(feature = "s3")]
mod cloud;
pub mod contents;
mod directory;
pub mod gc;
mod location;
pub mod measure;
mod mooncake;
mod objects;
mod piece;
mod pool;
mod receiver;
#[cfg(feature = "redis")]
mod redis;
mod sealed;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use body::Body;
pub use check::advice;
pub use contents::describe;
pub use location::{Location, LocationError, Scheme};
pub use mooncake::set_python;
pub use objects::{Entry, Objects, Result, StoreError};
pub use pool::{Health, LastResult, Pool};
pub use receiver::Receiver;

/// The settings of a store besides its URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long an object is wanted after its last use (`remote_ttl`). Redis removes it then; elsewhere an object of half
    /// this age that is read becomes new again, so that `undercroft remote gc` removes it late.
    pub ttl: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(3 * 24 * 3600),
        }
    }
}

/// The store at `location`, for commands that look after one: a directory is not made.
///
/// # Errors
/// As [`open`], or if there is no such directory.
pub fn open_existing(
    location: &Location,
    options: Options,
) -> std::result::Result<Arc<dyn Objects>, LocationError> {
    if location.scheme == Scheme::File && !Path::new(&location.path).exists() {
        let reason = "no such directory; check the path, and whether its file system is mounted";
        return Err(location.refused(reason));
    }
    open(location, options)
}

/// The store at `location`. Nothing is asked of the store yet, but a directory is made if its parent is there.
///
/// # Errors
/// If the configuration, the environment included, cannot lead to a store, or this build leaves it out.
pub fn open(
    location: &Location,
    options: Options,
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
