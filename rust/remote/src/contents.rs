//! The contents of a store, by namespace.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::Serialize;
use undercroft_contract::key::NamespaceDigest;
use undercroft_contract::remote::key::{NamespacePrefix, ObjectName};

use crate::body::ObjectBody;
use crate::gc::shifted;
use crate::objects::Objects;
use crate::receiver::Receiver;
use crate::store_error::Result;

/// Most bytes of a description.
const DESCRIPTION_MAX: u64 = 1 << 20;

/// A namespace in a store.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredNamespace {
    /// The first digits of the namespace's digest.
    pub digest: String,
    /// The namespace's description; `None` if no engine has written it.
    pub description: Option<String>,
    /// Number of the namespace's objects.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Age of the oldest object in seconds.
    pub oldest_s: f64,
    /// Age of the newest object in seconds.
    pub newest_s: f64,
}

/// The contents of a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StoreContents {
    /// Number of undercroft's objects.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Other objects below the prefix: undercroft does not read or remove them.
    pub other_objects: u64,
    /// The namespaces, by digest.
    pub namespaces: Vec<StoredNamespace>,
}

/// Lists the store.
///
/// # Errors
/// If the store fails.
pub fn contents(objects: &dyn Objects) -> Result<StoreContents> {
    // With credentials for reads only, the clock cannot be read.
    let skew = objects.clock_skew().unwrap_or(None).unwrap_or(0.0);
    let now = shifted(SystemTime::now(), skew);
    let mut found = StoreContents::default();
    let mut spaces: BTreeMap<NamespacePrefix, StoredNamespace> = BTreeMap::new();
    let mut described = Vec::new();
    objects.list("", &mut |entry| {
        let Some(name) = ObjectName::parse(&entry.path) else {
            match NamespacePrefix::of_description(&entry.path) {
                Some(namespace) => described.push(namespace),
                None => found.other_objects += 1,
            }
            return true;
        };
        let age = now.duration_since(entry.modified).unwrap_or_default();
        let age = age.as_secs_f64();
        let space = spaces
            .entry(name.namespace)
            .or_insert_with(|| StoredNamespace {
                digest: name.namespace.to_string(),
                description: None,
                objects: 0,
                bytes: 0,
                oldest_s: age,
                newest_s: age,
            });
        space.objects += 1;
        space.bytes += entry.bytes;
        space.oldest_s = space.oldest_s.max(age);
        space.newest_s = space.newest_s.min(age);
        true
    })?;
    // Not while listing: the namespaces with objects are known only at its end, and the others' texts are not wanted.
    for namespace in described {
        if let Some(space) = spaces.get_mut(&namespace) {
            let mut receiver = Receiver::bytes(DESCRIPTION_MAX);
            objects.get(&namespace.description_path(), &mut receiver)?;
            let text = String::from_utf8_lossy(&receiver.into_bytes()).into_owned();
            space.description = Some(text);
        }
    }
    found.namespaces = spaces.into_values().collect();
    found.objects = found.namespaces.iter().map(|space| space.objects).sum();
    found.bytes = found.namespaces.iter().map(|space| space.bytes).sum();
    Ok(found)
}

/// Writes a namespace's description to the store, for people. No engine reads it.
///
/// # Errors
/// If the store fails.
pub fn describe(objects: &dyn Objects, digest: &NamespaceDigest, description: &str) -> Result<()> {
    // The store may have to start first.
    objects.greet()?;
    let path = digest.to_prefix().description_path();
    objects.put(&path, &ObjectBody::bytes(description.as_bytes()), true)?;
    Ok(())
}
