use super::*;
use crate::mapping::SharedMapping;
use crate::{fd, memfd};

const TEXT: &[u8] = b"\
00400000-00452000 r-xp 00002000 08:02 173521                             /usr/bin/dbus-daemon\n\
00e03000-00e24000 rw-p 00000000 00:00 0                                  [heap]\n\
7f0000000000-7f0000200000 rw-s 00200000 00:0f 1049                       /anon_hugepage (deleted)\n\
7f0000200000-7f0000201000 r--s 00000000 00:01 18446744073709551615       /memfd:a  b \xff\\012 (deleted)\n\
7f0000201000-7f0000202000 ---p 00000000 103:fffff 7 \n\
7ffe0d1f4000-7ffe0d215000 rw-p 00000000 00:00 0 \n\
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]\n";

#[test]
fn maps_text_is_parsed() {
    let all = parse(TEXT).unwrap();
    assert_eq!(all.len(), 7);
    let first = Vma {
        range: AddressRange { start: 0x40_0000, end: 0x45_2000 },
        offset: 0x2000,
        device: makedev(8, 2),
        inode: 173_521,
        readable: true,
        writable: false,
        executable: true,
        shared: false,
    };
    assert_eq!(all[0], first);
    assert_eq!((all[1].device, all[1].inode, all[1].writable), (0, 0, true));
    assert_eq!((all[2].device, all[2].inode, all[2].offset), (15, 1049, 0x20_0000));
    assert!(all[2].shared && all[2].writable);
    assert!(all[3].shared && !all[3].writable);
    assert_eq!(all[3].inode, u64::MAX);
    assert_eq!(all[4].device, makedev(0x103, 0xf_ffff));
    assert!(!all[4].readable && !all[6].readable && all[6].executable);
    assert_eq!(all[6].range.end, 0xffff_ffff_ff60_1000);
}

#[test]
fn malformed_text_is_refused() {
    for wrong in [
        &b""[..],
        b"00400000-00452000 r-xp 00002000 08:02 173521",
        b"\n",
        b"00400000-00452000 r-x 00002000 08:02 173521\n",
        b"00400000-00452000 r-xq 00002000 08:02 173521\n",
        b"00452000-00400000 r-xp 00002000 08:02 173521\n",
        b"00400000-00452000 r-xp 00002000 0802 173521\n",
        b"00400000-00452000 r-xp 00002000 08:02 \n",
        b"0-1 r-xp 0 0:0 0\n2-3 r-xp 0 0:0",
        b"\xff0-1 r-xp 0 0:0 0\n",
    ] {
        assert_eq!(parse(wrong), None, "{}", wrong.escape_ascii());
    }
}

#[test]
fn flags_are_those_of_the_requested_mapping() {
    const SMAPS: &[u8] = b"\
7f0000000000-7f0000001000 r--s 00000000 00:01 5 /memfd:VmFlags: mw
Size:                  4 kB
VmFlags: rd sh mr me ms
7f0000001000-7f0000002000 r--s 00000000 00:01 5 /memfd:\xff
Size:                  4 kB
VmFlags: rd sh mr mw me ms
";
    let [first, mut second] = [
        &b"7f0000000000-7f0000001000 r--s 00000000 00:01 5 "[..],
        b"7f0000001000-7f0000002000 r--s 00000000 00:01 5 ",
    ]
    .map(|line| parse_line(line).unwrap());
    assert_eq!(flag_in_smaps(SMAPS, &first, b"mw").unwrap(), Some(false));
    assert_eq!(flag_in_smaps(SMAPS, &second, b"mw").unwrap(), Some(true));
    second.inode = 6;
    assert_eq!(flag_in_smaps(SMAPS, &second, b"mw").unwrap(), None);
}

#[test]
fn later_mapping_at_the_same_addresses_has_its_own_flags() {
    const PAGES: usize = 3;
    let file = memfd::create("again", None).unwrap();
    memfd::resize(file.as_fd(), u64::try_from(PAGES).unwrap() * 4096).unwrap();
    let read_only = fd::reopen(file.as_fd(), false).unwrap();
    let maps = Maps::open(std::process::id()).unwrap();
    // The kernel usually reuses the address of the previous mapping.
    for _ in 0..10 {
        for (opened, may) in [(&file, true), (&read_only, false)] {
            let mapping = SharedMapping::shared(opened, 0, PAGES * 4096, false).unwrap();
            let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
            let vma = maps.vma_at_or_after(start, true).unwrap().unwrap();
            assert_eq!(may_write(std::process::id(), &vma), Ok(may));
        }
    }
}

#[test]
fn query_and_text_find_the_same_shared_mappings() {
    let file = memfd::create("two  words", None).unwrap();
    memfd::resize(file.as_fd(), 4 * 4096).unwrap();
    let stat = fd::stat(&file).unwrap();
    let read_only = fd::reopen(file.as_fd(), false).unwrap();
    let maps = Maps::open(std::process::id()).unwrap();
    assert_eq!(maps.shared_of(stat.st_dev, stat.st_ino), Ok(vec![]));

    let whole = SharedMapping::shared(&file, 0, 4 * 4096, true).unwrap();
    let part = SharedMapping::shared(&file, 4096, 4096, false).unwrap();
    let read_only_part = SharedMapping::shared(&read_only, 2 * 4096, 4096, false).unwrap();
    let mut expected = [(&whole, 0, true), (&part, 4096, true), (&read_only_part, 2 * 4096, false)].map(
        |(mapping, offset, may)| {
            let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
            (AddressRange::at(start, u64::try_from(mapping.len()).unwrap()).unwrap(), offset, may)
        },
    );
    expected.sort_unstable();

    let found = maps.shared_of(stat.st_dev, stat.st_ino).unwrap();
    let all = maps.all().unwrap();
    let by_text: Vec<_> =
        all.iter().filter(|vma| vma.inode == stat.st_ino && vma.device == stat.st_dev).copied().collect();
    assert_eq!(found, by_text);
    let reported: Vec<_> = found
        .iter()
        .map(|vma| (vma.range, vma.offset, may_write(std::process::id(), vma).unwrap()))
        .collect();
    assert_eq!(reported, expected);

    let twin = Maps::from_fd(OwnedFd::from(maps.file)).unwrap();
    for vma in &found {
        let inside = vma.range.end - 1;
        assert_eq!(twin.try_clone().unwrap().vma_at_or_after(inside, false), Ok(Some(*vma)));
    }
    drop(part);
    assert_eq!(twin.shared_of(stat.st_dev, stat.st_ino).unwrap().len(), 2);
    assert_eq!(twin.vma_at_or_after(u64::MAX - 4095, true), Ok(None));
}

#[test]
fn exited_process_returns_esrch() {
    let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let maps = Maps::open(child.id()).unwrap();
    assert!(!maps.all().unwrap().is_empty());
    drop(child.stdin.take());
    child.wait().unwrap();
    assert_eq!(maps.all().unwrap_err().errno, Errno::ESRCH);
    assert_eq!(maps.vma_at_or_after(0, true).unwrap_err().errno, Errno::ESRCH);
    assert_eq!(maps.shared_of(1, 1).unwrap_err().errno, Errno::ESRCH);
    let maps = Maps::from_fd(OwnedFd::from(maps.file)).unwrap();
    assert_eq!(maps.all().unwrap_err().errno, Errno::ESRCH);
}

#[test]
fn other_files_are_refused_as_maps() {
    for other in ["/proc/self/pagemap", "/proc/self/smaps", "/dev/null"] {
        let other_file = File::open(other).unwrap();
        assert_eq!(Maps::from_fd(other_file.into()).unwrap_err().errno, Errno::EINVAL, "{other}");
    }
}
