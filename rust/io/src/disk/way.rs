//! The way to a directory: other users who could lead it elsewhere.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::disk::StoreError;

/// Most links on a way, as the kernel has it.
const LINKS_MAX: usize = 40;

/// The owner of files whose owner is unknown in a user namespace.
const UNMAPPED: u32 = 65534;

/// Looks at each directory and link on the way to a directory. Returns notes about the directories above it that belong
/// to another user, who may put another directory in its place.
///
/// # Errors
/// If a symbolic link on the way belongs to another user.
pub(super) fn check(path: &Path) -> Result<Vec<String>, StoreError> {
    check_for(path, rustix::process::geteuid().as_raw())
}

fn check_for(path: &Path, uid: u32) -> Result<Vec<String>, StoreError> {
    let is_other = |owner: u32| ![uid, 0, UNMAPPED].contains(&owner);
    let mut notes = Vec::new();
    let mut links = 0;
    let mut at = PathBuf::from("/");
    let mut left = names(&std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
    while let Some(name) = left.pop_front() {
        if name == ".." {
            // The links before it are followed by now, so `..` is the directory that the kernel would take.
            at.pop();
            continue;
        }
        let next = at.join(name);
        // A directory that is missing will be made. Other faults are reported when the directory is opened.
        let Ok(found) = fs::symlink_metadata(&next) else {
            break;
        };
        if !found.is_symlink() {
            if !left.is_empty() && is_other(found.uid()) {
                notes.push(format!(
                    "{} above it belongs to uid {}, who may put another directory in its place",
                    next.display(),
                    found.uid()
                ));
            }
            at = next;
            continue;
        }
        if is_other(found.uid()) {
            return Err(StoreError::Link {
                path: path.to_owned(),
                link: next,
                owner: found.uid(),
                uid,
            });
        }
        links += 1;
        let Ok(target) = fs::read_link(&next) else {
            break;
        };
        // The kernel refuses such a path when it is opened.
        if links > LINKS_MAX {
            break;
        }
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        let mut all = names(&target);
        all.append(&mut left);
        left = all;
    }
    Ok(notes)
}

/// The names of a path. `..` is kept: it may follow a link.
fn names(path: &Path) -> VecDeque<OsString> {
    let parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_of_another_user_is_refused_and_a_directory_of_another_user_above_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().canonicalize().unwrap();
        fs::create_dir_all(place.join("a/b/store")).unwrap();
        symlink("b", place.join("a/link")).unwrap();
        symlink("../a/link/store", place.join("a/to-store")).unwrap();
        symlink("loop", place.join("loop")).unwrap();
        let owner = fs::metadata(&place).unwrap().uid();
        for way in [
            "a/b/store",
            "a/link/store",
            "a/to-store",
            "a/new/store",
            "loop/store",
        ] {
            assert_eq!(
                check_for(&place.join(way), owner).unwrap(),
                [""; 0],
                "{way}"
            );
        }
        if owner == 0 {
            // Everybody trusts root.
            for of_other in ["a", "a/b"] {
                std::os::unix::fs::chown(place.join(of_other), Some(1234), None).unwrap();
            }
            for link in ["a/link", "a/to-store"] {
                std::os::unix::fs::lchown(place.join(link), Some(1234), None).unwrap();
            }
        }
        let stranger = if owner == 0 { 1235 } else { owner + 1 };
        let notes = check_for(&place.join("a/b/store"), stranger).unwrap();
        for above in ["a", "a/b"] {
            let above = place.join(above).display().to_string();
            assert!(
                notes
                    .iter()
                    .any(|note| note.starts_with(&format!("{above} above it")))
            );
        }
        assert!(!notes.iter().any(|note| note.contains("a/b/store ")));
        for (way, link) in [("a/link/store", "a/link"), ("a/to-store", "a/to-store")] {
            let refused = check_for(&place.join(way), stranger)
                .unwrap_err()
                .to_string();
            let link = place.join(link).display().to_string();
            assert!(refused.contains(&format!("{link} on the way")), "{refused}");
            assert!(refused.contains("name its target instead"), "{refused}");
        }
    }
}
