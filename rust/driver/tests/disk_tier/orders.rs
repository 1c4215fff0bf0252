//! What an operator is told after an order to clear is true: for each restart, and for the medium.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use undercroft_contract::io::FileKind;
use undercroft_contract::session::LookupRequest;
use undercroft_engine::{ClearOrder, ClearWhat, Cleared};
use undercroft_io::fault_hook::{Call, CallKind, Direct, FaultHook, Verdict};

use crate::rig::{DISK, HOST, Io, MODEL, Model, Open, Rig, SECOND, dir, patch};

const LEN: u32 = 5;
const HOUR: u64 = 3600;
/// Longer than the pause after failed writes.
const PAUSE: u64 = 31 * SECOND;

/// One kind of call on one file, of one device, fails while this is on.
#[derive(Clone, Debug)]
struct Failing {
    kind: CallKind,
    file: FileKind,
    device: u16,
    errno: Errno,
    on: Arc<AtomicBool>,
}

impl Failing {
    fn new(kind: CallKind, file: FileKind, errno: Errno) -> Self {
        Self {
            kind,
            file,
            device: 0,
            errno,
            on: Arc::new(AtomicBool::new(true)),
        }
    }
}

impl FaultHook for Failing {
    fn on_call(&self, call: &Call) -> Verdict {
        let is_it = (call.kind, call.file, call.device) == (self.kind, self.file, self.device);
        match is_it && self.on.load(Ordering::SeqCst) {
            true => Verdict::Fail(self.errno.raw_os_error()),
            false => Verdict::Pass,
        }
    }
}

/// Writes of payloads fail, as many as this.
#[derive(Debug)]
struct FirstWrites(AtomicU32);

impl FaultHook for FirstWrites {
    fn on_call(&self, call: &Call) -> Verdict {
        let is_it = (call.kind, call.file) == (CallKind::Write, FileKind::Data);
        let take = |left: u32| left.checked_sub(1);
        match is_it
            && self
                .0
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
                .is_ok()
        {
            true => Verdict::Fail(Errno::IO.raw_os_error()),
            false => Verdict::Pass,
        }
    }
}

/// The calls that change files, in their order.
#[derive(Clone, Debug, Default)]
struct Recorded(Arc<Mutex<Vec<Call>>>);

impl FaultHook for Recorded {
    fn on_call(&self, call: &Call) -> Verdict {
        self.0.lock().unwrap().push(*call);
        Verdict::Pass
    }
}

fn order(rig: &mut Rig, what: ClearWhat, erase: bool) -> Cleared {
    rig.engine.clear(&ClearOrder { what, erase }).unwrap();
    rig.pump();
    rig.engine.cleared()
}

fn everything() -> [ClearWhat; 3] {
    let digest = MODEL.spec().digest().to_hex();
    [
        ClearWhat::All,
        ClearWhat::Namespace(digest),
        ClearWhat::OlderThan(1),
    ]
}

#[test]
fn a_clear_by_age_is_durable_only_when_the_table_has_been_written() {
    for errno in [Errno::IO, Errno::ROFS, Errno::NOSPC] {
        for kind in [CallKind::Write, CallKind::Sync] {
            let (_guard, store) = dir();
            let dirs = [store];
            Open::new(&dirs).plain().save(1, LEN);
            let faults = Failing::new(kind, FileKind::Table, errno);
            let on = Arc::clone(&faults.on);
            let mut rig = Open::new(&dirs).with(Io::Pool, faults);
            rig.pass(2 * HOUR * SECOND);
            order(&mut rig, ClearWhat::OlderThan(3600), false);
            for _ in 0..200 {
                rig.pass(SECOND);
                rig.pump();
            }
            let cleared = rig.engine.cleared();
            assert_eq!(cleared.disk_blocks, u64::from(LEN));
            assert!(!cleared.durable, "{errno} {kind:?}: {cleared:?}");
            on.store(false, Ordering::SeqCst);
            rig.pass(PAUSE);
            rig.pump();
            let cleared = rig.engine.cleared();
            assert!(cleared.durable && !cleared.removing, "{cleared:?}");
            drop(rig);
            assert_eq!(Open::new(&dirs).plain().hit(1, LEN), 0);
        }
    }
}

#[test]
fn a_clear_is_not_durable_while_a_directory_is_away_whether_its_model_is_in_use_or_not() {
    for what in everything() {
        for is_used in [false, true] {
            let ((_one, one), (_other, other)) = (dir(), dir());
            let both = [one, other];
            let mut rig = Open::new(&both).plain();
            (0..8).for_each(|prompt| rig.save(prompt, LEN));
            drop(rig);
            let mut open = Open::new(&both);
            open.absent = vec![1];
            open.config.seed = 77;
            let mut rig = open.plain();
            if !is_used {
                let session = rig.session(&MODEL);
                rig.engine.close_session(session);
            }
            rig.pass(100 * SECOND);
            let cleared = order(&mut rig, what.clone(), true);
            assert!(!cleared.durable, "{what:?}, used {is_used}: {cleared:?}");
            assert!(!cleared.removing, "{cleared:?}");
            drop(rig);
            let mut rig = Open::new(&both).plain();
            let found: u32 = (0..8).map(|prompt| rig.hit(prompt, LEN)).sum();
            // A directory that comes back with an earlier life of a model that was in use loses it.
            assert!(
                found > 0 || is_used,
                "the other directory has kept its blocks"
            );
        }
    }
}

#[test]
fn no_restart_after_a_clear_by_age_finds_a_block_that_was_evicted_or_saved_twice_before() {
    let (_guard, store) = dir();
    let dirs = [store];
    // A time to live evicts the first prompt, and leaves its record on disk.
    let open = |disk_ttl_s| {
        let mut open = Open::new(&dirs);
        open.config.unix_at_zero_s = 1_790_000_000;
        open.config.disk_ttl_s = disk_ttl_s;
        open.config.host_bytes = HOST;
        open
    };
    let mut rig = open(HOUR).plain();
    rig.save(1, 1);
    rig.save(2, 1);
    rig.pass(HOUR * SECOND / 2);
    assert_eq!(rig.hit(2, 1), 1);
    for _ in 0..40 {
        rig.pass(60 * SECOND);
        rig.pump();
    }
    assert_eq!(rig.engine.gauges().disk_blocks, 1, "one is evicted");
    drop(rig);
    assert_eq!(open(0).plain().recovery.blocks, 2, "and a restart finds it");
    let mut rig = open(HOUR).plain();
    rig.pass(60 * SECOND);
    rig.pump();
    rig.pass(3 * HOUR * SECOND);
    let cleared = order(&mut rig, ClearWhat::OlderThan(60), false);
    assert!(cleared.durable && !cleared.removing, "{cleared:?}");
    drop(rig);
    let rig = open(0).plain();
    assert_eq!(rig.recovery.blocks, 0, "{:?}", rig.recovery);
}

#[test]
fn an_order_ends_with_one_sync_of_each_file_that_it_changed() {
    for io in Io::all() {
        for (what, erase) in everything()
            .map(|what| (what, true))
            .into_iter()
            .chain([(ClearWhat::OlderThan(1), false)])
        {
            let (_guard, store) = dir();
            let dirs = [store];
            let calls = Recorded::default();
            let mut rig = Open::new(&dirs).with(io, calls.clone());
            rig.pass(SECOND);
            rig.save(1, LEN);
            rig.pass(100 * SECOND);
            rig.pump();
            calls.0.lock().unwrap().clear();
            let cleared = order(&mut rig, what.clone(), erase);
            assert!(cleared.durable && !cleared.removing, "{cleared:?}");
            let calls = calls.0.lock().unwrap().clone();
            let changes = |file| {
                let of_file = calls.iter().filter(move |call| call.file == file);
                let kinds: Vec<CallKind> = of_file.map(|call| call.kind).collect();
                let syncs = kinds.iter().filter(|&&kind| kind == CallKind::Sync).count();
                (syncs, kinds.last() == Some(&CallKind::Sync))
            };
            let by_age = matches!(what, ClearWhat::OlderThan(_));
            let one = (1, true);
            assert_eq!(
                changes(FileKind::Data),
                if erase { one } else { (0, false) }
            );
            assert_eq!(changes(FileKind::Table).0, usize::from(by_age), "{calls:?}");
            if by_age {
                let of_table = calls.iter().filter(|call| call.file == FileKind::Table);
                let first = of_table.map(|call| call.kind).next();
                assert_eq!(first, Some(CallKind::Write), "before the sync: {calls:?}");
            }
            let expected = if erase { u64::from(LEN) * 12_000 } else { 0 };
            assert_eq!(cleared.erased_bytes, expected);
        }
    }
}

#[test]
fn an_order_syncs_the_records_that_were_written_before_it() {
    for io in Io::all() {
        let (_guard, store) = dir();
        let dirs = [store];
        let calls = Recorded::default();
        let mut rig = Open::new(&dirs).with(io, calls.clone());
        rig.save(1, LEN);
        rig.pass(2 * HOUR * SECOND);
        order(&mut rig, ClearWhat::OlderThan(3600), false);
        rig.save(2, LEN);
        rig.pass(2 * SECOND);
        rig.pump();
        let of_table = |kind| {
            let calls = calls.0.lock().unwrap();
            let is_it = |call: &&Call| (call.kind, call.file) == (kind, FileKind::Table);
            calls.iter().filter(is_it).count()
        };
        let [writes, syncs] = [CallKind::Write, CallKind::Sync].map(of_table);
        // It selects no block: the table is as it should be, but the medium may have an earlier one.
        let cleared = order(&mut rig, ClearWhat::OlderThan(3600), false);
        assert!(cleared.durable && !cleared.removing, "{cleared:?}");
        assert_eq!(cleared.disk_blocks, 0);
        assert_eq!(of_table(CallKind::Write), writes);
        assert_eq!(of_table(CallKind::Sync), syncs + 1);
    }
}

#[test]
fn bytes_count_as_erased_only_when_their_erasure_has_succeeded_and_was_synced() {
    for (kind, failures) in [(CallKind::Erase, u64::from(LEN)), (CallKind::Sync, 0)] {
        let (_guard, store) = dir();
        let dirs = [store];
        let faults = Failing::new(kind, FileKind::Data, Errno::IO);
        let on = Arc::clone(&faults.on);
        let mut rig = Open::new(&dirs).with(Io::Pool, faults);
        rig.save(1, LEN);
        let cleared = order(&mut rig, ClearWhat::All, true);
        assert_eq!(
            (cleared.erased_bytes, cleared.erase_failures),
            (0, failures)
        );
        assert_eq!(cleared.durable, kind == CallKind::Erase, "{cleared:?}");
        on.store(false, Ordering::SeqCst);
        rig.pass(PAUSE);
        rig.pump();
        let cleared = rig.engine.cleared();
        let erased = (u64::from(LEN) - failures) * u64::from(MODEL.payload_bytes);
        assert_eq!(
            (cleared.erased_bytes, cleared.erase_failures),
            (erased, failures)
        );
        assert!(cleared.durable && !cleared.removing, "{cleared:?}");
    }
}

#[test]
fn a_block_whose_write_fails_during_a_clear_with_erase_counts_as_not_erased() {
    for (what, erase, expected) in [
        (ClearWhat::All, true, u64::from(LEN)),
        (ClearWhat::OlderThan(0), true, u64::from(LEN)),
        (ClearWhat::All, false, 0),
        (ClearWhat::OlderThan(0), false, 0),
    ] {
        let (_guard, store) = dir();
        let dirs = [store];
        // A write that is tried again succeeds: whether the order comes first is a matter of time.
        let mut rig = Open::new(&dirs).with(Io::Pool, FirstWrites(AtomicU32::new(LEN)));
        rig.begin_writes(1, LEN);
        let cleared = order(&mut rig, what.clone(), erase);
        assert_eq!(cleared.erase_failures, expected, "{what:?} {erase}");
    }
}

#[test]
fn a_block_that_leaves_the_disk_before_a_clear_erases_it_counts_as_not_erased() {
    let (_guard, store) = dir();
    let dirs = [store];
    Open::new(&dirs).plain().save(1, LEN);
    let flip = |bytes: &mut [u8]| bytes.iter_mut().for_each(|byte| *byte ^= 1);
    patch(&dirs[0].join("data"), 0, flip, 1 << 20);
    let mut rig = Open::new(&dirs).plain();
    let (session, hashes) = (rig.session(&MODEL), Model::hashes(1, LEN));
    rig.engine
        .lookup(session, &LookupRequest::new("r", &hashes));
    assert!(rig.start_io() > 0, "reads begin");
    // They find other bytes than were written, and end after the order.
    let cleared = order(&mut rig, ClearWhat::All, true);
    assert!(cleared.durable && !cleared.removing, "{cleared:?}");
    assert!(cleared.erase_failures > 0, "{cleared:?}");
    let erased = cleared.erased_bytes / u64::from(MODEL.payload_bytes);
    assert_eq!(erased + cleared.erase_failures, u64::from(LEN));
}

#[test]
fn a_clear_reaches_the_blocks_of_a_namespace_that_does_not_fit_the_arena() {
    let large = Model {
        id: 9,
        payload_bytes: 300 << 10,
    };
    let digest = large.spec().digest().to_hex();
    for what in [
        ClearWhat::All,
        ClearWhat::Namespace(digest),
        ClearWhat::OlderThan(1),
    ] {
        let (_guard, store) = dir();
        let dirs = [store];
        let open = |host_bytes| {
            let mut open = Open::new(&dirs);
            open.capacity = 4 * DISK;
            open.config.host_bytes = host_bytes;
            open
        };
        open(64 << 20).plain().save_of(&large, 1, 2);
        let mut rig = open(HOST).plain();
        rig.pass(100 * SECOND);
        let cleared = order(&mut rig, what.clone(), false);
        let is_by_age = matches!(what, ClearWhat::OlderThan(_));
        assert_eq!(cleared.durable, !is_by_age, "{what:?}: {cleared:?}");
        drop(rig);
        let found = open(64 << 20).with(Io::Pool, Direct).hit_of(&large, 1, 2);
        assert_eq!(found, if is_by_age { 2 } else { 0 }, "{what:?}");
    }
}

#[test]
fn a_reset_while_a_directory_is_away_is_said_to_have_failed() {
    for is_away in [false, true] {
        let ((_one, one), (_other, other)) = (dir(), dir());
        let both = [one, other];
        let mut open = Open::new(&both);
        open.absent = if is_away { vec![1] } else { vec![] };
        let mut rig = open.plain();
        let session = rig.session(&MODEL);
        assert!(rig.engine.reset(session));
        rig.pump();
        assert!(!rig.engine.reset_pending());
        assert_eq!(rig.engine.reset_failed(), is_away);
    }
}
