//! Clients: they use the engine like a scheduler, in any order that a scheduler may use.

use std::collections::HashMap;
use std::sync::Arc;

use undercroft_contract::explain::{ExplainQuery, Reason};
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{
    Extent, LookupRequest, Priority, PromotionWait, SessionSpec, Step, Tokens, append_extents,
};
use undercroft_driver::EmbeddedSession;
use undercroft_engine::SessionId;

use crate::content::hash_of;
use crate::model::HASH_BLOCK;
use crate::participants::{ClientHit, ClientRequest, RouterIndex, SimClient};
use crate::settings::DEPARTURES;
use crate::world::World;

/// Promotions that one lookup may start.
const PROMOTIONS_MAX: u32 = 3;

impl World {
    pub(crate) fn open_session(&mut self) -> Result<(), String> {
        let shared = self.models.iter().filter(|model| !model.private).count();
        let namespace = self.random.index(shared);
        let spec = self.models[namespace].spec.clone();
        let served = self.random.chance(300);
        let tenant_share = self.models[namespace].tenant_share;
        let spec = SessionSpec {
            tenant_share,
            leases_prefetches: served,
            ..SessionSpec::from(spec)
        };
        let before = self.known_namespaces();
        let opened = match EmbeddedSession::open(Arc::clone(&self.engine), spec) {
            Ok(opened) => opened,
            Err(error) => return self.check_refused(namespace, &error),
        };
        self.note(|| format!("open session on namespace {namespace}"));
        self.check_forgotten(namespace, &before)?;
        self.note_use(namespace);
        self.sessions.push(SimClient {
            id: opened.id(),
            session: Box::new(opened),
            namespace,
            tenant_share,
            served,
            requests: Vec::new(),
            loads: Vec::new(),
            saves: Vec::new(),
            router: RouterIndex::default(),
            waits: HashMap::new(),
        });
        self.settle(self.sessions.len() - 1)
    }

    /// A client does something.
    pub(crate) fn client_step(&mut self) -> Result<(), String> {
        let churn = if self.settings.crowded { 60 } else { 10 };
        if self.sessions.is_empty() || self.sessions.len() < 5 && self.random.chance(churn) {
            return self.open_session();
        }
        let session = self.random.index(self.sessions.len());
        if self.settings.crowded && self.random.chance(40) {
            return self.close_session(session);
        }
        // Events that are no steps of the client.
        match self.random.below(200) {
            0..=4 => self.take_events(session)?,
            5 => self.check_routers()?,
            6..=11 if self.settings.hints => self.hint(session),
            12..=17 if self.settings.hints => self.check_pins()?,
            18 => self.explain()?,
            19 if self.settings.operated => self.operate()?,
            _ => {}
        }
        match self.random.below(1000) {
            0..=3 => self.close_session(session),
            // A session that was reset gets nothing from the remote store.
            4..=8 if self.settings.fetches_gaps => self.request_step(session),
            4..=7 => self.reset(session),
            8 => self.change_weights(session),
            9..=29 => self.repeat_acknowledgement(),
            30..=399 => self.transfer_step(session),
            _ => self.request_step(session),
        }
    }

    pub(crate) fn request_step(&mut self, session: usize) -> Result<(), String> {
        let count = self.sessions[session].requests.len();
        if count == 0 || count < 6 && self.random.chance(200) {
            self.new_request(session);
            return Ok(());
        }
        let request = self.random.index(count);
        match self.random.below(100) {
            0..=14 => self.submit(session, request),
            15..=54 => self.poll(session, request)?,
            55..=69 => self.load(session, request)?,
            70..=91 => self.save(session, request)?,
            _ => self.discard(session, request),
        }
        Ok(())
    }

    fn new_request(&mut self, session: usize) {
        let namespace = self.sessions[session].namespace;
        let keys = self.prompts.draw(&mut self.random);
        let len = self.models[namespace].hash_bytes;
        let hashes: Vec<BlockHash> = keys.iter().filter_map(|&key| hash_of(key, len)).collect();
        let rest = self.random.below(u64::from(HASH_BLOCK)) as u32;
        self.history.names += 1;
        let mut request = ClientRequest {
            name: format!("r{}", self.history.names),
            tokens: keys.len() as u32 * HASH_BLOCK + rest,
            keys,
            hashes,
            asked_ns: None,
            promotions: 0,
            ready: None,
            promise: None,
            looked: Vec::new(),
            min: Tokens(0),
            saved_tokens: 0,
            failed: false,
        };
        if self.random.chance(50) {
            request.min = Tokens(self.random.below(u64::from(request.tokens) + 40) as u32);
        }
        self.note(|| {
            format!(
                "new request {} of {} hash_blocks in namespace {namespace}",
                request.name,
                request.keys.len()
            )
        });
        self.sessions[session].requests.push(request);
        if self.random.chance(500) {
            let last = self.sessions[session].requests.len() - 1;
            self.submit(session, last);
        }
    }

    /// The tokens that the device holds now, and the deepest boundary that the request can use now.
    pub(crate) fn limits(&mut self, session: usize, request: usize) -> (u32, u32) {
        let tokens = self.sessions[session].requests[request].tokens;
        let most = match self.random.below(10) {
            0 => self.random.below(u64::from(tokens) + 40) as u32,
            1 => tokens,
            _ => tokens - 1,
        };
        let local = match self.random.below(10) {
            0 => self.random.below(u64::from(tokens)) as u32,
            1..=3 => self.random.below(u64::from(tokens / HASH_BLOCK)) as u32 * HASH_BLOCK,
            _ => 0,
        };
        (local, most)
    }

    fn submit(&mut self, session: usize, request: usize) {
        let (local, most) = self.limits(session, request);
        self.note_weights(session, request);
        let session = &mut self.sessions[session];
        let request = &mut session.requests[request];
        // Another lookup voids the answer of the last one.
        (request.ready, request.promise) = (None, None);
        request.promotions += 1;
        let question = LookupRequest::new(&request.name, &request.hashes)
            .computed(Tokens(local))
            .max(Tokens(most))
            .min(request.min);
        session.session.lookup(&question.prefetch());
        let name = request.name.clone();
        self.note(|| format!("prefetch {name} local {local} most {most}"));
    }

    /// A lookup may find the blocks that were saved under the namespace's present weights.
    pub(crate) fn note_weights(&mut self, session: usize, request: usize) {
        let epoch = self.epoch(session);
        let looked = &mut self.sessions[session].requests[request].looked;
        if !looked.contains(&epoch) {
            looked.push(epoch);
        }
    }

    /// A server asks ahead of the scheduler.
    fn peek(&mut self, session: usize, request: usize) -> Result<(), String> {
        let (local, most) = self.limits(session, request);
        self.note_weights(session, request);
        let of = &mut self.sessions[session];
        let state = &mut of.requests[request];
        let (name, hashes) = (state.name.clone(), &state.hashes);
        let question = LookupRequest::new(&name, hashes)
            .computed(Tokens(local))
            .max(Tokens(most))
            .min(state.min);
        let answer = of.session.lookup(&question.prefetch());
        (state.ready, state.promise) = (None, None);
        self.note(|| format!("prefetch {name} local {local} most {most}: {answer:?}"));
        match answer.tokens() {
            None => {
                self.sessions[session].requests[request].promotions += 1;
                Ok(())
            }
            Some(Tokens(tokens)) => self.answered(session, request, local, most, tokens),
        }
    }

    pub(crate) fn poll(&mut self, session: usize, request: usize) -> Result<(), String> {
        let of = &self.sessions[session];
        if of.served && of.requests[request].asked_ns.is_none() && self.random.chance(500) {
            return self.peek(session, request);
        }
        let limits = self.limits(session, request);
        self.ask(session, request, limits)
    }

    /// The scheduler asks.
    pub(crate) fn ask(
        &mut self,
        session: usize,
        request: usize,
        (local, most): (u32, u32),
    ) -> Result<(), String> {
        self.note_weights(session, request);
        let now_ns = self.clock.now_ns;
        let is_planned = self.settings.engine.promotion_wait == PromotionWait::Planned;
        if is_planned && self.random.chance(200) {
            let tokens = self.random.below(600) as u32;
            let step = Step {
                tokens,
                positions: u64::from(tokens) * self.random.below(5000),
                decodes: self.random.below(50) as u32,
                duration_ns: self.random.below(400_000_000),
            };
            self.sessions[session].session.report_steps(&[step]);
        }
        let queued = if is_planned {
            self.random.below(4000)
        } else {
            0
        };
        let of = &mut self.sessions[session];
        for ended in of.session.ended_waits() {
            of.waits.remove(&*ended);
        }
        let id = of.id;
        let state = &mut of.requests[request];
        let is_new = state.asked_ns.is_none();
        let asked_ns = *state.asked_ns.get_or_insert(now_ns);
        let question = LookupRequest::new(&state.name, &state.hashes)
            .computed(Tokens(local))
            .queued(Tokens(queued as u32))
            .max(Tokens(most))
            .min(state.min);
        let name = &state.name;
        let pending = self
            .engine
            .with(|engine| engine.still_pending(id, name, Tokens(local), Priority::Demand));
        // The session does not enter the engine for a pending answer.
        let entered = pending.map(|_| self.engine.with(|engine| engine.lookup(id, &question)));
        let answer = of.session.lookup(&question);
        let name = state.name.clone();
        let awaits_objects = self
            .engine
            .with(|engine| engine.inspect().awaits_objects(id, &name));
        if let (Some(pending), Some(entered)) = (pending, entered) {
            // A lookup that waits for the remote store reads the index again, and so finds blocks that others have
            // saved since. This does not change whether it is pending.
            let is_expected = awaits_objects && pending.is_pending() && answer.is_pending();
            if entered != answer || pending != answer && !is_expected {
                return Err(format!(
                    "{name} was said to be {pending:?}, and is answered {entered:?}, then {answer:?}"
                ));
            }
        }
        self.note(|| format!("lookup {name} local {local} most {most}: {answer:?}"));
        let waits = &mut self.sessions[session].waits;
        let has_waited = waits.remove(&name) == Some(local);
        if answer.is_pending() {
            waits.insert(name.clone(), local);
        } else if has_waited {
            return Err(format!("the end of the wait of {name} was not told"));
        }
        let state = &mut self.sessions[session].requests[request];
        // The tiers do not have the length of a chain in the remote store.
        if answer.is_pending() && answer.shared() < state.min && !awaits_objects {
            return Err(format!("{name} waits for a hit that is too short"));
        }
        match answer.tokens() {
            None => {
                (state.ready, state.promise) = (None, None);
                state.promotions += u32::from(is_new);
                let config = &self.settings.engine;
                if let PromotionWait::Limit {
                    base_ns,
                    per_1k_tokens_ns,
                } = config.promotion_wait
                {
                    let part = per_1k_tokens_ns * u64::from(state.tokens) / 1000;
                    let most_ns = base_ns + part;
                    if now_ns - asked_ns > most_ns {
                        return Err(format!("{name} waits for longer than {most_ns} ns"));
                    }
                }
                Ok(())
            }
            Some(Tokens(tokens)) => {
                state.asked_ns = None;
                self.check_explained(session, request, tokens)?;
                self.answered(session, request, local, most, tokens)?;
                self.sessions[session].requests[request].promotions = 0;
                Ok(())
            }
        }
    }

    fn answered(
        &mut self,
        session: usize,
        request: usize,
        local: u32,
        most: u32,
        tokens: u32,
    ) -> Result<(), String> {
        let namespace = self.sessions[session].namespace;
        let model = &self.models[namespace];
        let state = &mut self.sessions[session].requests[request];
        let name = state.name.clone();
        (state.ready, state.promise) = (None, None);
        // Blocks that the planner does not load are a miss.
        let min_load = self.settings.engine.min_load_tokens.unwrap_or(1);
        if self.settings.roomy && !self.history.roomy_broken && !state.failed {
            let boundary = model.deepest(
                namespace,
                &state.keys,
                local / HASH_BLOCK,
                most / HASH_BLOCK,
            );
            let gain = (boundary * HASH_BLOCK).saturating_sub(local);
            let is_of_use = gain >= min_load && boundary * HASH_BLOCK >= state.min.0;
            let expected = if boundary > local / HASH_BLOCK && is_of_use {
                boundary * HASH_BLOCK
            } else {
                0
            };
            // The engine limits how often the same prompt is promoted or verified. A prompt above the budget is
            // promoted in part.
            let config = &self.settings.engine;
            let is_whole = !config.verify_host && config.promotion_bytes == config.host_bytes;
            let exact = is_whole && state.promotions < PROMOTIONS_MAX || tokens > expected;
            if tokens != expected && exact {
                return Err(format!(
                    "{name}: hit of {tokens} tokens, and {expected} were saved"
                ));
            }
        }
        if tokens == 0 {
            return Ok(());
        }
        let sound = tokens.is_multiple_of(model.spec.alignment_tokens)
            && tokens <= most
            && tokens > local
            && tokens - local >= min_load
            && !state.failed;
        if !sound {
            return Err(format!("{name}: an impossible hit of {tokens} tokens"));
        }
        self.log.stats.hits += 1;
        let epoch = model.epoch;
        state.ready = Some(ClientHit {
            local,
            tokens,
            epoch,
        });
        let id = self.sessions[session].id;
        let mut extents = self
            .engine
            .with(|engine| engine.inspect().hit_extents(id, &name, Tokens(local)));
        extents.sort_by_key(|extent| extent.group);
        let told = self.hit_by_steps(id, &name, local);
        if told != extents {
            return Err(format!(
                "{name}: step by step at {told:?}, at once at {extents:?}"
            ));
        }
        let blocks = self.blocks(session, request, &extents, epoch)?;
        self.sessions[session].requests[request].promise = Some(blocks);
        if self.random.chance(500) {
            // The device may have gained blocks, never lost them.
            let more = self.random.below(u64::from(tokens - local)) as u32;
            let local = if self.random.chance(200) {
                local + more
            } else {
                local
            };
            return self.begin_load(session, request, local, tokens - local, true);
        }
        Ok(())
    }

    /// The extents of a hit, collected in steps like a server's.
    fn hit_by_steps(&mut self, session: SessionId, name: &str, computed: u32) -> Vec<Extent> {
        let mut parts = Vec::new();
        let hit = self
            .engine
            .with(|engine| engine.start_hit_extents(session, name, Tokens(computed)));
        if let Some(mut hit) = hit {
            let nodes = self.random.range(1, 6) as u32;
            while let Some(part) = self
                .engine
                .with(|engine| engine.step_hit_extents(&mut hit, nodes))
            {
                parts.push(part);
            }
        }
        let mut all = Vec::new();
        for part in parts.into_iter().rev() {
            append_extents(&mut all, part);
        }
        all.sort_by_key(|extent| extent.group);
        all
    }

    fn load(&mut self, session: usize, request: usize) -> Result<(), String> {
        let Some(ready) = self.sessions[session].requests[request].ready else {
            if self.random.chance(50) {
                // The request has no promise, or its client ignored it: the engine refuses the
                // load, or loads blocks that a lookup has found.
                let (local, _) = self.limits(session, request);
                let external = self.random.below(300) as u32;
                return self.begin_load(session, request, local, external, false);
            }
            return Ok(());
        };
        let mut external = ready.tokens - ready.local;
        let served = self.sessions[session].served;
        if !served && self.random.chance(100) {
            external = self.random.below(u64::from(external)) as u32;
            // A shorter hit may need other blocks of a window than the whole hit.
            self.sessions[session].requests[request].promise = None;
        }
        self.begin_load(session, request, ready.local, external, false)
    }

    pub(crate) fn discard(&mut self, session: usize, request: usize) {
        let state = &mut self.sessions[session];
        let request = state.requests.swap_remove(request);
        state.waits.remove(&request.name);
        if self.random.chance(300) {
            state.session.end_lookup(&request.name);
        }
        state.session.finish_request(request.name.as_str().into());
        if self.random.chance(100) {
            state.session.finish_request(request.name.as_str().into());
        }
        self.note(|| format!("finish {}", request.name));
    }

    pub(crate) fn close_session(&mut self, session: usize) -> Result<(), String> {
        if self.settings.roomy && !self.sessions[session].saves.is_empty() {
            return Ok(());
        }
        let session = self.sessions.swap_remove(session);
        for load in &session.loads {
            self.let_go_of_load(load);
        }
        for save in &session.saves {
            self.let_go_of_save(save);
        }
        session.session.close();
        self.history.ends.count_closed(&session);
        self.note_use(session.namespace);
        if self.models[session.namespace].private {
            self.models[session.namespace].stored.clear();
        }
        self.note(|| "close a session".to_owned());
        Ok(())
    }
}

/// Checks that the engine's explanations are true: a saved block is never explained as a block that was never seen.
impl World {
    /// Checks the engine's explanation of an answer to a request.
    pub(crate) fn check_explained(
        &mut self,
        session: usize,
        request: usize,
        tokens: u32,
    ) -> Result<(), String> {
        let of = &self.sessions[session];
        let state = &of.requests[request];
        let name = &state.name;
        let told = self
            .engine
            .with(|engine| engine.inspect().explained(of.id, name));
        let Some(told) = told else {
            // Other entries have replaced it.
            let is_short = self.settings.engine.explained_lookups < DEPARTURES;
            let rest = self.engine.with(|engine| engine.rest(of.id, name));
            return match rest {
                Some(_) if is_short => Ok(()),
                _ => Err(format!("{name} was answered, and nothing is said of it")),
            };
        };
        if told.hit_tokens != tokens || &told.request != name || told.found_tokens < tokens {
            return Err(format!(
                "{name}: a hit of {tokens} tokens is told as {told:?}"
            ));
        }
        if told.rest.reason == Reason::LoadFailed && !state.failed {
            return Err(format!("{name}: no load has failed, and {told:?}"));
        }
        let is_new = matches!(told.rest.reason, Reason::NeverSeen | Reason::OtherIdentity);
        let remembers = self.settings.engine.departures >= DEPARTURES && !self.settings.crowded;
        let missing = state.keys.get((told.found_tokens / HASH_BLOCK) as usize);
        let Some(&missing) = missing.filter(|_| is_new && remembers) else {
            return Ok(());
        };
        let key = (of.namespace, self.models[of.namespace].epoch, missing);
        if self.history.saved.contains(&key) {
            return Err(format!(
                "{name}: a block that was saved is missing, and {told:?}"
            ));
        }
        self.log.stats.explained += 1;
        Ok(())
    }

    /// An operator asks for the last lookups.
    pub(crate) fn explain(&mut self) -> Result<(), String> {
        let mut query = ExplainQuery {
            misses: self.history.names.is_multiple_of(2),
            ..ExplainQuery::default()
        };
        let mut last = None;
        loop {
            let (told, before) = self.engine.with(|engine| engine.explain(&query));
            for one in told {
                if last.is_some_and(|last| one.position >= last) {
                    return Err(format!("{one:?} comes after the one at {last:?}"));
                }
                last = Some(one.position);
                let bound = Tokens(one.asked_tokens.max(one.device_tokens));
                if Tokens(one.hit_tokens) > bound {
                    return Err(format!("a hit beyond the question: {one:?}"));
                }
            }
            match before {
                None => return Ok(()),
                before => query.before = before,
            }
        }
    }
}
