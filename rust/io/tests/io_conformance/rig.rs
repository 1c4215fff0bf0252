//! An engine over a directory of its own, and requests for it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use undercroft_contract::checksum::checksum;
use undercroft_contract::io::{FileKind, IO_ALIGN, IoCompletion, IoFault, IoRequest};
use undercroft_io::arena::Arena;
use undercroft_io::fault::Script;
use undercroft_io::{DeviceFiles, IoEngine, open_file};

pub(crate) const UNIT: u64 = IO_ALIGN;
pub(crate) const DEPTH: usize = 8;
pub(crate) const ARENA: u64 = 16 << 20;
/// Long enough never to pass in a healthy run; a hang fails the test instead of blocking it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Open = fn(usize, Arc<Arena>, Vec<DeviceFiles>, Script) -> Box<dyn IoEngine>;

/// An engine over one device in a directory of its own.
pub(crate) struct Rig {
    pub(crate) engine: Box<dyn IoEngine>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) dir: tempfile::TempDir,
}

impl Rig {
    pub(crate) fn new(open: Open, script: Script) -> Self {
        Self::with(|arena, device| open(DEPTH, arena, vec![device], script))
    }

    pub(crate) fn with(open: impl FnOnce(Arc<Arena>, DeviceFiles) -> Box<dyn IoEngine>) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let arena = Arc::new(Arena::create(ARENA).unwrap());
        let engine = open(Arc::clone(&arena), device_in(dir.path()));
        Self { engine, arena, dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn file(&self, name: &str) -> File {
        File::options()
            .read(true)
            .write(true)
            .open(self.path(name))
            .unwrap()
    }

    /// Waits until nothing is in flight.
    pub(crate) fn drain(&mut self) -> Vec<IoCompletion> {
        let mut out = Vec::new();
        while self.engine.in_flight() > 0 {
            let start = Instant::now();
            self.engine.wait(Some(PATIENCE), &mut out);
            assert!(
                start.elapsed() < PATIENCE,
                "no completion within {PATIENCE:?}"
            );
        }
        out
    }

    pub(crate) fn one(&mut self, request: IoRequest) -> Result<u64, IoFault> {
        let token = request.token();
        self.engine.submit(request);
        let completions = self.drain();
        assert_eq!(completions.len(), 1);
        assert_eq!(completions[0].token, token);
        completions[0].result
    }

    pub(crate) fn write(
        &mut self,
        arena_offset: u64,
        file_offset: u64,
        len: u32,
    ) -> Result<u64, IoFault> {
        self.one(write(1, arena_offset, file_offset, len))
    }

    pub(crate) fn read(
        &mut self,
        arena_offset: u64,
        file_offset: u64,
        bytes: &[u8],
    ) -> Result<u64, IoFault> {
        let len = bytes.len() as u32;
        self.one(read(2, arena_offset, file_offset, len, checksum(bytes)))
    }

    /// Puts bytes into the data file behind the engine's back.
    pub(crate) fn prepare(&self, file_offset: u64, bytes: &[u8]) {
        self.file("data").write_all_at(bytes, file_offset).unwrap();
    }
}

/// The files of a device in a directory.
pub(crate) fn device_in(dir: &Path) -> DeviceFiles {
    let file = |name: &str| open_file(&dir.join(name), true).unwrap();
    let (data, o_direct) = file("data");
    DeviceFiles {
        superblock: file("super").0,
        table: file("table").0,
        data,
        o_direct,
        lock: None,
    }
}

pub(crate) fn write(token: u64, arena_offset: u64, file_offset: u64, len: u32) -> IoRequest {
    IoRequest::WritePayload {
        token,
        device: 0,
        file_offset,
        arena_offset,
        len,
        payload_len: len,
        checksum: None,
    }
}

pub(crate) fn read(
    token: u64,
    arena_offset: u64,
    file_offset: u64,
    len: u32,
    checksum: u64,
) -> IoRequest {
    IoRequest::ReadPayload {
        token,
        device: 0,
        file_offset,
        arena_offset,
        len,
        payload_len: len,
        checksum,
    }
}

pub(crate) fn meta(file: FileKind, file_offset: u64, bytes: &[u8], sync: bool) -> IoRequest {
    IoRequest::WriteMeta {
        token: 3,
        device: 0,
        file,
        file_offset,
        bytes: bytes.into(),
        sync,
    }
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    (0..len)
        .map(|i| {
            (i.wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .wrapping_add(seed * 977)
                >> 32) as u8
        })
        .collect()
}

pub(crate) fn os(errno: Errno) -> Result<u64, IoFault> {
    Err(IoFault::Os(errno.raw_os_error()))
}
