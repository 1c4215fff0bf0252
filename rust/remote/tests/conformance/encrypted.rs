//! A store whose objects have encrypted payloads.

use std::path::Path;
use std::sync::Arc;

use undercroft_cipher::{AesGcm, Keys};
use undercroft_contract::cipher::PayloadCipher;
use undercroft_contract::remote::{RemoteDone, RemoteError, RemoteRequest, SegmentHeader};
use undercroft_remote::{Location, ObjectBody, Objects, RemoteOptions};

use crate::rig::{Rig, Segment};

/// The version of names and headers.
const VERSION: u32 = 2;

/// A cipher with keys of these bytes.
fn cipher(keys: &[u8]) -> Arc<dyn PayloadCipher> {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    let lines = keys
        .iter()
        .map(|key| format!("{key:02x}").repeat(32) + "\n");
    std::fs::write(&path, lines.collect::<String>()).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    Arc::new(AesGcm::new(Keys::read(&path).unwrap()))
}

/// A host whose store is the directory. Without keys, the host does not encrypt.
fn host(place: &Path, keys: &[u8]) -> Rig {
    let url = format!("file://{}/remote", place.display());
    let location = Location::parse(&url).unwrap();
    let objects = undercroft_remote::open(&location, RemoteOptions::default()).unwrap();
    let cipher = (!keys.is_empty()).then(|| cipher(keys));
    Rig::with_cipher(objects, cipher, Box::new(()))
}

fn stored(place: &Path, segment: &Segment) -> Vec<u8> {
    std::fs::read(place.join("remote").join(segment.key.encrypted_path())).unwrap()
}

fn is_there(objects: &Arc<dyn Objects>, segment: &Segment) -> bool {
    objects.probe(&[segment.key.encrypted_path()]).unwrap() == 1
}

#[test]
fn an_object_comes_back_and_the_store_shows_nothing_of_its_payloads() {
    let place = tempfile::tempdir().unwrap();
    let segment = Segment::new(1);
    let mut writer = host(place.path(), &[1]);
    assert_eq!(writer.put(&segment, true), Ok(RemoteDone::Stored));
    assert_eq!(writer.put(&segment, true), Ok(RemoteDone::AlreadyThere));
    let bytes = stored(place.path(), &segment);
    let has = |part: &[u8]| bytes.windows(part.len()).any(|found| found == part);
    assert!(!has(&segment.payloads[0][..32]) && !has(&segment.payloads[3][200_000..200_032]));
    for sum in &segment.header.checksums {
        assert!(!has(&sum.to_le_bytes()), "a checksum tells of plain bytes");
    }
    let mut reader = host(place.path(), &[1]);
    assert_eq!(reader.probe(vec![segment.key]), Ok(RemoteDone::Present(1)));
    let sums = segment.header.checksums.clone();
    assert_eq!(reader.get_all(&segment), Ok(RemoteDone::Got(sums)));
    let some = segment.parts(8).into_iter().skip(1).step_by(2);
    let got = reader.get(&segment, some.collect());
    let sums = &segment.header.checksums;
    assert_eq!(got, Ok(RemoteDone::Got(vec![sums[1], sums[3]])));
}

#[test]
fn a_host_with_another_key_leaves_the_object_and_its_arena_as_they_are() {
    let place = tempfile::tempdir().unwrap();
    let segment = Segment::new(1);
    host(place.path(), &[1]).put(&segment, true).unwrap();
    let mut other = host(place.path(), &[2]);
    assert_eq!(other.get_all(&segment), Err(RemoteError::Cipher));
    for part in segment.parts(8) {
        let found = other.arena.read(part.arena_offset, u64::from(part.len));
        assert!(found.unwrap().iter().all(|&byte| byte == 0));
    }
    assert!(is_there(&other.objects, &segment));
    let mut both = host(place.path(), &[2, 1]);
    both.get_all(&segment).unwrap();
    both.put(&segment, false).unwrap();
    other.get_all(&segment).expect("the first key writes");
}

#[test]
fn hosts_with_and_without_a_key_do_not_see_each_others_objects() {
    let place = tempfile::tempdir().unwrap();
    let (mut plain, mut keyed) = (host(place.path(), &[]), host(place.path(), &[1]));
    let segment = Segment::new(1);
    plain.put(&segment, true).unwrap();
    assert_eq!(keyed.probe(vec![segment.key]), Ok(RemoteDone::Present(0)));
    assert_eq!(keyed.get_all(&segment), Err(RemoteError::NotFound));
    let other = Segment::new(2);
    keyed.put(&other, true).unwrap();
    assert_eq!(plain.probe(vec![other.key]), Ok(RemoteDone::Present(0)));
    assert_eq!(plain.get_all(&other), Err(RemoteError::NotFound));
    plain.get_all(&segment).unwrap();
    keyed.get_all(&other).unwrap();
}

/// A store in which `change` has replaced the bytes of an object, and the object's segment.
fn forged(place: &Path, change: impl FnOnce(&mut Vec<u8>, Vec<u8>)) -> (Rig, Segment) {
    let (one, other) = (Segment::new(1), Segment::new(2));
    let mut rig = host(place, &[1]);
    rig.put(&one, true).unwrap();
    rig.put(&other, true).unwrap();
    let mut bytes = stored(place, &one);
    change(&mut bytes, stored(place, &other));
    let path = one.key.encrypted_path();
    rig.objects
        .put(&path, &ObjectBody::bytes(&bytes), false)
        .unwrap();
    (rig, one)
}

#[test]
fn an_object_under_another_name_is_a_miss() {
    let place = tempfile::tempdir().unwrap();
    let (mut rig, segment) = forged(place.path(), |bytes, other| *bytes = other);
    assert_eq!(rig.get_all(&segment), Err(RemoteError::Corrupt));
    rig.wait_until_gone(&segment.key.encrypted_path());
}

/// Whoever writes to the store can make a header for payloads of another object.
#[test]
fn payloads_of_another_object_are_not_decrypted() {
    let place = tempfile::tempdir().unwrap();
    let (mut rig, segment) = forged(place.path(), |bytes, other| {
        let described = SegmentHeader::decode_as(bytes, VERSION).unwrap().described;
        let checksums = SegmentHeader::decode_as(&other, VERSION).unwrap().checksums;
        let header = SegmentHeader {
            described,
            checksums,
        };
        let header = header.encode_as(VERSION);
        *bytes = [&header[..], &other[header.len()..]].concat();
    });
    assert_eq!(rig.get_all(&segment), Err(RemoteError::Cipher));
}

#[test]
fn a_damaged_object_is_corrupt_and_removed() {
    type Change = fn(&mut Vec<u8>, Vec<u8>);
    let changes: [Change; 4] = [
        |bytes, _| bytes[4096] ^= 1,
        // A byte of a seal.
        |bytes, _| bytes[4096 + 4096 + 20] ^= 1,
        |bytes, _| bytes[20] ^= 1,
        |bytes, _| bytes.truncate(bytes.len() - 5000),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let place = tempfile::tempdir().unwrap();
        let (mut rig, segment) = forged(place.path(), change);
        let got = rig.get_all(&segment);
        assert_eq!(got, Err(RemoteError::Corrupt), "change {index}");
        rig.wait_until_gone(&segment.key.encrypted_path());
    }
}

#[test]
fn a_payload_that_has_changed_since_its_checksum_is_not_written() {
    let place = tempfile::tempdir().unwrap();
    let segment = Segment::new(1);
    let mut rig = host(place.path(), &[1]);
    let parts = rig.fill(&segment, 0);
    let mut changed = segment.payloads[1].clone();
    changed[77] ^= 1;
    rig.arena.write(parts[1].arena_offset, &changed).unwrap();
    let (key, header) = (segment.key, segment.header.encode());
    let written = rig.run(|token| RemoteRequest::Put {
        token,
        key,
        header,
        parts,
        if_absent: true,
    });
    assert_eq!(written, Err(RemoteError::Corrupt));
    assert!(!is_there(&rig.objects, &segment));
}
