//! The protocol of the core and its helper: lines of JSON. Each request has a number, which its answer repeats.

use serde::{Deserialize, Serialize};
use undercroft_contract::remote::RemoteError;

use crate::store_error::{ObjectStoreError, Result};

const FULL: &str = "lend the store more memory: start mooncake_client on more machines, or add segment=16GiB to the URL";
const NO_WHEEL: &str = "install Mooncake's client beside undercroft: pip install mooncake-transfer-engine, or \
    mooncake-transfer-engine-non-cuda on a machine without CUDA";
const NO_LIBRARY: &str = "install the libraries of Mooncake's client; on Debian and Ubuntu: apt install libibverbs1 librdmacm1 libnuma1";
const NO_SETUP: &str = "check that mooncake_master runs and answers at the address in the URL, and the URL's parameters \
    metadata, protocol, device and host";

/// The first line to a helper, sent with the descriptor of the shared memory. The helper's answer has number 0.
#[derive(Debug, Serialize)]
pub(super) struct HelperStart<'a> {
    /// Bytes of the shared memory.
    pub(super) bytes: u64,
    pub(super) master: &'a str,
    pub(super) metadata: &'a str,
    pub(super) segment: u64,
    pub(super) protocol: &'a str,
    pub(super) device: &'a str,
    pub(super) host: &'a str,
    pub(super) admin: &'a str,
}

/// A request. `at` is an offset in the shared memory.
#[derive(Debug, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Request {
    /// Asks which keys exist. The answer has a 1 or a 0 for each.
    Exist { keys: Vec<String> },
    /// Reads the first `bytes` of an object into the memory. The answer has the number of bytes that were read.
    Get { key: String, at: u64, bytes: u64 },
    /// Writes an object from the memory. The answer is 1 if it was written, 0 if it existed and `if_absent` is set.
    Put {
        key: String,
        at: u64,
        bytes: u64,
        if_absent: bool,
    },
    /// Removes the keys that exist.
    Remove { keys: Vec<String> },
    /// Asks for the bytes of each key's object; -1 if there is no such object.
    Sizes { keys: Vec<String> },
    /// Asks for the names of all objects with the prefix.
    List { prefix: String },
    /// Asks for the bytes of the store's memory: in use, and in all.
    Memory,
}

#[derive(Debug, Serialize)]
pub(super) struct Numbered<'a> {
    pub(super) id: u64,
    #[serde(flatten)]
    pub(super) request: &'a Request,
}

/// The answer to a request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Answer {
    pub(super) id: u64,
    pub(super) values: Vec<i64>,
    pub(super) names: Vec<String>,
    /// The kind of the error; empty if there is none.
    error: String,
    detail: String,
    /// Whether no transfer of the failed request runs any more.
    settled: bool,
}

impl Answer {
    /// The error in the answer.
    pub(super) fn error(&self) -> Option<ObjectStoreError> {
        let kind = match self.error.as_str() {
            "" => return None,
            "not_found" => RemoteError::NotFound,
            "full" => {
                return Some(
                    ObjectStoreError::new(RemoteError::Full, &self.detail).or_advice(FULL),
                );
            }
            "late" => RemoteError::Late,
            "no_wheel" => return Some(self.unusable(NO_WHEEL)),
            "no_library" => return Some(self.unusable(NO_LIBRARY)),
            "no_setup" => return Some(self.unusable(NO_SETUP)),
            _ => RemoteError::Unreachable,
        };
        Some(ObjectStoreError::new(kind, &self.detail))
    }

    /// Whether a transfer may still run, although the request has failed.
    pub(super) fn is_unsettled(&self) -> bool {
        !self.error.is_empty() && !self.settled
    }

    fn unusable(&self, advice: &'static str) -> ObjectStoreError {
        ObjectStoreError {
            advice: Some(advice),
            ..ObjectStoreError::new(RemoteError::Unreachable, &self.detail)
        }
    }

    /// The only value.
    pub(super) fn value(&self) -> Result<i64> {
        match self.values[..] {
            [value] => Ok(value),
            _ => Err(not_understood()),
        }
    }

    /// The values, one for each of `count` names.
    pub(super) fn values(&self, count: usize) -> Result<&[i64]> {
        match self.values.len() == count {
            true => Ok(&self.values),
            false => Err(not_understood()),
        }
    }
}

fn not_understood() -> ObjectStoreError {
    let text = "an answer of Mooncake's client that makes no sense";
    ObjectStoreError::new(RemoteError::Unreachable, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_store_needs_memory_and_no_collection() {
        let full: Answer = serde_json::from_str(r#"{"error": "full", "detail": "-200"}"#).unwrap();
        let error = full.error().unwrap();
        assert_eq!(error.kind, RemoteError::Full);
        assert!(error.advice().contains("more memory") && !error.advice().contains("gc"));
    }
}
