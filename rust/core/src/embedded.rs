//! [`Session`] over an engine of this process.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::{Driver, EngineAccess};
use crate::engine::{Engine, Granted, HintCursor, LookupCursor, SessionId};
use crate::error::RegisterError;
use crate::explain::{Reason, Rest};
use crate::hint::{HintAnswer, HintRefusal, HintRequest};
use crate::session::{
    BlockEvents, GiveUp, Load, Lookup, LookupRequest, Priority, Save, SaveGrant, SaveRequest,
    Session, SessionSpec, SessionToken, Step, Tokens, TransferId,
};

/// A session of an engine in this process.
#[derive(Debug)]
pub struct EmbeddedSession<A: EngineAccess = Driver> {
    engine: Arc<A>,
    id: SessionId,
    token: SessionToken,
    namespace: String,
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
        })
    }

    /// The same session, whose workers attach with `token`.
    #[must_use]
    pub fn with_token(self, token: SessionToken) -> Self {
        Self { token, ..self }
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
        let mut answer = match priority {
            Priority::Prefetch => self.engine.enter(&mut step),
            Priority::Demand => self.engine.read_or_enter(
                |engine| {
                    let known = engine.still_pending(self.id, request.request, computed, priority);
                    known.map(Some)
                },
                &mut step,
            ),
        };
        while let Some(None) = answer {
            self.engine.give_way();
            answer = self.engine.enter(&mut step);
        }
        answer.flatten().unwrap_or(Lookup::NOTHING)
    }

    fn wait(&self, request: &str, timeout: Duration) -> bool {
        self.engine
            .wait_until(timeout, |engine| !engine.is_promoting(self.id, request))
    }

    fn rest(&self, request: &str) -> Option<Rest> {
        self.engine
            .read(|engine| engine.rest(self.id, request))
            .unwrap_or(Some(Reason::NoServer.into()))
    }

    fn end_lookup(&self, request: &str) {
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
        let granted = self
            .engine
            .enter(|engine| engine.begin_save(self.id, request));
        granted.map_or(Save::Unavailable, |Granted { transfer, refused }| {
            // Without a transfer, the id has no meaning.
            let (id, extents) = transfer.map_or_else(
                || (TransferId(0), Vec::new()),
                |transfer| (transfer.id, transfer.extents),
            );
            Save::Granted(SaveGrant {
                id,
                session: self.token,
                extents,
                refused,
            })
        })
    }

    fn poll_saves(&self) -> Vec<SaveGrant> {
        // Every save was granted or refused when it was asked for.
        Vec::new()
    }

    fn end_transfer(&self, id: TransferId, ok: bool) {
        self.engine.enter(|engine| engine.end_transfer(id, ok));
    }

    fn give_up(&self, id: TransferId, reason: GiveUp) {
        self.engine.enter(|engine| engine.give_up(id, reason));
    }

    fn finish_request(&self, request: &str) {
        self.engine
            .enter(|engine| engine.finish_request(self.id, request));
    }

    fn hint(&self, request: &HintRequest<'_>) -> HintAnswer {
        let mut cursor = HintCursor::default();
        loop {
            let answer = self
                .engine
                .enter(|engine| engine.step_hint(self.id, request, &mut cursor));
            match answer {
                Some(Some(answer)) => return answer,
                Some(None) => self.engine.give_way(),
                None => return HintAnswer::Rejected(HintRefusal::Unavailable),
            }
        }
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
