// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Finds the pages of a file that can be written without a page table entry: pages that are pinned for DMA, and pages with more
 * references than the page cache and their mappings explain. Also counts the writable mappings of a file.
 *
 * Unlike page_state.bpf.c, find_pins interprets what it reads: its answer is one bit for each page and mostly 0, and copying the
 * counters would cost more than evaluating them.
 *
 * The programs are raw tracepoint programs that are never attached, only run on demand; see page_state.bpf.c. The counters of a
 * page are valid for the moment at which they were read. A pin that exists throughout the run is always found, because a pinned
 * page leaves neither its slot nor its folio.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "pin_record.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_pin_record);
} pins SEC(".maps"); /* resized by the loader */

enum verdict { UNPINNED, EXTRA_REFERENCE, DMA };

struct search {
	__u64 head;
	__u32 head_shift;
	bool hugetlb;
	__u64 block; /* the first block */
	/* Cache: the folio that was examined last. Adjacent pages of a file mostly belong to one folio. */
	__u64 last;
	enum verdict verdict;
	/* Slots of a node above the leaves, of a leaf, and a second copy of either. */
	__u64 upper[FDMAP_SLOTS];
	__u64 leaf[FDMAP_SLOTS];
	__u64 again[FDMAP_SLOTS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct search);
} searches SEC(".maps");

static __always_inline struct search *this_search(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&searches, &zero);
}

/* linux/xarray.h */
#define XA_RETRY_ENTRY 1026

/* References that a pin adds to a small folio: GUP_PIN_COUNTING_BIAS of linux/mm.h. */
#define PIN_BIAS 1024

/* Number of pages in a large folio; 0 if this kernel does not store it. */
static __always_inline __u32 pages_of(__u64 address)
{
	struct folio___with_prefix *older = (void *)address;
	struct folio *folio = (void *)address;
	__u32 pages = 0;

	if (bpf_core_field_exists(folio->_nr_pages))
		bpf_core_read(&pages, sizeof(pages), &folio->_nr_pages);
	else if (bpf_core_field_exists(older->_folio_nr_pages))
		bpf_core_read(&pages, sizeof(pages), &older->_folio_nr_pages);
	return pages;
}

/* Both counters of a small folio, which share one 64-bit word that is read in one access. */
struct page_counters {
	__s32 mappings;
	__s32 references;
};

/* Reads the flags and the counters of a page. Returns false if they cannot be read, or have an unexpected layout. */
static __always_inline bool read_page(__u64 address, __u64 *flags, struct page_counters *counters)
{
	struct page___with_memdesc_flags *newer = (void *)address;
	struct page___with_plain_flags *older = (void *)address;
	struct page *page = (void *)address;
	__u64 word;

	if (__builtin_preserve_field_info(page->_mapcount, BPF_FIELD_BYTE_OFFSET) % sizeof(word) ||
	    __builtin_preserve_field_info(page->_refcount, BPF_FIELD_BYTE_OFFSET) !=
		    __builtin_preserve_field_info(page->_mapcount, BPF_FIELD_BYTE_OFFSET) + sizeof(__s32))
		return false;
	if (!read_word(flags, bpf_core_field_exists(newer->flags) ? &newer->flags.f : &older->flags) ||
	    !read_word(&word, &page->_mapcount))
		return false;
	__builtin_memcpy(counters, &word, sizeof(word));
	return true;
}

/*
 * Expected references: the page cache holds one for each page of the folio, and each page table entry that maps a part of the
 * folio holds one. While PG_lru is clear, one more is expected: the folio is in a batch on its way to an LRU list, or reclaim or
 * migration isolated it. hugetlb folios are on no LRU list. (PG_private would explain one as well, but neither shmem nor
 * hugetlbfs uses it.)
 *
 * Returns enum verdict. A global function: the verifier checks it once, not once for each of its callers' states.
 */
__noinline int examine(bool hugetlb, __u64 address)
{
	struct page *page = (void *)address;
	struct folio *folio = (void *)address;
	struct page_counters now = {};
	__u64 flags = 0;
	__s64 expected, more;
	__s32 before = 0, pins = 0;
	__u32 pages;

	if (!bpf_core_enum_value_exists(enum pageflags, PG_head) || !bpf_core_enum_value_exists(enum pageflags, PG_lru) ||
	    !read_page(address, &flags, &now))
		return EXTRA_REFERENCE;
	expected = 1;
	if (flags >> bpf_core_enum_value(enum pageflags, PG_head) & 1) {
		if (!bpf_core_field_exists(folio->_pincount) || !bpf_core_field_exists(folio->_large_mapcount))
			return EXTRA_REFERENCE;
		if (bpf_core_read(&pins, sizeof(pins), &folio->_pincount))
			return EXTRA_REFERENCE;
		if (pins)
			return DMA;
		pages = pages_of(address);
		/* Read the mappings before and after the references: a mapping takes its reference first and drops it last, but
		 * may be created or removed between two reads. */
		if (!pages || bpf_core_read(&before, sizeof(before), &folio->_large_mapcount) ||
		    bpf_core_read(&now.references, sizeof(now.references), &page->_refcount) ||
		    bpf_core_read(&now.mappings, sizeof(now.mappings), &folio->_large_mapcount) || before != now.mappings)
			return EXTRA_REFERENCE;
		expected = pages;
	}
	/* Mapping counters start at -1. A folio without references is being migrated or freed, or does not exist. */
	if (now.mappings < -1 || !now.references)
		return EXTRA_REFERENCE;
	expected += now.mappings + 1;
	if (!hugetlb && !(flags >> bpf_core_enum_value(enum pageflags, PG_lru) & 1))
		expected++;
	more = now.references - expected;
	/* Enough pins overflow the counter, which then is negative. */
	if (now.references < 0 || more >= PIN_BIAS)
		return DMA;
	return more > 0 ? EXTRA_REFERENCE : UNPINNED;
}

static __always_inline enum verdict verdict_of(struct search *s, __u64 folio)
{
	if (s->last != folio) {
		s->verdict = examine(s->hugetlb, folio);
		s->last = folio;
	}
	return s->verdict;
}

static __always_inline void note(struct fdmap_pin_record *record, enum verdict verdict, __u64 mask)
{
	if (verdict == DMA)
		record->dma |= mask;
	else if (verdict == EXTRA_REFERENCE)
		record->extra_reference |= mask;
}

/* Notes the pages of an entry. A value entry is a swapped page; any other entry with low bits 10 is a page in migration. */
static __always_inline void note_entry(struct search *s, struct fdmap_pin_record *record, __u64 entry, __u64 mask)
{
	if (is_folio(entry))
		note(record, verdict_of(s, entry), mask);
	else if ((entry & 3) == 2)
		note(record, EXTRA_REFERENCE, mask);
}

static __always_inline bool copy_slots(__u64 *to, __u64 node_entry)
{
	struct xa_node *node = (void *)(node_entry - 2);

	return !bpf_probe_read_kernel(to, FDMAP_SLOTS * sizeof(__u64), &node->slots);
}

struct leaf_context {
	struct fdmap_pin_record *record;
	__u64 rest; /* requested pages that are not examined yet, shifted to bit 0 */
};

/* Slots that one step examines. Calling a step costs as much as examining a page. */
#define SLOTS_PER_STEP 8

static long pages_step(__u32 nth, void *data)
{
	struct leaf_context *c = data;
	struct search *s = this_search();
	__u64 rest = c->rest;
	__u32 first = (nth * SLOTS_PER_STEP) & (FDMAP_SLOTS - SLOTS_PER_STEP);

	if (!rest || !s)
		return 1;
	c->rest = rest >> SLOTS_PER_STEP;
	if (!(rest & ((1 << SLOTS_PER_STEP) - 1)))
		return 0;
#pragma unroll
	for (__u32 i = 0; i < SLOTS_PER_STEP; i++) {
		__u64 entry = s->leaf[first + i];

		if (!(rest >> i & 1))
			continue;
		if (is_sibling(entry))
			entry = s->leaf[(entry >> 2) & (FDMAP_SLOTS - 1)];
		note_entry(s, c->record, entry, 1ULL << (first + i));
	}
	return 0;
}

static long compare_step(__u32 i, void *data)
{
	struct leaf_context *c = data;
	struct search *s = this_search();

	if (!s)
		return 1;
	i &= FDMAP_SLOTS - 1;
	if (s->leaf[i] != s->again[i])
		c->record->extra_reference |= c->record->requested & 1ULL << i;
	return 0;
}

/*
 * True if the second copy of a node equals the first. A global function, and not unrolled completely, because kernels before 6.13
 * limit the stack of all nested calls to 512 bytes: inlined and unrolled, the loop spills 64 words in each of two functions.
 */
__noinline int is_copy_equal(bool upper)
{
	struct search *s = this_search();
	__u64 differences = 0;

	if (!s)
		return false;
#pragma unroll 4
	for (int i = 0; i < FDMAP_SLOTS; i++)
		differences |= (upper ? s->upper[i] : s->leaf[i]) ^ s->again[i];
	return !differences;
}

static __always_inline void examine_leaf(struct search *s, struct fdmap_pin_record *record, __u64 node_entry)
{
	struct leaf_context c = { .record = record, .rest = record->requested };

	if (!copy_slots(s->leaf, node_entry)) {
		record->extra_reference |= record->requested;
		return;
	}
	bpf_loop(FDMAP_SLOTS / SLOTS_PER_STEP, pages_step, &c, 0);
	if (!copy_slots(s->again, node_entry))
		record->extra_reference |= record->requested;
	else if (!is_copy_equal(false))
		bpf_loop(FDMAP_SLOTS, compare_step, &c, 0);
}

struct block_context {
	__u32 nr;   /* index of the block in this run */
	__u64 node; /* node above the leaves; 0 if entry covers the whole block */
	__u64 entry;
	bool alone; /* the whole tree is one leaf (node) or one page (entry) */
};

static long leaf_step(__u32 i, void *data)
{
	struct block_context *c = data;
	struct search *s = this_search();
	__u32 index = c->nr * FDMAP_SLOTS + i;
	struct fdmap_pin_record *record = bpf_map_lookup_elem(&pins, &index);
	__u64 entry;

	if (!s || !record || (c->alone && i))
		return 1;
	if (!record->requested)
		return 0;
	if (c->alone) {
		if (c->node)
			examine_leaf(s, record, c->node);
		else
			note_entry(s, record, c->entry, record->requested & 1);
		return 0;
	}
	if (!c->node) {
		note_entry(s, record, c->entry, record->requested);
		return 0;
	}
	i &= FDMAP_SLOTS - 1;
	entry = s->upper[i];
	if (is_sibling(entry))
		entry = s->upper[(entry >> 2) & (FDMAP_SLOTS - 1)];
	if (is_node(entry))
		examine_leaf(s, record, entry);
	else
		note_entry(s, record, entry, record->requested);
	return 0;
}

static long upper_compare_step(__u32 i, void *data)
{
	struct block_context *c = data;
	struct search *s = this_search();
	__u32 index = c->nr * FDMAP_SLOTS + i;
	struct fdmap_pin_record *record = bpf_map_lookup_elem(&pins, &index);

	if (!s || !record)
		return 1;
	i &= FDMAP_SLOTS - 1;
	if (s->upper[i] != s->again[i])
		record->extra_reference |= record->requested;
	return 0;
}

/* Descends from the head to the node above the leaves, or to the entry that covers the block. */
static __always_inline void descend(struct search *s, __u64 base, struct block_context *c)
{
	__u32 shift = s->head_shift + FDMAP_SHIFT; /* entry stands for 1 << shift pages */
	__u64 entry = s->head;
	int level;

	c->node = c->entry = 0;
	c->alone = false;
	if (!is_node(entry)) {
		/* Without a node, the head is the entry of page 0. */
		c->entry = base ? 0 : entry;
		c->alone = true;
		return;
	}
	/* Pages beyond the range of the head are holes. */
	if (shift < 64 && base >> (shift & 63))
		return;
	for (level = 0; level < MAX_LEVELS; level++) {
		struct xa_node *node = (void *)(entry - 2);

		if (shift <= 2 * FDMAP_SHIFT) {
			c->node = entry;
			c->alone = shift <= FDMAP_SHIFT;
			return;
		}
		shift -= FDMAP_SHIFT;
		entry = XA_RETRY_ENTRY; /* if the read fails: neither a hole nor unpinned */
		bpf_core_read(&entry, sizeof(entry), &node->slots[(base >> (shift & 63)) & (FDMAP_SLOTS - 1)]);
		if (is_sibling(entry))
			bpf_core_read(&entry, sizeof(entry), &node->slots[(entry >> 2) & (FDMAP_SLOTS - 1)]);
		c->entry = entry;
		if (!is_node(entry))
			return;
	}
}

static long block_step(__u32 nr, void *data)
{
	struct search *s = this_search();
	struct block_context c = { .nr = nr };

	if (!s)
		return 1;
	descend(s, (s->block + nr) << (2 * FDMAP_SHIFT), &c);
	if (c.node && !c.alone && !copy_slots(s->upper, c.node)) {
		c.node = 0;
		c.entry = XA_RETRY_ENTRY;
	}
	if (c.node || c.entry)
		bpf_loop(FDMAP_SLOTS, leaf_step, &c, 0);
	if (c.node && !c.alone && (!copy_slots(s->again, c.node) || !is_copy_equal(true)))
		bpf_loop(FDMAP_SLOTS, upper_compare_step, &c, 0);
	return 0;
}

/* Arguments: descriptor, first block (of 4096 pages), number of blocks, 1 for a hugetlb file. Returns enum fdmap_status. */
SEC("raw_tp")
int find_pins(struct bpf_raw_tracepoint_args *ctx)
{
	struct address_space *mapping = NULL;
	struct search *s = this_search();
	int status;

	if (!s)
		return FDMAP_STATUS_FAULT;
	status = check_nodes();
	if (status == FDMAP_STATUS_OK)
		status = find_mapping(ctx->args[0], &mapping);
	if (status != FDMAP_STATUS_OK)
		return status;
	s->block = ctx->args[1];
	s->hugetlb = ctx->args[3];
	s->last = 0;
	s->head = (__u64)BPF_CORE_READ(mapping, i_pages.xa_head);
	s->head_shift = 0;
	if (is_node(s->head)) {
		struct xa_node *node = (void *)(s->head - 2);
		unsigned char shift = 0;

		if (bpf_core_read(&shift, sizeof(shift), &node->shift))
			return FDMAP_STATUS_FAULT;
		s->head_shift = shift;
	}
	bpf_loop(ctx->args[2], block_step, NULL, 0);
	return FDMAP_STATUS_OK;
}

/* Argument: descriptor. Returns the number of shared mappings that may ever write, or a negative enum fdmap_status. */
SEC("raw_tp")
int writable_mappings(struct bpf_raw_tracepoint_args *ctx)
{
	struct address_space *mapping = NULL;
	int status = find_mapping(ctx->args[0], &mapping);
	int count = 0;

	if (status != FDMAP_STATUS_OK)
		return -status;
	if (!bpf_core_field_exists(mapping->i_mmap_writable))
		return -FDMAP_STATUS_LAYOUT;
	if (bpf_core_read(&count, sizeof(count), &mapping->i_mmap_writable))
		return -FDMAP_STATUS_FAULT;
	/* A negative count means that such mappings are denied (F_SEAL_WRITE). */
	return count < 0 ? 0 : count;
}
