//! Devices to which the file is attached: they write to it without a system call on the file and without a page table.

/// What is known of devices since the last observation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Devices {
    /// A loop device had the file open at the last observation.
    loop_device: bool,
    /// A call attached the file to a device that pins its pages, or it is not known. No call shows the end of that.
    pins: bool,
}

impl Devices {
    /// Starts with a loop device that has the file open, or may have.
    pub(crate) const fn starting_with(loop_device: bool) -> Self {
        Self { loop_device, pins: true }
    }

    /// True if a loop device may have written to the file since the last observation. `attached`: a call attached the file to a
    /// device, or may have. `may_be_new`: a device may have it open without such a call. `has_open`: a loop device has it open now,
    /// which takes long to find out.
    pub(crate) fn update(&mut self, attached: bool, may_be_new: bool, has_open: impl Fn() -> bool) -> bool {
        let before = self.loop_device;
        self.loop_device = (before || attached || may_be_new) && has_open();
        self.pins |= attached;
        before || self.loop_device || attached
    }

    /// True if a device may pin any page of the file.
    pub(crate) const fn may_pin(&self) -> bool {
        self.pins
    }

    /// No page of the file is pinned, so that no device is attached that pins pages.
    pub(crate) const fn no_page_is_pinned(&mut self) {
        self.pins = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loop_device_counts_from_the_call_that_attached_it_until_it_was_seen_detached() {
        let (yes, no) = (|| true, || false);
        let unread = || panic!("the loop devices need not be read");
        let mut devices = Devices::default();
        assert!(!devices.update(false, false, unread));
        assert!(devices.update(true, false, no), "attached and detached meanwhile");
        assert!(devices.may_pin());
        assert!(!devices.update(false, false, unread));
        assert!(devices.update(true, false, yes));
        assert!(devices.update(false, false, yes));
        assert!(devices.update(false, false, no), "it wrote until it was detached");
        assert!(!devices.update(false, false, unread));
        assert!(Devices::starting_with(true).update(false, false, no));
    }

    #[test]
    fn loop_device_is_looked_for_when_it_may_be_new() {
        let mut devices = Devices::default();
        assert!(!devices.update(false, false, || panic!("none can be new")));
        assert!(!devices.update(false, true, || false));
        assert!(devices.update(false, true, || true));
        assert!(devices.update(false, false, || true));
        assert!(!devices.may_pin());
    }

    #[test]
    fn device_may_pin_pages_until_none_is_pinned() {
        assert!(Devices::starting_with(false).may_pin(), "nothing is known yet");
        let mut devices = Devices::default();
        devices.update(true, false, || false);
        devices.update(false, false, || false);
        assert!(devices.may_pin());
        devices.no_page_is_pinned();
        assert!(!devices.may_pin());
    }
}
