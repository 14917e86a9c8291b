/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The answers of mappers.bpf.c. This header is the only definition: the build generates the Rust types from it
 * (server/build.rs). Kernel addresses in these records identify objects. They never leave the service's process, nor enter a log.
 */
#ifndef FDMAP_MAPPER_RECORD_H
#define FDMAP_MAPPER_RECORD_H

/* One VMA of a file. */
struct fdmap_mapper_record {
	__u64 start;       /* address of the first byte */
	__u64 end;         /* address behind the last byte */
	__u64 page;        /* base page of the file that is mapped at start */
	__u64 flags;       /* vm_flags */
	__u64 mm;          /* kernel address of the address space */
	__u64 userfaultfd; /* kernel address of the userfaultfd context with which the VMA is registered, or 0 */
	__u64 pid;         /* process, in the pid namespace of the service; 0: unknown, or not visible from there */
	/* The node of the tree: compared when the VMA is read again. */
	__u64 node;
	__u64 parent; /* with the color in bit 0 */
	__u64 left;
	__u64 right;
	__u64 lock_seq; /* vm_lock_seq: changes before the VMA can leave the tree */
};

/* Why a run cannot be accepted. */
enum fdmap_rejection {
	FDMAP_REJECTION_LOCKED = 1,  /* the tree is being changed */
	FDMAP_REJECTION_DEPTH = 2,   /* the tree is deeper than a red-black tree can be */
	FDMAP_REJECTION_EDGE = 4,    /* the parent of a node is not the node from which the walk came */
	FDMAP_REJECTION_OTHER = 8,   /* a VMA maps another file by now */
	FDMAP_REJECTION_CHANGED = 16, /* a VMA, its node or the root changed before it was read again */
	FDMAP_REJECTION_LEAVING = 32 /* a VMA is locked for writing, or detached: it may leave the tree */
};

/* The result of one run. */
struct fdmap_mapper_run {
	__u64 private_data;    /* result of private_data, userfaultfd_space and page_tables: a kernel address, or 0 */
	__u64 page_table_bytes; /* result of page_tables */
	__u32 records;         /* number of records that the run wrote or compared */
	__u32 rest;            /* nodes that the next run continues with; 0: the walk is complete */
	__u32 rejections;      /* enum fdmap_rejection; 0: none */
	__s32 writable_before; /* i_mmap_writable before and after */
	__s32 writable_after;
	__u32 pad;
};

#endif
