//! Routers before the hosts of a fleet: which host gets a request.

use std::collections::HashMap;

use super::recent::RecentSet;

/// A host's load counts the requests of about the last ten seconds: those that it still serves.
const LOAD_NS: f64 = 10e9;
/// A host gets no request for its prefix while its load is above this multiple of the mean, and by more than [`SLACK`].
const IMBALANCE: f64 = 1.5;
const SLACK: f64 = 4.0;
/// A prefix below this part of the prompt is no reason to prefer a host.
const LEAST_PART: f64 = 0.3;

/// How a router chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterKind {
    /// The host that has served the longest prefix of the prompt, unless it has too much to do.
    Prefix,
    /// Any host.
    Random,
    /// The same host for a session.
    Sticky,
}

/// The router's own memory: it knows which blocks it has sent where, not which blocks the hosts have evicted.
#[derive(Debug)]
pub(super) struct Router {
    kind: RouterKind,
    /// For each host, the blocks that were sent there, as many as the host's tiers hold.
    sent: Vec<RecentSet>,
    /// The hosts that each block was sent to.
    hosts_of: HashMap<u64, Vec<u32>>,
    loads: Vec<f64>,
    now_ns: u64,
    drawn: u64,
}

impl Router {
    pub(super) fn new(kind: RouterKind, hosts: usize, blocks_of_host: usize) -> Self {
        Self {
            kind,
            sent: (0..hosts).map(|_| RecentSet::new(blocks_of_host)).collect(),
            hosts_of: HashMap::new(),
            loads: vec![0.0; hosts],
            now_ns: 0,
            drawn: 0,
        }
    }

    /// The host of a request with these blocks, of which the prompt has the first.
    pub(super) fn route(&mut self, session: u64, prompt: &[u64], now_ns: u64) -> usize {
        let hosts = self.loads.len() as u64;
        match self.kind {
            RouterKind::Random => {
                self.drawn += 1;
                (mixed(self.drawn) % hosts) as usize
            }
            RouterKind::Sticky => (mixed(session) % hosts) as usize,
            RouterKind::Prefix => self.by_prefix(prompt, now_ns),
        }
    }

    fn by_prefix(&mut self, prompt: &[u64], now_ns: u64) -> usize {
        let passed_ns = now_ns.saturating_sub(self.now_ns);
        let kept = (-(passed_ns as f64) / LOAD_NS).exp();
        self.now_ns = now_ns;
        self.loads.iter_mut().for_each(|load| *load *= kept);
        let mean = self.loads.iter().sum::<f64>() / self.loads.len() as f64;
        let limit = IMBALANCE * mean + SLACK;
        let least = (prompt.len() as f64 * LEAST_PART).ceil() as usize;
        let host = self
            .with_prefix(prompt, least.max(1), limit)
            .unwrap_or_else(|| self.least_loaded());
        self.loads[host] += 1.0;
        host
    }

    /// The host below the limit with the longest prefix of at least `least` blocks, of several the least loaded.
    fn with_prefix(&self, prompt: &[u64], least: usize, limit: f64) -> Option<usize> {
        let deep = prompt.get(least - 1..)?;
        deep.iter().rev().find_map(|block| {
            let hosts = self.hosts_of.get(block)?.iter().map(|&host| host as usize);
            hosts
                .filter(|&host| self.loads[host] <= limit)
                .min_by(|&a, &b| self.loads[a].total_cmp(&self.loads[b]))
        })
    }

    fn least_loaded(&self) -> usize {
        let hosts = 0..self.loads.len();
        hosts
            .min_by(|&a, &b| self.loads[a].total_cmp(&self.loads[b]))
            .unwrap_or(0)
    }

    /// Notes that a host has the blocks of a request.
    pub(super) fn note(&mut self, host: usize, blocks: &[u64]) {
        if self.kind != RouterKind::Prefix {
            return;
        }
        // From the last to the first: the first blocks of a chain leave last.
        for &block in blocks.iter().rev() {
            let is_new = !self.sent[host].contains(block);
            if let Some(gone) = self.sent[host].add(block)
                && let Some(hosts) = self.hosts_of.get_mut(&gone)
            {
                hosts.retain(|&of| of as usize != host);
                if hosts.is_empty() {
                    self.hosts_of.remove(&gone);
                }
            }
            if is_new {
                self.hosts_of.entry(block).or_default().push(host as u32);
            }
        }
    }
}

/// A number in which each bit of `of` counts.
fn mixed(of: u64) -> u64 {
    let mut mixed = of.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
