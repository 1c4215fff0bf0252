//! Block traces in the format of the Mooncake project: one JSON object a line, one line a request.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Tokens of one block of the trace format.
pub const BLOCK_TOKENS: usize = 512;

/// The full blocks of each request, in order of arrival. A block's number stands for its content and
/// for everything before it.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    blocks: Vec<u64>,
    /// End of each request in `blocks`.
    ends: Vec<usize>,
}

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A line is not a request.
    #[error(
        "{path}, line {line}: {source}; expected an object with `input_length` (tokens) and `hash_ids` \
         (one number for each block of 512 tokens)"
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// There is no full block in it.
    #[error("the trace {path} holds no full block of 512 tokens: nothing to replay")]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

#[derive(Deserialize)]
struct Line {
    input_length: usize,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads a trace. The last block of a request is dropped where it is not full.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let unreadable = |source| TraceError::Read {
            path: path.to_owned(),
            source,
        };
        let mut trace = Self::default();
        for (index, line) in BufReader::new(File::open(path).map_err(unreadable)?)
            .lines()
            .enumerate()
        {
            let line = line.map_err(unreadable)?;
            if line.trim().is_empty() {
                continue;
            }
            let Line {
                input_length,
                hash_ids,
            } = serde_json::from_str(&line).map_err(|source| TraceError::Line {
                path: path.to_owned(),
                line: index + 1,
                source,
            })?;
            let full = hash_ids.len().min(input_length / BLOCK_TOKENS);
            trace.push(&hash_ids[..full]);
        }
        if trace.blocks.is_empty() {
            return Err(TraceError::Empty {
                path: path.to_owned(),
            });
        }
        Ok(trace)
    }

    /// Appends a request.
    pub fn push(&mut self, blocks: &[u64]) {
        self.blocks.extend_from_slice(blocks);
        self.ends.push(self.blocks.len());
    }

    /// The blocks of each request.
    pub fn requests(&self) -> impl Iterator<Item = &[u64]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, &end)| &self.blocks[start..end])
    }

    /// Number of block references.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Number of different blocks.
    pub fn unique_blocks(&self) -> usize {
        let mut blocks = self.blocks.clone();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len()
    }
}
