//! [`Session`] over an engine of this process.

use std::sync::Arc;
use std::time::Duration;

use undercroft_contract::error::RegisterError;
use undercroft_contract::explain::{Reason, Rest};
use undercroft_contract::hint::{HintAnswer, HintRefusal, HintRequest};
use undercroft_contract::pending::PendingLookups;
use undercroft_contract::session::{
    BlockEvents, Finished, GiveUp, Load, Lookup, LookupRequest, Priority, Save, SaveEnd, SaveGrant,
    SaveRequest, Session, SessionSpec, SessionToken, Step, Tokens, TransferEnd, TransferId,
    append_extents,
};
use undercroft_engine::{Engine, HintCursor, LookupCursor, SaveLimit, SaveProgress, SessionId};

use crate::{Driver, EngineAccess};

/// Blocks that one entry reserves or ends: other threads enter the engine in between.
const STEP_BLOCKS: usize = 128;

/// A session of an engine in this process.
///
/// The scheduler saves a prompt, and loads it for the next request with the same prefix. Its workers copy the bytes:
///
/// ```
/// use std::sync::Arc;
///
/// use undercroft_contract::key::BlockHash;
/// use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
/// use undercroft_contract::session::{LookupRequest, Save, SaveRequest, Session, SessionSpec, Tokens};
/// use undercroft_driver::{Driver, EmbeddedSession};
/// use undercroft_engine::{Engine, EngineConfig};
/// use undercroft_io::arena::Arena;
/// use undercroft_io::{IoEngineChoice, open_io_engine};
///
/// let arena = Arc::new(Arena::create(4 << 20)?);
/// let (io, _) = open_io_engine(IoEngineChoice::Auto, 4, Arc::clone(&arena), Vec::new())?;
/// let driver = Arc::new(Driver::start(Engine::new(EngineConfig::new(arena.size())), io)?);
/// let model = NamespaceSpec::uniform("model", 16, &[(GroupKind::Full, 4096)]);
/// let session = EmbeddedSession::open(driver, SessionSpec::from(model))?;
/// let prompt = vec![BlockHash::new(&[1; 32]).unwrap()];
///
/// let Save::Granted(save) = session.begin_save(&SaveRequest::new("first", &prompt, Tokens(16))) else {
///     panic!("an engine of this process answers at once");
/// };
/// arena.write(save.extents[0].offsets[0].get().unwrap(), &[7; 4096])?;
/// session.end_transfer(save.id, true);
///
/// let hit = session.lookup(&LookupRequest::new("second", &prompt));
/// assert_eq!(hit.tokens(), Some(Tokens(16)));
/// let load = session.begin_load("second", Tokens(0), Tokens(16)).unwrap();
/// assert_eq!(arena.read(load.extents[0].offsets[0].get().unwrap(), 4096)?, [7; 4096]);
/// session.end_transfer(load.id, true);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct EmbeddedSession<A: EngineAccess = Driver> {
    engine: Arc<A>,
    id: SessionId,
    token: SessionToken,
    namespace: String,
    waits: PendingLookups,
}

impl<A: EngineAccess> EmbeddedSession<A> {
    /// Opens a session.
    ///
    /// # Errors
    /// Like [`Engine::open_session`], or if the engine is broken.
    pub fn open(engine: Arc<A>, spec: SessionSpec) -> Result<Self, RegisterError> {
        let namespace = spec.namespace.digest().to_hex();
        let opened = engine.enter(|engine| engine.open_session(spec));
        let id = opened.unwrap_or(Err(RegisterError::Broken))?;
        Ok(Self {
            engine,
            id,
            token: SessionToken::default(),
            namespace,
            waits: PendingLookups::default(),
        })
    }

    /// The same session, whose workers attach with `token`.
    #[must_use]
    pub fn with_token(self, token: SessionToken) -> Self {
        Self { token, ..self }
    }

    fn end(&self, id: TransferId, end: TransferEnd) {
        self.engine.drive(|engine| {
            let has_ended = engine.step_end_of_transfer(id, end, STEP_BLOCKS);
            has_ended.then_some(())
        });
    }

    /// The engine's name for the session.
    pub fn id(&self) -> SessionId {
        self.id
    }
}

impl<A: EngineAccess> Session for EmbeddedSession<A> {
    fn namespace(&self) -> String {
        let named = self.engine.read(|engine| engine.namespace_of(self.id));
        named.flatten().unwrap_or_else(|| self.namespace.clone())
    }

    fn lookup(&self, request: &LookupRequest<'_>) -> Lookup {
        let LookupRequest {
            computed, priority, ..
        } = *request;
        let mut cursor = LookupCursor::default();
        let mut step = |engine: &mut Engine| engine.step_lookup(self.id, request, &mut cursor);
        // An entry makes the IO thread retry promotions that are short of memory. The scheduler looks each
        // pending request up at each step, so a demanded lookup first only reads. A prefetch comes once.
        let first = match priority {
            Priority::Prefetch => self.engine.enter(&mut step),
            Priority::Demand => self.engine.read_or_enter(
                |engine| {
                    let known = engine.still_pending(self.id, request.request, computed, priority);
                    known.map(Some)
                },
                &mut step,
            ),
        };
        let answer = match first {
            Some(None) => {
                self.engine.give_way();
                self.engine.drive(step)
            }
            answered => answered.flatten(),
        };
        let answer = answer.unwrap_or(Lookup::NOTHING);
        self.waits.answered(request, answer);
        answer
    }

    fn wait(&self, request: &str, timeout: Duration) -> bool {
        self.engine
            .wait_until(timeout, |engine| !engine.is_promoting(self.id, request))
    }

    fn ended_waits(&self) -> Vec<Box<str>> {
        self.waits.take_ended(|part| {
            let pending = self.engine.read(|engine| {
                let still = |&(name, computed): &(&str, Tokens)| {
                    let answer = engine.still_pending(self.id, name, computed, Priority::Demand);
                    answer.is_some()
                };
                part.iter().map(still).collect()
            });
            self.engine.give_way();
            pending
        })
    }

    fn rest(&self, request: &str) -> Option<Rest> {
        self.engine
            .read(|engine| engine.rest(self.id, request))
            .unwrap_or(Some(Reason::NoServer.into()))
    }

    fn end_lookup(&self, request: &str) {
        self.waits.forget(request);
        self.engine
            .enter(|engine| engine.end_lookup(self.id, request));
    }

    fn begin_load(&self, request: &str, computed: Tokens, external: Tokens) -> Option<Load> {
        let load = self
            .engine
            .enter(|engine| engine.begin_load(self.id, request, computed, external));
        load.flatten().map(|load| Load {
            session: self.token,
            ..load
        })
    }

    fn begin_save(&self, request: &SaveRequest<'_>) -> Save {
        let limit = SaveLimit {
            blocks: STEP_BLOCKS as u32,
            ..SaveLimit::NONE
        };
        let (mut save, mut extents) = (None, Vec::new());
        let ended = self.engine.drive(|engine| {
            save = save.or_else(|| engine.start_save(self.id, request));
            let Some(id) = save else {
                return Some(SaveEnd::default());
            };
            match engine.step_save(id, request, limit) {
                SaveProgress::More(part) => {
                    append_extents(&mut extents, part);
                    None
                }
                SaveProgress::Ended { extents: part, end } => {
                    append_extents(&mut extents, part);
                    Some(end)
                }
            }
        });
        ended.map_or(Save::Unavailable, |end| {
            Save::Granted(SaveGrant {
                // Without extents, the id has no meaning.
                id: save
                    .filter(|_| !extents.is_empty())
                    .unwrap_or(TransferId(0)),
                session: self.token,
                extents,
                end,
            })
        })
    }

    fn poll_saves(&self) -> Vec<SaveGrant> {
        // Every save was granted or refused when it was asked for.
        Vec::new()
    }

    fn end_transfer(&self, id: TransferId, ok: bool) {
        self.end(id, ok.into());
    }

    fn give_up(&self, id: TransferId, reason: GiveUp) {
        self.end(id, TransferEnd::GivenUp(reason));
    }

    fn finish_request(&self, finished: Finished<'_>) {
        self.waits.forget(finished.request);
        self.engine
            .enter(|engine| engine.finish_request(self.id, finished));
    }

    fn hint(&self, request: &HintRequest<'_>) -> HintAnswer {
        let mut cursor = HintCursor::default();
        let answer = self
            .engine
            .drive(|engine| engine.step_hint(self.id, request, &mut cursor));
        answer.unwrap_or(HintAnswer::Rejected(HintRefusal::Unavailable))
    }

    fn take_events(&self, restart: bool) -> BlockEvents {
        let has_some = |engine: &Engine| restart || engine.has_events(self.id);
        let taken = self.engine.read_or_enter(
            |engine| (!has_some(engine)).then(BlockEvents::default),
            |engine| engine.take_events(self.id, restart),
        );
        taken.unwrap_or_default()
    }

    fn report_steps(&self, steps: &[Step]) {
        self.engine
            .enter(|engine| engine.report_steps(self.id, steps));
    }

    fn reset(&self, timeout: Duration) -> bool {
        let begun = self.engine.enter(|engine| engine.reset(self.id));
        if begun != Some(true) {
            return false;
        }
        self.engine
            .wait_until(timeout, |engine| !engine.reset_pending())
            && self
                .engine
                .read(|engine| !engine.reset_failed())
                .unwrap_or(false)
    }

    fn change_weights(&self, description: Option<&str>) {
        self.engine
            .enter(|engine| engine.change_weights(self.id, description));
    }

    fn close(&self) {
        self.engine.enter(|engine| engine.close_session(self.id));
    }
}
