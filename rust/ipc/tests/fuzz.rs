//! The decoders accept or refuse any bytes, and encode an accepted message to the same message again.
//!
//! `tests/corpus` holds frames of every kind; each run changes them, and starts with random bytes too.

#![expect(clippy::unwrap_used, reason = "a failed step of a test fails the test")]

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use undercroft_contract::explain::{ExplainQuery, Reason};
use undercroft_contract::hint::{Hint, HintAnswer};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_contract::session::{
    ArenaOffset, BlockEvent, Brought, EventTier, Extent, GiveUp, Offer, Priority, PromotionWait,
    SaveEnd, SaveRefusal, SessionToken, Step, Tokens, TurnEnd,
};
use undercroft_ipc::OperatorRequest;
use undercroft_ipc::frame::{self, FrameKind};
use undercroft_ipc::protocol::{
    ClientMessage, HashRun, HintMessage, LeasedHit, LookupAnswer, LookupMessage, SaveMessage,
    ServerMessage,
};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

fn event(tier: EventTier, stored: bool) -> BlockEvent {
    let hash = |byte| BlockHash::new(&[byte; 32]);
    BlockEvent {
        tier,
        stored,
        group: 3,
        hash: hash(1).unwrap(),
        parent: hash(2).filter(|_| stored),
    }
}

/// One frame of every kind.
fn samples() -> Vec<(String, Vec<u8>)> {
    let hashes = HashRun {
        known: 3,
        hash_bytes: 32,
        bytes: &[7; 96],
    };
    let kinds = [
        GroupKind::Full,
        GroupKind::SlidingWindow { tokens: 256 },
        GroupKind::ChunkedLocal { tokens: 8192 },
        GroupKind::State,
        GroupKind::Ignored,
    ];
    let group = |kind| GroupSpec {
        kind,
        block_tokens: 16,
        payload_bytes: 1 << 20,
    };
    let spec = NamespaceSpec {
        description: "{\"model\": \"m\"}".to_owned(),
        hash_block_size: 16,
        alignment_tokens: 16,
        groups: kinds.into_iter().map(group).collect(),
    };
    let requests = [
        ClientMessage::Register {
            namespace: spec,
            dropped_tokens: Tokens(1),
            private: true,
            tenant_share: 300,
        },
        ClientMessage::Lookup(LookupMessage {
            request: u64::MAX,
            version: 1,
            label: "",
            computed: Tokens(16),
            max: Tokens::MAX,
            min: Tokens(0),
            priority: Priority::Demand,
            wait: Some(PromotionWait::Limit {
                base_ns: 1,
                per_1k_tokens_ns: 2,
            }),
            queued: Tokens(9),
            hashes,
        }),
        ClientMessage::Demand {
            request: 1,
            queued: Tokens(7),
        },
        ClientMessage::ReportSteps {
            steps: vec![
                Step {
                    tokens: 512,
                    positions: 9000,
                    decodes: 3,
                    duration_ns: 1
                };
                3
            ],
        },
        ClientMessage::EndLookup { request: 1 },
        ClientMessage::FinishRequest {
            request: 1,
            turn_end: TurnEnd(7),
        },
        ClientMessage::BeginLoad {
            request: 1,
            transfer: 2,
            computed: Tokens(16),
            external: Tokens(32),
        },
        ClientMessage::BeginSave(SaveMessage {
            request: 1,
            transfer: 3,
            tokens: Tokens(96),
            offers: vec![Offer {
                group: 1,
                first_block: 2,
                end_block: 3,
            }],
            only_offers: true,
            is_wanted: false,
            hashes,
        }),
        ClientMessage::EndTransfer {
            transfer: 3,
            ok: false,
        },
        ClientMessage::GiveUp {
            transfer: 3,
            reason: GiveUp::Retry,
        },
        ClientMessage::ChangeWeights {
            description: Some("step 1".to_owned()),
        },
        ClientMessage::Reset { reset: 4 },
        ClientMessage::Ping,
        ClientMessage::Status,
        ClientMessage::TakeEvents { restart: true },
        ClientMessage::Hint(HintMessage {
            request: 1,
            number: 5,
            max: Tokens(96),
            hint: Hint::Pin {
                ttl_ns: 600_000_000_000,
                name: "a chat".to_owned(),
            },
            hashes,
        }),
        ClientMessage::Operate(OperatorRequest::Explain(ExplainQuery {
            request: "cmpl-1".to_owned(),
            misses: true,
            before: Some(3),
        })),
    ];
    let last = ArenaOffset::new(i64::MAX as u64);
    let extent = Extent {
        group: 0,
        first_block: 1,
        offsets: vec![ArenaOffset::NONE, ArenaOffset::new(0), last],
    };
    let hit = LeasedHit {
        tokens: Tokens(96),
        shared: Tokens(128),
        brought: Brought {
            disk: Some((Tokens(16), Tokens(96))),
            remote: None,
        },
        extents: vec![extent.clone()],
    };
    let answer = |answer| ServerMessage::Answer {
        request: 1,
        version: 1,
        direct: true,
        answer,
        rest: Some(Reason::EvictedDisk.into()),
    };
    let replies = [
        ServerMessage::Registered {
            session: SessionToken(5),
            arena_id: 6,
            info: "{}".to_owned(),
        },
        ServerMessage::Refused {
            reason: "no".to_owned(),
        },
        answer(LookupAnswer::Hit(hit)),
        ServerMessage::Granted {
            transfer: 3,
            end: SaveEnd {
                tokens: Tokens(48),
                refused: Some(SaveRefusal::PrefixGone),
                lacks: vec![Offer {
                    group: 0,
                    first_block: 3,
                    end_block: 9,
                }],
            },
            extents: vec![extent],
        },
        ServerMessage::Reset { reset: 4, ok: true },
        ServerMessage::Hinted {
            number: 5,
            answer: HintAnswer::Clipped(Tokens(64)),
        },
        ServerMessage::Pong {
            stats: "{}".to_owned(),
        },
        ServerMessage::Events {
            cleared: true,
            more: false,
            events: vec![
                event(EventTier::Disk, true),
                event(EventTier::Host, false),
                event(EventTier::Remote, true),
            ],
        },
        ServerMessage::Status {
            json: "{}".to_owned(),
        },
        ServerMessage::Operated {
            json: "{}".to_owned(),
        },
    ];
    let name = |text: String| text.split([' ', '{', '(']).next().unwrap().to_lowercase();
    let mut all = Vec::new();
    for request in &requests {
        let mut bytes = Vec::new();
        assert!(request.append_to(&mut bytes));
        all.push((format!("request-{}", name(format!("{request:?}"))), bytes));
    }
    for reply in &replies {
        let mut bytes = Vec::new();
        assert!(reply.append_to(&mut bytes));
        all.push((format!("reply-{}", name(format!("{reply:?}"))), bytes));
    }
    all.push((
        "attach".to_owned(),
        frame::attach_request(SessionToken(9)).to_vec(),
    ));
    all.push(("arena".to_owned(), frame::arena_answer(1 << 30, 9).to_vec()));
    all
}

/// Decodes as server and client do. An accepted message must be the same after encoding and decoding it again.
/// Returns whether there is a frame whose body is decoded.
fn take(bytes: &[u8]) -> bool {
    let Ok(Some((header, body, len))) = frame::first(bytes) else {
        return false;
    };
    assert!(len <= bytes.len());
    let mut again = Vec::new();
    match header.kind {
        FrameKind::Request => {
            if let Ok(request) = ClientMessage::decode(body) {
                assert!(request.append_to(&mut again));
                let (_, said, _) = frame::first(&again).unwrap().unwrap();
                assert_eq!(ClientMessage::decode(said).unwrap(), request);
                if let ClientMessage::Lookup(lookup) = request {
                    let mut known = Vec::new();
                    let fits = lookup.hashes.append_to(&mut known);
                    assert!(fits || known.is_empty());
                }
            }
        }
        FrameKind::Reply => {
            if let Ok(reply) = ServerMessage::decode(body) {
                assert!(reply.append_to(&mut again));
                let (_, said, _) = frame::first(&again).unwrap().unwrap();
                assert_eq!(ServerMessage::decode(said).unwrap(), reply);
            }
        }
        FrameKind::Attach | FrameKind::Arena | FrameKind::LetGo => {}
    }
    true
}

/// A change of the protocol changes the corpus, and its version: run with UNDERCROFT_WRITE_CORPUS=1.
#[test]
fn the_corpus_matches_the_messages_of_this_version() {
    for (name, bytes) in samples() {
        let path = corpus().join(name);
        if std::env::var_os("UNDERCROFT_WRITE_CORPUS").is_some() {
            fs::create_dir_all(corpus()).unwrap();
            fs::write(&path, &bytes).unwrap();
        }
        assert_eq!(fs::read(&path).unwrap(), bytes, "{path:?}");
        assert!(take(&bytes), "{path:?} is not decoded");
    }
}

#[test]
fn every_cut_of_a_frame_is_incomplete_or_malformed() {
    for (_, bytes) in samples() {
        for len in 0..bytes.len() {
            assert!(matches!(frame::first(&bytes[..len]), Ok(None)));
        }
        let (header, body, _) = frame::first(&bytes).unwrap().unwrap();
        for len in 0..body.len() {
            match header.kind {
                FrameKind::Request => assert!(ClientMessage::decode(&body[..len]).is_err()),
                FrameKind::Reply => assert!(ServerMessage::decode(&body[..len]).is_err()),
                FrameKind::Attach | FrameKind::Arena | FrameKind::LetGo => {}
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn changed_frames_do_no_harm(
        which in 0..samples().len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        extra in prop::collection::vec(any::<u8>(), 0..16),
    ) {
        let (_, mut bytes) = samples().swap_remove(which);
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.extend(extra);
        take(&bytes);
    }

    #[test]
    fn random_bodies_do_no_harm(kind in 3..=4_u8, body in prop::collection::vec(any::<u8>(), 1..256)) {
        let len = u32::try_from(body.len()).unwrap();
        let mut bytes = frame::MAGIC.to_vec();
        bytes.extend(frame::VERSION.to_le_bytes());
        bytes.extend([kind, 0]);
        bytes.extend(len.to_le_bytes());
        bytes.extend(body);
        prop_assert!(take(&bytes), "the body is not decoded");
    }
}
