//! Directories that cannot be opened when the engine starts, some of which are opened later, and then hold nothing;
//! directories that the engine gives up.

use undercroft_core::disk::Health;

use crate::device::SimDevice;
use crate::world::World;

impl World {
    /// Makes some of the engine's directories impossible to open.
    pub(crate) fn lose_some(&mut self) {
        for device in 0..self.disks.attached.len() {
            if self.random.chance(self.settings.late) {
                self.disks.absent.insert(device);
            }
        }
        if self.disks.absent.is_empty() {
            return;
        }
        self.history.roomy_broken = true;
        self.history.left_on_disk = None;
        self.history.kept_namespaces.clear();
        self.log.stats.absent += self.disks.absent.len() as u64;
        let absent = self.disks.absent.clone();
        self.note(|| format!("the engine starts without devices {absent:?}"));
    }

    /// A directory can be opened again. Its content is discarded: the engine may have ended lives of namespaces
    /// meanwhile.
    pub(crate) fn open_late(&mut self) {
        if !self.random.chance(self.settings.late / 10) {
            return;
        }
        let Some(device) = self.disks.absent.pop_first() else {
            return;
        };
        let at = self.disks.attached[device];
        let (capacity, page) = self.settings.devices[at];
        self.disks.devices[at] = SimDevice::new(at, (capacity, page), self.settings.encrypted);
        // It holds no blocks of lives that ended while it was out of reach, so the operator need not empty it.
        self.history.stale.remove(&at);
        self.log.stats.late += 1;
        self.note(|| format!("device {device} is opened late"));
        let image = self.disks.devices[at].image();
        let number = u16::try_from(device).expect("a few devices");
        self.engine.with(|engine| engine.open_disk(number, &image));
    }

    /// Counts the directories that the engine has given up, but for the absent directories.
    pub(crate) fn count_given_up(&mut self) {
        let health = self.engine.with(|engine| engine.health());
        let failed = health.iter().enumerate().filter(|(device, (health, _))| {
            matches!(health, Health::Failed { .. }) && !self.disks.absent.contains(device)
        });
        self.log.stats.given_up += failed.count() as u64;
    }

    /// Directories that the engine cannot reach.
    pub(crate) fn out_of_reach(&self) -> Vec<usize> {
        let disks = &self.disks;
        let there: Vec<usize> = (disks.attached.iter().enumerate())
            .filter(|(device, _)| !disks.absent.contains(device))
            .map(|(_, &at)| at)
            .collect();
        let all = 0..disks.devices.len();
        all.filter(|at| !there.contains(at)).collect()
    }
}
