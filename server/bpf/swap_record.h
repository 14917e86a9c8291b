/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The records of swap_slots.bpf.c. This header is their only definition: the build generates the Rust types from it
 * (server/build.rs).
 */
#ifndef FDMAP_SWAP_RECORD_H
#define FDMAP_SWAP_RECORD_H

/* Bytes of a symbol's name, the final 0 included. */
#define FDMAP_SYMBOL_BYTES 32
/* Bytes of a function that are copied. */
#define FDMAP_TEXT_BYTES 256

/* A symbol of the kernel. */
struct fdmap_symbol_record {
	char name[FDMAP_SYMBOL_BYTES]; /* written by the service */
	__u64 address;                 /* 0 if the kernel has no such symbol */
	__u64 copied;                  /* 1: text has the first bytes of the function */
	__u8 text[FDMAP_TEXT_BYTES];
};

/* One entry of swap_info. */
struct fdmap_area_record {
	__u64 flags;  /* swap_info_struct.flags; 0 if there is no area of this type */
	__u64 pages;  /* pages that can be filled */
	__u64 inode;  /* inode number of the file or device node */
	__u32 device; /* bd_dev of the block device: major << 20 | minor; 0 if there is none */
	__u32 pad;
};

enum fdmap_slot_content {
	FDMAP_SLOT_UNKNOWN, /* in the swap cache, not in use, or unreadable */
	FDMAP_SLOT_DEVICE,
	FDMAP_SLOT_ZERO,    /* marked as zero: not on the device */
};

struct fdmap_slot_record {
	__u64 slot; /* swap type << 58 | swap offset; written by the service */
	enum fdmap_slot_content content;
	__u32 pad;
};

#endif
