//! A directory that could not be opened when the engine started.

use crate::disk::DeviceImage;
use crate::forest::DeviceIndex;

use super::coordinator::Engine;

impl Engine {
    /// Begins to use a directory that was absent ([`DeviceImage::absent`]) and holds no blocks.
    pub fn open_disk(&mut self, device: u16, image: &DeviceImage) {
        let device = DeviceIndex::new(usize::from(device));
        let seed = self.config.seed ^ (u64::from(device.number()) + 1);
        self.residency
            .open_disk(device, image, self.config.policy, seed);
        for ns in self.residency.forest().namespaces() {
            self.namespaces.enter(ns, &mut self.residency);
        }
        self.namespaces.note_reach(&self.residency);
    }
}
