//! Whatever bytes come: the decoders take them or leave them, and what they take is what would be sent.
//!
//! `tests/corpus` holds frames of every kind; each run changes them, and starts from nothing too.

#![expect(clippy::unwrap_used, reason = "a failed step of a test fails the test")]

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use undercroft_core::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_wire::frame::{self, Kind};
use undercroft_wire::protocol::{Hashes, Ready, Reply, Request};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

/// One frame of every kind.
fn samples() -> Vec<(String, Vec<u8>)> {
    let hashes = Hashes {
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
        hash_block_tokens: 16,
        alignment_tokens: 16,
        groups: kinds.into_iter().map(group).collect(),
    };
    let requests = [
        Request::Register {
            spec,
            dropped_tokens: 1,
            private: true,
        },
        Request::Submit {
            request: u64::MAX,
            version: 1,
            hashes,
            local_tokens: 16,
            max_tokens: u32::MAX,
            asked: true,
            wait_ns: Some((1, 2)),
        },
        Request::Ask { request: 1 },
        Request::Release { request: 1 },
        Request::Forget { request: 1 },
        Request::BeginLoad {
            request: 1,
            load: 2,
            local_tokens: 16,
            external_tokens: 32,
        },
        Request::EndLoad { load: 2, ok: true },
        Request::BeginSave {
            request: 1,
            save: 3,
            hashes,
            tokens: 96,
            offers: vec![(1, 2, 3)],
        },
        Request::EndSave { save: 3, ok: false },
        Request::Reset { ticket: 4 },
        Request::Ping,
        Request::Status,
    ];
    let ready = Ready {
        tokens: 96,
        shared_tokens: 128,
        from_disk: Some((16, 96)),
        extents: vec![(0, 1, vec![-1, 0, i64::MAX])],
    };
    let replies = [
        Reply::Registered {
            session: 5,
            namespace: "ab".repeat(32),
            generation: 6,
            info: "{}".to_owned(),
        },
        Reply::Refused {
            reason: "no".to_owned(),
        },
        Reply::Answer {
            request: 1,
            version: 1,
            direct: true,
            ready: Some(ready),
        },
        Reply::Granted {
            save: 3,
            refused: true,
            extents: vec![(0, 1, vec![4096])],
        },
        Reply::Reset {
            ticket: 4,
            ok: true,
        },
        Reply::Pong {
            stats: "{}".to_owned(),
        },
        Reply::Status {
            json: "{}".to_owned(),
        },
    ];
    let name = |text: String| text.split([' ', '{']).next().unwrap().to_lowercase();
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
    all.push(("attach".to_owned(), frame::attach_request(9).to_vec()));
    all.push(("arena".to_owned(), frame::arena_answer(1 << 30, 9).to_vec()));
    all
}

/// Decodes as server and client do. What is taken must be the same when it is said again.
fn take(bytes: &[u8]) {
    let Ok(Some((header, body, len))) = frame::first(bytes) else {
        return;
    };
    assert!(len <= bytes.len());
    let mut again = Vec::new();
    match header.kind {
        Kind::Request => {
            if let Ok(request) = Request::decode(body) {
                assert!(request.append_to(&mut again));
                let (_, said, _) = frame::first(&again).unwrap().unwrap();
                assert_eq!(Request::decode(said).unwrap(), request);
                if let Request::Submit { hashes, .. } = request {
                    let mut known = Vec::new();
                    let fits = hashes.append_to(&mut known);
                    assert!(fits || known.is_empty());
                }
            }
        }
        Kind::Reply => {
            if let Ok(reply) = Reply::decode(body) {
                assert!(reply.append_to(&mut again));
                let (_, said, _) = frame::first(&again).unwrap().unwrap();
                assert_eq!(Reply::decode(said).unwrap(), reply);
            }
        }
        Kind::Attach | Kind::Arena => {}
    }
}

/// A change of the protocol changes the corpus, and its version: run with UNDERCROFT_WRITE_CORPUS=1.
#[test]
fn the_corpus_is_what_this_version_says() {
    for (name, bytes) in samples() {
        let path = corpus().join(name);
        if std::env::var_os("UNDERCROFT_WRITE_CORPUS").is_some() {
            fs::create_dir_all(corpus()).unwrap();
            fs::write(&path, &bytes).unwrap();
        }
        assert_eq!(fs::read(&path).unwrap(), bytes, "{path:?}");
        take(&bytes);
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
                Kind::Request => assert!(Request::decode(&body[..len]).is_err()),
                Kind::Reply => assert!(Reply::decode(&body[..len]).is_err()),
                Kind::Attach | Kind::Arena => {}
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
        let mut bytes = b"UCFT\x02\x00".to_vec();
        bytes.extend([kind, 0]);
        bytes.extend(len.to_le_bytes());
        bytes.extend(body);
        take(&bytes);
    }
}
