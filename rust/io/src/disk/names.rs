//! The names of a directory's files, and the error of a call of the system on one.

use std::path::Path;

use crate::disk::StoreError;

pub(super) const SUPER: &str = "super";
pub(super) const SUPER_NEW: &str = "super.new";
pub(super) const TABLE: &str = "table";
pub(super) const TABLE_NEW: &str = "table.new";
pub(super) const DATA: &str = "data";
pub(super) const LOCK: &str = "lock";

/// The error of an action, with a hint where the cause is known.
pub(super) fn failed<'a>(
    path: &'a Path,
    action: &'static str,
) -> impl FnOnce(std::io::Error) -> StoreError + 'a {
    move |source| StoreError::Io {
        path: path.to_owned(),
        action,
        hint: match source.kind() {
            std::io::ErrorKind::PermissionDenied => "; give this user read and write access to it",
            std::io::ErrorKind::ReadOnlyFilesystem => "; mount the filesystem writable",
            std::io::ErrorKind::StorageFull => "; free space there, or lower disk_capacity",
            _ => "",
        },
        source,
    }
}
