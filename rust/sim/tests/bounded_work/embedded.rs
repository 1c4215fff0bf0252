//! Clients in the engine's own process.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use undercroft_contract::session::{Save, SaveRequest, Session, SessionSpec, Tokens};
use undercroft_driver::{EmbeddedSession, EngineAccess};
use undercroft_engine::Engine;
use undercroft_engine::work::Work;

use crate::rig::{BLOCK, UNITS, UNITS_PER_BLOCK, chain, config, namespace};

const LEN: u64 = 4_000;
/// Blocks that one entry of a long save may be about.
const STEP: u64 = 128;

/// An engine whose entries are measured.
#[derive(Debug)]
struct Measured {
    engine: Mutex<Engine>,
    /// The units of work of the entry with the most.
    most: Mutex<u64>,
}

impl EngineAccess for Measured {
    fn enter<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        Work::take();
        let result = work(&mut engine);
        engine.end_entry();
        let mut most = self.most.lock().unwrap_or_else(PoisonError::into_inner);
        *most = (*most).max(Work::take().units());
        Some(result)
    }

    fn read<R>(&self, work: impl FnOnce(&Engine) -> R) -> Option<R> {
        self.enter(|engine| work(engine))
    }

    fn read_or_enter<R>(
        &self,
        known: impl FnOnce(&Engine) -> Option<R>,
        work: impl FnOnce(&mut Engine) -> R,
    ) -> Option<R> {
        self.enter(|engine| known(engine).unwrap_or_else(|| work(engine)))
    }

    fn wait_until(&self, _: Duration, mut done: impl FnMut(&mut Engine) -> bool) -> bool {
        self.enter(|engine| done(engine)).unwrap_or(false)
    }

    fn give_way(&self) {}
}

#[test]
fn a_long_save_is_reserved_and_ended_in_steps() {
    let access = Arc::new(Measured {
        engine: Mutex::new(Engine::new(config(2 * LEN))),
        most: Mutex::default(),
    });
    let spec = SessionSpec::from(namespace("model"));
    let session = EmbeddedSession::open(Arc::clone(&access), spec).unwrap();
    let hashes = chain(1, LEN);
    let save = SaveRequest::new("r", &hashes, Tokens(LEN as u32 * BLOCK));
    let Save::Granted(grant) = session.begin_save(&save) else {
        panic!("the engine refuses a save");
    };
    let granted: usize = grant.extents.iter().map(|of| of.offsets.len()).sum();
    assert_eq!(granted as u64, LEN);
    session.end_transfer(grant.id, true);
    let gauges = access.read(|engine| engine.gauges()).unwrap();
    assert_eq!((gauges.host_blocks, gauges.saves), (LEN, 0));
    let most = *access.most.lock().unwrap();
    assert!(
        most <= UNITS + UNITS_PER_BLOCK * STEP,
        "an entry did {most} units of work"
    );
}
