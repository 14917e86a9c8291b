// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Walks the page cache XArray of a file of the calling process and copies its nodes. The program does not interpret entries:
 * Rust decodes them (probe/decode.rs).
 *
 * walk_file is a raw tracepoint program that is never attached, only run on demand (BPF_PROG_TEST_RUN). A run holds the RCU read
 * lock, so no node that it reaches is freed before it ends. A run must be short: the caller bounds the number of records.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "page_record.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_node_record);
} nodes SEC(".maps"); /* resized by the loader */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_attributes_record);
} attributes SEC(".maps"); /* resized by the loader */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_walk_result);
} result SEC(".maps");

/* A step writes at most one record for each level and one for each leaf of a block. */
#define STEP_RECORDS (MAX_LEVELS + FDMAP_SLOTS)
/* Steps of one run. A step completes one block of 4096 pages, or one slot above the blocks that has no node. */
#define MAX_STEPS 4096
/* Looks at a lock that is held: some ten of the sections that usual changes take. */
#define MAX_LOOKS 256

struct walk {
	__u64 first; /* requested pages, both inclusive */
	__u64 last;
	__u64 next;  /* the first page that is not walked yet */
	__u64 head;
	__u64 lock; /* address of the lock word; 0: there is none */
	__u64 barrier;
	__u32 head_shift;
	__u32 pad;
	__u32 from;    /* index of the first node record of this run */
	__u32 records; /* index of the next free node record */
	__u32 limit;   /* index after the last node record of this run */
	__u32 attributes; /* index of the next free attributes record */
	__u32 attributes_limit; /* 0 if attributes are not requested */
	/* The last visited node of each level: its first page and the index of its record. */
	__u64 level_base[MAX_LEVELS];
	__u32 level_record[MAX_LEVELS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct walk);
} walks SEC(".maps");

static __always_inline struct walk *this_walk(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&walks, &zero);
}

static __always_inline void copy_slots(struct fdmap_node_record *record, __u64 *to, __u64 node_entry)
{
	struct xa_node *node = (void *)(node_entry - 2);

	if (bpf_probe_read_kernel(to, sizeof(record->slots), &node->slots))
		record->fault = 1;
}

/*
 * Copies the slots of a node again. A section of xa_lock that had stored a part of its changes when the first copy was made is either
 * still in progress when the lock word is read, or has ended, and then the second copy has all of its changes.
 */
static __always_inline void copy_again(struct walk *w, struct fdmap_node_record *record, __u64 node_entry)
{
	if (w->lock) {
		__u32 looks = 0;

		__sync_fetch_and_add(&w->barrier, 1);
		while (is_locked(w->lock) && looks < MAX_LOOKS)
			looks++;
		record->changing = looks == MAX_LOOKS;
		__sync_fetch_and_add(&w->barrier, 1);
	}
	copy_slots(record, record->again, node_entry);
}

static __always_inline struct fdmap_node_record *new_record(struct walk *w, __u64 base, __u32 shift)
{
	__u32 index = w->records;
	struct fdmap_node_record *record = bpf_map_lookup_elem(&nodes, &index);

	if (!record)
		return NULL;
	record->base = base;
	record->shift = shift;
	record->fault = 0;
	record->changing = 0;
	w->records = index + 1;
	return record;
}

struct page_context {
	__u64 folio; /* 0: take the folios from record */
	__u64 page_in_folio;
	struct fdmap_node_record *record;
	struct fdmap_attributes_record *out;
	/* Cache: the folio that was read last, and the attributes that its pages share. */
	__u64 last;
	struct fdmap_page_attributes common;
};

static __always_inline void read_folio(struct fdmap_page_attributes *out, __u64 address)
{
	struct page___with_memdesc_flags *newer = (void *)address;
	struct page___with_plain_flags *older = (void *)address;
	struct page *page = (void *)address;
	struct folio *folio = (void *)address;
	__u64 copy[PAGE_BYTES / 8];
	__u32 known = 0;

	out->known = 0;
	out->flags = 0;
	if (bpf_probe_read_kernel(copy, sizeof(copy), page))
		return;
	FIELD_OF(copy, newer->flags, unsigned long, out->flags, FDMAP_KNOWN_FLAGS);
	if (!bpf_core_field_exists(newer->flags))
		FIELD_OF(copy, older->flags, unsigned long, out->flags, FDMAP_KNOWN_FLAGS);
	FIELD_OF(copy, page->_mapcount, __s32, out->map_count, FDMAP_KNOWN_MAP_COUNT);
	FIELD_OF(copy, page->_refcount, __s32, out->refcount, FDMAP_KNOWN_REFCOUNT);
	if ((known & FDMAP_KNOWN_FLAGS) && bpf_core_enum_value_exists(enum pageflags, PG_head) &&
	    out->flags >> bpf_core_enum_value(enum pageflags, PG_head) & 1) {
		__s32 entire = 0, pins = 0, large = 0;

		if (bpf_core_field_exists(folio->_entire_mapcount) && bpf_core_field_exists(folio->_pincount) &&
		    !bpf_probe_read_kernel(&entire, sizeof(entire), &folio->_entire_mapcount) &&
		    !bpf_probe_read_kernel(&pins, sizeof(pins), &folio->_pincount)) {
			out->entire_map_count = entire;
			out->pin_count = pins;
			known |= FDMAP_KNOWN_FOLIO;
		}
		if (bpf_core_field_exists(folio->_large_mapcount) &&
		    !bpf_probe_read_kernel(&large, sizeof(large), &folio->_large_mapcount)) {
			out->large_map_count = large;
			known |= FDMAP_KNOWN_LARGE;
		}
	}
	out->known = known;
}

static __always_inline void read_attributes(struct page_context *c, struct fdmap_page_attributes *out, __u64 folio,
					    __u64 page_in_folio)
{
	struct page *page = (void *)(folio + page_in_folio * bpf_core_type_size(struct page));

	if (c->last != folio) {
		read_folio(&c->common, folio);
		c->last = folio;
	}
	*out = c->common;
	/* Every page after the first of a folio has its own _mapcount. */
	if (page_in_folio && (out->known & FDMAP_KNOWN_MAP_COUNT) &&
	    bpf_probe_read_kernel(&out->map_count, sizeof(out->map_count), &page->_mapcount))
		out->known &= ~FDMAP_KNOWN_MAP_COUNT;
}

static long page_step(__u32 i, void *data)
{
	struct page_context *c = data;
	struct fdmap_attributes_record *out = c->out;
	__u64 folio = c->folio, page_in_folio = c->page_in_folio + i;

	i &= FDMAP_SLOTS - 1;
	out->pages[i].known = 0;
	if (!folio) {
		struct fdmap_node_record *record = c->record;
		__u64 entry = record->slots[i];

		page_in_folio = 0;
		if (is_sibling(entry)) {
			__u32 first = (entry >> 2) & (FDMAP_SLOTS - 1);

			entry = record->slots[first];
			page_in_folio = i - first;
		}
		if (!is_folio(entry))
			return 0;
		folio = entry;
	}
	read_attributes(c, &out->pages[i], folio, page_in_folio);
	return 0;
}

/* Adds the attributes of 64 pages: those of a leaf (folio is 0), or those under one slot of a multi-slot folio. */
static __always_inline void add_attributes(struct walk *w, __u64 base, struct fdmap_node_record *record,
					   __u64 folio, __u64 page_in_folio)
{
	struct page_context c = { .folio = folio, .page_in_folio = page_in_folio, .record = record };
	__u32 index = w->attributes;

	if (index >= w->attributes_limit)
		return;
	c.out = bpf_map_lookup_elem(&attributes, &index);
	if (!c.out)
		return;
	c.out->base = base;
	w->attributes = index + 1;
	bpf_loop(FDMAP_SLOTS, page_step, &c, 0);
}

static __always_inline void add_leaf(struct walk *w, __u64 node_entry, __u64 base)
{
	struct fdmap_node_record *record = new_record(w, base, 0);

	if (!record)
		return;
	copy_slots(record, record->slots, node_entry);
	if (w->attributes_limit)
		add_attributes(w, base, record, 0, 0);
	copy_again(w, record, node_entry);
}

struct block_context {
	__u64 base;
	struct fdmap_node_record *record;
};

static long leaf_step(__u32 i, void *data)
{
	struct block_context *c = data;
	struct walk *w = this_walk();
	__u64 base = c->base + (__u64)i * FDMAP_SLOTS;
	__u64 entry;

	if (!w)
		return 1;
	if (base > w->last)
		return 1;
	if (base + FDMAP_SLOTS <= w->first)
		return 0;
	i &= FDMAP_SLOTS - 1;
	entry = c->record->slots[i];
	if (is_node(entry)) {
		add_leaf(w, entry, base);
	} else if (w->attributes_limit) {
		__u32 first = i;

		if (is_sibling(entry)) {
			first = (entry >> 2) & (FDMAP_SLOTS - 1);
			entry = c->record->slots[first];
		}
		if (is_folio(entry))
			add_attributes(w, base, c->record, entry, (__u64)(i - first) * FDMAP_SLOTS);
	}
	return 0;
}

/* Walks one block of 4096 pages, or skips one slot above the blocks that has no node. */
static long walk_step(__u32 nr, void *unused)
{
	struct walk *w = this_walk();
	__u64 entry, base = 0;
	__u32 shift;
	int level;

	if (!w || w->next > w->last)
		return 1;
	if (w->limit - w->records < STEP_RECORDS)
		return 1;
	if (w->attributes_limit && w->attributes_limit - w->attributes < FDMAP_SLOTS)
		return 1;
	entry = w->head;
	shift = w->head_shift;
	for (level = 0; level < MAX_LEVELS; level++) {
		struct fdmap_node_record *record;
		__u32 index = w->level_record[level];

		if (shift == 0) {
			add_leaf(w, entry, base);
			w->next = base + FDMAP_SLOTS;
			return 0;
		}
		if (w->level_base[level] == base) {
			record = bpf_map_lookup_elem(&nodes, &index);
			if (!record)
				return 1;
		} else {
			w->level_record[level] = w->records;
			w->level_base[level] = base;
			record = new_record(w, base, shift);
			if (!record)
				return 1;
			copy_slots(record, record->slots, entry);
		}
		if (shift == FDMAP_SHIFT) {
			struct block_context c = { .base = base, .record = record };

			/* The slots of a node that could not be read are undefined. */
			if (!record->fault)
				bpf_loop(FDMAP_SLOTS, leaf_step, &c, 0);
			copy_again(w, record, entry);
			w->next = base + (1 << (2 * FDMAP_SHIFT));
			return 0;
		}
		shift &= 63;
		entry = record->slots[(w->next >> shift) & (FDMAP_SLOTS - 1)];
		base = w->next >> shift << shift;
		if (record->fault || !is_node(entry)) {
			w->next = base + (1ULL << shift);
			return 0;
		}
		shift -= FDMAP_SHIFT;
	}
	return 1;
}

/*
 * Arguments: descriptor, first page, last page, index of the first node record to write, index after the last one, number of
 * attributes records (0 to read no attributes). Returns enum fdmap_status.
 */
SEC("raw_tp")
int walk_file(struct bpf_raw_tracepoint_args *ctx)
{
	struct address_space *mapping = NULL;
	struct fdmap_walk_result *r;
	struct walk *w = this_walk();
	__u32 zero = 0, level;

	r = bpf_map_lookup_elem(&result, &zero);
	if (!w || !r)
		return FDMAP_STATUS_FAULT;
	r->records = 0;
	r->attributes = 0;
	r->status = check_nodes();
	if (r->status == FDMAP_STATUS_OK)
		r->status = find_mapping(ctx->args[0], &mapping);
	if (r->status != FDMAP_STATUS_OK)
		return r->status;

	w->first = w->next = ctx->args[1];
	w->last = ctx->args[2];
	w->from = w->records = ctx->args[3];
	w->limit = ctx->args[4];
	w->attributes = 0;
	w->attributes_limit = ctx->args[5];
	w->lock = has_lock_word() ? lock_word_of(mapping) : 0;
	w->head = (__u64)BPF_CORE_READ(mapping, i_pages.xa_head);
	w->head_shift = 0;
	for (level = 0; level < MAX_LEVELS; level++)
		w->level_base[level] = ~0ULL;
	if (is_node(w->head)) {
		struct xa_node *node = (void *)(w->head - 2);
		unsigned char shift = 0;
		__u64 pages;

		if (bpf_core_read(&shift, sizeof(shift), &node->shift)) {
			r->status = FDMAP_STATUS_FAULT;
			return r->status;
		}
		w->head_shift = shift;
		/* Pages beyond the range of the head are holes: there is nothing to walk. */
		if (shift + FDMAP_SHIFT < 64) {
			pages = 1ULL << ((shift + FDMAP_SHIFT) & 63);
			if (w->last >= pages)
				w->last = pages - 1;
		}
		bpf_loop(MAX_STEPS, walk_step, NULL, 0);
	} else {
		w->next = w->last + 1;
	}
	/* If all pages under the head were walked, then so were all requested pages. */
	r->next = w->next > w->last ? ctx->args[2] + 1 : w->next;
	r->head = w->head;
	r->head_shift = w->head_shift;
	r->records = w->records - w->from;
	r->attributes = w->attributes;
	return FDMAP_STATUS_OK;
}
