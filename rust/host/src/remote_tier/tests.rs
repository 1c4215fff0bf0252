use std::path::Path;
use std::time::Instant;

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{
    Lookup, LookupRequest, PromotionWait, Save, SaveRequest, Session, Tokens,
};
use undercroft_driver::EmbeddedSession;

use super::*;
use crate::config::{DiskCapacity, DiskConfig};
use crate::directories::Directories;
use crate::running::RunningEngine;

const PATIENCE: Duration = Duration::from_secs(30);
/// Least time of a call that waits for a hanging store is a second. Other calls take less, even on a busy machine.
const NEVER: Duration = Duration::from_millis(900);
const BLOCK: u32 = 16;
const BLOCKS: u32 = 256;
const BYTES: usize = 20_000;

// Stores that are programs, behind a proxy with network faults.
#[cfg(all(feature = "remote-redis", feature = "remote-s3"))]
mod bad_stores;
#[cfg(all(feature = "remote-redis", feature = "remote-s3"))]
#[path = "../../../remote/tests/conformance/child.rs"]
mod child;
#[cfg(all(feature = "remote-redis", feature = "remote-s3"))]
mod limits;
#[cfg(all(feature = "remote-redis", feature = "remote-s3"))]
#[expect(dead_code, reason = "tests of a single store use all of it")]
#[path = "../../../remote/tests/conformance/proxy.rs"]
mod proxy;
#[cfg(all(feature = "remote-redis", feature = "remote-s3"))]
#[path = "../../../remote/tests/conformance/server.rs"]
mod server;

/// An engine with a disk of its own.
struct Host {
    engine: RunningEngine,
    session: EmbeddedSession<Driver>,
}

impl Host {
    fn start(root: &Path, name: &str, change: impl FnOnce(&mut HostConfig)) -> Self {
        let mut config = HostConfig {
            host_memory: 64 << 20,
            disks: vec![DiskConfig {
                path: root.join(name),
                capacity: DiskCapacity::Bytes(64 << 20),
            }],
            remote: format!("file://{}", root.join("remote").display()),
            remote_object: Some(1 << 20),
            remote_write_rate: Some(0),
            ..HostConfig::default()
        };
        change(&mut config);
        let host = Self::without_store(&config);
        host.engine.attach_remote(&config).unwrap();
        host
    }

    /// A host that gets its store later.
    fn without_store(config: &HostConfig) -> Self {
        let arena = Arc::new(Arena::create(config.arena_bytes()).unwrap());
        let directories = Directories::open(config).unwrap();
        let io = (config.io_engine, config.io_depth());
        let engine = RunningEngine::start(config.engine(), directories, io, arena).unwrap();
        let spec = NamespaceSpec::uniform(
            "{\"model\": \"test\"}",
            BLOCK,
            &[(GroupKind::Full, BYTES as u32)],
        );
        let driver = Arc::clone(engine.driver());
        let session = EmbeddedSession::open(driver, spec.into()).unwrap();
        Self { engine, session }
    }

    fn stat(&self, name: &str) -> u64 {
        self.engine.stats()[name].as_u64().unwrap()
    }

    fn wait_for(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.engine.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Saves a prompt, like a worker that has computed it.
    fn compute(&self, prompt: u32) {
        self.compute_blocks(prompt, BLOCKS);
    }

    /// Saves the first blocks of a prompt. Returns the number of blocks that got slots.
    fn compute_blocks(&self, prompt: u32, blocks: u32) -> usize {
        let hashes = hashes(prompt, blocks);
        let save = SaveRequest::new("save", &hashes, Tokens(blocks * BLOCK));
        let Save::Granted(grant) = self.session.begin_save(&save) else {
            panic!("host memory has room");
        };
        for extent in &grant.extents {
            let blocks = extent.first_block as usize..;
            for (block, offset) in blocks.zip(&extent.offsets) {
                let offset = offset.get().unwrap();
                self.engine
                    .arena()
                    .write(offset, &payload(&hashes[block]))
                    .unwrap();
            }
        }
        self.session.end_transfer(grant.id, true);
        self.session.finish_request("save".into());
        let saved = grant.extents.iter().map(|extent| extent.offsets.len());
        saved.sum()
    }

    /// The tokens of a prompt that a hit brings. Asserts that all of their bytes are right.
    fn hit(&self, prompt: u32) -> u32 {
        self.hit_blocks(prompt, BLOCKS)
    }

    fn hit_blocks(&self, prompt: u32, blocks: u32) -> u32 {
        let hashes = hashes(prompt, blocks);
        let request = LookupRequest::new("load", &hashes).wait(Some(PromotionWait::Complete));
        let end = Instant::now() + PATIENCE;
        let hit = loop {
            let began = Instant::now();
            let found = self.session.lookup(&request);
            let took = began.elapsed();
            assert!(took < NEVER, "a scheduler that waits for {took:?}");
            match found {
                Lookup::Pending { .. } => assert!(Instant::now() < end, "a lookup without end"),
                Lookup::Hit(hit) => break hit,
                Lookup::Miss { .. } => {
                    self.session.finish_request("load".into());
                    return 0;
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let load = self
            .session
            .begin_load("load", Tokens(0), hit.tokens)
            .unwrap();
        for extent in &load.extents {
            let blocks = extent.first_block as usize..;
            for (block, offset) in blocks.zip(&extent.offsets) {
                let found = self
                    .engine
                    .arena()
                    .read(offset.get().unwrap(), BYTES as u64);
                assert!(
                    found.unwrap() == payload(&hashes[block]),
                    "bytes of block {block}"
                );
            }
        }
        self.session.end_transfer(load.id, true);
        self.session.finish_request("load".into());
        hit.tokens.0
    }
}

fn hashes(prompt: u32, blocks: u32) -> Vec<BlockHash> {
    let hash = |block: u32| {
        let mut bytes = [0x5a; 32];
        bytes[..4].copy_from_slice(&block.wrapping_mul(0x9e37_79b9).to_le_bytes());
        bytes[4..8].copy_from_slice(&prompt.wrapping_mul(0x85eb_ca6b).to_le_bytes());
        BlockHash::new(&bytes).unwrap()
    };
    (0..blocks).map(hash).collect()
}

fn payload(hash: &BlockHash) -> Vec<u8> {
    let bytes = hash.as_bytes().iter().cycle().zip(0u32..);
    let mixed = bytes.map(|(byte, at)| byte ^ (at as u8) ^ (at >> 8) as u8);
    mixed.take(BYTES).collect()
}

fn objects(root: &Path) -> usize {
    let found = walk(&root.join("remote"));
    found
        .iter()
        .filter(|path| !path.ends_with("about.json"))
        .count()
}

fn walk(below: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(below).into_iter().flatten().flatten();
    let found = entries.map(|entry| entry.path());
    found
        .flat_map(|path| {
            if path.is_dir() {
                walk(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

#[test]
fn a_host_hits_blocks_that_another_has_computed() {
    let root = tempfile::tempdir().unwrap();
    let one = Host::start(root.path(), "one", |_| {});
    one.compute(1);
    one.wait_for("all segments are written", |host| {
        host.stat("remote_puts") == 4
    });
    assert_eq!(objects(root.path()), 4, "64 blocks of 20 kB each");
    let other = Host::start(root.path(), "other", |_| {});
    assert_eq!(other.hit(1), BLOCKS * BLOCK);
    assert_eq!(other.stat("remote_gets"), 4);
    assert_eq!(
        other.stat("remote_puts"),
        0,
        "what was read is not written again"
    );
    assert_eq!(other.hit(2), 0);
    assert_eq!(other.engine.info()["remote"]["health"], "good");
    // The prompt is in the other host's own tiers now.
    one.engine.stop(PATIENCE);
    std::fs::remove_dir_all(root.path().join("remote")).unwrap();
    assert_eq!(other.hit(1), BLOCKS * BLOCK);
}

#[test]
fn a_host_that_only_reads_writes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let host = Host::start(root.path(), "one", |config| {
        config.remote_write = RemoteWrite::None
    });
    host.compute(1);
    assert!(
        host.engine
            .driver()
            .wait_until(PATIENCE, |engine| engine.is_quiet())
    );
    assert_eq!(host.hit(1), BLOCKS * BLOCK);
    assert_eq!((host.stat("remote_puts"), objects(root.path())), (0, 0));
}

#[test]
fn damaged_objects_are_misses_and_are_written_anew() {
    let root = tempfile::tempdir().unwrap();
    let one = Host::start(root.path(), "one", |_| {});
    one.compute(1);
    one.wait_for("all segments are written", |host| {
        host.stat("remote_puts") == 4
    });
    for path in walk(&root.path().join("remote")) {
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 20_000;
        bytes[last] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let other = Host::start(root.path(), "other", |_| {});
    assert!(other.hit(1) < BLOCKS * BLOCK);
    assert!(other.stat("remote_corrupt") >= 1);
    other.compute(1);
    other.wait_for("what was damaged is written", |host| {
        host.stat("remote_puts") >= 1
    });
    assert_eq!(other.hit(1), BLOCKS * BLOCK);
}

#[test]
fn a_store_that_disappears_is_reported_and_costs_no_hit_in_host_memory() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("mount")).unwrap();
    let url = format!("file://{}", root.path().join("mount/remote").display());
    let host = Host::start(root.path(), "one", |config| config.remote.clone_from(&url));
    host.wait_for("the store is there", |host| {
        host.engine.info()["remote"]["health"] == "good"
    });
    std::fs::remove_dir_all(root.path().join("mount")).unwrap();
    host.compute(1);
    host.wait_for("the failure is told", |host| {
        host.engine.info()["remote"]["health"] == "failed"
    });
    let info = host.engine.info();
    assert_eq!(info["remote"]["url"], url);
    assert!(
        info["remote"]["fault"]
            .as_str()
            .unwrap()
            .contains("mount/remote")
    );
    assert_eq!(host.hit(1), BLOCKS * BLOCK, "host memory is not affected");
}

#[test]
fn an_engine_starts_before_its_file_system_is_mounted_and_uses_it_afterwards() {
    let root = tempfile::tempdir().unwrap();
    let mount = root.path().join("mount");
    let url = format!("file://{}", mount.join("remote").display());
    let host = Host::start(root.path(), "one", |config| config.remote.clone_from(&url));
    host.wait_for("the failure is told", |host| {
        host.engine.info()["remote"]["health"] == "failed"
    });
    let said = host.engine.info()["remote"].to_string();
    assert!(said.contains("parent directory"), "{said}");
    assert!(said.contains("mounted"), "{said}");
    host.compute(1);
    assert_eq!(host.hit(1), BLOCKS * BLOCK, "host memory is not affected");
    assert!(!mount.exists(), "only the operator makes it");
    std::fs::create_dir(&mount).unwrap();
    host.wait_for("the prompt is written", |host| {
        host.hit(1);
        walk(&mount).len() == 4
    });
    host.wait_for("the store is there", |host| {
        host.engine.info()["remote"]["health"] == "good"
    });
    let other = Host::start(root.path(), "other", |config| {
        config.remote.clone_from(&url);
    });
    assert_eq!(other.hit(1), BLOCKS * BLOCK);
}

#[test]
fn a_store_that_cannot_be_is_refused() {
    let config = HostConfig {
        remote: "s3:/bucket".to_owned(),
        ..HostConfig::default()
    };
    let error = config.remote_location().unwrap_err().to_string();
    assert!(
        error.contains("s3:/bucket") && error.contains("Allowed"),
        "{error}"
    );
}
