//! Text of `/proc/PID/maps`.

use arbitrary::{Arbitrary, Unstructured};
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Vma, parse};
use nix::sys::stat::{major, makedev, minor};

use crate::draft::up_to;

#[derive(Arbitrary, Debug)]
pub enum Input {
    /// Lines as the kernel writes them.
    Lines(#[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 32))] Vec<Line>),
    /// Any bytes.
    Bytes(Vec<u8>),
    /// Lines of which one byte is replaced: position and value.
    Changed(#[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 4))] Vec<Line>, u16, u8),
}

#[derive(Arbitrary, Debug)]
pub struct Line {
    start: u64,
    bytes: u32,
    flags: [bool; 4],
    offset: u64,
    /// Linux has 12 bits of major and 20 bits of minor numbers.
    device: (u8, u16),
    inode: u64,
    name: Vec<u8>,
}

impl Line {
    fn vma(&self) -> Vma {
        let [readable, writable, executable, shared] = self.flags;
        let end = self.start.saturating_add(u64::from(self.bytes)).max(1);
        let range = AddressRange { start: self.start.min(end - 1), end };
        let device = makedev(self.device.0.into(), self.device.1.into());
        Vma { range, offset: self.offset, device, inode: self.inode, readable, writable, executable, shared }
    }

    /// The name: the kernel escapes line feeds.
    fn name(&self) -> Vec<u8> {
        self.name.iter().copied().filter(|byte| *byte != b'\n').collect()
    }
}

/// A line of `/proc/PID/maps`, as `show_map_vma` of the kernel writes it.
fn line(vma: &Vma, name: &[u8]) -> Vec<u8> {
    let flag = |set, letter| if set { letter } else { '-' };
    let mut line = format!(
        "{:08x}-{:08x} {}{}{}{} {:08x} {:02x}:{:02x} {} ",
        vma.range.start,
        vma.range.end,
        flag(vma.readable, 'r'),
        flag(vma.writable, 'w'),
        flag(vma.executable, 'x'),
        if vma.shared { 's' } else { 'p' },
        vma.offset,
        major(vma.device),
        minor(vma.device),
        vma.inode,
    )
    .into_bytes();
    line.extend(name);
    line.push(b'\n');
    line
}

/// # Panics
/// If a check fails.
pub fn run(input: Input) {
    let text = |lines: &[Line]| {
        lines.iter().flat_map(|draft| line(&draft.vma(), &draft.name())).collect::<Vec<u8>>()
    };
    match input {
        Input::Lines(lines) => {
            let expected: Vec<_> = lines.iter().map(Line::vma).collect();
            // A text without a line is no list of mappings.
            let expected = Some(expected).filter(|vmas| !vmas.is_empty());
            assert_eq!(parse(&text(&lines)), expected);
        }
        Input::Bytes(bytes) => check(&bytes),
        Input::Changed(lines, at, byte) => {
            let mut text = text(&lines);
            if let Some(nth) = usize::from(at).checked_rem(text.len()) {
                text[nth] = byte;
            }
            check(&text);
        }
    }
}

/// Every line of an accepted text is a mapping of at least one byte, and means the same when it is written again.
fn check(text: &[u8]) {
    let Some(vmas) = parse(text) else { return };
    assert_eq!(vmas.len(), text.iter().filter(|byte| **byte == b'\n').count());
    assert!(vmas.iter().all(|vma| vma.range.start < vma.range.end), "{vmas:?}");
    let again: Vec<u8> = vmas.iter().flat_map(|vma| line(vma, b"")).collect();
    assert_eq!(parse(&again), Some(vmas));
}
