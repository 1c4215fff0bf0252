//! The thread pool with payloads that are encrypted on disk.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use undercroft_cipher::{AesGcm, Keys};
use undercroft_contract::checksum::checksum;
use undercroft_contract::cipher::{Binding, PayloadCipher, SEAL_BYTES};
use undercroft_contract::io::{FileKind, IoFault, IoRequest, SealedTransfer};
use undercroft_io::fault::{FaultRates, Noise, Script};
use undercroft_io::fault_hook::{CallKind, FaultHook, Verdict};
use undercroft_io::pool::ThreadPool;
use undercroft_io::uring::Uring;

use super::is_possible;
use super::rig::{ARENA, DEPTH, PATIENCE, Rig, UNIT, meta, os, pattern};
use rustix::io::Errno;

/// A cipher with one key, of this byte.
fn cipher(key: u8) -> Arc<dyn PayloadCipher> {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, [key; 32]).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    Arc::new(AesGcm::new(Keys::read(&path).unwrap()))
}

fn rig_with(hook: impl FaultHook, key: u8) -> Rig {
    Rig::with(|arena, device| {
        let parts = (hook, Some(cipher(key)));
        Box::new(ThreadPool::open(DEPTH, arena, vec![device], parts).unwrap())
    })
}

fn rig() -> Rig {
    rig_with(Script::default(), 1)
}

fn binding(block: u8) -> Binding {
    Binding {
        namespace: [7; 32],
        associated: [block; 66].into(),
    }
}

/// Of the payload of `block`.
fn transfer(reads: bool, block: u8, arena_offset: u64, at: u64, bytes: u64) -> SealedTransfer {
    SealedTransfer {
        token: u64::from(block),
        reads,
        device: 0,
        file_offset: at,
        len: (bytes + SEAL_BYTES as u64).next_multiple_of(UNIT) as u32,
        arena_offset,
        payload_len: bytes as u32,
        binding: binding(block),
    }
}

fn one(rig: &mut Rig, of: SealedTransfer) -> Result<u64, IoFault> {
    rig.one(IoRequest::Sealed(Box::new(of)))
}

const SIZES: [u64; 6] = [700, UNIT - 64, UNIT - 63, UNIT, 1 << 20, (2 << 20) + 5];

/// Whether bytes of the payload are in the file as they are.
fn shows(path: &Path, plain: &[u8]) -> bool {
    let stored = std::fs::read(path).unwrap();
    stored
        .windows(64)
        .step_by(1)
        .any(|part| part == &plain[..64])
}

#[test]
fn payloads_come_back_and_the_file_shows_nothing_of_them() {
    for bytes in SIZES {
        let mut rig = rig();
        let plain = pattern(bytes, bytes);
        rig.arena.write(0, &plain).unwrap();
        let sum = checksum(&plain);
        assert_eq!(one(&mut rig, transfer(false, 1, 0, UNIT, bytes)), Ok(sum));
        assert!(rig.arena.read(0, bytes).unwrap() == plain, "the arena");
        assert!(!shows(&rig.path("data"), &plain), "{bytes} bytes");
        let before = rig.arena.read((8 << 20) + bytes, 64).unwrap();
        assert_eq!(
            one(&mut rig, transfer(true, 1, 8 << 20, UNIT, bytes)),
            Ok(sum)
        );
        assert!(rig.arena.read(8 << 20, bytes).unwrap() == plain);
        let after = rig.arena.read((8 << 20) + bytes, 64).unwrap();
        assert_eq!(before, after, "nothing behind the payload is touched");
    }
}

#[test]
fn the_same_payload_is_never_the_same_bytes() {
    let mut rig = rig();
    let plain = pattern(3, UNIT);
    rig.arena.write(0, &plain).unwrap();
    let mut seen = Vec::new();
    for _ in 0..10 {
        one(&mut rig, transfer(false, 1, 0, 0, UNIT)).unwrap();
        let mut stored = vec![0; UNIT as usize + SEAL_BYTES];
        rig.file("data").read_exact_at(&mut stored, 0).unwrap();
        seen.push(stored);
    }
    for (at, one) in seen.iter().enumerate() {
        for other in &seen[at + 1..] {
            let same = one.iter().zip(other).filter(|(one, other)| one == other);
            assert!(same.count() < 100, "a nonce or a key was used twice");
        }
    }
}

#[test]
fn a_payload_that_is_another_or_elsewhere_is_not_decrypted() {
    let mut rig = rig();
    let plain = pattern(4, UNIT);
    rig.arena.write(0, &plain).unwrap();
    one(&mut rig, transfer(false, 1, 0, 0, UNIT)).unwrap();
    let untouched = rig.arena.read(1 << 20, UNIT).unwrap();
    let read = |of: SealedTransfer| SealedTransfer {
        arena_offset: 1 << 20,
        ..of
    };
    let of = || read(transfer(true, 1, 0, 0, UNIT));
    let mut of_namespace = of();
    of_namespace.binding.namespace[31] ^= 1;
    assert_eq!(one(&mut rig, of_namespace), Err(IoFault::Cipher));
    for at in [0, 30, 65] {
        let mut changed = of();
        changed.binding.associated[at] ^= 1;
        assert_eq!(one(&mut rig, changed), Err(IoFault::Cipher), "byte {at}");
    }
    assert!(rig.arena.read(1 << 20, UNIT).unwrap() == untouched);
    assert_eq!(one(&mut rig, of()), Ok(checksum(&plain)));
}

#[test]
fn another_key_decrypts_nothing_and_writes_nothing_to_the_arena() {
    let mut first = rig();
    let plain = pattern(5, UNIT);
    first.arena.write(0, &plain).unwrap();
    one(&mut first, transfer(false, 1, 0, 0, UNIT)).unwrap();
    let stored = std::fs::read(first.path("data")).unwrap();
    let mut second = rig_with(Script::default(), 2);
    second.prepare(0, &stored);
    let read = one(&mut second, transfer(true, 1, 0, 0, UNIT));
    assert_eq!(read, Err(IoFault::Cipher));
    assert_eq!(
        second.arena.read(0, UNIT).unwrap(),
        vec![0; UNIT as usize],
        "not even encrypted bytes"
    );
}

#[test]
fn a_changed_byte_is_corrupt_and_a_torn_write_too() {
    let bytes = 3 * UNIT;
    let mut rig = rig();
    let plain = pattern(6, bytes);
    rig.arena.write(0, &plain).unwrap();
    one(&mut rig, transfer(false, 1, 0, 0, bytes)).unwrap();
    let old = std::fs::read(rig.path("data")).unwrap();
    for at in [0, 4097, bytes, bytes + 20, bytes + 63] {
        let mut changed = old.clone();
        changed[at as usize] ^= 1;
        rig.prepare(0, &changed);
        let read = one(&mut rig, transfer(true, 1, 0, 0, bytes));
        assert_eq!(read, Err(IoFault::Corrupt), "byte {at}");
    }
    one(&mut rig, transfer(false, 1, 0, 0, bytes)).unwrap();
    let new = std::fs::read(rig.path("data")).unwrap();
    for cut in (512..bytes as usize + 512).step_by(512) {
        rig.prepare(0, &[&new[..cut], &old[cut..]].concat());
        let read = one(&mut rig, transfer(true, 1, 0, 0, bytes));
        assert_eq!(read, Err(IoFault::Corrupt), "torn at {cut}");
    }
    rig.file("data").set_len(bytes).unwrap();
    let read = one(&mut rig, transfer(true, 1, 0, 0, bytes));
    assert_eq!(read, Err(IoFault::Truncated));
    rig.prepare(0, &pattern(9, bytes + UNIT));
    let read = one(&mut rig, transfer(true, 1, 0, 0, bytes));
    assert_eq!(read, Err(IoFault::Corrupt), "plain bytes are no payload");
}

#[test]
fn short_and_interrupted_calls_are_continued_and_errors_are_reported() {
    let bytes = 15 * UNIT;
    let calls = [
        Verdict::Short(UNIT as u32),
        Verdict::Fail(Errno::INTR.raw_os_error()),
        Verdict::Short(2 * UNIT as u32 + 100),
        Verdict::Fail(Errno::AGAIN.raw_os_error()),
        Verdict::Short(7),
    ];
    let script = Script::default()
        .then(CallKind::Write, calls)
        .then(CallKind::Read, calls)
        .then(
            CallKind::Write,
            [Verdict::Fail(Errno::NOSPC.raw_os_error())],
        )
        .then(CallKind::Read, [Verdict::Fail(Errno::IO.raw_os_error())])
        .then(CallKind::Read, [Verdict::Flip { at: 5000, mask: 4 }]);
    let mut rig = rig_with(script.clone(), 1);
    let plain = pattern(7, bytes);
    rig.arena.write(0, &plain).unwrap();
    let sum = Ok(checksum(&plain));
    let write = || transfer(false, 1, 0, UNIT, bytes);
    let read = || transfer(true, 1, 8 << 20, UNIT, bytes);
    assert_eq!(one(&mut rig, write()), sum);
    assert_eq!(one(&mut rig, read()), sum);
    assert!(rig.arena.read(8 << 20, bytes).unwrap() == plain);
    assert_eq!(one(&mut rig, write()), os(Errno::NOSPC));
    assert_eq!(one(&mut rig, read()), os(Errno::IO));
    assert_eq!(one(&mut rig, read()), Err(IoFault::Corrupt), "on the way");
    assert_eq!(one(&mut rig, read()), sum);
    assert!(script.is_used_up());
}

#[test]
fn impossible_transfers_are_refused() {
    let script = Script::default();
    let mut rig = rig_with(script.clone(), 1);
    let of = || transfer(false, 1, 0, 0, UNIT);
    let requests = [
        SealedTransfer { device: 1, ..of() },
        SealedTransfer {
            file_offset: 512,
            ..of()
        },
        // No room for the seal.
        SealedTransfer {
            len: UNIT as u32,
            ..of()
        },
        SealedTransfer {
            payload_len: (2 * UNIT) as u32 - 63,
            ..of()
        },
        SealedTransfer { len: 0, ..of() },
        SealedTransfer {
            arena_offset: ARENA,
            ..of()
        },
        SealedTransfer {
            payload_len: u32::MAX,
            ..of()
        },
    ];
    for request in requests {
        let said = format!("{request:?}");
        assert_eq!(one(&mut rig, request), os(Errno::INVAL), "{said}");
    }
    assert!(script.calls(CallKind::Write).is_empty());
}

#[test]
fn metadata_stays_plain_beside_encrypted_payloads() {
    let mut rig = rig();
    let bytes = pattern(5, UNIT);
    assert_eq!(rig.one(meta(FileKind::Super, 0, &bytes, true)), Ok(0));
    let mut stored = vec![0; UNIT as usize];
    rig.file("super").read_exact_at(&mut stored, 0).unwrap();
    assert!(stored == bytes);
}

#[test]
fn an_engine_without_a_cipher_writes_no_plain_payload_in_place_of_an_encrypted_one() {
    let mut pool =
        Rig::with(|arena, device| Box::new(ThreadPool::new(DEPTH, arena, vec![device]).unwrap()));
    assert_eq!(
        one(&mut pool, transfer(false, 1, 0, 0, UNIT)),
        os(Errno::INVAL)
    );
    assert_eq!(std::fs::read(pool.path("data")).unwrap().len(), 0);
    if is_possible(true) {
        let mut ring =
            Rig::with(|arena, device| Box::new(Uring::new(DEPTH, arena, vec![device]).unwrap()));
        assert_eq!(
            one(&mut ring, transfer(false, 1, 0, 0, UNIT)),
            os(Errno::INVAL)
        );
        assert_eq!(std::fs::read(ring.path("data")).unwrap().len(), 0);
    }
}

#[test]
fn noise_never_makes_wrong_bytes() {
    let rates = FaultRates {
        short: 300,
        interrupted: 200,
        read_error: 20,
        write_error: 20,
        flip: 30,
    };
    let (bytes, slot) = (39 * UNIT, 40 * UNIT);
    let mut outcomes = [0; 3];
    for seed in 0..20 {
        let mut rig = rig_with(Noise::new(seed, rates), 1);
        let plain: Vec<_> = (0..DEPTH as u64)
            .map(|index| pattern(seed + index, bytes))
            .collect();
        for (block, plain) in (0u8..).zip(&plain) {
            let at = u64::from(block) * slot;
            rig.arena.write(at, plain).unwrap();
            let of = transfer(false, block, at, at, bytes);
            rig.engine.submit(IoRequest::Sealed(Box::new(of)));
        }
        let written = rig.drain();
        for done in written.iter().filter(|done| done.result.is_ok()) {
            let at = done.token * slot;
            let of = transfer(true, done.token as u8, (8 << 20) + at, at, bytes);
            rig.engine.submit(IoRequest::Sealed(Box::new(of)));
        }
        for done in rig.drain() {
            let (index, at) = (done.token as usize, done.token * slot);
            match done.result {
                Ok(sum) => {
                    assert_eq!(sum, checksum(&plain[index]));
                    let found = rig.arena.read((8 << 20) + at, bytes).unwrap();
                    assert!(found == plain[index], "seed {seed}: wrong bytes");
                    outcomes[0] += 1;
                }
                Err(IoFault::Corrupt) => outcomes[1] += 1,
                Err(IoFault::Cipher) => panic!("seed {seed}: the checksum comes first"),
                Err(_) => outcomes[2] += 1,
            }
        }
    }
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
}

#[test]
fn dropping_waits_for_operations_in_flight() {
    for _ in 0..20 {
        let mut rig = rig();
        for block in 0..DEPTH as u8 {
            let of = transfer(false, block, 0, u64::from(block) << 21, 1 << 20);
            rig.engine.submit(IoRequest::Sealed(Box::new(of)));
        }
        let Rig { engine, arena, dir } = rig;
        let started = std::time::Instant::now();
        drop(engine);
        assert!(started.elapsed() < PATIENCE);
        assert_eq!(Arc::strong_count(&arena), 1);
        drop(dir);
    }
}

#[test]
fn the_rest_of_a_slot_shows_nothing_of_an_earlier_payload() {
    // A single thread uses one buffer for all payloads.
    let mut rig = Rig::with(|arena, device| {
        let parts = (Script::default(), Some(cipher(1)));
        Box::new(ThreadPool::open(1, arena, vec![device], parts).unwrap())
    });
    let plain = pattern(9, 2 * UNIT);
    rig.arena.write(0, &plain).unwrap();
    // A write has the encrypted payload in the buffer, and a read the plain one.
    for reads in [false, true] {
        one(&mut rig, transfer(false, 1, 0, 0, 2 * UNIT)).unwrap();
        if reads {
            one(&mut rig, transfer(true, 1, 0, 0, 2 * UNIT)).unwrap();
        }
        one(&mut rig, transfer(false, 2, 0, 8 * UNIT, 10)).unwrap();
        let mut rest = vec![1; UNIT as usize - 10 - SEAL_BYTES];
        let behind = 8 * UNIT + 10 + SEAL_BYTES as u64;
        rig.file("data").read_exact_at(&mut rest, behind).unwrap();
        assert!(rest.iter().all(|byte| *byte == 0), "{reads}");
    }
}
