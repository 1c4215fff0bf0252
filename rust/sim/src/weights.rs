//! Weights that change: resets, and sessions that go on in the namespace of other weights or in one of their own.

use std::time::Duration;

use undercroft_core::session::GiveUp;

use crate::participants::SimClient;
use crate::world::World;

impl World {
    /// A session has come to a namespace whose last reset was not durable when the last engine ended: its weights are
    /// those of before, or it is reset again.
    pub(crate) fn settle(&mut self, session: usize) -> Result<(), String> {
        let namespace = self.sessions[session].namespace;
        if !std::mem::take(&mut self.models[namespace].must_reset) {
            return Ok(());
        }
        if self.random.chance(500) {
            let model = &mut self.models[namespace];
            model.epoch = model.entered;
            self.note(|| format!("the weights of before in namespace {namespace}"));
            return Ok(());
        }
        self.reset(session)
    }

    /// A client's caches are reset, often because its weights have changed. It may give its copies up.
    pub(crate) fn reset(&mut self, session: usize) -> Result<(), String> {
        let gives_up = self.random.chance(500) && !self.settings.roomy;
        let before = self.random.chance(500);
        if gives_up && before {
            self.give_up_transfers(session, GiveUp::Reset)?;
        }
        self.drop_blocks(session);
        match gives_up && !before {
            true => self.give_up_transfers(session, GiveUp::Reset),
            false => Ok(()),
        }
    }

    fn drop_blocks(&mut self, session: usize) {
        let namespace = self.sessions[session].namespace;
        self.sessions[session].session.reset(Duration::ZERO);
        for request in &mut self.sessions[session].requests {
            (request.ready, request.promise) = (None, None);
            request.looked.clear();
        }
        if self.remote.is_some() && !self.models[namespace].private {
            // Sessions without a reset keep the weights of the description, and the store has earlier blocks of these
            // weights. The session that was reset gets a namespace of its own below, with weights of its own.
            self.forget(namespace);
            self.history.saved.retain(|&(of, _, _)| of != namespace);
            self.pins.forget(namespace);
        } else {
            self.models[namespace].advance();
        }
        self.log.stats.resets += 1;
        self.note(|| format!("reset namespace {namespace}"));
        if !self.models[namespace].private {
            self.history.undurable.push(namespace);
            let away = self.out_of_reach();
            self.history.stale.extend(away);
            self.part(session);
        }
    }

    /// The weights of a client change, or its namespace was reset at another engine: it goes on in the namespace of
    /// named weights, or in one of its own.
    pub(crate) fn change_weights(&mut self, session: usize) -> Result<(), String> {
        let name = self.drawn_weights(session);
        let gives_up = self.random.chance(300) && !self.settings.roomy;
        let before = self.random.chance(500);
        if gives_up && before {
            self.give_up_transfers(session, GiveUp::Weights)?;
        }
        match name {
            Some(namespace) => self.go_on_in(session, namespace)?,
            None => self.make_private(session),
        }
        match gives_up && !before {
            true => self.give_up_transfers(session, GiveUp::Weights),
            false => Ok(()),
        }
    }

    /// A shared namespace of a session's model, its own included.
    fn drawn_weights(&mut self, session: usize) -> Option<usize> {
        let of = &self.models[self.sessions[session].namespace].spec;
        let is_same = |at: &usize| {
            let model = &self.models[*at];
            !model.private && model.spec.groups == of.groups && {
                let base = |description: &str| description.split(',').next().map(str::to_owned);
                base(&model.spec.description) == base(&of.description)
            }
        };
        let same: Vec<usize> = (0..self.models.len()).filter(is_same).collect();
        let is_named = same.len() > 1 && self.random.chance(700);
        is_named.then(|| self.random.pick(&same))
    }

    fn go_on_in(&mut self, session: usize, namespace: usize) -> Result<(), String> {
        let SimClient { namespace: old, .. } = self.sessions[session];
        let before = self.known_namespaces();
        let description = self.models[namespace].spec.description.clone();
        let of = &self.sessions[session].session;
        of.change_weights(Some(&description));
        let is_named = self
            .known_namespaces()
            .contains_key(&self.digest(namespace));
        self.note(|| format!("new weights of a session of {old}: {namespace}, named: {is_named}"));
        self.forget_lookups(session);
        if !is_named {
            if !self.may_be_refused(namespace) {
                return Err(format!("no session gets the namespace {namespace}"));
            }
            if !self.models[old].private {
                self.part(session);
            }
            return Ok(());
        }
        self.check_forgotten(namespace, &before)?;
        self.note_use(namespace);
        self.log.stats.renamed += 1;
        self.sessions[session].namespace = namespace;
        if old != namespace && self.models[old].private {
            self.forget(old);
        } else if old != namespace {
            self.note_use(old);
        }
        self.settle(session)
    }

    /// A session parts with its namespace.
    fn make_private(&mut self, session: usize) {
        let SimClient { id, namespace, .. } = self.sessions[session];
        if self.random.chance(500) {
            self.engine.with(|engine| engine.make_private(id));
        } else {
            self.sessions[session].session.change_weights(None);
        }
        if !self.models[namespace].private {
            self.forget_lookups(session);
            self.part(session);
        }
    }

    /// The engine has ended a session's lookups: the client may ask again.
    fn forget_lookups(&mut self, session: usize) {
        let loads = &mut self.sessions[session].loads;
        loads.iter_mut().for_each(|load| load.outlived = true);
        for request in &mut self.sessions[session].requests {
            (request.ready, request.promise, request.asked_ns) = (None, None, None);
            (request.promotions, request.failed) = (0, false);
            request.looked.clear();
        }
    }

    /// A session has its own namespace from now on.
    fn part(&mut self, session: usize) {
        let namespace = self.sessions[session].namespace;
        self.history.names += 1;
        let private = self.models[namespace].private(self.history.names);
        self.models.push(private);
        self.sessions[session].namespace = self.models.len() - 1;
        self.note(|| format!("a session parts with namespace {namespace}"));
    }
}
