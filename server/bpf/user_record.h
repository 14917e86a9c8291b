/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The answer of file_users.bpf.c. This header is the only definition: the build generates the Rust type from it
 * (server/build.rs).
 */
#ifndef FDMAP_USER_RECORD_H
#define FDMAP_USER_RECORD_H

/* What refers to the dentry of a file. */
struct fdmap_dentry_record {
	__s32 references;   /* d_lockref.count: one for each open file description, and one for the name of a named dentry */
	__u32 descriptions; /* open file descriptions behind the two given descriptors, of this dentry */
	__u32 links;        /* i_nlink: names of the inode */
	__u32 named;        /* 1: the dentry is one of these names */
	__u32 only_dentry;  /* 1: the inode has no other dentry */
	__u32 changed;      /* 1: one of the last three changed while the program ran */
};

#endif
