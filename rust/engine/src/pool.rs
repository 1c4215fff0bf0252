//! A list that grows in steps. Growth neither moves nor copies an element.

const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;

/// A list of fixed-size chunks.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    chunks: Vec<Vec<T>>,
}

impl<T> Pool<T> {
    pub(crate) fn new() -> Self {
        Self { chunks: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        let full = self.chunks.len().saturating_sub(1) * CHUNK;
        full + self.chunks.last().map_or(0, Vec::len)
    }

    pub(crate) fn push(&mut self, element: T) {
        match self.chunks.last_mut().filter(|last| last.len() < CHUNK) {
            Some(last) => last.push(element),
            None => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(element);
                self.chunks.push(chunk);
            }
        }
    }

    /// Grows to `len` elements. The new elements are copies of `element`.
    pub(crate) fn grow(&mut self, len: usize, element: T)
    where
        T: Copy,
    {
        while self.len() < len {
            let missing = len - self.len();
            match self.chunks.last_mut().filter(|last| last.len() < CHUNK) {
                Some(last) => last.resize(CHUNK.min(last.len() + missing), element),
                None => self.chunks.push(Vec::with_capacity(CHUNK)),
            }
        }
    }

    /// Bytes that the list takes.
    pub(crate) fn bytes(&self) -> u64 {
        let chunks = self.chunks.len() * CHUNK * size_of::<T>();
        (chunks + self.chunks.capacity() * size_of::<Vec<T>>()) as u64
    }

    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.chunks.get(index >> CHUNK_BITS)?.get(index % CHUNK)
    }
}

impl<T> std::ops::Index<usize> for Pool<T> {
    type Output = T;

    fn index(&self, index: usize) -> &T {
        &self.chunks[index >> CHUNK_BITS][index % CHUNK]
    }
}

impl<T> std::ops::IndexMut<usize> for Pool<T> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        &mut self.chunks[index >> CHUNK_BITS][index % CHUNK]
    }
}
