//! Prompts that are on disk only.

use std::time::Duration;

use undercroft_contract::session::{
    Lookup, LookupRequest, PromotionWait, Session, SessionSpec, Sources, Step,
};
use undercroft_driver::EngineAccess;

use crate::rig::{
    Implementation, PATIENCE, SessionRig, answer, full, hashes, hit, miss, shape, tokens, until,
};

/// A directory on which prompts of so many blocks were saved: prompt 1, and so on.
fn saved(of: Implementation, blocks: &[u32]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    for (prompt, &blocks) in (1..).zip(blocks) {
        rig.save(&*session, prompt, blocks);
    }
    session.close();
    until("the session has ended", || rig.in_use()[0] == 0);
    rig.stop();
    dir
}

fn wait_ms(base_ms: u64) -> PromotionWait {
    PromotionWait::Limit {
        base_ns: base_ms * 1_000_000,
        per_1k_tokens_ns: 0,
    }
}

pub(crate) fn a_prompt_on_disk_is_pending_until_it_was_promoted(of: Implementation) {
    let dir = saved(of, &[8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    let question = LookupRequest::new("r", &prompt).computed(tokens(1));
    rig.device.hang();
    assert!(session.lookup(&question.prefetch()).is_pending());
    rig.sync(&*session);
    for _ in 0..3 {
        // The scheduler asks.
        let pending = session.lookup(&question);
        assert_eq!(pending, Lookup::Pending { shared: tokens(8) });
    }
    assert!(!session.wait("r", Duration::from_millis(20)));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| session.wait("r", PATIENCE));
        rig.device.release();
        assert!(waits.join().unwrap());
    });
    assert_eq!(session.lookup(&question), hit(8, 8));
    let load = session.begin_load("r", tokens(1), tokens(7)).unwrap();
    assert_eq!(shape(&load.extents), [(0, 1, 7)]);
    assert!(rig.holds(&load.extents, 1));
    let (host, disk, remote) = (tokens(0), tokens(7), tokens(0));
    assert_eq!(load.sources, Sources { host, disk, remote });
    session.end_transfer(load.id, true);
    rig.sync(&*session);
    let reads = rig.driver.read(|engine| engine.counters().disk_reads);
    assert_eq!(reads, Some(7), "once");
}

pub(crate) fn a_wait_for_a_prefetch_ends_with_its_promotion(of: Implementation) {
    let dir = saved(of, &[8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    let question = LookupRequest::new("r", &prompt);
    rig.device.hang();
    assert!(session.lookup(&question.prefetch()).is_pending());
    assert!(!session.wait("r", Duration::from_millis(20)));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| session.wait("r", PATIENCE));
        rig.device.release();
        assert!(waits.join().unwrap());
    });
    assert_eq!(session.lookup(&question), hit(8, 8));
}

pub(crate) fn a_wait_ends_when_the_device_hangs(of: Implementation) {
    let dir = saved(of, &[8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    let question = LookupRequest::new("r", &prompt);
    rig.device.hang();
    assert!(session.lookup(&question).is_pending());
    // No operation ends: the engine ends the promotion when it looks at the device.
    assert!(session.wait("r", PATIENCE / 2));
    assert_eq!(session.lookup(&question), miss(8));
    let given_up = rig
        .driver
        .read(|engine| engine.counters().promotions_given_up);
    assert_eq!(given_up, Some(1));
    rig.device.release();
}

pub(crate) fn a_wait_ends_with_the_time_that_the_request_may_wait(of: Implementation) {
    let dir = saved(of, &[8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    let question = LookupRequest::new("r", &prompt).wait(Some(wait_ms(200)));
    rig.device.hang();
    assert!(session.lookup(&question).is_pending());
    let start = std::time::Instant::now();
    assert!(session.wait("r", PATIENCE));
    assert!(
        start.elapsed() < PATIENCE / 2,
        "nobody tells that the time is over"
    );
    assert_eq!(answer(&*session, &question), miss(8));
    rig.device.release();
}

/// Looks a prompt up until its lookup waits for the disk, here and on a server.
fn pend(rig: &SessionRig, session: &dyn Session, question: &LookupRequest<'_>) {
    assert!(session.lookup(question).is_pending());
    rig.sync(session);
    assert!(session.lookup(question).is_pending());
}

pub(crate) fn waits_that_end_are_told_once_and_others_go_on(of: Implementation) {
    let dir = saved(of, &[8, 8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let (first, second) = (hashes(1, 8), hashes(2, 8));
    rig.device.hang();
    let limited = LookupRequest::new("limited", &first).wait(Some(wait_ms(200)));
    let patient = LookupRequest::new("patient", &second);
    assert!(session.lookup(&patient.prefetch()).is_pending());
    assert_eq!(session.ended_waits(), [], "nobody waits for a prefetch");
    pend(&rig, &*session, &patient);
    pend(&rig, &*session, &limited);
    let mut ended = Vec::new();
    until("the time of one request is over", || {
        ended.extend(session.ended_waits());
        !ended.is_empty()
    });
    assert_eq!(ended, ["limited".into()]);
    assert!(session.lookup(&patient).is_pending());
    assert_eq!(answer(&*session, &limited), miss(8));
    assert_eq!(session.ended_waits(), []);
    rig.device.release();
    until("the other one's reads have ended", || {
        ended.extend(session.ended_waits());
        ended.len() > 1
    });
    assert_eq!(ended[1..], ["patient".into()]);
    assert_eq!(session.lookup(&patient), hit(8, 8));
    assert_eq!(session.ended_waits(), []);
}

pub(crate) fn lookups_that_a_caller_has_ended_are_no_waits(of: Implementation) {
    let dir = saved(of, &[8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    rig.device.hang();
    for name in ["ended", "finished", "waits"] {
        pend(&rig, &*session, &LookupRequest::new(name, &prompt));
    }
    session.end_lookup("ended");
    session.finish_request("finished".into());
    assert_eq!(session.ended_waits(), []);
    let broken: Option<()> = rig.driver.enter(|_| panic!("the test breaks the engine"));
    assert_eq!(broken, None);
    // A client is told by its server, or by its connection's end.
    let mut ended = Vec::new();
    until("the engine is broken", || {
        ended.extend(session.ended_waits());
        !ended.is_empty()
    });
    assert_eq!(ended, ["waits".into()]);
    rig.device.release();
}

pub(crate) fn a_planned_wait_takes_a_part_of_the_time_of_the_steps_that_were_reported(
    of: Implementation,
) {
    let dir = saved(of, &[8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    // A quarter of the time that the prompt would take is some 100 ms; before any step it is less than 2 ms.
    let slow = Step {
        tokens: 512,
        positions: 0,
        decodes: 0,
        duration_ns: 1_600_000_000,
    };
    session.report_steps(&[slow; 32]);
    rig.sync(&*session);
    let prompt = hashes(1, 8);
    let question = LookupRequest::new("r", &prompt).wait(Some(PromotionWait::Planned));
    rig.device.hang();
    assert!(session.lookup(&question).is_pending());
    assert!(!session.wait("r", Duration::from_millis(20)));
    assert!(session.wait("r", PATIENCE));
    assert_eq!(answer(&*session, &question), miss(8));
    let stopped = rig
        .driver
        .read(|engine| engine.counters().plans_stopped_guarantee);
    assert_eq!(stopped, Some(1));
    rig.device.release();
}

pub(crate) fn a_promotion_that_takes_longer_than_its_wait_is_a_miss(of: Implementation) {
    let dir = saved(of, &[8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    rig.device.hang();
    let patient = LookupRequest::new("patient", &prompt).wait(Some(wait_ms(600_000)));
    assert!(session.lookup(&patient).is_pending());
    let hasty = LookupRequest::new("hasty", &prompt).wait(Some(wait_ms(1)));
    assert_eq!(answer(&*session, &hasty), miss(8));
    assert_eq!(session.begin_load("hasty", tokens(0), tokens(8)), None);
    assert!(session.lookup(&patient).is_pending());
    rig.device.release();
    assert_eq!(answer(&*session, &patient), hit(8, 8));
}

pub(crate) fn nothing_is_read_for_a_hit_that_is_too_short_to_be_of_use(of: Implementation) {
    let dir = saved(of, &[8]);
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let mut prompt = hashes(1, 8);
    prompt.extend(hashes(2, 8));
    let reads = || rig.driver.read(|engine| engine.counters().disk_reads);
    let too_short = LookupRequest::new("r", &prompt).min(tokens(9));
    session.lookup(&too_short.prefetch());
    rig.sync(&*session);
    assert_eq!(answer(&*session, &too_short), miss(8));
    rig.sync(&*session);
    assert_eq!(reads(), Some(0));
    // The answer to a question is none to another one.
    assert_eq!(answer(&*session, &too_short.min(tokens(8))), hit(8, 8));
    rig.sync(&*session);
    assert_eq!(reads(), Some(8));
}

pub(crate) fn a_leased_prefetch_keeps_its_bytes_from_promotions_that_are_demanded(
    of: Implementation,
) {
    // Together more than half of the arena, which is all that promotions get.
    let dir = saved(of, &[100, 100]);
    let rig = SessionRig::with_disk(of, dir.path());
    let spec = SessionSpec {
        leases_prefetches: true,
        ..SessionSpec::from(full())
    };
    let session = rig.open(spec);
    let (early, urgent) = (hashes(1, 100), hashes(2, 100));
    let prefetch = LookupRequest::new("early", &early).prefetch();
    assert_eq!(answer(&*session, &prefetch), hit(100, 100));
    let demand = LookupRequest::new("urgent", &urgent).wait(Some(wait_ms(50)));
    answer(&*session, &demand);
    let load = session.begin_load("early", tokens(0), tokens(100)).unwrap();
    rig.sync(&*session);
    assert_eq!(rig.in_use()[2], 1, "the engine knows of the load");
    rig.evict_all();
    assert!(rig.holds(&load.extents, 1));
    session.end_transfer(load.id, true);
}
