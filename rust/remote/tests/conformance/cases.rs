//! The tests that every store must pass.

use std::collections::HashSet;

use undercroft_contract::remote::{ObjectKey, RemoteDone, RemoteError, RemoteRequest};
use undercroft_remote::{ListedObject, ObjectBody};

use crate::rig::{LENS, Rig, Segment};

pub(crate) fn an_object_is_read_as_it_was_written(mut rig: Rig) {
    let segment = Segment::new(1);
    assert_eq!(rig.put(&segment, true), Ok(RemoteDone::Stored));
    let sums = segment.header.checksums.clone();
    assert_eq!(rig.get_all(&segment), Ok(RemoteDone::Got(sums)));
}

pub(crate) fn only_the_parts_that_are_asked_for_are_touched(mut rig: Rig) {
    let segment = Segment::new(2);
    rig.put(&segment, true).unwrap();
    let mut parts = segment.parts(8);
    for part in &parts {
        let old = vec![0xee; part.len as usize];
        rig.arena.write(part.arena_offset, &old).unwrap();
    }
    let left_out = [parts.remove(0), parts.remove(1)];
    let sums = vec![segment.header.checksums[1], segment.header.checksums[3]];
    assert_eq!(rig.get(&segment, parts.clone()), Ok(RemoteDone::Got(sums)));
    for part in parts {
        let found = rig.arena.read(part.arena_offset, u64::from(part.len));
        assert!(found.unwrap() == segment.payloads[part.payload as usize]);
    }
    for part in left_out {
        let found = rig.arena.read(part.arena_offset, u64::from(part.len));
        assert!(found.unwrap().iter().all(|byte| *byte == 0xee));
    }
    assert_eq!(
        rig.get(&segment, Vec::new()),
        Ok(RemoteDone::Got(Vec::new()))
    );
}

pub(crate) fn an_object_is_kept_if_it_is_put_again_as_absent_and_replaced_otherwise(mut rig: Rig) {
    let segment = Segment::new(3);
    let other = Segment {
        key: segment.key,
        ..Segment::new(4)
    };
    assert_eq!(rig.put(&segment, true), Ok(RemoteDone::Stored));
    assert_eq!(rig.put(&other, true), Ok(RemoteDone::AlreadyThere));
    rig.get_all(&segment).unwrap();
    assert_eq!(rig.put(&other, false), Ok(RemoteDone::Stored));
    rig.get_all(&other).unwrap();
}

pub(crate) fn an_absent_object_is_not_found(mut rig: Rig) {
    let segment = Segment::new(5);
    assert_eq!(rig.get_all(&segment), Err(RemoteError::NotFound));
    assert_eq!(rig.probe(vec![segment.key]), Ok(RemoteDone::Present(0)));
    // An object with another number of hash blocks is another object.
    rig.put(&segment, true).unwrap();
    let longer = ObjectKey {
        hash_blocks: 8,
        ..segment.key
    };
    let state = ObjectKey {
        group: Some(0),
        ..segment.key
    };
    let keys = vec![longer, segment.key, state];
    assert_eq!(rig.probe(keys), Ok(RemoteDone::Present(0b10)));
}

pub(crate) fn a_probe_reports_each_of_64_objects(mut rig: Rig) {
    let segments: Vec<Segment> = (0..64).map(Segment::new).collect();
    let mut expected = 0;
    for index in [0, 1, 5, 31, 32, 63] {
        rig.put(&segments[index], true).unwrap();
        expected |= 1 << index;
    }
    let keys = segments.iter().map(|segment| segment.key).collect();
    assert_eq!(rig.probe(keys), Ok(RemoteDone::Present(expected)));
}

/// Stores bytes under a segment's name, and expects that the segment is corrupt and gone afterwards.
fn corrupt(rig: &mut Rig, segment: &Segment, bytes: &[u8]) {
    let path = segment.key.path();
    rig.objects
        .put(&path, &ObjectBody::bytes(bytes), false)
        .unwrap();
    assert_eq!(rig.get_all(segment), Err(RemoteError::Corrupt));
    rig.wait_until_gone(&path);
}

pub(crate) fn another_object_under_the_name_is_corrupt_and_removed(mut rig: Rig) {
    let segment = Segment::new(6);
    corrupt(&mut rig, &segment, &Segment::new(7).bytes());
    corrupt(&mut rig, &segment, b"<html>not found</html>");
}

pub(crate) fn a_changed_payload_is_corrupt_and_removed(mut rig: Rig) {
    let segment = Segment::new(8);
    let offsets: Vec<u64> = segment.header.described.offsets().collect();
    for (offset, len) in offsets.iter().zip(LENS) {
        let mut bytes = segment.bytes();
        bytes[*offset as usize + len as usize - 1] ^= 1;
        corrupt(&mut rig, &segment, &bytes);
    }
    // The zeros after a payload belong to no payload.
    let mut bytes = segment.bytes();
    bytes[offsets[2] as usize + 1] ^= 1;
    let path = segment.key.path();
    rig.objects
        .put(&path, &ObjectBody::bytes(&bytes), false)
        .unwrap();
    rig.get_all(&segment).unwrap();
}

pub(crate) fn an_object_that_ends_early_is_corrupt(mut rig: Rig) {
    let segment = Segment::new(9);
    let bytes = segment.bytes();
    for len in [1, 100, 4096, 4097, 8192, bytes.len() - 4096] {
        corrupt(&mut rig, &segment, &bytes[..len]);
    }
}

pub(crate) fn every_request_of_many_ends_once(mut rig: Rig) {
    let segments: Vec<Segment> = (0..40).map(Segment::new).collect();
    // All are put from the same place: they differ only by name and namespace.
    let parts = rig.fill(&segments[0], 0);
    let mut open = HashSet::new();
    for segment in &segments {
        let header = SegmentOf(segment, &segments[0]).header();
        let (key, parts) = (segment.key, parts.clone());
        open.insert(rig.submit(|token| RemoteRequest::Put {
            token,
            key,
            header,
            parts,
            if_absent: true,
        }));
        let keys = vec![segment.key];
        open.insert(rig.submit(|token| RemoteRequest::Probe { token, keys }));
    }
    let mut stored = 0;
    while !open.is_empty() {
        for done in rig.wait() {
            assert!(open.remove(&done.token), "request {} twice", done.token);
            match done.result {
                Ok(RemoteDone::Stored) => stored += 1,
                Ok(RemoteDone::Present(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(stored, segments.len());
    rig.wait_until_idle();
    for segment in &segments {
        let expected = Segment {
            header: SegmentOf(segment, &segments[0]).described(),
            payloads: segments[0].payloads.clone(),
            key: segment.key,
        };
        rig.get_all(&expected).unwrap();
    }
}

/// A segment with the name of the first segment and the payloads of the second.
struct SegmentOf<'a>(&'a Segment, &'a Segment);

impl SegmentOf<'_> {
    fn described(&self) -> undercroft_contract::remote::SegmentHeader {
        undercroft_contract::remote::SegmentHeader {
            described: self.0.header.described.clone(),
            checksums: self.1.header.checksums.clone(),
        }
    }

    fn header(&self) -> Box<[u8]> {
        self.described().encode()
    }
}

fn listed(rig: &Rig, below: &str) -> Vec<ListedObject> {
    let mut found = Vec::new();
    let each = &mut |entry| {
        found.push(entry);
        true
    };
    rig.objects.list(below, each).unwrap();
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

pub(crate) fn objects_are_listed_and_removed(mut rig: Rig) {
    let segments: Vec<Segment> = (10..15).map(Segment::new).collect();
    for segment in &segments {
        rig.put(segment, true).unwrap();
    }
    let paths = |segments: &[Segment]| -> Vec<String> {
        segments.iter().map(|segment| segment.key.path()).collect()
    };
    let names = |found: &[ListedObject]| -> Vec<String> {
        found.iter().map(|entry| entry.path.clone()).collect()
    };
    let found = listed(&rig, "");
    assert_eq!(names(&found), paths(&segments));
    let bytes = segments[0].bytes().len() as u64;
    assert!(found.iter().all(|entry| entry.bytes == bytes), "{found:?}");
    let below = paths(&segments)[0].rsplit_once('/').unwrap().0.to_owned();
    assert_eq!(names(&listed(&rig, &below)), paths(&segments[..1]));
    let mut seen = 0;
    rig.objects
        .list("", &mut |_| {
            seen += 1;
            seen < 2
        })
        .unwrap();
    assert_eq!(seen, 2, "a list ends when it is told to");
    rig.objects.delete(&paths(&segments[..2])).unwrap();
    rig.objects.delete(&paths(&segments[..2])).unwrap();
    assert_eq!(names(&listed(&rig, "")), paths(&segments[2..]));
    if rig.objects.expires() {
        return;
    }
    // The third object is unchanged since the list. The fourth is larger now, and the fifth is newer.
    let mut entries = found[2..].to_vec();
    let larger = [segments[3].bytes(), vec![0; 4096]].concat();
    let path = segments[3].key.path();
    rig.objects
        .put(&path, &ObjectBody::bytes(&larger), false)
        .unwrap();
    entries[2].modified -= std::time::Duration::from_secs(60);
    let removed = rig.objects.delete_unchanged(&entries).unwrap();
    assert_eq!(removed, [true, false, false]);
    assert_eq!(names(&listed(&rig, "")), paths(&segments[3..]));
    let again = rig.objects.delete_unchanged(&entries[..1]).unwrap();
    assert_eq!(
        again,
        [false],
        "what another has removed is not counted twice"
    );
}

pub(crate) fn dropping_the_pool_ends_its_operations(mut rig: Rig) {
    let segment = Segment::new(16);
    rig.put(&segment, true).unwrap();
    for _ in 0..50 {
        let (key, parts) = (segment.key, segment.parts(8));
        let expect = Box::new(segment.header.described.clone());
        rig.submit(|token| RemoteRequest::Get {
            token,
            key,
            expect,
            parts,
        });
    }
    drop(rig.pool.take());
    // Only this test still has the arena.
    assert_eq!(std::sync::Arc::strong_count(&rig.arena), 1);
}

pub(crate) fn the_clock_of_the_store_is_near(rig: Rig) {
    match rig.objects.clock_skew().unwrap() {
        Some(skew) => assert!(skew.abs() < 5.0, "{skew} s on one machine"),
        None => assert_eq!(rig.objects.name(), "mooncake", "objects have no time there"),
    }
    assert_eq!(listed(&rig, ""), [], "nothing is left of it");
}
