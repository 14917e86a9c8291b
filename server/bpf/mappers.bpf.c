// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Lists the VMAs that map a file, in all processes: walks the interval tree mapping->i_mmap without its lock. No process is
 * asked, so that none can delay the walk, and processes of other pid and mount namespaces are found.
 *
 * The programs are raw tracepoint programs that are never attached, only run on demand; see page_state.bpf.c. A run holds the
 * RCU read lock. It handles at most as many VMAs as the map `mappers` has room for, and keeps the nodes that it did not visit
 * for the next run.
 *
 * The tree may change during the walk, and the memory of a VMA may become that of another VMA (SLAB_TYPESAFE_BY_RCU). So the
 * result counts only if no run reports a rejection and i_mmap_writable stayed the same and equals the number of writable VMAs
 * found (probe/mappers/accept.rs). The single conditions are not sufficient: under load, a walk that only compares the counts
 * misses VMAs.
 *
 * A VMA leaves the tree only after it was locked for writing, which changes its vm_lock_seq until the lock of its address space
 * is released, and after it was detached, if it leaves later than that. So a VMA that is neither locked nor detached and keeps
 * its vm_lock_seq from one reading to the next is in the tree at both times and in between, or at neither.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "mapper_record.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

/* Nodes that wait for their visit. A red-black tree of 2^31 nodes is at most 64 levels high, and the stack holds one node of
 * each level. */
#define MAX_DEPTH 64

/* linux/mm.h */
#define VM_SHARED 0x8
#define VM_MAYWRITE 0x20

/* RWSEM_WRITER_LOCKED of kernel/locking/rwsem.c */
#define WRITER_LOCKED 1

/* PIDTYPE_TGID of linux/pid_types.h */
#define TGID 1

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct long_counter { /* atomic_long_t */
	long counter;
};
struct rb_node {
	unsigned long __rb_parent_color;
	struct rb_node *rb_right;
	struct rb_node *rb_left;
};
struct rb_root {
	struct rb_node *rb_node;
};
struct rb_root_cached {
	struct rb_root rb_root;
};
struct rw_semaphore { /* PREEMPT_RT has no count */
	struct long_counter count;
};
struct address_space___mapped {
	struct counter i_mmap_writable;
	struct rb_root_cached i_mmap;
	struct rw_semaphore i_mmap_rwsem;
};
struct file___private {
	void *private_data;
};
struct pid_namespace {
	unsigned int level;
};
struct upid {
	int nr;
	struct pid_namespace *ns;
};
struct pid {
	unsigned int level;
	struct upid numbers[1];
};
struct signal_struct {
	struct pid *pids[2];
};
struct task_struct___process {
	struct signal_struct *signal;
	struct pid *thread_pid;
};
struct mm_struct {
	struct task_struct___process *owner; /* CONFIG_MEMCG */
};
struct mm_struct___with_tables {
	struct long_counter pgtables_bytes;
};
struct userfaultfd_ctx {
	void *mm;
};
struct sequence_count { /* seqcount_t */
	unsigned int sequence;
};
struct mm_struct___with_plain_seq { /* before 6.13 */
	int mm_lock_seq;
};
struct mm_struct___with_seqcount {
	struct sequence_count mm_lock_seq;
};
struct vm_area_struct___locked { /* CONFIG_PER_VMA_LOCK, since 6.4 */
	int vm_lock_seq;
};
struct vm_area_struct___detachable { /* before 6.15 */
	bool detached;
};
struct reference_count { /* refcount_t */
	struct counter refs;
};
struct vm_area_struct___counted {
	struct reference_count vm_refcnt; /* 0: detached */
};
struct vm_userfaultfd_ctx {
	void *ctx;
};
struct vma_node {
	struct rb_node rb;
};
struct vm_area_struct {
	unsigned long vm_start;
	unsigned long vm_end;
	unsigned long vm_pgoff;
	unsigned long vm_flags;
	struct mm_struct *vm_mm;
	struct file *vm_file;
	struct vma_node shared;
	struct vm_userfaultfd_ctx vm_userfaultfd_ctx; /* CONFIG_USERFAULTFD */
};
#pragma clang attribute pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_mapper_record);
} mappers SEC(".maps"); /* resized by the loader */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_mapper_run);
} mapper_runs SEC(".maps");

struct visit {
	__u64 node;
	__u64 parent; /* the node from which the walk comes; 0 for the root */
};

/* The walk, which continues over several runs. */
struct walk {
	__u64 mapping;
	/* Active pid namespace of the service. */
	__u64 ns;
	__u32 ns_level;
	__u32 depth;
	__u64 root;
	struct visit stack[MAX_DEPTH];
	struct fdmap_mapper_record again;
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

static __always_inline struct fdmap_mapper_run *this_run(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mapper_runs, &zero);
}

/* The 32 bits at an address. */
static __always_inline __u32 half_at(const void *address)
{
	__u64 word = word_at(address);
	__u32 halves[2];

	__builtin_memcpy(halves, &word, sizeof(word));
	return halves[0];
}

/* The pid that the owner of an address space has in the pid namespace of the service; 0 if it has none. The owner may be
 * changing or missing, as while a process is created: the pid is a hint. */
static __always_inline __u32 pid_of(const struct walk *w, __u64 mm_address)
{
	struct mm_struct *mm = (void *)mm_address;
	struct task_struct___process *owner;
	struct signal_struct *signal;
	struct upid *number;
	struct pid *pid;

	if (!bpf_core_field_exists(mm->owner))
		return 0;
	owner = (void *)word_at(&mm->owner);
	if (!owner)
		return 0;
	signal = (void *)word_at(&owner->signal);
	pid = (void *)word_at(&signal->pids[TGID]);
	if (!pid || half_at(&pid->level) < w->ns_level)
		return 0;
	number = (void *)pid + bpf_core_field_offset(pid->numbers) + (w->ns_level & 31) * bpf_core_type_size(struct upid);
	return word_at(&number->ns) == w->ns ? half_at(&number->nr) : 0;
}

static __always_inline struct vm_area_struct *vma_of(__u64 node)
{
	return (void *)(node - bpf_core_field_offset(struct vm_area_struct, shared.rb));
}

/* True if a VMA is locked for writing or detached. */
static __always_inline bool is_leaving(__u64 node, const struct fdmap_mapper_record *r)
{
	struct vm_area_struct___detachable *detachable = (void *)vma_of(node);
	struct vm_area_struct___counted *counted = (void *)vma_of(node);
	struct mm_struct___with_seqcount *mm = (void *)r->mm;
	struct mm_struct___with_plain_seq *plain = (void *)r->mm;

	if (bpf_core_field_exists(counted->vm_refcnt)) {
		if (!half_at(&counted->vm_refcnt.refs.counter))
			return true;
	} else if (bpf_core_field_exists(detachable->detached) && half_at(&detachable->detached) & 0xff) {
		return true;
	}
	if (bpf_core_field_exists(mm->mm_lock_seq.sequence))
		return half_at(&mm->mm_lock_seq.sequence) == r->lock_seq;
	return half_at(&plain->mm_lock_seq) == r->lock_seq;
}

/* Reads a VMA, without the process that has it. */
static __always_inline void read_vma(struct fdmap_mapper_record *r, __u64 node)
{
	struct vm_area_struct *vma = vma_of(node);
	struct vm_area_struct___locked *locked = (void *)vma;

	r->node = node;
	r->parent = word_at(&vma->shared.rb.__rb_parent_color);
	r->left = word_at(&vma->shared.rb.rb_left);
	r->right = word_at(&vma->shared.rb.rb_right);
	r->start = word_at(&vma->vm_start);
	r->end = word_at(&vma->vm_end);
	r->page = word_at(&vma->vm_pgoff);
	r->flags = word_at(&vma->vm_flags);
	r->mm = word_at(&vma->vm_mm);
	r->lock_seq = half_at(&locked->vm_lock_seq);
}

/* True if the VMA maps the walked file. */
static __always_inline bool maps_file(const struct walk *w, __u64 node)
{
	struct file *file = (void *)word_at(&vma_of(node)->vm_file);

	return file && word_at(&file->f_mapping) == w->mapping;
}

static __always_inline void push(struct walk *w, struct fdmap_mapper_run *run, __u64 node, __u64 parent)
{
	__u32 at = w->depth;

	if (!node)
		return;
	if (at >= MAX_DEPTH) {
		run->rejections |= FDMAP_REJECTION_DEPTH;
		return;
	}
	w->stack[at & (MAX_DEPTH - 1)] = (struct visit){ .node = node, .parent = parent };
	w->depth = at + 1;
}

/* Visits one node: copies its VMA, and puts its children on the stack. */
static long visit_step(__u32 i, void *data)
{
	struct fdmap_mapper_record *r = bpf_map_lookup_elem(&mappers, &i);
	struct fdmap_mapper_run *run = this_run();
	struct walk *w = this_walk();
	struct visit next;

	if (!w || !run || !r || !w->depth || run->rejections)
		return 1;
	w->depth--;
	next = w->stack[w->depth & (MAX_DEPTH - 1)];
	read_vma(r, next.node);
	r->userfaultfd = 0;
	if (bpf_core_field_exists(struct vm_area_struct, vm_userfaultfd_ctx.ctx))
		r->userfaultfd = word_at(&vma_of(next.node)->vm_userfaultfd_ctx.ctx);
	r->pid = pid_of(w, r->mm);
	run->records = i + 1;
	if ((r->parent & ~3UL) != next.parent)
		run->rejections |= FDMAP_REJECTION_EDGE;
	if (!maps_file(w, next.node))
		run->rejections |= FDMAP_REJECTION_OTHER;
	if (is_leaving(next.node, r))
		run->rejections |= FDMAP_REJECTION_LEAVING;
	push(w, run, r->right, next.node);
	push(w, run, r->left, next.node);
	return 0;
}

/* Reads one VMA again, and compares it with its record. */
static long compare_step(__u32 i, void *data)
{
	struct fdmap_mapper_record *r = bpf_map_lookup_elem(&mappers, &i);
	struct fdmap_mapper_run *run = this_run();
	const __u64 kind = VM_SHARED | VM_MAYWRITE;
	struct fdmap_mapper_record *again;
	struct walk *w = this_walk();

	if (!w || !run || !r || run->rejections)
		return 1;
	again = &w->again;
	read_vma(again, r->node);
	run->records = i + 1;
	if ((again->parent ^ r->parent) | (again->left ^ r->left) | (again->right ^ r->right) | (again->start ^ r->start) |
	    (again->end ^ r->end) | (again->page ^ r->page) | (again->mm ^ r->mm) | (again->lock_seq ^ r->lock_seq) |
	    ((again->flags ^ r->flags) & kind))
		run->rejections |= FDMAP_REJECTION_CHANGED;
	if (!maps_file(w, r->node))
		run->rejections |= FDMAP_REJECTION_OTHER;
	if (is_leaving(r->node, r))
		run->rejections |= FDMAP_REJECTION_LEAVING;
	return 0;
}

static __always_inline int writable_of(struct address_space___mapped *mapping)
{
	int count = -1;

	bpf_core_read(&count, sizeof(count), &mapping->i_mmap_writable);
	return count;
}

static __always_inline void check_lock(struct address_space___mapped *mapping, struct fdmap_mapper_run *run)
{
	long count = WRITER_LOCKED;

	bpf_core_read(&count, sizeof(count), &mapping->i_mmap_rwsem.count);
	if (count & WRITER_LOCKED)
		run->rejections |= FDMAP_REJECTION_LOCKED;
}

static __always_inline __u64 root_of(struct address_space___mapped *mapping)
{
	return (__u64)BPF_CORE_READ(mapping, i_mmap.rb_root.rb_node);
}

/* The root of the tree, and the pid namespace of the calling process. Returns enum fdmap_status. */
static __always_inline int begin(struct walk *w, struct fdmap_mapper_run *run, struct address_space___mapped *mapping)
{
	struct task_struct___process *task = (void *)bpf_get_current_task();
	struct pid *pid = BPF_CORE_READ(task, thread_pid);
	struct upid *number;

	if (!pid)
		return FDMAP_STATUS_FAULT;
	w->ns_level = BPF_CORE_READ(pid, level);
	number = (void *)pid + bpf_core_field_offset(pid->numbers) + (w->ns_level & 31) * bpf_core_type_size(struct upid);
	w->ns = (__u64)BPF_CORE_READ(number, ns);
	w->depth = 0;
	w->root = root_of(mapping);
	push(w, run, w->root, 0);
	return FDMAP_STATUS_OK;
}

/* Common part of walk_mappers and compare_mappers. Returns enum fdmap_status. */
static __always_inline int look(__u64 fd, __u32 steps, bool compare, bool resume)
{
	struct address_space___mapped *mapping;
	struct address_space *found = NULL;
	struct fdmap_mapper_run *run = this_run();
	struct walk *w = this_walk();
	int status;

	if (!w || !run)
		return FDMAP_STATUS_FAULT;
	status = find_mapping(fd, &found);
	if (status != FDMAP_STATUS_OK)
		return status;
	mapping = (void *)found;
	if (!bpf_core_field_exists(mapping->i_mmap) || !bpf_core_field_exists(mapping->i_mmap_rwsem.count) ||
	    !bpf_core_field_exists(mapping->i_mmap_writable) || !bpf_core_field_exists(struct vm_area_struct, shared.rb))
		return FDMAP_STATUS_LAYOUT;
	if (!bpf_core_field_exists(struct vm_area_struct___locked, vm_lock_seq))
		return FDMAP_STATUS_NO_VMA_LOCKS;
	w->mapping = (__u64)mapping;
	run->records = run->rejections = 0;
	run->writable_before = writable_of(mapping);
	check_lock(mapping, run);
	if (!resume) {
		status = begin(w, run, mapping);
		if (status != FDMAP_STATUS_OK)
			return status;
	}
	if (compare) {
		bpf_loop(steps, compare_step, NULL, 0);
		if (root_of(mapping) != w->root)
			run->rejections |= FDMAP_REJECTION_CHANGED;
	} else {
		bpf_loop(steps, visit_step, NULL, 0);
	}
	check_lock(mapping, run);
	run->writable_after = writable_of(mapping);
	run->rest = w->depth;
	return FDMAP_STATUS_OK;
}

/* Arguments: descriptor, maximum number of VMAs, 1 to continue the walk of the last run. Returns enum fdmap_status. */
SEC("raw_tp")
int walk_mappers(struct bpf_raw_tracepoint_args *ctx)
{
	return look(ctx->args[0], ctx->args[1], false, ctx->args[2]);
}

/* Compares records with their VMAs. Arguments: descriptor, number of records. Returns enum fdmap_status. */
SEC("raw_tp")
int compare_mappers(struct bpf_raw_tracepoint_args *ctx)
{
	return look(ctx->args[0], ctx->args[1], true, true);
}

static __always_inline int read_private_data(__u64 fd, struct fdmap_mapper_run *run)
{
	struct file___private *private;
	struct file *file = NULL;
	int status;

	run->private_data = 0;
	status = find_file(fd, &file);
	if (status != FDMAP_STATUS_OK)
		return status;
	private = (void *)file;
	if (!bpf_core_field_exists(private->private_data))
		return FDMAP_STATUS_LAYOUT;
	run->private_data = (__u64)BPF_CORE_READ(private, private_data);
	return FDMAP_STATUS_OK;
}

/*
 * Argument: descriptor. Reads private_data of its open file: the context of a userfaultfd, the address space of a
 * /proc/PID/pagemap. Returns enum fdmap_status.
 */
SEC("raw_tp")
int private_data(struct bpf_raw_tracepoint_args *ctx)
{
	struct fdmap_mapper_run *run = this_run();

	return run ? read_private_data(ctx->args[0], run) : FDMAP_STATUS_FAULT;
}

/* Argument: descriptor of a userfaultfd. Reads its address space into private_data. Returns enum fdmap_status. */
SEC("raw_tp")
int userfaultfd_space(struct bpf_raw_tracepoint_args *ctx)
{
	struct fdmap_mapper_run *run = this_run();
	struct userfaultfd_ctx *context;
	int status;

	if (!run)
		return FDMAP_STATUS_FAULT;
	status = read_private_data(ctx->args[0], run);
	if (status != FDMAP_STATUS_OK)
		return status;
	context = (void *)run->private_data;
	if (!bpf_core_field_exists(context->mm))
		return FDMAP_STATUS_LAYOUT;
	run->private_data = (__u64)BPF_CORE_READ(context, mm);
	return FDMAP_STATUS_OK;
}

/*
 * Argument: descriptor of a /proc/PID/pagemap, which keeps the structure of its address space. Reads the size of the page tables.
 * No lock is needed: the kernel counts them atomically. Returns enum fdmap_status.
 */
SEC("raw_tp")
int page_tables(struct bpf_raw_tracepoint_args *ctx)
{
	struct fdmap_mapper_run *run = this_run();
	struct mm_struct___with_tables *mm;
	int status;

	if (!run)
		return FDMAP_STATUS_FAULT;
	run->page_table_bytes = 0;
	status = read_private_data(ctx->args[0], run);
	if (status != FDMAP_STATUS_OK)
		return status;
	mm = (void *)run->private_data;
	if (!bpf_core_field_exists(mm->pgtables_bytes))
		return FDMAP_STATUS_LAYOUT;
	if (!mm ||
	    bpf_core_read(&run->page_table_bytes, sizeof(run->page_table_bytes), &mm->pgtables_bytes.counter))
		return FDMAP_STATUS_FAULT;
	return FDMAP_STATUS_OK;
}
