//! Namespaces with a share of the tiers keep their blocks while others flood.

use undercroft_contract::error::RegisterError;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{LookupRequest, SessionSpec, Tokens};
use undercroft_contract::tier::TENANTS_MAX;
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::{Engine, EngineConfig, SessionId};

use super::{Draw, MIB, TOKENS, hash, request};

const CAPACITY: u64 = 16 * MIB;
const PAYLOAD: u32 = 16 << 10;
const BLOCKS: u64 = CAPACITY / PAYLOAD as u64;
/// Blocks of a chat.
const CHAT: u64 = 16;

fn engine(policy: PolicyKind) -> Engine {
    Engine::new(EngineConfig {
        policy,
        ..EngineConfig::new(CAPACITY)
    })
}

fn spec(name: &str, payload: u32, tenant_share: u16) -> SessionSpec {
    let namespace = NamespaceSpec::uniform(name, TOKENS, &[(GroupKind::Full, payload)]);
    SessionSpec {
        tenant_share,
        ..namespace.into()
    }
}

fn open(engine: &mut Engine, name: &str, payload: u32, share: u16) -> SessionId {
    let session = engine.open_session(spec(name, payload, share));
    session.expect("the share fits")
}

fn chain(model: u64, chat: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks).map(|block| hash(model, chat, block)).collect()
}

/// Saves chats that nobody asks for again.
fn flood(engine: &mut Engine, session: SessionId, from: u64, chats: u64) {
    for chat in from..from + chats {
        request(engine, session, &chain(9, chat, CHAT), 0);
    }
}

fn save(engine: &mut Engine, session: SessionId, chats: u64) {
    for chat in 0..chats {
        request(engine, session, &chain(1, chat, CHAT), 0);
    }
}

/// Blocks of the first chats that a lookup finds.
fn found(engine: &mut Engine, session: SessionId, chats: u64) -> u64 {
    let of = |chat| {
        let known = chain(1, chat, CHAT);
        let answer = engine.lookup(session, &LookupRequest::new("found", &known));
        engine.finish_request(session, "found");
        let Tokens(tokens) = answer.tokens().expect("nothing is on disk");
        u64::from(tokens / TOKENS)
    };
    (0..chats).map(of).sum()
}

#[test]
fn a_flood_leaves_a_tenant_its_share() {
    let chats = BLOCKS / 4 / CHAT;
    for policy in [PolicyKind::Lru, PolicyKind::LeafHd] {
        // Payloads of the same size class, and of another, which needs pages of its own.
        for floods in [PAYLOAD, 40 << 10] {
            for share in [0, 300] {
                let mut engine = engine(policy);
                let tenant = open(&mut engine, "tenant", PAYLOAD, share);
                let other = open(&mut engine, "other", floods, 0);
                save(&mut engine, tenant, chats);
                flood(&mut engine, other, 0, 4 * BLOCKS / CHAT);
                // A model whose payloads have no pages at all yet.
                let third = open(&mut engine, "third", 24 << 10, 0);
                flood(&mut engine, third, 0, BLOCKS / CHAT);
                let found = found(&mut engine, tenant, chats);
                if share > 0 {
                    assert_eq!(found, chats * CHAT, "{policy:?}, {floods} bytes");
                } else if policy == PolicyKind::Lru {
                    assert_eq!(found, 0, "without a share, {floods} bytes");
                }
            }
        }
    }
}

#[test]
fn a_tenant_takes_its_share_from_others_in_a_full_tier() {
    for (policy, floods) in [
        (PolicyKind::Lru, PAYLOAD),
        (PolicyKind::Lru, 40 << 10),
        (PolicyKind::LeafHd, PAYLOAD),
    ] {
        let mut engine = engine(policy);
        let other = open(&mut engine, "other", floods, 0);
        flood(&mut engine, other, 0, 2 * BLOCKS / CHAT);
        // Under leafhd these blocks are worth more than any new one.
        for _ in 0..200 {
            flood(&mut engine, other, BLOCKS / CHAT, 1);
        }
        let tenant = open(&mut engine, "tenant", PAYLOAD, 300);
        let chats = BLOCKS / 4 / CHAT;
        // The flood goes on between the tenant's chats, so its blocks are always the younger ones.
        for chat in 0..chats {
            request(&mut engine, tenant, &chain(1, chat, CHAT), 0);
            flood(&mut engine, other, 10_000 + 8 * chat, 8);
        }
        let found = found(&mut engine, tenant, chats);
        assert_eq!(found, chats * CHAT, "{policy:?}, {floods} bytes");
    }
}

#[test]
fn blocks_beyond_the_share_are_evicted_like_others() {
    let mut engine = engine(PolicyKind::Lru);
    let tenant = open(&mut engine, "tenant", PAYLOAD, 300);
    let other = open(&mut engine, "other", PAYLOAD, 0);
    let chats = BLOCKS * 8 / 10 / CHAT;
    save(&mut engine, tenant, chats);
    assert_eq!(
        found(&mut engine, tenant, chats),
        chats * CHAT,
        "a share is no limit"
    );
    flood(&mut engine, other, 0, 4 * BLOCKS / CHAT);
    let found = found(&mut engine, tenant, chats) as f64 / BLOCKS as f64;
    assert!((0.28..0.32).contains(&found), "{found} of the tier");
}

#[test]
fn a_tenant_within_its_share_makes_room_for_its_own_blocks() {
    let mut engine = engine(PolicyKind::Lru);
    let first = open(&mut engine, "first", PAYLOAD, 500);
    let second = open(&mut engine, "second", PAYLOAD, 500);
    let chats = BLOCKS / 2 / CHAT - 1;
    save(&mut engine, first, chats);
    flood(&mut engine, second, 0, 4 * BLOCKS / CHAT);
    assert_eq!(found(&mut engine, first, chats), chats * CHAT);
    // The flood's last blocks are there: the second tenant is not refused.
    let last = chain(9, 4 * BLOCKS / CHAT - 1, CHAT);
    let answer = engine.lookup(second, &LookupRequest::new("last", &last));
    assert_eq!(answer.tokens(), Some(Tokens(CHAT as u32 * TOKENS)));
}

#[test]
fn a_share_that_comes_or_goes_late_counts_for_the_blocks_that_are_there() {
    let mut engine = engine(PolicyKind::Lru);
    let tenant = open(&mut engine, "tenant", PAYLOAD, 0);
    let other = open(&mut engine, "other", PAYLOAD, 0);
    let chats = BLOCKS / 4 / CHAT;
    save(&mut engine, tenant, chats);
    let restarted = open(&mut engine, "tenant", PAYLOAD, 300);
    flood(&mut engine, other, 0, 4 * BLOCKS / CHAT);
    let kept = found(&mut engine, tenant, chats) as f64 / (chats * CHAT) as f64;
    assert!(
        kept > 0.99,
        "{kept} of the blocks that were there before the share"
    );
    engine.close_session(restarted);
    // The namespace has a session, which wants no share, once another has come.
    open(&mut engine, "third", PAYLOAD, 100);
    flood(&mut engine, other, 10_000, 4 * BLOCKS / CHAT);
    assert_eq!(found(&mut engine, tenant, chats), 0);
}

#[test]
fn a_namespace_without_a_session_keeps_what_others_leave_of_its_share() {
    let chats = BLOCKS / 4 / CHAT;
    for (asked, least, most) in [(700, 0.24, 0.26), (900, 0.08, 0.11)] {
        let mut engine = engine(PolicyKind::Lru);
        let tenant = open(&mut engine, "tenant", PAYLOAD, 300);
        save(&mut engine, tenant, chats);
        engine.close_session(tenant);
        let other = open(&mut engine, "other", PAYLOAD, asked);
        flood(&mut engine, other, 0, 4 * BLOCKS / CHAT);
        let tenant = open(&mut engine, "tenant", PAYLOAD, 0);
        let found = found(&mut engine, tenant, chats) as f64 / BLOCKS as f64;
        assert!(
            (least..most).contains(&found),
            "{found} of the tier beside {asked}"
        );
    }
}

#[test]
fn shares_that_do_not_fit_are_refused_by_name() {
    let mut engine = engine(PolicyKind::Lru);
    open(&mut engine, "first", PAYLOAD, 600);
    open(&mut engine, "first", PAYLOAD, 200);
    let refused = engine.open_session(spec("second", PAYLOAD, 401));
    let error = refused.expect_err("more than everything");
    assert!(matches!(
        error,
        RegisterError::ShareTooLarge {
            asked: 401,
            others: 600
        }
    ));
    let text = error.to_string();
    assert!(text.contains("tenant_share 40.1% does not fit"), "{text}");
    assert!(text.contains("60% already"), "{text}");
    assert!(engine.open_session(spec("first", PAYLOAD, 1001)).is_err());
    for tenant in 1..TENANTS_MAX {
        open(&mut engine, &format!("small {tenant}"), PAYLOAD, 1);
    }
    assert!(engine.open_session(spec("one more", PAYLOAD, 1)).is_err());
    open(&mut engine, "without", PAYLOAD, 0);
}

/// Share of the blocks asked for that are found, when chats go on and new ones begin.
fn hit_rate(engine: &mut Engine, session: SessionId, flooding: Option<SessionId>) -> f64 {
    let (mut draw, mut chats) = (Draw(7), vec![(0, 0); 40]);
    let (mut asked, mut hits, mut next, mut flooded) = (0, 0, 1, 0);
    for turn in 0..6000 {
        let at = draw.below(40).min(draw.below(40)) as usize;
        let (chat, blocks) = chats[at];
        let longer = blocks + 2 + draw.below(4);
        let hit = request(engine, session, &chain(1, chat, longer), blocks as usize);
        chats[at] = (chat, longer);
        if longer > 24 {
            chats[at] = (next, 0);
            next += 1;
        }
        if let Some(flooding) = flooding {
            flood(engine, flooding, flooded, 2);
            flooded += 2;
        }
        if turn >= 1000 {
            asked += blocks;
            hits += hit;
        }
    }
    hits as f64 / asked as f64
}

#[test]
fn a_tenant_with_a_share_of_30_percent_finds_what_it_finds_alone_in_30_percent() {
    let mut small = Engine::new(EngineConfig::new(CAPACITY * 3 / 10));
    let session = open(&mut small, "chats", PAYLOAD, 0);
    let alone = hit_rate(&mut small, session, None);
    let shared = |share| {
        let mut engine = engine(PolicyKind::Lru);
        let session = open(&mut engine, "chats", PAYLOAD, share);
        let flooding = open(&mut engine, "flood", PAYLOAD, 0);
        hit_rate(&mut engine, session, Some(flooding))
    };
    let (without, with) = (shared(0), shared(300));
    println!("alone in 30 %: {alone:.3}; beside a flood: {with:.3}; without a share: {without:.3}");
    assert!(
        with > alone - 0.02,
        "{with:.3} with the share, {alone:.3} alone"
    );
    assert!(without < alone - 0.05, "the flood is none: {without:.3}");
}
