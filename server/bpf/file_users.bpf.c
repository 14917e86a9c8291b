// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Counts what refers to the dentry of a file. Every open file description holds a reference: also one that is mapped, in
 * flight in a socket, or used by an io_uring or a loop device. The program does not interpret the counts: Rust does
 * (probe/dentry.rs).
 *
 * dentry_references is a raw tracepoint program that is never attached, only run on demand (BPF_PROG_TEST_RUN).
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "user_record.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct hlist_node {
	struct hlist_node *next;
};
struct hlist_head {
	struct hlist_node *first;
};
struct hlist_bl_node {
	struct hlist_bl_node **pprev;
};
struct inode {
	unsigned int i_nlink;
	struct hlist_head i_dentry;
};
struct lockref {
	int count;
};
struct dentry {
	struct hlist_bl_node d_hash;
	struct inode *d_inode;
	struct lockref d_lockref;
};
struct path {
	struct dentry *dentry;
};
struct file___opened {
	struct path f_path;
};
#pragma clang attribute pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_dentry_record);
} dentries SEC(".maps");

/* The names and dentries of the file. */
struct names {
	__u32 links;
	bool named;
	bool only_dentry;
};

static __always_inline bool read_names(struct dentry *dentry, struct inode *inode, struct names *names)
{
	struct hlist_bl_node **pprev = NULL;
	struct hlist_node *first = NULL, *second = NULL;

	if (bpf_core_read(&names->links, sizeof(names->links), &inode->i_nlink) ||
	    bpf_core_read(&pprev, sizeof(pprev), &dentry->d_hash.pprev) ||
	    bpf_core_read(&first, sizeof(first), &inode->i_dentry.first) || !first ||
	    bpf_core_read(&second, sizeof(second), &first->next))
		return false;
	names->named = pprev != NULL; /* d_unhashed() */
	names->only_dentry = second == NULL;
	return true;
}

static __always_inline int find_dentry(__u64 fd, struct file **file, struct dentry **dentry)
{
	struct file___opened *opened;
	int status = find_file(fd, file);

	if (status != FDMAP_STATUS_OK)
		return status;
	opened = (void *)*file;
	*dentry = BPF_CORE_READ(opened, f_path.dentry);
	return *dentry ? FDMAP_STATUS_OK : FDMAP_STATUS_FAULT;
}

/* Arguments: two descriptors of the calling process, of the same file. Returns enum fdmap_status. */
SEC("raw_tp")
int dentry_references(struct bpf_raw_tracepoint_args *ctx)
{
	struct dentry *dentry = NULL, *other_dentry = NULL;
	struct file *file = NULL, *other_file = NULL;
	struct names before = {}, after = {};
	struct fdmap_dentry_record *r;
	struct inode *inode = NULL;
	__u32 zero = 0;
	int status;

	r = bpf_map_lookup_elem(&dentries, &zero);
	if (!r)
		return FDMAP_STATUS_FAULT;
	if (!bpf_core_field_exists(struct file___opened, f_path) || !bpf_core_field_exists(dentry->d_lockref.count) ||
	    !bpf_core_field_exists(dentry->d_hash.pprev) || !bpf_core_field_exists(dentry->d_inode) ||
	    !bpf_core_field_exists(inode->i_dentry.first) || !bpf_core_field_exists(inode->i_nlink))
		return FDMAP_STATUS_LAYOUT;
	status = find_dentry(ctx->args[0], &file, &dentry);
	if (status == FDMAP_STATUS_OK)
		status = find_dentry(ctx->args[1], &other_file, &other_dentry);
	if (status != FDMAP_STATUS_OK)
		return status;
	inode = BPF_CORE_READ(dentry, d_inode);
	if (!inode || !read_names(dentry, inode, &before) ||
	    bpf_core_read(&r->references, sizeof(r->references), &dentry->d_lockref.count) ||
	    !read_names(dentry, inode, &after))
		return FDMAP_STATUS_FAULT;
	r->descriptions = 1 + (other_dentry == dentry && other_file != file);
	r->links = after.links;
	r->named = after.named;
	r->only_dentry = after.only_dentry;
	r->changed = before.links != after.links || before.named != after.named ||
		     before.only_dentry != after.only_dentry;
	return FDMAP_STATUS_OK;
}
