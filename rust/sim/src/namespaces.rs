//! Checks which namespaces an engine forgets to make room for others, and when.

use std::collections::HashMap;

use undercroft_core::error::RegisterError;
use undercroft_core::key::NamespaceDigest;

use crate::world::World;

/// The shared namespaces that an engine knows, and whether each is in every directory's table.
pub(crate) type Known = HashMap<NamespaceDigest, bool>;

impl World {
    pub(crate) fn known_namespaces(&self) -> Known {
        self.engine.with(|engine| {
            let shared = engine.shared_namespaces();
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
