//! A cache of prefix blocks reduced to the parts that decide hit rates: residency, leaves and the real policies.

use rustc_hash::FxHashMap;
use undercroft_bench::replay::{Counts, ReplayCache};
use undercroft_engine::policy::{Leaf, Policy, PolicyKind, sampled_depths};

/// All blocks of a trace have one size.
const SIZE_CLASS: usize = 0;

/// Tiers that each hold the blocks offered to them; a block counts as present if any of them has it.
/// Every block that is stored in the upper tier is offered to the lower one at once (write-through).
#[derive(Debug)]
pub(crate) struct ModelCache {
    tick: u64,
    nodes: FxHashMap<u64, u32>,
    chain: Vec<u32>,
    tiers: Vec<Tier>,
}

#[derive(Debug)]
struct Tier {
    capacity: usize,
    used: usize,
    policy: Policy,
    nodes: Vec<Node>,
    counts: Counts,
}

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    fingerprint: u64,
    last: u64,
    parent: Option<u32>,
    children: u32,
    depth: u32,
    hit_class: u8,
    resident: bool,
}

impl ModelCache {
    /// One tier for each capacity, given in blocks, from the upper one down.
    pub(crate) fn new(capacities: &[usize], kind: PolicyKind) -> Self {
        let tiers = capacities
            .iter()
            .map(|&capacity| Tier {
                capacity,
                used: 0,
                policy: Policy::new(kind, capacity),
                nodes: Vec::new(),
                counts: Counts::default(),
            })
            .collect();
        Self {
            tick: 0,
            nodes: FxHashMap::default(),
            chain: Vec::new(),
            tiers,
        }
    }
}

impl ReplayCache for ModelCache {
    fn request(&mut self, blocks: &[u64]) -> usize {
        self.tick += 1;
        self.chain.clear();
        let mut parent = None;
        for (depth, &block) in (1..).zip(blocks) {
            let next = self.nodes.len() as u32;
            let node = *self.nodes.entry(block).or_insert(next);
            if node == next {
                let known = Node {
                    fingerprint: fingerprint(block),
                    parent,
                    depth,
                    ..Node::default()
                };
                self.tiers
                    .iter_mut()
                    .for_each(|tier| tier.nodes.push(known));
            }
            self.chain.push(node);
            parent = Some(node);
        }
        let present = |node: u32| {
            self.tiers
                .iter()
                .any(|tier| tier.nodes[node as usize].resident)
        };
        let hits = self.chain.iter().take_while(|&&node| present(node)).count();
        for tier in &mut self.tiers {
            tier.serve(&self.chain, self.tick);
        }
        hits
    }

    fn counts(&self) -> Vec<Counts> {
        self.tiers.iter().map(|tier| tier.counts).collect()
    }
}

impl Tier {
    /// Touches the resident part of a request's chain and offers the rest, from first to last block.
    fn serve(&mut self, chain: &[u32], tick: u64) {
        let resident = chain
            .iter()
            .take_while(|&&node| self.nodes[node as usize].resident)
            .count();
        let (hit, missing) = chain.split_at(resident);
        self.touch(hit, tick);
        let mut deepest = hit.last().copied();
        let mut refused = false;
        for &node in missing {
            let Node {
                fingerprint, depth, ..
            } = self.nodes[node as usize];
            let hit_class = self.policy.on_offer(fingerprint, tick);
            refused = refused
                || (self.used >= self.capacity && !self.make_room(hit_class, deepest, tick));
            if refused {
                self.policy.on_refuse(fingerprint, depth, hit_class, tick);
            } else {
                self.insert(node, hit_class, deepest, tick);
                deepest = Some(node);
            }
        }
        self.release(deepest);
        self.policy.end_of_request(tick);
    }

    /// Touches the blocks of a hit that count, and keeps the deepest one from eviction until it is released.
    fn touch(&mut self, hit: &[u32], tick: u64) {
        if let Some(&deepest) = hit.last() {
            self.policy.remove_leaf(SIZE_CLASS, self.leaf(deepest));
        }
        let depths = sampled_depths(hit.len() as u32);
        let counted = depths.filter(|&depth| depth < hit.len() as u32);
        for depth in counted.chain((!hit.is_empty()).then_some(hit.len() as u32)) {
            let node = &mut self.nodes[hit[depth as usize - 1] as usize];
            let before = (node.hit_class, node.last);
            node.hit_class = self.policy.on_hit(depth, before.0, before.1, tick);
            node.last = tick;
            self.policy.on_touch(depth, before, (node.hit_class, tick));
        }
    }

    fn insert(&mut self, node: u32, hit_class: u8, parent: Option<u32>, tick: u64) {
        let inserted = &mut self.nodes[node as usize];
        let (fingerprint, depth) = (inserted.fingerprint, inserted.depth);
        self.policy.on_insert(fingerprint, depth, hit_class, tick);
        inserted.resident = true;
        inserted.hit_class = hit_class;
        inserted.last = tick;
        if let Some(parent) = parent {
            self.nodes[parent as usize].children += 1;
        }
        self.used += 1;
        self.counts.inserted += 1;
    }

    fn make_room(&mut self, hit_class: u8, held: Option<u32>, tick: u64) -> bool {
        let Some(victim) = self.policy.victim(SIZE_CLASS, tick) else {
            return false;
        };
        if !self.policy.admit(hit_class, &victim, tick) {
            return false;
        }
        self.policy.remove_leaf(SIZE_CLASS, victim);
        let evicted = &mut self.nodes[victim.node as usize];
        evicted.resident = false;
        let parent = evicted.parent;
        let (fingerprint, depth) = (evicted.fingerprint, evicted.depth);
        self.policy
            .on_evict(fingerprint, depth, victim.hit_class, victim.last);
        self.used -= 1;
        self.counts.evicted += 1;
        if let Some(parent) = parent {
            let above = &mut self.nodes[parent as usize];
            above.children -= 1;
            let before = (above.hit_class, above.last);
            above.hit_class = above.hit_class.max(victim.hit_class);
            above.last = above.last.max(victim.last);
            let after = (above.hit_class, above.last);
            self.policy.on_touch(above.depth, before, after);
            if held != Some(parent) {
                self.release(Some(parent));
            }
        }
        true
    }

    /// Makes a block a candidate for eviction if nothing hangs on it.
    fn release(&mut self, node: Option<u32>) {
        let Some(node) = node else {
            return;
        };
        if self.nodes[node as usize].children == 0 {
            self.policy.insert_leaf(SIZE_CLASS, self.leaf(node));
        }
    }

    fn leaf(&self, node: u32) -> Leaf {
        let Node {
            last, hit_class, ..
        } = self.nodes[node as usize];
        Leaf {
            node,
            last,
            hit_class,
        }
    }
}

/// Spreads block numbers over 64 bits, as digests are.
fn fingerprint(block: u64) -> u64 {
    let mixed = (block ^ (block >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}
