/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * What page_state.bpf.c writes and probe/record.rs reads: one definition, mirrored there field by field. Sizes are
 * asserted on both sides and compared with the loaded maps.
 */
#ifndef FDMAP_PAGE_RECORD_H
#define FDMAP_PAGE_RECORD_H

#include "kernel.h"

/* A node of the XArray as it was copied. */
struct fdmap_node_record {
	__u64 base;  /* index of the first page under the node */
	__u32 shift; /* a slot stands for 1 << shift pages; 0 is a leaf */
	__u32 fault; /* not 0: the node could not be read, slots mean nothing */
	__u64 slots[FDMAP_SLOTS];
	/* The slots once more: of a leaf always, of the level above only when attributes were asked for. Read after
	 * the first copy, and after the attributes: where both copies of a leaf are equal, all 64 slots held at the
	 * moment in between. */
	__u64 again[FDMAP_SLOTS];
};

/* Bits of fdmap_page_attributes.known. */
#define FDMAP_KNOWN_FLAGS 1
#define FDMAP_KNOWN_MAP_COUNT 2
#define FDMAP_KNOWN_REFCOUNT 4
#define FDMAP_KNOWN_FOLIO 8 /* entire_map_count and pin_count: the folio is a large one */
#define FDMAP_KNOWN_LARGE 16 /* large_map_count */

struct fdmap_page_attributes {
	__u64 flags;            /* page->flags of the folio, in the kernel's own bit numbers */
	__s32 map_count;        /* page->_mapcount: -1 is none */
	__s32 refcount;         /* of the folio */
	__s32 entire_map_count; /* folio->_entire_mapcount: -1 is none */
	__s32 pin_count;        /* folio->_pincount */
	__s32 large_map_count;  /* folio->_large_mapcount: mappings of all its pages together, -1 is none */
	__u32 known;            /* FDMAP_KNOWN_* */
};

/* Attributes of the 64 pages from base on. */
struct fdmap_attributes_record {
	__u64 base;
	__u64 pad;
	struct fdmap_page_attributes pages[FDMAP_SLOTS];
};

/* What one run came to. */
struct fdmap_walk_result {
	__u64 head;        /* xa_head of the file */
	__u64 next;        /* the first page that was not walked; beyond last when all were */
	__u32 head_shift;  /* if head is a node: a slot of it stands for 1 << head_shift pages */
	__u32 records;     /* node records written, counted from the first one allowed */
	__u32 attributes;  /* attributes records written */
	__u32 status;      /* FDMAP_STATUS_* */
};

_Static_assert(sizeof(struct fdmap_node_record) == 1040, "probe/record.rs");
_Static_assert(sizeof(struct fdmap_page_attributes) == 32, "probe/record.rs");
_Static_assert(sizeof(struct fdmap_attributes_record) == 2064, "probe/record.rs");
_Static_assert(sizeof(struct fdmap_walk_result) == 32, "probe/record.rs");

#endif
