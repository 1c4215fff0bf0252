//! The device fails: each kind of fault costs at most the blocks it hit, and the tier recovers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use undercroft_contract::io::{FileKind, IoFault};
use undercroft_contract::session::{LookupRequest, Tokens};
use undercroft_engine::disk::{DeviceReport, Health};
use undercroft_io::fault::{FaultEngine, FaultRates, Noise, Script};
use undercroft_io::fault_hook::{Call, CallKind, FaultHook, Verdict};
use undercroft_io::pool::ThreadPool;

use crate::rig::{DEPTH, Io, MODEL, Model, Open, Random, SECOND, dir};

/// Faults that can be switched off.
#[derive(Debug)]
struct Switch<I>(Arc<(AtomicBool, I)>);

impl<I> Clone for Switch<I> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<I> Switch<I> {
    fn on(faults: I) -> Self {
        Self(Arc::new((AtomicBool::new(true), faults)))
    }

    fn off(&self) {
        self.0.0.store(false, Ordering::SeqCst);
    }
}

impl<I: FaultHook> FaultHook for Switch<I> {
    fn on_call(&self, call: &Call) -> Verdict {
        match self.0.0.load(Ordering::SeqCst) {
            true => self.0.1.on_call(call),
            false => Verdict::Pass,
        }
    }
}

/// Every call of a kind on the data file of one device fails.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) device: u16,
    pub(crate) kind: CallKind,
    pub(crate) errno: Errno,
}

impl FaultHook for Broken {
    fn on_call(&self, call: &Call) -> Verdict {
        if call.device == self.device && call.kind == self.kind && call.file == FileKind::Data {
            Verdict::Fail(self.errno.raw_os_error())
        } else {
            Verdict::Pass
        }
    }
}

fn broken(kind: CallKind, errno: Errno) -> Switch<Broken> {
    Switch::on(Broken {
        device: 0,
        kind,
        errno,
    })
}

#[test]
fn short_and_interrupted_calls_cost_nothing() {
    for io in Io::all() {
        let (_guard, store) = dir();
        let noise = |seed| {
            let rates = FaultRates {
                short: 300,
                interrupted: 200,
                ..FaultRates::default()
            };
            Noise::new(seed, rates)
        };
        let dirs = [store];
        Open::new(&dirs).with(io, noise(1)).save(1, 60);
        let mut rig = Open::new(&dirs).with(io, noise(2));
        assert_eq!(rig.recovery.blocks, 60, "{io:?}");
        assert_eq!(rig.hit(1, 60), 60, "{io:?}");
        let counters = rig.engine.counters();
        assert_eq!((counters.read_failures, counters.write_failures), (0, 0));
        assert_eq!(counters.disk_reads, 60);
    }
}

#[test]
fn a_failed_or_corrupt_read_is_a_shorter_hit_and_heals() {
    let flip = Verdict::Flip { at: 777, mask: 16 };
    let faults = [Verdict::Fail(Errno::IO.raw_os_error()), flip];
    for (io, fault) in Io::all()
        .into_iter()
        .flat_map(|io| faults.map(|fault| (io, fault)))
    {
        let (_guard, store) = dir();
        let dirs = [store];
        Open::new(&dirs).plain().save(1, 20);
        let script = Script::default().then(CallKind::Read, [Verdict::Pass; 7]);
        let script = script.then(CallKind::Read, [fault]);
        let mut rig = Open::new(&dirs).with(io, script.clone());
        let hit = rig.hit(1, 20);
        assert!(script.is_used_up());
        // The eighth read is that of one of the first blocks; its descendants go with it.
        assert!(hit < 20, "{io:?} {fault:?}: {hit}");
        let counters = *rig.engine.counters();
        let failures = (counters.checksum_failures, counters.read_failures);
        assert_eq!(failures, if fault == flip { (1, 0) } else { (0, 1) });
        assert_eq!(rig.engine.devices()[0].health, Health::Good);
        // The request recomputes the rest, and saves it.
        rig.save(1, 20);
        assert_eq!(rig.hit(1, 20), 20);
        drop(rig);
        assert_eq!(Open::new(&dirs).plain().hit(1, 20), 20, "{io:?} {fault:?}");
    }
}

#[test]
fn a_device_that_takes_no_writes_is_read_and_tried_again() {
    for io in Io::all() {
        for errno in [Errno::NOSPC, Errno::ROFS, Errno::IO] {
            let (_guard, store) = dir();
            let dirs = [store];
            Open::new(&dirs).plain().save(1, 10);
            let faults = broken(CallKind::Write, errno);
            let mut rig = Open::new(&dirs).with(io, faults.clone());
            rig.save(2, 10);
            let DeviceReport { health, fault, .. } = rig.engine.devices()[0];
            assert!(
                matches!(health, Health::NoWrites { .. }),
                "{io:?} {errno}: {health:?}"
            );
            assert_eq!(fault, Some(IoFault::Os(errno.raw_os_error())));
            assert_eq!(rig.engine.gauges().disk_degraded, 1);
            assert_eq!(rig.hit(1, 10), 10, "what is there is read");
            assert_eq!(rig.hit(2, 10), 10, "the host tier goes on");
            rig.save(3, 10);
            assert_eq!(rig.hit(3, 10), 10);
            // The device is well again; the next write says so.
            faults.off();
            rig.pass(3600 * SECOND);
            rig.save(4, 10);
            let report = rig.engine.devices()[0];
            assert_eq!(
                (report.health, report.fault),
                (Health::Good, None),
                "{io:?} {errno}"
            );
            drop(rig);
            let mut rig = Open::new(&dirs).plain();
            assert_eq!(rig.hit(1, 10), 10, "{io:?} {errno}");
            assert_eq!(rig.hit(4, 10), 10, "{io:?} {errno}");
        }
    }
}

#[test]
fn a_device_that_fails_every_read_is_given_up_and_tried_again() {
    for io in Io::all() {
        let (_guard, store) = dir();
        let dirs = [store];
        let mut rig = Open::new(&dirs).plain();
        (1..=20).for_each(|prompt| rig.save(prompt, 5));
        drop(rig);
        let faults = broken(CallKind::Read, Errno::IO);
        let mut rig = Open::new(&dirs).with(io, faults.clone());
        let mut asked = 0;
        while !matches!(rig.engine.devices()[0].health, Health::Failed { .. }) {
            asked += 1;
            assert!(asked <= 20, "{io:?}: never given up");
            assert_eq!(rig.hit(asked, 5), 0);
        }
        assert_eq!(
            rig.engine.devices()[0].fault,
            Some(IoFault::Os(Errno::IO.raw_os_error()))
        );
        assert_eq!(rig.engine.gauges().disk_blocks, 0);
        // The host tier goes on, and nothing is written for now.
        let writes = rig.engine.counters().disk_writes;
        rig.save(1, 5);
        assert_eq!(rig.hit(1, 5), 5);
        assert_eq!(rig.engine.counters().disk_writes, writes);
        // The cable is plugged in again.
        faults.off();
        rig.pass(24 * 3600 * SECOND);
        rig.save(100, 5);
        let report = rig.engine.devices()[0];
        assert_eq!(
            (report.health, report.fault),
            (Health::Good, None),
            "{io:?}"
        );
        drop(rig);
        let mut rig = Open::new(&dirs).plain();
        assert_eq!(rig.hit(100, 5), 5, "{io:?}");
        // All other hits are right.
        (1..=20).for_each(|prompt| assert!(rig.hit(prompt, 5) <= 5));
    }
}

#[test]
fn the_tier_serves_no_wrong_byte_under_random_faults_and_recovers() {
    let rates = FaultRates {
        short: 50,
        interrupted: 50,
        read_error: 40,
        write_error: 40,
        flip: 40,
    };
    for io in Io::all() {
        for seed in 0..6 {
            let (_guard, store) = dir();
            let dirs = [store];
            let noise = Switch::on(Noise::new(seed, rates));
            let mut random = Random(seed);
            let mut rig = Open::new(&dirs).with(io, noise.clone());
            for step in 0..60 {
                let (prompt, len) = (random.below(12), 1 + random.below(40) as u32);
                match random.below(3) {
                    0 => rig.save(prompt, len),
                    _ => {
                        rig.hit(prompt, len);
                    }
                }
                rig.pass(SECOND);
                if step % 20 == 19 {
                    drop(rig);
                    rig = Open::new(&dirs).with(io, noise.clone());
                }
            }
            noise.off();
            rig.pass(24 * 3600 * SECOND);
            rig.save(50, 10);
            assert_eq!(rig.hit(50, 10), 10);
            assert_eq!(
                rig.engine.devices()[0].health,
                Health::Good,
                "{io:?} seed {seed}"
            );
            drop(rig);
            assert_eq!(
                Open::new(&dirs).plain().hit(50, 10),
                10,
                "{io:?} seed {seed}"
            );
        }
    }
}

#[test]
fn a_device_that_answers_late_delays_one_answer_and_wastes_no_read() {
    let (_guard, store) = dir();
    let dirs = [store];
    Open::new(&dirs).plain().save(1, 10);
    let mut control = None;
    let open = Open::new(&dirs);
    let stall_ns = open.config.stall_ns;
    let mut rig = open
        .open(|arena, devices| {
            let pool = ThreadPool::new(DEPTH, arena, devices).unwrap();
            let (engine, handle) = FaultEngine::new(pool);
            control = Some(handle);
            Box::new(engine)
        })
        .unwrap();
    let control = control.unwrap();
    control.hang();
    let hashes = Model::hashes(1, 10);
    let session = rig.session(&MODEL);
    let ask = |rig: &mut crate::rig::Rig| {
        rig.engine
            .lookup(session, &LookupRequest::new("r", &hashes))
            .tokens()
    };
    assert_eq!(ask(&mut rig), None);
    assert!(rig.start_io() > 0);
    rig.pass(stall_ns - 1);
    assert_eq!(rig.start_io(), 0);
    assert_eq!(ask(&mut rig), None);
    rig.pass(1);
    assert_eq!(ask(&mut rig), None, "it may have answered by now");
    assert_eq!(rig.start_io(), 0);
    assert_eq!(ask(&mut rig), Some(Tokens(0)), "the request recomputes");
    assert_eq!(rig.engine.devices()[0].health, Health::Stalled);
    rig.engine.finish_request(session, "r");
    assert_eq!(
        ask(&mut rig),
        Some(Tokens(0)),
        "and the next one does at once"
    );
    rig.engine.finish_request(session, "r");
    let counters = rig.engine.counters();
    assert_eq!((counters.promotions_given_up, counters.promotions), (1, 0));
    // Ten seconds later the answers come. No other payload used their slots meanwhile.
    rig.pass(10 * SECOND);
    control.release();
    rig.pump();
    let reads = rig.engine.counters().disk_reads;
    assert!(reads > 0);
    assert_eq!(rig.hit(1, 10), 10);
    assert_eq!(
        rig.engine.counters().disk_reads,
        10,
        "each block is read once"
    );
    assert_eq!(rig.engine.devices()[0].health, Health::Good);
    assert_eq!(rig.engine.gauges().active_lookups, 0);
}

#[test]
fn a_lookup_waits_no_longer_than_five_limits_for_a_look_at_the_device() {
    let (_guard, store) = dir();
    let dirs = [store];
    Open::new(&dirs).plain().save(1, 10);
    let open = Open::new(&dirs);
    let stall_ns = open.config.stall_ns;
    let mut rig = open.plain();
    let hashes = Model::hashes(1, 10);
    let session = rig.session(&MODEL);
    let ask = |rig: &mut crate::rig::Rig| {
        let question = LookupRequest::new("r", &hashes);
        rig.engine.lookup(session, &question).tokens()
    };
    // The polling thread may hang in the device, too.
    assert_eq!(ask(&mut rig), None);
    rig.pass(5 * stall_ns - 1);
    assert_eq!(ask(&mut rig), None);
    rig.pass(1);
    assert_eq!(ask(&mut rig), Some(Tokens(0)));
    assert_eq!(ask(&mut rig), None, "it may try again");
    assert_eq!(rig.engine.counters().promotions_given_up, 1);
}
