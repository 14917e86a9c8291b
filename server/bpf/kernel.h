/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The kernel structures that the BPF programs read, reduced to the used fields, and the encoding of XArray entries. libbpf
 * relocates the field offsets when it loads a program (CO-RE). A type with a ___ suffix is a variant of the same structure.
 */
#ifndef FDMAP_KERNEL_H
#define FDMAP_KERNEL_H

/* Slots of an XArray node: XA_CHUNK_SIZE of linux/xarray.h without CONFIG_BASE_SMALL. */
#define FDMAP_SLOTS 64
#define FDMAP_SHIFT 6
/* With CONFIG_BASE_SMALL. */
#define FDMAP_SMALL_SLOTS 16
/* Levels of an XArray: 64 bits of index, 6 bits a level. */
#define MAX_LEVELS 11

/* Results of the programs that run on demand. */
enum fdmap_status {
	FDMAP_STATUS_OK,
	FDMAP_STATUS_BAD_FD,  /* the calling process has no such descriptor */
	FDMAP_STATUS_FAULT,   /* a structure of the file could not be read */
	FDMAP_STATUS_LAYOUT,  /* this kernel's structures have an unexpected layout */
	FDMAP_STATUS_TWICE,   /* follow, unfollow: the file is already followed, or is not followed */
	FDMAP_STATUS_FULL,    /* follow: the maximum number of files is followed */
	FDMAP_STATUS_NO_VMA_LOCKS, /* walk_mappers: there are no per-VMA locks (CONFIG_PER_VMA_LOCK, since Linux 6.4) */
	FDMAP_STATUS_SMALL_NODES, /* XArray nodes have 16 slots: CONFIG_BASE_SMALL */
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct xarray {
	void *xa_head;
};
struct xa_node {
	unsigned char shift;
	void *slots[FDMAP_SLOTS];
};
struct counter { /* atomic_t; CO-RE does not compare the type names of members */
	int counter;
};
struct qspinlock {
	struct counter val;
};
struct raw_spinlock {
	struct qspinlock raw_lock;
};
struct spinlock {
	struct raw_spinlock rlock;
};
struct xarray___locked {
	struct spinlock xa_lock;
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

/* xa_is_node() of linux/xarray.h: internal entries (low bits 10) above 4096 are nodes. */
static __always_inline bool is_node(__u64 entry)
{
	return (entry & 3) == 2 && entry > 4096;
}

static __always_inline bool is_folio(__u64 entry)
{
	return entry && !(entry & 3);
}

/* xa_is_sibling(): an internal entry that holds the slot number of its canonical entry. */
static __always_inline bool is_sibling(__u64 entry)
{
	return (entry & 3) == 2 && entry < ((FDMAP_SLOTS - 1) << 2 | 2);
}

/* Bytes of a struct page that are copied. All used fields lie in the first 64 bytes. */
#define PAGE_BYTES 64

/* Reads the field from a copy of struct page and sets the bit in known. Does nothing if the field lies outside of the copy. */
#define FIELD_OF(copy, field, type, to, bit)                                                        \
	do {                                                                                         \
		if (bpf_core_field_exists(field) &&                                                  \
		    __builtin_preserve_field_info(field, BPF_FIELD_BYTE_OFFSET) + sizeof(type) <= PAGE_BYTES) { \
			to = *(type *)((char *)(copy) +                                              \
				       __builtin_preserve_field_info(field, BPF_FIELD_BYTE_OFFSET)); \
			known |= (bit);                                                              \
		}                                                                                    \
	} while (0)

/* Returns a kernel pointer that plain loads can dereference. A load from an unmapped address returns 0. Since 6.2. */
extern void *bpf_rdonly_cast(const void *address, __u32 type) __ksym __weak;

struct timespec64 { /* exists in all kernels and begins with a 64-bit integer */
	long long tv_sec;
} __attribute__((preserve_access_index));

/* Reads 64 bits of kernel memory in one access. A plain load costs a twentieth of a helper call. */
static __always_inline bool read_word(__u64 *to, const void *address)
{
	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		struct timespec64 *word = bpf_rdonly_cast(address, bpf_core_type_id_kernel(struct timespec64));

		*to = *(volatile long long *)&word->tv_sec;
		return true;
	}
	return !bpf_probe_read_kernel(to, sizeof(*to), address);
}

/* The 64 bits at an address of the kernel; 0 if they cannot be read. */
static __always_inline __u64 word_at(const void *address)
{
	__u64 word = 0;

	read_word(&word, address);
	return word;
}

/* False where spinlocks are not queued spinlocks, as with PREEMPT_RT or a single processor. */
static __always_inline bool has_lock_word(void)
{
	return bpf_core_field_exists(((struct xarray___locked *)0)->xa_lock.rlock.raw_lock.val.counter);
}

/* The address of the lock word of xa_lock. Needs has_lock_word(). */
static __always_inline __u64 lock_word_of(struct address_space *mapping)
{
	return (__u64)&((struct xarray___locked *)&mapping->i_pages)->xa_lock.rlock.raw_lock.val.counter;
}

/* True while the lock is held: the lowest byte of a queued spinlock. */
static __always_inline bool is_locked(__u64 lock_word)
{
	return (__u8)word_at((void *)lock_word);
}

/* Checks the number of slots of an XArray node. Returns enum fdmap_status. */
static __always_inline int check_nodes(void)
{
	__u32 bytes = bpf_core_field_size(((struct xa_node *)0)->slots);

	if (bytes == FDMAP_SLOTS * sizeof(void *))
		return FDMAP_STATUS_OK;
	return bytes == FDMAP_SMALL_SLOTS * sizeof(void *) ? FDMAP_STATUS_SMALL_NODES : FDMAP_STATUS_LAYOUT;
}

/* Finds the open file behind descriptor fd of the calling process. Returns enum fdmap_status. */
static __always_inline int find_file(__u64 fd, struct file **file)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct fdtable *fdt = BPF_CORE_READ(task, files, fdt);
	struct file **table = BPF_CORE_READ(fdt, fd);

	if (!table)
		return FDMAP_STATUS_FAULT;
	if (fd >= BPF_CORE_READ(fdt, max_fds))
		return FDMAP_STATUS_BAD_FD;
	if (bpf_probe_read_kernel(file, sizeof(*file), table + fd))
		return FDMAP_STATUS_FAULT;
	return *file ? FDMAP_STATUS_OK : FDMAP_STATUS_BAD_FD;
}

/* Finds the page cache of the file behind descriptor fd of the calling process. Returns enum fdmap_status. */
static __always_inline int find_mapping(__u64 fd, struct address_space **mapping)
{
	struct file *file = NULL;
	int status = find_file(fd, &file);

	if (status != FDMAP_STATUS_OK)
		return status;
	*mapping = BPF_CORE_READ(file, f_mapping);
	return *mapping ? FDMAP_STATUS_OK : FDMAP_STATUS_FAULT;
}

#endif
