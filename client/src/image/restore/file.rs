//! What an image has about a file, as the service needs it. Pure.

use fdmap_proto::{Access, Backing, Right, Rights, Seals};

use super::super::chain::ImageFile;
use super::super::error::ImageError;
use super::super::names;

/// Position and width of the hugetlb page size in the flags of memfd_create(2) (`MFD_HUGE_SHIFT` in linux/memfd.h).
const HUGE_SHIFT: u32 = 26;
const HUGE_MASK: u32 = 0x3f;
const MFD_HUGETLB: u32 = 4;

/// Memory that backs the file.
pub(super) fn backing_of(file: &ImageFile) -> Result<Backing, ImageError> {
    let is_thp = file.dumped.as_ref().is_some_and(|dumped| dumped.backing == "shmem-thp");
    match file.inode.hugetlb_flag {
        None => Ok(if is_thp { Backing::ShmemThp } else { Backing::Shmem }),
        Some(flag) => match flag >> HUGE_SHIFT & HUGE_MASK {
            log2 if log2 == 0 || flag & MFD_HUGETLB == 0 => {
                let reason =
                    format!("hugetlb flags {flag:#x} of file {:?} have no page size", file.inode.name);
                Err(ImageError::invalid(names::MEMFD, reason))
            }
            log2 => Ok(Backing::Hugetlb(1 << log2)),
        },
    }
}

/// Owner and rights. CRIU's images have no rights: the owner has all.
pub(super) fn access_of(file: &ImageFile) -> Result<Access, ImageError> {
    let private = Access::private(file.inode.uid, file.inode.gid);
    let Some(dumped) = &file.dumped else { return Ok(private) };
    let right = |name: &String| {
        name.parse::<Right>()
            .map_err(|_| ImageError::invalid(names::SIDE_FILE, format!("unknown right {name:?}")))
    };
    let rights = |names: &[String]| names.iter().map(right).collect::<Result<Rights, _>>();
    let [owner, group, other] = &dumped.rights;
    Ok(Access { owner: rights(owner)?, group: rights(group)?, other: rights(other)?, ..private })
}

/// The seals.
pub(super) fn seals_of(file: &ImageFile) -> Result<Seals, ImageError> {
    let bits = file.inode.seals;
    Seals::from_bits(bits).ok_or_else(|| {
        ImageError::invalid(
            names::MEMFD,
            format!("seals {bits:#x} of file {:?} are unknown", file.inode.name),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::format::MemfdInodeEntry;
    use super::super::super::side_file::DumpedFile;
    use super::*;

    fn file(hugetlb_flag: Option<u32>, backing: Option<&str>) -> ImageFile {
        let inode = MemfdInodeEntry {
            name: "ram".to_owned(),
            uid: 5,
            gid: 6,
            hugetlb_flag,
            ..MemfdInodeEntry::default()
        };
        let dumped = backing.map(|backing| DumpedFile {
            shmid: 0,
            file_id: String::new(),
            generation: 1,
            exact: true,
            backing: backing.to_owned(),
            rights: [vec!["inspect".to_owned(), "read".to_owned()], vec!["read".to_owned()], Vec::new()],
            unknown_pages: 0,
            resident: Vec::new(),
        });
        ImageFile { inode, dumped, extents: Vec::new() }
    }

    #[test]
    fn backing_is_that_of_the_image() {
        assert_eq!(backing_of(&file(None, None)).unwrap(), Backing::Shmem);
        assert_eq!(backing_of(&file(None, Some("shmem-thp"))).unwrap(), Backing::ShmemThp);
        assert_eq!(backing_of(&file(Some(4 | 21 << 26), None)).unwrap(), Backing::Hugetlb(2 << 20));
        let error = backing_of(&file(Some(4), None)).unwrap_err().to_string();
        assert_eq!(error, "memfd.img: hugetlb flags 0x4 of file \"ram\" have no page size");
    }

    #[test]
    fn rights_are_those_of_the_side_file() {
        assert_eq!(access_of(&file(None, None)).unwrap(), Access::private(5, 6));
        let expected = Access {
            uid: 5,
            gid: 6,
            owner: Rights::INSPECT | Rights::READ,
            group: Rights::READ,
            other: Rights::NONE,
        };
        assert_eq!(access_of(&file(None, Some("shmem"))).unwrap(), expected);
        let mut unknown = file(None, Some("shmem"));
        unknown.dumped.as_mut().unwrap().rights[2] = vec!["fly".to_owned()];
        assert_eq!(access_of(&unknown).unwrap_err().to_string(), "fdmap.json: unknown right \"fly\"");
    }
}
