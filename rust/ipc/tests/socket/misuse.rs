//! Frames that are malformed, oversized, or come out of order end their connection alone, and say nothing.

use std::io::Write;

use undercroft_contract::hint::Hint;
use undercroft_contract::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_contract::session::{Offer, Priority, Step, Tokens};
use undercroft_ipc::frame::{BODY_BYTES_MAX, FrameKind, Header};
use undercroft_ipc::protocol::{
    ClientMessage, HashRun, HintMessage, LookupMessage, SaveMessage, ServerMessage,
};

use crate::raw::{Raw, finished, joined, register, run};
use crate::rig::{Rig, TOKENS, hashes, spec, until};

fn lookup(hashes: HashRun<'_>) -> ClientMessage<'_> {
    ClientMessage::Lookup(LookupMessage {
        request: 1,
        version: 1,
        label: "",
        computed: Tokens(0),
        max: Tokens(64),
        min: Tokens(0),
        priority: Priority::Demand,
        wait: None,
        queued: Tokens(0),
        hashes,
    })
}

#[test]
fn a_malformed_or_misplaced_message_ends_only_its_connection() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut good, _) = Raw::registered(&socket);
    let bytes = joined(&hashes(1, 2));
    let gap = HashRun {
        known: 5,
        ..run(&bytes)
    };
    let no_length = HashRun {
        hash_bytes: 0,
        ..run(&bytes)
    };
    let too_long = HashRun {
        hash_bytes: 64,
        ..run(&bytes)
    };
    let ragged = run(&bytes[..40]);
    let begin_load = ClientMessage::BeginLoad {
        request: 99,
        transfer: 1,
        computed: Tokens(0),
        external: Tokens(16),
    };
    // Before there is a session.
    let mut before: Vec<ClientMessage<'_>> = vec![ClientMessage::Ping, lookup(run(&bytes))];
    before.push(ClientMessage::Reset { reset: 1 });
    let mut bad = 0;
    for request in &before {
        let mut raw = Raw::connect(&socket);
        raw.say(request);
        assert_eq!(raw.hear(), None, "{request:?}");
        bad += 1;
    }
    // With one.
    let within = [
        lookup(gap),
        lookup(no_length),
        lookup(too_long),
        lookup(ragged),
        begin_load,
        register(),
        ClientMessage::Status,
    ];
    for request in &within {
        let (mut raw, _) = Raw::registered(&socket);
        raw.say(request);
        assert_eq!(raw.hear(), None, "{request:?}");
        bad += 1;
    }
    // Bodies that are none, and a length over the limit, whose body never comes.
    let header = |kind, body_bytes| Header { kind, body_bytes }.encode();
    let frames: [(FrameKind, u32, &[u8]); 4] = [
        (FrameKind::Request, 3, b"\xff\xff\xff"),
        (FrameKind::Request, 2, b"\x0a\x00"),
        (FrameKind::Reply, 1, b"\x00"),
        (FrameKind::Request, BODY_BYTES_MAX + 1, b""),
    ];
    for (kind, len, body) in frames {
        let (mut raw, _) = Raw::registered(&socket);
        raw.stream.write_all(&header(kind, len)).unwrap();
        raw.stream.write_all(body).unwrap();
        assert_eq!(raw.hear(), None, "{kind:?} {body:?}");
        bad += 1;
    }
    until("all are counted", || rig.server.counters().malformed == bad);
    assert!(good.is_served());
    drop(good);
    until("nothing is left", || rig.in_use() == [0; 4]);
}

#[test]
fn ends_of_unknown_transfers_and_requests_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut raw, _) = Raw::registered(&socket);
    for ok in [false, true] {
        raw.say(&ClientMessage::EndTransfer { transfer: 1, ok });
    }
    raw.say(&ClientMessage::Demand {
        request: 1,
        queued: Tokens(0),
    });
    raw.say(&ClientMessage::EndLookup { request: 1 });
    raw.say(&finished(1));
    assert!(raw.is_served());
    assert_eq!(rig.server.counters().malformed, 0);
}

#[test]
fn requests_of_one_client_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut raw, _) = Raw::registered(&socket);
    let mut reader = raw.other_half();
    let replies = std::thread::spawn(move || {
        let mut replies = 0;
        while let Some(reply) = reader.hear() {
            replies += usize::from(matches!(reply, ServerMessage::Answer { .. }));
        }
        replies
    });
    for request in 0..=(1 << 16) {
        raw.lookup(request, &[]);
    }
    assert!(replies.join().unwrap() <= 1 << 16);
    until("counted", || rig.server.counters().malformed == 1);
}

/// A source of messages: a linear congruence is enough to mix numbers. The numbers of hashes and transfers follow the
/// protocol, since other numbers end the connection at once.
struct Numbers {
    state: u64,
    /// Hashes of each request that the server has.
    known: [usize; 4],
    transfers: u64,
}

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        let next = self.state.wrapping_mul(6_364_136_223_846_793_005);
        self.state = next.wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % end
    }

    fn tokens(&mut self) -> Tokens {
        let some = [0, 1, 15, 16, 17, 32, 64, 1 << 31, u32::MAX - 15, u32::MAX];
        Tokens(some[self.below(some.len())])
    }

    fn block(&mut self) -> u32 {
        [0, 1, 2, 5, u32::MAX - 1, u32::MAX][self.below(6)]
    }

    fn hashes<'a>(&mut self, request: u64, bytes: &'a [u8]) -> HashRun<'a> {
        let known = self.known[request as usize];
        let end = (known + self.below(4)).min(bytes.len() / 32);
        self.known[request as usize] = end;
        HashRun {
            known: known as u32,
            hash_bytes: 32,
            bytes: &bytes[32 * known..32 * end],
        }
    }

    fn offer(&mut self) -> Offer {
        Offer {
            group: [0, 1, 255][self.below(3)],
            first_block: self.block(),
            end_block: self.block(),
        }
    }

    fn hint(&mut self) -> Hint {
        let name = "n".repeat(self.below(3));
        let ttl_ns = [0, 1, u64::MAX][self.below(3)];
        match self.below(2) {
            0 => Hint::Pin { ttl_ns, name },
            _ => Hint::Release { name },
        }
    }

    /// Any message of a session's client.
    fn message<'a>(&mut self, bytes: &'a [u8]) -> ClientMessage<'a> {
        let request = self.below(4) as u64;
        self.transfers += 1;
        let (transfer, earlier) = (self.transfers, self.transfers - self.below(9) as u64);
        let (one, two) = (self.tokens(), self.tokens());
        match self.below(12) {
            0..=2 => ClientMessage::Lookup(LookupMessage {
                request,
                version: self.block(),
                label: "label",
                computed: one,
                max: two,
                min: self.tokens(),
                priority: [Priority::Demand, Priority::Prefetch][self.below(2)],
                wait: None,
                queued: self.tokens(),
                hashes: self.hashes(request, bytes),
            }),
            3 | 4 => ClientMessage::BeginSave(SaveMessage {
                request,
                transfer,
                tokens: one,
                offers: (0..self.below(3)).map(|_| self.offer()).collect(),
                only_offers: self.below(2) == 0,
                is_wanted: false,
                hashes: self.hashes(request, bytes),
            }),
            5 if self.below(8) == 0 => ClientMessage::BeginLoad {
                request,
                transfer,
                computed: one,
                external: two,
            },
            5..=7 => ClientMessage::EndTransfer {
                transfer: earlier,
                ok: self.below(2) == 0,
            },
            8 => {
                self.known[request as usize] = 0;
                finished(request)
            }
            9 => ClientMessage::EndLookup { request },
            10 => ClientMessage::Hint(HintMessage {
                request,
                number: transfer,
                max: one,
                hint: self.hint(),
                hashes: self.hashes(request, bytes),
            }),
            _ => match self.below(4) {
                0 => ClientMessage::Reset { reset: request },
                1 => ClientMessage::Demand {
                    request,
                    queued: one,
                },
                2 => ClientMessage::TakeEvents {
                    restart: self.below(2) == 0,
                },
                _ => ClientMessage::ReportSteps {
                    steps: vec![Step {
                        tokens: one.0,
                        positions: [0, u64::MAX][self.below(2)],
                        decodes: two.0,
                        duration_ns: [0, 1, u64::MAX][self.below(3)],
                    }],
                },
            },
        }
    }
}

#[test]
fn impossible_numbers_in_messages_harm_no_other_client() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, Some(&dir.path().join("disk")), 1);
    let (mut good, _) = Raw::registered(&socket);
    let bytes = joined(&hashes(1, 8));
    let windows = GroupSpec {
        kind: GroupKind::SlidingWindow { tokens: 2 * TOKENS },
        ..spec().groups[0]
    };
    let hybrid = ClientMessage::Register {
        namespace: NamespaceSpec {
            description: "windows".to_owned(),
            groups: vec![spec().groups[0], windows],
            ..spec()
        },
        dropped_tokens: Tokens(TOKENS),
        private: false,
        tenant_share: 0,
    };
    for seed in 0..500 {
        let mut numbers = Numbers {
            state: seed,
            known: [0; 4],
            transfers: 9,
        };
        let namespace = [register(), hybrid.clone()][numbers.below(2)].clone();
        let (mut raw, _) = Raw::registered_as(&socket, &namespace);
        let sent: Vec<_> = (0..40).map(|_| numbers.message(&bytes)).collect();
        for message in &sent {
            raw.say(message);
        }
        // Served, or closed because of a violation.
        raw.is_served();
        assert!(good.is_served(), "seed {seed}: {sent:?}");
        assert!(rig.server.is_alive(), "seed {seed}: {sent:?}");
    }
    drop(good);
    until("nothing is left", || rig.in_use() == [0; 4]);
}
