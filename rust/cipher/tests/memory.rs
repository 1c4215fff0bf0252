//! What a core dump of this process would hold: neither the key of a key file, nor a block that was decrypted from disk or
//! from a remote store. The only test of this program, so that no other test's memory is searched.

#![expect(clippy::unwrap_used, reason = "a failed step of a test fails the test")]

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use undercroft_cipher::{AesGcm, Keys};
use undercroft_contract::cipher::{Binding, PayloadCipher, SEAL_BYTES};
use undercroft_io::secret::SecretBytes;

const KEY: usize = 32;
/// Bytes of a block.
const BLOCK: usize = 1 << 20;
/// Bytes of memory that are searched at once.
const PIECE: usize = 1 << 20;

/// A mapping of this process: its range, and the flags that `/proc/self/smaps` shows.
struct Mapping {
    first: u64,
    end: u64,
    flags: Vec<String>,
}

impl Mapping {
    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|of| of == flag)
    }
}

/// The mappings that can be read.
fn mappings() -> Vec<Mapping> {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut found: Vec<Mapping> = Vec::new();
    for line in text.lines() {
        let (range, rest) = line.split_once(' ').unwrap_or((line, ""));
        let range = range.split_once('-');
        if let Some((first, end)) = range.and_then(|(a, b)| Some((number(a)?, number(b)?))) {
            let flags = Vec::new();
            found.push(Mapping { first, end, flags });
            // The kernel's own pages cannot be read.
            if !rest.starts_with('r') || rest.ends_with("[vvar]") || rest.contains("[vvar_") {
                found.last_mut().unwrap().end = first;
            }
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            found.last_mut().unwrap().flags = flags.split_whitespace().map(str::to_owned).collect();
        }
    }
    found
}

/// The mappings with these bytes. `room` is secret, so that the search does not find its own copies.
fn with(sought: &SecretBytes, room: &mut SecretBytes) -> Vec<Mapping> {
    let memory = File::open("/proc/self/mem").unwrap();
    let sought = sought.bytes();
    let mut has = |mapping: &Mapping| {
        let mut at = mapping.first;
        while at < mapping.end {
            let len = (mapping.end - at).min(PIECE as u64) as usize;
            let piece = &mut room.bytes_mut()[..len];
            // A page that cannot be read is in no core dump either.
            if memory.read_exact_at(piece, at).is_ok()
                && piece.windows(sought.len()).any(|window| window == sought)
            {
                return true;
            }
            at += len as u64 - if len == PIECE { sought.len() as u64 } else { 0 };
        }
        false
    };
    mappings()
        .into_iter()
        .filter(|mapping| has(mapping))
        .collect()
}

/// The names of the mappings that a core dump would have, with these bytes.
fn dumped(sought: &SecretBytes, room: &mut SecretBytes) -> Vec<String> {
    let found = with(sought, room).into_iter();
    let found = found.filter(|mapping| !mapping.has("dd"));
    found
        .map(|mapping| format!("{:x}-{:x}", mapping.first, mapping.end))
        .collect()
}

/// Writes random bytes, which this process has not seen, to a file.
fn random_file(path: &Path, bytes: usize) {
    let script = format!(
        "umask 077; head -c {bytes} /dev/urandom > {}",
        path.display()
    );
    let status = Command::new("sh").args(["-c", &script]).status();
    assert!(status.unwrap().success());
}

fn read(path: &Path, into: &mut [u8]) {
    File::open(path).unwrap().read_exact(into).unwrap();
}

#[test]
fn no_key_and_no_decrypted_block_is_where_a_core_dump_would_have_it() {
    let place = tempfile::tempdir().unwrap();
    let (key_file, block_file) = (place.path().join("key"), place.path().join("block"));
    random_file(&key_file, KEY);
    random_file(&block_file, BLOCK);
    let mut room = SecretBytes::zeros(PIECE).unwrap();
    let mut key = SecretBytes::zeros(KEY).unwrap();
    read(&key_file, key.bytes_mut());

    let cipher = AesGcm::new(Keys::read(&key_file).unwrap());
    let mut sealed = SecretBytes::zeros(BLOCK + SEAL_BYTES).unwrap();
    read(&block_file, &mut sealed.bytes_mut()[..BLOCK]);
    let binding = Binding {
        namespace: [7; 32],
        associated: b"place".as_slice().into(),
    };
    assert!(cipher.encrypt(&binding, sealed.bytes_mut()));
    assert!(cipher.decrypt(&binding, sealed.bytes_mut()));

    // The search finds what is there: the test's copy of the key, and that of the cipher.
    let secret = with(&key, &mut room);
    assert!(
        secret
            .iter()
            .map(|mapping| mapping.end - mapping.first)
            .sum::<u64>()
            >= 2 * 4096
    );
    assert_eq!(dumped(&key, &mut room), [] as [String; 0], "the key");
    // The smallest limit that distributions set is 64 KiB; without a limit, each secret is locked.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    if limit.current.is_none() {
        assert!(secret.iter().all(|mapping| mapping.has("lo")));
    }

    // A search that could not fail would be no test.
    let copy = std::hint::black_box(key.bytes().to_vec());
    assert_eq!(
        dumped(&key, &mut room).len(),
        1,
        "an ordinary copy is found"
    );
    drop(std::hint::black_box(copy));
}
