//! A directory that is given up while one of its reads is in flight.

use undercroft_contract::io::{IoFault, IoRequest};
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{LookupRequest, Offer, Tokens};
use undercroft_engine::EngineConfig;
use undercroft_engine::disk::Health;

use crate::rig::{HASH_BLOCK, Rig, group, prompt};
use crate::{DEPTH, EIO, SMALL, config};

/// Blocks of a prompt. It has states after the middle and at the end.
const LEN: u32 = 10;
const MIDDLE: u32 = 5;

/// An engine that starts with prompts on two directories, and the directory of each prompt.
fn prompts_on_two_directories(config: &EngineConfig) -> (Rig, Vec<u16>) {
    let groups = vec![
        group(GroupKind::Full, SMALL),
        group(GroupKind::State, SMALL),
    ];
    let mut rig = Rig::with_groups(config.clone(), &[256 << 20; 2], groups);
    let mut devices = Vec::new();
    for number in 0..8 {
        rig.save_with(number, LEN, &[state_at(MIDDLE), state_at(LEN)]);
        let writes = rig.start(DEPTH);
        let is_payload = |of: &&IoRequest| matches!(of, IoRequest::WritePayload { .. });
        devices.push(writes.iter().find(is_payload).unwrap().device());
        writes.into_iter().for_each(|request| rig.end(request));
        rig.settle();
    }
    (rig.restart(config.clone()), devices)
}

/// The state behind a number of blocks.
fn state_at(end_block: u32) -> Offer {
    Offer {
        group: 1,
        first_block: end_block - 1,
        end_block,
    }
}

/// The blocks of the answer to a request of its own for the first `len` blocks of a prompt.
fn ask(rig: &mut Rig, name: &str, number: u64, len: u32) -> Option<u32> {
    let hashes = prompt(number, len);
    let question = LookupRequest::new(name, &hashes);
    let answer = rig.engine.lookup(rig.session, &question);
    answer.tokens().map(|Tokens(tokens)| tokens / HASH_BLOCK)
}

/// The reads that start now. Other operations end.
fn start_reads(rig: &mut Rig) -> Vec<IoRequest> {
    let (reads, others): (Vec<_>, Vec<_>) =
        rig.start(DEPTH).into_iter().partition(IoRequest::is_read);
    others.into_iter().for_each(|request| rig.end(request));
    reads
}

/// A read in flight of a directory that was given up. The other payloads of its node are on the other directory.
struct Held {
    rig: Rig,
    read: IoRequest,
    /// The prompt whose state in the middle is read.
    prompt: u64,
    /// A prompt that only the other directory has.
    other: u64,
}

impl Held {
    fn new() -> Self {
        let (mut rig, devices) = prompts_on_two_directories(&config(64 << 20));
        let on = |device: u16| {
            let prompts = (0..).zip(&devices).filter(move |&(_, &at)| at == device);
            prompts.map(|(number, _)| number)
        };
        let (prompt, lost) = (on(0).next().unwrap(), on(0).nth(1).unwrap());
        let other = on(1).next().unwrap();

        assert_eq!(ask(&mut rig, "whole", prompt, LEN), None);
        rig.settle();
        assert_eq!(ask(&mut rig, "whole", prompt, LEN), Some(LEN));
        assert_eq!(ask(&mut rig, "half", prompt, MIDDLE), None);
        let mut reads = start_reads(&mut rig);
        let read = reads.pop().unwrap();
        assert!(reads.is_empty() && read.device() == 0);

        assert_eq!(ask(&mut rig, "lost", lost, LEN), None);
        for request in start_reads(&mut rig) {
            rig.finish(&request, Err(IoFault::Os(EIO)));
        }
        assert!(matches!(
            rig.engine.devices()[0].health,
            Health::Failed { .. }
        ));
        rig.settle();
        let before = rig.blocks();
        assert_eq!(before[0], 0);

        assert_eq!(ask(&mut rig, "again", prompt, LEN), Some(LEN));
        rig.settle();
        let moved = rig.engine.devices()[1].blocks - before[1];
        assert_eq!(moved, u64::from(LEN) + 1, "all but the state that is read");
        Self {
            rig,
            read,
            prompt,
            other,
        }
    }
}

#[test]
fn a_read_that_ends_after_its_directory_was_given_up_brings_its_payload() {
    let Held {
        mut rig,
        read,
        prompt,
        ..
    } = Held::new();
    rig.end(read);
    assert_eq!(ask(&mut rig, "half", prompt, MIDDLE), Some(MIDDLE));
    rig.settle();
    assert!(rig.engine.is_quiet());
}

#[test]
fn a_read_that_fails_after_its_directory_was_given_up_is_no_failure_of_another_directory() {
    let Held {
        mut rig,
        read,
        prompt,
        other,
    } = Held::new();
    assert_eq!(ask(&mut rig, "other", other, LEN), None);
    // One failure more, and this directory would be given up.
    let failed = start_reads(&mut rig);
    for request in failed.iter().take(7) {
        assert_eq!(request.device(), 1);
        rig.finish(request, Err(IoFault::Os(EIO)));
    }
    rig.finish(&read, Err(IoFault::Os(EIO)));
    assert_eq!(rig.engine.devices()[1].health, Health::Good);
    failed.into_iter().skip(7).for_each(|read| rig.end(read));
    rig.settle();
    assert_eq!(ask(&mut rig, "again", prompt, LEN), Some(LEN));
}

#[test]
fn a_write_that_ends_after_its_directory_was_given_up_leaves_no_block_there() {
    let (mut rig, devices) = prompts_on_two_directories(&config(64 << 20));
    let (mut held, mut number) = (Vec::new(), 100);
    while held.is_empty() {
        rig.save_with(number, LEN, &[state_at(LEN)]);
        number += 1;
        let is_held = |of: &IoRequest| matches!(of, IoRequest::WritePayload { device: 0, .. });
        let (of_first, others): (Vec<_>, Vec<_>) = rig.start(DEPTH).into_iter().partition(is_held);
        held = of_first;
        others.into_iter().for_each(|request| rig.end(request));
    }
    let lost = devices.iter().position(|&at| at == 0).unwrap();
    assert_eq!(ask(&mut rig, "lost", lost as u64, LEN), None);
    for request in start_reads(&mut rig) {
        rig.finish(&request, Err(IoFault::Os(EIO)));
    }
    assert!(matches!(
        rig.engine.devices()[0].health,
        Health::Failed { .. }
    ));
    rig.settle();
    held.into_iter().for_each(|request| rig.end(request));
    rig.settle();
    assert_eq!(rig.engine.devices()[0].blocks, 0);
    assert_eq!(ask(&mut rig, "saved", number - 1, LEN), Some(LEN));
    rig.settle();
    assert!(rig.engine.is_quiet());
}
