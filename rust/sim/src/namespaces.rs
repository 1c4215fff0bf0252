//! The namespaces of sessions: which ones an engine forgets to make room for others, and when; resets, and sessions that
//! go on in the namespace of other weights or in one of their own.

use std::collections::HashMap;
use std::time::Duration;

use undercroft_contract::error::RegisterError;
use undercroft_contract::key::NamespaceDigest;
use undercroft_contract::session::GiveUp;
use undercroft_contract::tier::{TENANT_SHARE_WHOLE, TENANTS_MAX};

use crate::participants::SimClient;
use crate::world::World;

/// The shared namespaces that an engine knows, and whether each is in every directory's table.
pub(crate) type Known = HashMap<NamespaceDigest, bool>;

impl World {
    pub(crate) fn known_namespaces(&self) -> Known {
        self.engine.with(|engine| {
            let shared = engine.inspect().shared_namespaces();
            shared.map(|(digest, kept)| (*digest, kept)).collect()
        })
    }

    fn is_in_use(&self, namespace: usize) -> bool {
        let mut sessions = self.sessions.iter();
        sessions.any(|session| session.namespace == namespace)
    }

    /// A session of a namespace was opened or closed.
    pub(crate) fn note_use(&mut self, namespace: usize) {
        self.history.uses += 1;
        self.models[namespace].used = Some(self.history.uses);
    }

    /// Whether a session may be refused: sessions use all namespaces that the engine has room for.
    pub(crate) fn check_refused(
        &self,
        namespace: usize,
        error: &RegisterError,
    ) -> Result<(), String> {
        if matches!(error, RegisterError::TooMany { .. }) && self.may_be_refused(namespace) {
            return Ok(());
        }
        if let RegisterError::ShareTooLarge { asked, .. } = *error {
            let shares = self.sessions.iter().map(|of| u32::from(of.tenant_share));
            let shares: Vec<u32> = shares.filter(|&share| share > 0).collect();
            let wanted = shares.iter().sum::<u32>() + u32::from(asked);
            let is_whole = wanted > u32::from(TENANT_SHARE_WHOLE);
            if is_whole || shares.len() >= usize::from(TENANTS_MAX) {
                return Ok(());
            }
        }
        Err(format!("a session of {namespace} is refused: {error}"))
    }

    /// Whether sessions use all namespaces that the engine has room for, and not this one.
    pub(crate) fn may_be_refused(&self, namespace: usize) -> bool {
        let used = (0..self.models.len())
            .filter(|&other| !self.models[other].private && self.is_in_use(other))
            .count();
        used >= self.settings.engine.namespaces_max && !self.is_in_use(namespace)
    }

    /// A session of `opened` was opened: any namespace that the engine has forgotten for it must have been in the way.
    pub(crate) fn check_forgotten(&mut self, opened: usize, before: &Known) -> Result<(), String> {
        let after = self.known_namespaces();
        let config = &self.settings.engine;
        let is_index_full =
            before.len() >= config.namespaces_max && !before.contains_key(&self.digest(opened));
        // Namespaces that were reset get their entries back. Tables of several directories may hold different
        // namespaces.
        let may_be_full =
            before.len() >= config.namespace_entries_max || self.disks.devices.len() > 1;
        for namespace in 0..self.models.len() {
            let (model, digest) = (&self.models[namespace], self.digest(namespace));
            if model.private || !before.contains_key(&digest) || after.contains_key(&digest) {
                continue;
            }
            self.note(|| format!("namespace {namespace} makes room for {opened}"));
            if !(is_index_full || may_be_full) || self.is_in_use(namespace) || namespace == opened {
                return Err(format!(
                    "namespace {namespace} was forgotten for {opened}; known before: {before:?}"
                ));
            }
            self.check_order(namespace, opened, &after)?;
            self.log.stats.forgotten += 1;
            self.forget(namespace);
        }
        Ok(())
    }

    /// No namespace is forgotten before one that was used less recently, unless it has no blocks.
    fn check_order(&self, forgotten: usize, opened: usize, after: &Known) -> Result<(), String> {
        let model = &self.models[forgotten];
        let exact = self.settings.roomy && !self.history.roomy_broken && !model.stored.is_empty();
        let Some(used) = model.used.filter(|_| exact) else {
            return Ok(());
        };
        for (other, of_other) in self.models.iter().enumerate() {
            // A namespace in all tables, and in memory, would have made the same room.
            let candidate = after.get(&self.digest(other)) == Some(&true) && !of_other.private;
            let older = of_other.used.is_some_and(|at| at < used);
            if candidate && older && other != opened && !self.is_in_use(other) {
                return Err(format!(
                    "namespace {forgotten} was forgotten and {other}, used before it, was not"
                ));
            }
        }
        Ok(())
    }

    /// An engine has started: it knows the namespaces that were in all tables at an orderly stop.
    pub(crate) fn check_remembered(&mut self) -> Result<(), String> {
        let known = self.known_namespaces();
        let before = std::mem::take(&mut self.history.kept_namespaces);
        for namespace in 0..self.models.len() {
            self.models[namespace].used = None;
            let digest = self.digest(namespace);
            if known.contains_key(&digest) {
                continue;
            }
            if before.contains(&digest) {
                return Err(format!(
                    "namespace {namespace} was in the tables, and is not known after a restart"
                ));
            }
            self.forget(namespace);
        }
        Ok(())
    }

    /// An engine stops in good order.
    pub(crate) fn note_kept(&mut self) {
        let known = self.known_namespaces();
        if self.settings.faults.is_none() && !self.disks.attached.is_empty() {
            let kept = known.iter().filter(|(_, kept)| **kept);
            self.history.kept_namespaces = kept.map(|(digest, _)| *digest).collect();
        }
        if known.values().any(|kept| !kept) {
            // Payloads of this namespace are on disk, but no restart finds them.
            self.history.left_on_disk = None;
        }
    }

    pub(crate) fn digest(&self, namespace: usize) -> NamespaceDigest {
        self.models[namespace].spec.digest()
    }

    pub(crate) fn forget(&mut self, namespace: usize) {
        self.models[namespace].stored.clear();
        self.models[namespace].losses += 1;
        // A session that has parted with it may be saving there still: saves that end after this are kept nowhere.
        for save in self.sessions.iter_mut().flat_map(|of| &mut of.saves) {
            let mut blocks = save.blocks.iter();
            save.lost |= blocks.any(|block| block.payload.namespace == namespace);
        }
    }
}

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
