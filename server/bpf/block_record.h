/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The records that block_walk.bpf.c writes. This header is their only definition: the build generates the Rust types from it
 * (server/build.rs).
 */
#ifndef FDMAP_BLOCK_RECORD_H
#define FDMAP_BLOCK_RECORD_H

#include "kernel.h"

/* Copies of nodes that one block needs at most: its leaves, and the node above them twice. */
#define FDMAP_BLOCK_COPIES (FDMAP_SLOTS + 2)

/* A block of 4096 pages. Bit n of a bitmap is leaf n: slot n of the node above the leaves. No bit is set in two of the bitmaps. */
struct fdmap_block_record {
	__u64 first;    /* index of the first page */
	__u64 resident; /* leaves whose 64 pages all have a folio, by the counts of the leaf */
	__u64 copied;   /* leaves whose slots were copied; the copies are in ascending order */
	__u64 upper;    /* slots that hold a folio, a value, a sibling or another internal entry instead of a leaf */
	__u32 start;    /* index of the first copy; if upper is not 0, two copies of the node above the leaves follow the leaves */
	__u32 careful;  /* not 0 if this record is not an answer: walk_file must walk the block */
};

/* A copy of the slots of one node. */
struct fdmap_slots_copy {
	__u64 slots[FDMAP_SLOTS];
};

/* The result of one run of walk_blocks. */
struct fdmap_blocks_result {
	__u64 next;     /* the first page that was not walked; beyond the last requested page if all were */
	__u32 blocks;   /* block records written */
	__u32 copies;   /* copies of slots written */
	__u32 left_out; /* block records that are not an answer */
	__u32 small;    /* not 0 if the tree has no level above the leaves: walk_file must walk it */
};

#endif
