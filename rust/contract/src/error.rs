//! Errors of the engine. Messages name the finding and the remedy.

use thiserror::Error;

use crate::pages::PAGE_BYTES_MAX;
use crate::size::Bytes;
use crate::tier::TENANTS_MAX;

/// A namespace cannot be registered.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegisterError {
    /// A number makes no sense.
    #[error("{key} is {value}; allowed: {allowed}")]
    Value {
        /// Name of the value.
        key: &'static str,
        /// The refused value.
        value: u64,
        /// The allowed values.
        allowed: &'static str,
    },
    /// A payload is larger than a page of the region that should hold it.
    #[error(
        "group {group} has payloads of {} (one block, all ranks), and the largest slot of {region} has {}; {}",
        Bytes(*payload_bytes),
        Bytes(*page_bytes),
        larger_slots(option, *needed)
    )]
    PayloadTooLarge {
        /// Index of the group.
        group: usize,
        /// Bytes of the group's payload.
        payload_bytes: u64,
        /// "the arena" or the data file.
        region: &'static str,
        /// The size that would fit.
        page_bytes: u64,
        /// The option to change.
        option: &'static str,
        /// The least value of the option whose slots are large enough; `None` if no slot is.
        needed: Option<u64>,
    },
    /// The digest is that of a namespace that is registered already, with another description, or with other groups or
    /// sizes for the same one.
    #[error("namespace {digest} is registered with other groups; use another namespace_salt")]
    Conflict {
        /// The digest, hexadecimal.
        digest: String,
    },
    /// The description is too long for a directory's namespace table.
    #[error(
        "the description of the namespace has {bytes} bytes and does not fit an entry of {entry_bytes} bytes; describe its \
         longest parts by a digest"
    )]
    DescriptionTooLong {
        /// Bytes of the description.
        bytes: usize,
        /// Size of an entry.
        entry_bytes: usize,
    },
    /// There is no room for another namespace.
    #[error(
        "sessions use all of the {count} namespaces that an engine has at most; end some of them, or use another engine"
    )]
    TooMany {
        /// The number of namespaces.
        count: usize,
    },
    /// The session's share of the tiers is too large beside those of other sessions.
    #[error(
        "tenant_share {} does not fit: other namespaces of this cache have {} already, and {TENANTS_MAX} at most may have \
         shares; lower tenant_share here or there",
        percent(*.asked), percent(*.others)
    )]
    ShareTooLarge {
        /// The share that the session asks for, in thousandths.
        asked: u16,
        /// The sum of the shares of other namespaces with sessions, in thousandths.
        others: u16,
    },
    /// The engine has panicked and is not entered any more.
    #[error("the engine has failed; its panic is in the log")]
    Broken,
}

/// A share in thousandths, as an operator writes it.
fn percent(share: u16) -> String {
    format!("{}%", f64::from(share) / 10.0)
}

/// How an operator gets larger slots.
fn larger_slots(option: &str, needed: Option<u64>) -> String {
    match needed {
        Some(needed) => format!("set {option} to at least {}", Bytes(needed)),
        None => format!(
            "no slot has more than {}, whatever {option} is: give vLLM a smaller --block-size, or fewer ranks to one engine",
            Bytes(PAGE_BYTES_MAX)
        ),
    }
}
