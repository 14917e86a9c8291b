//! Chains of images in CRIU's format, without the objects of fdmap: their bytes are all that is checked.

mod store;

use std::collections::BTreeMap;
use std::sync::Arc;

use arbitrary::Arbitrary;
use fdmap_client::image::format::{
    ImageKind, InventoryEntry, MemfdInodeEntry, PAGE_IN_PARENT, PAGE_PRESENT, PagemapEntry, PagemapHead,
    append_entry, header,
};
use fdmap_client::image::{ImageChain, ImageFile, ImageStore, PAGE_BYTES};
use fdmap_proto::PageRange;
use fdmap_proto::units::{low_u8, to_u64};

use crate::draft::rare;
use store::MemoryStore;

const SHMID: u32 = 7;
const MAX_IMAGES: usize = 4;
/// Pages of the file.
const PAGES: u64 = 200;

/// Images, the oldest first, and damage of one of them.
#[derive(Arbitrary, Debug)]
pub struct Input {
    images: Vec<ImageDraft>,
    #[arbitrary(with = rare)]
    damage: Option<Damage>,
}

#[derive(Arbitrary, Debug)]
struct ImageDraft {
    entries: Vec<EntryDraft>,
    /// Images of CRIU may differ in the size of the last page.
    odd_size: bool,
}

#[derive(Arbitrary, Debug)]
struct EntryDraft {
    skip: u8,
    pages: u8,
    in_parent: bool,
    /// In place of the fields above.
    #[arbitrary(with = rare)]
    raw: Option<(u64, u64, u32)>,
}

#[derive(Arbitrary, Debug)]
struct Damage {
    image: u8,
    object: u8,
    at: u16,
    /// 0: cut the object off there.
    change: u8,
}

/// For each page, a byte that fills it; `None`: the chain is invalid.
type Model = Option<BTreeMap<u64, u8>>;

/// # Panics
/// If a valid chain is refused or has other content, or an invalid one has pages that cannot be read.
pub fn run(input: Input) {
    let mut parent: Option<Arc<MemoryStore>> = None;
    let mut model: Model = Some(BTreeMap::new());
    for (number, draft) in (0_u8..).zip(input.images.iter().take(MAX_IMAGES)) {
        let mut objects = BTreeMap::new();
        model = draft.build(number, model.as_ref(), &mut objects);
        if let Some(damage) = input
            .damage
            .as_ref()
            .filter(|damage| usize::from(damage.image) % MAX_IMAGES == usize::from(number))
        {
            damage.apply(&mut objects);
        }
        parent = Some(Arc::new(MemoryStore::new(number, objects, parent)));
    }
    let Some(newest) = parent else { return };
    let store: Arc<dyn ImageStore> = newest;
    // What a raw entry means is not modelled.
    let has_raw = input.images.iter().flat_map(|image| &image.entries).any(|entry| entry.raw.is_some());
    let is_intact = input.damage.is_none() && !has_raw;
    match ImageChain::open(&store).and_then(|chain| Ok((chain.files()?, chain))) {
        Ok((files, chain)) => {
            for file in &files {
                let content = read(&chain, file);
                if is_intact {
                    assert_eq!(Some(content), model);
                }
            }
            assert!(!is_intact || files.len() == 1);
        }
        Err(error) => assert!(!is_intact || model.is_none(), "a valid chain was refused: {error}"),
    }
}

/// The first byte of each page, if a page is filled with it.
fn read(chain: &ImageChain, file: &ImageFile) -> BTreeMap<u64, u8> {
    let mut content = BTreeMap::new();
    let mut reader = chain.reader(file.inode.shmid);
    let mut end = 0;
    for extent in &file.extents {
        assert!(extent.range.start().0 >= end && !extent.range.is_empty(), "{extent:?} after page {end}");
        end = extent.range.end().0;
        assert!(end <= file.inode.size.div_ceil(PAGE_BYTES), "{extent:?} in {} bytes", file.inode.size);
        let mut left = *extent;
        while !left.range.is_empty() {
            let bytes = reader.read(left).unwrap();
            let pages = to_u64(bytes.len()) / PAGE_BYTES;
            assert!(pages > 0 && to_u64(bytes.len()) == pages * PAGE_BYTES && pages <= left.range.len());
            for (page, bytes) in (left.range.start().0..).zip(bytes.chunks(4096)) {
                content.insert(page, bytes[0]);
            }
            left.position += pages;
            left.range = PageRange::at(left.range.start().plus(pages), left.range.len() - pages);
        }
    }
    content
}

impl ImageDraft {
    /// Makes the objects. Returns the content that the chain has then.
    fn build(
        &self,
        number: u8,
        before: Option<&BTreeMap<u64, u8>>,
        objects: &mut BTreeMap<String, Vec<u8>>,
    ) -> Model {
        let mut pagemap = header(ImageKind::Pagemap);
        append_entry(&mut pagemap, &PagemapHead { pages_id: 1 });
        let (mut content, mut pages) = (Some(BTreeMap::new()), Vec::new());
        let mut at = 0;
        for draft in &self.entries {
            if let Some((vaddr, count, flags)) = draft.raw {
                append_entry(&mut pagemap, &PagemapEntry::new(vaddr, count, flags));
                continue;
            }
            let (start, count) = (at + u64::from(draft.skip % 16), u64::from(draft.pages % 8));
            at = start + count;
            let flags = if draft.in_parent { PAGE_IN_PARENT } else { PAGE_PRESENT };
            append_entry(&mut pagemap, &PagemapEntry::new(start * PAGE_BYTES, count, flags));
            if count == 0 || at > PAGES {
                content = None;
            }
            for page in start..at {
                let inherited = before.and_then(|before| before.get(&page).copied());
                // Differs from page to page and from image to image.
                let own = number.wrapping_mul(101) ^ low_u8(page);
                let fill = if draft.in_parent { inherited } else { Some(own) };
                match (fill, &mut content) {
                    (Some(fill), Some(content)) => drop(content.insert(page, fill)),
                    _ => content = None,
                }
                if !draft.in_parent {
                    pages.extend(std::iter::repeat_n(fill.unwrap_or(0), 4096));
                }
            }
        }
        let mut memfds = header(ImageKind::Memfd);
        let size = PAGES * PAGE_BYTES - u64::from(self.odd_size);
        let inode = MemfdInodeEntry {
            name: "ram".to_owned(),
            size,
            shmid: SHMID,
            inode_id: 1,
            ..MemfdInodeEntry::default()
        };
        append_entry(&mut memfds, &inode);
        let mut inventory = header(ImageKind::Inventory);
        append_entry(&mut inventory, &InventoryEntry { img_version: InventoryEntry::VERSION });
        for (name, bytes) in [
            ("inventory.img".to_owned(), inventory),
            ("memfd.img".to_owned(), memfds),
            (format!("pagemap-shmem-{SHMID}.img"), pagemap),
            ("pages-1.img".to_owned(), pages),
        ] {
            objects.insert(name, bytes);
        }
        // A parent that is invalid makes its children invalid.
        before.and(content)
    }
}

impl Damage {
    fn apply(&self, objects: &mut BTreeMap<String, Vec<u8>>) {
        let number = usize::from(self.object) % objects.len();
        let Some(object) = objects.values_mut().nth(number) else { return };
        let at = usize::from(self.at).min(object.len());
        match object.get_mut(at) {
            Some(byte) if self.change != 0 => *byte ^= self.change,
            _ => object.truncate(at),
        }
    }
}
