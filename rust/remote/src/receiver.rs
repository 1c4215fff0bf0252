//! Receives the bytes of an object that is read: verifies them, and writes the wanted payloads into the arena.

use std::borrow::Cow;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "s3")]
use std::time::Instant;

use rustix::io::Errno;
use undercroft_contract::checksum::RunningChecksum;
use undercroft_contract::cipher::{PayloadCipher, SEAL_BYTES};
use undercroft_contract::remote::segment::{SEGMENT_ALIGN, verify_as};
use undercroft_contract::remote::{
    ENCRYPTED_VERSION, Expected, REMOTE_VERSION, RemoteError, RemotePart,
};
use undercroft_io::arena::Arena;
use undercroft_io::copy::write_once;

use crate::renewals::{Copied, Renewals};
use crate::sealed::{Unsealing, sealed};
use crate::store_error::{ObjectStoreError, Result, out_of_arena};

/// A file is read in pieces of this size in bytes: its checksum is computed while a piece is in the processor's cache.
const PIECE: u64 = 512 << 10;

/// Bytes that have arrived are copied in pieces of this size, for the same reason.
const COPIED: u64 = 128 << 10;

/// Bytes of memory that another process may write are copied in pieces of this size, which fit into a core's first cache.
const SHARED: usize = 16 << 10;

/// Takes the bytes of one object, in order.
#[derive(Debug)]
pub struct Receiver<'a> {
    target: Target<'a>,
    /// Number of bytes that have arrived.
    at: u64,
    stop: Option<&'a AtomicBool>,
    renewals: Option<&'a Arc<Renewals>>,
    /// A copy of all bytes, for an object that is put again.
    kept: Option<Copied>,
}

#[derive(Debug)]
enum Target<'a> {
    Segment(Box<ArrivingSegment<'a>>),
    /// The first bytes, up to a limit.
    Bytes(Vec<u8>, u64),
    /// Bytes that are dropped: arena, offset and number. A file's bytes are read to this offset of the arena.
    Unseen(&'a Arena, u64, u64),
}

#[derive(Debug)]
struct ArrivingSegment<'a> {
    arena: &'a Arena,
    /// The description of the object in the store.
    expect: Cow<'a, Expected>,
    /// The decryption, if payloads are encrypted.
    unsealing: Option<Unsealing<'a>>,
    /// Each part, and the offset of its bytes in the object.
    parts: Vec<(RemotePart, u64)>,
    header: Vec<u8>,
    /// The checksum of each payload, once the header has arrived.
    checksums: Vec<u64>,
    /// Checksum of the part that is arriving.
    running: RunningChecksum,
    /// Checksums of the parts that have arrived.
    sums: Vec<u64>,
}

impl<'a> Receiver<'a> {
    /// A receiver for the segment that `expect` describes. `parts` are in the object's order. Once `stop` is set,
    /// nothing is written to the arena any more.
    ///
    /// # Panics
    /// If a part is no payload of the segment.
    pub fn segment(
        arena: &'a Arena,
        expect: &'a Expected,
        parts: &[RemotePart],
        stop: &'a AtomicBool,
    ) -> Self {
        Self::of(arena, (Cow::Borrowed(expect), None), parts, stop)
    }

    /// A receiver for a segment at `path` whose payloads are encrypted. Only decrypted bytes are written to the arena.
    ///
    /// # Panics
    /// If a part is no payload of the segment.
    pub(crate) fn sealed_segment(
        arena: &'a Arena,
        (expect, path): (&'a Expected, &'a str),
        parts: &[RemotePart],
        stop: &'a AtomicBool,
        cipher: &'a Arc<dyn PayloadCipher>,
    ) -> Self {
        let unsealing = Unsealing::new(cipher, expect, path);
        let as_stored = (Cow::Owned(sealed(expect)), Some(unsealing));
        Self::of(arena, as_stored, parts, stop)
    }

    fn of(
        arena: &'a Arena,
        (expect, unsealing): (Cow<'a, Expected>, Option<Unsealing<'a>>),
        parts: &[RemotePart],
        stop: &'a AtomicBool,
    ) -> Self {
        let offsets: Vec<u64> = expect.offsets().collect();
        let place = |part: &RemotePart| {
            let payload = part.payload as usize;
            let len = expect.payloads[payload].len;
            let seal_bytes = if unsealing.is_some() { SEAL_BYTES } else { 0 };
            assert_eq!(part.len + seal_bytes as u32, len, "length of a part");
            (RemotePart { len, ..*part }, offsets[payload])
        };
        let parts: Vec<_> = parts.iter().map(place).collect();
        assert!(
            parts.is_sorted_by(|(a, _), (b, _)| a.payload < b.payload),
            "parts out of order"
        );
        Self::new(
            Target::Segment(Box::new(ArrivingSegment {
                arena,
                expect,
                unsealing,
                sums: Vec::with_capacity(parts.len()),
                parts,
                header: Vec::new(),
                checksums: Vec::new(),
                running: RunningChecksum::default(),
            })),
            Some(stop),
        )
    }

    /// A receiver for the first bytes of any object, at most `limit`.
    pub fn bytes(limit: u64) -> Self {
        Self::new(Target::Bytes(Vec::new(), limit), None)
    }

    /// A receiver for `bytes` bytes, which it drops: for benchmarks. A file's bytes are read to `place` in the arena.
    ///
    /// # Panics
    /// If the place is not in the arena.
    pub fn discard(arena: &'a Arena, place: u64, bytes: u64) -> Self {
        assert!(arena.check(place, bytes).is_ok(), "a place in the arena");
        Self::new(Target::Unseen(arena, place, bytes), None)
    }

    fn new(target: Target<'a>, stop: Option<&'a AtomicBool>) -> Self {
        Self {
            target,
            at: 0,
            stop,
            renewals: None,
            kept: None,
        }
    }

    /// Number of wanted bytes from the object's start.
    pub fn wanted(&self) -> u64 {
        match &self.target {
            Target::Segment(segment) => segment.wanted(),
            Target::Bytes(_, limit) | Target::Unseen(_, _, limit) => *limit,
        }
    }

    /// Whether all of the object is wanted.
    pub(crate) fn wants_all(&self) -> bool {
        match &self.target {
            Target::Segment(segment) => segment.parts.len() == segment.expect.payloads.len(),
            Target::Bytes(..) | Target::Unseen(..) => false,
        }
    }

    /// Lets [`Receiver::keep`] keep a copy.
    pub(crate) fn renewed_by(&mut self, renewals: &'a Arc<Renewals>) {
        self.renewals = Some(renewals);
    }

    /// Keeps a copy of the bytes that arrive, if there is room for it.
    #[cfg(feature = "s3")]
    pub(crate) fn keep(&mut self) {
        let room = self.wanted().next_multiple_of(SEGMENT_ALIGN);
        self.kept = (self.renewals).and_then(|renewals| renewals.copy(room, Instant::now()));
    }

    /// The copy of the object. Whole only if [`Receiver::finish`] succeeds.
    pub(crate) fn take_kept(&mut self) -> Option<Copied> {
        let mut kept = self.kept.take()?;
        // The zeros after the last payload are not read.
        let whole = kept.bytes.len().next_multiple_of(SEGMENT_ALIGN as usize);
        kept.bytes.resize(whole, 0);
        Some(kept)
    }

    /// Takes the bytes that follow. Returns whether more are wanted.
    ///
    /// # Errors
    /// If the bytes do not belong to the requested object, or the store is being shut down.
    pub fn take(&mut self, bytes: &[u8]) -> Result<bool> {
        self.check_stop()?;
        let at = self.at;
        self.at += bytes.len() as u64;
        if let Some(kept) = &mut self.kept {
            kept.bytes.extend_from_slice(bytes);
        }
        match &mut self.target {
            Target::Segment(segment) => segment.take(at, bytes)?,
            Target::Bytes(out, limit) => {
                let room = *limit - out.len() as u64;
                out.extend_from_slice(first(bytes, room).0);
            }
            Target::Unseen(..) => {}
        }
        Ok(self.at < self.wanted())
    }

    /// Takes the next bytes from memory that another process may write meanwhile. They are copied once: the copy is
    /// verified, and written to the arena.
    ///
    /// # Errors
    /// The errors of [`Receiver::take`].
    pub(crate) fn take_shared(&mut self, from: &Arena, place: u64, len: u64) -> Result<bool> {
        from.check(place, len).map_err(out_of_arena)?;
        if matches!(self.target, Target::Unseen(..)) {
            self.at += len;
            return Ok(self.at < self.wanted());
        }
        let mut copy = [0; SHARED];
        let mut done = 0;
        while done < len {
            let count = (len - done).min(SHARED as u64);
            let copy = &mut copy[..count as usize];
            from.copy_to(place + done, copy).map_err(out_of_arena)?;
            self.take(copy)?;
            done += count;
        }
        Ok(self.at < self.wanted())
    }

    /// Reads the wanted bytes from a file directly into the arena.
    ///
    /// # Errors
    /// The errors of [`Receiver::take`], or if the file cannot be read.
    pub fn take_file(&mut self, file: BorrowedFd<'_>) -> Result<()> {
        let head = match &self.target {
            Target::Segment(segment) => segment.expect.header_bytes(),
            Target::Bytes(_, limit) => *limit,
            Target::Unseen(arena, place, bytes) => {
                while self.at < *bytes {
                    let piece = PIECE.min(*bytes - self.at);
                    match arena.pread(file, self.at, place + self.at, piece) {
                        Ok(0) => break,
                        Ok(count) => self.at += count as u64,
                        Err(Errno::INTR) => {}
                        Err(errno) => return Err(os_error(errno)),
                    }
                }
                return Ok(());
            }
        };
        let mut buffer = vec![0; head as usize];
        let mut filled = 0;
        while filled < buffer.len() {
            match rustix::io::pread(file, &mut buffer[filled..], filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(os_error(errno)),
            }
        }
        self.take(&buffer[..filled])?;
        let stop = self.stop;
        match &mut self.target {
            Target::Segment(segment) => segment.take_parts(file, || stopped(stop)),
            Target::Bytes(..) | Target::Unseen(..) => Ok(()),
        }
    }

    fn check_stop(&self) -> Result<()> {
        stopped(self.stop)
    }

    /// The checksums of the parts, which match the header's.
    ///
    /// # Errors
    /// If the object ended too early, or a checksum does not match.
    pub fn finish(self) -> Result<Vec<u64>> {
        match self.target {
            Target::Segment(segment) => segment.finish(),
            Target::Unseen(_, _, bytes) if self.at < bytes => {
                Err(corrupt("the object ends too early"))
            }
            Target::Bytes(..) | Target::Unseen(..) => Ok(Vec::new()),
        }
    }

    /// The bytes of a receiver that [`Receiver::bytes`] made.
    pub fn into_bytes(self) -> Vec<u8> {
        match self.target {
            Target::Bytes(bytes, _) => bytes,
            Target::Segment(_) | Target::Unseen(..) => Vec::new(),
        }
    }
}

fn stopped(stop: Option<&AtomicBool>) -> Result<()> {
    if stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
        return Err(RemoteError::Stopped.into());
    }
    Ok(())
}

/// The first `count` bytes (or all if there are fewer), and the rest.
fn first(bytes: &[u8], count: u64) -> (&[u8], &[u8]) {
    bytes.split_at(count.min(bytes.len() as u64) as usize)
}

/// The error of a system call on a store's file.
pub(crate) fn os_error(errno: Errno) -> ObjectStoreError {
    let kind = match errno {
        Errno::NOENT => RemoteError::NotFound,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => RemoteError::Full,
        Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::LOOP | Errno::NOTDIR => {
            RemoteError::Denied
        }
        Errno::TIMEDOUT => RemoteError::Late,
        _ => RemoteError::Unreachable,
    };
    let error = ObjectStoreError::new(kind, std::io::Error::from(errno));
    match kind {
        RemoteError::Denied => error.or_advice(
            "let the user of this process read and write the directory; all hosts use one uid, and no symbolic link below \
             the directory is followed",
        ),
        RemoteError::Unreachable | RemoteError::Late => {
            error.or_advice("check that the file system is mounted, and that its server answers")
        }
        _ => error,
    }
}

fn corrupt(why: impl std::fmt::Display) -> ObjectStoreError {
    ObjectStoreError::new(RemoteError::Corrupt, why)
}

impl ArrivingSegment<'_> {
    fn wanted(&self) -> u64 {
        let last = self.parts.last();
        last.map_or(self.expect.header_bytes(), |(part, at)| {
            at + u64::from(part.len)
        })
    }

    /// Takes bytes that begin `at` in the object.
    fn take(&mut self, mut at: u64, mut bytes: &[u8]) -> Result<()> {
        let head = self.expect.header_bytes();
        if at < head {
            let (ours, rest) = first(bytes, head - at);
            self.header.extend_from_slice(ours);
            (at, bytes) = (at + ours.len() as u64, rest);
            if at < head {
                return Ok(());
            }
            let version = match self.unsealing {
                Some(_) => ENCRYPTED_VERSION,
                None => REMOTE_VERSION,
            };
            let header = verify_as(&self.header, &self.expect, version);
            self.checksums = header.map_err(corrupt)?.checksums;
        }
        while let Some((part, start)) = self.parts.get(self.sums.len()).copied() {
            // Bytes between the parts are not wanted.
            let (skipped, rest) = first(bytes, start.saturating_sub(at));
            (at, bytes) = (at + skipped.len() as u64, rest);
            if at < start || bytes.is_empty() {
                break;
            }
            let done = at - start;
            let (ours, rest) = first(bytes, COPIED.min(u64::from(part.len) - done));
            let count = ours.len() as u64;
            match &mut self.unsealing {
                Some(unsealing) => self.running.update(unsealing.take(ours)?),
                None => {
                    // Bytes that have just arrived are in the processor's caches. Their copy bypasses the caches: it is
                    // larger than them, and this processor does not read it again soon.
                    self.running.update_cached(ours);
                    let to = part.arena_offset + done;
                    write_once(self.arena, to, ours).map_err(out_of_arena)?;
                }
            }
            (at, bytes) = (at + count, rest);
            if done + count == u64::from(part.len) {
                self.end_part(part)?;
            }
        }
        Ok(())
    }

    fn end_part(&mut self, part: RemotePart) -> Result<()> {
        let sum = std::mem::take(&mut self.running).finish();
        if sum != self.checksums[part.payload as usize] {
            return Err(corrupt("a payload does not match its checksum"));
        }
        self.sums.push(match &mut self.unsealing {
            Some(unsealing) => unsealing.end(part, self.arena)?,
            None => sum,
        });
        Ok(())
    }

    /// Reads a piece of a part, `done` bytes after the part's start. Returns the number of bytes.
    fn read_piece(
        &mut self,
        file: BorrowedFd<'_>,
        (at, done): (u64, u64),
        (part, len): (RemotePart, u64),
    ) -> std::result::Result<u64, Errno> {
        let Some(unsealing) = &mut self.unsealing else {
            let to = part.arena_offset + done;
            let count = self.arena.pread(file, at, to, len)? as u64;
            // The range is valid: bytes were just read into it.
            let summed = self.arena.sum_cached(&mut self.running, to, count);
            return summed.map(|()| count).map_err(|_| Errno::INVAL);
        };
        let room = unsealing.room(len as usize).map_err(|_| Errno::NOMEM)?;
        let count = rustix::io::pread(file, room, at)?;
        self.running.update(unsealing.fill(count));
        Ok(count as u64)
    }

    /// Reads the parts, once the header is verified.
    fn take_parts(&mut self, file: BorrowedFd<'_>, go_on: impl Fn() -> Result<()>) -> Result<()> {
        if self.checksums.is_empty() {
            return Err(corrupt("the object ends too early"));
        }
        for index in 0..self.parts.len() {
            let (part, start) = self.parts[index];
            let len = u64::from(part.len);
            let mut done = 0;
            while done < len {
                go_on()?;
                let piece = PIECE.min(len - done);
                match self.read_piece(file, (start + done, done), (part, piece)) {
                    Ok(0) => return Err(corrupt("the object ends too early")),
                    Ok(count) => done += count,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(os_error(errno)),
                }
            }
            self.end_part(part)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<u64>> {
        if self.checksums.is_empty() || self.sums.len() < self.parts.len() {
            return Err(corrupt("the object ends too early"));
        }
        Ok(self.sums)
    }
}
