//! Hit rates of the engine's policies beside others, on traces: `make policy-table`.
//!
//! `leafhd` is the engine itself, and its `lru` finds what LRU finds. The others are ARC and S3-FIFO, and the optimum, which
//! knows the future. A hit is a leading block that is present. Each prompt is offered from its last block to its first,
//! as an engine frees it: so a block never leaves before the blocks that need it.

mod classic;

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

use classic::{Arc, S3Fifo};
use undercroft_bench::replay::{Options, ReplayEngine, Trace, reference_hits, replay};
use undercroft_contract::error::RegisterError;
use undercroft_engine::policy::PolicyKind;

/// Capacities, in percent of the different blocks of a trace.
const PERCENT: [usize; 4] = [1, 5, 10, 25];

/// A cache of blocks that knows nothing of prefixes. Blocks are numbered from 0.
trait BlockCache {
    fn contains(&self, block: usize) -> bool;
    /// The block is used: it is stored if it is not present.
    fn offer(&mut self, block: usize);
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("| trace | capacity | LRU | ARC | S3-FIFO | leafhd | optimum |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for path in std::env::args().skip(1) {
        let path = Path::new(&path);
        let trace = Trace::read(path)?;
        let requests = numbered(&trace);
        let prompts: Vec<_> = trace.requests().map(|of| (of.len(), of)).collect();
        let unique = trace.unique_blocks();
        let name = path.file_stem().unwrap_or_default().display();
        for percent in PERCENT {
            let mut leafhd = engine(unique * percent / 100)?;
            // The engine has whole pages.
            let capacity = leafhd.host_blocks();
            let reference = reference_hits(&prompts, capacity);
            let hits = [
                reference.lru,
                classic_hits(&requests, &mut Arc::new(capacity)),
                classic_hits(&requests, &mut S3Fifo::new(capacity, unique)),
                replay(&trace, &mut leafhd).hits as usize,
                reference.optimum,
            ];
            let shares =
                hits.map(|hits| format!("{:.1}", 100.0 * hits as f64 / trace.blocks() as f64));
            println!("| {name} | {percent} % | {} |", shares.join(" | "));
        }
    }
    Ok(())
}

fn numbered(trace: &Trace) -> Vec<Vec<usize>> {
    let mut numbers = HashMap::new();
    let mut number = |&block: &u64| {
        let next = numbers.len();
        *numbers.entry(block).or_insert(next)
    };
    let requests = trace.requests();
    requests
        .map(|blocks| blocks.iter().map(&mut number).collect())
        .collect()
}

fn classic_hits(requests: &[Vec<usize>], cache: &mut impl BlockCache) -> usize {
    let mut hits = 0;
    for blocks in requests {
        let leading = blocks.iter().take_while(|&&block| cache.contains(block));
        hits += leading.count();
        blocks.iter().rev().for_each(|&block| cache.offer(block));
    }
    hits
}

fn engine(blocks: usize) -> Result<ReplayEngine, RegisterError> {
    ReplayEngine::new(&Options {
        host_blocks: blocks,
        disk_blocks: 0,
        policy: PolicyKind::LeafHd,
        second_touch: false,
        disk_writes_per_s: 0.0,
        seed: 1,
    })
}
