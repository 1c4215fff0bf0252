//! A store with its pool, an arena, and segments to put there.

use std::any::Any;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use undercroft_contract::checksum::checksum;
use undercroft_contract::cipher::PayloadCipher;
use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::remote::{
    Expected, ObjectKey, RemoteCompletion, RemoteDone, RemoteError, RemotePart, RemoteRequest,
    RemoteStore, SegmentHeader, SegmentPayload,
};
use undercroft_io::arena::{ARENA_ALIGN, Arena};
use undercroft_io::{Wake, Waker};
use undercroft_remote::{Location, Objects, RemoteOptions, RequestPool};

const PATIENCE: Duration = Duration::from_secs(60);
/// The bytes of each payload of a segment. One payload is a multiple of 4,096 bytes; the others are not.
pub(crate) const LENS: [u32; 4] = [4096, 5000, 1, 300_000];
/// Bytes of a payload's place in the arena.
const PLACE: u64 = 512 << 10;

#[derive(Debug)]
struct Bell(Mutex<Sender<()>>);

impl Wake for Bell {
    fn wake(&self) {
        // At the end of a test no thread waits any more.
        let _ = self.0.lock().unwrap().send(());
    }
}

/// A store under test.
pub(crate) struct Rig {
    pub(crate) objects: Arc<dyn Objects>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) pool: Option<RequestPool>,
    woken: Receiver<()>,
    tokens: u64,
    /// Keeps the directory or the server until the end of the test.
    _place: Box<dyn Any>,
}

/// A segment: its name, its header and its payloads.
pub(crate) struct Segment {
    pub(crate) key: ObjectKey,
    pub(crate) header: SegmentHeader,
    pub(crate) payloads: Vec<Vec<u8>>,
}

impl Rig {
    pub(crate) fn new(url: &str, place: Box<dyn Any>) -> Result<Self, String> {
        let location = Location::parse(url).map_err(|error| error.to_string())?;
        let objects = undercroft_remote::open(&location, RemoteOptions::default())
            .map_err(|error| error.to_string())?;
        Ok(Self::over(objects, place))
    }

    pub(crate) fn over(objects: Arc<dyn Objects>, place: Box<dyn Any>) -> Self {
        Self::with_cipher(objects, None, place)
    }

    pub(crate) fn with_cipher(
        objects: Arc<dyn Objects>,
        cipher: Option<Arc<dyn PayloadCipher>>,
        place: Box<dyn Any>,
    ) -> Self {
        let arena = Arc::new(Arena::create(16 * ARENA_ALIGN.max(PLACE)).unwrap());
        let (bell, woken) = channel();
        let waker = Waker::new(Arc::new(Bell(Mutex::new(bell))));
        let of_pool = (Arc::clone(&objects), Arc::clone(&arena));
        let pool = RequestPool::start_with(of_pool.0, of_pool.1, waker, cipher).unwrap();
        Self {
            objects,
            arena,
            pool: Some(pool),
            woken,
            tokens: 0,
            _place: place,
        }
    }

    pub(crate) fn submit(&mut self, request: impl FnOnce(u64) -> RemoteRequest) -> u64 {
        self.tokens += 1;
        self.pool.as_mut().unwrap().submit(request(self.tokens));
        self.tokens
    }

    /// The next completions.
    pub(crate) fn wait(&mut self) -> Vec<RemoteCompletion> {
        let mut done = Vec::new();
        while done.is_empty() {
            self.woken
                .recv_timeout(PATIENCE)
                .expect("a wake-up after each completion");
            self.pool.as_mut().unwrap().drain(&mut done);
        }
        done
    }

    pub(crate) fn run(
        &mut self,
        request: impl FnOnce(u64) -> RemoteRequest,
    ) -> Result<RemoteDone, RemoteError> {
        let token = self.submit(request);
        let done = self.wait();
        assert_eq!((done.len(), done[0].token), (1, token));
        done.into_iter().next().unwrap().result
    }

    /// Writes the payloads into the arena from `place` on. Returns the parts that describe their places.
    pub(crate) fn fill(&self, segment: &Segment, place: u64) -> Vec<RemotePart> {
        let parts = segment.parts(place);
        for (part, payload) in parts.iter().zip(&segment.payloads) {
            self.arena.write(part.arena_offset, payload).unwrap();
        }
        parts
    }

    pub(crate) fn put(
        &mut self,
        segment: &Segment,
        if_absent: bool,
    ) -> Result<RemoteDone, RemoteError> {
        let parts = self.fill(segment, 0);
        let (key, header) = (segment.key, segment.header.encode());
        self.run(|token| RemoteRequest::Put {
            token,
            key,
            header,
            parts,
            if_absent,
        })
    }

    pub(crate) fn get(
        &mut self,
        segment: &Segment,
        parts: Vec<RemotePart>,
    ) -> Result<RemoteDone, RemoteError> {
        let (key, expect) = (segment.key, Box::new(segment.header.described.clone()));
        self.run(|token| RemoteRequest::Get {
            token,
            key,
            expect,
            parts,
        })
    }

    /// Gets all of a segment, to another place of the arena than the put used, and compares the bytes.
    pub(crate) fn get_all(&mut self, segment: &Segment) -> Result<RemoteDone, RemoteError> {
        let parts = segment.parts(8);
        let done = self.get(segment, parts.clone())?;
        for (part, payload) in parts.iter().zip(&segment.payloads) {
            let found = self.arena.read(part.arena_offset, u64::from(part.len));
            assert!(found.unwrap() == *payload, "payload {}", part.payload);
        }
        Ok(done)
    }

    /// Waits until nothing is in flight, not even the first check of the store. Expects no completion.
    pub(crate) fn wait_until_idle(&mut self) {
        let (end, pool) = (Instant::now() + PATIENCE, self.pool.as_mut().unwrap());
        let mut done = Vec::new();
        while pool.room() < self.objects.parallel() {
            assert!(Instant::now() < end, "room for {}", pool.room());
            std::thread::sleep(Duration::from_millis(2));
            pool.drain(&mut done);
        }
        assert_eq!(done, []);
    }

    /// Waits until the pool has removed a corrupt object. It does so after the get's completion.
    pub(crate) fn wait_until_gone(&self, path: &str) {
        let end = Instant::now() + PATIENCE;
        while self.objects.probe(&[path.to_owned()]).unwrap() != 0 {
            assert!(Instant::now() < end, "{path} is there");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn probe(&mut self, keys: Vec<ObjectKey>) -> Result<RemoteDone, RemoteError> {
        self.run(|token| RemoteRequest::Probe { token, keys })
    }
}

impl Segment {
    /// A segment that differs from the segments with other numbers.
    pub(crate) fn new(number: u8) -> Self {
        let namespace = NamespaceDigest::of("conformance");
        let hash = |index: u8| BlockHash::new(&[[number; 31].as_slice(), &[index]].concat());
        let hashes: Vec<BlockHash> = (0..LENS.len() as u8).map(|at| hash(at).unwrap()).collect();
        let payload = |index: usize| {
            let bytes =
                (0..LENS[index]).map(|at| (at as u8).wrapping_mul(31) ^ number ^ index as u8);
            bytes.collect::<Vec<u8>>()
        };
        let payloads: Vec<Vec<u8>> = (0..LENS.len()).map(payload).collect();
        let described = Expected {
            namespace,
            parent: hash(77),
            hashes: hashes.clone(),
            payloads: (LENS.iter().enumerate())
                .map(|(index, len)| SegmentPayload {
                    hash_block: index as u32,
                    group: 0,
                    len: *len,
                })
                .collect(),
        };
        let key = ObjectKey {
            namespace,
            end: hashes[hashes.len() - 1],
            hash_blocks: LENS.len() as u32,
            group: None,
        };
        let checksums = payloads.iter().map(|bytes| checksum(bytes)).collect();
        let header = SegmentHeader {
            described,
            checksums,
        };
        Self {
            key,
            header,
            payloads,
        }
    }

    /// All parts, at places of the arena from `place` on.
    pub(crate) fn parts(&self, place: u64) -> Vec<RemotePart> {
        let parts = LENS.iter().enumerate();
        parts
            .map(|(index, len)| RemotePart {
                payload: index as u32,
                arena_offset: (place + index as u64) * PLACE,
                len: *len,
            })
            .collect()
    }

    /// The bytes of the object.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.header.encode().to_vec();
        for payload in &self.payloads {
            bytes.extend_from_slice(payload);
            bytes.resize(bytes.len().next_multiple_of(4096), 0);
        }
        bytes
    }
}

/// The options with a time to live.
pub(crate) fn options(ttl: Duration) -> RemoteOptions {
    RemoteOptions {
        ttl,
        ..RemoteOptions::default()
    }
}

/// The options of a host that only reads.
pub(crate) fn reads_only() -> RemoteOptions {
    RemoteOptions {
        renew_rate: None,
        ..RemoteOptions::default()
    }
}

pub(crate) fn file() -> Result<Rig, String> {
    let place = tempfile::tempdir().unwrap();
    let url = format!("file://{}/remote", place.path().display());
    Rig::new(&url, Box::new(place))
}

#[cfg(feature = "redis")]
pub(crate) fn redis() -> Result<Rig, String> {
    let server = crate::server::Redis::start(&[])?;
    Rig::new(&server.url(), Box::new(server))
}

#[cfg(feature = "s3")]
pub(crate) fn s3() -> Result<Rig, String> {
    Rig::new(&s3_url()?, Box::new(()))
}

/// A prefix for this test alone.
#[cfg(feature = "s3")]
pub(crate) fn s3_url() -> Result<String, String> {
    let url = std::env::var("UNDERCROFT_TEST_S3").map_err(
        |_| "UNDERCROFT_TEST_S3 names no bucket; `make test-remote` starts a server with one",
    )?;
    let test = std::thread::current()
        .name()
        .unwrap_or("test")
        .replace("::", "-");
    Ok(format!("{url}/{test}-{}", std::process::id()))
}
