//! Memory for secrets: keys, and blocks while they are encrypted or decrypted. It is outside of core dumps, stays out of
//! swap where RLIMIT_MEMLOCK allows, and is cleared before it is freed.

#![expect(unsafe_code, reason = "pages with other rules than the allocator's")]

use std::hint::black_box;
use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munmap};

/// Bytes in pages of their own.
pub struct SecretBytes {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the pages belong to this value alone, and have no tie to the thread that made them.
unsafe impl Send for SecretBytes {}

// SAFETY: shared references only read.
unsafe impl Sync for SecretBytes {}

impl std::fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} secret bytes", self.len)
    }
}

impl SecretBytes {
    /// `len` zeros, at the start of a page.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn zeros(len: usize) -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let mapped =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len.max(1), protection, flags) }?;
        let base = NonNull::new(mapped.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let bytes = Self { base, len };
        // Failures are ignored. The kernel may lack the advice, and the limit of locked memory is often small.
        // SAFETY: the range is this mapping; the advice keeps its contents.
        let _ = unsafe { madvise(mapped, bytes.mapped(), Advice::LinuxDontDump) };
        // SAFETY: the range is this mapping.
        let _ = unsafe { mlock(mapped, bytes.mapped()) };
        Ok(bytes)
    }

    fn mapped(&self) -> usize {
        self.len.max(1)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has `len` initialised bytes, and lives as long as this value.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the mutable reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

/// Overwrites bytes that are not needed any more.
pub fn clear(bytes: &mut [u8]) {
    bytes.fill(0);
    // Otherwise the compiler could leave the writes out, since nobody reads them.
    black_box(&*bytes);
}

impl Drop for SecretBytes {
    fn drop(&mut self) {
        clear(self.bytes_mut());
        // SAFETY: the mapping is this value's own, and no reference into it outlives the value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.mapped()) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags of the mapping at an address, as `/proc/self/smaps` has them.
    fn flags(address: usize) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_ours = false;
        for line in maps.lines() {
            let range = line.split(' ').next().unwrap().split_once('-');
            let number = |text: &str| usize::from_str_radix(text, 16).ok();
            if let Some((first, end)) = range.and_then(|(a, b)| Some((number(a)?, number(b)?))) {
                is_ours = (first..end).contains(&address);
            } else if is_ours && let Some(flags) = line.strip_prefix("VmFlags:") {
                return flags.split_whitespace().map(str::to_owned).collect();
            }
        }
        panic!("no mapping at {address:x}");
    }

    #[test]
    fn the_bytes_are_outside_of_core_dumps_and_locked_where_the_limit_allows() {
        let secret = SecretBytes::zeros(5000).unwrap();
        assert_eq!(
            (secret.bytes().len(), format!("{secret:?}")),
            (5000, "5000 secret bytes".to_owned())
        );
        let flags = flags(secret.bytes().as_ptr().addr());
        let has = |flag: &str| flags.iter().any(|of| of == flag);
        assert!(has("dd"), "{flags:?}");
        // A page of each secret fits any limit but none.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
        if limit.current.is_none_or(|most| most >= 1 << 20) {
            assert!(has("lo"), "{flags:?}");
        }
    }

    #[test]
    fn cleared_bytes_are_zeros_and_no_bytes_are_a_secret_too() {
        let mut secret = SecretBytes::zeros(3).unwrap();
        secret.bytes_mut().copy_from_slice(&[1, 2, 3]);
        clear(&mut secret.bytes_mut()[1..]);
        assert_eq!(secret.bytes(), [1, 0, 0]);
        assert!(SecretBytes::zeros(0).unwrap().bytes().is_empty());
    }
}
