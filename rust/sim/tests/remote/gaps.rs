//! Objects for blocks whose payloads were evicted for another size class: their nodes stay in the index only for the
//! sake of blocks below, which no lookup reaches any more.

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::remote::RemoteWrite;
use undercroft_contract::session::{LookupRequest, Offer, SaveRefusal, SaveRequest, Tokens};
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::{Engine, SessionId};

use crate::rig::{BLOCK, Host, Random, SLOT, chain, config, model};
use crate::store::Objects;
use crate::{FULL, MODEL, computed, host};

/// Blocks of the prompt before the gap, in the gap, and in all.
const BEFORE: usize = 8;
const GAP: usize = 16;
const ALL: usize = 40;

/// A model whose payloads take two slots of the other models.
fn wide() -> NamespaceSpec {
    let mut spec = model(2, FULL);
    spec.groups[0].payload_bytes = 2 * SLOT as u32;
    spec
}

fn one_block(branch: u64) -> Vec<BlockHash> {
    chain(&[(branch, 1)])
}

/// A prompt that no block of the gap is part of is looked up, and found.
fn touch(host: &mut Host, session: SessionId, branch: u64) {
    let hashes = one_block(branch);
    let found = host.look(session, &LookupRequest::new("t", &hashes));
    assert_eq!(found.tokens(), Some(Tokens(BLOCK)), "block {branch}");
    host.enter(|engine| engine.finish_request(session, "t"));
}

fn gaps(engine: &Engine) -> u64 {
    engine.inspect().moves().gaps
}

/// A host without a disk whose arena is full. Of the prompt it has the blocks before the gap and `behind` blocks behind
/// the gap, which are the next to be evicted.
fn host_with_gap(behind: usize, hashes: &[BlockHash], segment: u64) -> (Host, SessionId) {
    host_with_gap_under(PolicyKind::Lru, behind, hashes, segment)
}

fn host_with_gap_under(
    policy: PolicyKind,
    behind: usize,
    hashes: &[BlockHash],
    segment: u64,
) -> (Host, SessionId) {
    let mut config = config(64, segment);
    config.policy = policy;
    config.remote.as_mut().expect("it is set").write = RemoteWrite::None;
    config.promotion_bytes = config.host_bytes;
    config.removals = 1024;
    let slots = (config.host_bytes / SLOT) as usize;
    let (mut host, session) = host(config);
    let saved = BEFORE + GAP + behind;
    let others = 1000..1000 + (slots - saved) as u64;
    // The gap takes two whole pages of eight slots.
    for branch in others.clone().take(8) {
        host.save((session, "o"), &one_block(branch), MODEL);
    }
    host.save((session, "w"), &hashes[..saved], MODEL);
    for branch in others.clone().skip(8) {
        host.save((session, "o"), &one_block(branch), MODEL);
    }
    for _ in 0..20 {
        others
            .clone()
            .for_each(|branch| touch(&mut host, session, branch));
    }
    let gauges = host.engine.gauges();
    assert_eq!(gauges.host_used_bytes, gauges.host_capacity_bytes);
    let wide = host.enter(|engine| engine.open_session(wide()));
    let (wide, block) = (wide.expect("a payload fits"), one_block(1));
    let transfer = (0..100).find_map(|_| {
        let save = SaveRequest::new("b", &block, Tokens(BLOCK));
        host.enter(|engine| engine.begin_save(wide, &save)).transfer
    });
    let transfer = transfer.expect("a page moves to the other model");
    host.enter(|engine| engine.end_transfer(transfer.id, true));
    assert_eq!(gaps(&host.engine), GAP as u64);
    let gauges = host.engine.gauges();
    assert_eq!(gauges.host_blocks, (slots - GAP + 1) as u64);
    host.check();
    (host, session)
}

/// What another host has written of the prompt, in objects of so many blocks.
fn written(hashes: &[BlockHash], segment: u64) -> Objects {
    computed(&config(256, segment), hashes)
}

fn asks(behind: usize, segment: u64) {
    let hashes = chain(&[(1, ALL as u32)]);
    let mut objects = written(&hashes, segment);
    let (mut reader, session) = host_with_gap(behind, &hashes, segment);
    let mut random = Random(behind as u64);
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    reader.check();
    assert_eq!(tokens, ALL as u32 * BLOCK, "{behind} blocks behind");
    let loaded = reader.load((session, "r"), tokens, &hashes, MODEL);
    assert_eq!(loaded, ALL as u32);
    reader.check();
}

#[test]
fn an_object_continues_behind_a_block_that_its_own_eviction_bares() {
    for behind in [1, 2, 7, 12] {
        for segment in [2, 4, 8] {
            asks(behind, segment);
        }
    }
}

/// One block behind the gap: the first eviction bares the whole gap.
#[test]
fn an_object_ends_at_a_block_that_its_own_eviction_bares() {
    let hashes = chain(&[(1, ALL as u32)]);
    let (mut reader, session) = host_with_gap(1, &hashes, 1);
    let mut objects = written(&hashes[..=BEFORE], 1);
    let mut random = Random(1);
    let question = LookupRequest::new("r", &hashes);
    assert!(reader.look(session, &question).is_pending());
    while objects.gets == 0 {
        reader.run(1, &mut objects, &mut random);
    }
    reader.check();
    // A new node takes the place of a freed node.
    let (block, other) = (one_block(7), "s");
    let save = SaveRequest::new(other, &block, Tokens(BLOCK));
    let granted = reader.enter(|engine| engine.begin_save(session, &save));
    let transfer = granted.transfer.expect("another block is evicted");
    reader.check();
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, (BEFORE as u32 + 1) * BLOCK);
    let unsaved = reader.look(session, &LookupRequest::new("u", &block));
    assert_eq!(
        unsaved.tokens().unwrap_or_default(),
        Tokens(0),
        "nobody has copied it"
    );
    reader.fill(&transfer.extents, &block, MODEL);
    reader.enter(|engine| engine.end_transfer(transfer.id, true));
    assert_eq!(
        reader.load((session, "r"), tokens, &hashes, MODEL),
        BEFORE as u32 + 1
    );
    reader.check();
}

/// A client that holds a part of the gap, and blocks behind it.
#[test]
fn a_save_fills_a_gap_up_to_the_first_block_that_its_client_lacks() {
    for policy in [PolicyKind::Lru, PolicyKind::LeafHd] {
        fills_a_gap(policy);
    }
}

fn fills_a_gap(policy: PolicyKind) {
    let hashes = chain(&[(1, ALL as u32)]);
    let (mut host, session) = host_with_gap_under(policy, 7, &hashes, 4);
    let range = |first, end| Offer {
        group: 0,
        first_block: first as u32,
        end_block: end as u32,
    };
    let (middle, behind) = (BEFORE + 4, BEFORE + GAP);
    let held = [
        range(BEFORE, middle),
        range(middle + 1, middle + 3),
        range(behind, ALL),
    ];
    let save = SaveRequest::new("s", &hashes, Tokens(ALL as u32 * BLOCK));
    let save = save.offers(&held).only_offers(true);
    let granted = host.enter(|engine| engine.begin_save(session, &save));
    let lacks = vec![range(middle, middle + 1), range(middle + 3, behind)];
    assert_eq!(granted.end.lacks, lacks);
    assert_eq!(granted.end.refused, Some(SaveRefusal::PrefixGone));
    assert_eq!(granted.end.tokens, Tokens(middle as u32 * BLOCK));
    let transfer = granted.transfer.expect("the beginning of the gap");
    let slots: usize = transfer.extents.iter().map(|one| one.offsets.len()).sum();
    assert_eq!(slots, middle - BEFORE);
    host.fill(&transfer.extents, &hashes, MODEL);
    host.enter(|engine| engine.end_transfer(transfer.id, true));
    let kept = &hashes[..middle];
    let found = host.look(session, &LookupRequest::new("r", &kept));
    assert_eq!(found.tokens(), Some(granted.end.tokens));
    host.check();
}
