//! What a tier that becomes smaller returns to the system.

use undercroft_contract::io::{IoFault, IoRequest};
use undercroft_engine::{EngineConfig, ResizeOrder, Room, Started};

use crate::EIO;
use crate::rig::{Rig, SECOND};

const PAYLOAD: u32 = 64 << 10;
const HOST: u64 = 1 << 30;
const DISK: u64 = 256 << 20;

fn rig() -> Rig {
    Rig::new(EngineConfig::new(HOST), &[DISK], PAYLOAD)
}

fn resize(rig: &mut Rig, order: ResizeOrder) {
    rig.engine.resize(&order, None).unwrap();
    for _ in 0..1000 {
        rig.pass(SECOND);
        for request in rig.start(64) {
            rig.end(request);
        }
    }
}

/// The part of the arena that is to be returned to the system next.
fn next_part(rig: &mut Rig) -> Option<(u64, u64)> {
    let mut started = Started::default();
    let room = Room {
        memory: true,
        ..Room::default()
    };
    rig.engine.turn(room, &mut started);
    started.memory
}

#[test]
fn the_arena_returns_every_byte_of_the_pages_that_it_gives_up() {
    let mut rig = rig();
    let host_bytes = Some(HOST / 2);
    let order = ResizeOrder {
        host_bytes,
        ..ResizeOrder::default()
    };
    resize(&mut rig, order);
    let mut returned = Vec::new();
    while let Some((offset, len)) = next_part(&mut rig) {
        returned.push((offset, offset + len));
        rig.engine.arena_release_ended(true);
    }
    returned.sort_unstable();
    let bytes: u64 = returned.iter().map(|(start, end)| end - start).sum();
    assert_eq!(bytes, HOST / 2);
    assert!(
        returned.windows(2).all(|pair| pair[0].1 <= pair[1].0),
        "each once"
    );
    let resized = rig.engine.resized().host;
    assert_eq!((resized.kept_bytes, resized.resizing), (0, false));
}

#[test]
fn a_resize_reports_the_bytes_that_the_system_does_not_take_back() {
    let mut rig = rig();
    let order = ResizeOrder {
        host_bytes: Some(HOST / 2),
        ..ResizeOrder::default()
    };
    resize(&mut rig, order);
    while next_part(&mut rig).is_some() {
        rig.engine.arena_release_ended(false);
    }
    assert_eq!(rig.engine.resized().host.kept_bytes, HOST / 2);

    let most = rig.engine.resized().disk.maximum_bytes;
    let order = ResizeOrder {
        disk_bytes: Some(most / 2),
        ..ResizeOrder::default()
    };
    rig.engine.resize(&order, None).unwrap();
    for _ in 0..200 {
        rig.pass(SECOND);
        for request in rig.start(64) {
            match request {
                IoRequest::Erase { frees: true, .. } => {
                    rig.finish(&request, Err(IoFault::Os(EIO)));
                }
                request => rig.end(request),
            }
        }
    }
    let disk = rig.engine.resized().disk;
    assert_eq!(disk.kept_bytes, most - disk.capacity_bytes);
    assert!(disk.kept_bytes > 0 && !disk.resizing, "{disk:?}");
}
