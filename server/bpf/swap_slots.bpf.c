// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Reads the kernel's swap areas, and for swap slots whether their content is on the device: slots of zero-filled pages are marked
 * instead of written (since Linux 6.12), and a slot with a folio in the swap cache may not be written yet.
 *
 * None of the programs is ever attached. read_symbols and read_operations run once, when the service starts. read_areas and
 * read_slots are raw tracepoint programs that run on demand (BPF_PROG_TEST_RUN). A run holds the RCU read lock and must be short: the caller bounds
 * the number of slots.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "swap_record.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

/* Symbols that the service looks for by name. */
#define SYMBOLS 3
/* Functions of /proc/swaps: the first and the next area. */
#define OPERATIONS 2
/* Swap types: 5 bits, of which the last is SWP_PTE_MARKER. */
#define SWAP_TYPES 31
#define TYPE_SHIFT 58
#define SWP_USED 1 /* linux/swap.h */
#define SWAP_HAS_CACHE 0x40 /* linux/swap.h */
#define SWAP_MAP_BAD 0x3f /* linux/swap.h */

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct block_device {
	__u32 bd_dev;
};
struct inode {
	unsigned long i_ino;
};
struct file___of_area {
	struct inode *f_inode;
};
struct seq_operations {
	void *start;
	void *next;
};
struct seq_file {
	struct seq_operations *op;
};
struct file___of_proc {
	struct seq_file *private_data;
};
struct word { /* atomic_long_t */
	long counter;
};
struct swap_table { /* since 6.18 */
	struct word entries[1];
};
struct swap_cluster_info {
	void *table; /* since 6.18 */
};
struct swap_info_struct {
	unsigned long flags;
	signed char type;
	unsigned int max;
	unsigned int pages;
	unsigned char *swap_map; /* until the counts moved to the table */
	unsigned long *zeromap;  /* since 6.12, until the marks moved to the table */
	struct swap_cluster_info *cluster_info;
	struct block_device *bdev;
	struct file___of_area *swap_file;
};
#pragma clang attribute pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SYMBOLS + OPERATIONS);
	__type(key, __u32);
	__type(value, struct fdmap_symbol_record);
} symbols SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SWAP_TYPES);
	__type(key, __u32);
	__type(value, struct fdmap_area_record);
} areas SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_slot_record);
} slots SEC(".maps"); /* resized by the loader */

/* Finds symbols, as far as the process may know addresses, and copies the first bytes of functions. Returns enum fdmap_status. */
SEC("syscall")
int read_symbols(void *unused)
{
	__u32 i;

	for (i = 0; i < SYMBOLS; i++) {
		__u32 index = i;
		struct fdmap_symbol_record *r = bpf_map_lookup_elem(&symbols, &index);

		if (!r)
			return FDMAP_STATUS_FAULT;
		r->address = 0;
		r->copied = 0;
		if (bpf_kallsyms_lookup_name(r->name, sizeof(r->name), 0, &r->address) || !r->address)
			continue;
		r->copied = !bpf_probe_read_kernel(r->text, sizeof(r->text), (void *)r->address);
	}
	return FDMAP_STATUS_OK;
}

static __always_inline void copy_function(__u32 index, void *address)
{
	struct fdmap_symbol_record *r = bpf_map_lookup_elem(&symbols, &index);

	if (!r)
		return;
	r->address = (__u64)address;
	r->copied = address && !bpf_probe_read_kernel(r->text, sizeof(r->text), address);
}

/* Argument: descriptor of /proc/swaps. Copies the first bytes of its functions. Returns enum fdmap_status. */
SEC("raw_tp")
int read_operations(struct bpf_raw_tracepoint_args *ctx)
{
	struct file___of_proc *swaps = NULL;
	struct seq_operations *op = NULL;
	struct file *file = NULL;
	int status = find_file(ctx->args[0], &file);

	if (status != FDMAP_STATUS_OK)
		return status;
	swaps = (void *)file;
	if (!bpf_core_field_exists(swaps->private_data) || !bpf_core_field_exists(struct seq_file, op) ||
	    !bpf_core_field_exists(op->start) || !bpf_core_field_exists(op->next))
		return FDMAP_STATUS_LAYOUT;
	op = BPF_CORE_READ(swaps, private_data, op);
	copy_function(SYMBOLS, op ? BPF_CORE_READ(op, start) : NULL);
	copy_function(SYMBOLS + 1, op ? BPF_CORE_READ(op, next) : NULL);
	return FDMAP_STATUS_OK;
}

/* The size of a field is that of this program's declaration. */
#define SAME_SIZE(field) (bpf_core_field_exists(field) && bpf_core_field_size(field) == sizeof(field))

static __always_inline bool knows_areas(struct swap_info_struct *si)
{
	return SAME_SIZE(si->flags) && SAME_SIZE(si->type) && SAME_SIZE(si->max) && SAME_SIZE(si->pages) &&
	       bpf_core_field_exists(si->bdev) && bpf_core_field_exists(si->swap_file);
}

/*
 * Finds the area of a swap type. An entry of an area that was switched off stays, without SWP_USED. One that swapon(2) prepares has
 * SWP_USED, but no swap_map yet: /proc/swaps does not list it either (swap_start in mm/swapfile.c).
 */
static __always_inline struct swap_info_struct *area_of_type(__u64 swap_info, __u64 type)
{
	struct swap_info_struct *si = NULL;
	signed char its_type = -1;

	if (bpf_probe_read_kernel(&si, sizeof(si), (void *)(swap_info + type * sizeof(si))) || !si)
		return NULL;
	if (bpf_core_read(&its_type, sizeof(its_type), &si->type) || its_type != (signed char)type)
		return NULL;
	if (!(BPF_CORE_READ(si, flags) & SWP_USED))
		return NULL;
	if (bpf_core_field_exists(si->swap_map) && !BPF_CORE_READ(si, swap_map))
		return NULL;
	return si;
}

/* Argument: address of swap_info. Returns enum fdmap_status. */
SEC("raw_tp")
int read_areas(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 swap_info = ctx->args[0];
	__u32 type;

	if (!knows_areas(NULL))
		return FDMAP_STATUS_LAYOUT;
	for (type = 0; type < SWAP_TYPES; type++) {
		__u32 index = type;
		struct fdmap_area_record *r = bpf_map_lookup_elem(&areas, &index);
		struct swap_info_struct *si = area_of_type(swap_info, type);
		struct block_device *bdev;

		if (!r)
			return FDMAP_STATUS_FAULT;
		r->flags = 0;
		if (!si)
			continue;
		r->flags = BPF_CORE_READ(si, flags);
		r->pages = BPF_CORE_READ(si, pages);
		r->inode = BPF_CORE_READ(si, swap_file, f_inode, i_ino);
		bdev = BPF_CORE_READ(si, bdev);
		r->device = bdev ? BPF_CORE_READ(bdev, bd_dev) : 0;
	}
	return FDMAP_STATUS_OK;
}

/* The area of the last slot, and the tables that it has. */
struct area {
	__u64 swap_info;
	__u64 type; /* SWAP_TYPES: none */
	__u64 max;  /* 0: slots of this type are unknown */
	__u64 swap_map;
	__u64 clusters;
	__u64 zeromap;
};

static __always_inline bool has_tables(void)
{
	return bpf_core_field_exists(struct swap_cluster_info, table) && bpf_core_type_exists(struct swap_table);
}

/*
 * Both where the swap cache is and where zero marks are must be known. Marks: a bitmap since 6.12. Kernels with neither a bitmap
 * nor swap tables are older and have no marks; later ones keep them in the tables.
 */
static __always_inline bool knows_slots(struct swap_info_struct *si)
{
	if (bpf_core_field_exists(struct swap_cluster_info, table) && !has_tables())
		return false;
	if (bpf_core_field_exists(si->zeromap))
		return bpf_core_field_exists(si->swap_map) || has_tables();
	return bpf_core_field_exists(si->swap_map) && !has_tables();
}

static __always_inline void load_area(struct area *area, __u64 type)
{
	struct swap_info_struct *si = area_of_type(area->swap_info, type);

	area->type = type;
	area->max = 0;
	if (!si)
		return;
	area->swap_map = 0;
	area->clusters = 0;
	area->zeromap = 0;
	if (bpf_core_field_exists(si->swap_map)) {
		area->swap_map = (__u64)BPF_CORE_READ(si, swap_map);
		if (!area->swap_map)
			return;
	}
	if (has_tables()) {
		area->clusters = (__u64)BPF_CORE_READ(si, cluster_info);
		if (!area->clusters)
			return;
	}
	if (bpf_core_field_exists(si->zeromap)) {
		area->zeromap = (__u64)BPF_CORE_READ(si, zeromap);
		if (!area->zeromap)
			return;
	}
	area->max = BPF_CORE_READ(si, max);
}

/*
 * True if the slot is in use and no folio in the swap cache has it. Then its content was written or marked: a folio that is swapped
 * out stays in the swap cache until that is done.
 */
static __always_inline bool is_settled(struct area *area, __u64 offset)
{
	if (area->swap_map) {
		__u8 count = 0;

		if (bpf_probe_read_kernel(&count, sizeof(count), (void *)(area->swap_map + offset)) || !count ||
		    count == SWAP_MAP_BAD || count & SWAP_HAS_CACHE)
			return false;
	}
	if (area->clusters) {
		__u64 entries = bpf_core_type_size(struct swap_table) / sizeof(struct word);
		struct swap_cluster_info *cluster;
		__u64 table = 0, entry = 0;

		if (!entries)
			return false;
		cluster = (void *)(area->clusters + offset / entries * bpf_core_type_size(struct swap_cluster_info));
		if (bpf_core_read(&table, sizeof(table), &cluster->table) || !table)
			return false;
		if (bpf_probe_read_kernel(&entry, sizeof(entry), (void *)(table + offset % entries * sizeof(entry))))
			return false;
		/* Bit 0: the shadow of a folio that left the cache. Without a swap_map, slots in use have one. */
		if (!(entry & 1) && (entry || !area->swap_map))
			return false;
	}
	return true;
}

static long slot_step(__u32 i, void *data)
{
	struct fdmap_slot_record *r = bpf_map_lookup_elem(&slots, &i);
	struct area *area = data;
	__u64 offset, type, marks = 0;

	if (!r)
		return 1;
	r->content = FDMAP_SLOT_UNKNOWN;
	type = r->slot >> TYPE_SHIFT;
	offset = r->slot & ((1ULL << TYPE_SHIFT) - 1);
	if (type >= SWAP_TYPES)
		return 0;
	if (type != area->type)
		load_area(area, type);
	if (!offset || offset >= area->max || !is_settled(area, offset))
		return 0;
	if (area->zeromap &&
	    bpf_probe_read_kernel(&marks, sizeof(marks), (void *)(area->zeromap + offset / 64 * sizeof(marks))))
		return 0;
	r->content = marks >> (offset & 63) & 1 ? FDMAP_SLOT_ZERO : FDMAP_SLOT_DEVICE;
	return 0;
}

/* Arguments: address of swap_info, number of slots. Returns enum fdmap_status. */
SEC("raw_tp")
int read_slots(struct bpf_raw_tracepoint_args *ctx)
{
	struct area area = { .swap_info = ctx->args[0], .type = SWAP_TYPES };

	if (!knows_areas(NULL) || !knows_slots(NULL))
		return FDMAP_STATUS_LAYOUT;
	bpf_loop(ctx->args[1], slot_step, &area, 0);
	return FDMAP_STATUS_OK;
}
