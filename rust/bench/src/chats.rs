//! Users of two models chat over one engine: how much one payload size costs the other. Payloads do not
//! exist, and the disk carries out its reads and writes when it is told to.

use undercroft_contract::error::RegisterError;
use undercroft_contract::format::Superblock;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{FileKind, IoCompletion, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

use crate::rig::{BLOCK_TOKENS, hash, mix, spec};

/// IO operations that are carried out before the engine is asked again.
const DEPTH: usize = 64;
/// Blocks that a step of vLLM saves at most.
const STEP_BLOCKS: usize = 512;
/// Steps in which blocks that were refused are offered again.
const STEPS_MAX: u32 = 100;
/// Blocks of all prompts of one user.
const USER_BLOCKS: u64 = 1 << 20;

/// A directory's contents but for payloads.
#[derive(Clone, Debug)]
pub struct Directory {
    capacity: u64,
    page_bytes: u64,
    table: Vec<u8>,
    superblock: Vec<u8>,
}

impl Directory {
    /// An empty one.
    pub fn new(capacity: u64) -> Self {
        let page_bytes = page_bytes_for(capacity);
        let superblock = Superblock {
            store_id: 1,
            page_bytes,
            encrypted: false,
        };
        Self {
            capacity: capacity / page_bytes * page_bytes,
            page_bytes,
            table: Vec::new(),
            superblock: superblock.encode().into(),
        }
    }

    fn image(&self) -> DeviceImage {
        DeviceImage {
            capacity: self.capacity,
            page_bytes: self.page_bytes,
            holes: Vec::new(),
            super_bytes: self.superblock.clone(),
            table: self.table.clone().into(),
        }
    }

    fn write(&mut self, file: FileKind, offset: u64, bytes: &[u8]) {
        let contents = match file {
            FileKind::Super => &mut self.superblock,
            _ => &mut self.table,
        };
        let end = offset as usize + bytes.len();
        contents.resize(contents.len().max(end), 0);
        contents[offset as usize..end].copy_from_slice(bytes);
    }
}

/// An engine that two models use.
#[derive(Debug)]
pub struct Store {
    /// The engine.
    pub engine: Engine,
    directory: Option<Directory>,
    sessions: [SessionId; 2],
}

/// Counts of a turn of a chat, in blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turn {
    /// Asked for.
    pub asked: u64,
    /// Found.
    pub hit: u64,
    /// Saved.
    pub saved: u64,
}

impl Store {
    /// An engine with the contents of a directory, or without a directory. `payloads`: bytes of a block of each model.
    ///
    /// # Errors
    /// If a payload does not fit a page.
    pub fn open(
        host_bytes: u64,
        directory: Option<Directory>,
        payloads: [u32; 2],
    ) -> Result<Self, RegisterError> {
        let mut engine = Engine::new(EngineConfig::new(host_bytes));
        if let Some(directory) = &directory {
            engine.attach_disks(vec![directory.image()]);
        }
        let mut open = |name: &str, payload| {
            let mut spec = spec(payload);
            name.clone_into(&mut spec.description);
            engine.open_session(spec)
        };
        let sessions = [open("model A", payloads[0])?, open("model B", payloads[1])?];
        Ok(Self {
            engine,
            directory,
            sessions,
        })
    }

    /// Ends the process: the directory is left.
    pub fn crash(self) -> Option<Directory> {
        self.directory
    }

    /// Saves a prompt of a model, step by step. Returns how many blocks got a slot.
    pub fn save(&mut self, model: usize, prompt: &[BlockHash]) -> u64 {
        let (session, hashes) = (self.sessions[model], &prompt.to_vec());
        let mut saved = 0;
        for end in (0..prompt.len()).step_by(STEP_BLOCKS) {
            let end = prompt.len().min(end + STEP_BLOCKS);
            let tokens = Tokens(end as u32 * BLOCK_TOKENS);
            let save = SaveRequest::new("save", hashes, tokens);
            if let Some(transfer) = self.engine.begin_save(session, &save).transfer {
                let blocks = transfer.extents.iter().map(|extent| {
                    let slots = extent
                        .offsets
                        .iter()
                        .filter(|offset| offset.get().is_some());
                    slots.count() as u64
                });
                saved += blocks.sum::<u64>();
                self.engine.end_transfer(transfer.id, true);
            }
        }
        self.engine.finish_request(session, "save");
        saved
    }

    /// Saves a prompt of a model as vLLM does: refused blocks are offered again in the next steps, between which
    /// the IO thread goes on. Returns how many blocks got a slot, and how often blocks were offered again.
    pub fn save_all(&mut self, model: usize, prompt: &[BlockHash]) -> (u64, u32) {
        let mut saved = self.save(model, prompt);
        for again in 0..STEPS_MAX {
            if saved >= prompt.len() as u64 {
                return (saved, again);
            }
            self.settle();
            saved += self.save(model, prompt);
        }
        (saved, STEPS_MAX)
    }

    /// Looks a prompt up; the request keeps its lease until `finish`.
    pub fn lookup(&mut self, model: usize, request: &str, prompt: &[BlockHash]) -> u64 {
        let (session, hashes) = (self.sessions[model], &prompt.to_vec());
        loop {
            let answer = self
                .engine
                .lookup(session, &LookupRequest::new(request, hashes));
            if let Some(Tokens(hit)) = answer.tokens() {
                return u64::from(hit / BLOCK_TOKENS);
            }
            self.settle();
        }
    }

    /// Looks a prompt up and loads it.
    pub fn load(&mut self, model: usize, prompt: &[BlockHash]) -> u64 {
        let hit = self.lookup(model, "load", prompt);
        let session = self.sessions[model];
        if hit > 0 {
            let tokens = Tokens(hit as u32 * BLOCK_TOKENS);
            let load = self.engine.begin_load(session, "load", Tokens(0), tokens);
            if let Some(load) = load {
                self.engine.end_transfer(load.id, true);
            }
        }
        self.engine.finish_request(session, "load");
        hit
    }

    /// Carries out all IO that the engine wants, and the work that its entries have left.
    pub fn settle(&mut self) {
        while self.poll() > 0 || self.engine.wake() == Due::Now {}
    }

    /// As [`Store::settle`], also while payloads wait for a search that goes on in the engine's next entries.
    pub fn search_and_settle(&mut self) {
        for _ in 0..STEPS_MAX {
            self.settle();
        }
    }

    /// Asks the engine for IO once, and carries it out. Returns how much it was.
    pub fn poll(&mut self) -> usize {
        let mut started = Started::default();
        self.engine.turn(Room::io(DEPTH), &mut started);
        for request in &started.io {
            let mut result = Ok(0);
            match request {
                IoRequest::ReadPayload { checksum, .. } => result = Ok(*checksum),
                IoRequest::WritePayload { .. }
                | IoRequest::Sealed(_)
                | IoRequest::Erase { .. }
                | IoRequest::Sync { .. } => {}
                IoRequest::WriteMeta {
                    file,
                    file_offset,
                    bytes,
                    ..
                } => {
                    if let Some(directory) = &mut self.directory {
                        directory.write(*file, *file_offset, bytes);
                    }
                }
            }
            let token = request.token();
            self.engine.complete(IoCompletion { token, result });
        }
        started.io.len()
    }
}

/// The first blocks of a user's text.
pub fn prompt(user: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks)
        .map(|block| hash(user * USER_BLOCKS + block))
        .collect()
}

/// Users who come back at random, say 8 to 40 blocks more each time, and leave after some turns.
#[derive(Debug)]
pub struct Chats {
    /// Number, blocks so far, and turns of each user.
    users: Vec<(u64, u64, u64)>,
    next_user: u64,
    turns_max: u64,
    drawn: u64,
    /// How many of five users are model B's.
    fifths_of_b: u64,
}

impl Chats {
    /// So many users, of whom each leaves after `turns_max` turns for another to come.
    pub fn new(users: u64, turns_max: u64, fifths_of_b: u64) -> Self {
        Self {
            users: (0..users).map(|user| (user, 0, 0)).collect(),
            next_user: users,
            turns_max,
            drawn: 0,
            fifths_of_b,
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.drawn += 1;
        mix(self.drawn ^ 0x55) % bound
    }

    /// The model of a user.
    fn model(&self, user: u64) -> usize {
        usize::from(user % 5 < self.fifths_of_b)
    }

    /// One user comes back. With a disk, all pending writes end.
    pub fn turn(&mut self, store: &mut Store) -> Turn {
        let at = self.below(self.users.len() as u64) as usize;
        let (user, blocks, turns) = self.users[at];
        let longer = blocks + 8 + self.below(33);
        let said = prompt(user, longer);
        let model = self.model(user);
        let hit = store.load(model, &said[..blocks as usize]);
        let saved = store.save(model, &said);
        store.settle();
        self.users[at] = (user, longer, turns + 1);
        if turns + 1 >= self.turns_max {
            self.users[at] = (self.next_user, 0, 0);
            self.next_user += 1;
        }
        Turn {
            asked: blocks,
            hit,
            saved,
        }
    }

    /// Turns until so many blocks were saved.
    pub fn save(&mut self, store: &mut Store, blocks: u64) {
        let mut saved = 0;
        while saved < blocks {
            saved += self.turn(store).saved;
        }
    }

    /// Part of the requested blocks that is found, over so many turns.
    pub fn hit_rate(&mut self, store: &mut Store, turns: u64) -> f64 {
        let (mut asked, mut hit) = (0, 0);
        for _ in 0..turns {
            let turn = self.turn(store);
            asked += turn.asked;
            hit += turn.hit;
        }
        hit as f64 / (asked as f64).max(1.0)
    }

    /// Lets the first `count` users that have said something look up and wait. Returns the blocks leased.
    pub fn wait(&self, store: &mut Store, count: usize) -> u64 {
        let users = self.users.iter().filter(|user| user.1 > 0).take(count);
        let waiting = users.map(|&(user, blocks, _)| {
            let said = prompt(user, blocks);
            store.lookup(self.model(user), &format!("wait {user}"), &said)
        });
        waiting.sum()
    }
}
