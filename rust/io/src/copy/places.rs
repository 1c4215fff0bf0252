//! Which bytes a transfer copies: the slots of an engine's blocks, and where a program has the same blocks.

use std::collections::BTreeMap;
use std::ops::Range;

use super::CopyPiece;

/// Why blocks have no places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacesError {
    /// The numbers and the addresses do not belong together, or a number comes twice.
    #[error(
        "group {group}: {numbers} numbers and {addresses} addresses of {parts} parts; each block needs an address for \
         each part, and the numbers ascend"
    )]
    Numbers {
        /// The blocks' group.
        group: u8,
        /// How many blocks.
        numbers: usize,
        /// How many addresses.
        addresses: usize,
        /// How many parts a block has.
        parts: usize,
    },
    /// A part of a block lies outside the program's regions.
    #[error("group {group}: a block lies outside the regions; name them with add_region")]
    Outside {
        /// The blocks' group.
        group: u8,
    },
}

/// Blocks of one group in the memory of a program, where each part of a block may lie anywhere.
#[derive(Debug)]
pub struct BlockPlaces {
    group: u8,
    /// Bytes of the parts of a block.
    parts: Vec<u64>,
    /// Ascending.
    numbers: Vec<u32>,
    /// The address of each part of the first block, then of the second, and so on.
    addresses: Vec<usize>,
}

impl BlockPlaces {
    /// Blocks with ascending `numbers`, all of whose parts lie in `regions`, which ascend and do not touch.
    pub fn new(
        group: u8,
        parts: Vec<u64>,
        numbers: Vec<i64>,
        addresses: Vec<i64>,
        regions: &[Range<usize>],
    ) -> Result<Self, PlacesError> {
        let refused = PlacesError::Numbers {
            group,
            numbers: numbers.len(),
            addresses: addresses.len(),
            parts: parts.len(),
        };
        let is_whole = !parts.is_empty() && numbers.len() * parts.len() == addresses.len();
        let numbers = numbers.into_iter().map(|one| u32::try_from(one).ok());
        let numbers: Vec<u32> = numbers.collect::<Option<_>>().ok_or(refused)?;
        if !is_whole || !numbers.is_sorted_by(|one, next| one < next) {
            return Err(refused);
        }
        let mut sizes = parts.iter().cycle();
        let inside = |address: i64| {
            let (address, size) = (usize::try_from(address).ok()?, *sizes.next()?);
            let before = regions.partition_point(|region| region.start <= address);
            let region = regions.get(before.checked_sub(1)?)?;
            let end = address.checked_add(usize::try_from(size).ok()?)?;
            (end <= region.end).then_some(address)
        };
        let addresses = addresses.into_iter().map(inside);
        let addresses: Vec<usize> = addresses
            .collect::<Option<_>>()
            .ok_or(PlacesError::Outside { group })?;
        Ok(Self {
            group,
            parts,
            numbers,
            addresses,
        })
    }

    /// Appends the pieces of the block at `index`, whose slot begins at `offset`. Returns their bytes.
    fn append(&self, index: usize, mut offset: u64, pieces: &mut Vec<CopyPiece>) -> u64 {
        let begin = offset;
        let addresses = self.addresses.iter().skip(index * self.parts.len());
        for (&len, &address) in self.parts.iter().zip(addresses) {
            pieces.push(CopyPiece {
                address,
                offset,
                len,
            });
            offset += len;
        }
        offset - begin
    }
}

/// Slots of consecutive blocks of one group.
#[derive(Clone, Copy, Debug)]
pub struct SlotRun<'a> {
    /// The blocks' group.
    pub group: u8,
    /// Number of the first block.
    pub first_block: u32,
    /// The offset of each block's slot, little-endian; negative for a block that is not copied.
    pub offsets: &'a [[u8; 8]],
}

/// The copies of a transfer.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PlacedPieces {
    /// Runs of bytes, in the order of the slots.
    pub pieces: Vec<CopyPiece>,
    /// Bytes of the pieces.
    pub bytes: u64,
    /// By group, the numbers of the blocks of the pieces, ascending.
    pub copied: BTreeMap<u8, Vec<u32>>,
    /// By group, the numbers of the blocks that have slots and no places, ascending.
    pub lacking: BTreeMap<u8, Vec<u32>>,
}

impl PlacedPieces {
    /// The pieces of the blocks that have slots. `places`: at most one entry for each group.
    pub fn of<'a>(
        slots: impl Iterator<Item = SlotRun<'a>>,
        places: impl Iterator<Item = &'a BlockPlaces> + Clone,
    ) -> Self {
        let mut found = Self::default();
        for run in slots {
            let own = places.clone().find(|own| own.group == run.group);
            let numbers = own.map_or(&[][..], |own| &own.numbers);
            let mut at = numbers.partition_point(|&number| number < run.first_block);
            for (number, offset) in (run.first_block..=u32::MAX).zip(run.offsets) {
                let Ok(offset) = u64::try_from(i64::from_le_bytes(*offset)) else {
                    continue;
                };
                while numbers.get(at).is_some_and(|&own| own < number) {
                    at += 1;
                }
                let list = match own.filter(|_| numbers.get(at) == Some(&number)) {
                    Some(own) => {
                        found.bytes += own.append(at, offset, &mut found.pieces);
                        &mut found.copied
                    }
                    None => &mut found.lacking,
                };
                list.entry(run.group).or_default().push(number);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The placed pieces of runs of slots: group, number of the first block, offsets.
    fn placed(runs: &[(u8, u32, &[i64])], own: &BlockPlaces) -> PlacedPieces {
        let bytes: Vec<Vec<[u8; 8]>> = runs
            .iter()
            .map(|(.., offsets)| offsets.iter().map(|at| at.to_le_bytes()).collect())
            .collect();
        let slots = runs.iter().zip(&bytes);
        let slots = slots.map(|(&(group, first_block, _), offsets)| SlotRun {
            group,
            first_block,
            offsets,
        });
        PlacedPieces::of(slots, [own].into_iter())
    }

    fn places(
        parts: &[u64],
        numbers: &[i64],
        addresses: &[i64],
    ) -> Result<BlockPlaces, PlacesError> {
        let (numbers, addresses) = (numbers.to_vec(), addresses.to_vec());
        BlockPlaces::new(0, parts.to_vec(), numbers, addresses, &[100..200, 300..400])
    }

    fn piece(address: usize, offset: u64, len: u64) -> CopyPiece {
        CopyPiece {
            address,
            offset,
            len,
        }
    }

    #[test]
    fn the_parts_of_a_block_lie_one_after_the_other_in_its_slot() {
        let own = places(&[8, 4], &[2, 5], &[100, 300, 120, 320]).unwrap();
        let found = placed(&[(0, 2, &[4096, -1, -1, 8192])], &own);
        let pieces = [
            piece(100, 4096, 8),
            piece(300, 4104, 4),
            piece(120, 8192, 8),
            piece(320, 8200, 4),
        ];
        assert_eq!((&*found.pieces, found.bytes), (&pieces[..], 24));
        assert_eq!(found.copied, BTreeMap::from([(0, vec![2, 5])]));
        assert!(found.lacking.is_empty());
    }

    #[test]
    fn blocks_without_places_are_named_and_others_are_copied() {
        let own = places(&[8], &[1, 3, 9], &[100, 110, 120]).unwrap();
        let found = placed(&[(0, 0, &[0, 10, -1, 30, 40]), (7, 4, &[50])], &own);
        assert_eq!(found.pieces, [piece(100, 10, 8), piece(110, 30, 8)]);
        assert_eq!(found.copied, BTreeMap::from([(0, vec![1, 3])]));
        assert_eq!(
            found.lacking,
            BTreeMap::from([(0, vec![0, 4]), (7, vec![4])])
        );
        assert_eq!(placed(&[], &own), PlacedPieces::default());
    }

    #[test]
    fn each_part_lies_in_one_region() {
        let outside = Some(PlacesError::Outside { group: 0 });
        for (address, is_inside) in [
            (100, true),
            (192, true),
            (392, true),
            (99, false),
            (193, false),
            (250, false),
            (393, false),
            (-1, false),
            (i64::MAX, false),
        ] {
            let refusal = places(&[8], &[0], &[address]).err();
            assert_eq!(refusal, outside.filter(|_| !is_inside), "{address}");
        }
        assert!(places(&[], &[], &[]).is_err(), "a block without parts");
        let nowhere = BlockPlaces::new(0, vec![8], vec![0], vec![100], &[]);
        assert_eq!(nowhere.err(), outside);
        assert_eq!(places(&[u64::MAX], &[0], &[100]).err(), outside);
    }

    #[test]
    fn numbers_ascend_and_have_an_address_for_each_part() {
        let refused = |made: Result<BlockPlaces, PlacesError>| {
            matches!(made, Err(PlacesError::Numbers { group: 0, .. }))
        };
        assert!(places(&[8], &[], &[]).is_ok());
        assert!(places(&[8], &[0, 7], &[100, 108]).is_ok());
        assert!(refused(places(&[8], &[7, 0], &[100, 108])));
        assert!(refused(places(&[8], &[7, 7], &[100, 108])));
        assert!(refused(places(&[8], &[-1, 0], &[100, 108])));
        assert!(refused(places(&[8], &[1 << 32], &[100])));
        assert!(refused(places(&[8], &[0, 1], &[100])));
        assert!(refused(places(&[8, 8], &[0], &[100])));
    }
}
