//! Per device: latency and rate, learned from finished reads, and the reads that wait.

use undercroft_contract::session::Priority;

use crate::forest::DeviceIndex;

#[cfg(feature = "check")]
use super::super::ensure::ensure;
use super::line::{Line, READS};
use super::remote::RemoteRates;

/// A promotion's reads of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadShare {
    device: DeviceIndex,
    /// Bytes that are still to be read for the promotion.
    left: u64,
    /// Bytes that were queued before the promotion when it was queued, or when it became a demand.
    ahead: u64,
    /// The device's `passed` at that time.
    since: u64,
}

#[derive(Clone, Copy, Debug)]
struct DeviceRate {
    line: Line,
    /// Bytes being read.
    in_flight: u64,
    /// Bytes that wait to be read, by priority.
    queued: [u64; 2],
    /// Bytes that have left the queue since the start: read, or given up.
    passed: u64,
}

impl Default for DeviceRate {
    fn default() -> Self {
        Self {
            line: Line::new(READS),
            in_flight: 0,
            queued: [0; 2],
            passed: 0,
        }
    }
}

/// The measured rates and the queues of all devices.
///
/// Invariants: `queued` is the sum of the remaining shares of all promotions under way; `in_flight` is the sum of the
/// slots of all reads in flight.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    devices: Vec<DeviceRate>,
    pub(crate) remote: RemoteRates,
}

impl Rates {
    fn device(&mut self, device: DeviceIndex) -> &mut DeviceRate {
        if self.devices.len() <= device.index() {
            self.devices
                .resize(device.index() + 1, DeviceRate::default());
        }
        &mut self.devices[device.index()]
    }

    /// Queues a promotion. The numbers are the bytes that the promotion reads from each device.
    pub(crate) fn enqueue(
        &mut self,
        bytes: &[(DeviceIndex, u64)],
        priority: Priority,
    ) -> Vec<ReadShare> {
        let share = |&(index, left): &(DeviceIndex, u64)| {
            let device = self.device(index);
            let share = ReadShare {
                device: index,
                left,
                ahead: device.ahead_of(priority),
                since: device.passed,
            };
            device.queued[priority as usize] += left;
            share
        };
        bytes.iter().map(share).collect()
    }

    /// A prefetch has become a demand.
    pub(crate) fn promote_to_demand(&mut self, shares: &mut [ReadShare]) {
        for share in shares {
            let device = self.device(share.device);
            device.unqueue(Priority::Prefetch, share.left);
            share.ahead = device.ahead_of(Priority::Demand);
            share.since = device.passed;
            device.queued[Priority::Demand as usize] += share.left;
        }
    }

    /// A read of a promotion has begun.
    pub(crate) fn read_began(
        &mut self,
        index: DeviceIndex,
        bytes: u64,
        shares: &mut [ReadShare],
        priority: Priority,
    ) {
        let of_device = shares.iter_mut().find(|share| share.device == index);
        let taken = of_device.map_or(0, |share| {
            let taken = bytes.min(share.left);
            share.left -= taken;
            taken
        });
        let device = self.device(index);
        device.unqueue(priority, taken);
        device.passed += bytes;
        device.in_flight += bytes;
    }

    /// Bytes that a device is reading.
    pub(crate) fn in_flight(&self, device: DeviceIndex) -> u64 {
        let device = self.devices.get(device.index());
        device.map_or(0, |device| device.in_flight)
    }

    /// A promotion has ended: the rest of its shares is given up.
    pub(crate) fn ended(&mut self, shares: &[ReadShare], priority: Priority) {
        for share in shares {
            let device = self.device(share.device);
            device.unqueue(priority, share.left);
            device.passed += share.left;
        }
    }

    /// A read has ended. When it began, the device had `ahead` bytes to read, the bytes of this read among them.
    pub(crate) fn read_ended(
        &mut self,
        index: DeviceIndex,
        bytes: u64,
        ahead: u64,
        (started_ns, now_ns): (u64, u64),
        ok: bool,
    ) {
        let device = self.device(index);
        let left = device.in_flight.checked_sub(bytes);
        device.in_flight = left.expect("every read in flight is counted");
        if ok {
            device.line.add(ahead, now_ns - started_ns, now_ns);
        }
    }

    /// Time until a promotion has read all its bytes, in nanoseconds. `silent_ns` says how long a device has had reads
    /// of which none has ended.
    pub(crate) fn rest_ns(
        &self,
        shares: &[ReadShare],
        all_issued: bool,
        silent_ns: impl Fn(DeviceIndex) -> u64,
    ) -> f64 {
        let of_device = |share: &ReadShare| {
            let device = &self.devices[share.device.index()];
            let passed = device.passed - share.since;
            let waiting = if all_issued {
                0
            } else {
                share.left + share.ahead.saturating_sub(passed)
            };
            let silence = silent_ns(share.device) as f64;
            device.line.of(device.in_flight + waiting).max(silence)
        };
        shares.iter().map(of_device).fold(0.0, f64::max)
    }

    /// How long a read of `bytes` would take, behind the queued reads, when the bytes are spread over the devices that
    /// are `answering`; infinite if none is. `silent_ns`: see [`Rates::rest_ns`].
    pub(crate) fn wait_ns<D: Iterator<Item = DeviceIndex>>(
        &self,
        bytes: u64,
        priority: Priority,
        answering: impl Fn() -> D,
        silent_ns: impl Fn(DeviceIndex) -> u64,
    ) -> f64 {
        let devices = answering().count() as u64;
        if devices == 0 {
            return f64::INFINITY;
        }
        let part = bytes / devices;
        let of_device = |index: DeviceIndex| {
            let device = self.devices.get(index.index()).copied();
            let device = device.unwrap_or_default();
            let ahead = device.ahead_of(priority) + device.in_flight;
            let silence = silent_ns(index) as f64;
            device.line.of(ahead + part).max(silence)
        };
        answering().map(of_device).fold(0.0, f64::max)
    }

    /// Whether some device was read, and the rates of all devices that were read are known.
    pub(crate) fn are_known(&self) -> bool {
        let mut read = self
            .devices
            .iter()
            .filter(|of| of.line.last_ns() > 0)
            .peekable();
        read.peek().is_some() && read.all(|device| device.line.is_known())
    }

    /// Whether nothing was read since a time, and nothing is being read.
    pub(crate) fn are_old(&self, since_ns: u64) -> bool {
        let mut devices = self.devices.iter();
        devices.all(|device| device.line.last_ns() <= since_ns && device.in_flight == 0)
    }

    /// Bytes a second of all devices together, and the longest latency in nanoseconds.
    pub(crate) fn learned(&self) -> (f64, f64) {
        let known = || self.devices.iter().filter(|device| device.line.is_known());
        let latency_ns = known().map(|device| device.line.latency_ns());
        (
            known().map(|device| device.line.bytes_per_s()).sum(),
            latency_ns.fold(0.0, f64::max),
        )
    }

    /// Whether `queued` sums the shares of promotions, by priority, and `in_flight` the slot bytes of `reads`.
    #[cfg(feature = "check")]
    pub(crate) fn check<'a>(
        &self,
        shares: impl Iterator<Item = (Priority, &'a ReadShare)>,
        reads: impl Iterator<Item = (DeviceIndex, u64)>,
    ) -> Result<(), String> {
        let mut in_flight = vec![0; self.devices.len()];
        for (device, bytes) in reads {
            in_flight[device.index()] += bytes;
        }
        for (index, (device, expected)) in self.devices.iter().zip(in_flight).enumerate() {
            ensure!(
                device.in_flight == expected,
                "device {index}: {} bytes in flight, {expected} of reads",
                device.in_flight
            );
        }
        let mut queued = vec![[0; 2]; self.devices.len()];
        for (priority, share) in shares {
            queued[share.device.index()][priority as usize] += share.left;
        }
        for (index, (device, expected)) in self.devices.iter().zip(queued).enumerate() {
            ensure!(
                device.queued == expected,
                "device {index}: {:?} bytes queued, {expected:?} of promotions",
                device.queued
            );
        }
        Ok(())
    }
}

impl DeviceRate {
    /// Bytes that are read before the bytes of a promotion that is queued now: prefetches wait for demands.
    fn ahead_of(&self, priority: Priority) -> u64 {
        let [demanded, prefetched] = self.queued;
        match priority {
            Priority::Demand => demanded,
            Priority::Prefetch => demanded + prefetched,
        }
    }

    fn unqueue(&mut self, priority: Priority, bytes: u64) {
        let queued = &mut self.queued[priority as usize];
        *queued = queued
            .checked_sub(bytes)
            .expect("`queued` counts every share");
    }
}
