//! The NUMA nodes over which the arena is spread.
//!
//! One thread populates the arena. Without a policy, all of its memory would come from that thread's node, and the GPUs
//! of the other sockets would share one link between the sockets.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::{ARENA_ALIGN, HUGE_PAGE};

/// Bits of a mask of nodes: as many nodes as Linux can have.
pub(super) const MASK_BITS: u64 = 1024;

const NVIDIA: &str = "0x10de";
/// PCI class of displays: VGA and 3D controllers.
const DISPLAY: &str = "0x03";

/// The nodes that have memory and to which NVIDIA GPUs are attached, by the files below `sys`. Empty if the machine
/// does not report them.
pub(super) fn gpu_nodes(sys: &Path) -> Vec<u32> {
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let memory = ranges(read(&sys.join("devices/system/node/has_memory")).trim());
    let devices = fs::read_dir(sys.join("bus/pci/devices"))
        .into_iter()
        .flatten()
        .flatten();
    let nodes: BTreeSet<u32> = devices
        .map(|device| device.path())
        .filter(|device| read(&device.join("vendor")).trim() == NVIDIA)
        .filter(|device| read(&device.join("class")).starts_with(DISPLAY))
        // -1: the firmware does not report the node.
        .filter_map(|device| read(&device.join("numa_node")).trim().parse().ok())
        .filter(|node| memory.contains(node) && u64::from(*node) < MASK_BITS)
        .collect();
    nodes.into_iter().collect()
}

/// Numbers of a list such as `0-1,4`, as the kernel writes them.
fn ranges(list: &str) -> BTreeSet<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// The nodes as `mbind` takes them. The kernel reads one bit less than the given number.
pub(super) fn mask(nodes: &[u32]) -> [u64; MASK_BITS as usize / 64 + 1] {
    let mut mask = [0; MASK_BITS as usize / 64 + 1];
    for node in nodes {
        mask[*node as usize / 64] |= 1 << (node % 64);
    }
    mask
}

/// The plain page of the `n`-th huge page that lies on the `n`-th node in turn. The kernel interleaves plain pages by
/// their number in the file, and the first plain page of every huge page has a multiple of 512 as its number.
pub(super) fn page_of_node_in_turn(n: u64, nodes: usize) -> u64 {
    let nodes = nodes.max(1) as u64;
    let first = n * (HUGE_PAGE / ARENA_ALIGN);
    (n % nodes + nodes - first % nodes) % nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(sys: &Path, name: &str, fields: [&str; 3]) {
        let dir = sys.join("bus/pci/devices").join(name);
        fs::create_dir_all(&dir).unwrap();
        for (file, text) in ["vendor", "class", "numa_node"].into_iter().zip(fields) {
            fs::write(dir.join(file), format!("{text}\n")).unwrap();
        }
    }

    #[test]
    fn the_nodes_of_nvidia_gpus_that_have_memory_are_found() {
        let sys = tempfile::tempdir().unwrap();
        assert_eq!(gpu_nodes(sys.path()), [] as [u32; 0], "nothing is known");
        fs::create_dir_all(sys.path().join("devices/system/node")).unwrap();
        fs::write(
            sys.path().join("devices/system/node/has_memory"),
            "0-1,4-5\n",
        )
        .unwrap();
        device(sys.path(), "gpu", ["0x10de", "0x030200", "4"]);
        device(sys.path(), "same node", ["0x10de", "0x030200", "4"]);
        device(sys.path(), "other node", ["0x10de", "0x030000", "1"]);
        device(
            sys.path(),
            "node without memory",
            ["0x10de", "0x030200", "2"],
        );
        device(sys.path(), "node unknown", ["0x10de", "0x030200", "-1"]);
        device(sys.path(), "bridge", ["0x10de", "0x068000", "0"]);
        device(sys.path(), "other maker", ["0x1234", "0x030000", "0"]);
        assert_eq!(gpu_nodes(sys.path()), [1, 4]);
    }

    #[test]
    fn masks_have_a_bit_for_each_node() {
        assert_eq!(mask(&[0, 3])[..2], [0b1001, 0]);
        assert_eq!(mask(&[64])[..2], [0, 1]);
    }

    #[test]
    fn huge_pages_come_to_the_nodes_in_turn_as_the_kernel_interleaves_plain_pages() {
        for nodes in 1..=9 {
            for n in 0..100 {
                let page = page_of_node_in_turn(n, nodes);
                assert!(page < HUGE_PAGE / ARENA_ALIGN);
                let node = (n * (HUGE_PAGE / ARENA_ALIGN) + page) % nodes as u64;
                assert_eq!(node, n % nodes as u64, "huge page {n} of {nodes} nodes");
            }
        }
    }
}
