//! Events of a server's tiers, and a server that is lost.

use undercroft_contract::session::{BlockEvent, BlockEvents, EventTier};

use super::*;

fn stored(index: usize) -> BlockEvent {
    BlockEvent {
        tier: EventTier::Host,
        stored: true,
        group: 0,
        hash: hashes(8)[index],
        parent: index.checked_sub(1).map(|before| hashes(8)[before]),
    }
}

fn told(events: Vec<BlockEvent>, more: bool) -> ServerMessage {
    ServerMessage::Events {
        cleared: false,
        more,
        events,
    }
}

#[test]
fn events_that_come_are_taken_once() {
    let mut rig = StateRig::new();
    assert_eq!(rig.state.take_events(false, rig.now).events, []);
    let events = vec![stored(0), stored(1)];
    assert!(rig.state.take(told(events.clone(), false), rig.now));
    let taken = rig.state.take_events(false, rig.now);
    assert_eq!(
        (taken.events, taken.cleared, taken.more),
        (events, false, false)
    );
    assert_eq!(
        rig.state.take_events(false, rig.now),
        BlockEvents::default()
    );
}

#[test]
fn a_server_is_asked_again_at_once_only_if_it_has_more() {
    let mut rig = StateRig::new();
    let asked = |rig: &mut StateRig| {
        rig.state.outbox.clear();
        rig.state.take_events(false, rig.now);
        !rig.state.outbox.is_empty()
    };
    assert!(asked(&mut rig));
    assert!(!asked(&mut rig), "asked twice");
    assert!(rig.state.take(told(vec![], true), rig.now));
    assert!(asked(&mut rig));
    assert!(rig.state.take(told(vec![], false), rig.now));
    assert!(!asked(&mut rig));
    rig.now += 6 * MS;
    assert!(asked(&mut rig));
}

#[test]
fn events_that_nobody_asked_for_are_refused() {
    let mut rig = StateRig::new();
    assert!(!rig.state.take(told(vec![stored(0)], false), rig.now));
}

#[test]
fn a_lost_server_clears_all_reported_blocks() {
    let mut rig = StateRig::new();
    rig.state.take_events(false, rig.now);
    assert!(rig.state.take(told(vec![stored(0)], false), rig.now));
    rig.state.lost("it ended".to_owned());
    let taken = rig.state.take_events(false, rig.now);
    assert_eq!(
        (taken.cleared, taken.events, taken.more),
        (true, vec![], false)
    );
    assert!(!rig.state.take_events(false, rig.now).cleared, "told twice");
    rig.state.registered(address(2), ("", false), String::new());
    assert!(rig.state.take_events(false, rig.now).more);
}

#[test]
fn a_lost_server_voids_nothing_where_nobody_listens() {
    let mut rig = StateRig::new();
    rig.state.lost("it ended".to_owned());
    assert!(!rig.state.take_events(false, rig.now).cleared);
}

#[test]
fn a_restart_drops_received_events_and_events_in_flight() {
    let mut rig = StateRig::new();
    rig.state.take_events(false, rig.now);
    assert!(rig.state.take(told(vec![stored(0)], true), rig.now));
    assert_eq!(rig.state.take_events(false, rig.now).events.len(), 1);
    // The earlier question is on its way.
    let taken = rig.state.take_events(true, rig.now);
    assert_eq!((taken.events, taken.more), (vec![], true));
    assert!(rig.state.take(told(vec![stored(1)], false), rig.now));
    rig.state.outbox.clear();
    let taken = rig.state.take_events(false, rig.now);
    assert_eq!(
        (taken.events, taken.cleared, taken.more),
        (vec![], false, true)
    );
    let mut expected = Vec::new();
    assert!(ClientMessage::TakeEvents { restart: true }.append_to(&mut expected));
    assert_eq!(rig.state.outbox, expected);
    assert!(
        rig.state
            .take(told(vec![stored(0), stored(1)], false), rig.now)
    );
    assert_eq!(rig.state.take_events(false, rig.now).events.len(), 2);
}
