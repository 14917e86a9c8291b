/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * What the BPF programs know of the kernel's structures: the fields that are used, and what entries of an XArray are.
 * The fields' places are relocated when a program is loaded (CO-RE); a type behind ___ is the same one of another kernel.
 */
#ifndef FDMAP_KERNEL_H
#define FDMAP_KERNEL_H

/* Slots of an XArray node: XA_CHUNK_SIZE of linux/xarray.h without CONFIG_BASE_SMALL. */
#define FDMAP_SLOTS 64
#define FDMAP_SHIFT 6
/* 64 bits of index, 6 a level. */
#define MAX_LEVELS 11

#define FDMAP_STATUS_OK 0
#define FDMAP_STATUS_BAD_FD 1 /* no such descriptor in the calling process */
#define FDMAP_STATUS_FAULT 2  /* the file's structures could not be read */
#define FDMAP_STATUS_LAYOUT 3 /* this kernel's structures are not as expected */

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct xarray {
	void *xa_head;
};
struct xa_node {
	unsigned char shift;
	void *slots[FDMAP_SLOTS];
};
struct counter { /* atomic_t; what a member's type is called is not compared */
	int counter;
};
struct address_space {
	struct xarray i_pages;
	struct counter i_mmap_writable;
};
struct file {
	struct address_space *f_mapping;
};
struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};
struct files_struct {
	struct fdtable *fdt;
};
struct task_struct {
	struct files_struct *files;
};
struct page {
	struct counter _mapcount;
	struct counter _refcount;
};
struct memdesc_flags { /* memdesc_flags_t */
	unsigned long f;
};
struct page___with_memdesc_flags { /* since 6.18 */
	struct memdesc_flags flags;
};
struct page___with_plain_flags {
	unsigned long flags;
};
struct folio {
	struct counter _entire_mapcount;
	struct counter _pincount;
	struct counter _large_mapcount;
	unsigned int _nr_pages; /* since 6.15 */
};
struct folio___with_prefix {
	unsigned int _folio_nr_pages;
};
enum pageflags { PG_lru = 5, PG_head = 6 };
#pragma clang attribute pop

/* Internal entries (low bits 10) above 4096 are nodes: linux/xarray.h, xa_is_node(). */
static __always_inline bool is_node(__u64 entry)
{
	return (entry & 3) == 2 && entry > 4096;
}

static __always_inline bool is_folio(__u64 entry)
{
	return entry && !(entry & 3);
}

/* xa_is_sibling(): an internal entry that holds the slot of the entry it belongs to. */
static __always_inline bool is_sibling(__u64 entry)
{
	return (entry & 3) == 2 && entry < ((FDMAP_SLOTS - 1) << 2 | 2);
}

/* A struct page as it is in memory: 64 bytes and more, of which no field that is used lies beyond. */
#define PAGE_BYTES 64

/* The word of struct page that holds the field, out of a copy; nothing if the field lies elsewhere than expected. */
#define FIELD_OF(copy, field, type, to, bit)                                                        \
	do {                                                                                         \
		if (bpf_core_field_exists(field) &&                                                  \
		    __builtin_preserve_field_info(field, BPF_FIELD_BYTE_OFFSET) + sizeof(type) <= PAGE_BYTES) { \
			to = *(type *)((char *)(copy) +                                              \
				       __builtin_preserve_field_info(field, BPF_FIELD_BYTE_OFFSET)); \
			known |= (bit);                                                              \
		}                                                                                    \
	} while (0)

/* A kernel pointer that can be followed by plain loads, each of which reads 0 where there is no memory (since 6.2). */
extern void *bpf_rdonly_cast(const void *address, __u32 type) __ksym __weak;

struct timespec64 { /* a structure of any kernel that begins with a 64-bit number */
	long long tv_sec;
} __attribute__((preserve_access_index));

/* Reads 64 bits of the kernel's memory, at once. A plain load costs a twentieth of a call of a helper. */
static __always_inline bool read_word(__u64 *to, const void *address)
{
	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		struct timespec64 *word = bpf_rdonly_cast(address, bpf_core_type_id_kernel(struct timespec64));

		*to = *(volatile long long *)&word->tv_sec;
		return true;
	}
	return !bpf_probe_read_kernel(to, sizeof(*to), address);
}

/* The page cache of the file that is open as fd in the calling process. Gives FDMAP_STATUS_*. */
static __always_inline int find_mapping(__u64 fd, struct address_space **mapping)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct fdtable *fdt = BPF_CORE_READ(task, files, fdt);
	struct file **table = BPF_CORE_READ(fdt, fd);
	struct file *file = NULL;

	if (!table)
		return FDMAP_STATUS_FAULT;
	if (fd >= BPF_CORE_READ(fdt, max_fds))
		return FDMAP_STATUS_BAD_FD;
	if (bpf_probe_read_kernel(&file, sizeof(file), table + fd))
		return FDMAP_STATUS_FAULT;
	if (!file)
		return FDMAP_STATUS_BAD_FD;
	*mapping = BPF_CORE_READ(file, f_mapping);
	return *mapping ? FDMAP_STATUS_OK : FDMAP_STATUS_FAULT;
}

#endif
