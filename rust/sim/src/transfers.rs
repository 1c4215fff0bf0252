//! The workers' copies between device and arena, which take time.

use undercroft_contract::key::HashSource;
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{
    Extent, GiveUp, Load, Offer, Save as SaveAnswer, SaveEnd, SaveRefusal, SaveRequest,
    SessionToken, Sources, Tokens, TransferEnd, TransferId,
};
use undercroft_engine::{SaveLimit, SaveProgress};

use crate::arena::Hand;
use crate::content::{SECTOR, SavedPayload};
use crate::model::{HASH_BLOCK, needs};
use crate::participants::{ClientBlock, ClientHit, ClientLoad, ClientSave};
use crate::world::World;

/// A save with slots.
type Granted = Option<(TransferId, Vec<ClientBlock>)>;

/// The blocks on a device.
struct OnDevice {
    /// No blocks but `offers`.
    only: bool,
    offers: Vec<Offer>,
}

impl OnDevice {
    fn has(&self, group: u8, block: u32) -> bool {
        let mut of_group = self.offers.iter().filter(|offer| offer.group == group);
        of_group.any(|offer| (offer.first_block..offer.end_block).contains(&block))
    }

    fn request<'a>(
        &'a self,
        name: &'a str,
        hashes: &'a dyn HashSource,
        tokens: u32,
    ) -> SaveRequest<'a> {
        let request = SaveRequest::new(name, hashes, Tokens(tokens)).offers(&self.offers);
        request.only_offers(self.only)
    }
}

impl World {
    /// Begins a load. `promised`: whether an answer has just promised it.
    pub(crate) fn begin_load(
        &mut self,
        session: usize,
        request: usize,
        local: u32,
        external: u32,
        promised: bool,
    ) -> Result<(), String> {
        let state = &self.sessions[session];
        let name = state.requests[request].name.clone();
        let promise = state.requests[request].promise.clone();
        let told = state.requests[request].ready.map(|hit| hit.epoch);
        let (from, external_tokens) = (Tokens(local), Tokens(external));
        let whole = |hit: ClientHit| hit.tokens == local + external && hit.local <= local;
        let is_whole = state.requests[request].ready.is_some_and(whole);
        let transfer = if is_whole && self.random.chance(500) {
            self.begin_known_load(session, &name, from, external_tokens)
        } else {
            state.session.begin_load(&name, from, external_tokens)
        };
        let promised = promised || promise.is_some();
        let got = transfer.is_some();
        self.note(|| format!("load of {name}, {external} tokens after {local}: {got}"));
        let state = &mut self.sessions[session].requests[request];
        (state.ready, state.promise) = (None, None);
        let Some(transfer) = transfer else {
            if promised {
                return Err(format!(
                    "{name}: {external} tokens after {local} were promised and cannot be loaded"
                ));
            }
            return Ok(());
        };
        let epoch = match told {
            Some(epoch) => epoch,
            None => self.found_weights(session, request, &transfer.extents)?,
        };
        let blocks = self.blocks(session, request, &transfer.extents, epoch)?;
        if promise.is_some_and(|promise| !blocks.iter().all(|block| promise.contains(block))) {
            return Err(format!("{name}: other slots than it was told"));
        }
        self.check_needed(session, request, (local, external), &blocks)?;
        for block in &blocks {
            let bytes = self.payload_bytes(&block.payload);
            self.arena.take(block.offset, bytes, Hand::Read, "a load")?;
        }
        self.sessions[session].loads.push(ClientLoad {
            id: transfer.id,
            request: name,
            blocks,
            copied: 0,
            outlived: false,
        });
        Ok(())
    }

    /// Whether a load gets exactly the blocks that the kinds of its groups need.
    fn check_needed(
        &self,
        session: usize,
        request: usize,
        (local, external): (u32, u32),
        blocks: &[ClientBlock],
    ) -> Result<(), String> {
        let name = &self.sessions[session].requests[request].name;
        let spec = &self.models[self.sessions[session].namespace].spec;
        let end = local + external;
        let needed = needs(spec, local / HASH_BLOCK, end / HASH_BLOCK);
        let Some(needed) = needed.filter(|_| end.is_multiple_of(HASH_BLOCK)) else {
            return Err(format!(
                "{name}: a load that ends at {end} tokens, within a block"
            ));
        };
        let keys = &self.sessions[session].requests[request].keys;
        let mut needed: Vec<_> = needed
            .into_iter()
            .map(|(group, depth)| (group, keys[depth as usize - 1]))
            .collect();
        let mut given: Vec<_> = blocks
            .iter()
            .map(|block| (block.payload.group, block.payload.key))
            .collect();
        needed.sort_unstable();
        given.sort_unstable();
        if needed != given {
            return Err(format!(
                "{name}: a load of {external} tokens after {local} gets other blocks than it needs: {given:?}"
            ));
        }
        Ok(())
    }

    /// Begins a load like a server does for a hit whose extents the client has.
    fn begin_known_load(
        &self,
        session: usize,
        name: &str,
        computed: Tokens,
        external: Tokens,
    ) -> Option<Load> {
        let id = self.sessions[session].id;
        self.engine.with(|engine| {
            let extents = engine.inspect().hit_extents(id, name, computed);
            let id = engine.begin_known_load(id, name, computed, external)?;
            Some(Load {
                id,
                session: SessionToken::default(),
                extents,
                sources: Sources::default(),
            })
        })
    }

    pub(crate) fn save(&mut self, session: usize, request: usize) -> Result<(), String> {
        let state = &self.sessions[session];
        let of = &state.requests[request];
        let more = self.random.range(1, u64::from(of.tokens)) as u32;
        let tokens = if self.random.chance(500) {
            of.tokens
        } else {
            of.tokens.min(of.saved_tokens + more)
        };
        let held = self.on_device(session, tokens);
        let namespace = self.sessions[session].namespace;
        let losses = self.models[namespace].losses;
        // A change of the weights between two steps does not change the blocks on the device.
        let weights = (namespace, self.epoch(session));
        let (blocks, end) = if self.random.chance(500) {
            self.save_by_steps(session, request, (tokens, &held), weights)?
        } else {
            self.save_at_once(session, request, (tokens, &held), weights)?
        };
        let count = blocks.as_ref().map(|(_, blocks)| blocks.len());
        let name = self.sessions[session].requests[request].name.clone();
        self.note(|| format!("save {tokens} tokens of {name}: {count:?} blocks, {end:?}"));
        self.sessions[session].requests[request].saved_tokens = tokens;
        self.check_lacks((session, request), weights, (tokens, &held), &end)?;
        let Some((id, blocks)) = blocks else {
            return Ok(());
        };
        for block in &blocks {
            self.check_saved(session, request, (tokens, &held), &end, block)?;
        }
        self.sessions[session].saves.push(ClientSave {
            id,
            blocks,
            filled: 0,
            // Another session's reset between two steps.
            lost: self.models[namespace].losses > losses,
        });
        Ok(())
    }

    /// Saves in one entry, like a client of an engine in its own process.
    fn save_at_once(
        &mut self,
        session: usize,
        request: usize,
        (tokens, held): (u32, &OnDevice),
        weights: (usize, u64),
    ) -> Result<(Granted, SaveEnd), String> {
        let state = &self.sessions[session];
        let of = &state.requests[request];
        let save = held.request(&of.name, &of.hashes, tokens);
        let answer = state.session.begin_save(&save);
        let SaveAnswer::Granted(grant) = answer else {
            return Err(format!("{}: a save is answered {answer:?}", of.name));
        };
        if grant.extents.is_empty() {
            return Ok((None, grant.end));
        }
        let blocks = self.take_slots(session, request, &grant.extents, weights)?;
        Ok((Some((grant.id, blocks)), grant.end))
    }

    /// Saves in steps, like a server: others enter the engine between two steps.
    fn save_by_steps(
        &mut self,
        session: usize,
        request: usize,
        (tokens, held): (u32, &OnDevice),
        weights: (usize, u64),
    ) -> Result<(Granted, SaveEnd), String> {
        let state = &self.sessions[session];
        let of = &state.requests[request];
        let (name, hashes, id) = (of.name.clone(), of.hashes.clone(), state.id);
        let save = held.request(&name, &hashes, tokens);
        let transfer = self.engine.with(|engine| engine.start_save(id, &save));
        let Some(transfer) = transfer else {
            let drains = self.engine.with(|engine| engine.drained().draining);
            let nothing = (None, SaveEnd::default());
            return drains
                .then_some(nothing)
                .ok_or(format!("{name}: no session"));
        };
        let mut all = Vec::new();
        loop {
            let limit = SaveLimit {
                blocks: self.random.range(1, 4) as u32,
                bytes: u64::MAX,
            };
            let step = self
                .engine
                .with(|engine| engine.step_save(transfer, &save, limit));
            let (extents, ended) = match step {
                SaveProgress::More(extents) => (extents, None),
                SaveProgress::Ended { extents, end } => (extents, Some(end)),
            };
            all.extend(self.take_slots(session, request, &extents, weights)?);
            if let Some(end) = ended {
                return Ok(((!all.is_empty()).then_some((transfer, all)), end));
            }
            self.engine.with(|engine| engine.inspect().check())?;
            if self.random.chance(300) {
                self.saving.push(session);
                self.others_step()?;
                self.saving.pop();
            }
        }
    }

    /// Something that happens between two steps of a session's save. The session itself may be reset, too.
    fn others_step(&mut self) -> Result<(), String> {
        let other = self.random.index(self.sessions.len());
        let is_free = !self.saving.contains(&other);
        match self.random.below(10) {
            0..=2 => self.start_io(),
            3..=5 => self.end_io(),
            6 if self.random.chance(200) && !self.settings.fetches_gaps => self.reset(other),
            6 if self.random.chance(200) => self.change_weights(other),
            7 if is_free => self.transfer_step(other),
            8.. if is_free => self.request_step(other),
            _ => Ok(()),
        }
    }

    /// The blocks of the extents that a save fills. Writes wrong bytes into their slots first.
    fn take_slots(
        &mut self,
        session: usize,
        request: usize,
        extents: &[Extent],
        weights: (usize, u64),
    ) -> Result<Vec<ClientBlock>, String> {
        let blocks = self.blocks_of(session, request, extents, weights)?;
        for block in &blocks {
            let bytes = self.payload_bytes(&block.payload);
            self.arena
                .take(block.offset, bytes, Hand::Write, "a save")?;
            for token in self.arena.at_mut(block.offset, bytes) {
                *token = self.random.next();
            }
        }
        Ok(blocks)
    }

    /// Checks that the device holds a block that a save wants, and that the block is not stored yet.
    fn check_saved(
        &self,
        session: usize,
        request: usize,
        (tokens, held): (u32, &OnDevice),
        end: &SaveEnd,
        block: &ClientBlock,
    ) -> Result<(), String> {
        let state = &self.sessions[session];
        let name = &state.requests[request].name;
        let model = &self.models[block.payload.namespace];
        let group = usize::from(block.payload.group);
        let depth = self.sessions[session].requests[request]
            .keys
            .iter()
            .position(|&key| key == block.payload.key)
            .map_or(0, |at| at as u32 + 1);
        let hash_blocks = model.spec.hash_blocks(group);
        let full = model.spec.groups[group].kind == GroupKind::Full;
        let is_held = full && !held.only || held.has(block.payload.group, depth / hash_blocks - 1);
        if !is_held || depth * HASH_BLOCK > tokens {
            return Err(format!(
                "{name}: asked to save a block that the device does not have"
            ));
        }
        // A save that was overtaken by a reset does not say where it ends.
        if full && end.tokens > Tokens(0) && depth * HASH_BLOCK > end.tokens.0 {
            return Err(format!(
                "{name}: a block behind the end of its save, {end:?}"
            ));
        }
        if model.stored.contains(&block.payload)
            && self.settings.roomy
            && !self.history.roomy_broken
        {
            return Err(format!("{name}: {:?} is saved twice", block.payload));
        }
        Ok(())
    }

    /// Checks that a save lacks only blocks that its client does not hold and that are not stored.
    fn check_lacks(
        &self,
        (session, request): (usize, usize),
        (namespace, epoch): (usize, u64),
        (tokens, held): (u32, &OnDevice),
        end: &SaveEnd,
    ) -> Result<(), String> {
        let of = &self.sessions[session].requests[request];
        let model = &self.models[namespace];
        let is_said = end.lacks.is_empty() || end.refused.is_some();
        let is_named = end.refused != Some(SaveRefusal::PrefixGone) || !end.lacks.is_empty();
        if !is_said || !is_named || !held.only && !end.lacks.is_empty() || end.tokens.0 > tokens {
            return Err(format!("{}: a save ends at {end:?}", of.name));
        }
        for lack in &end.lacks {
            let hash_blocks = model.spec.hash_blocks(usize::from(lack.group));
            for block in lack.first_block..lack.end_block {
                let depth = (block + 1) * hash_blocks;
                let payload = SavedPayload {
                    namespace,
                    epoch,
                    key: of.keys[depth as usize - 1],
                    group: lack.group,
                };
                let is_stored = model.stored.contains(&payload)
                    && self.settings.roomy
                    && !self.history.roomy_broken;
                let is_behind = depth * HASH_BLOCK > tokens || depth * HASH_BLOCK <= end.tokens.0;
                if held.has(lack.group, block) || is_behind || is_stored {
                    return Err(format!("{}: a save lacks {payload:?}: {end:?}", of.name));
                }
            }
        }
        Ok(())
    }

    /// The blocks on the device: all blocks of full attention, or some of them, and some blocks of other groups.
    fn on_device(&mut self, session: usize, tokens: u32) -> OnDevice {
        let only = self.random.chance(250);
        let offers = self.offers(session, tokens, only);
        OnDevice { only, offers }
    }

    /// Some blocks of groups without full attention, or of all groups.
    fn offers(&mut self, session: usize, tokens: u32, all: bool) -> Vec<Offer> {
        let spec = &self.models[self.sessions[session].namespace].spec;
        let mut offers = Vec::new();
        for (group, of) in (0u8..).zip(&spec.groups) {
            let blocks = u64::from(tokens / of.block_tokens.max(1));
            if of.kind == GroupKind::Full && !all || blocks == 0 {
                continue;
            }
            for _ in 0..self.random.below(4) {
                let begins = of.kind == GroupKind::Full && self.random.chance(500);
                let first = match begins {
                    true => 0,
                    false => self.random.below(blocks) as u32,
                };
                let count = self.random.range(1, 8) as u32;
                offers.push(Offer {
                    group,
                    first_block: first,
                    end_block: first + count,
                });
            }
        }
        offers
    }

    /// The weights of a load without an answer to its client: those of a lookup of the request, or the present ones.
    fn found_weights(
        &self,
        session: usize,
        request: usize,
        extents: &[Extent],
    ) -> Result<u64, String> {
        for &epoch in &self.sessions[session].requests[request].looked {
            let blocks = self.blocks(session, request, extents, epoch)?;
            let is_there = |block: &ClientBlock| {
                let bytes = self.payload_bytes(&block.payload);
                let mut sectors = self.arena.at(block.offset, bytes).iter().enumerate();
                sectors.any(|(index, &found)| found == block.payload.sector(index))
            };
            if blocks.iter().any(is_there) {
                return Ok(epoch);
            }
        }
        Ok(self.epoch(session))
    }

    /// The weights of a session's namespace.
    pub(crate) fn epoch(&self, session: usize) -> u64 {
        self.models[self.sessions[session].namespace].epoch
    }

    /// The blocks of extents in a session's namespace, with the weights of `epoch`.
    pub(crate) fn blocks(
        &self,
        session: usize,
        request: usize,
        extents: &[Extent],
        epoch: u64,
    ) -> Result<Vec<ClientBlock>, String> {
        let namespace = self.sessions[session].namespace;
        self.blocks_of(session, request, extents, (namespace, epoch))
    }

    /// The blocks of extents in any namespace.
    fn blocks_of(
        &self,
        session: usize,
        request: usize,
        extents: &[Extent],
        (namespace, epoch): (usize, u64),
    ) -> Result<Vec<ClientBlock>, String> {
        let request = &self.sessions[session].requests[request];
        let model = &self.models[namespace];
        let mut blocks = Vec::new();
        for extent in extents {
            let hash_blocks = model.spec.hash_blocks(usize::from(extent.group)) as usize;
            for (block, &offset) in (extent.first_block as usize..).zip(&extent.offsets) {
                let Some(offset) = offset.get() else {
                    continue;
                };
                let Some(&key) = request.keys.get((block + 1) * hash_blocks - 1) else {
                    return Err(format!(
                        "{}: block {block} is beyond the prompt",
                        request.name
                    ));
                };
                let payload = SavedPayload {
                    namespace,
                    epoch,
                    key,
                    group: extent.group,
                };
                blocks.push(ClientBlock { payload, offset });
            }
        }
        Ok(blocks)
    }

    fn payload_bytes(&self, payload: &SavedPayload) -> u64 {
        let spec = &self.models[payload.namespace].spec;
        u64::from(spec.groups[usize::from(payload.group)].payload_bytes)
    }

    /// Continues some transfer of a session.
    pub(crate) fn transfer_step(&mut self, session: usize) -> Result<(), String> {
        let state = &self.sessions[session];
        let (loads, saves) = (state.loads.len(), state.saves.len());
        if loads + saves == 0 {
            return Ok(());
        }
        let at = self.random.index(loads + saves);
        if at < loads {
            self.load_step(session, at)
        } else {
            self.save_step(session, at - loads)
        }
    }

    fn load_step(&mut self, session: usize, at: usize) -> Result<(), String> {
        let left =
            self.sessions[session].loads[at].blocks.len() - self.sessions[session].loads[at].copied;
        let end = match self.drawn_end(GiveUp::Reset) {
            // The engine may know another request of this name: whether its lookups are misses then is not said.
            TransferEnd::Failed if self.sessions[session].loads[at].outlived => TransferEnd::Done,
            end => end,
        };
        if left > 0 && end == TransferEnd::Done {
            return self.copy(session, at, left);
        }
        self.end_load(session, at, end)
    }

    /// Copies some of the remaining blocks, and compares them.
    fn copy(&mut self, session: usize, at: usize, left: usize) -> Result<(), String> {
        let count = self.random.index(left) + 1;
        let load = &self.sessions[session].loads[at];
        let blocks = load.blocks[load.copied..load.copied + count].to_vec();
        let name = load.request.clone();
        for ClientBlock { payload, offset } in blocks {
            let bytes = self.payload_bytes(&payload);
            for (index, &found) in self.arena.at(offset, bytes).iter().enumerate() {
                if found != payload.sector(index) {
                    let changed = self.arena.has_changed(offset + index as u64 * SECTOR);
                    if changed && !self.settings.engine.verify_host {
                        self.log.stats.changes_loaded += 1;
                        break;
                    }
                    return Err(format!(
                        "WRONG BYTES for {name}: sector {index} of {payload:?} at {offset}"
                    ));
                }
            }
            self.log.stats.blocks_checked += 1;
        }
        self.sessions[session].loads[at].copied += count;
        Ok(())
    }

    fn save_step(&mut self, session: usize, at: usize) -> Result<(), String> {
        let save = &self.sessions[session].saves[at];
        let left = save.blocks.len() - save.filled;
        // Blocks below a save that is dropped are dropped, too.
        let end = match self.settings.roomy {
            true => TransferEnd::Done,
            false => {
                let reason = self
                    .random
                    .pick(&[GiveUp::Reset, GiveUp::Weights, GiveUp::Retry]);
                self.drawn_end(reason)
            }
        };
        let save = &mut self.sessions[session].saves[at];
        if left > 0 && end == TransferEnd::Done {
            let count = self.random.index(left) + 1;
            let blocks = save.blocks[save.filled..save.filled + count].to_vec();
            save.filled += count;
            for ClientBlock { payload, offset } in blocks {
                let bytes = self.payload_bytes(&payload);
                for (index, token) in self.arena.at_mut(offset, bytes).iter_mut().enumerate() {
                    *token = payload.sector(index);
                }
            }
            return Ok(());
        }
        self.end_save(session, at, end)
    }

    pub(crate) fn let_go_of_load(&mut self, load: &ClientLoad) {
        for block in &load.blocks {
            let bytes = self.payload_bytes(&block.payload);
            self.arena.release(block.offset, bytes, Hand::Read);
        }
    }

    pub(crate) fn let_go_of_save(&mut self, save: &ClientSave) {
        for block in &save.blocks {
            let bytes = self.payload_bytes(&block.payload);
            self.arena.release(block.offset, bytes, Hand::Write);
        }
    }
}
