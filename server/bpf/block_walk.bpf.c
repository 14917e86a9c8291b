// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Walks the page cache XArray of a file of the calling process block by block, and copies as little of it as possible. The service
 * uses it for states and slots. Attributes, hugetlb files, and blocks that this program leaves out are for walk_file
 * (page_state.bpf.c), which copies every leaf twice. Rust decodes the copies (probe/block_decode.rs).
 *
 * Each xa_node counts its used slots (count) and the values among these (nr_values) in its first 8 bytes. (64, 0) is a leaf whose
 * pages are all resident: one load replaces 64. The slots of other leaves are copied once.
 *
 * When counts may be used. The kernel changes a tree only under xa_lock, and stores the slots of a node before its counts (xas_store,
 * update_node). So while a writer holds the lock, slots and counts may disagree, and a copy may hold a part of a change. For each
 * block, this program
 *
 *   1. reads the counts of each leaf, then copies its slots if the counts do not suffice;
 *   2. after a full barrier, requires that the lock is free, else the block is left out;
 *   3. after another full barrier, requires that the counts of each leaf are those of step 1, else the block is left out.
 *
 * Claim: each page had the state that the counts or the copy of its leaf show at a moment during the walk of the block, and no copy
 * shows a part of a change. Proof, for each critical section of xa_lock that changes the leaf:
 *
 *   - A section that begins after step 2 changes neither what step 1 read nor what it copied.
 *   - A section that begins before step 2 has ended in step 2, since the lock is free. Its unlock releases, and a full barrier follows
 *     the load of the lock word, so step 3 reads the counts that this section stored, or later ones.
 *   - So if it changes the counts, it stored them before step 1 read them, else step 3 would find others. Slots precede counts, and
 *     the copy follows the load of the counts: the copy has all of the section's stores.
 *   - If it does not change the counts, it replaces folios by folios, which changes no state, or values by values, or it stores retry
 *     entries (collapse_file), which Rust refuses. The kernel replaces values when it splits a large swap entry
 *     (shmem_split_large_entry): every part of the entry gets the value of the first, then one after another gets its own. Rust refuses
 *     copies in which a value occurs twice in this way, in one leaf (leaf.rs) or in two (block_decode.rs).
 *
 * Two sections, of which the second undoes what the first did to the counts, pass step 3, if both fall between the two loads of the
 * counts: a page was swapped in and another one swapped out. Then the copy may have one page from before both sections and another one
 * from after them: each page had its state at a moment during the walk of the block, not all pages at the same one. A half-stored pair
 * of counts is visible only within a section; to pass, it would have to be read in two sections with the free lock of step 2 between
 * them.
 *
 * The order of the kernel's stores and of these loads is that of x86. The service does not use the program on other processors. The
 * lock word is that of queued spinlocks; where there is none, as with PREEMPT_RT, the program returns FDMAP_STATUS_LAYOUT.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "block_record.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct xa_node___counted {
	unsigned char count;
	unsigned char nr_values;
};
#pragma clang attribute pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_block_record);
} blocks SEC(".maps"); /* resized by the loader */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_slots_copy);
} copies SEC(".maps"); /* resized by the loader */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_blocks_result);
} result SEC(".maps");

/* Steps of one run. A step completes one block, or one slot above the blocks that is empty. */
#define MAX_STEPS 4096

/* The state of a run. volatile: behind a store to memory, the verifier does not follow each value that a bitmap may have. */
static struct {
	__u64 lock; /* address of the lock word */
	__u64 head;
	__u64 head_shift;
	volatile __u64 next; /* the first page that is not walked yet */
	__u64 last;
	volatile __u32 blocks; /* index of the next free record */
	__u32 max_blocks;
	volatile __u32 copies; /* index of the next free copy */
	__u32 max_copies;
	__u32 left_out;
	volatile __u64 barrier;
	/* The bitmaps of the block in progress, and changes that step 3 found. */
	volatile __u64 resident, copied, upper, changed;
	/* The counts of the leaves of a block, as they were read first. */
	__u64 counts[FDMAP_SLOTS];
} run;

#define OFFSET_OF(type, field) __builtin_preserve_field_info(((struct type *)0)->field, BPF_FIELD_BYTE_OFFSET)
/* Counts of a node with 64 folios. */
#define ALL_RESIDENT ((__u64)FDMAP_SLOTS << 8)

static __always_inline __u64 slots_of(__u64 node_entry)
{
	return node_entry - 2 + OFFSET_OF(xa_node, slots);
}

/* count << 8 | nr_values, in one load. */
static __always_inline __u64 counts_of(__u64 node_entry)
{
	__u64 header = word_at((void *)(node_entry - 2));

	return (header >> 8 * OFFSET_OF(xa_node___counted, count) & 0xff) << 8 |
	       (header >> 8 * OFFSET_OF(xa_node___counted, nr_values) & 0xff);
}

static __always_inline void full_barrier(void)
{
	__sync_fetch_and_add(&run.barrier, 1);
}

static __always_inline bool copy_slots(__u64 node_entry)
{
	__u32 index = run.copies;
	struct fdmap_slots_copy *copy = bpf_map_lookup_elem(&copies, &index);

	if (!copy || bpf_probe_read_kernel(copy, sizeof(*copy), (void *)slots_of(node_entry)))
		return false;
	run.copies = index + 1;
	return true;
}

/* Reads the leaves under `slots`. False if a leaf could not be read. */
static __always_inline bool read_leaves(__u64 slots)
{
	run.resident = run.copied = run.upper = 0;
	for (__u32 i = 0; i < FDMAP_SLOTS; i++) {
		__u64 entry = word_at((void *)(slots + i * 8)), counts = 0;

		if (is_node(entry)) {
			counts = counts_of(entry);
			if (counts == ALL_RESIDENT)
				run.resident |= 1ULL << i;
			else if (copy_slots(entry))
				run.copied |= 1ULL << i;
			else
				return false;
		} else if (entry) {
			run.upper |= 1ULL << i;
		}
		run.counts[i] = counts;
	}
	return true;
}

/* Steps 2 and 3 of the rule above. */
static __always_inline bool unchanged(__u64 slots)
{
	full_barrier();
	run.changed = is_locked(run.lock);
	full_barrier();
	for (__u32 i = 0; i < FDMAP_SLOTS; i++) {
		__u64 entry = word_at((void *)(slots + i * 8)), counts = 0;

		if (is_node(entry))
			counts = counts_of(entry);
		run.changed |= run.counts[i] ^ counts;
	}
	return !run.changed;
}

static __always_inline bool read_block(struct fdmap_block_record *record, __u64 node_entry)
{
	if (!read_leaves(slots_of(node_entry)))
		return false;
	/* An empty node is about to be freed, or could not be read. */
	if (!(run.resident | run.copied | run.upper))
		return false;
	record->resident = run.resident;
	record->copied = run.copied;
	record->upper = run.upper;
	if (record->upper && !copy_slots(node_entry))
		return false;
	if (!unchanged(slots_of(node_entry)))
		return false;
	/* Behind step 2: equal to the first copy unless a change overlaps with that. */
	return !record->upper || copy_slots(node_entry);
}

/* Walks one block, or skips one empty slot above the blocks. */
static long block_step(__u32 nr, void *unused)
{
	__u64 next = run.next, entry = run.head, shift = run.head_shift, span = 64;
	__u32 index = run.blocks;
	struct fdmap_block_record *record;

	if (next > run.last || index >= run.max_blocks || run.max_copies - run.copies < FDMAP_BLOCK_COPIES)
		return 1;
	for (int level = 0; level < MAX_LEVELS && is_node(entry) && shift > FDMAP_SHIFT; level++) {
		span = shift & 63;
		entry = word_at((void *)(slots_of(entry) + (next >> span & (FDMAP_SLOTS - 1)) * 8));
		shift -= FDMAP_SHIFT;
	}
	if (!entry) {
		run.next = (next >> (span & 63) << (span & 63)) + (1ULL << (span & 63));
		return 0;
	}
	record = bpf_map_lookup_elem(&blocks, &index);
	if (!record)
		return 1;
	record->first = next;
	record->start = run.copies;
	record->careful = 1;
	if (is_node(entry) && read_block(record, entry)) {
		record->careful = 0;
	} else {
		run.copies = record->start;
		run.left_out++;
	}
	run.blocks = index + 1;
	run.next = next + (1 << (2 * FDMAP_SHIFT));
	return 0;
}

static __always_inline int check_layout(void)
{
	int status = check_nodes();

	if (status != FDMAP_STATUS_OK)
		return status;
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
	return FDMAP_STATUS_LAYOUT;
#endif
	if (!has_lock_word() || !bpf_core_field_exists(((struct xa_node___counted *)0)->count) ||
	    !bpf_core_field_exists(((struct xa_node___counted *)0)->nr_values) ||
	    OFFSET_OF(xa_node___counted, count) > 7 || OFFSET_OF(xa_node___counted, nr_values) > 7)
		return FDMAP_STATUS_LAYOUT;
	return FDMAP_STATUS_OK;
}

/*
 * Arguments: descriptor, first page (of a block), last page, number of block records, number of copies. Returns enum fdmap_status.
 */
SEC("raw_tp")
int walk_blocks(struct bpf_raw_tracepoint_args *ctx)
{
	struct address_space *mapping = NULL;
	struct fdmap_blocks_result *r;
	__u32 zero = 0;
	int status;

	r = bpf_map_lookup_elem(&result, &zero);
	if (!r)
		return FDMAP_STATUS_FAULT;
	r->blocks = 0;
	r->copies = 0;
	r->left_out = 0;
	r->small = 0;
	r->next = ctx->args[1];
	status = check_layout();
	if (status == FDMAP_STATUS_OK)
		status = find_mapping(ctx->args[0], &mapping);
	if (status != FDMAP_STATUS_OK)
		return status;

	run.next = ctx->args[1];
	run.last = ctx->args[2];
	run.blocks = 0;
	run.max_blocks = ctx->args[3];
	run.copies = 0;
	run.left_out = 0;
	run.max_copies = ctx->args[4];
	run.lock = lock_word_of(mapping);
	run.head = (__u64)BPF_CORE_READ(mapping, i_pages.xa_head);
	run.head_shift = 0;
	if (is_node(run.head)) {
		struct xa_node *node = (void *)(run.head - 2);
		unsigned char shift = 0;

		if (bpf_core_read(&shift, sizeof(shift), &node->shift))
			return FDMAP_STATUS_FAULT;
		run.head_shift = shift;
		/* Pages beyond the range of the head are holes: there is nothing to walk. */
		if (shift + FDMAP_SHIFT < 64) {
			__u64 pages = 1ULL << ((shift + FDMAP_SHIFT) & 63);

			if (run.last >= pages)
				run.last = pages - 1;
		}
	}
	if (run.head && !run.head_shift) {
		r->small = 1;
		return FDMAP_STATUS_OK;
	}
	if (run.head)
		bpf_loop(MAX_STEPS, block_step, NULL, 0);
	else
		run.next = run.last + 1;
	/* If all pages under the head were walked, then so were all requested pages. */
	r->next = run.next > run.last ? ctx->args[2] + 1 : run.next;
	r->blocks = run.blocks;
	r->copies = run.copies;
	r->left_out = run.left_out;
	return FDMAP_STATUS_OK;
}
