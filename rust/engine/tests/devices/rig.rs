//! An engine over directories without payload bytes, in virtual time: the test decides how each device answers.

use undercroft_contract::format::Superblock;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{FileKind, IoCompletion, IoFault, IoRequest, IoRoom};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::session::{LookupRequest, Offer, SaveRequest, Tokens};
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

pub(crate) const HASH_BLOCK: u32 = 16;
pub(crate) const MILLISECOND: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000 * MILLISECOND;

/// The metadata of a directory, in its files.
struct Directory {
    capacity: u64,
    super_file: Vec<u8>,
    table: Vec<u8>,
}

impl Directory {
    fn new(capacity: u64) -> Self {
        let page_bytes = page_bytes_for(capacity);
        let superblock = Superblock {
            store_id: 1,
            page_bytes,
            encrypted: false,
        };
        Self {
            capacity: capacity / page_bytes * page_bytes,
            super_file: superblock.encode().into(),
            table: Vec::new(),
        }
    }
}

pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) session: SessionId,
    spec: NamespaceSpec,
    directories: Vec<Directory>,
    pub(crate) now_ns: u64,
}

/// A prompt of `len` blocks that shares nothing with others.
pub(crate) fn prompt(number: u64, len: u32) -> Vec<BlockHash> {
    let mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let hash = |block: u32| {
        let block = u64::from(block).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        BlockHash::new(
            &[
                mixed.to_le_bytes(),
                (mixed ^ block).rotate_left(17).to_le_bytes(),
            ]
            .concat(),
        )
    };
    (0..len).map(|block| hash(block).unwrap()).collect()
}

/// A group whose blocks are hash blocks.
pub(crate) fn group(kind: GroupKind, payload_bytes: u32) -> GroupSpec {
    GroupSpec {
        kind,
        block_tokens: HASH_BLOCK,
        payload_bytes,
    }
}

impl Rig {
    pub(crate) fn new(config: EngineConfig, capacities: &[u64], payload_bytes: u32) -> Self {
        Self::with_groups(
            config,
            capacities,
            vec![group(GroupKind::Full, payload_bytes)],
        )
    }

    /// Payloads on each device.
    pub(crate) fn blocks(&self) -> Vec<u64> {
        let devices = self.engine.devices();
        devices.iter().map(|device| device.blocks).collect()
    }

    pub(crate) fn with_groups(
        config: EngineConfig,
        capacities: &[u64],
        groups: Vec<GroupSpec>,
    ) -> Self {
        let directories = capacities.iter().map(|&capacity| Directory::new(capacity));
        let spec = NamespaceSpec {
            description: "devices".to_owned(),
            hash_block_size: HASH_BLOCK,
            alignment_tokens: HASH_BLOCK,
            groups,
        };
        Self::over(config, directories.collect(), spec)
    }

    fn over(config: EngineConfig, directories: Vec<Directory>, spec: NamespaceSpec) -> Self {
        let mut engine = Engine::new(config);
        let image = |directory: &Directory| DeviceImage {
            capacity: directory.capacity,
            page_bytes: page_bytes_for(directory.capacity),
            holes: Vec::new(),
            super_bytes: directory.super_file.clone(),
            table: directory.table.clone().into(),
        };
        engine.attach_disks(directories.iter().map(image).collect());
        let session = engine.open_session(spec.clone()).unwrap();
        let mut rig = Self {
            engine,
            session,
            spec,
            directories,
            now_ns: 0,
        };
        // The namespace's entry, and that it is used.
        rig.settle();
        rig
    }

    /// The engine ends, and another one starts on the same directories.
    pub(crate) fn restart(self, config: EngineConfig) -> Self {
        Self::over(config, self.directories, self.spec)
    }

    pub(crate) fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        self.engine.set_now(self.now_ns);
    }

    /// The operations that the engine starts now.
    pub(crate) fn start<'a>(&mut self, room: impl Into<IoRoom<'a>>) -> Vec<IoRequest> {
        let mut started = Started::default();
        self.engine.turn(Room::io(room), &mut started);
        started.io
    }

    /// An operation ends well.
    pub(crate) fn end(&mut self, request: IoRequest) {
        let result = match &request {
            IoRequest::ReadPayload { checksum, .. } => Ok(*checksum),
            IoRequest::WritePayload { .. }
            | IoRequest::Sealed(_)
            | IoRequest::Erase { .. }
            | IoRequest::Sync { .. } => Ok(7),
            IoRequest::WriteMeta {
                device,
                file,
                file_offset,
                bytes,
                ..
            } => {
                let directory = &mut self.directories[usize::from(*device)];
                let contents = match file {
                    FileKind::Super => &mut directory.super_file,
                    _ => &mut directory.table,
                };
                let at = *file_offset as usize;
                if contents.len() < at + bytes.len() {
                    contents.resize(at + bytes.len(), 0);
                }
                contents[at..at + bytes.len()].copy_from_slice(bytes);
                Ok(0)
            }
        };
        self.finish(&request, result);
    }

    pub(crate) fn finish(&mut self, request: &IoRequest, result: Result<u64, IoFault>) {
        let token = request.token();
        self.engine.complete(IoCompletion { token, result });
    }

    /// Does all IO that there is, well.
    pub(crate) fn settle(&mut self) {
        loop {
            let requests = self.start(64);
            if requests.is_empty() && self.engine.wake() != Due::Now {
                return;
            }
            requests.into_iter().for_each(|request| self.end(request));
        }
    }

    /// Saves a prompt; how many of its blocks were new.
    pub(crate) fn save(&mut self, number: u64, len: u32) -> u32 {
        self.save_with(number, len, &[])
    }

    /// Saves a prompt with blocks of states.
    pub(crate) fn save_with(&mut self, number: u64, len: u32, offers: &[Offer]) -> u32 {
        let hashes = prompt(number, len);
        let save = SaveRequest::new("save", &hashes, Tokens(len * HASH_BLOCK)).offers(offers);
        let granted = self.engine.begin_save(self.session, &save).transfer;
        let saved = granted.map_or(0, |save| {
            self.engine.end_transfer(save.id, true);
            save.extents.iter().map(|of| of.offsets.len() as u32).sum()
        });
        self.engine.finish_request(self.session, "save");
        saved
    }

    /// The blocks of the answer to a demanded lookup; `None` while it is pending.
    pub(crate) fn ask(&mut self, number: u64, len: u32) -> Option<u32> {
        let (hashes, name) = (prompt(number, len), number.to_string());
        let question = LookupRequest::new(&name, &hashes);
        let answer = self.engine.lookup(self.session, &question);
        answer.tokens().map(|Tokens(tokens)| tokens / HASH_BLOCK)
    }

    /// The request of a prompt loads its promised tokens, and leaves.
    pub(crate) fn leave(&mut self, number: u64, blocks: u32) {
        let name = number.to_string();
        let tokens = Tokens(blocks * HASH_BLOCK);
        if blocks > 0 {
            let load = self
                .engine
                .begin_load(self.session, &name, Tokens(0), tokens);
            self.engine.end_transfer(load.unwrap().id, true);
        }
        self.engine.finish_request(self.session, &name);
    }
}
