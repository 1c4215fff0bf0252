//! A client that sends the frames of a test, valid or not.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{ArenaOffset, Priority, SessionToken, Tokens, TurnEnd};
use undercroft_ipc::frame;
use undercroft_ipc::protocol::{ClientMessage, HashRun, LookupMessage, SaveMessage, ServerMessage};
use undercroft_ipc::server_status;

use crate::rig::{PATIENCE, TOKENS, spec, until};

/// The message about the end of a request.
pub(crate) fn finished(request: u64) -> ClientMessage<'static> {
    ClientMessage::FinishRequest {
        request,
        turn_end: TurnEnd::UNKNOWN,
    }
}

pub(crate) struct Raw {
    pub(crate) stream: UnixStream,
    inbox: Vec<u8>,
    numbers: u64,
}

impl Raw {
    pub(crate) fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self {
            stream,
            inbox: Vec::new(),
            numbers: 0,
        }
    }

    /// With a session: its token.
    pub(crate) fn registered(socket: &Path) -> (Self, SessionToken) {
        Self::registered_as(socket, &register())
    }

    pub(crate) fn registered_as(
        socket: &Path,
        registration: &ClientMessage<'_>,
    ) -> (Self, SessionToken) {
        let mut raw = Self::connect(socket);
        raw.say(registration);
        match raw.hear() {
            Some(ServerMessage::Registered { session, .. }) => (raw, session),
            other => panic!("{other:?}"),
        }
    }

    /// The same connection, for another thread to listen.
    pub(crate) fn other_half(&self) -> Self {
        Self {
            stream: self.stream.try_clone().unwrap(),
            inbox: Vec::new(),
            numbers: 0,
        }
    }

    pub(crate) fn say(&mut self, request: &ClientMessage<'_>) {
        let mut bytes = Vec::new();
        assert!(request.append_to(&mut bytes));
        // The server may have closed the connection because of an earlier message.
        let _ = self.stream.write_all(&bytes);
    }

    /// The next reply; `None` if the connection is closed.
    pub(crate) fn hear(&mut self) -> Option<ServerMessage> {
        loop {
            if let Some((_, body, len)) = frame::first(&self.inbox).unwrap() {
                let reply = ServerMessage::decode(body).unwrap();
                self.inbox.drain(..len);
                return Some(reply);
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return None,
                Ok(count) => self.inbox.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Workers of all sessions, also those whose connection has ended.
    pub(crate) fn workers(socket: &Path) -> u64 {
        let mut raw = Self::connect(socket);
        raw.say(&ClientMessage::Status);
        let Some(ServerMessage::Status { json }) = raw.hear() else {
            return 0;
        };
        let status: serde_json::Value = serde_json::from_str(&json).unwrap();
        let sessions = status["sessions"].as_array().unwrap().iter();
        sessions
            .map(|session| session["workers"].as_u64().unwrap())
            .sum()
    }

    /// Whether the server is still there for this client.
    pub(crate) fn is_served(&mut self) -> bool {
        self.say(&ClientMessage::Ping);
        loop {
            match self.hear() {
                None => return false,
                Some(ServerMessage::Pong { .. }) => return true,
                Some(_) => {}
            }
        }
    }

    pub(crate) fn lookup(&mut self, request: u64, hashes: &[BlockHash]) {
        let bytes = joined(hashes);
        self.say(&ClientMessage::Lookup(LookupMessage {
            request,
            version: 1,
            label: "",
            computed: Tokens(0),
            max: tokens_of(hashes),
            min: Tokens(0),
            priority: Priority::Demand,
            wait: None,
            queued: Tokens(0),
            hashes: run(&bytes),
        }));
    }

    /// Asks for slots, and how many came.
    pub(crate) fn save(&mut self, request: u64, save: u64, hashes: &[BlockHash]) -> usize {
        let bytes = joined(hashes);
        self.say(&ClientMessage::BeginSave(SaveMessage {
            request,
            transfer: save,
            tokens: tokens_of(hashes),
            offers: Vec::new(),
            only_offers: false,
            is_wanted: false,
            hashes: run(&bytes),
        }));
        match self.hear() {
            Some(ServerMessage::Granted { extents, .. }) => {
                extents.iter().map(|extent| extent.offsets.len()).sum()
            }
            other => panic!("{other:?}"),
        }
    }
}

impl Raw {
    /// Asks for slots under new numbers: which ones came, `None` if there are none left.
    pub(crate) fn try_save(&mut self, hashes: &[BlockHash]) -> Option<Vec<ArenaOffset>> {
        self.numbers += 1;
        let bytes = joined(hashes);
        self.say(&ClientMessage::BeginSave(SaveMessage {
            request: 1000 + self.numbers,
            transfer: 1000 + self.numbers,
            tokens: tokens_of(hashes),
            offers: Vec::new(),
            only_offers: false,
            is_wanted: false,
            hashes: run(&bytes),
        }));
        match self.hear() {
            Some(ServerMessage::Granted { extents, .. }) => {
                extents.into_iter().next().map(|extent| extent.offsets)
            }
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn register() -> ClientMessage<'static> {
    ClientMessage::Register {
        namespace: spec(),
        dropped_tokens: Tokens(0),
        private: false,
        tenant_share: 0,
    }
}

fn tokens_of(hashes: &[BlockHash]) -> Tokens {
    Tokens(u32::try_from(hashes.len()).unwrap() * TOKENS)
}

pub(crate) fn joined(hashes: &[BlockHash]) -> Vec<u8> {
    hashes
        .iter()
        .flat_map(|hash| hash.as_bytes().to_vec())
        .collect()
}

pub(crate) fn run(bytes: &[u8]) -> HashRun<'_> {
    HashRun {
        known: 0,
        hash_bytes: 32,
        bytes,
    }
}

/// The server's status, made after this call: a server answers with an earlier one for a while.
pub(crate) fn status(socket: &Path) -> serde_json::Value {
    let ask = || server_status(socket, PATIENCE).unwrap();
    let made =
        |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap()["uptime_s"].clone();
    let (first, mut last) = (made(&ask()), String::new());
    until("the server makes its status anew", || {
        last = ask();
        made(&last) != first
    });
    serde_json::from_str(&last).unwrap()
}
