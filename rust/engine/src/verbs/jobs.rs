//! The jobs that the engine does beside its callers' requests: all of them, in the order of a turn.
//!
//! Each turn of the IO thread calls the step of every job for which the caller has room. A step that has nothing to do, or
//! is early, returns. When a job is due tells only when the IO thread wakes: [`Engine::wake`], [`Engine::needs_turn`] and
//! [`Engine::is_quiet`] are folds over the table, so a row here is enough for that, and for an orderly stop to wait.

use undercroft_contract::io::{ChecksumRequest, IoRequest, IoRoom};
use undercroft_contract::remote::RemoteRequest;

use crate::disk::Disk;
use crate::forest::DeviceIndex;

use super::super::checksums::SAVED_LOOKED_AT;
use super::super::clear::ERASURES;
use super::super::config::EngineConfig;
use super::super::promotions::REQUESTS_LOOKED_AT;
use super::super::writeback::WRITES_LOOKED_AT;
use super::engine::Engine;
use super::hint::{DEMOTED_MAX, RETURN_NEAR_NS};

/// Makes functions over all jobs from the table below. Each row becomes direct calls: calls through pointers would be a
/// quarter of a short entry.
macro_rules! jobs {
    ($($part:ident, $due:ident, $quota:expr, $step:expr $(, $owed:ident)?;)*) => {
        fn do_jobs(engine: &mut Engine, room: &Room<'_>, turn: &mut TurnState<'_>) {
            $(if room.has(TurnPart::$part) {
                let quota: fn(&EngineConfig) -> usize = $quota;
                let step: fn(&mut Engine, usize, &mut TurnState<'_>) = $step;
                step(engine, quota(&engine.config), turn);
                engine.tell_listeners();
            })*
        }

        fn most_urgent(engine: &Engine) -> Due {
            let mut due = Due::Never;
            $(due = due.max($due(engine));)*
            due
        }

        // Asked at the end of each entry: the compiler leaves out the questions for what is less urgent.
        fn is_any_due(engine: &Engine) -> bool {
            $($due(engine) >= Due::Start ||)* false
        }

        fn is_any_owed(engine: &Engine) -> bool {
            [$($($owed($due(engine)),)?)*].contains(&true)
        }
    };
}

// The jobs, in the order of a turn: the part of the turn, when the job is due, its quota, and its step in the engine `e`, of
// at most `n`, the quota. A quota counts nodes, entries of a queue, or operations of a device. An orderly stop waits for
// what is owed.
jobs! {
    // Only the first of the walks over the nodes that has something to do takes part in a turn.
    Io,        removals,     |of| of.removals,            |e, n, turn| turn.has_walked = e.residency.continue_removals(n);
    Io,        clear_by_age, |of| of.removals,            |e, n, turn| turn.has_walked = turn.has_walked || e.step_pass(n);
    Io,        retention,    |of| of.removals,            |e, n, turn| if !turn.has_walked { e.evict_unused(n) };
    Io,        visibility,   |of| of.tells,               |e, n, _| e.show_more(n);
    Io,        placeholders, |of| of.removals / 2 + 1,    |e, n, _| e.residency.continue_placeholders(n), owed;
    Io,        page_moves,   |of| of.visits as usize / 2, |e, n, _| e.continue_page_moves(n);
    Io,        hints,        |_| DEMOTED_MAX,             |e, n, _| e.step_hints(n);
    Io,        returns,      |of| of.removals,            |e, n, _| e.step_returns(n);
    // No operation starts on a device that does not answer. Reads start before writes.
    Io,        stalls,       by_room,                     |e, _, _| e.look_at_devices(), owed;
    Io,        reads,        |_| REQUESTS_LOOKED_AT,      |e, n, turn| e.next_reads(n, turn.io), owed;
    Io,        probes,       by_room,                     |e, _, turn| e.next_probes(turn.io), owed;
    Io,        no_job,       by_room,                     |e, _, _| e.limit_writes_beside_reads();
    Io,        entries,      by_room,                     |e, _, turn| e.next_entry_writes(turn.io), owed;
    // Payloads may always wait. They take turns with the writes below, so that a device that is never idle gets these.
    Io,        no_job,       |_| ERASURES,                |e, n, turn| e.next_writes_before_payloads(n, turn.io);
    Io,        payloads,     |_| WRITES_LOOKED_AT,        |e, n, turn| e.next_payload_writes(n, turn.io), owed;
    Io,        records,      by_room,                     |e, _, turn| e.next_record_writes(false, turn.io), owed;
    Io,        erasures,     |_| ERASURES,                |e, n, turn| e.next_erasures(n, turn.io), owed;
    Io,        releases,     by_room,                     |e, _, turn| e.next_releases(turn.io), owed;
    Io,        syncs,        by_room,                     |e, _, turn| e.next_syncs(turn.io), owed;
    Io,        resizing,     |of| of.visits as usize / 4, |e, n, _| e.continue_resizing(n);
    // The parts of a turn that need no device. The memory is that of pages which resizing has emptied.
    Memory,    no_job,       by_room,                     |e, _, turn| *turn.memory = e.residency.next_arena_release();
    Checksums, checksums,    |_| SAVED_LOOKED_AT,         |e, n, turn| e.next_checksums(n, turn.sum_bytes, turn.checksums);
    Store,     remote_store, by_room,                     |e, _, turn| e.next_remote(turn.store_room, turn.store);
}

/// The quota of a job that only the caller's room bounds, or the number of devices.
fn by_room(_: &EngineConfig) -> usize {
    usize::MAX
}

fn removals(of: &Engine) -> Due {
    Due::Now.when(of.residency.has_removals())
}

fn clear_by_age(of: &Engine) -> Due {
    let is_under_way = Due::Later.when(of.waits_for_pass());
    is_under_way.max(Due::Now.when(of.has_passes()))
}

fn retention(of: &Engine) -> Due {
    // Payloads expire as time passes.
    let is_on = Due::Later.when(of.retention.is_on());
    is_on.max(Due::Now.when(of.retention.has_rest()))
}

fn visibility(of: &Engine) -> Due {
    Due::Now.when(of.residency.has_rest())
}

fn placeholders(of: &Engine) -> Due {
    Due::Now.when(of.residency.has_placeholders())
}

fn page_moves(of: &Engine) -> Due {
    Due::Now.when(of.residency.has_page_moves())
}

fn hints(of: &Engine) -> Due {
    // Pins end as time passes.
    let has_pins = Due::Later.when(!of.pins.is_empty());
    has_pins.max(Due::Now.when(of.has_hints()))
}

fn returns(of: &Engine) -> Due {
    let is_empty = of.returns.is_empty();
    let waits = Due::Later.when(!is_empty);
    let is_near = !is_empty && of.returns.is_due(of.now_ns + RETURN_NEAR_NS);
    let is_near = Due::Look.when(is_near);
    waits.max(is_near).max(Due::Now.when(of.returns.has_rest()))
}

fn stalls(of: &Engine) -> Due {
    Due::Look.when(!of.operations.is_empty())
}

fn reads(of: &Engine) -> Due {
    if !of.promotions.has_reads() {
        return Due::Never;
    }
    let (operations, disks) = (&of.operations, of.residency.disks());
    let may_start = |device: DeviceIndex| {
        let answers = disks[device.index()].health.answers_reads();
        (operations.may_read(device) || !answers) && of.promotions.waits_for(Some(device))
    };
    let may_sum = of.promotions.waits_for(None) && of.checksums.has_room();
    match may_sum || of.residency.devices().any(may_start) {
        true => Due::Start,
        false => Due::Event,
    }
}

fn probes(of: &Engine) -> Due {
    Due::Start.when(of.promotions.has_probes())
}

/// For writes to any device: a job that has some starts them when a device has room.
fn writes(of: &Engine, has_some: bool) -> Due {
    let may_start = || {
        let mut devices = of.residency.devices();
        devices.any(|device| of.operations.may_write(device))
    };
    match has_some {
        false => Due::Never,
        true if may_start() => Due::Start,
        true => Due::Event,
    }
}

fn entries(of: &Engine) -> Due {
    writes(of, of.namespaces.has_writes(&of.residency))
}

fn payloads(of: &Engine) -> Due {
    let waits = writes(of, of.writeback.has_payloads(&of.residency));
    waits.max(Due::Now.when(of.writeback.has_rest()))
}

fn records(of: &Engine) -> Due {
    let mut disks = of.residency.disks().iter();
    let is_dirty = |disk: &Disk| disk.health.is_alive() && disk.dirty_blocks() > 0;
    let waits = writes(of, disks.clone().any(is_dirty));
    // Ages of payloads that were used.
    waits.max(Due::Later.when(disks.any(Disk::has_touched)))
}

fn erasures(of: &Engine) -> Due {
    writes(of, of.residency.has_waiting_erasures())
}

fn releases(of: &Engine) -> Due {
    writes(of, of.residency.has_releases())
}

fn syncs(of: &Engine) -> Due {
    writes(of, of.has_syncs())
}

fn resizing(of: &Engine) -> Due {
    let waits = Due::Later.when(of.residency.waits_to_resize());
    waits.max(Due::Now.when(of.residency.has_resizing(of.now_ns)))
}

fn checksums(of: &Engine) -> Due {
    Due::Start.when(of.checksums.has_work())
}

fn remote_store(of: &Engine) -> Due {
    of.remote.as_ref().map_or(Due::Never, |remote| {
        let is_active = Due::Poll.when(remote.is_active());
        let has_work = Due::Start.when(remote.has_work());
        is_active
            .max(has_work)
            .max(Due::Now.when(remote.has_rest()))
    })
}

/// Whether an orderly stop waits for a job.
fn owed(due: Due) -> bool {
    !matches!(due, Due::Never | Due::Later)
}

/// For a step that only helps another job.
fn no_job(_: &Engine) -> Due {
    Due::Never
}

/// How soon a job is to be continued, the least urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// There is nothing to do.
    Never,
    /// When an operation ends.
    Event,
    /// Within a second or so, as time passes. No request waits for it.
    Later,
    /// A few times in a second: a device that has operations may have stopped answering.
    Look,
    /// Every few milliseconds: the remote store's operations have time limits.
    Poll,
    /// Now, and again after some milliseconds if memory or budget lacks. A caller whose entry leaves such a job wakes
    /// the IO thread.
    Start,
    /// Now, and again as soon as others have entered the engine: the job needs no device.
    Now,
}

impl Due {
    /// This, if there is something to do.
    fn when(self, has_work: bool) -> Self {
        if has_work { self } else { Self::Never }
    }
}

/// The part of a turn to which a job belongs. A caller may leave out parts.
#[derive(Clone, Copy, Debug)]
enum TurnPart {
    Io,
    Memory,
    Checksums,
    Store,
}

/// A turn under way: how much the caller takes, and the operations that have started.
struct TurnState<'a> {
    sum_bytes: u32,
    store_room: usize,
    io: &'a mut Vec<IoRequest>,
    memory: &'a mut Option<(u64, u64)>,
    checksums: &'a mut Vec<ChecksumRequest>,
    store: &'a mut Vec<RemoteRequest>,
    /// A job that walks over the nodes has taken part.
    has_walked: bool,
}

/// How much the caller of a turn takes. The parts of which it takes nothing are left out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room<'a> {
    /// Operations of the devices.
    pub io: Option<IoRoom<'a>>,
    /// Whether memory can be returned to the system.
    pub memory: bool,
    /// Bytes whose checksums the caller computes before the next turn. A payload whose write starts meanwhile would be
    /// summed twice.
    pub checksum_bytes: Option<u32>,
    /// Operations of the remote store.
    pub store: Option<usize>,
}

impl<'a> Room<'a> {
    /// Room for operations of the devices alone: one number for all, or a number for each.
    pub fn io(room: impl Into<IoRoom<'a>>) -> Self {
        Self {
            io: Some(room.into()),
            ..Self::default()
        }
    }

    /// Room for checksums alone.
    pub fn checksums(bytes: u32) -> Self {
        Self {
            checksum_bytes: Some(bytes),
            ..Self::default()
        }
    }

    /// Room for operations of the remote store alone.
    pub fn store(operations: usize) -> Self {
        Self {
            store: Some(operations),
            ..Self::default()
        }
    }

    fn has(&self, part: TurnPart) -> bool {
        match part {
            TurnPart::Io => self.io.is_some(),
            TurnPart::Memory => self.memory,
            TurnPart::Checksums => self.checksum_bytes.is_some(),
            TurnPart::Store => self.store.is_some(),
        }
    }
}

/// The operations that turns have started. The caller carries them out and reports their ends.
#[derive(Debug, Default)]
pub struct Started {
    /// Operations of the devices; they end by [`Engine::complete`].
    pub io: Vec<IoRequest>,
    /// Offset and bytes of the next part of the arena to return to the system, which ends by
    /// [`Engine::arena_release_ended`] before the next turn with room for memory.
    pub memory: Option<(u64, u64)>,
    /// Checksums; they end by [`Engine::complete`].
    pub checksums: Vec<ChecksumRequest>,
    /// Operations of the remote store; they end by [`Engine::complete_remote`].
    pub store: Vec<RemoteRequest>,
}

impl Engine {
    /// Does a part of each job for which the caller has room. The operations that start now are appended to `out`. The
    /// caller has reported all operations that have ended.
    pub fn turn(&mut self, room: Room<'_>, out: &mut Started) {
        if let Some(room) = room.io {
            self.operations.polled(room, self.now_ns);
        }
        let mut turn = TurnState {
            sum_bytes: room.checksum_bytes.unwrap_or(0),
            store_room: room.store.unwrap_or(0),
            io: &mut out.io,
            memory: &mut out.memory,
            checksums: &mut out.checksums,
            store: &mut out.store,
            has_walked: false,
        };
        do_jobs(self, &room, &mut turn);
    }

    /// When the next turn is due: as soon as the most urgent job.
    pub fn wake(&self) -> Due {
        most_urgent(self)
    }

    /// Whether a turn is due at once, as [`Engine::wake`] would say.
    #[inline]
    pub fn needs_turn(&self) -> bool {
        is_any_due(self)
    }

    /// Whether nothing is in flight, and nothing waits to be read or written on a device.
    pub fn is_quiet(&self) -> bool {
        !is_any_owed(self)
    }
}
