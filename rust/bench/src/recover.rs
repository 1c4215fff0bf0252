//! How long opening a full directory takes. The store is written record by record in the disk
//! format, without its payloads: recovery must not touch them anyway.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use undercroft_contract::format::{NamespaceEntry, RECORD_BYTES, Record, namespace_offset};
use undercroft_contract::pages::SLOT_ALIGN;
use undercroft_engine::{Engine, EngineConfig};
use undercroft_io::disk::open;

use crate::rig::{BenchError, failed, hash, process_time, spec};

const BLOCK_BYTES: u32 = 4096;
/// Blocks of one prefix chain.
const CHAIN: u64 = 512;
const INSTANCE: u64 = 7;

/// Time, reads and memory of opening a directory.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RecoverReport {
    /// From opening the directory to an engine that answers lookups, in seconds.
    pub open_s: f64,
    /// Processor time of that, in seconds.
    pub open_cpu_s: f64,
    /// Blocks that can be found again.
    pub blocks: u64,
    /// Bytes that this process read meanwhile, as the kernel counts them.
    pub bytes_read: u64,
    /// Reading the table and comparing the checksum of each record, and nothing else, in seconds.
    pub table_s: f64,
    /// Memory of the open engine for each block, in bytes.
    pub bytes_per_block: u64,
    /// Most memory while opening for each block, in bytes.
    pub peak_bytes_per_block: u64,
}

/// Makes a store of `blocks` blocks in `dir`, an empty directory, opens it, and removes it.
///
/// # Errors
/// If the store cannot be made or opened.
pub fn run(dir: &Path, blocks: u64) -> Result<RecoverReport, BenchError> {
    if blocks == 0 || blocks > u64::from(u32::MAX / 2) {
        return Err(BenchError::Argument {
            name: "blocks",
            value: blocks,
            allowed: "1 to 2147483647",
        });
    }
    let store = dir.join("store");
    let payload = blocks * u64::from(BLOCK_BYTES);
    let capacity = payload + payload / 8 + (64 << 20);
    drop(open::open(&store, capacity, 1)?);
    write_tables(&store, blocks).map_err(failed("writing the store"))?;

    let table_s = read_table(&store).map_err(failed("reading the table"))?;
    let before = bytes_read().map_err(failed("reading /proc/self/io"))?;
    // Where the kernel does not reset the peak, it shows as higher than it was.
    drop(std::fs::write("/proc/self/clear_refs", "5"));
    let memory = memory("VmRSS:").map_err(failed("reading /proc/self/status"))?;
    let (start, cpu) = (Instant::now(), process_time());
    let (files, image, lock) = open::open(&store, capacity, 1)?.into_parts();
    let mut engine = Engine::new(EngineConfig::new(64 << 20));
    let recovery = engine.attach_disks(vec![image]);
    let (open_s, open_cpu_s) = (start.elapsed().as_secs_f64(), process_time() - cpu);
    let bytes_read = bytes_read().map_err(failed("reading /proc/self/io"))? - before;
    let per_block = |field| -> Result<u64, BenchError> {
        let now = self::memory(field).map_err(failed("reading /proc/self/status"))?;
        Ok(now.saturating_sub(memory) / blocks)
    };
    let (bytes_per_block, peak_bytes_per_block) = (per_block("VmRSS:")?, per_block("VmHWM:")?);
    drop((engine, files, lock));
    std::fs::remove_dir_all(&store).map_err(failed("removing the store"))?;
    if recovery.blocks != blocks {
        return Err(BenchError::Engine(format!(
            "recovered {} of {blocks} blocks",
            recovery.blocks
        )));
    }
    Ok(RecoverReport {
        open_s,
        open_cpu_s,
        blocks: recovery.blocks,
        bytes_read,
        table_s,
        bytes_per_block,
        peak_bytes_per_block,
    })
}

fn write_tables(store: &Path, blocks: u64) -> std::io::Result<()> {
    let entry = NamespaceEntry {
        instance: INSTANCE,
        spec: spec(BLOCK_BYTES),
    };
    let bytes = entry
        .encode()
        .ok_or_else(|| std::io::Error::other("the namespace is too long"))?;
    File::options()
        .write(true)
        .open(store.join("super"))?
        .write_all_at(&bytes, namespace_offset(0))?;
    let table = File::options().write(true).open(store.join("table"))?;
    let mut out = BufWriter::with_capacity(1 << 20, &table);
    let mut bytes = [0; RECORD_BYTES];
    for index in 0..blocks {
        let depth = index % CHAIN;
        let record = Record {
            group: 0,
            hit_class: 0,
            seq: index + 1,
            instance: INSTANCE,
            slot: u32::try_from(index * u64::from(BLOCK_BYTES) / SLOT_ALIGN)
                .map_err(std::io::Error::other)?,
            payload_bytes: BLOCK_BYTES,
            checksum: index,
            depth: u32::try_from(depth + 1).map_err(std::io::Error::other)?,
            last: index,
            written_s: 1_800_000_000,
            hash: hash(index),
            parent: (depth > 0).then(|| hash(index - 1)),
        };
        record.encode(&mut bytes);
        out.write_all(&bytes)?;
    }
    out.flush()?;
    drop(out);
    table.sync_all()
}

/// Seconds to read a table and to compare the checksums of its records.
fn read_table(store: &Path) -> std::io::Result<f64> {
    let start = Instant::now();
    let mut table = File::open(store.join("table"))?;
    let mut chunk = vec![0; 1 << 20];
    let mut sound = 0u64;
    loop {
        let len = table.read(&mut chunk)?;
        if len == 0 {
            break;
        }
        let records = chunk[..len].chunks_exact(RECORD_BYTES);
        sound += records
            .filter(|bytes| Record::decode(bytes).is_some())
            .count() as u64;
    }
    std::hint::black_box(sound);
    Ok(start.elapsed().as_secs_f64())
}

/// Memory of this process in bytes, by its field of /proc/self/status.
fn memory(field: &str) -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mut lines = status.lines();
    let kib = lines.find_map(|line| {
        let rest = line.strip_prefix(field)?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    });
    let kib = kib.ok_or_else(|| std::io::Error::other(format!("no {field} in it")))?;
    Ok(kib << 10)
}

/// Bytes that this process has read so far, from files, pipes and the page cache.
fn bytes_read() -> std::io::Result<u64> {
    let counts = std::fs::read_to_string("/proc/self/io")?;
    let count = counts
        .lines()
        .find_map(|line| line.strip_prefix("rchar: ")?.parse().ok());
    count.ok_or_else(|| std::io::Error::other("no rchar in it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_found_and_no_payload_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let report = run(dir.path(), 20_000).unwrap();
        assert_eq!(report.blocks, 20_000);
        let tables = 20_000 * RECORD_BYTES as u64;
        assert!(report.bytes_read >= tables, "{report:?}");
        assert!(
            report.bytes_read < 20_000 * u64::from(BLOCK_BYTES) / 4,
            "{report:?}"
        );
        assert!(report.table_s > 0.0, "{report:?}");
        assert!(
            report.bytes_per_block <= report.peak_bytes_per_block,
            "{report:?}"
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_empty_store_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(
            run(dir.path(), 0)
                .unwrap_err()
                .to_string()
                .contains("blocks is 0")
        );
    }
}
