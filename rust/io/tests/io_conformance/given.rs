//! Which bytes a checksum covers, and a checksum that the engine knows already.

use std::os::unix::fs::FileExt;

use undercroft_contract::checksum::checksum;
use undercroft_contract::io::{IoFault, IoRequest};
use undercroft_io::fault::Script;

use crate::rig::{Open, Rig, UNIT, pattern, read, write};

pub(crate) fn a_given_checksum_is_not_computed(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    let bytes = pattern(1, 2 * UNIT);
    rig.arena.write(0, &bytes).unwrap();
    let mut request = write(1, 0, 0, (2 * UNIT) as u32);
    let IoRequest::WritePayload { checksum: sum, .. } = &mut request else {
        unreachable!("a write")
    };
    *sum = Some(7);
    assert_eq!(rig.one(request), Ok(7));
    let mut stored = vec![0; bytes.len()];
    rig.file("data").read_exact_at(&mut stored, 0).unwrap();
    assert!(stored == bytes);
    let of_the_bytes = checksum(&bytes);
    let found = rig.one(read(2, 0, 0, (2 * UNIT) as u32, of_the_bytes));
    assert_eq!(found, Ok(of_the_bytes));
    let found = rig.one(read(3, 0, 0, (2 * UNIT) as u32, 7));
    assert_eq!(found, Err(IoFault::Corrupt));
}

pub(crate) fn the_checksum_covers_the_payload_only(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    let mut bytes = pattern(1, 2 * UNIT);
    rig.arena.write(0, &bytes).unwrap();
    let payload_len = (UNIT + 10) as u32;
    let request = IoRequest::WritePayload {
        token: 1,
        device: 0,
        file_offset: 0,
        arena_offset: 0,
        len: (2 * UNIT) as u32,
        payload_len,
        checksum: None,
    };
    let sum = checksum(&bytes[..payload_len as usize]);
    assert_eq!(rig.one(request), Ok(sum));
    let request = |token| IoRequest::ReadPayload {
        token,
        device: 0,
        file_offset: 0,
        arena_offset: 4 * UNIT,
        len: (2 * UNIT) as u32,
        payload_len,
        checksum: sum,
    };
    bytes[payload_len as usize] ^= 1;
    rig.prepare(0, &bytes);
    assert_eq!(rig.one(request(2)), Ok(sum), "the padding does not count");
    bytes[payload_len as usize - 1] ^= 0x80;
    rig.prepare(0, &bytes);
    assert_eq!(
        rig.one(request(3)),
        Err(IoFault::Corrupt),
        "the last byte does"
    );
}
