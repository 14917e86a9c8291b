/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The records that page_state.bpf.c writes. This header is their only definition: the build generates the Rust types from it
 * (server/build.rs).
 */
#ifndef FDMAP_PAGE_RECORD_H
#define FDMAP_PAGE_RECORD_H

#include "kernel.h"

/* A copy of one XArray node. */
struct fdmap_node_record {
	__u64 base;  /* index of the first page under the node */
	__u32 shift; /* each slot covers 1 << shift pages; 0 in a leaf */
	__u16 fault; /* not 0 if the node could not be read; the slots are then undefined */
	/*
	 * Not 0 if a change of the tree was in progress between the copies: then equal copies may show a part of it. Always 0 where
	 * the lock of the tree has no lock word.
	 */
	__u16 changing;
	__u64 slots[FDMAP_SLOTS];
	/*
	 * A second copy of the slots, made after the first copy and after the attributes, of leaves and of nodes one level above. If
	 * both copies are equal, all 64 slots held these values at the moment between the copies.
	 */
	__u64 again[FDMAP_SLOTS];
};

/* Bits of fdmap_page_attributes.known. */
enum fdmap_known {
	FDMAP_KNOWN_FLAGS = 1,
	FDMAP_KNOWN_MAP_COUNT = 2,
	FDMAP_KNOWN_REFCOUNT = 4,
	FDMAP_KNOWN_FOLIO = 8,  /* entire_map_count and pin_count; the folio is large */
	FDMAP_KNOWN_LARGE = 16, /* large_map_count */
};

struct fdmap_page_attributes {
	__u64 flags;            /* page->flags of the folio, in this kernel's bit numbers */
	__s32 map_count;        /* page->_mapcount; -1 if the page is not mapped */
	__s32 refcount;         /* folio->_refcount */
	__s32 entire_map_count; /* folio->_entire_mapcount; -1 if no entry maps the whole folio */
	__s32 pin_count;        /* folio->_pincount */
	__s32 large_map_count;  /* folio->_large_mapcount: mappings of all pages of the folio; -1 if there are none */
	enum fdmap_known known;
};

/* Attributes of the 64 pages from base on. */
struct fdmap_attributes_record {
	__u64 base;
	__u64 pad;
	struct fdmap_page_attributes pages[FDMAP_SLOTS];
};

/* The result of one run of walk_file. */
struct fdmap_walk_result {
	__u64 head;              /* xa_head of the file */
	__u64 next;              /* the first page that was not walked; beyond the last requested page if all were */
	__u32 head_shift;        /* if head is a node: each of its slots covers 1 << head_shift pages */
	__u32 records;           /* node records written, counted from the first allowed one */
	__u32 attributes;        /* attributes records written */
	enum fdmap_status status;
};

#endif
